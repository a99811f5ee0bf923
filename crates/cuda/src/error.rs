//! What can go wrong between a caller and the driver, in one-line messages.

use cudarc::driver::sys;

use crate::{DriverVersion, TensorMapError};

/// The result of everything in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call did not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no usable CUDA driver on this machine.
    #[error("no usable CUDA driver: {reason}")]
    NoDriver {
        /// What was tried and what it answered.
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
    /// The driver is there, and sees no GPU.
    #[error("the CUDA driver sees no GPU (is CUDA_VISIBLE_DEVICES set?)")]
    NoDevice,
    /// The ordinal is not that of a device.
    #[error("there is no device {ordinal}: the driver sees {count}")]
    InvalidDevice {
        /// The ordinal that was asked for.
        ordinal: u32,
        /// How many devices there are.
        count: u32,
    },
    /// The driver refused a PTX text.
    #[error("the driver could not compile the PTX: {log}")]
    Compile {
        /// The compiler's own words, which name the lines of the PTX text.
        log: String,
    },
    /// A text holds a NUL character, which the driver takes for its end.
    #[error("{what} holds a NUL character")]
    Nul {
        /// Which text.
        what: &'static str,
    },
    /// The device has too little free memory.
    #[error("the device has no {bytes} bytes of memory left")]
    OutOfMemory {
        /// How much was asked for.
        bytes: u64,
    },
    /// Two sizes that must agree do not.
    #[error("{what}: {expected} bytes expected, {found} given")]
    Size {
        /// Which operation.
        what: &'static str,
        /// The size that fits.
        expected: u64,
        /// The size that was given.
        found: u64,
    },
    /// A range reaches beyond its buffer.
    #[error("bytes {start}..{end} are outside of a buffer of {bytes}")]
    OutOfRange {
        /// The first byte of the range.
        start: u64,
        /// One past its last byte.
        end: u64,
        /// The size of the buffer.
        bytes: u64,
    },
    /// An address or a size is not a multiple of what the operation needs.
    #[error("{what} must be a multiple of {multiple} bytes, and is {found}")]
    Misaligned {
        /// Which number.
        what: &'static str,
        /// What it must be a multiple of.
        multiple: u64,
        /// What it is.
        found: u64,
    },
    /// A tensor cannot be described to the copy engine.
    #[error("a tensor map cannot be made: {0}")]
    TensorMap(#[from] TensorMapError),
    /// What should be machine code is something else, or cut short.
    #[error("the cubin is not a whole ELF file")]
    InvalidCubin,
    /// A module has no kernel of that name.
    #[error("the module has no kernel named `{name}`")]
    NoFunction {
        /// The name that was asked for.
        name: String,
    },
    /// The declared parameters of a kernel, its code and its arguments differ.
    #[error("kernel `{function}`: {reason}")]
    Signature {
        /// The name of the kernel.
        function: String,
        /// What differs.
        reason: String,
    },
    /// A kernel cannot be launched in the shape that was asked for.
    #[error("kernel `{function}` cannot be launched: {reason}")]
    Launch {
        /// The name of the kernel.
        function: String,
        /// Which limit is exceeded.
        reason: String,
    },
    /// Two things that must live on one device live on two.
    #[error("{what} belongs to device {found}, not to device {expected}")]
    WrongDevice {
        /// Which thing.
        what: &'static str,
        /// The device it should be on.
        expected: u32,
        /// The device it is on.
        found: u32,
    },
    /// A deliberate operation on the cubin cache, such as clearing it, failed.
    ///
    /// Failures while compiling through the cache are never errors; see
    /// [`CacheWarning`](crate::CacheWarning).
    #[error("the cubin cache at {path}: {reason}")]
    Cache {
        /// The file or directory.
        path: String,
        /// What the operating system answered.
        reason: String,
    },
    /// The driver answered with an error that has no variant of its own.
    #[error("{what} failed: {text} ({name}, {code})")]
    Call {
        /// The driver function.
        what: &'static str,
        /// The driver's number for the error.
        code: u32,
        /// The driver's name for the error.
        name: String,
        /// The driver's sentence for the error.
        text: String,
    },
}

/// The driver's error numbers that this crate tells apart.
pub(crate) mod code {
    pub(crate) const INVALID_VALUE: u32 = 1;
    pub(crate) const OUT_OF_MEMORY: u32 = 2;
    pub(crate) const NO_DEVICE: u32 = 100;
    pub(crate) const NOT_FOUND: u32 = 500;
    pub(crate) const NOT_READY: u32 = 600;
}

/// The number behind a driver result.
///
/// Numbers are compared, and the enum is never matched on: the bindings are
/// those of CUDA 12.0, and a later driver may return a number that they lack.
/// All numbers, known or not, are between the enum's first and last (0..=999).
pub(crate) fn number(result: sys::CUresult) -> u32 {
    result as u32
}

/// Turns a driver result into ours; `what` is the driver function's name.
pub(crate) fn check(what: &'static str, result: sys::CUresult) -> Result<()> {
    if number(result) == 0 {
        return Ok(());
    }
    Err(failed(what, result))
}

/// The error for a driver result that is known not to be success.
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
