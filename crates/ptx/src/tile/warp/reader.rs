//! Operands of `mma.sync` out of swizzled tiles, by `ldmatrix`.
//!
//! `ldmatrix` takes four 8 x 8 matrices, of which each lane addresses one row.
//! In which order the matrices of 16 x 16 elements are taken, and whether each
//! is transposed, says which operand they become:
//!
//! | matrices | as they are | each transposed |
//! | --- | --- | --- |
//! | down the rows first | `A`: the tile | `B`: the tile |
//! | along the columns first | `B`: the tile transposed | `A`: the tile transposed |
//!
//! The 128-byte swizzle exclusive-ors the chunk with the row's place in eight,
//! so a step of 16 columns within a panel is another exclusive or.
//!
//! `ldmatrix` moves pairs of bytes, so a tile of 8-bit elements is read as one of
//! half as many columns. Its elements come four to a register and are widened
//! there, to `f16`: see [`TileReader::widened_a`] and [`TileReader::widened_b`].

use super::{CHUNK, FragmentA, FragmentB, ROW, check};
use crate::tile::TileLayout;
use crate::{Builder, Expression, Packed, Reg, SharedAddress, U32, Value};

/// In which order the four matrices of 16 x 16 elements are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixOrder {
    /// Down the rows first: operands are the tile as it lies.
    RowsFirst,
    /// Along the columns first: operands are the tile transposed.
    ColumnsFirst,
}

/// How the lanes of a warp address the rows of matrices, as bytes from the
/// corner of 16 x 16 elements of a tile.
#[derive(Clone, Copy, Debug)]
pub struct MatrixLanes {
    order: MatrixOrder,
    offset: Reg<U32>,
}

impl MatrixLanes {
    /// Matrices down the rows first.
    #[track_caller]
    pub fn rows_first(k: &mut Builder, lane: Reg<U32>) -> Self {
        let (row, chunk) = (k.eval(lane % 16), k.eval(lane / 16));
        let offset = k.eval(row * ROW + (chunk ^ (lane % 8)) * CHUNK);
        MatrixLanes { order: MatrixOrder::RowsFirst, offset }
    }

    /// Matrices along the columns first.
    #[track_caller]
    pub fn columns_first(k: &mut Builder, lane: Reg<U32>) -> Self {
        let (row, chunk) = (k.eval(lane / 16 * 8 + lane % 8), k.eval(lane / 8 % 2));
        let offset = k.eval(row * ROW + (chunk ^ (lane % 8)) * CHUNK);
        MatrixLanes { order: MatrixOrder::ColumnsFirst, offset }
    }
}

/// The same with an offset for each step of 16 columns within a panel: four
/// registers that are kept, for three exclusive ors that a loop over many small
/// tiles would do at each.
#[derive(Clone, Copy, Debug)]
pub struct SteppedLanes {
    order: MatrixOrder,
    offsets: [Reg<U32>; 4],
}

impl SteppedLanes {
    /// Matrices down the rows first.
    #[track_caller]
    pub fn rows_first(k: &mut Builder, lane: Reg<U32>) -> Self {
        let MatrixLanes { order, offset } = MatrixLanes::rows_first(k, lane);
        SteppedLanes::from(k, order, offset)
    }

    /// Matrices along the columns first.
    #[track_caller]
    pub fn columns_first(k: &mut Builder, lane: Reg<U32>) -> Self {
        let row = k.eval(lane / 16 * 8 + lane % 8);
        let chunk = k.eval((lane / 8 % 2) ^ (lane % 8));
        let first = k.eval(row * ROW + chunk * CHUNK);
        SteppedLanes::from(k, MatrixOrder::ColumnsFirst, first)
    }

    /// The same from a row of the tile on, a multiple of 8.
    #[track_caller]
    pub fn rows_down(self, k: &mut Builder, row: impl Into<Value<U32>>) -> Self {
        let first = k.eval(self.offsets[0] + row.into() * ROW);
        SteppedLanes::from(k, self.order, first)
    }

    /// The same a step further for each of `step`, no more than 3: only steps that are multiples of
    /// a power of two above it are asked for then.
    #[track_caller]
    pub fn steps_on(self, k: &mut Builder, step: impl Into<Value<U32>>) -> Self {
        let first = k.eval(self.offsets[0] ^ (step.into() * (2 * CHUNK)));
        SteppedLanes::from(k, self.order, first)
    }

    #[track_caller]
    fn from(k: &mut Builder, order: MatrixOrder, first: Reg<U32>) -> Self {
        let mut offsets = [first; 4];
        for (step, offset) in (0u32..).zip(&mut offsets) {
            *offset = k.eval(first ^ (2 * CHUNK * step));
        }
        SteppedLanes { order, offsets }
    }
}

/// A tile that a warp reads 16 rows by 32 bytes at a time, 16 columns of 16 bits.
/// `row` below is the first of the rows, a multiple of 8, and `step` is the first
/// byte of each in thirty-twos.
#[derive(Clone, Debug)]
pub struct TileReader {
    layout: TileLayout,
    order: MatrixOrder,
    /// The lane's address for each step of a panel.
    steps: Vec<Reg<SharedAddress>>,
}

