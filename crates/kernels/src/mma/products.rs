//! The matrix products of a warp: the order of operand loads, and the type of the accumulators.
//!
//! Two neighbouring accumulator cells of `S`, rounded to 16 bits, form the A operand of `PV` for
//! their 16 columns, so probabilities never leave registers.

use ptx::{
    Builder, Element, Expression, F32, FragmentA, FragmentB, MatrixLanes, MmaAccumulator, MmaCell,
    Reg, SharedAddress, TileLayout, TileReader, U32, Value, WarpAccumulator, WarpFragment,
};

use super::Mma;
use crate::product::Source;

/// The `ldmatrix` addressing of the lanes of a warp.
#[derive(Clone, Copy)]
pub(super) struct Lanes {
    /// For queries, and for values as a B operand.
    rows_first: MatrixLanes,
    /// For keys as a transposed B operand.
    columns_first: MatrixLanes,
}

impl Lanes {
    pub(super) fn new(k: &mut Builder) -> Self {
        let lane = k.lane();
        Lanes {
            rows_first: MatrixLanes::rows_first(k, lane),
            columns_first: MatrixLanes::columns_first(k, lane),
        }
    }
}

/// The queries of a warp.
///
/// They arrive in shared memory as rows. `take` rearranges them once into fragments: 512 bytes for
/// each 16 x 16 elements, 16 bytes of each lane, so that one address register and constant offsets
/// reach them all.
pub(super) struct Queries {
    layout: TileLayout,
    /// The warp's rows, then the lane's part of the fragments that replace them.
    rows: Reg<SharedAddress>,
    mine: Reg<SharedAddress>,
    /// The fragments by step and tile of rows, where queries are kept in registers.
    held: Option<Vec<Vec<FragmentA>>>,
}

impl Queries {
    /// Creates the queries of a warp whose first row is at `rows`.
    pub(super) fn new(k: &mut Builder, mma: &Mma, rows: Reg<SharedAddress>) -> Self {
        let lane = k.lane();
        let mine = k.eval(rows + lane * 16);
        Queries { layout: mma.query_layout(), rows, mine, held: None }
    }

    /// Loads the queries into registers, or rearranges them in place into fragments. They must have
    /// arrived.
    pub(super) fn take(&mut self, k: &mut Builder, mma: &Mma, lanes: Lanes) {
        let reader = TileReader::new(k, self.layout, self.rows, lanes.rows_first);
        let steps = 0..mma.padded_dim() / 16;
        if mma.query_source == Source::Registers {
            let tiles = |k: &mut Builder, step: u32| -> Vec<FragmentA> {
                (0..mma.row_tiles).map(|tile| reader.a(k, 16 * tile, step)).collect()
            };
            self.held = Some(steps.map(|step| tiles(k, step)).collect());
            return;
        }
        let places = steps.flat_map(|step| (0..mma.row_tiles).map(move |tile| (step, tile)));
        let rows: Vec<_> = places
            .map(|(step, tile)| {
                let row: [Reg<U32>; 4] =
                    k.load_vector(reader.address(16 * tile, step), Default::default());
                (self.address(mma, step, tile), row)
            })
            .collect();
        k.warp_sync();
        for (to, row) in rows {
            k.store_vector(to, &row, Default::default());
        }
        k.warp_sync();
    }

    /// Returns the address of a fragment. The fragments of a panel occupy the bytes that the warp's
    /// rows had in it.
    fn address(&self, mma: &Mma, step: u32, tile: u32) -> Value<SharedAddress> {
        let within = (step % 4 * mma.row_tiles + tile) * 512;
        self.mine + (step / 4 * self.layout.panel_bytes() + within)
    }

    /// Returns the A operands of a step, by tile of rows.
    fn at(&self, k: &mut Builder, mma: &Mma, step: u32) -> Vec<FragmentA> {
        if let Some(held) = &self.held {
            return held[step as usize].clone();
        }
        let tiles = 0..mma.row_tiles;
        tiles.map(|tile| FragmentA::load(k, mma.element, self.address(mma, step, tile))).collect()
    }
}

/// The accumulators of the products with one key block.
struct Sums {
    zero: MmaAccumulator,
    /// Accumulators by tile of rows and group of 8 columns.
    sums: Vec<Vec<MmaAccumulator>>,
}

impl Sums {
    /// Accumulates directly in `cells`, or in separate `f16` accumulators.
    fn new(k: &mut Builder, mma: &Mma, cells: &WarpAccumulator) -> Self {
        let zero = match mma.accumulate {
            Element::F32 => MmaAccumulator::from_zero(k.eval::<F32>(0.0)),
            _ => MmaAccumulator::F16([k.pack(0.0, 0.0); 2]),
        };
        let sum = |k: &mut Builder, tile, group| match mma.accumulate {
            Element::F32 => MmaAccumulator::F32(cells.cell(tile, group)),
            _ => MmaAccumulator::F16(std::array::from_fn(|_| k.register())),
        };
        let sums = (0..cells.tiles())
            .map(|tile| (0..cells.groups()).map(|group| sum(k, tile, group)).collect())
            .collect();
        Sums { zero, sums }
    }

