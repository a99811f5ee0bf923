//! Attention forward on Hopper: a persistent, warp-specialised kernel.
//!
//! One producer thread loads the tiles of Q, K and V with TMA. One to three consumer warpgroups
//! compute 64 query rows each and walk the key blocks from the last to the first. Inside a
//! warpgroup the products and the exponentials overlap:
//!
//! ```text
//! S(n-1) = Q K(n-1)^T;  P(n-1) = softmax(S(n-1))
//! for j = n-2 down to 0:
//!     start S(j) = Q K(j)^T
//!     start O += P(j+1) V(j+1)
//!     wait for S(j);  P(j) = softmax(S(j))      while O += P V still runs
//!     wait for O
//! start O += P(0) V(0)
//! start S = Q' K'^T of the next tile           while this one is stored
//! wait for O; normalise; store
//! ```
//!
//! Warpgroups take turns at the tensor cores (ping-pong), so that one computes exponentials while
//! another multiplies. Thread blocks are persistent: each processes tile after tile.
//!
//! Each part has its own file: `producer`, `consumer` (the loop above), `warpgroup`, `walk`,
//! `rule`, `softmax` and `epilogue`. `scheduler` holds the traits of the tile schedulers. Batches
//! of equal lengths use `static_scheduler`, with tile lists from `lists` and `stream_k`; ragged
//! batches ([`Prefill`]) use `dynamic_scheduler` or `single_tile`. `tuned` chooses the
//! configuration for a problem, and `probe` adds timestamps.
//!
//! With 8-bit inputs, `fp8` is the consumers' loop and `transposer` transposes the values in shared
//! memory.

mod consumer;
mod dynamic_scheduler;
mod epilogue;
mod fp8;
pub(crate) mod lists;
mod partials;
mod prefill;
mod probe;
mod producer;
mod rule;
mod scheduler;
mod single_tile;
mod softmax;
mod static_scheduler;
mod stream_k;
mod transposer;
mod tuned;
mod walk;
mod warpgroup;

pub use crate::divisor::Divisor;
pub use lists::TileLists;
pub use prefill::{Prefill, SLICE_EXTENT};
pub(crate) use prefill::{slice_rest, slice_row};
pub use probe::{PROBE_WORDS, Phase};
pub use tuned::{
    Tuned, Workload, every_fp8, every_fp8_prefill, every_prefill, every_tuned, tuned, tuned_prefill,
};

use ptx::{
    Builder, Element, Expression, GlobalAddress, Pipeline, Program, Reg, Role, SharedTiles,
    Swizzle, Target, TensorBox, TensorMap, TileLayout, U32,
};

use crate::attention::function::lower::Functions;
use crate::attention::scores::ScoreRule;
use crate::attention::{MaskKind, Rules};
use crate::dependent_launch::wait_for_earlier_grids;
use crate::parameter::{Number, Tensor};
use crate::product::Source;
use crate::{Error, build, first_fault, is_16_bit, resident_blocks};
use consumer::Consumers;
use epilogue::Results;
pub(crate) use partials::PARTIAL_STEP;
use partials::Partials;
use static_scheduler::StaticScheduler;
use transposer::Transposed;

/// The configuration of the forward kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Forward {
    /// The element of queries, keys and values: `F16`, `BF16` or `E4M3`.
    pub element: Element,
    /// The element of the output: that of the inputs, or `F16` or `BF16` with 8-bit inputs.
    pub output: Element,
    /// The head dimension of queries and keys: a multiple of 16 bytes, up to 256 elements.
    pub head_dim: u32,
    /// The head dimension of values and outputs: a multiple of 16 bytes, up to 256 elements.
    pub value_head_dim: u32,
    /// The mask and the score rules.
    pub rules: Rules,
    /// The number of consumer warpgroups, one to three, of 64 query rows each.
    pub warpgroups: u32,
    /// Keys of a key block: a multiple of 16 up to 256; of 32 with 8-bit inputs.
    pub key_block: u32,
    /// Stages of the key pipeline and of the value pipeline; with 8-bit inputs also of the pipeline
    /// of transposed values.
    pub stages: u32,
    /// Query tiles in shared memory: with 2, the next tile's queries are loaded early.
    pub query_buffers: u32,
    /// Where the tensor cores read Q from: shared memory or registers.
    pub query_source: Source,
    /// Whether warpgroups take turns at issuing products (ping-pong).
    pub ping_pong: bool,
    /// How the code is laid out; every form gives the same results bit for bit.
    pub form: Form,
    /// Whether the tiles of the last, incomplete wave are split along the keys (stream-K). This
    /// needs 16-bit inputs and tiles of equal length, that is, no mask.
    pub stream_k: bool,
}

