//! The forward pass over a block of rows: S = QK^T, online softmax and O += PV, key block by key
//! block.

use std::ops::Range;

use pulp::Simd;

use super::softmax::{RowRule, Rows};
use super::tile::{Row, Tile, accumulate, products, rows, rows_mut};
use super::vectors::Vectors;
use crate::backend::{BackendError, Cancellation, filled};
use crate::problem::Problem;

/// Maximum number of rows per task. Each loaded block of keys and values is used for all of them.
/// With vectors of dim 128, queries, outputs and such a block take 360 KB, which fits most L2
/// caches.
pub(super) const MAX_ROWS: usize = 256;
/// Minimum number of rows per task, where there are as many.
pub(super) const MIN_ROWS: usize = 32;
/// Keys between two updates of the running maximum: a multiple of the rows of every [`Tile`].
pub(super) const KEY_BLOCK: usize = 96;

/// The sizes that all data of a task depend on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) tile: Tile,
    /// Rows of a register tile.
    pub(super) tile_rows: usize,
    /// Columns of a panel: softmax rows that are computed together, one per vector lane.
    pub(super) lanes: usize,
    pub(super) head_dim: usize,
    pub(super) value_head_dim: usize,
}

/// A loaded block of keys and values, and its scores. Each thread has one.
pub(super) struct Workspace {
    shape: Shape,
    /// Keys by position and dim; one tile more than a block, since the last tile may extend beyond
    /// it.
    keys: Vec<f32>,
    /// Values by tile of dims, position and dim within the tile; zero in place of non-finite ones.
    values: Vec<f32>,
    /// The non-finite values. The weight of a masked key is zero, and zero times infinity or NaN is
    /// NaN: they are added only to the rows that see them.
    infinite: Vec<Infinite>,
    /// Scores of one panel, later probabilities, by key and lane.
    scores: Vec<f32>,
    /// One vector of a tensor as f32, padded to whole tiles of the value head dim.
    vector: Vec<f32>,
}

/// A block of rows that read one key/value head, with their running results.
pub(super) struct Block<'a> {
    shape: Shape,
    /// Queries by panel, dim and lane.
    queries: Vec<f32>,
    /// Outputs before normalization, by panel, dim and lane.
    accumulators: Vec<f32>,
    softmax: Rows<'a>,
}

/// A value that is NaN or infinite.
struct Infinite {
    position: usize,
    dim: usize,
    value: f32,
}

/// Selects the tile and the panel width on an instruction set, for tasks of this many rows.
struct Measure(usize);

impl pulp::WithSimd for Measure {
    type Output = (Tile, usize);

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> Self::Output {
        let tile = Tile::of::<S>(self.0);
        (tile, tile.size().1 * S::F32_LANES)
    }
}

/// Lets blocks attend to the keys of a range that they see. Stops early if cancelled.
pub(super) struct WalkKeys<'a, 'tensors> {
    pub(super) workspace: &'a mut Workspace,
    /// The blocks, each with its keys and values.
    pub(super) blocks: &'a mut [(Block<'tensors>, Vectors<'tensors>, Vectors<'tensors>)],
    pub(super) keys: Range<usize>,
    pub(super) cancellation: Option<&'a Cancellation>,
}

impl pulp::WithSimd for WalkKeys<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.workspace.shape.tile.compiled::<S>() {
            Tile::Narrow => self.walk::<S, 12, 1>(simd),
            Tile::Few => self.walk::<S, 6, 2>(simd),
            Tile::Many => self.walk::<S, 6, 4>(simd),
            Tile::Wide => self.walk::<S, 12, 2>(simd),
        }
    }
}

impl WalkKeys<'_, '_> {
    #[inline(always)]
    fn walk<S: Simd, const ROWS: usize, const COLUMNS: usize>(self, simd: S) {
        let WalkKeys { workspace, blocks, keys, cancellation } = self;
        // Steps begin at the same keys for every row, whichever rows share a task, so that the bits
        // of a row do not depend on the number of threads. All heads take a step before the next
        // one, since their keys are adjacent in memory.
        for first in (keys.start / KEY_BLOCK * KEY_BLOCK..keys.end).step_by(KEY_BLOCK) {
            let step = first.max(keys.start)..keys.end.min(first + KEY_BLOCK);
            for (block, key, value) in &mut *blocks {
                if cancellation.is_some_and(Cancellation::is_cancelled) {
                    return;
                }
                let seen = block.seen(&step);
                if seen.is_empty() {
                    continue;
                }
                workspace.load_keys(*key, first, &seen);
                workspace.load_values::<ROWS>(*value, first, &seen);
                block.step::<S, ROWS, COLUMNS>(simd, workspace, first, &seen);
            }
        }
    }
}

