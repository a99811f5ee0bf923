//! The sums of `dQ`, cleared and rounded while products run.
//!
//! Clearing them all before the products and rounding them all after takes as long as memory takes
//! to move them four times. So each tile has a share of the blocks of query rows of its head, and
//! warps that have nothing else to do clear the share of a tile that comes later and round that of
//! one that came before, while both are in the second-level cache. What the first tiles need is
//! cleared by [`RowSums`](super::RowSums), and what the last ones leave is rounded by
//! [`Rounding`](super::Rounding).
//!
//! Two counters of each key head say how far it is: how many tiles have cleared their part of it, and
//! how many have added all they have. Tiles wait for tiles with smaller numbers only, which began
//! before them.
//!
//! One warp clears, and has the copy engine bring what is to be rounded to shared memory; two
//! round it. Few registers are left for them, and none for loads under way.

use ptx::{
    AtomicOrder, BF16x2, Barriers, Builder, Choose, Consumer, Element, Expression, F16x2, F32,
    Fence, GlobalAddress, Instruction, LoadHint, LoadOrder, Operand, Pipeline, Pred, Producer, Reg,
    Scope, SharedAddress, StoreHint, U32, U64, Value,
};

use super::persistent::{Claims, Handover};
use super::place::{Place, Share};
use super::row_blocks::{RowBlocks, Vectors};
use super::{Backward, SumsLayout};
use crate::parameter::{Number, Scale, Tensor, Workspace};

/// Warps that keep house: those of the producer's warpgroup but for its own.
pub(super) const WARPS: u32 = 3;

/// Those of them that round.
const ROUNDING_WARPS: u32 = 2;

/// Bytes that a warp clears at a time.
const LINE: u32 = 16 * 32;

/// Sums that are brought at a time: 32 query rows of 64 columns.
const CHUNK: u32 = 4 * SumsLayout::REGISTERS_BYTES;

/// Chunks that are on their way or rounded.
const STAGES: u32 = 2;

/// Nanoseconds between two looks at a counter.
const SLEEP: u32 = 100;

/// The counters of a key head.
#[derive(Clone, Copy)]
enum Progress {
    /// Tiles that have cleared a share.
    Cleared,
    /// Tiles that have added all they have.
    Added,
}

/// What is cleared and rounded, and who says so.
pub(super) struct Housekeeping {
    element: Element,
    head_dim: u32,
    layout: SumsLayout,
    sums: Reg<GlobalAddress>,
    counters: Reg<GlobalAddress>,
    tiles: Reg<U32>,
    /// Tiles whose shares have been cleared before the products.
    cleared: Reg<U32>,
    /// Tiles whose shares are rounded by others.
    rounded: Reg<U32>,
    scale: Reg<F32>,
    gradient: Vectors,
    blocks: RowBlocks,
    /// The sums of the tile's head have been cleared.
    ready: Barriers,
    /// All warps have added what they have, where a block has one tile.
    added: Barriers,
    /// The offset of the chunks, and their barriers.
    staging: u32,
    staged: Pipeline,
}

/// Whether this is the warp that clears.
fn is_clearing(k: &mut Builder) -> Value<Pred> {
    k.thread_index().less(64)
}

fn leads(k: &mut Builder) -> Value<Pred> {
    k.lane().equals(0)
}

/// Does something with each number that is posted, and more with those of tiles. The loop ends in one
/// place: where it is left in the middle, the assembler no longer knows what is the same for all lanes of
/// the consumers.
fn every_tile(
    k: &mut Builder,
    handover: &Handover,
    claims: &Claims,
    posted: impl FnOnce(&mut Builder, Reg<U32>),
    body: impl FnOnce(&mut Builder, Reg<U32>),
) {
    let phase = k.variable::<U32>(0);
    k.loop_(|k| {
        handover.tiles.wait_full(k, 0, phase);
        k.set(phase, phase ^ 1);
        let number = handover.posted.read(k);
        let is_tile = k.eval(claims.is_tile(number));
        // The next tile need not wait for this warp.
        k.warp_sync();
        let leads = leads(k);
        handover.tiles.give_back(k, 0, leads & is_tile);
        posted(k, number);
        k.if_(is_tile, |k| body(k, number));
        k.break_if(!is_tile);
    });
}

impl Housekeeping {
    /// Of shared memory, without barriers.
    pub(super) const BYTES: u32 = STAGES * CHUNK;