/// How a kernel's code is laid out. Every form gives the same results bit for bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    /// Whether a tile's first scores are computed while the previous tile is stored. This saves
    /// time on short sequences.
    pub overlap_tiles: bool,
    /// Whether the body of the main loop is unrolled to two steps, so that two sets of registers
    /// for P swap roles, instead of P being copied after each step.
    pub two_steps: bool,
    /// Whether the slow path of the guarded softmax has its own copy of the exponentials, instead
    /// of branching back to those of the fast path.
    pub slow_path_apart: bool,
}

impl Form {
    /// The form that runs fastest in most configurations.
    pub const FULL: Form = Form { overlap_tiles: true, two_steps: true, slow_path_apart: true };
    /// The form with one copy of everything, which takes half the time to compile. It runs while
    /// another form is being compiled.
    pub const COMPACT: Form =
        Form { overlap_tiles: false, two_steps: false, slow_path_apart: false };

    /// Returns what distinguishes this form from [`Form::FULL`], as the suffix of a kernel name.
    fn suffix(self) -> String {
        if self == Form::COMPACT {
            return "_compact".to_owned();
        }
        let mut suffix = String::new();
        for (missing, name) in [
            (!self.overlap_tiles, "_tilewise"),
            (!self.two_steps, "_stepwise"),
            (!self.slow_path_apart, "_again"),
        ] {
            if missing {
                suffix += name;
            }
        }
        suffix
    }
}

/// The first index of each kind of named barrier. Every kind has one barrier for each consumer
/// warpgroup; barrier 0 is `bar.sync` of the whole thread block.
mod barrier {
    /// Barriers at which a warpgroup waits for its turn at the tensor cores.
    pub(super) const TURN: u32 = 1;
    /// Barriers of the threads of one warpgroup, used while it stores its output.
    pub(super) const OUTPUT: u32 = 4;
}

/// The tiles in shared memory and the mbarrier pipelines that guard them.
struct Shared {
    queries: SharedTiles,
    keys: SharedTiles,
    values: SharedTiles,
    output: SharedTiles,
    query_pipeline: Pipeline,
    key_pipeline: Pipeline,
    value_pipeline: Pipeline,
    /// With 8-bit inputs, the transposed values: `wgmma` reads 8-bit operands K-major only.
    transposed: Option<Transposed>,
}

/// The TMA descriptors (tensor maps) of the inputs and the output.
struct Maps {
    queries: TensorMap,
    keys: TensorMap,
    values: TensorMap,
    output: TensorMap,
}

impl Maps {
    /// Declares the tensor maps, with the TMA boxes of queries, keys, values and output.
    fn parameters(k: &mut Builder, [queries, keys, values, output]: [TensorBox; 4]) -> Self {
        Maps {
            queries: Tensor::Query.map(k, queries),
            keys: Tensor::Key.map(k, keys),
            values: Tensor::Value.map(k, values),
            output: Tensor::Output.map(k, output),
        }
    }

    /// Brings the tensor maps into the cache of the copy engine: the first loads and the first store
    /// of a thread block need not wait for them.
    fn prefetch(&self, k: &mut Builder) {
        for map in [self.keys, self.queries, self.values, self.output] {
            k.prefetch_map(map);
        }
    }
}

