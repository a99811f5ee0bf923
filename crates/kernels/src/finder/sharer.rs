//! Distributes tiles of unequal cost over the blocks of the forward kernel, on the device, after a
//! [`BlockFinder`](super::BlockFinder) and a lister have found the key blocks of each tile.
//!
//! The kernel is one thread block, with four threads for each block of the forward kernel. Heads
//! come in groups whose keys fit in L2. The tiles of a group are sorted by cost, the most expensive
//! first (a counting sort: a histogram of costs and a prefix sum). Then they are distributed in
//! rounds: each round gives the next tiles to that half of the blocks with the least work, the most
//! expensive tile to the block with the least. The result is [`TileLists`].

use ptx::{
    Builder, Expression, GlobalAddress, Pred, Program, Reg, Select, Target, U32, U64, Value,
};

use super::BlockStateTable;
use crate::attention::function::lists::BlockLists;
use crate::attention::sequences::inclusive_sum;
use crate::dependent_launch::wait_for_earlier_grids;
use crate::forward::TileLists;
use crate::forward::lists::{BLOCK, EVALUATION, OVERHEAD};
use crate::parameter::{Number, Workspace};
use crate::sequencer::Words;
use crate::{Error, build, resident_blocks};

/// The configuration of the sharer kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileSharer {
    /// The target architecture.
    pub target: Target,
}

/// Threads of the block, which is also the number of bins that costs are sorted into.
const THREADS: u32 = 1024;
const WARPS: u32 = THREADS / 32;
/// Threads for each block of the forward kernel.
const PARTS: u32 = 4;
/// The most blocks of the forward kernel.
const MOST_BLOCKS: u32 = THREADS / PARTS;
/// The most groups of heads.
const MOST_GROUPS: u32 = 32;

/// The problem that a launch of the sharer solves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharerProblem {
    /// Number of tiles, over all heads and sequences.
    pub tiles: u32,
    /// Number of heads, over all sequences.
    pub heads: u32,
    /// Number of blocks of the forward kernel.
    pub blocks: u32,
    /// Heads per group, and the first head of the last group.
    pub groups: [u32; 2],
}

impl SharerProblem {
    /// Returns `groups`, with groups large enough that there are at most [`MOST_GROUPS`].
    fn groups(&self) -> [u32; 2] {
        [self.groups[0].max(self.heads.div_ceil(MOST_GROUPS)).max(1), self.groups[1]]
    }

    /// Returns the words from the list of a block to that of the next: no block gets more than one
    /// tile of each round.
    fn list_stride(&self) -> u32 {
        self.tiles / half(self.blocks) + MOST_GROUPS + 2
    }

    /// Returns the words of the workspace: all lists, then the sorted tiles, each with its cost
    /// bin.
    pub fn words(&self) -> u64 {
        let lists = u64::from(self.blocks) * (1 + u64::from(self.list_stride()));
        lists + 2 * u64::from(self.tiles)
    }

    /// Returns the launch parameters.
    pub fn numbers(&self) -> [(Number, u32); 5] {
        let [together, last] = self.groups();
        [
            (Number::AllHeads, self.heads),
            (Number::SharingBlocks, self.blocks),
            (Number::HeadsPerGroup, together),
            (Number::LastHeads, last),
            (Number::ListRoom, self.list_stride()),
        ]
    }
}

/// Returns the tiles of a round.
fn half(blocks: u32) -> u32 {
    blocks.div_ceil(2).max(1)
}

impl TileSharer {
    /// The most blocks of the forward kernel that tiles can be distributed over.
    pub const MOST_BLOCKS: u32 = MOST_BLOCKS;

    /// Returns the name of this configuration.
    pub fn name(&self) -> String {
        format!("tile_sharer_{}", self.target)
    }

    /// Builds the kernel.
    ///
    /// The grid is one block. Parameters by name: the finder's table and the layout of the lists of
    /// key blocks; the address of the lists of tiles; tiles per head, query heads, and the numbers
    /// of [`SharerProblem`].
    pub fn program(&self) -> Result<Program, Error> {
        let builder = |name| resident_blocks(name, self.target, THREADS, 1);
        build(self.name(), None, builder, write)
    }
}

