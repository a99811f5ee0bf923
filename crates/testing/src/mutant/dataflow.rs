//! Mutants that provably compute the same as the original for every input, because nothing reads
//! the changed bits, or because the inputs never have the bits that would make a difference.
//!
//! Two dataflow analyses track the bits of every register at every statement. Backwards
//! ([`DemandedBits`]): which bits are read later? Not those that are overwritten first, and not the
//! lowest bits of a thread index that is divided down to a group index. Forwards
//! ([`PossibleBits`]): which bits can be set? Only the lowest five of a lane index, and none of the
//! index of a pipeline's first stage.

use std::collections::HashSet;

use ptx::{
    Access, BinaryOperation, Block, Instruction, Operand, Program, Register, SpecialRegister,
    StatementKind, Type,
};
use sim::mutate::{Effect, effect};

use super::generate::BRANCH;
use super::{Equivalent, Kind, Mutant};

/// The changed result is never read.
const UNREAD: Equivalent =
    rule("nobody reads what it computes: the kernel asks for more than it needs there");

/// The change has no effect on any possible input.
const SAME_BITS: Equivalent =
    rule("for every number that comes in, the same comes out: the bits that differ are never set");

const fn rule(reason: &'static str) -> Equivalent {
    let [kernel, change, file, line] = [""; 4];
    Equivalent { kernel, kind: Kind::Value, change, file, line, at_most: usize::MAX, reason }
}

/// The results of the analyses of a program.
pub(super) struct Dataflow {
    instructions: Vec<Instruction>,
    /// For each instruction, the bits of its result that are read later; all bits if it does more
    /// than write one register.
    read: Vec<u64>,
    /// For each instruction, the bits of its first two sources that can be set, for the
    /// instructions that the rules below handle.
    sources: Vec<[u64; 2]>,
}

impl Dataflow {
    pub(super) fn of(program: &Program) -> Self {
        let mut instructions = Vec::new();
        program.visit(&mut |statement| {
            if let StatementKind::Instruction(instruction) = &statement.kind {
                instructions.push(instruction.clone());
            }
        });
        let nothing = || Bits(vec![0; program.registers.len()]);
        let mut possible =
            PossibleBits { program, sources: vec![[u64::MAX; 2]; instructions.len()] };
        possible.block(&program.body, 0, &mut nothing(), &mut None);
        let PossibleBits { sources, .. } = possible;
        let bases = bases(program, &instructions);
        let read = vec![0; instructions.len()];
        let mut demand = DemandedBits { program, sources: &sources, bases, read };
        demand.block(&program.body, 0, &mut nothing(), &nothing());
        Dataflow { instructions, read: demand.read, sources }
    }

    /// Returns why a mutant computes the same, if the program shows it.
    pub(super) fn reason(&self, mutant: &Mutant) -> Option<&'static Equivalent> {
        let is_branch = mutant.operator == BRANCH;
        let index = mutant.instruction.filter(|_| mutant.kind == Kind::Value && !is_branch)?;
        if self.read[index] == 0 {
            return Some(&UNREAD);
        }
        match mutant.change.statements.as_slice() {
            [StatementKind::Instruction(changed)] => {
                let (sources, read) = (self.sources[index], self.read[index]);
                let same = same(&self.instructions[index], changed, sources, read);
                same.then_some(&SAME_BITS)
            }
            _ => None,
        }
    }
}

