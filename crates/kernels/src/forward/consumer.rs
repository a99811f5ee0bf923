//! The consumers: warpgroups that multiply and take exponentials.

use ptx::{
    Accumulate, Accumulator, Builder, Choose, Consumer, Expression, F32, Fragment, InFlight, Pred,
    Reg, U32,
};

use super::epilogue::{Epilogue, Output};
use super::mask::Mask;
use super::schedule::{Schedule, Tile};
use super::softmax::Softmax;
use super::{Forward, Shared, barrier};

/// What one warpgroup holds.
struct Warpgroup<'a> {
    shared: &'a Shared,
    /// Which of the consumer warpgroups it is.
    index: Reg<U32>,
    /// True in the lane that gives stages back for its warp.
    speaks: Reg<Pred>,
    queries: Consumer,
    keys: Consumer,
    values: Consumer,
    turns: Turns,
    /// False until a tile's first product has been added to the output.
    output_begun: Reg<Pred>,
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
    let thread = k.thread_index();
    let index = k.eval(thread / 128 - 1);
    let thread = k.eval(thread % 128);
    let lane = k.lane();
    let group = Warpgroup {
        shared,
        index,
        speaks: k.eval(lane.equals(0)),
        queries: shared.query_pipeline.consumer(k),
        keys: shared.key_pipeline.consumer(k),
        values: shared.value_pipeline.consumer(k),
        turns: Turns::new(k, forward, index),
        output_begun: k.register(),
    };
    let mask = Mask::new(k, forward, schedule, index, thread);
    let mut softmax = Softmax::new(k, forward.element, scale_log2);
    let stored = Output::new(k, shared, index, thread);
    let mut output = Accumulator::new(k, forward.value_head_dim);
    // The probabilities of one block and of the next: they change places.
    let even = Fragment::new(k, forward.element, forward.key_block);
    let odd = Fragment::new(k, forward.element, forward.key_block);

    let tile = schedule.first_tile(k);
    k.if_(schedule.has_tile(&tile), |k| {
        let block = k.variable(tile.blocks - 1);
        let finished = schedule.finished(k, &tile);
        let scores = group.start_scores(k).wait(k);
        group.keys.release(k, group.speaks);
        group.first_block(k, &tile, block, &mask, &mut softmax, &scores, &even);

        k.loop_(|k| {
            k.loop_(|k| {
                k.break_if(block.equals(0));
                group.step(k, &tile, block, &mask, &mut softmax, &mut output, [&even, &odd]);
                let last = k.eval(block.equals(0));
                k.if_(last, |k| even.set(k, &odd));
                k.break_if(last);
                group.step(k, &tile, block, &mask, &mut softmax, &mut output, [&odd, &even]);
            });
            group.queries.release(k, group.speaks);
            finished.take(k, &tile);
            schedule.next_tile(k, &tile);
            k.break_if(!schedule.has_tile(&tile));

            // The next tile's first scores are computed while this tile is stored.
            k.set(block, tile.blocks - 1);
            group.wait_for_values(k);
            group.turns.take(k);
            let update = group.start_update(k, &mut output, &even);
            let scores = group.start_scores(k);
            group.turns.pass(k);
            let landed = update.wait(k);
            group.values.release(k, group.speaks);
            epilogue.store(k, &stored, &softmax, landed, &finished);
            let scores = scores.wait(k);
            group.keys.release(k, group.speaks);
            group.first_block(k, &tile, block, &mask, &mut softmax, &scores, &even);
        });

        group.wait_for_values(k);
        let landed = group.start_update(k, &mut output, &even).wait(k);
        group.values.release(k, group.speaks);
        epilogue.store(k, &stored, &softmax, landed, &finished);
        stored.drain(k);
    });
}

impl Warpgroup<'_> {
    /// One key block: the scores of this one while the output takes the last.
    /// `p` are the probabilities of the block before and of this one.
    #[allow(clippy::too_many_arguments)] // the loop's state, each part by its name
    fn step(
        &self,
        k: &mut Builder,
        tile: &Tile,
        block: Reg<U32>,
        mask: &Mask,
        softmax: &mut Softmax,
        output: &mut Accumulator,
        p: [&Fragment; 2],
    ) {
        let stage = self.keys.wait(k);
        self.turns.take(k);
        let scores = self.start_scores_of(k, stage);
        self.wait_for_values(k);
        let update = self.start_update(k, output, p[0]);
        self.turns.pass(k);
        let scores = scores.wait(k);
        self.keys.release(k, self.speaks);
        k.set(block, block - 1);
        mask.apply(k, tile, block, &scores);
        let rescale = softmax.block(k, &scores, p[1]);
        let landed = update.wait(k);
        self.values.release(k, self.speaks);
        rescale.apply(k, landed);
    }

    /// A tile's first block: there is no output yet to be kept or rescaled.
    #[allow(clippy::too_many_arguments)] // the loop's state, each part by its name
    fn first_block(
        &self,
        k: &mut Builder,
        tile: &Tile,
        block: Reg<U32>,
        mask: &Mask,
        softmax: &mut Softmax,
        scores: &Accumulator,
        p: &Fragment,
    ) {
        mask.apply(k, tile, block, scores);
        softmax.first_block(k, scores, p);
        k.set(self.output_begun, false);
    }

    /// Waits for queries and keys and starts `Q K^T`.
    fn start_scores(&self, k: &mut Builder) -> InFlight<Accumulator> {
        self.queries.wait(k);
        let stage = self.keys.wait(k);
        self.start_scores_of(k, stage)
    }

    fn start_scores_of(&self, k: &mut Builder, key_stage: Reg<U32>) -> InFlight<Accumulator> {
        let queries = self.shared.queries.at(k, self.queries.stage());
        let queries = queries.rows(k, self.index * 64, 64);
        let keys = self.shared.keys.at(k, key_stage);
        k.wgmma(queries.matrix(), keys.transposed())
    }

    fn wait_for_values(&self, k: &mut Builder) {
        self.values.wait(k);
    }

    /// Starts `O += P V`, or `O = P V` for a tile's first product.
    fn start_update<'o>(
        &self,
        k: &mut Builder,
        output: &'o mut Accumulator,
        p: &Fragment,
    ) -> InFlight<&'o mut Accumulator> {
        let values = self.shared.values.at(k, self.values.stage());
        let update =
            k.wgmma_into(output, Accumulate::If(self.output_begun.register()), p, values.matrix());
        k.set(self.output_begun, true);
        update
    }
}

/// Turns at the tensor cores: a named barrier for each warpgroup, at which it
/// waits and the one before it arrives.
struct Turns {
    mine: Option<(Reg<U32>, Reg<U32>)>,
}

impl Turns {
    fn new(k: &mut Builder, forward: &Forward, index: Reg<U32>) -> Self {
        if !forward.ping_pong || forward.warpgroups == 1 {
            return Turns { mine: None };
        }
        let last = k.eval(index.equals(forward.warpgroups - 1));
        let own = k.eval(index + barrier::TURN);
        let next = k.eval(last.choose::<U32>(barrier::TURN, index + (barrier::TURN + 1)));
        // The first turn is the first warpgroup's.
        k.if_(last, |k| k.barrier_arrive(barrier::TURN, 256));
        Turns { mine: Some((own, next)) }
    }

    fn take(&self, k: &mut Builder) {
        if let Some((own, _)) = self.mine {
            k.barrier_sync(own, 256);
        }
    }

    fn pass(&self, k: &mut Builder) {
        if let Some((_, next)) = self.mine {
            k.barrier_arrive(next, 256);
        }
    }
}
