//! Combining attention over parts of the keys, weighted by the log-sum-exps of the parts.

use crate::backend::{Cancellation, Output, filled};
use crate::dtype::DType;
use crate::error::Error;
use crate::inputs::InputError;
use crate::tensor::{Tensor, TensorView};

/// Computes attention over all keys from attention over parts of them: a shared prefix and what
/// follows it, levels of a cascade, slices of a context on several devices.
///
/// Outputs must have the same shape and element type, which are also the result's; log-sum-exps are in the order (batch, heads,
/// length). A row that no part saw has an output of zeros and a log-sum-exp of minus infinity; a
/// log-sum-exp of plus infinity or NaN makes its row NaN.
///
/// ```
/// use flashcore::serving::combine;
/// use flashcore::{DType, Shape, Tensor};
///
/// let part = |value| Tensor::from_fn(DType::F32, Shape::new(1, 1, 1, 2), move |_| value);
/// // Three keys in one part, one in the other, all of the same score.
/// let (first, second) = (part(1.0)?, part(5.0)?);
/// let (output, lse) = combine(&[(first.view(), &[3f32.ln()]), (second.view(), &[0.0])])?;
/// assert!((output.to_f32()[0] - 2.0).abs() < 1e-6 && (lse[0] - 4f32.ln()).abs() < 1e-6);
/// # Ok::<(), flashcore::Error>(())
/// ```
pub fn combine(parts: &[(TensorView<'_>, &[f32])]) -> Result<(Tensor, Vec<f32>), Error> {
    let dtype = parts.first().map_or(DType::F32, |(part, _)| part.dtype());
    combine_until(parts, dtype, &Cancellation::new())
}

/// Like [`combine`], but the output has the given element type, and the call can be cancelled.
/// Sums are in f32: the output is rounded once.
pub fn combine_until(
    parts: &[(TensorView<'_>, &[f32])],
    output: DType,
    cancellation: &Cancellation,
) -> Result<(Tensor, Vec<f32>), Error> {
    let Some(((first, _), others)) = parts.split_first() else {
        return Err(InputError::Missing { tensor: "parts" }.into());
    };
    let (shape, dtype) = (first.shape(), first.dtype());
    for (tensor, _) in others {
        if tensor.shape() != shape {
            let (given, expected) = (tensor.shape(), shape);
            return Err(InputError::Shape { tensor: "part", given, expected }.into());
        }
        if tensor.dtype() != dtype {
            let (given, expected) = (tensor.dtype(), dtype);
            return Err(InputError::DType { tensor: "part", given, expected }.into());
        }
    }
    let rows = shape.batch.saturating_mul(shape.heads).saturating_mul(shape.length);
    for (_, lse) in parts {
        if lse.len() != rows {
            let (given, expected) = (lse.len(), rows);
            return Err(InputError::Length { tensor: "log-sum-exp", given, expected }.into());
        }
    }
    let mut merged = Tensor::zeros(output, shape)?;
    let mut merged_lse = filled("the log-sum-exp", rows, f32::NEG_INFINITY)?;
    let (mut sums, mut row) = (vec![0f32; shape.dim], vec![0f32; shape.dim]);
    for index in 0..rows {
        cancellation.check()?;
        let (position, head) = (index % shape.length, index / shape.length % shape.heads);
        let batch = index / shape.length / shape.heads;
        let top = parts.iter().map(|(_, lse)| lse[index]).fold(f32::NEG_INFINITY, f32::max);
        if parts.iter().all(|(_, lse)| lse[index] == f32::NEG_INFINITY) {
            continue;
        }
        sums.fill(0.0);
        let mut total = 0.0;
        for (tensor, lse) in parts {
            let weight = (lse[index] - top).exp();
            // The output of a part that saw no key is undefined.
            if weight == 0.0 {
                continue;
            }
            total += weight;
            tensor.head(batch, head).read(position, &mut row);
            for (sum, value) in sums.iter_mut().zip(&row) {
                *sum += weight * value;
            }
        }
        sums.iter_mut().for_each(|sum| *sum /= total);
        merged.set_row([batch, position, head], &sums);
        merged_lse[index] = top + total.ln();
    }
    Ok((merged, merged_lse))
}

impl Output {
    /// Returns output and log-sum-exps as [`combine`] takes them.
    pub fn part(&self) -> (TensorView<'_>, &[f32]) {
        (self.output.view(), &self.lse)
    }
}