impl Forward {
    /// Returns the name of this configuration, which is also the kernel's entry point.
    pub fn name(&self) -> String {
        self.named("forward", &format!("_{}", self.rules.name()))
    }

    /// Returns the name of a kernel of the given family with these tiles; `rules` is the part of
    /// the name that describes the mask and score rules.
    fn named(&self, family: &str, rules: &str) -> String {
        let Forward { element, output, head_dim, value_head_dim, warpgroups, .. } = self;
        let Forward { key_block, stages, query_buffers, query_source, ping_pong, form, .. } = self;
        let rows = 64u32.saturating_mul(*warpgroups);
        let turns = if *ping_pong { "_turns" } else { "" };
        let form = form.suffix();
        let stream_k = if self.stream_k { "_streamk" } else { "" };
        let source = match query_source {
            Source::Shared => "",
            Source::Registers => "r",
        };
        let output = if output == element { String::new() } else { format!("_{output}") };
        format!(
            "{family}_{element}{output}_d{head_dim}x{value_head_dim}{rules}_{rows}x{key_block}_s{stages}q{query_buffers}{source}{turns}{form}{stream_k}"
        )
    }

    /// Returns whether thread blocks read their tiles from [`TileLists`]: where a mask makes tiles
    /// of unequal length, or with stream-K.
    pub fn takes_tile_lists(&self) -> bool {
        self.stream_k || self.is_uneven()
    }

    /// Returns whether a mask makes tiles of unequal length.
    fn is_uneven(&self) -> bool {
        self.rules.mask != MaskKind::Dense || self.takes_block_lists()
    }

    /// Returns whether tiles read their key blocks from lists, which is so with a mask function.
    pub fn takes_block_lists(&self) -> bool {
        self.rules.mask_function.is_some()
    }

    /// Returns whether the inputs have 8 bits, which take other loops and transposed values.
    pub fn is_fp8(&self) -> bool {
        self.element.bytes() == 1
    }

    /// Returns the query rows of a tile: 64 for each consumer warpgroup.
    pub fn query_rows(&self) -> u32 {
        self.warpgroups.saturating_mul(64)
    }

    /// Returns the layout of a query tile. The head dimension is padded to whole `wgmma` steps; TMA
    /// fills the padding with zeros.
    pub fn query_layout(&self) -> TileLayout {
        self.layout(self.query_rows(), self.inner_extent())
    }

    /// Returns the layout of a key tile, padded like the query tile.
    pub fn key_layout(&self) -> TileLayout {
        self.layout(self.key_block, self.inner_extent())
    }

    /// Returns the inner extent of `Q K^T`: the head dimension in whole `wgmma` steps of 32 bytes.
    fn inner_extent(&self) -> u32 {
        self.head_dim.next_multiple_of(32 / self.element.bytes().clamp(1, 2))
    }

    /// Returns the layout of a value tile as TMA loads it: all keys of a key block, or half of
    /// them.
    pub fn value_layout(&self) -> TileLayout {
        self.value_part().1
    }

    /// Returns the layout of a transposed value tile: one row for each value column.
    fn transposed_layout(&self) -> TileLayout {
        TileLayout::widest(self.element, self.value_head_dim, self.key_block)
    }

    /// Returns the layout of the staging tile through which one warpgroup stores its output: as
    /// many columns as fit into shared memory beside the inputs.
    fn output_layout(&self) -> TileLayout {
        let columns = self.value_head_dim.next_multiple_of(64);
        let fits = |columns: &u32| {
            let layout = self.staged(*columns);
            let staged = self.warpgroups.saturating_mul(layout.bytes()).saturating_add(1024);
            self.input_bytes().saturating_add(staged) <= Target::SM_90A.shared_memory_limit()
        };
        let columns = [columns, 128, 64].into_iter().filter(|c| *c <= columns).find(fits);
        self.staged(columns.unwrap_or(64))
    }

    fn staged(&self, columns: u32) -> TileLayout {
        TileLayout { element: self.output, rows: 64, columns, swizzle: Swizzle::B128 }
    }

