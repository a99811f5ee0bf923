//! Scenes of the kernels over sequences, decode and prefill: unequal lengths,
//! contiguous, packed or in shuffled pages, with what changes scores.

use kernels::sequencer::Slice;
use kernels::{Decode, Prefill, Sequencer};
use ptx::{Element, Program, TensorBox};

use super::arguments::Arguments;
use super::cache::Cache;
use super::{Expected, Random, Scene, SceneError, encode, round};
use crate::{Argument, BufferId, Memory, TensorMapArgument};

/// The extents of a batch of sequences; the kernel's configuration has the rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeSize {
    /// Keys of each sequence.
    pub lengths: Vec<usize>,
    /// Queries of each sequence that there is room for.
    pub queries: usize,
    /// How many of them each sequence uses; all of them when empty.
    pub used: Vec<usize>,
    /// Whether keys are packed, sequence after sequence with a row between them that is of none.
    pub packed_keys: bool,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub key_heads: usize,
    /// Positions of a page, where the kernel has pages.
    pub page_size: usize,
    /// Teams of blocks; blocks, where the kernel has no teams.
    pub teams: usize,
    /// Keys before and after its position that a query sees.
    pub window: (i32, i32),
}

/// A window that hides nothing.
const OPEN: i32 = 1 << 29;

impl DecodeSize {
    /// Queries that a sequence uses.
    fn used(&self, sequence: usize) -> usize {
        self.used.get(sequence).copied().unwrap_or(self.queries)
    }

    /// Small: sequences of several tiles, of one key and of none, over more teams than there are
    /// sequences, so that parts are combined.
    pub fn small(decode: &Decode) -> Self {
        let tile = decode.tile_keys as usize;
        DecodeSize {
            lengths: vec![5 * tile + 3, 0, 1, tile],
            queries: 1,
            used: Vec::new(),
            packed_keys: false,
            heads: 3,
            key_heads: 1,
            page_size: tile,
            teams: 3,
            window: (OPEN, OPEN),
        }
    }

    /// The same for a prefill kernel: two tiles of queries, one and none, over a key more than
    /// there are queries, under a causal mask.
    pub fn small_prefill(prefill: &Prefill) -> Self {
        let rows = prefill.tile.query_rows() as usize;
        DecodeSize {
            lengths: vec![1, rows + 4, 0, 5],
            queries: rows + 3,
            used: vec![2, rows + 3, 1, 0],
            packed_keys: prefill.page_rows.is_none(),
            heads: 2,
            key_heads: 1,
            page_size: prefill.page_rows.map_or(1, |rows| 2 * rows) as usize,
            teams: 2,
            window: (OPEN, 0),
        }
    }
}

/// A kernel over sequences.
enum Served<'a> {
    Decode(&'a Decode),
    Prefill(&'a Prefill),
}

/// What both kernels are built for.
#[derive(Clone, Copy)]
struct Rules {
    element: Element,
    dim: usize,
    value_dim: usize,
    paged: bool,
    softcap: bool,
    alibi: bool,
    sinks: bool,
}

impl Served<'_> {
    fn program(&self) -> Result<Program, kernels::Error> {
        match self {
            Served::Decode(decode) => decode.program(),
            Served::Prefill(prefill) => prefill.program(),
        }
    }

    fn rules(&self) -> Rules {
        match *self {
            Served::Decode(decode) => Rules {
                element: decode.element,
                dim: decode.head_dim as usize,
                value_dim: decode.value_head_dim as usize,
                paged: decode.paged,
                softcap: decode.softcap,
                alibi: decode.alibi,
                sinks: decode.sinks,
            },
            Served::Prefill(prefill) => Rules {
                element: prefill.tile.element,
                dim: prefill.tile.head_dim as usize,
                value_dim: prefill.tile.value_head_dim as usize,
                paged: prefill.page_rows.is_some(),
                softcap: prefill.softcap,
                alibi: prefill.alibi,
                sinks: prefill.sinks,
            },
        }
    }
}

/// The inputs as numbers, gathered by sequence.
struct Inputs<'a> {
    size: &'a DecodeSize,
    rules: Rules,
    /// (sequence, query, head, dimension).
    q: Vec<f64>,
    /// Of each sequence: (key, head, dimension).
    k: Vec<Vec<f64>>,
    v: Vec<Vec<f64>>,
    slopes: Vec<f32>,
    sinks: Vec<f32>,
    scale: f64,
}

const SOFTCAP: f64 = 3.0;

impl Scene {
    /// Decode over sequences.
    pub fn decode(decode: Decode, size: &DecodeSize) -> Result<Self, SceneError> {
        Scene::sequences(Served::Decode(&decode), size)
    }

