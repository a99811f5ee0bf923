//! The dynamic tile scheduler, for ragged batches: tiles are claimed by the producer and handed to
//! the consumers.
//!
//! The [`Sequencer`](crate::Sequencer) leaves a list of records, a row tile of a
//! sequence each, from much work to little. The producer of each block claims the
//! next tile of the list when it needs one, so that blocks end together whatever
//! tiles cost and whatever else runs on the GPU. It works out what the tile
//! needs and writes that to a slot in shared memory, where the consumers find
//! it. Which block takes a tile has no influence on its result.
//!
//! Heads go in rounds of some at a time, so that the keys and values of a round
//! stay in the second-level cache. The last round has more of them: enough short
//! tiles to come after its long ones.
//!
//! Where all tiles run at once there is no list: each block has one tile, which it
//! finds by itself (`single_tile`).

use ptx::{
    Builder, Choose, Consumer, Expression, F32, GlobalAddress, Pipeline, Pred, Producer, Reg, S32,
    Scope, SharedAddress, U32, U64, Value,
};

use super::prefill::{Prefill, copied_rows, slice_corner};
use super::producer::Loader;
use super::scheduler::{ConsumerScheduler, Place, ProducerScheduler, TileScheduler};
use super::walk::{TileBlocks, Walks, WholeWalk};
use crate::attention::descale::{Descales, Product};
use crate::attention::rows::Sinks;
use crate::attention::scores::Slopes;
use crate::attention::sequences::page_of;
use crate::attention::visibility::{Blocks, Masked, RowTile, Visibility};
use crate::divisor::DivisorRegisters;
use crate::parameter::{List, Number, Tensor, Workspace};
use crate::sequencer::{
    Batch as Sequences, CLAIMED_BYTE, COUNT_BYTE, DONE_BYTE, RECORD_BYTES, RECORDS_BYTE,
};

/// Tiles that may be posted before the first of them is done: the one in work,
/// the one begun, and one ahead, with one to spare.
const SLOTS: u32 = 4;
/// The next tile is claimed so many key blocks before the last, and its record asked for so many:
/// time enough for the one and the other to come, so that nobody waits for them while stages are
/// empty. Whoever claims earlier may have a long tile before it, while others have none: claims a
/// whole tile ahead cost 12 to 18 % by counting where blocks have eight tiles each.
const CLAIMED_AT: u32 = 3;
const LOOKED_UP_AT: u32 = 1;
/// Words of a slot: key blocks up to the last, the first of them, where masks
/// begin on the right and end on the left; first row, lengths and head; the end
/// of the outputs, the start of the log-sum-exps, slope and sink; factors of
/// scores and outputs, and the sequence.
const SLOT_BYTES: u32 = 64;

/// Slots in shared memory through which tiles go from the producer to the consumers, and before them
/// the record of the next tile and its head: there it comes without anybody waiting, and takes no
/// registers, of which producers of three consumer warpgroups have 32.
pub(super) struct WorkSlots {
    offset: u32,
    record: u32,
    pub(super) pipeline: Pipeline,
}

impl WorkSlots {
    pub(super) fn new(k: &mut Builder, consumer_warps: u32) -> Self {
        let offset = k.shared("slots", SLOTS * SLOT_BYTES, 16);
        let record = k.shared("record", RECORD_BYTES + 16, 16);
        WorkSlots { offset, record, pipeline: Pipeline::new(k, "slots", SLOTS, consumer_warps) }
    }

    fn slot(&self, k: &mut Builder, slot: Reg<U32>) -> Reg<SharedAddress> {
        let base = k.shared_address(self.offset);
        k.eval(base + slot * SLOT_BYTES)
    }

    fn read(&self, k: &mut Builder, slot: Reg<U32>, quarter: u32) -> [Reg<U32>; 4] {
        let slot = self.slot(k, slot);
        k.load_vector(slot + 16 * quarter, Default::default())
    }

