//! Attention on candle tensors on a GPU.
//!
//! | file | its subject |
//! | --- | --- |
//! | `append` | new keys and values into a cache |
//! | `lists` | lists of numbers that are tensors |
//! | `plans` | what is kept from call to call |
//! | `serving` | sequences of unequal lengths, slopes and sinks |
//! | this one | plain attention, and what both need |

pub(crate) mod append;
mod lists;
mod plans;
mod serving;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{
    CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop,
};
use candle_core::{CudaStorage, Layout, Result, Storage, Tensor};
use flashcore::gpu::{
    AppendPlan, AppendSize, AttentionPlan, DeviceAddress, DeviceTensor, ForwardTensors, Gpu,
    ServingPlan, Stream,
};
use flashcore::{DType, Plan, Preference, Problem, Shape, Strides};
use half::{bf16, f16};

use self::plans::Plans;
use crate::arguments::Call;
use crate::wrap;

/// A GPU, and what was made for the problems that it had to solve.
struct Place {
    gpu: Gpu,
    plans: Plans<Key, AttentionPlan>,
    serving: Plans<serving::Key, ServingPlan>,
    appending: Plans<AppendSize, AppendPlan>,
}

/// What the choice of a kernel depends on.
#[derive(Clone, PartialEq)]
struct Key {
    problem: Problem,
    strides: [Strides; 3],
    /// Whether the copy engine can read every tensor where it begins.
    aligned: bool,
}

/// Output and log-sum-exp.
pub(crate) fn attend(
    call: &Call,
    tensors: [(&CudaStorage, &Layout); 3],
) -> Result<(CudaStorage, CudaStorage)> {
    match call.problem.dtype {
        DType::F32 => attend_as::<f32>(call, tensors),
        DType::F16 => attend_as::<f16>(call, tensors),
        DType::BF16 => attend_as::<bf16>(call, tensors),
        other => candle_core::bail!("attention takes no {other} from candle"),
    }
}

fn attend_as<T: CudaDType + DeviceRepr>(
    call: &Call,
    tensors: [(&CudaStorage, &Layout); 3],
) -> Result<(CudaStorage, CudaStorage)> {
    let device = tensors[0].0.device().clone();
    let stream = device.cuda_stream();
    let [elements, rows] = [call.output_shape(), call.lse_shape()].map(|it| it.elem_count());
    // An allocation is never empty, which the driver would refuse.
    // SAFETY: the kernel writes every element of a query before anything later on the stream can
    // read it; other rows are not defined.
    let mut output = unsafe { device.alloc::<T>(elements.max(1)) }?;
    // SAFETY: as above.
    let mut lse = unsafe { device.alloc::<f32>(rows.max(1)) }?;
    if call.problem.rows() > 0 && rows > 0 {
        let place = place(&stream)?;
        // Each guard makes the stream wait for what wrote its memory, and tells candle of this
        // use of it when it is dropped: after the launch.
        let layouts = &call.layouts;
        let (query, _query) = tensor::<T>(tensors[0], &layouts.query, &stream)?;
        let (key, _key) = tensor::<T>(tensors[1], &layouts.key, &stream)?;
        let (value, _value) = tensor::<T>(tensors[2], &layouts.value, &stream)?;
        let (output, _output) = output.device_ptr_mut(&stream);
        let (lse, _lse) = lse.device_ptr_mut(&stream);
        let (address, strides) = (DeviceAddress(output), output_strides(call)?);
        let output = DeviceTensor { address, strides };
        let tensors = ForwardTensors { query, key, value, output, lse: DeviceAddress(lse) };
        // SAFETY: the stream belongs to candle's device, which `device` keeps alive, and to the
        // primary context of the GPU that was opened by its number.
        let borrowed = unsafe { Stream::borrow(place.gpu.device(), stream.cu_stream() as u64) };
        if call.is_plain() {
            let plan = place.plan(&call.problem, &tensors, &borrowed)?;
            lock(&plan).launch(&borrowed, &tensors).map_err(wrap)?;
        } else {
            serving::launch(call, tensors, &place, &borrowed, &stream)?;
        }
    }
    let output = CudaStorage::wrap_cuda_slice(output, device.clone());
    Ok((output, CudaStorage::wrap_cuda_slice(lse, device)))
}

