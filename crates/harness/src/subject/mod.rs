//! A kernel in the place where it runs.
//!
//! A [`Subject`] is all that the gate sees of a kernel: memory to put tensors in, a call that is
//! timed by somebody else's clock, and a way to wait until nothing is going on any more. The GPU
//! is one such place; tests have another, on the host, where every known way to cheat is at home.

mod description;
mod flush;
mod gpu;
mod launcher;
mod planned;

pub use description::{LaunchDescription, Passed, Role, of_plan};
pub(crate) use description::{of_program, plain_map};
pub(crate) use flush::{Flush, flush_bytes};
pub use gpu::GpuSubject;
pub use launcher::Launcher;
pub use planned::Planned;

use cuda::{DeviceAddress, Stream};
use flashcore::Problem;
use flashcore::gpu::Gpu;

use crate::Error;

/// Where tensors are on the device, by [`Role`]; those that a call does not have are nowhere.
pub type Addresses = [DeviceAddress; Role::COUNT];

/// Something that a GPU can be made to do for a problem.
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

/// Where the tensors of a call are, in the order of [`Role::ALL`], each with the bytes
/// before its first: room for a guard zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tensors {
    /// The memories.
    pub memory: [Memory; 5],
    /// Bytes from the beginning of each to its tensor.
    pub offset: usize,
}

impl Tensors {
    /// Where one of them is.
    pub fn at(&self, role: Role) -> Memory {
        self.memory[role as usize]
    }
}

/// A kernel, the memory it works on and the clock that watches it.
///
/// Calls and copies are put on one queue and are done in their order. Whoever works beside the
/// queue is found out: a copy of the output made right behind a call differs from what is there
/// when everything has settled.
pub trait Subject {
    /// The kernel's name.
    fn name(&self) -> String;

    /// Gets ready for a problem, whose tensors will be contiguous.
    fn prepare(&mut self, problem: &Problem) -> Result<(), Error>;

    /// So many bytes.
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

    /// Puts other things into the caches.
    fn flush(&mut self) -> Result<(), Error>;

    /// Puts one of the two marks, 0 or 1, on the queue.
    fn mark(&mut self, which: usize) -> Result<(), Error>;

    /// One call of the kernel.
    fn call(&mut self, tensors: &Tensors) -> Result<(), Error>;

    /// Waits for the second mark: the milliseconds since the first.
    fn elapsed(&mut self) -> Result<f64, Error>;

    /// Waits until nothing at all is going on, on the queue or beside it.
    fn settle(&mut self) -> Result<(), Error>;
}
