//! The number types in which the backward pass is computed, and the roundings in between.

use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul, Sub};

use flashcore::DType;

/// A number type: f64 for the reference, f32 for the baseline.
pub(super) trait Number:
    Copy
    + Send
    + Sync
    + Default
    + From<f32>
    + Into<f64>
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + AddAssign
    + Sum
{
    /// Returns the nearest number of this type.
    fn nearest(value: f64) -> Self;

    /// Returns e to the power of this number.
    fn exp(self) -> Self {
        Self::nearest(self.into().exp())
    }
}

impl Number for f64 {
    fn nearest(value: f64) -> Self {
        value
    }
}

impl Number for f32 {
    fn nearest(value: f64) -> Self {
        value as f32
    }
}

/// The rounding of intermediate matrices between two products, and of the results.
#[derive(Debug, Clone, Copy)]
pub(super) enum Rounding {
    /// No rounding.
    None,
    /// Rounding to this element type.
    To(DType),
}

impl Rounding {
    /// Returns a number as it is stored.
    pub(super) fn store<T: Number>(self, value: T) -> T {
        match self {
            Rounding::None => value,
            Rounding::To(dtype) => T::nearest(dtype.round(value.into())),
        }
    }

    /// Returns a number as it is stored between two products. A number beyond f16's range stays
    /// unrounded: an infinite one would turn a row into NaN, and a baseline of NaN measures
    /// nothing.
    pub(super) fn between<T: Number>(self, value: T) -> T {
        let stored = self.store(value);
        if stored.into().is_infinite() { value } else { stored }
    }
}

/// Computes `to += factor * from`.
pub(super) fn add_multiple<T: Number>(to: &mut [T], factor: T, from: &[T]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * *from;
    }
}

/// Returns the Euclidean norm of a vector.
pub(super) fn norm<T: Number>(vector: &[T]) -> f64 {
    let square = |value: &T| -> f64 { (*value * *value).into() };
    vector.iter().map(square).sum::<f64>().sqrt()
}

/// Returns the largest magnitude in a vector.
pub(super) fn largest<T: Number>(vector: &[T]) -> f64 {
    vector.iter().map(|value| (*value).into().abs()).fold(0.0, f64::max)
}
