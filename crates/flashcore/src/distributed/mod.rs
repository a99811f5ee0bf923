//! Attention over a sequence that is spread over several GPUs: who owns which rows, who computes
//! what in which order, what is sent, and what is merged. Decided here once, without any transport:
//! `flashcore.distributed` in Python moves tensors as it says, and `flashcore scale` predicts from it.
//!
//! | file | its subject |
//! | --- | --- |
//! | `rows` | which rows of the sequences each rank owns |
//! | `block` | what of a mask is left between some queries and some keys |
//! | `heads` | which heads a rank attends with, where heads are spread too |
//! | `step` | the steps of a rank: what it receives, sends and computes |
//! | `volume` | bytes and tiles |
//! | `cache` | a cache for decoding, spread by positions |
//!
//! Ranks stand in a grid of [`nodes`](Distribution::nodes) times [`members`](Distribution::members).
//! Between nodes, heads are exchanged for rows: afterwards a node has all rows, and its own share of
//! the heads. Within a node, keys travel. One node alone is a ring or an all-gather; nodes of one
//! member each are an all-to-all.
//!
//! ```
//! use flashcore::Mask;
//! use flashcore::distributed::{Distribution, Heads, Order, Sequences, Variant};
//!
//! let heads = Heads { query: 32, key: 8, dim: 128, value_dim: 128, element_bytes: 2 };
//! let sequences = Sequences::Batch { count: 1, length: 65536 };
//! let distribution =
//!     Distribution::new(8, sequences, Mask::CAUSAL, Variant::Ring, Order::ZigZag, heads)?;
//!
//! // Rank 1 owns the second piece of sixteen and the second from the end.
//! let rows: Vec<_> = distribution.pieces(1).iter().map(|piece| piece.rows.clone()).collect();
//! assert_eq!(rows, [4096..8192, 57344..61440]);
//!
//! // First its own keys under the causal mask, then those of rank 0, of which it needs the first
//! // half, without a mask.
//! let steps = distribution.steps(1);
//! assert_eq!(steps[0].launches[0].mask, Mask::CAUSAL);
//! assert_eq!(steps[1].receive[0].rows, [0..4096]);
//! assert_eq!(steps[1].launches[0].mask, Mask::NONE);
//! # Ok::<(), flashcore::distributed::DistributionError>(())
//! ```

mod block;
mod cache;
mod heads;
mod rows;
mod step;
#[cfg(test)]
mod tests;
mod volume;

pub use cache::SpreadCache;
pub use heads::{HeadShare, Heads};
pub use rows::{Order, Piece, Sequences};
pub use step::{Block, Gathered, Launch, Rows, Step};
pub use volume::Volume;

use crate::problem::Mask;

/// How the work is spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Variant {
    /// A rank keeps its queries, and gets the keys of one rank after the other, while it computes
    /// with those it has.
    Ring,
    /// A rank keeps its queries, and gets all keys at once.
    AllGather,
    /// A rank gives the heads of others away, and gets its own of all rows.
    AllToAll,
    /// Heads are exchanged between so many nodes, keys travel within one.
    Hybrid {
        /// Into how many nodes the ranks are divided, in order.
        nodes: usize,
    },
}

/// Why there is no distribution.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DistributionError {
    /// Nobody is there.
    #[error("there are 0 ranks, expected one at least")]
    NoRanks,
    /// Nodes of different sizes.
    #[error("{ranks} ranks do not divide into {nodes} nodes")]
    Nodes {
        /// How many ranks there are.
        ranks: usize,
        /// Into how many nodes they were to be divided.
        nodes: usize,
    },
    /// Some would have nothing to do.
    #[error("{heads} heads cannot be spread over {nodes} ranks: a rank needs one at least")]
    TooFewHeads {
        /// How many query heads there are.
        heads: usize,
        /// Over how many ranks they were to be spread.
        nodes: usize,
    },
    /// Heads that make no groups.
    #[error("{query} heads are no multiple of {key} key heads")]
    Groups {
        /// How many query heads there are.
        query: usize,
        /// How many key heads there are.
        key: usize,
    },
    /// A mask that is more than a window.
    #[error("the mask {mask} is not one that can be spread: expected a window or a causal mask")]
    Mask {
        /// The mask.
        mask: Mask,
    },
}

/// Attention spread over ranks: the description from which all the rest follows. Every rank makes
/// the same one.
#[derive(Debug, Clone)]
pub struct Distribution {
    ranks: usize,
    nodes: usize,
    sequences: Sequences,
    mask: Mask,
    variant: Variant,
    order: Order,
    heads: Heads,
}

impl Distribution {
    /// Self-attention of these sequences over so many ranks.
    pub fn new(
        ranks: usize,
        sequences: Sequences,
        mask: Mask,
        variant: Variant,
        order: Order,
        heads: Heads,
    ) -> Result<Self, DistributionError> {
        if ranks == 0 {
            return Err(DistributionError::NoRanks);
        }
        let nodes = match variant {
            Variant::Ring | Variant::AllGather => 1,
            Variant::AllToAll => ranks,
            Variant::Hybrid { nodes } => nodes,
        };
        if nodes == 0 || !ranks.is_multiple_of(nodes) {
            return Err(DistributionError::Nodes { ranks, nodes });
        }
        if heads.key == 0 || !heads.query.is_multiple_of(heads.key) {
            return Err(DistributionError::Groups { query: heads.query, key: heads.key });
        }
        if heads.query < nodes {
            return Err(DistributionError::TooFewHeads { heads: heads.query, nodes });
        }
        if mask.chunk.is_some() || mask.function.is_some() {
            return Err(DistributionError::Mask { mask });
        }
        Ok(Distribution { ranks, nodes, sequences, mask, variant, order, heads })
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// How many nodes heads are spread over; one where they are not.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// How many ranks of a node keys travel between; one where they do not.
    pub fn members(&self) -> usize {
        self.ranks / self.nodes
    }

    /// The node of a rank, and which of its members it is: ranks are numbered node by node.
    pub fn place(&self, rank: usize) -> (usize, usize) {
        (rank / self.members(), rank % self.members())
    }

    /// The rank at a place.
    pub fn rank_at(&self, node: usize, member: usize) -> usize {
        node * self.members() + member
    }

    /// The sequences.
    pub fn sequences(&self) -> &Sequences {
        &self.sequences
    }

    /// The mask over whole sequences.
    pub fn mask(&self) -> Mask {
        self.mask
    }

    /// How the work is spread.
    pub fn variant(&self) -> Variant {
        self.variant
    }

    /// The heads and their sizes.
    pub fn heads(&self) -> Heads {
        self.heads
    }
}
