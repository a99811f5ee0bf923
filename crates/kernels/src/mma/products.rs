//! Products on the tensor cores of one warp: `ldmatrix` and `mma.sync`.
//!
//! A thread holds an accumulator of 16 rows by 8 columns as two neighbouring
//! elements of row `lane / 4` and the same two of the row 8 below. Rounded, two
//! accumulators side by side are the first operand of a next product over
//! their 16 columns, so probabilities never leave their registers.

use ptx::{
    Builder, Element, Expression, F16, F32, Instruction, MmaShape, Reg, Register, SharedAddress,
    TileLayout, U32, Value,
};

use super::Mma;
use crate::product::Source;

/// An accumulator of 16 rows by 8 columns: two elements of the thread's first
/// row, two of its second.
pub(super) type Cell = [Reg<F32>; 4];

/// Accumulators of a warp, by tile of 16 rows and by group of 8 columns.
pub(super) struct Cells(Vec<Vec<Cell>>);

impl Cells {
    pub(super) fn new(k: &mut Builder, mma: &Mma, columns: u32) -> Self {
        let cell = |k: &mut Builder| std::array::from_fn(|_| k.register());
        let row = |k: &mut Builder| (0..columns / 8).map(|_| cell(k)).collect();
        Cells((0..mma.row_tiles).map(|_| row(k)).collect())
    }

    pub(super) fn clear(&self, k: &mut Builder) {
        for element in self.0.iter().flatten().flatten() {
            k.set(*element, 0.0);
        }
    }

    /// The cells, each with its tile of rows and its group of columns; tiles
    /// move fastest.
    pub(super) fn each(&self) -> impl Iterator<Item = (usize, usize, Cell)> {
        let groups = self.0[0].len();
        (0..groups).flat_map(move |group| {
            (0..self.0.len()).map(move |tile| (tile, group, self.0[tile][group]))
        })
    }

    /// The thread's elements of one of its rows: two rows for each tile.
    pub(super) fn row(&self, row: usize) -> impl Iterator<Item = Reg<F32>> {
        self.0[row / 2].iter().flat_map(move |cell| [cell[2 * (row % 2)], cell[2 * (row % 2) + 1]])
    }

    pub(super) fn cell(&self, tile: usize, group: usize) -> Cell {
        self.0[tile][group]
    }
}

/// Probabilities of a key block, rounded: for each tile of rows and group of 8
/// columns, the two of the first row and the two of the second.
pub(super) struct Probabilities(Vec<Vec<[Register; 2]>>);

impl Probabilities {
    pub(super) fn new(k: &mut Builder, mma: &Mma) -> Self {
        let ty = mma.element.packed();
        let pair = |k: &mut Builder| [k.register_of(ty), k.register_of(ty)];
        let row = |k: &mut Builder| (0..mma.key_block / 8).map(|_| pair(k)).collect();
        Probabilities((0..mma.row_tiles).map(|_| row(k)).collect())
    }

    /// The register of two neighbours of a row of a cell.
    pub(super) fn pair(&self, tile: usize, group: usize, half: usize) -> Register {
        self.0[tile][group][half]
    }

    /// The first operand of a product over columns from `16 * step` on.
    fn operand(&self, tile: usize, step: usize) -> Vec<Register> {
        let groups = &self.0[tile];
        [groups[2 * step], groups[2 * step + 1]].concat()
    }
}

/// How the lanes of a warp address the 8 x 8 matrices of `ldmatrix`, as bytes
/// from the corner of 16 x 16 elements of a tile.
#[derive(Clone, Copy)]
pub(super) struct Lanes {
    /// Matrices down the rows first: queries as they lie, values transposed.
    rows_first: Reg<U32>,
    /// Matrices along the columns first: keys.
    columns_first: Reg<U32>,
}

impl Lanes {
    pub(super) fn new(k: &mut Builder) -> Self {
        let lane = k.lane();
        let swizzled = |k: &mut Builder, row: Reg<U32>, chunk: Reg<U32>| {
            k.eval(row * 128 + (chunk ^ (lane % 8)) * 16)
        };
        let (row, chunk) = (k.eval(lane % 16), k.eval(lane / 16));
        let rows_first = swizzled(k, row, chunk);
        let (row, chunk) = (k.eval(lane / 16 * 8 + lane % 8), k.eval(lane / 8 % 2));
        let columns_first = swizzled(k, row, chunk);
        Lanes { rows_first, columns_first }
    }
}

/// A tile that a warp reads 16 columns at a time.
struct Reader {
    layout: TileLayout,
    /// The lane's address of each pair of chunks of a panel: the swizzle
    /// exclusive-ors the chunk with the row, so a step along the columns is
    /// another exclusive or.
    steps: Vec<Reg<SharedAddress>>,
}

