//! The exponential of a non-positive number, in a form that compilers turn into vector code.

/// Below this, the result would be subnormal.
const SMALLEST: f32 = -87.33654;

/// e^x for x <= 0 or NaN, within 2 units in the last place; 0 where e^x would be subnormal.
///
/// e^x = 2^n e^r with n = round(x / ln 2) and |r| <= ln(2) / 2, where a polynomial of degree 6
/// (Cephes `expf`) gives e^r.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 leaves the rounded integer in the low bits of the mantissa.
    const SHIFT: f32 = 12_582_912.0;
    // ln 2 in two parts, the first short enough for n * HIGH to be exact.
    const HIGH: f32 = 0.693_359_4;
    const LOW: f32 = -2.121_944_4e-4;
    let shifted = x * std::f32::consts::LOG2_E + SHIFT;
    let n = shifted - SHIFT;
    let r = x - n * HIGH - n * LOW;
    let mut polynomial = 1.987_569_1e-4;
    for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        polynomial = polynomial * r + coefficient;
    }
    let mantissa = polynomial * r * r + r + 1.0;
    // The shift drops everything but n's low bits; 127 is the bias of the exponent.
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    // A comparison with NaN is false, so NaN takes the second branch.
    if x < SMALLEST { 0.0 } else { mantissa * power }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_standard_library() {
        let mut worst = 0.0f64;
        for step in 0..1_000_000 {
            let x = -87.0 * step as f32 / 1_000_000.0;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - exact).abs() / exact);
        }
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "{worst:e}");
    }

    #[test]
    fn special_values() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e30), 0.0);
        assert_eq!(exp(-88.0), 0.0);
        assert!(exp(SMALLEST) > 0.0);
        assert!(exp(f32::NAN).is_nan());
    }
}
