//! Checks of kernels over ragged batches: random sequences and caches, each described by a seed.

use std::fmt;

use super::cases::mixtures;
use super::{Checked, Outcome, check_kernels, each, same_bits};
use crate::reference::{self, Answer, Rows};
use crate::rng::Rng;
use crate::scene::of_sequences;
use crate::verdict::compare_sequences;
use flashcore::random::mix;
use flashcore::serving::{Placement, Sequences};
use flashcore::{
    Alibi, Backend, DType, DTypes, Descale, Error, InputTensors, Inputs, Mask, Problem, Progress,
    RunOptions, Shape, Tensor, random_descales,
};

/// Sequences with their tensors, all determined by a seed.
#[derive(Debug)]
pub struct SequencesCase {
    seed: u64,
    sequences: Sequences,
    tensors: InputTensors,
    splits: Option<u32>,
}

/// A case with its expected result.
#[derive(Debug)]
pub struct ExpectedOfSequences<'a> {
    case: &'a SequencesCase,
    problem: Problem,
    inputs: Inputs<'a>,
    reference: Answer,
    baseline: Answer,
}

/// Runs every kernel that accepts a case, or only the one with this name, for the cases of the
/// first `seeds` seeds.
pub fn run_sequences(
    backends: &[&dyn Backend],
    kernel: Option<&str>,
    dtype: DType,
    seeds: u64,
    progress: &dyn Progress,
) -> Vec<Checked> {
    each(0..seeds, progress, |seed| check_seed(backends, kernel, dtype, seed))
}

/// Runs a GPU kernel that has no alternatives for the cases of the first `seeds` seeds.
pub(super) fn run_alone<C: fmt::Display>(
    kernel: &'static str,
    seeds: u64,
    progress: &dyn Progress,
    random: impl Fn(u64) -> Result<C, Error> + Sync,
    check: impl Fn(&C) -> Result<Outcome, Error> + Sync,
) -> Vec<Checked> {
    each(0..seeds, progress, |seed| [check_alone(kernel, seed, &random, &check)])
}

/// Runs a GPU kernel that has no alternatives for the case of one seed.
pub(super) fn check_alone<C: fmt::Display>(
    kernel: &'static str,
    seed: u64,
    random: impl Fn(u64) -> Result<C, Error>,
    check: impl Fn(&C) -> Result<Outcome, Error>,
) -> Checked {
    let (case, outcome) = match random(seed) {
        Ok(case) => (case.to_string(), check(&case)),
        Err(error) => (format!("seed {seed}"), Err(error)),
    };
    Checked { case, backend: "gpu", kernel, outcome }
}

fn check_seed(
    backends: &[&dyn Backend],
    wanted: Option<&str>,
    dtype: DType,
    seed: u64,
) -> Vec<Checked> {
    let Ok(case) = SequencesCase::random(dtype, seed) else {
        return Vec::new();
    };
    let kernels = case.kernels(backends, wanted).unwrap_or_default();
    check_kernels(&case, kernels, || case.expected(), ExpectedOfSequences::check)
}

/// The head dims of random problems: those with kernels of their own often, odd ones now and then.
pub const DIMS: [(usize, usize); 12] = [
    (64, 64),
    (64, 64),
    (128, 128),
    (128, 128),
    (128, 128),
    (96, 96),
    (192, 128),
    (192, 192),
    (256, 256),
    (8, 8),
    (40, 72),
    (136, 24),
];
const SPLITS: [u32; 9] = [1, 2, 3, 5, 8, 16, 33, 47, 64];

impl SequencesCase {
    /// Creates the case of a seed: lengths including zero; packed, padded and paged caches in which
    /// everything that is not a key of a sequence is NaN; left padding, windows, softcaps, slopes
    /// and sinks; groups of 1 to 16 query heads; one query for each sequence or several; 1 to 64
    /// splits.
    pub fn random(dtype: DType, seed: u64) -> Result<Self, Error> {
        let mut rng = Rng::new(mix(seed ^ 0x5e9e_0ce5));
        let batch = rng.choose(&[1, 1, 2, 3, 5, 9, 33]);
        let kv_heads = rng.choose(&[1, 1, 2, 3]);
        let group = rng.choose(&[1, 2, 3, 4, 6, 7, 8, 16]);
        let (head_dim, value_head_dim) = rng.choose(&DIMS);
        let top = match batch {
            33 => rng.choose(&[3, 40, 120]),
            1..=2 => rng.choose(&[1, 16, 100, 257, 700, 1500]),
            _ => rng.choose(&[1, 15, 17, 63, 100, 300]),
        };
        let lengths: Vec<usize> = (0..batch)
            .map(|_| match rng.below(6) {
                0 => 0,
                1 => 1.min(top),
                2 | 3 => top,
                _ => rng.below(top + 1),
            })
            .collect();
        let problem =
            random_rules(&mut rng, [batch, group, kv_heads], [head_dim, value_head_dim], dtype, 5);

        let (queries, query) = Self::queries(&mut rng, batch, problem.query_heads, head_dim);
        let (keys, cache) = Self::keys(&mut rng, lengths, kv_heads, head_dim)?;
        let sequences = Sequences::new(problem, queries, keys)?;
        let tensors = tensors(&sequences, query, cache, seed)?;
        let splits = (!rng.one_in(3)).then(|| rng.choose(&SPLITS));
        Ok(SequencesCase { seed, sequences, tensors, splits })
    }

