//! The gate's view of a kernel under test.
//!
//! A [`Subject`] is all that the gate sees of a kernel: memory for tensors, a call that is timed by
//! an independent clock, and a way to wait until all work has ended. A GPU implements it; tests
//! have another implementation, on the host, with every known way to cheat.

mod description;
mod flush;
mod gpu;
mod launcher;
mod planned;

pub use description::{KernelArgument, LaunchDescription, TensorRole, of_plan};
pub(crate) use description::{of_program, plain_map};
pub(crate) use flush::{Flush, flush_bytes};
pub use gpu::GpuSubject;
pub use launcher::Launcher;
pub use planned::Planned;

use cuda::{DeviceAddress, Stream};
use flashcore::Problem;
use flashcore::gpu::Gpu;

use crate::Error;

/// Device addresses of the tensors, by [`TensorRole`]; zero for those that a call does not have.
pub type Addresses = [DeviceAddress; TensorRole::COUNT];

/// A kernel, or a plan of several, that can be prepared for a problem on a GPU.
pub trait Source {
    /// The kernel's name.
    fn name(&self) -> String;
    /// Gets ready for a problem, whose tensors will be contiguous.
    fn prepare(&self, gpu: &Gpu, problem: &Problem) -> Result<Box<dyn Call>, Error>;
}

/// A kernel that is ready to be called.
pub trait Call {
    /// Puts a call on a stream, on tensors at these addresses.
    fn launch(&mut self, stream: &Stream, addresses: &Addresses) -> Result<(), Error>;
}

/// A piece of a subject's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Memory(pub usize);

/// The memory of a call's tensors, in the order of [`TensorRole::ALL`], with room for a guard zone
/// before each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tensors {
    /// The memories.
    pub memory: [Memory; 5],
    /// Bytes from the beginning of each to its tensor.
    pub offset: usize,
}

impl Tensors {
    /// Where one of them is.
    pub fn at(&self, role: TensorRole) -> Memory {
        self.memory[role as usize]
    }
}

/// A kernel under test, the memory that it works on, and the clock that times it.
///
/// Calls and copies go to one queue and are done in order. Work beside the queue is detected: a
/// copy of the output made right behind a call differs from what is there after everything has
/// settled.
pub trait Subject {
    /// The kernel's name.
    fn name(&self) -> String;

    /// Gets ready for a problem, whose tensors will be contiguous.
    fn prepare(&mut self, problem: &Problem) -> Result<(), Error>;

    /// Allocates bytes.
    fn allocate(&mut self, bytes: usize) -> Result<Memory, Error>;

    /// Gives up all memory.
    fn release(&mut self);

    /// Writes bytes from an offset on. Waits.
    fn write(&mut self, memory: Memory, offset: usize, bytes: &[u8]) -> Result<(), Error>;

    /// Sets every byte, in the order of the queue.
    fn fill(&mut self, memory: Memory, byte: u8) -> Result<(), Error>;

    /// Copies one memory to another of the same size, in the order of the queue.
    fn copy(&mut self, from: Memory, to: Memory) -> Result<(), Error>;

    /// Reads everything once the queue is empty.
    fn read(&mut self, memory: Memory) -> Result<Vec<u8>, Error>;

    /// Flushes the caches.
    fn flush(&mut self) -> Result<(), Error>;

    /// Records one of the two timing events, 0 or 1, on the queue.
    fn mark(&mut self, which: usize) -> Result<(), Error>;

    /// One call of the kernel.
    fn call(&mut self, tensors: &Tensors) -> Result<(), Error>;

    /// Waits for the second event; returns the milliseconds since the first.
    fn elapsed(&mut self) -> Result<f64, Error>;

    /// Waits until all work has ended, on the queue or beside it.
    fn settle(&mut self) -> Result<(), Error>;
}
