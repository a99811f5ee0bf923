//! Streams: queues of work on a device, owned or borrowed.

use std::ptr::null_mut;
use std::thread::{self, ThreadId};

use cudarc::driver::sys;

use crate::error::check;
use crate::{Device, Event, Result};

/// A queue of work on a device. Work on one stream runs in order.
#[derive(Debug)]
pub struct Stream {
    device: Device,
    handle: sys::CUstream,
    owned: bool,
}

// SAFETY: a stream's handle may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: the driver locks a stream for each call on it.
unsafe impl Sync for Stream {}

/// Identifies a queue, for resources that concurrent work must not share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamIdentity {
    handle: u64,
    /// The thread, for a handle that means a different queue on each thread.
    thread: Option<ThreadId>,
}

/// The handle of the per-thread default stream, `CU_STREAM_PER_THREAD`.
const PER_THREAD: u64 = 2;

impl Stream {
    /// Creates a stream that does not synchronize with the default stream.
    pub fn new(device: &Device) -> Result<Stream> {
        let _bound = device.bind()?;
        let mut handle = null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is bound; writes one handle.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut handle, flags) })?;
        Ok(Stream { device: device.clone(), handle, owned: true })
    }

    /// Borrows a stream that someone else created and will destroy, such as PyTorch's current
    /// stream. 0 is the default stream, which PyTorch uses unless told otherwise.
    ///
    /// # Safety
    ///
    /// The handle must be that of a stream on this device which lives at least as long as the
    /// returned value. The driver dereferences the handle, so a wrong one can crash the process.
    pub unsafe fn borrow(device: &Device, handle: u64) -> Stream {
        Stream { device: device.clone(), handle: handle as sys::CUstream, owned: false }
    }

    /// Returns its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the driver's handle, for other libraries.
    pub fn handle(&self) -> u64 {
        self.handle as u64
    }

    /// Returns which queue this is on the calling thread. The handle alone does not tell:
    /// `CU_STREAM_PER_THREAD` is the default stream of whichever thread uses it.
    pub fn identity(&self) -> StreamIdentity {
        let handle = self.handle();
        StreamIdentity { handle, thread: (handle == PER_THREAD).then(|| thread::current().id()) }
    }

    pub(crate) fn raw(&self) -> sys::CUstream {
        self.handle
    }

    /// Waits for all work on the stream, and reports errors that occurred there.
    pub fn synchronize(&self) -> Result<()> {
        let _bound = self.device.bind()?;
        // SAFETY: the handle is alive.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.handle) })
    }

    /// Makes work that is enqueued from now on wait for an event.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let _bound = self.device.bind()?;
        // SAFETY: both handles are alive; the event may be of another device.
        let result = unsafe { sys::cuStreamWaitEvent(self.handle, event.raw(), 0) };
        check("cuStreamWaitEvent", result)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        let Ok(_bound) = self.device.bind() else {
            return;
        };
        // SAFETY: made in `new` and destroyed once; the driver finishes the
        // stream's work first.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.handle) };
    }
}
