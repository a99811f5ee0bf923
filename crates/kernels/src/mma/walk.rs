//! A warp's walk over the key blocks, from the last to the first.
//!
//! Copies come in groups: the queries, then the keys and values of each block.
//! A block is begun when its group has landed in all threads; then nobody reads
//! the block before any more, and the one that is `ahead` blocks on is sent for
//! into its place.

use ptx::{
    Builder, Expression, F32, Reg, SharedAddress, TileRing, U32, Value, WarpAccumulator,
    WarpFragment,
};

use super::Mma;
use super::copies::{KeyBlocks, wait};
use super::place::{Place, WarpBlocks};
use super::products::{Lanes, Queries, scores, update};
use super::rule::{Rule, RuleParameters};
use super::softmax::Softmax;
use crate::attention::function::blocks::{block_of, needs_function};

/// What one warp holds.
pub(super) struct Warp<'a> {
    mma: &'a Mma,
    lanes: Lanes,
    query_room: TileRing,
    queries: Queries,
    keys: TileRing,
    values: TileRing,
    rule: Rule,
    pub(super) softmax: Softmax,
    pub(super) output: WarpAccumulator,
    /// Blocks left to walk, the current one among them.
    remaining: Reg<U32>,
    blocks: WarpBlocks,
}

impl<'a> Warp<'a> {
    pub(super) fn new(
        k: &mut Builder,
        mma: &'a Mma,
        rules: &RuleParameters,
        place: &Place,
        query_room: TileRing,
        keys: TileRing,
        values: TileRing,
    ) -> Self {
        let thread = k.thread_index();
        // From one lane to all: so the assembler knows that the warp goes one way.
        let warp = k.eval(thread / 32);
        let warp = k.shuffle_index(warp, 0);
        let first_row = k.eval(warp * mma.warp_rows());
        let row = k.eval(place.first_row + first_row);
        let blocks = place.of_warp(k, mma, &rules.visibility, row);
        let lanes = Lanes::new(k);
        let room = k.eval(query_room.at(0) + first_row * 128);
        Warp {
            mma,
            lanes,
            queries: Queries::new(k, mma, room),
            query_room,
            keys,
            values,
            rule: Rule::new(k, mma, rules, place, row),
            softmax: Softmax::new(k, mma, rules.scores.scale_log2),
            output: WarpAccumulator::new(k, mma.warp_rows(), mma.value_head_dim),
            remaining: k.variable(place.blocks()),
            blocks,
        }
    }

    /// The warp's first row in the block's tile, and the room of its queries: found
    /// anew, so as not to be kept until the end.
    pub(super) fn room(&self, k: &mut Builder) -> (Reg<U32>, Reg<SharedAddress>) {
        let thread = k.thread_index();
        let first_row = k.eval(thread / 32 * self.mma.warp_rows());
        (first_row, k.eval(self.query_room.at(0) + first_row * 128))
    }

    /// All of it, from the first copies on. The queries are already under way.
    pub(super) fn walk(&mut self, k: &mut Builder, place: &Place, key_blocks: &KeyBlocks) {
        let ahead = self.mma.ahead;
        let remaining = self.remaining;
        k.copy_async_commit();
        for block in 0..ahead {
            k.if_(remaining.greater(block), |k| {
                let first_key = place.first_key(k, self.mma, remaining - block);
                let first_key = k.eval(first_key);
                // Only the first block to be walked can be ragged.
                let rows = (block == 0).then(|| k.eval(place.key_length - first_key));
                key_blocks.look_up(k, first_key);
                key_blocks.copy(k, self.slots(block), first_key, rows);
            });
            k.copy_async_commit();
        }
        if key_blocks.are_looked_up() {
            k.if_(remaining.greater(ahead), |k| {
                let first_key = place.first_key(k, self.mma, remaining - ahead);
                key_blocks.look_up(k, first_key);
            });
        }
        wait(k, ahead);
        self.queries.take(k, self.mma, self.lanes);

        // Blocks that no row of the warp sees: it only helps to copy.
        let WarpBlocks { seen, unseen, .. } = self.blocks;
        self.help(k, place, key_blocks, seen);
        self.output.clear(k);
        let last = unseen.map_or(0.into(), Value::from);
        k.if_(remaining.greater(last.clone()), |k| {
            k.loop_(|k| {
                self.turn(k, place, key_blocks);
                self.attend(k, place);
                self.advance(k);
                k.break_if(remaining.equals(last));
            });
        });
        if unseen.is_some() {
            let none = k.eval(0);
            self.help(k, place, key_blocks, none);
        }
    }

