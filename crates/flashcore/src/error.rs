//! One error type for the whole crate.

use crate::backend::BackendError;
use crate::file::FileError;
use crate::inputs::InputError;
use crate::problem::ProblemError;
use crate::serving::ServingError;
use crate::tensor::TensorError;

/// Any error of this crate. Every message is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The problem is invalid.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// A tensor cannot be created.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// A tensor does not match the problem.
    #[error(transparent)]
    Input(#[from] InputError),
    /// Sequences or their placements are invalid.
    #[error(transparent)]
    Serving(#[from] ServingError),
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// A call to the CUDA driver failed.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Driver(#[from] cuda::Error),
    /// Opening a GPU, or planning or launching a kernel on it, failed.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Gpu(#[from] crate::gpu::GpuError),
    /// No back end can serve the problem, or the one that ran it failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
}
