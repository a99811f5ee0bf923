//! What becomes of the product of a query and a key before the softmax: softcap and ALiBi.
//!
//! The scale is last, for the softmax folds it into its exponents: a rule leaves scores that
//! [`ScoreRule::scale_log2`] brings into units of log2, so that one `ex2` is an exponential.

use std::f32::consts::{LN_2, LOG2_E};

use ptx::{Builder, Choose, Expression, F32, GlobalAddress, Pred, Reg, S32, U32, U64, Value};

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
    /// How small scores are capped, where they are not as others are.
    small: Option<SmallTanh>,
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
        ScoreRule { small: two_ways.then_some(SmallTanh::OfExponents), ..self }
    }

    /// The same by a polynomial of the scores themselves, an instruction less for each: where there
    /// are registers for its coefficients.
    pub(crate) fn with_tanh_of_scores(self, k: &mut Builder) -> Self {
        let small = self.cap.map(|cap| SmallTanh::of_scores(k, cap));
        ScoreRule { small, ..self }
    }

    /// The same with a cap that is large enough for [`HIDDEN_TANH`]. Scores capped so low are zero.
    pub(crate) fn with_finite_hidden(self, k: &mut Builder) -> Self {
        match self.cap {
            None => self,
            Some(_) => {
                ScoreRule { scale_log2: k.eval(self.scale_log2.maximum(LEAST_OUTER)), ..self }
            }
        }
    }

    /// Caps scores. The hardware's own tanh is good to 11 bits only, and
    /// `tanh(x) = 1 - 2 / (e^2x + 1)` has two more operations for the special function units,
    /// which the exponentials of the softmax keep busy already.
    pub(crate) fn cap(&self, k: &mut Builder, scores: &[Score]) {
        let Some(cap) = self.cap else { return };
        let Some(way) = &self.small else { return tanh(k, cap, scores) };
        let largest = largest_size(k, scores);
        let small = way.suffices(k, cap, largest);
        k.if_else(small, |k| way.tanh(k, cap, scores), |k| tanh(k, cap, scores));
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

/// Up to here [`SmallTanh`] serves.
const SMALL: f32 = 0.5;

/// `tanh(x) / x` by powers of the square of x, for x up to [`SMALL`]: right to 6e-7.
const TANH: [f32; 4] = [0.999_999_45, -0.333_262_84, 0.131_899_4, -0.044_392_74];

/// The way of small scores: a polynomial.
#[derive(Clone, Copy)]
enum SmallTanh {
    /// Of the exponents of two in `e^2x`.
    OfExponents,
    /// Of scores, with coefficients that are computed once, up to a score.
    OfScores { coefficients: [Reg<F32>; 4], most: Reg<F32> },
}

impl SmallTanh {
    /// No coefficient that becomes zero matters up to this score, and no square is infinite.
    const MOST: f32 = 1e4;
    /// Beyond this factor of x coefficients would not be finite.
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
        let most = factor.at_most(SmallTanh::LARGEST_FACTOR).choose::<F32>(most, -1.0);
        SmallTanh::OfScores { coefficients, most: k.eval(most) }
    }

    /// Whether it serves all scores of the warp, of which the thread has this largest one.
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
        // Constants, for exponents instead of x.
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

/// In the place of the hyperbolic tangent of a hidden score: its weight is zero, and its slope,
/// `1 - tanh^2`, a number: that is 2^63.
pub(crate) const HIDDEN_TANH: f32 = -9.223_372e18;

/// The least factor of a tangent with which that is so.
const LEAST_OUTER: f32 = 1.0 / (1u64 << 40) as f32;

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
