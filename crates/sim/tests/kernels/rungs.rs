//! The other first kernels: scalar attention, one wgmma, the ceiling loop.

use flashcore_sim as sim;
use kernels::{Ceiling, Scalar, Single};
use ptx::{Element, Target};
use sim::scene::{AttentionSize, Scene};
use sim::{Mode, Options, Policy};

use crate::every_schedule;

#[test]
fn one_wgmma() {
    for element in [Element::F16, Element::BF16] {
        every_schedule(&Scene::single(Single { element }).unwrap(), Mode::Checked, 32);
    }
}

/// The smallest product still needs each of its fences and waits.
#[test]
fn one_wgmma_with_a_statement_missing() {
    use ptx::Instruction as I;
    use sim::HazardKind as H;
    let scene = Scene::single(Single { element: Element::F16 }).unwrap();
    for site in sim::mutate::sites(&scene.program) {
        let expected: &[H] = match &site.instruction {
            I::Fence(_) => &[H::MissingProxyFence],
            I::BarrierSync { .. } => &[H::DataRace, H::OverwrittenInFlight, H::UninitialisedMemory],
            I::WgmmaFence => &[H::MissingWgmmaFence],
            I::WgmmaCommit | I::WgmmaWait { .. } => &[H::AccumulatorInFlight],
            other => panic!("no expectation for {other:?}"),
        };
        let mutant = sim::mutate::without(&scene.program, site.index);
        for policy in Policy::HOSTILE {
            for seed in 0..8 {
                let mut memory = scene.memory.clone();
                let launch = scene.launch_of(&mutant);
                let result = sim::run(&launch, &mut memory, &Options::checked(policy, seed));
                let failure = result.expect_err("something is missing");
                let kind = failure.hazard().expect("a hazard").kind;
                assert!(expected.contains(&kind), "{:?}: {failure}", site.instruction);
            }
        }
    }
}

#[test]
fn ceiling() {
    for (unroll, warpgroups) in [(1, 1), (1, 2)] {
        let configuration = Ceiling { element: Element::BF16, unroll, warpgroups };
        let scene = Scene::ceiling(configuration, 2).unwrap();
        every_schedule(&scene, Mode::Values, 32);
        every_schedule(&scene, Mode::Checked, 2);
    }
    let scene = Scene::ceiling(Ceiling::PLAIN, 2).unwrap();
    every_schedule(&scene, Mode::Checked, 1);
}

#[test]
fn scalar_attention() {
    for (element, causal) in [(Element::F32, false), (Element::BF16, true), (Element::F16, false)] {
        let (head_dim, value_head_dim) = (40, 33);
        let target = Target::SM_80;
        let scalar = Scalar { target, element, head_dim, value_head_dim, causal };
        let scene = Scene::scalar(scalar, &AttentionSize::SCALAR).unwrap();
        every_schedule(&scene, Mode::Checked, 32);
        // More queries than keys: rows that see nothing.
        let size = AttentionSize { batch: 2, queries: 9, keys: 4, heads: 1, key_heads: 1 };
        every_schedule(&Scene::scalar(scalar, &size).unwrap(), Mode::Checked, 2);
    }
}
