//! Which argument goes to which parameter of the decode kernel: by the parameter's name, so that a
//! kernel with another order or with more of them is refused and not run with the wrong numbers.

use cuda::{Argument, DeviceAddress};
use kernels::Divisor;

use super::Workspace;
use crate::gpu::{DeviceTensor, ServingPages, ServingSize, ServingTensors};

/// What an argument depends on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Slot {
    /// The plan.
    Fixed(Number),
    /// The address of query, key, value or output, by number.
    Tensor(usize),
    /// A stride of one of them.
    Stride(usize, Stride),
    /// The log-sum-exps.
    Lse,
    /// A list on the device, or nothing.
    List(List),
}

/// An argument that stays.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Number {
    U32(u32),
    I32(i32),
    U64(u64),
    F32(f32),
    Address(DeviceAddress),
}

impl From<Number> for Argument {
    fn from(number: Number) -> Self {
        match number {
            Number::U32(value) => value.into(),
            Number::I32(value) => value.into(),
            Number::U64(value) => value.into(),
            Number::F32(value) => value.into(),
            Number::Address(value) => value.into(),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Stride {
    Batch,
    Row,
    Head,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum List {
    Lengths,
    LeftPadding,
    Entries,
    QueryStarts,
    QueryLengths,
    KeyStarts,
    BlockTable,
    Slopes,
    Sinks,
}

impl Slot {
    /// The argument for a launch.
    pub(super) fn argument(self, tensors: &ServingTensors, size: &ServingSize) -> Argument {
        let all = [tensors.query, tensors.key, tensors.value, tensors.output];
        match self {
            Slot::Fixed(number) => number.into(),
            Slot::Tensor(role) => all[role].address.into(),
            Slot::Stride(role, stride) => {
                let DeviceTensor { strides, .. } = all[role];
                // Packed tensors have one batch entry for all sequences.
                let packed = match role {
                    0 | 3 => size.packed_queries,
                    _ => size.packed_keys,
                };
                let elements = match stride {
                    Stride::Batch if packed => 0,
                    Stride::Batch => strides.batch,
                    Stride::Row => strides.length,
                    Stride::Head => strides.heads,
                };
                Argument::U64(elements as u64)
            }
            Slot::Lse => tensors.lse.into(),
            Slot::List(list) => {
                let address = match list {
                    List::Lengths => tensors.lengths,
                    List::LeftPadding => tensors.left_padding,
                    List::Entries => tensors.entries,
                    List::QueryStarts => tensors.query_starts,
                    List::QueryLengths => tensors.query_lengths,
                    List::KeyStarts => tensors.key_starts,
                    List::BlockTable => tensors.block_table,
                    List::Slopes => tensors.slopes,
                    List::Sinks => tensors.sinks,
                };
                address.unwrap_or(DeviceAddress(0)).into()
            }
        }
    }
}

/// What the numbers of a launch are made from.
pub(super) struct Launch<'a> {
    pub(super) size: &'a ServingSize,
    pub(super) teams: u32,
    pub(super) members: u32,
    pub(super) least_tiles: u32,
    pub(super) workspace: &'a Workspace,
}

/// The slots of a kernel's parameters, or the name of the one that is not known.
pub(super) fn slots(parameters: &[String], numbers: &Launch<'_>) -> Result<Vec<Slot>, String> {
    parameters.iter().map(|name| numbers.slot(name).ok_or_else(|| name.clone())).collect()
}

impl Launch<'_> {
    fn slot(&self, name: &str) -> Option<Slot> {
        let ServingSize { problem, pages, entries, query_rows, key_rows, .. } = self.size;
        let number = |value: usize| Some(Slot::Fixed(Number::U32(u32::try_from(value).ok()?)));
        let float = |value: f32| Some(Slot::Fixed(Number::F32(value)));
        let word = |value: usize| Some(Slot::Fixed(Number::U64(value as u64)));
        let log2e = std::f32::consts::LOG2_E;
        let (left, right) = problem.mask.reach();
        let reach = |keys: Option<usize>| {
            let keys = keys.map_or(OPEN, |keys| i32::try_from(keys).unwrap_or(OPEN).min(OPEN));
            Some(Slot::Fixed(Number::I32(keys)))
        };
        let page = |of: fn(&ServingPages) -> usize| number(pages.as_ref().map_or(0, of));
        let packed = self.size.packed_queries;
        match name {
            "lse" => Some(Slot::Lse),
            "lse batch stride" if packed => word(0),
            "lse batch stride" => word(problem.query_heads * query_rows),
            "lse head stride" => word(*query_rows),
            "parts" => Some(Slot::Fixed(Number::Address(self.workspace.parts()))),
            "counters" => Some(Slot::Fixed(Number::Address(self.workspace.counters()))),
            "batch" => number(problem.batch),
            "query length" => number(problem.query_length),
            "key length" => number(problem.key_length),
            "query rows" => number(*query_rows),
            "key rows" if self.size.packed_keys => number(*key_rows),
            "key rows" => number(problem.key_length),
            "lengths" => Some(Slot::List(List::Lengths)),
            "left padding" => Some(Slot::List(List::LeftPadding)),
            "batch entries" => Some(Slot::List(List::Entries)),
            "query starts" => Some(Slot::List(List::QueryStarts)),
            "query lengths" => Some(Slot::List(List::QueryLengths)),
            "key starts" => Some(Slot::List(List::KeyStarts)),
            "batch entries there are" => number(*entries),
            "block table" => Some(Slot::List(List::BlockTable)),
            "pages of a sequence" => page(|pages| pages.columns),
            "page size" => page(|pages| pages.size),
            "least tiles" => number(self.least_tiles as usize),
            "window left" => reach(left),
            "window right" => reach(right),
            "scale times log2(e)" => float(problem.scale() * log2e),
            "scale over softcap" => float(problem.scale() / problem.softcap?),
            "softcap times log2(e)" => float(problem.softcap? * log2e),
            "slopes" => Some(Slot::List(List::Slopes)),
            "slopes batch stride" => {
                number(if self.size.slopes_of_sequences { problem.query_heads } else { 0 })
            }
            "sinks" => Some(Slot::List(List::Sinks)),
            _ => self.tensor(name).or_else(|| self.divisor(name)),
        }
    }

    fn tensor(&self, name: &str) -> Option<Slot> {
        let roles = ["queries", "keys", "values", "output"];
        let role = roles.iter().position(|role| name.starts_with(role))?;
        Some(match name[roles[role].len()..].trim() {
            "" => Slot::Tensor(role),
            "batch stride" => Slot::Stride(role, Stride::Batch),
            "row stride" => Slot::Stride(role, Stride::Row),
            "head stride" => Slot::Stride(role, Stride::Head),
            _ => return None,
        })
    }

    fn divisor(&self, name: &str) -> Option<Slot> {
        let (name, part) = name.split_once(", ").unwrap_or((name, "number"));
        let problem = &self.size.problem;
        let divisor = Divisor::new(match name {
            "key heads" => problem.kv_heads as u32,
            "query heads per key head" => (problem.query_heads / problem.kv_heads) as u32,
            "blocks of a team" => self.members,
            "teams" => self.teams,
            _ => return None,
        });
        let number = match part {
            "number" => divisor.number,
            "multiplier" => divisor.multiplier,
            "shift" => divisor.shift,
            _ => return None,
        };
        Some(Slot::Fixed(Number::U32(number)))
    }
}

/// A window that hides nothing: beyond every position.
const OPEN: i32 = 1 << 29;

#[cfg(test)]
mod tests {
    use ptx::{ParameterKind, Target};

    use super::*;
    use crate::problem::{Mask, Problem};

    /// Every parameter of every tuned configuration gets an argument of its kind.
    #[test]
    fn every_parameter_is_known() {
        for configuration in kernels::decode::every_tuned(Target::SM_90A) {
            let mut problem = Problem::new(2, 6, 1, configuration.head_dim as usize)
                .with_kv_heads(2)
                .with_key_length(300)
                .with_mask(Mask::Causal);
            problem.softcap = configuration.softcap.then_some(3.0);
            let mut size = ServingSize::new(problem);
            if configuration.paged {
                size = size.with_pages(16, 40, 90);
            }
            let workspace = Workspace::nowhere();
            let numbers =
                Launch { size: &size, teams: 3, members: 2, least_tiles: 1, workspace: &workspace };
            let parameters = configuration.program().unwrap().parameters;
            let names: Vec<String> = parameters.iter().map(|it| it.name.clone()).collect();
            assert!(names.len() <= cuda::MAX_ARGUMENTS, "{}", names.len());
            let slots = slots(&names, &numbers)
                .unwrap_or_else(|name| panic!("{}: `{name}`", configuration.name()));
            for (parameter, slot) in parameters.iter().zip(slots) {
                let fits = match (&parameter.kind, slot) {
                    (ParameterKind::Address, Slot::Fixed(Number::Address(_))) => true,
                    (ParameterKind::Address, Slot::Tensor(_) | Slot::Lse | Slot::List(_)) => true,
                    (ParameterKind::Scalar(ptx::Type::U64), slot) => {
                        matches!(slot, Slot::Stride(..) | Slot::Fixed(Number::U64(_)))
                    }
                    (ParameterKind::Scalar(ty), Slot::Fixed(number)) => matches!(
                        (ty, number),
                        (ptx::Type::U32, Number::U32(_))
                            | (ptx::Type::S32, Number::I32(_))
                            | (ptx::Type::F32, Number::F32(_))
                    ),
                    _ => false,
                };
                assert!(fits, "{}: {parameter:?} gets {slot:?}", configuration.name());
            }
        }
    }
}
