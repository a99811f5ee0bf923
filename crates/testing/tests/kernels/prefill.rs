//! The prefill kernel in the simulator, which runs ragged batches through the forward kernel's
//! loops, and the sequencer that orders their tiles.

use flashcore::{Mask, Problem};
use flashcore_testing::check::Order;
use flashcore_testing::scene::{Call, PlacementKind, Ragged, Scene};
use kernels::forward::Form;
use kernels::product::Source;
use kernels::sequencer::Tiles;
use kernels::{Configuration, Forward, MaskKind, Prefill, Rules, Sequencer};
use ptx::{Element, Target};
use sim::{Memory, Mode, Options, Policy};

use crate::{can_be_launched_again, every_schedule};

/// Returns a small configuration that has every part.
pub(crate) fn small() -> Prefill {
    Prefill {
        tile: Forward {
            element: Element::BF16,
            output: Element::BF16,
            head_dim: 64,
            value_head_dim: 64,
            rules: Rules::LOCAL,
            warpgroups: 1,
            key_block: 32,
            stages: 2,
            query_buffers: 1,
            query_source: Source::Shared,
            ping_pong: false,
            form: Form::FULL,
            stream_k: false,
        },
        page_rows: None,
        single_tile: false,
    }
}

fn with(tile: Forward) -> Prefill {
    Prefill { tile, ..small() }
}

fn ruled(rules: Rules) -> Prefill {
    with(Forward { rules, ..small().tile })
}

/// Returns sequences of two query tiles, of one and of none, over keys with unused rows between
/// them.
fn ragged() -> Ragged {
    Ragged::new(vec![2, 67, 1, 0], vec![1, 68, 0, 5]).over(PlacementKind::PackedWithGaps)
}

fn call(prefill: Prefill, ragged: Ragged) -> Call {
    Call::ragged(Configuration::Prefill(prefill), ragged, [2, 1])
}

/// Changes a call to thread blocks that find their single tile by themselves.
fn single(call: Call) -> Call {
    let Configuration::Prefill(prefill) = call.kernel else { panic!("{:?}", call.kernel) };
    Call { kernel: Configuration::Prefill(Prefill { single_tile: true, ..prefill }), ..call }
}

#[test]
fn prefill_is_attention() {
    let open = |call: Call| call.with(|it| it.with_mask(Mask::NONE));
    let local = Mask::window(Some(20), Some(3));
    let window = |call: Call| call.with(|it| it.with_mask(local));
    let chunks = |call: Call| call.with(|it| it.with_mask(local.with_chunk(50)));
    let longer = Ragged { keys: vec![130, 70, 0, 9], ..ragged() };
    // Queries before the first key, which see no key.
    let early = Ragged { queries: vec![66, 66, 0, 3], keys: vec![2, 40, 33, 1], ..ragged() };
    let grouped = |call: Call| {
        let heads = |mut problem: Problem| {
            (problem.query_heads, problem.kv_heads) = (4, 2);
            problem
        };
        call.with(heads).with_multiprocessors(3)
    };
    let packed = Ragged { query_place: PlacementKind::Packed, ..ragged() };
    let pages = |rows: u32, prefill: Prefill, ragged: &Ragged, size: usize| {
        call(Prefill { page_rows: Some(rows), ..prefill }, ragged.over(PlacementKind::Paged(size)))
    };
    let every = Rules { softcap: true, alibi: true, sinks: true, ..Rules::LOCAL };
    let chunked = Rules { mask: MaskKind::Chunked, ..Rules::LOCAL };
    let all_chunked = ruled(Rules { mask: MaskKind::Chunked, ..every });
    let tile = small().tile;
    let plain = |ragged: &Ragged| call(small(), ragged.clone());
    for call in [
        plain(&ragged()),
        open(plain(&ragged())),
        window(plain(&longer)),
        plain(&ragged().over(PlacementKind::Padded)).with_multiprocessors(1),
        plain(&ragged().over(PlacementKind::Entries)),
        plain(&Ragged { padding: vec![3, 0, 2, 1], ..ragged() }),
        plain(&Ragged { padding: vec![3, 0, 2, 1], ..ragged().over(PlacementKind::Entries) }),
        plain(&early),
        grouped(plain(&ragged())),
        grouped(plain(&packed)),
        plain(&Ragged {
            query_place: PlacementKind::PackedWithGaps,
            ..packed.over(PlacementKind::Packed)
        }),
        // A batch of equal lengths.
        Call::new(Configuration::Prefill(small()), 2, [70, 90], [2, 1]),
        // Without a mask, also where some sequences have no keys.
        call(ruled(Rules::DENSE), ragged()),
        call(ruled(Rules::DENSE), early.clone()),
        call(with(Forward { form: Form::COMPACT, ..ruled(Rules::DENSE).tile }), longer.clone())
            .with_multiprocessors(1),
        call(ruled(Rules { alibi: true, sinks: true, ..Rules::DENSE }), longer.clone()),
        Call { order: Order::HeadsFirst, ..plain(&ragged()) },
        pages(32, small(), &ragged(), 32),
        pages(16, small(), &packed, 48),
        call(ruled(Rules { softcap: true, ..Rules::LOCAL }), ragged()),
        window(call(ruled(Rules { alibi: true, ..Rules::LOCAL }), longer.clone())),
        call(ruled(Rules { sinks: true, ..Rules::LOCAL }), early.clone()),
        chunks(call(ruled(chunked), longer.clone())),
        chunks(call(ruled(Rules { sinks: true, ..chunked }), early.clone())),
        chunks(pages(8, all_chunked, &ragged(), 8)),
        window(pages(8, ruled(every), &longer, 8)),
        window(call(with(Forward { form: Form::COMPACT, ..tile }), longer.clone())),
        window(call(with(Forward { query_buffers: 2, stages: 3, ..tile }), longer.clone())),
        grouped(call(with(Forward { query_source: Source::Registers, ..tile }), ragged())),
        call(with(Forward { warpgroups: 2, ping_pong: true, ..tile }), early),
        open(call(
            with(Forward {
                element: Element::F16,
                output: Element::F16,
                head_dim: 40,
                value_head_dim: 72,
                ..tile
            }),
            ragged(),
        )),
    ] {
        every_schedule(&call.scene().unwrap(), Mode::Checked, 1);
        every_schedule(&single(call).scene().unwrap(), Mode::Checked, 1);
    }
}

