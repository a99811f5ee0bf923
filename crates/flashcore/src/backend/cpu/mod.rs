//! Attention on the CPU: the same blocked online softmax as on a GPU, over all cores.
//!
//! A task is one block of queries of one head. It walks over the visible keys in blocks, so
//! memory grows with the sequence length and not with its square. Which rows a task owns is
//! settled before the threads start: every row of the output is handed to exactly one task.

mod block;
mod exp;

use std::time::Instant;

use rayon::prelude::*;

use self::block::{QUERY_BLOCK, WalkKeys, Workspace};
use super::{Backend, BackendError, Candidate, Output, Progress, Report, RunOptions};
use crate::error::Error;
use crate::inputs::{InputLayouts, Inputs};
use crate::problem::{Problem, Scores};
use crate::serving::Sequences;
use crate::tensor::{Element, Tensor, with_elements};

/// The CPU as a back end.
///
/// It serves every length, mask and element type; see [`Backend`] for an example.
#[derive(Debug, Clone, Copy, Default)]
pub struct CpuBackend {}

/// The one kernel's name.
const KERNEL: &str = "blocked";

/// The largest head dim. Each thread holds blocks of about 400 vectors as f32, 100 MB at this
/// dim, and nobody has asked for a hundredth of it.
const MAX_HEAD_DIM: usize = 1 << 16;

impl CpuBackend {
    /// The back end over the global thread pool.
    pub fn new() -> Self {
        CpuBackend {}
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn describe(&self) -> String {
        let threads = rayon::current_num_threads();
        let plural = if threads == 1 { "" } else { "s" };
        format!("{threads} thread{plural}, {}", instruction_set())
    }

    fn candidates(&self, problem: &Problem, _: &InputLayouts) -> Vec<Candidate> {
        let largest = problem.head_dim.max(problem.value_head_dim);
        let (accepted, reason) = if let Err(error) = problem.validate() {
            (false, error.to_string())
        } else if largest > MAX_HEAD_DIM {
            (false, format!("head dims end at {MAX_HEAD_DIM}"))
        } else {
            (true, "serves every length, mask and element type".to_owned())
        };
        let (backend, kernel) = (self.name(), KERNEL.to_owned());
        vec![Candidate { backend, kernel, accepted, configuration: None, reason }]
    }

    fn run(
        &self,
        problem: &Problem,
        inputs: Inputs<'_>,
        options: &RunOptions<'_>,
    ) -> Result<Output, Error> {
        problem.validate()?;
        inputs.validate(problem)?;
        if let Some(kernel) = options.kernel.as_ref().filter(|kernel| *kernel != KERNEL) {
            return Err(Error::Backend(BackendError::UnknownKernel {
                kernel: kernel.clone(),
                known: format!("{}/{KERNEL}", self.name()),
            }));
        }
        let candidate = self.candidates(problem, &inputs.layouts()).remove(0);
        if !candidate.accepted {
            return Err(Error::Backend(BackendError::Unsupported {
                reasons: format!("{}/{KERNEL} ({})", self.name(), candidate.reason),
            }));
        }
        let begin = Instant::now();
        let mut output = Tensor::zeros(problem.dtype, problem.output_shape())?;
        let mut lse = Vec::new();
        lse.try_reserve_exact(problem.rows()).map_err(|_| BackendError::OutOfMemory)?;
        lse.resize(problem.rows(), f32::NEG_INFINITY);
        let kernel_begin = Instant::now();
        with_elements!(output.elements_mut(), elements =>
            attend(problem, inputs, elements, &mut lse, options.progress));
        let report = Report {
            backend: self.name(),
            kernel: KERNEL.to_owned(),
            configuration: None,
            reason: candidate.reason,
            kernel_time: kernel_begin.elapsed(),
            total_time: begin.elapsed(),
            notes: Vec::new(),
        };
        Ok(Output { output, lse, report })
    }

    /// One sequence after the other, each gathered into tensors of its own.
    fn run_sequences(
        &self,
        sequences: &Sequences,
        inputs: Inputs<'_>,
        options: &RunOptions<'_>,
    ) -> Result<Output, Error> {
        sequences.validate_inputs(inputs)?;
        let begin = Instant::now();
        let query = inputs.query.shape();
        let shape = sequences.output_shape(query);
        let mut output = Tensor::zeros(sequences.problem().dtype, shape)?;
        let mut lse = vec![f32::NEG_INFINITY; query.batch * query.heads * query.length];
        for sequence in 0..sequences.len() {
            let problem = sequences.alone(sequence);
            let tensors = sequences.gather(inputs, sequence)?;
            let options = RunOptions { progress: None, ..options.clone() };
            let result = self.run(&problem, tensors.inputs(), &options)?;
            for [_, position, head] in problem.output_shape().vectors() {
                let (entry, row) = sequences.queries().locate(sequence, position);
                output.copy_row([entry, row, head], &result.output, [0, position, head]);
                let index = sequences.lse_index(query, sequence, head, position);
                lse[index] = result.lse[head * problem.query_length + position];
            }
        }
        let report = Report {
            backend: self.name(),
            kernel: KERNEL.to_owned(),
            configuration: None,
            reason: "serves every length, mask and element type".to_owned(),
            kernel_time: begin.elapsed(),
            total_time: begin.elapsed(),
            notes: Vec::new(),
        };
        Ok(Output { output, lse, report })
    }
}

/// What the arithmetic is compiled for, chosen when the program starts.
fn instruction_set() -> &'static str {
    #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
    if let pulp::Arch::V3(_) = pulp::Arch::new() {
        return "AVX2";
    }
    if cfg!(target_arch = "aarch64") { "NEON" } else { "the architecture's baseline instructions" }
}

