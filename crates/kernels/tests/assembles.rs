//! Every shipped configuration assembles under every assembler, and under the
//! newest without a spill, a stack frame or a note about slow tensor-core code.

use cuda::toolkit::{Options, Toolkit};
use flashcore_kernels::{Configuration, shipped};
use ptx::Target;
use rayon::prelude::*;

#[test]
fn shipped_configurations_assemble_cleanly() {
    let Some(toolkit) = Toolkit::for_tests() else {
        eprintln!("skipped: no ptxas; `cargo xtask tools` brings it");
        return;
    };
    let newest = toolkit.assemblers.iter().map(|p| p.version).max();
    let all: Vec<Configuration> = Target::NAMED.into_iter().flat_map(shipped).collect();
    let faults: Vec<String> = all
        .par_iter()
        .flat_map_iter(|configuration| {
            let name = configuration.name();
            let program = configuration.program().unwrap_or_else(|e| panic!("{name}: {e}"));
            let text = ptx::print(&program);
            let mut faults = Vec::new();
            for ptxas in &toolkit.assemblers {
                // 12.4 is older than these targets.
                if ptxas.version.major == 12 && program.target.architecture >= 100 {
                    continue;
                }
                // The old assembler is asked for acceptance, the new one for quality. The lowest
                // level is not the quickest: it sends every register through memory.
                let level = if Some(ptxas.version) == newest { 3 } else { 1 };
                match ptxas.assemble(&text, &Options { level, ..Options::default() }) {
                    Err(error) => faults.push(format!("{name} by {}: {error}", ptxas.version)),
                    Ok(assembled) if level == 3 => {
                        let of = |fault| format!("{name} for {}: {fault}", program.target);
                        faults.extend(assembled.faults().into_iter().map(of));
                    }
                    Ok(_) => {}
                }
            }
            faults
        })
        .collect();
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

/// Names are entry points and keys of caches: no two configurations share one.
#[test]
fn names_are_unique() {
    for target in Target::NAMED {
        let mut names: Vec<String> = shipped(target).iter().map(Configuration::name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count, "{target}");
    }
}