/// Returns whether two instructions that differ in a constant give the same result for all inputs.
/// `possible` are the bits of their sources that can be set, `read` the bits of the result that are
/// read.
fn same(original: &Instruction, changed: &Instruction, possible: [u64; 2], read: u64) -> bool {
    use Instruction as I;
    let [first, second] = possible;
    match (original, changed) {
        (
            I::Binary { operation, ty, a, b: Operand::Immediate(b), .. },
            I::Binary { operation: other, a: same, b: Operand::Immediate(c), .. },
        ) if operation == other && a == same && is_unsigned(*ty) => {
            let small = *b.min(c);
            match operation {
                BinaryOperation::And => first & (b ^ c) & read == 0,
                BinaryOperation::ShiftRight => small < 64 && first >> small == 0,
                BinaryOperation::ShiftLeft => first == 0,
                // The product changes by less than the lowest bit that is read.
                BinaryOperation::Multiply => {
                    let more = first.checked_mul(c.wrapping_sub(*b));
                    first == 0 || b & unread(read) == 0 && more.is_some_and(|it| it <= unread(read))
                }
                // The summands differ only below the lowest bit that is read, and nothing carries.
                BinaryOperation::Add => first & unread(read) == 0 && (b ^ c) & !unread(read) == 0,
                BinaryOperation::Divide | BinaryOperation::Remainder => first < small,
                BinaryOperation::Minimum => first <= small,
                _ => false,
            }
        }
        // Adding and subtracting zero are the same.
        (
            I::Binary { operation: BinaryOperation::Add | BinaryOperation::Subtract, a, b, .. },
            I::Binary {
                operation: BinaryOperation::Add | BinaryOperation::Subtract,
                a: c,
                b: d,
                ..
            },
        ) => a == c && b == d && *b == Operand::Immediate(0),
        (I::MultiplyAdd { ty, a, b, c, .. }, I::MultiplyAdd { a: d, b: e, c: f, .. })
            if is_unsigned(*ty) && c == f =>
        {
            a == d && first == 0 || b == e && second == 0
        }
        (I::MultiplyWide { ty, a, b, .. }, I::MultiplyWide { a: d, b: e, .. })
            if is_unsigned(*ty) =>
        {
            a == d && first == 0 || b == e && second == 0
        }
        _ => false,
    }
}

/// A set of bits for every register: those that are read later, or those that can be set.
#[derive(Clone, PartialEq)]
struct Bits(Vec<u64>);

impl Bits {
    fn with(&mut self, other: &Bits) {
        self.0.iter_mut().zip(&other.0).for_each(|(here, there)| *here |= there);
    }

    fn of(&mut self, register: Register) -> &mut u64 {
        &mut self.0[register.0 as usize]
    }
}

struct DemandedBits<'a> {
    program: &'a Program,
    /// For each instruction, the bits of its sources that can be set.
    sources: &'a [[u64; 2]],
    /// The registers that only ever hold the base of a region of shared memory.
    bases: HashSet<Register>,
    read: Vec<u64>,
}

impl DemandedBits<'_> {
    /// Computes what is read before a block from what is read after it. `first` is the index of its
    /// first instruction; `exit` is what is read after the innermost loop.
    fn block(&mut self, block: &Block, first: usize, bits: &mut Bits, exit: &Bits) {
        let mut end = first + block.iter().map(|it| instructions(&it.kind)).sum::<usize>();
        for statement in block.iter().rev() {
            let begin = end - instructions(&statement.kind);
            match &statement.kind {
                StatementKind::Instruction(instruction) => {
                    self.instruction(instruction, begin, bits)
                }
                StatementKind::If { condition, then, otherwise } => {
                    let mut other = bits.clone();
                    self.block(then, begin, bits, exit);
                    let then: usize = then.iter().map(|it| instructions(&it.kind)).sum();
                    self.block(otherwise, begin + then, &mut other, exit);
                    bits.with(&other);
                    *bits.of(*condition) = u64::MAX;
                }
                StatementKind::Role { member, body, .. } => {
                    let others = bits.clone();
                    self.block(body, begin, bits, exit);
                    bits.with(&others);
                    *bits.of(*member) = u64::MAX;
                }
                StatementKind::Loop { body } => {
                    let behind = bits.clone();
                    let mut head = Bits(vec![0; behind.0.len()]);
                    loop {
                        let mut around = head.clone();
                        self.block(body, begin, &mut around, &behind);
                        around.with(&head);
                        if around == head {
                            break;
                        }
                        head = around;
                    }
                    *bits = head;
                }
                StatementKind::Break { condition } => {
                    bits.with(exit);
                    *bits.of(*condition) = u64::MAX;
                }
            }
            end = begin;
        }
    }

    /// Returns the register whose bits below the lowest bit read do not matter, because it is added
    /// to a shared-memory base that has none of those bits, so that nothing carries.
    fn beyond_units(&self, instruction: &Instruction, index: usize, read: u64) -> Option<Register> {
        let Instruction::Binary { operation: BinaryOperation::Add, ty, a, b, .. } = instruction
        else {
            return None;
        };
        let [first, second] = self.sources[index];
        match (a, b) {
            _ if !is_unsigned(*ty) => None,
            (base, Operand::Register(added)) if self.is_base(base) && first & unread(read) == 0 => {
                Some(*added)
            }
            (Operand::Register(added), base)
                if self.is_base(base) && second & unread(read) == 0 =>
            {
                Some(*added)
            }
            _ => None,
        }
    }

    fn is_base(&self, operand: &Operand) -> bool {
        match operand {
            Operand::Immediate(_) => true,
            Operand::Register(register) => self.bases.contains(register),
        }
    }

    fn instruction(&mut self, instruction: &Instruction, index: usize, bits: &mut Bits) {
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        let type_of = |register: Register| self.program.type_of(register);
        instruction.operands(&type_of, &mut |access, operand, _| {
            let Operand::Register(register) = operand else { return };
            match access {
                Access::Write => writes.push(register),
                // A register that is written asynchronously still counts as read: its old value is
                // not dead at the issue.
                Access::Read | Access::AsyncRead | Access::AsyncWrite | Access::AsyncUpdate => {
                    reads.push(register);
                }
            }
        });
        let only_writes = effect(instruction) == Effect::None;
        let read = match writes.as_slice() {
            [one] if only_writes => *bits.of(*one),
            all if only_writes && all.iter().all(|it| *bits.of(*it) == 0) => 0,
            _ => u64::MAX,
        };
        self.read[index] |= read;
        if read == 0 {
            return;
        }
        writes.iter().for_each(|it| *bits.of(*it) = 0);
        let beyond = self.beyond_units(instruction, index, read);
        for register in reads {
            let units = if Some(register) == beyond { !unread(read) } else { u64::MAX };
            *bits.of(register) |= demanded(self.program, instruction, read) & units;
        }
    }
}

