//! The epilogue: rounds `dK` and `dV`, stages them in the shared memory of keys and values, and
//! stores them in chunks of 16 bytes.

use ptx::{Builder, ChunkPlace, Expression, Reg, RowCopies, TileWriter, U32, U64, WarpFragment};

use super::lanes::WarpPartition;
use super::step::Warp;
use super::tensors::Tensors;

/// Stores `dV` and `dK` of the thread block's keys.
pub(super) fn store(k: &mut Builder, tensors: &Tensors, warp: &Warp<'_>) {
    let Warp { backward, scheduler, rule, shared, .. } = *warp;
    // Products read the tile of keys up to here.
    k.block_sync();
    let values = (&tensors.value_gradients, backward.value_layout(), backward.value_head_dim);
    let keys = (&tensors.key_gradients, backward.key_layout(), backward.head_dim);
    let partition = WarpPartition::new(k, backward);
    for (sums, factor, layout, offset) in [
        (&warp.value_gradients, None, values.1, shared.values),
        (&warp.key_gradients, Some(rule.scale), keys.1, shared.keys),
    ] {
        let tile = k.shared_address(offset);
        let first = partition.key_warp * backward.warp_keys();
        let writer = TileWriter::new(k, layout, tile, first, partition.column_warp * 2);
        for step in 0..sums.groups() as u32 / 2 {
            let rounded = WarpFragment::new(k, backward.element, backward.warp_keys(), 16);
            for row in 0..sums.thread_rows() {
                for half in 0..2 {
                    let cell = sums.cell(row / 2, 2 * step as usize + half);
                    let pair = cell.pair(row % 2).map(|sum| match factor {
                        Some(factor) => k.eval(sum * factor),
                        None => sum,
                    });
                    rounded.set_pair(k, row, half, pair);
                }
            }
            rounded.store(k, &writer, 2 * step * backward.column_warps);
        }
    }
    k.block_sync();
    // Recomputed rather than kept in registers through the loop.
    let tile = scheduler.find(k);
    let [_, key_length] = scheduler.lengths(k);
    let thread = k.thread_index();
    let at = ChunkPlace::of(k, thread);
    for ((tensor, layout, dim), offset) in [(values, shared.values), (keys, shared.keys)] {
        let from = k.shared_address(offset);
        let from = RowCopies::new(layout, dim).target(k, from, at);
        let rows = tensor.of_head(k, backward, scheduler, tile.key_head);
        for first in (0..backward.key_block()).step_by(backward.threads() as usize / 8) {
            let row = k.eval(tile.first_key + at.row + first);
            let to = rows.row(k, backward.element, row);
            let to = k.eval(to + at.source_bytes().convert::<U64>());
            for panel in 0..layout.panels() {
                let exists = row.less(key_length);
                let held = (dim / 8).saturating_sub(8 * panel);
                let stores = if held < 8 { exists & at.chunk.less(held) } else { exists };
                k.if_(stores, |k| {
                    let from = from + (first * 128 + panel * layout.panel_bytes());
                    let words: [Reg<U32>; 4] = k.load_vector(from, Default::default());
                    k.store_vector(to + panel * 128, &words, Default::default());
                });
            }
        }
    }
}
