//! Every hazard, in a small kernel that commits it, with the message that the simulator gives.
//!
//! The messages are snapshots beside this file. They show places in the source as the text of that
//! line, so that moving a kernel changes nothing. `INSTA_UPDATE=always cargo test -p flashcore-sim`
//! updates them.

mod barrier;
mod cluster;
mod copy;
mod memory;
mod product;
mod race;
mod register;

use flashcore_sim as sim;
use ptx::{ParameterKind, Program, Type};
use sim::TensorMapArgument;
use sim::{Argument, Failure, Hazard, HazardKind, Launch, Memory, Options, Policy};

/// Runs a program with default arguments: 4 KiB of zeros for each address, a tensor of 128 columns
/// and many rows for each tensor map, zero for numbers.
fn run(program: &Program, options: &Options) -> Result<sim::Report, Failure> {
    let mut memory = Memory::new();
    let arguments = (program.parameters.iter())
        .map(|parameter| match &parameter.kind {
            ParameterKind::Scalar(Type::U32) => Argument::U32(0),
            ParameterKind::Scalar(other) => panic!("no argument for {other:?}"),
            ParameterKind::Address => {
                Argument::Address(memory.input(&parameter.name, vec![0; 4096]), 0)
            }
            ParameterKind::TensorMap(tensor_box) => Argument::TensorMap(TensorMapArgument {
                buffer: memory.input(&parameter.name, vec![0; 64 * 1024]),
                offset: 0,
                dimensions: vec![128, 256],
                strides: vec![256],
                tensor_box: tensor_box.clone(),
            }),
        })
        .collect();
    let launch = Launch { program, grid: program.cluster, arguments };
    sim::run(&launch, &mut memory, options)
}

/// Checks that the hazard is reported under every hostile policy, and its message against the
/// snapshot.
fn fails(name: &str, kind: HazardKind, program: &Program) {
    for policy in Policy::HOSTILE {
        for seed in 0..4 {
            let found = hazard(program, &Options::checked(policy, seed));
            assert_eq!(found.kind, kind, "policy {policy}, seed {seed}: {found}");
        }
    }
    let found = hazard(program, &Options::checked(Policy::Latest, 0));
    insta::assert_snapshot!(name, show(&found.to_string()));
}

fn hazard(program: &Program, options: &Options) -> Hazard {
    match run(program, options) {
        Ok(_) => panic!("no hazard by {} {}", options.policy, options.seed),
        Err(Failure::Hazard(hazard)) => *hazard,
        Err(other) => panic!("{other}"),
    }
}

/// Checks that the program runs without a hazard under every hostile policy.
fn passes(program: &Program) {
    for policy in Policy::HOSTILE {
        for seed in 0..8 {
            if let Err(failure) = run(program, &Options::checked(policy, seed)) {
                panic!("{failure}");
            }
        }
    }
}

/// Replaces places in a message by the text of the source line.
fn show(message: &str) -> String {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut shown = String::new();
    for (index, word) in message.split(' ').enumerate() {
        if index > 0 {
            shown.push(' ');
        }
        let (word, tail) = match word.find('\n') {
            Some(at) => word.split_at(at),
            None => (word, ""),
        };
        let parts: Vec<&str> = word.split(':').collect();
        match parts.as_slice() {
            [file, line, _] if file.ends_with(".rs") => {
                let text = std::fs::read_to_string(root.join(file)).expect("the source is there");
                let line: usize = line.parse().expect("a line");
                let source = text.lines().nth(line - 1).unwrap_or_default().trim();
                shown += &format!("`{source}`");
            }
            _ => shown += word,
        }
        shown += tail;
    }
    shown
}

/// Every kind of hazard has a kernel in these tests that commits it.
#[test]
fn every_kind_has_a_kernel() {
    let sources = [
        include_str!("barrier.rs"),
        include_str!("cluster.rs"),
        include_str!("copy.rs"),
        include_str!("memory.rs"),
        include_str!("product.rs"),
        include_str!("race.rs"),
        include_str!("register.rs"),
    ]
    .concat();
    for kind in HazardKind::ALL {
        assert!(sources.contains(&format!("H::{kind:?}")), "no kernel commits {kind:?}");
    }
    assert!(HazardKind::ALL.len() >= 25);
}
