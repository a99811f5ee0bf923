//! The tile layer for single warps: `ldmatrix`, `mma.sync` and `cp.async`, from Ampere on.
//!
//! One `mma.sync` multiplies 16 x 8 x 16. Its accumulator is a [`MmaCell`]; a [`WarpAccumulator`]
//! is a matrix of such cells. Its operands are a [`FragmentA`] and a [`FragmentB`], which a
//! [`TileReader`] loads from a swizzled tile; a [`WarpFragment`], a rounded accumulator, also gives
//! [`FragmentA`]s. [`RowCopies`] copy rows of a tensor into a tile, and a [`TileWriter`] stores a
//! warp's rounded results into one.
//!
//! ```
//! use flashcore_ptx::*;
//!
//! /// d = a * b^T for two 16 x 16 tiles of bf16, by one warp.
//! fn multiply() -> Result<Program, ValidationError> {
//!     let mut k = Builder::new("multiply", Target::SM_80, 32);
//!     let [a, b, d] = ["a", "b", "d"].map(|name| k.parameter::<GlobalAddress>(name));
//!     let layout =
//!         TileLayout { element: Element::BF16, rows: 16, columns: 16, swizzle: Swizzle::B128 };
//!     let tiles = TileRing::new(&mut k, "tiles", layout, 2);
//!
//!     // Eight lanes have a row, of which two have a chunk: four rows at a time.
//!     let lane = k.lane();
//!     let copies = RowCopies::new(layout, 16);
//!     let part = ChunkPlace::of(&mut k, lane);
//!     for (index, tensor) in [a, b].into_iter().enumerate() {
//!         for first in (0..16).step_by(4) {
//!             let row = k.eval(part.row + first);
//!             let to = copies.target(&mut k, tiles.at(index as u32), ChunkPlace { row, ..part });
//!             let from = k.eval(tensor + (row * 32 + part.chunk * 16).convert::<U64>());
//!             copies.copy(&mut k, part, (to, 0), from, None);
//!         }
//!     }
//!     k.copy_async_commit();
//!     k.copy_async_wait(0);
//!     k.warp_sync();
//!
//!     let rows = MatrixLanes::rows_first(&mut k, lane);
//!     let columns = MatrixLanes::columns_first(&mut k, lane);
//!     let a = TileReader::new(&mut k, layout, tiles.at(0), rows).a(&mut k, 0, 0);
//!     let b = TileReader::new(&mut k, layout, tiles.at(1), columns).b(&mut k, 0, 0);
//!     let sums = WarpAccumulator::zeros(&mut k, 16, 16);
//!     for (group, b) in b.into_iter().enumerate() {
//!         let cell = sums.cell(0, group);
//!         k.mma(cell, a, b, cell);
//!     }
//!
//!     let position = WarpAccumulator::position(&mut k, lane);
//!     let first = k.eval(position.row * 16 + position.column);
//!     let mine = k.eval(d + first.convert::<U64>() * 4);
//!     for row in 0..2 {
//!         for (group, pair) in sums.pairs(row).enumerate() {
//!             k.store_vector(mine + (8 * row * 64 + 32 * group), &pair, StoreHint::default());
//!         }
//!     }
//!     k.finish()
//! }
//!
//! let text = print(&multiply()?);
//! assert!(text.contains("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"));
//! # Ok::<(), ValidationError>(())
//! ```

mod accumulator;
mod copies;
mod fragment;
mod reader;
mod writer;

pub use accumulator::{MmaAccumulator, MmaCell, WarpAccumulator};
pub use copies::{ChunkPlace, RowCopies, TileRing};
pub use fragment::{FragmentA, FragmentB, WarpFragment};
pub use reader::{MatrixLanes, MatrixOrder, SteppedLanes, TileReader};
pub use writer::TileWriter;

use super::{Swizzle, TileLayout};
use crate::{Builder, Packed};

/// The bytes of a panel row: all 32 banks, so that neither copies nor `ldmatrix` have bank
/// conflicts.
const ROW: u32 = Swizzle::B128.width();

/// The bytes of a chunk, the unit of the swizzle, of `ldmatrix` and of `cp.async`.
const CHUNK: u32 = 16;

/// The number of chunks in a panel row.
const PANEL_CHUNKS: u32 = ROW / CHUNK;

/// Returns the number of columns in a chunk.
const fn chunk_columns(layout: TileLayout) -> u32 {
    CHUNK / layout.element.bytes()
}

/// Returns the sizes of a matrix that fits into the registers of a warp. For one that does not,
/// reports a misuse and returns small sizes: what is built of them is refused anyway and should
/// stay small.
#[track_caller]
fn in_registers(k: &mut Builder, rows: u32, columns: u32) -> [u32; 2] {
    // Each register holds 32 elements across the warp, and a lane has 255 registers.
    if u64::from(rows) * u64::from(columns) <= 32 * 1024 {
        return [rows, columns];
    }
    k.misuse(format!("{rows} x {columns} elements do not fit the registers of a warp"));
    [16, 16]
}

/// Reports a misuse unless the layout is one that this module handles: 16-bit elements, or 8-bit
/// ones that are widened when they are read, with the 128-byte swizzle.
#[track_caller]
fn check(k: &mut Builder, layout: TileLayout) {
    if layout.swizzle != Swizzle::B128 || layout.element.bytes() > 2 {
        k.misuse(format!(
            "a warp's tile has elements of 8 or 16 bits and the 128-byte swizzle, not {} and {:?}",
            layout.element, layout.swizzle
        ));
    }
}
