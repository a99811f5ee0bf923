//! Copies of tensor rows into swizzled tiles, by `cp.async`.
//!
//! Eight neighbouring threads copy one 128-byte row of a panel, a 16-byte chunk each; the swizzle
//! permutes the chunks.

use std::ops::Range;

use super::{CHUNK, PANEL_CHUNKS, ROW, check, chunk_columns};
use crate::tile::TileLayout;
use crate::tile::shared::checked_layout;
use crate::{
    Builder, CopyCache, Expression, GlobalAddress, Instruction, Reg, Select, SharedAddress,
    StoreHint, U32, Value,
};

/// A ring of tiles in shared memory that are filled and read in turn.
#[derive(Clone, Debug)]
pub struct TileRing {
    /// The addresses of the tiles, the one to be read now first.
    slots: Vec<Reg<SharedAddress>>,
}

impl TileRing {
    /// Reserves shared memory for `count` tiles, at least one.
    #[track_caller]
    pub fn new(k: &mut Builder, name: &str, layout: TileLayout, mut count: u32) -> Self {
        check(k, layout);
        let layout = checked_layout(k, name, layout);
        if count == 0 || count > k.target().shared_memory_limit() / layout.bytes().max(ROW) {
            k.misuse(format!("{name}: {count} tiles of {} bytes", layout.bytes()));
            count = 1;
        }
        let offset = k.shared(name, count * layout.bytes(), layout.alignment());
        let mut slots = Vec::new();
        for index in 0..count {
            let address = k.shared_address(offset + index * layout.bytes());
            slots.push(k.variable(address));
        }
        TileRing { slots }
    }

    /// Returns the address of the tile `index` places after the one being read now.
    ///
    /// # Panics
    ///
    /// If there are no more than `index` tiles.
    pub fn at(&self, index: u32) -> Reg<SharedAddress> {
        self.slots[index as usize]
    }

    /// Returns the addresses of all tiles, the one being read now first.
    pub fn slots(&self) -> &[Reg<SharedAddress>] {
        &self.slots
    }

    /// Rotates the ring: the next tile becomes the one to read.
    #[track_caller]
    pub fn rotate(&self, k: &mut Builder) {
        let first = k.variable(self.slots[0]);
        for pair in self.slots.windows(2) {
            k.set(pair[0], pair[1]);
        }
        k.set(self.slots[self.slots.len() - 1], first);
    }
}

/// The chunk that a thread copies.
#[derive(Clone, Copy, Debug)]
pub struct ChunkPlace {
    /// The row of the tile.
    pub row: Reg<U32>,
    /// The index of the chunk in each panel row, from 0 to 7.
    pub chunk: Reg<U32>,
}

impl ChunkPlace {
    /// Returns the chunk that a thread copies when each group of eight threads copies one row.
    #[track_caller]
    pub fn of(k: &mut Builder, thread: Reg<U32>) -> Self {
        ChunkPlace { row: k.eval(thread / PANEL_CHUNKS), chunk: k.eval(thread % PANEL_CHUNKS) }
    }

    /// Returns the swizzled offset of the chunk in the first panel of a tile, for a warp that
    /// copies four rows at a time: in rows 0 to 3 of each eight, and in rows 4 to 7.
    #[track_caller]
    pub fn swizzled_fours(&self, k: &mut Builder) -> [Reg<U32>; 2] {
        let first = k.eval(self.row * ROW + (self.chunk ^ self.row) * CHUNK);
        // Four rows further, bit 2 of the row flips bit 2 of the chunk index.
        [first, k.eval(first ^ (4 * CHUNK))]
    }

    /// Returns the offset of the chunk in bytes from the first element of a row of the tensor.
    pub fn source_bytes(&self) -> Value<U32> {
        self.chunk * CHUNK
    }
}

/// The mapping of tensor rows to the rows of a tile, which may be wider.
#[derive(Clone, Copy, Debug)]
pub struct RowCopies {
    layout: TileLayout,
    columns: u32,
}

