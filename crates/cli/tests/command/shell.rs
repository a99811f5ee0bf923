//! Completions, manual pages and colours.

use crate::{command, fail, succeed, success};

#[test]
fn every_shell_is_completed() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = succeed(&["completions", shell]);
        for word in ["flashcore", "attend", "kv-heads", "soak"] {
            assert!(script.contains(word), "{shell}: no `{word}`");
        }
    }
    assert!(fail(2, &["completions", "cmd"]).contains("possible values: bash"));
}

#[test]
fn every_command_has_a_page() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("man1");
    assert!(succeed(&["man", place.to_str().unwrap()]).contains("flashcore.1"));
    for name in ["flashcore", "flashcore-attend", "flashcore-bench-compare", "flashcore-soak"] {
        let page = std::fs::read_to_string(place.join(format!("{name}.1"))).unwrap();
        assert!(page.contains(".TH") && page.contains(".SH SYNOPSIS"), "{page}");
    }
    std::fs::write(folder.path().join("file"), "").unwrap();
    let file = folder.path().join("file");
    let message = fail(1, &["man", file.to_str().unwrap()]);
    assert!(message.starts_with("cannot write to "), "{message}");
}

#[test]
fn colours_are_as_asked() {
    let attend = ["attend", "--seq", "9", "--backend", "cpu", "--color"];
    assert!(succeed(&[&attend[..], &["always"]].concat()).contains("\u{1b}[1m"));
    for when in ["auto", "never"] {
        assert!(!succeed(&[&attend[..], &[when]].concat()).contains('\u{1b}'));
    }
    // The option counts more than the environment.
    let mut always = command(&[&attend[..], &["always"]].concat());
    always.env("NO_COLOR", "1");
    assert!(success(always).contains('\u{1b}'));
    assert!(succeed(&["--color=always", "--help"]).contains('\u{1b}'));
    let output = command(&["--color", "always", "attend", "--nonsense"]).output().unwrap();
    assert!(String::from_utf8(output.stderr).unwrap().contains("\u{1b}["));
    assert!(fail(2, &["--color", "sometimes", "doctor"]).contains("auto, always, never"));
}
