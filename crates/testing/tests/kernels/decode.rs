//! The decode kernel in the simulator: sequences of unequal lengths over caches.

use flashcore::{Mask, Problem};
use flashcore_testing::check::Order;
use flashcore_testing::scene::{Call, KeyMagnitudes, PlacementKind, Ragged, Scene};
pub(crate) use flashcore_testing::small::decode as small;
use kernels::decode::Splits;
use kernels::{Cache, Configuration, Decode, MaskKind, Rules, Scales};
use ptx::{Element, Target};
use sim::{Budget, Measure, Mode, Options, Policy};

use crate::{can_be_launched_again, every_schedule};

/// Returns the small configuration with splits of 32 keys.
pub(crate) fn fixed() -> Decode {
    Decode { splits: Splits::Fixed { tiles_per_warp: 1 }, ..small() }
}

/// Returns sequences of several tiles, of no key, of one key and of one tile, with one query each.
fn ragged() -> Ragged {
    Ragged::new(vec![1; 4], vec![83, 0, 1, 16])
}

fn call(decode: Decode, ragged: Ragged) -> Call {
    Call::ragged(Configuration::Decode(decode), ragged, [3, 1]).with_multiprocessors(3)
}

fn causal(problem: Problem) -> Problem {
    problem.with_mask(Mask::CAUSAL)
}

#[test]
fn decode_is_attention() {
    let paged = Decode { page_rows: Some(1), ..small() };
    let aligned = Decode { page_rows: Some(16), ..small() };
    let long = || Ragged::new(vec![1; 3], vec![2200, 0, 1100]);
    let plain = |ragged: Ragged| call(small(), ragged);
    let pages = |size: usize| call(paged, ragged().over(PlacementKind::Paged(size)));
    let three = Ragged { queries: vec![3; 4], ..ragged() };
    let used = Ragged { queries: vec![2, 3, 0, 1], ..ragged() };
    let behind = Ragged { padding: vec![7, 0, 3, 1], ..ragged() };
    let packed = |ragged: &Ragged, place| Ragged { query_place: place, ..ragged.clone() };
    let ruled = |rules| Decode { rules, ..small() };
    let every = Rules { softcap: true, alibi: true, sinks: true, ..Rules::LOCAL };
    let chunked = Rules { mask: MaskKind::Chunked, ..Rules::LOCAL };
    let chunks = |mask: Mask| move |it: Problem| it.with_mask(mask.with_chunk(50));
    let heads = |heads, call: Call| call.with(|it| with_heads(it, heads));
    for call in [
        plain(ragged()),
        plain(ragged()).with_multiprocessors(1),
        plain(ragged()).with_multiprocessors(9),
        plain(three.clone()).with(causal),
        plain(ragged())
            .with_multiprocessors(2)
            .with(|it| it.with_mask(Mask::window(Some(20), Some(0)))),
        plain(ragged().over(PlacementKind::Padded)),
        plain(behind.clone()),
        plain(behind.over(PlacementKind::Packed)),
        pages(1),
        pages(5),
        pages(32),
        call(aligned, ragged().over(PlacementKind::Paged(16))),
        call(aligned, three.clone().over(PlacementKind::Paged(48))).with(causal),
        // More keys than a warp has looked up at once.
        call(aligned, long().over(PlacementKind::Paged(32))).with_multiprocessors(1),
        call(Decode { tile_keys: 32, stages: 3, ..aligned }, long().over(PlacementKind::Paged(16)))
            .with_multiprocessors(1),
        plain(ragged().over(PlacementKind::PackedWithGaps)),
        plain(used.over(PlacementKind::PackedWithGaps)).with(causal),
        plain(packed(&used, PlacementKind::Packed)).with(causal),
        plain(packed(&used, PlacementKind::PackedWithGaps).over(PlacementKind::Packed))
            .with(causal),
        call(aligned, used.over(PlacementKind::Paged(16))).with(causal),
        // Batches of equal lengths.
        Call::new(Configuration::Decode(small()), 2, [2, 90], [6, 2])
            .with(causal)
            .with_multiprocessors(4),
        Call { order: Order::HeadsFirst, ..plain(ragged()) },
        Call { order: Order::Padded, ..pages(5) },
        call(ruled(Rules { softcap: true, ..Rules::LOCAL }), ragged()),
        call(ruled(Rules { alibi: true, ..Rules::LOCAL }), three.clone()).with(causal),
        call(ruled(Rules { alibi: true, ..Rules::LOCAL }), ragged()).with(Problem::with_alibi),
        call(ruled(Rules { sinks: true, ..Rules::LOCAL }), ragged()),
        heads(
            [8, 2],
            call(
                Decode { page_rows: Some(16), rows: 16, ..ruled(every) },
                Ragged { queries: vec![2; 4], ..ragged() }.over(PlacementKind::Paged(16)),
            ),
        )
        .with(|it| it.with_mask(Mask::window(Some(25), Some(3)))),
        // Chunks of positions, over several tiles and parts of one.
        call(ruled(chunked), Ragged { keys: vec![113, 0, 51, 50], ..three.clone() })
            .with(chunks(Mask::CAUSAL)),
        heads(
            [8, 2],
            call(
                Decode { page_rows: Some(16), ..ruled(Rules { mask: MaskKind::Chunked, ..every }) },
                Ragged::new(vec![2; 4], vec![113, 2, 51, 100]).over(PlacementKind::Paged(16)),
            ),
        )
        .with(chunks(Mask::window(Some(25), Some(3)))),
        // More rows than a thread block has.
        plain(Ragged { queries: vec![5; 4], ..ragged() }).with(causal),
        heads([22, 1], call(Decode { rows: 16, tile_keys: 32, stages: 3, ..small() }, ragged())),
        call(
            Decode {
                element: Element::F16,
                cache: Cache::plain(Element::F16),
                head_dim: 40,
                value_head_dim: 72,
                ..small()
            },
            ragged(),
        ),
        call(Decode { head_dim: 72, value_head_dim: 40, ..small() }, ragged()),
        call(
            Decode { head_dim: 128, value_head_dim: 128, rows: 16, warps: 4, ..small() },
            ragged(),
        ),
    ] {
        every_schedule(&call.scene().unwrap(), Mode::Checked, 1);
    }
}

