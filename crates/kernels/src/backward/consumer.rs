//! The consumers' loop: query blocks that see a block's keys.

use ptx::{
    Accumulate, Accumulator, Builder, Expression, F32, Fence, Fragment, GlobalAddress, LoadHint,
    Pred, Reg, S32, Scope, SharedAddress, SharedTile, SharedTiles, U32, U64,
};

use super::place::{Place, Tile, Walk};
use super::{
    Backward, KEY_BLOCK, PART, Shared, SumsLayout, Tensors, WARPGROUPS, barrier, epilogue,
};
use crate::attention::scores::{ScoreRule, Slopes, distances};
use crate::attention::{ACCUMULATOR_ROWS, Score};
use crate::parameter::Scale;

/// What the consumers are passed at launch.
pub(super) struct Consumer {
    scores: ScoreRule,
    /// The softmax scale, for the gradient of the keys.
    scale: Reg<F32>,
    slopes: Option<Slopes>,
}

/// What is known of a query row, in the order of the workspace.
#[derive(Clone, Copy)]
enum Statistic {
    /// Its log-sum-exp, less than zero as it were.
    LogSum,
    /// The sum of its output times its gradient, negative too.
    RowSum,
}

/// What the loop computes in. Accumulators hold 64 queries, but for those of `dQ`.
struct Registers {
    scores: Accumulator,
    products: Accumulator,
    query_gradients: Accumulator,
    weights: Fragment,
    score_gradients: Fragment,
}

impl Registers {
    fn new(k: &mut Builder, backward: &Backward) -> Self {
        let products = Accumulator::new(k, PART);
        let queries = backward.sums_layout().part_queries();
        let query_gradients = if backward.early_products() {
            Accumulator::new(k, queries)
        } else {
            products.narrowed(queries)
        };
        let weights = Fragment::new(k, backward.element, PART);
        let score_gradients = if backward.early_products() {
            Fragment::new(k, backward.element, PART)
        } else {
            weights.clone()
        };
        let scores = Accumulator::new(k, PART);
        Registers { scores, products, query_gradients, weights, score_gradients }
    }
}

/// A warpgroup at work.
struct Warpgroup<'a> {
    backward: &'a Backward,
    shared: &'a Shared,
    place: &'a Place,
    tile: &'a Tile,
    /// Which of the consumer warpgroups it is.
    index: Reg<U32>,
    /// The thread's index in the warpgroup, and its warp's.
    thread: Reg<U32>,
    warp: Reg<U32>,
    /// True in the lane that gives stages back for its warp.
    leader: Reg<Pred>,
    /// The thread's first column in an accumulator of scores.
    column: Reg<U32>,
    /// The key of the thread's first row.
    key: Reg<S32>,
    queries: ptx::Consumer,
    output_gradients: ptx::Consumer,
    /// Which of the two tiles of `dS` is next.
    turn: Reg<U32>,
    walk: Walk,
    /// Where the thread would add its part of `dQ` to the first block of query rows.
    sums: Reg<GlobalAddress>,
}

impl Consumer {
    pub(super) fn parameters(k: &mut Builder, backward: &Backward) -> Self {
        Consumer {
            scores: ScoreRule::parameters(k, &backward.rules),
            scale: Scale::Natural.read(k),
            slopes: backward.rules.alibi.then(|| Slopes::parameters(k)),
        }
    }

    /// One warpgroup's work: 64 keys.
    pub(super) fn consume(
        &self,
        k: &mut Builder,
        backward: &Backward,
        shared: &Shared,
        tensors: &Tensors,
        place: &Place,
        tile: &Tile,
    ) {
        let key_gradients = Accumulator::zeros(k, backward.key_layout().columns);
        let value_gradients = Accumulator::zeros(k, backward.value_layout().columns);
        let group = Warpgroup::new(k, backward, shared, tensors, place, tile);
        k.if_(group.walk.left.greater(0), |k| {
            self.steps(k, &group, &key_gradients, &value_gradients);
        });
        // Found again, rather than kept in registers all the while.
        let tile = place.find(k);
        epilogue::store(
            k,
            shared,
            tensors,
            &tile,
            &epilogue::Owner { index: group.index, thread: group.thread },
            [(&value_gradients, None), (&key_gradients, Some(self.scale))],
        );
    }

