//! Matrices of sums in the registers of one warp.

use super::in_registers;
use crate::tile::Position;
use crate::{Builder, Element, F16x2, F32, Reg, Register, U32, Value};

/// The accumulator of one `mma.sync`: 16 rows by 8 columns of `f32` over the
/// lanes of a warp.
///
/// Lane `l` holds the two elements from column `2 * (l % 4)` on in row `l / 4`,
/// then the same two columns in the row 8 below.
#[derive(Clone, Copy, Debug)]
pub struct MmaCell(pub(crate) [Reg<F32>; 4]);

impl MmaCell {
    /// The thread's elements, in register order.
    pub fn registers(self) -> [Reg<F32>; 4] {
        self.0
    }

    /// The two neighbours of one of the thread's two rows: 0, or 1 for the one
    /// 8 below.
    pub fn pair(self, half: usize) -> [Reg<F32>; 2] {
        [self.0[2 * half], self.0[2 * half + 1]]
    }
}

/// What an `mma.sync` adds to and writes.
#[derive(Clone, Copy, Debug)]
pub enum MmaSum {
    /// Sums in `f32`.
    F32(MmaCell),
    /// Sums in `f16`: the two neighbours of the thread's first row, and of its second.
    F16([Reg<F16x2>; 2]),
}

impl From<MmaCell> for MmaSum {
    fn from(cell: MmaCell) -> Self {
        MmaSum::F32(cell)
    }
}

impl MmaSum {
    /// `zero`, which holds one, as every element of a sum to begin with.
    pub fn from_zero(zero: Reg<F32>) -> Self {
        MmaSum::F32(MmaCell([zero; 4]))
    }

    pub(super) fn element(self) -> Element {
        match self {
            MmaSum::F32(_) => Element::F32,
            MmaSum::F16(_) => Element::F16,
        }
    }

    pub(super) fn registers(self) -> Vec<Register> {
        match self {
            MmaSum::F32(cell) => cell.0.map(Reg::register).to_vec(),
            MmaSum::F16(pairs) => pairs.map(Reg::register).to_vec(),
        }
    }
}

/// A matrix of `f32` in the registers of a warp: cells of 16 rows by 8 columns,
/// by tile of rows and by group of columns.
///
/// A thread has two rows of each tile; its rows count through the tiles.
#[derive(Clone, Debug)]
pub struct WarpAccumulator {
    /// By tile, then by group.
    cells: Vec<MmaCell>,
    groups: usize,
}

impl WarpAccumulator {
    /// Registers for a matrix, not yet written. Rows go in sixteens, columns in
    /// eights.
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

    /// A matrix of zeros.
    #[track_caller]
    pub fn zeros(k: &mut Builder, rows: u32, columns: u32) -> Self {
        let accumulator = WarpAccumulator::new(k, rows, columns);
        accumulator.clear(k);
        accumulator
    }

    /// Makes every element zero.
    #[track_caller]
    pub fn clear(&self, k: &mut Builder) {
        for cell in &self.cells {
            for element in cell.0 {
                k.set(element, 0.0);
            }
        }
    }

    /// Tiles of 16 rows.
    pub fn tiles(&self) -> usize {
        self.cells.len() / self.groups
    }

    /// Groups of 8 columns.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// How many rows each thread has elements of.
    pub fn thread_rows(&self) -> usize {
        2 * self.tiles()
    }

    /// The cell of a tile of rows and a group of columns.
    ///
    /// # Panics
    ///
    /// If there is no such cell.
    pub fn cell(&self, tile: usize, group: usize) -> MmaCell {
        self.cells[tile * self.groups + group]
    }

    /// The cells, each with its tile and its group; tiles move fastest, as
    /// products do that share what was loaded of a second operand.
    pub fn cells(&self) -> impl Iterator<Item = (usize, usize, MmaCell)> {
        (0..self.groups).flat_map(move |group| {
            (0..self.tiles()).map(move |tile| (tile, group, self.cell(tile, group)))
        })
    }

    /// The thread's elements of one of its rows, two neighbours of each group.
    pub fn pairs(&self, row: usize) -> impl Iterator<Item = [Reg<F32>; 2]> {
        (0..self.groups).map(move |group| self.cell(row / 2, group).pair(row % 2))
    }

    /// The thread's elements of one of its rows.
    pub fn row(&self, row: usize) -> impl Iterator<Item = Reg<F32>> {
        self.pairs(row).flatten()
    }

    /// How many rows below the thread's first its row `row` lies.
    pub const fn row_offset(row: usize) -> u32 {
        8 * row as u32
    }

    /// How many columns right of the thread's first column an element of
    /// [`row`](WarpAccumulator::row) lies, by its index there.
    pub const fn column_of(index: usize) -> u32 {
        (8 * (index / 2) + index % 2) as u32
    }

    /// Where a lane stands: its first row and its first column.
    #[track_caller]
    pub fn position(k: &mut Builder, lane: impl Into<Value<U32>>) -> Position {
        let lane = k.eval(lane);
        Position { row: k.eval(lane / 4), column: k.eval(lane % 4 * 2) }
    }
}
