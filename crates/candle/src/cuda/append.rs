//! Appending new keys and values to a cache on a GPU.
//!
//! Candle lends writable memory to in-place operations only, each of which has one writable tensor.
//! An append has up to four: the operation on each tensor runs inside the operation on the one
//! before, and the innermost one launches the kernel for all.

use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{
    CpuStorage, CudaStorage, DType, InplaceOp1, InplaceOp2, Layout, Result, Storage, Tensor,
};
use flashcore::gpu::{AppendProblem, AppendTensors, DeviceAddress, DeviceTensor, RotaryTables};
use flashcore::{Descale, Descales, Problem, Storage as Rows};

use super::memory::{address, address_mut, find, hold, start, uninitialized};
use super::place;
use crate::append::{Append, Cache, Factors};
use crate::arguments::{refusal, small_element};
use crate::wrap;

/// Writes the new rows, and returns the new lengths.
pub(crate) fn append(append: &Append<'_>) -> Result<Tensor> {
    let [keys, values] = &append.caches;
    let new = keys.new_layout.shape();
    if append.sequences == 0 || new.batch * new.length == 0 {
        return append.lengths.to_dtype(DType::U32);
    }
    for (name, new) in [("new key", keys.new), ("new value", values.new)] {
        // The nested operations would deadlock on candle's lock of the shared memory.
        if share_memory(new, keys.cache) || share_memory(new, values.cache) {
            return Err(refusal(name, "is in the memory of a cache", "memory of its own"));
        }
    }
    let device = keys.cache.device().as_cuda_device()?;
    let stream = &device.cuda_stream();
    let mut lengths = uninitialized(device, append.sequences, DType::U32)?;
    let (after, guard) = address_mut(&mut lengths, stream)?;
    let one_memory = share_memory(keys.cache, values.cache);
    let problem = &problem(append)?;
    let work = Work { append, problem, after, stream, one_memory, keys: None, found: [None; 2] };
    let factors = [0, 1].map(|side| found_factors(append, side));
    let one_memory = match factors {
        [Some(keys), Some(values)] => share_memory(&keys.tensor, &values.tensor),
        _ => false,
    };
    Lend { work, one_memory }.next()?;
    drop(guard);
    Ok(crate::tensor(Storage::Cuda(lengths), append.sequences))
}

/// Returns the append problem with upper bounds that hold whatever the lists contain.
fn problem(append: &Append<'_>) -> Result<AppendProblem> {
    let [keys, values] = &append.caches;
    let (cache, new) = (keys.layout.shape(), keys.new_layout.shape());
    let (place, sequences) = (append.place, append.sequences);
    let mut problem = Problem::new(sequences, cache.heads, 1, cache.dim)
        .with_key_length(place.longest(cache))
        .with_value_head_dim(values.layout.shape().dim)
        .with_dtype(small_element("new key", keys.new)?)
        .with_kv_dtype(small_element("key cache", keys.cache)?)
        .with_storage(Rows::Padded, place.storage(cache, sequences));
    let descale = |of: &Cache<'_>| of.factors.as_ref().map_or(Descale::None, |it| it.descale);
    problem.descales =
        Descales { query: Descale::None, key: descale(keys), value: descale(values) };
    let mut problem = AppendProblem::new(problem, append.new.longest(new));
    if append.new.is_packed() {
        problem = problem.with_packed_new(new.length);
    }
    Ok(match append.rotary.map(|rotary| (rotary.cosines.dims(), rotary.interleaved)) {
        Some((&[positions, pairs], interleaved)) => {
            problem.with_rotary(2 * pairs, interleaved, positions)
        }
        _ => problem,
    })
}

/// Tells whether two tensors are views of one allocation.
fn share_memory(one: &Tensor, other: &Tensor) -> bool {
    let at = |tensor: &Tensor| std::ptr::from_ref::<Storage>(&tensor.storage_and_layout().0);
    std::ptr::eq(at(one), at(other))
}

/// The operation on the key cache and, once that is lent, on the value cache.
#[derive(Clone, Copy)]
struct Work<'a> {
    append: &'a Append<'a>,
    problem: &'a AppendProblem,
    /// Receives the lengths with the new rows.
    after: DeviceAddress,
    stream: &'a CudaStream,
    /// Whether the caches of keys and values are views of one allocation.
    one_memory: bool,
    /// The key cache and the new keys, once they are lent.
    keys: Option<[DeviceTensor; 2]>,
    /// Addresses of the descale factors that are computed, once they are lent.
    found: [Option<DeviceAddress>; 2],
}

/// The operation on the computed factors of keys, then on those of values; after these come the
/// caches.
struct Lend<'a> {
    work: Work<'a>,
    /// Whether the factors of keys and values are views of one allocation.
    one_memory: bool,
}

impl Lend<'_> {
    /// Continues with the next tensor that is not lent yet.
    fn next(&self) -> Result<()> {
        let keys = &self.work.append.caches[0];
        match self.side() {
            Some((_, factors)) => factors.tensor.inplace_op1(self),
            None => keys.cache.inplace_op2(keys.new, &self.work),
        }
    }

    /// Returns the side (0 for keys, 1 for values) whose factors are lent next, with the factors.
    fn side(&self) -> Option<(usize, &Factors)> {
        let Work { append, found, .. } = &self.work;
        let mut missing = (0..2).filter(|side| found[*side].is_none());
        missing.find_map(|side| Some((side, found_factors(append, side)?)))
    }
}

