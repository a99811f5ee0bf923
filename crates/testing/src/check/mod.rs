//! Checks of kernels on a back end: run a case twice, compare the result with the reference and
//! both runs with each other.

mod append;
pub mod cases;
mod combine;
mod gradients;
mod invariance;
pub mod matrix;
mod ragged_gradients;
mod sequences;

use std::fmt;

use rayon::prelude::*;
use serde::Serialize;

use crate::reference::{self, Answer, Rows};
use crate::verdict::{Verdict, compare};
use flashcore::plan::Arrangement;
use flashcore::{Backend, Error, InputTensors, Output, Problem, Progress, RunOptions};

pub use append::{check_append, run_appends};
pub use cases::{Case, Contents, Order};
pub use combine::{check_combine, run_combines};
pub use gradients::{ExpectedGradients, GradientsOutcome, run_backward, run_gradients};
pub use invariance::{Invariance, on_backend, run_batches};
pub use ragged_gradients::RaggedGradients;
pub use sequences::{DIMS, ExpectedOfSequences, SequencesCase, run_sequences};

/// The outcome of a kernel on a [`Case`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// Whether the result is right and repeats.
    pub passed: bool,
    /// The errors of the result.
    pub verdict: Verdict,
    /// Whether a second run gave the same bits.
    pub repeats: bool,
    /// The number of NaNs in rows that were not compared, for inputs without NaN.
    pub holes: usize,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.verdict)?;
        if !self.repeats {
            f.write_str(", a second run gave other bits")?;
        }
        if self.holes > 0 {
            write!(f, ", {} values are NaN or were never written", self.holes)?;
        }
        Ok(())
    }
}

/// The number of floating-point operations of a case's reference beyond which only a sample of its
/// rows is compared: about a quarter of a second on one core.
const REFERENCE_OPERATIONS: f64 = 2.5e8;

/// A case with its tensors and its expected result.
#[derive(Debug)]
pub struct Expected<'a> {
    case: &'a Case,
    tensors: InputTensors,
    reference: Answer,
    baseline: Answer,
}

impl<'a> Expected<'a> {
    /// Creates the tensors and computes the reference.
    pub fn of(case: &'a Case) -> Result<Self, Error> {
        let problem = &case.problem;
        let tensors = case.tensors()?;
        let share = REFERENCE_OPERATIONS / problem.visible_flops().max(1.0);
        let rows = match share < 1.0 {
            true => Rows::sample(problem, (share * problem.rows() as f64) as usize, case.seed),
            false => Rows::all(problem),
        };
        let reference = reference::attention(problem, tensors.inputs(), &rows, None)?;
        let baseline = reference::baseline(problem, tensors.inputs(), &rows, None)?;
        Ok(Expected { case, tensors, reference, baseline })
    }

    /// Runs a kernel twice, with guard zones, and judges it.
    pub fn check(&self, backend: &dyn Backend, kernel: &str) -> Result<Outcome, Error> {
        let problem = &self.case.problem;
        let options =
            RunOptions { kernel: Some(kernel.to_owned()), guard: true, ..RunOptions::default() };
        let first = backend.run(problem, self.tensors.inputs(), &options)?;
        let second = backend.run(problem, self.tensors.inputs(), &options)?;
        let verdict = compare(problem, &first, &self.reference, &self.baseline)?;
        let repeats = same_bits(&first, &second);
        let sampled = verdict.rows < verdict.total_rows;
        let holes = if sampled && self.case.contents.is_finite() { holes(&first) } else { 0 };
        let passed = verdict.passed && repeats && holes == 0;
        Ok(Outcome { passed, verdict, repeats, holes })
    }
}

/// Runs one kernel of a back end on a case, twice, and judges it.
///
/// ```
/// use flashcore::{CpuBackend, DType};
/// use flashcore_testing::check;
///
/// let backend = CpuBackend::new();
/// for case in check::cases::standard(DType::F16).iter().take(3) {
///     let outcome = check::run(&backend, "blocked", case)?;
///     assert!(outcome.passed, "{case}: {outcome}");
/// }
/// # Ok::<(), flashcore::Error>(())
/// ```
pub fn run(backend: &dyn Backend, kernel: &str, case: &Case) -> Result<Outcome, Error> {
    Expected::of(case)?.check(backend, kernel)
}

