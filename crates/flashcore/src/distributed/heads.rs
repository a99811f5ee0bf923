//! Which heads a rank attends with, where heads are spread too.

use std::ops::Range;

use super::Distribution;

/// How many heads there are, and how large.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Heads {
    /// Heads of queries.
    pub query: usize,
    /// Heads of keys and values, which divide those of queries.
    pub key: usize,
    /// The head dim of queries and keys.
    pub dim: usize,
    /// The head dim of values.
    pub value_dim: usize,
    /// Bytes of a number.
    pub element_bytes: usize,
}

/// The heads of one node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HeadShare {
    /// The heads of queries.
    pub query: Range<usize>,
    /// For each head of keys that the node has, which one it is. Where the groups are not whole, a
    /// key head stands here once for each query head that reads it.
    pub key: Vec<usize>,
}

impl Distribution {
    /// The heads that the ranks of a node attend with.
    ///
    /// Whole groups as long as there are enough of them. Otherwise several nodes have the same key
    /// head, and some of the query heads that read it.
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
