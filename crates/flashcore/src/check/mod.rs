//! Checking a kernel: run a case, compare with the reference, run it again.

pub mod cases;
pub mod ladder;

use std::fmt;

use serde::Serialize;

use crate::backend::{Backend, Output, RunOptions};
use crate::error::Error;
use crate::reference::{self, Rows};
use crate::verdict::{Verdict, compare};

pub use cases::{Case, Contents, Order};

/// How a kernel did on a [`Case`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// Whether it is right and repeats.
    pub passed: bool,
    /// Its errors.
    pub verdict: Verdict,
    /// Whether a second run gave the same bits.
    pub repeats: bool,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.verdict)?;
        if !self.repeats {
            f.write_str(", a second run gave other bits")?;
        }
        Ok(())
    }
}

/// Run one kernel of a back end on a case, twice, and judge it over every row.
///
/// ```
/// use flashcore::{CpuBackend, DType, check};
///
/// let backend = CpuBackend::new();
/// for case in check::cases::standard(DType::F16).iter().take(3) {
///     let outcome = check::run(&backend, "blocked", case)?;
///     assert!(outcome.passed, "{case}: {outcome}");
/// }
/// # Ok::<(), flashcore::Error>(())
/// ```
pub fn run(backend: &dyn Backend, kernel: &str, case: &Case) -> Result<Outcome, Error> {
    let problem = &case.problem;
    let tensors = case.tensors()?;
    let inputs = tensors.inputs();
    let options = RunOptions { kernel: Some(kernel.to_owned()), progress: None };
    let rows = Rows::all(problem);
    let reference = reference::attention(problem, inputs, &rows, None)?;
    let baseline = reference::baseline(problem, inputs, &rows, None)?;
    let first = backend.run(problem, inputs, &options)?;
    let second = backend.run(problem, inputs, &options)?;
    let verdict = compare(problem, &first, &reference, &baseline)?;
    let repeats = same_bits(&first, &second);
    Ok(Outcome { passed: verdict.passed && repeats, verdict, repeats })
}

fn same_bits(first: &Output, second: &Output) -> bool {
    let bits = |lse: &[f32]| lse.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    first.output.bytes() == second.output.bytes() && bits(&first.lse) == bits(&second.lse)
}
