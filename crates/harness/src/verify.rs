//! Comparison of a call's results with a reference computed on the host.

use flashcore::serving::Sequences;
use flashcore::{
    DType, InputError, InputTensors, Inputs, Layout, Output, Problem, Progress, Shape, Tensor,
    TensorError,
};
use testing::Verdict;
use testing::check::Outcome;
use testing::reference::{self, Rows};
use testing::verdict::compare_tensors;

use crate::Error;
use crate::statistics::Random;

/// The floating-point operations of a reference; for larger problems a sample of the rows is
/// compared.
const OPERATIONS: f64 = 1e9;
/// Output elements of a reference: half a gigabyte of f64 for reference and baseline.
const ELEMENTS: usize = 1 << 25;

/// A tensor from the bytes of contiguous memory.
pub(crate) fn tensor(dtype: DType, shape: Shape, bytes: &[u8]) -> Result<Tensor, Error> {
    let layout = Layout::contiguous(shape).map_err(flashcore::Error::from)?;
    Ok(Tensor::from_bytes(dtype, layout, bytes).map_err(flashcore::Error::from)?)
}

/// The f32 numbers of some bytes.
pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

/// The inputs of a problem from the bytes of contiguous memory.
pub fn inputs(problem: &Problem, bytes: [&[u8]; 3]) -> Result<InputTensors, Error> {
    let types = problem.dtypes;
    Ok(InputTensors::new(
        tensor(types.query, problem.query_shape(), bytes[0])?,
        tensor(types.key, problem.key_shape(), bytes[1])?,
        tensor(types.value, problem.value_shape(), bytes[2])?,
    ))
}

/// The expected results for some inputs, over as many rows as there is time for.
#[derive(Debug)]
pub struct ExpectedOutput {
    problem: Problem,
    sequences: Sequences,
    parts: Vec<Part>,
    finite: bool,
}

/// The results of all sequences if their lengths are equal, otherwise of one sequence as a problem
/// of its own.
#[derive(Debug)]
struct Part {
    problem: Problem,
    sequence: Option<usize>,
    reference: reference::Answer,
    baseline: reference::Answer,
}

impl ExpectedOutput {
    /// Computes it on the host: no device memory ever holds it.
    pub fn of(problem: &Problem, inputs: Inputs<'_>, seed: u64) -> Result<Self, Error> {
        ExpectedOutput::within(OPERATIONS, problem, inputs, seed, None)
    }

    /// Computes it within about so many floating-point operations.
    pub fn within(
        operations: f64,
        problem: &Problem,
        inputs: Inputs<'_>,
        seed: u64,
        progress: Option<&dyn Progress>,
    ) -> Result<Self, Error> {
        problem.validate().map_err(flashcore::Error::from)?;
        inputs.validate(problem).map_err(flashcore::Error::from)?;
        let sequences = Sequences::of(problem, inputs);
        let mut parts = Vec::new();
        let mut left = operations;
        if problem.has_equal_lengths() {
            parts.push(Part::new(problem.clone(), None, inputs, left, seed, progress)?);
        } else {
            for sequence in sample(&sequences, seed) {
                let (alone, gathered) =
                    (sequences.alone(sequence), sequences.gather(inputs, sequence)?);
                let spent = alone.visible_flops().min(left);
                let inputs = gathered.inputs();
                parts.push(Part::new(alone, Some(sequence), inputs, left, seed, None)?);
                left -= spent;
                if left <= 0.0 {
                    break;
                }
            }
        }
        let all = [inputs.query, inputs.key, inputs.value];
        let finite = all.iter().all(|tensor| tensor.is_finite());
        Ok(ExpectedOutput { problem: problem.clone(), sequences, parts, finite })
    }

    /// Returns log-sum-exps that are right wherever they are compared, as bytes, for a plain
    /// problem.
    pub fn expected_lse(&self, bytes: usize) -> Vec<u8> {
        let mut values = vec![0f32; bytes / 4];
        for Part { reference, .. } in self.parts.iter().filter(|part| part.sequence.is_none()) {
            for (row, lse) in reference.rows.as_slice().iter().zip(&reference.lse) {
                let head = row.batch * self.problem.query_heads + row.head;
                values[head * self.problem.query_length + row.query] = *lse as f32;
            }
        }
        values.into_iter().flat_map(f32::to_le_bytes).collect()
    }