    /// Writes the first quarter of a slot: key blocks up to the last and where masks begin, and with
    /// a window the first block and where masks end on the left. Else nobody reads those, and four
    /// registers in a row are more than the producer of three consumer warpgroups has.
    fn write_blocks(
        k: &mut Builder,
        slot: Reg<SharedAddress>,
        [blocks, masked_from]: [Reg<U32>; 2],
        window: Option<[Reg<U32>; 2]>,
    ) {
        match window {
            Some([first_block, whole_from]) => {
                let words = [blocks, first_block, masked_from, whole_from];
                k.store_vector(slot, &words, Default::default());
            }
            None => {
                k.store(slot, blocks);
                k.store(slot + 8, masked_from);
            }
        }
    }

    /// Half of the record of the tile that was looked up last.
    fn record(&self, k: &mut Builder, half: u32) -> [Reg<U32>; 4] {
        let record = k.shared_address(self.record);
        k.load_vector(record + 16 * half, Default::default())
    }

    /// Sets that record, with the tile's head.
    pub(super) fn set_record(&self, k: &mut Builder, halves: [[Reg<U32>; 4]; 2], head: Reg<U32>) {
        let record = k.shared_address(self.record);
        for (half, byte) in halves.iter().zip([0, 16]) {
            k.store_vector(record + byte, half, Default::default());
        }
        k.store(record + RECORD_BYTES, head);
    }

    /// Its head.
    fn record_head(&self, k: &mut Builder) -> Reg<U32> {
        let record = k.shared_address(self.record);
        k.load(record + RECORD_BYTES)
    }

    /// One word as a float.
    fn read_float(&self, k: &mut Builder, slot: Reg<U32>, word: u32) -> Reg<F32> {
        let slot = self.slot(k, slot);
        k.load(slot + 4 * word)
    }
}

/// What a launch says of its batch.
pub(super) struct Batch {
    pub(super) tiles: Tiles,
    pub(super) heads: Reg<U32>,
    group: DivisorRegisters,
    lse_head_stride: Reg<U32>,
    visibility: Visibility,
    slopes: Option<Slopes>,
    sinks: Option<Sinks>,
    descales: Option<Descales>,
    scale_log2: Reg<F32>,
    pages: Option<Pages>,
}

/// Where tiles come from.
pub(super) enum Tiles {
    /// From a list, for blocks to claim.
    Listed(TileList),
    /// From these sequences: each block has one, which it finds when it counts the tiles of a head.
    Single { sequences: Sequences, tiles: Reg<U32> },
}

/// The list of tiles, and how heads go through it.
#[derive(Clone, Copy)]
pub(super) struct TileList {
    schedule: Reg<GlobalAddress>,
    /// Heads of a round, and the first of the last one, which has more.
    together: Reg<U32>,
    last: Reg<U32>,
}

struct Pages {
    table: Reg<GlobalAddress>,
    /// Pages of a sequence, and in all.
    columns: Reg<U32>,
    count: Reg<U32>,
    size: DivisorRegisters,
    /// From a page to the next in the tensor.
    stride: Reg<U32>,
    /// Rows of one copy.
    rows: u32,
}

impl Batch {
    pub(super) fn parameters(k: &mut Builder, prefill: &Prefill, scale_log2: Reg<F32>) -> Self {
        let rules = prefill.tile.rules;
        let tiles = match prefill.single_tile {
            true => Tiles::Single { sequences: Sequences::parameters(k), tiles: k.variable(0) },
            false => Tiles::Listed(TileList {
                schedule: Workspace::Schedule.address(k),
                together: Number::HeadsPerGroup.read(k),
                last: Number::LastHeads.read(k),
            }),
        };
        let entries = |k: &mut Builder| match &tiles {
            Tiles::Single { sequences, .. } => sequences.entry_count,
            Tiles::Listed(_) => Number::Entries.read(k),
        };
        Batch {
            heads: Number::QueryHeads.read(k),
            group: DivisorRegisters::parameters(k, Number::GroupSize),
            lse_head_stride: Number::LseHeadStride.read(k),
            visibility: Visibility::parameters(k, rules.mask),
            slopes: rules.alibi.then(|| Slopes::parameters(k)),
            sinks: rules.sinks.then(|| Sinks::parameters(k)),
            descales: prefill.tile.is_fp8().then(|| Descales::parameters(k)),
            scale_log2,
            pages: prefill.page_rows.map(|rows| Pages {
                table: List::BlockTable.address(k),
                columns: Number::PageColumns.read(k),
                count: entries(k),
                size: DivisorRegisters::parameters(k, Number::PageSize),
                stride: Tensor::Key.entry_rows(k),
                rows,
            }),
            tiles,
        }
    }
}

