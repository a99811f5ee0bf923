//! Clears and rounds the `f32` sums of `dQ` while the products run.
//!
//! Clearing all sums before the products and rounding all of them after takes the time of four
//! passes over the workspace in device memory. Instead, each tile owns a share of its key head's
//! query blocks. Idle warps of the producer warpgroup clear the share of a later tile and round the
//! share of an earlier one, while both are in L2. [`RowSums`](super::RowSums) clears the shares of
//! the first tiles, [`Rounding`](super::Rounding) rounds those of the last ones.
//!
//! Two counters for each key head track progress: how many tiles have cleared a share of its sums,
//! and how many have finished adding to them. A tile waits only for tiles with smaller numbers,
//! which started earlier, so there is no deadlock.
//!
//! In a ragged batch the host knows neither the number of tiles nor how many a head has: both are
//! looked up in the schedule, and heads have counters in each sequence. A tile clears a share a
//! fixed number of tiles ahead and rounds one a fixed number behind, both further away than the
//! longest sequence has tiles, so it still waits only for earlier tiles.
//!
//! One warp clears, and issues bulk copies of the sums to be rounded into shared memory; two warps
//! round them from there. They have too few registers to keep global loads in flight.

use ptx::{
    AtomicOrder, Builder, Consumer, Element, Expression, F32, Fence, GlobalAddress, LoadHint,
    Mbarriers, Pipeline, Pred, Producer, Reg, Scope, Select, SharedAddress, StoreHint, U32, U64,
    Value,
};

use super::persistent::{Claims, Handover};
use super::row_blocks::{RowBlock, RowBlocks, Vectors};
use super::tile_scheduler::{Share, TileScheduler};
use super::{Backward, SumsLayout};
use crate::attention::Batch;
use crate::exchange::poll;
use crate::parameter::{Number, Scale, Tensor, Workspace};

/// Warps that clear and round: those of the producer warpgroup except the producer itself.
pub(super) const WARPS: u32 = 3;

/// The warps among these that round.
const ROUNDING_WARPS: u32 = 2;

/// Bytes that a warp clears with one store instruction.
const LINE: u32 = 16 * 32;

/// Bytes of sums in one bulk copy: 32 query rows of 64 columns.
const CHUNK: u32 = 4 * SumsLayout::REGISTERS_BYTES;

/// Stages of the pipeline of chunks.
const STAGES: u32 = 2;

/// Nanoseconds between two polls of a counter.
const SLEEP: u32 = 100;

/// The two counters of a key head.
#[derive(Clone, Copy)]
enum Progress {
    /// Tiles that have cleared a share of the head's sums.
    Cleared,
    /// Tiles that have finished adding to the head's sums.
    Added,
}

/// What depends on whether all sequences have the same lengths.
enum Lengths {
    /// The number of tiles, the number of leading tiles whose shares this kernel rounds, and what
    /// finds the rows of a query block.
    Equal { tiles: Reg<U32>, rounded: Reg<U32>, blocks: RowBlocks },
    /// Each tile rounds the share of the tile that comes this many earlier; the schedule has the
    /// number of tiles. The warps that round have no registers to keep where a share's rows are:
    /// they read it again for each chunk, from this offset in shared memory.
    Ragged { behind: Reg<U32>, rows: u32 },
}

/// The rows that a query block is rounded to.
enum BlockRows {
    /// Those of a query block of the tensor.
    Block(RowBlock),
    /// In a ragged batch, those of a share, and the index of the query block in it.
    Share { staged: StagedRows, block: Reg<U32> },
}

/// Where the rows of a share are, as the thread that stages it leaves it in shared memory.
struct StagedRows {
    /// The address of the gradient of the share's first row.
    address: Reg<GlobalAddress>,
    /// The number of rows from there to the end of the sequence.
    rows: Reg<U32>,
    /// The workspace index of the share's first query block.
    first: Reg<U32>,
}

