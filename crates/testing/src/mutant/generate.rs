//! Generates every mutant of a program, in the order of its statements.

use std::collections::HashMap;

use ptx::{
    BinaryOperation, Block, Instruction, Operand, Program, Register, Statement, StatementKind, Type,
};

use super::{Change, Kind, Mutant, value, weaken};

/// A possible change of a statement.
struct Mutation {
    operator: &'static str,
    detail: String,
    change: Change,
}

/// The mutation operator of branches.
pub(super) const BRANCH: &str = "branch";

/// Returns every mutant of a program.
pub fn every(program: &Program) -> Vec<Mutant> {
    let regions = Regions::of(program);
    let mut all = Vec::new();
    let (mut site, mut instructions) = (0, 0);
    program.visit(&mut |statement| {
        let is_instruction = matches!(statement.kind, StatementKind::Instruction(_));
        of_statement(program, &regions, statement, (site, instructions), &mut all);
        site += 1;
        instructions += is_instruction as usize;
    });
    all
}

fn of_statement(
    program: &Program,
    regions: &Regions,
    statement: &Statement,
    (site, next): (usize, usize),
    all: &mut Vec<Mutant>,
) {
    let barrier = regions.of_barrier(statement).map(|name| format!(" of {name}"));
    let barrier = barrier.unwrap_or_default();
    let mut add = |kind, instruction, list: Vec<Mutation>| {
        all.extend(list.into_iter().map(|Mutation { operator, detail, change }| Mutant {
            kind,
            operator,
            detail: detail + &barrier,
            place: statement.place,
            site,
            instruction,
            change,
        }));
    };
    match &statement.kind {
        StatementKind::Instruction(instruction) => {
            let [mut deleted, mut weaker, mut wrong] = [(); 3].map(|()| Mutations::of(program));
            if synchronises(instruction) {
                deleted.push("deleted", name(instruction), Change::default());
            }
            weaken::add(&mut weaker, instruction);
            value::add(&mut wrong, instruction);
            add(Kind::Delete, Some(next), deleted.all);
            add(Kind::Weaken, Some(next), weaker.all);
            add(Kind::Value, Some(next), wrong.all);
        }
        StatementKind::If { then, otherwise, .. } => {
            let [never, always] = [branch("never", otherwise), branch("always", then)];
            // Removing a branch that is never entered makes no difference.
            let inside = then.iter().any(|it| matches!(it.kind, StatementKind::Instruction(_)));
            add(Kind::Value, Some(next).filter(|_| inside), vec![never]);
            add(Kind::Value, None, vec![always]);
        }
        StatementKind::Loop { .. } | StatementKind::Break { .. } | StatementKind::Role { .. } => {}
    }
}

/// Returns whether an instruction synchronises, or initialises an mbarrier.
fn synchronises(instruction: &Instruction) -> bool {
    sim::mutate::synchronisation_kind(instruction).is_some()
        || matches!(instruction, Instruction::MbarrierInit { .. })
}

/// Returns the replacement of a branch by one of its sides, for all threads.
fn branch(when: &str, side: &Block) -> Mutation {
    let statements = side.iter().map(|statement| statement.kind.clone()).collect();
    let change = Change { statements, registers: Vec::new() };
    Mutation { operator: BRANCH, detail: format!("{when} taken"), change }
}

/// Returns the name of an instruction without its operands.
pub(super) fn name(instruction: &Instruction) -> String {
    let text = format!("{instruction:?}");
    match instruction {
        Instruction::Fence(_) => text,
        _ => text.split([' ', '(']).next().unwrap_or_default().to_owned(),
    }
}

/// The possible changes of one instruction.
pub(super) struct Mutations<'a> {
    program: &'a Program,
    all: Vec<Mutation>,
}

impl<'a> Mutations<'a> {
    fn of(program: &'a Program) -> Self {
        Mutations { program, all: Vec::new() }
    }