/// Returns the small configuration over an 8-bit cache.
fn narrow(element: Element, key_scales: Scales, value_scales: Scales) -> Decode {
    let cache = Cache { element, key_scales, value_scales };
    Decode { target: Target::SM_89, cache, ..small() }
}

/// A warp's 32 entries are for 16 tiles of 32 keys, and must last longer than a round of the ring.
#[test]
fn more_stages_than_entries_are_refused() {
    let deep = |page_rows, stages| {
        let target = Target::SM_90A;
        Decode { page_rows, stages, tile_keys: 32, warps: 1, target, ..small() }.program()
    };
    for (page_rows, stages) in [(Some(16), 15), (Some(1), 16)] {
        deep(page_rows, stages).unwrap();
    }
    let refused = deep(Some(16), 16).unwrap_err().to_string();
    assert!(refused.contains("more tiles than there are stages"), "{refused}");
}

#[test]
fn decode_over_8_bits_is_attention() {
    use Element::{BF16, E4M3, E5M2, F16, Int8};
    use Scales::{One, PerHead, PerToken};
    let plain = |scales| narrow(E4M3, scales, scales);
    let paged = |decode, size| call(decode, ragged().over(PlacementKind::Paged(size)));
    let three = Ragged { queries: vec![3; 4], ..ragged() };
    let behind = Ragged { padding: vec![7, 0, 3, 1], ..ragged() };
    let every = Rules { softcap: true, alibi: true, sinks: true, ..Rules::LOCAL };
    let wide = |decode| Decode { head_dim: 80, value_head_dim: 112, tile_keys: 32, ..decode };
    let pages = |decode| Decode { page_rows: Some(1), ..decode };
    let aligned = |decode| Decode { page_rows: Some(16), ..decode };
    let long = || Ragged::new(vec![1; 3], vec![2200, 0, 1100]);
    let heads = |heads, call: Call| call.with(|it| with_heads(it, heads));
    for call in [
        call(plain(One), ragged()),
        call(plain(PerHead), ragged()).with_multiprocessors(1),
        call(plain(PerToken), ragged()).with_multiprocessors(9),
        call(Decode { element: F16, ..plain(One) }, ragged()),
        call(Decode { element: F16, ..narrow(E5M2, PerToken, PerHead) }, three.clone())
            .with(causal),
        call(narrow(E5M2, PerHead, PerToken), ragged().over(PlacementKind::Padded)),
        call(plain(PerToken), behind.clone()),
        call(plain(PerToken), behind.over(PlacementKind::Packed)),
        call(plain(PerHead), Ragged { query_place: PlacementKind::Packed, ..three.clone() }),
        call(plain(PerToken), ragged()).with(|it| it.with_mask(Mask::window(Some(20), Some(0)))),
        paged(pages(plain(PerHead)), 5),
        paged(pages(plain(PerToken)), 32),
        paged(aligned(plain(PerToken)), 16),
        paged(aligned(wide(plain(PerToken))), 16),
        call(aligned(wide(plain(PerToken))), long().over(PlacementKind::Paged(48)))
            .with_multiprocessors(1),
        call(aligned(wide(plain(PerHead))), long().over(PlacementKind::Paged(16)))
            .with_multiprocessors(2),
        paged(pages(wide(plain(PerToken))), 1),
        call(wide(plain(PerHead)), ragged()),
        call(Decode { head_dim: 128, value_head_dim: 128, rows: 16, ..wide(plain(One)) }, three),
        heads([22, 1], call(Decode { rows: 16, stages: 3, ..plain(PerToken) }, ragged())),
        heads(
            [8, 2],
            call(
                Decode { page_rows: Some(16), rows: 16, rules: every, ..plain(PerToken) },
                Ragged { queries: vec![2; 4], ..ragged() }.over(PlacementKind::Paged(16)),
            ),
        )
        .with(|it| it.with_mask(Mask::window(Some(25), Some(3)))),
        call(Decode { element: BF16, rules: every, ..plain(PerHead) }, ragged()),
        Call { order: Order::HeadsFirst, ..call(plain(PerToken), ragged()) },
        Call { order: Order::Padded, ..paged(pages(plain(PerHead)), 5) },
        call(plain(PerToken), ragged()).with_keys(KeyMagnitudes::Spikes),
        call(plain(PerHead), ragged()).with_keys(KeyMagnitudes::Valley),
        // Queries beyond the range of f16, and below it.
        call(plain(PerHead), ragged()).with_outliers(1e4),
        call(plain(PerToken), ragged()).with_outliers(3e9),
        call(plain(One), ragged()).with_outliers(1e-12),
        call(plain(PerHead), ragged()).with_keys(KeyMagnitudes::Nan),
        call(narrow(E5M2, One, One), ragged()).with_keys(KeyMagnitudes::Nan),
        call(Decode { target: Target::SM_80, ..narrow(Int8, PerToken, PerToken) }, ragged()),
        paged(pages(wide(Decode { element: F16, ..narrow(Int8, PerHead, One) })), 5),
        call(narrow(Int8, PerToken, PerHead), ragged()).with_keys(KeyMagnitudes::Spikes),
    ] {
        let mut scene = call.scene().unwrap();
        // No number of the cache is rounded, as the plain algorithm would.
        for result in scene.results.iter_mut().filter(|it| it.name == "lse") {
            let exact = result.exact.iter();
            result.tolerance = exact.map(|lse| 2e-6 * lse.abs().max(8.0)).collect();
        }
        every_schedule(&scene, Mode::Checked, 1);
    }
}

