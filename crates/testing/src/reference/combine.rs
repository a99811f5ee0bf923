//! Partial results of attention, put together.

use flashcore::Shape;

/// What partial results give together.
#[derive(Debug, Clone, PartialEq)]
pub struct Combined {
    /// The outputs, in the order of a contiguous tensor.
    pub output: Vec<f64>,
    /// The sum of the magnitudes of what was added to each output.
    pub magnitude: Vec<f64>,
    /// The log-sum-exps, in the order (batch, heads, length).
    pub lse: Vec<f64>,
}

/// Combines partial results of this shape: each its outputs and its log-sum-exps, in the orders of
/// [`Combined`].
pub fn combined(shape: Shape, parts: &[(&[f64], &[f64])]) -> Combined {
    let rows = shape.batch * shape.heads * shape.length;
    let mut output = vec![0.0; rows * shape.dim];
    let mut magnitude = output.clone();
    let mut lse = vec![f64::NEG_INFINITY; rows];
    for row in 0..rows {
        let log_sums = || parts.iter().map(|(_, lse)| lse[row]);
        if log_sums().all(|log_sum| log_sum == f64::NEG_INFINITY) {
            continue;
        }
        let top = log_sums().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = log_sums().map(|log_sum| (log_sum - top).exp()).sum();
        lse[row] = top + total.ln();
        let first = vector(shape, row) * shape.dim;
        for ((part, _), log_sum) in parts.iter().zip(log_sums()) {
            let weight = (log_sum - top).exp() / total;
            for at in first..first + shape.dim {
                let value = weight * part[at];
                output[at] += value;
                magnitude[at] += value.abs();
            }
        }
    }
    Combined { output, magnitude, lse }
}

/// Returns the index among the vectors of a contiguous tensor of a row in the order (batch, heads,
/// length).
pub fn vector(shape: Shape, row: usize) -> usize {
    let (outer, query) = (row / shape.length, row % shape.length);
    (outer / shape.heads * shape.length + query) * shape.heads + outer % shape.heads
}
