//! Checking gradients: forward, backward, compare with the reference, backward again.

use std::fmt;

use serde::Serialize;

use super::{Case, REFERENCE_OPERATIONS};
use crate::reference::{self, Gradients, Heads};
use crate::verdict::{GradientsToJudge, GradientsVerdict, compare_gradients};
use flashcore::{Backend, Backward, Error, InputTensors, RunOptions, Tensor};

/// How a kernel did on the gradients of a [`Case`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GradientsOutcome {
    /// Whether it is right and repeats.
    pub passed: bool,
    /// Its errors.
    pub verdict: GradientsVerdict,
    /// Whether a second run gave the same bits: all of them, or on a GPU, where the gradient of the
    /// queries is added up in any order, those of the other gradients.
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

/// A case with its tensors, a gradient of its output, and with what the gradients should be.
///
/// ```
/// use flashcore::{CpuBackend, DType};
/// use flashcore_testing::check::{ExpectedGradients, cases};
///
/// for case in cases::standard(DType::F16).iter().take(3) {
///     let outcome = ExpectedGradients::of(case)?.check(&CpuBackend::new(), "backward")?;
///     assert!(outcome.passed, "{case}: {outcome}");
/// }
/// # Ok::<(), flashcore::Error>(())
/// ```
#[derive(Debug)]
pub struct ExpectedGradients<'a> {
    case: &'a Case,
    tensors: InputTensors,
    output_gradient: Tensor,
    reference: Gradients,
    baseline: Gradients,
}

impl<'a> ExpectedGradients<'a> {
    /// Makes the tensors and computes the reference: of all heads, or of a sample where that would
    /// take too long.
    pub fn of(case: &'a Case) -> Result<Self, Error> {
        let problem = &case.problem;
        let tensors = case.tensors()?;
        let gradient = Tensor::random(problem.dtypes.output, problem.output_shape(), !case.seed)?;
        let output_gradient = case.order.arrange(gradient)?;
        // Four products for rows and four for keys, where attention has two.
        let of_head = 4.0 * problem.visible_flops() / (problem.batch * problem.kv_heads) as f64;
        let count = (8.0 * REFERENCE_OPERATIONS / of_head.max(1.0)) as usize;
        let heads = Heads::sample(problem, count.max(1), case.seed);
        let inputs = tensors.inputs();
        let reference = reference::gradients(problem, inputs, &output_gradient, &heads, None)?;
        let baseline =
            reference::gradients_baseline(problem, inputs, &output_gradient, &heads, None)?;
        Ok(ExpectedGradients { case, tensors, output_gradient, reference, baseline })
    }

    /// Runs the back end's forward pass, a kernel for gradients twice, and judges it.
    pub fn check(&self, backend: &dyn Backend, kernel: &str) -> Result<GradientsOutcome, Error> {
        let (problem, inputs) = (&self.case.problem, self.tensors.inputs());
        let forward = backend.run(problem, inputs, &RunOptions::default())?;
        self.judge(backend, kernel, Backward::new(inputs, &forward, &self.output_gradient))
    }

    /// The same after the reference's forward pass, rounded: the kernel for gradients by itself.
    ///
    /// Where one key has almost all the weight of a row, its gradient is what is left of two
    /// numbers that cancel, and the last bit of an output is seen in it: another forward pass,
    /// right by its own rule, moves it by as much as the plain algorithm is wrong.
    pub fn check_alone(
        &self,
        backend: &dyn Backend,
        kernel: &str,
    ) -> Result<GradientsOutcome, Error> {
        let inputs = self.tensors.inputs();
        let (output, lse) = reference::saved(&self.case.problem, inputs)?;
        let output_gradient = &self.output_gradient;
        let backward = Backward { inputs, output: &output, lse: &lse, output_gradient };
        self.judge(backend, kernel, backward)
    }

    fn judge(
        &self,
        backend: &dyn Backend,
        kernel: &str,
        backward: Backward<'_>,
    ) -> Result<GradientsOutcome, Error> {
        let (problem, inputs) = (&self.case.problem, self.tensors.inputs());
        let options =
            RunOptions { kernel: Some(kernel.to_owned()), guard: true, ..RunOptions::default() };
        let first = backend.run_backward(problem, backward, &options)?;
        let second = backend.run_backward(problem, backward, &options)?;
        let found = GradientsToJudge {
            query: Some(&first.query),
            key: Some(&first.key),
            value: Some(&first.value),
            sinks: first.sinks.as_deref(),
            delta: None,
        };
        let verdict = compare_gradients(problem, inputs, found, &self.reference, &self.baseline)?;
        let repeats = same_bits(&first, &second)
            && (backend.name() == "gpu" || first.query.bytes() == second.query.bytes());
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
