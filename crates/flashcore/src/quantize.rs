//! Quantization to 8 bits and back, with descale factors per tensor, head, or token and head.
//!
//! A descale factor is the largest magnitude of the values that share it, divided by the largest
//! value of the 8-bit type, so that none saturates. A value is multiplied by the reciprocal of its
//! factor and rounded to the nearest 8-bit number, which represents that number times the factor.
//!
//! ```
//! use flashcore::quantize::{Granularity, quantize};
//! use flashcore::{DType, Descales, InputTensors, Inputs, Problem, attend};
//!
//! let problem = Problem::new(1, 8, 100, 64).with_dtype(DType::BF16);
//! let wide = InputTensors::random(&problem, 0)?;
//! let key = quantize(&wide.key, DType::E4M3, Granularity::Token)?;
//! let value = quantize(&wide.value, DType::E4M3, Granularity::Head)?;
//!
//! let descales =
//!     Descales { key: Some(&key.descale), value: Some(&value.descale), ..Descales::default() };
//! let inputs = Inputs::new(&wide.query, &key.tensor, &value.tensor).with_descales(descales);
//! let (exact, found) = (attend(&problem, wide.inputs())?, attend(&inputs.problem()?, inputs)?);
//! let error = exact.output.to_f32().into_iter().zip(found.output.to_f32());
//! assert!(error.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) < 0.1);
//! # Ok::<(), flashcore::Error>(())
//! ```

pub use kernels::cache::LEAST_MAGNITUDE;

use crate::dtype::DType;
use crate::error::Error;
use crate::inputs::InputError;
use crate::tensor::{Layout, Shape, Strides, Tensor};

/// Which values share a descale factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// All values of a tensor.
    Tensor,
    /// The values of a head, in all batch entries.
    Head,
    /// The values of a head in one batch entry.
    SequenceHead,
    /// The values of a head at one position: one vector.
    Token,
}

/// An 8-bit tensor with its descale factors.
#[derive(Debug, Clone)]
pub struct Quantized {
    /// The 8-bit numbers, contiguous.
    pub tensor: Tensor,
    /// The factors: (batch, 1, heads, 1) with strides of zero where they are shared, or (batch,
    /// length, heads, 1) where they are per token.
    pub descale: Tensor,
}

/// Returns the factor for values of up to this magnitude.
pub fn factor(magnitude: f32, dtype: DType) -> f32 {
    magnitude.max(LEAST_MAGNITUDE) * (1.0 / dtype.max() as f32)
}

/// Returns the factor for some values.
pub fn row_factor(numbers: &[f32], dtype: DType) -> f32 {
    factor(magnitude(numbers), dtype)
}

/// Returns the largest magnitude of some values, ignoring NaN.
fn magnitude(numbers: &[f32]) -> f32 {
    numbers.iter().fold(0.0, |most, number| number.abs().max(most))
}

/// Divides values by their factor, in place, before they are rounded to 8 bits.
pub fn divide(numbers: &mut [f32], factor: f32) {
    let reciprocal = 1.0 / factor;
    numbers.iter_mut().for_each(|number| *number *= reciprocal);
}

/// Quantizes a tensor, with factors computed from its values.
pub fn quantize(
    tensor: &Tensor,
    dtype: DType,
    granularity: Granularity,
) -> Result<Quantized, Error> {
    let heads = tensor.shape().heads;
    quantize_groups(tensor, dtype, granularity, heads)
}

/// Like [`quantize`], for queries, whose heads share the factors of `kv_heads` key heads.
pub fn quantize_groups(
    tensor: &Tensor,
    dtype: DType,
    granularity: Granularity,
    kv_heads: usize,
) -> Result<Quantized, Error> {
    check_8_bits(dtype)?;
    let shape = tensor.shape();
    if kv_heads == 0 || !shape.heads.is_multiple_of(kv_heads) {
        let expected = Shape { heads: kv_heads, ..shape };
        return Err(InputError::Shape { tensor: "the tensor", given: shape, expected }.into());
    }
    let group = shape.heads / kv_heads;
    // Strides of the factors over (batch entry, position, head), and their number of positions.
    let (sizes, length) = match granularity {
        Granularity::Tensor => ([0, 0, 0], 1),
        Granularity::Head => ([0, 0, 1], 1),
        Granularity::SequenceHead => ([kv_heads, 0, 1], 1),
        Granularity::Token => ([shape.length * kv_heads, kv_heads, 1], shape.length),
    };
    let strides = Strides { batch: sizes[0], length: sizes[1], heads: sizes[2] };
    let layout = Layout::strided(Shape { length, heads: kv_heads, dim: 1, ..shape }, strides)?;
    let place = |[batch, position, head]: [usize; 3]| {
        batch * sizes[0] + position * sizes[1] + head / group * sizes[2]
    };
    let mut factors = vec![0.0f32; layout.span()];
    let mut row = vec![0.0; shape.dim];
    for at in shape.vectors() {
        tensor.head(at[0], at[2]).read(at[1], &mut row);
        factors[place(at)] = factors[place(at)].max(magnitude(&row));
    }
    factors.iter_mut().for_each(|it| *it = factor(*it, dtype));
    let mut small = Tensor::zeros(dtype, shape)?;
    for at in shape.vectors() {
        tensor.head(at[0], at[2]).read(at[1], &mut row);
        divide(&mut row, factors[place(at)]);
        small.set_row(at, &row);
    }
    Ok(Quantized { tensor: small, descale: Tensor::new(layout, factors)? })
}

