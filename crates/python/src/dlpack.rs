//! DLPack: the protocol by which array libraries share memory. Borrows the arrays of others and
//! exports results.
//!
//! The structures are those of version 1 of the protocol; unversioned tensors of the protocol
//! before it are accepted too.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use flashcore::DType;
use pyo3::exceptions::{PyAttributeError, PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::view::{Element, MOST_DIMENSIONS, Memory, Place, contiguous};

pub(crate) const CPU: i32 = 1;
pub(crate) const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;
const CUDA_MANAGED: i32 = 13;

const INT: u8 = 0;
const UINT: u8 = 1;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;
const FLOAT8_E4M3FN: u8 = 10;
const FLOAT8_E5M2: u8 = 12;

/// Flag of a tensor that must not be written.
const READ_ONLY: u64 = 1;

const NAME: &CStr = c"dltensor";
const NAME_VERSIONED: &CStr = c"dltensor_versioned";

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Device {
    pub(crate) kind: i32,
    pub(crate) ordinal: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
pub(crate) struct Tensor {
    data: *mut c_void,
    device: Device,
    dimensions: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Version {
    major: u32,
    minor: u32,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct ManagedVersioned {
    version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: Tensor,
}

/// `DLPackExchangeAPI`: a producer's C functions, which avoid making capsules.
#[repr(C)]
pub(crate) struct Exchange {
    version: Version,
    previous: *const c_void,
    allocate: *const c_void,
    managed_from_object: *const c_void,
    managed_to_object: *const c_void,
    tensor_from_object: Option<unsafe extern "C" fn(*mut c_void, *mut Tensor) -> i32>,
    current_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> i32>,
}

// SAFETY: the table is constant; its functions may be called by any thread attached to Python,
// which the callers here are.
unsafe impl Sync for Exchange {}

impl Exchange {
    /// Returns the exchange functions of a tensor type, if it has them. They live as long as the
    /// process.
    pub(crate) fn of(kind: &Bound<'_, PyAny>) -> Option<&'static Exchange> {
        let capsule = kind.getattr(intern!(kind.py(), "__dlpack_c_exchange_api__")).ok()?;
        let capsule = capsule.cast::<PyCapsule>().ok()?;
        let pointer = capsule.pointer_checked(Some(c"dlpack_exchange_api")).ok()?;
        // SAFETY: by the protocol a capsule of this name points to the structure, which is never
        // freed; the version comes first in all of its versions.
        let exchange = unsafe { pointer.cast::<Exchange>().as_ref() };
        let whole = exchange.tensor_from_object.is_some() && exchange.current_stream.is_some();
        (exchange.version.major == 1 && whole).then_some(exchange)
    }

    /// Reads the memory of a tensor. The object must be of the type that the functions belong to.
    #[inline]
    pub(crate) fn read(&self, object: &Bound<'_, PyAny>, name: &str) -> PyResult<Memory> {
        let function = self.tensor_from_object.expect("looked for when it was found");
        let mut tensor = Tensor::EMPTY;
        // SAFETY: an object of the producer's; it fills in a tensor whose shape and strides belong
        // to that object, which is alive while they are read here.
        unsafe {
            if function(object.as_ptr().cast(), &mut tensor) != 0 {
                return Err(unexported(PyErr::fetch(object.py()), object, name));
            }
            tensor.memory(name, None)
        }
    }

    /// Returns the producer's current stream.
    pub(crate) fn stream(&self, py: Python<'_>, ordinal: u32) -> PyResult<u64> {
        let function = self.current_stream.expect("looked for when it was found");
        let mut stream = std::ptr::null_mut();
        // SAFETY: writes one handle.
        if unsafe { function(CUDA, ordinal as i32, &mut stream) } != 0 {
            return Err(PyErr::fetch(py));
        }
        Ok(stream as u64)
    }
}

impl Tensor {
    const EMPTY: Tensor = Tensor {
        data: std::ptr::null_mut(),
        device: Device { kind: CPU, ordinal: 0 },
        dimensions: 0,
        dtype: DataType { code: FLOAT, bits: 32, lanes: 1 },
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };

    /// Reads the memory of the tensor. With `words`, 16-bit unsigned integers are the bits of bf16,
    /// which NumPy cannot name; 8-bit integers are e4m3 if unsigned, and the type in `words` if
    /// signed.
    ///
    /// # Safety
    ///
    /// Shape and strides must point to as many numbers as there are dimensions; strides may be
    /// null.
    #[inline]
    unsafe fn memory(&self, name: &str, words: Option<DType>) -> PyResult<Memory> {
        let place = match self.device.kind {
            CPU | CUDA_HOST => Place::Host,
            CUDA | CUDA_MANAGED => Place::Cuda(self.device.ordinal.max(0) as u32),
            other => return Err(on_other_device(name, other)),
        };
        let dimensions = self.dimensions.max(0) as usize;
        if dimensions > MOST_DIMENSIONS {
            return Err(of_many_dimensions(name, dimensions));
        }
        let mut memory = Memory::nowhere(self.dtype.element(words), place, dimensions);
        memory.address = (self.data as u64).wrapping_add(self.byte_offset);
        for index in 0..dimensions {
            // SAFETY: the caller's promise.
            memory.sizes[index] = unsafe { *self.shape.add(index) };
        }
        if let Some(size) = memory.sizes.iter().rev().find(|size| **size < 0) {
            return Err(of_negative_size(name, *size));
        }
        match self.strides.is_null() {
            true => memory.strides = contiguous(memory.sizes),
            false => {
                for index in 0..dimensions {
                    // SAFETY: the caller's promise.
                    memory.strides[index] = unsafe { *self.strides.add(index) };
                }
            }
        }
        memory.exists(name)?;
        Ok(memory)
    }
}

impl DataType {
    /// Returns the element type; see [`Tensor::memory`] for `words`.
    #[inline]
    fn element(self, words: Option<DType>) -> Element {
        let DataType { code, bits, lanes } = self;
        match (code, bits, lanes) {
            (FLOAT, 32, 1) => Element::Float(DType::F32),
            (FLOAT, 16, 1) => Element::Float(DType::F16),
            (BFLOAT, 16, 1) => Element::Float(DType::BF16),
            (FLOAT8_E4M3FN, 8, 1) => Element::Float(DType::E4M3),
            (FLOAT8_E5M2, 8, 1) => Element::Float(DType::E5M2),
            (UINT, 16, 1) if words.is_some() => Element::Float(DType::BF16),
            (UINT, 8, 1) if words.is_some() => Element::Float(DType::E4M3),
            (INT, 8, 1) => Element::Float(words.unwrap_or(DType::Int8)),
            (INT, 32, 1) => Element::I32,
            _ => {
                let kind = match code {
                    INT => "int",
                    UINT => "uint",
                    FLOAT => "float",
                    BFLOAT => "bfloat",
                    5 => "complex",
                    6 => "bool",
                    // Floats of 8, 6 and 4 bits.
                    7..=17 => "float",
                    _ => "type",
                };
                Element::Other(kind, bits)
            }
        }
    }
}

#[cold]
fn on_other_device(name: &str, kind: i32) -> PyErr {
    PyValueError::new_err(format!(
        "{name} is on a device of DLPack's kind {kind}, expected the CPU or a CUDA device"
    ))
}

#[cold]
fn of_many_dimensions(name: &str, dimensions: usize) -> PyErr {
    PyValueError::new_err(format!(
        "{name} has {dimensions} dimensions, expected {MOST_DIMENSIONS} at most"
    ))
}

#[cold]
fn of_negative_size(name: &str, size: i64) -> PyErr {
    PyValueError::new_err(format!("{name} has a size of {size}, expected no negative one"))
}

/// A tensor that a producer lends for as long as this value lives.
pub(crate) struct Lent<'py> {
    pub(crate) memory: Memory,
    /// Whether the producer forbids writing.
    pub(crate) read_only: bool,
    /// The capsule is not consumed: its own destructor returns the tensor.
    _capsule: Bound<'py, PyAny>,
}

/// Borrows the memory of an object. On a GPU, work already on the producer's streams completes
/// before later work on `stream`.
pub(crate) fn borrow<'py>(
    object: &Bound<'py, PyAny>,
    name: &str,
    stream: impl Fn(u32) -> PyResult<i64>,
    words: Option<DType>,
) -> PyResult<Lent<'py>> {
    let py = object.py();
    let device = object.call_method0(intern!(py, "__dlpack_device__")).map_err(|_| {
        PyTypeError::new_err(format!(
            "{name} is a {}, expected a tensor with __dlpack__",
            object.get_type()
        ))
    })?;
    if is_masked(object)? {
        return Err(PyTypeError::new_err(format!(
            "{name} is a masked array, expected one without a mask: what it hides would be seen"
        )));
    }
    let device = device.extract();
    let (kind, ordinal): (i32, i32) = device.map_err(|error| unexported(error, object, name))?;
    let arguments = PyDict::new(py);
    if matches!(kind, CUDA | CUDA_MANAGED) {
        arguments.set_item(intern!(py, "stream"), stream(ordinal.max(0) as u32)?)?;
    }
    let method = object.getattr(intern!(py, "__dlpack__"));
    let method = method.map_err(|error| unexported(error, object, name))?;
    arguments.set_item(intern!(py, "max_version"), (1, 0))?;
    let capsule = method.call((), Some(&arguments)).or_else(|error| {
        if !error.is_instance_of::<PyTypeError>(py) {
            return Err(error);
        }
        // A producer without versions does not know `max_version`.
        arguments.del_item(intern!(py, "max_version"))?;
        method.call((), Some(&arguments))
    });
    let capsule = capsule.map_err(|error| unexported(error, object, name))?;
    let of = |name: &CStr| {
        let capsule = capsule.cast::<PyCapsule>().ok()?;
        capsule.pointer_checked(Some(name)).ok()
    };
    let mut read_only = false;
    let tensor: NonNull<Tensor> = if let Some(pointer) = of(NAME_VERSIONED) {
        let managed = pointer.cast::<ManagedVersioned>();
        // SAFETY: by the protocol a capsule of this name points to the structure.
        unsafe {
            let major = managed.as_ref().version.major;
            if major != 1 {
                return Err(PyTypeError::new_err(format!(
                    "{name} speaks version {major} of DLPack, expected 1"
                )));
            }
            read_only = managed.as_ref().flags & READ_ONLY != 0;
            NonNull::from(&managed.as_ref().tensor)
        }
    } else if let Some(pointer) = of(NAME) {
        // SAFETY: as above.
        NonNull::from(unsafe { &pointer.cast::<Managed>().as_ref().tensor })
    } else {
        return Err(PyTypeError::new_err(format!("{name}.__dlpack__() gave no DLPack capsule")));
    };
    // SAFETY: the producer keeps the structure as long as the capsule.
    let memory = unsafe { tensor.as_ref().memory(name, words)? };
    Ok(Lent { memory, read_only, _capsule: capsule })
}

/// Returns whether the object is a NumPy masked array or of a subclass.
fn is_masked(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let kinds = object.get_type().mro();
    Ok(kinds.iter().any(|kind| {
        kind.getattr(intern!(kind.py(), "__name__"))
            .is_ok_and(|name| name.eq("MaskedArray").unwrap_or(false))
    }))
}

/// Explains, with the argument's name, why an object does not export its memory: DLPack cannot
/// express big-endian numbers, objects and narrow element types. Other errors are passed on.
#[cold]
fn unexported(error: PyErr, object: &Bound<'_, PyAny>, name: &str) -> PyErr {
    let py = object.py();
    let ours = error.is_instance_of::<PyBufferError>(py)
        || error.is_instance_of::<PyTypeError>(py)
        || error.is_instance_of::<PyValueError>(py)
        || error.is_instance_of::<PyAttributeError>(py);
    if !ours {
        return error;
    }
    let dtype = object.getattr(intern!(py, "dtype")).map(|dtype| format!(" of {dtype}"));
    PyTypeError::new_err(format!(
        "{name} is a {}{}, which does not show its memory through DLPack ({}), expected float16, \
         bfloat16 or float32, and int32 for lists, in the order of this machine",
        object.get_type(),
        dtype.unwrap_or_default(),
        error.value(py)
    ))
}

/// A tensor to be exported.
pub(crate) struct Export<T> {
    pub(crate) address: u64,
    pub(crate) sizes: Vec<i64>,
    pub(crate) device: Device,
    /// bf16 is exported as 16-bit integers if `words` is set.
    pub(crate) element: Element,
    pub(crate) words: bool,
    /// Keeps the memory alive.
    pub(crate) owner: T,
}

/// Data that the structures of an exported tensor point to.
struct Kept<T> {
    sizes: Vec<i64>,
    strides: Vec<i64>,
    _owner: T,
}

impl<T: Send> Export<T> {
    /// Returns a capsule of the versioned protocol or of the unversioned one.
    pub(crate) fn capsule(self, py: Python<'_>, versioned: bool) -> PyResult<Bound<'_, PyAny>> {
        let (managed, name): (*mut c_void, _) = match versioned {
            true => (self.versioned()?.cast(), NAME_VERSIONED),
            false => (self.managed()?.cast(), NAME),
        };
        // SAFETY: a fresh pointer; the destructor knows its name.
        let capsule = unsafe { ffi::PyCapsule_New(managed, name.as_ptr(), Some(give_back)) };
        // SAFETY: a new reference, or null with an exception set.
        unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
    }

    /// Makes the structure of the versioned protocol, which its deleter frees.
    fn versioned(self) -> PyResult<*mut ManagedVersioned> {
        let (tensor, context) = self.tensor()?;
        let version = Version { major: 1, minor: 0 };
        let deleter = Some(delete_versioned::<T> as _);
        let managed = ManagedVersioned { version, context, deleter, flags: 0, tensor };
        Ok(Box::into_raw(Box::new(managed)))
    }

    /// Makes the structure of the unversioned protocol, which its deleter frees.
    fn managed(self) -> PyResult<*mut Managed> {
        let (tensor, context) = self.tensor()?;
        let deleter = Some(delete::<T> as _);
        Ok(Box::into_raw(Box::new(Managed { tensor, context, deleter })))
    }

    /// Makes the `DLTensor`, and the context that owns what it points to.
    fn tensor(self) -> PyResult<(Tensor, *mut c_void)> {
        let mut strides = vec![1; self.sizes.len()];
        for index in (1..self.sizes.len()).rev() {
            strides[index - 1] = strides[index] * self.sizes[index].max(1);
        }
        let (code, bits) = match self.element {
            Element::Float(DType::BF16) if self.words => (UINT, 16),
            Element::Float(DType::BF16) => (BFLOAT, 16),
            Element::Float(DType::E4M3) => (FLOAT8_E4M3FN, 8),
            Element::Float(DType::E5M2) => (FLOAT8_E5M2, 8),
            Element::Float(DType::Int8) => (INT, 8),
            Element::Float(other) => (FLOAT, 8 * other.bytes() as u8),
            Element::I32 => (INT, 32),
            Element::Other(kind, bits) => {
                return Err(PyTypeError::new_err(format!("a result of {kind}{bits}")));
            }
        };
        let mut kept = Box::new(Kept { sizes: self.sizes, strides, _owner: self.owner });
        let tensor = Tensor {
            data: self.address as *mut c_void,
            device: self.device,
            dimensions: kept.sizes.len() as i32,
            dtype: DataType { code, bits, lanes: 1 },
            shape: kept.sizes.as_mut_ptr(),
            strides: kept.strides.as_mut_ptr(),
            byte_offset: 0,
        };
        Ok((tensor, Box::into_raw(kept).cast()))
    }
}

/// Frees what `Export::managed` made. Consumers call it once, from any thread.
unsafe extern "C" fn delete<T>(managed: *mut Managed) {
    // SAFETY: both boxes were made by `Export` with these types.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context.cast::<Kept<T>>()));
    }
}

/// Frees what `Export::versioned` made.
unsafe extern "C" fn delete_versioned<T>(managed: *mut ManagedVersioned) {
    // SAFETY: as above.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context.cast::<Kept<T>>()));
    }
}

/// Destructor of a capsule: frees the tensor unless a consumer has taken it, which renames the
/// capsule.
unsafe extern "C" fn give_back(capsule: *mut ffi::PyObject) {
    // SAFETY: Python gives the capsule that is being destroyed; the pointer under the first name
    // is ours, and so is its deleter.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) != 0 {
            let managed = ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast::<Managed>();
            if let Some(deleter) = (*managed).deleter {
                deleter(managed);
            }
        } else if ffi::PyCapsule_IsValid(capsule, NAME_VERSIONED.as_ptr()) != 0 {
            let managed = ffi::PyCapsule_GetPointer(capsule, NAME_VERSIONED.as_ptr())
                .cast::<ManagedVersioned>();
            if let Some(deleter) = (*managed).deleter {
                deleter(managed);
            }
        }
    }
}

