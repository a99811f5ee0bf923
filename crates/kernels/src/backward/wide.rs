//! The consumers' loops where heads are wider than 128: both warpgroups have the same 64 keys, and
//! each has one of the products of scores and the gradients of one tensor, for which it has registers.
//!
//! ```text
//! weights:                                      gradients:
//! for each query block i:                       for each query block i:
//!     start S of i + 1;  start dV += P dO           start dP of i + 1;  start dK += dS Q
//!     start dQ of i - 1, first part                 start dQ of i, first part
//!     wait for S;  P = exp(S - lse)                 wait for dP;  take P of i + 1
//!     hand P over                                   dS = P * (dP - delta)
//!     wait for all                                  wait for all;  dS to shared memory
//!     start dQ of i - 1, second part                start dQ of i, second part
//!     add the first part, then the second           add the first part, then the second
//! ```
//!
//! The two run a phase apart by themselves: what one multiplies hides what the other computes. `P`
//! goes over in `f32`, thread to thread, as it lies in registers.

use ptx::{
    Accumulate, Accumulator, Barriers, Builder, Choose, Expression, F32, Fragment, LoadHint, Reg,
    Scope, SharedAddress, StoreHint, U32, Value,
};

use super::consumer::{Consumer, NO_STEP, Part, Statistic, Warpgroup};
use super::epilogue::{self, Done};
use super::place::{Place, Tile};
use super::{Block, PART, ROWS, WARPGROUPS};

/// Bytes of the weights that are handed over: an accumulator.
pub(super) const WEIGHTS_BYTES: u32 = 4 * PART * ROWS;

/// What goes from one warpgroup to the other.
pub(super) struct Exchange {
    /// The offset of the weights.
    weights: u32,
    /// That of the numbers of the blocks of query rows, a stage each: the producer writes them, so
    /// that a warpgroup that needs nothing else of the walk has registers left.
    numbers: u32,
    /// The weights of a step have been written.
    ready: Barriers,
    /// They have been taken.
    taken: Barriers,
    /// The warpgroup of the weights has multiplied a tile of `dS` with the keys.
    multiplied: Barriers,
    /// All products of both warpgroups have ended. Each comes here by code of its own, where a named
    /// barrier would do, but compute-sanitizer takes its instructions for two barriers.
    ended: Barriers,
}

impl Exchange {
    pub(super) fn new(k: &mut Builder, stages: u32) -> Self {
        // A warp leader for its lanes.
        let warps = 4;
        Exchange {
            weights: k.shared("weights", WEIGHTS_BYTES, 16),
            numbers: k.shared("block numbers", 4 * stages, 4),
            ready: Barriers::new(k, "weights ready", 1, warps),
            taken: Barriers::new(k, "weights taken", 1, warps),
            multiplied: Barriers::new(k, "dS multiplied", stages, warps),
            ended: Barriers::new(k, "products ended", 1, warps * WARPGROUPS),
        }
    }

    /// Where the number of a stage's block of query rows is.
    pub(super) fn number(
        &self,
        k: &mut Builder,
        stage: impl Into<Value<U32>>,
    ) -> Reg<SharedAddress> {
        let numbers = k.shared_address(self.numbers);
        k.eval(numbers + stage.into() * 4)
    }

    pub(super) fn init(&self, k: &mut Builder) {
        for barriers in [&self.ready, &self.taken, &self.multiplied, &self.ended] {
            barriers.init(k);
        }
    }
}

/// A warpgroup with its part of the work.
struct Half<'a> {
    group: Warpgroup<'a>,
    exchange: &'a Exchange,
    /// The parity of the step whose weights are handed over next.
    parity: Reg<U32>,
    /// The panels of the keys that it multiplies for `dQ`, one after the other.
    panels: Vec<u32>,
    registers: Registers,
}

/// What a loop computes in beside the gradients it adds up.
struct Registers {
    /// Scores, then weights; or products, then the gradients of scores; then a part of `dQ`.
    scores: Accumulator,
    /// The other part of `dQ`.
    query_gradients: Accumulator,
    /// What is multiplied from the left.
    operand: Fragment,
}