    /// The loop of the algorithm: see the head of this folder.
    fn steps(
        &self,
        k: &mut Builder,
        group: &Warpgroup<'_>,
        key_gradients: &Accumulator,
        value_gradients: &Accumulator,
    ) {
        let backward = group.backward;
        let registers = Registers::new(k, backward);
        let Registers { scores, products, query_gradients, weights, score_gradients } = &registers;
        let (parts, early) = (backward.parts(), backward.early_products());

        group.wait_for_keys(k);
        group.queries.wait(k);
        if early {
            group.wait_for_values(k);
            group.output_gradients.wait(k);
        }
        group.start_scores(k, scores, 0);
        if early {
            group.start_products(k, products, 0);
        }
        k.wait_products(early.into());
        self.weights(k, group, 0, scores, weights);
        if !early {
            group.wait_for_values(k);
            group.output_gradients.wait(k);
        }
        if early {
            group.start_value_gradients(k, value_gradients, weights, 0);
        }
        k.loop_(|k| {
            for part in 0..parts {
                let last = part + 1 == parts;
                let next = if last { 0 } else { part + 1 };
                if !early {
                    group.start_products(k, products, part);
                    group.start_value_gradients(k, value_gradients, weights, part);
                }
                k.wait_products(1);
                multiply(k, products, scores);
                k.wait_products(0);
                if last {
                    group.output_gradients.release(k, group.leader);
                }
                group.round_score_gradients(k, part, products, score_gradients);
                group.start_key_gradients(k, key_gradients, score_gradients, part);
                let stage = k.variable(group.queries.stage());
                if last {
                    k.break_if(group.walk.left.equals(1));
                    group.queries.keep(k);
                    group.queries.wait(k);
                }
                group.start_scores(k, scores, next);
                if early {
                    if last {
                        group.output_gradients.wait(k);
                    }
                    group.start_products(k, products, next);
                }
                let sums = last.then(|| {
                    group.meet(k);
                    group.start_query_gradients(k, query_gradients);
                    group.sums(k)
                });
                // The scores, and with them the product for the keys, which was started before.
                k.wait_products(u32::from(early) + u32::from(last));
                if last {
                    group.queries.give_back(k, stage, group.leader);
                    group.walk.advance(k, group.tile);
                }
                self.weights(k, group, next, scores, weights);
                if early {
                    group.start_value_gradients(k, value_gradients, weights, next);
                }
                if let Some(sums) = sums {
                    k.wait_products(early.into());
                    add(k, sums, query_gradients);
                    if !early {
                        group.output_gradients.wait(k);
                    }
                }
            }
        });
        group.meet(k);
        group.start_query_gradients(k, query_gradients);
        let sums = group.sums(k);
        k.wait_products(0);
        add(k, sums, query_gradients);
    }

    /// Scores become weights: rounded in `weights`, and in the registers of the scores what the
    /// gradient of a score is of that of its weight.
    fn weights(
        &self,
        k: &mut Builder,
        group: &Warpgroup<'_>,
        part: u32,
        scores: &Accumulator,
        weights: &Fragment,
    ) {
        let rules = group.backward.rules;
        let scores = Score::of(scores);
        self.scores.cap(k, &scores);
        group.hide(k, part, &scores);
        let slope = self.slopes.as_ref().map(|slopes| {
            let scale_log2 = self.scores.scale_log2;
            let slope = slopes.unscaled(k, group.tile.batch, group.walk.head, scale_log2);
            let first = group.first_column(k, part);
            let [query_length, key_length] = group.place.lengths;
            let position =
                first + key_length.reinterpret::<S32>() - query_length.reinterpret::<S32>();
            let distances = distances(k, &ACCUMULATOR_ROWS, group.key - position);
            (k.eval(-slope), distances)
        });
        let statistics = rules.softcap.then(|| group.statistics(k, Statistic::LogSum, part));
        for (index, pair) in scores.chunks_exact(2).enumerate() {
            let log_sums = statistics
                .map(|at| k.load_vector::<F32, _, 2>(at + pair[0].column * 4, LoadHint::default()));
            let mut weight = [pair[0].register, pair[1].register];
            for (side, (weight, score)) in weight.iter_mut().zip(pair).enumerate() {
                let exponent = match &slope {
                    None => score.register,
                    Some((cost, distances)) => {
                        let apart = k.absolute(distances[score.row] - score.column as f32);
                        k.fma(apart, *cost, score.register)
                    }
                };
                let scale_log2 = self.scores.scale_log2;
                *weight = match log_sums {
                    Some(log_sums) => {
                        let exponent = k.fma(exponent, scale_log2, log_sums[side]);
                        k.exp2(exponent)
                    }
                    None => k.exp2(exponent * scale_log2),
                };
            }
            weights.set_pair(k, index, weight[0], weight[1]);
            for (weight, score) in weight.into_iter().zip(pair) {
                if rules.softcap {
                    // The slope of the cap, 1 - tanh^2; a hidden score is minus infinity.
                    let tanh = k.eval(score.register.maximum(-1.0));
                    let slope = k.fma(-tanh, tanh, 1.0);
                    k.set(score.register, weight * slope);
                } else {
                    k.set(score.register, weight);
                }
            }
        }
    }
}

