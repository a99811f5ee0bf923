//! `flashcore warm`.

use cuda::toolkit::Toolkit;
use serde_json::Value;

use crate::{command, fail, failure, success};

#[test]
fn something_must_be_named() {
    assert!(fail(2, &["warm"]).contains("--all"));
    assert!(fail(2, &["warm", "--problem", "x=1"]).contains("there is no size `x`"));
    assert!(fail(2, &["warm", "--problem", "d=64", "--all"]).contains("cannot be used with"));
    // A kernel or a back end is chosen for a problem.
    for option in [["--kernel", "mma"], ["--backend", "gpu"]] {
        let message = fail(2, &[&["warm", "--all"], &option[..]].concat());
        assert!(message.contains("cannot be used with"), "{message}");
    }
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
        assert!(message.contains("--chip sm_90a"), "{message}");
        return;
    }
    for cached in [false, true] {
        let answer: Value = serde_json::from_str(&success(warm())).unwrap();
        assert_eq!(answer["kernels"][0]["cached"], cached);
    }
}

/// Without the driver's name kernels are assembled and told to be lost; with it they are kept.
#[test]
fn kernels_are_compiled_for_a_gpu_that_is_not_here() {
    if Toolkit::for_tests().is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let warm = |arguments: &[&str]| {
        let fixed = ["warm", "--chip", "sm_80", "--problem", "b=1,h=2,s=64,d=64"];
        let mut warm = command(&[&fixed[..], arguments].concat());
        warm.env("FLASHCORE_CACHE", folder.path());
        warm
    };
    let text = success(warm(&[]));
    assert!(text.contains("not kept") && text.contains("--driver"), "{text}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    for cached in [false, true] {
        let answer = success(warm(&["--driver", "13.9/999.1", "--json"]));
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["kernels"][0]["cached"], cached, "{answer}");
        assert_eq!(answer["cache"], folder.path().to_str().unwrap());
    }
    assert!(std::fs::read_dir(folder.path()).unwrap().count() > 0);
    // A folder of the cache that is a file.
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut unkept = warm(&["--driver", "13.9/999.1"]);
    let output = unkept.env("FLASHCORE_CACHE", file.path()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("not kept") && text.contains("0 kernels in "), "{text}");
    let message = failure(1, warm(&["--driver", "1.0/1"]));
    assert!(message.contains("is newer than the driver's CUDA 1.0"), "{message}");
    assert!(failure(2, warm(&["--driver", "new"])).contains("flashcore doctor"));
    assert!(fail(2, &["warm", "--all", "--driver", "12.8"]).contains("--chip"));
    assert!(fail(2, &["warm", "--all", "--chip", "sm_1"]).contains("known are sm_75"));
}