fn with_heads(mut problem: Problem, [heads, key_heads]: [usize; 2]) -> Problem {
    (problem.query_heads, problem.kv_heads) = (heads, key_heads);
    problem
}

/// With splits of a fixed size: of several groups, in one team and in many, with a window that
/// begins in the middle of one, with more rows than a block has, and none.
#[test]
fn decode_with_fixed_splits_is_attention() {
    let long = Ragged::new(vec![1; 3], vec![600, 40, 530]);
    let two_tiles = Decode { splits: Splits::Fixed { tiles_per_warp: 2 }, ..small() };
    let one_warp = Decode { warps: 1, ..fixed() };
    let paged = Decode { page_rows: Some(1), stages: 3, rows: 16, ..fixed() };
    let aligned = Decode { page_rows: Some(16), ..paged };
    let three = Ragged { queries: vec![3, 0, 7, 1], ..ragged() };
    let packed = Ragged { query_place: PlacementKind::Packed, ..three.clone() };
    let chunked = Rules { mask: MaskKind::Chunked, ..Rules::LOCAL };
    let every = Rules { softcap: true, alibi: true, sinks: true, ..Rules::LOCAL };
    let narrow = Decode {
        splits: fixed().splits,
        ..narrow(Element::E4M3, Scales::PerHead, Scales::PerHead)
    };
    for call in [
        call(fixed(), ragged()),
        call(fixed(), ragged()).with_multiprocessors(1),
        call(fixed(), ragged()).with_multiprocessors(9),
        call(two_tiles, ragged()).with_multiprocessors(4),
        call(fixed(), long.clone()).with_multiprocessors(1),
        call(fixed(), long.clone()).with_multiprocessors(2),
        call(fixed(), long.clone()).with_multiprocessors(7),
        call(one_warp, long.clone()).with_multiprocessors(64),
        call(one_warp, long.clone())
            .with(|it| it.with_mask(Mask::window(Some(290), Some(0))))
            .with_multiprocessors(5),
        call(fixed(), three.clone()).with(causal),
        call(fixed(), packed.clone()).with(causal).with_multiprocessors(6),
        call(paged, packed.clone().over(PlacementKind::Paged(5))).with(causal),
        call(aligned, packed.over(PlacementKind::Paged(32))).with(causal),
        call(Decode { rules: chunked, ..fixed() }, three.clone())
            .with(|it| it.with_mask(Mask::CAUSAL.with_chunk(50))),
        call(Decode { rules: every, ..aligned }, three.over(PlacementKind::Paged(16)))
            .with(causal)
            .with_multiprocessors(5),
        call(narrow, ragged()),
        call(Decode { head_dim: 40, value_head_dim: 72, warps: 4, ..fixed() }, ragged()),
    ] {
        every_schedule(&call.scene().unwrap(), Mode::Checked, 1);
    }
}

