//! The library that a call's tensors belong to: PyTorch, or any other through DLPack. Both are
//! read, allocated and ordered on streams through [`Library`].

use std::cell::{Cell, RefCell};

use cuda::Stream;
use flashcore::DType;
use flashcore::gpu::Gpu;
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyEllipsis, PyNotImplemented, PyTuple};

use crate::array::Array;
use crate::dlpack::{self, Lent};
use crate::error;
use crate::gpu;
use crate::torch::{self, Torch, Way};
use crate::view::{Element, Memory, Place};

/// The library that a call's tensors belong to.
pub(crate) struct Library<'py> {
    kind: Kind<'py>,
}

enum Kind<'py> {
    Torch {
        torch: &'static Torch,
        /// The first tensor of the call; results go to its device.
        first: Bound<'py, PyAny>,
        /// Contiguous copies of tensors that kernels cannot read in place, alive until the launch.
        copies: RefCell<Vec<Bound<'py, PyAny>>>,
        /// Whether the memory of some tensor could not be read.
        unreadable: Cell<bool>,
    },
    Arrays {
        /// Set if 16-bit integers stand for bf16 bits; the value is what signed 8-bit integers
        /// stand for.
        words: Option<DType>,
        lent: RefCell<Vec<Lent<'py>>>,
    },
}

/// A tensor argument that may be missing, with its name.
pub(crate) type Named<'py> = (&'static str, Option<Bound<'py, PyAny>>);

/// A newly allocated result.
pub(crate) struct Made<'py> {
    pub(crate) object: Bound<'py, PyAny>,
    pub(crate) address: u64,
}

/// Who handles a call.
pub(crate) enum Choice<'py> {
    /// We do, on tensors of this library.
    Ours(Library<'py>),
    /// Someone else does; this value is returned to Python to say so.
    Theirs(Bound<'py, PyAny>),
}

/// The path by which a call arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entrance {
    /// From the public function that a user called; the tensors may belong to any library.
    Function,
    /// From PyTorch's dispatcher.
    Dispatcher,
    /// With DLPack arrays.
    Arrays,
    /// With DLPack arrays where 16-bit integers stand for bf16 bits, and signed 8-bit integers for
    /// this type.
    Words(DType),
}

impl FromPyObject<'_, '_> for Entrance {
    type Error = PyErr;

    fn extract(name: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        match name.extract::<&str>()? {
            "function" => Ok(Entrance::Function),
            "dispatcher" => Ok(Entrance::Dispatcher),
            "arrays" => Ok(Entrance::Arrays),
            "words" => Ok(Entrance::Words(DType::E5M2)),
            "words and integers" => Ok(Entrance::Words(DType::Int8)),
            other => Err(error::value(format!("there is no entrance `{other}`"))),
        }
    }
}

impl<'py> Library<'py> {
    /// Finds the library of a call's tensors, at least one of which must be given.
    pub(crate) fn of(
        py: Python<'py>,
        entrance: Entrance,
        tensors: &[Named<'py>],
    ) -> PyResult<Choice<'py>> {
        let given = || tensors.iter().filter_map(|(name, it)| Some((*name, it.as_ref()?)));
        let torch = |torch: &'static Torch| -> PyResult<Library<'py>> {
            let Some((_, first)) = given().next() else {
                return Err(PyTypeError::new_err("expected tensors"));
            };
            let (first, copies) = (first.clone(), RefCell::default());
            let unreadable = Cell::new(false);
            Ok(Library { kind: Kind::Torch { torch, first, copies, unreadable } })
        };
        let arrays = |words| Library { kind: Kind::Arrays { words, lent: RefCell::default() } };
        Ok(Choice::Ours(match entrance {
            Entrance::Function => match Torch::way(py, given())? {
                Way::Straight(found) if found.is_recording(py, given())? => {
                    return Ok(Choice::Theirs(PyEllipsis::get(py).to_owned().into_any()));
                }
                Way::Straight(found) => torch(found)?,
                Way::Dispatcher => {
                    return Ok(Choice::Theirs(PyNotImplemented::get(py).to_owned().into_any()));
                }
                Way::Foreign => return Ok(Choice::Theirs(py.None().into_bound(py))),
            },
            Entrance::Dispatcher => torch(Torch::get(py)?)?,
            Entrance::Arrays => arrays(None),
            Entrance::Words(dtype) => arrays(Some(dtype)),
        }))
    }

