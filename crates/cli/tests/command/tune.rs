//! `flashcore tune`, without a GPU: the cost model.

use crate::{fail, json};

#[test]
fn the_model_ranks_configurations() {
    let problem = "b=2,h=32,s=8192,d=64,bf16";
    let ranked = json(&["tune", "--model", "--problem", problem, "--show", "40", "--json"]);
    let best = ranked["problems"][0]["best"].as_array().unwrap();
    assert_eq!(best.len(), 40);
    // What was picked by hand after measuring is among what the model would try first.
    assert!(best.iter().any(|it| it["chosen_by_rules"] == true), "{ranked}");
    let times: Vec<f64> = best.iter().map(|it| it["milliseconds"].as_f64().unwrap()).collect();
    assert!(times.is_sorted());
}

#[test]
fn mistakes_are_named() {
    assert!(fail(2, &["tune"]).contains("--problem"));
    assert!(fail(1, &["tune", "--model", "--problem", "d=7,bf16"]).contains("head dim 7"));
    let model = ["tune", "--model", "--problem", "d=64,bf16"];
    let message = fail(1, &[&model[..], &["--kernel", "unheard-of"]].concat());
    assert!(message.contains("there is no candidate `unheard-of`"), "{message}");
    let message = fail(1, &[&model[..], &["--kernel", "decode"]].concat());
    assert_eq!(message, "the model knows the forward kernel alone, not decode");
    for option in ["--output", "--log", "--seconds", "--seed"] {
        let message = fail(2, &[&model[..], &[option, "1"]].concat());
        assert!(message.contains("cannot be used with"), "{message}");
    }
    for model in [&["--model"][..], &[]] {
        let message = fail(1, &[&["tune", "--problem", "d=128,bf16,backward"], model].concat());
        assert!(message.starts_with("there is nothing to tune for"), "{message}");
        let message = fail(1, &[&["tune", "--problem", "d=64,bf16,backward"], model].concat());
        assert!(message.contains("`bench --backward --candidates`"), "{message}");
    }
    if cuda::DeviceInfo::query(0).is_err() {
        let message = fail(1, &["tune", "--problem", "d=64"]);
        assert!(message.contains("there is no GPU to tune for"), "{message}");
        assert!(message.contains("--model"), "{message}");
    }
}
