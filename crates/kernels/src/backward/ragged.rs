//! Which keys a block takes of a ragged batch.
//!
//! The [`Sequencer`](crate::Sequencer) leaves a record for each tile of keys, those of a sequence in
//! a row. Blocks of the grid go through a sequence's tiles head after head, so that those that run
//! at the same time add to the sums of few heads:
//!
//! ```text
//! records    a0 a1 a2 | b0 b1 |                          two sequences, of three tiles and two
//! blocks     a0 a1 a2  a0 a1 a2 | b0 b1  b0 b1 |         two key heads
//! ```
//!
//! Tiles of a sequence begin at its first record times the heads, so the block's number over the
//! heads is the number of some record of the same sequence, and one look finds all.
//!
//! So does whoever wants to know which blocks of query rows are a tile's to clear and to round: the tiles
//! of a sequence's head share out its blocks of query rows, each as many, in order. Lengths are not added
//! up for that either.

use ptx::{
    Builder, Choose, Expression, GlobalAddress, Pred, Reg, S32, SharedAddress, U32, U64, Value,
};

use super::BackwardPass;
use super::order::Turn;
use super::place::Share;
use super::row_blocks::RowBlock;
use crate::attention::visibility::{KeyTile, QueryBlocks, Visibility};
use crate::divisor::DivisorRegisters;
use crate::forward::{slice_rest, slice_row};
use crate::parameter::{Number, Workspace};
use crate::sequencer::{COUNT_BYTE, RECORD_BYTES, RECORDS_BYTE};

/// The tiles of a schedule.
pub(super) struct Tiles {
    schedule: Reg<GlobalAddress>,
    key_heads: DivisorRegisters,
    key_block: u32,
}

/// A tile.
struct Found {
    sequence: Reg<U32>,
    key_head: Reg<U32>,
    /// Which one of its head's, and how many that has.
    position: Reg<U32>,
    tiles: Reg<U32>,
    /// Where its sequence's queries and keys begin, and how many there are.
    queries: [Reg<U32>; 2],
    keys: [Reg<U32>; 2],
}

impl Tiles {
    pub(super) fn parameters(k: &mut Builder, key_block: u32) -> Self {
        let schedule = Workspace::Schedule.address(k);
        Tiles { schedule, key_heads: DivisorRegisters::parameters(k, Number::KeyHeads), key_block }
    }

    /// How many there are, of all heads.
    pub(super) fn count(&self, k: &mut Builder) -> Reg<U32> {
        let records = k.load::<U32, _>(self.schedule + COUNT_BYTE);
        k.eval(records * self.key_heads.number)
    }

    /// The one of a number.
    fn find(&self, k: &mut Builder, index: Reg<U32>) -> Found {
        let (number, _) = self.key_heads.divide(k, index);
        let at = self.schedule + RECORDS_BYTE + number.convert::<U64>() * RECORD_BYTES as u64;
        let at = k.eval(at);
        let record = k.load_vector::<U32, _, 4>(at, Default::default());
        let [sequence, first_key, query_start, queries] = record;
        let [key_start, keys, ..] = k.load_vector::<U32, _, 4>(at + 16, Default::default());
        let run = k.eval((number - first_key / self.key_block) * self.key_heads.number);
        // Queries without keys have one too.
        let tiles = k.eval(((keys + (self.key_block - 1)) / self.key_block).maximum(1));
        let within = k.eval(index - run);
        let key_head = k.eval(within / tiles);
        let position = k.eval(within - key_head * tiles);
        let (queries, keys) = ([query_start, queries], [key_start, keys]);
        Found { sequence, key_head, position, tiles, queries, keys }
    }
}

/// The shares that tiles have of the blocks of query rows of a batch.
pub(super) struct Shares {
    tiles: Tiles,
    query_block: u32,
    /// Blocks of query rows of a head in the workspace.
    query_blocks: Reg<U32>,
    /// Query heads that share a key head.
    group: Reg<U32>,
}

/// The query heads of a share: the blocks are those of each of them.
pub(super) struct ShareHeads {
    /// The first, and how many.
    first: Reg<U32>,
    pub(super) count: Reg<U32>,
    /// Which of a head's blocks in the workspace is the sequence's first, and how many a head has.
    first_block: Reg<U32>,
    query_blocks: Reg<U32>,
    /// The sequence, where its queries begin in their tensor, and how many there are.
    sequence: Reg<U32>,
    queries: [Reg<U32>; 2],
}

