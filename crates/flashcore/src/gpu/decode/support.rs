//! What the decode kernel serves, and in which configuration.

use kernels::Decode;
use kernels::decode::{DecodeWorkload, Tuned, tuned};
use ptx::Capability;

use crate::gpu::forward::tensor_core_element;
use crate::gpu::{Chip, GpuError, ServingSize};
use crate::problem::Problem;

/// Positions are counted in 31 bits, with room for a window on both sides.
const MOST_POSITIONS: usize = 1 << 29;

/// The configuration for a problem, or why the kernel does not serve it.
pub fn choose(chip: &Chip, problem: &Problem, paged: bool) -> Result<Tuned, String> {
    if !chip.target.has(Capability::AsyncCopies) || !chip.target.has(Capability::Mma) {
        return Err(format!("{} has no cp.async or no mma.sync", chip.target));
    }
    let element = tensor_core_element(problem)?;
    let query_rows = query_rows(problem).ok_or("there are too many queries")?;
    if query_rows == 0 || problem.batch == 0 {
        return Err("there are no queries".to_owned());
    }
    if problem.key_length > MOST_POSITIONS {
        let length = problem.key_length;
        return Err(format!("{length} keys are more than {MOST_POSITIONS}"));
    }
    let workload = DecodeWorkload {
        element,
        head_dim: problem.head_dim as u32,
        value_head_dim: problem.value_head_dim as u32,
        query_rows,
        paged,
        softcap: problem.softcap.is_some(),
        alibi: problem.alibi,
        sinks: problem.sinks,
    };
    tuned(chip.target, &workload).ok_or_else(|| "no configuration is tuned for it".to_owned())
}

/// Query rows of a sequence and key head.
fn query_rows(problem: &Problem) -> Option<u32> {
    let group = problem.query_heads / problem.kv_heads.max(1);
    let rows = problem.query_length.checked_mul(group)?;
    u32::try_from(rows).ok().filter(|rows| *rows <= MOST_POSITIONS as u32)
}

/// The blocks of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::gpu) struct Grid {
    /// Teams of blocks.
    pub(in crate::gpu) teams: u32,
    /// Blocks of a team.
    pub(in crate::gpu) members: u32,
    /// Bytes of workspace for parts of sequences, and for counters; none for one team.
    pub(in crate::gpu) workspace: Option<[u64; 2]>,
}

impl Grid {
    /// With a given number of teams, or with as many as fill the chip.
    pub(in crate::gpu) fn new(
        chip: &Chip,
        configuration: &Decode,
        size: &ServingSize,
        wanted: Option<u32>,
    ) -> Result<Self, GpuError> {
        let problem = &size.problem;
        let rows = query_rows(problem).unwrap_or(0);
        let members = configuration.team(problem.kv_heads as u32, rows);
        let fill = teams(chip, configuration, size, members);
        let teams = wanted.unwrap_or(fill).clamp(1, configuration.most_teams());
        let blocks = teams.checked_mul(members).filter(|blocks| *blocks <= i32::MAX as u32);
        let blocks = blocks.ok_or(GpuError::TooLarge { what: "the number of query rows" })?;
        // Tiles are counted in 31 bits, at least one for each sequence.
        let tiles = problem.key_length / configuration.tile_keys as usize + 2;
        if problem.batch.checked_mul(tiles).is_none_or(|tiles| tiles > i32::MAX as usize) {
            return Err(GpuError::TooLarge { what: "the number of keys of all sequences" });
        }
        let counters = 4 * problem.batch as u64 * u64::from(members);
        let workspace = (teams > 1).then(|| [configuration.workspace_bytes(blocks), counters]);
        Ok(Grid { teams, members, workspace })
    }

    pub(in crate::gpu) fn blocks(&self) -> u32 {
        self.teams * self.members
    }
}

/// How many teams fill a chip without leaving a warp of them without a tile.
fn teams(chip: &Chip, tuned: &Decode, size: &ServingSize, members: u32) -> u32 {
    let places = chip.multiprocessors * tuned.blocks;
    let tiles = size.problem.key_length.div_ceil(tuned.tile_keys as usize).max(1);
    let useful = size.problem.batch.saturating_mul(tiles).div_ceil(tuned.warps as usize);
    let useful = u32::try_from(useful).unwrap_or(u32::MAX);
    (places / members.max(1)).clamp(1, tuned.most_teams()).min(useful)
}

#[cfg(test)]
mod tests {
    use ptx::Target;

    use super::*;
    use crate::dtype::DType;

    #[test]
    fn every_width_is_served_from_ampere_on() {
        for target in [Target::SM_80, Target::SM_89, Target::SM_90A, Target::SM_120] {
            for dim in (8..=256).step_by(8) {
                for (heads, kv_heads) in [(1, 1), (16, 1)] {
                    let problem = Problem::new(3, heads, 1, dim).with_kv_heads(kv_heads);
                    let chosen = choose(&Chip::typical(target), &problem, true).unwrap();
                    assert_eq!(chosen.configuration.head_dim as usize, dim);
                }
            }
        }
    }

    #[test]
    fn what_is_not_served_is_refused_with_the_reason() {
        let refusal = |chip: Chip, problem: Problem| choose(&chip, &problem, false).unwrap_err();
        let good = Problem::new(1, 2, 1, 64);
        assert_eq!(
            refusal(Chip::typical(Target::SM_75), good.clone()),
            "sm_75 has no cp.async or no mma.sync"
        );
        assert_eq!(
            refusal(Chip::H200, good.clone().with_dtype(DType::F32)),
            "the tensor cores take f16 and bf16, not f32"
        );
        assert_eq!(
            refusal(Chip::H200, Problem::new(1, 2, 1, 20)),
            "head dim 20 is not a multiple of 8 up to 256"
        );
        assert_eq!(refusal(Chip::H200, Problem::new(0, 2, 1, 64)), "there are no queries");
        assert_eq!(
            refusal(Chip::H200, good.with_key_length(1 << 30)),
            "1073741824 keys are more than 536870912"
        );
    }
}
