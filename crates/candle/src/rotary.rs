//! Rotary embeddings of new keys.

use candle_core::Tensor;

/// A rotary embedding: pairs of columns of a new key are rotated by angles that depend on its
/// position. The first `2 * pairs` columns are rotated, where `pairs` is the width of the tables.
#[derive(Debug, Clone)]
pub struct Rotary {
    /// Cosines, (positions, pairs), of the keys' type and on their device.
    pub cosines: Tensor,
    /// Sines, of the shape of the cosines.
    pub sines: Tensor,
    /// Whether adjacent columns form a pair; otherwise the first column of each pair is in the
    /// first half of the rotated columns, and the second in the second half.
    pub interleaved: bool,
}