impl Consumer {
    /// The warpgroup that has scores, weights and the gradients of values.
    pub(super) fn consume_weights(&self, k: &mut Builder, block: &Block<'_>, tile: &Tile) {
        let sums = Accumulator::zeros(k, block.backward.value_layout().columns);
        let half = Half::new(k, block, tile, 0);
        k.if_(half.group.walk.left.greater(0), |k| self.weights_steps(k, &half, &sums));
        half.store(k, block.place, self.value_gradients(block, &sums, 0));
    }

    /// The warpgroup that has the gradients of scores and those of keys.
    pub(super) fn consume_gradients(&self, k: &mut Builder, block: &Block<'_>, tile: &Tile) {
        let sums = Accumulator::zeros(k, block.backward.key_layout().columns);
        let half = Half::new(k, block, tile, 1);
        k.if_(half.group.walk.left.greater(0), |k| half.gradients_steps(k, &sums));
        half.store(k, block.place, self.key_gradients(block, &sums, 0));
    }

    fn weights_steps(&self, k: &mut Builder, half: &Half<'_>, sums: &Accumulator) {
        let Half { group, registers, .. } = half;
        let every = Part::every(group.backward);
        group.wait_for_keys(k);
        group.wait_for_queries(k, Part::FIRST, Part::FIRST);
        group.begin(k);
        half.start_scores(k, Part::FIRST);
        k.wait_products(0);
        let slopes = group.backward.rules.has_slopes();
        let Registers { scores, operand, .. } = registers;
        self.exponentials(k, group, Part::FIRST, scores, slopes.then_some(operand));
        half.hand_over(k, false);
        if !slopes {
            operand.round(k, scores.registers());
        }
        group.release_queries(k, 0u32);
        k.loop_(|k| {
            // The first step has no step before it; the others come around.
            self.weights_step(k, half, sums, every[0], true);
            k.loop_(|k| {
                for parts in every.iter().cycle().skip(1).take(every.len()) {
                    self.weights_step(k, half, sums, *parts, false);
                }
            });
            k.break_if(true);
        });
        half.last_weights(k, sums);
    }

    /// A step, weights being ready as an operand; after the last of a tile the loop is left at once.
    fn weights_step(
        &self,
        k: &mut Builder,
        half: &Half<'_>,
        sums: &Accumulator,
        (part, next): (Part, Part),
        first: bool,
    ) {
        let Half { group, registers: Registers { scores, query_gradients, operand }, .. } = half;
        let slopes = group.backward.rules.has_slopes();
        group.wait_for_output_gradients(k, part, part);
        k.set(group.stage, part.stage);
        k.break_if(group.walk.left.equals(1));
        group.wait_for_queries(k, part, next);

        half.start_scores(k, next);
        group.start_value_gradients(k, sums, operand, part);
        let before = (!first).then(|| part.before(group.backward));
        let phase = |before: Part| group.phase(before.stage > part.stage);
        if let Some(before) = before {
            group.wait_until_written(k, part, before);
            half.start_query_gradients(k, query_gradients, 0, before.stage);
        }
        k.wait_products(1 + u32::from(before.is_some()));
        group.advance_block(k, next.stage);
        if !slopes {
            self.exponentials(k, group, next, scores, None);
            group.release_queries(k, next.stage);
            half.hand_over(k, true);
        }
        k.wait_products(u32::from(before.is_some()));
        group.release_output_gradients(k, part.stage);
        if before.is_some() {
            k.wait_products(0);
        }

        if slopes {
            // Added before: its registers are needed.
            if let Some(before) = before {
                half.add_first(k, group.number, before.stage, phase(before));
            }
            self.exponentials(k, group, next, scores, Some(operand));
            group.release_queries(k, next.stage);
            half.hand_over(k, true);
        } else {
            operand.round(k, scores.registers());
        }
        if let Some(before) = before {
            half.second_query_gradients(k, group.number, before.stage, |k| {
                if !slopes {
                    half.add_first(k, group.number, before.stage, phase(before));
                }
            });
            half.multiplied(k, before.stage);
        }
        k.set(group.number, group.walk.number);
        group.walk.advance_number(k, group.place, group.tile);
        if next.stage == 0 {
            k.set(group.phase, group.phase ^ 1);
        }
    }
}

