//! The products of a task of the backward pass: one block of rows against one block of keys.
//!
//! A few panels of rows meet a step of keys at a time:
//!
//! ```text
//! S[key][row]   = sum over dim  K[key][dim] Q[dim][row]
//! dP[key][row]  = sum over dim  V[key][dim] dO[dim][row]
//! P             = exp(score of S - lse)
//! dS            = P * (dP - delta) * slope of the cap
//! dQ[dim][row] += sum over key  K[key][dim] dS[key][row]
//! dV[key][dim] += sum over row  P[key][row] dO[row][dim]
//! dK[key][dim] += sum over row  dS[key][row] Q[row][dim]
//! ```
//!
//! All five have the form of the register tiles of the forward pass: rows are the columns of the
//! first three products, dims those of the last two.

use std::ops::Range;

use pulp::Simd;

use super::rows::{Infinite, RowBlock, RowNumbers, set_aside};
use crate::cpu::block::{KEY_BLOCK, Shape};
use crate::cpu::exp::exp;
use crate::cpu::tile::{Row, Tile, add_products, add_weighted, products, rows, rows_mut};
use crate::tensor::Head;

/// Panels of rows that meet a step of keys together. With more of them, the sums of dK and dV stay
/// in registers for longer, but P and dS must stay in the caches.
const PANELS: usize = 4;

/// The sums of dK and dV of a block of keys: by step, panel of dims, key and dim within the panel.
pub(super) struct KeySums {
    lanes: usize,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl KeySums {
    pub(super) fn new(shape: Shape, keys: usize) -> Self {
        let zeros = |dim: usize| {
            vec![0.0; keys.next_multiple_of(KEY_BLOCK) * dim.next_multiple_of(shape.lanes)]
        };
        KeySums {
            lanes: shape.lanes,
            keys: zeros(shape.head_dim),
            values: zeros(shape.value_head_dim),
        }
    }

    /// Reads dK and dV of one key.
    pub(super) fn read(&self, index: usize, key: &mut [f32], value: &mut [f32]) {
        for (sums, to) in [(&self.keys, key), (&self.values, value)] {
            let panels = to.len().div_ceil(self.lanes);
            for (panel, to) in to.chunks_mut(self.lanes).enumerate() {
                let panel = index / KEY_BLOCK * panels + panel;
                let from = &sums[(panel * KEY_BLOCK + index % KEY_BLOCK) * self.lanes..];
                to.copy_from_slice(&from[..to.len()]);
            }
        }
    }
}

/// Adds the contributions of a block of rows and a block of keys to the gradients of both.
pub(super) struct WalkBlock<'a> {
    pub(super) shape: Shape,
    pub(super) rows: &'a RowBlock,
    pub(super) numbers: &'a RowNumbers<'a>,
    /// Sums of dQ.
    pub(super) row_sums: &'a mut [f32],
    pub(super) key: Head<'a>,
    pub(super) value: Head<'a>,
    /// First key of the block.
    pub(super) first: usize,
    /// Keys of the block that some row sees.
    pub(super) keys: Range<usize>,
    pub(super) key_sums: &'a mut KeySums,
}

impl pulp::WithSimd for WalkBlock<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.shape.tile.compiled::<S>() {
            Tile::Narrow => self.walk::<S, 12, 1>(simd),
            Tile::Few => self.walk::<S, 6, 2>(simd),
            Tile::Many => self.walk::<S, 6, 4>(simd),
            Tile::Wide => self.walk::<S, 12, 2>(simd),
        }
    }
}

/// A step of keys and values, and the products of some panels with it.
struct Step {
    /// Keys and values by position and dim.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// Keys by tile of dims, position and dim within the tile; zero in place of non-finite values.
    key_tiles: Vec<f32>,
    infinite: Vec<Infinite>,
    /// S, later P, by panel, key and lane.
    scores: Vec<f32>,
    /// dP, later dS, by panel, key and lane.
    gradients: Vec<f32>,
}

