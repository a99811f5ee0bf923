//! The consumers' loop: key blocks of a tile, tiles of a block.

use ptx::{Accumulate, Accumulator, Builder, Expression, F32, Fragment, Pred, Reg, U32};

use super::epilogue::{Epilogue, Output};
use super::mask::Mask;
use super::schedule::{Current, Schedule};
use super::softmax::Softmax;
use super::warpgroup::Warpgroup;
use super::{Forward, Shared};

/// What the loop carries from step to step.
struct State<'a> {
    group: Warpgroup<'a>,
    mask: Mask,
    softmax: Softmax,
    output: Accumulator,
    /// False until a tile's first product has been added to the output.
    output_begun: Reg<Pred>,
    current: Current,
    /// The block whose scores are being computed.
    block: Reg<U32>,
}

/// One warpgroup's work: 64 query rows of each of the block's tiles.
pub(super) fn consume(
    k: &mut Builder,
    forward: &Forward,
    shared: &Shared,
    schedule: &Schedule,
    scale_log2: Reg<F32>,
    epilogue: &Epilogue,
) {
    let group = Warpgroup::new(k, forward, shared);
    let room = Output::new(k, shared, &group);
    // The probabilities of one block and of the next: they change places.
    let even = Fragment::new(k, forward.element, forward.key_block);
    let odd = Fragment::new(k, forward.element, forward.key_block);

    let tile = schedule.first_tile(k);
    let mut state = State {
        mask: Mask::new(k, forward, schedule, &group),
        group,
        softmax: Softmax::new(k, forward.element, scale_log2),
        output: Accumulator::new(k, forward.value_head_dim),
        output_begun: k.register(),
        current: schedule.current(k, &tile),
        block: k.variable(tile.blocks - 1),
    };
    let block = state.block;
    k.if_(schedule.has_tile(&tile), |k| {
        state.group.take_queries(k);
        state.group.wait_for_keys(k);
        let scores = state.group.start_scores(k).wait(k);
        state.group.release_keys(k);
        state.first_block(k, &scores, &even);

        k.loop_(|k| {
            k.loop_(|k| {
                k.break_if(block.equals(0));
                state.step(k, &even, &odd);
                let last = k.eval(block.equals(0));
                k.if_(last, |k| even.set(k, &odd));
                k.break_if(last);
                state.step(k, &odd, &even);
            });
            state.group.release_queries(k);
            schedule.next_tile(k, &tile);
            k.break_if(!schedule.has_tile(&tile));

            // The next tile's first scores are computed while this tile is stored.
            let State { group, output, softmax, current, output_begun, .. } = &mut state;
            let accumulate = Accumulate::If(output_begun.register());
            group.wait_for_values(k);
            group.turns.take(k);
            let update = group.start_update(k, output, accumulate, &even);
            group.take_queries(k);
            group.wait_for_keys(k);
            let scores = group.start_scores(k);
            group.turns.pass(k);
            let landed = update.wait(k);
            group.release_values(k);
            epilogue.store(k, &room, softmax, landed, current);
            let scores = scores.wait(k);
            group.release_keys(k);
            current.take(k, &tile);
            k.set(block, tile.blocks - 1);
            state.first_block(k, &scores, &even);
        });

        let State { group, output, softmax, current, output_begun, .. } = &mut state;
        let accumulate = Accumulate::If(output_begun.register());
        group.wait_for_values(k);
        let landed = group.start_update(k, output, accumulate, &even).wait(k);
        group.release_values(k);
        epilogue.store(k, &room, softmax, landed, current);
        room.drain(k);
    });
}

impl State<'_> {
    /// A tile's first block: there is no output yet to be kept or rescaled.
    fn first_block(&mut self, k: &mut Builder, scores: &Accumulator, p: &Fragment) {
        self.mask.apply(k, &self.current, self.block, scores);
        self.softmax.first_block(k, scores, p);
        k.set(self.output_begun, false);
    }

    /// One key block: the scores of this one while the output takes the last.
    /// `before` are the probabilities of the block before, `p` those of this one.
    fn step(&mut self, k: &mut Builder, before: &Fragment, p: &Fragment) {
        let State { group, output, output_begun, .. } = self;
        let accumulate = Accumulate::If(output_begun.register());
        group.wait_for_keys(k);
        group.turns.take(k);
        let scores = group.start_scores(k);
        group.wait_for_values(k);
        let update = group.start_update(k, output, accumulate, before);
        group.turns.pass(k);
        let scores = scores.wait(k);
        group.release_keys(k);
        k.set(*output_begun, true);
        k.set(self.block, self.block - 1);
        self.mask.apply(k, &self.current, self.block, &scores);
        let rescale = self.softmax.block(k, &scores, p);
        let landed = update.wait(k);
        group.release_values(k);
        rescale.apply(k, landed);
    }
}
