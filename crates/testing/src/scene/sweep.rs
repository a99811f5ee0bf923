//! Runs of one scene under many schedules, on all cores.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Accuracy, Scene};
use sim::{Counts, Failure, Options, Policy};

/// The outcome of a scene under one schedule.
#[derive(Debug)]
pub struct Outcome {
    /// The policy.
    pub policy: Policy,
    /// The seed.
    pub seed: u64,
    /// The counts and the accuracy of the results, or the reason why the run stopped.
    pub result: Result<(Counts, Accuracy), Failure>,
}

impl Outcome {
    /// Returns whether the run finished and its results are right.
    pub fn passed(&self) -> bool {
        self.complaint().is_none()
    }

    /// Returns what is wrong, if anything.
    pub fn complaint(&self) -> Option<String> {
        match &self.result {
            Ok((_, accuracy)) => accuracy.complaint.clone(),
            Err(failure) => Some(failure.to_string()),
        }
    }
}

impl Scene {
    /// Runs the scene under each of these schedules, with `options` otherwise, and calls `done`
    /// after each run. Outcomes are in the order of the schedules.
    pub fn sweep(
        &self,
        schedules: &[(Policy, u64)],
        options: &Options,
        done: impl Fn() + Sync,
    ) -> Vec<Outcome> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let next = AtomicUsize::new(0);
        let outcomes = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for _ in 0..threads.min(schedules.len()) {
                scope.spawn(|| {
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        let Some((policy, seed)) = schedules.get(index).copied() else { break };
                        let result = self
                            .run(&Options { policy, seed, ..options.clone() })
                            .map(|(memory, report)| (report.counts, self.judge(&memory)));
                        let outcome = Outcome { policy, seed, result };
                        if let Ok(mut outcomes) = outcomes.lock() {
                            outcomes.push((index, outcome));
                        }
                        done();
                    }
                });
            }
        });
        let mut outcomes = outcomes.into_inner().unwrap_or_default();
        outcomes.sort_by_key(|(index, _)| *index);
        outcomes.into_iter().map(|(_, outcome)| outcome).collect()
    }
}

/// The largest number of seeds of a sweep per policy: all outcomes are kept in memory to the end.
pub const MAX_SEEDS: u64 = 1_000_000;

/// Returns every seed under every policy.
pub fn schedules(policies: &[Policy], seeds: std::ops::Range<u64>) -> Vec<(Policy, u64)> {
    policies.iter().flat_map(|policy| seeds.clone().map(|seed| (*policy, seed))).collect()
}
