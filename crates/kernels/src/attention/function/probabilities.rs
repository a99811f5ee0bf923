//! Score functions in the backward pass: recomputes P from scores and the log-sum-exps of the
//! forward pass, and keeps P times the derivative of the function, which dS takes as its factor.

use ptx::{Builder, Expression, F32, LoadHint, Reg, Select, SharedAddress};

use super::lower::{FunctionRegisters, ScoreCoordinates};
use crate::attention::Score;

impl FunctionRegisters {
    /// Applies the function to scores in natural units, of which hidden ones are minus infinity.
    /// The scores' registers receive P, times the derivative where `has_score_derivative`.
    /// `log_sums` points to the negated log-sum-exps in units of log2, from the thread's first
    /// column on. `rounded` is called with P of two neighbouring columns and the score of the
    /// first.
    pub(crate) fn probabilities(
        &self,
        k: &mut Builder,
        scores: &[Score],
        coordinates: &ScoreCoordinates<'_>,
        (scale_log2, log_sums): (Reg<F32>, Reg<SharedAddress>),
        has_score_derivative: bool,
        mut rounded: impl FnMut(&mut Builder, &Score, [Reg<F32>; 2]),
    ) {
        let mut of_columns: Option<(u32, [Reg<F32>; 2])> = None;
        // For each row, P in the first of two neighbouring columns.
        let mut first: Vec<Option<(Score, Reg<F32>)>> = vec![None; coordinates.rows.len()];
        self.each_with_derivative(k, scores, coordinates, |k, score, [value, derivative]| {
            let column = score.column & !1;
            let log_sums = match of_columns {
                Some((known, log_sums)) if known == column => log_sums,
                _ => {
                    let at = log_sums + column * 4;
                    let loaded = k.load_vector::<F32, _, 2>(at, LoadHint::default());
                    of_columns = Some((column, loaded));
                    loaded
                }
            };
            let log_sum = log_sums[(score.column & 1) as usize];
            let exponent = k.fma(value, scale_log2, log_sum);
            let mut weight = k.exp2(exponent);
            let mut kept = weight;
            if has_score_derivative {
                // The function's result for minus infinity may be anything.
                let hidden = k.eval(score.register.equals(f32::NEG_INFINITY));
                let product = k.eval(weight * derivative);
                weight = k.eval(hidden.select::<F32>(0.0, weight));
                kept = k.eval(hidden.select::<F32>(0.0, product));
            }
            k.set(score.register, kept);
            match first[score.row].take() {
                Some((one, of_one)) => rounded(k, &one, [of_one, weight]),
                None => first[score.row] = Some((*score, weight)),
            }
        });
    }
}
