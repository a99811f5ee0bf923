//! The steps of a rank: what it receives, sends and computes.

use std::collections::BTreeMap;
use std::ops::Range;

use super::block::between;
use super::{Distribution, Piece, Variant};
use crate::problem::Mask;

/// One step of a rank, after heads are exchanged for rows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Step {
    /// The keys that it needs, and the ranks that own them. They are requested one step ahead.
    pub receive: Vec<Rows>,
    /// Its own keys that others need in this step.
    pub send: Vec<Rows>,
    /// What it computes. Each launch gives a part of the output; parts are merged by their
    /// log-sum-exps. The launches of the first step cover every row.
    pub launches: Vec<Launch>,
}

/// Rows that one rank sends to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rows {
    /// The other rank.
    pub rank: usize,
    /// The rows, as indices into the owner's tensors: ascending, with gaps between the ranges.
    pub rows: Vec<Range<usize>>,
}

impl Rows {
    /// Returns the number of rows.
    pub fn count(&self) -> usize {
        self.rows.iter().map(ExactSizeIterator::len).sum()
    }
}

/// A range of keys in the result of an all-gather.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gathered {
    /// The rank that owns them.
    pub rank: usize,
    /// Their range among the rows that this rank sent.
    pub rows: Range<usize>,
    /// The piece of a sequence that they are.
    pub piece: Piece,
}

/// Blocks that one launch computes: at most one per sequence, all with the same mask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// The mask of each block, aligned to the end of its keys.
    pub mask: Mask,
    /// The blocks, in the order of sequences.
    pub blocks: Vec<Block>,
}

/// A range of queries with a range of keys of the same sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Index of the sequence.
    pub sequence: usize,
    /// Rows of the rank's query tensor.
    pub queries: Range<usize>,
    /// Rows of the step's keys: the rank's own keys in the first step, the received ones,
    /// concatenated, in later steps. The single step of an all-gather has all keys, its own among
    /// them, by position.
    pub keys: Range<usize>,
}

/// A piece, and the row of a tensor at which it begins.
struct Laid {
    piece: Piece,
    at: usize,
}

/// Places pieces one after the other.
fn lay(pieces: impl IntoIterator<Item = Piece>) -> Vec<Laid> {
    let mut at = 0;
    let lay = |piece: Piece| {
        let begin = at;
        at += piece.rows.len();
        Laid { piece, at: begin }
    };
    pieces.into_iter().map(lay).collect()
}

impl Distribution {
    /// Returns the steps of a rank, in order. Every rank has the same number of steps, some of
    /// which may be empty, so that two ranks exchange their messages in the same order.
    pub fn steps(&self, rank: usize) -> Vec<Step> {
        match self.variant {
            Variant::AllGather => vec![self.gather_step(rank)],
            _ => self.ring_steps(rank),
        }
    }

    /// Returns the steps of a ring. In step `t`, a member of a node receives the keys of the member
    /// `t` places before it, and computes with them.
    ///
    /// Keys are not passed on from neighbour to neighbour: each owner sends exactly what the
    /// receiver sees, and nobody waits for anyone but the owner.
    fn ring_steps(&self, rank: usize) -> Vec<Step> {
        let members = self.members();
        let (node, member) = self.place(rank);
        let mut steps = Vec::new();
        for distance in 0..members {
            let from = (member + members - distance) % members;
            let to = (member + distance) % members;
            let (needed, launches) = self.compute(member, from);
            let mut step = Step { launches, ..Step::default() };
            if distance > 0 {
                let rows = |member: usize, rows: Vec<Range<usize>>| {
                    let some = !rows.is_empty();
                    some.then(|| Rows { rank: self.rank_at(node, member), rows })
                };
                step.receive.extend(rows(from, needed));
                step.send.extend(rows(to, self.compute(to, member).0));
            }
            steps.push(step);
        }
        steps
    }

    /// Returns which rows of the keys of `from` the queries of `member` see, and what it computes
    /// with them.
    fn compute(&self, member: usize, from: usize) -> (Vec<Range<usize>>, Vec<Launch>) {
        let queries = lay(self.held(member));
        let keys = lay(self.held(from));
        let mut blocks = self.blocks(&queries, &keys);
        if member == from {
            if self.mask == Mask::CAUSAL {
                blocks = whole_sequences(&queries);
            }
            return (Vec::new(), launches(blocks));
        }
        let needed = joined(blocks.iter().map(|(block, _)| block.keys.clone()));
        for (block, _) in &mut blocks {
            block.keys = within(&needed, block.keys.clone());
        }
        (needed, launches(blocks))
    }

    /// Returns the single step of an all-gather, over the keys of all ranks by position.
    fn gather_step(&self, rank: usize) -> Step {
        let others = |rows: &dyn Fn(usize) -> Vec<Range<usize>>| {
            let others = (0..self.ranks).filter(|other| *other != rank);
            let rows = others.map(|other| Rows { rank: other, rows: rows(other) });
            rows.filter(|rows| !rows.rows.is_empty()).collect()
        };
        // Merge pieces that are adjacent in the sequence.
        let mut runs: Vec<Laid> = Vec::new();
        for next in lay(self.gathered(rank).into_iter().map(|gathered| gathered.piece)) {
            match runs.last_mut() {
                Some(Laid { piece: last, .. })
                    if last.sequence == next.piece.sequence
                        && last.rows.end == next.piece.rows.start =>
                {
                    last.rows.end = next.piece.rows.end;
                }
                _ => runs.push(next),
            }
        }
        let launches = launches(self.blocks(&lay(self.held(rank)), &runs));
        Step {
            receive: others(&|from| self.needed(rank, from)),
            send: others(&|to| self.needed(to, rank)),
            launches,
        }
    }