/// Parameters, barriers and staging memory of clearing and rounding.
pub(super) struct ClearAndRound {
    element: Element,
    head_dim: u32,
    layout: SumsLayout,
    sums: Reg<GlobalAddress>,
    counters: Reg<GlobalAddress>,
    /// The number of leading tiles whose shares are cleared before this kernel runs. Each tile
    /// clears the share of the tile that comes this many later.
    cleared: Reg<U32>,
    lengths: Lengths,
    scale: Reg<F32>,
    gradient: Vectors,
    /// Signals that the sums of the tile's head have been cleared.
    ready: Mbarriers,
    /// Signals that all consumer warps have finished adding, in kernels that are not persistent.
    added: Mbarriers,
    /// Byte offset of the staged chunks.
    staging: u32,
    staged: Pipeline,
}

/// Returns whether this is the warp that clears.
fn is_clearing(k: &mut Builder) -> Value<Pred> {
    k.thread_index().less(64)
}

fn leads(k: &mut Builder) -> Value<Pred> {
    k.lane().equals(0)
}

/// Emits a loop over the posted tile numbers: `posted` runs for each, and `body` for those that are
/// tiles. The loop has a single exit at its end: with an exit in the middle, ptxas no longer
/// recognises values of the consumers that are uniform in a warp.
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
        // Releases the tile early: the next one need not wait for this warp.
        k.warp_sync();
        let leads = leads(k);
        handover.tiles.release_stage(k, 0, leads & is_tile);
        posted(k, number);
        k.if_(is_tile, |k| body(k, number));
        k.break_if(!is_tile);
    });
}

impl ClearAndRound {
    /// Bytes of shared memory, without barriers.
    pub(super) const BYTES: u32 = STAGES * CHUNK;

    /// Declares the launch parameters and reserves shared memory; `warps` consumer warps add to
    /// `dQ`.
    pub(super) fn parameters(k: &mut Builder, backward: &Backward, warps: u32) -> Self {
        let layout = backward.pass().sums_layout();
        let sums = Workspace::QueryGradientSums.address(k);
        let counters = Workspace::Turns.address(k);
        let tiles = (backward.batch == Batch::Equal).then(|| Number::KeyTiles.read(k));
        let cleared = Number::ClearedTiles.read(k);
        let rounded = if tiles.is_some() { Number::RoundedTiles } else { Number::RoundedAfter };
        let rounded = rounded.read(k);
        let scale = Scale::Natural.read(k);
        let gradient = Vectors::parameters(k, Tensor::QueryGradient, backward.batch);
        let lengths = match tiles {
            Some(tiles) => {
                let blocks = RowBlocks::parameters(k, &layout, backward.batch);
                Lengths::Equal { tiles, rounded, blocks }
            }
            None => {
                let rows = k.shared("rows of a share", StagedRows::BYTES, 16);
                Lengths::Ragged { behind: rounded, rows }
            }
        };
        ClearAndRound {
            element: backward.element,
            head_dim: backward.head_dim,
            layout,
            sums,
            counters,
            cleared,
            lengths,
            scale,
            gradient,
            ready: Mbarriers::new(k, "sums cleared", 1, 1),
            added: Mbarriers::new(k, "sums added to", 1, warps),
            staging: k.shared("sums of dQ", Self::BYTES, 128),
            staged: Pipeline::new(k, "sums of dQ", STAGES, ROUNDING_WARPS),
        }
    }

    pub(super) fn init(&self, k: &mut Builder) {
        self.ready.init(k);
        self.added.init(k);
        self.staged.init(k);
    }

    /// Waits, in a consumer, until the sums that it adds to are zero.
    pub(super) fn wait_until_cleared(&self, k: &mut Builder, phase: impl Into<Value<U32>>) {
        let ready = self.ready.at(k, 0);
        k.mbarrier_wait(ready, phase, Scope::Block);
    }

    /// Signals, from a consumer warp, that it has finished adding to `dQ`.
    pub(super) fn added(&self, k: &mut Builder, leader: Reg<Pred>) {
        k.warp_sync();
        let added = self.added.at(k, 0);
        k.if_(leader, |k| k.mbarrier_arrive(added));
    }

    /// Runs the clearing and rounding warps beside the single tile of a block.
    pub(super) fn run(&self, k: &mut Builder, scheduler: &TileScheduler) {
        match self.lengths {
            Lengths::Equal { .. } => self.run_tile(k, scheduler),
            Lengths::Ragged { .. } => {
                let (number, tiles) = (scheduler.number(k), scheduler.ragged_tiles(k));
                k.if_(number.less(tiles), |k| self.run_tile(k, scheduler));
            }
        }
    }

