//! A consumer warpgroup: its part of shared memory, its pipelines and its turn.

use ptx::{
    Accumulate, Accumulator, Builder, Choose, Consumer, Expression, Fence, Fragment, InFlight,
    MatrixA, Pred, Prepared, Reg, SharedTile, U32, Value,
};

use super::{Forward, Shared, barrier};
use crate::product::Source;

/// What one warpgroup holds.
pub(super) struct Warpgroup<'a> {
    shared: &'a Shared,
    /// Which of the consumer warpgroups it is.
    pub(super) index: Reg<U32>,
    /// The thread's index in the warpgroup.
    pub(super) thread: Reg<U32>,
    warp: Reg<U32>,
    /// True in the lane that gives stages back for its warp.
    leader: Reg<Pred>,
    queries: Consumer,
    /// The queries in registers, if they are taken from there.
    query_fragment: Option<Fragment>,
    /// Whether the next tile's queries have no room of their own: then this tile's are given back
    /// as soon as its last scores have landed, and come while its last block is weighed.
    one_query_buffer: bool,
    keys: Consumer,
    values: Consumer,
    pub(super) ping_pong: PingPong,
    /// Whether somebody is always waiting for the turn: then nothing is computed in it that can be
    /// before, which is worth 1.3 % with three warpgroups on an H200, and costs 2 % with two.
    prepares: bool,
}

impl<'a> Warpgroup<'a> {
    /// With an index from one lane the assembler knows that it is the same in all of a warp, and has
    /// the addresses of products in uniform registers from the start.
    pub(super) fn new(
        k: &mut Builder,
        forward: &Forward,
        shared: &'a Shared,
        index_from_one_lane: bool,
    ) -> Self {
        let thread = k.thread_index();
        let mut index = k.eval(thread / 128 - 1);
        if index_from_one_lane {
            index = k.shuffle_index(index, 0);
        }
        let thread = k.eval(thread % 128);
        let lane = k.lane();
        Warpgroup {
            shared,
            index,
            thread,
            warp: k.eval(thread / 32),
            leader: k.eval(lane.equals(0)),
            queries: shared.query_pipeline.consumer(k),
            query_fragment: (forward.query_source == Source::Registers)
                .then(|| Fragment::new(k, forward.element, forward.query_layout().columns)),
            // Narrow ones come in no time.
            one_query_buffer: forward.query_buffers == 1 && forward.head_dim > 128,
            keys: shared.key_pipeline.consumer(k),
            values: (shared.transposed.as_ref())
                .map_or(&shared.value_pipeline, |transposed| &transposed.pipeline)
                .consumer(k),
            ping_pong: PingPong::new(k, forward, index),
            prepares: forward.warpgroups == 3,
        }
    }

    /// Waits for the tile's queries; into registers, they are loaded and their
    /// room given back at once.
    pub(super) fn take_queries(&self, k: &mut Builder) {
        self.queries.wait(k);
        if let Some(fragment) = &self.query_fragment {
            let tile = self.query_rows(k);
            fragment.load_into(k, &tile, self.warp);
            // Ordinary reads come before what the copy engine writes next.
            k.fence(Fence::ProxyAsyncShared);
            self.queries.release(k, self.leader);
        }
    }

    /// Gives the tile's queries back after its last scores.
    pub(super) fn release_queries(&self, k: &mut Builder) {
        if self.query_fragment.is_none() {
            self.queries.release(k, self.leader);
        }
    }

    /// The same where scores have landed, if they were the tile's last and there is one buffer.
    pub(super) fn release_queries_early(&self, k: &mut Builder, last: Value<Pred>) {
        if self.one_query_buffer && self.query_fragment.is_none() {
            k.if_(last, |k| self.release_queries(k));
        }
    }

    /// The same behind a tile's last step, if they have not been given back before.
    pub(super) fn release_queries_late(&self, k: &mut Builder) {
        if !self.one_query_buffer {
            self.release_queries(k);
        }
    }

    fn query_rows(&self, k: &mut Builder) -> SharedTile {
        let queries = self.shared.queries.at(k, self.queries.stage());
        queries.rows(k, self.index * 64, 64)
    }

    pub(super) fn wait_for_keys(&self, k: &mut Builder) {
        self.keys.wait(k);
    }

