//! PyTorch's tensors.
//!
//! Everything that can be looked up once is kept in [`Torch`].

use std::sync::Mutex;

use flashcore::DType;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};

use crate::dlpack::{self, Exchange};
use crate::error;
use crate::process::{lock, process};
use crate::stable::Stable;
use crate::view::{Element, MOST_DIMENSIONS, Memory, Place, contiguous};

/// What is needed of the module `torch`.
pub(crate) struct Torch {
    tensor: Py<PyAny>,
    /// From PyTorch 2.10 on.
    exchange: Option<&'static Exchange>,
    /// From PyTorch 2.11 on.
    stable: Option<&'static Stable>,
    empty_strided: Py<PyAny>,
    /// The same on the current CUDA device, of sizes, strides and element type alone: what PyTorch's
    /// compiled programs call.
    empty_strided_cuda: Option<Py<PyAny>>,
    /// Its arguments in the last calls.
    made: Mutex<Vec<(Memory, Py<PyTuple>)>>,
    empty_like: Py<PyAny>,
    float32: Py<PyAny>,
    float16: Py<PyAny>,
    bfloat16: Py<PyAny>,
    int32: Py<PyAny>,
    is_grad_enabled: Py<PyAny>,
    /// Whether any kind of device has it on.
    autocasting: Option<Py<PyAny>>,
    increment_version: Option<Py<PyAny>>,
    /// How many modes want to see operators before they run.
    modes: Py<PyAny>,
    raw_stream: Option<Py<PyAny>>,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

/// Remembers the module `torch`.
pub(crate) fn adopt(module: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = module.py();
    let inner = module.getattr("_C")?;
    let tensor = module.getattr("Tensor")?;
    let graph = module.getattr("autograd").and_then(|autograd| autograd.getattr("graph"));
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
        is_grad_enabled: inner.getattr("is_grad_enabled")?.unbind(),
        autocasting: inner.getattr("_is_any_autocast_enabled").ok().map(Bound::unbind),
        increment_version: graph
            .and_then(|graph| graph.getattr("increment_version"))
            .ok()
            .map(Bound::unbind),
        modes: inner.getattr("_len_torch_dispatch_stack")?.unbind(),
        raw_stream: inner.getattr("_cuda_getCurrentRawStream").ok().map(Bound::unbind),
    };
    // A second import finds the first.
    let _ = TORCH.set(py, torch);
    Ok(())
}

/// Whether a call can go straight to the kernel.
pub(crate) enum Way {
    /// No tensor of PyTorch's.
    Foreign,
    /// PyTorch's dispatcher must see it: a subclass, a mode, a transformation.
    Dispatcher,
    Straight(&'static Torch),
}

impl Torch {
    /// The module that was adopted.
    pub(crate) fn get(py: Python<'_>) -> PyResult<&'static Torch> {
        TORCH.get(py).ok_or_else(|| error::runtime("PyTorch was not imported"))
    }

    /// How tensors, which come with their names, are to be treated.
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
            return match torch.has_modes(py)? || torch.is_any_negative(py, objects)? {
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
            (true, Some((name, tensor))) => Err(PyTypeError::new_err(format!(
                "{name} is a {}, expected a torch.Tensor like the others",
                tensor.get_type()
            ))),
        }
    }

    /// Whether something wants to see operators before they run.
    fn has_modes(&self, py: Python<'_>) -> PyResult<bool> {
        match self.stable {
            Some(stable) => Ok(stable.modes() > 0),
            None => self.modes.bind(py).call0()?.is_truthy(),
        }
    }

    /// Whether a tensor is a view that stands for the negative of what is in memory: the dispatcher makes
    /// it real.
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

    /// Whether autograd records what is done with some tensors, which come with their names.
    pub(crate) fn is_recording<'a, 'py: 'a>(
        &self,
        py: Python<'py>,
        mut tensors: impl Iterator<Item = (&'static str, &'a Bound<'py, PyAny>)>,
    ) -> PyResult<bool> {
        // One question first: most callers want no gradients.
        if !self.is_grad_enabled(py)? {
            return Ok(false);
        }
        let requires = |tensor: &Bound<'py, PyAny>| -> PyResult<bool> {
            tensor.getattr(intern!(py, "requires_grad"))?.is_truthy()
        };
        tensors.try_fold(false, |found, (_, tensor)| Ok(found || requires(tensor)?))
    }

    /// Whether PyTorch is to choose element types.
    pub(crate) fn is_autocasting(&self, py: Python<'_>) -> PyResult<bool> {
        match &self.autocasting {
            Some(function) => function.bind(py).call0()?.is_truthy(),
            None => Ok(false),
        }
    }

    /// What a tensor is.
    pub(crate) fn read(&self, tensor: &Bound<'_, PyAny>, name: &str) -> PyResult<Memory> {
        if let Some(exchange) = self.exchange {
            let memory = exchange.read(tensor, name);
            let memory = memory.map_err(|error| unreadable(tensor, name, error))?;
            // Where a GPU has it, it is freed in the order of its work, and a look takes longer than a launch.
            return match memory.place {
                Place::Host => holds(tensor, name, &memory).map(|()| memory),
                Place::Cuda(_) => Ok(memory),
            };
        }
        // Exporting a tensor that requires grad is refused, even where nothing records it.
        let tensor = tensor.call_method0(intern!(tensor.py(), "detach"))?;
        // No stream of ours is to wait: the work goes to PyTorch's own.
        Ok(dlpack::borrow(&tensor, name, |_| Ok(-1), None)?.memory)
    }