impl Step {
    fn new(shape: Shape) -> Self {
        let zeros = |count: usize| vec![0.0; count];
        let dims = shape.dim_rows();
        Step {
            keys: zeros(KEY_BLOCK * shape.head_dim),
            values: zeros(KEY_BLOCK * shape.value_head_dim),
            key_tiles: zeros(KEY_BLOCK * dims),
            infinite: Vec::new(),
            scores: zeros(PANELS * KEY_BLOCK * shape.lanes),
            gradients: zeros(PANELS * KEY_BLOCK * shape.lanes),
        }
    }

    /// Loads keys and values of the step that begins at key `first`. Others keep old contents:
    /// their probabilities are zero.
    #[inline(always)]
    fn load<const ROWS: usize>(
        &mut self,
        key: Head<'_>,
        value: Head<'_>,
        first: usize,
        keys: &Range<usize>,
    ) {
        let (dim, value_dim) = (self.keys.len() / KEY_BLOCK, self.values.len() / KEY_BLOCK);
        let mut vector = vec![0.0; dim.next_multiple_of(ROWS)];
        self.infinite.clear();
        for position in keys.clone() {
            let index = position - first;
            value.read(position, &mut self.values[index * value_dim..][..value_dim]);
            key.read(position, &mut self.keys[index * dim..][..dim]);
            vector[..dim].copy_from_slice(&self.keys[index * dim..][..dim]);
            set_aside(&mut vector, index, &mut self.infinite);
            let (tiles, _) = self.key_tiles.as_chunks_mut::<ROWS>();
            let tiles = tiles.iter_mut().skip(index).step_by(KEY_BLOCK);
            for (to, from) in tiles.zip(vector.as_chunks::<ROWS>().0) {
                *to = *from;
            }
        }
    }
}

