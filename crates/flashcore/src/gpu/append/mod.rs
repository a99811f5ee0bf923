//! Launching the append kernel: new keys and values into a cache that is on the device.
//!
//! | file | its subject |
//! | --- | --- |
//! | `size` | what a plan is made for |
//! | `tensors` | what a launch reads and writes |
//! | `binding` | which argument goes to which parameter |
//! | this one | the plan that ties them together |

mod binding;
mod size;
mod tensors;

pub use size::{AppendSize, RotarySize};
pub use tensors::{AppendTensors, RotaryTables, TurnedQueries};

use std::sync::Arc;

use cuda::{Arguments, Stream};
use kernels::append::{Append, Rotary};
use ptx::Capability;

use self::binding::{Launch, Slot};
use super::forward::tensor_core_element;
use super::{Chip, Gpu, GpuError, Kernel};

/// The kernel's name in errors.
const NAME: &str = "append";

/// Writing new keys and values behind the sequences of a cache, in one launch with the rotary
/// embedding of the new keys and of the queries that will look at them: everything that does not
/// depend on where tensors are and how long sequences have become.
///
/// A launch neither allocates nor waits, and has the same shape whatever the lengths are: a CUDA
/// graph that captured it is right for all of them. What a sequence has no room for is not
/// written; nonsense in lists and tables stays inside the cache. Without rotary embeddings the
/// bits are those given.
///
/// The plan must outlive its launches, and graphs that captured them.
///
/// ```no_run
/// use flashcore::gpu::{AppendPlan, AppendSize, AppendTensors, Gpu, GpuError, ServingSize, Stream};
/// use flashcore::{DType, Mask, Problem};
///
/// # fn step(gpu: &Gpu, stream: &Stream, tensors: AppendTensors) -> Result<(), GpuError> {
/// // A token for each of 64 sequences, into 4096 pages of 64 positions, 128 at most for each;
/// // keys and queries turned by angles from tables for 8192 positions.
/// let problem = Problem::new(64, 32, 1, 128)
///     .with_kv_heads(8)
///     .with_dtype(DType::BF16)
///     .with_mask(Mask::Causal);
/// let cache = ServingSize::new(problem).with_pages(64, 128, 4096);
/// let size = AppendSize::new(cache, 1).with_rotary(128, false, 8192).with_turned_queries();
/// let mut plan = AppendPlan::new(gpu, &size)?;
/// plan.launch(stream, &tensors)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AppendPlan {
    size: AppendSize,
    configuration: Append,
    blocks: u32,
    kernel: Arc<Kernel>,
    slots: Vec<Slot>,
    arguments: Arguments,
}

impl AppendPlan {
    /// A plan for a size.
    pub fn new(gpu: &Gpu, size: &AppendSize) -> Result<Self, GpuError> {
        let configuration = configuration(&gpu.chip(), size)?;
        let launch = Launch::new(size)?;
        let kernel = gpu.kernel(&configuration.name(), || configuration.program())?;
        let slots = launch
            .slots(kernel.parameters())
            .map_err(|parameter| GpuError::Parameter { kernel: configuration.name(), parameter })?;
        let blocks = configuration.blocks(launch.rows + launch.turned_rows);
        let (size, arguments) = (size.clone(), Arguments::new());
        Ok(AppendPlan { size, configuration, blocks, kernel, slots, arguments })
    }

    /// Puts it on a stream of the plan's device. Neither allocates nor waits.
    ///
    /// That the addresses are right is the caller's business: what goes wrong on the device is
    /// reported by the stream, when it is next waited for.
    pub fn launch(&mut self, stream: &Stream, tensors: &AppendTensors) -> Result<(), GpuError> {
        tensors.validate(&self.size)?;
        // The room for arguments stays from launch to launch.
        self.arguments.clear();
        let strided = tensors.strided(&self.size);
        for slot in &self.slots {
            self.arguments.push(slot.argument(&strided, |list| list.of(tensors)));
        }
        Ok(self.kernel.launch(stream, self.blocks, &self.arguments)?)
    }

    /// What it was made for.
    pub fn size(&self) -> &AppendSize {
        &self.size
    }

    /// What the kernel was built for.
    pub fn configuration(&self) -> &Append {
        &self.configuration
    }

    /// The compiled kernel.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }
}

/// The kernel for a size, or why there is none.
fn configuration(chip: &Chip, size: &AppendSize) -> Result<Append, GpuError> {
    size.validate()?;
    let refuse = |reason: String| GpuError::Unsupported { kernel: NAME, reason };
    if !chip.target.has(Capability::AsyncCopies) {
        return Err(refuse(format!("{} is older than sm_80", chip.target)));
    }
    let problem = &size.serving.problem;
    Ok(Append {
        target: chip.target,
        element: tensor_core_element(problem).map_err(refuse)?,
        head_dim: problem.head_dim as u32,
        value_head_dim: problem.value_head_dim as u32,
        paged: size.serving.pages.is_some(),
        rotary: size
            .rotary
            .map(|RotarySize { dim, interleaved, .. }| Rotary { dim: dim as u32, interleaved }),
    })
}

#[cfg(test)]
mod tests {
    use ptx::Target;

    use super::*;
    use crate::gpu::ServingSize;
    use crate::problem::Problem;

    #[test]
    fn what_makes_no_sense_is_refused_with_the_reason() {
        let cache = || ServingSize::new(Problem::new(2, 4, 1, 64).with_key_length(100));
        let refusal = |size: &AppendSize| configuration(&Chip::H200, size).unwrap_err().to_string();
        let prefix = "the append kernel does not serve this problem: ";
        let one = || AppendSize::new(cache(), 1);
        for (size, reason) in [
            (AppendSize::new(cache(), 0), "there are no new tokens"),
            (
                one().with_turned_queries(),
                "queries are turned by rotary embeddings, and there are none",
            ),
            (
                one().with_rotary(66, false, 9),
                "a rotary dim of 66 is not even, or not from 2 to the head dim 64",
            ),
            (one().with_rotary(64, false, 0), "the rotary tables have no positions"),
            (
                AppendSize::new(cache().with_packed_keys(100), 1),
                "packed keys have no room for more",
            ),
            (AppendSize::new(cache().with_entries(0), 1), "the cache has no batch entries"),
        ] {
            assert_eq!(refusal(&size), format!("{prefix}{reason}"));
        }
        let old = configuration(&Chip::typical(Target::SM_75), &one()).unwrap_err().to_string();
        assert_eq!(old, format!("{prefix}sm_75 is older than sm_80"));
    }
}
