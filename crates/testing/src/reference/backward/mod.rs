//! The reference for gradients: the backward pass in f64, and a baseline, the plain algorithm in
//! the problem's own precision, as the yardstick for errors.
//!
//! With the scores s of a row, its sink, its output O and the gradient dO of that output:
//!
//! ```text
//! P     = exp(s - lse)                dV = P^T dO
//! dP    = dO V^T                      dS = P * (dP - delta) * (1 - tanh^2 with a softcap)
//! delta = rowsum(dO * O) - dLSE       dQ = scale * dS K       dK = scale * dS^T Q
//! dsink = - sum over rows of exp(sink - lse) * delta
//! ```
//!
//! dLSE, the gradient of the log-sum-exp, is zero unless it is given.
//!
//! Neither reads masked keys. A row that sees no key, and a key that no row sees, have gradients of
//! exactly zero. Key/value heads are independent of each other, so that a sample of them can be
//! checked when all would take too long.

mod group;
mod number;

use flashcore::serving::Sequences;
use flashcore::{
    Backward, DType, Error, InputError, Inputs, Problem, Progress, Shape, Tensor, TensorError,
    TensorView,
};

use group::Group;
use number::{Number, Rounding};

use super::{Rows, SMALLEST, attention, choose};

/// The weight whose f32 rounding error is the smallest normal number. Tolerances multiply noise by
/// epsilon, so noise of this size allows for weights that f32 flushes to zero.
const SMALLEST_ROUNDED: f64 = SMALLEST / f32::EPSILON as f64;

/// The key/value heads whose gradients are computed, with the query heads that read them: all of a
/// problem's, or a sample.
///
/// ```
/// use flashcore::Problem;
/// use flashcore_testing::reference::Heads;
///
/// let problem = Problem::new(4, 8, 4096, 128).with_kv_heads(2);
/// assert_eq!(Heads::all(&problem).len(), 8);
/// assert_eq!(Heads::sample(&problem, 3, 0).len(), 3);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heads {
    /// The sequence and the key/value head of each, sorted.
    chosen: Vec<(usize, usize)>,
    /// Whether these are all heads of the problem.
    all: bool,
}

impl Heads {
    /// Returns the heads of every sequence.
    pub fn all(problem: &Problem) -> Self {
        Heads::sample(problem, usize::MAX, 0)
    }

    /// Returns `count` different heads, or all if there are no more: the first and the last, the
    /// others at random.
    pub fn sample(problem: &Problem, count: usize, seed: u64) -> Self {
        let total = problem.batch * problem.kv_heads;
        let head = |index: usize| (index / problem.kv_heads, index % problem.kv_heads);
        let chosen: Vec<_> = choose(total, count, seed).into_iter().map(head).collect();
        Heads { all: chosen.len() == total, chosen }
    }

    /// Returns the number of heads.
    pub fn len(&self) -> usize {
        self.chosen.len()
    }

    /// Returns whether there are no heads.
    pub fn is_empty(&self) -> bool {
        self.chosen.is_empty()
    }
}

/// The gradients of one key/value head and of the query heads that read it.
#[derive(Debug, Clone)]
pub struct HeadGradients {
    /// The index of the sequence.
    pub sequence: usize,
    /// The index of the key/value head.
    pub kv_head: usize,
    /// dQ, by query head of the group, query and element.
    pub query: Vec<f64>,
    /// dK, by key and element.
    pub key: Vec<f64>,
    /// dV, by key and element.
    pub value: Vec<f64>,
    /// The contribution of this sequence to the gradient of each query head's sink.
    pub sinks: Vec<f64>,
    /// Delta, the row sums of dO * O less dLSE, by query head of the group and query.
    pub delta: Vec<f64>,
    /// The uncertainty of each gradient due to f32 sums.
    pub noise: Noise,
    /// The largest magnitude of a finite log-sum-exp.
    pub largest_lse: f64,
}

/// The size of the numbers that cancel in a gradient, as far as their f32 roundings accumulate: the
/// root of the sum of their squares, maximised over the elements.
///
/// Where a row sees one key, dP and delta are the same number and dS is zero. Summed in f32 in two
/// different orders, they differ by roundings of |dO| |V|, which a baseline need not show. Weights
/// that are too small for f32, in whose place it may have zero, add to this.
#[derive(Debug, Clone, Copy, Default)]
pub struct Noise {
    /// The noise of dQ.
    pub query: f64,
    /// The noise of dK.
    pub key: f64,
    /// The noise of dV.
    pub value: f64,
    /// The noise of the sinks' gradients.
    pub sinks: f64,
    /// The noise of delta.
    pub delta: f64,
}

