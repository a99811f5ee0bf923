//! Plans that were made, for the next call that can use them.

use std::sync::{Arc, Mutex};

use candle_core::Result;
use flashcore::gpu::Stream;

use super::lock;
use crate::wrap;

/// Plans that are kept of one kind for each GPU.
const KEPT: usize = 64;

/// The most recently used first.
pub(super) struct Plans<K, P>(Mutex<Vec<Entry<K, P>>>);

struct Entry<K, P> {
    key: K,
    plan: Arc<Mutex<P>>,
    /// A graph that was captured goes on reading what the plan has on the device.
    captured: bool,
}

impl<K: PartialEq, P> Plans<K, P> {
    pub(super) fn new() -> Self {
        Plans(Mutex::default())
    }

    /// The plan for a key, made the first time.
    pub(super) fn get(
        &self,
        key: K,
        stream: &Stream,
        make: impl FnOnce() -> Result<P>,
    ) -> Result<Arc<Mutex<P>>> {
        let captured = stream.is_capturing().map_err(wrap)?;
        let mut plans = lock(&self.0);
        if let Some(found) = plans.iter().position(|entry| entry.key == key) {
            plans[..=found].rotate_right(1);
            plans[0].captured |= captured;
            return Ok(plans[0].plan.clone());
        }
        if captured {
            candle_core::bail!(
                "attention cannot be captured in a graph before it has run once with these \
                 tensors: its kernel may have to be compiled"
            );
        }
        let plan = Arc::new(Mutex::new(make()?));
        if plans.len() >= KEPT
            && let Some(last) = plans.iter().rposition(|entry| !entry.captured)
        {
            // Freeing its memory waits for the launches that read it.
            plans.remove(last);
        }
        plans.insert(0, Entry { key, plan: plan.clone(), captured });
        Ok(plan)
    }
}
