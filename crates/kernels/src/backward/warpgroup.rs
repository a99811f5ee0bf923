//! The building blocks of a consumer warpgroup's steps: its place in the tile, its waits, products and
//! masks, and the additions to `dQ`. The loops are in `consumer` and, for wide heads, in `wide`.

use ptx::{
    Accumulate, Accumulator, Builder, Expression, F32, Fence, Fragment, GlobalAddress, LoadHint,
    Pred, Reg, S32, Scope, SharedAddress, SharedTile, SharedTiles, U32, U64, Value,
};

use super::tile_scheduler::{Tile, TileScheduler, Walk};
use super::{Backward, Block, PART, ROWS, Shape, Shared, SumsLayout};
use crate::attention::function::lower::ScoreCoordinates;
use crate::attention::{ACCUMULATOR_ROWS, Score};

/// A part of a step: 64 queries by 64 keys, as many scores as registers hold at a time.
#[derive(Clone, Copy)]
pub(super) struct Part {
    /// The stage of the step, in both pipelines and in the ring of `dS` tiles.
    pub(super) stage: u32,
    /// Which 64 of the step's queries or, in the `Tall` shape, of the warpgroup's keys.
    pub(super) index: u32,
}

impl Part {
    pub(super) const FIRST: Part = Part { stage: 0, index: 0 };

    /// Returns the parts of as many steps as there are stages, each with the part that follows it.
    pub(super) fn every(backward: &Backward) -> Vec<(Part, Part)> {
        let (stages, parts) = (backward.stages(), backward.parts());
        let part = |number: u32| Part { stage: number / parts % stages, index: number % parts };
        (0..stages * parts).map(|number| (part(number), part(number + 1))).collect()
    }

    /// Returns the first part of the previous step.
    pub(super) fn before(self, backward: &Backward) -> Part {
        Part { stage: (self.stage + backward.stages() - 1) % backward.stages(), index: 0 }
    }

    /// Returns the first query of this part within the query block.
    fn first_query(self, backward: &Backward) -> u32 {
        match backward.shape() {
            Shape::Tall => 0,
            Shape::Square | Shape::Wide => self.index * PART,
        }
    }

    /// Returns the first key of this part within the warpgroup's keys.
    pub(super) fn first_key(self, backward: &Backward) -> u32 {
        match backward.shape() {
            Shape::Tall => self.index * ROWS,
            Shape::Square | Shape::Wide => 0,
        }
    }
}

/// The value of `Warpgroup::number` while there is no previous step.
pub(super) const NO_STEP: u32 = u32::MAX;

/// The per-row statistics that [`RowSums`](super::RowSums) wrote, in the order of the workspace.
#[derive(Clone, Copy)]
pub(super) enum Statistic {
    /// The negated log-sum-exp, in units of log2.
    LogSum,
    /// The negated `delta`: the negated row sum of `dO * O`.
    RowSum,
}

/// The state of a consumer warpgroup during a tile.
pub(super) struct Warpgroup<'a> {
    pub(super) backward: &'a Backward,
    pub(super) shared: &'a Shared,
    pub(super) scheduler: &'a TileScheduler,
    pub(super) tile: &'a Tile,
    /// The index of this warpgroup among the consumers.
    pub(super) index: Reg<U32>,
    /// The thread's index in the warpgroup, then its warp's.
    pub(super) thread: Reg<U32>,
    pub(super) warp: Reg<U32>,
    /// True in the lane that arrives at barriers for its warp.
    pub(super) leader: Reg<Pred>,
    /// The first column of the thread in a score accumulator.
    pub(super) column: Reg<U32>,
    /// The phase bit of the current step's stages.
    pub(super) phase: Reg<U32>,
    /// In persistent kernels, the phase bit of the barriers that flip once for each tile.
    pub(super) tile_phase: Option<Reg<U32>>,
    /// The stage of the last step, once the loop has ended.
    pub(super) stage: Reg<U32>,
    /// The workspace index of the previous step's query block, whose `dQ` is still to be added.
    pub(super) number: Reg<U32>,
    pub(super) walk: Walk,
    /// The `f32` workspace of `dQ` sums.
    pub(super) sums: Reg<GlobalAddress>,
}

