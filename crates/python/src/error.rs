//! Conversion of the library's errors to Python's exceptions.

use std::fmt::Display;

use flashcore::gpu::GpuError;
use flashcore::{BackendError, Error, ProblemError, TensorError};
use pyo3::exceptions::{PyMemoryError, PyNotImplementedError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// Makes a `ValueError`: the caller can correct it.
pub(crate) fn value(error: impl Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// Makes a `RuntimeError`: the machine or the driver failed.
pub(crate) fn runtime(error: impl Display) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

/// Returns whether a device had no memory left.
pub(crate) fn is_of_device_memory(error: &Error) -> bool {
    let (Error::Driver(driver) | Error::Gpu(GpuError::Driver(driver))) = error else {
        return false;
    };
    matches!(driver, cuda::Error::OutOfMemory { .. })
}

/// Converts any error of the library.
pub(crate) fn library(error: Error) -> PyErr {
    match &error {
        Error::Tensor(TensorError::OutOfMemory { .. } | TensorError::TooLarge(_))
        | Error::Problem(ProblemError::TooLarge(_))
        | Error::Backend(BackendError::OutOfMemory(_)) => PyMemoryError::new_err(error.to_string()),
        _ if is_of_device_memory(&error) => PyMemoryError::new_err(error.to_string()),
        // A call that no kernel serves is not a failure of the machine.
        Error::Backend(BackendError::Unsupported { .. })
        | Error::Gpu(GpuError::Unsupported { .. } | GpuError::TooLarge { .. }) => {
            PyNotImplementedError::new_err(error.to_string())
        }
        // The caller did not cause these.
        Error::Backend(BackendError::Threads(_) | BackendError::Cancelled) => runtime(error),
        Error::Problem(_)
        | Error::Tensor(_)
        | Error::Input(_)
        | Error::Serving(_)
        | Error::Backend(_) => value(error),
        _ => runtime(error),
    }
}

/// Converts an error of the library, replacing roles of tensors by the caller's argument names.
pub(crate) fn named(error: Error, roles: &[(&'static str, &'static str)]) -> PyErr {
    match error {
        Error::Gpu(GpuError::Tensor { tensor, reason }) => {
            let role = roles.iter().find(|(role, _)| *role == tensor);
            let name = role.map_or(tensor, |(_, name)| name);
            value(format!("{name} is not served on a GPU: {reason}"))
        }
        other => library(other),
    }
}
