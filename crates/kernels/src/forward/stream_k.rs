//! Stream-K: the keys of the tiles that do not fill a last round, shared out among all blocks.
//!
//! Tiles that are all alike leave a part of the GPU without work in the last round. Here each block
//! takes a stretch of their key blocks instead, laid end to end: the end of one tile, the begin of
//! the next, or some of the middle. Whoever has a tile's end stores it, and waits for the others
//! ([`Partials`](super::partials::Partials)); so what is for others comes first, and nobody waits
//! for a block with a larger index.

use std::ops::Range;

use ptx::{Expression, Pred, Reg, U32, Value};

use super::{Forward, TileLists};

/// What a tile costs beyond its key blocks, in key blocks: the first scores, which nothing overlaps,
/// and the way out.
const OVERHEAD: u32 = 2;

/// Fewer key blocks than this are less than what the costs above are wrong by.
const LEAST_SAVED: u32 = 4;

/// A stretch of a tile's key blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// The tile's number.
    tile: u32,
    key_blocks: Range<u32>,
    fate: Fate,
}

/// What becomes of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Fate {
    /// It is left at a place for another block.
    Left(u32),
    /// The others of its tile are taken in from these places, and the tile is stored.
    Stored(Range<u32>),
}

/// How the last round is shared out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Deal {
    /// The parts of each block, in order.
    blocks: Vec<Vec<Part>>,
    /// Places that parts are left at.
    places: u32,
}

/// A part's fate as the kernel reads it: the place of its own or the first of the others', how many
/// others there are, and whether it is left. A whole tile is stored and has no others.
pub(super) struct PartWord;

impl PartWord {
    pub(super) const WHOLE: u32 = 0;
    const PLACES: u32 = 1 << 16;
    const LEFT: u32 = 1 << 31;

    fn of(fate: &Fate) -> u32 {
        match fate {
            Fate::Left(place) => PartWord::LEFT + place,
            Fate::Stored(places) => places.len() as u32 * PartWord::PLACES + places.start,
        }
    }

    pub(super) fn is_left(word: Reg<U32>) -> Value<Pred> {
        word.at_least(PartWord::LEFT)
    }

    pub(super) fn place(word: Reg<U32>) -> Value<U32> {
        word % PartWord::PLACES
    }

    /// How many others there are of a tile that is stored.
    pub(super) fn others(word: Reg<U32>) -> Value<U32> {
        word / PartWord::PLACES
    }
}

/// What is shared out: the tiles of the last round.
struct LastRound {
    /// The first of them.
    first: u32,
    tiles: u32,
    /// Key blocks of a tile.
    key_blocks: u32,
    /// What it costs to leave a part, or to take one in, in key blocks.
    exchange: u32,
}

impl LastRound {
    /// Shares the tiles out so that no block has much more to do than others.
    fn deal(&self, blocks: u32) -> (u32, Deal) {
        // With so much, a block has a tile for itself.
        let (mut short, mut enough) = (0, self.key_blocks + OVERHEAD);
        let mut best = self.with_at_most(enough, blocks).expect("no more tiles than blocks");
        while enough - short > 1 {
            let middle = short + (enough - short) / 2;
            match self.with_at_most(middle, blocks) {
                Some(deal) => (enough, best) = (middle, deal),
                None => short = middle,
            }
        }
        (enough, best)
    }

    /// Every block in turn takes what it can do at a given cost; nothing where tiles are left over.
    fn with_at_most(&self, cost: u32, blocks: u32) -> Option<Deal> {
        let mut deal = Deal { blocks: Vec::new(), places: 0 };
        // The tile that is next, the first of its key blocks that is left, and who has the others.
        let (mut tile, mut next, mut others) = (0, 0, 0..0);
        while tile < self.tiles {
            if deal.blocks.len() == blocks as usize {
                return None;
            }
            let mut room = cost;
            let mut parts = Vec::new();
            let end = self.key_blocks - next + OVERHEAD + others.len() as u32 * self.exchange;
            if end <= room {
                room -= end;
                parts.push(self.part(tile, next..self.key_blocks, Fate::Stored(others)));
                (tile, next, others) = (tile + 1, 0, deal.places..deal.places);
            }
            let most = self.key_blocks - next - 1;
            let taken = room.saturating_sub(OVERHEAD + self.exchange).min(most);
            if tile < self.tiles && taken > 0 {
                // Nobody shall wait longer than need be: before the tile that is stored.
                parts.insert(0, self.part(tile, next..next + taken, Fate::Left(deal.places)));
                deal.places += 1;
                others.end = deal.places;
                next += taken;
            }
            if parts.is_empty() {
                return None;
            }
            deal.blocks.push(parts);
        }
        Some(deal)
    }

    fn part(&self, tile: u32, key_blocks: Range<u32>, fate: Fate) -> Part {
        Part { tile: self.first + tile, key_blocks, fate }
    }
}

impl TileLists {
    /// Marks an entry that is a part: the rest says at which word it is described.
    pub(super) const PART: u32 = 1 << 31;

