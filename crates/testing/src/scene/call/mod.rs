//! Scenes of attention: a call as the library plans and binds it, over buffers of the simulator.

mod given;
mod hostile;
mod stage;
mod weights;

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

use self::given::Given;
use super::{Expected, Kernel, Ragged, Scene, SceneError, Step};
use crate::check::Order;
use crate::reference::{self, Rows};
use crate::verdict::tolerances;

pub(crate) use self::given::of_sequences;
pub(super) use self::hostile::out_of_bounds;
pub(super) use self::stage::{Buffers, Staged};
pub use self::weights::Weights;

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
    /// The attention kernel; others that its plan needs come with it.
    pub kernel: Configuration,
    /// What is asked. Where sequences are ragged, their number and lengths are those of the batch.
    pub problem: Problem,
    /// Sequences of unequal lengths.
    pub ragged: Option<Ragged>,
    /// How many multiprocessors work is shared out over: fewer than there are tiles, as a rule, so
    /// that blocks go from one to the next.
    pub processors: u32,
    /// Into how many parts keys are cut, by a kernel that cuts them.
    pub splits: Option<u32>,
    /// How queries, keys and values lie in memory.
    pub order: Order,
    /// How much keys weigh.
    pub weights: Weights,
    /// How large queries are: 1 as a rule, and scores are not touched by it.
    pub outlier: f32,
    /// What is added to every value: with a mean, errors of sums do not cancel.
    pub value_mean: f32,
    /// Whether lists hold numbers beyond their bounds where the bound itself is meant: whatever
    /// they hold, kernels stay within what there is.
    /// In a backward pass, outputs of rows without keys are not 0: nobody reads them.
    pub hostile: bool,
    /// Whether values of keys that no query sees are no numbers.
    pub unseen: bool,
    /// The tensors that the kernel's functions load from.
    pub captured: Vec<HostTensor>,
    /// Whether lists of key blocks and of tiles are made from what is in them.
    pub contents_known: bool,
}

/// What stands in results where nobody shall write: as a number of every element.
pub(super) const UNTOUCHED: f64 = 77.0;

impl Call {
    /// Sequences of equal lengths, `[queries, keys]`, with `[query heads, key heads]`, under rules
    /// that the kernel is built for.
    pub fn new(
        kernel: Configuration,
        batch: usize,
        lengths: [usize; 2],
        heads: [usize; 2],
    ) -> Self {
        let built = Kernel::of(&kernel);
        let splits = match kernel {
            // Few blocks of keys for each, so that small problems have several.
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
            processors: 2,
            splits,
            order: Order::Contiguous,
            weights: Weights::Even,
            outlier: 1.0,
            value_mean: 0.0,
            hostile: false,
            unseen: false,
            captured: Vec::new(),
            contents_known: false,
        }
    }

    /// Sequences of unequal lengths.
    pub fn ragged(kernel: Configuration, ragged: Ragged, heads: [usize; 2]) -> Self {
        let lengths = [&ragged.queries, &ragged.keys].map(|it| it.iter().copied().max());
        let lengths = lengths.map(Option::unwrap_or_default);
        let batch = ragged.queries.len();
        Call { ragged: Some(ragged), ..Call::new(kernel, batch, lengths, heads) }
    }

    /// What was chosen for a problem of equal lengths on a chip.
    pub fn chosen(chip: &Chip, problem: &Problem, choice: &Choice) -> Self {
        let kernel = *choice.kernel();
        let splits = match kernel {
            Configuration::Mma(_) => choice.tiling.map(|tiling| tiling.splits),
            _ => None,
        };
        let (problem, processors) = (problem.clone(), chip.multiprocessors);
        Call { problem, processors, splits, ..Call::new(kernel, 1, [1, 1], [1, 1]) }
    }

    /// The same call of another problem than the kernel's usual one.
    pub fn with(mut self, change: impl FnOnce(Problem) -> Problem) -> Self {
        self.problem = change(self.problem);
        self
    }

    /// The same call with queries so much larger, and scores as they were.
    pub fn with_outliers(mut self, outlier: f32) -> Self {
        self.outlier = outlier;
        self.with(|problem| {
            let scale = problem.scale();
            problem.with_scale(scale / outlier)
        })
    }

    /// The same call by so many multiprocessors.
    pub fn on(self, processors: u32) -> Self {
        Call { processors, ..self }
    }

    /// Makes tensors and lists, plans, binds, and computes what must come out.
    pub fn scene(&self) -> Result<Scene, SceneError> {
        let given = self.given()?;
        let staged = self.stage(&given)?;
        let results = match &given.backward {
            Some(backward) => backward.expected(&staged),
            None => self.expected(&staged),
        };
        let results = results.map_err(refused)?;
        Ok(Scene { results, ..staged.scene(self.words())? })
    }

    /// The same, with an eye on another launch of the plan than its main one.
    pub(super) fn scene_of(&self, launch: usize) -> Result<Scene, SceneError> {
        let scene = self.scene()?;
        let Scene { program, grid, arguments, mut before, after, .. } = scene.clone();
        before.push(Step { program, grid, arguments });
        before.extend(after);
        let after = before.split_off((launch + 1).min(before.len()));
        let Some(Step { program, grid, arguments }) = before.pop() else {
            return Err(SceneError::Size("the plan has no such launch".to_owned()));
        };
        Ok(Scene { program, grid, arguments, before, after, ..scene })
    }

    /// The same over sequences and tensors of the caller's own, and where output and log-sum-exps
    /// will be. Nothing is known of what must come out.
    pub fn over(
        &self,
        sequences: &Sequences,
        tensors: &InputTensors,
    ) -> Result<(Scene, [BufferId; 2]), SceneError> {
        let given = Given {
            problem: sequences.problem().clone(),
            sequences: Some(sequences.clone()),
            tensors: tensors.clone(),
            captured: Vec::new(),
            backward: None,
        };
        let staged = self.stage(&given)?;
        let results = [Role::Output, Role::Lse].map(|it| staged.buffers[&Source::Tensor(it)]);
        Ok((staged.scene(self.words())?, results))
    }

    /// The same without what must come out, which takes long for a large problem.
    pub fn unjudged(&self) -> Result<Scene, SceneError> {
        self.stage(&self.given()?)?.scene(self.words())
    }

    /// The rule of the library, row by row; where no row is, nothing may be written.
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
            // Scores are added up in f16: rounded once for every 16 dimensions, and in size near
            // the log-sum-exps, whose error they become.
            let finite = exact.lse.iter().filter(|value| value.is_finite());
            let largest = finite.fold(1f64, |top, value| top.max(value.abs()));
            lse_tolerance = problem.head_dim.div_ceil(16) as f64 * 2f64.powi(-11) * largest;
        }
        // What outputs are sums of: the same with every value positive.
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
        words + &format!(", {} multiprocessors", self.processors)
    }
}

fn refused(error: flashcore::Error) -> SceneError {
    SceneError::Size(error.to_string())
}

/// The type of tensors of an element.
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
