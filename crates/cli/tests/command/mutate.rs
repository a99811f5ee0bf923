//! `flashcore mutate`.

use serde_json::Value;

use crate::{fail, json, succeed};

#[test]
fn mistakes_are_counted_by_kind() {
    let name = "sequencer_sm_90a";
    let answer = json(&["mutate", name, "--weakened", "3", "--values", "2", "--json"]);
    let report = &answer["kernels"][0];
    assert_eq!((&report["family"], &report["kernel"]), (&"sequencer".into(), &name.into()));
    let kinds = report["kinds"].as_array().unwrap();
    let tried = ["deleted", "weakened", "value"].into_iter().zip([5, 3, 2]);
    for (line, (kind, tried)) in kinds.iter().zip(tried) {
        assert_eq!((&line["kind"], &line["tried"]), (&kind.into(), &tried.into()), "{line}");
        assert!(line["possible"].as_u64() >= Some(tried as u64), "{line}");
    }
    let deleted = &kinds[0];
    assert_eq!((&deleted["killed"], &deleted["survived"]), (&5.into(), &0.into()), "{deleted}");
    assert!(deleted["by"].as_object().unwrap().keys().all(|by| by != "refused"), "{deleted}");
}

#[test]
fn where_nothing_was_tried_there_is_no_score() {
    let nothing = ["mutate", "sequencer_sm_90a", "--weakened", "0", "--values", "0"];
    let report = &json(&[&nothing[..], &["--deleted", "2", "--json"]].concat())["kernels"][0];
    let scores: Vec<_> =
        report["kinds"].as_array().unwrap().iter().map(|it| &it["score"]).collect();
    assert_eq!(scores, [&1.0.into(), &Value::Null, &Value::Null], "{report}");
    let text = succeed(&[&nothing[..], &["--deleted", "2"]].concat());
    assert_eq!(text.matches('%').count(), 1, "{text}");
    let message = fail(1, &[&nothing[..], &["--deleted", "0"]].concat());
    assert!(message.ends_with("mutants of sequencer_sm_90a would be tried"), "{message}");
}

#[test]
fn a_family_is_told_configuration_by_configuration() {
    let text = succeed(&["mutate", "combine", "--values", "3"]);
    for word in ["combine_f32_to_bf16_d64", "combine_bf16_to_bf16_d8", "score", "100.0 %"] {
        assert!(text.contains(word), "no `{word}` in\n{text}");
    }
    let message = fail(1, &["mutate", "combine", "--values", "3", "--at", "nowhere.rs"]);
    assert_eq!(message, "no statement of combine at `nowhere.rs` can be changed");
    let message = fail(1, &["mutate", "nothing"]);
    assert!(message.contains("there is no kernel `nothing`"), "{message}");
}
