//! The arithmetic of the tensor cores, and the addressing of their shared-memory operands.
//!
//! A shared-memory operand is found from the 64 bits of its descriptor alone, as on the hardware:
//! this module does not use the tile types of `ptx`, so that a wrong descriptor gives a wrong
//! product. The canonical layouts, in chunks of 16 bytes, with `W` the width of the swizzle:
//!
//! - inner extent contiguous, no swizzle: row `r`, chunk `c` of the 32 bytes at
//!   `r / 8 * stride + c * leading + r % 8 * 16`;
//! - inner extent contiguous, swizzled: at `r / 8 * stride + r % 8 * W + 16 c`;
//! - outer extent contiguous, no swizzle: inner row `k`, chunk `c` of the outer
//!   extent at `c * stride + k / 8 * leading + k % 8 * 16`;
//! - outer extent contiguous, swizzled: at
//!   `16 c / W * leading + k / 8 * stride + k % 8 * W + 16 c % W`.
//!
//! The swizzle is applied to the final address. Products are exact, and the sum of each instruction
//! is rounded in `f32`; the hardware keeps a few bits fewer or more, so results agree to about
//! 1e-6, not to the bit. Of 8-bit products the hardware keeps far fewer bits:
//! [`Fp8Accumulation`](crate::Fp8Accumulation) models that.

use ptx::{Element, Int8, Swizzle};

use crate::copy::swizzled;
use crate::float;

/// The decoded fields of a shared-memory descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// The address at which the operand starts.
    pub start: u32,
    /// The leading-dimension byte offset.
    pub leading: u32,
    /// The stride-dimension byte offset.
    pub stride: u32,
    /// The row of the swizzle pattern that the start lies in.
    pub base_offset: u32,
    /// The swizzle.
    pub swizzle: Swizzle,
    /// The bits that must be zero.
    pub reserved: u64,
}

impl Descriptor {
    /// Decodes the fields of a descriptor.
    pub fn decode(bits: u64) -> Self {
        let field = |at: u32| ((bits >> at & 0x3FFF) << 4) as u32;
        Descriptor {
            start: field(0),
            leading: field(16),
            stride: field(32),
            base_offset: (bits >> 49 & 7) as u32,
            swizzle: match bits >> 62 {
                0 => Swizzle::None,
                1 => Swizzle::B128,
                2 => Swizzle::B64,
                _ => Swizzle::B32,
            },
            reserved: bits & 0x3FF1_C000_C000_C000,
        }
    }

    /// Returns the addresses of the operand's 16-byte chunks: 32 bytes of inner (K) extent by
    /// `rows` of outer extent. If the inner extent is contiguous they are ordered row by row,
    /// otherwise (16-bit elements) by rows of the inner extent.
    pub fn chunks(&self, rows: u32, outer_contiguous: bool) -> Vec<u32> {
        let width = self.swizzle.width();
        let mut chunks = Vec::with_capacity(2 * rows as usize);
        let mut push = |offset: u32| {
            chunks.push(swizzled((self.start + offset) & 0x3_FFFF, self.swizzle));
        };
        if outer_contiguous {
            for k in 0..16 {
                for chunk in 0..rows / 8 {
                    push(match self.swizzle {
                        Swizzle::None => chunk * self.stride + k / 8 * self.leading + k % 8 * 16,
                        _ => {
                            let byte = 16 * chunk;
                            byte / width * self.leading
                                + k / 8 * self.stride
                                + k % 8 * width
                                + byte % width
                        }
                    });
                }
            }
        } else {
            for row in 0..rows {
                for chunk in 0..2 {
                    push(match self.swizzle {
                        Swizzle::None => {
                            row / 8 * self.stride + chunk * self.leading + row % 8 * 16
                        }
                        _ => row / 8 * self.stride + row % 8 * width + 16 * chunk,
                    });
                }
            }
        }
        chunks
    }
}

