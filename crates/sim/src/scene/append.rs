//! Scenes of the append kernel: new tokens for sequences of unequal lengths, into shuffled pages or
//! batch entries, and their queries turned.

use kernels::append::{Append, Rotary};
use ptx::Element;

use super::arguments::Arguments;
use super::cache::Cache;
use super::{Expected, Random, Scene, SceneError, encode, round};
use crate::Memory;

/// The extents of a cache and of what is appended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppendSize {
    /// Keys of each sequence before.
    pub lengths: Vec<usize>,
    /// New tokens of each sequence; packed one after the other.
    pub new: Vec<usize>,
    /// Key and value heads.
    pub key_heads: usize,
    /// Positions of a page, where the kernel has pages.
    pub page_size: usize,
    /// Positions that a sequence has room for; tokens beyond are dropped.
    pub capacity: usize,
    /// Query heads, where queries are turned.
    pub heads: usize,
    /// Queries of each sequence, packed one after the other.
    pub queries: Vec<usize>,
    /// Whether queries stand at positions one after the other; else all at the first.
    pub in_order: bool,
}

impl AppendSize {
    /// Small: sequences that begin, grow, stay as they are and run out of room.
    pub fn small() -> Self {
        AppendSize {
            lengths: vec![0, 5, 9, 7],
            new: vec![3, 1, 0, 4],
            key_heads: 3,
            page_size: 4,
            capacity: 9,
            heads: 2,
            queries: vec![1, 3, 0, 2],
            in_order: true,
        }
    }
}

/// Where sequences of these lengths begin when packed, and the last ends.
fn starts(lengths: &[usize]) -> Vec<u32> {
    (0..=lengths.len()).map(|count| lengths[..count].iter().sum::<usize>() as u32).collect()
}

/// A row, turned by the angles of its position.
fn turned(append: &Append, rotary: Rotary, row: &[f64], [cosines, sines]: [&[f64]; 2]) -> Vec<f64> {
    let half = rotary.dim as usize / 2;
    let mut turned = row.to_vec();
    for pair in 0..half {
        let (a, b) = match rotary.interleaved {
            true => (2 * pair, 2 * pair + 1),
            false => (pair, pair + half),
        };
        let (c, s) = (cosines[pair], sines[pair]);
        turned[a] = round(append.element, row[a] * c - row[b] * s);
        turned[b] = round(append.element, row[a] * s + row[b] * c);
    }
    turned
}

