//! Counts of a run: instructions, bytes, bank conflicts, waits; and budgets on them.

use std::collections::BTreeMap;
use std::fmt;

use ptx::SourceLocation;

/// A number that a run counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Measure {
    /// Instructions executed, counted once per warp.
    WarpInstructions,
    /// Instructions executed, counted once per active lane.
    LaneInstructions,
    /// Wavefronts (passes over the banks of shared memory) beyond the fewest possible.
    BankConflicts,
    /// Wavefronts (passes over the banks of shared memory).
    SharedWavefronts,
    /// Bytes that threads read from shared memory.
    SharedBytesRead,
    /// Bytes that threads wrote to shared memory.
    SharedBytesWritten,
    /// Bytes that threads read from global memory.
    GlobalBytesRead,
    /// Bytes that threads wrote to global memory.
    GlobalBytesWritten,
    /// 32-byte sectors that loads and stores of global memory touched.
    GlobalSectors,
    /// Bytes that asynchronous copies read from global memory.
    CopyBytesRead,
    /// Bytes that asynchronous copies wrote to shared memory, counted in every block.
    CopyBytesDelivered,
    /// Bytes that asynchronous copies wrote to global memory.
    CopyBytesWritten,
    /// Bytes of shared memory that the tensor cores read.
    TensorBytesRead,
    /// Floating-point operations on the tensor cores.
    TensorOperations,
    /// Exponentials, counted once per active lane and packed element.
    Exponentials,
    /// Atomic operations, counted once per active lane.
    Atomics,
    /// Waits at named, cluster and memory barriers, counted once per warp.
    BarrierWaits,
    /// Waits whose condition did not hold yet, so that the warp blocked.
    BlockedWaits,
    /// Cycles of the longest warp, in the cost model.
    Cycles,
}

impl Measure {
    /// Every measure.
    pub const ALL: [Measure; 19] = [
        Measure::WarpInstructions,
        Measure::LaneInstructions,
        Measure::BankConflicts,
        Measure::SharedWavefronts,
        Measure::SharedBytesRead,
        Measure::SharedBytesWritten,
        Measure::GlobalBytesRead,
        Measure::GlobalBytesWritten,
        Measure::GlobalSectors,
        Measure::CopyBytesRead,
        Measure::CopyBytesDelivered,
        Measure::CopyBytesWritten,
        Measure::TensorBytesRead,
        Measure::TensorOperations,
        Measure::Exponentials,
        Measure::Atomics,
        Measure::BarrierWaits,
        Measure::BlockedWaits,
        Measure::Cycles,
    ];

    /// Returns the name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Measure::WarpInstructions => "warp instructions",
            Measure::LaneInstructions => "lane instructions",
            Measure::BankConflicts => "bank conflicts",
            Measure::SharedWavefronts => "shared wavefronts",
            Measure::SharedBytesRead => "shared bytes read",
            Measure::SharedBytesWritten => "shared bytes written",
            Measure::GlobalBytesRead => "global bytes read",
            Measure::GlobalBytesWritten => "global bytes written",
            Measure::GlobalSectors => "global sectors",
            Measure::CopyBytesRead => "copy bytes read",
            Measure::CopyBytesDelivered => "copy bytes delivered",
            Measure::CopyBytesWritten => "copy bytes written",
            Measure::TensorBytesRead => "tensor bytes read",
            Measure::TensorOperations => "tensor operations",
            Measure::Exponentials => "exponentials",
            Measure::Atomics => "atomics",
            Measure::BarrierWaits => "barrier waits",
            Measure::BlockedWaits => "blocked waits",
            Measure::Cycles => "cycles",
        }
    }
}

impl fmt::Display for Measure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Upper bounds on measures.
#[derive(Clone, Debug, Default)]
pub struct Budget {
    limits: BTreeMap<Measure, u64>,
}

impl Budget {
    /// Adds the bound that a measure is at most `limit`.
    pub fn at_most(mut self, measure: Measure, limit: u64) -> Self {
        self.limits.insert(measure, limit);
        self
    }

    /// Returns the first measure that exceeds its limit, with its count and its limit.
    pub fn exceeded(&self, counts: &Counts) -> Option<(Measure, u64, u64)> {
        let mut limits = self.limits.iter();
        limits.find_map(|(measure, limit)| {
            let found = counts.get(*measure);
            (found > *limit).then_some((*measure, found, *limit))
        })
    }
}

/// The shared-memory traffic of one instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BankTraffic {
    /// The number of executions, counted once per warp.
    pub executions: u64,
    /// The wavefronts that it took.
    pub wavefronts: u64,
    /// The wavefronts that it would have taken without bank conflicts.
    pub ideal: u64,
}

impl BankTraffic {
    /// Returns the wavefronts beyond the ideal.
    pub fn conflicts(&self) -> u64 {
        self.wavefronts - self.ideal
    }
}

/// The counts of a run.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    totals: [u64; Measure::ALL.len()],
    /// The bank traffic by step of the lowered program.
    pub(crate) traffic: BTreeMap<usize, (Option<SourceLocation>, BankTraffic)>,
}

