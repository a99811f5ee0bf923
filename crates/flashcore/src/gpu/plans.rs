//! The cache of plans: a plan is made at the first call of its kind and found again at the next.
//! Each GPU has one cache, which all front ends share.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use cuda::RelaxedCapture;

use super::lock;

/// A plan that can be cached.
pub(super) trait Kept {
    /// Returns the device memory that it holds.
    fn device_bytes(&self) -> u64;
    /// Tells whether a graph may launch it again at any time; such a plan is never evicted.
    fn is_captured(&self) -> bool;
}

/// Maximum number of cached plans of one kind, besides those that are captured or in use.
const MOST: usize = 1024;
/// Device memory that they may hold before the least recently used ones are evicted.
const MOST_BYTES: u64 = 1 << 29;

/// The cached plans of one kind. The least recently used ones are evicted.
#[derive(Debug)]
pub(super) struct Plans<K, P> {
    kept: Mutex<HashMap<K, Entry<P>, BuildHasherDefault<Mixer>>>,
    /// Counts lookups, as the time for the least-recently-used order.
    clock: AtomicU64,
}

#[derive(Debug)]
struct Entry<P> {
    plan: Arc<P>,
    used: u64,
}

impl<K, P> Default for Plans<K, P> {
    fn default() -> Self {
        Plans { kept: Mutex::default(), clock: AtomicU64::new(0) }
    }
}

impl<K: Clone + Eq + Hash, P: Kept> Plans<K, P> {
    /// Looks up a plan.
    fn find(&self, key: &K) -> Option<Arc<P>> {
        let mut plans = lock(&self.kept);
        let entry = plans.get_mut(key)?;
        entry.used = self.now();
        Some(entry.plan.clone())
    }

    /// Looks up a plan, or makes and caches one. Works during stream capture too.
    pub(super) fn find_or_make<E: From<cuda::Error>>(
        &self,
        key: K,
        make: impl FnOnce(&K) -> Result<P, E>,
    ) -> Result<Arc<P>, E> {
        if let Some(plan) = self.find(&key) {
            return Ok(plan);
        }
        let _relaxed = RelaxedCapture::begin()?;
        let plan = make(&key)?;
        let (plan, _old) = self.keep(key, plan);
        Ok(plan)
    }

    /// Caches a plan, unless another thread was faster. Returns the cached plan and the evicted
    /// ones, whose drop may synchronize with the device.
    fn keep(&self, key: K, plan: P) -> (Arc<P>, Vec<Arc<P>>) {
        let mut plans = lock(&self.kept);
        let bytes: u64 = plans.values().map(|entry| entry.plan.device_bytes()).sum();
        let mut old = Vec::new();
        if plans.len() >= MOST || bytes > MOST_BYTES {
            // A plan that somebody holds may be captured at any moment.
            let unused = |plan: &Arc<P>| Arc::strong_count(plan) == 1 && !plan.is_captured();
            let mut ages: Vec<(u64, K)> = plans
                .iter()
                .filter(|(_, entry)| unused(&entry.plan))
                .map(|(key, entry)| (entry.used, key.clone()))
                .collect();
            // A quarter at a time, so that evictions are rare.
            ages.sort_by_key(|(used, _)| *used);
            let oldest = ages.len().div_ceil(4);
            let oldest = ages.into_iter().take(oldest);
            old.extend(oldest.filter_map(|(_, key)| Some(plans.remove(&key)?.plan)));
        }
        let used = self.now();
        let entry = plans.entry(key).or_insert_with(|| Entry { plan: Arc::new(plan), used });
        (entry.plan.clone(), old)
    }

    fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }
}

/// A fast hash function. Keys come from the program itself, so resistance to crafted collisions is
/// not needed.
#[derive(Debug, Default)]
pub(super) struct Mixer(u64);

impl Mixer {
    fn mix(&mut self, word: u64) {
        // 2^64 divided by the golden ratio.
        self.0 = (self.0.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.mix(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, word: u8) {
        self.mix(word.into());
    }

    fn write_u32(&mut self, word: u32) {
        self.mix(word.into());
    }

    fn write_u64(&mut self, word: u64) {
        self.mix(word);
    }

    fn write_usize(&mut self, word: usize) {
        self.mix(word as u64);
    }

    fn write_isize(&mut self, word: isize) {
        self.mix(word as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Plan {
        bytes: u64,
        captured: bool,
    }

    impl Kept for Plan {
        fn device_bytes(&self) -> u64 {
            self.bytes
        }

        fn is_captured(&self) -> bool {
            self.captured
        }
    }

    #[test]
    fn the_oldest_make_room_and_captured_ones_stay() {
        let plans = Plans::<usize, Plan>::default();
        for key in 0..MOST {
            plans.keep(key, Plan { bytes: 0, captured: key == 0 });
        }
        assert!(plans.find(&1).is_some());
        let (_, old) = plans.keep(MOST, Plan { bytes: 0, captured: false });
        assert_eq!(old.len(), MOST / 4);
        assert!(plans.find(&0).is_some() && plans.find(&1).is_some());
        assert!(plans.find(&2).is_none() && plans.find(&(MOST - 1)).is_some());
    }

    #[test]
    fn memory_is_bounded_and_the_first_to_come_is_kept() {
        let plans = Plans::<usize, Plan>::default();
        plans.keep(0, Plan { bytes: MOST_BYTES + 1, captured: false });
        let (kept, old) = plans.keep(1, Plan { bytes: 7, captured: false });
        assert_eq!((kept.bytes, old.len()), (7, 1));
        let (kept, _) = plans.keep(1, Plan { bytes: 8, captured: false });
        assert_eq!(kept.bytes, 7);
    }

    /// Whoever holds it may be about to launch it, and in a capture.
    #[test]
    fn a_plan_that_is_held_stays() {
        let plans = Plans::<usize, Plan>::default();
        let (held, _) = plans.keep(0, Plan { bytes: MOST_BYTES + 1, captured: false });
        let (_, old) = plans.keep(1, Plan { bytes: 7, captured: false });
        assert!(old.is_empty() && plans.find(&0).is_some());
        drop(held);
        let (_, old) = plans.keep(2, Plan { bytes: 7, captured: false });
        assert_eq!(old.len(), 1);
    }
}
