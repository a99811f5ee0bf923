//! The kernels of `crates/kernels` in the simulator: right values under every scheduling policy and
//! many seeds, without a hazard.

mod append;
mod attention;
mod backward;
mod backward_mma;
mod banks;
mod chosen;
mod decode;
mod finder;
mod fp8;
mod function;
mod high_caps;
mod invariance;
mod mma;
mod mutation;
mod prefill;
mod product;
mod ragged_backward;
mod single;
mod widen;

use std::collections::HashSet;

use flashcore_testing::scene::{Call, Scene, schedules};
use kernels::{Configuration, shipped};
use ptx::Target;
use sim::{Mode, Options, Policy};

/// Runs a scene under every hostile policy and some seeds; each run must end without a hazard and
/// give the right values.
pub(crate) fn every_schedule(scene: &Scene, mode: Mode, seeds: u64) {
    some_schedules(scene, mode, &schedules(&Policy::HOSTILE, 0..seeds));
}

/// Runs a scene under the given schedules; each run must end without a hazard and give the right
/// values.
pub(crate) fn some_schedules(scene: &Scene, mode: Mode, schedules: &[(Policy, u64)]) {
    let options = Options { mode, ..Options::default() };
    let outcomes = scene.sweep(schedules, &options, || ());
    assert_eq!(outcomes.len(), schedules.len());
    for outcome in outcomes {
        if let Some(complaint) = outcome.complaint() {
            let (name, policy, seed) = (&scene.program.name, outcome.policy, outcome.seed);
            panic!("{name}, {}, policy {policy}, seed {seed}: {complaint}", scene.size);
        }
    }
}

/// A call with this softcap gives the right values.
pub(crate) fn is_right_with_cap(mut call: Call, cap: f32) {
    call.problem.scores.softcap = Some(cap);
    let scene = call.scene().unwrap();
    let (memory, _) = scene.run(&Options::default()).unwrap();
    let accuracy = scene.judge(&memory);
    assert!(accuracy.passed(), "{} at {cap}: {accuracy}", scene.program.name);
}

/// A second launch over what the first left behind gives the same, and leaves the same.
pub(crate) fn can_be_launched_again(scene: &Scene) {
    let scene = scene.prepared(&Options::default()).unwrap();
    let (memory, _) = scene.run(&Options::default()).unwrap();
    assert!(scene.judge(&memory).passed());
    let again = scene.after_run(&memory);
    let (second, _) = again.run(&Options::default()).unwrap();
    assert!(again.judge(&second).passed());
    for id in memory.ids() {
        assert_eq!(memory.bytes(id), second.bytes(id));
    }
}

/// Every shipped kernel other than matrix products is right on its small scene.
#[test]
fn every_shipped_kernel_has_a_scene() {
    let mut seen = HashSet::new();
    for kernel in [Target::SM_80, Target::SM_90A].into_iter().flat_map(shipped) {
        if matches!(kernel, Configuration::Product(_)) {
            continue;
        }
        let scene = Scene::small(&kernel).unwrap_or_else(|it| panic!("{}: {it}", kernel.name()));
        assert_eq!(scene.program.name, kernel.name());
        // Many kernels differ between targets only in the name of the target.
        let text = ptx::print(&scene.program);
        let (_, text) = text.split_once(".address_size").expect("it follows the target");
        if seen.insert(text.to_owned()) {
            some_schedules(&scene, Mode::Values, &[(Policy::Random, 1)]);
        }
    }
    assert!(seen.len() > 200, "{}", seen.len());
}
