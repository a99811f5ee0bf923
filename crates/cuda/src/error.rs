//! The errors of this crate, with one-line messages.

use cudarc::driver::sys;

use crate::{DriverVersion, TensorMapError};

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no usable CUDA driver on this machine.
    #[error("no usable CUDA driver: {reason}")]
    NoDriver {
        /// What was tried, and how it failed.
        reason: String,
    },
    /// The driver is older than the first one that has what FlashCore needs.
    #[error("the driver supports CUDA {found}, and {needed} or later is needed")]
    DriverTooOld {
        /// The version that the driver reports.
        found: DriverVersion,
        /// The oldest version that works.
        needed: DriverVersion,
    },
    /// The driver is present but sees no GPU.
    #[error("the CUDA driver sees no GPU (is CUDA_VISIBLE_DEVICES set?)")]
    NoDevice,
    /// There is no device with this ordinal.
    #[error("there is no device {ordinal}: the driver sees {count}")]
    InvalidDevice {
        /// The requested ordinal.
        ordinal: u32,
        /// Number of devices.
        count: u32,
    },
    /// The compiler refused a PTX text.
    #[error("the driver could not compile the PTX: {log}")]
    Compile {
        /// The compiler's log, which names lines of the PTX text.
        log: String,
    },
    /// A text contains a NUL character, which the driver would take for its end.
    #[error("{what} holds a NUL character")]
    Nul {
        /// Name of the text.
        what: &'static str,
    },
    /// The device has not enough free memory.
    #[error("the device has no {bytes} bytes of memory left")]
    OutOfMemory {
        /// Number of bytes requested.
        bytes: u64,
    },
    /// Two sizes that must agree do not.
    #[error("{what}: {expected} bytes expected, {found} given")]
    Size {
        /// Name of the operation.
        what: &'static str,
        /// The expected size.
        expected: u64,
        /// The size that was given.
        found: u64,
    },
    /// A range extends beyond its buffer.
    #[error("bytes {start}..{end} are outside of a buffer of {bytes}")]
    OutOfRange {
        /// The first byte of the range.
        start: u64,
        /// One past its last byte.
        end: u64,
        /// The size of the buffer.
        bytes: u64,
    },
    /// An address or a size is not a multiple of what the operation requires.
    #[error("{what} must be a multiple of {multiple} bytes, and is {found}")]
    Misaligned {
        /// Name of the number.
        what: &'static str,
        /// The required divisor.
        multiple: u64,
        /// The value that was given.
        found: u64,
    },
    /// A tensor cannot be described to the copy engine.
    #[error("a tensor map cannot be made: {0}")]
    TensorMap(#[from] TensorMapError),
    /// An image is not a complete ELF file or PTX text.
    #[error("the cubin is not a whole ELF file")]
    InvalidCubin,
    /// A module has no kernel of this name.
    #[error("the module has no kernel named `{name}`")]
    NoFunction {
        /// The requested name.
        name: String,
    },
    /// The declared parameters of a kernel do not match its code or its arguments.
    #[error("kernel `{function}`: {reason}")]
    Signature {
        /// Name of the kernel.
        function: String,
        /// What does not match.
        reason: String,
    },
    /// A kernel cannot be launched with these dimensions or this much shared memory.
    #[error("kernel `{function}` cannot be launched: {reason}")]
    Launch {
        /// Name of the kernel.
        function: String,
        /// The limit that is exceeded.
        reason: String,
    },
    /// Two objects that must be on the same device are not.
    #[error("{what} belongs to device {found}, not to device {expected}")]
    WrongDevice {
        /// Name of the object.
        what: &'static str,
        /// Ordinal of the expected device.
        expected: u32,
        /// Ordinal of the object's device.
        found: u32,
    },
    /// An explicit operation on the cubin cache, such as clearing it, failed.
    ///
    /// Failures while compiling through the cache are never errors; see
    /// [`CacheWarning`](crate::CacheWarning).
    #[error("the cubin cache at {path}: {reason}")]
    Cache {
        /// Path of the file or directory.
        path: String,
        /// The error of the operating system.
        reason: String,
    },
    /// The driver returned an error without a variant of its own.
    #[error("{what} failed: {text} ({name}, {code})")]
    Call {
        /// Name of the driver function.
        what: &'static str,
        /// The driver's error number.
        code: u32,
        /// The driver's error name.
        name: String,
        /// The driver's description of the error.
        text: String,
    },
}

/// The driver's error numbers that this crate distinguishes.
pub(crate) mod code {
    pub(crate) const INVALID_VALUE: u32 = 1;
    pub(crate) const OUT_OF_MEMORY: u32 = 2;
    pub(crate) const NO_DEVICE: u32 = 100;
    pub(crate) const NOT_FOUND: u32 = 500;
    pub(crate) const NOT_READY: u32 = 600;
}

/// Returns the number of a driver result.
///
/// Numbers are compared instead of matching on the enum: the bindings are those of CUDA 12.0, and a
/// later driver may return a number that they lack. All numbers, known or not, are between the
/// enum's first and last (0..=999).
pub(crate) fn number(result: sys::CUresult) -> u32 {
    result as u32
}

/// Converts a driver result; `what` is the name of the driver function.
pub(crate) fn check(what: &'static str, result: sys::CUresult) -> Result<()> {
    if number(result) == 0 {
        return Ok(());
    }
    Err(failed(what, result))
}

/// Returns the error for a driver result other than success.
#[cold]
pub(crate) fn failed(what: &'static str, result: sys::CUresult) -> Error {
    let mut name = std::ptr::null();
    let mut text = std::ptr::null();
    // SAFETY: both functions write a pointer to a static string, or null for a
    // number they do not know, and need neither a context nor initialisation.
    unsafe {
        let _ = sys::cuGetErrorName(result, &mut name);
        let _ = sys::cuGetErrorString(result, &mut text);
    }
    Error::Call {
        what,
        code: number(result),
        name: static_text(name, "unknown to this driver"),
        text: static_text(text, "unknown error"),
    }
}

fn static_text(text: *const std::ffi::c_char, otherwise: &str) -> String {
    if text.is_null() {
        return otherwise.to_owned();
    }
    // SAFETY: not null, so it is one of the driver's static, NUL-terminated
    // strings.
    unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_one_line() {
        let errors = [
            Error::NoDevice,
            Error::InvalidDevice { ordinal: 3, count: 1 },
            Error::OutOfMemory { bytes: 1 << 40 },
            Error::Size { what: "upload", expected: 4, found: 8 },
            Error::NoFunction { name: "forward".into() },
        ];
        for error in errors {
            let message = error.to_string();
            assert!(!message.contains('\n') && !message.is_empty(), "{message}");
        }
    }

    #[test]
    fn errors_cross_threads() {
        fn crosses<T: Send + Sync + 'static>() {}
        crosses::<Error>();
    }
}
