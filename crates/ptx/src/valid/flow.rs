//! Checks along the paths of a program: assignment, and products in flight.
//!
//! Both walk the tree of statements, loops until nothing changes any more.

use std::collections::BTreeSet;

use super::error::{Fault, Invalid};
use crate::{
    Access, Accumulate, Block, Instruction, Operand, Place, Program, Register, StatementKind,
};

pub(super) fn check(program: &Program) -> Result<(), Invalid> {
    let mut walk = Walk { program, breaks: Vec::new() };
    let mut state = State::new(program.registers.len());
    walk.block(&program.body, &mut state)?;
    if let Some(issued) = state.open.first().map(|product| product.issued) {
        return Err(Invalid::at(Fault::Uncommitted { issued }, issued));
    }
    if let Some(product) = state.groups.iter().flatten().next() {
        let issued = product.issued;
        return Err(Invalid::at(Fault::NeverWaited { issued }, issued));
    }
    Ok(())
}

/// As many groups as a wait can leave in flight, and one.
const MOST_GROUPS: usize = 8;

/// What is known at a point of the program.
#[derive(Clone)]
struct State {
    /// Registers that every path has written.
    assigned: Bits,
    /// Registers touched by other instructions since the last fence.
    touched: Bits,
    /// Products issued and not yet committed.
    open: Vec<Product>,
    /// Committed groups, oldest first.
    groups: Vec<Vec<Product>>,
}

#[derive(Clone, PartialEq, Eq)]
struct Product {
    registers: BTreeSet<Register>,
    /// The accumulator, which a next product may add to without a wait.
    accumulator: Vec<Register>,
    issued: Place,
}

impl State {
    fn new(registers: usize) -> Self {
        State {
            assigned: Bits::new(registers),
            touched: Bits::new(registers),
            open: Vec::new(),
            groups: Vec::new(),
        }
    }

    /// The state where two paths meet: what both have written, what either
    /// may have touched or left in flight. Groups are matched from the newest
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

    /// Groups that every wait waits for are one: a loop that commits one more at
    /// each pass comes to an end here too.
    fn join_oldest(&mut self) {
        while self.groups.len() > MOST_GROUPS {
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
    /// The states at the breaks of the loops being walked, innermost last.
    breaks: Vec<Vec<State>>,
}

impl Walk<'_> {
    fn block(&mut self, block: &Block, state: &mut State) -> Result<(), Invalid> {
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
                        None => return Err(Invalid::at(Fault::BreakOutsideLoop, place)),
                    }
                }
            }
        }
        Ok(())
    }

    /// Walks a loop until nothing new comes around: what its end leaves behind
    /// meets what was there before it.
    fn repeat(&mut self, body: &Block, state: &mut State) -> Result<(), Invalid> {
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
            // Behind the loop is where its breaks lead; without any, nowhere.
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

    fn read(&self, register: Register, state: &mut State, place: Place) -> Result<(), Invalid> {
        let ty = self.program.type_of(register);
        if !state.assigned.has(register) {
            return Err(Invalid::at(Fault::Unassigned { register, ty }, place));
        }
        state.touched.add(register);
        Ok(())
    }

    fn instruction(
        &self,
        instruction: &Instruction,
        state: &mut State,
        place: Place,
    ) -> Result<(), Invalid> {
        let mut accesses = Vec::new();
        let type_of = |register| self.program.type_of(register);
        instruction.operands(&type_of, &mut |access, operand, _| {
            if let Operand::Register(register) = operand {
                accesses.push((access, register));
            }
        });
        if let Instruction::Wgmma { d, accumulate, .. } = instruction {
            // What a predicate decides, the simulator checks.
            let reads = *accumulate == Accumulate::Yes;
            return self.product(d, reads, &accesses, state, place);
        }
        for (access, register) in accesses {
            if let Some(product) = state.in_flight().find(|p| p.registers.contains(&register))
                // Reading an operand that the tensor cores also only read is harmless.
                && (access == Access::Write || product.accumulator.contains(&register))
            {
                let issued = product.issued;
                return Err(Invalid::at(Fault::InFlight { register, issued }, place));
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
                // What has landed was written by the tensor cores, after the fence.
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
        place: Place,
    ) -> Result<(), Invalid> {
        let mut registers = BTreeSet::new();
        for (access, register) in accesses {
            let (access, register) = (*access, *register);
            if access == Access::Read {
                // Descriptors and predicates are read at issue.
                self.read(register, state, place)?;
                continue;
            }
            let reads = access == Access::AsyncRead || reads_accumulator;
            if reads && !state.assigned.has(register) {
                let ty = self.program.type_of(register);
                return Err(Invalid::at(Fault::Unassigned { register, ty }, place));
            }
            if state.touched.has(register) {
                return Err(Invalid::at(Fault::Unfenced { register }, place));
            }
            // Products may chain through one accumulator, not otherwise share registers.
            let clash = state.in_flight().find(|p| {
                p.registers.contains(&register)
                    && p.accumulator != accumulator
                    && (access != Access::AsyncRead || p.accumulator.contains(&register))
            });
            if let Some(product) = clash {
                let issued = product.issued;
                return Err(Invalid::at(Fault::InFlight { register, issued }, place));
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

/// Adds the products of another path that this one does not have.
fn add_products(mine: &mut Vec<Product>, theirs: &[Product]) {
    for product in theirs {
        if !mine.contains(product) {
            mine.push(product.clone());
        }
    }
}

/// A set of registers.
#[derive(Clone)]
struct Bits(Vec<u64>);

impl Bits {
    fn new(count: usize) -> Self {
        Bits(vec![0; count.div_ceil(64)])
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

    fn intersect(&mut self, other: &Bits) {
        for (word, other) in self.0.iter_mut().zip(&other.0) {
            *word &= other;
        }
    }

    fn unite(&mut self, other: &Bits) {
        for (word, other) in self.0.iter_mut().zip(&other.0) {
            *word |= other;
        }
    }
}
