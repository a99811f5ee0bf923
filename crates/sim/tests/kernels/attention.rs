//! The forward kernel for Hopper.

use flashcore_sim as sim;
use kernels::Forward;
use kernels::forward::every_tuned;
use kernels::product::Source;
use ptx::Element;
use sim::scene::{AttentionSize, Scene, schedules};
use sim::{Measure, Mode, Options, Policy};

use crate::{every_schedule, some_schedules};

/// A small configuration; what it does not name is as shipped.
fn small() -> Forward {
    Forward {
        element: Element::BF16,
        head_dim: 64,
        value_head_dim: 64,
        causal: false,
        warpgroups: 2,
        key_block: 32,
        stages: 2,
        query_buffers: 1,
        ..every_tuned()[0]
    }
}

fn size(queries: usize, keys: usize, heads: usize, key_heads: usize) -> AttentionSize {
    AttentionSize { batch: 1, queries, keys, heads, key_heads }
}

#[test]
fn forward_is_attention() {
    let causal = Forward { causal: true, ..small() };
    for (forward, size) in [
        (small(), size(130, 70, 2, 1)),
        (causal, size(150, 100, 2, 1)),
        // More queries than keys: rows that see nothing.
        (causal, size(150, 40, 1, 1)),
        (Forward { warpgroups: 1, query_buffers: 2, ..causal }, size(200, 65, 2, 2)),
        (
            Forward { element: Element::F16, head_dim: 40, value_head_dim: 72, ..small() },
            size(65, 97, 2, 1),
        ),
        (Forward { query_source: Source::Registers, ..small() }, size(130, 70, 2, 1)),
    ] {
        every_schedule(&Scene::forward(forward, &size).unwrap(), Mode::Checked, 1);
    }
}

#[test]
fn forward_under_many_schedules() {
    for causal in [false, true] {
        let forward = Forward { causal, ..small() };
        let scene = Scene::forward(forward, &size(129, 65, 1, 1)).unwrap();
        every_schedule(&scene, Mode::Values, 32);
        every_schedule(&scene, Mode::Checked, 4);
    }
}

/// Every configuration that is shipped, on the smallest problem that takes it
/// around its loop, with ragged ends: 16 seeds for the values, one checked.
#[test]
fn every_tuned_forward() {
    for (index, forward) in every_tuned().into_iter().enumerate() {
        let scene = Scene::forward(forward, &AttentionSize::small(&forward)).unwrap();
        every_schedule(&scene, Mode::Values, 16);
        let checked = schedules(&Policy::HOSTILE, index as u64..index as u64 + 1);
        some_schedules(&scene, Mode::Checked, &checked);
    }
}

#[test]
fn forward_has_a_timeline() {
    let scene = Scene::forward(small(), &size(128, 128, 1, 1)).unwrap();
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
