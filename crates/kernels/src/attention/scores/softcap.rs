//! Softcap: `cap * tanh(score / cap)`, in kernels and, for its coefficients, on the host.
//!
//! The hardware's `tanh` is only accurate to 11 bits, and `tanh(x) = 1 - 2 / (e^2x + 1)` takes two
//! more operations of the special function units, which the exponentials of the softmax keep busy
//! already. Most scores are well below the cap, where an odd polynomial on the FMA units does
//! ([`TANH`]). So a warp looks at the largest of its scores first.

use std::f32::consts::LOG2_E;

use ptx::{Builder, Expression, F32, Pred, Reg, Select, Value};

use crate::attention::Score;
use crate::parameter::Scale;

/// `e^2x` is `2^(EXPONENT * x)`.
const EXPONENT: f32 = 2.0 * LOG2_E;

/// Largest `|x|` for which the polynomial is accurate.
const SMALL: f32 = 0.5;

/// Coefficients of `tanh(x) / x` as a polynomial in `x^2`, for `|x|` up to [`SMALL`]: accurate to
/// 6e-7.
const TANH: [f32; 4] = [0.999_999_45, -0.333_262_84, 0.131_899_4, -0.044_392_74];

/// Largest score for a polynomial of scores: up to here no coefficient that underflows matters, and
/// no square overflows.
const MOST: f32 = 1e4;

/// Largest score for a polynomial whose coefficients are known not to underflow where they matter:
/// up to here no square overflows.
const MOST_SQUARED: f64 = 1e18;

/// The softcap of a kernel, with its factors in registers.
#[derive(Clone, Copy)]
pub(crate) struct Softcap {
    /// `2 log2(e) * scale / cap`.
    inner: Reg<F32>,
    /// The cap times log2(e), where capped scores are in units of log2. Otherwise this last factor
    /// is left to the softmax.
    outer: Option<Reg<F32>>,
    /// The polynomial for small scores, where a kernel has one.
    small: Option<Polynomial>,
}

/// The polynomial for small scores, by what it is in.
#[derive(Clone, Copy)]
enum Polynomial {
    /// The exponents of two of `e^2x`.
    Exponents,
    /// The same, where each score is small by itself.
    EachExponent,
    /// The scores themselves, up to `most`: one instruction less for each.
    Scores(ScorePolynomial),
}

/// An odd polynomial of scores: the coefficients of the powers 1, 3, 5 and 7, and the largest
/// absolute value it serves.
#[derive(Clone, Copy)]
struct ScorePolynomial {
    coefficients: [Reg<F32>; 4],
    most: Reg<F32>,
}

/// The exponents of capped scores straight from the products `QK^T`, for the blocks of a warp where
/// the polynomial serves and no key is hidden. They are computed between the exponentials, which
/// keep other units busy, and leave the products as they are.
#[derive(Clone, Copy)]
pub(crate) struct CappedExponents {
    softcap: Softcap,
    polynomial: ScorePolynomial,
    /// Whether the polynomial serves all products of the warp.
    pub(crate) served: Reg<Pred>,
}

impl Softcap {
    pub(crate) fn parameters(k: &mut Builder) -> Self {
        let inner: Reg<F32> = Scale::Inner.read(k);
        Softcap { inner: k.eval(inner * EXPONENT), outer: None, small: None }
    }

    /// Adds the polynomial of exponents, which needs no coefficients in registers.
    pub(crate) fn with_small_exponents(self) -> Self {
        Softcap { small: Some(Polynomial::Exponents), ..self }
    }

    /// Adds the polynomial of exponents, for each score that is small, whatever the others are.
    pub(crate) fn with_each_small_exponent(self) -> Self {
        Softcap { small: Some(Polynomial::EachExponent), ..self }
    }

    /// Returns whether capped scores are in units of log2.
    pub(crate) fn is_in_log2(&self) -> bool {
        self.outer.is_some()
    }

    /// Adds the polynomial of scores, with coefficients that are computed once.
    pub(crate) fn with_small_scores(self, k: &mut Builder) -> Self {
        /// Largest factor from scores to `x` for which the coefficients are finite.
        const LARGEST_FACTOR: f32 = 1e5;
        let factor = k.eval(self.inner * (1.0 / EXPONENT));
        let square = k.eval(factor * factor);
        let mut power = factor;
        let coefficients = TANH.map(|it| {
            let coefficient = k.eval(power * it);
            power = k.eval(power * square);
            coefficient
        });
        let inverse = k.reciprocal(factor);
        let most = (inverse * SMALL).minimum(MOST);
        let most = factor.at_most(LARGEST_FACTOR).select::<F32>(most, -1.0);
        let small = ScorePolynomial { coefficients, most: k.eval(most) };
        Softcap { small: Some(Polynomial::Scores(small)), ..self }
    }

