//! Attention on candle tensors on a GPU: each call is described to the library, which has the plans.
//!
//! | file | its subject |
//! | --- | --- |
//! | `append` | new keys and values into a cache |
//! | `memory` | where tensors are |
//! | this one | attention, and parts of it together |

pub(crate) mod append;
mod memory;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{CudaDevice, CudaStorage, DType, Result, Storage, Tensor};
use flashcore::gpu::{CombineProblem, CombineTensors, Gpu, Stream};
use flashcore::{Plan, Shape};

use self::memory::{address, address_mut, find, hold, uninitialized};
use crate::arguments::{Call, element};
use crate::{Sequences, wrap};

/// Output, and log-sum-exp where it is wanted.
pub(crate) fn attend(
    call: &Call,
    [query, key, value]: [&CudaStorage; 3],
) -> Result<(CudaStorage, Option<CudaStorage>)> {
    let (device, problem) = (query.device(), &call.problem);
    let stream = &device.cuda_stream();
    let mut output = uninitialized(device, call.output_shape().elem_count(), query.dtype())?;
    let lse = problem.lse.then(|| uninitialized(device, problem.rows(), DType::F32));
    let mut lse = lse.transpose()?;
    if problem.batch * problem.query_length * problem.rows() > 0 {
        let (query, _query) = address(query, stream)?;
        let (key, _key) = address(key, stream)?;
        let (value, _value) = address(value, stream)?;
        let (output, _output) = address_mut(&mut output, stream)?;
        let lse = lse.as_mut().map(|lse| address_mut(lse, stream)).transpose()?;
        let Sequences { queries, keys } = &call.sequences;
        let mut tensors = call.tensors([query, key, value, output])?;
        tensors.lse = lse.as_ref().map(|(lse, _)| *lse);
        let (places, held) = hold([
            (&mut tensors.query_starts, queries.starts()),
            (&mut tensors.query_lengths, queries.lengths.as_ref()),
            (&mut tensors.key_starts, keys.starts()),
            (&mut tensors.key_lengths, keys.lengths.as_ref()),
            (&mut tensors.left_padding, keys.left_padding.as_ref()),
            (&mut tensors.batch_index, keys.batch_index()),
            (&mut tensors.block_table, keys.table()),
            (&mut tensors.slopes, call.slopes.as_ref()),
            (&mut tensors.sinks, call.sinks.as_ref()),
        ]);
        let _lists = find((places, &held), stream)?;
        let (gpu, stream) = place(stream)?;
        gpu.attend(&stream, problem, &tensors).map_err(wrap)?;
    }
    Ok((output, lse))
}

/// Output and log-sum-exp of parts together. Outputs have no gaps.
pub(crate) fn combine(
    shape: Shape,
    outputs: &[&Tensor],
    lses: &[&Tensor],
    device: &CudaDevice,
) -> Result<(Storage, Storage)> {
    let problem = CombineProblem::new(outputs.len(), shape, element("output", outputs[0])?);
    let [elements, rows] = [outputs[0], lses[0]].map(Tensor::elem_count);
    let mut output = uninitialized(device, elements, outputs[0].dtype())?;
    let mut lse = uninitialized(device, rows, DType::F32)?;
    if rows > 0 {
        let stream = &device.cuda_stream();
        let parts = [Tensor::stack(outputs, 0)?, Tensor::stack(lses, 0)?];
        let [mut from_output, mut from_lse] = [None; 2];
        let (places, held) =
            hold([(&mut from_output, Some(&parts[0])), (&mut from_lse, Some(&parts[1]))]);
        let _parts = find((places, &held), stream)?;
        let (output, _output) = address_mut(&mut output, stream)?;
        let (lse, _lse) = address_mut(&mut lse, stream)?;
        let parts = [from_output, from_lse].map(Option::unwrap_or_default);
        let tensors = CombineTensors::stacked(&problem, parts, [output, lse]).map_err(wrap)?;
        let (gpu, stream) = place(stream)?;
        gpu.combine(&stream, &problem, &tensors).map_err(wrap)?;
    }
    Ok((Storage::Cuda(output), Storage::Cuda(lse)))
}

/// Which kernel serves a call, and why.
pub(crate) fn plan(call: &Call, device: &CudaDevice) -> Result<Plan> {
    let (gpu, _) = place(&device.cuda_stream())?;
    let plan = gpu.attention(&call.problem, &call.at_rest()?).map_err(wrap)?;
    Ok(plan.plan().clone())
}

/// The GPU that a stream of candle's is on, opened the first time, and the stream.
fn place(stream: &CudaStream) -> Result<(Arc<Gpu>, Stream)> {
    static GPUS: Mutex<BTreeMap<usize, Arc<Gpu>>> = Mutex::new(BTreeMap::new());
    let ordinal = stream.context().ordinal();
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let gpu = match gpus.get(&ordinal) {
        Some(gpu) => gpu.clone(),
        None => {
            let gpu = Arc::new(Gpu::open(ordinal as u32).map_err(wrap)?);
            gpus.insert(ordinal, gpu.clone());
            gpu
        }
    };
    // SAFETY: the stream belongs to candle's device, which the tensors keep alive, and to the
    // primary context of the GPU that was opened by its number.
    let stream = unsafe { Stream::borrow(gpu.device(), stream.cu_stream() as u64) };
    Ok((gpu, stream))
}