/// Decodes 16 bytes of elements.
pub(crate) fn decode_chunk(
    bytes: &[u8],
    element: Element,
    small: &[[f32; 256]; 2],
    out: &mut Vec<f32>,
) {
    match element {
        Element::F16 => out.extend(
            bytes.chunks_exact(2).map(|b| float::from_f16(u16::from_le_bytes([b[0], b[1]]))),
        ),
        Element::BF16 => out.extend(
            bytes.chunks_exact(2).map(|b| float::from_bf16(u16::from_le_bytes([b[0], b[1]]))),
        ),
        Element::E4M3 => out.extend(bytes.iter().map(|b| small[0][*b as usize])),
        Element::E5M2 => out.extend(bytes.iter().map(|b| small[1][*b as usize])),
        Element::Int8 => out.extend(bytes.iter().map(|b| Int8.decode(*b))),
        Element::F32 => {
            out.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
        }
    }
}

/// Returns the elements packed in a register.
pub(crate) fn decode_word(word: u32, element: Element, small: &[[f32; 256]; 2]) -> [f32; 4] {
    let [a, b, c, d] = word.to_le_bytes();
    match element {
        Element::F16 => {
            [float::from_f16(word as u16), float::from_f16((word >> 16) as u16), 0., 0.]
        }
        Element::BF16 => {
            [float::from_bf16(word as u16), float::from_bf16((word >> 16) as u16), 0., 0.]
        }
        Element::E4M3 => [a, b, c, d].map(|x| small[0][x as usize]),
        Element::E5M2 => [a, b, c, d].map(|x| small[1][x as usize]),
        Element::Int8 => [a, b, c, d].map(|x| Int8.decode(x)),
        Element::F32 => [f32::from_bits(word), 0., 0., 0.],
    }
}

/// Multiplies `rows x inner` by `inner x columns`, both stored row by row.
pub(crate) fn multiply(a: &[f32], b: &[f32], inner: usize, columns: usize) -> Vec<f32> {
    let rows = a.len() / inner;
    let mut d = vec![0.0f32; rows * columns];
    // Four inner rows at a time, so that the sums are read and written a quarter as often.
    for (a, d) in a.chunks_exact(inner).zip(d.chunks_exact_mut(columns)) {
        for (a, b) in a.chunks(4).zip(b.chunks(4 * columns)) {
            if let [a0, a1, a2, a3] = *a {
                let (b0, b) = b.split_at(columns);
                let (b1, b) = b.split_at(columns);
                let (b2, b3) = b.split_at(columns);
                let pairs = d.iter_mut().zip(b0).zip(b1).zip(b2).zip(b3);
                for ((((d, b0), b1), b2), b3) in pairs {
                    *d += (a0 * b0 + a1 * b1) + (a2 * b2 + a3 * b3);
                }
            } else {
                for (a, b) in a.iter().zip(b.chunks_exact(columns)) {
                    for (d, b) in d.iter_mut().zip(b) {
                        *d += a * b;
                    }
                }
            }
        }
    }
    d
}

/// The number of fraction bits kept: of each term below the largest exponent among the terms, and
/// of the sum below its own exponent.
const FP8_ACCUMULATOR_BITS: i32 = 13;

/// Returns the exponent of the smallest normal number of a type, which subnormals share.
const fn least_exponent(element: Element) -> i32 {
    match element {
        Element::E4M3 => -6,
        Element::E5M2 | Element::F16 => -14,
        Element::F32 | Element::BF16 => f32::MIN_EXP - 1,
        Element::Int8 => 0,
    }
}

