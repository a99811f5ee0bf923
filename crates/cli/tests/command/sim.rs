//! `flashcore sim`.

use serde_json::Value;

use crate::{command, fail, json, succeed};

/// Small enough to be simulated in a blink.
const SINGLE: &str = "single_wgmma_bf16";

#[test]
fn every_family_is_simulated() {
    for family in ["scalar", "mma", "decode", "prefill", "single", "product", "forward"] {
        let answer = json(&["sim", family, "--seeds", "1", "--policy", "latest", "--json"]);
        assert_eq!(answer["family"], family);
        assert_eq!((&answer["passed"], &answer["checked"]), (&true.into(), &true.into()));
        let line = &answer["policies"][0];
        assert_eq!((&line["passed"], &line["seeds"]), (&1.into(), &1.into()), "{answer}");
        assert!(line["tolerance_used"].as_f64().unwrap() < 1.0, "{answer}");
        assert!(line["counts"]["lane instructions"].as_u64().unwrap() > 1000, "{answer}");
    }
}

#[test]
fn every_policy_has_a_line() {
    let text = succeed(&["sim", SINGLE, "--seeds", "3"]);
    for policy in ["earliest", "latest", "random"] {
        let line = text.lines().find(|line| line.starts_with(policy)).unwrap();
        assert!(line.contains("3 of 3"), "{text}");
    }
    for word in [SINGLE, "tensor operations", "131072", "every kind of hazard", "single.rs:"] {
        assert!(text.contains(word), "no `{word}` in\n{text}");
    }
    assert!(!text.contains("atomics"), "what is not done is not listed:\n{text}");
    assert!(succeed(&["sim", SINGLE, "--values", "--seed", "7"]).contains("1 of 1"));
}

#[test]
fn sizes_are_those_of_the_kernel() {
    let run = |arguments: &[&str]| {
        let fixed = ["--seeds", "1", "--policy", "random", "--values", "--json"];
        json(&[&["sim"], arguments, &fixed[..]].concat())
    };
    let answer = run(&["product", "--rows", "65", "--inner", "64"]);
    assert_eq!((&answer["size"], &answer["blocks"]), (&"65 x 128 x 64".into(), &2.into()));
    let answer = run(&["scalar_f16_d7x33_causal", "--seq", "3", "--heads", "4", "--kv-heads", "2"]);
    let size = answer["size"].as_str().unwrap();
    assert!(size.starts_with("batch 1, heads 4/2, length 3, head dim 7/33, f16, causal"), "{size}");
    let answer = run(&["decode", "--batch", "2", "--seq", "1", "--kv-seq", "33"]);
    assert!(answer["size"].as_str().unwrap().starts_with("batch 2, "), "{answer}");
    let answer = run(&["backward", "--seq", "70", "--heads", "2"]);
    let size = answer["size"].as_str().unwrap();
    assert!(size.starts_with("batch 1, heads 2, length 70, head dim 64"), "{size}");
    let message = fail(1, &["sim", "single", "--rows", "3"]);
    assert_eq!(message, "--rows means nothing to the single kernel");
    let message = fail(1, &["sim", "scalar", "--heads", "3", "--kv-heads", "2"]);
    assert!(message.contains("cannot be divided"), "{message}");
    for family in ["forward", "backward", "backward-mma"] {
        let message = fail(1, &["sim", family, "--seq", "5", "--kv-seq", "0"]);
        assert_eq!(message, format!("the {family} kernel takes at least one key"));
    }
    for family in ["forward", "prefill", "mma", "decode", "scalar", "backward", "backward-mma"] {
        assert_eq!(fail(1, &["sim", family, "--batch", "0"]), "there are no queries");
        assert_eq!(fail(1, &["sim", family, "--seq", "0"]), "there are no queries");
    }
}

/// Before anything is made for it.
#[test]
fn what_is_too_large_is_refused() {
    for size in [
        &["product", "--rows", "4294967295"][..],
        &["product", "--inner", "4294967295"],
        &["combine", "--parts", "4294967295", "--batch", "4294967295", "--seq", "4294967295"],
        &["forward", "--seq", "4294967295"],
        &["decode", "--batch", "4294967295"],
        &["prefill", "--batch", "4294967295", "--kv-seq", "0"],
        &["--problem", "b=1000000000,h=1,s=1,d=64,bf16"],
        &["--problem", "b=1,h=1000000000,s=1,d=64,bf16"],
        &["--problem", "b=1000000000,h=1,s=9,d=64,bf16,queries=packed:9,keys=packed:9"],
        &["--problem", "h=1,s=1,d=64,bf16,keys=pages:16:1000000000:7"],
    ] {
        let message = fail(1, &[&["sim"], size].concat());
        assert!(message.starts_with("the problem is too large"), "{size:?}: {message}");
    }
}

