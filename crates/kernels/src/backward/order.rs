//! The deterministic mode: what is added to a block of query rows comes in one order, whatever runs
//! when.
//!
//! Each block of query rows of each head has a counter. A block of the grid may add to it once the
//! counter says that the one before it in the order has, and then says so of itself. It only waits
//! for blocks with smaller indices, which began before it: somebody can always go on.
//!
//! Waiting costs nothing where blocks of a head begin one after the other and walk the same way, each
//! a step behind the one before it. So as many heads are taken together as it takes for the blocks of
//! one head to begin a step apart; a block of the grid walks all query heads of its key head before
//! it goes on to the next block of query rows; and how it walks depends on where its head is:
//!
//! | heads | key blocks | walk | under a causal mask |
//! | --- | --- | --- | --- |
//! | the last that are taken together | from the first | down | longest walks first: an even end |
//! | those before | from the last | up | nobody waits, even at the begin |
//!
//! A thread of a warp of its own waits for turns and tells the consumers; another one passes them on
//! when the consumers have added. So memory is waited for while products run.

use ptx::{
    Barriers, Builder, Choose, Expression, GlobalAddress, Instruction, LoadHint, LoadOrder,
    Operand, Pipeline, Pred, Reg, Scope, StoreHint, StoreOrder, U32, U64, Value,
};

use super::place::{Place, Tile, Walk};
use crate::attention::visibility::QueryBlocks;
use crate::divisor::DivisorRegisters;
use crate::parameter::Number;

/// Nanoseconds between two looks at a counter: far less than it takes to look.
const SLEEP: u32 = 20;

/// In which order blocks of the grid take key blocks of heads.
pub(super) struct Order {
    /// Heads that are taken together.
    together: DivisorRegisters,
    /// Those of them that are taken first: what is left over.
    first: DivisorRegisters,
    /// The first of those that are taken last.
    last: Reg<U32>,
}

/// The place of a block of the grid in the order.
pub(super) struct Turn {
    /// The key head, among those of all sequences.
    pub(super) head: Reg<U32>,
    pub(super) key_block: Reg<U32>,
    /// How many key blocks of the head come before it.
    pub(super) position: Reg<U32>,
    /// Whether key blocks come from the first on.
    down: Reg<Pred>,
}

impl Order {
    pub(super) fn parameters(k: &mut Builder) -> Self {
        Order {
            together: DivisorRegisters::parameters(k, Number::HeadsPerGroup),
            first: DivisorRegisters::parameters(k, Number::FirstHeads),
            last: Number::LastHeads.read(k),
        }
    }

    /// The turn of this block of the grid.
    pub(super) fn turn(&self, k: &mut Builder, key_blocks: &DivisorRegisters) -> Turn {
        let index = k.block_index();
        let count = k.eval(self.first.number * key_blocks.number);
        let is_first = k.eval(index.less(count));
        let index = k.eval(is_first.choose::<U32>(index, index - count));
        let heads = DivisorRegisters::chosen(k, is_first, &self.first, &self.together);
        let (round, lane) = heads.divide(k, index);
        let (group, position) = key_blocks.divide(k, round);
        let begin = group * self.together.number + self.first.number;
        let head = k.eval(lane + is_first.choose::<U32>(0, begin));
        let down = k.eval(head.at_least(self.last));
        let from_last = key_blocks.number - 1 - position;
        let key_block = k.eval(down.choose::<U32>(position, from_last));
        Turn { head, key_block, position, down }
    }
}

impl Turn {
    /// The step of a walk from a block of query rows to the next.
    pub(super) fn step(&self, k: &mut Builder) -> Reg<U32> {
        k.eval(self.down.choose::<U32>(-1i32 as u32, 1))
    }

    /// Where a walk begins.
    pub(super) fn start(&self, k: &mut Builder, blocks: &QueryBlocks) -> Reg<U32> {
        k.eval(self.down.choose::<U32>(blocks.end - 1, blocks.first))
    }

