//! PyTorch's stable C interface, by which kernels that are not written in C++ join its dispatcher.
//!
//! PyTorch's headers `stable/c/shim.h` and `aoti_torch/c/shim.h` describe it. Nothing is linked:
//! the functions are looked up in the imported PyTorch, if its version has them all.
//!
//! A kernel gets its arguments in 64-bit slots, in the order of the operator's schema, and owns
//! them; it writes its results to the first slots. If it fails, it throws (`exception`).

mod arguments;
mod exception;
mod tensor;

use std::ffi::{CStr, c_char, c_void};
use std::ptr::{NonNull, null, null_mut};
use std::sync::OnceLock;

use flashcore::DType;
use libloading::Library;
use pyo3::exceptions::PyMemoryError;
use pyo3::ffi;
use pyo3::prelude::*;

use self::exception::Cxx;
use crate::boundary::guard;
use crate::error;
use crate::view::{self, Element, MOST_DIMENSIONS, Memory, Place};

pub(crate) use self::arguments::{Arguments, Value};
pub(crate) use self::exception::{Failed, kernel};
pub(crate) use self::tensor::Tensor;

/// The first version whose interface is used, in PyTorch's encoding: 2.11.
const VERSION: u64 = (2 << 56) | (11 << 48);

/// A kernel as PyTorch calls it: slots, number of arguments, number of results. See [`kernel`].
pub(crate) type Kernel = unsafe extern "C" fn(*mut u64, u64, u64);

/// Zero on success; otherwise PyTorch has logged the reason.
type Code = i32;
/// An opaque handle of PyTorch's: a tensor, a list, a string or a library of kernels.
type Handle = *mut c_void;
type Ask<T> = unsafe extern "C" fn(Handle, *mut T) -> Code;
type Number = unsafe extern "C" fn() -> i32;

/// The functions of the interface, and PyTorch's numbers for types and devices.
pub(crate) struct Stable {
    data: Ask<*const c_void>,
    dimensions: Ask<i64>,
    sizes: Ask<*const i64>,
    strides: Ask<*const i64>,
    dtype: Ask<i32>,
    device_type: Ask<i32>,
    device_index: Ask<i32>,
    storage_bytes: Ask<i64>,
    copy_handle: Ask<Handle>,
    drop_tensor: unsafe extern "C" fn(Handle) -> Code,
    undefined: unsafe extern "C" fn(*mut Handle) -> Code,
    empty: unsafe extern "C" fn(i64, *const i64, *const i64, i32, i32, i32, *mut Handle) -> Code,
    zero: unsafe extern "C" fn(Handle) -> Code,
    call: unsafe extern "C" fn(*const c_char, *const c_char, *mut u64, u64) -> Code,
    text: Ask<*const c_char>,
    text_length: Ask<usize>,
    drop_text: unsafe extern "C" fn(Handle) -> Code,
    list_size: Ask<usize>,
    list_item: unsafe extern "C" fn(Handle, usize, *mut u64) -> Code,
    new_list: unsafe extern "C" fn(usize, *mut Handle) -> Code,
    list_push: unsafe extern "C" fn(Handle, u64) -> Code,
    drop_list: unsafe extern "C" fn(Handle) -> Code,
    new_library:
        unsafe extern "C" fn(*const c_char, *const c_char, *const c_char, u32, *mut Handle) -> Code,
    add_kernel: unsafe extern "C" fn(Handle, *const c_char, Kernel, u64) -> Code,
    drop_library: unsafe extern "C" fn(Handle) -> Code,
    /// Absent in a PyTorch built without CUDA.
    stream: Option<unsafe extern "C" fn(i32, *mut *mut c_void) -> Code>,
    /// `cudaGetDevice` of the CUDA runtime that PyTorch loaded: this thread's current device.
    device: Option<unsafe extern "C" fn(*mut i32) -> Code>,
    /// Returns whether grad mode is on.
    grad_enabled: unsafe extern "C" fn() -> bool,
    /// Returns the number of active `__torch_dispatch__` modes.
    modes: unsafe extern "C" fn() -> i64,
    /// Makes a Python object for a tensor.
    wrap: unsafe extern "C" fn(Handle) -> *mut ffi::PyObject,
    /// Points a handle to the tensor of a Python object; returns whether the object is one.
    unwrap: unsafe extern "C" fn(Handle, *mut ffi::PyObject, bool) -> bool,
    /// Whether a Python tensor object holds its handle directly behind the `PyObject` header.
    begin_with_handle: OnceLock<bool>,
    /// As `data`, for memory that may be written: a lazy copy becomes a real one.
    mutable_data: Ask<*mut c_void>,
    /// The address of the virtual functions of `c10::TensorImpl`, the class of plain tensors: sparse,
    /// nested and quantized tensors and those of function transforms are of classes derived from it.
    plain: Option<usize>,
    /// Returns where this thread has its state of function transforms (`torch.func`): null before the
    /// first of them. The function is absent where PyTorch has renamed it.
    transforms: Option<unsafe extern "C" fn() -> *const *const c_void>,
    /// Returns whether a tensor has the negative bit: it stands for the negative of its memory.
    negative: unsafe extern "C" fn(Handle) -> bool,
    /// PyTorch's global settings, and whether they ask for deterministic algorithms.
    settings: unsafe extern "C" fn() -> *const c_void,
    deterministic: unsafe extern "C" fn(*const c_void) -> bool,
    /// PyTorch's numbers for element types, devices and memory formats.
    dtypes: [(i32, Element); 13],
    uint64: i32,
    cpu: i32,
    cuda: i32,
    contiguous: i32,
    cxx: Cxx,
}