    /// Tells autograd, where it is listening, that a tensor was written.
    pub(crate) fn written(&self, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = tensor.py();
        if let Some(function) = &self.increment_version
            && self.is_grad_enabled(py)?
        {
            function.bind(py).call1((tensor,))?;
        }
        Ok(())
    }

    /// The stream on which PyTorch's work goes now.
    pub(crate) fn stream(&self, py: Python<'_>, ordinal: u32) -> PyResult<u64> {
        match (self.stable, self.exchange, &self.raw_stream) {
            // It does not ask Python whether this thread is attached.
            (Some(stable), ..) => stable.stream(ordinal),
            (None, Some(exchange), _) => exchange.stream(py, ordinal),
            (None, None, Some(function)) => function.bind(py).call1((ordinal,))?.extract(),
            (None, None, None) => Err(error::runtime("this PyTorch was built without CUDA")),
        }
    }

    /// A tensor like another one, of which it is known what it is, and where it is.
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

    /// A tensor that lies like this, without PyTorch's reading of arguments: in half the time. None where
    /// that does not work, and the long way finds out why.
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
            // Where the same bits are asked for, the dispatcher's function fills memory besides.
            && !stable.is_deterministic()
            && stable.is_current(ordinal)
        {
            let arguments = self.arguments(py, memory, dtype)?;
            let made = function.bind(py).call1(arguments);
            let made = made.map_err(|error| after_fork(like, error))?;
            // PyTorch may have chosen a device that CUDA will hear of later.
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

    /// What a tensor on the current device is made from. Calls alike follow each other, so that the last
    /// few are kept.
    fn arguments<'py>(
        &self,
        py: Python<'py>,
        memory: &Memory,
        dtype: &Py<PyAny>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        const MOST: usize = 8;
        let mut made = lock(&self.made);
        let same = |(kept, _): &&(Memory, Py<PyTuple>)| {
            kept.element == memory.element
                && kept.sizes() == memory.sizes()
                && kept.strides() == memory.strides()
        };
        if let Some((_, arguments)) = made.iter().find(same) {
            return Ok(arguments.bind(py).clone());
        }
        let (sizes, strides) = (memory.sizes(), memory.strides());
        let arguments = (PyTuple::new(py, sizes)?, PyTuple::new(py, strides)?, dtype);
        let arguments = arguments.into_pyobject(py)?;
        if made.len() == MOST {
            made.remove(0);
        }
        made.push((*memory, arguments.clone().unbind()));
        Ok(arguments)
    }

    /// An element type of answers as PyTorch has it.
    fn dtype(&self, element: Element) -> Option<&Py<PyAny>> {
        match element {
            Element::Float(DType::F16) => Some(&self.float16),
            Element::Float(DType::BF16) => Some(&self.bfloat16),
            Element::Float(DType::F32) => Some(&self.float32),
            Element::I32 => Some(&self.int32),
            _ => None,
        }
    }

    /// A tensor without gaps on the device of another, and where it is.
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
        // In half the time that `empty` takes, which looks for more kinds of arguments.
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

/// PyTorch's error, or what is behind it where a tensor has no memory of the usual kind.
#[cold]
fn unreadable(tensor: &Bound<'_, PyAny>, name: &str, error: PyErr) -> PyErr {
    let layout = tensor.getattr(intern!(tensor.py(), "layout")).map(|it| it.to_string());
    match layout {
        Ok(layout) if error.is_instance_of::<PyRuntimeError>(tensor.py()) => {
            PyTypeError::new_err(format!(
                "{name} cannot be read (its layout is {layout}), expected a dense torch.strided tensor"
            ))
        }
        _ => error,
    }
}

/// Refuses a tensor that lies otherwise than step by step, for which nobody has a kernel: PyTorch's
/// dispatcher would not say whose it is.
pub(crate) fn is_strided(tensor: &Bound<'_, PyAny>, name: &str) -> PyResult<()> {
    let py = tensor.py();
    let layout = tensor.getattr(intern!(py, "layout"))?.to_string();
    let nested = tensor.getattr(intern!(py, "is_nested"))?.is_truthy()?;
    let quantized = tensor.getattr(intern!(py, "is_quantized"))?.is_truthy()?;
    let why = match (nested, quantized) {
        (true, _) => "it is nested".to_owned(),
        (_, true) => "it is quantized".to_owned(),
        _ if layout == "torch.strided" => return Ok(()),
        _ => format!("its layout is {layout}"),
    };
    Err(PyTypeError::new_err(format!(
        "{name} cannot be read ({why}), expected a dense torch.strided tensor"
    )))
}

/// Refuses tensors that PyTorch's dispatcher finds no kernel for, or the wrong one: beside one without
/// memory, of its device `meta`, all others would be taken for such, and the answer be anything.
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

/// Refuses a tensor on the CPU whose memory ends before its last element: storages can be made smaller,
/// and those whose memory was given back have none.
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

/// PyTorch's error, or what is behind it in a process that was forked after its parent used the GPU:
/// PyTorch only says that CUDA could not be initialised.
#[cold]
fn after_fork(like: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    let on_gpu = like.getattr(intern!(like.py(), "is_cuda")).and_then(|it| it.extract());
    match on_gpu {
        Ok(true) => process().call_driver().err().unwrap_or(error),
        _ => error,
    }
}
