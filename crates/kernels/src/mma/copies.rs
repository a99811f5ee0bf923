//! Loading tiles by `cp.async`: eight threads copy a row, and in each pass the thread block copies
//! one row for every eight threads.
//!
//! With a page table, rows may be anywhere. A warp copies the same few rows of every key block, so
//! each of its lanes looks up the page of one of these rows, one key block ahead: copies then do
//! not wait for the block table.

use ptx::{
    Builder, ChunkPlace, Expression, GlobalAddress, Reg, RowCopies, SharedAddress, TileLayout,
    TileRing, U32, U64, Value,
};

use super::Mma;
use super::work_tile::{HeadRows, WorkTile};
use crate::attention::sequences::Places;

/// Threads that copy a row, then rows that a warp copies in a pass.
const ROW_THREADS: u32 = 8;
const WARP_ROWS: u32 = 32 / ROW_THREADS;

/// The rows of one head of a tensor, copied a block at a time.
pub(super) struct Blocks {
    copies: RowCopies,
    /// Rows that the thread block copies in one pass.
    pass: u32,
    /// The head's first element, the same in all threads, then the row at which the sequence
    /// begins.
    source: Reg<GlobalAddress>,
    start: Option<Reg<U32>>,
    /// Bytes from row to row.
    row_bytes: Reg<U32>,
}

impl Blocks {
    pub(super) fn new(
        k: &mut Builder,
        threads: u32,
        layout: TileLayout,
        columns: u32,
        rows: HeadRows,
    ) -> Self {
        let row_bytes = k.eval(rows.stride.convert::<U32>() * layout.element.bytes());
        let copies = RowCopies::new(layout, columns);
        let pass = threads / ROW_THREADS;
        Blocks { copies, pass, source: rows.first, start: rows.start, row_bytes }
    }

    /// Clears the chunks beyond the tensor's columns, in every slot; copies do not write them.
    pub(super) fn clear_padding(&self, k: &mut Builder, slots: &[Reg<SharedAddress>]) {
        let rows = self.copies.layout().rows;
        for chunk in self.copies.padding() {
            let zero = [0; 4].map(|zero| k.eval::<U32>(zero));
            for slot in slots {
                let threads = ROW_THREADS * self.pass;
                for first in (0..rows).step_by(threads as usize) {
                    let thread = k.thread_index();
                    let row = k.eval(thread + first);
                    k.if_(row.less(rows), |k| {
                        self.copies.clear(k, (*slot, 0), row, chunk, &zero);
                    });
                }
            }
        }
    }

    /// Copies the block of rows from `first_row` on. With `rows`, only that many exist, and zeros
    /// are written for the others.
    pub(super) fn copy(
        &self,
        k: &mut Builder,
        slot: Reg<SharedAddress>,
        first_row: Reg<U32>,
        rows: Option<Reg<U32>>,
    ) {
        let first_row = match self.start {
            None => first_row,
            Some(start) => k.eval(start + first_row),
        };
        self.copy_from(k, slot, rows, |k, place, first| {
            let row = k.eval(first_row + place.row + first);
            k.multiply_wide(row, self.row_bytes)
        });
    }

    /// Copies a block of rows. `offset` returns the byte offset, from `source`, of the row that a
    /// thread copies in the pass whose first row is given.
    fn copy_from(
        &self,
        k: &mut Builder,
        slot: Reg<SharedAddress>,
        rows: Option<Reg<U32>>,
        mut offset: impl FnMut(&mut Builder, ChunkPlace, u32) -> Reg<U64>,
    ) {
        // Recomputed for each block: values that depend on the thread would otherwise occupy
        // registers throughout the loop.
        let thread = k.thread_index();
        let place = ChunkPlace::of(k, thread);
        let target = self.copies.target(k, slot, place);
        let column = k.eval(self.source + place.source_bytes().convert::<U64>());
        for first in (0..self.copies.layout().rows).step_by(self.pass as usize) {
            let valid = rows.map(|rows| {
                let row = k.eval(place.row + first);
                self.copies.valid_bytes(k, row, rows)
            });
            let offset = offset(k, place, first);
            let source = k.eval(column + offset);
            self.copies.copy(k, place, (target, first), source, valid);
        }
    }
}

/// The page table of a sequence, and this lane's current position in it.
#[derive(Clone, Copy)]
pub(super) struct Pages {
    places: Places,
    sequence: Reg<U32>,
    /// Positions before the first key that are not part of the sequence (left padding).
    padding: Reg<U32>,
    /// Bytes from page to page of keys and of values.
    page_bytes: [Reg<U64>; 2],
    /// The page of the lane's row in the key block to be copied next, then the row in that page.
    page: Reg<U32>,
    row: Reg<U32>,
    /// Rows of a pass, then passes of a key block.
    pass: u32,
    passes: u32,
}

