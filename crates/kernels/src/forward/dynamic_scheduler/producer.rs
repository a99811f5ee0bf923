//! The producer's side of the dynamic scheduler: claims tiles, looks up their records, computes
//! which key blocks they need, and posts them to the consumers.
//!
//! A claim and the lookup that follows it take long, so both are issued a few key blocks before the
//! end of the current tile (`look_ahead`) and completed when the next tile is posted (`post`).

use ptx::{
    Builder, Expression, Pred, Producer, Reg, S32, Scope, Select, SharedAddress, U32, U64, Value,
};

use super::{Batch, DynamicScheduler, Pages, TileList, Tiles, WorkSlots, offset};
use crate::attention::descale::Product;
use crate::attention::sequences::page_of;
use crate::attention::visibility::{Blocks, Masked, RowTile};
use crate::forward::prefill::{copied_rows, slice_corner};
use crate::forward::producer::Loader;
use crate::forward::scheduler::{ProducerScheduler, TileScheduler, first_block, set_each};
use crate::sequencer::{CLAIMED_BYTE, COUNT_BYTE, DONE_BYTE, RECORD_BYTES, RECORDS_BYTE};

/// The next tile is claimed this many key blocks before the last one to be loaded of the current
/// tile: early enough that the producer does not wait for the atomic while stages are empty.
/// Earlier claims balance worse, since a thread block that has claimed a tile may still have a long
/// one to do while others have none left: claims a whole tile ahead cost 12 to 18 % by counting
/// where thread blocks have eight tiles each.
const CLAIMED_AT: u32 = 3;
/// The record of the next tile is requested this many key blocks before the last one of the current
/// tile.
const LOOKED_UP_AT: u32 = 1;

/// The producer's side of the dynamic scheduler.
pub(in crate::forward) struct DynamicProducer<'a> {
    query_rows: u32,
    key_block: u32,
    slots: &'a WorkSlots,
    batch: &'a Batch,
    posted: Producer,
    /// Number of tiles per head.
    records: Reg<U32>,
    /// `None` where each thread block has a single tile.
    claims: Option<Claims>,
}

/// What the producer needs to claim tiles of a list.
#[derive(Clone, Copy)]
struct Claims {
    list: TileList,
    /// Number of thread blocks of the grid.
    blocks: Reg<U32>,
}

/// The registers of the producer's current tile.
pub(in crate::forward) struct Claimed {
    /// The tile's number among all tiles of all heads. A few key blocks before the tile's end,
    /// `look_ahead` overwrites it with the number of the next tile.
    number: Reg<U32>,
    /// The end (exclusive) of the tile's key blocks.
    blocks: Reg<U32>,
    rows: Rows,
}

/// Where a tile's keys and values lie.
#[derive(Clone, Copy)]
pub(in crate::forward) struct Rows {
    /// The tile's first key block; only with a window.
    first_block: Option<Reg<U32>>,
    key_length: Reg<U32>,
    key_head: Reg<U32>,
    place: RowsPlace,
}

#[derive(Clone, Copy)]
enum RowsPlace {
    /// Consecutive rows of the tensor that end before row `end`.
    Slice { end: Reg<U32> },
    /// Pages, listed in row `sequence` of the block table.
    Pages { sequence: Reg<U32> },
}

impl<'a> DynamicProducer<'a> {
    pub(in crate::forward) fn new(k: &mut Builder, scheduler: &DynamicScheduler<'a>) -> Self {
        let DynamicScheduler { prefill, slots, batch } = *scheduler;
        let (records, claims) = match batch.tiles {
            Tiles::Single { tiles, .. } => (tiles, None),
            Tiles::Listed(list) => {
                let records = k.load::<U32, _>(list.schedule + COUNT_BYTE);
                let blocks = k.special(ptx::SpecialRegister::GridExtent(ptx::Axis::X));
                (records, Some(Claims { list, blocks }))
            }
        };
        DynamicProducer {
            query_rows: prefill.tile.query_rows(),
            key_block: prefill.tile.key_block,
            slots,
            batch,
            posted: slots.pipeline.producer(k),
            records,
            claims,
        }
    }

