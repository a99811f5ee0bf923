//! Attention on the CPU: the blocked online softmax of FlashAttention, over all cores.
//!
//! A task is one block of queries, with every query head that reads the same key/value head. It
//! walks over the visible keys in steps, so memory grows linearly with the sequence length. The
//! assignment of rows to tasks is fixed before the threads start: every row of the output is handed
//! to exactly one task. Where queries are few, a task is a chunk of the keys of all heads instead
//! (split-KV). Keys and values are read in place, paged caches included.
//!
//! | file | its subject |
//! | --- | --- |
//! | `block` | the walk of a task over its keys |
//! | `split` | split-KV for few queries: chunks of keys, and their merging |
//! | `decode` | the walk over a chunk where a key/value head has very few rows |
//! | `vectors` | rows of tensors as f32 numbers, with descale factors applied |
//! | `tile` | matrix products in register tiles |
//! | `softmax` | scores, masks and the online softmax |
//! | `exp` | exponential and hyperbolic tangent |
//! | `backward` | gradients |
//! | `threads` | the thread pool of this process |

mod backward;
mod block;
mod decode;
mod exp;
mod softmax;
mod split;
mod threads;
mod tile;
mod vectors;

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use rayon::prelude::*;

use self::backward::Results;
use self::block::{Block, MAX_ROWS, MIN_ROWS, Shape, WalkKeys, Workspace};
use self::softmax::RowRule;
use self::vectors::Vectors;
use crate::backend::{
    Backend, BackendError, Cancellation, Output, Progress, Report, RunOptions, filled, room_for,
    unseen,
};
use crate::error::Error;
use crate::gradients::{Backward, Gradients};
use crate::inputs::Inputs;
use crate::plan::{Arrangement, Candidate, Plan};
use crate::problem::{MOST_HEAD_DIM, Pass, Problem, RowScores};
use crate::serving::Sequences;
use crate::tensor::{Element, Tensor, with_elements};
use kernels::attention::function::Here;

/// The CPU back end.
///
/// It serves every length, mask and element type; see [`Backend`] for an example.
#[derive(Debug, Clone, Copy, Default)]
pub struct CpuBackend {}

/// Returns the name of the kernel of a pass.
pub(crate) const fn kernel_of(pass: Pass) -> &'static str {
    match pass {
        Pass::Forward => "blocked",
        Pass::Backward => "backward",
    }
}

impl CpuBackend {
    /// Creates the back end over the threads of this process. Starts none.
    pub fn new() -> Self {
        CpuBackend {}
    }

    /// Runs some work of this back end on one of its threads, while the calling thread calls
    /// `watch` once per `period`. For callers that have something to look after while they wait,
    /// and may want to [cancel](Cancellation) the work.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use flashcore::{Backend, Cancellation, CpuBackend, InputTensors, Problem, RunOptions};
    ///
    /// let problem = Problem::new(1, 8, 8192, 64);
    /// let tensors = InputTensors::random(&problem, 0)?;
    /// let cancellation = Cancellation::new();
    /// let options = RunOptions { cancellation: Some(&cancellation), ..RunOptions::default() };
    /// let run = || CpuBackend::new().run(&problem, tensors.inputs(), &options);
    /// let patience = || cancellation.cancel();
    /// let result = CpuBackend::new().watched(run, Duration::from_millis(1), patience)?;
    /// assert_eq!(result.unwrap_err().to_string(), "the computation was cancelled");
    /// # Ok::<(), flashcore::Error>(())
    /// ```
    pub fn watched<T: Send>(
        &self,
        work: impl FnOnce() -> T + Send,
        period: Duration,
        watch: impl FnMut(),
    ) -> Result<T, Error> {
        Ok(threads::watched(work, period, watch)?)
    }

    fn candidate(&self, problem: &Problem) -> Candidate {
        let largest = problem.head_dim.max(problem.value_head_dim);
        let alike = match problem.pass {
            Pass::Forward => Ok(()),
            Pass::Backward => problem.dtypes.uniform().map(|_| ()),
        };
        let served = match (problem.validate(), alike) {
            (Err(error), _) => Err(error.to_string()),
            (_, Err(reason)) => Err(reason),
            _ if largest > MOST_HEAD_DIM => Err(format!("head dims end at {MOST_HEAD_DIM}")),
            _ => Ok("serves every length, mask and element type".to_owned()),
        };
        Candidate {
            backend: self.name(),
            kernel: kernel_of(problem.pass),
            accepted: served.is_ok(),
            on_request: false,
            configuration: None,
            reason: served.unwrap_or_else(|reason| reason),
            choice: None,
        }
    }
}

/// Returns the report of a call that began at `begin` and computed from `kernel_begin` on.
fn report(plan: &Plan, begin: Instant, kernel_begin: Instant) -> Report {
    Report::of(plan, begin, kernel_begin.elapsed(), begin.elapsed(), Vec::new())
}

