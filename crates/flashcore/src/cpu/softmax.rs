//! From products to probabilities: everything about a score that is neither product is here.
//!
//! The rows of the softmax are the columns of a panel, so that each lane of a vector has a row of
//! its own.

use std::ops::Range;

use pulp::Simd;

use super::exp::{exp, tanh};
use super::tile::{Row, rows, rows_mut};
use crate::backend::{BackendError, filled};
use crate::problem::{RowFunctions, RowScores};

/// What is to be known of each row, and what is known of it so far: one entry for each lane of
/// each panel.
pub(super) struct Rows<'a> {
    /// The factor of every product.
    scale: f32,
    /// The cap of every score.
    cap: Option<f32>,
    /// Whether some row has a slope.
    sloped: bool,
    /// ALiBi's slope.
    slopes: Vec<f32>,
    /// Where the row stands among the keys.
    positions: Vec<f32>,
    /// The keys that the row sees. Lanes without a row see everything and are never read.
    visible: Vec<Range<usize>>,
    /// What functions make of each row's scores; none where the problem has no functions.
    functions: Vec<RowFunctions<'a>>,
    /// Rows that there are.
    count: usize,
    /// The largest score so far.
    maximum: Vec<f32>,
    /// The sum of exponentials so far, relative to the maximum.
    sum: Vec<f32>,
    /// What the last block of keys made of the weight of those before.
    rescale: Vec<f32>,
}

/// One row of the softmax.
pub(super) struct RowRule<'a> {
    /// The keys that it sees.
    pub(super) visible: Range<usize>,
    /// What becomes of its products.
    pub(super) scores: RowScores,
    /// A score that it begins with.
    pub(super) sink: Option<f32>,
    /// The problem's functions, if it has any.
    pub(super) functions: Option<RowFunctions<'a>>,
}

impl<'a> Rows<'a> {
    /// Room for so many rows.
    pub(super) fn new(lanes: usize) -> Result<Self, BackendError> {
        let zeros = || filled("rows of the softmax", lanes, 0.0);
        Ok(Rows {
            scale: 1.0,
            cap: None,
            sloped: false,
            slopes: zeros()?,
            positions: zeros()?,
            visible: filled("rows of the softmax", lanes, 0..usize::MAX)?,
            functions: Vec::new(),
            count: 0,
            maximum: zeros()?,
            sum: zeros()?,
            rescale: zeros()?,
        })
    }

    /// Begin with these rows, and forget those before.
    pub(super) fn begin(&mut self, scale: f32, rules: impl Iterator<Item = RowRule<'a>>) {
        self.scale = scale;
        self.sloped = false;
        self.cap = None;
        self.visible.fill(0..usize::MAX);
        self.slopes.fill(0.0);
        self.maximum.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.count = 0;
        self.functions.clear();
        for (row, RowRule { visible, scores, sink, functions }) in rules.enumerate() {
            self.visible[row] = visible;
            self.functions.extend(functions);
            self.cap = scores.cap();
            self.slopes[row] = scores.slope();
            self.positions[row] = scores.position();
            self.sloped |= scores.slope() != 0.0;
            if let Some(sink) = sink.filter(|sink| *sink > f32::NEG_INFINITY) {
                self.maximum[row] = sink;
                self.sum[row] = 1.0;
            }
            self.count = row + 1;
        }
    }

    /// How many rows there are.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// The keys from the first to the last that some row among these lanes sees.
    pub(super) fn seen(&self, lanes: Range<usize>) -> Range<usize> {
        let lanes = lanes.start..lanes.end.min(self.count);
        let seen = self.visible[lanes].iter().filter(|keys| !keys.is_empty());
        let begin = seen.clone().map(|keys| keys.start).min().unwrap_or(0);
        let end = seen.map(|keys| keys.end).max().unwrap_or(0);
        begin..end
    }

    /// Whether every row among these lanes sees all of these keys.
    pub(super) fn all_see(&self, lanes: Range<usize>, keys: &Range<usize>) -> bool {
        let sees = |row: &Range<usize>| row.start <= keys.start && keys.end <= row.end;
        self.visible[lanes].iter().all(sees)
    }

