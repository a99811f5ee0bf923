//! Launching the scalar kernel on tensors that are on the device.

use std::sync::Arc;

use cuda::{Arguments, Stream};
use kernels::Scalar;
use ptx::Target;

use super::forward::ForwardTensors;
use super::{Gpu, GpuError, Kernel};
use crate::problem::{Mask, Problem};

/// Attention with ordinary arithmetic: every head dim, length, mask, type and stride, and slow.
///
/// Like a [`ForwardPlan`](super::ForwardPlan), it launches without allocating, and each thread that
/// launches has its own.
#[derive(Debug, Clone)]
pub struct ScalarPlan {
    kernel: Arc<Kernel>,
    blocks: u32,
    arguments: Arguments,
    bound: Option<ForwardTensors>,
}

impl ScalarPlan {
    /// Compiles the kernel where neither this process nor the cache has it.
    pub fn new(gpu: &Gpu, problem: &Problem) -> Result<Self, GpuError> {
        let configuration = configuration(gpu.target(), problem);
        let blocks = blocks(problem)?;
        let kernel = gpu.kernel(&configuration.name(), || configuration.program())?;
        Ok(ScalarPlan { kernel, blocks, arguments: arguments(problem), bound: None })
    }

    /// Puts the kernel on a stream of the plan's device. Does not wait.
    ///
    /// That the addresses are right is the caller's business, as for
    /// [`ForwardPlan::launch`](super::ForwardPlan::launch).
    pub fn launch(&mut self, stream: &Stream, tensors: &ForwardTensors) -> Result<(), GpuError> {
        if self.bound != Some(*tensors) {
            let all = tensors.tensors();
            for (index, tensor) in all.iter().enumerate() {
                self.arguments.set(index, tensor.address)?;
            }
            self.arguments.set(all.len(), tensors.lse)?;
            let strides = all.iter().flat_map(|tensor| {
                [tensor.strides.batch, tensor.strides.length, tensor.strides.heads]
            });
            for (index, stride) in strides.enumerate() {
                self.arguments.set(ADDRESSES + index, stride as u64)?;
            }
            self.bound = Some(*tensors);
        }
        Ok(self.kernel.launch(stream, self.blocks, &self.arguments)?)
    }

    /// The compiled kernel.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }
}

/// Query, key, value, output and log-sum-exp.
const ADDRESSES: usize = 5;

/// The arguments in the order of [`Scalar::program`]; addresses and strides are set at a launch.
fn arguments(problem: &Problem) -> Arguments {
    let mut arguments = Arguments::new();
    for _ in 0..ADDRESSES {
        arguments.push(cuda::DeviceAddress(0));
    }
    for _ in 0..4 * 3 {
        arguments.push(0u64);
    }
    for size in [
        problem.query_length,
        problem.key_length,
        problem.query_heads,
        problem.group_size(),
        problem.batch,
    ] {
        arguments.push(size as u32);
    }
    arguments.push(problem.scale() * std::f32::consts::LOG2_E);
    arguments
}

/// What the kernel is built as for a problem.
pub(crate) fn configuration(target: Target, problem: &Problem) -> Scalar {
    Scalar {
        target,
        element: problem.dtype.element(),
        head_dim: problem.head_dim as u32,
        value_head_dim: problem.value_head_dim as u32,
        causal: problem.mask == Mask::Causal,
    }
}

/// How many blocks to launch, or that the kernel's counters cannot count so far.
pub(crate) fn blocks(problem: &Problem) -> Result<u32, GpuError> {
    let counts = [problem.query_length, problem.key_length, problem.query_heads, problem.batch];
    let [queries, keys, heads, batch] = counts.map(u32::try_from);
    let (Ok(queries), Ok(keys), Ok(heads), Ok(batch)) = (queries, keys, heads, batch) else {
        return Err(GpuError::TooLarge { what: "a length, head count or batch" });
    };
    // Positions are compared as signed numbers.
    if queries.checked_add(keys).is_none_or(|sum| sum > i32::MAX as u32) {
        return Err(GpuError::TooLarge { what: "the lengths" });
    }
    let blocks = Scalar::blocks(queries, heads, batch);
    let Ok(blocks) = u32::try_from(blocks) else {
        return Err(GpuError::TooLarge { what: "the number of rows" });
    };
    // Further blocks are taken in turn; a margin keeps the loop's counter from wrapping.
    let largest = 1 << 24;
    if blocks > u32::MAX - largest {
        return Err(GpuError::TooLarge { what: "the number of rows" });
    }
    Ok(blocks.min(largest))
}