/// A warp examines 32 sequences at a time: tiles in the first of them, in the last, and in later
/// ones.
#[test]
fn tiles_are_found_among_many_sequences() {
    let queries = (0..70).map(|it| [0, 0, 0, 66, 0, 1, 0][it % 7]).collect();
    let keys = (0..70).map(|it| 1 + it % 40).collect();
    let many = call(small(), Ragged::new(queries, keys).over(PlacementKind::PackedWithGaps));
    every_schedule(&single(many).scene().unwrap(), Mode::Checked, 1);
}

#[test]
fn prefill_under_many_schedules() {
    let tile = small().tile;
    for prefill in [
        small(),
        Prefill { single_tile: true, ..small() },
        with(Forward { warpgroups: 2, ping_pong: true, query_buffers: 2, ..tile }),
        with(Forward {
            warpgroups: 3,
            ping_pong: true,
            query_source: Source::Registers,
            ..ruled(Rules::DENSE).tile
        }),
        Prefill { page_rows: Some(16), ..with(Forward { form: Form::COMPACT, ..tile }) },
    ] {
        let scene = Scene::small(&Configuration::Prefill(prefill)).unwrap();
        every_schedule(&scene, Mode::Values, 16);
        every_schedule(&scene, Mode::Checked, 4);
    }
}

/// A launch leaves the schedule as it found it, so that other layers can use it.
#[test]
fn a_second_launch_finds_the_schedule_in_order() {
    can_be_launched_again(&Scene::small(&Configuration::Prefill(small())).unwrap());
}

#[test]
fn tiles_are_put_in_order() {
    let sequencer = Sequencer { target: Target::SM_90A, tiles: Tiles::Queries(MaskKind::Local) };
    let chunked = Sequencer { tiles: Tiles::Queries(MaskKind::Chunked), ..sequencer };
    for sequencer in [sequencer, chunked] {
        let scene = Scene::small(&Configuration::Sequencer(sequencer)).unwrap();
        every_schedule(&scene, Mode::Checked, 4);
    }
    let many = 1100;
    let mixed = |sequence: usize| sequence * 7919 % 301;
    for (queries, keys, tile_rows, mode) in [
        (vec![1], vec![1], 128, Mode::Checked),
        (vec![0, 0], vec![7, 0], 128, Mode::Checked),
        (vec![5000; 3], vec![9000; 3], 128, Mode::Checked),
        (
            (0..many).map(mixed).collect(),
            (0..many).map(|sequence| mixed(sequence + 5)).collect(),
            64,
            Mode::Values,
        ),
    ] {
        let ragged = Ragged { queries, keys, ..Scene::sequencer_batch() };
        let scene = Scene::sequencer(sequencer, &ragged, tile_rows).unwrap();
        for policy in Policy::HOSTILE {
            let options = Options { mode, policy, ..Options::default() };
            let (memory, _) = scene.run(&options).unwrap_or_else(|failure| panic!("{failure}"));
            in_order(&scene, &memory, &ragged, tile_rows);
        }
    }
}

/// The records are those that the scene expects, each costing at most as much as the one before it,
/// chunk by chunk; a little more counts as the same.
fn in_order(scene: &Scene, memory: &Memory, ragged: &Ragged, tile_rows: u32) {
    let schedule = &scene.results[0];
    let words = memory.u32(schedule.buffer);
    let expected: Vec<u32> = schedule.exact.iter().map(|it| (*it as f32).to_bits()).collect();
    assert_eq!(words[..4], expected[..4], "{}", scene.size);
    let records = |words: &[u32]| -> Vec<Vec<u32>> {
        words[4..].chunks(8).take(words[0] as usize).map(Vec::from).collect()
    };
    let (mut found, mut wanted) = (records(&words), records(&expected));
    let cost = |record: &[u32]| {
        let [_, first_row, _, queries, _, keys, ..] = *record else { panic!("{record:?}") };
        let end = (first_row + tile_rows).min(queries);
        (keys + end).saturating_sub(queries)
    };
    let same = *ragged.keys.iter().max().unwrap() as u32 / 1024 + 1;
    for pair in found.windows(2).filter(|pair| pair[0][0] / 1024 == pair[1][0] / 1024) {
        assert!(cost(&pair[1]) < cost(&pair[0]) + same, "{}: {pair:?}", scene.size);
    }
    found.sort();
    wanted.sort();
    assert_eq!(found, wanted, "{}", scene.size);
}
