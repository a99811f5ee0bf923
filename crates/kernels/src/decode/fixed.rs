//! Splits of a fixed size, folded in an order that is independent of which block computed them.
//!
//! The partial result of a row over some keys is a maximum, a sum and unnormalised outputs.
//! [`fold`] makes one of two such results, and folds are made in one order, whatever the batch:
//!
//! ```text
//! split    = fold of the warps, in their order          about 512 keys
//! group    = fold of its splits, in their order         16 splits
//! sequence = fold of its groups, in their order
//! ```
//!
//! Splits and groups are counted from the sequence's first key. A split that a row sees nothing of
//! has no weight, and folding it changes no bit: so a window may begin anywhere, and a query that
//! comes with later ones may go over keys that it does not see.
//!
//! Which block folds depends on the batch. A group, or a sequence, that lies within the share of
//! one team is folded by that team's block as its splits come. The splits of a group that several
//! teams share go to the workspace, and the block that finishes last folds them; likewise the block
//! that finishes the last group of a shared sequence folds its groups. A team begins at most one
//! group and one sequence that it does not end, so the workspace slots and the counters of both
//! belong to the team that begins them.

use ptx::{Builder, Expression, F32, Reg, U32, U64, Value};

use super::combine::{PARTS_IN_FLIGHT, arrive};
use super::merge::{Item, Merge, Sums};
use super::schedule::Share;
use super::walk::Walk;
use crate::attention::rows::reference;
use crate::exchange::L2_ONLY;
use crate::parameter::Number;

/// Splits per group: as many as are loaded at a time.
pub(super) const GROUP: u32 = PARTS_IN_FLIGHT;

/// Indices of a block's two arrival counters: of a shared group, and of a shared sequence.
const OF_GROUP: u32 = 0;
const OF_SEQUENCE: u32 = 1;

impl Sums {
    /// Returns the empty sums: a maximum of minus infinity, and zeros.
    fn nothing(k: &mut Builder) -> Self {
        Sums {
            outputs: [0.0; 4].map(|zero| k.variable(zero)),
            maximum: k.variable(f32::NEG_INFINITY),
            sum: k.variable(0.0),
        }
    }

    fn set(&self, k: &mut Builder, other: &Sums) {
        k.set(self.maximum, other.maximum);
        k.set(self.sum, other.sum);
        for (output, other) in self.outputs.iter().zip(other.outputs) {
            k.set(*output, other);
        }
    }
}

/// Folds the partial result of other keys, `next`, into `sums`. The multiplications and fused
/// multiply-adds are explicit, so that the assembler cannot contract them in one place and not in
/// another, which would round differently.
fn fold(k: &mut Builder, sums: &Sums, next: &Sums) {
    let maximum = k.eval(sums.maximum.maximum(next.maximum));
    let reference = reference(k, maximum);
    let own = k.exp2(sums.maximum - reference);
    let other = k.exp2(next.maximum - reference);
    let mut add = |sum: Reg<F32>, next: Reg<F32>| {
        let kept = k.eval(sum * own);
        let total = k.fma(other, next, kept);
        k.set(sum, total);
    };
    add(sums.sum, next.sum);
    for (sum, next) in sums.outputs.into_iter().zip(next.outputs) {
        add(sum, next);
    }
    k.set(sums.maximum, maximum);
}

/// Folds part `number` into `sums`, or starts from it if it is the `first`.
fn take(k: &mut Builder, number: Reg<U32>, first: Value<U32>, sums: &Sums, part: &Sums) {
    k.if_else(number.equals(first), |k| sums.set(k, part), |k| fold(k, sums, part));
}

/// The epilogue of a block's splits: folds them, or hands them over to other teams.
pub(super) struct Fixed<'a> {
    merge: &'a Merge<'a>,
    /// Running sums of the group and of the sequence that the block is working on.
    group: Running,
    sequence: Running,
    /// Partial results that a block has workspace for.
    room: Reg<U32>,
}

/// The running sums of a thread's items.
enum Running {
    /// The sums of each item, in registers.
    Registers(Vec<Sums>),
    /// In the workspace, in two slots from this one on, which alternate with the number of the
    /// part. Double buffering is needed because the threads that read a row's maximum and sum are
    /// not all the one that writes them, and threads may be ahead of each other within a split.
    Memory(Reg<U32>),
}

impl Running {
    /// Folds part `number` into an item, or starts from it if it is the `first`; returns the item's
    /// sums so far.
    fn take(
        &self,
        k: &mut Builder,
        merge: &Merge<'_>,
        (index, item): (usize, &Item),
        (number, first): (Reg<U32>, Reg<U32>),
        part: &Sums,
    ) -> Sums {
        match self {
            Running::Registers(items) => {
                take(k, number, first.into(), &items[index], part);
                items[index]
            }
            Running::Memory(first_slot) => {
                let sums = Sums::nothing(k);
                k.if_(number.differs(first), |k| {
                    let slot = k.eval(*first_slot + (number + 1) % 2);
                    let so_far = merge.load_from(k, slot, item);
                    sums.set(k, &so_far);
                });
                take(k, number, first.into(), &sums, part);
                let slot = k.eval(*first_slot + number % 2);
                merge.store_at(k, slot, item, &sums);
                sums
            }
        }
    }
}

