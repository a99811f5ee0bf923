//! The instructions of each operation of a function.

use std::f32::consts::LOG2_E;

use ptx::{Builder, Expression, F32, Pred, Reg, S32, Select, U32, Value};

use super::Computed;
use crate::attention::function::node::{Binary, Comparison, Unary};

/// Emits an integer operation. `constant` is the value of `b` if it is known, and `positive` says
/// that `a` is known not to be negative; both make division cheaper. Division rounds down.
pub(super) fn integer_binary(
    k: &mut Builder,
    operation: Binary,
    a: Value<S32>,
    b: Value<S32>,
    constant: Option<i32>,
    positive: bool,
) -> Value<S32> {
    let value = match operation {
        Binary::Add => a + b,
        Binary::Subtract => a - b,
        Binary::Multiply => a * b,
        Binary::Minimum => a.minimum(b),
        Binary::Maximum => a.maximum(b),
        Binary::And => a & b,
        Binary::Or => a | b,
        Binary::Xor => a ^ b,
        Binary::ShiftLeft => a << (b & 31).reinterpret::<U32>(),
        Binary::ShiftRight => a >> (b & 31).reinterpret::<U32>(),
        Binary::Divide | Binary::Remainder => {
            let a = k.eval(a);
            let [quotient, rest] = match constant {
                Some(by) if by > 0 && (by as u32).is_power_of_two() => {
                    [a >> by.trailing_zeros(), a & (by - 1)]
                }
                Some(by) if by > 0 && positive => {
                    let whole = k.eval(a.reinterpret::<U32>() / by as u32);
                    let whole = k.eval(whole.reinterpret::<S32>());
                    [whole.into(), a - whole * by]
                }
                _ => {
                    let b = k.eval(b);
                    floor_divide(k, a, b)
                }
            };
            if operation == Binary::Divide { quotient } else { rest }
        }
    };
    k.eval(value).into()
}

/// Returns the quotient rounded down and the remainder. Division by zero gives a quotient of zero
/// and a remainder of `a`.
fn floor_divide(k: &mut Builder, a: Reg<S32>, b: Reg<S32>) -> [Value<S32>; 2] {
    // Divisors of zero and minus one are replaced by one: the hardware's result is not defined for
    // zero, nor for the overflow that minus one can cause.
    let special = k.eval((b + 1).reinterpret::<U32>().less(2u32));
    let divisor = k.eval(special.select::<S32>(1, b));
    let truncated = k.eval(a / divisor);
    let rest = k.eval(a - truncated * divisor);
    let wrong = k.eval(rest.differs(0) & (rest ^ divisor).less(0));
    let down = k.eval(wrong.select::<S32>(truncated - 1, truncated));
    let left = k.eval(wrong.select::<S32>(rest + divisor, rest));
    let by_zero = k.eval(b.equals(0));
    let of_special = k.eval(by_zero.select::<S32>(0, -a));
    let rest_of_special = k.eval(by_zero.select::<S32>(a, 0));
    [special.select::<S32>(of_special, down), special.select::<S32>(rest_of_special, left)]
}

pub(super) fn unary(k: &mut Builder, operation: Unary, a: Computed) -> Computed {
    use Computed::{Bool, Float, Integer};
    match (operation, a) {
        (Unary::Negate, Integer(a)) => Integer(k.eval(-a).into()),
        (Unary::Negate, a) => Float(k.eval(-a.float()).into()),
        (Unary::Absolute, Integer(a)) => {
            let a = k.eval(a);
            Integer(k.eval(a.maximum(-a)).into())
        }
        (Unary::Absolute, a) => Float(k.absolute(a.float()).into()),
        (Unary::Not, Integer(a)) => Integer(k.eval(!a).into()),
        (Unary::Not, a) => Bool(k.eval(!a.boolean()).into()),
        (Unary::Tanh, a) => {
            // tanh(a) = 1 - 2 / (e^(2a) + 1): the hardware's `tanh` is accurate to 11 bits only.
            let power = k.exp2(a.float() * (2.0 * LOG2_E));
            let fraction = k.reciprocal(power + 1.0);
            Float(k.fma(fraction, -2.0, 1.0).into())
        }
        (Unary::Exp2, a) => Float(k.exp2(a.float()).into()),
        (Unary::Log2, a) => Float(k.log2(a.float()).into()),
        (Unary::ToFloat, a) => Float(k.eval(a.integer().convert::<F32>()).into()),
        (Unary::ToInteger, a) => Integer(k.eval(a.float().convert::<S32>()).into()),
    }
}

pub(super) fn float_binary(
    k: &mut Builder,
    operation: Binary,
    a: Value<F32>,
    b: Value<F32>,
) -> Value<F32> {
    let value = match operation {
        Binary::Add => a + b,
        Binary::Subtract => a - b,
        Binary::Multiply => a * b,
        Binary::Divide => a / b,
        Binary::Minimum => a.minimum(b),
        Binary::Maximum => a.maximum(b),
        _ => unreachable!("types were checked"),
    };
    k.eval(value).into()
}

pub(super) fn compare<T: ptx::Number>(
    comparison: Comparison,
    a: Value<T>,
    b: Value<T>,
) -> Value<Pred> {
    match comparison {
        Comparison::Equal => a.equals(b),
        // True where either side is NaN.
        Comparison::NotEqual => !a.equals(b),
        Comparison::Less => a.less(b),
        Comparison::AtMost => a.at_most(b),
        Comparison::Greater => a.greater(b),
        Comparison::AtLeast => a.at_least(b),
    }
}
