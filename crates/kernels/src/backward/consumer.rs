//! The loop of the consumer warpgroups for heads up to 128 wide: the steps of a tile's walk.
//!
//! The head of this folder's module shows one step as pseudocode; [`Consumer::step`] is that code.
//! A step is one query block and consists of one or more [`Part`]s: a 64 x 64 score accumulator
//! each. The building blocks are in `warpgroup`.

use ptx::{
    Accumulator, Builder, Expression, F32, Fragment, LoadHint, Reg, S32, Scope, Select, U32,
};

use super::epilogue::{self, Done};
use super::persistent::{Claims, Handover};
use super::tile_scheduler::Tile;
use super::warpgroup::{NO_STEP, Part, Statistic, Warpgroup};
use super::{Backward, Block, PART, ROWS, WARPGROUPS, barrier};
use crate::attention::function::lower::{FunctionRegisters, Functions};
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

/// Accumulators and operands of the loop: as many as fit.
struct Registers<'a> {
    /// `dK` and `dV`.
    sums: &'a Sums,
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

impl<'a> Registers<'a> {
    fn new(k: &mut Builder, backward: &Backward, sums: &'a Sums) -> Self {
        let products = Accumulator::new(k, PART);
        Registers {
            sums,
            scores: Accumulator::new(k, PART),
            query_gradients: products.narrowed(backward.pass().sums_layout().part_queries),
            products,
            operand: Fragment::new(k, backward.element, PART),
            weights: (backward.rounds_early()).then(|| Fragment::new(k, backward.element, PART)),
        }
    }
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
        let registers = Registers::new(k, group.backward, sums);
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
            for pair in &every[..parts] {
                self.step(k, group, &registers, *pair, true);
            }
            k.loop_(|k| {
                for pair in every.iter().cycle().skip(parts).take(every.len()) {
                    self.step(k, group, &registers, *pair, false);
                }
            });
            k.break_if(true);
        });
        self.last(k, group, &registers);
    }

    /// Emits one part of a step. After the tile's last part the loop is left in the middle of the
    /// body, before the next scores are started; [`last`](Consumer::last) does the rest.
    fn step(
        &self,
        k: &mut Builder,
        group: &Warpgroup<'_>,
        registers: &Registers<'_>,
        (part, next): (Part, Part),
        first: bool,
    ) {
        let Registers { sums, scores, products, query_gradients, operand, weights } = registers;
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
    fn last(&self, k: &mut Builder, group: &Warpgroup<'_>, registers: &Registers<'_>) {
        let Registers { sums, products, query_gradients, operand, .. } = registers;
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
        registers: &Registers<'_>,
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
