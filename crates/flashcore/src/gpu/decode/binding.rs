//! Which argument goes to which parameter of the decode kernel.

use cuda::DeviceAddress;

use super::Workspace;
use crate::gpu::binding::{self, Number};
use crate::gpu::{ServingPages, ServingSize, ServingTensors};

pub(super) type Slot = binding::Slot<List>;

/// Addresses that are no tensor's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum List {
    Lse,
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

impl List {
    pub(super) fn of(self, tensors: &ServingTensors) -> Option<DeviceAddress> {
        match self {
            List::Lse => Some(tensors.lse),
            List::Lengths => tensors.lengths,
            List::LeftPadding => tensors.left_padding,
            List::Entries => tensors.entries,
            List::QueryStarts => tensors.query_starts,
            List::QueryLengths => tensors.query_lengths,
            List::KeyStarts => tensors.key_starts,
            List::BlockTable => tensors.block_table,
            List::Slopes => tensors.slopes,
            List::Sinks => tensors.sinks,
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

impl Launch<'_> {
    /// The slots of a kernel's parameters, or the name of the one that is not known.
    pub(super) fn slots(&self, parameters: &[String]) -> Result<Vec<Slot>, String> {
        parameters.iter().map(|name| self.slot(name).ok_or_else(|| name.clone())).collect()
    }

    fn slot(&self, name: &str) -> Option<Slot> {
        let ServingSize { problem, pages, entries, query_rows, key_rows, .. } = self.size;
        let number = Slot::number;
        let float = |value: f32| Some(Slot::Fixed(Number::F32(value)));
        let word = |value: usize| Some(Slot::Fixed(Number::U64(value as u64)));
        let log2e = std::f32::consts::LOG2_E;
        let (left, right) = problem.mask.reach();
        let reach = |keys: Option<usize>| {
            let keys = keys.map_or(OPEN, |keys| i32::try_from(keys).unwrap_or(OPEN).min(OPEN));
            Some(Slot::Fixed(Number::I32(keys)))
        };
        let page = |of: fn(&ServingPages) -> usize| number(pages.as_ref().map_or(0, of));
        let list = |list: List| Some(Slot::List(list));
        match name {
            "lse" => list(List::Lse),
            "lse batch stride" if self.size.packed_queries => word(0),
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
            "lengths" => list(List::Lengths),
            "left padding" => list(List::LeftPadding),
            "batch entries" => list(List::Entries),
            "query starts" => list(List::QueryStarts),
            "query lengths" => list(List::QueryLengths),
            "key starts" => list(List::KeyStarts),
            "batch entries there are" => number(*entries),
            "block table" => list(List::BlockTable),
            "pages of a sequence" => page(|pages| pages.columns),
            "page size" => page(|pages| pages.size),
            "least tiles" => number(self.least_tiles as usize),
            "window left" => reach(left),
            "window right" => reach(right),
            "scale times log2(e)" => float(problem.scale() * log2e),
            "scale over softcap" => float(problem.scale() / problem.softcap?),
            "softcap times log2(e)" => float(problem.softcap? * log2e),
            "slopes" => list(List::Slopes),
            "slopes batch stride" => {
                number(if self.size.slopes_of_sequences { problem.query_heads } else { 0 })
            }
            "sinks" => list(List::Sinks),
            _ => Slot::tensor(&["queries", "keys", "values", "output"], name)
                .or_else(|| Slot::divisor(name, |name| self.divisor(name))),
        }
    }

    fn divisor(&self, name: &str) -> Option<u32> {
        let problem = &self.size.problem;
        Some(match name {
            "key heads" => problem.kv_heads as u32,
            "query heads per key head" => (problem.query_heads / problem.kv_heads) as u32,
            "blocks of a team" => self.members,
            "teams" => self.teams,
            _ => return None,
        })
    }
}

/// A window that hides nothing: beyond every position.
const OPEN: i32 = 1 << 29;

#[cfg(test)]
mod tests {
    use ptx::Target;

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
            let launch =
                Launch { size: &size, teams: 3, members: 2, least_tiles: 1, workspace: &workspace };
            binding::check_kinds(&configuration.program().unwrap(), |name| launch.slot(name))
                .unwrap_or_else(|fault| panic!("{}: {fault}", configuration.name()));
        }
    }
}
