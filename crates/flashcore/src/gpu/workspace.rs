//! Memory that the launches of a plan write to: one for each stream, since launches on two may run at
//! the same time, and one for each capture, since its graph may run beside any stream.

use std::sync::{Arc, Mutex};

use cuda::{Buffer, DeviceAddress, Recording, RelaxedCapture, Stream, StreamIdentity};

use super::{GpuError, lock};
use crate::family::{Contents, Memory};
use crate::plan::Source;

/// The workspaces of a plan.
#[derive(Debug)]
pub(super) struct Workspaces {
    memory: Vec<Memory>,
    all: Mutex<Vec<Entry>>,
}

/// Workspaces that a plan keeps at most, but for those that a graph has captured.
const MOST: usize = 16;

#[derive(Debug)]
struct Entry {
    stream: StreamIdentity,
    capture: Option<u64>,
    held: Arc<Mutex<Held>>,
    /// A graph that captured a launch holds another one.
    graph: Arc<()>,
}

/// The buffers of one workspace.
#[derive(Debug)]
pub(super) struct Held(Vec<(Source, Buffer)>);

impl Held {
    pub(super) fn address(&self, source: Source) -> Option<DeviceAddress> {
        self.0.iter().find(|(of, _)| *of == source).map(|(_, buffer)| buffer.address())
    }
}

impl Workspaces {
    pub(super) fn new(memory: &[Memory]) -> Self {
        let written = |it: &&Memory| !matches!(it.contents, Contents::Tiles(_));
        Workspaces {
            memory: memory.iter().filter(written).cloned().collect(),
            all: Mutex::default(),
        }
    }

    /// The workspace of a stream, made at its first launch; none where the plan needs none.
    pub(super) fn of(
        &self,
        stream: &Stream,
        recording: Option<&Recording<'_>>,
    ) -> Result<Option<Arc<Mutex<Held>>>, GpuError> {
        if self.memory.is_empty() {
            return Ok(None);
        }
        let (identity, capture) = (stream.identity(), recording.map(Recording::id));
        let mut all = lock(&self.all);
        let found = all.iter().find(|it| it.stream == identity && it.capture == capture);
        if let Some(entry) = found {
            return Ok(Some(entry.held.clone()));
        }
        // Allocating and freeing must not break a capture that is under way, here or elsewhere.
        let _relaxed = RelaxedCapture::begin()?;
        if all.len() >= MOST {
            let unused =
                |it: &Entry| Arc::strong_count(&it.graph) == 1 && Arc::strong_count(&it.held) == 1;
            if let Some(oldest) = all.iter().position(unused) {
                all.remove(oldest);
            }
        }
        let mut buffers = Vec::new();
        for Memory { source, bytes, contents } in &self.memory {
            let buffer = Buffer::new(stream.device(), (*bytes).max(4))?;
            if *contents == Contents::Zeros {
                // On a stream of its own: what a captured stream does happens later, and again.
                let own = Stream::new(stream.device())?;
                own.fill(buffer.all(), 0)?;
                own.synchronize()?;
            }
            buffers.push((*source, buffer));
        }
        let (held, graph) = (Arc::new(Mutex::new(Held(buffers))), Arc::new(()));
        if let Some(recording) = recording {
            recording.give(graph.clone())?;
        }
        all.push(Entry { stream: identity, capture, held: held.clone(), graph });
        Ok(Some(held))
    }

    pub(super) fn device_bytes(&self) -> u64 {
        let one: u64 = self.memory.iter().map(|memory| memory.bytes).sum();
        one * lock(&self.all).len() as u64
    }
}
