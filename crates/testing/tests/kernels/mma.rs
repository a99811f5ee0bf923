//! The forward kernel with `mma.sync` in the simulator.

use flashcore::Mask;
use flashcore_testing::check::Order;
use flashcore_testing::scene::{Call, PlacementKind, Ragged, Scene};
pub(crate) use flashcore_testing::small::mma as small;
use kernels::product::Source;
use kernels::{Batch, Combine, Configuration, MaskKind, Mma, Rules, shipped};
use ptx::{Element, Target};
use sim::{Budget, Measure, Mode, Options, Policy};

use crate::every_schedule;

/// A problem's size: the number of sequences, `[queries, keys]`, `[query heads, key heads]`.
type Size = (usize, [usize; 2], [usize; 2]);

fn scene(mma: Mma, (batch, lengths, heads): Size) -> Scene {
    Call::new(Configuration::Mma(mma), batch, lengths, heads).scene().unwrap()
}

#[test]
fn mma_is_attention() {
    let causal = Mma { rules: Rules::CAUSAL, ..small() };
    let half = Mma { element: Element::F16, accumulate: Element::F16, ..small() };
    let registers = Mma { query_source: Source::Registers, ..small() };
    for (mma, size) in [
        (small(), (1, [70, 70], [2, 1])),
        (causal, (1, [150, 100], [2, 1])),
        (causal, (1, [37, 133], [3, 1])),
        // Two groups of three heads, the longest tiles of each first.
        (causal, (2, [150, 133], [3, 1])),
        // More queries than keys, so that some rows see no key.
        (causal, (1, [150, 40], [1, 1])),
        (small(), (1, [70, 101], [2, 1])),
        (causal, (1, [150, 133], [2, 2])),
        (Mma { row_tiles: 1, warps: 4, ..causal }, (1, [200, 165], [2, 2])),
        (Mma { key_block: 64, ..registers }, (1, [65, 129], [1, 1])),
        (
            Mma { element: Element::F16, head_dim: 40, value_head_dim: 72, ..registers },
            (1, [65, 97], [2, 1]),
        ),
        (Mma { head_dim: 8, value_head_dim: 136, ..small() }, (1, [33, 33], [1, 1])),
        (Mma { head_dim: 200, value_head_dim: 8, row_tiles: 1, ..causal }, (1, [33, 50], [1, 1])),
        // Products accumulated in f16.
        (half, (1, [70, 101], [2, 1])),
        (Mma { rules: Rules::CAUSAL, ..half }, (1, [37, 133], [2, 1])),
        // Keys split among thread blocks, some of which see no key.
        (Mma { split: true, ..small() }, (1, [40, 200], [2, 1])),
        (Mma { split: true, ..causal }, (1, [150, 230], [2, 1])),
        // No keys at all.
        (small(), (1, [3, 0], [1, 1])),
        // A single query and a single key.
        (causal, (1, [1, 1], [1, 1])),
    ] {
        every_schedule(&scene(mma, size), Mode::Checked, 1);
    }
}

const CHUNKED: Rules = Rules { mask: MaskKind::Chunked, ..Rules::LOCAL };

fn every(rules: Rules) -> Rules {
    Rules { softcap: true, alibi: true, sinks: true, ..rules }
}