/// Returns the sum of `old` and the products of a step, as Hopper's `wgmma` accumulates products of
/// 8-bit numbers.
///
/// The products and the accumulator are aligned to the largest exponent among them, each is
/// truncated after 13 bits of fraction, and so is their sum. A product's exponent is the sum of
/// those of its factors, before the carry of a product such as `1.5 * 1.5`; subnormal factors have
/// the smallest exponent of their type. This is what MMA-Sim (arXiv 2511.10909) found bit for bit
/// on Hopper; the report on DeepSeek-V3 (arXiv 2412.19437, 3.5.2) described it first, without the
/// truncation of the sum. With this model, a few rows of FlashAttention-3's loop have relative
/// errors of 0.59e-2, 0.11 and 0.44 over 1k, 16k and 128k keys, where an H200 had 0.59e-2, 0.11 and
/// 0.46.
///
/// ```
/// # use flashcore_sim::fp8_accumulate;
/// # use ptx::Element;
/// let types = [Element::E4M3; 2];
/// // 8192 leaves nothing of a half, and one of one and a half.
/// assert_eq!(fp8_accumulate(types, 8192.0, [(0.5, 1.0); 32].into_iter()), 8192.0);
/// assert_eq!(fp8_accumulate(types, 8192.0, [(1.5, 1.0); 32].into_iter()), 8192.0 + 32.0);
/// // A sum of 31 has no room for 2^-12, though each of its parts has.
/// let parts = [(1.0, 1.0); 31].into_iter().chain([(0.015625, 0.015625)]);
/// assert_eq!(fp8_accumulate(types, 0.0, parts), 31.0);
/// ```
pub fn fp8_accumulate(
    types: [Element; 2],
    old: f32,
    factors: impl Iterator<Item = (f32, f32)> + Clone,
) -> f32 {
    let old = f64::from(old);
    let products = factors.clone().map(|(a, b)| f64::from(a) * f64::from(b));
    let exact = products.clone().fold(old, |sum, product| sum + product);
    // There is nothing to align if the sum is NaN or infinite.
    if !exact.is_finite() {
        return exact as f32;
    }
    let [least_a, least_b] = types.map(least_exponent);
    let power = |x: f32, least: i32| exponent(x.into()).max(least);
    let powers = factors
        .filter(|(a, b)| *a != 0.0 && *b != 0.0)
        .map(|(a, b)| power(a, least_a) + power(b, least_b));
    let largest = powers.fold(exponent(old), i32::max);
    let grid = unit(largest);
    let kept = |x: f64| (x / grid).trunc();
    let sum = products.fold(kept(old), |sum, product| sum + kept(product)) * grid;
    let grid = unit(exponent(sum));
    ((sum / grid).trunc() * grid) as f32
}

/// Returns the value of the last bit that is kept next to an exponent.
fn unit(exponent: i32) -> f64 {
    f64::from(exponent.max(least_exponent(Element::F32)) - FP8_ACCUMULATOR_BITS).exp2()
}

/// Returns `old` plus `rows x inner` times `inner x columns`, all stored row by row, with each
/// element accumulated as [`fp8_accumulate`] does. `types` are those of the factors.
pub(crate) fn multiply_fp8(
    types: [Element; 2],
    a: &[f32],
    b: &[f32],
    old: &[f32],
    inner: usize,
    columns: usize,
) -> Vec<f32> {
    let mut d = vec![0.0f32; old.len()];
    for (row, (a, d)) in a.chunks_exact(inner).zip(d.chunks_exact_mut(columns)).enumerate() {
        for (column, d) in d.iter_mut().enumerate() {
            let factors = (0..inner).map(|k| (a[k], b[k * columns + column]));
            *d = fp8_accumulate(types, old[row * columns + column], factors);
        }
    }
    d
}

