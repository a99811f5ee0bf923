//! Attention of many queries over 8-bit caches: a launch widens the cache to 16 bits in memory of
//! the plan, and the family that serves the 16-bit problem best does the rest.
//!
//! The additional pass over the cache costs little beside the products: a few hundredths of the
//! time for 2k queries over 32k keys. `decode` serves few queries.

use kernels::parameter::{Number, Tensor};
use kernels::widen::POSITIONS;
use kernels::{Configuration, Widen as Kernel};
use ptx::Element;

use super::{
    Asked, Choice, Contents, Family, check_head_dims, check_positions, forward, mma, narrow_cache,
    prefill,
};
use crate::chip::Chip;
use crate::plan::{Launch, widened};
use crate::problem::Problem;

/// The `widen` family.
pub(super) struct Widen;

/// The families that may serve the widened problem, best first.
const INNER: [&dyn Family; 3] =
    [&forward::Forward, &prefill::Prefill, &mma::Mma { sums: Element::F32 }];

impl Family for Widen {
    fn name(&self) -> &'static str {
        "widen"
    }

    fn concerns(&self, problem: &Problem) -> bool {
        self.pass() == problem.pass && problem.dtypes.key.is_8_bit()
    }

    fn choose(&self, asked: &Asked<'_>) -> Result<Choice, String> {
        let Asked { chip, problem, arrangement } = *asked;
        narrow_cache(problem)?;
        check_head_dims(problem, 16)?;
        arrangement.check_copies(problem)?;
        launch(chip, problem, |wide| {
            let arrangement = widened::arrangement(problem, arrangement)?;
            let asked = Asked { chip, problem: wide, arrangement: &arrangement };
            let mut reasons = Vec::new();
            for family in INNER {
                match family.choose(&asked) {
                    Ok(choice) => {
                        let reason =
                            format!("{} over widened keys: {}", family.name(), choice.reason);
                        return Ok(Choice { reason, ..choice });
                    }
                    Err(reason) => reasons.push(format!("{}: {reason}", family.name())),
                }
            }
            Err(reasons.join("; "))
        })
    }
}

/// Returns what is chosen for the widened problem, with the launch that widens before it.
pub(super) fn launch(
    chip: &Chip,
    problem: &Problem,
    choose: impl FnOnce(&Problem) -> Result<Choice, String>,
) -> Result<Choice, String> {
    let (element, cache) = narrow_cache(problem)?;
    if !cache.is_converted_by(chip.target) {
        return Err(format!("{} does not convert {}", chip.target, cache.element));
    }
    check_positions(problem)?;
    // Each sequence of the copy has keys, and nothing would be written there.
    if problem.entries() == 0 {
        return Err("the cache has no batch entries".to_owned());
    }
    let tensors = [Tensor::WideKey, Tensor::WideValue];
    let [keys, values] = tensors.map(|tensor| widened::bytes(problem, tensor));
    let bytes = [keys?, values?];
    check_memory(problem, bytes[0].saturating_add(bytes[1]))?;
    let mut choice = choose(&widened::problem(problem))?;
    let key_blocks = problem.key_length.div_ceil(POSITIONS as usize).max(1);
    let blocks = problem.batch.checked_mul(key_blocks).filter(|it| *it <= i32::MAX as usize);
    let blocks = blocks.ok_or("the number of keys of all sequences is too large")? as u32;
    choice.launches.iter_mut().for_each(|launch| launch.widened = true);
    let kernel = Configuration::Widen(Kernel {
        target: chip.target,
        element,
        cache,
        head_dim: problem.head_dim as u32,
        value_head_dim: problem.value_head_dim as u32,
        paged: problem.keys.is_paged(),
    });
    // Launches that depend on lengths only stay in front.
    let widening = Launch::new(kernel, blocks, [(Number::KeyBlocks, key_blocks as u32)]);
    choice.launches.insert(choice.prepared, widening);
    choice.main += 1;
    for (tensor, bytes) in tensors.into_iter().zip(bytes) {
        choice.add_memory(tensor, bytes, Contents::Anything);
    }
    Ok(choice)
}

