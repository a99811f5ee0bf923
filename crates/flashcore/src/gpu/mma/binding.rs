//! Which argument goes to which parameter: by the parameter's name, so that a kernel with another
//! order or with more of them is refused and not run with the wrong numbers.

use cuda::{Argument, DeviceAddress};
use kernels::Divisor;

use super::Geometry;
use super::workspace::Workspace;
use crate::gpu::forward::ForwardTensors;
use crate::problem::Problem;
use crate::tensor::Strides;

/// Which kernel of a plan: what it calls its output is another thing in each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Attention over all keys.
    Whole,
    /// Attention over parts of the keys, into the workspace.
    Parts,
    /// From the workspace into the output.
    Combine,
}

/// What an argument depends on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Slot {
    /// The address of query, key, value or output, by number.
    Tensor(usize),
    /// One of its strides.
    Stride(usize, Axis),
    /// The address of the log-sum-exps.
    Lse,
    PartialOutputs,
    PartialLse,
    /// The problem alone.
    U32(u32),
    U64(u64),
    F32(f32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Axis {
    Batch,
    Row,
    Head,
}

impl Axis {
    pub(super) fn of(self, strides: Strides) -> u64 {
        let stride = match self {
            Axis::Batch => strides.batch,
            Axis::Row => strides.length,
            Axis::Head => strides.heads,
        };
        stride as u64
    }
}

impl Slot {
    /// The argument; something of the same type where its tensors are not known yet.
    pub(super) fn value(
        self,
        tensors: Option<&ForwardTensors>,
        workspace: Option<Workspace>,
    ) -> Argument {
        let nowhere = DeviceAddress(0);
        match self {
            Slot::Tensor(role) => tensors.map_or(nowhere, |it| it.tensors()[role].address).into(),
            Slot::Stride(role, axis) => {
                tensors.map_or(0, |it| axis.of(it.tensors()[role].strides)).into()
            }
            Slot::Lse => tensors.map_or(nowhere, |it| it.lse).into(),
            Slot::PartialOutputs => workspace.map_or(nowhere, |it| it.outputs).into(),
            Slot::PartialLse => workspace.map_or(nowhere, |it| it.lse).into(),
            Slot::U32(number) => number.into(),
            Slot::U64(number) => number.into(),
            Slot::F32(number) => number.into(),
        }
    }
}

/// The slots of a kernel's parameters, or the name of the one that is not known.
pub(super) fn slots(
    parameters: &[String],
    role: Role,
    problem: &Problem,
    geometry: &Geometry,
) -> Result<Vec<Slot>, String> {
    let of = |name: &String| slot(name, role, problem, geometry).ok_or_else(|| name.clone());
    parameters.iter().map(of).collect()
}

fn slot(name: &str, role: Role, problem: &Problem, geometry: &Geometry) -> Option<Slot> {
    // Counted by the geometry: they fit.
    let number = |size: usize| Some(Slot::U32(size as u32));
    match name {
        "Query" => Some(Slot::Tensor(0)),
        "Key" => Some(Slot::Tensor(1)),
        "Value" => Some(Slot::Tensor(2)),
        "Output" if role == Role::Parts => Some(Slot::PartialOutputs),
        "Lse" if role == Role::Parts => Some(Slot::PartialLse),
        "Output" => Some(Slot::Tensor(3)),
        "Lse" => Some(Slot::Lse),
        "PartialOutput" => Some(Slot::PartialOutputs),
        "PartialLse" => Some(Slot::PartialLse),
        "QueryLength" => number(problem.query_length),
        "KeyLength" => number(problem.key_length),
        "Batch" => number(problem.batch),
        "AllRows" => number(problem.rows()),
        "Parts" => Some(Slot::U32(geometry.splits)),
        "BlocksPerSplit" => Some(Slot::U32(geometry.split_length)),
        "ScaleLog2" => Some(Slot::F32(problem.scale() * std::f32::consts::LOG2_E)),
        _ => stride(name, problem).or_else(|| divisor(name, geometry)),
    }
}

/// A stride, in elements: of a tensor, or of what the workspace and the log-sum-exps are.
fn stride(name: &str, problem: &Problem) -> Option<Slot> {
    let (tensor, axis) = name.strip_suffix(" stride")?.rsplit_once(' ')?;
    let (rows, heads) = (problem.query_length as u64, problem.query_heads as u64);
    let all = problem.rows() as u64;
    // (part, batch, head, row), the outputs with a dimension more.
    let flat = |width: u64| {
        Some(Slot::U64(match axis {
            "part" => all * width,
            "batch" => heads * rows * width,
            "head" => rows * width,
            "row" => width,
            _ => return None,
        }))
    };
    let role = match tensor {
        "Query" => 0,
        "Key" => 1,
        "Value" => 2,
        "Output" => 3,
        "PartialOutput" => return flat(problem.value_head_dim as u64),
        "PartialLse" | "Lse" => return flat(1),
        _ => return None,
    };
    let axis = match axis {
        "batch" => Axis::Batch,
        "row" => Axis::Row,
        "head" => Axis::Head,
        _ => return None,
    };
    Some(Slot::Stride(role, axis))
}

/// A part of a divisor.
fn divisor(name: &str, geometry: &Geometry) -> Option<Slot> {
    let (name, part) = name.split_once(", ").unwrap_or((name, "number"));
    let divisor = match name {
        "TilesPerHead" => geometry.per_head,
        "TilesPerGroup" => geometry.per_group,
        "HeadsPerGroup" => geometry.heads_of_group,
        "QueryHeads" => geometry.heads,
        "GroupSize" => geometry.group,
        "Splits" => Divisor::new(geometry.splits),
        _ => return None,
    };
    Some(Slot::U32(match part {
        "number" => divisor.number,
        "multiplier" => divisor.multiplier,
        "shift" => divisor.shift,
        _ => return None,
    }))
}

#[cfg(test)]
mod tests {
    use kernels::Mma;
    use kernels::mma::every_tuned;
    use ptx::{ParameterKind, Target, Type};

    use super::*;
    use crate::gpu::Chip;
    use crate::problem::Mask;

    /// Every parameter of every tuned configuration gets an argument of its kind.
    #[test]
    fn every_parameter_is_known() {
        for whole in every_tuned(Target::SM_80) {
            for configuration in [whole, Mma { split: true, ..whole }] {
                let mask = if configuration.causal { Mask::Causal } else { Mask::None };
                let problem = Problem::new(2, 6, 300, configuration.head_dim as usize)
                    .with_kv_heads(2)
                    .with_value_head_dim(configuration.value_head_dim as usize)
                    .with_mask(mask);
                let splits = if configuration.split { 2 } else { 1 };
                let geometry =
                    Geometry::new(&configuration, splits, &problem, &Chip::H200).unwrap();
                let role = if configuration.split { Role::Parts } else { Role::Whole };
                let combine = super::super::combine(&configuration);
                let programs = [(role, configuration.program())]
                    .into_iter()
                    .chain(combine.map(|combine| (Role::Combine, combine.program())));
                for (role, program) in programs {
                    let program = program.unwrap();
                    for parameter in &program.parameters {
                        let slot = slot(&parameter.name, role, &problem, &geometry)
                            .unwrap_or_else(|| panic!("{}: {parameter:?}", program.name));
                        let fits = matches!(
                            (&parameter.kind, slot.value(None, None)),
                            (ParameterKind::Address, Argument::Address(_))
                                | (ParameterKind::Scalar(Type::U32), Argument::U32(_))
                                | (ParameterKind::Scalar(Type::U64), Argument::U64(_))
                                | (ParameterKind::Scalar(Type::F32), Argument::F32(_))
                        );
                        assert!(fits, "{}: {parameter:?} gets {slot:?}", program.name);
                    }
                }
            }
        }
    }
}