impl<'a> Half<'a> {
    fn new(k: &mut Builder, block: &Block<'a>, tile: &'a Tile, index: u32) -> Self {
        let Block { backward, shared, .. } = *block;
        let group = Warpgroup::new(k, block, tile);
        let exchange = shared.exchange.as_ref().expect("wide heads have an exchange");
        let panels = backward.pass().sums_layout().columns / 64;
        Half {
            parity: k.variable(0),
            // The first takes what is left over: it has no score gradients to store.
            panels: if index == 0 { 0..panels.div_ceil(2) } else { panels.div_ceil(2)..panels }
                .collect(),
            registers: Registers {
                scores: Accumulator::new(k, PART),
                query_gradients: Accumulator::new(k, PART),
                operand: Fragment::new(k, backward.element, PART),
            },
            group,
            exchange,
        }
    }

    /// Rounds and stores the gradients that it has.
    fn store(&self, k: &mut Builder, place: &Place, done: Done<'_>) {
        let tile = place.find(k);
        let first = k.eval(0u32);
        let owner = epilogue::Owner { index: self.group.index, thread: self.group.thread, first };
        self.lead(k, &self.exchange.ended, 0);
        let ended = self.exchange.ended.at(k, 0u32);
        k.mbarrier_wait(ended, 0, Scope::Block);
        epilogue::store(k, &tile, &owner, &[done], None);
    }

    /// Starts `S^T = K Q^T`.
    fn start_scores(&self, k: &mut Builder, part: Part) {
        let shared = self.group.shared;
        let [keys, queries] = [(&shared.keys, 0), (&shared.queries, part.stage)]
            .map(|(tiles, stage)| tiles.at(k, stage));
        let scores = &self.registers.scores;
        k.start_product(scores, Accumulate::No, keys.matrix(), queries.transposed());
    }

    /// Starts `dP^T = V dO^T`.
    fn start_products(&self, k: &mut Builder, part: Part) {
        let shared = self.group.shared;
        let [values, gradients] = [(&shared.values, 0), (&shared.output_gradients, part.stage)]
            .map(|(tiles, stage)| tiles.at(k, stage));
        let products = &self.registers.scores;
        k.start_product(products, Accumulate::No, values.matrix(), gradients.transposed());
    }

    /// Starts one of its parts of `dQ^T = K^T dS^T`.
    fn start_query_gradients(
        &self,
        k: &mut Builder,
        to: &Accumulator,
        index: usize,
        stage: impl Into<Value<U32>>,
    ) {
        let shared = self.group.shared;
        let keys = shared.keys.at(k, 0).panel(k, self.panels[index]);
        let score_gradients = shared.score_gradients.at(k, stage);
        k.start_product(to, Accumulate::No, keys.transposed(), score_gradients.matrix());
    }

    /// Adds the first part of `dQ` to the sums, when it is the turn of the step of this stage.
    fn add_first(
        &self,
        k: &mut Builder,
        number: Reg<U32>,
        stage: impl Into<Value<U32>>,
        phase: impl Into<Value<U32>>,
    ) {
        let stage = stage.into();
        self.group.wait_for_turn(k, stage.clone(), phase);
        let number = self.number_of_turn(k, number, stage);
        self.group.add(k, number, self.panels[0], &self.registers.query_gradients);
    }

    /// The number of the block of query rows of the step of a stage: whose turn it is, where there
    /// are turns, rather than kept until then.
    fn number_of_turn(&self, k: &mut Builder, known: Reg<U32>, stage: Value<U32>) -> Reg<U32> {
        match &self.group.shared.turns {
            Some(turns) => turns.number(k, stage),
            None => known,
        }
    }

    /// The second part of `dQ`, if there is one, with something to do meanwhile. Nothing is in
    /// flight before and after it.
    fn second_query_gradients(
        &self,
        k: &mut Builder,
        number: Reg<U32>,
        stage: impl Into<Value<U32>>,
        meanwhile: impl FnOnce(&mut Builder),
    ) {
        let (scores, stage) = (&self.registers.scores, stage.into());
        if self.panels.len() > 1 {
            self.start_query_gradients(k, scores, 1, stage.clone());
        }
        meanwhile(k);
        if self.panels.len() > 1 {
            k.wait_products(0);
            let number = self.number_of_turn(k, number, stage.clone());
            self.group.add(k, number, self.panels[1], scores);
        }
        self.group.added(k, stage);
    }

