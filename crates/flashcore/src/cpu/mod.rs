//! Attention on the CPU: the blocked online softmax of FlashAttention, over all cores.
//!
//! A task is one block of queries, with every query head that reads the same key/value head. It
//! walks over the visible keys in steps, so memory grows linearly with the sequence length. The
//! assignment of rows to tasks is fixed before the threads start: every row of the output is handed
//! to exactly one task. Where queries are few, a task is a chunk of the keys instead (split-KV).
//!
//! | file | its subject |
//! | --- | --- |
//! | `block` | the walk of a task over its keys |
//! | `vectors` | rows of tensors as f32 numbers, with descale factors applied |
//! | `tile` | matrix products in register tiles |
//! | `softmax` | scores, masks and the online softmax |
//! | `exp` | exponential and hyperbolic tangent |
//! | `backward` | gradients |
//! | `threads` | the thread pool of this process |

mod backward;
mod block;
mod exp;
mod softmax;
mod threads;
mod tile;
mod vectors;

use std::ops::Range;
use std::time::{Duration, Instant};

use rayon::prelude::*;

use self::backward::Results;
use self::block::{Block, KEY_BLOCK, MAX_ROWS, MIN_ROWS, Shape, WalkKeys, Workspace};
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
use crate::problem::{Pass, Problem, RowScores};
use crate::serving::Sequences;
use crate::tensor::{Element, Tensor, with_elements};
use kernels::attention::function::Here;

/// The CPU back end.
///
/// It serves every length, mask and element type; see [`Backend`] for an example.
#[derive(Debug, Clone, Copy, Default)]
pub struct CpuBackend {}

/// Name of the forward kernel.
const KERNEL: &str = "blocked";
/// Name of the backward kernel.
const BACKWARD: &str = "backward";

/// Returns the name of the kernel of a pass.
pub(crate) const fn kernel_of(pass: Pass) -> &'static str {
    match pass {
        Pass::Forward => KERNEL,
        Pass::Backward => BACKWARD,
    }
}

/// The largest supported head dim. Each thread holds blocks of about 450 vectors as f32, 120 MB at
/// this dim; head dims in use are below a hundredth of it.
const MAX_HEAD_DIM: usize = 1 << 16;

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

    fn candidate(&self, problem: &Problem, kernel: &'static str) -> Candidate {
        let largest = problem.head_dim.max(problem.value_head_dim);
        let alike = match problem.pass {
            Pass::Forward => Ok(()),
            Pass::Backward => problem.dtypes.uniform().map(|_| ()),
        };
        let served = match (problem.validate(), alike) {
            (Err(error), _) => Err(error.to_string()),
            (_, Err(reason)) => Err(reason),
            _ if largest > MAX_HEAD_DIM => Err(format!("head dims end at {MAX_HEAD_DIM}")),
            _ => Ok("serves every length, mask and element type".to_owned()),
        };
        Candidate {
            backend: self.name(),
            kernel,
            accepted: served.is_ok(),
            on_request: false,
            configuration: None,
            reason: served.unwrap_or_else(|reason| reason),
            choice: None,
        }
    }

    fn report(
        &self,
        plan: &Plan,
        kernel: &'static str,
        begin: Instant,
        kernel_begin: Instant,
    ) -> Report {
        Report {
            backend: self.name(),
            kernel,
            configuration: None,
            reason: plan.chosen.reason.clone(),
            kernel_time: kernel_begin.elapsed(),
            first_result_time: begin.elapsed(),
            total_time: begin.elapsed(),
            notes: Vec::new(),
        }
    }
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
        let kernel = match problem.pass {
            Pass::Forward => KERNEL,
            Pass::Backward => BACKWARD,
        };
        vec![self.candidate(problem, kernel)]
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
        let report = self.report(plan, BACKWARD, begin, kernel_begin);
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
            true => with_elements!(output.elements_mut(), output =>
                Ok(attend(Call { problem, inputs, output, lse: &mut lse, watch })?)),
            false => attend_sequences(problem, inputs, &mut output, &mut lse, watch),
        })??;
        let report = self.report(plan, KERNEL, begin, kernel_begin);
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

