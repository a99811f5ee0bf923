//! Attention with mma.sync on Ampere and later: the host side of the `mma` kernels.

use kernels::attention::Batch;
use kernels::attention::function::ListsOf;
use kernels::mma::{tuned, tuned_batch};
use kernels::parameter::{Number, Tensor};
use kernels::sequencer::Tiles;
use kernels::{Combine, Configuration};
use ptx::{Capability, Element};

use super::forward::equal_lengths_workload;
use super::schedule::{Schedule, ragged_workload};
use super::{Asked, Choice, Contents, Counts, Family, Tiling, UNTUNED, block_mask, window_kind};
use crate::chip::Chip;
use crate::plan::Launch;
use crate::plan::rows::Rows;
use crate::problem::Problem;

/// The `mma` family, by the type of its accumulators: `F32`, or within a key block `F16`. The
/// latter is twice as fast on GPUs whose tensor cores are slower with f32 accumulators, such as
/// GeForce, and less exact (docs/architectures.md); it is chosen only when requested by name.
pub(super) struct Mma {
    pub(super) sums: Element,
}

impl Family for Mma {
    fn name(&self) -> &'static str {
        match self.sums {
            Element::F16 => "mma-half",
            _ => "mma",
        }
    }

    fn only_on_request(&self) -> bool {
        self.sums == Element::F16
    }

    fn choose(&self, asked: &Asked<'_>) -> Result<Choice, String> {
        let Asked { chip, problem, arrangement } = *asked;
        let target = chip.target;
        if !(target.has(Capability::Mma) && target.has(Capability::AsyncCopies)) {
            return Err(format!("{target} has no mma.sync for 16-bit floats, or no cp.async"));
        }
        if self.sums == Element::F16 {
            let dtype = problem.dtypes.uniform()?;
            if dtype.element() != Element::F16 {
                return Err(format!("sums in f16 are for f16 tensors, not {dtype}"));
            }
            if problem.head_dim.max(problem.value_head_dim) > 128 {
                return Err("sums in f16 are for head dims up to 128".to_owned());
            }
        }
        arrangement.check_copies(problem)?;
        Rows::check_offsets(problem, arrangement)?;
        if problem.has_equal_lengths() {
            let workload = equal_lengths_workload(chip, problem)?;
            let tuned = tuned(target, &workload, self.sums).ok_or(UNTUNED)?;
            let reason = tuned.reason.to_owned();
            return launch(chip, problem, tuned.configuration, tuned.splits, reason);
        }
        Rows::check(problem, arrangement)?;
        let batch = match problem.keys.is_paged() {
            true => Batch::Paged,
            false => Batch::Ragged,
        };
        let workload = ragged_workload(chip, problem)?;
        let tuned = tuned_batch(target, &workload, self.sums, batch).ok_or(UNTUNED)?;
        launch_ragged(chip, problem, tuned.configuration, tuned.reason.to_owned())
    }
}

/// Returns the launches of a configuration over a ragged batch: one sorts the tiles, the other has
/// a thread block for each tile and head.
pub(crate) fn launch_ragged(
    chip: &Chip,
    problem: &Problem,
    mma: kernels::Mma,
    reason: String,
) -> Result<Choice, String> {
    let schedule = Schedule::new(problem, mma.query_rows())?;
    let mut choice = Choice::of(Configuration::Mma(mma), schedule.all_tiles.max(1), reason);
    schedule.before(chip.target, Tiles::Queries(window_kind(problem)), &mut choice);
    choice.tiling = Some(schedule.tiling(chip, mma.query_rows(), mma.key_block));
    Ok(choice)
}