impl TileReader {
    /// Reads the tile at an address, a multiple of 1024.
    #[track_caller]
    pub fn new(
        k: &mut Builder,
        layout: TileLayout,
        tile: Reg<SharedAddress>,
        lanes: MatrixLanes,
    ) -> Self {
        check(k, layout);
        let first = k.eval(tile + lanes.offset);
        let mut steps = vec![first];
        for step in 1..used_steps(layout) {
            let moved = first.reinterpret::<U32>() ^ (2 * CHUNK * step);
            steps.push(k.eval(moved.reinterpret::<SharedAddress>()));
        }
        TileReader { layout, order: lanes.order, steps }
    }

    /// The same by lanes that have an offset for each step.
    #[track_caller]
    pub fn stepped(
        k: &mut Builder,
        layout: TileLayout,
        tile: Reg<SharedAddress>,
        lanes: SteppedLanes,
    ) -> Self {
        check(k, layout);
        let mut steps = Vec::new();
        for offset in lanes.offsets.into_iter().take(used_steps(layout) as usize) {
            steps.push(k.eval(tile + offset));
        }
        TileReader { layout, order: lanes.order, steps }
    }

    /// Steps that its columns take.
    pub fn steps(&self) -> u32 {
        self.layout.columns.saturating_mul(self.layout.element.bytes()).div_ceil(2 * CHUNK)
    }

    /// The address of the 16 bytes that the lane gives to `ldmatrix`.
    ///
    /// # Panics
    ///
    /// If the panels of the tile are narrower than `step`.
    pub fn address(&self, row: u32, step: u32) -> Value<SharedAddress> {
        self.steps[step as usize % 4] + self.offset(row, step)
    }

    fn offset(&self, row: u32, step: u32) -> u32 {
        let panel = (step / 4).saturating_mul(self.layout.panel_bytes());
        panel.saturating_add(row.saturating_mul(ROW))
    }

    /// The matrices of an operand.
    #[track_caller]
    fn load<const N: usize>(
        &self,
        k: &mut Builder,
        (row, step): (u32, u32),
        transpose: bool,
    ) -> [Packed; N] {
        let first = step as usize % 4;
        if first >= self.steps.len() {
            k.misuse(format!("column {} of a tile of {}", 16 * first, self.layout.columns));
        }
        let address = self.steps[first.min(self.steps.len() - 1)] + self.offset(row, step);
        k.load_matrix_packed(self.layout.element, address, transpose)
    }

    /// A first operand: 16 x 16 elements of the tile, or of it transposed.
    #[track_caller]
    pub fn a(&self, k: &mut Builder, row: u32, step: u32) -> FragmentA {
        FragmentA(self.load(k, (row, step), self.order == MatrixOrder::ColumnsFirst))
    }

    /// Two second operands side by side: 16 x 16 elements of the tile, or of it
    /// transposed.
    #[track_caller]
    pub fn b(&self, k: &mut Builder, row: u32, step: u32) -> [FragmentB; 2] {
        let [a, b, c, d] = self.load(k, (row, step), self.order == MatrixOrder::RowsFirst);
        [FragmentB([a, b]), FragmentB([c, d])]
    }

    /// First operands out of 16 rows by 32 columns of 8-bit elements, transposed and
    /// widened to `f16`: of the first 16 columns and of the others. Row `i` of an
    /// operand is column `2 * i`, row `8 + i` is the next.
    #[track_caller]
    pub fn widened_a(&self, k: &mut Builder, row: u32, step: u32) -> [FragmentA; 2] {
        self.check_widened(k);
        let matrices: [Packed; 4] = self.load(k, (row, step), true);
        // Registers have two columns of a row, then the same of the next row.
        let [a, b, c, d] = matrices.map(|four| k.widen(four, [0, 2, 1, 3]));
        [FragmentA([a[0], a[1], c[0], c[1]]), FragmentA([b[0], b[1], d[0], d[1]])]
    }

    /// Second operands out of 16 rows by 32 columns of 8-bit elements, transposed and
    /// widened to `f16`: by 16 columns, and by 8 rows. Rows `2 * i` and `8 + 2 * i` of
    /// an operand are columns `4 * i` and `4 * i + 2`, each with the next; the first
    /// operand must have its columns in this order.
    #[track_caller]
    pub fn widened_b(&self, k: &mut Builder, row: u32, step: u32) -> [[FragmentB; 2]; 2] {
        self.check_widened(k);
        let matrices: [Packed; 4] = self.load(k, (row, step), false);
        let [a, b, c, d] = matrices.map(|four| FragmentB(k.widen(four, [0, 1, 2, 3])));
        [[a, c], [b, d]]
    }

    #[track_caller]
    fn check_widened(&self, k: &mut Builder) {
        if self.layout.element.bytes() != 1 || self.order != MatrixOrder::ColumnsFirst {
            k.misuse("widened operands are transposed, of elements of 8 bits");
        }
    }

    /// Only the first of the two.
    #[track_caller]
    pub fn first_b(&self, k: &mut Builder, row: u32, step: u32) -> FragmentB {
        FragmentB(self.load(k, (row, step), self.order == MatrixOrder::RowsFirst))
    }
}

/// Steps of 32 bytes that a panel of the tile has.
fn used_steps(layout: TileLayout) -> u32 {
    layout.columns.saturating_mul(layout.element.bytes()).div_ceil(2 * CHUNK).clamp(1, 4)
}
