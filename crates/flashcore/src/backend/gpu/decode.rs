//! Attention of few queries for each sequence over caches of any memory order, on Ampere and later.

use cuda::Stream;
use kernels::Decode;

use super::sequences::{self, Placed};
use super::{Candidate, Launch};
use crate::error::Error;
use crate::gpu::decode::choose;
use crate::gpu::{Chip, Compilation, DecodePlan, Gpu, GpuError};
use crate::inputs::InputLayouts;
use crate::problem::Problem;
use crate::serving::Sequences;

/// The kernel's name.
pub(crate) const NAME: &str = "decode";

/// Query rows for which it comes before kernels that read keys once for every tile of queries.
const FEW_ROWS: usize = 16;

pub(super) fn candidate(chip: &Chip, problem: &Problem, layouts: &InputLayouts) -> Candidate {
    let served = choose(chip, problem, false).and_then(|chosen| {
        sequences::aligned_inputs(problem, layouts)?;
        Ok(chosen)
    });
    super::candidate(
        NAME,
        served.map(|chosen| (chosen.configuration.name(), chosen.reason.to_owned())),
    )
}

/// The kernel for sequences of unequal lengths.
pub(super) fn candidate_of_sequences(
    chip: &Chip,
    sequences: &Sequences,
    layouts: &InputLayouts,
) -> Candidate {
    let problem = sequences.problem();
    let paged = sequences.keys().pages().is_some();
    let served = choose(chip, problem, paged).and_then(|chosen| {
        sequences::check(sequences, layouts)?;
        Ok(chosen)
    });
    super::candidate(
        NAME,
        served.map(|chosen| (chosen.configuration.name(), chosen.reason.to_owned())),
    )
}

/// Whether it is the best kernel for a problem that it serves.
pub(super) fn comes_first(problem: &Problem) -> bool {
    let group = problem.query_heads / problem.kv_heads.max(1);
    problem.query_length.saturating_mul(group) <= FEW_ROWS
}

pub(super) fn configuration(chip: &Chip, problem: &Problem) -> Option<Decode> {
    choose(chip, problem, false).ok().map(|chosen| chosen.configuration)
}

/// The kernel with its plan and its lists.
pub(super) struct Prepared {
    plan: DecodePlan,
    placed: Placed,
}

/// Prepares a launch over sequences, with a given number of teams or with as many as fill the GPU.
pub(super) fn prepare(gpu: &Gpu, placed: Placed, teams: Option<u32>) -> Result<Prepared, Error> {
    let size = &placed.size;
    let chosen = choose(&gpu.chip(), &size.problem, size.pages.is_some())
        .map_err(|reason| GpuError::Unsupported { kernel: NAME, reason })?;
    let plan =
        DecodePlan::with_configuration(gpu, size, chosen.configuration, teams, chosen.reason)?;
    Ok(Prepared { plan, placed })
}

impl Launch for Prepared {
    fn launch(&mut self, stream: &Stream) -> Result<(), GpuError> {
        self.plan.launch(stream, &self.placed.tensors)
    }

    fn compilation(&self) -> &Compilation {
        self.plan.kernel().compilation()
    }
}