    /// Caps scores in units of log2, with the last factor `outer`, so that the polynomial of scores
    /// gives exponents. Its coefficients come as parameters ([`CapPolynomial`]), which the
    /// assembler reads from constant memory and keeps no registers for.
    pub(crate) fn in_log2(self, k: &mut Builder, outer: Reg<F32>) -> Self {
        use Scale::{CapCubic, CapLinear, CapMost, CapQuintic, CapSeptic};
        let small = ScorePolynomial {
            coefficients: [CapLinear, CapCubic, CapQuintic, CapSeptic].map(|it| it.read(k)),
            most: CapMost.read(k),
        };
        Softcap { outer: Some(outer), small: Some(Polynomial::Scores(small)), ..self }
    }

    /// Caps scores in place.
    pub(crate) fn apply(&self, k: &mut Builder, scores: &[Score]) {
        let Some(small) = &self.small else { return self.exactly(k, scores) };
        let served = match small {
            Polynomial::EachExponent => return self.one_by_one(k, scores),
            Polynomial::Exponents => {
                let largest = largest_size(k, scores);
                let served = self.serves_exponent(k, largest);
                k.all(served)
            }
            Polynomial::Scores(small) => {
                let largest = largest_size(k, scores);
                k.all(largest.at_most(small.most))
            }
        };
        k.if_else(served, |k| self.small(k, small, scores), |k| self.exactly(k, scores));
    }

    /// Returns whether the polynomial of exponents serves a score.
    fn serves_exponent(&self, k: &mut Builder, score: Reg<F32>) -> Value<Pred> {
        k.absolute(score * self.inner).at_most(SMALL * EXPONENT)
    }

    /// Caps scores in place, each as if it were alone.
    fn one_by_one(&self, k: &mut Builder, scores: &[Score]) {
        for score in scores {
            let served = self.serves_exponent(k, score.register);
            let served = k.eval(served);
            let exact = Score { register: k.variable(score.register), ..*score };
            self.exactly(k, &[exact]);
            self.small(k, &Polynomial::Exponents, &[*score]);
            k.set(score.register, served.select::<F32>(score.register, exact.register));
        }
    }

    /// Returns how the softmax takes the exponents of these products, where they may come straight
    /// from them ([`in_log2`](Softcap::in_log2)).
    pub(crate) fn exponents(&self, k: &mut Builder, products: &[Score]) -> Option<CappedExponents> {
        let (Some(_), Some(Polynomial::Scores(polynomial))) = (self.outer, self.small) else {
            return None;
        };
        let largest = largest_size(k, products);
        Some(CappedExponents {
            softcap: *self,
            polynomial,
            served: k.all(largest.at_most(polynomial.most)),
        })
    }

    /// Caps scores of any size in place.
    fn exactly(&self, k: &mut Builder, scores: &[Score]) {
        let twice = self.outer.map(|outer| k.eval(outer * -2.0));
        for Score { register, .. } in scores {
            let power = k.exp2(*register * self.inner);
            let fraction = k.reciprocal(power + 1.0);
            let capped = match (twice, self.outer) {
                (Some(twice), Some(outer)) => k.fma(fraction, twice, outer),
                _ => k.fma(fraction, -2.0, 1.0),
            };
            k.set(*register, capped);
        }
    }

    /// Caps scores in place that the polynomial serves.
    fn small(&self, k: &mut Builder, small: &Polynomial, scores: &[Score]) {
        // Coefficients for exponents instead of `x`.
        let constant = |power: usize| TANH[power] / EXPONENT.powi(2 * power as i32 + 1);
        for Score { register, .. } in scores {
            let (x, coefficients): (_, [Value<F32>; 4]) = match small {
                Polynomial::Exponents | Polynomial::EachExponent => (
                    k.eval(*register * self.inner),
                    [0, 1, 2, 3].map(|power| constant(power).into()),
                ),
                Polynomial::Scores(small) => (*register, small.coefficients.map(Value::from)),
            };
            let slope = over_argument(k, x, coefficients);
            match (small, self.outer) {
                // Of a high cap `x` may be so small that the product with the slope underflows.
                (Polynomial::Exponents, Some(outer)) => k.set(*register, slope * (x * outer)),
                _ => k.set(*register, slope * x),
            }
        }
    }
}

/// The polynomial of capped scores in units of log2, on the host: what a problem passes for
/// [`Scale::CapLinear`] and the scales after it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CapPolynomial {
    /// The coefficients of the powers 1, 3, 5 and 7 of a product `QK^T`.
    pub coefficients: [f32; 4],
    /// The largest absolute value of a product that it serves; negative where it serves none.
    pub most: f32,
}

