//! Finds block masks on the device: where a mask function loads from tensors, which blocks are
//! visible depends on the tensors' contents.
//!
//! There are three kernels, launched one after the other:
//!
//! - [`BlockFinder`] has a warp for each pair of a tile of queries and a block of keys. The warp
//!   evaluates the function for the pairs of query and key until one is visible and one is hidden,
//!   and writes to a table whether none, some or all are visible.
//! - [`BlockLister`] makes lists from the table, one for each tile of queries or for each block of
//!   keys ([`BlockMask`](crate::attention::function::BlockMask) describes their layout).
//! - [`TileSharer`] distributes the tiles of the forward pass over its blocks, by the cost of their
//!   lists.
//!
//! A thread of the finder takes 8 queries at a time, and every 32nd key of the block.

mod lister;
mod sharer;

pub use lister::BlockLister;
pub use sharer::{SharerProblem, TileSharer};

use ptx::{
    Builder, Expression, F32, GlobalAddress, Program, Reg, S32, Select, Target, U32, U64, Value,
};

use crate::attention::function::Function;
use crate::attention::function::lower::{FunctionRegisters, ScoreCoordinates};
use crate::attention::visibility::{Blocks, RowTile, Visibility};
use crate::attention::{MaskKind, Score};
use crate::dependent_launch::wait_for_earlier_grids;
use crate::parameter::{Number, Workspace};
use crate::{Error, build, first_fault, resident_blocks};

/// The configuration of the finder kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockFinder {
    /// The target architecture.
    pub target: Target,
    /// The mask function.
    pub function: Function,
    /// The mask by name, which hides keys too.
    pub mask: MaskKind,
    /// Query rows per tile.
    pub query_rows: u32,
    /// Keys per block.
    pub key_block: u32,
}

/// Warps per block.
const WARPS: u32 = 8;
/// Query offsets that a thread evaluates together.
const ROWS: [u32; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

/// The states of a pair of tile and block in the table: which of its pairs of query and key are
/// visible.
const NONE: u32 = 0;
const SOME: u32 = 1;
const ALL: u32 = 2;

/// The finder's table: a state for each sequence and head that has lists of its own, tile and
/// block. Behind it is the cost of each tile's list.
#[derive(Clone, Copy)]
struct BlockStateTable {
    address: Reg<GlobalAddress>,
    /// Number of tiles of queries, and of blocks of keys.
    tiles: Reg<U32>,
    blocks: Reg<U32>,
    /// Number of pairs of them, over all sequences and heads with lists of their own.
    pairs: Reg<U32>,
}

impl BlockStateTable {
    fn parameters(k: &mut Builder) -> Self {
        let address = Workspace::FoundBlocks.address(k);
        let numbers = [Number::QueryBlocks, Number::KeyBlocks, Number::BlockPairs];
        let [tiles, blocks, pairs] = numbers.map(|it| it.read(k));
        BlockStateTable { address, tiles, blocks, pairs }
    }

    fn at(&self, k: &mut Builder, index: impl Into<Value<U32>>) -> Reg<GlobalAddress> {
        let index = k.eval(index);
        k.eval(self.address + index.convert::<U64>() * 4)
    }
}

impl BlockFinder {
    /// Threads per block.
    pub const THREADS: u32 = 32 * WARPS;

    /// Returns the name of this configuration.
    pub fn name(&self) -> String {
        let BlockFinder { target, function, mask, query_rows, key_block } = self;
        let (mask, function) = (mask.name(), function.label());
        format!("block_finder_{target}_{query_rows}x{key_block}_{mask}_{function}")
    }

    /// Returns the blocks of the grid for `pairs` pairs of tiles and blocks.
    pub fn blocks(pairs: u32) -> u32 {
        pairs.div_ceil(WARPS)
    }

    /// Builds the kernel.
    ///
    /// The grid has a warp for each pair of a tile and a block. Parameters by name: the table's
    /// address, tiles and blocks of a head, and pairs in all; the query and the key length; the
    /// number of heads with lists of their own, and how many heads and sequences share a list; the
    /// parameters of the mask and of the function.
    pub fn program(&self) -> Result<Program, Error> {
        let fault = first_fault([(
            self.query_rows == 0 || self.key_block == 0 || self.key_block > 256,
            "tiles without queries, or blocks without keys or with more than 256",
        )]);
        // When asked for fewer blocks, the assembler limits itself to 48 registers and spills.
        let builder = |name| resident_blocks(name, self.target, BlockFinder::THREADS, 4);
        build(self.name(), fault, builder, |k| self.write(k))
    }

    fn write(&self, k: &mut Builder) {
        wait_for_earlier_grids(k);
        let found = BlockStateTable::parameters(k);
        let lengths = [Number::QueryLength.read(k), Number::KeyLength.read(k)];
        let own_heads = Number::ListHeads.read(k);
        let each = [Number::SequencesPerList, Number::HeadsPerList].map(|it| it.read(k));
        let visibility = Visibility::parameters(k, self.mask);
        let function = FunctionRegisters::parameters(k, self.function);

        let thread = k.thread_index();
        let (lane, warp) = (k.lane(), k.eval(thread / 32));
        let index = k.block_index();
        let index = k.eval(index * WARPS + warp);
        k.if_(index.less(found.pairs), |k| {
            let [block, rest] = [k.eval(index % found.blocks), k.eval(index / found.blocks)];
            let [tile, rest] = [k.eval(rest % found.tiles), k.eval(rest / found.tiles)];
            let [head, sequence] = [k.eval(rest % own_heads), k.eval(rest / own_heads)];
            let block_pair = BlockPair {
                finder: self,
                function: &function,
                lengths,
                first: [k.eval(sequence * each[0]), k.eval(head * each[1])],
                each,
                tile,
                block,
            };
            let [first, end] = self.blocks_by_name(k, &visibility, tile, lengths);
            let state = k.variable::<U32>(NONE);
            let by_name = k.eval(block.at_least(first) & block.less(end));
            k.if_(by_name, |k| {
                let seen = block_pair.state(k, lane);
                k.set(state, seen);
            });
            let at = found.at(k, index);
            k.if_(lane.equals(0), |k| k.store(at, state));
        });
    }

    /// Returns the first block and the end (exclusive) of those that the mask by name leaves a
    /// tile.
    fn blocks_by_name(
        &self,
        k: &mut Builder,
        visibility: &Visibility,
        tile: Reg<U32>,
        [query_length, key_length]: [Reg<U32>; 2],
    ) -> [Reg<U32>; 2] {
        let (first, end) = (k.variable::<U32>(0), k.variable::<U32>(0));
        let first_row = k.eval(tile * self.query_rows);
        let rows = RowTile { first_row, rows: self.query_rows, query_length, key_length };
        let first_of = visibility.is_window().then_some(first);
        let blocks = Blocks { size: self.key_block, least: 0, first: first_of, end };
        visibility.find_blocks(k, &rows, blocks);
        [first, end]
    }
}

/// The pair of a tile and a block that a warp evaluates.
struct BlockPair<'a> {
    finder: &'a BlockFinder,
    function: &'a FunctionRegisters,
    lengths: [Reg<U32>; 2],
    /// First sequence and first head that share the list, and how many share it.
    first: [Reg<U32>; 2],
    each: [Reg<U32>; 2],
    tile: Reg<U32>,
    block: Reg<U32>,
}

