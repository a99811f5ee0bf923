//! From PTX text to a cubin, by the compiler inside the driver.

use std::ffi::{CString, c_void};
use std::time::Instant;

use cudarc::driver::sys::{self, CUjit_option as JitOption};

use crate::error::{failed, number};
use crate::{Cache, CacheKey, CacheWarning, Device, Error, Result};

/// How hard the compiler tries, as ptxas's `-O0` to `-O4`.
///
/// A low level keeps the order in which the PTX was written and takes a
/// fraction of the time: a loop of eight large wgmma took 0.1 s at `O1` and
/// 2 s or more at `O3`, with the same speed within 1 %.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OptimizationLevel {
    /// None at all.
    O0,
    /// Little: the PTX's own schedule stays.
    O1,
    /// Some.
    O2,
    /// What ptxas does when it is not told.
    #[default]
    O3,
    /// What the driver does when it is not told.
    O4,
}

impl OptimizationLevel {
    /// Every level, lowest first.
    pub const ALL: [OptimizationLevel; 5] = [
        OptimizationLevel::O0,
        OptimizationLevel::O1,
        OptimizationLevel::O2,
        OptimizationLevel::O3,
        OptimizationLevel::O4,
    ];

    /// The number in its name.
    pub const fn number(self) -> u32 {
        self as u32
    }
}

/// Machine code for one kind of device.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Cubin {
    /// The ELF file that [`Module::load`](crate::Module::load) takes.
    pub bytes: Vec<u8>,
    /// What the compiler had to say, registers and spills included. Empty
    /// where the cubin came from the cache.
    pub log: String,
    /// How long it took to compile, or to read from the cache.
    pub milliseconds: f64,
    /// Whether the cubin came from the cache.
    pub cached: bool,
    /// What went wrong with the cache. None of it makes the cubin any worse.
    pub warnings: Vec<CacheWarning>,
}

impl Device {
    /// Compiles a PTX text for this device, without any cache.
    ///
    /// A text that the compiler refuses is [`Error::Compile`], with its log.
    pub fn compile(&self, ptx: &str, level: OptimizationLevel) -> Result<Cubin> {
        let start = Instant::now();
        let text = CString::new(ptx).map_err(|_| Error::Nul { what: "the PTX text" })?;
        let _bound = self.bind()?;
        let (bytes, log) = link(&text, level)?;
        let milliseconds = start.elapsed().as_secs_f64() * 1e3;
        tracing::debug!(milliseconds, bytes = bytes.len(), ?level, "compiled PTX");
        Ok(Cubin { bytes, log, milliseconds, cached: false, warnings: Vec::new() })
    }

    /// Takes the cubin of a PTX text from the cache, or compiles it and puts
    /// it there. A broken cache is a warning in the answer, not an error.
    pub fn compile_cached(
        &self,
        ptx: &str,
        level: OptimizationLevel,
        cache: &Cache,
    ) -> Result<Cubin> {
        let start = Instant::now();
        let mut log = String::new();
        let entry = cache.get_or_compile(&self.cache_key(ptx, level), || {
            let cubin = self.compile(ptx, level)?;
            log = cubin.log;
            Ok::<_, Error>(cubin.bytes)
        })?;
        Ok(Cubin {
            bytes: entry.bytes,
            log,
            milliseconds: start.elapsed().as_secs_f64() * 1e3,
            cached: entry.cached,
            warnings: entry.warnings,
        })
    }

    /// The cache's name for what [`Device::compile_cached`] compiles.
    pub fn cache_key(&self, ptx: &str, level: OptimizationLevel) -> CacheKey {
        let info = self.info();
        CacheKey::new(ptx, &info.driver, info.compute_capability, level)
    }
}

/// A linker state that is destroyed at the end, however that comes.
struct Linker(sys::CUlinkState);

impl Drop for Linker {
    fn drop(&mut self) {
        // SAFETY: made by cuLinkCreate and destroyed once.
        let _ = unsafe { sys::cuLinkDestroy(self.0) };
    }
}

