//! Decode: very few rows per key/value head, and so one pass over keys and values at the speed of
//! memory.
//!
//! [`Block`](super::block::Block) computes with one row per SIMD lane. With one query and no grouped
//! heads, 15 of 16 lanes would be idle. Here the lanes hold the dims of a vector instead: every key is
//! read once, in memory order, and multiplied with the rows of its head. Only the softmax has a row in
//! each lane; those are the rows of all heads, which fill its lanes.

use std::ops::Range;

use pulp::Simd;

use super::Sequence;
use super::block::{KEY_BLOCK, all_finite};
use super::softmax::Rows;
use super::split::Part;
use super::tile::Lanes;
use super::vectors::Vectors;
use crate::backend::{BackendError, Cancellation, filled};
use crate::tensor::TensorView;

/// Values added at a time, so that a row's accumulators are loaded and stored once for all of them.
const VALUES: usize = 4;

/// Whether a number of rows per key/value head is served by [`DecodeRows`]: with more rows, blocks
/// are as fast. Measured on Zen 4 with AVX-512, see `docs/performance/cpu.md`.
pub(super) struct AreFew(pub(super) usize);

impl pulp::WithSimd for AreFew {
    type Output = bool;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> bool {
        self.0 <= S::F32_LANES / 2
    }
}

/// All rows of a sequence, grouped by key/value head, with their accumulators and softmax state.
pub(super) struct DecodeRows<'a> {
    /// Rows per key/value head.
    group: usize,
    head_dim: usize,
    value_head_dim: usize,
    lanes: usize,
    /// Queries by row and dim, padded with zeros to whole SIMD vectors.
    queries: Vec<f32>,
    /// The output before normalisation, by row and dim, padded to whole SIMD vectors.
    accumulators: Vec<f32>,
    softmax: Rows<'a>,
}

impl<'a> DecodeRows<'a> {
    /// Loads the queries of a sequence, with empty accumulators. `sinks` says whether the sinks count
    /// in this part.
    pub(super) fn new(
        arch: pulp::Arch,
        sequence: &Sequence<'a>,
        sinks: bool,
    ) -> Result<Self, BackendError> {
        let problem = sequence.problem;
        let lanes = arch.dispatch(Lanes);
        let (head_dim, value_head_dim) = (problem.head_dim, problem.value_head_dim);
        let rows = problem.query_length * problem.query_heads;
        let room = |dim: usize| filled("rows", rows * dim.next_multiple_of(lanes), 0.0);
        let mut queries = room(head_dim)?;
        let mut softmax = Rows::new(rows.next_multiple_of(lanes))?;
        softmax.begin(problem.scale(), sequence.all_rows().map(|row| sequence.rule(row, sinks)));
        let vectors = queries.chunks_exact_mut(head_dim.next_multiple_of(lanes));
        for ((query, head), to) in sequence.all_rows().zip(vectors) {
            sequence.query(head).read(query, &mut to[..head_dim]);
        }
        Ok(DecodeRows {
            group: problem.query_length * problem.group_size(),
            head_dim,
            value_head_dim,
            lanes,
            queries,
            accumulators: room(value_head_dim)?,
            softmax,
        })
    }

    /// Attends to a range of keys, unless cancelled.
    pub(super) fn walk(
        &mut self,
        arch: pulp::Arch,
        workspace: &mut Workspace,
        sequence: &Sequence<'_>,
        keys: Range<usize>,
        cancellation: Option<&Cancellation>,
    ) {
        arch.dispatch(Walk { rows: self, workspace, sequence, keys, cancellation });
    }
}

impl Part for DecodeRows<'_> {
    fn merge(&mut self, other: &Self) {
        let width = self.value_head_dim.next_multiple_of(self.lanes);
        let sums = self.accumulators.chunks_exact_mut(width);
        for (row, (sums, others)) in sums.zip(other.accumulators.chunks_exact(width)).enumerate() {
            let [own, factor] = self.softmax.merge(row, &other.softmax);
            for (sum, other) in sums.iter_mut().zip(others) {
                *sum = *sum * own + other * factor;
            }
        }
    }

    fn finish(&self, kv_head: usize, row: usize, output: &mut [f32]) -> f32 {
        let row = kv_head * self.group + row;
        let Some((sum, lse)) = self.softmax.finish(row) else {
            output.fill(0.0);
            return f32::NEG_INFINITY;
        };
        let sums = &self.accumulators[row * self.value_head_dim.next_multiple_of(self.lanes)..];
        for (to, from) in output.iter_mut().zip(sums) {
            *to = from / sum;
        }
        lse
    }
}

/// Scratch memory of a thread.
pub(super) struct Workspace {
    /// Scores of a step, later probabilities, by panel of rows, key and lane.
    scores: Vec<f32>,
    /// A key, or [`VALUES`] values, as f32, padded with zeros to whole SIMD vectors.
    vectors: Vec<f32>,
}