/// The producer's side.
pub(super) struct DynamicProducer<'a> {
    query_rows: u32,
    key_block: u32,
    slots: &'a WorkSlots,
    batch: &'a Batch,
    posted: Producer,
    /// Tiles of a head.
    records: Reg<U32>,
    claims: Option<Claims>,
}

/// What tiles of a list are claimed with.
#[derive(Clone, Copy)]
struct Claims {
    list: TileList,
    /// Blocks of the grid.
    blocks: Reg<U32>,
}

/// A tile that was claimed.
pub(super) struct Claimed {
    /// Its number, which a few key blocks before its end becomes that of the next one.
    number: Reg<U32>,
    /// The last key block and one.
    blocks: Reg<U32>,
    rows: Rows,
}

/// Where a tile's keys and values are.
pub(super) struct Rows {
    /// The first key block, with a window.
    first_block: Option<Reg<U32>>,
    key_length: Reg<U32>,
    key_head: Reg<U32>,
    place: RowsPlace,
}

enum RowsPlace {
    /// Where the sequence's keys end in their tensor.
    Slice { end: Reg<U32> },
    /// The sequence, which is its row of the block table.
    Pages { sequence: Reg<U32> },
}

impl<'a> DynamicProducer<'a> {
    pub(super) fn new(
        k: &mut Builder,
        prefill: &Prefill,
        slots: &'a WorkSlots,
        batch: &'a Batch,
    ) -> Self {
        let (records, claims) = match batch.tiles {
            Tiles::Single { tiles, .. } => (tiles, None),
            Tiles::Listed(list) => {
                let records = k.load::<U32, _>(list.schedule + COUNT_BYTE);
                let blocks = k.special(ptx::Special::GridExtent(ptx::Axis::X));
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

    /// Whether there is a tile of a number.
    fn is_tile(&self, number: Reg<U32>) -> Value<Pred> {
        number.less(self.records * self.batch.heads)
    }

    /// Looks up the tile of a number in the list, if there is one. Nobody waits for it here.
    fn look_up(&self, k: &mut Builder, list: &TileList, number: Reg<U32>) {
        k.if_(self.is_tile(number), |k| self.ask_for_record(k, list, number));
    }

    fn ask_for_record(&self, k: &mut Builder, list: &TileList, number: Reg<U32>) {
        let TileList { schedule, together, last } = *list;
        let heads = self.batch.heads;
        let before = k.eval(self.records * last);
        let is_last = k.eval(number.at_least(before));
        let first = k.eval(is_last.choose::<U32>(last, 0));
        let together = k.eval(is_last.choose::<U32>(heads - last, together));
        let number = k.eval(number - self.records * first);
        let per_round = k.eval(self.records * together);
        let round = k.eval(number / per_round);
        let rest = k.eval(number - round * per_round);
        let record = k.eval(rest / together);
        let head = k.eval(first + round * together + (rest - record * together));
        let at = k.eval(schedule + record.convert::<U64>() * RECORD_BYTES as u64);
        let room = k.shared_address(self.slots.record);
        for byte in [0, 16] {
            k.copy_async(room + byte, at + u64::from(RECORDS_BYTE + byte), None);
        }
        k.copy_async_commit();
        k.store(room + RECORD_BYTES, head);
    }

    /// Posts the tile that was looked up, or that there is none.
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
        self.posted.publish(k);
        self.posted.advance(k);
    }

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
            // A sequence without keys has a block too, all of it hidden.
            k.set(tile.blocks, tile.blocks.maximum(1));
        }
        WorkSlots::write_blocks(k, slot, [tile.blocks, masked_from], window);
        let rows = [first_row, query_length, key_length, head];
        k.store_vector(slot + 16, &rows, Default::default());
        let output_end = k.eval(output_start + query_length);
        k.store_vector(slot + 32, &[output_end, lse_start], Default::default());
        if let Some(slopes) = &self.batch.slopes {
            let slope = slopes.unscaled(k, sequence, head, self.batch.scale_log2);
            k.store(slot + 40, slope);
        }
        if let Some(sinks) = &self.batch.sinks {
            let sink = sinks.of(k, head);
            k.store(slot + 44, sink);
        }
        if let Some(descales) = &self.batch.descales {
            for (product, word) in [(Product::Scores, 12), (Product::Output, 13)] {
                let factor = descales.of(k, product, sequence, key_head);
                k.store(slot + 4 * word, factor);
            }
        }
        // Functions may ask for it.
        k.store(slot + 56, sequence);
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

    fn rows<'a>(&self, tile: &'a Claimed) -> &'a Rows {
        &tile.rows
    }

    fn hold(&self, k: &mut Builder, tile: &Claimed) -> Rows {
        let Rows { first_block, key_length, key_head, place } = &tile.rows;
        Rows {
            first_block: first_block.map(|first| k.variable(first)),
            key_length: k.variable(*key_length),
            key_head: k.variable(*key_head),
            place: match place {
                RowsPlace::Slice { end } => RowsPlace::Slice { end: k.variable(*end) },
                RowsPlace::Pages { sequence } => {
                    RowsPlace::Pages { sequence: k.variable(*sequence) }
                }
            },
        }
    }

    fn take(&self, k: &mut Builder, held: &Rows, tile: &Claimed) {
        if let (Some(held), Some(new)) = (held.first_block, tile.rows.first_block) {
            k.set(held, new);
        }
        k.set(held.key_length, tile.rows.key_length);
        k.set(held.key_head, tile.rows.key_head);
        match (&held.place, &tile.rows.place) {
            (RowsPlace::Slice { end: held }, RowsPlace::Slice { end: new })
            | (RowsPlace::Pages { sequence: held }, RowsPlace::Pages { sequence: new }) => {
                k.set(*held, *new);
            }
            _ => unreachable!("both are of this batch"),
        }
    }

    fn is_first_block(&self, held: &Rows, block: Reg<U32>) -> Value<Pred> {
        block.equals(first_or_none(held.first_block))
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

    /// From the record, which is there until the next one is asked for.
    fn load_queries(&self, k: &mut Builder, loader: &Loader<'_>, _: &Claimed) {
        let [_, first_row, query_start, query_length] = self.slots.record(k, 0);
        let head = self.slots.record_head(k);
        let query_end = k.eval(query_start + query_length);
        let corner = slice_corner(k, first_row, query_length, query_end, head);
        loader.load(k, &corner);
    }

    /// The claim and the record come while the producer waits for stages.
    fn look_ahead(&self, k: &mut Builder, tile: &Claimed, block: Reg<U32>) {
        let Some(claims) = &self.claims else { return };
        // Each comes once for each tile, however short, and in this order.
        let first = first_or_none(tile.rows.first_block);
        let comes = |blocks: u32| block.equals((first.clone() + blocks).minimum(tile.blocks - 1));
        k.if_(comes(CLAIMED_AT), |k| {
            // How many were claimed before, beside the first of each block.
            let counter = claims.list.schedule + CLAIMED_BYTE;
            let claimed = k.atomic_add::<U32, _>(counter, 1, Scope::Gpu);
            k.set(tile.number, claimed);
        });
        k.if_(comes(LOOKED_UP_AT), |k| {
            k.set(tile.number, tile.number + claims.blocks);
            self.look_up(k, &claims.list, tile.number);
        });
    }

    /// The last block sets the counters back for the next launch.
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
    /// Where a row of a sequence lies. Rows beyond the sequence come as zeros.
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

/// The consumers' side.
pub(super) struct DynamicConsumer<'a> {
    slots: &'a WorkSlots,
    batch: &'a Batch,
    reads: Consumer,
    /// True in the lane that gives slots back for its warp.
    leader: Reg<Pred>,
    walks: Option<Walks>,
}