/// The parameters, shared memory and per-thread state of the kernel.
struct Sharing {
    found: BlockStateTable,
    lists: BlockLists,
    shares: Reg<GlobalAddress>,
    per_head: Reg<U32>,
    heads: Reg<U32>,
    blocks: Reg<U32>,
    /// Words from the list of a block to that of the next.
    list_stride: Reg<U32>,
    /// For each cost bin, its number of tiles, and after the scan the place of its next tile.
    bins: Words,
    sums: Words,
    /// Sort key of each forward block: its load, with the block's index in the low 8 bits.
    keys: Words,
    /// The tiles of a round, and their cost bins.
    round_tiles: [Words; 2],
    thread: Reg<U32>,
    lane: Reg<U32>,
    warp: Reg<U32>,
    /// The forward block that this thread works for, and the thread's index among the four.
    block: Reg<U32>,
    part: Reg<U32>,
    /// Width of a cost bin.
    step: Reg<U32>,
    /// Load of this thread's forward block, in cost bins, and how many tiles it has.
    load: Reg<U32>,
    taken: Reg<U32>,
}

fn write(k: &mut Builder) {
    wait_for_earlier_grids(k);
    let found = BlockStateTable::parameters(k);
    let shares = Workspace::TileLists.address(k);
    let [per_head, heads, all_heads, blocks, together, last_group_start, list_stride] = [
        Number::TilesPerHead,
        Number::QueryHeads,
        Number::AllHeads,
        Number::SharingBlocks,
        Number::HeadsPerGroup,
        Number::LastHeads,
        Number::ListRoom,
    ]
    .map(|it| it.read(k));
    let thread = k.thread_index();
    let (lane, warp) = (k.lane(), k.eval(thread / 32));
    let most = found.blocks * (BLOCK + EVALUATION) as u32 + OVERHEAD as u32;
    let sharing = Sharing {
        found,
        lists: BlockLists::parameters(k),
        shares,
        per_head,
        heads,
        blocks,
        list_stride,
        bins: Words::new(k, "kinds of cost", THREADS),
        sums: Words::new(k, "sums of warps", WARPS),
        keys: Words::new(k, "keys of blocks", MOST_BLOCKS),
        round_tiles: ["tiles of a round", "their kinds"].map(|it| Words::new(k, it, MOST_BLOCKS)),
        thread,
        lane,
        warp,
        block: k.eval(thread / PARTS),
        part: k.eval(thread % PARTS),
        // No tile costs more than all key blocks, each evaluated.
        step: k.eval(most / THREADS + 1),
        load: k.variable(0),
        taken: k.variable(0),
    };
    // The barriers of `sort` come before the first use of these keys.
    k.if_(thread.less(MOST_BLOCKS), |k| sharing.keys.set(k, thread, u32::MAX));
    let groups = k.eval((last_group_start + (together - 1)) / together);
    k.for_range(0, groups + 1, 1, |k, group| {
        let first = k.eval(group * together);
        let end = group.equals(groups).select::<U32>(all_heads, first + together);
        let end = k.eval(end.minimum(all_heads));
        let tiles = [k.eval(first * per_head), k.eval(end * per_head)];
        sharing.sort(k, tiles);
        sharing.distribute(k, tiles);
    });
    k.if_(sharing.leads(), |k| {
        let start = sharing.start(k);
        let end = k.eval(start + sharing.taken);
        sharing.store(k, sharing.block, start);
        let word = k.eval::<U32>(TileLists::END);
        sharing.store(k, end, word);
    });
}

impl Sharing {
    fn at(&self, k: &mut Builder, word: impl Into<Value<U32>>) -> Reg<GlobalAddress> {
        let word = k.eval(word);
        k.eval(self.shares + word.convert::<U64>() * 4)
    }

    fn store(&self, k: &mut Builder, word: impl Into<Value<U32>>, value: Reg<U32>) {
        let at = self.at(k, word);
        k.store(at, value);
    }

    /// Returns the word at which the list of this thread's block begins.
    fn start(&self, k: &mut Builder) -> Reg<U32> {
        k.eval(self.blocks + self.block * self.list_stride)
    }

    /// Returns the word of the tile with this rank in the sorted order. The next word is its cost
    /// bin.
    fn sorted(&self, number: Reg<U32>) -> Value<U32> {
        self.blocks + self.blocks * self.list_stride + number * 2
    }

    /// Returns the cost bin of a tile.
    fn bin(&self, k: &mut Builder, tile: Reg<U32>) -> Reg<U32> {
        let [row_tile, of_all] = [k.eval(tile % self.per_head), k.eval(tile / self.per_head)];
        let [head, batch] = [k.eval(of_all % self.heads), k.eval(of_all / self.heads)];
        let list = self.lists.before([batch, head, row_tile]);
        let at = self.found.at(k, self.found.pairs + list);
        let cost = k.load::<U32, _>(at);
        k.eval((cost / self.step).minimum(THREADS - 1))
    }

