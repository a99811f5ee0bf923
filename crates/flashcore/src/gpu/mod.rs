//! The device: a GPU, its compiled kernels, and plans ready to launch.
//!
//! [`Machine`](crate::Machine) takes tensors in host memory. Whoever has them on the device already
//! describes the call with a [`Problem`](crate::Problem) and [`Tensors`] and calls [`Gpu::attend`],
//! or makes an [`AttentionPlan`] and launches it on a stream of their own.
//!
//! | file | its subject |
//! | --- | --- |
//! | `attention` | plans of attention |
//! | `append`, `combine` | plans of what goes with it |
//! | `tensors` | what a launch of attention reads and writes |
//! | `executable` | launches that are compiled and bound, whatever the family |
//! | `workspace` | memory that launches write to, one for each stream |
//! | `plans` | the cache of plans |
//! | `backend` | attention over tensors in host memory |
//! | `kernel`, `warm` | compiling |
//! | `lists`, `guarded` | lists and guarded results on the device |

mod append;
mod attention;
mod backend;
mod backward;
mod combine;
mod executable;
mod guarded;
mod kernel;
mod lists;
mod plans;
mod tensors;
mod warm;
mod workspace;

pub use crate::chip::{Chip, target_of};
pub use append::{
    AppendPlan, AppendProblem, AppendTensors, RotarySize, RotaryTables, RotatedQueries,
};
pub use attention::AttentionPlan;
pub use backend::GpuBackend;
pub use combine::{AttentionState, CombinePlan, CombineProblem, CombineTensors};
pub use cuda::{Buffer, Device, DeviceAddress, DeviceSlice, Stream, StreamIdentity};
pub use guarded::GuardedBuffer;
pub use kernel::{Compilation, Kernel, Policy};
pub use lists::DeviceLists;
pub use tensors::{CapturedTensor, CapturedTensors, DeviceTensor, Gradients, Tensors};
pub use warm::Warmed;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use cuda::{Cache, DeviceInfo, Event};
use kernels::Configuration;
use ptx::{Compiler, Target};

use self::kernel::Slot;
use self::plans::Plans;
use self::workspace::Workspaces;

/// One GPU with a stream of ours and the kernels compiled for it so far.
#[derive(Debug)]
pub struct Gpu {
    device: Device,
    stream: Stream,
    cache: Cache,
    policy: Policy,
    /// Each under a lock of its own, so that two threads do not compile the same.
    kernels: Mutex<HashMap<Configuration, Slot>>,
    /// Threads that compile the full form of kernels.
    compilers: Mutex<Vec<JoinHandle<()>>>,
    attention: Plans<attention::Key, AttentionPlan>,
    appending: Plans<append::Key, AppendPlan>,
    combining: Plans<combine::Key, CombinePlan>,
    /// What plans share.
    workspaces: Arc<Workspaces>,
    /// Memory for log-sum-exps that nobody asked for. The kernels write them anyway; that several
    /// launches write to one place does no harm, since it is never read. A graph may know a
    /// buffer's address, so none is given back; each is at least twice as large as the last.
    unread: Mutex<Vec<Buffer>>,
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
    /// A kernel has a parameter that nobody sets: a bug of ours.
    #[error("{0}")]
    Binding(String),
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
        Ok(Gpu {
            device,
            stream,
            cache,
            policy,
            kernels: Mutex::default(),
            compilers: Mutex::default(),
            attention: Plans::default(),
            appending: Plans::default(),
            combining: Plans::default(),
            workspaces: Arc::default(),
            unread: Mutex::default(),
        })
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

    /// The compiler in the driver: what texts are printed for.
    pub fn compiler(&self) -> Compiler {
        let version = self.info().driver.version;
        Compiler::of_cuda(version.major, version.minor)
    }

    /// Memory that nobody reads.
    fn unread(&self, bytes: u64) -> Result<DeviceAddress, GpuError> {
        let mut buffers = lock(&self.unread);
        if let Some(buffer) = buffers.last().filter(|buffer| buffer.bytes() >= bytes) {
            return Ok(buffer.address());
        }
        let _relaxed = cuda::RelaxedCapture::begin()?;
        let least = buffers.last().map_or(1 << 16, |buffer| 2 * buffer.bytes());
        let buffer = Buffer::new(&self.device, bytes.max(least))?;
        let address = buffer.address();
        buffers.push(buffer);
        Ok(address)
    }

    /// A buffer with these bytes; never empty, so that it has an address.
    pub fn upload(&self, bytes: &[u8]) -> Result<Buffer, GpuError> {
        let buffer = Buffer::new(&self.device, (bytes.len() as u64).max(16))?;
        self.stream.upload(bytes, buffer.slice(0..bytes.len() as u64)?)?;
        Ok(buffer)
    }

    /// Milliseconds that the GPU spends on what `work` puts on the stream.
    pub fn time(&self, work: impl FnOnce() -> Result<(), GpuError>) -> Result<f64, GpuError> {
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

impl DeviceTensor {
    /// Refuses an address or strides that are no multiple of so many bytes.
    fn aligned(&self, tensor: &'static str, element: usize, bytes: usize) -> Result<(), GpuError> {
        let DeviceTensor { address, strides } = self;
        let refuse = |reason: String| Err(GpuError::Tensor { tensor, reason });
        if address.0 == 0 || !address.0.is_multiple_of(bytes as u64) {
            return refuse(format!("its address {address} is not a multiple of {bytes}"));
        }
        for (name, stride) in
            [("batch", strides.batch), ("length", strides.length), ("heads", strides.heads)]
        {
            let given = stride.saturating_mul(element);
            if !given.is_multiple_of(bytes) {
                return refuse(format!(
                    "its {name} stride of {given} bytes is not a multiple of {bytes}"
                ));
            }
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
