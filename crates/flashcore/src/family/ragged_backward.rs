//! Gradients of attention over ragged batches: the loops of `backward` over slices of rows, with
//! key tiles in an order that a launch on the device writes. Shared by the Hopper and the mma.sync
//! kernels.

use kernels::attention::{Batch, MaskKind};
use kernels::backward::{BackwardPass, sharing_backward, tuned_backward};
use kernels::forward::Workload;
use kernels::parameter::{Number, Tensor};
use kernels::sequencer::Tiles;
use ptx::Capability;

use super::backward::{Kernels, RowBlocks, SumsBeside};
use super::schedule::{Schedule, query_rows, ragged_workload};
use super::{Asked, Choice, mask_kind};
use crate::chip::Chip;
use crate::plan::Arrangement;
use crate::plan::arrangement::{name, tensors};
use crate::plan::rows::Rows;
use crate::problem::{Problem, Storage};

/// The reason that a plan gives for these kernels.
pub(super) const REASON: &str = "gradients in one pass, slice by slice";

pub(super) fn choose(asked: &Asked<'_>) -> Result<Choice, String> {
    let Asked { chip, problem, .. } = *asked;
    if !chip.target.has(Capability::Wgmma) {
        return Err(format!("{} has no wgmma", chip.target));
    }
    let workload = workload(asked)?;
    let (dim, value_dim) = (workload.head_dim, workload.value_head_dim);
    let backward = tuned_backward(workload.element, dim, value_dim, workload.rules)
        .ok_or_else(|| format!("head dims {dim} and {value_dim} are beyond 256"))?;
    let deterministic = problem.deterministic;
    let backward = kernels::Backward { deterministic, batch: Batch::Ragged, ..backward };
    // Where heads share keys there are fewer tiles for as many rows, and two warps of each do not
    // round them in time: on an H200 0.98 of the speed with 32 heads over 8.
    let sharing = sharing_backward(backward).filter(|_| problem.group_size() == 1);
    let backward = sharing.unwrap_or(backward);
    Kernels::hopper(backward).launch_ragged(chip, problem, REASON.to_owned())
}

/// Returns what the choice among configurations depends on, or why no kernel for ragged batches
/// serves a problem.
pub(super) fn workload(asked: &Asked<'_>) -> Result<Workload, String> {
    let Asked { chip, problem, arrangement } = *asked;
    let workload = ragged_workload(chip, problem)?;
    if problem.keys.is_paged() {
        return Err("gradients of keys in pages are not computed".to_owned());
    }
    if problem.lists.batch_index {
        return Err("sequences may share an entry of a batch index, and its gradient".to_owned());
    }
    if problem.key_length == 0 {
        return Err("there are no keys".to_owned());
    }
    arrangement.check_copies(problem)?;
    check_rows(problem, arrangement)?;
    Ok(Workload { rules: problem.rules(mask(problem)), ..workload })
}

impl Kernels {
    /// Returns the launches over a ragged batch.
    pub(super) fn launch_ragged(
        &self,
        chip: &Chip,
        problem: &Problem,
        reason: String,
    ) -> Result<Choice, String> {
        let BackwardPass { query_block, key_block, .. } = self.pass;
        let schedule = Schedule::of_keys(problem, key_block)?;
        // In the workspace, the queries of each sequence begin with a block of their own.
        let per_head = query_rows(problem) / u64::from(query_block) + problem.batch as u64;
        let too_large = || "the number of query rows of all heads is too large".to_owned();
        let counted = |count: Option<u64>| count.filter(|it| *it <= i32::MAX as u64);
        // The parts of blocks that `Rounding` takes, and rows, are 31-bit numbers too.
        let parts = u64::from(self.pass.rounding().blocks(1));
        let blocks = per_head.checked_mul(problem.query_heads as u64);
        let rows = query_rows(problem).checked_mul(problem.query_heads as u64);
        if counted(blocks.and_then(|it| it.checked_mul(parts))).is_none() || counted(rows).is_none()
        {
            return Err(too_large());
        }
        let (per_head, blocks) = (per_head as u32, blocks.ok_or_else(too_large)? as u32);
        let mut choice = Choice::of(self.kernel, schedule.all_tiles, reason);
        choice.launches[0].numbers = vec![(Number::QueryBlocks, per_head)];
        let rows = RowBlocks { heads: problem.query_heads as u32, per_head, all: blocks };
        let (sums, tiles) = match self.pass.shares() {
            None => (SumsBeside::of_blocks(&rows, [blocks, 0]), Tiles::Keys),
            Some(_) if problem.group_size() > 1 => {
                return Err("tiles have no shares of sums where heads share keys".to_owned());
            }
            Some(_) => {
                let shares = Shares::new(chip, problem, key_block);
                choice.launches[0].numbers.extend([shares.cleared(), shares.rounded()]);
                (shares.beside(per_head, &schedule), Tiles::KeysOrQueries)
            }
        };
        self.beside(problem, &mut choice, &rows, sums);
        schedule.before(chip.target, tiles, &mut choice);
        choice.tiling = Some(schedule.tiling(chip, query_block, key_block));
        Ok(choice)
    }
}