impl Pages {
    pub(super) fn new(
        k: &mut Builder,
        mma: &Mma,
        places: Places,
        sequence: Reg<U32>,
        padding: Reg<U32>,
        strides: [Reg<U64>; 2],
    ) -> Self {
        let bytes = |k: &mut Builder, stride: Reg<U64>| k.eval(stride * mma.element.bytes());
        let (pass, passes) = (mma.pass(), mma.key_block / mma.pass());
        let page_bytes = strides.map(|stride| bytes(k, stride));
        let (page, row) = (k.variable(0), k.variable(0));
        Pages { places, sequence, padding, page_bytes, page, row, pass, passes }
    }

    /// Looks up the lane's row of the key block that begins at `first_key`.
    fn look_up(&self, k: &mut Builder, first_key: Reg<U32>) {
        let (thread, lane) = (k.thread_index(), k.lane());
        let index = k.eval(lane % (WARP_ROWS * self.passes));
        let row = index / WARP_ROWS * self.pass + thread / 32 * WARP_ROWS + index % WARP_ROWS;
        let position = k.eval(self.padding + first_key + row);
        let (page, row) = self.places.locate(k, self.sequence, position);
        k.set(self.page, page);
        k.set(self.row, row);
    }

    /// Copies keys (`tensor` 0) or values (1) of the key block that was looked up.
    fn copy(
        &self,
        k: &mut Builder,
        tensor: usize,
        blocks: &Blocks,
        slot: Reg<SharedAddress>,
        rows: Option<Reg<U32>>,
    ) {
        let row = k.multiply_wide(self.row, blocks.row_bytes);
        let mine = k.eval(self.page.convert::<U64>() * self.page_bytes[tensor] + row);
        let lane = k.lane();
        blocks.copy_from(k, slot, rows, |k, _, first| {
            let index = k.eval(lane / ROW_THREADS + first / self.pass * WARP_ROWS);
            k.shuffle_index_wide(mine, index)
        });
    }
}

/// The key blocks of a head: their keys and values.
pub(super) struct KeyBlocks {
    keys: Blocks,
    values: Blocks,
    pages: Option<Pages>,
}

impl KeyBlocks {
    pub(super) fn new(k: &mut Builder, mma: &Mma, tile: &WorkTile) -> Self {
        let keys = Blocks::new(k, mma.threads(), mma.key_layout(), mma.head_dim, tile.keys);
        let values =
            Blocks::new(k, mma.threads(), mma.value_layout(), mma.value_head_dim, tile.values);
        KeyBlocks { keys, values, pages: tile.pages }
    }

    /// Clears the chunks of keys beyond their columns. Columns of values beyond theirs are not
    /// read.
    pub(super) fn clear_padding(&self, k: &mut Builder, keys: &TileRing) {
        self.keys.clear_padding(k, keys.slots());
    }

    /// Returns whether key blocks must be looked up before they are copied.
    pub(super) fn are_looked_up(&self) -> bool {
        self.pages.is_some()
    }

    /// Looks up the key block that is copied next, with a page table.
    pub(super) fn look_up(&self, k: &mut Builder, first_key: impl Into<Value<U32>>) {
        if let Some(pages) = &self.pages {
            let first_key = k.eval(first_key);
            pages.look_up(k, first_key);
        }
    }

    /// Copies the key block that begins at `first_key`, the one that was looked up last. With
    /// `rows`, only that many exist, and zeros are written for the others.
    pub(super) fn copy(
        &self,
        k: &mut Builder,
        [keys, values]: [Reg<SharedAddress>; 2],
        first_key: Reg<U32>,
        rows: Option<Reg<U32>>,
    ) {
        match &self.pages {
            None => {
                self.keys.copy(k, keys, first_key, rows);
                self.values.copy(k, values, first_key, rows);
            }
            Some(pages) => {
                pages.copy(k, 0, &self.keys, keys, rows);
                pages.copy(k, 1, &self.values, values, rows);
            }
        }
    }
}

/// Waits until at most `pending` copy groups are in flight, then synchronises the thread block.
pub(super) fn wait(k: &mut Builder, pending: u32) {
    k.copy_async_wait(pending);
    k.block_sync();
}

impl Mma {
    /// Returns the number of rows that the thread block copies in one pass.
    fn pass(&self) -> u32 {
        self.threads() / ROW_THREADS
    }

    /// Returns the number of rows of a key block that each warp copies.
    pub(super) fn warp_copies(&self) -> u32 {
        self.key_block / self.warps
    }
}
