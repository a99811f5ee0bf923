//! `flashcore doctor`.

use serde_json::Value;

use crate::{command, json, succeed, success};

#[test]
fn doctor_explains() {
    let answer = json(&["doctor", "--json"]);
    assert!(answer["cpu"]["threads"].as_u64().unwrap() > 0);
    for plan in answer["plans"].as_array().unwrap() {
        assert_eq!(plan["chosen"]["accepted"], true);
    }
    let text = succeed(&["doctor"]);
    for word in ["gpu", "cache", "ptxas", "nvdisasm", "what would run"] {
        assert!(text.contains(word), "no `{word}` in\n{text}");
    }
}

#[test]
fn a_gpu_is_described_or_its_absence_explained() {
    let answer = json(&["doctor", "--json"]);
    let devices = answer["gpu"]["devices"].as_array().unwrap();
    for device in devices {
        assert!(device["multiprocessors"].as_u64().unwrap() > 0, "{device}");
        assert!(device["target"].as_str().unwrap().starts_with("sm_"), "{device}");
    }
    if devices.is_empty() {
        let reason = answer["gpu"]["missing"].as_str().unwrap();
        assert!(!reason.is_empty());
        let text = succeed(&["doctor"]);
        // Long lines are broken between words.
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains(&format!("gpu none: {reason}")), "{text}");
    }
}

#[test]
fn the_cache_is_tried_and_left_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let mut doctor = command(&["doctor", "--json"]);
    doctor.env("FLASHCORE_CACHE", folder.path());
    let answer: Value = serde_json::from_str(&success(doctor)).unwrap();
    assert_eq!(answer["cache"]["directory"], folder.path().to_str().unwrap());
    assert_eq!(answer["cache"]["writable"], true);
    assert_eq!(answer["cache"]["files"], 0);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
#[cfg(target_os = "linux")]
fn a_cache_that_cannot_be_written_is_said_and_no_failure() {
    // Not even root can make a directory there.
    let mut doctor = command(&["doctor"]);
    doctor.env("FLASHCORE_CACHE", "/proc/x");
    let text = success(doctor);
    assert!(text.contains("/proc/x, not writable"), "{text}");
    assert!(text.contains("cannot be kept in /proc/x: "), "{text}");
}

/// It is found, but does not tell its version: an empty folder of tools would say the same otherwise.
#[test]
#[cfg(unix)]
fn an_assembler_that_cannot_be_used_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let ptxas = folder.path().join("ptxas");
    std::os::unix::fs::symlink("/bin/false", &ptxas).unwrap();
    let mut doctor = command(&["doctor", "--json"]);
    doctor.env("FLASHCORE_TOOLS", folder.path());
    let answer: Value = serde_json::from_str(&success(doctor)).unwrap();
    let path = ptxas.to_str().unwrap();
    let tools = answer["toolkit"].as_array().unwrap();
    let found = tools.iter().find(|it| it["path"] == path).unwrap();
    let reason = found["missing"].as_str().unwrap();
    assert!(reason.starts_with(&format!("{path} failed: ")), "{reason}");
}

#[test]
fn the_pass_of_a_kernel_that_is_insisted_on_is_said() {
    for (kernel, said) in [
        ("mma", "mma, in the forward pass alone"),
        ("backward-mma", "backward-mma, for gradients alone"),
        ("nothing", "nothing"),
    ] {
        let mut doctor = command(&["doctor", "--json"]);
        doctor.env("FLASHCORE_KERNEL", kernel);
        let answer: Value = serde_json::from_str(&success(doctor)).unwrap();
        assert_eq!(answer["insisted"], said);
    }
}

#[test]
fn a_cache_that_is_off_is_said() {
    let mut doctor = command(&["doctor"]);
    doctor.env("FLASHCORE_CACHE", "off");
    let text = success(doctor);
    let line = text.lines().find(|line| line.starts_with("cache ")).unwrap();
    assert!(line.contains("off"), "{line}");
}
