//! Every valid program assembles: random programs.

mod common;

use common::forms::{self, Form, Scene};
use common::tree;
use flashcore_ptx::Target;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

proptest! {
    // Every run has the same programs; PROPTEST_RNG_SEED selects others.
    #![proptest_config(ProptestConfig {
        cases: 48,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(1),
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_programs_assemble(trees in prop::collection::vec(tree::tree(24), 1..12)) {
        let target = Target::SM_90A;
        let forms = forms::all();
        // Each tensor map is a parameter, and some programs would have too many.
        let usable: Vec<&Form> = forms
            .iter()
            .filter(|form| !form.name.starts_with("tensor") && form.program(target).is_ok())
            .collect();
        let mut scene = Scene::new(target);
        tree::write(&mut scene, &usable, &trees);
        let program = scene.k.finish();
        // Every piece is valid, so the whole program must be.
        let program = program.unwrap_or_else(|invalid| panic!("{invalid}"));
        let messages = common::refused(&[("random".to_owned(), program)]);
        prop_assert!(messages.is_empty(), "{}", messages.join("\n"));
    }
}
