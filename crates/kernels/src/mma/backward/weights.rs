//! Turns scores into the probabilities `P` of the softmax, by the log-sum-exps of the forward pass.

use ptx::{
    Builder, Expression, F32, Pred, Reg, S32, SharedAddress, U32, Value, WarpAccumulator,
    WarpFragment,
};

use crate::attention::function::lower::{Functions, ScoreCoordinates};
use crate::attention::scores::{ScoreRule, Slopes, alibi, distances};
use crate::attention::{Rules, Score};
use crate::backward::tile_scheduler::TileScheduler;
use crate::parameter::Scale;

/// The launch's parameters for the rules.
pub(super) struct WeightRule {
    scores: ScoreRule,
    slopes: Option<Slopes>,
    /// The softmax scale, by which `dK` is multiplied at the end.
    pub(super) scale: Reg<F32>,
    functions: Functions,
    has_score_derivative: bool,
}

/// The coordinates of a thread's first score.
pub(super) struct Corner {
    pub(super) sequence: Reg<U32>,
    pub(super) head: Reg<U32>,
    /// The key of the thread's first row, then the query of its first column.
    pub(super) key: Reg<S32>,
    pub(super) query: Reg<S32>,
}

impl WeightRule {
    pub(super) fn parameters(k: &mut Builder, rules: &Rules) -> Self {
        WeightRule {
            scores: ScoreRule::parameters(k, rules).with_small_tanh(),
            slopes: rules.alibi.then(|| Slopes::parameters(k)),
            scale: Scale::Natural.read(k),
            functions: Functions::of_gradients(k, rules),
            has_score_derivative: rules.has_score_derivative(),
        }
    }

    /// Turns scores into `P`, rounded into `rounded`. The score registers keep `P` times the
    /// derivative of the score rule, the factor between `dP - delta` and `dS`. `log_sums` addresses
    /// the negated log-sum-exps, from the thread's first column on. `needs_mask` and
    /// `needs_function` say whether this query block needs the mask and the mask function, which
    /// without an answer is always evaluated.
    pub(super) fn apply(
        &self,
        k: &mut Builder,
        scheduler: &TileScheduler,
        (scores, rounded): (&WarpAccumulator, &WarpFragment),
        log_sums: Reg<SharedAddress>,
        (needs_mask, needs_function): (Value<Pred>, Option<Value<Pred>>),
        corner: impl Fn(&mut Builder) -> Corner,
    ) {
        let rows: Vec<u32> = (0..scores.thread_rows()).map(WarpAccumulator::row_offset).collect();
        let all = Score::of_warp(scores);
        self.scores.cap(k, &all);
        self.scores.in_natural_units(k, &all);
        k.if_(needs_mask, |k| {
            let (Corner { key, query, .. }, lengths) = (corner(k), scheduler.lengths(k));
            let seen = scheduler.visibility.seen_from(k, &rows, key, query, lengths);
            seen.hide_others(k, &all);
        });
        let coordinates = |k: &mut Builder| {
            let Corner { sequence, head, key, query } = corner(k);
            let [query_length, key_length] = scheduler.lengths(k);
            ScoreCoordinates {
                batch: sequence,
                head,
                first_query: query,
                rows: &rows,
                first_key: key,
                query_length,
                key_length,
            }
        };
        if let Some(mask) = &self.functions.mask {
            let apply = |k: &mut Builder| {
                let coordinates = coordinates(k);
                mask.apply(k, &all, &coordinates);
            };
            match needs_function {
                Some(needed) => k.if_(needed, apply),
                None => apply(k),
            }
        }
        let slope = self.slopes.as_ref().map(|slopes| {
            let Corner { sequence, head, key, query } = corner(k);
            let slope = slopes.unscaled(k, sequence, head, self.scores.scale_log2);
            let [queries, keys] = scheduler.lengths(k).map(|length| length.reinterpret::<S32>());
            (slope, k.eval(key - (query + keys - queries)))
        });
        if let Some(function) = &self.functions.score {
            if let Some((slope, distance)) = slope {
                alibi(k, &all, &rows, distance.into(), slope);
            }
            let coordinates = coordinates(k);
            let numbers = (self.scores.scale_log2, log_sums);
            function.probabilities(
                k,
                &all,
                &coordinates,
                numbers,
                self.has_score_derivative,
                |k, first, weights| {
                    rounded.set_pair(k, first.row, first.column as usize / 8, weights);
                },
            );
            return;
        }
        let slope =
            slope.map(|(slope, distance)| (k.eval(-slope), distances(k, &rows, distance.into())));
        for group in 0..scores.groups() {
            let at = log_sums + 32 * group as u32;
            let log_sums = k.load_vector::<F32, _, 2>(at, Default::default());
            for (row, cell) in
                (0..scores.thread_rows()).map(|row| (row, scores.cell(row / 2, group)))
            {
                let pair = cell.pair(row % 2);
                let weights = [0, 1].map(|side| {
                    let exponent = match &slope {
                        None => pair[side],
                        Some((cost, distances)) => {
                            let apart = k.absolute(distances[row] - (8 * group + side) as f32);
                            k.fma(apart, *cost, pair[side])
                        }
                    };
                    let exponent = k.fma(exponent, self.scores.scale_log2, log_sums[side]);
                    k.exp2(exponent)
                });
                rounded.set_pair(k, row, group, weights);
                for (score, weight) in pair.into_iter().zip(weights) {
                    if !self.scores.is_capped() {
                        k.set(score, weight);
                        continue;
                    }
                    // The derivative 1 - tanh^2. Hidden scores are minus infinity, clamped to -1 so
                    // that the product with the zero weight is not NaN.
                    let tanh = k.eval(score.maximum(-1.0));
                    let derivative = k.fma(-tanh, tanh, 1.0);
                    k.set(score, weight * derivative);
                }
            }
        }
    }
}