    /// Reads the memory of a tensor.
    #[inline]
    pub(crate) fn read(&self, tensor: &Bound<'py, PyAny>, name: &str) -> PyResult<Memory> {
        match &self.kind {
            Kind::Torch { torch, unreadable, .. } => {
                torch.expect(tensor, name)?;
                let read = torch.read(tensor, name);
                read.map_err(|error| why_unread(error, tensor, name, unreadable))
            }
            Kind::Arrays { .. } => Ok(self.borrow(tensor, name)?.0),
        }
    }

    /// Returns whether some tensor has no readable memory, so that only PyTorch's dispatcher can
    /// decide.
    pub(crate) fn is_unreadable(&self) -> bool {
        matches!(&self.kind, Kind::Torch { unreadable, .. } if unreadable.get())
    }

    /// Reads the memory of a tensor that will be written.
    pub(crate) fn read_mutable(&self, tensor: &Bound<'py, PyAny>, name: &str) -> PyResult<Memory> {
        let memory = match &self.kind {
            Kind::Torch { .. } => self.read(tensor, name)?,
            Kind::Arrays { .. } => {
                let (memory, read_only) = self.borrow(tensor, name)?;
                if read_only {
                    return Err(PyValueError::new_err(format!(
                        "{name} is read-only, expected an array that can be written"
                    )));
                }
                memory
            }
        };
        if memory.shares_elements() {
            return Err(PyValueError::new_err(format!(
                "{name} has elements that share memory, expected one place for each"
            )));
        }
        Ok(memory)
    }

    /// Reads a tensor that must be contiguous. A PyTorch tensor that is not is copied.
    pub(crate) fn read_whole(&self, tensor: &Bound<'py, PyAny>, name: &str) -> PyResult<Memory> {
        self.read_or_copy(tensor, name, Memory::is_contiguous)
    }

    /// Reads a tensor of rows that every kernel must be able to walk. A PyTorch tensor that does
    /// not qualify is copied.
    pub(crate) fn read_walkable(&self, tensor: &Bound<'py, PyAny>, name: &str) -> PyResult<Memory> {
        self.read_or_copy(tensor, name, Memory::is_walkable)
    }

    fn read_or_copy(
        &self,
        tensor: &Bound<'py, PyAny>,
        name: &str,
        fits: impl FnOnce(&Memory) -> bool,
    ) -> PyResult<Memory> {
        let memory = self.read(tensor, name)?;
        match &self.kind {
            Kind::Torch { torch, copies, .. } if !fits(&memory) => {
                // One without gaps at an odd address is what `contiguous` gives back itself.
                let copy = match memory.is_contiguous() {
                    true => tensor.call_method0(pyo3::intern!(tensor.py(), "clone")),
                    false => tensor.call_method0(pyo3::intern!(tensor.py(), "contiguous")),
                };
                let copy = copy.map_err(|error| no_memory(error, tensor.py(), memory.place))?;
                let memory = torch.read(&copy, name)?;
                copies.borrow_mut().push(copy);
                Ok(memory)
            }
            _ => Ok(memory),
        }
    }

    fn borrow(&self, tensor: &Bound<'py, PyAny>, name: &str) -> PyResult<(Memory, bool)> {
        let Kind::Arrays { words, lent } = &self.kind else {
            return Err(error::runtime("PyTorch's tensors are not borrowed"));
        };
        // On a GPU the work goes to a stream of ours: the DLPack protocol offers no common one.
        let stream =
            |ordinal: u32| -> PyResult<i64> { Ok(gpu::device(ordinal)?.stream().handle() as i64) };
        let found = dlpack::borrow(tensor, name, stream, *words)?;
        let answer = (found.memory, found.read_only);
        lent.borrow_mut().push(found);
        Ok(answer)
    }

