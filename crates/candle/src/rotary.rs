//! Rotary embeddings.

use candle_core::Tensor;

/// Rotary embedding: pairs of columns of a new key are rotated by the angle that its position has.
/// Twice as many columns are rotated as the tables have, the first ones.
#[derive(Debug, Clone)]
pub struct Rotary {
    /// (positions, pairs), of the keys' type and on their device.
    pub cosines: Tensor,
    /// Of the shape of the cosines.
    pub sines: Tensor,
    /// Whether neighbours are pairs; else the first column of a pair is in the first half of those
    /// that are rotated, and the second in the second.
    pub interleaved: bool,
}
