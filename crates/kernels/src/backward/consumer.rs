//! The loop of the consumer warpgroups for heads up to 128 wide: the steps of a tile's walk.
//!
//! The head of this folder's module shows one step as pseudocode; [`Consumer::step`] is that code.
//! A step is one query block and consists of one or more [`Part`]s: a 64 x 64 score accumulator
//! each. [`Warpgroup`] has the building blocks (waits, products, masks, `dQ` additions), which the
//! loops for wider heads (`wide`) use too.

use ptx::{
    Accumulate, Accumulator, Builder, Expression, F32, Fence, Fragment, GlobalAddress, LoadHint,
    Pred, Reg, S32, Scope, Select, SharedAddress, SharedTile, SharedTiles, U32, U64, Value,
};

use super::epilogue::{self, Done};
use super::persistent::{Claims, Handover};
use super::tile_scheduler::{Tile, TileScheduler, Walk};
use super::{Backward, Block, PART, ROWS, Shape, Shared, SumsLayout, WARPGROUPS, barrier};
use crate::attention::function::lower::{FunctionRegisters, Functions, ScoreCoordinates};
use crate::attention::scores::{ScoreRule, Slopes, alibi, distances};
use crate::attention::{ACCUMULATOR_ROWS, Score};
use crate::parameter::Scale;

/// The launch parameters that consumers read.
pub(super) struct Consumer {
    scores: ScoreRule,
    /// The softmax scale, by which `dK` is multiplied at the end.
    pub(super) scale: Reg<F32>,
    slopes: Option<Slopes>,
    functions: Functions,
}

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
    fn first_key(self, backward: &Backward) -> u32 {
        match backward.shape() {
            Shape::Tall => self.index * ROWS,
            Shape::Square | Shape::Wide => 0,
        }
    }
}

/// The `dK` and `dV` accumulators of a warpgroup: one pair for every 64 keys.
struct Sums {
    keys: Vec<Accumulator>,
    values: Vec<Accumulator>,
}

impl Sums {
    fn zeros(k: &mut Builder, backward: &Backward) -> Self {
        let mut zeros = |columns| {
            let each = 0..backward.group_keys() / ROWS;
            each.map(|_| Accumulator::zeros(k, columns)).collect()
        };
        Sums {
            keys: zeros(backward.key_layout().columns),
            values: zeros(backward.value_layout().columns),
        }
    }

