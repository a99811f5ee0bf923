//! Fused attention for NVIDIA GPUs in pure Rust.
//!
//! A [`Problem`] describes an attention call without its tensors: sizes, element types, [`Mask`],
//! [`Scores`] and how sequences are stored. A [`Machine`] holds the [`Backend`]s that are
//! available; it turns a problem into a [`Plan`] and runs it:
//!
//! ```
//! use flashcore::{DType, InputTensors, Mask, Problem};
//!
//! let problem = Problem::new(1, 8, 256, 64)
//!     .with_kv_heads(2)
//!     .with_dtype(DType::BF16)
//!     .with_mask(Mask::CAUSAL);
//! let tensors = InputTensors::random(&problem, 0)?;
//! let result = flashcore::attend(&problem, tensors.inputs())?;
//!
//! assert_eq!(result.output.shape(), problem.output_shape());
//! println!("{} on {}", result.report.kernel, result.report.backend);
//! # Ok::<(), flashcore::Error>(())
//! ```
//!
//! # What is computed
//!
//! For every sequence and query head, `softmax(scale * Q K^T + mask) V`, and for every row the
//! log-sum-exp (LSE) of its scaled scores. The result is defined for every length:
//!
//! - A row that sees no key has an output of zeros and an LSE of minus infinity.
//! - A masked key contributes nothing.
//! - NaN and infinity in visible inputs propagate as in the plain algorithm.
//!
//! # What runs
//!
//! Every call takes the same path: a description ([`Problem`]), the choice of a kernel family with
//! the reasons for it ([`mod@plan`], [`family`]), then compiled kernels with their arguments bound
//! ([`mod@gpu`]). There is no silent fallback: the [`Report`] in every result names the kernel that
//! ran and why it was chosen, and a [`Plan`] lists the kernels that refused the problem.
//! [`Preference`] and the environment variable `FLASHCORE_KERNEL` force a particular kernel.
//!
//! # Tensors in host memory
//!
//! [`attend`] looks for the machine's GPU anew on every call. A program that calls it often should
//! keep a [`Machine`], which also keeps the compiled kernels. Tensors are not repacked: [`Layout`]
//! accepts any strides, as long as the elements along the head dim are contiguous, and a
//! [`TensorView`] borrows memory that belongs to somebody else.
//!
//! ```
//! use flashcore::{Inputs, Layout, Machine, Preference, Shape, Tensor};
//!
//! let machine = Machine::discover();
//! // Two heads of three positions, kept head by head.
//! let shape = Shape::new(1, 3, 2, 4);
//! let memory: Vec<f32> = (0..24).map(|i| i as f32 / 24.0).collect();
//! let tensor = Tensor::new(Layout::heads_first(shape)?, memory)?;
//! let inputs = Inputs::new(&tensor, &tensor, &tensor);
//!
//! let problem = inputs.problem()?.with_scale(0.5);
//! let result = machine.attend(&problem, inputs, &Preference::default(), None)?;
//! // The log-sum-exp comes with every result: (batch, query heads, query length).
//! assert_eq!(result.lse.len(), problem.rows());
//! # Ok::<(), flashcore::Error>(())
//! ```
//!
//! Batches of sequences of unequal lengths (packed, padded or paged) take one more argument, the
//! placement of each sequence: [`serving`].
//!
//! Gradients are computed from the inputs and from what the forward pass saved, its output and its
//! LSE: [`Machine::attend_backward`].
//!
//! # Tensors on a device
//!
//! A program whose tensors are on the GPU opens a [`gpu::Gpu`] and calls [`gpu::Gpu::attend`] on
//! its own stream, or on one borrowed from another library ([`gpu::Stream::borrow`]). The plan of a
//! call is made once and cached; later calls neither allocate, compile nor synchronize, and can be
//! captured in a CUDA graph.
//!
//! ```no_run
//! use flashcore::gpu::{Buffer, Gpu, Stream, Tensors};
//! use flashcore::{DType, InputTensors, Mask, Problem};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let gpu = Gpu::open(0)?;
//! let stream = Stream::new(gpu.device())?;
//! let problem = Problem::new(2, 16, 4096, 128).with_dtype(DType::BF16).with_mask(Mask::CAUSAL);
//!
//! // Allocate on the device. The tensors could as well be PyTorch's: only addresses are needed.
//! let host = InputTensors::random(&problem, 0)?;
//! let upload = |tensor: &flashcore::Tensor| Buffer::from_slice(&stream, tensor.bytes());
//! let inputs = [upload(&host.query)?, upload(&host.key)?, upload(&host.value)?];
//! let output = Buffer::new(gpu.device(), inputs[0].bytes())?;
//! let lse = Buffer::new(gpu.device(), 4 * problem.rows() as u64)?;
//!
//! let addresses = [&inputs[0], &inputs[1], &inputs[2], &output].map(Buffer::address);
//! let tensors = Tensors::contiguous(&problem, addresses, Some(lse.address()))?;
//! let plan = gpu.attend(&stream, &problem, &tensors)?;
//! println!("{}", plan.plan().reason());
//!
//! // Copying waits for the stream, and reports what went wrong on it.
//! let lse: Vec<f32> = stream.download_vec(lse.all())?;
//! let output: Vec<half::bf16> = stream.download_vec(output.all())?;
//! # Ok(())
//! # }
//! ```
//!
//! # Errors
//!
//! Invalid arguments never panic. [`Error`] has a variant for each kind of failure, and each
//! message is one line that names what was given and what was expected:
//!
//! ```
//! use flashcore::{BackendError, Error, InputTensors, Machine, Preference, Problem, ProblemError};
//!
//! let machine = Machine::discover();
//! let problem = Problem::new(1, 8, 64, 64);
//! let tensors = InputTensors::random(&problem, 0)?;
//!
//! let uneven = problem.clone().with_kv_heads(3);
//! match machine.plan(&uneven, &Preference::default()) {
//!     Err(Error::Problem(ProblemError::Heads { query_heads: 8, kv_heads: 3 })) => {}
//!     other => panic!("{other:?}"),
//! }
//!
//! // Tensors of another shape than the problem's.
//! let longer = problem.clone().with_key_length(65);
//! let error = machine.attend(&longer, tensors.inputs(), &Preference::default(), None).unwrap_err();
//! assert_eq!(error.to_string(), "key has shape [1, 64, 8, 64], expected [1, 65, 8, 64]");
//!
//! // A kernel that is not there.
//! let error = machine.plan(&problem, &Preference::named("cpu/fastest")).unwrap_err();
//! assert!(matches!(error, Error::Backend(BackendError::UnknownKernel { .. })));
//! # Ok::<(), Error>(())
//! ```
//!
//! # Threads
//!
//! A [`Machine`], a [`gpu::Gpu`] and its plans may be shared between threads; a kernel that two
//! threads ask for is compiled once. The CPU back end runs on rayon's global pool, or on the pool
//! from which it is called; in a forked process it runs on a pool of its own. A [`Cancellation`]
//! stops a CPU run from another thread.