impl<'a> Warpgroup<'a> {
    pub(super) fn new(k: &mut Builder, block: &Block<'a>, tile: &'a Tile) -> Self {
        let Block { backward, shared, tensors, scheduler } = *block;
        let thread = k.thread_index();
        let index = k.eval(thread / 128 - 1);
        // Uniform in the warp, which the shuffle shows to ptxas: tile addresses are computed once a
        // warp.
        let index = k.shuffle_index(index, 0);
        let thread = k.eval(thread % 128);
        let lane = k.lane();
        let position = Accumulator::position(k, thread);
        let walk = scheduler.follow(k, tile);
        Warpgroup {
            backward,
            shared,
            scheduler,
            tile,
            index,
            thread,
            warp: k.eval(thread / 32),
            leader: k.eval(lane.equals(0)),
            column: position.column,
            phase: k.variable(0),
            tile_phase: None,
            stage: k.variable(0),
            number: k.variable(NO_STEP),
            walk,
            sums: tensors.sums,
        }
    }

    /// Sets the walk to its first step, where steps are read from shared memory.
    pub(super) fn begin(&self, k: &mut Builder) {
        if let Some(published) = &self.shared.published_steps {
            published.read(k, 0, &self.walk);
            self.walk.find_number(k, self.scheduler, self.tile);
        }
    }

    /// Advances the walk to the step that is in `stage`, except for its `number`.
    pub(super) fn advance_block(&self, k: &mut Builder, stage: u32) {
        self.walk.advance_block(k, self.tile);
        if let Some(published) = &self.shared.published_steps {
            published.read(k, stage, &self.walk);
        }
    }

    /// Emits `body`, under a condition where a list says whether the query block needs the mask
    /// function.
    pub(super) fn if_function(&self, k: &mut Builder, part: Part, body: impl FnOnce(&mut Builder)) {
        match &self.shared.published_steps {
            Some(published) => {
                let needed = published.needs_function(k, part.stage);
                k.if_(needed, body);
            }
            None => body(k),
        }
    }

    pub(super) fn wait_for_keys(&self, k: &mut Builder) {
        self.wait_until_loaded(k, 0);
    }

    pub(super) fn wait_for_values(&self, k: &mut Builder) {
        self.wait_until_loaded(k, 1);
    }

    /// Waits until the `dQ` sums of the tile's head have been cleared.
    pub(super) fn wait_until_cleared(&self, k: &mut Builder) {
        if let Some(clear_and_round) = &self.shared.clear_and_round {
            clear_and_round.wait_until_cleared(k, self.first_phase());
        }
    }

    fn wait_until_loaded(&self, k: &mut Builder, index: u32) {
        let loaded = self.shared.loaded.at(k, index);
        k.mbarrier_wait(loaded, self.first_phase(), Scope::Block);
    }

    /// Returns the phase of barriers that complete once for each tile.
    fn first_phase(&self) -> Value<U32> {
        self.tile_phase.map_or(0.into(), Value::from)
    }

    /// Releases the last step's queries, and drains the stages after it, which the producer has
    /// published empty: the next tile begins at stage 0 again.
    pub(super) fn skip_to_first_stage(&self, k: &mut Builder) {
        self.release_queries(k, self.stage);
        let stage = k.variable(self.stage + 1);
        k.loop_(|k| {
            k.break_if(stage.equals(self.backward.stages()));
            self.shared.query_pipeline.wait_full(k, stage, self.phase);
            self.shared.output_gradient_pipeline.wait_full(k, stage, self.phase);
            k.warp_sync();
            self.release_queries(k, stage);
            self.release_output_gradients(k, stage);
            let written = self.shared.written.at(k, stage);
            k.if_(self.leader, |k| k.mbarrier_arrive(written));
            k.mbarrier_wait(written, self.phase, Scope::Block);
            k.set(stage, stage + 1);
        });
        k.set(self.phase, self.phase ^ 1);
    }