    /// Only helps to copy, until so many blocks are left.
    fn help(&self, k: &mut Builder, place: &Place, key_blocks: &KeyBlocks, left: Reg<U32>) {
        k.loop_(|k| {
            k.break_if(self.remaining.at_most(left));
            self.turn(k, place, key_blocks);
            self.advance(k);
        });
    }

    /// The tiles of keys and values of the block that is `index` blocks on.
    fn slots(&self, index: u32) -> [Reg<SharedAddress>; 2] {
        [self.keys.at(index), self.values.at(index)]
    }

    /// Begins a block: waits for its group and sends the one that is `ahead` on.
    fn turn(&self, k: &mut Builder, place: &Place, key_blocks: &KeyBlocks) {
        let ahead = self.mma.ahead;
        wait(k, ahead - 1);
        k.if_(self.remaining.greater(ahead), |k| {
            let first_key = place.first_key(k, self.mma, self.remaining - ahead);
            let first_key = k.eval(first_key);
            key_blocks.copy(k, self.slots(ahead), first_key, None);
            // Beyond the last block, that one again.
            let next = (self.remaining - (ahead + 1)).maximum(1);
            if key_blocks.are_looked_up() {
                let first_key = place.first_key(k, self.mma, next);
                key_blocks.look_up(k, first_key);
            }
        });
        k.copy_async_commit();
    }

    fn advance(&self, k: &mut Builder) {
        self.keys.rotate(k);
        self.values.rotate(k);
        k.set(self.remaining, self.remaining - 1);
    }

    /// Takes the block in: scores, probabilities, output.
    fn attend(&self, k: &mut Builder, place: &Place) {
        let mma = self.mma;
        let entry = place.entry(k, self.remaining.into());
        let first_key = match entry {
            None => place.first_key(k, mma, self.remaining),
            Some(entry) => block_of(entry) * mma.key_block,
        };
        let first_key = k.eval(first_key);
        let scores = self.scores(k, first_key, entry);
        k.if_(self.remaining.equals(self.blocks.seen), |k| self.softmax.begin(k, &scores));
        let p = WarpFragment::new(k, mma.element, mma.warp_rows(), mma.key_block);
        let sums: Vec<Reg<F32>> = (0..mma.thread_rows()).map(|_| k.register()).collect();
        self.softmax.exponentials(k, &scores, &p, &sums);
        let exceeds = self.softmax.exceeds(k, &sums);
        k.if_(exceeds, |k| {
            let scores = self.scores(k, first_key, entry);
            self.softmax.raise(k, &scores, &self.output);
            self.softmax.exponentials(k, &scores, &p, &sums);
        });
        self.softmax.add(k, &sums);
        update(k, mma, self.lanes, &p, self.values.at(0), &self.output);
    }

    /// The scores of the block, masked where it needs it.
    fn scores(
        &self,
        k: &mut Builder,
        first_key: Reg<U32>,
        entry: Option<Reg<U32>>,
    ) -> WarpAccumulator {
        let cells = WarpAccumulator::new(k, self.mma.warp_rows(), self.mma.key_block);
        scores(k, self.mma, self.lanes, &self.queries, self.keys.at(0), &cells);
        let place = match entry {
            None => self.remaining,
            Some(entry) => k.eval(block_of(entry) + 1),
        };
        let needs_mask = self.blocks.needs_mask(place);
        self.rule.apply(k, &cells, first_key, needs_mask, entry.map(needs_function));
        cells
    }
}
