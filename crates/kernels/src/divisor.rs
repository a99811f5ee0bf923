//! Division by a number that is known at launch, as a multiplication and a shift.

use ptx::{Builder, Pred, Reg, U32, Value};

use crate::parameter::{Number, Parameter};

/// A divisor with its rounded reciprocal, as a launch passes it.
///
/// `n / d = (n * multiplier) >> 32 >> shift` for all `n` below 2^31, with the
/// multiplier rounded up (Granlund and Montgomery, "Division by invariant
/// integers using multiplication", 1994).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Divisor {
    /// The divisor itself.
    pub number: u32,
    /// The rounded reciprocal.
    pub multiplier: u32,
    /// How far the upper half of the product is shifted right.
    pub shift: u32,
}

impl Divisor {
    /// Computes the divisor for a number from 1 to 2^31; 0 is taken for 1.
    pub fn new(number: u32) -> Self {
        if number <= 1 {
            // The multiplier of 1 would be 2^32, which does not fit: kernels test for 1 instead.
            return Divisor { number: 1, multiplier: 0, shift: 0 };
        }
        let shift = 31 - (number - 1).leading_zeros();
        let multiplier = ((1u64 << (32 + shift)).div_ceil(number as u64)) as u32;
        Divisor { number, multiplier, shift }
    }
}

/// A [`Divisor`] in a kernel's registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DivisorRegisters {
    pub(crate) number: Reg<U32>,
    multiplier: Reg<U32>,
    shift: Reg<U32>,
}

impl DivisorRegisters {
    pub(crate) fn parameters(k: &mut Builder, number: Number) -> Self {
        DivisorRegisters {
            number: number.read(k),
            multiplier: k.parameter(&Parameter::Multiplier(number).to_string()),
            shift: k.parameter(&Parameter::Shift(number).to_string()),
        }
    }

    /// Returns `first` where `which` holds, else `second`.
    pub(crate) fn chosen(k: &mut Builder, which: Reg<Pred>, first: &Self, second: &Self) -> Self {
        use ptx::Select;
        let mut choose =
            |of: fn(&Self) -> Reg<U32>| k.eval(which.select::<U32>(of(first), of(second)));
        DivisorRegisters {
            number: choose(|it| it.number),
            multiplier: choose(|it| it.multiplier),
            shift: choose(|it| it.shift),
        }
    }

    /// Returns the quotient and the remainder of a dividend below 2^31.
    pub(crate) fn divide(&self, k: &mut Builder, dividend: Reg<U32>) -> (Reg<U32>, Reg<U32>) {
        use ptx::{Expression, Select};
        let high = k.multiply_high(dividend, self.multiplier);
        let one = self.number.equals(1);
        let quotient = k.eval(one.select::<U32>(dividend, high >> Value::from(self.shift)));
        let remainder = k.eval(dividend - quotient * self.number);
        (quotient, remainder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn divide(n: u32, d: Divisor) -> u32 {
        if d.number == 1 { n } else { ((n as u64 * d.multiplier as u64) >> 32) as u32 >> d.shift }
    }

    #[test]
    fn quotients_are_exact() {
        let interesting = |around: u64| (around.saturating_sub(2)..around + 3).map(|n| n as u32);
        for number in (1..2000).chain([4095, 4096, 4097, 65_535, 1 << 20, (1 << 31) - 1, 1 << 31]) {
            let divisor = Divisor::new(number);
            for multiple in [0u64, 1, 2, 3, 1000, 65_536, (1 << 31) / number as u64] {
                for n in interesting(multiple * number as u64).filter(|n| *n < 1 << 31) {
                    assert_eq!(divide(n, divisor), n / number, "{n} / {number}");
                }
            }
        }
    }
}
