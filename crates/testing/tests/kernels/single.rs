//! Scalar attention and a single `wgmma` in the simulator.

use flashcore_testing::check::Order;
use flashcore_testing::scene::{Call, Scene};
use kernels::{Configuration, MaskKind, Rules, Scalar, Single};
use ptx::{Element, Target};
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
                let result = scene.run_program(&mutant, &Options::checked(policy, seed));
                let failure = result.expect_err("something is missing");
                let kind = failure.hazard().expect("a hazard").kind;
                assert!(expected.contains(&kind), "{:?}: {failure}", site.instruction);
            }
        }
    }
}

#[test]
fn scalar_attention() {
    let local = Rules { softcap: true, ..Rules::LOCAL };
    let chunked = Rules { mask: MaskKind::Chunked, ..local };
    for (element, rules) in [
        (Element::F32, Rules::DENSE),
        (Element::BF16, Rules::CAUSAL),
        (Element::F16, Rules::DENSE),
        (Element::F32, Rules { alibi: true, sinks: true, ..local }),
        (Element::F16, Rules { alibi: true, sinks: true, ..chunked }),
        (Element::BF16, chunked),
    ] {
        let (head_dim, value_head_dim) = (40, 33);
        let target = Target::SM_80;
        let scalar = Scalar { target, element, head_dim, value_head_dim, rules };
        let scalar = Configuration::Scalar(scalar);
        every_schedule(&Scene::small(&scalar).unwrap(), Mode::Checked, 8);
        // More queries than keys, so that some rows see no key.
        let early = Call::new(scalar, 2, [9, 4], [1, 1]);
        every_schedule(&early.scene().unwrap(), Mode::Checked, 2);
        // Heads first, and with gaps.
        for order in [Order::HeadsFirst, Order::Padded] {
            let call = Call { order, ..Call::new(scalar, 2, [5, 9], [4, 2]) };
            every_schedule(&call.scene().unwrap(), Mode::Checked, 2);
        }
    }
}
