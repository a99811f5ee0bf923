//! Checks of gradients: run the forward pass, run the backward pass twice, compare with the
//! reference.

use std::fmt;

use serde::Serialize;

use super::{Case, Checked, REFERENCE_OPERATIONS};
use crate::reference::{self, Gradients, Heads, ResultGradients};
use crate::verdict::{GradientsToJudge, GradientsVerdict, compare_gradients};
use flashcore::plan::{Arrangement, GradientStrides};
use flashcore::{Backend, Backward, Error, Inputs, Problem, Progress, RunOptions, Tensor};

/// The outcome of a kernel on the gradients of a [`Case`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GradientsOutcome {
    /// Whether the gradients are right and repeat.
    pub passed: bool,
    /// The errors of the gradients.
    pub verdict: GradientsVerdict,
    /// Whether a second run gave the same bits. On a GPU, dQ is exempt unless the problem is
    /// deterministic, since it is accumulated in any order.
    pub repeats: bool,
}

impl fmt::Display for GradientsOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.verdict)?;
        match self.repeats {
            true => Ok(()),
            false => f.write_str(", a second run gave other bits"),
        }
    }
}

/// Inputs, a gradient of their output, and the expected gradients of the inputs.
///
/// ```
/// use flashcore::{CpuBackend, InputTensors, Problem};
/// use flashcore_testing::check::ExpectedGradients;
///
/// let problem = Problem::new(1, 2, 50, 16);
/// let tensors = InputTensors::random(&problem, 0)?;
/// let expected = ExpectedGradients::random(&problem, tensors.inputs(), 1)?;
/// let outcome = expected.check(&CpuBackend::new(), "backward")?;
/// assert!(outcome.passed, "{outcome}");
/// # Ok::<(), flashcore::Error>(())
/// ```
#[derive(Debug)]
pub struct ExpectedGradients<'a> {
    /// The backward problem.
    problem: Problem,
    inputs: Inputs<'a>,
    output_gradient: Tensor,
    /// The gradient of the log-sum-exps, if the problem has one.
    lse_gradient: Option<Vec<f32>>,
    heads: Heads,
    reference: Gradients,
}

impl<'a> ExpectedGradients<'a> {
    /// Computes the reference, for all heads, or for a sample where that would take too long. A
    /// gradient of the log-sum-exps is random.
    pub fn new(
        problem: &Problem,
        inputs: Inputs<'a>,
        output_gradient: Tensor,
        seed: u64,
    ) -> Result<Self, Error> {
        let forward = problem.clone().forward();
        // The reference computes four products for rows and four for keys, where attention has two.
        let of_head = 4.0 * forward.visible_flops() / (problem.batch * problem.kv_heads) as f64;
        let count = (8.0 * REFERENCE_OPERATIONS / of_head.max(1.0)) as usize;
        let heads = Heads::sample(problem, count.max(1), seed);
        let lse_gradient = ResultGradients::random_lse(problem, seed)?;
        let output = output_gradient.view();
        let results = ResultGradients { output, lse: lse_gradient.as_deref() };
        let reference = reference::gradients(problem, inputs, results, &heads, None)?;
        let problem = problem.clone().backward();
        Ok(ExpectedGradients { problem, inputs, output_gradient, lse_gradient, heads, reference })
    }

    /// Computes the reference with a random gradient of the output.
    pub fn random(problem: &Problem, inputs: Inputs<'a>, seed: u64) -> Result<Self, Error> {
        let gradient = Tensor::random(problem.dtypes.output, problem.output_shape(), !seed)?;
        ExpectedGradients::new(problem, inputs, gradient, seed)
    }

    /// Runs the forward pass of the back end, then a kernel for gradients twice, with guard zones,
    /// and judges it.
    pub fn check(&self, backend: &dyn Backend, kernel: &str) -> Result<GradientsOutcome, Error> {
        let options =
            RunOptions { kernel: Some(kernel.to_owned()), guard: true, ..RunOptions::default() };
        self.judge(backend, |backward| backend.run_backward(&self.problem, backward, &options))
    }

