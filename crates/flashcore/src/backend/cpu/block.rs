//! One block of queries against every key it sees: scores, online softmax, update.
//!
//! Both matrix products run over panels of [`LANES`] columns and tiles of [`ROWS`] rows held in
//! registers, with fixed trip counts inside, which is the form that compilers vectorise. They are
//! inlined into [`WalkKeys`], which is compiled once for each instruction set.

use std::ops::Range;

use super::exp::exp;
use crate::problem::{Problem, Scores};
use crate::tensor::Head;

/// Queries of one task. More would reuse each packed key block more often, fewer would leave
/// threads idle on short sequences.
pub(super) const QUERY_BLOCK: usize = 128;
/// Keys handled between two updates of the running maximum.
const KEY_BLOCK: usize = 64;
/// Rows of a register tile.
const ROWS: usize = 4;
/// Columns of a register tile: two AVX2 registers.
const LANES: usize = 16;

type Lanes = [f32; LANES];

/// What one thread needs for a block of queries, reused from block to block.
pub(super) struct Workspace {
    head_dim: usize,
    value_head_dim: usize,
    /// Queries by tile and dim: `queries[tile * head_dim + dim][row]`.
    queries: Vec<[f32; ROWS]>,
    /// The keys each query sees.
    visible: Vec<Range<usize>>,
    /// What becomes of each query's scaled products.
    rules: Vec<Scores>,
    /// Keys by panel and dim: `keys[panel * head_dim + dim][lane]`.
    keys: Vec<Lanes>,
    /// Values by panel and key: `values[panel * KEY_BLOCK + key][lane]`.
    values: Vec<Lanes>,
    /// Scores, later probabilities, by row and key.
    scores: Vec<[f32; KEY_BLOCK]>,
    /// The output before normalisation: `accumulators[row * panels + panel][lane]`.
    accumulators: Vec<Lanes>,
    /// The largest score of each row so far.
    maximum: Vec<f32>,
    /// The sum of exponentials of each row so far, relative to the maximum.
    sum: Vec<f32>,
    /// One vector of a tensor as f32.
    vector: Vec<f32>,
}

/// Attend to every key that some query of the block sees.
pub(super) struct WalkKeys<'a> {
    pub(super) workspace: &'a mut Workspace,
    pub(super) key: Head<'a>,
    pub(super) value: Head<'a>,
    pub(super) scale: f32,
}

impl pulp::NullaryFnOnce for WalkKeys<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let WalkKeys { workspace, key, value, scale } = self;
        let seen = workspace.seen();
        for first in seen.clone().step_by(KEY_BLOCK) {
            let keys = first..seen.end.min(first + KEY_BLOCK);
            workspace.load_keys(key, keys.clone());
            workspace.load_values(value, keys.clone());
            workspace.score();
            for row in 0..workspace.visible.len() {
                workspace.softmax(row, &keys, scale);
            }
            workspace.update(&keys);
        }
    }
}

impl Workspace {
    pub(super) fn new(problem: &Problem) -> Self {
        let rows = QUERY_BLOCK.min(problem.query_length.next_multiple_of(ROWS));
        let panels = problem.value_head_dim.div_ceil(LANES);
        Workspace {
            head_dim: problem.head_dim,
            value_head_dim: problem.value_head_dim,
            queries: vec![[0.0; ROWS]; rows / ROWS * problem.head_dim],
            visible: Vec::with_capacity(rows),
            rules: Vec::with_capacity(rows),
            keys: vec![[0.0; LANES]; KEY_BLOCK / LANES * problem.head_dim],
            values: vec![[0.0; LANES]; panels * KEY_BLOCK],
            scores: vec![[0.0; KEY_BLOCK]; rows],
            accumulators: vec![[0.0; LANES]; rows * panels],
            maximum: vec![0.0; rows],
            sum: vec![0.0; rows],
            vector: vec![0.0; problem.head_dim.max(problem.value_head_dim)],
        }
    }

