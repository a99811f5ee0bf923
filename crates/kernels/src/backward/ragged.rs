//! Maps thread blocks to tiles of keys in a ragged batch.
//!
//! The [`Sequencer`](crate::Sequencer) writes a record for each tile of keys, those of a sequence
//! in a row. Thread blocks go through a sequence's tiles head after head, so that those that run at
//! the same time add to the `dQ` sums of few heads:
//!
//! ```text
//! records    a0 a1 a2 | b0 b1 |                          two sequences, of three tiles and two
//! blocks     a0 a1 a2  a0 a1 a2 | b0 b1  b0 b1 |         two key heads
//! ```
//!
//! The thread blocks of a sequence begin at (its first record) * (key heads). So the block index
//! divided by the number of key heads is a record of the right sequence, and reading that one
//! record suffices to find the tile.

use ptx::{
    Builder, Expression, GlobalAddress, Pred, Reg, S32, Select, SharedAddress, U32, U64, Value,
};

use super::BackwardPass;
use super::order::Turn;
use crate::attention::visibility::{KeyTile, QueryBlocks, Visibility};
use crate::divisor::DivisorRegisters;
use crate::forward::{slice_rest, slice_row};
use crate::parameter::{Number, Workspace};
use crate::sequencer::{COUNT_BYTE, RECORD_BYTES, RECORDS_BYTE};

/// The launch's parameters for a ragged batch, and the shared memory in which a block keeps its
/// tile: the sequence, its numbers of queries and keys and where they end, the first key, the key
/// head, where the sequence's rows begin in the workspace, and the query blocks that see the tile.
pub(super) struct Ragged {
    schedule: Reg<GlobalAddress>,
    query_block: u32,
    key_block: u32,
    /// The number of query blocks of a head in the workspace.
    pub(super) query_blocks: Reg<U32>,
    words: u32,
    /// Whether each step reads the visible query blocks from shared memory again: where capped
    /// scores and ALiBi together leave no registers for them.
    pub(super) reloads_query_blocks: bool,
    /// Whether additions to `dQ` come in one fixed order.
    deterministic: bool,
}

/// Where the rows of a sequence are.
pub(super) struct Slice {
    /// The numbers of queries and keys.
    pub(super) lengths: [Reg<U32>; 2],
    /// The rows after the last query and the last key, in their tensors.
    ends: [Reg<U32>; 2],
    /// The workspace index, within a head, of the sequence's first query block.
    pub(super) first_block: Reg<U32>,
}

/// Offsets of the tile's words in shared memory, in words.
mod word {
    pub(super) const LENGTHS: u32 = 0;
    pub(super) const ENDS: u32 = 2;
    pub(super) const KEY_HEAD: u32 = 4;
    pub(super) const FIRST_KEY: u32 = 5;
    pub(super) const SEQUENCE: u32 = 6;
    pub(super) const FIRST_BLOCK: u32 = 7;
    pub(super) const QUERY_BLOCKS: u32 = 8;
    pub(super) const COUNT: u32 = 12;
}

impl Ragged {
    /// Bytes of shared memory.
    pub(super) const BYTES: u32 = 4 * word::COUNT;

    pub(super) fn parameters(k: &mut Builder, pass: &BackwardPass) -> Self {
        let rules = &pass.rules;
        Ragged {
            schedule: Workspace::Schedule.address(k),
            query_block: pass.query_block,
            key_block: pass.key_block,
            query_blocks: Number::QueryBlocks.read(k),
            words: k.shared("tile", Ragged::BYTES, 16),
            reloads_query_blocks: rules.alibi
                && rules.has_score_derivative()
                && rules.score_function.is_none(),
            deterministic: pass.deterministic,
        }
    }

    /// Looks up the tile of this block and leaves it in shared memory; called by one thread. The
    /// grid has more blocks than there are tiles: the surplus ones get zero queries and keys,
    /// whatever an earlier schedule left in their records.
    pub(super) fn post(
        &self,
        k: &mut Builder,
        key_heads: &DivisorRegisters,
        visibility: &Visibility,
    ) {
        let index = k.block_index();
        let (number, _) = key_heads.divide(k, index);
        let records = k.load::<U32, _>(self.schedule + COUNT_BYTE);
        let at = self.schedule + RECORDS_BYTE + number.convert::<U64>() * RECORD_BYTES as u64;
        let at = k.eval(at);
        let record = k.load_vector::<U32, _, 4>(at, Default::default());
        let [sequence, first_key, query_start, queries] = record;
        let [key_start, keys, ..] = k.load_vector::<U32, _, 4>(at + 16, Default::default());
        let run = k.eval((number - first_key / self.key_block) * key_heads.number);
        let tiles = k.eval(((keys + (self.key_block - 1)) / self.key_block).maximum(1));
        let within = k.eval(index - run);
        let key_head = k.eval(within / tiles);
        let first_key = k.eval((within - key_head * tiles) * self.key_block);
        let there = k.eval(number.less(records));
        let [queries, keys_here] = [queries, keys].map(|it| k.eval(there.select::<U32>(it, 0u32)));
        let ends = [k.eval(query_start + queries), k.eval(key_start + keys)];
        // Each sequence's rows begin with a query block of their own; `row_blocks` explains the
        // formula.
        let first_block = k.eval(query_start / self.query_block + sequence);
        let words = self.address(k);
        k.store_vector(words, &[queries, keys_here, ends[0], ends[1]], Default::default());
        let rest = [key_head, first_key, sequence, first_block];
        k.store_vector(words + 4 * word::KEY_HEAD, &rest, Default::default());
        let tile = KeyTile {
            first_key,
            keys: self.key_block,
            query_block: self.query_block,
            query_length: queries,
            key_length: keys_here,
        };
        let QueryBlocks { first, end, whole_from, whole_end } = visibility.query_blocks(k, &tile);
        let blocks = [first, end, whole_from, whole_end];
        k.store_vector(words + 4 * word::QUERY_BLOCKS, &blocks, Default::default());
    }

