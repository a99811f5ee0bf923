//! Launching the `mma.sync` kernel on tensors that are on the device.
//!
//! | file | its subject |
//! | --- | --- |
//! | `support` | what the kernel serves, and in which configuration |
//! | `geometry` | tiles, splits and the numbers that find them |
//! | `binding` | which argument goes to which parameter |
//! | `workspace` | memory for partial results |
//! | this one | the plan that ties them together |

mod binding;
mod geometry;
mod support;
mod workspace;

pub use geometry::Geometry;
pub use support::{Sums, check_layouts, check_tensors, choose};

use std::sync::Arc;

use cuda::{Arguments, Stream};
use kernels::{Combine, Mma};
use ptx::{Element, Program};

use self::binding::{Role, Slot};
use self::workspace::{Workspace, Workspaces};
use super::forward::ForwardTensors;
use super::{Gpu, GpuError, Kernel, Passed, TensorRole};
use crate::problem::Problem;
use crate::tensor::Layout;

/// Attention with `mma.sync`: everything that does not depend on where its tensors are.
///
/// Like a [`ForwardPlan`](super::ForwardPlan), it launches without compiling or waiting, and each
/// thread that launches has its own. Where keys are split, partial results need memory, of which
/// each stream has its own: the first launch on a stream allocates it.
#[derive(Debug, Clone)]
pub struct MmaPlan {
    problem: Problem,
    configuration: Mma,
    geometry: Geometry,
    /// The attention kernel and, where keys are split, the one that puts parts together.
    passes: Vec<Pass>,
    workspaces: Workspaces,
    bound: Option<(ForwardTensors, Option<Workspace>)>,
}

/// A kernel and its arguments.
#[derive(Debug, Clone)]
struct Pass {
    kernel: Arc<Kernel>,
    blocks: u32,
    slots: Vec<Slot>,
    arguments: Arguments,
}

impl MmaPlan {
    /// A plan in the configuration that is best for the problem.
    pub fn new(gpu: &Gpu, problem: &Problem, sums: Sums) -> Result<Self, GpuError> {
        let unsupported = |reason| GpuError::Unsupported { kernel: sums.kernel(), reason };
        problem.validate().map_err(|error| unsupported(error.to_string()))?;
        let chosen = choose(&gpu.chip(), problem, sums).map_err(unsupported)?;
        let configuration = chosen.configuration;
        let geometry = Geometry::new(&configuration, chosen.splits, problem, &gpu.chip())?;
        let kernel = gpu.kernel(&configuration.name(), || configuration.program())?;
        let mut passes = Vec::new();
        let role = if configuration.split { Role::Parts } else { Role::Whole };
        passes.push(Pass::new(kernel, geometry.blocks, role, problem, &geometry)?);
        if let Some(combine) = combine(&configuration) {
            let kernel = gpu.kernel(&combine.name(), || combine.program())?;
            let blocks = combine.blocks(problem.rows() as u64);
            let blocks = u32::try_from(blocks)
                .map_err(|_| GpuError::TooLarge { what: "the number of rows" })?;
            passes.push(Pass::new(kernel, blocks, Role::Combine, problem, &geometry)?);
        }
        let workspaces = Workspaces::new(&geometry, problem);
        let problem = problem.clone();
        Ok(MmaPlan { problem, configuration, geometry, passes, workspaces, bound: None })
    }

    /// Puts attention on a stream of the plan's device. Does not wait.
    ///
    /// That there is memory at the addresses is the caller's business, as for
    /// [`ForwardPlan::launch`](super::ForwardPlan::launch).
    pub fn launch(&mut self, stream: &Stream, tensors: &ForwardTensors) -> Result<(), GpuError> {
        let workspace = self.workspaces.of(stream)?;
        if self.bound != Some((*tensors, workspace)) {
            check_tensors(&self.problem, tensors)?;
            // On an error the arguments are half changed: they are made anew next time.
            self.bound = None;
            for pass in &mut self.passes {
                pass.bind(tensors, workspace)?;
            }
            self.bound = Some((*tensors, workspace));
        }
        for pass in &self.passes {
            pass.kernel.launch(stream, pass.blocks, &pass.arguments)?;
        }
        Ok(())
    }

    /// What the kernel was built for.
    pub fn configuration(&self) -> &Mma {
        &self.configuration
    }

    /// Tiles, splits and blocks.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The compiled attention kernel.
    pub fn kernel(&self) -> &Kernel {
        &self.passes[0].kernel
    }
}

impl Pass {
    fn new(
        kernel: Arc<Kernel>,
        blocks: u32,
        role: Role,
        problem: &Problem,
        geometry: &Geometry,
    ) -> Result<Self, GpuError> {
        let slots = binding::slots(kernel.parameters(), role, problem, geometry)
            .map_err(|parameter| GpuError::Parameter { kernel: format!("{role:?}"), parameter })?;
        let mut arguments = Arguments::new();
        for slot in &slots {
            arguments.push(slot.value(None, None));
        }
        Ok(Pass { kernel, blocks, slots, arguments })
    }

    fn bind(
        &mut self,
        tensors: &ForwardTensors,
        workspace: Option<Workspace>,
    ) -> Result<(), GpuError> {
        for (index, slot) in self.slots.iter().enumerate() {
            self.arguments.set(index, slot.value(Some(tensors), workspace))?;
        }
        Ok(())
    }
}

/// What is passed for each parameter of a kernel that sees all keys, on contiguous tensors.
pub(super) fn passed(
    program: &Program,
    problem: &Problem,
    geometry: &Geometry,
) -> Result<Vec<Option<Passed>>, GpuError> {
    let names: Vec<String> = program.parameters.iter().map(|it| it.name.clone()).collect();
    let slots = binding::slots(&names, Role::Whole, problem, geometry)
        .map_err(|parameter| GpuError::Parameter { kernel: program.name.clone(), parameter })?;
    let passed = |slot: Slot| match slot {
        Slot::Tensor(role) => Some(Passed::Address { tensor: TensorRole::ALL[role] }),
        Slot::Stride(role, axis) => {
            let layout = Layout::contiguous(TensorRole::ALL[role].shape(problem)).ok()?;
            Some(Passed::U64 { value: axis.of(layout.strides()) })
        }
        Slot::Lse => Some(Passed::Address { tensor: TensorRole::Lse }),
        Slot::PartialOutputs | Slot::PartialLse => None,
        Slot::U32(value) => Some(Passed::U32 { value }),
        Slot::U64(value) => Some(Passed::U64 { value }),
        Slot::F32(value) => Some(Passed::F32 { value }),
    };
    Ok(slots.into_iter().map(passed).collect())
}

/// What puts the parts of a split kernel together.
pub(crate) fn combine(configuration: &Mma) -> Option<Combine> {
    configuration.split.then_some(Combine {
        target: configuration.target,
        partial: Element::F32,
        element: configuration.element,
        value_head_dim: configuration.value_head_dim,
    })
}
