//! Miri over what it can run: it interprets the program and finds undefined behaviour, a hundred times
//! slower than the program runs, and knows no driver and no vector instructions.

use crate::Outcome;
use crate::process::{keep, program, show};

/// Crates, which of their tests, and what Miri is asked beyond what it is asked of all: those whose code,
/// or whose dependencies' code, reads memory as something else than it was written as. The simulator and
/// the language forbid `unsafe`.
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
        // Tests of files need the file system, rayon's queues the newer rules of borrowing, and DLPack
        // passes addresses as numbers.
        let flags = ["disable-isolation", "tree-borrows", "permissive-provenance"];
        let flags: Vec<_> = flags.iter().chain(further).map(|it| format!("-Zmiri-{it}")).collect();
        command.env("MIRIFLAGS", flags.join(" "));
        // Each of 256 random cases takes a second.
        command.env("PROPTEST_CASES", "16");
        // The one that runs this chore is another.
        for variable in ["CARGO", "RUSTUP_TOOLCHAIN", "RUSTC", "RUSTDOC"] {
            command.env_remove(variable);
        }
        command
    };
    if !keep(nightly(&["--version"], &[])).is_ok_and(|done| done.success) {
        let fetch = "rustup toolchain install nightly --component miri,rust-src";
        return Err(format!("there is no Miri: `{fetch}` brings it"));
    }
    let mut passed = true;
    for (package, filters, further) in TESTS {
        let mut command = nightly(&["test", "--package", package, "--lib", "--"], further);
        command.args(filters);
        passed &= show(command)?;
    }
    Ok(passed)
}
