//! One step of the walk: all five products of a query block.
//!
//! `Warp::step` follows the pseudocode at the head of this folder's module. [`multiply`] is the one
//! product loop; its callers differ in where they load the left (A) and right (B) operands from.

use std::ops::Range;

use ptx::{
    Builder, Capability, Expression, F32, FragmentA, FragmentB, GlobalAddress, MmaAccumulator, Reg,
    Scope, SharedAddress, SteppedLanes, TileLayout, TileReader, TileWriter, U64, WarpAccumulator,
    WarpFragment,
};

use super::lanes::{Lanes, WarpPartition, query_gradient_lanes};
use super::weights::{Corner, WeightRule};
use super::{BackwardMma, Shared, slot};
use crate::backward::SumsLayout;
use crate::backward::order::{await_turn, pass_turn};
use crate::backward::tile_scheduler::{Tile, TileScheduler, Walk};

/// The state of one warp.
pub(super) struct Warp<'a> {
    pub(super) backward: &'a BackwardMma,
    pub(super) scheduler: &'a TileScheduler,
    pub(super) tile: &'a Tile,
    pub(super) rule: &'a WeightRule,
    pub(super) shared: &'a Shared,
    pub(super) sums: Reg<GlobalAddress>,
    pub(super) turns: Option<Reg<GlobalAddress>>,
    pub(super) lanes: Lanes,
    /// `dK` and `dV`, accumulated over all steps.
    pub(super) key_gradients: WarpAccumulator,
    pub(super) value_gradients: WarpAccumulator,
    /// The walk, at the current query block.
    pub(super) walk: &'a Walk,
}

/// The initial value of a product's accumulators.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Begin {
    /// Starts from zero.
    Zero,
    /// Adds to what the accumulators hold.
    Held,
}

