//! Which query rows a query block of the workspace holds, for the kernels before and after the
//! products.
//!
//! In a ragged batch each sequence's rows begin with a query block of their own. The rows of
//! sequence `s`, which begins at row `start` of the tensor, begin at query block
//! `start / query_block + s`. That leaves room for every sequence's last, incomplete block without
//! adding up lengths. Some blocks in between belong to no sequence.

use ptx::{
    Builder, Expression, F32, GlobalAddress, Reg, S32, Select, SpecialRegister, U32, U64, Value,
};

use super::SumsLayout;
use crate::attention::Batch;
use crate::attention::sequences::{Span, clamp, entry_of, search};
use crate::divisor::DivisorRegisters;
use crate::parameter::{Number, Tensor};
use crate::strides::{Rows, Strided};

/// The launch's parameters for query blocks.
pub(super) struct RowBlocks {
    query_block: u32,
    heads: DivisorRegisters,
    sequences: Sequences,
}

enum Sequences {
    Equal { query_length: Reg<U32>, query_blocks: DivisorRegisters },
    Ragged { batch: Reg<U32>, queries: Span, entry_rows: Reg<U32>, query_blocks: Reg<U32> },
}

/// A query block.
pub(super) struct RowBlock {
    /// Its index in the workspace.
    pub(super) number: Reg<U32>,
    /// Its index in its sequence.
    block: Reg<U32>,
    pub(super) head: Reg<U32>,
    /// The number of queries of its sequence. A block that belongs to no sequence lies beyond it.
    pub(super) query_length: Reg<U32>,
    place: RowPlace,
}

enum RowPlace {
    Equal { batch: Reg<U32>, head_and_batch: Reg<U32> },
    Ragged { sequence: Reg<U32>, start: Reg<U32> },
}

/// A tensor with a vector for each query and head: strided by batch entry, or one list of rows.
pub(crate) enum Vectors {
    Strided(Strided),
    Rows(Rows),
}

/// The log-sum-exps of the forward pass, and their gradient if they have one.
pub(super) struct LogSums {
    address: Reg<GlobalAddress>,
    gradient: Option<Reg<GlobalAddress>>,
    /// In a ragged batch, elements from one sequence to the next, and from one head to the next.
    strides: Option<[Reg<U32>; 2]>,
}

/// Returns the index of this thread block, counted from the last one. The main kernel works through
/// the workspace from the first query blocks to the last. So the kernel before it writes those
/// first blocks last, and the kernel after it reads those last blocks first, while they are still
/// in L2.
pub(super) fn index_from_last(k: &mut Builder) -> Reg<U32> {
    let (blocks, index) = (k.special(SpecialRegister::GridExtent(ptx::Axis::X)), k.block_index());
    k.eval(blocks - 1 - index)
}

impl RowBlocks {
    pub(super) fn parameters(k: &mut Builder, sums: &SumsLayout, batch: Batch) -> Self {
        let query_block = sums.query_block;
        match batch {
            Batch::Equal => {
                let query_length = Number::QueryLength.read(k);
                let query_blocks = DivisorRegisters::parameters(k, Number::QueryBlocks);
                let heads = DivisorRegisters::parameters(k, Number::QueryHeads);
                let sequences = Sequences::Equal { query_length, query_blocks };
                RowBlocks { query_block, heads, sequences }
            }
            _ => RowBlocks {
                query_block,
                heads: DivisorRegisters::parameters(k, Number::QueryHeads),
                sequences: Sequences::Ragged {
                    batch: Number::Batch.read(k),
                    queries: Span::queries(k),
                    entry_rows: Tensor::Query.sequence_rows(k),
                    query_blocks: Number::QueryBlocks.read(k),
                },
            },
        }
    }

