//! PyTorch's tensors.
//!
//! PyTorch functions that are needed again and again are looked up once and kept in [`Torch`].

use std::sync::Mutex;

use flashcore::DType;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyFloat, PyTuple};

use crate::boundary::attached;
use crate::dlpack::{self, Exchange};
use crate::error;
use crate::process::{lock, process};
use crate::stable::Stable;
use crate::view::{Element, MOST_DIMENSIONS, Memory, Place, contiguous, may_be_offset};

/// The functions and types that are needed of the module `torch`.
pub(crate) struct Torch {
    tensor: Py<PyAny>,
    /// From PyTorch 2.10 on.
    exchange: Option<&'static Exchange>,
    /// From PyTorch 2.11 on.
    stable: Option<&'static Stable>,
    empty_strided: Py<PyAny>,
    /// `empty_strided` on the current CUDA device, which takes sizes, strides and element type
    /// only: PyTorch's compiled programs call it.
    empty_strided_cuda: Option<Py<PyAny>>,
    /// The argument tuples of its last calls, to be reused.
    made: Mutex<Vec<(Memory, Py<PyTuple>)>>,
    empty_like: Py<PyAny>,
    float32: Py<PyAny>,
    float16: Py<PyAny>,
    bfloat16: Py<PyAny>,
    int32: Py<PyAny>,
    /// The element types of 8-bit floats.
    small_floats: [Py<PyAny>; 2],
    is_grad_enabled: Py<PyAny>,
    /// Returns whether autocast is on for any kind of device.
    autocasting: Option<Py<PyAny>>,
    increment_version: Option<Py<PyAny>>,
    /// Returns the number of active `__torch_dispatch__` modes.
    modes: Py<PyAny>,
    /// The variables of `torch.autograd.forward_ad`, among them the level of forward-mode
    /// differentiation.
    forward_mode: Option<Py<PyDict>>,
    raw_stream: Option<Py<PyAny>>,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

/// Remembers the module `torch`.
pub(crate) fn adopt(module: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = module.py();
    let inner = module.getattr("_C")?;
    let tensor = module.getattr("Tensor")?;
    let of_autograd = |name| module.getattr("autograd").and_then(|autograd| autograd.getattr(name));
    let graph = of_autograd("graph");
    let forward_mode = of_autograd("forward_ad").and_then(|module| module.getattr("__dict__"));
    let file = inner.getattr("__file__").and_then(|file| file.extract::<String>());
    let torch = Torch {
        exchange: Exchange::of(&tensor),
        stable: file.ok().and_then(|file| Stable::of(&file)),
        tensor: tensor.unbind(),
        empty_strided: module.getattr("empty_strided")?.unbind(),
        empty_strided_cuda: inner
            .getattr("_dynamo")
            .and_then(|dynamo| dynamo.getattr("guards")?.getattr("_empty_strided_cuda"))
            .ok()
            .map(Bound::unbind),
        made: Mutex::default(),
        empty_like: module.getattr("empty_like")?.unbind(),
        float32: module.getattr("float32")?.unbind(),
        float16: module.getattr("float16")?.unbind(),
        bfloat16: module.getattr("bfloat16")?.unbind(),
        int32: module.getattr("int32")?.unbind(),
        small_floats: [
            module.getattr("float8_e4m3fn")?.unbind(),
            module.getattr("float8_e5m2")?.unbind(),
        ],
        is_grad_enabled: inner.getattr("is_grad_enabled")?.unbind(),
        autocasting: inner.getattr("_is_any_autocast_enabled").ok().map(Bound::unbind),
        increment_version: graph
            .and_then(|graph| graph.getattr("increment_version"))
            .ok()
            .map(Bound::unbind),
        modes: inner.getattr("_len_torch_dispatch_stack")?.unbind(),
        forward_mode: forward_mode.ok().and_then(|it| it.cast_into().ok()).map(Bound::unbind),
        raw_stream: inner.getattr("_cuda_getCurrentRawStream").ok().map(Bound::unbind),
    };
    // Only the first import sets it.
    let _ = TORCH.set(py, torch);
    Ok(())
}

/// Returns whether something is a PyTorch tensor of 8-bit floats.
pub(crate) fn is_small_float(thing: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = thing.py();
    let Some(torch) = TORCH.get(py) else { return Ok(false) };
    let class = torch.tensor.bind(py);
    if thing.get_type_ptr().cast() == class.as_ptr()
        && let Some(stable) = torch.stable
        && let Some(element) = stable.element(thing)
    {
        return Ok(matches!(element, Element::Float(DType::E4M3 | DType::E5M2)));
    }
    if !thing.is_instance(class)? {
        return Ok(false);
    }
    let dtype = thing.getattr(intern!(py, "dtype"))?;
    Ok(torch.small_floats.iter().any(|small| dtype.is(small)))
}

/// Returns whether tensors, but for those that are None, are plain tensors of PyTorch's in f16 or bf16
/// with which neither function transforms nor autocast have anything to do.
pub(crate) fn are_plain_halves(tensors: &Bound<'_, PyTuple>) -> bool {
    let py = tensors.py();
    let Some((torch, stable)) = TORCH.get(py).and_then(|torch| Some((torch, torch.stable?))) else {
        return false;
    };
    let half = |tensor: Borrowed<'_, '_, PyAny>| {
        let halves = [DType::F16, DType::BF16].map(|dtype| Some(Element::Float(dtype)));
        tensor.get_type_ptr().cast() == torch.tensor.as_ptr()
            && halves.contains(&stable.plain_element(&tensor))
    };
    stable.never_transformed() && tensors.iter_borrowed().all(|it| it.is_none() || half(it))
}

/// Lets PyTorch give back the device memory that it keeps for later tensors. Returns whether it did.
#[cold]
pub(crate) fn give_memory_back() -> bool {
    let empty = |py: Python<'_>| -> PyResult<()> {
        Torch::get(py)?;
        py.import("torch.cuda")?.call_method0("empty_cache").map(drop)
    };
    attached(empty).is_some_and(|done| done.is_ok())
}

