//! The reference: attention in f64, and a baseline, the plain algorithm in the problem's own
//! precision, as the yardstick for errors.
//!
//! Both work row by row, so that a sample of rows can be checked when all would take too long.
//! Neither reads a masked key. The visible keys and the scores of a row are defined here a second
//! time, key by key and independently of the library, so that the two definitions check each other.

mod backward;
mod baseline;
mod combine;
mod exact;
mod rule;

pub use backward::{
    Gradients, HeadGradients, Heads, Noise, ResultGradients, gradients, gradients_baseline, saved,
};
pub use combine::{Combined, combined, vector};

use std::collections::BTreeSet;
use std::iter::Sum;
use std::ops::{AddAssign, Mul};

use rayon::prelude::*;
use serde::Serialize;

use flashcore::function::Here;
use flashcore::serving::{Placement, Sequences};
use flashcore::{
    DType, Descale, Error, Inputs, Problem, Progress, RowFunctions, TensorView, random,
};

use rule::Rule;

/// One row of the softmax.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Row {
    /// The index of the sequence.
    pub batch: usize,
    /// The index of the query head.
    pub head: usize,
    /// The index of the query in its sequence.
    pub query: usize,
}

/// The rows to compute: all of a problem's, or some of them.
///
/// ```
/// use flashcore::Problem;
/// use flashcore_testing::reference::Rows;
///
/// let problem = Problem::new(1, 8, 4096, 128);
/// assert_eq!(Rows::all(&problem).len(), 8 * 4096);
/// assert_eq!(Rows::sample(&problem, 100, 0).len(), 100);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rows(Vec<Row>);

impl Rows {
    /// Returns every row of a problem whose sequences have equal lengths.
    pub fn all(problem: &Problem) -> Self {
        Rows((0..problem.rows()).map(|index| row(problem, index)).collect())
    }

    /// Returns every row of sequences of any lengths.
    pub fn of(sequences: &Sequences) -> Self {
        let heads = sequences.problem().query_heads;
        let of_head = |batch: usize, head: usize| {
            let queries = 0..sequences.queries().length(batch);
            queries.map(move |query| Row { batch, head, query })
        };
        let of_sequence = |batch: usize| {
            (0..heads).flat_map(move |head| of_head(batch, head)).collect::<Vec<_>>()
        };
        Rows((0..sequences.len()).flat_map(of_sequence).collect())
    }

    /// Returns `count` different rows, or all if there are no more: the first and the last of the
    /// problem, the others at random.
    pub fn sample(problem: &Problem, count: usize, seed: u64) -> Self {
        let chosen = choose(problem.rows(), count, seed);
        Rows(chosen.into_iter().map(|index| row(problem, index)).collect())
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the rows, sorted.
    pub fn as_slice(&self) -> &[Row] {
        &self.0
    }
}

/// Returns `count` different numbers below `total`, or all if there are no more: the first and the
/// last, the others at random.
fn choose(total: usize, count: usize, seed: u64) -> BTreeSet<usize> {
    if count >= total {
        return (0..total).collect();
    }
    let mut chosen: BTreeSet<usize> = [0, total - 1].into_iter().take(count).collect();
    let mut state = seed;
    while chosen.len() < count {
        state = random::mix(state);
        chosen.insert((state % total as u64) as usize);
    }
    chosen
}

/// Returns the row at an index in the order (batch, head, query).
fn row(problem: &Problem, index: usize) -> Row {
    let head = index / problem.query_length;
    Row {
        batch: head / problem.query_heads,
        head: head % problem.query_heads,
        query: index % problem.query_length,
    }
}

/// The smallest normal f32; smaller numbers may be flushed to zero.
const SMALLEST: f64 = f32::MIN_POSITIVE as f64;

/// The outputs and log-sum-exps of some rows.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The rows.
    pub rows: Rows,
    /// The outputs of the rows, one after the other, each of the value head dim.
    pub output: Vec<f64>,
    /// The log-sum-exps of the rows.
    pub lse: Vec<f64>,
    /// A bound on the sum of the contributions to an output whose weights are too small for f32:
    /// where a sink has almost all of the weight, the weights of keys are near the end of the
    /// range, and f32 may have zero in their place.
    pub underflow: f64,
}

