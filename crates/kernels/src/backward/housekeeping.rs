//! The sums of `dQ`, cleared and rounded while products run.
//!
//! Clearing them all before the products and rounding them all after takes as long as memory takes
//! to move them four times. So each tile has a share of the blocks of query rows of its head, and
//! warps that have nothing else to do clear the share of a tile that comes later and round that of
//! one that came before, while both are in the second-level cache. What the first tiles need is cleared by
//! [`RowSums`](super::RowSums), and what the last ones leave is rounded by
//! [`Rounding`](super::Rounding).
//!
//! Two counters of each key head say how far it is: how many warps have cleared, and how many tiles
//! have added all they have. Tiles wait for tiles with smaller numbers only, which began before them.

use ptx::{
    AtomicOrder, BF16x2, Barriers, Builder, Choose, Element, Expression, F16x2, F32, GlobalAddress,
    Instruction, LoadHint, LoadOrder, Operand, Pred, Reg, Scope, StoreHint, U32, U64, Value,
};

use super::persistent::{Claims, Handover};
use super::place::{Place, Share};
use super::row_blocks::{RowBlocks, Vectors};
use super::{Backward, SumsLayout};
use crate::forward::FRESH;
use crate::parameter::{Number, Scale, Tensor, Workspace};

/// Warps that keep house: those of the producer's warpgroup but for its own.
pub(super) const WARPS: u32 = 3;

/// Bytes that a warp stores at a time.
const LINE: u32 = 16 * 32;

/// Bytes that a warp clears before it looks whether there is more.
const CHUNK: u32 = 8 * LINE;

/// Groups of eight query rows whose loads are under way at a time.
const GROUPS_AT_ONCE: usize = 2;

/// Nanoseconds between two looks at a counter.
const SLEEP: u32 = 100;

/// The counters of a key head.
#[derive(Clone, Copy)]
enum Progress {
    /// Warps that have cleared their part of a share.
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
}

/// Which of the warps that keep house this is: found again wherever it is asked for, rather than kept.
fn keeper(k: &mut Builder) -> Reg<U32> {
    let thread = k.thread_index();
    k.eval(thread / 32 - 1)
}

/// Whether this is the first thread of them all.
fn is_first(k: &mut Builder) -> Value<Pred> {
    k.thread_index().equals(32)
}