/// Windows, chunks and rules that change scores, at lengths around the edges of tiles and key
/// blocks.
#[test]
fn mma_follows_rules() {
    let with = |rules| Mma { rules, ..small() };
    let narrow = |rules| Mma { row_tiles: 1, warps: 4, ..with(rules) };
    for (mma, size) in [
        (with(Rules::LOCAL), (1, [130, 130], [2, 1])),
        (narrow(Rules::LOCAL), (1, [128, 257], [1, 1])),
        (with(Rules::LOCAL), (1, [64, 320], [1, 1])),
        (narrow(Rules::LOCAL), (1, [1, 97], [1, 1])),
        (with(Rules::LOCAL), (1, [65, 31], [1, 1])),
        // More queries than keys, so that some rows see no key.
        (with(Rules::LOCAL), (1, [150, 40], [1, 1])),
        (narrow(Rules { sinks: true, ..Rules::LOCAL }), (1, [200, 65], [2, 2])),
        (with(CHUNKED), (1, [129, 161], [2, 1])),
        (narrow(CHUNKED), (1, [200, 96], [1, 1])),
        (with(CHUNKED), (1, [65, 31], [1, 1])),
        // No keys at all.
        (with(every(Rules::LOCAL)), (1, [3, 0], [2, 1])),
        (with(Rules { softcap: true, ..Rules::DENSE }), (1, [65, 97], [2, 1])),
        (with(Rules { alibi: true, ..Rules::CAUSAL }), (1, [130, 97], [2, 1])),
        (narrow(Rules { sinks: true, ..Rules::CAUSAL }), (1, [150, 40], [2, 1])),
        // A sink counts once, however many splits there are.
        (Mma { split: true, ..with(every(Rules::CAUSAL)) }, (1, [70, 230], [2, 1])),
        (with(every(Rules::LOCAL)), (2, [70, 97], [2, 1])),
        (
            Mma {
                element: Element::F16,
                head_dim: 40,
                query_source: Source::Registers,
                ..with(every(CHUNKED))
            },
            (2, [130, 129], [2, 1]),
        ),
        (
            Mma { element: Element::F16, accumulate: Element::F16, ..with(every(Rules::LOCAL)) },
            (1, [70, 97], [2, 1]),
        ),
    ] {
        every_schedule(&scene(mma, size), Mode::Checked, 1);
    }
}

/// Sequences of lengths around the edges of tiles, packed, in batch entries, and in shuffled pages
/// whose unused rows are NaN.
#[test]
fn mma_serves_ragged_batches() {
    let ragged = |rules| Mma { rules, batch: Batch::Ragged, ..small() };
    let paged = |rules| Mma { batch: Batch::Paged, ..ragged(rules) };
    let narrow = |mma: Mma| Mma { row_tiles: 1, warps: 4, key_block: 64, ..mma };
    let size =
        Ragged::new(vec![2, 67, 1, 0], vec![1, 68, 0, 5]).over(PlacementKind::PackedWithGaps);
    let entries = size.over(PlacementKind::Entries);
    let longer = Ragged { keys: vec![130, 70, 0, 9], ..size.clone() };
    let edges = Ragged {
        queries: vec![63, 64, 65, 1, 0, 66],
        keys: vec![31, 32, 33, 64, 65, 128],
        ..size.clone()
    };
    // Queries before the first key, which see no key.
    let early = Ragged { queries: vec![66, 66, 0, 3], keys: vec![2, 40, 33, 1], ..size.clone() };
    let packed = Ragged { query_place: PlacementKind::Packed, ..edges.over(PlacementKind::Packed) };
    let behind = Ragged { padding: vec![3, 0, 2, 1], ..size.clone() };
    let pages = |size: usize, ragged: &Ragged| ragged.over(PlacementKind::Paged(size));
    let heads = |heads: [usize; 2], mma: Mma, ragged: Ragged| {
        Call::ragged(Configuration::Mma(mma), ragged, heads)
    };
    let call = |mma: Mma, ragged: Ragged| heads([2, 1], mma, ragged);
    let local = Mask::window(Some(20), Some(3));
    let window = |call: Call| call.with(|it| it.with_mask(local));
    let chunks = |call: Call| call.with(|it| it.with_mask(local.with_chunk(50)));
    let odd = Mma { element: Element::F16, head_dim: 40, value_head_dim: 72, ..small() };
    for call in [
        call(ragged(Rules::CAUSAL), size.clone()),
        call(ragged(Rules::CAUSAL), packed.clone()),
        call(ragged(Rules::CAUSAL), behind.clone()),
        call(ragged(Rules::CAUSAL), behind.over(PlacementKind::Entries)),
        call(ragged(Rules::DENSE), edges.clone()),
        window(call(ragged(Rules::LOCAL), longer.clone())),
        call(ragged(Rules::CAUSAL), entries),
        Call { order: Order::HeadsFirst, ..call(ragged(Rules::CAUSAL), early.clone()) },
        window(call(ragged(Rules::LOCAL), edges.clone())),
        heads([6, 2], narrow(ragged(Rules::CAUSAL)), size.clone()),
        chunks(call(ragged(CHUNKED), edges.clone())),
        chunks(call(ragged(every(CHUNKED)), early.clone())),
        window(call(ragged(every(Rules::LOCAL)), longer.clone())),
        call(paged(Rules::CAUSAL), pages(1, &size)),
        call(paged(Rules::CAUSAL), pages(5, &edges)),
        call(paged(Rules::CAUSAL), pages(5, &packed)),
        call(paged(Rules::CAUSAL), pages(5, &behind)),
        call(paged(Rules::DENSE), pages(16, &early)),
        window(call(paged(Rules::LOCAL), pages(48, &longer))),
        heads([6, 2], narrow(paged(Rules::CAUSAL)), pages(7, &size)),
        window(call(narrow(paged(Rules::LOCAL)), pages(256, &edges))),
        chunks(call(paged(every(CHUNKED)), pages(8, &edges))),
        call(Mma { batch: Batch::Paged, rules: Rules::CAUSAL, ..odd }, pages(9, &longer)),
    ] {
        every_schedule(&call.scene().unwrap(), Mode::Checked, 1);
    }
}

