//! Plans by what they depend on: made at the first call of a kind, found again at the next.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::gpu::lock;

/// Plans of one sort. Those that were not used for long make room for others.
pub(crate) struct Plans<K, P> {
    kept: Mutex<HashMap<K, Kept<P>, BuildHasherDefault<Mixer>>>,
    /// Counts calls, to tell which plans were not used for long.
    clock: AtomicU64,
    /// How many are kept, besides those that must stay.
    capacity: usize,
    /// Whether a plan must stay: a graph may launch it again at any time.
    stays: fn(&K, &P) -> bool,
}

struct Kept<P> {
    plan: Arc<P>,
    used: u64,
}

impl<K: Copy + Eq + Hash, P> Plans<K, P> {
    pub(crate) fn new(capacity: usize, stays: fn(&K, &P) -> bool) -> Self {
        Plans { kept: Mutex::default(), clock: AtomicU64::new(0), capacity, stays }
    }

    /// The plan of an earlier call.
    pub(crate) fn find(&self, key: &K) -> Option<Arc<P>> {
        let mut plans = lock(&self.kept);
        let kept = plans.get_mut(key)?;
        kept.used = self.now();
        Some(kept.plan.clone())
    }

    /// Keeps a plan, unless another thread was faster: gives the one that is kept, and those that
    /// had to go. Dropping them may make the host wait for the device.
    pub(crate) fn keep(&self, key: K, plan: P) -> (Arc<P>, Vec<Arc<P>>) {
        let mut plans = lock(&self.kept);
        let mut old = Vec::new();
        if plans.len() >= self.capacity {
            let mut ages: Vec<(u64, K)> = plans
                .iter()
                .filter(|(key, kept)| !(self.stays)(key, &kept.plan))
                .map(|(key, kept)| (kept.used, *key))
                .collect();
            if ages.len() >= self.capacity {
                // A quarter at a time, so that it happens rarely.
                ages.sort_by_key(|(used, _)| *used);
                let oldest = ages.into_iter().take(self.capacity / 4);
                old.extend(oldest.filter_map(|(_, key)| Some(plans.remove(&key)?.plan)));
            }
        }
        let used = self.now();
        let kept = plans.entry(key).or_insert_with(|| Kept { plan: Arc::new(plan), used });
        (kept.plan.clone(), old)
    }

    fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }
}

/// Hashes a key word by word. Keys come from the program itself, so nobody gains by making them
/// collide.
#[derive(Default)]
pub(crate) struct Mixer(u64);

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            // 2^64 divided by the golden ratio.
            self.0 = (self.0.rotate_left(23) ^ u64::from_le_bytes(word))
                .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
    }
}