/// The path that a call on these tensors takes.
pub(crate) enum Way {
    /// No tensor is PyTorch's.
    Foreign,
    /// PyTorch's dispatcher must see the call: there is a subclass, a mode or a transformation.
    Dispatcher,
    Straight(&'static Torch),
}

impl Torch {
    /// Returns the adopted module, or an error if PyTorch was not imported.
    pub(crate) fn get(py: Python<'_>) -> PyResult<&'static Torch> {
        TORCH.get(py).ok_or_else(|| error::runtime("PyTorch was not imported"))
    }

    /// Decides which path a call on these named tensors takes.
    pub(crate) fn way<'a, 'py: 'a>(
        py: Python<'py>,
        tensors: impl Iterator<Item = (&'static str, &'a Bound<'py, PyAny>)> + Clone,
    ) -> PyResult<Way> {
        let Some(torch) = TORCH.get(py) else {
            return Ok(Way::Foreign);
        };
        let class = torch.tensor.bind(py);
        if tensors.clone().all(|(_, tensor)| tensor.get_type_ptr().cast() == class.as_ptr()) {
            let objects = tensors.clone().map(|(_, tensor)| tensor);
            let seen_by_dispatcher = torch.has_modes(py)?
                || torch.has_tangents(py)?
                || torch.is_any_negative(py, objects)?;
            return match seen_by_dispatcher {
                true => check_dispatched(tensors).map(|()| Way::Dispatcher),
                false => Ok(Way::Straight(torch)),
            };
        }
        let mut odd = None;
        let mut found = false;
        for (name, tensor) in tensors.clone() {
            if tensor.is_instance(class)? {
                found = true;
            } else {
                odd = odd.or(Some((name, tensor)));
            }
        }
        match (found, odd) {
            (false, _) => Ok(Way::Foreign),
            (true, None) => {
                check_dispatched(tensors)?;
                Ok(Way::Dispatcher)
            }
            (true, Some((name, tensor))) => {
                // FlashAttention-2 has `dropout_p` where other functions have a list.
                let order = match tensor.is_instance_of::<PyFloat>() {
                    true => {
                        " (FlashAttention-2's order of arguments is that of flashcore.flash_attn)"
                    }
                    false => "",
                };
                let given = tensor.get_type();
                let expected = "expected a torch.Tensor like the others";
                Err(PyTypeError::new_err(format!("{name} is a {given}, {expected}{order}")))
            }
        }
    }

    /// Returns whether a `__torch_dispatch__` mode is active.
    fn has_modes(&self, py: Python<'_>) -> PyResult<bool> {
        match self.stable {
            Some(stable) => Ok(stable.modes() > 0),
            None => self.modes.bind(py).call0()?.is_truthy(),
        }
    }

    /// Returns whether forward-mode differentiation is on, so that tensors may have tangents, which
    /// the kernels would drop.
    fn has_tangents(&self, py: Python<'_>) -> PyResult<bool> {
        let Some(variables) = &self.forward_mode else { return Ok(false) };
        match variables.bind(py).get_item(intern!(py, "_current_level"))? {
            Some(level) => Ok(level.extract::<i64>()? >= 0),
            None => Ok(false),
        }
    }

    /// Returns whether a tensor has PyTorch's negative bit set: a lazy view of the negated memory,
    /// which the dispatcher materialises.
    fn is_any_negative<'a, 'py: 'a>(
        &self,
        py: Python<'py>,
        mut tensors: impl Iterator<Item = &'a Bound<'py, PyAny>>,
    ) -> PyResult<bool> {
        if let Some(stable) = self.stable {
            return stable.is_any_negative(tensors);
        }
        let negative = |tensor: &Bound<'py, PyAny>| -> PyResult<bool> {
            tensor.call_method0(intern!(py, "is_neg"))?.is_truthy()
        };
        tensors.try_fold(false, |found, tensor| Ok(found || negative(tensor)?))
    }

