//! From PTX text to a cubin, by the compiler that comes with the driver.

use std::ffi::CString;
use std::time::Instant;

use crate::compiler::PtxCompiler;
use crate::{Cache, CacheEntry, CacheKey, CacheWarning, Device, Error, Result};

/// How hard the compiler tries, as ptxas's `-O0` to `-O4`.
///
/// A low level keeps the order in which the PTX was written.
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
    /// The ELF file that [`Module::load`](crate::Module::load) takes. Where the
    /// driver's compiler cannot be called by itself, the PTX text, which the
    /// driver then compiles when it is loaded.
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

impl Cubin {
    /// What the cache gave or kept, asked since `start`.
    fn of(entry: CacheEntry, log: String, start: Instant) -> Self {
        let CacheEntry { bytes, cached, warnings } = entry;
        let milliseconds = start.elapsed().as_secs_f64() * 1e3;
        Cubin { bytes, log, milliseconds, cached, warnings }
    }
}

impl Device {
    /// Compiles a PTX text for this device, without any cache.
    ///
    /// A text that the compiler refuses is [`Error::Compile`], with its log.
    pub fn compile(&self, ptx: &str, level: OptimizationLevel) -> Result<Cubin> {
        let start = Instant::now();
        let text = CString::new(ptx).map_err(|_| Error::Nul { what: "the PTX text" })?;
        let Some(compiler) = PtxCompiler::get() else {
            let log = "the driver compiles when the module is loaded".to_owned();
            let bytes = text.into_bytes_with_nul();
            return Ok(Cubin {
                bytes,
                log,
                milliseconds: 0.0,
                cached: false,
                warnings: Vec::new(),
            });
        };
        let (bytes, log) = compiler.compile(&text, self.info().compute_capability, level)?;
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
        if PtxCompiler::get().is_none() {
            // The driver has a cache of its own for what it compiles.
            return self.compile(ptx, level);
        }
        let start = Instant::now();
        let mut log = String::new();
        let entry = cache.get_or_compile(&self.cache_key(ptx, level), || {
            let cubin = self.compile(ptx, level)?;
            log = cubin.log;
            Ok::<_, Error>(cubin.bytes)
        })?;
        Ok(Cubin::of(entry, log, start))
    }

    /// Takes the cubin of a PTX text from the cache, if it is there.
    pub fn cached(&self, ptx: &str, level: OptimizationLevel, cache: &Cache) -> Option<Cubin> {
        let start = Instant::now();
        // The only error of this call is the one made here: nothing to compile with.
        let entry = cache.get_or_compile(&self.cache_key(ptx, level), || Err(())).ok()?;
        Some(Cubin::of(entry, String::new(), start))
    }

    /// Whether cubins can be compiled ahead. Where the driver's compiler cannot be called by
    /// itself, a text is compiled while its module is loaded, one after the other.
    pub fn compiles_ahead(&self) -> bool {
        PtxCompiler::get().is_some()
    }

    /// The cache's name for what [`Device::compile_cached`] compiles.
    pub fn cache_key(&self, ptx: &str, level: OptimizationLevel) -> CacheKey {
        let info = self.info();
        CacheKey::new(ptx, &info.driver, info.compute_capability, level)
    }
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
}
