//! The sums of `dQ` in a ring: memory for the heads in work, used over and over, so that sums stay in
//! the second-level cache and nobody clears or rounds those of all heads at once.
//!
//! Blocks of the grid take key heads in order. One that begins looks back by a few heads, `lag`, to one
//! that should be done by now, and rounds and clears a part of its sums while its own keys are on their
//! way; then it makes sure that the place of its own head in the ring is clear. The heads that nobody
//! looks back to are left to [`Rounding`](super::Rounding).
//!
//! A block only waits for blocks with smaller indices, which began before it: somebody can always go
//! on. Two numbers for each key head say how far it is:
//!
//! | number | how many |
//! | --- | --- |
//! | added | consumer warpgroups have added all they have to the head's sums |
//! | cleared | blocks of the grid have rounded and cleared their part of them |
//!
//! Where there is room for all heads, nobody looks back.

use ptx::{
    AtomicOrder, Builder, Expression, F32, GlobalAddress, Instruction, LoadHint, LoadOrder,
    Operand, Reg, Scope, U32, U64, Value,
};

use super::place::Place;
use super::rounding::{Part, Rows};
use super::{Backward, WARPGROUPS, barrier};
use crate::attention::Batch;
use crate::divisor::DivisorRegisters;
use crate::parameter::{Number, Tensor, Workspace};
use crate::strides::Strided;

/// A lag after which nobody looks back.
pub const NO_LAG: u32 = u32::MAX;

/// Nanoseconds between two looks at a number.
const SLEEP: u32 = 20;

/// The thread that looks for all consumers: their first.
const SPEAKER: u32 = 128;

/// Which of a key head's numbers.
#[derive(Clone, Copy)]
enum Progress {
    Added,
    Cleared,
}

/// The numbers of a launch that say where the sums of heads are.
pub(super) struct Ring {
    /// Key heads that there is room for.
    heads: DivisorRegisters,
    lag: Reg<U32>,
    query_blocks: DivisorRegisters,
    progress: Reg<GlobalAddress>,
    gradient: Strided,
    /// The offset of this block's head, which the assembler would keep in a register for the end.
    head: u32,
}

impl Backward {
    /// Whether sums may lie in a ring: blocks of the grid take head after head. Tall blocks, which add
    /// half as much, have no register left for it.
    pub fn has_ring(&self) -> bool {
        self.batch == Batch::Equal && !self.deterministic && !self.is_tall()
    }
}

impl Ring {
    pub(super) fn parameters(k: &mut Builder) -> Self {
        Ring {
            heads: DivisorRegisters::parameters(k, Number::RingHeads),
            lag: Number::RoundingLag.read(k),
            query_blocks: DivisorRegisters::parameters(k, Number::QueryBlocks),
            progress: Workspace::Progress.address(k),
            gradient: Strided::parameters(k, Tensor::QueryGradient),
            head: k.shared("head in the ring", 4, 4),
        }
    }

    /// How many blocks of query rows earlier than its number says a block of this block's head lies.
    pub(super) fn back(&self, k: &mut Builder, place: &Place) -> Reg<U32> {
        let [head, ..] = place.head_and_key_block(k);
        let (rounds, _) = self.heads.divide(k, head);
        k.eval(rounds * self.heads.number * self.blocks_of_head(place))
    }

    /// Blocks of query rows of a key head.
    fn blocks_of_head(&self, place: &Place) -> Value<U32> {
        place.group * self.query_blocks.number
    }

