//! Scenes of attention: a call as the library plans and binds it, over buffers of the simulator.
//!
//! A [`Call`] describes a kernel and a problem. Its tensors are made in `inputs`, its buffers and
//! launches in `stage`, and what must come out is computed here by the reference.

mod hostile;
mod inputs;
mod key_magnitudes;
mod stage;

use flashcore::family::Choice;
use flashcore::function::HostTensor;
use flashcore::gpu::Chip;
use flashcore::plan::Source;
use flashcore::serving::Sequences;
use flashcore::{DType, InputTensors, Inputs, Problem, Tensor};
use kernels::Configuration;
use kernels::mma::BackwardMma;
use kernels::parameter::Tensor as Role;
use ptx::Element;
use sim::BufferId;

use self::inputs::CallInputs;
use super::{Expected, Kernel, KernelLaunch, Ragged, Scene, SceneError};
use crate::check::Order;
use crate::reference::{self, Rows};
use crate::verdict::tolerances;

pub(super) use self::hostile::out_of_bounds;
pub(crate) use self::inputs::of_sequences;
pub use self::key_magnitudes::KeyMagnitudes;
pub(super) use self::stage::{Buffers, Staged};

/// A call of attention by a kernel of any configuration.
///
/// ```
/// use flashcore_testing::scene::Call;
/// use kernels::{Configuration, Rules, Scalar};
/// use ptx::{Element, Target};
/// use sim::Options;
///
/// let (head_dim, value_head_dim) = (8, 8);
/// let (target, element, rules) = (Target::SM_80, Element::F16, Rules::CAUSAL);
/// let scalar = Scalar { target, element, head_dim, value_head_dim, rules };
/// let call = Call::new(Configuration::Scalar(scalar), 1, [5, 9], [2, 1]);
/// let scene = call.scene()?;
/// let (memory, _) = scene.run(&Options::default())?;
/// assert!(scene.judge(&memory).passed());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Call {
    /// The attention kernel; the plan adds the other kernels that it needs.
    pub kernel: Configuration,
    /// The problem. With ragged sequences, its batch is their number and its lengths are the
    /// longest ones.
    pub problem: Problem,
    /// Sequences of unequal lengths.
    pub ragged: Option<Ragged>,
    /// The number of multiprocessors that the work is distributed over: usually fewer than there
    /// are tiles, so that thread blocks process several.
    pub multiprocessors: u32,
    /// The number of splits of the keys, for a kernel that splits them.
    pub splits: Option<u32>,
    /// The memory layout of queries, keys and values.
    pub order: Order,
    /// The magnitude of each key.
    pub key_magnitudes: KeyMagnitudes,
    /// The factor on all queries, usually 1. [`Call::with_outliers`] divides the softmax scale by
    /// it, so that scores do not change.
    pub outlier: f32,
    /// The mean that is added to every value, so that errors of sums do not cancel.
    pub value_mean: f32,
    /// Whether lists hold numbers out of bounds in place of the bounds themselves: kernels must
    /// clamp them and stay within the tensors. In a backward pass, the saved outputs of rows
    /// without keys are then not 0: kernels must not read them.
    pub hostile: bool,
    /// Whether the values of keys that no query sees are NaN.
    pub unseen: bool,
    /// The tensors that the kernel's functions load from.
    pub captured: Vec<HostTensor>,
    /// Whether the host makes the lists of key blocks and of tiles from the contents of `captured`,
    /// instead of kernels on the device.
    pub contents_known: bool,
}

/// The initial value of results that no kernel may write; every element type represents it exactly.
pub(super) const UNTOUCHED: f64 = 77.0;