/// Computes one sequence after the other, each gathered into tensors of its own.
fn attend_sequences(
    problem: &Problem,
    inputs: Inputs<'_>,
    output: &mut Tensor,
    lse: &mut [f32],
    watch: Watch<'_>,
) -> Result<(), Error> {
    let watch = Watch { progress: None, ..watch };
    let sequences = Sequences::of(problem, inputs);
    let query = inputs.query.shape();
    for sequence in 0..sequences.len() {
        let alone = sequences.alone(sequence);
        let tensors = sequences.gather(inputs, sequence)?;
        let inputs =
            Inputs { captured: inputs.captured, first_sequence: sequence, ..tensors.inputs() };
        let mut result = Tensor::zeros(problem.dtypes.output, alone.output_shape())?;
        let mut sums = filled("the log-sum-exp", alone.rows(), f32::NEG_INFINITY)?;
        with_elements!(result.elements_mut(), output =>
            attend(Call { problem: &alone, inputs, output, lse: &mut sums, watch }))?;
        for [_, position, head] in alone.output_shape().vectors() {
            let (entry, row) = sequences.queries().locate(sequence, position);
            output.copy_row([entry, row, head], &result, [0, position, head]);
            let index = sequences.lse_index(query, sequence, head, position);
            lse[index] = sums[head * alone.query_length + position];
        }
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

/// The inputs and outputs of a computation.
struct Call<'a, T> {
    problem: &'a Problem,
    inputs: Inputs<'a>,
    output: &'a mut [T],
    lse: &'a mut [f32],
    watch: Watch<'a>,
}

/// Computes attention on all threads.
fn attend<T: Element>(call: Call<'_, T>) -> Result<(), BackendError> {
    let problem = call.problem;
    if problem.rows() == 0 {
        return Ok(());
    }
    let rows = problem.query_length * problem.group_size();
    // Merging chunks of keys changes the order of additions: the bits of a query would depend on
    // how many queries come with it.
    if rows <= MIN_ROWS && problem.key_length > KEY_CHUNK && !problem.batch_invariant {
        attend_in_chunks(call)
    } else {
        attend_in_blocks(call)
    }
}

/// Computes many queries: a task is a block of queries over all keys.
fn attend_in_blocks<T: Element>(call: Call<'_, T>) -> Result<(), BackendError> {
    let Call { problem, inputs, output, lse, watch } = call;
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
        begin(&mut block, problem, inputs, task.batch, task.kv_head, queries, true);
        let mut blocks = [with_head(block, problem, inputs, task.batch, task.kv_head)];
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

/// Keys per task where queries are few.
const KEY_CHUNK: usize = 16 * KEY_BLOCK;

/// Minimum number of chunks whose results are held at once.
const CHUNKS: usize = 128;

/// Computes few queries: a task is a chunk of the keys for all heads, which are adjacent in memory,
/// and the results of the chunks are merged. The chunks do not depend on the number of threads.
fn attend_in_chunks<T: Element>(call: Call<'_, T>) -> Result<(), BackendError> {
    let Call { problem, inputs, output, lse, watch } = call;
    let (group, queries, keys) = (problem.group_size(), problem.query_length, problem.key_length);
    let chunks = keys.div_ceil(KEY_CHUNK);
    watch.begin(problem.batch * chunks);
    let arch = pulp::Arch::new();
    let shape = Shape::new(arch, problem, queries * group);
    let attend = |workspace: &mut Result<Workspace, BackendError>, task: usize| {
        let workspace = workspace.as_mut().map_err(|error| error.clone())?;
        let (batch, chunk) = (task / chunks, task % chunks);
        let mut blocks = room_for("blocks of queries", problem.kv_heads)?;
        for kv_head in 0..problem.kv_heads {
            let mut block = Block::new(shape, queries * group)?;
            // Only the first chunk counts the sink.
            begin(&mut block, problem, inputs, batch, kv_head, 0..queries, chunk == 0);
            blocks.push(with_head(block, problem, inputs, batch, kv_head));
        }
        let keys = chunk * KEY_CHUNK..keys.min((chunk + 1) * KEY_CHUNK);
        let cancellation = watch.cancellation;
        arch.dispatch(WalkKeys { workspace, blocks: &mut blocks, keys, cancellation });
        watch.advance()?;
        Ok(blocks.into_iter().map(|(block, ..)| block).collect())
    };
    let mut whole: Vec<Block<'_>> = Vec::new();
    let mut row = vec![0.0; problem.value_head_dim];
    // The number of chunks grows with the keys: only some of their results are held at a time.
    let (tasks, round) = (problem.batch * chunks, CHUNKS.max(TASKS * rayon::current_num_threads()));
    for first in (0..tasks).step_by(round) {
        let tasks = (first..tasks.min(first + round)).into_par_iter();
        let results: Result<Vec<Vec<Block<'_>>>, BackendError> =
            tasks.map_init(|| Workspace::new(shape), attend).collect();
        for (task, part) in (first..).zip(results?) {
            let (batch, chunk) = (task / chunks, task % chunks);
            if chunk == 0 {
                whole = part;
            } else {
                whole.iter_mut().zip(&part).for_each(|(whole, part)| whole.merge(part));
            }
            if chunk + 1 < chunks {
                continue;
            }
            for (kv_head, block) in whole.iter().enumerate() {
                for (query, head) in rows(0..queries, kv_head, group) {
                    let index = query * group + head % group;
                    lse[(batch * problem.query_heads + head) * queries + query] =
                        block.finish(index, &mut row);
                    let place = (batch * queries + query) * problem.query_heads + head;
                    T::narrow(&row, &mut output[place * row.len()..][..row.len()]);
                }
            }
        }
    }
    Ok(())
}

/// Returns a block with the keys and values that it reads.
fn with_head<'a>(
    block: Block<'a>,
    problem: &Problem,
    inputs: Inputs<'a>,
    batch: usize,
    kv_head: usize,
) -> (Block<'a>, Vectors<'a>, Vectors<'a>) {
    let key = Vectors::key(problem, inputs, batch, kv_head);
    (block, key, Vectors::value(problem, inputs, batch, kv_head))
}

/// Returns the rows (query, head) of a block. The heads of one query are adjacent, so that a block
/// spans few queries and few keys are loaded in vain.
fn rows(
    queries: Range<usize>,
    kv_head: usize,
    group: usize,
) -> impl Iterator<Item = (usize, usize)> + Clone {
    let heads = kv_head * group..(kv_head + 1) * group;
    queries.flat_map(move |query| heads.clone().map(move |head| (query, head)))
}

/// Initializes a block with the rows of some queries.
fn begin<'a>(
    block: &mut Block<'a>,
    problem: &Problem,
    inputs: Inputs<'a>,
    batch: usize,
    kv_head: usize,
    queries: Range<usize>,
    sinks: bool,
) {
    let rows = rows(queries, kv_head, problem.group_size());
    let vectors =
        rows.clone().map(|(query, head)| (Vectors::query(problem, inputs, batch, head), query));
    let rules = rows.map(|(query, head)| {
        let rule = rule(problem, inputs, batch, head, query);
        let functions = problem.functions().next().map(|_| {
            problem.row_functions(inputs.captured, here(problem, inputs, batch, head, query))
        });
        RowRule { sink: rule.sink.filter(|_| sinks), functions, ..rule }
    });
    block.begin(problem.scale(), vectors, rules);
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