    /// All of its part of `dQ`, alone.
    fn query_gradients(
        &self,
        k: &mut Builder,
        number: Reg<U32>,
        stage: Reg<U32>,
        phase: impl Into<Value<U32>>,
    ) {
        if self.panels.is_empty() {
            return;
        }
        self.start_query_gradients(k, &self.registers.query_gradients, 0, stage);
        k.wait_products(0);
        let meanwhile = |k: &mut Builder| self.add_first(k, number, stage, phase);
        self.second_query_gradients(k, number, stage, meanwhile);
    }

    /// Where the thread's weights are handed over.
    fn weights(&self, k: &mut Builder) -> Reg<SharedAddress> {
        let weights = k.shared_address(self.exchange.weights);
        let thread = k.thread_index();
        k.eval(weights + thread % 128 * 16)
    }

    /// Hands weights over, once those of the step before have been taken if there was one.
    fn hand_over(&self, k: &mut Builder, before: bool) {
        if before {
            let taken = self.exchange.taken.at(k, 0);
            k.mbarrier_wait(taken, self.parity ^ 1, Scope::Block);
        }
        let to = self.weights(k);
        for (index, registers) in self.registers.scores.registers().chunks_exact(4).enumerate() {
            k.store_vector(to + 2048 * index as u32, registers, StoreHint::default());
        }
        self.arrive(k, &self.exchange.ready);
        k.set(self.parity, self.parity ^ 1);
    }

    /// Says for this warp that it has done its part of something.
    fn arrive(&self, k: &mut Builder, barriers: &Barriers) {
        k.warp_sync();
        self.lead(k, barriers, 0);
    }

    /// The same of a warp whose lanes need not meet.
    fn lead(&self, k: &mut Builder, barriers: &Barriers, stage: u32) {
        let barrier = barriers.at(k, stage);
        k.if_(self.group.leader, |k| k.mbarrier_arrive(barrier));
    }

    /// Says that a tile of `dS` is not needed any more: only products read it, and a warp has waited
    /// for those as one.
    fn multiplied(&self, k: &mut Builder, stage: u32) {
        self.lead(k, &self.exchange.multiplied, stage);
    }

    /// What is left after the last step, its weights being ready as an operand.
    fn last_weights(&self, k: &mut Builder, sums: &Accumulator) {
        let group = &self.group;
        let stages = group.backward.stages();
        let gradients = group.shared.output_gradients.at(k, group.stage);
        let operand = &self.registers.operand;
        k.start_product(sums, Accumulate::Yes, operand, gradients.matrix());
        k.wait_products(0);
        group.release_output_gradients(k, group.stage);
        k.if_(group.number.differs(NO_STEP), |k| {
            let around = k.eval(group.stage.equals(0));
            let before = k.eval(around.choose::<U32>(stages - 1, group.stage - 1));
            let written = group.shared.written.at(k, before);
            let phase = around.choose::<U32>(group.phase ^ 1, group.phase);
            k.mbarrier_wait(written, phase.clone(), Scope::Block);
            self.query_gradients(k, group.number, before, phase);
        });
        let written = group.shared.written.at(k, group.stage);
        k.mbarrier_wait(written, group.phase, Scope::Block);
        self.query_gradients(k, group.walk.number, group.stage, group.phase);
    }

    fn gradients_steps(&self, k: &mut Builder, sums: &Accumulator) {
        let group = &self.group;
        let every = Part::every(group.backward);
        group.wait_for_values(k);
        group.wait_for_output_gradients(k, Part::FIRST, Part::FIRST);
        self.start_products(k, Part::FIRST);
        k.wait_products(0);
        group.release_output_gradients(k, 0u32);
        group.wait_for_queries(k, Part::FIRST, Part::FIRST);
        self.score_gradients(k, Part::FIRST);
        self.store_score_gradients(k, Part::FIRST, Part::FIRST);
        k.loop_(|k| {
            for (part, next) in every {
                self.gradients_step(k, sums, part, next);
            }
        });
        let number = self.number(k, group.stage);
        let queries = group.shared.queries.at(k, group.stage);
        let operand = &self.registers.operand;
        k.start_product(sums, Accumulate::Yes, operand, queries.matrix());
        k.wait_products(0);
        group.release_queries(k, group.stage);
        let written = group.shared.written.at(k, group.stage);
        k.mbarrier_wait(written, group.phase, Scope::Block);
        self.query_gradients(k, number, group.stage, group.phase);
    }