    pub(super) fn wait_for_queries(&self, k: &mut Builder, part: Part, next: Part) {
        let phase = self.phase(next.stage < part.stage);
        self.shared.query_pipeline.wait_full(k, next.stage, phase);
    }

    pub(super) fn release_queries(&self, k: &mut Builder, stage: impl Into<Value<U32>>) {
        self.shared.query_pipeline.release_stage(k, stage, self.leader);
    }

    pub(super) fn wait_for_output_gradients(&self, k: &mut Builder, part: Part, next: Part) {
        let phase = self.phase(next.stage < part.stage);
        self.shared.output_gradient_pipeline.wait_full(k, next.stage, phase);
    }

    pub(super) fn release_output_gradients(&self, k: &mut Builder, stage: impl Into<Value<U32>>) {
        self.shared.output_gradient_pipeline.release_stage(k, stage, self.leader);
    }

    /// Returns the phase of the current step's stages or, with `around`, of the time around the
    /// ring before or after.
    pub(super) fn phase(&self, around: bool) -> Value<U32> {
        if around { self.phase ^ 1 } else { self.phase.into() }
    }

    /// Signals that this warp has written its part of `dS`.
    pub(super) fn written(&self, k: &mut Builder, stage: impl Into<Value<U32>>) {
        k.fence(Fence::ProxyAsyncShared);
        k.warp_sync();
        let written = self.shared.written.at(k, stage);
        k.if_(self.leader, |k| k.mbarrier_arrive(written));
    }

    /// Waits until both warpgroups have written `dS` of the previous step.
    pub(super) fn wait_until_written(&self, k: &mut Builder, part: Part, before: Part) {
        let written = self.shared.written.at(k, before.stage);
        let phase = self.phase(before.stage > part.stage);
        k.mbarrier_wait(written, phase, Scope::Block);
    }

    /// Returns the rows of a part's queries in a tile of queries or output gradients.
    pub(super) fn rows(&self, k: &mut Builder, tiles: &SharedTiles, part: Part) -> SharedTile {
        tiles.at(k, part.stage).rows(k, part.first_query(self.backward), PART)
    }

    /// Returns the rows of a part's keys in the tile of keys or values.
    pub(super) fn own(&self, k: &mut Builder, tiles: &SharedTiles, part: Part) -> SharedTile {
        tiles.at(k, 0).rows(k, self.first_row(part), ROWS)
    }

    /// Returns the row of a part's first key in the tile.
    fn first_row(&self, part: Part) -> Value<U32> {
        self.index * self.backward.group_keys() + part.first_key(self.backward)
    }

    /// Starts `S^T = K Q^T`.
    pub(super) fn start_scores(&self, k: &mut Builder, scores: &Accumulator, part: Part) {
        let keys = self.own(k, &self.shared.keys, part);
        let queries = self.rows(k, &self.shared.queries, part);
        k.start_product(scores, Accumulate::No, keys.matrix(), queries.transposed());
    }

    /// Starts `dP^T = V dO^T`.
    pub(super) fn start_products(&self, k: &mut Builder, products: &Accumulator, part: Part) {
        let values = self.own(k, &self.shared.values, part);
        let gradients = self.rows(k, &self.shared.output_gradients, part);
        k.start_product(products, Accumulate::No, values.matrix(), gradients.transposed());
    }

    /// Starts `dV += P^T dO`.
    pub(super) fn start_value_gradients(
        &self,
        k: &mut Builder,
        to: &Accumulator,
        p: &Fragment,
        part: Part,
    ) {
        let gradients = self.rows(k, &self.shared.output_gradients, part);
        k.start_product(to, Accumulate::Yes, p, gradients.matrix());
    }

