//! What the tensor cores compute, and how they find their operands.
//!
//! A shared-memory operand is found from the 64 bits of its descriptor alone,
//! as the hardware does: nothing here asks the tile vocabulary, so that a
//! wrong descriptor gives a wrong product. The canonical layouts, in chunks of
//! 16 bytes, with `W` the width of the swizzle:
//!
//! - inner extent contiguous, no swizzle: row `r`, chunk `c` of the 32 bytes at
//!   `r / 8 * stride + c * leading + r % 8 * 16`;
//! - inner extent contiguous, swizzled: at `r / 8 * stride + r % 8 * W + 16 c`;
//! - outer extent contiguous, no swizzle: inner row `k`, chunk `c` of the outer
//!   extent at `c * stride + k / 8 * leading + k % 8 * 16`;
//! - outer extent contiguous, swizzled: at
//!   `16 c / W * leading + k / 8 * stride + k % 8 * W + 16 c % W`.
//!
//! The swizzle is applied to the final address. Products are exact, and each
//! instruction's sum is rounded in `f32`; the hardware keeps a few bits fewer
//! or more, so results agree to about 1e-6, not to the bit. Of 8-bit products it
//! keeps far fewer: [`EightBitSums`](crate::EightBitSums) has a model of that.

use ptx::{Element, Swizzle};

use crate::copy::swizzled;
use crate::float;

/// A shared-memory descriptor, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Where the operand starts.
    pub start: u32,
    /// The leading-dimension byte offset.
    pub leading: u32,
    /// The stride-dimension byte offset.
    pub stride: u32,
    /// Which row of the swizzle's pattern the start lies in.
    pub base_offset: u32,
    /// How chunks are permuted.
    pub swizzle: Swizzle,
    /// Bits that must be zero.
    pub reserved: u64,
}

impl Descriptor {
    /// Reads the fields of a descriptor.
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

    /// The addresses of the operand's 16-byte chunks: 32 bytes of inner extent
    /// by `rows` of outer extent. With the inner extent contiguous, row by row;
    /// otherwise (16-bit elements) inner row by inner row.
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
        Element::F32 => {
            out.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
        }
    }
}

/// The elements packed in a register.
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
        Element::F32 => [f32::from_bits(word), 0., 0., 0.],
    }
}

/// `rows x inner` times `inner x columns`, both row by row.
pub(crate) fn multiply(a: &[f32], b: &[f32], inner: usize, columns: usize) -> Vec<f32> {
    let rows = a.len() / inner;
    let mut d = vec![0.0f32; rows * columns];
    // Four inner rows at a time: the sums are read and written a quarter as often.
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

/// What lies this many bits below the largest exponent is still added.
const NARROW_BITS: i32 = 13;

/// The sum of `old` and the products of a step, as Hopper is said to add products of 8-bit
/// numbers: a model.
///
/// The report on DeepSeek-V3 (arXiv 2412.19437, 3.5.2) says that Hopper's tensor cores align the 32
/// products of a step to their largest exponent, use the highest 14 bits of each, and keep 14 bits
/// where they add to registers. Here the accumulator is one more number among the 32. With it, a
/// simple model of FlashAttention-3's loop has relative errors of 0.6e-2, 0.11 and 0.46 over 1k,
/// 16k and 128k keys, where 0.9e-2, 0.16 and 0.51 were measured on an H200: right in kind and in
/// size, not to the bit.
///
/// ```
/// // 8192 leaves nothing of a half, and one of one and a half.
/// assert_eq!(flashcore_sim::narrow_sum(8192.0, [0.5; 32].into_iter()), 8192.0);
/// assert_eq!(flashcore_sim::narrow_sum(8192.0, [1.5; 32].into_iter()), 8192.0 + 32.0);
/// ```
pub fn narrow_sum(old: f32, products: impl Iterator<Item = f64> + Clone) -> f32 {
    let old = old as f64;
    let largest = products.clone().fold(old.abs(), |top, product| top.max(product.abs()));
    let sum = products.clone().fold(old, |sum, product| sum + product);
    // Not a number, infinite or nothing at all: there is nothing to align.
    if !largest.is_normal() || sum.is_nan() {
        return sum as f32;
    }
    let unit = (exponent(largest) - NARROW_BITS) as f64;
    let (grid, inverse) = (unit.exp2(), (-unit).exp2());
    let kept = |x: f64| (x * inverse).trunc();
    (products.fold(kept(old), |sum, product| sum + kept(product)) * grid) as f32
}

/// The same of matrices by rows: `old` plus `rows x inner` times `inner x columns`.
pub(crate) fn multiply_narrow(
    a: &[f32],
    b: &[f32],
    old: &[f32],
    inner: usize,
    columns: usize,
) -> Vec<f32> {
    let mut d = vec![0.0f32; old.len()];
    for (row, (a, d)) in a.chunks_exact(inner).zip(d.chunks_exact_mut(columns)).enumerate() {
        for (column, d) in d.iter_mut().enumerate() {
            let products = (0..inner).map(|k| a[k] as f64 * b[k * columns + column] as f64);
            *d = narrow_sum(old[row * columns + column], products);
        }
    }
    d
}

/// The exponent of a normal number.
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
        // Two independent descriptions of the same thing must agree.
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

    /// What is small beside the accumulator is lost, whole or in part.
    #[test]
    fn narrow_sums_lose_what_is_small() {
        let (one, inner) = ([1.0; 32], 32);
        let sum = |b: f32, old: f32| multiply_narrow(&one, &[b; 32], &[old], inner, 1)[0];
        assert_eq!(sum(1.0, 0.0), 32.0);
        assert_eq!(sum(1.0, 1024.0), 1056.0);
        // A unit of 2^(14 - 13) = 2 leaves nothing of 1.5, and 2 of 3.
        assert_eq!(sum(1.5, 16384.0), 16384.0);
        assert_eq!(sum(3.0, 16384.0), 16384.0 + 64.0);
        assert_eq!(sum(-3.0, 16384.0), 16384.0 - 64.0);
        assert_eq!(sum(0.0, 0.0), 0.0);
        assert!(sum(f32::NAN, 1.0).is_nan() && sum(1.0, f32::NAN).is_nan());
    }

    #[test]
    fn products_multiply() {
        let a = [1.0, 2.0, 3.0, 4.0];
        let b = [5.0, 6.0, 7.0, 8.0];
        assert_eq!(multiply(&a, &b, 2, 2), [19.0, 22.0, 43.0, 50.0]);
    }
}