    /// The first key of the key block before this one in the order.
    fn before(&self, k: &mut Builder, keys: u32) -> Reg<U32> {
        let before = self.down.choose::<U32>(self.key_block - 1, self.key_block + 1);
        k.eval(before * keys)
    }
}

/// The turns of one block of the grid, step by step.
pub(super) struct Turns {
    /// A stage is full when it is the block's turn, and empty when the turn has been passed on.
    granted: Pipeline,
    /// All warps have added.
    added: Barriers,
}

impl Turns {
    /// For a walk through so many stages, with so many warps that add.
    pub(super) fn new(k: &mut Builder, stages: u32, warps: u32) -> Self {
        Turns {
            granted: Pipeline::new(k, "turn to add dQ", stages, 1),
            added: Barriers::new(k, "dQ added", stages, warps),
        }
    }

    pub(super) fn init(&self, k: &mut Builder) {
        self.granted.init(k);
        self.added.init(k);
    }

    /// A consumer waits until its block may add.
    pub(super) fn wait(
        &self,
        k: &mut Builder,
        stage: impl Into<Value<U32>>,
        phase: impl Into<Value<U32>>,
    ) {
        self.granted.wait_full(k, stage, phase);
    }

    /// A warp says that it has added.
    pub(super) fn added(&self, k: &mut Builder, stage: impl Into<Value<U32>>, leader: Reg<Pred>) {
        k.warp_sync();
        let added = self.added.at(k, stage);
        k.if_(leader, |k| k.mbarrier_arrive(added));
    }

    /// One thread waits for the block's turns, of all steps.
    pub(super) fn grant(
        &self,
        k: &mut Builder,
        counters: Reg<GlobalAddress>,
        place: &Place,
        tile: &Tile,
        walk: &Walk,
    ) {
        let Some(turn) = place.turn(k) else { return };
        let before = turn.before(k, place.key_block);
        let before = place.query_blocks_of(k, before);
        let follows = k.eval(turn.position.greater(0));
        let granted = self.granted.producer(k);
        place.every_step(k, tile, walk, |k| {
            granted.acquire(k);
            let seen = walk.block.at_least(before.first) & walk.block.less(before.end);
            k.if_(follows & seen, |k| {
                let counter = counter(k, counters, walk);
                k.loop_(|k| {
                    let order = LoadOrder::Acquire(Scope::Gpu);
                    let hint = LoadHint { order, ..LoadHint::default() };
                    let [passed] = k.load_vector::<U32, _, 1>(counter, hint);
                    k.break_if(passed.equals(turn.position));
                    k.push(Instruction::Sleep { nanoseconds: Operand::u32(SLEEP) });
                });
            });
            granted.publish(k);
            granted.advance(k);
        });
    }

    /// One thread passes the block's turns on, of all steps.
    pub(super) fn pass_on(
        &self,
        k: &mut Builder,
        counters: Reg<GlobalAddress>,
        place: &Place,
        tile: &Tile,
        walk: &Walk,
    ) {
        let Some(turn) = place.turn(k) else { return };
        let passed = k.eval(turn.position + 1);
        let granted = self.granted.consumer(k);
        place.every_step(k, tile, walk, |k| {
            let stage = granted.wait(k);
            let added = self.added.at(k, stage);
            k.mbarrier_wait(added, granted.phase(), Scope::Block);
            let counter = counter(k, counters, walk);
            let hint = StoreHint { order: StoreOrder::Release(Scope::Gpu), ..StoreHint::default() };
            k.store_vector(counter, &[passed], hint);
            granted.release(k, true);
        });
    }
}

/// The counter of a walk's block of query rows.
fn counter(k: &mut Builder, counters: Reg<GlobalAddress>, walk: &Walk) -> Reg<GlobalAddress> {
    k.eval(counters + walk.number.convert::<U64>() * 4)
}
