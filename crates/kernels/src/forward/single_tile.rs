//! Ragged batches without a schedule: each thread block has one tile, which it finds by itself.
//!
//! Where all tiles of a ragged batch run at once, their order does not matter, and launching the
//! [`Sequencer`](crate::Sequencer) to sort them would cost the host as much as launching the kernel
//! itself.

use ptx::{Builder, Expression, Select, U32};

use super::dynamic_scheduler::{Batch, Tiles, WorkSlots};
use crate::attention::sequences::inclusive_sum;

impl Batch {
    /// Finds the tile of this thread block, where tiles do not come from a list. The first warp
    /// adds up the tiles of the sequences, of `query_rows` rows each and 32 sequences at a time,
    /// and writes the record of this thread block's tile where a record from the list would be.
    /// Thread blocks beyond the last tile have none.
    pub(super) fn find_tile(&self, k: &mut Builder, query_rows: u32, slots: &WorkSlots) {
        let Tiles::Single { sequences, tiles } = &self.tiles else { return };
        let (thread, lane, block) = (k.thread_index(), k.lane(), k.block_index());
        k.if_(thread.less(32), |k| {
            let tile = k.eval(block / self.heads);
            k.for_range(0, sequences.batch, 32, |k, first| {
                let index = k.eval(first + lane);
                let known = k.eval(index.minimum(sequences.batch - 1));
                let sequence = sequences.sequence(k, known);
                let rows = index.less(sequences.batch).select::<U32>(sequence.queries, 0);
                let count = k.eval((rows + (query_rows - 1)) / query_rows);
                let through = inclusive_sum(k, count);
                let number = k.eval(tile - (*tiles + (through - count)));
                k.if_(number.less(count), |k| {
                    let first_row = k.eval(number * query_rows);
                    let head = k.eval(block - tile * self.heads);
                    slots.set_record(k, sequence.record(index, first_row), head);
                });
                let all = k.shuffle_index(through, 31);
                k.set(*tiles, *tiles + all);
            });
        });
    }
}