    fn queries(rng: &mut Rng, batch: usize, heads: usize, dim: usize) -> (Placement, Shape) {
        // Now and then as many queries as a query tile has, and more.
        let many = (rng.one_in(4) && batch < 9).then(|| rng.choose(&[33, 70, 150]));
        if rng.one_in(3) {
            let mut starts = vec![0];
            for sequence in 0..batch {
                starts.push(starts[sequence] + rng.below(many.unwrap_or(5)));
            }
            let shape = Shape::new(1, starts[batch], heads, dim);
            let rooms: Vec<usize> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
            return (Self::used(rng, Placement::packed(starts), &rooms), shape);
        }
        let length = many.unwrap_or_else(|| rng.choose(&[1, 1, 1, 2, 3, 5]));
        let rooms = vec![length; batch];
        let placement = Placement::padded(rooms.clone());
        (Self::used(rng, placement, &rooms), Shape::new(batch, length, heads, dim))
    }

    /// Sometimes uses fewer queries than there is room for.
    fn used(rng: &mut Rng, queries: Placement, rooms: &[usize]) -> Placement {
        match rng.one_in(4) {
            true => queries.with_lengths(rooms.iter().map(|room| rng.below(room + 1)).collect()),
            false => queries,
        }
    }

    fn keys(
        rng: &mut Rng,
        lengths: Vec<usize>,
        heads: usize,
        dim: usize,
    ) -> Result<(Placement, Shape), Error> {
        let batch = lengths.len();
        let padding: Option<Vec<usize>> =
            rng.one_in(4).then(|| lengths.iter().map(|length| rng.below(length + 1)).collect());
        let (placement, shape) = match rng.below(4) {
            0 => {
                let mut starts = vec![0];
                for length in &lengths {
                    starts.push(starts[starts.len() - 1] + length + rng.choose(&[0, 0, 3]));
                }
                let rows = starts[batch].max(1);
                let placement = Placement::packed(starts).with_lengths(lengths);
                (placement, Shape::new(1, rows, heads, dim))
            }
            _ => rng.cache(lengths, heads, dim)?,
        };
        Ok(match padding {
            Some(padding) => (placement.with_left_padding(padding), shape),
            None => (placement, shape),
        })
    }

    /// Computes the reference.
    pub fn expected(&self) -> Result<ExpectedOfSequences<'_>, Error> {
        let (problem, inputs) = self.sequences.over(self.tensors.inputs())?;
        let rows = Rows::of(&self.sequences);
        let reference = reference::attention(&problem, inputs, &rows, None)?;
        let baseline = reference::baseline(&problem, inputs, &rows, None)?;
        Ok(ExpectedOfSequences { case: self, problem, inputs, reference, baseline })
    }

    /// Returns the kernels of back ends that accept the case, the best first, or only those with
    /// this name.
    pub fn kernels<'b>(
        &self,
        backends: &[&'b dyn Backend],
        kernel: Option<&str>,
    ) -> Result<Vec<(&'b dyn Backend, &'static str)>, Error> {
        let (problem, inputs) = self.sequences.over(self.tensors.inputs())?;
        Ok(super::accepting_kernels(backends, kernel, &problem, &inputs.arrangement(&problem)?))
    }
}

impl ExpectedOfSequences<'_> {
    /// Runs a kernel of a back end twice, with guard zones, and judges it.
    pub fn check(&self, backend: &dyn Backend, kernel: &str) -> Result<Outcome, Error> {
        let SequencesCase { sequences, splits, .. } = self.case;
        let kernel = Some(kernel.to_owned());
        let options = RunOptions { guard: true, splits: *splits, kernel, ..RunOptions::default() };
        let first = backend.run(&self.problem, self.inputs, &options)?;
        let second = backend.run(&self.problem, self.inputs, &options)?;
        let verdict = compare_sequences(sequences, &first, &self.reference, &self.baseline)?;
        let repeats = same_bits(&first, &second);
        Ok(Outcome { passed: verdict.passed && repeats, verdict, repeats, holes: 0 })
    }
}

