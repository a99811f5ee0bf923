//! Overlap of communication and computation: the time of a rank in whose every step the data of the
//! next one is transferred.
//!
//! A step begins when the one before is computed and its data has arrived; it requests the data of
//! the next step, whose transfer begins as soon as the owner is in the same step. Between ranks
//! with equal work a step takes the longer of computing and transferring, and nobody waits for
//! anything else.
//!
//! Tested against a simulation of ranks, events and links.

use serde::Serialize;

/// Computation and transfer that overlap, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Stage {
    /// Time of the kernels.
    pub compute: f64,
    /// Time of the transfers.
    pub transfer: f64,
}

impl Stage {
    /// A stage without transfers.
    pub fn compute(compute: f64) -> Self {
        Stage { compute, transfer: 0.0 }
    }

    /// A stage without kernels.
    pub fn transfer(transfer: f64) -> Self {
        Stage { compute: 0.0, transfer }
    }
}

/// The time of a pass, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct PassTime {
    /// From the beginning of the first stage to the end of the last.
    #[serde(rename = "total_ms")]
    pub total: f64,
    /// Time of the kernels.
    #[serde(rename = "compute_ms")]
    pub compute: f64,
    /// Time of the transfers, overlapped or not.
    #[serde(rename = "transfer_ms")]
    pub transfer: f64,
}

impl PassTime {
    /// Adds up stages.
    pub fn of(stages: &[Stage]) -> Self {
        let mut span = PassTime::default();
        for stage in stages {
            span.total += stage.compute.max(stage.transfer);
            span.compute += stage.compute;
            span.transfer += stage.transfer;
        }
        span
    }

    /// The share of the transfers that kernels hide; 1 if there are none.
    pub fn overlap(&self) -> f64 {
        match self.transfer > 0.0 {
            // Rounding may make the difference slightly negative.
            true => (1.0 - (self.total - self.compute) / self.transfer).max(0.0),
            false => 1.0,
        }
    }
}

/// An event simulation of ranks, which [`PassTime::of`] is tested against; they share no code.
#[cfg(test)]
pub(super) mod events {
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;

    use super::Stage;

