//! The way out: rounded, through the shared memory of keys and values, and by TMA to the tensors.

use ptx::{Accumulator, Builder, Expression, F32, Fence, Fragment, Reg, S32, U32};

use super::place::Tile;
use super::{KEY_BLOCK, Shared, Tensors, WARPGROUPS, barrier};

/// Which warpgroup stores, and the thread in it.
pub(super) struct Owner {
    pub(super) index: Reg<U32>,
    pub(super) thread: Reg<U32>,
}

/// Stores the gradients of a warpgroup's values and keys, each times a factor if there is one.
pub(super) fn store(
    k: &mut Builder,
    shared: &Shared,
    tensors: &Tensors,
    tile: &Tile,
    owner: &Owner,
    [values, keys]: [(&Accumulator, Option<Reg<F32>>); 2],
) {
    // The tile of keys is read by both warpgroups until the last product has ended.
    k.barrier_sync(barrier::PRODUCTS, 128 * WARPGROUPS);
    let rows = KEY_BLOCK / WARPGROUPS;
    let first = k.eval(owner.index * rows);
    let warp = k.eval(owner.thread / 32);
    let staged = [(&shared.values, values), (&shared.keys, keys)].map(|(tiles, (sums, factor))| {
        let staging = tiles.at(k, 0).rows(k, first, rows);
        let rounded = Fragment::new(k, tiles.layout().element, sums.columns());
        for (index, pair) in sums.registers().chunks_exact(2).enumerate() {
            let [low, high] = [pair[0], pair[1]].map(|x| match factor {
                Some(factor) => k.eval(x * factor),
                None => x,
            });
            rounded.set_pair(k, index, low, high);
        }
        rounded.store(k, &staging, warp);
        staging
    });
    k.fence(Fence::ProxyAsyncShared);
    k.barrier_sync(owner.index + barrier::RESULTS, 128);
    k.if_(owner.thread.equals(0), |k| {
        let row = tile.first_key + first;
        let [row, head, batch] = [row, tile.key_head.into(), tile.batch.into()]
            .map(|coordinate| k.eval(coordinate.reinterpret::<S32>()));
        for (staging, map) in staged.iter().zip([tensors.value_gradients, tensors.key_gradients]) {
            let layout = staging.layout();
            for panel in 0..layout.panels() {
                let column = (panel * layout.panel_columns()) as i32;
                let corner = [column.into(), row.into(), head.into(), batch.into()];
                let source = staging.address() + panel * layout.panel_bytes();
                k.tensor_store(map, &corner, source);
            }
        }
        k.bulk_commit();
        // Shared memory must outlive its copies.
        k.bulk_wait(0);
    });
}