static STABLE: OnceLock<Option<Stable>> = OnceLock::new();

impl Stable {
    /// Returns the interface of the PyTorch whose extension module is this file, if it is complete.
    pub(crate) fn of(file: &str) -> Option<&'static Stable> {
        STABLE.get_or_init(|| Stable::find(file)).as_ref()
    }

    fn find(file: &str) -> Option<Stable> {
        if cfg!(not(all(target_arch = "x86_64", target_os = "linux"))) {
            return None;
        }
        // SAFETY: the library is already loaded with its dependencies: no initialiser runs.
        let library = unsafe { Library::new(file) }.ok()?;
        // Leaked: PyTorch stays loaded too.
        let library: &'static Library = Box::leak(Box::new(library));
        // SAFETY: the signature that PyTorch's headers say, here and below.
        let version: unsafe extern "C" fn() -> u64 =
            unsafe { function(library, c"aoti_torch_abi_version")? };
        // SAFETY: as above.
        if unsafe { version() } < VERSION {
            return None;
        }
        let number = |name: &CStr| -> Option<i32> {
            // SAFETY: as above.
            Some(unsafe { function::<Number>(library, name)?() })
        };
        let float = |name, dtype| Some((number(name)?, Element::Float(dtype)));
        let other = |name, kind, bits| Some((number(name)?, Element::Other(kind, bits)));
        // SAFETY: as above, and for the names of C++ the signatures that they spell.
        unsafe {
            Some(Stable {
                data: function(library, c"torch_get_const_data_ptr")?,
                dimensions: function(library, c"aoti_torch_get_dim")?,
                sizes: function(library, c"aoti_torch_get_sizes")?,
                strides: function(library, c"aoti_torch_get_strides")?,
                dtype: function(library, c"aoti_torch_get_dtype")?,
                device_type: function(library, c"aoti_torch_get_device_type")?,
                device_index: function(library, c"aoti_torch_get_device_index")?,
                storage_bytes: function(library, c"aoti_torch_get_storage_size")?,
                copy_handle: function(library, c"aoti_torch_new_tensor_handle")?,
                drop_tensor: function(library, c"aoti_torch_delete_tensor_object")?,
                undefined: function(library, c"aoti_torch_new_uninitialized_tensor")?,
                empty: function(library, c"aoti_torch_empty_strided")?,
                zero: function(library, c"aoti_torch_zero_")?,
                call: function(library, c"torch_call_dispatcher")?,
                text: function(library, c"torch_string_c_str")?,
                text_length: function(library, c"torch_string_length")?,
                drop_text: function(library, c"torch_delete_string")?,
                list_size: function(library, c"torch_list_size")?,
                list_item: function(library, c"torch_list_get_item")?,
                new_list: function(library, c"torch_new_list_reserve_size")?,
                list_push: function(library, c"torch_list_push_back")?,
                drop_list: function(library, c"torch_delete_list")?,
                new_library: function(library, c"aoti_torch_library_init_impl")?,
                add_kernel: function(library, c"torch_library_impl")?,
                drop_library: function(library, c"aoti_torch_delete_library_object")?,
                stream: function(library, c"aoti_torch_get_current_cuda_stream"),
                device: function(library, c"cudaGetDevice"),
                grad_enabled: function(library, c"aoti_torch_grad_mode_is_enabled")?,
                modes: function(library, c"_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv")?,
                wrap: function(library, c"_Z16THPVariable_WrapRKN2at10TensorBaseE")?,
                unwrap: function(
                    library,
                    c"_ZN8pybind116detail11type_casterIN2at6TensorEvE4loadENS_6handleEb",
                )?,
                begin_with_handle: OnceLock::new(),
                mutable_data: function(library, c"torch_get_mutable_data_ptr")?,
                // Behind the offset and the type information that a table of them begins with.
                plain: function::<usize>(library, c"_ZTVN3c1010TensorImplE")
                    .map(|table| table + 2 * size_of::<usize>()),
                transforms: function(library, c"_ZN2at9functorch20functorchTLSAccessorEv"),
                negative: function(library, c"_ZN2at6native6is_negERKNS_6TensorE")?,
                settings: function(library, c"_ZN2at13globalContextEv")?,
                deterministic: function(library, c"_ZNK2at7Context23deterministicAlgorithmsEv")?,
                dtypes: [
                    float(c"aoti_torch_dtype_bfloat16", DType::BF16)?,
                    float(c"aoti_torch_dtype_float16", DType::F16)?,
                    float(c"aoti_torch_dtype_float32", DType::F32)?,
                    (number(c"aoti_torch_dtype_int32")?, Element::I32),
                    float(c"aoti_torch_dtype_float8_e4m3fn", DType::E4M3)?,
                    float(c"aoti_torch_dtype_float8_e5m2", DType::E5M2)?,
                    other(c"aoti_torch_dtype_float64", "float", 64)?,
                    other(c"aoti_torch_dtype_int64", "int", 64)?,
                    other(c"aoti_torch_dtype_int16", "int", 16)?,
                    float(c"aoti_torch_dtype_int8", DType::Int8)?,
                    other(c"aoti_torch_dtype_uint8", "uint", 8)?,
                    other(c"aoti_torch_dtype_bool", "bool", 8)?,
                    other(c"aoti_torch_dtype_complex64", "complex", 64)?,
                ],
                uint64: number(c"aoti_torch_dtype_uint64")?,
                cpu: number(c"aoti_torch_device_type_cpu")?,
                cuda: number(c"aoti_torch_device_type_cuda")?,
                contiguous: number(c"aoti_torch_memory_format_contiguous_format")?,
                cxx: Cxx::find(library)?,
            })
        }
    }

    /// Registers kernels for the operators of a namespace under a dispatch key, until they are
    /// [removed](Stable::remove).
    pub(crate) fn register(
        &self,
        namespace: &CStr,
        key: &CStr,
        kernels: &[(&CStr, Kernel)],
    ) -> PyResult<usize> {
        let mut library = null_mut();
        // SAFETY: PyTorch copies the names, but for the file's, which stays.
        let made = unsafe {
            (self.new_library)(
                namespace.as_ptr(),
                key.as_ptr(),
                c"flashcore".as_ptr(),
                line!(),
                &mut library,
            )
        };
        done(made, || format!("take kernels for {namespace:?} on {key:?}"))?;
        for (name, kernel) in kernels {
            // SAFETY: kernels of ours, for the schemas that they were written for.
            let added = unsafe { (self.add_kernel)(library, name.as_ptr(), *kernel, VERSION) };
            done(added, || format!("take a kernel for {name:?}"))
                .inspect_err(|_| self.remove(library as usize))?;
        }
        Ok(library as usize)
    }

    /// Removes registered kernels: the operators get back those that they had before.
    pub(crate) fn remove(&self, library: usize) {
        // SAFETY: it was made by `register`, whose caller removes it once.
        let _ = unsafe { (self.drop_library)(library as Handle) };
    }

    /// Allocates an uninitialised tensor with the given strides.
    pub(crate) fn make(
        &'static self,
        sizes: &[i64],
        strides: &[i64],
        element: Element,
        place: Place,
    ) -> PyResult<Tensor> {
        let known = self.dtypes.iter().find(|(_, known)| *known == element);
        let dtype = known.map(|(dtype, _)| *dtype);
        let dtype = dtype.ok_or_else(|| error::value(format!("no tensors of {element}")))?;
        self.empty(sizes, strides, dtype, place)
    }

    /// Allocates a tensor of PyTorch's type `uint64`.
    pub(crate) fn make_words(&'static self, sizes: &[i64], place: Place) -> PyResult<Tensor> {
        self.empty(sizes, &[1][..sizes.len().min(1)], self.uint64, place)
    }

    fn empty(
        &'static self,
        sizes: &[i64],
        strides: &[i64],
        dtype: i32,
        place: Place,
    ) -> PyResult<Tensor> {
        let (device, index) = match place {
            Place::Host => (self.cpu, 0),
            Place::Cuda(ordinal) => (self.cuda, ordinal as i32),
        };
        let count = sizes.len().min(strides.len()) as i64;
        let (sizes_at, strides_at) = (sizes.as_ptr(), strides.as_ptr());
        let mut handle = null_mut();
        // SAFETY: as many sizes and strides as it says.
        let made =
            unsafe { (self.empty)(count, sizes_at, strides_at, dtype, device, index, &mut handle) };
        match made {
            0 => self.tensor(handle),
            _ => Err(no_memory(sizes, place)),
        }
    }

    /// Returns an undefined tensor, for results that are not used.
    pub(crate) fn undefined(&'static self) -> PyResult<Tensor> {
        let mut handle = null_mut();
        // SAFETY: writes one handle.
        done(unsafe { (self.undefined)(&mut handle) }, || "give no tensor".to_owned())?;
        self.tensor(handle)
    }

    /// Makes a result that is a list of tensors.
    pub(crate) fn list(&self, tensors: Vec<Tensor>) -> PyResult<Value> {
        let mut list = null_mut();
        // SAFETY: writes one handle.
        let made = unsafe { (self.new_list)(tensors.len(), &mut list) };
        done(made, || "make a list".to_owned())?;
        for tensor in tensors {
            // SAFETY: a list, which takes the tensor over.
            let pushed = unsafe { (self.list_push)(list, Value::Tensor(tensor).slot()) };
            done(pushed, || "take a tensor into a list".to_owned())?;
        }
        Ok(Value::List(list))
    }

    fn tensor(&'static self, handle: Handle) -> PyResult<Tensor> {
        match NonNull::new(handle) {
            Some(handle) => Ok(Tensor { handle, torch: self }),
            None => Err(error::runtime("PyTorch gave no tensor")),
        }
    }

    /// Returns PyTorch's current stream on a device.
    pub(crate) fn stream(&self, ordinal: u32) -> PyResult<u64> {
        let Some(function) = self.stream else {
            return Err(error::runtime("this PyTorch was built without CUDA"));
        };
        let mut stream = null_mut();
        // SAFETY: writes one handle.
        let asked = unsafe { function(ordinal as i32, &mut stream) };
        done(asked, || format!("say what stream of cuda:{ordinal} is current"))?;
        Ok(stream as u64)
    }

    /// Returns whether a device is the CUDA runtime's current device of this thread.
    pub(crate) fn is_current(&self, ordinal: u32) -> bool {
        let Some(function) = self.device else { return false };
        let mut index = -1;
        // SAFETY: writes one number.
        let asked = unsafe { function(&mut index) };
        asked == 0 && u32::try_from(index) == Ok(ordinal)
    }

    /// Returns whether grad mode is on for this thread.
    pub(crate) fn is_grad_enabled(&self) -> bool {
        // SAFETY: asks for a flag of the thread's.
        unsafe { (self.grad_enabled)() }
    }

    /// Returns the number of `__torch_dispatch__` modes active on this thread.
    pub(crate) fn modes(&self) -> usize {
        // SAFETY: asks for a number of the thread's.
        unsafe { (self.modes)() as usize }
    }

    /// Returns whether any of these Python tensor objects has the negative bit.
    pub(crate) fn is_any_negative<'a, 'py: 'a>(
        &'static self,
        objects: impl Iterator<Item = &'a Bound<'py, PyAny>>,
    ) -> PyResult<bool> {
        let mut objects = objects.peekable();
        if objects.peek().is_none_or(|first| self.handle_of(first).is_some()) {
            // SAFETY: the handle of the object's tensor.
            let negative = |handle| unsafe { (self.negative)(handle) };
            return Ok(objects.filter_map(|object| self.handle_of(object)).any(negative));
        }
        let tensor = self.undefined()?;
        let handle = tensor.handle.as_ptr();
        // SAFETY: a handle that refers to one tensor after the other, and to the last until it is dropped.
        Ok(objects.any(|object| unsafe {
            (self.unwrap)(handle, object.as_ptr(), false) && (self.negative)(handle)
        }))
    }

    /// Returns the handle stored inside a Python tensor object. Using it avoids acquiring and
    /// releasing a reference to the tensor, each of which calls into Python. Returns None if this
    /// PyTorch does not store the handle directly behind the `PyObject` header, which is found out
    /// with the first object.
    fn handle_of(&'static self, object: &Bound<'_, PyAny>) -> Option<Handle> {
        let here = object.as_ptr().cast::<u8>().wrapping_add(size_of::<ffi::PyObject>()).cast();
        let found = self.begin_with_handle.get_or_init(|| {
            let Ok(tensor) = self.undefined() else { return false };
            let handle = tensor.handle.as_ptr();
            // SAFETY: what a handle points to is a pointer, to the tensor; and an object that has more than
            // its beginning can be read there.
            unsafe {
                (self.unwrap)(handle, object.as_ptr(), false)
                    && *handle.cast::<usize>() == *Handle::cast::<usize>(here)
            }
        });
        found.then_some(here)
    }

    /// Returns whether [`whereabouts`](Stable::whereabouts) works for objects like this one.
    pub(crate) fn knows_handles(&'static self, object: &Bound<'_, PyAny>) -> bool {
        self.handle_of(object).is_some()
    }

    /// Returns the address and the device of a CUDA tensor object. None if this PyTorch must be
    /// asked in another way.
    pub(crate) fn whereabouts(&'static self, object: &Bound<'_, PyAny>) -> Option<(u64, Place)> {
        let handle = self.handle_of(object)?;
        let (mut index, mut data) = (-1, null());
        // SAFETY: the handle of the object's tensor; each writes one value.
        let asked =
            unsafe { (self.device_index)(handle, &mut index) | (self.data)(handle, &mut data) };
        let place = Place::Cuda(u32::try_from(index).ok()?);
        (asked == 0).then_some((data as u64, place))
    }

    /// Reads the memory of a Python tensor object on a CUDA device. None if it must be asked in another
    /// way: what is no plain tensor there, and what is wrong with it, is DLPack's to say.
    ///
    /// DLPack first takes a reference to the tensor. Where Python has the only one that costs as much
    /// as the rest.
    pub(crate) fn read(&'static self, object: &Bound<'_, PyAny>) -> Option<Memory> {
        let handle = self.plain_handle_of(object)?;
        if ask(handle, self.device_type)? != self.cuda {
            return None;
        }
        let place = Place::Cuda(u32::try_from(ask(handle, self.device_index)?).ok()?);
        let element = self.element_of(ask(handle, self.dtype)?);
        if matches!(element, Element::Other(..)) {
            return None;
        }
        let (mut count, mut sizes, mut strides, mut data) = (0, null(), null(), null_mut());
        // SAFETY: the handle of the object's tensor; sizes and strides are as many numbers as dimensions, which the tensor keeps.
        unsafe {
            let asked = (self.dimensions)(handle, &mut count)
                | (self.sizes)(handle, &mut sizes)
                | (self.strides)(handle, &mut strides)
                | (self.mutable_data)(handle, &mut data);
            let dimensions = usize::try_from(count).ok()?;
            if asked != 0 || dimensions > MOST_DIMENSIONS {
                return None;
            }
            let mut memory = Memory::nowhere(element, place, dimensions);
            for at in 0..dimensions {
                (memory.sizes[at], memory.strides[at]) = (*sizes.add(at), *strides.add(at));
            }
            memory.address = self.unless_freed(handle, data as u64);
            Some(memory)
        }
    }

    /// Returns the address of a tensor's elements, or 0 if its storage was freed: PyTorch adds the
    /// tensor's offset in its storage to the null address.
    #[inline]
    fn unless_freed(&self, handle: Handle, address: u64) -> u64 {
        if view::may_be_offset(address) && self.is_freed(handle) { 0 } else { address }
    }

    #[cold]
    fn is_freed(&self, handle: Handle) -> bool {
        let mut bytes = -1;
        // SAFETY: callers have a tensor's handle; writes one number.
        unsafe { (self.storage_bytes)(handle, &mut bytes) == 0 && bytes == 0 }
    }

    /// Returns the handle inside a Python tensor object, if it is one of a plain tensor.
    fn plain_handle_of(&'static self, object: &Bound<'_, PyAny>) -> Option<Handle> {
        let handle = self.handle_of(object)?;
        // SAFETY: what a handle points to is a pointer to the tensor, which begins with one to the virtual
        // functions of its class.
        (Some(unsafe { **handle.cast::<*const usize>() }) == self.plain).then_some(handle)
    }

    /// Returns the element type of a Python tensor object. None if this PyTorch must be asked in another
    /// way.
    pub(crate) fn element(&'static self, object: &Bound<'_, PyAny>) -> Option<Element> {
        Some(self.element_of(ask(self.handle_of(object)?, self.dtype)?))
    }

    /// Returns the element type of a Python tensor object that is plain and on the CPU or a CUDA device.
    pub(crate) fn plain_element(&'static self, object: &Bound<'_, PyAny>) -> Option<Element> {
        let handle = self.plain_handle_of(object)?;
        let device = ask(handle, self.device_type)?;
        let element = self.element_of(ask(handle, self.dtype)?);
        (device == self.cpu || device == self.cuda).then_some(element)
    }

    /// Returns whether this thread has never used a function transform.
    pub(crate) fn never_transformed(&self) -> bool {
        // SAFETY: the address of a pointer of this thread's.
        self.transforms.is_some_and(|transforms| unsafe { (*transforms()).is_null() })
    }

    /// Returns the element type of PyTorch's number for it.
    fn element_of(&self, dtype: i32) -> Element {
        let known = self.dtypes.iter().find(|(known, _)| *known == dtype);
        known.map_or(Element::Other("type", 8), |(_, element)| *element)
    }

    /// Returns whether PyTorch's deterministic algorithms are on.
    pub(crate) fn is_deterministic(&self) -> bool {
        // SAFETY: PyTorch's settings, which it keeps.
        unsafe { (self.deterministic)((self.settings)()) }
    }

    /// Runs a kernel that PyTorch called: returns null, or the failure, which must be read before
    /// anything else is called on this thread.
    ///
    /// # Safety
    ///
    /// The slots must be PyTorch's, for a kernel of so many arguments and results; `run` must take
    /// all arguments in the order and with the types of the operator's schema, and give its results.
    pub(crate) unsafe fn answer<const RESULTS: usize>(
        slots: *mut u64,
        arguments: u64,
        run: impl FnOnce(&'static Stable, &mut Arguments<'_>) -> PyResult<[Value; RESULTS]>,
    ) -> *const Failed {
        let Some(torch) = STABLE.get().and_then(Option::as_ref) else { return null() };
        // SAFETY: the caller's promise.
        let given = unsafe { std::slice::from_raw_parts(slots, arguments as usize) };
        match guard(|| run(torch, &mut Arguments { slots: given.iter(), torch })) {
            Ok(results) => {
                for (at, result) in results.into_iter().enumerate() {
                    // SAFETY: the caller's promise: there is a slot for each.
                    unsafe { *slots.add(at) = result.slot() };
                }
                null()
            }
            Err(error) => torch.cxx.fail(error),
        }
    }
}

/// Asks a tensor for a number. None if it fails.
fn ask(handle: Handle, ask: Ask<i32>) -> Option<i32> {
    let mut answer = -1;
    // SAFETY: callers have a tensor's handle; writes one number.
    (unsafe { ask(handle, &mut answer) } == 0).then_some(answer)
}

/// Makes the error for a failed allocation of PyTorch's.
#[cold]
fn no_memory(sizes: &[i64], place: Place) -> PyErr {
    PyMemoryError::new_err(format!(
        "PyTorch made no tensor of {sizes:?} on {place}, and logged why"
    ))
}

/// Converts a return code to an error.
fn done(code: Code, what: impl FnOnce() -> String) -> PyResult<()> {
    match code {
        0 => Ok(()),
        _ => Err(error::runtime(format!("PyTorch did not {}, and logged why", what()))),
    }
}

/// Looks up a function by its name.
///
/// # Safety
///
/// The type must be the function's.
unsafe fn function<F: Copy>(library: &Library, name: &CStr) -> Option<F> {
    // SAFETY: the caller's promise.
    unsafe { library.get::<F>(name) }.ok().map(|function| *function)
}
