//! Attention over sequences of unequal lengths that are on the device, by whichever kernel serves
//! them best.
//!
//! | file | its subject |
//! | --- | --- |
//! | `size` | what a plan is made for |
//! | `tensors` | what a launch reads and writes |
//! | `binding` | arguments that several kernels have |
//! | this one | the plan that holds a kernel's |

mod binding;
mod size;
mod tensors;

pub(super) use binding::{List as ListRole, Slot, shared_slot};
pub use size::{ServingPages, ServingSize};
pub use tensors::ServingTensors;
pub(super) use tensors::{Known, List};

use cuda::Stream;
use kernels::Shipped;

use super::{Chip, Compilation, DecodePlan, Gpu, GpuError, Kernel, PrefillPlan, decode, prefill};

/// Everything about attention over a batch of sequences that does not depend on where its tensors
/// are and how long the sequences have become: prefill, decode and what is in between.
///
/// A launch has the same shape whatever the lengths are, allocates nothing and waits for nothing:
/// a CUDA graph that captured it is right for every length up to the plan's, read when the graph
/// runs. Lengths and tables beyond their bounds are cut to them on the device, so that no launch
/// reads or writes outside its tensors.
///
/// Launches of one plan share its workspace: they must follow each other, on one stream. The plan
/// must outlive them, and graphs that captured them.
///
/// ```no_run
/// use flashcore::gpu::{Gpu, ServingPlan, ServingSize};
/// use flashcore::{DType, Mask, Problem};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let gpu = Gpu::open(0)?;
/// // One query for each of 64 sequences, over 4096 pages of 64 positions, 128 at most for each.
/// let problem = Problem::new(64, 32, 1, 128)
///     .with_kv_heads(8)
///     .with_dtype(DType::BF16)
///     .with_mask(Mask::Causal);
/// let plan = ServingPlan::new(&gpu, &ServingSize::new(problem).with_pages(64, 128, 4096))?;
/// println!("{}: {}", plan.kernel_name(), plan.reason());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ServingPlan {
    kernel: ServingKernel,
}

/// The kernels that serve sequences.
#[derive(Debug)]
enum ServingKernel {
    Decode(Box<DecodePlan>),
    Prefill(Box<PrefillPlan>),
}

/// The kernel that a plan takes, or why none serves the size.
pub fn choose(chip: &Chip, size: &ServingSize) -> Result<Shipped, String> {
    if prefill::has_many_queries(&size.problem)
        && let Ok(chosen) = prefill::choose(chip, size)
    {
        return Ok(Shipped::Prefill(chosen.configuration));
    }
    let chosen = decode::choose(chip, &size.problem, size.pages.is_some())?;
    Ok(Shipped::Decode(chosen.configuration))
}

impl ServingPlan {
    /// A plan of the kernel that is best for the size. It may refuse tensors that lie in memory
    /// like no other's; [`for_tensors`](ServingPlan::for_tensors) looks at them first.
    pub fn new(gpu: &Gpu, size: &ServingSize) -> Result<Self, GpuError> {
        let kernel = match choose(&gpu.chip(), size) {
            Ok(Shipped::Prefill(_)) => {
                ServingKernel::Prefill(Box::new(PrefillPlan::new(gpu, size)?))
            }
            _ => ServingKernel::Decode(Box::new(DecodePlan::new(gpu, size)?)),
        };
        Ok(ServingPlan { kernel })
    }

    /// A plan of the best kernel for the size that serves tensors like these.
    pub fn for_tensors(
        gpu: &Gpu,
        size: &ServingSize,
        tensors: &ServingTensors,
    ) -> Result<Self, GpuError> {
        if prefill::check_tensors(size, tensors).is_ok() {
            return ServingPlan::new(gpu, size);
        }
        let kernel = ServingKernel::Decode(Box::new(DecodePlan::new(gpu, size)?));
        Ok(ServingPlan { kernel })
    }

    /// Puts attention on a stream of the plan's device. Neither allocates nor waits.
    ///
    /// That the addresses are right is the caller's business: what goes wrong on the device is
    /// reported by the stream, when it is next waited for.
    pub fn launch(&mut self, stream: &Stream, tensors: &ServingTensors) -> Result<(), GpuError> {
        match &mut self.kernel {
            ServingKernel::Decode(plan) => plan.launch(stream, tensors),
            ServingKernel::Prefill(plan) => plan.launch(stream, tensors),
        }
    }

    /// Does what depends on lengths alone, for [`attend`](ServingPlan::attend): layers with the
    /// same lengths need it once. Decode has nothing to do here.
    pub fn schedule(&mut self, stream: &Stream, tensors: &ServingTensors) -> Result<(), GpuError> {
        match &mut self.kernel {
            ServingKernel::Decode(_) => Ok(()),
            ServingKernel::Prefill(plan) => plan.schedule(stream, tensors),
        }
    }

    /// Does the rest of a [`launch`](ServingPlan::launch), after a schedule of the same lengths.
    pub fn attend(&mut self, stream: &Stream, tensors: &ServingTensors) -> Result<(), GpuError> {
        match &mut self.kernel {
            ServingKernel::Decode(plan) => plan.launch(stream, tensors),
            ServingKernel::Prefill(plan) => plan.attend(stream, tensors),
        }
    }

    /// What it was made for.
    pub fn size(&self) -> &ServingSize {
        match &self.kernel {
            ServingKernel::Decode(plan) => plan.size(),
            ServingKernel::Prefill(plan) => plan.size(),
        }
    }

    /// Why this kernel in this configuration.
    pub fn reason(&self) -> &str {
        match &self.kernel {
            ServingKernel::Decode(plan) => plan.reason(),
            ServingKernel::Prefill(plan) => plan.reason(),
        }
    }

    /// The name of the kernel's configuration.
    pub fn kernel_name(&self) -> String {
        match &self.kernel {
            ServingKernel::Decode(plan) => plan.configuration().name(),
            ServingKernel::Prefill(plan) => plan.configuration().name(),
        }
    }

    /// The compiled kernel.
    pub fn kernel(&self) -> &Kernel {
        match &self.kernel {
            ServingKernel::Decode(plan) => plan.kernel(),
            ServingKernel::Prefill(plan) => plan.kernel(),
        }
    }

    /// How the kernel's binary was come by.
    pub fn compilation(&self) -> &Compilation {
        self.kernel().compilation()
    }

    /// Device memory that the plan holds besides the kernel.
    pub fn device_bytes(&self) -> u64 {
        match &self.kernel {
            ServingKernel::Decode(plan) => plan.device_bytes(),
            ServingKernel::Prefill(plan) => plan.device_bytes(),
        }
    }
}