/// When tiles clear and round each other's shares of the dQ sums.
struct Shares {
    /// The shares of this many first tiles are cleared before the main kernel, and each tile clears
    /// that of the tile this many later.
    cleared: u32,
    /// A tile's share is rounded by the tile this many later, and those of this many last tiles
    /// after the main kernel.
    rounded_after: u32,
}

/// The most thread blocks of the launches beside the main kernel for one share: where shares are
/// larger, a few of them already keep a multiprocessor busy. Their number stays below 2^31.
const MOST_BLOCKS_PER_SHARE: u32 = 16;

impl Shares {
    /// Keeps tiles from waiting for each other: they wait for other heads only, whose tiles began
    /// earlier, if both distances exceed the tiles of the longest sequence. A tile clears when it
    /// begins, so one tile per multiprocessor in between suffices. Additions to a head end late:
    /// under a causal mask the walks of its first tiles are twice as long as the average. By a
    /// model of 64 sequences nobody waits with two tiles per multiprocessor in between; with one,
    /// waiting would take 2 to 3 % of the time.
    fn new(chip: &Chip, problem: &Problem, key_block: u32) -> Self {
        // A length of 2^31 has 2^24 tiles of 128 keys.
        let of_head = problem.key_length.div_ceil(key_block as usize).min(1 << 24) as u32;
        let all = chip.multiprocessors.clamp(1, 1 << 16);
        Shares { cleared: of_head + all, rounded_after: of_head + 2 * all }
    }

    fn cleared(&self) -> (Number, u32) {
        (Number::ClearedTiles, self.cleared)
    }

    fn rounded(&self) -> (Number, u32) {
        (Number::RoundedAfter, self.rounded_after)
    }

    /// Returns what is left to the launches beside the main kernel, with so many blocks of query
    /// rows per head in the workspace.
    fn beside(&self, query_blocks: u32, schedule: &Schedule) -> SumsBeside {
        let tiles = schedule.all_tiles;
        let per_share = query_blocks.div_ceil(schedule.most_tiles.max(1));
        let per_share = per_share.clamp(1, MOST_BLOCKS_PER_SHARE);
        let per_share_number = (Number::BlocksPerShare, per_share);
        SumsBeside {
            cleared: vec![self.cleared(), (Number::KeyTiles, tiles), per_share_number],
            rounded: vec![self.rounded(), per_share_number],
            rounding_blocks: self.rounded_after.min(tiles) * per_share,
            counters: tiles,
        }
    }
}

/// Returns the mask kind. A chunk may hide keys of any sequence: one with more queries than keys
/// begins before the first chunk.
fn mask(problem: &Problem) -> MaskKind {
    match problem.mask.chunk {
        Some(_) => MaskKind::Chunked,
        None => mask_kind(problem),
    }
}

