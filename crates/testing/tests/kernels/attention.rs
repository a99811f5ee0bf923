//! The forward kernel for Hopper in the simulator.

use flashcore::Problem;
use flashcore_testing::check::Order;
use flashcore_testing::scene::{Call, KeyMagnitudes, Scene, schedules};
use flashcore_testing::small::forward as small;
use kernels::forward::{Form, every_tuned};
use kernels::product::Source;
use kernels::{Configuration, Forward, MaskKind, Rules};
use ptx::Element;
use sim::{Measure, Mode, Options, Policy};

use crate::{every_schedule, is_right_with_cap, some_schedules};

/// A problem's size: the number of sequences, `[queries, keys]`, `[query heads, key heads]`.
type Size = (usize, [usize; 2], [usize; 2]);

fn call(forward: Forward, (batch, lengths, heads): Size) -> Call {
    Call::new(Configuration::Forward(forward), batch, lengths, heads)
}

fn scene(forward: Forward, size: Size) -> Scene {
    call(forward, size).scene().unwrap()
}

#[test]
fn forward_is_attention() {
    let causal = Forward { rules: Rules::CAUSAL, ..small() };
    for (forward, size) in [
        (small(), (1, [130, 70], [2, 1])),
        (causal, (1, [150, 100], [2, 1])),
        // More queries than keys, so that some rows see no key.
        (causal, (1, [150, 40], [1, 1])),
        (Forward { warpgroups: 1, query_buffers: 2, ..causal }, (1, [200, 65], [2, 2])),
        (
            Forward {
                element: Element::F16,
                output: Element::F16,
                head_dim: 40,
                value_head_dim: 72,
                ..small()
            },
            (1, [65, 97], [2, 1]),
        ),
        (Forward { query_source: Source::Registers, ..small() }, (1, [130, 70], [2, 1])),
    ] {
        every_schedule(&scene(forward, size), Mode::Checked, 1);
    }
}

/// Windows, chunks and rules that change scores, at lengths around the edges of tiles and key
/// blocks.
#[test]
fn forward_follows_rules() {
    let with = |rules| Forward { rules, ..small() };
    let one = |rules| Forward { warpgroups: 1, query_buffers: 2, ..with(rules) };
    let chunked = Rules { mask: MaskKind::Chunked, ..Rules::LOCAL };
    let every = |rules| Rules { softcap: true, alibi: true, sinks: true, ..rules };
    for (forward, size) in [
        (with(Rules::LOCAL), (1, [130, 130], [2, 1])),
        (one(Rules::LOCAL), (1, [128, 257], [1, 1])),
        (one(Rules::LOCAL), (1, [64, 320], [1, 1])),
        (one(Rules::LOCAL), (1, [1, 97], [1, 1])),
        // More queries than keys, so that some rows see no key.
        (with(Rules::LOCAL), (1, [150, 40], [1, 1])),
        (one(Rules { sinks: true, ..Rules::LOCAL }), (1, [200, 65], [2, 2])),
        (with(chunked), (1, [129, 161], [2, 1])),
        (one(chunked), (1, [200, 96], [1, 1])),
        (one(chunked), (1, [65, 31], [1, 1])),
        (with(Rules { softcap: true, ..Rules::DENSE }), (1, [65, 97], [2, 1])),
        (one(Rules { alibi: true, ..Rules::CAUSAL }), (1, [130, 97], [2, 1])),
        (one(Rules { sinks: true, ..Rules::CAUSAL }), (1, [150, 40], [2, 1])),
        (with(every(Rules::LOCAL)), (2, [70, 97], [2, 1])),
        (
            Forward {
                element: Element::F16,
                output: Element::F16,
                head_dim: 40,
                form: Form::COMPACT,
                ..one(every(chunked))
            },
            (2, [130, 129], [2, 1]),
        ),
    ] {
        every_schedule(&scene(forward, size), Mode::Checked, 1);
    }
}

/// Capped scores: exponents straight from the products where these are small, the exact tanh where
/// not, and a new reference where the scores of either rise by far; with caps at which the
/// polynomial has no finite coefficients, or none but the first that matters.
#[test]
fn forward_caps_scores() {
    let with = |mask| Forward { rules: Rules { softcap: true, mask, ..Rules::LOCAL }, ..small() };
    let f16 = |forward| Forward { element: Element::F16, output: Element::F16, ..forward };
    let compact = |forward| Forward { form: Form::COMPACT, ..forward };
    let masks = [MaskKind::Dense, MaskKind::Causal, MaskKind::Local, MaskKind::Chunked];
    let [dense, causal, local, chunked] = masks.map(with);
    for forward in [dense, f16(causal), compact(causal), local, compact(f16(chunked))] {
        for (cap, key_magnitudes) in [
            (20.0, KeyMagnitudes::Uniform),
            (0.8, KeyMagnitudes::Uniform),
            (300.0, KeyMagnitudes::Peaks),
            (3000.0, KeyMagnitudes::Peaks),
            (3000.0, KeyMagnitudes::Nan),
            (1e-20, KeyMagnitudes::Uniform),
            (1e20, KeyMagnitudes::Peaks),
        ] {
            let call = call(forward, (1, [150, 200], [2, 1])).with_keys(key_magnitudes);
            is_right_with_cap(call, cap);
        }
    }
}

