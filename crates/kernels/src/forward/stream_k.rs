//! Stream-K: splits the tiles of the last, incomplete wave along the keys, so that all thread
//! blocks share them.
//!
//! Tiles of equal length leave a part of the GPU idle in the last wave. With stream-K the key
//! blocks of that wave's tiles are laid end to end, and each thread block computes a contiguous
//! range of them: the end of one tile, the beginning of the next, or some of the middle. The thread
//! block that computes the end of a tile merges the partial tiles of the others and stores it
//! ([`Partials`](super::partials::Partials)). A thread block therefore computes what others
//! merge first, and waits only for thread blocks with smaller indices.

use std::ops::Range;

use ptx::{Expression, Pred, Reg, U32, Value};

use super::{Forward, TileLists, lists};

/// The cost of a tile beyond its key blocks, in units of key blocks.
const OVERHEAD: u32 = (lists::OVERHEAD / lists::BLOCK) as u32;

/// The smallest saving, in key blocks, that counts: anything less is within the error of these cost
/// estimates.
const LEAST_SAVED: u32 = 4;

/// A contiguous range of a tile's key blocks, computed by one thread block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// The tile's number.
    tile: u32,
    key_blocks: Range<u32>,
    fixup: Fixup,
}

/// What happens to a part when it has been computed (CUTLASS calls it the fixup of stream-K).
#[derive(Clone, Debug, PartialEq, Eq)]
enum Fixup {
    /// It is a partial tile, stored at this place of the workspace for another thread block.
    Partial(u32),
    /// It is the end of its tile: the other parts are merged from these places of the workspace,
    /// and the tile is stored.
    Final(Range<u32>),
}

/// The assignment of the last wave's tiles to thread blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Assignment {
    /// The parts of each thread block, in the order in which they are computed.
    blocks: Vec<Vec<Part>>,
    /// The number of places of the workspace in use.
    places: u32,
}

/// A [`Fixup`] as the kernel reads it, packed into 32 bits: bit 31 says that the part is partial;
/// bits 0 to 15 are the place where it is stored, or the first place to merge from; the bits
/// between are the number of parts to merge. A whole tile is stored and merges none.
pub(super) struct PartWord;

impl PartWord {
    pub(super) const WHOLE: u32 = 0;
    const PLACES: u32 = 1 << 16;
    const PARTIAL: u32 = 1 << 31;

    fn of(fixup: &Fixup) -> u32 {
        match fixup {
            Fixup::Partial(place) => PartWord::PARTIAL + place,
            Fixup::Final(places) => places.len() as u32 * PartWord::PLACES + places.start,
        }
    }

    pub(super) fn is_partial(word: Reg<U32>) -> Value<Pred> {
        word.at_least(PartWord::PARTIAL)
    }

    pub(super) fn place(word: Reg<U32>) -> Value<U32> {
        word % PartWord::PLACES
    }

    /// Returns how many parts a tile that is stored has to merge.
    pub(super) fn others(word: Reg<U32>) -> Value<U32> {
        word / PartWord::PLACES
    }
}

/// The tiles of the last, incomplete wave.
struct PartialWave {
    /// The number of the first of them.
    first: u32,
    tiles: u32,
    /// Key blocks per tile.
    key_blocks: u32,
    /// The cost of storing or merging a part, in key blocks.
    exchange: u32,
}

impl PartialWave {
    /// Finds by bisection the smallest cost per thread block at which all tiles can be assigned.
    /// Returns that cost, in key blocks, and the assignment.
    fn assign(&self, blocks: u32) -> (u32, Assignment) {
        // At the upper bound each tile has a thread block to itself.
        let (mut short, mut enough) = (0, self.key_blocks + OVERHEAD);
        let mut best = self.assign_within(enough, blocks).expect("no more tiles than blocks");
        while enough - short > 1 {
            let middle = short + (enough - short) / 2;
            match self.assign_within(middle, blocks) {
                Some(assignment) => (enough, best) = (middle, assignment),
                None => short = middle,
            }
        }
        (enough, best)
    }

    /// Assigns to each thread block in turn as much as it can compute at the given cost. Returns
    /// `None` if tiles are left over.
    fn assign_within(&self, cost: u32, blocks: u32) -> Option<Assignment> {
        let mut assignment = Assignment { blocks: Vec::new(), places: 0 };
        // The next tile, the first of its key blocks that is not assigned yet, and the places where
        // the parts before that are stored.
        let (mut tile, mut next, mut others) = (0, 0, 0..0);
        while tile < self.tiles {
            if assignment.blocks.len() == blocks as usize {
                return None;
            }
            let mut room = cost;
            let mut parts = Vec::new();
            let end = self.key_blocks - next + OVERHEAD + others.len() as u32 * self.exchange;
            if end <= room {
                room -= end;
                parts.push(self.part(tile, next..self.key_blocks, Fixup::Final(others)));
                (tile, next, others) = (tile + 1, 0, assignment.places..assignment.places);
            }
            let most = self.key_blocks - next - 1;
            let taken = room.saturating_sub(OVERHEAD + self.exchange).min(most);
            if tile < self.tiles && taken > 0 {
                // Computed before the tile that is stored, so that nobody waits for it longer than
                // need be.
                parts.insert(
                    0,
                    self.part(tile, next..next + taken, Fixup::Partial(assignment.places)),
                );
                assignment.places += 1;
                others.end = assignment.places;
                next += taken;
            }
            if parts.is_empty() {
                return None;
            }
            assignment.blocks.push(parts);
        }
        Some(assignment)
    }

