//! Attention backward on Hopper: the gradients of queries, keys and values.
//!
//! With `P = softmax(S)` known from the log-sum-exps, `dO` given and `delta` the row sums of
//! `dO * O`:
//!
//! ```text
//! dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dK = dS^T Q      dQ = dS K
//! ```
//!
//! One pass launches these kernels in order:
//!
//! | kernel | what it does |
//! | --- | --- |
//! | [`RowSums`] | computes `delta`, rescales the log-sum-exps, clears the `dQ` workspace |
//! | [`Backward`] | all five products; sums `dK` and `dV` in registers, `dQ` in the workspace |
//! | [`Rounding`] | scales `dQ`, rounds it and writes it to its tensor |
//! | [`SinkGradients`] | computes the gradients of attention sinks, where there are any |
//!
//! A thread block of [`Backward`] owns a *tile*: a key block (128 keys, as a rule) of one key head.
//! It *walks* the query blocks that see these keys, one query block per step, for all query heads
//! that share the key head, so that `dK` and `dV` are complete in registers. Two consumer
//! warpgroups own 64 keys each and compute scores *transposed*: a row of an accumulator is a key,
//! so `P^T` and `dS^T` are already in registers as the left (A) operand of the products for `dV`
//! and `dK`. Only `dS` goes to shared memory, where both warpgroups read it for `dQ`, each
//! computing half of it:
//!
//! ```text
//! S^T = K Q^T;  P = exp(S - lse)
//! for each query block:
//!     start dP^T = V dO^T;  start dV += P^T dO
//!     wait for dP;  dS = P * (dP - delta)                while dV runs
//!     wait for dV
//!     start S^T = K Q^T of the next query block
//!     dS to shared memory                                while S runs
//!     start dQ^T = K^T dS^T of the previous query block;  start dK += dS^T Q
//!     wait for S;  P = exp(S - lse)                      while dQ and dK run
//!     wait for dQ;  add it to the f32 workspace          while dK runs
//!     wait for dK
//! ```
//!
//! `dQ` lags one query block behind: a warpgroup then reads the `dS` that the other warpgroup wrote
//! a step ago, and the two need not synchronise within a step. Beside the `dK` and `dV`
//! accumulators of 64 keys there are registers for two score accumulators and no more, so `dP` and
//! `dQ` share one. ptxas lets accumulators share registers only across a point at which no `wgmma`
//! is in flight, and a step has two such points.
//!
//! That loop is in `consumer`; its waits, products and additions are in `warpgroup`.
//!
//! Heads wider than 128 use key blocks of 64 keys, which both warpgroups share: one computes `P`
//! and `dV`, the other `dS` and `dK` (`wide`). Narrow heads without a mask may give each warpgroup
//! 128 keys, 64 at a time within a step, which halves the additions to `dQ`.
//!
//! Thread blocks may be persistent (`persistent`), and the tiles of an incomplete last wave may be
//! split into parts (`split`).
//!
//! The `f32` sums of `dQ` are laid out in memory as the accumulators are in registers
//! ([`SumsLayout`]), so that each warp adds to whole cache lines.
//!
//! Where the mask is a function, a walk follows a list of the query blocks that see its key block
//! (`lists`), and query blocks that see none of its keys are not loaded.
//!
//! Ragged (variable-length) batches run the same loops over slices of rows
//! ([`Prefill`](crate::Prefill) explains how TMA copies stay inside a slice), with tiles in the
//! order that a [`Sequencer`](crate::Sequencer) wrote. `ragged` maps thread blocks to tiles,
//! `row_blocks` maps the rows of a sequence to their place in the workspace.

mod clear_and_round;
mod consumer;
mod epilogue;
mod lists;
pub(crate) mod order;
mod pass;
mod persistent;
mod producer;
mod ragged;
mod rounding;
pub(crate) mod row_blocks;
mod row_sums;
mod sink_gradients;
mod split;
pub(crate) mod tile_scheduler;
mod tuned;
mod warpgroup;
mod wide;

pub use pass::{BackwardPass, SumsLayout};
pub use rounding::Rounding;
pub use row_sums::RowSums;
pub use sink_gradients::SinkGradients;
pub(crate) use tuned::every_backward;
pub use tuned::{
    persistent_backward, sharing_backward, split_backward, tall_backward, tuned_backward,
};

use ptx::{
    Builder, Element, Expression, GlobalAddress, Mbarriers, Pipeline, Program, Reg, Role,
    SharedAddress, SharedTiles, Swizzle, Target, TensorMap, TileLayout, U32, Value,
};

