//! How many bytes a rank sends, and how many tiles it computes.

use super::{Block, Distribution, Rows};
use crate::problem::Mask;

/// Bytes that a rank sends in one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Volume {
    /// Bytes in the forward pass.
    pub forward: u64,
    /// Bytes in the backward pass.
    pub backward: u64,
}

impl Distribution {
    /// Returns what a rank sends. An all-gather counts as if every rank sent to every other.
    ///
    /// Keys and values are sent to the ranks that see them. In the backward pass they are sent once
    /// more, since they are not kept, and their gradients return to the owner in the element type
    /// of the tensors. Where heads are exchanged for rows, queries, keys and values are sent and
    /// the output returns; in the backward pass the gradient of the output is sent, and the
    /// gradients of the inputs return.
    pub fn sent(&self, rank: usize) -> Volume {
        let (node, member) = self.place(rank);
        let copies = self.sequences.copies();
        let mut volume = Volume::default();
        let rows = |rows: &[Rows]| rows.iter().map(|rows| rows.count() as u64).sum::<u64>();
        for step in self.steps(rank) {
            let (sent, received) = (rows(&step.send), rows(&step.receive));
            volume.forward += sent * self.key_bytes(node);
            volume.backward += (sent + received) * self.key_bytes(node);
        }
        for other in (0..self.nodes).filter(|other| *other != node) {
            let ours = self.owned_rows(rank) as u64;
            let theirs = self.owned_rows(self.rank_at(other, member)) as u64;
            let inputs = |node| self.query_bytes(node) + self.key_bytes(node);
            volume.forward += ours * inputs(other) + theirs * self.output_bytes(node);
            volume.backward += ours * self.output_bytes(other) + theirs * inputs(node);
        }
        Volume { forward: volume.forward * copies, backward: volume.backward * copies }
    }

    /// Returns the bytes of a row of keys and values, over the heads of a node.
    pub fn key_bytes(&self, node: usize) -> u64 {
        let dims = self.heads.dim + self.heads.value_dim;
        (self.head_share(node).key.len() * dims * self.heads.element_bytes) as u64
    }

    fn query_bytes(&self, node: usize) -> u64 {
        (self.head_share(node).query.len() * self.heads.dim * self.heads.element_bytes) as u64
    }

    fn output_bytes(&self, node: usize) -> u64 {
        (self.head_share(node).query.len() * self.heads.value_dim * self.heads.element_bytes) as u64
    }

    /// Counts the tiles of `tile` (queries, keys) in which anything is visible, over all heads and
    /// steps of a rank.
    pub fn tiles(&self, rank: usize, tile: [usize; 2]) -> u64 {
        let heads = self.head_share(self.place(rank).0).query.len() as u64;
        let mut tiles = 0;
        for step in self.steps(rank) {
            for launch in step.launches {
                tiles +=
                    launch.blocks.iter().map(|block| block.tiles(launch.mask, tile)).sum::<u64>();
            }
        }
        tiles * heads * self.sequences.copies()
    }
}

impl Block {
    /// Counts the tiles of (queries, keys) that one head of this block takes.
    pub fn tiles(&self, mask: Mask, [rows, columns]: [usize; 2]) -> u64 {
        let (queries, keys) = (self.queries.len(), self.keys.len());
        let (rows, columns) = (rows.max(1), columns.max(1));
        let of = |first: usize| {
            let last = (first + rows).min(queries) - 1;
            let begin = mask.visible_keys(first, queries, keys).start;
            let end = mask.visible_keys(last, queries, keys).end;
            (end.div_ceil(columns).saturating_sub(begin / columns)) as u64
        };
        (0..queries).step_by(rows).map(of).sum()
    }
}
