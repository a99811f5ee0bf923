//! Matrices in the registers of a warpgroup.

use super::SharedTile;
use crate::{
    Builder, Element, F32, Instruction, PackedHalf, PackedSmall, Reg, Register, U32, Value,
};

/// The result of a `wgmma`: 64 rows by `columns` of `f32`, spread over the
/// 128 threads of a warpgroup.
///
/// Warp `w` owns rows `16w .. 16w + 16`. Lane `l` holds, of each group `j` of
/// eight columns, the two elements from column `8j + 2 * (l % 4)` in row
/// `l / 4` of the warp's, then the same two columns in row `l / 4 + 8`: four
/// registers a group, in this order.
#[derive(Debug)]
pub struct Accumulator {
    pub(crate) registers: Vec<Reg<F32>>,
    columns: u32,
}

/// Where in an accumulator a thread stands.
#[derive(Clone, Copy, Debug)]
pub struct Position {
    /// Its first row; the second is 8 below.
    pub row: Reg<U32>,
    /// Its first column in each group of eight.
    pub column: Reg<U32>,
}

impl Accumulator {
    /// Registers for an accumulator, not yet written. Columns are 8 to 256, in
    /// eights.
    #[track_caller]
    pub fn new(k: &mut Builder, columns: u32) -> Self {
        if !columns.is_multiple_of(8) || !(8..=256).contains(&columns) {
            k.misuse(format!("an accumulator of {columns} columns: not 8 to 256 in eights"));
        }
        let registers = columns.clamp(8, 256) / 8 * 4;
        Accumulator { registers: (0..registers).map(|_| k.register()).collect(), columns }
    }

    /// An accumulator of zeros.
    #[track_caller]
    pub fn zeros(k: &mut Builder, columns: u32) -> Self {
        let accumulator = Accumulator::new(k, columns);
        for register in &accumulator.registers {
            k.set(*register, 0.0);
        }
        accumulator
    }

    /// The same registers as an accumulator of the first columns only.
    pub fn narrowed(&self, columns: u32) -> Accumulator {
        let registers = self.registers.iter().copied().take(columns as usize / 2).collect();
        Accumulator { registers, columns }
    }

    /// How many columns the matrix has.
    pub fn columns(&self) -> u32 {
        self.columns
    }

    /// The thread's elements, in register order.
    pub fn registers(&self) -> &[Reg<F32>] {
        &self.registers
    }

    /// In which of the thread's two rows register `index` lies: 0, or 1 for
    /// the one 8 below.
    pub const fn row_of(index: usize) -> usize {
        index % 4 / 2
    }

    /// How many columns right of the thread's first column register `index` lies.
    pub const fn column_of(index: usize) -> u32 {
        (8 * (index / 4) + index % 2) as u32
    }

    /// Where the calling thread stands, given its index in the warpgroup.
    #[track_caller]
    pub fn position(k: &mut Builder, thread: impl Into<Value<U32>>) -> Position {
        let thread = k.eval(thread);
        let lane = k.eval(thread % 32);
        let row = k.eval(thread / 32 * 16 + lane / 4);
        let column = k.eval(lane % 4 * 2);
        Position { row, column }
    }

    /// The matrix rounded to 16-bit elements: as it stands, the `A` operand
    /// of a next product over these columns.
    #[track_caller]
    pub fn to_fragment<T: PackedHalf + crate::Pair>(&self, k: &mut Builder) -> Fragment {
        let registers =
            self.registers.chunks(2).map(|pair| k.pack::<T>(pair[0], pair[1]).register).collect();
        Fragment { element: T::ELEMENT, registers }
    }
}

/// More columns than an operand in registers ever has: a thread has 255 of them.
const MOST_COLUMNS: u32 = 1024;

/// An `A` operand in registers: 64 rows by some multiple of 16 columns of
/// 16-bit elements (32 of 8-bit ones), four registers for each such step.
///
/// The lanes hold 16-bit elements as an accumulator is held: two neighbouring
/// columns in one register, groups of eight columns one after the other. Of
/// 8-bit elements a register has four neighbours: lane `l` those from column
/// `4 * (l % 4)` of each group of sixteen.
#[derive(Clone, Debug)]
pub struct Fragment {
    pub(crate) element: Element,
    pub(crate) registers: Vec<Register>,
}

impl Fragment {
    /// Registers for `columns` columns, not yet written.
    #[track_caller]
    pub fn new(k: &mut Builder, element: Element, columns: u32) -> Self {
        if columns > MOST_COLUMNS {
            k.misuse(format!("an operand of {columns} columns in registers"));
        }
        let count = columns.min(MOST_COLUMNS) * element.bytes() / 8;
        let registers = (0..count).map(|_| k.register_of(element.packed())).collect();
        Fragment { element, registers }
    }

    /// The element.
    pub fn element(&self) -> Element {
        self.element
    }

    /// Rounds two neighbouring elements into register `index`.
    #[track_caller]
    pub fn set_pair(&self, k: &mut Builder, index: usize, low: Reg<F32>, high: Reg<F32>) {
        let Some(&dst) = self.registers.get(index) else {
            return k.misuse(format!("register {index} of {}", self.registers.len()));
        };
        k.push(Instruction::ConvertPair { dst, high: high.into(), low: low.into() });
    }

    /// Puts two pairs of 8-bit elements into register `index`: four neighbours.
    #[track_caller]
    pub fn set_four<T: PackedSmall>(&self, k: &mut Builder, index: usize, pairs: [Reg<T>; 2]) {
        let Some(&dst) = self.registers.get(index).filter(|_| self.element == T::ELEMENT) else {
            let (element, count) = (self.element, self.registers.len());
            return k.misuse(format!("{} into register {index} of {count} {element}", T::ELEMENT));
        };
        let [low, high] = pairs.map(|pair| pair.register.into());
        k.push(Instruction::Join { dst, low, high });
    }

    /// Rounds elements, as an accumulator holds them, into all registers.
    #[track_caller]
    pub fn round(&self, k: &mut Builder, elements: &[Reg<F32>]) {
        for (index, pair) in elements.chunks_exact(2).enumerate() {
            self.set_pair(k, index, pair[0], pair[1]);
        }
    }

    /// Copies another fragment of the same shape.
    #[track_caller]
    pub fn set(&self, k: &mut Builder, other: &Fragment) {
        for (dst, src) in self.registers.iter().zip(&other.registers) {
            k.push(Instruction::Move { dst: *dst, src: (*src).into() });
        }
    }

    /// The inner extent of the product.
    pub fn columns(&self) -> u32 {
        self.registers.len() as u32 / 4 * (32 / self.element.bytes())
    }

    /// Stores 64 rows by 16-bit elements into the first columns of a tile;
    /// `warp` is the warp's index in the warpgroup. Columns go in sixteens,
    /// the last eight by themselves if need be.
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

    /// Loads 64 rows of a tile; `warp` is the warp's index in the warpgroup.
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

    /// Loads 64 rows of a tile into these registers.
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
