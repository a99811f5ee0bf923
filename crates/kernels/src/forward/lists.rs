//! Tile lists, one for each thread block: tiles of unequal length, distributed evenly on the host.
//!
//! With a mask tiles differ in length. They are distributed in one of two ways, each of which was
//! measured to be the faster one for some problems:
//!
//! - *Pairs*: the longest tile of a head goes with its shortest, the next longest with the next
//!   shortest, and so on. All pairs are the same amount of work, and thread blocks take pairs in
//!   turn. Both tiles of a pair read the same keys and values. The pairs that do not fill a last
//!   wave are distributed tile by tile, longest first; so are those of one or two more waves, where
//!   that lowers the load of the busiest thread block.
//! - *Longest first*: each tile goes to the thread block with the least work so far. Heads are
//!   distributed in groups that fill the GPU; or the last ones all together; or with the short
//!   tiles of all heads at the very end; whichever gives the busiest thread block the least work.
//!   This is best where one head alone nearly fills the GPU, and for windows and chunks, whose
//!   pairs are not equal work.
//!
//! Without a mask all tiles are alike. Lists are then used only with stream-K, to split the last
//! wave along the keys (`stream_k`).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use super::Forward;
use crate::attention::Window;
use crate::attention::function::{BlockCount, BlockCounts};

/// The tiles that each thread block computes, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileLists {
    /// Thread blocks of the grid.
    pub blocks: u32,
    /// What the kernel reads: for each thread block, the index of the word at which its list
    /// begins; then the lists of tile numbers (row tiles fastest, then heads, then batch), each
    /// ended by [`TileLists::END`]; with stream-K, then the descriptions of parts of tiles.
    pub words: Vec<u32>,
    /// With stream-K, the number of partial tiles that the workspace must have room for.
    pub places: u32,
}

/// The cost of a key block. The other costs are in the same unit, a quarter of a key block.
pub(crate) const BLOCK: u64 = 4;
/// The cost of a tile beyond its key blocks: the first scores, which nothing overlaps, and the
/// epilogue.
pub(crate) const OVERHEAD: u64 = 2 * BLOCK;
/// The cost of evaluating a mask function over a key block. Inferred, not timed by itself: 1.2 to
/// 1.4 key blocks explain the times of two problems with document masks on an H200.
pub(crate) const EVALUATION: u64 = 5;

/// The work of the last group of heads, for each thread block, in units of the longest tile.
const LAST_GROUP_TILES: u64 = 2;
/// Full waves of pairs that, in addition to the incomplete one, may be distributed longest first.
const WAVES_TRIED: u64 = 2;
/// Shorter tiles are held back to the end only if they are less than one part in this many of the
/// work.
const FEW_SHORTER: u64 = 8;

impl TileLists {
    /// The word that ends a list.
    pub const END: u32 = u32::MAX;

    /// Distributes the tiles of a problem over at most `processors` thread blocks. A tile costs
    /// what its rows see through `window`; with a mask function, `seen` has the key blocks of each
    /// tile instead. `cache_bytes` is the part of L2 to count on.
    pub fn new(
        forward: &Forward,
        window: &Window,
        seen: Option<&BlockCounts>,
        lengths: [u32; 2],
        heads: [u32; 3],
        processors: u32,
        cache_bytes: u64,
    ) -> Self {
        let tiles = Tiles::new(forward, window, seen, lengths, heads, processors, cache_bytes);
        let count = u64::from(tiles.row_tiles) * tiles.heads;
        if forward.stream_k {
            return TileLists::stream_k(forward, count as u32, lengths[1], processors);
        }
        let blocks = u64::from(processors).min(count).max(1) as u32;
        let even = tiles.have_even_pairs();
        let shares = if even && tiles.row_tiles < forward.longest_first_from() {
            tiles.in_pairs(blocks)
        } else {
            tiles.longest_first(blocks, even)
        };
        let mut words: Vec<u32> = Vec::new();
        let mut start = blocks;
        for list in &shares.lists {
            words.push(start);
            start += list.len() as u32 + 1;
        }
        for list in shares.lists {
            words.extend(list);
            words.push(TileLists::END);
        }
        TileLists { blocks, words, places: 0 }
    }

