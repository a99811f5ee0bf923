//! Shapes, strides and layouts of (batch, length, heads, dim) tensors.

use std::fmt;

use serde::Serialize;

use super::TensorError;

/// The sizes of a tensor, in the order (batch, length, heads, dim).
///
/// ```
/// use flashcore::Shape;
///
/// let shape = Shape::new(2, 512, 8, 64);
/// assert_eq!(shape.to_string(), "[2, 512, 8, 64]");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(into = "[usize; 4]")]
pub struct Shape {
    /// Number of sequences.
    pub batch: usize,
    /// Number of positions per sequence.
    pub length: usize,
    /// Number of heads per position.
    pub heads: usize,
    /// Number of elements per vector.
    pub dim: usize,
}

impl Shape {
    /// Returns the shape `[batch, length, heads, dim]`.
    pub fn new(batch: usize, length: usize, heads: usize, dim: usize) -> Self {
        Shape { batch, length, heads, dim }
    }

    /// Returns the number of elements, or `None` if it does not fit a `usize`.
    pub fn elements(self) -> Option<usize> {
        if <[usize; 4]>::from(self).contains(&0) {
            return Some(0);
        }
        self.batch.checked_mul(self.length)?.checked_mul(self.heads)?.checked_mul(self.dim)
    }

    /// Returns the indices (batch, length, heads) of every vector, the last one fastest; none where
    /// vectors have no elements.
    pub(crate) fn vectors(self) -> impl Iterator<Item = [usize; 3]> {
        // With an empty dimension, walking over up to 2^64 batch entries would take forever.
        let batches = if self.elements() == Some(0) { 0 } else { self.batch };
        (0..batches).flat_map(move |batch| {
            (0..self.length)
                .flat_map(move |position| (0..self.heads).map(move |head| [batch, position, head]))
        })
    }
}

impl From<Shape> for [usize; 4] {
    fn from(shape: Shape) -> Self {
        [shape.batch, shape.length, shape.heads, shape.dim]
    }
}

impl From<[usize; 4]> for Shape {
    fn from([batch, length, heads, dim]: [usize; 4]) -> Self {
        Shape::new(batch, length, heads, dim)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&<[usize; 4]>::from(*self), f)
    }
}

/// Distances in elements between neighbours. The elements of a vector are always adjacent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
pub struct Strides {
    /// Distance between sequences.
    pub batch: usize,
    /// Distance between positions.
    pub length: usize,
    /// Distance between heads.
    pub heads: usize,
}

/// A shape with strides under which every element can be addressed.
///
/// ```
/// use flashcore::{Layout, Shape};
///
/// // The same logical shape over memory ordered (batch, heads, length, dim).
/// let layout = Layout::heads_first(Shape::new(1, 512, 8, 64))?;
/// assert_eq!(layout.offset(0, 1, 0), 64);
/// assert_eq!(layout.offset(0, 0, 1), 512 * 64);
/// # Ok::<(), flashcore::TensorError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct Layout {
    shape: Shape,
    strides: Strides,
    /// Number of elements from the first to one past the last.
    span: usize,
}

impl Layout {
    /// Returns the contiguous layout in the order of the shape.
    pub fn contiguous(shape: Shape) -> Result<Self, TensorError> {
        shape.elements().ok_or(TensorError::TooLarge(shape))?;
        let heads = shape.dim;
        let length = heads.saturating_mul(shape.heads);
        let batch = length.saturating_mul(shape.length);
        let strides = Strides { batch, length, heads };
        Layout::strided(shape, strides)
    }

    /// Returns the contiguous layout in the order (batch, heads, length, dim).
    pub fn heads_first(shape: Shape) -> Result<Self, TensorError> {
        shape.elements().ok_or(TensorError::TooLarge(shape))?;
        let length = shape.dim;
        let heads = length.saturating_mul(shape.length);
        let batch = heads.saturating_mul(shape.heads);
        let strides = Strides { batch, length, heads };
        Layout::strided(shape, strides)
    }

    /// Returns a layout with any strides: padding, slices of a larger tensor, broadcast (a stride
    /// of 0).
    pub fn strided(shape: Shape, strides: Strides) -> Result<Self, TensorError> {
        let span = if shape.elements() == Some(0) {
            0
        } else {
            let reach = |size: usize, stride: usize| (size - 1).checked_mul(stride);
            [
                reach(shape.batch, strides.batch),
                reach(shape.length, strides.length),
                reach(shape.heads, strides.heads),
            ]
            .into_iter()
            .try_fold(shape.dim, |span, reach| span.checked_add(reach?))
            .ok_or(TensorError::TooLarge(shape))?
        };
        Ok(Layout { shape, strides, span })
    }

    /// Returns the logical shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Returns the strides.
    pub fn strides(&self) -> Strides {
        self.strides
    }

    /// Returns the number of elements from the first to one past the last.
    pub fn span(&self) -> usize {
        self.span
    }

    /// Returns the offset of the vector of a batch entry, position and head, in elements.
    pub fn offset(&self, batch: usize, position: usize, head: usize) -> usize {
        batch * self.strides.batch + position * self.strides.length + head * self.strides.heads
    }
}