/// Runs the driver's compiler on the thread's current context.
fn link(ptx: &CString, level: OptimizationLevel) -> Result<(Vec<u8>, String)> {
    // Room for a few hundred lines; the driver cuts off what does not fit.
    let mut information = vec![0u8; 64 << 10];
    let mut errors = vec![0u8; 64 << 10];
    // Numbers travel in the pointer itself. The target is not among the
    // options: without one the driver compiles for the current context.
    let value = |number: usize| number as *mut c_void;
    let mut options = [
        (JitOption::CU_JIT_OPTIMIZATION_LEVEL, value(level.number() as usize)),
        (JitOption::CU_JIT_INFO_LOG_BUFFER, information.as_mut_ptr().cast()),
        (JitOption::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, value(information.len())),
        (JitOption::CU_JIT_ERROR_LOG_BUFFER, errors.as_mut_ptr().cast()),
        (JitOption::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, value(errors.len())),
        (JitOption::CU_JIT_LOG_VERBOSE, value(1)),
    ]
    .into_iter()
    .unzip::<_, _, Vec<_>, Vec<_>>();

    let linked = (|| {
        let mut state = std::ptr::null_mut();
        // SAFETY: as many options as values; the values and both buffers
        // outlive the linker, which is dropped at the end of this closure.
        let result = unsafe {
            sys::cuLinkCreate_v2(
                options.0.len() as u32,
                options.0.as_mut_ptr(),
                options.1.as_mut_ptr(),
                &mut state,
            )
        };
        if number(result) != 0 {
            return Err(("cuLinkCreate", result));
        }
        let linker = Linker(state);

        let text = ptx.as_bytes_with_nul();
        // SAFETY: the driver reads the text and its length, NUL included, and
        // does not write to it in spite of the pointer's type.
        let result = unsafe {
            sys::cuLinkAddData_v2(
                linker.0,
                sys::CUjitInputType::CU_JIT_INPUT_PTX,
                text.as_ptr().cast_mut().cast(),
                text.len(),
                c"kernel.ptx".as_ptr(),
                0,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        if number(result) != 0 {
            return Err(("cuLinkAddData", result));
        }

        let (mut cubin, mut size) = (std::ptr::null_mut(), 0);
        // SAFETY: writes the address and the size of memory that belongs to
        // the linker.
        let result = unsafe { sys::cuLinkComplete(linker.0, &mut cubin, &mut size) };
        if number(result) != 0 {
            return Err(("cuLinkComplete", result));
        }
        if cubin.is_null() {
            return Ok(Vec::new());
        }
        // SAFETY: the linker is alive, so its memory is; it is copied here.
        Ok(unsafe { std::slice::from_raw_parts(cubin.cast::<u8>(), size) }.to_vec())
    })();

    let information = log_text(&information);
    let errors = log_text(&errors);
    match linked {
        Ok(cubin) => Ok((cubin, information)),
        Err((what, result)) => {
            let log = [errors, information].into_iter().find(|log| !log.is_empty());
            Err(log.map_or_else(|| failed(what, result), |log| Error::Compile { log }))
        }
    }
}

/// What the driver wrote into a log buffer that was all zeros before.
fn log_text(buffer: &[u8]) -> String {
    let text = buffer.split(|&byte| byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_have_their_numbers() {
        let numbers = OptimizationLevel::ALL.map(OptimizationLevel::number);
        assert_eq!(numbers, [0, 1, 2, 3, 4]);
        assert_eq!(OptimizationLevel::default(), OptimizationLevel::O3);
    }

    #[test]
    fn logs_end_at_the_first_zero() {
        assert_eq!(log_text(b"ptxas info\n\0\0garbage"), "ptxas info");
        assert_eq!(log_text(b"\0\0"), "");
        assert_eq!(log_text(b"full"), "full");
    }
}