    /// Attention on Hopper over sequences, their tiles already in order.
    pub fn prefill(prefill: Prefill, size: &DecodeSize) -> Result<Self, SceneError> {
        Scene::sequences(Served::Prefill(&prefill), size)
    }

    fn sequences(served: Served<'_>, size: &DecodeSize) -> Result<Self, SceneError> {
        let program = served.program()?;
        let rules = served.rules();
        let Rules { element, dim, value_dim, paged, .. } = rules;
        let DecodeSize { lengths, queries, heads, key_heads, page_size, teams, .. } = size;
        let (batch, group) = (lengths.len(), heads / key_heads.max(&1));
        if batch == 0 || group == 0 || heads % key_heads != 0 || *queries == 0 || *teams == 0 {
            return Err(SceneError::Size("the problem is empty or its heads do not divide".into()));
        }
        if paged && size.packed_keys {
            return Err(SceneError::Size("keys are in pages or packed, not both".into()));
        }
        let mut random = Random::new(11);
        let places = match size.packed_keys {
            true => Cache::packed(lengths),
            false => {
                let capacity = lengths.iter().copied().max().unwrap_or(0).max(1);
                Cache::new(&mut random, batch, capacity, paged.then_some(*page_size))
            }
        };

        let q = random.numbers(element, batch * queries * heads * dim, 2.0);
        // Whatever is no key of a sequence is NaN: it must not be seen.
        let mut cache = |dim: usize| {
            let width = key_heads * dim;
            let mut memory = vec![f64::NAN; places.entries * places.rows * width];
            let sequences = (0..batch).map(|sequence| {
                let length = lengths[sequence];
                let values = random.numbers(element, length * width, 2.0);
                for key in 0..length {
                    memory[places.row(sequence, key) * width..][..width]
                        .copy_from_slice(&values[key * width..][..width]);
                }
                values
            });
            let sequences: Vec<Vec<f64>> = sequences.collect();
            (memory, sequences)
        };
        let (key_memory, k) = cache(dim);
        let (value_memory, v) = cache(value_dim);
        let slopes: Vec<f32> = (0..*heads).map(|head| 0.5 / (head + 1) as f32).collect();
        let sinks: Vec<f32> = (0..*heads).map(|head| head as f32 - 1.0).collect();
        let scale = 1.0 / (dim as f32).sqrt();

        let mut memory = Memory::new();
        let query_buffer = memory.input("queries", encode(element, &q));
        let key_buffer = memory.input("keys", encode(element, &key_memory));
        let value_buffer = memory.input("values", encode(element, &value_memory));
        let bytes = element.bytes() as usize;
        // Where not everything is written, what is not stays as it was: zero.
        let mut result = |name, bytes: usize| match size.used.is_empty() {
            true => memory.output(name, bytes),
            false => memory.input(name, vec![0; bytes]),
        };
        let output = result("output", bytes * batch * queries * heads * value_dim);
        let lse = result("lse", 4 * batch * heads * queries);
        let words = |numbers: &[usize]| numbers.iter().map(|it| *it as u32).collect::<Vec<u32>>();
        let lengths_buffer = memory.input_u32("lengths", &words(lengths));
        let used =
            (!size.used.is_empty()).then(|| memory.input_u32("query lengths", &words(&size.used)));
        let slopes_buffer = memory.input_f32("slopes", &slopes);
        let sinks_buffer = memory.input_f32("sinks", &sinks);

        let strides =
            |rows: usize, heads: usize, dim: usize| [rows * heads * dim, heads * dim, dim];
        let of_cache = |dim: usize| [places.batch_stride(key_heads * dim), key_heads * dim, dim];
        let log2e = std::f32::consts::LOG2_E;
        let known = Arguments::default()
            .tensor("Query", query_buffer, strides(*queries, *heads, dim))
            .tensor("Key", key_buffer, of_cache(dim))
            .tensor("Value", value_buffer, of_cache(value_dim))
            .tensor("Output", output, strides(*queries, *heads, value_dim))
            .tensor("Lse", lse, [heads * queries, 1, *queries])
            .address("KeyLengths", lengths_buffer)
            .list("LeftPadding", None)
            .list("QueryStarts", None)
            .list("QueryLengths", used)
            .address("Slopes", slopes_buffer)
            .number("SlopesStride", 0)
            .address("Sinks", sinks_buffer)
            .number("Batch", batch)
            .number("QueryLength", *queries)
            .number("QueryRows", *queries)
            .divisor("GroupSize", group)
            .with("ReachLeft", Argument::S32(size.window.0))
            .with("ReachRight", Argument::S32(size.window.1))
            .with("ScaleLog2", Argument::F32(scale * log2e))
            .with("ScaleOverSoftcap", Argument::F32(scale / SOFTCAP as f32))
            .with("ScaleSoftcapLog2", Argument::F32(SOFTCAP as f32 * log2e));
        let known = places.describe(&mut memory, known);
        let buffers = [query_buffer, key_buffer, value_buffer, output];
        let (known, grid) = match served {
            Served::Decode(decode) => in_teams(decode, size, &mut memory, known),
            Served::Prefill(prefill) => {
                let known = in_slices(prefill, size, &places, &mut memory, known, buffers);
                (known, *teams as u32)
            }
        };
        let arguments = known.of(&program)?;

        let inputs = Inputs { size, rules, q, k, v, slopes, sinks, scale: scale as f64 };
        let results = inputs.expected(output, lse);
        let packed = if size.packed_keys { " packed" } else { "" };
        let size = format!(
            "lengths {lengths:?}{packed}, {queries} queries, {heads} query and {key_heads} key heads, {teams} teams"
        );
        Ok(Scene { program, grid, arguments, memory, results, size })
    }

