//! Exponential and hyperbolic tangent, a vector at a time.

use pulp::Simd;

/// The exponential of anything below this is subnormal.
const SMALLEST: f32 = -87.33654;

/// Computes e^x for x <= 0 or NaN, within 2 units in the last place; 0 where it would be subnormal.
///
/// e^x = 2^n e^r with n = round(x / ln 2) and |r| <= ln(2) / 2, where a polynomial of degree 6
/// (Cephes `expf`) gives e^r.
#[inline(always)]
pub(super) fn exp<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    // Adding 1.5 * 2^23 leaves the rounded integer in the low bits of the mantissa.
    const SHIFT: f32 = 12_582_912.0;
    // ln 2 in two parts, the first short enough for n * HIGH to be exact.
    const HIGH: f32 = 0.693_359_4;
    const LOW: f32 = -2.121_944_4e-4;
    let splat = |value: f32| simd.splat_f32s(value);
    let shifted = simd.mul_add_e_f32s(x, splat(std::f32::consts::LOG2_E), splat(SHIFT));
    let n = simd.sub_f32s(shifted, splat(SHIFT));
    let r = simd.mul_add_e_f32s(n, splat(-HIGH), x);
    let r = simd.mul_add_e_f32s(n, splat(-LOW), r);
    let mut polynomial = splat(1.987_569_1e-4);
    for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        polynomial = simd.mul_add_e_f32s(polynomial, r, splat(coefficient));
    }
    let square = simd.mul_f32s(r, r);
    let mantissa = simd.add_f32s(simd.mul_add_e_f32s(polynomial, square, r), splat(1.0));
    // The shift drops everything but n's low bits; 127 is the bias of the exponent.
    let bits = simd.transmute_u32s_f32s(shifted);
    let bits = simd.wrapping_dyn_shl_u32s(bits, simd.splat_u32s(23));
    let bits = simd.add_u32s(bits, simd.splat_u32s(127 << 23));
    let power = simd.transmute_f32s_u32s(bits);
    // A comparison with NaN is false, so NaN takes the second branch.
    let vanishes = simd.less_than_f32s(x, splat(SMALLEST));
    simd.select_f32s(vanishes, splat(0.0), simd.mul_f32s(mantissa, power))
}

/// Computes tanh(x), within 3 units in the last place: by an odd polynomial near zero (Cephes
/// `tanhf`), where the quotient of exponentials would cancel.
#[inline(always)]
pub(super) fn tanh<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    const NEAR: f32 = 0.625;
    let splat = |value: f32| simd.splat_f32s(value);
    let square = simd.mul_f32s(x, x);
    let mut polynomial = splat(-5.704_988_7e-3);
    for coefficient in [2.063_908_8e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1] {
        polynomial = simd.mul_add_e_f32s(polynomial, square, splat(coefficient));
    }
    let near = simd.mul_add_e_f32s(simd.mul_f32s(polynomial, square), x, x);
    let size = simd.abs_f32s(x);
    let falling = exp(simd, simd.mul_f32s(size, splat(-2.0)));
    let (above, below) = (simd.sub_f32s(splat(1.0), falling), simd.add_f32s(splat(1.0), falling));
    let sign = simd.and_f32s(x, splat(-0.0));
    let far = simd.or_f32s(simd.div_f32s(above, below), sign);
    simd.select_f32s(simd.less_than_f32s(size, splat(NEAR)), near, far)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Applies each function to some numbers, on the instruction set of this machine.
    struct Each<'a>(&'a [f32]);

    impl pulp::WithSimd for Each<'_> {
        /// x, e^x and tanh(x).
        type Output = Vec<[f32; 3]>;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
            let of = |x: &f32| {
                let (mut exponential, mut tangent) =
                    (vec![0.0; S::F32_LANES], vec![0.0; S::F32_LANES]);
                S::as_mut_simd_f32s(&mut exponential).0[0] = exp(simd, simd.splat_f32s(*x));
                S::as_mut_simd_f32s(&mut tangent).0[0] = tanh(simd, simd.splat_f32s(*x));
                assert!(exponential.iter().all(|it| it.to_bits() == exponential[0].to_bits()));
                [*x, exponential[0], tangent[0]]
            };
            self.0.iter().map(of).collect()
        }
    }

    fn each(numbers: &[f32]) -> Vec<[f32; 3]> {
        let all = pulp::Arch::new().dispatch(Each(numbers));
        // The scalar code as well, as on a machine without vector instructions.
        let plain = pulp::Scalar::new().vectorize(Each(numbers));
        for ([x, exponential, tangent], [_, plain_exponential, plain_tangent]) in
            all.iter().zip(plain)
        {
            let close = |one: f32, other: f32| {
                one.to_bits() == other.to_bits()
                    || (one - other).abs() <= 4.0 * f32::EPSILON * one.abs()
                    || one.is_nan() && other.is_nan()
            };
            assert!(close(*exponential, plain_exponential), "e^{x}");
            assert!(close(*tangent, plain_tangent), "tanh({x})");
        }
        all
    }

    #[test]
    fn agree_with_the_standard_library() {
        let numbers: Vec<f32> = (0..400_000).map(|step| -87.0 * step as f32 / 400_000.0).collect();
        let mut worst = [0.0f64; 2];
        for [x, exponential, tangent] in each(&numbers) {
            let x = f64::from(x);
            let error = |found: f32, exact: f64| {
                if exact == 0.0 { f64::from(found) } else { (f64::from(found) / exact - 1.0).abs() }
            };
            worst[0] = worst[0].max(error(exponential, x.exp()));
            worst[1] = worst[1].max(error(tangent, x.tanh()));
        }
        let epsilon = f64::from(f32::EPSILON);
        assert!(worst[0] < 2.0 * epsilon && worst[1] < 3.0 * epsilon, "{worst:?}");
    }

    #[test]
    fn special_values() {
        let of = |x: f32| each(&[x])[0];
        assert_eq!(of(0.0), [0.0, 1.0, 0.0]);
        assert_eq!(of(-0.0)[1..], [1.0, -0.0]);
        assert_eq!(of(f32::NEG_INFINITY)[1..], [0.0, -1.0]);
        assert_eq!(of(-1e30)[1], 0.0);
        assert_eq!(of(-88.0)[1], 0.0);
        assert!(of(SMALLEST)[1] > 0.0);
        assert!(of(f32::NAN)[1..].iter().all(|it| it.is_nan()));
        assert_eq!(each(&[f32::INFINITY])[0][2], 1.0);
        assert!((each(&[0.7])[0][2] - 0.7f32.tanh()).abs() < 1e-7);
    }
}
