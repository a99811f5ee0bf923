//! The choice of a kernel, with its reasons.

use std::fmt;

use serde::Serialize;

use crate::backend::{Backend, BackendError, Candidate};
use crate::problem::Problem;

/// What the caller insists on. The default leaves the choice open.
///
/// ```
/// use flashcore::Preference;
///
/// let preference = Preference { backend: Some("cpu".into()), ..Preference::default() };
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Preference {
    /// The back end to use.
    pub backend: Option<String>,
    /// The kernel to use.
    pub kernel: Option<String>,
}

/// A back end that this machine or this build does not have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Missing {
    /// Its name.
    pub backend: &'static str,
    /// Why it is not there.
    pub reason: String,
}

/// Which kernel serves a problem, and why not the others.
///
/// ```
/// use flashcore::{Machine, Preference, Problem};
///
/// let machine = Machine::discover();
/// let plan = machine.plan(&Problem::new(1, 8, 512, 64), &Preference::default())?;
/// println!("{plan}");
/// # Ok::<(), flashcore::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// What is to be computed.
    pub problem: Problem,
    /// The kernel that will run.
    pub chosen: Candidate,
    /// Everything that was considered, in order of preference; `chosen` is among them.
    pub candidates: Vec<Candidate>,
    /// Back ends that could not be considered.
    pub missing: Vec<Missing>,
}

impl Plan {
    /// Choose among back ends given in order of preference. The first accepted candidate that the
    /// caller's preference allows is taken.
    pub(crate) fn choose(
        problem: &Problem,
        backends: &[Box<dyn Backend>],
        missing: &[Missing],
        preference: &Preference,
    ) -> Result<Plan, BackendError> {
        if let Some(name) = &preference.backend
            && !backends.iter().any(|backend| backend.name() == name)
        {
            let absent = missing.iter().find(|missing| missing.backend == name);
            return Err(BackendError::Unavailable {
                backend: name.clone(),
                reason: absent.map_or_else(
                    || "no such back end exists".to_owned(),
                    |missing| missing.reason.clone(),
                ),
            });
        }
        let mut candidates: Vec<Candidate> =
            backends.iter().flat_map(|backend| backend.candidates(problem)).collect();
        let known = names(&candidates);
        let mut asked_for = 0;
        for candidate in &mut candidates {
            let backend = preference.backend.as_deref();
            let kernel = preference.kernel.as_deref();
            if backend.is_some_and(|name| name != candidate.backend)
                || kernel.is_some_and(|name| name != candidate.kernel)
            {
                candidate.accepted = false;
                candidate.reason = "not asked for".to_owned();
            } else {
                asked_for += 1;
            }
        }
        if let (0, Some(kernel)) = (asked_for, &preference.kernel) {
            return Err(BackendError::UnknownKernel { kernel: kernel.clone(), known });
        }
        let Some(chosen) = candidates.iter().find(|candidate| candidate.accepted) else {
            let refusals: Vec<String> = candidates
                .iter()
                .map(|candidate| format!("{} ({})", name(candidate), candidate.reason))
                .collect();
            return Err(BackendError::Unsupported { reasons: refusals.join(", ") });
        };
        Ok(Plan {
            problem: problem.clone(),
            chosen: chosen.clone(),
            candidates,
            missing: missing.to_vec(),
        })
    }

    /// Why the chosen kernel, and why nothing before it, in a line.
    pub fn reason(&self) -> String {
        let mut reason = self.chosen.reason.clone();
        for missing in &self.missing {
            reason += &format!("; no {}: {}", missing.backend, missing.reason);
        }
        let before = self.candidates.iter().take_while(|candidate| **candidate != self.chosen);
        for candidate in before {
            reason += &format!("; not {}: {}", name(candidate), candidate.reason);
        }
        reason
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.problem)?;
        for missing in &self.missing {
            write!(f, "\n  {}: absent, {}", missing.backend, missing.reason)?;
        }
        for candidate in &self.candidates {
            let verdict = match candidate.accepted {
                true if *candidate == self.chosen => "chosen",
                true => "possible",
                false => "refused",
            };
            write!(f, "\n  {}: {verdict}, {}", name(candidate), candidate.reason)?;
        }
        Ok(())
    }
}

fn name(candidate: &Candidate) -> String {
    format!("{}/{}", candidate.backend, candidate.kernel)
}

fn names(candidates: &[Candidate]) -> String {
    let names: Vec<String> = candidates.iter().map(name).collect();
    names.join(", ")
}
