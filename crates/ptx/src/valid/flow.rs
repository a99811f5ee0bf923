//! Checks along the paths of a program: every register is written before it is read, and the
//! registers of `wgmma`s in flight are left alone.
//!
//! One abstract interpretation does both. It walks the tree of statements with a [`State`], merges
//! states where paths meet, and repeats loops until the state at their head no longer changes.

use std::collections::BTreeSet;

use super::error::{Fault, ValidationError};
use crate::{
    Access, Accumulate, Block, Instruction, Operand, Program, Register, SourceLocation,
    StatementKind,
};

pub(super) fn check(program: &Program) -> Result<(), ValidationError> {
    let mut walk = Walk { program, breaks: Vec::new() };
    let mut state = State::new(program.registers.len());
    walk.block(&program.body, &mut state)?;
    if let Some(issued) = state.open.first().map(|product| product.issued) {
        return Err(ValidationError::at(Fault::Uncommitted { issued }, issued));
    }
    if let Some(product) = state.groups.iter().flatten().next() {
        let issued = product.issued;
        return Err(ValidationError::at(Fault::NeverWaited { issued }, issued));
    }
    Ok(())
}

/// The number of groups that are told apart: a wait can leave at most 7 in flight, and all older
/// groups are handled as one.
const MAX_GROUPS: usize = 8;

/// The facts known at a point of the program.
#[derive(Clone)]
struct State {
    /// The registers that every path has written.
    assigned: RegisterSet,
    /// The registers that other instructions may have touched since the last `wgmma.fence`.
    touched: RegisterSet,
    /// The products that were issued and not yet committed.
    open: Vec<Product>,
    /// The committed groups that may be in flight, oldest first.
    groups: Vec<Vec<Product>>,
}

#[derive(Clone, PartialEq, Eq)]
struct Product {
    registers: BTreeSet<Register>,
    /// The accumulator, to which a following product may add without a wait.
    accumulator: Vec<Register>,
    issued: SourceLocation,
}

impl State {
    fn new(registers: usize) -> Self {
        State {
            assigned: RegisterSet::new(registers),
            touched: RegisterSet::new(registers),
            open: Vec::new(),
            groups: Vec::new(),
        }
    }

    /// Merges the state of another path: registers that both have written, and registers and
    /// products that either may have touched or left in flight. Groups are matched from the newest
    /// on, as waits count them.
    fn meet(&mut self, other: &State) {
        self.assigned.intersect(&other.assigned);
        self.touched.unite(&other.touched);
        add_products(&mut self.open, &other.open);
        let missing = other.groups.len().saturating_sub(self.groups.len());
        self.groups.splice(0..0, std::iter::repeat_n(Vec::new(), missing));
        let first = self.groups.len() - other.groups.len();
        for (mine, theirs) in self.groups[first..].iter_mut().zip(&other.groups) {
            add_products(mine, theirs);
        }
    }

    /// Merges the oldest groups, which no wait tells apart, so that a loop that commits one more
    /// group in each iteration reaches a fixed point.
    fn join_oldest(&mut self) {
        while self.groups.len() > MAX_GROUPS {
            let oldest = self.groups.remove(0);
            add_products(&mut self.groups[0], &oldest);
        }
    }

    fn same(&self, other: &State) -> bool {
        self.assigned.0 == other.assigned.0
            && self.touched.0 == other.touched.0
            && self.open == other.open
            && self.groups == other.groups
    }

    fn in_flight(&self) -> impl Iterator<Item = &Product> {
        self.groups.iter().flatten().chain(&self.open)
    }
}

struct Walk<'a> {
    program: &'a Program,
    /// The states at the breaks of the enclosing loops, innermost last.
    breaks: Vec<Vec<State>>,
}