/// The output, which candle allocates, has the query's shape and no gaps.
fn output_strides(call: &Call) -> Result<Strides> {
    let shape = Shape { dim: call.problem.value_head_dim, ..call.layouts.query.shape() };
    Ok(flashcore::Layout::contiguous(shape).map_err(wrap)?.strides())
}

/// Which kernel serves these tensors, and why.
pub(crate) fn plan(call: &Call, tensors: [&Tensor; 3]) -> Result<Plan> {
    let [query, key, value] = tensors.map(Tensor::storage_and_layout);
    let (Storage::Cuda(query_memory), Storage::Cuda(key_memory), Storage::Cuda(value_memory)) =
        (&*query.0, &*key.0, &*value.0)
    else {
        candle_core::bail!("attention: the tensors are not on a CUDA device")
    };
    let tensors = [(query_memory, query.1), (key_memory, key.1), (value_memory, value.1)];
    match call.problem.dtype {
        DType::F32 => plan_as::<f32>(call, tensors),
        DType::F16 => plan_as::<f16>(call, tensors),
        DType::BF16 => plan_as::<bf16>(call, tensors),
        other => candle_core::bail!("attention takes no {other} from candle"),
    }
}

fn plan_as<T: CudaDType>(call: &Call, tensors: [(&CudaStorage, &Layout); 3]) -> Result<Plan> {
    let stream = tensors[0].0.device().cuda_stream();
    let place = place(&stream)?;
    let layouts = &call.layouts;
    let (query, _query) = tensor::<T>(tensors[0], &layouts.query, &stream)?;
    let (key, _key) = tensor::<T>(tensors[1], &layouts.key, &stream)?;
    let (value, _value) = tensor::<T>(tensors[2], &layouts.value, &stream)?;
    // The output, which candle allocates, is always aligned.
    let output = DeviceTensor { address: DeviceAddress(0), strides: output_strides(call)? };
    let tensors = ForwardTensors { query, key, value, output, lse: DeviceAddress(0) };
    // SAFETY: as in `attend_as`.
    let stream = unsafe { Stream::borrow(place.gpu.device(), stream.cu_stream() as u64) };
    let plan = place.plan(&call.problem, &tensors, &stream)?;
    Ok(lock(&plan).plan().clone())
}

impl Place {
    /// The plan for a problem and the way its tensors lie, made the first time.
    fn plan(
        &self,
        problem: &Problem,
        tensors: &ForwardTensors,
        stream: &Stream,
    ) -> Result<Arc<Mutex<AttentionPlan>>> {
        let inputs = [tensors.query, tensors.key, tensors.value];
        let key = Key {
            problem: problem.clone(),
            strides: inputs.map(|tensor| tensor.strides),
            aligned: inputs.iter().all(|tensor| tensor.address.0.is_multiple_of(16)),
        };
        self.plans.get(key, stream, || {
            let preference = Preference::from_environment();
            AttentionPlan::new(&self.gpu, problem, tensors, &preference).map_err(wrap)
        })
    }
}

/// The GPU that a stream is on, opened the first time.
fn place(stream: &CudaStream) -> Result<Arc<Place>> {
    static PLACES: Mutex<Option<HashMap<usize, Arc<Place>>>> = Mutex::new(None);
    let ordinal = stream.context().ordinal();
    let mut places = lock(&PLACES);
    let places = places.get_or_insert_default();
    if let Some(place) = places.get(&ordinal) {
        return Ok(place.clone());
    }
    let gpu = Gpu::open(ordinal as u32).map_err(wrap)?;
    let place = Arc::new(Place {
        gpu,
        plans: Plans::new(),
        serving: Plans::new(),
        appending: Plans::new(),
    });
    places.insert(ordinal, place.clone());
    Ok(place)
}

/// Where a tensor is on the device, with the guard of its use on a stream.
fn tensor<'a, T: CudaDType + 'a>(
    (storage, of): (&'a CudaStorage, &Layout),
    layout: &flashcore::Layout,
    stream: &'a CudaStream,
) -> Result<(DeviceTensor, SyncOnDrop<'a>)> {
    let strides = layout.strides();
    let (address, guard) = storage.as_cuda_slice::<T>()?.device_ptr(stream);
    let address = DeviceAddress(address).offset((of.start_offset() * size_of::<T>()) as u64);
    Ok((DeviceTensor { address, strides }, guard))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
