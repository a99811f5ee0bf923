//! Running other programs and keeping their output for when it is needed.

use std::ffi::OsString;
use std::io::Read;
use std::process::{Command, Stdio};

use crate::{root, target};

/// The exit status and output of a program.
pub(crate) struct CommandOutput {
    pub(crate) success: bool,
    /// Standard output alone.
    pub(crate) stdout: String,
    /// Both streams in the order they were written.
    pub(crate) log: String,
}

/// A program to run from the repository's root.
pub(crate) fn program(name: impl Into<OsString>) -> Command {
    let mut command = Command::new(name.into());
    command.current_dir(root()).stdin(Stdio::null());
    command
}

/// The cargo that runs this task.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = program(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments);
    if !is_edited() {
        let unneeded = ["CARGO_INCREMENTAL", "CARGO_PROFILE_DEV_DEBUG", "CARGO_PROFILE_TEST_DEBUG"];
        command.envs(unneeded.map(|name| (name, "0")));
    }
    command
}

/// Returns whether this checkout is being edited, and so built by hand too. On a fresh clone
/// nothing is done to speed up a second build or to support a debugger.
fn is_edited() -> bool {
    let built = std::fs::read_dir(target().join("debug/incremental"));
    let names = built.into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.into_iter().any(|name| name.to_string_lossy().starts_with("flashcore"))
}

/// Runs to the end, keeping both streams together.
pub(crate) fn run_captured(mut command: Command) -> Result<CommandOutput, String> {
    let unstarted = |error| format!("cannot start {}: {error}", words(&command));
    let (mut reader, writer) = std::io::pipe().map_err(unstarted)?;
    let copy = writer.try_clone().map_err(unstarted)?;
    command.stdout(writer).stderr(copy);
    let child = command.spawn();
    let mut child = child.map_err(|error| format!("cannot start {}: {error}", words(&command)))?;
    // The command still holds the pipe's writing end, and reading ends when nobody does.
    drop(command);
    let mut bytes = Vec::new();
    let read = reader.read_to_end(&mut bytes);
    let status = child.wait().map_err(|error| error.to_string())?;
    read.map_err(|error| error.to_string())?;
    let log = String::from_utf8_lossy(&bytes).into_owned();
    Ok(CommandOutput { success: status.success(), stdout: String::new(), log })
}

/// Runs to the end, and prints its output if that is wanted; an error if it fails.
pub(crate) fn run(command: Command, verbose: bool) -> Result<CommandOutput, String> {
    let words = words(&command);
    let done = run_captured(command)?;
    if verbose {
        print!("{}", done.log);
    }
    if done.success { Ok(done) } else { Err(format!("{words}\n{}", done.log)) }
}

/// Runs to the end, keeping standard output apart.
pub(crate) fn run_separate_streams(mut command: Command) -> Result<CommandOutput, String> {
    let output = command.output();
    let output = output.map_err(|error| format!("cannot start {}: {error}", words(&command)))?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let log = String::from_utf8_lossy(&output.stderr).into_owned() + &stdout;
    Ok(CommandOutput { success: output.status.success(), stdout, log })
}

/// Runs to the end with the terminal as its own.
pub(crate) fn run_in_terminal(mut command: Command) -> Result<bool, String> {
    let status = command.status();
    let status = status.map_err(|error| format!("cannot start {}: {error}", words(&command)))?;
    Ok(status.success())
}

/// The command as one would type it.
pub(crate) fn words(command: &Command) -> String {
    let program = std::path::Path::new(command.get_program());
    let program = program.file_name().unwrap_or(program.as_os_str());
    let words = std::iter::once(program).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_program_keeps_its_words() {
        let mut command = program("sh");
        command.args(["-c", "echo one; echo two >&2; exit 3"]);
        assert_eq!(words(&command), "sh -c echo one; echo two >&2; exit 3");
        let done = run_captured(command).unwrap();
        assert!(!done.success);
        assert_eq!(done.log, "one\ntwo\n");
    }

    #[test]
    fn a_missing_program_is_an_error() {
        assert!(
            run_captured(program("/nowhere/tool"))
                .is_err_and(|error| error.contains("cannot start tool"))
        );
    }
}