/// The outcome of one kernel on one of many cases.
#[derive(Debug)]
pub struct Checked<O = Outcome> {
    /// A description of the case.
    pub case: String,
    /// The back end's name.
    pub backend: &'static str,
    /// The kernel's name.
    pub kernel: &'static str,
    /// The outcome, or why the kernel could not run.
    pub outcome: Result<O, Error>,
}

/// Returns the kernels of these back ends that accept a problem, the best first, or only the one with
/// this name.
pub fn accepting_kernels<'b>(
    backends: &[&'b dyn Backend],
    kernel: Option<&str>,
    problem: &Problem,
    arrangement: &Arrangement,
) -> Vec<(&'b dyn Backend, &'static str)> {
    let mut kernels = Vec::new();
    for backend in backends {
        for candidate in backend.candidates(problem, arrangement) {
            let asked_for = kernel.map_or(!candidate.on_request, |name| name == candidate.kernel);
            if candidate.accepted && asked_for {
                kernels.push((*backend, candidate.kernel));
            }
        }
    }
    kernels
}

/// Runs every kernel that accepts a case, or only the one with this name, for every case. The
/// reference takes all cores and is computed once for each case. Results are in the order of the
/// cases.
pub fn run_all(
    backends: &[&dyn Backend],
    kernel: Option<&str>,
    cases: &[Case],
    progress: &dyn Progress,
) -> Vec<Checked> {
    each(cases, progress, |case| check_case(backends, kernel, case))
}

/// Checks each case, or each seed, on all cores; results are in the order of the cases.
fn each<C, K, O>(
    cases: C,
    progress: &dyn Progress,
    check: impl Fn(C::Item) -> K + Sync,
) -> Vec<Checked<O>>
where
    C: IntoParallelIterator,
    K: IntoIterator<Item = Checked<O>>,
    O: Send,
{
    let cases = cases.into_par_iter();
    progress.begin(cases.opt_len().unwrap_or(0) as u64);
    let check = |case| {
        let checked = check(case);
        progress.advance(1);
        checked
    };
    cases.flat_map_iter(check).collect()
}

fn check_case(backends: &[&dyn Backend], kernel: Option<&str>, case: &Case) -> Vec<Checked> {
    let Ok(arrangement) = case.arrangement() else {
        return Vec::new();
    };
    let kernels = accepting_kernels(backends, kernel, &case.problem, &arrangement);
    check_kernels(case, kernels, || Expected::of(case), Expected::check)
}

/// Checks kernels on a case. What is expected is computed once, if there is a kernel.
fn check_kernels<E, O>(
    case: &impl fmt::Display,
    kernels: Vec<(&dyn Backend, &'static str)>,
    expected: impl Fn() -> Result<E, Error>,
    check: impl Fn(&E, &dyn Backend, &str) -> Result<O, Error>,
) -> Vec<Checked<O>> {
    let known = kernels.first().map(|_| expected());
    let check = |(backend, kernel): (&dyn Backend, &'static str)| {
        let outcome = match &known {
            Some(Ok(expected)) => check(expected, backend, kernel),
            // The error, for this kernel too.
            _ => expected().and_then(|expected| check(&expected, backend, kernel)),
        };
        Checked { case: case.to_string(), backend: backend.name(), kernel, outcome }
    };
    kernels.into_iter().map(check).collect()
}

fn same_bits(first: &Output, second: &Output) -> bool {
    let bits = |lse: &[f32]| lse.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    first.output.bytes() == second.output.bytes() && bits(&first.lse) == bits(&second.lse)
}

/// Counts the values that are NaN.
fn holes(result: &Output) -> usize {
    let values = result.output.to_f32();
    values.iter().chain(&result.lse).filter(|value| value.is_nan()).count()
}
