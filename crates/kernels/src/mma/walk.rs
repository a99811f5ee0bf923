//! A warp's walk over the key blocks, from the last to the first.
//!
//! Copies come in groups: the queries and the first block's keys, then for
//! each block its values with the next block's keys (with its own, where
//! nothing is woven). A block is begun when its
//! group has landed in all threads; then nobody reads the block before any
//! more, and the group that is `ahead` blocks on is sent into its place.

use ptx::{Builder, Expression, F32, Reg, SharedAddress, U32};

use super::copies::{Blocks, Ring, commit, wait};
use super::mask::Mask;
use super::place::Place;
use super::products::{Cells, Lanes, Probabilities, Queries, scores, update};
use super::softmax::Softmax;
use super::{Mma, Numbers, Weave};

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

/// The block that is being walked.
struct Step {
    strip: u32,
    /// The first key of the block.
    first_key: Reg<U32>,
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
        let (ahead, lead) = (self.mma.ahead, self.mma.lead());
        let remaining = self.remaining;
        let copy = |k: &mut Builder, blocks: &Blocks, ring: &Ring, block: u32| {
            k.if_(remaining.greater(block), |k| {
                let first_key = k.eval(place.first_key(self.mma, remaining - block));
                // Only the first block to be walked can be ragged.
                let rows = (block == 0).then(|| k.eval(numbers.key_length - first_key));
                blocks.copy(k, ring.at(block), first_key, rows);
            });
        };
        for block in 0..lead {
            copy(k, keys, &self.keys, block);
        }
        commit(k);
        for block in 0..ahead {
            copy(k, keys, &self.keys, block + lead);
            copy(k, values, &self.values, block);
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
            if self.mma.is_woven() {
                self.walk_woven(k, place, keys, values);
            } else {
                self.walk_plain(k, place, keys, values);
            }
        });
    }

    /// Begins a block: waits for its group and sends the one that is `ahead` on.
    fn turn(&self, k: &mut Builder, place: &Place, keys: &Blocks, values: &Blocks) {
        let (ahead, lead) = (self.mma.ahead, self.mma.lead());
        wait(k, ahead - 1);
        for (blocks, ring, block) in
            [(keys, &self.keys, ahead + lead), (values, &self.values, ahead)]
        {
            k.if_(self.remaining.greater(block), |k| {
                let first_key = k.eval(place.first_key(self.mma, self.remaining - block));
                blocks.copy(k, ring.at(block), first_key, None);
            });
        }
        commit(k);
    }

    fn advance(&self, k: &mut Builder) {
        self.keys.rotate(k);
        self.values.rotate(k);
        k.set(self.remaining, self.remaining - 1);
    }

    /// Strip after strip, the next one's scores along with this one's exponentials.
    fn walk_woven(&self, k: &mut Builder, place: &Place, keys: &Blocks, values: &Blocks) {
        let mma = self.mma;
        let strips = mma.key_block / mma.strip;
        // The scores of a block's last strip, made while the block before is walked.
        let carried = Cells::new(k, mma, mma.strip);
        let first_key = k.eval(place.first_key(mma, self.remaining));
        self.scores(k, self.keys.at(0), strips - 1, &carried);
        self.mask(k, &carried, self.remaining, first_key, strips - 1);
        self.softmax.begin(k, &carried);
        k.loop_(|k| {
            self.turn(k, place, keys, values);
            let first_key = k.eval(place.first_key(mma, self.remaining));
            let mut before: Option<(Probabilities, u32)> = None;
            let mut current: Option<Cells> = None;
            for strip in (0..strips).rev() {
                let step = Step { strip, first_key };
                let p = Probabilities::new(k, mma);
                let sums: Vec<Reg<F32>> = (0..2 * mma.row_tiles).map(|_| k.register()).collect();
                let here = current.as_ref().unwrap_or(&carried);
                let mut following = None;
                if strip > 0 {
                    let next = Cells::new(k, mma, mma.strip);
                    let slot = self.keys.at(0);
                    self.weave(k, &before, Some((slot, strip - 1, &next)), here, &p, &sums);
                    following = Some(next);
                } else {
                    k.if_else(
                        self.remaining.greater(1),
                        |k| {
                            let next = (self.keys.at(1), strips - 1, &carried);
                            self.weave(k, &before, Some(next), here, &p, &sums);
                        },
                        |k| self.weave(k, &before, None, here, &p, &sums),
                    );
                }
                self.guard(k, &step, &p, &sums);
                match &following {
                    Some(next) => self.mask(k, next, self.remaining, first_key, strip - 1),
                    None => {
                        let left = k.eval(self.remaining - 1);
                        k.if_(left.greater(0), |k| {
                            let first_key = k.eval(first_key - mma.key_block);
                            self.mask(k, &carried, left, first_key, strips - 1);
                        });
                    }
                }
                before = Some((p, strip));
                current = following;
            }
            if let Some((p, strip)) = before {
                update(k, mma, self.lanes, &p, self.values.at(0), strip, &self.output);
            }
            self.advance(k);
            k.break_if(self.remaining.equals(0));
        });
    }

    /// Block after block, each step after the other.
    fn walk_plain(&self, k: &mut Builder, place: &Place, keys: &Blocks, values: &Blocks) {
        let mma = self.mma;
        k.loop_(|k| {
            self.turn(k, place, keys, values);
            let first_key = k.eval(place.first_key(mma, self.remaining));
            let here = Cells::new(k, mma, mma.strip);
            self.scores(k, self.keys.at(0), 0, &here);
            self.mask(k, &here, self.remaining, first_key, 0);
            k.if_(self.remaining.equals(self.seen), |k| self.softmax.begin(k, &here));
            let p = Probabilities::new(k, mma);
            let sums: Vec<Reg<F32>> = (0..2 * mma.row_tiles).map(|_| k.register()).collect();
            self.softmax.exponentials(k, &here, &p, &sums);
            self.guard(k, &Step { strip: 0, first_key }, &p, &sums);
            update(k, mma, self.lanes, &p, self.values.at(0), 0, &self.output);
            self.advance(k);
            k.break_if(self.remaining.equals(0));
        });
    }

    fn scores(&self, k: &mut Builder, slot: Reg<SharedAddress>, strip: u32, to: &Cells) {
        scores(k, self.mma, self.lanes, &self.queries, slot, strip, to);
    }

    /// The products and the exponentials that do not depend on each other: the
    /// output's update by the strip before, the scores of the next, and the
    /// probabilities of this one.
    fn weave(
        &self,
        k: &mut Builder,
        before: &Option<(Probabilities, u32)>,
        next: Option<(Reg<SharedAddress>, u32, &Cells)>,
        here: &Cells,
        p: &Probabilities,
        sums: &[Reg<F32>],
    ) {
        let mma = self.mma;
        let last = k.passage(|k| {
            if let Some((p, strip)) = before {
                update(k, mma, self.lanes, p, self.values.at(0), *strip, &self.output);
            }
        });
        let next = k.passage(|k| {
            if let Some((slot, strip, to)) = next {
                self.scores(k, slot, strip, to);
            }
        });
        let exponentials = k.passage(|k| self.softmax.exponentials(k, here, p, sums));
        match mma.weave {
            Weave::Scores => {
                k.place(last);
                k.weave(next, exponentials);
            }
            Weave::Products => k.weave(last.then(next), exponentials),
        }
    }

    /// Does a strip again if its sums are too large, then adds them.
    fn guard(&self, k: &mut Builder, step: &Step, p: &Probabilities, sums: &[Reg<F32>]) {
        let exceeds = self.softmax.exceeds(k, sums);
        k.if_(exceeds, |k| {
            let again = Cells::new(k, self.mma, self.mma.strip);
            self.scores(k, self.keys.at(0), step.strip, &again);
            self.mask(k, &again, self.remaining, step.first_key, step.strip);
            self.softmax.raise(k, &again, &self.output);
            self.softmax.exponentials(k, &again, p, sums);
        });
        self.softmax.add(k, sums);
    }

    /// Masks a strip, if its block needs it: the block that is walked when
    /// `remaining` are left.
    fn mask(
        &self,
        k: &mut Builder,
        scores: &Cells,
        remaining: Reg<U32>,
        first_key: Reg<U32>,
        strip: u32,
    ) {
        k.if_(remaining.greater(self.unmasked), |k| {
            self.mask.apply(k, scores, first_key + strip * self.mma.strip);
        });
    }
}
