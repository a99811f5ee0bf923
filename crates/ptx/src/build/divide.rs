//! Division by constants: the assembler goes through a reciprocal of floating point for these as it does for
//! numbers that it does not know.

use crate::{BinaryOperation, Operand, Type};

/// What an operation becomes, step after step, each with the result of the one before; nothing where it stays as
/// it is. A power of two is a shift, or a mask for the remainder. Other divisors of 32-bit numbers are a product with
/// the rounded reciprocal, of which the upper half is shifted (Granlund and Montgomery, "Division by invariant
/// integers using multiplication", 1994).
pub(super) fn steps(
    operation: BinaryOperation,
    ty: Type,
    b: Operand,
) -> Vec<(BinaryOperation, Operand)> {
    let Operand::Immediate(divisor) = b else { return Vec::new() };
    match (operation, ty) {
        (BinaryOperation::Divide, Type::U32 | Type::U64) if divisor.is_power_of_two() => {
            vec![(BinaryOperation::ShiftRight, Operand::u32(divisor.trailing_zeros()))]
        }
        (BinaryOperation::Remainder, Type::U32 | Type::U64) if divisor.is_power_of_two() => {
            vec![(BinaryOperation::And, Operand::Immediate(divisor - 1))]
        }
        (BinaryOperation::Divide, Type::U32) => by_reciprocal(divisor),
        _ => Vec::new(),
    }
}

/// Division of all 32-bit numbers. An even divisor that would want 33 bits of reciprocal is halved first, and the
/// number with it; an odd one is left to the instruction.
fn by_reciprocal(divisor: u64) -> Vec<(BinaryOperation, Operand)> {
    if !(3..=u64::from(u32::MAX)).contains(&divisor) {
        return Vec::new();
    }
    // The multiplier and the shift that are exact for numbers of so many bits.
    let reciprocal = |divisor: u64, bits: u32| {
        (0..32u32).find_map(|shift| {
            let power = 1u128 << (32 + shift);
            let multiplier = power.div_ceil(divisor.into());
            let excess = multiplier * u128::from(divisor) - power;
            let exact = excess << bits <= power;
            let multiplier = u32::try_from(multiplier).ok()?;
            exact.then_some((multiplier, shift))
        })
    };
    let zeros = divisor.trailing_zeros();
    let [whole, halved] = [(0, 32), (zeros, 32 - zeros)].map(|(before, bits)| {
        let (multiplier, after) = reciprocal(divisor >> before, bits)?;
        Some([
            (BinaryOperation::ShiftRight, before),
            (BinaryOperation::MultiplyHigh, multiplier),
            (BinaryOperation::ShiftRight, after),
        ])
    });
    let steps = whole.or(halved).into_iter().flatten();
    let steps = steps.filter(|step| *step != (BinaryOperation::ShiftRight, 0));
    steps.map(|(operation, b)| (operation, Operand::u32(b))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn division(divisor: u32) -> Vec<(BinaryOperation, Operand)> {
        steps(BinaryOperation::Divide, Type::U32, Operand::u32(divisor))
    }

    #[test]
    fn quotients_are_exact() {
        let mut left = Vec::new();
        for divisor in (2..5000u32).chain([65_535, 1 << 31, (1 << 31) + 1, u32::MAX - 1, u32::MAX])
        {
            let steps = division(divisor);
            if steps.is_empty() {
                left.push(divisor);
                continue;
            }
            let around =
                |n: u64| (n.saturating_sub(2)..n + 3).filter_map(|n| u32::try_from(n).ok());
            let multiples = [0, 1, 2, 3, 1000, u32::MAX / divisor / 2, u32::MAX / divisor];
            let multiples = multiples.map(|multiple| u64::from(multiple) * u64::from(divisor));
            for n in multiples.into_iter().chain([1 << 31, u64::from(u32::MAX)]).flat_map(around) {
                let found = steps.iter().fold(n, |n, step| match step {
                    (BinaryOperation::MultiplyHigh, Operand::Immediate(b)) => {
                        ((u64::from(n) * b) >> 32) as u32
                    }
                    (BinaryOperation::ShiftRight, Operand::Immediate(b)) => n >> b,
                    _ => panic!("{step:?}"),
                });
                assert_eq!(found, n / divisor, "{n} / {divisor}");
            }
        }
        assert!(left.iter().all(|divisor| divisor % 2 == 1), "{left:?}");
        assert!(left.contains(&7) && left.len() < 1300, "{}", left.len());
    }

    #[test]
    fn a_division_by_the_keys_of_a_block_is_short() {
        assert_eq!(division(64).len(), 1);
        for keys in [80, 96, 112, 176, 192, 224] {
            assert_eq!(division(keys).len(), 2, "{keys}");
        }
    }
}
