//! What the bits of 8-bit numbers stand for, and how numbers are rounded to them.
//!
//! Rounding is that of `cvt.rn.satfinite`: to nearest, ties to even, and beyond the largest number
//! to the largest number. Nothing here depends on whether the processor flushes subnormals.

/// An 8-bit float format: a sign, an exponent, and so many bits of mantissa.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Float8 {
    mantissa: u32,
    bias: u32,
    /// The bits of the largest number.
    largest: u32,
    /// The bits from which on, the sign aside, there is infinity or NaN.
    special: u32,
}

/// The bits of NaN in both formats.
pub const FLOAT8_NAN: u8 = 0x7F;

impl Float8 {
    /// 4 exponent bits and 3 of mantissa, without infinities: 448 is the largest number.
    pub const E4M3: Float8 = Float8 { mantissa: 3, bias: 7, largest: 0x7E, special: 0x7F };
    /// 5 exponent bits and 2 of mantissa, the upper half of an f16: 57344 is the largest number.
    pub const E5M2: Float8 = Float8 { mantissa: 2, bias: 15, largest: 0x7B, special: 0x7C };

    /// The nearest number's bits; of what is too large, infinity too, those of the largest.
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
        // Bits of magnitudes are in the order of the magnitudes, so a carry into the exponent is
        // right.
        let dropped = f32::MANTISSA_DIGITS - 1 - self.mantissa;
        let half = (1 << (dropped - 1)) - 1 + (magnitude >> dropped & 1);
        let rebase = (127 - self.bias) << self.mantissa;
        let normal = (magnitude.wrapping_add(half) >> dropped).wrapping_sub(rebase);
        // Next to this number, an f32 has no bits below the last of a subnormal.
        let anchor = f32::from_bits((127 + 23 + 1 - self.bias - self.mantissa) << 23);
        let small = f32::from_bits(magnitude) + anchor;
        let subnormal = small.to_bits().wrapping_sub(anchor.to_bits());
        let bits = if magnitude < (128 - self.bias) << 23 { subnormal } else { normal };
        let bits = if bits < self.largest { bits } else { self.largest };
        if magnitude > f32::INFINITY.to_bits() { FLOAT8_NAN } else { (sign | bits) as u8 }
    }

    /// The number that bits stand for.
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

/// 8-bit integers with a sign. There is no NaN among them, and rounding keeps clear of -128, so that
/// a negated row has negated numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Int8;

/// Next to this number, 1.5 * 2^23, an f32 has no bits below 1: a number of up to 2^22 added to it is
/// rounded to a whole one, ties to even, and its lower bits are that number's.
pub(crate) const ROUND_TO_INTEGER: f32 = 12_582_912.0;

impl Int8 {
    /// The largest number that others are rounded to.
    pub const LARGEST: f32 = 127.0;

    /// The nearest integer's bits, ties to even; of what is beyond 127 or -127, those; of NaN, those
    /// of 0.
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

    /// The number that bits stand for, -128 too.
    #[inline(always)]
    pub const fn decode(self, bits: u8) -> f32 {
        bits as i8 as f32
    }
}
