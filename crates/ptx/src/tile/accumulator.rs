//! Accumulators and `A` operands of `wgmma`, in the registers of a warpgroup.

use super::SharedTile;
use crate::{Builder, Element, F32, Instruction, PackedFp8, Reg, Register, U32, Value};

/// The result of a `wgmma`: 64 rows by `columns` of `f32`, spread over the
/// 128 threads of a warpgroup.
///
/// Warp `w` owns rows `16w .. 16w + 16`. In each group `j` of eight columns, lane `l` holds the two
/// elements from column `8j + 2 * (l % 4)` on in row `l / 4` of the warp's rows, then the same two
/// columns in row `l / 4 + 8`: four registers per group, in this order.
#[derive(Debug)]
pub struct Accumulator {
    pub(crate) registers: Vec<Reg<F32>>,
    columns: u32,
}

/// The position of a thread's elements in an accumulator.
#[derive(Clone, Copy, Debug)]
pub struct Position {
    /// The first of the thread's two rows; the second is 8 rows below.
    pub row: Reg<U32>,
    /// The thread's first column in each group of eight.
    pub column: Reg<U32>,
}

impl Accumulator {
    /// Creates an accumulator, not yet written, of 8 to 256 columns in multiples of 8.
    #[track_caller]
    pub fn new(k: &mut Builder, columns: u32) -> Self {
        if !columns.is_multiple_of(8) || !(8..=256).contains(&columns) {
            k.misuse(format!("an accumulator of {columns} columns: not 8 to 256 in eights"));
        }
        let registers = columns.clamp(8, 256) / 8 * 4;
        Accumulator { registers: (0..registers).map(|_| k.register()).collect(), columns }
    }

    /// Creates an accumulator of zeros.
    #[track_caller]
    pub fn zeros(k: &mut Builder, columns: u32) -> Self {
        let accumulator = Accumulator::new(k, columns);
        for register in &accumulator.registers {
            k.set(*register, 0.0);
        }
        accumulator
    }

    /// Returns an accumulator over the registers of the first `columns` columns.
    pub fn narrowed(&self, columns: u32) -> Accumulator {
        let registers = self.registers.iter().copied().take(columns as usize / 2).collect();
        Accumulator { registers, columns }
    }

    /// Returns the number of columns.
    pub fn columns(&self) -> u32 {
        self.columns
    }

    /// Returns the thread's elements, in register order.
    pub fn registers(&self) -> &[Reg<F32>] {
        &self.registers
    }

    /// Returns the one of the thread's two rows that register `index` belongs to: 0, or 1 for the
    /// row 8 below.
    pub const fn row_of(index: usize) -> usize {
        index % 4 / 2
    }

    /// Returns the column of register `index`, relative to the thread's first column.
    pub const fn column_of(index: usize) -> u32 {
        (8 * (index / 4) + index % 2) as u32
    }

    /// Returns the position of a thread's elements, given its index in the warpgroup.
    #[track_caller]
    pub fn position(k: &mut Builder, thread: impl Into<Value<U32>>) -> Position {
        let thread = k.eval(thread);
        let lane = k.eval(thread % 32);
        let row = k.eval(thread / 32 * 16 + lane / 4);
        let column = k.eval(lane % 4 * 2);
        Position { row, column }
    }
}

/// An upper bound on the columns of an operand in registers: a thread has only 255 registers.
const MAX_COLUMNS: u32 = 1024;

/// An `A` operand in registers: 64 rows by a multiple of 16 columns of 16-bit elements (32 of 8-bit
/// ones), four registers for each such step.
///
/// 16-bit elements lie as in an [`Accumulator`]: two neighbouring columns in one register, groups
/// of eight columns one after the other. Of 8-bit elements a register holds four neighbours: lane
/// `l` holds those from column `4 * (l % 4)` on of each group of sixteen.
#[derive(Clone, Debug)]
pub struct Fragment {
    pub(crate) element: Element,
    pub(crate) registers: Vec<Register>,
}

