//! The rule by which a result passes or fails.
//!
//! The error of a kernel may be at most twice that of the plain algorithm in the same precision,
//! plus the rounding of the answer itself:
//!
//! ```text
//! max |result - reference| <= 2 max |baseline - reference| + rounding
//! ```
//!
//! for the output and, with its own baseline, for the log-sum-exp. Infinities and NaNs must be
//! where the reference has them. [Gradients](compare_gradients) are judged by the same rule.

mod gradients;

pub(crate) use gradients::gradient_tolerances;
pub use gradients::{GradientsToJudge, GradientsVerdict, compare_gradients};

use std::fmt;

use serde::Serialize;

use crate::reference::{Answer, Row};
use flashcore::serving::Sequences;
use flashcore::{DType, InputError, Output, Problem, Tensor};

/// Returns the error allowed for the rounding of an output whose largest value is `largest`.
///
/// Every kernel keeps scores and sums in f32. Next to the rounding of a 16-bit output their error
/// is negligible, and one unit in the last place remains. An f32 output shows the rounding of the
/// scores too: the error of a score is its magnitude times f32's epsilon, a row's log-sum-exp is
/// close to its largest score, and an error of d in a score is a factor of e^d in a weight.
fn output_rounding(dtype: DType, largest: f64, largest_lse: f64) -> f64 {
    let units = match dtype {
        DType::F32 => 4.0 * largest_lse.max(1.0),
        _ => 1.0,
    };
    units * dtype.epsilon() * largest
}

/// The error allowed for the rounding of the log-sum-exp, relative to its largest magnitude or 1:
/// room for the hardware's approximate logarithm and exponential and for tensor cores that
/// truncate, all of which are accurate to about 22 bits.
const LSE_ROUNDING: f64 = 1.0 / (1 << 18) as f64;

/// The error allowed for the rounding of a capped score, relative to the cap: `1 - 2 / (e^2x + 1)`
/// is accurate to the last two bits of an f32 near 1, however small the result is. It shows in a
/// row that sees one key.
const SOFTCAP_ROUNDING: f64 = 1.0 / (1 << 22) as f64;

/// The verdict on a result, with its errors.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// Whether both comparisons pass.
    pub passed: bool,
    /// The comparison of the output.
    pub output: Comparison,
    /// The comparison of the log-sum-exp.
    pub lse: Comparison,
    /// The number of rows that were checked.
    pub rows: usize,
    /// The number of rows of the problem.
    pub total_rows: usize,
}

/// The comparison of values with their reference.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Whether the rule holds.
    pub passed: bool,
    /// The largest error of the result.
    pub max_error: f64,
    /// The mean error of the result.
    pub mean_error: f64,
    /// The largest error of the baseline.
    pub baseline_error: f64,
    /// The largest error that passes.
    pub tolerance: f64,
    /// The number of values that were compared, non-finite ones included.
    pub values: usize,
    /// The number of values that are not finite where the reference is, or the other way round, or
    /// not finite in another way.
    pub misplaced: usize,
    /// The worst value: the first misplaced one, else the one with the largest error.
    pub worst: Option<ComparedValue>,
}

impl Comparison {
    /// The share of the tolerance that the largest error uses.
    pub fn tolerance_used(&self) -> f64 {
        self.max_error / self.tolerance.max(f64::MIN_POSITIVE)
    }
}

/// One value of a result.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ComparedValue {
    /// The row of the value.
    pub row: Row,
    /// The index of the value in the row's output.
    pub element: usize,
    /// The computed value.
    pub result: f64,
    /// The reference value.
    pub reference: f64,
}

/// Judges a result by a reference and a baseline over the same rows.
///
/// ```
/// use flashcore_testing::compare;
/// use flashcore_testing::reference::{self, Rows};
/// use flashcore::{Backend, CpuBackend, Inputs, Problem, RunOptions, Tensor};
///
/// let problem = Problem::new(1, 2, 50, 16);
/// let tensor = Tensor::random(problem.dtype(), problem.query_shape(), 0)?;
/// let inputs = Inputs::new(&tensor, &tensor, &tensor);
/// let rows = Rows::all(&problem);
///
/// let result = CpuBackend::new().run(&problem, inputs, &RunOptions::default())?;
/// let reference = reference::attention(&problem, inputs, &rows, None)?;
/// let baseline = reference::baseline(&problem, inputs, &rows, None)?;
/// let verdict = compare(&problem, &result, &reference, &baseline)?;
/// assert!(verdict.passed, "{verdict}");
/// # Ok::<(), flashcore::Error>(())
/// ```
pub fn compare(
    problem: &Problem,
    result: &Output,
    reference: &Answer,
    baseline: &Answer,
) -> Result<Verdict, InputError> {
    compare_tensors(problem, &result.output, &result.lse, reference, baseline)
}

