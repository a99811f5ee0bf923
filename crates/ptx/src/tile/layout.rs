//! How a matrix lies in shared memory, and how TMA brings it there.

use crate::Element;

/// How 16-byte chunks are permuted inside a shared-memory panel, so that both
/// the copy engine and the tensor cores reach them without bank conflicts.
///
/// A panel row is as wide as the swizzle; within each group of eight rows,
/// the chunk index is exclusive-ored with (part of) the row index.
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

    /// The width of a panel row in bytes.
    pub const fn width(self) -> u32 {
        match self {
            Swizzle::None => 16,
            Swizzle::B32 => 32,
            Swizzle::B64 => 64,
            Swizzle::B128 => 128,
        }
    }
}

/// The part of a global tensor that one TMA instruction copies: what a tensor
/// map must be encoded with to fit the tile that receives it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorBox {
    /// The element of the tensor and of the tile.
    pub element: Element,
    /// The swizzle the copy engine applies in shared memory.
    pub swizzle: Swizzle,
    /// The extent of the box in elements, fastest-moving dimension first.
    pub extent: Vec<u32>,
}

/// How a matrix of `rows` by `columns` elements lies in shared memory.
///
/// Rows are contiguous in the tensor; in shared memory the matrix is cut into
/// *panels* as wide as the swizzle, each holding all rows one after another.
/// That is what TMA writes, a panel a box, and what `wgmma` reads:
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
    /// The element.
    pub element: Element,
    /// How many rows.
    pub rows: u32,
    /// How many columns, along which the tensor is contiguous.
    pub columns: u32,
    /// The permutation, and with it the width of a panel.
    pub swizzle: Swizzle,
}

impl TileLayout {
    /// A layout with the widest swizzle that divides the row.
    pub fn widest(element: Element, rows: u32, columns: u32) -> Self {
        let row_bytes = columns.saturating_mul(element.bytes());
        let widest = Swizzle::ALL.into_iter().rev().find(|s| row_bytes.is_multiple_of(s.width()));
        TileLayout { element, rows, columns, swizzle: widest.unwrap_or(Swizzle::None) }
    }

    /// Columns in a panel.
    pub const fn panel_columns(&self) -> u32 {
        self.swizzle.width() / self.element.bytes()
    }

    /// How many panels; the last may have columns that nobody uses.
    pub const fn panels(&self) -> u32 {
        self.columns.div_ceil(self.panel_columns())
    }

    /// Bytes from one panel to the next; `u32::MAX` where they are more.
    pub const fn panel_bytes(&self) -> u32 {
        self.rows.saturating_mul(self.swizzle.width())
    }

    /// Bytes of the whole tile; `u32::MAX`, which no shared memory has, where
    /// they are more.
    pub const fn bytes(&self) -> u32 {
        self.panels().saturating_mul(self.panel_bytes())
    }

    /// What the tile's address must be a multiple of: the swizzle's pattern of
    /// eight rows, and 128 bytes for TMA.
    pub const fn alignment(&self) -> u32 {
        let pattern = 8 * self.swizzle.width();
        if pattern > 128 { pattern } else { 128 }
    }

    /// The byte of the tile at which an element starts.
    ///
    /// The swizzle exclusive-ors the bits of the chunk index with the address
    /// bits from 128 bytes upwards.
    pub const fn byte_of(&self, row: u32, column: u32) -> u32 {
        let panel = column / self.panel_columns();
        let within = column % self.panel_columns() * self.element.bytes();
        let panel = panel.saturating_mul(self.panel_bytes());
        let row = row.saturating_mul(self.swizzle.width());
        let linear = panel.saturating_add(row).saturating_add(within);
        linear ^ ((linear >> 3) & self.swizzle.chunk_mask())
    }

    /// The box of one panel, for a tensor of `rank` dimensions of which the
    /// first two are the columns and rows of the tile. The validator takes ranks
    /// from 1 to 5.
    pub fn tensor_box(&self, rank: usize) -> TensorBox {
        // No more than it takes to be refused.
        let mut extent = vec![1; rank.min(6)];
        for (extent, own) in extent.iter_mut().zip([self.panel_columns(), self.rows]) {
            *extent = own;
        }
        TensorBox { element: self.element, swizzle: self.swizzle, extent }
    }
}

impl Swizzle {
    /// The address bits that select a chunk within a panel row.
    pub const fn chunk_mask(self) -> u32 {
        self.width() - 16
    }

    /// The code in a shared-memory descriptor (bits 62 and 63).
    pub const fn descriptor_code(self) -> u64 {
        match self {
            Swizzle::None => 0,
            Swizzle::B128 => 1,
            Swizzle::B64 => 2,
            Swizzle::B32 => 3,
        }
    }
}
