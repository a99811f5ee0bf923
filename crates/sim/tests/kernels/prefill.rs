//! Prefill: ragged batches through the forward kernel's loops, and their order.

use flashcore_sim as sim;
use kernels::forward::Form;
use kernels::product::Source;
use kernels::{Forward, Prefill, Sequencer};
use ptx::{Element, Target};
use sim::scene::{DecodeSize, RaggedSize, Scene};
use sim::{Memory, Mode, Options, Policy};

use crate::{can_be_launched_again, every_schedule};

/// A small configuration that has every part.
fn small() -> Prefill {
    Prefill {
        tile: Forward {
            element: Element::BF16,
            head_dim: 64,
            value_head_dim: 64,
            causal: false,
            warpgroups: 1,
            key_block: 32,
            stages: 2,
            query_buffers: 1,
            query_source: Source::Shared,
            ping_pong: false,
            form: Form::FULL,
        },
        softcap: false,
        alibi: false,
        sinks: false,
        page_rows: None,
    }
}

fn with(tile: Forward) -> Prefill {
    Prefill { tile, ..small() }
}

#[test]
fn prefill_is_attention() {
    let size = DecodeSize::small_prefill(&small());
    let open = DecodeSize { window: (1 << 29, 1 << 29), ..size.clone() };
    let window = DecodeSize { window: (20, 3), lengths: vec![130, 70, 0, 9], ..size.clone() };
    let padded = DecodeSize { packed_keys: false, teams: 1, ..size.clone() };
    // Queries before the first key, which see nothing.
    let early =
        DecodeSize { lengths: vec![2, 40, 33, 1], used: vec![66, 66, 0, 3], ..size.clone() };
    let grouped = DecodeSize { heads: 4, key_heads: 2, teams: 3, ..size.clone() };
    let pages = |page_size: usize| DecodeSize { page_size, packed_keys: false, ..size.clone() };
    let everything =
        Prefill { softcap: true, alibi: true, sinks: true, page_rows: Some(8), ..small() };
    let tile = small().tile;
    for (prefill, size) in [
        (small(), size.clone()),
        (small(), open.clone()),
        (small(), window.clone()),
        (small(), padded),
        (small(), early.clone()),
        (small(), grouped.clone()),
        (Prefill { page_rows: Some(32), ..small() }, pages(32)),
        (Prefill { page_rows: Some(16), ..small() }, pages(48)),
        (Prefill { softcap: true, ..small() }, size.clone()),
        (Prefill { alibi: true, ..small() }, window.clone()),
        (Prefill { sinks: true, ..small() }, early.clone()),
        (everything, DecodeSize { packed_keys: false, page_size: 8, ..window.clone() }),
        (with(Forward { form: Form::COMPACT, ..tile }), window.clone()),
        (with(Forward { query_buffers: 2, stages: 3, ..tile }), window.clone()),
        (with(Forward { query_source: Source::Registers, ..tile }), grouped),
        (with(Forward { warpgroups: 2, ping_pong: true, ..tile }), early),
        (with(Forward { element: Element::F16, head_dim: 40, value_head_dim: 72, ..tile }), open),
    ] {
        every_schedule(&Scene::prefill(prefill, &size).unwrap(), Mode::Checked, 1);
    }
}

#[test]
fn prefill_under_many_schedules() {
    let tile = small().tile;
    for prefill in [
        small(),
        with(Forward { warpgroups: 2, ping_pong: true, query_buffers: 2, ..tile }),
        Prefill { page_rows: Some(16), ..with(Forward { form: Form::COMPACT, ..tile }) },
    ] {
        let scene = Scene::prefill(prefill, &DecodeSize::small_prefill(&prefill)).unwrap();
        every_schedule(&scene, Mode::Values, 16);
        every_schedule(&scene, Mode::Checked, 4);
    }
}

/// The schedule is as it was found, so that other layers can use it.
#[test]
fn a_second_launch_finds_the_schedule_in_order() {
    let scene = Scene::prefill(small(), &DecodeSize::small_prefill(&small())).unwrap();
    can_be_launched_again(&scene);
}

#[test]
fn tiles_are_put_in_order() {
    let sequencer = Sequencer { target: Target::SM_90A };
    every_schedule(&Scene::sequencer(sequencer, &RaggedSize::small()).unwrap(), Mode::Checked, 4);
    let many = 1100;
    let mixed = |sequence: u32| sequence * 7919 % 301;
    for (size, mode) in [
        (RaggedSize { queries: vec![1], keys: vec![1], tile_rows: 128 }, Mode::Checked),
        (RaggedSize { queries: vec![0, 0], keys: vec![7, 0], tile_rows: 128 }, Mode::Checked),
        (RaggedSize { queries: vec![5000; 3], keys: vec![9000; 3], tile_rows: 128 }, Mode::Checked),
        (
            RaggedSize {
                queries: (0..many).map(mixed).collect(),
                keys: (0..many).map(|sequence| mixed(sequence + 5)).collect(),
                tile_rows: 64,
            },
            Mode::Values,
        ),
    ] {
        let scene = Scene::sequencer(sequencer, &size).unwrap();
        for policy in Policy::HOSTILE {
            let options = Options { mode, policy, ..Options::default() };
            let (memory, _) = scene.run(&options).unwrap_or_else(|failure| panic!("{failure}"));
            in_order(&scene, &memory, &size);
        }
    }
}

/// The records are those that the scene expects, each costing at most as much as the one before it,
/// chunk by chunk; a little more counts as the same.
fn in_order(scene: &Scene, memory: &Memory, size: &RaggedSize) {
    let schedule = &scene.results[0];
    let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
    let words: Vec<u32> = memory.bytes(schedule.buffer).chunks(4).map(word).collect();
    let expected: Vec<u32> = schedule.exact.iter().map(|it| (*it as f32).to_bits()).collect();
    assert_eq!(words[..4], expected[..4], "{}", scene.size);
    let records =
        |words: &[u32]| -> Vec<Vec<u32>> { words[4..].chunks(8).map(Vec::from).collect() };
    let (found, mut wanted) = (records(&words), records(&expected));
    let cost = |record: &[u32]| {
        let [_, first_row, _, queries, _, keys, ..] = *record else { panic!("{record:?}") };
        let end = (first_row + size.tile_rows).min(queries);
        (keys + end).saturating_sub(queries)
    };
    let same = size.keys.iter().max().unwrap() / 1024 + 1;
    for pair in found.windows(2).filter(|pair| pair[0][0] / 1024 == pair[1][0] / 1024) {
        assert!(cost(&pair[1]) < cost(&pair[0]) + same, "{}: {pair:?}", scene.size);
    }
    let mut found = found;
    found.sort();
    wanted.sort();
    assert_eq!(found, wanted, "{}", scene.size);
}
