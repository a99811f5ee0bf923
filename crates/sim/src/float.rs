//! The small float formats, bit for bit, and the approximate functions of the hardware.
//!
//! Conversions round to nearest even. The 8-bit formats saturate to their
//! largest finite value, as `cvt.rn.satfinite` does. The approximate functions
//! are computed to within an `f32` rounding, which is inside the documented
//! error of each hardware instruction, and flush subnormals where the printed
//! instruction says `.ftz`.

use half::{bf16, f16};
use ptx::{Element, Float8, Int8};

/// The bits of the NaN that arithmetic instructions return.
pub const NAN: u32 = 0x7FFF_FFFF;

/// Returns the bits of a result, with the canonical bits for every NaN.
#[inline(always)]
pub fn bits(value: f32) -> u32 {
    if value.is_nan() { NAN } else { value.to_bits() }
}

/// Rounds an `f32` to `f16` bits.
#[inline]
pub fn f16_bits(value: f32) -> u16 {
    if value.is_nan() { 0x7FFF } else { f16::from_f32(value).to_bits() }
}

/// Rounds an `f32` to `bf16` bits.
#[inline]
pub fn bf16_bits(value: f32) -> u16 {
    if value.is_nan() { 0x7FFF } else { bf16::from_f32(value).to_bits() }
}

/// Returns the number that `f16` bits encode.
#[inline]
pub fn from_f16(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}

