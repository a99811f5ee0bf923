//! The random tensors of a call, with NaN wherever kernels must not read.

use flashcore::function::HostTensor;
use flashcore::random::uniform;
use flashcore::serving::{Placement, Sequences};
use flashcore::{
    Alibi, DType, Descale, InputTensors, Inputs, Layout, Pass, Problem, Shape, Tensor,
    random_descales,
};

use super::{Call, KeyMagnitudes, refused};
use crate::scene::backward::Backward;
use crate::scene::{Scene, SceneError};

/// The seed of queries.
pub(super) const QUERIES: u64 = 1;
/// The seed of keys.
pub(super) const KEYS: u64 = 2;
/// The seed of values.
pub(super) const VALUES: u64 = 3;

/// The inputs of a call.
pub(in crate::scene) struct CallInputs {
    pub(super) problem: Problem,
    pub(super) sequences: Option<Sequences>,
    pub(super) tensors: InputTensors,
    pub(super) captured: Vec<HostTensor>,
    pub(super) backward: Option<Backward>,
}

impl CallInputs {
    /// Returns the problem with the storage of the tensors, and the inputs.
    pub(super) fn call(&self) -> Result<(Problem, Inputs<'_>), flashcore::Error> {
        let inputs = self.tensors.inputs().with_captured(&self.captured);
        match &self.sequences {
            Some(sequences) => sequences.over(inputs),
            None => Ok((self.problem.clone(), inputs)),
        }
    }
}

impl Call {
    /// Makes the tensors; rows of no sequence are NaN.
    pub(in crate::scene) fn inputs(&self) -> Result<CallInputs, SceneError> {
        Scene::admit(&self.problem)?;
        self.tensors().map_err(refused)
    }

    fn tensors(&self) -> Result<CallInputs, flashcore::Error> {
        let mut problem = self.problem.clone();
        let (mut query, mut key) = (problem.query_shape(), problem.key_shape());
        let mut sequences = None;
        if let Some(ragged) = &self.ragged {
            let (queries, keys);
            ((queries, query), (keys, key)) = ragged.placements(&problem)?;
            let placed = Sequences::new(problem, queries, keys)?;
            problem = placed.problem().clone();
            sequences = Some(placed);
        }
        let dtypes = problem.dtypes;
        let tensor = |seed: u64, dtype: DType, shape: Shape, placement: Option<&Placement>| {
            let index = |[a, b, c, d]: [usize; 4]| {
                (((a * shape.length + b) * shape.heads + c) * shape.dim + d) as u64
            };
            let key_magnitudes =
                if seed == KEYS { self.key_magnitudes } else { KeyMagnitudes::Uniform };
            let key_magnitudes = key_magnitudes.of_rows(shape, placement);
            let mean = if seed == VALUES { self.value_mean } else { 0.0 };
            let all = Tensor::from_fn(dtype, shape, |at| {
                if let Some(wave) = self.key_magnitudes.wave(seed, at[1], at[3], shape.dim) {
                    return wave;
                }
                // Magnitudes up to 2 spread the scores enough that row maxima move.
                let outlier = if seed == QUERIES { self.outlier } else { 1.0 };
                let weight = outlier * key_magnitudes[at[0] * shape.length + at[1]];
                mean + 2.0 * weight * uniform(seed, index(at))
            })?;
            let all = match placement {
                Some(placement) => of_sequences(&all, placement)?,
                None => all,
            };
            self.order.arrange(all)
        };
        let (queries, keys) = (sequences.as_ref())
            .map_or((None, None), |sequences| (Some(sequences.queries()), Some(sequences.keys())));
        let value = Shape { dim: problem.value_head_dim, ..key };
        let heads = problem.query_heads;
        let slopes = match problem.scores.alibi {
            Alibi::None => 0,
            Alibi::PerHead => heads,
            Alibi::PerSequence => heads * problem.batch,
        };
        let numbers = |seed: u64, count: usize, magnitude: f32| -> Vec<f32> {
            (0..count as u64).map(|index| magnitude * uniform(seed, index)).collect()
        };
        let factors = random_descales(problem.descale_shapes_over(key), 7)?;
        let descales = problem.descales.zip(factors).try_map(|(descale, factors)| {
            let Some(factors) = factors else { return Ok::<_, flashcore::Error>(None) };
            // Descale factors of tokens of no sequence are NaN too.
            let factors = match keys.filter(|_| descale == Descale::PerToken) {
                Some(placement) => of_sequences(&factors, placement)?,
                None => factors,
            };
            Ok(Some(self.order.arrange(factors)?))
        })?;
        let mut values = tensor(VALUES, dtypes.value, value, keys)?;
        if let Some(sequences) = sequences.as_ref().filter(|_| self.unseen) {
            hide_unseen(&mut values, sequences);
        }
        let tensors = InputTensors {
            query: tensor(QUERIES, dtypes.query, query, queries)?,
            key: tensor(KEYS, dtypes.key, key, keys)?,
            value: values,
            slopes: problem.scores.has_alibi().then(|| numbers(4, slopes, 0.1)),
            sinks: problem.scores.sinks.then(|| numbers(5, heads, 4.0)),
            descales,
        };
        let backward = match problem.pass {
            Pass::Forward => None,
            Pass::Backward => {
                let output = Shape { dim: problem.value_head_dim, ..query };
                let gradient = tensor(6, dtypes.output, output, queries)?;
                let (problem, inputs) = match &sequences {
                    Some(sequences) => sequences.over(tensors.inputs())?,
                    None => (problem.clone(), tensors.inputs()),
                };
                let inputs = inputs.with_captured(&self.captured);
                Some(Backward::new(&problem, inputs, gradient, self.hostile)?)
            }
        };
        let captured = self.captured.clone();
        Ok(CallInputs { problem, sequences, tensors, captured, backward })
    }
}

/// Returns a copy of a tensor in which every row of no sequence is NaN.
pub(crate) fn of_sequences(
    tensor: &Tensor,
    placement: &Placement,
) -> Result<Tensor, flashcore::TensorError> {
    let shape = tensor.shape();
    let mut kept = Tensor::filled(tensor.dtype(), Layout::contiguous(shape)?, f32::NAN)?;
    for sequence in 0..placement.sequences() {
        for position in 0..placement.length(sequence) {
            let (entry, row) = placement.locate(sequence, position);
            for head in 0..shape.heads {
                kept.copy_row([entry, row, head], tensor, [entry, row, head]);
            }
        }
    }
    Ok(kept)
}

/// Sets the values of keys that no query sees to NaN, which must not show in any result.
fn hide_unseen(values: &mut Tensor, sequences: &Sequences) {
    let (queries, keys) = (sequences.queries(), sequences.keys());
    let Shape { heads, dim, .. } = values.shape();
    for sequence in 0..keys.sequences() {
        let seen = (0..queries.length(sequence)).map(|it| sequences.visible_keys(sequence, it));
        let seen: Vec<_> = seen.collect();
        for key in 0..keys.length(sequence) {
            if seen.iter().any(|it| it.contains(&key)) {
                continue;
            }
            let (entry, row) = keys.locate(sequence, key);
            (0..heads).for_each(|head| values.set_row([entry, row, head], &vec![f32::NAN; dim]));
        }
    }
}