impl Shape {
    /// Returns the sizes for tasks of this many rows.
    pub(super) fn new(arch: pulp::Arch, problem: &Problem, rows: usize) -> Self {
        let (tile, lanes) = arch.dispatch(Measure(rows));
        Shape::with_tile(tile, lanes, problem)
    }

    pub(super) fn with_tile(tile: Tile, lanes: usize, problem: &Problem) -> Self {
        let (head_dim, value_head_dim) = (problem.head_dim, problem.value_head_dim);
        Shape { tile, tile_rows: tile.size().0, lanes, head_dim, value_head_dim }
    }

    /// Returns the head dim, rounded up to whole tiles.
    pub(super) fn dim_rows(&self) -> usize {
        self.head_dim.next_multiple_of(self.tile_rows)
    }

    /// Returns the value head dim, rounded up to whole tiles.
    fn value_rows(&self) -> usize {
        self.value_head_dim.next_multiple_of(self.tile_rows)
    }
}

impl<'a> Block<'a> {
    /// Allocates a block of this many rows.
    pub(super) fn new(shape: Shape, rows: usize) -> Result<Self, BackendError> {
        let zeros = |count: usize| filled("blocks of queries", count, 0.0);
        let panels = rows.div_ceil(shape.lanes);
        Ok(Block {
            shape,
            queries: zeros(panels * shape.head_dim * shape.lanes)?,
            accumulators: zeros(panels * shape.value_rows() * shape.lanes)?,
            softmax: Rows::new(panels * shape.lanes)?,
        })
    }

    /// Initializes the block: packs queries, and sets the rule of each row.
    pub(super) fn begin<'q>(
        &mut self,
        scale: f32,
        queries: impl Iterator<Item = (Vectors<'q>, usize)>,
        rules: impl Iterator<Item = RowRule<'a>>,
    ) {
        let Shape { lanes, head_dim, .. } = self.shape;
        let mut vector = vec![0.0; head_dim];
        for (row, (head, position)) in queries.enumerate() {
            head.read(position, &mut vector);
            let panel = &mut self.queries[row / lanes * head_dim * lanes..];
            for (to, from) in panel.chunks_exact_mut(lanes).zip(&vector) {
                to[row % lanes] = *from;
            }
        }
        self.accumulators.fill(0.0);
        self.softmax.begin(scale, rules);
    }

    /// Writes the normalized output of a row, and returns its log-sum-exp. A row that saw no key
    /// has zeros.
    pub(super) fn finish(&self, row: usize, output: &mut [f32]) -> f32 {
        let Some((sum, lse)) = self.softmax.finish(row) else {
            output.fill(0.0);
            return f32::NEG_INFINITY;
        };
        let lanes = self.shape.lanes;
        let panel = &self.accumulators[row / lanes * self.shape.value_rows() * lanes..];
        for (to, from) in output.iter_mut().zip(panel.chunks_exact(lanes)) {
            *to = from[row % lanes] / sum;
        }
        lse
    }

    /// Merges the results of the same rows over other keys.
    pub(super) fn merge(&mut self, other: &Block<'_>) {
        let Shape { lanes, .. } = self.shape;
        let size = self.shape.value_rows() * lanes;
        for row in 0..self.softmax.count() {
            let [own, others] = self.softmax.merge(row, &other.softmax);
            let (panel, lane) = (row / lanes * size, row % lanes);
            let sums = self.accumulators[panel..][..size].iter_mut().skip(lane).step_by(lanes);
            let added = other.accumulators[panel..][..size].iter().skip(lane).step_by(lanes);
            for (sum, added) in sums.zip(added) {
                *sum = *sum * own + added * others;
            }
        }
    }

    /// Returns the part of a range of keys from the first to the last that some row sees.
    fn seen(&self, keys: &Range<usize>) -> Range<usize> {
        let seen = self.softmax.seen(0..self.softmax.count());
        seen.start.max(keys.start)..seen.end.min(keys.end)
    }

