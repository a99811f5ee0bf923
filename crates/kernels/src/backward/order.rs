//! The order of tiles and of `dQ` additions: the deterministic mode, and the alternating waves of
//! causal problems ([`AlternatingWaves`]).
//!
//! In the deterministic mode, additions to a query block's `dQ` come in one fixed order. Each query
//! block of each head has a counter. A thread block may add once the counter says that its
//! predecessor in the order has added, and then advances the counter itself. It only waits for
//! thread blocks with smaller indices, which started earlier, so there is no deadlock.
//!
//! Waiting costs nothing where the thread blocks of a head start one after the other and walk the
//! same way, each a step behind its predecessor. So the grid interleaves the heads of a group,
//! which has as many as it takes for thread blocks of one head to start at least a step apart (the
//! planner aims at two); a thread block visits all query heads of its key head before it goes on to
//! the next query block; and the direction of its walk depends on its head:
//!
//! | heads | key blocks | walk | under a causal mask |
//! | --- | --- | --- | --- |
//! | those of the last group | first to last | down | longest walks first: all end together |
//! | those of groups before it | last to first | up | no waits, not even at the first step |
//!
//! With a mask function all heads are treated as the last group, and the list of a key block says
//! for each query block how many earlier key blocks see it.
//!
//! In a ragged batch, a sequence's tiles come head after head, each from its first key block, and
//! all walks go down.
//!
//! In the Hopper kernel one thread of the producer warpgroup waits for turns and signals the
//! consumers, and another passes turns on when the consumers have added. Consumers thus never wait
//! for memory themselves.

use ptx::{
    Builder, Expression, GlobalAddress, Mbarriers, Pipeline, Pred, Reg, Scope, Select,
    SharedAddress, U32, U64, Value,
};

use super::tile_scheduler::{Path, Tile, TileScheduler, Walk};
use crate::attention::visibility::QueryBlocks;
use crate::divisor::DivisorRegisters;
use crate::exchange::{poll, store_release};
use crate::parameter::Number;

/// Nanoseconds between two polls of a counter: far less than a poll takes.
const SLEEP: u32 = 20;

/// The order in which thread blocks take the key blocks of heads: heads in groups; in a group, key
/// block after key block, each for all heads of the group.
pub(super) struct Order {
    /// The number of heads in a group.
    together: DivisorRegisters,
    /// The number of heads in the first group: the remainder, where groups do not come out even.
    first: DivisorRegisters,
    /// The first head whose key blocks come first to last.
    last: Reg<U32>,
}

/// The position of a tile in the order.
pub(super) struct Turn {
    /// The key head, counted over all sequences.
    pub(super) head: Reg<U32>,
    pub(super) key_block: Reg<U32>,
    /// How many key blocks of the head come before this one.
    pub(super) position: Reg<U32>,
    /// The direction of the walk: down where the head's key blocks come first to last.
    pub(super) direction: Direction,
}

/// The direction of a walk over query blocks: down is from the last to the first.
#[derive(Clone, Copy)]
pub(super) struct Direction {
    down: Reg<Pred>,
}

impl Direction {
    /// Returns the increment from one query block to the next: 1 or -1.
    pub(super) fn step(self, k: &mut Builder) -> Reg<U32> {
        k.eval(self.down.select::<U32>(-1i32 as u32, 1))
    }

    /// Returns the query block at which a walk begins.
    pub(super) fn start(self, k: &mut Builder, blocks: &QueryBlocks) -> Reg<U32> {
        k.eval(self.down.select::<U32>(blocks.end - 1, blocks.first))
    }
}

/// Alternating waves under a causal mask: the tiles of one wave walk down, those of the next walk
/// up, all visiting each query block for all query heads of the group before the next.
///
/// Walks of a down wave begin together at the last query block and end one after the other, the
/// shortest first. The tiles of the up wave take their places, the longest walk first. Each begins
/// at the query block of its own keys, which is where the up walks before it have just arrived, and
/// they all end together. So tiles that run at the same time add to the same few query blocks,
/// whose sums stay in L2 however many heads are in flight.
///
/// ```text
/// queries  |\      /|\      /
///          | \    / | \    /
///          |  \  /  |  \  /
///          |   \/   |   \/     time
/// ```
pub(super) struct AlternatingWaves {
    tiles: DivisorRegisters,
}