impl Reader {
    /// `lane` is the lane's part of the address; the tile begins at a multiple
    /// of 1024.
    fn new(k: &mut Builder, layout: TileLayout, tile: Reg<SharedAddress>, lane: Reg<U32>) -> Self {
        let first = k.eval(tile + lane);
        let used = layout.columns.div_ceil(16).min(4);
        let mut steps = vec![first];
        for step in 1..used {
            let moved = first.reinterpret::<U32>() ^ (32 * step);
            steps.push(k.eval(moved.reinterpret::<SharedAddress>()));
        }
        Reader { layout, steps }
    }

    /// Loads the 16 x 16 elements from row `row` and column `16 * step` on, or
    /// only their first two matrices; `row` is a multiple of 8.
    fn load(
        &self,
        k: &mut Builder,
        row: u32,
        step: u32,
        matrices: usize,
        transpose: bool,
    ) -> Vec<Register> {
        let address = self.address(row, step);
        load_matrices(k, self.layout.element, address, matrices, transpose)
    }

    /// The lane's address of the row it gives to `ldmatrix`.
    fn address(&self, row: u32, step: u32) -> Value<SharedAddress> {
        let offset = step / 4 * self.layout.panel_bytes() + row * 128;
        self.steps[step as usize % 4] + offset
    }
}

/// The queries of a warp.
///
/// They come as rows. Taken once, they lie as the tensor cores want them: for
/// each 16 x 16 elements 512 bytes, 16 of each lane, so that one address and
/// constants reach them all.
pub(super) struct Queries {
    layout: TileLayout,
    /// The warp's rows, and the lane's part of what was made of them.
    rows: Reg<SharedAddress>,
    mine: Reg<SharedAddress>,
    /// In registers, by step and tile of rows, if they are taken from there.
    held: Option<Vec<Vec<Vec<Register>>>>,
}

impl Queries {
    /// The queries in shared memory, from the warp's first row on.
    pub(super) fn new(k: &mut Builder, mma: &Mma, rows: Reg<SharedAddress>) -> Self {
        let lane = k.lane();
        let mine = k.eval(rows + lane * 16);
        Queries { layout: mma.query_layout(), rows, mine, held: None }
    }

