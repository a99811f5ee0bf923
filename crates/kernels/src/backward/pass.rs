//! The backward pass around a kernel that has the products, whatever hardware that one is for: where it
//! adds up `dQ`, and which kernels come before and after it.

use ptx::{Element, Target};

use super::{Rounding, RowSums, SinkGradients};
use crate::attention::{Batch, MaskKind, Rules};

/// What a pass computes, and how its products cut queries and keys into blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackwardPass {
    /// The architecture.
    pub target: Target,
    /// The element of all tensors.
    pub element: Element,
    /// The width of queries and keys.
    pub head_dim: u32,
    /// The width of values and outputs.
    pub value_head_dim: u32,
    /// Which keys a query sees, and what changes scores.
    pub rules: Rules,
    /// Queries of a block.
    pub query_block: u32,
    /// Keys of a block.
    pub key_block: u32,
    /// Whether `dQ` is added in one order.
    pub deterministic: bool,
    /// Whether the products' kernel clears and rounds sums of `dQ` too.
    pub housekeeping: bool,
    /// How sequences lie.
    pub batch: Batch,
}

/// Where the sums of `dQ` lie: for each query head, block after block of query rows; of a block,
/// part after part of some rows or of 64 columns. A part lies as its accumulator does in the registers
/// of a warpgroup's threads, four registers of a thread at a time. Where nothing adds four numbers at
/// once, each register of all threads at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SumsLayout {
    /// Query rows of a block.
    pub query_block: u32,
    /// Columns that there is room for: a multiple of 64.
    pub columns: u32,
    /// Query rows of a part.
    pub part_queries: u32,
}

impl SumsLayout {
    /// Bytes of four registers of each thread of a warpgroup.
    pub(crate) const REGISTERS_BYTES: u32 = 4 * 4 * 128;

    /// Bytes of a block of query rows.
    pub const fn block_bytes(&self) -> u32 {
        4 * self.query_block * self.columns
    }

    /// Parts of a block.
    pub(super) const fn parts(&self) -> u32 {
        self.query_block / self.part_queries * (self.columns / 64)
    }

    /// Whether parts have all rows and some columns.
    pub(super) const fn by_columns(&self) -> bool {
        self.part_queries == self.query_block
    }

    /// Bytes of a part.
    pub(super) const fn part_bytes(&self) -> u32 {
        self.block_bytes() / self.parts()
    }
}

impl BackwardPass {
    /// Where the sums of `dQ` lie.
    pub fn sums_layout(&self) -> SumsLayout {
        let columns = self.head_dim.next_multiple_of(64);
        // Warpgroups of the Hopper kernel share the columns, or the queries where there are not
        // enough columns. Where values are wide one of them has all.
        let halves = columns == 64 && self.value_head_dim <= 128;
        let part_queries = self.query_block / if halves { 2 } else { 1 };
        SumsLayout { query_block: self.query_block, columns, part_queries }
    }

    /// Whether blocks of the grid take key blocks of several heads together: where additions come in
    /// one order, and where walks are of unequal lengths, so that the longest of several heads come
    /// first.
    pub fn takes_heads_together(&self) -> bool {
        let unequal = self.rules.mask == MaskKind::Causal || self.takes_block_lists();
        self.batch == Batch::Equal && (self.deterministic || unequal)
    }

    /// Whether walks go by lists: where a mask is a function, and all sequences have one length.
    pub fn takes_block_lists(&self) -> bool {
        self.batch == Batch::Equal && self.rules.mask_function.is_some()
    }

    /// Bytes of the statistics of a block of query rows: two numbers for each.
    pub const fn statistics_bytes(&self) -> u32 {
        2 * 4 * self.query_block
    }

    /// What comes before the products.
    pub fn row_sums(&self) -> RowSums {
        RowSums {
            target: self.target,
            element: self.element,
            value_head_dim: self.value_head_dim,
            sums: self.sums_layout(),
            counters: self.deterministic || self.housekeeping,
            batch: self.batch,
        }
    }

    /// What comes after them.
    pub fn rounding(&self) -> Rounding {
        Rounding {
            target: self.target,
            element: self.element,
            head_dim: self.head_dim,
            sums: self.sums_layout(),
            batch: self.batch,
        }
    }

    /// What comes last, where there are sinks.
    pub fn sink_gradients(&self) -> Option<SinkGradients> {
        self.rules.sinks.then_some(SinkGradients {
            target: self.target,
            mask: self.rules.mask,
            query_block: self.query_block,
            batch: self.batch,
        })
    }
}
