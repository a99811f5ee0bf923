//! Turns a block's products `QK^T` into scores before the softmax: score rules, masks,
//! functions.

use ptx::{Builder, Expression, F32, Pred, Reg, S32, U32, Value, WarpAccumulator};

use super::Mma;
use super::work_tile::WorkTile;
use crate::attention::function::lower::{Functions, ScoreCoordinates};
use crate::attention::rows::Sinks;
use crate::attention::scores::{ScoreRule, Slopes, alibi};
use crate::attention::visibility::Visibility;
use crate::attention::{Rules, Score};

/// The launch's parameters for the rules.
pub(super) struct RuleParameters {
    pub(super) scores: ScoreRule,
    pub(super) visibility: Visibility,
    slopes: Option<Slopes>,
    sinks: Option<Sinks>,
    functions: Functions,
}

impl RuleParameters {
    pub(super) fn parameters(k: &mut Builder, rules: &Rules) -> Self {
        RuleParameters {
            scores: ScoreRule::parameters(k, rules).with_small_tanh(),
            visibility: Visibility::parameters(k, rules.mask),
            slopes: rules.alibi.then(|| Slopes::parameters(k)),
            sinks: rules.sinks.then(|| Sinks::parameters(k)),
            functions: Functions::parameters(k, rules),
        }
    }

    /// Returns the sink of the tile's head, in units of log2. With split-KV only the first split
    /// has it, so that it counts once.
    pub(super) fn sink(
        &self,
        k: &mut Builder,
        head: Reg<U32>,
        split: Option<Reg<U32>>,
    ) -> Option<Reg<F32>> {
        use ptx::Select;
        let sink = self.sinks.map(|sinks| sinks.of(k, head))?;
        Some(match split {
            None => sink,
            Some(index) => k.eval(index.equals(0).select::<F32>(sink, f32::NEG_INFINITY)),
        })
    }
}

/// The rules for a warp's rows. The coordinates of a thread's scores are recomputed in each block
/// that needs them, to save registers in all others.
pub(super) struct Rule {
    scores: ScoreRule,
    visibility: Visibility,
    /// Whether a rule changes scores: [`Rules::changes_scores`].
    changes: bool,
    /// The ALiBi slope, in units of scores before their scale.
    slope: Option<Reg<F32>>,
    /// The position of the warp's first row among the keys.
    position: Reg<U32>,
    key_length: Reg<U32>,
    /// The distances of the thread's rows below its first row.
    rows: Vec<u32>,
    functions: Functions,
    sequence: Reg<U32>,
    head: Reg<U32>,
    query_length: Reg<U32>,
}

impl Rule {
    pub(super) fn new(
        k: &mut Builder,
        mma: &Mma,
        parameters: &RuleParameters,
        tile: &WorkTile,
        first_row: Reg<U32>,
    ) -> Self {
        let RuleParameters { scores, visibility, slopes, .. } = *parameters;
        let functions = parameters.functions.clone();
        let WorkTile { sequence, head, query_length, key_length, .. } = *tile;
        let slope = slopes.map(|slopes| slopes.unscaled(k, sequence, head, scores.scale_log2));
        let rows = (0..mma.thread_rows()).map(WarpAccumulator::row_offset).collect();
        let position = k.eval(first_row + (key_length - query_length));
        let changes = mma.rules.changes_scores();
        Rule {
            scores,
            visibility,
            changes,
            slope,
            position,
            key_length,
            rows,
            functions,
            sequence,
            head,
            query_length,
        }
    }

    /// Turns products with the keys from `first_key` on into scores, masked where needed.
    pub(super) fn apply(
        &self,
        k: &mut Builder,
        products: &WarpAccumulator,
        first_key: Reg<U32>,
        needs_mask: Value<Pred>,
        needs_function: Option<Value<Pred>>,
    ) {
        let scores = Score::of_warp(products);
        if self.changes {
            // The condition always holds. It is there for the branch: without it ptxas computes all
            // distances in advance, during the products, in as many registers as there are scores.
            k.if_(first_key.less(self.key_length), |k| {
                self.scores.cap(k, &scores);
                self.scores.in_natural_units(k, &scores);
                if let Some(slope) = self.slope {
                    let (position, first_column) = self.first_coordinates(k, first_key);
                    alibi(k, &scores, &self.rows, position - first_column, slope);
                }
                if let Some(function) = &self.functions.score {
                    let coordinates = self.coordinates(k, first_key);
                    function.apply(k, &scores, &coordinates);
                }
            });
        }
        k.if_(needs_mask, |k| {
            let (position, first_column) = self.first_coordinates(k, first_key);
            let seen = self.visibility.seen(k, &self.rows, position, first_column, self.key_length);
            seen.hide_others(k, &scores);
        });
        if let Some(function) = &self.functions.mask {
            // Without a list, a branch that is always taken, for the same reason as above.
            let needed = needs_function.unwrap_or_else(|| first_key.less(self.key_length));
            k.if_(needed, |k| {
                let coordinates = self.coordinates(k, first_key);
                function.apply(k, &scores, &coordinates);
            });
        }
    }

    /// Returns the coordinates of the thread's scores, for mask and score functions.
    fn coordinates(&self, k: &mut Builder, first_key: Reg<U32>) -> ScoreCoordinates<'_> {
        let (position, first_key) = self.first_coordinates(k, first_key);
        let Rule { sequence, head, query_length, key_length, .. } = *self;
        let offset = (key_length - query_length).reinterpret::<S32>();
        ScoreCoordinates {
            batch: sequence,
            head,
            first_query: k.eval(position - offset),
            rows: &self.rows,
            first_key,
            query_length,
            key_length,
        }
    }

    /// Returns the position of the thread's first row, and the key of its first column.
    fn first_coordinates(&self, k: &mut Builder, first_key: Reg<U32>) -> (Value<S32>, Reg<S32>) {
        let lane = k.lane();
        let column = k.eval((first_key + lane % 4 * 2).reinterpret::<S32>());
        ((self.position + lane / 4).reinterpret::<S32>(), column)
    }
}
