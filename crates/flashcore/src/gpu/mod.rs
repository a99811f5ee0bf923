//! The host side of the GPU: a device, its compiled kernels, and running them.

mod kernel;

pub use kernel::{Compilation, Kernel};

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use cuda::{Buffer, Cache, Device, DeviceInfo, Event, OptimizationLevel, Stream};
use ptx::{Program, Target};

/// One GPU with a stream of ours and the kernels compiled for it so far.
#[derive(Debug)]
pub struct Gpu {
    device: Device,
    stream: Stream,
    cache: Cache,
    kernels: Mutex<HashMap<String, Arc<Kernel>>>,
}

/// Why a GPU did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// The driver refused or failed.
    #[error(transparent)]
    Driver(#[from] cuda::Error),
    /// There is no such kernel.
    #[error(transparent)]
    Kernel(#[from] kernels::Error),
    /// The problem is beyond what a kernel can count.
    #[error("{what} is too large for the GPU kernel")]
    TooLarge {
        /// What is too large.
        what: &'static str,
    },
}

impl Gpu {
    /// Opens a GPU of this machine, with the cache that the environment names.
    pub fn open(ordinal: u32) -> Result<Self, GpuError> {
        Gpu::with_cache(ordinal, Cache::from_environment())
    }

    /// Opens a GPU with a given cache.
    pub fn with_cache(ordinal: u32, cache: Cache) -> Result<Self, GpuError> {
        let device = Device::open(ordinal)?;
        let stream = Stream::new(&device)?;
        Ok(Gpu { device, stream, cache, kernels: Mutex::default() })
    }

    /// What the driver says of it.
    pub fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The stream that work is put on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The cache of compiled kernels.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// What programs can be built for: everything the device has.
    pub fn target(&self) -> Target {
        let capability = self.info().compute_capability;
        target_of(capability.major * 10 + capability.minor)
    }

    /// The compiled kernel of this name, built and compiled the first time.
    pub fn kernel(
        &self,
        name: &str,
        build: impl FnOnce() -> Result<Program, kernels::Error>,
    ) -> Result<Arc<Kernel>, GpuError> {
        let lock = || self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = lock().get(name) {
            return Ok(kernel.clone());
        }
        // Compiled outside of the lock: a second thread may do it again, which
        // is wasteful and right.
        let program = build()?;
        let level = OptimizationLevel::default();
        let kernel = Arc::new(Kernel::compile(&self.device, &self.cache, &program, level)?);
        lock().insert(name.to_owned(), kernel.clone());
        Ok(kernel)
    }

    /// A buffer with these bytes; never empty, so that it has an address.
    pub(crate) fn upload(&self, bytes: &[u8]) -> Result<Buffer, GpuError> {
        let buffer = self.room(bytes.len())?;
        self.stream.upload(bytes, buffer.slice(0..bytes.len() as u64)?)?;
        Ok(buffer)
    }

    /// A buffer of at least this size, its contents poisoned: an element
    /// that a kernel forgets to write is NaN in every float format.
    pub(crate) fn room(&self, bytes: usize) -> Result<Buffer, GpuError> {
        let buffer = Buffer::new(&self.device, (bytes as u64).max(16))?;
        self.stream.fill(buffer.all(), 0xFF)?;
        Ok(buffer)
    }

    /// Milliseconds that the GPU spends on what `work` puts on the stream.
    pub(crate) fn time(
        &self,
        work: impl FnOnce() -> Result<(), GpuError>,
    ) -> Result<f64, GpuError> {
        let (start, end) = (Event::new(&self.device)?, Event::new(&self.device)?);
        start.record(&self.stream)?;
        work()?;
        end.record(&self.stream)?;
        end.synchronize()?;
        Ok(end.milliseconds_since(&start)?)
    }
}

/// The richest target of a compute capability, as one number (90 for 9.0).
pub fn target_of(architecture: u32) -> Target {
    match architecture {
        90 => Target::SM_90A,
        other => Target::portable(other),
    }
}
