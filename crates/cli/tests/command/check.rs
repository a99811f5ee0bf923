//! `flashcore check`.

use serde_json::Value;

use crate::{json, succeed};

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
    assert!(table.contains("cpu/blocked") && table.contains("passed"), "{table}");
}
