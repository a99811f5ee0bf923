//! Batch invariance: the bits of a query's output must not depend on what is computed with it.
//!
//! Batches are drawn from a few long sequences: consecutive queries of some of them, each over the
//! keys up to its own, in a cache that is placed differently each time. The result of a query is
//! recorded the first time it is computed, and must be the same every other time. The last query of
//! each sequence in a batch has been computed alone before; of the queries that are new in a batch,
//! one of each sequence is computed alone after it.

use std::collections::HashMap;
use std::ops::Range;

use flashcore::plan::Arrangement;
use flashcore::random::uniform;
use flashcore::serving::{Placement, Sequences};
use flashcore::{
    Backend, DType, Error, InputTensors, Layout, Mask, Output, Problem, Progress, RunOptions,
    Shape, Tensor,
};

use crate::rng::Rng;

/// The sequences that batches are drawn from, and the recorded results of their queries.
pub struct Invariance {
    problem: Problem,
    sequences: usize,
    longest: usize,
    /// The queries, keys and values of all sequences.
    rows: [Tensor; 3],
    /// The numbers of keys that the last query of a member may see.
    ends: Vec<usize>,
    /// The bits of outputs and log-sum-exps, by sequence and position.
    known: HashMap<(usize, usize), Vec<u8>>,
    compared: usize,
}

/// Consecutive queries of a sequence, by their positions.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Member {
    sequence: usize,
    queries: Range<usize>,
}

/// The result of attention over some sequences: outputs and log-sum-exps.
type BatchResult = Result<(Tensor, Vec<f32>), String>;

impl Invariance {
    /// Creates `sequences` sequences of `longest` keys. Of the problem, the heads, head dims,
    /// types, mask and scores are used. The mask must end at a query's own position, so that a
    /// query sees the same keys when it is computed alone.
    pub fn new(problem: Problem, sequences: usize, longest: usize) -> Result<Self, Error> {
        let problem = problem.batch_invariant();
        let tensor = |seed: u64, dtype: DType, heads: usize, dim: usize| {
            let shape = Shape::new(sequences, longest, heads, dim);
            Tensor::from_fn(dtype, shape, |[a, b, c, d]| {
                let index = ((a * longest + b) * heads + c) * dim + d;
                // Scores grow towards the end and are far enough apart that the maximum keeps
                // changing.
                (1.0 + 2.0 * b as f32 / longest as f32) * uniform(seed, index as u64)
            })
        };
        let (heads, kv_heads) = (problem.query_heads, problem.kv_heads);
        let rows = [
            tensor(1, problem.dtypes.query, heads, problem.head_dim)?,
            tensor(2, problem.dtypes.key, kv_heads, problem.head_dim)?,
            tensor(3, problem.dtypes.value, kv_heads, problem.value_head_dim)?,
        ];
        // Next to the ends of tiles and of splits, and at random.
        let mut rng = Rng::new(11);
        let mut ends: Vec<usize> =
            [1, 16, 17, 32, 33, 128, 511, 512, 513, 1024, 1025, 4096, 8192, 8193, longest]
                .into_iter()
                .chain((0..8).map(|_| 1 + rng.below(longest)))
                .filter(|end| *end <= longest)
                .collect();
        ends.sort_unstable();
        ends.dedup();
        let (known, compared) = (HashMap::new(), 0);
        Ok(Invariance { problem, sequences, longest, rows, ends, known, compared })
    }

    /// Returns the number of queries that were compared with an earlier result.
    pub fn compared(&self) -> usize {
        self.compared
    }

    /// Computes some queries of every sequence, each alone.
    pub fn alone(
        &mut self,
        run: &mut impl FnMut(&Sequences, &InputTensors) -> BatchResult,
    ) -> Result<(), String> {
        let mut rng = Rng::new(12);
        for sequence in 0..self.sequences {
            for end in self.ends.clone() {
                let member = Member { sequence, queries: end - 1..end };
                self.take(vec![member], &mut rng, run)?;
            }
        }
        Ok(())
    }

