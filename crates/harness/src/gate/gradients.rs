//! The gate's steps for backward kernels: right on the device, and fast enough. These kernels are
//! always ours, so cheating is not tested: outputs are poisoned and guarded, inputs must be
//! unchanged, and dK and dV must repeat bit for bit.

use std::sync::Arc;

use flashcore::gpu::Gpu;
use flashcore::{Backend, GpuBackend, Problem, RunOptions};
use kernels::Configuration;
use testing::check::ExpectedGradients;

use super::{Contract, Outcome, Rejection, Rule, SpeedRequirement, failed};
use crate::bench::Candidate;
use crate::profile::CallTimer;
use crate::statistics::median;
use crate::{Error, open_gpu};

/// Runs every case of a contract. `salt` makes the contents new from run to run.
pub fn correct_gradients(kernel: &Configuration, contract: &Contract, salt: u64) -> Outcome {
    run(kernel, contract, salt).into()
}

fn run(kernel: &Configuration, contract: &Contract, salt: u64) -> Result<String, Rejection> {
    let gpu = open_gpu().map_err(|error| failed(error.into()))?;
    let chip = gpu.chip();
    let backend = GpuBackend::new(Arc::new(gpu));
    let options = RunOptions { guard: true, ..RunOptions::default() };
    let cases = contract.cases();
    let mut used = 0f64;
    for case in &cases {
        let case = case.clone().with_seed(case.seed ^ salt);
        let library = |error: flashcore::Error| failed(error.into());
        let plan = Candidate::of(*kernel).plan(&chip, &case.problem);
        let (plan, _) = plan.map_err(|reason| failed(Error::Impossible(reason)))?;
        let tensors = case.tensors().map_err(library)?;
        let expected = ExpectedGradients::random(&case.problem, tensors.inputs(), case.seed);
        let judged = expected.and_then(|expected| {
            expected.judge(&backend, |backward| backend.execute_backward(&plan, backward, &options))
        });
        let outcome = judged.map_err(library)?;
        if !outcome.passed {
            let rule = if outcome.repeats { Rule::Wrong } else { Rule::Unrepeatable };
            return Err((rule, format!("{case}: {outcome}")));
        }
        for (_, it) in &outcome.verdict.comparisons {
            used = used.max(it.tolerance_used());
        }
    }
    Ok(format!(
        "{} problems, gradients poisoned and guarded, inputs unchanged, those of keys and values repeat \
         bit for bit, {:.0} % of the tolerance used",
        cases.len(),
        100.0 * used
    ))
}

/// Times a kernel for gradients against a baseline, in alternation.
pub fn fast_gradients(
    gpu: &Gpu,
    kernel: &Candidate,
    baseline: &Candidate,
    requirement: &SpeedRequirement,
) -> Outcome {
    time(gpu, kernel, baseline, requirement).into()
}

fn time(
    gpu: &Gpu,
    kernel: &Candidate,
    baseline: &Candidate,
    requirement: &SpeedRequirement,
) -> Result<String, Rejection> {
    let problem = &requirement.problem;
    let timer = CallTimer::new(gpu, problem).map_err(failed)?;
    let mut both = [
        kernel.ready(gpu, problem).map_err(failed)?,
        baseline.ready(gpu, problem).map_err(failed)?,
    ];
    let mut samples = [Vec::new(), Vec::new()];
    let warm_up = 1;
    for round in 0..warm_up + requirement.rounds.max(3) {
        for place in 0..2 {
            let index = (place + round) % 2;
            let milliseconds = timer.sample(gpu, &mut both[index]).map_err(failed)?;
            if round >= warm_up {
                samples[index].push(milliseconds);
            }
        }
    }
    let [own, others] = &samples;
    requirement.check_roofline(problem.visible_flops(), median(own))?;
    requirement.compare(own, others, &baseline.name, problem.flops())
}

/// Launches one call on random tensors and nothing else, for profilers.
pub fn once_gradients(gpu: &Gpu, kernel: &Candidate, problem: &Problem) -> Result<(), Error> {
    let timer = CallTimer::new(gpu, problem)?;
    timer.sample(gpu, &mut kernel.ready(gpu, problem)?).map(|_| ())
}
