//! Values of integer, float and predicate instructions.

use ptx::{
    BinaryOperation, Builder, Expression, F32, Instruction, Operand, Reg, S32, Select, Type, U32,
    U64, UnaryOperation,
};

use crate::{each, map_words, word};

fn binary(
    k: &mut Builder,
    operation: BinaryOperation,
    ty: Type,
    a: Reg<U32>,
    b: Reg<U32>,
) -> Reg<U32> {
    // The operation's type is that of the registers: move the bits across.
    let (a, b): (Operand, Operand) = match ty {
        Type::S32 => {
            let (a, b) = (k.eval(a.reinterpret::<S32>()), k.eval(b.reinterpret::<S32>()));
            let b =
                if shifts(operation) { k.eval(b.reinterpret::<U32>()).into() } else { b.into() };
            (a.into(), b)
        }
        _ => (a.into(), b.into()),
    };
    match ty {
        Type::S32 => {
            let dst = k.register::<S32>();
            k.push(Instruction::Binary { operation, ty, dst: dst.register(), a, b });
            word(k, dst)
        }
        _ => {
            let dst = k.register::<U32>();
            k.push(Instruction::Binary { operation, ty, dst: dst.register(), a, b });
            dst
        }
    }
}

fn shifts(operation: BinaryOperation) -> bool {
    matches!(operation, BinaryOperation::ShiftLeft | BinaryOperation::ShiftRight)
}

#[test]
fn integers_at_their_edges() {
    let interesting = [0, 1, 2, 5, 31, 32, 33, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF];
    let a = each(|lane| interesting[lane as usize % 10]);
    let b = each(|lane| interesting[(lane / 3) as usize % 10]);
    use BinaryOperation as B;
    type Case = (B, Type, fn(u32, u32) -> u32);
    let cases: &[Case] = &[
        (B::Add, Type::U32, |a, b| a.wrapping_add(b)),
        (B::Subtract, Type::S32, |a, b| a.wrapping_sub(b)),
        (B::Multiply, Type::U32, |a, b| a.wrapping_mul(b)),
        (B::MultiplyHigh, Type::U32, |a, b| ((a as u64 * b as u64) >> 32) as u32),
        (B::MultiplyHigh, Type::S32, |a, b| ((a as i32 as i64 * b as i32 as i64) >> 32) as u32),
        (B::Divide, Type::U32, |a, b| a.checked_div(b).unwrap_or(u32::MAX)),
        (B::Divide, Type::S32, |a, b| match b {
            0 => u32::MAX,
            _ => (a as i32).wrapping_div(b as i32) as u32,
        }),
        (B::Remainder, Type::U32, |a, b| a.checked_rem(b).unwrap_or(a)),
        (B::Minimum, Type::S32, |a, b| (a as i32).min(b as i32) as u32),
        (B::Maximum, Type::U32, |a, b| a.max(b)),
        (B::Xor, Type::U32, |a, b| a ^ b),
        (B::ShiftLeft, Type::U32, |a, b| if b > 31 { 0 } else { a << b }),
        (B::ShiftRight, Type::U32, |a, b| if b > 31 { 0 } else { a >> b }),
        (B::ShiftRight, Type::S32, |a, b| ((a as i32) >> b.min(31)) as u32),
    ];
    let results = map_words([a, b], |k, [a, b]| {
        cases.iter().map(|(operation, ty, _)| binary(k, *operation, *ty, a, b)).collect()
    });
    for (result, (operation, ty, expected)) in results.iter().zip(cases) {
        for lane in 0..32 {
            let (a, b) = (a[lane], b[lane]);
            assert_eq!(result[lane], expected(a, b), "{operation:?} {ty:?} of {a} and {b}");
        }
    }
}

/// Quotients, also of subnormal numbers, of infinities and by zero.
#[test]
fn quotients_are_rounded_to_nearest() {
    let interesting = [1, 7, 0x0080_0001, 0x3F80_0001, 0x4049_0FDB, 0x7F7F_FFFF, 0x7F80_0000, 0];
    let a = each(|lane| interesting[lane as usize % 8]);
    let b = each(|lane| interesting[(lane / 5) as usize % 8] | (lane % 2) << 31);
    let results = map_words([a, b], |k, [a, b]| {
        let [a, b] = [a, b].map(|bits| k.eval(bits.reinterpret::<F32>()));
        let quotient = k.divide_rounded(a, b);
        vec![word(k, quotient)]
    });
    for lane in 0..32 {
        let exact = f32::from_bits(a[lane]) / f32::from_bits(b[lane]);
        let found = f32::from_bits(results[0][lane]);
        assert!(found.to_bits() == exact.to_bits() || found.is_nan() && exact.is_nan());
    }
}

