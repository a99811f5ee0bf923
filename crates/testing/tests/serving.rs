//! Sequences of unequal lengths through the back ends that need no GPU, against the reference.

use flashcore::quantize::{Granularity, quantize};
use flashcore::serving::{
    CacheScales, Pages, Placement, Rotary, Sequences, append, append_scaled, combine,
};
use flashcore::{
    Alibi, Backend, CpuBackend, DType, InputTensors, Inputs, Mask, Problem, RunOptions, Shape,
    Tensor, random_descales,
};
use flashcore_testing::check::{Invariance, on_backend, run_batches};
use flashcore_testing::compare_sequences;
use flashcore_testing::reference::{self, Rows};
use proptest::prelude::*;

/// Returns random tensors of the shapes that placements need.
fn tensors(problem: &Problem, query: Shape, cache: Shape, seed: u64) -> InputTensors {
    let extras = InputTensors::random(problem, seed).unwrap();
    let tensor = |dtype, shape: Shape, stream| Tensor::random(dtype, shape, seed * 3 + stream);
    let dtypes = problem.dtypes;
    InputTensors {
        query: tensor(dtypes.query, query, 0).unwrap(),
        key: tensor(dtypes.key, cache, 1).unwrap(),
        value: tensor(dtypes.value, Shape { dim: problem.value_head_dim, ..cache }, 2).unwrap(),
        slopes: extras.slopes,
        sinks: extras.sinks,
        descales: random_descales(problem.descale_shapes_over(cache), seed).unwrap(),
    }
}

fn check(sequences: &Sequences, inputs: Inputs<'_>) {
    let (problem, inputs) = sequences.over(inputs).unwrap();
    let result = CpuBackend::new().run(&problem, inputs, &RunOptions::default()).unwrap();
    let rows = Rows::of(sequences);
    let reference = reference::attention(&problem, inputs, &rows, None).unwrap();
    let baseline = reference::baseline(&problem, inputs, &rows, None).unwrap();
    let verdict = compare_sequences(sequences, &result, &reference, &baseline).unwrap();
    assert!(verdict.passed, "{verdict}");
    assert_eq!(verdict.rows, sequences.rows());
}