fn bases(program: &Program, instructions: &[Instruction]) -> HashSet<Register> {
    let mut bases = HashSet::new();
    let mut others = HashSet::new();
    for instruction in instructions {
        let is_base = matches!(instruction, Instruction::SharedBase { .. });
        let type_of = |register: Register| program.type_of(register);
        instruction.operands(&type_of, &mut |access, operand, _| {
            if let (Access::Write, Operand::Register(register)) = (access, operand) {
                if is_base { &mut bases } else { &mut others }.insert(register);
            }
        });
    }
    &bases - &others
}

/// Returns the bits below the lowest one that is read.
fn unread(read: u64) -> u64 {
    (read & read.wrapping_neg()).wrapping_sub(1)
}

/// Returns the bits of its registers that an instruction reads, given the bits of its result that
/// are read.
fn demanded(program: &Program, instruction: &Instruction, read: u64) -> u64 {
    use BinaryOperation as B;
    use Instruction as I;
    match instruction {
        I::Move { .. } => read,
        I::Convert { dst, src } => {
            let types = [*dst, *src].map(|it| program.type_of(it));
            if types.into_iter().all(is_unsigned) { read } else { u64::MAX }
        }
        I::Binary { operation, ty, b, .. } if is_unsigned(*ty) => match (operation, b) {
            (B::And, Operand::Immediate(mask)) => read & mask,
            (B::ShiftRight, Operand::Immediate(by)) => read.checked_shl(*by as u32).unwrap_or(0),
            (B::ShiftLeft, Operand::Immediate(by)) => read.checked_shr(*by as u32).unwrap_or(0),
            (B::And | B::Or | B::Xor, _) => read,
            // Carries of sums and products only go upwards.
            (B::Add | B::Subtract | B::Multiply, _) => up_to(read),
            _ => u64::MAX,
        },
        I::MultiplyAdd { ty, .. } if is_unsigned(*ty) => up_to(read),
        _ => u64::MAX,
    }
}

fn instructions(statement: &StatementKind) -> usize {
    match statement {
        StatementKind::Instruction(_) => 1,
        other => other.blocks().flatten().map(|it| instructions(&it.kind)).sum(),
    }
}

fn is_unsigned(ty: Type) -> bool {
    matches!(ty, Type::U32 | Type::U64)
}

struct PossibleBits<'a> {
    program: &'a Program,
    sources: Vec<[u64; 2]>,
}

