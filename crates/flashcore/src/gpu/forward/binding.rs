//! Which argument goes to which parameter of the forward kernel: by the parameter's name, so that
//! a kernel with another order or with more of them is refused and not run with the wrong numbers.

use cuda::{Argument, DeviceAddress};
use kernels::forward::Divisor;

use super::Geometry;
use crate::problem::Problem;

/// What an argument depends on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Slot {
    /// The tensor map of query, key, value or output, by number.
    Tensor(usize),
    /// The address of the log-sum-exps.
    Lse,
    /// The problem alone.
    Number(Number),
}

/// An argument that stays.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Number {
    U32(u32),
    F32(f32),
    Address(DeviceAddress),
}

impl From<Number> for Argument {
    fn from(number: Number) -> Self {
        match number {
            Number::U32(value) => value.into(),
            Number::F32(value) => value.into(),
            Number::Address(value) => value.into(),
        }
    }
}

/// The slots of a kernel's parameters, or the name of the one that is not known.
pub(super) fn slots(
    parameters: &[String],
    problem: &Problem,
    geometry: &Geometry,
    lists: Option<DeviceAddress>,
) -> Result<Vec<Slot>, String> {
    let of = |name: &String| slot(name, problem, geometry, lists).ok_or_else(|| name.clone());
    parameters.iter().map(of).collect()
}

fn slot(
    name: &str,
    problem: &Problem,
    geometry: &Geometry,
    lists: Option<DeviceAddress>,
) -> Option<Slot> {
    let number = |value: u32| Some(Slot::Number(Number::U32(value)));
    match name {
        "Query" => Some(Slot::Tensor(0)),
        "Key" => Some(Slot::Tensor(1)),
        "Value" => Some(Slot::Tensor(2)),
        "Output" => Some(Slot::Tensor(3)),
        "Lse" => Some(Slot::Lse),
        "QueryLength" => number(geometry.query_length),
        "KeyLength" => number(geometry.key_length),
        "ScaleLog2" => {
            let scale = problem.scale() * std::f32::consts::LOG2_E;
            Some(Slot::Number(Number::F32(scale)))
        }
        "Tiles" => number(geometry.tiles),
        "TileLists" => Some(Slot::Number(Number::Address(lists?))),
        _ => {
            let (name, part) = name.split_once(", ").unwrap_or((name, "number"));
            let divisor: Divisor = match name {
                "TilesPerHead" => geometry.per_head,
                "QueryHeads" => geometry.heads,
                "GroupSize" => geometry.group,
                _ => return None,
            };
            match part {
                "number" => number(divisor.number),
                "multiplier" => number(divisor.multiplier),
                "shift" => number(divisor.shift),
                _ => None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kernels::forward::every_tuned;
    use ptx::ParameterKind;

    use super::*;
    use crate::gpu::Chip;
    use crate::problem::Mask;

    /// Every parameter of every tuned configuration gets an argument of its kind.
    #[test]
    fn every_parameter_is_known() {
        for configuration in every_tuned() {
            let mask = if configuration.causal { Mask::Causal } else { Mask::None };
            let problem = Problem::new(2, 6, 300, configuration.head_dim as usize)
                .with_kv_heads(2)
                .with_value_head_dim(configuration.value_head_dim as usize)
                .with_mask(mask);
            let geometry = Geometry::new(&configuration, &problem, &Chip::H200).unwrap();
            let lists = geometry.lists.as_ref().map(|_| DeviceAddress(256));
            let parameters = configuration.program().unwrap().parameters;
            let names: Vec<String> = parameters.iter().map(|it| it.name.clone()).collect();
            let slots = slots(&names, &problem, &geometry, lists)
                .unwrap_or_else(|name| panic!("{}: `{name}`", configuration.name()));
            for (parameter, slot) in parameters.iter().zip(slots) {
                let fits = match (&parameter.kind, slot) {
                    (ParameterKind::TensorMap(_), Slot::Tensor(_)) => true,
                    (ParameterKind::Address, Slot::Lse | Slot::Number(Number::Address(_))) => true,
                    (ParameterKind::Scalar(ty), Slot::Number(number)) => matches!(
                        (ty, number),
                        (ptx::Type::U32, Number::U32(_)) | (ptx::Type::F32, Number::F32(_))
                    ),
                    _ => false,
                };
                assert!(fits, "{}: {parameter:?} gets {slot:?}", configuration.name());
            }
        }
    }

    /// The copies of a tensor map are those that the kernel's parameter asks for.
    #[test]
    fn boxes_are_those_of_the_parameters() {
        for configuration in every_tuned() {
            let program = configuration.program().unwrap();
            let maps: Vec<_> = (program.parameters.iter())
                .filter_map(|parameter| match &parameter.kind {
                    ParameterKind::TensorMap(tensor_box) => Some(tensor_box.clone()),
                    _ => None,
                })
                .collect();
            assert_eq!(maps, super::super::boxes(&configuration), "{}", configuration.name());
        }
    }
}
