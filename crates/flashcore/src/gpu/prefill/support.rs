//! What the prefill kernel serves, and in which configuration.

use kernels::Prefill;
use kernels::forward::{Workload, tuned_prefill};
use ptx::Capability;

use crate::gpu::forward::{check_scale, tensor_core_element};
use crate::gpu::{Chip, ServingPages, ServingSize};
use crate::problem::Problem;

/// A configuration and why it was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// What to build.
    pub configuration: Prefill,
    /// Why, in a few words.
    pub reason: &'static str,
}

/// Copies of a page have at least so many rows, after which the swizzle repeats.
const FEWEST_PAGE_ROWS: usize = 8;

/// From how many queries of a sequence on tiles of queries are worth more than reading each key
/// for few of them.
const MANY_QUERIES: usize = 32;

/// Whether the kernel comes before the one for few queries.
pub(crate) fn has_many_queries(problem: &Problem) -> bool {
    problem.query_length >= MANY_QUERIES
}

/// The configuration for a batch, or why the kernel does not serve it.
pub fn choose(chip: &Chip, size: &ServingSize) -> Result<Choice, String> {
    let problem = &size.problem;
    if !chip.target.has(Capability::Wgmma) {
        return Err(format!("{} has no wgmma", chip.target));
    }
    let element = tensor_core_element(problem)?;
    check_scale(problem)?;
    if problem.rows() == 0 {
        return Err("there are no queries".to_owned());
    }
    // Packed queries say how much there is to do; longest lengths would be too much.
    let rows = match size.packed_queries {
        true => size.query_rows,
        false => problem.batch.saturating_mul(problem.query_length),
    };
    let workload = Workload {
        element,
        head_dim: problem.head_dim as u32,
        value_head_dim: problem.value_head_dim as u32,
        causal: false,
        query_length: rows as u64,
        key_length: problem.key_length as u64,
        heads: problem.query_heads as u64,
        multiprocessors: chip.multiprocessors,
    };
    let tuned =
        tuned_prefill(&workload).ok_or_else(|| "no configuration is tuned for it".to_owned())?;
    let tile = tuned.configuration;
    let page_rows = match size.pages {
        Some(ServingPages { size, .. }) => {
            let rows = common_divisor(size, tile.key_block as usize);
            if rows < FEWEST_PAGE_ROWS || !rows.is_multiple_of(FEWEST_PAGE_ROWS) {
                return Err(format!(
                    "pages of {size} positions are no multiple of {FEWEST_PAGE_ROWS}"
                ));
            }
            Some(rows as u32)
        }
        None => None,
    };
    let configuration = Prefill {
        tile,
        softcap: problem.softcap.is_some(),
        alibi: problem.alibi,
        sinks: problem.sinks,
        page_rows,
    };
    Ok(Choice { configuration, reason: tuned.reason })
}

/// Heads that go together: as many key heads as the second-level cache holds with all their keys
/// and values, and the query heads that share them.
pub(super) fn heads_together(chip: &Chip, size: &ServingSize) -> u32 {
    let problem = &size.problem;
    let rows = match size.packed_keys {
        true => size.key_rows,
        false => problem.batch.saturating_mul(problem.key_length),
    };
    let width = (problem.head_dim + problem.value_head_dim) * problem.dtype.bytes();
    let head_bytes = (rows as u64).saturating_mul(width as u64).max(1);
    // Something else wants a place in the cache too: queries and outputs.
    let held = (chip.l2_bytes / 5 * 3 / head_bytes).max(1);
    let kv_heads = problem.kv_heads as u64;
    let together = (1..=kv_heads).rev().find(|n| kv_heads.is_multiple_of(*n) && *n <= held);
    let group = problem.query_heads / problem.kv_heads.max(1);
    together.unwrap_or(1) as u32 * group as u32
}

fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use ptx::Target;

    use super::*;
    use crate::dtype::DType;
    use crate::problem::Mask;

    fn packed(dim: usize) -> ServingSize {
        let problem = Problem::new(64, 16, 4096, dim)
            .with_kv_heads(4)
            .with_dtype(DType::BF16)
            .with_mask(Mask::Causal);
        ServingSize::new(problem).with_packed_queries(32_768).with_packed_keys(32_768)
    }

    #[test]
    fn every_width_is_served_on_hopper() {
        for dim in (8..=256).step_by(8) {
            let configuration = choose(&Chip::H200, &packed(dim)).unwrap().configuration;
            assert_eq!(configuration.tile.head_dim as usize, dim);
            assert!(configuration.program().is_ok(), "{}", configuration.name());
        }
        let older = choose(&Chip::typical(Target::SM_89), &packed(64)).unwrap_err();
        assert_eq!(older, "sm_89 has no wgmma");
    }

    #[test]
    fn copies_divide_pages_and_blocks() {
        let rows = |size: usize| {
            let paged = ServingSize::new(packed(128).problem).with_pages(size, 100, 9);
            choose(&Chip::H200, &paged).map(|chosen| chosen.configuration.page_rows)
        };
        for (size, expected) in [(8, 8), (16, 16), (48, 16), (64, 64), (128, 128), (256, 128)] {
            assert_eq!(rows(size), Ok(Some(expected)));
        }
        for size in [1, 4, 12, 20] {
            let refusal = format!("pages of {size} positions are no multiple of 8");
            assert_eq!(rows(size), Err(refusal));
        }
    }

    /// Two key heads of 32,768 rows of 512 bytes have their place in 30 MB, and four have not.
    #[test]
    fn heads_go_together_as_the_cache_has_room() {
        assert_eq!(heads_together(&Chip::H200, &packed(128)), 4);
        assert_eq!(heads_together(&Chip::H200, &packed(64)), 8);
        assert_eq!(heads_together(&Chip::H200, &packed(8)), 16);
    }
}