    /// Whether a row sees a key.
    pub(super) fn sees(&self, row: usize, key: usize) -> bool {
        let by_function = || self.functions.get(row).is_none_or(|it| it.clone().sees(key));
        self.visible[row].contains(&key) && by_function()
    }

    /// What the weights accumulated before the last block are to be multiplied with.
    pub(super) fn rescale(&self, lanes: Range<usize>) -> &[f32] {
        &self.rescale[lanes]
    }

    /// The sum of exponentials of a row and its log-sum-exp; nothing for a row without weight.
    pub(super) fn finish(&self, row: usize) -> Option<(f32, f32)> {
        let (maximum, sum) = (self.maximum[row], self.sum[row]);
        (sum != 0.0).then(|| (sum, maximum + sum.ln()))
    }

    /// Add what a row came to over other keys; what both sums are to be multiplied with.
    pub(super) fn merge(&mut self, row: usize, other: &Rows<'_>) -> [f32; 2] {
        let maxima = [self.maximum[row], other.maximum[row]];
        let maximum = maxima[0].max(maxima[1]);
        // While every score is minus infinity there is no maximum to subtract.
        let reference = if maximum == f32::NEG_INFINITY { 0.0 } else { maximum };
        let factors = maxima.map(|maximum| (maximum - reference).exp());
        self.sum[row] = self.sum[row] * factors[0] + other.sum[row] * factors[1];
        self.maximum[row] = maximum;
        factors
    }

    /// Turn the products of a panel with some keys into probabilities relative to the new maximum.
    /// `panel` has a row for each key, and a column for each of the lanes.
    #[inline(always)]
    pub(super) fn weigh<S: Simd, const COLUMNS: usize>(
        &mut self,
        simd: S,
        lanes: Range<usize>,
        keys: &Range<usize>,
        panel: &mut [f32],
    ) {
        self.score::<S, COLUMNS>(simd, lanes.clone(), keys, panel);
        if !self.all_see(lanes.clone(), keys) {
            self.mask(lanes.clone(), keys, panel, f32::NEG_INFINITY);
        }
        if !self.functions.is_empty() {
            self.call_functions(lanes.clone(), keys, panel);
        }
        let panel = rows_mut::<S, COLUMNS>(panel);
        let [maximum, sum, rescale] =
            [&mut self.maximum, &mut self.sum, &mut self.rescale].map(|numbers| {
                let row = rows_mut::<S, COLUMNS>(&mut numbers[lanes.clone()]).first_mut();
                row.expect("a panel has one row of lanes")
            });

        let old = *maximum;
        for scores in &*panel {
            for column in 0..COLUMNS {
                maximum[column] = simd.max_f32s(scores[column], maximum[column]);
            }
        }
        let infinity = simd.splat_f32s(f32::NEG_INFINITY);
        for column in 0..COLUMNS {
            // While every score is minus infinity there is no maximum to subtract.
            let nothing = simd.equal_f32s(maximum[column], infinity);
            let reference = simd.select_f32s(nothing, simd.splat_f32s(0.0), maximum[column]);
            rescale[column] = exp(simd, simd.sub_f32s(old[column], reference));
            sum[column] = simd.mul_f32s(sum[column], rescale[column]);
            let mut added = simd.splat_f32s(0.0);
            for scores in panel.iter_mut() {
                scores[column] = exp(simd, simd.sub_f32s(scores[column], reference));
                added = simd.add_f32s(added, scores[column]);
            }
            sum[column] = simd.add_f32s(sum[column], added);
        }
    }

    /// Turn products into scores: scaled, capped and biased, as [`Scores`] has it.
    #[inline(always)]
    fn score<S: Simd, const COLUMNS: usize>(
        &self,
        simd: S,
        lanes: Range<usize>,
        keys: &Range<usize>,
        panel: &mut [f32],
    ) {
        self.scale_and_cap::<S, COLUMNS>(simd, panel);
        self.bias::<S, COLUMNS>(simd, lanes, keys, panel);
    }

    /// The cap of every score.
    pub(super) fn cap(&self) -> Option<f32> {
        self.cap
    }