/// Judges an output and its log-sum-exps, given as plain tensors, by a reference and a baseline
/// over the same rows.
pub fn compare_tensors(
    problem: &Problem,
    output: &Tensor,
    lse: &[f32],
    reference: &Answer,
    baseline: &Answer,
) -> Result<Verdict, InputError> {
    if output.shape() != problem.output_shape() {
        return Err(InputError::Shape {
            tensor: "output",
            given: output.shape(),
            expected: problem.output_shape(),
        });
    }
    if output.dtype() != problem.dtypes.output {
        return Err(InputError::DType {
            tensor: "output",
            given: output.dtype(),
            expected: problem.dtypes.output,
        });
    }
    let lengths = [
        ("log-sum-exp", lse.len(), problem.rows()),
        ("baseline", baseline.rows.len(), reference.rows.len()),
    ];
    for (tensor, given, expected) in lengths {
        if given != expected {
            return Err(InputError::Length { tensor, given, expected });
        }
    }

    let read = |row: Row, values: &mut [f32]| {
        output.head(row.batch, row.head).read(row.query, values);
        let first = (row.batch * problem.query_heads + row.head) * problem.query_length;
        lse[first + row.query]
    };
    Ok(judge(problem, problem.rows(), read, reference, baseline))
}

/// Judges a result over sequences by a reference and a baseline over the same rows.
pub fn compare_sequences(
    sequences: &Sequences,
    result: &Output,
    reference: &Answer,
    baseline: &Answer,
) -> Result<Verdict, InputError> {
    let problem = sequences.problem();
    let shape = result.output.shape();
    let lengths = [
        ("log-sum-exp", result.lse.len(), shape.batch * shape.heads * shape.length),
        ("baseline", baseline.rows.len(), reference.rows.len()),
    ];
    for (tensor, given, expected) in lengths {
        if given != expected {
            return Err(InputError::Length { tensor, given, expected });
        }
    }
    let read = |row: Row, values: &mut [f32]| {
        let (entry, position) = sequences.queries().locate(row.batch, row.query);
        result.output.head(entry, row.head).read(position, values);
        result.lse[sequences.lse_index(shape, row.batch, row.head, row.query)]
    };
    Ok(judge(problem, sequences.rows(), read, reference, baseline))
}

/// Returns the largest errors of an output and of a log-sum-exp that pass.
pub(crate) fn tolerances(problem: &Problem, reference: &Answer, baseline: &Answer) -> [f64; 2] {
    let verdict = judge(problem, reference.rows.len(), |_, _| 0.0, reference, baseline);
    [verdict.output.tolerance, verdict.lse.tolerance]
}

/// Judges the rows that `read` returns: it fills a row's output and returns its log-sum-exp.
fn judge(
    problem: &Problem,
    total_rows: usize,
    read: impl Fn(Row, &mut [f32]) -> f32,
    reference: &Answer,
    baseline: &Answer,
) -> Verdict {
    let underflow = reference.underflow;
    let mut output = Judge::new(problem.dtypes.output);
    let mut lse = Judge::new(DType::F32);
    let mut values = vec![0.0; problem.value_head_dim];
    for (index, &row) in reference.rows.as_slice().iter().enumerate() {
        let row_lse = read(row, &mut values);
        let first = index * problem.value_head_dim;
        for (element, value) in values.iter().enumerate() {
            let place = ComparedValue {
                row,
                element,
                result: f64::from(*value),
                reference: reference.output[first + element],
            };
            output.look_at(place, baseline.output[first + element]);
        }
        let reference = reference.lse[index];
        let place = ComparedValue { row, element: 0, result: f64::from(row_lse), reference };
        lse.look_at(place, baseline.lse[index]);
    }
    let cap_rounding = SOFTCAP_ROUNDING * problem.scores.softcap.map_or(0.0, f64::from);
    // An error of d in the scores changes weights by a fraction of d, some upwards and others
    // downwards.
    let output_rounding = output_rounding(problem.dtypes.output, output.largest, lse.largest)
        + 2.0 * cap_rounding * output.largest;
    let output = output.conclude(output_rounding + underflow);
    let lse_rounding = LSE_ROUNDING * lse.largest.max(1.0) + cap_rounding;
    let lse = lse.conclude(lse_rounding);
    Verdict {
        passed: output.passed && lse.passed,
        output,
        lse,
        rows: reference.rows.len(),
        total_rows,
    }
}