impl Warp<'_> {
    /// Emits all work on the query block in a slot of the ring.
    pub(super) fn step(&self, k: &mut Builder, index: u32) {
        let backward = self.backward;
        let parts = backward.warp_queries() / backward.part;
        for part in 0..parts {
            self.scores(k, index, part);
        }
        let thread = k.thread_index();
        if let Some(counters) = self.turns {
            k.if_(thread.equals(0), |k| await_turn(k, counters, self.scheduler, self.walk));
        }
        k.block_sync();
        if let Some(weights) = self.shared.weights {
            for (offset, right) in
                [(weights, Right::OutputGradients), (self.shared.score_gradients, Right::Queries)]
            {
                let tile = k.shared_address(offset);
                let reader = TileReader::stepped(k, backward.score_layout(), tile, self.lanes.keys);
                let left = |k: &mut Builder, tile: u32, step: u32| reader.a(k, 16 * tile, step);
                self.gradients(k, index, right, 0..backward.query_block / 16, left);
            }
        }
        self.query_gradients(k);
        if let Some(counters) = self.turns {
            k.block_sync();
            k.if_(thread.equals(0), |k| pass_turn(k, counters, self.scheduler, self.walk));
        }
    }

    /// Computes `S`, `P`, `dP` and `dS` of one part of the warp's queries and stores `dS` to shared
    /// memory. Where the warp holds all columns of its gradients, also adds to `dV` and `dK`; else
    /// stores `P` too.
    fn scores(&self, k: &mut Builder, index: u32, part: u32) {
        let backward = self.backward;
        let (rows, columns) = (backward.warp_keys(), backward.part);
        let scores = WarpAccumulator::new(k, rows, columns);
        self.multiply_rows(k, index, part, Right::Queries, &scores);
        let [log_sums, row_sums] = self.statistics(k, index, part);
        let needs_mask = self.scheduler.needs_mask(k, self.tile, self.walk.block);
        let weights = WarpFragment::new(k, backward.element, rows, columns);
        let needed = (needs_mask, self.walk.needs_function());
        self.rule.apply(k, self.scheduler, (&scores, &weights), log_sums, needed, |k| {
            self.corner(k, part)
        });
        let products = WarpAccumulator::new(k, rows, columns);
        self.multiply_rows(k, index, part, Right::OutputGradients, &products);
        self.score_gradients(k, &products, &scores, row_sums);
        let gradients = WarpFragment::new(k, backward.element, rows, columns);
        gradients.round(k, &products);
        match self.shared.weights {
            Some(tile) => self.store(k, &weights, tile, part),
            None => {
                let steps = part * (backward.part / 16)..(part + 1) * (backward.part / 16);
                for (right, left) in
                    [(Right::OutputGradients, &weights), (Right::Queries, &gradients)]
                {
                    let left = |_: &mut Builder, tile: u32, step: u32| {
                        left.a(tile as usize, (step - steps.start) as usize)
                    };
                    self.gradients(k, index, right, steps.clone(), left);
                }
            }
        }
        self.store(k, &gradients, self.shared.score_gradients, part);
    }

    /// Computes `dS = P * (dP - delta)`, in place of `dP`.
    fn score_gradients(
        &self,
        k: &mut Builder,
        products: &WarpAccumulator,
        weights: &WarpAccumulator,
        row_sums: Reg<SharedAddress>,
    ) {
        for group in 0..products.groups() {
            let at = row_sums + 32 * group as u32;
            let row_sums: [Reg<F32>; 2] = k.load_vector(at, Default::default());
            for tile in 0..products.tiles() {
                let weights = weights.cell(tile, group).registers();
                let products = products.cell(tile, group).registers();
                for (side, (product, weight)) in products.into_iter().zip(weights).enumerate() {
                    k.set(product, (product + row_sums[side % 2]) * weight);
                }
            }
        }
    }

    /// Computes `S^T = K Q^T` or `dP^T = V dO^T` for one part of the warp's queries.
    fn multiply_rows(
        &self,
        k: &mut Builder,
        index: u32,
        part: u32,
        right: Right,
        to: &WarpAccumulator,
    ) {
        let backward = self.backward;
        let (offset, layout, dim) = match right {
            Right::Queries => (self.shared.keys, backward.key_layout(), backward.head_dim),
            Right::OutputGradients => {
                (self.shared.values, backward.value_layout(), backward.value_head_dim)
            }
        };
        let tile = k.shared_address(offset);
        let left = TileReader::stepped(k, layout, tile, self.lanes.keys);
        let right = self.right(k, index, right, self.lanes.queries);
        let first = part * backward.part;
        multiply(
            k,
            to,
            Begin::Zero,
            0..dim.div_ceil(16),
            |k, tile, step| left.a(k, 16 * tile, step),
            |k, groups, step| pair(k, &right, groups, (first + 8 * groups.first, step)),
        );
    }

    /// Computes `dV += P^T dO` or `dK += dS^T Q`, 16 queries to a step.
    fn gradients(
        &self,
        k: &mut Builder,
        index: u32,
        right: Right,
        steps: Range<u32>,
        left: impl Fn(&mut Builder, u32, u32) -> FragmentA,
    ) {
        let to = match right {
            Right::Queries => &self.key_gradients,
            Right::OutputGradients => &self.value_gradients,
        };
        let reader = self.right(k, index, right, self.lanes.columns);
        let apart = self.backward.column_warps;
        multiply(k, to, Begin::Held, steps, left, |k, groups, step| {
            pair(k, &reader, groups, (16 * step, groups.first / 2 * apart))
        });
    }

    /// Returns a reader of the queries or output gradients in a slot.
    fn right(&self, k: &mut Builder, index: u32, right: Right, lanes: SteppedLanes) -> TileReader {
        let (first, layout) = match right {
            Right::Queries => (self.shared.queries, self.backward.query_layout()),
            Right::OutputGradients => {
                (self.shared.output_gradients, self.backward.output_gradient_layout())
            }
        };
        let tile = slot(k, first, layout, index);
        TileReader::stepped(k, layout, tile, lanes)
    }

    /// Stores the warp's part of `P` or `dS` to its tile.
    fn store(&self, k: &mut Builder, rounded: &WarpFragment, tile: u32, part: u32) {
        let backward = self.backward;
        let tile = k.shared_address(tile);
        let partition = WarpPartition::new(k, backward);
        let writer = TileWriter::new(
            k,
            backward.score_layout(),
            tile,
            partition.key_warp * backward.warp_keys(),
            partition.column_warp * (backward.warp_queries() / 8 % 8),
        );
        rounded.store(k, &writer, part * (backward.part / 8));
    }

    /// Returns the addresses of the negated log-sum-exps and of the negated `delta`, at the
    /// thread's first query of a part.
    fn statistics(&self, k: &mut Builder, index: u32, part: u32) -> [Reg<SharedAddress>; 2] {
        let backward = self.backward;
        let bytes = backward.pass().statistics_bytes();
        let first = k.shared_address(self.shared.statistics + index * bytes);
        let (lane, partition) = (k.lane(), WarpPartition::new(k, backward));
        let query = partition.column_warp * backward.warp_queries() + lane % 4 * 2;
        let log_sums = k.eval(first + query * 4 + part * backward.part * 4);
        [log_sums, k.eval(log_sums + backward.query_block * 4)]
    }

    /// Returns the coordinates of the thread's scores. They are recomputed on demand to save
    /// registers.
    fn corner(&self, k: &mut Builder, part: u32) -> Corner {
        let backward = self.backward;
        let (lane, partition) = (k.lane(), WarpPartition::new(k, backward));
        let key =
            self.scheduler.first_key(k) + partition.key_warp * backward.warp_keys() + lane / 4;
        let query = self.walk.block * backward.query_block
            + partition.column_warp * backward.warp_queries()
            + (lane % 4 * 2 + part * backward.part);
        Corner {
            sequence: self.scheduler.batch(k, self.tile),
            head: self.walk.head,
            key: k.eval(key.reinterpret()),
            query: k.eval(query.reinterpret()),
        }
    }

    /// Computes the warp's part of `dQ^T = K^T dS^T` and adds it to the `f32` sums.
    fn query_gradients(&self, k: &mut Builder) {
        let backward = self.backward;
        let [columns, queries] = backward.query_gradient_warps();
        let tiles = backward.head_dim.div_ceil(16 * columns);
        let sums = WarpAccumulator::new(k, 16 * tiles, backward.query_block / queries);
        let [key_lanes, score_lanes] = query_gradient_lanes(k, backward);
        let reader = |k: &mut Builder, offset: u32, layout: TileLayout, lanes: SteppedLanes| {
            let tile = k.shared_address(offset);
            TileReader::stepped(k, layout, tile, lanes)
        };
        let keys = reader(k, self.shared.keys, backward.key_layout(), key_lanes);
        let score_gradients =
            reader(k, self.shared.score_gradients, backward.score_layout(), score_lanes);
        multiply(
            k,
            &sums,
            Begin::Zero,
            0..backward.key_block() / 16,
            |k, tile, step| keys.a(k, 16 * step, tile * columns),
            |k, groups, step| {
                pair(k, &score_gradients, groups, (16 * step, groups.first / 2 * queries))
            },
        );
        self.add(k, &sums);
    }

    /// Adds the warp's part of `dQ` to the sums of the current query block.
    fn add(&self, k: &mut Builder, part: &WarpAccumulator) {
        let backward = self.backward;
        let layout = backward.pass().sums_layout();
        let [columns, queries] = backward.query_gradient_warps();
        let (lane, partition) = (k.lane(), WarpPartition::new(k, backward));
        let at_once = backward.target.has(Capability::VectorReductions);
        // The warps interleave: tiles of 16 columns, and pairs of groups of 8 queries, go to them
        // in turn.
        let [column_warp, query_warp] = partition.query_gradient;
        let warp_bytes = SumsLayout::REGISTERS_BYTES / 4;
        let (tile_bytes, lane_bytes) = if at_once { (warp_bytes, 16) } else { (warp_bytes / 4, 4) };
        let within = column_warp * tile_bytes
            + query_warp * (2 * SumsLayout::REGISTERS_BYTES)
            + lane * lane_bytes;
        let block = k.multiply_wide(self.walk.number, layout.block_bytes());
        let sums = k.eval(self.sums + block + within.convert::<U64>());
        for (tile, group, cell) in part.cells() {
            let tile = tile as u32 * columns;
            let group = group as u32;
            let group = group / 2 * 2 * queries + group % 2;
            let offset = tile / 4 * (backward.query_block / 8) * SumsLayout::REGISTERS_BYTES
                + group * SumsLayout::REGISTERS_BYTES
                + tile % 4 * tile_bytes;
            if at_once {
                k.reduce_add_vector(sums + offset, &cell.registers(), Scope::Gpu);
                continue;
            }
            for (register, value) in (0u32..).zip(cell.registers()) {
                k.reduce_add(sums + (offset + register * 4 * warp_bytes / 4), value, Scope::Gpu);
            }
        }
    }
}

