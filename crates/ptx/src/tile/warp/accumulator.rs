//! Accumulators of `mma.sync`, in the registers of one warp.

use super::in_registers;
use crate::tile::Position;
use crate::{Builder, Element, F16x2, F32, Reg, Register, U32, Value};

/// The accumulator of one `mma.sync`: 16 rows by 8 columns of `f32`, spread over the lanes of a
/// warp.
///
/// Lane `l` holds the two elements from column `2 * (l % 4)` on in row `l / 4`, then the same two
/// columns in the row 8 below.
#[derive(Clone, Copy, Debug)]
pub struct MmaCell(pub(crate) [Reg<F32>; 4]);

impl MmaCell {
    /// Returns the thread's elements, in register order.
    pub fn registers(self) -> [Reg<F32>; 4] {
        self.0
    }

    /// Returns the two neighbouring elements in one of the thread's two rows: 0, or 1 for the row 8
    /// below.
    pub fn pair(self, half: usize) -> [Reg<F32>; 2] {
        [self.0[2 * half], self.0[2 * half + 1]]
    }
}

/// The registers that an `mma.sync` accumulates from or into.
#[derive(Clone, Copy, Debug)]
pub enum MmaAccumulator {
    /// `f32` accumulation.
    F32(MmaCell),
    /// `f16` accumulation: the two neighbouring elements of the thread's first row, and those of
    /// its second.
    F16([Reg<F16x2>; 2]),
}

impl From<MmaCell> for MmaAccumulator {
    fn from(cell: MmaCell) -> Self {
        MmaAccumulator::F32(cell)
    }
}

impl MmaAccumulator {
    /// Returns an initial accumulator of zeros whose four elements are all the register `zero`,
    /// which holds 0.
    pub fn from_zero(zero: Reg<F32>) -> Self {
        MmaAccumulator::F32(MmaCell([zero; 4]))
    }

    pub(super) fn element(self) -> Element {
        match self {
            MmaAccumulator::F32(_) => Element::F32,
            MmaAccumulator::F16(_) => Element::F16,
        }
    }

    pub(super) fn registers(self) -> Vec<Register> {
        match self {
            MmaAccumulator::F32(cell) => cell.0.map(Reg::register).to_vec(),
            MmaAccumulator::F16(pairs) => pairs.map(Reg::register).to_vec(),
        }
    }
}

/// A matrix of `f32` in the registers of a warp, made of cells of 16 rows by 8 columns. A tile is
/// 16 rows, a group 8 columns.
///
/// A thread holds elements of two rows of each tile; the `row` arguments below number a thread's
/// rows through all tiles.
#[derive(Clone, Debug)]
pub struct WarpAccumulator {
    /// The cells, ordered by tile, then by group.
    cells: Vec<MmaCell>,
    groups: usize,
}

impl WarpAccumulator {
    /// Creates a matrix, not yet written. Rows are a multiple of 16, columns of 8.
    #[track_caller]
    pub fn new(k: &mut Builder, rows: u32, columns: u32) -> Self {
        if !rows.is_multiple_of(16) || !columns.is_multiple_of(8) || rows == 0 || columns == 0 {
            k.misuse(format!("{rows} x {columns} is not made of cells of 16 x 8"));
        }
        let [rows, columns] = in_registers(k, rows, columns);
        let groups = (columns / 8).max(1) as usize;
        let count = (rows / 16).max(1) as usize * groups;
        let cell = |k: &mut Builder| MmaCell(std::array::from_fn(|_| k.register()));
        WarpAccumulator { cells: (0..count).map(|_| cell(k)).collect(), groups }
    }

    /// Creates a matrix of zeros.
    #[track_caller]
    pub fn zeros(k: &mut Builder, rows: u32, columns: u32) -> Self {
        let accumulator = WarpAccumulator::new(k, rows, columns);
        accumulator.clear(k);
        accumulator
    }

    /// Sets every element to zero.
    #[track_caller]
    pub fn clear(&self, k: &mut Builder) {
        for cell in &self.cells {
            for element in cell.0 {
                k.set(element, 0.0);
            }
        }
    }

    /// Returns the number of tiles of 16 rows.
    pub fn tiles(&self) -> usize {
        self.cells.len() / self.groups
    }

    /// Returns the number of groups of 8 columns.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Returns the number of rows that each thread has elements of.
    pub fn thread_rows(&self) -> usize {
        2 * self.tiles()
    }

    /// Returns the cell of a tile of rows and a group of columns.
    ///
    /// # Panics
    ///
    /// If there is no such cell.
    pub fn cell(&self, tile: usize, group: usize) -> MmaCell {
        self.cells[tile * self.groups + group]
    }

    /// Returns the cells, each with its tile and its group. Tiles vary fastest, so that consecutive
    /// products reuse the same `B` operand.
    pub fn cells(&self) -> impl Iterator<Item = (usize, usize, MmaCell)> {
        (0..self.groups).flat_map(move |group| {
            (0..self.tiles()).map(move |tile| (tile, group, self.cell(tile, group)))
        })
    }

    /// Returns the thread's elements of one of its rows, two neighbours per group.
    pub fn pairs(&self, row: usize) -> impl Iterator<Item = [Reg<F32>; 2]> {
        (0..self.groups).map(move |group| self.cell(row / 2, group).pair(row % 2))
    }

    /// Returns the thread's elements of one of its rows.
    pub fn row(&self, row: usize) -> impl Iterator<Item = Reg<F32>> {
        self.pairs(row).flatten()
    }

    /// Returns how many rows below the thread's first row its row `row` lies.
    pub const fn row_offset(row: usize) -> u32 {
        8 * row as u32
    }

    /// Returns how many columns to the right of the thread's first column an element of
    /// [`row`](WarpAccumulator::row) lies, by its index there.
    pub const fn column_of(index: usize) -> u32 {
        (8 * (index / 2) + index % 2) as u32
    }

    /// Returns the position of a lane's first element: its row and its column.
    #[track_caller]
    pub fn position(k: &mut Builder, lane: impl Into<Value<U32>>) -> Position {
        let lane = k.eval(lane);
        Position { row: k.eval(lane / 4), column: k.eval(lane % 4 * 2) }
    }
}
