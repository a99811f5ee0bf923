//! A warpgroup's walk: of a tile's key blocks those that some of its own 64 rows sees.
//!
//! Under a causal mask a tile's first warpgroup sees less than its last one: with tiles of 128 x 64
//! nothing of the block that is walked first. It passes over that block: waits for its stages, gives
//! them back, takes its turn and passes it on. What it would have computed is not only for nothing: a
//! row's reference would be that of a row without keys, and the guard would send the next block the
//! slow way. Behind the left edge of a window it is the last warpgroup that passes over the block that is
//! walked last.
//!
//! One block on each side and no more: warpgroups go through the stages together, and one that runs
//! ahead waits for keys that have no room until the others have given theirs back.

use ptx::{Builder, Expression, Reg, U32};

use super::Forward;
use crate::attention::MaskKind;
use crate::attention::visibility::{Blocks, Masked, RowTile, Visibility};

/// How walks of warpgroups differ from their tile's.
#[derive(Clone, Copy)]
pub(super) struct Walks {
    key_block: u32,
}

/// All key blocks of a tile, whichever a warpgroup walks.
pub(super) struct WholeWalk {
    /// The one that is walked last, where a window hides some before it.
    pub(super) first: Option<Reg<U32>>,
    /// The one that is walked first.
    pub(super) last: Reg<U32>,
}

/// A tile's key blocks, in registers that become the warpgroup's.
pub(super) struct TileBlocks {
    pub(super) first: Option<Reg<U32>>,
    pub(super) end: Reg<U32>,
    pub(super) masked_from: Reg<U32>,
    pub(super) whole_from: Option<Reg<U32>>,
}

impl Walks {
    /// Where a mask makes them differ: only where a block has fewer keys than a tile has rows is there
    /// one that a warpgroup sees nothing of. Indices have to come from one lane, or the assembler no longer
    /// knows that a warp's pipelines are at one stage: that costs 2.5 % at head dim 256, and a spill at 64.
    pub(super) fn new(forward: &Forward, index_from_one_lane: bool) -> Option<Self> {
        let differ = index_from_one_lane
            && forward.warpgroups > 1
            && forward.rules.mask != MaskKind::Dense
            && !forward.takes_block_lists()
            && !forward.is_fp8()
            && forward.key_block < forward.query_rows()
            && forward.stages > 1;
        differ.then_some(Walks { key_block: forward.key_block })
    }

    /// The rows of a warpgroup among those of a tile.
    pub(super) fn rows_of(
        k: &mut Builder,
        group: Reg<U32>,
        first_row: Reg<U32>,
        [query_length, key_length]: [Reg<U32>; 2],
    ) -> RowTile {
        let first_row = k.eval(first_row + group * 64);
        RowTile { first_row, rows: 64, query_length, key_length }
    }

    /// A tile's blocks become those of some of its rows.
    pub(super) fn narrow(
        &self,
        k: &mut Builder,
        visibility: &Visibility,
        rows: &RowTile,
        tile: &TileBlocks,
    ) {
        let end = k.register();
        let first = tile.first.map(|_| k.register());
        let blocks = Blocks { size: self.key_block, least: 1, first, end };
        let Masked { from, before } = visibility.find_blocks(k, rows, blocks);
        k.set(tile.masked_from, from);
        if let (Some(whole_from), Some(before)) = (tile.whole_from, before) {
            k.set(whole_from, before);
        }
        // Within the tile's, whatever its rows see.
        let least = match tile.first {
            None => tile.end.maximum(2) - 1,
            Some(first) => (tile.end - 1).maximum(first + 1),
        };
        let end = k.eval(end.minimum(tile.end).maximum(least));
        k.set(tile.end, end);
        if let (Some(first), Some(tile_first)) = (first, tile.first) {
            let most = (tile_first + 1).minimum(end - 1);
            k.set(tile_first, first.maximum(tile_first).minimum(most));
        }
    }
}
