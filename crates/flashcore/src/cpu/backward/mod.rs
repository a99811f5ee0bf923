//! Gradients on the CPU: five matrix products over blocks of queries and keys, on all cores.
//!
//! A key/value head is computed with every query head that reads it. Its rows (query, head) and its
//! keys are cut into blocks, and a task is one block of rows with one block of keys: it adds to the
//! gradients of both. Tasks run in rounds in which every block of rows meets at most one block of
//! keys and vice versa. So no two tasks add to the same sum at once, and the order of additions
//! depends only on the problem: the bits are the same on any number of threads.
//!
//! Memory beyond the results: f32 gradients of the heads in progress, and the blocks of each task.
//!
//! | file | its subject |
//! | --- | --- |
//! | `rows` | a block of rows: Q and dO, and the statistics of the softmax |
//! | `step` | the products of a task |

mod rows;
mod step;

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rayon::prelude::*;

use self::rows::{RowBlock, RowNumbers, read_query};
use self::step::{KeySums, WalkBlock};
use super::Watch;
use super::block::{KEY_BLOCK, Shape};
use crate::backend::BackendError;
use crate::error::Error;
use crate::gradients::Backward;
use crate::inputs::Inputs;
use crate::problem::Problem;
use crate::serving::Sequences;
use crate::tensor::{Element, Elements, Tensor};

/// The gradients of queries, keys, values and sinks.
pub(super) struct Results {
    pub(super) query: Tensor,
    pub(super) key: Tensor,
    pub(super) value: Tensor,
    pub(super) sinks: Option<Vec<f32>>,
}

impl Results {
    /// Allocates gradients of zero.
    pub(super) fn zeros(problem: &Problem) -> Result<Self, Error> {
        Ok(Results {
            query: Tensor::zeros(problem.dtypes.query, problem.query_shape())?,
            key: Tensor::zeros(problem.dtypes.key, problem.key_shape())?,
            value: Tensor::zeros(problem.dtypes.value, problem.value_shape())?,
            sinks: problem.scores.sinks.then(|| vec![0.0; problem.query_heads]),
        })
    }
}

/// Computes gradients on all threads, into zeroed results.
pub(super) fn differentiate(
    problem: &Problem,
    backward: Backward<'_>,
    results: &mut Results,
    watch: Watch<'_>,
) -> Result<(), Error> {
    let sinks = match problem.has_equal_lengths() {
        true => of_heads(problem, backward, results, watch)?,
        false => of_sequences(problem, backward, results, watch)?,
    };
    if let Some(results) = &mut results.sinks {
        for (result, sum) in results.iter_mut().zip(sinks) {
            *result = sum as f32;
        }
    }
    Ok(())
}

/// Computes one sequence after the other, each gathered into tensors of its own. Returns the
/// gradients of the sinks.
fn of_sequences(
    problem: &Problem,
    backward: Backward<'_>,
    results: &mut Results,
    watch: Watch<'_>,
) -> Result<Vec<f64>, Error> {
    let sequences = Sequences::of(problem, backward.inputs);
    let query_shape = backward.inputs.query.shape();
    let mut sinks = vec![0.0; problem.query_heads];
    for sequence in 0..sequences.len() {
        let alone = sequences.alone(sequence);
        let tensors = sequences.gather(backward.inputs, sequence)?;
        let queries = sequences.queries();
        let of_rows = |numbers: &[f32]| -> Vec<f32> {
            let number = |row| {
                let (head, query) = (row / alone.query_length, row % alone.query_length);
                numbers[sequences.lse_index(query_shape, sequence, head, query)]
            };
            (0..alone.rows()).map(number).collect()
        };
        let (lse, lse_gradient) = (of_rows(backward.lse), backward.lse_gradient.map(of_rows));
        let output = queries.gather(backward.output, sequence)?;
        let output_gradient = queries.gather(backward.output_gradient, sequence)?;
        let own = Backward {
            inputs: Inputs {
                captured: backward.inputs.captured,
                first_sequence: sequence,
                ..tensors.inputs()
            },
            output: output.view(),
            lse: &lse,
            output_gradient: output_gradient.view(),
            lse_gradient: lse_gradient.as_deref(),
        };
        let mut gathered = Results::zeros(&alone)?;
        let unseen = Watch { progress: None, ..watch };
        let own_sinks = of_heads(&alone, own, &mut gathered, unseen)?;
        sinks.iter_mut().zip(own_sinks).for_each(|(sum, own)| *sum += own);
        for (to, from, placement) in [
            (&mut results.query, &gathered.query, queries),
            (&mut results.key, &gathered.key, sequences.keys()),
            (&mut results.value, &gathered.value, sequences.keys()),
        ] {
            for [_, position, head] in from.shape().vectors() {
                let (entry, row) = placement.locate(sequence, position);
                to.copy_row([entry, row, head], from, [0, position, head]);
            }
        }
    }
    Ok(sinks)
}

