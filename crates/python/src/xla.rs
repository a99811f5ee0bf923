//! XLA's foreign function interface, by which JAX calls into us from a compiled program.
//!
//! The C structures are those of `xla/ffi/api/c_api.h`, which JAX ships; the parts that we need are
//! declared here. Every structure begins with its size: a later version can be read as ours, and an
//! earlier one is recognised by its size.

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::null_mut;

use flashcore::DType;
use pyo3::exceptions::{PyMemoryError, PyNotImplementedError, PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::boundary::{attached, guard};
use crate::error;
use crate::view::{Element, MOST_DIMENSIONS, Memory, Place, contiguous};

/// The version of these structures. Minor versions add to them.
const MAJOR: c_int = 0;
const MINOR: c_int = 3;

/// A function that XLA calls; returns an error of XLA's, or null.
pub(crate) type Handler = extern "C" fn(*mut CallFrame) -> *mut c_void;

/// The header of an extension of a structure.
#[repr(C)]
struct Extension {
    size: usize,
    kind: c_int,
    next: *mut Extension,
}

/// The only kind of extension: a query about the handler instead of a call.
const METADATA: c_int = 1;

#[repr(C)]
struct MetadataExtension {
    base: Extension,
    metadata: *mut Metadata,
}

/// A handler's description of itself.
#[repr(C)]
struct Metadata {
    size: usize,
    version: Version,
    /// Flags of what XLA may do with the handler: none.
    traits: u32,
}

#[repr(C)]
struct Version {
    size: usize,
    extension: *mut Extension,
    major: c_int,
    minor: c_int,
}

/// The functions of XLA that a handler can call.
#[repr(C)]
struct Api {
    size: usize,
    extension: *mut Extension,
    version: Version,
    internal: *const c_void,
    error_create: Option<unsafe extern "C" fn(*mut ErrorCreate) -> *mut c_void>,
    error_message: Unused,
    error_destroy: Option<unsafe extern "C" fn(*mut ErrorDestroy)>,
    handler_register: Unused,
    stream_get: Option<unsafe extern "C" fn(*mut StreamGet) -> *mut c_void>,
    /// Types, contexts and state (4), memory (2), threads (2), futures (3), the run.
    others: [Unused; 12],
    device_ordinal_get: Option<unsafe extern "C" fn(*mut OrdinalGet) -> *mut c_void>,
}

type Unused = *const c_void;

#[repr(C)]
struct ErrorCreate {
    size: usize,
    extension: *mut Extension,
    message: *const c_char,
    code: c_int,
}

#[repr(C)]
struct ErrorDestroy {
    size: usize,
    extension: *mut Extension,
    error: *mut c_void,
}

#[repr(C)]
struct StreamGet {
    size: usize,
    extension: *mut Extension,
    context: *mut c_void,
    stream: *mut c_void,
}

#[repr(C)]
struct OrdinalGet {
    size: usize,
    extension: *mut Extension,
    context: *mut c_void,
    ordinal: i32,
}

/// A call, or a query about the handler.
#[repr(C)]
pub(crate) struct CallFrame {
    size: usize,
    extension: *mut Extension,
    api: *const Api,
    context: *mut c_void,
    stage: c_int,
    arguments: Buffers,
    results: Buffers,
    attributes: Attributes,
}

#[repr(C)]
struct Buffers {
    size: usize,
    extension: *mut Extension,
    count: i64,
    /// The kind of each; there is only one.
    kinds: *const c_int,
    buffers: *const *const Buffer,
}

#[repr(C)]
struct Buffer {
    size: usize,
    extension: *mut Extension,
    dtype: c_int,
    data: *mut c_void,
    rank: i64,
    dims: *const i64,
}

#[repr(C)]
struct Attributes {
    size: usize,
    extension: *mut Extension,
    count: i64,
    kinds: *const c_int,
    names: *const *const Text,
    values: *const *const c_void,
}

/// Kinds of attributes.
const SCALAR: c_int = 3;
const STRING: c_int = 4;

#[repr(C)]
struct Text {
    bytes: *const u8,
    length: usize,
}

#[repr(C)]
struct Scalar {
    dtype: c_int,
    value: *const c_void,
}

/// XLA's numbers for element types.
const PRED: c_int = 1;
const S64: c_int = 5;
const F32: c_int = 11;

/// Converts XLA's number of an element type.
fn element(dtype: c_int) -> Element {
    match dtype {
        2 => Element::Float(DType::Int8),
        4 => Element::I32,
        10 => Element::Float(DType::F16),
        F32 => Element::Float(DType::F32),
        16 => Element::Float(DType::BF16),
        19 => Element::Float(DType::E5M2),
        20 => Element::Float(DType::E4M3),
        PRED => Element::Other("bool", 8),
        S64 => Element::Other("int", 64),
        12 => Element::Other("float", 64),
        _ => Element::Other("other", 8),
    }
}

/// A call of a handler by XLA.
pub(crate) struct Call<'a> {
    frame: &'a CallFrame,
    api: &'a Api,
}