    fn is_grad_enabled(&self, py: Python<'_>) -> PyResult<bool> {
        match self.stable {
            Some(stable) => Ok(stable.is_grad_enabled()),
            None => self.is_grad_enabled.bind(py).call0()?.is_truthy(),
        }
    }

    /// Returns whether autograd records operations on these named tensors.
    pub(crate) fn is_recording<'a, 'py: 'a>(
        &self,
        py: Python<'py>,
        mut tensors: impl Iterator<Item = (&'static str, &'a Bound<'py, PyAny>)>,
    ) -> PyResult<bool> {
        // Checked first: most callers want no gradients.
        if !self.is_grad_enabled(py)? {
            return Ok(false);
        }
        let requires = |tensor: &Bound<'py, PyAny>| -> PyResult<bool> {
            tensor.getattr(intern!(py, "requires_grad"))?.is_truthy()
        };
        tensors.try_fold(false, |found, (_, tensor)| Ok(found || requires(tensor)?))
    }

    /// Returns whether autocast is on.
    pub(crate) fn is_autocasting(&self, py: Python<'_>) -> PyResult<bool> {
        match &self.autocasting {
            Some(function) => function.bind(py).call0()?.is_truthy(),
            None => Ok(false),
        }
    }

    /// Refuses what is no tensor, and what [`read`](Torch::read) must therefore not be given.
    #[inline]
    pub(crate) fn expect(&self, tensor: &Bound<'_, PyAny>, name: &str) -> PyResult<()> {
        let class = self.tensor.bind(tensor.py());
        if tensor.get_type_ptr().cast() == class.as_ptr() || tensor.is_instance(class)? {
            return Ok(());
        }
        let given = tensor.get_type();
        Err(PyTypeError::new_err(format!("{name} is a {given}, expected a torch.Tensor")))
    }

    /// Reads the memory of a tensor.
    #[inline]
    pub(crate) fn read(&self, tensor: &Bound<'_, PyAny>, name: &str) -> PyResult<Memory> {
        if let Some(stable) = self.stable
            && let Some(memory) = stable.read(tensor)
        {
            memory.exists(name)?;
            return Ok(memory);
        }
        if let Some(exchange) = self.exchange {
            return match exchange.read(tensor, name) {
                // GPU memory is freed in stream order, and checking every storage there would take
                // longer than a launch.
                Ok(memory) if memory.place == Place::Host || may_be_offset(memory.address) => {
                    holds(tensor, name, &memory).map(|()| memory)
                }
                Err(error) => Err(unreadable(tensor, name, error)),
                read => read,
            };
        }
        export(tensor, name)
    }

    /// Increments a tensor's version counter while grad mode is on: it was written in place.
    pub(crate) fn written(&self, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = tensor.py();
        if let Some(function) = &self.increment_version
            && self.is_grad_enabled(py)?
        {
            function.bind(py).call1((tensor,))?;
        }
        Ok(())
    }

    /// Returns PyTorch's current stream on a device.
    pub(crate) fn stream(&self, py: Python<'_>, ordinal: u32) -> PyResult<u64> {
        match (self.stable, self.exchange, &self.raw_stream) {
            // Preferred, since it does not check whether this thread is attached to Python.
            (Some(stable), ..) => stable.stream(ordinal),
            (None, Some(exchange), _) => exchange.stream(py, ordinal),
            (None, None, Some(function)) => function.bind(py).call1((ordinal,))?.extract(),
            (None, None, None) => Err(error::runtime("this PyTorch was built without CUDA")),
        }
    }

    /// Allocates a tensor like another one whose memory is known; returns it with its address.
    pub(crate) fn make_like<'py>(
        &self,
        like: &Bound<'py, PyAny>,
        memory: &Memory,
    ) -> PyResult<(Bound<'py, PyAny>, u64)> {
        if memory.is_dense()
            && let Some(made) = self.make_directly(like, memory)?
        {
            return Ok(made);
        }
        let made = self.empty_like.bind(like.py()).call1((like,));
        let made = made.map_err(|error| after_fork(like, error))?;
        let address = self.address(&made)?;
        Ok((made, address))
    }

    /// Allocates a tensor of the given layout without PyTorch's argument parser, in half the time.
    /// Returns None if that fails; the slow path then reports why.
    fn make_directly<'py>(
        &self,
        like: &Bound<'py, PyAny>,
        memory: &Memory,
    ) -> PyResult<Option<(Bound<'py, PyAny>, u64)>> {
        let py = like.py();
        let Memory { element, place, .. } = *memory;
        let Some(stable) = self.stable else { return Ok(None) };
        if let Place::Cuda(ordinal) = place
            && let Some(function) = &self.empty_strided_cuda
            && stable.knows_handles(like)
            && let Some(dtype) = self.dtype(element)
            // With deterministic algorithms, PyTorch's `empty` also fills the memory.
            && !stable.is_deterministic()
            && stable.is_current(ordinal)
        {
            let arguments = self.arguments(py, memory, dtype)?;
            let made = function.bind(py).call1(arguments);
            let made = made.map_err(|error| after_fork(like, error))?;
            // PyTorch's current device may differ from CUDA's until its next CUDA call.
            if let Some((address, found)) = stable.whereabouts(&made)
                && found == place
            {
                return Ok(Some((made, address)));
            }
        }
        let made = || -> PyResult<_> {
            let made = stable.make(memory.sizes(), memory.strides(), element, place)?;
            Ok((made.object(py)?, made.address()?))
        };
        Ok(made().ok())
    }

    /// Returns the arguments of `empty_strided_cuda`. Similar calls follow each other, so that the
    /// last few tuples are kept.
    fn arguments<'py>(
        &self,
        py: Python<'py>,
        memory: &Memory,
        dtype: &Py<PyAny>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        const MOST: usize = 8;
        let same = |(kept, _): &&(Memory, Py<PyTuple>)| {
            kept.element == memory.element
                && kept.dimensions == memory.dimensions
                && kept.sizes == memory.sizes
                && kept.strides == memory.strides
        };
        if let Some((_, arguments)) = lock(&self.made).iter().find(same) {
            return Ok(arguments.bind(py).clone());
        }
        // Without the lock: what Python allocates may start its garbage collector, which runs any
        // code, here or in another thread.
        let (sizes, strides) = (memory.sizes(), memory.strides());
        let arguments = (PyTuple::new(py, sizes)?, PyTuple::new(py, strides)?, dtype);
        let arguments = arguments.into_pyobject(py)?;
        let mut made = lock(&self.made);
        let oldest = (made.len() >= MOST).then(|| made.remove(0));
        made.push((*memory, arguments.clone().unbind()));
        drop(made);
        drop(oldest);
        Ok(arguments)
    }

    /// Returns PyTorch's `dtype` object of a result's element type.
    fn dtype(&self, element: Element) -> Option<&Py<PyAny>> {
        match element {
            Element::Float(DType::F16) => Some(&self.float16),
            Element::Float(DType::BF16) => Some(&self.bfloat16),
            Element::Float(DType::F32) => Some(&self.float32),
            Element::I32 => Some(&self.int32),
            _ => None,
        }
    }

    /// Allocates a contiguous tensor on the device of another; returns it with its address.
    pub(crate) fn make<'py>(
        &self,
        like: &Bound<'py, PyAny>,
        sizes: &[i64],
        element: Element,
        place: Place,
    ) -> PyResult<(Bound<'py, PyAny>, u64)> {
        let py = like.py();
        let mut all = [1; MOST_DIMENSIONS];
        let hidden = all.len() - sizes.len();
        all[hidden..].copy_from_slice(sizes);
        let strides = &contiguous(all)[hidden..];
        let mut memory = Memory::nowhere(element, place, sizes.len());
        memory.sizes[..sizes.len()].copy_from_slice(sizes);
        memory.strides[..sizes.len()].copy_from_slice(strides);
        if let Some(made) = self.make_directly(like, &memory)? {
            return Ok(made);
        }
        let dtype = self.dtype(element).unwrap_or(&self.float32);
        let arguments = PyDict::new(py);
        arguments.set_item(intern!(py, "dtype"), dtype)?;
        arguments.set_item(intern!(py, "device"), like.getattr(intern!(py, "device"))?)?;
        // Takes half the time of `empty`, which accepts more kinds of arguments.
        let shape = (PyTuple::new(py, sizes)?, PyTuple::new(py, strides)?);
        let made = self.empty_strided.bind(py).call(shape, Some(&arguments));
        let made = made.map_err(|error| after_fork(like, error))?;
        let address = self.address(&made)?;
        Ok((made, address))
    }

    fn address(&self, tensor: &Bound<'_, PyAny>) -> PyResult<u64> {
        if let Some(exchange) = self.exchange {
            return Ok(exchange.read(tensor, "out")?.address);
        }
        tensor.call_method0(intern!(tensor.py(), "data_ptr"))?.extract()
    }
}

