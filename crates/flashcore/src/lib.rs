//! Fused attention for NVIDIA GPUs in pure Rust.
//!
//! A [`Problem`] says what is to be computed, [`Inputs`] hold the tensors, a [`Machine`] knows
//! the [`Backend`]s there are, makes a [`Plan`] and runs it:
//!
//! ```
//! use flashcore::{DType, InputTensors, Mask, Problem};
//!
//! let problem = Problem::new(1, 8, 256, 64)
//!     .with_kv_heads(2)
//!     .with_dtype(DType::BF16)
//!     .with_mask(Mask::Causal);
//! let tensors = InputTensors::random(&problem, 0)?;
//! let result = flashcore::attend(&problem, tensors.inputs())?;
//!
//! assert_eq!(result.output.shape(), problem.output_shape());
//! println!("{} on {}", result.report.kernel, result.report.backend);
//! # Ok::<(), flashcore::Error>(())
//! ```
//!
//! # What the result is
//!
//! For every batch entry and query head, `softmax(scale * Q K^T + mask) V` and the log-sum-exp of
//! each row of scaled scores, for every length:
//!
//! - A row that sees no key has output 0 and a log-sum-exp of minus infinity.
//! - A masked key contributes nothing.
//! - NaN and infinity in visible inputs propagate as in the plain algorithm.
//!
//! Whether a result is right is a matter of rule, not of taste: see [`verdict`]. The rule needs
//! the true answer ([`mod@reference`]) and unkind problems ([`check::cases`]).
//!
//! # What runs
//!
//! Nothing falls back silently: the [`Report`](backend::Report) in every result names the kernel
//! and why it was chosen, and a [`Plan`] lists what was refused. On a Hopper GPU it is the kernel
//! `forward`, where that serves the problem. [`Preference`] or the environment variable
//! `FLASHCORE_KERNEL` insist on another; [`gpu::ForwardPlan`] launches it on tensors that are on
//! the device already.

pub mod backend;
pub mod check;
mod dtype;
mod error;
pub mod file;
pub mod gpu;
mod inputs;
mod machine;
pub mod plan;
mod problem;
pub mod reference;
pub mod serving;
mod tensor;
pub mod verdict;

pub use backend::{Backend, BackendError, CpuBackend, GpuBackend, Output, Progress, RunOptions};
pub use dtype::{DType, UnknownDType};
pub use error::Error;
pub use inputs::{InputError, InputLayouts, InputTensors, Inputs};
pub use machine::Machine;
pub use plan::{Plan, Preference};
pub use problem::{Mask, Problem, ProblemError, ProblemTextError};
pub use tensor::{Elements, Head, Layout, Shape, Strides, Tensor, TensorError};
pub use verdict::{Verdict, compare, compare_sequences};

/// Attention on the best back end of this machine.
///
/// Discovers the machine anew on every call; keep a [`Machine`] to avoid that. The environment may
/// insist on a kernel: see [`Preference::from_environment`].
pub fn attend(problem: &Problem, inputs: Inputs<'_>) -> Result<Output, Error> {
    Machine::discover().attend(problem, inputs, &Preference::from_environment(), None)
}
