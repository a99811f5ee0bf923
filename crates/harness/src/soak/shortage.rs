//! Periods in which the device's memory is taken away on purpose.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Counts beginnings and ends of shortages, so that one that came and went during a call is noticed
/// too.
#[derive(Debug, Default)]
pub(super) struct Shortage {
    /// Odd during a shortage.
    turns: AtomicU64,
}

/// A shortage under way.
#[must_use]
pub(super) struct ShortagePeriod<'a>(&'a Shortage);

impl Drop for ShortagePeriod<'_> {
    fn drop(&mut self) {
        self.0.turns.fetch_add(1, Ordering::SeqCst);
    }
}

impl Shortage {
    /// Begins a shortage that lasts until the returned value is dropped, so that a panic ends it
    /// too: nobody waits for a memory that stays taken.
    pub(super) fn begin(&self) -> ShortagePeriod<'_> {
        self.turns.fetch_add(1, Ordering::SeqCst);
        ShortagePeriod(self)
    }

    /// Returns a time stamp for [`since`](Shortage::since).
    pub(super) fn moment(&self) -> u64 {
        self.turns.load(Ordering::SeqCst)
    }

    /// Returns whether memory was short at that time stamp or has been since.
    pub(super) fn since(&self, moment: u64) -> bool {
        !moment.is_multiple_of(2) || self.moment() != moment
    }

    /// Waits until the shortage is over.
    pub(super) fn wait(&self) {
        while !self.moment().is_multiple_of(2) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_that_came_and_went_is_noticed() {
        let shortage = Shortage::default();
        let before = shortage.moment();
        assert!(!shortage.since(before));
        let period = shortage.begin();
        let during = shortage.moment();
        assert!(shortage.since(before) && shortage.since(during));
        drop(period);
        shortage.wait();
        assert!(shortage.since(before) && shortage.since(during));
        assert!(!shortage.since(shortage.moment()));
    }
}
