//! The virtual GPU: a driver's library that runs kernels in the simulator (`crates/virtual-gpu`).
//! With it, what the other checks leave to machines with a GPU runs on any: planning for a device,
//! arguments, tensor maps, workspaces, launches, and the text of kernels.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::process::{cargo, program, run};
use crate::test::Finding;
use crate::{Outcome, python, root, target};

/// Small problems for each kernel, over all masks, rules, element types and storages. Where there is no
/// name, all kernels take their turns; the scalar one would take a minute for the others.
const PROBLEMS: [(Option<&str>, &[&str]); 5] = [
    (
        Some("forward"),
        &[
            "b=2,h=4,hk=2,s=150,d=64,bf16,causal",
            "h=2,s=200,d=128,f16",
            "h=1,s=70,sk=190,d=256,bf16,causal",
            "h=2,s=130,d=192,dv=128,bf16,causal",
            "h=2,s=90,d=40,f16,window=30:10",
            "h=2,s=140,d=64,bf16,causal,softcap=20",
            "h=2,s=100,d=128,f16,causal,alibi,sinks",
            "h=2,s=160,d=128,bf16,chunk=60,causal",
            "b=2,h=2,s=180,d=128,e4m3",
        ],
    ),
    (
        Some("prefill"),
        &[
            "b=3,h=2,s=120,d=64,bf16,causal,queries=packed:250,keys=packed:250",
            "b=2,h=2,s=90,d=128,f16,causal,softcap=20,queries=packed:170,keys=packed:170",
            "b=2,h=4,hk=2,s=30,sk=208,d=128,bf16,causal,keys=pages:16:13:30,key_lengths",
        ],
    ),
    (
        Some("mma"),
        &[
            "b=2,h=4,hk=2,s=150,d=64,bf16,causal",
            "h=2,s=90,sk=200,d=128,f16,window=30:10,sinks",
            "b=3,h=2,s=120,d=64,bf16,causal,queries=packed:250,keys=packed:250",
        ],
    ),
    (
        Some("decode"),
        &[
            "b=2,h=8,hk=2,s=1,sk=700,d=128,bf16,causal",
            "b=2,h=4,hk=2,s=1,sk=300,d=64,q=bf16,k=e4m3,v=e4m3,k_descale=head,v_descale=head",
            "b=2,h=4,hk=2,s=3,sk=208,d=128,bf16,causal,keys=pages:16:13:30,key_lengths",
        ],
    ),
    (
        None,
        &[
            "h=1,s=40,d=32,f32,causal",
            "h=2,s=150,d=64,bf16,causal,backward",
            "h=2,s=100,d=128,f16,window=40:0,sinks,backward",
            "h=2,s=70,sk=50,d=128,bf16,causal,sinks,backward,lse_gradient",
            "h=4,hk=1,s=90,d=128,bf16,softcap=15,backward,deterministic",
            "b=3,h=2,s=100,d=64,f16,causal,queries=packed:200,keys=packed:200,backward,lse_gradient",
        ],
    ),
];

/// What is measured from PyTorch, where the bench launches kernels from a program of its own, and how
/// many results there are. Without a peer, what has no gradients would be launched from Rust.
const MEASURED: [(usize, &[&str]); 2] = [
    (
        8,
        &[
            "--problem=b=2,h=2,hk=1,s=128,d=64,bf16,causal",
            "--problem=b=2,h=4,hk=2,s=1,sk=256,d=64,bf16",
            "--problem=b=3,h=2,s=120,d=64,bf16,causal,queries=packed:250,keys=packed:250",
            "--candidates=flashcore,page16,efficient",
            "--cache=both",
        ],
    ),
    (
        2,
        &[
            "--problem=h=2,s=128,d=64,bf16,causal",
            "--problem=h=2,hk=1,s=100,d=128,f16",
            "--backward",
            "--candidates=flashcore",
        ],
    ),
];

/// All hazards are looked for, under random schedules.
const OPTIONS: &str = "checked,policy=random,seed=1";

/// Checks problems on the virtual GPU, and runs the driver layer's own tests there, and the bench.
pub(crate) fn check(verbose: bool) -> Finding {
    let folder = lay_out(verbose)?;
    let run = |mut command: Command| {
        command.env("LD_LIBRARY_PATH", &folder).env("FLASHCORE_VIRTUAL_GPU", OPTIONS);
        command.env("FLASHCORE_CACHE", folder.join("cache"));
        run(command, verbose)
    };
    for (kernel, problems) in PROBLEMS {
        let mut command = program(target().join("debug/flashcore"));
        command.args(["check", "--backend", "gpu"]);
        command.args(kernel.iter().flat_map(|kernel| ["--kernel", kernel]));
        command.args(problems.iter().flat_map(|problem| ["--problem", problem]));
        run(command)?;
    }
    run(cargo(&["test", "--workspace", "--test", "device"]))?;
    let python = python::on_virtual_gpu(&folder)?;
    for (expected, options) in MEASURED {
        let mut command = program(target().join("debug/flashcore"));
        command.args(["bench", "--json", "--rounds=2", "--python"]).arg(&python).args(options);
        let log = run(command)?.log;
        let right = log.lines().filter(|line| line.contains("\"right\": true")).count();
        if right != expected {
            return Err(format!("the bench has {right} right results, not {expected}:\n{log}"));
        }
    }
    let count: usize = PROBLEMS.iter().map(|(_, problems)| problems.len()).sum();
    Ok(format!("{count} problems"))
}

/// The driver's library.
pub(crate) const LIBRARY: &str = "libcuda.so.1";

/// Builds the library for users, and prints its folder.
pub(crate) fn build() -> Outcome {
    println!("{}", lay_out(false)?.display());
    Ok(true)
}

/// Builds the library, and returns a folder that has it as [`LIBRARY`].
pub(crate) fn lay_out(verbose: bool) -> Result<PathBuf, String> {
    run(cargo(&["build", "--release", "--package", "flashcore-virtual-gpu"]), verbose)?;
    let folder = root().join("target/virtual-gpu");
    let library = target().join("release/libflashcore_virtual_gpu.so");
    let link = folder.join(LIBRARY);
    // Another lane may be doing the same, or use the link already.
    let is_there = || fs::read_link(&link).is_ok_and(|to| to == library);
    if !is_there() {
        let laid_out = fs::create_dir_all(&folder).and_then(|()| {
            let _ = fs::remove_file(&link);
            std::os::unix::fs::symlink(&library, &link)
        });
        match laid_out {
            Err(error) if !is_there() => {
                return Err(format!("cannot write {}: {error}", link.display()));
            }
            _ => {}
        }
    }
    Ok(folder)
}