impl PossibleBits<'_> {
    /// Computes the possible bits after a block from those before it. `first` is the index of its
    /// first instruction; `exits` collects what leaves the innermost loop.
    fn block(&mut self, block: &Block, first: usize, bits: &mut Bits, exits: &mut Option<Bits>) {
        let mut begin = first;
        for statement in block {
            match &statement.kind {
                StatementKind::Instruction(instruction) => {
                    self.instruction(instruction, begin, bits);
                }
                StatementKind::If { then, otherwise, .. } => {
                    let mut other = bits.clone();
                    self.block(then, begin, bits, exits);
                    let then: usize = then.iter().map(|it| instructions(&it.kind)).sum();
                    self.block(otherwise, begin + then, &mut other, exits);
                    bits.with(&other);
                }
                StatementKind::Role { body, .. } => {
                    let others = bits.clone();
                    self.block(body, begin, bits, exits);
                    bits.with(&others);
                }
                StatementKind::Loop { body } => *bits = self.repeated(body, begin, bits.clone()),
                StatementKind::Break { .. } => {
                    exits.get_or_insert_with(|| bits.clone()).with(bits);
                }
            }
            begin += instructions(&statement.kind);
        }
    }

    /// Returns the possible bits after a loop.
    fn repeated(&mut self, body: &Block, begin: usize, mut head: Bits) -> Bits {
        let mut rounds = 0;
        loop {
            let (mut around, mut exits) = (head.clone(), None);
            self.block(body, begin, &mut around, &mut exits);
            around.with(&head);
            if around == head {
                return exits.unwrap_or(head);
            }
            rounds += 1;
            // Bits that still grow are widened to all bits, so that the analysis ends.
            if rounds > 3 {
                let grown = around.0.iter_mut().zip(&head.0).filter(|(now, before)| now != before);
                grown.for_each(|(now, _)| *now = u64::MAX);
            }
            head = around;
        }
    }

    fn instruction(&mut self, instruction: &Instruction, index: usize, bits: &mut Bits) {
        let of = |operand: &Operand| bits_of(&bits.0, *operand);
        self.sources[index] = match instruction {
            Instruction::Binary { a, b, .. }
            | Instruction::MultiplyWide { a, b, .. }
            | Instruction::MultiplyAdd { a, b, .. } => [of(a), of(b)],
            _ => [u64::MAX; 2],
        };
        let type_of = |register: Register| self.program.type_of(register);
        let result = result_bits(self.program, instruction, &bits.0).unwrap_or(u64::MAX);
        instruction.operands(&type_of, &mut |access, operand, _| {
            let Operand::Register(register) = operand else { return };
            let width = type_of(register).bits();
            let all = if width >= 64 { u64::MAX } else { (1 << width) - 1 };
            match access {
                Access::Write => bits.0[register.0 as usize] = result & all,
                Access::AsyncWrite | Access::AsyncUpdate => bits.0[register.0 as usize] = all,
                Access::Read | Access::AsyncRead => {}
            }
        });
    }
}

/// Returns the bits that the result of an instruction can have, where something is known.
fn result_bits(program: &Program, instruction: &Instruction, possible: &[u64]) -> Option<u64> {
    use BinaryOperation as B;
    use Instruction as I;
    let bits = |operand: &Operand| bits_of(possible, *operand);
    Some(match instruction {
        I::Move { src, .. } => bits(src),
        I::Convert { dst, src } => {
            let types = [*dst, *src].map(|it| program.type_of(it));
            return types.iter().all(|it| is_unsigned(*it)).then(|| possible[src.0 as usize]);
        }
        I::Compare { .. } => 1,
        I::Select { a, b, .. } => bits(a) | bits(b),
        I::Shuffle { dst, valid: None, src, .. } if dst != src => possible[src.0 as usize],
        // Shared memory is aligned to 16 bytes.
        I::SharedBase { offset, .. } => !15 | u64::from(*offset) & 15,
        I::ReadSpecial { special: SpecialRegister::Lane, .. } => 31,
        I::ReadSpecial { special: SpecialRegister::Thread(_), .. } => {
            up_to(u64::from(program.threads.saturating_sub(1)))
        }
        I::Binary { operation, ty, a, b, .. } if is_unsigned(*ty) => match (operation, b) {
            (B::And, b) => bits(a) & bits(b),
            (B::Or | B::Xor, b) => bits(a) | bits(b),
            (B::Add, b) => sum(bits(a), bits(b)),
            (B::Multiply, b) => product(bits(a), bits(b)),
            (B::Minimum, b) => up_to(bits(a).min(bits(b))),
            (B::Maximum, b) => up_to(bits(a).max(bits(b))),
            (B::ShiftRight, Operand::Immediate(by)) => bits(a).checked_shr(*by as u32).unwrap_or(0),
            (B::ShiftLeft, Operand::Immediate(by)) => bits(a).checked_shl(*by as u32).unwrap_or(0),
            (B::Divide, Operand::Immediate(by)) if *by > 0 => up_to(bits(a) / by),
            (B::Remainder, Operand::Immediate(by)) if *by > 0 => up_to(bits(a).min(by - 1)),
            _ => return None,
        },
        I::MultiplyAdd { ty, a, b, c, .. } if is_unsigned(*ty) => {
            sum(product(bits(a), bits(b)), bits(c))
        }
        I::MultiplyWide { ty: Type::U32, a, b, .. } => product(bits(a), bits(b)),
        _ => return None,
    })
}