impl Workspace {
    pub(super) fn new(arch: pulp::Arch, sequence: &Sequence<'_>) -> Result<Self, BackendError> {
        let (lanes, problem) = (arch.dispatch(Lanes), sequence.problem);
        let rows = problem.query_length * problem.query_heads;
        let dim = problem.head_dim.max(problem.value_head_dim).next_multiple_of(lanes);
        Ok(Workspace {
            scores: filled("scores", rows.next_multiple_of(lanes) * KEY_BLOCK, 0.0)?,
            vectors: filled("vectors", dim * VALUES, 0.0)?,
        })
    }
}

/// The walk of a sequence's rows over a range of keys.
struct Walk<'w, 'a, 's> {
    rows: &'w mut DecodeRows<'a>,
    workspace: &'w mut Workspace,
    sequence: &'w Sequence<'s>,
    keys: Range<usize>,
    cancellation: Option<&'w Cancellation>,
}

impl pulp::WithSimd for Walk<'_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Walk { rows, workspace, sequence, keys, cancellation } = self;
        let heads = 0..sequence.problem.kv_heads;
        let key_heads: Vec<Vectors<'_>> = heads.clone().map(|it| sequence.key(it)).collect();
        let value_heads: Vec<Vectors<'_>> = heads.map(|it| sequence.value(it)).collect();
        let [key_order, value_order] = [sequence.inputs.key, sequence.inputs.value].map(Order::of);
        let seen = rows.softmax.seen(0..rows.softmax.count());
        for first in (keys.start / KEY_BLOCK * KEY_BLOCK..keys.end).step_by(KEY_BLOCK) {
            if cancellation.is_some_and(Cancellation::is_cancelled) {
                return;
            }
            let begin = first.max(keys.start).max(seen.start);
            let step = begin..keys.end.min(first + KEY_BLOCK).min(seen.end);
            if step.is_empty() {
                continue;
            }
            for index in 0..step.len() * key_heads.len() {
                let (key, kv_head) = key_order.at(index, step.len(), key_heads.len());
                let vectors = &key_heads[kv_head];
                multiply(simd, rows, workspace, kv_head, vectors, step.start + key, &step);
            }
            for panel in 0..rows.softmax.count().div_ceil(S::F32_LANES) {
                let lanes = panel * S::F32_LANES..(panel + 1) * S::F32_LANES;
                let scores = &mut workspace.scores[panel * KEY_BLOCK * S::F32_LANES..];
                let scores = &mut scores[..step.len() * S::F32_LANES];
                rows.softmax.weigh::<S, 1>(simd, lanes, &step, scores);
            }
            rescale(simd, rows);
            let pieces = step.len().div_ceil(VALUES);
            for index in 0..pieces * value_heads.len() {
                let (piece, kv_head) = value_order.at(index, pieces, value_heads.len());
                let begin = step.start + piece * VALUES;
                let positions = begin..step.end.min(begin + VALUES);
                let vectors = &value_heads[kv_head];
                update(simd, rows, workspace, kv_head, vectors, positions, &step);
            }
        }
    }
}

/// The order in which the vectors of a step are read: memory order, which the hardware prefetcher
/// follows. Head by head through a cache whose heads are adjacent took three times as long on Zen 4.
#[derive(Clone, Copy)]
enum Order {
    /// All heads of a position, then the next position.
    Positions,
    /// All positions of a head, then the next head.
    Heads,
}

impl Order {
    fn of(tensor: TensorView<'_>) -> Self {
        let strides = tensor.layout().strides();
        if strides.heads <= strides.length { Order::Positions } else { Order::Heads }
    }

    /// Returns which piece of the step, and which head, comes at an index of the loop.
    #[inline(always)]
    fn at(self, index: usize, pieces: usize, heads: usize) -> (usize, usize) {
        match self {
            Order::Positions => (index / heads, index % heads),
            Order::Heads => (index % pieces, index / pieces),
        }
    }
}

/// Returns the index of a row's score for the first key of a step. The next key's is one SIMD vector
/// further.
#[inline(always)]
fn score_of<S: Simd>(row: usize) -> usize {
    row / S::F32_LANES * KEY_BLOCK * S::F32_LANES + row % S::F32_LANES
}

/// Computes the scores of a head's rows for one key of a step.
#[inline(always)]
fn multiply<S: Simd>(
    simd: S,
    rows: &DecodeRows<'_>,
    workspace: &mut Workspace,
    kv_head: usize,
    keys: &Vectors<'_>,
    position: usize,
    step: &Range<usize>,
) {
    let width = rows.head_dim.next_multiple_of(S::F32_LANES);
    let first = kv_head * rows.group;
    let queries = &rows.queries[first * width..][..rows.group * width];
    let key = &mut workspace.vectors[..width];
    keys.read(position, &mut key[..rows.head_dim]);
    key[rows.head_dim..].fill(0.0);
    let key = S::as_simd_f32s(key).0;
    let place = (position - step.start) * S::F32_LANES;
    for (row, query) in queries.chunks_exact(width).enumerate() {
        workspace.scores[score_of::<S>(first + row) + place] =
            dot(simd, S::as_simd_f32s(query).0, key);
    }
}

