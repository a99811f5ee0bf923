//! A consumer warpgroup: its share of shared memory, its end of the pipelines, the products `Q K^T`
//! and `P V`, and its turn at the tensor cores (ping-pong). What ends a phase of the loop stamps it
//! ([`Probe`]).

use ptx::{
    Accumulate, Accumulator, Builder, Consumer, Expression, Fence, Fragment, InFlight, MatrixA,
    Pred, PreparedProduct, Reg, Select, SharedTile, U32, Value,
};

use super::consumer::Consumers;
use super::probe::{Phase, Probe};
use super::{Forward, Shared, barrier};
use crate::product::Source;

/// The indices and pipeline states of one consumer warpgroup.
pub(super) struct Warpgroup<'a> {
    shared: &'a Shared,
    /// The index of this warpgroup among the consumer warpgroups.
    pub(super) index: Reg<U32>,
    /// The thread's index in the warpgroup.
    pub(super) thread: Reg<U32>,
    warp: Reg<U32>,
    /// True in the lane that releases stages for its warp.
    leader: Reg<Pred>,
    queries: Consumer,
    /// Q as a register operand, if the tensor cores read it from registers.
    query_fragment: Option<Fragment>,
    /// Whether the next tile's queries wait for the only query buffer. This tile's queries are then
    /// released as soon as its last scores have landed, so that the next ones are loaded during the
    /// softmax of the last key block.
    one_query_buffer: bool,
    keys: Consumer,
    values: Consumer,
    ping_pong: PingPong,
    pub(super) probe: Probe,
    /// Whether the operands of products are computed before the turn instead of during it. With
    /// three warpgroups another one is always waiting for the turn, and this gains 1.3 % on an
    /// H200; with two it costs 2 %.
    prepares: bool,
}

impl<'a> Warpgroup<'a> {
    /// Sets up the warpgroup of the calling thread. With `index_from_one_lane`, its index is
    /// broadcast from lane 0: the assembler then knows that it is warp-uniform and keeps the
    /// descriptor addresses of products in uniform registers from the start.
    pub(super) fn new<T>(k: &mut Builder, given: &Consumers<'a, T>) -> Self {
        let Consumers { forward, shared, .. } = *given;
        let thread = k.thread_index();
        let mut index = k.eval(thread / 128 - 1);
        if given.index_from_one_lane {
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
            // Narrower query tiles take little time to load.
            one_query_buffer: forward.query_buffers == 1 && forward.head_dim > 128,
            keys: shared.key_pipeline.consumer(k),
            values: (shared.transposed.as_ref())
                .map_or(&shared.value_pipeline, |transposed| &transposed.pipeline)
                .consumer(k),
            ping_pong: PingPong::new(k, forward, index),
            probe: Probe::new(k, given.probe, forward.warpgroups, index, thread),
            prepares: forward.warpgroups == 3,
        }
    }

    /// Waits for the tile's queries. If they are multiplied from registers, loads them there and
    /// releases their buffer at once.
    pub(super) fn take_queries(&self, k: &mut Builder) {
        self.queries.wait(k);
        if let Some(fragment) = &self.query_fragment {
            let tile = self.query_rows(k);
            fragment.load_into(k, &tile, self.warp);
            // Orders these generic-proxy reads before the next TMA write to the buffer.
            k.fence(Fence::ProxyAsyncShared);
            self.queries.release(k, self.leader);
        }
        self.probe.stamp(k, Phase::Queries);
    }

    /// Releases the tile's queries after its last scores.
    pub(super) fn release_queries(&self, k: &mut Builder) {
        if self.query_fragment.is_none() {
            self.queries.release(k, self.leader);
        }
    }

    /// Releases the tile's queries as soon as scores have landed, if they are the tile's last
    /// scores and queries have one buffer ([`one_query_buffer`](Warpgroup::one_query_buffer)).
    pub(super) fn release_queries_early(&self, k: &mut Builder, last: Value<Pred>) {
        if self.one_query_buffer && self.query_fragment.is_none() {
            k.if_(last, |k| self.release_queries(k));
        }
    }