impl<'a> Warpgroup<'a> {
    fn new(
        k: &mut Builder,
        backward: &'a Backward,
        shared: &'a Shared,
        tensors: &Tensors,
        place: &'a Place,
        tile: &'a Tile,
    ) -> Self {
        let thread = k.thread_index();
        let index = k.eval(thread / 128 - 1);
        // The same in every lane, and known to be: addresses of tiles are computed once a warp.
        let index = k.shuffle_index(index, 0);
        let thread = k.eval(thread % 128);
        let lane = k.lane();
        let position = Accumulator::position(k, thread);
        let key = tile.first_key + index * (KEY_BLOCK / WARPGROUPS) + position.row;
        let walk = place.walk(k, tile);
        let within = index * backward.sums_layout().part_bytes() + thread * 16;
        Warpgroup {
            backward,
            shared,
            place,
            tile,
            index,
            thread,
            warp: k.eval(thread / 32),
            leader: k.eval(lane.equals(0)),
            column: position.column,
            key: k.eval(key.reinterpret::<S32>()),
            queries: shared.query_pipeline.consumer(k),
            output_gradients: shared.output_gradient_pipeline.consumer(k),
            turn: k.variable(0),
            walk,
            sums: k.eval(tensors.sums + within.convert::<U64>()),
        }
    }

    fn wait_for_keys(&self, k: &mut Builder) {
        let loaded = self.shared.loaded.at(k, 0);
        k.mbarrier_wait(loaded, 0, Scope::Block);
    }

    fn wait_for_values(&self, k: &mut Builder) {
        let loaded = self.shared.loaded.at(k, 1);
        k.mbarrier_wait(loaded, 0, Scope::Block);
    }

    /// Some of this step's queries.
    fn query_rows(&self, k: &mut Builder, part: u32) -> SharedTile {
        let tile = self.shared.queries.at(k, self.queries.stage());
        tile.rows(k, part * PART, PART)
    }

    /// The same rows of the output gradients.
    fn gradient_rows(&self, k: &mut Builder, part: u32) -> SharedTile {
        let tile = self.shared.output_gradients.at(k, self.output_gradients.stage());
        tile.rows(k, part * PART, PART)
    }

    /// This warpgroup's keys or values.
    fn own(&self, k: &mut Builder, tiles: &SharedTiles) -> SharedTile {
        let rows = KEY_BLOCK / WARPGROUPS;
        tiles.at(k, 0).rows(k, self.index * rows, rows)
    }

    /// Starts `S^T = K Q^T`, less the log-sum-exps where nothing changes scores in between.
    fn start_scores(&self, k: &mut Builder, scores: &Accumulator, part: u32) {
        let keys = self.own(k, &self.shared.keys);
        let queries = self.query_rows(k, part);
        let accumulate = if self.backward.rules.softcap {
            // The log-sum-exps are for scores that are capped.
            Accumulate::No
        } else {
            self.begin_with(k, scores, Statistic::LogSum, part);
            Accumulate::Yes
        };
        k.start_product(scores, accumulate, keys.matrix(), queries.transposed());
    }

    /// Starts `dP^T = V dO^T`, less the row sums.
    fn start_products(&self, k: &mut Builder, products: &Accumulator, part: u32) {
        let values = self.own(k, &self.shared.values);
        let gradients = self.gradient_rows(k, part);
        self.begin_with(k, products, Statistic::RowSum, part);
        k.start_product(products, Accumulate::Yes, values.matrix(), gradients.transposed());
    }

    /// Starts `dV += P^T dO`.
    fn start_value_gradients(&self, k: &mut Builder, to: &Accumulator, p: &Fragment, part: u32) {
        let gradients = self.gradient_rows(k, part);
        k.start_product(to, Accumulate::Yes, p, gradients.matrix());
    }

    /// Starts `dK += dS^T Q`.
    fn start_key_gradients(&self, k: &mut Builder, to: &Accumulator, ds: &Fragment, part: u32) {
        let queries = self.query_rows(k, part);
        k.start_product(to, Accumulate::Yes, ds, queries.matrix());
    }