/// Refuses widened tensors that are larger than the whole cache would be in 16 bits, beyond a
/// gibibyte: tables of pages have columns for sequences far longer than the pages hold together,
/// and how long they are is known on the device alone.
fn check_memory(problem: &Problem, bytes: u64) -> Result<(), String> {
    const ALWAYS: u64 = 1 << 30;
    let [keys, values] = [problem.key_shape(), problem.value_shape()].map(|shape| shape.elements());
    let elements = keys.zip(values).and_then(|(keys, values)| keys.checked_add(values));
    let cache = elements.map_or(u64::MAX, |elements| (elements as u64).saturating_mul(2));
    match bytes <= cache.max(ALWAYS) {
        true => Ok(()),
        false => Err(format!(
            "sequences of {} keys are {bytes} bytes in 16 bits, and the whole cache is {cache}",
            problem.key_length
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::plan::{Plan, Preference, Source};
    use crate::problem::{Descale, Descales, Mask, Storage};
    use ptx::Target;

    fn cached(queries: usize) -> Problem {
        Problem::new(2, 16, queries, 128)
            .with_kv_heads(4)
            .with_key_length(4096)
            .with_dtype(DType::BF16)
            .with_kv_dtype(DType::E4M3)
            .with_descales(Descales::of_cache(Descale::PerHead))
            .with_mask(Mask::CAUSAL)
    }

    fn chosen(chip: &Chip, problem: &Problem) -> Choice {
        let plan = Plan::on_chip(chip, problem, &Preference::default()).unwrap();
        plan.chosen.choice.unwrap()
    }

    #[test]
    fn many_queries_are_served_by_the_best_family_over_a_widened_cache() {
        let names = |choice: &Choice| -> Vec<&'static str> {
            choice.launches.iter().map(|launch| launch.kernel.family()).collect()
        };
        let many = chosen(&Chip::H200, &cached(2048));
        assert_eq!(names(&many), ["widen", "forward"]);
        assert_eq!(many.kernel().family(), "forward");
        let pages = Storage::Paged { size: 16, columns: 256, pages: 1000 };
        let paged = chosen(&Chip::H200, &cached(512).with_storage(Storage::Packed(900), pages));
        assert_eq!(names(&paged), ["sequencer", "widen", "prefill"]);
        // As large as two sequences of maximum length, whatever the number of pages: 16 bits per
        // element.
        let memory = paged.memory.iter().filter(|it| matches!(it.source, Source::Tensor(_)));
        assert_eq!(memory.map(|it| it.bytes).sum::<u64>(), 2 * 2 * 4096 * 4 * 128 * 2);
        assert_eq!(names(&chosen(&Chip::typical(Target::SM_89), &cached(2048))), ["widen", "mma"]);
        assert_eq!(names(&chosen(&Chip::H200, &cached(4))), ["decode"]);
    }

    /// A table for 256 sequences of 131,072 keys, over pages that hold a million.
    #[test]
    fn sequences_that_the_pages_do_not_hold_are_not_widened() {
        let pages = |columns| Storage::Paged { size: 16, columns, pages: 1 << 16 };
        let many = Problem { batch: 256, ..cached(64).with_key_length(131_072) };
        let many = many.with_storage(Storage::Packed(16_384), pages(8192));
        let plan = Plan::on_chip(&Chip::H200, &many, &Preference::default()).unwrap();
        assert_eq!(plan.chosen.kernel, "decode");
        let refused = plan.candidates.iter().find(|it| it.kernel == "widen").unwrap();
        assert!(refused.reason.contains("the whole cache is 2147483648"), "{}", refused.reason);
        let few = Problem { batch: 2, ..many.clone() };
        let few = few.with_storage(Storage::Packed(128), pages(8192));
        assert_eq!(chosen(&Chip::H200, &few).launches[0].kernel.family(), "widen");
    }

    #[test]
    fn what_is_not_served_is_refused_with_the_reason() {
        let refusal = |chip: &Chip, problem: Problem| {
            let preference = Preference::named("widen");
            Plan::on_chip(chip, &problem, &preference).unwrap_err().to_string()
        };
        let old = refusal(&Chip::typical(Target::SM_80), cached(64));
        assert!(old.contains("sm_80 does not convert e4m3"), "{old}");
        let odd = Problem { head_dim: 72, ..cached(64) };
        let odd = refusal(&Chip::H200, odd);
        assert!(odd.contains("head dim 72 is not a multiple of 16 up to 256"), "{odd}");
        let eight = refusal(&Chip::H200, cached(64).with_dtype(DType::E5M2));
        assert!(eight.contains("over an 8-bit cache both are f16 or both bf16"), "{eight}");
        let empty = Storage::Paged { size: 16, columns: 256, pages: 0 };
        for empty in [empty, Storage::Entries(0)] {
            let empty = refusal(&Chip::H200, cached(64).with_storage(Storage::Padded, empty));
            assert!(empty.contains("the cache has no batch entries"), "{empty}");
        }
        let many = refusal(
            &Chip::H200,
            cached(64).with_storage(Storage::Padded, Storage::Entries(1 << 31)),
        );
        assert!(many.contains("2147483648 batch entries or pages are more than"), "{many}");
        // Without an 8-bit cache, the family is not among the candidates.
        let plain = cached(64).with_dtype(DType::BF16).with_descales(Descales::NONE);
        let plan = Plan::on_chip(&Chip::H200, &plain, &Preference::default()).unwrap();
        assert!(plan.candidates.iter().all(|it| it.kernel != "widen"));
    }
}