    /// Allocates a contiguous result.
    pub(crate) fn make(
        &self,
        py: Python<'py>,
        sizes: &[i64],
        element: Element,
        place: Place,
    ) -> PyResult<Made<'py>> {
        match &self.kind {
            Kind::Torch { torch, first, .. } => {
                let made = torch.make(first, sizes, element, place);
                let (object, address) = made.map_err(|error| no_memory(error, py, place))?;
                Ok(Made { object, address })
            }
            Kind::Arrays { words, .. } => {
                let array = Array::new(place, sizes.to_vec(), element, words.is_some())?;
                let address = array.address();
                Ok(Made { object: Bound::new(py, array)?.into_any(), address })
            }
        }
    }

    /// Allocates a result; if it equals a contiguous tensor of the call in shape and type, by the
    /// faster `empty_like`.
    pub(crate) fn make_like(
        &self,
        tensor: &Bound<'py, PyAny>,
        given: &Memory,
        answer: &Memory,
    ) -> PyResult<Made<'py>> {
        if let Kind::Torch { torch, .. } = &self.kind
            && given.sizes == answer.sizes
            && given.element == answer.element
            && given.is_contiguous()
        {
            let made = torch.make_like(tensor, given);
            let made = made.map_err(|error| no_memory(error, tensor.py(), given.place));
            let (object, address) = made?;
            return Ok(Made { object, address });
        }
        self.make(tensor.py(), answer.sizes(), answer.element, answer.place)
    }

    /// Returns whether autocast is on, so that PyTorch chooses the element types of the call.
    pub(crate) fn is_autocasting(&self, py: Python<'py>) -> PyResult<bool> {
        match &self.kind {
            Kind::Torch { torch, .. } => torch.is_autocasting(py),
            Kind::Arrays { .. } => Ok(false),
        }
    }

    /// Tells autograd that tensors were written in place, so that stale saved tensors are detected.
    pub(crate) fn written(&self, tensors: &[&Option<Bound<'py, PyAny>>]) -> PyResult<()> {
        let Kind::Torch { torch, .. } = &self.kind else { return Ok(()) };
        tensors.iter().copied().flatten().try_for_each(|tensor| torch.written(tensor))
    }

    /// Waits for what was written to an array of the caller's. Results that we allocate are ordered
    /// when their library takes them over; of this one it does not know that a stream of ours is
    /// involved.
    pub(crate) fn finish(&self, py: Python<'py>, stream: &Stream) -> PyResult<()> {
        match &self.kind {
            Kind::Torch { .. } => Ok(()),
            Kind::Arrays { .. } => {
                py.detach(|| stream.synchronize()).map_err(|error| error::library(error.into()))
            }
        }
    }

    /// Returns the stream that the work goes to.
    pub(crate) fn stream(&self, py: Python<'py>, gpu: &Gpu) -> PyResult<Stream> {
        let handle = match &self.kind {
            Kind::Torch { torch, .. } => torch.stream(py, gpu.device().ordinal())?,
            Kind::Arrays { .. } => gpu.stream().handle(),
        };
        // SAFETY: PyTorch's current stream of this device, or our own; both stay.
        Ok(unsafe { Stream::borrow(gpu.device(), handle) })
    }
}

/// Allocates PyTorch tensors with the layout of others, bypassing PyTorch's argument parser.
pub(crate) fn empty_like<'py>(tensors: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyTuple>> {
    let torch = Torch::get(tensors.py())?;
    let made = tensors.iter_borrowed().map(|tensor| {
        let (made, _) = torch.make_like(&tensor, &torch.read(&tensor, "a tensor")?)?;
        Ok(made)
    });
    PyTuple::new(tensors.py(), crate::boundary::collect(made)?)
}

/// Returns the error for a PyTorch tensor that was not read, and notes if its memory is unreadable.
#[cold]
fn why_unread(
    error: PyErr,
    tensor: &Bound<'_, PyAny>,
    name: &str,
    unreadable: &Cell<bool>,
) -> PyErr {
    // A `ValueError` means that the memory was read and does not fit. Otherwise the tensor may still
    // have a kernel in PyTorch's dispatcher, unless it is not strided at all.
    if error.is_instance_of::<PyValueError>(tensor.py()) {
        return error;
    }
    match torch::is_strided(tensor, name) {
        Ok(()) => {
            unreadable.set(true);
            error
        }
        Err(odd) => odd,
    }
}

/// Converts PyTorch's allocation error: on the CPU PyTorch raises a plain `RuntimeError`.
#[cold]
fn no_memory(error: PyErr, py: Python<'_>, place: Place) -> PyErr {
    match place == Place::Host && error.is_instance_of::<PyRuntimeError>(py) {
        true => PyMemoryError::new_err(error.value(py).to_string()),
        false => error,
    }
}
