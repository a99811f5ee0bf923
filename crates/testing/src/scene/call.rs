//! Scenes of attention: a call as the library plans and binds it, over buffers of the simulator.

use std::collections::BTreeMap;

use flashcore::family::{Choice, Contents};
use flashcore::function::{Function, HostTensor};
use flashcore::gpu::Chip;
use flashcore::plan::{Launch, Source, Value, bind};
use flashcore::random::uniform;
use flashcore::serving::{Placement, Sequences};
use flashcore::{
    Alibi, DType, Descale, InputTensors, Inputs, Layout, Pass, Problem, Shape, Tensor,
    random_descales,
};
use kernels::Configuration;
use kernels::mma::BackwardMma;
use kernels::parameter::{Captured, CapturedPart, List, Tensor as Role, Workspace};
use ptx::{Element, Program};
use sim::{Argument, BufferId, Memory, TensorMapArgument};

use super::backward::Backward;
use super::{Expected, Kernel, Ragged, Scene, SceneError, Step, encode};
use crate::check::Order;
use crate::reference::{self, Rows};
use crate::verdict::tolerances;

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

/// How much keys weigh in the scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// All the same.
    Even,
    /// More towards both ends: from wherever a kernel walks, maxima rise once it is half through,
    /// and what it has so far still counts.
    Valley,
    /// Some far more than their neighbours, so that exponentials of anything but the maximum
    /// overflow.
    Spikes,
    /// The same, more towards both ends: later ones are far beyond earlier ones too.
    Peaks,
    /// All as much as those: of few keys, every score of a row may be far below zero.
    Heavy,
    /// So many even and so many as much as those, by turns: of two parts that become one, one is
    /// far beyond the other.
    Turns(usize),
    /// So many as much as those, and the others even: no part that comes later is beyond the first.
    First(usize),
    /// Those so far from a query, before it and behind it, more than all others: the edge of a wide window.
    Apart(usize),
    /// The fourth is not a number.
    Nan,
}

impl Weights {
    fn of(self, position: usize, length: usize) -> f32 {
        match self {
            Weights::Even | Weights::Apart(_) => 1.0,
            Weights::Valley => 1.0 + 3.0 * (2.0 * position as f32 / length as f32 - 1.0).abs(),
            Weights::Spikes if position % 7 == 3 => 60.0,
            Weights::Peaks if position % 7 == 3 => 25.0 * Weights::Valley.of(position, length),
            Weights::Spikes | Weights::Peaks => 1.0,
            Weights::Heavy => 60.0,
            Weights::Turns(of) if position / of % 2 == 1 => 60.0,
            Weights::First(of) if position < of => 60.0,
            Weights::Turns(_) | Weights::First(_) => 1.0,
            Weights::Nan if position == 3 => f32::NAN,
            Weights::Nan => 1.0,
        }
    }

    /// An element of a query or of a key, where scores are to depend on how far apart the two are: waves,
    /// which meet at the distance alone. Half of them are for keys before a query.
    fn wave(self, seed: u64, position: usize, column: usize, columns: usize) -> Option<f32> {
        let Weights::Apart(distance) = self else { return None };
        let waves = (columns / 4).max(1);
        let number = column / 2;
        let later = match seed {
            QUERIES => 0.0,
            KEYS if number < waves => distance as f32,
            KEYS => -(distance as f32),
            _ => return None,
        };
        // From waves as long as a block down to a few keys, none a multiple of another.
        let share = (number % waves) as f32 / waves as f32;
        let angle = 0.05 * 17_f32.powf(share) * (position as f32 + later);
        Some(2.0 * if column.is_multiple_of(2) { angle.cos() } else { angle.sin() })
    }

    /// Those of a tensor's rows, by where each is in its sequence.
    fn of_rows(self, shape: Shape, placement: Option<&Placement>) -> Vec<f32> {
        let rows = 0..shape.batch * shape.length;
        let mut all: Vec<f32> = rows.map(|row| self.of(row % shape.length, shape.length)).collect();
        let sequences = placement.map_or(0, Placement::sequences);
        for (sequence, placement) in (0..sequences).zip(placement.into_iter().cycle()) {
            let length = placement.length(sequence);
            for position in 0..length {
                let (entry, row) = placement.locate(sequence, position);
                all[entry * shape.length + row] = self.of(position, length);
            }
        }
        all
    }
}

/// What stands in results where nobody shall write: as a number of every element.
pub(super) const UNTOUCHED: f64 = 77.0;

