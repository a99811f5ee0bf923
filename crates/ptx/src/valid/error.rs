//! The errors of the validator, with their places in the kernel's source.

use std::fmt;

use crate::{Capability, Expected, Register, SourceLocation, Target, Type};

/// The error of an invalid program: the fault and its place in the kernel's source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidationError {
    /// The fault.
    pub fault: Fault,
    /// The place where the statement was written, or `None` for a fault of the whole program.
    pub place: Option<SourceLocation>,
}

impl ValidationError {
    pub(crate) fn at(fault: Fault, place: SourceLocation) -> Self {
        ValidationError { fault, place: Some(place) }
    }

    pub(crate) fn misuse(text: String, place: SourceLocation) -> Self {
        ValidationError::at(Fault::Misuse { text }, place)
    }
}

impl From<Fault> for ValidationError {
    fn from(fault: Fault) -> Self {
        ValidationError { fault, place: None }
    }
}

impl fmt::Display for ValidationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = self.place {
            write!(f, "{place}: ")?;
        }
        self.fault.fmt(f)
    }
}

impl std::error::Error for ValidationError {}

/// A fault of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs)] // the messages speak for the fields
pub enum Fault {
    /// The builder or the tile types were used wrongly.
    Misuse { text: String },
    /// The launch is impossible.
    Launch { text: String },
    /// Shared memory does not fit or is badly laid out.
    SharedMemory { text: String },
    /// The target lacks a feature.
    Capability { capability: Capability, target: Target },
    /// A register that the program does not declare.
    UnknownRegister { register: Register },
    /// A register whose type is not the one that the instruction expects.
    Type { register: Register, found: Type, expected: Expected },
    /// A constant in a position that takes only registers.
    NoImmediate { expected: Expected },
    /// A constant that its type cannot hold.
    ImmediateRange { bits: u64, width: u32 },
    /// A combination of modifiers that no instruction has.
    Form { text: String },
    /// A parameter that the program does not declare, or that is of another kind.
    Parameter { index: u32, wanted: &'static str },
    /// A register that is read although not every path has written it.
    Unassigned { register: Register, ty: Type },
    /// A break outside of any loop.
    BreakOutsideLoop,
    /// A register of a `wgmma` in flight that is touched before the wait.
    InFlight { register: Register, issued: SourceLocation },
    /// A `wgmma` whose registers were touched after the last `wgmma.fence`.
    Unfenced { register: Register },
    /// A `wgmma` that was issued but not committed into a group.
    Uncommitted { issued: SourceLocation },
    /// A group of `wgmma`s that is still in flight at the end of the program.
    NeverWaited { issued: SourceLocation },
    /// Register budgets of roles that together exceed the registers of the block.
    RegisterBudget { wanted: u32, available: u32 },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Misuse { text }
            | Fault::Launch { text }
            | Fault::SharedMemory { text }
            | Fault::Form { text } => f.write_str(text),
            Fault::Capability { capability, target } => {
                write!(f, "{capability} is not available on {target}")
            }
            Fault::UnknownRegister { register } => {
                write!(f, "register {} is not one of this program's", register.0)
            }
            Fault::Type { register, found, expected } => {
                write!(f, "register {} is {found:?}, expected {expected}", register.0)
            }
            Fault::NoImmediate { expected } => {
                write!(f, "a constant cannot stand here, expected a register of {expected}")
            }
            Fault::ImmediateRange { bits, width } => {
                write!(f, "the constant {bits:#x} does not fit {width} bits")
            }
            Fault::Parameter { index, wanted } => {
                write!(f, "parameter {index} is not {wanted} of this program")
            }
            Fault::Unassigned { register, ty } => {
                write!(f, "register {} ({ty:?}) is read but not written on every path", register.0)
            }
            Fault::BreakOutsideLoop => f.write_str("a break outside of any loop"),
            Fault::InFlight { register, issued } => write!(
                f,
                "register {} belongs to the wgmma issued at {issued}, which has not been waited for",
                register.0
            ),
            Fault::Unfenced { register } => write!(
                f,
                "register {} was touched after the last wgmma.fence, and this wgmma uses it",
                register.0
            ),
            Fault::Uncommitted { issued } => {
                write!(f, "the wgmma issued at {issued} is in no committed group")
            }
            Fault::NeverWaited { issued } => {
                write!(f, "the wgmma issued at {issued} is never waited for")
            }
            Fault::RegisterBudget { wanted, available } => {
                write!(f, "the roles hold {wanted} registers, the block has {available}")
            }
        }
    }
}