    /// Returns whether `number` is the number of a tile.
    fn is_tile(&self, number: Reg<U32>) -> Value<Pred> {
        number.less(self.records * self.batch.heads)
    }

    /// Requests the record of tile `number` from the list, if there is such a tile, without waiting
    /// for it.
    fn look_up(&self, k: &mut Builder, list: &TileList, number: Reg<U32>) {
        k.if_(self.is_tile(number), |k| self.ask_for_record(k, list, number));
    }

    /// Starts the copy of a tile's record to shared memory and stores the tile's head behind it.
    /// Tiles are numbered by group, within a group by record, and within a record by head.
    fn ask_for_record(&self, k: &mut Builder, list: &TileList, number: Reg<U32>) {
        let TileList { schedule, together, last } = *list;
        let heads = self.batch.heads;
        let before = k.eval(self.records * last);
        let is_last = k.eval(number.at_least(before));
        let first = k.eval(is_last.select::<U32>(last, 0));
        let together = k.eval(is_last.select::<U32>(heads - last, together));
        let number = k.eval(number - self.records * first);
        let per_group = k.eval(self.records * together);
        let group = k.eval(number / per_group);
        let rest = k.eval(number - group * per_group);
        let record = k.eval(rest / together);
        let head = k.eval(first + group * together + (rest - record * together));
        let at = k.eval(schedule + record.convert::<U64>() * RECORD_BYTES as u64);
        let room = k.shared_address(self.slots.record);
        for byte in [0, 16] {
            k.copy_async(room + byte, at + u64::from(RECORDS_BYTE + byte), None);
        }
        k.copy_async_commit();
        k.store(room + RECORD_BYTES, head);
    }

    /// Posts the tile that was looked up, or a slot of zeros if there are no more tiles.
    fn locate(&self, k: &mut Builder, tile: &Claimed) {
        let slot = self.posted.acquire(k);
        let slot = self.slots.slot(k, slot);
        k.if_else(
            self.has_tile(tile),
            |k| self.post(k, tile, slot),
            |k| {
                let zero = k.eval::<U32>(0);
                let window = tile.rows.first_block.map(|_| [zero; 2]);
                WorkSlots::write_blocks(k, slot, [zero; 2], window);
            },
        );
        self.posted.commit(k);
        self.posted.advance(k);
    }

    /// Computes the registers of `tile` from its record and writes its slot.
    fn post(&self, k: &mut Builder, tile: &Claimed, slot: Reg<SharedAddress>) {
        let Batch { group, visibility, .. } = self.batch;
        if self.claims.is_some() {
            k.copy_async_wait(0);
        }
        let [sequence, first_row, _, query_length] = self.slots.record(k, 0);
        let [key_start, key_length, output_start, lse_start] = self.slots.record(k, 1);
        let head = self.slots.record_head(k);
        let (key_head, _) = group.divide(k, head);

        k.set(tile.rows.key_length, key_length);
        k.set(tile.rows.key_head, key_head);
        match tile.rows.place {
            RowsPlace::Slice { end } => k.set(end, key_start + key_length),
            RowsPlace::Pages { sequence: row } => k.set(row, sequence),
        }

        let rows = RowTile { first_row, rows: self.query_rows, query_length, key_length };
        let first = tile.rows.first_block;
        let blocks = Blocks { size: self.key_block, least: 1, first, end: tile.blocks };
        let Masked { from, before } = visibility.find_blocks(k, &rows, blocks);
        let masked_from = k.eval(from);
        let window =
            first.map(|first_block| [first_block, k.eval(before.unwrap_or_else(|| 0.into()))]);
        if window.is_none() {
            // A sequence without keys still gets one key block, all of it masked.
            k.set(tile.blocks, tile.blocks.maximum(1));
        }
        WorkSlots::write_blocks(k, slot, [tile.blocks, masked_from], window);
        let rows = [first_row, query_length, key_length, head];
        k.store_vector(slot + offset::ROWS, &rows, Default::default());
        let output_end = k.eval(output_start + query_length);
        k.store_vector(slot + offset::OUTPUT_END, &[output_end, lse_start], Default::default());
        if let Some(slopes) = &self.batch.slopes {
            let slope = slopes.unscaled(k, sequence, head, self.batch.scale_log2);
            k.store(slot + offset::SLOPE, slope);
        }
        if let Some(sinks) = &self.batch.sinks {
            let sink = sinks.of(k, head);
            k.store(slot + offset::SINK, sink);
        }
        if let Some(descales) = &self.batch.descales {
            for (product, byte) in Product::ALL.into_iter().zip(offset::DESCALES) {
                let factor = descales.of(k, product, sequence, key_head);
                k.store(slot + byte, factor);
            }
        }
        // Mask and score functions may use the sequence's index.
        k.store(slot + offset::SEQUENCE, sequence);
    }
}

