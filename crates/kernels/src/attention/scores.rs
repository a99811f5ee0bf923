//! Score rules between QK^T and the softmax: softcap and ALiBi.
//!
//! The scale comes last, because the softmax folds it into its exponents: a rule leaves scores that
//! [`ScoreRule::scale_log2`] brings to units of log2, so that one `ex2` is an exponential.

use std::f32::consts::{LN_2, LOG2_E};

use ptx::{Builder, Expression, F32, GlobalAddress, Pred, Reg, S32, Select, U32, U64, Value};

use super::{Rules, Score};
use crate::parameter::{List, Number, Scale};

/// How the products QK^T become scores, with the factors in registers.
#[derive(Clone, Copy)]
pub(crate) struct ScoreRule {
    /// The last factor of scores, which brings them to units of log2.
    pub(crate) scale_log2: Reg<F32>,
    /// `2 log2(e) * scale / cap` with a softcap, in which case `scale_log2` is the cap times
    /// log2(e).
    cap: Option<Reg<F32>>,
    /// The polynomial for small scores, where a kernel has one.
    small: Option<SmallTanh>,
    /// The factor that brings scores to natural units before a score function; `scale_log2` is then
    /// log2(e).
    natural: Option<Reg<F32>>,
    /// The reciprocal of the scale, where a score function takes scores before their scale.
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
        let plain = ScoreRule { scale_log2, cap, small: None, natural: None, inverse: None };
        match rules.score_function {
            None => plain,
            Some(_) => ScoreRule {
                scale_log2: k.eval(LOG2_E),
                natural: Some(k.eval(scale_log2 * LN_2)),
                ..plain
            },
        }
    }

    /// Returns whether scores are capped.
    pub(crate) const fn is_capped(&self) -> bool {
        self.cap.is_some()
    }

    /// Lets a score function that only adds to scores take them before their scale, which must be
    /// positive: the softmax then applies the scale.
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

    /// Lets a warp whose scores are all well below the cap, as most are, use a polynomial.
    /// `two_ways` says that there are registers for both ways.
    pub(crate) fn with_small_tanh(self, two_ways: bool) -> Self {
        ScoreRule { small: two_ways.then_some(SmallTanh::OfExponents), ..self }
    }

    /// Does the same with a polynomial of the scores themselves, one instruction less for each:
    /// where there are registers for its coefficients.
    pub(crate) fn with_tanh_of_scores(self, k: &mut Builder) -> Self {
        let small = self.cap.map(|cap| SmallTanh::of_scores(k, cap));
        ScoreRule { small, ..self }
    }

    /// Raises the cap to at least [`LEAST_OUTER`], so that [`HIDDEN_TANH`] gives a weight of zero.
    /// Scores with a smaller cap are practically zero anyway.
    pub(crate) fn with_finite_hidden(self, k: &mut Builder) -> Self {
        match self.cap {
            None => self,
            Some(_) => {
                ScoreRule { scale_log2: k.eval(self.scale_log2.maximum(LEAST_OUTER)), ..self }
            }
        }
    }

    /// Applies the softcap, except for its last factor, the cap. The hardware's `tanh` is only
    /// accurate to 11 bits, and `tanh(x) = 1 - 2 / (e^2x + 1)` takes two more operations of the
    /// special function units, which the exponentials of the softmax keep busy already.
    pub(crate) fn cap(&self, k: &mut Builder, scores: &[Score]) {
        let Some(cap) = self.cap else { return };
        let Some(way) = &self.small else { return tanh(k, cap, scores) };
        let largest = largest_size(k, scores);
        let small = way.suffices(k, cap, largest);
        k.if_else(small, |k| way.tanh(k, cap, scores), |k| tanh(k, cap, scores));
    }

    /// Brings scores to natural units, where a score function takes them so.
    pub(crate) fn in_natural_units(&self, k: &mut Builder, scores: &[Score]) {
        let Some(natural) = self.natural else { return };
        for Score { register, .. } in scores {
            k.set(*register, *register * natural);
        }
    }

    /// Brings scores to units of log2, for kernels whose softmax does not.
    pub(crate) fn scale(&self, k: &mut Builder, scores: &[Score]) {
        for Score { register, .. } in scores {
            k.set(*register, *register * self.scale_log2);
        }
    }
}

/// Returns the largest absolute value of the thread's scores, in several independent dependency
/// chains.
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

/// `e^2x` is `2^(EXPONENT * x)`.
const EXPONENT: f32 = 2.0 * LOG2_E;

fn tanh(k: &mut Builder, cap: Reg<F32>, scores: &[Score]) {
    for Score { register, .. } in scores {
        let power = k.exp2(*register * cap);
        let fraction = k.reciprocal(power + 1.0);
        let tanh = k.fma(fraction, -2.0, 1.0);
        k.set(*register, tanh);
    }
}

/// Largest `|x|` for which [`SmallTanh`] is accurate.
const SMALL: f32 = 0.5;