/// Stream-K: two or three thread blocks share the keys of a tile, or one has parts of two tiles;
/// with and without other tiles before, in every form. The maxima of parts are far apart.
#[test]
fn forward_shares_keys() {
    let shared = Forward { stream_k: true, ..small() };
    let one = Forward { warpgroups: 1, query_buffers: 2, ..shared };
    let compact = Forward { form: Form::COMPACT, ..shared };
    let sinks = Rules { sinks: true, ..Rules::DENSE };
    for (forward, size, multiprocessors) in [
        (shared, (1, [130, 310], [1, 1]), 3),
        (one, (1, [60, 310], [1, 1]), 3),
        (one, (1, [64, 320], [5, 1]), 3),
        (Forward { element: Element::F16, output: Element::F16, ..one }, (1, [64, 320], [5, 1]), 3),
        (compact, (1, [128, 320], [5, 1]), 3),
        (Forward { rules: sinks, ..one }, (2, [70, 320], [1, 1]), 3),
        // No tile is shared.
        (one, (1, [64, 90], [4, 1]), 2),
    ] {
        let call = call(forward, size)
            .with_multiprocessors(multiprocessors)
            .with_keys(KeyMagnitudes::Valley);
        every_schedule(&call.scene().unwrap(), Mode::Checked, 1);
    }
    let call = call(one, (1, [64, 320], [5, 1])).with_multiprocessors(3);
    every_schedule(&call.scene().unwrap(), Mode::Values, 16);
}

/// Under a mask, a warpgroup passes over key blocks that none of its rows sees, at either end of
/// its walk, while the others walk them; with other tiles before and after, in every form. Only
/// configurations with ping-pong do so.
#[test]
fn forward_passes_over_blocks() {
    let with = |rules| Forward { rules, key_block: 64, ping_pong: true, ..small() };
    let compact = |rules| Forward { form: Form::COMPACT, ..with(rules) };
    let chunked = Rules { mask: MaskKind::Chunked, ..Rules::LOCAL };
    for (forward, size, multiprocessors) in [
        (with(Rules::CAUSAL), (1, [300, 300], [1, 1]), 1),
        (with(Rules::CAUSAL), (1, [257, 420], [2, 1]), 2),
        (compact(Rules::CAUSAL), (1, [300, 170], [1, 1]), 1),
        (Forward { key_block: 96, ..with(Rules::CAUSAL) }, (1, [390, 390], [1, 1]), 2),
        (with(Rules::LOCAL), (1, [300, 300], [1, 1]), 1),
        (compact(Rules::LOCAL), (1, [300, 410], [1, 1]), 2),
        (with(chunked), (1, [260, 290], [1, 1]), 1),
        // A warpgroup without queries.
        (with(Rules::LOCAL), (1, [190, 330], [2, 1]), 1),
    ] {
        let call = call(forward, size).with_multiprocessors(multiprocessors);
        every_schedule(&call.scene().unwrap(), Mode::Checked, 1);
    }
    let call = call(with(Rules::LOCAL), (1, [300, 300], [1, 1])).with_multiprocessors(1);
    every_schedule(&call.scene().unwrap(), Mode::Values, 16);
    // Two tiles, of two and of four key blocks: the first warpgroup of each passes over one.
    let scene = scene(with(Rules::CAUSAL), (1, [256, 256], [1, 1]));
    let (_, report) = scene.run(&Options::values(Policy::Modelled, 0)).unwrap();
    let walked = (2 + 4) * 2 - 2;
    assert_eq!(report.counts.get(Measure::TensorOperations), walked * 2 * 64 * 64 * 128);
}

/// Tensors with heads first and with gaps, and ALiBi slopes that sequences share.
#[test]
fn forward_follows_strides() {
    let causal = Forward { rules: Rules { alibi: true, ..Rules::CAUSAL }, ..small() };
    for order in [Order::HeadsFirst, Order::Padded] {
        let call = Call { order, ..call(causal, (2, [70, 97], [4, 2])) };
        let call = call.with(Problem::with_alibi);
        every_schedule(&call.scene().unwrap(), Mode::Checked, 1);
    }
}

#[test]
fn forward_under_many_schedules() {
    for rules in [Rules::DENSE, Rules::CAUSAL, Rules::LOCAL] {
        let forward = Forward { rules, ..small() };
        let scene = scene(forward, (1, [129, 65], [1, 1]));
        every_schedule(&scene, Mode::Values, 32);
        every_schedule(&scene, Mode::Checked, 4);
    }
}

/// Every shipped configuration on the smallest problem that goes around its loop, with partial
/// blocks at the ends: 16 seeds for the values only, one in checked mode.
#[test]
fn every_tuned_forward() {
    for (index, forward) in every_tuned().into_iter().enumerate() {
        let scene = Scene::small(&Configuration::Forward(forward)).unwrap();
        every_schedule(&scene, Mode::Values, 4);
        let checked = schedules(&Policy::HOSTILE, index as u64..index as u64 + 1);
        some_schedules(&scene, Mode::Checked, &checked);
    }
}

#[test]
fn forward_has_a_timeline() {
    let scene = scene(small(), (1, [128, 128], [1, 1]));
    let options = Options { trace: true, ..Options::values(Policy::Modelled, 0) };
    let (memory, report) = scene.run(&options).unwrap();
    let accuracy = scene.judge(&memory);
    assert!(accuracy.passed(), "{accuracy}");
    let trace = report.trace.expect("asked for");
    let json: serde_json::Value = serde_json::from_str(&trace.to_json()).unwrap();
    let events = json["traceEvents"].as_array().unwrap();
    let named = |name: &str| events.iter().any(|e| e["args"]["name"] == name);
    assert!(named("tensor cores") && named("copies") && named("warp 4"));
    assert!(report.counts.get(Measure::Cycles) > 1000);
    // 2 * rows * keys * (head dim + value head dim)
    assert_eq!(report.counts.get(Measure::TensorOperations), 2 * 128 * 128 * 128);
    assert_eq!(report.counts.get(Measure::BankConflicts), 0);
}
