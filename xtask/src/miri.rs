//! Runs Miri over the tests that it can run. Miri interprets a program and finds undefined
//! behaviour, a hundred times slower than the program itself; it supports neither the driver nor
//! vector instructions.

use crate::Outcome;
use crate::process::{program, run_captured, run_in_terminal};

/// Crates, their tests, and extra Miri flags: crates whose code, or whose dependencies' code, reads
/// memory as another type than it was written as. The simulator and the language forbid `unsafe`.
const TESTS: [(&str, &[&str], &[&str]); 3] = [
    // rayon's threads outlive the tests.
    ("flashcore", &["tensor::", "serving::", "file::"], &["ignore-leaks"]),
    ("flashcore-cuda", &["cache::", "launch::", "memory::", "module::", "tensor_map::"], &[]),
    ("flashcore-python", &["dlpack::", "cpu::"], &[]),
];

/// Runs them with the nightly toolchain, which must be there with Miri.
pub(crate) fn miri() -> Outcome {
    let nightly = |arguments: &[&str], further: &[&str]| {
        let mut command = program("cargo");
        command.args(["+nightly", "miri"]).args(arguments);
        // Tests of files need the file system, rayon's queues need tree borrows, and DLPack passes
        // addresses as integers.
        let flags = ["disable-isolation", "tree-borrows", "permissive-provenance"];
        let flags: Vec<_> = flags.iter().chain(further).map(|it| format!("-Zmiri-{it}")).collect();
        command.env("MIRIFLAGS", flags.join(" "));
        // Each of 256 random cases takes a second.
        command.env("PROPTEST_CASES", "16");
        // The toolchain that runs this task is another one.
        for variable in ["CARGO", "RUSTUP_TOOLCHAIN", "RUSTC", "RUSTDOC"] {
            command.env_remove(variable);
        }
        command
    };
    if !run_captured(nightly(&["--version"], &[])).is_ok_and(|done| done.success) {
        let fetch = "rustup toolchain install nightly --component miri,rust-src";
        return Err(format!("there is no Miri: `{fetch}` brings it"));
    }
    let mut passed = true;
    for (package, filters, further) in TESTS {
        let mut command = nightly(&["test", "--package", package, "--lib", "--"], further);
        command.args(filters);
        passed &= run_in_terminal(command)?;
    }
    Ok(passed)
}
