//! Partial tiles of stream-K: several thread blocks compute the same tile over different keys, and
//! one of them merges the results.
//!
//! A thread writes its registers to global memory as they are, and the thread with the same index
//! in another thread block reads them: its part of the unnormalised output, and for each of its
//! rows the softmax reference and its partial sum. So nothing crosses lanes, and memory is written
//! and read in whole cache lines.
//!
//! A flag for each warpgroup says that its partial tile has been written. The thread block that
//! stores the tile waits for the flags one after the other and adds in that order, so results do
//! not depend on timing. It has a larger index than the thread blocks it waits for, and these have
//! written their partial tiles before they wait for anyone, so there is no deadlock. It resets the
//! flags to zero.

use ptx::{Accumulator, Builder, Expression, F32, GlobalAddress, Reg, StoreHint, U32, U64};

use super::Forward;
use super::epilogue::Staging;
use super::softmax::Softmax;
use super::stream_k::PartWord;
use crate::exchange::{L2_ONLY, poll, reset, store_release};
use crate::parameter::Workspace;

/// Nanoseconds between two polls of a flag: far less than a poll takes.
const SLEEP: u32 = 20;

/// Bytes that the threads of a warpgroup write in one step: four `f32` each.
pub(crate) const PARTIAL_STEP: u32 = 128 * 16;

/// The workspace of partial tiles.
pub(super) struct Partials {
    parts: Reg<GlobalAddress>,
    flags: Reg<GlobalAddress>,
    warpgroups: u32,
    /// Bytes of one warpgroup's share of a partial tile.
    bytes: u32,
}

/// A partial tile as a warpgroup holds it: its [`PartWord`], and the thread's registers.
pub(super) struct Part<'a> {
    pub(super) word: Reg<U32>,
    pub(super) staging: &'a Staging,
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

    /// Writes a partial tile for another thread block and raises its flag.
    pub(super) fn store_partial(&self, k: &mut Builder, part: &Part<'_>) {
        let Part { staging, word, softmax, output } = *part;
        let place = k.eval(PartWord::place(word));
        let number = self.number(k, staging, place);
        let at = self.address(k, staging, number);
        let rows = softmax.state();
        let all = output.registers().chunks_exact(4).chain([&rows[..]]);
        for (index, numbers) in (0u32..).zip(all) {
            k.store_vector(at + u64::from(index * PARTIAL_STEP), numbers, StoreHint::default());
        }
        // Orders the stores of all threads of the warpgroup before the release store of one of
        // them.
        staging.sync_warpgroup(k);
        k.if_(staging.leads, |k| {
            let flag = self.flag(k, number);
            store_release(k, flag, 1);
        });
    }

    /// Merges the partial tiles that other thread blocks have stored of this tile, in order.
    pub(super) fn merge_partial(&self, k: &mut Builder, part: &Part<'_>) {
        let Part { staging, word, softmax, output } = *part;
        let first = k.eval(PartWord::place(word));
        let end = k.eval(first + PartWord::others(word));
        k.for_range(first, end, 1, |k, place| {
            let number = self.number(k, staging, place);
            self.wait(k, staging, number);
            let at = self.address(k, staging, number);
            let numbers = output.registers().len() as u32 / 4;
            let rows: [Reg<F32>; 4] =
                k.load_vector(at + u64::from(numbers * PARTIAL_STEP), L2_ONLY);
            // The rescaling is a branch of its own, so that the assembler keeps the output in its
            // registers.
            let (rescale, factors) = softmax.merge_partial(k, rows);
            rescale.apply(k, output);
            for (index, four) in (0u32..).zip(output.registers().chunks_exact(4)) {
                let theirs: [Reg<F32>; 4] =
                    k.load_vector(at + u64::from(index * PARTIAL_STEP), L2_ONLY);
                for (within, (mine, theirs)) in four.iter().zip(theirs).enumerate() {
                    let sum = k.fma(theirs, factors[Accumulator::row_of(within)], *mine);
                    k.set(*mine, sum);
                }
            }
        });
    }

    /// Waits, with all threads of the warpgroup, for the flag of a partial tile, and resets it.
    fn wait(&self, k: &mut Builder, staging: &Staging, number: Reg<U32>) {
        k.if_(staging.leads, |k| {
            let flag = self.flag(k, number);
            poll(k, flag, SLEEP, |there| there.differs(0));
            reset(k, flag);
        });
        staging.sync_warpgroup(k);
    }

    /// Returns the index of this warpgroup's share of the partial tile at a place.
    fn number(&self, k: &mut Builder, staging: &Staging, place: Reg<U32>) -> Reg<U32> {
        k.eval(place * self.warpgroups + staging.index)
    }

    fn flag(&self, k: &mut Builder, number: Reg<U32>) -> Reg<GlobalAddress> {
        k.eval(self.flags + number.convert::<U64>() * 4)
    }

    /// Returns the address of the thread's first numbers of a partial tile.
    fn address(&self, k: &mut Builder, staging: &Staging, number: Reg<U32>) -> Reg<GlobalAddress> {
        let first = k.eval(self.parts + number.convert::<U64>() * u64::from(self.bytes));
        k.eval(first + (staging.thread * 16).convert::<U64>())
    }
}

impl Forward {
    /// Returns the bytes that one partial tile takes in the workspace (stream-K).
    pub fn partial_bytes(&self) -> u32 {
        let accumulator = self.value_head_dim / 8;
        self.warpgroups * (accumulator + 1) * PARTIAL_STEP
    }
}
