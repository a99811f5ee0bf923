//! Products on the tensor cores of one warp.
//!
//! Scores have query rows down and keys across: a thread holds two neighbouring
//! keys of row `lane / 4`, and of the row 8 below. Rounded, that is the second
//! operand of a product over these keys, so outputs are kept transposed: value
//! columns down, query rows across. Eight query rows cost half of sixteen.

use ptx::{
    Address, Builder, Element, F32, Instruction, MmaShape, Reg, Register, SharedAddress,
    TileLayout, U32,
};

use super::Decode;

/// An accumulator of 16 by 8: two neighbours of the thread's first row, two of its second.
pub(super) type Cell = [Reg<F32>; 4];

/// Scores of the thread: by sixteen query rows and by eight keys.
pub(super) struct Scores(Vec<Vec<Cell>>);

impl Scores {
    /// The thread's scores of its row among eight, by eight keys.
    pub(super) fn row(&self, eight: usize) -> Vec<[Reg<F32>; 2]> {
        let first = 2 * (eight % 2);
        self.0[eight / 2].iter().map(|cell| [cell[first], cell[first + 1]]).collect()
    }
}

/// The output, transposed: by eight query rows and by sixteen value columns.
pub(super) struct Output(Vec<Vec<Cell>>);

impl Output {
    pub(super) fn zeros(k: &mut Builder, decode: &Decode) -> Self {
        let columns = decode.value_head_dim.div_ceil(16);
        let cell = |k: &mut Builder| [0.0f32; 4].map(|zero| k.variable(zero));
        let eight = |k: &mut Builder| (0..columns).map(|_| cell(k)).collect();
        Output((0..decode.rows / 8).map(|_| eight(k)).collect())
    }

    /// The cells of eight query rows.
    pub(super) fn eight(&self, eight: usize) -> &[Cell] {
        &self.0[eight]
    }
}

/// How the lanes address the 8 x 8 matrices of `ldmatrix`, as bytes from the corner of 16 rows by
/// 16 columns of a tile: along the columns first. The swizzle exclusive-ors the chunk with the
/// row, so there is one for each pair of chunks of a panel.
#[derive(Clone, Copy)]
pub(super) struct Lanes([Reg<U32>; 4]);

impl Lanes {
    pub(super) fn new(k: &mut Builder, lane: Reg<U32>) -> Self {
        let row = k.eval(lane / 16 * 8 + lane % 8);
        let chunk = k.eval((lane / 8 % 2) ^ (lane % 8));
        let first = k.eval(row * 128 + chunk * 16);
        Lanes([0, 1, 2, 3].map(|pair: u32| k.eval(first ^ (32 * pair))))
    }
}

/// A tile that a warp reads 16 rows by 16 columns at a time.
struct Reader {
    layout: TileLayout,
    pairs: [Reg<SharedAddress>; 4],
}

impl Reader {
    fn new(k: &mut Builder, layout: TileLayout, lanes: Lanes, tile: Reg<SharedAddress>) -> Self {
        let used = (layout.columns.div_ceil(16) as usize).min(4);
        let mut pairs = [tile; 4];
        for (pair, lane) in pairs.iter_mut().zip(lanes.0).take(used) {
            *pair = k.eval(tile + lane);
        }
        Reader { layout, pairs }
    }

    /// Rows from `16 * row` and columns from `16 * column` on.
    fn load(&self, k: &mut Builder, row: u32, column: u32, transpose: bool) -> [Register; 4] {
        let dst = [(); 4].map(|()| k.register_of(self.layout.element.packed()));
        let offset = column / 4 * self.layout.panel_bytes() + row * 16 * 128;
        let base = self.pairs[column as usize % 4].register();
        let address = Address { base, offset: offset as i32 };
        k.push(Instruction::LoadMatrix { dst: dst.to_vec(), address, transpose });
        dst
    }
}

/// `d = a b + c` on 16 x 8 x 16.
fn multiply(
    k: &mut Builder,
    element: Element,
    d: Cell,
    a: [Register; 4],
    b: [Register; 2],
    c: Cell,
) {
    k.push(Instruction::Mma {
        shape: MmaShape::M16N8K16,
        element,
        accumulator: Element::F32,
        d: d.map(Reg::register).to_vec(),
        a: a.to_vec(),
        b: b.to_vec(),
        c: c.map(Reg::register).to_vec(),
    });
}

/// Queries times keys. Queries come by sixteen rows and sixteen columns.
pub(super) fn scores(
    k: &mut Builder,
    decode: &Decode,
    lanes: Lanes,
    queries: &[Vec<[Register; 4]>],
    keys: Reg<SharedAddress>,
) -> Scores {
    let reader = Reader::new(k, decode.key_layout(), lanes, keys);
    let zero = k.eval::<F32>(0.0);
    let eights = decode.tile_keys / 8;
    let cells: Vec<Vec<Cell>> = (queries.iter())
        .map(|_| (0..eights).map(|_| [(); 4].map(|()| k.register())).collect())
        .collect();
    for step in 0..decode.head_dim.div_ceil(16) {
        for row in 0..decode.tile_keys / 16 {
            let [a, b, c, d] = reader.load(k, row, step, false);
            for (half, keys) in [[a, b], [c, d]].into_iter().enumerate() {
                for (queries, cells) in queries.iter().zip(&cells) {
                    let cell = cells[2 * row as usize + half];
                    let sum = if step == 0 { [zero; 4] } else { cell };
                    multiply(k, decode.element, cell, queries[step as usize], keys, sum);
                }
            }
        }
    }
    Scores(cells)
}

/// Adds values times probabilities to the transposed output. Probabilities come by eight query
/// rows and eight keys.
pub(super) fn update(
    k: &mut Builder,
    decode: &Decode,
    lanes: Lanes,
    output: &Output,
    probabilities: &[Vec<Register>],
    values: Reg<SharedAddress>,
) {
    let reader = Reader::new(k, decode.value_layout(), lanes, values);
    for column in 0..decode.value_head_dim.div_ceil(16) {
        for row in 0..decode.tile_keys / 16 {
            let values = reader.load(k, row, column, true);
            for (output, probabilities) in output.0.iter().zip(probabilities) {
                let cell = output[column as usize];
                let first = 2 * row as usize;
                let keys = [probabilities[first], probabilities[first + 1]];
                multiply(k, decode.element, cell, values, keys, cell);
            }
        }
    }
}
