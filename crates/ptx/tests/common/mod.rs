//! Shared by several tests: every instruction form, and assembling programs.

#![allow(dead_code)] // each test uses its part

pub(crate) mod forms;
pub(crate) mod tree;

use cuda::toolkit::{Options, Toolkit};
use flashcore_ptx::{Program, print};
use rayon::prelude::*;

/// Assembles each program with every assembler found (12.4 and a 13.x where
/// they are required); returns one message for each that is refused.
pub(crate) fn refused(programs: &[(String, Program)]) -> Vec<String> {
    let Some(toolkit) = Toolkit::for_tests() else {
        eprintln!("skipped: no ptxas; `cargo xtask tools` brings it");
        return Vec::new();
    };
    programs
        .par_iter()
        .flat_map_iter(|(name, program)| {
            let text = print(program);
            let mut messages = Vec::new();
            for ptxas in &toolkit.assemblers {
                // 12.4 is older than these targets.
                if ptxas.version.major == 12 && program.target.architecture >= 100 {
                    continue;
                }
                let options = Options { level: 0, ..Options::default() };
                if let Err(error) = ptxas.assemble(&text, &options) {
                    messages.push(format!("{name} by {}: {error}\n{text}", ptxas.version));
                }
            }
            messages
        })
        .collect()
}
