//! Lowering: from the tree of statements to flat code with jump targets.
//!
//! Done once per launch. Instructions stay as they are (the step functions match on them); control
//! flow becomes a few markers that the warp's stack of frames interprets, and registers get slots
//! in the register file of their width.

use ptx::{Access, Instruction, Operand, Program, Register, SourceLocation, StatementKind, Type};

/// One step of a warp.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// An instruction.
    Execute(Instruction),
    /// Splits the active lanes; the second side of the branch begins at `otherwise`.
    Branch { condition: u32, otherwise: usize, end: usize },
    /// Enters a role; `first..last` are the warps it is declared for.
    Role { member: u32, first: u32, last: u32, end: usize },
    /// The end of one side of a branch.
    SideEnd,
    /// The beginning of a loop.
    LoopBegin { end: usize },
    /// The end of a loop's body.
    LoopEnd { begin: usize },
    /// The lanes where the condition holds leave the innermost loop.
    Break { condition: u32 },
    /// The end of the program.
    Exit,
}

/// The registers that an instruction accesses when it executes, for the register checks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Touches {
    /// The registers it reads.
    pub(crate) reads: Box<[Register]>,
    /// The registers it writes.
    pub(crate) writes: Box<[Register]>,
}

/// A lowered program.
#[derive(Debug)]
pub(crate) struct Code {
    pub(crate) steps: Vec<Step>,
    pub(crate) places: Vec<Option<SourceLocation>>,
    pub(crate) touches: Vec<Touches>,
    /// The type of each register and its slot in the register file of its width.
    pub(crate) slots: Vec<(Type, u32)>,
    pub(crate) words: usize,
    pub(crate) wides: usize,
    pub(crate) predicates: usize,
}

impl Code {
    pub(crate) fn lower(program: &Program) -> Code {
        let (mut words, mut wides, mut predicates) = (0, 0, 0);
        let slots = (program.registers.iter())
            .map(|ty| {
                let file = match ty.bits() {
                    1 => &mut predicates,
                    64 => &mut wides,
                    _ => &mut words,
                };
                *file += 1;
                (*ty, *file as u32 - 1)
            })
            .collect();
        let mut code = Code {
            steps: Vec::new(),
            places: Vec::new(),
            touches: Vec::new(),
            slots,
            words,
            wides,
            predicates,
        };
        code.block(&program.body, program);
        code.push(Step::Exit, None);
        code
    }

    fn push(&mut self, step: Step, place: Option<SourceLocation>) -> usize {
        self.steps.push(step);
        self.places.push(place);
        self.touches.push(Touches::default());
        self.steps.len() - 1
    }

    /// Returns the indices of the steps that are instructions.
    pub(crate) fn instructions(&self) -> impl Iterator<Item = usize> {
        let steps = self.steps.iter().enumerate();
        steps.filter(|(_, step)| matches!(step, Step::Execute(_))).map(|(index, _)| index)
    }

    fn predicate(&self, register: Register) -> u32 {
        self.slots[register.0 as usize].1
    }

    fn block(&mut self, block: &ptx::Block, program: &Program) {
        for statement in block {
            let place = Some(statement.place);
            match &statement.kind {
                StatementKind::Instruction(instruction) => {
                    let touches = touches(instruction, program);
                    let at = self.push(Step::Execute(instruction.clone()), place);
                    self.touches[at] = touches;
                }
                StatementKind::If { condition, then, otherwise } => {
                    let condition = self.predicate(*condition);
                    let at = self.push(Step::Exit, place);
                    self.block(then, program);
                    self.push(Step::SideEnd, place);
                    let second = self.steps.len();
                    self.block(otherwise, program);
                    self.push(Step::SideEnd, place);
                    let end = self.steps.len();
                    self.steps[at] = Step::Branch { condition, otherwise: second, end };
                }
                StatementKind::Role { warps, member, body, .. } => {
                    let member = self.predicate(*member);
                    let at = self.push(Step::Exit, place);
                    self.block(body, program);
                    self.push(Step::SideEnd, place);
                    let end = self.steps.len();
                    self.steps[at] =
                        Step::Role { member, first: warps.start, last: warps.end, end };
                }
                StatementKind::Loop { body } => {
                    let begin = self.push(Step::Exit, place);
                    self.block(body, program);
                    self.push(Step::LoopEnd { begin: begin + 1 }, place);
                    let end = self.steps.len();
                    self.steps[begin] = Step::LoopBegin { end };
                }
                StatementKind::Break { condition } => {
                    let condition = self.predicate(*condition);
                    self.push(Step::Break { condition }, place);
                }
            }
        }
    }
}

fn touches(instruction: &Instruction, program: &Program) -> Touches {
    let (mut reads, mut writes) = (Vec::new(), Vec::new());
    instruction.operands(&|register| program.type_of(register), &mut |access, operand, _| {
        if let Operand::Register(register) = operand {
            match access {
                Access::Read => reads.push(register),
                Access::Write => writes.push(register),
                Access::AsyncRead | Access::AsyncWrite | Access::AsyncUpdate => {}
            }
        }
    });
    Touches { reads: reads.into(), writes: writes.into() }
}
