//! `flashcore soak`.

use serde_json::Value;

use crate::{fail, json, succeed};

/// Every fault that needs no GPU, those of a second process among them: right answers, complaints of
/// the cache where there must be some, and nothing left of it afterwards.
#[test]
fn faults_are_survived() {
    let soak = ["soak", "--backend", "cpu", "--for", "3s", "--seed", "5", "--json"];
    let summary = json(&soak);
    assert_eq!(summary["passed"], true, "{summary}");
    assert_eq!(summary["failures"], Value::Array(Vec::new()));
    assert!(summary["problems"].as_u64().unwrap() > 20, "{summary}");
    let faults = summary["faults"].as_array().unwrap();
    let names: Vec<&str> = faults.iter().map(|it| it["fault"].as_str().unwrap()).collect();
    assert_eq!(names, ["corrupted", "deleted", "read-only", "full", "killed-sibling"]);
    for met in faults {
        assert!(met["times"].as_u64().unwrap() >= 1, "{met}");
        assert_eq!(met["times"], met["survived"], "{met}");
    }
    let full = faults[3]["told"].as_str().unwrap();
    assert!(!full.starts_with("0 "), "a full disk goes unnoticed: {full}");
    assert!(summary["held"]["end"]["memory_bytes"].as_u64().unwrap() > 1 << 20);
}

/// The same seed means the same problems, and each can be had alone.
#[test]
fn problems_come_again() {
    let soak = |arguments: &[&str]| {
        let fixed = ["soak", "--backend", "cpu", "--faults", "none", "--seed", "9", "--json"];
        json(&[&fixed[..], arguments].concat())
    };
    let whole = soak(&["--problems", "12"]);
    let parts = [soak(&["--problems", "5"]), soak(&["--first", "5", "--problems", "7"])];
    let rows = |summary: &Value| summary["rows"].as_u64().unwrap();
    assert_eq!(whole["problems"], 12);
    assert_eq!(rows(&whole), parts.iter().map(rows).sum::<u64>());
    let text = succeed(&[
        "soak",
        "--backend",
        "cpu",
        "--faults",
        "none",
        "--seed",
        "9",
        "--problems",
        "3",
    ]);
    for word in ["3 in ", "by cpu/blocked", "wrong answers none", "at the end", "passed"] {
        assert!(text.contains(word), "no `{word}` in\n{text}");
    }
}

#[test]
fn mistakes_are_named() {
    assert!(fail(2, &["soak", "--for", "8"]).contains("is no duration such as 90s, 8m or 1h"));
    assert!(fail(2, &["soak", "--for", "1e30h"]).contains("is longer than a clock counts"));
    assert!(fail(2, &["soak", "--problems", "0"]).contains("0 is not in 1.."));
    // Problems are counted from the first one on.
    let last = u64::MAX.to_string();
    assert!(fail(2, &["soak", "--first", &last, "--problems", "3"]).contains("is not in 0.."));
    let message = fail(2, &["soak", "--faults", "flood"]);
    assert!(message.contains("there is no fault `flood`; there are corrupted, "), "{message}");
    if cuda::DeviceInfo::query(0).is_err() {
        assert!(fail(1, &["soak", "--backend", "gpu", "--problems", "1"]).contains("driver"));
    }
}
