//! Runs the Python extension under AddressSanitizer, which checks all of its accesses to its own
//! memory and to that of NumPy and PyTorch, while the tests of arguments and memory run.
//!
//! Python itself is not built with AddressSanitizer, so its runtime is preloaded as a shared
//! library. Rust ships it as a static archive, for executables.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::{program, run_captured, run_in_terminal};
use crate::{Outcome, python, root};

/// The tests that make the extension read and write memory of others.
const TESTS: [&str; 8] = [
    "arguments",
    "fuzz",
    "gradients",
    "memory",
    "numpy",
    "quantize",
    "serving_numpy",
    "serving_torch",
];

/// Reads beyond the end of an array: if this is not detected, the sanitizer is not active.
const BEYOND: &str = "
import numpy, flashcore
short = numpy.lib.stride_tricks.as_strided(numpy.zeros(64, 'f4'), (1, 64, 2, 16), (8192, 128, 64, 4))
flashcore.flash_attn_func(short, short, short)
";

/// Builds the extension, and runs the tests with it.
pub(crate) fn sanitize() -> Outcome {
    let folder = root().join("target/sanitize");
    fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let (sysroot, host) = toolchain()?;
    let runtime = runtime(&sysroot.join("lib/rustlib").join(&host).join("lib"), &folder)?;
    if !run_in_terminal(build(&folder, &host))? {
        return Ok(false);
    }
    let package = folder.join("package");
    python::recreate_folder(&package.join("flashcore"))?;
    copy(&root().join("python/flashcore"), &package.join("flashcore"))?;
    let built = folder.join(&host).join("release/lib_flashcore.so");
    fs::copy(&built, package.join("flashcore/_flashcore.abi3.so"))
        .map_err(|error| format!("{}: {error}", built.display()))?;

    let interpreter = python::test_environment()?;
    let watched = |arguments: &[&str]| {
        let mut command = program(&interpreter);
        command.args(arguments).current_dir(&package);
        command.env("LD_PRELOAD", &runtime).env("PYTHONPATH", &package);
        // Each Python object gets memory of its own, so that overruns are seen.
        command.env("PYTHONMALLOC", "malloc");
        // Python never frees everything; and the tests ask for impossible amounts of memory on
        // purpose.
        command.env("ASAN_OPTIONS", "detect_leaks=0:allocator_may_return_null=1");
        command
    };
    let seen = run_captured(watched(&["-c", BEYOND]))?;
    if seen.success || !seen.log.contains("AddressSanitizer: heap-buffer-overflow") {
        return Err(format!("a read beyond the end of an array was not seen\n{}", seen.log));
    }
    // A report ends the process: output captured until the end of a test would be lost.
    let mut tests = watched(&["-m", "pytest", "--quiet", "--capture=sys"]);
    tests.args(["-p", "no:faulthandler", "-p", "no:cacheprovider"]);
    let file = |name| root().join(format!("python/tests/test_{name}.py"));
    tests.args(TESTS.map(file)).arg("--rootdir").arg(root());
    run_in_terminal(tests)
}

/// Where the compiler has its libraries, and the kind of this machine.
fn toolchain() -> Result<(PathBuf, String), String> {
    let ask = |arguments: &[&str]| -> Result<String, String> {
        let mut command = program("rustc");
        command.args(arguments);
        let done = run_captured(command)?;
        if done.success { Ok(done.log) } else { Err(done.log) }
    };
    let sysroot = PathBuf::from(ask(&["--print", "sysroot"])?.trim());
    let version = ask(&["-vV"])?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok((sysroot, host.ok_or("rustc does not say what it is for")?.to_owned()))
}

/// The runtime as a shared library.
fn runtime(libraries: &Path, folder: &Path) -> Result<PathBuf, String> {
    let shipped = fs::read_dir(libraries).ok().into_iter().flatten().flatten();
    let shipped = shipped.map(|entry| entry.path());
    let mut shipped = shipped.filter(|path| path.to_string_lossy().ends_with("_rt.asan.a"));
    let Some(shipped) = shipped.next() else {
        return Err(format!("no AddressSanitizer in {}: it is for Linux", libraries.display()));
    };
    let (archive, library) = (folder.join("runtime.a"), folder.join("libruntime.so"));
    fs::copy(&shipped, &archive).map_err(|error| format!("{}: {error}", shipped.display()))?;
    // Code that runs before a program's own constructors can only be linked into executables.
    let mut remove = program("ar");
    remove.arg("d").arg(&archive).arg("asan_preinit.cpp.o");
    let mut link = program("cc");
    link.args(["-shared", "-o"]).arg(&library).arg("-Wl,--whole-archive").arg(&archive);
    link.args(["-Wl,--no-whole-archive", "-lpthread", "-ldl", "-lm", "-lrt"]);
    // The runtime looks up C++'s `throw` when it starts; PyTorch would load the C++ library too
    // late.
    link.args(["-Wl,--no-as-needed", "-lstdc++"]);
    for command in [remove, link] {
        let done = run_captured(command)?;
        if !done.success {
            return Err(format!("the runtime does not become a library\n{}", done.log));
        }
    }
    Ok(library)
}

/// Builds the extension with AddressSanitizer. The explicit target keeps it out of build scripts and
/// procedural macros.
fn build(folder: &Path, host: &str) -> Command {
    let mut command = program("cargo");
    command.args(["build", "--release", "--package", "flashcore-python"]);
    command.args(["--target", host, "--target-dir"]).arg(folder);
    // Sanitizers are unstable, but every compiler has them.
    command.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Zsanitizer=address");
    // Line numbers in reports.
    command.env("CARGO_PROFILE_RELEASE_DEBUG", "line-tables-only");
    command.env("CARGO_PROFILE_RELEASE_STRIP", "none");
    command
}

/// Copies the Python files of a folder and those below it.
fn copy(from: &Path, to: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("cannot copy {}: {error}", from.display());
    fs::create_dir_all(to).map_err(failed)?;
    for entry in fs::read_dir(from).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let Some(name) = path.file_name() else { continue };
        if path.is_dir() {
            copy(&path, &to.join(name))?;
        } else if path.extension().is_some_and(|it| it == "py") {
            fs::copy(&path, to.join(name)).map_err(failed)?;
        }
    }
    Ok(())
}