impl Backend for CpuBackend {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn describe(&self) -> String {
        let threads = threads::install(rayon::current_num_threads).unwrap_or(0);
        let plural = if threads == 1 { "" } else { "s" };
        format!("{threads} thread{plural}, {}", instruction_set())
    }

    fn candidates(&self, problem: &Problem, _: &Arrangement) -> Vec<Candidate> {
        vec![self.candidate(problem)]
    }

    fn execute_backward(
        &self,
        plan: &Plan,
        backward: Backward<'_>,
        options: &RunOptions<'_>,
    ) -> Result<Gradients, Error> {
        let begin = Instant::now();
        let mut results = Results::zeros(&plan.problem)?;
        let kernel_begin = Instant::now();
        let watch = Watch { progress: options.progress, cancellation: options.cancellation };
        let problem = &plan.problem;
        threads::install(|| backward::differentiate(problem, backward, &mut results, watch))??;
        let Results { query, key, value, sinks } = results;
        let report = report(plan, begin, kernel_begin);
        Ok(Gradients { query, key, value, sinks, report })
    }

    fn execute(
        &self,
        plan: &Plan,
        inputs: Inputs<'_>,
        options: &RunOptions<'_>,
    ) -> Result<Output, Error> {
        let begin = Instant::now();
        let problem = &plan.problem;
        let (mut output, mut lse) = unseen(problem)?;
        let kernel_begin = Instant::now();
        let watch = Watch { progress: options.progress, cancellation: options.cancellation };
        threads::install(|| match problem.has_equal_lengths() {
            true => Ok(attend(problem, inputs, &mut output, &mut lse, watch)?),
            false => attend_sequences(problem, inputs, &mut output, &mut lse, watch),
        })??;
        let report = report(plan, begin, kernel_begin);
        Ok(Output { output, lse, report })
    }
}

/// The observers of a run: progress and cancellation.
#[derive(Clone, Copy)]
struct Watch<'a> {
    progress: Option<&'a dyn Progress>,
    cancellation: Option<&'a Cancellation>,
}

impl Watch<'_> {
    fn begin(&self, total: usize) {
        if let Some(progress) = self.progress {
            progress.begin(total as u64);
        }
    }

    /// Returns an error if the run was cancelled.
    fn check(&self) -> Result<(), BackendError> {
        self.cancellation.map_or(Ok(()), Cancellation::check)
    }

    /// Reports a finished task, or returns an error if the run was cancelled.
    fn advance(&self) -> Result<(), BackendError> {
        self.check()?;
        if let Some(progress) = self.progress {
            progress.advance(1);
        }
        Ok(())
    }
}

/// One sequence of a call.
struct Sequence<'a> {
    problem: &'a Problem,
    inputs: Inputs<'a>,
    /// The index of the sequence in the problem's batch.
    batch: usize,
}

impl<'a> Sequence<'a> {
    /// Returns the rows (query, head) that read a key/value head. The heads of one query are
    /// adjacent, so that a block of rows spans few queries and few keys are loaded in vain.
    fn rows(
        &self,
        queries: Range<usize>,
        kv_head: usize,
    ) -> impl Iterator<Item = (usize, usize)> + Clone + use<> {
        let group = self.problem.group_size();
        let heads = kv_head * group..(kv_head + 1) * group;
        queries.flat_map(move |query| heads.clone().map(move |head| (query, head)))
    }

    /// Returns all rows (query, head), grouped by key/value head.
    fn all_rows(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let queries = self.problem.query_length;
        (0..self.problem.kv_heads).flat_map(move |kv_head| self.rows(0..queries, kv_head))
    }

    fn query(&self, head: usize) -> Vectors<'a> {
        Vectors::query(self.problem, self.inputs, self.batch, head)
    }

    fn key(&self, kv_head: usize) -> Vectors<'a> {
        Vectors::key(self.problem, self.inputs, self.batch, kv_head)
    }

    fn value(&self, kv_head: usize) -> Vectors<'a> {
        Vectors::value(self.problem, self.inputs, self.batch, kv_head)
    }

    /// Returns the softmax rule of a row; without its sink, if the caller counts that elsewhere.
    fn rule(&self, (query, head): (usize, usize), with_sink: bool) -> RowRule<'a> {
        let Sequence { problem, inputs, batch } = *self;
        let rule = rule(problem, inputs, batch, head, query);
        let functions = problem.functions().next().map(|_| {
            problem.row_functions(inputs.captured, here(problem, inputs, batch, head, query))
        });
        RowRule { sink: rule.sink.filter(|_| with_sink), functions, ..rule }
    }

    /// Initializes a block with the rows of some queries that read a key/value head.
    fn begin(
        &self,
        block: &mut Block<'a>,
        kv_head: usize,
        queries: Range<usize>,
        with_sinks: bool,
    ) {
        let rows = self.rows(queries, kv_head);
        let vectors = rows.clone().map(|(query, head)| (self.query(head), query));
        let rules = rows.map(|row| self.rule(row, with_sinks));
        block.begin(self.problem.scale(), vectors, rules);
    }
}

