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
//! Where a mask is a function all heads are of the last kind, and the list of a key block says of each
//! block of query rows how many key blocks before it see them.
//!
//! Over ragged batches a sequence's tiles come head after head, each from its first, and all walks go
//! down.
//!
//! A thread of a warp of its own waits for turns and tells the consumers; another one passes them on
//! when the consumers have added. So memory is waited for while products run.

use ptx::{
    Barriers, Builder, Choose, Expression, GlobalAddress, Instruction, LoadHint, LoadOrder,
    Operand, Pipeline, Pred, Reg, Scope, SharedAddress, StoreHint, StoreOrder, U32, U64, Value,
};

use super::place::{Path, Place, Tile, Walk};
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
    /// Down where key blocks come from the first on.
    pub(super) direction: Direction,
}

/// Which way a walk goes.
#[derive(Clone, Copy)]
pub(super) struct Direction {
    down: Reg<Pred>,
}

impl Direction {
    /// The step of a walk from a block of query rows to the next.
    pub(super) fn step(self, k: &mut Builder) -> Reg<U32> {
        k.eval(self.down.choose::<U32>(-1i32 as u32, 1))
    }

    /// Where a walk begins.
    pub(super) fn start(self, k: &mut Builder, blocks: &QueryBlocks) -> Reg<U32> {
        k.eval(self.down.choose::<U32>(blocks.end - 1, blocks.first))
    }
}

/// Under a causal mask, tiles by rounds: those of one round walk down, those of the next up, each a
/// block of query rows of all heads of its group after the other.
///
/// Walks that go down begin together with the last queries and end one after the other, the shortest
/// first. The next tiles take their places, the longest walk first, and begin with the queries of their
/// own keys: each where those that go up already are. They end together. So what runs
/// at the same time adds to the same few blocks of query rows, and those stay in the second-level cache
/// however many heads are in work.
///
/// ```text
/// queries  |\      /|\      /
///          | \    / | \    /
///          |  \  /  |  \  /
///          |   \/   |   \/     time
/// ```
pub(super) struct Rounds {
    tiles: DivisorRegisters,
}

impl Rounds {
    pub(super) fn parameters(k: &mut Builder) -> Self {
        Rounds { tiles: DivisorRegisters::parameters(k, Number::TilesOfRound) }
    }

    /// The direction of a tile's walk, by its number.
    pub(super) fn direction(&self, k: &mut Builder, number: Reg<U32>) -> Direction {
        let (round, _) = self.tiles.divide(k, number);
        Direction { down: k.eval((round & 1).equals(0)) }
    }
}

impl Order {
    pub(super) fn parameters(k: &mut Builder) -> Self {
        Order {
            together: DivisorRegisters::parameters(k, Number::HeadsPerGroup),
            first: DivisorRegisters::parameters(k, Number::FirstHeads),
            last: Number::LastHeads.read(k),
        }
    }

    /// The turn of a tile by its number, which is that of a block of the grid as a rule.
    pub(super) fn turn(
        &self,
        k: &mut Builder,
        index: Reg<U32>,
        key_blocks: &DivisorRegisters,
    ) -> Turn {
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
        Turn { head, key_block, position, direction: Direction { down } }
    }
}

impl Turn {
    /// That of a key block of a head whose key blocks come from the first on.
    pub(super) fn down(k: &mut Builder, head: Reg<U32>, key_block: Reg<U32>) -> Self {
        Turn { head, key_block, position: key_block, direction: Direction { down: k.eval(true) } }
    }

    /// One thread waits until its block may add to the block of query rows where its walk stands:
    /// until the key block before it has, if that one sees them.
    fn wait(
        &self,
        k: &mut Builder,
        counters: Reg<GlobalAddress>,
        walk: &Walk,
        before: Option<&QueryBlocks>,
    ) {
        let position = self.position_of(k, walk);
        let follows = position.greater(0);
        let waits = match before {
            Some(before) => {
                follows & walk.block.at_least(before.first) & walk.block.less(before.end)
            }
            None => follows,
        };
        k.if_(waits, |k| {
            let counter = counter(k, counters, walk);
            k.loop_(|k| {
                let order = LoadOrder::Acquire(Scope::Gpu);
                let hint = LoadHint { order, ..LoadHint::default() };
                let [passed] = k.load_vector::<U32, _, 1>(counter, hint);
                k.break_if(passed.equals(position));
                k.push(Instruction::Sleep { nanoseconds: Operand::u32(SLEEP) });
            });
        });
    }

