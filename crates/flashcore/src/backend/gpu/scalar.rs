//! Attention with ordinary arithmetic, on any GPU.

use std::sync::Arc;

use cuda::Arguments;
use kernels::Scalar;
use ptx::{Element, Target};

use super::{Candidate, Launch, Operands};
use crate::dtype::DType;
use crate::gpu::{Chip, Compilation, Gpu, GpuError, Kernel, Stream};
use crate::inputs::Inputs;
use crate::problem::{Mask, Problem};
use crate::tensor::Layout;

/// The kernel's name.
pub(super) const NAME: &str = "scalar";

pub(super) fn candidate(chip: &Chip, problem: &Problem) -> Candidate {
    let (accepted, reason) = match blocks(problem) {
        Ok(_) => (true, "serves every head dim, length, mask and type".to_owned()),
        Err(error) => (false, error.to_string()),
    };
    let configuration = accepted.then(|| configuration(chip.target, problem).name());
    Candidate { backend: super::NAME, kernel: NAME.to_owned(), accepted, configuration, reason }
}

/// The kernel with its arguments.
pub(super) struct Prepared {
    kernel: Arc<Kernel>,
    blocks: u32,
    arguments: Arguments,
}

pub(super) fn prepare(
    gpu: &Gpu,
    problem: &Problem,
    inputs: Inputs<'_>,
    operands: &Operands,
) -> Result<Prepared, crate::Error> {
    let configuration = configuration(gpu.target(), problem);
    let kernel = gpu.kernel(&configuration.name(), || configuration.program())?;
    let arguments = arguments(problem, inputs, operands)?;
    Ok(Prepared { kernel, blocks: blocks(problem)?, arguments })
}

impl Launch for Prepared {
    fn launch(&mut self, stream: &Stream) -> Result<(), GpuError> {
        Ok(self.kernel.launch(stream, self.blocks, &self.arguments)?)
    }

    fn compilation(&self) -> &Compilation {
        self.kernel.compilation()
    }
}

pub(super) fn configuration(target: Target, problem: &Problem) -> Scalar {
    Scalar {
        target,
        element: element(problem.dtype),
        head_dim: problem.head_dim as u32,
        value_head_dim: problem.value_head_dim as u32,
        causal: problem.mask == Mask::Causal,
    }
}

/// The arguments in the order of [`Scalar::program`].
fn arguments(
    problem: &Problem,
    inputs: Inputs<'_>,
    operands: &Operands,
) -> Result<Arguments, crate::Error> {
    let mut arguments = Arguments::new();
    for address in [
        operands.query.address(),
        operands.key.address(),
        operands.value.address(),
        operands.output.address(),
        operands.lse.address(),
    ] {
        arguments.push(address);
    }
    let output = Layout::contiguous(problem.output_shape())?;
    let inputs = inputs.layouts();
    for layout in [inputs.query, inputs.key, inputs.value, output] {
        let strides = layout.strides();
        for stride in [strides.batch, strides.length, strides.heads] {
            arguments.push(stride as u64);
        }
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
    Ok(arguments)
}

/// How many blocks to launch, or that the kernel's counters cannot count so far.
fn blocks(problem: &Problem) -> Result<u32, GpuError> {
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

fn element(dtype: DType) -> Element {
    match dtype {
        DType::F32 => Element::F32,
        DType::F16 => Element::F16,
        DType::BF16 => Element::BF16,
    }
}
