//! What becomes of the product of a query and a key before the softmax: softcap and ALiBi.
//!
//! The scale is last, for the softmax folds it into its exponents: a rule leaves scores that
//! [`ScoreRule::scale_log2`] brings into units of log2, so that one `ex2` is an exponential.

use std::f32::consts::{LN_2, LOG2_E};

use ptx::{Builder, Expression, F32, GlobalAddress, Reg, S32, U32, U64, Value};

use super::{Rules, Score};
use crate::parameter::{List, Number, Scale};

/// How products become scores.
#[derive(Clone, Copy)]
pub(crate) struct ScoreRule {
    /// What scores are multiplied with at last.
    pub(crate) scale_log2: Reg<F32>,
    /// Twice log2(e) times the scale over the cap, where there is a cap; the last factor is the
    /// cap then.
    cap: Option<Reg<F32>>,
    /// Whether there are registers for two ways to cap.
    two_ways: bool,
    /// What brings capped scores into natural units, where a function takes them: the last factor
    /// is log2(e) then.
    natural: Option<Reg<F32>>,
    /// Where a function takes scores before their scale, one over it.
    pub(crate) inverse: Option<Reg<F32>>,
}

impl ScoreRule {
    pub(crate) fn parameters(k: &mut Builder, rules: &Rules) -> Self {
        let cap = rules.softcap.then(|| {
            let inner: Reg<F32> = Scale::Inner.read(k);
            k.eval(inner * EXPONENT)
        });
        let scale = if rules.softcap { Scale::Outer } else { Scale::Log2 };
        let scale_log2 = scale.read(k);
        let plain = ScoreRule { scale_log2, cap, two_ways: false, natural: None, inverse: None };
        match rules.score_function {
            None => plain,
            Some(_) => ScoreRule {
                scale_log2: k.eval(LOG2_E),
                natural: Some(k.eval(scale_log2 * LN_2)),
                ..plain
            },
        }
    }

    /// Lets a function that only adds to scores take them before their scale, which is positive.
    pub(crate) fn with_scale_last(self, k: &mut Builder, rules: &Rules) -> Self {
        match (self.natural, rules.score_function) {
            (Some(natural), Some(function)) if function.takes_unscaled() => ScoreRule {
                scale_log2: k.eval(natural * LOG2_E),
                natural: None,
                inverse: Some(k.reciprocal(natural)),
                ..self
            },
            _ => self,
        }
    }

    /// Lets a warp whose scores are all well below the cap, as most are, take a polynomial:
    /// where there are registers for two ways.
    pub(crate) fn with_small_tanh(self, two_ways: bool) -> Self {
        ScoreRule { two_ways, ..self }
    }

    /// Caps scores. The hardware's own tanh is good to 11 bits only, and
    /// `tanh(x) = 1 - 2 / (e^2x + 1)` has two more operations for the special function units,
    /// which the exponentials of the softmax keep busy already.
    pub(crate) fn cap(&self, k: &mut Builder, scores: &[Score]) {
        let Some(cap) = self.cap else { return };
        if !self.two_ways {
            return tanh(k, cap, scores);
        }
        let largest = largest_size(k, scores);
        let exponent = k.absolute(largest * cap);
        let small = k.all(exponent.at_most(SMALL * EXPONENT));
        k.if_else(small, |k| small_tanh(k, cap, scores), |k| tanh(k, cap, scores));
    }

    /// Brings scores into natural units, where a function takes them.
    pub(crate) fn in_natural_units(&self, k: &mut Builder, scores: &[Score]) {
        let Some(natural) = self.natural else { return };
        for Score { register, .. } in scores {
            k.set(*register, *register * natural);
        }
    }

    /// Brings scores into units of log2, where the softmax does not.
    pub(crate) fn scale(&self, k: &mut Builder, scores: &[Score]) {
        for Score { register, .. } in scores {
            k.set(*register, *register * self.scale_log2);
        }
    }
}