    /// Sorts the tiles of a group, the most expensive first. The first barrier of `distribute` must
    /// follow before the sorted tiles are read.
    fn sort(&self, k: &mut Builder, [begin, end]: [Reg<U32>; 2]) {
        let Sharing { bins, sums, thread, lane, warp, .. } = self;
        let place = |bin: Reg<U32>| Value::<U32>::from(THREADS - 1) - bin;
        bins.set(k, *thread, 0);
        k.block_sync();
        k.for_range(begin + *thread, end, THREADS, |k, tile| {
            let bin = self.bin(k, tile);
            let place = k.eval(place(bin));
            bins.add(k, place, 1);
        });
        k.block_sync();
        // Where each bin begins: a prefix sum in each warp, and one over the warps.
        let mine = bins.get(k, *thread);
        let through = inclusive_sum(k, mine);
        k.if_(lane.equals(31), |k| sums.set(k, *warp, through));
        k.block_sync();
        let sum = sums.get(k, *lane);
        let through_warps = inclusive_sum(k, sum);
        let earlier = k.eval((*warp + 31) % 32);
        let earlier = k.shuffle_index(through_warps, earlier);
        let earlier = k.eval(warp.equals(0).select::<U32>(0, earlier));
        bins.set(k, *thread, earlier + through - mine);
        k.block_sync();
        k.for_range(begin + *thread, end, THREADS, |k, tile| {
            let bin = self.bin(k, tile);
            let place = k.eval(place(bin));
            let number = bins.add(k, place, 1);
            let at = k.eval(self.sorted(number));
            self.store(k, at, tile);
            self.store(k, at + 1, bin);
        });
    }

    /// Distributes the sorted tiles of a group over the forward blocks, in rounds.
    fn distribute(&self, k: &mut Builder, [begin, end]: [Reg<U32>; 2]) {
        let Sharing { thread, load, taken, blocks, .. } = self;
        let tiles = k.eval(end - begin);
        let of_round = k.eval((*blocks + 1) / 2);
        k.for_range(0, tiles, of_round, |k, first| {
            // The block's index makes all keys distinct.
            k.if_(self.leads(), |k| self.keys.set(k, self.block, (*load << 8) | self.block));
            k.block_sync();
            // Loads the tiles of the round, whose latency the ranking hides.
            let (tile, bin) = (k.variable::<U32>(0), k.variable::<U32>(0));
            let number = k.eval(first + *thread);
            let brings = k.eval(thread.less(of_round) & number.less(tiles));
            k.if_(brings, |k| {
                let at = k.eval(self.sorted(number));
                for (word, to) in [tile, bin].into_iter().enumerate() {
                    let at = self.at(k, at + word as u32);
                    let value = k.load::<U32, _>(at);
                    k.set(to, value);
                }
            });
            let rank = self.rank(k);
            k.if_(brings, |k| {
                self.round_tiles[0].set(k, *thread, tile);
                self.round_tiles[1].set(k, *thread, bin);
            });
            k.block_sync();
            k.if_(self.leads() & rank.less(of_round) & (first + rank).less(tiles), |k| {
                let [tile, bin] = self.round_tiles.each_ref().map(|it| it.get(k, rank));
                let start = self.start(k);
                self.store(k, start + *taken, tile);
                k.set(*taken, *taken + 1);
                k.set(*load, *load + bin + 1);
            });
        });
    }

    /// Returns whether this thread keeps the list of its forward block.
    fn leads(&self) -> Value<Pred> {
        self.part.equals(0) & self.block.less(self.blocks)
    }

    /// Returns how many forward blocks have less work than this thread's. The four threads of a
    /// block share the comparisons, four keys at a time; keys behind the last block's are larger
    /// than any.
    fn rank(&self, k: &mut Builder) -> Reg<U32> {
        let mine = self.keys.get(k, self.block);
        let rank = k.variable::<U32>(0);
        k.for_range(self.part * 4, self.blocks, 4 * PARTS, |k, others| {
            let at = self.keys.address(k, others);
            for key in k.load_vector::<U32, _, 4>(at, Default::default()) {
                k.set(rank, rank + key.less(mine).select::<U32>(1u32, 0u32));
            }
        });
        for distance in [1, 2] {
            let other = k.shuffle_butterfly(rank, distance);
            k.set(rank, rank + other);
        }
        rank
    }
}
