//! Shares tiles of unequal length out over the blocks of the forward kernel, on the device: where a
//! [`BlockFinder`](super::BlockFinder) found the key blocks of each.
//!
//! One block of threads, four for each block of the kernel. Heads come in groups, whose keys the second-level
//! cache holds. The tiles of a group are counted by what they cost, and a scan says where each cost
//! begins among all, the longest first. Then they are given out in rounds: the next tiles to that half
//! of the blocks which has the least to do, the longest to whoever has the least. What comes out are
//! [`TileLists`].

use ptx::{
    Builder, Choose, Expression, GlobalAddress, Pred, Program, Reg, Target, U32, U64, Value,
};

use super::Found;
use crate::Error;
use crate::attention::function::blocks::BlockLists;
use crate::attention::sequences::inclusive_sum;
use crate::forward::TileLists;
use crate::forward::lists::{BLOCK, EVALUATION, OVERHEAD};
use crate::parameter::{Number, Workspace};
use crate::sequencer::Words;

/// What the kernel is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileSharer {
    /// The architecture.
    pub target: Target,
}

/// Threads, and kinds of cost that are told apart.
const THREADS: u32 = 1024;
const WARPS: u32 = THREADS / 32;
/// Threads of a block that tiles are given to.
const PARTS: u32 = 4;
/// The most such blocks.
const MOST_BLOCKS: u32 = THREADS / PARTS;
/// The most groups of heads.
const MOST_GROUPS: u32 = 32;

/// What is shared out, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Tiles in all.
    pub tiles: u32,
    /// Heads over all sequences.
    pub heads: u32,
    /// Blocks that share them.
    pub blocks: u32,
    /// Heads of a group, and the first head of the last group.
    pub groups: [u32; 2],
}

impl Shared {
    /// With groups that are large enough.
    fn groups(&self) -> [u32; 2] {
        [self.groups[0].max(self.heads.div_ceil(MOST_GROUPS)).max(1), self.groups[1]]
    }

    /// Words from the list of a block to that of the next: no block has more than a tile of each round.
    fn room(&self) -> u32 {
        self.tiles / half(self.blocks) + MOST_GROUPS + 2
    }

    /// The words of all lists, and of the tiles in order, each with its cost.
    pub fn words(&self) -> u64 {
        let lists = u64::from(self.blocks) * (1 + u64::from(self.room()));
        lists + 2 * u64::from(self.tiles)
    }

    /// What the kernel is told of it.
    pub fn numbers(&self) -> [(Number, u32); 5] {
        let [together, last] = self.groups();
        [
            (Number::AllHeads, self.heads),
            (Number::SharingBlocks, self.blocks),
            (Number::HeadsPerGroup, together),
            (Number::LastHeads, last),
            (Number::ListRoom, self.room()),
        ]
    }
}

/// Tiles of a round.
fn half(blocks: u32) -> u32 {
    blocks.div_ceil(2).max(1)
}

impl TileSharer {
    /// Threads of the one block.
    pub const THREADS: u32 = THREADS;
    /// The most blocks that tiles are given to.
    pub const MOST_BLOCKS: u32 = MOST_BLOCKS;

    /// The name of this configuration.
    pub fn name(&self) -> String {
        format!("tile_sharer_{}", self.target)
    }

    /// Builds the kernel.
    ///
    /// The grid is one block. Parameters by name: what the finder
    /// left, and how the lists of key blocks lie; where the lists of tiles go; tiles of a head,
    /// query heads, and what [`Shared`] says.
    pub fn program(&self) -> Result<Program, Error> {
        let mut k = Builder::new(self.name(), self.target, THREADS).blocks_per_multiprocessor(1);
        write(&mut k);
        Ok(k.finish()?)
    }
}

/// What all parts of the kernel know.
struct Sharing {
    found: Found,
    lists: BlockLists,
    shares: Reg<GlobalAddress>,
    per_head: Reg<U32>,
    heads: Reg<U32>,
    blocks: Reg<U32>,
    /// Words from the list of a block to that of the next.
    room: Reg<U32>,
    /// What there is of each kind of cost, and then where the kind goes on.
    kinds: Words,
    sums: Words,
    /// What each block has to do, and below that which it is.
    keys: Words,
    /// The tiles of a round, and their kinds.
    dealt: [Words; 2],
    thread: Reg<U32>,
    lane: Reg<U32>,
    warp: Reg<U32>,
    /// This thread's block, and which of its threads this is.
    block: Reg<U32>,
    part: Reg<U32>,
    /// What a step of costs is.
    step: Reg<U32>,
    /// What this thread's block has to do, in such steps, and how many tiles that are.
    load: Reg<U32>,
    taken: Reg<U32>,
}

