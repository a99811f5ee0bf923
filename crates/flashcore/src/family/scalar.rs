//! Attention without tensor cores, on any GPU: every head dim, length, mask, score rule, element
//! type and stride. It is slow, and the fallback where nothing else serves a problem.

use kernels::Configuration;

use super::{Asked, Choice, Family, check_equal_lengths, mask_kind};
use crate::problem::Problem;

/// The `scalar` family.
pub(super) struct Scalar;

impl Family for Scalar {
    fn name(&self) -> &'static str {
        "scalar"
    }

    /// A warp computes one row and takes the keys one by one, so its bits do not depend on other
    /// rows.
    fn is_batch_invariant(&self) -> bool {
        true
    }

    fn choose(&self, asked: &Asked<'_>) -> Result<Choice, String> {
        let Asked { chip, problem, .. } = *asked;
        let dtype = problem.dtypes.uniform()?;
        check_equal_lengths(problem)?;
        let scalar = kernels::Scalar {
            target: chip.target,
            element: dtype.element(),
            head_dim: problem.head_dim as u32,
            value_head_dim: problem.value_head_dim as u32,
            rules: problem.rules(mask_kind(problem)),
        };
        launch(problem, scalar, "serves every head dim, length and type".to_owned())
    }
}

/// Returns the launch of a configuration.
pub(super) fn launch(
    problem: &Problem,
    scalar: kernels::Scalar,
    reason: String,
) -> Result<Choice, String> {
    if problem.rows() == 0 {
        return Err("there are no queries".to_owned());
    }
    let too_large = |what: &str| format!("{what} is too large for the GPU kernel");
    let counts = [problem.query_length, problem.key_length, problem.query_heads, problem.batch];
    let [queries, keys, heads, batch] = counts.map(u32::try_from);
    let (Ok(queries), Ok(keys), Ok(heads), Ok(batch)) = (queries, keys, heads, batch) else {
        return Err(too_large("a length, head count or batch"));
    };
    // Positions are compared as signed numbers.
    if queries.checked_add(keys).is_none_or(|sum| sum > i32::MAX as u32) {
        return Err(too_large("the lengths"));
    }
    // Further blocks are taken in turn; a margin keeps the loop's counter from wrapping.
    let largest = 1 << 24;
    let blocks = kernels::Scalar::blocks(queries, heads, batch);
    let blocks = u32::try_from(blocks).ok().filter(|blocks| *blocks <= u32::MAX - largest);
    let blocks = blocks.ok_or_else(|| too_large("the number of rows"))?.min(largest);
    Ok(Choice::of(Configuration::Scalar(scalar), blocks, reason))
}
