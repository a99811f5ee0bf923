//! `flashcore warm`.

use serde_json::Value;

use crate::{command, fail, failure, success};

#[test]
fn something_must_be_named() {
    assert!(fail(2, &["warm"]).contains("--all"));
    assert!(fail(2, &["warm", "--problem", "x=1"]).contains("there is no size `x`"));
    assert!(fail(2, &["warm", "--problem", "d=64", "--all"]).contains("cannot be used with"));
}

#[test]
fn kernels_are_in_the_cache_afterwards_or_the_missing_gpu_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let warm = || {
        let mut warm = command(&["warm", "--problem", "b=1,h=2,s=64,d=64", "--json"]);
        warm.env("FLASHCORE_CACHE", folder.path());
        warm
    };
    if cuda::DeviceInfo::query(0).is_err() {
        let message = failure(1, warm());
        assert!(message.starts_with("there is no GPU to compile for: "), "{message}");
        return;
    }
    for cached in [false, true] {
        let answer: Value = serde_json::from_str(&success(warm())).unwrap();
        assert_eq!(answer["kernels"][0]["cached"], cached);
    }
}