impl AlternatingWaves {
    pub(super) fn parameters(k: &mut Builder) -> Self {
        AlternatingWaves { tiles: DivisorRegisters::parameters(k, Number::TilesOfRound) }
    }

    /// Returns the direction of a tile's walk.
    pub(super) fn direction(&self, k: &mut Builder, number: Reg<U32>) -> Direction {
        let (wave, _) = self.tiles.divide(k, number);
        Direction { down: k.eval((wave & 1).equals(0)) }
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

    /// Returns the turn of a tile by its number, which is the thread block's index unless the
    /// kernel is persistent or split.
    pub(super) fn turn(
        &self,
        k: &mut Builder,
        index: Reg<U32>,
        key_blocks: &DivisorRegisters,
    ) -> Turn {
        let count = k.eval(self.first.number * key_blocks.number);
        let is_first = k.eval(index.less(count));
        let index = k.eval(is_first.select::<U32>(index, index - count));
        let heads = DivisorRegisters::chosen(k, is_first, &self.first, &self.together);
        let (round, lane) = heads.divide(k, index);
        let (group, position) = key_blocks.divide(k, round);
        let begin = group * self.together.number + self.first.number;
        let head = k.eval(lane + is_first.select::<U32>(0, begin));
        let down = k.eval(head.at_least(self.last));
        let from_last = key_blocks.number - 1 - position;
        let key_block = k.eval(down.select::<U32>(position, from_last));
        Turn { head, key_block, position, direction: Direction { down } }
    }
}

impl Turn {
    /// Returns the turn of a key block of a head whose key blocks come first to last.
    pub(super) fn down(k: &mut Builder, head: Reg<U32>, key_block: Reg<U32>) -> Self {
        Turn { head, key_block, position: key_block, direction: Direction { down: k.eval(true) } }
    }

    /// Waits until this block may add to the current query block; called by one thread. There is
    /// nothing to wait for where the preceding key block is not seen by that query block (`before`
    /// has those that see it).
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
            poll(k, counter, SLEEP, |passed| passed.equals(position));
        });
    }

    /// Returns the value that the current query block's counter must reach: how many key blocks of
    /// the head come before this one or, by a list, how many of those that the query block sees.
    fn position_of(&self, k: &mut Builder, walk: &Walk) -> Reg<U32> {
        match walk.path {
            Path::Listed { listed, .. } => listed.turn(k),
            _ => self.position,
        }
    }

    /// Returns the query blocks that see the preceding key block. Walks by lists do without.
    fn seen_before(
        &self,
        k: &mut Builder,
        scheduler: &TileScheduler,
        walk: &Walk,
    ) -> Option<QueryBlocks> {
        if let Path::Listed { .. } = walk.path {
            return None;
        }
        let before = self.before(k, scheduler.key_block);
        Some(scheduler.query_blocks_of(k, before))
    }

    /// Passes the turn on after this block has added; called by one thread.
    fn pass_on(&self, k: &mut Builder, counters: Reg<GlobalAddress>, walk: &Walk) {
        let counter = counter(k, counters, walk);
        let position = self.position_of(k, walk);
        store_release(k, counter, position + 1);
    }

    /// Returns the first key of the preceding key block.
    fn before(&self, k: &mut Builder, keys: u32) -> Reg<U32> {
        let down = self.direction.down;
        let before = down.select::<U32>(self.key_block - 1, self.key_block + 1);
        k.eval(before * keys)
    }
}

/// The turns of one thread block for all steps of its walk, as a pipeline in shared memory.
pub(super) struct Turns {
    /// A stage is full when the block's turn has come, and empty when the turn has been passed on.
    granted: Pipeline,
    /// Signals, for each stage, that all warps have added.
    added: Mbarriers,
    /// Byte offset of the workspace index of the query block whose turn it is, one for each stage.
    numbers: u32,
}

