//! The backward pass around the main kernel, which has the matrix products, on any hardware: the
//! layout in which it accumulates `dQ`, and the kernels that run before and after it.

use ptx::{Element, Target};

use super::{Rounding, RowSums, SinkGradients};
use crate::attention::{Batch, MaskKind, Rules};

/// What a pass computes, and into which blocks its main kernel divides queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackwardPass {
    /// The target architecture.
    pub target: Target,
    /// The element type of all tensors.
    pub element: Element,
    /// The width of queries and keys.
    pub head_dim: u32,
    /// The width of values and outputs.
    pub value_head_dim: u32,
    /// The mask, and the rules that change scores.
    pub rules: Rules,
    /// Queries of a query block.
    pub query_block: u32,
    /// Keys of a key block.
    pub key_block: u32,
    /// Whether `dQ` is added in one fixed order.
    pub deterministic: bool,
    /// Whether the main kernel also clears and rounds part of the `dQ` sums.
    pub clear_and_round: bool,
    /// How sequences are stored.
    pub batch: Batch,
}

/// Layout of the `f32` sums of `dQ`: for each query head its query blocks, each cut into parts of
/// some rows or of 64 columns. A part has the layout of its `dQ^T` accumulator in the registers of
/// a warpgroup: four registers of thread 0, the same four of thread 1 and so on, then the next
/// four. On targets without vector reductions it is one register of all threads at a time instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SumsLayout {
    /// Query rows of a query block.
    pub query_block: u32,
    /// Columns: the head dimension rounded up to a multiple of 64.
    pub columns: u32,
    /// Query rows of a part.
    pub part_queries: u32,
}

impl SumsLayout {
    /// Bytes of four registers of every thread of a warpgroup.
    pub(crate) const REGISTERS_BYTES: u32 = 4 * 4 * 128;

    /// Returns the bytes of a query block.
    pub const fn block_bytes(&self) -> u32 {
        4 * self.query_block * self.columns
    }

    /// Returns the number of parts of a query block.
    pub(super) const fn parts(&self) -> u32 {
        self.query_block / self.part_queries * (self.columns / 64)
    }

    /// Returns whether a part has all rows of a query block and 64 of its columns.
    pub(super) const fn by_columns(&self) -> bool {
        self.part_queries == self.query_block
    }

    /// Returns the bytes of a part.
    pub(super) const fn part_bytes(&self) -> u32 {
        self.block_bytes() / self.parts()
    }
}

impl BackwardPass {
    /// Returns the layout of the `dQ` sums.
    pub fn sums_layout(&self) -> SumsLayout {
        let columns = self.head_dim.next_multiple_of(64);
        // The warpgroups of the Hopper kernel each compute half of the columns, or half of the
        // queries where there are only 64 columns. With values wider than 128, one computes all of
        // those.
        let halves = columns == 64 && self.value_head_dim <= 128;
        let part_queries = self.query_block / if halves { 2 } else { 1 };
        SumsLayout { query_block: self.query_block, columns, part_queries }
    }

    /// Returns whether the grid interleaves the key blocks of several heads: where additions come
    /// in a fixed order, and where walks have unequal lengths, so that the longest walks of several
    /// heads come first.
    pub fn takes_heads_together(&self) -> bool {
        let unequal = self.rules.mask == MaskKind::Causal || self.takes_block_lists();
        self.batch == Batch::Equal && (self.deterministic || unequal)
    }

    /// Returns whether walks follow lists of query blocks: where the mask is a function and all
    /// sequences have the same length.
    pub fn takes_block_lists(&self) -> bool {
        self.batch == Batch::Equal && self.rules.mask_function.is_some()
    }

    /// Returns the keys of a tile, where tiles of a ragged batch clear and round shares of the `dQ`
    /// sums.
    pub fn shares(&self) -> Option<u32> {
        (self.clear_and_round && self.batch != Batch::Equal).then_some(self.key_block)
    }

    /// Returns the bytes of a query block's statistics: two `f32` for each row.
    pub const fn statistics_bytes(&self) -> u32 {
        2 * 4 * self.query_block
    }

    /// Returns the kernel that runs before the main kernel, without a gradient of the log-sum-exps.
    pub fn row_sums(&self) -> RowSums {
        RowSums {
            target: self.target,
            element: self.element,
            lse_gradient: false,
            value_head_dim: self.value_head_dim,
            sums: self.sums_layout(),
            counters: self.deterministic || (self.clear_and_round && self.batch == Batch::Equal),
            shares: self.shares(),
            batch: self.batch,
        }
    }

    /// Returns the kernel that runs after the main kernel.
    pub fn rounding(&self) -> Rounding {
        Rounding {
            target: self.target,
            element: self.element,
            head_dim: self.head_dim,
            sums: self.sums_layout(),
            shares: self.shares(),
            batch: self.batch,
        }
    }

    /// Returns the kernel that runs last, where there are sinks, without a gradient of the
    /// log-sum-exps.
    pub fn sink_gradients(&self) -> Option<SinkGradients> {
        self.rules.sinks.then_some(SinkGradients {
            target: self.target,
            mask: self.rules.mask,
            lse_gradient: false,
            query_block: self.query_block,
            batch: self.batch,
        })
    }
}
