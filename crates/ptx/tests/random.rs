//! What validates, assembles: random programs.

mod common;

use common::forms::{self, Form, Scene};
use flashcore_ptx::{Expression, Target};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// A program as a tree of choices.
#[derive(Clone, Debug)]
enum Tree {
    Form(prop::sample::Index),
    If(Vec<Tree>, Vec<Tree>),
    Loop(Vec<Tree>),
}

fn tree() -> impl Strategy<Value = Tree> {
    let leaf = any::<prop::sample::Index>().prop_map(Tree::Form);
    leaf.prop_recursive(3, 24, 4, |inner| {
        let block = prop::collection::vec(inner, 0..4);
        prop_oneof![
            (block.clone(), block.clone()).prop_map(|(a, b)| Tree::If(a, b)),
            block.prop_map(Tree::Loop),
        ]
    })
}

fn write(scene: &mut Scene, forms: &[&Form], trees: &[Tree]) {
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
                let lane = scene.k.lane();
                scene.loop_(|scene| {
                    scene.k.break_if(lane.at_least(3));
                    write(scene, forms, body);
                });
            }
        }
    }
}

proptest! {
    // The same programs every time; PROPTEST_RNG_SEED tries others.
    #![proptest_config(ProptestConfig {
        cases: 48,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(1),
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_programs_assemble(trees in prop::collection::vec(tree(), 1..12)) {
        let target = Target::SM_90A;
        let forms = forms::all();
        // Tensor maps are parameters: a few programs would have too many.
        let usable: Vec<&Form> = forms
            .iter()
            .filter(|form| !form.name.starts_with("tensor") && form.program(target).is_ok())
            .collect();
        let mut scene = Scene::new(target);
        write(&mut scene, &usable, &trees);
        let program = scene.k.finish();
        // Every piece is valid, so the whole is.
        let program = program.unwrap_or_else(|invalid| panic!("{invalid}"));
        let messages = common::refused(&[("random".to_owned(), program)]);
        prop_assert!(messages.is_empty(), "{}", messages.join("\n"));
    }
}
