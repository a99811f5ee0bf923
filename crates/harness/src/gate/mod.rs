//! The gate: accept or reject a kernel, with the reason.
//!
//! | step | what it asks | where |
//! | --- | --- | --- |
//! | validate | is the program, or the PTX with its description, in order? | anywhere |
//! | assemble | registers, spills, stack frames, notes of slow code | with `ptxas`, or the driver |
//! | simulate | right and without hazards under hostile schedules; bank conflicts | anywhere |
//! | correct | right on the device: fresh inputs, poisoned outputs, guard zones, unchanged inputs | on a GPU |
//! | fast | fast enough against a stated baseline, by a clock that is not the kernel's | on a GPU |
//! | counters | what the hardware counted | with Nsight Compute |
//!
//! A step accepts, rejects or is skipped, always with the reason. The first rejection ends it.
//! How a kernel could cheat, and which rule finds it, is the subject of `tests/cheats.rs`.

mod correct;
mod counters;
mod fast;
pub mod foreign;
mod gradients;
mod without_gpu;

pub use correct::{Contract, ServedStorage, correct};
pub use counters::{METRICS, Threshold, Thresholds, counters, ncu_command};
pub use fast::{SpeedRequirement, default_baseline, fast};
pub use foreign::ForeignKernel;
pub use gradients::{correct_gradients, fast_gradients, once_gradients};
pub use without_gpu::{OwnKernel, assemble, simulate, validate};

use std::fmt;

use serde::Serialize;

/// One question to a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Step {
    /// Is it in order?
    Validate,
    /// What does it cost?
    Assemble,
    /// Is it right under every schedule?
    Simulate,
    /// Is it right on the device?
    Correct,
    /// Is it fast enough?
    Fast,
    /// What does the hardware count?
    Counters,
}

impl Step {
    /// Every step, in order.
    pub const ALL: [Step; 6] =
        [Step::Validate, Step::Assemble, Step::Simulate, Step::Correct, Step::Fast, Step::Counters];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Step::Validate => "validate",
            Step::Assemble => "assemble",
            Step::Simulate => "simulate",
            Step::Correct => "correct",
            Step::Fast => "fast",
            Step::Counters => "counters",
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a step says.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "outcome", rename_all = "lowercase")]
pub enum Outcome {
    /// Nothing is wrong.
    Accept {
        /// What was found.
        found: String,
    },
    /// Something is wrong.
    Reject {
        /// Which rule it breaks.
        rule: Rule,
        /// How.
        reason: String,
    },
    /// It could not be asked.
    Skip {
        /// Why.
        reason: String,
    },
}

/// The rules that a kernel can break.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// The program or its description is not in order.
    Invalid,
    /// A block asks for more shared memory than there is.
    SharedMemory,
    /// The assembler refuses it.
    Refused,
    /// Registers spill, there is a stack frame, or tensor-core code is serialised.
    SlowCode,
    /// The simulator found a hazard.
    Hazard,
    /// More bank conflicts than allowed.
    BankConflicts,
    /// A value is further from the reference than the rule allows.
    Wrong,
    /// A part of the output was never written.
    Unwritten,
    /// The output was written, or changed, after the call was over.
    Late,
    /// Memory beside the output was written.
    Trespass,
    /// An input was written.
    InputChanged,
    /// A second run of the same call gave other bits.
    Unrepeatable,
    /// New contents in the same memory gave the old result.
    Remembered,
    /// Contents that it has seen are served faster.
    RemembersContents,
    /// Zeros or constants are served faster.
    SkipsConstants,
    /// The device was still busy when the call was over by its own marks.
    Outlives,
    /// Faster than the hardware can be.
    AboveRoofline,
    /// Slower than the baseline allows.
    Slow,
    /// A counter is outside of its bounds.
    Counter,
    /// It failed to run.
    Failed,
}

/// A step and what it says.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// The step.
    pub step: Step,
    /// What it says.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// Everything that was found about a kernel.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Judgement {
    /// The kernel.
    pub kernel: String,
    /// Whether some step accepted it and none rejected it.
    pub accepted: bool,
    /// The steps in order, up to the first rejection.
    pub findings: Vec<Finding>,
}

impl Judgement {
    /// Asks one step after the other until one rejects.
    pub fn of<'a>(
        kernel: &str,
        steps: impl IntoIterator<Item = (Step, Box<dyn FnOnce() -> Outcome + 'a>)>,
    ) -> Self {
        let mut findings = Vec::new();
        for (step, ask) in steps {
            let outcome = ask();
            let rejected = matches!(outcome, Outcome::Reject { .. });
            findings.push(Finding { step, outcome });
            if rejected {
                break;
            }
        }
        let says = |is: fn(&Outcome) -> bool| findings.iter().any(|it| is(&it.outcome));
        let accepted = says(|it| matches!(it, Outcome::Accept { .. }))
            && !says(|it| matches!(it, Outcome::Reject { .. }));
        Judgement { kernel: kernel.to_owned(), accepted, findings }
    }

    /// The rule that it broke, if it did.
    pub fn broken(&self) -> Option<Rule> {
        self.findings.iter().find_map(|it| match it.outcome {
            Outcome::Reject { rule, .. } => Some(rule),
            _ => None,
        })
    }
}

impl Outcome {
    fn accept(found: impl Into<String>) -> Self {
        Outcome::Accept { found: found.into() }
    }

    fn reject(rule: Rule, reason: impl Into<String>) -> Self {
        Outcome::Reject { rule, reason: reason.into() }
    }

    /// It could not be asked, because of this.
    pub fn skip(reason: impl Into<String>) -> Self {
        Outcome::Skip { reason: reason.into() }
    }
}

/// A rejection on its way out of a step.
type Rejection = (Rule, String);

impl From<Result<String, Rejection>> for Outcome {
    fn from(result: Result<String, Rejection>) -> Self {
        match result {
            Ok(found) => Outcome::accept(found),
            Err((rule, reason)) => Outcome::reject(rule, reason),
        }
    }
}

/// A failure to run is a rejection: what cannot be run cannot be accepted.
fn failed(error: crate::Error) -> Rejection {
    (Rule::Failed, error.to_string())
}
