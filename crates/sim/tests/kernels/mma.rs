//! Attention with `mma.sync`.

use flashcore_sim as sim;
use kernels::product::Source;
use kernels::{Combine, Mma, Shipped, shipped};
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
        ahead: 1,
        query_source: Source::Shared,
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
    let half = Mma { element: Element::F16, accumulate: Element::F16, ..small() };
    let registers = Mma { query_source: Source::Registers, ..small() };
    for (mma, size) in [
        (small(), size(70, 70, 2, 1)),
        (causal, size(150, 100, 2, 1)),
        (causal, size(37, 133, 3, 1)),
        // Two groups of three heads, the longest tiles of each first.
        (causal, AttentionSize { batch: 2, ..size(150, 133, 3, 1) }),
        // More queries than keys: rows that see nothing.
        (causal, size(150, 40, 1, 1)),
        (small(), size(70, 101, 2, 1)),
        (Mma { ahead: 2, ..causal }, size(150, 133, 2, 2)),
        (Mma { row_tiles: 1, warps: 4, ahead: 2, ..causal }, size(200, 165, 2, 2)),
        (Mma { key_block: 64, ..registers }, size(65, 129, 1, 1)),
        (
            Mma { element: Element::F16, head_dim: 40, value_head_dim: 72, ..registers },
            size(65, 97, 2, 1),
        ),
        (Mma { head_dim: 8, value_head_dim: 136, ..small() }, size(33, 33, 1, 1)),
        (Mma { head_dim: 200, value_head_dim: 8, row_tiles: 1, ..causal }, size(33, 50, 1, 1)),
        // Products added up in f16.
        (half, size(70, 101, 2, 1)),
        (Mma { causal: true, ..half }, size(37, 133, 2, 1)),
        // Keys split among blocks of threads, of which some see nothing.
        (Mma { split: true, ..small() }, size(40, 200, 2, 1)),
        (Mma { split: true, ..causal }, size(150, 230, 2, 1)),
        // No keys at all.
        (small(), size(3, 0, 1, 1)),
        // A single query and a single key.
        (causal, size(1, 1, 1, 1)),
    ] {
        every_schedule(&Scene::mma(mma, &size).unwrap(), Mode::Checked, 1);
    }
}

#[test]
fn mma_under_many_schedules() {
    for mma in [small(), Mma { causal: true, query_source: Source::Registers, ..small() }] {
        let scene = Scene::mma(mma, &size(66, 100, 1, 1)).unwrap();
        every_schedule(&scene, Mode::Values, 32);
        every_schedule(&scene, Mode::Checked, 4);
    }
}

/// As shipped for a target with little shared memory and for one with much, right under every
/// schedule and without a bank conflict: `ldmatrix`, copies, and the way out.
#[test]
fn shipped_configurations_are_attention_without_bank_conflicts() {
    let budget = Budget::default().at_most(Measure::BankConflicts, 0);
    let odd = [
        Mma { causal: true, head_dim: 72, value_head_dim: 40, ..small() },
        Mma { head_dim: 8, value_head_dim: 248, row_tiles: 1, ..small() },
    ];
    let shipped = [Target::SM_89, Target::SM_90].into_iter().flat_map(shipped);
    let shipped = shipped.filter_map(|it| match it {
        Shipped::Mma(mma) => Some(mma),
        _ => None,
    });
    for mma in shipped.chain(odd) {
        let scene = Scene::mma(mma, &AttentionSize::small_mma(&mma)).unwrap();
        let options = Options { budget: budget.clone(), ..Options::values(Policy::Earliest, 0) };
        let (memory, _) = scene
            .run(&options)
            .unwrap_or_else(|failure| panic!("{}: {failure}", scene.program.name));
        let accuracy = scene.judge(&memory);
        assert!(accuracy.passed(), "{}: {accuracy}", scene.program.name);
        every_schedule(&scene, Mode::Checked, 1);
    }
}

/// Every width of queries and keys, and of values, on a target with little
/// shared memory.
#[test]
fn every_head_dimension_is_attention() {
    for dim in (8..=256).step_by(8) {
        let wide = dim > 128;
        let mma = Mma {
            target: Target::SM_86,
            element: if dim % 16 == 0 { Element::BF16 } else { Element::F16 },
            head_dim: dim,
            value_head_dim: 264 - dim,
            causal: dim % 24 == 0,
            row_tiles: if wide || 264 - dim > 128 { 1 } else { 2 },
            key_block: 16,
            ..small()
        };
        every_schedule(&Scene::mma(mma, &size(21, 37, 1, 1)).unwrap(), Mode::Values, 1);
        let same = Mma { value_head_dim: dim, row_tiles: 1, ..mma };
        every_schedule(&Scene::mma(same, &size(21, 37, 1, 1)).unwrap(), Mode::Values, 1);
    }
}

#[test]
fn parts_are_put_together() {
    for (partial, element, value_head_dim) in [
        (Element::F32, Element::BF16, 64),
        (Element::F32, Element::F16, 72),
        (Element::F16, Element::F16, 8),
        (Element::BF16, Element::F32, 256),
    ] {
        let combine = Combine { target: Target::SM_80, partial, element, value_head_dim };
        let size = AttentionSize { batch: 2, ..size(7, 0, 3, 1) };
        for parts in [1, 2, 5] {
            let scene = Scene::combine(combine, &size, parts).unwrap();
            every_schedule(&scene, Mode::Checked, 1);
        }
    }
}
