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
//!
//! The same record gives a tile's share of the query blocks that it clears or rounds
//! (`clear_and_round`): the tiles of a sequence's head divide its query blocks evenly, in order, so
//! no lengths are added up for that either.

use ptx::{
    Builder, Expression, GlobalAddress, Pred, Reg, S32, Select, SharedAddress, U32, U64, Value,
};

use super::BackwardPass;
use super::order::Turn;
use super::row_blocks::RowBlock;
use super::tile_scheduler::Share;
use crate::attention::visibility::{KeyTile, QueryBlocks, Visibility};
use crate::divisor::DivisorRegisters;
use crate::forward::{slice_rest, slice_row};
use crate::parameter::{Number, Workspace};
use crate::sequencer::{COUNT_BYTE, RECORD_BYTES, RECORDS_BYTE};

/// The schedule of a batch's key tiles, in which any thread can look up any tile.
pub(super) struct Schedule {
    address: Reg<GlobalAddress>,
    query_block: u32,
    key_block: u32,
    /// The number of query blocks of a head in the workspace.
    pub(super) query_blocks: Reg<U32>,
}

/// A tile as the schedule has it.
struct ScheduledTile {
    /// Whether the schedule has a record for it.
    is_there: Reg<Pred>,
    /// The number of records of the schedule.
    records: Reg<U32>,
    sequence: Reg<U32>,
    key_head: Reg<U32>,
    /// The number of tiles of its sequence's head.
    tiles: Reg<U32>,
    first_key: Reg<U32>,
    /// The first row and the number of the sequence's queries, and of its keys.
    queries: [Reg<U32>; 2],
    keys: [Reg<U32>; 2],
}

/// The rows of a share: those of one head of one sequence.
pub(super) struct ShareRows {
    head: Reg<U32>,
    sequence: Reg<U32>,
    /// The workspace index of the first query block of this sequence and head.
    begin: Reg<U32>,
    /// The first row and the number of the sequence's queries.
    queries: [Reg<U32>; 2],
}

impl Schedule {
    pub(super) fn parameters(k: &mut Builder, query_block: u32, key_block: u32) -> Self {
        Schedule {
            address: Workspace::Schedule.address(k),
            query_block,
            key_block,
            query_blocks: Number::QueryBlocks.read(k),
        }
    }

    /// Returns the number of tiles over all heads.
    pub(super) fn tiles(&self, k: &mut Builder, key_heads: &DivisorRegisters) -> Reg<U32> {
        let records = k.load::<U32, _>(self.address + COUNT_BYTE);
        k.eval(records * key_heads.number)
    }

    /// Looks up the tile with this number.
    fn look_up(
        &self,
        k: &mut Builder,
        key_heads: &DivisorRegisters,
        tile: Reg<U32>,
    ) -> ScheduledTile {
        let (number, _) = key_heads.divide(k, tile);
        let records = k.load::<U32, _>(self.address + COUNT_BYTE);
        let at = self.address + RECORDS_BYTE + number.convert::<U64>() * RECORD_BYTES as u64;
        let at = k.eval(at);
        let record = k.load_vector::<U32, _, 4>(at, Default::default());
        let [sequence, first_key, query_start, queries] = record;
        let [key_start, keys, ..] = k.load_vector::<U32, _, 4>(at + 16, Default::default());
        let run = k.eval((number - first_key / self.key_block) * key_heads.number);
        let tiles = k.eval(((keys + (self.key_block - 1)) / self.key_block).maximum(1));
        let within = k.eval(tile - run);
        let key_head = k.eval(within / tiles);
        let first_key = k.eval((within - key_head * tiles) * self.key_block);
        let is_there = k.eval(number.less(records));
        let (queries, keys) = ([query_start, queries], [key_start, keys]);
        ScheduledTile { is_there, records, sequence, key_head, tiles, first_key, queries, keys }
    }

    /// Returns a tile's share of the query blocks of its head, where each query head has keys of
    /// its own. The counters of the head are those of its first tile.
    pub(super) fn share(
        &self,
        k: &mut Builder,
        key_heads: &DivisorRegisters,
        tile: Reg<U32>,
    ) -> Share {
        let found = self.look_up(k, key_heads, tile);
        let ScheduledTile { sequence, tiles, queries, .. } = found;
        let position = k.eval(found.first_key / self.key_block);
        let blocks = k.eval((queries[1] + (self.query_block - 1)) / self.query_block);
        let each = k.eval((blocks + tiles - 1) / tiles);
        let first = k.eval((position * each).minimum(blocks));
        let end = k.eval((first + each).minimum(blocks));
        let first_block = self.first_block(queries[0], sequence);
        let begin = k.eval(found.key_head * self.query_blocks + first_block);
        let rows = ShareRows { head: found.key_head, sequence, begin, queries };
        let counters = k.eval(tile - position);
        // If lists make no sense, the schedule may have no room for all tiles of the last sequence.
        let tiles = k.eval(tiles.minimum(found.records * key_heads.number - counters));
        let [first, end] = [first, end].map(|it| k.eval(begin + it));
        Share { counters, tiles, first, end, rows: Some(rows) }
    }

