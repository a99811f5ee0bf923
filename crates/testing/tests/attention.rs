//! The forward pass of every back end of this machine against the f64 reference, judged by the
//! library's accuracy rule.

mod common;

use flashcore::{
    Backend, CpuBackend, DType, DTypes, Descale, Descales, InputTensors, Inputs, Layout, Machine,
    Mask, Output, Problem, RunOptions, Strides, Tensor,
};
use flashcore_testing::check::{self, Case, cases};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use crate::common::{any_contents, any_mask};

/// Runs a case on every kernel of this machine that accepts it.
fn check(case: &Case) {
    let machine = Machine::discover();
    let backends: Vec<&dyn Backend> = machine.backends().iter().map(AsRef::as_ref).collect();
    for checked in check::run_all(&backends, None, std::slice::from_ref(case), &()) {
        let outcome = checked.outcome.unwrap();
        assert!(outcome.passed, "{}: {case}: {outcome}", checked.kernel);
    }
}

fn run(problem: &Problem, inputs: Inputs<'_>) -> Output {
    CpuBackend::new().run(problem, inputs, &RunOptions::default()).unwrap()
}

#[test]
fn standard_cases_in_f32() {
    cases::standard(DType::F32).iter().for_each(check);
}

#[test]
fn standard_cases_in_f16() {
    cases::standard(DType::F16).iter().for_each(check);
}

#[test]
fn standard_cases_in_8_bits() {
    for dtype in [DType::E4M3, DType::E5M2, DType::Int8] {
        cases::standard(dtype).iter().for_each(check);
    }
}

#[test]
fn standard_cases_in_bf16() {
    cases::standard(DType::BF16).iter().for_each(check);
}

#[test]
fn rows_that_see_nothing_are_zero_with_a_log_sum_exp_of_minus_infinity() {
    let problem = Problem::new(1, 2, 70, 16).with_key_length(3).with_mask(Mask::CAUSAL);
    let tensors = InputTensors::random(&problem, 0).unwrap();
    let result = run(&problem, tensors.inputs());
    for head in 0..2 {
        for query in 0..70 {
            let row = result.output.head(0, head).row(query);
            let lse = result.lse[head * 70 + query];
            // The last three queries see one, two and three keys.
            if query < 67 {
                assert!(row.iter().all(|value| value.to_bits() == 0));
                assert_eq!(lse, f32::NEG_INFINITY);
            } else {
                assert!(row.iter().any(|value| *value != 0.0));
                assert!(lse.is_finite());
            }
        }
    }
}

#[test]
fn empty_problems_have_empty_or_zero_answers() {
    for (batch, queries, keys) in [(0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 0, 0)] {
        let problem = Problem::new(batch, 2, queries, 8).with_key_length(keys);
        let tensors = InputTensors::random(&problem, 0).unwrap();
        let result = run(&problem, tensors.inputs());
        assert_eq!(result.output.to_f32(), vec![0.0; batch * queries * 2 * 8]);
        assert_eq!(result.lse, vec![f32::NEG_INFINITY; batch * 2 * queries]);
    }
}

/// Few queries over many keys, which the CPU splits into chunks.
#[test]
fn long_caches() {
    let problem =
        |queries: usize| Problem::new(2, 6, queries, 40).with_kv_heads(2).with_value_head_dim(24);
    for (queries, keys) in [(1, 1537), (1, 5000), (3, 3072), (10, 4001)] {
        for mask in [Mask::NONE, Mask::CAUSAL, Mask::window(Some(1700), Some(0))] {
            let plain = problem(queries).with_key_length(keys).with_mask(mask);
            check(&Case::new(plain.clone().with_dtype(DType::F32)));
            check(&Case::new(plain.clone().with_dtype(DType::BF16)));
            check(&Case::new(plain.with_sinks().with_alibi().with_softcap(3.0)));
        }
    }
}

