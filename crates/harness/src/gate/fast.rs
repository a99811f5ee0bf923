//! The gate's `fast` step: is a kernel fast enough, by a clock that is not its own?
//!
//! Every timed call is one logical call on contents that were never in memory before, into poisoned
//! outputs, between events that the gate records. Every output is checked for unwritten values, and
//! one, chosen at random, is judged completely. Then the same contents are timed again, and zeros,
//! and ones: a kernel that is much faster on those did not do the work.

use std::time::Instant;

use flashcore::gpu::Chip;
use flashcore::{DType, InputTensors, Layout, Problem, Shape, Tensor};

use super::correct::{CallMemory, Contract, judge};
use super::{Outcome, Rejection, Rule, failed};
use crate::auxiliary_inputs::AuxiliaryInputs;
use crate::bench::Candidate;
use crate::statistics::{Difference, Random, median};
use crate::subject::Subject;
use crate::verify::{POISON, inputs};

/// The requirements on a kernel's speed.
#[derive(Debug, Clone, PartialEq)]
pub struct SpeedRequirement {
    /// The problem that is timed.
    pub problem: Problem,
    /// The number of samples of the kernel and of the baseline.
    pub rounds: usize,
    /// The least speed, as a share of the baseline's.
    pub at_least: f64,
    /// The peak of the hardware in TFLOP/s, if it is known.
    pub peak_tflops: Option<f64>,
}

impl SpeedRequirement {
    /// Rejects milliseconds in which the hardware cannot do the operations of visible scores.
    pub(super) fn check_roofline(
        &self,
        visible_flops: f64,
        milliseconds: f64,
    ) -> Result<(), Rejection> {
        let speed = visible_flops / milliseconds / 1e9;
        match self.peak_tflops.filter(|peak| speed > *peak) {
            None => Ok(()),
            Some(peak) => {
                let reason = format!("{speed:.0} TFLOP/s, and the hardware has {peak:.0}");
                Err((Rule::AboveRoofline, reason))
            }
        }
    }

    /// Compares a kernel's samples with those of the baseline, and says how fast it is by the
    /// published count of operations.
    pub(super) fn compare(
        &self,
        own: &[f64],
        others: &[f64],
        baseline: &str,
        flops: f64,
    ) -> Result<String, Rejection> {
        let Difference { ratio, noise } = Difference::between(own, others);
        let text = format!(
            "{ratio:.3} times the speed of {baseline}, within {:.1} %: {:.0} TFLOP/s on {}",
            100.0 * noise,
            flops / median(own) / 1e9,
            self.problem
        );
        match ratio < self.at_least && (self.at_least / ratio).ln() > noise {
            true => Err((Rule::Slow, format!("{text}; {:.3} is asked", self.at_least))),
            false => Ok(text),
        }
    }
}

/// The least time of a call on contents seen before, as a share of the time on new ones. Caches are
/// flushed, so there is no honest reason to be faster at all.
const SEEN: f64 = 0.7;
/// The least time of a call on zeros or ones, as a share of the time on random numbers: constant
/// data saves power, and power limits the clock.
const CONSTANT: f64 = 0.6;
/// Milliseconds that the device may be busy after the second event, besides the call's own time:
/// copies of the results are still under way.
const BUSY: f64 = 20.0;

/// Returns the candidate that a kernel must be as fast as where nobody names another: the scalar
/// kernel if it serves the problem, otherwise what the planner chooses.
pub fn default_baseline(chip: &Chip, problem: &Problem) -> Candidate {
    let find = |name| Candidate::parse(name).expect("it is always there");
    let scalar = find("scalar");
    match scalar.plan(chip, problem) {
        Ok(_) => scalar,
        Err(_) => find("flashcore"),
    }
}

/// Times a kernel against a baseline, in alternation.
pub fn fast(
    subject: &mut dyn Subject,
    baseline: &mut dyn Subject,
    contract: &Contract,
    requirement: &SpeedRequirement,
    salt: u64,
) -> Outcome {
    time(subject, baseline, contract, requirement, salt).into()
}

