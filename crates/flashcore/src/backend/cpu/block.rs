//! One block of rows against every key that it sees: products, online softmax, update.

use std::ops::Range;

use pulp::Simd;

use super::softmax::{RowRule, Rows};
use super::tile::{Tile, accumulate, products, rows, rows_mut};
use crate::problem::Problem;
use crate::tensor::Head;

/// Rows of one task at most. Each loaded block of keys and values is used for all of them. With
/// vectors of dim 128, queries, outputs and such a block take 360 KB: most second-level caches.
pub(super) const MAX_ROWS: usize = 256;
/// Rows of one task at least, where there are as many.
pub(super) const MIN_ROWS: usize = 32;
/// Keys handled between two updates of the running maximum: a multiple of every tile's rows.
const KEY_BLOCK: usize = 96;

/// What one thread needs for a block of rows, reused from block to block.
pub(super) struct Workspace {
    tile: Tile,
    /// Rows of a register tile.
    tile_rows: usize,
    /// Columns of a panel.
    lanes: usize,
    head_dim: usize,
    value_head_dim: usize,
    /// Queries by panel, dim and lane.
    queries: Vec<f32>,
    /// Keys by position and dim; one tile more than a block, since the last tile may reach beyond.
    keys: Vec<f32>,
    /// Values by tile of dims, position and dim within the tile; zero where one is not finite.
    values: Vec<f32>,
    /// The values that are not finite. The weight of a masked key is zero, and zero times these
    /// would not be nothing: they are added to the rows that see them and to no other.
    infinite: Vec<Infinite>,
    /// The products of one panel, later probabilities, by key and lane.
    scores: Vec<f32>,
    /// The output before normalisation, by panel, dim and lane.
    accumulators: Vec<f32>,
    softmax: Rows,
    /// One vector of a tensor as f32, as long as the tiles of a value.
    vector: Vec<f32>,
}

/// A value that is NaN or infinite.
struct Infinite {
    position: usize,
    dim: usize,
    value: f32,
}

/// The tile and the lanes of a panel on an instruction set, for tasks of so many rows.
struct Measure(usize);

impl pulp::WithSimd for Measure {
    type Output = (Tile, usize);

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> Self::Output {
        let tile = Tile::of::<S>(self.0);
        (tile, tile.size().1 * S::F32_LANES)
    }
}

/// Attend to every key that some row of the block sees.
pub(super) struct WalkKeys<'a> {
    pub(super) workspace: &'a mut Workspace,
    pub(super) key: Head<'a>,
    pub(super) value: Head<'a>,
}

impl pulp::WithSimd for WalkKeys<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // The tiles of other instruction sets are compiled away, except for tests.
        let narrow = self.workspace.tile == Tile::Narrow;
        let own = Tile::of::<S>(if narrow { 1 } else { usize::MAX });
        match if cfg!(test) { self.workspace.tile } else { own } {
            Tile::Narrow => self.walk::<S, 12, 1>(simd),
            Tile::Few => self.walk::<S, 6, 2>(simd),
            Tile::Many => self.walk::<S, 6, 4>(simd),
            Tile::Wide => self.walk::<S, 12, 2>(simd),
        }
    }
}

impl WalkKeys<'_> {
    #[inline(always)]
    fn walk<S: Simd, const ROWS: usize, const COLUMNS: usize>(self, simd: S) {
        let WalkKeys { workspace, key, value } = self;
        let (lanes, count) = (workspace.lanes, workspace.softmax.count());
        let seen = workspace.softmax.seen(0..count);
        // Blocks begin at the same keys for every row, whatever rows share a task: so a row's bits do
        // not depend on the number of threads.
        for first in (seen.start / KEY_BLOCK * KEY_BLOCK..seen.end).step_by(KEY_BLOCK) {
            let block = first..seen.end.min(first + KEY_BLOCK);
            workspace.load_keys(key, block.clone());
            workspace.load_values::<ROWS>(value, block.clone());
            for panel in 0..count.div_ceil(lanes) {
                let seen = workspace.softmax.seen(panel * lanes..(panel + 1) * lanes);
                let keys = seen.start.max(block.start)..seen.end.min(block.end);
                if keys.is_empty() {
                    continue;
                }
                workspace.multiply::<S, ROWS, COLUMNS>(simd, panel, first, &keys);
                let scores = &mut workspace.scores[..keys.len() * lanes];
                let columns = panel * lanes..(panel + 1) * lanes;
                workspace.softmax.weigh::<S, COLUMNS>(simd, columns, &keys, scores);
                workspace.update::<S, ROWS, COLUMNS>(simd, panel, first, &keys);
                workspace.update_infinite(panel, &keys);
            }
        }
    }
}

