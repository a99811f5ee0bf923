//! Attention without tensor cores, on any GPU: every head dim, length, mask, score rule, element
//! type and stride. It is slow, and the fallback where nothing else serves a problem.

use kernels::Configuration;

use super::{Asked, Choice, Family, check_equal_lengths, check_positions, mask_kind};
use crate::problem::{MOST_HEAD_DIM, Problem};

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
        if problem.head_dim.max(problem.value_head_dim) > MOST_HEAD_DIM {
            return Err(format!("head dims end at {MOST_HEAD_DIM}"));
        }
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
    let counts = [problem.query_length, problem.query_heads, problem.batch].map(u32::try_from);
    let [Ok(queries), Ok(heads), Ok(batch)] = counts else {
        return Err(too_large("a length, head count or batch"));
    };
    check_positions(problem)?;
    // Further blocks are taken in turn; a margin keeps the loop's counter from wrapping.
    let largest = 1 << 24;
    let blocks = kernels::Scalar::blocks(queries, heads, batch);
    let blocks = u32::try_from(blocks).ok().filter(|blocks| *blocks <= u32::MAX - largest);
    let blocks = blocks.ok_or_else(|| too_large("the number of rows"))?.min(largest);
    Ok(Choice::of(Configuration::Scalar(scalar), blocks, reason))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chip::Chip;
    use crate::plan::Arrangement;

    #[test]
    fn sizes_beyond_what_kernels_count_are_refused() {
        let refusal = |problem: &Problem| {
            let arrangement = Arrangement::contiguous(problem).unwrap();
            Scalar.choose(&Asked { chip: &Chip::H200, problem, arrangement: &arrangement })
        };
        let dim = refusal(&Problem::new(1, 1, 1, (1 << 32) + 8)).unwrap_err();
        assert_eq!(dim, "head dims end at 65536");
        let long = refusal(&Problem::new(1, 1, 64, 32).with_key_length(600_000_000)).unwrap_err();
        assert_eq!(long, "a length of 600000000 is more than 536870912");
        assert!(refusal(&Problem::new(1, 1, 64, 32).with_key_length(500_000_000)).is_ok());
    }
}