    /// What happens to a rank. Times are in nanoseconds, so that they have an order.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    enum Event {
        Computed { rank: usize },
        Arrived { rank: usize },
    }

    struct Rank {
        step: usize,
        computed: bool,
        arrived: bool,
        /// What it asks for in this step is under way.
        asked: bool,
    }

    /// When the last of some ranks is done. In step `t` a rank gets what it needs next from the rank
    /// `t + 1` places before it, which sends from the moment when it is in step `t` itself.
    pub(in crate::scale) fn simulate(ranks: &[Vec<Stage>]) -> f64 {
        let nanoseconds = |milliseconds: f64| (milliseconds * 1e6).round() as u64;
        let (count, steps) = (ranks.len(), ranks[0].len());
        let mut queue = BinaryHeap::new();
        let mut state: Vec<Rank> = (0..count)
            .map(|_| Rank { step: 0, computed: false, arrived: false, asked: false })
            .collect();
        let mut entered = vec![vec![false; steps]; count];
        let mut now = 0;
        for rank in 0..count {
            entered[rank][0] = true;
            queue.push(Reverse((nanoseconds(ranks[rank][0].compute), Event::Computed { rank })));
        }
        loop {
            // Whoever is in the step of somebody that asks begins to send.
            for rank in 0..count {
                let step = state[rank].step;
                let owner = (rank + count - (step + 1) % count) % count;
                if step < steps && !state[rank].asked && entered[owner][step] {
                    state[rank].asked = true;
                    let done = now + nanoseconds(ranks[rank][step].transfer);
                    queue.push(Reverse((done, Event::Arrived { rank })));
                }
            }
            let Some(Reverse((time, event))) = queue.pop() else { break };
            now = time;
            let rank = match event {
                Event::Computed { rank } => {
                    state[rank].computed = true;
                    rank
                }
                Event::Arrived { rank } => {
                    state[rank].arrived = true;
                    rank
                }
            };
            if state[rank].computed && state[rank].arrived {
                let step = state[rank].step + 1;
                state[rank] = Rank { step, computed: false, arrived: false, asked: false };
                if step < steps {
                    entered[rank][step] = true;
                    let done = now + nanoseconds(ranks[rank][step].compute);
                    queue.push(Reverse((done, Event::Computed { rank })));
                }
            }
        }
        now as f64 / 1e6
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn times(
        from: f64,
        to: f64,
        ranks: usize,
        steps: usize,
    ) -> impl Strategy<Value = Vec<Vec<f64>>> {
        prop::collection::vec(prop::collection::vec(from..to, steps), ranks)
    }

    #[test]
    fn the_longer_of_both_counts() {
        let stages = [Stage { compute: 2.0, transfer: 1.0 }, Stage { compute: 1.0, transfer: 3.0 }];
        let span = PassTime::of(&stages);
        assert_eq!((span.total, span.compute, span.transfer), (5.0, 3.0, 4.0));
        assert_eq!(span.overlap(), 0.5);
        assert_eq!(PassTime::of(&[Stage::compute(2.0)]).overlap(), 1.0);
        assert_eq!(PassTime::of(&[Stage::transfer(2.0), Stage::compute(9.0)]).overlap(), 0.0);
    }

    proptest! {
        /// Ranks that do alike over links of their own: as long as the slowest.
        #[test]
        fn ranks_that_do_alike_take_what_the_form_says(
            (compute, slow) in (1usize..9).prop_flat_map(|steps| (
                prop::collection::vec(0.0..5.0, steps),
                prop::collection::vec(0.0..5.0, steps),
            )),
            shares in prop::collection::vec(0.0..1.0, 1..9),
        ) {
            // One of the links is the slowest in every step.
            let ranks: Vec<Vec<Stage>> = std::iter::once(1.0).chain(shares).map(|share| {
                let stage = |(compute, slow): (&f64, &f64)| {
                    Stage { compute: *compute, transfer: share * slow }
                };
                compute.iter().zip(&slow).map(stage).collect()
            }).collect();
            let (form, simulated) = (PassTime::of(&ranks[0]).total, events::simulate(&ranks));
            prop_assert!((form - simulated).abs() < 1e-4, "{form} and {simulated}");
        }

        /// Ranks that differ: nobody is faster than alone, and all together no slower than in lockstep.
        #[test]
        fn ranks_that_differ_lie_between_the_slowest_and_lockstep(
            (compute, transfer) in (1usize..9, 1usize..9).prop_flat_map(|(ranks, steps)| (
                times(1.0, 1.1, ranks, steps),
                times(0.0, 2.0, ranks, steps),
            )),
        ) {
            let stages = |compute: &Vec<f64>, transfer: &Vec<f64>| -> Vec<Stage> {
                let pairs = compute.iter().zip(transfer);
                pairs.map(|(compute, transfer)| Stage { compute: *compute, transfer: *transfer }).collect()
            };
            let ranks: Vec<_> = compute.iter().zip(&transfer).map(|(c, t)| stages(c, t)).collect();
            let slowest = ranks.iter().map(|it| PassTime::of(it).total).fold(0.0, f64::max);
            let lockstep: Vec<Stage> = (0..ranks[0].len())
                .map(|step| Stage {
                    compute: ranks.iter().map(|it| it[step].compute).fold(0.0, f64::max),
                    transfer: ranks.iter().map(|it| it[step].transfer).fold(0.0, f64::max),
                })
                .collect();
            let simulated = events::simulate(&ranks);
            prop_assert!(simulated > slowest - 1e-4, "{simulated} before {slowest}");
            prop_assert!(simulated < PassTime::of(&lockstep).total + 1e-4);
        }
    }
}
