//! PyTorch's stable C interface: how kernels that are not C++ join its dispatcher.
//!
//! PyTorch's headers `stable/c/shim.h` and `aoti_torch/c/shim.h` describe it. Nothing is linked: the
//! functions are looked up in the PyTorch that was imported, from the version on that has them all.
//!
//! A kernel gets its arguments in slots of 64 bits, in the order of the operator's schema, and owns
//! them; its results go to the first slots. Where it fails, it throws (`exception`).

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
use crate::view::{Element, Place};

pub(crate) use self::arguments::{Arguments, Value};
pub(crate) use self::exception::{Failed, kernel};
pub(crate) use self::tensor::Tensor;

/// The version that the interface is used from, as PyTorch writes it: 2.11.
const VERSION: u64 = (2 << 56) | (11 << 48);

/// What PyTorch calls with the slots, how many arguments there are, and how many results it wants: see
/// [`kernel`].
pub(crate) type Kernel = unsafe extern "C" fn(*mut u64, u64, u64);

/// Zero if all went well; else PyTorch has logged why.
type Code = i32;
/// A tensor of PyTorch's, or a list of kernels.
type Handle = *mut c_void;
type Ask<T> = unsafe extern "C" fn(Handle, *mut T) -> Code;
type Number = unsafe extern "C" fn() -> i32;

/// The functions.
pub(crate) struct Stable {
    data: Ask<*const c_void>,
    dimensions: Ask<i64>,
    sizes: Ask<*const i64>,
    strides: Ask<*const i64>,
    dtype: Ask<i32>,
    device_type: Ask<i32>,
    device_index: Ask<i32>,
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
    /// Not in a PyTorch that was built without CUDA.
    stream: Option<unsafe extern "C" fn(i32, *mut *mut c_void) -> Code>,
    /// CUDA's, of the runtime that PyTorch has: which device is current on this thread.
    device: Option<unsafe extern "C" fn(*mut i32) -> Code>,
    /// Whether autograd records at all.
    grad_enabled: unsafe extern "C" fn() -> bool,
    /// How many modes want to see operators before they run.
    modes: unsafe extern "C" fn() -> i64,
    /// A new object of Python's for a tensor.
    wrap: unsafe extern "C" fn(Handle) -> *mut ffi::PyObject,
    /// Makes a handle that of an object's tensor, and whether it is one.
    unwrap: unsafe extern "C" fn(Handle, *mut ffi::PyObject, bool) -> bool,
    /// Whether objects of Python's have their handles right behind what all objects begin with.
    begin_with_handle: OnceLock<bool>,
    /// Whether a tensor stands for the negative of what is in its memory.
    negative: unsafe extern "C" fn(Handle) -> bool,
    /// PyTorch's settings, and whether they ask for the same bits every time.
    settings: unsafe extern "C" fn() -> *const c_void,
    deterministic: unsafe extern "C" fn(*const c_void) -> bool,
    /// PyTorch's numbers for element types, devices and ways to lie in memory.
    dtypes: [(i32, Element); 13],
    uint64: i32,
    cpu: i32,
    cuda: i32,
    contiguous: i32,
    cxx: Cxx,
}

static STABLE: OnceLock<Option<Stable>> = OnceLock::new();

