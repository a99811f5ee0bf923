//! Which query rows and keys a thread block takes, and where they are in memory.
//!
//! Each thread block has one tile of query rows of one head. [`Equal`] numbers the tiles of
//! sequences of equal length; `ragged` takes them from a schedule.
//!
//! Row tiles of a head are numbered consecutively, so that thread blocks that run at the same time
//! share the keys and values of few heads in L2. Under a causal mask tiles have unequal lengths,
//! and a long one that starts last delays the end of the kernel. Heads are then taken in groups, as
//! many as the L2 holds, with the longest tiles of a group first, so that the last tiles to start
//! are short.

use ptx::{Builder, Element, Expression, GlobalAddress, Pred, Reg, U32, U64, Value};

use super::Mma;
use super::copies::Pages;
use super::ragged::RaggedResults;
use crate::attention::MaskKind;
use crate::attention::function::lists::{self, BlockList, BlockLists};
use crate::attention::visibility::{Blocks, Masked, RowTile, Visibility};
use crate::divisor::DivisorRegisters;
use crate::parameter::{Number, Tensor};
use crate::strides::Strides;

/// The tile of a thread block: its rows, its keys, and where its results go.
pub(super) struct WorkTile {
    pub(super) sequence: Reg<U32>,
    pub(super) head: Reg<U32>,
    pub(super) first_row: Reg<U32>,
    pub(super) query_length: Reg<U32>,
    pub(super) key_length: Reg<U32>,
    pub(super) queries: HeadRows,
    pub(super) keys: HeadRows,
    pub(super) values: HeadRows,
    /// With a page table: how rows of keys and values are found.
    pub(super) pages: Option<Pages>,
    pub(super) results: Results,
    /// With split-KV: which split of the keys this is.
    pub(super) split: Option<Reg<U32>>,
    pub(super) key_blocks: KeyBlockRange,
}

/// Where results go. Addresses are computed in the epilogue, since otherwise they would occupy
/// registers throughout the loop.
pub(super) enum Results {
    Equal(EqualResults),
    Ragged(RaggedResults),
}

/// The addresses of a tile's results, computed in the epilogue.
pub(super) struct Found {
    pub(super) head: Reg<U32>,
    pub(super) first_row: Reg<U32>,
    pub(super) query_length: Reg<U32>,
    /// The output rows of the head.
    pub(super) output: HeadRows,
    /// The log-sum-exps, then the index of that of the head's first row.
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

/// The results of equal-length sequences.
pub(super) struct EqualResults {
    output: Reg<GlobalAddress>,
    strides: Strides,
    lse: Reg<GlobalAddress>,
    sequence: Reg<U32>,
    head: Reg<U32>,
    heads: Reg<U32>,
    first_row: Reg<U32>,
    query_length: Reg<U32>,
    /// With split-KV: which split this is, and the number of sequences.
    split: Option<[Reg<U32>; 2]>,
}

impl EqualResults {
    fn find(&self, k: &mut Builder, element: Element) -> Found {
        // The index of the head over all sequences, and over all splits.
        let mut index = self.sequence * self.heads + self.head;
        if let Some([split, batches]) = self.split {
            index = split * batches * self.heads + index;
        }
        let index = k.eval(index);
        let first_lse = k.eval(index.convert::<U64>() * self.query_length.convert::<U64>());
        let first = match self.split {
            // Partial outputs are contiguous, and addressed by the row's index.
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
    /// The head's first element in the sequence's first row or, with `start`, in the tensor's.
    pub(super) first: Reg<GlobalAddress>,
    /// The row of the tensor at which the sequence begins, where `first` does not include it.
    pub(super) start: Option<Reg<U32>>,
    /// Elements from row to row.
    pub(super) stride: Reg<U64>,
}

impl HeadRows {
    /// Returns the address of a row.
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

/// The range of key blocks that a thread block walks.
#[derive(Clone, Copy)]
pub(super) struct KeyBlockRange {
    first: Reg<U32>,
    count: Reg<U32>,
    /// With a mask function, the tile's list of key blocks; `first` is then an index into it.
    list: Option<BlockList>,
}

/// How a warp treats each key block of the walk, by the number of blocks that remain (which falls
/// to 1 at the last block).
pub(super) struct WarpBlocks {
    /// Blocks with more than this many remaining are seen by none of the warp's rows.
    pub(super) seen: Reg<U32>,
    /// With a window: blocks with this many or fewer remaining are seen by none of the rows either.
    pub(super) unseen: Option<Reg<U32>>,
    /// Blocks with more than this many remaining need a mask: some row does not see all of their
    /// keys.
    unmasked: Reg<U32>,
    /// With a window: blocks with this many or fewer remaining need a mask too.
    masked: Option<Reg<U32>>,
}

impl WarpBlocks {
    /// Returns whether a block needs a mask. `remaining` includes it; where the tile has a list, it
    /// is the block's number plus one.
    pub(super) fn needs_mask(&self, remaining: Reg<U32>) -> Value<Pred> {
        let right = remaining.greater(self.unmasked);
        match self.masked {
            None => right,
            Some(masked) => right | remaining.at_most(masked),
        }
    }
}

impl KeyBlockRange {
    /// Returns the key blocks that a tile of rows sees.
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
            None => KeyBlockRange { first: k.eval(0), count: end, list: None },
            Some(first) => KeyBlockRange { first, count: k.eval(end - first), list: None },
        }
    }

    /// Returns the key blocks of a list.
    fn listed(k: &mut Builder, list: BlockList) -> Self {
        KeyBlockRange { first: k.eval(0), count: lists::count(k, list), list: Some(list) }
    }

    /// Returns the split `index` of these blocks, with `length` blocks to a split.
    fn part(self, k: &mut Builder, index: Reg<U32>, length: Reg<U32>) -> Self {
        let skipped = k.eval((index * length).minimum(self.count));
        let count = k.eval((self.count - skipped).minimum(length));
        KeyBlockRange { first: k.eval(self.first + skipped), count, list: self.list }
    }
}

impl WorkTile {
    /// Returns the number of key blocks of the walk.
    pub(super) fn blocks(&self) -> Reg<U32> {
        self.key_blocks.count
    }

