//! Which query rows and which keys a block of threads takes, and where they are.
//!
//! One block of threads, one tile of query rows of one head. [`Equal`] numbers
//! the tiles of sequences of one length; `ragged` has those of a schedule.
//!
//! Tiles are numbered with the rows moving fastest, so that blocks running at
//! the same time share the keys and values of few heads in the second-level
//! cache. Under a causal mask tiles are of unequal length, and whoever gets a
//! long one last is waited for. Heads go in groups then, as many as the cache
//! holds, and the longest tiles of a group come first: what is left at the end
//! is short.

use ptx::{Builder, Element, Expression, GlobalAddress, Pred, Reg, U32, U64, Value};

use super::Mma;
use super::copies::Pages;
use super::ragged::RaggedResults;
use crate::attention::MaskKind;
use crate::attention::visibility::{Blocks, Masked, RowTile, Visibility};
use crate::divisor::DivisorRegisters;
use crate::parameter::{Number, Tensor};
use crate::strides::Strides;

/// What one block of threads computes.
pub(super) struct Place {
    pub(super) sequence: Reg<U32>,
    pub(super) head: Reg<U32>,
    pub(super) first_row: Reg<U32>,
    pub(super) query_length: Reg<U32>,
    pub(super) key_length: Reg<U32>,
    pub(super) queries: HeadRows,
    pub(super) keys: HeadRows,
    pub(super) values: HeadRows,
    /// With pages: how rows of keys and values are found.
    pub(super) pages: Option<Pages>,
    pub(super) results: Results,
    /// Which part of the keys.
    pub(super) split: Option<Reg<U32>>,
    pub(super) walked: Walked,
}

/// Where results go. Found when they are there: addresses would be kept in
/// registers all along.
pub(super) enum Results {
    Equal(EqualResults),
    Ragged(RaggedResults),
}

/// What is known of a tile's results at its end.
pub(super) struct Found {
    pub(super) head: Reg<U32>,
    pub(super) first_row: Reg<U32>,
    pub(super) query_length: Reg<U32>,
    /// Of the head's first row.
    pub(super) output: HeadRows,
    /// The log-sum-exps, and which of them is that of the head's first row.
    pub(super) lse: Reg<GlobalAddress>,
    pub(super) first_lse: Reg<U64>,
}

impl Results {
    pub(super) fn find(&self, k: &mut Builder, element: Element) -> Found {
        match self {
            Results::Equal(results) => results.find(k, element),
            Results::Ragged(results) => results.find(k, element),
        }
    }
}

/// The results of an equal batch.
pub(super) struct EqualResults {
    output: Reg<GlobalAddress>,
    strides: Strides,
    lse: Reg<GlobalAddress>,
    sequence: Reg<U32>,
    head: Reg<U32>,
    heads: Reg<U32>,
    first_row: Reg<U32>,
    query_length: Reg<U32>,
    /// Of a split tile: which split, and sequences.
    split: Option<[Reg<U32>; 2]>,
}

impl EqualResults {
    fn find(&self, k: &mut Builder, element: Element) -> Found {
        // Which head of all sequences, and of all splits.
        let mut index = self.sequence * self.heads + self.head;
        if let Some([split, batches]) = self.split {
            index = split * batches * self.heads + index;
        }
        let index = k.eval(index);
        let first_lse = k.eval(index.convert::<U64>() * self.query_length.convert::<U64>());
        let first = match self.split {
            // Partial outputs have no gaps, and are found by number.
            Some(_) => self.output,
            None => {
                let zero = k.eval(0);
                let at = [self.sequence, zero, self.head];
                self.strides.row_address(k, self.output, element, at)
            }
        };
        let output = HeadRows { first, start: None, stride: self.strides.row };
        let EqualResults { head, first_row, query_length, lse, .. } = *self;
        Found { head, first_row, query_length, output, lse, first_lse }
    }
}

/// The rows of one head of one sequence.
#[derive(Clone, Copy)]
pub(super) struct HeadRows {
    /// Its first element, or that of the tensor's first row of it.
    pub(super) first: Reg<GlobalAddress>,
    /// From which row of the tensor on, then.
    pub(super) start: Option<Reg<U32>>,
    /// Elements from row to row.
    pub(super) stride: Reg<U64>,
}

