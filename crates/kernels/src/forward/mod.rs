//! Attention forward on Hopper.
//!
//! One producer thread brings tiles with TMA; one to three consumer warpgroups
//! take 64 query rows each and walk the key blocks from the last to the first.
//! Inside a warpgroup the tensor cores and the exponentials overlap:
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
//! Warpgroups take turns at the tensor cores, so that one computes
//! exponentials while another multiplies. Blocks stay and take tile after tile.
//! The parts have a file each: `producer`, `consumer` (the loop above),
//! `walk`, `warpgroup`, `rule`, `softmax`, `epilogue`; `scheduler` says what they
//! must know of tiles, which come from `static_scheduler` with `lists`, or for
//! ragged batches ([`Prefill`]) from `dynamic_scheduler` or `single_tile`. `tuned` says what serves
//! which problem, and `probe` takes the time of all that.
//!
//! With inputs of 8 bits `fp8` is the consumers' loop, and `transposer` turns values on the way.

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
    Swizzle, Target, TensorMap, TileLayout, U32,
};

use crate::attention::function::lower::Functions;
use crate::attention::scores::ScoreRule;
use crate::attention::{MaskKind, Rules};
use crate::parameter::{Number, Tensor};
use crate::product::Source;
use crate::{Error, build};
use consumer::Consumers;
use epilogue::Epilogue;
use partials::Partials;
pub(crate) use partials::{FRESH, PARTIAL_STEP};
use static_scheduler::StaticScheduler;
use transposer::Transposed;

/// What the kernel is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Forward {
    /// The element of queries, keys and values: `F16`, `BF16` or `E4M3`.
    pub element: Element,
    /// The element of the output: that of the inputs, or of 8-bit ones `F16` or `BF16`.
    pub output: Element,
    /// The width of queries and keys: a multiple of 16 bytes up to 256 elements.
    pub head_dim: u32,
    /// The width of values and outputs: likewise.
    pub value_head_dim: u32,
    /// Which keys a query sees, and what changes scores.
    pub rules: Rules,
    /// Consumer warpgroups, of 64 query rows each.
    pub warpgroups: u32,
    /// Keys in a block: a multiple of 16, of 32 with 8-bit inputs.
    pub key_block: u32,
    /// Stages of the key pipeline and of the value pipeline; with 8-bit inputs also of transposed
    /// values.
    pub stages: u32,
    /// Query tiles in shared memory: 2 lets the next tile's come early.
    pub query_buffers: u32,
    /// Where the tensor cores take queries from.
    pub query_source: Source,
    /// Whether warpgroups take turns at the tensor cores.
    pub ping_pong: bool,
    /// How the code is laid out: the same results bit for bit.
    pub form: Form,
    /// Whether the tiles of a last, incomplete round are shared out by keys (stream-K): with 16-bit
    /// inputs, where no mask makes tiles of unequal length.
    pub stream_k: bool,
}

/// How a kernel's code is laid out. Every form gives the same results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    /// Whether a tile's first scores are computed while the one before is
    /// stored. It shortens short sequences.
    pub overlap_tiles: bool,
    /// Whether the body of the loop is two steps, which lets two sets of
    /// registers for probabilities change places, instead of one and a copy.
    pub two_steps: bool,
    /// Whether the guard's slow path has exponentials of its own, instead of
    /// going back to those of the fast one.
    pub slow_path_apart: bool,
}

impl Form {
    /// What runs fastest in most configurations.
    pub const FULL: Form = Form { overlap_tiles: true, two_steps: true, slow_path_apart: true };
    /// One copy of everything: half the time to compile. It runs while
    /// another form is compiled.
    pub const COMPACT: Form =
        Form { overlap_tiles: false, two_steps: false, slow_path_apart: false };

    /// What distinguishes it from [`Form::FULL`], for names.
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

/// Named barriers of the block; 0 is for all its threads. There is one of each
/// for every consumer warpgroup.
mod barrier {
    /// Whose turn it is at the tensor cores.
    pub(super) const TURN: u32 = 1;
    /// The threads of one warpgroup, around the storing of its output.
    pub(super) const OUTPUT: u32 = 4;
}

/// The shared memory and what signals in it.
struct Shared {
    queries: SharedTiles,
    keys: SharedTiles,
    values: SharedTiles,
    output: SharedTiles,
    query_pipeline: Pipeline,
    key_pipeline: Pipeline,
    value_pipeline: Pipeline,
    /// Values as the tensor cores take those of 8 bits.
    transposed: Option<Transposed>,
}

/// The tensor maps.
struct Maps {
    queries: TensorMap,
    keys: TensorMap,
    values: TensorMap,
    output: TensorMap,
}

impl Forward {
    /// The name of this configuration.
    pub fn name(&self) -> String {
        self.named("forward", &format!("_{}", self.rules.name()))
    }