/// Returns the dot product of two vectors, with four independent accumulators.
#[inline(always)]
fn dot<S: Simd>(simd: S, one: &[S::f32s], other: &[S::f32s]) -> f32 {
    let mut sums = [simd.splat_f32s(0.0); 4];
    let (ones, last_ones) = one.as_chunks::<4>();
    let (others, last_others) = other.as_chunks::<4>();
    for (one, other) in ones.iter().zip(others) {
        for lane in 0..4 {
            sums[lane] = simd.mul_add_e_f32s(one[lane], other[lane], sums[lane]);
        }
    }
    for (one, other) in last_ones.iter().zip(last_others) {
        sums[0] = simd.mul_add_e_f32s(*one, *other, sums[0]);
    }
    let [first, second, third, fourth] = sums;
    let sum = simd.add_f32s(simd.add_f32s(first, second), simd.add_f32s(third, fourth));
    simd.reduce_sum_f32s(sum)
}

/// Rescales the accumulators of all rows to their new maxima.
#[inline(always)]
fn rescale<S: Simd>(simd: S, rows: &mut DecodeRows<'_>) {
    let width = rows.value_head_dim.next_multiple_of(S::F32_LANES);
    let factors = rows.softmax.rescale(0..rows.softmax.count());
    for (sums, factor) in rows.accumulators.chunks_exact_mut(width).zip(factors) {
        // The maximum of a row rarely changes after the first steps.
        if *factor != 1.0 {
            let factor = simd.splat_f32s(*factor);
            for sum in S::as_mut_simd_f32s(sums).0 {
                *sum = simd.mul_f32s(*sum, factor);
            }
        }
    }
}

/// Adds up to [`VALUES`] values of a step, weighted by the probabilities, to a head's rows.
#[inline(always)]
fn update<S: Simd>(
    simd: S,
    rows: &mut DecodeRows<'_>,
    workspace: &mut Workspace,
    kv_head: usize,
    values: &Vectors<'_>,
    positions: Range<usize>,
    step: &Range<usize>,
) {
    let dim = rows.value_head_dim;
    let width = dim.next_multiple_of(S::F32_LANES);
    let (first, count) = (kv_head * rows.group, rows.group);
    let sums = &mut rows.accumulators[first * width..][..count * width];
    let Workspace { scores, vectors } = workspace;
    let (vectors, _) = vectors.split_at_mut(VALUES * width);
    for (index, vector) in vectors.chunks_exact_mut(width).enumerate() {
        match positions.start + index {
            position if position < positions.end => values.read(position, &mut vector[..dim]),
            // Padding has weight zero; it has to be finite.
            _ => vector[..dim].fill(0.0),
        }
        vector[dim..].fill(0.0);
    }
    let weight = |row: usize, position: usize| {
        scores[score_of::<S>(row) + (position - step.start) * S::F32_LANES]
    };
    if !all_finite(vectors) {
        // Zero times infinity is NaN: values that are not finite are added only to rows that see
        // them, and replaced by zero for the others.
        for (position, vector) in positions.clone().zip(vectors.chunks_exact_mut(width)) {
            for (dim, value) in vector.iter_mut().enumerate().filter(|it| !it.1.is_finite()) {
                for row in (first..first + count).filter(|row| rows.softmax.sees(*row, position)) {
                    sums[(row - first) * width + dim] += weight(row, position) * *value;
                }
                *value = 0.0;
            }
        }
    }
    let mut values = vectors.chunks_exact(width).map(|value| S::as_simd_f32s(value).0);
    let values: [&[S::f32s]; VALUES] =
        std::array::from_fn(|_| values.next().expect("as many vectors as there is room for"));
    for (row, sums) in sums.chunks_exact_mut(width).enumerate() {
        let weights: [S::f32s; VALUES] = std::array::from_fn(|index| {
            let position = positions.start + index;
            let has_weight = position < positions.end;
            simd.splat_f32s(if has_weight { weight(first + row, position) } else { 0.0 })
        });
        let sums = S::as_mut_simd_f32s(sums).0;
        // Slices that the compiler knows to be equally long need no bounds checks.
        let values = values.map(|value| &value[..sums.len()]);
        for index in 0..sums.len() {
            let mut sum = sums[index];
            for (value, weight) in values.iter().zip(weights) {
                sum = simd.mul_add_e_f32s(value[index], weight, sum);
            }
            sums[index] = sum;
        }
    }
}