    pub(super) fn release_keys(&self, k: &mut Builder) {
        self.keys.release(k, self.leader);
    }

    pub(super) fn wait_for_values(&self, k: &mut Builder) {
        self.values.wait(k);
    }

    pub(super) fn release_values(&self, k: &mut Builder) {
        self.values.release(k, self.leader);
    }

    /// Passes over the keys of a block.
    pub(super) fn pass_over_keys(&self, k: &mut Builder) {
        pass_over(k, &self.keys, self.leader);
    }

    /// Passes over the values of a block.
    pub(super) fn pass_over_values(&self, k: &mut Builder) {
        pass_over(k, &self.values, self.leader);
    }

    /// The operands of `Q K^T` for the stage of keys last waited for.
    pub(super) fn score_operands(&self, k: &mut Builder) -> (MatrixA, ptx::Matrix) {
        let queries = match &self.query_fragment {
            Some(fragment) => fragment.into(),
            None => self.query_rows(k).matrix().into(),
        };
        let keys = self.shared.keys.at(k, self.keys.stage());
        (queries, keys.transposed())
    }

    /// Starts `Q K^T`.
    pub(super) fn start_scores(&self, k: &mut Builder) -> InFlight<Accumulator> {
        let (queries, keys) = self.score_operands(k);
        k.wgmma(queries, keys)
    }

    /// Prepares `Q K^T` and `O += P V` of the stages that are waited for next, where that pays.
    pub(super) fn prepare(&self, k: &mut Builder, p: &Fragment) -> Option<[Prepared; 2]> {
        self.prepares.then(|| {
            let (queries, keys) = self.score_operands(k);
            let values = self.value_operand(k);
            [k.prepare_product(queries, keys), k.prepare_product(p, values)]
        })
    }

    /// The values of the stage last waited for.
    pub(super) fn value_operand(&self, k: &mut Builder) -> ptx::Matrix {
        self.shared.values.at(k, self.values.stage()).matrix()
    }

    /// Columns of the transposed values of the stage last waited for, from one on.
    pub(super) fn transposed_operand(
        &self,
        k: &mut Builder,
        first: u32,
        count: u32,
    ) -> Option<ptx::Matrix> {
        let transposed = self.shared.transposed.as_ref()?;
        let values = transposed.tiles.at(k, self.values.stage());
        Some(values.rows(k, first, count).transposed())
    }

    /// Starts `O += P V`, or `O = P V`.
    pub(super) fn start_update<'o>(
        &self,
        k: &mut Builder,
        output: &'o mut Accumulator,
        accumulate: Accumulate,
        p: &Fragment,
    ) -> InFlight<&'o mut Accumulator> {
        let values = self.value_operand(k);
        k.wgmma_into(output, accumulate, p, values)
    }
}

/// Gives back a stage that is not used. Not before it is full: then others have given back what was in it before, and
/// this arrival does not count for that.
fn pass_over(k: &mut Builder, stages: &Consumer, leader: Reg<Pred>) {
    stages.wait(k);
    stages.release(k, leader);
}

/// PingPong at the tensor cores: a named barrier for each warpgroup, at which it
/// waits and the one before it arrives.
pub(super) struct PingPong {
    mine: Option<(Reg<U32>, Reg<U32>)>,
}

impl PingPong {
    fn new(k: &mut Builder, forward: &Forward, index: Reg<U32>) -> Self {
        if !forward.ping_pong || forward.warpgroups == 1 {
            return PingPong { mine: None };
        }
        let last = k.eval(index.equals(forward.warpgroups - 1));
        let own = k.eval(index + barrier::TURN);
        let next = k.eval(last.choose::<U32>(barrier::TURN, index + (barrier::TURN + 1)));
        // The first turn is the first warpgroup's.
        k.if_(last, |k| k.barrier_arrive(barrier::TURN, 256));
        PingPong { mine: Some((own, next)) }
    }

    pub(super) fn take(&self, k: &mut Builder) {
        if let Some((own, _)) = self.mine {
            k.barrier_sync(own, 256);
        }
    }

    /// A turn that is not used.
    pub(super) fn pass_over(&self, k: &mut Builder) {
        self.take(k);
        self.pass(k);
    }

    pub(super) fn pass(&self, k: &mut Builder) {
        if let Some((_, next)) = self.mine {
            k.barrier_arrive(next, 256);
        }
    }
}