/// The group of a split. `first..end` are the group's splits that the block's rows see.
struct Group {
    first: Reg<U32>,
    end: Reg<U32>,
    /// Index of the group, and that of the first group that the block's rows see.
    number: Reg<U32>,
    first_number: Reg<U32>,
}

impl Group {
    fn of(k: &mut Builder, share: &Share, split: Reg<U32>) -> Self {
        let number = k.eval(split / GROUP);
        Group {
            first: k.eval((number * GROUP).maximum(share.begin_all)),
            end: k.eval((number * GROUP + GROUP).minimum(share.end_all)),
            number,
            first_number: k.eval(share.begin_all / GROUP),
        }
    }
}

impl<'a> Fixed<'a> {
    pub(super) fn new(k: &mut Builder, merge: &'a Merge<'a>) -> Self {
        let room: Reg<U32> = Number::PartsPerBlock.read(k);
        let [group, sequence] = [2, 4].map(|place: u32| match merge.decode.running_parts() {
            0 => {
                let items = 0..merge.decode.thread_items();
                Running::Registers(items.map(|_| Sums::nothing(k)).collect())
            }
            _ => {
                let block = k.block_index();
                Running::Memory(k.eval(block * room + (room - place)))
            }
        });
        Fixed { merge, group, sequence, room }
    }

    /// Finishes a split. All warps of the block must call it.
    pub(super) fn finish(&self, k: &mut Builder, walk: &Walk<'_>, share: &Share, split: Reg<U32>) {
        let group = Group::of(k, share, split);
        let mine =
            |first: Reg<U32>, end: Reg<U32>| first.at_least(share.first) & end.at_most(share.end);
        let own_group = k.eval(mine(group.first, group.end));
        let own_sequence = k.eval(mine(share.begin_all, share.end_all));
        let ends_group = k.eval((split + 1).equals(group.end));

        self.merge.collect(k, walk);
        self.each_item(k, share, |k, index, item| {
            let sums = self.merged(k, item);
            k.if_else(
                own_group,
                |k| {
                    let place = (split, group.first);
                    let sums = self.group.take(k, self.merge, (index, item), place, &sums);
                    k.if_(ends_group, |k| {
                        k.if_else(
                            own_sequence,
                            |k| self.take_group(k, share, &group, (index, item), &sums),
                            |k| self.store_group(k, share, &group, item, &sums),
                        );
                    });
                },
                |k| {
                    let slot = self.split_slot(k, share, &group, split);
                    self.merge.store_at(k, slot, item, &sums);
                },
            );
        });
        k.if_(!own_sequence, |k| {
            let finished = k.variable::<U32>(0);
            k.if_(ends_group & own_group, |k| k.set(finished, 1));
            let leaves = (split + 1).equals(group.end.minimum(share.end));
            k.if_(leaves & !own_group, |k| self.finish_group(k, share, &group, finished));
            k.if_(finished.differs(0), |k| self.finish_sequence(k, share, &group));
        });
    }

    /// Folds an item of a finished group into the sequence, which is all the team's; the last group
    /// stores the result.
    fn take_group(
        &self,
        k: &mut Builder,
        share: &Share,
        group: &Group,
        (index, item): (usize, &Item),
        sums: &Sums,
    ) {
        let place = (group.number, group.first_number);
        let sums = self.sequence.take(k, self.merge, (index, item), place, sums);
        let ends = group.end.equals(share.end_all);
        k.if_(ends, |k| self.merge.store(k, &share.rows, item, &sums));
    }

    /// Called when the block has stored all of its splits of a shared group. If it is the last to
    /// arrive, it folds the group and either stores the result, where the group is the whole
    /// sequence, or stores the group and sets `finished`.
    fn finish_group(&self, k: &mut Builder, share: &Share, group: &Group, finished: Reg<U32>) {
        let first_team = share.team(k, group.first);
        let last = k.eval(group.end - 1);
        let last_team = share.team(k, last);
        let teams = k.eval(last_team - first_team + 1);
        let last = self.arrive(k, first_team, OF_GROUP, teams);
        let only = k.eval(group.first.equals(share.begin_all) & group.end.equals(share.end_all));
        k.if_(last, |k| {
            let slot = self.split_slot(k, share, group, group.first);
            let splits = k.eval(group.end - group.first);
            self.each_item(k, share, |k, _, item| {
                let sums = self.gathered(k, item, slot, splits);
                k.if_else(
                    only,
                    |k| self.merge.store(k, &share.rows, item, &sums),
                    |k| self.store_group(k, share, group, item, &sums),
                );
            });
            k.if_(!only, |k| k.set(finished, 1));
        });
    }

