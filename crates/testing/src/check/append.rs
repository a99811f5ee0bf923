//! Checks of the append kernel: random caches, each described by a seed.

use std::fmt;

use super::sequences::{check_alone, run_alone};
use super::{Checked, Outcome};
use crate::reference::Row;
use crate::rng::Rng;
use crate::verdict::{ComparedValue, Judge, Verdict};
use flashcore::gpu::{
    AppendProblem, AppendTensors, DeviceLists, DeviceTensor, Gpu, GpuError, GuardedBuffer,
    RotaryTables, RotatedQueries,
};
use flashcore::random::mix;
use flashcore::serving::{self, CacheScales, Placement, Rotary};
use flashcore::{
    DType, Descale, Descales, Error, Layout, Mask, Problem, Progress, Shape, Storage, Tensor,
    random_descales,
};

/// New tokens for a cache, all determined by a seed.
#[derive(Debug)]
struct AppendCase {
    seed: u64,
    problem: Problem,
    /// The cache before the append, in host memory.
    key: Tensor,
    value: Tensor,
    place: Placement,
    new_key: Tensor,
    new_value: Tensor,
    new: Placement,
    rotary: Option<Angles>,
    /// The queries to be rotated; only with rotary embeddings.
    queries: Option<(Tensor, Placement)>,
    /// The descale factors of the keys and values of an 8-bit cache, before the append: given ones,
    /// or room for those that the kernel computes.
    scales: Option<[Tensor; 2]>,
}

#[derive(Debug)]
struct Angles {
    dim: usize,
    interleaved: bool,
    positions: usize,
    /// The cosines of each position, a row of `dim / 2` each.
    cosines: Tensor,
    sines: Tensor,
}

/// The contents of memory after the append.
struct Appended {
    key: Tensor,
    value: Tensor,
    queries: Option<Tensor>,
    lengths: Vec<u32>,
    scales: Option<[Tensor; 2]>,
}

/// Runs the kernel for the cases of the first `seeds` seeds. It must write what [`serving::append`]
/// writes in host memory, bit for bit without rotary embeddings.
pub fn run_appends(gpu: &Gpu, dtype: DType, seeds: u64, progress: &dyn Progress) -> Vec<Checked> {
    let random = |seed| AppendCase::random(dtype, seed);
    run_alone("append", seeds, progress, random, |case| case.check(gpu))
}

/// Runs the kernel for the case of one seed.
pub fn check_append(gpu: &Gpu, dtype: DType, seed: u64) -> Checked {
    let random = |seed| AppendCase::random(dtype, seed);
    check_alone("append", seed, random, |case| case.check(gpu))
}