impl Call {
    /// Creates a call over sequences of equal lengths, `[queries, keys]`, with `[query heads, key
    /// heads]`, under the rules that the kernel is built for.
    pub fn new(
        kernel: Configuration,
        batch: usize,
        lengths: [usize; 2],
        heads: [usize; 2],
    ) -> Self {
        let built = Kernel::of(&kernel);
        let splits = match kernel {
            // Two key blocks per split, so that small problems have several splits.
            Configuration::Mma(mma) if mma.split => {
                Some((lengths[1] as u32).div_ceil(2 * mma.key_block).max(1))
            }
            _ => None,
        };
        Call {
            problem: match kernel {
                Configuration::Backward(kernels::Backward { deterministic, .. })
                | Configuration::BackwardMma(BackwardMma { deterministic, .. }) => {
                    let problem = built.problem(batch, lengths, heads).backward();
                    if deterministic { problem.deterministic() } else { problem }
                }
                Configuration::Forward(tile)
                | Configuration::Prefill(kernels::Prefill { tile, .. }) => {
                    built.problem(batch, lengths, heads).with_output_dtype(dtype(tile.output))
                }
                _ => built.problem(batch, lengths, heads),
            },
            kernel,
            ragged: None,
            multiprocessors: 2,
            splits,
            order: Order::Contiguous,
            key_magnitudes: KeyMagnitudes::Uniform,
            outlier: 1.0,
            value_mean: 0.0,
            hostile: false,
            unseen: false,
            captured: Vec::new(),
            contents_known: false,
        }
    }

    /// Creates a call over sequences of unequal lengths.
    pub fn ragged(kernel: Configuration, ragged: Ragged, heads: [usize; 2]) -> Self {
        let lengths = [&ragged.queries, &ragged.keys].map(|it| it.iter().copied().max());
        let lengths = lengths.map(Option::unwrap_or_default);
        let batch = ragged.queries.len();
        Call { ragged: Some(ragged), ..Call::new(kernel, batch, lengths, heads) }
    }

    /// Creates the call that the planner chose for a problem of equal lengths on a chip.
    pub fn chosen(chip: &Chip, problem: &Problem, choice: &Choice) -> Self {
        let kernel = *choice.kernel();
        let splits = match kernel {
            Configuration::Mma(_) => choice.tiling.map(|tiling| tiling.splits),
            _ => None,
        };
        let (problem, multiprocessors) = (problem.clone(), chip.multiprocessors);
        Call { problem, multiprocessors, splits, ..Call::new(kernel, 1, [1, 1], [1, 1]) }
    }

    /// Changes the problem of the call.
    pub fn with(mut self, change: impl FnOnce(Problem) -> Problem) -> Self {
        self.problem = change(self.problem);
        self
    }

    /// Gives the log-sum-exps of a backward problem a gradient, or none.
    pub fn with_lse_gradient(mut self, lse_gradient: bool) -> Self {
        self.problem.lse_gradient = lse_gradient;
        self
    }

    /// Multiplies the queries by `outlier` and divides the softmax scale by it, so that scores do
    /// not change.
    pub fn with_outliers(mut self, outlier: f32) -> Self {
        self.outlier = outlier;
        self.with(|problem| {
            let scale = problem.scale();
            problem.with_scale(scale / outlier)
        })
    }

    /// Returns the call with keys of these magnitudes.
    pub fn with_keys(self, key_magnitudes: KeyMagnitudes) -> Self {
        Call { key_magnitudes, ..self }
    }

    /// Sets the number of multiprocessors.
    pub fn with_multiprocessors(self, multiprocessors: u32) -> Self {
        Call { multiprocessors, ..self }
    }

    /// Makes the scene: its tensors and lists, its launches as planned and bound, and the expected
    /// results.
    pub fn scene(&self) -> Result<Scene, SceneError> {
        let inputs = self.inputs()?;
        let staged = self.stage(&inputs)?;
        let results = match &inputs.backward {
            Some(backward) => backward.expected(&staged),
            None => self.expected(&staged),
        };
        let results = results.map_err(refused)?;
        Ok(Scene { results, ..staged.scene(self.words())? })
    }

    /// Makes the scene with another launch of the plan as its main one, by its index in the plan.
    pub(super) fn scene_of(&self, launch: usize) -> Result<Scene, SceneError> {
        let scene = self.scene()?;
        let Scene { program, grid, arguments, mut before, after, .. } = scene.clone();
        before.push(KernelLaunch { program, grid, arguments });
        before.extend(after);
        let after = before.split_off((launch + 1).min(before.len()));
        let Some(KernelLaunch { program, grid, arguments }) = before.pop() else {
            return Err(SceneError::Size("the plan has no such launch".to_owned()));
        };
        Ok(Scene { program, grid, arguments, before, after, ..scene })
    }

