//! Random programs of all instruction forms.

use flashcore_ptx::{Expression, U32};
use proptest::prelude::*;

use super::forms::{Form, Scene};

/// A program as a tree of forms, branches and loops that end.
#[derive(Clone, Debug)]
pub(crate) enum Tree {
    Form(prop::sample::Index),
    If(Vec<Tree>, Vec<Tree>),
    Loop(Vec<Tree>),
}

/// Returns a strategy for trees of about `size` pieces at most.
pub(crate) fn tree(size: u32) -> impl Strategy<Value = Tree> {
    let leaf = any::<prop::sample::Index>().prop_map(Tree::Form);
    leaf.prop_recursive(3, size, 4, |inner| {
        let block = prop::collection::vec(inner, 0..4);
        prop_oneof![
            (block.clone(), block.clone()).prop_map(|(a, b)| Tree::If(a, b)),
            block.prop_map(Tree::Loop),
        ]
    })
}

/// Writes trees into a scene.
pub(crate) fn write(scene: &mut Scene, forms: &[&Form], trees: &[Tree]) {
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
                let passes = scene.k.variable::<U32>(2);
                scene.loop_(|scene| {
                    scene.k.break_if(passes.equals(0));
                    scene.k.set(passes, passes - 1);
                    write(scene, forms, body);
                });
            }
        }
    }
}
