//! What validates, assembles: random programs.

mod common;

use common::forms::{self, Form, Scene};
use common::tree;
use flashcore_ptx::Target;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

proptest! {
    // The same programs every time; PROPTEST_RNG_SEED tries others.
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
        // Tensor maps are parameters: a few programs would have too many.
        let usable: Vec<&Form> = forms
            .iter()
            .filter(|form| !form.name.starts_with("tensor") && form.program(target).is_ok())
            .collect();
        let mut scene = Scene::new(target);
        tree::write(&mut scene, &usable, &trees);
        let program = scene.k.finish();
        // Every piece is valid, so the whole is.
        let program = program.unwrap_or_else(|invalid| panic!("{invalid}"));
        let messages = common::refused(&[("random".to_owned(), program)]);
        prop_assert!(messages.is_empty(), "{}", messages.join("\n"));
    }
}