impl Scene {
    /// New tokens into a cache.
    pub fn append(append: Append, size: &AppendSize) -> Result<Self, SceneError> {
        let program = append.program()?;
        let AppendSize { lengths, new, key_heads, page_size, capacity, heads, queries, in_order } =
            size;
        let batch = lengths.len();
        let lists = [new.len(), queries.len()];
        if batch == 0 || lists != [batch; 2] || [key_heads, capacity, page_size].contains(&&0) {
            return Err(SceneError::Size("there is no sequence or no room".into()));
        }
        let (dim, value_dim) = (append.head_dim as usize, append.value_head_dim as usize);
        let mut random = Random::new(5);
        let places = Cache::new(&mut random, batch, *capacity, append.paged.then_some(*page_size));
        let most = |counts: &[usize]| counts.iter().copied().max().unwrap_or(0).max(1);
        let (new_starts, query_starts) = (starts(new), starts(queries));
        let (new_rows, query_rows) = (new_starts[batch] as usize, query_starts[batch] as usize);

        let element = append.element;
        let mut numbers = |count: usize| random.numbers(element, count, 2.0);
        let new_k = numbers(new_rows * key_heads * dim);
        let new_v = numbers(new_rows * key_heads * value_dim);
        let cached = places.entries * places.rows * key_heads;
        let (mut k, mut v) = (numbers(cached * dim), numbers(cached * value_dim));
        let mut q = numbers(query_rows * heads * dim);
        let half = append.rotary.map_or(1, |rotary| rotary.dim as usize / 2);
        let positions = capacity + 1;
        let (cosines, sines) = (numbers(positions * half), numbers(positions * half));

        let mut memory = Memory::new();
        let mut input = |name, values: &[f64]| memory.input(name, encode(element, values));
        let (new_keys, new_values) = (input("new keys", &new_k), input("new values", &new_v));
        let (keys, values) = (input("keys", &k), input("values", &v));
        let query_buffer = input("queries", &q);
        let (cosine_buffer, sine_buffer) = (input("cosines", &cosines), input("sines", &sines));
        let words: Vec<u32> = lengths.iter().map(|length| *length as u32).collect();
        let lengths_buffer = memory.input_u32("lengths", &words);
        let new_starts_buffer = memory.input_u32("new starts", &new_starts);
        let query_starts_buffer = memory.input_u32("query starts", &query_starts);
        let after = memory.output("lengths after", 4 * batch);

        let turn = |row: &[f64], position: usize| match append.rotary {
            // Beyond the tables: the last angles.
            Some(rotary) => {
                let first = position.min(positions - 1) * half;
                turned(&append, rotary, row, [&cosines[first..], &sines[first..]])
            }
            None => row.to_vec(),
        };
        for sequence in 0..batch {
            for token in 0..new[sequence] {
                let position = lengths[sequence] + token;
                if position >= *capacity {
                    continue;
                }
                for head in 0..*key_heads {
                    let from = (new_starts[sequence] as usize + token) * key_heads + head;
                    let to = places.row(sequence, position) * key_heads + head;
                    v[to * value_dim..][..value_dim]
                        .copy_from_slice(&new_v[from * value_dim..][..value_dim]);
                    k[to * dim..][..dim]
                        .copy_from_slice(&turn(&new_k[from * dim..][..dim], position));
                }
            }
            for query in 0..queries[sequence] {
                let position = lengths[sequence] + if *in_order { query } else { 0 };
                for head in 0..*heads {
                    let at = (query_starts[sequence] as usize + query) * heads + head;
                    let row = turn(&q[at * dim..][..dim], position);
                    q[at * dim..][..dim].copy_from_slice(&row);
                }
            }
        }
        // Without rotary embeddings the bits are the same; with, a last bit may differ.
        let slack = if append.rotary.is_some() { 2f64.powi(-6) } else { 0.0 };
        let expected = |name, buffer, exact: Vec<f64>| {
            let tolerance = exact.iter().map(|value| slack * value.abs().max(1.0)).collect();
            let magnitude = exact.iter().map(|value| value.abs()).collect();
            Expected { name, buffer, element, exact, magnitude, tolerance }
        };
        let grown: Vec<f64> = (0..batch)
            .map(|sequence| (lengths[sequence] + new[sequence]).min(*capacity))
            .map(|length| f32::from_bits(length as u32) as f64)
            .collect();
        let results = vec![
            // Whole numbers, as the floats that have their bits: every other bit shows.
            Expected {
                name: "lengths after",
                buffer: after,
                element: Element::F32,
                magnitude: grown.clone(),
                tolerance: vec![0.0; batch],
                exact: grown,
            },
            expected("keys", keys, k),
            expected("values", values, v),
            expected("queries", query_buffer, q),
        ];

        let count = batch * most(new) * key_heads;
        let turned_rows = batch * most(queries) * heads;
        let of = |rows: usize, heads: usize, dim: usize| [rows * heads * dim, heads * dim, dim];
        let in_cache = |dim: usize| of(places.rows, *key_heads, dim);
        let known = Arguments::default()
            .tensor("NewKey", new_keys, of(0, *key_heads, dim))
            .tensor("NewValue", new_values, of(0, *key_heads, value_dim))
            .tensor("Key", keys, in_cache(dim))
            .tensor("Value", values, in_cache(value_dim))
            .tensor("Query", query_buffer, of(0, *heads, dim))
            .tensor("RotatedQuery", query_buffer, of(0, *heads, dim))
            .number("AllNewRows", count)
            .divisor("KeyHeads", *key_heads)
            .divisor("NewTokens", most(new))
            .number("NewRows", new_rows)
            .address("KeyLengths", lengths_buffer)
            .address("LengthsAfter", after)
            .address("NewStarts", new_starts_buffer)
            .list("NewLengths", None)
            .number("AllRotatedRows", turned_rows)
            .divisor("QueryHeads", *heads)
            .divisor("QueryLength", most(queries))
            .number("QueryRows", query_rows)
            .address("QueryStarts", query_starts_buffer)
            .list("QueryLengths", None)
            .number("QueryStep", usize::from(*in_order))
            .address("Cosines", cosine_buffer)
            .address("Sines", sine_buffer)
            .number("RotaryPositions", positions)
            .list("RotaryStarts", None);
        let arguments = places.describe(&mut memory, known).of(&program)?;
        let turned_rows = if append.rotary.is_some() { turned_rows } else { 0 };
        let grid = append.blocks((count + turned_rows) as u32);
        let size = format!("lengths {lengths:?}, new {new:?}, {key_heads} heads, room {capacity}");
        Ok(Scene { program, grid, arguments, memory, results, size })
    }
}