/// Computes sequences of unequal lengths: those with few queries together, the others one after
/// the other.
fn attend_sequences(
    problem: &Problem,
    inputs: Inputs<'_>,
    output: &mut Tensor,
    lse: &mut [f32],
    watch: Watch<'_>,
) -> Result<(), Error> {
    let watch = Watch { progress: None, ..watch };
    let sequences = Sequences::of(problem, inputs);
    let shape = inputs.query.shape();
    let own = |sequence: usize| Inputs {
        slopes: sequences.slopes(inputs, sequence),
        first_sequence: sequence,
        queries: Some(sequences.queries()),
        keys: Some(sequences.keys()),
        ..inputs
    };
    let mut store = |sequence: usize, [query, head]: [usize; 2], sum: f32, values: &[f32]| {
        let (entry, row) = sequences.queries().locate(sequence, query);
        output.set_row([entry, row, head], values);
        lse[sequences.lse_index(shape, sequence, head, query)] = sum;
    };
    let problems: Vec<Problem> = (0..sequences.len()).map(|it| sequences.alone(it)).collect();
    // Grouped by the number of queries, since sequences that are computed together share a shape.
    let mut few: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (sequence, alone) in problems.iter().enumerate().filter(|it| it.1.rows() > 0) {
        if has_few_rows(alone) {
            few.entry(alone.query_length).or_default().push(sequence);
            continue;
        }
        let mut result = Tensor::zeros(problem.dtypes.output, alone.output_shape())?;
        let mut sums = filled("the log-sum-exp", alone.rows(), f32::NEG_INFINITY)?;
        with_elements!(result.elements_mut(), output =>
            attend_in_blocks(alone, own(sequence), output, &mut sums, watch))?;
        let mut values = vec![0.0; alone.value_head_dim];
        for [_, query, head] in alone.output_shape().vectors() {
            result.head(0, head).read(query, &mut values);
            store(sequence, [query, head], sums[head * alone.query_length + query], &values);
        }
    }
    for indices in few.values() {
        let of = |sequence: &usize| Sequence {
            problem: &problems[*sequence],
            inputs: own(*sequence),
            batch: 0,
        };
        let few: Vec<Sequence<'_>> = indices.iter().map(of).collect();
        split::attend(&few, watch, |index, row, sum, values| {
            store(indices[index], row, sum, values);
        })?;
    }
    Ok(())
}

/// Returns the name of the instruction set that the arithmetic uses, which is chosen at run time.
fn instruction_set() -> &'static str {
    #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
    match pulp::Arch::new() {
        pulp::Arch::V4(_) => return "AVX-512",
        pulp::Arch::V3(_) => return "AVX2",
        _ => {}
    }
    if cfg!(target_arch = "aarch64") { "NEON" } else { "the architecture's baseline instructions" }
}

/// A block of queries of the heads that share a key/value head, with the part of the results that
/// it writes.
struct Task<'a, T> {
    batch: usize,
    kv_head: usize,
    first_query: usize,
    /// For each query, the outputs of the heads of the group, one after the other.
    output: Vec<&'a mut [T]>,
    /// For each head of the group, the log-sum-exps of the queries.
    lse: Vec<&'a mut [f32]>,
}

/// Returns whether so few rows share a key/value head that the keys are split. Merging chunks of
/// keys changes the order of additions: the bits of a query depend on how many queries come with it.
fn has_few_rows(problem: &Problem) -> bool {
    problem.query_length * problem.group_size() <= MIN_ROWS && !problem.batch_invariant
}

/// Computes sequences of equal lengths on all threads.
fn attend(
    problem: &Problem,
    inputs: Inputs<'_>,
    output: &mut Tensor,
    lse: &mut [f32],
    watch: Watch<'_>,
) -> Result<(), BackendError> {
    if problem.rows() == 0 {
        return Ok(());
    }
    if !has_few_rows(problem) {
        return with_elements!(output.elements_mut(), output =>
            attend_in_blocks(problem, inputs, output, lse, watch));
    }
    let sequences = (0..problem.batch).map(|batch| Sequence { problem, inputs, batch });
    let sequences: Vec<Sequence<'_>> = sequences.collect();
    split::attend(&sequences, watch, |batch, [query, head], sum, values| {
        output.set_row([batch, query, head], values);
        lse[(batch * problem.query_heads + head) * problem.query_length + query] = sum;
    })
}