    /// Attends to the loaded keys: `loaded` of the step that begins at key `first`.
    #[inline(always)]
    fn step<S: Simd, const ROWS: usize, const COLUMNS: usize>(
        &mut self,
        simd: S,
        workspace: &mut Workspace,
        first: usize,
        loaded: &Range<usize>,
    ) {
        let lanes = self.shape.lanes;
        for panel in 0..self.softmax.count().div_ceil(lanes) {
            let columns = panel * lanes..(panel + 1) * lanes;
            let seen = self.softmax.seen(columns.clone());
            let keys = seen.start.max(loaded.start)..seen.end.min(loaded.end);
            if keys.is_empty() {
                continue;
            }
            let size = self.shape.head_dim * lanes;
            let queries = rows::<S, COLUMNS>(&self.queries[panel * size..][..size]);
            workspace.multiply::<S, ROWS, COLUMNS>(simd, queries, first, &keys);
            let scores = &mut workspace.scores[..keys.len() * lanes];
            self.softmax.weigh::<S, COLUMNS>(simd, columns.clone(), &keys, scores);

            let size = self.shape.value_rows() * lanes;
            let accumulators = &mut self.accumulators[panel * size..][..size];
            let rescale = &rows::<S, COLUMNS>(self.softmax.rescale(columns))[0];
            workspace.update::<S, ROWS, COLUMNS>(simd, accumulators, rescale, first, &keys);
            for infinite in &workspace.infinite {
                self.add(panel, infinite, &keys, &workspace.scores);
            }
        }
    }

    /// Adds the contribution of a non-finite value to a panel, if its key is among `keys`.
    fn add(&mut self, panel: usize, infinite: &Infinite, keys: &Range<usize>, scores: &[f32]) {
        let Infinite { position, dim, value } = *infinite;
        if !keys.contains(&position) {
            return;
        }
        let lanes = self.shape.lanes;
        let scores = &scores[(position - keys.start) * lanes..][..lanes];
        let begin = panel * self.shape.value_rows() * lanes + dim * lanes;
        for (lane, sum) in self.accumulators[begin..][..lanes].iter_mut().enumerate() {
            if self.softmax.sees(panel * lanes + lane, position) {
                *sum += scores[lane] * value;
            }
        }
    }
}

impl Workspace {
    pub(super) fn new(shape: Shape) -> Result<Self, BackendError> {
        let zeros = |count: usize| filled("blocks of keys", count, 0.0);
        let rows = KEY_BLOCK + shape.tile_rows;
        Ok(Workspace {
            shape,
            keys: zeros(rows * shape.head_dim)?,
            values: zeros(shape.value_rows() * KEY_BLOCK)?,
            infinite: Vec::new(),
            scores: zeros(rows * shape.lanes)?,
            vector: zeros(shape.value_rows())?,
        })
    }

    /// Loads keys of the step that begins at key `first`. Other rows keep old keys; their scores
    /// are not read.
    fn load_keys(&mut self, key: Vectors<'_>, first: usize, keys: &Range<usize>) {
        let dim = self.shape.head_dim;
        for position in keys.clone() {
            key.read(position, &mut self.keys[(position - first) * dim..][..dim]);
        }
    }

    /// Packs values of the step that begins at key `first`, and sets non-finite ones aside.
    #[inline(always)]
    fn load_values<const ROWS: usize>(
        &mut self,
        value: Vectors<'_>,
        first: usize,
        keys: &Range<usize>,
    ) {
        self.infinite.clear();
        for position in keys.clone() {
            let vector = &mut self.vector[..self.shape.value_head_dim];
            value.read(position, vector);
            if !all_finite(vector) {
                for (dim, value) in vector.iter_mut().enumerate().filter(|it| !it.1.is_finite()) {
                    self.infinite.push(Infinite { position, dim, value: *value });
                    *value = 0.0;
                }
            }
            // Chunks of constant size are copied inline: a call to memcpy would cost more than the
            // copy.
            let (tiles, _) = self.values.as_chunks_mut::<ROWS>();
            let tiles = tiles.iter_mut().skip(position - first).step_by(KEY_BLOCK);
            for (to, from) in tiles.zip(self.vector.as_chunks::<ROWS>().0) {
                *to = *from;
            }
        }
    }