impl WalkBlock<'_> {
    #[inline(always)]
    fn walk<S: Simd, const ROWS: usize, const COLUMNS: usize>(mut self, simd: S) {
        let Shape { lanes, .. } = self.shape;
        let mut step = Step::new(self.shape);
        let panels = self.numbers.lse.len() / lanes;
        let (begin, end) = (self.keys.start - self.first, self.keys.end - self.first);
        for index in begin / KEY_BLOCK..end.div_ceil(KEY_BLOCK) {
            let first = self.first + index * KEY_BLOCK;
            let keys = self.keys.start.max(first)..self.keys.end.min(first + KEY_BLOCK);
            step.load::<ROWS>(self.key, self.value, first, &keys);
            for panel in (0..panels).step_by(PANELS) {
                let some = panel..panels.min(panel + PANELS);
                let tiles = self.tiles::<ROWS>(&some, first, &keys);
                if tiles.is_empty() {
                    continue;
                }
                for (slot, panel) in some.clone().enumerate() {
                    self.panel::<S, ROWS, COLUMNS>(simd, &mut step, slot, panel, first, &tiles);
                }
                self.keys::<S, ROWS, COLUMNS>(simd, &step, index, &some, &tiles);
                self.add_infinite(&step, index, &some, first, &tiles);
            }
        }
    }

    /// Returns the tiles of a step of keys that rows of some panels see.
    fn tiles<const ROWS: usize>(
        &self,
        panels: &Range<usize>,
        first: usize,
        keys: &Range<usize>,
    ) -> Range<usize> {
        let lanes = self.shape.lanes;
        let seen = self.numbers.rules.seen(panels.start * lanes..panels.end * lanes);
        let (begin, end) = (seen.start.max(keys.start), seen.end.min(keys.end));
        match begin < end {
            true => (begin - first) / ROWS..(end - first).div_ceil(ROWS),
            false => 0..0,
        }
    }

    /// Computes P and dS of a panel over some tiles of a step, and adds to dQ.
    #[inline(always)]
    fn panel<S: Simd, const ROWS: usize, const COLUMNS: usize>(
        &mut self,
        simd: S,
        step: &mut Step,
        slot: usize,
        panel: usize,
        first: usize,
        of_all: &Range<usize>,
    ) {
        let lanes = self.shape.lanes;
        let size = KEY_BLOCK * lanes;
        let scores = &mut step.scores[slot * size..][..size];
        let gradients = &mut step.gradients[slot * size..][..size];
        let keys = first + of_all.start * ROWS..first + of_all.end * ROWS;
        let tiles = self.tiles::<ROWS>(&(panel..panel + 1), first, &keys);
        for hidden in
            [of_all.start..tiles.start.max(of_all.start), tiles.end.max(of_all.start)..of_all.end]
        {
            let hidden = hidden.start * ROWS * lanes..hidden.end * ROWS * lanes;
            scores[hidden.clone()].fill(0.0);
            gradients[hidden].fill(0.0);
        }
        if tiles.is_empty() {
            return;
        }
        let keys = tiles.start * ROWS..tiles.end * ROWS;
        let inner = keys.start * lanes..keys.end * lanes;
        let (scores, gradients) = (&mut scores[inner.clone()], &mut gradients[inner]);
        let RowBlock { queries, gradients: output_gradients } = self.rows;
        multiply::<S, ROWS, COLUMNS>(simd, scores, &step.keys, &keys, queries.panel(panel));
        let outputs = output_gradients.panel(panel);
        multiply::<S, ROWS, COLUMNS>(simd, gradients, &step.values, &keys, outputs);
        let positions = first + keys.start..first + keys.end;
        let columns = panel * lanes..(panel + 1) * lanes;
        self.weigh::<S, COLUMNS>(simd, columns, &positions, scores, gradients);

        let dims = self.shape.dim_rows();
        let sums = &mut self.row_sums[panel * dims * lanes..][..dims * lanes];
        let (sums, _) = rows_mut::<S, COLUMNS>(sums).as_chunks_mut::<ROWS>();
        let gradients = rows::<S, COLUMNS>(gradients);
        for (tile, weights) in sums.iter_mut().zip(step.key_tiles.chunks_exact(KEY_BLOCK * ROWS)) {
            let weights = &weights.as_chunks::<ROWS>().0[keys.clone()];
            let mut sums = *tile;
            add_weighted(simd, &mut sums, weights, gradients);
            *tile = sums;
        }
    }

    /// Turns S into P, and dP into dS.
    #[inline(always)]
    fn weigh<S: Simd, const COLUMNS: usize>(
        &self,
        simd: S,
        columns: Range<usize>,
        keys: &Range<usize>,
        scores: &mut [f32],
        gradients: &mut [f32],
    ) {
        let rules = &self.numbers.rules;
        rules.scale_and_cap::<S, COLUMNS>(simd, scores);
        let row_of = |numbers| -> &Row<S, COLUMNS> { &rows::<S, COLUMNS>(numbers)[0] };
        let lse = row_of(&self.numbers.lse[columns.clone()]);
        let delta = row_of(&self.numbers.delta[columns.clone()]);
        for gradient in rows_mut::<S, COLUMNS>(gradients) {
            for column in 0..COLUMNS {
                gradient[column] = simd.sub_f32s(gradient[column], delta[column]);
            }
        }
        if let Some(cap) = rules.cap() {
            let (one, cap) = (simd.splat_f32s(1.0), simd.splat_f32s(cap));
            let pairs =
                rows_mut::<S, COLUMNS>(gradients).iter_mut().zip(rows::<S, COLUMNS>(scores));
            for (gradient, score) in pairs {
                for column in 0..COLUMNS {
                    let tangent = simd.div_f32s(score[column], cap);
                    let slope = simd.sub_f32s(one, simd.mul_f32s(tangent, tangent));
                    gradient[column] = simd.mul_f32s(gradient[column], slope);
                }
            }
        }
        rules.bias::<S, COLUMNS>(simd, columns.clone(), keys, scores);
        rules.call_slopes(columns.clone(), keys, scores, gradients);
        let pairs =
            rows_mut::<S, COLUMNS>(gradients).iter_mut().zip(rows_mut::<S, COLUMNS>(scores));
        for (gradient, score) in pairs {
            for column in 0..COLUMNS {
                score[column] = exp(simd, simd.sub_f32s(score[column], lse[column]));
                gradient[column] = simd.mul_f32s(gradient[column], score[column]);
            }
        }
        if !rules.all_see(columns.clone(), keys) {
            rules.mask(columns.clone(), keys, scores, 0.0);
            rules.mask(columns, keys, gradients, 0.0);
        }
    }

    /// Adds to dV and dK what some panels contribute over some tiles of a step.
    #[inline(always)]
    fn keys<S: Simd, const ROWS: usize, const COLUMNS: usize>(
        &mut self,
        simd: S,
        step: &Step,
        index: usize,
        panels: &Range<usize>,
        tiles: &Range<usize>,
    ) {
        let KeySums { keys, values, .. } = &mut *self.key_sums;
        let RowBlock { queries, gradients } = self.rows;
        let lanes = self.shape.lanes;
        for (sums, weights, packed, dim) in [
            (values, &step.scores, gradients, self.shape.value_head_dim),
            (keys, &step.gradients, queries, self.shape.head_dim),
        ] {
            let count = dim.div_ceil(lanes);
            let block_rows = self.numbers.lse.len();
            for dims in 0..count {
                let rows_of_dims = &packed.rows[dims * block_rows * lanes..];
                let size = KEY_BLOCK * lanes;
                let sums = &mut sums[(index * count + dims) * size..][..size];
                let (sums, _) = rows_mut::<S, COLUMNS>(sums).as_chunks_mut::<ROWS>();
                for tile in tiles.clone() {
                    let mut sum = sums[tile];
                    for (slot, panel) in panels.clone().enumerate() {
                        let weights = &weights[slot * size + tile * ROWS * lanes..];
                        let vectors = rows::<S, COLUMNS>(
                            &rows_of_dims[panel * lanes * lanes..][..lanes * lanes],
                        );
                        add_products(simd, &mut sum, weights, lanes, vectors);
                    }
                    sums[tile] = sum;
                }
            }
        }
    }

    /// Adds the contributions of non-finite values, for the pairs that see each other.
    fn add_infinite(
        &mut self,
        step: &Step,
        index: usize,
        panels: &Range<usize>,
        first: usize,
        tiles: &Range<usize>,
    ) {
        let Shape { lanes, head_dim, value_head_dim, tile_rows, .. } = self.shape;
        let rules = &self.numbers.rules;
        let rows = panels.start * lanes..rules.count().min(panels.end * lanes);
        let keys = tiles.start * tile_rows..tiles.end * tile_rows;
        let place = |row: usize, key: usize| {
            ((row / lanes - panels.start) * KEY_BLOCK + key) * lanes + row % lanes
        };
        let RowBlock { queries, gradients } = self.rows;
        let KeySums { keys: key_sums, values: value_sums, .. } = &mut *self.key_sums;
        for (sums, weights, packed, dim) in [
            (value_sums, &step.scores, gradients, value_head_dim),
            (key_sums, &step.gradients, queries, head_dim),
        ] {
            for infinite in packed.infinite.iter().filter(|it| rows.contains(&it.index)) {
                let dims = index * dim.div_ceil(lanes) + infinite.dim / lanes;
                for key in keys.clone().filter(|key| rules.sees(infinite.index, first + key)) {
                    let to = (dims * KEY_BLOCK + key) * lanes + infinite.dim % lanes;
                    sums[to] += weights[place(infinite.index, key)] * infinite.value;
                }
            }
        }
        let dims = self.shape.dim_rows();
        for infinite in step.infinite.iter().filter(|it| keys.contains(&it.index)) {
            for row in rows.clone().filter(|row| rules.sees(*row, first + infinite.index)) {
                let to = (row / lanes * dims + infinite.dim) * lanes + row % lanes;
                self.row_sums[to] += step.gradients[place(row, infinite.index)] * infinite.value;
            }
        }
    }
}

/// Multiplies some vectors of a step with a panel of rows.
#[inline(always)]
fn multiply<S: Simd, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    to: &mut [f32],
    vectors: &[f32],
    keys: &Range<usize>,
    panel: &[f32],
) {
    let columns = rows::<S, COLUMNS>(panel);
    let dim = columns.len();
    let vectors = vectors[keys.start * dim..keys.end * dim].chunks_exact(ROWS * dim);
    let (tiles, _) = rows_mut::<S, COLUMNS>(to).as_chunks_mut::<ROWS>();
    for (tile, vectors) in tiles.iter_mut().zip(vectors) {
        *tile = products::<S, ROWS, COLUMNS>(simd, vectors, dim, columns);
    }
}
