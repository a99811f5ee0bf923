//! The gradients of attention with mma.sync, on Ampere and later, over sequences of equal lengths.

use kernels::Configuration;
use kernels::mma::tuned_backward;
use ptx::Capability;

use super::backward::{Kernels, REASON, launch};
use super::forward::equal_lengths_workload;
use super::{Asked, Choice, Family};
use crate::plan::arrangement::tensors;
use crate::problem::Pass;

/// The family.
pub(super) struct BackwardMma;

impl Family for BackwardMma {
    fn name(&self) -> &'static str {
        "backward-mma"
    }

    fn pass(&self) -> Pass {
        Pass::Backward
    }

    fn choose(&self, asked: &Asked<'_>) -> Result<Choice, String> {
        let Asked { chip, problem, arrangement } = *asked;
        let target = chip.target;
        if !(target.has(Capability::Mma) && target.has(Capability::AsyncCopies)) {
            return Err(format!("{target} has no mma.sync for 16-bit floats, or no cp.async"));
        }
        let workload = equal_lengths_workload(chip, problem)?;
        if problem.key_length == 0 {
            return Err("there are no keys".to_owned());
        }
        if problem.deterministic {
            return Err("there is no deterministic mode yet".to_owned());
        }
        let (element, rules) = (workload.element, workload.rules);
        let dims = (workload.head_dim, workload.value_head_dim);
        let backward = tuned_backward(target, element, dims.0, dims.1, rules)
            .ok_or_else(|| "no configuration is tuned for it".to_owned())?;
        arrangement.check_copies(problem)?;
        for tensor in tensors(problem) {
            // The bytes from row to row are counted in 32 bits.
            let [(_, bytes), ..] = arrangement.steps(problem, tensor);
            if bytes > u64::from(u32::MAX) {
                return Err(format!("a length stride of {bytes} bytes is not below 4 GiB"));
            }
        }
        launch(chip, problem, &kernels(backward), REASON.to_owned())
    }
}

/// A configuration with what comes before and after it.
pub(super) fn kernels(backward: kernels::mma::BackwardMma) -> Kernels {
    Kernels {
        kernel: Configuration::BackwardMma(backward),
        row_sums: backward.row_sums(),
        rounding: backward.rounding(),
        sink_gradients: backward.sink_gradients(),
        key_block: backward.key_block(),
        statistics_bytes: backward.statistics_bytes(),
    }
}
