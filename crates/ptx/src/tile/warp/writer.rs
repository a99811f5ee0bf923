//! Rounded accumulators into swizzled tiles.
//!
//! A lane has two neighbours of row `lane / 4` and of the row 8 below, of each group of 8 columns:
//! a chunk. The swizzle exclusive-ors the chunk with the row's place in eight, so the 32 lanes that
//! store a group of 8 rows have a bank each.

use super::{CHUNK, Packed, ROW, check};
use crate::tile::TileLayout;
use crate::{Builder, Expression, Reg, SharedAddress, U32, Value};

/// A tile that a warp writes 8 rows by 8 columns at a time, as an accumulator has them.
#[derive(Clone, Copy, Debug)]
pub struct TileWriter {
    layout: TileLayout,
    /// Where the lane's first pair goes.
    first: Reg<SharedAddress>,
}

impl TileWriter {
    /// Writes the tile at an address, a multiple of 1024, from a row on that is a multiple of 8, and
    /// so many groups of 8 columns further right, no more than 7: only groups that are multiples of
    /// a power of two above these are written then, or the ones between.
    #[track_caller]
    pub fn new(
        k: &mut Builder,
        layout: TileLayout,
        tile: Reg<SharedAddress>,
        row: impl Into<Value<U32>>,
        groups: impl Into<Value<U32>>,
    ) -> Self {
        check(k, layout);
        let lane = k.lane();
        let within = lane / 4 * ROW + ((lane / 4) ^ groups.into()) * CHUNK + lane % 4 * 4;
        TileWriter { layout, first: k.eval(tile + row.into() * ROW + within) }
    }

    /// Stores two neighbours of the lane's row, so many rows and groups of columns on.
    #[track_caller]
    pub fn store(&self, k: &mut Builder, row: u32, group: u32, pair: Packed) {
        let panel_groups = ROW / CHUNK;
        let moved = self.first.reinterpret::<U32>() ^ (group % panel_groups * CHUNK);
        let panel = (group / panel_groups).saturating_mul(self.layout.panel_bytes());
        let address = k.eval(moved.reinterpret::<SharedAddress>());
        k.store_packed(address + panel.saturating_add(row.saturating_mul(ROW)), &[pair]);
    }
}
