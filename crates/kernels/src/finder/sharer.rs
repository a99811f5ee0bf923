//! Shares tiles of unequal length out over the blocks of the forward kernel, on the device: where a
//! [`BlockFinder`](super::BlockFinder) found the key blocks of each.
//!
//! One block of threads counts tiles by how many key blocks they have, and a scan says where each
//! count begins among all, the longest first. They are given out there and back again: the longest to
//! the first block, and when all blocks have one the next to the last. What comes out are
//! [`TileLists`](crate::forward::TileLists).

use ptx::{Builder, Choose, Expression, Program, Reg, Target, U32, U64};

use crate::Error;
use crate::attention::function::blocks::{self, BlockLists};
use crate::attention::sequences::inclusive_sum;
use crate::forward::TileLists;
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

impl TileSharer {
    /// Threads of the one block.
    pub const THREADS: u32 = THREADS;

    /// The name of this configuration.
    pub fn name(&self) -> String {
        format!("tile_sharer_{}", self.target)
    }

    /// The words of lists for so many blocks and tiles.
    pub fn words(blocks: u32, tiles: u32) -> u64 {
        let blocks = u64::from(blocks.max(1));
        blocks * (2 + u64::from(tiles).div_ceil(blocks))
    }

    /// Builds the kernel.
    ///
    /// The grid is one block. Parameters by name: the lists of key blocks and how they lie; where the
    /// lists of tiles go; tiles in all and of a head, query heads, and blocks that share them.
    pub fn program(&self) -> Result<Program, Error> {
        let mut k = Builder::new(self.name(), self.target, THREADS).blocks_per_multiprocessor(1);
        write(&mut k);
        Ok(k.finish()?)
    }
}

fn write(k: &mut Builder) {
    let lists = BlockLists::parameters(k);
    let shares = Workspace::TileLists.address(k);
    let [tiles, per_head, heads, blocks] =
        [Number::Tiles, Number::TilesPerHead, Number::QueryHeads, Number::SharingBlocks]
            .map(|it| it.read(k));
    let sums = Words::new(k, "sums of warps", WARPS);
    let kinds = Words::new(k, "kinds of cost", THREADS);

    let thread = k.thread_index();
    let (lane, warp) = (k.lane(), k.eval(thread / 32));
    // No tile has more blocks than its list has room for.
    let step = k.eval(lists.words() / THREADS + 1);
    let kind_of = |k: &mut Builder, tile: Reg<U32>| {
        let [row_tile, of_all] = [k.eval(tile % per_head), k.eval(tile / per_head)];
        let [head, batch] = [k.eval(of_all % heads), k.eval(of_all / heads)];
        let list = lists.of(k, [batch, head, row_tile]);
        let list = k.eval(list);
        let count = blocks::count(k, list);
        let kind = (count / step).minimum(THREADS - 1);
        k.eval(ptx::Value::<U32>::from(THREADS - 1) - kind)
    };
    kinds.set(k, thread, 0);
    k.block_sync();
    k.for_range(thread, tiles, THREADS, |k, tile| {
        let kind = kind_of(k, tile);
        kinds.add(k, kind, 1);
    });
    k.block_sync();

    // Where each kind begins: a scan in each warp, and one over the warps.
    let mine = kinds.get(k, thread);
    let through = inclusive_sum(k, mine, lane);
    k.if_(lane.equals(31), |k| sums.set(k, warp, through));
    k.block_sync();
    let sum = sums.get(k, lane);
    let through_warps = inclusive_sum(k, sum, lane);
    let earlier = k.eval((warp + 31) % 32);
    let earlier = k.shuffle_index(through_warps, earlier);
    let earlier = k.eval(warp.equals(0).choose::<U32>(0, earlier));
    kinds.set(k, thread, earlier + through - mine);
    k.block_sync();

    let room = k.eval((tiles + (blocks - 1)) / blocks + 1);
    let store = |k: &mut Builder, at: Reg<U32>, word: Reg<U32>| {
        k.store(shares + at.convert::<U64>() * 4, word);
    };
    // There in even rounds, back in odd ones.
    let turned = |k: &mut Builder, round: Reg<U32>, place: Reg<U32>| {
        k.eval((round & 1).equals(0).choose::<U32>(place, blocks - 1 - place))
    };
    k.for_range(thread, tiles, THREADS, |k, tile| {
        let kind = kind_of(k, tile);
        let number = kinds.add(k, kind, 1);
        let [round, place] = [k.eval(number / blocks), k.eval(number % blocks)];
        let block = turned(k, round, place);
        let at = k.eval(blocks + block * room + round);
        store(k, at, tile);
    });
    k.for_range(thread, blocks, THREADS, |k, block| {
        let start = k.eval(blocks + block * room);
        store(k, block, start);
        let (rounds, rest) = (k.eval(tiles / blocks), k.eval(tiles % blocks));
        let place = turned(k, rounds, block);
        let more = place.less(rest).choose::<U32>(1u32, 0u32);
        let at = k.eval(start + rounds + more);
        let end = k.eval::<U32>(TileLists::END);
        store(k, at, end);
    });
}