/// One block of queries of one head, with the rows of the results that belong to it.
struct Task<'a, T> {
    batch: usize,
    head: usize,
    first_query: usize,
    output: Vec<&'a mut [T]>,
    lse: &'a mut [f32],
}

/// Split the results into tasks and run them on all threads.
fn attend<T: Element>(
    problem: &Problem,
    inputs: Inputs<'_>,
    output: &mut [T],
    lse: &mut [f32],
    progress: Option<&dyn Progress>,
) {
    if problem.rows() == 0 {
        return;
    }
    let tasks = tasks(problem, output, lse);
    if let Some(progress) = progress {
        progress.begin(tasks.len() as u64);
    }
    let arch = pulp::Arch::new();
    tasks.into_par_iter().for_each_init(
        || Workspace::new(problem),
        |workspace, mut task| {
            let kv_head = problem.kv_head(task.head);
            let query = inputs.query.head(task.batch, task.head);
            let key = inputs.key.head(task.batch, kv_head);
            let value = inputs.value.head(task.batch, kv_head);
            let visible = |query| problem.visible_keys(task.batch, query);
            let queries = task.first_query..task.first_query + task.output.len();
            let slope = inputs.slope(problem, task.batch, task.head);
            let (rows, keys) = (problem.query_length, problem.key_length);
            let rules = |query| Scores::of(problem, query, rows, keys, slope);
            let sink = inputs.sinks.map(|sinks| sinks[task.head]);
            workspace.load_queries(query, queries, visible, rules, sink);
            arch.dispatch(WalkKeys { workspace, key, value, scale: problem.scale() });
            for (row, (output, lse)) in task.output.iter_mut().zip(task.lse).enumerate() {
                let (values, row_lse) = workspace.finish(row);
                T::narrow(values, output);
                *lse = row_lse;
            }
            if let Some(progress) = progress {
                progress.advance(1);
            }
        },
    );
}

/// The tasks in the order (batch, head, first query).
fn tasks<'a, T>(problem: &Problem, output: &'a mut [T], lse: &'a mut [f32]) -> Vec<Task<'a, T>> {
    let blocks = problem.query_length.div_ceil(QUERY_BLOCK);
    let mut tasks: Vec<Task<'a, T>> = lse
        .chunks_mut(problem.query_length)
        .enumerate()
        .flat_map(|(index, lse)| {
            let (batch, head) = (index / problem.query_heads, index % problem.query_heads);
            lse.chunks_mut(QUERY_BLOCK).enumerate().map(move |(block, lse)| Task {
                batch,
                head,
                first_query: block * QUERY_BLOCK,
                output: Vec::with_capacity(lse.len()),
                lse,
            })
        })
        .collect();
    let rows = output.chunks_mut(problem.value_head_dim);
    for ([batch, query, head], row) in problem.output_shape().vectors().zip(rows) {
        let block = (batch * problem.query_heads + head) * blocks + query / QUERY_BLOCK;
        tasks[block].output.push(row);
    }
    tasks
}