    /// The number of the block of query rows whose queries are in a stage.
    fn number(&self, k: &mut Builder, stage: impl Into<Value<U32>>) -> Reg<U32> {
        let number = self.exchange.number(k, stage);
        k.load(number)
    }

    /// A step, the gradients of its scores being ready as an operand and in shared memory; after the
    /// last of a tile the loop is left at once.
    fn gradients_step(&self, k: &mut Builder, sums: &Accumulator, part: Part, next: Part) {
        let group = &self.group;
        let Registers { query_gradients, operand, .. } = &self.registers;
        let some = !self.panels.is_empty();
        k.set(group.stage, part.stage);
        k.break_if(group.walk.left.equals(1));
        group.wait_for_output_gradients(k, part, next);
        let number = self.number(k, part.stage);

        self.start_products(k, next);
        group.start_key_gradients(k, sums, operand, part.stage, part);
        if some {
            group.wait_until_written(k, part, part);
            self.start_query_gradients(k, query_gradients, 0, part.stage);
        }
        group.wait_for_queries(k, part, next);
        k.wait_products(1 + u32::from(some));
        group.release_output_gradients(k, next.stage);
        self.score_gradients(k, next);
        k.wait_products(u32::from(some));
        group.release_queries(k, part.stage);
        k.wait_products(0);

        self.store_score_gradients(k, part, next);
        if some {
            let meanwhile = |k: &mut Builder| self.add_first(k, number, part.stage, group.phase);
            self.second_query_gradients(k, number, part.stage, meanwhile);
        }
        k.set(group.walk.left, group.walk.left - 1);
        if next.stage == 0 {
            k.set(group.phase, group.phase ^ 1);
        }
    }

    /// `dS = P * (dP - delta)`, in the place of `dP`, with the weights that were handed over.
    fn score_gradients(&self, k: &mut Builder, part: Part) {
        let products = self.registers.scores.registers();
        let row_sums = self.group.statistics(k, Statistic::RowSum, part);
        for (index, pair) in products.chunks_exact(2).enumerate() {
            let at = row_sums + Accumulator::column_of(2 * index) * 4;
            let row_sums = k.load_vector::<F32, _, 2>(at, LoadHint::default());
            for side in 0..2 {
                k.set(pair[side], pair[side] + row_sums[side]);
            }
        }
        let ready = self.exchange.ready.at(k, 0);
        k.mbarrier_wait(ready, self.parity, Scope::Block);
        let from = self.weights(k);
        for (index, products) in products.chunks_exact(4).enumerate() {
            let at = from + 2048 * index as u32;
            let weights = k.load_vector::<F32, _, 4>(at, LoadHint::default());
            for (product, weight) in products.iter().zip(weights) {
                k.set(*product, *product * weight);
            }
        }
        self.arrive(k, &self.exchange.taken);
        k.set(self.parity, self.parity ^ 1);
    }

    /// Rounds `dS` of the step after `part` into registers for the product with the queries, and
    /// stores it to shared memory for the one with the keys.
    fn store_score_gradients(&self, k: &mut Builder, part: Part, next: Part) {
        let Half { group, registers: Registers { scores, operand, .. }, .. } = self;
        operand.round(k, scores.registers());
        // The other warpgroup has multiplied what was there.
        let multiplied = self.exchange.multiplied.at(k, next.stage);
        let phase = group.phase(next.stage < part.stage);
        k.mbarrier_wait(multiplied, phase ^ 1, Scope::Block);
        let tile = group.shared.score_gradients.at(k, next.stage);
        // Found again, rather than kept.
        let thread = k.thread_index();
        operand.store(k, &tile, thread / 32 % 4);
        group.written(k, next.stage);
    }
}