    /// Starts `dK += dS^T Q`.
    pub(super) fn start_key_gradients(
        &self,
        k: &mut Builder,
        to: &Accumulator,
        ds: &Fragment,
        stage: impl Into<Value<U32>>,
        part: Part,
    ) {
        let first = part.first_query(self.backward);
        let queries = self.shared.queries.at(k, stage).rows(k, first, PART);
        k.start_product(to, Accumulate::Yes, ds, queries.matrix());
    }

    /// Hides the scores of keys that a query of this step does not see.
    pub(super) fn hide(&self, k: &mut Builder, part: Part, scores: &[Score]) {
        let needs_mask = self.scheduler.needs_mask(k, self.tile, self.walk.block);
        k.if_(needs_mask, |k| {
            let first = self.first_column(k, part);
            let (scheduler, rows) = (self.scheduler, &ACCUMULATOR_ROWS);
            let key = self.key(k, part);
            let lengths = scheduler.lengths(k);
            let seen = scheduler.visibility.seen_from(k, rows, key, first, lengths);
            seen.set_others(k, scores, self.backward.rules.hidden_score());
        });
    }

    /// Returns the coordinates of the thread's scores, for mask and score functions.
    pub(super) fn coordinates(&self, k: &mut Builder, part: Part) -> ScoreCoordinates<'static> {
        let [query_length, key_length] = self.scheduler.lengths(k);
        ScoreCoordinates {
            batch: self.scheduler.batch(k, self.tile),
            head: self.walk.head,
            first_query: self.first_column(k, part),
            rows: &ACCUMULATOR_ROWS,
            first_key: self.key(k, part),
            query_length,
            key_length,
        }
    }

    /// Returns the key of the thread's first row. It is recomputed on demand to save registers.
    pub(super) fn key(&self, k: &mut Builder, part: Part) -> Reg<S32> {
        let thread = k.thread_index();
        let index = k.eval(thread / 128 - 1);
        let position = Accumulator::position(k, thread % 128);
        let first = self.scheduler.first_key(k);
        let key = first + position.row + part.first_key(self.backward);
        let key = match self.backward.shape() {
            Shape::Wide => key,
            Shape::Square | Shape::Tall => key + index * self.backward.group_keys(),
        };
        k.eval(key.reinterpret::<S32>())
    }

    /// Returns the first column of the thread in a score accumulator.
    fn column(&self, k: &mut Builder) -> Reg<U32> {
        match self.backward.shape() {
            Shape::Square => self.column,
            // Recomputed to save registers.
            Shape::Tall | Shape::Wide => {
                let thread = k.thread_index();
                Accumulator::position(k, thread % 128).column
            }
        }
    }

    /// Returns the query of the thread's first column.
    pub(super) fn first_column(&self, k: &mut Builder, part: Part) -> Reg<S32> {
        let first = part.first_query(self.backward);
        let column = self.column(k);
        let column = self.walk.block * self.backward.query_block + column + first;
        k.eval(column.reinterpret::<S32>())
    }

    /// Returns the address of a statistic of this step's rows, at the thread's first column.
    pub(super) fn statistics(
        &self,
        k: &mut Builder,
        which: Statistic,
        part: Part,
    ) -> Reg<SharedAddress> {
        let base = self.shared.statistics(k, self.backward, part.stage);
        let first = which as u32 * self.backward.query_block + part.first_query(self.backward);
        let column = self.column(k);
        k.eval(base + column * 4 + first * 4)
    }

    /// Computes `dS = P * (dP - delta)`, in place of `dP`.
    pub(super) fn score_gradients(
        &self,
        k: &mut Builder,
        part: Part,
        products: &Accumulator,
        weights: &Accumulator,
    ) {
        let row_sums = self.statistics(k, Statistic::RowSum, part);
        let pairs = products.registers().chunks_exact(2).zip(weights.registers().chunks_exact(2));
        for (index, (products, weights)) in pairs.enumerate() {
            let at = row_sums + Accumulator::column_of(2 * index) * 4;
            let row_sums = k.load_vector::<F32, _, 2>(at, LoadHint::default());
            for side in 0..2 {
                k.set(products[side], (products[side] + row_sums[side]) * weights[side]);
            }
        }
    }

    /// Rounds `dS` into the left operand of `dK`, and stores it to shared memory for `dQ`.
    pub(super) fn store_score_gradients(
        &self,
        k: &mut Builder,
        stage: impl Into<Value<U32>>,
        part: Part,
        gradients: &Accumulator,
        operand: &Fragment,
    ) {
        operand.round(k, gradients.registers());
        let tile = self.shared.score_gradients.at(k, stage);
        let tile = tile.rows(k, self.first_row(part), ROWS);
        match self.backward.shape() {
            // Recomputed to save registers.
            Shape::Tall => {
                let thread = k.thread_index();
                operand.store(k, &tile, thread / 32 % 4);
            }
            Shape::Square | Shape::Wide => {
                let tile = tile.panel(k, part.index);
                operand.store(k, &tile, self.warp);
            }
        }
    }

    /// Starts this warpgroup's part of `dQ^T = K^T dS^T`: half of the columns or, where the head
    /// dimension is at most 64, half of the queries.
    pub(super) fn start_query_gradients(
        &self,
        k: &mut Builder,
        products: &Accumulator,
        stage: impl Into<Value<U32>>,
    ) {
        let layout = self.backward.pass().sums_layout();
        let keys = self.shared.keys.at(k, 0);
        let score_gradients = self.shared.score_gradients.at(k, stage);
        let (keys, score_gradients) = if layout.columns > 64 {
            (keys.panel(k, self.index), score_gradients)
        } else {
            (keys.panel(k, 0), score_gradients.panel(k, self.index))
        };
        k.start_product(products, Accumulate::No, keys.transposed(), score_gradients.matrix());
    }

    /// Waits, in the deterministic mode, until this block may add the `dQ` of the step in `stage`.
    pub(super) fn wait_for_turn(
        &self,
        k: &mut Builder,
        stage: impl Into<Value<U32>>,
        phase: impl Into<Value<U32>>,
    ) {
        if let Some(turns) = &self.shared.turns {
            turns.wait(k, stage, phase);
        }
    }

    /// Signals, in the deterministic mode, that this warp has added its part of `dQ`.
    pub(super) fn added(&self, k: &mut Builder, stage: impl Into<Value<U32>>) {
        if let Some(turns) = &self.shared.turns {
            turns.added(k, stage, self.leader);
        }
    }

    /// Adds this warpgroup's part of `dQ` to the sums of a query block.
    pub(super) fn add_own(&self, k: &mut Builder, number: Reg<U32>, products: &Accumulator) {
        // Recomputed to save registers.
        let thread = k.thread_index();
        self.add(k, number, (thread - 128) / 128, products);
    }

    /// Adds one part of `dQ` to the sums of a query block, four registers to a reduction.
    pub(super) fn add(
        &self,
        k: &mut Builder,
        number: Reg<U32>,
        part: impl Into<Value<U32>>,
        products: &Accumulator,
    ) {
        let layout = self.backward.pass().sums_layout();
        let block = k.multiply_wide(number, layout.block_bytes());
        let thread = k.thread_index();
        let within = part.into() * layout.part_bytes() + thread % 128 * 16;
        let sums = k.eval(self.sums + block + within.convert::<U64>());
        for (index, registers) in products.registers().chunks_exact(4).enumerate() {
            let address = sums + SumsLayout::REGISTERS_BYTES * index as u32;
            k.reduce_add_vector(address, registers, Scope::Gpu);
        }
    }
}
