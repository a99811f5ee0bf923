//! The form of `wgmma` that does not exist.
//!
//! An earlier attempt at these kernels gave the instruction a second list of
//! accumulators (`{out}, a, b, {in}`), was refused by the assembler and took
//! the instruction for broken. Here the accumulator is one field that is read
//! and written, so there is no way to say it; see the `compile_fail` example
//! of [`flashcore_ptx::Instruction::Wgmma`] for the type error.

mod common;

use common::forms;
use cuda::toolkit::{Options, Toolkit};
use flashcore_ptx::{Target, print};

#[test]
fn every_printed_wgmma_has_one_accumulator() {
    let mut seen = 0;
    for form in forms::all().iter().filter(|form| form.name.starts_with("wgmma")) {
        let Ok(program) = form.program(Target::SM_90A) else { continue };
        for line in print(&program).lines().filter(|line| line.contains("wgmma.mma_async")) {
            let operands = line.split_once(' ').unwrap().1;
            let lists = operands.matches('{').count();
            // With `a` in registers its four are the second list.
            let a_in_registers = form.name.contains("a in registers");
            assert_eq!(lists, 1 + a_in_registers as usize, "{line}");
            assert!(operands.starts_with('{'), "{line}");
            seen += 1;
        }
    }
    assert!(seen > 100, "only {seen} instructions seen");
}

#[test]
fn the_assembler_refuses_the_other_form() {
    let Some(toolkit) = Toolkit::for_tests() else {
        eprintln!("skipped: no ptxas; `cargo xtask tools` brings it");
        return;
    };
    let forms = forms::all();
    let form = forms
        .iter()
        .find(|form| form.name.starts_with("wgmma n64 f16 f16 into f32, a in shared"))
        .unwrap();
    let right = print(&form.program(Target::SM_90A).unwrap());
    let line = right.lines().find(|line| line.contains("wgmma.mma_async")).unwrap();
    let list = &line[line.find('{').unwrap()..=line.find('}').unwrap()];
    let (head, tail) = line.split_once(", %false").unwrap();
    let wrong = right.replace(line, &format!("{head}, {list}, %false{tail}"));
    for ptxas in &toolkit.assemblers {
        ptxas.assemble(&right, &Options::default()).unwrap();
        let error = ptxas.assemble(&wrong, &Options::default()).unwrap_err().to_string();
        assert!(error.contains("Arguments mismatch"), "{error}");
    }
}
