//! The device API: a GPU, its compiled kernels, and plans ready to launch.
//!
//! [`Machine`](crate::Machine) takes tensors in host memory. A program whose tensors are on the
//! device describes the call with a [`Problem`](crate::Problem) and [`Tensors`] and calls
//! [`Gpu::attend`], or makes an [`AttentionPlan`] and launches it on its own stream.
//!
//! | file | its subject |
//! | --- | --- |
//! | `attention` | plans of attention, forward and backward |
//! | `append`, `combine` | plans of the serving kernels around attention |
//! | `tensors` | what a launch of attention reads and writes |
//! | `executable` | compiled launches with their arguments bound, for every family |
//! | `workspace` | scratch memory of launches, one per stream |
//! | `plans` | the cache of plans |
//! | `backend`, `backward` | attention and gradients over tensors in host memory |
//! | `kernel`, `warm` | compilation |
//! | `lists`, `guarded` | lists on the device, and results between guard zones |

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

use cuda::{Cache, DeviceInfo, Event, RelaxedCapture};
use kernels::Configuration;
use ptx::{Compiler, Target};

use self::kernel::Slot;
use self::plans::Plans;
use self::workspace::Workspaces;

/// One GPU with a stream of its own and the kernels compiled for it so far.
#[derive(Debug)]
pub struct Gpu {
    device: Device,
    stream: Stream,
    cache: Cache,
    policy: Policy,
    /// Compiled kernels. Each has its own lock, so that two threads do not compile the same one.
    kernels: Mutex<HashMap<Configuration, Slot>>,
    /// Threads that compile the full form of kernels in the background.
    compilers: Mutex<Vec<JoinHandle<()>>>,
    attention: Plans<attention::Key, AttentionPlan>,
    appending: Plans<append::Key, AppendPlan>,
    combining: Plans<combine::Key, CombinePlan>,
    /// Scratch memory that the plans of this GPU share.
    workspaces: Arc<Workspaces>,
    /// Memory for log-sum-exps that the caller did not ask for: kernels write them anyway, and
    /// since they are never read, concurrent launches may write to the same place. A graph may hold
    /// a buffer's address, so buffers are never freed; each is at least twice as large as the last.
    unread: Mutex<Vec<Buffer>>,
}

/// Why a GPU operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// A call to the driver failed.
    #[error(transparent)]
    Driver(#[from] cuda::Error),
    /// No kernel can be built for the configuration.
    #[error(transparent)]
    Kernel(#[from] kernels::Error),
    /// A size exceeds what the kernel can count.
    #[error("{what} is too large for the GPU kernel")]
    TooLarge {
        /// The size that is too large.
        what: &'static str,
    },
    /// The requested kernel does not serve the problem.
    #[error("the {kernel} kernel does not serve this problem: {reason}")]
    Unsupported {
        /// Name of the kernel.
        kernel: &'static str,
        /// Why it does not serve the problem.
        reason: String,
    },
    /// The kernel cannot read or write a tensor with this address or these strides.
    #[error("the {tensor} tensor: {reason}")]
    Tensor {
        /// Role of the tensor.
        tensor: &'static str,
        /// What is wrong with its address or strides.
        reason: String,
    },
    /// The strides of the tensors are not those of the plan, or an address is aligned to less.
    #[error("the tensors do not lie as those that the plan was made for")]
    Arrangement,
    /// A kernel has a parameter that no argument was bound to: a bug in this crate.
    #[error("{0}")]
    Binding(String),
    /// A kernel wrote outside of its results: a bug in this crate.
    #[error("the kernel wrote {place}")]
    Trespass {
        /// Where it wrote.
        place: String,
    },
}

impl Gpu {
    /// Opens a GPU of this machine, with the kernel cache that the environment names.
    pub fn open(ordinal: u32) -> Result<Self, GpuError> {
        Gpu::with_cache(ordinal, Cache::from_environment())
    }

    /// Opens a GPU with a given kernel cache.
    pub fn with_cache(ordinal: u32, cache: Cache) -> Result<Self, GpuError> {
        Gpu::with_policy(ordinal, cache, Policy::default())
    }

    /// Opens a GPU with a given kernel cache and compilation policy.
    pub fn with_policy(ordinal: u32, cache: Cache, policy: Policy) -> Result<Self, GpuError> {
        // The first call of a process may be captured.
        let _relaxed = RelaxedCapture::begin()?;
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

    /// Returns what the driver reports about the GPU.
    pub fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the stream that belongs to this GPU.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Returns the cache of compiled kernels.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Returns the properties that planning depends on.
    pub fn chip(&self) -> Chip {
        Chip::of(self.info())
    }

    /// Returns the PTX target with all features of the device.
    pub fn target(&self) -> Target {
        self.chip().target
    }

    /// Returns the compiler in the driver, for which PTX is printed.
    pub fn compiler(&self) -> Compiler {
        let version = self.info().driver.version;
        Compiler::of_cuda(version.major, version.minor)
    }

    /// Returns memory of at least `bytes` for results that are never read.
    fn unread(&self, bytes: u64) -> Result<DeviceAddress, GpuError> {
        let mut buffers = lock(&self.unread);
        if let Some(buffer) = buffers.last().filter(|buffer| buffer.bytes() >= bytes) {
            return Ok(buffer.address());
        }
        let _relaxed = RelaxedCapture::begin()?;
        let least = buffers.last().map_or(1 << 16, |buffer| 2 * buffer.bytes());
        let buffer = Buffer::new(&self.device, bytes.max(least))?;
        let address = buffer.address();
        buffers.push(buffer);
        Ok(address)
    }

    /// Copies bytes to a new buffer of at least 16 bytes, so that even an empty one has an address.
    pub fn upload(&self, bytes: &[u8]) -> Result<Buffer, GpuError> {
        let buffer = Buffer::new(&self.device, (bytes.len() as u64).max(16))?;
        self.stream.upload(bytes, buffer.slice(0..bytes.len() as u64)?)?;
        Ok(buffer)
    }

    /// Returns the milliseconds that the GPU spends on what `work` puts on the stream.
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
    /// Joins the compiling threads: a thread inside the driver while the process ends would crash
    /// it.
    fn drop(&mut self) {
        self.finish_compiling();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
