//! How large a launch over a ragged batch is.

use cuda::DeviceAddress;
use kernels::{Prefill, Sequencer};

use super::binding::Numbers;
use super::support::heads_together;
use crate::gpu::{Chip, GpuError, ServingSize};

/// What a launch takes, whatever the lengths are.
#[derive(Debug, Clone, Copy)]
pub(in crate::gpu) struct Outline {
    tile_rows: u32,
    /// Tiles of queries that there is room for in the schedule.
    records: u64,
    /// Heads that go together.
    together: u32,
    pub(in crate::gpu) blocks: u32,
}

impl Outline {
    pub(in crate::gpu) fn new(
        chip: &Chip,
        configuration: &Prefill,
        size: &ServingSize,
    ) -> Result<Self, GpuError> {
        let problem = &size.problem;
        let rows = match size.packed_queries {
            true => size.query_rows,
            false => problem.batch.saturating_mul(problem.query_length),
        };
        let tile_rows = configuration.tile.query_rows();
        let records = Sequencer::records(problem.batch as u64, rows as u64, tile_rows.into());
        let tiles = records.checked_mul(problem.query_heads as u64);
        let log_sums = (problem.query_heads as u64).saturating_mul(rows as u64);
        let counted = tiles.filter(|tiles| (*tiles).max(log_sums) <= i32::MAX as u64);
        let Some(tiles) = counted else {
            return Err(GpuError::TooLarge { what: "the number of query rows of all heads" });
        };
        let blocks = u64::from(chip.multiprocessors).min(tiles).max(1) as u32;
        let together = heads_together(chip, size);
        Ok(Outline { tile_rows, records, together, blocks })
    }

    /// Device memory of the schedule.
    pub(in crate::gpu) fn schedule_bytes(&self) -> u64 {
        Sequencer::bytes(self.records)
    }

    /// The numbers of both kernels, for a schedule at an address.
    pub(in crate::gpu) fn numbers<'a>(
        &self,
        size: &'a ServingSize,
        schedule: DeviceAddress,
    ) -> Numbers<'a> {
        let Outline { tile_rows, together, .. } = *self;
        Numbers { size, tile_rows, records: self.records as u32, together, schedule }
    }
}