    /// Runs the forward pass of the back end, then `run` twice on what it saved, and judges the
    /// gradients.
    pub fn judge(
        &self,
        backend: &dyn Backend,
        run: impl Fn(Backward<'_>) -> Result<flashcore::Gradients, Error>,
    ) -> Result<GradientsOutcome, Error> {
        let ExpectedGradients { problem, inputs, output_gradient, heads, reference, .. } = self;
        let lse_gradient = self.lse_gradient.as_deref();
        let forward = backend.run(&problem.clone().forward(), *inputs, &RunOptions::default())?;
        let backward = Backward::new(*inputs, &forward, output_gradient);
        let backward = Backward { lse_gradient, ..backward };
        let (first, second) = (run(backward)?, run(backward)?);
        let found = GradientsToJudge {
            query: Some(&first.query),
            key: Some(&first.key),
            value: Some(&first.value),
            sinks: first.sinks.as_deref(),
            delta: None,
        };
        let baseline = reference::gradients_baseline(problem, backward, heads, None)?;
        let verdict = compare_gradients(problem, *inputs, found, reference, &baseline)?;
        let in_any_order = backend.name() == "gpu" && !problem.deterministic;
        let repeats = same_bits(&first, &second)
            && (in_any_order || first.query.bytes() == second.query.bytes());
        Ok(GradientsOutcome { passed: verdict.passed && repeats, verdict, repeats })
    }
}

fn same_bits(first: &flashcore::Gradients, second: &flashcore::Gradients) -> bool {
    let bits = |gradients: &flashcore::Gradients| -> Option<Vec<u32>> {
        Some(gradients.sinks.as_ref()?.iter().map(|value| value.to_bits()).collect())
    };
    first.key.bytes() == second.key.bytes()
        && first.value.bytes() == second.value.bytes()
        && bits(first) == bits(second)
}

/// Runs one kernel for gradients of a back end on a case, and judges it.
///
/// ```
/// use flashcore::{CpuBackend, DType};
/// use flashcore_testing::check::{self, cases};
///
/// for case in cases::gradients(DType::F16).iter().take(3) {
///     let outcome = check::run_backward(&CpuBackend::new(), "backward", case)?;
///     assert!(outcome.passed, "{case}: {outcome}");
/// }
/// # Ok::<(), flashcore::Error>(())
/// ```
pub fn run_backward(
    backend: &dyn Backend,
    kernel: &str,
    case: &Case,
) -> Result<GradientsOutcome, Error> {
    expecting(case, |expected| expected.check(backend, kernel))
}

/// Creates the tensors of a case and the expected gradients, and passes them to `look`.
fn expecting<T>(
    case: &Case,
    look: impl FnOnce(&ExpectedGradients<'_>) -> Result<T, Error>,
) -> Result<T, Error> {
    let problem = &case.problem;
    let tensors = case.tensors()?;
    let gradient = Tensor::random(problem.dtypes.output, problem.output_shape(), !case.seed)?;
    let gradient = case.order.arrange(gradient)?;
    look(&ExpectedGradients::new(problem, tensors.inputs(), gradient, case.seed)?)
}

/// Runs every kernel for gradients that accepts a case, or only the one with this name, for every
/// case. Results are in the order of the cases.
pub fn run_gradients(
    backends: &[&dyn Backend],
    kernel: Option<&str>,
    cases: &[Case],
    progress: &dyn Progress,
) -> Vec<Checked<GradientsOutcome>> {
    super::each(cases, progress, |case| check_case(backends, kernel, case))
}

fn check_case(
    backends: &[&dyn Backend],
    kernel: Option<&str>,
    case: &Case,
) -> Vec<Checked<GradientsOutcome>> {
    let Ok(arrangement) = arrangement(case) else {
        return Vec::new();
    };
    let problem = case.problem.clone().backward();
    let kernels = super::accepting_kernels(backends, kernel, &problem, &arrangement);
    if kernels.is_empty() {
        return Vec::new();
    }
    let outcomes = expecting(case, |expected| {
        Ok(kernels.iter().map(|(backend, kernel)| expected.check(*backend, kernel)).collect())
    });
    let outcomes: Vec<Result<GradientsOutcome, Error>> = match outcomes {
        Ok(outcomes) => outcomes,
        Err(error) => vec![Err(error)],
    };
    let checked = kernels.into_iter().zip(outcomes);
    let of = |((backend, kernel), outcome): ((&dyn Backend, &'static str), _)| Checked {
        case: case.to_string(),
        backend: backend.name(),
        kernel,
        outcome,
    };
    checked.map(of).collect()
}

/// Returns the strides and alignment that the tensors of a case will have, including the gradient
/// of the output.
pub(super) fn arrangement(case: &Case) -> Result<Arrangement, Error> {
    let problem = case.problem.clone().backward();
    let output = case.order.layout(problem.output_shape())?.strides();
    let plain = Case { problem, ..case.clone() }.arrangement()?;
    let gradients = plain.gradients.map(|it| GradientStrides { output, ..it });
    Ok(Arrangement { gradients, ..plain })
}
