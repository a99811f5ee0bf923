//! The command as users meet it: exit codes, one-line errors, JSON that parses. A file per
//! subcommand; here is what they share.

mod attend;
mod bench;
mod check;
mod docs;
mod doctor;
mod gate;
mod inspect;
mod mutate;
mod profile;
mod scale;
mod shell;
mod sim;
mod soak;
mod tune;
mod warm;

use std::process::{Command, Stdio};

use serde_json::Value;

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
    command.args(arguments);
    command
}

/// The output of a run that must succeed.
fn succeed(arguments: &[&str]) -> String {
    success(command(arguments))
}

fn success(mut command: Command) -> String {
    let output = command.output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{command:?}: {stderr}");
    assert_eq!(stderr, "", "{command:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The error of a run that must fail with this exit code: one line, and nothing else.
fn fail(code: i32, arguments: &[&str]) -> String {
    failure(code, command(arguments))
}

fn failure(code: i32, mut command: Command) -> String {
    let output = command.output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{command:?}: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert_eq!(output.stdout, b"", "{command:?}");
    let message = stderr.trim_end().strip_prefix("error: ");
    message.unwrap_or_else(|| panic!("{stderr}")).to_owned()
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&succeed(arguments)).unwrap()
}

#[test]
fn mistakes_in_the_command_are_one_line_and_exit_code_2() {
    assert!(fail(2, &["attend", "--dtype", "f64"]).contains("`f64` is no supported element type"));
    assert!(fail(2, &["attend", "--batch", "many"]).contains("'many'"));
    assert!(fail(2, &["attend", "--backend", "tpu"]).contains("possible values: auto, cpu, gpu"));
    assert!(fail(2, &["attend", "--input", "x", "--seq", "3"]).contains("cannot be used with"));
    assert!(fail(2, &["attend", "--unheard-of"]).contains("--unheard-of"));
    assert!(fail(2, &["unheard-of"]).contains("unheard-of"));
    // How to pass a negative number as a kernel's name is no help.
    assert_eq!(fail(2, &["gate", "single", "--at-least", "-1"]), "unexpected argument '-1' found");
}

#[test]
fn help_and_version_succeed() {
    assert!(succeed(&["--help"]).contains("attend"));
    assert!(succeed(&["attend", "--help"]).contains("--kv-heads"));
    assert!(succeed(&["--version"]).starts_with("flashcore "));
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut child = command(&["attend", "--seq", "16", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
}
