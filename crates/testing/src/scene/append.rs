//! Scenes of the append kernel: new tokens for sequences of unequal lengths, into shuffled pages or
//! batch entries, and their queries rotated.

use flashcore::gpu::{
    AppendProblem, AppendTensors, Chip, DeviceAddress, DeviceTensor, RotatedQueries,
};
use flashcore::plan::Source;
use flashcore::serving::Placement;
use flashcore::{Descale, Descales, Layout, Mask, Problem, Shape, Storage, quantize};
use kernels::Scales;
use kernels::append::{Append, Rotary};
use kernels::parameter::{List, Tensor};
use ptx::Element;
use sim::Memory;

use super::call::{Buffers, UNTOUCHED, dtype, out_of_bounds};
use super::kernel::descale;
use super::{Expected, KernelLaunch, Scene, SceneError, encode, numbers, round};
use crate::rng::Rng;

/// The extents of a cache and of the tokens that are appended to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppendSize {
    /// The number of keys of each sequence before the append.
    pub lengths: Vec<usize>,
    /// The number of new tokens of each sequence.
    pub new: Vec<usize>,
    /// The number of key and value heads.
    pub key_heads: usize,
    /// Positions per page, where the kernel has pages.
    pub page_size: usize,
    /// The most positions of a sequence; tokens beyond are dropped.
    pub capacity: usize,
    /// The number of query heads.
    pub heads: usize,
    /// The number of queries of each sequence.
    pub queries: Vec<usize>,
    /// Whether the queries of a sequence have consecutive positions; else all have the first.
    pub in_order: bool,
    /// Whether new tokens and queries are packed, with lists of where sequences start; else each
    /// sequence has room for the longest, and lists of lengths are passed only if these differ.
    pub listed: bool,
    /// Where they are packed, rows before the first sequence and after the last that belong to none.
    pub spare: usize,
    /// Whether lists hold numbers out of bounds in place of the bounds themselves.
    pub hostile: bool,
    /// Whether rotated queries overwrite the queries.
    pub in_place: bool,
}

impl AppendSize {
    /// Returns a small size: sequences that begin, grow, stay as they are and run out of room.
    pub fn small() -> Self {
        AppendSize {
            lengths: vec![0, 5, 9, 7],
            new: vec![3, 1, 0, 4],
            key_heads: 3,
            page_size: 4,
            capacity: 9,
            heads: 6,
            queries: vec![1, 3, 0, 2],
            in_order: true,
            listed: true,
            spare: 0,
            hostile: false,
            in_place: true,
        }
    }

    /// Returns one sequence more than two for each lane of a warp, with empty ones among them and as
    /// the first.
    pub fn many() -> Self {
        let repeat = |counts: &[usize]| counts.iter().copied().cycle().take(65).collect();
        AppendSize {
            lengths: repeat(&[0, 1, 2, 3, 4, 5, 6]),
            new: repeat(&[0, 1, 0, 2, 3]),
            queries: repeat(&[2, 0, 1]),
            ..AppendSize::small()
        }
    }

    /// Returns the problem as it is posed to the library.
    fn problem(&self, append: &Append, cache: Shape) -> AppendProblem {
        let most = |counts: &[usize]| counts.iter().copied().max().unwrap_or(0).max(1);
        let keys = match append.paged {
            true => Storage::Paged {
                size: cache.length,
                columns: self.capacity.div_ceil(cache.length),
                pages: cache.batch,
            },
            false if self.listed => Storage::Entries(cache.batch),
            false => Storage::Padded,
        };
        let packed = |counts: &[usize]| 2 * self.spare + counts.iter().sum::<usize>();
        let queries = match self.listed {
            true => Storage::Packed(packed(&self.queries)),
            false => Storage::Padded,
        };
        let cache = Problem::new(self.lengths.len(), self.heads, most(&self.queries), cache.dim)
            .with_kv_heads(self.key_heads)
            .with_key_length(self.capacity)
            .with_value_head_dim(append.value_head_dim as usize)
            .with_dtype(dtype(append.element))
            .with_kv_dtype(dtype(append.cache.element))
            .with_descales(Descales {
                query: Descale::None,
                key: descale(append.cache.key_scales),
                value: descale(append.cache.value_scales),
            })
            .with_mask(if self.in_order { Mask::CAUSAL } else { Mask::NONE })
            .with_storage(queries, keys);
        let mut problem = AppendProblem::new(cache, most(&self.new));
        if self.listed {
            problem = problem.with_packed_new(packed(&self.new));
        }
        match append.rotary {
            Some(Rotary { dim, interleaved }) => problem
                .with_rotary(dim as usize, interleaved, self.capacity + 1)
                .with_rotated_queries(),
            None => problem,
        }
    }
}