    /// Returns how heads are grouped where the device distributes the tiles
    /// ([`TileSharer`](crate::TileSharer)), because the host does not know what they cost: the
    /// number of heads per group, and the first head of the last group. Costs are estimated from
    /// the window alone.
    pub fn groups(
        forward: &Forward,
        window: &Window,
        lengths: [u32; 2],
        heads: [u32; 3],
        processors: u32,
        cache_bytes: u64,
    ) -> [u32; 2] {
        let tiles = Tiles::new(forward, window, None, lengths, heads, processors, cache_bytes);
        [tiles.together, tiles.last_group_start(processors)].map(|it| it as u32)
    }
}

/// The tiles of a problem, and what they cost.
struct Tiles<'a> {
    forward: &'a Forward,
    window: &'a Window,
    seen: Option<&'a BlockCounts>,
    lengths: [u32; 2],
    /// Tiles of a head.
    row_tiles: u32,
    /// Query heads over all sequences.
    heads: u64,
    /// Heads whose tiles are distributed together.
    together: u64,
}

impl<'a> Tiles<'a> {
    fn new(
        forward: &'a Forward,
        window: &'a Window,
        seen: Option<&'a BlockCounts>,
        lengths: [u32; 2],
        [heads, key_heads, batch]: [u32; 3],
        processors: u32,
        cache_bytes: u64,
    ) -> Self {
        let row_tiles = lengths[0].div_ceil(forward.query_rows());
        let group_size = u64::from((heads / key_heads.max(1)).max(1));
        let together =
            forward.heads_together(row_tiles, lengths[1], group_size, processors, cache_bytes);
        let heads = u64::from(heads) * u64::from(batch);
        Tiles { forward, window, seen, lengths, row_tiles, heads, together }
    }

    fn cost(&self, head: u64, row_tile: u32) -> u64 {
        match self.seen {
            None => self.forward.key_blocks(self.window, row_tile, self.lengths) * BLOCK + OVERHEAD,
            Some(seen) => seen.of_head(head)[row_tile as usize].cost(),
        }
    }

    fn costs(&self, head: u64) -> Vec<u64> {
        (0..self.row_tiles).map(|row_tile| self.cost(head, row_tile)).collect()
    }

    /// Returns a tile's number and cost.
    fn tile(&self, head: u64, row_tile: u32) -> (u32, u64) {
        let number = (head * u64::from(self.row_tiles)) as u32 + row_tile;
        (number, self.cost(head, row_tile))
    }

    /// Returns whether the pairs of every head are the same work. Of the named masks only the
    /// causal one has even pairs; those of a mask function may be even too.
    fn have_even_pairs(&self) -> bool {
        match self.seen {
            None => !self.forward.rules.mask.is_window(),
            Some(_) => (0..self.heads).all(|head| pairs_are_even(&self.costs(head))),
        }
    }

    /// Returns the first head of the last group, which is larger than the others so that it has
    /// enough short tiles to balance its longest ones. With a mask function, tiles differ by more
    /// than the heads of a normal group can balance.
    fn last_group_start(&self, blocks: u32) -> u64 {
        let longest = (0..self.heads).flat_map(|head| self.costs(head)).max().unwrap_or(0);
        let mut left = LAST_GROUP_TILES * longest * u64::from(blocks);
        let fits = |head: &u64| {
            left = left.saturating_sub(self.costs(*head).iter().sum());
            left > 0
        };
        self.heads - (0..self.heads).rev().take_while(fits).count() as u64
    }

