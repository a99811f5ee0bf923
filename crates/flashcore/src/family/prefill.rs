//! Attention on Hopper over ragged batches: the forward kernel's loops with tiles from a schedule.

use kernels::Configuration;
use kernels::forward::tuned_prefill;
use kernels::parameter::Number;
use kernels::sequencer::Tiles;
use ptx::Capability;

use super::forward::{hopper_element, with_output};
use super::schedule::{Schedule, heads_together, ragged_workload_of};
use super::{Asked, Choice, Family};
use crate::chip::Chip;
use crate::plan::rows::Rows;
use crate::problem::{Problem, Storage};

/// The family.
pub(super) struct Prefill;

/// Copies of a page have at least so many rows, after which the swizzle repeats.
const FEWEST_PAGE_ROWS: usize = 8;

impl Family for Prefill {
    fn name(&self) -> &'static str {
        "prefill"
    }

    fn choose(&self, asked: &Asked<'_>) -> Result<Choice, String> {
        let Asked { chip, problem, arrangement } = *asked;
        if !chip.target.has(Capability::Wgmma) {
            return Err(format!("{} has no wgmma", chip.target));
        }
        let workload = ragged_workload_of(hopper_element(problem)?, chip, problem)?;
        let tuned = tuned_prefill(&workload)
            .ok_or_else(|| "no configuration is tuned for it".to_owned())?;
        let tile = with_output(tuned.configuration, problem);
        let page_rows = page_rows(problem, tile.key_block)?;
        arrangement.check_copies(problem)?;
        Rows::check(problem, arrangement)?;
        let prefill = kernels::Prefill { tile, page_rows };
        launch(chip, problem, prefill, tuned.reason.to_owned())
    }
}

/// The launches of a configuration, tuned or not: its tiles are put in order before.
pub(super) fn launch(
    chip: &Chip,
    problem: &Problem,
    prefill: kernels::Prefill,
    reason: String,
) -> Result<Choice, String> {
    let tile = prefill.tile;
    let schedule = Schedule::new(problem, tile.query_rows())?;
    let blocks = chip.multiprocessors.min(schedule.all_tiles).max(1);
    let mut choice = Choice::of(Configuration::Prefill(prefill), blocks, reason);
    let together = heads_together(chip, problem);
    // Where the cache holds one head, its long tiles would come after everything else: two rounds
    // in one. Several heads have short tiles enough, and twice as many no room in the cache.
    let rounds = if together == problem.group_size() as u32 { 2 } else { 1 };
    let last = (problem.query_heads as u32).saturating_sub(rounds * together);
    choice.launches[0].numbers = vec![(Number::HeadsPerGroup, together), (Number::LastHeads, last)];
    schedule.before(chip.target, Tiles::Queries(tile.rules.mask), &mut choice);
    choice.tiling = Some(schedule.tiling(chip, tile.query_rows(), tile.key_block));
    Ok(choice)
}

/// With pages, how many of their rows are copied at a time.
fn page_rows(problem: &Problem, key_block: u32) -> Result<Option<u32>, String> {
    let Storage::Paged { size, .. } = problem.keys else { return Ok(None) };
    if problem.lists.left_padding {
        return Err("left padding in pages is not served".to_owned());
    }
    let rows = common_divisor(size, key_block as usize);
    if rows < FEWEST_PAGE_ROWS || !rows.is_multiple_of(FEWEST_PAGE_ROWS) {
        return Err(format!("pages of {size} positions are no multiple of {FEWEST_PAGE_ROWS}"));
    }
    Ok(Some(rows as u32))
}

fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

#[cfg(test)]
pub(super) mod tests {
    use ptx::Target;

    use super::*;
    use crate::dtype::DType;
    use crate::plan::Arrangement;
    use crate::problem::Mask;

    pub(in crate::family) fn packed(dim: usize) -> Problem {
        Problem::new(64, 16, 4096, dim)
            .with_kv_heads(4)
            .with_dtype(DType::BF16)
            .with_mask(Mask::CAUSAL)
            .with_storage(Storage::Packed(32_768), Storage::Packed(32_768))
    }

    fn choose(chip: &Chip, problem: &Problem) -> Result<kernels::Prefill, String> {
        let arrangement = Arrangement::contiguous(problem).unwrap();
        let choice = Prefill.choose(&Asked { chip, problem, arrangement: &arrangement })?;
        assert_eq!((choice.launches.len(), choice.prepared), (2, 1));
        match *choice.kernel() {
            Configuration::Prefill(prefill) => Ok(prefill),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_width_is_served_on_hopper() {
        for dim in (8..=256).step_by(8) {
            let prefill = choose(&Chip::H200, &packed(dim)).unwrap();
            assert_eq!(prefill.tile.head_dim as usize, dim);
            assert!(prefill.program().is_ok(), "{}", prefill.name());
        }
        let older = choose(&Chip::typical(Target::SM_89), &packed(64)).unwrap_err();
        assert_eq!(older, "sm_89 has no wgmma");
    }

    #[test]
    fn copies_divide_pages_and_blocks() {
        let rows = |size: usize| {
            let keys = Storage::Paged { size, columns: 5000 / size, pages: 9 };
            let problem = packed(128).with_storage(Storage::Packed(32_768), keys);
            choose(&Chip::H200, &problem).map(|chosen| chosen.page_rows)
        };
        for (size, expected) in [(8, 8), (16, 16), (48, 16), (64, 64), (128, 128), (256, 128)] {
            assert_eq!(rows(size), Ok(Some(expected)));
        }
        for size in [1, 4, 12, 20] {
            let refusal = format!("pages of {size} positions are no multiple of 8");
            assert_eq!(rows(size), Err(refusal));
        }
    }
}
