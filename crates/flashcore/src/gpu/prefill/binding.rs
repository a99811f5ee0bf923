//! Which argument goes to which parameter of the prefill kernel and of the sequencer before it: by
//! the parameter's name, so that a kernel with another order or with more of them is refused and
//! not run with the wrong numbers.

use cuda::{Argument, DeviceAddress, TensorMap};

use super::rows::Rows;
use crate::gpu::binding::Number;
use crate::gpu::serving::{self, shared_slot};
use crate::gpu::{ServingSize, ServingTensors};

/// What an argument depends on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::gpu) enum Slot {
    /// What other kernels over sequences know as well.
    Shared(serving::Slot),
    /// The tensor map of query, key, value or output, by number.
    Map(usize),
    /// Rows of one of them in all, and from a batch entry to the next.
    Count(usize),
    EntryRows(usize),
}

/// What the arguments of a launch are made from.
pub(super) struct Launch<'a> {
    pub(super) tensors: &'a ServingTensors,
    pub(super) rows: &'a [Rows; 4],
    pub(super) maps: &'a [TensorMap; 4],
}

impl Slot {
    pub(super) fn argument(self, launch: &Launch<'_>) -> Argument {
        match self {
            Slot::Shared(slot) => slot.argument(&[], |list| list.of(launch.tensors)),
            Slot::Map(role) => launch.maps[role].into(),
            Slot::Count(role) => launch.rows[role].count.into(),
            Slot::EntryRows(role) => launch.rows[role].entry_rows.into(),
        }
    }

    fn number(value: usize) -> Option<Self> {
        serving::Slot::number(value).map(Slot::Shared)
    }

    fn address(address: DeviceAddress) -> Option<Self> {
        Some(Slot::Shared(serving::Slot::Fixed(Number::Address(address))))
    }
}

/// What the numbers of both kernels are made from.
pub(in crate::gpu) struct Numbers<'a> {
    pub(super) size: &'a ServingSize,
    pub(super) tile_rows: u32,
    pub(super) records: u32,
    pub(super) together: u32,
    pub(super) schedule: DeviceAddress,
}

const QUERY: usize = 0;
const KEY: usize = 1;
const VALUE: usize = 2;
const OUTPUT: usize = 3;

impl Numbers<'_> {
    /// The slots of a kernel's parameters, or the name of the one that is not known.
    pub(super) fn slots(
        parameters: &[String],
        slot: impl Fn(&str) -> Option<Slot>,
    ) -> Result<Vec<Slot>, String> {
        parameters.iter().map(|name| slot(name).ok_or_else(|| name.clone())).collect()
    }

    /// A parameter of the kernel.
    pub(in crate::gpu) fn of_kernel(&self, name: &str) -> Option<Slot> {
        let ServingSize { problem, entries, query_rows, .. } = self.size;
        match name {
            "Query" => Some(Slot::Map(QUERY)),
            "Key" => Some(Slot::Map(KEY)),
            "Value" => Some(Slot::Map(VALUE)),
            "Output" => Some(Slot::Map(OUTPUT)),
            "LseHeadStride" => Slot::number(*query_rows),
            "Schedule" => Slot::address(self.schedule),
            "QueryHeads" => Slot::number(problem.query_heads),
            "HeadsPerGroup" => Slot::number(self.together as usize),
            "Entries" => Slot::number(*entries),
            "Key rows of an entry" => Some(Slot::EntryRows(KEY)),
            _ => shared_slot(self.size, name).map(Slot::Shared),
        }
    }

    /// A parameter of the sequencer.
    pub(in crate::gpu) fn of_sequencer(&self, name: &str) -> Option<Slot> {
        let ServingSize { problem, pages, packed_queries, query_rows, .. } = self.size;
        let of_pages = pages.is_some();
        match name {
            "Schedule" => Slot::address(self.schedule),
            "MaxTiles" => Slot::number(self.records as usize),
            "TileRows" => Slot::number(self.tile_rows as usize),
            "Query rows" => Some(Slot::Count(QUERY)),
            "Query rows of a sequence" => Some(Slot::EntryRows(QUERY)),
            "Output rows of a sequence" => Some(Slot::EntryRows(OUTPUT)),
            // Keys in pages are found by the block table, and start nowhere else.
            "Key rows" if of_pages => Slot::number(problem.key_length),
            "Key rows" => Some(Slot::Count(KEY)),
            "Key rows of a sequence" if of_pages => Slot::number(0),
            "Key rows of a sequence" => Some(Slot::EntryRows(KEY)),
            "LseBatchStride" if *packed_queries => Slot::number(0),
            "LseBatchStride" => Slot::number(problem.query_heads * query_rows),
            _ => shared_slot(self.size, name).map(Slot::Shared),
        }
    }
}

#[cfg(test)]
mod tests {
    use kernels::Sequencer;
    use kernels::forward::every_prefill;
    use ptx::{ParameterKind, Program, Target, Type};

    use super::*;
    use crate::gpu::binding::check_kinds;
    use crate::problem::{Mask, Problem};

    fn check(program: &Program, slot: impl Fn(&str) -> Option<Slot>) {
        assert!(program.parameters.len() <= cuda::MAX_ARGUMENTS, "{}", program.parameters.len());
        for parameter in &program.parameters {
            let name = &parameter.name;
            let slot = slot(name).unwrap_or_else(|| panic!("{}: `{name}`", program.name));
            let fits = match (&parameter.kind, slot) {
                (ParameterKind::TensorMap(_), Slot::Map(_)) => true,
                (ParameterKind::Scalar(Type::U32), Slot::Count(_) | Slot::EntryRows(_)) => true,
                (_, Slot::Shared(slot)) => {
                    let one = Program { parameters: vec![parameter.clone()], ..program.clone() };
                    check_kinds(&one, |_| Some(slot)).is_ok()
                }
                _ => false,
            };
            assert!(fits, "{}: {parameter:?} gets {slot:?}", program.name);
        }
    }

    /// Every parameter of every tuned configuration gets an argument of its kind.
    #[test]
    fn every_parameter_is_known() {
        for configuration in every_prefill() {
            let mut problem = Problem::new(2, 6, 300, configuration.tile.head_dim as usize)
                .with_kv_heads(2)
                .with_mask(Mask::Causal);
            problem.softcap = configuration.softcap.then_some(3.0);
            let mut size = ServingSize::new(problem);
            if configuration.page_rows.is_some() {
                size = size.with_pages(16, 40, 90);
            }
            let numbers = Numbers {
                size: &size,
                tile_rows: configuration.tile.query_rows(),
                records: 9,
                together: 3,
                schedule: DeviceAddress(256),
            };
            check(&configuration.program().unwrap(), |name| numbers.of_kernel(name));
            let sequencer = Sequencer { target: Target::SM_90A }.program().unwrap();
            check(&sequencer, |name| numbers.of_sequencer(name));
        }
    }
}
