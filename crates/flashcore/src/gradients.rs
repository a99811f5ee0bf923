//! What a backward pass is given, and what it gives.

use crate::backend::{Output, Report};
use crate::dtype::DType;
use crate::inputs::{InputError, Inputs};
use crate::plan::{Arrangement, GradientStrides};
use crate::problem::Problem;
use crate::tensor::{Shape, Tensor, TensorError};

/// What gradients are computed from: the inputs of the forward pass, what it saved, and the
/// gradient of its output.
#[derive(Debug, Clone, Copy)]
pub struct Backward<'a> {
    /// The inputs of the forward pass.
    pub inputs: Inputs<'a>,
    /// Its output.
    pub output: &'a Tensor,
    /// Its log-sum-exps, in the order (batch, query heads, query length).
    pub lse: &'a [f32],
    /// The gradient of the output, which is like the output.
    pub output_gradient: &'a Tensor,
}

/// The gradients of attention's inputs, each like what it is the gradient of.
#[derive(Debug, Clone)]
pub struct Gradients {
    /// Of the queries.
    pub query: Tensor,
    /// Of the keys.
    pub key: Tensor,
    /// Of the values.
    pub value: Tensor,
    /// Of the sinks, where the problem has them: one for each query head.
    pub sinks: Option<Vec<f32>>,
    /// Which kernel ran, why, and how long it took.
    pub report: Report,
}

impl<'a> Backward<'a> {
    /// From the result of a forward pass.
    pub fn new(inputs: Inputs<'a>, forward: &'a Output, output_gradient: &'a Tensor) -> Self {
        Backward { inputs, output: &forward.output, lse: &forward.lse, output_gradient }
    }

    /// How all of it lies in memory, with gradients without gaps.
    pub fn arrangement(&self, problem: &Problem) -> Result<Arrangement, TensorError> {
        let gradient = self.output_gradient.layout().strides();
        let given = self.inputs.arrangement(problem)?;
        let gradients = given.gradients.map(|it| GradientStrides { output: gradient, ..it });
        Ok(Arrangement { output: self.output.layout().strides(), gradients, ..given })
    }

    /// Refuse tensors that are not the problem's, and what was not saved.
    pub fn validate(&self, problem: &Problem) -> Result<(), InputError> {
        self.inputs.validate(problem)?;
        let rows = problem.rows();
        if rows > 0 {
            if self.output.shape().elements() == Some(0) {
                return Err(InputError::NotSaved { what: "output" });
            }
            if self.lse.is_empty() {
                return Err(InputError::NotSaved { what: "log-sum-exp" });
            }
        }
        let expected = (problem.output_shape(), problem.dtypes.output);
        expect("output", self.output, expected)?;
        expect("the gradient of the output", self.output_gradient, expected)?;
        if self.lse.len() != rows {
            let (given, expected) = (self.lse.len(), rows);
            return Err(InputError::Length { tensor: "log-sum-exp", given, expected });
        }
        self.validate_unseen(problem)
    }

    /// A row that sees no key has a log-sum-exp of minus infinity. Anything else is the answer to
    /// another problem.
    fn validate_unseen(&self, problem: &Problem) -> Result<(), InputError> {
        if !problem.has_equal_lengths() || problem.scores.sinks {
            return Ok(());
        }
        let (queries, keys) = (problem.query_length, problem.key_length);
        let sees = |query: &usize| !problem.mask.visible_keys(*query, queries, keys).is_empty();
        for query in (0..queries).filter(|query| !sees(query)) {
            for (index, lse) in self.lse.iter().skip(query).step_by(queries).enumerate() {
                if *lse != f32::NEG_INFINITY {
                    let (batch, head) = (index / problem.query_heads, index % problem.query_heads);
                    return Err(InputError::ForeignLse { batch, head, query, lse: *lse });
                }
            }
        }
        Ok(())
    }
}

fn expect(
    tensor: &'static str,
    given: &Tensor,
    (shape, dtype): (Shape, DType),
) -> Result<(), InputError> {
    if given.shape() != shape {
        return Err(InputError::Shape { tensor, given: given.shape(), expected: shape });
    }
    match given.dtype() == dtype {
        true => Ok(()),
        false => Err(InputError::DType { tensor, given: given.dtype(), expected: dtype }),
    }
}
