//! Score rules between QK^T and the softmax: softcap and ALiBi.
//!
//! The scale comes last, because the softmax folds it into its exponents: a rule leaves scores that
//! [`ScoreRule::scale_log2`] brings to units of log2, so that one `ex2` is an exponential.

mod softcap;

use std::f32::consts::{LN_2, LOG2_E};

use ptx::{Builder, Expression, F32, GlobalAddress, Reg, S32, Select, U32, U64, Value};

use super::rows::{LEAST_SCORE, NOTHING_SEEN, NOTHING_SEEN_CAPPED};
use super::{Rules, Score};
use crate::parameter::{List, Number, Scale};
pub use softcap::CapPolynomial;
pub(crate) use softcap::CappedExponents;
use softcap::Softcap;

/// How the products QK^T become scores, with the factors in registers.
#[derive(Clone, Copy)]
pub(crate) struct ScoreRule {
    /// The last factor of scores, which brings them to units of log2.
    pub(crate) scale_log2: Reg<F32>,
    /// The softcap; `scale_log2` is then the cap times log2(e), or 1 where capped scores are in
    /// units of log2 already.
    softcap: Option<Softcap>,
    /// The factor that brings scores to natural units before a score function; `scale_log2` is then
    /// log2(e).
    natural: Option<Reg<F32>>,
    /// The reciprocal of the scale, where a score function takes scores before their scale.
    pub(crate) inverse: Option<Reg<F32>>,
}

impl ScoreRule {
    pub(crate) fn parameters(k: &mut Builder, rules: &Rules) -> Self {
        let softcap = rules.softcap.then(|| Softcap::parameters(k));
        let scale = if rules.softcap { Scale::Outer } else { Scale::Log2 };
        let scale_log2 = scale.read(k);
        let plain = ScoreRule { scale_log2, softcap, natural: None, inverse: None };
        match rules.score_function {
            None => plain,
            Some(_) => ScoreRule {
                scale_log2: k.eval(LOG2_E),
                natural: Some(k.eval(scale_log2 * LN_2)),
                ..plain
            },
        }
    }

    /// Returns the least reference of a row, in the units of its scores.
    pub(crate) fn least_reference(&self) -> Value<F32> {
        match self.inverse {
            Some(inverse) => (inverse * LEAST_SCORE).maximum(NOTHING_SEEN),
            None => self.least_scaled_reference().into(),
        }
    }

    /// Returns the same where scores are not taken before their scale.
    pub(crate) fn least_scaled_reference(&self) -> f32 {
        match (self.natural, self.softcap) {
            (Some(_), _) => LEAST_SCORE,
            (None, Some(softcap)) if !softcap.is_in_log2() => NOTHING_SEEN_CAPPED,
            (None, _) => NOTHING_SEEN,
        }
    }

    /// Returns whether scores are capped.
    pub(crate) const fn is_capped(&self) -> bool {
        self.softcap.is_some()
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
    pub(crate) fn with_small_tanh(self) -> Self {
        ScoreRule { softcap: self.softcap.map(Softcap::with_small_exponents), ..self }
    }

    /// Does the same score by score, so that the bits of none depend on others.
    pub(crate) fn with_small_tanh_of_each(self) -> Self {
        ScoreRule { softcap: self.softcap.map(Softcap::with_each_small_exponent), ..self }
    }

    /// Does the same with a polynomial of the scores themselves, one instruction less for each:
    /// where there are registers for its coefficients.
    pub(crate) fn with_tanh_of_scores(self, k: &mut Builder) -> Self {
        ScoreRule { softcap: self.softcap.map(|it| it.with_small_scores(k)), ..self }
    }

    /// Caps scores in units of log2, and lets the softmax take the exponents of small scores
    /// straight from the products ([`capped_exponents`](ScoreRule::capped_exponents)).
    pub(crate) fn with_capped_exponents(self, k: &mut Builder) -> Self {
        let Some(softcap) = self.softcap else { return self };
        let softcap = Some(softcap.in_log2(k, self.scale_log2));
        ScoreRule { softcap, scale_log2: k.eval(1.0), ..self }
    }

    /// Raises the cap to at least [`LEAST_OUTER`], so that [`HIDDEN_TANH`] gives a weight of zero.
    /// Scores with a smaller cap are practically zero anyway.
    pub(crate) fn with_finite_hidden(self, k: &mut Builder) -> Self {
        match self.softcap {
            None => self,
            Some(_) => {
                ScoreRule { scale_log2: k.eval(self.scale_log2.maximum(LEAST_OUTER)), ..self }
            }
        }
    }

    /// Applies the softcap.
    pub(crate) fn cap(&self, k: &mut Builder, scores: &[Score]) {
        if let Some(softcap) = &self.softcap {
            softcap.apply(k, scores);
        }
    }

    /// Returns how the softmax takes the exponents of these products, where a kernel lets it
    /// ([`with_capped_exponents`](ScoreRule::with_capped_exponents)).
    pub(crate) fn capped_exponents(
        &self,
        k: &mut Builder,
        products: &[Score],
    ) -> Option<CappedExponents> {
        self.softcap.and_then(|softcap| softcap.exponents(k, products))
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

/// Hides the keys whose scores, in natural units, a function made smaller than [`LEAST_SCORE`]: for
/// kernels that subtract exact maxima.
pub(crate) fn hide_least(k: &mut Builder, scores: &[Score]) {
    for Score { register, .. } in scores {
        let hidden = k.eval(register.less(LEAST_SCORE));
        k.set(*register, hidden.select::<F32>(f32::NEG_INFINITY, *register));
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

    /// Loads a slope, in natural units.
    pub(crate) fn load(&self, k: &mut Builder, sequence: Reg<U32>, head: Reg<U32>) -> Reg<F32> {
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
