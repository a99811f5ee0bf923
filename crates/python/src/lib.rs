//! FlashCore for Python: the extension module behind the package `flashcore`.
//!
//! The package's Python files hold what a user sees: signatures, documentation and the operators
//! registered with PyTorch's compiler. This crate reads the tensors of a call, describes the call
//! as a [`flashcore::Problem`], and asks the library to plan and launch it.
//!
//! | file | its subject |
//! | --- | --- |
//! | `boundary` | the Python/Rust boundary: panics to exceptions, signals, fallible allocation |
//! | `process` | per-process state, and its reset after a fork |
//! | `call` | from a Python call to its results |
//! | `numbers` | the scalar arguments of calls |
//! | `request`, `gradient`, `update`, `parts` | the checked tensors of an attention call, of its backward pass, of an append to a KV cache, and of combining partial results |
//! | `distributed` | the schedule of context parallelism: which rank computes, sends and receives what |
//! | `descale` | the descale factors of 8-bit tensors |
//! | `rules` | masks and scores given as functions |
//! | `library` | which array library the tensors of a call belong to |
//! | `torch` | PyTorch's tensors |
//! | `stable`, `dispatcher` | kernels that PyTorch's dispatcher calls without Python |
//! | `array`, `dlpack` | the arrays of all other libraries, through DLPack |
//! | `view` | the address, shape, strides and element type of a tensor |
//! | `gpu`, `cpu` | running a checked call on a device or on the host |
//! | `jit`, `xla` | calls from programs compiled by XLA (JAX's `jit`) |
//! | `launch` | running calls that come from XLA or from PyTorch's dispatcher |
//! | `info` | the contents of `flashcore.info()` |
// Python's objects, DLPack's structures and other libraries' memory are reached through C
// interfaces.
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

    /// The version of the package, available without looking for devices.
    #[pymodule_export]
    const VERSION: &str = super::info::VERSION;

    /// Remembers the module `torch`, so that PyTorch's tensors are recognised from now on.
    #[pyfunction]
    fn adopt_torch(torch: &Bound<'_, PyAny>) -> PyResult<()> {
        guard(|| torch::adopt(torch))
    }

    /// Computes attention; returns the output, or the output and the log-sum-exps if `lse` is true.
    /// `tensors` holds the tensor arguments of all functions, in the order of `tensor_names`.
    /// `numbers` holds the scalar arguments, in the order of `Numbers::read`. `rules` holds a mask
    /// function, a score function, the tensors that these load from, and the block lists of the
    /// mask. Through the entrance `function` it may also return `NotImplemented` (PyTorch's
    /// dispatcher must see the call first), `Ellipsis` (autograd must record it) or `None` (the
    /// tensors are not PyTorch's).
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
            call::attend(tensors, numbers, function, lse, entrance, &rules, call::CALLER)
        })
    }

    /// Computes attention for a public function, which calls this directly: `attend` through the
    /// entrance `function`. The function that `leave_others_to` got is called with what `attend`
    /// returned instead of a result, or with its `ValueError`, and with these arguments.
    #[pyfunction]
    #[pyo3(signature = (tensors, numbers, function, lse, deterministic, /))]
    fn serve<'py>(
        tensors: &Bound<'py, PyTuple>,
        numbers: &Bound<'py, PyTuple>,
        function: &Bound<'py, PyAny>,
        lse: &Bound<'py, PyAny>,
        deterministic: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        guard(|| call::serve(tensors, numbers, function, lse, deterministic))
    }

    /// Sets the function that answers the calls that `serve` has no result for.
    #[pyfunction]
    #[pyo3(signature = (function, /))]
    fn leave_others_to(function: &Bound<'_, PyAny>) {
        call::leave_others_to(function);
    }

    /// Returns whether tensors, but for those that are None, are plain tensors of PyTorch's in f16 or
    /// bf16 with which neither function transforms nor autocast have anything to do.
    #[pyfunction]
    #[pyo3(signature = (tensors, /))]
    fn are_plain_halves(tensors: &Bound<'_, PyTuple>) -> PyResult<bool> {
        guard(|| Ok(torch::are_plain_halves(tensors)))
    }

    /// Returns whether something is a PyTorch tensor of 8-bit floats.
    #[pyfunction]
    #[pyo3(signature = (thing, /))]
    fn is_small_float(thing: &Bound<'_, PyAny>) -> PyResult<bool> {
        guard(|| torch::is_small_float(thing))
    }

    /// Returns the argument names of a function for the tensors of `attend`.
    #[pyfunction]
    #[pyo3(signature = (function, /))]
    fn tensor_names(py: Python<'_>, function: Called) -> PyResult<Bound<'_, PyTuple>> {
        PyTuple::new(py, function.function.names())
    }

    /// Computes the gradients of attention over PyTorch's tensors and writes them to the given
    /// tensors for dQ, dK, dV and the gradient of the sinks. `tensors`, `numbers` and `rules` are
    /// those of `attend`; `saved` holds its output and log-sum-exps, and the gradients of both,
    /// where the log-sum-exps may have none. Returns False and writes nothing if the query, key or
    /// value tensor is empty: the gradients are zero then.
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

    /// Returns `torch.empty_like` of each PyTorch tensor, in less time.
    #[pyfunction]
    #[pyo3(signature = (tensors, /))]
    fn empty_like<'py>(tensors: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyTuple>> {
        guard(|| super::library::empty_like(tensors))
    }

    /// Returns what `attend` would run on a chip (`h200`, `sm_80`) that need not be present: the
    /// problem as text, the kernel, its configuration, and the reason for the choice. For tests.
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

    /// Returns the append that a call would launch on a chip that need not be present: the
    /// configuration of its kernel, and the number of its blocks.
    #[pyfunction]
    #[pyo3(signature = (tensors, flags, chip, /))]
    fn append_plan_for(
        tensors: &Bound<'_, PyTuple>,
        flags: &Bound<'_, PyTuple>,
        chip: &str,
    ) -> PyResult<(String, u32)> {
        guard(|| call::append_plan_for(tensors, flags, chip))
    }

    /// Checks a call that XLA compiles, from shapes alone: each tensor is (element type, sizes,
    /// None, 0). Returns the attributes of the XLA call and the element type of the output.
    #[pyfunction]
    #[pyo3(signature = (tensors, numbers, function, /))]
    fn xla_call<'py>(
        tensors: &Bound<'py, PyTuple>,
        numbers: &Bound<'py, PyTuple>,
        function: Called,
    ) -> PyResult<Described<'py>> {
        guard(|| super::jit::describe(tensors, numbers, function))
    }

    /// Returns the XLA handler of `attention` or `attention_backward` on `cpu` or on `CUDA`, as a
    /// capsule.
    #[pyfunction]
    #[pyo3(signature = (name, platform, /))]
    fn xla_target<'py>(
        py: Python<'py>,
        name: &str,
        platform: &str,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        guard(|| super::jit::target(py, name, platform))
    }

    /// Appends new keys and values to a KV cache; returns the rotated queries (None without rotary
    /// tables) and the new lengths. `flags` holds whether rotary pairs are interleaved; the causal
    /// flag, window and chunk, which decide whether the queries of a sequence have successive
    /// positions; whether the page table is called `block_table`; and the maximum numbers of
    /// queries and of new keys of a sequence.
    #[pyfunction]
    #[pyo3(signature = (tensors, flags, entrance, /))]
    fn append<'py>(
        tensors: &Bound<'py, PyTuple>,
        flags: &Bound<'py, PyTuple>,
        entrance: Entrance,
    ) -> PyResult<Bound<'py, PyAny>> {
        guard(|| call::append(tensors, flags, entrance))
    }

    /// Combines partial results stacked in one tensor; returns output and log-sum-exps.
    #[pyfunction]
    #[pyo3(signature = (tensors, dtype, entrance, /))]
    fn combine<'py>(
        tensors: &Bound<'py, PyTuple>,
        dtype: Option<&str>,
        entrance: Entrance,
    ) -> PyResult<Bound<'py, PyAny>> {
        guard(|| call::combine(tensors, dtype, entrance))
    }

    /// Merges two attention results over different keys; returns output and log-sum-exps.
    #[pyfunction]
    #[pyo3(signature = (tensors, entrance, /))]
    fn merge<'py>(
        tensors: &Bound<'py, PyTuple>,
        entrance: Entrance,
    ) -> PyResult<Bound<'py, PyAny>> {
        guard(|| call::merge_states(tensors, entrance))
    }

    /// Waits for kernels that are still being compiled. Called at the end of the process.
    #[pyfunction]
    fn finish_compiling(py: Python<'_>) -> PyResult<()> {
        guard(|| {
            py.detach(super::gpu::finish_compiling);
            Ok(())
        })
    }

    /// Resets the per-process state in a process that was just forked.
    #[pyfunction]
    fn forked() -> PyResult<()> {
        guard(|| {
            super::process::forked();
            Ok(())
        })
    }

    /// Panics in the middle of work on the CPU. For tests.
    #[pyfunction]
    fn panic(py: Python<'_>, text: String) -> PyResult<()> {
        guard(|| super::boundary::compute(py, |_| panic!("{text}")))
    }

    /// Returns the version, the devices and a description of the last call, as a dictionary.
    #[pyfunction]
    fn info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        guard(|| super::info::info(py))
    }
}
