//! The 8-bit element types.

use bytemuck::{Pod, Zeroable};
use ptx::Float8;

/// Defines an 8-bit element type from its format.
macro_rules! number {
    ($(#[$about:meta])* $name:ident, $format:expr) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, Pod, Zeroable)]
        #[repr(transparent)]
        pub struct $name(u8);

        impl $name {
            /// Rounds to the nearest value, ties to even; values out of range saturate, as in the
            /// GPU's conversions.
            #[inline(always)]
            pub const fn from_f32(value: f32) -> Self {
                $name($format.encode(value))
            }

            /// Returns the value, exactly.
            #[inline(always)]
            pub const fn to_f32(self) -> f32 {
                $format.decode(self.0)
            }

            /// Returns the number with these bits.
            pub const fn from_bits(bits: u8) -> Self {
                $name(bits)
            }

            /// Returns the bits.
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// Tells whether it is neither infinite nor NaN.
            pub const fn is_finite(self) -> bool {
                self.to_f32().is_finite()
            }

            /// Tells whether it is NaN.
            pub const fn is_nan(self) -> bool {
                self.to_f32().is_nan()
            }
        }
    };
}

number! {
    /// An 8-bit float with 4 exponent bits and 3 mantissa bits, without infinities
    /// (`float8_e4m3fn`).
    ///
    /// ```
    /// use flashcore::E4M3;
    ///
    /// assert_eq!(E4M3::from_f32(17.1).to_f32(), 18.0);
    /// assert_eq!(E4M3::from_f32(1e9).to_f32(), 448.0);
    /// ```
    E4M3, Float8::E4M3
}

number! {
    /// An 8-bit float with 5 exponent bits and 2 mantissa bits (`float8_e5m2`).
    E5M2, Float8::E5M2
}

number! {
    /// A signed 8-bit integer; rounding saturates at -127 and 127.
    ///
    /// ```
    /// use flashcore::Int8;
    ///
    /// assert_eq!(Int8::from_f32(17.5).to_f32(), 18.0);
    /// assert_eq!(Int8::from_f32(-1e9).to_f32(), -127.0);
    /// assert_eq!(Int8::from_bits(0x80).to_f32(), -128.0);
    /// ```
    Int8, ptx::Int8
}
