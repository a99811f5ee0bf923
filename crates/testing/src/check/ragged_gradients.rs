//! Checks of gradients over ragged batches, each described by a seed.

use std::fmt;

use super::sequences::random_rules;
use super::{ExpectedGradients, GradientsOutcome};
use crate::rng::Rng;
use crate::scene::of_sequences;
use flashcore::random::mix;
use flashcore::serving::{Placement, Sequences};
use flashcore::{Backend, DType, Descales, Error, InputTensors, Problem, Shape, Tensor};

/// Sequences with their tensors and a gradient of their output, all determined by a seed.
#[derive(Debug)]
pub struct RaggedGradients {
    seed: u64,
    sequences: Sequences,
    tensors: InputTensors,
    output_gradient: Tensor,
    /// Whether the log-sum-exps have a gradient.
    lse_gradient: bool,
}

const DIMS: [(usize, usize); 8] =
    [(64, 64), (64, 64), (128, 128), (128, 128), (96, 96), (40, 72), (128, 64), (192, 128)];

/// Lengths around the edges of tiles of 64 and of 128.
const EDGES: [usize; 9] = [0, 1, 63, 64, 65, 127, 128, 129, 257];

impl RaggedGradients {
    /// Creates the case of a seed: packed sequences, some of them empty, with gaps between them or
    /// with as many keys as queries; padded ones; left padding, windows, chunks, softcaps, slopes,
    /// sinks and grouped heads. Rows that belong to no sequence are NaN.
    pub fn random(dtype: DType, seed: u64) -> Result<Self, Error> {
        let mut rng = Rng::new(mix(seed ^ 0x6a66_ed00));
        let batch = rng.choose(&[1, 2, 3, 5, 9, 33, 70]);
        let kv_heads = rng.choose(&[1, 1, 2]);
        let group = rng.choose(&[1, 1, 2, 3]);
        let (dim, value_dim) = rng.choose(&DIMS);
        let most = if batch > 9 { 40 } else { 300 };
        let length = |rng: &mut Rng| match rng.below(3) {
            0 => rng.choose(&EDGES).min(most),
            _ => rng.below(most),
        };
        let queries: Vec<usize> = (0..batch).map(|_| length(&mut rng)).collect();
        let keys = match rng.one_in(2) {
            true => queries.clone(),
            false => (0..batch).map(|_| length(&mut rng)).collect(),
        };
        let problem = random_rules(&mut rng, [batch, group, kv_heads], [dim, value_dim], dtype, 40);
        let (queries, query) = place(&mut rng, queries, kv_heads * group, dim);
        let (mut keys, key) = place(&mut rng, keys, kv_heads, dim);
        if rng.one_in(5) {
            let skipped = keys.ends().to_vec().iter().map(|end| rng.below(end + 1)).collect();
            keys = keys.with_left_padding(skipped);
        }
        let sequences = Sequences::new(problem, queries, keys)?;
        let mut single = sequences.problem().clone();
        (single.query_length, single.key_length) = (1, 1);
        let extras = InputTensors::random(&single, seed)?;
        let random = |shape: Shape, of: &Placement, stream: u64| {
            let all = Tensor::random(dtype, shape, seed.wrapping_mul(5) + stream)?;
            of_sequences(&all, of)
        };
        let with_values = |shape: Shape| Shape { dim: value_dim, ..shape };
        let tensors = InputTensors {
            query: random(query, sequences.queries(), 0)?,
            key: random(key, sequences.keys(), 1)?,
            value: random(with_values(key), sequences.keys(), 2)?,
            slopes: extras.slopes,
            sinks: extras.sinks,
            descales: Descales::default(),
        };
        let output_gradient = random(with_values(query), sequences.queries(), 3)?;
        let lse_gradient = rng.one_in(4);
        Ok(RaggedGradients { seed, sequences, tensors, output_gradient, lse_gradient })
    }

    /// Returns the backward problem of the case.
    pub fn problem(&self) -> Result<Problem, Error> {
        let mut problem = self.sequences.over(self.tensors.inputs())?.0.backward();
        problem.lse_gradient = self.lse_gradient;
        Ok(problem)
    }

    /// Runs the forward pass of the back end, then a kernel for gradients twice, and judges it.
    pub fn check(&self, backend: &dyn Backend, kernel: &str) -> Result<GradientsOutcome, Error> {
        let (problem, inputs) = (self.problem()?, self.sequences.over(self.tensors.inputs())?.1);
        let gradient = self.output_gradient.clone();
        ExpectedGradients::new(&problem, inputs, gradient, self.seed)?.check(backend, kernel)
    }
}

/// Places sequences packed, with or without gaps, or padded.
fn place(rng: &mut Rng, lengths: Vec<usize>, heads: usize, dim: usize) -> (Placement, Shape) {
    let gaps: &[usize] = match rng.below(4) {
        0 => {
            let longest = lengths.iter().copied().max().unwrap_or(0).max(1);
            let shape = Shape::new(lengths.len(), longest, heads, dim);
            return (Placement::padded(lengths), shape);
        }
        1 => &[0, 0, 3],
        _ => &[0],
    };
    let mut starts = vec![0];
    for length in &lengths {
        starts.push(starts[starts.len() - 1] + length + rng.choose(gaps));
    }
    let rows = starts[lengths.len()].max(1);
    (Placement::packed(starts).with_lengths(lengths), Shape::new(1, rows, heads, dim))
}

impl fmt::Display for RaggedGradients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [queries, keys] = [self.sequences.queries(), self.sequences.keys()];
        let lengths = |of: &Placement| -> Vec<usize> {
            (0..of.sequences()).map(|it| of.length(it)).collect()
        };
        write!(f, "{}, queries {:?}", self.sequences.problem(), lengths(queries))?;
        write!(f, ", keys {:?}, seed {}", lengths(keys), self.seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore::CpuBackend;

    #[test]
    fn the_cpu_is_right_about_random_batches() {
        for seed in 0..30 {
            for dtype in [DType::F16, DType::BF16] {
                let case = RaggedGradients::random(dtype, seed).unwrap();
                let outcome = case.check(&CpuBackend::new(), "backward").unwrap();
                assert!(outcome.passed, "{case}: {outcome}");
            }
        }
    }
}