/// Returns the launches of a configuration over keys split into `splits` parts.
pub(crate) fn launch(
    chip: &Chip,
    problem: &Problem,
    mma: kernels::Mma,
    splits: u32,
    mut reason: String,
) -> Result<Choice, String> {
    let counts = Counts::new(mma.query_rows(), problem)?;
    let tiles = counts.tiles;
    let blocks = tiles.checked_mul(splits).filter(|blocks| *blocks < 1 << 31);
    let blocks = blocks.ok_or("the number of tiles is too large for the GPU kernel")?;
    if splits > 1 {
        reason += &format!("; {tiles} tiles leave places empty: keys split {splits} ways");
    }
    let heads_of_group = heads_of_group(problem, chip);
    let key_blocks = counts.key_length.div_ceil(mma.key_block);
    let mut choice = Choice::of(Configuration::Mma(mma), blocks, reason);
    choice.launches[0].numbers = vec![
        (Number::TilesPerHead, counts.tiles_per_head),
        // Cannot overflow: at most the number of all tiles, which was checked.
        (Number::TilesPerGroup, counts.tiles_per_head * heads_of_group),
        (Number::HeadsPerGroup, heads_of_group),
        (Number::Splits, splits),
        (Number::BlocksPerSplit, key_blocks.div_ceil(splits)),
    ];
    let tile = [mma.query_rows(), mma.key_block];
    choice.tiling = Some(Tiling::new(chip, tile, [counts.tiles_per_head, tiles], splits));
    if let Some(mask) = block_mask(problem, tile, &counts, ListsOf::Queries) {
        choice.with_blocks(mma.target, mma.rules.mask, mask)?;
    }
    if mma.split {
        combine(problem, mma, splits, &mut choice)?;
    }
    Ok(choice)
}

/// Adds the launch that combines the parts of split keys, and memory for the parts.
fn combine(
    problem: &Problem,
    mma: kernels::Mma,
    splits: u32,
    choice: &mut Choice,
) -> Result<(), String> {
    let combine = Combine {
        target: mma.target,
        partial: Element::F32,
        element: mma.element,
        value_head_dim: mma.value_head_dim,
    };
    let rows = problem.rows() as u64;
    let blocks = u32::try_from(combine.blocks(rows))
        .map_err(|_| "the number of rows is too large for the GPU kernel")?;
    let kernel = Configuration::Combine(combine);
    choice.launches.push(Launch::new(kernel, blocks, [(Number::Parts, splits)]));
    let parts = 4 * u64::from(splits) * rows;
    let width = u64::from(mma.value_head_dim);
    choice.add_memory(Tensor::PartialOutput, parts * width, Contents::Anything);
    choice.add_memory(Tensor::PartialLse, parts, Contents::Anything);
    Ok(())
}

/// Returns how many heads, over all sequences, are processed together: those whose keys and values
/// fit in half of L2 (queries and outputs pass through it too). It divides the number of heads, so
/// that all groups are of equal size.
fn heads_of_group(problem: &Problem, chip: &Chip) -> u32 {
    let heads = (problem.batch * problem.query_heads).max(1);
    let row_bytes = problem.head_dim * problem.dtypes.key.bytes()
        + problem.value_head_dim * problem.dtypes.value.bytes();
    let head_bytes = problem.key_length * row_bytes / problem.group_size().max(1);
    let most = (chip.l2_bytes as usize / 2 / head_bytes.max(1)).max(1);
    let low = (1..).take_while(|it| it * it <= heads).filter(|it| heads.is_multiple_of(*it));
    let divisors = low.flat_map(|it| [it, heads / it]);
    divisors.filter(|it| *it <= most).max().unwrap_or(1) as u32
}

#[cfg(test)]
mod tests {
    use ptx::Target;

    use super::*;
    use crate::dtype::DType;
    use crate::plan::Arrangement;
    use crate::problem::Mask;
    use crate::tensor::Strides;

    fn choose(target: Target, problem: &Problem, sums: Element) -> Result<Choice, String> {
        let arrangement = Arrangement::contiguous(problem).unwrap();
        let chip = &Chip::typical(target);
        Mma { sums }.choose(&Asked { chip, problem, arrangement: &arrangement })
    }