    /// Once the queries have come: into registers, or as the tensor cores want
    /// them into the place where they lay.
    pub(super) fn take(&mut self, k: &mut Builder, mma: &Mma, lanes: Lanes) {
        let reader = Reader::new(k, self.layout, self.rows, lanes.rows_first);
        let steps = 0..mma.padded_dim() / 16;
        if mma.query_source == Source::Registers {
            let tiles = |k: &mut Builder, step: u32| -> Vec<Vec<Register>> {
                (0..mma.row_tiles).map(|tile| reader.load(k, 16 * tile, step, 4, false)).collect()
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
        k.push(Instruction::WarpSync);
        for (to, row) in rows {
            k.store_vector(to, &row, Default::default());
        }
        k.push(Instruction::WarpSync);
    }

    /// The steps of a panel have the room that the warp's rows had in it.
    fn address(&self, mma: &Mma, step: u32, tile: u32) -> Value<SharedAddress> {
        let within = (step % 4 * mma.row_tiles + tile) * 512;
        self.mine + (step / 4 * self.layout.panel_bytes() + within)
    }

    /// The operands of a step, by tile of rows.
    fn at(&self, k: &mut Builder, mma: &Mma, step: u32) -> Vec<Vec<Register>> {
        if let Some(held) = &self.held {
            return held[step as usize].clone();
        }
        let tiles = 0..mma.row_tiles;
        tiles
            .map(|tile| load_matrices(k, mma.element, self.address(mma, step, tile), 4, false))
            .collect()
    }
}

/// Loads two or four 8 x 8 matrices.
fn load_matrices(
    k: &mut Builder,
    element: Element,
    address: Value<SharedAddress>,
    matrices: usize,
    transpose: bool,
) -> Vec<Register> {
    let dst: Vec<Register> = (0..matrices).map(|_| k.register_of(element.packed())).collect();
    k.load_matrices(&dst, address, transpose);
    dst
}

/// One `mma.sync` of 16 x 8 x 16: `d = a b + c`.
fn mma_sync(
    k: &mut Builder,
    element: Element,
    accumulator: Element,
    d: &[Register],
    a: &[Register],
    b: &[Register],
    c: &[Register],
) {
    k.push(Instruction::Mma {
        shape: MmaShape::M16N8K16,
        element,
        accumulator,
        d: d.to_vec(),
        a: a.to_vec(),
        b: b.to_vec(),
        c: c.to_vec(),
    });
}

/// What the products of one key block are added up in.
struct Sums {
    accumulator: Element,
    /// By tile of rows and group of columns.
    registers: Vec<Vec<Vec<Register>>>,
    zero: Register,
}

impl Sums {
    /// Directly in these cells, or in `f16` beside them.
    fn new(k: &mut Builder, mma: &Mma, cells: &Cells) -> Self {
        let zero = match mma.accumulate {
            Element::F32 => k.eval::<F32>(0.0).register(),
            _ => k.pack::<ptx::F16x2>(0.0, 0.0).register(),
        };
        let registers = (cells.0.iter())
            .map(|row| {
                row.iter()
                    .map(|cell| match mma.accumulate {
                        Element::F32 => cell.iter().map(|element| element.register()).collect(),
                        _ => (0..2).map(|_| k.register_of(ptx::Type::F16x2)).collect(),
                    })
                    .collect()
            })
            .collect();
        Sums { accumulator: mma.accumulate, registers, zero }
    }

    /// Adds a step to one cell; the first begins at zero.
    fn add(
        &self,
        k: &mut Builder,
        mma: &Mma,
        (tile, group): (usize, usize),
        a: &[Register],
        b: &[Register],
        first: bool,
    ) {
        let d = &self.registers[tile][group];
        let zeros = vec![self.zero; d.len()];
        let c = if first { &zeros } else { d };
        mma_sync(k, mma.element, self.accumulator, d, a, b, c);
    }

    /// Widens the sums of a cell from `f16`: into it, or added to it. Sums in
    /// `f32` are already there.
    fn widen(&self, k: &mut Builder, (tile, group): (usize, usize), cell: Cell, add: bool) {
        if self.accumulator == Element::F32 {
            return;
        }
        for (pair, half) in cell.chunks(2).zip(&self.registers[tile][group]) {
            let (low, high) = (k.register::<F16>(), k.register::<F16>());
            let (low_half, high_half) = (low.register(), high.register());
            k.push(Instruction::Split { low: low_half, high: high_half, src: *half });
            for (element, part) in pair.iter().zip([low, high]) {
                let wide = k.eval(part.convert::<F32>());
                if add {
                    k.set(*element, *element + wide);
                } else {
                    k.set(*element, wide);
                }
            }
        }
    }
}

/// `scores = Q K^T` for the keys in `slot`. What the next step needs is loaded
/// before this one is multiplied.
pub(super) fn scores(
    k: &mut Builder,
    mma: &Mma,
    lanes: Lanes,
    queries: &Queries,
    slot: Reg<SharedAddress>,
    scores: &Cells,
) {
    let reader = Reader::new(k, mma.key_layout(), slot, lanes.columns_first);
    let sums = Sums::new(k, mma, scores);
    // Steps of 16 columns, each over the block's keys 16 at a time.
    let pieces: Vec<(u32, u32)> = (0..mma.padded_dim() / 16)
        .flat_map(|step| (0..mma.key_block / 16).map(move |pair| (step, pair)))
        .collect();
    let load =
        |k: &mut Builder, (step, pair): (u32, u32)| reader.load(k, 16 * pair, step, 4, false);
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
        for (half, keys) in keys.chunks(2).enumerate() {
            for (tile, a) in a.iter().enumerate() {
                let group = 2 * pair as usize + half;
                sums.add(k, mma, (tile, group), a, keys, step == 0);
            }
        }
    }
    for (tile, group, cell) in scores.each() {
        sums.widen(k, (tile, group), cell, false);
    }
}

/// `output += P V` for the values in `slot`.
pub(super) fn update(
    k: &mut Builder,
    mma: &Mma,
    lanes: Lanes,
    probabilities: &Probabilities,
    slot: Reg<SharedAddress>,
    output: &Cells,
) {
    let reader = Reader::new(k, mma.value_layout(), slot, lanes.rows_first);
    let sums = Sums::new(k, mma, output);
    let in_place = sums.accumulator == Element::F32;
    // Steps of 16 keys and columns 16 at a time, eight at the end. Step after step keeps the
    // products apart that wait for each other; sums in f16 are gone through column after
    // column, for only those of one are there beside the output.
    let (steps, columns) = (mma.key_block / 16, mma.value_head_dim.div_ceil(16));
    let pieces: Vec<(u32, u32)> = (0..steps * columns)
        .map(|index| match in_place {
            true => (index / columns, index % columns),
            false => (index % steps, index / steps),
        })
        .collect();
    let load = |k: &mut Builder, (step, column): (u32, u32)| {
        let matrices = if 16 * column + 8 < mma.value_head_dim { 4 } else { 2 };
        reader.load(k, 16 * step, column, matrices, true)
    };
    let mut next = Some(load(k, pieces[0]));
    for (index, (step, column)) in pieces.iter().copied().enumerate() {
        let values = next.take().expect("loaded one piece ahead");
        if let Some(piece) = pieces.get(index + 1) {
            next = Some(load(k, *piece));
        }
        for (half, values) in values.chunks(2).enumerate() {
            for tile in 0..mma.row_tiles as usize {
                let a = probabilities.operand(tile, step as usize);
                let at = (tile, 2 * column as usize + half);
                sums.add(k, mma, at, &a, values, step == 0 && !in_place);
                if step == steps - 1 {
                    sums.widen(k, at, output.cell(at.0, at.1), true);
                }
            }
        }
    }
}
