//! The PTX compiler that comes with the driver, called as a library.
//!
//! The driver's own entry points do not suffice: `cuLink...` compiles for linking, where
//! `setmaxnreg` is ignored and a warp-specialized kernel spills (it ran at less than half its
//! speed), and `cuModuleLoadData` does not return the machine code and makes every launch wait
//! until it is done. The library behind both has the PTX Compiler API: it compiles whole programs,
//! returns cubins, works on any number of threads, and needs no context.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::Library;

use crate::device::ComputeCapability;
use crate::{Error, Result};

/// The level of optimization, ptxas's default: kernels are tested for registers and spills under it.
pub(crate) const OPTIMIZATION_LEVEL: u32 = 3;

/// `nvPTXCompileResult`.
type Status = c_int;
/// `nvPTXCompilerHandle`.
type Handle = *mut c_void;

type Create = unsafe extern "C" fn(*mut Handle, usize, *const c_char) -> Status;
type Destroy = unsafe extern "C" fn(*mut Handle) -> Status;
type Compile = unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> Status;
type Size = unsafe extern "C" fn(Handle, *mut usize) -> Status;
type Fill = unsafe extern "C" fn(Handle, *mut c_void) -> Status;

/// The functions of the library.
pub(crate) struct PtxCompiler {
    create: Create,
    destroy: Destroy,
    compile: Compile,
    program: (Size, Fill),
    information: (Size, Fill),
    errors: (Size, Fill),
    /// Keeps the library, and with it the functions, loaded.
    _library: Library,
}

impl PtxCompiler {
    /// Returns the compiler of this machine's driver, where there is one.
    pub(crate) fn get() -> Option<&'static PtxCompiler> {
        static COMPILER: OnceLock<Option<PtxCompiler>> = OnceLock::new();
        COMPILER.get_or_init(PtxCompiler::open).as_ref()
    }

    fn open() -> Option<PtxCompiler> {
        #[cfg(windows)]
        const NAMES: [&str; 1] = ["nvptxJITCompiler64.dll"];
        #[cfg(not(windows))]
        const NAMES: [&str; 1] = ["libnvidia-ptxjitcompiler.so.1"];
        // SAFETY: the driver loads this library itself whenever it compiles.
        let library = NAMES.into_iter().find_map(|name| unsafe { Library::new(name) }.ok())?;
        // SAFETY: the signatures are those of the PTX Compiler API's documentation.
        unsafe {
            let pair = |size: &[u8], fill: &[u8]| {
                Some((*library.get::<Size>(size).ok()?, *library.get::<Fill>(fill).ok()?))
            };
            Some(PtxCompiler {
                create: *library.get(b"nvPTXCompilerCreate\0").ok()?,
                destroy: *library.get(b"nvPTXCompilerDestroy\0").ok()?,
                compile: *library.get(b"nvPTXCompilerCompile\0").ok()?,
                program: pair(
                    b"nvPTXCompilerGetCompiledProgramSize\0",
                    b"nvPTXCompilerGetCompiledProgram\0",
                )?,
                information: pair(b"nvPTXCompilerGetInfoLogSize\0", b"nvPTXCompilerGetInfoLog\0")?,
                errors: pair(b"nvPTXCompilerGetErrorLogSize\0", b"nvPTXCompilerGetErrorLog\0")?,
                _library: library,
            })
        }
    }

    /// Compiles a text. Returns the cubin and the compiler's log.
    pub(crate) fn compile(
        &self,
        ptx: &CStr,
        capability: ComputeCapability,
    ) -> Result<(Vec<u8>, String)> {
        let ComputeCapability { major, minor } = capability;
        // Since 9.0, architecture-specific features are under the name with an "a".
        let suffix = if major >= 9 { "a" } else { "" };
        let options = [
            format!("--gpu-name=sm_{major}{minor}{suffix}"),
            format!("--opt-level={}", OPTIMIZATION_LEVEL),
            "--verbose".to_owned(),
        ]
        .map(|option| CString::new(option).expect("it is ours and has no NUL"));
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();

        let mut handle = std::ptr::null_mut();
        // SAFETY: the text lives as long as this function, and its length is
        // that without the NUL.
        let status = unsafe { (self.create)(&mut handle, ptx.count_bytes(), ptx.as_ptr()) };
        if status != 0 {
            return Err(Error::Compile { log: format!("nvPTXCompilerCreate failed ({status})") });
        }
        let job = Job { compiler: self, handle };
        // SAFETY: the handle is alive, and so are the options.
        let status = unsafe { (self.compile)(handle, options.len() as c_int, options.as_ptr()) };
        if status != 0 {
            let log = job.text(self.errors);
            let log = if log.is_empty() {
                format!("nvPTXCompilerCompile failed ({status})")
            } else {
                log
            };
            return Err(Error::Compile { log });
        }
        Ok((job.bytes(self.program), job.text(self.information)))
    }
}

/// One compilation, destroyed when dropped.
struct Job<'a> {
    compiler: &'a PtxCompiler,
    handle: Handle,
}

impl Job<'_> {
    /// Returns what one of the compiler's pairs of functions gives; empty on failure.
    fn bytes(&self, (size, fill): (Size, Fill)) -> Vec<u8> {
        let mut length = 0;
        // SAFETY: the handle is alive; writes one number.
        if unsafe { size(self.handle, &mut length) } != 0 {
            return Vec::new();
        }
        // A log is written with a NUL after the size that is reported.
        let mut bytes = vec![0u8; length + 1];
        // SAFETY: there is room for what the size says, and the NUL.
        if unsafe { fill(self.handle, bytes.as_mut_ptr().cast()) } != 0 {
            return Vec::new();
        }
        bytes.truncate(length);
        bytes
    }

    fn text(&self, functions: (Size, Fill)) -> String {
        let bytes = self.bytes(functions);
        String::from_utf8_lossy(&bytes).trim_end_matches('\0').trim().to_owned()
    }
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        // SAFETY: made by nvPTXCompilerCreate and destroyed once.
        let _ = unsafe { (self.compiler.destroy)(&mut self.handle) };
    }
}