    fn configuration(target: Target, problem: &Problem, sums: Element) -> kernels::Mma {
        match *choose(target, problem, sums).unwrap().kernel() {
            Configuration::Mma(mma) => mma,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_served_has_a_configuration_of_its_own_dimensions() {
        for target in [Target::SM_80, Target::SM_86, Target::SM_89, Target::SM_90A, Target::SM_120]
        {
            for dim in (8..=256).step_by(8) {
                let problem = Problem::new(1, 2, 100, dim).with_dtype(DType::BF16);
                let mma = configuration(target, &problem, Element::F32);
                assert_eq!((mma.target, mma.head_dim as usize), (target, dim));
                assert_eq!(mma.accumulate, Element::F32);
            }
        }
        let causal = Problem::new(1, 2, 100, 96).with_value_head_dim(128).with_mask(Mask::CAUSAL);
        let mma = configuration(Target::SM_89, &causal, Element::F16);
        assert_eq!((mma.head_dim, mma.value_head_dim, mma.accumulate), (96, 128, Element::F16));
        // Rows that see no key are supported, and so is a problem without keys.
        let nothing = Problem::new(1, 2, 9, 64).with_key_length(0);
        assert!(choose(Target::SM_80, &nothing, Element::F32).is_ok());
    }

    #[test]
    fn what_is_not_served_is_refused_with_the_reason() {
        let good = Problem::new(1, 2, 100, 64);
        let refusal = |target, problem: &Problem, sums| choose(target, problem, sums).unwrap_err();
        assert_eq!(
            refusal(Target::SM_75, &good, Element::F32),
            "sm_75 has no mma.sync for 16-bit floats, or no cp.async"
        );
        assert_eq!(
            refusal(Target::SM_80, &good.clone().with_dtype(DType::BF16), Element::F16),
            "sums in f16 are for f16 tensors, not bf16"
        );
        assert_eq!(
            refusal(Target::SM_80, &Problem::new(1, 2, 100, 136), Element::F16),
            "sums in f16 are for head dims up to 128"
        );
        let mut arrangement = Arrangement::contiguous(&good).unwrap();
        arrangement.key = Strides { length: 1 << 31, ..arrangement.key };
        let chip = &Chip::typical(Target::SM_80);
        let asked = Asked { chip, problem: &good, arrangement: &arrangement };
        let far = Mma { sums: Element::F32 }.choose(&asked).unwrap_err();
        assert_eq!(far, "a length stride of 4294967296 bytes is not below 4 GiB");
        // Where each sequence has one row, the rows are as far apart as batch entries.
        let one: Problem = "b=2,h=2,s=1,sk=100,d=64,f16,key_lengths".parse().unwrap();
        let mut arrangement = Arrangement::contiguous(&one).unwrap();
        arrangement.query = Strides { batch: 1 << 31, ..arrangement.query };
        let asked = Asked { chip, problem: &one, arrangement: &arrangement };
        let far = Mma { sums: Element::F32 }.choose(&asked).unwrap_err();
        assert_eq!(far, "a length stride of 4294967296 bytes is not below 4 GiB");
    }

    #[test]
    fn groups_of_heads_fit_the_cache_and_are_alike() {
        let group = |problem: &Problem| heads_of_group(problem, &Chip::H200);
        let problem = |batch, heads, length| Problem::new(batch, heads, length, 128);
        // Keys and values take 8 MB per head in bf16, 16 MB in f32; half of L2 is 25 MB.
        assert_eq!(group(&problem(1, 16, 16_384).with_dtype(DType::BF16)), 2);
        assert_eq!(group(&problem(1, 16, 16_384).with_dtype(DType::F32)), 1);
        assert_eq!(group(&problem(1, 15, 16_384).with_dtype(DType::BF16)), 3);
        // Eight query heads share them.
        assert_eq!(group(&problem(1, 16, 16_384).with_dtype(DType::BF16).with_kv_heads(2)), 16);
        assert_eq!(group(&problem(32, 16, 512).with_dtype(DType::BF16)), 64);
        // Larger than L2; no keys at all; a prime number of heads.
        assert_eq!(group(&problem(1, 16, 1 << 20)), 1);
        assert_eq!(group(&problem(3, 7, 0)), 21);
        assert_eq!(group(&problem(1, 71, 4096).with_dtype(DType::BF16)), 1);
    }

    #[test]
    fn few_tiles_over_many_keys_are_split_and_combined() {
        let decode = Problem::new(1, 8, 1, 128).with_key_length(10_000);
        let choice = choose(Target::SM_80, &decode, Element::F32).unwrap();
        let families: Vec<&str> = choice.launches.iter().map(|it| it.kernel.family()).collect();
        assert_eq!(families, ["mma", "combine"]);
        assert!(choice.reason.contains("keys split"), "{}", choice.reason);
        assert_eq!(choice.memory.len(), 2);
        let many = Problem::new(8, 32, 4096, 128);
        assert_eq!(choose(Target::SM_80, &many, Element::F32).unwrap().launches.len(), 1);
    }
}