    /// Returns the workspace index, within a head, of a sequence's first query block: each
    /// sequence's rows begin with a query block of their own; `row_blocks` explains the formula.
    fn first_block(&self, query_start: Reg<U32>, sequence: Reg<U32>) -> Value<U32> {
        query_start / self.query_block + sequence
    }
}

impl ShareRows {
    /// Returns the query block with this workspace index.
    pub(super) fn row_block(&self, k: &mut Builder, number: Reg<U32>) -> RowBlock {
        let block = k.eval(number - self.begin);
        RowBlock::ragged(number, [self.head, block], self.sequence, self.queries)
    }
}

/// The shares of the tiles in the kernels before and after the products, where several thread
/// blocks take the query blocks of one share in turns.
pub(super) struct DividedShares {
    schedule: Schedule,
    key_heads: DivisorRegisters,
    /// The number of thread blocks for each share.
    blocks_per_share: DivisorRegisters,
}

impl DividedShares {
    pub(super) fn parameters(k: &mut Builder, query_block: u32, key_block: u32) -> Self {
        DividedShares {
            schedule: Schedule::parameters(k, query_block, key_block),
            key_heads: DivisorRegisters::parameters(k, Number::KeyHeads),
            blocks_per_share: DivisorRegisters::parameters(k, Number::BlocksPerShare),
        }
    }

    /// Returns the number of tiles over all heads.
    pub(super) fn tiles(&self, k: &mut Builder) -> Reg<U32> {
        self.schedule.tiles(k, &self.key_heads)
    }

    /// Returns the number of thread blocks for each share.
    pub(super) fn blocks_per_share(&self) -> Reg<U32> {
        self.blocks_per_share.number
    }

    /// Returns the index of the share that the thread block with this index takes some of, and its
    /// turn among the thread blocks of that share.
    pub(super) fn locate(&self, k: &mut Builder, index: Reg<U32>) -> [Reg<U32>; 2] {
        let (share, turn) = self.blocks_per_share.divide(k, index);
        [share, turn]
    }

    /// Emits a loop over the query blocks of a tile's share that are this turn's.
    pub(super) fn every_block(
        &self,
        k: &mut Builder,
        [tile, turn]: [Reg<U32>; 2],
        body: impl FnOnce(&mut Builder, &RowBlock),
    ) {
        let share = self.schedule.share(k, &self.key_heads, tile);
        let Some(rows) = share.rows else { unreachable!("shares of a schedule have rows") };
        k.for_range(share.first + turn, share.end, self.blocks_per_share(), |k, number| {
            let block = rows.row_block(k, number);
            body(k, &block);
        });
    }
}

/// The launch's parameters for a ragged batch, and the shared memory in which a block keeps its
/// tile: the sequence, its numbers of queries and keys and where they end, the first key, the key
/// head, where the sequence's rows begin in the workspace, and the query blocks that see the tile.
pub(super) struct Ragged {
    pub(super) schedule: Schedule,
    words: u32,
    /// Whether each step reads the visible query blocks from shared memory again: where capped
    /// scores and ALiBi together leave no registers for them.
    pub(super) reloads_query_blocks: bool,
    /// Whether additions to `dQ` come in one fixed order.
    deterministic: bool,
    /// Whether tiles clear and round shares of the sums: then some have queries and no keys.
    shares: bool,
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
            schedule: Schedule::parameters(k, pass.query_block, pass.key_block),
            words: k.shared("tile", Ragged::BYTES, 16),
            reloads_query_blocks: rules.alibi
                && rules.has_score_derivative()
                && rules.score_function.is_none(),
            deterministic: pass.deterministic,
            shares: pass.shares().is_some(),
        }
    }

    /// Looks up the tile of this block and leaves it in shared memory; called by one thread. The
    /// grid has more blocks than there are tiles: the surplus ones get zero queries and keys,
    /// whatever an earlier schedule left in their records. So do tiles without keys, whose queries
    /// add nothing.
    pub(super) fn post(
        &self,
        k: &mut Builder,
        key_heads: &DivisorRegisters,
        visibility: &Visibility,
    ) {
        let index = k.block_index();
        let found = self.schedule.look_up(k, key_heads, index);
        let ScheduledTile { sequence, key_head, first_key, .. } = found;
        let ([query_start, queries], [key_start, keys]) = (found.queries, found.keys);
        let there = match self.shares {
            false => found.is_there,
            true => k.eval(found.is_there & keys.greater(0)),
        };
        let [queries, keys_here] = [queries, keys].map(|it| k.eval(there.select::<U32>(it, 0u32)));
        let ends = [k.eval(query_start + queries), k.eval(key_start + keys)];
        let first_block = k.eval(self.schedule.first_block(query_start, sequence));
        let words = self.address(k);
        k.store_vector(words, &[queries, keys_here, ends[0], ends[1]], Default::default());
        let rest = [key_head, first_key, sequence, first_block];
        k.store_vector(words + 4 * word::KEY_HEAD, &rest, Default::default());
        let tile = KeyTile {
            first_key,
            keys: self.schedule.key_block,
            query_block: self.schedule.query_block,
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
            let key_block = k.eval(first_key / self.schedule.key_block);
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
