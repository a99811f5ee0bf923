//! The adaptation of programs to older compilers, and its effect.

mod common;

use std::borrow::Cow;

use cuda::toolkit::{Options, Toolkit};
use flashcore_ptx::*;

/// Returns a program with a role that accumulates products in a loop, in which a predicate keeps
/// the first product from accumulating.
fn sums() -> Program {
    let mut k = Builder::new("sums", Target::SM_90A, 256).blocks_per_multiprocessor(1);
    let out = k.parameter::<GlobalAddress>("out");
    let count = k.parameter::<U32>("count");
    let layout = TileLayout::widest(Element::BF16, 64, 64);
    let [a, b] = ["a", "b"].map(|name| SharedTiles::new(&mut k, name, layout, 1).at(&mut k, 0));
    k.role(Role::warpgroups("producer", 0..1).registers(24), |_| {});
    k.role(Role::warpgroups("consumer", 1..2).registers(240), |k| {
        let thread = k.thread_index();
        k.if_(count.greater(1), |k| {
            let mut sum = Accumulator::new(k, 64);
            let begun = k.variable(Value::<Pred>::from(false));
            let left = k.variable(count);
            k.loop_(|k| {
                let accumulate = Accumulate::If(begun.register());
                let scores = k.wgmma(a.matrix(), b.transposed());
                let update = k.wgmma_into(&mut sum, accumulate, a.matrix(), b.transposed());
                let scores = scores.wait(k);
                k.store(out + thread.convert::<U64>() * 4, scores.registers()[0]);
                k.set(begun, true);
                update.wait(k);
                k.set(left, left - 1);
                k.break_if(left.equals(0));
            });
            for (index, register) in sum.registers().iter().enumerate() {
                k.store(out + thread.convert::<U64>() * 4 + (1024 * (index + 1)), *register);
            }
        });
    });
    k.finish().unwrap()
}

#[test]
fn releases_of_cuda_are_told_apart() {
    for (major, minor) in [(11, 8), (12, 0), (12, 4), (12, 8)] {
        assert_eq!(Compiler::of_cuda(major, minor), Compiler::Older, "{major}.{minor}");
    }
    for (major, minor) in [(12, 9), (12, 10), (13, 0), (14, 2)] {
        assert_eq!(Compiler::of_cuda(major, minor), Compiler::Current, "{major}.{minor}");
    }
}

#[test]
fn an_undefined_accumulator_begins_with_zeros() {
    let program = sums();
    assert!(matches!(Compiler::Current.adapt(&program), Cow::Borrowed(_)));
    assert_eq!(print_for(&program, Compiler::Current), print(&program));
    let adapted = Compiler::Older.adapt(&program);
    validate(&adapted).unwrap();
    let (before, after) = (print(&program), print_for(&program, Compiler::Older));
    let zeros = |text: &str| text.matches(", 0f00000000;").count();
    assert_eq!(zeros(&after), zeros(&before) + 32);
    // Behind the role's budget and the branch, before the loop.
    let place = |what: &str| after.find(what).unwrap();
    assert!(place("setmaxnreg") < place(", 0f00000000;"));
    assert!(place("role consumer") < place(", 0f00000000;"));
    assert!(place(", 0f00000000;") < place("$loop_"));
    // An adapted program is not adapted again, and other programs are left alone.
    assert!(matches!(Compiler::Older.adapt(&adapted), Cow::Borrowed(_)));
    for form in common::forms::all() {
        if let Ok(program) = form.program(Target::SM_90A) {
            validate(&Compiler::Older.adapt(&program)).unwrap();
        }
    }
}

/// Without the adaptation an older compiler notes that it serialises products; with it, it does
/// not.
#[test]
fn older_compilers_do_not_serialise_it() {
    let Some(toolkit) = Toolkit::for_tests() else { return };
    let program = sums();
    for ptxas in &toolkit.assemblers {
        let compiler = Compiler::of_cuda(ptxas.version.major, ptxas.version.minor);
        let faults = |text: &str| ptxas.assemble(text, &Options::default()).unwrap().faults();
        assert_eq!(faults(&print_for(&program, compiler)), [""; 0], "{}", ptxas.version);
        if compiler == Compiler::Older {
            let plain = faults(&print(&program));
            assert!(plain.iter().any(|it| it.starts_with("(C7515)")), "{plain:?}");
        }
    }
}
