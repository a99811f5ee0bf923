//! Attention on Hopper over ragged batches: the loops of the `forward` kernel over tiles from a
//! schedule that a launch before it writes.

use kernels::forward::{Workload, tuned_prefill};
use kernels::parameter::Number;
use kernels::sequencer::Tiles;
use kernels::{Configuration, MaskKind, Rules};
use ptx::{Capability, Element};

use super::forward::{hopper_element, with_output};
use super::schedule::{Schedule, heads_together, query_rows, ragged_workload_of};
use super::{Asked, Choice, Family, UNTUNED, window_kind};
use crate::chip::Chip;
use crate::plan::rows::Rows;
use crate::problem::{Mask, Problem, Storage};

/// The `prefill` family.
pub(super) struct Prefill;

/// The fewest rows of a copy from a page: the swizzle pattern repeats after 8 rows.
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
        let tuned = tuned_prefill(&workload(chip, problem)?).ok_or(UNTUNED)?;
        let tile = with_output(tuned.configuration, problem);
        let page_rows = page_rows(problem, tile.key_block)?;
        arrangement.check_copies(problem)?;
        Rows::check(problem, arrangement)?;
        let tiles = Schedule::new(problem, tile.query_rows())?.all_tiles;
        let single_tile = tiles <= chip.multiprocessors;
        let prefill = kernels::Prefill { tile, page_rows, single_tile };
        launch(chip, problem, prefill, tuned.reason.to_owned())
    }
}

/// Returns what the choice among configurations depends on. It uses the mean length of sequences,
/// not the longest: tall tiles waste more at the end of each sequence. Paged keys and 8-bit inputs
/// have no dense kernel, which gains little there, and no tiles that are for a causal mask alone.
fn workload(chip: &Chip, problem: &Problem) -> Result<Workload, String> {
    let element = hopper_element(problem)?;
    let workload = ragged_workload_of(element, chip, problem)?;
    let mean = query_rows(problem).div_ceil(problem.batch.max(1) as u64);
    let paged = matches!(problem.keys, Storage::Paged { .. });
    let mask = match problem.mask.without_function() {
        _ if paged || element == Element::E4M3 => workload.rules.mask,
        Mask::NONE => MaskKind::Dense,
        Mask::CAUSAL => MaskKind::Causal,
        _ => workload.rules.mask,
    };
    let rules = Rules { mask, ..workload.rules };
    Ok(Workload { rules, key_length: workload.key_length.min(mean), ..workload })
}

/// Returns the launches of a configuration, tuned or not. A launch before it sorts the tiles,
/// unless each block of the grid has a single tile, which it finds by itself.
pub(super) fn launch(
    chip: &Chip,
    problem: &Problem,
    prefill: kernels::Prefill,
    reason: String,
) -> Result<Choice, String> {
    let tile = prefill.tile;
    let schedule = Schedule::new(problem, tile.query_rows())?;
    let blocks = match prefill.single_tile {
        true => schedule.all_tiles,
        false => chip.multiprocessors.min(schedule.all_tiles),
    };
    let mut choice = Choice::of(Configuration::Prefill(prefill), blocks.max(1), reason);
    choice.tiling = Some(schedule.tiling(chip, tile.query_rows(), tile.key_block));
    if prefill.single_tile {
        return Ok(choice);
    }
    let together = heads_together(chip, problem);
    // Where L2 holds a single key head, the long tiles of the last group would begin after
    // everything else: the last two groups are merged. Groups of several heads have enough short
    // tiles at the end, and twice as many heads would not fit in L2.
    let rounds = if together == problem.group_size() as u32 { 2 } else { 1 };
    let last = (problem.query_heads as u32).saturating_sub(rounds * together);
    choice.launches[0].numbers = vec![(Number::HeadsPerGroup, together), (Number::LastHeads, last)];
    schedule.before(chip.target, Tiles::Queries(window_kind(problem)), &mut choice);
    Ok(choice)
}

/// Returns the number of rows of a page that are copied at a time; `None` where keys are not paged.
fn page_rows(problem: &Problem, key_block: u32) -> Result<Option<u32>, String> {
    let Storage::Paged { size, .. } = problem.keys else { return Ok(None) };
    if problem.lists.left_padding {
        return Err("left padding in pages is not served".to_owned());
    }
    let rows = common_divisor(size, key_block as usize);
    if !rows.is_multiple_of(FEWEST_PAGE_ROWS) {
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
        let Configuration::Prefill(prefill) = *choice.kernel() else { panic!("{choice:?}") };
        let launches = (choice.launches.len(), choice.prepared);
        assert_eq!(launches, if prefill.single_tile { (1, 0) } else { (2, 1) });
        Ok(prefill)
    }

    /// A few sequences whose tiles all run at once, and one sequence more.
    #[test]
    fn few_tiles_are_not_put_in_order() {
        let single = |batch| {
            let rows = Storage::Packed(4 * 64);
            let problem = Problem { batch, ..packed(64) }.with_storage(rows, rows);
            choose(&Chip::H200, &problem).unwrap().single_tile
        };
        // Each of 16 heads has up to four tiles of 64 rows, and one more per sequence: with four
        // sequences, 8 * 16 tiles fit 132 multiprocessors.
        assert!(single(4) && !single(5));
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

    /// Tall tiles are used where sequences are long in the mean and nothing is masked; paged keys
    /// use the kernel with a window.
    #[test]
    fn what_has_no_mask_has_a_kernel_of_its_own() {
        let dense = |batch, rows, dim| {
            let keys = Storage::Packed(rows);
            let problem = Problem { batch, ..packed(dim).with_mask(Mask::NONE) };
            choose(&Chip::H200, &problem.with_storage(keys, keys)).unwrap().tile
        };
        let long = dense(8, 32_768, 64);
        assert_eq!((long.rules.mask, long.query_rows()), (MaskKind::Dense, 192));
        assert_eq!(dense(17, 32_768, 64).query_rows(), 128);
        assert!(dense(32, 32_768, 128).ping_pong && !dense(8, 32_768, 128).ping_pong);
        let pages = Storage::Paged { size: 64, columns: 64, pages: 9 };
        let paged = packed(64).with_mask(Mask::NONE).with_storage(Storage::Packed(32_768), pages);
        assert_eq!(choose(&Chip::H200, &paged).unwrap().tile.rules.mask, MaskKind::Local);
    }

    /// Under a causal mask tall tiles are for long packed sequences; a window hides too much of them,
    /// and with pages there are too few registers.
    #[test]
    fn long_packed_causal_sequences_have_tall_tiles() {
        let rows = |batch, mask, keys| {
            let problem = Problem { batch, ..packed(64).with_mask(mask) };
            let problem = problem.with_storage(Storage::Packed(32_768), keys);
            let tile = choose(&Chip::H200, &problem).unwrap().tile;
            assert_eq!(tile.rules.mask, MaskKind::Local);
            tile.query_rows()
        };
        let packed = Storage::Packed(32_768);
        let pages = Storage::Paged { size: 64, columns: 64, pages: 9 };
        assert_eq!(rows(8, Mask::CAUSAL, packed), 192);
        assert_eq!(rows(9, Mask::CAUSAL, packed), 128);
        assert_eq!(rows(8, Mask::window(Some(4096), Some(0)), packed), 128);
        assert_eq!(rows(8, Mask::CAUSAL, pages), 128);
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
