//! Attention over candle tensors on a GPU: each call is described to FlashCore, which plans and
//! launches.
//!
//! | file | its subject |
//! | --- | --- |
//! | `append` | appending new keys and values to a cache |
//! | `memory` | addresses of tensors |
//! | this one | attention, gradients, and combining parts |

pub(crate) mod append;
mod memory;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{CudaDevice, CudaStorage, DType, Result, Storage, Tensor};
use flashcore::gpu::{
    CombineProblem, CombineTensors, DeviceAddress, DeviceTensor, Gpu, Stream, Tensors,
};
use flashcore::{Descales, Plan, Shape};

use self::memory::{address, address_mut, find, hold, uninitialized};
use crate::arguments::{Call, element};
use crate::operation::Saved;
use crate::{Sequences, wrap};

/// Computes the output, and the log-sum-exp where it is wanted.
pub(crate) fn attend(
    call: &Call,
    [query, key, value]: [&CudaStorage; 3],
) -> Result<(CudaStorage, Option<CudaStorage>)> {
    let (device, problem) = (query.device(), &call.problem);
    let stream = &device.cuda_stream();
    let dtype = match query.dtype() {
        DType::F8E4M3 => DType::BF16,
        wide => wide,
    };
    let mut output = uninitialized(device, call.output_shape().elem_count(), dtype)?;
    let lse = problem.lse.then(|| uninitialized(device, problem.rows(), DType::F32));
    let mut lse = lse.transpose()?;
    if problem.batch > 0 && problem.query_length > 0 && problem.rows() > 0 {
        let (query, _query) = address(query, stream)?;
        let (key, _key) = address(key, stream)?;
        let (value, _value) = address(value, stream)?;
        let (output, _output) = address_mut(&mut output, stream)?;
        let lse = lse.as_mut().map(|lse| address_mut(lse, stream)).transpose()?;
        let [of_query, of_key, of_value] = call.offsets;
        let inputs = [query.offset(of_query), key.offset(of_key), value.offset(of_value)];
        let mut tensors = memory::tensors(call, inputs, output)?;
        tensors.lse = lse.as_ref().map(|(lse, _)| *lse);
        let (places, held) = hold(lists(call, &mut tensors));
        let _lists = find((places, &held), stream)?;
        let mut factors = Descales::<Option<DeviceAddress>>::default();
        let of = call.descales.each_ref().map(|it| it.as_ref().map(|(factors, _)| factors));
        let (places, held) = hold([
            (&mut factors.query, of.query),
            (&mut factors.key, of.key),
            (&mut factors.value, of.value),
        ]);
        let _factors = find((places, &held), stream)?;
        tensors.descales = factors.zip(call.descales.each_ref()).map(|(address, factors)| {
            let strides = factors.as_ref()?.1.strides();
            Some(DeviceTensor { address: address?, strides })
        });
        let (gpu, stream) = place(stream)?;
        gpu.attend(&stream, problem, &tensors).map_err(wrap)?;
    }
    Ok((output, lse))
}

/// Computes the gradients of query, key and value.
pub(crate) fn differentiate(
    call: &Call,
    inputs: [&Tensor; 3],
    Saved { output, lse, output_gradient }: Saved<'_>,
    device: &CudaDevice,
) -> Result<[Tensor; 3]> {
    let problem = &call.problem.clone().backward();
    let nothing = problem.rows() == 0 || inputs[1].elem_count() == 0;
    // Rows that belong to no sequence are not written: they start as zeros.
    let in_part = nothing || !problem.has_equal_lengths();
    let mut gradients = Vec::with_capacity(inputs.len());
    for of in inputs {
        gradients.push(match in_part {
            true => device.zeros_impl(&of.elem_count().max(1).into(), of.dtype())?,
            false => uninitialized(device, of.elem_count(), of.dtype())?,
        });
    }
    if !nothing {
        let stream = &device.cuda_stream();
        let [query, key, value] = inputs.map(Some);
        let [mut from_query, mut from_key, mut from_value] = [None; 3];
        let [mut from_output, mut from_gradient, mut from_lse] = [None; 3];
        let (places, held) = hold([
            (&mut from_query, query),
            (&mut from_key, key),
            (&mut from_value, value),
            (&mut from_output, Some(output)),
            (&mut from_gradient, Some(output_gradient)),
            (&mut from_lse, Some(lse)),
        ]);
        let _given = find((places, &held), stream)?;
        let [from_output, from_gradient] =
            [from_output, from_gradient].map(Option::unwrap_or_default);
        let from = [from_query, from_key, from_value].map(Option::unwrap_or_default);
        let mut tensors = memory::tensors(call, from, from_output)?;
        tensors.lse = from_lse;
        let (places, held_lists) = hold(lists(call, &mut tensors));
        let _lists = find((places, &held_lists), stream)?;
        let mut results = [DeviceAddress(0); 3];
        let mut guards = Vec::with_capacity(results.len());
        for (result, gradient) in results.iter_mut().zip(&mut gradients) {
            let (address, guard) = address_mut(gradient, stream)?;
            *result = address;
            guards.push(guard);
        }
        // The kernels write gradients of the sinks too, which candle does not take.
        let sinks =
            problem.scores.sinks.then(|| uninitialized(device, problem.query_heads, DType::F32));
        let mut sinks = sinks.transpose()?;
        let of_sinks = sinks.as_mut().map(|sinks| address_mut(sinks, stream)).transpose()?;
        let of_sinks = of_sinks.as_ref().map(|(address, _)| *address);
        let results = memory::gradients(call, from_gradient, results)?;
        tensors.gradients = Some(flashcore::gpu::Gradients { sinks: of_sinks, ..results });
        let (gpu, stream) = place(stream)?;
        gpu.attend(&stream, problem, &tensors).map_err(wrap)?;
    }
    let shaped = inputs.iter().zip(gradients);
    let shaped = shaped.map(|(of, gradient)| crate::tensor(Storage::Cuda(gradient), of.shape()));
    let [query, key, value] = shaped.collect::<Vec<_>>().try_into().expect("as many as inputs");
    Ok([query, key, value])
}

/// Pairs the lists of a call with the fields for their addresses.
fn lists<'p, 't>(
    call: &'t Call,
    tensors: &'p mut Tensors,
) -> [(&'p mut Option<DeviceAddress>, Option<&'t Tensor>); 9] {
    let Sequences { queries, keys } = &call.sequences;
    [
        (&mut tensors.query_starts, queries.starts()),
        (&mut tensors.query_lengths, queries.lengths.as_ref()),
        (&mut tensors.key_starts, keys.starts()),
        (&mut tensors.key_lengths, keys.lengths.as_ref()),
        (&mut tensors.left_padding, keys.left_padding.as_ref()),
        (&mut tensors.batch_index, keys.batch_index()),
        (&mut tensors.block_table, keys.table()),
        (&mut tensors.slopes, call.slopes.as_ref()),
        (&mut tensors.sinks, call.sinks.as_ref()),
    ]
}

/// Computes output and log-sum-exp of combined parts. Outputs must be contiguous.
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

/// Returns which kernel serves a call, and why.
pub(crate) fn plan(call: &Call, device: &CudaDevice) -> Result<Plan> {
    let (gpu, _) = place(&device.cuda_stream())?;
    let at_rest = memory::tensors(call, call.offsets.map(DeviceAddress), DeviceAddress(0))?;
    let plan = gpu.attention(&call.problem, &at_rest).map_err(wrap)?;
    Ok(plan.plan().clone())
}

/// Returns the GPU of one of candle's streams, opened at first use, and the borrowed stream.
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