    pub(super) fn program(&self) -> &'a Program {
        self.program
    }

    pub(super) fn push(&mut self, operator: &'static str, detail: impl Into<String>, new: Change) {
        self.all.push(Mutation { operator, detail: detail.into(), change: new });
    }

    /// Adds the replacement by another instruction.
    pub(super) fn replace_with(
        &mut self,
        operator: &'static str,
        detail: impl Into<String>,
        new: Instruction,
    ) {
        self.push(operator, detail, Change::to(new));
    }

    /// Adds the replacement by an edited copy, if it differs.
    pub(super) fn edit(
        &mut self,
        operator: &'static str,
        detail: impl Into<String>,
        instruction: &Instruction,
        change: impl FnOnce(&mut Instruction),
    ) {
        let mut new = instruction.clone();
        change(&mut new);
        if new != *instruction {
            self.replace_with(operator, detail, new);
        }
    }

    /// Adds the replacement with one operand changed: a constant directly, a register by an
    /// additional instruction before it.
    pub(super) fn operand(
        &mut self,
        operator: &'static str,
        detail: impl Into<String>,
        instruction: &Instruction,
        (ty, operand): (Type, Operand),
        by: OperandChange,
        set: impl FnOnce(&mut Instruction, Operand),
    ) {
        let make = |operand: Operand| {
            let mut new = instruction.clone();
            set(&mut new, operand);
            new
        };
        let (operation, amount) = match by {
            OperandChange::Add(amount) => (BinaryOperation::Add, amount as u64),
            OperandChange::Xor(bits) => (BinaryOperation::Xor, bits),
        };
        let mask = if ty.bits() == 64 { u64::MAX } else { (1 << ty.bits()) - 1 };
        let change = match operand {
            Operand::Immediate(bits) => {
                let changed = match operation {
                    BinaryOperation::Xor => bits ^ amount,
                    _ => bits.wrapping_add(amount),
                };
                Change::to(make(Operand::Immediate(changed & mask)))
            }
            Operand::Register(register) => {
                let dst = Register(self.program.registers.len() as u32);
                let (a, b) = (register.into(), Operand::Immediate(amount & mask));
                let before = Instruction::Binary { operation, ty, dst, a, b };
                let statements = [before, make(dst.into())].map(StatementKind::Instruction);
                Change { statements: statements.into(), registers: vec![ty] }
            }
        };
        self.push(operator, detail, change);
    }
}

/// The region of shared memory that registers point into, as far as the program shows it.
struct Regions {
    names: HashMap<Register, String>,
}

impl Regions {
    fn of(program: &Program) -> Self {
        let mut names: HashMap<Register, String> = HashMap::new();
        program.visit(&mut |statement| {
            let StatementKind::Instruction(instruction) = &statement.kind else { return };
            let (dst, name) = match instruction {
                Instruction::SharedBase { dst, offset } => {
                    let here = |it: &&ptx::SharedRegion| {
                        (it.offset..it.offset + it.bytes).contains(offset)
                    };
                    (*dst, program.shared.iter().find(here).map(|it| it.name.clone()))
                }
                Instruction::Binary { dst, a, b, .. } => (*dst, of_operands(&names, &[*a, *b])),
                Instruction::MultiplyAdd { dst, a, b, c, .. } => {
                    (*dst, of_operands(&names, &[*a, *b, *c]))
                }
                Instruction::Move { dst, src } => (*dst, of_operands(&names, &[*src])),
                _ => return,
            };
            names.extend(name.map(|name| (dst, name)));
        });
        Regions { names }
    }

    /// Returns the name of the mbarrier that a statement uses.
    fn of_barrier(&self, statement: &Statement) -> Option<&str> {
        use Instruction as I;
        let StatementKind::Instruction(
            I::MbarrierInit { address, .. }
            | I::MbarrierArrive { address, .. }
            | I::MbarrierArriveExpect { address, .. }
            | I::MbarrierExpect { address, .. }
            | I::MbarrierWait { address, .. }
            | I::MbarrierTryWait { address, .. },
        ) = &statement.kind
        else {
            return None;
        };
        self.names.get(&address.base).map(String::as_str)
    }
}

fn of_operands(names: &HashMap<Register, String>, operands: &[Operand]) -> Option<String> {
    operands.iter().find_map(|operand| match operand {
        Operand::Register(register) => names.get(register).cloned(),
        Operand::Immediate(_) => None,
    })
}

/// The change of an operand.
#[derive(Clone, Copy)]
pub(super) enum OperandChange {
    Add(i64),
    Xor(u64),
}