impl Turns {
    /// Reserves the shared memory, for `stages` stages and `warps` warps that add.
    pub(super) fn new(k: &mut Builder, stages: u32, warps: u32) -> Self {
        Turns {
            granted: Pipeline::new(k, "turn to add dQ", stages, 1),
            added: Mbarriers::new(k, "dQ added", stages, warps),
            numbers: k.shared("numbers of turns", 4 * stages, 4),
        }
    }

    pub(super) fn init(&self, k: &mut Builder) {
        self.granted.init(k);
        self.added.init(k);
    }

    /// Waits, in a consumer, until its block may add.
    pub(super) fn wait(
        &self,
        k: &mut Builder,
        stage: impl Into<Value<U32>>,
        phase: impl Into<Value<U32>>,
    ) {
        self.granted.wait_full(k, stage, phase);
    }

    /// Returns the workspace index of the query block that may be added to. It is valid between
    /// `wait` and `added`.
    pub(super) fn number(&self, k: &mut Builder, stage: impl Into<Value<U32>>) -> Reg<U32> {
        let number = self.number_at(k, stage);
        k.load(number)
    }

    fn number_at(&self, k: &mut Builder, stage: impl Into<Value<U32>>) -> Reg<SharedAddress> {
        let numbers = k.shared_address(self.numbers);
        k.eval(numbers + stage.into() * 4)
    }

    /// Signals, from a consumer warp, that it has added.
    pub(super) fn added(&self, k: &mut Builder, stage: impl Into<Value<U32>>, leader: Reg<Pred>) {
        k.warp_sync();
        let added = self.added.at(k, stage);
        k.if_(leader, |k| k.mbarrier_arrive(added));
    }

    /// Takes the block's turn at each step, from two threads of the producer warpgroup that are in
    /// warps of their own: one waits for it and grants it to the consumers, the other passes it on
    /// once they have added.
    pub(super) fn run(
        &self,
        k: &mut Builder,
        thread: Reg<U32>,
        counters: Reg<GlobalAddress>,
        scheduler: &TileScheduler,
        tile: &Tile,
        walk: &Walk,
    ) {
        k.if_(thread.equals(32), |k| {
            let Some(turn) = scheduler.turn(k) else { return };
            let before = turn.seen_before(k, scheduler, walk);
            let granted = self.granted.producer(k);
            scheduler.every_step(k, tile, walk, |k| {
                let stage = granted.acquire(k);
                let number = self.number_at(k, stage);
                k.store(number, walk.number);
                turn.wait(k, counters, walk, before.as_ref());
                granted.commit(k);
                granted.advance(k);
            });
        });
        k.if_(thread.equals(64), |k| {
            let Some(turn) = scheduler.turn(k) else { return };
            let granted = self.granted.consumer(k);
            scheduler.every_step(k, tile, walk, |k| {
                let stage = granted.wait(k);
                let added = self.added.at(k, stage);
                k.mbarrier_wait(added, granted.phase(), Scope::Block);
                turn.pass_on(k, counters, walk);
                granted.release(k, true);
            });
        });
    }
}

/// Waits for the turn of the current step, for kernels without a warp to spare; called by one
/// thread.
pub(crate) fn await_turn(
    k: &mut Builder,
    counters: Reg<GlobalAddress>,
    scheduler: &TileScheduler,
    walk: &Walk,
) {
    let Some(turn) = scheduler.turn(k) else { return };
    let before = turn.seen_before(k, scheduler, walk);
    turn.wait(k, counters, walk, before.as_ref());
}

/// Passes on the turn that `await_turn` waited for; called by one thread.
pub(crate) fn pass_turn(
    k: &mut Builder,
    counters: Reg<GlobalAddress>,
    scheduler: &TileScheduler,
    walk: &Walk,
) {
    let Some(turn) = scheduler.turn(k) else { return };
    turn.pass_on(k, counters, walk);
}

/// Returns the address of the counter of the current query block.
fn counter(k: &mut Builder, counters: Reg<GlobalAddress>, walk: &Walk) -> Reg<GlobalAddress> {
    k.eval(counters + walk.number.convert::<U64>() * 8)
}