/// Returns the exponent of a normal number; that of zero is below all others.
fn exponent(x: f64) -> i32 {
    (x.to_bits() >> 52 & 0x7FF) as i32 - 1023
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_decode() {
        let bits = (0x400 >> 4) | (2048 >> 4) << 16 | (1024u64 >> 4) << 32 | 1 << 62;
        let descriptor = Descriptor::decode(bits);
        assert_eq!((descriptor.start, descriptor.leading, descriptor.stride), (0x400, 2048, 1024));
        assert_eq!(descriptor.swizzle, Swizzle::B128);
        assert_eq!(descriptor.reserved, 0);
        assert_ne!(Descriptor::decode(1 << 14).reserved, 0);
        assert_eq!(Descriptor::decode(5 << 49).base_offset, 5);
    }

    #[test]
    fn swizzled_rows_follow_the_tile_layout() {
        // The two independent descriptions of the layout must agree.
        for swizzle in Swizzle::ALL {
            let columns = swizzle.width() / 2;
            let layout = ptx::TileLayout { element: Element::F16, rows: 64, columns, swizzle };
            let code = swizzle.descriptor_code();
            let stride = 8 * swizzle.width() as u64;
            let start = 1024u64;
            let bits = start >> 4 | stride >> 4 << 32 | code << 62;
            if swizzle == Swizzle::None {
                continue;
            }
            let chunks = Descriptor::decode(bits).chunks(64, false);
            for row in 0..64 {
                for chunk in 0..2 {
                    let expected = 1024 + layout.byte_of(row, chunk * 8);
                    assert_eq!(chunks[(2 * row + chunk) as usize], expected);
                }
            }
        }
    }

    /// Terms that are small next to the accumulator are lost, in whole or in part.
    #[test]
    fn fp8_sums_lose_what_is_small() {
        let (e4m3, one, inner) = ([Element::E4M3; 2], [1.0; 32], 32);
        let sum = |b: f32, old: f32| multiply_fp8(e4m3, &one, &[b; 32], &[old], inner, 1)[0];
        assert_eq!(sum(1.0, 0.0), 32.0);
        assert_eq!(sum(1.0, 1024.0), 1056.0);
        // A last place of 2^(14 - 13) = 2 leaves nothing of 1.5, and 2 of 3.
        assert_eq!(sum(1.5, 16384.0), 16384.0);
        assert_eq!(sum(3.0, 16384.0), 16384.0 + 64.0);
        assert_eq!(sum(-3.0, 16384.0), 16384.0 - 64.0);
        assert_eq!(sum(0.0, 0.0), 0.0);
        // The sum is truncated like its terms: 100 has an exponent of 6, and 2^-8 lies 14 bits
        // below it.
        assert_eq!(sum(3.125, 0.00390625), 100.0);
        assert_eq!(sum(3.125, 0.0078125), 100.0 + 0.0078125);
        // Factors of 1.5 have an exponent of zero, and so has their product: 2^-13 is still added.
        let tail = 2.0f32.powi(-13);
        assert_eq!(fp8_accumulate(e4m3, tail, [(1.5, 1.5), (-1.0, 1.0)].into_iter()), 1.25 + tail);
        assert_eq!(fp8_accumulate(e4m3, tail, [(2.0, 1.0), (-1.0, 1.0)].into_iter()), 1.0);
        assert!(sum(f32::NAN, 1.0).is_nan() && sum(1.0, f32::NAN).is_nan());
    }

    /// Subnormals have the exponent of the smallest normal number of their type: 2^-9 is subnormal
    /// in e4m3 and normal in e5m2.
    #[test]
    fn fp8_sums_know_the_smallest_exponent_of_a_type() {
        let power = |exponent: i32| 2.0f32.powi(exponent);
        let (e4m3, e5m2) = (Element::E4M3, Element::E5M2);
        // The type, a factor, and the last bit that is kept beside its square.
        let cases = [
            ([e4m3, e4m3], power(-9), -12 - 13),
            ([e5m2, e4m3], power(-9), -15 - 13),
            ([e4m3, e5m2], power(-9), -15 - 13),
            ([e5m2, e5m2], power(-9), -18 - 13),
            ([e5m2, e5m2], power(-14), -28 - 13),
            ([e5m2, e5m2], power(-16), -28 - 13),
        ];
        for (types, factor, last) in cases {
            let beside = |old: f32| fp8_accumulate(types, old, [(factor, factor)].into_iter());
            let product = factor * factor;
            assert_eq!(beside(power(last)), product + power(last), "{types:?}, {factor}");
            assert_eq!(beside(power(last - 1)), product, "{types:?}, {factor}");
        }
    }

    #[test]
    fn products_multiply() {
        let a = [1.0, 2.0, 3.0, 4.0];
        let b = [5.0, 6.0, 7.0, 8.0];
        assert_eq!(multiply(&a, &b, 2, 2), [19.0, 22.0, 43.0, 50.0]);
    }
}
