//! The interface of back ends: whatever can compute a [`Problem`].
//!
//! Each back end lists its kernels as [`Candidate`]s for a problem and runs the one that a
//! [`Plan`] chose, so that one test body and one command line serve all of them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Serialize, Serializer};

use crate::error::Error;
use crate::gradients::{Backward, Gradients};
use crate::inputs::Inputs;
use crate::plan::{Arrangement, Candidate, Plan, Preference};
use crate::problem::{Pass, Problem};
use crate::tensor::Tensor;

/// A back end: hardware and kernels that compute attention.
///
/// ```
/// use flashcore::{Backend, CpuBackend, Inputs, Problem, RunOptions, Tensor};
///
/// let problem = Problem::new(1, 2, 33, 16);
/// let query = Tensor::random(problem.dtype(), problem.query_shape(), 0)?;
/// let key = Tensor::random(problem.dtype(), problem.key_shape(), 1)?;
/// let value = Tensor::random(problem.dtype(), problem.value_shape(), 2)?;
/// let inputs = Inputs::new(&query, &key, &value);
///
/// let result = CpuBackend::new().run(&problem, inputs, &RunOptions::default())?;
/// assert_eq!(result.output.shape(), problem.output_shape());
/// println!("{} took {:?}", result.report.kernel, result.report.kernel_time);
/// # Ok::<(), flashcore::Error>(())
/// ```
pub trait Backend: Send + Sync {
    /// Returns a short name, unique among back ends: `cpu`.
    fn name(&self) -> &'static str;

    /// Describes the hardware in one line.
    fn describe(&self) -> String;

    /// Returns every kernel of this back end, best for this problem first, each accepted or refused
    /// with a reason.
    fn candidates(&self, problem: &Problem, arrangement: &Arrangement) -> Vec<Candidate>;

    /// Runs the kernel of this back end that a plan chose. Problem and inputs are already
    /// validated.
    ///
    /// The output has the shape of the query tensor with the value head dim; rows that belong to no
    /// sequence are undefined. The log-sum-exp is in the order (batch, heads, length) of the query
    /// tensor.
    fn execute(
        &self,
        plan: &Plan,
        inputs: Inputs<'_>,
        options: &RunOptions<'_>,
    ) -> Result<Output, Error>;

    /// Computes gradients with the kernel that a plan of the backward pass chose. Problem and
    /// tensors are already validated.
    fn execute_backward(
        &self,
        _: &Plan,
        _: Backward<'_>,
        _: &RunOptions<'_>,
    ) -> Result<Gradients, Error> {
        let reasons = format!("the {} back end has no backward pass", self.name());
        Err(BackendError::Unsupported { reasons }.into())
    }

    /// Validates, chooses among the kernels of this back end and runs. Invalid arguments never
    /// panic.
    fn run(
        &self,
        problem: &Problem,
        inputs: Inputs<'_>,
        options: &RunOptions<'_>,
    ) -> Result<Output, Error> {
        expect_pass(problem, Pass::Forward)?;
        problem.validate()?;
        inputs.validate(problem)?;
        let preference = Preference { backend: None, kernel: options.kernel.clone() };
        let candidates = self.candidates(problem, &inputs.arrangement(problem)?);
        let plan = Plan::choose(problem, vec![(self.name(), candidates)], &[], &preference)?;
        self.execute(&plan, inputs, options)
    }

    /// Validates, chooses among the backward kernels of this back end and runs. Invalid arguments
    /// never panic.
    fn run_backward(
        &self,
        problem: &Problem,
        backward: Backward<'_>,
        options: &RunOptions<'_>,
    ) -> Result<Gradients, Error> {
        let problem = &problem.clone().backward();
        problem.validate()?;
        backward.validate(problem)?;
        let preference = Preference { backend: None, kernel: options.kernel.clone() };
        let candidates = self.candidates(problem, &backward.arrangement(problem)?);
        let plan = Plan::choose(problem, vec![(self.name(), candidates)], &[], &preference)?;
        self.execute_backward(&plan, backward, options)
    }
}

/// Refuses a backward problem where an output is to be computed.
pub(crate) fn expect_pass(problem: &Problem, pass: Pass) -> Result<(), BackendError> {
    match problem.pass == pass {
        true => Ok(()),
        false => {
            let reasons = "gradients need the output and its gradient: attend_backward".to_owned();
            Err(BackendError::Unsupported { reasons })
        }
    }
}

/// Options of a run on a [`Backend`].
#[derive(Clone, Default)]
pub struct RunOptions<'a> {
    /// The kernel to run; the best accepted one when `None`.
    pub kernel: Option<String>,
    /// Receives the progress of long runs.
    pub progress: Option<&'a dyn Progress>,
    /// Stops the run. The CPU checks it once per tile; a GPU finishes what was launched.
    pub cancellation: Option<&'a Cancellation>,
    /// Run once, untimed, and fail if the kernel wrote outside of its results or to its inputs. For
    /// checks.
    pub guard: bool,
    /// Number of parts into which the GPU's `decode` kernel cuts the keys (split-KV); enough to fill
    /// the GPU when `None`. Other kernels ignore it. For checks.
    pub splits: Option<u32>,
}

/// Receives the progress of a long computation. It is called from many threads.
pub trait Progress: Sync {
    /// Announces the total number of steps.
    fn begin(&self, total: u64);
    /// Reports that `steps` more steps are done.
    fn advance(&self, steps: u64);
}

/// Nobody is told.
impl Progress for () {
    fn begin(&self, _: u64) {}
    fn advance(&self, _: u64) {}
}

