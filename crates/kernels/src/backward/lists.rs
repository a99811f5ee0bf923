//! Walks by lists: with a mask function, each key block has a list of the query blocks that see it.
//!
//! In the Hopper kernel only threads of the producer warpgroup read the list. With each stage the
//! producer publishes its query head and list entry in shared memory ([`PublishedSteps`]), so that
//! consumers neither wait for loads of the list nor keep a position in it in registers.

use ptx::{Builder, Expression, Pred, Reg, Select, SharedAddress, U32, Value};

use super::tile_scheduler::Walk;
use crate::attention::function::lists::{self, BlockList, BlockLists, block_of, needs_function};

/// The current position of a walk in its list.
#[derive(Clone, Copy)]
pub(super) struct Listed {
    list: BlockList,
    /// The number of words from one list to the next.
    words: Reg<U32>,
    /// The number of query blocks in this list.
    count: Reg<U32>,
    /// The position of the current entry, then the entry itself.
    index: Reg<U32>,
    pub(super) entry: Reg<U32>,
    /// Whether the list is walked from its end to its beginning: in the deterministic mode.
    down: bool,
}

impl Listed {
    /// Starts a walk. Unless the order is fixed (`down`), it starts at entry `ahead`, modulo the
    /// length, so that walks that start together start at different query blocks.
    pub(super) fn begin(
        k: &mut Builder,
        lists: &BlockLists,
        tile: [Reg<U32>; 3],
        ahead: Reg<U32>,
        down: bool,
    ) -> Self {
        let list = lists.of(k, tile);
        let list = k.eval(list);
        let count = lists::count(k, list);
        let some = k.eval(count.maximum(1));
        let index = if down { some - 1 } else { ahead % some };
        let index = k.variable(index);
        let entry = lists::entry(k, list, index.into());
        Listed { list, words: lists.words(), count, index, entry: k.variable(entry), down }
    }

    /// Returns the number of query blocks in the list.
    pub(super) fn count(&self) -> Reg<U32> {
        self.count
    }

    /// Returns a copy of the position, in registers of its own.
    pub(super) fn copied(&self, k: &mut Builder) -> Self {
        Listed { index: k.variable(self.index), entry: k.variable(self.entry), ..*self }
    }

    /// Advances to the next entry, wrapping around at the end.
    pub(super) fn advance(&self, k: &mut Builder) {
        let Listed { list, count, index, .. } = *self;
        let next = match self.down {
            true => index.equals(0).select::<U32>(count - 1, index - 1),
            false => (index + 1).equals(count).select::<U32>(0, index + 1),
        };
        k.set(index, next);
        let entry = lists::entry(k, list, index.into());
        k.set(self.entry, entry);
    }

    /// Returns the current query block.
    pub(super) fn block(&self) -> Value<U32> {
        block_of(self.entry)
    }

    /// Returns how many key blocks add to the current query block's `dQ` before this one does.
    pub(super) fn turn(&self, k: &mut Builder) -> Reg<U32> {
        lists::turn(k, self.list, self.words, self.index)
    }
}

/// The step that each stage was loaded for, published to the consumers: query head and list entry.
pub(super) struct PublishedSteps {
    /// Byte offset of the words of stage 0.
    words: u32,
}

/// Bytes for each stage.
const BYTES: u32 = 8;

impl PublishedSteps {
    pub(super) fn new(k: &mut Builder, stages: u32) -> Self {
        PublishedSteps { words: k.shared("steps of the list", BYTES * stages, BYTES) }
    }

    fn address(&self, k: &mut Builder, stage: impl Into<Value<U32>>) -> Reg<SharedAddress> {
        let words = k.shared_address(self.words);
        k.eval(words + stage.into() * BYTES)
    }

    /// Publishes the producer's current step, before it fills a stage.
    pub(super) fn write(&self, k: &mut Builder, stage: impl Into<Value<U32>>, walk: &Walk) {
        if let Some(entry) = walk.entry() {
            let to = self.address(k, stage);
            k.store_vector(to, &[walk.head, entry], Default::default());
        }
    }

    /// Sets a consumer's walk to the step of a stage, which must be full.
    pub(super) fn read(&self, k: &mut Builder, stage: u32, walk: &Walk) {
        let from = self.address(k, stage);
        let [head, entry] = k.load_vector::<U32, _, 2>(from, Default::default());
        k.set(walk.head, head);
        k.set(walk.block, block_of(entry));
    }

    /// Returns whether the query block in a stage needs the mask function evaluated.
    pub(super) fn needs_function(&self, k: &mut Builder, stage: u32) -> Value<Pred> {
        let from = self.address(k, stage);
        let [_, entry] = k.load_vector::<U32, _, 2>(from, Default::default());
        needs_function(entry)
    }
}