fn of_heads(
    problem: &Problem,
    backward: Backward<'_>,
    results: &mut Results,
    watch: Watch<'_>,
) -> Result<Vec<f64>, BackendError> {
    let Results { query, key, value, .. } = results;
    match (query.elements_mut(), key.elements_mut(), value.elements_mut()) {
        (Elements::F32(query), Elements::F32(key), Elements::F32(value)) => {
            each_head(problem, backward, [query, key, value], watch)
        }
        (Elements::F16(query), Elements::F16(key), Elements::F16(value)) => {
            each_head(problem, backward, [query, key, value], watch)
        }
        (Elements::BF16(query), Elements::BF16(key), Elements::BF16(value)) => {
            each_head(problem, backward, [query, key, value], watch)
        }
        _ => unreachable!("candidates with tensors of different types are refused"),
    }
}

/// A key/value head of a sequence, with the part of the results that it writes.
struct Head<'a, T> {
    batch: usize,
    kv_head: usize,
    /// For each query, the gradients of the query heads of the group, one after the other.
    query: Vec<&'a mut [T]>,
    /// For each key, its gradient.
    key: Vec<&'a mut [T]>,
    value: Vec<&'a mut [T]>,
}

/// Computes every head. Returns the gradients of the sinks.
fn each_head<T: Element>(
    problem: &Problem,
    backward: Backward<'_>,
    [query, key, value]: [&mut [T]; 3],
    watch: Watch<'_>,
) -> Result<Vec<f64>, BackendError> {
    let (group, heads) = (problem.group_size(), problem.batch * problem.kv_heads);
    let by_head = |elements, width, length| split(elements, width, problem.kv_heads, length, heads);
    let queries = by_head(query, group * problem.head_dim, problem.query_length);
    let keys = by_head(key, problem.head_dim, problem.key_length);
    let values = by_head(value, problem.value_head_dim, problem.key_length);
    watch.begin(heads);
    let blocks = Blocks::new(problem);
    let results = queries.into_iter().zip(keys).zip(values).enumerate();
    let results: Vec<Head<'_, T>> = results
        .map(|(index, ((query, key), value))| {
            let (batch, kv_head) = (index / problem.kv_heads, index % problem.kv_heads);
            Head { batch, kv_head, query, key, value }
        })
        .collect();
    let sinks: Vec<Vec<f64>> = results
        .into_par_iter()
        .map(|head| {
            let work = Work::new(problem, backward, &blocks, head.batch, head.kv_head)?;
            work.run(watch)?;
            let sinks = work.finish(head);
            watch.advance()?;
            Ok(sinks)
        })
        .collect::<Result<_, BackendError>>()?;
    let mut sums = vec![0.0; problem.query_heads];
    for (index, sinks) in sinks.iter().enumerate() {
        let first = index % problem.kv_heads * group;
        sums[first..].iter_mut().zip(sinks).for_each(|(sum, own)| *sum += own);
    }
    Ok(sums)
}

/// Splits the vectors of (batch, length, heads) into those of each (batch, head), by position.
fn split<T>(
    elements: &mut [T],
    width: usize,
    kv_heads: usize,
    length: usize,
    heads: usize,
) -> Vec<Vec<&mut [T]>> {
    let mut split: Vec<Vec<&mut [T]>> = (0..heads).map(|_| Vec::with_capacity(length)).collect();
    for (index, vector) in elements.chunks_exact_mut(width).enumerate() {
        let (position, kv_head) = (index / kv_heads, index % kv_heads);
        split[position / length * kv_heads + kv_head].push(vector);
    }
    split
}

/// How heads are cut into blocks, which depends only on the problem.
struct Blocks {
    arch: pulp::Arch,
    shape: Shape,
    /// Rows per block: whole panels.
    rows: usize,
    /// Keys per block: whole steps.
    keys: usize,
}