/// A tile as it was posted.
pub(super) struct WorkTile {
    blocks: Reg<U32>,
    current: Current,
}

/// What is left of a tile when its warpgroup has already begun the next.
pub(super) struct Current {
    slot: Reg<U32>,
    masked_from: Reg<U32>,
    /// With a window, the first key block and the first that all rows see whole.
    window: Option<[Reg<U32>; 2]>,
}

/// The first key block of a tile: the first of all where no window hides any.
fn first_or_none(first_block: Option<Reg<U32>>) -> Value<U32> {
    first_block.map_or_else(|| 0.into(), Into::into)
}

impl<'a> DynamicConsumer<'a> {
    pub(super) fn new(
        k: &mut Builder,
        prefill: &Prefill,
        slots: &'a WorkSlots,
        batch: &'a Batch,
    ) -> Self {
        let lane = k.lane();
        DynamicConsumer {
            slots,
            batch,
            reads: slots.pipeline.consumer(k),
            leader: k.eval(lane.equals(0)),
            walks: Walks::new(&prefill.tile, prefill.index_from_one_lane()),
        }
    }
}

impl TileScheduler for DynamicConsumer<'_> {
    type Tile = WorkTile;

    fn first_tile(&self, k: &mut Builder) -> WorkTile {
        let is_window = self.batch.visibility.is_window();
        let current = Current {
            slot: k.register(),
            masked_from: k.register(),
            window: is_window.then(|| [k.register(), k.register()]),
        };
        let tile = WorkTile { blocks: k.register(), current };
        self.next_tile(k, &tile);
        tile
    }

    fn next_tile(&self, k: &mut Builder, tile: &WorkTile) {
        let WorkTile { blocks, current } = tile;
        let slot = self.reads.wait(k);
        k.set(current.slot, slot);
        match current.window {
            Some([first_block, whole_from]) => {
                let words = self.slots.read(k, current.slot, 0);
                let registers = [*blocks, first_block, current.masked_from, whole_from];
                for (register, word) in registers.into_iter().zip(words) {
                    k.set(register, word);
                }
            }
            None => {
                let slot = self.slots.slot(k, current.slot);
                let words = [k.load::<U32, _>(slot), k.load(slot + 8)];
                k.set(*blocks, words[0]);
                k.set(current.masked_from, words[1]);
            }
        }
        self.reads.keep(k);
    }

    fn has_tile(&self, tile: &WorkTile) -> Value<Pred> {
        tile.blocks.differs(0)
    }

    fn last_block(&self, tile: &WorkTile) -> Value<U32> {
        tile.blocks - 1
    }
}

