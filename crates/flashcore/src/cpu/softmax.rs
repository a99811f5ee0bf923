//! From products to probabilities: scale, cap, bias, functions, mask and the online softmax.
//!
//! The rows of the softmax are the columns of a panel, so that each vector lane has a row of its
//! own.

use std::ops::Range;

use pulp::Simd;

use super::exp::{exp, tanh};
use super::tile::{Row, rows, rows_mut};
use crate::backend::{BackendError, filled};
use crate::problem::{RowFunctions, RowScores};

/// The rules and the running state of each softmax row: one entry per lane of each panel.
pub(super) struct Rows<'a> {
    /// Softmax scale.
    scale: f32,
    /// Cap of the scores.
    cap: Option<f32>,
    /// Whether some row has an ALiBi slope.
    sloped: bool,
    /// ALiBi slope of each row.
    slopes: Vec<f32>,
    /// Position of each row's query among the keys.
    positions: Vec<f32>,
    /// Range of keys that each row sees. Lanes without a row see everything; their results are not
    /// read.
    visible: Vec<Range<usize>>,
    /// Functions of each row; empty where the problem has none.
    functions: Vec<RowFunctions<'a>>,
    /// Number of rows.
    count: usize,
    /// Largest score of each row so far.
    maximum: Vec<f32>,
    /// Sum of exponentials of each row so far, relative to the maximum.
    sum: Vec<f32>,
    /// Factor by which the last key block rescaled the sums and accumulators of each row.
    rescale: Vec<f32>,
}

/// The rules of one softmax row.
pub(super) struct RowRule<'a> {
    /// The range of keys that it sees.
    pub(super) visible: Range<usize>,
    /// How its products become scores.
    pub(super) scores: RowScores,
    /// The sink, with which the row's sum starts.
    pub(super) sink: Option<f32>,
    /// The row's functions, if the problem has any.
    pub(super) functions: Option<RowFunctions<'a>>,
}

impl<'a> Rows<'a> {
    /// Allocates state for this many lanes.
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

    /// Starts over with these rows.
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
            self.cap = scores.cap;
            self.slopes[row] = scores.slope;
            self.positions[row] = scores.position;
            self.sloped |= scores.slope != 0.0;
            match sink {
                // A maximum could lose it.
                Some(nan) if nan.is_nan() => self.sum[row] = nan,
                Some(sink) if sink > f32::NEG_INFINITY => {
                    self.maximum[row] = sink;
                    self.sum[row] = 1.0;
                }
                _ => {}
            }
            self.count = row + 1;
        }
    }

    /// Returns the number of rows.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Returns the range from the first to the last key that some row among these lanes sees.
    pub(super) fn seen(&self, lanes: Range<usize>) -> Range<usize> {
        let lanes = lanes.start..lanes.end.min(self.count);
        let seen = self.visible[lanes].iter().filter(|keys| !keys.is_empty());
        let begin = seen.clone().map(|keys| keys.start).min().unwrap_or(0);
        let end = seen.map(|keys| keys.end).max().unwrap_or(0);
        begin..end
    }

    /// Tells whether every row among these lanes sees all of these keys, without regard to
    /// functions.
    pub(super) fn all_see(&self, lanes: Range<usize>, keys: &Range<usize>) -> bool {
        let sees = |row: &Range<usize>| row.start <= keys.start && keys.end <= row.end;
        self.visible[lanes].iter().all(sees)
    }

    /// Tells whether a row sees a key.
    pub(super) fn sees(&self, row: usize, key: usize) -> bool {
        let by_function = || self.functions.get(row).is_none_or(|it| it.clone().sees(key));
        self.visible[row].contains(&key) && by_function()
    }

    /// Returns the factors by which the accumulators must be multiplied before the last block is
    /// added.
    pub(super) fn rescale(&self, lanes: Range<usize>) -> &[f32] {
        &self.rescale[lanes]
    }

    /// Returns the sum of exponentials of a row and its log-sum-exp; `None` for a row that saw
    /// nothing.
    pub(super) fn finish(&self, row: usize) -> Option<(f32, f32)> {
        let (maximum, sum) = (self.maximum[row], self.sum[row]);
        (sum != 0.0).then(|| (sum, maximum + sum.ln()))
    }

    /// Merges the state of a row over other keys. Returns the factors by which both accumulators
    /// must be multiplied.
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

    /// Turns the products of a panel with some keys into probabilities relative to the new maximum.
    /// `panel` has a row per key and a column per lane.
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

    /// Turns products into scores: scaled, capped and biased (see `problem::Scores`).
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

    /// Returns the cap of the scores.
    pub(super) fn cap(&self) -> Option<f32> {
        self.cap
    }

    /// Scales products, and applies the cap.
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

    /// Subtracts the ALiBi bias.
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

    /// Applies the functions of each row to the scores of its visible keys.
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

    /// Like `call_functions`, for the backward pass: scores become the functions' results, minus
    /// infinity where they hide the key, and gradients are multiplied by the derivative of the
    /// score function.
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

    /// Sets the entries of a panel whose keys a row does not see to `nothing`: minus infinity for
    /// scores, zero for probabilities.
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
