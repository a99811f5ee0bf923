//! Attention with ordinary arithmetic, on any GPU.

use super::Candidate;
use crate::gpu::{Chip, scalar};
use crate::problem::Problem;

/// The kernel's name.
pub(crate) const NAME: &str = "scalar";

pub(super) fn candidate(chip: &Chip, problem: &Problem) -> Candidate {
    let (accepted, reason) = match (problem.beyond_plain(), scalar::blocks(problem)) {
        (None, Ok(_)) => (true, "serves every head dim, length and type".to_owned()),
        (Some(extra), _) => (false, format!("{extra} are not served")),
        (None, Err(error)) => (false, error.to_string()),
    };
    let configuration = accepted.then(|| scalar::configuration(chip.target, problem).name());
    Candidate {
        backend: super::NAME,
        kernel: NAME.to_owned(),
        accepted,
        on_request: false,
        configuration,
        reason,
    }
}
