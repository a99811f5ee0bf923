//! `flashcore bench`. Without a GPU: what would be measured, and what is done with results.

use serde_json::{Value, json};

use crate::{fail, json as answer, succeed};

/// Results of a run, as the command writes them.
fn results(milliseconds: f64) -> Value {
    let measurement = |candidate: &str, factor: f64| {
        let samples: Vec<f64> =
            [1.0, 1.002, 0.998, 1.001, 0.999].iter().map(|it| it * factor * milliseconds).collect();
        json!({
            "candidate": candidate, "cache": "cold", "kernel": null, "ptx": null,
            "summary": { "median": samples[0], "least": samples[2], "most": samples[1], "noise": 0.004 },
            "samples": samples, "right": true, "error": null, "note": null,
        })
    };
    let candidate = |name: &str, peer: bool| json!({ "name": name, "peer": peer, "about": "" });
    json!({
        "form": 1,
        "provenance": {
            "date": "", "command": "", "flashcore": "", "system": "", "gpu": null,
            "conditions": [], "versions": [],
        },
        "method": { "set": "own", "rounds": 5, "calls": 1, "process": "", "seconds": 1.0 },
        "candidates": [candidate("flashcore", false), candidate("cudnn", true)],
        "cells": [{
            "problem": "b=1,h=16,s=4096,d=128,bf16", "flops": 137438953472.0, "bytes": 67371008.0,
            "measurements": [measurement("flashcore", 1.0), measurement("cudnn", 1.2)],
        }],
    })
}

#[test]
fn what_would_be_measured_needs_no_gpu() {
    let lines = answer(&["bench", "--plan", "--set", "quick", "--json"]);
    let lines = lines["planned"].as_array().unwrap();
    assert_eq!(lines.len(), 6 * 3);
    assert!(lines[0]["kernel"].as_str().unwrap().starts_with("forward_bf16_d64x64_dense_"));
    assert_eq!(lines[0]["blocks"], 132);
    assert!(lines[1]["note"].as_str().unwrap().contains("cuDNN"));
    let text = succeed(&["bench", "sets"]);
    for set in ["paper", "small", "llama", "gpt-oss", "diffusion"] {
        assert!(text.contains(set), "{text}");
    }
}

#[test]
fn gradients_of_log_sum_exps_are_not_measured() {
    let refused = fail(1, &["bench", "--problem", "h=2,s=64,d=64,bf16,backward,lse_gradient"]);
    assert!(refused.contains("of plain and packed problems alone yet"), "{refused}");
}

#[test]
fn results_are_shown_drawn_and_compared() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(at("a.json"), results(0.2).to_string()).unwrap();
    std::fs::write(at("b.json"), results(0.2).to_string()).unwrap();
    let text = succeed(&["bench", "report", &at("a.json"), "--output", &at("drawn")]);
    assert!(
        text.contains("geometric mean 1.200, lowest 1.200, highest 1.200, 1 problems"),
        "{text}"
    );
    let page = std::fs::read_to_string(at("drawn.html")).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.contains("<svg "));
    assert!(std::fs::read_to_string(at("drawn-speed.svg")).unwrap().starts_with("<svg "));
    let text = succeed(&["bench", "compare", &at("a.json"), &at("b.json")]);
    assert!(text.contains("0 of 1 differences exceed the noise"), "{text}");
    let mut slower = results(0.2);
    let cell = &mut slower["cells"][0]["measurements"][0];
    for number in cell["samples"].as_array_mut().unwrap() {
        *number = (number.as_f64().unwrap() * 1.1).into();
    }
    cell["summary"]["median"] = 0.22.into();
    std::fs::write(at("b.json"), slower.to_string()).unwrap();
    let comparison = answer(&["bench", "compare", &at("a.json"), &at("b.json"), "--json"]);
    assert_eq!(comparison["changes"][0]["real"], true, "{comparison}");
    assert!(comparison["changes"][0]["speedup"].as_f64().unwrap() < 0.95, "{comparison}");
}

/// Gradients, alone and as a step with the forward pass, by whoever of ours is named.
#[test]
fn gradients_are_planned() {
    for how in ["--backward", "--step"] {
        let given = ["--plan", "--json", "--problem", "b=1,h=2,s=512,d=64,bf16"];
        let named = ["bench", how, "--candidates", "flashcore,backward"];
        let planned = answer(&[&named, &given[..]].concat());
        for line in planned["planned"].as_array().unwrap() {
            let kernel = line["kernel"].as_str().unwrap_or_default();
            assert!(kernel.starts_with("backward_bf16_d64x64"), "{line}");
        }
        // FlashAttention-3's wheel has no gradients.
        let planned = answer(&[&["bench", how], &given[..]].concat());
        let names = planned["planned"].as_array().unwrap().iter().map(|line| &line["candidate"]);
        assert_eq!(names.collect::<Vec<_>>(), ["flashcore", "cudnn", "fa4"]);
    }
    assert!(fail(2, &["bench", "--backward", "--step"]).contains("cannot be used with"));
}

#[test]
fn mistakes_are_named() {
    assert!(fail(2, &["bench", "--candidates", "fa9"]).contains("no candidate `fa9`"));
    assert!(fail(1, &["bench", "--set", "papers", "--plan"]).contains("sets are paper"));
    assert!(fail(2, &["bench", "--plan", "--output", "x"]).contains("cannot be used with"));
    // Before an hour of measuring, and before a GPU is looked for.
    let file = tempfile::NamedTempFile::new().unwrap();
    let within = file.path().join("results").display().to_string();
    let message = fail(1, &["bench", "--set", "quick", "--output", &within]);
    assert!(message.starts_with(&format!("cannot write {within}.json: ")), "{message}");
    let message = fail(1, &["bench", "compare", "/nowhere/a.json", "/nowhere/b.json"]);
    assert!(message.contains("cannot read /nowhere/a.json"), "{message}");
    if cuda::DeviceInfo::query(0).is_err() {
        let message = fail(1, &["bench", "--candidates", "flashcore"]);
        assert!(message.contains("there is no GPU to measure on"), "{message}");
        assert!(message.contains("--plan"), "{message}");
    }
}