    /// With so many warps that add.
    pub(super) fn parameters(k: &mut Builder, backward: &Backward, warps: u32) -> Self {
        let layout = backward.pass().sums_layout();
        Housekeeping {
            element: backward.element,
            head_dim: backward.head_dim,
            layout,
            sums: Workspace::QueryGradientSums.address(k),
            counters: Workspace::Turns.address(k),
            tiles: Number::KeyTiles.read(k),
            cleared: Number::ClearedTiles.read(k),
            rounded: Number::RoundedTiles.read(k),
            scale: Scale::Natural.read(k),
            gradient: Vectors::parameters(k, Tensor::QueryGradient, backward.batch),
            blocks: RowBlocks::parameters(k, &layout, backward.batch),
            ready: Barriers::new(k, "sums cleared", 1, 1),
            added: Barriers::new(k, "sums added to", 1, warps),
            staging: k.shared("sums of dQ", Self::BYTES, 128),
            staged: Pipeline::new(k, "sums of dQ", STAGES, ROUNDING_WARPS),
        }
    }

    pub(super) fn init(&self, k: &mut Builder) {
        self.ready.init(k);
        self.added.init(k);
        self.staged.init(k);
    }

    /// A consumer waits until the sums that it adds to are zero.
    pub(super) fn wait_until_cleared(&self, k: &mut Builder, phase: impl Into<Value<U32>>) {
        let ready = self.ready.at(k, 0);
        k.mbarrier_wait(ready, phase, Scope::Block);
    }

    /// A warp says that it has added all that it has.
    pub(super) fn added(&self, k: &mut Builder, leader: Reg<Pred>) {
        k.warp_sync();
        let added = self.added.at(k, 0);
        k.if_(leader, |k| k.mbarrier_arrive(added));
    }

    /// Beside the one tile of a block.
    pub(super) fn keep(&self, k: &mut Builder, place: &Place) {
        let clears = is_clearing(k);
        k.if_else(
            clears,
            |k| {
                let staged = self.staged.producer(k);
                let number = place.number(k);
                self.clear_and_stage(k, place, number, &staged);
                let leads = leads(k);
                k.if_(leads, |k| {
                    let added = self.added.at(k, 0);
                    k.mbarrier_wait(added, 0, Scope::Block);
                    self.end(k, place, number);
                });
            },
            |k| {
                let staged = self.staged.consumer(k);
                let number = place.number(k);
                self.round(k, place, number, &staged);
            },
        );
    }

    /// Beside tile after tile.
    pub(super) fn keep_all(
        &self,
        k: &mut Builder,
        place: &Place,
        handover: &Handover,
        claims: &Claims,
    ) {
        let clears = is_clearing(k);
        k.if_else(
            clears,
            |k| {
                let staged = self.staged.producer(k);
                let first = k.block_index();
                let before = k.variable(first);
                let posted = |k: &mut Builder, number: Reg<U32>| {
                    // All consumers have given the tile before back.
                    let leads = leads(k);
                    k.if_(leads & number.differs(before), |k| self.end(k, place, before));
                    k.set(before, number);
                };
                every_tile(k, handover, claims, posted, |k, number| {
                    self.clear_and_stage(k, place, number, &staged);
                });
            },
            |k| {
                let staged = self.staged.consumer(k);
                let posted = |_: &mut Builder, _| {};
                every_tile(k, handover, claims, posted, |k, number| {
                    self.round(k, place, number, &staged);
                });
            },
        );
    }

    /// What one warp does beside a tile, or a part of one.
    fn clear_and_stage(&self, k: &mut Builder, place: &Place, number: Reg<U32>, staged: &Producer) {
        let leads = leads(k);
        k.if_(leads, |k| {
            let (tile, _) = place.tile_and_part(k, number);
            k.if_(tile.at_least(self.cleared), |k| {
                let share = place.share(k, tile);
                self.wait(k, share.head, Progress::Cleared, place.key_blocks_of_head());
            });
            let ready = self.ready.at(k, 0);
            k.mbarrier_arrive(ready);
        });
        self.if_later(k, place, number, |k, share| self.clear(k, share));
        k.warp_sync();
        let leads = k.lane().equals(0);
        k.if_(leads, |k| {
            self.if_earlier(k, place, number, |k, share| {
                self.wait(k, share.head, Progress::Added, place.key_blocks_of_head());
                self.stage(k, share, staged);
            });
            // Late, when what was stored has long been written.
            self.if_later(k, place, number, |k, share| {
                self.count(k, share.head, Progress::Cleared);
            });
        });
    }

