//! Miri over what it can run: it interprets the program and finds undefined behaviour, a hundred times
//! slower than the program runs, and knows no driver and no vector instructions.

use crate::Outcome;
use crate::process::{keep, program, show};

/// Crates, and which of their tests.
const TESTS: [(&str, &[&str]); 3] = [
    ("flashcore", &["tensor::", "serving::", "file::"]),
    ("flashcore-cuda", &["cache::", "launch::", "compiler::"]),
    ("flashcore-sim", &["memory::", "float::"]),
];

/// Runs them with the nightly toolchain, which must be there with Miri.
pub(crate) fn miri() -> Outcome {
    let nightly = |arguments: &[&str]| {
        let mut command = program("cargo");
        command.args(["+nightly", "miri"]).args(arguments);
        // Tests of files need the file system; numbers of pointers are the driver's and DLPack's.
        command.env("MIRIFLAGS", "-Zmiri-disable-isolation -Zmiri-permissive-provenance");
        // The one that runs this chore is another.
        for variable in ["CARGO", "RUSTUP_TOOLCHAIN", "RUSTC", "RUSTDOC"] {
            command.env_remove(variable);
        }
        command
    };
    if !keep(nightly(&["--version"])).is_ok_and(|done| done.success) {
        let fetch = "rustup toolchain install nightly --component miri,rust-src";
        return Err(format!("there is no Miri: `{fetch}` brings it"));
    }
    let mut passed = true;
    for (package, filters) in TESTS {
        let mut command = nightly(&["test", "--package", package, "--lib", "--"]);
        command.args(filters);
        passed &= show(command)?;
    }
    Ok(passed)
}
