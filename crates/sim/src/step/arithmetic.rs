//! Arithmetic: integers, floats, packed floats, predicates.

use ptx::{BinaryOperation, Comparison, Instruction, Register, Type, UnaryOperation};

use crate::float::{self, bits};
use crate::warp::{Warp, Wide, Word};

/// Executes one of the instructions of this family.
pub(super) fn execute(warp: &mut Warp<'_>, instruction: &Instruction) {
    match instruction {
        Instruction::Move { dst, src } => match warp.code.slots[dst.0 as usize].0.bits() {
            1 => {
                let value = src.register().map(|r| warp.predicate(r)).unwrap_or(0);
                warp.set_predicate(*dst, value);
            }
            64 => {
                let value = warp.wide(*src);
                warp.set_wide(*dst, &value);
            }
            _ => {
                let value = warp.word(*src);
                warp.set_word(*dst, &value);
            }
        },
        Instruction::Unary { operation, ty, dst, a } => unary(warp, *operation, *ty, *dst, *a),
        Instruction::Binary { operation, ty, dst, a, b } => {
            binary(warp, *operation, *ty, *dst, *a, *b);
        }
        Instruction::MultiplyAdd { ty, dst, a, b, c } => match ty {
            Type::U64 | Type::S64 => {
                let (a, b, c) = (warp.wide(*a), warp.wide(*b), warp.wide(*c));
                let result: Wide =
                    std::array::from_fn(|i| a[i].wrapping_mul(b[i]).wrapping_add(c[i]));
                warp.set_wide(*dst, &result);
            }
            _ => {
                let (a, b, c) = (warp.word(*a), warp.word(*b), warp.word(*c));
                let result = match ty {
                    Type::F32 => map3(&a, &b, &c, |a, b, c| {
                        bits(float::fused(f32::from_bits(a), f32::from_bits(b), f32::from_bits(c)))
                    }),
                    Type::F16 | Type::F16x2 => map3(&a, &b, &c, |a, b, c| {
                        halves3(a, b, c, |a, b, c| {
                            let [a, b, c] = [a, b, c].map(float::from_f16);
                            float::fused_half(a, b, c, float::f16_bits)
                        })
                    }),
                    Type::BF16 | Type::BF16x2 => map3(&a, &b, &c, |a, b, c| {
                        halves3(a, b, c, |a, b, c| {
                            let [a, b, c] = [a, b, c].map(float::from_bf16);
                            float::fused_half(a, b, c, float::bf16_bits)
                        })
                    }),
                    _ => map3(&a, &b, &c, |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
                };
                warp.set_word(*dst, &result);
            }
        },
        Instruction::MultiplyWide { ty, dst, a, b } => {
            let (a, b) = (warp.word(*a), warp.word(*b));
            let result: Wide = if *ty == Type::S32 {
                std::array::from_fn(|i| (a[i] as i32 as i64 * b[i] as i32 as i64) as u64)
            } else {
                std::array::from_fn(|i| a[i] as u64 * b[i] as u64)
            };
            warp.set_wide(*dst, &result);
        }
        Instruction::Compare { comparison, ty, dst, a, b } => {
            let result = compare(warp, *comparison, *ty, *a, *b);
            warp.set_predicate(*dst, result);
        }
        Instruction::Select { ty, dst, condition, a, b } => {
            let condition = warp.predicate(*condition);
            if ty.bits() == 64 {
                let (a, b) = (warp.wide(*a), warp.wide(*b));
                let result: Wide =
                    std::array::from_fn(|i| if condition >> i & 1 == 1 { a[i] } else { b[i] });
                warp.set_wide(*dst, &result);
            } else {
                let (a, b) = (warp.word(*a), warp.word(*b));
                let result: Word =
                    std::array::from_fn(|i| if condition >> i & 1 == 1 { a[i] } else { b[i] });
                warp.set_word(*dst, &result);
            }
        }
        Instruction::PermuteBytes { dst, a, b, selector } => {
            let (a, b, s) = (warp.word(*a), warp.word(*b), warp.word(*selector));
            warp.set_word(*dst, &map3(&a, &b, &s, permute_bytes));
        }
        Instruction::FunnelShift { left, dst, low, high, amount } => {
            let (low, high, n) = (warp.word(*low), warp.word(*high), warp.word(*amount));
            let left = *left;
            let result = map3(&low, &high, &n, |low, high, n| {
                let (pair, n) = ((high as u64) << 32 | low as u64, n % 32);
                if left { (pair << n >> 32) as u32 } else { (pair >> n) as u32 }
            });
            warp.set_word(*dst, &result);
        }
        Instruction::Logic3 { dst, a, b, c, table } => {
            let (a, b, c) = (warp.word(*a), warp.word(*b), warp.word(*c));
            let table = *table;
            let result = map3(&a, &b, &c, |a, b, c| {
                let mut result = 0;
                for index in 0..8u8 {
                    if table >> index & 1 == 1 {
                        let pick = |bit: u8, x: u32| if index >> bit & 1 == 1 { x } else { !x };
                        result |= pick(2, a) & pick(1, b) & pick(0, c);
                    }
                }
                result
            });
            warp.set_word(*dst, &result);
        }
        other => unreachable!("not of this family: {other:?}"),
    }
}

#[inline(always)]
fn map1(a: &Word, f: impl Fn(u32) -> u32) -> Word {
    let mut result = [0; 32];
    for lane in 0..32 {
        result[lane] = f(a[lane]);
    }
    result
}

#[inline(always)]
fn map2(a: &Word, b: &Word, f: impl Fn(u32, u32) -> u32) -> Word {
    let mut result = [0; 32];
    for lane in 0..32 {
        result[lane] = f(a[lane], b[lane]);
    }
    result
}

#[inline(always)]
fn map3(a: &Word, b: &Word, c: &Word, f: impl Fn(u32, u32, u32) -> u32) -> Word {
    let mut result = [0; 32];
    for lane in 0..32 {
        result[lane] = f(a[lane], b[lane], c[lane]);
    }
    result
}

#[inline(always)]
fn wide1(a: &Wide, f: impl Fn(u64) -> u64) -> Wide {
    std::array::from_fn(|lane| f(a[lane]))
}

#[inline(always)]
fn wide2(a: &Wide, b: &Wide, f: impl Fn(u64, u64) -> u64) -> Wide {
    std::array::from_fn(|lane| f(a[lane], b[lane]))
}

fn float2(a: &Word, b: &Word, f: impl Fn(f32, f32) -> f32) -> Word {
    map2(a, b, |a, b| bits(f(f32::from_bits(a), f32::from_bits(b))))
}

/// Applies a function to both halves of a register; the upper half of a 16-bit register is unused.
#[inline(always)]
fn halves1(a: u32, f: impl Fn(u16) -> u16) -> u32 {
    f(a as u16) as u32 | (f((a >> 16) as u16) as u32) << 16
}

#[inline(always)]
fn halves2(a: u32, b: u32, f: impl Fn(u16, u16) -> u16) -> u32 {
    let high = f((a >> 16) as u16, (b >> 16) as u16);
    f(a as u16, b as u16) as u32 | (high as u32) << 16
}

#[inline(always)]
fn halves3(a: u32, b: u32, c: u32, f: impl Fn(u16, u16, u16) -> u16) -> u32 {
    let high = f((a >> 16) as u16, (b >> 16) as u16, (c >> 16) as u16);
    f(a as u16, b as u16, c as u16) as u32 | (high as u32) << 16
}

/// A 16-bit format, as its conversions to and from `f32`.
type Half = (fn(u16) -> f32, fn(f32) -> u16);

fn half_of(ty: Type) -> Option<Half> {
    match ty {
        Type::F16 | Type::F16x2 => Some((float::from_f16, float::f16_bits)),
        Type::BF16 | Type::BF16x2 => Some((float::from_bf16, float::bf16_bits)),
        _ => None,
    }
}

fn unary(warp: &mut Warp<'_>, operation: UnaryOperation, ty: Type, dst: Register, a: ptx::Operand) {
    use UnaryOperation as U;
    if ty == Type::Pred {
        let value = a.register().map(|r| warp.predicate(r)).unwrap_or(0);
        return warp.set_predicate(dst, !value);
    }
    if ty.bits() == 64 {
        let a = warp.wide(a);
        let result = match operation {
            U::Negate => wide1(&a, |a| a.wrapping_neg()),
            U::Absolute => wide1(&a, |a| (a as i64).wrapping_abs() as u64),
            U::PopulationCount => wide1(&a, |a| a.count_ones() as u64),
            U::LeadingZeros => wide1(&a, |a| a.leading_zeros() as u64),
            _ => wide1(&a, |a| !a),
        };
        return warp.set_wide(dst, &result);
    }
    let a = warp.word(a);
    let result = if let Some((from, to)) = half_of(ty) {
        let through = |f: fn(f32) -> f32| map1(&a, |a| halves1(a, |a| to(f(from(a)))));
        match operation {
            U::Negate => map1(&a, |a| a ^ 0x8000_8000),
            U::Absolute => map1(&a, |a| a & 0x7FFF_7FFF),
            U::Exp2 if matches!(ty, Type::BF16 | Type::BF16x2) => through(float::exp2_flushed),
            U::Exp2 => through(float::exp2),
            U::Tanh => through(float::tanh),
            U::Log2 => through(float::log2_flushed),
            U::Reciprocal => through(float::reciprocal_flushed),
            U::ReciprocalSqrt => through(float::reciprocal_sqrt_flushed),
            U::Sqrt => through(float::sqrt_flushed),
            U::Not | U::PopulationCount | U::LeadingZeros => map1(&a, |a| !a),
        }
    } else {
        let through = |f: fn(f32) -> f32| map1(&a, |a| bits(f(f32::from_bits(a))));
        match operation {
            U::Negate if ty == Type::F32 => map1(&a, |a| a ^ 0x8000_0000),
            U::Negate => map1(&a, |a| a.wrapping_neg()),
            U::Absolute if ty == Type::F32 => map1(&a, |a| a & 0x7FFF_FFFF),
            U::Absolute => map1(&a, |a| (a as i32).wrapping_abs() as u32),
            U::Not => map1(&a, |a| !a),
            U::Exp2 => map1(&a, |a| bits(float::exp2_flushed(f32::from_bits(a)))),
            U::Log2 => through(float::log2_flushed),
            U::Reciprocal => through(float::reciprocal_flushed),
            U::ReciprocalSqrt => through(float::reciprocal_sqrt_flushed),
            U::Sqrt => through(float::sqrt_flushed),
            U::Tanh => through(float::tanh),
            U::PopulationCount => map1(&a, |a| a.count_ones()),
            U::LeadingZeros => map1(&a, |a| a.leading_zeros()),
        }
    };
    warp.set_word(dst, &result);
}

fn binary(
    warp: &mut Warp<'_>,
    operation: BinaryOperation,
    ty: Type,
    dst: Register,
    a: ptx::Operand,
    b: ptx::Operand,
) {
    use BinaryOperation as B;
    match ty {
        Type::Pred => {
            let read = |o: ptx::Operand| o.register().map(|r| warp.predicate(r)).unwrap_or(0);
            let (a, b) = (read(a), read(b));
            let result = match operation {
                B::And => a & b,
                B::Or => a | b,
                _ => a ^ b,
            };
            warp.set_predicate(dst, result);
        }
        Type::U64 | Type::S64 => {
            let signed = ty == Type::S64;
            let a = warp.wide(a);
            if matches!(operation, B::ShiftLeft | B::ShiftRight) {
                let n = warp.word(b);
                let result: Wide = std::array::from_fn(|i| match operation {
                    B::ShiftLeft => a[i].checked_shl(n[i]).unwrap_or(0),
                    _ if signed => ((a[i] as i64) >> n[i].min(63)) as u64,
                    _ => a[i].checked_shr(n[i]).unwrap_or(0),
                });
                return warp.set_wide(dst, &result);
            }
            let b = warp.wide(b);
            let result = wide2(&a, &b, |a, b| wide_operation(operation, signed, a, b));
            warp.set_wide(dst, &result);
        }
        Type::F32 => {
            let (a, b) = (warp.word(a), warp.word(b));
            let result = match operation {
                B::Add => float2(&a, &b, |a, b| a + b),
                B::Subtract => float2(&a, &b, |a, b| a - b),
                B::Multiply => float2(&a, &b, |a, b| a * b),
                B::Divide => float2(&a, &b, float::divide_flushed),
                B::DivideRounded => float2(&a, &b, |a, b| a / b),
                B::Minimum => float2(&a, &b, float::minimum),
                B::Maximum => float2(&a, &b, float::maximum),
                other => unreachable!("validated: no {other:?} of f32"),
            };
            warp.set_word(dst, &result);
        }
        Type::U32 | Type::S32 => {
            let signed = ty == Type::S32;
            let (a, b) = (warp.word(a), warp.word(b));
            let result = match operation {
                B::Add => map2(&a, &b, |a, b| a.wrapping_add(b)),
                B::Subtract => map2(&a, &b, |a, b| a.wrapping_sub(b)),
                B::Multiply => map2(&a, &b, |a, b| a.wrapping_mul(b)),
                B::MultiplyHigh if signed => {
                    map2(&a, &b, |a, b| ((a as i32 as i64 * b as i32 as i64) >> 32) as u32)
                }
                B::MultiplyHigh => map2(&a, &b, |a, b| ((a as u64 * b as u64) >> 32) as u32),
                // The hardware gives all ones for a division by zero.
                B::Divide if signed => map2(&a, &b, |a, b| match b {
                    0 => u32::MAX,
                    _ => (a as i32).wrapping_div(b as i32) as u32,
                }),
                B::Divide => map2(&a, &b, |a, b| a.checked_div(b).unwrap_or(u32::MAX)),
                B::DivideRounded => unreachable!("validated: no rounded quotient of integers"),
                B::Remainder if signed => map2(&a, &b, |a, b| match b {
                    0 => a,
                    _ => (a as i32).wrapping_rem(b as i32) as u32,
                }),
                B::Remainder => map2(&a, &b, |a, b| a.checked_rem(b).unwrap_or(a)),
                B::Minimum if signed => map2(&a, &b, |a, b| (a as i32).min(b as i32) as u32),
                B::Minimum => map2(&a, &b, |a, b| a.min(b)),
                B::Maximum if signed => map2(&a, &b, |a, b| (a as i32).max(b as i32) as u32),
                B::Maximum => map2(&a, &b, |a, b| a.max(b)),
                B::And => map2(&a, &b, |a, b| a & b),
                B::Or => map2(&a, &b, |a, b| a | b),
                B::Xor => map2(&a, &b, |a, b| a ^ b),
                B::ShiftLeft => map2(&a, &b, |a, b| a.checked_shl(b).unwrap_or(0)),
                B::ShiftRight if signed => map2(&a, &b, |a, b| (a as i32 >> b.min(31)) as u32),
                B::ShiftRight => map2(&a, &b, |a, b| a.checked_shr(b).unwrap_or(0)),
            };
            warp.set_word(dst, &result);
        }
        Type::F16 | Type::BF16 | Type::F16x2 | Type::BF16x2 => {
            let (from, to) = half_of(ty).expect("a 16-bit float");
            let (a, b) = (warp.word(a), warp.word(b));
            let through = |f: fn(f32, f32) -> f32| {
                map2(&a, &b, |a, b| halves2(a, b, |a, b| to(f(from(a), from(b)))))
            };
            // An f32 has more than twice as many bits, so rounding the f32 result again gives the
            // same as rounding once.
            let result = match operation {
                B::Add => through(|a, b| a + b),
                B::Subtract => through(|a, b| a - b),
                B::Multiply => through(|a, b| a * b),
                B::Minimum => through(float::minimum),
                B::Maximum => through(float::maximum),
                other => unreachable!("validated: no {other:?} of 16-bit floats"),
            };
            warp.set_word(dst, &result);
        }
        Type::E4M3x2 | Type::E5M2x2 => unreachable!("validated: no arithmetic on 8-bit floats"),
    }
}

fn wide_operation(operation: BinaryOperation, signed: bool, a: u64, b: u64) -> u64 {
    use BinaryOperation as B;
    match operation {
        B::Add => a.wrapping_add(b),
        B::Subtract => a.wrapping_sub(b),
        B::Multiply => a.wrapping_mul(b),
        B::MultiplyHigh if signed => ((a as i64 as i128 * b as i64 as i128) >> 64) as u64,
        B::MultiplyHigh => ((a as u128 * b as u128) >> 64) as u64,
        B::Divide if b == 0 => u64::MAX,
        B::Divide if signed => (a as i64).wrapping_div(b as i64) as u64,
        B::Divide => a / b,
        B::DivideRounded => unreachable!("validated: no rounded quotient of integers"),
        B::Remainder if b == 0 => a,
        B::Remainder if signed => (a as i64).wrapping_rem(b as i64) as u64,
        B::Remainder => a % b,
        B::Minimum if signed => (a as i64).min(b as i64) as u64,
        B::Minimum => a.min(b),
        B::Maximum if signed => (a as i64).max(b as i64) as u64,
        B::Maximum => a.max(b),
        B::And => a & b,
        B::Or => a | b,
        B::Xor => a ^ b,
        B::ShiftLeft | B::ShiftRight => unreachable!("shifts take a 32-bit amount"),
    }
}

fn compare(
    warp: &Warp<'_>,
    comparison: Comparison,
    ty: Type,
    a: ptx::Operand,
    b: ptx::Operand,
) -> u32 {
    #[inline(always)]
    fn mask(f: impl Fn(usize) -> bool) -> u32 {
        let mut mask = 0;
        for lane in 0..32 {
            mask |= (f(lane) as u32) << lane;
        }
        mask
    }
    fn ordered<T: PartialOrd + Copy>(comparison: Comparison, a: [T; 32], b: [T; 32]) -> u32 {
        match comparison {
            Comparison::Equal => mask(|i| a[i] == b[i]),
            Comparison::NotEqual => mask(|i| a[i] != b[i]),
            Comparison::Less => mask(|i| a[i] < b[i]),
            Comparison::LessOrEqual => mask(|i| a[i] <= b[i]),
            Comparison::Greater => mask(|i| a[i] > b[i]),
            Comparison::GreaterOrEqual => mask(|i| a[i] >= b[i]),
            Comparison::GreaterOrUnordered => {
                mask(|i| !matches!(a[i].partial_cmp(&b[i]), Some(o) if o.is_le()))
            }
            Comparison::Unordered => mask(|i| a[i].partial_cmp(&b[i]).is_none()),
        }
    }
    match ty {
        Type::U64 => ordered(comparison, warp.wide(a), warp.wide(b)),
        Type::S64 => {
            let (a, b) = (warp.wide(a), warp.wide(b));
            ordered(comparison, a.map(|x| x as i64), b.map(|x| x as i64))
        }
        Type::S32 => {
            let (a, b) = (warp.word(a), warp.word(b));
            ordered(comparison, a.map(|x| x as i32), b.map(|x| x as i32))
        }
        Type::F32 => {
            let (a, b) = (warp.word(a), warp.word(b));
            ordered(comparison, a.map(f32::from_bits), b.map(f32::from_bits))
        }
        _ => {
            let (a, b) = (warp.word(a), warp.word(b));
            match half_of(ty) {
                Some((from, _)) => {
                    ordered(comparison, a.map(|x| from(x as u16)), b.map(|x| from(x as u16)))
                }
                None => ordered(comparison, a, b),
            }
        }
    }
}

fn permute_bytes(a: u32, b: u32, selector: u32) -> u32 {
    let pair = (b as u64) << 32 | a as u64;
    let mut result = 0;
    for index in 0..4 {
        let nibble = selector >> (4 * index) & 0xF;
        let byte = (pair >> (8 * (nibble & 7))) as u8;
        // The nibble's high bit replicates the sign of the byte.
        let byte = if nibble & 8 != 0 { (byte as i8 >> 7) as u8 } else { byte };
        result |= (byte as u32) << (8 * index);
    }
    result
}
