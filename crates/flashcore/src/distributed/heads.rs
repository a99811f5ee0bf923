//! Which heads a rank computes, where heads are spread over nodes.

use std::ops::Range;

use super::Distribution;

/// The numbers of heads, and their sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Heads {
    /// Number of query heads.
    pub query: usize,
    /// Number of key/value heads; divides the number of query heads.
    pub key: usize,
    /// Head dim of queries and keys.
    pub dim: usize,
    /// Head dim of values.
    pub value_dim: usize,
    /// Bytes per element.
    pub element_bytes: usize,
}

/// The heads of one node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HeadShare {
    /// The query heads.
    pub query: Range<usize>,
    /// The indices of the node's key heads. Where the node does not have whole groups, a key head
    /// is listed once for each query head that reads it.
    pub key: Vec<usize>,
}

impl Distribution {
    /// Returns the heads that the ranks of a node compute.
    ///
    /// Nodes have whole groups as long as there are enough of them. Otherwise several nodes have
    /// the same key head, each with some of the query heads that read it.
    pub fn head_share(&self, node: usize) -> HeadShare {
        let heads = self.heads;
        let (nodes, group) = (self.nodes, heads.query / heads.key);
        if heads.key >= nodes {
            let key = node * heads.key / nodes..(node + 1) * heads.key / nodes;
            return HeadShare { query: key.start * group..key.end * group, key: key.collect() };
        }
        let query = node * heads.query / nodes..(node + 1) * heads.query / nodes;
        let (first, last) = (query.start / group, (query.end - 1) / group);
        let key = if first == last {
            vec![first]
        } else {
            query.clone().map(|head| head / group).collect()
        };
        HeadShare { query, key }
    }
}
