//! The kernels of `crates/kernels`, simulated: values against a reference,
//! every policy, many seeds, no alarm.

mod attention;
mod mutation;
mod product;
mod rungs;

use flashcore_sim as sim;
use sim::{Failure, Launch, Memory, Mode, Options, Policy, Report};

/// A small generator for inputs.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// A number between -1 and 1.
    pub(crate) fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// Runs a launch under every hostile policy and some seeds; `check` sees the
/// memory after each.
pub(crate) fn every_schedule(
    launch: &Launch<'_>,
    memory: &Memory,
    mode: Mode,
    seeds: u64,
    check: impl Fn(&Memory) + Sync,
) {
    let jobs: Vec<(Policy, u64)> = Policy::HOSTILE
        .into_iter()
        .flat_map(|policy| (0..seeds).map(move |seed| (policy, seed)))
        .collect();
    std::thread::scope(|scope| {
        for part in jobs.chunks(jobs.len().div_ceil(2)) {
            let check = &check;
            scope.spawn(move || {
                for (policy, seed) in part {
                    let mut memory = memory.clone();
                    let options =
                        Options { policy: *policy, seed: *seed, mode, ..Options::default() };
                    succeed(sim::run(launch, &mut memory, &options));
                    check(&memory);
                }
            });
        }
    });
}

/// The report, or the failure as a panic's text.
pub(crate) fn succeed(result: Result<Report, Failure>) -> Report {
    match result {
        Ok(report) => report,
        Err(failure) => panic!("{failure}"),
    }
}
