//! The loops of the consumer warpgroups for heads wider than 128. Registers do not hold `dK` and
//! `dV` of 64 keys at once, so both warpgroups share the same 64 keys: the "weights" warpgroup
//! computes `S`, `P` and `dV`, the "gradients" warpgroup `dP`, `dS` and `dK`, and each a part of
//! `dQ`.
//!
//! ```text
//! weights:                                      gradients:
//! for each query block i:                       for each query block i:
//!     start S of i + 1;  start dV += P^T dO         start dP of i + 1;  start dK += dS^T Q
//!     start dQ of i - 1, first part                 start dQ of i, first part
//!     wait for S;  P = exp(S - lse)                 wait for dP;  take P of i + 1
//!     hand P over                                   dS = P * (dP - delta)
//!     wait for all                                  wait for all;  dS to shared memory
//!     start dQ of i - 1, second part                start dQ of i, second part
//!     add the first part, then the second           add the first part, then the second
//! ```
//!
//! Without any further synchronisation the two run a phase apart, so that the products of one
//! overlap with the arithmetic of the other. `P` is handed over in `f32` through shared memory, in
//! the register layout: each thread reads what the same thread of the other warpgroup wrote.

use ptx::{
    Accumulate, Accumulator, Builder, Expression, F32, Fragment, LoadHint, Mbarriers, Reg, Scope,
    Select, SharedAddress, StoreHint, U32, Value,
};

use super::consumer::Consumer;
use super::epilogue::{self, Done};
use super::tile_scheduler::{Tile, TileScheduler};
use super::warpgroup::{NO_STEP, Part, Statistic, Warpgroup};
use super::{Block, PART, ROWS, WARPGROUPS};

/// Bytes of the `P` that is handed over: one 64 x 64 accumulator.
pub(super) const WEIGHTS_BYTES: u32 = 4 * PART * ROWS;

/// Shared memory and barriers between the two warpgroups.
pub(super) struct Exchange {
    /// Byte offset of `P`.
    weights: u32,
    /// Byte offset of the query blocks' workspace indices, one for each stage. The producer writes
    /// them, so that the gradients warpgroup, which needs nothing else of the walk, saves
    /// registers.
    numbers: u32,
    /// Signals that `P` of a step has been written.
    ready: Mbarriers,
    /// Signals that `P` of a step has been read.
    taken: Mbarriers,
    /// Signals, for each stage, that the weights warpgroup has computed `dQ` from the tile of `dS`.
    multiplied: Mbarriers,
    /// Signals that all products of both warpgroups have completed. A named barrier would do, but
    /// the warpgroups arrive from different code, which compute-sanitizer takes for two barriers.
    ended: Mbarriers,
}

impl Exchange {
    pub(super) fn new(k: &mut Builder, stages: u32) -> Self {
        // One lane of each warp arrives for the warp.
        let warps = 4;
        Exchange {
            weights: k.shared("weights", WEIGHTS_BYTES, 16),
            numbers: k.shared("block numbers", 4 * stages, 4),
            ready: Mbarriers::new(k, "weights ready", 1, warps),
            taken: Mbarriers::new(k, "weights taken", 1, warps),
            multiplied: Mbarriers::new(k, "dS multiplied", stages, warps),
            ended: Mbarriers::new(k, "products ended", 1, warps * WARPGROUPS),
        }
    }

    /// Returns the address of the workspace index of the query block in a stage.
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

/// The state of one of the two warpgroups during a tile.
struct Half<'a> {
    group: Warpgroup<'a>,
    exchange: &'a Exchange,
    /// The parity of the step whose `P` is handed over next.
    parity: Reg<U32>,
    /// The 64-column panels of the keys, and so of `dQ`, that this warpgroup multiplies.
    panels: Vec<u32>,
    registers: Registers,
}

/// Accumulators and operand of a loop, beside its `dK` or `dV` accumulator.
struct Registers {
    /// `S^T`, then `P^T`; or `dP^T`, then `dS^T`. In both, the second part of `dQ^T` after that.
    scores: Accumulator,
    /// The first part of `dQ^T`.
    query_gradients: Accumulator,
    /// The 16-bit left operand: `P^T` for `dV`, or `dS^T` for `dK`.
    operand: Fragment,
}

impl Consumer {
    /// Runs the weights warpgroup: `S`, `P` and `dV`.
    pub(super) fn consume_weights(&self, k: &mut Builder, block: &Block<'_>, tile: &Tile) {
        let sums = Accumulator::zeros(k, block.backward.value_layout().columns);
        let half = Half::new(k, block, tile, 0);
        k.if_(half.group.walk.left.greater(0), |k| self.weights_steps(k, &half, &sums));
        half.store(k, block.scheduler, block.value_gradients(&sums, 0));
    }

    /// Runs the gradients warpgroup: `dP`, `dS` and `dK`.
    pub(super) fn consume_gradients(&self, k: &mut Builder, block: &Block<'_>, tile: &Tile) {
        let sums = Accumulator::zeros(k, block.backward.key_layout().columns);
        let half = Half::new(k, block, tile, 1);
        k.if_(half.group.walk.left.greater(0), |k| half.gradients_steps(k, &sums));
        half.store(k, block.scheduler, block.key_gradients(&sums, 0, self.scale));
    }

