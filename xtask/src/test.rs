//! Every check of the project, with a summary at the end.
//!
//! A failed check never hides the next one. Without a GPU there are two lanes, each with about half
//! of the work: in one the workspace is built and tested, and what was built is tried; in the other
//! the Python package is built, with its own profile, and tested, and then come checks that build
//! little. With a GPU the checks run one after the other, since some of them measure.
//!
//! From a clean clone this must end within twenty minutes on two cores, most of which the compiler
//! takes: nothing is built twice in different ways. Dependencies are checked once, with one set of
//! features, for clippy and the docs; the command line under test is the one that the tests built;
//! and only the wheel is a release build.

use std::ffi::OsString;
use std::fs;
use std::panic;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Instant;

use crate::process::{self, cargo, program, run};
use crate::table::table;
use crate::{Outcome, outside, python, root, target, tools, virtual_gpu};

/// The result of a check: a few words about what passed, or everything about what did not.
pub(crate) type Finding = Result<String, String>;

struct Check {
    name: &'static str,
    run: fn(verbose: bool) -> Finding,
    /// Left out of `--quick`.
    slow: bool,
}

/// The result of a check that was run.
#[derive(Clone)]
struct Checked {
    name: &'static str,
    finding: Finding,
    seconds: f64,
}

/// The lane in which the workspace is built. What is built here is tried after the tests.
const WORKSPACE: [Check; 7] = [
    Check { name: "format", run: format, slow: false },
    Check { name: "clippy", run: clippy, slow: false },
    Check { name: "tools", run: |_| tools::tools(), slow: false },
    Check { name: "tests", run: tests, slow: false },
    Check { name: "attend", run: attend, slow: true },
    Check { name: "check", run: check, slow: true },
    Check { name: "virtual", run: virtual_gpu::check, slow: true },
];

/// The other lane. The Python package comes first: it is what takes long.
const OTHERS: [Check; 8] = [
    Check { name: "python", run: python::test, slow: true },
    Check { name: "gpu tests", run: python::test_on_virtual_gpu, slow: true },
    Check { name: "ruff", run: python::lint, slow: true },
    Check { name: "cpu only", run: cpu_only, slow: true },
    Check { name: "examples", run: examples, slow: true },
    Check { name: "package", run: package, slow: true },
    Check { name: "docs", run: docs, slow: true },
    Check { name: "outside", run: |_| outside::outside().map(|()| String::new()), slow: true },
];

/// Runs the checks; true when all passed.
pub(crate) fn test(flags: &[&str]) -> Outcome {
    let (mut quick, mut verbose) = (false, false);
    for flag in flags {
        match *flag {
            "--quick" => quick = true,
            "--verbose" => verbose = true,
            _ => return Err(format!("test knows --quick and --verbose, not {flag}")),
        }
    }
    let begin = Instant::now();
    let run = |lane: &[Check]| -> Vec<Checked> {
        let checks = lane.iter().filter(|check| !(quick && check.slow));
        checks.map(|check| check.run(verbose)).collect()
    };
    let done = if Path::new("/dev/nvidiactl").exists() {
        [run(&WORKSPACE), run(&OTHERS)]
    } else {
        thread::scope(|scope| {
            let others = scope.spawn(|| run(&OTHERS));
            let done = run(&WORKSPACE);
            // A panic in a check is passed on, not taken for success.
            [done, others.join().unwrap_or_else(|it| panic::resume_unwind(it))]
        })
    };
    let done = done.concat();
    let failed = done.iter().filter(|it| it.finding.is_err()).count();
    let rows: Vec<Vec<String>> = done.iter().map(Checked::row).collect();
    println!("\n{}", table(&["check", "verdict", "seconds", ""], &rows));
    println!("{:.0} s in all", begin.elapsed().as_secs_f64());
    println!("{} passed, {failed} failed", rows.len() - failed);
    Ok(failed == 0)
}

impl Check {
    /// Runs it, and says how it went.
    fn run(&self, verbose: bool) -> Checked {
        if verbose {
            println!("{}", self.name);
        }
        let begin = Instant::now();
        let (name, finding) = (self.name, (self.run)(verbose));
        let seconds = begin.elapsed().as_secs_f64();
        match &finding {
            Ok(_) => println!("{name:<9}passed in {seconds:.1} s"),
            Err(log) => println!("{name:<9}FAILED in {seconds:.1} s\n\n{}\n", log.trim_end()),
        }
        Checked { name, finding, seconds }
    }
}

