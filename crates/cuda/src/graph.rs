//! CUDA graphs: work that is captured once and launched many times as a whole.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr::null_mut;

use cudarc::driver::sys;

use crate::error::check;
use crate::{Device, Driver, Error, Result, Stream};

/// A captured graph.
///
/// It does not keep the memory that its kernels use alive: buffers must outlive the last launch.
#[derive(Debug)]
pub struct Graph {
    device: Device,
    handle: sys::CUgraph,
}

// SAFETY: the handle may be used from any thread, by one at a time.
unsafe impl Send for Graph {}
// SAFETY: `instantiate`, the only use of a shared graph, only reads it.
unsafe impl Sync for Graph {}

impl Stream {
    /// Captures what `work` enqueues on this stream into a graph instead of running it.
    ///
    /// Only work of this thread is captured, and `work` may neither wait for the device nor
    /// allocate. The default stream cannot be captured.
    pub fn capture<E: From<Error>>(
        &self,
        work: impl FnOnce(&Stream) -> Result<(), E>,
    ) -> Result<Graph, E> {
        let mut capture = Capture::begin(self)?;
        work(self)?;
        Ok(capture.end()?)
    }
}

/// An ongoing capture on a stream, whoever began it.
#[derive(Debug)]
pub struct Recording<'stream> {
    id: u64,
    /// Lives as long as the capture.
    graph: sys::CUgraph,
    stream: &'stream Stream,
}

impl Stream {
    /// Returns the capture to which work on this stream goes. `None` on the default stream, which
    /// cannot be captured.
    pub fn recording(&self) -> Result<Option<Recording<'_>>> {
        if self.raw().is_null() {
            return Ok(None);
        }
        let _bound = self.device().bind()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let (mut id, mut graph) = (0, null_mut());
        // SAFETY: writes a status, a number and a handle; what is null is not asked for.
        let result = unsafe {
            sys::cuStreamGetCaptureInfo_v2(
                self.raw(),
                &mut status,
                &mut id,
                &mut graph,
                null_mut(),
                null_mut(),
            )
        };
        check("cuStreamGetCaptureInfo", result)?;
        let active = status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
        Ok(active.then_some(Recording { id, graph, stream: self }))
    }
}

impl Recording<'_> {
    /// Returns a number that is unique among the captures of this process.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Hands ownership of a value to the graph that is being captured: it is dropped when neither
    /// the graph nor any instance of it is left. That may happen on a thread of the driver, on
    /// which the driver must not be called.
    pub fn give<T: Send + 'static>(&self, thing: T) -> Result<()> {
        unsafe extern "C" fn take<T>(thing: *mut c_void) {
            // SAFETY: the pointer is the one below, and the driver gives it once.
            drop(unsafe { Box::from_raw(thing.cast::<T>()) });
        }
        let _bound = self.stream.device().bind()?;
        let thing = Box::into_raw(Box::new(thing)).cast::<c_void>();
        let mut object = null_mut();
        let unordered = sys::CUuserObject_flags_enum::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
        // SAFETY: writes one handle; `take` knows what the pointer is.
        let result =
            unsafe { sys::cuUserObjectCreate(&mut object, thing, Some(take::<T>), 1, unordered) };
        if let Err(error) = check("cuUserObjectCreate", result) {
            // SAFETY: nobody else has it.
            unsafe { take::<T>(thing) };
            return Err(error);
        }
        let moved = sys::CUuserObjectRetain_flags_enum::CU_GRAPH_USER_OBJECT_MOVE as u32;
        // SAFETY: the graph of a capture under way; the one reference to the object becomes its.
        let result = unsafe { sys::cuGraphRetainUserObject(self.graph, object, 1, moved) };
        check("cuGraphRetainUserObject", result).inspect_err(|_| {
            // SAFETY: the reference is still ours, and `take` is called.
            let _ = unsafe { sys::cuUserObjectRelease(object, 1) };
        })
    }
}

/// An ongoing capture. If it is dropped early, by an error or a panic, it is ended and its graph
/// discarded, so that the stream works again.
struct Capture<'stream> {
    stream: &'stream Stream,
    under_way: bool,
}

