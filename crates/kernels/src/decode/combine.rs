//! A sequence that several teams have parts of: the block that comes last puts it together.
//!
//! Parts are added in the order of teams, whoever comes last, so the result does
//! not depend on who does. The counter is left as it was found, at zero.

use ptx::{
    AtomicOrder, Builder, Choose, Expression, F32, GlobalAddress, LoadCache, LoadHint, Pred, Reg,
    Scope, SharedAddress, U32, U64, Value,
};

use super::merge::{Item, Merge, Sums};
use super::schedule::Part;
use crate::attention::rows::reference;

/// Parts whose loads are under way at the same time.
pub(super) const TOGETHER: u32 = 16;

/// Parts come from other multiprocessors: not from this one's cache.
pub(super) const FRESH: LoadHint =
    LoadHint { order: ptx::LoadOrder::Weak, cache: LoadCache::L2Only, policy: None };

/// Counts at the counter of an index that what this block has stored is there, and says whether it
/// was the last of so many.
pub(super) fn arrive(
    k: &mut Builder,
    merge: &Merge<'_>,
    index: impl Fn(&mut Builder) -> Reg<U32>,
    all: Reg<U32>,
) -> Reg<Pred> {
    // What all threads of the block have stored comes before the one thread's release.
    k.block_sync();
    k.if_(merge.thread.equals(0), |k| {
        let index = index(k);
        let counter = k.eval(merge.results.counters + index.convert::<U64>() * 4);
        let order = AtomicOrder::AcquireRelease;
        let before: Reg<U32> = k.atomic_add_ordered(counter, 1, Scope::Gpu, order);
        let last = k.eval((before + 1).equals(all));
        k.if_(last, |k| k.store::<U32, _>(counter, 0));
        k.store(merge.last, last.choose::<U32>(1, 0));
    });
    k.block_sync();
    let last = k.load::<U32, _>(merge.last);
    k.eval(last.differs(0))
}

pub(super) struct Combine<'a> {
    merge: &'a Merge<'a>,
    part: &'a Part,
    /// The teams that have parts: the first, and how many.
    first_team: Reg<U32>,
    teams: Reg<U32>,
}

impl<'a> Combine<'a> {
    pub(super) fn new(k: &mut Builder, merge: &'a Merge<'a>, part: &'a Part) -> Self {
        let (first_team, teams) = part.teams(k);
        Combine { merge, part, first_team, teams }
    }

    /// This block's part is in the workspace: counts it, and if it was the last, combines all.
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

    /// Whether all other parts are there.
    fn arrive(&self, k: &mut Builder) -> Reg<Pred> {
        let numbers = self.merge.numbers;
        let index =
            |k: &mut Builder| k.eval(self.part.rows.sequence * numbers.members + numbers.member);
        arrive(k, self.merge, index, self.teams)
    }

    /// The address of the part of the team that is `index` after the first.
    fn address(&self, k: &mut Builder, index: Reg<U32>) -> Reg<GlobalAddress> {
        let numbers = self.merge.numbers;
        let block = (self.first_team + index) * numbers.members + numbers.member;
        // Only the first team has the sequence's beginning.
        let slot = k.eval(block * 2 + index.equals(0).choose::<U32>(1, 0));
        self.merge.part_address(k, slot)
    }

    /// Where the factor of a part of a row is in shared memory.
    fn factor_place(&self, row: Reg<U32>, index: impl Into<Value<U32>>) -> Value<SharedAddress> {
        let place = row * self.merge.decode.factors_of_a_row() + index.into();
        self.merge.outputs + place * 4
    }

    /// The factor of each part and row, and the rows' maxima and sums, into shared memory: a warp
    /// takes row after row, its lanes the parts.
    fn factors(&self, k: &mut Builder) {
        let (merge, decode) = (self.merge, self.merge.decode);
        let (warp, lane) = (merge.numbers.warp, merge.numbers.lane);
        let rows = k.eval(self.part.rows.count.minimum(decode.rows));
        let padded = k.eval((self.teams + (TOGETHER - 1)) / TOGETHER * TOGETHER);
        k.for_range(warp, rows, decode.warps, |k, row| {
            let place = k.eval((row * 2 + decode.rows * decode.value_head_dim) * 4);
            let place = k.eval(place.convert::<U64>());
            // The maximum and the sum of the lane's parts; their maxima wait where factors will be.
            let (top, share) = (k.variable(f32::NEG_INFINITY), k.variable(0.0));
            k.for_range(lane, self.teams, 32, |k, index| {
                let address = self.address(k, index);
                let [maximum, sum]: [Reg<F32>; 2] = k.load_vector(address + place, FRESH);
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

    /// An item's sums over the parts.
    fn combined(&self, k: &mut Builder, item: &Item) -> Sums {
        let (merge, decode) = (self.merge, self.merge.decode);
        let outputs = [0.0f32; 4].map(|zero| k.variable(zero));
        let place = k.eval((item.row * decode.value_head_dim + item.column) * 4);
        let place = k.eval(place.convert::<U64>());
        let last = k.eval(self.teams - 1);
        k.for_range(0, self.teams, TOGETHER, |k, first| {
            let loaded: Vec<(Reg<F32>, [Reg<F32>; 4])> = (0..TOGETHER)
                .map(|ahead| {
                    // Beyond the last part: the last again, with a factor of zero.
                    let index = k.eval((first + ahead).minimum(last));
                    let address = self.address(k, index);
                    let values = k.load_vector(address + place, FRESH);
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
