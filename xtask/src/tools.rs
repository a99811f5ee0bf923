//! Fetching NVIDIA's assembler and disassembler.
//!
//! They are proprietary, so they are downloaded from PyPI and never kept in the repository. Two
//! assemblers, because a kernel has to be accepted by the oldest release we promise and be fast
//! under a current one. What is left in `.tools/` is the executables and a note of their versions:
//!
//! ```text
//! .tools/ptxas-12.4/bin/ptxas
//! .tools/cuda-13.0/bin/{ptxas,nvdisasm,cuobjdump}
//! .tools/venv/                    the pip that fetched them
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::{program, run_captured};
use crate::root;

/// A folder of executables and where they come from.
struct Release {
    folder: &'static str,
    /// Packages of PyPI, at the version we test with.
    packages: &'static [&'static str],
    /// Where these packages put their executables.
    within: &'static str,
    executables: &'static [&'static str],
}

/// Every version this project pins. The disassemblers are on PyPI from 13.2 on; they read the
/// cubins of earlier releases.
const RELEASES: [Release; 2] = [
    Release {
        folder: "ptxas-12.4",
        packages: &["nvidia-cuda-nvcc-cu12==12.4.131"],
        within: "nvidia/cuda_nvcc/bin",
        executables: &["ptxas"],
    },
    Release {
        folder: "cuda-13.0",
        packages: &[
            "nvidia-cuda-nvcc==13.0.88",
            "nvidia-cuda-nvdisasm==13.2.86",
            "nvidia-cuda-cuobjdump==13.2.86",
        ],
        within: "nvidia/cu13/bin",
        executables: &["ptxas", "nvdisasm", "cuobjdump"],
    },
];

/// Lists what a folder holds; written last, so a folder that has it is whole.
const MANIFEST: &str = "packages.txt";

/// Sees to it that every pinned tool is there, and says what was done.
pub(crate) fn tools() -> Result<String, String> {
    let tools = folder();
    let absent: Vec<&Release> =
        RELEASES.iter().filter(|release| !present(&tools, release)).collect();
    if absent.is_empty() {
        return Ok(format!("{} is complete", tools.display()));
    }
    fs::create_dir_all(&tools)
        .map_err(|error| format!("cannot create {}: {error}", tools.display()))?;
    let python = environment(&tools.join("venv"))?;
    for release in &absent {
        eprintln!("fetching {}", release.packages.join(", "));
        fetch(&python, &tools, release)?;
    }
    let fetched: Vec<&str> = absent.iter().map(|release| release.folder).collect();
    Ok(format!("fetched {} into {}", fetched.join(" and "), tools.display()))
}

/// Tells a program where the tools are, and that they must be there.
pub(crate) fn require(command: &mut Command) {
    command.env("FLASHCORE_TOOLS", folder()).env("FLASHCORE_REQUIRE_TOOLS", "1");
}

/// Where the tools are kept.
pub(crate) fn folder() -> PathBuf {
    root().join(".tools")
}

fn present(tools: &Path, release: &Release) -> bool {
    let folder = tools.join(release.folder);
    let manifest = fs::read_to_string(folder.join(MANIFEST));
    manifest.is_ok_and(|manifest| manifest.lines().eq(release.packages.iter().copied()))
        && release.executables.iter().all(|name| folder.join("bin").join(name).is_file())
}

