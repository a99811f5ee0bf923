//! Streams: queues of work on a device, ours or borrowed.

use std::fmt;
use std::ptr::null_mut;
use std::thread::{self, ThreadId};

use cudarc::driver::sys;

use crate::error::{check, code, number};
use crate::{Device, Event, Result};

/// A queue of work on a device. What is put on one runs in order.
pub struct Stream {
    device: Device,
    handle: sys::CUstream,
    owned: bool,
}

// SAFETY: a stream's handle may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: the driver locks a stream for each call on it.
unsafe impl Sync for Stream {}

/// Tells queues apart, for what must not be shared by work that runs at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamIdentity {
    handle: u64,
    /// The thread, where the handle is that of another queue on each.
    thread: Option<ThreadId>,
}

/// The handle that every thread has for a default stream of its own, `CU_STREAM_PER_THREAD`.
const PER_THREAD: u64 = 2;

impl Stream {
    /// A new stream, which does not wait for the default stream.
    pub fn new(device: &Device) -> Result<Stream> {
        let _bound = device.bind()?;
        let mut handle = null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is bound; writes one handle.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut handle, flags) })?;
        Ok(Stream { device: device.clone(), handle, owned: true })
    }

    /// The device's default stream, where PyTorch works unless told otherwise.
    pub fn default_of(device: &Device) -> Stream {
        Stream { device: device.clone(), handle: null_mut(), owned: false }
    }

    /// A stream that someone else made and will destroy, such as PyTorch's
    /// current stream. 0 is the default stream.
    ///
    /// # Safety
    ///
    /// The handle must be that of a stream on this device which lives for as
    /// long as the answer. The driver follows the handle as a pointer, so a
    /// wrong one can crash the process.
    pub unsafe fn borrow(device: &Device, handle: u64) -> Stream {
        Stream { device: device.clone(), handle: handle as sys::CUstream, owned: false }
    }

    /// The device it is on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The driver's handle, for other libraries.
    pub fn handle(&self) -> u64 {
        self.handle as u64
    }

    /// Which queue it is on this thread. Handles alone do not tell: one of them is the default
    /// stream of whichever thread uses it.
    pub fn identity(&self) -> StreamIdentity {
        let handle = self.handle();
        StreamIdentity { handle, thread: (handle == PER_THREAD).then(|| thread::current().id()) }
    }

    pub(crate) fn raw(&self) -> sys::CUstream {
        self.handle
    }

    /// Waits for everything that was put on it, and reports what went wrong
    /// there.
    pub fn synchronize(&self) -> Result<()> {
        let _bound = self.device.bind()?;
        // SAFETY: the handle is alive.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.handle) })
    }

    /// Whether everything that was put on it is done.
    pub fn is_idle(&self) -> Result<bool> {
        let _bound = self.device.bind()?;
        // SAFETY: the handle is alive.
        let result = unsafe { sys::cuStreamQuery(self.handle) };
        if number(result) == code::NOT_READY {
            return Ok(false);
        }
        check("cuStreamQuery", result).map(|()| true)
    }

    /// Makes what is put on it from now on wait for an event.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let _bound = self.device.bind()?;
        // SAFETY: both handles are alive; the event may be of another device.
        let result = unsafe { sys::cuStreamWaitEvent(self.handle, event.raw(), 0) };
        check("cuStreamWaitEvent", result)
    }

    /// Whether what is put on it is captured into a graph and does not run.
    pub fn is_capturing(&self) -> Result<bool> {
        let _bound = self.device.bind()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: writes one of the three statuses, which have not changed
        // since CUDA 10.
        let result = unsafe { sys::cuStreamIsCapturing(self.handle, &mut status) };
        check("cuStreamIsCapturing", result)?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
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

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("device", &self.device.ordinal())
            .field("handle", &self.handle)
            .field("owned", &self.owned)
            .finish()
    }
}
