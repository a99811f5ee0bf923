//! Memory and handles of this process over time, and whether they grow.

use std::fs;

use serde::Serialize;

/// What the process holds at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ResourceUsage {
    /// Memory in bytes (the resident set).
    pub memory_bytes: u64,
    /// Open files, sockets and devices.
    pub handles: u64,
}

impl ResourceUsage {
    /// The current usage; None if the system does not report it.
    pub(super) fn now() -> Option<Self> {
        let status = fs::read_to_string("/proc/self/status").ok()?;
        let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
        let kilobytes: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
        // The list itself is one of them while it is read.
        let handles = fs::read_dir("/proc/self/fd").ok()?.count() as u64 - 1;
        Some(ResourceUsage { memory_bytes: 1024 * kilobytes, handles })
    }
}

/// Memory that a soak may take beyond what it had in its second quarter, besides a tenth of that:
/// caches of plans fill up slowly, and the allocator keeps some of what it was given back.
const ROOM_BYTES: u64 = 64 << 20;
/// Handles that it may have more.
const ROOM_HANDLES: u64 = 2;
/// With fewer samples nothing is said about growth.
const LEAST: usize = 16;

/// Samples of the process's resources from the beginning to the end of a soak.
#[derive(Debug, Default)]
pub(super) struct LeakDetector {
    samples: Vec<ResourceUsage>,
}

/// What the process held over time, and whether it grew.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct UsageReport {
    /// At the beginning.
    pub start: ResourceUsage,
    /// The least in the second quarter of the time, when everything has been used once.
    pub settled: ResourceUsage,
    /// The least in the last quarter.
    pub end: ResourceUsage,
    /// What grew by more than it may; nothing where nothing did, or where the time was too short.
    pub growth: Vec<String>,
}

impl LeakDetector {
    /// Records what is held now.
    pub(super) fn sample(&mut self) {
        self.samples.extend(ResourceUsage::now());
    }

    /// Sums the samples up; None if the system does not report resources.
    pub(super) fn report(&self) -> Option<UsageReport> {
        let start = *self.samples.first()?;
        let count = self.samples.len();
        // The least of a quarter: what was taken for a moment does not count.
        let least = |samples: &[ResourceUsage]| {
            let memory_bytes = samples.iter().map(|it| it.memory_bytes).min()?;
            let handles = samples.iter().map(|it| it.handles).min()?;
            Some(ResourceUsage { memory_bytes, handles })
        };
        let settled = least(&self.samples[count / 4..(count / 2).max(count / 4 + 1)])?;
        let end = least(&self.samples[3 * count / 4..])?;
        let mut growth = Vec::new();
        let most = settled.memory_bytes + settled.memory_bytes / 10 + ROOM_BYTES;
        if count >= LEAST && end.memory_bytes > most {
            growth.push(format!(
                "memory grew from {} to {} MB",
                settled.memory_bytes >> 20,
                end.memory_bytes >> 20
            ));
        }
        if count >= LEAST && end.handles > settled.handles + ROOM_HANDLES {
            growth.push(format!("handles grew from {} to {}", settled.handles, end.handles));
        }
        Some(UsageReport { start, settled, end, growth })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report_of(samples: impl Iterator<Item = (u64, u64)>) -> UsageReport {
        let held = |(megabytes, handles)| ResourceUsage { memory_bytes: megabytes << 20, handles };
        LeakDetector { samples: samples.map(held).collect() }.report().unwrap()
    }

    #[test]
    fn what_grows_is_found_and_what_was_taken_for_a_moment_is_not() {
        let steady = report_of((0..100).map(|it| (if it == 90 { 9000 } else { 300 }, 20 + it % 7)));
        assert_eq!(steady.growth, Vec::<String>::new());
        let leak = report_of((0..100).map(|it| (300 + 5 * it, 20)));
        assert_eq!(leak.growth, ["memory grew from 425 to 675 MB"]);
        let leak = report_of((0..100).map(|it| (300, 20 + it)));
        assert_eq!(leak.growth, ["handles grew from 45 to 95"]);
        let short = report_of((0..5).map(|it| (1000 * it, it)));
        assert_eq!(short.growth, Vec::<String>::new());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_holds_something() {
        let before = ResourceUsage::now().unwrap();
        let _file = fs::File::open("/proc/self/status").unwrap();
        assert!(ResourceUsage::now().unwrap().handles > before.handles.saturating_sub(20));
        assert!(before.memory_bytes > 1 << 20 && before.handles > 2, "{before:?}");
    }
}