    fn run_tile(&self, k: &mut Builder, scheduler: &TileScheduler) {
        let clears = is_clearing(k);
        k.if_else(
            clears,
            |k| {
                let staged = self.staged.producer(k);
                let number = scheduler.number(k);
                self.clear_and_stage(k, scheduler, number, &staged);
                let leads = leads(k);
                k.if_(leads, |k| {
                    // A tile without keys has nothing to add.
                    scheduler.if_tile(k, |k| {
                        let added = self.added.at(k, 0);
                        k.mbarrier_wait(added, 0, Scope::Block);
                    });
                    self.end(k, scheduler, number);
                });
            },
            |k| {
                let staged = self.staged.consumer(k);
                let number = scheduler.number(k);
                self.round(k, scheduler, number, &staged);
            },
        );
    }

    /// Runs the clearing and rounding warps beside one tile after another, in persistent kernels.
    pub(super) fn run_persistent(
        &self,
        k: &mut Builder,
        scheduler: &TileScheduler,
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
                    // A new number means that all consumers have released the tile before.
                    let leads = leads(k);
                    k.if_(leads & number.differs(before), |k| self.end(k, scheduler, before));
                    k.set(before, number);
                };
                every_tile(k, handover, claims, posted, |k, number| {
                    self.clear_and_stage(k, scheduler, number, &staged);
                });
            },
            |k| {
                let staged = self.staged.consumer(k);
                let posted = |_: &mut Builder, _| {};
                every_tile(k, handover, claims, posted, |k, number| {
                    self.round(k, scheduler, number, &staged);
                });
            },
        );
    }

    /// Runs the clearing warp beside a tile, or a part of one: reports its sums ready, clears a
    /// later share, and stages an earlier one for rounding.
    fn clear_and_stage(
        &self,
        k: &mut Builder,
        scheduler: &TileScheduler,
        number: Reg<U32>,
        staged: &Producer,
    ) {
        let leads = leads(k);
        k.if_(leads, |k| {
            let (tile, _) = scheduler.tile_and_part(k, number);
            self.wait_for_zeros(k, scheduler, tile);
            let ready = self.ready.at(k, 0);
            k.mbarrier_arrive(ready);
        });
        self.if_later(k, scheduler, number, |k, share| self.clear(k, share));
        k.warp_sync();
        let leads = k.lane().equals(0);
        k.if_(leads, |k| {
            self.if_earlier(k, scheduler, number, |k, share| {
                self.wait(k, share, Progress::Added, share.tiles);
                self.stage(k, share, staged);
            });
            // Counted this late, when the zeros have long been written, so that the release does
            // not wait for them.
            self.if_later(k, scheduler, number, |k, share| {
                self.count(k, share, Progress::Cleared);
            });
        });
    }

    /// Waits until the shares of a tile's head that this kernel clears have been cleared; called by
    /// one thread.
    fn wait_for_zeros(&self, k: &mut Builder, scheduler: &TileScheduler, tile: Reg<U32>) {
        match self.lengths {
            // Of a head's tiles, all or none are among the leading ones.
            Lengths::Equal { .. } => k.if_(tile.at_least(self.cleared), |k| {
                let share = scheduler.share(k, tile);
                self.wait(k, &share, Progress::Cleared, share.tiles);
            }),
            Lengths::Ragged { .. } => {
                let share = scheduler.share(k, tile);
                // The index of a head's counters is that of its first tile.
                let (first, end) = (share.counters, k.eval(share.counters + share.tiles));
                let here = k.eval(end.maximum(self.cleared) - first.maximum(self.cleared));
                k.if_(here.greater(0), |k| self.wait(k, &share, Progress::Cleared, here));
            }
        }
    }

    /// Emits `body` with the share of a later tile, under the condition that this tile clears it.
    fn if_later<F>(&self, k: &mut Builder, scheduler: &TileScheduler, number: Reg<U32>, body: F)
    where
        F: FnOnce(&mut Builder, &Share),
    {
        let (tile, part) = scheduler.tile_and_part(k, number);
        let later = k.eval(tile + self.cleared);
        let tiles = match &self.lengths {
            Lengths::Equal { tiles, .. } => *tiles,
            Lengths::Ragged { .. } => scheduler.ragged_tiles(k),
        };
        k.if_(part.equals(0) & later.less(tiles), |k| {
            let share = scheduler.share(k, later);
            body(k, &share);
        });
    }

    /// Emits `body` with the share of an earlier tile, under the condition that this tile rounds
    /// it.
    fn if_earlier<F>(&self, k: &mut Builder, scheduler: &TileScheduler, number: Reg<U32>, body: F)
    where
        F: FnOnce(&mut Builder, &Share),
    {
        let (tile, part) = scheduler.tile_and_part(k, number);
        let behind = match &self.lengths {
            Lengths::Equal { tiles, rounded, .. } => k.eval(*tiles - *rounded),
            Lengths::Ragged { behind, .. } => *behind,
        };
        k.if_(part.equals(0) & tile.at_least(behind), |k| {
            let earlier = k.eval(tile - behind);
            let share = scheduler.share(k, earlier);
            body(k, &share);
        });
    }

    /// Counts a tile as finished with adding; called by one thread. With equal lengths, only where
    /// this kernel rounds its share: in a ragged batch that would have to be looked up first.
    fn end(&self, k: &mut Builder, scheduler: &TileScheduler, number: Reg<U32>) {
        let (tile, _) = scheduler.tile_and_part(k, number);
        let count = |k: &mut Builder| {
            let share = scheduler.share(k, tile);
            self.count(k, &share, Progress::Added);
        };
        match &self.lengths {
            Lengths::Equal { rounded, .. } => k.if_(tile.less(*rounded), count),
            Lengths::Ragged { .. } => count(k),
        }
    }

    fn counter(&self, k: &mut Builder, share: &Share, progress: Progress) -> Reg<GlobalAddress> {
        k.eval(self.counters + share.counters.convert::<U64>() * 8 + 4 * progress as u64)
    }

    /// Increments a counter with release semantics; called by one thread.
    fn count(&self, k: &mut Builder, share: &Share, progress: Progress) {
        let counter = self.counter(k, share, progress);
        k.atomic_add_ordered::<U32, _>(counter, 1, Scope::Gpu, AtomicOrder::Release);
    }

    /// Polls a counter until it has reached `all`; called by one thread.
    fn wait(&self, k: &mut Builder, share: &Share, progress: Progress, all: Reg<U32>) {
        let counter = self.counter(k, share, progress);
        poll(k, counter, SLEEP, |counted| counted.equals(all));
    }

    /// Writes zeros to a share.
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

    /// Returns the number of chunks in a query block.
    fn chunks(&self) -> u32 {
        self.layout.block_bytes() / CHUNK
    }

    /// Issues the bulk copies that bring a share to shared memory; called by one thread.
    fn stage(&self, k: &mut Builder, share: &Share, staged: &Producer) {
        // Orders the other blocks' additions, which the counter made visible, before reads by the
        // copy engine.
        k.fence(Fence::ProxyAsyncGlobal);
        if let (Lengths::Ragged { rows: at, .. }, Some(rows)) = (&self.lengths, &share.rows) {
            // A thread block rounds one share, so nothing reads the rows of another here.
            let block = rows.row_block(k, share.first);
            let row = k.eval(block.first_row(self.layout.query_block));
            let address = self.gradient.row(k, self.element, &block, row);
            let rows = k.eval(block.query_length - row);
            StagedRows { address, rows, first: share.first }.store(k, *at);
        }
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

    /// Runs a rounding warp beside a tile.
    fn round(
        &self,
        k: &mut Builder,
        scheduler: &TileScheduler,
        number: Reg<U32>,
        staged: &Consumer,
    ) {
        self.if_earlier(k, scheduler, number, |k, share| {
            self.every_chunk(k, share, |k, chunk| {
                let stage = staged.wait(k);
                self.round_chunk(k, chunk, stage);
                // Orders these reads before the copy engine's next write to the stage.
                k.fence(Fence::ProxyAsyncShared);
                k.warp_sync();
                let leads = leads(k);
                staged.release(k, leads);
            });
        });
    }

    /// Rounds a chunk. Each of the two warps takes 32 columns, and each lane stores eight columns
    /// of a row at a time.
    ///
    /// The sums are in the layout of the `dQ^T` accumulators: a thread's four values are two
    /// neighbouring rows of one column, then the same rows eight columns further, and the thread
    /// four lanes further has the next column. Neighbouring columns of a row are thus 64 bytes
    /// apart. Half of the lanes read each pair of columns in the opposite order, so that all lanes
    /// access different banks.
    fn round_chunk(&self, k: &mut Builder, chunk: Reg<U32>, stage: Reg<U32>) {
        let SumsLayout { query_block, part_queries, columns } = self.layout;
        let per_part = self.layout.part_bytes() / CHUNK;
        let number = k.eval(chunk / self.chunks());
        let part = chunk % self.chunks() / per_part;
        let block = match &self.lengths {
            Lengths::Equal { blocks, .. } => BlockRows::Block(blocks.find(k, number)),
            Lengths::Ragged { rows, .. } => {
                let staged = StagedRows::load(k, *rows);
                let block = k.eval(number - staged.first);
                BlockRows::Share { staged, block }
            }
        };
        let length = block.length();

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
        let to = block.row(k, &self.gradient, self.element, row);
        let to = k.variable(to + to_column.convert::<U64>() * self.element.bytes());
        // A column beyond the head dimension is treated as a row beyond the sequence, which saves a
        // register.
        let row = if self.head_dim < columns {
            let has_column = to_column.less(self.head_dim);
            k.eval(has_column.select::<U32>(row, length))
        } else {
            row
        };

        let staged = self.staged_at(k, stage);
        let from = k.eval(staged + (warp * LINE + rows * 16 + right * 8 + down * 4));
        let even = k.eval(from + other * 64);
        let odd = k.eval(from + (other ^ 1) * 64);
        let order = k.eval(other.equals(0).select::<U32>(0x3210u32, 0x1032u32));
        let rows_bytes = self.gradient.row_bytes(k, self.element, 8);
        for group in 0..CHUNK / SumsLayout::REGISTERS_BYTES {
            let words = [0, 2, 4, 6].map(|column| {
                let at = group * SumsLayout::REGISTERS_BYTES + 64 * column;
                let pair = [even, odd].map(|it| {
                    let sum = k.load::<F32, SharedAddress>(it + at);
                    k.eval(sum * self.scale)
                });
                let pair = k.pack_as(self.element, pair[0], pair[1]);
                let pair = k.packed_bits(pair);
                k.permute_bytes(pair, pair, order)
            });
            let exists = (row + 8 * group).less(length);
            k.if_(exists, |k| k.store_vector(to, &words, StoreHint::default()));
            k.set(to, to + rows_bytes);
        }
    }
}