impl ConsumerScheduler for DynamicConsumer<'_> {
    type Current = Current;

    fn current(&self, k: &mut Builder, tile: &WorkTile) -> Current {
        let Current { slot, masked_from, window } = tile.current;
        Current {
            slot: k.variable(slot),
            masked_from: k.variable(masked_from),
            window: window.map(|words| words.map(|word| k.variable(word))),
        }
    }

    fn take(&self, k: &mut Builder, current: &Current, tile: &WorkTile) {
        self.reads.give_back(k, current.slot, self.leader);
        let new = &tile.current;
        k.set(current.slot, new.slot);
        k.set(current.masked_from, new.masked_from);
        let words = current.window.into_iter().flatten().zip(new.window.into_iter().flatten());
        for (word, new) in words {
            k.set(word, new);
        }
    }

    fn narrow(&self, k: &mut Builder, tile: &WorkTile, group: Reg<U32>) {
        let Some(walks) = &self.walks else { return };
        let WorkTile { blocks, current } = tile;
        k.if_(self.has_tile(tile), |k| {
            let [first_row, query_length, key_length, _] = self.slots.read(k, current.slot, 1);
            let rows = Walks::rows_of(k, group, first_row, [query_length, key_length]);
            let blocks = TileBlocks {
                first: current.window.map(|[first, _]| first),
                end: *blocks,
                masked_from: current.masked_from,
                whole_from: current.window.map(|[_, whole_from]| whole_from),
            };
            walks.narrow(k, &self.batch.visibility, &rows, &blocks);
        });
    }

    fn whole_walk(&self, k: &mut Builder, current: &Current) -> Option<WholeWalk> {
        self.walks.map(|_| {
            let slot = self.slots.slot(k, current.slot);
            let [blocks, first] = k.load_vector::<U32, _, 2>(slot, Default::default());
            WholeWalk { first: current.window.map(|_| first), last: k.eval(blocks - 1) }
        })
    }

    fn whole_walk_ahead(&self, k: &mut Builder, tile: &WorkTile) -> Option<WholeWalk> {
        self.whole_walk(k, &tile.current)
    }

    fn is_first_block(&self, current: &Current, block: Reg<U32>) -> Value<Pred> {
        block.equals(first_or_none(current.window.map(|[first_block, _]| first_block)))
    }

    fn needs_mask(&self, current: &Current, block: Reg<U32>) -> Value<Pred> {
        let masked = block.at_least(current.masked_from);
        match current.window {
            Some([_, whole_from]) => masked | block.less(whole_from),
            None => masked,
        }
    }

    fn place(&self, k: &mut Builder, current: &Current) -> Place {
        let [first_row, query_length, key_length, head] = self.slots.read(k, current.slot, 1);
        Place { first_row, query_length, key_length, head }
    }

    fn sequence(&self, k: &mut Builder, current: &Current) -> Reg<U32> {
        let slot = self.slots.slot(k, current.slot);
        k.load::<U32, _>(slot + 56)
    }

    fn visibility(&self) -> &Visibility {
        &self.batch.visibility
    }

    fn first_log_sum(&self, k: &mut Builder, current: &Current, place: &Place) -> Value<U64> {
        let slot = self.slots.slot(k, current.slot);
        let start = k.load::<U32, _>(slot + 36);
        place.head.convert::<U64>() * self.batch.lse_head_stride.convert::<U64>()
            + start.convert::<U64>()
    }

    fn output_corner(
        &self,
        k: &mut Builder,
        current: &Current,
        place: &Place,
        row: Reg<U32>,
    ) -> Vec<Value<S32>> {
        let slot = self.slots.slot(k, current.slot);
        let end = k.load::<U32, _>(slot + 32);
        slice_corner(k, row, place.query_length, end, place.head)[1..].to_vec()
    }

    fn slope(&self, k: &mut Builder, current: &Current) -> Option<Reg<F32>> {
        self.batch.slopes.as_ref().map(|_| self.slots.read_float(k, current.slot, 10))
    }

    fn descale(&self, k: &mut Builder, current: &Current, product: Product) -> Reg<F32> {
        match (&self.batch.descales, product) {
            (None, _) => k.eval(1.0),
            (Some(_), Product::Scores) => self.slots.read_float(k, current.slot, 12),
            (Some(_), Product::Output) => self.slots.read_float(k, current.slot, 13),
        }
    }

    fn sink(&self, k: &mut Builder, current: &Current) -> Option<Reg<F32>> {
        self.batch.sinks.as_ref().map(|_| self.slots.read_float(k, current.slot, 11))
    }
}