impl Stable {
    /// The interface of the PyTorch whose extension module is this file, if it has all of it.
    pub(crate) fn of(file: &str) -> Option<&'static Stable> {
        STABLE.get_or_init(|| Stable::find(file)).as_ref()
    }

    fn find(file: &str) -> Option<Stable> {
        if cfg!(not(all(target_arch = "x86_64", target_os = "linux"))) {
            return None;
        }
        // SAFETY: it is there already, with all that it needs: nothing is initialised.
        let library = unsafe { Library::new(file) }.ok()?;
        // It stays, as PyTorch does.
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

    /// Makes kernels those of a namespace's operators for a dispatch key, until they are
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

    /// Gives operators back to the kernels that they had before.
    pub(crate) fn remove(&self, library: usize) {
        // SAFETY: it was made by `register`, whose caller removes it once.
        let _ = unsafe { (self.drop_library)(library as Handle) };
    }

    /// A tensor whose memory is not written yet, with strides of its own.
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

    /// A tensor of PyTorch's `uint64`.
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

    /// No tensor, where a result must be one.
    pub(crate) fn undefined(&'static self) -> PyResult<Tensor> {
        let mut handle = null_mut();
        // SAFETY: writes one handle.
        done(unsafe { (self.undefined)(&mut handle) }, || "give no tensor".to_owned())?;
        self.tensor(handle)
    }

    /// A result of several tensors.
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

    /// The stream on which PyTorch's work goes now.
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

    /// Whether a CUDA device is this thread's, as far as CUDA knows.
    pub(crate) fn is_current(&self, ordinal: u32) -> bool {
        let Some(function) = self.device else { return false };
        let mut index = -1;
        // SAFETY: writes one number.
        let asked = unsafe { function(&mut index) };
        asked == 0 && u32::try_from(index) == Ok(ordinal)
    }

    /// Whether autograd records anything on this thread.
    pub(crate) fn is_grad_enabled(&self) -> bool {
        // SAFETY: asks for a flag of the thread's.
        unsafe { (self.grad_enabled)() }
    }

    /// How many modes want to see operators before they run on this thread.
    pub(crate) fn modes(&self) -> usize {
        // SAFETY: asks for a number of the thread's.
        unsafe { (self.modes)() as usize }
    }

    /// Whether one of some tensors, objects of Python's, is a view that stands for the negative of what is
    /// in its memory.
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

    /// The handle that an object of PyTorch's class of tensors has itself. To ask that one spares taking
    /// hold of the tensor and letting go of it, each of which asks Python in turn. None where this PyTorch
    /// has it elsewhere than behind what all objects begin with, which the first object tells.
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

    /// Whether [`whereabouts`](Stable::whereabouts) has an answer for such objects.
    pub(crate) fn knows_handles(&'static self, object: &Bound<'_, PyAny>) -> bool {
        self.handle_of(object).is_some()
    }

    /// Where the elements of a CUDA tensor are, an object of PyTorch's class of tensors, and on which
    /// device. None where this PyTorch has to be asked in another way.
    pub(crate) fn whereabouts(&'static self, object: &Bound<'_, PyAny>) -> Option<(u64, Place)> {
        let handle = self.handle_of(object)?;
        let (mut index, mut data) = (-1, null());
        // SAFETY: the handle of the object's tensor; each writes one value.
        let asked =
            unsafe { (self.device_index)(handle, &mut index) | (self.data)(handle, &mut data) };
        let place = Place::Cuda(u32::try_from(index).ok()?);
        (asked == 0).then_some((data as u64, place))
    }

    /// Whether PyTorch was told to give the same bits every time.
    pub(crate) fn is_deterministic(&self) -> bool {
        // SAFETY: PyTorch's settings, which it keeps.
        unsafe { (self.deterministic)((self.settings)()) }
    }

    /// Answers PyTorch's call of a kernel: null, or why it failed, to be read before anything else is
    /// called on this thread.
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
            Err(error) => torch.cxx.fail(&error),
        }
    }
}

/// Why PyTorch makes no tensor whose sizes were those of others.
#[cold]
fn no_memory(sizes: &[i64], place: Place) -> PyErr {
    PyMemoryError::new_err(format!(
        "PyTorch made no tensor of {sizes:?} on {place}, and logged why"
    ))
}

/// Whether PyTorch did what it was asked for.
fn done(code: Code, what: impl FnOnce() -> String) -> PyResult<()> {
    match code {
        0 => Ok(()),
        _ => Err(error::runtime(format!("PyTorch did not {}, and logged why", what()))),
    }
}

/// A function by its name.
///
/// # Safety
///
/// The type must be the function's.
unsafe fn function<F: Copy>(library: &Library, name: &CStr) -> Option<F> {
    // SAFETY: the caller's promise.
    unsafe { library.get::<F>(name) }.ok().map(|function| *function)
}
