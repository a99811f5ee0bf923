//! Failing calls: throwing PyTorch's C++ exceptions.
//!
//! A kernel can only report failure by throwing a C++ exception of one of PyTorch's classes, which
//! becomes Python's. The exception object is made by the runtime functions that C++ compilers call
//! for `throw`, and thrown after all of our frames have returned: a library linked with an unwinder
//! of its own, as builds for old systems are, must not be unwound through by another one.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};

use libloading::Library;
use pyo3::exceptions::{PyMemoryError, PyNotImplementedError, PyTypeError, PyValueError};
use pyo3::prelude::*;

use super::function;
use crate::boundary::attached;

/// Defines a kernel around the function that answers its calls: calls it and, if it failed,
/// restores the stack and tail-calls C++'s `throw`, which never returns.
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

        /// Never registered: this target has no such assembly yet.
        #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
        unsafe extern "C" fn $name(slots: *mut u64, arguments: u64, _: u64) {
            // SAFETY: as PyTorch calls it.
            let _ = unsafe { $answer(slots, arguments) };
        }
    };
}
pub(crate) use kernel;

/// The arguments of C++'s `__cxa_throw` and that function itself, in the order in which [`kernel`]
/// reads them.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Failed {
    object: *mut c_void,
    class: Class,
    destroy: unsafe extern "C" fn(*mut c_void),
    throw: *const c_void,
}

thread_local! {
    /// The last failed call of this thread.
    static FAILED: Cell<Failed> = const {
        Cell::new(Failed { object: null_mut(), class: null(), destroy, throw: null() })
    };
}

/// The functions and type infos for throwing PyTorch's exceptions. The mangled names give the
/// signatures; the classes are only known to derive from `c10::Error`, without fields of their own.
pub(super) struct Cxx {
    pub(super) delete: unsafe extern "C" fn(*mut c_void),
    allocate: unsafe extern "C" fn(usize) -> *mut c_void,
    throw: *const c_void,
    new_string: unsafe extern "C" fn(*mut StdString, *const u8, usize, *const u8),
    drop_string: unsafe extern "C" fn(*mut StdString),
    /// Constructs a `c10::Error` from the message, a backtrace that may be null, and the caller's
    /// address.
    new_error: unsafe extern "C" fn(*mut c_void, *mut StdString, *mut [u64; 2], *const c_void),
    /// Type infos of the exception classes.
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

/// An upper bound on the size of PyTorch's exceptions.
const EXCEPTION_BYTES: usize = 1024;

impl Cxx {
    /// # Safety
    ///
    /// The library must be PyTorch's.
    pub(super) unsafe fn find(library: &Library) -> Option<Cxx> {
        // SAFETY: mangled C++ names, which give the signatures, and names of the C++ runtime.
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

    /// Makes a PyTorch exception, ready to be thrown, from a Python error, which is dropped while
    /// Python is attached.
    #[cold]
    pub(super) fn fail(&self, error: PyErr) -> *const Failed {
        let (class, text) = attached(move |py| {
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

/// Destroys an exception by its virtual destructor, the first entry of its vtable.
unsafe extern "C" fn destroy(object: *mut c_void) {
    type Destructor = unsafe extern "C" fn(*mut c_void);
    // SAFETY: C++'s runtime calls it with what was thrown, an object with virtual functions.
    unsafe { (**object.cast::<*const Destructor>())(object) }
}
