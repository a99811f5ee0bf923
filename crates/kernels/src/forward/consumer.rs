//! The consumers' main loop: over the tiles of a thread block and, inside a tile, over its key
//! blocks from the last to the first.
//!
//! Each step starts `S = Q K^T` of one key block together with `O += P V` of the previous block,
//! and takes the softmax of S while the update of O still runs. The outline is in the module head
//! of `forward`; 8-bit inputs have their own loop in `fp8`.

use ptx::{Accumulate, Accumulator, Builder, Expression, Fragment, GlobalAddress, Pred, Reg, U32};

use super::epilogue::{Epilogue, Results};
use super::probe::Phase;
use super::rule::{Rule, Step};
use super::scheduler::ConsumerScheduler;
use super::softmax::Softmax;
use super::warpgroup::Warpgroup;
use super::{Form, Forward, Shared, fp8};
use crate::attention::Score;
use crate::attention::function::lower::Functions;
use crate::attention::scores::ScoreRule;

/// The state that one consumer warpgroup carries through the main loop.
struct State<'a, T: ConsumerScheduler> {
    form: Form,
    tiles: &'a T,
    group: Warpgroup<'a>,
    rule: Rule,
    softmax: Softmax,
    epilogue: Epilogue,
    output: Accumulator,
    /// False until the tile's first `P V` has been started: that one overwrites `output`, later
    /// ones accumulate.
    output_begun: Reg<Pred>,
    current: T::Current,
    /// The key block whose scores are being computed, as its place in the tile's walk.
    block: Reg<U32>,
}

/// Everything the consumer warpgroups of a thread block are given.
pub(super) struct Consumers<'a, T> {
    pub(super) forward: &'a Forward,
    pub(super) shared: &'a Shared,
    pub(super) tiles: &'a T,
    pub(super) scores: ScoreRule,
    pub(super) functions: Functions,
    pub(super) results: Results,
    pub(super) probe: Option<Reg<GlobalAddress>>,
    /// See [`Warpgroup::new`].
    pub(super) index_from_one_lane: bool,
}

/// Emits the code of a consumer warpgroup: 64 query rows of each of the thread block's tiles.
pub(super) fn consume<T: ConsumerScheduler>(k: &mut Builder, given: Consumers<'_, T>) {
    if given.forward.is_fp8() {
        return fp8::consume(k, given);
    }
    let group = Warpgroup::new(k, &given);
    let Consumers { forward, shared, tiles, scores, functions, results, .. } = given;
    let epilogue = Epilogue::new(k, results, shared, &group);
    // P of one key block and of the next; the two fragments swap roles.
    let even = Fragment::new(k, forward.element, forward.key_block);
    let odd = Fragment::new(k, forward.element, forward.key_block);

    let tile = tiles.first_tile(k);
    tiles.narrow(k, &tile, group.index);
    let mut state = State {
        form: forward.form,
        tiles,
        rule: Rule::new(k, forward, &group, scores, functions),
        group,
        softmax: Softmax::new(k, forward, &scores),
        epilogue,
        output: Accumulator::new(k, forward.value_head_dim),
        output_begun: k.register(),
        current: tiles.hold(k, &tile),
        block: k.variable(tiles.last_block(&tile)),
    };
    k.if_(tiles.has_tile(&tile), |k| {
        state.group.probe.stamp(k, Phase::Begin);
        let p = [&even, &odd];
        if forward.form.overlap_tiles {
            state.tiles_overlapped(k, &tile, p);
        } else {
            state.tiles_one_by_one(k, &tile, p);
        }
        state.epilogue.staging.drain(k);
    });
}