    /// Distributes the tiles longest first, in the best of a few ways.
    fn longest_first(&self, blocks: u32, even: bool) -> Shares {
        let last_group_start = self.last_group_start(blocks);
        let mut ways = vec![(last_group_start, 0)];
        if self.seen.is_none() {
            ways.insert(0, (self.heads, 0));
            if !even {
                let costs = self.costs(0);
                ways.extend(few_shorter(&costs).map(|held_back| (last_group_start, held_back)));
            }
        }
        let in_groups = |(last, held_back)| self.in_groups(blocks, last, held_back);
        Shares::best(ways.into_iter().map(in_groups))
    }

    /// Distributes the tiles group of heads after group, in each longest first. The heads from
    /// `last_group_start` on are one group. Tiles that cost less than `held_back` are distributed
    /// last, those of all heads together.
    fn in_groups(&self, blocks: u32, last_group_start: u64, held_back: u64) -> Shares {
        let tiles = |heads: Range<u64>| {
            let row_tiles = (0..self.row_tiles).rev();
            row_tiles.flat_map(move |it| heads.clone().map(move |head| self.tile(head, it)))
        };
        let mut shares = Shares::new(blocks);
        let mut first = 0;
        while first < self.heads {
            let end = if first < last_group_start { first + self.together } else { self.heads };
            let end = end.min(self.heads);
            let tiles = tiles(first..end).filter(|(_, cost)| *cost >= held_back);
            shares.give_longest_first(tiles.collect());
            first = end;
        }
        let held = tiles(0..self.heads).filter(|(_, cost)| *cost < held_back);
        shares.give_longest_first(held.collect());
        shares
    }

    /// Distributes the tiles in pairs, and the last pairs tile by tile: those of the incomplete
    /// wave, or also of a few waves before it.
    fn in_pairs(&self, blocks: u32) -> Shares {
        let (pairs_of_head, of_wave) = (self.row_tiles.div_ceil(2), u64::from(blocks));
        let pairs = u64::from(pairs_of_head) * self.heads;
        let pair = |pair: u64| {
            let head = pair / u64::from(pairs_of_head);
            let short = (pair % u64::from(pairs_of_head)) as u32;
            let long = self.row_tiles - 1 - short;
            // With an odd number of tiles, the middle one is alone.
            let both = [Some(long), (short != long).then_some(short)];
            both.into_iter().flatten().map(move |row_tile| self.tile(head, row_tile))
        };
        let in_turn = |shares: &mut Shares, pairs: Range<u64>| {
            for at in pairs {
                for (number, cost) in pair(at) {
                    shares.give_to((at % of_wave) as usize, number, cost);
                }
            }
        };
        let waves = pairs / of_wave;
        let kept = waves.saturating_sub(WAVES_TRIED);
        let mut common = Shares::new(blocks);
        in_turn(&mut common, 0..kept * of_wave);
        Shares::best((kept..=waves).rev().map(|waves| {
            let mut shares = common.clone();
            in_turn(&mut shares, kept * of_wave..waves * of_wave);
            let rest = (waves * of_wave..pairs).flat_map(&pair);
            shares.give_longest_first(rest.collect());
            shares
        }))
    }
}

impl BlockCount {
    /// Returns the cost of a tile that walks these key blocks.
    fn cost(&self) -> u64 {
        u64::from(self.blocks.max(1)) * BLOCK + u64::from(self.evaluated) * EVALUATION + OVERHEAD
    }
}

/// Returns cost bounds below which the tiles of a head are a small part of its work. Under a window
/// all tiles have the same length but for the first and the last of a head: distributed last, these
/// fill the gaps that the others leave. They find less in the cache then, so they must be few.
fn few_shorter(costs: &[u64]) -> impl Iterator<Item = u64> {
    let longest = costs.iter().copied().max().unwrap_or(0);
    let all: u64 = costs.iter().sum();
    [longest / 2, longest.saturating_sub(BLOCK)].into_iter().filter(move |bound| {
        let shorter: u64 = costs.iter().filter(|cost| *cost < bound).sum();
        shorter > 0 && shorter * FEW_SHORTER < all
    })
}

