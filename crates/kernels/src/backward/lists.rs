//! Walks by lists: the query blocks that see a block of keys, where a mask is a function.
//!
//! Whoever brings queries walks the list. Warpgroups that multiply are told with each stage where the
//! walk stands, so that they wait for no list and keep none in registers.

use ptx::{Builder, Choose, Expression, Pred, Reg, SharedAddress, U32, Value};

use super::place::Walk;
use crate::attention::function::blocks::{self, BlockList, BlockLists, block_of, needs_function};

/// Where a walk stands in its list.
#[derive(Clone, Copy)]
pub(super) struct Listed {
    list: BlockList,
    /// Words of a list.
    words: Reg<U32>,
    /// Blocks of this one.
    count: Reg<U32>,
    /// Which of them the walk is at, and its entry.
    index: Reg<U32>,
    pub(super) entry: Reg<U32>,
    /// Whether it is walked from its end: where additions come in one order.
    down: bool,
}

impl Listed {
    /// The begin of a walk. Walks that begin at the same time begin `ahead` of each other, unless
    /// there is an order.
    pub(super) fn begin(
        k: &mut Builder,
        lists: &BlockLists,
        tile: [Reg<U32>; 3],
        ahead: Reg<U32>,
        down: bool,
    ) -> Self {
        let list = lists.of(k, tile);
        let list = k.eval(list);
        let count = blocks::count(k, list);
        let some = k.eval(count.maximum(1));
        let index = if down { some - 1 } else { ahead % some };
        let index = k.variable(index);
        let entry = blocks::entry(k, list, index.into());
        Listed { list, words: lists.words(), count, index, entry: k.variable(entry), down }
    }

    /// How many blocks there are.
    pub(super) fn count(&self) -> Reg<U32> {
        self.count
    }

    /// The same place in registers of its own.
    pub(super) fn copied(&self, k: &mut Builder) -> Self {
        Listed { index: k.variable(self.index), entry: k.variable(self.entry), ..*self }
    }

    /// Goes on to the next block, and around.
    pub(super) fn advance(&self, k: &mut Builder) {
        let Listed { list, count, index, .. } = *self;
        let next = match self.down {
            true => index.equals(0).choose::<U32>(count - 1, index - 1),
            false => (index + 1).equals(count).choose::<U32>(0, index + 1),
        };
        k.set(index, next);
        let entry = blocks::entry(k, list, index.into());
        k.set(self.entry, entry);
    }

    /// The block of query rows that it stands at.
    pub(super) fn block(&self) -> Value<U32> {
        block_of(self.entry)
    }

    /// How many key blocks add to these rows before this one does.
    pub(super) fn turn(&self, k: &mut Builder) -> Reg<U32> {
        blocks::turn(k, self.list, self.words, self.index)
    }
}

/// What consumers are told of the step of a stage: the head and the entry of the list.
pub(super) struct Told {
    /// The offset of the words of the first stage.
    words: u32,
}

/// Bytes of a stage.
const BYTES: u32 = 8;

impl Told {
    pub(super) fn new(k: &mut Builder, stages: u32) -> Self {
        Told { words: k.shared("steps of the list", BYTES * stages, BYTES) }
    }

    fn address(&self, k: &mut Builder, stage: impl Into<Value<U32>>) -> Reg<SharedAddress> {
        let words = k.shared_address(self.words);
        k.eval(words + stage.into() * BYTES)
    }

    /// The producer says where its walk stands, before it fills a stage.
    pub(super) fn tell(&self, k: &mut Builder, stage: impl Into<Value<U32>>, walk: &Walk) {
        if let Some(entry) = walk.entry() {
            let to = self.address(k, stage);
            k.store_vector(to, &[walk.head, entry], Default::default());
        }
    }

    /// A consumer's walk goes where the producer's stood for a stage, which is full.
    pub(super) fn hear(&self, k: &mut Builder, stage: u32, walk: &Walk) {
        let from = self.address(k, stage);
        let [head, entry] = k.load_vector::<U32, _, 2>(from, Default::default());
        k.set(walk.head, head);
        k.set(walk.block, block_of(entry));
    }

    /// Whether the block of a stage needs the function.
    pub(super) fn needs_function(&self, k: &mut Builder, stage: u32) -> Value<Pred> {
        let from = self.address(k, stage);
        let [_, entry] = k.load_vector::<U32, _, 2>(from, Default::default());
        needs_function(entry)
    }
}
