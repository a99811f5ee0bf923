//! What validates, runs: every form of every instruction, and random programs of them, end in the
//! simulator with a report or a failure, and never in a panic or without an end.

#[path = "../../ptx/tests/common/forms.rs"]
#[allow(dead_code)] // the assembler's tests use the rest
mod forms;

/// The forms are written for the crate under this name.
extern crate ptx as flashcore_ptx;

use flashcore_sim as sim;
use forms::{Form, Scene};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use ptx::{ParameterKind, Program, Target};
use sim::{Argument, Launch, Memory, Options, Policy, TensorMapArgument};

/// Runs a program over 4 KiB of memory and tensors of the boxes' ranks.
fn run(program: &Program, options: &Options) -> Result<sim::Report, sim::Failure> {
    let mut memory = Memory::new();
    let arguments = (program.parameters.iter())
        .map(|parameter| match &parameter.kind {
            ParameterKind::Scalar(_) => Argument::U32(1),
            ParameterKind::Address => {
                Argument::Address(memory.input(&parameter.name, vec![0x3C; 4096]), 0)
            }
            ParameterKind::TensorMap(tensor_box) => {
                let rank = tensor_box.extent.len();
                Argument::TensorMap(TensorMapArgument {
                    buffer: memory.input(&parameter.name, vec![0x3C; 64 * 1024]),
                    offset: 0,
                    dimensions: [vec![64; rank.min(2)], vec![2; rank.saturating_sub(2)]].concat(),
                    strides: (1..rank).map(|step| 128 << (2 * step)).collect(),
                    tensor_box: tensor_box.clone(),
                })
            }
        })
        .collect();
    let launch = Launch { program, grid: program.cluster, arguments };
    sim::run(&launch, &mut memory, options)
}

#[test]
fn every_form_runs_or_fails() {
    let (mut ended, mut failed) = (0, 0);
    for form in forms::all() {
        for target in [Target::SM_80, Target::SM_90A] {
            let Ok(program) = form.program(target) else { continue };
            for policy in [Policy::Latest, Policy::Random] {
                match run(&program, &Options::checked(policy, 1)) {
                    Ok(_) => ended += 1,
                    Err(_) => failed += 1,
                }
            }
        }
    }
    assert!(ended > 1000, "only {ended} ended, {failed} failed");
}

/// A program as a tree of choices; loops end.
#[derive(Clone, Debug)]
enum Tree {
    Form(prop::sample::Index),
    If(Vec<Tree>, Vec<Tree>),
    Loop(Vec<Tree>),
}

fn tree() -> impl Strategy<Value = Tree> {
    let leaf = any::<prop::sample::Index>().prop_map(Tree::Form);
    leaf.prop_recursive(3, 16, 4, |inner| {
        let block = prop::collection::vec(inner, 0..4);
        prop_oneof![
            (block.clone(), block.clone()).prop_map(|(a, b)| Tree::If(a, b)),
            block.prop_map(Tree::Loop),
        ]
    })
}

fn write(scene: &mut Scene, forms: &[&Form], trees: &[Tree]) {
    use ptx::Expression;
    for tree in trees {
        match tree {
            Tree::Form(index) => index.get(forms).write(scene),
            Tree::If(then, otherwise) => {
                let lane = scene.k.lane();
                scene.if_else(
                    lane.less(7),
                    |scene| write(scene, forms, then),
                    |scene| write(scene, forms, otherwise),
                );
            }
            Tree::Loop(body) => {
                let passes = scene.k.variable::<ptx::U32>(2);
                scene.loop_(|scene| {
                    scene.k.break_if(passes.equals(0));
                    scene.k.set(passes, passes - 1);
                    write(scene, forms, body);
                });
            }
        }
    }
}

/// Programs that are tried: a few, or as many as `FLASHCORE_FUZZ_SECONDS` has time for.
fn cases() -> u32 {
    let seconds = std::env::var("FLASHCORE_FUZZ_SECONDS").ok();
    seconds.and_then(|it| it.parse::<u32>().ok()).map_or(200, |seconds| seconds.max(1) * 100)
}

proptest! {
    // The same programs every time; PROPTEST_RNG_SEED tries others.
    #![proptest_config(ProptestConfig {
        cases: cases(),
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(1),
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_programs_run_or_fail(
        trees in prop::collection::vec(tree(), 1..8),
        seed in any::<u64>(),
    ) {
        let forms = forms::all();
        // Tensor maps are parameters: a few programs would have too many.
        let usable: Vec<&Form> = forms
            .iter()
            .filter(|form| !form.name.starts_with("tensor") && form.program(Target::SM_90A).is_ok())
            .collect();
        let mut scene = Scene::new(Target::SM_90A);
        write(&mut scene, &usable, &trees);
        let program = scene.k.finish().unwrap_or_else(|invalid| panic!("{invalid}"));
        for policy in Policy::HOSTILE {
            let options = Options { step_limit: 100_000, ..Options::checked(policy, seed) };
            let _ = run(&program, &options);
        }
    }
}
