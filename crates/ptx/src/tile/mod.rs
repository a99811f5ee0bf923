//! The tile vocabulary: matrices in shared memory and in registers, products
//! of them, and the pipelines that move them.
//!
//! The layout arithmetic of Hopper (panels, swizzles, descriptors, fragments,
//! phases) is written here once; a kernel names tiles and reads like its
//! algorithm.

mod accumulator;
mod layout;
mod matrix;
mod pipeline;
mod shared;

pub use accumulator::{Accumulator, Fragment, Position};
pub use layout::{Swizzle, TensorBox, TileLayout};
pub use matrix::{InFlight, Matrix, MatrixA};
pub use pipeline::{Barriers, Consumer, Pipeline, Producer};
pub use shared::{SharedTile, SharedTiles};
