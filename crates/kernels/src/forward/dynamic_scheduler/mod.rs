//! The dynamic tile scheduler of the persistent kernel for ragged batches: the producer claims
//! tiles and hands them to the consumers.
//!
//! The [`Sequencer`](crate::Sequencer) writes a list of records to global memory, one for each tile
//! of query rows of a sequence, sorted from the most work to the least. The producer of each thread
//! block claims the next tile of the list with an atomic when it needs one, so that all thread
//! blocks end at about the same time, whatever the tiles cost and whatever else runs on the GPU. It
//! computes the tile's key blocks and positions and posts them in a slot in shared memory, from
//! which the consumers read them. Which thread block takes a tile does not change its result.
//!
//! Every record stands for a tile of each query head. Heads are processed in groups of a few heads,
//! so that the keys and values of a group stay in L2. The last group has more heads, and so enough
//! short tiles to follow its long ones.
//!
//! Where all tiles run at once there is no list: each thread block has one tile, which it finds by
//! itself (`single_tile`).

mod consumer;
mod producer;

use ptx::{Builder, F32, GlobalAddress, Pipeline, Reg, Scalar, SharedAddress, U32};

pub(super) use self::consumer::DynamicConsumer;
pub(super) use self::producer::DynamicProducer;
use super::prefill::Prefill;
use crate::attention::descale::Descales;
use crate::attention::rows::Sinks;
use crate::attention::scores::Slopes;
use crate::attention::visibility::Visibility;
use crate::divisor::DivisorRegisters;
use crate::parameter::{List, Number, Tensor, Workspace};
use crate::sequencer::{RECORD_BYTES, RaggedBatch};

/// The scheduler of a thread block: what its producer's and its consumers' sides share.
#[derive(Clone, Copy)]
pub(super) struct DynamicScheduler<'a> {
    pub(super) prefill: &'a Prefill,
    pub(super) slots: &'a WorkSlots,
    pub(super) batch: &'a Batch,
}

/// The number of slots, that is of tiles posted but not yet done: the one being computed, the next
/// one, whose first scores may have been started, one ahead of these, and one to spare.
const SLOTS: u32 = 4;
/// The bytes of a slot.
const SLOT_BYTES: u32 = 64;

/// The byte offsets in a slot, of one or more words each.
mod offset {
    /// The end (exclusive) of the tile's key blocks, 0 if there are no more tiles, and the first key
    /// block.
    pub(super) const BLOCKS: u32 = 0;
    /// The block from which masking is needed on the right, and the block before which it is needed
    /// on the left.
    pub(super) const MASKED: u32 = 8;
    /// The first query row, the query length, the key length and the query head.
    pub(super) const ROWS: u32 = 16;
    /// The end of the sequence's output rows.
    pub(super) const OUTPUT_END: u32 = 32;
    /// The start of the sequence's log-sum-exps.
    pub(super) const LSE_START: u32 = 36;
    /// The ALiBi slope.
    pub(super) const SLOPE: u32 = 40;
    /// The sink.
    pub(super) const SINK: u32 = 44;
    /// The descale factors of scores and of outputs.
    pub(super) const DESCALES: [u32; 2] = [48, 52];
    /// The sequence.
    pub(super) const SEQUENCE: u32 = 56;
}

/// The slots in shared memory through which the producer hands tiles to the consumers, and a buffer
/// for the record of the producer's next tile and its head. The record is copied there
/// asynchronously: the producer does not wait for it and needs no registers for it, of which the
/// producers of three consumer warpgroups have 32.
pub(super) struct WorkSlots {
    /// Shared-memory offset of the first slot.
    offset: u32,
    /// Shared-memory offset of the record; the tile's head follows it.
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

    /// Loads four words of a slot.
    fn read_four(&self, k: &mut Builder, slot: Reg<U32>, byte: u32) -> [Reg<U32>; 4] {
        let slot = self.slot(k, slot);
        k.load_vector(slot + byte, Default::default())
    }

    /// Loads one word of a slot.
    fn read<T: Scalar>(&self, k: &mut Builder, slot: Reg<U32>, byte: u32) -> Reg<T> {
        let slot = self.slot(k, slot);
        k.load(slot + byte)
    }

    /// Writes the first four words of a slot: the end of the key blocks and the block from which
    /// masking is needed, and with a window also the first block and the block before which masking
    /// is needed. Without a window the latter two are never read and not written: a vector store
    /// takes four consecutive registers, more than the producer of three consumer warpgroups has
    /// free.
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
                k.store(slot + offset::MASKED, masked_from);
            }
        }
    }

    /// Loads one half of the record of the tile that was looked up last.
    fn record(&self, k: &mut Builder, half: u32) -> [Reg<U32>; 4] {
        let record = k.shared_address(self.record);
        k.load_vector(record + 16 * half, Default::default())
    }

    /// Stores the record of a tile and the tile's head where a lookup in the list would put them.
    pub(super) fn set_record(&self, k: &mut Builder, halves: [[Reg<U32>; 4]; 2], head: Reg<U32>) {
        let record = k.shared_address(self.record);
        for (half, byte) in halves.iter().zip([0, 16]) {
            k.store_vector(record + byte, half, Default::default());
        }
        k.store(record + RECORD_BYTES, head);
    }

    /// Loads the head of the tile that was looked up last.
    fn record_head(&self, k: &mut Builder) -> Reg<U32> {
        let record = k.shared_address(self.record);
        k.load(record + RECORD_BYTES)
    }
}

/// The launch parameters that describe the batch.
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

/// The source of a thread block's tiles.
pub(super) enum Tiles {
    /// A list from which thread blocks claim tiles.
    Listed(TileList),
    /// The sequences themselves: each thread block has one tile, which it finds by counting the
    /// tiles of the sequences. `tiles` receives the number of tiles per head.
    Single { sequences: RaggedBatch, tiles: Reg<U32> },
}

/// The list of tiles, and the groups in which heads go through it.
#[derive(Clone, Copy)]
pub(super) struct TileList {
    schedule: Reg<GlobalAddress>,
    /// Heads per group, except in the last group, which has more.
    together: Reg<U32>,
    /// The first head of the last group.
    last: Reg<U32>,
}

struct Pages {
    table: Reg<GlobalAddress>,
    /// Columns of the block table: the most pages of a sequence.
    columns: Reg<U32>,
    /// Number of pages of the cache.
    count: Reg<U32>,
    /// Rows per page.
    size: DivisorRegisters,
    /// Rows of the tensor from one page to the next.
    stride: Reg<U32>,
    /// Rows of one TMA copy.
    rows: u32,
}

impl Batch {
    pub(super) fn parameters(k: &mut Builder, prefill: &Prefill, scale_log2: Reg<F32>) -> Self {
        let rules = prefill.tile.rules;
        let tiles = match prefill.single_tile {
            true => Tiles::Single { sequences: RaggedBatch::parameters(k), tiles: k.variable(0) },
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