    fn layout(&self, rows: u32, columns: u32) -> TileLayout {
        if self.is_fp8() {
            return TileLayout::widest(self.element, rows, columns);
        }
        TileLayout { element: self.element, rows, columns, swizzle: Swizzle::B128 }
    }

    /// Returns the number of value stages that TMA fills and the layout of one stage.
    ///
    /// With 8-bit inputs the transposed values need stages of their own. Where these and whole
    /// value stages do not fit into shared memory together, a stage holds half of a key block, so
    /// that one half is loaded while the other is transposed; failing that, there is one whole
    /// stage.
    fn value_part(&self) -> (u32, TileLayout) {
        let least = self.staged(64).bytes().saturating_mul(self.warpgroups).saturating_add(1024);
        let part = |keys: u32| self.layout(keys, self.value_head_dim);
        let fits = |(stages, part): &(u32, TileLayout)| {
            let bytes = self.input_bytes_with(*stages, *part).saturating_add(least);
            bytes <= Target::SM_90A.shared_memory_limit()
        };
        let whole = (self.stages, part(self.key_block));
        if !self.is_fp8() || fits(&whole) {
            return whole;
        }
        let half = (2, part(self.key_block / 2));
        if self.key_block.is_multiple_of(64) && fits(&half) { half } else { (1, whole.1) }
    }

    fn input_bytes(&self) -> u32 {
        let (stages, part) = self.value_part();
        self.input_bytes_with(stages, part)
    }

    fn input_bytes_with(&self, value_stages: u32, value_part: TileLayout) -> u32 {
        let transposed = if self.is_fp8() { self.transposed_layout().bytes() } else { 0 };
        [
            (self.query_buffers, self.query_layout().bytes()),
            (self.stages, self.key_layout().bytes()),
            (value_stages, value_part.bytes()),
            (self.stages, transposed),
        ]
        .into_iter()
        .fold(0, |sum, (count, bytes)| sum.saturating_add(count.saturating_mul(bytes)))
    }

    /// Returns the register budgets (`setmaxnreg`) of a producer thread and of a consumer thread.
    /// With one consumer warpgroup there is no need to shift registers: each thread of the two
    /// warpgroups can have the maximum. Chunked masks and block lists need more registers in the
    /// producer than the minimum of 24.
    fn register_budgets(&self) -> Option<(u32, u32)> {
        match self.warpgroups {
            1 => None,
            2 if self.rules.mask == MaskKind::Chunked || self.takes_block_lists() => {
                Some((40, 232))
            }
            // The warps that transpose values keep several loads in flight.
            2 if self.is_fp8() => Some((40, 232)),
            2 => Some((24, 240)),
            _ => Some((32, 160)),
        }
    }

    /// Builds the kernel.
    ///
    /// Parameters:
    ///
    /// - the tensor maps of queries, keys, values and output over (dimension, position, head,
    ///   batch);
    /// - the address of the log-sum-exps, (batch, head, query) in `f32`;
    /// - the query length and the key length, which must not be zero;
    /// - the softmax scale, which must be positive, or the factors of capped scores
    ///   ([`Scale`](crate::parameter::Scale));
    /// - the address of the tile lists ([`TileLists`]), or without lists the number of tiles;
    /// - the [`Divisor`]s (number, multiplier, shift) of the query tiles per head, of the query
    ///   heads, and of the query heads per key head;
    /// - as far as the rules need them: the window's reach to the left and right, the divisor of
    ///   the chunk, the address and shape of the block lists, the ALiBi slopes with their stride
    ///   from sequence to sequence, the sinks, and the descales of 8-bit inputs;
    /// - the tensors that mask and score functions load from;
    /// - with stream-K: the workspace of partial tiles, and their flags, all zero.
    ///
    /// The grid may have any number of thread blocks; with tile lists, exactly
    /// [`TileLists::blocks`].
    pub fn program(&self) -> Result<Program, Error> {
        self.build(false)
    }

