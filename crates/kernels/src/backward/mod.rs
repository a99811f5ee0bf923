//! Attention backward on Hopper: the gradients of queries, keys and values.
//!
//! With `P = softmax(S)` known from the log-sum-exps, `dO` given and `delta` the row sums of
//! `dO * O`:
//!
//! ```text
//! dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dK = dS^T Q      dQ = dS K
//! ```
//!
//! Kernels, one after the other:
//!
//! | kernel | what it does |
//! | --- | --- |
//! | [`RowSums`] | `delta` and the log-sum-exps as the next one wants them; zeros for `dQ` |
//! | [`Backward`] | all five products; `dK` and `dV` stay in registers, `dQ` is added up in `f32` |
//! | [`Rounding`] | `dQ` rounded to the tensor |
//! | [`SinkGradients`] | where there are sinks, their gradients |
//!
//! A block of the second takes 128 keys of a key head and walks the query blocks that see them, of
//! all query heads that share the key head, so that `dK` and `dV` are finished where they are
//! added up. Two consumer warpgroups have 64 keys each and compute scores *transposed*: a row of
//! an accumulator is a key, so `P^T` and `dS^T` are in registers what the products for `dV` and
//! `dK` multiply from the left. Only `dS` goes to shared memory, where both warpgroups take it
//! for `dQ`, half of the columns each:
//!
//! ```text
//! S = K Q^T;  P = exp(S - lse)
//! for each query block:
//!     start dP = V dO^T;  start dV += P dO
//!     wait for dP;  dS = P * (dP - delta)           while dV runs
//!     wait for dV
//!     start S = K Q^T of the next block
//!     dS to shared memory                           while S runs
//!     start dQ = K^T dS of the block before;  start dK += dS Q
//!     wait for S;  P = exp(S - lse)                 while dQ and dK run
//!     wait for dQ;  add it to the sums in memory    while dK runs
//!     wait for dK
//! ```
//!
//! `dQ` is a block behind, so that a warpgroup needs what the other one wrote a step ago and the two
//! need not meet. With 64 rows of keys and values in registers there is room for two accumulators of
//! scores and no more: `dP` and `dQ` share one, and a step has two points at which nothing is in
//! flight, for the assembler lets nothing share registers between such points.
//!
//! Heads wider than 128 have 64 keys a block, which both warpgroups share: one has the weights, the
//! other their gradients (`wide`). Dense narrow heads have twice 64 keys a warpgroup, one after the
//! other in a step, so that half as much is added to `dQ`.
//!
//! Blocks may take tile after tile (`persistent`), and tiles that do not fill a last round may be cut
//! into parts (`split`).
//!
//! The sums of `dQ` lie in memory as the accumulators lie in registers
//! ([`SumsLayout`]), so that each warp adds whole lines.
//!
//! Where a mask is a function, walks go by lists of the query blocks that see a block of keys
//! (`lists`): blocks that nobody sees are not loaded.
//!
//! Over ragged batches the same loops run over slices of rows ([`Prefill`](crate::Prefill) says how
//! the copy engine stays inside of them), with tiles in the order of a
//! [`Sequencer`](crate::Sequencer). `ragged` says which tile is whose, `row_blocks` where the rows
//! of a sequence have their place in the workspace.

mod consumer;
mod epilogue;
mod housekeeping;
mod lists;
pub(crate) mod order;
mod pass;
mod persistent;
pub(crate) mod place;
mod producer;
mod ragged;
mod rounding;
pub(crate) mod row_blocks;
mod row_sums;
mod sink_gradients;
mod split;
mod tuned;
mod wide;

pub use pass::{BackwardPass, SumsLayout};
pub use rounding::Rounding;
pub use row_sums::RowSums;
pub use sink_gradients::SinkGradients;
pub use tuned::{
    every_backward, persistent_backward, split_backward, tall_backward, tuned_backward,
};

use ptx::{
    Barriers, Builder, Element, Expression, GlobalAddress, Pipeline, Program, Reg, Role,
    SharedAddress, SharedTiles, Swizzle, Target, TensorMap, TileLayout, U32, Value,
};