impl Walk<'_> {
    fn block(&mut self, block: &Block, state: &mut State) -> Result<(), ValidationError> {
        for statement in block {
            let place = statement.place;
            match &statement.kind {
                StatementKind::Instruction(instruction) => {
                    self.instruction(instruction, state, place)?;
                }
                StatementKind::If { condition, then, otherwise } => {
                    self.read(*condition, state, place)?;
                    let mut other = state.clone();
                    self.block(then, state)?;
                    self.block(otherwise, &mut other)?;
                    state.meet(&other);
                }
                StatementKind::Role { member, body, .. } => {
                    self.read(*member, state, place)?;
                    let before = state.clone();
                    self.block(body, state)?;
                    state.meet(&before);
                }
                StatementKind::Loop { body } => self.repeat(body, state)?,
                StatementKind::Break { condition } => {
                    self.read(*condition, state, place)?;
                    match self.breaks.last_mut() {
                        Some(states) => states.push(state.clone()),
                        None => return Err(ValidationError::at(Fault::BreakOutsideLoop, place)),
                    }
                }
            }
        }
        Ok(())
    }

    /// Walks a loop until the state at its head, merged with the state at the end of its body, no
    /// longer changes.
    fn repeat(&mut self, body: &Block, state: &mut State) -> Result<(), ValidationError> {
        loop {
            let head = state.clone();
            self.breaks.push(Vec::new());
            self.block(body, state)?;
            let breaks = self.breaks.pop().expect("pushed above");
            let mut again = head.clone();
            again.meet(state);
            if !again.same(&head) {
                *state = again;
                continue;
            }
            // Execution continues after the loop only from its breaks; a loop without any never
            // ends.
            let mut breaks = breaks.into_iter();
            if let Some(mut first) = breaks.next() {
                for other in breaks {
                    first.meet(&other);
                }
                *state = first;
            }
            return Ok(());
        }
    }

    fn read(
        &self,
        register: Register,
        state: &mut State,
        place: SourceLocation,
    ) -> Result<(), ValidationError> {
        let ty = self.program.type_of(register);
        if !state.assigned.has(register) {
            return Err(ValidationError::at(Fault::Unassigned { register, ty }, place));
        }
        state.touched.add(register);
        Ok(())
    }

    fn instruction(
        &self,
        instruction: &Instruction,
        state: &mut State,
        place: SourceLocation,
    ) -> Result<(), ValidationError> {
        let mut accesses = Vec::new();
        let type_of = |register| self.program.type_of(register);
        instruction.operands(&type_of, &mut |access, operand, _| {
            if let Operand::Register(register) = operand {
                accesses.push((access, register));
            }
        });
        if let Instruction::Wgmma { d, accumulate, .. } = instruction {
            // Whether a predicated product reads its accumulator, only the simulator can check.
            let reads = *accumulate == Accumulate::Yes;
            return self.product(d, reads, &accesses, state, place);
        }
        for (access, register) in accesses {
            if let Some(product) = state.in_flight().find(|p| p.registers.contains(&register))
                // Reading an operand that the tensor cores also only read is harmless.
                && (access == Access::Write || product.accumulator.contains(&register))
            {
                let issued = product.issued;
                return Err(ValidationError::at(Fault::InFlight { register, issued }, place));
            }
            match access {
                Access::Write => {
                    state.assigned.add(register);
                    state.touched.add(register);
                }
                _ => self.read(register, state, place)?,
            }
        }
        match instruction {
            Instruction::WgmmaFence => state.touched.clear(),
            Instruction::WgmmaCommit => {
                let group = std::mem::take(&mut state.open);
                state.groups.push(group);
                state.join_oldest();
            }
            Instruction::WgmmaWait { pending } => {
                let done = state.groups.len().saturating_sub(*pending as usize);
                // The finished accumulators were written by the tensor cores, so they do not count
                // as touched since the fence.
                state.groups.drain(..done);
            }
            _ => {}
        }
        Ok(())
    }

    fn product(
        &self,
        accumulator: &[Register],
        reads_accumulator: bool,
        accesses: &[(Access, Register)],
        state: &mut State,
        place: SourceLocation,
    ) -> Result<(), ValidationError> {
        let mut registers = BTreeSet::new();
        for (access, register) in accesses {
            let (access, register) = (*access, *register);
            if access == Access::Read {
                // Descriptors and predicates are read when the product is issued.
                self.read(register, state, place)?;
                continue;
            }
            let reads = access == Access::AsyncRead || reads_accumulator;
            if reads && !state.assigned.has(register) {
                let ty = self.program.type_of(register);
                return Err(ValidationError::at(Fault::Unassigned { register, ty }, place));
            }
            if state.touched.has(register) {
                return Err(ValidationError::at(Fault::Unfenced { register }, place));
            }
            // Products may chain through the same accumulator; they may not share registers in any
            // other way except as operands that both only read.
            let clash = state.in_flight().find(|p| {
                p.registers.contains(&register)
                    && p.accumulator != accumulator
                    && (access != Access::AsyncRead || p.accumulator.contains(&register))
            });
            if let Some(product) = clash {
                let issued = product.issued;
                return Err(ValidationError::at(Fault::InFlight { register, issued }, place));
            }
            registers.insert(register);
        }
        for register in accumulator {
            state.assigned.add(*register);
        }
        let accumulator = accumulator.to_vec();
        state.open.push(Product { registers, accumulator, issued: place });
        Ok(())
    }
}

/// Adds the products of another path that this one lacks.
fn add_products(mine: &mut Vec<Product>, theirs: &[Product]) {
    for product in theirs {
        if !mine.contains(product) {
            mine.push(product.clone());
        }
    }
}

/// A set of registers.
#[derive(Clone)]
struct RegisterSet(Vec<u64>);

impl RegisterSet {
    fn new(count: usize) -> Self {
        RegisterSet(vec![0; count.div_ceil(64)])
    }

    fn has(&self, register: Register) -> bool {
        self.0[register.0 as usize / 64] >> (register.0 % 64) & 1 == 1
    }

    fn add(&mut self, register: Register) {
        self.0[register.0 as usize / 64] |= 1 << (register.0 % 64);
    }

    fn clear(&mut self) {
        self.0.fill(0);
    }

    fn intersect(&mut self, other: &RegisterSet) {
        for (word, other) in self.0.iter_mut().zip(&other.0) {
            *word &= other;
        }
    }

    fn unite(&mut self, other: &RegisterSet) {
        for (word, other) in self.0.iter_mut().zip(&other.0) {
            *word |= other;
        }
    }
}