#[test]
fn decode_under_many_schedules() {
    let tokens = narrow(Element::E4M3, Scales::PerToken, Scales::PerToken);
    let pages = |rows| Decode { page_rows: Some(rows), stages: 3, ..small() };
    for decode in [small(), fixed(), pages(1), pages(16), tokens] {
        let scene = Scene::small(&Configuration::Decode(decode)).unwrap();
        every_schedule(&scene, Mode::Values, 32);
        every_schedule(&scene, Mode::Checked, 4);
    }
}

/// A launch leaves the counters as it found them, for the next launch.
#[test]
fn a_second_launch_finds_everything_in_order() {
    for decode in [small(), fixed()] {
        can_be_launched_again(&Scene::small(&Configuration::Decode(decode)).unwrap());
    }
}

#[test]
fn no_two_lanes_meet_at_a_bank() {
    let tokens = narrow(Element::E4M3, Scales::PerToken, Scales::PerToken);
    let wide = |decode| Decode { head_dim: 128, value_head_dim: 128, ..decode };
    let narrow = Decode { tile_keys: 32, ..wide(tokens) };
    for decode in [small(), wide(small()), tokens, narrow] {
        // With one team: the factors of parts are written once, and not for speed.
        let scene =
            Call::small(Configuration::Decode(decode)).with_multiprocessors(1).scene().unwrap();
        let budget = Budget::default().at_most(Measure::BankConflicts, 0);
        let options = Options { budget, ..Options::values(Policy::Earliest, 0) };
        scene.run(&options).unwrap_or_else(|failure| panic!("{}: {failure}", scene.program.name));
    }
}