/// Maximum rows and keys per block. Blocks are packed for each task; at this size, packing takes no
/// more than a few hundredths of the task's time.
const LARGEST: usize = 5 * KEY_BLOCK;
/// Maximum elements of a block's vectors, as long as it has the rows and keys of a step.
const ELEMENTS: usize = LARGEST * 512;
/// Tasks per round, over all heads, that there should be where the problem is large enough.
const TASKS: usize = 32;

impl Blocks {
    fn new(problem: &Problem) -> Self {
        let arch = pulp::Arch::new();
        let rows = problem.query_length * problem.group_size();
        let shape = Shape::new(arch, problem, rows);
        let wanted = TASKS.div_ceil((problem.batch * problem.kv_heads).max(1));
        let dim = problem.head_dim.max(problem.value_head_dim);
        let largest = (ELEMENTS / dim).clamp(KEY_BLOCK, LARGEST);
        let size = |length: usize, of: usize| {
            length.div_ceil(wanted).clamp(KEY_BLOCK, largest).next_multiple_of(of)
        };
        let keys = size(problem.key_length, KEY_BLOCK);
        Blocks { arch, shape, rows: size(rows, shape.lanes), keys }
    }
}

/// A key/value head in progress.
struct Work<'a> {
    problem: &'a Problem,
    backward: Backward<'a>,
    blocks: &'a Blocks,
    batch: usize,
    kv_head: usize,
    /// Statistics of each block of rows.
    numbers: Vec<RowNumbers<'a>>,
    /// Sums of dQ of each block of rows. A task locks its own, which no other task uses at that
    /// time.
    row_sums: Vec<Mutex<Vec<f32>>>,
    /// Sums of dK and dV of each block of keys.
    key_sums: Vec<Mutex<KeySums>>,
}

impl<'a> Work<'a> {
    fn new(
        problem: &'a Problem,
        backward: Backward<'a>,
        blocks: &'a Blocks,
        batch: usize,
        kv_head: usize,
    ) -> Result<Self, BackendError> {
        let shape = blocks.shape;
        let rows = problem.query_length * problem.group_size();
        let numbers: Vec<RowNumbers<'a>> = (0..rows.div_ceil(blocks.rows))
            .into_par_iter()
            .map(|block| {
                let rows = part(block, blocks.rows, rows);
                RowNumbers::new(shape, problem, backward, batch, kv_head, rows)
            })
            .collect::<Result<_, BackendError>>()?;
        let row_sums = numbers.iter().map(|numbers| Mutex::new(numbers.query_sums(shape)));
        let keys = problem.key_length;
        let key_sums = (0..keys.div_ceil(blocks.keys))
            .map(|block| Mutex::new(KeySums::new(shape, part(block, blocks.keys, keys).len())));
        Ok(Work {
            problem,
            backward,
            blocks,
            batch,
            kv_head,
            row_sums: row_sums.collect(),
            key_sums: key_sums.collect(),
            numbers,
        })
    }