    /// Returns the list entry of the block that is walked when `remaining` are left, if the tile
    /// has a list.
    pub(super) fn entry(&self, k: &mut Builder, remaining: Value<U32>) -> Option<Reg<U32>> {
        // With none left this is the entry before the first, or the list's first: in bounds.
        let list = self.key_blocks.list?;
        Some(lists::entry(k, list, (self.key_blocks.first + remaining).maximum(1) - 1))
    }

    /// Returns the first key of the block that is walked when `remaining` are left, itself
    /// included. With none left the result is meaningless.
    pub(super) fn first_key(
        &self,
        k: &mut Builder,
        mma: &Mma,
        remaining: impl Into<Value<U32>>,
    ) -> Value<U32> {
        let remaining = remaining.into();
        match self.entry(k, remaining.clone()) {
            None => (self.key_blocks.first + remaining - 1) * mma.key_block,
            Some(entry) => lists::block_of(entry) * mma.key_block,
        }
    }

    /// Returns how a warp whose rows begin at `first_row` treats the blocks of the walk.
    pub(super) fn of_warp(
        &self,
        k: &mut Builder,
        mma: &Mma,
        visibility: &Visibility,
        first_row: Reg<U32>,
    ) -> WarpBlocks {
        let WorkTile { query_length, key_length, key_blocks, .. } = *self;
        let rows = RowTile { first_row, rows: mma.warp_rows(), query_length, key_length };
        let (end, masks, first) = find_blocks(k, mma, visibility, &rows);
        if key_blocks.list.is_some() {
            return WarpBlocks {
                seen: key_blocks.count,
                unseen: None,
                unmasked: k.eval(masks.from),
                masked: masks.before.map(|before| k.eval(before)),
            };
        }
        let within = |k: &mut Builder, count: Value<U32>| {
            k.eval((count.maximum(key_blocks.first) - key_blocks.first).minimum(key_blocks.count))
        };
        WarpBlocks {
            seen: within(k, end.into()),
            unseen: first.map(|first| within(k, first.into())),
            unmasked: within(k, masks.from),
            masked: masks.before.map(|before| within(k, before)),
        }
    }
}

/// Returns the end of the key blocks that some rows see, which of them need a mask, and with a
/// window the first of them.
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

/// The launch's tensors for sequences of equal length, each in a batch entry.
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

    /// Returns the tile of this thread block.
    pub(super) fn tile(self, k: &mut Builder, mma: &Mma, visibility: &Visibility) -> WorkTile {
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
        let all = match mma.takes_block_lists() {
            false => KeyBlockRange::new(k, mma, visibility, first_row, lengths),
            true => {
                let lists = BlockLists::parameters(k);
                let list = lists.of(k, [sequence, head, row_tile]);
                let list = k.eval(list);
                KeyBlockRange::listed(k, list)
            }
        };
        let key_blocks = match split {
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
        WorkTile {
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
            key_blocks,
        }
    }
}
