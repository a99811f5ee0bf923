//! `flashcore scale`.

use std::process::Command;

use crate::{fail, failure, json, succeed};

#[test]
fn many_gpus_are_predicted() {
    let answer = json(&["scale", "--lengths", "128k,10m", "--ranks", "64,1024", "--json"]);
    let predictions = answer["predictions"].as_array().unwrap();
    // Heads are too few for each GPU to have one.
    assert_eq!(predictions.len(), 2 * (3 + 3), "{answer}");
    assert_eq!(answer["refusals"].as_array().unwrap().len(), 2 * 2, "{answer}");
    for it in predictions {
        let total = it["forward"]["total_ms"].as_f64().unwrap()
            + it["backward"]["total_ms"].as_f64().unwrap();
        assert!((it["total_ms"].as_f64().unwrap() / total - 1.0).abs() < 1e-9, "{it}");
        assert!(it["memory_bytes"].as_u64().unwrap() > 0, "{it}");
    }
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    assert!(choices.iter().all(|it| it["variant"].is_string()), "{answer}");
    let text = succeed(&["scale", "--forward", "--ranks", "2,16"]);
    for words in ["GPUs", "hybrid 2 x 8", "16 GPUs: ", "2 GPUs: no hybrid, since", "NVIDIA H200"] {
        assert!(text.contains(words), "no `{words}` in\n{text}");
    }
}

#[test]
fn links_and_memory_are_as_given() {
    let total = |between: &str| {
        let given = ["--ranks", "16", "--variants", "all-to-all", "--between", between, "--json"];
        json(&[&["scale"], &given[..]].concat())["predictions"][0]["total_ms"].as_f64().unwrap()
    };
    assert!(total("5:20") > total("hdr") && total("hdr") > total("xdr"));
    let small = json(&["scale", "--ranks", "8", "--memory", "4", "--json"]);
    assert_eq!(small["choices"][0]["variant"], serde_json::Value::Null, "{small}");
    assert_eq!(small["predictions"][0]["fits"], false);
}

#[test]
fn times_are_saved_read_and_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let text = succeed(&["scale", "--save-times", &at("times.txt")]);
    assert!(text.contains("times written to"), "{text}");
    let given = ["scale", "--ranks", "8", "--json"];
    let own = json(&[&given[..], &["--times", &at("times.txt")]].concat());
    assert_eq!(own, json(&given));
    let text = succeed(&["scale", "--ranks", "8,64", "--plot", &at("scale.svg")]);
    assert!(text.contains("written ") && text.contains("scale.svg"), "{text}");
    assert!(std::fs::read_to_string(at("scale.svg")).unwrap().starts_with("<svg "));
}

/// Where there is no space, nothing half-written stays.
#[cfg(unix)]
#[test]
fn what_cannot_be_written_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    // A limit of no bytes for a file stands for a full disk.
    let limited = "trap '' XFSZ; ulimit -f 0; exec \"$0\" scale --ranks 2 --plot scale.svg";
    let mut shell = Command::new("sh");
    shell.args(["-c", limited, env!("CARGO_BIN_EXE_flashcore")]).current_dir(folder.path());
    let message = failure(1, shell);
    assert!(message.starts_with("cannot write scale.svg: "), "{message}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// What `bench --json` prints can be predicted from as it is.
#[test]
fn results_of_bench_are_times() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("results.json").display().to_string();
    let cell = |problem: &str, milliseconds: f64| {
        serde_json::json!({
            "problem": problem, "flops": 1.0, "bytes": 1.0,
            "measurements": [{
                "candidate": "flashcore", "cache": "cold", "kernel": null, "ptx": null,
                "samples": [milliseconds, milliseconds],
                "summary": { "median": milliseconds, "least": 1.0, "most": 1.0, "noise": 0.0 },
                "right": true, "error": null, "note": null,
            }],
        })
    };
    let mut results = serde_json::json!({
        "version": 1, "form": 1,
        "provenance": {
            "date": "today", "command": "bench", "flashcore": "0", "system": "",
            "gpu": { "name": "a GPU", "uuid": "", "driver": "", "multiprocessors": 4,
                     "clock_megahertz": 1.0, "l2_bytes": 1 },
            "conditions": [], "versions": [],
        },
        "method": { "set": "own", "rounds": 2, "calls": 1, "process": "", "seconds": 1.0 },
        "candidates": [{ "name": "flashcore", "peer": false, "about": "" }],
        "cells": [cell("b=1,h=8,s=4096,d=128,bf16", 2.0), cell("b=1,h=8,s=4096,d=128,bf16,backward", 5.0)],
    });
    let write = |results: &serde_json::Value| std::fs::write(&path, results.to_string()).unwrap();
    write(&results);
    let given =
        ["scale", "--times", &path, "--ranks", "1", "--problem", "b=1,h=8,s=4096,d=128,bf16"];
    let answer = json(&[&given[..], &["--json"]].concat());
    assert_eq!(answer["gpu"], "a GPU");
    assert_eq!(answer["predictions"][0]["total_ms"], 7.0, "{answer}");
    results["provenance"]["gpu"] = serde_json::Value::Null;
    write(&results);
    assert!(fail(1, &given).contains("it names no GPU"));
}

#[test]
fn mistakes_are_named() {
    for (arguments, said) in [
        (&["--ranks", "0"][..], "0 ranks cannot be predicted"),
        (&["--ranks", "2048"], "2048 ranks cannot be predicted: expected 1 to 1024"),
        (&["--lengths", "11m"], "11534336 tokens are more than 10485760"),
        (&["--ranks", "64", "--variants", "all-to-all"], "32 heads cannot be spread over 64 ranks"),
        (&["--problem", "d=128,bf16,causal,backward"], "leave `backward` out"),
        (&["--node", "0"], "a node has one GPU at least"),
        (&["--memory", "nan"], "no NaN GB of memory"),
        (&["--memory", "0"], "no 0 GB of memory"),
        (&["--times", "/nowhere/times"], "cannot read /nowhere/times"),
        (&["--plot", "/nowhere/scale.svg", "--ranks", "2"], "cannot write /nowhere/scale.svg"),
    ] {
        let message = fail(1, &[&["scale"], arguments].concat());
        assert!(message.contains(said), "{arguments:?}: {message}");
    }
    for (arguments, said) in [
        (["--inside", "0:3"], "GB/s must be above zero"),
        (["--between", "nan:3"], "is no link: expected nvlink4"),
        (["--lengths", "long"], "`long` is no length"),
        (["--lengths", "99999999999999999999m"], "is no length"),
        (["--variants", "star"], "`star` is no variant"),
        (["--ranks", "-1"], "-1"),
    ] {
        let message = fail(2, &[&["scale"], &arguments[..]].concat());
        assert!(message.contains(said), "{arguments:?}: {message}");
    }
}