impl Checked {
    fn row(&self) -> Vec<String> {
        let (verdict, detail) = match &self.finding {
            Ok(detail) => ("passed", detail.as_str()),
            Err(_) => ("FAILED", ""),
        };
        vec![self.name.into(), verdict.into(), format!("{:.1}", self.seconds), detail.into()]
    }
}

fn format(verbose: bool) -> Finding {
    component("fmt", "rustfmt")?;
    run(cargo(&["fmt", "--all", "--check"]), verbose)?;
    Ok(String::new())
}

/// Runs clippy with the CUDA feature of `crates/candle`. The tests build everything without it, and
/// deny warnings too.
fn clippy(verbose: bool) -> Finding {
    component("clippy", "clippy")?;
    let mut command =
        with_candle_cuda("flashcore-candle/cuda", &["clippy", "--workspace", "--all-targets"]);
    command.args(["--", "--deny", "warnings"]);
    run(command, verbose)?;
    Ok("candle's CUDA checked, not built".to_owned())
}

/// Returns a cargo command with a feature that enables candle's `cuda`, which builds kernels with
/// NVIDIA's compiler: here a stand-in that compiles nothing takes its place.
fn with_candle_cuda(feature: &str, arguments: &[&str]) -> Command {
    let mut path = OsString::from(root().join("xtask/pretend/bin"));
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    let mut command = cargo(arguments);
    command.args(["--features", feature]);
    command.env("PATH", path).env_remove("NVCC").env("CUDA_COMPUTE_CAP", "90");
    // What is wrong is not lost among the names of hundreds of crates.
    command.env("CARGO_TERM_QUIET", "true");
    command
}

/// The library without its feature `cuda` builds, and nothing of the driver with it.
fn cpu_only(verbose: bool) -> Finding {
    let library = ["--package", "flashcore", "--no-default-features"];
    let mut command = cargo(&["clippy"]);
    command.args(library).args(["--", "--deny", "warnings"]);
    run(command, verbose)?;
    let mut tree = cargo(&["tree", "--edges", "normal,build", "--prefix", "none"]);
    tree.args(library);
    let done = run(tree, verbose)?;
    match done.log.lines().find(|line| line.contains("cudarc") || line.contains("flashcore-cuda")) {
        Some(line) => Err(format!("flashcore without default features depends on {line}")),
        None => Ok(String::new()),
    }
}

/// The workspace of the Rust examples, and with it the crate that stands in for candle's
/// `candle-flash-attn`. The one in Python is among the Python tests.
fn examples(verbose: bool) -> Finding {
    let (manifest, lock) = (root().join("examples/Cargo.toml"), root().join("examples/Cargo.lock"));
    let mut formatted = cargo(&["fmt", "--check", "--package", "llama", "--package", "ring"]);
    formatted.arg("--manifest-path").arg(&manifest);
    run(formatted, verbose)?;
    if !lock.exists() {
        // The versions that the workspace has, so that what was fetched and checked is shared.
        let copied = fs::copy(root().join("Cargo.lock"), &lock);
        copied.map_err(|error| format!("{}: {error}", lock.display()))?;
    }
    // One after the other: candle links to the driver, and the ring asks first whether there is one.
    let llama = with_candle_cuda("cuda", &["clippy", "--package", "llama"]);
    for mut command in [llama, cargo(&["clippy", "--package", "ring"])] {
        command.arg("--manifest-path").arg(&manifest).args(["--", "--deny", "warnings"]);
        // In their own profile the same crates would be others.
        command.env("CARGO_TARGET_DIR", target()).env("CARGO_PROFILE_DEV_OPT_LEVEL", "0");
        run(command, verbose)?;
    }
    Ok("checked, not run".to_owned())
}

/// Every crate can be packed for the registry, with all that it declares. `cargo publish --dry-run
/// --workspace` builds the packages too, before a release.
fn package(verbose: bool) -> Finding {
    let mut command = cargo(&["package", "--workspace", "--no-verify", "--allow-dirty"]);
    command.args(["--offline", "--exclude", "flashcore-python", "--exclude", "xtask"]);
    run(command, verbose)?;
    Ok("packed, not built".to_owned())
}