    /// Tells whether an all-gather gathers everything. Under a window with two ends, each rank gets
    /// only what it sees.
    pub fn gathers_all(&self) -> bool {
        self.variant == Variant::AllGather
            && (self.mask.left.is_none() || self.mask.right.is_none())
    }

    /// Returns the rows of the keys of `from` that an all-gather gives to `rank`.
    fn needed(&self, rank: usize, from: usize) -> Vec<Range<usize>> {
        if rank == from || self.gathers_all() {
            return joined(std::iter::once(0..self.owned_rows(from)));
        }
        self.compute(rank, from).0
    }

    /// Returns the keys that an all-gather gives to a rank, in the order in which its tensor holds
    /// them: by sequence and position.
    pub fn gathered(&self, rank: usize) -> Vec<Gathered> {
        let mut found = Vec::new();
        for from in 0..self.ranks {
            let needed = self.needed(rank, from);
            for Laid { piece: Piece { sequence, rows: piece }, at } in lay(self.held(from)) {
                for rows in &needed {
                    let (begin, end) = (rows.start.max(at), rows.end.min(at + piece.len()));
                    if begin < end {
                        let received = within(&needed, begin..end);
                        let rows = piece.start + begin - at..piece.start + end - at;
                        let piece = Piece { sequence, rows };
                        found.push(Gathered { rank: from, rows: received, piece });
                    }
                }
            }
        }
        found.sort_by_key(|gathered| (gathered.piece.sequence, gathered.piece.rows.start));
        found
    }

    /// Returns the blocks of queries and keys that see each other, piece by piece; pieces that are
    /// adjacent in both tensors form one block where no mask is between them.
    fn blocks(&self, queries: &[Laid], keys: &[Laid]) -> Vec<(Block, Mask)> {
        let mut blocks: Vec<(Block, Mask)> = Vec::new();
        // Both lists are in the order of sequences.
        let mut of: BTreeMap<usize, Vec<&Laid>> = BTreeMap::new();
        keys.iter().for_each(|key| of.entry(key.piece.sequence).or_default().push(key));
        let none = Vec::new();
        for query in queries {
            let sequence = query.piece.sequence;
            for key in of.get(&sequence).unwrap_or(&none) {
                let (q, k) = (query.piece.rows.clone(), key.piece.rows.clone());
                let Some((q, k, mask)) = between(self.mask, q, k) else { continue };
                let shifted = |rows: Range<usize>, laid: &Laid| {
                    let begin = laid.at + rows.start - laid.piece.rows.start;
                    begin..begin + rows.len()
                };
                let block = Block { sequence, queries: shifted(q, query), keys: shifted(k, key) };
                push(&mut blocks, block, mask);
            }
        }
        blocks
    }
}

/// Adds a block, merging it with an unmasked one that it continues.
fn push(blocks: &mut Vec<(Block, Mask)>, block: Block, mask: Mask) {
    let continued = |(other, mask): &(Block, Mask)| {
        let same_queries = other.queries == block.queries && other.keys.end == block.keys.start;
        let same_keys = other.keys == block.keys && other.queries.end == block.queries.start;
        *mask == Mask::NONE && other.sequence == block.sequence && (same_queries || same_keys)
    };
    let found = if mask == Mask::NONE { blocks.iter().rposition(continued) } else { None };
    let Some(at) = found else { return blocks.push((block, mask)) };
    let (first, _) = blocks.remove(at);
    let queries = first.queries.start..block.queries.end;
    let keys = first.keys.start..block.keys.end;
    // The merged block may continue another one.
    push(blocks, Block { queries, keys, ..block }, mask);
}

/// Returns the causal blocks of a rank's own rows. They are in the order of their positions, so one
/// causal block per sequence covers all pieces.
fn whole_sequences(laid: &[Laid]) -> Vec<(Block, Mask)> {
    let mut blocks: Vec<(Block, Mask)> = Vec::new();
    for Laid { piece, at } in laid {
        let end = at + piece.rows.len();
        match blocks.last_mut() {
            Some((last, _)) if last.sequence == piece.sequence => {
                (last.queries.end, last.keys.end) = (end, end);
            }
            _ => {
                let sequence = piece.sequence;
                let block = Block { sequence, queries: *at..end, keys: *at..end };
                blocks.push((block, Mask::CAUSAL));
            }
        }
    }
    blocks
}

/// Groups blocks with the same mask into as few launches as possible.
fn launches(blocks: Vec<(Block, Mask)>) -> Vec<Launch> {
    let mut launches: Vec<Launch> = Vec::new();
    for (block, mask) in blocks {
        let has_room = |launch: &&mut Launch| {
            launch.mask == mask
                && launch.blocks.last().is_none_or(|last| last.sequence < block.sequence)
        };
        match launches.iter_mut().find(has_room) {
            Some(launch) => launch.blocks.push(block),
            None => launches.push(Launch { mask, blocks: vec![block] }),
        }
    }
    launches
}

/// Sorts ranges, and joins those that touch or overlap.
fn joined(ranges: impl IntoIterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = ranges.into_iter().collect();
    ranges.sort_by_key(|range| range.start);
    let mut joined: Vec<Range<usize>> = Vec::new();
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

/// Returns the position of a range after everything outside of `ranges`, one of which contains it,
/// is removed.
fn within(ranges: &[Range<usize>], range: Range<usize>) -> Range<usize> {
    let mut at = 0;
    for kept in ranges {
        if range.start < kept.end {
            let begin = at + range.start - kept.start;
            return begin..begin + range.len();
        }
        at += kept.len();
    }
    at..at
}
