//! Compiling ahead of time.

use kernels::Configuration;
use rayon::prelude::*;
use serde::Serialize;

use super::kernel::LEVEL;
use super::{Gpu, GpuError};
use crate::backend::Progress;

/// A kernel that is in the cache now.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Warmed {
    /// Its configuration.
    pub name: String,
    /// Whether it was there before.
    pub cached: bool,
    /// How long that took, to compile or to read.
    pub milliseconds: f64,
    /// The size of the machine code.
    pub bytes: usize,
    /// What went wrong with the cache: the kernel may have to be compiled again.
    pub warnings: Vec<String>,
}

impl Gpu {
    /// Compiles kernels into the cache, on all cores, without running them. A
    /// later process on this machine finds them there.
    pub fn warm(
        &self,
        configurations: &[Configuration],
        progress: &dyn Progress,
    ) -> Result<Vec<Warmed>, GpuError> {
        progress.begin(configurations.len() as u64);
        let warm = |configuration: &Configuration| {
            let text = ptx::print_for(&configuration.program()?, self.compiler());
            let cubin = self.device.compile_cached(&text, LEVEL, &self.cache)?;
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
