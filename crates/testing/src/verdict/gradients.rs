//! The rule for gradients: each is compared with the reference by its own baseline.

use std::fmt;

use serde::Serialize;

use super::{ComparedValue, Comparison, Judge};
use crate::reference::{Gradients, HeadGradients, Noise, Row};
use flashcore::serving::{Placement, Sequences};
use flashcore::{DType, InputError, Inputs, Problem, Shape, Tensor};

/// The gradients to judge; absent ones are not judged.
#[derive(Debug, Clone, Copy, Default)]
pub struct GradientsToJudge<'a> {
    /// dQ, a tensor like the queries.
    pub query: Option<&'a Tensor>,
    /// dK.
    pub key: Option<&'a Tensor>,
    /// dV.
    pub value: Option<&'a Tensor>,
    /// The gradients of the sinks, one for each query head. Judged only if the reference has every
    /// head.
    pub sinks: Option<&'a [f32]>,
    /// Delta, the row sums of dO * O, in the order (batch, query heads, query length).
    pub delta: Option<&'a [f32]>,
}

/// The verdict on gradients, with their errors.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GradientsVerdict {
    /// Whether every comparison passes.
    pub passed: bool,
    /// The comparisons, by name.
    pub comparisons: Vec<(&'static str, Comparison)>,
    /// The number of key/value heads that were checked.
    pub heads: usize,
    /// The number of key/value heads of the problem, over all sequences.
    pub total_heads: usize,
}

impl GradientsVerdict {
    /// Returns the comparison of one gradient.
    pub fn of(&self, name: &str) -> Option<&Comparison> {
        self.comparisons.iter().find(|(of, _)| *of == name).map(|(_, comparison)| comparison)
    }
}

/// Judges gradients by a reference and a baseline over the same heads.
///
/// A gradient passes as an output does: its error is at most twice the largest error of the plain
/// algorithm on what the forward pass saved, plus the rounding of the answer. The rounding includes
/// what f32 sums leave where they should cancel: two roundings of the numbers that do ([`Noise`]).
///
/// ```
/// use flashcore::{Backward, InputTensors, Problem, Tensor};
/// use flashcore_testing::compare_gradients;
/// use flashcore_testing::reference::{self, Heads};
/// use flashcore_testing::verdict::GradientsToJudge;
///
/// let problem = Problem::new(1, 2, 20, 16);
/// let tensors = InputTensors::random(&problem, 0)?;
/// let (inputs, heads) = (tensors.inputs(), Heads::all(&problem));
/// let gradient = Tensor::random(problem.dtype(), problem.output_shape(), 1)?;
/// let reference = reference::gradients(&problem, inputs, &gradient, &heads, None)?;
/// let (output, lse) = reference::saved(&problem, inputs)?;
/// let (output, output_gradient) = (output.view(), gradient.view());
/// let backward = Backward { inputs, output, lse: &lse, output_gradient, lse_gradient: None };
/// let baseline = reference::gradients_baseline(&problem, backward, &heads, None)?;
///
/// let zeros = Tensor::zeros(problem.dtype(), problem.key_shape())?;
/// let found = GradientsToJudge { key: Some(&zeros), ..GradientsToJudge::default() };
/// let verdict = compare_gradients(&problem, inputs, found, &reference, &baseline)?;
/// assert!(!verdict.passed, "{verdict}");
/// # Ok::<(), flashcore::Error>(())
/// ```
pub fn compare_gradients(
    problem: &Problem,
    inputs: Inputs<'_>,
    found: GradientsToJudge<'_>,
    reference: &Gradients,
    baseline: &Gradients,
) -> Result<GradientsVerdict, InputError> {
    let (given, expected) = (baseline.heads.len(), reference.heads.len());
    if given != expected {
        return Err(InputError::Length { tensor: "baseline", given, expected });
    }
    let comparisons = Judged::new(problem, inputs, reference, baseline).comparisons(found)?;
    Ok(GradientsVerdict {
        passed: comparisons.iter().all(|(_, comparison)| comparison.passed),
        comparisons,
        heads: reference.heads.len(),
        total_heads: problem.batch * problem.kv_heads,
    })
}

/// Returns the largest errors that pass in the gradients of queries, keys, values and sinks.
pub(crate) fn gradient_tolerances(
    problem: &Problem,
    inputs: Inputs<'_>,
    reference: &Gradients,
    baseline: &Gradients,
) -> [f64; 4] {
    let judged = Judged::new(problem, inputs, reference, baseline);
    let [query, key, value] =
        judged.parts().map(|part| judged.compare(&part, problem.dtype(), |_, _| ()).tolerance);
    let sinks = judged.sinks(&vec![0.0; problem.query_heads]);
    [query, key, value, sinks.map_or(0.0, |comparison| comparison.tolerance)]
}

struct Judged<'a> {
    sequences: Sequences,
    noise: Noise,
    largest_lse: f64,
    reference: &'a Gradients,
    baseline: &'a Gradients,
}

/// One gradient of a [`HeadGradients`].
struct Part<'a> {
    name: &'static str,
    noise: f64,
    /// The shape of the tensor that holds it.
    shape: Shape,
    placement: &'a Placement,
    /// The number of its heads for each key/value head.
    heads: usize,
    numbers: fn(&HeadGradients) -> &[f64],
}

impl<'a> Judged<'a> {
    fn new(
        problem: &Problem,
        inputs: Inputs<'_>,
        reference: &'a Gradients,
        baseline: &'a Gradients,
    ) -> Self {
        let heads = &reference.heads;
        Judged {
            sequences: Sequences::of(problem, inputs),
            noise: heads.iter().map(|head| head.noise).fold(Noise::default(), Noise::max),
            largest_lse: heads.iter().map(|head| head.largest_lse).fold(1.0, f64::max),
            reference,
            baseline,
        }
    }

