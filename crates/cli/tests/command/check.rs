//! `flashcore check`.

use serde_json::Value;

use crate::{command, fail, failure, json, succeed};

#[test]
fn check_passes_on_this_machine() {
    let answer = json(&["check", "--dtype", "f16", "--json"]);
    assert_eq!(answer["passed"], true);
    let kernels = answer["kernels"].as_array().unwrap();
    assert!(!kernels.is_empty());
    for kernel in kernels {
        assert!(kernel["cases"].as_u64().unwrap() > 50, "{kernel}");
        assert_eq!(kernel["failures"], Value::Array(Vec::new()));
        assert!(kernel["max_error"].as_f64().unwrap() > 0.0);
    }
    let table = succeed(&["check", "--dtype", "f16", "--backend", "cpu"]);
    assert!(table.contains("cpu/blocked") && table.contains("cpu/backward"), "{table}");
}

/// Gradients of a problem of the caller's, plain and ragged.
#[test]
fn given_gradients_are_checked() {
    let plain = "b=1,h=4,hk=2,s=33,sk=50,d=24,bf16,causal,sinks,backward";
    let ragged = "b=3,h=2,s=60,d=16,bf16,causal,queries=packed:120,keys=packed:120,backward";
    let given = ["--problem", plain, "--problem", ragged];
    let answer = json(&[&["check", "--backend", "cpu", "--json"], &given[..]].concat());
    let kernels = answer["kernels"].as_array().unwrap();
    assert!(kernels.iter().all(|it| it["kernel"] == "backward" && it["lse_max_error"].is_null()));
    assert!(kernels.len() == 2 && answer["passed"] == true, "{answer}");
    assert!(kernels.iter().all(|it| it["cases"] == 1 && it["max_error"].as_f64() > Some(0.0)));
}

/// Problems of the caller's, plain and ragged.
#[test]
fn given_problems_are_checked() {
    let ragged = "b=3,h=2,s=60,d=16,f16,causal,sinks,queries=packed:120,keys=packed:120";
    let given = ["--problem", "b=2,h=4,s=33,d=64,bf16,window=9:0", "--problem", ragged];
    let answer = json(&[&["check", "--backend", "cpu", "--json"], &given[..]].concat());
    let kernels = answer["kernels"].as_array().unwrap();
    let types: Vec<&str> = kernels.iter().map(|it| it["dtype"].as_str().unwrap()).collect();
    assert_eq!((types, &answer["passed"]), (vec!["bf16", "f16"], &true.into()));
    assert!(kernels.iter().all(|it| it["cases"] == 1 && it["max_error"].as_f64() > Some(0.0)));
    let refuse = |arguments: &[&str]| fail(1, &[&["check"], arguments].concat());
    let message = refuse(&["--backend", "cpu", "--kernel", "nope", "--problem", "s=9"]);
    assert!(message.starts_with("there is no kernel `nope` here, only "), "{message}");
    let message = refuse(&["--backend", "cpu", "--kernel", "nope", "--dtype", "f16"]);
    assert_eq!(message, "there is no kernel `nope` here, only cpu/blocked, cpu/backward");
    // A name with its back end is what tables print.
    let named = ["check", "--kernel", "cpu/blocked", "--problem", "h=1,s=9,d=8", "--json"];
    let answer = json(&named);
    assert_eq!(answer["kernels"].as_array().unwrap().len(), 1, "{answer}");
    assert_eq!(answer["kernels"][0]["kernel"], "blocked");
    let message = refuse(&["--kernel", "cpu/nope", "--dtype", "f16"]);
    assert_eq!(message, "there is no kernel `cpu/nope` here, only cpu/blocked, cpu/backward");
    let message = refuse(&["--kernel", "tpu/nope", "--dtype", "f16"]);
    assert_eq!(message, "there is no tpu back end here: no such back end exists");
    assert!(refuse(&["--problem", "d=100000,s=2"]).contains("head dims end at 65536"));
}

#[test]
fn bits_are_compared_over_batches() {
    let found = json(&["check", "--batches", "1", "--backend", "cpu", "--json"]);
    assert_eq!(found["passed"], true, "{found}");
    assert_eq!(found["backends"][0]["backend"], "cpu");
    assert!(found["backends"][0]["compared"].as_u64().unwrap() > 0, "{found}");
    assert!(fail(2, &["check", "--batches", "0"]).contains("0 is not in 1.."));
}

/// Nothing was checked, which is no success.
#[test]
fn a_back_end_that_is_not_here_is_an_error() {
    for arguments in [&["--batches", "1"][..], &["--problem", "h=1,s=3,d=8"], &[]] {
        let mut command = command(&[&["check", "--backend", "gpu"], arguments].concat());
        command.env("CUDA_VISIBLE_DEVICES", "");
        let message = failure(1, command);
        assert!(message.starts_with("there is no gpu back end here: "), "{message}");
    }
}