    /// Returns which accumulators a part adds to.
    fn index(backward: &Backward, part: Part) -> usize {
        (part.first_key(backward) / ROWS) as usize
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

/// Accumulators and operands of the loop, beside the `dK` and `dV` accumulators: as many as fit.
struct Registers {
    /// `S^T`, then `P^T` in place.
    scores: Accumulator,
    /// `dP^T`, then `dS^T` in place.
    products: Accumulator,
    /// `dQ^T` of the previous step, later in a step: the registers of `products`, or the first of
    /// them.
    query_gradients: Accumulator,
    /// The 16-bit left operand: `P^T` for `dV`, then `dS^T` for `dK`.
    operand: Fragment,
    /// A separate operand for `P^T`, where it is rounded while the product with `dS^T` is in
    /// flight.
    weights: Option<Fragment>,
}

impl Registers {
    fn new(k: &mut Builder, backward: &Backward) -> Self {
        let products = Accumulator::new(k, PART);
        Registers {
            scores: Accumulator::new(k, PART),
            query_gradients: products.narrowed(backward.pass().sums_layout().part_queries),
            products,
            operand: Fragment::new(k, backward.element, PART),
            weights: (backward.rounds_early()).then(|| Fragment::new(k, backward.element, PART)),
        }
    }
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

impl Consumer {
    pub(super) fn parameters(k: &mut Builder, backward: &Backward) -> Self {
        Consumer {
            scores: backward.score_rule(k),
            scale: Scale::Natural.read(k),
            slopes: backward.rules.alibi.then(|| Slopes::parameters(k)),
            functions: Functions::of_gradients(k, &backward.rules),
        }
    }

    /// Computes and stores `dK` and `dV` of this warpgroup's keys, and adds their part of `dQ`.
    pub(super) fn consume(&self, k: &mut Builder, block: &Block<'_>, tile: &Tile) {
        let sums = Sums::zeros(k, block.backward);
        let group = Warpgroup::new(k, block, tile);
        k.if_(group.walk.left.greater(0), |k| self.steps(k, &group, &sums));
        self.finish(k, block, &group, &sums);
    }

    /// Does the work of `consume` for one tile after another, in persistent kernels.
    pub(super) fn consume_all(
        &self,
        k: &mut Builder,
        block: &Block<'_>,
        handover: &Handover,
        claims: &Claims,
    ) {
        let Block { backward, scheduler, .. } = *block;
        let (phase, tile_phase) = (k.variable(0), k.variable(0));
        k.loop_(|k| {
            handover.tiles.wait_full(k, 0, tile_phase);
            let number = handover.posted.read(k);
            k.break_if(!claims.is_tile(number));
            let tile = scheduler.find_numbered(k, number);
            let sums = Sums::zeros(k, backward);
            let group = Warpgroup {
                phase,
                tile_phase: Some(tile_phase),
                ..Warpgroup::new(k, block, &tile)
            };
            k.if_else(
                group.walk.left.greater(0),
                |k| {
                    self.steps(k, &group, &sums);
                    group.skip_to_first_stage(k);
                },
                |k| {
                    group.wait_for_keys(k);
                    group.wait_for_values(k);
                    group.wait_until_cleared(k);
                },
            );
            self.finish(k, block, &group, &sums);
            k.set(tile_phase, tile_phase ^ 1);
        });
    }

    /// Stores the `dK` and `dV` that a warpgroup has accumulated.
    fn finish(&self, k: &mut Builder, block: &Block<'_>, group: &Warpgroup<'_>, sums: &Sums) {
        let Block { backward, scheduler, shared, .. } = *block;
        // Recomputed rather than kept in registers through the loop.
        let number = scheduler.number(k);
        let tile = scheduler.find_numbered(k, number);
        let first = k.eval(group.index * backward.group_keys());
        let owner = epilogue::Owner { index: group.index, thread: group.thread, first };
        let each = sums.values.iter().zip(&sums.keys).zip((0..).step_by(ROWS as usize));
        // Releases the key tile, so that the next tile's keys load while this one's gradients are
        // stored: `dK` is staged in the memory of `dS` instead.
        let staging = shared.handover.as_ref().map(|handover| {
            k.warp_sync();
            handover.tiles.release_stage(k, 0, group.leader);
            shared.score_gradients.reused_as(k, backward.key_layout())
        });
        let done: Vec<Done<'_>> = each
            .flat_map(|((values, keys), first)| {
                let keys = block.key_gradients(keys, first, self.scale);
                let tiles = staging.as_ref().unwrap_or(keys.tiles);
                [block.value_gradients(values, first), Done { tiles, ..keys }]
            })
            .collect();
        let handover = shared.handover.as_ref();
        if let (Some(clear_and_round), None) = (&shared.clear_and_round, handover) {
            clear_and_round.added(k, group.leader);
        }
        k.barrier_sync(barrier::PRODUCTS, 128 * WARPGROUPS);
        let (Some(partials), Some(split)) = (&shared.partials, &scheduler.split) else {
            return epilogue::store(k, &tile, &owner, &done, handover);
        };
        let sums: Vec<&Accumulator> = done.iter().map(|it| it.sums).collect();
        let stores = partials.exchange(k, split, number, &owner, &sums);
        k.if_else(
            stores.differs(0),
            |k| epilogue::store(k, &tile, &owner, &done, handover),
            |k| {
                if let Some(handover) = handover {
                    k.if_(owner.thread.equals(0), |k| handover.stored(k));
                }
            },
        );
    }

    /// Emits the loop over all steps of a tile, unrolled by the stages.
    fn steps(&self, k: &mut Builder, group: &Warpgroup<'_>, sums: &Sums) {
        let registers = Registers::new(k, group.backward);
        let every = Part::every(group.backward);
        let parts = group.backward.parts() as usize;
        group.wait_for_keys(k);
        group.wait_for_queries(k, Part::FIRST, Part::FIRST);
        group.begin(k);
        group.start_scores(k, &registers.scores, Part::FIRST);
        k.wait_products(0);
        self.early_weights(k, group, Part::FIRST, &registers);
        group.wait_for_values(k);
        group.wait_for_output_gradients(k, Part::FIRST, Part::FIRST);
        k.loop_(|k| {
            // The first step is peeled: it has no previous step whose `dQ` it would compute.
            for (part, next) in &every[..parts] {
                self.step(k, group, &registers, sums, *part, *next, true);
            }
            k.loop_(|k| {
                for (part, next) in every.iter().cycle().skip(parts).take(every.len()) {
                    self.step(k, group, &registers, sums, *part, *next, false);
                }
            });
            k.break_if(true);
        });
        self.last(k, group, &registers, sums);
    }

    /// Emits one part of a step. After the tile's last part the loop is left in the middle of the
    /// body, before the next scores are started; [`last`](Consumer::last) does the rest.
    #[allow(clippy::too_many_arguments)]
    fn step(
        &self,
        k: &mut Builder,
        group: &Warpgroup<'_>,
        registers: &Registers,
        sums: &Sums,
        part: Part,
        next: Part,
        first: bool,
    ) {
        let Registers { scores, products, query_gradients, operand, weights } = registers;
        let index = Sums::index(group.backward, part);
        let (key_gradients, value_gradients) = (&sums.keys[index], &sums.values[index]);
        let last = next.index == 0;
        group.start_products(k, products, part);
        if weights.is_none() {
            self.weights(k, group, part, scores, operand);
        }
        let rounded = weights.as_ref().unwrap_or(operand);
        group.start_value_gradients(k, value_gradients, rounded, part);
        k.wait_products(1);
        group.score_gradients(k, part, products, scores);
        k.wait_products(0);
        if last {
            group.release_output_gradients(k, part.stage);
            k.set(group.stage, part.stage);
            k.break_if(group.walk.left.equals(1));
            group.wait_for_queries(k, part, next);
        }

        group.start_scores(k, scores, next);
        let before = (part.index == 0 && !first).then(|| part.before(group.backward));
        if let Some(before) = before {
            group.wait_until_written(k, part, before);
        }
        group.store_score_gradients(k, part.stage, part, products, operand);
        if last {
            group.written(k, part.stage);
        }
        if let Some(before) = before {
            group.start_query_gradients(k, query_gradients, before.stage);
        }
        group.start_key_gradients(k, key_gradients, operand, part.stage, part);
        k.wait_products(1 + u32::from(before.is_some()));
        if last {
            group.advance_block(k, next.stage);
        }
        self.early_weights(k, group, next, registers);
        if last {
            // Before the `dQ` additions: whatever comes after them is delayed by them.
            group.wait_for_output_gradients(k, part, next);
        }
        if let Some(before) = before {
            k.wait_products(1);
            let phase = group.phase(before.stage > part.stage);
            group.wait_for_turn(k, before.stage, phase);
            group.add_own(k, group.number, query_gradients);
            group.added(k, before.stage);
        }
        k.wait_products(0);
        if last {
            k.set(group.number, group.walk.number);
            group.walk.advance_number(k, group.scheduler, group.tile);
            group.release_queries(k, part.stage);
            if next.stage == 0 {
                k.set(group.phase, group.phase ^ 1);
            }
            if first {
                group.wait_until_cleared(k);
            }
        }
    }

    /// Emits what the loop leaves undone: `dK` and `dQ` of the last step.
    fn last(&self, k: &mut Builder, group: &Warpgroup<'_>, registers: &Registers, sums: &Sums) {
        let Registers { products, query_gradients, operand, .. } = registers;
        let part = Part { index: group.backward.parts() - 1, ..Part::FIRST };
        let key_gradients = &sums.keys[Sums::index(group.backward, part)];
        let stages = group.backward.stages();
        k.wait_products(0);
        group.wait_until_cleared(k);
        // With one part to a step, the `dQ` of the step before the last is still missing as well.
        let around = k.eval(group.stage.equals(0));
        let before = k.eval(around.select::<U32>(stages - 1, group.stage - 1));
        if group.backward.parts() == 1 {
            k.if_(group.number.differs(NO_STEP), |k| {
                let written = group.shared.written.at(k, before);
                let phase = around.select::<U32>(group.phase ^ 1, group.phase);
                k.mbarrier_wait(written, phase, Scope::Block);
            });
        }
        group.store_score_gradients(k, group.stage, part, products, operand);
        group.written(k, group.stage);
        group.start_key_gradients(k, key_gradients, operand, group.stage, part);
        k.wait_products(0);
        if group.backward.parts() == 1 {
            k.if_(group.number.differs(NO_STEP), |k| {
                group.start_query_gradients(k, query_gradients, before);
                k.wait_products(0);
                let phase = around.select::<U32>(group.phase ^ 1, group.phase);
                group.wait_for_turn(k, before, phase);
                group.add_own(k, group.number, query_gradients);
                group.added(k, before);
            });
        }
        let written = group.shared.written.at(k, group.stage);
        k.mbarrier_wait(written, group.phase, Scope::Block);
        group.start_query_gradients(k, query_gradients, group.stage);
        k.wait_products(0);
        group.wait_for_turn(k, group.stage, group.phase);
        group.add_own(k, group.walk.number, query_gradients);
        group.added(k, group.stage);
    }

    /// Turns scores into `P` while products that read `operand` are in flight: where `P` itself is
    /// all that is kept of the scores, or a separate operand can take the rounded `P`.
    fn early_weights(
        &self,
        k: &mut Builder,
        group: &Warpgroup<'_>,
        part: Part,
        registers: &Registers,
    ) {
        let rounded = registers.weights.as_ref();
        if !group.backward.rules.has_score_derivative() || rounded.is_some() {
            self.exponentials(k, group, part, &registers.scores, rounded);
        }
    }

    /// Rounds `P` into `operand`. Where the score rule has a derivative of its own, scores only now
    /// become `P`; their registers keep `P` times that derivative, the factor between `dP - delta`
    /// and `dS`.
    fn weights(
        &self,
        k: &mut Builder,
        group: &Warpgroup<'_>,
        part: Part,
        scores: &Accumulator,
        operand: &Fragment,
    ) {
        if group.backward.rules.has_score_derivative() {
            self.exponentials(k, group, part, scores, Some(operand));
        } else {
            operand.round(k, scores.registers());
        }
    }

    /// Turns scores into `P` in place. With `rounded`, `P` is rounded into that operand at once,
    /// for the score registers keep `P` times the derivative of the score.
    pub(super) fn exponentials(
        &self,
        k: &mut Builder,
        group: &Warpgroup<'_>,
        part: Part,
        scores: &Accumulator,
        rounded: Option<&Fragment>,
    ) {
        let scores = Score::of(scores);
        self.scores.cap(k, &scores);
        self.scores.in_natural_units(k, &scores);
        group.hide(k, part, &scores);
        if let Some(mask) = &self.functions.mask {
            group.if_function(k, part, |k| {
                let coordinates = group.coordinates(k, part);
                mask.apply(k, &scores, &coordinates);
            });
        }
        let slope = self.slopes.as_ref().map(|slopes| {
            let scale_log2 = self.scores.scale_log2;
            let batch = group.scheduler.batch(k, group.tile);
            let slope = slopes.unscaled(k, batch, group.walk.head, scale_log2);
            let first = group.first_column(k, part);
            let [query_length, key_length] = group.scheduler.lengths(k);
            let position =
                first + key_length.reinterpret::<S32>() - query_length.reinterpret::<S32>();
            let key = group.key(k, part);
            (slope, k.eval(key - position))
        });
        if let Some(function) = &self.functions.score {
            if let Some((slope, distance)) = slope {
                alibi(k, &scores, &ACCUMULATOR_ROWS, distance.into(), slope);
            }
            return self.exponentials_of_function(k, function, group, part, &scores, rounded);
        }
        let slope = slope.map(|(slope, distance)| {
            (k.eval(-slope), distances(k, &ACCUMULATOR_ROWS, distance.into()))
        });
        let statistics = group.statistics(k, Statistic::LogSum, part);
        for (index, pair) in scores.chunks_exact(2).enumerate() {
            let at = statistics + pair[0].column * 4;
            let log_sums = k.load_vector::<F32, _, 2>(at, LoadHint::default());
            let weights = [0, 1].map(|side| {
                let score = pair[side];
                let exponent = match &slope {
                    None => score.register,
                    Some((cost, distances)) => {
                        let apart = k.absolute(distances[score.row] - score.column as f32);
                        k.fma(apart, *cost, score.register)
                    }
                };
                let exponent = k.fma(exponent, self.scores.scale_log2, log_sums[side]);
                k.exp2(exponent)
            });
            if let Some(operand) = rounded {
                operand.set_pair(k, index, weights[0], weights[1]);
            }
            for (weight, score) in weights.into_iter().zip(pair) {
                if rounded.is_none() {
                    k.set(score.register, weight);
                    continue;
                }
                // The derivative 1 - tanh^2. A mask function hides scores by minus infinity, which
                // is clamped to -1 so that the product with the zero weight is not NaN.
                let tanh = match self.functions.mask {
                    None => score.register,
                    Some(_) => k.eval(score.register.maximum(-1.0)),
                };
                let derivative = k.fma(-tanh, tanh, 1.0);
                k.set(score.register, weight * derivative);
            }
        }
    }

    /// Does the work of `exponentials` where scores go through a score function.
    fn exponentials_of_function(
        &self,
        k: &mut Builder,
        function: &FunctionRegisters,
        group: &Warpgroup<'_>,
        part: Part,
        scores: &[Score],
        operand: Option<&Fragment>,
    ) {
        let statistics = group.statistics(k, Statistic::LogSum, part);
        let coordinates = group.coordinates(k, part);
        let numbers = (self.scores.scale_log2, statistics);
        function.probabilities(
            k,
            scores,
            &coordinates,
            numbers,
            operand.is_some(),
            |k, first, weights| {
                let Some(operand) = operand else { return };
                let place = |it: &Score| (it.row, it.column);
                let index = scores.iter().position(|it| place(it) == place(first));
                operand.set_pair(k, index.unwrap_or(0) / 2, weights[0], weights[1]);
            },
        );
    }
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
    fn if_function(&self, k: &mut Builder, part: Part, body: impl FnOnce(&mut Builder)) {
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
    fn wait_until_cleared(&self, k: &mut Builder) {
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
    fn skip_to_first_stage(&self, k: &mut Builder) {
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
    fn coordinates(&self, k: &mut Builder, part: Part) -> ScoreCoordinates<'static> {
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
    fn add_own(&self, k: &mut Builder, number: Reg<U32>, products: &Accumulator) {
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
