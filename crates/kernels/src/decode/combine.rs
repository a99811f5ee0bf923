//! Combines a sequence that several teams share: the block that finishes last does it.
//!
//! Parts are added in the order of teams, so that the result does not depend on which block is
//! last. The arrival counter is reset to zero, as it was found.

use ptx::{
    AtomicOrder, Builder, Expression, F32, GlobalAddress, Pred, Reg, Scope, Select, SharedAddress,
    U32, U64, Value,
};

use super::merge::{Item, Merge, Sums};
use super::schedule::Part;
use crate::attention::rows::reference;
use crate::exchange::L2_ONLY;

/// Parts whose loads are in flight at the same time.
pub(super) const PARTS_IN_FLIGHT: u32 = 16;

/// Counts, at the counter with this index, that what this block has stored is complete; returns
/// whether the block was the last of `all`.
pub(super) fn arrive(
    k: &mut Builder,
    merge: &Merge<'_>,
    index: impl Fn(&mut Builder) -> Reg<U32>,
    all: Reg<U32>,
) -> Reg<Pred> {
    // Orders the stores of all threads of the block before the release by thread 0.
    k.block_sync();
    k.if_(merge.thread.equals(0), |k| {
        let index = index(k);
        let counter = k.eval(merge.results.counters + index.convert::<U64>() * 4);
        let order = AtomicOrder::AcquireRelease;
        let before: Reg<U32> = k.atomic_add_ordered(counter, 1, Scope::Gpu, order);
        let last = k.eval((before + 1).equals(all));
        k.if_(last, |k| k.store::<U32, _>(counter, 0));
        k.store(merge.last, last.select::<U32>(1, 0));
    });
    k.block_sync();
    let last = k.load::<U32, _>(merge.last);
    k.eval(last.differs(0))
}

/// The combination of the parts of one sequence, for this block's rows.
pub(super) struct Combine<'a> {
    merge: &'a Merge<'a>,
    part: &'a Part,
    /// First team that has a part, and how many teams have one.
    first_team: Reg<U32>,
    teams: Reg<U32>,
}

impl<'a> Combine<'a> {
    pub(super) fn new(k: &mut Builder, merge: &'a Merge<'a>, part: &'a Part) -> Self {
        let (first_team, teams) = part.teams(k);
        Combine { merge, part, first_team, teams }
    }

    /// Counts this block's part, which is in the workspace; combines all parts if it was the last.
    pub(super) fn run(&self, k: &mut Builder) {
        let last = self.arrive(k);
        k.if_(last, |k| {
            self.factors(k);
            k.block_sync();
            self.merge.each_item(k, &self.part.rows, |k, item| {
                let sums = self.combined(k, &item);
                self.merge.store(k, &self.part.rows, &item, &sums);
            });
        });
    }

    /// Counts this block's part; returns whether it was the last.
    fn arrive(&self, k: &mut Builder) -> Reg<Pred> {
        let numbers = self.merge.numbers;
        let index =
            |k: &mut Builder| k.eval(self.part.rows.sequence * numbers.members + numbers.member);
        arrive(k, self.merge, index, self.teams)
    }

    /// Returns the address of the part of the team `first_team + index`.
    fn address(&self, k: &mut Builder, index: Reg<U32>) -> Reg<GlobalAddress> {
        let numbers = self.merge.numbers;
        let block = (self.first_team + index) * numbers.members + numbers.member;
        // A block has two slots: slot 1 for the sequence that begins in its share, slot 0 for one
        // that began before. Only the first team has the sequence's beginning.
        let slot = k.eval(block * 2 + index.equals(0).select::<U32>(1, 0));
        self.merge.part_address(k, slot)
    }

    /// Returns the shared address of the factor of a part of a row.
    fn factor_place(&self, row: Reg<U32>, index: impl Into<Value<U32>>) -> Value<SharedAddress> {
        let place = row * self.merge.decode.factors_of_a_row() + index.into();
        self.merge.outputs + place * 4
    }