/// The bits of a row depend neither on the number of threads nor on the other rows.
#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for (queries, keys, mask) in [
        (301, 333, Mask::NONE),
        (301, 333, Mask::CAUSAL),
        (301, 333, Mask::window(Some(150), Some(20))),
        (2, 5000, Mask::CAUSAL),
    ] {
        let problem = Problem::new(2, 6, queries, 40)
            .with_kv_heads(2)
            .with_key_length(keys)
            .with_dtype(DType::F32)
            .with_mask(mask);
        let tensors = InputTensors::random(&problem, 3).unwrap();
        common::any_number_gives_the_same(mask, || {
            let result = run(&problem, tensors.inputs());
            (result.output.bytes().to_vec(), result.lse)
        });
    }
}

#[test]
fn masked_keys_are_not_read() {
    // Everything that a causal mask hides from the first half of the queries is NaN.
    let problem = Problem::new(1, 1, 130, 32).with_dtype(DType::F32).with_mask(Mask::CAUSAL);
    let clean = InputTensors::random(&problem, 5).unwrap();
    let poison = |tensor: &Tensor| {
        let values = tensor.to_f32();
        Tensor::from_fn(DType::F32, tensor.shape(), |[_, position, _, element]| {
            if position < 65 { values[position * 32 + element] } else { f32::NAN }
        })
        .unwrap()
    };
    let (key, value) = (poison(&clean.key), poison(&clean.value));
    let expected = run(&problem, clean.inputs());
    let result = run(&problem, Inputs::new(&clean.query, &key, &value));
    for query in 0..130 {
        let row = result.output.head(0, 0).row(query);
        if query < 65 {
            assert_eq!(row, expected.output.head(0, 0).row(query));
            assert_eq!(result.lse[query], expected.lse[query]);
        } else {
            assert!(row.iter().all(|value| value.is_nan()));
            assert!(result.lse[query].is_nan());
        }
    }
}

#[test]
fn infinite_scores_propagate_as_in_the_plain_algorithm() {
    let problem =
        Problem::new(1, 1, 1, 1).with_key_length(3).with_dtype(DType::F32).with_scale(1.0);
    let tensor = |shape, values: &[f32]| Tensor::from_f32(DType::F32, shape, values).unwrap();
    let query = tensor(problem.query_shape(), &[1.0]);
    let value = tensor(problem.value_shape(), &[1.0, 2.0, 4.0]);
    let attend = |keys: &[f32; 3]| {
        let key = tensor(problem.key_shape(), keys);
        let result = run(&problem, Inputs::new(&query, &key, &value));
        (result.output.to_f32()[0], result.lse[0])
    };
    let infinity = f32::INFINITY;
    // A score of plus infinity gives inf - inf = NaN.
    let (output, lse) = attend(&[infinity, 0.0, 0.0]);
    assert!(output.is_nan() && lse.is_nan());
    // A score of minus infinity has a weight of zero.
    let (output, lse) = attend(&[-infinity, 0.0, 0.0]);
    assert_eq!(output, 3.0);
    assert!((lse - 2f32.ln()).abs() < 1e-6);
    // A row of minus infinities counts as fully masked.
    assert_eq!(attend(&[-infinity; 3]), (0.0, -infinity));
    // A NaN shows even if all other scores are minus infinity.
    let (output, lse) = attend(&[-infinity, f32::NAN, -infinity]);
    assert!(output.is_nan() && lse.is_nan());
}

#[test]
fn shared_heads_are_the_same_as_repeated_heads() {
    let shared = Problem::new(2, 6, 40, 16).with_kv_heads(2);
    let repeated = shared.clone().with_kv_heads(6);
    let tensors = InputTensors::random(&shared, 1).unwrap();
    let repeat = |tensor: &Tensor| {
        Tensor::from_fn(tensor.dtype(), repeated.key_shape(), |[b, s, h, d]| {
            tensor.head(b, h / 3).row(s)[d]
        })
        .unwrap()
    };
    let (key, value) = (repeat(&tensors.key), repeat(&tensors.value));
    let one = run(&shared, tensors.inputs());
    let other = run(&repeated, Inputs::new(&tensors.query, &key, &value));
    assert_eq!(one.output.bytes(), other.output.bytes());
    assert_eq!(one.lse, other.lse);
}