/// The right (B) operand of a product.
#[derive(Clone, Copy)]
enum Right {
    Queries,
    OutputGradients,
}

/// The groups of 8 columns whose operands are loaded together: two, or one at the end.
#[derive(Clone, Copy)]
struct Groups {
    first: u32,
    single: bool,
}

/// Loads one or two B operands at a row and a step of a tile.
fn pair(
    k: &mut Builder,
    reader: &TileReader,
    groups: Groups,
    (row, step): (u32, u32),
) -> Vec<FragmentB> {
    match groups.single {
        true => vec![reader.first_b(k, row, step)],
        false => reader.b(k, row, step).to_vec(),
    }
}

/// Emits a product over some steps of 16. The operands of the next piece are loaded before the
/// current one is multiplied.
fn multiply(
    k: &mut Builder,
    to: &WarpAccumulator,
    begin: Begin,
    steps: Range<u32>,
    left: impl Fn(&mut Builder, u32, u32) -> FragmentA,
    right: impl Fn(&mut Builder, Groups, u32) -> Vec<FragmentB>,
) {
    let all = to.groups() as u32;
    let groups = (0..all).step_by(2).map(|first| Groups { first, single: first + 1 == all });
    let first_step = steps.start;
    let pieces: Vec<(u32, Groups)> =
        steps.flat_map(|step| groups.clone().map(move |groups| (step, groups))).collect();
    let zero = MmaAccumulator::from_zero(k.eval::<F32>(0.0));
    let mut next = Some(right(k, pieces[0].1, pieces[0].0));
    let mut operands = Vec::new();
    for (index, (step, groups)) in pieces.iter().copied().enumerate() {
        let loaded = next.take().expect("loaded one piece ahead");
        if groups.first == 0 {
            operands = (0..to.tiles() as u32).map(|tile| left(k, tile, step)).collect();
        }
        if let Some((step, groups)) = pieces.get(index + 1) {
            next = Some(right(k, *groups, *step));
        }
        for (group, b) in (groups.first as usize..).zip(loaded) {
            for (tile, a) in operands.iter().enumerate() {
                let cell = to.cell(tile, group);
                let from = match begin {
                    Begin::Zero if step == first_step => zero,
                    _ => cell.into(),
                };
                k.mma(cell, *a, b, from);
            }
        }
    }
}