/// Computes many queries: a task is a block of queries over all keys.
fn attend_in_blocks<T: Element>(
    problem: &Problem,
    inputs: Inputs<'_>,
    output: &mut [T],
    lse: &mut [f32],
    watch: Watch<'_>,
) -> Result<(), BackendError> {
    let group = problem.group_size();
    let queries = query_block(problem, rayon::current_num_threads());
    let tasks = tasks(problem, queries, output, lse)?;
    watch.begin(tasks.len());
    let arch = pulp::Arch::new();
    let shape = Shape::new(arch, problem, queries * group);
    let room = || Ok((Workspace::new(shape)?, Some(Block::new(shape, queries * group)?)));
    tasks.into_par_iter().try_for_each_init(room, |room, mut task| {
        let (workspace, room) = room.as_mut().map_err(|error: &mut BackendError| error.clone())?;
        let mut block = room.take().expect("the task before gave it back");
        let queries = task.first_query..task.first_query + task.output.len();
        let sequence = Sequence { problem, inputs, batch: task.batch };
        sequence.begin(&mut block, task.kv_head, queries, true);
        let mut blocks = [(block, sequence.key(task.kv_head), sequence.value(task.kv_head))];
        let keys = 0..problem.key_length;
        let cancellation = watch.cancellation;
        arch.dispatch(WalkKeys { workspace, blocks: &mut blocks, keys, cancellation });
        let [(block, ..)] = blocks;
        let mut row = vec![0.0; problem.value_head_dim];
        for (query, output) in task.output.iter_mut().enumerate() {
            let outputs = output.chunks_exact_mut(problem.value_head_dim);
            for (head, output) in outputs.enumerate() {
                task.lse[head][query] = block.finish(query * group + head, &mut row);
                T::narrow(&row, output);
            }
        }
        *room = Some(block);
        watch.advance()
    })
}

/// Returns the indices of a row as functions see them.
fn here(problem: &Problem, inputs: Inputs<'_>, batch: usize, head: usize, query: usize) -> Here {
    let length = |length: usize| i32::try_from(length).unwrap_or(i32::MAX);
    Here {
        batch: (inputs.first_sequence + batch) as i32,
        head: head as i32,
        query: query as i32,
        query_length: length(problem.query_length),
        key_length: length(problem.key_length),
    }
}

/// Returns the mask and score rules of a row, without functions.
fn rule(
    problem: &Problem,
    inputs: Inputs<'_>,
    batch: usize,
    head: usize,
    query: usize,
) -> RowRule<'static> {
    let slope = inputs.slope(problem, batch, head);
    RowRule {
        visible: problem.visible_keys(batch, query),
        scores: RowScores::of(problem, query, problem.query_length, problem.key_length, slope),
        sink: inputs.sinks.map(|sinks| sinks[head]),
        functions: None,
    }
}

/// Tasks per thread, where there are enough rows: causal tasks differ in size, and threads in
/// speed.
const TASKS: usize = 8;

/// Returns the number of queries per task.
fn query_block(problem: &Problem, threads: usize) -> usize {
    let rows = (problem.rows() / (threads * TASKS)).clamp(MIN_ROWS, MAX_ROWS);
    (rows / problem.group_size()).clamp(1, problem.query_length)
}

/// Returns the tasks in the order (batch, key/value head, first query).
fn tasks<'a, T>(
    problem: &Problem,
    block: usize,
    output: &'a mut [T],
    lse: &'a mut [f32],
) -> Result<Vec<Task<'a, T>>, BackendError> {
    let (group, kv_heads) = (problem.group_size(), problem.kv_heads);
    let blocks = problem.query_length.div_ceil(block);
    let (count, what) = (problem.batch * kv_heads * blocks, "blocks of queries");
    let mut tasks = room_for(what, count)?;
    for index in 0..count {
        tasks.push(Task {
            batch: index / blocks / kv_heads,
            kv_head: index / blocks % kv_heads,
            first_query: index % blocks * block,
            output: room_for(what, block)?,
            lse: room_for(what, group)?,
        });
    }
    // Log-sum-exps are stored head by head, outputs query by query.
    for (head, lse) in lse.chunks_mut(problem.query_length).enumerate() {
        for (task, lse) in lse.chunks_mut(block).enumerate() {
            tasks[head / group * blocks + task].lse.push(lse);
        }
    }
    let heads = output.chunks_mut(group * problem.value_head_dim);
    for (index, output) in heads.enumerate() {
        let (query, kv_head) = (index / kv_heads, index % kv_heads);
        let (batch, query) = (query / problem.query_length, query % problem.query_length);
        tasks[(batch * kv_heads + kv_head) * blocks + query / block].output.push(output);
    }
    Ok(tasks)
}