    /// Builds the kernel with timestamps. It has one more parameter at the end: the address of
    /// [`PROBE_WORDS`] 64-bit words for each thread block and consumer warpgroup, all zero.
    pub fn probed(&self) -> Result<Program, Error> {
        self.build(true)
    }

    fn build(&self, probed: bool) -> Result<Program, Error> {
        let name = if probed { self.name() + "_probed" } else { self.name() };
        self.build_with(name, self.fault(), |k| self.write(k, probed))
    }

    /// Builds a kernel with these tiles, whose body `write` emits.
    fn build_with(
        &self,
        name: String,
        fault: Option<&str>,
        write: impl FnOnce(&mut Builder),
    ) -> Result<Program, Error> {
        let builder = |name| resident_blocks(name, Target::SM_90A, 128 * (self.warpgroups + 1), 1);
        build(name, fault, builder, write)
    }

    /// Returns why this configuration cannot be built, if it cannot.
    fn fault(&self) -> Option<&'static str> {
        let fp8 = self.element == Element::E4M3;
        let least = if fp8 { 16 } else { 8 };
        let wrong = |dim: u32| dim == 0 || dim > 256 || !dim.is_multiple_of(least);
        first_fault([
            (!fp8 && !is_16_bit(self.element), "the element is not f16, bf16 or e4m3"),
            (
                !is_16_bit(self.output) || !fp8 && self.output != self.element,
                "the output is neither of the inputs' element nor rounded from 8-bit ones",
            ),
            (
                fp8 && (!self.key_block.is_multiple_of(32) || self.query_source != Source::Shared),
                "8-bit inputs take key blocks of 32 and queries from shared memory",
            ),
            (fp8 && self.form != Form::COMPACT, "with 8-bit inputs there is the compact form only"),
            (
                wrong(self.head_dim) || wrong(self.value_head_dim),
                "a head dimension is not a multiple of 16 bytes up to 256 elements",
            ),
            (
                !(1..=3).contains(&self.warpgroups),
                "there are one, two or three consumer warpgroups",
            ),
            (
                self.key_block == 0 || self.key_block > 256 || !self.key_block.is_multiple_of(16),
                "the key block is not a multiple of 16 up to 256",
            ),
            (self.stages == 0 || self.query_buffers == 0, "there is at least one stage"),
            (
                self.stream_k && (fp8 || self.is_uneven()),
                "keys are shared out with 16-bit inputs and without a mask only",
            ),
        ])
    }

    fn write(&self, k: &mut Builder, probed: bool) {
        let tiles =
            [self.query_layout(), self.key_layout(), self.value_layout(), self.output_layout()];
        let maps = Maps::parameters(k, tiles.map(|tile| tile.tensor_box(4)));
        let lse: Reg<GlobalAddress> = Tensor::Lse.address(k);
        let query_length: Reg<U32> = Number::QueryLength.read(k);
        let key_length: Reg<U32> = Number::KeyLength.read(k);
        let mut scores = self.score_rule(k, self.rules.caps_last());
        if self.is_fp8() && self.rules.caps_last() {
            scores = scores.with_small_tanh();
        }
        let schedule =
            StaticScheduler::parameters(k, self, query_length, key_length, scores.scale_log2);
        let functions =
            Functions::parameters(k, &self.rules).unscaled(&self.rules, scores.inverse).in_pairs();
        let partials = self.stream_k.then(|| Partials::parameters(k, self));
        let probe = probe::parameter(k, probed);
        let shared = self.shared(k);
        let thread = k.thread_index();
        k.if_(thread.equals(0), |k| {
            maps.prefetch(k);
            shared.init(k);
        });
        k.barriers_ready();
        wait_for_earlier_grids(k);
        self.roles(
            k,
            &shared,
            self.register_budgets(),
            |k| producer::produce(k, self, &shared, &maps, &schedule),
            |k| {
                let given = Consumers {
                    forward: self,
                    shared: &shared,
                    tiles: &schedule,
                    scores,
                    functions,
                    results: Results { output: maps.output, lse, partials },
                    probe,
                    index_from_one_lane: self.index_from_one_lane(),
                };
                consumer::consume(k, given);
            },
        );
    }

    /// Returns whether a warpgroup's index is broadcast from one lane
    /// ([`Warpgroup::new`](warpgroup::Warpgroup::new)), which saves up to 65 moves to uniform
    /// registers in the main loop. On an H200 this gains 1 to 4 % where the index is part of the
    /// query address and warpgroups take turns. It costs 1 to 2 % with queries in registers, 0.5 to
    /// 1.4 % without turns and 2.5 % with capped scores; with functions the loop spills.
    fn index_from_one_lane(&self) -> bool {
        let functions = self.rules.mask_function.is_some() || self.rules.score_function.is_some();
        let plain = !self.rules.has_score_derivative() && !functions;
        self.query_source == Source::Shared && self.ping_pong && plain
    }

    /// Declares the parameters of the score rule, which turns products into scores, with exponents
    /// of capped scores straight from the products where `capped_exponents` says so.
    fn score_rule(&self, k: &mut Builder, capped_exponents: bool) -> ScoreRule {
        let scores = ScoreRule::parameters(k, &self.rules);
        if self.is_fp8() {
            // Products of 8-bit inputs have descale factors of their own.
            scores
        } else if capped_exponents {
            scores.with_capped_exponents(k)
        } else {
            scores.with_scale_last(k, &self.rules)
        }
    }

    /// Reserves shared memory for the tiles and their pipelines.
    fn shared(&self, k: &mut Builder) -> Shared {
        // One lane of each warp arrives when the warp releases a stage.
        let warps = 4 * self.warpgroups;
        let (value_stages, value_part) = self.value_part();
        let readers = if self.is_fp8() { transposer::WARPS } else { warps };
        Shared {
            queries: SharedTiles::new(k, "queries", self.query_layout(), self.query_buffers),
            keys: SharedTiles::new(k, "keys", self.key_layout(), self.stages),
            values: SharedTiles::new(k, "values", value_part, value_stages),
            output: SharedTiles::new(k, "output", self.output_layout(), self.warpgroups),
            query_pipeline: Pipeline::new(k, "queries", self.query_buffers, warps),
            key_pipeline: Pipeline::new(k, "keys", self.stages, warps),
            value_pipeline: Pipeline::new(k, "values", value_stages, readers),
            transposed: self.is_fp8().then(|| Transposed::new(k, self, value_stages, warps)),
        }
    }

    /// Splits the thread block into roles: one thread of warpgroup 0 produces, the other warpgroups
    /// consume. With 8-bit inputs, the other three warps of warpgroup 0 transpose the values.
    fn roles(
        &self,
        k: &mut Builder,
        shared: &Shared,
        budgets: Option<(u32, u32)>,
        produce: impl FnOnce(&mut Builder),
        consume: impl FnOnce(&mut Builder),
    ) {
        let mut producer = Role::warpgroups("producer", 0..1);
        let mut consumer = Role::warpgroups("consumer", 1..1 + self.warpgroups);
        if let Some((producer_registers, consumer_registers)) = budgets {
            producer = producer.registers(producer_registers);
            consumer = consumer.registers(consumer_registers);
        }
        // Loads in flight that a transposing warp has registers for.
        let at_once = if budgets.is_some_and(|(registers, _)| registers < 32) { 2 } else { 4 };
        let thread = k.thread_index();
        k.role(producer, |k| match &shared.transposed {
            None => k.if_(thread.equals(0), produce),
            Some(transposed) => k.if_else(
                thread.less(32),
                |k| k.if_(thread.equals(0), produce),
                |k| transposed.transpose(k, shared, at_once),
            ),
        });
        k.role(consumer, consume);
    }
}

impl Shared {
    /// Initialises the mbarriers of all pipelines; called by one thread.
    fn init(&self, k: &mut Builder) {
        self.query_pipeline.init(k);
        self.key_pipeline.init(k);
        self.value_pipeline.init(k);
        if let Some(transposed) = &self.transposed {
            transposed.init(k);
        }
    }
}