    /// Does something with the share of a later tile, if it is this tile that clears it.
    fn if_later(
        &self,
        k: &mut Builder,
        place: &Place,
        number: Reg<U32>,
        body: impl FnOnce(&mut Builder, &Share),
    ) {
        let (tile, part) = place.tile_and_part(k, number);
        let later = k.eval(tile + self.cleared);
        k.if_(part.equals(0) & later.less(self.tiles), |k| {
            let share = place.share(k, later);
            body(k, &share);
        });
    }

    /// Does something with the share of an earlier tile, if it is this tile that rounds it.
    fn if_earlier(
        &self,
        k: &mut Builder,
        place: &Place,
        number: Reg<U32>,
        body: impl FnOnce(&mut Builder, &Share),
    ) {
        let (tile, part) = place.tile_and_part(k, number);
        let behind = k.eval(self.tiles - self.rounded);
        k.if_(part.equals(0) & tile.at_least(behind), |k| {
            let earlier = k.eval(tile - behind);
            let share = place.share(k, earlier);
            body(k, &share);
        });
    }

    /// One thread says that a tile has added all it has.
    fn end(&self, k: &mut Builder, place: &Place, number: Reg<U32>) {
        let (tile, _) = place.tile_and_part(k, number);
        k.if_(tile.less(self.rounded), |k| {
            let share = place.share(k, tile);
            self.count(k, share.head, Progress::Added);
        });
    }

    fn counter(&self, k: &mut Builder, head: Reg<U32>, progress: Progress) -> Reg<GlobalAddress> {
        k.eval(self.counters + head.convert::<U64>() * 8 + 4 * progress as u64)
    }

    /// One thread counts what it has seen done.
    fn count(&self, k: &mut Builder, head: Reg<U32>, progress: Progress) {
        let counter = self.counter(k, head, progress);
        k.atomic_add_ordered::<U32, _>(counter, 1, Scope::Gpu, AtomicOrder::Release);
    }

    /// One thread waits until so many have counted.
    fn wait(&self, k: &mut Builder, head: Reg<U32>, progress: Progress, all: Reg<U32>) {
        let counter = self.counter(k, head, progress);
        k.loop_(|k| {
            let order = LoadOrder::Acquire(Scope::Gpu);
            let hint = LoadHint { order, ..LoadHint::default() };
            let [counted] = k.load_vector::<U32, _, 1>(counter, hint);
            k.break_if(counted.equals(all));
            k.push(Instruction::Sleep { nanoseconds: Operand::u32(SLEEP) });
        });
    }

    /// Zeros for a share.
    fn clear(&self, k: &mut Builder, share: &Share) {
        let first = k.multiply_wide(share.first, self.layout.block_bytes());
        let lane = k.lane();
        let first = k.eval(self.sums + first + (lane * 16).convert::<U64>());
        let zero = k.eval::<F32>(0.0);
        let chunks = (share.end - share.first) * self.chunks();
        k.for_range(0, chunks, 1, |k, chunk| {
            let mine = k.multiply_wide(chunk, CHUNK);
            let mine = k.eval(first + mine);
            for line in 0..CHUNK / LINE {
                k.store_vector(mine + line * LINE, &[zero; 4], StoreHint::default());
            }
        });
    }

    /// Chunks of a block of query rows.
    fn chunks(&self) -> u32 {
        self.layout.block_bytes() / CHUNK
    }

    /// One thread has a share brought to shared memory.
    fn stage(&self, k: &mut Builder, share: &Share, staged: &Producer) {
        // What others added is now to be read by the copy engine.
        k.fence(Fence::ProxyAsyncGlobal);
        self.every_chunk(k, share, |k, chunk| {
            let stage = staged.acquire(k);
            let full = staged.expect(k, CHUNK);
            let to = self.staged_at(k, stage);
            let from = k.multiply_wide(chunk, CHUNK);
            k.bulk_load(to, self.sums + from, CHUNK, full);
            staged.advance(k);
        });
    }