fn masks() -> impl Strategy<Value = Mask> {
    let side = || prop::option::of(0usize..30);
    prop_oneof![
        Just(Mask::NONE),
        Just(Mask::CAUSAL),
        (side(), side(), 0usize..20)
            .prop_map(|(left, right, chunk)| Mask::window(left, right).with_chunk(chunk)),
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
        alibi in prop::sample::select(vec![Alibi::None, Alibi::PerHead, Alibi::PerSequence]),
        sinks in any::<bool>(),
        seed in 0u64..1000,
    ) {
        let mut problem = Problem::new(lengths.len(), group * kv_heads, 1, 24)
            .with_kv_heads(kv_heads)
            .with_value_head_dim(16)
            .with_dtype(DType::BF16)
            .with_mask(mask);
        problem.scores.softcap = softcap;
        problem.scores.alibi = alibi;
        problem.scores.sinks = sinks;
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
    // All keys and values are equal: the output is the value times one minus the sink's share.
    let problem = Problem::new(1, 3, 1, 8)
        .with_dtype(DType::F32)
        .with_key_length(10)
        .with_mask(Mask::window(Some(3), Some(0)))
        .with_sinks();
    let query = Tensor::zeros(DType::F32, problem.query_shape()).unwrap();
    let ones = Tensor::from_fn(DType::F32, problem.key_shape(), |_| 1.0).unwrap();
    let sinks = [0.0, f32::NEG_INFINITY, f32::NAN];
    let inputs = Inputs::new(&query, &ones, &ones).with_sinks(&sinks);
    let result = CpuBackend::new().run(&problem, inputs, &RunOptions::default()).unwrap();
    let output = result.output.to_f32();
    assert!((output[0] - 0.8).abs() < 1e-6 && (output[8] - 1.0).abs() < 1e-6, "{output:?}");
    assert!((result.lse[0] - 5f32.ln()).abs() < 1e-6 && (result.lse[1] - 4f32.ln()).abs() < 1e-6);
    assert!(output[16].is_nan() && result.lse[2].is_nan(), "{output:?}");
}

#[test]
fn left_padding_and_batch_entries_choose_the_rows() {
    let problem = Problem::new(2, 2, 1, 8).with_mask(Mask::CAUSAL);
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

#[test]
fn a_cache_in_two_parts_merges_to_the_whole() {
    let problem =
        Problem::new(2, 4, 3, 16).with_kv_heads(2).with_key_length(50).with_dtype(DType::F32);
    let tensors = InputTensors::random(&problem, 4).unwrap();
    let backend = CpuBackend::new();
    let run = |begin: usize, end: usize| {
        let keys = Placement::padded(vec![end; 2]).with_left_padding(vec![begin; 2]);
        let queries = Placement::padded(vec![3; 2]);
        let sequences = Sequences::new(problem.clone(), queries, keys).unwrap();
        let (problem, inputs) = sequences.over(tensors.inputs()).unwrap();
        backend.run(&problem, inputs, &RunOptions::default()).unwrap()
    };
    let (whole, first, second, nothing) = (run(0, 50), run(0, 17), run(17, 50), run(9, 9));
    let (output, lse) = combine(&[nothing.part(), first.part(), second.part()]).unwrap();
    for (merged, whole) in output.to_f32().iter().zip(whole.output.to_f32()) {
        assert!((merged - whole).abs() < 1e-5, "{merged} {whole}");
    }
    for (merged, whole) in lse.iter().zip(&whole.lse) {
        assert!((merged - whole).abs() < 1e-5, "{merged} {whole}");
    }
    assert_eq!(combine(&[]).unwrap_err().to_string(), "the problem has parts, and none were given");
    let short = combine(&[(first.output.view(), &first.lse[1..])]).unwrap_err().to_string();
    assert_eq!(short, "log-sum-exp has length 23, expected 24");
}

#[test]
fn new_tokens_go_behind_the_sequences() {
    let cache = Shape::new(6, 4, 2, 8);
    let before = Tensor::random(DType::BF16, cache, 1).unwrap();
    let new_shape = Shape::new(1, 5, 2, 8);
    let new_key = Tensor::random(DType::BF16, new_shape, 2).unwrap();
    let new_value = Tensor::random(DType::BF16, new_shape, 3).unwrap();
    let pages = Pages::new(4, 3, vec![5, 0, 2, 1, 3, 4]).unwrap();
    let place = Placement::paged(vec![3, 8], pages.clone());
    let new = Placement::packed(vec![0, 2, 5]);
    let (mut key, mut value) = (before.clone(), before.clone());
    let added = (&new_key, &new_value);
    append((&mut key, &mut value), &place, added, &new, None).unwrap();
    let grown = Placement::paged(vec![5, 11], pages);
    for (sequence, first, count) in [(0, 3, 2), (1, 8, 3)] {
        for index in 0..count {
            let (page, row) = grown.locate(sequence, first + index);
            let (_, from) = new.locate(sequence, index);
            for head in 0..2 {
                assert_eq!(key.head(page, head).row(row), new_key.head(0, head).row(from));
                assert_eq!(value.head(page, head).row(row), new_value.head(0, head).row(from));
            }
        }
    }
    // Older keys are unchanged.
    assert_eq!(key.head(5, 1).row(2), before.head(5, 1).row(2));

    // A rotation of the first pair by 90 degrees at every position.
    let (mut cosines, mut sines) = (vec![1.0; 24], vec![0.0; 24]);
    for position in 0..12 {
        (cosines[2 * position], sines[2 * position]) = (0.0, 1.0);
    }
    for (interleaved, second) in [(true, 1), (false, 2)] {
        let rotary = Rotary { dim: 4, interleaved, cosines: &cosines, sines: &sines };
        let (mut key, mut value) = (before.clone(), before.clone());
        append((&mut key, &mut value), &place, added, &new, Some(rotary)).unwrap();
        let (page, row) = grown.locate(1, 9);
        let (rotated, source) = (key.head(page, 0).row(row), new_key.head(0, 0).row(3));
        assert_eq!((rotated[0], rotated[second]), (-source[second], source[0]));
        assert_eq!(rotated[4..], source[4..]);
    }
    let odd = Rotary { dim: 10, interleaved: true, cosines: &cosines, sines: &sines };
    let refusal = append((&mut key, &mut value), &place, added, &new, Some(odd)).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "a rotary dim of 10 is not even, or not from 2 to the head dim 8"
    );
    let full = Placement::paged(vec![11, 8], Pages::new(4, 3, vec![5, 0, 2, 1, 3, 4]).unwrap());
    let refusal = append((&mut key, &mut value), &full, added, &new, None).unwrap_err();
    assert_eq!(refusal.to_string(), "sequence 0 has 13 positions, and there is room for 12");
}

/// Lengths whose sum overflows, padding beyond the end, tensors with other heads, and shapes
/// without elements are refused or served; nothing panics or loops forever.
#[test]
fn what_cannot_be_counted_is_refused() {
    let tensor = |shape: [usize; 4]| Tensor::zeros(DType::F32, shape.into()).unwrap();
    let refusal = |place: &Placement, new: &Placement, heads: [usize; 2]| {
        let (mut key, mut value) = (tensor([2, 4, 2, 8]), tensor([2, 4, heads[0], 8]));
        let (new_key, new_value) = (tensor([2, 3, 2, 8]), tensor([2, 3, heads[1], 8]));
        let cache = (&mut key, &mut value);
        append(cache, place, (&new_key, &new_value), new, None).unwrap_err().to_string()
    };
    let (place, new) = (Placement::padded(vec![1, 1]), Placement::padded(vec![3, 3]));
    let most = usize::MAX;
    assert_eq!(
        refusal(&Placement::padded(vec![1, most]), &new, [2, 2]),
        format!("sequence 1 has {most} positions, and there is room for 4")
    );
    assert_eq!(
        refusal(&place, &Placement::padded(vec![most, 3]), [2, 2]),
        format!("sequence 0 has {most} positions, and there is room for 4")
    );
    let pages = Pages::new(4, 1, vec![0, 1]).unwrap();
    assert_eq!(
        refusal(&Placement::paged(vec![most, 1], pages), &new, [2, 2]),
        format!("sequence 0 has {most} positions, and there is room for 4")
    );
    for (place, new) in [
        (place.clone().with_left_padding(vec![2, 0]), new.clone()),
        (place.clone(), Placement::padded(vec![1, 1]).with_left_padding(vec![2, 0])),
    ] {
        let text = refusal(&place, &new, [2, 2]);
        assert_eq!(text, "sequence 0 has 1 positions, of which 2 are padding");
    }
    assert_eq!(
        refusal(&place, &new, [1, 1]),
        "value has shape [2, 4, 1, 8], expected [2, 4, 2, 8]"
    );
    assert_eq!(
        refusal(&place, &new, [2, 1]),
        "value has shape [2, 3, 1, 8], expected [2, 3, 2, 8]"
    );

    // A placement that was never validated is validated where it is used.
    let falling = Placement::packed(vec![most, 1]).with_lengths(vec![most]);
    assert!(falling.fits(Shape::new(1, 4, 1, 8)).unwrap_err().to_string().contains("fall"));
    let endless = Placement::paged(vec![], Pages::new(most, 2, vec![]).unwrap());
    let none =
        Sequences::new(Problem::new(0, 1, 1, 8), Placement::padded(vec![]), endless).unwrap();
    let (query, key) = (tensor([0, 1, 1, 8]), tensor([0, 4, 1, 8]));
    assert!(none.over(Inputs::new(&query, &key, &key)).is_err());

    let many = tensor([most, 2, 1, 0]);
    assert!(combine(&[(many.view(), &[0.0])]).unwrap_err().to_string().contains("log-sum-exp"));
    let (output, lse) = combine(&[(tensor([most, 0, 1, 8]).view(), &[])]).unwrap();
    assert!(output.to_f32().is_empty() && lse.is_empty());
    let (_, lse) = combine(&[(tensor([1, 2, 1, 0]).view(), &[0.0, 1.0])]).unwrap();
    assert_eq!(lse, [0.0, 1.0]);
    let table = [0.0; 4];
    let rotary = Rotary { dim: 2, interleaved: true, cosines: &table, sines: &table };
    assert!(rotary.rotate(&tensor([most, 0, 1, 8]), &[]).unwrap().to_f32().is_empty());
    assert!(rotary.rotate(&tensor([1, 1, 1, 8]), &[most]).is_err());
}

/// Appending to an 8-bit cache gives the same as quantizing the whole cache at once.
#[test]
fn appending_rounds_to_8_bits_once() {
    let (heads, dim) = (2, 16);
    let cache = Shape::new(3, 24, heads, dim);
    let new = Tensor::random(DType::BF16, Shape::new(1, 9, heads, dim), 1).unwrap();
    let place = Placement::padded(vec![4, 0, 20]);
    let rows = Placement::packed(vec![0, 5, 6, 9]);
    let given = |[sequence, _, head, _]: [usize; 4]| (1 + sequence + 2 * head) as f32 / 300.0;
    let given = Tensor::from_fn(DType::F32, Shape::new(3, 1, heads, 1), given).unwrap();
    for dtype in [DType::E4M3, DType::E5M2, DType::Int8] {
        for found in [false, true] {
            let mut caches = [1, 2].map(|_| Tensor::zeros(dtype, cache).unwrap());
            let mut factors =
                [1, 2].map(|_| Tensor::zeros(DType::F32, Shape { dim: 1, ..cache }).unwrap());
            let ([key, value], [of_key, of_value]) = (&mut caches, &mut factors);
            let scales = match found {
                true => CacheScales::Found(of_key, of_value),
                false => CacheScales::Given(&given, &given),
            };
            append_scaled((key, value), &place, (&new, &new), &rows, None, scales).unwrap();
            let tokens = quantize(&new, dtype, Granularity::Token).unwrap();
            for (sequence, length) in [5, 1, 3].into_iter().enumerate() {
                for (index, head) in (0..length).flat_map(|at| (0..heads).map(move |h| (at, h))) {
                    let (_, from) = rows.locate(sequence, index);
                    let to = place.length(sequence) + index;
                    let exact = new.head(0, head).row(from);
                    let factor = match found {
                        true => tokens.descale.head(0, head).row(from)[0],
                        false => given.head(sequence, head).row(0)[0],
                    };
                    let stored: Vec<f32> = exact
                        .iter()
                        .map(|it| dtype.round(f64::from(it * (1.0 / factor))) as f32)
                        .collect();
                    for tensor in &caches {
                        assert_eq!(tensor.head(sequence, head).row(to), stored);
                    }
                    if found {
                        assert_eq!(factors[0].head(sequence, head).row(to), [factor]);
                    }
                }
            }
            // Other rows were not written.
            assert_eq!(caches[0].head(1, 0).row(1), vec![0.0; dim]);
            assert_eq!(factors[1].head(1, 0).row(1), [0.0]);
        }
    }
}

#[test]
fn factors_of_another_shape_are_refused() {
    let cache = Shape::new(1, 8, 2, 4);
    let new = Tensor::zeros(DType::F16, Shape::new(1, 1, 2, 4)).unwrap();
    let (place, rows) = (Placement::padded(vec![0]), Placement::padded(vec![1]));
    let refusal = |dtype: DType, factors: &Tensor| {
        let [mut key, mut value] = [1, 2].map(|_| Tensor::zeros(dtype, cache).unwrap());
        let scales = CacheScales::Given(factors, factors);
        append_scaled((&mut key, &mut value), &place, (&new, &new), &rows, None, scales)
            .unwrap_err()
            .to_string()
    };
    let factors = |dtype, batch| Tensor::zeros(dtype, Shape::new(batch, 1, 2, 1)).unwrap();
    assert_eq!(
        refusal(DType::E4M3, &factors(DType::F32, 2)),
        "k_descale has shape [2, 1, 2, 1], expected [1, 1, 2, 1]"
    );
    assert_eq!(
        refusal(DType::E4M3, &factors(DType::F16, 1)),
        "k_descale has element type f16, expected f32"
    );
    assert_eq!(
        refusal(DType::F16, &factors(DType::F32, 1)),
        "k_descale factors were given, and the problem has none"
    );
    assert_eq!(
        refusal(DType::BF16, &factors(DType::F32, 1)),
        "key has element type f16, expected bf16"
    );
    for (number, text) in [(0.0, "0"), (f32::INFINITY, "inf"), (f32::NAN, "NaN")] {
        let numbers = [1.0, number];
        let factors = Tensor::from_f32(DType::F32, Shape::new(1, 1, 2, 1), &numbers).unwrap();
        assert_eq!(
            refusal(DType::E4M3, &factors),
            format!("k_descale is {text} at batch 0, head 1, expected a finite number above zero")
        );
    }
}

/// Each query of a batch gives the same bits as alone, in f32 also over several chunks of keys.
#[test]
fn bits_do_not_depend_on_the_batch() {
    let backend = CpuBackend::new();
    let compared = run_batches(&backend, 40, &()).unwrap();
    assert!(compared > 250, "{compared}");
    let problem = Problem::new(1, 4, 1, 24).with_kv_heads(2).with_dtype(DType::F32);
    let mut invariance = Invariance::new(problem.with_mask(Mask::CAUSAL), 3, 3500).unwrap();
    let mut run = on_backend(&backend);
    invariance.alone(&mut run).unwrap();
    for seed in 0..40 {
        invariance.batch(seed, [6, 40], &mut run).unwrap();
    }
    assert!(invariance.compared() > 100, "{}", invariance.compared());
}
