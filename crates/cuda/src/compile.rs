//! Compilation of PTX to cubins, with the compiler that comes with the driver.

use std::ffi::CString;
use std::time::Instant;

use crate::compiler::PtxCompiler;
use crate::{Cache, CacheEntry, CacheKey, CacheWarning, Device, Error, Result};

/// Machine code for one kind of device.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Cubin {
    /// The ELF file that [`Module::load`](crate::Module::load) takes. Where the driver's compiler
    /// cannot be called on its own, the PTX text, which the driver compiles when it is loaded.
    pub bytes: Vec<u8>,
    /// Log of the compiler, including registers and spills. Empty where the cubin came from the
    /// cache.
    pub log: String,
    /// Time to compile it, or to read it from the cache.
    pub milliseconds: f64,
    /// Whether the cubin came from the cache.
    pub cached: bool,
    /// Failures of the cache. They do not affect the cubin.
    pub warnings: Vec<CacheWarning>,
}

impl Cubin {
    /// Returns a cubin from an entry of the cache; the time counts from `start`.
    fn of(entry: CacheEntry, log: String, start: Instant) -> Self {
        let CacheEntry { bytes, cached, warnings } = entry;
        let milliseconds = start.elapsed().as_secs_f64() * 1e3;
        Cubin { bytes, log, milliseconds, cached, warnings }
    }
}

impl Device {
    /// Compiles a PTX text for this device, without any cache.
    ///
    /// Returns [`Error::Compile`], with the compiler's log, for a text that the compiler refuses.
    pub fn compile(&self, ptx: &str) -> Result<Cubin> {
        let start = Instant::now();
        let text = CString::new(ptx).map_err(|_| Error::Nul { what: "the PTX text" })?;
        let (bytes, log) = match PtxCompiler::get() {
            Some(compiler) => compiler.compile(&text, self.info().compute_capability)?,
            None => {
                let log = "the driver compiles when the module is loaded".to_owned();
                (text.into_bytes_with_nul(), log)
            }
        };
        let entry = CacheEntry { bytes, cached: false, warnings: Vec::new() };
        let cubin = Cubin::of(entry, log, start);
        let (milliseconds, bytes) = (cubin.milliseconds, cubin.bytes.len());
        tracing::debug!(milliseconds, bytes, "compiled PTX");
        Ok(cubin)
    }

    /// Takes the cubin of a PTX text from the cache, or compiles it and stores it there. Failures
    /// of the cache are warnings in the result, not errors.
    pub fn compile_cached(&self, ptx: &str, cache: &Cache) -> Result<Cubin> {
        if PtxCompiler::get().is_none() {
            // The driver has its own cache for what it compiles.
            return self.compile(ptx);
        }
        let start = Instant::now();
        let mut log = String::new();
        let entry = cache.get_or_compile(&self.cache_key(ptx), || {
            let cubin = self.compile(ptx)?;
            log = cubin.log;
            Ok::<_, Error>(cubin.bytes)
        })?;
        Ok(Cubin::of(entry, log, start))
    }

    /// Takes the cubin of a PTX text from the cache, if it is there.
    pub fn cached(&self, ptx: &str, cache: &Cache) -> Option<Cubin> {
        let start = Instant::now();
        // The only error is the closure's: the cubin is not in the cache.
        let entry = cache.get_or_compile(&self.cache_key(ptx), || Err(())).ok()?;
        Some(Cubin::of(entry, String::new(), start))
    }

    /// Tells whether cubins can be compiled ahead of loading. Where the driver's compiler cannot be
    /// called on its own, texts are compiled one at a time, while their modules are loaded.
    pub fn compiles_ahead(&self) -> bool {
        PtxCompiler::get().is_some()
    }

    /// Returns the cache key of what [`Device::compile_cached`] compiles.
    pub fn cache_key(&self, ptx: &str) -> CacheKey {
        let info = self.info();
        CacheKey::new(ptx, &info.driver, info.compute_capability)
    }
}
