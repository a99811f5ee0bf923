//! Accepting what the tests print as the new snapshots.

use crate::process::{cargo, run_in_terminal};
use crate::{Outcome, tools};

/// Runs every test with snapshots overwritten; `git diff` then shows what changed.
pub(crate) fn bless() -> Outcome {
    tools::tools()?;
    let mut command = cargo(&["test", "--workspace", "--no-fail-fast"]);
    command.env("INSTA_UPDATE", "always");
    tools::require(&mut command);
    let passed = run_in_terminal(command)?;
    println!("\nSnapshots are written; read them with `git diff` before you commit.");
    Ok(passed)
}