impl Noise {
    /// Returns the larger of each. Noise that is not finite is ignored: where numbers are not
    /// finite there is no tolerance to widen.
    pub(crate) fn max(self, other: Noise) -> Self {
        let larger = |one: f64, other: f64| match other.is_finite() {
            true => one.max(other),
            false => one,
        };
        Noise {
            query: larger(self.query, other.query),
            key: larger(self.key, other.key),
            value: larger(self.value, other.value),
            sinks: larger(self.sinks, other.sinks),
            delta: larger(self.delta, other.delta),
        }
    }
}

/// The gradients of some heads.
#[derive(Debug, Clone)]
pub struct Gradients {
    /// The gradients of each head.
    pub heads: Vec<HeadGradients>,
    /// Whether these are all heads of the problem.
    pub all: bool,
}

impl Gradients {
    /// Returns the gradient of each query head's sink, summed over all sequences, or `None` unless
    /// every head is present.
    pub fn sinks(&self, problem: &Problem) -> Option<Vec<f64>> {
        let mut sums = vec![0.0; problem.query_heads];
        for head in &self.heads {
            let first = head.kv_head * problem.group_size();
            for (sum, part) in sums[first..].iter_mut().zip(&head.sinks) {
                *sum += part;
            }
        }
        self.all.then_some(sums)
    }
}

/// The gradients of the results of a forward pass.
#[derive(Debug, Clone, Copy)]
pub struct ResultGradients<'a> {
    /// The gradient of the output (dO).
    pub output: TensorView<'a>,
    /// The gradient of the log-sum-exps (dLSE), in their order, if they have one.
    pub lse: Option<&'a [f32]>,
}

impl ResultGradients<'_> {
    /// Returns a random gradient of the log-sum-exps of a problem that has one.
    pub fn random_lse(problem: &Problem, seed: u64) -> Result<Option<Vec<f32>>, TensorError> {
        let shape = Shape::new(1, problem.rows(), 1, 1);
        let random = || Ok(Tensor::random(DType::F32, shape, seed ^ 0xd15e)?.to_f32());
        problem.lse_gradient.then(random).transpose()
    }
}

impl<'a> From<&'a Tensor> for ResultGradients<'a> {
    fn from(output: &'a Tensor) -> Self {
        output.view().into()
    }
}

impl<'a> From<TensorView<'a>> for ResultGradients<'a> {
    fn from(output: TensorView<'a>) -> Self {
        ResultGradients { output, lse: None }
    }
}

/// Computes the gradients of `sum(output * output_gradient)`, and of the same sum of the
/// log-sum-exps if they have a gradient, in f64, on the inputs as they are.
///
/// ```
/// use flashcore_testing::reference::{self, Heads};
/// use flashcore::{InputTensors, Problem, Tensor};
///
/// let problem = Problem::new(1, 1, 1, 4);
/// let tensors = InputTensors::random(&problem, 0)?;
/// let gradient = Tensor::random(problem.dtype(), problem.output_shape(), 1)?;
/// let heads = Heads::all(&problem);
/// let answer = reference::gradients(&problem, tensors.inputs(), &gradient, &heads, None)?;
/// // With a single key, the output is its value, whatever the query.
/// assert_eq!(answer.heads[0].value[0] as f32, gradient.to_f32()[0]);
/// assert!(answer.heads[0].query[0].abs() < 1e-12);
/// # Ok::<(), flashcore::Error>(())
/// ```
pub fn gradients<'a>(
    problem: &Problem,
    inputs: Inputs<'a>,
    results: impl Into<ResultGradients<'a>>,
    heads: &Heads,
    progress: Option<&dyn Progress>,
) -> Result<Gradients, Error> {
    let results = results.into();
    let of_head = |sequences: &Sequences, head| {
        Group::<f64>::new(sequences, inputs, results, None, head, Rounding::None)
    };
    by_head(problem, inputs, results.output, heads, progress, of_head)
}

