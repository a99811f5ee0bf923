//! Back ends: whatever can answer a [`Problem`].
//!
//! Each back end lists its kernels as [`Candidate`]s for a problem and runs the one that a
//! [`Plan`] chose, so that one test body and one command line serve all of them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::{Serialize, Serializer};

use crate::error::Error;
use crate::gradients::{Backward, Gradients};
use crate::inputs::Inputs;
use crate::plan::{Arrangement, Candidate, Plan, Preference};
use crate::problem::{Pass, Problem};
use crate::tensor::Tensor;

/// Something that computes attention.
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
    /// A short name, unique among back ends: `cpu`.
    fn name(&self) -> &'static str;

    /// The hardware behind it in a line.
    fn describe(&self) -> String;

    /// Every kernel of this back end, best for this problem first, each accepted or refused with
    /// a reason.
    fn candidates(&self, problem: &Problem, arrangement: &Arrangement) -> Vec<Candidate>;

    /// Computes what a plan chose of this back end. Problem and inputs are validated.
    ///
    /// The output has the shape of the query tensor with the value head dim; its rows that belong
    /// to no sequence are not defined. The log-sum-exp is in the order (batch, heads, length) of the
    /// query tensor.
    fn execute(
        &self,
        plan: &Plan,
        inputs: Inputs<'_>,
        options: &RunOptions<'_>,
    ) -> Result<Output, Error>;

    /// Computes the gradients of a problem by what a plan chose for its backward pass. Problem and
    /// tensors are validated.
    fn execute_backward(
        &self,
        _: &Plan,
        _: Backward<'_>,
        _: &RunOptions<'_>,
    ) -> Result<Gradients, Error> {
        let reasons = format!("the {} back end has no backward pass", self.name());
        Err(BackendError::Unsupported { reasons }.into())
    }

    /// Chooses among the kernels of this back end and runs. Nothing the caller passes panics.
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

    /// Chooses among the kernels of this back end for gradients and runs. Nothing the caller
    /// passes panics.
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

/// Refuses a problem whose gradients are asked for where outputs are computed.
pub(crate) fn expect_pass(problem: &Problem, pass: Pass) -> Result<(), BackendError> {
    match problem.pass == pass {
        true => Ok(()),
        false => {
            let reasons = "gradients need the output and its gradient: attend_backward".to_owned();
            Err(BackendError::Unsupported { reasons })
        }
    }
}

/// How a [`Backend`] is to run.
#[derive(Clone, Default)]
pub struct RunOptions<'a> {
    /// The kernel to run; the best accepted one when `None`.
    pub kernel: Option<String>,
    /// Told about the progress of long runs.
    pub progress: Option<&'a dyn Progress>,
    /// Stops the run. The CPU looks at it for every tile; what a GPU was given it finishes.
    pub cancellation: Option<&'a Cancellation>,
    /// Run once, untimed, and look for writes beside the results and to the inputs: they are an
    /// error. For checks.
    pub guard: bool,
    /// Into how many parts kernels that split the keys cut them; as many as fill the GPU when
    /// `None`. For checks.
    pub splits: Option<u32>,
}

/// Told how far a long computation has come. Calls come from many threads.
pub trait Progress: Sync {
    /// There will be `total` steps.
    fn begin(&self, total: u64);
    /// That many more are done.
    fn advance(&self, steps: u64);
}

/// Stops a computation that another thread is in the middle of.
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
    /// Nothing is cancelled yet.
    pub const fn new() -> Self {
        Cancellation { asked: AtomicBool::new(false) }
    }

    /// Asks for the end; for good.
    pub fn cancel(&self) {
        self.asked.store(true, Ordering::Relaxed);
    }

    /// Whether the end was asked for.
    pub fn is_cancelled(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }

    /// An error if the end was asked for.
    pub fn check(&self) -> Result<(), BackendError> {
        if self.is_cancelled() { Err(BackendError::Cancelled) } else { Ok(()) }
    }
}