fn docs(verbose: bool) -> Finding {
    let mut command =
        with_candle_cuda("flashcore-candle/cuda", &["doc", "--workspace", "--no-deps"]);
    command.env("RUSTDOCFLAGS", "--deny warnings");
    run(command, verbose)?;
    Ok(String::new())
}

fn tests(verbose: bool) -> Finding {
    let mut command = cargo(&["test", "--workspace", "--no-fail-fast"]);
    tools::require(&mut command);
    // A snapshot that differs is a failure here; `cargo xtask bless` accepts it.
    command.env("INSTA_UPDATE", "no");
    let done = run(command, verbose)?;
    match done.log.lines().find(|line| is_summary_of_warnings(line)) {
        Some(line) => Err(format!("{line}\n\n{}", done.log)),
        None => Ok(Counts::of(&done.log).to_string()),
    }
}

/// Whether cargo says there that a crate was built with warnings; it says so again when nothing is built.
fn is_summary_of_warnings(line: &str) -> bool {
    line.starts_with("warning: `") && line.contains(" generated ")
}

/// The README's first command.
fn attend(verbose: bool) -> Finding {
    let answer = flashcore(&["attend", "--json"], verbose)?;
    let answer = answer.trim();
    if answer.starts_with('{') && answer.ends_with('}') {
        Ok(String::new())
    } else {
        Err(format!("`attend --json` should print one JSON object and printed:\n{answer}"))
    }
}

/// Every kernel that this machine can run, against the reference.
fn check(verbose: bool) -> Finding {
    flashcore(&["check"], verbose)?;
    Ok(String::new())
}

/// Runs the command line as the tests built it, and gives what it printed.
fn flashcore(arguments: &[&str], verbose: bool) -> Finding {
    let mut command = program(target().join("debug/flashcore"));
    command.args(arguments);
    let words = process::words(&command);
    let done = process::run_separate_streams(command)?;
    if verbose {
        print!("{}", done.log);
    }
    if done.success { Ok(done.stdout) } else { Err(format!("{words}\n{}", done.log)) }
}

/// Installs a part of the Rust toolchain that minimal installations lack.
fn component(subcommand: &str, name: &str) -> Result<(), String> {
    if process::run_captured(cargo(&[subcommand, "--version"])).is_ok_and(|done| done.success) {
        return Ok(());
    }
    let mut rustup = program("rustup");
    rustup.args(["component", "add", name]);
    run(rustup, false).map(|_| ())
}

/// How many tests ran, over all of a `cargo test`.
#[derive(Debug, Default, PartialEq)]
struct Counts {
    passed: usize,
    ignored: usize,
}

impl Counts {
    /// Adds up the lines `test result: ok. 3 passed; 0 failed; 1 ignored; ...`.
    fn of(log: &str) -> Counts {
        let mut counts = Counts::default();
        for result in log.lines().filter_map(|line| line.strip_prefix("test result: ")) {
            let words: Vec<&str> = result.split([' ', ';']).collect();
            for pair in words.windows(2) {
                match (pair[0].parse::<usize>(), pair[1]) {
                    (Ok(count), "passed") => counts.passed += count,
                    (Ok(count), "ignored") => counts.ignored += count,
                    _ => {}
                }
            }
        }
        counts
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} tests", self.passed)?;
        if self.ignored > 0 { write!(f, ", {} ignored", self.ignored) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_results_add_up() {
        let log = "\
running 2 tests
test a ... ok
test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s

   Doc-tests flashcore
test result: ok. 1 passed; 0 failed; 3 ignored; 0 measured; 0 filtered out; finished in 0.40s
";
        let counts = Counts::of(log);
        assert_eq!(counts, Counts { passed: 3, ignored: 3 });
        assert_eq!(counts.to_string(), "3 tests, 3 ignored");
        assert_eq!(Counts::of("").to_string(), "0 tests");
    }

    #[test]
    fn warnings_are_found() {
        let line =
            "warning: `flashcore-candle` (lib) generated 1 warning (run `cargo fix` to apply it)";
        assert!(is_summary_of_warnings(line));
        assert!(!is_summary_of_warnings("warning: unused variable: `a`"));
    }
}
