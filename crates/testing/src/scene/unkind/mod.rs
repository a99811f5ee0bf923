//! The scenes of a kernel that leave a mutant no place to hide.
//!
//! Each is there for something that can be wrong and shows nowhere else: blocks that go through
//! several tiles, tiles of one, two or as many blocks of keys as there are stages, whole blocks and
//! ragged ones, blocks of threads with nothing to do, maxima that rise late. The smallest is first:
//! most mutants fall there.

mod backward;
mod cache;
mod decode;
mod forward;
mod mma;
mod prefill;
mod sequencer;

use kernels::Configuration;

use super::{AppendSize, Call, Place, Ragged, Scene, SceneError, Weights};

impl Scene {
    /// Every scene that a mutant of a kernel is shown, the smallest first. A family that has none
    /// of its own gets its small one.
    pub fn unkind(kernel: &Configuration) -> Result<Vec<Scene>, SceneError> {
        let small = Scene::small(kernel)?;
        let more = match kernel {
            Configuration::Forward(it) => scenes(forward::calls(it)),
            Configuration::Prefill(it) => scenes(prefill::calls(it)),
            Configuration::Mma(it) => scenes(mma::calls(it)),
            Configuration::Decode(it) => scenes(decode::calls(it)),
            Configuration::Append(it) => cache::append(it),
            Configuration::Combine(it) => {
                // More parts than a warp has lanes; one; more rows than a block takes.
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
            // Pages that end within a block and at its end; more sequences and heads.
            Configuration::Widen(it) => cache::widen(it),
            // Queries that end in every round of stores.
            Configuration::Rounding(it) => {
                let (after, ends) = (it.after().unwrap_or(*kernel), (2..64).step_by(4));
                ends.map(|queries| Call::beside(after, queries).scene_of(2)).collect()
            }
            Configuration::SinkGradients(it) => {
                // More blocks of rows than one round takes, of several sequences; rows without keys.
                let after = it.after().unwrap_or(*kernel);
                // Few rows, so that each of them weighs; all warps; rows of another round.
                let few = [(1, [1, 1]), (1, [8, 7]), (1, [5, 3]), (1, [6, 3]), (2, [9, 11])];
                let many = [(1, [70, 66]), (8, [66, 66]), (1, [1100, 60]), (3, [700, 40])];
                let sizes = few.into_iter().chain(many);
                let calls = sizes.map(|(batch, lengths)| Call::new(after, batch, lengths, [2, 1]));
                calls.map(|call| Call { hostile: true, ..call }.scene_of(3)).collect()
            }
            _ => Ok(Vec::new()),
        };
        Ok([small].into_iter().chain(more?).collect())
    }
}

/// What scores are capped at where keys weigh more than others: a low cap would make them alike, and a
/// higher one would take too many digits of them.
const HIGH_CAP: f32 = 200.0;

fn scenes(calls: Vec<Call>) -> Result<Vec<Scene>, SceneError> {
    let uncapped = |mut call: Call| {
        if call.weights != Weights::Even && call.problem.scores.softcap.is_some() {
            call.problem.scores.softcap = Some(HIGH_CAP);
        }
        call.scene()
    };
    calls.into_iter().map(uncapped).collect()
}

/// Which keys are heavy by turns: those of lanes, of a lane's columns, of blocks.
fn turns(block: usize) -> impl Iterator<Item = usize> {
    [1, 2, 4, 8, 16].into_iter().filter(move |of| *of < block).chain([block])
}

/// Keys that end at each of the columns that a lane has of a block.
fn ends(block: usize) -> impl Iterator<Item = usize> {
    (block..2 * block).filter(|keys| keys % 8 < 2)
}