    /// The lists of tiles that are all alike: whole rounds in turn, and the last one shared out by
    /// keys.
    pub(super) fn stream_k(
        forward: &Forward,
        tiles: u32,
        key_length: u32,
        processors: u32,
    ) -> Self {
        let processors = processors.max(1);
        let (rounds, round) = LastRound::of(forward, tiles, key_length, processors);
        let (_, deal) = round.deal(processors);
        let blocks = if rounds > 0 { processors } else { deal.blocks.len() as u32 };
        let entries = rounds * blocks + deal.blocks.iter().map(Vec::len).sum::<usize>() as u32;
        // Parts are read four words at a time.
        let mut described = (2 * blocks + entries).next_multiple_of(4);
        let (mut words, mut lists, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        for block in 0..blocks {
            words.push(blocks + lists.len() as u32);
            lists.extend((0..rounds).map(|round| round * blocks + block));
            for part in deal.blocks.get(block as usize).into_iter().flatten() {
                lists.push(TileLists::PART + described);
                let Range { start, end } = part.key_blocks;
                parts.extend([part.tile, start, end, PartWord::of(&part.fate)]);
                described += 4;
            }
            lists.push(TileLists::END);
        }
        words.extend(lists);
        words.resize(words.len().next_multiple_of(4), TileLists::END);
        words.extend(parts);
        TileLists { blocks, words, places: deal.places }
    }
}

impl LastRound {
    /// The whole rounds of so many tiles, and what is left.
    fn of(forward: &Forward, tiles: u32, key_length: u32, processors: u32) -> (u32, Self) {
        let rounds = tiles / processors;
        let round = LastRound {
            first: rounds * processors,
            tiles: tiles % processors,
            key_blocks: key_length.div_ceil(forward.key_block).max(1),
            exchange: forward.value_head_dim.div_ceil(128),
        };
        (rounds, round)
    }
}

impl Forward {
    /// The part of the time that sharing out the last round by keys should save, by counting.
    pub fn stream_k_saves(&self, tiles: u32, key_length: u32, processors: u32) -> f64 {
        let processors = processors.max(1);
        let (rounds, round) = LastRound::of(self, tiles, key_length, processors);
        if round.tiles == 0 {
            return 0.0;
        }
        let tile = round.key_blocks + OVERHEAD;
        let saved = tile - round.deal(processors).0;
        if saved < LEAST_SAVED {
            return 0.0;
        }
        f64::from(saved) / (f64::from(tile) * f64::from(rounds + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::super::every_tuned;
    use super::*;

    /// Every key block of every tile is computed once; what is left is taken in once, by a block
    /// that comes later, and before anything that waits.
    #[test]
    fn every_key_block_is_computed_once() {
        for (tiles, key_blocks, blocks, exchange) in [
            (68, 16, 132, 1),
            (100, 256, 132, 2),
            (4, 16, 132, 1),
            (1, 3, 2, 1),
            (5, 7, 6, 1),
            (2, 1, 3, 1),
        ] {
            let round = LastRound { first: 1000, tiles, key_blocks, exchange };
            let (cost, deal) = round.deal(blocks);
            assert!(deal.blocks.len() <= blocks as usize);
            let mut seen = vec![vec![false; key_blocks as usize]; tiles as usize];
            let mut left = vec![None; deal.places as usize];
            for (block, parts) in deal.blocks.iter().enumerate() {
                let mut load = 0;
                for (at, part) in parts.iter().enumerate() {
                    let tile = (part.tile - 1000) as usize;
                    load += OVERHEAD + part.key_blocks.len() as u32;
                    for key_block in part.key_blocks.clone() {
                        assert!(!std::mem::replace(&mut seen[tile][key_block as usize], true));
                    }
                    match &part.fate {
                        Fate::Left(place) => {
                            assert_eq!(at, 0, "nothing that waits comes before");
                            assert_eq!(left[*place as usize].replace((tile, block)), None);
                            load += exchange;
                        }
                        Fate::Stored(places) => {
                            assert_eq!(part.key_blocks.end, key_blocks);
                            for place in places.clone() {
                                let (of, by) = left[place as usize].take().unwrap();
                                assert!(of == tile && by < block);
                            }
                            load += exchange * places.len() as u32;
                        }
                    }
                }
                assert!(load <= cost, "{load} of {cost}");
            }
            assert!(seen.iter().flatten().all(|it| *it) && left.iter().all(Option::is_none));
        }
    }

    /// What the last round of 15.5 and of 7.8 costs: a little more than the part of a tile that there
    /// is of it for each block.
    #[test]
    fn the_last_round_is_shared_out_evenly() {
        let cost = |tiles, key_blocks, exchange| {
            LastRound { first: 0, tiles, key_blocks, exchange }.deal(132).0
        };
        assert_eq!(cost(68, 128, 1), 71);
        assert_eq!(cost(100, 256, 2), 202);
        assert_eq!(cost(132, 64, 1), 66);
    }

    #[test]
    fn lists_say_what_the_kernel_reads() {
        let forward = Forward { stream_k: true, key_block: 32, ..every_tuned()[0] };
        let lists = TileLists::stream_k(&forward, 5, 320, 3);
        assert_eq!((lists.blocks, lists.places), (3, 2));
        let (part, end, left, other) =
            (TileLists::PART, TileLists::END, PartWord::LEFT, PartWord::PLACES);
        let starts = [3, 6, 10];
        let entries = [0, part + 16, end, 1, part + 20, part + 24, end, 2, part + 28, end];
        let parts =
            [[3, 0, 8, left], [4, 0, 3, left + 1], [3, 8, 10, other], [4, 3, 10, other + 1]];
        let expected = [&starts[..], &entries, &[end; 3], parts.as_flattened()].concat();
        assert_eq!(lists.words, expected);
    }
}
