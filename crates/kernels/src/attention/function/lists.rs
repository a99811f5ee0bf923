//! The lists of a block mask inside a kernel, which [`BlockMask`](super::BlockMask) describes.

use ptx::{Builder, Expression, GlobalAddress, Pred, Reg, U32, U64, Value};

use crate::parameter::{Number, Workspace};

/// The launch parameters of the lists. Where blocks of keys have lists, heads are key heads.
#[derive(Clone, Copy)]
pub(crate) struct BlockLists {
    address: Reg<GlobalAddress>,
    words: Reg<U32>,
    batch_stride: Reg<U32>,
    head_stride: Reg<U32>,
}

/// The list of a tile inside a kernel: the address of its first word.
pub(crate) type BlockList = Reg<GlobalAddress>;

impl BlockLists {
    /// Declares the launch parameters.
    pub(crate) fn parameters(k: &mut Builder) -> Self {
        BlockLists {
            address: Workspace::BlockLists.address(k),
            words: Number::BlockListWords.read(k),
            batch_stride: Number::BlockListBatchStride.read(k),
            head_stride: Number::BlockListHeadStride.read(k),
        }
    }

    /// Returns the address of the first list.
    pub(crate) fn address(&self) -> Reg<GlobalAddress> {
        self.address
    }

    /// Returns how many lists come before that of a tile.
    pub(crate) fn before(&self, [batch, head, tile]: [Reg<U32>; 3]) -> Value<U32> {
        (batch * self.batch_stride + head * self.head_stride) / self.words + tile
    }

    /// Returns the words of a list.
    pub(crate) fn words(&self) -> Reg<U32> {
        self.words
    }

    /// Returns the list of a tile.
    pub(crate) fn of(
        &self,
        k: &mut Builder,
        [batch, head, tile]: [Reg<U32>; 3],
    ) -> Value<GlobalAddress> {
        let index = batch * self.batch_stride + head * self.head_stride + tile * self.words;
        let index = k.eval(index);
        self.address + index.convert::<U64>() * 4
    }
}

/// Loads the number of entries of a list.
pub(crate) fn count(k: &mut Builder, list: BlockList) -> Reg<U32> {
    k.load::<U32, _>(list)
}

/// Loads the entry that has `before` entries before it.
pub(crate) fn entry(k: &mut Builder, list: BlockList, before: Value<U32>) -> Reg<U32> {
    let before = k.eval(before);
    k.load::<U32, _>(list + before.convert::<U64>() * 4 + 4u64)
}

/// Returns the block of an entry.
pub(crate) fn block_of(entry: Reg<U32>) -> Value<U32> {
    entry >> 1
}

/// Loads the turn of the entry that has `before` entries before it, in a list of `words` words.
pub(crate) fn turn(
    k: &mut Builder,
    list: BlockList,
    words: Reg<U32>,
    before: Reg<U32>,
) -> Reg<U32> {
    // Turns come after the space for entries.
    entry(k, list, (words - 1) / 2 + before)
}

/// Returns whether the block of an entry needs the function.
pub(crate) fn needs_function(entry: Reg<U32>) -> Value<Pred> {
    (entry & 1).differs(0)
}
