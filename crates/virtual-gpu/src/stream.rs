//! Streams, events and captures.
//!
//! Work on a stream is executed when it is enqueued, so streams are always idle, and two streams
//! never race. Work on a stream that is being captured is recorded instead.

use std::cell::Cell;
use std::thread::{self, ThreadId};
use std::time::Instant;

use crate::error::{Error, Result, explain};
use crate::gpu::{Gpu, Handle};
use crate::graph::{Graph, Operation};

/// A stream.
#[derive(Default)]
pub(crate) struct Stream {
    /// Whether it is ordered with the legacy default stream.
    pub(crate) blocking: bool,
    /// The capture that records its work.
    capture: Option<u64>,
    /// How much of its work was recorded.
    recorded: u64,
    /// Whether another stream has waited for all of it.
    joined: bool,
}

/// A capture under way.
pub(crate) struct Capture {
    pub(crate) graph: Handle,
    /// The stream in which it began.
    origin: Handle,
    mode: u32,
    thread: ThreadId,
    pub(crate) valid: bool,
}

/// An event.
#[derive(Default)]
pub(crate) struct Event {
    /// When it was last recorded.
    time: Option<Instant>,
    /// If that was in a capture: its id, the stream, and how much of its work was recorded.
    captured: Option<(u64, Handle, u64)>,
}

/// Numbers of `CUstreamCaptureMode`.
const GLOBAL: u32 = 0;
const RELAXED: u32 = 2;

thread_local! {
    /// The capture mode of this thread.
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
    /// The stream that `CU_STREAM_PER_THREAD` stands for on this thread.
    static PER_THREAD: Cell<Handle> = const { Cell::new(0) };
}

/// Sets the capture mode of this thread, and returns the previous one.
pub(crate) fn exchange_mode(mode: u32) -> Result<u32> {
    if mode > RELAXED { Err(Error::InvalidValue) } else { Ok(MODE.replace(mode)) }
}

impl Gpu {
    // ---- streams --------------------------------------------------------------

    pub(crate) fn create_stream(&mut self, blocking: bool) -> Handle {
        let handle = self.handle();
        self.streams.insert(handle, Stream { blocking, ..Stream::default() });
        handle
    }

    /// Returns the stream of a handle, for use; the legacy stream may not be used while a stream
    /// that is ordered with it is being captured.
    pub(crate) fn stream(&mut self, handle: Handle) -> Result<Handle> {
        let handle = match handle {
            // CU_STREAM_LEGACY
            1 => 0,
            // CU_STREAM_PER_THREAD
            2 => {
                if PER_THREAD.get() == 0 {
                    PER_THREAD.set(self.create_stream(true));
                }
                PER_THREAD.get()
            }
            _ => handle,
        };
        if !self.streams.contains_key(&handle) {
            return Err(Error::InvalidHandle);
        }
        let mut streams = self.streams.values();
        if handle == 0
            && let Some(id) = streams.find_map(|it| it.capture.filter(|_| it.blocking))
        {
            self.invalidate(|_, at| at == id);
            return Err(Error::CaptureImplicit);
        }
        Ok(handle)
    }

    /// Executes work on a stream, or records it.
    pub(crate) fn enqueue(&mut self, stream: Handle, operation: Operation) -> Result {
        let handle = self.stream(stream)?;
        let Some(id) = self.streams[&handle].capture else { return self.execute(&operation) };
        let capture = &self.captures[&id];
        if !capture.valid {
            return Err(Error::CaptureInvalidated);
        }
        let graph = self.graphs.get_mut(&capture.graph).ok_or(Error::InvalidHandle)?;
        graph.operations.push(operation);
        let stream = self.streams.get_mut(&handle).ok_or(Error::InvalidHandle)?;
        (stream.recorded, stream.joined) = (stream.recorded + 1, false);
        Ok(())
    }

    /// Waits for a stream, which only a capture forbids.
    pub(crate) fn wait_for_stream(&mut self, stream: Handle) -> Result {
        let stream = self.stream(stream)?;
        let Some(id) = self.streams[&stream].capture else { return Ok(()) };
        self.invalidate(|_, at| at == id);
        Err(Error::CaptureUnsupported)
    }

    pub(crate) fn destroy_stream(&mut self, stream: Handle) -> Result {
        let stream = self.streams.remove(&stream).filter(|_| stream != 0);
        let stream = stream.ok_or(Error::InvalidHandle)?;
        self.invalidate(|_, at| Some(at) == stream.capture);
        Ok(())
    }

    // ---- captures -------------------------------------------------------------

    pub(crate) fn begin_capture(&mut self, stream: Handle, mode: u32) -> Result {
        let handle = self.stream(stream)?;
        if handle == 0 {
            return Err(Error::CaptureUnsupported);
        }
        if mode > RELAXED {
            return Err(Error::InvalidValue);
        }
        if self.streams[&handle].capture.is_some() {
            return Err(Error::IllegalState);
        }
        let (graph, id) = (self.handle(), self.handle());
        self.graphs.insert(graph, Graph::default());
        let thread = thread::current().id();
        self.captures.insert(id, Capture { graph, origin: handle, mode, thread, valid: true });
        self.join(handle, id);
        Ok(())
    }