impl BlockRows {
    /// Returns the first row of the query block, in its sequence or in the share.
    fn first_row(&self, query_block: u32) -> Value<U32> {
        match self {
            BlockRows::Block(block) => block.first_row(query_block),
            BlockRows::Share { block, .. } => *block * query_block,
        }
    }

    /// Returns the number of rows, counted like [`first_row`](BlockRows::first_row).
    fn length(&self) -> Reg<U32> {
        match self {
            BlockRows::Block(block) => block.query_length,
            BlockRows::Share { staged, .. } => staged.rows,
        }
    }

    /// Returns the address of a row's gradient.
    fn row(
        &self,
        k: &mut Builder,
        gradient: &Vectors,
        element: Element,
        row: Reg<U32>,
    ) -> Reg<GlobalAddress> {
        match self {
            BlockRows::Block(block) => gradient.row(k, element, block, row),
            BlockRows::Share { staged, .. } => {
                let row_bytes = gradient.row_bytes(k, element, 1);
                k.eval(staged.address + row.convert::<U64>() * row_bytes)
            }
        }
    }
}

impl StagedRows {
    /// Bytes of shared memory.
    const BYTES: u32 = 16;

    fn store(&self, k: &mut Builder, offset: u32) {
        let at = k.shared_address(offset);
        k.store(at, self.address);
        k.store_vector(at + 8, &[self.rows, self.first], StoreHint::default());
    }

    fn load(k: &mut Builder, offset: u32) -> Self {
        let at = k.shared_address(offset);
        let address = k.load::<GlobalAddress, _>(at);
        let [rows, first] = k.load_vector::<U32, _, 2>(at + 8, LoadHint::default());
        StagedRows { address, rows, first }
    }
}