impl TileScheduler for DynamicProducer<'_> {
    type Tile = Claimed;

    fn first_tile(&self, k: &mut Builder) -> Claimed {
        let block = k.block_index();
        let number = k.variable(block);
        let zero = |k: &mut Builder| k.variable::<U32>(0);
        let tile = Claimed {
            number,
            blocks: zero(k),
            rows: Rows {
                first_block: self.batch.visibility.is_window().then(|| zero(k)),
                key_length: zero(k),
                key_head: zero(k),
                place: match self.batch.pages {
                    None => RowsPlace::Slice { end: zero(k) },
                    Some(_) => RowsPlace::Pages { sequence: zero(k) },
                },
            },
        };
        if let Some(claims) = &self.claims {
            self.look_up(k, &claims.list, number);
        }
        self.locate(k, &tile);
        tile
    }

    fn next_tile(&self, k: &mut Builder, tile: &Claimed) {
        if self.claims.is_none() {
            k.set(tile.number, u32::MAX);
        }
        self.locate(k, tile);
    }

    fn has_tile(&self, tile: &Claimed) -> Value<Pred> {
        self.is_tile(tile.number)
    }

    fn last_block(&self, tile: &Claimed) -> Value<U32> {
        tile.blocks - 1
    }
}

impl ProducerScheduler for DynamicProducer<'_> {
    type Rows = Rows;

    fn rows(&self, tile: &Claimed) -> Rows {
        tile.rows
    }

    fn hold(&self, k: &mut Builder, tile: &Claimed) -> Rows {
        let Rows { first_block, key_length, key_head, place } = tile.rows;
        Rows {
            first_block: first_block.map(|first| k.variable(first)),
            key_length: k.variable(key_length),
            key_head: k.variable(key_head),
            place: match place {
                RowsPlace::Slice { end } => RowsPlace::Slice { end: k.variable(end) },
                RowsPlace::Pages { sequence } => {
                    RowsPlace::Pages { sequence: k.variable(sequence) }
                }
            },
        }
    }

    fn take(&self, k: &mut Builder, held: &Rows, tile: &Claimed) {
        let words = |Rows { first_block, key_length, key_head, place }| {
            let (RowsPlace::Slice { end: place } | RowsPlace::Pages { sequence: place }) = place;
            first_block.into_iter().chain([key_length, key_head, place])
        };
        set_each(k, words(*held), words(tile.rows));
    }

    fn is_first_block(&self, held: &Rows, block: Reg<U32>) -> Value<Pred> {
        block.equals(first_block(held.first_block))
    }

    fn load(&self, k: &mut Builder, loader: &Loader<'_>, rows: &Rows, row: Reg<U32>) {
        match (&rows.place, &self.batch.pages) {
            (RowsPlace::Slice { end }, _) => {
                let corner = slice_corner(k, row, rows.key_length, *end, rows.key_head);
                loader.load(k, &corner);
            }
            (RowsPlace::Pages { sequence }, Some(pages)) => {
                loader.fill(k, |k, tile, full| {
                    let together = copied_rows(pages.rows, loader.rows());
                    k.for_range(0, loader.rows(), together, |k, first| {
                        let row = k.eval(row + first);
                        let room = tile.rows(k, first, together);
                        let corner = pages.corner(k, rows, *sequence, row);
                        room.load(k, loader.map(), &corner, full, Default::default());
                    });
                });
            }
            (RowsPlace::Pages { .. }, None) => unreachable!("a batch without pages has slices"),
        }
    }

    /// The position comes from the record, which stays valid until the next one is requested.
    fn load_queries(&self, k: &mut Builder, loader: &Loader<'_>, _: &Claimed) {
        let [_, first_row, query_start, query_length] = self.slots.record(k, 0);
        let head = self.slots.record_head(k);
        let query_end = k.eval(query_start + query_length);
        let corner = slice_corner(k, first_row, query_length, query_end, head);
        loader.load(k, &corner);
    }

    /// Claims the next tile and requests its record; both latencies overlap the waits for free
    /// stages.
    fn look_ahead(&self, k: &mut Builder, tile: &Claimed, block: Reg<U32>) {
        let Some(claims) = &self.claims else { return };
        // A tile with fewer key blocks does both at its last block, so that each happens exactly
        // once per tile, the claim first.
        let first = first_block(tile.rows.first_block);
        let comes = |blocks: u32| block.equals((first.clone() + blocks).minimum(tile.blocks - 1));
        k.if_(comes(CLAIMED_AT), |k| {
            // The number of tiles claimed before, not counting the first tile of each thread block,
            // which is not claimed.
            let counter = claims.list.schedule + CLAIMED_BYTE;
            let claimed = k.atomic_add::<U32, _>(counter, 1, Scope::Gpu);
            k.set(tile.number, claimed);
        });
        k.if_(comes(LOOKED_UP_AT), |k| {
            k.set(tile.number, tile.number + claims.blocks);
            self.look_up(k, &claims.list, tile.number);
        });
    }

    /// Counts this thread block as done; the last one resets the counters for the next launch.
    fn finish(&self, k: &mut Builder) {
        let Some(Claims { list: TileList { schedule, .. }, blocks }) = self.claims else { return };
        let done_at = k.eval(schedule + DONE_BYTE);
        let done = k.atomic_add::<U32, _>(done_at, 1, Scope::Gpu);
        k.if_(done.equals(blocks - 1), |k| {
            let claimed_at = k.eval(schedule + CLAIMED_BYTE);
            let claimed = k.atomic_add::<U32, _>(claimed_at, 0, Scope::Gpu);
            let zero = k.eval::<U32>(0);
            k.reduce_add::<U32, _>(claimed_at, zero - claimed, Scope::Gpu);
            k.reduce_add::<U32, _>(done_at, zero - blocks, Scope::Gpu);
        });
    }
}

impl Pages {
    /// Returns the tensor-map coordinates of a row of a sequence, through the block table. Rows
    /// beyond the end of the sequence are loaded as zeros.
    fn corner(
        &self,
        k: &mut Builder,
        rows: &Rows,
        sequence: Reg<U32>,
        row: Reg<U32>,
    ) -> [Value<S32>; 5] {
        let (index, within) = self.size.divide(k, row);
        let column = k.eval(index.minimum(self.columns - 1));
        let page = page_of(k, self.table, self.columns, self.count, sequence, column.into());
        let length = k.eval(rows.key_length.maximum(row) - row);
        let end = k.eval(page * self.stride + within + length);
        let zero = k.eval::<U32>(0);
        slice_corner(k, zero, length, end, rows.key_head)
    }
}
