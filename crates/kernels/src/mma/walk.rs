//! A warp's walk over the key blocks, from the last to the first.
//!
//! Copies come in groups: the queries, then the keys and values of each block.
//! A block is begun when its group has landed in all threads; then nobody reads
//! the block before any more, and the one that is `ahead` blocks on is sent for
//! into its place.

use ptx::{Builder, Expression, F32, Reg, SharedAddress, U32};

use super::copies::{Blocks, Ring, commit, wait};
use super::mask::Mask;
use super::place::Place;
use super::products::{Cells, Lanes, Probabilities, Queries, scores, update};
use super::softmax::Softmax;
use super::{Mma, Numbers};

/// What one warp holds.
pub(super) struct Warp<'a> {
    mma: &'a Mma,
    lanes: Lanes,
    /// The warp's first row in the block's tile, and where its queries lie.
    pub(super) first_row: Reg<U32>,
    pub(super) room: Reg<SharedAddress>,
    queries: Queries,
    keys: Ring,
    values: Ring,
    mask: Mask,
    pub(super) softmax: Softmax,
    pub(super) output: Cells,
    /// Blocks left to walk, the current one among them.
    remaining: Reg<U32>,
    /// How many of the walked blocks the warp's rows see, and how many of them
    /// whole.
    seen: Reg<U32>,
    unmasked: Reg<U32>,
}

impl<'a> Warp<'a> {
    pub(super) fn new(
        k: &mut Builder,
        mma: &'a Mma,
        numbers: &Numbers,
        place: &Place,
        query_room: Ring,
        keys: Ring,
        values: Ring,
    ) -> Self {
        let thread = k.thread_index();
        // From one lane to all: so the assembler knows that the warp goes one way.
        let warp = k.eval(thread / 32);
        let warp = k.shuffle_index(warp, 0);
        let first_row = k.eval(warp * mma.warp_rows());
        let row = k.eval(place.first_row + first_row);
        let (seen, unmasked) = place.of_warp(k, mma, numbers, row);
        let lanes = Lanes::new(k);
        let room = k.eval(query_room.at(0) + first_row * 128);
        Warp {
            mma,
            lanes,
            first_row,
            room,
            queries: Queries::new(k, mma, room),
            keys,
            values,
            mask: Mask::new(mma, numbers, row),
            softmax: Softmax::new(k, mma, numbers.scale_log2),
            output: Cells::new(k, mma, mma.value_head_dim),
            remaining: k.variable(place.blocks),
            seen,
            unmasked,
        }
    }

    /// All of it, from the first copies on. The queries are already under way.
    pub(super) fn walk(
        &mut self,
        k: &mut Builder,
        place: &Place,
        keys: &Blocks,
        values: &Blocks,
        numbers: &Numbers,
    ) {
        let ahead = self.mma.ahead;
        let remaining = self.remaining;
        commit(k);
        for block in 0..ahead {
            k.if_(remaining.greater(block), |k| {
                let first_key = k.eval(place.first_key(self.mma, remaining - block));
                // Only the first block to be walked can be ragged.
                let rows = (block == 0).then(|| k.eval(numbers.key_length - first_key));
                keys.copy(k, self.keys.at(block), first_key, rows);
                values.copy(k, self.values.at(block), first_key, rows);
            });
            commit(k);
        }
        wait(k, ahead);
        self.queries.take(k, self.mma, self.lanes);

        // Blocks that no row of the warp sees: it only helps to copy.
        k.loop_(|k| {
            k.break_if(remaining.at_most(self.seen));
            self.turn(k, place, keys, values);
            self.advance(k);
        });
        self.output.clear(k);
        k.if_(remaining.greater(0), |k| {
            k.loop_(|k| {
                self.turn(k, place, keys, values);
                self.attend(k, place);
                self.advance(k);
                k.break_if(remaining.equals(0));
            });
        });
    }

    /// Begins a block: waits for its group and sends the one that is `ahead` on.
    fn turn(&self, k: &mut Builder, place: &Place, keys: &Blocks, values: &Blocks) {
        let ahead = self.mma.ahead;
        wait(k, ahead - 1);
        k.if_(self.remaining.greater(ahead), |k| {
            let first_key = k.eval(place.first_key(self.mma, self.remaining - ahead));
            keys.copy(k, self.keys.at(ahead), first_key, None);
            values.copy(k, self.values.at(ahead), first_key, None);
        });
        commit(k);
    }

    fn advance(&self, k: &mut Builder) {
        self.keys.rotate(k);
        self.values.rotate(k);
        k.set(self.remaining, self.remaining - 1);
    }

    /// Takes the block in: scores, probabilities, output.
    fn attend(&self, k: &mut Builder, place: &Place) {
        let mma = self.mma;
        let first_key = k.eval(place.first_key(mma, self.remaining));
        let scores = self.scores(k, first_key);
        k.if_(self.remaining.equals(self.seen), |k| self.softmax.begin(k, &scores));
        let p = Probabilities::new(k, mma);
        let sums: Vec<Reg<F32>> = (0..2 * mma.row_tiles).map(|_| k.register()).collect();
        self.softmax.exponentials(k, &scores, &p, &sums);
        let exceeds = self.softmax.exceeds(k, &sums);
        k.if_(exceeds, |k| {
            let scores = self.scores(k, first_key);
            self.softmax.raise(k, &scores, &self.output);
            self.softmax.exponentials(k, &scores, &p, &sums);
        });
        self.softmax.add(k, &sums);
        update(k, mma, self.lanes, &p, self.values.at(0), &self.output);
    }

    /// The scores of the block, masked where it needs it.
    fn scores(&self, k: &mut Builder, first_key: Reg<U32>) -> Cells {
        let cells = Cells::new(k, self.mma, self.mma.key_block);
        scores(k, self.mma, self.lanes, &self.queries, self.keys.at(0), &cells);
        k.if_(self.remaining.greater(self.unmasked), |k| self.mask.apply(k, &cells, first_key));
        cells
    }
}
