//! Mutations of values: a comparison, a constant, an address, a coordinate, a store.

use ptx::{
    Accumulate, BinaryOperation, Comparison, Instruction, Operand, Register, Type, VoteMode,
};

use super::Change;
use super::generate::{Mutations, OperandChange, name};

/// Adds the ways in which the values of an instruction can be wrong.
pub(super) fn add(to: &mut Mutations<'_>, instruction: &Instruction) {
    use Instruction as I;
    let text = name(instruction);
    match instruction {
        I::Compare { comparison, ty, .. } => {
            let other = neighbour(*comparison);
            let detail = format!("{ty:?} {comparison:?} to {other:?}");
            to.edit("comparison", detail, instruction, |it| {
                if let I::Compare { comparison, .. } = it {
                    *comparison = other;
                }
            });
        }
        I::Binary { operation, ty, .. } => {
            let other = opposite(*operation, *ty);
            let detail = format!("{ty:?} {operation:?} to {other:?}");
            to.edit("operation", detail, instruction, |it| {
                if let I::Binary { operation, .. } = it {
                    *operation = other;
                }
            });
            constants(to, instruction, *ty);
        }
        I::MultiplyAdd { ty, .. } | I::MultiplyWide { ty, .. } => {
            constants(to, instruction, *ty);
        }
        I::Move { dst, .. } => constants(to, instruction, to.program().type_of(*dst)),
        I::Select { ty, .. } => {
            to.edit("selection", format!("{ty:?} swapped"), instruction, |it| {
                if let I::Select { a, b, .. } = it {
                    std::mem::swap(a, b);
                }
            })
        }
        I::SharedBase { .. } => to.edit("address", format!("{text} +16"), instruction, |it| {
            if let I::SharedBase { offset, .. } = it {
                *offset += 16;
            }
        }),
        I::Load { dst, .. } => moved(to, instruction, bytes_of(to, dst)),
        I::Store { src, .. } => {
            moved(to, instruction, bytes_of(to, src));
            to.push("store dropped", text, Change::default());
        }
        I::LoadMatrix { .. } | I::StoreMatrix { .. } | I::CopyAsync { .. } => {
            moved(to, instruction, 16);
            to.edit("transposition", text.clone(), instruction, |it| {
                if let I::LoadMatrix { transpose, .. } | I::StoreMatrix { transpose, .. } = it {
                    *transpose = !*transpose;
                }
            });
            to.edit("mask", format!("{text} of all bytes"), instruction, |it| {
                if let I::CopyAsync { source_bytes, .. } = it {
                    *source_bytes = None;
                }
            });
            if !matches!(instruction, I::LoadMatrix { .. }) {
                to.push("store dropped", text, Change::default());
            }
        }
        I::TensorLoad { coordinates, .. } | I::TensorStore { coordinates, .. } => {
            for (index, coordinate) in coordinates.iter().enumerate() {
                let ty = match coordinate {
                    Operand::Register(register) => to.program().type_of(*register),
                    Operand::Immediate(_) => Type::S32,
                };
                let detail = format!("{text} {index} +1");
                let (operand, by) = ((ty, *coordinate), OperandChange::Add(1));
                to.operand("coordinate", detail, instruction, operand, by, |it, changed| {
                    if let I::TensorLoad { coordinates, .. } | I::TensorStore { coordinates, .. } =
                        it
                    {
                        coordinates[index] = changed;
                    }
                });
            }
            to.push("store dropped", text, Change::default());
        }
        I::BulkStore { .. }
        | I::BulkReduceAdd { .. }
        | I::TensorReduceAdd { .. }
        | I::Reduce { .. } => to.push("store dropped", text, Change::default()),
        I::Wgmma { b, accumulate, .. } => {
            let (operand, by) = ((Type::U64, (*b).into()), OperandChange::Add(2));
            to.operand("address", "second operand +32", instruction, operand, by, |it, changed| {
                if let (I::Wgmma { b, .. }, Operand::Register(register)) = (it, changed) {
                    *b = register;
                }
            });
            for other in [Accumulate::No, Accumulate::Yes] {
                let detail = format!("{accumulate:?} to {other:?}");
                to.edit("accumulation", detail, instruction, |it| {
                    if let I::Wgmma { accumulate, .. } = it {
                        *accumulate = other;
                    }
                });
            }
        }
        I::Mma { .. } => to.edit("operands", "of mma swapped", instruction, |it| {
            if let I::Mma { a, .. } = it {
                a.swap(0, 1);
            }
        }),
        I::Shuffle { dst, src, .. } => {
            let own = I::Move { dst: *dst, src: (*src).into() };
            to.replace_with("shuffle", "of the lane itself", own);
        }
        I::Vote { .. } => to.edit("vote", "all to any, or back", instruction, |it| {
            if let I::Vote { mode, .. } = it {
                *mode = match mode {
                    VoteMode::All => VoteMode::Any,
                    VoteMode::Any => VoteMode::All,
                };
            }
        }),
        I::ConvertPair { .. } => to.edit("pair", "swapped", instruction, |it| {
            if let I::ConvertPair { high, low, .. } = it {
                std::mem::swap(high, low);
            }
        }),
        _ => {}
    }
}