/// Returns whether tiles grow from the first to the last such that all pairs are the same work, but
/// for the rounding to whole key blocks.
fn pairs_are_even(costs: &[u64]) -> bool {
    let pairs = || (0..costs.len() / 2).map(|short| costs[short] + costs[costs.len() - 1 - short]);
    let (least, most) = (pairs().min().unwrap_or(u64::MAX), pairs().max().unwrap_or(0));
    costs.is_sorted() && most <= least.saturating_add(BLOCK + EVALUATION)
}

/// Thread blocks and the tiles they have been given.
#[derive(Clone)]
struct Shares {
    lists: Vec<Vec<u32>>,
    loads: Vec<u64>,
    /// Thread blocks by their load, the least first. Entries whose load differs from `loads` are
    /// out of date.
    free: BinaryHeap<Reverse<(u64, usize)>>,
}

impl Shares {
    fn new(blocks: u32) -> Self {
        Shares {
            lists: vec![Vec::new(); blocks as usize],
            loads: vec![0; blocks as usize],
            free: (0..blocks as usize).map(|block| Reverse((0, block))).collect(),
        }
    }

    /// Returns the first of several distributions, unless the largest load of another one is
    /// clearly smaller. Distributions that should have been 0.7 % faster were measured 0.5 % slower
    /// and 0.2 % faster; those that should have been 1 % faster or more were 0.6 to 1.5 % faster.
    fn best(mut ways: impl Iterator<Item = Shares>) -> Shares {
        let first = ways.next().expect("there is one way at least");
        let best = ways.min_by_key(Shares::most);
        best.filter(|best| best.most() * 125 < first.most() * 124).unwrap_or(first)
    }

    /// Returns the load of the busiest thread block.
    fn most(&self) -> u64 {
        self.loads.iter().copied().max().unwrap_or(0)
    }

    fn give_to(&mut self, block: usize, tile: u32, cost: u64) {
        self.lists[block].push(tile);
        self.loads[block] += cost;
        self.free.push(Reverse((self.loads[block], block)));
    }

    /// Gives tiles with their costs, the longest first, each to the thread block with the least
    /// load.
    fn give_longest_first(&mut self, mut tiles: Vec<(u32, u64)>) {
        tiles.sort_by_key(|(_, cost)| Reverse(*cost));
        for (tile, cost) in tiles {
            self.give(tile, cost);
        }
    }

    /// Gives a tile to the thread block with the least load.
    fn give(&mut self, tile: u32, cost: u64) {
        while let Some(Reverse((load, block))) = self.free.pop() {
            if load == self.loads[block] {
                return self.give_to(block, tile, cost);
            }
        }
    }
}

impl Forward {
    /// Returns the number of heads whose tiles are distributed together: enough to give every
    /// thread block a tile, as long as L2 holds their keys and values. Query heads that share a key
    /// head stay together.
    fn heads_together(
        &self,
        row_tiles: u32,
        key_length: u32,
        group_size: u64,
        processors: u32,
        cache_bytes: u64,
    ) -> u64 {
        let dims = u64::from(self.head_dim + self.value_head_dim);
        let head_bytes = u64::from(key_length) * dims * u64::from(self.element.bytes());
        let wanted = u64::from(processors).div_ceil(u64::from(row_tiles.max(1)));
        let held = cache_bytes / head_bytes.max(1) * group_size;
        wanted.min(held).max(1).next_multiple_of(group_size)
    }

    /// Returns the number of row tiles per head from which on tiles are distributed longest first.
    fn longest_first_from(&self) -> u32 {
        if self.warpgroups == 3 { 40 } else { 100 }
    }