/// The kernel or the baseline, ready to be timed.
struct Runner<'a> {
    subject: &'a mut dyn Subject,
    memory: CallMemory,
    /// The number of output values that belong to no sequence and are not written.
    unused: usize,
}

impl<'a> Runner<'a> {
    fn new(
        subject: &'a mut dyn Subject,
        problem: &Problem,
        auxiliary: &AuxiliaryInputs,
    ) -> Result<Self, Rejection> {
        subject.prepare(problem).map_err(failed)?;
        let memory = CallMemory::new(subject, problem).map_err(failed)?;
        let unused = auxiliary.unused_rows(problem) * problem.value_head_dim;
        Ok(Runner { subject, memory, unused })
    }

    /// Returns the milliseconds of one call, on new contents if some are given, and what it wrote.
    fn sample(
        &mut self,
        problem: &Problem,
        contents: Option<[&[u8]; 3]>,
    ) -> Result<(f64, [Vec<u8>; 2]), Rejection> {
        let Runner { subject, memory, unused } = self;
        if let Some(contents) = contents {
            memory.write(*subject, contents).map_err(failed)?;
        }
        memory.poison(*subject).map_err(failed)?;
        subject.settle().map_err(failed)?;
        subject.flush().map_err(failed)?;
        subject.mark(0).map_err(failed)?;
        subject.call(&memory.tensors).map_err(failed)?;
        subject.mark(1).map_err(failed)?;
        memory.shadow(*subject).map_err(failed)?;
        let milliseconds = subject.elapsed().map_err(failed)?;
        let over = Instant::now();
        subject.settle().map_err(failed)?;
        let busy = over.elapsed().as_secs_f64() * 1e3;
        let results = memory.results(*subject, problem)?;
        if busy > BUSY + milliseconds {
            return Err((
                Rule::Outlives,
                format!(
                    "{busy:.0} ms of work after a call that took {milliseconds:.3} ms by its marks"
                ),
            ));
        }
        let element = problem.dtypes.output.bytes();
        let unwritten = |bytes: &[u8]| {
            let poison = |element: &&[u8]| element.iter().all(|byte| *byte == POISON);
            bytes.chunks_exact(element).filter(poison).count()
        };
        let holes = unwritten(&results[0]).saturating_sub(*unused);
        if holes > 0 {
            let of = results[0].len() / element;
            let reason = format!("a timed call left {holes} of {of} values unwritten");
            return Err((Rule::Unwritten, reason));
        }
        Ok((milliseconds, results))
    }
}