#[test]
fn a_broadcast_tensor_needs_no_copy() {
    let problem = Problem::new(3, 2, 20, 8);
    let tensors = InputTensors::random(&problem, 1).unwrap();
    let shape = problem.key_shape();
    let strides = Strides { batch: 0, length: 16, heads: 8 };
    let layout = Layout::strided(shape, strides).unwrap();
    let key = Tensor::new(layout, tensors.key.elements().clone()).unwrap();
    let copied = key.to_layout(Layout::contiguous(shape).unwrap(), 0.0).unwrap();
    let one = run(&problem, Inputs::new(&tensors.query, &key, &tensors.value));
    let other = run(&problem, Inputs::new(&tensors.query, &copied, &tensors.value));
    assert_eq!(one.output.bytes(), other.output.bytes());
}

#[test]
fn wrong_inputs_are_errors() {
    let problem = Problem::new(1, 2, 8, 16);
    let tensors = InputTensors::random(&problem, 0).unwrap();
    let backend = CpuBackend::new();
    let refusal = |problem: &Problem, options: &RunOptions<'_>| {
        let result = backend.run(problem, tensors.inputs(), options);
        result.unwrap_err().to_string()
    };
    let default = RunOptions::default();
    assert_eq!(
        refusal(&problem.clone().with_key_length(9), &default),
        "key has shape [1, 8, 2, 16], expected [1, 9, 2, 16]"
    );
    assert_eq!(
        refusal(&problem.clone().with_dtype(DType::BF16), &default),
        "query has element type f16, expected bf16"
    );
    assert_eq!(
        refusal(&problem.clone().with_scale(f32::INFINITY), &default),
        "the softmax scale must be finite, not inf"
    );
    let options = RunOptions { kernel: Some("unheard-of".to_owned()), ..RunOptions::default() };
    assert_eq!(
        refusal(&problem, &options),
        "there is no kernel `unheard-of` here, only cpu/blocked"
    );
}

fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![
        0usize..4,
        prop::sample::select(vec![31, 32, 33, 61, 63, 64, 65, 127, 128, 129, 191, 193]),
        0usize..200,
    ]
}

fn any_case() -> impl Strategy<Value = Case> {
    let sizes = (1usize..4, 1usize..4, 1usize..4, lengths(), lengths());
    let dims = (1usize..72, prop::option::of(1usize..72));
    let floats = DType::ALL.into_iter().filter(|it| *it != DType::Int8);
    let dtype = prop::sample::select(floats.collect::<Vec<_>>());
    let scale = prop::option::of(-2f32..2.0);
    let small = prop::sample::select(vec![DType::E4M3, DType::E5M2, DType::Int8]);
    let elements = (dtype, prop::option::of((small.clone(), small)), prop::array::uniform3(0u8..3));
    (sizes, dims, any_mask(), elements, scale, any_contents(), any::<u64>()).prop_map(
        |(
            sizes,
            (dim, value_dim),
            mask,
            (dtype, cache, descales),
            scale,
            (contents, order),
            seed,
        )| {
            let (batch, kv_heads, group, queries, keys) = sizes;
            let mut problem = Problem::new(batch, kv_heads * group, queries, dim)
                .with_kv_heads(kv_heads)
                .with_key_length(keys)
                .with_value_head_dim(value_dim.unwrap_or(dim))
                .with_dtype(dtype)
                .with_mask(mask);
            problem.scores.scale = scale;
            if let Some((key, value)) = cache {
                problem.dtypes = DTypes { key, value, ..problem.dtypes };
            }
            let [query, key, value] = descales;
            let DTypes { query: of_query, key: of_key, value: of_value, .. } = problem.dtypes;
            let kinds = [Descale::None, Descale::PerHead, Descale::PerToken];
            let kind = |dtype: DType, choice: u8| match dtype.is_8_bit() {
                true => kinds[usize::from(choice)],
                false => Descale::None,
            };
            problem.descales = Descales {
                query: kind(of_query, query % 2),
                key: kind(of_key, key),
                value: kind(of_value, value),
            };
            Case::new(problem).with_contents(contents).with_order(order).with_seed(seed)
        },
    )
}

proptest! {
    // Every run has the same cases; PROPTEST_RNG_SEED selects others.
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(1),
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_problem_passes(case in any_case()) {
        check(&case);
    }
}
