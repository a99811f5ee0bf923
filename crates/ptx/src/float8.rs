//! Encoding and decoding of 8-bit numbers on the CPU: the `e4m3` and `e5m2` floats, and `int8`.
//!
//! Rounding is that of `cvt.rn.satfinite`: to nearest, ties to even, saturating at the largest
//! finite number. The results do not depend on whether the processor flushes subnormals.

/// An 8-bit float format: a sign, an exponent, and a number of mantissa bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Float8 {
    mantissa: u32,
    bias: u32,
    /// The bits of the largest finite number.
    largest: u32,
    /// The lowest bits, without the sign, that encode infinity or NaN.
    special: u32,
}

/// The bits of NaN in both formats.
pub const FLOAT8_NAN: u8 = 0x7F;

impl Float8 {
    /// 4 exponent bits and 3 of mantissa, without infinities: 448 is the largest number.
    pub const E4M3: Float8 = Float8 { mantissa: 3, bias: 7, largest: 0x7E, special: 0x7F };
    /// 5 exponent bits and 2 of mantissa, the upper half of an f16: 57344 is the largest number.
    pub const E5M2: Float8 = Float8 { mantissa: 2, bias: 15, largest: 0x7B, special: 0x7C };

    /// Returns the bits of the nearest number. Numbers that are too large, infinity included,
    /// become the largest finite number.
    ///
    /// ```
    /// use flashcore_ptx::Float8;
    ///
    /// assert_eq!(Float8::E4M3.decode(Float8::E4M3.encode(17.1)), 18.0);
    /// assert_eq!(Float8::E4M3.decode(Float8::E4M3.encode(-1e9)), -448.0);
    /// assert!(Float8::E5M2.decode(Float8::E5M2.encode(f32::NAN)).is_nan());
    /// ```
    #[inline(always)]
    pub const fn encode(self, value: f32) -> u8 {
        let (sign, magnitude) = (value.to_bits() >> 24 & 0x80, value.to_bits() & 0x7FFF_FFFF);
        // Magnitudes are ordered like their bits, so a carry into the exponent gives the correct
        // result.
        let dropped = f32::MANTISSA_DIGITS - 1 - self.mantissa;
        let half = (1 << (dropped - 1)) - 1 + (magnitude >> dropped & 1);
        let rebase = (127 - self.bias) << self.mantissa;
        let normal = (magnitude.wrapping_add(half) >> dropped).wrapping_sub(rebase);
        // An f32 of this magnitude has no bits below the last bit of a subnormal, so that adding it
        // rounds.
        let anchor = f32::from_bits((127 + 23 + 1 - self.bias - self.mantissa) << 23);
        let small = f32::from_bits(magnitude) + anchor;
        let subnormal = small.to_bits().wrapping_sub(anchor.to_bits());
        let bits = if magnitude < (128 - self.bias) << 23 { subnormal } else { normal };
        let bits = if bits < self.largest { bits } else { self.largest };
        if magnitude > f32::INFINITY.to_bits() { FLOAT8_NAN } else { (sign | bits) as u8 }
    }

    /// Returns the number that bits encode.
    #[inline(always)]
    pub const fn decode(self, bits: u8) -> f32 {
        let (sign, magnitude) = ((bits as u32 & 0x80) << 24, bits as u32 & 0x7F);
        let widened = magnitude << (f32::MANTISSA_DIGITS - 1 - self.mantissa);
        let normal = widened + ((127 - self.bias) << 23);
        let unit = f32::from_bits((127 + 1 - self.bias - self.mantissa) << 23);
        let subnormal = (magnitude as f32 * unit).to_bits();
        let finite = if magnitude >> self.mantissa == 0 { subnormal } else { normal };
        let special = if magnitude == 0x7C { f32::INFINITY } else { f32::NAN };
        let found = if magnitude >= self.special { special.to_bits() } else { finite };
        f32::from_bits(sign | found)
    }
}

/// Signed 8-bit integers. They have no NaN, and rounding never gives -128, so that negating a row
/// before rounding negates its numbers exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Int8;

/// The number 1.5 * 2^23. An f32 of this magnitude has no bits below 1, so adding a number of up to
/// 2^22 to it rounds that number to an integer, ties to even, and leaves the integer in the lower
/// bits.
pub(crate) const ROUND_TO_INTEGER: f32 = 12_582_912.0;

impl Int8 {
    /// The largest number that rounding gives.
    pub const LARGEST: f32 = 127.0;

    /// Returns the bits of the nearest integer, ties to even, saturating at 127 and -127. NaN
    /// becomes 0.
    ///
    /// ```
    /// use flashcore_ptx::Int8;
    ///
    /// assert_eq!(Int8.decode(Int8.encode(2.5)), 2.0);
    /// assert_eq!(Int8.decode(Int8.encode(-1e9)), -127.0);
    /// ```
    #[inline(always)]
    pub const fn encode(self, value: f32) -> u8 {
        let value = if value.is_nan() { 0.0 } else { value };
        let bounded = value.clamp(-Int8::LARGEST, Int8::LARGEST);
        (bounded + ROUND_TO_INTEGER).to_bits() as u8
    }

    /// Returns the number that bits encode, -128 included.
    #[inline(always)]
    pub const fn decode(self, bits: u8) -> f32 {
        bits as i8 as f32
    }
}
