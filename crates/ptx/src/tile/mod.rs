//! The tile layer: matrices in shared memory and in registers, products of them, and the pipelines
//! that move them.
//!
//! The layout arithmetic (panels, swizzles, descriptors, fragments, phases) is written here once,
//! so that a kernel names tiles and reads like its algorithm. The files of this folder are for
//! warpgroups, with `wgmma` and TMA; those of `warp/` are for single warps, with `mma.sync` and
//! `cp.async`.

mod accumulator;
mod layout;
mod matrix;
mod pipeline;
mod shared;
mod warp;

pub use accumulator::{Accumulator, Fragment, Position};
pub use layout::{Swizzle, TensorBox, TileLayout};
pub use matrix::{InFlight, Matrix, MatrixA, PreparedProduct};
pub use pipeline::{Consumer, Mbarriers, Pipeline, Producer};
pub use shared::{SharedTile, SharedTiles};
pub use warp::{
    ChunkPlace, FragmentA, FragmentB, MatrixLanes, MatrixOrder, MmaAccumulator, MmaCell, RowCopies,
    SteppedLanes, TileReader, TileRing, TileWriter, WarpAccumulator, WarpFragment,
};