impl Shares {
    pub(super) fn parameters(k: &mut Builder, query_block: u32, key_block: u32) -> Self {
        Shares {
            tiles: Tiles::parameters(k, key_block),
            query_block,
            query_blocks: Number::QueryBlocks.read(k),
            group: Number::GroupSize.read(k),
        }
    }

    /// Tiles that there are.
    pub(super) fn count(&self, k: &mut Builder) -> Reg<U32> {
        self.tiles.count(k)
    }

    /// The share of a tile.
    pub(super) fn of(&self, k: &mut Builder, tile: Reg<U32>) -> Share {
        let found = self.tiles.find(k, tile);
        let Found { sequence, position, tiles, queries, .. } = found;
        let blocks = k.eval((queries[1] + (self.query_block - 1)) / self.query_block);
        let each = k.eval((blocks + tiles - 1) / tiles);
        let first = k.eval((position * each).minimum(blocks));
        let end = k.eval((first + each).minimum(blocks));
        let first_head = k.eval(found.key_head * self.group);
        let heads = ShareHeads {
            first: first_head,
            count: self.group,
            first_block: k.eval(queries[0] / self.query_block + sequence),
            query_blocks: self.query_blocks,
            sequence,
            queries,
        };
        let counter = k.eval(tile - position);
        // Where lists make no sense, the last sequence's records may not all have found room.
        let count = self.count(k);
        let tiles = k.eval(tiles.minimum(count - counter));
        Share { counter, tiles, first, end, heads: Some(heads) }
    }
}

/// Shares whose blocks are taken by several blocks of the grid, before and after the products.
pub(super) struct SpreadShares {
    pub(super) shares: Shares,
    at_once: DivisorRegisters,
}

impl SpreadShares {
    pub(super) fn parameters(k: &mut Builder, query_block: u32, key_block: u32) -> Self {
        SpreadShares {
            shares: Shares::parameters(k, query_block, key_block),
            at_once: DivisorRegisters::parameters(k, Number::BlocksPerShare),
        }
    }

    /// Blocks of the grid that take a share.
    pub(super) fn at_once(&self) -> Reg<U32> {
        self.at_once.number
    }

    /// Which share a block of the grid takes some of, and from which block of query rows on.
    pub(super) fn locate(&self, k: &mut Builder, index: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
        self.at_once.divide(k, index)
    }

    /// Does something with what a block of the grid has of a tile's share.
    pub(super) fn every_block(
        &self,
        k: &mut Builder,
        (tile, ahead): (Reg<U32>, Reg<U32>),
        body: impl FnOnce(&mut Builder, &RowBlock),
    ) {
        let share = self.shares.of(k, tile);
        let Some(heads) = &share.heads else { return };
        heads.every(k, |k, of_head| {
            let [first, end] = [share.first + ahead, share.end.into()];
            let [first, end] = [first, end].map(|it| k.eval(of_head[1] + it));
            k.for_range(first, end, self.at_once.number, |k, number| {
                let block = heads.row_block(k, of_head, number);
                body(k, &block);
            });
        });
    }
}

impl ShareHeads {
    /// Does something for each head: with it, and with the number of its first block.
    pub(super) fn every(&self, k: &mut Builder, body: impl FnOnce(&mut Builder, [Reg<U32>; 2])) {
        k.for_range(self.first, self.first + self.count, 1, |k, head| {
            let begin = k.eval(head * self.query_blocks + self.first_block);
            body(k, [head, begin]);
        });
    }

    /// A block of query rows of a head.
    pub(super) fn row_block(
        &self,
        k: &mut Builder,
        [head, begin]: [Reg<U32>; 2],
        number: Reg<U32>,
    ) -> RowBlock {
        let [start, query_length] = self.queries;
        let block = k.eval(number - begin);
        RowBlock::ragged(number, [head, block], self.sequence, [start, query_length])
    }
}

/// What a launch says of its batch, and where in shared memory a block has its tile: the sequence,
/// its number of queries and keys, and where they end; the first key, the head, and where the
/// sequence's rows begin in the workspace.
pub(super) struct Ragged {
    tiles: Tiles,
    query_block: u32,
    key_block: u32,
    /// Blocks of query rows of a head in the workspace.
    pub(super) query_blocks: Reg<U32>,
    words: u32,
    /// Whether what a step needs is looked up in each, where rules leave no registers to keep it in.
    pub(super) looks_again: bool,
    /// Whether additions come in one order.
    deterministic: bool,
}