/// Computes the plain algorithm in the problem's precision from what the forward pass saved:
/// products and sums in f32, P and dS rounded to the element type before they are multiplied, and
/// the results rounded to it.
///
/// The forward pass rounded what it saved, and every backward pass inherits this error. Where one
/// key has almost all the weight of a row, it is the largest error there is: the row's gradient is
/// the product of that key and one number, which is what the rounding leaves of two numbers that
/// cancel. A baseline with its own forward pass would have a different such number, small or large
/// by chance, and would measure nothing.
pub fn gradients_baseline(
    problem: &Problem,
    backward: Backward<'_>,
    heads: &Heads,
    progress: Option<&dyn Progress>,
) -> Result<Gradients, Error> {
    let Backward { inputs, output, lse, output_gradient, lse_gradient } = backward;
    backward.validate(problem)?;
    let results = ResultGradients { output: output_gradient, lse: lse_gradient };
    let (saved, rounding) = (Some(Saved { output, lse }), Rounding::To(problem.dtype()));
    let of_head = |sequences: &Sequences, head| {
        Group::<f32>::new(sequences, inputs, results, saved, head, rounding)
    };
    by_head(problem, inputs, output_gradient, heads, progress, of_head)
}

/// The results of a forward pass that the backward pass uses.
#[derive(Clone, Copy)]
struct Saved<'a> {
    output: TensorView<'a>,
    lse: &'a [f32],
}

/// Computes what a forward pass saves: its output, exact and then rounded, and its log-sum-exps in
/// the order (batch, query heads, query length), or (query heads, rows) where queries are packed.
/// Rows that belong to no sequence are NaN.
pub fn saved(problem: &Problem, inputs: Inputs<'_>) -> Result<(Tensor, Vec<f32>), Error> {
    let sequences = Sequences::of(problem, inputs);
    let rows = Rows::of(&sequences);
    let exact = attention(problem, inputs, &rows, None)?;
    let (shape, dim) = (problem.output_shape(), problem.value_head_dim);
    let mut by_place = vec![None; problem.rows()];
    let mut lse = vec![f32::NAN; problem.rows()];
    for (index, row) in rows.as_slice().iter().enumerate() {
        let (entry, position) = sequences.queries().locate(row.batch, row.query);
        by_place[(entry * shape.length + position) * shape.heads + row.head] = Some(index);
        let at = sequences.lse_index(shape, row.batch, row.head, row.query);
        lse[at] = exact.lse[index] as f32;
    }
    let output = Tensor::from_fn(problem.dtypes.output, shape, |[batch, query, head, d]| {
        let row = by_place[(batch * shape.length + query) * shape.heads + head];
        row.map_or(f32::NAN, |row: usize| exact.output[row * dim + d] as f32)
    })?;
    Ok((output, lse))
}

/// Returns an error unless the gradient of the output has the output's shape and element type.
fn validate(problem: &Problem, gradient: TensorView<'_>) -> Result<(), InputError> {
    let tensor = "the gradient of the output";
    let (given, expected): (_, DType) = (gradient.dtype(), problem.dtypes.output);
    if gradient.shape() != problem.output_shape() {
        let (given, expected) = (gradient.shape(), problem.output_shape());
        return Err(InputError::Shape { tensor, given, expected });
    }
    match given == expected {
        true => Ok(()),
        false => Err(InputError::DType { tensor, given, expected }),
    }
}

fn by_head<'a, T: Number>(
    problem: &Problem,
    inputs: Inputs<'a>,
    output_gradient: TensorView<'_>,
    heads: &Heads,
    progress: Option<&dyn Progress>,
    of_head: impl Fn(&Sequences, (usize, usize)) -> Group<'a, T>,
) -> Result<Gradients, Error> {
    problem.validate()?;
    inputs.validate(problem)?;
    validate(problem, output_gradient)?;
    let sequences = Sequences::of(problem, inputs);
    if let Some(progress) = progress {
        progress.begin(heads.len() as u64);
    }
    let mut gradients = Vec::with_capacity(heads.len());
    // Heads are computed one after the other, each on all cores, so that only one is held in wide
    // numbers.
    for &head in &heads.chosen {
        gradients.push(of_head(&sequences, head).gradients());
        if let Some(progress) = progress {
            progress.advance(1);
        }
    }
    Ok(Gradients { heads: gradients, all: heads.all })
}
