//! Attention with `mma.sync`.

use flashcore_sim as sim;
use kernels::Mma;
use kernels::mma::Weave;
use kernels::product::Source;
use ptx::{Element, Target};
use sim::scene::{AttentionSize, Scene};
use sim::{Budget, Measure, Mode, Options, Policy};

use crate::every_schedule;

/// A small configuration that has every part.
fn small() -> Mma {
    Mma {
        target: Target::SM_80,
        element: Element::BF16,
        head_dim: 64,
        value_head_dim: 64,
        causal: false,
        warps: 2,
        row_tiles: 2,
        key_block: 32,
        strip: 16,
        ahead: 1,
        query_source: Source::Shared,
        weave: Weave::Scores,
        residents: 1,
        accumulate: Element::F32,
        split: false,
    }
}

fn size(queries: usize, keys: usize, heads: usize, key_heads: usize) -> AttentionSize {
    AttentionSize { batch: 1, queries, keys, heads, key_heads }
}

#[test]
fn mma_is_attention() {
    let causal = Mma { causal: true, ..small() };
    let plain = Mma { strip: 32, ..small() };
    let registers = Mma { query_source: Source::Registers, ..small() };
    for (mma, size) in [
        (small(), size(70, 70, 2, 1)),
        (causal, size(150, 100, 2, 1)),
        (causal, size(37, 133, 3, 1)),
        // More queries than keys: rows that see nothing.
        (causal, size(150, 40, 1, 1)),
        (plain, size(70, 101, 2, 1)),
        (Mma { causal: true, ahead: 2, ..plain }, size(150, 133, 2, 2)),
        (Mma { row_tiles: 1, warps: 4, ahead: 2, ..causal }, size(200, 165, 2, 2)),
        (Mma { weave: Weave::Products, key_block: 64, ..registers }, size(65, 129, 1, 1)),
        (
            Mma { element: Element::F16, head_dim: 40, value_head_dim: 72, ..registers },
            size(65, 97, 2, 1),
        ),
        (Mma { head_dim: 8, value_head_dim: 136, ..small() }, size(33, 33, 1, 1)),
        (Mma { head_dim: 200, value_head_dim: 8, row_tiles: 1, ..causal }, size(33, 50, 1, 1)),
        // A single query and a single key.
        (causal, size(1, 1, 1, 1)),
    ] {
        every_schedule(&Scene::mma(mma, &size).unwrap(), Mode::Checked, 1);
    }
}

#[test]
fn mma_under_many_schedules() {
    for mma in [small(), Mma { causal: true, weave: Weave::Products, ..small() }] {
        let scene = Scene::mma(mma, &size(66, 100, 1, 1)).unwrap();
        every_schedule(&scene, Mode::Values, 32);
        every_schedule(&scene, Mode::Checked, 4);
    }
}

#[test]
fn neither_matrices_nor_copies_meet_at_a_bank() {
    for mma in [
        small(),
        Mma { causal: true, head_dim: 72, value_head_dim: 40, ..small() },
        Mma { head_dim: 128, value_head_dim: 128, row_tiles: 1, ..small() },
    ] {
        let scene = Scene::mma(mma, &size(130, 133, 1, 1)).unwrap();
        let budget = Budget::default().at_most(Measure::BankConflicts, 0);
        let options = Options { budget, ..Options::values(Policy::Earliest, 0) };
        scene.run(&options).unwrap_or_else(|failure| panic!("{}: {failure}", scene.program.name));
    }
}
