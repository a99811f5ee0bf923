//! The two products of a warp's tile on the tensor cores, by `mma.sync`.
//!
//! S = QK^T has query rows as its rows and keys as its columns. The rounded probabilities are
//! directly the B operand of a product over these keys, so the output is kept transposed, O^T = V^T
//! P^T: value columns by query rows. This way eight query rows cost half of sixteen.

use ptx::{
    Builder, F32, FragmentA, FragmentB, MmaAccumulator, Packed, Reg, SharedAddress, SteppedLanes,
    TileReader, WarpAccumulator,
};

use super::Decode;

/// The transposed output accumulators, value columns by eight query rows each. With 8-bit values,
/// each sixteen value columns are permuted: the even ones come before the odd ones.
pub(super) struct Output(Vec<WarpAccumulator>);

impl Output {
    pub(super) fn zeros(k: &mut Builder, decode: &Decode) -> Self {
        let columns = decode.value_head_dim.next_multiple_of(16);
        Output((0..decode.rows / 8).map(|_| WarpAccumulator::zeros(k, columns, 8)).collect())
    }

    fn elements(&self) -> impl Iterator<Item = Reg<F32>> {
        let cells = self.0.iter().flat_map(WarpAccumulator::cells);
        cells.flat_map(|(_, _, cell)| cell.registers())
    }

    /// Sets the output to zero.
    pub(super) fn reset(&self, k: &mut Builder) {
        for element in self.elements() {
            k.set(element, 0.0);
        }
    }

    /// Multiplies every element by a factor.
    pub(super) fn scale(&self, k: &mut Builder, factor: Reg<F32>) {
        for element in self.elements() {
            k.set(element, element * factor);
        }
    }

    /// Returns the accumulator of a group of eight query rows.
    pub(super) fn eight(&self, eight: usize) -> &WarpAccumulator {
        &self.0[eight]
    }
}

/// Computes S = QK^T of a tile. `queries` are fragments of sixteen rows by sixteen columns, indexed
/// by rows, then by columns.
pub(super) fn scores(
    k: &mut Builder,
    decode: &Decode,
    lanes: SteppedLanes,
    queries: &[Vec<FragmentA>],
    keys: Reg<SharedAddress>,
) -> WarpAccumulator {
    let reader = TileReader::stepped(k, decode.key_layout(), keys, lanes);
    let zero = MmaAccumulator::from_zero(k.eval::<F32>(0.0));
    let scores = WarpAccumulator::new(k, 16 * queries.len() as u32, decode.tile_keys);
    let multiply = |k: &mut Builder, step: usize, row: u32, keys: [FragmentB; 2]| {
        for (half, keys) in keys.into_iter().enumerate() {
            for (tile, queries) in queries.iter().enumerate() {
                let cell = scores.cell(tile, 2 * row as usize + half);
                let sum = if step == 0 { zero } else { cell.into() };
                k.mma(cell, queries[step], keys, sum);
            }
        }
    };
    let steps = decode.head_dim.div_ceil(16) as usize;
    for load in 0..reader.steps() {
        for row in 0..decode.tile_keys / 16 {
            match decode.cache.is_8_bit() {
                false => {
                    let keys = reader.b(k, 16 * row, load);
                    multiply(k, load as usize, row, keys);
                }
                true => {
                    let keys = reader.widened_b(k, 16 * row, load);
                    for (step, keys) in (2 * load as usize..steps).zip(keys) {
                        multiply(k, step, row, keys);
                    }
                }
            }
        }
    }
    scores
}

/// Adds V^T P^T to the transposed output. `probabilities` are indexed by groups of eight query
/// rows, then by eight keys.
pub(super) fn update(
    k: &mut Builder,
    decode: &Decode,
    lanes: SteppedLanes,
    output: &Output,
    probabilities: &[Vec<Packed>],
    values: Reg<SharedAddress>,
) {
    let reader = TileReader::stepped(k, decode.value_layout(), values, lanes);
    let multiply = |k: &mut Builder, column: usize, row: u32, values: FragmentA| {
        for (output, probabilities) in output.0.iter().zip(probabilities) {
            let cell = output.cell(column, 0);
            let first = 2 * row as usize;
            let keys = FragmentB([probabilities[first], probabilities[first + 1]]);
            k.mma(cell, values, keys, cell);
        }
    };
    let columns = decode.value_head_dim.div_ceil(16) as usize;
    for load in 0..reader.steps() {
        for row in 0..decode.tile_keys / 16 {
            match decode.cache.is_8_bit() {
                false => {
                    let values = reader.a(k, 16 * row, load);
                    multiply(k, load as usize, row, values);
                }
                true => {
                    let values = reader.widened_a(k, 16 * row, load);
                    for (column, values) in (2 * load as usize..columns).zip(values) {
                        multiply(k, column, row, values);
                    }
                }
            }
        }
    }
}