    /// The name of a kernel of some family with these tiles.
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

    /// Whether its blocks take tiles from [`TileLists`]: where a mask makes tiles of unequal length,
    /// or tiles are shared out by keys.
    pub fn takes_lists(&self) -> bool {
        self.stream_k || self.is_uneven()
    }

    /// Whether a mask makes tiles of unequal length.
    fn is_uneven(&self) -> bool {
        self.rules.mask != MaskKind::Dense || self.takes_block_lists()
    }

    /// Whether its tiles take key blocks from lists: where a mask is a function.
    pub fn takes_block_lists(&self) -> bool {
        self.rules.mask_function.is_some()
    }

    /// Whether its inputs have 8 bits: other loops, and values transposed on the way.
    pub fn is_fp8(&self) -> bool {
        self.element.bytes() == 1
    }

    /// Query rows of a tile.
    pub fn query_rows(&self) -> u32 {
        self.warpgroups.saturating_mul(64)
    }

    /// The tile of queries. The inner extent is padded to whole steps of the
    /// tensor cores; TMA fills what lies beyond the tensor with zeros.
    pub fn query_layout(&self) -> TileLayout {
        self.layout(self.query_rows(), self.inner_extent())
    }

    /// The tile of keys.
    pub fn key_layout(&self) -> TileLayout {
        self.layout(self.key_block, self.inner_extent())
    }

    /// The inner extent of scores in whole steps of the tensor cores, of 32 bytes each.
    fn inner_extent(&self) -> u32 {
        self.head_dim.next_multiple_of(32 / self.element.bytes().clamp(1, 2))
    }

    /// The tile in which values come: all keys of a block, or a part of them.
    pub fn value_layout(&self) -> TileLayout {
        self.value_part().1
    }

    /// The tile of transposed values: a row for each column of values.
    pub fn transposed_layout(&self) -> TileLayout {
        TileLayout::widest(self.element, self.value_head_dim, self.key_block)
    }

