//! Memory for the partial results of split keys.

use cuda::{Buffer, DeviceAddress, RelaxedCapture, Stream, StreamIdentity};

use super::Geometry;
use crate::gpu::GpuError;
use crate::problem::Problem;

/// Where partial results go: (split, batch, head, query), outputs with a dimension more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Workspace {
    pub(super) outputs: DeviceAddress,
    pub(super) lse: DeviceAddress,
}

/// A workspace for each stream: launches on two streams may run at the same time.
#[derive(Debug)]
pub(super) struct Workspaces {
    /// Bytes of the partial outputs and of the partial log-sum-exps; none where nothing is split.
    bytes: Option<(u64, u64)>,
    all: Vec<(StreamIdentity, Buffer)>,
}

impl Workspaces {
    pub(super) fn new(geometry: &Geometry, problem: &Problem) -> Self {
        let rows = geometry.splits as u64 * problem.rows() as u64;
        let bytes = (4 * rows * problem.value_head_dim as u64, 4 * rows);
        Workspaces { bytes: (geometry.splits > 1).then_some(bytes), all: Vec::new() }
    }

    /// The workspace of a stream, made at its first launch.
    pub(super) fn of(&mut self, stream: &Stream) -> Result<Option<Workspace>, GpuError> {
        let Some((outputs, lse)) = self.bytes else {
            return Ok(None);
        };
        let identity = stream.identity();
        let index = match self.all.iter().position(|(of, _)| *of == identity) {
            Some(index) => index,
            None => {
                // The memory outlives a capture that may be under way.
                let _relaxed = RelaxedCapture::begin();
                self.all.push((identity, Buffer::new(stream.device(), outputs + lse)?));
                self.all.len() - 1
            }
        };
        let address = self.all[index].1.address();
        Ok(Some(Workspace { outputs: address, lse: address.offset(outputs) }))
    }
}

impl Clone for Workspaces {
    /// A clone may be launched at the same time, and has memory of its own.
    fn clone(&self) -> Self {
        Workspaces { bytes: self.bytes, all: Vec::new() }
    }
}
