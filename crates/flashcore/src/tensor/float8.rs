//! The 8-bit numbers that tensors store.

use bytemuck::{Pod, Zeroable};
use ptx::Float8;

/// 8-bit numbers are alike but for their format.
macro_rules! number {
    ($(#[$about:meta])* $name:ident, $format:expr) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, Pod, Zeroable)]
        #[repr(transparent)]
        pub struct $name(u8);

        impl $name {
            /// The nearest number, ties to even; what is too large becomes the largest, as the
            /// GPU's conversions have it.
            #[inline(always)]
            pub const fn from_f32(value: f32) -> Self {
                $name($format.encode(value))
            }

            /// The number, exactly.
            #[inline(always)]
            pub const fn to_f32(self) -> f32 {
                $format.decode(self.0)
            }

            /// What the bits stand for.
            pub const fn from_bits(bits: u8) -> Self {
                $name(bits)
            }

            /// Its bits.
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// Whether it is neither infinite nor NaN.
            pub const fn is_finite(self) -> bool {
                self.to_f32().is_finite()
            }

            /// Whether it is NaN.
            pub const fn is_nan(self) -> bool {
                self.to_f32().is_nan()
            }
        }
    };
}

number! {
    /// A float of 4 exponent bits and 3 of mantissa, without infinities (`float8_e4m3fn`).
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
    /// A float of 5 exponent bits and 2 of mantissa (`float8_e5m2`).
    E5M2, Float8::E5M2
}

number! {
    /// An integer with a sign, rounded to -127 to 127.
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
