//! One row of attention in f64.

use super::{RowInputs, dot};

/// Computes the row in two passes over the scores: the maximum, then the exponentials. Returns the
/// log-sum-exp.
pub(super) fn row(inputs: RowInputs<'_>, output: &mut [f64]) -> f64 {
    let RowInputs { query, keys, values, first, rule, mut functions, sink, .. } = inputs;
    let query: Vec<f64> = query.iter().copied().map(f64::from).collect();
    let sink = f64::from(sink);
    let keys = keys.chunks_exact(query.len()).enumerate();
    let scores = keys.map(|(index, key)| {
        let (key, product) = (first + index, dot(&query, key) * inputs.key_factors[index]);
        functions.sees(key).then(|| functions.score(key, rule.score(product, key)))
    });
    // A key that a mask function hides has no score.
    let scores: Vec<Option<f64>> = scores.collect();
    let maximum = scores.iter().flatten().copied().fold(sink, f64::max);
    let shift = if maximum == f64::NEG_INFINITY { 0.0 } else { maximum };
    let mut sum = (sink - shift).exp();
    output.fill(0.0);
    let values = values.chunks_exact(output.len()).zip(inputs.value_factors);
    for (score, (value, factor)) in scores.iter().zip(values) {
        let Some(score) = score else { continue };
        let weight = (score - shift).exp();
        sum += weight;
        let weight = weight * factor;
        for (to, from) in output.iter_mut().zip(value) {
            *to += weight * f64::from(*from);
        }
    }
    if sum == 0.0 {
        output.fill(0.0);
        return f64::NEG_INFINITY;
    }
    for to in output.iter_mut() {
        *to /= sum;
    }
    maximum + sum.ln()
}
