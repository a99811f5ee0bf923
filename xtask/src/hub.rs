//! A package for Hugging Face's hub, as its library `kernels` loads it.
//!
//! ```text
//! dist/hub/
//!   README.md                                          what the hub shows
//!   build/torch-stable-abi25-cu130-x86_64-linux/       one folder for each kind of PyTorch
//!     metadata.json
//!     __init__.py, _flashcore.abi3.so, ...             the Python package
//! ```
//!
//! FlashCore links with neither PyTorch nor CUDA, and so all folders of a machine hold the same: they
//! are named after the oldest of each that it serves. The library takes a folder of PyTorch's stable
//! interface for every later PyTorch, and one of CUDA x.0 for every CUDA x.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use crate::process::{program, run_captured};
use crate::{Outcome, python, root};

/// The oldest PyTorch that the package's operators can be registered with.
const TORCH: &str = "torch-stable-abi25";

/// What a PyTorch can be built for, as the library writes it in folders and in `metadata.json`.
const BACKENDS: [(&str, &str); 3] = [("cu120", "cuda"), ("cu130", "cuda"), ("cpu", "cpu")];

/// The version of the interface, which users ask for. Others than its own may be incompatible.
const VERSION: u32 = 1;

/// Lays the contents of a wheel out in `dist/hub`: of the one that is named, or of a release wheel that
/// is built first.
pub(crate) fn hub(wheel: Option<&str>) -> Outcome {
    let folder = root().join("dist/hub");
    let python = python::build_environment()?;
    let wheel = match wheel {
        Some(wheel) => Some(PathBuf::from(wheel)),
        None => python::release(&python, None)?,
    };
    let Some(wheel) = wheel else { return Ok(false) };
    let variants = lay_out(&python, &wheel, &folder)?;
    println!("{}: {variants} kinds of PyTorch", folder.display());
    Ok(true)
}

/// Lays the contents of a wheel out in a folder, for each kind of PyTorch; returns their number.
pub(crate) fn lay_out(python: &Path, wheel: &Path, folder: &Path) -> Result<usize, String> {
    python::recreate_folder(folder)?;
    let unpacked = folder.join("wheel");
    let mut unzip = program(python);
    unzip.args(["-m", "zipfile", "-e"]).arg(wheel).arg(&unpacked);
    let done = run_captured(unzip)?;
    if !done.success {
        return Err(done.log);
    }
    let package = unpacked.join("flashcore");
    let extension =
        files(&package)?.into_iter().find(|file| file.extension() == Some("so".as_ref()));
    let extension = extension.ok_or_else(|| format!("no extension in {}", wheel.display()))?;
    let machine = machine(wheel)?;
    let hash = hash(&extension)?;
    for (backend, kind) in BACKENDS {
        let variant = folder.join(format!("build/{TORCH}-{backend}-{machine}-linux"));
        copy(&package, &variant)?;
        write(&variant.join("metadata.json"), &metadata(kind, hash))?;
    }
    write(&folder.join("README.md"), README)?;
    fs::remove_dir_all(&unpacked).map_err(|error| failed(&unpacked, &error))?;
    Ok(BACKENDS.len())
}

/// The machine that a wheel is for, which its name ends with.
fn machine(wheel: &Path) -> Result<&'static str, String> {
    let name = wheel.file_stem().unwrap_or_default().to_string_lossy();
    let known = ["x86_64", "aarch64"].into_iter().find(|machine| name.ends_with(machine));
    known.ok_or_else(|| format!("{name} does not say which machine it is for"))
}

/// The metadata that the library reads: a module name that is unique for each build, version and
/// back end.
fn metadata(backend: &str, hash: u64) -> String {
    format!(
        "{{\n  \"id\": \"_flashcore_{backend}_{hash:016x}\",\n  \"name\": \"flashcore\",\n  \
         \"version\": {VERSION},\n  \"license\": \"MIT OR Apache-2.0\",\n  \"python-depends\": [],\n  \
         \"backend\": {{ \"type\": \"{backend}\" }}\n}}\n"
    )
}

const README: &str = "\
---
license: apache-2.0
tags:
- kernels
---
# FlashCore

Fused attention for NVIDIA GPUs in pure Rust, with FlashAttention's functions.

    from kernels import get_local_kernel

    flashcore = get_local_kernel(path)          # of this folder
    out = flashcore.flash_attn_func(q, k, v, causal=True)
";

/// A hash of a file's contents.
fn hash(file: &Path) -> Result<u64, String> {
    let mut hasher = DefaultHasher::new();
    fs::read(file).map_err(|error| failed(file, &error))?.hash(&mut hasher);
    Ok(hasher.finish())
}

fn files(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let entries = entries.map_err(|error| failed(folder, &error))?;
    Ok(entries.iter().map(fs::DirEntry::path).collect())
}

/// Copies a folder and all that is in it.
fn copy(from: &Path, to: &Path) -> Result<(), String> {
    fs::create_dir_all(to).map_err(|error| failed(to, &error))?;
    for file in files(from)? {
        let to = to.join(file.file_name().unwrap_or_default());
        match file.is_dir() {
            true => copy(&file, &to)?,
            false => fs::copy(&file, &to).map(drop).map_err(|error| failed(&to, &error))?,
        }
    }
    Ok(())
}

fn write(file: &Path, text: &str) -> Result<(), String> {
    fs::write(file, text).map_err(|error| failed(file, &error))
}

fn failed(path: &Path, error: &std::io::Error) -> String {
    format!("{}: {error}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wheel_says_which_machine_it_is_for() {
        let wheel = |tag: &str| PathBuf::from(format!("dist/a-0.1.0-cp310-abi3-{tag}.whl"));
        assert_eq!(machine(&wheel("manylinux_2_17_x86_64.manylinux2014_x86_64")), Ok("x86_64"));
        assert_eq!(machine(&wheel("linux_aarch64")), Ok("aarch64"));
        assert!(machine(&wheel("any")).is_err());
    }
}
