//! The epilogue: normalises a tile's output, rounds it, writes it to a staging tile in shared
//! memory, and stores it with TMA; stores the log-sum-exps directly. With stream-K, writes and merges
//! partial tiles.

use ptx::{
    Accumulator, Builder, Expression, F32, Fence, Fragment, GlobalAddress, Pred, Reg, SharedTile,
    TensorMap, U32, U64,
};

use super::partials::{Part, Partials};
use super::scheduler::{ConsumerScheduler, TileCoordinates};
use super::softmax::Softmax;
use super::stream_k::PartWord;
use super::warpgroup::Warpgroup;
use super::{Shared, barrier};
use crate::attention::rows::Finished;

/// Where the results of tiles go.
pub(super) struct Results {
    pub(super) output: TensorMap,
    pub(super) lse: Reg<GlobalAddress>,
    /// Where partial tiles go, with stream-K.
    pub(super) partials: Option<Partials>,
}

/// The staging tile of a warpgroup's output, and the thread's place in it.
pub(super) struct Staging {
    tile: SharedTile,
    barrier: Reg<U32>,
    pub(super) index: Reg<U32>,
    pub(super) thread: Reg<U32>,
    warp: Reg<U32>,
    /// True in the thread that issues the TMA stores and waits for them.
    pub(super) leads: Reg<Pred>,
}

impl Staging {
    /// Synchronises the threads of the warpgroup.
    pub(super) fn sync_warpgroup(&self, k: &mut Builder) {
        k.barrier_sync(self.barrier, 128);
    }

    /// Waits until the TMA stores in flight have read the staging tile, so that it can be
    /// overwritten.
    fn wait_until_read(&self, k: &mut Builder) {
        k.if_(self.leads, |k| k.bulk_wait_read(0));
        self.sync_warpgroup(k);
    }

    /// Waits until all TMA stores have completed: shared memory must outlive them.
    pub(super) fn drain(&self, k: &mut Builder) {
        k.if_(self.leads, |k| k.bulk_wait(0));
    }
}

/// The epilogue of a consumer warpgroup.
pub(super) struct Epilogue {
    results: Results,
    pub(super) staging: Staging,
}

impl Epilogue {
    pub(super) fn new(
        k: &mut Builder,
        results: Results,
        shared: &Shared,
        group: &Warpgroup<'_>,
    ) -> Self {
        let (index, thread) = (group.index, group.thread);
        let staging = Staging {
            tile: shared.output.at(k, index),
            barrier: k.eval(index + barrier::OUTPUT),
            index,
            thread,
            warp: k.eval(thread / 32),
            leads: k.eval(thread.equals(0)),
        };
        Epilogue { results, staging }
    }

    /// Ends a tile: stores it, or with stream-K stores it as a partial tile for another thread
    /// block. Only a thread block's last tile (`last`) may merge the partial tiles of others.
    pub(super) fn finish<T: ConsumerScheduler>(
        &self,
        k: &mut Builder,
        (tiles, current): (&T, &T::Current),
        softmax: &Softmax,
        output: &Accumulator,
        last: bool,
    ) {
        let store = |k: &mut Builder| {
            let sink = tiles.sink(k, current);
            let rows = softmax.finish(k, sink);
            self.store(k, (tiles, current), &rows, output);
        };
        let (Some(partials), Some(word)) = (&self.results.partials, tiles.part(current)) else {
            return store(k);
        };
        let part = Part { word, staging: &self.staging, softmax, output };
        k.if_else(
            PartWord::is_partial(word),
            |k| partials.store_partial(k, &part),
            |k| {
                if last {
                    partials.merge_partial(k, &part);
                }
                store(k);
            },
        );
    }

    /// Stores the output and the log-sum-exps of a finished tile. Returns with the TMA stores still
    /// in flight.
    pub(super) fn store<T: ConsumerScheduler>(
        &self,
        k: &mut Builder,
        (tiles, current): (&T, &T::Current),
        rows: &[Finished],
        output: &Accumulator,
    ) {
        let staging = &self.staging;
        let coordinates = tiles.coordinates(k, current);
        self.store_log_sums(k, (tiles, current), &coordinates, rows);

        let layout = staging.tile.layout();
        let first_row = k.eval(coordinates.first_row + staging.index * 64);
        // As many columns at a time as the staging tile has.
        let registers = output.registers();
        for first in (0..output.columns()).step_by(layout.columns as usize) {
            let columns = layout.columns.min(output.columns() - first);
            let part = &registers[(first / 2) as usize..((first + columns) / 2) as usize];
            let normal: Vec<Reg<F32>> = (part.iter().enumerate())
                .map(|(index, x)| k.eval(*x * rows[Accumulator::row_of(index)].factor))
                .collect();
            let rounded = Fragment::new(k, layout.element, columns);
            rounded.round(k, &normal);
            staging.wait_until_read(k);
            rounded.store(k, &staging.tile, staging.warp);
            k.fence(Fence::ProxyAsyncShared);
            staging.sync_warpgroup(k);
            k.if_(staging.leads, |k| {
                let further = tiles.output_corner(k, current, &coordinates, first_row);
                for panel in 0..columns.div_ceil(layout.panel_columns()) {
                    let column = (first + panel * layout.panel_columns()) as i32;
                    let mut corner = vec![column.into()];
                    corner.extend(further.iter().cloned());
                    let source = staging.tile.address() + panel * layout.panel_bytes();
                    k.tensor_store(self.results.output, &corner, source);
                }
                k.bulk_commit();
            });
        }
    }

    /// Stores the log-sum-exps; of the lanes that share a row, the one that holds its first column
    /// does so.
    fn store_log_sums<T: ConsumerScheduler>(
        &self,
        k: &mut Builder,
        (tiles, current): (&T, &T::Current),
        coordinates: &TileCoordinates,
        rows: &[Finished],
    ) {
        let staging = &self.staging;
        let position = Accumulator::position(k, staging.thread);
        let first = k.eval(coordinates.first_row + staging.index * 64 + position.row);
        let base = tiles.first_log_sum(k, current, coordinates);
        let address = k.eval(self.results.lse + (base + first.convert::<U64>()) * 4);
        for (half, Finished { log_sum, .. }) in rows.iter().enumerate() {
            let row = first + 8 * half;
            let mine = position.column.equals(0) & row.less(coordinates.query_length);
            k.if_(mine, |k| k.store(address + 32 * half, *log_sum));
        }
    }
}
