//! The element types of tensors.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};
use serde::Serialize;

/// The type of a tensor's elements.
///
/// ```
/// use flashcore::DType;
///
/// assert_eq!("bf16".parse(), Ok(DType::BF16));
/// assert_eq!(DType::F16.bytes(), 2);
/// assert_eq!(DType::F16.round(0.1), 0.0999755859375);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision: 11 significant bits, largest value 65504.
    F16,
    /// Brain float: 8 significant bits, the range of [`DType::F32`].
    BF16,
}

impl DType {
    /// What kernels are built for.
    pub const fn element(self) -> ptx::Element {
        match self {
            DType::F32 => ptx::Element::F32,
            DType::F16 => ptx::Element::F16,
            DType::BF16 => ptx::Element::BF16,
        }
    }

    /// Every type, widest first.
    pub const ALL: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    /// The size of one element.
    pub fn bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
        }
    }

    /// The distance from 1 to the next larger value.
    pub fn epsilon(self) -> f64 {
        match self {
            DType::F32 => f64::from(f32::EPSILON),
            DType::F16 => f16::EPSILON.to_f64(),
            DType::BF16 => bf16::EPSILON.to_f64(),
        }
    }

    /// The largest finite value.
    pub fn max(self) -> f64 {
        match self {
            DType::F32 => f64::from(f32::MAX),
            DType::F16 => f16::MAX.to_f64(),
            DType::BF16 => bf16::MAX.to_f64(),
        }
    }

    /// The nearest value of this type, ties to even; infinite beyond [`DType::max`].
    pub fn round(self, value: f64) -> f64 {
        match self {
            DType::F32 => f64::from(value as f32),
            DType::F16 => f16::from_f64(value).to_f64(),
            DType::BF16 => bf16::from_f64(value).to_f64(),
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
        })
    }
}

/// A name that is no [`DType`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no supported element type (f32, f16, bf16)")]
pub struct UnknownDType(String);

impl FromStr for DType {
    type Err = UnknownDType;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        DType::ALL
            .into_iter()
            .find(|dtype| dtype.to_string().eq_ignore_ascii_case(name))
            .ok_or_else(|| UnknownDType(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for dtype in DType::ALL {
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
        }
        assert!("f64".parse::<DType>().is_err());
    }

    #[test]
    fn rounding_is_to_nearest_even_and_overflows_to_infinity() {
        assert_eq!(DType::BF16.round(1.0 + 1.0 / 256.0), 1.0);
        assert_eq!(DType::BF16.round(1.0 + 3.0 / 256.0), 1.0 + 2.0 / 128.0);
        assert_eq!(DType::F16.round(65519.0), 65504.0);
        assert_eq!(DType::F16.round(65520.0), f64::INFINITY);
        assert!(DType::F32.round(f64::NAN).is_nan());
    }
}