mod backend;
mod chip;
mod cpu;
pub mod distributed;
mod dtype;
mod error;
pub mod family;
pub mod file;
#[cfg(feature = "cuda")]
pub mod gpu;
mod gradients;
mod inputs;
mod machine;
pub mod plan;
mod problem;
pub mod quantize;
pub mod serving;
mod tensor;

pub use backend::{Backend, BackendError, Cancellation, Output, Progress, Report, RunOptions};
pub use cpu::CpuBackend;
pub use dtype::{DType, UnknownDType};
pub use error::Error;
#[cfg(feature = "cuda")]
pub use gpu::GpuBackend;
pub use gradients::{Backward, Gradients};
pub use inputs::{InputError, InputTensors, Inputs, random_descales};
/// Masks and score modifications written as functions of the query and key positions.
pub use kernels::attention::function;
pub use machine::Machine;
pub use plan::{Plan, Preference};
pub use problem::{
    Alibi, DTypes, Descale, Descales, ElementError, Lists, Mask, Pass, Problem, ProblemError,
    ProblemTextError, RowFunctions, Scores, Storage,
};
pub use tensor::{
    E4M3, E5M2, Elements, ElementsView, Head, Int8, Layout, Shape, Strides, Tensor, TensorError,
    TensorView, random,
};

/// Computes attention on the best back end of this machine.
///
/// Discovers the machine anew on every call; keep a [`Machine`] to avoid that. `FLASHCORE_KERNEL`
/// may force a kernel: see [`Preference::from_environment`].
pub fn attend(problem: &Problem, inputs: Inputs<'_>) -> Result<Output, Error> {
    Machine::discover().attend(problem, inputs, &Preference::from_environment(problem.pass), None)
}
