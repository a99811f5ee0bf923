//! Attention with ordinary arithmetic, on any GPU.

use super::Candidate;
use crate::gpu::{Chip, scalar};
use crate::problem::Problem;

/// The kernel's name.
pub(crate) const NAME: &str = "scalar";

pub(super) fn candidate(chip: &Chip, problem: &Problem) -> Candidate {
    let served = match (problem.beyond_plain(), scalar::blocks(problem)) {
        (None, Ok(_)) => {
            let configuration = scalar::configuration(chip.target, problem).name();
            Ok((configuration, "serves every head dim, length and type".to_owned()))
        }
        (Some(extra), _) => Err(format!("{extra} are not served")),
        (None, Err(error)) => Err(error.to_string()),
    };
    super::candidate(NAME, served)
}
