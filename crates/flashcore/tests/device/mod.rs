//! The GPU that a test runs on, if there is one, and what tests on it have in common.
#![allow(dead_code)] // no test needs all of it

use cuda::{Cache, Error};
use flashcore::Progress;
use flashcore::backend::Report;
use flashcore::gpu::{Gpu, GpuError};
use ptx::Target;

/// The GPU, or a word on why not. One that is there and fails is a failure of the test.
pub(crate) fn gpu() -> Option<Gpu> {
    match Gpu::with_cache(0, Cache::disabled()) {
        Ok(gpu) => Some(gpu),
        Err(GpuError::Driver(
            error @ (Error::NoDriver { .. } | Error::NoDevice | Error::DriverTooOld { .. }),
        )) => {
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("there is a GPU, and it does not work: {error}"),
    }
}

/// The GPU, if it is one with `wgmma`.
pub(crate) fn hopper() -> Option<Gpu> {
    let gpu = gpu()?;
    let fits = gpu.target() == Target::SM_90A;
    if !fits {
        eprintln!("skipped: {} has no wgmma", gpu.info().name);
    }
    fits.then_some(gpu)
}

/// Nobody looks on.
pub(crate) struct Silent;

impl Progress for Silent {
    fn begin(&self, _: u64) {}
    fn advance(&self, _: u64) {}
}

/// The report of a kernel that a test launched itself.
pub(crate) fn report(kernel: &str) -> Report {
    Report {
        backend: "gpu",
        kernel: kernel.to_owned(),
        configuration: None,
        reason: String::new(),
        kernel_time: Default::default(),
        first_result_time: Default::default(),
        total_time: Default::default(),
        notes: Vec::new(),
    }
}
