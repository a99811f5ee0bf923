//! The Python package: its wheel, and its tests.
//!
//! ```text
//! .tools/python/    a virtual environment with what builds, checks and tests it
//! .tools/hub/       the package as Hugging Face's hub has it, for its tests
//! dist/             the wheels and the source distribution for others
//! ```

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::{program, run, run_captured, run_in_terminal};
use crate::{Outcome, hub, root, tools, virtual_gpu};

/// Builds wheels.
const BUILD: [&str; 1] = ["maturin==1.16.0"];

/// Links against an old C library, so that a wheel runs on systems that are older than this one.
const LINKER: [&str; 1] = ["ziglang==0.17.0"];

/// Checks and tests the package.
const TEST: [&str; 5] =
    ["ml_dtypes==0.6.0", "mypy==2.4.1", "numpy==2.4.6", "pytest==9.2.0", "ruff==0.17.5"];

/// The libraries whose tensors it takes, and those that call it: gigabytes, fetched once. PyTorch and
/// transformers are the releases that the GPU tests run with.
const LIBRARIES: [&str; 5] = [
    "jax==0.10.2",
    "kernels==0.17.2",
    // Asked by transformers for the memory of a CPU.
    "psutil==7.2.2",
    "torch==2.11.0",
    "transformers==5.17.0",
];

/// The oldest systems that the wheel is for: glibc 2.17, the first that Rust's library takes.
const COMPATIBILITY: &str = "manylinux2014";

/// The largest wheel that we promise.
const LARGEST: u64 = 4 << 20;

/// Builds the release wheel, for this machine or for another Rust target.
pub(crate) fn wheel(target: Option<&str>) -> Outcome {
    Ok(release(&build_environment()?, target)?.is_some())
}

/// The Python that builds release wheels.
pub(crate) fn build_environment() -> Result<PathBuf, String> {
    environment(&[&BUILD[..], &LINKER[..]].concat())
}

