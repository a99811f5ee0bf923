//! Which rows of the sequences each rank owns.

use std::ops::Range;

use super::Distribution;

/// The sequences that attend to themselves.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Sequences {
    /// So many of one length, in tensors (batch, rows, heads, dim). All are cut alike, and what is
    /// said of sequence 0 holds for each of them.
    Batch {
        /// How many there are.
        count: usize,
        /// How long each of them is.
        length: usize,
    },
    /// Of these lengths, one after the other in tensors (rows, heads, dim).
    Ragged(Vec<usize>),
}

impl Sequences {
    /// The lengths that are cut.
    pub(super) fn lengths(&self) -> &[usize] {
        match self {
            Sequences::Batch { length, .. } => std::slice::from_ref(length),
            Sequences::Ragged(lengths) => lengths,
        }
    }

    /// How many sequences each that is cut stands for.
    pub(super) fn copies(&self) -> u64 {
        match self {
            Sequences::Batch { count, .. } => *count as u64,
            Sequences::Ragged(_) => 1,
        }
    }
}

/// In which order the pieces of a sequence are given to ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Order {
    /// A sequence is cut into twice as many pieces as there are ranks; each gets one from the
    /// beginning and its mirror from the end. Under a causal mask all have as much to do.
    #[default]
    ZigZag,
    /// A sequence is cut into as many pieces as there are ranks. For windows, under which ranks that
    /// are far apart see nothing of each other, and for attention without a mask.
    Contiguous,
}

/// Some rows of one sequence.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Piece {
    /// Which sequence.
    pub sequence: usize,
    /// Its rows, from its beginning.
    pub rows: Range<usize>,
}

impl Distribution {
    /// The rows that a rank owns, in the order in which they lie in its tensors.
    ///
    /// Lengths need not divide by the ranks: pieces differ by a row at most, and may be empty.
    pub fn pieces(&self, rank: usize) -> Vec<Piece> {
        let (node, member) = self.place(rank);
        // Ranks of one member index are neighbours in the sequence: once they have exchanged heads
        // for rows, what they have together is as if there were no nodes.
        let part = member * self.nodes + node;
        self.parts(part..part + 1, self.ranks)
    }

    /// The rows that a member of a node has the keys of once heads are exchanged for rows: those of
    /// the same member of every node, in the order of their positions.
    pub fn held(&self, member: usize) -> Vec<Piece> {
        self.parts(member * self.nodes..(member + 1) * self.nodes, self.ranks)
    }

    /// The same as the rows of each node's rank: what is put together, in this order, once heads are
    /// exchanged for rows.
    pub fn exchanged(&self, member: usize) -> Vec<(usize, Range<usize>)> {
        let mut found = Vec::new();
        for node in 0..self.nodes {
            let mut at = 0;
            for piece in self.pieces(self.rank_at(node, member)) {
                let rows = at..at + piece.rows.len();
                at = rows.end;
                found.push(((piece.sequence, piece.rows.start), (node, rows)));
            }
        }
        found.sort_by_key(|(place, _)| *place);
        found.into_iter().map(|(_, rows)| rows).collect()
    }

    /// How many rows of its tensors a rank owns; of each batch entry where there is a batch.
    pub fn owned_rows(&self, rank: usize) -> usize {
        self.pieces(rank).iter().map(|piece| piece.rows.len()).sum()
    }

    /// Neighbouring parts of all sequences, where each is divided into so many.
    fn parts(&self, parts: Range<usize>, of: usize) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for (sequence, length) in self.sequences.lengths().iter().enumerate() {
            // Products of lengths and ranks may be larger than a word.
            let cut =
                |part: usize, of: usize| (*length as u128 * part as u128 / of as u128) as usize;
            let mut push = |rows: Range<usize>| {
                if !rows.is_empty() {
                    pieces.push(Piece { sequence, rows });
                }
            };
            match self.order {
                Order::Contiguous => push(cut(parts.start, of)..cut(parts.end, of)),
                Order::ZigZag => {
                    let front = cut(parts.start, 2 * of)..cut(parts.end, 2 * of);
                    let back = cut(2 * of - parts.end, 2 * of)..cut(2 * of - parts.start, 2 * of);
                    if front.end == back.start {
                        push(front.start..back.end);
                    } else {
                        push(front);
                        push(back);
                    }
                }
            }
        }
        pieces
    }
}
