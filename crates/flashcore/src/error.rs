//! What can go wrong, in one type.

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
    /// The problem makes no sense.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// A tensor cannot be made.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// A tensor does not belong to the problem.
    #[error(transparent)]
    Input(#[from] InputError),
    /// Sequences or their places make no sense.
    #[error(transparent)]
    Serving(#[from] ServingError),
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The driver failed.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Driver(#[from] cuda::Error),
    /// The GPU failed.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Gpu(#[from] crate::gpu::GpuError),
    /// No back end can do it, or the one that tried failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
}
