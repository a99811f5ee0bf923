//! The problems whose gradients are checked.

use std::collections::BTreeSet;

use kernels::Configuration;
use ptx::Target;

use super::{Case, Contents, Order, standard, thorough};
use flashcore::{DType, Mask, Problem, Scores};

/// The numbers of query heads for each key head.
const GROUPS: [usize; 6] = [1, 2, 3, 5, 8, 16];

/// The largest number of operations of a case of the long list: the reference is computed on a CPU.
const OPERATIONS: f64 = 2e8;

/// Returns the standard set, 1 to 16 query heads for each key head, and gradients of the log-sum-exps.
///
/// ```
/// use flashcore::{DType, Pass};
/// use flashcore_testing::check::cases;
///
/// assert!(cases::gradients(DType::BF16).iter().all(|case| case.problem.pass == Pass::Backward));
/// ```
pub fn gradients(dtype: DType) -> Vec<Case> {
    let mut cases = standard(dtype);
    for group in GROUPS {
        let problem = Problem::new(2, 2 * group, 33, 64).with_kv_heads(2).with_key_length(70);
        for mask in [Mask::NONE, Mask::CAUSAL, Mask::window(Some(9), Some(2))] {
            cases.push(Case::new(problem.clone().with_dtype(dtype).with_mask(mask)));
        }
    }
    let of_lse =
        Problem::new(2, 4, 70, 64).with_key_length(57).with_dtype(dtype).with_mask(Mask::CAUSAL);
    for scores in [Scores::default(), Scores::EVERY_RULE] {
        cases.push(Case::new(of_lse.clone().with_scores(scores).backward().with_lse_gradient()));
    }
    cases.into_iter().map(backward).collect()
}

/// Returns the long list: the problems of the forward kernels except the longest, and every mask
/// with every score rule for each pair of head dims that the backward kernel ships for, over
/// lengths around the edges of its tiles and groups of 1 to 16 heads.
pub fn thorough_gradients(dtype: DType) -> Vec<Case> {
    let mut cases = thorough(dtype);
    cases.retain(|case| case.problem.visible_flops() < OPERATIONS);
    let first = cases.len();
    for (dim, value_dim) in shipped_dims() {
        let problem = |[heads, kv_heads]: [usize; 2], queries, keys| {
            Problem::new(1, heads, queries, dim)
                .with_kv_heads(kv_heads)
                .with_key_length(keys)
                .with_value_head_dim(value_dim)
                .with_dtype(dtype)
        };
        cases.extend(rules(problem));
    }
    // Each case has its own contents, so that no two cases make the same mistake.
    for (seed, case) in cases.iter_mut().enumerate().skip(first) {
        case.seed = seed as u64 + 1;
    }
    cases.into_iter().map(backward).collect()
}

fn backward(case: Case) -> Case {
    Case { problem: case.problem.backward(), ..case }
}

/// Returns the head dims of queries and of values that backward kernels ship for.
fn shipped_dims() -> BTreeSet<(usize, usize)> {
    let dims = |kernel| match kernel {
        Configuration::Backward(it) => Some((it.head_dim as usize, it.value_head_dim as usize)),
        _ => None,
    };
    kernels::shipped(Target::SM_90A).into_iter().filter_map(dims).collect()
}

/// Returns every mask with every score rule at every length, with groups, contents and memory
/// orders in turn.
fn rules(problem: impl Fn([usize; 2], usize, usize) -> Problem) -> Vec<Case> {
    let [capped, slopes, _] = Scores::EACH_RULE;
    let scores = [Scores::default(), capped, slopes, Scores::EVERY_RULE];
    let orders = [Order::Contiguous, Order::HeadsFirst, Order::Padded];
    let mut cases = Vec::new();
    // Lengths of 1, and of tiles of 64 and 128 queries and of 128 keys, and one less and one more;
    // some with rows that see nothing and keys that no row sees.
    for (queries, keys) in [(1, 130), (63, 129), (65, 127), (128, 128), (191, 70), (129, 257)] {
        let masks = [
            Mask::NONE,
            Mask::CAUSAL,
            Mask::window(Some(63), Some(0)),
            Mask::window(Some(5), Some(70)),
            Mask::CAUSAL.with_chunk(48),
            Mask::window(Some(100), Some(3)).with_chunk(129),
        ];
        for mask in masks {
            for scores in scores {
                let index = cases.len();
                // The divisors 5, 7 and 11 are coprime to the loop sizes, so that groups, contents,
                // orders and gradients of log-sum-exps meet different masks and scores.
                let group = GROUPS[index / 5 % GROUPS.len()];
                let heads = if group > 4 { 1 } else { 2 };
                let problem = problem([heads * group, heads], queries, keys);
                let problem = problem.with_mask(mask).with_scores(scores);
                let problem = match index % 11 {
                    3 => problem.backward().with_lse_gradient(),
                    _ => problem,
                };
                let case = Case::new(problem).with_order(orders[index / 7 % orders.len()]);
                cases.push(match index % 5 {
                    4 => case.with_contents(Contents::FINITE[index / 5 % Contents::FINITE.len()]),
                    _ => case,
                });
            }
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use flashcore::gpu::Chip;
    use flashcore::plan;
    use kernels::backward::{persistent_backward, tuned_backward};

    use super::*;
    use crate::check::gradients::arrangement;

    /// At least 2000 cases are for the kernel, and they reach every configuration that ships.
    #[test]
    fn two_thousand_cases_over_every_shipped_configuration() {
        let (mut served, mut reached, mut groups) = (0, HashSet::new(), HashSet::new());
        for case in [thorough_gradients(DType::F16), thorough_gradients(DType::BF16)].concat() {
            let candidates =
                plan::candidates(&Chip::H200, &case.problem, &arrangement(&case).unwrap());
            let chosen = candidates.into_iter().find(|it| it.accepted).and_then(|it| it.choice);
            let Some(Configuration::Backward(it)) = chosen.map(|it| *it.kernel()) else { continue };
            served += 1;
            groups.insert(case.problem.group_size());
            reached.insert(it.name());
        }
        assert!(served >= 2000, "{served}");
        assert!(GROUPS.iter().all(|group| groups.contains(group)), "{groups:?}");
        for kernel in kernels::shipped(Target::SM_90A) {
            // Deterministic configurations, and those with twice as many keys, are not chosen
            // because of a mask.
            if let Configuration::Backward(it) = kernel
                && tuned_backward(it.element, it.head_dim, it.value_head_dim, it.rules) == Some(it)
            {
                let chosen = persistent_backward(it).unwrap_or(it);
                assert!(reached.contains(&chosen.name()), "no case is for {}", chosen.name());
            }
        }
    }
}