    /// Adds one step's product to an accumulator; the `first` one starts from zero.
    fn add(
        &self,
        k: &mut Builder,
        (tile, group): (usize, usize),
        a: FragmentA,
        b: FragmentB,
        first: bool,
    ) {
        let sum = self.sums[tile][group];
        k.mma(sum, a, b, if first { self.zero } else { sum });
    }

    /// Converts an `f16` accumulator to `f32`: stores it to the cell or, with `add`, adds it. `f32`
    /// accumulators are the cells themselves.
    fn widen(&self, k: &mut Builder, (tile, group): (usize, usize), cell: MmaCell, add: bool) {
        let MmaAccumulator::F16(pairs) = self.sums[tile][group] else { return };
        for (half, pair) in pairs.into_iter().enumerate() {
            let parts = k.split(pair);
            for (element, part) in cell.pair(half).into_iter().zip(parts) {
                let wide = k.eval(part.convert::<F32>());
                if add {
                    k.set(element, element + wide);
                } else {
                    k.set(element, wide);
                }
            }
        }
    }
}

/// Computes `scores = Q K^T` for the keys in `slot`. Operands of the next piece are loaded before
/// the current one is multiplied.
pub(super) fn scores(
    k: &mut Builder,
    mma: &Mma,
    lanes: Lanes,
    queries: &Queries,
    slot: Reg<SharedAddress>,
    scores: &WarpAccumulator,
) {
    let reader = TileReader::new(k, mma.key_layout(), slot, lanes.columns_first);
    let sums = Sums::new(k, mma, scores);
    // Steps of 16 columns; in each, the keys of the block 16 at a time.
    let pieces: Vec<(u32, u32)> = (0..mma.padded_dim() / 16)
        .flat_map(|step| (0..mma.key_block / 16).map(move |pair| (step, pair)))
        .collect();
    let load = |k: &mut Builder, (step, pair): (u32, u32)| reader.b(k, 16 * pair, step);
    let mut next = Some(load(k, pieces[0]));
    let mut a = Vec::new();
    for (index, (step, pair)) in pieces.iter().copied().enumerate() {
        let keys = next.take().expect("loaded one piece ahead");
        if pair == 0 {
            a = queries.at(k, mma, step);
        }
        if let Some(piece) = pieces.get(index + 1) {
            next = Some(load(k, *piece));
        }
        for (half, keys) in keys.into_iter().enumerate() {
            for (tile, a) in a.iter().enumerate() {
                let group = 2 * pair as usize + half;
                sums.add(k, (tile, group), *a, keys, step == 0);
            }
        }
    }
    for (tile, group, cell) in scores.cells() {
        sums.widen(k, (tile, group), cell, false);
    }
}

/// Computes `output += P V` for the values in `slot`.
pub(super) fn update(
    k: &mut Builder,
    mma: &Mma,
    lanes: Lanes,
    probabilities: &WarpFragment,
    slot: Reg<SharedAddress>,
    output: &WarpAccumulator,
) {
    let reader = TileReader::new(k, mma.value_layout(), slot, lanes.rows_first);
    let sums = Sums::new(k, mma, output);
    let in_place = mma.accumulate == Element::F32;
    // Steps of 16 keys, and columns 16 at a time (the last may be 8). f32: all columns of a step
    // before the next step, which keeps dependent products apart. f16: all steps of a column before
    // the next column, so that only one column's f16 accumulators are live beside the output.
    let (steps, columns) = (mma.key_block / 16, mma.value_head_dim.div_ceil(16));
    let pieces: Vec<(u32, u32)> = (0..steps * columns)
        .map(|index| match in_place {
            true => (index / columns, index % columns),
            false => (index % steps, index / steps),
        })
        .collect();
    let load =
        |k: &mut Builder, (step, column): (u32, u32)| match 16 * column + 8 < mma.value_head_dim {
            true => reader.b(k, 16 * step, column).to_vec(),
            false => vec![reader.first_b(k, 16 * step, column)],
        };
    let mut next = Some(load(k, pieces[0]));
    for (index, (step, column)) in pieces.iter().copied().enumerate() {
        let values = next.take().expect("loaded one piece ahead");
        if let Some(piece) = pieces.get(index + 1) {
            next = Some(load(k, *piece));
        }
        for (half, values) in values.into_iter().enumerate() {
            for tile in 0..mma.row_tiles as usize {
                let a = probabilities.a(tile, step as usize);
                let at = (tile, 2 * column as usize + half);
                sums.add(k, at, a, values, step == 0 && !in_place);
                if step == steps - 1 {
                    sums.widen(k, at, output.cell(at.0, at.1), true);
                }
            }
        }
    }
}
