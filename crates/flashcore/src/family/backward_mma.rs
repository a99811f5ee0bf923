//! Gradients of attention with mma.sync, on Ampere and later: the host side of the `backward-mma`
//! kernel. The launches around it are those of `backward`.

use kernels::Configuration;
use kernels::attention::Batch;
use kernels::forward::Workload;
use kernels::mma::tuned_backward;
use ptx::{Capability, Target, Version};

use super::backward::{Kernels, REASON, launch};
use super::forward::equal_lengths_workload;
use super::{Asked, Choice, Family, ragged_backward};
use crate::chip::Chip;
use crate::plan::rows::Rows;
use crate::problem::Pass;

/// The `backward-mma` family.
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
        let target = target(chip);
        if !(target.has(Capability::Mma) && target.has(Capability::AsyncCopies)) {
            return Err(format!("{target} has no mma.sync for 16-bit floats, or no cp.async"));
        }
        let (workload, batch) = match problem.has_equal_lengths() {
            true => (workload(asked)?, Batch::Equal),
            false => (ragged_backward::workload(asked)?, Batch::Ragged),
        };
        let (dim, value_dim) = (workload.head_dim, workload.value_head_dim);
        let (element, rules, deterministic) =
            (workload.element, workload.rules, problem.deterministic);
        let backward = tuned_backward(target, element, dim, value_dim, rules, deterministic, batch)
            .ok_or_else(|| format!("head dims {dim} and {value_dim} are beyond 256"))?;
        Rows::check_offsets(problem, arrangement)?;
        let reason = if batch == Batch::Equal { REASON } else { ragged_backward::REASON };
        launch(chip, problem, &kernels(backward), reason.to_owned())
    }
}

/// Returns the target to build for. A driver whose PTX is older than 8.1 cannot compile vector
/// reductions (`red.global.add.v4.f32`): there it is sm_80, whose kernels run on every later GPU
/// and add numbers one at a time.
fn target(chip: &Chip) -> Target {
    let knows = chip.ptx >= Version { major: 8, minor: 1 };
    if knows || !chip.target.has(Capability::VectorReductions) {
        chip.target
    } else {
        Target::SM_80
    }
}

/// Returns what the choice among configurations depends on, or why sequences of equal lengths are
/// not served.
fn workload(asked: &Asked<'_>) -> Result<Workload, String> {
    let Asked { chip, problem, arrangement } = *asked;
    let workload = equal_lengths_workload(chip, problem)?;
    if problem.key_length == 0 {
        return Err("there are no keys".to_owned());
    }
    arrangement.check_copies(problem)?;
    Ok(workload)
}

/// Returns a configuration with the launches before and after it.
pub(super) fn kernels(backward: kernels::mma::BackwardMma) -> Kernels {
    Kernels { kernel: Configuration::BackwardMma(backward), pass: backward.pass() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::plan::Arrangement;
    use crate::problem::{Problem, Storage};

    fn chosen(target: Target, problem: &Problem) -> Result<Choice, String> {
        let arrangement = Arrangement::contiguous(problem).unwrap();
        let chip = Chip::typical(target);
        BackwardMma.choose(&Asked { chip: &chip, problem, arrangement: &arrangement })
    }

    fn packed(problem: &Problem) -> Problem {
        problem.clone().with_storage(Storage::Packed(900), Storage::Packed(900))
    }

    /// Every head dim is served, deterministic or not, for equal and ragged batches, and every
    /// launch can be built.
    #[test]
    fn every_width_is_served_on_every_target_with_mma_and_copies() {
        for target in [Target::SM_80, Target::SM_86, Target::SM_89, Target::SM_90A, Target::SM_120]
        {
            for dim in (8..=256).step_by(8) {
                let plain = Problem::new(3, 4, 300, dim).with_kv_heads(2).with_dtype(DType::BF16);
                let plain = plain.with_value_head_dim(264 - dim).backward();
                let ordered = plain.clone().deterministic();
                for problem in [&plain, &ordered, &packed(&plain), &packed(&ordered)] {
                    let choice = chosen(target, problem).unwrap();
                    for launch in &choice.launches {
                        let built = launch.kernel.program().map(|_| ());
                        assert_eq!(built, Ok(()), "{}", launch.kernel.name());
                    }
                    let Configuration::BackwardMma(it) = *choice.kernel() else { panic!() };
                    let ragged = !problem.has_equal_lengths();
                    assert_eq!(
                        (it.batch == Batch::Ragged, it.deterministic),
                        (ragged, problem.deterministic)
                    );
                }
            }
        }
    }

    #[test]
    fn what_is_not_served_is_refused_with_the_reason() {
        let problem = Problem::new(2, 4, 100, 64).with_dtype(DType::F16).backward();
        let refusal = |problem: &Problem| chosen(Target::SM_80, problem).unwrap_err();
        assert_eq!(
            chosen(Target::SM_75, &problem).unwrap_err(),
            "sm_75 has no mma.sync for 16-bit floats, or no cp.async"
        );
        let wide = Problem::new(2, 4, 100, 264).with_dtype(DType::F16).backward();
        assert_eq!(refusal(&wide), "head dim 264 is not a multiple of 8 up to 256");
        assert_eq!(refusal(&problem.clone().with_key_length(0)), "there are no keys");
        let many = Problem::new(1 << 20, 8, 4096, 256).with_kv_heads(1).with_dtype(DType::F16);
        assert_eq!(
            refusal(&many.backward()),
            "the number of query blocks is too large for the GPU kernel"
        );
        let pages = Storage::Paged { size: 16, columns: 256, pages: 9 };
        let paged = problem.with_storage(Storage::Packed(200), pages);
        assert_eq!(refusal(&paged), "gradients of keys in pages are not computed");
    }
}
