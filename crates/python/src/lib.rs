//! FlashCore for Python: the extension module behind the package `flashcore`.
//!
//! The package's Python files hold what a user sees: signatures, documentation, the operators that
//! PyTorch's compiler knows. This module reads tensors, keeps plans and launches.
//!
//! | file | its subject |
//! | --- | --- |
//! | `view` | what a tensor is, and the problem that three of them pose |
//! | `torch` | PyTorch's tensors |
//! | `array`, `dlpack` | everyone else's |
//! | `gpu`, `cpu` | where the work is done |
//! | `plans` | what a device remembers |
//! | `serving` | sequences, caches and parts |
//! | `info` | what ran |
// Python's objects, DLPack's structures and other libraries' memory are C.
#![allow(unsafe_code)]

mod array;
mod cpu;
mod dlpack;
mod error;
mod gpu;
mod info;
mod plans;
mod serving;
mod torch;
mod view;

/// The extension module.
#[pyo3::pymodule(name = "_flashcore")]
mod module {
    use pyo3::prelude::*;
    use pyo3::types::{PyDict, PyNotImplemented, PyTuple};

    #[pymodule_export]
    use super::array::Array;
    use super::serving::{self, Entrance, Function, Numbers};
    use super::torch::{self, Torch, Way};
    use super::view::{Convention, Request};
    use super::{array, convention};

    /// Remembers the module `torch`, so that its tensors are known.
    #[pyfunction]
    fn adopt_torch(torch: &Bound<'_, PyAny>) -> PyResult<()> {
        torch::adopt(torch)
    }

    /// Attention over PyTorch's tensors, straight to the kernel: the output, or output and
    /// log-sum-exps. `NotImplemented` where PyTorch's dispatcher must see the call first, and
    /// `None` for tensors of others.
    #[pyfunction]
    #[pyo3(signature = (q, k, v, scale, causal, lse, pytorch, /))]
    #[allow(clippy::too_many_arguments)] // One call from Python, whatever it takes.
    fn attend_torch<'py>(
        py: Python<'py>,
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        scale: Option<f64>,
        causal: bool,
        lse: bool,
        pytorch: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let convention = convention(pytorch);
        let tensors = [q, k, v];
        let named = || convention.names().into_iter().zip(tensors);
        let dispatch = || Ok(PyNotImplemented::get(py).to_owned().into_any());
        let torch = match Torch::way(py, named())? {
            Way::Straight(torch) => torch,
            Way::Dispatcher => return dispatch(),
            Way::Foreign => return Ok(py.None().into_bound(py)),
        };
        for (name, tensor) in named() {
            torch.refuse_gradient(tensor, name)?;
        }
        let Ok(views) = torch.views(tensors, convention) else {
            return dispatch();
        };
        torch.attend(tensors, &views, &Request { convention, scale, causal }, lse)
    }

    /// The operator's own work: as `attend_torch`, but behind the dispatcher.
    #[pyfunction]
    #[pyo3(signature = (q, k, v, scale, causal, lse, /))]
    fn attend_dispatched<'py>(
        py: Python<'py>,
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        scale: Option<f64>,
        causal: bool,
        lse: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let convention = Convention::FlashAttention;
        let tensors = [q, k, v];
        let torch = Torch::get(py)?;
        let views = torch.views(tensors, convention)?;
        torch.attend(tensors, &views, &Request { convention, scale, causal }, lse)
    }

    /// Attention over arrays that speak DLPack: output and log-sum-exps, to be taken over with
    /// `from_dlpack`. With `words`, 16-bit integers are the bits of bf16.
    #[pyfunction]
    #[pyo3(signature = (q, k, v, scale, causal, pytorch, words, /))]
    fn attend_arrays<'py>(
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        scale: Option<f64>,
        causal: bool,
        pytorch: bool,
        words: bool,
    ) -> PyResult<(Array, Array)> {
        let request = Request { convention: convention(pytorch), scale, causal };
        array::attend([q, k, v], &request, words)
    }

    /// Attention over sequences: the output, or output and log-sum-exps. Tensors are those of
    /// `flash_attn_varlen_func` and `flash_attn_with_kvcache` together, numbers the most queries
    /// and keys, scale, causal, window and softcap. Through the entrance `function`,
    /// `NotImplemented` where PyTorch's dispatcher must see the call first, and `None` for tensors
    /// of others.
    #[pyfunction]
    #[pyo3(signature = (tensors, numbers, function, lse, entrance, /))]
    fn attend_sequences<'py>(
        tensors: &Bound<'py, PyTuple>,
        numbers: Numbers,
        function: Function,
        lse: bool,
        entrance: Entrance,
    ) -> PyResult<Bound<'py, PyAny>> {
        serving::attend(tensors, numbers, function, lse, entrance)
    }

    /// New keys and values into a cache: the queries, turned or None, and the new lengths.
    /// Flags are whether neighbours are pairs and whether queries advance.
    #[pyfunction]
    #[pyo3(signature = (tensors, flags, max_seqlen_q, entrance, /))]
    fn append<'py>(
        tensors: &Bound<'py, PyTuple>,
        flags: (bool, bool),
        max_seqlen_q: Option<i64>,
        entrance: Entrance,
    ) -> PyResult<Bound<'py, PyAny>> {
        serving::append(tensors, flags, max_seqlen_q, entrance)
    }

    /// Parts in one tensor put together: output and log-sum-exps.
    #[pyfunction]
    #[pyo3(signature = (tensors, dtype, entrance, /))]
    fn combine<'py>(
        tensors: &Bound<'py, PyTuple>,
        dtype: Option<&str>,
        entrance: Entrance,
    ) -> PyResult<Bound<'py, PyAny>> {
        serving::combine(tensors, dtype, entrance)
    }

    /// Two answers of attention put together: output and log-sum-exps.
    #[pyfunction]
    #[pyo3(signature = (tensors, entrance, /))]
    fn merge<'py>(
        tensors: &Bound<'py, PyTuple>,
        entrance: Entrance,
    ) -> PyResult<Bound<'py, PyAny>> {
        serving::merge_states(tensors, entrance)
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

fn convention(pytorch: bool) -> view::Convention {
    if pytorch { view::Convention::PyTorch } else { view::Convention::FlashAttention }
}
