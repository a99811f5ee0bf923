//! Addresses and layouts of candle's tensors on the device.
//!
//! Every address comes with a guard: creating it makes the stream wait for earlier writes to the
//! memory, and dropping it, which must be after the launch, records this use of the memory for
//! candle.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use candle_core::{CudaDevice, CudaStorage, DType, Layout, Result, Storage, StorageRef, Tensor};
use flashcore::gpu::{DeviceAddress, DeviceTensor, Gradients, Tensors};
use flashcore::{Layout as Arranged, Shape};
use float8::F8E4M3;
use half::{bf16, f16};

use crate::arguments::Call;
use crate::wrap;

/// Returns query, key and value, and a contiguous output, at these addresses.
pub(super) fn tensors(
    call: &Call,
    inputs: [DeviceAddress; 3],
    output: DeviceAddress,
) -> Result<Tensors> {
    let [query, key, value] = std::array::from_fn(|index| DeviceTensor {
        address: inputs[index],
        strides: call.layouts[index].strides(),
    });
    let output = without_gaps(output, call.problem.output_shape())?;
    Ok(Tensors::new([query, key, value, output], None))
}

/// Returns contiguous gradients of the output and of query, key and value at these addresses. The
/// caller sets the gradients of sinks where it needs them.
pub(super) fn gradients(
    call: &Call,
    output: DeviceAddress,
    [query, key, value]: [DeviceAddress; 3],
) -> Result<Gradients> {
    let problem = &call.problem;
    Ok(Gradients {
        output: without_gaps(output, problem.output_shape())?,
        query: without_gaps(query, problem.query_shape())?,
        key: without_gaps(key, problem.key_shape())?,
        value: without_gaps(value, problem.value_shape())?,
        sinks: None,
        lse: None,
    })
}

fn without_gaps(address: DeviceAddress, shape: Shape) -> Result<DeviceTensor> {
    let strides = Arranged::contiguous(shape).map_err(wrap)?.strides();
    Ok(DeviceTensor { address, strides })
}

/// Returns the address of memory that is read.
pub(super) fn address<'a>(
    storage: &'a CudaStorage,
    stream: &'a CudaStream,
) -> Result<(DeviceAddress, SyncOnDrop<'a>)> {
    let (address, guard) = match storage.dtype() {
        DType::F32 => storage.as_cuda_slice::<f32>()?.device_ptr(stream),
        DType::F16 => storage.as_cuda_slice::<f16>()?.device_ptr(stream),
        DType::BF16 => storage.as_cuda_slice::<bf16>()?.device_ptr(stream),
        DType::F8E4M3 => storage.as_cuda_slice::<F8E4M3>()?.device_ptr(stream),
        DType::U32 => storage.as_cuda_slice::<u32>()?.device_ptr(stream),
        DType::I32 => storage.as_cuda_slice::<i32>()?.device_ptr(stream),
        other => candle_core::bail!("attention takes no {other:?}"),
    };
    Ok((DeviceAddress(address), guard))
}

/// Returns the address of memory that is written.
pub(super) fn address_mut<'a>(
    storage: &'a mut CudaStorage,
    stream: &'a CudaStream,
) -> Result<(DeviceAddress, SyncOnDrop<'a>)> {
    let (address, guard) = match storage.dtype() {
        DType::F32 => storage.as_cuda_slice_mut::<f32>()?.device_ptr_mut(stream),
        DType::F16 => storage.as_cuda_slice_mut::<f16>()?.device_ptr_mut(stream),
        DType::BF16 => storage.as_cuda_slice_mut::<bf16>()?.device_ptr_mut(stream),
        DType::F8E4M3 => storage.as_cuda_slice_mut::<F8E4M3>()?.device_ptr_mut(stream),
        DType::U32 => storage.as_cuda_slice_mut::<u32>()?.device_ptr_mut(stream),
        other => candle_core::bail!("attention writes no {other:?}"),
    };
    Ok((DeviceAddress(address), guard))
}

/// Allocates memory for a result. It is never empty, since the driver refuses empty allocations.
pub(super) fn uninitialized(
    device: &CudaDevice,
    elements: usize,
    dtype: DType,
) -> Result<CudaStorage> {
    // SAFETY: the kernel writes every element of a query or a sequence before anything later on the
    // stream can read it; others are not defined.
    unsafe { device.alloc_uninit(&elements.max(1).into(), dtype) }
}

/// A tensor under candle's lock.
pub(super) type Held<'a> = (StorageRef<'a>, &'a Layout);

/// Locks the tensors that are given, and returns them with the fields for their addresses.
pub(super) fn hold<'p, 't, const N: usize>(
    lists: [(&'p mut Option<DeviceAddress>, Option<&'t Tensor>); N],
) -> (Vec<&'p mut Option<DeviceAddress>>, Vec<Held<'t>>) {
    let there = |(place, list): (_, Option<&'t Tensor>)| Some((place, list?.storage_and_layout()));
    lists.into_iter().filter_map(there).unzip()
}

/// Writes the addresses of the tensors' first elements to their fields.
pub(super) fn find<'a>(
    (places, held): (Vec<&mut Option<DeviceAddress>>, &'a [Held<'_>]),
    stream: &'a CudaStream,
) -> Result<Vec<SyncOnDrop<'a>>> {
    let mut guards = Vec::with_capacity(held.len());
    for (place, (storage, layout)) in places.into_iter().zip(held) {
        let Storage::Cuda(storage) = &**storage else {
            candle_core::bail!("attention: a tensor is not on a CUDA device")
        };
        let (address, guard) = address(storage, stream)?;
        *place = Some(address.offset(start(storage, layout)));
        guards.push(guard);
    }
    Ok(guards)
}

/// Returns the offset of the first element in bytes.
pub(super) fn start(storage: &CudaStorage, layout: &Layout) -> u64 {
    (layout.start_offset() * storage.dtype().size_in_bytes()) as u64
}
