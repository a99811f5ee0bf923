//! Registers: the untyped handle that instructions hold, the typed handle that kernels hold, and
//! the operands and addresses built from them.

use std::marker::PhantomData;

use crate::{Scalar, Type};

/// A register of a program, by its index in [`Program::registers`](crate::Program::registers).
///
/// Registers are virtual and unlimited; the assembler maps them to hardware.
/// They are variables, not single assignments: a loop counter is one register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Register(pub u32);

/// A typed register handle.
///
/// Kernels hold these; instructions hold the untyped [`Register`]. A handle is only a number, so it
/// is freely copied; it belongs to the builder that made it.
pub struct Reg<T> {
    pub(crate) register: Register,
    marker: PhantomData<fn() -> T>,
}

impl<T: Scalar> Reg<T> {
    pub(crate) fn new(register: Register) -> Self {
        Reg { register, marker: PhantomData }
    }

    /// Returns the untyped register, to build an [`Instruction`](crate::Instruction) by hand.
    pub fn register(self) -> Register {
        self.register
    }
}

impl<T> Clone for Reg<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Reg<T> {}

impl<T: Scalar> std::fmt::Debug for Reg<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}#{}", T::TYPE, self.register.0)
    }
}

/// An operand that an instruction reads: a register or a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operand {
    /// The value of a register.
    Register(Register),
    /// A constant, as its bits zero-extended to 64; the instruction determines the type in which
    /// they are interpreted.
    Immediate(u64),
}

impl Operand {
    /// Creates a 32-bit unsigned constant.
    pub const fn u32(value: u32) -> Self {
        Operand::Immediate(value as u64)
    }

    /// Creates a single-precision constant.
    pub const fn f32(value: f32) -> Self {
        Operand::Immediate(value.to_bits() as u64)
    }

    /// Returns the register, or `None` for a constant.
    pub const fn register(self) -> Option<Register> {
        match self {
            Operand::Register(register) => Some(register),
            Operand::Immediate(_) => None,
        }
    }
}

impl From<Register> for Operand {
    fn from(register: Register) -> Self {
        Operand::Register(register)
    }
}

impl<T> From<Reg<T>> for Operand {
    fn from(reg: Reg<T>) -> Self {
        Operand::Register(reg.register)
    }
}

impl<T> From<Reg<T>> for Register {
    fn from(reg: Reg<T>) -> Self {
        reg.register
    }
}

/// A memory address: the address in a register plus a constant displacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// The register that holds the address: 32 bits wide for shared memory, 64 for global memory.
    pub base: Register,
    /// Displacement in bytes.
    pub offset: i32,
}

/// The state space that an address points into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// The shared memory of the executing block.
    Shared,
    /// The shared memory of any block in the cluster, by an address that
    /// [`Instruction::MapShared`](crate::Instruction::MapShared) made.
    Cluster,
    /// Global memory.
    Global,
}

impl Space {
    /// Returns the type of a register that holds an address of this space.
    pub const fn address_type(self) -> Type {
        match self {
            Space::Shared | Space::Cluster => Type::U32,
            Space::Global => Type::U64,
        }
    }
}
