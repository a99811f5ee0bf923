//! The walk of a warpgroup: those of its tile's key blocks that some of its own 64 query rows sees.
//!
//! Key blocks are walked from the last to the first. Under a causal mask a tile's first warpgroup
//! sees fewer keys than its last one: with tiles of 128 x 64 it sees nothing of the block that is
//! walked first. It skips that block: it waits for the block's stages and releases them, and
//! takes its turn at the tensor cores and passes it on. Computing the block would not only be
//! wasted work: the softmax reference of its rows would be that of rows without keys, and the guard
//! would send the next block down the slow path. At the left edge of a window, it is the last
//! warpgroup that skips the block that is walked last.
//!
//! A warpgroup skips at most one block on each side: warpgroups share the pipeline stages,
//! and one that ran further ahead would wait for keys that cannot be loaded until the others have
//! released theirs.

use ptx::{Builder, Expression, Reg, U32};

use super::Forward;
use crate::attention::MaskKind;
use crate::attention::visibility::{Blocks, Masked, RowTile, Visibility};

/// Narrows a tile's key blocks to those that one of its warpgroups walks.
#[derive(Clone, Copy)]
pub(super) struct Walks {
    key_block: u32,
}

/// The range of all key blocks of a tile, regardless of which of them a warpgroup walks.
pub(super) struct WholeWalk {
    /// The first key block, which is walked last. Without a window it is block 0, and this is
    /// `None`.
    pub(super) first: Option<Reg<U32>>,
    /// The last key block, which is walked first.
    pub(super) last: Reg<U32>,
}

/// The registers of a tile's key blocks, which [`Walks::narrow`] sets to those of a warpgroup.
pub(super) struct TileBlocks {
    pub(super) first: Option<Reg<U32>>,
    pub(super) end: Reg<U32>,
    pub(super) masked_from: Reg<U32>,
    pub(super) whole_from: Option<Reg<U32>>,
}

impl Walks {
    /// Returns `None` where all warpgroups of a tile walk the same key blocks. Walks differ only
    /// under a mask, and only where a key block has fewer keys than a tile has rows: otherwise
    /// every warpgroup sees something of every block. Warpgroup indices have to be broadcast from
    /// one lane, or the assembler no longer knows that the pipeline stages are warp-uniform: that
    /// costs 2.5 % at head dim 256, and a spill at 64.
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

    /// Returns the 64 rows of warpgroup `group` in the tile that begins at `first_row`.
    pub(super) fn rows_of(
        k: &mut Builder,
        group: Reg<U32>,
        first_row: Reg<U32>,
        [query_length, key_length]: [Reg<U32>; 2],
    ) -> RowTile {
        let first_row = k.eval(first_row + group * 64);
        RowTile { first_row, rows: 64, query_length, key_length }
    }

    /// Sets the registers of `tile` to the key blocks that `rows` see, at most one fewer on each
    /// side than the tile has.
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
        // At least one block, and at most one fewer than the tile at either end, whatever the rows
        // see.
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