impl Scene {
    /// Makes the scene of an append kernel.
    pub fn append(append: Append, size: &AppendSize) -> Result<Self, SceneError> {
        let AppendSize { lengths, new, key_heads, page_size, capacity, queries, .. } = size;
        let refused = |text: String| SceneError::Size(text);
        let batch = lengths.len();
        let counts = [new.len(), queries.len()];
        if batch == 0 || counts != [batch; 2] || [key_heads, capacity, page_size].contains(&&0) {
            return Err(refused("there is no sequence or no room".to_owned()));
        }
        let (places, cache) = size.places(&append)?;
        let problem = size.problem(&append, cache);
        let chip =
            Chip { target: append.target, multiprocessors: 2, l2_bytes: 1 << 20, ..Chip::H200 };
        let choice = problem.choose(&chip).map_err(|error| refused(error.to_string()))?;
        let launch = &choice.launches[0];
        let program = launch.kernel.program()?;
        let starts = [new, queries].map(|lengths| starts(lengths, size.listed, size.spare));
        let rows = [&starts[0], &starts[1]].map(|starts| starts[batch] as usize + size.spare);
        let entries = if size.listed { 1 } else { batch };
        let tensors = tensors(&problem, cache, entries, rows.map(|rows| rows / entries));
        let tensors = tensors.map_err(|error| refused(error.to_string()))?;
        let values = tensors.bind(&problem, launch, &program.parameters).map_err(refused)?;

        let mut numbers = Numbers::random(&append, size, rows, cache);
        let (mut memory, mut buffers) = (Memory::new(), Buffers::new());
        numbers.stage(&append, &mut memory, &mut buffers);
        // Without a rotary embedding queries are not written at all.
        let in_place = size.in_place || append.rotary.is_none();
        let untouched = vec![UNTOUCHED; numbers.q.len()];
        let rotated_queries = match in_place {
            true => buffers[&Source::Tensor(Tensor::Query)],
            false => memory.result("RotatedQuery", encode(append.element, &untouched)),
        };
        buffers.insert(Source::Tensor(Tensor::RotatedQuery), rotated_queries);
        for (list, words) in size.lists(&append, &places, cache, &starts) {
            let id = memory.input_u32(&format!("{list:?}"), &words);
            buffers.insert(Source::List(list), id);
        }
        let after = memory.output("lengths after", 4 * batch);
        buffers.insert(Source::List(List::LengthsAfter), after);

        numbers.append(&append, size, (&places, cache), &starts[0]);
        let mut turned = if in_place { numbers.q.clone() } else { untouched };
        numbers.turn_queries(&append, size, &starts[1], &mut turned);
        let expected = |name, tensor, element, exact: Vec<f64>| {
            Expected::within(0.0, name, buffers[&Source::Tensor(tensor)], element, exact)
        };
        let Numbers { k, v, scales: [key_scales, value_scales], .. } = numbers;
        let grown: Vec<f64> = (0..batch)
            .map(|sequence| (lengths[sequence] + new[sequence]).min(*capacity))
            .map(|length| f32::from_bits(length as u32) as f64)
            .collect();
        let results = vec![
            // Integers as the floats with the same bits: any wrong bit shows.
            Expected::within(0.0, "lengths after", after, Element::F32, grown),
            expected("keys", Tensor::Key, append.cache.element, k),
            expected("values", Tensor::Value, append.cache.element, v),
            expected("key scales", Tensor::KeyDescale, Element::F32, key_scales),
            expected("value scales", Tensor::ValueDescale, Element::F32, value_scales),
            expected("queries", Tensor::RotatedQuery, append.element, turned),
        ];
        let step = KernelLaunch::bound(program, launch.blocks, &values, &buffers)?;
        let size = format!("lengths {lengths:?}, new {new:?}, {key_heads} heads, room {capacity}");
        Ok(Scene::single_launch(step, memory, results, size))
    }
}

