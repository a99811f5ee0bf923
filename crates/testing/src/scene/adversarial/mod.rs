//! The scenes in which mutants of a kernel are run, chosen so that no wrong kernel passes them all.
//!
//! Each scene exercises something that no other one shows: thread blocks that process several
//! tiles, tiles of one key block, of two, or of as many as there are stages, full and partial key
//! blocks, thread blocks without a tile, row maxima that rise late. The smallest scene comes first,
//! since it detects most mutants. The files are by kernel family.

mod backward;
mod cache;
mod decode;
mod forward;
mod mma;
mod prefill;
mod sequencer;

use kernels::Configuration;

use super::companion::main_kernel;
use super::{
    AppendSize, Call, KeyMagnitudes, PlacementKind, Ragged, Scene, SceneError, backward_launch,
};

impl Scene {
    /// Returns the scenes in which mutants of a kernel are run, the smallest first. A family
    /// without scenes of its own gets its small one only.
    pub fn adversarial(kernel: &Configuration) -> Result<Vec<Scene>, SceneError> {
        let small = Scene::small(kernel)?;
        let more = match kernel {
            Configuration::Forward(it) => scenes(forward::calls(it)),
            Configuration::Prefill(it) => scenes(prefill::calls(it)),
            Configuration::Mma(it) => scenes(mma::calls(it)),
            Configuration::Decode(it) => scenes(decode::calls(it)),
            Configuration::Append(it) => cache::append(it),
            Configuration::Combine(it) => {
                // More parts than a warp has lanes; a single part; more rows than a thread block
                // takes.
                let sizes = [([1, 3, 2], 70), ([2, 19, 3], 1), ([1, 5, 1], 33), ([2, 7, 3], 5)];
                sizes.into_iter().map(|(size, parts)| Scene::combine(*it, size, parts)).collect()
            }
            Configuration::Sequencer(it) => sequencer::scenes(it),
            Configuration::Backward(it) => {
                let tile = [it.query_block, it.key_block()];
                scenes(backward::calls(*kernel, tile, it.head_dim, (it.rules.mask, it.batch)))
            }
            Configuration::BackwardMma(it) => {
                let tile = [it.query_block, it.key_block()];
                scenes(backward::calls(*kernel, tile, it.head_dim, (it.rules.mask, it.batch)))
            }
            // Pages that end within a block and at its end; more than one sequence and head.
            Configuration::Widen(it) => cache::widen(it),
            Configuration::RowSums(it) if it.shares.is_some() => {
                let before = main_kernel(kernel);
                let shares = Call::for_shares(before, it.sums.query_block as usize);
                let shares = shares.map(|call| call.with_lse_gradient(it.lse_gradient));
                shares.map(|call| call.scene_of(backward_launch(it.batch, 0))).collect()
            }
            // Rows without keys, several sequences and heads.
            Configuration::RowSums(it) if it.lse_gradient => {
                let before = main_kernel(kernel);
                let rows = it.sums.query_block as usize + 3;
                let calls = [[rows, rows - 8], [1, 9]].map(|it| Call::new(before, 2, it, [4, 2]));
                let calls = calls.map(|call| call.with_lse_gradient(true));
                calls.map(|call| call.scene_of(backward_launch(it.batch, 0))).into_iter().collect()
            }
            // Query lengths that end in each round of stores.
            Configuration::Rounding(it) => {
                let (after, ends) = (main_kernel(kernel), (2..64).step_by(4));
                let ends = ends.map(|queries| Call::for_companion(after, queries));
                let shares = Call::for_shares(after, it.sums.query_block as usize);
                let shares = shares.filter(|_| it.shares.is_some());
                let launch = backward_launch(it.batch, 2);
                ends.chain(shares).map(|call| call.scene_of(launch)).collect()
            }
            Configuration::SinkGradients(it) => {
                // More row blocks than one round takes, of several sequences; rows without keys.
                let after = main_kernel(kernel);
                // Few rows, so that each contributes visibly to the sum; rows for all warps; rows
                // of a second round.
                let few = [(1, [1, 1]), (1, [8, 7]), (1, [5, 3]), (1, [6, 3]), (2, [9, 11])];
                let many = [(1, [70, 66]), (8, [66, 66]), (1, [1100, 60]), (3, [700, 40])];
                let sizes = few.into_iter().chain(many);
                let calls = sizes.map(|(batch, lengths)| Call::new(after, batch, lengths, [2, 1]));
                let calls = calls.map(|call| Call { hostile: !it.lse_gradient, ..call });
                let launch = backward_launch(it.batch, 3);
                calls.map(|call| call.with_lse_gradient(it.lse_gradient).scene_of(launch)).collect()
            }
            _ => Ok(Vec::new()),
        };
        Ok([small].into_iter().chain(more?).collect())
    }
}

/// The softcap of scenes whose keys have unequal magnitudes: a lower cap would level the scores,
/// and a higher one would cost them too many digits.
const HIGH_CAP: f32 = 200.0;

/// Makes scenes of calls, with [`HIGH_CAP`] where magnitudes differ and scores are capped.
fn scenes(calls: Vec<Call>) -> Result<Vec<Scene>, SceneError> {
    let uncapped = |mut call: Call| {
        if call.key_magnitudes != KeyMagnitudes::Uniform && call.problem.scores.softcap.is_some() {
            call.problem.scores.softcap = Some(HIGH_CAP);
        }
        call.scene()
    };
    calls.into_iter().map(uncapped).collect()
}

/// Returns the periods with which small and large keys alternate
/// ([`KeyMagnitudes::Alternating`]), from neighbouring columns of a lane up to whole key blocks.
fn alternation_periods(block: usize) -> impl Iterator<Item = usize> {
    [1, 2, 4, 8, 16].into_iter().filter(move |of| *of < block).chain([block])
}

/// Returns numbers of keys that end at each of the columns that a lane has in the second key block.
fn second_block_ends(block: usize) -> impl Iterator<Item = usize> {
    (block..2 * block).filter(|keys| keys % 8 < 2)
}

#[cfg(test)]
mod tests {
    use kernels::Batch;
    use ptx::Target;

    use super::*;

    /// The launch under test is that of the kernel, also where a batch has one more before it.
    #[test]
    fn companions_of_the_backward_pass_are_the_launch_under_test() {
        let mut ragged = [false; 2];
        for kernel in kernels::shipped(Target::SM_90A) {
            let (family, batch) = match kernel {
                Configuration::Rounding(it) => (0, it.batch),
                Configuration::SinkGradients(it) => (1, it.batch),
                _ => continue,
            };
            if batch == Batch::Equal || ragged[family] {
                continue;
            }
            ragged[family] = true;
            let program = kernel.program().unwrap();
            for scene in Scene::adversarial(&kernel).unwrap() {
                assert_eq!(scene.program.name, program.name);
            }
        }
        assert_eq!(ragged, [true; 2]);
    }
}
