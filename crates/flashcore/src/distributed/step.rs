//! The steps of a rank: what it receives, sends and computes.

use std::collections::BTreeMap;
use std::ops::Range;

use super::block::between;
use super::{Distribution, Piece, Variant};
use crate::problem::Mask;

/// One step of a rank, once heads are exchanged for rows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Step {
    /// The keys that it needs, from the ranks that own them. They are asked for one step ahead.
    pub receive: Vec<Rows>,
    /// Its own keys that others need in this step.
    pub send: Vec<Rows>,
    /// What it computes. Each gives a part of the output, and parts are merged by log-sum-exps; those of
    /// the first step cover every row.
    pub launches: Vec<Launch>,
}

/// Rows that are sent from one rank to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rows {
    /// The other rank.
    pub rank: usize,
    /// The rows as they lie with their owner: ascending, and not next to each other.
    pub rows: Vec<Range<usize>>,
}

impl Rows {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.rows.iter().map(ExactSizeIterator::len).sum()
    }
}

/// Keys of an all-gather.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gathered {
    /// Whose they are.
    pub rank: usize,
    /// The rows among those that this rank sent.
    pub rows: Range<usize>,
    /// What they are of the sequences.
    pub piece: Piece,
}

/// Blocks that one launch computes: at most one of each sequence, all with the same mask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// The mask of each block, aligned to the end of its keys.
    pub mask: Mask,
    /// The blocks, in the order of sequences.
    pub blocks: Vec<Block>,
}

/// Some queries with some keys of the same sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Which sequence.
    pub sequence: usize,
    /// Rows of the rank's queries.
    pub queries: Range<usize>,
    /// Rows of the keys of the step: its own in the first, those that it receives, one after the other,
    /// in others. An all-gather's single step has its own among them, by positions.
    pub keys: Range<usize>,
}

/// A piece, and the row of a tensor that it begins at.
struct Laid {
    piece: Piece,
    at: usize,
}

/// Pieces one after the other.
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
    /// The steps of a rank, in order. Everyone has as many, of which some may be empty: what two ranks
    /// send each other, they send in the same order.
    pub fn steps(&self, rank: usize) -> Vec<Step> {
        match self.variant {
            Variant::AllGather => vec![self.gather_step(rank)],
            _ => self.ring_steps(rank),
        }
    }

    /// In step `t`, a member of a node computes with the keys of the member `t` places before it, and gets
    /// them from there.
    ///
    /// They are not passed on from neighbour to neighbour: what is sent is what the receiver sees
    /// of it and no more, and nobody waits for anybody but the owner.
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

    /// Which rows of the keys of `from` the queries of `member` see, and what it computes with them.
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

    /// The one step of an all-gather: the keys of all, by positions.
    fn gather_step(&self, rank: usize) -> Step {
        let others = |rows: &dyn Fn(usize) -> Vec<Range<usize>>| {
            let others = (0..self.ranks).filter(|other| *other != rank);
            let rows = others.map(|other| Rows { rank: other, rows: rows(other) });
            rows.filter(|rows| !rows.rows.is_empty()).collect()
        };
        // Pieces that are neighbours in the sequence are neighbours here.
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

    /// Whether the all-gather is one of everything. Under a window each rank gets what it sees.
    pub fn gathers_all(&self) -> bool {
        self.variant == Variant::AllGather
            && (self.mask.left.is_none() || self.mask.right.is_none())
    }

    /// The rows that an all-gather gives `rank` of the keys of `from`.
    fn needed(&self, rank: usize, from: usize) -> Vec<Range<usize>> {
        if rank == from || self.gathers_all() {
            return joined(std::iter::once(0..self.owned_rows(from)));
        }
        self.compute(rank, from).0
    }

    /// The keys that an all-gather gives to a rank, in the order in which they lie: by sequences and
    /// positions.
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

    /// What queries and keys see of each other, piece by piece; pieces that are neighbours in both
    /// tensors are one block where no mask is between them.
    fn blocks(&self, queries: &[Laid], keys: &[Laid]) -> Vec<(Block, Mask)> {
        let mut blocks: Vec<(Block, Mask)> = Vec::new();
        // Both are in the order of sequences.
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

/// Adds a block, to one that it continues where there is one.
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
    // What it becomes may continue another.
    push(blocks, Block { queries, keys, ..block }, mask);
}

/// A causal mask over a rank's own rows, which lie in the order of their positions, is one over all
/// of them.
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

/// Blocks with the same mask in as few launches as can be.
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

/// Ranges in order, those that touch as one.
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

/// Where a range lies once only these ranges, of which it is in one, are left.
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
