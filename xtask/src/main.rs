//! The project's maintenance tasks, called as `cargo xtask <task>`.
//!
//! Uses the standard library only, and none of the crates it maintains: a task has to start at once
//! on a fresh machine, and to run while one of those crates does not build.

mod assemble;
mod bless;
mod book;
mod hub;
mod miri;
mod outside;
mod process;
mod python;
mod release;
mod sanitize;
#[cfg(test)]
mod support;
mod table;
mod test;
#[allow(dead_code, unreachable_pub)] // Written for the crate it lives in; used here in part.
#[path = "../../crates/cuda/src/toolkit/mod.rs"]
mod toolkit;
mod tools;
mod virtual_gpu;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

const HELP: &str = "\
Usage: cargo xtask <task>

Tasks:
  test [--quick] [--verbose]  every check; --quick leaves out the docs and the Python package,
                              --verbose shows the output of checks that pass too
  tools                       fetch NVIDIA's assembler and disassembler into .tools/
  assemble <files|folders>    assemble .ptx files with both pinned ptxas and show the cost
  wheel [--target TRIPLE]     build the Python wheel into dist/, for this machine or another kind
  sdist                       build Python's source distribution into dist/
  hub [WHEEL]                 lay the package out for Hugging Face's hub, in dist/hub/
  sbom                        write what is inside the binaries into dist/, as CycloneDX
  book                        render the pages of docs/ into target/book/, with mdbook
  miri                        what Miri can run, under it; wants the nightly toolchain
  sanitize                    Python's tests of memory, with an extension that AddressSanitizer watches
  virtual-gpu                 build the driver's library whose GPU is the simulator
  notes [VERSION]             print what the changelog says of a version, or of what is to come
  bless                       run the tests and accept what they print as the new snapshots
";

/// The result of a task: whether everything passed, or why it could not run.
type Outcome = Result<bool, String>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        ["test", ref flags @ ..] => test::test(flags),
        ["tools"] => tools::tools().map(|report| {
            println!("{report}");
            true
        }),
        ["assemble", ref paths @ ..] => assemble::assemble(paths),
        ["wheel"] => python::wheel(None),
        ["wheel", "--target", target] => python::wheel(Some(target)),
        ["sdist"] => python::source(),
        ["hub"] => hub::hub(None),
        ["hub", wheel] => hub::hub(Some(wheel)),
        ["sbom"] => release::bill_of_materials(),
        ["book"] => book::book(),
        ["miri"] => miri::miri(),
        ["sanitize"] => sanitize::sanitize(),
        ["virtual-gpu"] => virtual_gpu::build(),
        ["notes"] => release::notes(None),
        ["notes", version] => release::notes(Some(version)),
        ["bless"] => bless::bless(),
        [] | ["help" | "--help" | "-h"] => {
            print!("{HELP}");
            Ok(true)
        }
        _ => Err(format!("no such task: {}\n\n{HELP}", arguments.join(" "))),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("error: {}", message.trim_end());
            ExitCode::FAILURE
        }
    }
}

/// The root of the repository.
fn root() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package).to_owned()
}

/// Where cargo builds.
fn target() -> PathBuf {
    root().join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}
