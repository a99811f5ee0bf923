//! A warp's walk over the key blocks, from the last to the first.
//!
//! `cp.async` groups are committed in order: the queries, then the keys and values of each block.
//! When the group of a block has arrived in all threads, no thread reads the block before it any
//! more, and the copies of the block that is `AHEAD` blocks further are issued into its slot.

use ptx::{
    Builder, Expression, F32, Reg, SharedAddress, TileRing, U32, Value, WarpAccumulator,
    WarpFragment,
};

use super::copies::{KeyBlocks, wait};
use super::products::{Lanes, Queries, scores, update};
use super::rule::{Rule, RuleParameters};
use super::softmax::Softmax;
use super::work_tile::{WarpBlocks, WorkTile};
use super::{AHEAD, Mma};
use crate::attention::function::lists::{block_of, needs_function};

/// The state of one warp.
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
    /// Key blocks left to walk, the current one included.
    remaining: Reg<U32>,
    blocks: WarpBlocks,
}

impl<'a> Warp<'a> {
    pub(super) fn new(
        k: &mut Builder,
        mma: &'a Mma,
        rules: &RuleParameters,
        tile: &WorkTile,
        query_room: TileRing,
        keys: TileRing,
        values: TileRing,
    ) -> Self {
        let thread = k.thread_index();
        // Broadcast from lane 0, so that ptxas knows that the value is uniform in the warp.
        let warp = k.eval(thread / 32);
        let warp = k.shuffle_index(warp, 0);
        let first_row = k.eval(warp * mma.warp_rows());
        let row = k.eval(tile.first_row + first_row);
        let blocks = tile.of_warp(k, mma, &rules.visibility, row);
        let lanes = Lanes::new(k);
        let room = k.eval(query_room.at(0) + first_row * 128);
        Warp {
            mma,
            lanes,
            queries: Queries::new(k, mma, room),
            query_room,
            keys,
            values,
            rule: Rule::new(k, mma, rules, tile, row),
            softmax: Softmax::new(k, mma, &rules.scores),
            output: WarpAccumulator::new(k, mma.warp_rows(), mma.value_head_dim),
            remaining: k.variable(tile.blocks()),
            blocks,
        }
    }

    /// Returns the warp's first row in the tile, and the shared memory of its queries. Recomputed
    /// rather than kept in registers through the loop.
    pub(super) fn room(&self, k: &mut Builder) -> (Reg<U32>, Reg<SharedAddress>) {
        let thread = k.thread_index();
        let first_row = k.eval(thread / 32 * self.mma.warp_rows());
        (first_row, k.eval(self.query_room.at(0) + first_row * 128))
    }

    /// Emits the whole walk, from the first copies of keys on. The copies of the queries are in
    /// flight.
    pub(super) fn walk(&mut self, k: &mut Builder, tile: &WorkTile, key_blocks: &KeyBlocks) {
        let remaining = self.remaining;
        k.copy_async_commit();
        for block in 0..AHEAD {
            k.if_(remaining.greater(block), |k| {
                let first_key = tile.first_key(k, self.mma, remaining - block);
                let first_key = k.eval(first_key);
                // Only the first block of the walk can extend beyond the last key.
                let rows = (block == 0).then(|| k.eval(tile.key_length - first_key));
                key_blocks.look_up(k, first_key);
                key_blocks.copy(k, self.slots(block), first_key, rows);
            });
            k.copy_async_commit();
        }
        if key_blocks.are_looked_up() {
            k.if_(remaining.greater(AHEAD), |k| {
                let first_key = tile.first_key(k, self.mma, remaining - AHEAD);
                key_blocks.look_up(k, first_key);
            });
        }
        wait(k, AHEAD);
        self.queries.take(k, self.mma, self.lanes);

        // Blocks that no row of the warp sees: the warp only takes part in copying.
        let WarpBlocks { seen, unseen, .. } = self.blocks;
        self.copy_only(k, tile, key_blocks, seen);
        self.output.clear(k);
        let last = unseen.map_or(0.into(), Value::from);
        k.if_(remaining.greater(last.clone()), |k| {
            k.loop_(|k| {
                self.begin_block(k, tile, key_blocks);
                self.attend(k, tile);
                self.advance(k);
                k.break_if(remaining.equals(last));
            });
        });
        if unseen.is_some() {
            let none = k.eval(0);
            self.copy_only(k, tile, key_blocks, none);
        }
    }

    /// Takes part in copying only, until `left` blocks remain.
    fn copy_only(&self, k: &mut Builder, tile: &WorkTile, key_blocks: &KeyBlocks, left: Reg<U32>) {
        k.loop_(|k| {
            k.break_if(self.remaining.at_most(left));
            self.begin_block(k, tile, key_blocks);
            self.advance(k);
        });
    }

    /// Returns the slots of the keys and values that are `index` blocks further.
    fn slots(&self, index: u32) -> [Reg<SharedAddress>; 2] {
        [self.keys.at(index), self.values.at(index)]
    }

    /// Begins a block: waits for its copies, and issues those of the block that is `AHEAD` further.
    fn begin_block(&self, k: &mut Builder, tile: &WorkTile, key_blocks: &KeyBlocks) {
        wait(k, AHEAD - 1);
        k.if_(self.remaining.greater(AHEAD), |k| {
            let first_key = tile.first_key(k, self.mma, self.remaining - AHEAD);
            let first_key = k.eval(first_key);
            key_blocks.copy(k, self.slots(AHEAD), first_key, None);
            // After the last block there is nothing to look up: the last one is looked up again.
            let next = (self.remaining - (AHEAD + 1)).maximum(1);
            if key_blocks.are_looked_up() {
                let first_key = tile.first_key(k, self.mma, next);
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

    /// Processes the current block: scores, probabilities, output.
    fn attend(&self, k: &mut Builder, tile: &WorkTile) {
        let mma = self.mma;
        let entry = tile.entry(k, self.remaining.into());
        let first_key = match entry {
            None => tile.first_key(k, mma, self.remaining),
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

    /// Returns the scores of the current block, masked where needed.
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