/// Answers XLA: a query about the handler, or a call by `run`.
///
/// # Safety
///
/// The frame must be XLA's.
pub(crate) unsafe fn answer(
    frame: *mut CallFrame,
    run: impl FnOnce(&Call<'_>) -> PyResult<()>,
) -> *mut c_void {
    // SAFETY: the caller's promise: XLA's structures, alive for the call.
    let frame = unsafe { &*frame };
    // SAFETY: the same.
    let (api, extension) = unsafe { (frame.api.as_ref(), frame.extension.as_ref()) };
    if let Some(extension) = extension
        && extension.kind == METADATA
    {
        // SAFETY: the kind says what it is.
        unsafe {
            let extension = &*(&raw const *extension).cast::<MetadataExtension>();
            describe(extension.metadata, api);
        }
        return null_mut();
    }
    let Some(api) = api else { return null_mut() };
    let call = Call { frame, api };
    match guard(|| call.supported().and_then(|()| run(&call))) {
        Ok(()) => null_mut(),
        Err(error) => call.error(error),
    }
}

/// Reports the interface version that we use: ours, or XLA's if that is earlier.
///
/// # Safety
///
/// The metadata must be XLA's.
unsafe fn describe(metadata: *mut Metadata, api: Option<&Api>) {
    // SAFETY: the caller's promise.
    let metadata = unsafe { &mut *metadata };
    let theirs = api.map(|api| &api.version);
    metadata.version.major = MAJOR;
    metadata.version.minor = match theirs {
        Some(version) if version.major == MAJOR => version.minor.min(MINOR),
        _ => MINOR,
    };
    metadata.traits = 0;
}

impl Call<'_> {
    /// Refuses structures that end before the last field that we read.
    fn supported(&self) -> PyResult<()> {
        let Version { major, minor, .. } = self.api.version;
        let whole = self.api.size >= size_of::<Api>() && self.frame.size >= size_of::<CallFrame>();
        match major == MAJOR && whole {
            true => Ok(()),
            false => Err(PyNotImplementedError::new_err(format!(
                "this jaxlib has version {major}.{minor} of XLA's FFI, expected {MAJOR}.{MINOR} or \
                 one that is compatible with it"
            ))),
        }
    }

    /// Returns the number of input buffers.
    pub(crate) fn arguments(&self) -> usize {
        self.frame.arguments.count as usize
    }

    /// Returns the number of output buffers.
    pub(crate) fn results(&self) -> usize {
        self.frame.results.count as usize
    }

    /// Returns an input buffer. If it has more than `most` dimensions, the leading ones, which
    /// `vmap` added, are folded into the first.
    pub(crate) fn argument(&self, at: usize, most: usize, place: Place) -> PyResult<Memory> {
        read(&self.frame.arguments, at, most, place)
    }

    /// Returns an output buffer, with leading dimensions folded likewise.
    pub(crate) fn result(&self, at: usize, most: usize, place: Place) -> PyResult<Memory> {
        read(&self.frame.results, at, most, place)
    }

    /// Returns an optional integer attribute.
    pub(crate) fn integer(&self, name: &str) -> Option<i64> {
        // SAFETY: a number of this type.
        self.scalar(name, S64).map(|value| unsafe { value.cast::<i64>().read_unaligned() })
    }

    /// Returns an optional f32 attribute.
    pub(crate) fn number(&self, name: &str) -> Option<f32> {
        // SAFETY: a number of this type.
        self.scalar(name, F32).map(|value| unsafe { value.cast::<f32>().read_unaligned() })
    }

    /// Returns whether a boolean attribute is present and true.
    pub(crate) fn flag(&self, name: &str) -> bool {
        // SAFETY: a truth value is a byte.
        self.scalar(name, PRED).is_some_and(|value| unsafe { *value.cast::<u8>() } != 0)
    }

    fn scalar(&self, name: &str, dtype: c_int) -> Option<*const c_void> {
        // SAFETY: the kind says what it is.
        let scalar = unsafe { &*self.attribute(name, SCALAR)?.cast::<Scalar>() };
        (scalar.dtype == dtype).then_some(scalar.value)
    }

    /// Returns a required string attribute.
    pub(crate) fn text(&self, name: &str) -> PyResult<&str> {
        // SAFETY: the kind says what it is.
        let text = self.attribute(name, STRING).map(|it| unsafe { text(it.cast::<Text>()) });
        let text = text.and_then(|bytes| std::str::from_utf8(bytes).ok());
        text.ok_or_else(|| error::value(format!("the call has no attribute `{name}`")))
    }

    fn attribute(&self, name: &str, kind: c_int) -> Option<*const c_void> {
        let Attributes { count, kinds, names, values, .. } = self.frame.attributes;
        // SAFETY: as many names, kinds and values as it says.
        let found = (0..count as usize).find(|at| unsafe {
            text(*names.add(*at)) == name.as_bytes() && *kinds.add(*at) == kind
        });
        // SAFETY: the same.
        found.map(|at| unsafe { *values.add(at) })
    }

    /// Returns the device that the call runs on.
    pub(crate) fn ordinal(&self) -> PyResult<u32> {
        let (size, context) = (size_of::<OrdinalGet>(), self.frame.context);
        let mut asked = OrdinalGet { size, extension: null_mut(), context, ordinal: 0 };
        let get = self.api.device_ordinal_get;
        // SAFETY: XLA's own function and context.
        self.done(get.map(|get| unsafe { get(&raw mut asked) }), "device")?;
        u32::try_from(asked.ordinal).map_err(error::runtime)
    }

    /// Returns the driver's handle of the stream that the work must go to.
    pub(crate) fn stream(&self) -> PyResult<u64> {
        let (size, context) = (size_of::<StreamGet>(), self.frame.context);
        let mut asked = StreamGet { size, extension: null_mut(), context, stream: null_mut() };
        let get = self.api.stream_get;
        // SAFETY: XLA's own function and context.
        self.done(get.map(|get| unsafe { get(&raw mut asked) }), "stream")?;
        Ok(asked.stream as u64)
    }

    /// Checks that XLA's function exists and returned no error.
    fn done(&self, answer: Option<*mut c_void>, what: &str) -> PyResult<()> {
        match answer {
            Some(error) if error.is_null() => Ok(()),
            found => {
                if let (Some(error), Some(destroy)) = (found, self.api.error_destroy) {
                    let size = size_of::<ErrorDestroy>();
                    let mut given = ErrorDestroy { size, extension: null_mut(), error };
                    // SAFETY: XLA's own function, and an error that it gave us.
                    unsafe { destroy(&raw mut given) };
                }
                Err(error::runtime(format!("XLA does not say which {what} the call is for")))
            }
        }
    }

    /// Makes an XLA error, which raises an exception with this text in Python, from a Python error,
    /// which is dropped while Python is attached.
    fn error(&self, error: PyErr) -> *mut c_void {
        let (code, text) = attached(move |py| (code(&error, py), error.value(py).to_string()))
            .unwrap_or_else(|| (13, "FlashCore was called while Python ended".to_owned()));
        let message = CString::new(text.replace('\0', " ")).unwrap_or_default();
        let (size, message) = (size_of::<ErrorCreate>(), message.as_c_str());
        let mut given =
            ErrorCreate { size, extension: null_mut(), message: message.as_ptr(), code };
        // SAFETY: XLA's own function, which copies the text.
        self.api.error_create.map_or(null_mut(), |create| unsafe { create(&raw mut given) })
    }
}