/// What is over its budget fails, with the command that shows it again.
#[test]
fn a_budget_is_kept() {
    succeed(&["sim", SINGLE, "--budget", "bank-conflicts=32"]);
    let budget = ["--budget", "bank-conflicts=31", "--seeds", "1", "--policy", "latest"];
    let output = command(&[&["sim", SINGLE], &budget[..]].concat()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("over budget: bank conflicts is 32, at most 31 allowed"), "{text}");
    let replay = "replay: flashcore sim single_wgmma_bf16 --policy latest --seed 0 --budget \
                  bank-conflicts=31";
    assert!(text.contains(replay), "{text}");
    assert!(fail(2, &["sim", SINGLE, "--budget", "bank-conflicts"]).contains("MEASURE=NUMBER"));
    assert!(fail(2, &["sim", SINGLE, "--budget", "luck=3"]).contains("`luck` is not counted"));
}

#[test]
fn a_timeline_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("timeline.json");
    let file = path.to_str().unwrap();
    let arguments = ["sim", "forward", "--seeds", "1", "--policy", "latest", "--values"];
    let text = succeed(&[&arguments[..], &["--trace", file]].concat());
    assert!(text.contains("ui.perfetto.dev"), "{text}");
    let trace: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for row in ["tensor cores", "copies", "warp 4"] {
        assert!(events.iter().any(|event| event["args"]["name"] == row), "no row `{row}`");
    }
    let nowhere = folder.path().join("missing").join("timeline.json");
    // At once, and not after hours.
    let trace = ["sim", SINGLE, "--seeds", "1000000", "--trace", nowhere.to_str().unwrap()];
    let message = fail(1, &trace);
    assert!(message.starts_with("cannot write "), "{message}");
}

#[test]
fn mistakes_are_named() {
    assert!(fail(1, &["sim", "unheard-of"]).contains("there is no kernel `unheard-of`"));
    assert!(fail(2, &["sim"]).contains("KERNEL"));
    assert!(
        fail(2, &["sim", SINGLE, "--policy", "kind"]).contains("earliest, latest, random, all")
    );
    assert!(fail(2, &["sim", SINGLE, "--seed", "1", "--seeds", "2"]).contains("cannot be used"));
}

/// Problems by their text: the planner's kernel, or that of a family.
#[test]
fn a_problem_is_simulated() {
    let run = |arguments: &[&str]| {
        let fixed = ["--seeds", "1", "--policy", "random", "--values", "--json"];
        json(&[&["sim"], arguments, &fixed[..]].concat())
    };
    let answer = run(&["--problem", "h=2,s=70,d=64,bf16,window=9:0"]);
    assert_eq!((&answer["family"], &answer["passed"]), (&"forward".into(), &true.into()));
    assert!(answer["size"].as_str().unwrap().contains("window=9:0"), "{answer}");
    let paged = "b=2,h=4,hk=1,s=1,sk=40,d=64,causal,sinks,keys=pages:16:3:7,key_lengths";
    let answer = run(&["decode", "--problem", paged]);
    assert_eq!((&answer["family"], &answer["passed"]), (&"decode".into(), &true.into()));
    let packed = "b=3,h=2,s=30,d=64,f16,causal,queries=packed:50,keys=packed:50";
    let answer = run(&["mma", "--problem", packed]);
    assert_eq!((&answer["family"], &answer["passed"]), (&"mma".into(), &true.into()));

    let message = fail(1, &["sim", "forward", "--problem", packed]);
    assert!(message.contains("forward cannot serve this problem") && message.contains("gpu/mma"));
    let message = fail(1, &["sim", "product", "--problem", packed]);
    assert!(message.contains("name one of decode, forward"), "{message}");
    let message = fail(1, &["sim", "--problem", packed, "--seq", "3"]);
    assert_eq!(message, "--seq is said by --problem already");
}

/// Functions that are a window or a cap run as these, and are simulated as they run.
#[test]
fn functions_of_a_problem_are_simulated() {
    let problem = "h=2,s=70,d=64,bf16,mask=(mask causal (ge query key)),\
                   score=(score cap (mul 3.0 (tanh (div score 3.0))))";
    let one = ["--seeds", "1", "--policy", "latest", "--values"];
    let answer = json(&[&["sim", "--problem", problem, "--json"], &one[..]].concat());
    assert_eq!((&answer["family"], &answer["passed"]), (&"forward".into(), &true.into()));
    assert!(answer["kernel"].as_str().unwrap().contains("causal_softcap"), "{answer}");

    // A shell takes the command that replays a failure as it is printed.
    let over = [&["sim", "--problem", problem, "--budget", "exponentials=1"], &one[..]].concat();
    let output = command(&over).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    let replay = text.lines().find_map(|line| line.trim().strip_prefix("replay: flashcore "));
    let replay = replay.unwrap_or_else(|| panic!("{text}"));
    assert!(replay.contains(" --problem 'b=1,h=2,") && replay.contains("))' --policy"), "{replay}");

    let loads =
        "h=1,s=9,d=64,mask=(mask same (tensor ids i32 1) (eq (load ids query) (load ids key)))";
    let message = fail(1, &["sim", "--problem", loads]);
    assert!(message.starts_with("tensor ids, which mask same loads from, is missing"), "{message}");
}