impl Housekeeping {
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
        }
    }

    pub(super) fn init(&self, k: &mut Builder) {
        self.ready.init(k);
        self.added.init(k);
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
        let number = place.number(k);
        self.tile(k, place, number);
        let is_first = is_first(k);
        k.if_(is_first, |k| {
            let added = self.added.at(k, 0);
            k.mbarrier_wait(added, 0, Scope::Block);
            self.end(k, place, number);
        });
    }

    /// Beside tile after tile.
    pub(super) fn keep_all(
        &self,
        k: &mut Builder,
        place: &Place,
        handover: &Handover,
        claims: &Claims,
    ) {
        let first = k.block_index();
        let (phase, before) = (k.variable::<U32>(0), k.variable(first));
        k.loop_(|k| {
            handover.tiles.wait_full(k, 0, phase);
            let number = handover.posted.read(k);
            // All consumers have given the tile before back.
            let is_first = is_first(k);
            k.if_(is_first & number.differs(before), |k| self.end(k, place, before));
            k.set(before, number);
            k.break_if(!claims.is_tile(before));
            self.tile(k, place, before);
            k.warp_sync();
            let leads = k.lane().equals(0);
            handover.tiles.give_back(k, 0, leads);
            k.set(phase, phase ^ 1);
        });
    }

    /// All that is done beside a tile, or a part of one.
    fn tile(&self, k: &mut Builder, place: &Place, number: Reg<U32>) {
        let is_first = is_first(k);
        k.if_(is_first, |k| {
            let (tile, _) = place.tile_and_part(k, number);
            k.if_(tile.at_least(self.cleared), |k| {
                let share = place.share(k, tile);
                let all = k.eval(place.key_blocks_of_head() * WARPS);
                self.wait(k, share.head, Progress::Cleared, all);
            });
            let ready = self.ready.at(k, 0);
            k.mbarrier_arrive(ready);
        });
        let (tile, part) = place.tile_and_part(k, number);
        let later = k.eval(tile + self.cleared);
        k.if_(part.equals(0) & later.less(self.tiles), |k| {
            let share = place.share(k, later);
            self.clear(k, &share);
            k.warp_sync();
            let leads = k.lane().equals(0);
            k.if_(leads, |k| self.count(k, share.head, Progress::Cleared));
        });
        let (tile, part) = place.tile_and_part(k, number);
        let behind = k.eval(self.tiles - self.rounded);
        k.if_(part.equals(0) & tile.at_least(behind), |k| {
            let earlier = k.eval(tile - behind);
            let share = place.share(k, earlier);
            let leads = k.lane().equals(0);
            k.if_(leads, |k| {
                let all = k.eval(place.key_blocks_of_head());
                self.wait(k, share.head, Progress::Added, all);
            });
            k.warp_sync();
            self.round(k, &share);
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

    /// Zeros for a share, chunk after chunk.
    fn clear(&self, k: &mut Builder, share: &Share) {
        let chunks = self.layout.block_bytes() / CHUNK;
        let first = k.multiply_wide(share.first, self.layout.block_bytes());
        let lane = k.lane();
        let first = k.eval(self.sums + first + (lane * 16).convert::<U64>());
        let end = (share.end - share.first) * chunks;
        let zero = k.eval::<F32>(0.0);
        let keeper = keeper(k);
        k.for_range(keeper, end, WARPS, |k, chunk| {
            let mine = k.multiply_wide(chunk, CHUNK);
            let mine = k.eval(first + mine);
            for line in 0..CHUNK / LINE {
                k.store_vector(mine + line * LINE, &[zero; 4], StoreHint::default());
            }
        });
    }

    /// Rounds a share: a warp takes what a warp has added of a part, 16 columns of it.
    fn round(&self, k: &mut Builder, share: &Share) {
        let per_block = 4 * self.layout.parts();
        let keeper = keeper(k);
        let first = share.first * per_block + keeper;
        k.for_range(first, share.end * per_block, WARPS, |k, index| {
            self.round_columns(k, index, per_block);
        });
    }

    /// Accumulators are transposed: a lane has two columns, eight apart, of two rows, which are next to
    /// each other. Of neighbours in a row each of two lanes has one.
    fn round_columns(&self, k: &mut Builder, index: Reg<U32>, per_block: u32) {
        let SumsLayout { query_block, part_queries, columns } = self.layout;
        let lane = k.lane();
        let number = k.eval(index / per_block);
        let part = k.eval(index / 4 % self.layout.parts());
        let warp = k.eval(index % 4);
        let block = self.blocks.find(k, number);
        let by_columns = self.layout.by_columns();
        let first_row = block.first_row(query_block);
        let first_row = if by_columns { first_row } else { first_row + part * part_queries };
        let row = k.eval(first_row + lane % 4 * 2 + lane / 4 % 2);
        let column = warp * 16 + lane / 8 * 2;
        let column = k.eval(if by_columns { column + part * 64 } else { column });
        let to = self.gradient.row(k, self.element, &block, row);
        let to = k.variable(to + column.convert::<U64>() * self.element.bytes());
        let row = k.variable(row);
        let is_odd = (lane / 4 % 2).differs(0);
        // Of this lane's number and its neighbour's, the lower halves or the upper ones.
        let halves = k.eval(is_odd.choose::<U32>(0x3276u32, 0x5410u32));
        let within = part * self.layout.part_bytes() + warp * LINE + lane * 16;
        let block_bytes = k.multiply_wide(number, self.layout.block_bytes());
        let from = k.eval(self.sums + block_bytes + within.convert::<U64>());
        let groups: Vec<u32> = (0..part_queries / 8).collect();
        for groups in groups.chunks(GROUPS_AT_ONCE) {
            let sums: Vec<[Reg<F32>; 4]> = groups
                .iter()
                .map(|group| k.load_vector(from + group * SumsLayout::REGISTERS_BYTES, FRESH))
                .collect();
            for sums in sums {
                for (side, rows) in sums.chunks_exact(2).enumerate() {
                    // Two rows of a column; then two columns of the lane's row.
                    let [upper, lower] = [rows[0], rows[1]].map(|it| k.eval(it * self.scale));
                    let rows = self.pack(k, upper, lower);
                    let theirs = k.shuffle_butterfly(rows, 4);
                    let pair = k.permute_bytes(rows, theirs, halves);
                    let right = 8 * side as u32;
                    let mut exists = row.less(block.query_length);
                    if self.head_dim < columns {
                        exists = exists & (column + right).less(self.head_dim);
                    }
                    k.if_(exists, |k| {
                        k.store(to + right * self.element.bytes(), pair);
                    });
                }
                let rows_bytes = self.gradient.row_bytes(k, self.element, 8);
                k.set(to, to + rows_bytes);
                k.set(row, row + 8);
            }
        }
    }

    /// Two numbers, rounded.
    fn pack(&self, k: &mut Builder, low: Reg<F32>, high: Reg<F32>) -> Reg<U32> {
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