    fn every_chunk(
        &self,
        k: &mut Builder,
        share: &Share,
        body: impl FnOnce(&mut Builder, Reg<U32>),
    ) {
        let [first, end] = [share.first, share.end].map(|it| it * self.chunks());
        k.for_range(first, end, 1, body);
    }

    fn staged_at(&self, k: &mut Builder, stage: Reg<U32>) -> Reg<SharedAddress> {
        let staging = k.shared_address(self.staging);
        k.eval(staging + stage * CHUNK)
    }

    /// What the other warps do beside a tile.
    fn round(&self, k: &mut Builder, place: &Place, number: Reg<U32>, staged: &Consumer) {
        self.if_earlier(k, place, number, |k, share| {
            self.every_chunk(k, share, |k, chunk| {
                let stage = staged.wait(k);
                self.round_chunk(k, chunk, stage);
                // The copy engine writes next what was read here.
                k.fence(Fence::ProxyAsyncShared);
                k.warp_sync();
                let leads = leads(k);
                staged.release(k, leads);
            });
        });
    }

    /// Each warp rounds 32 columns, and each lane eight of a row at a time.
    ///
    /// Accumulators are transposed: of the four numbers that a thread has added to there are two rows
    /// of a column, and two of one eight columns on; the thread four lanes on has the next column. So
    /// neighbours in a row are 64 bytes apart, and half of the lanes take them in the other order: all
    /// are in banks of their own.
    fn round_chunk(&self, k: &mut Builder, chunk: Reg<U32>, stage: Reg<U32>) {
        let SumsLayout { query_block, part_queries, columns } = self.layout;
        let per_part = self.layout.part_bytes() / CHUNK;
        let number = k.eval(chunk / self.chunks());
        let part = chunk % self.chunks() / per_part;
        let block = self.blocks.find(k, number);

        let (lane, thread) = (k.lane(), k.thread_index());
        let (down, right, rows) = (lane % 2, lane / 2 % 2, lane / 4 % 4);
        let other = k.eval(lane / 16);
        let warp = thread / 32 % 2 * 2 + other;
        let column = k.eval(warp.clone() * 16 + right.clone() * 8);
        let first_row = block.first_row(query_block) + chunk % per_part * 32;
        let row = first_row + rows.clone() * 2 + down.clone();
        let (row, to_column) = if self.layout.by_columns() {
            (row, k.eval(part * 64 + column))
        } else {
            (row + part * part_queries, column)
        };
        let row = k.eval(row);
        let to = self.gradient.row(k, self.element, &block, row);
        let to = k.variable(to + to_column.convert::<U64>() * self.element.bytes());
        // A column that does not exist is as a row that does not: one number less to keep.
        let row = if self.head_dim < columns {
            let has_column = to_column.less(self.head_dim);
            k.eval(has_column.choose::<U32>(row, block.query_length))
        } else {
            row
        };

        let staged = self.staged_at(k, stage);
        let from = k.eval(staged + (warp * LINE + rows * 16 + right * 8 + down * 4));
        let even = k.eval(from + other * 64);
        let odd = k.eval(from + (other ^ 1) * 64);
        let order = k.eval(other.equals(0).choose::<U32>(0x3210u32, 0x1032u32));
        let rows_bytes = self.gradient.row_bytes(k, self.element, 8);
        for group in 0..CHUNK / SumsLayout::REGISTERS_BYTES {
            let words = [0, 2, 4, 6].map(|column| {
                let at = group * SumsLayout::REGISTERS_BYTES + 64 * column;
                let pair = [even, odd].map(|it| {
                    let sum = k.load::<F32, SharedAddress>(it + at);
                    k.eval(sum * self.scale)
                });
                let pair = self.pack(k, pair);
                k.permute_bytes(pair, pair, order)
            });
            let exists = (row + 8 * group).less(block.query_length);
            k.if_(exists, |k| k.store_vector(to, &words, StoreHint::default()));
            k.set(to, to + rows_bytes);
        }
    }

    /// Two numbers, rounded.
    fn pack(&self, k: &mut Builder, [low, high]: [Reg<F32>; 2]) -> Reg<U32> {
        match self.element {
            Element::F16 => {
                let pair = k.pack::<F16x2>(low, high);
                k.eval(pair.reinterpret::<U32>())
            }
            _ => {
                let pair = k.pack::<BF16x2>(low, high);
                k.eval(pair.reinterpret::<U32>())
            }
        }
    }
}