/// Installs beside the final folder and renames, so that an interrupted download leaves nothing
/// that looks whole.
fn fetch(python: &Path, tools: &Path, release: &Release) -> Result<(), String> {
    let target = tools.join(release.folder);
    let unpacked = tools.join(format!("{}.unpacked", release.folder));
    let staged = tools.join(format!("{}.staged", release.folder));
    for folder in [&target, &unpacked, &staged] {
        remove(folder)?;
    }

    let mut pip = program(python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    // Ready-made wheels of exactly these packages, and nothing they might ask for.
    pip.args(["--no-deps", "--only-binary", ":all:", "--target"]).arg(&unpacked);
    pip.args(release.packages);
    let done = run_captured(pip)?;
    if !done.success {
        remove(&unpacked)?;
        return Err(refusal(release, &done.log));
    }

    let file = |what: &str, path: &Path, result: std::io::Result<()>| {
        result.map_err(|error| format!("cannot {what} {}: {error}", path.display()))
    };
    let bin = staged.join("bin");
    file("create", &bin, fs::create_dir_all(&bin))?;
    for name in release.executables {
        let from = unpacked.join(release.within).join(name);
        file("move", &from, fs::rename(&from, bin.join(name)))?;
    }
    let manifest = staged.join(MANIFEST);
    file("write", &manifest, fs::write(&manifest, release.packages.join("\n") + "\n"))?;
    file("rename", &staged, fs::rename(&staged, &target))?;
    // The rest of the packages (a C++ compiler, headers) is of no use here.
    remove(&unpacked)
}

fn refusal(release: &Release, log: &str) -> String {
    format!(
        "pip could not fetch {}.\n\
         It needs PyPI or a mirror of it, and Linux on x86-64 or arm64. With no network, copy .tools/\n\
         from a machine that has it.\n\n{log}",
        release.packages.join(", ")
    )
}

/// Removes a folder, if it is there.
pub(crate) fn remove(folder: &Path) -> Result<(), String> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("cannot remove {}: {error}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// The Python of a virtual environment, made if need be.
pub(crate) fn environment(venv: &Path) -> Result<PathBuf, String> {
    let python = venv.join("bin/python");
    let works = |python: &Path| {
        let mut pip = program(python);
        pip.args(["-m", "pip", "--version"]);
        run_captured(pip).is_ok_and(|done| done.success)
    };
    if works(&python) {
        return Ok(python);
    }
    let create = || {
        remove(venv)?;
        let mut command = program("python3");
        command.args(["-m", "venv"]).arg(venv);
        run_captured(command).and_then(|done| if done.success { Ok(()) } else { Err(done.log) })
    };
    if let Err(first) = create() {
        // Debian and its kin ship Python without the module that makes environments.
        install_python(&first)?;
        create()?;
    }
    if works(&python) { Ok(python) } else { Err(format!("{} has no pip", venv.display())) }
}

fn install_python(reason: &str) -> Result<(), String> {
    const PACKAGES: [&str; 2] = ["python3", "python3-venv"];
    let advice = format!("apt-get install {}", PACKAGES.join(" "));
    let is_root = {
        let mut command = program("id");
        command.arg("-u");
        run_captured(command).is_ok_and(|done| done.log.trim() == "0")
    };
    let apt = |arguments: &[&str]| {
        let mut command = program("apt-get");
        command.args(arguments).args(["--quiet", "--yes"]).env("DEBIAN_FRONTEND", "noninteractive");
        run_captured(command)
    };
    if !is_root || !apt(&["--version"]).is_ok_and(|done| done.success) {
        let reason = reason.trim_end();
        return Err(format!("python3 with venv is needed; on Debian: {advice}\n\n{reason}"));
    }
    eprintln!("{advice}");
    // A failed update may still leave lists that are good enough to install from.
    let update = apt(&["update"])?;
    let install = apt(&[&["install"], &PACKAGES[..]].concat())?;
    if install.success {
        Ok(())
    } else {
        Err(format!("{advice} failed\n\n{}{}", update.log, install.log))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_package_is_pinned() {
        for package in RELEASES.iter().flat_map(|release| release.packages) {
            let (name, version) = package.split_once("==").unwrap_or_default();
            assert!(
                name.starts_with("nvidia-cuda-") && version.split('.').count() == 3,
                "{package}"
            );
        }
    }

    #[test]
    fn a_folder_without_its_manifest_is_not_whole() {
        let tools = std::env::temp_dir().join(format!("flashcore-xtask-{}", std::process::id()));
        let release = &RELEASES[0];
        let bin = tools.join(release.folder).join("bin");
        fs::create_dir_all(&bin).unwrap();
        fs::write(bin.join("ptxas"), "").unwrap();
        assert!(!present(&tools, release));
        let manifest = tools.join(release.folder).join(MANIFEST);
        fs::write(&manifest, "nvidia-cuda-nvcc-cu12==12.0.76\n").unwrap();
        assert!(!present(&tools, release));
        fs::write(&manifest, "nvidia-cuda-nvcc-cu12==12.4.131\n").unwrap();
        assert!(present(&tools, release));
        fs::remove_file(bin.join("ptxas")).unwrap();
        assert!(!present(&tools, release));
        remove(&tools).unwrap();
    }
}