impl BlockPair<'_> {
    /// Evaluates the function over the pair; returns its state.
    fn state(&self, k: &mut Builder, lane: Reg<U32>) -> Reg<U32> {
        let BlockFinder { query_rows, key_block, .. } = *self.finder;
        let [query_length, key_length] = self.lengths;
        let first_query = k.eval(self.tile * query_rows);
        let first_key = k.eval(self.block * key_block);
        let end_query = k.eval((first_query + query_rows).minimum(query_length));
        let end_key = k.eval((first_key + key_block).minimum(key_length));
        // Whether this thread has found a visible and a hidden pair.
        let (seen, hidden) = (k.variable::<U32>(0), k.variable::<U32>(0));
        let mixed = |k: &mut Builder| {
            let [seen, hidden] = [seen, hidden].map(|it| k.any(it.differs(0)));
            k.eval(seen & hidden)
        };
        let places = k.eval(self.each[0] * self.each[1]);
        k.for_range(0, places, 1, |k, place| {
            let batch = k.eval(self.first[0] + place / self.each[1]);
            let head = k.eval(self.first[1] + place % self.each[1]);
            k.for_range(first_query, end_query, ROWS.len() as u32, |k, query| {
                let key = k.eval(first_key + lane);
                let coordinates = ScoreCoordinates {
                    batch,
                    head,
                    first_query: k.eval(query.reinterpret::<S32>()),
                    rows: &ROWS,
                    first_key: k.eval(key.reinterpret::<S32>()),
                    query_length,
                    key_length,
                };
                let columns: Vec<u32> = (0..key_block).step_by(32).collect();
                let unread = k.variable::<F32>(0.0);
                let pairs = |row: usize| {
                    let of = |column: &u32| Score { row, column: *column, register: unread };
                    columns.iter().map(of).collect::<Vec<_>>()
                };
                let pairs: Vec<Score> = (0..ROWS.len()).flat_map(pairs).collect();
                self.function.each_seen(k, &pairs, &coordinates, |k, pair, is_seen| {
                    let row = query + ROWS[pair.row];
                    let exists = row.less(end_query) & (key + pair.column).less(end_key);
                    let exists = k.eval(exists);
                    let is_seen = k.eval(is_seen);
                    k.set(seen, (exists & is_seen).select::<U32>(1u32, seen));
                    k.set(hidden, (exists & !is_seen).select::<U32>(1u32, hidden));
                });
                let mixed = mixed(k);
                k.break_if(mixed);
            });
            let mixed = mixed(k);
            k.break_if(mixed);
        });
        let [seen, hidden] = [seen, hidden].map(|it| k.any(it.differs(0)));
        let some: Value<U32> = hidden.select::<U32>(SOME, ALL);
        k.eval(seen.select::<U32>(some, NONE))
    }
}
