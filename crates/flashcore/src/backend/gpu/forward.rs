//! Attention with tensor cores, on Hopper.

use kernels::Forward;

use super::{Candidate, Launch, Operands};
use crate::gpu::forward::{Geometry, check_layouts, choose};
use crate::gpu::{
    Chip, Compilation, DeviceAddress, DeviceTensor, ForwardPlan, ForwardTensors, Gpu, GpuError,
    Stream,
};
use crate::inputs::{InputLayouts, Inputs};
use crate::problem::Problem;
use crate::tensor::{Layout, Tensor};

/// The kernel's name.
pub(super) const NAME: &str = "forward";

pub(super) fn candidate(chip: &Chip, problem: &Problem, layouts: &InputLayouts) -> Candidate {
    let served = choose(chip, problem).and_then(|chosen| {
        check_layouts(problem, layouts)?;
        let countable = Geometry::countable(&chosen.configuration, problem);
        countable.map_err(|error| error.to_string())?;
        Ok(chosen)
    });
    let (accepted, configuration, reason) = match served {
        Ok(chosen) => (true, Some(chosen.configuration.name()), chosen.reason.to_owned()),
        Err(reason) => (false, None, reason),
    };
    Candidate { backend: super::NAME, kernel: NAME.to_owned(), accepted, configuration, reason }
}

pub(super) fn configuration(chip: &Chip, problem: &Problem) -> Option<Forward> {
    choose(chip, problem).ok().map(|chosen| chosen.configuration)
}

/// The kernel with its plan.
pub(super) struct Prepared {
    plan: ForwardPlan,
    tensors: ForwardTensors,
}

pub(super) fn prepare(
    gpu: &Gpu,
    problem: &Problem,
    inputs: Inputs<'_>,
    operands: &Operands,
) -> Result<Prepared, crate::Error> {
    let tensor = |address: DeviceAddress, tensor: &Tensor| DeviceTensor {
        address,
        strides: tensor.layout().strides(),
    };
    let output = Layout::contiguous(problem.output_shape())?;
    let tensors = ForwardTensors {
        query: tensor(operands.query.address(), inputs.query),
        key: tensor(operands.key.address(), inputs.key),
        value: tensor(operands.value.address(), inputs.value),
        output: DeviceTensor { address: operands.output.address(), strides: output.strides() },
        lse: operands.lse.address(),
    };
    Ok(Prepared { plan: ForwardPlan::new(gpu, problem)?, tensors })
}

impl Launch for Prepared {
    fn launch(&mut self, stream: &Stream) -> Result<(), GpuError> {
        self.plan.launch(stream, &self.tensors)
    }

    fn compilation(&self) -> &Compilation {
        self.plan.kernel().compilation()
    }
}