    /// What the counter of the block of query rows where a walk stands says when it is its turn: how
    /// many key blocks of the head come before it; of a list only those count that see the rows.
    fn position_of(&self, k: &mut Builder, walk: &Walk) -> Reg<U32> {
        match walk.path {
            Path::Listed { listed, .. } => listed.turn(k),
            _ => self.position,
        }
    }

    /// The query blocks that the key block before this one in the order is seen by; lists know
    /// without.
    fn seen_before(&self, k: &mut Builder, place: &Place, walk: &Walk) -> Option<QueryBlocks> {
        if let Path::Listed { .. } = walk.path {
            return None;
        }
        let before = self.before(k, place.key_block);
        Some(place.query_blocks_of(k, before))
    }

    /// One thread passes the turn on, when its block has added.
    fn pass_on(&self, k: &mut Builder, counters: Reg<GlobalAddress>, walk: &Walk) {
        let counter = counter(k, counters, walk);
        let position = self.position_of(k, walk);
        let passed = k.eval(position + 1);
        let hint = StoreHint { order: StoreOrder::Release(Scope::Gpu), ..StoreHint::default() };
        k.store_vector(counter, &[passed], hint);
    }

    /// The first key of the key block before this one in the order.
    fn before(&self, k: &mut Builder, keys: u32) -> Reg<U32> {
        let down = self.direction.down;
        let before = down.choose::<U32>(self.key_block - 1, self.key_block + 1);
        k.eval(before * keys)
    }
}

/// The turns of one block of the grid, step by step.
pub(super) struct Turns {
    /// A stage is full when it is the block's turn, and empty when the turn has been passed on.
    granted: Pipeline,
    /// All warps have added.
    added: Barriers,
    /// The offset of the numbers of the blocks of query rows, a stage each: whose turn it is.
    numbers: u32,
}

impl Turns {
    /// For a walk through so many stages, with so many warps that add.
    pub(super) fn new(k: &mut Builder, stages: u32, warps: u32) -> Self {
        Turns {
            granted: Pipeline::new(k, "turn to add dQ", stages, 1),
            added: Barriers::new(k, "dQ added", stages, warps),
            numbers: k.shared("numbers of turns", 4 * stages, 4),
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

    /// Which block of query rows it may add to, from then on until it says that it has.
    pub(super) fn number(&self, k: &mut Builder, stage: impl Into<Value<U32>>) -> Reg<U32> {
        let number = self.number_at(k, stage);
        k.load(number)
    }

    fn number_at(&self, k: &mut Builder, stage: impl Into<Value<U32>>) -> Reg<SharedAddress> {
        let numbers = k.shared_address(self.numbers);
        k.eval(numbers + stage.into() * 4)
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
        let before = turn.seen_before(k, place, walk);
        let granted = self.granted.producer(k);
        place.every_step(k, tile, walk, |k| {
            let stage = granted.acquire(k);
            let number = self.number_at(k, stage);
            k.store(number, walk.number);
            turn.wait(k, counters, walk, before.as_ref());
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
        let granted = self.granted.consumer(k);
        place.every_step(k, tile, walk, |k| {
            let stage = granted.wait(k);
            let added = self.added.at(k, stage);
            k.mbarrier_wait(added, granted.phase(), Scope::Block);
            turn.pass_on(k, counters, walk);
            granted.release(k, true);
        });
    }
}

/// Turns without a warp of their own: one thread of a block waits for the turn of a step,
pub(crate) fn await_turn(
    k: &mut Builder,
    counters: Reg<GlobalAddress>,
    place: &Place,
    walk: &Walk,
) {
    let Some(turn) = place.turn(k) else { return };
    let before = turn.seen_before(k, place, walk);
    turn.wait(k, counters, walk, before.as_ref());
}

/// and passes it on.
pub(crate) fn pass_turn(k: &mut Builder, counters: Reg<GlobalAddress>, place: &Place, walk: &Walk) {
    let Some(turn) = place.turn(k) else { return };
    turn.pass_on(k, counters, walk);
}

/// The counter of a walk's block of query rows.
fn counter(k: &mut Builder, counters: Reg<GlobalAddress>, walk: &Walk) -> Reg<GlobalAddress> {
    k.eval(counters + walk.number.convert::<U64>() * 8)
}
