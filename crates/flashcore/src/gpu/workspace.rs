//! Scratch memory of launches: one workspace per stream, since launches on two streams may overlap,
//! and one per capture, since its graph may run beside any stream.
//!
//! A plan owns the memory whose contents it keeps from one launch to the next. The dQ sums and row
//! statistics of the backward pass are large and start anew in each call: all plans of a GPU share
//! them.

use std::sync::{Arc, Mutex};

use cuda::{Buffer, DeviceAddress, Recording, RelaxedCapture, Stream, StreamIdentity};
use kernels::parameter::Workspace;

use super::{GpuError, lock};
use crate::family::{Contents, Memory};
use crate::plan::Source;

/// Workspaces by stream and capture.
#[derive(Debug, Default)]
pub(super) struct Workspaces {
    all: Mutex<Vec<Entry>>,
}

/// Maximum number of workspaces, besides those that a graph has captured.
const MOST: usize = 16;

#[derive(Debug)]
struct Entry {
    stream: StreamIdentity,
    capture: Option<u64>,
    held: Arc<Mutex<Held>>,
    /// Cloned by the graph that captured the launches, so that the count tells whether it still
    /// exists.
    graph: Arc<()>,
}

/// The buffers of one workspace.
#[derive(Debug, Default)]
pub(super) struct Held {
    buffers: Vec<(Source, Buffer)>,
    /// Buffers that became too small during a capture: the graph holds their addresses.
    outgrown: Vec<Buffer>,
}

impl Held {
    pub(super) fn address(&self, source: Source) -> Option<DeviceAddress> {
        self.buffers.iter().find(|(of, _)| *of == source).map(|(_, buffer)| buffer.address())
    }

    /// Allocates what is missing. Buffers that are too small are freed, which may synchronize.
    fn reserve(
        &mut self,
        stream: &Stream,
        captured: bool,
        memory: &[Memory],
    ) -> Result<(), GpuError> {
        for Memory { source, bytes, contents } in memory {
            let at = self.buffers.iter().position(|(of, _)| of == source);
            if at.is_some_and(|at| self.buffers[at].1.bytes() >= *bytes) {
                continue;
            }
            // Allocating must not invalidate a stream capture on any thread.
            let _relaxed = RelaxedCapture::begin()?;
            if let Some(at) = at {
                let (_, small) = self.buffers.swap_remove(at);
                self.outgrown.extend(captured.then_some(small));
            }
            let buffer = Buffer::new(stream.device(), (*bytes).max(4))?;
            if *contents == Contents::Zeros {
                // On another stream: work on a captured stream would run later, and once per graph
                // launch.
                let own = Stream::new(stream.device())?;
                own.fill(buffer.all(), 0)?;
                own.synchronize()?;
            }
            self.buffers.push((*source, buffer));
        }
        Ok(())
    }
}

/// The memory that a plan needs, and the workspaces in which it is allocated.
#[derive(Debug)]
pub(super) struct Need {
    memory: Vec<Memory>,
    workspaces: Arc<Workspaces>,
}

impl Need {
    /// Splits the memory that launches write to: the plan's own, and what it shares with other
    /// plans.
    pub(super) fn of(memory: &[Memory], shared: &Arc<Workspaces>) -> (Need, Need) {
        let written = memory.iter().filter(|it| !it.contents.is_constant());
        let (others, own) = written.cloned().partition(|it| is_shared(it.source));
        let need = |memory, workspaces| Need { memory, workspaces };
        (need(own, Arc::default()), need(others, shared.clone()))
    }

    /// Returns the workspace of a stream, with enough room; `None` where the plan needs no memory.
    pub(super) fn on(
        &self,
        stream: &Stream,
        recording: Option<&Recording<'_>>,
    ) -> Result<Option<Arc<Mutex<Held>>>, GpuError> {
        if self.memory.is_empty() {
            return Ok(None);
        }
        let held = self.workspaces.of(stream, recording)?;
        lock(&held).reserve(stream, recording.is_some(), &self.memory)?;
        Ok(Some(held))
    }

    /// Returns the device memory in use, for workspaces that belong to the plan.
    pub(super) fn device_bytes(&self) -> u64 {
        let one: u64 = self.memory.iter().map(|memory| memory.bytes).sum();
        one * lock(&self.workspaces.all).len() as u64
    }
}

/// Tells whether memory is large and none of its contents outlives a call.
fn is_shared(source: Source) -> bool {
    use Workspace::{FoundBlocks, QueryGradientSums, RowStatistics};
    matches!(source, Source::Workspace(FoundBlocks | QueryGradientSums | RowStatistics))
}

impl Workspaces {
    /// Returns the workspace of a stream, empty at its first launch.
    fn of(
        &self,
        stream: &Stream,
        recording: Option<&Recording<'_>>,
    ) -> Result<Arc<Mutex<Held>>, GpuError> {
        let (identity, capture) = (stream.identity(), recording.map(Recording::id));
        let mut all = lock(&self.all);
        let found = all.iter().find(|it| it.stream == identity && it.capture == capture);
        if let Some(entry) = found {
            return Ok(entry.held.clone());
        }
        if all.len() >= MOST {
            let unused =
                |it: &Entry| Arc::strong_count(&it.graph) == 1 && Arc::strong_count(&it.held) == 1;
            if let Some(oldest) = all.iter().position(unused) {
                all.remove(oldest);
            }
        }
        let (held, graph) = (Arc::new(Mutex::new(Held::default())), Arc::new(()));
        if let Some(recording) = recording {
            recording.give(graph.clone())?;
        }
        all.push(Entry { stream: identity, capture, held: held.clone(), graph });
        Ok(held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::parameter::Tensor;

    #[test]
    fn what_outlives_a_call_is_the_plans_own() {
        let memory = |source, contents| Memory { source, bytes: 64, contents };
        let of = |workspace| memory(Source::Workspace(workspace), Contents::Anything);
        let all = [
            of(Workspace::RowStatistics),
            of(Workspace::Schedule),
            of(Workspace::QueryGradientSums),
            memory(Source::Workspace(Workspace::Counters), Contents::Zeros),
            memory(Source::Tensor(Tensor::PartialOutput), Contents::Anything),
        ];
        let shared = Arc::default();
        let (own, others) = Need::of(&all, &shared);
        let sources = |need: &Need| need.memory.iter().map(|it| it.source).collect::<Vec<_>>();
        assert_eq!(sources(&own), [all[1].source, all[3].source, all[4].source]);
        assert_eq!(sources(&others), [all[0].source, all[2].source]);
        assert!(Arc::ptr_eq(&others.workspaces, &shared));
        assert!(!Arc::ptr_eq(&own.workspaces, &shared));
    }
}