/// Returns the number that `bf16` bits encode.
#[inline]
pub fn from_bf16(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// Rounds an `f32` to `e4m3` bits, saturating.
pub fn e4m3_bits(value: f32) -> u8 {
    Float8::E4M3.encode(value)
}

/// Rounds an `f32` to `e5m2` bits, saturating.
pub fn e5m2_bits(value: f32) -> u8 {
    Float8::E5M2.encode(value)
}

/// Returns the number that `e4m3` bits encode.
pub fn from_e4m3(bits: u8) -> f32 {
    Float8::E4M3.decode(bits)
}

/// Returns the number that `e5m2` bits encode.
pub fn from_e5m2(bits: u8) -> f32 {
    Float8::E5M2.decode(bits)
}

/// Returns every number of an 8-bit format, indexed by its bits.
pub(crate) fn small_table(element: Element) -> [f32; 256] {
    std::array::from_fn(|bits| match element {
        Element::E4M3 => from_e4m3(bits as u8),
        Element::E5M2 => from_e5m2(bits as u8),
        Element::Int8 => Int8.decode(bits as u8),
        Element::F32 | Element::F16 | Element::BF16 => f32::NAN,
    })
}

/// Computes `a * b + c` rounded once to a 16-bit format.
///
/// The product is exact in `f64`. The sum is rounded to odd, so that rounding it again to fewer
/// bits gives the same as rounding once.
pub(crate) fn fused_half(a: f32, b: f32, c: f32, round: fn(f32) -> u16) -> u16 {
    let product = a as f64 * b as f64;
    let sum = product + c as f64;
    if !sum.is_finite() {
        return round(sum as f32);
    }
    let virtual_c = sum - product;
    let error = (product - (sum - virtual_c)) + (c as f64 - virtual_c);
    let sum = if error != 0.0 { odd_f64(sum, error > 0.0) } else { sum };
    round(odd_f32(sum))
}

/// Returns `sum` rounded to odd: itself if its last bit is odd, else the neighbour on the side of
/// the exact value.
fn odd_f64(sum: f64, above: bool) -> f64 {
    let bits = sum.to_bits();
    if bits & 1 == 1 {
        return sum;
    }
    let grows = above == (sum > 0.0) || sum == 0.0;
    f64::from_bits(if grows { bits + 1 } else { bits - 1 })
}

/// Rounds an `f64` to an `f32`, to odd.
fn odd_f32(value: f64) -> f32 {
    let near = value as f32;
    if near as f64 == value || !near.is_finite() {
        return near;
    }
    let bits = near.to_bits();
    let toward_zero = if (near as f64).abs() > value.abs() { bits - 1 } else { bits };
    f32::from_bits(toward_zero | 1)
}

/// Computes `a * b + c` rounded once, mostly without a library call on machines without a fused
/// multiply-add.
///
/// The product is exact in `f64`, and rounding the sum twice differs from rounding it once only
/// where the first rounding lands on a tie of the second.
#[inline(always)]
pub fn fused(a: f32, b: f32, c: f32) -> f32 {
    let sum = a as f64 * b as f64 + c as f64;
    let tie = sum.to_bits() & 0x1FFF_FFFF == 0x1000_0000;
    if tie || sum.abs() < f32::MIN_POSITIVE as f64 { a.mul_add(b, c) } else { sum as f32 }
}

/// Returns the smaller number; of a number and a NaN the number; -0 is less than +0.
#[inline(always)]
pub fn minimum(a: f32, b: f32) -> f32 {
    if a.is_nan() || (b < a) || (a == b && b.is_sign_negative()) { b } else { a }
}

/// Returns the larger number; of a number and a NaN the number; +0 is more than -0.
#[inline(always)]
pub fn maximum(a: f32, b: f32) -> f32 {
    if a.is_nan() || (b > a) || (a == b && b.is_sign_positive()) { b } else { a }
}

/// Flushes subnormals to a zero of the same sign.
#[inline(always)]
pub fn flush(value: f32) -> f32 {
    if value.is_subnormal() { 0.0f32.copysign(value) } else { value }
}

/// Computes `2^x`, identically on every machine.
///
/// The Taylor series of `2^r` for `|r| <= 1/2` to degree 9 has an error below 1e-11, far less than
/// an `f32` rounding.
#[inline]
pub fn exp2(x: f32) -> f32 {
    if x.is_nan() {
        return f32::NAN;
    }
    if x >= 128.0 {
        return f32::INFINITY;
    }
    if x < -150.0 {
        return 0.0;
    }
    let whole = x.round_ties_even();
    let r = (x - whole) as f64 * std::f64::consts::LN_2;
    // 1 / n!, the highest power first.
    const COEFFICIENTS: [f64; 10] = [
        1.0 / 362880.0,
        1.0 / 40320.0,
        1.0 / 5040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        1.0 / 2.0,
        1.0,
        1.0,
    ];
    let mut sum = 0.0;
    for coefficient in COEFFICIENTS {
        sum = sum * r + coefficient;
    }
    let scale = f64::from_bits(((1023 + whole as i64) as u64) << 52);
    (sum * scale) as f32
}

/// Computes `ex2.approx.ftz`.
#[inline]
pub fn exp2_flushed(x: f32) -> f32 {
    flush(exp2(flush(x)))
}

/// Computes `lg2.approx.ftz`.
pub fn log2_flushed(x: f32) -> f32 {
    (flush(x) as f64).log2() as f32
}

/// Computes `rcp.approx.ftz`.
pub fn reciprocal_flushed(x: f32) -> f32 {
    flush(1.0 / flush(x))
}

/// Computes `rsqrt.approx.ftz`.
pub fn reciprocal_sqrt_flushed(x: f32) -> f32 {
    flush((1.0 / (flush(x) as f64).sqrt()) as f32)
}

/// Computes `sqrt.approx.ftz`.
pub fn sqrt_flushed(x: f32) -> f32 {
    flush(flush(x).sqrt())
}

/// Computes `tanh.approx`.
pub fn tanh(x: f32) -> f32 {
    (x as f64).tanh() as f32
}

/// Computes `div.approx.ftz`.
pub fn divide_flushed(a: f32, b: f32) -> f32 {
    flush(flush(a) / flush(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds by searching all finite numbers of the format.
    fn nearest(value: f32, decode: fn(u8) -> f32) -> u8 {
        let mut best = (f64::INFINITY, 0u8);
        for bits in 0..0x80u8 {
            let number = decode(bits);
            if !number.is_finite() {
                continue;
            }
            let distance = (number as f64 - value.abs() as f64).abs();
            if distance < best.0 || (distance == best.0 && bits & 1 == 0) {
                best = (distance, bits);
            }
        }
        best.1 | if value.is_sign_negative() { 0x80 } else { 0 }
    }

    #[test]
    fn eight_bit_formats_round_to_nearest_even() {
        for (encode, decode) in [
            (e4m3_bits as fn(f32) -> u8, from_e4m3 as fn(u8) -> f32),
            (e5m2_bits as fn(f32) -> u8, from_e5m2 as fn(u8) -> f32),
        ] {
            // Every number, every midpoint, and the neighbours of both.
            let numbers: Vec<f32> = (0..0x80).map(decode).filter(|x| x.is_finite()).collect();
            for pair in numbers.windows(2) {
                let middle = (pair[0] + pair[1]) / 2.0;
                for x in [pair[0], middle, middle.next_up(), middle.next_down(), pair[1].next_up()]
                {
                    assert_eq!(encode(x), nearest(x, decode), "{x}");
                    assert_eq!(encode(-x), nearest(-x, decode), "-{x}");
                }
            }
            assert_eq!(encode(f32::INFINITY), encode(1e9));
            assert_eq!(encode(f32::NAN) & 0x7F, 0x7F);
        }
        // By the definition of both formats.
        for bits in 0..=u8::MAX {
            let number = |mantissa: u32, bias: i32| {
                let (magnitude, steps) = (u32::from(bits & 0x7F), f64::from(1 << mantissa));
                let exponent = (magnitude >> mantissa) as i32;
                let fraction = f64::from(magnitude & ((1 << mantissa) - 1)) / steps;
                let leading = if exponent == 0 { 0.0 } else { 1.0 };
                let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
                sign * (leading + fraction) * f64::from(exponent.max(1) - bias).exp2()
            };
            match bits & 0x7F {
                0x7F => assert!(from_e4m3(bits).is_nan()),
                _ => assert_eq!(f64::from(from_e4m3(bits)), number(3, 7)),
            }
            match bits & 0x7F {
                0x7C => assert_eq!(f64::from(from_e5m2(bits)), number(2, 15) * f64::INFINITY),
                0x7D.. => assert!(from_e5m2(bits).is_nan()),
                _ => assert_eq!(f64::from(from_e5m2(bits)), number(2, 15)),
            }
        }
        assert_eq!(from_e4m3(0x7E), 448.0);
        assert_eq!(from_e5m2(0x7B), 57344.0);
    }

    #[test]
    fn sixteen_bit_formats_round_trip() {
        for bits in 0..=u16::MAX {
            if !from_f16(bits).is_nan() {
                assert_eq!(f16_bits(from_f16(bits)), bits);
            }
            if !from_bf16(bits).is_nan() {
                assert_eq!(bf16_bits(from_bf16(bits)), bits);
            }
        }
        // Ties go to even.
        assert_eq!(bf16_bits(f32::from_bits(0x3F80_8000)), 0x3F80);
        assert_eq!(bf16_bits(f32::from_bits(0x3F81_8000)), 0x3F82);
        assert_eq!(f16_bits(1.0 + 1.0 / 2048.0), 0x3C00);
        assert_eq!(f16_bits(1.0 + 3.0 / 2048.0), 0x3C02);
    }

    #[test]
    fn fused_half_rounds_once() {
        // A tie that a tiny addend breaks upwards.
        let tie = 1.0 + 1.0 / 256.0;
        assert_eq!(fused_half(tie, 1.0, 0.0, bf16_bits), bf16_bits(1.0));
        assert_eq!(fused_half(tie, 1.0, 1e-30, bf16_bits), bf16_bits(1.0 + 1.0 / 128.0));
        assert_eq!(fused_half(tie, 1.0, -1e-30, bf16_bits), bf16_bits(1.0));
    }

    #[test]
    fn fused_rounds_once() {
        let mut bits = 0x1234_5678u32;
        let mut next = || {
            bits = bits.wrapping_mul(1664525).wrapping_add(1013904223);
            f32::from_bits((bits & 0x87FF_FFFF) | 0x3800_0000)
        };
        for _ in 0..100_000 {
            let (a, b, c) = (next(), next(), next());
            assert_eq!(fused(a, b, c).to_bits(), a.mul_add(b, c).to_bits());
        }
        // Exactly between two numbers, and a hair above.
        let half = 1.0 + f32::EPSILON;
        assert_eq!(fused(half, half, 2.0f32.powi(-60)), half.mul_add(half, 2.0f32.powi(-60)));
    }

    #[test]
    fn exp2_is_within_one_unit() {
        let mut x = -126.0f32;
        while x < 127.5 {
            let exact = (x as f64).exp2();
            let error = (exp2(x) as f64 - exact).abs() / exact;
            assert!(error < 6.1e-8, "2^{x} off by {error}");
            x += 0.37;
        }
        assert_eq!(exp2_flushed(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp2_flushed(-130.0), 0.0);
        assert_eq!(exp2(0.0), 1.0);
        assert_eq!(exp2(128.0), f32::INFINITY);
    }

    #[test]
    fn extremes_treat_nan_and_zero_as_the_hardware() {
        assert_eq!(minimum(f32::NAN, 1.0), 1.0);
        assert_eq!(maximum(1.0, f32::NAN), 1.0);
        assert!(minimum(0.0, -0.0).is_sign_negative());
        assert!(maximum(-0.0, 0.0).is_sign_positive());
    }
}
