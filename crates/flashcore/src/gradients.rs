//! The arguments and the results of a backward pass.

use crate::backend::{Output, Report};
use crate::dtype::DType;
use crate::inputs::{InputError, Inputs};
use crate::plan::{Arrangement, GradientStrides};
use crate::problem::Problem;
use crate::tensor::{Shape, Tensor, TensorError, TensorView};

/// The arguments of a backward pass: the inputs of the forward pass, the results that it saved, and
/// the gradient of its output (dO).
#[derive(Debug, Clone, Copy)]
pub struct Backward<'a> {
    /// The inputs of the forward pass.
    pub inputs: Inputs<'a>,
    /// The output of the forward pass.
    pub output: TensorView<'a>,
    /// The log-sum-exps of the forward pass, in the order (batch, query heads, query length).
    pub lse: &'a [f32],
    /// The gradient of the output, of the output's shape and element type.
    pub output_gradient: TensorView<'a>,
    /// The gradient of the log-sum-exps (dLSE), in their order, where the problem has
    /// [`lse_gradient`](Problem::lse_gradient).
    pub lse_gradient: Option<&'a [f32]>,
}

/// The gradients of attention's inputs, each with the shape and element type of its input.
#[derive(Debug, Clone)]
pub struct Gradients {
    /// Gradient of the queries (dQ).
    pub query: Tensor,
    /// Gradient of the keys (dK).
    pub key: Tensor,
    /// Gradient of the values (dV).
    pub value: Tensor,
    /// Gradients of the sinks, one per query head, where the problem has sinks.
    pub sinks: Option<Vec<f32>>,
    /// Which kernel ran, why, and how long it took.
    pub report: Report,
}

impl<'a> Backward<'a> {
    /// Takes what the forward pass saved from its result.
    pub fn new(
        inputs: Inputs<'a>,
        forward: &'a Output,
        output_gradient: impl Into<TensorView<'a>>,
    ) -> Self {
        let (output, lse) = forward.part();
        let output_gradient = output_gradient.into();
        Backward { inputs, output, lse, output_gradient, lse_gradient: None }
    }

    /// Adds a gradient of the log-sum-exps, for a problem with
    /// [`with_lse_gradient`](Problem::with_lse_gradient).
    pub fn with_lse_gradient(self, lse_gradient: &'a [f32]) -> Self {
        Backward { lse_gradient: Some(lse_gradient), ..self }
    }

    /// Returns the strides and alignments of all tensors; the gradients are contiguous.
    pub fn arrangement(&self, problem: &Problem) -> Result<Arrangement, TensorError> {
        let gradient = self.output_gradient.layout().strides();
        let given = self.inputs.arrangement(problem)?;
        let gradients = given.gradients.map(|it| GradientStrides { output: gradient, ..it });
        Ok(Arrangement { output: self.output.layout().strides(), gradients, ..given })
    }

    /// Refuses tensors that do not match the problem, and results that the forward pass did not
    /// save.
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
        let tensor = "log-sum-exp gradients";
        match self.lse_gradient {
            Some(_) if !problem.lse_gradient => return Err(InputError::Unexpected { tensor }),
            None if problem.lse_gradient => return Err(InputError::Missing { tensor }),
            _ => {}
        }
        let gradient = self.lse_gradient.map(|gradient| (tensor, gradient));
        for (tensor, numbers) in [("log-sum-exp", self.lse)].into_iter().chain(gradient) {
            if numbers.len() != rows {
                let (given, expected) = (numbers.len(), rows);
                return Err(InputError::Length { tensor, given, expected });
            }
        }
        self.validate_unseen(problem)
    }

    /// Refuses log-sum-exps of another problem: a row that sees no key must have minus infinity.
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
    given: TensorView<'_>,
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