impl AppendSize {
    /// Returns where the positions of each sequence lie in the cache, and the shape of the cache.
    fn places(&self, append: &Append) -> Result<(Placement, Shape), SceneError> {
        let AppendSize { lengths, key_heads, page_size, capacity, listed, hostile, .. } = self;
        let (batch, dim) = (lengths.len(), append.head_dim as usize);
        // With hostile lists a sequence uses the last batch entry, whose number can be exceeded.
        let uses_last = |seed: &u64| Rng::new(*seed).shuffled(batch + 1)[..batch].contains(&batch);
        let seed = (5..50).find(|seed| !hostile || uses_last(seed));
        let mut rng = Rng::new(seed.unwrap_or(5));
        // Every sequence may grow to the capacity.
        let full = vec![*capacity; batch];
        Ok(match append.paged {
            true => rng
                .paged(full, *page_size, *capacity, *key_heads, dim)
                .map_err(|error| SceneError::Size(error.to_string()))?,
            false if *listed => rng.entries(full, *capacity, *key_heads, dim),
            false => (Placement::padded(full), Shape::new(batch, *capacity, *key_heads, dim)),
        })
    }

    /// Returns the lists that a call passes, given where the new rows and the queries of each
    /// sequence start.
    fn lists(
        &self,
        append: &Append,
        places: &Placement,
        cache: Shape,
        [new_starts, query_starts]: &[Vec<u32>; 2],
    ) -> Vec<(List, Vec<u32>)> {
        let AppendSize { lengths, new, capacity, queries, listed, hostile, .. } = self;
        let words = |numbers: &[usize]| numbers.iter().map(|it| *it as u32).collect::<Vec<u32>>();
        let entries: Vec<usize> = (0..lengths.len()).filter_map(|it| places.entry(it)).collect();
        let place = match places.pages() {
            Some(pages) => (List::BlockTable, pages.table().to_vec()),
            None => (List::BatchIndex, words(&entries)),
        };
        let mut lists = vec![(List::KeyLengths, words(lengths))];
        if *listed {
            let (mut starts, mut query_starts) = (new_starts.clone(), query_starts.clone());
            if *hostile {
                // Lists of starts and of lengths, and empty sequences that start after their end.
                lists.push((List::NewLengths, words(new)));
                lists.push((List::QueryLengths, words(queries)));
                cross(&mut starts, new);
                cross(&mut query_starts, queries);
            }
            lists.push((List::NewStarts, starts));
            lists.push((List::QueryStarts, query_starts));
        } else if new.iter().any(|it| *it != new[0]) {
            lists.push((List::NewLengths, words(new)));
            lists.push((List::QueryLengths, words(queries)));
        }
        if *listed || append.paged {
            lists.push(place);
        }
        for (list, words) in lists.iter_mut().filter(|_| *hostile) {
            let most = match list {
                List::KeyLengths => *capacity,
                List::BatchIndex | List::BlockTable => cache.batch - 1,
                List::NewLengths => new.iter().copied().max().unwrap_or(0),
                List::QueryLengths => queries.iter().copied().max().unwrap_or(0),
                _ => words.last().copied().unwrap_or(0) as usize,
            };
            out_of_bounds(words, most as u32);
        }
        lists
    }
}

/// The contents of a call's tensors.
struct Numbers {
    new_k: Vec<f64>,
    new_v: Vec<f64>,
    /// The keys of the cache.
    k: Vec<f64>,
    /// The values of the cache.
    v: Vec<f64>,
    /// The scales of keys and of values.
    scales: [Vec<f64>; 2],
    q: Vec<f64>,
    cosines: Vec<f64>,
    sines: Vec<f64>,
}

impl Numbers {
    /// Creates random contents for these numbers of new rows and queries, before the append.
    fn random(
        append: &Append,
        size: &AppendSize,
        [new_rows, query_rows]: [usize; 2],
        cache: Shape,
    ) -> Self {
        let AppendSize { lengths, key_heads, capacity, heads, .. } = size;
        let (dim, value_dim) = (append.head_dim as usize, append.value_head_dim as usize);
        let mut seeds = 5..;
        let mut numbers = |count: usize| {
            let seed = seeds.next().unwrap_or_default();
            numbers(seed, append.element, count, 2.0)
        };
        let new_k = numbers(new_rows * key_heads * dim);
        let new_v = numbers(new_rows * key_heads * value_dim);
        let cached = cache.batch * cache.length * key_heads;
        let (mut k, mut v) = (numbers(cached * dim), numbers(cached * value_dim));
        for number in k.iter_mut().chain(&mut v) {
            *number = round(append.cache.element, *number);
        }
        let scales = [append.cache.key_scales, append.cache.value_scales]
            .map(|scales| initial_scales(scales, lengths.len() * key_heads, cached));
        let q = numbers(query_rows * heads * dim);
        let angles = (capacity + 1) * half_of(append.rotary);
        let (cosines, sines) = (numbers(angles), numbers(angles));
        Numbers { new_k, new_v, k, v, scales, q, cosines, sines }
    }

