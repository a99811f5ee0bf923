//! Sequences of unequal lengths through the back ends that need no GPU, against the reference.

use flashcore::reference::{self, Rows};
use flashcore::serving::{Pages, Placement, Sequences};
use flashcore::{
    Backend, CpuBackend, DType, InputTensors, Inputs, Mask, Problem, RunOptions, Shape, Tensor,
    compare_sequences,
};
use proptest::prelude::*;

/// Tensors of the sizes that placements need.
fn tensors(problem: &Problem, query: Shape, cache: Shape, seed: u64) -> InputTensors {
    let extras = InputTensors::random(problem, seed).unwrap();
    let tensor = |shape: Shape, stream| Tensor::random(problem.dtype, shape, seed * 3 + stream);
    InputTensors {
        query: tensor(query, 0).unwrap(),
        key: tensor(cache, 1).unwrap(),
        value: tensor(Shape { dim: problem.value_head_dim, ..cache }, 2).unwrap(),
        slopes: extras.slopes,
        sinks: extras.sinks,
    }
}

fn check(sequences: &Sequences, inputs: Inputs<'_>) {
    let result =
        CpuBackend::new().run_sequences(sequences, inputs, &RunOptions::default()).unwrap();
    let rows = Rows::of(sequences);
    let reference = reference::attention_of_sequences(sequences, inputs, &rows).unwrap();
    let baseline = reference::baseline_of_sequences(sequences, inputs, &rows).unwrap();
    let verdict = compare_sequences(sequences, &result, &reference, &baseline).unwrap();
    assert!(verdict.passed, "{verdict}");
    assert_eq!(verdict.rows, sequences.rows());
}

fn masks() -> impl Strategy<Value = Mask> {
    let side = || prop::option::of(0usize..30);
    prop_oneof![
        Just(Mask::None),
        Just(Mask::Causal),
        (side(), side()).prop_map(|(left, right)| Mask::window(left, right)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Packed queries over a paged cache with shuffled pages, and the same keys packed.
    #[test]
    fn ragged_and_paged_sequences_agree_with_the_reference(
        lengths in prop::collection::vec((0usize..20, 0usize..50), 1..5),
        (group, kv_heads) in (1usize..4, 1usize..3),
        page_size in prop::sample::select(vec![1usize, 4, 16]),
        mask in masks(),
        softcap in prop::option::of(1f32..40.0),
        (alibi, sinks) in any::<(bool, bool)>(),
        seed in 0u64..1000,
    ) {
        let mut problem = Problem::new(lengths.len(), group * kv_heads, 1, 24)
            .with_kv_heads(kv_heads)
            .with_value_head_dim(16)
            .with_dtype(DType::BF16)
            .with_mask(mask);
        problem.softcap = softcap;
        problem.alibi = alibi;
        problem.sinks = sinks;
        let starts = lengths.iter().scan(0, |sum, (queries, _)| {
            *sum += queries;
            Some(*sum)
        });
        let starts: Vec<usize> = std::iter::once(0).chain(starts).collect();
        let total = starts[starts.len() - 1];
        let keys: Vec<usize> = lengths.iter().map(|(_, keys)| *keys).collect();

        let columns = 50usize.div_ceil(page_size);
        let pages = lengths.len() * columns;
        // A permutation of the pages.
        let table: Vec<u32> =
            (0..pages).map(|page| ((page * 7 + seed as usize) % pages) as u32).collect();
        prop_assume!(pages % 7 != 0);
        let sequences = Sequences::new(
            problem,
            Placement::packed(starts),
            Placement::paged(keys, Pages::new(page_size, columns, table).unwrap()),
        ).unwrap();
        let cache = Shape::new(pages, page_size, kv_heads, 24);
        let query = Shape::new(1, total, group * kv_heads, 24);
        let tensors = tensors(sequences.problem(), query, cache, seed);
        check(&sequences, tensors.inputs());
    }
}

#[test]
fn a_window_with_a_sink_is_what_it_says() {
    // Every key and value is the same: the output is the value, less the share of the sink.
    let problem = Problem::new(1, 2, 1, 8)
        .with_dtype(DType::F32)
        .with_key_length(10)
        .with_mask(Mask::window(Some(3), Some(0)))
        .with_sinks();
    let query = Tensor::zeros(DType::F32, problem.query_shape()).unwrap();
    let ones = Tensor::from_fn(DType::F32, problem.key_shape(), |_| 1.0).unwrap();
    let sinks = [0.0, f32::NEG_INFINITY];
    let inputs = Inputs::new(&query, &ones, &ones).with_sinks(&sinks);
    let result = CpuBackend::new().run(&problem, inputs, &RunOptions::default()).unwrap();
    let output = result.output.to_f32();
    assert!((output[0] - 0.8).abs() < 1e-6 && (output[8] - 1.0).abs() < 1e-6, "{output:?}");
    assert!((result.lse[0] - 5f32.ln()).abs() < 1e-6 && (result.lse[1] - 4f32.ln()).abs() < 1e-6);
}

#[test]
fn left_padding_and_batch_entries_choose_the_rows() {
    let problem = Problem::new(2, 2, 1, 8).with_mask(Mask::Causal);
    let sequences = Sequences::new(
        problem,
        Placement::padded(vec![1, 1]),
        Placement::entries(vec![9, 5], vec![3, 1]).with_left_padding(vec![4, 0]),
    )
    .unwrap();
    assert_eq!(sequences.problem().key_length, 5);
    let query = Shape::new(2, 1, 2, 8);
    let tensors = tensors(sequences.problem(), query, Shape::new(4, 10, 2, 8), 1);
    check(&sequences, tensors.inputs());
    let gathered = sequences.gather(tensors.inputs(), 0).unwrap();
    assert_eq!(gathered.key.head(0, 1).row(0), tensors.key.head(3, 1).row(4));
}