impl CapPolynomial {
    /// Returns the polynomial for a softmax scale and a cap.
    pub fn new(scale: f32, cap: f32) -> Self {
        let factor = f64::from(scale) / f64::from(cap);
        let outer = f64::from(cap) * std::f64::consts::LOG2_E;
        let coefficients = [0, 1, 2, 3].map(|power| {
            (outer * f64::from(TANH[power]) * factor.powi(2 * power as i32 + 1)) as f32
        });
        let finite = coefficients.iter().all(|it| it.is_finite());
        // A coefficient that underflows must not matter: its power is less than the rounding of the
        // first, or next to nothing.
        let underflows = |power: &usize| coefficients[*power].abs() < f32::MIN_POSITIVE;
        let most = [1, 2, 3].into_iter().filter(underflows).map(|power| {
            let least = f64::from(f32::EPSILON / 4.0 / TANH[power].abs());
            (least.powf(0.5 / power as f64) / factor).max(MOST.into())
        });
        let most = most.fold((f64::from(SMALL) / factor).min(MOST_SQUARED), f64::min);
        CapPolynomial { coefficients, most: if finite { most as f32 } else { -1.0 } }
    }
}

impl CappedExponents {
    /// Returns the exponent of a product's capped score, plus `offset`.
    pub(crate) fn exponent(
        &self,
        k: &mut Builder,
        product: Reg<F32>,
        offset: Reg<F32>,
    ) -> Reg<F32> {
        let slope = over_argument(k, product, self.polynomial.coefficients.map(Value::from));
        k.fma(product, slope, offset)
    }

    /// Turns the products into capped scores. The error of the exact tanh is relative to the cap, and
    /// under a high cap larger than the scores, so this takes a polynomial too. With the same one, the
    /// assembler would keep what `exponent` has computed of it, and spill hundreds of bytes.
    pub(crate) fn cap(&self, k: &mut Builder, products: &[Score]) {
        self.softcap.small(k, &Polynomial::Exponents, products);
    }
}

/// Returns an odd polynomial of `x`, divided by `x`.
fn over_argument(k: &mut Builder, x: Reg<F32>, coefficients: [Value<F32>; 4]) -> Reg<F32> {
    let [first, second, third, fourth] = coefficients;
    let square = k.eval(x * x);
    let mut sum = k.fma(square, fourth, third);
    sum = k.fma(sum, square, second);
    k.fma(sum, square, first)
}

/// Returns the largest absolute value of the thread's scores, in several independent dependency
/// chains.
fn largest_size(k: &mut Builder, scores: &[Score]) -> Reg<F32> {
    const STRANDS: usize = 8;
    let mut largest: Vec<Reg<F32>> = Vec::new();
    for (index, Score { register, .. }) in scores.iter().enumerate() {
        let size = k.absolute(*register);
        match largest.get_mut(index % STRANDS) {
            Some(strand) => *strand = k.eval(strand.maximum(size)),
            None => largest.push(size),
        }
    }
    let first = largest[0];
    largest[1..].iter().fold(first, |all, strand| k.eval(all.maximum(*strand)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The polynomial is `cap * tanh(scale * p / cap)` in units of log2, up to its largest product.
    #[test]
    fn polynomials_cap_products() {
        for (scale, cap, least) in [
            (0.125f32, 50.0f32, 200.0),
            (1.0, 0.3, 0.15),
            (0.088, 1e6, 1e6),
            (1e-6, 1.0, 9e4),
            (0.1, 1e7, 9e6),
            (0.1, 1e20, 2e17),
            (0.1, 1e30, 9e17),
        ] {
            let CapPolynomial { coefficients, most } = CapPolynomial::new(scale, cap);
            assert!(most >= least && (most * most).is_finite(), "{scale}, {cap}: {most}");
            // Kernels may flush subnormal numbers to zero.
            let coefficients = coefficients.map(|it| if it.is_normal() { it } else { 0.0 });
            for step in 1..=100 {
                let product = f64::from(most) * f64::from(step) / 100.0;
                let square = product * product;
                let powers =
                    coefficients.iter().rev().fold(0.0, |sum, it| sum * square + f64::from(*it));
                let x = f64::from(scale) * product / f64::from(cap);
                let expected = f64::from(cap) * x.tanh() * std::f64::consts::LOG2_E;
                let error = (powers * product - expected).abs();
                assert!(error <= 1e-6 * expected, "{scale}, {cap}, {product}: {error}");
            }
        }
    }

    #[test]
    fn polynomials_without_finite_coefficients_serve_nothing() {
        for cap in [1e-20, 1e-38, f32::MIN_POSITIVE / 8.0] {
            assert!(CapPolynomial::new(1.0, cap).most < 0.0, "{cap}");
        }
    }
}
