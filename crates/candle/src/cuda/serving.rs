//! Attention over sequences of unequal lengths, and with slopes or sinks.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, SyncOnDrop};
use candle_core::{CudaStorage, DType, Layout, Result, Storage, Tensor};
use flashcore::gpu::{
    DeviceAddress, ForwardTensors, ServingPlan, ServingSize, ServingTensors, Stream, StreamIdentity,
};

use super::{Place, lock};
use crate::arguments::Call;
use crate::placement::Storage as Rows;
use crate::{Placement, Sequences, wrap};

/// What a plan depends on. Its workspace is for launches that follow each other, on one stream.
#[derive(PartialEq)]
pub(super) struct Key {
    size: ServingSize,
    stream: StreamIdentity,
}

/// Puts attention over sequences on candle's stream.
pub(super) fn launch(
    call: &Call,
    tensors: ForwardTensors,
    place: &Place,
    stream: &Stream,
    candle_stream: &CudaStream,
) -> Result<()> {
    let lists = Lists::of(call);
    let held = lists.all().map(|list| list.map(Tensor::storage_and_layout));
    // Each guard makes the stream wait for what wrote its list, and tells candle of this use of it
    // when it is dropped: after the launch.
    let mut guards = Vec::new();
    let mut addresses = [None; 9];
    for (held, place) in held.iter().zip(&mut addresses) {
        if let Some((storage, layout)) = held {
            let (address, guard) = address(storage, layout, candle_stream)?;
            *place = Some(address);
            guards.push(guard);
        }
    }
    let ForwardTensors { query, key, value, output, lse } = tensors;
    let [lengths, left_padding, entries, query_starts, query_lengths, key_starts, ..] = addresses;
    let [.., block_table, slopes, sinks] = addresses;
    let tensors = ServingTensors {
        lengths,
        left_padding,
        entries,
        query_starts,
        query_lengths,
        key_starts,
        block_table,
        slopes,
        sinks,
        ..ServingTensors::new(query, key, value, output, lse)
    };
    let size = size(call);
    let key = Key { size: size.clone(), stream: stream.identity() };
    let make = || ServingPlan::new(&place.gpu, &size).map_err(wrap);
    let plan = place.serving.get(key, stream, make)?;
    lock(&plan).launch(stream, &tensors).map_err(wrap)
}

/// The most that a call can ask for, whatever its lists hold.
fn size(call: &Call) -> ServingSize {
    let (query, key) = (call.layouts.query.shape(), call.layouts.key.shape());
    let mut size = ServingSize::new(call.problem.clone()).with_entries(key.batch);
    if let Some(Sequences { queries, keys }) = &call.sequences {
        if queries.is_packed() {
            size = size.with_packed_queries(query.length);
        }
        size = match &keys.storage {
            Rows::Padded { .. } => size,
            Rows::Packed { .. } => size.with_packed_keys(key.length),
            Rows::Paged { table } => size.with_pages(key.length, table.dims()[1], key.batch),
        };
    }
    match call.slopes.as_ref().is_some_and(|slopes| slopes.rank() == 2) {
        true => size.with_slopes_of_sequences(),
        false => size,
    }
}

/// What a call has besides query, key and value.
#[derive(Default)]
struct Lists<'a> {
    lengths: Option<&'a Tensor>,
    left_padding: Option<&'a Tensor>,
    entries: Option<&'a Tensor>,
    query_starts: Option<&'a Tensor>,
    query_lengths: Option<&'a Tensor>,
    key_starts: Option<&'a Tensor>,
    block_table: Option<&'a Tensor>,
    slopes: Option<&'a Tensor>,
    sinks: Option<&'a Tensor>,
}

impl<'a> Lists<'a> {
    fn of(call: &'a Call) -> Self {
        let extras =
            Lists { slopes: call.slopes.as_ref(), sinks: call.sinks.as_ref(), ..Lists::default() };
        let Some(Sequences { queries, keys }) = &call.sequences else {
            return extras;
        };
        let starts = |placement: &'a Placement| match &placement.storage {
            Rows::Packed { starts, .. } => Some(starts),
            _ => None,
        };
        Lists {
            lengths: keys.lengths.as_ref(),
            left_padding: keys.left_padding.as_ref(),
            entries: match &keys.storage {
                Rows::Padded { entries } => entries.as_ref(),
                _ => None,
            },
            query_starts: starts(queries),
            query_lengths: queries.lengths.as_ref(),
            key_starts: starts(keys),
            block_table: match &keys.storage {
                Rows::Paged { table } => Some(table),
                _ => None,
            },
            ..extras
        }
    }

    /// In the order in which they are taken apart again.
    fn all(&self) -> [Option<&'a Tensor>; 9] {
        [
            self.lengths,
            self.left_padding,
            self.entries,
            self.query_starts,
            self.query_lengths,
            self.key_starts,
            self.block_table,
            self.slopes,
            self.sinks,
        ]
    }
}

/// Where a list of 32-bit numbers is on the device, with the guard of its use on a stream.
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
