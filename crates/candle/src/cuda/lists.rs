//! Lists of 32-bit numbers, which are tensors of candle's.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, SyncOnDrop};
use candle_core::{CudaStorage, DType, Layout, Result, Storage, StorageRef, Tensor};
use flashcore::Shape;
use flashcore::gpu::{DeviceAddress, ServingSize};

use crate::Placement;
use crate::placement::Storage as Rows;

/// A list that may not be there, under the lock that candle has for it.
pub(super) struct Held<'a>(Option<(StorageRef<'a>, &'a Layout)>);

impl<'a> Held<'a> {
    pub(super) fn new(list: Option<&'a Tensor>) -> Self {
        Held(list.map(Tensor::storage_and_layout))
    }
}

/// Where lists are on the device, with the guards of their use on a stream: each makes the stream
/// wait for what wrote its list, and tells candle of this use of it when it is dropped, which must
/// be after the launch.
pub(super) fn addresses<'a, const N: usize>(
    lists: &'a [Held<'_>; N],
    stream: &'a CudaStream,
) -> Result<([Option<DeviceAddress>; N], Vec<SyncOnDrop<'a>>)> {
    let mut guards = Vec::new();
    let mut addresses = [None; N];
    for (Held(list), place) in lists.iter().zip(&mut addresses) {
        if let Some((storage, layout)) = list {
            let (address, guard) = address(storage, layout, stream)?;
            *place = Some(address);
            guards.push(guard);
        }
    }
    Ok((addresses, guards))
}

fn address<'a>(
    storage: &'a Storage,
    layout: &Layout,
    stream: &'a CudaStream,
) -> Result<(DeviceAddress, SyncOnDrop<'a>)> {
    let Storage::Cuda(storage) = storage else {
        candle_core::bail!("attention: a list is not on a CUDA device")
    };
    fn of<'a, T: CudaDType + 'a>(
        storage: &'a CudaStorage,
        stream: &'a CudaStream,
    ) -> Result<(u64, SyncOnDrop<'a>)> {
        Ok(storage.as_cuda_slice::<T>()?.device_ptr(stream))
    }
    let (address, guard) = match storage.dtype() {
        DType::U32 => of::<u32>(storage, stream)?,
        DType::I32 => of::<i32>(storage, stream)?,
        DType::F32 => of::<f32>(storage, stream)?,
        other => candle_core::bail!("attention: a list has dtype {other:?}, expected 32 bits"),
    };
    Ok((DeviceAddress(address).offset(4 * layout.start_offset() as u64), guard))
}

impl Placement {
    pub(super) fn batch_entries(&self) -> Option<&Tensor> {
        match &self.storage {
            Rows::Padded { entries } => entries.as_ref(),
            _ => None,
        }
    }

    pub(super) fn starts(&self) -> Option<&Tensor> {
        match &self.storage {
            Rows::Packed { starts, .. } => Some(starts),
            _ => None,
        }
    }

    pub(super) fn table(&self) -> Option<&Tensor> {
        match &self.storage {
            Rows::Paged { table } => Some(table),
            _ => None,
        }
    }

    /// A size with keys that are placed so in a tensor.
    pub(super) fn size(&self, size: ServingSize, tensor: Shape) -> ServingSize {
        match &self.storage {
            Rows::Padded { .. } => size.with_entries(tensor.batch),
            Rows::Packed { .. } => size.with_packed_keys(tensor.length),
            Rows::Paged { table } => size.with_pages(tensor.length, table.dims()[1], tensor.batch),
        }
    }
}