/// A comparison in progress.
pub(crate) struct Judge {
    dtype: DType,
    values: usize,
    finite: usize,
    error_sum: f64,
    max_error: f64,
    baseline_error: f64,
    /// The largest finite magnitude in the reference.
    largest: f64,
    misplaced: usize,
    worst: Option<ComparedValue>,
}

impl Judge {
    pub(crate) fn new(dtype: DType) -> Self {
        Judge {
            dtype,
            values: 0,
            finite: 0,
            error_sum: 0.0,
            max_error: 0.0,
            baseline_error: 0.0,
            largest: 0.0,
            misplaced: 0,
            worst: None,
        }
    }

    /// Returns the largest finite magnitude in the reference so far.
    pub(crate) fn largest(&self) -> f64 {
        self.largest
    }

    pub(crate) fn look_at(&mut self, place: ComparedValue, baseline: f64) {
        let ComparedValue { result, reference, .. } = place;
        self.values += 1;
        if reference.is_finite() {
            self.largest = self.largest.max(reference.abs());
            if baseline.is_finite() {
                self.baseline_error = self.baseline_error.max((baseline - reference).abs());
            }
        }
        if result.is_finite() && reference.is_finite() {
            let error = (result - reference).abs();
            self.finite += 1;
            self.error_sum += error;
            if error > self.max_error || self.worst.is_none() {
                self.max_error = self.max_error.max(error);
                if self.misplaced == 0 {
                    self.worst = Some(place);
                }
            }
        } else if !self.same_kind(result, reference) {
            if self.misplaced == 0 {
                self.worst = Some(place);
            }
            self.misplaced += 1;
        }
    }

    /// Returns whether a result that is not finite, or whose reference is not, has the expected
    /// kind.
    fn same_kind(&self, result: f64, reference: f64) -> bool {
        if result.is_nan() || reference.is_nan() {
            return result.is_nan() && reference.is_nan();
        }
        // A result may overflow where the rounded reference is at the end of the range.
        let edge = self.dtype.max() * (1.0 - 2.0 * self.dtype.epsilon());
        let overflows = reference.is_infinite() || reference.abs() >= edge;
        result.is_infinite() && overflows && result.signum() == reference.signum()
    }

    pub(crate) fn conclude(self, rounding: f64) -> Comparison {
        let tolerance = 2.0 * self.baseline_error + rounding;
        Comparison {
            passed: self.misplaced == 0 && self.max_error <= tolerance,
            max_error: self.max_error,
            mean_error: self.error_sum / self.finite.max(1) as f64,
            baseline_error: self.baseline_error,
            tolerance,
            values: self.values,
            misplaced: self.misplaced,
            worst: self.worst,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.passed { "passed" } else { "failed" };
        write!(f, "{verdict}: output {}, log-sum-exp {}", self.output, self.lse)
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "max error {:.3e} (at most {:.3e}), mean {:.3e}",
            self.max_error, self.tolerance, self.mean_error
        )?;
        if self.misplaced > 0 {
            write!(
                f,
                ", {} of {} not finite or not as they should be",
                self.misplaced, self.values
            )?;
        }
        if let (false, Some(place)) = (self.passed, self.worst) {
            write!(
                f,
                ", at batch {} head {} position {} element {}: {} instead of {}",
                place.row.batch,
                place.row.head,
                place.row.query,
                place.element,
                place.result,
                place.reference
            )?;
        }
        Ok(())
    }
}