/// Computes attention in f64 on the inputs as they are, or for 8-bit inputs on their descaled
/// values. The `batch` of a row is its sequence.
///
/// ```
/// use flashcore_testing::reference::{self, Rows};
/// use flashcore::{Inputs, Problem, Tensor};
///
/// let problem = Problem::new(1, 1, 1, 4);
/// let tensor = Tensor::random(problem.dtype(), problem.query_shape(), 0)?;
/// let inputs = Inputs::new(&tensor, &tensor, &tensor);
/// let answer = reference::attention(&problem, inputs, &Rows::all(&problem), None)?;
/// // With a single key, the output is its value.
/// assert_eq!(answer.output[0] as f32, tensor.to_f32()[0]);
/// # Ok::<(), flashcore::Error>(())
/// ```
pub fn attention(
    problem: &Problem,
    inputs: Inputs<'_>,
    rows: &Rows,
    progress: Option<&dyn Progress>,
) -> Result<Answer, Error> {
    by_row(problem, inputs, rows, progress, exact::row)
}

/// Computes the plain algorithm in the problem's precision: scores, probabilities and output are
/// each rounded to the output's element type, sums are in f32. Where queries and values have 8
/// bits, probabilities do too.
pub fn baseline(
    problem: &Problem,
    inputs: Inputs<'_>,
    rows: &Rows,
    progress: Option<&dyn Progress>,
) -> Result<Answer, Error> {
    by_row(problem, inputs, rows, progress, baseline::row)
}

/// The number of partial sums of a dot product; a single one would be a chain of dependent
/// additions.
const LANES: usize = 8;

/// Computes a dot product in the type of the first vector.
fn dot<T, U>(one: &[T], other: &[U]) -> T
where
    T: Copy + Default + Mul<Output = T> + AddAssign + Sum,
    U: Copy + Into<T>,
{
    let mut sums = [T::default(); LANES];
    let (ones, one_rest) = one.as_chunks::<LANES>();
    let (others, other_rest) = other.as_chunks::<LANES>();
    for (one, other) in ones.iter().zip(others) {
        for lane in 0..LANES {
            sums[lane] += one[lane] * other[lane].into();
        }
    }
    for (one, other) in one_rest.iter().zip(other_rest) {
        sums[0] += *one * (*other).into();
    }
    sums.into_iter().sum()
}

/// The inputs of one row: its query, and the keys and values that it sees.
struct RowInputs<'a> {
    query: &'a [f32],
    /// The keys, row-major, `head_dim` wide.
    keys: &'a [f32],
    /// The values, row-major, `value_head_dim` wide.
    values: &'a [f32],
    /// The index of the first of these keys in the sequence.
    first: usize,
    rule: Rule,
    /// The problem's mask and score functions, bound to the row.
    functions: RowFunctions<'a>,
    /// The sink of the head; minus infinity without one.
    sink: f32,
    /// The descale factor of the product with each key: the query's factor times the key's.
    key_factors: &'a [f64],
    /// The descale factor of each value.
    value_factors: &'a [f64],
    /// The element type of the output.
    dtype: DType,
    /// The element types of the query and of the keys.
    factor_types: [DType; 2],
    /// Whether both products multiply 8-bit numbers, so that probabilities are rounded to 8 bits.
    small_probabilities: bool,
    /// Whether 8-bit keys and values are widened to the element type of the queries.
    widened: bool,
}

