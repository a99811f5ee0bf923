//! One row of the plain algorithm in the problem's own precision.
//!
//! This is what a framework computes without a fused kernel: scores are stored in the element type,
//! the softmax is computed in f32 and stored in the element type, the second product is summed in
//! f32 and stored in the element type. Where the second product multiplies 8-bit numbers,
//! exponentials are stored in 8 bits, and scores are accumulated as the tensor cores do
//! ([`sim::fp8_accumulate`]), since no kernel can recover what they lose there. Where only keys and
//! values have 8 bits, their descaled values are stored in the element type first. The log-sum-exp
//! is f32 for every element type, and its baseline comes from the scores before they are rounded.

use flashcore::DType;

use super::{RowInputs, dot};

pub(super) fn row(inputs: RowInputs<'_>, output: &mut [f64]) -> f64 {
    let RowInputs { query, keys, values, first, rule, mut functions, sink, dtype, .. } = inputs;
    let round = |value: f32| dtype.round(f64::from(value)) as f32;
    let types = inputs.factor_types.map(DType::element);
    let dot = |a: &[f32], b: &[f32]| match inputs.small_probabilities {
        true => fp8_dot(types, a, b),
        false => dot(a, b),
    };
    let score = |(index, key): (usize, &[f32])| {
        let factor = inputs.key_factors[index] as f32;
        let product = match inputs.widened {
            true => dot(query, &key.iter().map(|it| round(it * factor)).collect::<Vec<f32>>()),
            false => dot(query, key) * factor,
        };
        let key = first + index;
        match functions.sees(key) {
            true => functions.score(key, rule.score(f64::from(product), key)) as f32,
            false => f32::NEG_INFINITY,
        }
    };
    let exact: Vec<f32> = keys.chunks_exact(query.len()).enumerate().map(score).collect();
    // A score beyond f16's range stays unrounded: an infinite one would turn the row into NaN, and
    // a baseline of NaN measures nothing.
    let stored: Vec<f32> = exact
        .iter()
        .map(|score| {
            let rounded = round(*score);
            if rounded.is_infinite() { *score } else { rounded }
        })
        .collect();
    let (_, exact_sum, exact_maximum) = softmax(&exact, sink);
    let (weights, sum, _) = softmax(&stored, sink);
    if exact_sum == 0.0 {
        output.fill(0.0);
        return f64::NEG_INFINITY;
    }
    let mut accumulator = vec![0.0f32; output.len()];
    let values = values.chunks_exact(output.len()).zip(inputs.value_factors);
    for (index, (weight, (value, factor))) in weights.iter().zip(values).enumerate() {
        if !functions.sees(first + index) {
            continue;
        }
        let probability = match inputs.small_probabilities {
            true => small(*weight) / sum,
            false => round(weight / sum),
        };
        let factor = *factor as f32;
        for (to, from) in accumulator.iter_mut().zip(value) {
            let product = match inputs.widened {
                true => probability * round(from * factor),
                false => probability * factor * from,
            };
            *to += product;
        }
    }
    for (to, from) in output.iter_mut().zip(accumulator) {
        *to = f64::from(round(from));
    }
    f64::from(exact_maximum + exact_sum.ln())
}

/// Computes a dot product of 8-bit numbers in steps of 32, with the tensor cores' accumulation.
fn fp8_dot(types: [ptx::Element; 2], a: &[f32], b: &[f32]) -> f32 {
    let steps = a.chunks(32).zip(b.chunks(32));
    steps.fold(0.0, |sum, (a, b)| {
        sim::fp8_accumulate(types, sum, a.iter().copied().zip(b.iter().copied()))
    })
}

/// Rounds an exponential relative to the maximum to 8 bits, scaled so that 1 becomes 256, the
/// largest power of two that e4m3 has.
fn small(weight: f32) -> f32 {
    DType::E4M3.round(f64::from(weight * 256.0)) as f32 / 256.0
}

/// Returns the exponentials relative to the maximum, their sum including the sink's, and the
/// maximum.
fn softmax(scores: &[f32], sink: f32) -> (Vec<f32>, f32, f32) {
    let maximum = scores.iter().copied().fold(sink, f32::max);
    let shift = if maximum == f32::NEG_INFINITY { 0.0 } else { maximum };
    let weights: Vec<f32> = scores.iter().map(|score| (score - shift).exp()).collect();
    let sum = weights.iter().sum::<f32>() + (sink - shift).exp();
    (weights, sum, maximum)
}
