//! Split-KV: where queries are few, a task is a chunk of a sequence's keys, for all heads, and the
//! partial results are merged. Chunks do not depend on the number of threads, and neither do the bits.

use std::ops::Range;

use rayon::prelude::*;

use super::block::{Block, KEY_BLOCK, Shape, WalkKeys};
use super::decode::{AreFew, DecodeRows};
use super::{Sequence, TASKS, Watch, block, decode};
use crate::backend::{BackendError, room_for};
use crate::problem::Problem;

/// Keys per chunk.
const CHUNK: usize = 4 * KEY_BLOCK;

/// Minimum number of chunks whose results are held at once.
const CHUNKS: usize = 128;

/// The partial result of all rows of a sequence over a chunk of its keys.
pub(super) trait Part: Send + Sized {
    /// Merges the partial result over another chunk.
    fn merge(&mut self, other: &Self);

    /// Writes the normalised output of a row of a key/value head, and returns its log-sum-exp.
    fn finish(&self, kv_head: usize, row: usize, output: &mut [f32]) -> f32;
}

/// Computes sequences that all have the same number of queries. `store` is called for every row with
/// the index of its sequence, its query and query head, its log-sum-exp and its output.
pub(super) fn attend(
    sequences: &[Sequence<'_>],
    watch: Watch<'_>,
    store: impl FnMut(usize, [usize; 2], f32, &[f32]),
) -> Result<(), BackendError> {
    let Some(first) = sequences.first() else { return Ok(()) };
    let rows = first.problem.query_length * first.problem.group_size();
    let are_few = pulp::Arch::new().dispatch(AreFew(rows));
    attend_rows(sequences, are_few, watch, store)
}

/// Computes the sequences by [`DecodeRows`] if rows are few, and by [`Block`]s otherwise.
fn attend_rows(
    sequences: &[Sequence<'_>],
    are_few: bool,
    watch: Watch<'_>,
    store: impl FnMut(usize, [usize; 2], f32, &[f32]),
) -> Result<(), BackendError> {
    let (first, arch, cancellation) = (&sequences[0], pulp::Arch::new(), watch.cancellation);
    if are_few {
        let room = || decode::Workspace::new(arch, first);
        return each_chunk(sequences, watch, room, store, |workspace, sequence, keys, is_first| {
            let mut rows = DecodeRows::new(arch, sequence, is_first)?;
            rows.walk(arch, workspace, sequence, keys, cancellation);
            Ok(rows)
        });
    }
    let rows = first.problem.query_length * first.problem.group_size();
    let shape = Shape::new(arch, first.problem, rows);
    let room = || block::Workspace::new(shape);
    each_chunk(sequences, watch, room, store, |workspace, sequence, keys, is_first| {
        let mut blocks = room_for("blocks of queries", sequence.problem.kv_heads)?;
        for kv_head in 0..sequence.problem.kv_heads {
            let mut block = Block::new(shape, rows)?;
            sequence.begin(&mut block, kv_head, 0..sequence.problem.query_length, is_first);
            blocks.push((block, sequence.key(kv_head), sequence.value(kv_head)));
        }
        arch.dispatch(WalkKeys { workspace, blocks: &mut blocks, keys, cancellation });
        Ok(blocks.into_iter().map(|(block, ..)| block).collect::<Vec<_>>())
    })
}

impl Part for Vec<Block<'_>> {
    fn merge(&mut self, other: &Self) {
        self.iter_mut().zip(other).for_each(|(own, other)| own.merge(other));
    }

    fn finish(&self, kv_head: usize, row: usize, output: &mut [f32]) -> f32 {
        self[kv_head].finish(row, output)
    }
}

/// One chunk of a sequence's keys.
struct Task {
    sequence: usize,
    keys: Range<usize>,
    is_first: bool,
    is_last: bool,
}

/// The chunks of all sequences: those that cover the keys some query sees, and at least one per
/// sequence, which may be empty.
struct Tasks {
    /// The visible keys of each sequence.
    seen: Vec<Range<usize>>,
    /// Cumulative number of tasks before each sequence, and in all.
    starts: Vec<usize>,
}

impl Tasks {
    fn new(sequences: &[Sequence<'_>]) -> Self {
        let seen: Vec<_> = sequences.iter().map(|sequence| seen(sequence.problem)).collect();
        let mut starts = vec![0];
        for (sequence, Range { start, end }) in seen.iter().enumerate() {
            let chunks = end.div_ceil(CHUNK).saturating_sub(start / CHUNK).max(1);
            starts.push(starts[sequence] + chunks);
        }
        Tasks { seen, starts }
    }

    fn count(&self) -> usize {
        self.starts[self.seen.len()]
    }

    fn task(&self, index: usize) -> Task {
        let sequence = self.starts.partition_point(|start| *start <= index) - 1;
        let Range { start, end } = self.seen[sequence];
        let first = (start / CHUNK + index - self.starts[sequence]) * CHUNK;
        Task {
            sequence,
            keys: first..end.min(first + CHUNK),
            is_first: index == self.starts[sequence],
            is_last: index + 1 == self.starts[sequence + 1],
        }
    }
}

/// Returns the range from the first to the last key that some query sees.
fn seen(problem: &Problem) -> Range<usize> {
    let ranges = (0..problem.query_length).map(|query| problem.visible_keys(0, query));
    let ranges = ranges.filter(|keys| !keys.is_empty());
    ranges.reduce(|one, other| one.start.min(other.start)..one.end.max(other.end)).unwrap_or(0..0)
}

/// Runs `attend` for each chunk, merges the partial results of each sequence in order, and stores them.
fn each_chunk<'a, W, P: Part>(
    sequences: &[Sequence<'a>],
    watch: Watch<'_>,
    room: impl Fn() -> Result<W, BackendError> + Sync,
    mut store: impl FnMut(usize, [usize; 2], f32, &[f32]),
    attend: impl Fn(&mut W, &Sequence<'a>, Range<usize>, bool) -> Result<P, BackendError> + Sync,
) -> Result<(), BackendError> {
    let tasks = Tasks::new(sequences);
    watch.begin(tasks.count());
    let run = |workspace: &mut Result<W, BackendError>, index: usize| {
        let workspace = workspace.as_mut().map_err(|error| error.clone())?;
        let Task { sequence, keys, is_first, .. } = tasks.task(index);
        // Only the first chunk counts the sinks.
        let part = attend(workspace, &sequences[sequence], keys, is_first)?;
        watch.advance()?;
        Ok(part)
    };
    let mut whole: Option<P> = None;
    let mut row = vec![0.0; sequences[0].problem.value_head_dim];
    // The number of chunks grows with the keys: only some of their results are held at a time.
    let held = CHUNKS.max(TASKS * rayon::current_num_threads());
    for first in (0..tasks.count()).step_by(held) {
        let held = first..tasks.count().min(first + held);
        let parts: Result<Vec<P>, BackendError> =
            held.clone().into_par_iter().map_init(&room, run).collect();
        for (task, part) in held.map(|index| tasks.task(index)).zip(parts?) {
            let whole = match &mut whole {
                Some(whole) if !task.is_first => {
                    whole.merge(&part);
                    whole
                }
                other => other.insert(part),
            };
            if task.is_last {
                let sequence = &sequences[task.sequence];
                let group = sequence.problem.group_size();
                for (query, head) in sequence.all_rows() {
                    let index = query * group + head % group;
                    let lse = whole.finish(head / group, index, &mut row);
                    store(task.sequence, [query, head], lse, &row);
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::inputs::{InputTensors, Inputs};
    use crate::problem::{Mask, Scores};

    /// Returns the indices, log-sum-exps and outputs of all rows, by one path or the other.
    fn rows(problem: &Problem, inputs: Inputs<'_>, are_few: bool) -> Vec<f32> {
        let sequences = (0..problem.batch).map(|batch| Sequence { problem, inputs, batch });
        let sequences: Vec<Sequence<'_>> = sequences.collect();
        let watch = Watch { progress: None, cancellation: None };
        let mut results = Vec::new();
        attend_rows(&sequences, are_few, watch, |sequence, [query, head], lse, output| {
            results.extend([sequence as f32, query as f32, head as f32, lse]);
            results.extend_from_slice(output);
        })
        .unwrap();
        results
    }

    /// Both paths give the same results.
    #[test]
    fn few_rows_are_as_many_rows() {
        let plain = Problem::new(2, 6, 3, 20)
            .with_kv_heads(3)
            .with_value_head_dim(29)
            .with_key_length(2 * CHUNK + 5);
        let rules = Scores::EVERY_RULE;
        for problem in [
            plain.clone(),
            plain.clone().with_dtype(DType::BF16).with_mask(Mask::CAUSAL),
            plain.clone().with_mask(Mask::window(Some(CHUNK), Some(0))).with_scores(rules),
            plain.clone().with_key_length(1).with_mask(Mask::CAUSAL).with_scores(rules),
        ] {
            let mut tensors = InputTensors::random(&problem, 3).unwrap();
            let [few, many] = [true, false].map(|few| rows(&problem, tensors.inputs(), few));
            let worst = few.iter().zip(&many).map(|(few, many)| (few - many).abs());
            let worst = worst.filter(|it| !it.is_nan()).fold(0.0, f32::max);
            assert!(few.len() == many.len() && worst < 3e-6, "{problem}: off by {worst}");

            // An infinite value reaches the rows that see it, and no other.
            let vector = vec![f32::INFINITY; problem.value_head_dim];
            tensors.value.set_row([1, problem.key_length - 1, 2], &vector);
            let [few, many] = [true, false].map(|few| rows(&problem, tensors.inputs(), few));
            let spoiled = few.iter().filter(|value| !value.is_finite()).count();
            assert!(spoiled > 0 && spoiled < few.len() / 4, "{problem}: {spoiled}");
            let alike = |(few, many): (&f32, &f32)| few.is_finite() == many.is_finite();
            assert!(few.iter().zip(&many).all(alike), "{problem}");
        }
    }
}
