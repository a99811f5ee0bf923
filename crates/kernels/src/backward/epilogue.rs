//! The epilogue: rounds `dK` and `dV`, stages them in shared memory, as a rule in the tiles of the
//! keys and values themselves, and stores them by TMA.

use ptx::{
    Accumulator, Builder, Expression, F32, Fence, Fragment, Reg, S32, SharedTile, SharedTiles,
    TensorMap, U32, Value,
};

use super::persistent::Handover;
use super::tile_scheduler::Tile;
use super::{Block, ROWS, barrier};

/// The warpgroup that stores, the thread's index in it, and its first key within the key block.
pub(super) struct Owner {
    pub(super) index: Reg<U32>,
    pub(super) thread: Reg<U32>,
    pub(super) first: Reg<U32>,
}

/// A finished accumulator of `dK` or `dV`, of 64 keys, and where it goes.
pub(super) struct Done<'a> {
    /// Its first key among those of the warpgroup.
    pub(super) first: u32,
    pub(super) sums: &'a Accumulator,
    /// The factor that it is multiplied by, if any.
    pub(super) factor: Option<Reg<F32>>,
    /// The shared memory through which it is stored.
    pub(super) tiles: &'a SharedTiles,
    /// The tensor that it is stored to.
    pub(super) map: TensorMap,
}

impl<'a> Block<'a> {
    /// Describes how an accumulator of `dV` is stored.
    pub(super) fn value_gradients(&self, sums: &'a Accumulator, first: u32) -> Done<'a> {
        let (tiles, map) = (&self.shared.values, self.tensors.value_gradients);
        Done { first, sums, factor: None, tiles, map }
    }

    /// Describes how an accumulator of `dK` is stored, multiplied by the softmax scale.
    pub(super) fn key_gradients(
        &self,
        sums: &'a Accumulator,
        first: u32,
        scale: Reg<F32>,
    ) -> Done<'a> {
        let (tiles, map) = (&self.shared.keys, self.tensors.key_gradients);
        Done { first, sums, factor: Some(scale), tiles, map }
    }
}

/// Stores the finished accumulators of a warpgroup. All products of both warpgroups must have
/// completed, since until then they read the tile of keys. In persistent kernels signals `handover`
/// when shared memory is free again.
pub(super) fn store(
    k: &mut Builder,
    tile: &Tile,
    owner: &Owner,
    done: &[Done<'_>],
    handover: Option<&Handover>,
) {
    let warp = k.eval(owner.thread / 32);
    let staged: Vec<SharedTile> = done
        .iter()
        .map(|Done { first, sums, factor, tiles, .. }| {
            let staging = tiles.at(k, 0).rows(k, owner.first + *first, ROWS);
            let rounded = Fragment::new(k, tiles.layout().element, sums.columns());
            for (index, pair) in sums.registers().chunks_exact(2).enumerate() {
                let [low, high] = [pair[0], pair[1]].map(|x| match *factor {
                    Some(factor) => k.eval(x * factor),
                    None => x,
                });
                rounded.set_pair(k, index, low, high);
            }
            rounded.store(k, &staging, warp);
            staging
        })
        .collect();
    k.fence(Fence::ProxyAsyncShared);
    k.barrier_sync(owner.index + barrier::RESULTS, 128);
    k.if_(owner.thread.equals(0), |k| {
        let rest: Vec<Reg<S32>> = tile.key_rest().into_iter().map(|it| k.eval(it)).collect();
        for (staging, Done { first, map, .. }) in staged.iter().zip(done) {
            let row = tile.key_row(tile.first_key + owner.first + *first);
            let row = k.eval(row);
            let layout = staging.layout();
            for panel in 0..layout.panels() {
                let column = (panel * layout.panel_columns()) as i32;
                let corner: Vec<Value<S32>> = [column.into(), row.into()]
                    .into_iter()
                    .chain(rest.iter().map(|it| (*it).into()))
                    .collect();
                let source = staging.address() + panel * layout.panel_bytes();
                k.tensor_store(*map, &corner, source);
            }
        }
        k.bulk_commit();
        // The stores must have read shared memory before it is reused, or freed at the end of the
        // block.
        k.bulk_wait_read(0);
        if let Some(handover) = handover {
            handover.stored(k);
        }
    });
}
