//! The choice of a kernel, with its reasons.

use std::fmt;

use serde::Serialize;

use crate::backend::{Backend, BackendError, Candidate, CpuBackend, gpu};
use crate::error::Error;
use crate::gpu::Chip;
use crate::inputs::InputLayouts;
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

impl Preference {
    /// What the environment insists on: `FLASHCORE_KERNEL` may name a kernel (`forward`) or a back
    /// end and a kernel (`gpu/forward`).
    pub fn from_environment() -> Self {
        std::env::var("FLASHCORE_KERNEL")
            .map_or_else(|_| Preference::default(), |name| Preference::named(&name))
    }

    /// A kernel by its name, with or without its back end; nothing where the name is empty.
    pub fn named(name: &str) -> Self {
        let of = |text: &str| Some(text.trim().to_owned()).filter(|text| !text.is_empty());
        match name.split_once('/') {
            Some((backend, kernel)) => Preference { backend: of(backend), kernel: of(kernel) },
            None => Preference { backend: None, kernel: of(name) },
        }
    }
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
    /// Choose for a GPU that need not be there, and the CPU of this machine: what would run, and
    /// why. See [`Chip`] for an example.
    pub fn on_chip(chip: &Chip, problem: &Problem, preference: &Preference) -> Result<Plan, Error> {
        problem.validate()?;
        let layouts = InputLayouts::contiguous(problem)?;
        let cpu = CpuBackend::new();
        let candidates = vec![
            (gpu::NAME, gpu::candidates(chip, problem, &layouts)),
            (cpu.name(), cpu.candidates(problem, &layouts)),
        ];
        Ok(Plan::choose(problem, candidates, &[], preference)?)
    }

    /// Choose among the kernels of these back ends, given in order of preference.
    ///
    /// ```
    /// use flashcore::{CpuBackend, InputLayouts, Plan, Preference, Problem};
    ///
    /// let problem = Problem::new(1, 8, 512, 64);
    /// let layouts = InputLayouts::contiguous(&problem)?;
    /// let cpu = CpuBackend::new();
    /// let plan = Plan::among(&[&cpu], &problem, &layouts, &Preference::default())?;
    /// assert_eq!(plan.chosen.full_name(), "cpu/blocked");
    /// # Ok::<(), flashcore::Error>(())
    /// ```
    pub fn among(
        backends: &[&dyn Backend],
        problem: &Problem,
        layouts: &InputLayouts,
        preference: &Preference,
    ) -> Result<Plan, Error> {
        problem.validate()?;
        let candidates = backends.iter().map(|it| (it.name(), it.candidates(problem, layouts)));
        Ok(Plan::choose(problem, candidates.collect(), &[], preference)?)
    }

    /// Choose among the kernels of back ends given in order of preference. The first accepted
    /// candidate that the caller's preference allows is taken.
    pub(crate) fn choose(
        problem: &Problem,
        backends: Vec<(&'static str, Vec<Candidate>)>,
        missing: &[Missing],
        preference: &Preference,
    ) -> Result<Plan, BackendError> {
        let (backend, kernel) = (preference.backend.as_deref(), preference.kernel.as_deref());
        if let Some(name) = backend
            && !backends.iter().any(|(backend, _)| *backend == name)
        {
            let absent = missing.iter().find(|missing| missing.backend == name);
            return Err(BackendError::Unavailable {
                backend: name.to_owned(),
                reason: absent.map_or_else(
                    || "no such back end exists".to_owned(),
                    |missing| missing.reason.clone(),
                ),
            });
        }
        let mut candidates: Vec<Candidate> =
            backends.into_iter().flat_map(|(_, candidates)| candidates).collect();
        let of_backend =
            |candidate: &Candidate| backend.is_none_or(|name| name == candidate.backend);
        let asked_for = |candidate: &Candidate| {
            let named = kernel.map(|name| name == candidate.kernel);
            of_backend(candidate) && named.unwrap_or(!candidate.on_request)
        };
        if let Some(kernel) = kernel
            && !candidates.iter().any(asked_for)
        {
            let known = names(candidates.iter().filter(|candidate| of_backend(candidate)));
            return Err(BackendError::UnknownKernel { kernel: kernel.to_owned(), known });
        }
        if !candidates.iter().any(|candidate| candidate.accepted && asked_for(candidate)) {
            return Err(refusal(&candidates, asked_for));
        }
        for candidate in &mut candidates {
            if !asked_for(candidate) {
                let reason = match candidate.on_request {
                    true => "only when asked for by name",
                    false => "not asked for",
                };
                candidate.accepted = false;
                candidate.reason = reason.to_owned();
            }
        }
        let chosen = candidates.iter().find(|candidate| candidate.accepted);
        let chosen = chosen.expect("one is accepted and asked for").clone();
        Ok(Plan { problem: problem.clone(), chosen, candidates, missing: missing.to_vec() })
    }

    /// Why the chosen kernel, and why nothing before it, in a line.
    pub fn reason(&self) -> String {
        let mut reason = self.chosen.reason.clone();
        for missing in &self.missing {
            reason += &format!("; no {}: {}", missing.backend, missing.reason);
        }
        let before = self.candidates.iter().take_while(|candidate| **candidate != self.chosen);
        for candidate in before {
            reason += &format!("; not {}: {}", candidate.full_name(), candidate.reason);
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
            write!(f, "\n  {}: {verdict}, {}", candidate.full_name(), candidate.reason)?;
        }
        Ok(())
    }
}

/// Why none of the kernels asked for can serve a problem, and which others can.
fn refusal(candidates: &[Candidate], asked_for: impl Fn(&Candidate) -> bool) -> BackendError {
    let (asked_for, others): (Vec<&Candidate>, Vec<&Candidate>) =
        candidates.iter().partition(|candidate| asked_for(candidate));
    let able: Vec<&Candidate> = others.into_iter().filter(|candidate| candidate.accepted).collect();
    if able.is_empty() {
        let reasons: Vec<String> = candidates
            .iter()
            .map(|candidate| format!("{} ({})", candidate.full_name(), candidate.reason))
            .collect();
        return BackendError::Unsupported { reasons: reasons.join(", ") };
    }
    let reasons: Vec<String> = asked_for
        .into_iter()
        .map(|candidate| {
            format!("{} cannot serve this problem: {}", candidate.full_name(), candidate.reason)
        })
        .collect();
    BackendError::Refused { reasons: reasons.join(", "), instead: names(able) }
}

fn names<'a>(candidates: impl IntoIterator<Item = &'a Candidate>) -> String {
    let names: Vec<String> = candidates.into_iter().map(Candidate::full_name).collect();
    names.join(", ")
}