    /// Releases the tile's queries after its last step, unless
    /// [`release_queries_early`](Warpgroup::release_queries_early) has done so.
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
        self.probe.stamp(k, Phase::WaitForKeys);
    }

    /// Releases the keys, when the scores have landed.
    pub(super) fn release_keys(&self, k: &mut Builder) {
        self.keys.release(k, self.leader);
        self.probe.stamp(k, Phase::Scores);
    }

    pub(super) fn wait_for_values(&self, k: &mut Builder) {
        self.values.wait(k);
    }

    /// Releases the values, when the update of the output has landed.
    pub(super) fn release_values(&self, k: &mut Builder) {
        self.values.release(k, self.leader);
        self.probe.stamp(k, Phase::Update);
    }

    /// Waits for and releases the keys of a key block without using them.
    pub(super) fn skip_keys(&self, k: &mut Builder) {
        skip(k, &self.keys, self.leader);
    }

    /// Waits for and releases the values of a key block without using them.
    pub(super) fn skip_values(&self, k: &mut Builder) {
        skip(k, &self.values, self.leader);
    }

    /// Waits for this warpgroup's turn at the tensor cores.
    pub(super) fn take_turn(&self, k: &mut Builder) {
        self.ping_pong.take(k);
        self.probe.stamp(k, Phase::Turn);
    }

    /// Passes the turn on to the next warpgroup.
    pub(super) fn pass_turn(&self, k: &mut Builder) {
        self.ping_pong.pass(k);
    }

    /// Waits for this warpgroup's turn and passes it on without issuing products.
    pub(super) fn skip_turn(&self, k: &mut Builder) {
        self.ping_pong.take(k);
        self.ping_pong.pass(k);
    }

    /// Returns the operands of `Q K^T` for the current stage of keys.
    fn score_operands(&self, k: &mut Builder) -> (MatrixA, ptx::Matrix) {
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

    /// Prepares `Q K^T` and `O += P V` for the stages that are waited for next, where that pays
    /// ([`prepares`](Warpgroup::prepares)).
    pub(super) fn prepare(&self, k: &mut Builder, p: &Fragment) -> Option<[PreparedProduct; 2]> {
        self.prepares.then(|| {
            let (queries, keys) = self.score_operands(k);
            let values = self.value_operand(k);
            [k.prepare_product(queries, keys), k.prepare_product(p, values)]
        })
    }

    /// Returns V of the current stage of values, as the second operand of `P V`.
    fn value_operand(&self, k: &mut Builder) -> ptx::Matrix {
        self.shared.values.at(k, self.values.stage()).matrix()
    }

    /// Returns `count` columns of V from `first` on, read from the current stage of transposed
    /// values; `None` with 16-bit inputs.
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

    /// Starts `O += P V`, or `O = P V`, as `accumulate` says.
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

/// Releases a stage without using it. Waits until the stage is full: by then all consumers have
/// released its previous contents, so this arrival cannot complete the previous phase in place of
/// theirs.
fn skip(k: &mut Builder, stages: &Consumer, leader: Reg<Pred>) {
    stages.wait(k);
    stages.release(k, leader);
}

/// Turns at the tensor cores: each warpgroup has a named barrier at which it waits and at which the
/// warpgroup before it arrives.
struct PingPong {
    /// The barriers of this warpgroup and of the next one; `None` where there are no turns.
    mine: Option<(Reg<U32>, Reg<U32>)>,
}

impl PingPong {
    fn new(k: &mut Builder, forward: &Forward, index: Reg<U32>) -> Self {
        if !forward.ping_pong || forward.warpgroups == 1 {
            return PingPong { mine: None };
        }
        let last = k.eval(index.equals(forward.warpgroups - 1));
        let own = k.eval(index + barrier::TURN);
        let next = k.eval(last.select::<U32>(barrier::TURN, index + (barrier::TURN + 1)));
        // Gives the first turn to the first warpgroup.
        k.if_(last, |k| k.barrier_arrive(barrier::TURN, 256));
        PingPong { mine: Some((own, next)) }
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
