//! Finds block masks on the device: where a mask loads from tensors, only what is in them says which
//! blocks are seen.
//!
//! A block of threads makes a list ([`BlockMask`](crate::attention::function::BlockMask) says how
//! it lies). Its warps take the blocks that the mask by name leaves, one after the other, and evaluate
//! the function for every pair, until some pair is seen and some is not. What they found is in shared
//! memory then, and one warp writes the list in order.
//!
//! ```text
//! rows of a thread    8 queries
//! its columns         every 32nd key of the block
//! ```
//!
//! Tiles of the forward pass are shared out by what was found ([`TileSharer`]).

mod sharer;

pub use sharer::TileSharer;

use ptx::{
    Builder, Choose, Expression, F32, Program, Reg, S32, SharedAddress, Target, U32, U64, Value,
};

use crate::Error;
use crate::attention::function::blocks::BlockLists;
use crate::attention::function::lower::{FunctionRegisters, Standing};
use crate::attention::function::{Function, ListsOf};
use crate::attention::visibility::{Blocks, KeyTile, RowTile, Visibility};
use crate::attention::{MaskKind, Score};
use crate::parameter::Number;

/// What the kernel is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockFinder {
    /// The architecture.
    pub target: Target,
    /// The mask.
    pub function: Function,
    /// What else hides keys.
    pub mask: MaskKind,
    /// Query rows of a tile: a multiple of 8.
    pub query_rows: u32,
    /// Keys of a block.
    pub key_block: u32,
    /// Who has lists.
    pub lists: ListsOf,
}

const WARPS: u32 = 8;
/// Queries that a thread looks at together.
const ROWS: [u32; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

/// What was found of a block.
const NONE: u32 = 0;
const SOME: u32 = 1;
const ALL: u32 = 2;

impl BlockFinder {
    /// Threads of a block.
    pub const THREADS: u32 = 32 * WARPS;
    /// The most blocks that a list has room for.
    pub const MOST_BLOCKS: u32 = 8192;

    /// The name of this configuration.
    pub fn name(&self) -> String {
        let BlockFinder { target, function, mask, query_rows, key_block, lists } = self;
        let of = match lists {
            ListsOf::Queries => "queries",
            ListsOf::Keys { .. } => "keys",
        };
        let (mask, function) = (mask.name(), function.label());
        format!("block_finder_{target}_{of}_{query_rows}x{key_block}_{mask}_{function}")
    }

    /// Builds the kernel.
    ///
    /// One block for each list. Parameters by name: where lists are and how they lie; the query and
    /// the key length; lists of a head, heads with lists of their own, and how many heads and sequences
    /// walk a list; what the mask and the function ask for.
    pub fn program(&self) -> Result<Program, Error> {
        let faults = [
            (
                !self.query_rows.is_multiple_of(ROWS.len() as u32) || self.query_rows == 0,
                "a tile is no multiple of 8 queries",
            ),
            (
                self.key_block == 0 || self.key_block > 256,
                "a block has more than 256 keys, or none",
            ),
            (self.lists == ListsOf::Keys { turns: true }, "turns are not counted on the device"),
        ];
        if let Some((_, fault)) = faults.into_iter().find(|(faulty, _)| *faulty) {
            return Err(Error::configuration(self.name(), fault));
        }
        let mut k = Builder::new(self.name(), self.target, BlockFinder::THREADS);
        self.write(&mut k);
        Ok(k.finish()?)
    }

    fn write(&self, k: &mut Builder) {
        let lists = BlockLists::parameters(k);
        let lengths = [Number::QueryLength.read(k), Number::KeyLength.read(k)];
        let [tiles, own_heads] = [Number::ListsPerHead, Number::ListHeads].map(|it| it.read(k));
        let each = [Number::SequencesPerList, Number::HeadsPerList].map(|it| it.read(k));
        let visibility = Visibility::parameters(k, self.mask);
        let function = FunctionRegisters::parameters(k, self.function);
        let states = k.shared("blocks", 4 * BlockFinder::MOST_BLOCKS, 16);

        let index = k.block_index();
        let [tile, rest] = [k.eval(index % tiles), k.eval(index / tiles)];
        let [sequence, head] = [k.eval(rest / own_heads), k.eval(rest % own_heads)];
        let list = lists.of(k, [sequence, head, tile]);
        let list = k.eval(list);
        let [first, end] = self.blocks(k, &visibility, tile, lengths);
        let looked = Looked {
            finder: self,
            function: &function,
            lengths,
            first: [k.eval(sequence * each[0]), k.eval(head * each[1])],
            each,
            tile,
        };

        let thread = k.thread_index();
        let (lane, warp) = (k.lane(), k.eval(thread / 32));
        let state_at = |k: &mut Builder, block: Reg<U32>| -> Reg<SharedAddress> {
            let states = k.shared_address(states);
            k.eval(states + (block - first) * 4)
        };
        k.for_range(first + warp, end, WARPS, |k, block| {
            let state = looked.state(k, block, lane);
            let at = state_at(k, block);
            k.if_(lane.equals(0), |k| k.store(at, state));
        });
        k.block_sync();
        k.if_(warp.equals(0), |k| {
            let count = k.variable::<U32>(0);
            k.for_range(first, end, 32, |k, from| {
                let block = k.eval(from + lane);
                let state = k.variable::<U32>(NONE);
                k.if_(block.less(end), |k| {
                    let at = state_at(k, block);
                    let found = k.load::<U32, _>(at);
                    k.set(state, found);
                });
                let seen = k.ballot(state.differs(NONE));
                let one = k.eval::<U32>(1);
                let before = k.eval(seen & ((one << lane) - 1));
                let before = k.population_count(before);
                let at = k.eval(count + before + 1);
                k.if_(state.differs(NONE), |k| {
                    let entry = k.eval(block * 2 + state.equals(SOME).choose::<U32>(1u32, 0u32));
                    k.store(list + at.convert::<U64>() * 4, entry);
                });
                let all = k.population_count(seen);
                k.set(count, count + all);
            });
            k.if_(lane.equals(0), |k| {
                k.store(list, count);
                // Kernels that walk a block in any case find one here, which the function hides.
                let hidden = k.eval::<U32>(1);
                k.if_(count.equals(0), |k| k.store(list + 4u64, hidden));
            });
        });
    }

    /// The blocks that the mask by name leaves: the first, and the one after the last.
    fn blocks(
        &self,
        k: &mut Builder,
        visibility: &Visibility,
        tile: Reg<U32>,
        [query_length, key_length]: [Reg<U32>; 2],
    ) -> [Reg<U32>; 2] {
        match self.lists {
            ListsOf::Queries => {
                let (first, end) = (k.variable::<U32>(0), k.variable::<U32>(0));
                let first_row = k.eval(tile * self.query_rows);
                let rows = RowTile { first_row, rows: self.query_rows, query_length, key_length };
                let blocks = Blocks {
                    size: self.key_block,
                    least: 0,
                    first: visibility.is_window().then_some(first),
                    end,
                };
                visibility.find_blocks(k, &rows, blocks);
                [first, end]
            }
            ListsOf::Keys { .. } => {
                let keys = KeyTile {
                    first_key: k.eval(tile * self.key_block),
                    keys: self.key_block,
                    query_block: self.query_rows,
                    query_length,
                    key_length,
                };
                let blocks = visibility.query_blocks(k, &keys);
                [blocks.first, blocks.end]
            }
        }
    }
}

/// What a list is of.
struct Looked<'a> {
    finder: &'a BlockFinder,
    function: &'a FunctionRegisters,
    lengths: [Reg<U32>; 2],
    /// The first sequence and the first head that walk it, and how many of each.
    first: [Reg<U32>; 2],
    each: [Reg<U32>; 2],
    tile: Reg<U32>,
}

