//! Which query rows and which keys a block of threads takes.
//!
//! One block of threads, one tile of query rows of one head: tiles are
//! numbered with the rows moving fastest, so that blocks running at the same
//! time share the keys and values of few heads in the second-level cache.
//!
//! Under a causal mask tiles are of unequal length, and whoever gets a long one
//! last is waited for. Heads go in groups then, as many as the cache holds, and
//! the longest tiles of a group come first: what is left at the end is short.

use ptx::{Builder, Expression, Reg, S32, U32, Value};

use super::{Mma, Numbers};
use crate::divisor::DivisorRegisters;
use crate::parameter::Number;

/// What one block of threads computes.
pub(super) struct Place {
    pub(super) batch: Reg<U32>,
    pub(super) head: Reg<U32>,
    pub(super) key_head: Reg<U32>,
    /// Query heads.
    pub(super) heads: Reg<U32>,
    pub(super) first_row: Reg<U32>,
    /// The first key block that is walked, and how many are.
    first_block: Reg<U32>,
    pub(super) blocks: Reg<U32>,
    pub(super) split: Option<Split>,
}

/// Which part of the keys.
pub(super) struct Split {
    pub(super) index: Reg<U32>,
    /// Sequences times heads: what a split's results are a multiple of.
    pub(super) batches: Reg<U32>,
}

impl Place {
    pub(super) fn new(k: &mut Builder, mma: &Mma, numbers: &Numbers) -> Self {
        let heads = DivisorRegisters::parameters(k, Number::QueryHeads);
        let group = DivisorRegisters::parameters(k, Number::GroupSize);
        let block = k.block_index();
        let (tile, split) = if mma.split {
            let splits = DivisorRegisters::parameters(k, Number::Splits);
            let (tile, index) = splits.divide(k, block);
            let batches = Number::Batch.read(k);
            let length: Reg<U32> = Number::BlocksPerSplit.read(k);
            (tile, Some((Split { index, batches }, length)))
        } else {
            (block, None)
        };
        let (head_and_batch, row_tile) = if mma.causal {
            let tiles_of_group = DivisorRegisters::parameters(k, Number::TilesPerGroup);
            let heads_of_group = DivisorRegisters::parameters(k, Number::HeadsPerGroup);
            let tiles_of_head: Reg<U32> = Number::TilesPerHead.read(k);
            let (group, tile) = tiles_of_group.divide(k, tile);
            let (shorter, member) = heads_of_group.divide(k, tile);
            let head_and_batch = k.eval(group * heads_of_group.number + member);
            (head_and_batch, k.eval(tiles_of_head - 1 - shorter))
        } else {
            DivisorRegisters::parameters(k, Number::TilesPerHead).divide(k, tile)
        };
        let (batch, head) = heads.divide(k, head_and_batch);
        let (key_head, _) = group.divide(k, head);
        let first_row = k.eval(row_tile * mma.query_rows());
        let end_row = k.eval(first_row + mma.query_rows());
        let seen = blocks_seen(k, mma, numbers, end_row);
        let (first_block, blocks, split) = match split {
            None => (k.eval(0), seen, None),
            Some((split, length)) => {
                let first = k.eval((split.index * length).minimum(seen));
                let blocks = k.eval((seen - first).minimum(length));
                (first, blocks, Some(split))
            }
        };
        Place { batch, head, key_head, heads: heads.number, first_row, first_block, blocks, split }
    }

    /// The first key of the block that is walked when `remaining` are left,
    /// itself among them. Without any it is no key.
    pub(super) fn first_key(&self, mma: &Mma, remaining: impl Into<Value<U32>>) -> Value<U32> {
        (self.first_block + remaining.into() - 1) * mma.key_block
    }

    /// How many of the walked blocks the warp whose rows begin at `first_row`
    /// has to walk, and how many of these need no mask.
    pub(super) fn of_warp(
        &self,
        k: &mut Builder,
        mma: &Mma,
        numbers: &Numbers,
        first_row: Reg<U32>,
    ) -> (Reg<U32>, Reg<U32>) {
        let size = mma.key_block;
        let whole = k.eval(numbers.key_length / size);
        let (seen, unmasked) = if mma.causal {
            let end_row = k.eval(first_row + mma.warp_rows());
            let seen = blocks_seen(k, mma, numbers, end_row);
            let first_sees = keys_seen(k, numbers, first_row + 1);
            (seen, k.eval((first_sees / size).minimum(whole)))
        } else {
            (k.eval(self.first_block + self.blocks), whole)
        };
        let within = |k: &mut Builder, count: Reg<U32>| {
            k.eval((count.maximum(self.first_block) - self.first_block).minimum(self.blocks))
        };
        (within(k, seen), within(k, unmasked))
    }
}

/// Keys that the last row before `end_row` sees under a causal mask, were
/// there no end of the keys.
fn keys_seen(k: &mut Builder, numbers: &Numbers, end_row: impl Into<Value<U32>>) -> Reg<U32> {
    let offset = (numbers.key_length - numbers.query_length).reinterpret::<S32>();
    let seen = end_row.into().reinterpret::<S32>() + offset;
    k.eval(seen.maximum(0).reinterpret::<U32>())
}

/// Key blocks that some row before `end_row` sees.
fn blocks_seen(k: &mut Builder, mma: &Mma, numbers: &Numbers, end_row: Reg<U32>) -> Reg<U32> {
    let size = mma.key_block;
    let all = k.eval((numbers.key_length + (size - 1)) / size);
    if !mma.causal {
        return all;
    }
    let seen = keys_seen(k, numbers, end_row);
    k.eval(((seen + (size - 1)) / size).minimum(all))
}