/// Run by Miri, for which nothing is linked (`cargo xtask miri`): nothing here may call Python.
#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_tensor_is_read_as_its_producer_wrote_it() {
        let mut numbers = [0f32; 24];
        let (mut sizes, mut strides) = ([2i64, 3, 4], [12i64, 4, 1]);
        let mut tensor = Tensor {
            data: numbers.as_mut_ptr().cast(),
            dimensions: 3,
            shape: sizes.as_mut_ptr(),
            byte_offset: 8,
            ..Tensor::EMPTY
        };
        for given in [std::ptr::null_mut(), strides.as_mut_ptr()] {
            tensor.strides = given;
            // SAFETY: three numbers each, or null.
            let memory = unsafe { tensor.memory("x", None) }.unwrap();
            assert_eq!(memory.sizes(), [2, 3, 4]);
            assert_eq!(memory.strides[..3], [12, 4, 1]);
            assert_eq!(memory.address, numbers.as_ptr() as u64 + 8);
            assert_eq!(memory.element, Element::F32);
        }
        // Refused before anything beyond is read.
        tensor.dimensions = MOST_DIMENSIONS as i32 + 1;
        // SAFETY: not read.
        assert!(unsafe { tensor.memory("x", None) }.is_err());
        (tensor.dimensions, sizes[1]) = (3, -1);
        tensor.shape = sizes.as_mut_ptr();
        // SAFETY: three numbers.
        assert!(unsafe { tensor.memory("x", None) }.is_err());
        // A number alone has neither sizes nor strides.
        let number = Tensor { data: numbers.as_mut_ptr().cast(), ..Tensor::EMPTY };
        // SAFETY: no numbers.
        assert!(unsafe { number.memory("x", None) }.unwrap().sizes().is_empty());
        // Its memory is gone.
        // SAFETY: no numbers.
        assert!(unsafe { Tensor::EMPTY.memory("x", None) }.is_err());
    }

    /// What is exported can be read by a consumer, and is freed once, by either protocol.
    #[test]
    fn what_is_exported_is_freed_with_its_owner() {
        let owner = Arc::new([1.5f32; 6]);
        let export = || Export {
            address: owner.as_ptr() as u64,
            sizes: vec![2, 0, 3],
            device: Device { kind: CPU, ordinal: 0 },
            element: Element::F32,
            words: false,
            owner: owner.clone(),
        };
        let managed = export().managed().unwrap();
        let versioned = export().versioned().unwrap();
        assert_eq!(Arc::strong_count(&owner), 3);
        // SAFETY: both were made here and are freed once, after they were read.
        unsafe {
            for tensor in [&(*managed).tensor, &(*versioned).tensor] {
                let memory = tensor.memory("x", None).unwrap();
                assert_eq!(
                    (memory.sizes(), &memory.strides[..3]),
                    (&[2, 0, 3][..], &[3, 3, 1][..])
                );
                assert_eq!(*(memory.address as *const f32), 1.5);
            }
            ((*managed).deleter.unwrap())(managed);
            ((*versioned).deleter.unwrap())(versioned);
        }
        assert_eq!(Arc::strong_count(&owner), 1);
    }
}
