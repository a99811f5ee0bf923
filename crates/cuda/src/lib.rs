//! The CUDA driver as FlashCore uses it: devices, compilation and the cubin cache, memory, streams,
//! tensor maps, launches and graphs, over `cudarc`'s bindings.
//!
//! # From PTX to a launch
//!
//! 1. [`Driver::probe`] finds and initialises the driver. Everything else goes through it, so a
//!    machine without one gets an [`Error`] that says so.
//! 2. [`Device::open`] retains the device's primary context, which PyTorch uses too. Every call
//!    makes it current on the calling thread and restores what was current before.
//! 3. [`Device::compile`] turns PTX into a [`Cubin`] with the compiler in the driver;
//!    [`Device::compile_cached`] looks in the [`Cache`] on disk first.
//! 4. [`Module::load`] loads the cubin on the device, and [`Module::function`] finds a kernel in it
//!    and checks its parameters.
//! 5. [`Function::launch`] enqueues it on a [`Stream`] with [`Arguments`], among them
//!    [`TensorMap`]s for the copy engine (TMA). [`Event`]s time it, and a [`Graph`] replays it.
//!
//! # Errors
//!
//! Invalid arguments never make this crate panic: sizes, alignments, shapes and types are checked
//! here, with a message that names what is wrong, before the driver could answer "invalid
//! argument". Faults on the device are reported, as by the driver itself, by the next call that
//! waits: [`Stream::synchronize`] and the copies. A device that accessed an invalid address is lost
//! to the process. Failures of the cache are never errors but [`CacheWarning`]s.
//!
//! # Safety
//!
//! All `unsafe` code around the driver is in this crate. Its functions are safe to call, except for
//! [`Stream::borrow`], since the driver dereferences a stream's handle. Kernel code and the device
//! addresses passed to it are trusted, as are [`DeviceSlice::foreign`] addresses: a wrong one can
//! damage device memory or the context.
//!
//! # Example
//!
//! ```no_run
//! use flashcore_cuda::{Arguments, Buffer, Cache, Device, Launch, Module, Parameter, Stream};
//!
//! # fn main() -> flashcore_cuda::Result<()> {
//! # let ptx = "";
//! let device = Device::open(0)?;
//! let stream = Stream::new(&device)?;
//! let cache = Cache::from_environment();
//! let cubin = device.compile_cached(ptx, &cache)?;
//! let module = Module::load(&device, &cubin.bytes)?;
//! let double = module.function("double", &[Parameter::Address, Parameter::U32])?;
//!
//! let numbers = Buffer::from_slice(&stream, &[1f32, 2.0, 3.0])?;
//! let mut arguments = Arguments::new();
//! arguments.push(numbers.address()).push(3u32);
//! let launch = Launch { block: [128, 1, 1], ..Launch::default() };
//! double.launch(&stream, &launch, &arguments)?;
//! assert_eq!(stream.download_vec::<f32>(numbers.all())?, [2.0, 4.0, 6.0]);
//! # Ok(())
//! # }
//! ```
// Calling the driver is calling C. The rest of the workspace denies unsafe code.
#![allow(unsafe_code)]

mod cache;
mod compile;
mod compiler;
mod device;
mod driver;
mod error;
mod event;
mod exit;
mod graph;
mod launch;
mod memory;
mod module;
mod stream;
mod tensor_map;
pub mod toolkit;

pub use cache::{Cache, CacheEntry, CacheKey, CacheSize, CacheWarning};
pub use compile::Cubin;
pub use device::{ComputeCapability, Device, DeviceInfo, Uuid};
pub use driver::{Driver, DriverVersion};
pub use error::{Error, Result};
pub use event::Event;
pub use exit::Unfinished;
pub use graph::{ExecutableGraph, Graph, Recording, RelaxedCapture};
pub use launch::{Argument, Arguments, Launch, MAX_ARGUMENTS, Parameter};
pub use memory::{Buffer, DeviceAddress, DeviceSlice, Plain};
pub use module::{Function, FunctionAttributes, Module};
pub use stream::{Stream, StreamIdentity};
pub use tensor_map::{TensorMap, TensorMapError};
