//! The parser reads what the printer writes: every instruction form on every target, random
//! programs, and odd names. What the printer does not write is refused.

mod common;

use common::forms::{self, Form, Scene};
use common::tree;
use flashcore_ptx::{
    AtomicOperation, BinaryOperation, Builder, Instruction, ParameterKind, Program, Role,
    StatementKind, Target, Type, U32, UnaryOperation, parse, print,
};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// Returns the instructions of a program in order, as text.
///
/// Where the bits of a result do not depend on whether the operands are signed, or floats, the type
/// is not in the PTX text; it is left out here too.
fn instructions(program: &Program) -> Vec<String> {
    use AtomicOperation as A;
    use BinaryOperation as B;
    let bits = |ty: Type| match ty.bits() {
        16 => Type::F16,
        32 if ty != Type::F32 => Type::U32,
        64 => Type::U64,
        _ => ty,
    };
    let mut all = Vec::new();
    program.visit(&mut |statement| {
        let StatementKind::Instruction(instruction) = &statement.kind else { return };
        let mut instruction = instruction.clone();
        match &mut instruction {
            Instruction::Select { ty, .. }
            | Instruction::CompareAndSwap { ty, .. }
            | Instruction::Unary {
                operation:
                    UnaryOperation::Not
                    | UnaryOperation::PopulationCount
                    | UnaryOperation::LeadingZeros
                    | UnaryOperation::Negate
                    | UnaryOperation::Absolute,
                ty: ty @ (Type::U32 | Type::S32 | Type::U64 | Type::S64),
                ..
            }
            | Instruction::Binary {
                operation: B::And | B::Or | B::Xor | B::ShiftLeft, ty, ..
            }
            | Instruction::Atomic {
                operation: A::And | A::Or | A::Xor | A::Exchange, ty, ..
            }
            | Instruction::Reduce { operation: A::And | A::Or | A::Xor, ty, .. }
            | Instruction::Atomic { operation: A::Add, ty: ty @ Type::S64, .. }
            | Instruction::Reduce { operation: A::Add, ty: ty @ Type::S64, .. } => *ty = bits(*ty),
            _ => {}
        }
        all.push(format!("{instruction:?}"));
    });
    all
}

/// Returns what is wrong with the program that the text of another one is parsed to.
fn complaint(program: &Program) -> Option<String> {
    let text = print(program);
    let parsed = match parse(&text) {
        Ok(parsed) => parsed,
        Err(error) => return Some(format!("{error}\n{text}")),
    };
    let (before, after) = (instructions(program), instructions(&parsed));
    let differ = before.iter().zip(&after).find(|(before, after)| before != after);
    if let Some((before, after)) = differ {
        return Some(format!("{before}\nread as\n{after}"));
    }
    let roles = |program: &Program| {
        let mut all = Vec::new();
        program.visit(&mut |statement| {
            if let StatementKind::Role { name, warps, .. } = &statement.kind {
                all.push((name.clone(), warps.clone()));
            }
        });
        all
    };
    let shape = |it: &Program| {
        (it.name.clone(), it.target, it.threads, it.cluster, it.shared_bytes(), it.version())
    };
    let same = shape(program) == shape(&parsed) && roles(program) == roles(&parsed);
    (before.len() != after.len() || !same).then(|| format!("it is another program:\n{text}"))
}

#[test]
fn every_form_of_every_target() {
    let mut count = 0;
    for form in forms::all() {
        for program in Target::NAMED.into_iter().filter_map(|target| form.program(target).ok()) {
            count += 1;
            let complaint = complaint(&program);
            assert!(complaint.is_none(), "{}: {}", form.name, complaint.unwrap());
        }
    }
    assert!(count > 5000, "only {count} programs");
}

/// The types of registers that are converted, and the kinds of parameters, are those of the program.
#[test]
fn what_the_simulator_needs_is_in_the_text() {
    for form in forms::all().iter().filter(|form| form.name.contains("onvert")) {
        let Ok(program) = form.program(Target::SM_90A) else { continue };
        let parsed = parse(&print(&program)).unwrap();
        program.visit(&mut |statement| {
            use Instruction::{Convert, ConvertPacked};
            if let StatementKind::Instruction(Convert { dst, src } | ConvertPacked { dst, src }) =
                &statement.kind
            {
                for register in [*dst, *src] {
                    let (before, after) = (program.type_of(register), parsed.type_of(register));
                    assert_eq!(before, after, "{}", form.name);
                }
            }
        });
        assert_eq!(parsed.parameters[0].kind, ParameterKind::Address);
    }
}

proptest! {
    // Every run has the same programs; PROPTEST_RNG_SEED selects others.
    #![proptest_config(ProptestConfig {
        cases: 200,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(2),
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_programs(trees in prop::collection::vec(tree::tree(24), 1..12)) {
        let forms = forms::all();
        let usable: Vec<&Form> =
            forms.iter().filter(|form| form.program(Target::SM_90A).is_ok()).collect();
        let mut scene = Scene::new(Target::SM_90A);
        tree::write(&mut scene, &usable, &trees);
        // Too many tensor maps make some programs invalid, which the printer does not mind.
        if let Ok(program) = scene.k.finish() {
            let complaint = complaint(&program);
            prop_assert!(complaint.is_none(), "{}", complaint.unwrap());
        }
    }
}

#[test]
fn names_are_read_from_comments() {
    for name in
        ["a", "a \\", "*/", "quoted \"", "};", "a // b, c", "two  spaces", "a: warps 1 to 2"]
    {
        let mut k = Builder::new("k", Target::SM_80, 64);
        k.shared(name, 16, 16);
        k.parameter::<U32>(name);
        k.parameter::<U32>(name);
        k.role(Role::warps(name, 0..1), |k| k.warp_sync());
        let program = k.finish().unwrap();
        assert_eq!(complaint(&program), None);
        let parsed = parse(&print(&program)).unwrap();
        assert_eq!(
            (&parsed.shared[0].name, &parsed.parameters[1].name),
            (&name.into(), &name.into())
        );
    }
}

#[test]
fn what_the_printer_does_not_write_is_refused() {
    let mut k = Builder::new("k", Target::SM_80, 64);
    k.warp_sync();
    let text = print(&k.finish().unwrap());
    let wrong = |from: &str, to: &str| {
        let error = parse(&text.replacen(from, to, 1)).unwrap_err();
        error.to_string()
    };
    assert_eq!(
        wrong("bar.warp.sync", "bar.ward.sync"),
        "line 9: there is no instruction `bar.ward.sync`"
    );
    assert_eq!(wrong("sm_80", "mm_80"), "line 2: there is no target `mm_80`");
    assert_eq!(wrong("ret;", ""), "line 10: ``, expected `;`");
    assert_eq!(wrong("0xFFFFFFFF", "1"), "line 9: understood as `bar.warp.sync 0xFFFFFFFF;`");
    assert_eq!(wrong("\tret", "\tmov.b32 %r0, %r1;\n\tret"), "line 10: there is no register `%r0`");
    assert_eq!(parse("").unwrap_err().line, 1);
}