impl AppendCase {
    fn random(dtype: DType, seed: u64) -> Result<Self, Error> {
        let mut rng = Rng::new(mix(seed ^ 0x0a99_e2d5));
        let batch = rng.choose(&[1, 2, 3, 9, 33]);
        let kv_heads = rng.choose(&[1, 2, 3, 8]);
        let group = rng.choose(&[1, 2, 5]);
        let (head_dim, value_head_dim) =
            rng.choose(&[(64, 64), (128, 128), (192, 128), (8, 24), (136, 256)]);
        let mask = rng.choose(&[Mask::NONE, Mask::CAUSAL, Mask::window(Some(9), Some(0))]);
        let mut problem = Problem::new(batch, kv_heads * group, 1, head_dim)
            .with_kv_heads(kv_heads)
            .with_value_head_dim(value_head_dim)
            .with_dtype(dtype)
            .with_mask(mask);
        // New keys and values have 16 bits.
        if dtype.is_8_bit() {
            let wide = rng.choose(&[DType::F16, DType::BF16]);
            let descale = rng.choose(&[Descale::None, Descale::PerHead, Descale::PerToken]);
            problem = problem.with_dtype(wide).with_kv_dtype(dtype);
            problem = problem.with_descales(Descales::of_cache(descale));
        }
        let top = rng.choose(&[0, 5, 70]);
        let most = rng.choose(&[1, 1, 4, 40]);
        let lengths: Vec<usize> = (0..batch).map(|_| rng.below(top + 1)).collect();
        let counts: Vec<usize> = (0..batch).map(|_| rng.below(most + 1)).collect();
        let buffer: Vec<usize> = lengths.iter().zip(&counts).map(|(a, b)| a + b).collect();

        let (place, cache) = rng.cache(buffer, kv_heads, head_dim)?;
        let place = place.with_lengths(lengths.clone());
        let (new, new_shape) = rng.rows(&counts, kv_heads, head_dim);
        let random = |dtype: DType, shape: Shape, dim: usize, stream: u64| {
            Tensor::random(dtype, Shape { dim, ..shape }, mix(seed).wrapping_add(stream))
        };
        let wide = problem.dtypes.query;
        let tensor = |shape, dim, stream| random(wide, shape, dim, stream);
        let factors = random_descales(problem.descale_shapes_over(cache), seed)?;
        let angles = |rng: &mut Rng| -> Result<Angles, Error> {
            let dim = rng.choose(&[head_dim, head_dim, head_dim / 2]);
            let positions = top + most + 7;
            let table = |stream| tensor(Shape::new(1, positions, 1, 1), dim / 2, stream);
            let (cosines, sines) = (table(5)?, table(6)?);
            Ok(Angles { dim, interleaved: rng.one_in(2), positions, cosines, sines })
        };
        let rotary = rng.one_in(2).then(|| angles(&mut rng)).transpose()?;
        let queries = match rotary.is_some() && rng.one_in(2) {
            true => {
                let counts: Vec<usize> = (0..batch).map(|_| rng.below(6)).collect();
                let (queries, shape) = rng.rows(&counts, problem.query_heads, head_dim);
                Some((tensor(shape, head_dim, 7)?, queries))
            }
            false => None,
        };
        Ok(AppendCase {
            seed,
            key: random(dtype, cache, head_dim, 1)?,
            value: random(dtype, cache, value_head_dim, 2)?,
            place,
            new_key: tensor(new_shape, head_dim, 3)?,
            new_value: tensor(new_shape, value_head_dim, 4)?,
            new,
            rotary,
            queries,
            scales: factors.key.zip(factors.value).map(|(key, value)| [key, value]),
            problem,
        })
    }

    /// Runs the kernel twice and compares the result with what the host writes.
    fn check(&self, gpu: &Gpu) -> Result<Outcome, Error> {
        let expected = self.on_the_host()?;
        let (found, again) = (self.on_the_gpu(gpu)?, self.on_the_gpu(gpu)?);
        let mut judge = Judge::new(self.problem.dtypes.key);
        let mut rows = 0;
        let mut compare = |found: &Tensor, expected: &Tensor| {
            let values = found.to_f32().into_iter().zip(expected.to_f32());
            let shape = found.shape();
            for (index, (result, reference)) in values.enumerate() {
                let (vector, element) = (index / shape.dim, index % shape.dim);
                let (row, head) = (vector / shape.heads, vector % shape.heads);
                let row = Row { batch: row / shape.length, head, query: row % shape.length };
                rows += usize::from(element == 0);
                let (result, reference) = (f64::from(result), f64::from(reference));
                judge.look_at(ComparedValue { row, element, result, reference }, reference);
            }
        };
        compare(&found.key, &expected.key);
        compare(&found.value, &expected.value);
        if let (Some(found), Some(expected)) = (&found.queries, &expected.queries) {
            compare(found, expected);
        }
        for (batch, (found, expected)) in found.lengths.iter().zip(&expected.lengths).enumerate() {
            let row = Row { batch, head: 0, query: 0 };
            let (result, reference) = (f64::from(*found), f64::from(*expected));
            if result != reference {
                let place = ComparedValue { row, element: 0, result: f64::NAN, reference };
                judge.look_at(place, reference);
            }
        }
        // A rotated element may be rounded in the other direction.
        let rounding = match self.rotary {
            Some(_) => self.problem.dtypes.key.epsilon() * judge.largest(),
            None => 0.0,
        };
        let (output, lse) = (judge.conclude(rounding), Judge::new(DType::F32).conclude(0.0));
        let same = |a: &Appended, b: &Appended| {
            let bytes = |it: &Appended| {
                let tensors = [&it.key, &it.value].into_iter().chain(it.scales.iter().flatten());
                tensors.flat_map(|it| it.bytes().to_vec()).collect::<Vec<u8>>()
            };
            bytes(a) == bytes(b) && a.lengths == b.lengths
        };
        let exact = self.rotary.is_some() || same(&found, &expected);
        let repeats = same(&found, &again);
        let passed = output.passed && exact && repeats;
        let verdict = Verdict { passed, output, lse, rows, total_rows: rows };
        Ok(Outcome { passed, verdict, repeats, holes: 0 })
    }