    /// Computes S = QK^T of a panel of queries with some keys of the step that begins at key
    /// `first`.
    #[inline(always)]
    fn multiply<S: Simd, const ROWS: usize, const COLUMNS: usize>(
        &mut self,
        simd: S,
        queries: &[Row<S, COLUMNS>],
        first: usize,
        keys: &Range<usize>,
    ) {
        let dim = self.shape.head_dim;
        let vectors = self.keys[(keys.start - first) * dim..].chunks_exact(ROWS * dim);
        let scores = rows_mut::<S, COLUMNS>(&mut self.scores);
        let tiles = keys.len().div_ceil(ROWS);
        for (tile, vectors) in scores.chunks_exact_mut(ROWS).zip(vectors).take(tiles) {
            tile.copy_from_slice(&products::<S, ROWS, COLUMNS>(simd, vectors, dim, queries));
        }
    }

    /// Rescales the accumulators of a panel and adds its probabilities times the values.
    #[inline(always)]
    fn update<S: Simd, const ROWS: usize, const COLUMNS: usize>(
        &self,
        simd: S,
        accumulators: &mut [f32],
        rescale: &Row<S, COLUMNS>,
        first: usize,
        keys: &Range<usize>,
    ) {
        let (tiles, _) = rows_mut::<S, COLUMNS>(accumulators).as_chunks_mut::<ROWS>();
        let scores = &rows::<S, COLUMNS>(&self.scores)[..keys.len()];
        for (tile, values) in tiles.iter_mut().zip(self.values.chunks_exact(KEY_BLOCK * ROWS)) {
            let values = &values.as_chunks::<ROWS>().0[keys.start - first..][..keys.len()];
            accumulate(simd, tile, rescale, values, scores);
        }
    }
}

/// Tells whether all numbers are finite, by a comparison of bits that compilers vectorize.
#[inline(always)]
pub(super) fn all_finite(numbers: &[f32]) -> bool {
    const MAGNITUDE: u32 = !(1 << 31);
    let largest = numbers.iter().fold(0, |most, it| (it.to_bits() & MAGNITUDE).max(most));
    largest < f32::INFINITY.to_bits()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::inputs::InputTensors;
    use crate::problem::{Mask, RowScores};

    /// Computes outputs and log-sum-exps of a small problem with a given tile, not necessarily the
    /// best.
    struct Attend(Tile);

    impl pulp::WithSimd for Attend {
        type Output = Vec<f32>;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
            let (queries, keys) = (37, 211);
            let problem = Problem::new(1, 1, queries, 20)
                .with_key_length(keys)
                .with_value_head_dim(29)
                .with_dtype(DType::F32)
                .with_mask(Mask::CAUSAL);
            let tensors = InputTensors::random(&problem, 1).unwrap();
            let [query, key, value] = [&tensors.query, &tensors.key, &tensors.value]
                .map(|tensor| Vectors::plain(tensor.view(), 0, 0));
            let lanes = self.0.size().1 * S::F32_LANES;
            let shape = Shape::with_tile(self.0, lanes, &problem);
            let rule = |query| RowRule {
                visible: problem.visible_keys(0, query),
                scores: RowScores::of(&problem, query, queries, keys, 0.0),
                sink: None,
                functions: None,
            };
            let mut blocks = [0..keys / 3, keys / 3..keys].map(|keys| {
                let mut block = Block::new(shape, queries).unwrap();
                let vectors = (0..queries).map(|position| (query, position));
                block.begin(problem.scale(), vectors, (0..queries).map(rule));
                let mut blocks = [(block, key, value)];
                let workspace = &mut Workspace::new(shape).unwrap();
                let cancellation = None;
                simd.vectorize(WalkKeys { workspace, blocks: &mut blocks, keys, cancellation });
                let [(block, ..)] = blocks;
                block
            });
            let [block, other] = &mut blocks;
            block.merge(other);
            let mut results = Vec::new();
            for row in 0..queries {
                let mut output = [0.0; 29];
                let lse = block.finish(row, &mut output);
                results.extend(output);
                results.push(lse);
            }
            results
        }
    }

    /// The tiles of other instruction sets run here too, if slowly.
    #[test]
    fn every_tile_gives_the_same() {
        let expected = pulp::Scalar::new().vectorize(Attend(Tile::Narrow));
        assert!(expected.iter().all(|value| value.is_finite()));
        for tile in [Tile::Narrow, Tile::Few, Tile::Many, Tile::Wide] {
            for found in [
                pulp::Scalar::new().vectorize(Attend(tile)),
                pulp::Arch::new().dispatch(Attend(tile)),
            ] {
                let worst = expected.iter().zip(&found).map(|(one, other)| (one - other).abs());
                let worst = worst.fold(0.0, f32::max);
                assert!(worst < 2e-6, "{tile:?}: off by {worst}");
            }
        }
    }
}
