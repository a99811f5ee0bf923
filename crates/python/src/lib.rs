//! FlashCore for Python: the extension module behind the package `flashcore`.
//!
//! The package's Python files hold what a user sees: signatures, documentation, the operators that
//! PyTorch's compiler knows. This module reads tensors, describes the problem that they pose to the
//! library, and lets it launch.
//!
//! | file | its subject |
//! | --- | --- |
//! | `call` | from a call to its answer |
//! | `request`, `update`, `parts` | what calls of attention, of appending and of combining give |
//! | `library` | whose tensors a call has |
//! | `torch` | PyTorch's tensors |
//! | `array`, `dlpack` | everyone else's |
//! | `view` | what a tensor is |
//! | `gpu`, `cpu` | where the work is done |
//! | `info` | what ran |
// Python's objects, DLPack's structures and other libraries' memory are C.
#![allow(unsafe_code)]

mod array;
mod call;
mod cpu;
mod dlpack;
mod error;
mod gpu;
mod info;
mod library;
mod parts;
mod request;
mod torch;
mod update;
mod view;

/// The extension module.
#[pyo3::pymodule(name = "_flashcore")]
mod module {
    use pyo3::prelude::*;
    use pyo3::types::{PyDict, PyTuple};

    #[pymodule_export]
    use super::array::Array;
    use super::library::Entrance;
    use super::request::{Function, Numbers};
    use super::{call, torch};

    /// Remembers the module `torch`, so that its tensors are known.
    #[pyfunction]
    fn adopt_torch(torch: &Bound<'_, PyAny>) -> PyResult<()> {
        torch::adopt(torch)
    }

    /// Attention: the output, or output and log-sum-exps. Tensors are those of all functions
    /// together, numbers the scale, causal, window, chunk and cap of scores, and the most queries
    /// and keys. Through the entrance `function`, `NotImplemented` where PyTorch's dispatcher must
    /// see the call first, and `None` for tensors of others.
    #[pyfunction]
    #[pyo3(signature = (tensors, numbers, function, lse, entrance, /))]
    fn attend<'py>(
        tensors: &Bound<'py, PyTuple>,
        numbers: Numbers,
        function: Function,
        lse: bool,
        entrance: Entrance,
    ) -> PyResult<Bound<'py, PyAny>> {
        call::attend(tensors, numbers, function, lse, entrance)
    }

    /// What `attend` would run on a chip (`h200`, `sm_80`) that need not be there: the problem as a
    /// text, the kernel, its configuration, and why. For tests.
    #[pyfunction]
    #[pyo3(signature = (tensors, numbers, function, chip, /))]
    fn plan_for(
        tensors: &Bound<'_, PyTuple>,
        numbers: Numbers,
        function: Function,
        chip: &str,
    ) -> PyResult<(String, &'static str, Option<String>, String)> {
        call::plan_for(tensors, numbers, function, chip)
    }

    /// New keys and values into a cache: the queries, rotated or None, and the new lengths.
    /// Flags are whether neighbours are pairs and whether queries advance.
    #[pyfunction]
    #[pyo3(signature = (tensors, flags, max_seqlen_q, entrance, /))]
    fn append<'py>(
        tensors: &Bound<'py, PyTuple>,
        flags: (bool, bool),
        max_seqlen_q: Option<i64>,
        entrance: Entrance,
    ) -> PyResult<Bound<'py, PyAny>> {
        call::append(tensors, flags, max_seqlen_q, entrance)
    }

    /// Parts in one tensor put together: output and log-sum-exps.
    #[pyfunction]
    #[pyo3(signature = (tensors, dtype, entrance, /))]
    fn combine<'py>(
        tensors: &Bound<'py, PyTuple>,
        dtype: Option<&str>,
        entrance: Entrance,
    ) -> PyResult<Bound<'py, PyAny>> {
        call::combine(tensors, dtype, entrance)
    }

    /// Two answers of attention put together: output and log-sum-exps.
    #[pyfunction]
    #[pyo3(signature = (tensors, entrance, /))]
    fn merge<'py>(
        tensors: &Bound<'py, PyTuple>,
        entrance: Entrance,
    ) -> PyResult<Bound<'py, PyAny>> {
        call::merge_states(tensors, entrance)
    }

    /// Waits for kernels that are still being compiled; for the end of the process.
    #[pyfunction]
    fn finish_compiling(py: Python<'_>) {
        py.detach(super::gpu::finish_compiling);
    }

    /// What there is, and what ran last.
    #[pyfunction]
    fn info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        super::info::info(py)
    }
}