impl Fragment {
    /// Creates a fragment of `columns` columns, not yet written.
    #[track_caller]
    pub fn new(k: &mut Builder, element: Element, columns: u32) -> Self {
        if columns > MAX_COLUMNS {
            k.misuse(format!("an operand of {columns} columns in registers"));
        }
        let count = columns.min(MAX_COLUMNS) * element.bytes() / 8;
        let registers = (0..count).map(|_| k.register_of(element.packed())).collect();
        Fragment { element, registers }
    }

    /// Rounds two neighbouring elements into register `index`.
    #[track_caller]
    pub fn set_pair(&self, k: &mut Builder, index: usize, low: Reg<F32>, high: Reg<F32>) {
        let Some(&dst) = self.registers.get(index) else {
            return k.misuse(format!("register {index} of {}", self.registers.len()));
        };
        k.push(Instruction::ConvertPair { dst, high: high.into(), low: low.into() });
    }

    /// Packs two pairs of 8-bit elements, four neighbours, into register `index`.
    #[track_caller]
    pub fn set_four<T: PackedFp8>(&self, k: &mut Builder, index: usize, pairs: [Reg<T>; 2]) {
        let Some(&dst) = self.registers.get(index).filter(|_| self.element == T::ELEMENT) else {
            let (element, count) = (self.element, self.registers.len());
            return k.misuse(format!("{} into register {index} of {count} {element}", T::ELEMENT));
        };
        let [low, high] = pairs.map(|pair| pair.register.into());
        k.push(Instruction::Join { dst, low, high });
    }

    /// Rounds elements in the register order of an accumulator into all registers.
    #[track_caller]
    pub fn round(&self, k: &mut Builder, elements: &[Reg<F32>]) {
        for (index, pair) in elements.chunks_exact(2).enumerate() {
            self.set_pair(k, index, pair[0], pair[1]);
        }
    }

    /// Copies another fragment of the same shape into this one.
    #[track_caller]
    pub fn set(&self, k: &mut Builder, other: &Fragment) {
        for (dst, src) in self.registers.iter().zip(&other.registers) {
            k.push(Instruction::Move { dst: *dst, src: (*src).into() });
        }
    }

    /// Returns the number of columns, which is the inner (K) extent of a product.
    pub fn columns(&self) -> u32 {
        self.registers.len() as u32 / 4 * (32 / self.element.bytes())
    }

    /// Stores the fragment's 64 rows of 16-bit elements into the first columns of a tile by
    /// `stmatrix`; `warp` is the warp's index in the warpgroup. Columns are stored 16 at a time,
    /// and a last group of eight by itself.
    #[track_caller]
    pub fn store(&self, k: &mut Builder, tile: &SharedTile, warp: impl Into<Value<U32>>) {
        if self.element.bytes() != 2 || self.element != tile.layout.element {
            k.misuse(format!("{} stored to a tile of {}", self.element, tile.layout.element));
        }
        let row = k.eval(warp.into() * 16);
        let addresses = tile.fragment_addresses(k, row, self.registers.len().div_ceil(4));
        for (address, registers) in addresses.into_iter().zip(self.registers.chunks(4)) {
            let src = registers.to_vec();
            k.push(Instruction::StoreMatrix { src, address, transpose: false });
        }
    }

    /// Loads 64 rows of a tile by `ldmatrix`; `warp` is the warp's index in the warpgroup.
    #[track_caller]
    pub fn load(k: &mut Builder, tile: &SharedTile, warp: impl Into<Value<U32>>) -> Self {
        let element = tile.layout.element;
        if element.bytes() != 2 {
            k.misuse(format!("fragments of {element} cannot be loaded by ldmatrix"));
        }
        let fragment = Fragment::new(k, element, tile.columns);
        fragment.load_into(k, tile, warp);
        fragment
    }

    /// Loads 64 rows of a tile into the registers of this fragment.
    #[track_caller]
    pub fn load_into(&self, k: &mut Builder, tile: &SharedTile, warp: impl Into<Value<U32>>) {
        let row = k.eval(warp.into() * 16);
        let addresses = tile.fragment_addresses(k, row, self.registers.len().div_ceil(4));
        for (address, registers) in addresses.into_iter().zip(self.registers.chunks(4)) {
            let dst = registers.to_vec();
            k.push(Instruction::LoadMatrix { dst, address, transpose: false });
        }
    }
}
