//! New keys and values into a cache on a GPU.
//!
//! Candle lends memory that may be written to an operation in place, which has one such tensor. Here
//! there are two: the operation on the values runs inside that on the keys, and launches for both.

use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{
    CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop,
};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, DType, InplaceOp2, Layout, Result, Storage, Tensor};
use flashcore::Problem;
use flashcore::gpu::{
    AppendPlan, AppendSize, AppendTensors, DeviceAddress, DeviceTensor, RotaryTables, ServingSize,
    Stream,
};
use half::{bf16, f16};

use super::lists::{Held, addresses};
use super::{lock, place, tensor};
use crate::append::{Append, Cache};
use crate::arguments::refusal;
use crate::wrap;

/// Writes the rows, and returns the lengths with them.
pub(crate) fn append(append: &Append<'_>) -> Result<Tensor> {
    match append.caches[0].cache.dtype() {
        DType::F16 => append_as::<f16>(append, flashcore::DType::F16),
        DType::BF16 => append_as::<bf16>(append, flashcore::DType::BF16),
        other => {
            let given = format!("has dtype {other:?}");
            Err(refusal("key cache", given, "F16 or BF16 on a GPU"))
        }
    }
}

fn append_as<T: CudaDType + DeviceRepr>(
    append: &Append<'_>,
    dtype: flashcore::DType,
) -> Result<Tensor> {
    let [keys, values] = &append.caches;
    let new = keys.new_layout.shape();
    if append.sequences == 0 || new.batch * new.length == 0 {
        return append.lengths.to_dtype(DType::U32);
    }
    for (name, new) in [("new key", keys.new), ("new value", values.new)] {
        // Candle's lock of the one would be waited for under its lock of the other.
        if share_memory(new, keys.cache) || share_memory(new, values.cache) {
            return Err(refusal(name, "is in the memory of a cache", "memory of its own"));
        }
    }
    let device = keys.cache.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    // SAFETY: the kernel writes a length for every sequence before anything later on the stream can
    // read it.
    let mut lengths = unsafe { device.alloc::<u32>(append.sequences) }?;
    // Tells candle of the launch when it is dropped.
    let (after, guard) = lengths.device_ptr_mut(&stream);
    let work = Work::<T> {
        append,
        size: size(append, dtype),
        after: DeviceAddress(after),
        stream: &stream,
        one_memory: share_memory(keys.cache, values.cache),
        element: std::marker::PhantomData,
    };
    keys.cache.inplace_op2(keys.new, &work)?;
    drop(guard);
    let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(lengths, device.clone()));
    Ok(Tensor::from_storage(storage, append.sequences, BackpropOp::none(), false))
}

/// The most that a call can ask for, whatever its lists hold.
fn size(append: &Append<'_>, dtype: flashcore::DType) -> AppendSize {
    let [keys, values] = &append.caches;
    let (cache, new) = (keys.layout.shape(), keys.new_layout.shape());
    let problem = Problem::new(append.sequences, cache.heads, 1, cache.dim)
        .with_key_length(append.place.longest(cache))
        .with_value_head_dim(values.layout.shape().dim)
        .with_dtype(dtype);
    let serving = append.place.size(ServingSize::new(problem), cache);
    let mut size = AppendSize::new(serving, append.new.longest(new));
    if append.new.is_packed() {
        size = size.with_packed_new(new.length);
    }
    match append.rotary.map(|rotary| (rotary.cosines.dims(), rotary.interleaved)) {
        Some((&[positions, pairs], interleaved)) => {
            size.with_rotary(2 * pairs, interleaved, positions)
        }
        _ => size,
    }
}

/// Whether two tensors are views of one allocation.
fn share_memory(one: &Tensor, other: &Tensor) -> bool {
    let at = |tensor: &Tensor| std::ptr::from_ref::<Storage>(&tensor.storage_and_layout().0);
    std::ptr::eq(at(one), at(other))
}

/// The operation on the keys.
struct Work<'a, T> {
    append: &'a Append<'a>,
    size: AppendSize,
    /// Where the lengths with the new rows go.
    after: DeviceAddress,
    stream: &'a CudaStream,
    /// Whether keys and values are views of one allocation.
    one_memory: bool,
    element: std::marker::PhantomData<T>,
}

/// The operation on the values, once the keys are known.
struct Values<'a, T> {
    work: &'a Work<'a, T>,
    /// The cache and the new ones.
    keys: [DeviceTensor; 2],
}

