//! The text of every shipped kernel is parsed to a program with the same text, so that what runs in
//! the simulator can be what a driver compiles.

use std::collections::HashSet;

use flashcore_kernels::{shipped, with_functions};
use ptx::{Target, parse, print};
use rayon::prelude::*;

#[test]
fn every_kernel_is_read_from_its_text() {
    let mut all: Vec<_> =
        Target::NAMED.into_iter().flat_map(shipped).chain(with_functions()).collect();
    let mut seen = HashSet::new();
    all.retain(|kernel| seen.insert(*kernel));
    let count = all.len();
    let complaints: Vec<String> = (all.par_iter())
        .filter_map(|kernel| {
            let program = kernel.program().unwrap();
            let parsed = match parse(&print(&program)) {
                Ok(parsed) => parsed,
                Err(error) => return Some(format!("{}: {error}", kernel.name())),
            };
            let counts = [&program, &parsed].map(|program| program.instruction_count());
            (counts[0] != counts[1]).then(|| format!("{}: {counts:?} instructions", kernel.name()))
        })
        .collect();
    assert!(complaints.is_empty(), "{} of {count}:\n{}", complaints.len(), complaints.join("\n"));
}
