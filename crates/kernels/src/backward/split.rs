//! Splitting the tiles of an incomplete last wave into parts by steps of their walks, so that all
//! multiprocessors share the work of that wave.
//!
//! Each part accumulates `dK` and `dV` over its own steps, and every thread stores its accumulator
//! registers to a workspace as they are. Of the warpgroups that have the same keys in the parts of
//! a tile, the one that finishes last sums what all of them have stored, thread by thread and in
//! the order of the parts. So the result does not depend on which one that is, and none waits.

use ptx::{
    Accumulator, AtomicOrder, Builder, Expression, GlobalAddress, Pred, Reg, Scope, Select,
    StoreHint, U32, U64, Value,
};

use super::epilogue::Owner;
use super::{Backward, WARPGROUPS, barrier};
use crate::divisor::DivisorRegisters;
use crate::exchange::{L2_ONLY, reset};
use crate::forward::PARTIAL_STEP;
use crate::parameter::{Number, Workspace};

/// Byte offset of the counters of parts, after the counter of claims of persistent kernels.
const FIRST_COUNTER: u64 = 4;

/// Which tiles are split, and into how many parts.
pub(super) struct Split {
    /// The number of tiles that are not split; the tiles from this number on are.
    whole: Reg<U32>,
    parts: DivisorRegisters,
}

impl Split {
    pub(super) fn parameters(k: &mut Builder) -> Self {
        Split {
            whole: Number::WholeTiles.read(k),
            parts: DivisorRegisters::parameters(k, Number::Splits),
        }
    }

    fn is_part(&self, number: Reg<U32>) -> Value<Pred> {
        number.at_least(self.whole)
    }

    /// Returns the tile that a number stands for, and which part of it.
    pub(super) fn locate(&self, k: &mut Builder, number: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
        let within = k.eval(number - self.whole);
        let (tile, part) = self.parts.divide(k, within);
        let is_part = k.eval(self.is_part(number));
        let tile = k.eval(is_part.select::<U32>(self.whole + tile, number));
        (tile, k.eval(is_part.select::<U32>(part, 0u32)))
    }

    /// Returns which of a tile's `steps` the number's part takes: the first, and how many.
    pub(super) fn steps(
        &self,
        k: &mut Builder,
        number: Reg<U32>,
        steps: Reg<U32>,
    ) -> [Reg<U32>; 2] {
        let (_, part) = self.locate(k, number);
        let up = k.eval(steps + self.parts.number - 1);
        let (each, _) = self.parts.divide(k, up);
        let each = k.eval(self.is_part(number).select::<U32>(each, steps));
        let first = k.eval((part * each).minimum(steps));
        [first, k.eval((steps - first).minimum(each))]
    }
}

/// The workspace of partial gradients.
pub(super) struct Partials {
    parts: Reg<GlobalAddress>,
    counters: Reg<GlobalAddress>,
    /// Bytes of a warpgroup's gradients in one part.
    bytes: u32,
    /// Byte offset in shared memory of one word for each warpgroup: whether it finished last.
    words: u32,
}

impl Partials {
    pub(super) fn parameters(k: &mut Builder, backward: &Backward) -> Self {
        Partials {
            parts: Workspace::Partials.address(k),
            counters: Workspace::Counters.address(k),
            bytes: backward.partial_bytes() / WARPGROUPS,
            words: k.shared("parts that came before", 4 * WARPGROUPS, 4),
        }
    }

    /// Stores this warpgroup's gradients if they are a part of a tile. If it finishes last,
    /// replaces them by the sum over all parts. Returns 1 if the epilogue is to store them, else 0.
    pub(super) fn exchange(
        &self,
        k: &mut Builder,
        split: &Split,
        number: Reg<U32>,
        owner: &Owner,
        sums: &[&Accumulator],
    ) -> Reg<U32> {
        let stores = k.variable::<U32>(1);
        k.if_(split.is_part(number), |k| {
            let part = k.eval(number - split.whole);
            let (tile, _) = split.parts.divide(k, part);
            let own = self.address(k, owner, part);
            for (index, four) in (0u32..).zip(fours(sums)) {
                k.store_vector(own + u64::from(index * PARTIAL_STEP), four, StoreHint::default());
            }
            // Orders the stores of all threads of the warpgroup before the release by one of them.
            k.barrier_sync(owner.index + barrier::RESULTS, 128);
            let word = k.shared_address(self.words);
            let word = k.eval(word + owner.index * 4);
            k.if_(owner.thread.equals(0), |k| {
                let counter = tile * WARPGROUPS + owner.index;
                let counter = k.eval(self.counters + counter.convert::<U64>() * 4 + FIRST_COUNTER);
                let order = AtomicOrder::AcquireRelease;
                let before = k.atomic_add_ordered::<U32, _>(counter, 1, Scope::Gpu, order);
                let is_last = k.eval((before + 1).equals(split.parts.number));
                k.if_(is_last, |k| reset(k, counter));
                k.store(word, is_last.select::<U32>(1u32, 0u32));
            });
            k.barrier_sync(owner.index + barrier::RESULTS, 128);
            let last = k.load::<U32, _>(word);
            k.set(stores, last);
            k.if_(last.differs(0), |k| self.add_up(k, split, tile, owner, sums));
        });
        stores
    }

    /// Sums what all parts of a tile have stored, in order.
    fn add_up(
        &self,
        k: &mut Builder,
        split: &Split,
        tile: Reg<U32>,
        owner: &Owner,
        sums: &[&Accumulator],
    ) {
        for sum in sums.iter().flat_map(|it| it.registers()) {
            k.set(*sum, 0.0);
        }
        let first = k.eval(tile * split.parts.number);
        let end = k.eval(first + split.parts.number);
        k.for_range(first, end, 1, |k, part| {
            let at = self.address(k, owner, part);
            for (index, four) in (0u32..).zip(fours(sums)) {
                let at = at + u64::from(index * PARTIAL_STEP);
                let theirs = k.load_vector::<ptx::F32, _, 4>(at, L2_ONLY);
                for (mine, theirs) in four.iter().zip(theirs) {
                    k.set(*mine, *mine + theirs);
                }
            }
        });
    }

    /// Returns where the thread's registers of a part are stored.
    fn address(&self, k: &mut Builder, owner: &Owner, part: Reg<U32>) -> Reg<GlobalAddress> {
        let place = part * WARPGROUPS + owner.index;
        let first = k.eval(self.parts + place.convert::<U64>() * u64::from(self.bytes));
        k.eval(first + (owner.thread * 16).convert::<U64>())
    }
}

/// Returns the registers of several accumulators, four at a time.
fn fours<'a>(sums: &'a [&'a Accumulator]) -> impl Iterator<Item = &'a [Reg<ptx::F32>]> {
    sums.iter().flat_map(|it| it.registers().chunks_exact(4))
}

impl Backward {
    /// Returns the workspace bytes of one part of a tile.
    pub fn partial_bytes(&self) -> u32 {
        let columns = self.key_layout().columns + self.value_layout().columns;
        4 * self.key_block() * columns
    }

    /// Returns the bytes of all counters: those of this many split tiles, and that of claims.
    pub fn counter_bytes(tiles: u32) -> u64 {
        FIRST_COUNTER + 4 * u64::from(WARPGROUPS * tiles)
    }
}