    /// Begin a block: pack its queries and forget the previous block's results. A sink is a score
    /// that every row begins with.
    pub(super) fn load_queries(
        &mut self,
        query: Head<'_>,
        queries: Range<usize>,
        visible: impl Fn(usize) -> Range<usize>,
        rules: impl Fn(usize) -> Scores,
        sink: Option<f32>,
    ) {
        let vector = &mut self.vector[..self.head_dim];
        for (row, position) in queries.clone().enumerate() {
            query.read(position, vector);
            let tile = &mut self.queries[row / ROWS * self.head_dim..][..self.head_dim];
            for (to, from) in tile.iter_mut().zip(vector.iter()) {
                to[row % ROWS] = *from;
            }
        }
        self.visible.clear();
        self.visible.extend(queries.clone().map(visible));
        self.rules.clear();
        self.rules.extend(queries.map(rules));
        self.accumulators.fill([0.0; LANES]);
        let sink = sink.filter(|sink| *sink > f32::NEG_INFINITY);
        self.maximum.fill(sink.unwrap_or(f32::NEG_INFINITY));
        self.sum.fill(if sink.is_some() { 1.0 } else { 0.0 });
    }

    /// The keys from the first to the last that some query sees.
    fn seen(&self) -> Range<usize> {
        let seen = self.visible.iter().filter(|keys| !keys.is_empty());
        let begin = seen.clone().map(|keys| keys.start).min().unwrap_or(0);
        let end = seen.map(|keys| keys.end).max().unwrap_or(0);
        begin..end
    }

    /// The normalised output of a row and its log-sum-exp. A row without weight is zero.
    pub(super) fn finish(&mut self, row: usize) -> (&[f32], f32) {
        let panels = self.accumulators.len() / self.scores.len();
        let accumulators = &mut self.accumulators[row * panels..][..panels];
        let output = &mut accumulators.as_flattened_mut()[..self.value_head_dim];
        let (maximum, sum) = (self.maximum[row], self.sum[row]);
        if sum == 0.0 {
            output.fill(0.0);
            return (output, f32::NEG_INFINITY);
        }
        for element in output.iter_mut() {
            *element /= sum;
        }
        (output, maximum + sum.ln())
    }

    /// Pack a block of keys. Lanes beyond its end keep old keys; their scores are masked.
    fn load_keys(&mut self, key: Head<'_>, keys: Range<usize>) {
        let vector = &mut self.vector[..self.head_dim];
        for (index, position) in keys.enumerate() {
            key.read(position, vector);
            let panel = &mut self.keys[index / LANES * self.head_dim..][..self.head_dim];
            for (to, from) in panel.iter_mut().zip(vector.iter()) {
                to[index % LANES] = *from;
            }
        }
    }

    /// Pack a block of values. Rows beyond its end keep old values; no query reads them.
    fn load_values(&mut self, value: Head<'_>, keys: Range<usize>) {
        let vector = &mut self.vector[..self.value_head_dim];
        for (index, position) in keys.enumerate() {
            value.read(position, vector);
            for (panel, from) in vector.chunks(LANES).enumerate() {
                self.values[panel * KEY_BLOCK + index][..from.len()].copy_from_slice(from);
            }
        }
    }

    /// `scores = queries * keys^T` for the whole block.
    #[inline(always)]
    fn score(&mut self) {
        let panels = self.keys.chunks_exact(self.head_dim);
        for (panel, keys) in panels.enumerate() {
            let tiles = self.queries.chunks_exact(self.head_dim);
            for (queries, scores) in tiles.zip(self.scores.chunks_exact_mut(ROWS)) {
                let mut tile = [[0.0; LANES]; ROWS];
                for (query, key) in queries.iter().zip(keys) {
                    for row in 0..ROWS {
                        for lane in 0..LANES {
                            tile[row][lane] += query[row] * key[lane];
                        }
                    }
                }
                for row in 0..ROWS {
                    scores[row][panel * LANES..][..LANES].copy_from_slice(&tile[row]);
                }
            }
        }
    }