    /// Scale products, and cap them.
    #[inline(always)]
    pub(super) fn scale_and_cap<S: Simd, const COLUMNS: usize>(&self, simd: S, panel: &mut [f32]) {
        let panel = rows_mut::<S, COLUMNS>(panel);
        let scale = simd.splat_f32s(self.scale);
        for score in panel.as_flattened_mut() {
            *score = simd.mul_f32s(*score, scale);
        }
        if let Some(cap) = self.cap {
            let cap = simd.splat_f32s(cap);
            for score in panel.as_flattened_mut() {
                *score = simd.mul_f32s(cap, tanh(simd, simd.div_f32s(*score, cap)));
            }
        }
    }

    /// Take off what ALiBi does.
    #[inline(always)]
    pub(super) fn bias<S: Simd, const COLUMNS: usize>(
        &self,
        simd: S,
        lanes: Range<usize>,
        keys: &Range<usize>,
        panel: &mut [f32],
    ) {
        let panel = rows_mut::<S, COLUMNS>(panel);
        if self.sloped {
            let row_of = |numbers| -> &Row<S, COLUMNS> { &rows::<S, COLUMNS>(numbers)[0] };
            let slopes = row_of(&self.slopes[lanes.clone()]);
            let positions = row_of(&self.positions[lanes]);
            for (row, key) in panel.iter_mut().zip(keys.start..) {
                let key = simd.splat_f32s(key as f32);
                for column in 0..COLUMNS {
                    let distance = simd.abs_f32s(simd.sub_f32s(positions[column], key));
                    let bias = simd.mul_f32s(slopes[column], distance);
                    row[column] = simd.sub_f32s(row[column], bias);
                }
            }
        }
    }

    /// Put the scores that are seen so far through the functions of their rows.
    fn call_functions(&mut self, lanes: Range<usize>, keys: &Range<usize>, panel: &mut [f32]) {
        let width = lanes.len();
        let rows = self.functions.iter_mut().enumerate().skip(lanes.start).take(width);
        for (row, functions) in rows {
            let visible = &self.visible[row];
            for key in keys.start.max(visible.start)..keys.end.min(visible.end) {
                let score = &mut panel[(key - keys.start) * width + row - lanes.start];
                *score = match functions.sees(key) {
                    true => functions.score(key, f64::from(*score)) as f32,
                    false => f32::NEG_INFINITY,
                };
            }
        }
    }

    /// The same before gradients of scores are multiplied with probabilities: scores become what the
    /// functions say, minus infinity where they hide the key, and gradients are multiplied with the
    /// slopes.
    pub(super) fn call_slopes(
        &self,
        lanes: Range<usize>,
        keys: &Range<usize>,
        scores: &mut [f32],
        gradients: &mut [f32],
    ) {
        let width = lanes.len();
        let rows = self.functions.iter().enumerate().skip(lanes.start).take(width);
        for (row, functions) in rows {
            let mut functions = functions.clone();
            let visible = &self.visible[row];
            for key in keys.start.max(visible.start)..keys.end.min(visible.end) {
                let place = (key - keys.start) * width + row - lanes.start;
                let (score, gradient) = (&mut scores[place], &mut gradients[place]);
                (*score, *gradient) = match functions.sees(key) {
                    true => {
                        let before = f64::from(*score);
                        let slope = functions.slope(key, before) as f32;
                        (functions.score(key, before) as f32, *gradient * slope)
                    }
                    false => (f32::NEG_INFINITY, 0.0),
                };
            }
        }
    }

    /// What a panel has for keys that a row does not see becomes `nothing`: minus infinity for a
    /// score, zero for a probability.
    pub(super) fn mask(
        &self,
        lanes: Range<usize>,
        keys: &Range<usize>,
        panel: &mut [f32],
        nothing: f32,
    ) {
        let width = lanes.len();
        for (lane, visible) in self.visible[lanes].iter().enumerate() {
            let begin = visible.start.clamp(keys.start, keys.end) - keys.start;
            let end = visible.end.clamp(keys.start + begin, keys.end) - keys.start;
            for hidden in [0..begin, end..keys.len()] {
                for key in hidden {
                    panel[key * width + lane] = nothing;
                }
            }
        }
    }
}
