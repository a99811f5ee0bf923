//! Operands of `mma.sync` loaded from swizzled tiles, by `ldmatrix`.
//!
//! `ldmatrix` loads four 8 x 8 matrices; each lane gives the address of one row. The order of the
//! four matrices in a 16 x 16 block, and whether each is transposed, determine which operand they
//! become:
//!
//! | matrices | as they are | each transposed |
//! | --- | --- | --- |
//! | down the rows first | `A`: the tile | `B`: the tile |
//! | along the columns first | `B`: the tile transposed | `A`: the tile transposed |
//!
//! The 128-byte swizzle exclusive-ors the chunk index with the row index modulo 8, so that a step
//! of 16 columns within a panel is another exclusive or.
//!
//! `ldmatrix` moves units of 16 bits, so a tile of 8-bit elements is read as one of half as many
//! columns. Its elements arrive four to a register and are widened to `f16` there: see
//! [`TileReader::widened_a`] and [`TileReader::widened_b`].

use super::{CHUNK, FragmentA, FragmentB, ROW, check};
use crate::tile::TileLayout;
use crate::{Builder, Expression, Packed, Reg, SharedAddress, U32, Value};

/// The order in which `ldmatrix` takes the four 8 x 8 matrices of a 16 x 16 block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixOrder {
    /// Down the rows first: the operand is the tile, not transposed.
    RowsFirst,
    /// Along the columns first: the operand is the tile transposed.
    ColumnsFirst,
}

/// The row that each lane of a warp addresses in `ldmatrix`, as an offset in bytes from the corner
/// of a 16 x 16 block of a tile.
#[derive(Clone, Copy, Debug)]
pub struct MatrixLanes {
    order: MatrixOrder,
    offset: Reg<U32>,
}

impl MatrixLanes {
    /// Creates the offsets for [`MatrixOrder::RowsFirst`].
    #[track_caller]
    pub fn rows_first(k: &mut Builder, lane: Reg<U32>) -> Self {
        let (row, chunk) = (k.eval(lane % 16), k.eval(lane / 16));
        let offset = k.eval(row * ROW + (chunk ^ (lane % 8)) * CHUNK);
        MatrixLanes { order: MatrixOrder::RowsFirst, offset }
    }

    /// Creates the offsets for [`MatrixOrder::ColumnsFirst`].
    #[track_caller]
    pub fn columns_first(k: &mut Builder, lane: Reg<U32>) -> Self {
        let (row, chunk) = (k.eval(lane / 16 * 8 + lane % 8), k.eval(lane / 8 % 2));
        let offset = k.eval(row * ROW + (chunk ^ (lane % 8)) * CHUNK);
        MatrixLanes { order: MatrixOrder::ColumnsFirst, offset }
    }
}

/// [`MatrixLanes`] with a separate offset for each of the four steps of 16 columns within a panel.
/// It keeps four registers, and saves the three exclusive ors that a loop over many small tiles
/// would repeat for each tile.
#[derive(Clone, Copy, Debug)]
pub struct SteppedLanes {
    order: MatrixOrder,
    offsets: [Reg<U32>; 4],
}

impl SteppedLanes {
    /// Creates the offsets for [`MatrixOrder::RowsFirst`].
    #[track_caller]
    pub fn rows_first(k: &mut Builder, lane: Reg<U32>) -> Self {
        let MatrixLanes { order, offset } = MatrixLanes::rows_first(k, lane);
        SteppedLanes::from(k, order, offset)
    }

    /// Creates the offsets for [`MatrixOrder::ColumnsFirst`].
    #[track_caller]
    pub fn columns_first(k: &mut Builder, lane: Reg<U32>) -> Self {
        let row = k.eval(lane / 16 * 8 + lane % 8);
        let chunk = k.eval((lane / 8 % 2) ^ (lane % 8));
        let first = k.eval(row * ROW + chunk * CHUNK);
        SteppedLanes::from(k, MatrixOrder::ColumnsFirst, first)
    }

    /// Returns the lanes moved `row` rows down the tile; `row` is a multiple of 8.
    #[track_caller]
    pub fn rows_down(self, k: &mut Builder, row: impl Into<Value<U32>>) -> Self {
        let first = k.eval(self.offsets[0] + row.into() * ROW);
        SteppedLanes::from(k, self.order, first)
    }