/// Stops a computation that runs on another thread.
///
/// ```
/// use flashcore::{Backend, Cancellation, CpuBackend, InputTensors, Problem, RunOptions};
///
/// let problem = Problem::new(1, 2, 100, 16);
/// let tensors = InputTensors::random(&problem, 0)?;
/// let cancellation = Cancellation::new();
/// cancellation.cancel();
/// let options = RunOptions { cancellation: Some(&cancellation), ..RunOptions::default() };
/// let error = CpuBackend::new().run(&problem, tensors.inputs(), &options).unwrap_err();
/// assert_eq!(error.to_string(), "the computation was cancelled");
/// # Ok::<(), flashcore::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Cancellation {
    asked: AtomicBool,
}

impl Cancellation {
    /// Creates a flag that is not cancelled.
    pub const fn new() -> Self {
        Cancellation { asked: AtomicBool::new(false) }
    }

    /// Asks the computation to stop. This cannot be undone.
    pub fn cancel(&self) {
        self.asked.store(true, Ordering::Relaxed);
    }

    /// Tells whether the computation was asked to stop.
    pub fn is_cancelled(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }

    /// Returns an error if the computation was asked to stop.
    pub fn check(&self) -> Result<(), BackendError> {
        if self.is_cancelled() { Err(BackendError::Cancelled) } else { Ok(()) }
    }
}

/// The result of a forward pass.
#[derive(Debug, Clone)]
pub struct Output {
    /// The attention output, contiguous (batch, query length, query heads, value head dim).
    pub output: Tensor,
    /// The log-sum-exp of each row: the natural logarithm of its sum of exponentials of scaled
    /// scores, in the order (batch, query heads, query length); minus infinity for a row that sees
    /// no key.
    pub lse: Vec<f32>,
    /// Which kernel ran, why, and how long it took.
    pub report: Report,
}

/// Allocates the results of a problem as if no row saw a key: an output of zeros, log-sum-exps of
/// minus infinity.
pub(crate) fn unseen(problem: &Problem) -> Result<(Tensor, Vec<f32>), Error> {
    let output = Tensor::zeros(problem.dtypes.output, problem.output_shape())?;
    let lse = filled("the log-sum-exp", problem.rows(), f32::NEG_INFINITY)?;
    Ok((output, lse))
}

/// Returns `count` copies of a value; an error, not an abort, where memory runs out.
pub(crate) fn filled<T: Clone>(
    what: &'static str,
    count: usize,
    value: T,
) -> Result<Vec<T>, BackendError> {
    let mut values = room_for(what, count)?;
    values.resize(count, value);
    Ok(values)
}

/// Returns an empty vector of capacity `count`; an error, not an abort, where memory runs out.
pub(crate) fn room_for<T>(what: &'static str, count: usize) -> Result<Vec<T>, BackendError> {
    let mut values = Vec::new();
    values.try_reserve_exact(count).map_err(|_| BackendError::OutOfMemory(what))?;
    Ok(values)
}

/// How an [`Output`] or [`Gradients`] were computed.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Name of the back end.
    pub backend: &'static str,
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Configuration of the kernel, where it has several.
    pub configuration: Option<String>,
    /// Why this kernel was chosen.
    pub reason: String,
    /// Time of the computation alone.
    #[serde(rename = "kernel_ms", serialize_with = "milliseconds")]
    pub kernel_time: Duration,
    /// Time from the call until the result was available (on the device, where it was computed
    /// there).
    #[serde(rename = "first_result_ms", serialize_with = "milliseconds")]
    pub first_result_time: Duration,
    /// Time of the whole call, including allocation, compilation and copies.
    #[serde(rename = "total_ms", serialize_with = "milliseconds")]
    pub total_time: Duration,
    /// Further remarks, one line each.
    pub notes: Vec<String>,
}

impl Report {
    /// Returns the report of the kernel that a plan chose, for a call that began at `begun`.
    pub(crate) fn of(
        plan: &Plan,
        begun: Instant,
        kernel_time: Duration,
        first_result_time: Duration,
        notes: Vec<String>,
    ) -> Self {
        let Candidate { backend, kernel, configuration, reason, .. } = &plan.chosen;
        Report {
            backend,
            kernel,
            configuration: configuration.clone(),
            reason: reason.clone(),
            kernel_time,
            first_result_time,
            total_time: begun.elapsed(),
            notes,
        }
    }

    /// Returns the rate of the computation in 10^12 operations per second, by the published count
    /// of operations ([`Problem::flops`]).
    pub fn tflops(&self, problem: &Problem) -> f64 {
        problem.flops() / self.kernel_time.as_secs_f64().max(1e-9) / 1e12
    }
}

fn milliseconds<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_secs_f64() * 1e3)
}

/// Why no back end returned a result.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// The requested back end is not available.
    #[error("there is no {backend} back end here: {reason}")]
    Unavailable {
        /// Name of the requested back end.
        backend: String,
        /// Why it is not available.
        reason: String,
    },
    /// No kernel has the requested name.
    #[error("there is no kernel `{kernel}` here, only {known}")]
    UnknownKernel {
        /// The requested name.
        kernel: String,
        /// The names of the available kernels.
        known: String,
    },
    /// None of the available kernels can serve the problem.
    #[error("no kernel can serve this problem: {reasons}")]
    Unsupported {
        /// The reason of each kernel.
        reasons: String,
    },
    /// The requested kernels cannot serve the problem, but others can.
    #[error("{reasons}; {instead} can")]
    Refused {
        /// The reason of each requested kernel.
        reasons: String,
        /// The kernels that can serve the problem.
        instead: String,
    },
    /// Host memory ran out for something other than a tensor.
    #[error("no memory for {0}")]
    OutOfMemory(&'static str),
    /// Threads could not be started.
    #[error("cannot start threads: {0}")]
    Threads(String),
    /// The computation was stopped through a [`Cancellation`].
    #[error("the computation was cancelled")]
    Cancelled,
}