    fn comparisons(
        &self,
        found: GradientsToJudge<'_>,
    ) -> Result<Vec<(&'static str, Comparison)>, InputError> {
        let mut comparisons = Vec::new();
        for (tensor, part) in [found.query, found.key, found.value].into_iter().zip(self.parts()) {
            let (name, expected) = (part.name, part.shape);
            let Some(tensor) = tensor else {
                continue;
            };
            if tensor.shape() != expected {
                let given = tensor.shape();
                return Err(InputError::Shape { tensor: name, given, expected });
            }
            let read = |[entry, position, head]: [usize; 3], values: &mut [f32]| {
                tensor.head(entry, head).read(position, values);
            };
            comparisons.push((name, self.compare(&part, tensor.dtype(), read)));
        }
        let problem = self.sequences.problem();
        if let Some(delta) = found.delta {
            expect_length("delta", delta.len(), problem.rows())?;
            comparisons.push(("delta", self.delta(delta)));
        }
        if let Some(sinks) = found.sinks {
            expect_length("gradient of the sinks", sinks.len(), problem.query_heads)?;
            comparisons.extend(self.sinks(sinks).map(|comparison| ("sinks", comparison)));
        }
        Ok(comparisons)
    }

    /// Returns the gradients that are tensors: dQ, dK and dV.
    fn parts(&self) -> [Part<'_>; 3] {
        let Noise { query, key, value, .. } = self.noise;
        let problem = self.sequences.problem();
        let (queries, keys) = (self.sequences.queries(), self.sequences.keys());
        [
            Part {
                name: "query",
                noise: query,
                shape: problem.query_shape(),
                placement: queries,
                heads: problem.group_size(),
                numbers: |head| &head.query,
            },
            Part {
                name: "key",
                noise: key,
                shape: problem.key_shape(),
                placement: keys,
                heads: 1,
                numbers: |head| &head.key,
            },
            Part {
                name: "value",
                noise: value,
                shape: problem.value_shape(),
                placement: keys,
                heads: 1,
                numbers: |head| &head.value,
            },
        ]
    }

    /// Compares what `read` returns for (batch entry, position, head) of a tensor.
    fn compare(
        &self,
        part: &Part<'_>,
        dtype: DType,
        read: impl Fn([usize; 3], &mut [f32]),
    ) -> Comparison {
        let mut judge = Judge::new(dtype);
        let dim = part.shape.dim;
        let mut values = vec![0.0; dim];
        for (reference, baseline) in self.reference.heads.iter().zip(&self.baseline.heads) {
            let batch = reference.sequence;
            let length = part.placement.length(batch);
            let references = (part.numbers)(reference).chunks_exact(dim);
            let baselines = (part.numbers)(baseline).chunks_exact(dim);
            for (index, (vector, baseline)) in references.zip(baselines).enumerate() {
                let head = reference.kv_head * part.heads + index / length;
                let (entry, position) = part.placement.locate(batch, index % length);
                read([entry, position, head], &mut values);
                let row = Row { batch, head, query: index % length };
                for element in 0..dim {
                    let (result, reference) = (f64::from(values[element]), vector[element]);
                    judge.look_at(
                        ComparedValue { row, element, result, reference },
                        baseline[element],
                    );
                }
            }
        }
        self.conclude(judge, dtype, part.noise)
    }

    fn delta(&self, found: &[f32]) -> Comparison {
        let problem = self.sequences.problem();
        let shape = Shape { dim: 1, ..problem.query_shape() };
        let part = Part {
            name: "delta",
            noise: self.noise.delta,
            shape,
            placement: self.sequences.queries(),
            heads: problem.group_size(),
            numbers: |head| &head.delta,
        };
        self.compare(&part, DType::F32, |[entry, position, head], values| {
            values[0] = found[(entry * shape.heads + head) * shape.length + position];
        })
    }

    fn sinks(&self, found: &[f32]) -> Option<Comparison> {
        let problem = self.sequences.problem();
        let reference = self.reference.sinks(problem)?;
        let baseline = self.baseline.sinks(problem)?;
        let mut judge = Judge::new(DType::F32);
        for (head, result) in found.iter().enumerate() {
            let row = Row { batch: 0, head, query: 0 };
            let (result, reference) = (f64::from(*result), reference[head]);
            judge.look_at(ComparedValue { row, element: 0, result, reference }, baseline[head]);
        }
        // The gradient of a sink is a sum over sequences.
        let noise = self.noise.sinks * (problem.batch as f64).sqrt();
        Some(self.conclude(judge, DType::F32, noise))
    }

    /// Concludes a comparison with the rounding of the gradient: a 16-bit gradient has its own
    /// rounding; one in f32 also shows that of the scores, which grows with their magnitude as for
    /// an output.
    fn conclude(&self, judge: Judge, dtype: DType, noise: f64) -> Comparison {
        let units = match dtype {
            DType::F32 => 4.0 * self.largest_lse,
            _ => 2.0,
        };
        let rounding = dtype.epsilon() * judge.largest() + units * DType::F32.epsilon() * noise;
        judge.conclude(rounding)
    }
}

fn expect_length(tensor: &'static str, given: usize, expected: usize) -> Result<(), InputError> {
    match given == expected {
        true => Ok(()),
        false => Err(InputError::Length { tensor, given, expected }),
    }
}

impl fmt::Display for GradientsVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.passed { "passed:" } else { "failed:" })?;
        for (index, (name, comparison)) in self.comparisons.iter().enumerate() {
            write!(f, "{} {name} {comparison}", if index == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}
