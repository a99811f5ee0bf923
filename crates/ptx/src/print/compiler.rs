//! Adaptations of a program to older releases of NVIDIA's compiler.
//!
//! Compilers before CUDA 12.9 serialise every `wgmma` of a kernel (their note C7515) if an
//! accumulator is undefined before the first product into it. A predicate makes that product
//! overwrite its accumulator, so nothing undefined is ever added, but those compilers do not see
//! it. For them, the accumulators are set to zero first. Newer compilers do see it, and the zeros
//! would only make them schedule the rest differently.

use std::borrow::Cow;

use super::print;
use crate::{Accumulate, Block, Instruction, Operand, Program, Register, Statement, StatementKind};

/// A range of releases of NVIDIA's compiler, as far as the printed text depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Compiler {
    /// The compiler of CUDA 12.9 and later.
    #[default]
    Current,
    /// The compiler of CUDA 12.0 to 12.8.
    Older,
}

impl Compiler {
    /// Returns the compiler of a release of CUDA: that of its toolkit, and the one in the driver
    /// that supports it.
    pub const fn of_cuda(major: u32, minor: u32) -> Self {
        if major > 12 || (major == 12 && minor >= 9) { Compiler::Current } else { Compiler::Older }
    }

    /// Returns the program adapted to this compiler.
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

/// Prints a program as PTX for one compiler; [`print()`] is for current ones.
pub fn print_for(program: &Program, compiler: Compiler) -> String {
    print(&compiler.adapt(program))
}

/// Returns the accumulators whose first use is a product with a predicate that decides whether it
/// adds.
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

/// Sets an accumulator to zero before the statement, usually a loop, with its first product; inside
/// the role and the branch that contain it.
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