use crate::attention::scores::ScoreRule;
use crate::attention::{Batch, MaskKind, Rules};
use crate::parameter::{Tensor, Workspace};
use crate::{Error, build, first_fault, is_16_bit, resident_blocks};
use clear_and_round::ClearAndRound;
use consumer::Consumer;
use lists::PublishedSteps;
use order::{AlternatingWaves, Turns};
use persistent::{Claims, Handover};
use split::{Partials, Split};
use tile_scheduler::{Tile, TileScheduler};

/// Rows of one `wgmma` accumulator: here, keys.
const ROWS: u32 = 64;

/// Queries of one score accumulator: the width of a shared-memory panel.
const PART: u32 = 64;

/// Number of consumer warpgroups.
const WARPGROUPS: u32 = 2;

/// Configuration of the backward kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Backward {
    /// The element type of all tensors: `F16` or `BF16`.
    pub element: Element,
    /// The width of queries and keys: a multiple of 8 up to 256.
    pub head_dim: u32,
    /// The width of values and outputs: a multiple of 8 up to 256.
    pub value_head_dim: u32,
    /// The mask, and the rules that change scores.
    pub rules: Rules,
    /// Queries of a query block: 64, or 128 where queries are at most 64 wide. Where values are
    /// too, query blocks of 64 go with key blocks of 256 keys instead of 128.
    pub query_block: u32,
    /// Whether `dQ` is bitwise reproducible from run to run.
    pub deterministic: bool,
    /// How sequences are stored: with equal lengths, or ragged.
    pub batch: Batch,
    /// Whether the kernel is persistent: each thread block takes one tile after another.
    pub persistent: bool,
    /// Whether the tiles of an incomplete last wave are split into parts.
    pub split: bool,
    /// Over ragged batches, whether tiles clear and round shares of the `dQ` workspace while the
    /// products run, as those of equal lengths always do where they can. Each query head must have
    /// keys of its own: with grouped heads separate launches are faster.
    pub shares: bool,
}

/// Named barriers of the thread block. Barrier 0 joins all of its threads.
mod barrier {
    /// Joins both consumer warpgroups once all their products have completed.
    pub(super) const PRODUCTS: u32 = 1;
    /// Joins the threads of one consumer warpgroup around the storing of its results. The
    /// warpgroup's index is added: each has a barrier of its own.
    pub(super) const RESULTS: u32 = 2;
}

/// How the two consumer warpgroups divide the gradients of a tile, given their registers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// Each warpgroup holds `dK` and `dV` of 64 keys of its own.
    Square,
    /// Each warpgroup holds `dK` and `dV` of 128 keys of its own, for narrow heads. Each query
    /// block that is loaded, and each `dQ` that is added, then serves twice as many keys.
    Tall,
    /// The warpgroups share 64 keys, for wide heads: one holds `dV`, the other `dK`.
    Wide,
}

/// The tiles, barriers and pipelines in shared memory.
struct Shared {
    keys: SharedTiles,
    values: SharedTiles,
    queries: SharedTiles,
    output_gradients: SharedTiles,
    score_gradients: SharedTiles,
    /// Byte offset of the row statistics of stage 0.
    statistics: u32,
    /// Signals that the keys (0) and the values (1) of a tile have arrived.
    loaded: Mbarriers,
    /// Stages of queries with their row statistics.
    query_pipeline: Pipeline,
    output_gradient_pipeline: Pipeline,
    /// Signals, for each stage, that every warp has written its part of the `dS` tile.
    written: Mbarriers,
    /// With a mask function: the list entry that each stage was loaded for.
    published_steps: Option<PublishedSteps>,
    /// In the deterministic mode: the turns at which this block adds its `dQ`.
    turns: Option<Turns>,
    /// For wide heads: what one warpgroup passes to the other.
    exchange: Option<wide::Exchange>,
    /// In persistent kernels: how tiles pass from the producer to the other warps.
    handover: Option<Handover>,
    /// Where tiles are split: the workspace of partial gradients.
    partials: Option<Partials>,
    /// Where the `dQ` workspace is cleared and rounded while the products run.
    clear_and_round: Option<ClearAndRound>,
}

/// Tensor maps and addresses of tensors and workspaces.
struct Tensors {
    queries: TensorMap,
    keys: TensorMap,
    values: TensorMap,
    output_gradients: TensorMap,
    key_gradients: TensorMap,
    value_gradients: TensorMap,
    statistics: Reg<GlobalAddress>,
    sums: Reg<GlobalAddress>,
    /// The turn counters of the deterministic mode.
    turns: Option<Reg<GlobalAddress>>,
}

