//! Tiles of a ragged (variable-length) batch, from the schedule that the
//! [`Sequencer`](crate::Sequencer) wrote.
//!
//! The grid has one thread block for each record and head, heads varying fastest: thread blocks
//! that share keys run at the same time, and the longest tiles start first. A launch has room for
//! as many records as a batch of its size can have; thread blocks beyond the actual number exit at
//! once.

use ptx::{Builder, Element, Expression, GlobalAddress, Reg, U32, U64};

use super::Mma;
use super::copies::Pages;
use super::work_tile::{Found, HeadRows, KeyBlockRange, Results, WorkTile};
use crate::attention::Batch;
use crate::attention::sequences::Places;
use crate::attention::visibility::Visibility;
use crate::divisor::DivisorRegisters;
use crate::parameter::{Axis, Number, Tensor, Workspace};
use crate::sequencer::{COUNT_BYTE, RECORD_BYTES, RECORDS_BYTE};
use crate::strides::Rows;

/// The records of a schedule.
#[derive(Clone, Copy)]
struct Records {
    schedule: Reg<GlobalAddress>,
    heads: DivisorRegisters,
}

impl Records {
    /// Returns the record and the head of this thread block.
    fn of_block(&self, k: &mut Builder) -> (Reg<U32>, Reg<U32>) {
        let block = k.block_index();
        self.heads.divide(k, block)
    }

    /// Reads one half of a record: four words.
    fn read(&self, k: &mut Builder, record: Reg<U32>, half: u32) -> [Reg<U32>; 4] {
        let offset = record.convert::<U64>() * u64::from(RECORD_BYTES);
        let at = k.eval(self.schedule + offset);
        let words: [Reg<U32>; 4] =
            k.load_vector(at + (RECORDS_BYTE + half * RECORD_BYTES / 2), Default::default());
        // Broadcast from lane 0, so that ptxas knows that the values are uniform in the warp.
        words.map(|word| k.shuffle_index(word, 0))
    }
}

/// Where the results of a ragged batch go. The epilogue reads the record again rather than keep its
/// values in registers.
pub(super) struct RaggedResults {
    output: Rows,
    lse: Reg<GlobalAddress>,
    lse_head_stride: Reg<U32>,
    records: Records,
}

impl RaggedResults {
    pub(super) fn find(&self, k: &mut Builder, element: Element) -> Found {
        let (record, head) = self.records.of_block(k);
        let [_, first_row, _, query_length] = self.records.read(k, record, 0);
        let [_, _, output_start, lse_start] = self.records.read(k, record, 1);
        let first = self.output.row_address(k, element, output_start, head);
        let of_head = head.convert::<U64>() * self.lse_head_stride.convert::<U64>();
        Found {
            head,
            first_row,
            query_length,
            output: HeadRows { first, start: None, stride: self.output.row },
            lse: self.lse,
            first_lse: k.eval(of_head + lse_start.convert::<U64>()),
        }
    }
}

/// The launch's parameters for a ragged batch.
pub(super) struct Ragged {
    /// Queries, keys and values.
    tensors: [Rows; 3],
    results: RaggedResults,
    group: DivisorRegisters,
    /// With a page table: the pages of sequences, and the elements from page to page of keys and of
    /// values.
    pages: Option<(Places, [Reg<U64>; 2])>,
}

impl Ragged {
    pub(super) fn parameters(k: &mut Builder, batch: Batch) -> Self {
        Ragged {
            tensors: [Tensor::Query, Tensor::Key, Tensor::Value]
                .map(|tensor| Rows::parameters(k, tensor)),
            results: RaggedResults {
                output: Rows::parameters(k, Tensor::Output),
                lse: Tensor::Lse.address(k),
                lse_head_stride: Number::LseHeadStride.read(k),
                records: Records {
                    schedule: Workspace::Schedule.address(k),
                    heads: DivisorRegisters::parameters(k, Number::QueryHeads),
                },
            },
            group: DivisorRegisters::parameters(k, Number::GroupSize),
            pages: (batch == Batch::Paged).then(|| {
                let strides =
                    [Tensor::Key, Tensor::Value].map(|tensor| tensor.stride(k, Axis::Batch));
                (Places::in_pages(k), strides)
            }),
        }
    }

    /// Emits `body` for the tile of this thread block, under the condition that there is one.
    pub(super) fn with_tile(
        self,
        k: &mut Builder,
        mma: &Mma,
        visibility: &Visibility,
        body: impl FnOnce(&mut Builder, WorkTile),
    ) {
        let records = self.results.records;
        let (record, _) = records.of_block(k);
        let count = k.load::<U32, _>(records.schedule + COUNT_BYTE);
        let count = k.shuffle_index(count, 0);
        k.if_(record.less(count), |k| {
            let tile = self.tile(k, mma, visibility);
            body(k, tile);
        });
    }

    fn tile(self, k: &mut Builder, mma: &Mma, visibility: &Visibility) -> WorkTile {
        let records = self.results.records;
        let (record, head) = records.of_block(k);
        let [sequence, first_row, query_start, query_length] = records.read(k, record, 0);
        let [key_start, key_length, ..] = records.read(k, record, 1);
        let (key_head, _) = self.group.divide(k, head);

        let zero = k.eval::<U32>(0);
        let [queries, keys, values] = &self.tensors;
        // A head is known to be the same in all threads, what a record says is not. So the base
        // address depends on the head alone, and `start` is added for each row.
        let mut rows = |tensor: &Rows, start: Option<Reg<U32>>, head: Reg<U32>| {
            let first = tensor.row_address(k, mma.element, zero, head);
            HeadRows { first, start, stride: tensor.row }
        };
        let queries = rows(queries, Some(query_start), head);
        // With a page table the sequence's rows are found through it; `key_start` is then the left
        // padding.
        let start = self.pages.is_none().then_some(key_start);
        let [keys, values] = [keys, values].map(|tensor| rows(tensor, start, key_head));
        let pages = self
            .pages
            .map(|(places, strides)| Pages::new(k, mma, places, sequence, key_start, strides));
        let key_blocks =
            KeyBlockRange::new(k, mma, visibility, first_row, [query_length, key_length]);
        WorkTile {
            sequence,
            head,
            first_row,
            query_length,
            key_length,
            queries,
            keys,
            values,
            pages,
            results: Results::Ragged(self.results),
            split: None,
            key_blocks,
        }
    }
}