#[test]
fn wide_integers() {
    let a = each(|lane| 0xFFFF_FFF0 + lane / 2);
    let results = map_words([a], |k, [a]| {
        let wide = k.eval(a.convert::<U64>() * 3 + 5);
        let high = k.eval((wide >> 32).convert::<U32>());
        let low = k.eval(wide.convert::<U32>());
        let product = k.register::<U64>();
        k.push(Instruction::MultiplyWide {
            ty: Type::U32,
            dst: product.register(),
            a: a.into(),
            b: a.into(),
        });
        let (product_low, product_high) = (k.register::<U32>(), k.register::<U32>());
        k.push(Instruction::Split {
            low: product_low.register(),
            high: product_high.register(),
            src: product.register(),
        });
        vec![low, high, product_low, product_high]
    });
    for lane in 0..32 {
        let wide = a[lane] as u64 * 3 + 5;
        let square = a[lane] as u64 * a[lane] as u64;
        let found = [0, 1, 2, 3].map(|index| results[index][lane]);
        assert_eq!(found[0] as u64 | (found[1] as u64) << 32, wide);
        assert_eq!(found[2] as u64 | (found[3] as u64) << 32, square);
    }
}

#[test]
fn bits_picked_and_shifted() {
    let a = each(|lane| 0x8765_4321u32.rotate_left(lane));
    let b = each(|lane| 0x0F0F_1234u32.rotate_right(lane));
    let results = map_words([a, b], |k, [a, b]| {
        let mut out = Vec::new();
        for selector in [0x3210, 0x7654, 0x5140, 0xBA98] {
            let dst = k.register::<U32>();
            k.push(Instruction::PermuteBytes {
                dst: dst.register(),
                a: a.into(),
                b: b.into(),
                selector: Operand::u32(selector),
            });
            out.push(dst);
        }
        for left in [false, true] {
            let dst = k.register::<U32>();
            k.push(Instruction::FunnelShift {
                left,
                dst: dst.register(),
                low: a.into(),
                high: b.into(),
                amount: Operand::u32(37),
            });
            out.push(dst);
        }
        let dst = k.register::<U32>();
        // (a & b) ^ c
        let table = (0xF0 & 0xCC) ^ 0xAA;
        k.push(Instruction::Logic3 {
            dst: dst.register(),
            a: a.into(),
            b: b.into(),
            c: Operand::u32(0xFF00),
            table,
        });
        out.push(dst);
        let dst = k.register::<U32>();
        k.push(Instruction::Unary {
            operation: UnaryOperation::PopulationCount,
            ty: Type::U32,
            dst: dst.register(),
            a: a.into(),
        });
        out.push(dst);
        out
    });
    for lane in 0..32 {
        let (a, b) = (a[lane], b[lane]);
        let [a0, a1, a2, a3] = a.to_le_bytes();
        let [b0, b1, _, _] = b.to_le_bytes();
        let found: Vec<u32> = results.iter().map(|r| r[lane]).collect();
        assert_eq!(found[0], a);
        assert_eq!(found[1], b);
        assert_eq!(found[2], u32::from_le_bytes([a0, b0, a1, b1]));
        let sign = |x: u8| if x & 0x80 != 0 { 0xFF } else { 0 };
        assert_eq!(found[3], u32::from_le_bytes([a0, a1, a2, a3].map(sign)));
        assert_eq!(found[4], ((((b as u64) << 32) | a as u64) >> 5) as u32);
        assert_eq!(found[5], ((((b as u64) << 32 | a as u64) << 5) >> 32) as u32);
        assert_eq!(found[6], (a & b) ^ 0xFF00);
        assert_eq!(found[7], a.count_ones());
    }
}

#[test]
fn floats_and_nan() {
    let values = [0.0, -0.0, 1.0, -2.5, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-40, 3e38];
    let a = each(|lane| values[lane as usize % 9].to_bits());
    let b = each(|lane| values[(lane / 4) as usize % 9].to_bits());
    let results = map_words([a, b], |k, [a, b]| {
        let (a, b) = (k.eval(a.reinterpret::<F32>()), k.eval(b.reinterpret::<F32>()));
        let sum = k.eval(a + b);
        let product = k.eval(a * b);
        let (low, high) = (k.eval(a.minimum(b)), k.eval(a.maximum(b)));
        let fused = k.fma(a, b, 1.0);
        let power = k.exp2(a);
        let reciprocal = k.reciprocal(a);
        let less = k.eval(a.less(b));
        let chosen = k.eval(less.select::<F32>(a, b));
        let all = [sum, product, low, high, fused, power, reciprocal, chosen];
        all.map(|r| word(k, r)).to_vec()
    });
    for lane in 0..32 {
        let (x, y) = (f32::from_bits(a[lane]), f32::from_bits(b[lane]));
        let found: Vec<f32> = results.iter().map(|r| f32::from_bits(r[lane])).collect();
        let same = |found: f32, expected: f32| {
            assert!(
                found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()),
                "{found}, not {expected}, of {x} and {y}"
            );
            assert!(
                !found.is_nan()
                    || found.to_bits() == 0x7FFF_FFFF
                    || found.to_bits() == x.to_bits()
                    || found.to_bits() == y.to_bits()
            );
        };
        same(found[0], x + y);
        same(found[1], x * y);
        assert_eq!(found[2].is_nan(), x.is_nan() && y.is_nan());
        assert_eq!(found[3].is_nan(), x.is_nan() && y.is_nan());
        same(found[4], x.mul_add(y, 1.0));
        // Subnormals count as zero.
        if x == 1e-40 {
            assert_eq!((found[5], found[6]), (1.0, f32::INFINITY));
        }
        if x == -2.5 {
            assert_eq!((found[5], found[6]), ((-2.5f32).exp2(), -0.4));
        }
        same(found[7], if x < y { x } else { y });
    }
}
