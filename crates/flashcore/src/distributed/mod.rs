//! Attention over a sequence that is spread over several GPUs (context parallelism): which rank
//! owns which rows, what it computes in which order, what is sent, and what is merged. The
//! decisions are made here, without any transport: `flashcore.distributed` in Python moves tensors
//! accordingly, and `flashcore scale` predicts times from them.
//!
//! | file | its subject |
//! | --- | --- |
//! | `rows` | which rows of the sequences each rank owns |
//! | `block` | the part of a mask between some queries and some keys |
//! | `heads` | which heads a rank computes, where heads are spread too |
//! | `step` | the steps of a rank: what it receives, sends and computes |
//! | `volume` | counts of bytes and tiles |
//! | `cache` | a KV cache for decoding, spread by position |
//!
//! Ranks form a grid of [`nodes`](Distribution::nodes) by [`members`](Distribution::members).
//! Between nodes, heads are exchanged for rows: afterwards a node has all rows of its own share of
//! the heads. Within a node, keys are sent from member to member. A single node is a ring or an
//! all-gather; nodes of one member each are an all-to-all.
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

/// How the work is spread over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Variant {
    /// A rank keeps its queries and receives the keys of one rank after the other, while it
    /// computes with those it has.
    Ring,
    /// A rank keeps its queries and receives all keys at once.
    AllGather,
    /// A rank sends the rows of the other ranks' heads away, and receives all rows of its own
    /// heads.
    AllToAll,
    /// Heads are exchanged between nodes, keys are sent within a node.
    Hybrid {
        /// Number of nodes into which the ranks are divided, in order.
        nodes: usize,
    },
}

/// Why a distribution is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DistributionError {
    /// There are no ranks.
    #[error("there are 0 ranks, expected one at least")]
    NoRanks,
    /// The ranks do not divide evenly into nodes.
    #[error("{ranks} ranks do not divide into {nodes} nodes")]
    Nodes {
        /// Number of ranks.
        ranks: usize,
        /// Requested number of nodes.
        nodes: usize,
    },
    /// There are fewer query heads than nodes.
    #[error("{heads} heads cannot be spread over {nodes} ranks: a rank needs one at least")]
    TooFewHeads {
        /// Number of query heads.
        heads: usize,
        /// Number of nodes over which they were to be spread.
        nodes: usize,
    },
    /// The query heads are not a multiple of the key heads.
    #[error("{query} heads are no multiple of {key} key heads")]
    Groups {
        /// Number of query heads.
        query: usize,
        /// Number of key heads.
        key: usize,
    },
    /// The mask has chunks or a function, which cannot be spread.
    #[error("the mask {mask} is not one that can be spread: expected a window or a causal mask")]
    Mask {
        /// The mask that was given.
        mask: Mask,
    },
}

/// A description of attention spread over ranks, from which every rank derives the same decisions.
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
    /// Describes self-attention of these sequences over `ranks` ranks.
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

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the number of nodes over which heads are spread; 1 where they are not.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Returns the number of ranks per node, between which keys are sent; 1 where they are not.
    pub fn members(&self) -> usize {
        self.ranks / self.nodes
    }

    /// Returns the node of a rank and its index among the node's members: ranks are numbered node
    /// by node.
    pub fn place(&self, rank: usize) -> (usize, usize) {
        (rank / self.members(), rank % self.members())
    }

    /// Returns the rank of a member of a node.
    pub fn rank_at(&self, node: usize, member: usize) -> usize {
        node * self.members() + member
    }
}