/// Returns the factors of keys or values, where they are computed.
fn found_factors<'a>(append: &'a Append<'_>, side: usize) -> Option<&'a Factors> {
    append.caches[side].factors.as_ref().filter(|it| it.descale == Descale::PerToken)
}

impl InplaceOp1 for Lend<'_> {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        candle_core::bail!("{NAME}: the factors are not on a CUDA device")
    }

    fn cuda_fwd(&self, factors: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let Some((side, _)) = self.side() else {
            candle_core::bail!("{NAME}: all factors are lent")
        };
        // Where both factors share an allocation, candle has lent both.
        let other = found_factors(self.work.append, 1).filter(|_| self.one_memory);
        let other = other.map(|other| start(factors, other.tensor.layout()));
        let offset = start(factors, layout);
        let (memory, _guard) = address_mut(factors, self.work.stream)?;
        let mut found = self.work.found;
        if let Some(offset) = other {
            found[1] = Some(memory.offset(offset));
        }
        found[side] = Some(memory.offset(offset));
        Lend { work: Work { found, ..self.work }, ..*self }.next()
    }
}

impl Work<'_> {
    fn launch(
        &self,
        [key, new_key]: [DeviceTensor; 2],
        [value, new_value]: [DeviceTensor; 2],
    ) -> Result<()> {
        let Append { place: placement, lengths, new, rotary, .. } = self.append;
        let mut tensors = AppendTensors::new([new_key, new_value, key, value]);
        let [mut cosines, mut sines] = [None; 2];
        let mut factors = self.found;
        let [of_keys, of_values] = &mut factors;
        let given = self.append.caches.each_ref().map(|cache| cache.factors.as_ref());
        let per_head = given.map(|it| it.filter(|it| it.descale == Descale::PerHead));
        let per_head = per_head.map(|it| it.map(|factors| &factors.tensor));
        let (places, held) = hold([
            (of_keys, per_head[0]),
            (of_values, per_head[1]),
            (&mut tensors.key_lengths, Some(*lengths)),
            (&mut tensors.new_starts, new.starts()),
            (&mut tensors.new_lengths, new.lengths.as_ref()),
            (&mut tensors.batch_index, placement.batch_index()),
            (&mut tensors.block_table, placement.table()),
            (&mut cosines, rotary.map(|rotary| &rotary.cosines)),
            (&mut sines, rotary.map(|rotary| &rotary.sines)),
        ]);
        let _lists = find((places, &held), self.stream)?;
        tensors.lengths_after = Some(self.after);
        let [of_keys, of_values] = [0, 1].map(|side| {
            let strides = given[side]?.layout.strides();
            Some(DeviceTensor { address: factors[side]?, strides })
        });
        (tensors.key_descale, tensors.value_descale) = (of_keys, of_values);
        let rotary = cosines.zip(sines);
        tensors.rotary =
            rotary.map(|(cosines, sines)| RotaryTables { cosines, sines, starts: None });
        let (gpu, stream) = place(self.stream)?;
        gpu.append(&stream, self.problem, &tensors).map_err(wrap)?;
        Ok(())
    }
}

impl InplaceOp2 for Work<'_> {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<()> {
        candle_core::bail!("{NAME}: the tensors are not on a CUDA device")
    }

    fn cuda_fwd(
        &self,
        cache: &mut CudaStorage,
        of_cache: &Layout,
        new: &CudaStorage,
        of_new: &Layout,
    ) -> Result<()> {
        let [keys, values] = &self.append.caches;
        let here = if self.keys.is_some() { values } else { keys };
        let added = |address: DeviceAddress, cache: &Cache<'_>| DeviceTensor {
            address,
            strides: cache.new_layout.strides(),
        };
        let (from, _new) = address(new, self.stream)?;
        let new = added(from.offset(start(new, of_new)), here);
        let [offset, of_values] =
            [of_cache, values.cache.layout()].map(|layout| start(cache, layout));
        let (memory, _cache) = address_mut(cache, self.stream)?;
        let whole = |offset: u64, cache: &Cache<'_>| DeviceTensor {
            address: memory.offset(offset),
            strides: cache.layout.strides(),
        };
        let tensors = [whole(offset, here), new];
        if let Some(keys) = self.keys {
            return self.launch(keys, tensors);
        }
        if !self.one_memory {
            return values.cache.inplace_op2(values.new, &Work { keys: Some(tensors), ..*self });
        }
        // Candle has lent the memory of the values together with that of the keys.
        let mut from = None;
        let (places, held) = hold([(&mut from, Some(values.new))]);
        let _values = find((places, &held), self.stream)?;
        let new_value = added(from.unwrap_or_default(), values);
        self.launch(tensors, [whole(of_values, values), new_value])
    }
}

/// Name of the operations, for candle's errors.
const NAME: &str = "flashcore-append";