impl RowCopies {
    /// Creates the mapping for rows of `columns` elements, a multiple of 16 bytes, in a tile of
    /// this layout.
    pub const fn new(layout: TileLayout, columns: u32) -> Self {
        RowCopies { layout, columns }
    }

    /// Returns the layout of the tile.
    pub const fn layout(&self) -> TileLayout {
        self.layout
    }

    /// Returns the address of a chunk in the first panel of a tile.
    #[track_caller]
    pub fn target(
        &self,
        k: &mut Builder,
        tile: Reg<SharedAddress>,
        place: ChunkPlace,
    ) -> Reg<SharedAddress> {
        let ChunkPlace { row, chunk } = place;
        k.eval(tile + row * ROW + (chunk ^ (row % 8)) * CHUNK)
    }

    /// Returns the `valid` argument of [`copy`](RowCopies::copy) for a row: the size of a chunk if
    /// `row` is below `rows`, else 0, which fills the chunk with zeros.
    #[track_caller]
    pub fn valid_bytes(
        &self,
        k: &mut Builder,
        row: impl Into<Value<U32>>,
        rows: Reg<U32>,
    ) -> Reg<U32> {
        k.eval(row.into().less(rows).select::<U32>(CHUNK, 0))
    }

    /// Copies the thread's chunk of each panel of a row. `to` is the chunk's address in the first
    /// panel and a number of rows to go further down; `from` is the address of the chunk in the
    /// tensor. Beyond `valid` bytes a chunk is filled with zeros. Chunks beyond the tensor's
    /// columns are not written: see [`clear`](RowCopies::clear).
    #[track_caller]
    pub fn copy(
        &self,
        k: &mut Builder,
        place: ChunkPlace,
        (to, rows): (Reg<SharedAddress>, u32),
        from: Reg<GlobalAddress>,
        valid: Option<Reg<U32>>,
    ) {
        let held = self.columns / chunk_columns(self.layout);
        let layout = checked_layout(k, "rows", self.layout);
        for panel in 0..layout.panels() {
            let copy = Instruction::CopyAsync {
                dst: k.address(to + (rows.saturating_mul(ROW) + panel * layout.panel_bytes())),
                src: k.address(from + panel * ROW),
                bytes: CHUNK,
                source_bytes: valid.map(Into::into),
                cache: CopyCache::L2Only,
            };
            match held.saturating_sub(PANEL_CHUNKS * panel) {
                0 => (),
                PANEL_CHUNKS.. => k.push(copy),
                rest => k.if_one(place.chunk.less(rest), copy),
            }
        }
    }

    /// Returns the chunks of a row that products read and copies do not write.
    pub fn padding(&self) -> Range<u32> {
        let columns = chunk_columns(self.layout);
        self.columns / columns..self.layout.columns / columns
    }

    /// Fills a chunk of a row with `zero`, four registers that hold 0. The tile begins `offset`
    /// bytes after `tile`.
    #[track_caller]
    pub fn clear(
        &self,
        k: &mut Builder,
        (tile, offset): (Reg<SharedAddress>, u32),
        row: Reg<U32>,
        chunk: u32,
        zero: &[Reg<U32>; 4],
    ) {
        let within = row * ROW + ((row % 8) ^ (chunk % PANEL_CHUNKS)) * CHUNK;
        let panel = (chunk / PANEL_CHUNKS).saturating_mul(self.layout.panel_bytes());
        let further = offset.saturating_add(panel);
        k.store_vector(tile + within + further, zero, StoreHint::default());
    }

    /// Fills one chunk of each panel of a row with `zero`, four registers that hold 0. Eight
    /// threads clear a whole row, so the swizzle does not matter.
    #[track_caller]
    pub fn clear_row(
        &self,
        k: &mut Builder,
        tile: Reg<SharedAddress>,
        (row, chunk): (Reg<U32>, Value<U32>),
        zero: &[Reg<U32>; 4],
    ) {
        let at = k.eval(tile + row * ROW + chunk * CHUNK);
        let layout = checked_layout(k, "a row", self.layout);
        for panel in 0..layout.panels() {
            k.store_vector(at + panel * layout.panel_bytes(), zero, StoreHint::default());
        }
    }
}