    /// Called when the block has stored a group of a shared sequence. If it is the last to arrive,
    /// it folds all groups and stores the result.
    fn finish_sequence(&self, k: &mut Builder, share: &Share, group: &Group) {
        let first_team = share.team(k, share.begin_all);
        let groups = k.eval((share.end_all - 1) / GROUP + 1 - group.first_number);
        let last = self.arrive(k, first_team, OF_SEQUENCE, groups);
        k.if_(last, |k| {
            let slot = self.slot(k, first_team, GROUP);
            self.each_item(k, share, |k, _, item| {
                let sums = self.gathered(k, item, slot, groups);
                self.merge.store(k, &share.rows, item, &sums);
            });
        });
    }

    /// Runs `body` for every item of the rows that is the thread's, with the item's index among the
    /// thread's where sums are in registers (else 0).
    fn each_item(&self, k: &mut Builder, share: &Share, body: impl Fn(&mut Builder, usize, &Item)) {
        if let Running::Memory(_) = self.group {
            self.merge.each_item(k, &share.rows, |k, item| body(k, 0, &item));
            return;
        }
        let items = self.merge.items(k, &share.rows);
        for index in 0..self.merge.decode.thread_items() {
            let threads = self.merge.decode.threads();
            let number = k.eval(self.merge.thread + index * threads);
            k.if_(number.less(items), |k| {
                let item = self.merge.item(k, number);
                body(k, index as usize, &item);
            });
        }
    }

    /// Returns an item's sums over the warps, folded in their order.
    fn merged(&self, k: &mut Builder, item: &Item) -> Sums {
        let statistics = self.merge.statistics(k, item);
        let all = Sums::nothing(k);
        for (warp, [maximum, sum]) in (0u32..).zip(statistics) {
            let outputs = self.merge.outputs(k, item, warp);
            let part = Sums { outputs, maximum, sum };
            match warp {
                0 => all.set(k, &part),
                _ => fold(k, &all, &part),
            }
        }
        all
    }

    /// Returns an item's sums over `count` consecutive parts in the workspace, folded in their
    /// order.
    fn gathered(&self, k: &mut Builder, item: &Item, slot: Reg<U32>, count: Reg<U32>) -> Sums {
        let decode = self.merge.decode;
        let last = k.eval(count - 1);
        let base = self.merge.part_address(k, slot);
        let bytes = |k: &mut Builder, place: Value<U32>| {
            let bytes = k.eval(place * 4);
            k.eval(bytes.convert::<U64>())
        };
        let place = bytes(k, item.row * decode.value_head_dim + item.column);
        let row = bytes(k, item.row * 2 + decode.rows * decode.value_head_dim);
        let all = Sums::nothing(k);
        // The queries occupy registers as well: with wide heads there is room for half of the
        // loads.
        let together =
            if decode.running_parts() > 0 { PARTS_IN_FLIGHT / 2 } else { PARTS_IN_FLIGHT };
        k.for_range(0, count, together, |k, first| {
            let loaded: Vec<Sums> = (0..together)
                .map(|ahead| {
                    // Beyond the last part, the last is loaded again and not used.
                    let index = k.eval((first + ahead).minimum(last));
                    let part = k.eval(base + index.convert::<U64>() * decode.part_bytes());
                    let outputs = k.load_vector(part + place, L2_ONLY);
                    let [maximum, sum]: [Reg<F32>; 2] = k.load_vector(part + row, L2_ONLY);
                    Sums { outputs, maximum, sum }
                })
                .collect();
            for (ahead, part) in (0..).zip(&loaded) {
                let index = k.eval(first + ahead);
                k.if_(index.less(count), |k| take(k, index, 0.into(), &all, part));
            }
        });
        all
    }

    /// Counts this block's arrival at a counter of `team`'s block for the same rows and key head;
    /// returns whether it was the last of `all`.
    fn arrive(
        &self,
        k: &mut Builder,
        team: Reg<U32>,
        counter: u32,
        all: Reg<U32>,
    ) -> Reg<ptx::Pred> {
        let numbers = self.merge.numbers;
        let index =
            |k: &mut Builder| k.eval((team * numbers.members + numbers.member) * 2 + counter);
        arrive(k, self.merge, index, all)
    }

    /// Returns a workspace slot of `team`'s block for the same rows and key head.
    fn slot(&self, k: &mut Builder, team: Reg<U32>, part: impl Into<Value<U32>>) -> Reg<U32> {
        let numbers = self.merge.numbers;
        k.eval((team * numbers.members + numbers.member) * self.room + part.into())
    }

    /// Returns the slot of a split of a shared group: with the team that begins the group.
    fn split_slot(
        &self,
        k: &mut Builder,
        share: &Share,
        group: &Group,
        split: Reg<U32>,
    ) -> Reg<U32> {
        let team = share.team(k, group.first);
        self.slot(k, team, split - group.first)
    }

    /// Stores an item of a group of a shared sequence: with the team that begins the sequence.
    fn store_group(&self, k: &mut Builder, share: &Share, group: &Group, item: &Item, sums: &Sums) {
        let team = share.team(k, share.begin_all);
        let slot = self.slot(k, team, group.number - group.first_number + GROUP);
        self.merge.store_at(k, slot, item, sums);
    }
}
