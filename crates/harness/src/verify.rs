//! Whether the bytes that a call left behind are right.

use flashcore::reference::{self, Rows};
use flashcore::verdict::compare_tensors;
use flashcore::{DType, InputTensors, Layout, Problem, Shape, Tensor, Verdict};

use crate::Error;

/// Floating-point operations of a reference: more, and a sample of the rows is compared.
const OPERATIONS: f64 = 1e9;

/// Tensors from the bytes of contiguous memory.
pub fn inputs(problem: &Problem, bytes: [&[u8]; 3]) -> Result<InputTensors, Error> {
    let tensor = |shape: Shape, bytes: &[u8]| -> Result<Tensor, Error> {
        let layout = Layout::contiguous(shape).map_err(flashcore::Error::from)?;
        Ok(Tensor::from_bytes(problem.dtype, layout, bytes).map_err(flashcore::Error::from)?)
    };
    Ok(InputTensors {
        query: tensor(problem.query_shape(), bytes[0])?,
        key: tensor(problem.key_shape(), bytes[1])?,
        value: tensor(problem.value_shape(), bytes[2])?,
        slopes: None,
        sinks: None,
    })
}

/// The true answer for some inputs, over as many rows as there is time for.
#[derive(Debug)]
pub struct Truth {
    problem: Problem,
    reference: reference::Answer,
    baseline: reference::Answer,
    finite: bool,
}

impl Truth {
    /// Computes it on the host: no device memory ever holds it.
    pub fn of(problem: &Problem, tensors: &InputTensors, seed: u64) -> Result<Self, Error> {
        let share = OPERATIONS / problem.visible_flops().max(1.0);
        let rows = match share < 1.0 {
            true => Rows::sample(problem, ((share * problem.rows() as f64) as usize).max(16), seed),
            false => Rows::all(problem),
        };
        let inputs = tensors.inputs();
        let all = [&tensors.query, &tensors.key, &tensors.value];
        Ok(Truth {
            problem: problem.clone(),
            reference: reference::attention(problem, inputs, &rows, None)?,
            baseline: reference::baseline(problem, inputs, &rows, None)?,
            finite: all.iter().all(|tensor| tensor.elements().are_finite()),
        })
    }

    /// The bytes of log-sum-exps that are right wherever they are compared.
    pub fn true_lse(&self, bytes: usize) -> Vec<u8> {
        let mut values = vec![0f32; bytes / 4];
        for (row, lse) in self.reference.rows.as_slice().iter().zip(&self.reference.lse) {
            let head = row.batch * self.problem.query_heads + row.head;
            values[head * self.problem.query_length + row.query] = *lse as f32;
        }
        values.into_iter().flat_map(f32::to_le_bytes).collect()
    }

    /// Judges an output and its log-sum-exps. The error names what is wrong.
    pub fn judge(&self, output: &[u8], lse: &[u8]) -> Result<Verdict, Wrong> {
        let lse: Vec<f32> = (lse.chunks_exact(4))
            .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .collect();
        let layout = Layout::contiguous(self.problem.output_shape());
        let tensor = layout.and_then(|it| Tensor::from_bytes(self.problem.dtype, it, output));
        let tensor = tensor.map_err(|error| Wrong::Shape(error.to_string()))?;
        if self.finite {
            let values = tensor.elements();
            let holes = values.nans() + lse.iter().filter(|value| value.is_nan()).count();
            if holes > 0 {
                return Err(Wrong::Holes { holes, values: values.len() + lse.len() });
            }
        }
        let (reference, baseline) = (&self.reference, &self.baseline);
        let verdict = compare_tensors(&self.problem, &tensor, &lse, reference, baseline)
            .map_err(|error| Wrong::Shape(error.to_string()))?;
        if verdict.passed { Ok(verdict) } else { Err(Wrong::Values(Box::new(verdict))) }
    }
}

/// What is wrong with a result.
#[derive(Debug, thiserror::Error)]
pub enum Wrong {
    /// Values that are NaN where no input is: never written.
    #[error("{holes} of {values} values were never written or are NaN")]
    Holes {
        /// How many.
        holes: usize,
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