    fn weights_steps(&self, k: &mut Builder, half: &Half<'_>, sums: &Accumulator) {
        let Half { group, registers, .. } = half;
        let every = Part::every(group.backward);
        group.wait_for_keys(k);
        group.wait_for_queries(k, Part::FIRST, Part::FIRST);
        group.begin(k);
        half.start_scores(k, Part::FIRST);
        k.wait_products(0);
        let differentiated = group.backward.rules.has_score_derivative();
        let Registers { scores, operand, .. } = registers;
        self.exponentials(k, group, Part::FIRST, scores, differentiated.then_some(operand));
        half.hand_over(k, false);
        if !differentiated {
            operand.round(k, scores.registers());
        }
        group.release_queries(k, 0u32);
        k.loop_(|k| {
            // The first step is peeled: it has no previous step whose `dQ` it would compute.
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

    /// Emits one step of the weights warpgroup, whose `P` is ready in the operand. At the last step
    /// of the tile the loop is left at once; `last_weights` does the rest.
    fn weights_step(
        &self,
        k: &mut Builder,
        half: &Half<'_>,
        sums: &Accumulator,
        (part, next): (Part, Part),
        first: bool,
    ) {
        let Half { group, registers: Registers { scores, query_gradients, operand }, .. } = half;
        let differentiated = group.backward.rules.has_score_derivative();
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
        if !differentiated {
            self.exponentials(k, group, next, scores, None);
            group.release_queries(k, next.stage);
            half.hand_over(k, true);
        }
        k.wait_products(u32::from(before.is_some()));
        group.release_output_gradients(k, part.stage);
        if before.is_some() {
            k.wait_products(0);
        }

        if differentiated {
            // Added here already, for the exponentials need its registers.
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
                if !differentiated {
                    half.add_first(k, group.number, before.stage, phase(before));
                }
            });
            half.multiplied(k, before.stage);
        }
        k.set(group.number, group.walk.number);
        group.walk.advance_number(k, group.scheduler, group.tile);
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
            // The weights warpgroup takes an odd panel: it has no `dS` to store.
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

    /// Rounds and stores this warpgroup's `dK` or `dV`.
    fn store(&self, k: &mut Builder, scheduler: &TileScheduler, done: Done<'_>) {
        let tile = scheduler.find(k);
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

    /// Starts `dQ^T = K^T dS^T` of this warpgroup's panel `index`.
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

    /// Adds the first part of `dQ` to the sums; in the deterministic mode, when the step's turn has
    /// come.
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

    /// Returns the workspace index of the query block of the step in `stage`. In the deterministic
    /// mode it is read from shared memory with the turn, which saves keeping `known` in a register.
    fn number_of_turn(&self, k: &mut Builder, known: Reg<U32>, stage: Value<U32>) -> Reg<U32> {
        match &self.group.shared.turns {
            Some(turns) => turns.number(k, stage),
            None => known,
        }
    }

    /// Computes and adds the second part of `dQ`, if there is one, and runs `meanwhile` while the
    /// product is in flight. No product is in flight before or after it.
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

    /// Computes and adds this warpgroup's whole part of `dQ`, with nothing to overlap.
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

    /// Returns where the thread's elements of `P` are handed over.
    fn weights(&self, k: &mut Builder) -> Reg<SharedAddress> {
        let weights = k.shared_address(self.exchange.weights);
        let thread = k.thread_index();
        k.eval(weights + thread % 128 * 16)
    }

    /// Writes `P` for the other warpgroup. With `before`, first waits until the previous step's `P`
    /// has been read.
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

    /// Arrives at a barrier for this warp, once all its lanes have got here.
    fn arrive(&self, k: &mut Builder, barriers: &Mbarriers) {
        k.warp_sync();
        self.lead(k, barriers, 0);
    }

    /// Arrives at a barrier for this warp, without synchronising its lanes first.
    fn lead(&self, k: &mut Builder, barriers: &Mbarriers, stage: u32) {
        let barrier = barriers.at(k, stage);
        k.if_(self.group.leader, |k| k.mbarrier_arrive(barrier));
    }

    /// Signals that this warpgroup no longer needs a tile of `dS`. The lanes need no
    /// synchronisation: only `wgmma` reads the tile, and the warp has waited for it as a whole.
    fn multiplied(&self, k: &mut Builder, stage: u32) {
        self.lead(k, &self.exchange.multiplied, stage);
    }

    /// Emits what the weights loop leaves undone: `dV` of the last step, whose `P` is ready in the
    /// operand, and `dQ` of the last two steps.
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
            let before = k.eval(around.select::<U32>(stages - 1, group.stage - 1));
            let written = group.shared.written.at(k, before);
            let phase = around.select::<U32>(group.phase ^ 1, group.phase);
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

    /// Returns the workspace index of the query block in a stage.
    fn number(&self, k: &mut Builder, stage: impl Into<Value<U32>>) -> Reg<U32> {
        let number = self.exchange.number(k, stage);
        k.load(number)
    }

    /// Emits one step of the gradients warpgroup, whose `dS` is ready in the operand and in shared
    /// memory. At the last step of the tile the loop is left at once.
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

    /// Computes `dS = P * (dP - delta)`, in place of `dP`, with the `P` that was handed over.
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

    /// Rounds `dS` of the step after `part` into the left operand of `dK`, and stores it to shared
    /// memory for `dQ`.
    fn store_score_gradients(&self, k: &mut Builder, part: Part, next: Part) {
        let Half { group, registers: Registers { scores, operand, .. }, .. } = self;
        operand.round(k, scores.registers());
        // Waits until the weights warpgroup has computed `dQ` from what this tile of `dS` held
        // before.
        let multiplied = self.exchange.multiplied.at(k, next.stage);
        let phase = group.phase(next.stage < part.stage);
        k.mbarrier_wait(multiplied, phase ^ 1, Scope::Block);
        let tile = group.shared.score_gradients.at(k, next.stage);
        // Recomputed to save registers.
        let thread = k.thread_index();
        operand.store(k, &tile, thread / 32 % 4);
        group.written(k, next.stage);
    }
}