/// Returns XLA's status code for a kind of exception.
fn code(error: &PyErr, py: Python<'_>) -> c_int {
    let is_value = error.is_instance_of::<PyValueError>(py);
    match () {
        () if is_value || error.is_instance_of::<PyTypeError>(py) => 3,
        () if error.is_instance_of::<PyMemoryError>(py) => 8,
        () if error.is_instance_of::<PyNotImplementedError>(py) => 12,
        () => 13,
    }
}

/// # Safety
///
/// It must be a text of XLA's, which lives for as long as the call.
unsafe fn text<'a>(text: *const Text) -> &'a [u8] {
    // SAFETY: the caller's promise.
    let Text { bytes, length } = unsafe { &*text };
    match length {
        0 => &[],
        // SAFETY: the same.
        _ => unsafe { std::slice::from_raw_parts(*bytes, *length) },
    }
}

fn read(buffers: &Buffers, at: usize, most: usize, place: Place) -> PyResult<Memory> {
    if at as i64 >= buffers.count {
        return Err(error::value(format!("the call has no buffer {at}")));
    }
    // SAFETY: there are as many as it says, and all are buffers.
    let buffer = unsafe { &**buffers.buffers.add(at) };
    let dims = match buffer.rank {
        // `dims` may be null.
        0 => &[],
        // SAFETY: as many dimensions as it says.
        rank => unsafe { std::slice::from_raw_parts(buffer.dims, rank as usize) },
    };
    let most = most.min(MOST_DIMENSIONS);
    let folded = dims.len().saturating_sub(most);
    let mut sizes = [1; MOST_DIMENSIONS];
    let dimensions = dims.len() - folded;
    sizes[..dimensions].copy_from_slice(&dims[folded..]);
    sizes[0] *= dims[..folded].iter().product::<i64>();
    Ok(Memory {
        address: buffer.data as u64,
        dimensions,
        sizes,
        strides: contiguous(sizes),
        element: element(buffer.dtype),
        place,
    })
}