    fn join(&mut self, stream: Handle, id: u64) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            (stream.capture, stream.joined) = (Some(id), true);
        }
    }

    /// Ends a capture. Returns the graph, or what was recorded of one, which must be dropped
    /// outside of the lock, and why it is none.
    pub(crate) fn end_capture(
        &mut self,
        stream: Handle,
    ) -> Result<(Handle, Option<(Graph, Error)>)> {
        let handle = self.stream(stream)?;
        let id = self.streams[&handle].capture.ok_or(Error::IllegalState)?;
        let capture = &self.captures[&id];
        if capture.origin != handle {
            self.invalidate(|_, at| at == id);
            return Err(Error::CaptureUnmatched);
        }
        if capture.mode != RELAXED && capture.thread != thread::current().id() {
            self.invalidate(|_, at| at == id);
            return Err(Error::CaptureWrongThread);
        }
        let capture = self.captures.remove(&id).ok_or(Error::IllegalState)?;
        let mut unjoined = false;
        for (other, stream) in &mut self.streams {
            if stream.capture == Some(id) {
                unjoined |= *other != handle && !stream.joined;
                stream.capture = None;
            }
        }
        let error = match (capture.valid, unjoined) {
            (true, false) => return Ok((capture.graph, None)),
            (false, _) => Error::CaptureInvalidated,
            (true, true) => Error::CaptureUnjoined,
        };
        let graph = self.graphs.remove(&capture.graph).unwrap_or_default();
        Ok((0, Some((graph, error))))
    }

    /// Returns the id of a stream's capture, and the capture.
    pub(crate) fn capture(&mut self, stream: Handle) -> Result<Option<(u64, &Capture)>> {
        let stream = self.stream(stream)?;
        let id = self.streams[&stream].capture;
        Ok(id.and_then(|id| Some((id, self.captures.get(&id)?))))
    }

    fn invalidate(&mut self, which: impl Fn(&Capture, u64) -> bool) {
        for (id, capture) in &mut self.captures {
            capture.valid &= !which(capture, *id);
        }
    }

    /// Refuses a call that is not safe during a capture, by the rules of
    /// `cuThreadExchangeStreamCaptureMode`; what is refused invalidates the captures.
    pub(crate) fn unsafe_call(&mut self) -> Result {
        let (mode, thread) = (MODE.get(), thread::current().id());
        let forbids = |capture: &Capture| match mode {
            RELAXED => false,
            _ if capture.thread == thread => capture.mode != RELAXED,
            mode => mode == GLOBAL && capture.mode == GLOBAL,
        };
        if !self.captures.values().any(forbids) {
            return Ok(());
        }
        self.invalidate(|capture, _| forbids(capture));
        Err(explain(
            Error::CaptureUnsupported,
            "a call that is not safe while a stream is captured",
        ))
    }

    // ---- events ---------------------------------------------------------------

    pub(crate) fn create_event(&mut self) -> Handle {
        let handle = self.handle();
        self.events.insert(handle, Event::default());
        handle
    }

    pub(crate) fn record(&mut self, event: Handle, stream: Handle) -> Result {
        let handle = self.stream(stream)?;
        let stream = &self.streams[&handle];
        let captured = stream.capture.map(|id| (id, handle, stream.recorded));
        let event = self.events.get_mut(&event).ok_or(Error::InvalidHandle)?;
        *event = Event { time: captured.is_none().then(Instant::now), captured };
        Ok(())
    }

    /// Makes a stream wait for an event. With an event of a capture, the stream joins it.
    pub(crate) fn wait_for_event(&mut self, stream: Handle, event: Handle) -> Result {
        let stream = self.stream(stream)?;
        let event = self.events.get(&event).ok_or(Error::InvalidHandle)?;
        let recorded = event.time.is_some();
        match (self.streams[&stream].capture, event.captured) {
            (None, Some((id, _, _))) if self.captures.contains_key(&id) => self.join(stream, id),
            (Some(id), Some((other, from, count))) if id == other => {
                let origin = self.captures[&id].origin;
                // Work that another stream waits for is joined when that stream is.
                if let Some(waited) = self.streams.get_mut(&from).filter(|_| from != origin) {
                    waited.joined |= waited.recorded == count && from != stream;
                }
            }
            (Some(id), captured) if captured.is_some() || recorded => {
                self.invalidate(|_, at| at == id);
                return Err(Error::CaptureIsolation);
            }
            _ => {}
        }
        Ok(())
    }

    /// Waits for an event, which only a capture forbids.
    pub(crate) fn pass(&self, event: Handle) -> Result<&Event> {
        let event = self.events.get(&event).ok_or(Error::InvalidHandle)?;
        if event.captured.is_some() { Err(Error::CapturedEvent) } else { Ok(event) }
    }

    /// Returns the milliseconds between two events, by this machine's clock.
    pub(crate) fn elapsed(&self, start: Handle, end: Handle) -> Result<f32> {
        let time = |event| self.pass(event)?.time.ok_or(Error::InvalidHandle);
        let (start, end) = (time(start)?, time(end)?);
        let later = end.saturating_duration_since(start).as_secs_f32();
        Ok((later - start.saturating_duration_since(end).as_secs_f32()) * 1e3)
    }
}