    /// Makes the scene over the caller's sequences and tensors, without expected results; also
    /// returns the buffers of the output and the log-sum-exps.
    pub fn over(
        &self,
        sequences: &Sequences,
        tensors: &InputTensors,
    ) -> Result<(Scene, [BufferId; 2]), SceneError> {
        let inputs = CallInputs {
            problem: sequences.problem().clone(),
            sequences: Some(sequences.clone()),
            tensors: tensors.clone(),
            captured: Vec::new(),
            backward: None,
        };
        let staged = self.stage(&inputs)?;
        let results = [Role::Output, Role::Lse].map(|it| staged.buffers[&Source::Tensor(it)]);
        Ok((staged.scene(self.words())?, results))
    }

    /// Makes the scene without expected results, which take long to compute for a large problem.
    pub fn without_expected(&self) -> Result<Scene, SceneError> {
        self.stage(&self.inputs()?)?.scene(self.words())
    }

    /// Computes the expected output and log-sum-exps of each row, with tolerances by the library's
    /// accuracy rule. Elements of no row must keep [`UNTOUCHED`].
    fn expected(
        &self,
        Staged { problem, inputs, buffers, .. }: &Staged<'_>,
    ) -> Result<Vec<Expected>, flashcore::Error> {
        let inputs = *inputs;
        let sequences = Sequences::of(problem, inputs);
        let rows = Rows::of(&sequences);
        let exact = reference::attention(problem, inputs, &rows, None)?;
        let baseline = reference::baseline(problem, inputs, &rows, None)?;
        let [output_tolerance, mut lse_tolerance] = tolerances(problem, &exact, &baseline);
        if let Configuration::Mma(mma) = self.kernel
            && mma.accumulate == Element::F16
        {
            // Scores are accumulated in f16 and rounded once every 16 dimensions. Their magnitude
            // is near that of the log-sum-exps, which inherit their error.
            let finite = exact.lse.iter().filter(|value| value.is_finite());
            let largest = finite.fold(1f64, |top, value| top.max(value.abs()));
            lse_tolerance = problem.head_dim.div_ceil(16) as f64 * 2f64.powi(-11) * largest;
        }
        // The magnitude of the terms that outputs are sums of: the result with all values positive.
        let values = inputs.value;
        let positive = Tensor::from_fn(values.dtype(), values.shape(), |[a, b, c, d]| {
            values.head(a, c).row(b)[d].abs()
        })?;
        let positive = Inputs { value: positive.view(), ..inputs };
        let magnitude = reference::attention(problem, positive, &rows, None)?;

        let (shape, dim) = (problem.output_shape(), problem.value_head_dim);
        let nothing = |name, role, element, count: usize| Expected {
            name,
            buffer: buffers[&Source::Tensor(role)],
            element,
            exact: vec![UNTOUCHED; count],
            magnitude: vec![UNTOUCHED; count],
            tolerance: vec![0.0; count],
        };
        let element = problem.dtypes.output.element();
        let mut outputs = nothing("output", Role::Output, element, problem.rows() * dim);
        let mut log_sums = nothing("lse", Role::Lse, Element::F32, problem.rows());
        for (index, row) in rows.as_slice().iter().enumerate() {
            let (entry, position) = sequences.queries().locate(row.batch, row.query);
            let at = ((entry * shape.length + position) * shape.heads + row.head) * dim;
            outputs.exact[at..at + dim].copy_from_slice(&exact.output[index * dim..][..dim]);
            outputs.magnitude[at..at + dim]
                .copy_from_slice(&magnitude.output[index * dim..][..dim]);
            outputs.tolerance[at..at + dim].fill(output_tolerance);
            let at = sequences.lse_index(shape, row.batch, row.head, row.query);
            log_sums.exact[at] = exact.lse[index];
            log_sums.magnitude[at] = exact.lse[index].abs();
            log_sums.tolerance[at] = lse_tolerance;
        }
        Ok(vec![outputs, log_sums])
    }

    fn words(&self) -> String {
        let mut words = self.problem.to_string();
        if let Some(ragged) = &self.ragged {
            words += &format!(", {ragged}");
        }
        words + &format!(", {} multiprocessors", self.multiprocessors)
    }
}

fn refused(error: flashcore::Error) -> SceneError {
    SceneError::Size(error.to_string())
}

/// Returns the tensor data type of an element type.
pub(super) fn dtype(element: Element) -> DType {
    match element {
        Element::F32 => DType::F32,
        Element::F16 => DType::F16,
        Element::BF16 => DType::BF16,
        Element::E4M3 => DType::E4M3,
        Element::E5M2 => DType::E5M2,
        Element::Int8 => DType::Int8,
    }
}