/// Where the rows of a sequence are.
pub(super) struct Slice {
    /// Queries and keys.
    pub(super) lengths: [Reg<U32>; 2],
    /// Where both end in their tensors.
    ends: [Reg<U32>; 2],
    /// The number of its first block of query rows in the workspace.
    pub(super) first_block: Reg<U32>,
}

/// The place of each word, in words.
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
    /// Of shared memory.
    pub(super) const BYTES: u32 = 4 * word::COUNT;

    pub(super) fn parameters(k: &mut Builder, pass: &BackwardPass) -> Self {
        Ragged {
            tiles: Tiles::parameters(k, pass.key_block),
            query_block: pass.query_block,
            key_block: pass.key_block,
            query_blocks: Number::QueryBlocks.read(k),
            words: k.shared("tile", Ragged::BYTES, 16),
            looks_again: pass.rules.softcap && pass.rules.alibi,
            deterministic: pass.deterministic,
        }
    }

    /// Finds the tile of this block. There are more blocks than tiles: the others are of a sequence
    /// without queries and keys, whatever records there were before. So is a tile of queries that have no
    /// keys.
    pub(super) fn post(&self, k: &mut Builder, visibility: &Visibility) {
        let index = k.block_index();
        let count = self.tiles.count(k);
        let found = self.tiles.find(k, index);
        let Found { sequence, key_head, position, .. } = found;
        let ([query_start, queries], [key_start, keys]) = (found.queries, found.keys);
        let first_key = k.eval(position * self.key_block);
        let there = k.eval(index.less(count) & keys.greater(0));
        let [queries, keys_here] = [queries, keys].map(|it| k.eval(there.choose::<U32>(it, 0u32)));
        let ends = [k.eval(query_start + queries), k.eval(key_start + keys)];
        // Each sequence's rows begin with a block of their own, no matter how long those before it
        // are.
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

    /// Whether there is a tile for this block.
    pub(super) fn has_tile(&self, k: &mut Builder) -> Value<Pred> {
        let [_, keys] = self.lengths(k);
        keys.greater(0)
    }

    /// The queries and keys of the tile's sequence.
    pub(super) fn lengths(&self, k: &mut Builder) -> [Reg<U32>; 2] {
        self.pair(k, word::LENGTHS)
    }

    /// Where these begin in their tensors.
    pub(super) fn starts(&self, k: &mut Builder) -> [Reg<U32>; 2] {
        let (ends, lengths) = (self.pair(k, word::ENDS), self.lengths(k));
        [0, 1].map(|side| k.eval(ends[side] - lengths[side]))
    }

    /// The tile's sequence.
    pub(super) fn sequence(&self, k: &mut Builder) -> Reg<U32> {
        self.word(k, word::SEQUENCE)
    }

    /// The tile's turn, where there is an order.
    pub(super) fn turn(&self, k: &mut Builder) -> Option<Turn> {
        self.deterministic.then(|| {
            let [key_head, first_key] = self.pair(k, word::KEY_HEAD);
            let key_block = k.eval(first_key / self.key_block);
            Turn::down(k, key_head, key_block)
        })
    }

    /// The first key of the tile.
    pub(super) fn first_key(&self, k: &mut Builder) -> Reg<U32> {
        self.word(k, word::FIRST_KEY)
    }

    /// The query blocks that see some of the tile's keys.
    pub(super) fn seen_by(&self, k: &mut Builder) -> QueryBlocks {
        let words = self.address(k);
        let blocks = k.load_vector(words + 4 * word::QUERY_BLOCKS, Default::default());
        let [first, end, whole_from, whole_end] = blocks;
        QueryBlocks { first, end, whole_from, whole_end }
    }

    /// The sequence, the key head and the first key of the tile, and where its sequence is.
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
    /// Where a query row, of a head, is: all coordinates but the column.
    pub(super) fn query_corner(&self, k: &mut Builder, at: [Reg<U32>; 2]) -> Vec<Value<S32>> {
        let [row, head] = at;
        let row = k.eval(slice_row(row, self.lengths[0]));
        [row.reinterpret()].into_iter().chain(slice_rest(self.ends[0], head)).collect()
    }

    /// The coordinate of a key row,
    pub(super) fn key_row(&self, row: impl Into<Value<U32>>) -> Value<S32> {
        slice_row(row, self.lengths[1]).reinterpret()
    }

    /// and those behind it.
    pub(super) fn key_rest(&self, head: Reg<U32>) -> Vec<Value<S32>> {
        slice_rest(self.ends[1], head).to_vec()
    }
}
