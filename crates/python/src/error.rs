//! The library's errors as Python's exceptions.

use std::fmt::Display;

use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// For what a caller can put right.
pub(crate) fn value(error: impl Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// For what the machine did not do.
pub(crate) fn runtime(error: impl Display) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

/// For any error of the library.
pub(crate) fn library(error: flashcore::Error) -> PyErr {
    use flashcore::gpu::GpuError;
    use flashcore::{BackendError, Error, TensorError};
    match &error {
        Error::Tensor(TensorError::OutOfMemory { .. })
        | Error::Backend(BackendError::OutOfMemory)
        | Error::Driver(cuda::Error::OutOfMemory { .. })
        | Error::Gpu(GpuError::Driver(cuda::Error::OutOfMemory { .. })) => {
            PyMemoryError::new_err(error.to_string())
        }
        Error::Problem(_) | Error::Tensor(_) | Error::Input(_) | Error::Backend(_) => value(error),
        _ => runtime(error),
    }
}
