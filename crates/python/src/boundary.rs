//! The boundary between Python and Rust: panics become exceptions, and work on the CPU can be
//! interrupted by signals.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use flashcore::{Cancellation, CpuBackend};
use pyo3::exceptions::PyMemoryError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::error;

/// How often a thread that waits for the CPU checks for signals. Ctrl-C takes effect after one
/// period and the tile being computed.
const PERIOD: Duration = Duration::from_millis(50);

/// Runs a call. A panic is a defect of FlashCore: it ends the call with an error that says so.
pub(crate) fn guard<T>(call: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    // Unwind safety: nothing that the call was working on is used again, except for state behind
    // locks.
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(defect(panic.as_ref())))
}

#[cold]
fn defect(panic: &(dyn Any + Send)) -> PyErr {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no more is known");
    error::runtime(format!(
        "this is a defect of FlashCore: {text}; please report it with the call that led to it"
    ))
}

/// Attaches this thread to Python, in code that PyTorch or XLA calls. Returns None if Python has
/// ended.
///
/// [`Python::attach`] alone does not do that here: it takes every thread for attached that is inside
/// of a call from Python. Between that call and this one there may be Python again, which called a
/// library that has released Python since.
pub(crate) fn attached<T>(run: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    struct Ensured(ffi::PyGILState_STATE);
    impl Drop for Ensured {
        fn drop(&mut self) {
            // SAFETY: the state that it was made from, on the same thread.
            unsafe { ffi::PyGILState_Release(self.0) }
        }
    }
    // SAFETY: may be asked at any time.
    if unsafe { ffi::Py_IsInitialized() } == 0 {
        return None;
    }
    // SAFETY: Python runs. A thread that is attached already stays so.
    let _ensured = Ensured(unsafe { ffi::PyGILState_Ensure() });
    Python::try_attach(run)
}

/// Runs work on the CPU with Python released, checking for signals meanwhile.
pub(crate) fn compute<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(&Cancellation) -> PyResult<T> + Send,
) -> PyResult<T> {
    let cancellation = Cancellation::new();
    let mut interrupt = None;
    let watch = || {
        if interrupt.is_none()
            && let Some(Err(error)) = Python::try_attach(|py| py.check_signals())
        {
            interrupt = Some(error);
            cancellation.cancel();
        }
    };
    let result = py.detach(|| CpuBackend::new().watched(|| work(&cancellation), PERIOD, watch));
    match interrupt {
        Some(error) => Err(error),
        None => result.map_err(error::library)?,
    }
}

/// Returns an empty list with capacity for `count` entries, or `MemoryError`: sizes come from
/// callers.
pub(crate) fn room_for<T>(count: usize) -> PyResult<Vec<T>> {
    let mut list = Vec::new();
    list.try_reserve_exact(count)
        .map_err(|_| PyMemoryError::new_err(format!("no memory for a list of {count} entries")))?;
    Ok(list)
}

/// Collects an iterator into a list that is allocated fallibly.
pub(crate) fn collect<T>(items: impl ExactSizeIterator<Item = PyResult<T>>) -> PyResult<Vec<T>> {
    let mut list = room_for(items.len())?;
    for item in items {
        list.push(item?);
    }
    Ok(list)
}
