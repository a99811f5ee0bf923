//! FlashCore for Python: the extension module behind the package `flashcore`.
//!
//! The package's Python files hold what a user sees: signatures, documentation, the operators that
//! PyTorch's compiler knows. This module reads tensors, describes the problem that they pose to the
//! library, and lets it launch.
//!
//! | file | its subject |
//! | --- | --- |
//! | `boundary` | panics, signals and memory |
//! | `process` | what a forked process has not |
//! | `call` | from a call to its answer |
//! | `numbers` | what calls give besides tensors |
//! | `request`, `gradient`, `update`, `parts` | what calls of attention, of its backward pass, of appending and of combining give |
//! | `distributed` | who does what where a sequence is spread over ranks |
//! | `descale` | factors of 8-bit tensors |
//! | `rules` | masks and scores as functions |
//! | `library` | whose tensors a call has |
//! | `torch` | PyTorch's tensors |
//! | `stable`, `dispatcher` | kernels that PyTorch's dispatcher calls without Python |
//! | `array`, `dlpack` | everyone else's |
//! | `view` | what a tensor is |
//! | `gpu`, `cpu` | where the work is done |
//! | `jit`, `xla` | calls from programs that XLA compiled |
//! | `launch` | from what such calls give to their launch |
//! | `info` | what ran |
// Python's objects, DLPack's structures and other libraries' memory are C.
#![allow(unsafe_code)]

mod array;
mod boundary;
mod call;
mod cpu;
mod descale;
mod dispatcher;
mod distributed;
mod dlpack;
mod error;
mod gpu;
mod gradient;
mod info;
mod jit;
mod launch;
mod library;
mod numbers;
mod parts;
mod process;
mod request;
mod rules;
mod stable;
mod torch;
mod update;
mod view;
mod xla;

/// The extension module.
#[pyo3::pymodule(name = "_flashcore")]
mod module {
    use pyo3::prelude::*;
    use pyo3::types::{PyCapsule, PyDict, PyTuple};

    #[pymodule_export]
    use super::array::Array;
    use super::boundary::guard;
    #[pymodule_export]
    use super::dispatcher::Kernels;
    #[pymodule_export]
    use super::distributed::Distribution;
    use super::gradient::Given;
    use super::jit::Described;
    use super::library::Entrance;
    use super::request::Called;
    use super::rules::Rules;
    #[pymodule_export]
    use super::rules::{Blocks, Rule};
    use super::{call, torch};

    /// The version of the package. Known without looking for devices.
    #[pymodule_export]
    const VERSION: &str = super::info::VERSION;

    /// Remembers the module `torch`, so that its tensors are known.
    #[pyfunction]
    fn adopt_torch(torch: &Bound<'_, PyAny>) -> PyResult<()> {
        guard(|| torch::adopt(torch))
    }