    fn on_the_host(&self) -> Result<Appended, Error> {
        let tables = self.rotary.as_ref().map(|it| (it.cosines.to_f32(), it.sines.to_f32()));
        let rotary = self.rotary.as_ref().zip(tables.as_ref()).map(
            |(Angles { dim, interleaved, .. }, (cosines, sines))| Rotary {
                dim: *dim,
                interleaved: *interleaved,
                cosines,
                sines,
            },
        );
        let (mut key, mut value) = (self.key.clone(), self.value.clone());
        let mut scales = self.scales.clone();
        let found = match &mut scales {
            None => CacheScales::None,
            Some([key, value]) => match self.problem.descales.key {
                Descale::PerToken => CacheScales::Found(key, value),
                _ => CacheScales::Given(key, value),
            },
        };
        let (cache, added) = ((&mut key, &mut value), (&self.new_key, &self.new_value));
        serving::append_scaled(cache, &self.place, added, &self.new, rotary, found)?;
        let queries = match (&self.queries, rotary) {
            (Some((queries, placement)), Some(rotary)) => {
                let layout = Layout::contiguous(queries.shape())?;
                // Rows that belong to no sequence are not written.
                let mut rotated = Tensor::filled(self.problem.dtype(), layout, f32::NAN)?;
                let mut row = vec![0.0; queries.shape().dim];
                for sequence in 0..placement.sequences() {
                    for query in 0..placement.length(sequence) {
                        let step = if self.problem.mask == Mask::NONE { 0 } else { query };
                        let (entry, place) = placement.locate(sequence, query);
                        for head in 0..queries.shape().heads {
                            queries.head(entry, head).read(place, &mut row);
                            rotary.turn(&mut row, self.place.ends()[sequence] + step);
                            rotated.set_row([entry, place, head], &row);
                        }
                    }
                }
                Some(rotated)
            }
            _ => None,
        };
        let lengths = (0..self.new.sequences())
            .map(|sequence| (self.place.ends()[sequence] + self.new.length(sequence)) as u32)
            .collect();
        Ok(Appended { key, value, queries, lengths, scales })
    }

