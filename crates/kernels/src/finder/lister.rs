//! Makes lists from the table of a [`BlockFinder`](super::BlockFinder), one warp for each list.

use ptx::{Builder, Expression, Program, Reg, Select, Target, U32, U64};

use super::{BlockStateTable, NONE, SOME, WARPS};
use crate::attention::function::ListsOf;
use crate::attention::function::lists::BlockLists;
use crate::dependent_launch::wait_for_earlier_grids;
use crate::forward::lists::{BLOCK, EVALUATION, OVERHEAD};
use crate::parameter::Number;
use crate::{Error, build};

/// The configuration of the lister kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockLister {
    /// The target architecture.
    pub target: Target,
    /// Whether tiles of queries or blocks of keys have lists.
    pub lists: ListsOf,
}

impl BlockLister {
    /// Threads per block.
    pub const THREADS: u32 = 32 * WARPS;

    /// Returns the name of this configuration.
    pub fn name(&self) -> String {
        let of = match self.lists {
            ListsOf::Queries => "queries",
            ListsOf::Keys { turns: false } => "keys",
            ListsOf::Keys { turns: true } => "keys_turns",
        };
        format!("block_lister_{}_{of}", self.target)
    }

    /// Returns the blocks of the grid for `lists` lists.
    pub fn blocks(lists: u32) -> u32 {
        lists.div_ceil(WARPS)
    }

    /// Builds the kernel.
    ///
    /// Parameters by name: the address of the finder's table, tiles and blocks of a head, and pairs
    /// in all; the address and layout of the lists, how many there are, and the number of heads
    /// with lists of their own.
    pub fn program(&self) -> Result<Program, Error> {
        let builder = |name| Builder::new(name, self.target, BlockLister::THREADS);
        build(self.name(), None, builder, |k| self.write(k))
    }

    fn write(&self, k: &mut Builder) {
        wait_for_earlier_grids(k);
        let found = BlockStateTable::parameters(k);
        let lists = BlockLists::parameters(k);
        let [own_heads, count] = [Number::ListHeads, Number::AllLists].map(|it| it.read(k));
        let thread = k.thread_index();
        let (lane, warp) = (k.lane(), k.eval(thread / 32));
        let index = k.block_index();
        let index = k.eval(index * WARPS + warp);
        k.if_(index.less(count), |k| self.write_list(k, &found, &lists, own_heads, index, lane));
    }

    fn write_list(
        &self,
        k: &mut Builder,
        found: &BlockStateTable,
        lists: &BlockLists,
        own_heads: Reg<U32>,
        index: Reg<U32>,
        lane: Reg<U32>,
    ) {
        // Lists per head, and the most entries of a list.
        let (of_head, most) = match self.lists {
            ListsOf::Queries => (found.tiles, found.blocks),
            ListsOf::Keys { .. } => (found.blocks, found.tiles),
        };
        let [own, rest] = [k.eval(index % of_head), k.eval(index / of_head)];
        let [head, sequence] = [k.eval(rest % own_heads), k.eval(rest / own_heads)];
        let list = lists.of(k, [sequence, head, own]);
        let list = k.eval(list);
        let table = k.eval(rest * found.tiles * found.blocks);
        let zero = k.eval::<U32>(0);
        // The turn of an entry is this many words behind it.
        let turns_after = k.eval((lists.words() - 1) / 2);
        let (entries, evaluated) = (k.variable::<U32>(0), k.variable::<U32>(0));
        k.for_range(zero, most, 32, |k, from| {
            let other = k.eval(from + lane);
            let [tile, block] = match self.lists {
                ListsOf::Queries => [own, other],
                ListsOf::Keys { .. } => [other, own],
            };
            let row = k.eval(table + tile * found.blocks);
            let state = k.variable::<U32>(NONE);
            k.if_(other.less(most), |k| {
                let at = found.at(k, row + block);
                let seen = k.load::<U32, _>(at);
                k.set(state, seen);
            });
            let seen = k.ballot(state.differs(NONE));
            let one = k.eval::<U32>(1);
            let before = k.eval(seen & ((one << lane) - 1));
            let before = k.population_count(before);
            let at = k.eval(entries + before + 1);
            k.if_(state.differs(NONE), |k| {
                let entry = k.eval(other * 2 + state.equals(SOME).select::<U32>(1u32, 0u32));
                k.store(list + at.convert::<U64>() * 4, entry);
                if self.lists == (ListsOf::Keys { turns: true }) {
                    let turn = earlier(k, found, row, block);
                    let at = k.eval(at + turns_after);
                    k.store(list + at.convert::<U64>() * 4, turn);
                }
            });
            let all = k.population_count(seen);
            k.set(entries, entries + all);
            let partly = k.count_lanes(state.equals(SOME));
            k.set(evaluated, evaluated + partly);
        });
        k.if_(lane.equals(0), |k| {
            k.store(list, entries);
            // Kernels that always walk at least one block find block 0 here, with the function that
            // hides it.
            k.if_(entries.equals(0), |k| k.store::<U32, _>(list + 4u64, 1u32));
            if self.lists == ListsOf::Queries {
                let blocks = entries.maximum(1) * BLOCK as u32;
                let cost = k.eval(blocks + evaluated * EVALUATION as u32 + OVERHEAD as u32);
                let at = found.at(k, found.pairs + index);
                k.store(at, cost);
            }
        });
    }
}

/// Returns the turn of a block in a tile: how many key blocks before it the tile sees.
fn earlier(k: &mut Builder, found: &BlockStateTable, row: Reg<U32>, block: Reg<U32>) -> Reg<U32> {
    let count = k.variable::<U32>(0);
    k.for_range(0, block, 1, |k, block| {
        let at = found.at(k, row + block);
        let state = k.load::<U32, _>(at);
        k.set(count, count + state.differs(NONE).select::<U32>(1u32, 0u32));
    });
    count
}