/// Reads the memory of a tensor of a PyTorch before 2.10.
#[cold]
fn export(tensor: &Bound<'_, PyAny>, name: &str) -> PyResult<Memory> {
    // PyTorch refuses to export a tensor that requires grad, even where nothing is recorded.
    let tensor = tensor.call_method0(intern!(tensor.py(), "detach"))?;
    // -1: no stream of ours has to wait, since the work goes to PyTorch's current stream.
    Ok(dlpack::borrow(&tensor, name, |_| Ok(-1), None)?.memory)
}

/// Replaces PyTorch's error if the cause is a tensor without strided memory.
#[cold]
fn unreadable(tensor: &Bound<'_, PyAny>, name: &str, error: PyErr) -> PyErr {
    let layout = tensor.getattr(intern!(tensor.py(), "layout")).map(|it| it.to_string());
    match layout {
        Ok(layout) if error.is_instance_of::<PyRuntimeError>(tensor.py()) => {
            let why = match layout.as_str() {
                // Its dispatcher does not tell such tensors from others before.
                "torch.strided" => {
                    "it has no memory, as with is_grads_batched=True, where torch.func.vmap is served"
                        .to_owned()
                }
                _ => format!("its layout is {layout}"),
            };
            PyTypeError::new_err(format!(
                "{name} cannot be read ({why}), expected a dense torch.strided tensor"
            ))
        }
        _ => error,
    }
}

