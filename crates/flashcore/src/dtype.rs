//! The element types of tensors.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};
use ptx::{Float8, Int8};
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
    /// 8-bit float: 4 significant bits, largest value 448, no infinity (`float8_e4m3fn`).
    E4M3,
    /// 8-bit float: 3 significant bits, largest value 57344 (`float8_e5m2`).
    E5M2,
    /// 8-bit integer, for keys and values. Values are rounded to -127 to 127, NaN to 0.
    Int8,
}

impl DType {
    /// Returns the corresponding element type of the kernel language.
    pub const fn element(self) -> ptx::Element {
        match self {
            DType::F32 => ptx::Element::F32,
            DType::F16 => ptx::Element::F16,
            DType::BF16 => ptx::Element::BF16,
            DType::E4M3 => ptx::Element::E4M3,
            DType::E5M2 => ptx::Element::E5M2,
            DType::Int8 => ptx::Element::Int8,
        }
    }

    /// Every type, widest first.
    pub const ALL: [DType; 6] =
        [DType::F32, DType::F16, DType::BF16, DType::E4M3, DType::E5M2, DType::Int8];

    /// The types that outputs and gradients may have.
    pub const WIDE: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    /// Tells whether this is one of the 8-bit types, which may have descale factors.
    pub fn is_8_bit(self) -> bool {
        self.bytes() == 1
    }

    /// Returns the size of one element in bytes.
    pub fn bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::E4M3 | DType::E5M2 | DType::Int8 => 1,
        }
    }

    /// Returns the distance from 1 to the next larger value.
    pub fn epsilon(self) -> f64 {
        match self {
            DType::F32 => f64::from(f32::EPSILON),
            DType::F16 => f16::EPSILON.to_f64(),
            DType::BF16 => bf16::EPSILON.to_f64(),
            DType::E4M3 => 0.125,
            DType::E5M2 => 0.25,
            DType::Int8 => 1.0,
        }
    }

    /// Returns the largest finite value.
    pub fn max(self) -> f64 {
        match self {
            DType::F32 => f64::from(f32::MAX),
            DType::F16 => f16::MAX.to_f64(),
            DType::BF16 => bf16::MAX.to_f64(),
            DType::E4M3 => 448.0,
            DType::E5M2 => 57344.0,
            DType::Int8 => f64::from(Int8::LARGEST),
        }
    }

    /// Rounds to the nearest value of this type, ties to even. Values beyond [`DType::max`] become
    /// infinite, or the largest value in 8-bit types.
    pub fn round(self, value: f64) -> f64 {
        match self {
            DType::F32 => f64::from(value as f32),
            DType::F16 => f16::from_f64(value).to_f64(),
            DType::BF16 => bf16::from_f64(value).to_f64(),
            DType::E4M3 => round_to(Float8::E4M3, value),
            DType::E5M2 => round_to(Float8::E5M2, value),
            DType::Int8 if value.is_nan() => 0.0,
            DType::Int8 => value.clamp(-self.max(), self.max()).round_ties_even(),
        }
    }
}

/// Rounds to the nearest value of an 8-bit format. The intermediate f32 is rounded to odd, so that
/// the two roundings give the same result as a single one.
fn round_to(format: Float8, value: f64) -> f64 {
    let near = value as f32;
    let exact = f64::from(near) == value || !near.is_finite();
    let beyond = f64::from(near).abs() > value.abs();
    let odd = if exact { near } else { f32::from_bits((near.to_bits() - u32::from(beyond)) | 1) };
    f64::from(format.decode(format.encode(odd)))
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::E4M3 => "e4m3",
            DType::E5M2 => "e5m2",
            DType::Int8 => "int8",
        })
    }
}

/// The name is not that of a [`DType`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no supported element type (f32, f16, bf16, e4m3, e5m2, int8)")]
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
    fn rounding_is_to_nearest_even_and_overflows_as_documented() {
        assert_eq!(DType::BF16.round(1.0 + 1.0 / 256.0), 1.0);
        assert_eq!(DType::BF16.round(1.0 + 3.0 / 256.0), 1.0 + 2.0 / 128.0);
        assert_eq!(DType::F16.round(65519.0), 65504.0);
        assert_eq!(DType::F16.round(65520.0), f64::INFINITY);
        assert!(DType::F32.round(f64::NAN).is_nan());
        assert_eq!(DType::E4M3.round(f64::INFINITY), 448.0);
        assert_eq!(DType::E5M2.round(-1e300), -57344.0);
        // 17 is a tie; 17 + 1e-12 is one only after rounding to f32.
        assert_eq!(DType::E4M3.round(17.0), 16.0);
        assert_eq!(DType::E4M3.round(17.0 + 1e-12), 18.0);
        assert_eq!(DType::E4M3.round(19.0 - 1e-12), 18.0);
        assert_eq!(DType::E4M3.round(1e-300), 0.0);
        let whole = [2.5, 3.5, -0.5, 126.5, 127.4, -128.0, f64::INFINITY, f64::NAN];
        let rounded = whole.map(|it| DType::Int8.round(it));
        assert_eq!(rounded, [2.0, 4.0, 0.0, 126.0, 127.0, -127.0, 127.0, 0.0]);
    }
}
