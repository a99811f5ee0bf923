//! Operands of `mma.sync` in registers, and the instruction itself.

use super::{MmaAccumulator, TileWriter, WarpAccumulator, in_registers};
use crate::{Builder, Element, F32, Instruction, MmaShape, Packed, Reg, SharedAddress, Value};

/// The `A` operand of a product: 16 rows by 16 columns of 16-bit elements.
///
/// The four registers hold two neighbouring columns each: of row `lane / 4`, of the row 8 below,
/// and of the same two rows 8 columns further right.
#[derive(Clone, Copy, Debug)]
pub struct FragmentA(pub [Packed; 4]);

/// The `B` operand of a product: 16 rows by 8 columns of 16-bit elements.
///
/// The first register holds rows `2 * (lane % 4)` and the next of column `lane / 4`, the second the
/// rows 8 below.
#[derive(Clone, Copy, Debug)]
pub struct FragmentB(pub [Packed; 2]);

impl FragmentA {
    /// Loads an operand that lies in shared memory in fragment order: 512 bytes, of which `address`
    /// is that of the lane's 16.
    #[track_caller]
    pub fn load(
        k: &mut Builder,
        element: Element,
        address: impl Into<Value<SharedAddress>>,
    ) -> Self {
        FragmentA(k.load_matrix_packed(element, address, false))
    }
}

/// A matrix of 16-bit elements in the registers of a warp, in the layout of the
/// [`WarpAccumulator`](super::WarpAccumulator) it was rounded from: by tile of 16 rows, by group of
/// 8 columns, two neighbouring elements of the thread's first row and two of its second.
///
/// The layout is also that of the `A` operand of a product over its columns, so nothing goes
/// through shared memory.
#[derive(Clone, Debug)]
pub struct WarpFragment {
    /// The register pairs, ordered by tile, then by group.
    pairs: Vec<[Packed; 2]>,
    groups: usize,
}

impl WarpFragment {
    /// Creates a matrix, not yet written. Rows are a multiple of 16, columns of 8; an operand of a
    /// product takes 16 columns.
    #[track_caller]
    pub fn new(k: &mut Builder, element: Element, rows: u32, columns: u32) -> Self {
        if !rows.is_multiple_of(16) || !columns.is_multiple_of(8) {
            k.misuse(format!("{rows} x {columns} is not made of cells of 16 x 8"));
        }
        let [rows, columns] = in_registers(k, rows, columns);
        let groups = (columns / 8) as usize;
        let count = (rows / 16) as usize * groups;
        let pair = |k: &mut Builder| std::array::from_fn(|_| k.packed(element));
        WarpFragment { pairs: (0..count).map(|_| pair(k)).collect(), groups }
    }

    /// Rounds two neighbouring elements into a group of columns of one of the thread's rows, which
    /// are numbered through all tiles.
    #[track_caller]
    pub fn set_pair(&self, k: &mut Builder, row: usize, group: usize, pair: [Reg<F32>; 2]) {
        match self.pairs.get(row / 2 * self.groups + group) {
            Some(pairs) => k.pack_into(pairs[row % 2], pair[0], pair[1]),
            None => k.misuse(format!("row {row} and group {group} of a smaller operand")),
        }
    }

    /// Rounds a whole matrix of the same size.
    #[track_caller]
    pub fn round(&self, k: &mut Builder, matrix: &WarpAccumulator) {
        for (tile, group, cell) in matrix.cells() {
            for half in 0..2 {
                self.set_pair(k, 2 * tile + half, group, cell.pair(half));
            }
        }
    }

    /// Stores the matrix into a tile; its first column goes to the writer's group `group` of 8
    /// columns.
    #[track_caller]
    pub fn store(&self, k: &mut Builder, to: &TileWriter, group: u32) {
        for (index, pairs) in self.pairs.iter().enumerate() {
            let (tile, column) = (index / self.groups, index % self.groups);
            for (half, pair) in pairs.iter().enumerate() {
                to.store(k, (16 * tile + 8 * half) as u32, group + column as u32, *pair);
            }
        }
    }

    /// Returns the `A` operand of a product over the 16 columns from `16 * step` on.
    ///
    /// # Panics
    ///
    /// If the matrix has no such tile or columns.
    pub fn a(&self, tile: usize, step: usize) -> FragmentA {
        let first = tile * self.groups + 2 * step;
        let [top, bottom] = self.pairs[first];
        let [top_right, bottom_right] = self.pairs[first + 1];
        FragmentA([top, bottom, top_right, bottom_right])
    }
}

impl Builder {
    /// Issues `d = a * b + c` of shape 16 x 8 x 16. All lanes of a warp call this.
    #[track_caller]
    pub fn mma(
        &mut self,
        d: impl Into<MmaAccumulator>,
        a: FragmentA,
        b: FragmentB,
        c: impl Into<MmaAccumulator>,
    ) {
        let (d, c) = (d.into(), c.into());
        let (element, accumulator) = (a.0[0].element(), d.element());
        if c.element() != accumulator || b.0[0].element() != element {
            self.misuse("a product of different elements, or added up in different ones");
        }
        self.push(Instruction::Mma {
            shape: MmaShape::M16N8K16,
            element,
            accumulator,
            d: d.registers(),
            a: a.0.map(Packed::register).to_vec(),
            b: b.0.map(Packed::register).to_vec(),
            c: c.registers(),
        });
    }
}
