//! Attention on tensors that are on the device, by whichever kernel serves them best.

use cuda::Stream;

use super::forward::{self, ForwardPlan, ForwardTensors};
use super::mma::{self, MmaPlan, Sums};
use super::{Compilation, Gpu, GpuError, ScalarPlan};
use crate::backend::gpu as backend;
use crate::error::Error;
use crate::inputs::InputLayouts;
use crate::plan::{Plan, Preference};
use crate::problem::Problem;
use crate::tensor::Layout;

/// A kernel for a problem and the way its tensors lie in memory, ready to launch on a stream of
/// the caller's.
///
/// Making one chooses among the kernels for the GPU, as [`Machine`](crate::Machine) does for
/// tensors in host memory, and compiles the choice where need be. Launching one neither allocates
/// nor compiles nor waits. It must outlive the launches it made, and a graph that captured them.
///
/// A clone shares what is on the device and can be launched from another thread meanwhile.
///
/// ```no_run
/// use flashcore::gpu::{AttentionPlan, Buffer, ForwardTensors, Gpu, Stream};
/// use flashcore::{DType, InputTensors, Mask, Preference, Problem};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let gpu = Gpu::open(0)?;
/// let stream = Stream::new(gpu.device())?;
/// let problem = Problem::new(1, 16, 4096, 128).with_dtype(DType::BF16).with_mask(Mask::Causal);
///
/// let host = InputTensors::random(&problem, 0)?;
/// let query = Buffer::from_slice(&stream, host.query.bytes())?;
/// let key = Buffer::from_slice(&stream, host.key.bytes())?;
/// let value = Buffer::from_slice(&stream, host.value.bytes())?;
/// let output = Buffer::new(gpu.device(), query.bytes())?;
/// let lse = Buffer::new(gpu.device(), 4 * problem.rows() as u64)?;
/// let addresses = [&query, &key, &value, &output].map(Buffer::address);
/// let tensors = ForwardTensors::contiguous(&problem, addresses, lse.address())?;
///
/// let mut plan = AttentionPlan::new(&gpu, &problem, &tensors, &Preference::default())?;
/// println!("{}: {}", plan.plan().chosen.full_name(), plan.plan().reason());
/// plan.launch(&stream, &tensors)?;
/// stream.synchronize()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct AttentionPlan {
    plan: Plan,
    kernel: DeviceKernel,
}

impl AttentionPlan {
    /// Chooses for these tensors: for their strides, and for addresses as well aligned as theirs.
    pub fn new(
        gpu: &Gpu,
        problem: &Problem,
        tensors: &ForwardTensors,
        preference: &Preference,
    ) -> Result<Self, Error> {
        problem.validate()?;
        let layouts = InputLayouts {
            query: Layout::strided(problem.query_shape(), tensors.query.strides)?,
            key: Layout::strided(problem.key_shape(), tensors.key.strides)?,
            value: Layout::strided(problem.value_shape(), tensors.value.strides)?,
        };
        let mut candidates = backend::candidates(&gpu.chip(), problem, &layouts);
        for candidate in candidates.iter_mut().filter(|candidate| candidate.accepted) {
            let checked = match candidate.kernel.as_str() {
                backend::forward::NAME => forward::check_tensors(problem, tensors),
                backend::mma::NAME | backend::mma::HALF_NAME => {
                    mma::check_tensors(problem, tensors).map_err(|error| error.to_string())
                }
                // Their workspace is not for two streams, and they may need slopes and sinks.
                backend::decode::NAME | backend::prefill::NAME => {
                    Err("on the device it has a ServingPlan".to_owned())
                }
                _ => Ok(()),
            };
            if let Err(reason) = checked {
                candidate.accepted = false;
                candidate.reason = reason;
            }
        }
        let plan = Plan::choose(problem, vec![(backend::NAME, candidates)], &[], preference)?;
        let kernel = DeviceKernel::new(gpu, problem, &plan.chosen.kernel)?;
        Ok(AttentionPlan { plan, kernel })
    }

    /// Puts attention on a stream of the plan's device. Does not wait.
    ///
    /// That the addresses are right is the caller's business: what goes wrong on the device is
    /// reported by the stream, when it is next waited for.
    pub fn launch(&mut self, stream: &Stream, tensors: &ForwardTensors) -> Result<(), GpuError> {
        self.kernel.launch(stream, tensors)
    }

    /// Which kernel, why, and why not the others.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// How the kernel's binary was come by.
    pub fn compilation(&self) -> &Compilation {
        self.kernel.compilation()
    }
}

/// The kernels that can be launched on the device's tensors, by their names as candidates.
#[derive(Debug, Clone)]
pub(crate) enum DeviceKernel {
    Forward(Box<ForwardPlan>),
    Mma(Box<MmaPlan>),
    Scalar(Box<ScalarPlan>),
}

impl DeviceKernel {
    pub(crate) fn new(gpu: &Gpu, problem: &Problem, name: &str) -> Result<Self, GpuError> {
        Ok(match name {
            backend::forward::NAME => {
                DeviceKernel::Forward(Box::new(ForwardPlan::new(gpu, problem)?))
            }
            backend::mma::NAME => {
                DeviceKernel::Mma(Box::new(MmaPlan::new(gpu, problem, Sums::F32)?))
            }
            backend::mma::HALF_NAME => {
                DeviceKernel::Mma(Box::new(MmaPlan::new(gpu, problem, Sums::F16)?))
            }
            _ => DeviceKernel::Scalar(Box::new(ScalarPlan::new(gpu, problem)?)),
        })
    }

    pub(crate) fn launch(
        &mut self,
        stream: &Stream,
        tensors: &ForwardTensors,
    ) -> Result<(), GpuError> {
        match self {
            DeviceKernel::Forward(plan) => plan.launch(stream, tensors),
            DeviceKernel::Mma(plan) => plan.launch(stream, tensors),
            DeviceKernel::Scalar(plan) => plan.launch(stream, tensors),
        }
    }

    pub(crate) fn compilation(&self) -> &Compilation {
        match self {
            DeviceKernel::Forward(plan) => plan.kernel().compilation(),
            DeviceKernel::Mma(plan) => plan.kernel().compilation(),
            DeviceKernel::Scalar(plan) => plan.kernel().compilation(),
        }
    }
}