impl Looked<'_> {
    /// What a warp finds of a block.
    fn state(&self, k: &mut Builder, block: Reg<U32>, lane: Reg<U32>) -> Reg<U32> {
        let BlockFinder { query_rows, key_block, lists, .. } = *self.finder;
        let [rows_of, keys_of] = match lists {
            ListsOf::Queries => [self.tile, block],
            ListsOf::Keys { .. } => [block, self.tile],
        };
        let [query_length, key_length] = self.lengths;
        let [first_query, first_key] = [k.eval(rows_of * query_rows), k.eval(keys_of * key_block)];
        let end_query = k.eval((first_query + query_rows).minimum(query_length));
        let end_key = k.eval((first_key + key_block).minimum(key_length));
        // Of the pairs of this thread.
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
                let standing = Standing {
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
                self.function.each_seen(k, &pairs, &standing, |k, pair, is_seen| {
                    let row = query + ROWS[pair.row];
                    let exists = row.less(end_query) & (key + pair.column).less(end_key);
                    let exists = k.eval(exists);
                    let is_seen = k.eval(is_seen);
                    k.set(seen, (exists & is_seen).choose::<U32>(1u32, seen));
                    k.set(hidden, (exists & !is_seen).choose::<U32>(1u32, hidden));
                });
                let mixed = mixed(k);
                k.break_if(mixed);
            });
            let mixed = mixed(k);
            k.break_if(mixed);
        });
        let [seen, hidden] = [seen, hidden].map(|it| k.any(it.differs(0)));
        let some: Value<U32> = hidden.choose::<U32>(SOME, ALL);
        k.eval(seen.choose::<U32>(some, NONE))
    }
}
