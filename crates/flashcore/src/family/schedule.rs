//! Schedules of ragged batches: the list of tiles that a launch on the device sorts before the
//! attention kernel takes them. Shared by all families for ragged batches.

use kernels::forward::Workload;
use kernels::parameter::{Number, Workspace};
use kernels::sequencer::Tiles;
use kernels::{Configuration, Sequencer};
use ptx::{Element, Target};

use super::{
    Choice, Contents, Tiling, check_positions, check_scale, tensor_core_element, window_kind,
};
use crate::chip::Chip;
use crate::plan::Launch;
use crate::problem::{Problem, Storage};

/// The size of a schedule.
pub(super) struct Schedule {
    /// Upper bound on the tiles per head.
    pub(super) most_tiles: u32,
    /// Upper bound on the tiles of all heads.
    pub(super) all_tiles: u32,
    tile_rows: u32,
}

impl Schedule {
    /// Sizes a schedule of query tiles.
    pub(super) fn new(problem: &Problem, tile_rows: u32) -> Result<Self, String> {
        let (rows, heads) = (query_rows(problem), problem.query_heads as u64);
        Schedule::over("query", problem.batch as u64, rows, heads, tile_rows)
    }

    /// Sizes a schedule of key tiles.
    pub(super) fn of_keys(problem: &Problem, tile_rows: u32) -> Result<Self, String> {
        let (rows, heads) = (key_rows(problem), problem.kv_heads as u64);
        Schedule::over("key", problem.batch as u64, rows, heads, tile_rows)
    }

    fn over(side: &str, batch: u64, rows: u64, heads: u64, tile_rows: u32) -> Result<Self, String> {
        let most = Sequencer::records(batch, rows, tile_rows.into());
        let all = most.checked_mul(heads).filter(|all| *all <= i32::MAX as u64);
        let counted = rows.checked_mul(heads).is_some_and(|rows| rows <= i32::MAX as u64);
        let Some(all_tiles) = all.filter(|_| counted) else {
            return Err(format!("the number of {side} rows of all heads is too large"));
        };
        Ok(Schedule { most_tiles: most as u32, all_tiles: all_tiles as u32, tile_rows })
    }

    /// Returns how the batch is cut into tiles.
    pub(super) fn tiling(&self, chip: &Chip, query_rows: u32, key_block: u32) -> Tiling {
        Tiling::new(chip, [query_rows, key_block], [self.most_tiles, self.all_tiles], 1)
    }

    /// Inserts the launch that writes the schedule before the choice's own launches, with its
    /// memory.
    pub(super) fn before(&self, target: Target, tiles: Tiles, choice: &mut Choice) {
        let numbers = [(Number::MaxTiles, self.most_tiles), (Number::TileRows, self.tile_rows)];
        let kernel = Configuration::Sequencer(Sequencer { target, tiles });
        choice.launches.insert(0, Launch::new(kernel, 1, numbers));
        choice.prepared = 1;
        choice.main += 1;
        let bytes = Sequencer::bytes(self.most_tiles.into());
        choice.add_memory(Workspace::Schedule, bytes, Contents::Zeros);
    }
}

/// Returns what the choice among configurations for ragged batches depends on, or why the tensor
/// cores do not serve a problem.
pub(super) fn ragged_workload(chip: &Chip, problem: &Problem) -> Result<Workload, String> {
    ragged_workload_of(tensor_core_element(problem)?, chip, problem)
}

/// Like [`ragged_workload`], for an element type that is known to be supported.
pub(super) fn ragged_workload_of(
    element: Element,
    chip: &Chip,
    problem: &Problem,
) -> Result<Workload, String> {
    check_scale(problem)?;
    check_positions(problem)?;
    Ok(Workload {
        element,
        head_dim: problem.head_dim as u32,
        value_head_dim: problem.value_head_dim as u32,
        rules: problem.rules(window_kind(problem)),
        query_length: query_rows(problem),
        key_length: problem.key_length as u64,
        heads: problem.query_heads as u64,
        multiprocessors: chip.multiprocessors,
    })
}

/// Returns the number of query rows of all sequences. Packed queries give the exact amount of work;
/// otherwise it is the maximum length times the batch.
pub(super) fn query_rows(problem: &Problem) -> u64 {
    match problem.queries {
        Storage::Packed(rows) => rows as u64,
        _ => (problem.batch as u64).saturating_mul(problem.query_length as u64),
    }
}

/// Returns the number of key rows of all sequences, likewise.
pub(super) fn key_rows(problem: &Problem) -> u64 {
    match problem.keys {
        Storage::Packed(rows) => rows as u64,
        _ => (problem.batch as u64).saturating_mul(problem.key_length as u64),
    }
}

/// Returns the number of query heads that are processed together: those of as many key heads as fit
/// in L2 with all their keys and values.
pub(super) fn heads_together(chip: &Chip, problem: &Problem) -> u32 {
    let width = problem.head_dim * problem.dtypes.key.bytes()
        + problem.value_head_dim * problem.dtypes.value.bytes();
    let head_bytes = key_rows(problem).saturating_mul(width as u64).max(1);
    // The rest of L2 is left to queries and outputs.
    let held = (chip.l2_bytes / 5 * 3 / head_bytes).max(1);
    let kv_heads = problem.kv_heads as u64;
    let together = (1..=kv_heads.min(held)).rev().find(|n| kv_heads.is_multiple_of(*n));
    together.unwrap_or(1) as u32 * problem.group_size() as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    /// Two key heads of 32,768 rows of 512 bytes fit in 30 MB, four do not.
    #[test]
    fn heads_go_together_as_the_cache_has_room() {
        let together = |dim: usize| {
            let problem = Problem::new(64, 16, 4096, dim)
                .with_kv_heads(4)
                .with_dtype(DType::BF16)
                .with_storage(Storage::Packed(32_768), Storage::Packed(32_768));
            heads_together(&Chip::H200, &problem)
        };
        assert_eq!([128, 64, 8].map(together), [4, 8, 16]);
    }
}
