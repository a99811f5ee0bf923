//! Every valid program runs: every form of every instruction, and random programs of them, end in
//! the simulator with a report or a failure, never with a panic or an endless loop.

#[path = "../../ptx/tests/common/forms.rs"]
#[allow(dead_code)] // the assembler's tests use the rest
mod forms;
#[path = "../../ptx/tests/common/tree.rs"]
mod tree;

/// The forms are written for the crate under this name.
extern crate ptx as flashcore_ptx;

use flashcore_sim as sim;
use forms::{Form, Scene};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use ptx::{ParameterKind, Program, Target};
use sim::{Argument, Launch, Memory, Options, Policy, TensorMapArgument};

/// Runs a program over 4 KiB buffers and tensors of the ranks of its tensor maps.
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

/// Returns how many programs are tried: a few, or as many as `FLASHCORE_FUZZ_SECONDS` has time for.
fn cases() -> u32 {
    let seconds = std::env::var("FLASHCORE_FUZZ_SECONDS").ok();
    seconds.and_then(|it| it.parse::<u32>().ok()).map_or(200, |seconds| seconds.max(1) * 100)
}

proptest! {
    // Every run has the same programs; PROPTEST_RNG_SEED selects others.
    #![proptest_config(ProptestConfig {
        cases: cases(),
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(1),
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_programs_run_or_fail(
        trees in prop::collection::vec(tree::tree(16), 1..8),
        seed in any::<u64>(),
    ) {
        let forms = forms::all();
        // Each tensor map is a parameter, and some programs would have too many.
        let usable: Vec<&Form> = forms
            .iter()
            .filter(|form| !form.name.starts_with("tensor") && form.program(Target::SM_90A).is_ok())
            .collect();
        let mut scene = Scene::new(Target::SM_90A);
        tree::write(&mut scene, &usable, &trees);
        let program = scene.k.finish().unwrap_or_else(|invalid| panic!("{invalid}"));
        for policy in Policy::HOSTILE {
            let options = Options { step_limit: 100_000, ..Options::checked(policy, seed) };
            let _ = run(&program, &options);
        }
    }
}