/// Returns standard normal queries, keys and values; everything that is not a key of a sequence is
/// NaN.
fn tensors(
    sequences: &Sequences,
    query: Shape,
    cache: Shape,
    seed: u64,
) -> Result<InputTensors, Error> {
    let mut single = sequences.problem().clone();
    (single.query_length, single.key_length) = (1, 1);
    let extras = InputTensors::random(&single, seed)?;
    let random = |dtype: DType, shape: Shape, stream: u64| {
        Tensor::random(dtype, shape, seed.wrapping_mul(3) + stream)
    };
    let DTypes { query: of_query, key: of_key, value: of_value, .. } = single.dtypes;
    let factors = random_descales(sequences.problem().descale_shapes_over(cache), seed)?;
    let descales = single.descales.zip(factors).try_map(|(descale, factors)| match factors {
        Some(factors) if descale == Descale::PerToken => {
            of_sequences(&factors, sequences.keys()).map(Some)
        }
        factors => Ok(factors),
    })?;
    let value = Shape { dim: single.value_head_dim, ..cache };
    Ok(InputTensors {
        query: random(of_query, query, 0)?,
        key: of_sequences(&random(of_key, cache, 1)?, sequences.keys())?,
        value: of_sequences(&random(of_value, value, 2)?, sequences.keys())?,
        slopes: extras.slopes,
        sinks: extras.sinks,
        descales,
    })
}

impl fmt::Display for SequencesCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys = self.sequences.keys();
        write!(f, "{}, keys {:?}", self.sequences.problem(), keys.ends())?;
        if let Some(pages) = keys.pages() {
            write!(f, ", pages of {}", pages.size())?;
        }
        if !keys.left_padding().is_empty() {
            f.write_str(", left padding")?;
        }
        if keys.starts().is_some() {
            f.write_str(", packed keys")?;
        }
        if self.sequences.queries().starts().is_some() {
            f.write_str(", packed queries")?;
        }
        if let Some(splits) = self.splits {
            write!(f, ", {splits} splits")?;
        }
        write!(f, ", seed {}", self.seed)
    }
}

/// Creates a problem over sequences whose lengths are not known yet, with a random mask that looks
/// ahead by less than `ahead`, and random score rules.
pub(super) fn random_rules(
    rng: &mut Rng,
    [batch, group, kv_heads]: [usize; 3],
    [head_dim, value_head_dim]: [usize; 2],
    dtype: DType,
    ahead: usize,
) -> Problem {
    let mask = match rng.below(5) {
        0 => Mask::NONE,
        1 | 2 => Mask::CAUSAL,
        3 => Mask::window(Some(rng.below(60)), Some(0)),
        _ => Mask::window(Some(rng.below(300)), Some(rng.below(ahead))),
    };
    let mask = if rng.one_in(6) { mask.with_chunk(1 + rng.below(200)) } else { mask };
    let mut problem = Problem::new(batch, kv_heads * group, 1, head_dim)
        .with_kv_heads(kv_heads)
        .with_value_head_dim(value_head_dim)
        .with_dtype(dtype)
        .with_mask(mask);
    problem.scores.softcap = rng.one_in(4).then(|| rng.choose(&[2.0, 30.0]));
    if rng.one_in(4) {
        problem.scores.alibi = rng.choose(&[Alibi::PerHead, Alibi::PerSequence]);
    }
    problem.scores.sinks = rng.one_in(4);
    if dtype.is_8_bit() {
        (problem.dtypes, problem.descales) = rng.choose(&mixtures(dtype));
    }
    problem
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore::plan::{Arrangement, Candidate};
    use flashcore::{CpuBackend, Output, Plan};

    #[test]
    fn the_cpu_is_right_about_random_sequences() {
        let backend = CpuBackend::new();
        for seed in 0..40 {
            for dtype in [DType::F16, DType::BF16, DType::E4M3, DType::E5M2, DType::Int8] {
                let case = SequencesCase::random(dtype, seed).unwrap();
                let kernels = case.kernels(&[&backend], None).unwrap();
                assert_eq!(kernels.iter().map(|it| it.1).collect::<Vec<_>>(), ["blocked"]);
                let outcome = case.expected().unwrap().check(&backend, "blocked").unwrap();
                assert!(outcome.passed, "{case}: {outcome}");
            }
        }
    }

    /// A back end with a default kernel and one that runs only on request.
    struct Two;

    impl Backend for Two {
        fn name(&self) -> &'static str {
            "two"
        }

        fn describe(&self) -> String {
            String::new()
        }

        fn candidates(&self, _: &Problem, _: &Arrangement) -> Vec<Candidate> {
            let candidate = |kernel, on_request| Candidate {
                backend: "two",
                kernel,
                accepted: true,
                on_request,
                configuration: None,
                choice: None,
                reason: String::new(),
            };
            vec![candidate("right", false), candidate("hasty", true)]
        }

        fn execute(&self, _: &Plan, _: Inputs<'_>, _: &RunOptions<'_>) -> Result<Output, Error> {
            unreachable!("only asked what it has")
        }
    }

    #[test]
    fn kernels_on_request_are_checked_on_request() {
        let case = SequencesCase::random(DType::F16, 0).unwrap();
        let names = |kernel| {
            let kernels = case.kernels(&[&Two], kernel).unwrap();
            kernels.into_iter().map(|(_, name)| name).collect::<Vec<_>>()
        };
        assert_eq!(names(None), ["right"]);
        assert_eq!(names(Some("hasty")), ["hasty"]);
    }
}