/// Returns the comparison that differs only for equal values; equality becomes inequality.
fn neighbour(comparison: Comparison) -> Comparison {
    use Comparison as C;
    match comparison {
        C::Less => C::LessOrEqual,
        C::LessOrEqual => C::Less,
        C::Greater => C::GreaterOrEqual,
        C::GreaterOrEqual => C::Greater,
        C::Equal => C::NotEqual,
        C::NotEqual => C::Equal,
        other @ (C::GreaterOrUnordered | C::Unordered) => other,
    }
}

fn opposite(operation: BinaryOperation, ty: Type) -> BinaryOperation {
    use BinaryOperation as B;
    match operation {
        B::Minimum => B::Maximum,
        B::Maximum => B::Minimum,
        B::Add if ty == Type::F32 => B::Subtract,
        B::Subtract if ty == Type::F32 => B::Add,
        B::And if ty == Type::Pred => B::Or,
        B::Or if ty == Type::Pred => B::And,
        other => other,
    }
}

/// Adds one more and one less for every integer constant, and another number for floats.
fn constants(to: &mut Mutations<'_>, instruction: &Instruction, ty: Type) {
    let constants = operands(&mut instruction.clone())
        .into_iter()
        .enumerate()
        .filter_map(|(index, operand)| match operand {
            Operand::Immediate(bits) => Some((index, *bits)),
            Operand::Register(_) => None,
        })
        .collect::<Vec<_>>();
    let masks = matches!(instruction, Instruction::Binary { operation: BinaryOperation::And, .. });
    for (index, bits) in constants {
        let (operator, others) = match masks && ty != Type::Pred {
            true => ("mask", narrower_masks(bits)),
            false => ("constant", other_constants(ty, bits)),
        };
        for other in others {
            let detail = format!("{} {bits:#x} to {other:#x}", name(instruction));
            to.edit(operator, detail, instruction, |it| {
                *operands(it)[index] = Operand::Immediate(other);
            });
        }
    }
}

/// Returns a mask without its lowest bit, and without its highest.
fn narrower_masks(bits: u64) -> Vec<u64> {
    match bits {
        0 => Vec::new(),
        bits => vec![bits & (bits - 1), bits & !(1 << (63 - bits.leading_zeros()))],
    }
}

fn other_constants(ty: Type, bits: u64) -> Vec<u64> {
    let narrow = |value: u64| if ty.bits() == 64 { value } else { value & 0xFFFF_FFFF };
    match ty {
        Type::F32 => {
            let value = f32::from_bits(bits as u32);
            let other = match value {
                0.0 => 1.0,
                value if value.is_infinite() => 0.0,
                value => value * 2.0,
            };
            if value.is_nan() { Vec::new() } else { vec![other.to_bits().into()] }
        }
        Type::U32 | Type::S32 | Type::U64 | Type::S64 => {
            vec![narrow(bits.wrapping_add(1)), narrow(bits.wrapping_sub(1))]
        }
        Type::Pred => vec![bits ^ 1],
        _ => Vec::new(),
    }
}

/// Returns the operands that may be constants of the instruction's type.
fn operands(instruction: &mut Instruction) -> Vec<&mut Operand> {
    use Instruction as I;
    match instruction {
        I::Binary { a, b, .. } | I::MultiplyWide { a, b, .. } => vec![a, b],
        I::MultiplyAdd { a, b, c, .. } => vec![a, b, c],
        I::Move { src, .. } => vec![src],
        _ => Vec::new(),
    }
}

fn bytes_of(to: &Mutations<'_>, registers: &[Register]) -> i32 {
    registers.iter().map(|it| to.program().type_of(*it).bits() as i32 / 8).sum()
}

/// Moves each address of an access by this many bytes.
fn moved(to: &mut Mutations<'_>, instruction: &Instruction, bytes: i32) {
    use Instruction as I;
    let detail = format!("{} +{bytes}", name(instruction));
    to.edit("address", detail.clone(), instruction, |it| match it {
        I::Load { address, .. }
        | I::Store { address, .. }
        | I::LoadMatrix { address, .. }
        | I::StoreMatrix { address, .. } => address.offset += bytes,
        I::CopyAsync { dst, .. } => dst.offset += bytes,
        _ => {}
    });
    to.edit("address", format!("{detail} in the source"), instruction, |it| {
        if let I::CopyAsync { src, .. } = it {
            src.offset += bytes;
        }
    });
}