impl HeadRows {
    /// The address of a row.
    pub(super) fn row(
        &self,
        k: &mut Builder,
        element: Element,
        row: Reg<U32>,
    ) -> Reg<GlobalAddress> {
        let row = match self.start {
            None => row,
            Some(start) => k.eval(start + row),
        };
        k.eval(self.first + row.convert::<U64>() * self.stride * element.bytes())
    }
}

/// The key blocks that the block of threads walks.
#[derive(Clone, Copy)]
pub(super) struct Walked {
    first: Reg<U32>,
    count: Reg<U32>,
}

/// What a warp does with the walked blocks, by how many of them are left.
pub(super) struct WarpBlocks {
    /// Its rows see some of these and fewer, not of more.
    pub(super) seen: Reg<U32>,
    /// With a window: they see nothing of so many.
    pub(super) unseen: Option<Reg<U32>>,
    /// Some row does not see all of more than these,
    unmasked: Reg<U32>,
    /// nor, with a window, of so many and fewer.
    masked: Option<Reg<U32>>,
}

impl WarpBlocks {
    /// Whether the block needs a mask when so many are left.
    pub(super) fn needs_mask(&self, remaining: Reg<U32>) -> Value<Pred> {
        let right = remaining.greater(self.unmasked);
        match self.masked {
            None => right,
            Some(masked) => right | remaining.at_most(masked),
        }
    }
}

impl Walked {
    /// The blocks that a tile of rows needs.
    pub(super) fn new(
        k: &mut Builder,
        mma: &Mma,
        visibility: &Visibility,
        first_row: Reg<U32>,
        [query_length, key_length]: [Reg<U32>; 2],
    ) -> Self {
        let rows = RowTile { first_row, rows: mma.query_rows(), query_length, key_length };
        let (end, _, first) = find_blocks(k, mma, visibility, &rows);
        match first {
            None => Walked { first: k.eval(0), count: end },
            Some(first) => Walked { first, count: k.eval(end - first) },
        }
    }

    /// So many of them, from `index` times that many on.
    fn part(self, k: &mut Builder, index: Reg<U32>, length: Reg<U32>) -> Self {
        let skipped = k.eval((index * length).minimum(self.count));
        let count = k.eval((self.count - skipped).minimum(length));
        Walked { first: k.eval(self.first + skipped), count }
    }
}

impl Place {
    /// How many key blocks are walked.
    pub(super) fn blocks(&self) -> Reg<U32> {
        self.walked.count
    }

    /// The first key of the block that is walked when `remaining` are left,
    /// itself among them. Without any it is no key.
    pub(super) fn first_key(&self, mma: &Mma, remaining: impl Into<Value<U32>>) -> Value<U32> {
        (self.walked.first + remaining.into() - 1) * mma.key_block
    }

    /// The walked blocks as the warp sees them whose rows begin at `first_row`.
    pub(super) fn of_warp(
        &self,
        k: &mut Builder,
        mma: &Mma,
        visibility: &Visibility,
        first_row: Reg<U32>,
    ) -> WarpBlocks {
        let Place { query_length, key_length, walked, .. } = *self;
        let rows = RowTile { first_row, rows: mma.warp_rows(), query_length, key_length };
        let (end, masks, first) = find_blocks(k, mma, visibility, &rows);
        let within = |k: &mut Builder, count: Value<U32>| {
            k.eval((count.maximum(walked.first) - walked.first).minimum(walked.count))
        };
        WarpBlocks {
            seen: within(k, end.into()),
            unseen: first.map(|first| within(k, first.into())),
            unmasked: within(k, masks.from),
            masked: masks.before.map(|before| within(k, before)),
        }
    }
}

/// The end of the blocks that some rows need, which of them need a mask, and with
/// a window the first.
fn find_blocks(
    k: &mut Builder,
    mma: &Mma,
    visibility: &Visibility,
    rows: &RowTile,
) -> (Reg<U32>, Masked, Option<Reg<U32>>) {
    let end = k.register();
    let first = visibility.is_window().then(|| k.register());
    let blocks = Blocks { size: mma.key_block, least: 0, first, end };
    let masked = visibility.find_blocks(k, rows, blocks);
    (end, masked, first)
}

