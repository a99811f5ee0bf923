//! The way out: normalise, round, through shared memory, in chunks of 16 bytes.
//!
//! A warp's output leaves through the room of its own queries, which nobody
//! else reads, so no other warp is waited for.

use ptx::{Builder, Expression, F32, GlobalAddress, Instruction, Operand, Reg, U32, U64};

use super::place::Place;
use super::walk::Warp;
use super::{Mma, Numbers};
use crate::strides::Strides;

/// Where results go.
pub(super) struct Epilogue {
    pub(super) output: Reg<GlobalAddress>,
    pub(super) strides: Strides,
    pub(super) lse: Reg<GlobalAddress>,
}

impl Epilogue {
    pub(super) fn store(
        &self,
        k: &mut Builder,
        mma: &Mma,
        numbers: &Numbers,
        place: &Place,
        warp: &Warp<'_>,
    ) {
        let rows = warp.softmax.finish(k);
        // Which of all rows of all heads (and of all splits) is the warp's first.
        let first_row = k.eval(place.first_row + warp.first_row);
        let mut head = place.batch * place.heads + place.head;
        if let Some(split) = &place.split {
            head = split.index * split.batches * place.heads + head;
        }
        let head = k.eval(head);
        let flat = k.eval(
            head.convert::<U64>() * numbers.query_length.convert::<U64>()
                + first_row.convert::<U64>(),
        );
        self.store_log_sums(k, numbers, first_row, flat, &rows);
        if mma.split {
            self.store_partial(k, mma, numbers, first_row, flat, warp, &rows);
        } else {
            self.store_rounded(k, mma, numbers, place, first_row, warp, &rows);
        }
    }

    /// The lane at a row's first column stores its log-sum-exp.
    fn store_log_sums(
        &self,
        k: &mut Builder,
        numbers: &Numbers,
        first_row: Reg<U32>,
        flat: Reg<U64>,
        rows: &[[Reg<F32>; 2]],
    ) {
        let lane = k.lane();
        let mine = k.eval(lane / 4);
        let address = k.eval(self.lse + (flat + mine.convert::<U64>()) * 4);
        for (index, [_, log_sum]) in rows.iter().enumerate() {
            let row = first_row + mine + 8 * index;
            let stores = (lane % 4).equals(0) & row.less(numbers.query_length);
            k.if_(stores, |k| k.store(address + 32 * index, *log_sum));
        }
    }

    /// A partial output as it is: `f32`, without gaps.
    #[allow(clippy::too_many_arguments)] // what the parts of the kernel hand over
    fn store_partial(
        &self,
        k: &mut Builder,
        mma: &Mma,
        numbers: &Numbers,
        first_row: Reg<U32>,
        flat: Reg<U64>,
        warp: &Warp<'_>,
        rows: &[[Reg<F32>; 2]],
    ) {
        let lane = k.lane();
        let row_bytes = 4 * mma.value_head_dim;
        let (row, column) = (k.eval(lane / 4), k.eval(lane % 4 * 2));
        let address = k.eval(
            self.output + (flat + row.convert::<U64>()) * row_bytes + (column * 4).convert::<U64>(),
        );
        for tile in 0..mma.row_tiles as usize {
            for half in 0..2 {
                let index = 2 * tile + half;
                let exists = (first_row + row + 8 * index).less(numbers.query_length);
                k.if_(exists, |k| {
                    for group in 0..mma.value_head_dim as usize / 8 {
                        let cell = warp.output.cell(tile, group);
                        let pair = [cell[2 * half], cell[2 * half + 1]]
                            .map(|element| k.eval(element * rows[index][0]));
                        let at = address + 8 * index * row_bytes as usize + 32 * group;
                        k.store_vector(at, &pair, Default::default());
                    }
                });
            }
        }
    }

    #[allow(clippy::too_many_arguments)] // what the parts of the kernel hand over
    fn store_rounded(
        &self,
        k: &mut Builder,
        mma: &Mma,
        numbers: &Numbers,
        place: &Place,
        first_row: Reg<U32>,
        warp: &Warp<'_>,
        rows: &[[Reg<F32>; 2]],
    ) {
        let lane = k.lane();
        // Writing: a lane has two neighbours in rows `lane / 4` and 8 below.
        let (row, pair) = (k.eval(lane / 4), k.eval(lane % 4));
        let write = k.eval(warp.room + row * 128 + pair * 4);
        // Reading: eight lanes have the eight chunks of a row.
        let (read_row, chunk) = (k.eval(lane / 8), k.eval(lane % 8));
        let read = k.eval(warp.room + read_row * 128);
        let at = {
            let row = k.eval(first_row + read_row);
            let at = [place.batch, row, place.head];
            let address = self.strides.row_address(k, self.output, mma.element, at);
            k.eval(address + (chunk * 16).convert::<U64>())
        };
        let step = k.eval(self.strides.row * (4 * mma.element.bytes()));
        let groups = mma.value_head_dim as usize / 8;
        for panel in 0..groups.div_ceil(8) {
            // Queries, or the panel before, have been read by the whole warp.
            k.push(Instruction::WarpSync);
            let here = 8.min(groups - 8 * panel);
            for tile in 0..mma.row_tiles as usize {
                for group in 0..here {
                    let cell = warp.output.cell(tile, 8 * panel + group);
                    // The chunk of each group, permuted by the row's place in eight.
                    let chunk = k.eval((row ^ group) * 16);
                    for half in 0..2 {
                        let [factor, _] = rows[2 * tile + half];
                        let [low, high] = [cell[2 * half], cell[2 * half + 1]]
                            .map(|element| Operand::from(k.eval(element * factor)));
                        let dst = k.register_of(mma.element.packed());
                        k.push(Instruction::ConvertPair { dst, high, low });
                        let to = write + chunk + (16 * tile + 8 * half) * 128;
                        store_word(k, to, dst);
                    }
                }
            }
            k.push(Instruction::WarpSync);
            let mut target = at;
            for first in (0..mma.warp_rows()).step_by(4) {
                let exists = (first_row + read_row + first).less(numbers.query_length);
                let stores = if here == 8 { exists } else { exists & chunk.less(here) };
                let from = {
                    // Rows `first + lane / 8` of eight.
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

/// Stores a packed register to shared memory.
fn store_word(k: &mut Builder, to: ptx::Value<ptx::SharedAddress>, word: ptx::Register) {
    let base = k.eval(to);
    k.push(Instruction::Store {
        src: vec![word],
        space: ptx::Space::Shared,
        address: ptx::Address { base: base.register(), offset: 0 },
        order: ptx::StoreOrder::Weak,
        cache: ptx::StoreCache::Default,
        policy: None,
    });
}