    fn part(&self, tile: u32, key_blocks: Range<u32>, fixup: Fixup) -> Part {
        Part { tile: self.first + tile, key_blocks, fixup }
    }
}

impl TileLists {
    /// The bit that marks a list entry as a part of a tile; the other bits are the index of the
    /// word at which the part is described.
    pub(super) const PART: u32 = 1 << 31;

    /// Returns the lists of tiles of equal length: full waves in turn, and the last one split along
    /// the keys.
    pub(super) fn stream_k(
        forward: &Forward,
        tiles: u32,
        key_length: u32,
        processors: u32,
    ) -> Self {
        let processors = processors.max(1);
        let (waves, wave) = PartialWave::of(forward, tiles, key_length, processors);
        let (_, assignment) = wave.assign(processors);
        let blocks = if waves > 0 { processors } else { assignment.blocks.len() as u32 };
        let entries = waves * blocks + assignment.blocks.iter().map(Vec::len).sum::<usize>() as u32;
        // The kernel reads a part's description as one vector of four words.
        let mut described = (2 * blocks + entries).next_multiple_of(4);
        let (mut words, mut lists, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        for block in 0..blocks {
            words.push(blocks + lists.len() as u32);
            lists.extend((0..waves).map(|wave| wave * blocks + block));
            for part in assignment.blocks.get(block as usize).into_iter().flatten() {
                lists.push(TileLists::PART + described);
                let Range { start, end } = part.key_blocks;
                parts.extend([part.tile, start, end, PartWord::of(&part.fixup)]);
                described += 4;
            }
            lists.push(TileLists::END);
        }
        words.extend(lists);
        words.resize(words.len().next_multiple_of(4), TileLists::END);
        words.extend(parts);
        TileLists { blocks, words, places: assignment.places }
    }
}

impl PartialWave {
    /// Returns the number of full waves of `tiles` tiles, and the incomplete wave that remains.
    fn of(forward: &Forward, tiles: u32, key_length: u32, processors: u32) -> (u32, Self) {
        let waves = tiles / processors;
        let wave = PartialWave {
            first: waves * processors,
            tiles: tiles % processors,
            key_blocks: key_length.div_ceil(forward.key_block).max(1),
            exchange: forward.value_head_dim.div_ceil(128),
        };
        (waves, wave)
    }
}

impl Forward {
    /// Returns the fraction of the kernel's time that stream-K should save, estimated by counting
    /// key blocks; 0 where the saving is too small to be certain.
    pub fn stream_k_saves(&self, tiles: u32, key_length: u32, processors: u32) -> f64 {
        let processors = processors.max(1);
        let (waves, wave) = PartialWave::of(self, tiles, key_length, processors);
        if wave.tiles == 0 {
            return 0.0;
        }
        let tile = wave.key_blocks + OVERHEAD;
        let saved = tile - wave.assign(processors).0;
        if saved < LEAST_SAVED {
            return 0.0;
        }
        f64::from(saved) / (f64::from(tile) * f64::from(waves + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::super::every_tuned;
    use super::*;

    /// Every key block of every tile is computed once. Every partial one is merged once, by a
    /// later thread block, and is computed before anything that waits.
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
            let wave = PartialWave { first: 1000, tiles, key_blocks, exchange };
            let (cost, assignment) = wave.assign(blocks);
            assert!(assignment.blocks.len() <= blocks as usize);
            let mut seen = vec![vec![false; key_blocks as usize]; tiles as usize];
            let mut partial = vec![None; assignment.places as usize];
            for (block, parts) in assignment.blocks.iter().enumerate() {
                let mut load = 0;
                for (at, part) in parts.iter().enumerate() {
                    let tile = (part.tile - 1000) as usize;
                    load += OVERHEAD + part.key_blocks.len() as u32;
                    for key_block in part.key_blocks.clone() {
                        assert!(!std::mem::replace(&mut seen[tile][key_block as usize], true));
                    }
                    match &part.fixup {
                        Fixup::Partial(place) => {
                            assert_eq!(at, 0, "nothing that waits comes before");
                            assert_eq!(partial[*place as usize].replace((tile, block)), None);
                            load += exchange;
                        }
                        Fixup::Final(places) => {
                            assert_eq!(part.key_blocks.end, key_blocks);
                            for place in places.clone() {
                                let (of, by) = partial[place as usize].take().unwrap();
                                assert!(of == tile && by < block);
                            }
                            load += exchange * places.len() as u32;
                        }
                    }
                }
                assert!(load <= cost, "{load} of {cost}");
            }
            assert!(seen.iter().flatten().all(|it| *it) && partial.iter().all(Option::is_none));
        }
    }

    /// The cost of the last wave of 15.5 and of 7.8 waves: a little more than each thread block's
    /// even share of its key blocks.
    #[test]
    fn the_last_wave_is_shared_out_evenly() {
        let cost = |tiles, key_blocks, exchange| {
            PartialWave { first: 0, tiles, key_blocks, exchange }.assign(132).0
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
        let (part, end, partial, other) =
            (TileLists::PART, TileLists::END, PartWord::PARTIAL, PartWord::PLACES);
        let starts = [3, 6, 10];
        let entries = [0, part + 16, end, 1, part + 20, part + 24, end, 2, part + 28, end];
        let parts =
            [[3, 0, 8, partial], [4, 0, 3, partial + 1], [3, 8, 10, other], [4, 3, 10, other + 1]];
        let expected = [&starts[..], &entries, &[end; 3], parts.as_flattened()].concat();
        assert_eq!(lists.words, expected);
    }
}
