//! The additional inputs of the backward pass in a scene, and its expected results.

use flashcore::plan::Source;
use flashcore::serving::{Placement, Sequences};
use flashcore::{Error, Inputs, Problem, Strides, Tensor};
use kernels::parameter::Tensor as Role;
use ptx::Element;
use sim::Memory;

use super::call::{Buffers, Staged, UNTOUCHED};
use super::{Expected, encode};
use crate::reference::{self, HeadGradients, Heads, ResultGradients};
use crate::verdict::gradient_tolerances;

/// The output of the forward pass with its log-sum-exps, and the gradient dO of the output.
pub(super) struct Backward {
    output: Tensor,
    /// The output as memory holds it, which may differ in rows that see no key.
    held: Tensor,
    lse: Vec<f32>,
    gradient: Tensor,
    /// The gradient of the log-sum-exps, if the problem has one.
    lse_gradient: Option<Vec<f32>>,
}

/// A gradient: its name, its tensor, and its values in a [`HeadGradients`].
type Part = (&'static str, Role, fn(&HeadGradients) -> &[f64]);

/// The gradients that are computed: dQ, dK and dV.
const PARTS: [Part; 3] = [
    ("query gradient", Role::QueryGradient, |head| &head.query),
    ("key gradient", Role::KeyGradient, |head| &head.key),
    ("value gradient", Role::ValueGradient, |head| &head.value),
];

impl Backward {
    /// Computes the forward pass exactly and rounds it. If `hostile`, memory holds ones in rows
    /// that see no key, which the backward pass must ignore.
    pub(super) fn new(
        problem: &Problem,
        inputs: Inputs<'_>,
        gradient: Tensor,
        hostile: bool,
    ) -> Result<Self, Error> {
        let (output, lse) = reference::saved(problem, inputs)?;
        let mut held = output.clone();
        let sequences = Sequences::of(problem, inputs);
        for sequence in (0..sequences.queries().sequences()).filter(|_| hostile) {
            let queries = 0..sequences.queries().length(sequence);
            for query in queries.filter(|it| sequences.visible_keys(sequence, *it).is_empty()) {
                let (entry, row) = sequences.queries().locate(sequence, query);
                let ones = vec![1.0; problem.value_head_dim];
                (0..problem.query_heads).for_each(|head| held.set_row([entry, row, head], &ones));
            }
        }
        let lse_gradient = ResultGradients::random_lse(problem, 0)?;
        Ok(Backward { output, held, lse, gradient, lse_gradient })
    }

    /// Returns the bytes of a result of the forward pass.
    pub(super) fn bytes(&self, role: Role) -> Vec<u8> {
        match role {
            Role::Lse => bytes(&self.lse),
            _ => self.held.bytes().to_vec(),
        }
    }

    /// Returns the strides of dO, which is arranged as the inputs are.
    pub(super) fn output_gradient_strides(&self) -> Strides {
        self.gradient.layout().strides()
    }

    /// Adds the buffers of the gradients.
    pub(super) fn stage(
        &self,
        problem: &Problem,
        sequences: &Sequences,
        memory: &mut Memory,
        buffers: &mut Buffers,
    ) {
        let given = memory.input("OutputGradient", self.gradient.bytes().to_vec());
        buffers.insert(Source::Tensor(Role::OutputGradient), given);
        if let Some(gradient) = &self.lse_gradient {
            let given = memory.input("LseGradient", bytes(gradient));
            buffers.insert(Source::Tensor(Role::LseGradient), given);
        }
        let shapes = [problem.query_shape(), problem.key_shape(), problem.value_shape()];
        for ((_, role, _), shape) in PARTS.into_iter().zip(shapes) {
            let (name, count) = (format!("{role:?}"), shape.elements().unwrap_or(0));
            let of = placement(sequences, role);
            let used: usize = (0..of.sequences()).map(|sequence| of.length(sequence)).sum();
            let buffer = match used == shape.batch * shape.length {
                true => memory.output(&name, count * problem.dtype().bytes()),
                // Rows that belong to no sequence must stay as they were.
                false => {
                    memory.result(&name, encode(problem.dtype().element(), &vec![UNTOUCHED; count]))
                }
            };
            buffers.insert(Source::Tensor(role), buffer);
        }
        if problem.scores.sinks {
            let buffer = memory.output("SinkGradient", 4 * problem.query_heads);
            buffers.insert(Source::Tensor(Role::SinkGradient), buffer);
        }
    }

    /// Returns the expected gradients, with tolerances by the rule of the library.
    pub(super) fn expected(&self, staged: &Staged<'_>) -> Result<Vec<Expected>, Error> {
        let Staged { problem, inputs, buffers, .. } = staged;
        let heads = Heads::all(problem);
        let (output, output_gradient) = (self.output.view(), self.gradient.view());
        let lse_gradient = self.lse_gradient.as_deref();
        let results = ResultGradients { output: output_gradient, lse: lse_gradient };
        let exact = reference::gradients(problem, *inputs, results, &heads, None)?;
        let (inputs_of, lse) = (*inputs, self.lse.as_slice());
        let backward =
            flashcore::Backward { inputs: inputs_of, output, lse, output_gradient, lse_gradient };
        let baseline = reference::gradients_baseline(problem, backward, &heads, None)?;
        let [query, key, value, sinks] = gradient_tolerances(problem, *inputs, &exact, &baseline);
        let of_sinks = exact.sinks(problem).filter(|_| problem.scores.sinks).map(|exact| {
            let buffer = buffers[&Source::Tensor(Role::SinkGradient)];
            Expected::within(sinks, "gradients of the sinks", buffer, Element::F32, exact)
        });
        let shapes = [problem.query_shape(), problem.key_shape(), problem.value_shape()];
        let parts = PARTS.into_iter().zip(shapes).zip([query, key, value]);
        let sequences = Sequences::of(problem, *inputs);
        let of = |(((name, role, numbers), shape), tolerance): ((Part, flashcore::Shape), f64)| {
            let mut expected = Expected {
                name,
                buffer: buffers[&Source::Tensor(role)],
                element: problem.dtype().element(),
                magnitude: Vec::new(),
                tolerance: vec![0.0; shape.elements().unwrap_or(0)],
                exact: vec![UNTOUCHED; shape.elements().unwrap_or(0)],
            };
            let group = shape.heads / problem.kv_heads;
            let placement = placement(&sequences, role);
            for of_head in &exact.heads {
                let length = placement.length(of_head.sequence).max(1);
                for (index, row) in numbers(of_head).chunks_exact(shape.dim).enumerate() {
                    let (head, position) = (index / length, index % length);
                    let (entry, position) = placement.locate(of_head.sequence, position);
                    let head = of_head.kv_head * group + head;
                    let at = (entry * shape.length + position) * shape.heads + head;
                    let at = at * shape.dim..(at + 1) * shape.dim;
                    expected.exact[at.clone()].copy_from_slice(row);
                    expected.tolerance[at].fill(tolerance);
                }
            }
            expected.magnitude = expected.exact.iter().map(|value| value.abs()).collect();
            expected
        };
        Ok(parts.map(of).chain(of_sinks).collect())
    }
}

fn bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|it| it.to_le_bytes()).collect()
}

/// Returns the placement of a gradient's rows.
fn placement(sequences: &Sequences, role: Role) -> &Placement {
    match role {
        Role::QueryGradient => sequences.queries(),
        _ => sequences.keys(),
    }
}
