//! `flashcore profile`, without a GPU: the simulator's side of it.

use serde_json::Value;

use crate::{fail, json, succeed};

#[test]
fn the_simulator_tells_where_the_time_goes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("timeline.json");
    let problem = ["--problem", "b=1,h=8,s=512,d=64,bf16,causal"];
    let file = ["--trace", path.to_str().unwrap(), "--json"];
    let report = json(&[&["profile"], &problem[..], &file[..]].concat());
    let phases = report["simulator"].as_array().unwrap();
    for phase in ["wait for K", "QK", "softmax", "PV", "epilogue"] {
        assert!(phases.iter().any(|it| it["phase"] == phase), "no `{phase}` in {report}");
    }
    assert!(report["ncu"].as_str().unwrap().contains("sm__pipe_tensor_cycles_active"));
    let trace: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for row in ["phases of warpgroup 0", "tensor cores", "simulator, block 0"] {
        assert!(events.iter().any(|event| event["args"]["name"] == row), "no row `{row}`");
    }
}

/// Families without timestamps say so.
#[test]
fn the_others_are_profiled_by_launches() {
    let problem = ["--problem", "b=2,h=8,s=1,sk=512,d=64,bf16", "--kernel", "decode"];
    let text = succeed(&[&["profile"], &problem[..]].concat());
    assert!(text.contains("takes no timestamps: whole launches"), "{text}");
    let message = fail(1, &[&["profile"], &problem[..], &["--trace", "x.json"]].concat());
    assert!(message.contains("takes no timestamps, so there is no x.json"), "{message}");
}

#[test]
fn mistakes_are_named() {
    assert!(fail(1, &["profile", "--kernel", "nothing"]).contains("no candidate `nothing`"));
    let single = fail(1, &["profile", "--kernel", "single_wgmma_bf16"]);
    assert!(single.contains("there is no kernel `single`"), "{single}");
    let other = ["--kernel", "forward_bf16_d64x64_dense_192x96_s2q2_turns"];
    assert!(fail(1, &[&["profile"], &other[..]].concat()).contains("another element, head dim"));
}