    fn on_the_gpu(&self, gpu: &Gpu) -> Result<Appended, Error> {
        let mut lists = DeviceLists::new(gpu);
        let strided =
            |address, tensor: &Tensor| DeviceTensor { address, strides: tensor.layout().strides() };
        let mut input = |tensor: &Tensor| -> Result<DeviceTensor, GpuError> {
            Ok(strided(lists.bytes(tensor.bytes())?, tensor))
        };
        let (new_key, new_value) = (input(&self.new_key)?, input(&self.new_value)?);
        let query = self.queries.as_ref().map(|(queries, _)| input(queries)).transpose()?;
        let (key, value) = (
            GuardedBuffer::of(gpu, self.key.bytes())?,
            GuardedBuffer::of(gpu, self.value.bytes())?,
        );
        let lengths = GuardedBuffer::new(gpu, 4 * self.place.sequences())?;
        let rotated_bytes = self.queries.as_ref().map_or(0, |(queries, _)| queries.bytes().len());
        let rotated = GuardedBuffer::new(gpu, rotated_bytes)?;
        let scale_buffer = |side: usize| match &self.scales {
            Some(scales) => GuardedBuffer::of(gpu, scales[side].bytes()),
            None => GuardedBuffer::new(gpu, 0),
        };
        let scales = [scale_buffer(0)?, scale_buffer(1)?];

        let cache = self.key.shape();
        let mut problem = self.problem.clone().with_key_length(cache.length.max(1));
        let mut tensors = AppendTensors::new([
            new_key,
            new_value,
            strided(key.address(), &self.key),
            strided(value.address(), &self.value),
        ]);
        if let Some([key, value]) = &self.scales {
            tensors.key_descale = Some(strided(scales[0].address(), key));
            tensors.value_descale = Some(strided(scales[1].address(), value));
        }
        tensors.key_lengths = Some(lists.numbers(self.place.ends())?);
        tensors.lengths_after = Some(lengths.address());
        if let Some(pages) = self.place.pages() {
            let (size, columns) = (pages.size(), pages.columns());
            problem.keys = Storage::Paged { size, columns, pages: cache.batch };
            problem.key_length = size * columns;
            let table: Vec<usize> = pages.table().iter().map(|page| *page as usize).collect();
            tensors.block_table = Some(lists.numbers(&table)?);
        } else {
            problem.keys = Storage::Entries(cache.batch);
            let entries: Vec<usize> =
                (0..self.place.sequences()).filter_map(|it| self.place.entry(it)).collect();
            tensors.batch_index = Some(lists.numbers(&entries)?);
        }
        if let (Some(from), Some((queries, placement))) = (query, &self.queries) {
            let rows = queries.shape().length;
            let to = strided(rotated.address(), queries);
            let mut given = RotatedQueries { from, to, starts: None, lengths: None };
            match placement.starts() {
                Some(starts) => {
                    problem.query_length = placement.longest().max(1);
                    problem.queries = Storage::Packed(rows);
                    given.starts = Some(lists.numbers(starts)?);
                }
                None => {
                    problem.query_length = rows;
                    given.lengths = Some(lists.numbers(placement.ends())?);
                }
            }
            tensors.queries = Some(given);
        }
        let mut problem = AppendProblem::new(problem, self.new.longest().max(1));
        problem.new_rows = self.new_key.shape().length;
        problem.rotated_queries = tensors.queries.is_some();
        match self.new.starts() {
            Some(starts) => {
                problem.packed_new = true;
                tensors.new_starts = Some(lists.numbers(starts)?);
            }
            None => tensors.new_lengths = Some(lists.numbers(self.new.ends())?),
        }
        if let Some(Angles { dim, interleaved, positions, cosines, sines }) = &self.rotary {
            problem = problem.with_rotary(*dim, *interleaved, *positions);
            let (cosines, sines) = (lists.bytes(cosines.bytes())?, lists.bytes(sines.bytes())?);
            tensors.rotary = Some(RotaryTables { cosines, sines, starts: None });
        }
        gpu.append(gpu.stream(), &problem, &tensors)?;

        let read = |buffer: &GuardedBuffer, tensor: &Tensor| -> Result<Tensor, Error> {
            let mut found = tensor.clone();
            buffer.read(gpu, found.bytes_mut())?;
            Ok(found)
        };
        let found = Appended {
            key: read(&key, &self.key)?,
            value: read(&value, &self.value)?,
            queries: match &self.queries {
                Some((queries, _)) => Some(read(&rotated, queries)?),
                None => None,
            },
            scales: match &self.scales {
                Some([key, value]) => Some([read(&scales[0], key)?, read(&scales[1], value)?]),
                None => None,
            },
            lengths: {
                let mut found = vec![0; self.place.sequences()];
                lengths.read(gpu, &mut found)?;
                found
            },
        };
        let [key_scales, value_scales] = &scales;
        for (name, buffer) in [
            ("key", &key),
            ("value", &value),
            ("lengths", &lengths),
            ("rotated query", &rotated),
            ("key descale", key_scales),
            ("value descale", value_scales),
        ] {
            buffer.look_for_trespasses(gpu, name)?;
        }
        Ok(found)
    }
}

impl fmt::Display for AppendCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lengths: Vec<usize> = (0..self.new.sequences()).map(|it| self.new.length(it)).collect();
        write!(f, "{}, lengths {:?}, new {lengths:?}", self.problem, self.place.ends())?;
        if let Some(pages) = self.place.pages() {
            write!(f, ", pages of {}", pages.size())?;
        }
        if self.new.starts().is_some() {
            f.write_str(", packed")?;
        }
        if let Some(Angles { dim, interleaved, .. }) = &self.rotary {
            let pairs = if *interleaved { "neighbours" } else { "halves" };
            write!(f, ", rotary {dim} of {pairs}")?;
        }
        if self.queries.is_some() {
            f.write_str(", with queries")?;
        }
        write!(f, ", seed {}", self.seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The host's half of the check, which needs no GPU: every case can be created and appended.
    #[test]
    fn every_case_makes_sense() {
        let mut rotated = 0;
        for (seed, dtype) in (0..60).flat_map(|seed| [(seed, DType::BF16), (seed, DType::E4M3)]) {
            let case = AppendCase::random(dtype, seed).unwrap();
            let appended = case.on_the_host().unwrap_or_else(|error| panic!("{case}: {error}"));
            assert_eq!(appended.lengths.len(), case.new.sequences());
            rotated += usize::from(appended.queries.is_some());
        }
        assert!(rotated > 5, "{rotated}");
    }
}
