//! What some releases of NVIDIA's compiler have to be told, and others not.
//!
//! Compilers before that of CUDA 12.9 serialise every `wgmma` of a kernel (their
//! note C7515) where an accumulator is undefined before the first product into
//! it. Such a product takes its accumulator for zero by a predicate, so nothing
//! undefined is ever added; they do not see that. They are given zeros to begin
//! with. Later compilers see it, and would only schedule the rest differently
//! for them.

use std::borrow::Cow;

use super::print;
use crate::{Accumulate, Block, Instruction, Operand, Program, Register, Statement, StatementKind};

/// A release of NVIDIA's compiler, as far as it matters to the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Compiler {
    /// Of CUDA 12.9 and later.
    #[default]
    Current,
    /// Of CUDA 12.0 to 12.8.
    Older,
}

impl Compiler {
    /// The compiler of a release of CUDA: a toolkit's, or the one in the driver
    /// that supports it.
    pub const fn of_cuda(major: u32, minor: u32) -> Self {
        if major > 12 || (major == 12 && minor >= 9) { Compiler::Current } else { Compiler::Older }
    }

    /// The program as this compiler makes the best of it.
    pub fn adapt(self, program: &Program) -> Cow<'_, Program> {
        let undefined = match self {
            Compiler::Current => Vec::new(),
            Compiler::Older => undefined_accumulators(program),
        };
        if undefined.is_empty() {
            return Cow::Borrowed(program);
        }
        let mut program = program.clone();
        for accumulator in undefined {
            zero_before_use(&mut program.body, &accumulator);
        }
        Cow::Owned(program)
    }
}

/// The program as PTX text for one compiler; [`print()`] is for current ones.
pub fn print_for(program: &Program, compiler: Compiler) -> String {
    print(&compiler.adapt(program))
}

/// Accumulators whose first use is a product that a predicate may tell to begin anew.
fn undefined_accumulators(program: &Program) -> Vec<Vec<Register>> {
    let mut found: Vec<Vec<Register>> = Vec::new();
    let mut defined = vec![false; program.registers.len()];
    let type_of = |register| program.type_of(register);
    program.visit(&mut |statement| {
        let StatementKind::Instruction(instruction) = &statement.kind else { return };
        if let Instruction::Wgmma { d, accumulate: Accumulate::If(_), .. } = instruction
            && d.iter().any(|register| !defined[register.0 as usize])
        {
            found.push(d.clone());
        }
        instruction.operands(&type_of, &mut |_, operand, _| {
            if let Operand::Register(register) = operand {
                defined[register.0 as usize] = true;
            }
        });
    });
    found
}

/// Zeros before the loop with the first product: inside its role, and only on the
/// way that leads there.
fn zero_before_use(block: &mut Block, accumulator: &[Register]) {
    let Some(index) = block.iter().position(|statement| uses(statement, accumulator)) else {
        return;
    };
    let inner = match &mut block[index].kind {
        StatementKind::Role { body, .. } => Some(body),
        StatementKind::If { then, otherwise, .. } => {
            let has = |block: &Block| block.iter().any(|statement| uses(statement, accumulator));
            match (has(then), has(otherwise)) {
                (true, false) => Some(then),
                (false, true) => Some(otherwise),
                _ => None,
            }
        }
        _ => None,
    };
    if let Some(inner) = inner {
        return zero_before_use(inner, accumulator);
    }
    let place = block[index].place;
    let zero = |dst: &Register| {
        let src = Operand::Immediate(0);
        Statement { kind: StatementKind::Instruction(Instruction::Move { dst: *dst, src }), place }
    };
    block.splice(index..index, accumulator.iter().map(zero));
}

fn uses(statement: &Statement, accumulator: &[Register]) -> bool {
    match &statement.kind {
        StatementKind::Instruction(Instruction::Wgmma { d, .. }) => d == accumulator,
        kind => kind.blocks().flatten().any(|inner| uses(inner, accumulator)),
    }
}