/// Returns the values that an 8-bit tensor represents, in a wider type.
pub fn dequantize(tensor: &Tensor, descale: &Tensor, dtype: DType) -> Result<Tensor, Error> {
    let (shape, of) = (tensor.shape(), descale.shape());
    let fits = of.batch == shape.batch
        && (of.length == 1 || of.length == shape.length)
        && of.heads > 0
        && shape.heads.is_multiple_of(of.heads)
        && of.dim == 1;
    if !fits {
        let expected = Shape { dim: 1, ..shape };
        return Err(InputError::Shape { tensor: "the descale", given: of, expected }.into());
    }
    let mut wide = Tensor::zeros(dtype, shape)?;
    let (mut row, mut factor) = (vec![0.0; shape.dim], [0.0]);
    for [batch, position, head] in shape.vectors() {
        tensor.head(batch, head).read(position, &mut row);
        let position_of = if of.length == 1 { 0 } else { position };
        descale.head(batch, head * of.heads / shape.heads).read(position_of, &mut factor);
        row.iter_mut().for_each(|number| *number *= factor[0]);
        wide.set_row([batch, position, head], &row);
    }
    Ok(wide)
}

/// Refuses types other than the 8-bit ones.
fn check_8_bits(given: DType) -> Result<(), InputError> {
    match given.is_8_bit() {
        true => Ok(()),
        false => {
            let (tensor, expected) = ("the quantized tensor", DType::E4M3);
            Err(InputError::DType { tensor, given, expected })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_the_largest_magnitude_of_what_they_are_for() {
        let shape = Shape::new(2, 3, 4, 8);
        let numbers = |[batch, position, head, element]: [usize; 4]| {
            let magnitude = ((batch * 3 + position) * 4 + head + 1) as f32;
            if element == 5 { -magnitude } else { magnitude / 3.0 }
        };
        let tensor = Tensor::from_fn(DType::F32, shape, numbers).unwrap();
        for (granularity, largest) in [
            (Granularity::Tensor, [24.0, 24.0]),
            (Granularity::Head, [21.0, 24.0]),
            (Granularity::SequenceHead, [9.0, 24.0]),
            (Granularity::Token, [1.0, 24.0]),
        ] {
            for dtype in [DType::E4M3, DType::E5M2] {
                let found = quantize(&tensor, dtype, granularity).unwrap();
                let factors = found.descale.to_f32();
                let ends = [factors[0], *factors.last().unwrap()];
                assert_eq!(ends, largest.map(|it: f32| factor(it, dtype)), "{granularity:?}");
                // The largest value is preserved, and nothing is off by more than half a step.
                let wide = dequantize(&found.tensor, &found.descale, DType::F32).unwrap();
                for (exact, found) in tensor.to_f32().into_iter().zip(wide.to_f32()) {
                    let step = dtype.epsilon() as f32 / 2.0;
                    assert!((exact - found).abs() <= step * exact.abs() * 1.001, "{exact} {found}");
                }
            }
        }
    }

    /// The steps of an integer type are all of one size: errors are at most half a factor.
    #[test]
    fn integers_are_whole_factors() {
        let tensor = Tensor::random(DType::F32, Shape::new(2, 5, 3, 64), 1).unwrap();
        let found = quantize(&tensor, DType::Int8, Granularity::Token).unwrap();
        let wide = dequantize(&found.tensor, &found.descale, DType::F32).unwrap();
        let mut largest = 0.0f32;
        for [batch, position, head] in tensor.shape().vectors() {
            let row = tensor.head(batch, head).row(position);
            let factor = found.descale.head(batch, head).row(position)[0];
            assert_eq!(factor, magnitude(&row) * (1.0 / 127.0));
            for (exact, found) in row.iter().zip(wide.head(batch, head).row(position)) {
                assert!((exact - found).abs() <= 0.5001 * factor, "{exact} {found}");
                largest = largest.max((exact - found).abs() / factor);
            }
            assert_eq!(magnitude(&found.tensor.head(batch, head).row(position)), 127.0);
        }
        assert!(largest > 0.45, "{largest}");
    }

    #[test]
    fn queries_share_the_factors_of_key_heads() {
        let tensor = Tensor::random(DType::F32, Shape::new(2, 5, 6, 8), 1).unwrap();
        let found = quantize_groups(&tensor, DType::E4M3, Granularity::SequenceHead, 2).unwrap();
        assert_eq!(found.descale.shape(), Shape::new(2, 1, 2, 1));
        let third = (0..3).flat_map(|head| (0..5).map(move |position| (position, head)));
        let largest = third.map(|(position, head)| magnitude(&tensor.head(0, head).row(position)));
        let largest = largest.fold(0.0, f32::max);
        assert_eq!(found.descale.to_f32()[0], factor(largest, DType::E4M3));
        assert!(quantize_groups(&tensor, DType::E4M3, Granularity::Head, 4).is_err());
        assert!(quantize(&tensor, DType::F16, Granularity::Head).is_err());
    }

    #[test]
    fn zeros_and_what_is_not_finite_have_a_meaning() {
        let numbers = [0.0, 0.0, f32::NAN, 2.0, f32::INFINITY, 1.0];
        let tensor = Tensor::from_f32(DType::F32, Shape::new(1, 3, 1, 2), &numbers).unwrap();
        let found = quantize(&tensor, DType::E4M3, Granularity::Token).unwrap();
        let wide = dequantize(&found.tensor, &found.descale, DType::F32).unwrap().to_f32();
        assert_eq!(wide[..2], [0.0, 0.0]);
        assert!(wide[2].is_nan() && (wide[3] - 2.0).abs() < 1e-6);
        assert!(wide[4].is_nan());
    }
}