/// The largest absolute value. In several strands, each of which waits for itself alone.
fn largest_size(k: &mut Builder, scores: &[Score]) -> Reg<F32> {
    const STRANDS: usize = 8;
    let mut largest: Vec<Reg<F32>> = Vec::new();
    for (index, Score { register, .. }) in scores.iter().enumerate() {
        let size = k.absolute(*register);
        match largest.get_mut(index % STRANDS) {
            Some(strand) => *strand = k.eval(strand.maximum(size)),
            None => largest.push(size),
        }
    }
    let first = largest[0];
    largest[1..].iter().fold(first, |all, strand| k.eval(all.maximum(*strand)))
}

/// The exponent of two in `e^2x`, for each x.
const EXPONENT: f32 = 2.0 * LOG2_E;

fn tanh(k: &mut Builder, cap: Reg<F32>, scores: &[Score]) {
    for Score { register, .. } in scores {
        let power = k.exp2(*register * cap);
        let fraction = k.reciprocal(power + 1.0);
        let tanh = k.fma(fraction, -2.0, 1.0);
        k.set(*register, tanh);
    }
}

/// Up to here [`small_tanh`] serves.
const SMALL: f32 = 0.5;

/// `tanh(x) / x` by powers of the square of x, for x up to [`SMALL`]: right to 6e-7.
const TANH: [f32; 4] = [0.999_999_45, -0.333_262_84, 0.131_899_4, -0.044_392_74];

fn small_tanh(k: &mut Builder, cap: Reg<F32>, scores: &[Score]) {
    // For exponents instead of x.
    let coefficient = |power: usize| TANH[power] / EXPONENT.powi(2 * power as i32 + 1);
    for Score { register, .. } in scores {
        let exponent = k.eval(*register * cap);
        let square = k.eval(exponent * exponent);
        let mut sum = k.fma(square, coefficient(3), coefficient(2));
        sum = k.fma(sum, square, coefficient(1));
        sum = k.fma(sum, square, coefficient(0));
        k.set(*register, sum * exponent);
    }
}

/// ALiBi: takes from each score `slope`, in the units that scores have then, for each position
/// between query and key. `distance` is from the thread's first column to the position of its
/// first row, `rows` say how far below that its rows lie.
pub(crate) fn alibi(
    k: &mut Builder,
    scores: &[Score],
    rows: &[u32],
    distance: Value<S32>,
    slope: Reg<F32>,
) {
    let distances = distances(k, rows, distance);
    let cost = k.eval(-slope);
    for Score { row, column, register } in scores {
        let apart = k.absolute(distances[*row] - *column as f32);
        let lowered = k.fma(apart, cost, *register);
        k.set(*register, lowered);
    }
}

/// The distances from each of a thread's rows to its first column.
pub(crate) fn distances(k: &mut Builder, rows: &[u32], distance: Value<S32>) -> Vec<Reg<F32>> {
    let first = k.eval(distance.convert::<F32>());
    (rows.iter()).map(|row| if *row == 0 { first } else { k.eval(first + *row as f32) }).collect()
}

/// ALiBi slopes of sequences and heads.
#[derive(Clone, Copy)]
pub(crate) struct Slopes {
    address: Reg<GlobalAddress>,
    /// From the slopes of a sequence to the next's; 0 where all have the same.
    stride: Reg<U32>,
}

impl Slopes {
    pub(crate) fn parameters(k: &mut Builder) -> Self {
        Slopes { address: List::Slopes.address(k), stride: Number::SlopesStride.read(k) }
    }

    fn load(&self, k: &mut Builder, sequence: Reg<U32>, head: Reg<U32>) -> Reg<F32> {
        let index = k.eval(sequence * self.stride + head);
        k.load(self.address + index.convert::<U64>() * 4)
    }

    /// One in units of log2.
    pub(crate) fn log2(&self, k: &mut Builder, sequence: Reg<U32>, head: Reg<U32>) -> Reg<F32> {
        let slope = self.load(k, sequence, head);
        k.eval(slope * LOG2_E)
    }

    /// One in units of scores before their scale.
    pub(crate) fn unscaled(
        &self,
        k: &mut Builder,
        sequence: Reg<U32>,
        head: Reg<U32>,
        scale_log2: Reg<F32>,
    ) -> Reg<F32> {
        let slope = self.load(k, sequence, head);
        let inverse = k.reciprocal(scale_log2);
        k.eval(slope * LOG2_E * inverse)
    }
}