fn time(
    subject: &mut dyn Subject,
    baseline: &mut dyn Subject,
    contract: &Contract,
    requirement: &SpeedRequirement,
    salt: u64,
) -> Result<String, Rejection> {
    let problem = &requirement.problem;
    let other = baseline.name();
    let mut random = Random::new(salt);
    let library = |error: flashcore::Error| failed(error.into());
    let base = InputTensors::random(problem, salt).map_err(library)?;
    let auxiliary = AuxiliaryInputs::of(problem).map_err(failed)?;
    let mut runner = Runner::new(subject, problem, &auxiliary)?;
    let mut rival = Runner::new(baseline, problem, &auxiliary)?;
    let (mut own, mut others) = (Vec::new(), Vec::new());
    let rounds = requirement.rounds.max(3);
    let judged = random.below(rounds);
    let warm_up = 1;
    for round in 0..warm_up + rounds {
        let contents = turned(&base, &mut random);
        let views = contents.each_ref().map(Vec::as_slice);
        let mut results = None;
        for place in 0..2 {
            let is_subject = (place + round) % 2 == 0;
            let who = if is_subject { &mut runner } else { &mut rival };
            let sampled = who.sample(problem, Some(views));
            let (milliseconds, written) = match (sampled, is_subject) {
                (Ok(sampled), _) => sampled,
                (Err(broken), true) => return Err(broken),
                (Err((_, reason)), false) => {
                    return Err((Rule::Failed, format!("the baseline {other} itself: {reason}")));
                }
            };
            if round >= warm_up {
                if is_subject { &mut own } else { &mut others }.push(milliseconds);
            }
            if is_subject {
                results = Some(written);
            }
        }
        if round == warm_up + judged
            && let Some(results) = results
        {
            let tensors = inputs(problem, views).map_err(failed)?;
            judge(contract, problem, &tensors, &results, salt, None)?;
        }
    }
    let usual = median(&own);
    let visible_flops = auxiliary.flops(problem, Problem::visible_flops);
    requirement.check_roofline(visible_flops, usual)?;
    let mut median_on = |contents: Option<[&[u8]; 3]>| -> Result<f64, Rejection> {
        let mut samples = Vec::new();
        for index in 0..4 {
            let (milliseconds, _) = runner.sample(problem, contents)?;
            // The first call sees new contents; later ones have seen them.
            if index > 0 {
                samples.push(milliseconds);
            }
        }
        Ok(median(&samples))
    };
    let seen = median_on(None)?;
    if seen < SEEN * usual {
        let reason =
            format!("{seen:.4} ms on contents that it has seen, {usual:.4} ms on new ones");
        return Err((Rule::RemembersContents, reason));
    }
    for value in [0.0, 1.0] {
        let constant = |dtype: DType, shape: Shape| {
            let tensor =
                Layout::contiguous(shape).and_then(|layout| Tensor::filled(dtype, layout, value));
            tensor.map_err(|error| library(error.into()))
        };
        let types = problem.dtypes;
        let query = constant(types.query, problem.query_shape())?;
        let key = constant(types.key, problem.key_shape())?;
        let values = constant(types.value, problem.value_shape())?;
        let time = median_on(Some([query.bytes(), key.bytes(), values.bytes()]))?;
        if time < CONSTANT * usual {
            let reason = format!("{time:.4} ms where all inputs are {value}, else {usual:.4} ms");
            return Err((Rule::SkipsConstants, reason));
        }
    }
    requirement.compare(&own, &others, &other, auxiliary.flops(problem, Problem::flops))
}

/// Rotates the contents of tensors: contents that were never there, without drawing every number
/// anew.
fn turned(base: &InputTensors, random: &mut Random) -> [Vec<u8>; 3] {
    [&base.query, &base.key, &base.value].map(|tensor| {
        let mut turned = tensor.bytes().to_vec();
        let element = tensor.dtype().bytes();
        let elements = turned.len() / element;
        turned.rotate_left(element * random.below(elements));
        turned
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The default baseline of every kernel that ships serves the problem that is timed.
    #[test]
    fn every_kernel_has_a_baseline() {
        let mut names = std::collections::BTreeSet::new();
        for kernel in kernels::shipped(ptx::Target::SM_90A) {
            let Some(contract) = Contract::of(&kernel) else { continue };
            let problem = contract.timed();
            let baseline = default_baseline(&Chip::H200, &problem);
            let plan = baseline.plan(&Chip::H200, &problem);
            plan.unwrap_or_else(|reason| panic!("{}, {problem}: {reason}", kernel.name()));
            names.insert(baseline.name);
        }
        assert_eq!(names.into_iter().collect::<Vec<_>>(), ["flashcore", "scalar"]);
        let of = |text: &str| default_baseline(&Chip::H200, &text.parse().unwrap()).name;
        assert_eq!(of("h=16,s=4096,d=128,bf16"), "scalar");
        assert_eq!(of("h=16,s=4096,d=128,e4m3"), "flashcore");
        assert_eq!(of("b=4,h=16,s=1024,d=128,bf16,queries=packed:2048"), "flashcore");
        assert_eq!(of("h=16,s=4096,d=128,bf16,backward"), "flashcore");
    }
}