impl<T: ConsumerScheduler> State<'_, T> {
    /// Processes the tiles as [`Form::overlap_tiles`] says: the next tile's first scores are
    /// computed while the current tile is normalised and stored.
    fn tiles_overlapped(&mut self, k: &mut Builder, tile: &T::Tile, [even, odd]: [&Fragment; 2]) {
        let block = self.block;
        self.begin(k, even);
        k.loop_(|k| {
            self.steps(k, [even, odd]);
            self.group.release_queries_late(k);
            self.tiles.next_tile(k, tile);
            k.break_if(!self.tiles.has_tile(tile));
            self.tiles.narrow(k, tile, self.group.index);

            let State { tiles, group, epilogue, output, softmax, current, output_begun, .. } = self;
            let accumulate = Accumulate::If(output_begun.register());
            group.wait_for_values(k);
            group.take_turn(k);
            let update = group.start_update(k, output, accumulate, even);
            group.take_queries(k);
            if let Some(whole) = tiles.whole_walk(k, tiles.registers(tile)) {
                k.if_(whole.last.differs(tiles.last_block(tile)), |k| group.skip_keys(k));
            }
            group.wait_for_keys(k);
            let scores = group.start_scores(k);
            group.pass_turn(k);
            let landed = update.wait(k);
            group.release_values(k);
            skip_last_values(k, *tiles, current, group, block);
            // Only a thread block's last tile adds the partial tiles of others (stream-K), and
            // another tile follows this one.
            epilogue.finish(k, (*tiles, current), softmax, landed, false);
            group.probe.stamp(k, Phase::Epilogue);
            let scores = scores.wait(k);
            group.release_keys(k);
            tiles.take(k, current, tile);
            k.set(block, tiles.last_block(tile));
            self.first_block(k, &scores, even);
        });
        self.end(k, even);
    }

    /// Processes the tiles one after the other: the same arithmetic in the same order as
    /// [`tiles_overlapped`](State::tiles_overlapped), with one copy of each part of the code.
    fn tiles_one_by_one(&mut self, k: &mut Builder, tile: &T::Tile, [p, next]: [&Fragment; 2]) {
        let block = self.block;
        k.loop_(|k| {
            self.begin(k, p);
            self.steps(k, [p, next]);
            self.group.release_queries_late(k);
            self.end(k, p);
            self.tiles.next_tile(k, tile);
            self.tiles.narrow(k, tile, self.group.index);
            self.tiles.take(k, &self.current, tile);
            k.set(block, self.tiles.last_block(tile));
            k.break_if(!self.tiles.has_tile(tile));
        });
    }

    /// Processes all key blocks of a tile after the one that is walked first. P of the last one
    /// ends up in `even`.
    fn steps(&mut self, k: &mut Builder, [even, odd]: [&Fragment; 2]) {
        let (block, two_steps) = (self.block, self.form.two_steps);
        k.loop_(|k| {
            k.break_if(self.tiles.is_first_block(&self.current, block));
            self.step(k, even, odd);
            if two_steps {
                let last = k.eval(self.tiles.is_first_block(&self.current, block));
                k.if_(last, |k| even.set(k, odd));
                k.break_if(last);
                self.step(k, odd, even);
            } else {
                even.set(k, odd);
            }
        });
        let State { tiles, group, current, .. } = self;
        if let Some(first) = tiles.whole_walk(k, current).and_then(|whole| whole.first) {
            k.if_(first.differs(block), |k| {
                group.skip_keys(k);
                group.skip_turn(k);
            });
        }
    }

    /// Computes the scores and the softmax of the key block that a tile walks first, with no other
    /// product in flight.
    fn begin(&mut self, k: &mut Builder, p: &Fragment) {
        self.group.take_queries(k);
        if let Some(whole) = self.tiles.whole_walk(k, &self.current) {
            k.if_(whole.last.differs(self.block), |k| self.group.skip_keys(k));
        }
        self.group.wait_for_keys(k);
        let scores = self.group.start_scores(k).wait(k);
        self.group.release_keys(k);
        self.first_block(k, &scores, p);
    }

    /// Computes a tile's last `O += P V`, with no other product in flight, and stores the tile.
    fn end(&mut self, k: &mut Builder, p: &Fragment) {
        let State { tiles, group, epilogue, output, softmax, current, output_begun, .. } = self;
        let accumulate = Accumulate::If(output_begun.register());
        group.wait_for_values(k);
        let landed = group.start_update(k, output, accumulate, p).wait(k);
        group.release_values(k);
        skip_last_values(k, *tiles, current, group, self.block);
        epilogue.finish(k, (*tiles, current), softmax, landed, true);
        group.probe.stamp(k, Phase::Epilogue);
    }

    /// Applies rule and softmax to the scores of the key block that a tile walks first, where there
    /// is no output yet to rescale.
    fn first_block(&mut self, k: &mut Builder, scores: &Accumulator, p: &Fragment) {
        let scores = Score::of(scores);
        let last = self.tiles.is_first_block(&self.current, self.block);
        self.group.release_queries_early(k, last);
        let entry = self.tiles.entry(k, &self.current, || self.block.into());
        let at = (self.block, entry);
        self.rule.apply(k, self.tiles, &self.current, at, Step::First, &scores);
        self.softmax.first_block(k, &scores, p);
        self.group.probe.stamp(k, Phase::Softmax);
        k.set(self.output_begun, false);
        if let Some(whole) = self.tiles.whole_walk(k, &self.current) {
            k.if_(whole.last.differs(self.block), |k| {
                self.group.skip_turn(k);
                self.group.skip_values(k);
            });
        }
    }

    /// Processes one key block: starts its scores and `O += P V` of the previous block together,
    /// and takes the softmax of the scores while the update runs. `before` holds P of the previous
    /// block, `p` receives P of this one.
    fn step(&mut self, k: &mut Builder, before: &Fragment, p: &Fragment) {
        let State { group, output, output_begun, .. } = self;
        let accumulate = Accumulate::If(output_begun.register());
        // Loaded this early so that the products hide the latency.
        let entry = self.tiles.entry(k, &self.current, || self.block - 1);
        let prepared = group.prepare(k, before);
        group.wait_for_keys(k);
        group.take_turn(k);
        let (scores, update) = match &prepared {
            Some([scores, update]) => {
                let scores = k.wgmma_prepared(scores);
                group.wait_for_values(k);
                (scores, k.wgmma_prepared_into(output, accumulate, update))
            }
            None => {
                let scores = group.start_scores(k);
                group.wait_for_values(k);
                (scores, group.start_update(k, output, accumulate, before))
            }
        };
        group.pass_turn(k);
        let scores = Score::of(&scores.wait(k));
        group.release_keys(k);
        k.set(*output_begun, true);
        k.set(self.block, self.block - 1);
        group.release_queries_early(k, self.tiles.is_first_block(&self.current, self.block));
        let State { tiles, rule, softmax, current, .. } = self;
        let at = (self.block, entry);
        let apply = |k: &mut Builder| rule.apply(k, *tiles, current, at, Step::Later, &scores);
        let rescale = match rule.capped_exponents(k, *tiles, current, at, &scores) {
            Some(exponents) => softmax.capped_block(k, &scores, p, &exponents, apply),
            None => {
                apply(k);
                softmax.block(k, &scores, p)
            }
        };
        group.probe.stamp(k, Phase::Softmax);
        let landed = update.wait(k);
        group.release_values(k);
        rescale.apply(k, landed);
    }
}

/// Skips the values of the tile's first key block where the warpgroup's walk ended before it.
/// This must come before the tile is stored: the named barriers of the store order the reads of the
/// work slot here before the slot is given back.
fn skip_last_values<T: ConsumerScheduler>(
    k: &mut Builder,
    tiles: &T,
    current: &T::Current,
    group: &Warpgroup<'_>,
    block: Reg<U32>,
) {
    if let Some(first) = tiles.whole_walk(k, current).and_then(|whole| whole.first) {
        k.if_(first.differs(block), |k| group.skip_values(k));
    }
}