fn bits_of(possible: &[u64], operand: Operand) -> u64 {
    match operand {
        Operand::Register(register) => possible[register.0 as usize],
        Operand::Immediate(bits) => bits,
    }
}

/// Returns every bit that a number up to `most` can have.
fn up_to(most: u64) -> u64 {
    u64::MAX.checked_shr(most.leading_zeros()).unwrap_or(0)
}

fn sum(a: u64, b: u64) -> u64 {
    if a & b == 0 { a | b } else { a.checked_add(b).map_or(u64::MAX, |most| up_to(most) | a | b) }
}

fn product(a: u64, b: u64) -> u64 {
    if a == 0 || b == 0 { 0 } else { a.checked_mul(b).map_or(u64::MAX, up_to) }
}

#[cfg(test)]
mod tests {
    use ptx::{Builder, Expression, Target, U32, U64};

    use super::*;
    use crate::mutant::every;

    /// Returns a kernel with a number that nothing reads, one that is overwritten, and bits that
    /// are never set.
    fn program() -> Program {
        let mut k = Builder::new("idle", Target::SM_80, 64);
        let out = k.parameter::<ptx::GlobalAddress>("out");
        let lane = k.lane();
        let _unread = k.eval(lane * 3);
        let overwritten = k.variable::<U32>(7);
        k.set(overwritten, lane + 5);
        let none = k.eval(lane / 32);
        let value = k.eval(overwritten + none * 100 + lane % 64);
        let kept = k.variable::<U32>(9);
        k.if_(lane.less(4), |k| k.set(kept, value));
        k.store(out + (lane * 4).convert::<U64>(), kept);
        k.finish().unwrap()
    }

    #[test]
    fn what_cannot_show_is_found_and_nothing_else() {
        let program = program();
        let dataflow = Dataflow::of(&program);
        let of = |reason: &Equivalent| -> Vec<String> {
            let all = every(&program);
            let found = all.iter().filter(|it| dataflow.reason(it).is_some_and(|it| it == reason));
            found.map(|it| format!("{}: {}", it.operator, it.detail)).collect()
        };
        assert_eq!(
            of(&UNREAD),
            [
                "constant: Binary 0x3 to 0x4",
                "constant: Binary 0x3 to 0x2",
                "constant: Move 0x7 to 0x8",
                "constant: Move 0x7 to 0x6"
            ]
        );
        let same = of(&SAME_BITS);
        assert!(same.contains(&"constant: Binary 0x5 to 0x6".to_owned()), "{same:?}");
        assert!(same.contains(&"mask: Binary 0x3f to 0x1f".to_owned()), "{same:?}");
        assert!(!same.contains(&"mask: Binary 0x3f to 0x3e".to_owned()), "{same:?}");
        assert!(!same.iter().any(|it| it.contains("Move 0x9")), "{same:?}");
    }

    /// Constants are compared where the other operand is the same one only.
    #[test]
    fn both_operands_are_compared() {
        let of = |operation: BinaryOperation, a: u64, b: u64| {
            let [a, b] = [a, b].map(Operand::Immediate);
            Instruction::Binary { operation, ty: Type::U32, dst: Register(0), a, b }
        };
        let same = |operation, [a, b]: [u64; 2], [c, d]: [u64; 2], read| {
            same(&of(operation, a, b), &of(operation, c, d), [a, b], read)
        };
        use BinaryOperation::{Add, And, Multiply};
        for operation in [Add, And, Multiply] {
            assert!(!same(operation, [6, 3], [7, 3], u64::MAX), "{operation:?}");
        }
        assert!(same(And, [6, 3], [6, 2], u64::MAX) && !same(And, [6, 3], [6, 1], u64::MAX));
        // Only bits from the third on are read: 8 + 5 and 8 + 7 have the same, 6 + 5 and 6 + 7 not.
        assert!(same(Add, [8, 5], [8, 7], !3) && !same(Add, [6, 5], [6, 7], !3));
        assert!(!same(Add, [8, 5], [8, 9], !3) && !same(Add, [8, 5], [8, 7], !1));
    }
}
