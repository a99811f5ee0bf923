//! The validator. Every program that it accepts, the assembler accepts.
//!
//! A program is valid when
//!
//! - *launch*: its name is an identifier, other names are printable ASCII, its
//!   target exists, its block has 1 to 1024 threads in whole warps, its cluster
//!   1 to 8 blocks, its parameters fit 4 KiB, its shared memory fits the target
//!   and each region is aligned and apart from the others;
//! - *target*: it has every capability that an instruction needs;
//! - *types*: every operand is a register of the program with the type the
//!   instruction wants there, or a constant where one may stand and that fits;
//! - *form*: the combination of modifiers exists: operations for the type,
//!   vector widths, matrix shapes, tensor ranks, copy sizes, barrier numbers,
//!   register budgets;
//! - *assignment*: every register is written before it is read, on every path;
//! - *flow*: breaks stand in loops, roles name whole warps of the block (whole
//!   warpgroups if they change their register budget), and the budgets of all
//!   roles together fit the multiprocessor;
//! - *products*: a `wgmma` follows a fence that comes after the last other
//!   touch of its registers; its accumulator and its register operand are not
//!   touched until its group has been waited for, on any path; every group is
//!   waited for before the program ends;
//! - *copies*: tensor copies name as many coordinates as their map has
//!   dimensions, and the boxes of tensor maps are ones the hardware takes.
//!
//! It does not check divergence, races or barrier counts; the simulator does.

mod error;
mod flow;
mod form;
mod launch;

pub use error::{Fault, ValidationError};

use crate::{Instruction, Operand, Program, StatementKind};

/// Checks a program and returns the first fault found.
pub fn validate(program: &Program) -> Result<(), ValidationError> {
    launch::check(program)?;
    let mut fault = None;
    program.visit(&mut |statement| {
        if fault.is_some() {
            return;
        }
        let result = match &statement.kind {
            StatementKind::Instruction(instruction) => instruction_fault(program, instruction),
            StatementKind::If { condition, .. } | StatementKind::Break { condition } => {
                predicate_fault(program, *condition)
            }
            StatementKind::Role { name, member, warps, body } => predicate_fault(program, *member)
                .or_else(|| launch::role_fault(program, name, warps, body)),
            StatementKind::Loop { .. } => None,
        };
        fault = result.map(|fault| ValidationError::at(fault, statement.place));
    });
    match fault {
        Some(invalid) => Err(invalid),
        None => flow::check(program),
    }
}

fn predicate_fault(program: &Program, register: crate::Register) -> Option<Fault> {
    let expected = crate::Expected::Type(crate::Type::Pred);
    operand_fault(program, Operand::Register(register), expected)
}

fn instruction_fault(program: &Program, instruction: &Instruction) -> Option<Fault> {
    // Operands come first, since all later checks need the types of registers that exist.
    let mut fault = None;
    let type_of = |register: crate::Register| {
        program.registers.get(register.0 as usize).copied().unwrap_or(crate::Type::U32)
    };
    instruction.operands(&type_of, &mut |_, operand, expected| {
        if fault.is_none() {
            fault = operand_fault(program, operand, expected);
        }
    });
    if fault.is_some() {
        return fault;
    }
    let requirement = instruction.requirement(&type_of);
    if let Some(capability) = requirement.capability
        && !program.target.has(capability)
    {
        return Some(Fault::Capability { capability, target: program.target });
    }
    form::fault(program, instruction)
}

fn operand_fault(program: &Program, operand: Operand, expected: crate::Expected) -> Option<Fault> {
    match operand {
        Operand::Register(register) => match program.registers.get(register.0 as usize) {
            None => Some(Fault::UnknownRegister { register }),
            Some(found) if !expected.accepts(*found) => {
                Some(Fault::Type { register, found: *found, expected })
            }
            Some(_) => None,
        },
        Operand::Immediate(bits) => {
            let width = match expected {
                crate::Expected::Type(ty) if ty.has_immediates() => ty.bits(),
                crate::Expected::Bits(bits @ (32 | 64)) => bits,
                other => return Some(Fault::NoImmediate { expected: other }),
            };
            (width < 64 && bits >> width != 0).then_some(Fault::ImmediateRange { bits, width })
        }
    }
}
