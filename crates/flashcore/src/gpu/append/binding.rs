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
const TENSORS: [&str; 6] = ["NewKey", "NewValue", "Key", "Value", "Query", "RotatedQuery"];

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
            "AllNewRows" => number(self.rows as usize),
            "AllRotatedRows" => number(self.turned_rows as usize),
            "NewRows" => number(*new_rows),
            "KeyLength" => number(problem.key_length),
            "QueryRows" => number(serving.query_rows),
            "QueryStep" => number(usize::from(problem.mask.reach() != Mask::None.reach())),
            "RotaryPositions" => number(rotary.map_or(0, |rotary| rotary.positions)),
            "Entries" => number(serving.entries),
            "PageColumns" => number(pages.map_or(0, |pages| pages.columns)),
            "KeyLengths" => list(List::Lengths),
            "LengthsAfter" => list(List::LengthsAfter),
            "NewStarts" => list(List::NewStarts),
            "NewLengths" => list(List::NewLengths),
            "BatchIndex" => list(List::Entries),
            "BlockTable" => list(List::BlockTable),
            "Cosines" => list(List::Cosines),
            "Sines" => list(List::Sines),
            "RotaryStarts" => list(List::RotaryStarts),
            "QueryStarts" => list(List::QueryStarts),
            "QueryLengths" => list(List::QueryLengths),
            _ => Slot::tensor(&TENSORS, name)
                .or_else(|| Slot::divisor(name, |name| self.divisor(name))),
        }
    }

    fn divisor(&self, name: &str) -> Option<u32> {
        let problem = &self.size.serving.problem;
        let number = match name {
            "KeyHeads" => problem.kv_heads,
            "NewTokens" => self.size.new_tokens,
            "QueryHeads" => problem.query_heads,
            "QueryLength" => problem.query_length,
            "PageSize" => self.size.serving.pages?.size,
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
