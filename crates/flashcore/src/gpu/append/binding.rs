//! Which argument goes to which parameter of the append kernel.

use cuda::DeviceAddress;

use super::{AppendSize, AppendTensors};
use crate::gpu::{GpuError, binding};
use crate::problem::Mask;

pub(super) type Slot = binding::Slot<List>;

/// Addresses that are no tensor's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum List {
    Lengths,
    LengthsAfter,
    NewStarts,
    NewLengths,
    Entries,
    BlockTable,
    Cosines,
    Sines,
    RotaryStarts,
    QueryStarts,
    QueryLengths,
}

impl List {
    pub(super) fn of(self, tensors: &AppendTensors) -> Option<DeviceAddress> {
        let AppendTensors { rotary, queries, .. } = tensors;
        match self {
            List::Lengths => tensors.lengths,
            List::LengthsAfter => tensors.lengths_after,
            List::NewStarts => tensors.new_starts,
            List::NewLengths => tensors.new_lengths,
            List::Entries => tensors.entries,
            List::BlockTable => tensors.block_table,
            List::Cosines => rotary.map(|rotary| rotary.cosines),
            List::Sines => rotary.map(|rotary| rotary.sines),
            List::RotaryStarts => rotary.and_then(|rotary| rotary.starts),
            List::QueryStarts => queries.and_then(|queries| queries.starts),
            List::QueryLengths => queries.and_then(|queries| queries.lengths),
        }
    }
}

/// The parameters of tensors, in the order of [`AppendTensors::strided`].
const TENSORS: [&str; 6] =
    ["new keys", "new values", "keys", "values", "queries", "turned queries"];

/// What the numbers of a launch are made from.
pub(super) struct Launch<'a> {
    size: &'a AppendSize,
    /// Rows of keys, and of queries, over all heads.
    pub(super) rows: u32,
    pub(super) turned_rows: u32,
}

impl<'a> Launch<'a> {
    pub(super) fn new(size: &'a AppendSize) -> Result<Self, GpuError> {
        let problem = &size.serving.problem;
        let count = |tokens: usize, heads: usize| {
            let rows = problem.batch.checked_mul(tokens).and_then(|rows| rows.checked_mul(heads));
            rows.filter(|rows| *rows <= i32::MAX as usize / 2)
                .map(|rows| rows as u32)
                .ok_or(GpuError::TooLarge { what: "the number of new rows" })
        };
        let turned_rows = match size.turned_queries {
            true => count(problem.query_length, problem.query_heads)?,
            false => 0,
        };
        Ok(Launch { size, rows: count(size.new_tokens, problem.kv_heads)?, turned_rows })
    }

    /// The slots of a kernel's parameters, or the name of the one that is not known.
    pub(super) fn slots(&self, parameters: &[String]) -> Result<Vec<Slot>, String> {
        parameters.iter().map(|name| self.slot(name).ok_or_else(|| name.clone())).collect()
    }

    pub(super) fn slot(&self, name: &str) -> Option<Slot> {
        let AppendSize { serving, new_rows, rotary, .. } = self.size;
        let (problem, pages) = (&serving.problem, serving.pages);
        let number = Slot::number;
        let list = |list: List| Some(Slot::List(list));
        match name {
            "rows" => number(self.rows as usize),
            "turned rows" => number(self.turned_rows as usize),
            "new rows" => number(*new_rows),
            "key length" => number(problem.key_length),
            "query rows" => number(serving.query_rows),
            "query step" => number(usize::from(problem.mask.reach() != Mask::None.reach())),
            "rotary positions" => number(rotary.map_or(0, |rotary| rotary.positions)),
            "batch entries there are" => number(serving.entries),
            "pages of a sequence" => number(pages.map_or(0, |pages| pages.columns)),
            "lengths" => list(List::Lengths),
            "lengths after" => list(List::LengthsAfter),
            "new starts" => list(List::NewStarts),
            "new lengths" => list(List::NewLengths),
            "batch entries" => list(List::Entries),
            "block table" => list(List::BlockTable),
            "cosines" => list(List::Cosines),
            "sines" => list(List::Sines),
            "rotary starts" => list(List::RotaryStarts),
            "query starts" => list(List::QueryStarts),
            "query lengths" => list(List::QueryLengths),
            _ => Slot::tensor(&TENSORS, name)
                .or_else(|| Slot::divisor(name, |name| self.divisor(name))),
        }
    }

    fn divisor(&self, name: &str) -> Option<u32> {
        let problem = &self.size.serving.problem;
        let number = match name {
            "key heads" => problem.kv_heads,
            "new tokens" => self.size.new_tokens,
            "query heads" => problem.query_heads,
            "query length" => problem.query_length,
            "page size" => self.size.serving.pages?.size,
            _ => return None,
        };
        Some(number as u32)
    }
}

#[cfg(test)]
mod tests {
    use ptx::Target;

    use super::*;
    use crate::gpu::{Chip, ServingSize};
    use crate::problem::Problem;

    /// Every parameter of every shape of the kernel gets an argument of its kind.
    #[test]
    fn every_parameter_is_known() {
        let cache = ServingSize::new(Problem::new(2, 6, 1, 64).with_kv_heads(2));
        let paged = cache.clone().with_pages(16, 40, 90);
        for serving in [cache, paged] {
            let plain = AppendSize::new(serving, 3);
            let turned = plain.clone().with_rotary(32, true, 700).with_turned_queries();
            for size in [plain, turned] {
                let chip = Chip::typical(Target::SM_80);
                let configuration = super::super::configuration(&chip, &size).unwrap();
                let launch = Launch::new(&size).unwrap();
                binding::check_kinds(&configuration.program().unwrap(), |name| launch.slot(name))
                    .unwrap_or_else(|fault| panic!("{}: {fault}", configuration.name()));
            }
        }
    }
}
