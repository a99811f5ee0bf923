//! The operands of each instruction: which registers and constants it reads and writes, and of
//! which type.

use super::{Accumulate, Instruction, SpecialRegister, WgmmaA};
use crate::{Address, BinaryOperation, Element, Operand, Register, Space, Type};

/// The kind of access that an instruction makes to an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Reads it when it executes.
    Read,
    /// Writes it when it executes.
    Write,
    /// Reads it until the instruction's group has been waited for.
    AsyncRead,
    /// Writes it until the instruction's group has been waited for.
    AsyncWrite,
    /// Reads and writes it until the instruction's group has been waited for.
    AsyncUpdate,
}

/// The register type an operand must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Expected {
    /// Exactly this type.
    Type(Type),
    /// Any type of this width.
    Bits(u32),
}

impl Expected {
    /// Returns whether a register of type `ty` is accepted.
    pub fn accepts(self, ty: Type) -> bool {
        match self {
            Expected::Type(wanted) => wanted == ty,
            Expected::Bits(bits) => bits == ty.bits(),
        }
    }
}

impl std::fmt::Display for Expected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Expected::Type(ty) => write!(f, "{ty:?}"),
            Expected::Bits(bits) => write!(f, "any type of {bits} bits"),
        }
    }
}

impl Instruction {
    /// Calls `visit` for every register and constant operand.
    ///
    /// `type_of` returns the type of a register: a few instructions (moves, conversions, loads)
    /// take their form from the types of their registers, and then only the width is expected.
    pub fn operands(
        &self,
        type_of: &dyn Fn(Register) -> Type,
        visit: &mut dyn FnMut(Access, Operand, Expected),
    ) {
        let mut v = Visitor { type_of, visit };
        use Instruction as I;
        match self {
            I::Move { dst, src } => {
                let bits = v.bits(*dst);
                v.read(*src, bits);
                v.write(*dst, bits);
            }
            I::Unary { ty, dst, a, .. } => {
                v.read(*a, Expected::Type(*ty));
                v.write(*dst, Expected::Type(*ty));
            }
            I::Binary { operation, ty, dst, a, b } => {
                let shift =
                    matches!(operation, BinaryOperation::ShiftLeft | BinaryOperation::ShiftRight);
                v.read(*a, Expected::Type(*ty));
                v.read(*b, Expected::Type(if shift { Type::U32 } else { *ty }));
                v.write(*dst, Expected::Type(*ty));
            }
            I::MultiplyAdd { ty, dst, a, b, c } => {
                for operand in [a, b, c] {
                    v.read(*operand, Expected::Type(*ty));
                }
                v.write(*dst, Expected::Type(*ty));
            }
            I::MultiplyWide { ty, dst, a, b } => {
                v.read(*a, Expected::Type(*ty));
                v.read(*b, Expected::Type(*ty));
                let wide = if *ty == Type::S32 { Type::S64 } else { Type::U64 };
                v.write(*dst, Expected::Type(wide));
            }
            I::Compare { ty, dst, a, b, .. } => {
                v.read(*a, Expected::Type(*ty));
                v.read(*b, Expected::Type(*ty));
                v.write(*dst, Expected::Type(Type::Pred));
            }
            I::Select { ty, dst, condition, a, b } => {
                v.read(Operand::Register(*condition), Expected::Type(Type::Pred));
                v.read(*a, Expected::Type(*ty));
                v.read(*b, Expected::Type(*ty));
                v.write(*dst, Expected::Type(*ty));
            }
            I::PermuteBytes { dst, a, b, selector } => {
                for operand in [a, b, selector] {
                    v.read(*operand, Expected::Bits(32));
                }
                v.write(*dst, Expected::Bits(32));
            }
            I::FunnelShift { dst, low, high, amount, .. } => {
                v.read(*low, Expected::Bits(32));
                v.read(*high, Expected::Bits(32));
                v.read(*amount, Expected::Type(Type::U32));
                v.write(*dst, Expected::Bits(32));
            }
            I::Logic3 { dst, a, b, c, .. } => {
                for operand in [a, b, c] {
                    v.read(*operand, Expected::Bits(32));
                }
                v.write(*dst, Expected::Bits(32));
            }
            I::Convert { dst, src } | I::ConvertPacked { dst, src } => {
                v.read_register(*src);
                v.write_register(*dst);
            }
            I::ConvertPair { dst, high, low } => {
                v.read(*high, Expected::Type(Type::F32));
                v.read(*low, Expected::Type(Type::F32));
                v.write_register(*dst);
            }
            I::Split { low, high, src } => {
                let half = Expected::Bits((v.type_of)(*src).bits() / 2);
                v.read_register(*src);
                v.write(*low, half);
                v.write(*high, half);
            }
            I::Join { dst, low, high } => {
                let half = Expected::Bits((v.type_of)(*dst).bits() / 2);
                v.read(*low, half);
                v.read(*high, half);
                v.write_register(*dst);
            }
            I::ReadSpecial { dst, special } => v.write(*dst, special_type(*special)),
            I::ReadParameter { dst, .. } => v.write_register(*dst),
            I::TensorMapAddress { dst, .. } => v.write(*dst, Expected::Type(Type::U64)),
            I::SharedBase { dst, .. } => v.write(*dst, Expected::Type(Type::U32)),

            I::Load { dst, space, address, .. } => {
                v.address(*space, *address);
                for register in dst {
                    v.write_register(*register);
                }
            }
            I::Store { src, space, address, .. } => {
                v.address(*space, *address);
                for register in src {
                    v.read_register(*register);
                }
            }
            I::LoadByte { dst, address } => {
                v.address(Space::Global, *address);
                v.write(*dst, Expected::Type(Type::U32));
            }
            I::PrefetchL2 { address } => v.address(Space::Global, *address),
            I::Atomic { ty, dst, space, address, value, .. } => {
                v.address(*space, *address);
                v.read(*value, Expected::Type(*ty));
                v.write(*dst, Expected::Type(*ty));
            }
            I::CompareAndSwap { ty, dst, space, address, expected, value, .. } => {
                v.address(*space, *address);
                v.read(*expected, Expected::Type(*ty));
                v.read(*value, Expected::Type(*ty));
                v.write(*dst, Expected::Type(*ty));
            }
            I::Reduce { ty, src, space, address, .. } => {
                v.address(*space, *address);
                for register in src {
                    v.read(Operand::Register(*register), Expected::Type(*ty));
                }
            }
            I::LoadMatrix { dst, address, .. } => {
                v.address(Space::Shared, *address);
                for register in dst {
                    v.write(*register, Expected::Bits(32));
                }
            }
            I::StoreMatrix { src, address, .. } => {
                v.address(Space::Shared, *address);
                for register in src {
                    v.read(Operand::Register(*register), Expected::Bits(32));
                }
            }

            I::Shuffle { dst, valid, src, lane, .. } => {
                v.read(Operand::Register(*src), Expected::Bits(32));
                v.read(*lane, Expected::Type(Type::U32));
                v.write(*dst, Expected::Bits(32));
                if let Some(valid) = valid {
                    v.write(*valid, Expected::Type(Type::Pred));
                }
            }
            I::Vote { dst, predicate, .. } => {
                v.read(Operand::Register(*predicate), Expected::Type(Type::Pred));
                v.write(*dst, Expected::Type(Type::Pred));
            }
            I::Ballot { dst, predicate } => {
                v.read(Operand::Register(*predicate), Expected::Type(Type::Pred));
                v.write(*dst, Expected::Type(Type::U32));
            }
            I::Elect { dst } => v.write(*dst, Expected::Type(Type::Pred)),

            I::Mma { element, accumulator, d, a, b, c, .. } => {
                for register in a.iter().chain(b) {
                    v.read(Operand::Register(*register), packed(*element));
                }
                for register in c {
                    v.read(Operand::Register(*register), packed(*accumulator));
                }
                for register in d {
                    v.write(*register, packed(*accumulator));
                }
            }
            I::Wgmma { a_element, accumulator, d, accumulate, a, b, .. } => {
                match a {
                    WgmmaA::Shared { descriptor, .. } => {
                        v.read(Operand::Register(*descriptor), Expected::Type(Type::U64));
                    }
                    WgmmaA::Registers(registers) => {
                        for register in registers {
                            let operand = Operand::Register(*register);
                            (v.visit)(Access::AsyncRead, operand, packed(*a_element));
                        }
                    }
                }
                v.read(Operand::Register(*b), Expected::Type(Type::U64));
                let access = match accumulate {
                    Accumulate::No => Access::AsyncWrite,
                    Accumulate::Yes => Access::AsyncUpdate,
                    Accumulate::If(predicate) => {
                        let operand = Operand::Register(*predicate);
                        v.read(operand, Expected::Type(Type::Pred));
                        Access::AsyncUpdate
                    }
                };
                for register in d {
                    (v.visit)(access, Operand::Register(*register), packed(*accumulator));
                }
            }

            I::BarrierSync { barrier, threads } => {
                v.read(*barrier, Expected::Type(Type::U32));
                if let Some(threads) = threads {
                    v.read(*threads, Expected::Type(Type::U32));
                }
            }
            I::BarrierArrive { barrier, threads } => {
                v.read(*barrier, Expected::Type(Type::U32));
                v.read(*threads, Expected::Type(Type::U32));
            }
            I::MbarrierInit { address, count } => {
                v.address(Space::Shared, *address);
                v.read(*count, Expected::Type(Type::U32));
            }
            I::MbarrierInvalidate { address } | I::MbarrierArriveOnCopies { address } => {
                v.address(Space::Shared, *address);
            }
            I::MbarrierArrive { space, address, count } => {
                v.address(*space, *address);
                if let Some(count) = count {
                    v.read(*count, Expected::Type(Type::U32));
                }
            }
            I::MbarrierArriveExpect { space, address, bytes } => {
                v.address(*space, *address);
                v.read(*bytes, Expected::Type(Type::U32));
            }
            I::MbarrierExpect { address, bytes } => {
                v.address(Space::Shared, *address);
                v.read(*bytes, Expected::Type(Type::U32));
            }
            I::MbarrierTryWait { dst, address, parity, .. } => {
                v.address(Space::Shared, *address);
                v.read(*parity, Expected::Type(Type::U32));
                v.write(*dst, Expected::Type(Type::Pred));
            }
            I::MbarrierWait { address, parity, .. } => {
                v.address(Space::Shared, *address);
                v.read(*parity, Expected::Type(Type::U32));
            }

            I::CopyAsync { dst, src, source_bytes, .. } => {
                v.address(Space::Shared, *dst);
                v.address(Space::Global, *src);
                if let Some(bytes) = source_bytes {
                    v.read(*bytes, Expected::Type(Type::U32));
                }
            }
            I::BulkLoad { dst, src, bytes, barrier, multicast } => {
                v.address(Space::Shared, *dst);
                v.address(Space::Global, *src);
                v.read(*bytes, Expected::Type(Type::U32));
                v.address(Space::Shared, *barrier);
                v.multicast(*multicast);
            }
            I::BulkStore { dst, src, bytes } | I::BulkReduceAdd { dst, src, bytes, .. } => {
                v.address(Space::Global, *dst);
                v.address(Space::Shared, *src);
                v.read(*bytes, Expected::Type(Type::U32));
            }
            I::TensorLoad { dst, map, coordinates, barrier, multicast } => {
                v.address(Space::Shared, *dst);
                v.tensor(*map, coordinates);
                v.address(Space::Shared, *barrier);
                v.multicast(*multicast);
            }
            I::TensorStore { map, coordinates, src }
            | I::TensorReduceAdd { map, coordinates, src } => {
                v.tensor(*map, coordinates);
                v.address(Space::Shared, *src);
            }
            I::TensorMapPrefetch { map } => {
                v.read(Operand::Register(*map), Expected::Type(Type::U64));
            }
            I::MapShared { dst, address, rank } => {
                v.read(Operand::Register(*address), Expected::Type(Type::U32));
                v.read(*rank, Expected::Type(Type::U32));
                v.write(*dst, Expected::Type(Type::U32));
            }
            I::Sleep { nanoseconds } => v.read(*nanoseconds, Expected::Type(Type::U32)),

            I::WarpSync
            | I::WgmmaFence
            | I::WgmmaCommit
            | I::WgmmaWait { .. }
            | I::ClusterArrive { .. }
            | I::ClusterWait
            | I::CopyAsyncCommit
            | I::CopyAsyncWait { .. }
            | I::BulkCommit
            | I::BulkWait { .. }
            | I::Fence(_)
            | I::SetMaxRegisters { .. }
            | I::GridDependencyWait
            | I::GridDependencyLaunch
            | I::Trap => {}
        }
    }
}