impl<'stream> Capture<'stream> {
    fn begin(stream: &'stream Stream) -> Result<Capture<'stream>> {
        let _bound = stream.device().bind()?;
        // Not the global mode, in which an allocation on another thread would invalidate the
        // capture.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the handle is alive.
        let result = unsafe { sys::cuStreamBeginCapture_v2(stream.raw(), mode) };
        check("cuStreamBeginCapture", result)?;
        Ok(Capture { stream, under_way: true })
    }

    fn end(&mut self) -> Result<Graph> {
        self.under_way = false;
        let device = self.stream.device();
        let _bound = device.bind()?;
        let mut handle = null_mut();
        // SAFETY: ends the capture that `begin` began, on the same thread,
        // since a `Capture` never leaves `Stream::capture`.
        let result = unsafe { sys::cuStreamEndCapture(self.stream.raw(), &mut handle) };
        // Created before the check, so that a graph returned with an error is destroyed.
        let graph = Graph { device: device.clone(), handle };
        check("cuStreamEndCapture", result)?;
        Ok(graph)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.under_way {
            let _ = self.end();
        }
    }
}

/// While this lives, the calling thread may allocate, free and load modules even though a stream is
/// being captured, by this or another thread.
///
/// PyTorch captures in the driver's global mode, in which an allocation on any thread is refused
/// and invalidates the capture. Work under this guard is not captured, so its effect must hold for
/// all launches of the graph.
#[derive(Debug)]
pub struct RelaxedCapture {
    before: sys::CUstreamCaptureMode,
    /// Not `Send`: the mode belongs to one thread.
    thread: PhantomData<*const ()>,
}

impl RelaxedCapture {
    /// Relaxes the mode of this thread until the returned guard is dropped.
    pub fn begin() -> Result<RelaxedCapture> {
        Driver::probe()?;
        let before = exchange(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
        Ok(RelaxedCapture { before, thread: PhantomData })
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        let _ = (exchange(self.before), self.thread);
    }
}

/// Sets the calling thread's capture mode, and returns the previous one.
fn exchange(mut mode: sys::CUstreamCaptureMode) -> Result<sys::CUstreamCaptureMode> {
    // SAFETY: the driver is initialised; reads one of the three modes and
    // writes another.
    let result = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
    check("cuThreadExchangeStreamCaptureMode", result)?;
    Ok(mode)
}

impl Graph {
    /// Instantiates the graph, so that it can be launched.
    pub fn instantiate(&self) -> Result<ExecutableGraph> {
        let _bound = self.device.bind()?;
        let mut handle = null_mut();
        // SAFETY: the graph is alive; writes one handle.
        let result = unsafe { sys::cuGraphInstantiateWithFlags(&mut handle, self.handle, 0) };
        check("cuGraphInstantiate", result)?;
        Ok(ExecutableGraph { device: self.device.clone(), handle })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.handle.is_null() {
            return;
        }
        let Ok(_bound) = self.device.bind() else {
            return;
        };
        // SAFETY: came out of a capture and is destroyed once.
        let _ = unsafe { sys::cuGraphDestroy(self.handle) };
    }
}

/// An instantiated graph, which can be launched.
#[derive(Debug)]
pub struct ExecutableGraph {
    device: Device,
    handle: sys::CUgraphExec,
}

// SAFETY: the handle may be used from any thread, by one at a time; launching
// takes `&mut self`.
unsafe impl Send for ExecutableGraph {}
// SAFETY: nothing uses a shared one.
unsafe impl Sync for ExecutableGraph {}

impl ExecutableGraph {
    /// Enqueues the whole graph on a stream. Does not wait.
    pub fn launch(&mut self, stream: &Stream) -> Result<()> {
        self.device.expect_same(stream.device(), "the stream")?;
        let _bound = self.device.bind()?;
        // SAFETY: both handles are alive and of one context.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.handle, stream.raw()) })
    }
}

impl Drop for ExecutableGraph {
    fn drop(&mut self) {
        let Ok(_bound) = self.device.bind() else {
            return;
        };
        // SAFETY: made in `instantiate` and destroyed once; the driver waits
        // for a launch that still runs.
        let _ = unsafe { sys::cuGraphExecDestroy(self.handle) };
    }
}