    /// Makes the buffers of the tensors.
    fn stage(&self, append: &Append, memory: &mut Memory, buffers: &mut Buffers) {
        let [key_scales, value_scales] = &self.scales;
        let (element, cached) = (append.element, append.cache.element);
        for (tensor, element, numbers) in [
            (Tensor::NewKey, element, &self.new_k),
            (Tensor::NewValue, element, &self.new_v),
            (Tensor::Key, cached, &self.k),
            (Tensor::Value, cached, &self.v),
            (Tensor::KeyDescale, Element::F32, key_scales),
            (Tensor::ValueDescale, Element::F32, value_scales),
            (Tensor::Query, element, &self.q),
        ] {
            let id = memory.input(&format!("{tensor:?}"), encode(element, numbers));
            buffers.insert(Source::Tensor(tensor), id);
        }
        for (list, numbers) in [(List::Cosines, &self.cosines), (List::Sines, &self.sines)] {
            let id = memory.input(&format!("{list:?}"), encode(element, numbers));
            buffers.insert(Source::List(list), id);
        }
    }

    /// Returns a row of keys or queries, rotated for a position if the kernel rotates.
    fn turn(&self, append: &Append, size: &AppendSize, row: &[f64], position: usize) -> Vec<f64> {
        match append.rotary {
            // Positions beyond the tables take the last angles.
            Some(rotary) => {
                let first = position.min(size.capacity) * half_of(append.rotary);
                rotated(rotary, row, [&self.cosines[first..], &self.sines[first..]])
            }
            None => row.to_vec(),
        }
    }

    /// Writes the new rows to the cache, as the kernel must.
    fn append(
        &mut self,
        append: &Append,
        size: &AppendSize,
        (places, cache): (&Placement, Shape),
        new_starts: &[u32],
    ) {
        let AppendSize { lengths, new, key_heads, capacity, .. } = size;
        let (dim, value_dim) = (append.head_dim as usize, append.value_head_dim as usize);
        for sequence in 0..lengths.len() {
            for token in 0..new[sequence] {
                let position = lengths[sequence] + token;
                if position >= *capacity {
                    continue;
                }
                let (entry, row) = places.locate(sequence, position);
                for head in 0..*key_heads {
                    let from = (new_starts[sequence] as usize + token) * key_heads + head;
                    let to = (entry * cache.length + row) * key_heads + head;
                    let place = |kind| match kind {
                        Scales::One => 0,
                        Scales::PerToken => to,
                        Scales::PerHead => sequence * key_heads + head,
                    };
                    let row = &self.new_v[from * value_dim..][..value_dim];
                    let kind = append.cache.value_scales;
                    let row = rounded(append, row, (kind, &mut self.scales[1][place(kind)]));
                    self.v[to * value_dim..][..value_dim].copy_from_slice(&row);
                    let row = self.turn(append, size, &self.new_k[from * dim..][..dim], position);
                    let kind = append.cache.key_scales;
                    let row = rounded(append, &row, (kind, &mut self.scales[0][place(kind)]));
                    self.k[to * dim..][..dim].copy_from_slice(&row);
                }
            }
        }
    }

    /// Writes the queries, rotated for their positions, to `turned`.
    fn turn_queries(
        &self,
        append: &Append,
        size: &AppendSize,
        query_starts: &[u32],
        turned: &mut [f64],
    ) {
        let AppendSize { lengths, heads, queries, in_order, .. } = size;
        let dim = append.head_dim as usize;
        for sequence in 0..lengths.len() {
            for query in 0..queries[sequence] {
                let position = lengths[sequence] + if *in_order { query } else { 0 };
                for head in 0..*heads {
                    let at = (query_starts[sequence] as usize + query) * heads + head;
                    let row = self.turn(append, size, &self.q[at * dim..][..dim], position);
                    let row: Vec<f64> = row.iter().map(|it| round(append.element, *it)).collect();
                    turned[at * dim..][..dim].copy_from_slice(&row);
                }
            }
        }
    }
}