struct Visitor<'a> {
    type_of: &'a dyn Fn(Register) -> Type,
    visit: &'a mut dyn FnMut(Access, Operand, Expected),
}

impl Visitor<'_> {
    fn bits(&self, register: Register) -> Expected {
        Expected::Bits((self.type_of)(register).bits())
    }

    fn read(&mut self, operand: Operand, expected: Expected) {
        (self.visit)(Access::Read, operand, expected);
    }

    fn write(&mut self, register: Register, expected: Expected) {
        (self.visit)(Access::Write, Operand::Register(register), expected);
    }

    /// Reads a register whose own type chooses the form of the instruction.
    fn read_register(&mut self, register: Register) {
        let own = self.bits(register);
        self.read(Operand::Register(register), own);
    }

    fn write_register(&mut self, register: Register) {
        let own = self.bits(register);
        self.write(register, own);
    }

    fn address(&mut self, space: Space, address: Address) {
        self.read(Operand::Register(address.base), Expected::Type(space.address_type()));
    }

    fn tensor(&mut self, map: Register, coordinates: &[Operand]) {
        self.read(Operand::Register(map), Expected::Type(Type::U64));
        for coordinate in coordinates {
            self.read(*coordinate, Expected::Bits(32));
        }
    }

    fn multicast(&mut self, mask: Option<Register>) {
        if let Some(mask) = mask {
            self.read(Operand::Register(mask), Expected::Type(Type::U32));
        }
    }
}

/// Returns the register type of a matrix operand with these elements.
fn packed(element: Element) -> Expected {
    Expected::Type(element.packed())
}

fn special_type(special: SpecialRegister) -> Expected {
    Expected::Type(if special.is_wide() { Type::U64 } else { Type::U32 })
}
