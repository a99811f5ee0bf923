//! The host side of the GPU: a device, its compiled kernels, and running them.
//!
//! [`Machine`](crate::Machine) takes tensors in host memory. Whoever has them on the device
//! already makes an [`AttentionPlan`], or a [`ForwardPlan`] where it must be that kernel, and launches
//! it on a stream of their own; for sequences of unequal lengths and caches, a [`ServingPlan`].

pub mod append;
mod attention;
mod binding;
mod chip;
pub mod decode;
mod description;
pub mod forward;
mod kernel;
mod lists;
mod merge;
pub mod mma;
pub mod prefill;
mod room;
pub(crate) mod scalar;
pub mod serving;
mod warm;

pub use append::{AppendPlan, AppendSize, AppendTensors, RotarySize, RotaryTables, TurnedQueries};
pub use attention::AttentionPlan;
pub(crate) use attention::DeviceKernel;
pub use chip::{Chip, target_of};
pub use cuda::{Buffer, Device, DeviceAddress, DeviceSlice, Stream, StreamIdentity};
pub use decode::DecodePlan;
pub use description::{LaunchDescription, Order, Passed, TensorRole};
pub use forward::{DeviceTensor, ForwardPlan, ForwardTensors};
use kernel::Source;
pub use kernel::{Compilation, Kernel, Policy};
pub(crate) use lists::Lists;
pub use merge::{AttentionState, MergePlan, MergeSize, MergeTensors};
pub use mma::MmaPlan;
pub use prefill::PrefillPlan;
pub(crate) use room::Room;
pub use scalar::ScalarPlan;
pub use serving::{ServingPages, ServingPlan, ServingSize, ServingTensors};
pub use warm::Warmed;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use cuda::{Cache, DeviceInfo, Event};
use ptx::{Program, Target};

/// One GPU with a stream of ours and the kernels compiled for it so far.
#[derive(Debug)]
pub struct Gpu {
    device: Device,
    stream: Stream,
    cache: Cache,
    policy: Policy,
    /// Each under a lock of its own, so that two threads do not compile the same.
    kernels: Mutex<HashMap<String, Place>>,
    /// Threads that compile the full form of kernels.
    compilers: Mutex<Vec<JoinHandle<()>>>,
}

/// Where a kernel will be once it is compiled.
type Place = Arc<Mutex<Option<Arc<Kernel>>>>;

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
    /// The kernel does not serve the problem.
    #[error("the {kernel} kernel does not serve this problem: {reason}")]
    Unsupported {
        /// The kernel.
        kernel: &'static str,
        /// Why not.
        reason: String,
    },
    /// A tensor cannot be given to the kernel as it lies in memory.
    #[error("the {tensor} tensor: {reason}")]
    Tensor {
        /// Its role.
        tensor: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// A kernel has a parameter that the host does not know: a bug of ours.
    #[error("kernel `{kernel}` has a parameter `{parameter}` that nobody sets")]
    Parameter {
        /// The kernel.
        kernel: String,
        /// The parameter.
        parameter: String,
    },
    /// A kernel wrote where it must not: a bug of ours.
    #[error("the kernel wrote {place}")]
    Trespass {
        /// Where.
        place: String,
    },
}

impl Gpu {
    /// Opens a GPU of this machine, with the cache that the environment names.
    pub fn open(ordinal: u32) -> Result<Self, GpuError> {
        Gpu::with_cache(ordinal, Cache::from_environment())
    }

    /// Opens a GPU with a given cache.
    pub fn with_cache(ordinal: u32, cache: Cache) -> Result<Self, GpuError> {
        Gpu::with_policy(ordinal, cache, Policy::default())
    }

    /// Opens a GPU with a given cache and way of compiling.
    pub fn with_policy(ordinal: u32, cache: Cache, policy: Policy) -> Result<Self, GpuError> {
        let device = Device::open(ordinal)?;
        let stream = Stream::new(&device)?;
        let (kernels, compilers) = Default::default();
        Ok(Gpu { device, stream, cache, policy, kernels, compilers })
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

    /// How kernels are compiled.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Its size.
    pub fn chip(&self) -> Chip {
        Chip::of(self.info())
    }

    /// What programs can be built for: everything the device has.
    pub fn target(&self) -> Target {
        self.chip().target
    }

    /// The compiled kernel of this name, built and compiled the first time.
    pub fn kernel(
        &self,
        name: &str,
        build: impl FnOnce() -> Result<Program, kernels::Error>,
    ) -> Result<Arc<Kernel>, GpuError> {
        self.kernel_or(name, || {
            Ok(Kernel::at_once(&self.device, &self.cache, &Source::new(build()?))?)
        })
    }

    /// The same for a kernel that has a compact form, by the GPU's [`Policy`].
    pub fn kernel_of_two_forms(
        &self,
        name: &str,
        full: impl FnOnce() -> Result<Program, kernels::Error>,
        compact: impl FnOnce() -> Result<Program, kernels::Error>,
    ) -> Result<Arc<Kernel>, GpuError> {
        self.kernel_or(name, || {
            let (device, cache, full) = (&self.device, &self.cache, Source::new(full()?));
            if self.policy == Policy::AtOnce || !device.compiles_ahead() {
                return Ok(Kernel::at_once(device, cache, &full)?);
            }
            if let Some(kernel) = Kernel::cached(device, cache, &full)? {
                return Ok(kernel);
            }
            let compact = Source::new(compact()?);
            let (kernel, beside) = Kernel::compact_first(device, cache, full, &compact);
            lock(&self.compilers).push(beside);
            Ok(kernel?)
        })
    }

    /// The compiled kernel of this name, or what makes it.
    fn kernel_or(
        &self,
        name: &str,
        compile: impl FnOnce() -> Result<Arc<Kernel>, GpuError>,
    ) -> Result<Arc<Kernel>, GpuError> {
        let place = lock(&self.kernels).entry(name.to_owned()).or_default().clone();
        let mut kernel = lock(&place);
        match &*kernel {
            Some(kernel) => Ok(kernel.clone()),
            None => Ok(kernel.insert(compile()?).clone()),
        }
    }

    /// Waits until every kernel that was asked for is compiled in its full form.
    pub fn finish_compiling(&self) {
        let compilers = std::mem::take(&mut *lock(&self.compilers));
        for compiler in compilers {
            // A compiler that panicked leaves the compact form in place.
            let _ = compiler.join();
        }
    }

    /// A buffer with these bytes; never empty, so that it has an address.
    pub(crate) fn upload(&self, bytes: &[u8]) -> Result<Buffer, GpuError> {
        let buffer = Buffer::new(&self.device, (bytes.len() as u64).max(16))?;
        self.stream.upload(bytes, buffer.slice(0..bytes.len() as u64)?)?;
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

impl Drop for Gpu {
    /// A thread inside the driver while the process ends would crash it.
    fn drop(&mut self) {
        self.finish_compiling();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