    /// Computes the batch of a seed, of at most `sequences` sequences with at most `queries`
    /// queries each, then some of its queries alone.
    pub fn batch(
        &mut self,
        seed: u64,
        [sequences, queries]: [usize; 2],
        run: &mut impl FnMut(&Sequences, &InputTensors) -> BatchResult,
    ) -> Result<(), String> {
        let mut rng = Rng::new(seed);
        // Favours small batches, and batches of one query per sequence.
        let most = 1 + rng.below(sequences);
        let queries = rng.choose(&[1, 1, 8.min(queries), queries]);
        let count = 1 + rng.below(most);
        let member = |rng: &mut Rng| {
            let end = rng.choose(&self.ends);
            let count = 1 + rng.below(queries.min(end));
            Member { sequence: rng.below(self.sequences), queries: end - count..end }
        };
        let members: Vec<Member> = (0..count).map(|_| member(&mut rng)).collect();
        let new = members.iter().filter_map(|Member { sequence, queries }| {
            let is_new = |position: &usize| !self.known.contains_key(&(*sequence, *position));
            let new: Vec<usize> = queries.clone().filter(is_new).collect();
            let position = *new.get(rng.below(new.len()))?;
            Some(Member { sequence: *sequence, queries: position..position + 1 })
        });
        let alone: Vec<Member> = new.collect();
        let mut all = vec![members];
        all.extend(alone.into_iter().map(|member| vec![member]));
        for members in all {
            self.take(members, &mut rng, run).map_err(|error| format!("seed {seed}: {error}"))?;
        }
        Ok(())
    }