    /// Judges an output and its log-sum-exps. The error names what is wrong.
    pub fn judge(&self, output: &[u8], lse: &[u8]) -> Result<Verdict, OutputError> {
        let lse = floats(lse);
        let tensor = tensor(self.problem.dtypes.output, self.problem.output_shape(), output);
        let tensor = tensor.map_err(|error| OutputError::Shape(error.to_string()))?;
        if self.finite {
            let values = tensor.elements();
            let nans = values.nans() + lse.iter().filter(|value| value.is_nan()).count();
            // Rows that belong to no sequence stay poisoned.
            let unused = self.problem.rows() - self.sequences.rows();
            let unwritten = nans.saturating_sub(unused * (self.problem.value_head_dim + 1));
            if unwritten > 0 {
                return Err(OutputError::Unwritten { unwritten, values: values.len() + lse.len() });
            }
        }
        let verdict =
            self.verdict(&tensor, &lse).map_err(|it| OutputError::Shape(it.to_string()))?;
        if verdict.passed { Ok(verdict) } else { Err(OutputError::Values(Box::new(verdict))) }
    }

    /// Compares an output and its log-sum-exps with the expected ones: the worst sequence's errors.
    pub fn verdict(&self, output: &Tensor, lse: &[f32]) -> Result<Verdict, flashcore::Error> {
        let expected = self.problem.rows();
        if lse.len() != expected {
            let (tensor, given) = ("log-sum-exp", lse.len());
            return Err(InputError::Length { tensor, given, expected }.into());
        }
        let mut worst: Option<Verdict> = None;
        for part in &self.parts {
            let Part { problem, sequence, reference, baseline } = part;
            let verdict = match sequence {
                None => compare_tensors(problem, output, lse, reference, baseline)?,
                Some(sequence) => {
                    let (output, lse) = self.rows_of(*sequence, problem, output, lse)?;
                    compare_tensors(problem, &output, &lse, reference, baseline)?
                }
            };
            let badness = |it: &Verdict| (!it.passed, it.output.tolerance_used());
            worst = Some(match worst {
                Some(before) => {
                    let rows = before.rows + verdict.rows;
                    let worse = badness(&before) >= badness(&verdict);
                    Verdict { rows, ..if worse { before } else { verdict } }
                }
                None => verdict,
            });
        }
        let none = || InputError::Length { tensor: "batch", given: 0, expected: 1 };
        let worst = worst.ok_or_else(none)?;
        Ok(Verdict { total_rows: self.sequences.rows(), ..worst })
    }

    /// Runs twice, and judges: right, and the same bits again.
    pub fn outcome(
        &self,
        run: impl Fn() -> Result<Output, flashcore::Error>,
    ) -> Result<Outcome, flashcore::Error> {
        let (first, second) = (run()?, run()?);
        let verdict = self.verdict(&first.output, &first.lse)?;
        let bits = |it: &Output| it.lse.iter().map(|lse| lse.to_bits()).collect::<Vec<_>>();
        let same = first.output.bytes() == second.output.bytes() && bits(&first) == bits(&second);
        Ok(Outcome { passed: verdict.passed && same, verdict, repeats: same, holes: 0 })
    }

    /// One sequence's rows of a result.
    fn rows_of(
        &self,
        sequence: usize,
        alone: &Problem,
        output: &Tensor,
        lse: &[f32],
    ) -> Result<(Tensor, Vec<f32>), TensorError> {
        let shape = alone.output_shape();
        let mut own = Tensor::zeros(output.dtype(), shape)?;
        let mut own_lse = vec![0.0; alone.rows()];
        for position in 0..shape.length {
            let (entry, row) = self.sequences.queries().locate(sequence, position);
            for head in 0..shape.heads {
                own.copy_row([0, position, head], output, [entry, row, head]);
                let query = self.problem.query_shape();
                let from = self.sequences.lse_index(query, sequence, head, position);
                own_lse[head * shape.length + position] = lse[from];
            }
        }
        Ok((own, own_lse))
    }
}