    /// Hides keys that queries of this step do not see.
    fn hide(&self, k: &mut Builder, part: u32, scores: &[Score]) {
        k.if_(self.tile.query_blocks.needs_mask(self.walk.block), |k| {
            let first = self.first_column(k, part);
            let (place, rows) = (self.place, &ACCUMULATOR_ROWS);
            let seen = place.visibility.seen_from(k, rows, self.key, first, place.lengths);
            seen.hide_others(k, scores);
        });
    }

    /// The query of the thread's first column.
    fn first_column(&self, k: &mut Builder, part: u32) -> Reg<S32> {
        let first = part * PART;
        let column = self.walk.block * self.backward.query_block + self.column + first;
        k.eval(column.reinterpret::<S32>())
    }

    /// Puts a statistic of each column into an accumulator, for products to be added to.
    fn begin_with(&self, k: &mut Builder, to: &Accumulator, which: Statistic, part: u32) {
        let statistics = self.statistics(k, which, part);
        for (group, registers) in to.registers().chunks_exact(4).enumerate() {
            let column = Accumulator::column_of(4 * group);
            let [low, high] =
                k.load_vector::<F32, _, 2>(statistics + column * 4, LoadHint::default());
            for pair in registers.chunks_exact(2) {
                k.set(pair[0], low);
                k.set(pair[1], high);
            }
        }
    }

    /// Where a statistic of this step's rows is, from the thread's first column on.
    fn statistics(&self, k: &mut Builder, which: Statistic, part: u32) -> Reg<SharedAddress> {
        let base = self.shared.statistics(k, self.backward, self.queries.stage());
        let first = which as u32 * self.backward.query_block + part * PART;
        k.eval(base + self.column * 4 + first * 4)
    }

    /// Rounds `dS` into registers for the product with the queries, and stores it to shared memory
    /// for the one with the keys.
    fn round_score_gradients(
        &self,
        k: &mut Builder,
        part: u32,
        gradients: &Accumulator,
        operand: &Fragment,
    ) {
        for (index, pair) in gradients.registers().chunks_exact(2).enumerate() {
            operand.set_pair(k, index, pair[0], pair[1]);
        }
        let tile = self.shared.score_gradients.at(k, self.turn);
        let rows = KEY_BLOCK / WARPGROUPS;
        let tile = tile.rows(k, self.index * rows, rows).panel(k, part);
        operand.store(k, &tile, self.warp);
        k.fence(Fence::ProxyAsyncShared);
    }

    /// Both warpgroups have written their `dS`.
    fn meet(&self, k: &mut Builder) {
        k.barrier_sync(barrier::SCORE_GRADIENTS, 128 * WARPGROUPS);
    }

    /// Starts this warpgroup's part of `dQ^T = K^T dS^T`: half of the columns, or of the queries.
    fn start_query_gradients(&self, k: &mut Builder, products: &Accumulator) {
        let layout = self.backward.sums_layout();
        let keys = self.shared.keys.at(k, 0);
        let score_gradients = self.shared.score_gradients.at(k, self.turn);
        let (keys, score_gradients) = if layout.columns > 64 {
            (keys.panel(k, self.index), score_gradients)
        } else {
            (keys.panel(k, 0), score_gradients.panel(k, self.index))
        };
        k.start_product(products, Accumulate::No, keys.transposed(), score_gradients.matrix());
        k.set(self.turn, self.turn ^ 1);
    }

    /// Where the thread adds its part of `dQ` in this step.
    fn sums(&self, k: &mut Builder) -> Reg<GlobalAddress> {
        let block = k.multiply_wide(self.walk.number, self.backward.sums_layout().block_bytes());
        k.eval(self.sums + block)
    }
}

/// `dS = P * (dP - delta)`, in the place of `dP - delta`.
fn multiply(k: &mut Builder, products: &Accumulator, weights: &Accumulator) {
    for (product, weight) in products.registers().iter().zip(weights.registers()) {
        k.set(*product, *product * *weight);
    }
}

/// Adds a thread's part of `dQ`, four registers at a time.
fn add(k: &mut Builder, sums: Reg<GlobalAddress>, part: &Accumulator) {
    for (index, registers) in part.registers().chunks_exact(4).enumerate() {
        let address = sums + SumsLayout::REGISTERS_BYTES * index as u32;
        k.reduce_add_vector(address, registers, Scope::Gpu);
    }
}