#[test]
fn ragged_mma_under_many_schedules() {
    for batch in [Batch::Ragged, Batch::Paged] {
        let mma = Mma { rules: Rules::CAUSAL, batch, ..small() };
        let scene = Scene::small(&Configuration::Mma(mma)).unwrap();
        every_schedule(&scene, Mode::Values, 16);
        every_schedule(&scene, Mode::Checked, 4);
    }
}

#[test]
fn mma_under_many_schedules() {
    for mma in [small(), Mma { rules: Rules::CAUSAL, query_source: Source::Registers, ..small() }] {
        let scene = scene(mma, (1, [66, 100], [1, 1]));
        every_schedule(&scene, Mode::Values, 32);
        every_schedule(&scene, Mode::Checked, 4);
    }
}

/// Configurations as shipped for a target with little shared memory and for one with much are right
/// under every schedule and have no bank conflicts: in `ldmatrix`, in copies, and in the epilogue.
#[test]
fn shipped_configurations_are_attention_without_bank_conflicts() {
    let budget = Budget::default().at_most(Measure::BankConflicts, 0);
    let odd = [
        Mma { rules: Rules::CAUSAL, head_dim: 72, value_head_dim: 40, ..small() },
        Mma { head_dim: 8, value_head_dim: 248, row_tiles: 1, ..small() },
    ];
    let shipped = [Target::SM_89, Target::SM_90].into_iter().flat_map(shipped);
    let shipped = shipped.filter_map(|it| match it {
        Configuration::Mma(mma) => Some(mma),
        _ => None,
    });
    for mma in shipped.chain(odd) {
        let scene = Scene::small(&Configuration::Mma(mma)).unwrap();
        let options = Options { budget: budget.clone(), ..Options::values(Policy::Earliest, 0) };
        let (memory, _) = scene
            .run(&options)
            .unwrap_or_else(|failure| panic!("{}: {failure}", scene.program.name));
        let accuracy = scene.judge(&memory);
        assert!(accuracy.passed(), "{}: {accuracy}", scene.program.name);
        every_schedule(&scene, Mode::Checked, 1);
    }
}

/// Every head dim of queries and keys, and of values, on a target with little shared memory.
#[test]
fn every_head_dimension_is_attention() {
    for dim in (8..=256).step_by(8) {
        let wide = dim > 128;
        let mma = Mma {
            target: Target::SM_86,
            element: if dim % 16 == 0 { Element::BF16 } else { Element::F16 },
            head_dim: dim,
            value_head_dim: 264 - dim,
            rules: if dim % 24 == 0 { Rules::CAUSAL } else { Rules::DENSE },
            row_tiles: if wide || 264 - dim > 128 { 1 } else { 2 },
            key_block: 16,
            ..small()
        };
        every_schedule(&scene(mma, (1, [21, 37], [1, 1])), Mode::Values, 1);
        let same = Mma { value_head_dim: dim, row_tiles: 1, ..mma };
        every_schedule(&scene(same, (1, [21, 37], [1, 1])), Mode::Values, 1);
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
        for parts in [1, 2, 5] {
            let scene = Scene::combine(combine, [2, 7, 3], parts).unwrap();
            every_schedule(&scene, Mode::Checked, 1);
        }
    }
}