impl Counts {
    /// Returns the total of a measure.
    pub fn get(&self, measure: Measure) -> u64 {
        self.totals[measure as usize]
    }

    pub(crate) fn add(&mut self, measure: Measure, amount: u64) {
        self.totals[measure as usize] += amount;
    }

    pub(crate) fn raise(&mut self, measure: Measure, amount: u64) {
        let total = &mut self.totals[measure as usize];
        *total = (*total).max(amount);
    }

    pub(crate) fn banks(
        &mut self,
        step: usize,
        place: Option<SourceLocation>,
        wavefronts: u64,
        ideal: u64,
    ) {
        let (_, traffic) = self.traffic.entry(step).or_insert((place, BankTraffic::default()));
        traffic.executions += 1;
        traffic.wavefronts += wavefronts;
        traffic.ideal += ideal;
        self.add(Measure::SharedWavefronts, wavefronts);
        self.add(Measure::BankConflicts, wavefronts - ideal);
    }

    /// Returns the traffic of each instruction that accessed shared memory, in program order.
    pub fn bank_traffic(&self) -> impl Iterator<Item = (Option<SourceLocation>, BankTraffic)> {
        self.traffic.values().copied()
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for measure in Measure::ALL {
            writeln!(f, "{:<22}{:>16}", measure.name(), self.get(measure))?;
        }
        for (place, traffic) in self.traffic.values().filter(|(_, t)| t.conflicts() > 0) {
            let place = place.map(|p| p.to_string()).unwrap_or_default();
            let (conflicts, executions) = (traffic.conflicts(), traffic.executions);
            writeln!(f, "  {conflicts} bank conflicts in {executions} executions at {place}")?;
        }
        Ok(())
    }
}

/// Returns the number of wavefronts that an access of `bytes` bytes per lane takes, and the fewest
/// it could take.
///
/// With up to 4 bytes per lane the whole warp is served at once, with 8 bytes half warps, with 16
/// quarter warps. In a wavefront each bank serves one word; lanes that access the same word share
/// it.
pub(crate) fn wavefronts(addresses: &[u32; 32], active: u32, bytes: u32) -> (u64, u64) {
    let lanes_at_once = match bytes {
        0..=4 => 32,
        5..=8 => 16,
        _ => 8,
    };
    let groups = (32 / lanes_at_once) as u64;
    if active == u32::MAX && is_one_pass(addresses, bytes) {
        return (groups, groups);
    }
    let words = bytes.div_ceil(4);
    let (mut passes, mut ideal) = (0, 0);
    for group in 0..32 / lanes_at_once {
        // A group accesses at most 32 words.
        let (mut wanted, mut count) = ([0u32; 32], 0);
        let (mut first, mut words_of) = ([u32::MAX; 32], [0u64; 32]);
        let mut any = false;
        for lane in group * lanes_at_once..(group + 1) * lanes_at_once {
            if active >> lane & 1 == 0 {
                continue;
            }
            any = true;
            for word in 0..words {
                let index = addresses[lane as usize] / 4 + word;
                let bank = index as usize % 32;
                if first[bank] == index {
                    continue;
                }
                if first[bank] == u32::MAX {
                    first[bank] = index;
                } else if wanted[..count].contains(&index) {
                    continue;
                }
                wanted[count] = index;
                count += 1;
                words_of[bank] += 1;
            }
        }
        passes += words_of.into_iter().max().unwrap_or(0);
        ideal += any as u64;
    }
    (passes.max(ideal), ideal)
}

/// Returns whether the 32 lanes access consecutive, aligned elements of 4, 8 or 16 bytes, or all
/// the same one. Nearly every access does, and it has no bank conflicts.
fn is_one_pass(addresses: &[u32; 32], bytes: u32) -> bool {
    let first = addresses[0];
    let whole = matches!(bytes, 4 | 8 | 16) && first.is_multiple_of(bytes);
    let by = |step: u32| {
        let place = |lane: usize| first.wrapping_add(step * lane as u32);
        addresses.iter().enumerate().all(|(lane, address)| *address == place(lane))
    };
    whole && (by(bytes) || by(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strided(stride: u32) -> [u32; 32] {
        std::array::from_fn(|lane| lane as u32 * stride)
    }

    #[test]
    fn wavefronts_of_strides() {
        assert_eq!(wavefronts(&strided(4), u32::MAX, 4), (1, 1));
        assert_eq!(wavefronts(&strided(0), u32::MAX, 4), (1, 1));
        assert_eq!(wavefronts(&strided(8), u32::MAX, 4), (2, 1));
        assert_eq!(wavefronts(&strided(128), u32::MAX, 4), (32, 1));
        assert_eq!(wavefronts(&strided(8), u32::MAX, 8), (2, 2));
        assert_eq!(wavefronts(&strided(16), u32::MAX, 16), (4, 4));
        assert_eq!(wavefronts(&strided(128), u32::MAX, 16), (32, 4));
    }
}