/// Coefficients of `tanh(x) / x` as a polynomial in `x^2`, for `|x|` up to [`SMALL`]: accurate to
/// 6e-7.
const TANH: [f32; 4] = [0.999_999_45, -0.333_262_84, 0.131_899_4, -0.044_392_74];

/// The polynomial that approximates tanh for small scores.
#[derive(Clone, Copy)]
enum SmallTanh {
    /// In the exponents of two of `e^2x`.
    OfExponents,
    /// In the scores themselves, up to `most`, with coefficients that are computed once.
    OfScores { coefficients: [Reg<F32>; 4], most: Reg<F32> },
}

impl SmallTanh {
    /// Largest score for [`SmallTanh::OfScores`]: up to here no coefficient that underflows
    /// matters, and no square overflows.
    const MOST: f32 = 1e4;
    /// Largest factor from scores to `x` for which the coefficients are finite.
    const LARGEST_FACTOR: f32 = 1e5;

    fn of_scores(k: &mut Builder, cap: Reg<F32>) -> Self {
        let factor = k.eval(cap * (1.0 / EXPONENT));
        let square = k.eval(factor * factor);
        let mut power = factor;
        let coefficients = TANH.map(|it| {
            let coefficient = k.eval(power * it);
            power = k.eval(power * square);
            coefficient
        });
        let inverse = k.reciprocal(factor);
        let most = (inverse * SMALL).minimum(SmallTanh::MOST);
        let most = factor.at_most(SmallTanh::LARGEST_FACTOR).select::<F32>(most, -1.0);
        SmallTanh::OfScores { coefficients, most: k.eval(most) }
    }

    /// Returns whether the polynomial serves all scores of the warp; `largest` is the thread's
    /// largest.
    fn suffices(&self, k: &mut Builder, cap: Reg<F32>, largest: Reg<F32>) -> Reg<Pred> {
        match self {
            SmallTanh::OfExponents => {
                let exponent = k.absolute(largest * cap);
                k.all(exponent.at_most(SMALL * EXPONENT))
            }
            SmallTanh::OfScores { most, .. } => k.all(largest.at_most(*most)),
        }
    }

    fn tanh(&self, k: &mut Builder, cap: Reg<F32>, scores: &[Score]) {
        // Coefficients for exponents instead of `x`.
        let constant = |power: usize| TANH[power] / EXPONENT.powi(2 * power as i32 + 1);
        for Score { register, .. } in scores {
            let (x, coefficients): (_, [Value<F32>; 4]) = match self {
                SmallTanh::OfExponents => {
                    (k.eval(*register * cap), [0, 1, 2, 3].map(|power| constant(power).into()))
                }
                SmallTanh::OfScores { coefficients, .. } => {
                    (*register, coefficients.map(Value::from))
                }
            };
            let [first, second, third, fourth] = coefficients;
            let square = k.eval(x * x);
            let mut sum = k.fma(square, fourth, third);
            sum = k.fma(sum, square, second);
            sum = k.fma(sum, square, first);
            k.set(*register, sum * x);
        }
    }
}

/// Stands for the tanh of a hidden score in the backward pass: -2^63. Its weight is zero, and its
/// slope, `1 - tanh^2`, is finite.
const HIDDEN_TANH: f32 = -9.223_372e18;

impl Rules {
    /// Returns what a score that the mask hides becomes before its last factor.
    pub(crate) const fn hidden_score(&self) -> f32 {
        if self.softcap { HIDDEN_TANH } else { f32::NEG_INFINITY }
    }
}

/// Smallest last factor of capped scores for which [`HIDDEN_TANH`] gives a weight of zero.
const LEAST_OUTER: f32 = 1.0 / (1u64 << 40) as f32;

/// Applies ALiBi: subtracts from each score `slope`, in the current units of scores, times the
/// distance between query and key. `distance` is from the thread's first column to the position of
/// its first row; `rows` are the offsets of its rows from that.
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

/// Returns the distances from each of a thread's rows to its first column.
pub(crate) fn distances(k: &mut Builder, rows: &[u32], distance: Value<S32>) -> Vec<Reg<F32>> {
    let first = k.eval(distance.convert::<F32>());
    (rows.iter()).map(|row| if *row == 0 { first } else { k.eval(first + *row as f32) }).collect()
}

/// ALiBi slopes by sequence and query head.
#[derive(Clone, Copy)]
pub(crate) struct Slopes {
    address: Reg<GlobalAddress>,
    /// Stride from one sequence's slopes to the next; 0 where all sequences share them.
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

    /// Loads a slope in units of log2.
    pub(crate) fn log2(&self, k: &mut Builder, sequence: Reg<U32>, head: Reg<U32>) -> Reg<F32> {
        let slope = self.load(k, sequence, head);
        k.eval(slope * LOG2_E)
    }

    /// Loads a slope in units of unscaled scores.
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