use crate::Error;
use crate::attention::scores::ScoreRule;
use crate::attention::{Batch, MaskKind, Rules};
use crate::parameter::{Tensor, Workspace};
use consumer::Consumer;
use housekeeping::Housekeeping;
use lists::Told;
use order::{Rounds, Turns};
use persistent::{Claims, Handover};
use place::{Place, Tile};
use split::{Partials, Split};

/// Keys that a wgmma takes, as rows.
const ROWS: u32 = 64;

/// Queries whose scores are in registers at a time: as many as a panel of shared memory is wide.
const PART: u32 = 64;

/// Consumer warpgroups.
const WARPGROUPS: u32 = 2;

/// What the kernel is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Backward {
    /// The element of all tensors: `F16` or `BF16`.
    pub element: Element,
    /// The width of queries and keys: a multiple of 8 up to 256.
    pub head_dim: u32,
    /// The width of values and outputs: a multiple of 8 up to 256.
    pub value_head_dim: u32,
    /// Which keys a query sees, and what changes scores.
    pub rules: Rules,
    /// Queries in a block: 64, or 128 where the head dimension is 64 or less and a block takes fewer
    /// keys.
    pub query_block: u32,
    /// Whether `dQ` is the same bit for bit from run to run.
    pub deterministic: bool,
    /// How sequences lie: of equal lengths, or ragged.
    pub batch: Batch,
    /// Whether blocks of the grid take tile after tile.
    pub persistent: bool,
    /// Whether tiles that do not fill a last round are cut into parts.
    pub split: bool,
}

/// Named barriers of the block; 0 is for all its threads.
mod barrier {
    /// Both consumer warpgroups, when all products have ended.
    pub(super) const PRODUCTS: u32 = 1;
    /// The threads of one consumer warpgroup, around the storing of its results: one each.
    pub(super) const RESULTS: u32 = 2;
}

/// What two warpgroups have registers for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// Each the gradients of 64 keys and values of its own.
    Square,
    /// Each those of 128, where heads are narrow: what is loaded and added for each product is half
    /// then.
    Tall,
    /// One the gradients of 64 keys and the other those of their values, where heads are wide.
    Wide,
}

/// The shared memory and what signals in it.
struct Shared {
    keys: SharedTiles,
    values: SharedTiles,
    queries: SharedTiles,
    output_gradients: SharedTiles,
    score_gradients: SharedTiles,
    /// The offset of the statistics of the first stage.
    statistics: u32,
    /// Keys, then values.
    loaded: Barriers,
    /// Queries and their statistics.
    query_pipeline: Pipeline,
    output_gradient_pipeline: Pipeline,
    /// A tile of `dS` has been written, by all warps that have a part of it.
    written: Barriers,
    /// Where a mask is a function: which step of its list a stage has.
    told: Option<Told>,
    /// Where `dQ` is added in one order.
    turns: Option<Turns>,
    /// What goes from one warpgroup to the other, where heads are wide.
    exchange: Option<wide::Exchange>,
    /// Where blocks take tile after tile.
    handover: Option<Handover>,
    /// Where tiles are cut into parts.
    partials: Option<Partials>,
    /// Where sums of `dQ` are cleared and rounded beside the products.
    housekeeping: Option<Housekeeping>,
}

/// Where tensors and workspaces are.
struct Tensors {
    queries: TensorMap,
    keys: TensorMap,
    values: TensorMap,
    output_gradients: TensorMap,
    key_gradients: TensorMap,
    value_gradients: TensorMap,
    statistics: Reg<GlobalAddress>,
    sums: Reg<GlobalAddress>,
    /// The counters of turns.
    turns: Option<Reg<GlobalAddress>>,
}

/// What all roles of a block work with.
#[derive(Clone, Copy)]
struct Block<'a> {
    backward: &'a Backward,
    shared: &'a Shared,
    tensors: &'a Tensors,
    place: &'a Place,
}

