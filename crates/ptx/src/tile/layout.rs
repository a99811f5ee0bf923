//! Layouts of matrices in shared memory, and the boxes with which TMA fills them.

use crate::Element;

/// The permutation of 16-byte chunks inside a shared-memory panel, with which both the copy engine
/// and the tensor cores access it without bank conflicts.
///
/// A panel row is as wide as the swizzle; within each group of eight rows, the chunk index is
/// exclusive-ored with (part of) the row index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Swizzle {
    /// No permutation; panel rows are 16 bytes wide.
    None,
    /// Panel rows of 32 bytes.
    B32,
    /// Panel rows of 64 bytes.
    B64,
    /// Panel rows of 128 bytes.
    B128,
}

impl Swizzle {
    /// Every swizzle, narrowest first.
    pub const ALL: [Swizzle; 4] = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128];

    /// Returns the width of a panel row in bytes.
    pub const fn width(self) -> u32 {
        match self {
            Swizzle::None => 16,
            Swizzle::B32 => 32,
            Swizzle::B64 => 64,
            Swizzle::B128 => 128,
        }
    }
}

/// The box of a global tensor that one TMA instruction copies. The tensor map must be encoded with
/// it to match the tile that receives the data.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorBox {
    /// The element type of the tensor and of the tile.
    pub element: Element,
    /// The swizzle the copy engine applies in shared memory.
    pub swizzle: Swizzle,
    /// The extent of the box in elements, fastest-moving dimension first.
    pub extent: Vec<u32>,
}

/// The layout of a matrix of `rows` by `columns` elements in shared memory.
///
/// Rows are contiguous in the tensor; in shared memory the matrix is cut into *panels* as wide as
/// the swizzle, each holding all rows one after another. That is what TMA writes, one box per
/// panel, and what `wgmma` reads:
///
/// ```text
///            panel 0          panel 1
///          <- width ->      <- width ->
///   row 0  |         |      |         |
///   row 1  |         |      |         |    16-byte chunks inside a row
///    ...   |         |      |         |    permuted by the swizzle
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileLayout {
    /// The element type.
    pub element: Element,
    /// The number of rows.
    pub rows: u32,
    /// The number of columns; the tensor is contiguous along them.
    pub columns: u32,
    /// The swizzle, which also determines the width of a panel.
    pub swizzle: Swizzle,
}

impl TileLayout {
    /// Returns a layout with the widest swizzle that divides the row.
    pub fn widest(element: Element, rows: u32, columns: u32) -> Self {
        let row_bytes = columns.saturating_mul(element.bytes());
        let widest = Swizzle::ALL.into_iter().rev().find(|s| row_bytes.is_multiple_of(s.width()));
        TileLayout { element, rows, columns, swizzle: widest.unwrap_or(Swizzle::None) }
    }

    /// Returns the number of columns in a panel.
    pub const fn panel_columns(&self) -> u32 {
        self.swizzle.width() / self.element.bytes()
    }

    /// Returns the number of panels; the last may have unused columns.
    pub const fn panels(&self) -> u32 {
        self.columns.div_ceil(self.panel_columns())
    }

    /// Returns the distance in bytes from one panel to the next, saturated at `u32::MAX`.
    pub const fn panel_bytes(&self) -> u32 {
        self.rows.saturating_mul(self.swizzle.width())
    }

    /// Returns the size of the whole tile in bytes, saturated at `u32::MAX`, which exceeds any
    /// shared memory.
    pub const fn bytes(&self) -> u32 {
        self.panels().saturating_mul(self.panel_bytes())
    }

    /// Returns the alignment of the tile's address in bytes: the eight rows after which the swizzle
    /// repeats, and at least 128 bytes for TMA.
    pub const fn alignment(&self) -> u32 {
        let pattern = 8 * self.swizzle.width();
        if pattern > 128 { pattern } else { 128 }
    }

    /// Returns the offset in bytes of an element from the start of the tile.
    ///
    /// The swizzle exclusive-ors the bits of the chunk index with the address bits from bit 7 (128
    /// bytes) upwards.
    pub const fn byte_of(&self, row: u32, column: u32) -> u32 {
        let panel = column / self.panel_columns();
        let within = column % self.panel_columns() * self.element.bytes();
        let panel = panel.saturating_mul(self.panel_bytes());
        let row = row.saturating_mul(self.swizzle.width());
        let linear = panel.saturating_add(row).saturating_add(within);
        linear ^ ((linear >> 3) & self.swizzle.chunk_mask())
    }

    /// Returns the box of one panel, for a tensor of `rank` dimensions of which the first two are
    /// the columns and rows of the tile. The validator accepts ranks from 1 to 5.
    pub fn tensor_box(&self, rank: usize) -> TensorBox {
        // Six dimensions are enough for the validator to refuse the rank.
        let mut extent = vec![1; rank.min(6)];
        for (extent, own) in extent.iter_mut().zip([self.panel_columns(), self.rows]) {
            *extent = own;
        }
        TensorBox { element: self.element, swizzle: self.swizzle, extent }
    }
}

impl Swizzle {
    /// Returns a mask of the address bits that select a chunk within a panel row.
    pub const fn chunk_mask(self) -> u32 {
        self.width() - 16
    }

    /// Returns the code of the swizzle in a shared-memory descriptor (bits 62 and 63).
    pub const fn descriptor_code(self) -> u64 {
        match self {
            Swizzle::None => 0,
            Swizzle::B128 => 1,
            Swizzle::B64 => 2,
            Swizzle::B32 => 3,
        }
    }
}