    /// What one warpgroup stores at a time: as many columns as fit beside the rest.
    pub fn output_layout(&self) -> TileLayout {
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

    /// Stages of values as they come, and the tile of one. Transposed ones have stages of their own
    /// behind them; where not all fit into shared memory, values come in halves of a block, so that
    /// one part is copied while another is transposed.
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

    /// Registers of a producer's and of a consumer's thread. Two warpgroups
    /// together have as many as a thread can use; dividing by chunks takes the
    /// producer more than the least it can have.
    fn register_budgets(&self) -> Option<(u32, u32)> {
        match self.warpgroups {
            1 => None,
            2 if self.rules.mask == MaskKind::Chunked || self.takes_block_lists() => {
                Some((40, 232))
            }
            // Warps that transpose hold several loads.
            2 if self.is_fp8() => Some((40, 232)),
            2 => Some((24, 240)),
            _ => Some((32, 160)),
        }
    }

    /// Builds the kernel.
    ///
    /// Parameters, in order: the tensor maps of queries, keys, values and
    /// output over (dimension, position, head, batch); the address of the
    /// log-sum-exps, (batch, head, query) in `f32`; query length, key length;
    /// the scale, which must be positive, or the two of capped scores
    /// ([`Scale`](crate::parameter::Scale)); the address of the
    /// tile lists ([`TileLists`]) if there are any, else tiles in all; then
    /// the [`Divisor`]s (number, multiplier, shift) of query tiles of a head,
    /// of query heads, and of query heads per key head; then, as far as the
    /// rules ask for them, the reach to the left and right, the divisor of the
    /// chunk, the slopes with their stride from sequence to sequence, and the
    /// sinks; with stream-K where parts of tiles are left, and their flags, all
    /// zero. Key length must not be zero. Any number of blocks; with lists,
    /// one for each.
    pub fn program(&self) -> Result<Program, Error> {
        self.build(false)
    }

    /// Builds the kernel with timestamps: one more parameter at the end, the address of
    /// [`PROBE_WORDS`] words of 64 bits for each block and consumer warpgroup, all zero.
    pub fn probed(&self) -> Result<Program, Error> {
        self.build(true)
    }

    fn build(&self, probed: bool) -> Result<Program, Error> {
        let name = if probed { self.name() + "_probed" } else { self.name() };
        self.build_with(name, |k| self.write(k, probed))
    }

    /// Builds a kernel with these tiles.
    fn build_with(&self, name: String, write: impl FnOnce(&mut Builder)) -> Result<Program, Error> {
        let threads = 128 * (self.warpgroups + 1);
        build(name, self.fault(), (Target::SM_90A, threads, 1), write)
    }

    /// Why there is no such kernel.
    fn fault(&self) -> Option<&'static str> {
        let sixteen_bits = |element| matches!(element, Element::F16 | Element::BF16);
        let fp8 = self.element == Element::E4M3;
        let least = if fp8 { 16 } else { 8 };
        let wrong = |dim: u32| dim == 0 || dim > 256 || !dim.is_multiple_of(least);
        let faults = [
            (!fp8 && !sixteen_bits(self.element), "the element is not f16, bf16 or e4m3"),
            (
                !sixteen_bits(self.output) || !fp8 && self.output != self.element,
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
        ];
        faults.into_iter().find(|(faulty, _)| *faulty).map(|(_, fault)| fault)
    }

    fn write(&self, k: &mut Builder, probed: bool) {
        let maps = Maps {
            queries: Tensor::Query.map(k, self.query_layout().tensor_box(4)),
            keys: Tensor::Key.map(k, self.key_layout().tensor_box(4)),
            values: Tensor::Value.map(k, self.value_layout().tensor_box(4)),
            output: Tensor::Output.map(k, self.output_layout().tensor_box(4)),
        };
        let lse: Reg<GlobalAddress> = Tensor::Lse.address(k);
        let query_length: Reg<U32> = Number::QueryLength.read(k);
        let key_length: Reg<U32> = Number::KeyLength.read(k);
        let two_ways = !self.rules.alibi && self.rules.score_function.is_none();
        let scores = self.score_rule(k).with_small_tanh(two_ways);
        let schedule =
            StaticScheduler::parameters(k, self, query_length, key_length, scores.scale_log2);
        let functions =
            Functions::parameters(k, &self.rules).unscaled(&self.rules, scores.inverse).in_pairs();
        let partials = self.stream_k.then(|| Partials::parameters(k, self));
        let probe = probe::parameter(k, probed);
        let shared = self.shared(k);
        let thread = k.thread_index();
        k.if_(thread.equals(0), |k| shared.init(k));
        k.barriers_ready();
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
                    epilogue: Epilogue { output: maps.output, lse, partials },
                    probe,
                    index_from_one_lane: self.index_from_one_lane(),
                };
                consumer::consume(k, given);
            },
        );
    }

    /// Whether warpgroups take their index from one lane, which spares the loop up to 65 moves to uniform
    /// registers. On an H200 that is worth 1 to 4 % where the index is in the address of queries and
    /// warpgroups take turns. It costs 1 to 2 % where queries are in registers, 0.5 to 1.4 % where there are
    /// no turns and 2.5 % under a softcap; with functions the loop spills.
    fn index_from_one_lane(&self) -> bool {
        let functions = self.rules.mask_function.is_some() || self.rules.score_function.is_some();
        let plain = !self.rules.softcap && !functions;
        self.query_source == Source::Shared && self.ping_pong && plain
    }

    /// How products become scores.
    fn score_rule(&self, k: &mut Builder) -> ScoreRule {
        let scores = ScoreRule::parameters(k, &self.rules);
        // Numbers of 8 bits have factors of their own.
        if self.is_fp8() { scores } else { scores.with_scale_last(k, &self.rules) }
    }

    /// Reserves the shared memory.
    fn shared(&self, k: &mut Builder) -> Shared {
        // A warp leader for its lanes when it gives a stage back.
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

    /// One thread produces, some warpgroups consume. The producer's other warps transpose values
    /// where that has to be done.
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
        // Loads that a warp which transposes has registers for.
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
    /// One thread makes the barriers ready.
    fn init(&self, k: &mut Builder) {
        self.query_pipeline.init(k);
        self.key_pipeline.init(k);
        self.value_pipeline.init(k);
        if let Some(transposed) = &self.transposed {
            transposed.init(k);
        }
    }
}
