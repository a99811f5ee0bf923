//! Results for arrays of any library that supports DLPack: memory allocated here, which the library
//! takes over.

use std::alloc::{Layout, alloc_zeroed};
use std::sync::Arc;

use cuda::{Buffer, Event, Stream};
use pyo3::exceptions::{PyBufferError, PyMemoryError};
use pyo3::prelude::*;

use crate::boundary::guard;
use crate::dlpack::{self, Export};
use crate::view::{Element, Place};
use crate::{error, gpu};

/// A result that a library takes over through DLPack.
#[pyclass(frozen, module = "flashcore._flashcore")]
pub(crate) struct Array {
    memory: Arc<Memory>,
    sizes: Vec<i64>,
    element: Element,
    /// Whether bf16 is exported as 16-bit integers.
    words: bool,
    place: Place,
}

enum Memory {
    /// Words of four bytes: aligned for every element type.
    Host(Vec<u32>),
    Device(Buffer),
}

impl Memory {
    fn new(place: Place, bytes: u64) -> PyResult<Arc<Memory>> {
        Ok(Arc::new(match place {
            Place::Host => Memory::Host(zeros((bytes as usize).div_ceil(4))?),
            Place::Cuda(ordinal) => {
                let gpu = gpu::device(ordinal)?;
                let buffer = Buffer::new(gpu.device(), bytes.max(16));
                Memory::Device(buffer.map_err(|error| error::library(error.into()))?)
            }
        }))
    }

    fn address(&self) -> u64 {
        match self {
            Memory::Host(words) => words.as_ptr() as u64,
            Memory::Device(buffer) => buffer.address().0,
        }
    }
}

impl Array {
    /// Allocates memory for a contiguous result.
    pub(crate) fn new(
        place: Place,
        sizes: Vec<i64>,
        element: Element,
        words: bool,
    ) -> PyResult<Array> {
        let bytes = match sizes.contains(&0) {
            true => Some(0),
            false => sizes
                .iter()
                .try_fold(element.bytes(), |all, size| all.checked_mul(u64::try_from(*size).ok()?)),
        };
        let bytes = bytes.filter(|bytes| *bytes <= isize::MAX as u64);
        let memory = Memory::new(place, bytes.ok_or_else(|| no_memory(&format!("{sizes:?}")))?)?;
        Ok(Array { memory, sizes, element, words, place })
    }

    pub(crate) fn address(&self) -> u64 {
        self.memory.address()
    }
}

#[pymethods]
impl Array {
    fn __dlpack_device__(&self) -> (i32, i32) {
        match self.place {
            Place::Host => (dlpack::CPU, 0),
            Place::Cuda(ordinal) => (dlpack::CUDA, ordinal as i32),
        }
    }

    /// Exports the memory to a consumer. On a GPU the consumer's stream waits for the result.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (kind, ordinal) = self.__dlpack_device__();
        if dl_device.is_some_and(|device| device != (kind, ordinal)) || copy == Some(true) {
            return Err(PyBufferError::new_err("a result is given where it is, without a copy"));
        }
        if let Place::Cuda(ordinal) = self.place {
            guard(|| py.detach(|| order(ordinal, stream)))?;
        }
        let export = Export {
            address: self.memory.address(),
            sizes: self.sizes.clone(),
            device: dlpack::Device { kind, ordinal },
            element: self.element,
            words: self.words,
            owner: self.memory.clone(),
        };
        export.capsule(py, max_version.is_some_and(|version| version >= (1, 0)))
    }
}

/// Makes a consumer's stream wait for ours. Without a stream, the host waits.
fn order(ordinal: u32, stream: Option<i64>) -> PyResult<()> {
    let gpu = gpu::device(ordinal)?;
    let ordered = || match stream {
        // By the protocol, -1 means that the consumer synchronises by itself.
        Some(-1) => Ok(()),
        Some(handle) if handle >= 0 => {
            // 1 and 2, DLPack's names for the default streams, are the driver's names too.
            // SAFETY: by the protocol a stream of the consumer's on this device.
            let consumer = unsafe { Stream::borrow(gpu.device(), handle as u64) };
            let event = Event::new(gpu.device())?;
            event.record(gpu.stream())?;
            consumer.wait(&event)
        }
        _ => gpu.stream().synchronize(),
    };
    ordered().map_err(|error: cuda::Error| error::library(error.into()))
}

/// Allocates zeroed words. The operating system's zero pages serve, so that nothing is written.
fn zeros(words: usize) -> PyResult<Vec<u32>> {
    if words == 0 {
        return Ok(Vec::new());
    }
    let layout = Layout::array::<u32>(words).map_err(|_| no_memory(&format!("[{words}]")))?;
    // SAFETY: the layout has a size; the memory, where there is some, is a vector's of this layout,
    // and zeros are numbers.
    unsafe {
        let memory = alloc_zeroed(layout).cast::<u32>();
        if memory.is_null() {
            return Err(no_memory(&format!("{} bytes", layout.size())));
        }
        Ok(Vec::from_raw_parts(memory, words, words))
    }
}

fn no_memory(what: &str) -> PyErr {
    PyMemoryError::new_err(format!("no memory for a result of {what}"))
}
