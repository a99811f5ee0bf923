//! Calls that fail: PyTorch's exceptions, thrown as C++ throws them.
//!
//! The interface has no way to say that a kernel failed but C++'s: an exception, of one of PyTorch's classes,
//! which becomes Python's. It is made by the functions that C++ compilers call for `throw`, and thrown when
//! nothing of ours is left on the stack: a library that was linked with an unwinder of its own, as those for
//! old systems are, must not be walked through by another one.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};

use libloading::Library;
use pyo3::exceptions::{PyMemoryError, PyNotImplementedError, PyTypeError, PyValueError};
use pyo3::prelude::*;

use super::function;

/// A kernel from the function that answers its calls: calls that, and where it failed leaves the stack as
/// PyTorch has it and goes on in C++'s `throw`, which never comes back.
macro_rules! kernel {
    ($name:ident, $answer:path) => {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        #[unsafe(naked)]
        unsafe extern "C" fn $name(slots: *mut u64, arguments: u64, results: u64) {
            std::arch::naked_asm!(
                "sub rsp, 8",
                "call {answer}",
                "add rsp, 8",
                "test rax, rax",
                "jnz 2f",
                "ret",
                "2:",
                "mov rdi, [rax]",
                "mov rsi, [rax + 8]",
                "mov rdx, [rax + 16]",
                "jmp [rax + 24]",
                answer = sym $answer,
            )
        }

        /// Not registered: there is no such code for this machine yet.
        #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
        unsafe extern "C" fn $name(slots: *mut u64, arguments: u64, _: u64) {
            // SAFETY: as PyTorch calls it.
            let _ = unsafe { $answer(slots, arguments) };
        }
    };
}
pub(crate) use kernel;

/// Of a call that failed: the arguments of C++'s `throw`, and that function, in the order in which
/// [`kernel`] reads them.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Failed {
    object: *mut c_void,
    class: Class,
    destroy: unsafe extern "C" fn(*mut c_void),
    throw: *const c_void,
}

thread_local! {
    /// The call of this thread that failed last.
    static FAILED: Cell<Failed> = const {
        Cell::new(Failed { object: null_mut(), class: null(), destroy, throw: null() })
    };
}

/// What it takes to throw PyTorch's exceptions. The names spell the signatures; of the classes nothing
/// is known but that they end with those of `c10::Error`.
pub(super) struct Cxx {
    pub(super) delete: unsafe extern "C" fn(*mut c_void),
    allocate: unsafe extern "C" fn(usize) -> *mut c_void,
    throw: *const c_void,
    new_string: unsafe extern "C" fn(*mut StdString, *const u8, usize, *const u8),
    drop_string: unsafe extern "C" fn(*mut StdString),
    /// The message, a backtrace that may be null, and whose it is.
    new_error: unsafe extern "C" fn(*mut c_void, *mut StdString, *mut [u64; 2], *const c_void),
    /// What says which class an exception is of.
    error: Class,
    value: Class,
    kind: Class,
    unsupported: Class,
    memory: Class,
}

// SAFETY: functions and constants.
unsafe impl Send for Cxx {}
// SAFETY: the same.
unsafe impl Sync for Cxx {}

type Class = *const c_void;
type StdString = [u64; 4];

/// More than an exception of PyTorch's takes.
const EXCEPTION_BYTES: usize = 1024;

impl Cxx {
    /// # Safety
    ///
    /// The library must be PyTorch's.
    pub(super) unsafe fn find(library: &Library) -> Option<Cxx> {
        // SAFETY: names of C++, which spell the signatures, and those of its runtime.
        unsafe {
            let class = |name: &CStr| function::<*const c_void>(library, name);
            let error = class(c"_ZTIN3c105ErrorE")?;
            Some(Cxx {
                delete: function(library, c"_ZdlPv")?,
                allocate: function(library, c"__cxa_allocate_exception")?,
                throw: function(library, c"__cxa_throw")?,
                new_string: function(
                    library,
                    c"_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEC1EPKcmRKS3_",
                )?,
                drop_string: function(
                    library,
                    c"_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEED1Ev",
                )?,
                new_error: function(
                    library,
                    c"_ZN3c105ErrorC1ENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESt10shared_ptrIKNS_9LazyValueIS6_EEEPKv",
                )?,
                error,
                value: class(c"_ZTIN3c1010ValueErrorE")?,
                kind: class(c"_ZTIN3c109TypeErrorE")?,
                unsupported: class(c"_ZTIN3c1019NotImplementedErrorE")?,
                memory: class(c"_ZTIN3c1016OutOfMemoryErrorE").unwrap_or(error),
            })
        }
    }

    /// An error as an exception of PyTorch's, with its text, that is to be thrown.
    #[cold]
    pub(super) fn fail(&self, error: &PyErr) -> *const Failed {
        let (class, text) = Python::try_attach(|py| {
            let is_value = error.is_instance_of::<PyValueError>(py);
            let class = match () {
                () if is_value => self.value,
                () if error.is_instance_of::<PyTypeError>(py) => self.kind,
                () if error.is_instance_of::<PyNotImplementedError>(py) => self.unsupported,
                () if error.is_instance_of::<PyMemoryError>(py) => self.memory,
                () => self.error,
            };
            (class, error.value(py).to_string())
        })
        .unwrap_or_else(|| (self.error, "FlashCore was called while Python ended".to_owned()));
        let (mut string, mut backtrace, allocator) = ([0; 4], [0; 2], 0_u8);
        // SAFETY: memory for more than an exception; an empty backtrace is a null `shared_ptr`. The
        // string is copied or moved from, and is ours to drop.
        let object = unsafe {
            let object = (self.allocate)(EXCEPTION_BYTES);
            (self.new_string)(&mut string, text.as_ptr(), text.len(), &allocator);
            (self.new_error)(object, &mut string, &mut backtrace, null());
            (self.drop_string)(&mut string);
            object
        };
        FAILED.set(Failed { object, class, destroy, throw: self.throw });
        FAILED.with(|failed| failed.as_ptr().cast_const())
    }
}

/// Destroys an exception: its destructor is the first of its virtual functions.
unsafe extern "C" fn destroy(object: *mut c_void) {
    type Destructor = unsafe extern "C" fn(*mut c_void);
    // SAFETY: C++'s runtime calls it with what was thrown, an object with virtual functions.
    unsafe { (**object.cast::<*const Destructor>())(object) }
}
