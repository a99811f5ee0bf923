//! A thread block's walk over the query blocks that see its keys.
//!
//! `cp.async` groups are committed in order: keys and values with the first query block, then one
//! query block each. When the group of a query block has arrived in all threads, no thread reads
//! the one before it any more, and the copies of the next one are issued into its slot. Steps are
//! unrolled by the slots, so that every shared-memory address is a constant.

use ptx::{Builder, Expression, U64, WarpAccumulator};

use super::lanes::{Lanes, WarpPartition};
use super::step::Warp;
use super::tensors::{Positions, Tensors};
use super::weights::WeightRule;
use super::{BackwardMma, Shared, epilogue, slot};
use crate::backward::tile_scheduler::{TileScheduler, Walk};
use crate::mma::copies::{Blocks, wait};

/// Emits all work on the tile of a thread block.
pub(super) fn walk(
    k: &mut Builder,
    backward: &BackwardMma,
    tensors: &Tensors,
    scheduler: &TileScheduler,
    rule: &WeightRule,
    shared: &Shared,
) {
    let tile = scheduler.find(k);
    let walk = scheduler.walk(k, &tile);
    let partition = WarpPartition::new(k, backward);
    let gradients = |k: &mut Builder, dim: u32| {
        let columns = 16 * backward.column_steps(dim);
        WarpAccumulator::zeros(k, backward.warp_keys(), columns)
    };
    let warp = Warp {
        backward,
        scheduler,
        tile: &tile,
        rule,
        shared,
        sums: tensors.sums,
        turns: tensors.turns,
        lanes: Lanes::new(k, backward, &partition),
        key_gradients: gradients(k, backward.head_dim),
        value_gradients: gradients(k, backward.value_head_dim),
        walk: &walk,
    };
    let copies = Copies { backward, tensors, scheduler, shared };
    k.if_(walk.left.greater(0), |k| {
        copies.clear_padding(k);
        copies.keys(k);
        copies.queries(k, &walk, 0);
        k.loop_(|k| {
            for index in 0..backward.slots() {
                wait(k, 0);
                let send = |k: &mut Builder| {
                    k.if_(walk.left.greater(1), |k| {
                        let next = walk.ahead(k, scheduler, &tile);
                        copies.queries(k, &next, (index + 1) % backward.slots());
                    });
                };
                if backward.ahead > 0 {
                    send(k);
                }
                warp.step(k, index);
                if backward.ahead == 0 {
                    k.block_sync();
                    send(k);
                }
                walk.advance(k, scheduler, &tile);
                k.break_if(walk.left.equals(0));
            }
        });
    });
    epilogue::store(k, tensors, &warp);
}

/// Issues the copies of tiles.
struct Copies<'a> {
    backward: &'a BackwardMma,
    tensors: &'a Tensors,
    scheduler: &'a TileScheduler,
    shared: &'a Shared,
}

impl Copies<'_> {
    /// Clears the columns beyond the head dimensions in all tiles, since products read whole steps
    /// of 16 columns and more.
    fn clear_padding(&self, k: &mut Builder) {
        let Copies { backward, tensors, shared, .. } = *self;
        let keys = (&tensors.keys, backward.key_layout(), backward.head_dim, shared.keys);
        let values =
            (&tensors.values, backward.value_layout(), backward.value_head_dim, shared.values);
        let walked = self.walked().map(|tiles| (tiles, backward.slots()));
        let tile = self.scheduler.find(k);
        for ((tensor, layout, dim, first), slots) in
            [(keys, 1), (values, 1)].into_iter().chain(walked)
        {
            let of_head = tensor.of_head(k, backward, self.scheduler, tile.key_head);
            let blocks = Blocks::new(k, backward.threads(), layout, dim, of_head);
            let slots: Vec<_> = (0..slots).map(|index| slot(k, first, layout, index)).collect();
            blocks.clear_padding(k, &slots);
        }
    }

    /// Copies keys and values.
    fn keys(&self, k: &mut Builder) {
        let Copies { backward, tensors, shared, .. } = *self;
        let tile = self.scheduler.find(k);
        let (first, [_, key_length]) = (tile.first_key, self.scheduler.lengths(k));
        let rows = k.eval(key_length - first);
        for (tensor, layout, dim, offset) in [
            (&tensors.keys, backward.key_layout(), backward.head_dim, shared.keys),
            (&tensors.values, backward.value_layout(), backward.value_head_dim, shared.values),
        ] {
            let of_head = tensor.of_head(k, backward, self.scheduler, tile.key_head);
            let blocks = Blocks::new(k, backward.threads(), layout, dim, of_head);
            let to = k.shared_address(offset);
            blocks.copy(k, to, first, Some(rows));
        }
    }

    /// Copies the current query block of a walk, with its output gradients and statistics.
    fn queries(&self, k: &mut Builder, walk: &Walk, index: u32) {
        let Copies { backward, tensors, shared, .. } = *self;
        let [query_length, _] = self.scheduler.lengths(k);
        let first = k.eval(walk.block * backward.query_block);
        let rows = k.eval(query_length - first);
        for (tensor, layout, dim, offset) in self.walked() {
            let of_head = tensor.of_head(k, backward, self.scheduler, walk.head);
            let blocks = Blocks::new(k, backward.threads(), layout, dim, of_head);
            let to = slot(k, offset, layout, index);
            blocks.copy(k, to, first, Some(rows));
        }
        let bytes = backward.pass().statistics_bytes();
        let thread = k.thread_index();
        k.if_(thread.less(bytes / 16), |k| {
            let block = k.multiply_wide(walk.number, bytes);
            let to = k.shared_address(shared.statistics + index * bytes);
            let from = tensors.statistics + block + (thread * 16).convert::<U64>();
            k.copy_async(to + thread * 16, from, None);
        });
        k.copy_async_commit();
    }

    /// Returns tensor, layout, width and shared-memory offset of what is loaded for each query
    /// block.
    fn walked(&self) -> [(&Positions, ptx::TileLayout, u32, u32); 2] {
        let Copies { backward, tensors, shared, .. } = *self;
        [
            (&tensors.queries, backward.query_layout(), backward.head_dim, shared.queries),
            (
                &tensors.output_gradients,
                backward.output_gradient_layout(),
                backward.value_head_dim,
                shared.output_gradients,
            ),
        ]
    }
}