/// The context that all roles of a thread block share.
#[derive(Clone, Copy)]
struct Block<'a> {
    backward: &'a Backward,
    shared: &'a Shared,
    tensors: &'a Tensors,
    scheduler: &'a TileScheduler,
}

/// The code of a consumer warpgroup for one tile.
type Consume = fn(&Consumer, &mut Builder, &Block<'_>, &Tile);

impl Backward {
    /// Returns the name of this configuration.
    pub fn name(&self) -> String {
        let Backward { element, head_dim, value_head_dim, rules, query_block, .. } = self;
        let (rules, mode) = (rules.name(), if self.deterministic { "_deterministic" } else { "" });
        let batch = self.batch.suffix();
        let persistent = if self.persistent { "_persistent" } else { "" };
        let split = if self.split { "_split" } else { "" };
        let shares = if self.shares { "_shares" } else { "" };
        let tile = format!("{query_block}x{}", self.key_block());
        let form = format!("{tile}{mode}{batch}{persistent}{split}{shares}");
        format!("backward_{element}_d{head_dim}x{value_head_dim}_{rules}_{form}")
    }

    /// Returns the number of keys in a key block: those of one thread block.
    pub fn key_block(&self) -> u32 {
        match self.shape() {
            Shape::Wide => ROWS,
            Shape::Square | Shape::Tall => WARPGROUPS * self.group_keys(),
        }
    }

    /// Returns the number of keys that a warpgroup works on; for wide heads both share them.
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

    /// Returns the layout of a tile of queries.
    pub fn query_layout(&self) -> TileLayout {
        self.layout(self.query_block, self.head_dim.next_multiple_of(16))
    }

    /// Returns the layout of a tile of output gradients.
    fn output_gradient_layout(&self) -> TileLayout {
        self.layout(self.query_block, self.value_head_dim.next_multiple_of(16))
    }

    /// Returns the layout of the tile of keys.
    pub fn key_layout(&self) -> TileLayout {
        self.layout(self.key_block(), self.head_dim.next_multiple_of(16))
    }

    /// Returns the layout of the tile of values.
    pub fn value_layout(&self) -> TileLayout {
        self.layout(self.key_block(), self.value_head_dim.next_multiple_of(16))
    }

    /// Returns the layout of what one TMA store of `dK` or `dV` takes: 64 rows.
    fn stored_layout(&self, columns: u32) -> TileLayout {
        self.layout(ROWS, columns)
    }

    /// Returns the layout of a tile of `dS`: a row for each key, a column for each query.
    fn score_gradient_layout(&self) -> TileLayout {
        let layout = self.layout(self.key_block(), self.query_block);
        // Tall: each warpgroup computes `dQ` of half of the 64 queries, so panels are 32 wide.
        let swizzle = if self.shape() == Shape::Tall { Swizzle::B64 } else { layout.swizzle };
        TileLayout { swizzle, ..layout }
    }

    fn layout(&self, rows: u32, columns: u32) -> TileLayout {
        TileLayout { element: self.element, rows, columns, swizzle: Swizzle::B128 }
    }

    /// Returns whether shared memory holds this many stages and leaves some for barriers.
    fn fits(&self, stages: u32) -> bool {
        let once = [self.key_layout(), self.value_layout()].map(|tile| tile.bytes());
        let stage = [self.query_layout(), self.output_gradient_layout()].map(|tile| tile.bytes());
        let stage = stage.iter().sum::<u32>() + self.pass().statistics_bytes();
        let exchange = if self.shape() == Shape::Wide { wide::WEIGHTS_BYTES } else { 0 };
        let bytes = once.iter().sum::<u32>()
            + exchange
            + if self.clears_and_rounds() { ClearAndRound::BYTES } else { 0 }
            + stages * (stage + self.score_gradient_layout().bytes());
        bytes + 1024 <= Target::SM_90A.shared_memory_limit()
    }

    /// Returns the number of stages of queries, output gradients and `dS`. Consumers unroll as many
    /// steps, so that shared-memory addresses are constants. Steps of a single part are shorter
    /// than a copy and get three stages where these fit.
    fn stages(&self) -> u32 {
        if self.parts() > 1 || !self.fits(3) { 2 } else { 3 }
    }

    /// Returns how many warps add to `dQ`: those of both warpgroups, or of one where `dQ` is a
    /// single part (narrow queries with values wider than 128).
    fn adding_warps(&self) -> u32 {
        4 * self.pass().sums_layout().parts().min(WARPGROUPS)
    }

    /// Returns whether `P` is rounded into an operand of its own as soon as it is known, although
    /// the derivative of the score rule must be kept too: narrow heads have the registers.
    fn rounds_early(&self) -> bool {
        self.rules.has_score_derivative() && self.shape() == Shape::Square && self.is_narrow()
    }

    /// Returns whether the `dK` and `dV` accumulators leave many registers free.
    fn is_narrow(&self) -> bool {
        self.head_dim.max(self.value_head_dim) <= 64
    }

    /// Returns the rule that turns `QK^T` into scores.
    fn score_rule(&self, k: &mut Builder) -> ScoreRule {
        let scores = ScoreRule::parameters(k, &self.rules).with_finite_hidden(k);
        if self.is_narrow() { scores.with_tanh_of_scores(k) } else { scores }
    }

    /// Returns how many 64 x 64 score accumulators a warpgroup works through in a step.
    fn parts(&self) -> u32 {
        self.query_block / PART * (self.group_keys() / ROWS)
    }

    /// Returns whether the `dQ` workspace is cleared and rounded while the products run: where
    /// `dQ` is added in any order, and shared memory has room.
    fn clears_and_rounds(&self) -> bool {
        if self.batch != Batch::Equal {
            return self.shares;
        }
        !self.deterministic
            && self.rules.mask_function.is_none()
            && self.shape() != Shape::Wide
            // Persistent kernels with windows have no registers left for it.
            && !(self.persistent && self.rules.mask == MaskKind::Local)
    }

    /// Returns whether tiles of a ragged batch can clear and round shares of the `dQ` workspace.
    pub(super) fn may_have_shares(&self) -> bool {
        self.batch == Batch::Ragged && !self.deterministic && self.shape() == Shape::Square
    }

    /// Returns the backward pass that this kernel is the main part of.
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
            clear_and_round: self.clears_and_rounds(),
            batch: self.batch,
        }
    }

    /// Builds the kernel.
    ///
    /// Parameters: the tensor maps of queries, keys, values, output gradients, key gradients and
    /// value gradients over (dimension, position, head, batch); the addresses of the row statistics
    /// that [`RowSums`] wrote and of the `dQ` sums, which it cleared; query length and key length;
    /// the divisors for key blocks per head and for key heads; the number of query heads that share
    /// a key head; the scales; and what the rules and the tile order need. The grid has one thread
    /// block for each key block of each key head and sequence.
    ///
    /// Over ragged batches the maps are of [`slices`](crate::Prefill::slices), and in place of the
    /// lengths come the schedule that a [`Sequencer`](crate::Sequencer) wrote for tiles of keys,
    /// the key heads, the query heads that share one, and the number of query blocks per head in
    /// the workspace. The grid has one thread block for each record that the schedule has room for
    /// and each key head.
    pub fn program(&self) -> Result<Program, Error> {
        let builder = |name| resident_blocks(name, Target::SM_90A, 128 * (WARPGROUPS + 1), 1);
        build(self.name(), self.fault(), builder, |k| self.write(k))
    }

    /// Returns why this configuration is not supported, or `None` if it is.
    fn fault(&self) -> Option<&'static str> {
        let wrong = |dim: u32| dim == 0 || dim > 256 || !dim.is_multiple_of(8);
        let shape = self.shape();
        let narrow = self.head_dim <= 64 && shape != Shape::Wide;
        first_fault([
            (!is_16_bit(self.element), "the element is not f16 or bf16"),
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
                !self.rules.has_gradients(),
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
            (
                self.shares && !self.may_have_shares(),
                "tiles have shares of sums over ragged batches, in no order, and heads are not wide",
            ),
        ])
    }

    /// Returns whether this configuration can be persistent or split.
    pub(super) fn may_be_persistent(&self) -> bool {
        self.batch == Batch::Equal
            && !self.deterministic
            && self.rules.mask_function.is_none()
            && self.shape() != Shape::Wide
    }

    /// Returns whether waves of tiles walk down and up alternately: under a causal mask, where
    /// walks have unequal lengths, if `dQ` is added in any order.
    pub fn has_alternating_waves(&self) -> bool {
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
        let mut scheduler = TileScheduler::parameters(k, &self.pass());
        scheduler.posted = shared.handover.as_ref().map(|it| it.posted);
        scheduler.split = self.split.then(|| Split::parameters(k));
        scheduler.waves = self.has_alternating_waves().then(|| AlternatingWaves::parameters(k));
        let consumer = Consumer::parameters(k, self);
        let claims = self.persistent.then(|| Claims::parameters(k));
        let thread = k.thread_index();
        k.if_(thread.equals(0), |k| {
            shared.init(k);
            scheduler.post(k);
        });
        k.barriers_ready();
        let block =
            Block { backward: self, shared: &shared, tensors: &tensors, scheduler: &scheduler };
        let producer = Role::warpgroups("producer", 0..1).registers(24);
        if let (Some(handover), Some(claims)) = (&shared.handover, &claims) {
            k.role(producer, |k| {
                k.if_(thread.equals(0), |k| producer::produce_all(k, &block, handover, claims));
                if let Some(clear_and_round) = &shared.clear_and_round {
                    k.if_(thread.at_least(32), |k| {
                        clear_and_round.run_persistent(k, &scheduler, handover, claims);
                    });
                }
            });
            k.role(Role::warpgroups("consumer", 1..1 + WARPGROUPS).registers(240), |k| {
                consumer.consume_all(k, &block, handover, claims);
            });
            return;
        }
        k.role(producer, |k| {
            let tile = scheduler.find(k);
            let walk = scheduler.walk(k, &tile);
            k.if_(thread.equals(0), |k| producer::produce(k, &block, &tile, &walk));
            if let Some(clear_and_round) = &shared.clear_and_round {
                k.if_(thread.at_least(32), |k| clear_and_round.run(k, &scheduler));
            }
            if let (Some(turns), Some(counters)) = (&shared.turns, tensors.turns) {
                turns.run(k, thread, counters, &scheduler, &tile, &walk);
            }
        });
        let mut consumers = |name: &str, warpgroups, consume: Consume| {
            k.role(Role::warpgroups(name, warpgroups).registers(240), |k| {
                scheduler.if_tile(k, |k| {
                    let tile = scheduler.find(k);
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

    /// Returns the rank of the tensor maps, which for slices is one more than for equal lengths.
    fn map_rank(&self) -> usize {
        if self.batch == Batch::Equal { 4 } else { 5 }
    }

    /// Reserves the shared memory.
    fn shared(&self, k: &mut Builder) -> Shared {
        // One lane of each warp arrives for the warp.
        let warps = 4 * WARPGROUPS;
        let is_wide = self.shape() == Shape::Wide;
        let writers = warps / if is_wide { WARPGROUPS } else { 1 };
        let stages = self.stages();
        let clear_and_round = self.pass().clear_and_round;
        // Warps that read the posted tile number and release it.
        let posted = warps + if clear_and_round { clear_and_round::WARPS } else { 0 };
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
            loaded: Mbarriers::new(k, "keys and values loaded", 2, 1),
            written: Mbarriers::new(k, "dS written", stages, writers),
            exchange: is_wide.then(|| wide::Exchange::new(k, stages)),
            query_pipeline: Pipeline::new(k, "queries", stages, warps),
            output_gradient_pipeline: Pipeline::new(k, "output gradients", stages, warps),
            published_steps: self
                .pass()
                .takes_block_lists()
                .then(|| PublishedSteps::new(k, stages)),
            turns: self.deterministic.then(|| Turns::new(k, stages, self.adding_warps())),
            handover: self.persistent.then(|| Handover::new(k, posted)),
            partials: self.split.then(|| Partials::parameters(k, self)),
            clear_and_round: clear_and_round.then(|| ClearAndRound::parameters(k, self, warps)),
        }
    }
}

/// Returns how the name of a kernel before or after the products ends, where tiles of this many
/// keys have shares of the `dQ` sums.
fn shares_suffix(shares: Option<u32>) -> String {
    shares.map_or_else(String::new, |keys| format!("_shares{keys}"))
}

impl Shared {
    /// Returns the shared-memory address of the row statistics of a stage.
    fn statistics(
        &self,
        k: &mut Builder,
        backward: &Backward,
        stage: impl Into<Value<U32>>,
    ) -> Reg<SharedAddress> {
        let first = k.shared_address(self.statistics);
        k.eval(first + stage.into() * backward.pass().statistics_bytes())
    }

    /// Initialises all barriers; called by one thread.
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
        if let Some(clear_and_round) = &self.clear_and_round {
            clear_and_round.init(k);
        }
    }
}
