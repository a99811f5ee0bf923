//! Attention with tensor cores, on Hopper.

use kernels::Forward;

use super::Candidate;
use crate::gpu::Chip;
use crate::gpu::forward::{Geometry, check_layouts, choose};
use crate::inputs::InputLayouts;
use crate::problem::Problem;

/// The kernel's name.
pub(crate) const NAME: &str = "forward";

pub(super) fn candidate(chip: &Chip, problem: &Problem, layouts: &InputLayouts) -> Candidate {
    let served = choose(chip, problem).and_then(|chosen| {
        check_layouts(problem, layouts)?;
        let countable = Geometry::countable(&chosen.configuration, problem);
        countable.map_err(|error| error.to_string())?;
        Ok(chosen)
    });
    super::candidate(
        NAME,
        served.map(|chosen| (chosen.configuration.name(), chosen.reason.into_owned())),
    )
}

pub(super) fn configuration(chip: &Chip, problem: &Problem) -> Option<Forward> {
    choose(chip, problem).ok().map(|chosen| chosen.configuration)
}