    /// Before a consumer warpgroup adds anything: its part of the head that is `lag` behind is rounded
    /// and cleared, and its own head's sums are clear.
    pub(super) fn make_room(
        &self,
        k: &mut Builder,
        backward: &Backward,
        place: &Place,
        sums: Reg<GlobalAddress>,
        scale: Reg<F32>,
    ) {
        let [head, key_block, key_blocks] = place.head_and_key_block(k);
        let thread = k.thread_index();
        k.if_(thread.equals(SPEAKER), |k| {
            let kept = k.shared_address(self.head);
            k.store(kept, head);
        });
        k.if_(head.at_least(self.lag), |k| {
            let done = k.eval(head - self.lag);
            self.wait(k, Progress::Added, done, key_blocks * WARPGROUPS);
            self.round(k, backward, place, [done, key_block, key_blocks], sums, scale);
            k.barrier_sync(barrier::PRODUCTS, 128 * WARPGROUPS);
            k.if_(thread.equals(SPEAKER), |k| self.say(k, Progress::Cleared, done));
        });
        k.if_(head.at_least(self.heads.number), |k| {
            let before = k.eval(head - self.heads.number);
            self.wait(k, Progress::Cleared, before, key_blocks);
        });
    }

    /// After both consumer warpgroups have added all they have: one thread of each says so.
    pub(super) fn added(&self, k: &mut Builder) {
        k.if_(self.lag.differs(NO_LAG), |k| {
            let kept = k.shared_address(self.head);
            let head = k.load(kept);
            self.say(k, Progress::Added, head);
        });
    }

    /// Rounds and clears a warpgroup's parts of a head's sums: every one in as many as warpgroups of all
    /// the head's blocks.
    fn round(
        &self,
        k: &mut Builder,
        backward: &Backward,
        place: &Place,
        [head, key_block, key_blocks]: [Reg<U32>; 3],
        sums: Reg<GlobalAddress>,
        scale: Reg<F32>,
    ) {
        let layout = backward.sums_layout();
        let (_, slot) = self.heads.divide(k, head);
        let (batch, key_head) = place.key_heads.divide(k, head);
        let [query_length, _] = place.lengths(k);
        let blocks = k.eval(self.blocks_of_head(place));
        let thread = k.thread_index();
        let next = k.variable(key_block * WARPGROUPS + thread / 128 - 1);
        let step = k.eval(key_blocks * WARPGROUPS);
        k.loop_(|k| {
            k.break_if(next.at_least(blocks * layout.parts()));
            let (number, part) = (k.eval(next / layout.parts()), k.eval(next % layout.parts()));
            let (query_head, block) = self.query_blocks.divide(k, number);
            let query_head = k.eval(key_head * place.group + query_head);
            let number = k.eval(slot * blocks + number);
            let part = Part { layout, number, part, clear: true };
            let rows = Rows { block, query_length };
            part.round(k, &backward.rounding(), sums, scale, &rows, |k, row| {
                self.gradient.row(k, backward.element, [batch, row, query_head])
            });
            k.set(next, next + step);
        });
    }

    /// The consumers wait until a number of a head is so large: one thread looks, for all.
    fn wait(&self, k: &mut Builder, what: Progress, head: Reg<U32>, count: impl Into<Value<U32>>) {
        let count = k.eval(count);
        let thread = k.thread_index();
        k.if_(thread.equals(SPEAKER), |k| {
            let number = self.number(k, what, head);
            k.loop_(|k| {
                let order = LoadOrder::Acquire(Scope::Gpu);
                let hint = LoadHint { order, ..LoadHint::default() };
                let [found] = k.load_vector::<U32, _, 1>(number, hint);
                k.break_if(found.at_least(count));
                k.push(Instruction::Sleep { nanoseconds: Operand::u32(SLEEP) });
            });
        });
        k.barrier_sync(barrier::PRODUCTS, 128 * WARPGROUPS);
    }

    /// A thread says something for all that it has met.
    fn say(&self, k: &mut Builder, what: Progress, head: Reg<U32>) {
        let number = self.number(k, what, head);
        k.atomic_add_ordered::<U32, _>(number, 1u32, Scope::Gpu, AtomicOrder::Release);
    }

    fn number(&self, k: &mut Builder, what: Progress, head: Reg<U32>) -> Reg<GlobalAddress> {
        k.eval(self.progress + head.convert::<U64>() * 8 + 4 * what as u32)
    }
}