/// What a warpgroup does with a tile.
type Consume = fn(&Consumer, &mut Builder, &Block<'_>, &Tile);

impl Backward {
    /// The name of this configuration.
    pub fn name(&self) -> String {
        let Backward { element, head_dim, value_head_dim, rules, query_block, .. } = self;
        let (rules, mode) = (rules.name(), if self.deterministic { "_deterministic" } else { "" });
        let batch = batch_name(self.batch);
        let persistent = if self.persistent { "_persistent" } else { "" };
        let split = if self.split { "_split" } else { "" };
        let tile = format!("{query_block}x{}", self.key_block());
        let form = format!("{tile}{mode}{batch}{persistent}{split}");
        format!("backward_{element}_d{head_dim}x{value_head_dim}_{rules}_{form}")
    }

    /// Keys that a block takes.
    pub fn key_block(&self) -> u32 {
        match self.shape() {
            Shape::Wide => ROWS,
            Shape::Square | Shape::Tall => WARPGROUPS * self.group_keys(),
        }
    }

    /// Keys of a warpgroup.
    fn group_keys(&self) -> u32 {
        match self.shape() {
            Shape::Tall => 2 * ROWS,
            Shape::Square | Shape::Wide => ROWS,
        }
    }

    fn shape(&self) -> Shape {
        match self.head_dim.max(self.value_head_dim) {
            129.. => Shape::Wide,
            ..=64 if self.query_block == PART => Shape::Tall,
            _ => Shape::Square,
        }
    }

    /// The tile of queries.
    pub fn query_layout(&self) -> TileLayout {
        self.layout(self.query_block, self.head_dim.next_multiple_of(16))
    }

    /// The tile of output gradients.
    pub fn output_gradient_layout(&self) -> TileLayout {
        self.layout(self.query_block, self.value_head_dim.next_multiple_of(16))
    }

    /// The tile of keys.
    pub fn key_layout(&self) -> TileLayout {
        self.layout(self.key_block(), self.head_dim.next_multiple_of(16))
    }

    /// The tile of values.
    pub fn value_layout(&self) -> TileLayout {
        self.layout(self.key_block(), self.value_head_dim.next_multiple_of(16))
    }

    /// What a warpgroup stores of the gradients of keys and values: a box of 64 rows.
    fn stored_layout(&self, columns: u32) -> TileLayout {
        self.layout(ROWS, columns)
    }

    /// The tile of `dS`: a row for each key.
    fn score_gradient_layout(&self) -> TileLayout {
        let layout = self.layout(self.key_block(), self.query_block);
        // A panel for each warpgroup where they share queries.
        let swizzle = if self.shape() == Shape::Tall { Swizzle::B64 } else { layout.swizzle };
        TileLayout { swizzle, ..layout }
    }

    fn layout(&self, rows: u32, columns: u32) -> TileLayout {
        TileLayout { element: self.element, rows, columns, swizzle: Swizzle::B128 }
    }

    /// Whether there is shared memory for so many stages, with some left for barriers.
    fn fits(&self, stages: u32) -> bool {
        let once = [self.key_layout(), self.value_layout()].map(|tile| tile.bytes());
        let stage = [self.query_layout(), self.output_gradient_layout()].map(|tile| tile.bytes());
        let stage = stage.iter().sum::<u32>() + self.pass().statistics_bytes();
        let exchange = if self.shape() == Shape::Wide { wide::WEIGHTS_BYTES } else { 0 };
        let bytes = once.iter().sum::<u32>()
            + exchange
            + if self.keeps_house() { Housekeeping::BYTES } else { 0 }
            + stages * (stage + self.score_gradient_layout().bytes());
        bytes + 1024 <= Target::SM_90A.shared_memory_limit()
    }

    /// Stages of the pipelines of queries and of output gradients, and tiles of `dS`: consumers
    /// unroll as many steps, so that addresses are constants. Copies take longer than a short step.
    fn stages(&self) -> u32 {
        if self.parts() > 1 || !self.fits(3) { 2 } else { 3 }
    }

    /// Warps that add to the sums of `dQ`: all, or those of one warpgroup where values are wide and
    /// there is one part.
    fn adding_warps(&self) -> u32 {
        4 * self.pass().sums_layout().parts().min(WARPGROUPS)
    }

    /// Whether weights are rounded as soon as they are known where scores have slopes: narrow heads
    /// leave registers for them.
    fn rounds_early(&self) -> bool {
        self.rules.has_slopes() && self.shape() == Shape::Square && self.is_narrow()
    }

    /// Whether gradients of keys and values leave many registers.
    fn is_narrow(&self) -> bool {
        self.head_dim.max(self.value_head_dim) <= 64
    }

    /// How products become scores.
    fn score_rule(&self, k: &mut Builder) -> ScoreRule {
        let scores = ScoreRule::parameters(k, &self.rules).with_finite_hidden(k);
        if self.is_narrow() { scores.with_tanh_of_scores(k) } else { scores }
    }

    /// How many times 64 queries with 64 keys a warpgroup has in a step.
    fn parts(&self) -> u32 {
        self.query_block / PART * (self.group_keys() / ROWS)
    }

    /// Whether sums of `dQ` are cleared and rounded beside the products: where all heads have as many
    /// tiles, in no order, and shared memory has room.
    fn keeps_house(&self) -> bool {
        self.batch == Batch::Equal
            && !self.deterministic
            && self.rules.mask_function.is_none()
            && self.shape() != Shape::Wide
            // Windows have no registers left for it.
            && !(self.persistent && self.rules.mask == MaskKind::Local)
    }

    /// The pass that it is a part of.
    pub fn pass(&self) -> BackwardPass {
        BackwardPass {
            target: Target::SM_90A,
            element: self.element,
            head_dim: self.head_dim,
            value_head_dim: self.value_head_dim,
            rules: self.rules,
            query_block: self.query_block,
            key_block: self.key_block(),
            deterministic: self.deterministic,
            housekeeping: self.keeps_house(),
            batch: self.batch,
        }
    }

    /// Builds the kernel.
    ///
    /// Parameters, in order: the tensor maps of queries, keys, values, output gradients, key
    /// gradients and value gradients over (dimension, position, head, batch); the addresses of
    /// the [`RowSums`]' statistics and of the sums of `dQ`, which are zero; query length, key
    /// length; the scales; the divisors of key blocks of a head and of key heads; query heads
    /// that share a key head; then what the rules and the order ask for. One block for each key block of each
    /// key head and sequence.
    ///
    /// Over ragged batches maps are of [`slices`](crate::Prefill::slices), and instead of the lengths
    /// there are the schedule of a [`Sequencer`](crate::Sequencer) of keys, key heads, query heads
    /// that share one, and blocks of query rows of a head in the workspace. One block for each
    /// record that there is room for and each key head.
    pub fn program(&self) -> Result<Program, Error> {
        if let Some(fault) = self.fault() {
            return Err(Error::configuration(self.name(), fault));
        }
        let threads = 128 * (WARPGROUPS + 1);
        let mut k = Builder::new(self.name(), Target::SM_90A, threads).blocks_per_multiprocessor(1);
        self.write(&mut k);
        Ok(k.finish()?)
    }

    /// Why there is no such kernel.
    fn fault(&self) -> Option<&'static str> {
        let wrong = |dim: u32| dim == 0 || dim > 256 || !dim.is_multiple_of(8);
        let shape = self.shape();
        let narrow = self.head_dim <= 64 && shape != Shape::Wide;
        let faults = [
            (
                !matches!(self.element, Element::F16 | Element::BF16),
                "the element is not f16 or bf16",
            ),
            (
                wrong(self.head_dim) || wrong(self.value_head_dim),
                "a head dimension is not a multiple of 8 up to 256",
            ),
            (
                self.query_block != PART && !(narrow && self.query_block == WARPGROUPS * PART),
                "a query block is 64 rows, or a panel of 64 for each warpgroup with narrow heads",
            ),
            (
                self.query_block == PART && narrow && shape != Shape::Tall,
                "warpgroups share no 64 queries of narrow heads with wider values",
            ),
            (!self.fits(2), "there is not enough shared memory"),
            (self.batch == Batch::Paged, "gradients of keys in pages are not computed"),
            (
                self.rules.softcap && self.rules.score_function.is_some(),
                "capped scores that go through a function are not differentiated",
            ),
            (
                self.batch != Batch::Equal && shape == Shape::Tall,
                "tall blocks are for equal lengths",
            ),
            (
                self.persistent && !self.may_be_persistent(),
                "blocks take tile after tile of equal lengths, in no order, without lists, and not of \
                 wide heads",
            ),
            (
                self.split && !(self.may_be_persistent() && self.rules.mask == MaskKind::Dense),
                "tiles are cut into parts where all are alike, in no order, and heads are not wide",
            ),
        ];
        faults.into_iter().find(|(faulty, _)| *faulty).map(|(_, fault)| fault)
    }

    /// Whether there is a kernel whose blocks take tile after tile.
    pub(super) fn may_be_persistent(&self) -> bool {
        self.batch == Batch::Equal
            && !self.deterministic
            && self.rules.mask_function.is_none()
            && self.shape() != Shape::Wide
    }

    /// Whether walks go down and up by turns: where they are of unequal lengths, and additions come in
    /// any order.
    pub fn walks_by_rounds(&self) -> bool {
        self.batch == Batch::Equal
            && !self.deterministic
            && self.rules.mask == MaskKind::Causal
            && !self.pass().takes_block_lists()
    }

    fn write(&self, k: &mut Builder) {
        let rank = self.map_rank();
        let [keys_columns, values_columns] = [self.key_layout(), self.value_layout()]
            .map(|layout| self.stored_layout(layout.columns).tensor_box(rank));
        let tensors = Tensors {
            queries: Tensor::Query.map(k, self.query_layout().tensor_box(rank)),
            keys: Tensor::Key.map(k, self.key_layout().tensor_box(rank)),
            values: Tensor::Value.map(k, self.value_layout().tensor_box(rank)),
            output_gradients: Tensor::OutputGradient
                .map(k, self.output_gradient_layout().tensor_box(rank)),
            key_gradients: Tensor::KeyGradient.map(k, keys_columns),
            value_gradients: Tensor::ValueGradient.map(k, values_columns),
            statistics: Workspace::RowStatistics.address(k),
            sums: Workspace::QueryGradientSums.address(k),
            turns: self.deterministic.then(|| Workspace::Turns.address(k)),
        };
        let shared = self.shared(k);
        let mut place = Place::parameters(k, &self.pass());
        place.posted = shared.handover.as_ref().map(|it| it.posted);
        place.split = self.split.then(|| Split::parameters(k));
        place.rounds = self.walks_by_rounds().then(|| Rounds::parameters(k));
        let consumer = Consumer::parameters(k, self);
        let claims = self.persistent.then(|| Claims::parameters(k));
        let thread = k.thread_index();
        k.if_(thread.equals(0), |k| {
            shared.init(k);
            place.post(k);
        });
        k.barriers_ready();
        let block = Block { backward: self, shared: &shared, tensors: &tensors, place: &place };
        let producer = Role::warpgroups("producer", 0..1).registers(24);
        if let (Some(handover), Some(claims)) = (&shared.handover, &claims) {
            k.role(producer, |k| {
                k.if_(thread.equals(0), |k| producer::produce_all(k, &block, handover, claims));
                if let Some(housekeeping) = &shared.housekeeping {
                    k.if_(thread.at_least(32), |k| {
                        housekeeping.keep_all(k, &place, handover, claims);
                    });
                }
            });
            k.role(Role::warpgroups("consumer", 1..1 + WARPGROUPS).registers(240), |k| {
                consumer.consume_all(k, &block, handover, claims);
            });
            return;
        }
        k.role(producer, |k| {
            let tile = place.find(k);
            let walk = place.walk(k, &tile);
            k.if_(thread.equals(0), |k| producer::produce(k, &block, &tile, &walk));
            if let Some(housekeeping) = &shared.housekeeping {
                k.if_(thread.at_least(32), |k| housekeeping.keep(k, &place));
            }
            if let (Some(turns), Some(counters)) = (&shared.turns, tensors.turns) {
                k.if_(thread.equals(32), |k| turns.grant(k, counters, &place, &tile, &walk));
                k.if_(thread.equals(64), |k| turns.pass_on(k, counters, &place, &tile, &walk));
            }
        });
        let mut consumers = |name: &str, warpgroups, consume: Consume| {
            k.role(Role::warpgroups(name, warpgroups).registers(240), |k| {
                place.if_tile(k, |k| {
                    let tile = place.find(k);
                    consume(&consumer, k, &block, &tile);
                });
            });
        };
        match self.shape() {
            Shape::Square | Shape::Tall => {
                consumers("consumer", 1..1 + WARPGROUPS, Consumer::consume);
            }
            Shape::Wide => {
                consumers("weights", 1..2, Consumer::consume_weights);
                consumers("gradients", 2..3, Consumer::consume_gradients);
            }
        }
    }

    /// The rank of the tensor maps: slices have one more.
    fn map_rank(&self) -> usize {
        if self.batch == Batch::Equal { 4 } else { 5 }
    }

    /// Reserves the shared memory.
    fn shared(&self, k: &mut Builder) -> Shared {
        // A warp leader for its lanes when it gives a stage back.
        let warps = 4 * WARPGROUPS;
        let is_wide = self.shape() == Shape::Wide;
        let writers = warps / if is_wide { WARPGROUPS } else { 1 };
        let stages = self.stages();
        let housekeeping = self.pass().housekeeping;
        // Warps that a tile is posted for.
        let posted = warps + if housekeeping { housekeeping::WARPS } else { 0 };
        Shared {
            keys: SharedTiles::new(k, "keys", self.key_layout(), 1),
            values: SharedTiles::new(k, "values", self.value_layout(), 1),
            queries: SharedTiles::new(k, "queries", self.query_layout(), stages),
            output_gradients: SharedTiles::new(
                k,
                "output gradients",
                self.output_gradient_layout(),
                stages,
            ),
            score_gradients: SharedTiles::new(k, "dS", self.score_gradient_layout(), stages),
            statistics: k.shared("row statistics", stages * self.pass().statistics_bytes(), 16),
            loaded: Barriers::new(k, "keys and values loaded", 2, 1),
            written: Barriers::new(k, "dS written", stages, writers),
            exchange: is_wide.then(|| wide::Exchange::new(k, stages)),
            query_pipeline: Pipeline::new(k, "queries", stages, warps),
            output_gradient_pipeline: Pipeline::new(k, "output gradients", stages, warps),
            told: self.pass().takes_block_lists().then(|| Told::new(k, stages)),
            turns: self.deterministic.then(|| Turns::new(k, stages, self.adding_warps())),
            handover: self.persistent.then(|| Handover::new(k, posted)),
            partials: self.split.then(|| Partials::parameters(k, self)),
            housekeeping: housekeeping.then(|| Housekeeping::parameters(k, self, warps)),
        }
    }
}

/// What a kernel's name ends with.
pub(crate) fn batch_name(batch: Batch) -> &'static str {
    match batch {
        Batch::Equal => "",
        Batch::Ragged => "_ragged",
        Batch::Paged => "_paged",
    }
}

impl Shared {
    /// The statistics of a stage's rows.
    fn statistics(
        &self,
        k: &mut Builder,
        backward: &Backward,
        stage: impl Into<Value<U32>>,
    ) -> Reg<SharedAddress> {
        let first = k.shared_address(self.statistics);
        k.eval(first + stage.into() * backward.pass().statistics_bytes())
    }

    /// One thread makes the barriers ready.
    fn init(&self, k: &mut Builder) {
        self.loaded.init(k);
        self.written.init(k);
        if let Some(exchange) = &self.exchange {
            exchange.init(k);
        }
        self.query_pipeline.init(k);
        self.output_gradient_pipeline.init(k);
        if let Some(turns) = &self.turns {
            turns.init(k);
        }
        if let Some(handover) = &self.handover {
            handover.init(k);
        }
        if let Some(housekeeping) = &self.housekeeping {
            housekeeping.init(k);
        }
    }
}
