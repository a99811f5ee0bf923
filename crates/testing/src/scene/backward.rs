//! What the backward pass is given besides its inputs, and what must come out of it.

use flashcore::plan::Source;
use flashcore::{Error, Inputs, Problem, Tensor};
use kernels::parameter::Tensor as Role;
use ptx::Element;
use sim::Memory;

use super::Expected;
use super::call::{Buffers, Staged};
use crate::reference::{self, Gradients, HeadGradients, Heads};
use crate::verdict::gradient_tolerances;

/// The output of the forward pass with its log-sum-exps, and its gradient.
pub(super) struct Backward {
    output: Tensor,
    lse: Vec<f32>,
    gradient: Tensor,
}

/// A gradient: its name, and where it is in a [`HeadGradients`].
type Part = (&'static str, Role, fn(&HeadGradients) -> &[f64]);

/// The gradients that are asked for.
const PARTS: [Part; 3] = [
    ("query gradient", Role::QueryGradient, |head| &head.query),
    ("key gradient", Role::KeyGradient, |head| &head.key),
    ("value gradient", Role::ValueGradient, |head| &head.value),
];

impl Backward {
    /// The forward pass, exactly and then rounded.
    pub(super) fn new(
        problem: &Problem,
        inputs: Inputs<'_>,
        gradient: Tensor,
    ) -> Result<Self, Error> {
        let (output, lse) = reference::saved(problem, inputs)?;
        Ok(Backward { output, lse, gradient })
    }

    /// What the forward pass left.
    pub(super) fn bytes(&self, role: Role) -> Vec<u8> {
        match role {
            Role::Lse => self.lse.iter().flat_map(|it| it.to_le_bytes()).collect(),
            _ => self.output.bytes().to_vec(),
        }
    }

    /// Makes buffers for the gradients.
    pub(super) fn stage(&self, problem: &Problem, memory: &mut Memory, buffers: &mut Buffers) {
        let given = memory.input("OutputGradient", self.gradient.bytes().to_vec());
        buffers.insert(Source::Tensor(Role::OutputGradient), given);
        let shapes = [problem.query_shape(), problem.key_shape(), problem.value_shape()];
        for ((_, role, _), shape) in PARTS.into_iter().zip(shapes) {
            let bytes = shape.elements().unwrap_or(0) * problem.dtype().bytes();
            let buffer = memory.output(&format!("{role:?}"), bytes);
            buffers.insert(Source::Tensor(role), buffer);
        }
        if problem.scores.sinks {
            let buffer = memory.output("SinkGradient", 4 * problem.query_heads);
            buffers.insert(Source::Tensor(Role::SinkGradient), buffer);
        }
    }

    /// The rule of the library, gradient by gradient.
    pub(super) fn expected(&self, staged: &Staged<'_>) -> Result<Vec<Expected>, Error> {
        let Staged { problem, inputs, buffers, .. } = staged;
        let heads = Heads::all(problem);
        let exact = reference::gradients(problem, *inputs, &self.gradient, &heads, None)?;
        let (output, lse, output_gradient) = (&self.output, &self.lse[..], &self.gradient);
        let backward = flashcore::Backward { inputs: *inputs, output, lse, output_gradient };
        let baseline = reference::gradients_baseline(problem, backward, &heads, None)?;
        let [query, key, value, sinks] = gradient_tolerances(problem, *inputs, &exact, &baseline);
        let of_sinks =
            exact.sinks(problem).filter(|_| problem.scores.sinks).map(|exact| Expected {
                name: "gradients of the sinks",
                buffer: buffers[&Source::Tensor(Role::SinkGradient)],
                element: Element::F32,
                magnitude: exact.iter().map(|value| value.abs()).collect(),
                tolerance: vec![sinks; exact.len()],
                exact,
            });
        let shapes = [problem.query_shape(), problem.key_shape(), problem.value_shape()];
        let parts = PARTS.into_iter().zip(shapes).zip([query, key, value]);
        let of = |(((name, role, numbers), shape), tolerance): ((Part, flashcore::Shape), f64)| {
            let exact = in_order(&exact, shape, problem, numbers);
            Expected {
                name,
                buffer: buffers[&Source::Tensor(role)],
                element: problem.dtype().element(),
                magnitude: exact.iter().map(|value| value.abs()).collect(),
                tolerance: vec![tolerance; exact.len()],
                exact,
            }
        };
        Ok(parts.map(of).chain(of_sinks).collect())
    }
}

/// Head by head into the order of the tensor: (batch, length, heads, dim).
fn in_order(
    gradients: &Gradients,
    shape: flashcore::Shape,
    problem: &Problem,
    numbers: fn(&HeadGradients) -> &[f64],
) -> Vec<f64> {
    let group = shape.heads / problem.kv_heads;
    let mut all = vec![0.0; shape.elements().unwrap_or(0)];
    for of_head in &gradients.heads {
        for (index, row) in numbers(of_head).chunks_exact(shape.dim).enumerate() {
            let (head, position) = (index / shape.length, index % shape.length);
            let head = of_head.kv_head * group + head;
            let at = (of_head.sequence * shape.length + position) * shape.heads + head;
            all[at * shape.dim..][..shape.dim].copy_from_slice(row);
        }
    }
    all
}