/// A cache of 8 bits as numbers of 16.
const WIDENED: [Source; 2] = [Source::Tensor(Role::WideKey), Source::Tensor(Role::WideValue)];

/// The seeds of queries, of keys and of values.
const QUERIES: u64 = 1;
const KEYS: u64 = 2;
const VALUES: u64 = 3;

/// The buffer of each source that there is.
pub(super) type Buffers = BTreeMap<Source, BufferId>;

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

    /// Plans, makes a buffer for each source that there is, and binds.
    pub(super) fn stage<'a>(&self, given: &'a Given) -> Result<Staged<'a>, SceneError> {
        let (problem, inputs) = given.call().map_err(refused)?;
        let Kernel { target, .. } = Kernel::of(&self.kernel);
        let element = problem.dtypes.output.element();
        let chip =
            Chip { target, multiprocessors: self.processors, l2_bytes: 1 << 20, ..Chip::H200 };
        let choice = Choice::for_kernel(&chip, &problem, self.kernel, self.splits)
            .map_err(SceneError::Size)?;

        let sequences = Sequences::of(&problem, inputs);
        let (mut memory, mut buffers) = (Memory::new(), Buffers::new());
        for (role, tensor) in
            [(Role::Query, inputs.query), (Role::Key, inputs.key), (Role::Value, inputs.value)]
        {
            let buffer = memory.input(&format!("{role:?}"), tensor.bytes().to_vec());
            buffers.insert(Source::Tensor(role), buffer);
        }
        let descales = [Role::QueryDescale, Role::KeyDescale, Role::ValueDescale];
        for (role, factors) in descales.into_iter().zip(inputs.descales.into_array()) {
            if let Some(factors) = factors {
                let buffer = memory.input(&format!("{role:?}"), factors.bytes().to_vec());
                buffers.insert(Source::Tensor(role), buffer);
            }
        }
        for list in List::OF_ATTENTION {
            if let Some(mut words) = inputs.list(&problem, list) {
                if self.hostile {
                    fill(list, &mut words, |starts| inputs.list(&problem, starts));
                    exceed(list, &mut words, &problem, inputs.key.shape().batch);
                    cross(&mut words, list, |lengths| inputs.list(&problem, lengths));
                }
                let buffer = memory.input_u32(&format!("{list:?}"), &words);
                buffers.insert(Source::List(list), buffer);
            }
        }
        for function in problem.functions() {
            for (index, spec) in function.tensors().iter().enumerate() {
                let tensor = inputs.captured.iter().find(|it| it.name == spec.name);
                let tensor = tensor.ok_or_else(|| {
                    let (kind, name) = (function.kind().name(), function.name());
                    let missing = format!("tensor {}, which {kind} {name} loads from", spec.name);
                    SceneError::Size(format!("{missing}, is missing: Call::captured has them"))
                })?;
                let source = Source::Captured(function.kind(), index as u8);
                buffers.insert(source, memory.input(&spec.name, tensor.bytes.clone()));
            }
        }
        let outputs = problem.rows() * problem.value_head_dim;
        for (role, element, count) in
            [(Role::Output, element, outputs), (Role::Lse, Element::F32, problem.rows())]
        {
            let name = format!("{role:?}");
            let buffer = match &given.backward {
                Some(backward) => memory.input(&name, backward.bytes(role)),
                None if sequences.rows() == problem.rows() => {
                    memory.output(&name, element.bytes() as usize * count)
                }
                // What is no query of a sequence stays as it was.
                None => memory.result(&name, encode(element, &vec![UNTOUCHED; count])),
            };
            buffers.insert(Source::Tensor(role), buffer);
        }
        if let Some(backward) = &given.backward {
            backward.stage(&problem, &sequences, &mut memory, &mut buffers);
        }
        let lists = choice.lists_over(if self.contents_known { &self.captured } else { &[] });
        let mut restored = Vec::new();
        for it in &choice.memory {
            let (name, bytes) = (format!("{:?}", it.source), it.bytes.max(4) as usize);
            let buffer = match &it.contents {
                // Of a widened cache what no sequence uses is not written, and as in any cache
                // nobody minds what is there: NaN.
                Contents::Anything if WIDENED.contains(&it.source) => {
                    memory.result(&name, vec![0xFF; bytes])
                }
                Contents::FoundBlocks(..) | Contents::FoundTiles(..) if self.contents_known => {
                    memory.input_u32(&name, lists.of(it.source).unwrap_or_default())
                }
                Contents::Anything | Contents::FoundBlocks(..) | Contents::FoundTiles(..) => {
                    memory.output(&name, bytes)
                }
                Contents::Zeros => memory.input(&name, vec![0; bytes]),
                Contents::Tiles(_) | Contents::Blocks(_) => {
                    memory.input_u32(&name, lists.of(it.source).unwrap_or_default())
                }
            };
            if it.contents == Contents::Zeros {
                restored.push(buffer);
            }
            if problem.deterministic && it.source == Source::Workspace(Workspace::QueryGradientSums)
            {
                memory.adds_in_order(buffer);
            }
            buffers.insert(it.source, buffer);
        }

        let arrangement = inputs.arrangement(&problem).map_err(|error| refused(error.into()))?;
        let mut steps = Vec::new();
        // What is brought along need not be found.
        let found = |launch: &Launch| {
            use Configuration::{BlockFinder, BlockLister, TileSharer};
            let makes = matches!(launch.kernel, BlockFinder(_) | BlockLister(_) | TileSharer(_));
            self.contents_known && makes
        };
        for launch in choice.launches.iter().filter(|launch| !found(launch)) {
            let program = launch.kernel.program()?;
            let values = bind(launch, &program.parameters, &problem, &arrangement)
                .map_err(SceneError::Size)?;
            let values: Vec<Value> =
                values.into_iter().map(|value| measured(value, &problem, inputs)).collect();
            steps.push(Step::bound(program, launch.blocks, &values, &buffers)?);
        }
        let main = choice.main - choice.launches.iter().filter(|launch| found(launch)).count();
        Ok(Staged { problem, inputs, memory, buffers, steps, main, restored })
    }

    /// The tensors, with what is of no sequence NaN.
    pub(super) fn given(&self) -> Result<Given, SceneError> {
        let shapes = [self.problem.query_shape(), self.problem.key_shape()];
        if shapes.iter().any(|it| it.elements().is_none_or(|elements| elements > 1 << 28)) {
            return Err(SceneError::Size("the problem is too large to simulate".to_owned()));
        }
        self.tensors().map_err(refused)
    }

    fn tensors(&self) -> Result<Given, flashcore::Error> {
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
            let weights = if seed == KEYS { self.weights } else { Weights::Even };
            let weights = weights.of_rows(shape, placement);
            let mean = if seed == VALUES { self.value_mean } else { 0.0 };
            let all = Tensor::from_fn(dtype, shape, |at| {
                if let Some(wave) = self.weights.wave(seed, at[1], at[3], shape.dim) {
                    return wave;
                }
                // Up to 2: scores far enough apart that the maximum moves.
                let outlier = if seed == QUERIES { self.outlier } else { 1.0 };
                let weight = outlier * weights[at[0] * shape.length + at[1]];
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
            // Factors of what is of no sequence are NaN too.
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
        Ok(Given { problem, sequences, tensors, captured, backward })
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

/// What is known of a tensor that a function loads from.
fn measured(value: Value, problem: &Problem, inputs: Inputs<'_>) -> Value {
    let Value::Captured(captured) = value else { return value };
    let Captured { kind, index, part } = captured;
    let name = |function: Function| function.tensors().get(usize::from(index)).map(|it| &it.name);
    let name = problem.functions().find(|function| function.kind() == kind).and_then(name);
    let tensor = inputs.captured.iter().find(|tensor| Some(&tensor.name) == name);
    match (tensor, part) {
        (Some(tensor), CapturedPart::Extent(it)) => Value::U32(tensor.extents[it as usize] as u32),
        (Some(tensor), CapturedPart::Stride(it)) => Value::U64(tensor.strides[it as usize] as u64),
        _ => value,
    }
}

/// Numbers at the bounds of a list become numbers beyond them.
fn exceed(list: List, words: &mut [u32], problem: &Problem, entries: usize) {
    let most = match list {
        List::KeyLengths => problem.key_length as u32,
        List::QueryLengths => problem.query_length as u32,
        List::BatchIndex | List::BlockTable => entries as u32 - 1,
        List::QueryStarts | List::KeyStarts => words.last().copied().unwrap_or(0),
        List::LeftPadding => u32::MAX,
        _ => return,
    };
    out_of_bounds(words, most);
}

/// Lengths of sequences that fill their room become longer than any; so does that of a first one without
/// room.
fn fill(list: List, words: &mut [u32], other: impl Fn(List) -> Option<Vec<u32>>) {
    let starts = match list {
        List::QueryLengths => other(List::QueryStarts),
        List::KeyLengths => other(List::KeyStarts),
        _ => None,
    };
    let starts = starts.unwrap_or_default();
    for (index, (word, room)) in words.iter_mut().zip(starts.windows(2)).enumerate() {
        if (*word > 0 || index == 0) && *word == room[1] - room[0] {
            *word += 1_000_000;
        }
    }
}

/// Where another list says that a sequence is empty, it begins after it ends.
fn cross(words: &mut [u32], list: List, other: impl Fn(List) -> Option<Vec<u32>>) {
    let lengths = match list {
        List::QueryStarts => other(List::QueryLengths),
        List::KeyStarts => other(List::KeyLengths),
        _ => None,
    };
    for (sequence, length) in lengths.unwrap_or_default().into_iter().enumerate() {
        // The room of the one before it grows, and is not used.
        if length == 0 && sequence > 0 && sequence + 2 < words.len() {
            words[sequence] += 1;
        }
    }
}

/// What is 0 becomes negative, what is `most` far more.
pub(super) fn out_of_bounds(words: &mut [u32], most: u32) {
    for word in words {
        if *word == most {
            *word += 1_000_000;
        } else if *word == 0 {
            *word = -5i32 as u32;
        }
    }
}

/// A call with memory and launches.
pub(super) struct Staged<'a> {
    pub(super) problem: Problem,
    pub(super) inputs: Inputs<'a>,
    pub(super) memory: Memory,
    pub(super) buffers: Buffers,
    pub(super) steps: Vec<Step>,
    main: usize,
    restored: Vec<BufferId>,
}

impl Staged<'_> {
    fn scene(self, size: String) -> Result<Scene, SceneError> {
        let Staged { memory, buffers, mut steps, main, restored, .. } = self;
        let after = steps.split_off(main + 1);
        let (Some(step), before) = (steps.pop(), steps) else {
            return Err(SceneError::Size("the plan has no launch".to_owned()));
        };
        // Of a backward pass, the first two are inputs: nobody writes them.
        let results =
            [Role::Output, Role::Lse, Role::QueryGradient, Role::KeyGradient, Role::ValueGradient];
        let written_once =
            results.iter().filter_map(|it| buffers.get(&Source::Tensor(*it)).copied()).collect();
        let alone = Scene::alone(step, memory, Vec::new(), size);
        Ok(Scene { before, after, written_once, restored, ..alone })
    }
}

fn refused(error: flashcore::Error) -> SceneError {
    SceneError::Size(error.to_string())
}

/// What a call is over.
pub(super) struct Given {
    problem: Problem,
    sequences: Option<Sequences>,
    tensors: InputTensors,
    captured: Vec<HostTensor>,
    backward: Option<Backward>,
}

impl Given {
    /// The problem that the tensors pose, and the inputs.
    fn call(&self) -> Result<(Problem, Inputs<'_>), flashcore::Error> {
        let inputs = self.tensors.inputs().with_captured(&self.captured);
        match &self.sequences {
            Some(sequences) => sequences.over(inputs),
            None => Ok((self.problem.clone(), inputs)),
        }
    }
}

impl Step {
    /// A launch with buffers in the place of what its values name; nothing where there is none.
    pub(super) fn bound(
        program: Program,
        grid: u32,
        values: &[Value],
        buffers: &Buffers,
    ) -> Result<Self, SceneError> {
        let argument = |value: &Value| {
            Ok(match value {
                Value::U32(value) => Argument::U32(*value),
                Value::I32(value) => Argument::S32(*value),
                Value::U64(value) => Argument::U64(*value),
                Value::F32(value) => Argument::F32(*value),
                Value::Address(source) => match buffers.get(source) {
                    Some(buffer) => Argument::Address(*buffer, 0),
                    None => Argument::U64(0),
                },
                Value::Captured(captured) => {
                    return Err(SceneError::Size(format!("nobody passes {captured:?}")));
                }
                Value::Map(map) => {
                    let buffer = buffers.get(&Source::Tensor(map.tensor)).copied();
                    let none = || SceneError::Size(format!("there is no {:?}", map.tensor));
                    Argument::TensorMap(TensorMapArgument {
                        buffer: buffer.ok_or_else(none)?,
                        offset: 0,
                        dimensions: map.dimensions.clone(),
                        strides: map.strides.clone(),
                        tensor_box: map.tensor_box.clone(),
                    })
                }
            })
        };
        let arguments = values.iter().map(argument).collect::<Result<_, SceneError>>()?;
        Ok(Step { program, grid, arguments })
    }
}

/// A tensor with every row NaN that is of no sequence.
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

/// Makes the values of keys that no query sees NaN: the mask hides them, whatever they are.
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