impl Workspace {
    pub(super) fn new(arch: pulp::Arch, problem: &Problem, rows: usize) -> Self {
        let (tile, lanes) = arch.dispatch(Measure(rows));
        Workspace::with_tile(tile, lanes, problem, rows)
    }

    /// Room for panels of so many lanes.
    fn with_tile(tile: Tile, lanes: usize, problem: &Problem, rows: usize) -> Self {
        let (tile_rows, _) = tile.size();
        let panels = rows.div_ceil(lanes);
        let value_rows = problem.value_head_dim.next_multiple_of(tile_rows);
        let zeros = |count: usize| vec![0.0; count];
        Workspace {
            tile,
            tile_rows,
            lanes,
            head_dim: problem.head_dim,
            value_head_dim: problem.value_head_dim,
            queries: zeros(panels * problem.head_dim * lanes),
            keys: zeros((KEY_BLOCK + tile_rows) * problem.head_dim),
            values: zeros(value_rows * KEY_BLOCK),
            infinite: Vec::new(),
            scores: zeros((KEY_BLOCK + tile_rows) * lanes),
            accumulators: zeros(panels * value_rows * lanes),
            softmax: Rows::new(panels * lanes),
            vector: zeros(problem.head_dim.max(value_rows)),
        }
    }

    /// Begin a block: pack its queries, each with the rule of its row, and forget the previous
    /// block's results.
    pub(super) fn load_queries<'a>(
        &mut self,
        scale: f32,
        queries: impl Iterator<Item = (Head<'a>, usize)>,
        rules: impl Iterator<Item = RowRule>,
    ) {
        let vector = &mut self.vector[..self.head_dim];
        for (row, (head, position)) in queries.enumerate() {
            head.read(position, vector);
            let panel = &mut self.queries[row / self.lanes * self.head_dim * self.lanes..];
            let lane = row % self.lanes;
            for (to, from) in panel.chunks_exact_mut(self.lanes).zip(vector.iter()) {
                to[lane] = *from;
            }
        }
        self.accumulators.fill(0.0);
        self.softmax.begin(scale, rules);
    }

    /// The normalised output of a row and its log-sum-exp. A row without weight is zero.
    pub(super) fn finish(&mut self, row: usize) -> (&[f32], f32) {
        let output = &mut self.vector[..self.value_head_dim];
        let Some((sum, lse)) = self.softmax.finish(row) else {
            output.fill(0.0);
            return (output, f32::NEG_INFINITY);
        };
        let value_rows = self.value_head_dim.next_multiple_of(self.tile_rows);
        let panel = &self.accumulators[row / self.lanes * value_rows * self.lanes..];
        for (to, from) in output.iter_mut().zip(panel.chunks_exact(self.lanes)) {
            *to = from[row % self.lanes] / sum;
        }
        (output, lse)
    }

    /// Load a block of keys. Rows beyond its end keep old keys; their scores are not read.
    fn load_keys(&mut self, key: Head<'_>, keys: Range<usize>) {
        for (row, position) in self.keys.chunks_exact_mut(self.head_dim).zip(keys) {
            key.read(position, row);
        }
    }

    /// Pack a block of values, and set aside those that are not finite.
    #[inline(always)]
    fn load_values<const ROWS: usize>(&mut self, value: Head<'_>, keys: Range<usize>) {
        self.infinite.clear();
        self.vector[self.value_head_dim..].fill(0.0);
        for (index, position) in keys.enumerate() {
            let vector = &mut self.vector[..self.value_head_dim];
            value.read(position, vector);
            if !all_finite(vector) {
                for (dim, value) in vector.iter_mut().enumerate().filter(|it| !it.1.is_finite()) {
                    self.infinite.push(Infinite { position, dim, value: *value });
                    *value = 0.0;
                }
            }
            // Pieces of a size that the compiler knows: a call for each would cost more than they.
            let (tiles, _) = self.values.as_chunks_mut::<ROWS>();
            let tiles = tiles.iter_mut().skip(index).step_by(KEY_BLOCK);
            for (to, from) in tiles.zip(self.vector.as_chunks::<ROWS>().0) {
                *to = *from;
            }
        }
    }