    fn take(
        &mut self,
        members: Vec<Member>,
        rng: &mut Rng,
        run: &mut impl FnMut(&Sequences, &InputTensors) -> BatchResult,
    ) -> Result<(), String> {
        let (sequences, tensors) = self.assemble(&members, rng).map_err(|it| it.to_string())?;
        let (output, lse) = run(&sequences, &tensors)?;
        let query = tensors.query.shape();
        let row_bytes = query.heads * self.problem.value_head_dim * output.dtype().bytes();
        for (index, member) in members.iter().enumerate() {
            for (row, position) in member.queries.clone().enumerate() {
                let (entry, place) = sequences.queries().locate(index, row);
                let at = (entry * query.length + place) * row_bytes;
                let mut bits = output.bytes()[at..at + row_bytes].to_vec();
                for head in 0..query.heads {
                    let at = sequences.lse_index(query, index, head, row);
                    bits.extend(lse[at].to_le_bytes());
                }
                let key = (member.sequence, position);
                match self.known.get(&key) {
                    None => {
                        self.known.insert(key, bits);
                    }
                    Some(known) if *known == bits => self.compared += 1,
                    Some(known) => {
                        let byte = known.iter().zip(&bits).position(|(a, b)| a != b);
                        return Err(format!(
                            "position {position} of sequence {} has other bits, from byte {byte:?} \
                             of {} on, as query {row} of member {index} of {members:?}, {}",
                            member.sequence,
                            bits.len(),
                            sequences.problem(),
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the tensors of a batch. Rows that belong to no sequence are NaN.
    fn assemble(
        &self,
        members: &[Member],
        rng: &mut Rng,
    ) -> Result<(Sequences, InputTensors), Error> {
        let (heads, kv_heads) = (self.problem.query_heads, self.problem.kv_heads);
        let counts: Vec<usize> = members.iter().map(|member| member.queries.len()).collect();
        let lengths: Vec<usize> = members.iter().map(|member| member.queries.end).collect();
        let (queries, query_shape) = rng.rows(&counts, heads, self.problem.head_dim);
        let (keys, key_shape) = rng.cache(lengths, kv_heads, self.problem.head_dim)?;
        let value_shape = Shape { dim: self.problem.value_head_dim, ..key_shape };
        let first_query = |member: &Member| member.queries.start;
        let [query, key, value] = &self.rows;
        let tensors = InputTensors::new(
            self.gather(query, query_shape, &queries, members, first_query)?,
            self.gather(key, key_shape, &keys, members, |_| 0)?,
            self.gather(value, value_shape, &keys, members, |_| 0)?,
        );
        Ok((Sequences::new(self.problem.clone(), queries, keys)?, tensors))
    }

    /// Returns a tensor with rows of the members' sequences, from `first` on, where they are
    /// placed.
    fn gather(
        &self,
        from: &Tensor,
        shape: Shape,
        placement: &Placement,
        members: &[Member],
        first: impl Fn(&Member) -> usize,
    ) -> Result<Tensor, Error> {
        let row_bytes = shape.heads * shape.dim * from.dtype().bytes();
        let mut bytes = vec![0xFF; shape.batch * shape.length * row_bytes];
        for (index, member) in members.iter().enumerate() {
            for position in 0..placement.length(index) {
                let source = member.sequence * self.longest + first(member) + position;
                let (entry, row) = placement.locate(index, position);
                let to = (entry * shape.length + row) * row_bytes;
                bytes[to..to + row_bytes]
                    .copy_from_slice(&from.bytes()[source * row_bytes..][..row_bytes]);
            }
        }
        Ok(Tensor::from_bytes(from.dtype(), Layout::contiguous(shape)?, &bytes)?)
    }
}

/// Runs random batches on a back end, in several types and head dims and under several masks, after
/// running queries of them alone. Returns the number of compared queries.
pub fn run_batches(
    backend: &dyn Backend,
    batches: u64,
    progress: &dyn Progress,
) -> Result<usize, String> {
    let problem = |heads: usize, kv_heads: usize, dim: usize, dtype: DType| {
        let problem = Problem::new(1, heads, 1, dim).with_kv_heads(kv_heads);
        problem.with_dtype(dtype).with_mask(Mask::CAUSAL)
    };
    let usual = problem(8, 2, 128, DType::BF16);
    let problems = [
        usual.clone(),
        problem(6, 2, 64, DType::F16).with_mask(Mask::window(Some(700), Some(0))),
        problem(2, 1, 256, DType::BF16),
        usual.clone().with_kv_dtype(DType::E4M3),
        usual.with_mask(Mask::CAUSAL.with_chunk(600)),
    ];
    progress.begin(batches);
    let share = batches.div_ceil(problems.len() as u64).max(1);
    let mut compared = 0;
    for problem in problems {
        let arrangement = Arrangement::contiguous(&problem).map_err(|error| error.to_string())?;
        let asked = problem.clone().batch_invariant();
        if !backend.candidates(&asked, &arrangement).iter().any(|it| it.accepted) {
            continue;
        }
        let invariance = Invariance::new(problem, 4, 2600).map_err(|error| error.to_string())?;
        compared += run_of(backend, invariance, share, progress)?;
    }
    Ok(compared)
}

/// Returns a function that runs a back end, for [`Invariance`] to compare.
pub fn on_backend(backend: &dyn Backend) -> impl FnMut(&Sequences, &InputTensors) -> BatchResult {
    |sequences, tensors| {
        let attend = || {
            let (problem, inputs) = sequences.over(tensors.inputs())?;
            backend.run(&problem, inputs, &RunOptions::default())
        };
        let Output { output, lse, .. } = attend().map_err(|error: Error| error.to_string())?;
        Ok((output, lse))
    }
}

fn run_of(
    backend: &dyn Backend,
    mut invariance: Invariance,
    batches: u64,
    progress: &dyn Progress,
) -> Result<usize, String> {
    let mut run = on_backend(backend);
    invariance.alone(&mut run)?;
    for seed in 0..batches {
        invariance.batch(seed, [16, 70], &mut run)?;
        progress.advance(1);
    }
    Ok(invariance.compared())
}
