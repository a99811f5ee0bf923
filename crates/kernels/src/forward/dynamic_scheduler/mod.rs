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

mod consumer;
mod producer;

use ptx::{Builder, F32, GlobalAddress, Pipeline, Reg, SharedAddress, U32, Value};

use self::consumer::DynamicConsumer;
use self::producer::DynamicProducer;
use super::prefill::Prefill;
use crate::attention::descale::Descales;
use crate::attention::rows::Sinks;
use crate::attention::scores::Slopes;
use crate::attention::visibility::Visibility;
use crate::divisor::DivisorRegisters;
use crate::parameter::{List, Number, Tensor, Workspace};
use crate::sequencer::{Batch as Sequences, RECORD_BYTES};

/// The two sides of a block of threads, over what they share.
#[derive(Clone, Copy)]
pub(super) struct DynamicScheduler<'a> {
    pub(super) prefill: &'a Prefill,
    pub(super) slots: &'a WorkSlots,
    pub(super) batch: &'a Batch,
}

impl<'a> DynamicScheduler<'a> {
    /// The side that claims tiles and posts them.
    pub(super) fn producer(&self, k: &mut Builder) -> DynamicProducer<'a> {
        DynamicProducer::new(k, self)
    }

    /// The side that finds them.
    pub(super) fn consumer(&self, k: &mut Builder) -> DynamicConsumer<'a> {
        DynamicConsumer::new(k, self)
    }
}

/// Tiles that may be posted before the first of them is done: the one in work,
/// the one begun, and one ahead, with one to spare.
const SLOTS: u32 = 4;
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

/// The first key block of a tile: the first of all where no window hides any.
fn first_or_none(first_block: Option<Reg<U32>>) -> Value<U32> {
    first_block.map_or_else(|| 0.into(), Into::into)
}
