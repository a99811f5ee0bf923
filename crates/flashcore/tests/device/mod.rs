//! The GPU that a test runs on, if there is one.

use cuda::{Cache, Error};
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
#[allow(dead_code)] // not every test that has a GPU asks for this one
pub(crate) fn hopper() -> Option<Gpu> {
    let gpu = gpu()?;
    let fits = gpu.target() == Target::SM_90A;
    if !fits {
        eprintln!("skipped: {} has no wgmma", gpu.info().name);
    }
    fits.then_some(gpu)
}
