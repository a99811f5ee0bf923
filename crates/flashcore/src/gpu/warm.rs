//! Compiling kernels into the cache ahead of time.

use kernels::Configuration;
use rayon::prelude::*;
use serde::Serialize;

use super::{Gpu, GpuError};
use crate::backend::Progress;

/// A kernel that is now in the cache.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Warmed {
    /// Name of its configuration.
    pub name: String,
    /// Whether it was in the cache before.
    pub cached: bool,
    /// Time to compile it, or to read it from the cache.
    pub milliseconds: f64,
    /// Size of the machine code in bytes.
    pub bytes: usize,
    /// Failures of the cache: the kernel may have to be compiled again.
    pub warnings: Vec<String>,
}

impl Gpu {
    /// Compiles kernels into the cache, on all cores, without running them. Later processes on this
    /// machine find them there.
    pub fn warm(
        &self,
        configurations: &[Configuration],
        progress: &dyn Progress,
    ) -> Result<Vec<Warmed>, GpuError> {
        progress.begin(configurations.len() as u64);
        let warm = |configuration: &Configuration| {
            let text = ptx::print_for(&configuration.program()?, self.compiler());
            let cubin = self.device.compile_cached(&text, &self.cache)?;
            progress.advance(1);
            Ok(Warmed {
                name: configuration.name(),
                cached: cubin.cached,
                milliseconds: cubin.milliseconds,
                bytes: cubin.bytes.len(),
                warnings: cubin.warnings.iter().map(ToString::to_string).collect(),
            })
        };
        configurations.par_iter().map(warm).collect()
    }
}
