//! The tile vocabulary: matrices in shared memory and in registers, products
//! of them, and the pipelines that move them.
//!
//! The layout arithmetic (panels, swizzles, descriptors, fragments, phases) is
//! written here once; a kernel names tiles and reads like its algorithm. What is
//! in this folder is of a warpgroup, by `wgmma` and TMA; `warp/` is of one warp,
//! by `mma.sync` and `cp.async`.

mod accumulator;
mod layout;
mod matrix;
mod pipeline;
mod shared;
mod warp;

pub use accumulator::{Accumulator, Fragment, Position};
pub use layout::{Swizzle, TensorBox, TileLayout};
pub use matrix::{InFlight, Matrix, MatrixA, Prepared};
pub use pipeline::{Barriers, Consumer, Pipeline, Producer};
pub use shared::{SharedTile, SharedTiles};
pub use warp::{
    ChunkPlace, FragmentA, FragmentB, MatrixLanes, MatrixOrder, MmaCell, MmaSum, RowCopies,
    SteppedLanes, TileReader, TileRing, TileWriter, WarpAccumulator, WarpFragment,
};
