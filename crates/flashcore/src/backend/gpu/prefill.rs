//! Attention over ragged batches, with windows and rules of scores, on Hopper.

use cuda::Stream;
use kernels::{Prefill, Sequencer};

use super::sequences::{self, Placed};
use super::{Candidate, Launch};
use crate::error::Error;
use crate::gpu::prefill::{check_strides, choose, has_many_queries};
use crate::gpu::{Chip, Compilation, Gpu, GpuError, PrefillPlan};
use crate::inputs::InputLayouts;
use crate::problem::Problem;
use crate::serving::Sequences;

/// The kernel's name.
pub(crate) const NAME: &str = "prefill";

pub(super) fn candidate(chip: &Chip, problem: &Problem, layouts: &InputLayouts) -> Candidate {
    candidate_of_sequences(chip, &Sequences::plain(problem), layouts)
}

/// The kernel for sequences of unequal lengths.
pub(super) fn candidate_of_sequences(
    chip: &Chip,
    sequences: &Sequences,
    layouts: &InputLayouts,
) -> Candidate {
    let served = served(chip, sequences, layouts);
    super::candidate(NAME, served)
}

fn served(
    chip: &Chip,
    sequences: &Sequences,
    layouts: &InputLayouts,
) -> Result<(String, String), String> {
    let size = sequences::size(sequences, layouts);
    let chosen = choose(chip, &size)?;
    sequences::check(sequences, layouts)?;
    let keys = sequences.keys();
    if keys.pages().is_some() && !keys.left_padding().is_empty() {
        return Err("left padding in pages is not served".to_owned());
    }
    let strides = [layouts.query, layouts.key, layouts.value].map(|layout| layout.strides());
    check_strides(&size, strides).map_err(|error| error.to_string())?;
    Ok((chosen.configuration.name(), chosen.reason.to_owned()))
}

/// Whether it is the best kernel for sequences that it serves.
pub(super) fn comes_first(sequences: &Sequences) -> bool {
    has_many_queries(sequences.problem())
}

pub(super) fn configurations(chip: &Chip, problem: &Problem) -> Option<(Sequencer, Prefill)> {
    let layouts = InputLayouts::contiguous(problem).ok()?;
    let size = sequences::size(&Sequences::plain(problem), &layouts);
    let chosen = choose(chip, &size).ok()?;
    Some((Sequencer { target: chip.target }, chosen.configuration))
}

/// The kernel with its plan and its lists.
pub(super) struct Prepared {
    plan: PrefillPlan,
    placed: Placed,
}

/// Prepares a launch over sequences.
pub(super) fn prepare(gpu: &Gpu, placed: Placed) -> Result<Prepared, Error> {
    let plan = PrefillPlan::new(gpu, &placed.size)?;
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
