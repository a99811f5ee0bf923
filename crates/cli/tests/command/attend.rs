//! `flashcore attend`.

use std::fs::File;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;

use crate::{command, fail, failure, json, succeed, success};

/// A file of tensors that hold zeros.
fn tensors(folder: &Path, tensors: &[(&str, Dtype, &[usize])]) -> PathBuf {
    let path = folder.join("input.safetensors");
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, dtype, shape)| vec![0; shape.iter().product::<usize>() * dtype.bitsize() / 8])
        .collect();
    let views = tensors.iter().zip(&bytes).map(|((name, dtype, shape), bytes)| {
        (*name, TensorView::new(*dtype, shape.to_vec(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &path).unwrap();
    path
}

#[test]
fn attend_says_what_ran_and_how_well() {
    let text = succeed(&["attend", "--backend", "cpu", "--seq", "100", "--heads", "2", "--causal"]);
    for word in ["batch 1, heads 2, length 100", "causal", "blocked", "TFLOP/s", "passed (all 200"]
    {
        assert!(text.contains(word), "no `{word}` in\n{text}");
    }
    assert!(!text.contains('\u{1b}'), "colours outside a terminal");
}

#[test]
fn packed_queries_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.safetensors");
    let problem = "b=3,h=2,s=9,d=16,queries=packed:20,keys=packed:22";
    succeed(&[
        "attend",
        "--backend",
        "cpu",
        "--problem",
        problem,
        "--output",
        path.to_str().unwrap(),
    ]);
    let bytes = std::fs::read(&path).unwrap();
    let written = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(written.tensor("output").unwrap().shape(), [1, 20, 2, 16]);
    assert_eq!(written.tensor("lse").unwrap().shape(), [1, 2, 20]);
}

#[test]
fn attend_says_who_computes_gradients() {
    let message = fail(1, &["attend", "--problem", "b=1,h=2,s=9,d=16,bf16,backward"]);
    let command = "`flashcore check --problem b=1,h=2,s=9,d=16,bf16,backward`";
    assert!(message.contains("asks for gradients") && message.contains(command), "{message}");
}

#[test]
fn attend_over_an_8_bit_cache() {
    let cache = ["attend", "--backend", "cpu", "--seq", "9", "--kv-seq", "70", "--heads", "4"];
    let cache = [&cache[..], &["--kv-heads", "2", "--kv-dtype", "e4m3", "--descale"]].concat();
    for (per, words) in [("head", "k_descale=head"), ("token", "v_descale=token")] {
        let text = succeed(&[&cache[..], &[per]].concat());
        for word in ["q=bf16,k=e4m3,v=e4m3,o=bf16", words, "passed (all 36"] {
            assert!(text.contains(word), "no `{word}` in\n{text}");
        }
    }
    let all =
        ["attend", "--backend", "cpu", "--seq", "30", "--dtype", "e5m2", "--descale", "token"];
    let text = succeed(&all);
    assert!(["q_descale=head", "k_descale=token"].iter().all(|it| text.contains(it)), "{text}");
    let integers = [&cache[..9], &["--kv-heads", "2", "--kv-dtype", "int8", "--descale", "token"]];
    let text = succeed(&integers.concat());
    assert!(text.contains("q=bf16,k=int8,v=int8,o=bf16") && text.contains("passed"), "{text}");
    let refused = fail(2, &["attend", "--problem", "s=8,q=bf16,k=e4m3,v=e4m3,o=bf16,backward"]);
    assert!(refused.contains("there are no gradients of 8-bit tensors"), "{refused}");
}

#[test]
fn attend_in_json() {
    let answer = json(&[
        "attend",
        "--batch",
        "2",
        "--seq",
        "33",
        "--kv-seq",
        "65",
        "--heads",
        "4",
        "--kv-heads",
        "2",
        "--head-dim",
        "48",
        "--value-head-dim",
        "24",
        "--dtype",
        "f16",
        "--causal",
        "--scale",
        "-0.25",
        "--seed",
        "9",
        "--backend",
        "cpu",
        "--json",
    ]);
    assert_eq!(answer["description"]["kv_heads"], 2);
    assert_eq!(answer["description"]["mask"]["right"], 0);
    assert_eq!(answer["scale"], -0.25);
    assert_eq!(answer["report"]["backend"], "cpu");
    assert!(answer["report"]["kernel_ms"].as_f64().unwrap() > 0.0);
    assert_eq!(answer["verdict"]["passed"], true);
    assert_eq!(answer["verdict"]["rows"], 2 * 4 * 33);

    let answer = json(&["attend", "--seq", "20", "--no-check", "--json"]);
    assert_eq!(answer["verdict"], Value::Null);
}

/// Windows, chunks, score rules and ragged storage, by options and by the text of a problem.
#[test]
fn every_rule_and_storage_can_be_asked_for() {
    for (problem, rows) in [
        ("b=2,h=4,s=40,sk=90,d=32,f16", 320),
        ("b=5,h=2,s=60,d=16,f16,causal,queries=packed:120,keys=packed:120", 240),
        ("b=3,h=4,hk=1,s=2,sk=70,d=8,softcap=5,keys=pages:16:5:17,key_lengths", 24),
    ] {
        for rules in
            [&[][..], &["--window", "20:3", "--softcap", "9"], &["--chunk", "32", "--causal"]]
        {
            let scores = ["--alibi", "--sinks", "--backend", "cpu", "--json"];
            let answer = json(&[&["attend", "--problem", problem], rules, &scores].concat());
            assert_eq!(answer["verdict"]["passed"], true, "{answer}");
            assert_eq!(answer["verdict"]["rows"], rows, "{answer}");
            assert_eq!(answer["description"]["scores"]["sinks"], true);
        }
    }
    let text = succeed(&["attend", "--problem", "h=2,s=33,d=16", "--window", "7:", "--batch", "3"]);
    assert!(text.contains("batch 3, heads 2, length 33") && text.contains("window=7:"), "{text}");
    assert!(fail(2, &["attend", "--window", "7"]).contains("is not of the form LEFT:RIGHT"));
    let message = fail(1, &["attend", "--problem", "b=4,h=1,s=5,d=8,keys=entries:2"]);
    assert_eq!(message, "sequence 2 is in batch entry 2, and there are 2");
    assert!(fail(1, &["attend", "--softcap", "0"]).contains("softcap must be positive"));
}

#[test]
fn empty_problems_are_answered() {
    succeed(&["attend", "--seq", "0"]);
    succeed(&["attend", "--seq", "5", "--kv-seq", "0"]);
    succeed(&["attend", "--batch", "0"]);
}

#[test]
fn tensors_come_from_a_file_and_go_to_one() {
    let folder = tempfile::tempdir().unwrap();
    let input = tensors(
        folder.path(),
        &[
            ("q", Dtype::BF16, &[2, 3, 4, 8]),
            ("k", Dtype::BF16, &[2, 5, 2, 8]),
            ("v", Dtype::BF16, &[2, 5, 2, 16]),
        ],
    );
    let output = folder.path().join("output.safetensors");
    let (input, output) = (input.to_str().unwrap(), output.to_str().unwrap());
    let answer = json(&["attend", "--input", input, "--output", output, "--json"]);
    assert_eq!(answer["description"]["value_head_dim"], 16);
    assert_eq!(answer["output"], output);
    let bytes = std::fs::read(output).unwrap();
    let written = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(written.tensor("output").unwrap().shape(), [2, 3, 4, 16]);
    assert_eq!(written.tensor("lse").unwrap().shape(), [2, 4, 3]);
    // Five equal scores of zero.
    let lse = written.tensor("lse").unwrap().data()[..4].try_into().unwrap();
    assert!((f32::from_le_bytes(lse) - 5f32.ln()).abs() < 1e-6);
}

#[test]
fn files_that_cannot_be_used_are_refused_in_a_line() {
    let folder = tempfile::tempdir().unwrap();
    let refuse = |contents: &[(&str, Dtype, &[usize])]| {
        let path = tensors(folder.path(), contents);
        fail(1, &["attend", "--input", path.to_str().unwrap()])
    };
    let mismatch = refuse(&[
        ("q", Dtype::F16, &[1, 3, 2, 8]),
        ("k", Dtype::F16, &[1, 5, 2, 8]),
        ("v", Dtype::F16, &[1, 4, 2, 8]),
    ]);
    assert_eq!(mismatch, "value has shape [1, 4, 2, 8], expected [1, 5, 2, 8]");
    let dtype = refuse(&[("q", Dtype::I32, &[1, 3, 2, 8])]);
    assert!(dtype.contains("tensor `q` has element type i32"), "{dtype}");
    let rank = refuse(&[("q", Dtype::F32, &[3, 2, 8])]);
    assert!(rank.contains("expected [batch, length, heads, dim]"), "{rank}");
    let missing = refuse(&[("q", Dtype::F32, &[1, 3, 2, 8])]);
    assert!(missing.contains("has no tensor `k`, only `q`"), "{missing}");
    let heads = refuse(&[
        ("q", Dtype::F16, &[1, 3, 5, 8]),
        ("k", Dtype::F16, &[1, 5, 2, 8]),
        ("v", Dtype::F16, &[1, 5, 2, 8]),
    ]);
    assert_eq!(heads, "5 query heads cannot be divided among 2 key/value heads");
    let dim = refuse(&[
        ("q", Dtype::F16, &[1, 3, 2, 0]),
        ("k", Dtype::F16, &[1, 5, 2, 0]),
        ("v", Dtype::F16, &[1, 5, 2, 8]),
    ]);
    assert_eq!(dim, "head dim must be at least 1");

    let path = tensors(folder.path(), &[("q", Dtype::F16, &[1, 3, 2, 8])]);
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    let truncated = fail(1, &["attend", "--input", path.to_str().unwrap()]);
    assert!(truncated.ends_with("is truncated or no safetensors file"), "{truncated}");
    file.set_len(0).unwrap();
    let empty = fail(1, &["attend", "--input", path.to_str().unwrap()]);
    assert!(empty.ends_with("is truncated or no safetensors file"), "{empty}");

    let nowhere = fail(1, &["attend", "--input", "/nowhere/q.safetensors"]);
    assert!(nowhere.starts_with("cannot read /nowhere/q.safetensors: "), "{nowhere}");
    // At once, and not after hours.
    let long = ["attend", "--seq", "1000000", "--heads", "1", "--head-dim", "8"];
    let nowhere = fail(1, &[&long[..], &["--output", "/nowhere/o.safetensors"]].concat());
    assert!(nowhere.starts_with("cannot write /nowhere/o.safetensors: "), "{nowhere}");
}

#[test]
fn the_environment_may_insist_on_a_kernel() {
    let attend = |kernel: &str, arguments: &[&str]| {
        let mut attend = command(&[&["attend", "--seq", "16", "--json"], arguments].concat());
        attend.env("FLASHCORE_KERNEL", kernel);
        attend
    };
    let answer: Value = serde_json::from_str(&success(attend("cpu/blocked", &[]))).unwrap();
    assert_eq!(answer["report"]["kernel"], "blocked");
    let message = failure(1, attend("unheard-of", &[]));
    assert!(message.starts_with("there is no kernel `unheard-of` here, only "), "{message}");
    // What is written on the command line counts more.
    success(attend("unheard-of", &["--kernel", "blocked"]));
    // Ragged batches obey as well.
    let ragged = ["--problem", "b=2,h=1,s=9,d=8,queries=packed:12,keys=packed:12"];
    let message = failure(1, attend("cpu/unheard-of", &ragged));
    assert_eq!(message, "there is no kernel `unheard-of` here, only cpu/blocked");
    success(attend("cpu/blocked", &ragged));
    let message = failure(1, attend("forward", &["--backend", "cpu"]));
    assert_eq!(message, "there is no kernel `forward` here, only cpu/blocked");
}

#[test]
fn problems_without_meaning_are_refused_in_a_line() {
    let refuse = |arguments: &[&str]| fail(1, &[&["attend"], arguments].concat());
    assert_eq!(refuse(&["--head-dim", "0"]), "head dim must be at least 1");
    assert_eq!(
        refuse(&["--heads", "8", "--kv-heads", "3"]),
        "8 query heads cannot be divided among 3 key/value heads"
    );
    assert_eq!(refuse(&["--scale", "nan"]), "the softmax scale must be finite, not NaN");
    assert_eq!(refuse(&["--scale", "-inf"]), "the softmax scale must be finite, not -inf");
    assert_eq!(refuse(&["--softcap", "-1"]), "the softcap must be positive and finite, not -1");
    assert!(refuse(&["--descale", "head"]).contains("none has so few"));
    assert!(refuse(&["--batch", "18446744073709551615"]).contains("address space"));
    assert!(refuse(&["--seq", "1000000000000"]).contains("of memory"));
    // Lists take memory too, whatever tensors do.
    for lists in [
        "s=1,keys=pages:16:900000000000:7",
        "s=0,b=18446744073709551615,keys=pages:1:18446744073709551615:1",
        "s=0,b=900000000000",
        "s=0,h=900000000000,alibi",
    ] {
        let message = refuse(&["--problem", &format!("h=1,d=8,{lists}")]);
        assert!(message.contains("of memory"), "{message}");
    }
    assert!(refuse(&["--head-dim", "100000", "--seq", "2"]).contains("head dims end at 65536"));
    assert!(refuse(&["--kernel", "unheard-of"]).contains("there is no kernel `unheard-of`"));
}
