//! Scenes of the decode kernel: sequences of unequal lengths over a cache,
//! contiguous or in shuffled pages, with what changes scores.

use kernels::{Decode, Divisor};
use ptx::Element;

use super::{Expected, Random, Scene, SceneError, encode, round};
use crate::{Argument, Memory};

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
    /// Teams of blocks.
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
}

/// The inputs as numbers, gathered by sequence.
struct Inputs<'a> {
    size: &'a DecodeSize,
    decode: &'a Decode,
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
        let program = decode.program()?;
        let DecodeSize { lengths, queries, heads, key_heads, page_size, teams, .. } = size;
        let (batch, group) = (lengths.len(), heads / key_heads.max(&1));
        if batch == 0 || group == 0 || heads % key_heads != 0 || *queries == 0 || *teams == 0 {
            return Err(SceneError::Size("the problem is empty or its heads do not divide".into()));
        }
        if decode.paged && size.packed_keys {
            return Err(SceneError::Size("keys are in pages or packed, not both".into()));
        }
        let (dim, value_dim) = (decode.head_dim as usize, decode.value_head_dim as usize);
        let capacity = lengths.iter().copied().max().unwrap_or(0).max(1);
        let (entries, rows) = match decode.paged {
            true => (batch * capacity.div_ceil(*page_size) + 1, *page_size),
            false if size.packed_keys => (1, lengths.iter().sum::<usize>() + batch),
            false => (batch, capacity),
        };
        let starts: Vec<u32> = (0..=batch)
            .map(|sequence| (lengths[..sequence].iter().sum::<usize>() + sequence) as u32)
            .collect();
        let columns = capacity.div_ceil(rows);
        let mut random = Random::new(11);
        // Pages in an order of their own, none of them shared.
        let mut order: Vec<usize> = (0..entries).collect();
        for index in (1..entries).rev() {
            let other = (random.number().abs() * 1e6) as usize % (index + 1);
            order.swap(index, other);
        }
        let in_pages = if decode.paged { batch * columns } else { 0 };
        let table: Vec<u32> = order[..in_pages].iter().map(|page| *page as u32).collect();
        let place = |sequence: usize, key: usize| match decode.paged {
            true => (table[sequence * columns + key / rows] as usize, key % rows),
            false if size.packed_keys => (0, starts[sequence] as usize + key),
            false => (sequence, key),
        };

        let element = decode.element;
        let q = random.numbers(element, batch * queries * heads * dim, 2.0);
        // Whatever is no key of a sequence is NaN: it must not be seen.
        let mut cache = |dim: usize| {
            let mut memory = vec![f64::NAN; entries * rows * key_heads * dim];
            let sequences = (0..batch).map(|sequence| {
                let length = lengths[sequence];
                let values = random.numbers(element, length * key_heads * dim, 2.0);
                for key in 0..length {
                    let (entry, row) = place(sequence, key);
                    let width = key_heads * dim;
                    memory[(entry * rows + row) * width..][..width]
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
        let team = decode.team(*key_heads as u32, (queries * group) as u32);
        let grid = team * *teams as u32;
        let parts = memory.output("parts", decode.workspace_bytes(grid) as usize);
        let counters = memory.input_u32("counters", &vec![0; batch * team as usize]);
        let length_words: Vec<u32> = lengths.iter().map(|length| *length as u32).collect();
        let lengths_buffer = memory.input_u32("lengths", &length_words);
        let table_buffer = memory.input_u32("block table", &table);
        let starts_buffer = memory.input_u32("key starts", &starts);
        let used: Vec<u32> = (0..batch).map(|sequence| size.used(sequence) as u32).collect();
        let used_buffer = memory.input_u32("query lengths", &used);
        let slopes_buffer = memory.input_f32("slopes", &slopes);
        let sinks_buffer = memory.input_f32("sinks", &sinks);

        let number = |number: usize| Argument::U32(number as u32);
        let log2e = std::f32::consts::LOG2_E;
        let argument = |name: &str| -> Option<Argument> {
            let strided = [
                ("queries", *queries, *heads, dim),
                ("keys", rows, *key_heads, dim),
                ("values", rows, *key_heads, value_dim),
                ("output", *queries, *heads, value_dim),
            ];
            for (tensor, rows, heads, dim) in strided {
                match name.strip_prefix(tensor).map(str::trim) {
                    Some("batch stride") if heads == *key_heads && size.packed_keys => {
                        return Some(Argument::U64(0));
                    }
                    Some("batch stride") => {
                        return Some(Argument::U64((rows * heads * dim) as u64));
                    }
                    Some("row stride") => return Some(Argument::U64((heads * dim) as u64)),
                    Some("head stride") => return Some(Argument::U64(dim as u64)),
                    _ => {}
                }
            }
            let (divisor, part) = name.split_once(", ").unwrap_or((name, "number"));
            let divisor = match divisor {
                "key heads" => Some(*key_heads),
                "query heads per key head" => Some(group),
                "blocks of a team" => Some(team as usize),
                "teams" => Some(*teams),
                _ => None,
            };
            if let Some(divisor) = divisor {
                let divisor = Divisor::new(divisor as u32);
                return Some(Argument::U32(match part {
                    "multiplier" => divisor.multiplier,
                    "shift" => divisor.shift,
                    _ => divisor.number,
                }));
            }
            Some(match name {
                "queries" => Argument::Address(query_buffer, 0),
                "keys" => Argument::Address(key_buffer, 0),
                "values" => Argument::Address(value_buffer, 0),
                "output" => Argument::Address(output, 0),
                "lse" => Argument::Address(lse, 0),
                "lse batch stride" => Argument::U64((heads * queries) as u64),
                "lse head stride" => Argument::U64(*queries as u64),
                "parts" => Argument::Address(parts, 0),
                "counters" => Argument::Address(counters, 0),
                "lengths" => Argument::Address(lengths_buffer, 0),
                "left padding" | "query starts" | "batch entries" => Argument::U64(0),
                "block table" => Argument::Address(table_buffer, 0),
                "key starts" if size.packed_keys => Argument::Address(starts_buffer, 0),
                "query lengths" if !size.used.is_empty() => Argument::Address(used_buffer, 0),
                "key starts" | "query lengths" => Argument::U64(0),
                "slopes" => Argument::Address(slopes_buffer, 0),
                "slopes batch stride" => number(0),
                "sinks" => Argument::Address(sinks_buffer, 0),
                "batch" => number(batch),
                "query length" | "query rows" => number(*queries),
                "key length" => number(capacity),
                "key rows" => number(if size.packed_keys { rows } else { capacity }),
                "batch entries there are" => number(entries),
                "pages of a sequence" => number(columns),
                "page size" => number(rows),
                "least tiles" => number(1),
                "window left" => Argument::S32(size.window.0),
                "window right" => Argument::S32(size.window.1),
                "scale times log2(e)" => Argument::F32(scale * log2e),
                "scale over softcap" => Argument::F32(scale / SOFTCAP as f32),
                "softcap times log2(e)" => Argument::F32(SOFTCAP as f32 * log2e),
                _ => return None,
            })
        };
        let arguments = program
            .parameters
            .iter()
            .map(|parameter| {
                let unknown =
                    || SceneError::Size(format!("nothing is known for `{}`", parameter.name));
                argument(&parameter.name).ok_or_else(unknown)
            })
            .collect::<Result<_, _>>()?;

        let inputs = Inputs { size, decode: &decode, q, k, v, slopes, sinks, scale: scale as f64 };
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
}

impl Inputs<'_> {
    /// Outputs, the weighted magnitudes of the values, and log-sum-exps, with scores, weights and
    /// outputs stored as `store` has it.
    fn attend(&self, store: impl Fn(f64) -> f64) -> [Vec<f64>; 3] {
        let DecodeSize { lengths, queries, heads, key_heads, window, .. } = self.size;
        let decode = self.decode;
        let (dim, value_dim) = (decode.head_dim as usize, decode.value_head_dim as usize);
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
                        if decode.softcap {
                            score = SOFTCAP * (score / SOFTCAP).tanh();
                        }
                        if decode.alibi {
                            let distance = (position - *key as i64).abs() as f64;
                            score -= self.slopes[head] as f64 * distance;
                        }
                        score
                    };
                    let sink = match decode.sinks {
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
        let element = self.decode.element;
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
