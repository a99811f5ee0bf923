//! The epilogue: normalises and rounds the output, and stores it through shared memory in chunks of
//! 16 bytes.
//!
//! A warp stages its output in the shared memory of its own queries, which no other warp reads, so
//! it need not wait for any other warp.

use ptx::{Builder, Expression, Reg, SharedAddress, U32, U64, WarpAccumulator};

use super::Mma;
use super::rule::RuleParameters;
use super::walk::Warp;
use super::work_tile::{Found, WorkTile};
use crate::attention::rows::Finished;

/// Stores the log-sum-exps and the output of a warp.
pub(super) fn store(
    k: &mut Builder,
    mma: &Mma,
    rules: &RuleParameters,
    tile: &WorkTile,
    warp: &Warp<'_>,
) {
    let found = tile.results.find(k, mma.element);
    let sink = rules.sink(k, found.head, tile.split);
    let rows = warp.softmax.finish(k, sink);
    let (first_row, room) = warp.room(k);
    let first_row = k.eval(found.first_row + first_row);
    let store = Store { mma, found, output: &warp.output, room, rows, first_row };
    store.log_sums(k);
    if mma.split {
        store.partial(k);
    } else {
        store.rounded(k);
    }
}

struct Store<'a> {
    mma: &'a Mma,
    found: Found,
    output: &'a WarpAccumulator,
    /// The shared memory of the warp's queries.
    room: Reg<SharedAddress>,
    /// The thread's finished rows.
    rows: Vec<Finished>,
    /// The warp's first row.
    first_row: Reg<U32>,
}

impl Store<'_> {
    /// Returns the index of the warp's row `row` over all heads (and over all splits).
    fn flat(&self, k: &mut Builder, row: Reg<U32>) -> Reg<U64> {
        k.eval(self.found.first_lse + self.first_row.convert::<U64>() + row.convert::<U64>())
    }

    /// Stores log-sum-exps: for each row, the lane that holds its first column.
    fn log_sums(&self, k: &mut Builder) {
        let lane = k.lane();
        let mine = k.eval(lane / 4);
        let flat = self.flat(k, mine);
        let address = k.eval(self.found.lse + flat * 4);
        for (index, row) in self.rows.iter().enumerate() {
            let exists = (self.first_row + mine + 8 * index).less(self.found.query_length);
            let stores = (lane % 4).equals(0) & exists;
            k.if_(stores, |k| k.store(address + 32 * index, row.log_sum));
        }
    }

    /// Stores a partial output: `f32`, contiguous.
    fn partial(&self, k: &mut Builder) {
        let Store { mma, ref found, output, ref rows, first_row, .. } = *self;
        let lane = k.lane();
        let row_bytes = 4 * mma.value_head_dim;
        let (row, column) = (k.eval(lane / 4), k.eval(lane % 4 * 2));
        let flat = self.flat(k, row);
        let address = k.eval(found.output.first + flat * row_bytes + (column * 4).convert::<U64>());
        for tile in 0..mma.row_tiles as usize {
            for half in 0..2 {
                let index = 2 * tile + half;
                let exists = (first_row + row + 8 * index).less(found.query_length);
                k.if_(exists, |k| {
                    for group in 0..mma.value_head_dim as usize / 8 {
                        let cell = output.cell(tile, group);
                        let pair =
                            cell.pair(half).map(|element| k.eval(element * rows[index].factor));
                        let at = address + 8 * index * row_bytes as usize + 32 * group;
                        k.store_vector(at, &pair, Default::default());
                    }
                });
            }
        }
    }

    /// Stores the output, rounded, through shared memory.
    fn rounded(&self, k: &mut Builder) {
        let Store { mma, ref found, output, room, ref rows, first_row } = *self;
        let lane = k.lane();
        // Writing: a lane holds two neighbouring columns in row `lane / 4` and in the row 8 below.
        let (row, pair) = (k.eval(lane / 4), k.eval(lane % 4));
        let write = k.eval(room + row * 128 + pair * 4);
        // Reading: eight lanes read the eight chunks of a row.
        let (read_row, chunk) = (k.eval(lane / 8), k.eval(lane % 8));
        let read = k.eval(room + read_row * 128);
        let at = {
            let row = k.eval(first_row + read_row);
            let offset = row.convert::<U64>() * found.output.stride * mma.element.bytes();
            k.eval(found.output.first + offset + (chunk * 16).convert::<U64>())
        };
        let step = k.eval(found.output.stride * (4 * mma.element.bytes()));
        let groups = mma.value_head_dim as usize / 8;
        for panel in 0..groups.div_ceil(8) {
            // All lanes must have read the queries, or the panel before, by now.
            k.warp_sync();
            let here = 8.min(groups - 8 * panel);
            for tile in 0..mma.row_tiles as usize {
                for group in 0..here {
                    let cell = output.cell(tile, 8 * panel + group);
                    // Chunks are swizzled by the row modulo 8, against bank conflicts.
                    let chunk = k.eval((row ^ group) * 16);
                    for half in 0..2 {
                        let factor = rows[2 * tile + half].factor;
                        let [low, high] = cell.pair(half).map(|element| k.eval(element * factor));
                        let pair = k.pack_as(mma.element, low, high);
                        let to = k.eval(write + chunk + (16 * tile + 8 * half) * 128);
                        k.store_packed(to, &[pair]);
                    }
                }
            }
            k.warp_sync();
            let mut target = at;
            for first in (0..mma.warp_rows()).step_by(4) {
                let exists = (first_row + read_row + first).less(found.query_length);
                let stores = if here == 8 { exists } else { exists & chunk.less(here) };
                let from = {
                    // Row `first + lane / 8`, modulo 8.
                    let row = read_row + first % 8;
                    k.eval(read + (chunk ^ row) * 16)
                };
                let to = target + 128 * panel;
                k.if_(stores, |k| {
                    let words: [Reg<U32>; 4] =
                        k.load_vector(from + first * 128, Default::default());
                    k.store_vector(to, &words, Default::default());
                });
                if first + 4 < mma.warp_rows() {
                    target = k.eval(target + step);
                }
            }
        }
    }
}