impl<T: CudaDType + DeviceRepr> Work<'_, T> {
    fn launch(
        &self,
        [key, new_key]: [DeviceTensor; 2],
        [value, new_value]: [DeviceTensor; 2],
    ) -> Result<()> {
        let Append { place: placement, lengths, new, rotary, .. } = self.append;
        let lists = [
            Some(*lengths),
            new.starts(),
            new.lengths.as_ref(),
            placement.batch_entries(),
            placement.table(),
        ];
        let held = lists.map(Held::new);
        let (lists, _guards) = addresses(&held, self.stream)?;
        let [lengths, new_starts, new_lengths, entries, block_table] = lists;
        let tables = rotary.map(|rotary| [&rotary.cosines, &rotary.sines]);
        let tables = tables.map(|tables| tables.map(Tensor::storage_and_layout));
        let tables = match &tables {
            None => None,
            Some([cosines, sines]) => {
                let (cosines, of_cosines) = table::<T>(cosines, self.stream)?;
                let (sines, of_sines) = table::<T>(sines, self.stream)?;
                let tables = RotaryTables { cosines, sines, starts: None };
                Some((tables, [of_cosines, of_sines]))
            }
        };
        let tensors = AppendTensors {
            lengths,
            lengths_after: Some(self.after),
            new_starts,
            new_lengths,
            entries,
            block_table,
            rotary: tables.as_ref().map(|(tables, _)| *tables),
            ..AppendTensors::new(new_key, new_value, key, value)
        };
        let gpu = place(self.stream)?;
        // SAFETY: the stream belongs to candle's device, which the tensors keep alive, and to the
        // primary context of the GPU that was opened by its number.
        let stream = unsafe { Stream::borrow(gpu.gpu.device(), self.stream.cu_stream() as u64) };
        let make = || AppendPlan::new(&gpu.gpu, &self.size).map_err(wrap);
        let plan = gpu.appending.get(self.size.clone(), &stream, make)?;
        lock(&plan).launch(&stream, &tensors).map_err(wrap)
    }
}

impl<T: CudaDType + DeviceRepr> InplaceOp2 for Work<'_, T> {
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
        let (new_key, _new) = tensor::<T>((new, of_new), &keys.new_layout, self.stream)?;
        let (memory, _cache) = cache.as_cuda_slice_mut::<T>()?.device_ptr_mut(self.stream);
        let key = view::<T>(memory, of_cache, keys);
        if !self.one_memory {
            let operation = Values { work: self, keys: [key, new_key] };
            return values.cache.inplace_op2(values.new, &operation);
        }
        let value = view::<T>(memory, values.cache.layout(), values);
        let (storage, of_new) = values.new.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else {
            candle_core::bail!("{NAME}: the new value is not on a CUDA device")
        };
        let (new_value, _new) = tensor::<T>((storage, of_new), &values.new_layout, self.stream)?;
        self.launch([key, new_key], [value, new_value])
    }
}

impl<T: CudaDType + DeviceRepr> InplaceOp2 for Values<'_, T> {
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
        let values = &self.work.append.caches[1];
        let stream = self.work.stream;
        let (new_value, _new) = tensor::<T>((new, of_new), &values.new_layout, stream)?;
        let (memory, _cache) = cache.as_cuda_slice_mut::<T>()?.device_ptr_mut(stream);
        self.work.launch(self.keys, [view::<T>(memory, of_cache, values), new_value])
    }
}

/// The operations' name, for candle's errors.
const NAME: &str = "flashcore-append";

/// A cache in memory that begins there.
fn view<T>(memory: u64, of: &Layout, cache: &Cache<'_>) -> DeviceTensor {
    let address = DeviceAddress(memory).offset((of.start_offset() * size_of::<T>()) as u64);
    DeviceTensor { address, strides: cache.layout.strides() }
}

/// Where a rotary table is, with the guard of its use on a stream.
fn table<'a, T: CudaDType + 'a>(
    (storage, layout): &'a (candle_core::StorageRef<'_>, &Layout),
    stream: &'a CudaStream,
) -> Result<(DeviceAddress, SyncOnDrop<'a>)> {
    let Storage::Cuda(storage) = &**storage else {
        candle_core::bail!("{NAME}: a rotary table is not on a CUDA device")
    };
    let (address, guard) = storage.as_cuda_slice::<T>()?.device_ptr(stream);
    let address = DeviceAddress(address).offset((layout.start_offset() * size_of::<T>()) as u64);
    Ok((address, guard))
}
