//! Softcaps far above all scores leave them what they are. The error of an exact tanh is relative to the
//! cap, and would be larger than the scores, so small ones take a polynomial. Gradients of heads wider
//! than 64 on Hopper have no registers for it, and are not tested here.

use flashcore_testing::scene::{Call, KeyMagnitudes, PlacementKind, Ragged};
use flashcore_testing::small;
use kernels::backward::tuned_backward;
use kernels::{Batch, Configuration, Decode, Forward, MaskKind, Mma, Prefill, Rules, Scalar, mma};
use ptx::{Element, Target};
use sim::Options;

use crate::prefill;

/// The call that `call` makes for these rules gives, with a softcap, what it gives without one: the
/// tolerance of capped scores, which grows with the cap, would allow more.
fn is_right(rules: Rules, cap: f32, call: impl Fn(Rules) -> Call) {
    let (plain, mut capped) = (call(rules), call(rules.capped()));
    capped.problem.scores.softcap = Some(cap);
    let (scene, plain) = (capped.scene().unwrap(), plain.scene().unwrap());
    let (memory, _) = scene.run(&Options::default()).unwrap();
    let accuracy = plain.judge(&memory);
    assert!(accuracy.passed(), "{} at {cap}: {accuracy}", scene.program.name);
}

/// Also where scores rise by far and a block is done again relative to a new reference.
#[test]
fn forward_leaves_scores() {
    for (mask, element) in [(MaskKind::Dense, Element::F16), (MaskKind::Causal, Element::BF16)] {
        for (cap, outlier) in [(1e6, 1.0), (1e30, 1.0), (1e30, 3000.0), (3e38, 1.0)] {
            is_right(Rules { mask, ..Rules::DENSE }, cap, |rules| {
                let forward = Forward { rules, element, output: element, ..small::forward() };
                let call = Call::new(Configuration::Forward(forward), 1, [150, 200], [2, 1]);
                call.with_keys(KeyMagnitudes::Peaks).with_outliers(outlier)
            });
        }
    }
}

/// With ALiBi capped scores come to units of log2 after it, by a factor as large as the cap. The first
/// rows see no key. The exact tanh is all that this kernel has there, so its own tolerance is allowed.
#[test]
fn forward_hides_keys_with_a_bias() {
    for (cap, element) in [(1e9, Element::F16), (1e30, Element::BF16)] {
        let rules = Rules { alibi: true, ..Rules::CAUSAL }.capped();
        let forward = Forward { rules, element, output: element, ..small::forward() };
        let mut call = Call::new(Configuration::Forward(forward), 1, [150, 90], [2, 1]);
        call.problem.scores.softcap = Some(cap);
        let scene = call.scene().unwrap();
        let (memory, _) = scene.run(&Options::default()).unwrap();
        let accuracy = scene.judge(&memory);
        assert!(accuracy.passed(), "{} at {cap}: {accuracy}", scene.program.name);
    }
}

#[test]
fn prefill_leaves_scores() {
    let ragged = Ragged::new(vec![66, 1, 3], vec![180, 70, 0]).over(PlacementKind::PackedWithGaps);
    for mask in [MaskKind::Dense, MaskKind::Local] {
        is_right(Rules { mask, ..Rules::DENSE }, 1e30, |rules| {
            let small = prefill::small();
            let prefill = Prefill { tile: Forward { rules, ..small.tile }, ..small };
            let call = Call::ragged(Configuration::Prefill(prefill), ragged.clone(), [2, 1]);
            call.with_keys(KeyMagnitudes::Peaks)
        });
    }
}

#[test]
fn decode_leaves_scores() {
    for (cap, alibi) in [(1e6, false), (1e30, true)] {
        is_right(Rules { alibi, ..Rules::LOCAL }, cap, |rules| {
            let decode = Configuration::Decode(Decode { rules, ..small::decode() });
            Call::ragged(decode, Ragged::new(vec![1; 3], vec![83, 0, 16]), [3, 1])
        });
    }
}

#[test]
fn mma_leaves_scores() {
    for (cap, alibi) in [(1e6, false), (1e6, true), (1e30, false), (1e30, true)] {
        is_right(Rules { alibi, ..Rules::CAUSAL }, cap, |rules| {
            let mma = Configuration::Mma(Mma { rules, ..small::mma() });
            Call::new(mma, 1, [70, 90], [2, 1])
        });
    }
}

#[test]
fn scalar_leaves_scores() {
    let (target, element, dim) = (Target::SM_80, Element::F32, 16);
    for (cap, alibi) in [(1e6, false), (1e30, true)] {
        is_right(Rules { alibi, ..Rules::CAUSAL }, cap, |rules| {
            let scalar = Scalar { target, element, head_dim: dim, value_head_dim: dim, rules };
            Call::new(Configuration::Scalar(scalar), 1, [20, 30], [2, 1])
        });
    }
}

#[test]
fn gradients_are_those_of_scores() {
    let (element, size) = (Element::BF16, [150, 150]);
    for (cap, dim) in [(1e6, 64), (1e30, 64)] {
        is_right(Rules::CAUSAL, cap, |rules| {
            let backward = tuned_backward(element, dim, dim, rules).unwrap();
            Call::new(Configuration::Backward(backward), 1, size, [2, 1])
        });
    }
    for (cap, dim) in [(1e6, 64), (1e6, 128)] {
        is_right(Rules::CAUSAL, cap, |rules| {
            let target = Target::SM_80;
            let backward =
                mma::tuned_backward(target, element, dim, dim, rules, false, Batch::Equal);
            Call::new(Configuration::BackwardMma(backward.unwrap()), 1, size, [2, 1])
        });
    }
}