/// Builds the release wheel; returns its path.
pub(crate) fn release(python: &Path, target: Option<&str>) -> Result<Option<PathBuf>, String> {
    if let Some(target) = target {
        let mut rustup = program("rustup");
        rustup.args(["target", "add", target]);
        if !run_in_terminal(rustup)? {
            return Ok(None);
        }
    }
    let mut command = maturin(python, "build");
    command.args(["--quiet", "--release", "--strip", "--zig", "--compatibility", COMPATIBILITY]);
    // Link-time optimisation for releases only: a call takes 3 % fewer instructions, and the library is
    // 6 % smaller. Without it crates are built in parallel, so tests and users' own builds are faster.
    command
        .envs([("CARGO_PROFILE_RELEASE_LTO", "fat"), ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")]);
    command.args(target.map(|target| ["--target", target]).into_iter().flatten());
    let Some(wheel) = deliver(command, "whl")? else { return Ok(None) };
    let bytes = size(&wheel)?;
    println!("{}: {:.2} MB", wheel.display(), bytes as f64 / 1e6);
    if bytes > LARGEST {
        return Err(format!("the wheel is larger than {} MB", LARGEST >> 20));
    }
    Ok(Some(wheel))
}

/// Builds the source distribution: what pip builds a wheel from where there is none.
pub(crate) fn source() -> Outcome {
    let python = environment(&BUILD)?;
    let Some(archive) = deliver(maturin(&python, "sdist"), "gz")? else { return Ok(false) };
    println!("{}: {:.2} MB", archive.display(), size(&archive)? as f64 / 1e6);
    Ok(true)
}

/// Runs a command that builds one file, and puts it beside the others in `dist/`.
fn deliver(mut command: Command, extension: &str) -> Result<Option<PathBuf>, String> {
    let (building, folder) = (root().join("target/building"), root().join("dist"));
    recreate_folder(&building)?;
    command.arg("--out").arg(&building);
    if !run_in_terminal(command)? {
        return Ok(None);
    }
    let file = built(&building, extension)?;
    let delivered = folder.join(file.file_name().unwrap_or_default());
    let moved = fs::create_dir_all(&folder).and_then(|()| fs::rename(&file, &delivered));
    moved.map_err(|error| format!("cannot write {}: {error}", delivered.display()))?;
    Ok(Some(delivered))
}

/// Builds a wheel as a user's `pip install .` would, installs it, and runs its tests and the type
/// checker over it; says how many tests ran, and how many did not and why.
pub(crate) fn test(verbose: bool) -> Result<String, String> {
    let python = test_environment()?;
    let folder = tools::folder().join("wheel");
    recreate_folder(&folder)?;
    let mut build = maturin(&python, "build");
    build.arg("--quiet");
    // The same profile as the command line of the checks before, so that shared crates are not built
    // again.
    build.args(["--release", "--compatibility", "linux", "--out"]).arg(&folder);
    run(build, verbose)?;
    let mut install = program(&python);
    install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    install.args(["--no-index", "--no-deps", "--force-reinstall"]).arg(built(&folder, "whl")?);
    run(install, verbose)?;
    let mut types = program(&python);
    types.args(["-m", "mypy", "--config-file", "pyproject.toml"]);
    run(types, verbose)?;
    let mut stubs = program(&python);
    // With the configuration, which passes over the sources of other libraries.
    stubs.args(["-m", "mypy.stubtest", "--mypy-config-file", "pyproject.toml"]);
    stubs.arg("flashcore._flashcore");
    run(stubs, verbose)?;
    hub::lay_out(&python, &built(&folder, "whl")?, &hub_folder())?;
    let mut tests = program(&python);
    tests.args(["-m", "pytest", "--quiet", "-rs"]).env("FLASHCORE_HUB", hub_folder());
    let summary = Summary::of(&run(tests, verbose)?.log);
    match summary.skipped.iter().find(|(reason, _)| reason.contains("could not import")) {
        // All of them were installed.
        Some((reason, count)) => Err(format!("{count} tests of Python were skipped: {reason}")),
        None => {
            for (reason, count) in &summary.skipped {
                println!("python   {count} tests skipped: {reason}");
            }
            Ok(summary.to_string())
        }
    }
}

/// Every Python file is formatted and has nothing that ruff warns of.
pub(crate) fn lint(verbose: bool) -> Result<String, String> {
    let python = test_environment()?;
    for arguments in [&["format", "--check"][..], &["check"]] {
        let mut ruff = program(&python);
        ruff.args(["-m", "ruff", "--quiet"]).args(arguments);
        run(ruff, verbose)?;
    }
    Ok(String::new())
}

/// Runs the tests that need a GPU on the virtual one, with the package that [`test`](fn@test) installed. Where
/// there is a real GPU, they have run there.
pub(crate) fn test_on_virtual_gpu(verbose: bool) -> Result<String, String> {
    if Path::new("/dev/nvidiactl").exists() {
        return Ok("there is a GPU".to_owned());
    }
    let library = virtual_gpu::lay_out(verbose)?.join(virtual_gpu::LIBRARY);
    let mut tests = program(test_environment()?);
    tests.arg(VIRTUAL_GPU).arg(library).args(["--quiet", "python/tests"]);
    tests.env("FLASHCORE_HUB", hub_folder());
    Ok(format!("{} tests", Summary::of(&run(tests, verbose)?.log).passed))
}

/// Writes a program that stands for Python and runs a file on the virtual GPU, whose library is in a
/// folder.
pub(crate) fn on_virtual_gpu(folder: &Path) -> Result<PathBuf, String> {
    let (python, package) = (test_environment()?, root().join(VIRTUAL_GPU));
    let library = folder.join(virtual_gpu::LIBRARY);
    let [python, package, library] = [&python, &package, &library].map(|it| it.display());
    let text =
        format!("#!/bin/sh\nexec \"{python}\" \"{package}\" \"{library}\" --program \"$@\"\n");
    let file = folder.join("python");
    let written = fs::write(&file, text)
        .and_then(|()| fs::set_permissions(&file, fs::Permissions::from_mode(0o755)));
    written.map_err(|error| format!("cannot write {}: {error}", file.display()))?;
    Ok(file)
}

/// Runs PyTorch on the virtual GPU.
const VIRTUAL_GPU: &str = "python/tests/virtual_gpu";

/// Where the package for the hub is laid out for the tests.
fn hub_folder() -> PathBuf {
    tools::folder().join("hub")
}

/// The Python that runs the tests.
pub(crate) fn test_environment() -> Result<PathBuf, String> {
    environment(&[&BUILD[..], &TEST[..], &LIBRARIES[..]].concat())
}

/// The summary that pytest prints.
#[derive(Debug, Default, PartialEq)]
struct Summary {
    passed: usize,
    /// Reasons, with the number of tests.
    skipped: Vec<(String, usize)>,
}

impl Summary {
    /// From the lines `SKIPPED [3] tests/test_gpu.py:30: reason` and `7 passed, 3 skipped in 1.20s`.
    fn of(log: &str) -> Summary {
        let mut summary = Summary::default();
        for line in log.lines() {
            if let Some(line) = line.strip_prefix("SKIPPED [") {
                let Some((count, place)) = line.split_once("] ") else { continue };
                let reason = place.split_once(": ").map_or(place, |(_, reason)| reason);
                let count = count.parse().unwrap_or(0);
                match summary.skipped.iter_mut().find(|(known, _)| known == reason) {
                    Some((_, known)) => *known += count,
                    None => summary.skipped.push((reason.to_owned(), count)),
                }
            }
            let words: Vec<&str> = line.split([' ', ',', '=']).collect();
            for pair in words.windows(2) {
                if let (Ok(count), "passed") = (pair[0].parse(), pair[1]) {
                    summary.passed = count;
                }
            }
        }
        summary
    }
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let skipped: usize = self.skipped.iter().map(|(_, count)| count).sum();
        write!(f, "{} tests", self.passed)?;
        if skipped > 0 { write!(f, ", {skipped} skipped") } else { Ok(()) }
    }
}

/// The Python of `.tools/python`, with these packages at exactly these versions.
fn environment(packages: &[&str]) -> Result<PathBuf, String> {
    let python = tools::environment(&tools::folder().join("python"))?;
    let mut pip = program(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    // Python compiles what it imports, which is a small part of ten thousand files.
    pip.args(["--only-binary", ":all:", "--no-compile"]).args(packages);
    let done = run_captured(pip)?;
    if done.success {
        Ok(python)
    } else {
        Err(format!("pip could not fetch {}\n\n{}", packages.join(", "), done.log))
    }
}

fn maturin(python: &Path, command: &str) -> Command {
    let mut maturin = program(python);
    maturin.args(["-m", "maturin", command]);
    // It looks for Python and for its linker there.
    let folders = python.parent().map(Path::to_owned).into_iter();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = folders.chain(std::env::split_paths(&path));
    if let Ok(path) = std::env::join_paths(folders) {
        maturin.env("PATH", path);
    }
    maturin
}

/// Makes a folder that is empty, whatever was there.
pub(crate) fn recreate_folder(folder: &Path) -> Result<(), String> {
    tools::remove(folder)?;
    fs::create_dir_all(folder)
        .map_err(|error| format!("cannot create {}: {error}", folder.display()))
}

/// The one file of its kind in a folder.
fn built(folder: &Path, extension: &str) -> Result<PathBuf, String> {
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let entries = entries.map_err(|error| format!("cannot read {}: {error}", folder.display()))?;
    let fits = |path: &PathBuf| path.extension().is_some_and(|found| found == extension);
    let mut found = entries.iter().map(fs::DirEntry::path).filter(fits);
    found.next().ok_or_else(|| format!("no .{extension} came to {}", folder.display()))
}

fn size(file: &Path) -> Result<u64, String> {
    let metadata = fs::metadata(file);
    let metadata = metadata.map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    Ok(metadata.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_did_not_run_is_told_with_its_reason() {
        let log = "\
..ss.s [100%]
=========================== short test summary info ============================
SKIPPED [2] python/tests/test_gpu.py:30: no GPU that PyTorch can use
SKIPPED [1] python/tests/test_torch.py:12: could not import 'torch': No module named 'torch'
SKIPPED [1] python/tests/test_serving_gpu.py:9: no GPU that PyTorch can use
3204 passed, 4 skipped in 36.44s
";
        let summary = Summary::of(log);
        assert_eq!(summary.to_string(), "3204 tests, 4 skipped");
        let torch = "could not import 'torch': No module named 'torch'";
        let skipped = [("no GPU that PyTorch can use", 3), (torch, 1)];
        assert_eq!(summary.skipped, skipped.map(|(reason, count)| (reason.to_owned(), count)));
        assert_eq!(Summary::of("7 passed in 0.10s").to_string(), "7 tests");
    }

    #[test]
    fn every_package_is_pinned() {
        for package in BUILD.iter().chain(&LINKER).chain(&TEST).chain(&LIBRARIES) {
            assert!(package.split_once("==").is_some(), "{package}");
        }
    }
}