    /// Computes the factor of each part and row, and the rows' maxima and sums, into shared memory.
    /// Warps take rows in turn; the lanes of a warp take the parts.
    fn factors(&self, k: &mut Builder) {
        let (merge, decode) = (self.merge, self.merge.decode);
        let (warp, lane) = (merge.numbers.warp, merge.numbers.lane);
        let rows = k.eval(self.part.rows.count.minimum(decode.rows));
        let padded =
            k.eval((self.teams + (PARTS_IN_FLIGHT - 1)) / PARTS_IN_FLIGHT * PARTS_IN_FLIGHT);
        k.for_range(warp, rows, decode.warps, |k, row| {
            let place = k.eval((row * 2 + decode.rows * decode.value_head_dim) * 4);
            let place = k.eval(place.convert::<U64>());
            // Maximum and sum over the lane's parts. The parts' maxima are kept where their factors
            // will be.
            let (top, share) = (k.variable(f32::NEG_INFINITY), k.variable(0.0));
            k.for_range(lane, self.teams, 32, |k, index| {
                let address = self.address(k, index);
                let [maximum, sum]: [Reg<F32>; 2] = k.load_vector(address + place, L2_ONLY);
                k.store(self.factor_place(row, index), maximum);
                let new = k.eval(top.maximum(maximum));
                let reference = reference(k, new);
                let (shrink, weight) = (k.exp2(top - reference), k.exp2(maximum - reference));
                let added = k.eval(weight * sum);
                let total = k.fma(share, shrink, added);
                k.set(share, total);
                k.set(top, new);
            });
            let maximum = k.reduce_lanes(top, 32, |a, b| a.maximum(b));
            let reference = reference(k, maximum);
            k.for_range(lane, padded, 32, |k, index| {
                let factor = k.variable(0.0);
                k.if_(index.less(self.teams), |k| {
                    let maximum = k.load::<F32, _>(self.factor_place(row, index));
                    let weight = k.exp2(maximum - reference);
                    k.set(factor, weight);
                });
                k.store(self.factor_place(row, index), factor);
            });
            let weight = k.exp2(top - reference);
            let share = k.eval(share * weight);
            let sum = k.reduce_lanes(share, 32, |a, b| a + b);
            k.if_(lane.equals(0), |k| {
                k.store_vector(merge.rows + row * 8, &[maximum, sum], Default::default());
            });
        });
    }

    /// Returns an item's sums over all parts, in the order of teams.
    fn combined(&self, k: &mut Builder, item: &Item) -> Sums {
        let (merge, decode) = (self.merge, self.merge.decode);
        let outputs = [0.0f32; 4].map(|zero| k.variable(zero));
        let place = k.eval((item.row * decode.value_head_dim + item.column) * 4);
        let place = k.eval(place.convert::<U64>());
        let last = k.eval(self.teams - 1);
        k.for_range(0, self.teams, PARTS_IN_FLIGHT, |k, first| {
            let loaded: Vec<(Reg<F32>, [Reg<F32>; 4])> = (0..PARTS_IN_FLIGHT)
                .map(|ahead| {
                    // Beyond the last part, the last is loaded again, with a factor of zero.
                    let index = k.eval((first + ahead).minimum(last));
                    let address = self.address(k, index);
                    let values = k.load_vector(address + place, L2_ONLY);
                    (k.load(self.factor_place(item.row, first + ahead)), values)
                })
                .collect();
            for (factor, values) in loaded {
                for (output, value) in outputs.iter().zip(values) {
                    let sum = k.fma(factor, value, *output);
                    k.set(*output, sum);
                }
            }
        });
        let [maximum, sum]: [Reg<F32>; 2] =
            k.load_vector(merge.rows + item.row * 8, Default::default());
        Sums { outputs, maximum, sum }
    }
}
