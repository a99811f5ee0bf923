//! Stores of rounded accumulators into swizzled tiles.
//!
//! In each group of 8 columns, which is one chunk, a lane holds two neighbouring elements of row
//! `lane / 4` and of the row 8 below. The swizzle exclusive-ors the chunk index with the row index
//! modulo 8, so the 32 lanes that store 8 rows of a group access 32 different banks.

use super::{CHUNK, Packed, ROW, check};
use crate::tile::TileLayout;
use crate::{Builder, Expression, Reg, SharedAddress, U32, Value};

/// A tile into which a warp stores blocks of 8 rows by 8 columns, in the lane layout of an
/// accumulator.
#[derive(Clone, Copy, Debug)]
pub struct TileWriter {
    layout: TileLayout,
    /// The address of the lane's first pair.
    first: Reg<SharedAddress>,
}

impl TileWriter {
    /// Creates a writer of the tile at an address, a multiple of 1024. It begins at `row`, a
    /// multiple of 8, and `groups` groups of 8 columns further right, at most 7. The offset is an
    /// exclusive or, so the groups stored later must have no bit in common with `groups`.
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

    /// Stores two neighbouring elements of the lane's row, `row` rows further down and `group`
    /// groups of columns further right.
    #[track_caller]
    pub fn store(&self, k: &mut Builder, row: u32, group: u32, pair: Packed) {
        let panel_groups = ROW / CHUNK;
        let moved = self.first.reinterpret::<U32>() ^ (group % panel_groups * CHUNK);
        let panel = (group / panel_groups).saturating_mul(self.layout.panel_bytes());
        let address = k.eval(moved.reinterpret::<SharedAddress>());
        k.store_packed(address + panel.saturating_add(row.saturating_mul(ROW)), &[pair]);
    }
}