/// Sequences of one length, each in a batch entry.
pub(super) struct Equal {
    /// Queries, keys and values.
    tensors: [(Reg<GlobalAddress>, Strides); 3],
    output: (Reg<GlobalAddress>, Strides),
    lse: Reg<GlobalAddress>,
    query_length: Reg<U32>,
    key_length: Reg<U32>,
}

impl Equal {
    pub(super) fn parameters(k: &mut Builder, split: bool) -> Self {
        let results = match split {
            true => [Tensor::PartialOutput, Tensor::PartialLse],
            false => [Tensor::Output, Tensor::Lse],
        };
        let [queries, keys, values] =
            [Tensor::Query, Tensor::Key, Tensor::Value].map(|tensor| tensor.address(k));
        let [output, lse] = results.map(|tensor| tensor.address(k));
        let [query_strides, key_strides, value_strides, output_strides] =
            [Tensor::Query, Tensor::Key, Tensor::Value, Tensor::Output]
                .map(|tensor| Strides::parameters(k, tensor));
        Equal {
            tensors: [(queries, query_strides), (keys, key_strides), (values, value_strides)],
            output: (output, output_strides),
            lse,
            query_length: Number::QueryLength.read(k),
            key_length: Number::KeyLength.read(k),
        }
    }

    /// The block's tile.
    pub(super) fn place(self, k: &mut Builder, mma: &Mma, visibility: &Visibility) -> Place {
        let heads = DivisorRegisters::parameters(k, Number::QueryHeads);
        let group = DivisorRegisters::parameters(k, Number::GroupSize);
        let block = k.block_index();
        let (tile, split) = if mma.split {
            let splits = DivisorRegisters::parameters(k, Number::Splits);
            let (tile, index) = splits.divide(k, block);
            let batches = Number::Batch.read(k);
            let length: Reg<U32> = Number::BlocksPerSplit.read(k);
            (tile, Some((index, batches, length)))
        } else {
            (block, None)
        };
        let (head_and_batch, row_tile) = if mma.rules.mask == MaskKind::Causal {
            let tiles_of_group = DivisorRegisters::parameters(k, Number::TilesPerGroup);
            let heads_of_group = DivisorRegisters::parameters(k, Number::HeadsPerGroup);
            let tiles_of_head: Reg<U32> = Number::TilesPerHead.read(k);
            let (group, tile) = tiles_of_group.divide(k, tile);
            let (shorter, member) = heads_of_group.divide(k, tile);
            let head_and_batch = k.eval(group * heads_of_group.number + member);
            (head_and_batch, k.eval(tiles_of_head - 1 - shorter))
        } else {
            DivisorRegisters::parameters(k, Number::TilesPerHead).divide(k, tile)
        };
        let (sequence, head) = heads.divide(k, head_and_batch);
        let (key_head, _) = group.divide(k, head);
        let first_row = k.eval(row_tile * mma.query_rows());

        let lengths = [self.query_length, self.key_length];
        let all = Walked::new(k, mma, visibility, first_row, lengths);
        let walked = match split {
            None => all,
            Some((index, _, length)) => all.part(k, index, length),
        };
        let zero = k.eval(0);
        let mut rows = |tensor: usize, head: Reg<U32>| {
            let (address, strides) = &self.tensors[tensor];
            let first = strides.row_address(k, *address, mma.element, [sequence, zero, head]);
            HeadRows { first, start: None, stride: strides.row }
        };
        let [queries, keys, values] = [rows(0, head), rows(1, key_head), rows(2, key_head)];
        let (output, strides) = self.output;
        let results = Results::Equal(EqualResults {
            output,
            strides,
            lse: self.lse,
            sequence,
            head,
            heads: heads.number,
            first_row,
            query_length: self.query_length,
            split: split.map(|(index, batches, _)| [index, batches]),
        });
        Place {
            sequence,
            head,
            first_row,
            query_length: self.query_length,
            key_length: self.key_length,
            queries,
            keys,
            values,
            pages: None,
            results,
            split: split.map(|(index, ..)| index),
            walked,
        }
    }
}