/// Runs `compute` for each row; it fills the row's output and returns its log-sum-exp.
fn by_row(
    problem: &Problem,
    inputs: Inputs<'_>,
    rows: &Rows,
    progress: Option<&dyn Progress>,
    compute: fn(RowInputs<'_>, &mut [f64]) -> f64,
) -> Result<Answer, Error> {
    problem.validate()?;
    inputs.validate(problem)?;
    let sequences = Sequences::of(problem, inputs);
    let (dim, value_dim) = (problem.head_dim, problem.value_head_dim);
    let mut output = vec![0.0; rows.len() * value_dim];
    let mut lse = vec![0.0; rows.len()];
    let mut largest_value = 0.0f32;
    if let Some(progress) = progress {
        progress.begin(rows.len() as u64);
    }
    // Rows that share a key/value head are processed together, so that only one head is held as
    // f32.
    let head_of = |row: &Row| (row.batch, problem.kv_head(row.head));
    let (mut output_rest, mut lse_rest) = (&mut output[..], &mut lse[..]);
    for rows in rows.0.chunk_by(|a, b| head_of(a) == head_of(b)) {
        let (batch, kv_head) = head_of(&rows[0]);
        let keys = widen(inputs.key, sequences.keys(), batch, kv_head);
        let values = widen(inputs.value, sequences.keys(), batch, kv_head);
        let head = (batch, kv_head);
        let key_factors = factors(inputs.descales.key, problem.descales.key, &sequences, head);
        let of_query = factors(inputs.descales.query, problem.descales.query, &sequences, head);
        let key_factors: Vec<f64> =
            key_factors.iter().zip(of_query).map(|(key, query)| key * query).collect();
        let value_factors =
            factors(inputs.descales.value, problem.descales.value, &sequences, head);
        let magnitude =
            |(index, value): (usize, &f32)| value.abs() * value_factors[index / value_dim] as f32;
        let finite = values.iter().enumerate().map(magnitude).filter(|value| value.is_finite());
        largest_value = finite.fold(largest_value, f32::max);
        let output = output_rest.split_off_mut(..rows.len() * value_dim);
        let lse = lse_rest.split_off_mut(..rows.len());
        let (Some(output), Some(lse)) = (output, lse) else {
            unreachable!("results are as long as the rows");
        };
        let results = output.par_chunks_mut(value_dim).zip(lse);
        rows.par_iter().zip(results).for_each(|(row, (output, lse))| {
            let (entry, position) = sequences.queries().locate(batch, row.query);
            let query = inputs.query.head(entry, row.head).row(position);
            let length = sequences.keys().length(batch);
            let position = row.query + length;
            let rule = Rule {
                scale: problem.scale().into(),
                softcap: problem.scores.softcap.map(f64::from),
                slope: inputs.slope(problem, batch, row.head).into(),
                position: position as i64 - sequences.queries().length(batch) as i64,
            };
            let visible = rule.visible(&problem.mask, length);
            let here = Here {
                batch: batch as i32,
                head: row.head as i32,
                query: row.query as i32,
                query_length: sequences.queries().length(batch) as i32,
                key_length: length as i32,
            };
            let inputs = RowInputs {
                query: &query,
                keys: &keys[visible.start * dim..visible.end * dim],
                values: &values[visible.start * value_dim..visible.end * value_dim],
                first: visible.start,
                rule,
                functions: problem.row_functions(inputs.captured, here),
                sink: inputs.sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[row.head]),
                key_factors: &key_factors[visible.clone()],
                value_factors: &value_factors[visible],
                dtype: problem.dtypes.output,
                factor_types: [problem.dtypes.query, problem.dtypes.key],
                small_probabilities: problem.dtypes.query.is_8_bit()
                    && problem.dtypes.value.is_8_bit(),
                widened: problem.dtypes.key.is_8_bit() && !problem.dtypes.query.is_8_bit(),
            };
            *lse = compute(inputs, output);
            if let Some(progress) = progress {
                progress.advance(1);
            }
        });
    }
    let underflow = SMALLEST * problem.key_length as f64 * f64::from(largest_value);
    Ok(Answer { rows: rows.clone(), output, lse, underflow })
}

/// Returns the descale factors of a sequence's keys, one for each position; 1 without any.
fn factors(
    factors: Option<TensorView<'_>>,
    descale: Descale,
    sequences: &Sequences,
    (sequence, head): (usize, usize),
) -> Vec<f64> {
    let of = |position: usize| {
        let (entry, row) = match descale {
            Descale::PerToken => sequences.keys().locate(sequence, position),
            _ => (sequence, 0),
        };
        factors.map_or(1.0, |factors| f64::from(factors.head(entry, head).row(row)[0]))
    };
    (0..sequences.keys().length(sequence)).map(of).collect()
}

/// Returns one head of a sequence as a row-major f32 matrix, which represents every element type
/// exactly.
fn widen(tensor: TensorView<'_>, placement: &Placement, sequence: usize, head: usize) -> Vec<f32> {
    let dim = tensor.shape().dim;
    let mut matrix = vec![0.0; placement.length(sequence) * dim];
    matrix.par_chunks_exact_mut(dim).enumerate().for_each(|(position, values)| {
        let (entry, row) = placement.locate(sequence, position);
        tensor.head(entry, head).read(row, values);
    });
    matrix
}
