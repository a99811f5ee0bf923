//! Scenes of the append kernel: new tokens for sequences of unequal lengths, into shuffled pages or
//! batch entries.

use kernels::Divisor;
use kernels::append::{Append, Rotary};

use super::{Expected, Random, Scene, SceneError, encode, round};
use crate::{Argument, Memory};

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
}

impl Scene {
    /// New tokens into a cache.
    pub fn append(append: Append, size: &AppendSize) -> Result<Self, SceneError> {
        let program = append.program()?;
        let AppendSize { lengths, new, key_heads, page_size, capacity } = size;
        let batch = lengths.len();
        if batch == 0 || new.len() != batch || *key_heads == 0 || *capacity == 0 {
            return Err(SceneError::Size("there is no sequence or no room".into()));
        }
        let (dim, value_dim) = (append.head_dim as usize, append.value_head_dim as usize);
        let (rows, columns) = match append.paged {
            true => (*page_size, capacity.div_ceil(*page_size)),
            false => (*capacity, 1),
        };
        let entries = batch * columns + 1;
        // Pages, or batch entries, from the last to the first.
        let table: Vec<u32> =
            (0..batch * columns).map(|index| (entries - 1 - index) as u32).collect();
        let starts: Vec<u32> = std::iter::once(0)
            .chain(new.iter().scan(0, |sum, count| {
                *sum += *count as u32;
                Some(*sum)
            }))
            .collect();
        let total = starts[batch] as usize;
        let most = new.iter().copied().max().unwrap_or(0).max(1);

        let element = append.element;
        let mut random = Random::new(5);
        let mut numbers = |count: usize| random.numbers(element, count, 2.0);
        let (new_k, new_v) =
            (numbers(total * key_heads * dim), numbers(total * key_heads * value_dim));
        let mut k = numbers(entries * rows * key_heads * dim);
        let mut v = numbers(entries * rows * key_heads * value_dim);
        let half = append.rotary.map_or(1, |rotary| rotary.dim as usize / 2);
        let positions = capacity + 1;
        let (cosines, sines) = (numbers(positions * half), numbers(positions * half));

        let mut memory = Memory::new();
        let new_key_buffer = memory.input("new keys", encode(element, &new_k));
        let new_value_buffer = memory.input("new values", encode(element, &new_v));
        let key_buffer = memory.input("keys", encode(element, &k));
        let value_buffer = memory.input("values", encode(element, &v));
        let lengths_words: Vec<u32> = lengths.iter().map(|length| *length as u32).collect();
        let lengths_buffer = memory.input_u32("lengths", &lengths_words);
        let starts_buffer = memory.input_u32("new starts", &starts);
        let table_buffer = memory.input_u32("block table", &table);
        let cosine_buffer = memory.input("cosines", encode(element, &cosines));
        let sine_buffer = memory.input("sines", encode(element, &sines));

        for sequence in 0..batch {
            for token in 0..new[sequence] {
                let position = lengths[sequence] + token;
                if position >= *capacity {
                    continue;
                }
                let page = table[sequence * columns + position / rows] as usize;
                for head in 0..*key_heads {
                    let from = (starts[sequence] as usize + token) * key_heads + head;
                    let to = (page * rows + position % rows) * key_heads + head;
                    v[to * value_dim..][..value_dim]
                        .copy_from_slice(&new_v[from * value_dim..][..value_dim]);
                    let source = &new_k[from * dim..][..dim];
                    let target = &mut k[to * dim..][..dim];
                    target.copy_from_slice(source);
                    let Some(Rotary { interleaved, .. }) = append.rotary else { continue };
                    for pair in 0..half {
                        let (a, b) = match interleaved {
                            true => (2 * pair, 2 * pair + 1),
                            false => (pair, pair + half),
                        };
                        let angle = position * half + pair;
                        let (c, s) = (cosines[angle], sines[angle]);
                        target[a] = round(element, source[a] * c - source[b] * s);
                        target[b] = round(element, source[a] * s + source[b] * c);
                    }
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
        let results = vec![expected("keys", key_buffer, k), expected("values", value_buffer, v)];

        let count = batch * most * key_heads;
        let number = |number: usize| Argument::U32(number as u32);
        let argument = |name: &str| -> Option<Argument> {
            let strided = [
                ("new keys", 0, dim),
                ("new values", 0, value_dim),
                ("keys", rows, dim),
                ("values", rows, value_dim),
            ];
            for (tensor, rows, dim) in strided {
                match name.strip_prefix(tensor).map(str::trim) {
                    Some("batch stride") => {
                        return Some(Argument::U64((rows * key_heads * dim) as u64));
                    }
                    Some("row stride") => return Some(Argument::U64((key_heads * dim) as u64)),
                    Some("head stride") => return Some(Argument::U64(dim as u64)),
                    _ => {}
                }
            }
            let (divisor, part) = name.split_once(", ").unwrap_or((name, "number"));
            let divisor = match divisor {
                "key heads" => Some(*key_heads),
                "new tokens" => Some(most),
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
                "new keys" => Argument::Address(new_key_buffer, 0),
                "new values" => Argument::Address(new_value_buffer, 0),
                "keys" => Argument::Address(key_buffer, 0),
                "values" => Argument::Address(value_buffer, 0),
                "rows" => number(count),
                "new rows" => number(total),
                "key length" => number(*capacity),
                "lengths" => Argument::Address(lengths_buffer, 0),
                "new starts" => Argument::Address(starts_buffer, 0),
                "batch entries" | "block table" => Argument::Address(table_buffer, 0),
                "batch entries there are" => number(entries),
                "pages of a sequence" => number(columns),
                "page size" => number(rows),
                "cosines" => Argument::Address(cosine_buffer, 0),
                "sines" => Argument::Address(sine_buffer, 0),
                "rotary positions" => number(positions),
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
        let grid = append.blocks(count as u32);
        let size = format!("lengths {lengths:?}, new {new:?}, {key_heads} heads, room {capacity}");
        Ok(Scene { program, grid, arguments, memory, results, size })
    }
}