    /// Attention: the output, or output and log-sum-exps. Tensors are those of all functions
    /// together, numbers the scale, causal, window, chunk and cap of scores, and the most queries
    /// and keys. Through the entrance `function`, `NotImplemented` where PyTorch's dispatcher must
    /// see the call first, `Ellipsis` where autograd must record it, and `None` for tensors of
    /// others. Rules are a mask, a score, the tensors that these load
    /// from, and the blocks of the mask.
    #[pyfunction]
    #[pyo3(signature = (tensors, numbers, function, lse, entrance, rules=None, /))]
    fn attend<'py>(
        tensors: &Bound<'py, PyTuple>,
        numbers: &Bound<'py, PyTuple>,
        function: Called,
        lse: &Bound<'py, PyAny>,
        entrance: Entrance,
        rules: Option<&Bound<'py, PyTuple>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        guard(|| {
            let rules = Rules::read(rules)?;
            call::attend(tensors, numbers, function, lse, entrance, &rules)
        })
    }

    /// What the caller of a function calls the tensors of `attend`.
    #[pyfunction]
    #[pyo3(signature = (function, /))]
    fn tensor_names(py: Python<'_>, function: Called) -> PyResult<Bound<'_, PyTuple>> {
        PyTuple::new(py, function.function.names())
    }

    /// The gradients of attention over PyTorch's tensors, into tensors that are given: of queries,
    /// keys, values and sinks. Tensors and numbers are those of `attend`; saved are its output and
    /// log-sum-exps, and the gradient of the output; rules are those of `attend`. False, and nothing
    /// written, where one of the first tensors is empty: gradients are zero then.
    #[pyfunction]
    #[pyo3(signature = (tensors, numbers, function, saved, gradients, deterministic, rules=None, /))]
    fn attend_backward<'py>(
        tensors: &Bound<'py, PyTuple>,
        numbers: &Bound<'py, PyTuple>,
        function: Called,
        saved: &Bound<'py, PyTuple>,
        gradients: &Bound<'py, PyTuple>,
        deterministic: bool,
        rules: Option<&Bound<'py, PyTuple>>,
    ) -> PyResult<bool> {
        guard(|| {
            let rules = Rules::read(rules)?;
            let given = Given::new(function.function, tensors, saved, gradients, rules)?;
            call::attend_backward(&given, numbers, function, deterministic)
        })
    }

    /// Tensors of PyTorch's that lie as others do: `torch.empty_like` of each, in less time.
    #[pyfunction]
    #[pyo3(signature = (tensors, /))]
    fn empty_like<'py>(tensors: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| super::library::empty_like(tensors))
    }

    /// What `attend` would run on a chip (`h200`, `sm_80`) that need not be there: the problem as a
    /// text, the kernel, its configuration, and why. For tests.
    #[pyfunction]
    #[pyo3(signature = (tensors, numbers, function, chip, backward=false, /))]
    fn plan_for(
        tensors: &Bound<'_, PyTuple>,
        numbers: &Bound<'_, PyTuple>,
        function: Called,
        chip: &str,
        backward: bool,
    ) -> PyResult<(String, &'static str, Option<String>, String)> {
        guard(|| call::plan_for(tensors, numbers, function, chip, backward))
    }

    /// What `attend` would answer inside a program that XLA compiles, from shapes alone: tensors are
    /// (element type, sizes, None, 0). The attributes of the call, and its results: the shape and
    /// the element type of the output, and the shape of the log-sum-exps.
    #[pyfunction]
    #[pyo3(signature = (tensors, numbers, function, /))]
    fn xla_call<'py>(
        tensors: &Bound<'py, PyTuple>,
        numbers: &Bound<'py, PyTuple>,
        function: Called,
    ) -> PyResult<Described<'py>> {
        guard(|| super::jit::describe(tensors, numbers, function))
    }

    /// A handler for XLA: `attention` or `attention_backward`, on `cpu` or on `CUDA`.
    #[pyfunction]
    #[pyo3(signature = (name, platform, /))]
    fn xla_target<'py>(
        py: Python<'py>,
        name: &str,
        platform: &str,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        guard(|| super::jit::target(py, name, platform))
    }

    /// New keys and values into a cache: the queries, rotated or None, and the new lengths.
    /// Flags are whether neighbours are pairs, the causal mask, window and chunk that decide whether
    /// queries advance, whether pages are called blocks, and the most queries.
    #[pyfunction]
    #[pyo3(signature = (tensors, flags, entrance, /))]
    fn append<'py>(
        tensors: &Bound<'py, PyTuple>,
        flags: &Bound<'py, PyTuple>,
        entrance: Entrance,
    ) -> PyResult<Bound<'py, PyAny>> {
        guard(|| call::append(tensors, flags, entrance))
    }

    /// Parts in one tensor put together: output and log-sum-exps.
    #[pyfunction]
    #[pyo3(signature = (tensors, dtype, entrance, /))]
    fn combine<'py>(
        tensors: &Bound<'py, PyTuple>,
        dtype: Option<&str>,
        entrance: Entrance,
    ) -> PyResult<Bound<'py, PyAny>> {
        guard(|| call::combine(tensors, dtype, entrance))
    }

    /// Two answers of attention put together: output and log-sum-exps.
    #[pyfunction]
    #[pyo3(signature = (tensors, entrance, /))]
    fn merge<'py>(
        tensors: &Bound<'py, PyTuple>,
        entrance: Entrance,
    ) -> PyResult<Bound<'py, PyAny>> {
        guard(|| call::merge_states(tensors, entrance))
    }

    /// Waits for kernels that are still being compiled; for the end of the process.
    #[pyfunction]
    fn finish_compiling(py: Python<'_>) -> PyResult<()> {
        guard(|| {
            py.detach(super::gpu::finish_compiling);
            Ok(())
        })
    }

    /// Begins anew in a process that was just forked.
    #[pyfunction]
    fn forked() -> PyResult<()> {
        guard(|| {
            super::process::forked();
            Ok(())
        })
    }

    /// Panics, in the middle of work on the CPU. For tests.
    #[pyfunction]
    fn panic(py: Python<'_>, text: String) -> PyResult<()> {
        guard(|| super::boundary::compute(py, |_| panic!("{text}")))
    }

    /// What there is, and what ran last.
    #[pyfunction]
    fn info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        guard(|| super::info::info(py))
    }
}
