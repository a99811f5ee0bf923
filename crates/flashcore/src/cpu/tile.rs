//! Matrix products, one register tile at a time.
//!
//! A tile holds a few rows of a panel in registers, where a panel is as wide as one or a few
//! vectors. Both products of attention have this form when the columns are queries:
//!
//! ```text
//! scores[key][query]       = sum over dim  keys[key][dim]   * queries[dim][query]
//! output[value dim][query] = sum over key  values[key][dim] * probabilities[key][query]
//! ```
//!
//! so the softmax, which works down a column, never crosses the lanes of a vector.

use pulp::Simd;

/// Register tiles: rows by columns (in vectors), chosen to fill the registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tile {
    /// 12 by 1: a panel of one vector, as for a single query. Twelve independent sums hide the
    /// latency of a fused multiply-add on every current core.
    Narrow,
    /// 6 by 2: 15 of 16 registers (AVX2).
    Few,
    /// 6 by 4: 29 of 32 registers of four lanes (NEON).
    Many,
    /// 12 by 2: 27 of 32 registers of sixteen lanes (AVX-512).
    Wide,
}

impl Tile {
    /// Returns the best tile of an instruction set for tasks of this many columns.
    #[inline(always)]
    pub(super) fn of<S: Simd>(columns: usize) -> Self {
        if columns <= S::F32_LANES {
            Tile::Narrow
        } else if S::REGISTER_COUNT < 32 {
            Tile::Few
        } else if S::F32_LANES < 16 {
            Tile::Many
        } else {
            Tile::Wide
        }
    }

    /// Returns the same tile, in a way that lets the compiler remove the tiles of other instruction
    /// sets, which only tests use.
    #[inline(always)]
    pub(super) fn compiled<S: Simd>(self) -> Self {
        let own = Tile::of::<S>(if self == Tile::Narrow { 1 } else { usize::MAX });
        if cfg!(test) { self } else { own }
    }

    /// Returns the number of rows, and of columns in vectors.
    pub(super) const fn size(self) -> (usize, usize) {
        match self {
            Tile::Narrow => (12, 1),
            Tile::Few => (6, 2),
            Tile::Many => (6, 4),
            Tile::Wide => (12, 2),
        }
    }
}

/// The number of f32 lanes of the instruction set.
pub(super) struct Lanes;

impl pulp::WithSimd for Lanes {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        S::F32_LANES
    }
}

/// One row of a panel.
pub(super) type Row<S, const COLUMNS: usize> = [<S as Simd>::f32s; COLUMNS];

/// Views numbers as rows of a panel.
#[inline(always)]
pub(super) fn rows<S: Simd, const COLUMNS: usize>(numbers: &[f32]) -> &[Row<S, COLUMNS>] {
    S::as_simd_f32s(numbers).0.as_chunks().0
}

/// Views numbers as mutable rows of a panel.
#[inline(always)]
pub(super) fn rows_mut<S: Simd, const COLUMNS: usize>(
    numbers: &mut [f32],
) -> &mut [Row<S, COLUMNS>] {
    S::as_mut_simd_f32s(numbers).0.as_chunks_mut().0
}

/// `tile[row] += factors[row] * panel_row` for every row.
#[inline(always)]
pub(super) fn multiply_add<S: Simd, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    tile: &mut [Row<S, COLUMNS>; ROWS],
    factors: impl Fn(usize) -> f32,
    panel_row: &Row<S, COLUMNS>,
) {
    for row in 0..ROWS {
        let factor = simd.splat_f32s(factors(row));
        for column in 0..COLUMNS {
            tile[row][column] = simd.mul_add_e_f32s(factor, panel_row[column], tile[row][column]);
        }
    }
}

/// Multiplies `ROWS` vectors of length `dim`, stored one after the other in `vectors`, with every
/// column of a panel of `dim` rows.
#[inline(always)]
pub(super) fn products<S: Simd, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    vectors: &[f32],
    dim: usize,
    panel: &[Row<S, COLUMNS>],
) -> [Row<S, COLUMNS>; ROWS] {
    let mut tile = [[simd.splat_f32s(0.0); COLUMNS]; ROWS];
    add_products(simd, &mut tile, vectors, dim, panel);
    tile
}

/// Like [`products`], added to a tile.
#[inline(always)]
pub(super) fn add_products<S: Simd, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    tile: &mut [Row<S, COLUMNS>; ROWS],
    vectors: &[f32],
    dim: usize,
    panel: &[Row<S, COLUMNS>],
) {
    // Slices of known length `dim` are read without bounds checks.
    let vectors: [&[f32]; ROWS] = std::array::from_fn(|row| &vectors[row * dim..][..dim]);
    let panel = &panel[..dim];
    for index in 0..dim {
        multiply_add(simd, tile, |row| vectors[row][index], &panel[index]);
    }
}

/// `tile = tile * factor + the sum over rows of weights * panel`.
#[inline(always)]
pub(super) fn accumulate<S: Simd, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    tile: &mut [Row<S, COLUMNS>; ROWS],
    factor: &Row<S, COLUMNS>,
    weights: &[[f32; ROWS]],
    panel: &[Row<S, COLUMNS>],
) {
    let mut sums = *tile;
    for row in 0..ROWS {
        for column in 0..COLUMNS {
            sums[row][column] = simd.mul_f32s(sums[row][column], factor[column]);
        }
    }
    add_weighted(simd, &mut sums, weights, panel);
    *tile = sums;
}

/// `tile += the sum over rows of weights * panel`.
#[inline(always)]
pub(super) fn add_weighted<S: Simd, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    tile: &mut [Row<S, COLUMNS>; ROWS],
    weights: &[[f32; ROWS]],
    panel: &[Row<S, COLUMNS>],
) {
    for (weights, panel_row) in weights.iter().zip(panel) {
        multiply_add(simd, tile, |row| weights[row], panel_row);
    }
}
