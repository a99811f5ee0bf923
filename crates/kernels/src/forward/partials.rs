//! Tiles whose keys several blocks have shared: what one block leaves, another takes in.
//!
//! A thread leaves its registers as they are, and the thread at its place in another block takes
//! them in: its part of the output, not yet normalised, and for each row the reference and its part
//! of the sum. So nothing crosses lanes, and memory is written and read in whole lines.
//!
//! A flag for each warpgroup says that its part is there. The block that stores the tile waits for
//! the flags one after the other and adds in that order, so results do not depend on timing. It has
//! a larger index than those that it waits for, and these wait for nobody: somebody can always go
//! on. It leaves the flags as it found them, at zero.

use ptx::{
    Accumulator, Builder, Expression, F32, GlobalAddress, Instruction, LoadCache, LoadHint,
    LoadOrder, Operand, Reg, Scope, StoreHint, StoreOrder, U32, U64,
};

use super::Forward;
use super::epilogue::Output;
use super::softmax::Softmax;
use super::stream_k::PartWord;
use crate::parameter::Workspace;

/// Nanoseconds between two looks at a flag: far less than it takes to look.
const SLEEP: u32 = 20;

/// Bytes that the threads of a warpgroup store at a time, four numbers each.
const STEP: u32 = 128 * 16;

/// Parts come from other multiprocessors: not from this one's cache.
const FRESH: LoadHint = LoadHint { order: LoadOrder::Weak, cache: LoadCache::L2Only, policy: None };

/// Where parts of tiles are left.
pub(super) struct Partials {
    parts: Reg<GlobalAddress>,
    flags: Reg<GlobalAddress>,
    warpgroups: u32,
    /// Bytes of a warpgroup's part.
    bytes: u32,
}

/// A part of a tile as a warpgroup holds it: its word, and the thread's registers.
pub(super) struct Part<'a> {
    pub(super) word: Reg<U32>,
    pub(super) staging: &'a Output,
    pub(super) softmax: &'a Softmax,
    pub(super) output: &'a Accumulator,
}

impl Partials {
    pub(super) fn parameters(k: &mut Builder, forward: &Forward) -> Self {
        Partials {
            parts: Workspace::Partials.address(k),
            flags: Workspace::Counters.address(k),
            warpgroups: forward.warpgroups,
            bytes: forward.partial_bytes() / forward.warpgroups,
        }
    }

    /// Leaves a part.
    pub(super) fn leave(&self, k: &mut Builder, part: &Part<'_>) {
        let Part { staging, word, softmax, output } = *part;
        let place = k.eval(PartWord::place(word));
        let number = self.number(k, staging, place);
        let at = self.address(k, staging, number);
        let rows = softmax.state();
        let all = output.registers().chunks_exact(4).chain([&rows[..]]);
        for (index, numbers) in (0u32..).zip(all) {
            k.store_vector(at + u64::from(index * STEP), numbers, StoreHint::default());
        }
        // What all threads of the warpgroup have stored comes before the one thread's release.
        staging.meet(k);
        k.if_(staging.leads, |k| {
            let flag = self.flag(k, number);
            let there = k.eval::<U32>(1);
            let hint = StoreHint { order: StoreOrder::Release(Scope::Gpu), ..Default::default() };
            k.store_vector(flag, &[there], hint);
        });
    }

    /// Takes in what others have left of a tile, in order.
    pub(super) fn take_in(&self, k: &mut Builder, part: &Part<'_>) {
        let Part { staging, word, softmax, output } = *part;
        let first = k.eval(PartWord::place(word));
        let end = k.eval(first + PartWord::others(word));
        k.for_range(first, end, 1, |k, place| {
            let number = self.number(k, staging, place);
            self.wait(k, staging, number);
            let at = self.address(k, staging, number);
            let numbers = output.registers().len() as u32 / 4;
            let rows: [Reg<F32>; 4] = k.load_vector(at + u64::from(numbers * STEP), FRESH);
            // A branch of its own, so that the assembler keeps the output where it is.
            let (rescale, factors) = softmax.take_in(k, rows);
            rescale.apply(k, output);
            for (index, four) in (0u32..).zip(output.registers().chunks_exact(4)) {
                let theirs: [Reg<F32>; 4] = k.load_vector(at + u64::from(index * STEP), FRESH);
                for (within, (mine, theirs)) in four.iter().zip(theirs).enumerate() {
                    let sum = k.fma(theirs, factors[Accumulator::row_of(within)], *mine);
                    k.set(*mine, sum);
                }
            }
        });
    }

    /// The warpgroup waits for a part.
    fn wait(&self, k: &mut Builder, staging: &Output, number: Reg<U32>) {
        k.if_(staging.leads, |k| {
            let flag = self.flag(k, number);
            k.loop_(|k| {
                let order = LoadOrder::Acquire(Scope::Gpu);
                let hint = LoadHint { order, ..LoadHint::default() };
                let [there] = k.load_vector::<U32, _, 1>(flag, hint);
                k.break_if(there.differs(0));
                k.push(Instruction::Sleep { nanoseconds: Operand::u32(SLEEP) });
            });
            let none = k.eval::<U32>(0);
            let hint = StoreHint { order: StoreOrder::Relaxed(Scope::Gpu), ..Default::default() };
            k.store_vector(flag, &[none], hint);
        });
        staging.meet(k);
    }

    /// The number of the warpgroup's part at a place.
    fn number(&self, k: &mut Builder, staging: &Output, place: Reg<U32>) -> Reg<U32> {
        k.eval(place * self.warpgroups + staging.index)
    }

    fn flag(&self, k: &mut Builder, number: Reg<U32>) -> Reg<GlobalAddress> {
        k.eval(self.flags + number.convert::<U64>() * 4)
    }

    /// Where the thread's numbers of a part begin.
    fn address(&self, k: &mut Builder, staging: &Output, number: Reg<U32>) -> Reg<GlobalAddress> {
        let first = k.eval(self.parts + number.convert::<U64>() * u64::from(self.bytes));
        k.eval(first + (staging.thread * 16).convert::<U64>())
    }
}

impl Forward {
    /// Bytes that a part of a tile takes.
    pub fn partial_bytes(&self) -> u32 {
        let accumulator = self.value_head_dim / 8;
        self.warpgroups * (accumulator + 1) * STEP
    }
}