    /// Returns the lanes moved `step` steps of 16 columns to the right; `step` is at most 3. The
    /// move is an exclusive or, so only steps that are multiples of a power of two above `step` may
    /// be read afterwards.
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

/// A tile that a warp reads in blocks of 16 rows by 32 bytes, that is 16 columns of 16-bit
/// elements. In the methods below, `row` is the block's first row, a multiple of 8, and `step` is
/// its first byte divided by 32.
#[derive(Clone, Debug)]
pub struct TileReader {
    layout: TileLayout,
    order: MatrixOrder,
    /// The address of the lane for each step of a panel.
    steps: Vec<Reg<SharedAddress>>,
}

impl TileReader {
    /// Creates a reader of the tile at an address, a multiple of 1024.
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

    /// Creates a reader of the tile at an address, with lanes that have an offset for each step.
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

    /// Returns the number of steps that the columns of the tile take.
    pub fn steps(&self) -> u32 {
        self.layout.columns.saturating_mul(self.layout.element.bytes()).div_ceil(2 * CHUNK)
    }

    /// Returns the address of the 16 bytes that the lane passes to `ldmatrix`.
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

    /// Loads the matrices of an operand.
    #[track_caller]
    fn load<const N: usize>(
        &self,
        k: &mut Builder,
        (row, step): (u32, u32),
        transpose: bool,
    ) -> [Packed; N] {
        if !row.is_multiple_of(8) {
            // The swizzle of the first row would be taken for that of this one.
            k.misuse(format!("a block from row {row} of a tile on: not a multiple of 8"));
        }
        let first = step as usize % 4;
        if first >= self.steps.len() {
            k.misuse(format!("column {} of a tile of {}", 16 * first, self.layout.columns));
        }
        let address = self.steps[first.min(self.steps.len() - 1)] + self.offset(row, step);
        k.load_matrix_packed(self.layout.element, address, transpose)
    }

    /// Loads an `A` operand: 16 x 16 elements of the tile, or of the tile transposed.
    #[track_caller]
    pub fn a(&self, k: &mut Builder, row: u32, step: u32) -> FragmentA {
        FragmentA(self.load(k, (row, step), self.order == MatrixOrder::ColumnsFirst))
    }

    /// Loads two neighbouring `B` operands: 16 x 16 elements of the tile, or of the tile
    /// transposed.
    #[track_caller]
    pub fn b(&self, k: &mut Builder, row: u32, step: u32) -> [FragmentB; 2] {
        let [a, b, c, d] = self.load(k, (row, step), self.order == MatrixOrder::RowsFirst);
        [FragmentB([a, b]), FragmentB([c, d])]
    }

    /// Loads `A` operands from 16 rows by 32 columns of 8-bit elements, transposed and widened to
    /// `f16`: one for the first 16 columns and one for the others. Row `i` of an operand is column
    /// `2 * i`, row `8 + i` is column `2 * i + 1`.
    #[track_caller]
    pub fn widened_a(&self, k: &mut Builder, row: u32, step: u32) -> [FragmentA; 2] {
        self.check_widened(k);
        let matrices: [Packed; 4] = self.load(k, (row, step), true);
        // A register holds two columns of one row, then the same two columns of the next row.
        let [a, b, c, d] = matrices.map(|four| k.widen(four, [0, 2, 1, 3]));
        [FragmentA([a[0], a[1], c[0], c[1]]), FragmentA([b[0], b[1], d[0], d[1]])]
    }

    /// Loads `B` operands from 16 rows by 32 columns of 8-bit elements, transposed and widened to
    /// `f16`, indexed by 16 columns and then by 8 rows. Row `2 * i` of an operand is column
    /// `4 * i`, row `8 + 2 * i` is column `4 * i + 2`, and the row after each is the column after
    /// it; the `A` operand must have its columns in the same order.
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

    /// Loads only the first of the two operands that [`b`](TileReader::b) loads.
    #[track_caller]
    pub fn first_b(&self, k: &mut Builder, row: u32, step: u32) -> FragmentB {
        FragmentB(self.load(k, (row, step), self.order == MatrixOrder::RowsFirst))
    }
}

/// Returns the number of 32-byte steps that are used in a panel of the tile.
fn used_steps(layout: TileLayout) -> u32 {
    layout.columns.saturating_mul(layout.element.bytes()).div_ceil(2 * CHUNK).clamp(1, 4)
}
