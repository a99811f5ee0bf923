//! What is executed on streams, and graphs of it.

use std::ffi::c_void;
use std::sync::Arc;

use crate::error::{Error, Result, explain};
use crate::gpu::{Gpu, Handle};
use crate::launch::Launch;

/// Work on a stream. Addresses in the host's memory are numbers, as work may be executed by any
/// thread.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    /// Runs a kernel.
    Launch(Launch),
    /// Copies from the host.
    Upload { from: usize, to: u64, bytes: usize },
    /// Copies to the host.
    Download { from: u64, to: usize, bytes: usize },
    /// Copies on the device.
    Copy { from: u64, to: u64, bytes: usize },
    /// Repeats a byte.
    Fill { to: u64, value: u8, count: usize },
}

/// Work in an order that respects the dependencies, and what belongs to it. A graph and its
/// instances each have one.
#[derive(Clone, Default)]
pub(crate) struct Graph {
    pub(crate) operations: Vec<Operation>,
    /// Destroyed with the last graph that has them.
    pub(crate) objects: Vec<Arc<UserObject>>,
}

/// An object whose owner wants to know when it is not used any more.
pub(crate) struct UserObject {
    object: usize,
    destroy: unsafe extern "C" fn(*mut c_void),
}

impl Drop for UserObject {
    fn drop(&mut self) {
        // SAFETY: the creator of the object gave both for this, and this is done once. No lock is
        // held: whoever removes a graph drops it outside.
        unsafe { (self.destroy)(self.object as *mut c_void) };
    }
}

impl Gpu {
    /// Executes an operation.
    pub(crate) fn execute(&mut self, operation: &Operation) -> Result {
        let done = match *operation {
            Operation::Launch(ref launch) => return self.run(launch),
            Operation::Upload { from, to, bytes } => {
                // SAFETY: the caller of the copy vouched for the memory, until the work is done.
                let bytes = unsafe { std::slice::from_raw_parts(from as *const u8, bytes) };
                self.memory.write_at(to, bytes)
            }
            Operation::Download { from, to, bytes } => {
                self.memory.read(from, bytes as u64).map(|source| {
                    let to = to as *mut u8;
                    // SAFETY: as above; the memory is the caller's and no other thread's.
                    unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), to, bytes) };
                })
            }
            Operation::Copy { from, to, bytes } => self.memory.copy(from, to, bytes as u64),
            Operation::Fill { to, value, count } => self.memory.write_at(to, &vec![value; count]),
        };
        done.map_err(|reason| explain(Error::InvalidValue, format!("a copy or fill of {reason}")))
    }

    /// Makes a graph that can be launched.
    pub(crate) fn instantiate(&mut self, graph: Handle) -> Result<Handle> {
        let graph = self.graphs.get(&graph).ok_or(Error::InvalidHandle)?.clone();
        let handle = self.handle();
        self.executables.insert(handle, graph);
        Ok(handle)
    }

    /// Executes a graph on a stream; in a capture, its work becomes part of the captured graph.
    pub(crate) fn launch_graph(&mut self, executable: Handle, stream: Handle) -> Result {
        let graph = self.executables.get(&executable).ok_or(Error::InvalidHandle)?;
        for operation in graph.operations.clone() {
            self.enqueue(stream, operation)?;
        }
        Ok(())
    }

    pub(crate) fn create_object(
        &mut self,
        object: usize,
        destroy: unsafe extern "C" fn(*mut c_void),
        references: u32,
    ) -> Result<Handle> {
        let handle = self.handle();
        let object = Arc::new(UserObject { object, destroy });
        self.objects.insert(handle, (object, references));
        Ok(handle)
    }

    /// Gives a graph references to a user object; with `moved`, those of its creator.
    pub(crate) fn give_object(
        &mut self,
        graph: Handle,
        object: Handle,
        references: u32,
        moved: bool,
    ) -> Result {
        let graph = self.graphs.get_mut(&graph).ok_or(Error::InvalidHandle)?;
        let (shared, _) = self.objects.get(&object).ok_or(Error::InvalidHandle)?;
        graph.objects.push(shared.clone());
        if moved {
            drop(self.release_object(object, references)?);
        }
        Ok(())
    }

    /// Gives references to a user object back. Returns it if they were the last, to be dropped
    /// outside of the lock.
    pub(crate) fn release_object(
        &mut self,
        object: Handle,
        references: u32,
    ) -> Result<Option<Arc<UserObject>>> {
        let (_, left) = self.objects.get_mut(&object).ok_or(Error::InvalidHandle)?;
        *left = left.checked_sub(references).ok_or(Error::InvalidValue)?;
        let last = *left == 0;
        Ok(last.then(|| self.objects.remove(&object)).flatten().map(|(object, _)| object))
    }
}
