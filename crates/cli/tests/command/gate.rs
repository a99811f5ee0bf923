//! `flashcore gate`: the steps that need no GPU, and the words of the others.

use crate::{command, fail, json, succeed};

#[test]
fn a_shipped_kernel_is_accepted_as_far_as_it_can_be_asked() {
    let without = ["--without", "correct,fast,counters", "--seeds", "1", "--json"];
    let judgement = json(&[&["gate", "single_wgmma_bf16"], &without[..]].concat());
    assert_eq!(judgement["accepted"], true, "{judgement}");
    let judgement = &judgement["kernels"][0];
    assert_eq!(judgement["accepted"], true, "{judgement}");
    let steps: Vec<_> =
        judgement["findings"].as_array().unwrap().iter().map(|it| &it["step"]).collect();
    assert_eq!(steps, ["validate", "assemble", "simulate"]);
    assert_eq!(judgement["findings"][2]["outcome"], "accept", "{judgement}");
    if cuda::DeviceInfo::query(0).is_err() {
        let text = succeed(&["gate", "single", "--seeds", "1"]);
        assert!(text.contains("skipped: there is no GPU"), "{text}");
        assert!(text.contains("as far as could be asked"), "{text}");
    }
}

/// Of a kernel for gradients the same is asked, and of those that go with it.
#[test]
fn kernels_for_gradients_are_judged() {
    for kernel in ["backward", "row_sums", "rounding"] {
        let without = ["--without", "assemble,correct,fast,counters", "--seeds", "1"];
        let answer = json(&[&["gate", kernel, "--json"], &without[..]].concat());
        assert_eq!(answer["accepted"], true, "{answer}");
        let findings = answer["kernels"][0]["findings"].as_array().unwrap();
        assert!(findings.iter().all(|it| it["outcome"] == "accept"), "{answer}");
    }
}

#[test]
fn a_foreign_kernel_is_judged_by_its_description() {
    let folder = tempfile::tempdir().unwrap();
    let ptx = folder.path().join("mine.ptx");
    let name = ptx.to_str().unwrap();
    let scalar = succeed(&["inspect", "scalar_f16_d64x64_dense", "--ptx"]);
    std::fs::write(&ptx, scalar).unwrap();
    let message = fail(1, &["gate", name]);
    assert!(message.contains("cannot read") && message.contains("mine.json"), "{message}");
    assert!(
        message.contains("which says how the kernel of")
            && message.contains("mine.ptx is launched")
    );
    let absent = fail(1, &["gate", "absent.ptx"]);
    assert!(absent.starts_with("cannot read absent.ptx: "), "{absent}");
    // One argument where the entry has many parameters.
    let description = r#"{ "entry": "scalar_f16_d64x64_dense", "problem": "d=64,f16",
        "grid": ["heads"], "threads": 256, "arguments": [{ "tensor": "query" }] }"#;
    std::fs::write(folder.path().join("mine.json"), description).unwrap();
    let output = command(&["gate", name]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("rejected (invalid): the entry has parameters of"), "{text}");
}

#[test]
fn mistakes_are_named() {
    assert!(fail(1, &["gate", "unheard-of"]).contains("there is no kernel `unheard-of`"));
    assert!(fail(2, &["gate", "single", "--without", "luck"]).contains("there is no step `luck`"));
    assert!(fail(2, &["gate"]).contains("KERNEL"));
    let message = fail(1, &["gate", "single", "--description", "launch.json"]);
    assert_eq!(message, "--description is for a PTX file, and `single` is none");
    for seeds in ["0", "4294967295", "18446744073709551615"] {
        let message = fail(2, &["gate", "product", "--seeds", seeds]);
        assert!(message.contains("is not in 1..=1000000"), "{message}");
        let message = fail(2, &["sim", "product", "--seeds", seeds]);
        assert!(message.contains("is not in 1..=1000000"), "{message}");
    }
    assert!(fail(2, &["gate", "single", "--rounds", "0"]).contains("is not in 1..="));
    for share in ["nan", "inf", "-1", "fast"] {
        let option = format!("--at-least={share}");
        let message = fail(2, &["gate", "single", &option]);
        assert!(message.contains("number"), "{message}");
    }
}

/// Who is asked nothing has not been judged.
#[test]
fn a_kernel_that_is_asked_nothing_is_not_accepted() {
    let all = "validate,assemble,simulate,correct,fast,counters";
    let message = fail(1, &["gate", "single", "--without", all]);
    assert!(message.contains("no step is left to judge by"), "{message}");
    if cuda::DeviceInfo::query(0).is_err() {
        let arguments = ["gate", "single", "--without", "validate,assemble,simulate"];
        let output = command(&arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("not judged: no step could be asked"), "{text}");
    }
}