    /// Returns the number of key blocks that a row tile needs.
    fn key_blocks(&self, window: &Window, row_tile: u32, [queries, keys]: [u32; 2]) -> u64 {
        let rows = i64::from(self.query_rows());
        let first_row = i64::from(row_tile) * rows;
        let offset = i64::from(keys) - i64::from(queries);
        let last_row = (first_row + rows).min(queries.into()) - 1;
        let seen = window.tile_keys(first_row + offset, last_row + offset, keys);
        let blocks = seen.end.div_ceil(self.key_block) - seen.start / self.key_block;
        u64::from(blocks.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Form;
    use super::*;
    use crate::attention::function::{BlockMask, Function, ListsOf};
    use crate::attention::{MaskKind, Rules};
    use crate::product::Source;

    fn forward(rules: Rules) -> Forward {
        Forward {
            element: ptx::Element::BF16,
            output: ptx::Element::BF16,
            head_dim: 64,
            value_head_dim: 64,
            rules,
            warpgroups: 3,
            key_block: 96,
            stages: 2,
            query_buffers: 2,
            query_source: Source::Shared,
            ping_pong: true,
            form: Form::FULL,
            stream_k: false,
        }
    }

    fn loads(
        lists: &TileLists,
        forward: &Forward,
        window: &Window,
        lengths: [u32; 2],
    ) -> (Vec<u64>, Vec<u32>) {
        let row_tiles = lengths[0].div_ceil(forward.query_rows());
        let mut tiles = Vec::new();
        let loads = (0..lists.blocks as usize)
            .map(|block| {
                let mut at = lists.words[block] as usize;
                let mut load = 0;
                while lists.words[at] != TileLists::END {
                    let tile = lists.words[at];
                    let row_tile = tile % row_tiles;
                    load += forward.key_blocks(window, row_tile, lengths) * BLOCK + OVERHEAD;
                    tiles.push(tile);
                    at += 1;
                }
                load
            })
            .collect();
        tiles.sort();
        (loads, tiles)
    }

    #[test]
    fn every_tile_is_in_one_list() {
        let (dense, causal) = (Window::DENSE, Window::CAUSAL);
        let chunked = Rules { mask: MaskKind::Chunked, ..Rules::LOCAL };
        for (rules, window, lengths, heads) in [
            (Rules::CAUSAL, causal, [16384, 16384], [32, 32, 1]),
            (Rules::CAUSAL, causal, [1000, 77], [6, 2, 3]),
            (Rules::DENSE, dense, [513, 700], [5, 5, 2]),
            (Rules::CAUSAL, causal, [1, 1], [1, 1, 1]),
            (Rules::LOCAL, Window { left: 100, ..causal }, [5000, 3000], [3, 1, 2]),
            (chunked, Window { chunk: Some(300), ..causal }, [5000, 5000], [3, 1, 2]),
        ] {
            let forward = forward(rules);
            let lists = TileLists::new(&forward, &window, None, lengths, heads, 132, 30 << 20);
            let (_, tiles) = loads(&lists, &forward, &window, lengths);
            let count = lengths[0].div_ceil(forward.query_rows()) * heads[0] * heads[2];
            assert_eq!(tiles, (0..count).collect::<Vec<_>>());
        }
    }

    /// The tiles of a mask function that equals the causal mask are distributed like those of the
    /// causal mask, others longest first.
    #[test]
    fn functions_are_shared_out_by_what_they_see() {
        let forward = forward(Rules::CAUSAL);
        let (lengths, heads, cache) = ([192 * 20; 2], [32, 32, 1], 30 << 20);
        let new = |window: &Window, seen: Option<&BlockCounts>| {
            TileLists::new(&forward, window, seen, lengths, heads, 132, cache)
        };
        let by_name = new(&Window::CAUSAL, None);
        let by_function = |function: Function| {
            let mask = BlockMask {
                function,
                window: Window::DENSE,
                lengths,
                heads: 32,
                group: 1,
                batch: 1,
                query_rows: 192,
                key_block: 96,
                lists: ListsOf::Queries,
            };
            new(&Window::DENSE, Some(&mask.counts(&mask.words())))
        };
        assert_eq!(by_function(Function::mask("causal", |at| at.query().ge(at.key()))), by_name);
        let found = by_function(Function::mask("window", |at| {
            let before = at.query() - at.key();
            before.ge(0) & before.lt(700)
        }));
        assert_ne!(found, by_name);
        // Distributed in pairs, the second tile would be the first one of a head.
        let begin = found.words[0] as usize;
        assert!(found.words[begin..begin + 2].iter().all(|tile| tile % 20 > 3));
    }

    /// 16,384 tokens with a hidden dimension of 2048 under a causal mask: with full waves of pairs,
    /// some thread blocks had up to 2.6 % more work than the mean.
    #[test]
    fn the_last_pairs_leave_nobody_behind() {
        for (head_dim, key_block, warpgroups, length, slack) in [
            (256, 64, 2, 2048, 1.005),
            (256, 64, 2, 8192, 1.005),
            (128, 128, 2, 4096, 1.005),
            (128, 128, 2, 8192, 1.008),
            (64, 128, 2, 2048, 1.01),
            (64, 128, 2, 4096, 1.006),
            (64, 96, 3, 8192, 1.007),
            (64, 96, 3, 16384, 1.008),
        ] {
            let forward = Forward { head_dim, key_block, warpgroups, ..forward(Rules::CAUSAL) };
            let (heads, batch) = (2048 / head_dim, 16384 / length);
            let (lengths, heads) = ([length; 2], [heads, heads, batch]);
            let window = Window::CAUSAL;
            let lists = TileLists::new(&forward, &window, None, lengths, heads, 132, 30 << 20);
            let (loads, _) = loads(&lists, &forward, &window, lengths);
            let mean = loads.iter().sum::<u64>() as f64 / loads.len() as f64;
            let most = *loads.iter().max().unwrap() as f64 / mean;
            assert!(most < slack, "{head_dim}, {length}: {most}");
        }
    }

    /// 16,384 tokens in sequences of 8192 under a window: with the short tiles of each head among
    /// its others, some thread blocks had 1.017 to 1.065 times the mean work.
    #[test]
    fn short_tiles_fill_what_long_ones_leave() {
        for (head_dim, key_block, left, slack) in [
            (64, 128, 1024, 1.01),
            (64, 128, 4096, 1.005),
            (128, 128, 1024, 1.015),
            (128, 128, 4096, 1.01),
            (256, 64, 1024, 1.04),
            (256, 64, 4096, 1.02),
        ] {
            let local = forward(Rules::LOCAL);
            let dims = Forward { head_dim, value_head_dim: head_dim, ..local };
            let forward = Forward { key_block, warpgroups: 2, ..dims };
            let (lengths, heads) = ([8192; 2], [2048 / head_dim, 2048 / head_dim, 2]);
            let window = Window { left, ..Window::CAUSAL };
            let lists = TileLists::new(&forward, &window, None, lengths, heads, 132, 30 << 20);
            let (loads, _) = loads(&lists, &forward, &window, lengths);
            let mean = loads.iter().sum::<u64>() as f64 / loads.len() as f64;
            let most = *loads.iter().max().unwrap() as f64 / mean;
            assert!(most < slack, "{head_dim}, {left}: {most}");
        }
    }

    #[test]
    fn the_longest_list_is_hardly_longer_than_the_mean() {
        let window = Window { left: 3000, ..Window::CAUSAL };
        let chunks = Window { chunk: Some(5000), ..Window::CAUSAL };
        let chunked = Rules { mask: MaskKind::Chunked, ..Rules::LOCAL };
        for (rules, window, slack) in [
            (Rules::CAUSAL, Window::CAUSAL, 1.02),
            // Tiles of nearly equal length: 2752 over 132 thread blocks are 20.8 each, and some
            // have 21.
            (Rules::LOCAL, window, 1.05),
            (chunked, chunks, 1.05),
        ] {
            let forward = forward(rules);
            let lengths = [16384, 16384];
            let lists =
                TileLists::new(&forward, &window, None, lengths, [32, 32, 1], 132, 30 << 20);
            let (loads, _) = loads(&lists, &forward, &window, lengths);
            let mean = loads.iter().sum::<u64>() as f64 / loads.len() as f64;
            let longest = *loads.iter().max().unwrap() as f64;
            assert!(longest < slack * mean, "{window:?}: {longest} against {mean}");
        }
    }
}