    /// Returns whether there is a tile for this block.
    pub(super) fn has_tile(&self, k: &mut Builder) -> Value<Pred> {
        let [_, keys] = self.lengths(k);
        keys.greater(0)
    }

    /// Returns the numbers of queries and keys of the tile's sequence.
    pub(super) fn lengths(&self, k: &mut Builder) -> [Reg<U32>; 2] {
        self.pair(k, word::LENGTHS)
    }

    /// Returns the rows at which the sequence's queries and keys begin in their tensors.
    pub(super) fn starts(&self, k: &mut Builder) -> [Reg<U32>; 2] {
        let (ends, lengths) = (self.pair(k, word::ENDS), self.lengths(k));
        [0, 1].map(|side| k.eval(ends[side] - lengths[side]))
    }

    /// Returns the tile's sequence.
    pub(super) fn sequence(&self, k: &mut Builder) -> Reg<U32> {
        self.word(k, word::SEQUENCE)
    }

    /// Returns the tile's turn, in the deterministic mode.
    pub(super) fn turn(&self, k: &mut Builder) -> Option<Turn> {
        self.deterministic.then(|| {
            let [key_head, first_key] = self.pair(k, word::KEY_HEAD);
            let key_block = k.eval(first_key / self.key_block);
            Turn::down(k, key_head, key_block)
        })
    }

    /// Returns the first key of the tile.
    pub(super) fn first_key(&self, k: &mut Builder) -> Reg<U32> {
        self.word(k, word::FIRST_KEY)
    }

    /// Returns the query blocks that see some of the tile's keys.
    pub(super) fn seen_by(&self, k: &mut Builder) -> QueryBlocks {
        let words = self.address(k);
        let blocks = k.load_vector(words + 4 * word::QUERY_BLOCKS, Default::default());
        let [first, end, whole_from, whole_end] = blocks;
        QueryBlocks { first, end, whole_from, whole_end }
    }

    /// Returns the tile as sequence, key head and first key, and where the rows of its sequence
    /// are.
    pub(super) fn find(&self, k: &mut Builder) -> ([Reg<U32>; 3], Slice) {
        let tile = [word::SEQUENCE, word::KEY_HEAD, word::FIRST_KEY].map(|it| self.word(k, it));
        let slice = Slice {
            lengths: self.lengths(k),
            ends: self.pair(k, word::ENDS),
            first_block: self.word(k, word::FIRST_BLOCK),
        };
        (tile, slice)
    }

    fn address(&self, k: &mut Builder) -> Reg<SharedAddress> {
        k.shared_address(self.words)
    }

    fn word(&self, k: &mut Builder, word: u32) -> Reg<U32> {
        let words = self.address(k);
        k.load(words + 4 * word)
    }

    fn pair(&self, k: &mut Builder, first: u32) -> [Reg<U32>; 2] {
        let words = self.address(k);
        k.load_vector(words + 4 * first, Default::default())
    }
}

impl Slice {
    /// Returns the TMA coordinates of a row and head of the queries, without the column.
    pub(super) fn query_corner(&self, k: &mut Builder, at: [Reg<U32>; 2]) -> Vec<Value<S32>> {
        let [row, head] = at;
        let row = k.eval(slice_row(row, self.lengths[0]));
        [row.reinterpret()].into_iter().chain(slice_rest(self.ends[0], head)).collect()
    }

    /// Returns the TMA coordinate of a key row within the slice.
    pub(super) fn key_row(&self, row: impl Into<Value<U32>>) -> Value<S32> {
        slice_row(row, self.lengths[1]).reinterpret()
    }

    /// Returns the TMA coordinates after that of the key row.
    pub(super) fn key_rest(&self, head: Reg<U32>) -> Vec<Value<S32>> {
        slice_rest(self.ends[1], head).to_vec()
    }
}
