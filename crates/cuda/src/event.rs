//! Events: points in a stream to wait for, and to measure the time between.

use std::ptr::null_mut;

use cudarc::driver::sys;

use crate::error::{check, code, number};
use crate::{Device, Result, Stream};

/// A point in a stream, with the time at which the device reached it.
#[derive(Debug)]
pub struct Event {
    device: Device,
    handle: sys::CUevent,
}

// SAFETY: an event's handle may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: the driver locks an event for each call on it.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event that is not recorded yet.
    pub fn new(device: &Device) -> Result<Event> {
        let _bound = device.bind()?;
        let mut handle = null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT as u32;
        // SAFETY: a context is bound; writes one handle.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut handle, flags) })?;
        Ok(Event { device: device.clone(), handle })
    }

    /// Records the event on a stream, after all work that is enqueued there. It replaces an earlier
    /// record.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.device.expect_same(stream.device(), "the stream")?;
        let _bound = self.device.bind()?;
        // SAFETY: both handles are alive and of one context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.handle, stream.raw()) })
    }

    /// Waits until the event is reached.
    pub fn synchronize(&self) -> Result<()> {
        let _bound = self.device.bind()?;
        // SAFETY: the handle is alive.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.handle) })
    }

    /// Tells whether the event is reached.
    pub fn is_passed(&self) -> Result<bool> {
        let _bound = self.device.bind()?;
        // SAFETY: the handle is alive.
        let result = unsafe { sys::cuEventQuery(self.handle) };
        if number(result) == code::NOT_READY {
            return Ok(false);
        }
        check("cuEventQuery", result).map(|()| true)
    }

    /// Returns the milliseconds from `start` to this event, once both are reached. The resolution
    /// of the device's clock is about half a microsecond.
    pub fn milliseconds_since(&self, start: &Event) -> Result<f64> {
        self.device.expect_same(&start.device, "the first event")?;
        let _bound = self.device.bind()?;
        let mut milliseconds = 0f32;
        // SAFETY: both handles are alive and of one context.
        let result =
            unsafe { sys::cuEventElapsedTime(&mut milliseconds, start.handle, self.handle) };
        check("cuEventElapsedTime", result)?;
        Ok(milliseconds.into())
    }

    pub(crate) fn raw(&self) -> sys::CUevent {
        self.handle
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let Ok(_bound) = self.device.bind() else {
            return;
        };
        // SAFETY: made in `new` and destroyed once; the driver keeps what it
        // needs of an event that is still on a stream.
        let _ = unsafe { sys::cuEventDestroy_v2(self.handle) };
    }
}
