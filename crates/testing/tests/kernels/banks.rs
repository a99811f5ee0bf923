//! Bank conflicts of three kernels that have many, some and none by construction. The test
//! `differential` runs the same kernels on a GPU, where a profiler can count them.

use flashcore_testing::scene::Scene;
use sim::{Budget, Measure, Mode, Options, Policy};

use crate::every_schedule;

#[test]
fn many_some_and_none() {
    let scenes = Scene::bank_conflicts().unwrap();
    // In each of 4 warps and 1024 rounds: 31 per load and 31 per store; 12 for matrices, 2 for
    // pairs and 1 for words; none.
    for (scene, expected) in scenes.iter().zip([4096 * 62, 4096 * 15, 0]) {
        let (_, report) = scene.run(&Options::checked(Policy::Earliest, 0)).unwrap();
        assert_eq!(report.counts.get(Measure::BankConflicts), expected, "{}", scene.program.name);
        every_schedule(scene, Mode::Checked, 1);
    }
}

#[test]
fn a_budget_can_be_asserted() {
    let [_, some, none] = Scene::bank_conflicts().unwrap();
    let budget = Budget::default().at_most(Measure::BankConflicts, 0);
    let options = Options { budget, ..Options::values(Policy::Earliest, 0) };
    none.run(&options).unwrap();
    let failure = some.run(&options).unwrap_err().to_string();
    assert_eq!(failure, "over budget: bank conflicts is 61440, at most 0 allowed");
}