/// Sequences that have queries: the first, the last and one with the most keys, then others.
fn sample(sequences: &Sequences, seed: u64) -> Vec<usize> {
    let mut all: Vec<usize> =
        (0..sequences.len()).filter(|it| sequences.queries().length(*it) > 0).collect();
    Random::new(seed).shuffle(&mut all);
    let longest = all.iter().copied().max_by_key(|it| sequences.keys().length(*it));
    let ends = [all.iter().copied().min(), all.iter().copied().max(), longest];
    let mut order: Vec<usize> = ends.into_iter().flatten().chain(all).collect();
    let mut seen = std::collections::HashSet::new();
    order.retain(|it| seen.insert(*it));
    order
}

impl Part {
    fn new(
        problem: Problem,
        sequence: Option<usize>,
        inputs: Inputs<'_>,
        operations: f64,
        seed: u64,
        progress: Option<&dyn Progress>,
    ) -> Result<Self, Error> {
        let share = (operations / problem.visible_flops().max(1.0)).min(1.0);
        let count = (share * problem.rows() as f64) as usize;
        let count = count.min(ELEMENTS / problem.value_head_dim.max(1));
        let rows = Rows::sample(&problem, count.max(16), seed);
        let reference = reference::attention(&problem, inputs, &rows, progress)?;
        let baseline = reference::baseline(&problem, inputs, &rows, progress)?;
        Ok(Part { problem, sequence, reference, baseline })
    }
}

/// What is wrong with a result.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// Values that are NaN where no input is: never written.
    #[error("{unwritten} of {values} values were never written or are NaN")]
    Unwritten {
        /// How many.
        unwritten: usize,
        /// Of how many.
        values: usize,
    },
    /// Values too far from the true ones.
    #[error("{0}")]
    Values(Box<Verdict>),
    /// Not even the shape is right.
    #[error("{0}")]
    Shape(String),
}

/// The byte that poisons outputs: NaN in every float format.
pub const POISON: u8 = 0xFF;

/// Standard normal numbers of an element type, as bytes.
pub fn normal(dtype: DType, count: usize, seed: u64) -> Result<Vec<u8>, Error> {
    let tensor = Tensor::random(dtype, Shape::new(1, count, 1, 1), seed);
    Ok(tensor.map_err(flashcore::Error::from)?.bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use flashcore::{Backend, CpuBackend, RunOptions, Scores};

    use super::*;
    use crate::auxiliary_inputs::AuxiliaryInputs;

    /// The CPU's answers over every storage are right, without and with rules of scores, and a
    /// wrong number among them is found.
    #[test]
    fn every_storage_is_judged() {
        let texts = [
            "b=2,h=4,hk=2,s=33,d=16,f16,causal",
            "b=5,h=2,s=60,d=16,f16,causal,queries=packed:120,keys=packed:120",
            "b=3,h=4,hk=1,s=2,sk=70,d=8,bf16,keys=pages:16:5:17,key_lengths",
            "b=3,h=2,s=9,sk=40,d=8,f16,keys=entries:4,query_lengths,key_lengths,left_padding,batch_index",
        ];
        let plain = texts.map(|text| text.parse::<Problem>().unwrap());
        let ruled = plain.clone().map(|problem| problem.with_scores(Scores::EVERY_RULE));
        for problem in plain.into_iter().chain(ruled) {
            let text = problem.text();
            let auxiliary = AuxiliaryInputs::of(&problem).unwrap();
            let tensors = InputTensors::random(&problem, 1).unwrap();
            let inputs = auxiliary.inputs(&tensors);
            let result = CpuBackend::new().run(&problem, inputs, &RunOptions::default()).unwrap();
            let expected = ExpectedOutput::of(&problem, inputs, 1).unwrap();
            let lse: Vec<u8> = result.lse.iter().flat_map(|it| it.to_le_bytes()).collect();
            let verdict = expected.judge(result.output.bytes(), &lse);
            let verdict = verdict.unwrap_or_else(|wrong| panic!("{text}: {wrong}"));
            assert_eq!(verdict.rows, expected.sequences.rows(), "{text}");
            let mut wrong = result.output.clone();
            let (entry, row) = expected.sequences.queries().locate(0, 0);
            wrong.set_row([entry, row, 0], &vec![7.0; problem.value_head_dim]);
            assert!(
                matches!(expected.judge(wrong.bytes(), &lse), Err(OutputError::Values(_))),
                "{text}"
            );
            wrong.set_row([entry, row, 0], &vec![f32::NAN; problem.value_head_dim]);
            assert!(expected.judge(wrong.bytes(), &lse).is_err(), "{text}");
        }
    }
}
