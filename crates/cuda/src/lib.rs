//! The CUDA driver, as FlashCore uses it: devices, compilation and the cubin
//! cache, memory, streams, tensor maps and launches, over `cudarc`'s bindings.
//!
//! # The way of a kernel
//!
//! 1. [`Driver::probe`] finds and initialises the driver. Everything else goes
//!    through it, so a machine without one gets an [`Error`] that says so.
//! 2. [`Device::open`] takes the device's primary context, the one PyTorch
//!    uses too. Every call binds it to the calling thread and puts back what
//!    was bound before.
//! 3. [`Device::compile`] turns PTX into a [`Cubin`] with the compiler that is
//!    in the driver; [`Device::compile_cached`] asks the [`Cache`] on disk
//!    first.
//! 4. [`Module::load`] brings the cubin to the device, and
//!    [`Module::function`] finds a kernel in it and compares its parameters.
//! 5. [`Function::launch`] puts it on a [`Stream`] with [`Arguments`], among
//!    them [`TensorMap`]s for the copy engine. [`Event`]s measure it, and a
//!    [`Graph`] repeats it.
//!
//! # Errors
//!
//! Nothing that a caller passes in makes this crate panic: sizes, alignments,
//! shapes and kinds are checked here, with a message that names what is wrong,
//! before the driver answers "invalid argument". What a device does later is
//! reported, as the driver does it, by the next call that waits:
//! [`Stream::synchronize`] and the copies. A device that followed a wrong
//! address is lost to the process. Trouble with the cache is never an error
//! but a [`CacheWarning`].
//!
//! # What is trusted
//!
//! All `unsafe` code around the driver is in this crate. Its own functions are safe
//! to call, but for [`Stream::borrow`], since the driver follows a stream's
//! handle as a pointer. The code of a kernel and the device addresses given to
//! it are trusted, as are [`DeviceSlice::foreign`] addresses: what a wrong one
//! damages is device memory, or the context.
//!
//! # Example
//!
//! ```no_run
//! use flashcore_cuda::{Arguments, Buffer, Cache, Device, Launch, Module, OptimizationLevel, Parameter};
//! use flashcore_cuda::Stream;
//!
//! # fn main() -> flashcore_cuda::Result<()> {
//! # let ptx = "";
//! let device = Device::open(0)?;
//! let stream = Stream::new(&device)?;
//! let cache = Cache::from_environment();
//! let cubin = device.compile_cached(ptx, OptimizationLevel::O1, &cache)?;
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
// Calling the driver is calling C. The rest of the workspace denies this.
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
pub use compile::{Cubin, OptimizationLevel};
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
pub use tensor_map::{L2Promotion, TensorMap, TensorMapError};