    /// Turn a row's scores into probabilities relative to the new maximum, and rescale what was
    /// accumulated relative to the old one.
    #[inline(always)]
    fn softmax(&mut self, row: usize, keys: &Range<usize>, scale: f32) {
        let seen = seen(&self.visible[row], keys);
        if seen.is_empty() {
            return;
        }
        let scores = &mut self.scores[row];
        for score in scores.iter_mut() {
            *score *= scale;
        }
        let rule = self.rules[row];
        if !rule.only_scale() {
            for (score, key) in scores.iter_mut().zip(keys.start..) {
                *score = rule.adjust(f64::from(*score), key) as f32;
            }
        }
        scores[..seen.start].fill(f32::NEG_INFINITY);
        scores[seen.end..].fill(f32::NEG_INFINITY);

        // Several running maxima, because one would be a chain of dependent instructions.
        let mut maxima = [self.maximum[row]; LANES];
        for chunk in scores.chunks_exact(LANES) {
            for (maximum, score) in maxima.iter_mut().zip(chunk) {
                *maximum = if *score > *maximum { *score } else { *maximum };
            }
        }
        let maximum = maxima.into_iter().fold(f32::NEG_INFINITY, f32::max);
        // While every score is minus infinity there is no maximum to subtract.
        let reference = if maximum == f32::NEG_INFINITY { 0.0 } else { maximum };

        let mut sums = [0.0; LANES];
        for chunk in scores.chunks_exact_mut(LANES) {
            for (sum, score) in sums.iter_mut().zip(chunk) {
                *score = exp(*score - reference);
                *sum += *score;
            }
        }
        let rescale = exp(self.maximum[row] - reference);
        self.sum[row] = self.sum[row] * rescale + sums.iter().sum::<f32>();
        self.maximum[row] = maximum;
        if rescale != 1.0 {
            let panels = self.accumulators.len() / self.scores.len();
            for lanes in &mut self.accumulators[row * panels..][..panels] {
                for lane in lanes {
                    *lane *= rescale;
                }
            }
        }
    }

    /// `accumulators += probabilities * values`.
    #[inline(always)]
    fn update(&mut self, keys: &Range<usize>) {
        let panels = self.accumulators.len() / self.scores.len();
        for (panel, values) in self.values.chunks_exact(KEY_BLOCK).enumerate() {
            for first in (0..self.visible.len()).step_by(ROWS) {
                let rows = first..self.visible.len().min(first + ROWS);
                let full = |row| seen(&self.visible[row], keys).len() == KEY_BLOCK;
                if rows.len() == ROWS && rows.clone().all(full) {
                    let probabilities: &[[f32; KEY_BLOCK]; ROWS] =
                        self.scores[first..].first_chunk().expect("a tile of rows");
                    let mut tile: [Lanes; ROWS] = std::array::from_fn(|row| {
                        self.accumulators[(first + row) * panels + panel]
                    });
                    for (key, value) in values.iter().enumerate() {
                        for row in 0..ROWS {
                            for lane in 0..LANES {
                                tile[row][lane] += probabilities[row][key] * value[lane];
                            }
                        }
                    }
                    for (row, tile) in tile.into_iter().enumerate() {
                        self.accumulators[(first + row) * panels + panel] = tile;
                    }
                } else {
                    // Only the keys that the row sees: zero times a masked NaN would be NaN.
                    for row in rows {
                        let accumulator = &mut self.accumulators[row * panels + panel];
                        for key in seen(&self.visible[row], keys) {
                            for lane in 0..LANES {
                                accumulator[lane] += self.scores[row][key] * values[key][lane];
                            }
                        }
                    }
                }
            }
        }
    }
}

/// The keys of a block that a row sees, counted from the block's first.
#[inline(always)]
fn seen(visible: &Range<usize>, block: &Range<usize>) -> Range<usize> {
    let begin = visible.start.clamp(block.start, block.end);
    let end = visible.end.clamp(begin, block.end);
    begin - block.start..end - block.start
}