/// Checks the distances between batch entries: one list gives the start of a sequence's queries in
/// all query-side tensors, and one that of its keys. Batch entries of queries must follow one
/// another without gaps, since their rows are indexed the same way in the workspace.
fn check_rows(problem: &Problem, arrangement: &Arrangement) -> Result<(), String> {
    let entry_rows = |tensor| Rows::of(problem, arrangement, tensor).map(|it| it.entry_rows);
    let keys = entry_rows(Tensor::Key)?;
    for tensor in tensors(problem) {
        let found = entry_rows(tensor)?;
        let expected = match tensor {
            Tensor::Key | Tensor::Value | Tensor::KeyGradient | Tensor::ValueGradient => keys,
            _ if problem.queries == Storage::Padded && problem.batch > 1 => {
                problem.query_length as u32
            }
            _ => 0,
        };
        if found != expected {
            let name = name(tensor);
            return Err(format!(
                "the {name} tensor: a batch entry is {found} rows from the next, and not {expected}"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kernels::Configuration;
    use ptx::Target;

    use super::super::prefill;
    use super::*;
    use crate::problem::{Lists, Mask};
    use crate::tensor::Strides;

    fn packed(dim: usize) -> Problem {
        prefill::tests::packed(dim).backward()
    }

    fn chosen(chip: &Chip, problem: &Problem) -> Result<Choice, String> {
        let arrangement = Arrangement::contiguous(problem).unwrap();
        choose(&Asked { chip, problem, arrangement: &arrangement })
    }

    fn configuration(problem: &Problem) -> kernels::Backward {
        match *chosen(&Chip::H200, problem).unwrap().kernel() {
            Configuration::Backward(backward) => backward,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_width_is_served_on_hopper() {
        for dim in (8..=256).step_by(8) {
            let backward = configuration(&packed(dim));
            assert_eq!((backward.head_dim as usize, backward.batch), (dim, Batch::Ragged));
            assert!(backward.program().is_ok(), "{}", backward.name());
            let own_keys = packed(dim).with_kv_heads(16);
            for launch in chosen(&Chip::H200, &own_keys).unwrap().launches {
                assert!(launch.kernel.program().is_ok(), "{}", launch.kernel.name());
            }
        }
        let older = chosen(&Chip::typical(Target::SM_89), &packed(64)).unwrap_err();
        assert_eq!(older, "sm_89 has no wgmma");
    }

    /// The schedule is written first and can be kept; blocks and memory are linear in the number of
    /// rows.
    #[test]
    fn launches_have_room_for_any_lengths() {
        let choice = chosen(&Chip::H200, &packed(128)).unwrap();
        let blocks: Vec<u32> = choice.launches.iter().map(|it| it.blocks).collect();
        let per_head = 32_768 / 64 + 64;
        assert_eq!(blocks, [1, 16 * per_head, 4 * (32_768 / 128 + 64), 2 * 16 * per_head]);
        assert_eq!((choice.prepared, choice.main), (1, 2));
        let bytes: u64 = choice.memory.iter().map(|it| it.bytes).sum();
        assert!(bytes < 16 * (32_768 + 64 * 64) * (128 * 4 + 8) + (1 << 16), "{bytes}");
    }

    /// Where no heads share keys, tiles clear and round shares of the sums. Launches and memory
    /// beside them still have room for any lengths.
    #[test]
    fn tiles_have_shares_where_heads_have_keys_of_their_own() {
        let own_keys = packed(128).with_kv_heads(16);
        let choice = chosen(&Chip::H200, &own_keys).unwrap();
        let blocks: Vec<u32> = choice.launches.iter().map(|it| it.blocks).collect();
        let (per_head, tiles) = (32_768 / 64 + 64, 16 * (32_768 / 128 + 64));
        // Rounded after the products: 32 tiles of the longest sequence and two for each
        // multiprocessor, two query blocks of each, in two parts.
        let last = 4096 / 128 + 2 * 132;
        assert_eq!(blocks, [1, 16 * per_head, tiles, last * 2 * 2]);
        assert_eq!((choice.prepared, choice.main), (1, 2));
        let bytes: u64 = choice.memory.iter().map(|it| it.bytes).sum();
        let counters = 8 * u64::from(tiles);
        assert!(bytes < 16 * (32_768 + 64 * 64) * (128 * 4 + 8) + counters + (1 << 16), "{bytes}");

        let shares = |problem: &Problem| configuration(problem).shares;
        assert!(shares(&own_keys) && shares(&packed(64).with_kv_heads(16)));
        assert!(!shares(&packed(128)), "grouped heads");
        assert!(!shares(&own_keys.clone().deterministic()));
        assert!(!shares(&own_keys.clone().with_softcap(30.0)));
        assert!(!shares(&packed(192).with_kv_heads(16)), "wide heads");
        let Configuration::Backward(sharing) = *choice.kernel() else { panic!("{choice:?}") };
        let refused = Kernels::hopper(sharing).launch_ragged(&Chip::H200, &packed(128), "".into());
        assert_eq!(refused.unwrap_err(), "tiles have no shares of sums where heads share keys");
    }

    #[test]
    fn a_chunk_hides_something_of_sequences_with_more_queries_than_keys() {
        let kind = |mask: Mask| configuration(&packed(64).with_mask(mask)).rules.mask;
        assert_eq!(kind(Mask::NONE), MaskKind::Dense);
        assert_eq!(kind(Mask::CAUSAL), MaskKind::Causal);
        assert_eq!(kind(Mask::window(Some(4095), Some(4095))), MaskKind::Dense);
        assert_eq!(kind(Mask::window(Some(4094), Some(0))), MaskKind::Local);
        assert_eq!(kind(Mask::NONE.with_chunk(4096)), MaskKind::Chunked);
    }

    #[test]
    fn what_is_not_served_is_refused_with_the_reason() {
        let refusal = |problem: &Problem| chosen(&Chip::H200, problem).unwrap_err();
        let pages = Storage::Paged { size: 16, columns: 256, pages: 9 };
        let paged = packed(64).with_storage(Storage::Packed(32_768), pages);
        assert_eq!(refusal(&paged), "gradients of keys in pages are not computed");
        let index = Lists { batch_index: true, ..Lists::default() };
        let shared = packed(64).with_storage(Storage::Packed(32_768), Storage::Entries(64));
        assert_eq!(
            refusal(&shared.with_lists(index)),
            "sequences may share an entry of a batch index, and its gradient"
        );
        let empty = packed(64).with_key_length(0);
        assert_eq!(
            refusal(&empty.with_storage(Storage::Packed(9), Storage::Packed(0))),
            "there are no keys"
        );
        let lists = Lists { query_lengths: true, ..Lists::default() };
        let padded = Problem::new(2, 4, 100, 64).with_lists(lists).backward();
        assert!(chosen(&Chip::H200, &padded).is_ok());
        let good = Arrangement::contiguous(&padded).unwrap();
        let apart = Strides { batch: 2 * good.query.batch, ..good.query };
        let arrangement = &Arrangement { query: apart, ..good };
        let asked = Asked { chip: &Chip::H200, problem: &padded, arrangement };
        assert_eq!(
            choose(&asked).unwrap_err(),
            "the query tensor: a batch entry is 200 rows from the next, and not 100"
        );
    }
}