/// Returns the number of angles of a position; 1 without a rotary embedding.
fn half_of(rotary: Option<Rotary>) -> usize {
    rotary.map_or(1, |rotary| rotary.dim as usize / 2)
}

/// Returns the layouts of the tensors. The addresses are placeholders: the simulator's buffers take
/// their place.
fn tensors(
    problem: &AppendProblem,
    cache: Shape,
    entries: usize,
    [new_rows, query_rows]: [usize; 2],
) -> Result<AppendTensors, flashcore::TensorError> {
    let tensor = |shape| {
        let strides = Layout::contiguous(shape)?.strides();
        Ok::<_, flashcore::TensorError>(DeviceTensor { address: DeviceAddress(16), strides })
    };
    let new = Shape { batch: entries, length: new_rows, ..cache };
    let value = |shape| Shape { dim: problem.cache.value_head_dim, ..shape };
    let query = Shape { length: query_rows, heads: problem.cache.query_heads, ..new };
    let [new_key, new_value, key, queries] = [new, value(new), cache, query].map(tensor);
    let mut tensors = AppendTensors::new([new_key?, new_value?, key?, tensor(value(cache))?]);
    let queries = queries?;
    let rotated = RotatedQueries { from: queries, to: queries, starts: None, lengths: None };
    tensors.queries = problem.rotated_queries.then_some(rotated);
    let shapes = problem.cache.descale_shapes_over(cache);
    tensors.key_descale = shapes.key.map(tensor).transpose()?;
    tensors.value_descale = shapes.value.map(tensor).transpose()?;
    Ok(tensors)
}

/// Returns the scales before the append: given ones per sequence and head, [`UNTOUCHED`] per token,
/// which the kernel computes, or a single unused number where there are no scales.
fn initial_scales(scales: Scales, heads: usize, tokens: usize) -> Vec<f64> {
    match scales {
        Scales::One => vec![0.0],
        Scales::PerHead => (0..heads).map(|it| f64::from(0.01f32 * (it + 1) as f32)).collect(),
        Scales::PerToken => vec![UNTOUCHED; tokens],
    }
}

/// Returns a row as the cache stores it, divided by its scale and rounded. A scale per token is
/// computed from the row and written to `scale`.
fn rounded(append: &Append, row: &[f64], (kind, scale): (Scales, &mut f64)) -> Vec<f64> {
    let element = append.cache.element;
    let numbers = row.iter().map(|it| *it as f32);
    if kind == Scales::PerToken {
        let largest = numbers.clone().fold(0.0, |most, number| number.abs().max(most));
        *scale = quantize::factor(largest, dtype(element)).into();
    }
    let reciprocal = if kind == Scales::One { 1.0 } else { 1.0 / *scale as f32 };
    numbers.map(|number| round(element, f64::from(number * reciprocal))).collect()
}

/// Returns where sequences of these lengths start, packed or each with room for the longest, and
/// where the last one's room ends.
fn starts(lengths: &[usize], packed: bool, spare: usize) -> Vec<u32> {
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let start = |count: usize| match packed {
        true => spare + lengths[..count].iter().sum::<usize>(),
        false => count * longest,
    };
    (0..=lengths.len()).map(|count| start(count) as u32).collect()
}

/// Moves the start of empty sequences behind their end. The room of the sequence before grows by
/// one row, which it does not use.
fn cross(starts: &mut [u32], lengths: &[usize]) {
    for sequence in 1..lengths.len().saturating_sub(1) {
        if lengths[sequence] == 0 {
            starts[sequence] += 1;
        }
    }
}

/// Returns a row rotated by the angles of its position, not yet rounded to its element type.
fn rotated(rotary: Rotary, row: &[f64], [cosines, sines]: [&[f64]; 2]) -> Vec<f64> {
    let half = rotary.dim as usize / 2;
    let mut rotated = row.to_vec();
    for pair in 0..half {
        let (a, b) = match rotary.interleaved {
            true => (2 * pair, 2 * pair + 1),
            false => (pair, pair + half),
        };
        // Computed in f32 like in the kernel, so that even the last bit agrees.
        let [c, s, x, y] = [cosines[pair], sines[pair], row[a], row[b]].map(|it| it as f32);
        rotated[a] = f64::from(x * c - y * s);
        rotated[b] = f64::from(x * s + y * c);
    }
    rotated
}