    /// The products of a panel of queries with some keys of the block that begins with `first`.
    #[inline(always)]
    fn multiply<S: Simd, const ROWS: usize, const COLUMNS: usize>(
        &mut self,
        simd: S,
        panel: usize,
        first: usize,
        keys: &Range<usize>,
    ) {
        let size = self.head_dim * self.lanes;
        let queries = rows::<S, COLUMNS>(&self.queries[panel * size..][..size]);
        let vectors =
            self.keys[(keys.start - first) * self.head_dim..].chunks_exact(ROWS * self.head_dim);
        let scores = rows_mut::<S, COLUMNS>(&mut self.scores);
        let tiles = keys.len().div_ceil(ROWS);
        for (tile, vectors) in scores.chunks_exact_mut(ROWS).zip(vectors).take(tiles) {
            let products = products::<S, ROWS, COLUMNS>(simd, vectors, self.head_dim, queries);
            tile.copy_from_slice(&products);
        }
    }

    /// Rescale what a panel has accumulated, and add its probabilities times the values.
    #[inline(always)]
    fn update<S: Simd, const ROWS: usize, const COLUMNS: usize>(
        &mut self,
        simd: S,
        panel: usize,
        first: usize,
        keys: &Range<usize>,
    ) {
        let value_rows = self.value_head_dim.next_multiple_of(ROWS);
        let size = value_rows * self.lanes;
        let accumulators = &mut self.accumulators[panel * size..][..size];
        let (tiles, _) = rows_mut::<S, COLUMNS>(accumulators).as_chunks_mut::<ROWS>();
        let rescale = self.softmax.rescale(panel * self.lanes..(panel + 1) * self.lanes);
        let rescale = &rows::<S, COLUMNS>(rescale)[0];
        let scores = &rows::<S, COLUMNS>(&self.scores)[..keys.len()];
        for (tile, values) in tiles.iter_mut().zip(self.values.chunks_exact(KEY_BLOCK * ROWS)) {
            let values = &values.as_chunks::<ROWS>().0[keys.start - first..][..keys.len()];
            accumulate(simd, tile, rescale, values, scores);
        }
    }

    /// Add what the values that are not finite contribute.
    fn update_infinite(&mut self, panel: usize, keys: &Range<usize>) {
        let lanes = self.lanes;
        let size = self.value_head_dim.next_multiple_of(self.tile_rows) * lanes;
        let accumulators = &mut self.accumulators[panel * size..][..size];
        let here = self.infinite.iter().filter(|infinite| keys.contains(&infinite.position));
        for Infinite { position, dim, value } in here {
            let scores = &self.scores[(position - keys.start) * lanes..][..lanes];
            for (lane, sum) in accumulators[dim * lanes..][..lanes].iter_mut().enumerate() {
                if self.softmax.sees(panel * lanes + lane, *position) {
                    *sum += scores[lane] * value;
                }
            }
        }
    }
}

/// Whether no number is NaN or infinite, by a comparison of bits that compilers turn into vector
/// code.
#[inline(always)]
fn all_finite(numbers: &[f32]) -> bool {
    const MAGNITUDE: u32 = !(1 << 31);
    let largest = numbers.iter().fold(0, |most, it| (it.to_bits() & MAGNITUDE).max(most));
    largest < f32::INFINITY.to_bits()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::inputs::InputTensors;
    use crate::problem::{Mask, Scores};

    /// Outputs and log-sum-exps of a small problem, by a tile that need not be the best.
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
                .with_mask(Mask::Causal);
            let tensors = InputTensors::random(&problem, 1).unwrap();
            let [query, key, value] =
                [&tensors.query, &tensors.key, &tensors.value].map(|tensor| tensor.head(0, 0));
            let lanes = self.0.size().1 * S::F32_LANES;
            let mut workspace = Workspace::with_tile(self.0, lanes, &problem, queries);
            let rule = |query| RowRule {
                visible: problem.visible_keys(0, query),
                scores: Scores::of(&problem, query, queries, keys, 0.0),
                sink: None,
            };
            let vectors = (0..queries).map(|position| (query, position));
            workspace.load_queries(problem.scale(), vectors, (0..queries).map(rule));
            simd.vectorize(WalkKeys { workspace: &mut workspace, key, value });
            let mut results = Vec::new();
            for row in 0..queries {
                let (output, lse) = workspace.finish(row);
                results.extend_from_slice(output);
                results.push(lse);
            }
            results
        }
    }

    /// Those of other instruction sets are run here too, if slowly.
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
