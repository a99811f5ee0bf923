//! Attention on candle tensors on a GPU.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{
    CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop,
};
use candle_core::{CudaStorage, Layout, Result, Storage, Tensor};
use flashcore::gpu::{AttentionPlan, DeviceAddress, DeviceTensor, ForwardTensors, Gpu, Stream};
use flashcore::{DType, Plan, Preference, Problem, Strides};
use half::{bf16, f16};

use crate::arguments::{Arguments, layout};
use crate::wrap;

/// Plans that are kept for each GPU. One holds some kilobytes of device memory at most.
const KEPT: usize = 64;

/// A GPU, and what was made for the problems that it had to solve.
struct Place {
    gpu: Gpu,
    /// The most recent first.
    plans: Mutex<Vec<Entry>>,
}

struct Entry {
    key: Key,
    plan: Arc<Mutex<AttentionPlan>>,
    /// A graph that was captured goes on reading what the plan has on the device.
    captured: bool,
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
    problem: &Problem,
    tensors: [(&CudaStorage, &Layout); 3],
) -> Result<(CudaStorage, CudaStorage)> {
    match problem.dtype {
        DType::F32 => attend_as::<f32>(problem, tensors),
        DType::F16 => attend_as::<f16>(problem, tensors),
        DType::BF16 => attend_as::<bf16>(problem, tensors),
        other => candle_core::bail!("attention takes no {other} from candle"),
    }
}

fn attend_as<T: CudaDType + DeviceRepr>(
    problem: &Problem,
    tensors: [(&CudaStorage, &Layout); 3],
) -> Result<(CudaStorage, CudaStorage)> {
    let device = tensors[0].0.device().clone();
    let stream = device.cuda_stream();
    let elements = problem.output_shape().elements().unwrap_or(0);
    // SAFETY: the kernel writes every element before anything later on the stream can read it. An
    // allocation is never empty, which the driver would refuse.
    let mut output = unsafe { device.alloc::<T>(elements.max(1)) }?;
    // SAFETY: as above.
    let mut lse = unsafe { device.alloc::<f32>(problem.rows().max(1)) }?;
    if problem.rows() > 0 {
        let place = place(&stream)?;
        // Each guard makes the stream wait for what wrote its memory, and tells candle of this
        // use of it when it is dropped: after the launch.
        let (query, _query) = tensor::<T>(tensors[0], &stream)?;
        let (key, _key) = tensor::<T>(tensors[1], &stream)?;
        let (value, _value) = tensor::<T>(tensors[2], &stream)?;
        let (output, _output) = output.device_ptr_mut(&stream);
        let (lse, _lse) = lse.device_ptr_mut(&stream);
        let contiguous = flashcore::Layout::contiguous(problem.output_shape()).map_err(wrap)?;
        let (address, strides) = (DeviceAddress(output), contiguous.strides());
        let output = DeviceTensor { address, strides };
        let tensors = ForwardTensors { query, key, value, output, lse: DeviceAddress(lse) };
        // SAFETY: the stream belongs to candle's device, which `device` keeps alive, and to the
        // primary context of the GPU that was opened by its number.
        let stream = unsafe { Stream::borrow(place.gpu.device(), stream.cu_stream() as u64) };
        let plan = place.plan(problem, &tensors, &stream)?;
        lock(&plan).launch(&stream, &tensors).map_err(wrap)?;
    }
    let output = CudaStorage::wrap_cuda_slice(output, device.clone());
    Ok((output, CudaStorage::wrap_cuda_slice(lse, device)))
}

/// Which kernel serves these tensors, and why.
pub(crate) fn plan(arguments: &Arguments, tensors: [&Tensor; 3]) -> Result<Plan> {
    let problem = &arguments.problem;
    let [query, key, value] = tensors.map(Tensor::storage_and_layout);
    let (Storage::Cuda(query_memory), Storage::Cuda(key_memory), Storage::Cuda(value_memory)) =
        (&*query.0, &*key.0, &*value.0)
    else {
        candle_core::bail!("attention: the tensors are not on a CUDA device")
    };
    let tensors = [(query_memory, query.1), (key_memory, key.1), (value_memory, value.1)];
    match problem.dtype {
        DType::F32 => plan_as::<f32>(problem, tensors),
        DType::F16 => plan_as::<f16>(problem, tensors),
        DType::BF16 => plan_as::<bf16>(problem, tensors),
        other => candle_core::bail!("attention takes no {other} from candle"),
    }
}

fn plan_as<T: CudaDType>(problem: &Problem, tensors: [(&CudaStorage, &Layout); 3]) -> Result<Plan> {
    let stream = tensors[0].0.device().cuda_stream();
    let place = place(&stream)?;
    let (query, _query) = tensor::<T>(tensors[0], &stream)?;
    let (key, _key) = tensor::<T>(tensors[1], &stream)?;
    let (value, _value) = tensor::<T>(tensors[2], &stream)?;
    // The output, which candle allocates, is always aligned.
    let strides = flashcore::Layout::contiguous(problem.output_shape()).map_err(wrap)?.strides();
    let output = DeviceTensor { address: DeviceAddress(0), strides };
    let tensors = ForwardTensors { query, key, value, output, lse: DeviceAddress(0) };
    // SAFETY: as in `attend_as`.
    let stream = unsafe { Stream::borrow(place.gpu.device(), stream.cu_stream() as u64) };
    let plan = place.plan(problem, &tensors, &stream)?;
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
        let captured = stream.is_capturing().map_err(wrap)?;
        let mut plans = lock(&self.plans);
        if let Some(found) = plans.iter().position(|entry| entry.key == key) {
            plans[..=found].rotate_right(1);
            plans[0].captured |= captured;
            return Ok(plans[0].plan.clone());
        }
        if captured {
            candle_core::bail!(
                "attention cannot be captured in a graph before it has run once with these \
                 tensors: its kernel may have to be compiled"
            );
        }
        let preference = Preference::from_environment();
        let plan = AttentionPlan::new(&self.gpu, problem, tensors, &preference).map_err(wrap)?;
        let plan = Arc::new(Mutex::new(plan));
        if plans.len() >= KEPT
            && let Some(last) = plans.iter().rposition(|entry| !entry.captured)
        {
            // Freeing its memory waits for the launches that read it.
            plans.remove(last);
        }
        plans.insert(0, Entry { key, plan: plan.clone(), captured });
        Ok(plan)
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
    let place = Arc::new(Place { gpu, plans: Mutex::default() });
    places.insert(ordinal, place.clone());
    Ok(place)
}

/// Where a tensor is on the device, with the guard of its use on a stream.
fn tensor<'a, T: CudaDType + 'a>(
    (storage, of): (&'a CudaStorage, &Layout),
    stream: &'a CudaStream,
) -> Result<(DeviceTensor, SyncOnDrop<'a>)> {
    let strides = layout("tensor", of)?.strides();
    let (address, guard) = storage.as_cuda_slice::<T>()?.device_ptr(stream);
    let address = DeviceAddress(address).offset((of.start_offset() * size_of::<T>()) as u64);
    Ok((DeviceTensor { address, strides }, guard))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