fn write(k: &mut Builder) {
    let found = Found::parameters(k);
    let shares = Workspace::TileLists.address(k);
    let [per_head, heads, all_heads, blocks, together, last_heads, room] = [
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
        room,
        kinds: Words::new(k, "kinds of cost", THREADS),
        sums: Words::new(k, "sums of warps", WARPS),
        keys: Words::new(k, "keys of blocks", MOST_BLOCKS),
        dealt: ["tiles of a round", "their kinds"].map(|it| Words::new(k, it, MOST_BLOCKS)),
        thread,
        lane,
        warp,
        block: k.eval(thread / PARTS),
        part: k.eval(thread % PARTS),
        // No tile has more blocks than there are.
        step: k.eval(most / THREADS + 1),
        load: k.variable(0),
        taken: k.variable(0),
    };
    // Threads meet before the first of these is used: in sorting.
    k.if_(thread.less(MOST_BLOCKS), |k| sharing.keys.set(k, thread, u32::MAX));
    let groups = k.eval((last_heads + (together - 1)) / together);
    k.for_range(0, groups + 1, 1, |k, group| {
        let first = k.eval(group * together);
        let end = group.equals(groups).choose::<U32>(all_heads, first + together);
        let end = k.eval(end.minimum(all_heads));
        let tiles = [k.eval(first * per_head), k.eval(end * per_head)];
        sharing.sort(k, tiles);
        sharing.give_out(k, tiles);
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

    /// The word that the list of this thread's block begins at.
    fn start(&self, k: &mut Builder) -> Reg<U32> {
        k.eval(self.blocks + self.block * self.room)
    }

    /// The word at which a tile is, of those in order. Its kind is in the next.
    fn sorted(&self, number: Reg<U32>) -> Value<U32> {
        self.blocks + self.blocks * self.room + number * 2
    }

    /// What a tile costs, in steps that make no more kinds than there are threads.
    fn kind(&self, k: &mut Builder, tile: Reg<U32>) -> Reg<U32> {
        let [row_tile, of_all] = [k.eval(tile % self.per_head), k.eval(tile / self.per_head)];
        let [head, batch] = [k.eval(of_all % self.heads), k.eval(of_all / self.heads)];
        let list = self.lists.before([batch, head, row_tile]);
        let at = self.found.at(k, self.found.pairs + list);
        let cost = k.load::<U32, _>(at);
        k.eval((cost / self.step).minimum(THREADS - 1))
    }

    /// Puts the tiles of a group in order, the longest first. Threads meet before they are given out.
    fn sort(&self, k: &mut Builder, [begin, end]: [Reg<U32>; 2]) {
        let Sharing { kinds, sums, thread, lane, warp, .. } = self;
        let place = |kind: Reg<U32>| Value::<U32>::from(THREADS - 1) - kind;
        kinds.set(k, *thread, 0);
        k.block_sync();
        k.for_range(begin + *thread, end, THREADS, |k, tile| {
            let kind = self.kind(k, tile);
            let place = k.eval(place(kind));
            kinds.add(k, place, 1);
        });
        k.block_sync();
        // Where each kind begins: a scan in each warp, and one over the warps.
        let mine = kinds.get(k, *thread);
        let through = inclusive_sum(k, mine, *lane);
        k.if_(lane.equals(31), |k| sums.set(k, *warp, through));
        k.block_sync();
        let sum = sums.get(k, *lane);
        let through_warps = inclusive_sum(k, sum, *lane);
        let earlier = k.eval((*warp + 31) % 32);
        let earlier = k.shuffle_index(through_warps, earlier);
        let earlier = k.eval(warp.equals(0).choose::<U32>(0, earlier));
        kinds.set(k, *thread, earlier + through - mine);
        k.block_sync();
        k.for_range(begin + *thread, end, THREADS, |k, tile| {
            let kind = self.kind(k, tile);
            let place = k.eval(place(kind));
            let number = kinds.add(k, place, 1);
            let at = k.eval(self.sorted(number));
            self.store(k, at, tile);
            self.store(k, at + 1, kind);
        });
    }

    /// Gives them out.
    fn give_out(&self, k: &mut Builder, [begin, end]: [Reg<U32>; 2]) {
        let Sharing { thread, load, taken, blocks, .. } = self;
        let tiles = k.eval(end - begin);
        let of_round = k.eval((*blocks + 1) / 2);
        k.for_range(0, tiles, of_round, |k, first| {
            // No two blocks have the same key.
            k.if_(self.leads(), |k| self.keys.set(k, self.block, (*load << 8) | self.block));
            k.block_sync();
            // The tiles of the round come while blocks are ranked.
            let (tile, kind) = (k.variable::<U32>(0), k.variable::<U32>(0));
            let number = k.eval(first + *thread);
            let brings = k.eval(thread.less(of_round) & number.less(tiles));
            k.if_(brings, |k| {
                let at = k.eval(self.sorted(number));
                for (word, to) in [tile, kind].into_iter().enumerate() {
                    let at = self.at(k, at + word as u32);
                    let value = k.load::<U32, _>(at);
                    k.set(to, value);
                }
            });
            let rank = self.rank(k);
            k.if_(brings, |k| {
                self.dealt[0].set(k, *thread, tile);
                self.dealt[1].set(k, *thread, kind);
            });
            k.block_sync();
            k.if_(self.leads() & rank.less(of_round) & (first + rank).less(tiles), |k| {
                let [tile, kind] = self.dealt.each_ref().map(|it| it.get(k, rank));
                let start = self.start(k);
                self.store(k, start + *taken, tile);
                k.set(*taken, *taken + 1);
                k.set(*load, *load + kind + 1);
            });
        });
    }

    /// Whether this thread keeps what its block has.
    fn leads(&self) -> Value<Pred> {
        self.part.equals(0) & self.block.less(self.blocks)
    }

    /// How many blocks have less to do than this thread's. Threads of a block share the others among them, four words
    /// at a time; behind the last block are keys that are larger than any.
    fn rank(&self, k: &mut Builder) -> Reg<U32> {
        let mine = self.keys.get(k, self.block);
        let rank = k.variable::<U32>(0);
        k.for_range(self.part * 4, self.blocks, 4 * PARTS, |k, others| {
            let at = self.keys.address(k, others);
            for key in k.load_vector::<U32, _, 4>(at, Default::default()) {
                k.set(rank, rank + key.less(mine).choose::<U32>(1u32, 0u32));
            }
        });
        for distance in [1, 2] {
            let other = k.shuffle_butterfly(rank, distance);
            k.set(rank, rank + other);
        }
        rank
    }
}
