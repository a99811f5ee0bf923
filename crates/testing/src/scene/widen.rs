//! Scenes of attention over 8-bit caches that a kernel widens to 16 bits first.

use flashcore::Problem;
use kernels::forward::Workload;
use kernels::{Batch, Cache, Configuration, Rules, Widen, mma};
use ptx::Element;

use super::call::dtype;
use super::kernel::descale;
use super::{Call, PlacementKind, Ragged, SceneError};

impl Call {
    /// Returns the call with keys and values of the cache's element type and scales, which a
    /// widening kernel converts to what the attention kernel takes.
    pub fn over_cache(self, cache: Cache) -> Self {
        self.with(|problem| {
            let mut problem: Problem = problem.with_kv_dtype(dtype(cache.element));
            problem.descales.key = descale(cache.key_scales);
            problem.descales.value = descale(cache.value_scales);
            problem
        })
    }

    /// Returns a call for a widening kernel: sequences of several key blocks, of one block, of one
    /// key and of none; some queries see nothing.
    pub(super) fn widened(it: &Widen) -> Result<Self, SceneError> {
        let workload = Workload {
            element: it.element,
            head_dim: it.head_dim,
            value_head_dim: it.value_head_dim,
            rules: Rules::LOCAL,
            query_length: 64,
            key_length: 512,
            heads: 4,
            multiprocessors: 2,
        };
        let tuned = mma::tuned_batch(it.target, &workload, Element::F32, Batch::Ragged);
        let kernel = tuned.ok_or_else(|| SceneError::Size("no kernel is tuned".to_owned()))?;
        let place = if it.paged { PlacementKind::Paged(7) } else { PlacementKind::PackedWithGaps };
        let ragged = Ragged::new(vec![3, 5, 2, 1], vec![131, 64, 1, 0]).over(place);
        let kernel = Configuration::Mma(kernel.configuration);
        Ok(Call::ragged(kernel, ragged, [2, 1]).over_cache(it.cache))
    }
}