    /// The decode kernel's small scene.
    pub(super) fn small_decode(decode: &Decode) -> Result<Self, SceneError> {
        Scene::decode(*decode, &DecodeSize::small(decode))
    }

    /// The prefill kernel's.
    pub(super) fn small_prefill(prefill: &Prefill) -> Result<Self, SceneError> {
        Scene::prefill(*prefill, &DecodeSize::small_prefill(prefill))
    }
}

/// What decode alone wants to know, and its blocks.
fn in_teams(
    decode: &Decode,
    size: &DecodeSize,
    memory: &mut Memory,
    known: Arguments,
) -> (Arguments, u32) {
    let DecodeSize { lengths, queries, heads, key_heads, teams, .. } = size;
    let team = decode.team(*key_heads as u32, (queries * heads / key_heads) as u32);
    let grid = team * *teams as u32;
    let parts = memory.output("parts", decode.workspace_bytes(grid) as usize);
    let counters = memory.input_u32("counters", &vec![0; lengths.len() * team as usize]);
    let known = known
        .address("Partials", parts)
        .address("Counters", counters)
        .number("LeastTiles", 1)
        .divisor("KeyHeads", *key_heads)
        .divisor("BlocksPerTeam", team as usize)
        .divisor("Teams", *teams);
    (known, grid)
}

/// What prefill alone wants to know: tensor maps, and the tiles in order.
fn in_slices(
    prefill: &Prefill,
    size: &DecodeSize,
    places: &Cache,
    memory: &mut Memory,
    known: Arguments,
    buffers: [BufferId; 4],
) -> Arguments {
    let DecodeSize { lengths, queries, heads, key_heads, .. } = size;
    let slice = |sequence: usize| Slice {
        query_start: (sequence * queries) as u32,
        queries: size.used(sequence) as u32,
        key_start: places.row(sequence, 0) as u32,
        keys: lengths[sequence] as u32,
        output_start: (sequence * queries) as u32,
        lse_start: (sequence * heads * queries) as u32,
    };
    let slices: Vec<Slice> = (0..lengths.len()).map(slice).collect();
    let window = [size.window.0, size.window.1];
    let schedule = Sequencer::schedule(prefill.tile.query_rows(), window, &slices);
    let schedule = memory.input_u32("schedule", &schedule);
    let bytes = u64::from(prefill.tile.element.bytes());
    let map = |buffer, tensor_box: TensorBox, heads: usize, dim: u32| {
        let (heads, dim) = (heads as u64, u64::from(dim));
        let (dimensions, strides) = Prefill::slices(dim, heads, heads * dim * bytes);
        Argument::TensorMap(TensorMapArgument {
            buffer,
            offset: 0,
            dimensions: dimensions.to_vec(),
            strides: [&strides[..], &[dim * bytes]].concat(),
            tensor_box,
        })
    };
    let [query_box, key_box, value_box, output_box] = prefill.boxes();
    let (dim, value_dim) = (prefill.tile.head_dim, prefill.tile.value_head_dim);
    known
        .with("Query", map(buffers[0], query_box, *heads, dim))
        .with("Key", map(buffers[1], key_box, *key_heads, dim))
        .with("Value", map(buffers[2], value_box, *key_heads, value_dim))
        .with("Output", map(buffers[3], output_box, *heads, value_dim))
        .address("Schedule", schedule)
        .number("LseHeadStride", *queries)
        .number("QueryHeads", *heads)
        .number("HeadsPerGroup", heads / key_heads)
        .number("Entries", places.entries)
        .number("Key rows of an entry", places.rows)
}

