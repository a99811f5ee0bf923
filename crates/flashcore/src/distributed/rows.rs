//! Which rows of the sequences each rank owns.

use std::ops::Range;

use super::Distribution;

/// The sequences of self-attention.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Sequences {
    /// Sequences of one length, in tensors (batch, rows, heads, dim). All are cut alike: everything
    /// that is said of sequence 0 holds for each of them.
    Batch {
        /// Number of sequences.
        count: usize,
        /// Length of each sequence.
        length: usize,
    },
    /// Sequences of these lengths, one after the other in tensors (rows, heads, dim).
    Ragged(Vec<usize>),
}

impl Sequences {
    /// Returns the lengths of the sequences that are cut into pieces.
    pub(super) fn lengths(&self) -> &[usize] {
        match self {
            Sequences::Batch { length, .. } => std::slice::from_ref(length),
            Sequences::Ragged(lengths) => lengths,
        }
    }

    /// Returns how many sequences each of them stands for.
    pub(super) fn copies(&self) -> u64 {
        match self {
            Sequences::Batch { count, .. } => *count as u64,
            Sequences::Ragged(_) => 1,
        }
    }
}

/// How the pieces of a sequence are assigned to ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Order {
    /// A sequence is cut into twice as many pieces as there are ranks; each rank gets one from the
    /// beginning and its mirror image from the end. Under a causal mask, all ranks have the same
    /// work.
    #[default]
    ZigZag,
    /// A sequence is cut into as many pieces as there are ranks. For windows, under which distant
    /// ranks see nothing of each other, and for attention without a mask.
    Contiguous,
}

/// A range of rows of one sequence.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Piece {
    /// Index of the sequence.
    pub sequence: usize,
    /// Rows, counted from the beginning of the sequence.
    pub rows: Range<usize>,
}

impl Distribution {
    /// Returns the rows that a rank owns, in the order in which its tensors hold them.
    ///
    /// Lengths need not be a multiple of the number of ranks: pieces differ by at most one row, and
    /// may be empty.
    pub fn pieces(&self, rank: usize) -> Vec<Piece> {
        let (node, member) = self.place(rank);
        // Ranks with the same member index own adjacent parts: after they have exchanged heads for
        // rows, their rows together are those of one rank of a single node.
        let part = member * self.nodes + node;
        self.parts(part..part + 1, self.ranks)
    }

    /// Returns the rows that a member of a node holds after heads are exchanged for rows: those of
    /// the same member of every node, in the order of their positions.
    pub fn held(&self, member: usize) -> Vec<Piece> {
        self.parts(member * self.nodes..(member + 1) * self.nodes, self.ranks)
    }

    /// Returns the same rows as (node, range of rows of that node's rank): the order in which
    /// received rows are assembled when heads are exchanged for rows.
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

    /// Returns the number of rows that a rank owns; per batch entry where there is a batch.
    pub fn owned_rows(&self, rank: usize) -> usize {
        self.pieces(rank).iter().map(|piece| piece.rows.len()).sum()
    }

    /// Returns a range of adjacent parts of all sequences, each divided into `of` parts.
    fn parts(&self, parts: Range<usize>, of: usize) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for (sequence, length) in self.sequences.lengths().iter().enumerate() {
            // The product of a length and a number of ranks may overflow a word.
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