    /// Computes every block of rows with every block of keys that it sees.
    fn run(&self, watch: Watch<'_>) -> Result<(), BackendError> {
        let rounds = self.row_sums.len().max(self.key_sums.len());
        for round in 0..rounds {
            (0..self.key_sums.len()).into_par_iter().try_for_each(|key_block| {
                watch.check()?;
                let row_block = (key_block + round) % rounds;
                if row_block < self.row_sums.len() {
                    self.task(row_block, key_block);
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    fn task(&self, row_block: usize, key_block: usize) {
        let Blocks { arch, shape, keys, .. } = *self.blocks;
        let numbers = &self.numbers[row_block];
        let keys = part(key_block, keys, self.problem.key_length);
        let seen = numbers.seen_of(keys.clone());
        if seen.is_empty() {
            return;
        }
        let inputs = self.backward.inputs;
        arch.dispatch(WalkBlock {
            shape,
            rows: &RowBlock::new(shape, self.backward, numbers),
            numbers,
            row_sums: &mut lock(&self.row_sums[row_block]),
            key: inputs.key.head(self.batch, self.kv_head),
            value: inputs.value.head(self.batch, self.kv_head),
            first: keys.start,
            keys: seen,
            key_sums: &mut lock(&self.key_sums[key_block]),
        });
    }

    /// Writes the gradients, and returns those of the sinks.
    fn finish<T: Element>(&self, head: Head<'_, T>) -> Vec<f64> {
        let Blocks { shape, rows, keys, .. } = *self.blocks;
        let Problem { head_dim, value_head_dim, .. } = *self.problem;
        let scale = self.problem.scale();
        let mut vector = vec![0.0; head_dim];
        let queries = head.query.into_iter().flat_map(|group| group.chunks_exact_mut(head_dim));
        for (row, query) in queries.enumerate() {
            read_query(shape, &lock(&self.row_sums[row / rows]), row % rows, &mut vector);
            vector.iter_mut().for_each(|value| *value *= scale);
            T::narrow(&vector, query);
        }
        let mut value_vector = vec![0.0; value_head_dim];
        for (index, (key, value)) in head.key.into_iter().zip(head.value).enumerate() {
            lock(&self.key_sums[index / keys]).read(index % keys, &mut vector, &mut value_vector);
            vector.iter_mut().for_each(|value| *value *= scale);
            T::narrow(&vector, key);
            T::narrow(&value_vector, value);
        }
        let mut sinks = vec![0.0; self.problem.group_size()];
        self.numbers.iter().for_each(|numbers| numbers.add_sinks(&mut sinks));
        sinks
    }
}

/// Returns the range of a block among `total` items in blocks of `size`.
fn part(block: usize, size: usize, total: usize) -> Range<usize> {
    block * size..total.min((block + 1) * size)
}

fn lock<T>(sums: &Mutex<T>) -> MutexGuard<'_, T> {
    sums.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Backend, RunOptions};
    use crate::cpu::CpuBackend;
    use crate::cpu::tile::{Lanes, Tile};
    use crate::dtype::DType;
    use crate::inputs::InputTensors;
    use crate::problem::{Mask, Scores};

    /// Computes the gradients of a small problem with a given tile, not necessarily the best.
    fn gradients(arch: pulp::Arch, tile: Tile) -> Vec<f32> {
        let problem = Problem::new(1, 2, 37, 20)
            .with_kv_heads(1)
            .with_key_length(211)
            .with_value_head_dim(29)
            .with_dtype(DType::F32)
            .with_scores(Scores::EVERY_RULE)
            .with_mask(Mask::CAUSAL);
        let tensors = InputTensors::random(&problem, 1).unwrap();
        let gradient = Tensor::random(DType::F32, problem.output_shape(), 2).unwrap();
        let inputs = tensors.inputs();
        let saved = CpuBackend::new().run(&problem, inputs, &RunOptions::default()).unwrap();
        let lanes = tile.size().1 * arch.dispatch(Lanes);
        let blocks = Blocks {
            arch,
            shape: Shape::with_tile(tile, lanes, &problem),
            rows: 64usize.next_multiple_of(lanes),
            keys: KEY_BLOCK,
        };
        let work =
            Work::new(&problem, Backward::new(inputs, &saved, &gradient), &blocks, 0, 0).unwrap();
        work.run(Watch { progress: None, cancellation: None }).unwrap();
        let mut found = [37 * 40, 211 * 20, 211 * 29].map(|length| vec![0f32; length]);
        let [query, key, value] = &mut found;
        let sinks = work.finish(Head {
            batch: 0,
            kv_head: 0,
            query: query.chunks_mut(40).collect(),
            key: key.chunks_mut(20).collect(),
            value: value.chunks_mut(29).collect(),
        });
        found.into_iter().flatten().chain(sinks.into_iter().map(|sink| sink as f32)).collect()
    }

    /// The tiles of other instruction sets run here too, if slowly.
    #[test]
    fn every_tile_gives_the_same() {
        let expected = gradients(pulp::Arch::Scalar, Tile::Narrow);
        assert!(expected.iter().all(|value| value.is_finite()));
        for tile in [Tile::Narrow, Tile::Few, Tile::Many, Tile::Wide] {
            for arch in [pulp::Arch::Scalar, pulp::Arch::new()] {
                let found = gradients(arch, tile);
                let worst = expected.iter().zip(&found).map(|(one, other)| (one - other).abs());
                let worst = worst.fold(0.0, f32::max);
                assert!(worst < 4e-6, "{tile:?}: off by {worst}");
            }
        }
    }
}