/// What a back end computed.
#[derive(Debug, Clone)]
pub struct Output {
    /// The attention output, contiguous (batch, query length, query heads, value head dim).
    pub output: Tensor,
    /// The natural logarithm of each row's sum of exponentials of scaled scores, in the order
    /// (batch, query heads, query length); minus infinity for a row that sees no key.
    pub lse: Vec<f32>,
    /// Which kernel ran, why, and how long it took.
    pub report: Report,
}

/// The output and the log-sum-exps of a problem before any key is seen: zeros, and minus infinity.
pub(crate) fn unseen(problem: &Problem) -> Result<(Tensor, Vec<f32>), Error> {
    let output = Tensor::zeros(problem.dtypes.output, problem.output_shape())?;
    let lse = filled("the log-sum-exp", problem.rows(), f32::NEG_INFINITY)?;
    Ok((output, lse))
}

/// So many equal values, allocated without aborting when there is no memory.
pub(crate) fn filled<T: Clone>(
    what: &'static str,
    count: usize,
    value: T,
) -> Result<Vec<T>, BackendError> {
    let mut values = room_for(what, count)?;
    values.resize(count, value);
    Ok(values)
}

/// An empty list with room for so many values, allocated without aborting when there is no memory.
pub(crate) fn room_for<T>(what: &'static str, count: usize) -> Result<Vec<T>, BackendError> {
    let mut values = Vec::new();
    values.try_reserve_exact(count).map_err(|_| BackendError::OutOfMemory(what))?;
    Ok(values)
}

/// How an [`Output`] came about.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The back end's name.
    pub backend: &'static str,
    /// The kernel's name.
    pub kernel: &'static str,
    /// Its configuration, where it has several.
    pub configuration: Option<String>,
    /// Why this kernel.
    pub reason: String,
    /// The computation alone.
    #[serde(rename = "kernel_ms", serialize_with = "milliseconds")]
    pub kernel_time: Duration,
    /// From the call until there was a result, on the device where it was computed there.
    #[serde(rename = "first_result_ms", serialize_with = "milliseconds")]
    pub first_result_time: Duration,
    /// With allocation, compilation and copies.
    #[serde(rename = "total_ms", serialize_with = "milliseconds")]
    pub total_time: Duration,
    /// Anything else worth knowing, a line each.
    pub notes: Vec<String>,
}

impl Report {
    /// The rate of the computation, by the published count of operations
    /// ([`Problem::flops`]), in 10^12 operations per second.
    pub fn tflops(&self, problem: &Problem) -> f64 {
        problem.flops() / self.kernel_time.as_secs_f64().max(1e-9) / 1e12
    }
}

fn milliseconds<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_secs_f64() * 1e3)
}

/// Why no back end answered.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// The back end asked for is not there.
    #[error("there is no {backend} back end here: {reason}")]
    Unavailable {
        /// The name asked for.
        backend: String,
        /// Why it is not there.
        reason: String,
    },
    /// No kernel has the name asked for.
    #[error("there is no kernel `{kernel}` here, only {known}")]
    UnknownKernel {
        /// The name asked for.
        kernel: String,
        /// The names there are.
        known: String,
    },
    /// Kernels exist, and none can serve the problem.
    #[error("no kernel can serve this problem: {reasons}")]
    Unsupported {
        /// Each kernel's reason.
        reasons: String,
    },
    /// The kernels asked for cannot serve the problem, and others can.
    #[error("{reasons}; {instead} can")]
    Refused {
        /// Each asked-for kernel's reason.
        reasons: String,
        /// The kernels that would work.
        instead: String,
    },
    /// There is no memory for something besides the tensors.
    #[error("no memory for {0}")]
    OutOfMemory(&'static str),
    /// The system starts no threads.
    #[error("cannot start threads: {0}")]
    Threads(String),
    /// The caller did not want to wait any longer.
    #[error("the computation was cancelled")]
    Cancelled,
}
