//! Which argument goes to which parameter of the decode kernel.

use cuda::DeviceAddress;
use kernels::Decode;

use super::Grid;
use crate::gpu::ServingSize;
use crate::gpu::binding::Number;
use crate::gpu::serving::{Slot, shared_slot};

/// What the numbers of a launch are made from.
pub(super) struct Launch<'a> {
    pub(super) size: &'a ServingSize,
    pub(super) configuration: &'a Decode,
    pub(super) grid: Grid,
    /// Parts of sequences, and counters.
    pub(super) workspace: [DeviceAddress; 2],
}

impl Launch<'_> {
    /// The slots of a kernel's parameters, or the name of the one that is not known.
    pub(super) fn slots(&self, parameters: &[String]) -> Result<Vec<Slot>, String> {
        parameters.iter().map(|name| self.slot(name).ok_or_else(|| name.clone())).collect()
    }

    fn slot(&self, name: &str) -> Option<Slot> {
        let ServingSize { problem, query_rows, key_rows, .. } = self.size;
        let number = Slot::number;
        let word = |value: usize| Some(Slot::Fixed(Number::U64(value as u64)));
        match name {
            "Lse batch stride" if self.size.packed_queries => word(0),
            "Lse batch stride" => word(problem.query_heads * query_rows),
            "Lse head stride" => word(*query_rows),
            "Partials" => Some(Slot::Fixed(Number::Address(self.workspace[0]))),
            "Counters" => Some(Slot::Fixed(Number::Address(self.workspace[1]))),
            "QueryRows" => number(*query_rows),
            "KeyRows" if self.size.packed_keys => number(*key_rows),
            "KeyRows" => number(problem.key_length),
            "LeastTiles" => number(self.configuration.warps as usize),
            _ => shared_slot(self.size, name)
                .or_else(|| Slot::tensor(&["Query", "Key", "Value", "Output"], name))
                .or_else(|| Slot::divisor(name, |name| self.divisor(name))),
        }
    }

    fn divisor(&self, name: &str) -> Option<u32> {
        Some(match name {
            "KeyHeads" => self.size.problem.kv_heads as u32,
            "BlocksPerTeam" => self.grid.members,
            "Teams" => self.grid.teams,
            _ => return None,
        })
    }
}

/// What every parameter of a configuration depends on, but for the workspace.
pub(in crate::gpu) fn describe(
    configuration: &Decode,
    size: &ServingSize,
    grid: Grid,
    name: &str,
) -> Option<Slot> {
    Launch { size, configuration, grid, workspace: [DeviceAddress(0); 2] }.slot(name)
}

#[cfg(test)]
mod tests {
    use ptx::Target;

    use super::*;
    use crate::gpu::binding::check_kinds;
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
            let grid = Grid { teams: 3, members: 2, workspace: None };
            let workspace = [DeviceAddress(0); 2];
            let launch = Launch { size: &size, configuration: &configuration, grid, workspace };
            check_kinds(&configuration.program().unwrap(), |name| launch.slot(name))
                .unwrap_or_else(|fault| panic!("{}: {fault}", configuration.name()));
        }
    }
}