impl Inputs<'_> {
    /// Outputs, the weighted magnitudes of the values, and log-sum-exps, with scores, weights and
    /// outputs stored as `store` has it.
    fn attend(&self, store: impl Fn(f64) -> f64) -> [Vec<f64>; 3] {
        let DecodeSize { lengths, queries, heads, key_heads, window, .. } = self.size;
        let Rules { dim, value_dim, softcap, alibi, sinks, .. } = self.rules;
        let group = heads / key_heads;
        let rows = lengths.len() * heads * queries;
        // What is no query stays as it was.
        let mut output = vec![0.0; rows * value_dim];
        let mut magnitude = vec![0.0; rows * value_dim];
        let mut lse = vec![0.0; rows];
        for (sequence, &length) in lengths.iter().enumerate() {
            let used = self.size.used(sequence);
            for query in 0..used {
                for head in 0..*heads {
                    let at = (sequence * queries + query) * heads + head;
                    let q = &self.q[at * dim..][..dim];
                    let position = length as i64 + query as i64 - used as i64;
                    let seen: Vec<usize> = (0..length)
                        .filter(|key| {
                            let distance = *key as i64 - position;
                            distance >= -(window.0 as i64) && distance <= window.1 as i64
                        })
                        .collect();
                    let score = |key: &usize| {
                        let row = key * key_heads + head / group;
                        let k = &self.k[sequence][row * dim..][..dim];
                        let mut score =
                            self.scale * q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>();
                        if softcap {
                            score = SOFTCAP * (score / SOFTCAP).tanh();
                        }
                        if alibi {
                            let distance = (position - *key as i64).abs() as f64;
                            score -= self.slopes[head] as f64 * distance;
                        }
                        score
                    };
                    let sink = match sinks {
                        true => self.sinks[head] as f64,
                        false => f64::NEG_INFINITY,
                    };
                    let scores: Vec<f64> = seen.iter().map(score).collect();
                    let exact_top = scores.iter().copied().fold(sink, f64::max);
                    let sum = |scores: &[f64], top: f64| {
                        scores.iter().map(|s| (s - top).exp()).sum::<f64>() + (sink - top).exp()
                    };
                    let place = (sequence * heads + head) * queries + query;
                    lse[place] = match exact_top == f64::NEG_INFINITY {
                        true => f64::NEG_INFINITY,
                        false => exact_top + sum(&scores, exact_top).ln(),
                    };
                    let stored: Vec<f64> = scores.into_iter().map(&store).collect();
                    let top = stored.iter().copied().fold(sink, f64::max);
                    let total = sum(&stored, top);
                    let mut row = vec![(0.0, 0.0); value_dim];
                    for (key, score) in seen.iter().zip(stored) {
                        let weight = store((score - top).exp() / total);
                        let at = key * key_heads + head / group;
                        let v = &self.v[sequence][at * value_dim..][..value_dim];
                        for ((sum, magnitude), v) in row.iter_mut().zip(v) {
                            *sum += weight * v;
                            *magnitude += weight * v.abs();
                        }
                    }
                    for (column, (sum, weighted)) in row.into_iter().enumerate() {
                        output[at * value_dim + column] = store(sum);
                        magnitude[at * value_dim + column] = weighted;
                    }
                }
            }
        }
        [output, magnitude, lse]
    }

    /// The rule of the attention scenes.
    fn expected(&self, output: crate::BufferId, lse: crate::BufferId) -> Vec<Expected> {
        let element = self.rules.element;
        let [exact, magnitude, exact_lse] = self.attend(|value| value);
        let [baseline, ..] = self.attend(|value| round(element, value));
        let differences = exact.iter().zip(&baseline).map(|(a, b)| (a - b).abs());
        let baseline_error = differences.fold(0f64, f64::max);
        let finite = |values: &[f64]| {
            values.iter().filter(|v| v.is_finite()).fold(0f64, |top, v| top.max(v.abs()))
        };
        let unit = if element == Element::F16 { 2f64.powi(-10) } else { 2f64.powi(-7) };
        let output_tolerance = 2.0 * baseline_error + unit * finite(&exact);
        let lse_tolerance = finite(&exact_lse).max(1.0) / (1 << 18) as f64;
        let results = [
            ("output", output, element, exact, magnitude, output_tolerance),
            ("lse", lse, Element::F32, exact_lse.clone(), exact_lse, lse_tolerance),
        ];
        let expected = results.map(|(name, buffer, element, exact, magnitude, tolerance)| {
            let magnitude = magnitude.into_iter().map(f64::abs).collect();
            let tolerance = vec![tolerance; exact.len()];
            Expected { name, buffer, element, exact, magnitude, tolerance }
        });
        expected.into()
    }
}