/// Why a nested tensor is refused, and what serves it.
const NESTED: &str =
    "it is nested; of a jagged one flash_attn_varlen_func takes values() and offsets().int()";

/// Refuses a tensor that is not strided (sparse, nested, quantized): there is no kernel for it, and
/// PyTorch's dispatcher would not say which argument it is.
pub(crate) fn is_strided(tensor: &Bound<'_, PyAny>, name: &str) -> PyResult<()> {
    let py = tensor.py();
    let layout = tensor.getattr(intern!(py, "layout"))?.to_string();
    let nested = tensor.getattr(intern!(py, "is_nested"))?.is_truthy()?;
    let quantized = tensor.getattr(intern!(py, "is_quantized"))?.is_truthy()?;
    let why = match (nested, quantized) {
        (true, _) => NESTED.to_owned(),
        (_, true) => "it is quantized".to_owned(),
        _ if layout == "torch.strided" => return Ok(()),
        _ => format!("its layout is {layout}"),
    };
    Err(PyTypeError::new_err(format!(
        "{name} cannot be read ({why}), expected a dense torch.strided tensor"
    )))
}

/// Refuses tensors for which PyTorch's dispatcher finds no kernel, or the wrong one: one tensor on
/// the device `meta` would make it treat all others as `meta`, with an undefined result.
pub(crate) fn check_dispatched<'a, 'py: 'a>(
    tensors: impl Iterator<Item = (&'static str, &'a Bound<'py, PyAny>)>,
) -> PyResult<()> {
    let mut first = None;
    for (name, tensor) in tensors {
        is_strided(tensor, name)?;
        let meta = tensor.getattr(intern!(tensor.py(), "is_meta"))?.is_truthy()?;
        let (first_name, first_meta) = *first.get_or_insert((name, meta));
        if meta != first_meta {
            let [here, there] = [meta, first_meta].map(|it| if it { "meta" } else { "memory" });
            return Err(PyValueError::new_err(format!(
                "{name} is on {here}, expected {there} like {first_name}"
            )));
        }
    }
    Ok(())
}

/// Refuses a CPU tensor whose storage ends before its last element: storages can be shrunk or
/// freed.
fn holds(tensor: &Bound<'_, PyAny>, name: &str, memory: &Memory) -> PyResult<()> {
    let py = tensor.py();
    if memory.sizes().contains(&0) {
        return Ok(());
    }
    let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
    let bytes: i64 = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
    let before: i64 = tensor.call_method0(intern!(py, "storage_offset"))?.extract()?;
    let before = before.checked_mul(memory.element.bytes() as i64);
    let end = before.and_then(|before| before.checked_add(memory.reach()?));
    match end.is_some_and(|end| end <= bytes) {
        true => Ok(()),
        false => Err(PyValueError::new_err(format!(
            "{name} has elements beyond the {bytes} bytes of its storage, expected all of them there"
        ))),
    }
}

/// Replaces PyTorch's error in a process that was forked after its parent used the GPU: PyTorch
/// only says that CUDA could not be initialised.
#[cold]
fn after_fork(like: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    let on_gpu = like.getattr(intern!(like.py(), "is_cuda")).and_then(|it| it.extract());
    match on_gpu {
        Ok(true) => process().call_driver().err().unwrap_or(error),
        _ => error,
    }
}