    /// Returns the query block for the index of a thread block. Equal lengths go in the order of
    /// the workspace. A ragged batch takes the same rows of all heads one after the other: they are
    /// neighbours in memory, and the main kernel takes a sequence's heads together too.
    pub(super) fn find(&self, k: &mut Builder, index: Reg<U32>) -> RowBlock {
        match &self.sequences {
            Sequences::Equal { query_length, query_blocks } => {
                let (rest, block) = query_blocks.divide(k, index);
                let (batch, head) = self.heads.divide(k, rest);
                let place = RowPlace::Equal { batch, head_and_batch: rest };
                RowBlock { number: index, block, head, query_length: *query_length, place }
            }
            Sequences::Ragged { batch, queries, entry_rows, query_blocks } => {
                let (block, head) = self.heads.divide(k, index);
                let number = k.eval(head * *query_blocks + block);
                // The last sequence whose query blocks begin no later than this one.
                let sequence = search(k, *batch, block, |k, sequence| {
                    let otherwise = k.eval((sequence * *entry_rows).reinterpret::<S32>());
                    let start = entry_of(k, queries.starts, sequence, otherwise);
                    let start = clamp(k, start, queries.rows);
                    start / self.query_block + sequence
                });
                let otherwise = k.eval((sequence * *entry_rows).reinterpret::<S32>());
                let (start, query_length) = queries.from(k, sequence, otherwise);
                let first = k.eval(start / self.query_block + sequence);
                let before = block.less(first);
                let query_length = k.eval(before.select::<U32>(0u32, query_length));
                let block = k.eval(block - first);
                let place = RowPlace::Ragged { sequence, start };
                RowBlock { number, block, head, query_length, place }
            }
        }
    }
}

impl RowBlock {
    /// Returns a query block of one head of a sequence in a ragged batch, whose queries begin at
    /// row `start` of the tensor.
    pub(super) fn ragged(
        number: Reg<U32>,
        [head, block]: [Reg<U32>; 2],
        sequence: Reg<U32>,
        [start, query_length]: [Reg<U32>; 2],
    ) -> Self {
        RowBlock { number, block, head, query_length, place: RowPlace::Ragged { sequence, start } }
    }

    /// Returns the first row of the block within its sequence.
    pub(super) fn first_row(&self, query_block: u32) -> Value<U32> {
        self.block * query_block
    }
}

impl Vectors {
    pub(crate) fn parameters(k: &mut Builder, tensor: Tensor, batch: Batch) -> Self {
        match batch {
            Batch::Equal => Vectors::Strided(Strided::parameters(k, tensor)),
            _ => Vectors::Rows(Rows::parameters(k, tensor)),
        }
    }

    /// Returns the address of a row's vector.
    pub(super) fn row(
        &self,
        k: &mut Builder,
        element: ptx::Element,
        block: &RowBlock,
        row: Reg<U32>,
    ) -> Reg<GlobalAddress> {
        match (self, &block.place) {
            (Vectors::Strided(tensor), RowPlace::Equal { batch, .. }) => {
                tensor.row(k, element, [*batch, row, block.head])
            }
            (Vectors::Rows(tensor), RowPlace::Ragged { start, .. }) => {
                let row = k.eval(*start + row);
                tensor.row_address(k, element, row, block.head)
            }
            _ => unreachable!("tensors and blocks are of one batch"),
        }
    }
}

impl Vectors {
    /// Returns the bytes from a row to the row this many further.
    pub(super) fn row_bytes(&self, k: &mut Builder, element: ptx::Element, rows: u32) -> Reg<U64> {
        let stride = match self {
            Vectors::Strided(tensor) => tensor.strides.row,
            Vectors::Rows(tensor) => tensor.row,
        };
        k.eval(stride * u64::from(rows * element.bytes()))
    }
}

impl LogSums {
    pub(super) fn parameters(k: &mut Builder, gradient: bool, batch: Batch) -> Self {
        LogSums {
            address: Tensor::Lse.address(k),
            gradient: gradient.then(|| Tensor::LseGradient.address(k)),
            strides: (batch != Batch::Equal)
                .then(|| [Number::LseBatchStride.read(k), Number::LseHeadStride.read(k)]),
        }
    }

    /// Loads the log-sum-exp of a row, and its gradient.
    pub(super) fn load(
        &self,
        k: &mut Builder,
        block: &RowBlock,
        row: Reg<U32>,
    ) -> (Reg<F32>, Option<Reg<F32>>) {
        let index = match (&self.strides, &block.place) {
            (None, RowPlace::Equal { head_and_batch, .. }) => {
                k.eval(*head_and_batch * block.query_length + row)
            }
            (Some([of_sequence, of_head]), RowPlace::Ragged { sequence, start, .. }) => {
                // Packed queries and their log-sum-exps begin at the same row.
                let packed = of_sequence.equals(0);
                let first = packed.select::<U32>(*start, *sequence * *of_sequence);
                k.eval(block.head * *of_head + first + row)
            }
            _ => unreachable!("log-sum-exps and blocks are of one batch"),
        };
        let offset = index.convert::<U64>() * 4;
        let lse = k.load(self.address + offset.clone());
        (lse, self.gradient.map(|gradient| k.load(gradient + offset)))
    }
}
