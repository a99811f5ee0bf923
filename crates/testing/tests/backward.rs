//! Gradients of the library's back ends against the f64 reference, judged by the library's accuracy
//! rule.

mod common;

use flashcore::serving::{Placement, Sequences};
use flashcore::{
    Backend, Backward, CpuBackend, DType, Gradients, InputTensors, Inputs, Machine, Mask, Output,
    Preference, Problem, RunOptions, Scores, Shape, Tensor,
};
use flashcore_testing::check::{Case, Contents, ExpectedGradients, cases, run_backward};
use flashcore_testing::reference::{self, Heads};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use crate::common::{any_contents, any_mask};

fn check(case: &Case) {
    let outcome = run_backward(&CpuBackend::new(), "backward", case).unwrap();
    assert!(outcome.passed, "{case}: {outcome}");
}

#[test]
fn standard_cases() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        cases::standard(dtype).iter().for_each(check);
    }
}

/// Only the last row of a causal problem sees the huge key. Its gradient is what remains of two
/// numbers that cancel up to the rounding of the saved output. A baseline with a forward pass of
/// its own had this one number three times smaller by chance.
#[test]
fn a_row_of_one_huge_key_is_judged_by_what_was_saved() {
    for dtype in [DType::F16, DType::BF16] {
        for (dim, queries, keys, seed) in [(40, 300, 300, 1117), (96, 130, 515, 1122)] {
            let problem = Problem::new(1, 1, queries, dim).with_key_length(keys).with_dtype(dtype);
            let case = Case::new(problem.with_mask(Mask::CAUSAL)).with_seed(seed);
            check(&case.with_contents(Contents::LateHugeKey));
        }
    }
}

/// Several row blocks and key blocks in one head, which no standard case has.
#[test]
fn many_blocks() {
    let problem = |queries, keys| {
        Problem::new(1, 3, queries, 24).with_key_length(keys).with_value_head_dim(40)
    };
    for (queries, keys) in [(700, 700), (1300, 300), (300, 1300), (1, 2000), (2000, 1)] {
        for mask in [Mask::NONE, Mask::CAUSAL, Mask::window(Some(250), Some(30))] {
            for dtype in [DType::F32, DType::BF16] {
                let plain = problem(queries, keys).with_mask(mask).with_dtype(dtype);
                check(&Case::new(plain.clone()));
                check(&Case::new(plain.with_scores(Scores::EVERY_RULE).with_kv_heads(1)));
            }
        }
    }
}

fn forward(problem: &Problem, inputs: Inputs<'_>) -> Output {
    CpuBackend::new().run(problem, inputs, &RunOptions::default()).unwrap()
}

fn backward(problem: &Problem, backward: Backward<'_>) -> Gradients {
    CpuBackend::new().run_backward(problem, backward, &RunOptions::default()).unwrap()
}

/// Runs the forward pass of a problem, and then its gradients.
fn differentiate(problem: &Problem, tensors: &InputTensors, gradient: &Tensor) -> Gradients {
    let saved = forward(problem, tensors.inputs());
    backward(problem, Backward::new(tensors.inputs(), &saved, gradient))
}

fn random(problem: &Problem, seed: u64) -> (InputTensors, Tensor) {
    let gradient = Tensor::random(problem.dtype(), problem.output_shape(), !seed).unwrap();
    (InputTensors::random(problem, seed).unwrap(), gradient)
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for (queries, keys, mask) in [
        (601, 733, Mask::NONE),
        (601, 733, Mask::CAUSAL),
        (733, 601, Mask::window(Some(150), Some(20))),
        (2, 3000, Mask::CAUSAL),
    ] {
        let problem = Problem::new(2, 6, queries, 40)
            .with_kv_heads(2)
            .with_key_length(keys)
            .with_dtype(DType::F32)
            .with_scores(Scores::EVERY_RULE)
            .with_mask(mask);
        let (tensors, gradient) = random(&problem, 3);
        common::any_number_gives_the_same(mask, || {
            let saved = forward(&problem, tensors.inputs());
            let given = Backward::new(tensors.inputs(), &saved, &gradient);
            let found = backward(&problem.clone().deterministic(), given);
            let bits = |tensor: &Tensor| tensor.bytes().to_vec();
            ([bits(&found.query), bits(&found.key), bits(&found.value)], found.sinks)
        });
    }
}

fn poisoned(tensor: &Tensor, poison: impl Fn(usize) -> bool, value: f32) -> Tensor {
    Tensor::from_fn(
        tensor.dtype(),
        tensor.shape(),
        |[batch, position, head, element]| match poison(position) {
            true => value,
            false => tensor.head(batch, head).row(position)[element],
        },
    )
    .unwrap()
}

/// Masked elements may hold anything, also in tiles that are masked only in part.
#[test]
fn what_is_not_finite_spreads_to_what_it_meets_and_no_further() {
    for dtype in [DType::F32, DType::F16] {
        for mask in [Mask::CAUSAL, Mask::window(Some(10), Some(3))] {
            for value in [f32::NAN, f32::INFINITY] {
                let problem = Problem::new(1, 2, 130, 20).with_kv_heads(1).with_dtype(dtype);
                let problem = problem.with_mask(mask);
                let (clean, gradient) = random(&problem, 5);
                let at = |position| position == 70;
                let mut cases = vec![(clean.clone(), poisoned(&gradient, at, value)); 4];
                cases[1] = (clean.clone(), gradient.clone());
                cases[1].0.query = poisoned(&clean.query, at, value);
                cases[2] = (clean.clone(), gradient.clone());
                cases[2].0.key = poisoned(&clean.key, at, value);
                cases[3] = (clean.clone(), gradient.clone());
                cases[3].0.value = poisoned(&clean.value, at, value);
                for (which, (tensors, gradient)) in cases.iter().enumerate() {
                    let found = differentiate(&problem, tensors, gradient);
                    let heads = Heads::all(&problem);
                    let expected =
                        reference::gradients(&problem, tensors.inputs(), gradient, &heads, None)
                            .unwrap();
                    let expected = &expected.heads[0];
                    let finite = |tensor: &Tensor, head: usize, position: usize| -> Vec<bool> {
                        tensor.head(0, head).row(position).iter().map(|it| it.is_finite()).collect()
                    };
                    let same = |found: Vec<bool>, expected: &[f64], name: &str, at: usize| {
                        let expected: Vec<bool> =
                            expected.iter().map(|value| value.is_finite()).collect();
                        assert_eq!(found, expected, "{problem}, case {which}: {name} {at}");
                    };
                    for position in 0..130 {
                        for head in 0..2 {
                            let vector = &expected.query[(head * 130 + position) * 20..][..20];
                            same(finite(&found.query, head, position), vector, "query", position);
                        }
                        let place = position * 20..(position + 1) * 20;
                        same(
                            finite(&found.key, 0, position),
                            &expected.key[place.clone()],
                            "key",
                            position,
                        );
                        same(
                            finite(&found.value, 0, position),
                            &expected.value[place],
                            "value",
                            position,
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn empty_problems_have_gradients_of_zero() {
    for (batch, queries, keys) in [(0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 0, 0)] {
        let problem = Problem::new(batch, 2, queries, 8).with_key_length(keys).with_sinks();
        let (tensors, gradient) = random(&problem, 0);
        let found = differentiate(&problem, &tensors, &gradient);
        for (tensor, shape) in [
            (found.query, problem.query_shape()),
            (found.key, problem.key_shape()),
            (found.value, problem.value_shape()),
        ] {
            assert_eq!(tensor.shape(), shape);
            assert!(tensor.to_f32().iter().all(|value| *value == 0.0));
        }
        assert_eq!(found.sinks, Some(vec![0.0; 2]));
    }
}

#[test]
fn rows_and_keys_that_see_nothing_have_gradients_of_exactly_zero() {
    let problem = Problem::new(1, 2, 70, 16).with_key_length(30);
    let problem = problem.with_mask(Mask::window(Some(0), Some(0)).with_chunk(7));
    // The first forty queries are before the first key and see none.
    let (tensors, gradient) = random(&problem, 1);
    let found =
        differentiate(&problem, &tensors, &poisoned(&gradient, |query| query < 40, f32::NAN));
    for head in 0..2 {
        for query in 0..70 {
            let zero = found.query.head(0, head).row(query).iter().all(|it| it.to_bits() << 1 == 0);
            // Each of the others sees one key only, so that its dQ is nothing but rounding errors.
            assert!(query >= 40 || zero, "query {query}");
        }
        assert!(found.value.to_f32().iter().all(|value| value.is_finite() && *value != 0.0));
    }
    let problem = Problem::new(1, 2, 20, 16).with_key_length(90);
    let problem = problem.with_mask(Mask::window(Some(5), Some(0)));
    let (tensors, gradient) = random(&problem, 2);
    let found = differentiate(&problem, &tensors, &gradient);
    for head in 0..2 {
        for key in 0..90 {
            for tensor in [&found.key, &found.value] {
                let row = tensor.head(0, head).row(key);
                assert_eq!(row.iter().all(|value| *value == 0.0), key < 65, "key {key}");
            }
        }
    }
}

/// Compares gradients with central differences of the public forward pass in f32.
#[test]
fn the_public_entry_agrees_with_differences() {
    let machine = Machine::discover();
    let preference = Preference::default();
    for scores in Scores::EACH_RULE.into_iter().chain([Scores::default(), Scores::EVERY_RULE]) {
        let problem = Problem::new(1, 4, 5, 8)
            .with_kv_heads(2)
            .with_key_length(7)
            .with_value_head_dim(6)
            .with_dtype(DType::F32)
            .with_mask(Mask::CAUSAL)
            .with_scores(scores);
        let (tensors, gradient) = random(&problem, 7);
        let weights = gradient.to_f32();
        let loss = |inputs: Inputs<'_>| -> f64 {
            let output = machine.attend(&problem, inputs, &preference, None).unwrap().output;
            let products = output.to_f32().into_iter().zip(&weights);
            products.map(|(output, weight)| f64::from(output) * f64::from(*weight)).sum()
        };
        let inputs = tensors.inputs();
        let saved = machine.attend(&problem, inputs, &preference, None).unwrap();
        let backward = Backward::new(inputs, &saved, &gradient);
        let found = machine.attend_backward(&problem, backward, &preference, None).unwrap();
        let slope = |loss: &dyn Fn(f32) -> f64| {
            const STEP: f32 = 1.0 / 64.0;
            let central = |step: f32| (loss(step) - loss(-step)) / f64::from(2.0 * step);
            (4.0 * central(STEP / 2.0) - central(STEP)) / 3.0
        };
        let agree = |name: &str, found: &[f32], values: &[f32], loss: &dyn Fn(&[f32]) -> f64| {
            for (index, found) in found.iter().enumerate() {
                let expected = slope(&|step| {
                    let mut moved = values.to_vec();
                    moved[index] += step;
                    loss(&moved)
                });
                // The rounding error of an f32 output, divided by the step.
                let error = (f64::from(*found) - expected).abs();
                assert!(error < 3e-4, "{problem}: {name} {index} is {found}, not {expected}");
            }
        };
        let tensor = |like: &Tensor, values: &[f32]| {
            Tensor::from_f32(DType::F32, like.shape(), values).unwrap()
        };
        let InputTensors { query, key, value, sinks, .. } = &tensors;
        agree("query", &found.query.to_f32(), &query.to_f32(), &|moved| {
            loss(Inputs { query: tensor(query, moved).view(), ..inputs })
        });
        agree("key", &found.key.to_f32(), &key.to_f32(), &|moved| {
            loss(Inputs { key: tensor(key, moved).view(), ..inputs })
        });
        agree("value", &found.value.to_f32(), &value.to_f32(), &|moved| {
            loss(Inputs { value: tensor(value, moved).view(), ..inputs })
        });
        assert_eq!(found.sinks.is_some(), sinks.is_some());
        if let (Some(found), Some(sinks)) = (&found.sinks, sinks) {
            agree("sink", found, sinks, &|moved| loss(Inputs { sinks: Some(moved), ..inputs }));
        }
    }
}

#[test]
fn packed_sequences() {
    let problem = Problem::new(3, 4, 0, 24).with_kv_heads(2).with_dtype(DType::BF16);
    let problem = problem.with_mask(Mask::CAUSAL).with_scores(Scores::EVERY_RULE);
    let packed = |starts: [usize; 4]| Placement::packed(starts.to_vec());
    let sequences =
        Sequences::new(problem, packed([0, 30, 30, 171]), packed([0, 50, 61, 200])).unwrap();
    let random = |length, heads, seed| {
        Tensor::random(DType::BF16, Shape::new(1, length, heads, 24), seed).unwrap()
    };
    let (query, key, value) = (random(171, 4, 0), random(200, 2, 1), random(200, 2, 2));
    let (gradient, slopes, sinks) =
        (random(171, 4, 3), [0.5, 0.25, 0.1, 0.0], [0.1, 0.2, 0.3, 0.4]);
    let inputs = Inputs::new(&query, &key, &value).with_slopes(&slopes).with_sinks(&sinks);
    let (problem, inputs) = sequences.over(inputs).unwrap();
    let expected = ExpectedGradients::new(&problem, inputs, gradient, 0).unwrap();
    let outcome = expected.check(&CpuBackend::new(), "backward").unwrap();
    assert!(outcome.passed && outcome.verdict.comparisons.len() == 4, "{outcome}");
}

#[test]
fn bad_input_is_refused_with_a_reason() {
    let problem = Problem::new(1, 4, 6, 8).with_kv_heads(2).with_mask(Mask::CAUSAL);
    let (tensors, gradient) = random(&problem, 0);
    let saved = forward(&problem, tensors.inputs());
    let good = Backward::new(tensors.inputs(), &saved, &gradient);
    let machine = Machine::discover();
    let run = |problem: &Problem, backward| {
        machine.attend_backward(problem, backward, &Preference::default(), None)
    };
    let refusal = |backward| run(&problem, backward).unwrap_err().to_string();
    assert!(run(&problem, good).is_ok());

    let zeros = |dtype, shape: [usize; 4]| Tensor::zeros(dtype, shape.into()).unwrap();
    let key = zeros(DType::F16, [1, 6, 4, 8]);
    assert_eq!(
        refusal(Backward { inputs: Inputs { key: key.view(), ..good.inputs }, ..good }),
        "key has shape [1, 6, 4, 8], expected [1, 6, 2, 8]"
    );
    let other = zeros(DType::F16, [1, 5, 4, 8]);
    assert_eq!(
        refusal(Backward { output_gradient: other.view(), ..good }),
        "the gradient of the output has shape [1, 5, 4, 8], expected [1, 6, 4, 8]"
    );
    let other = zeros(DType::BF16, [1, 6, 4, 8]);
    assert_eq!(
        refusal(Backward { output_gradient: other.view(), ..good }),
        "the gradient of the output has element type bf16, expected f16"
    );
    assert_eq!(
        refusal(Backward { output: other.view(), ..good }),
        "output has element type bf16, expected f16"
    );
    let of_lse = problem.clone().backward().with_lse_gradient();
    let numbers = vec![0.5; problem.rows()];
    assert!(run(&of_lse, good.with_lse_gradient(&numbers)).is_ok());
    assert_eq!(
        refusal(good.with_lse_gradient(&numbers)),
        "log-sum-exp gradients were given, and the problem has none"
    );
    assert_eq!(
        run(&of_lse, good).unwrap_err().to_string(),
        "the problem has log-sum-exp gradients, and none were given"
    );
    assert_eq!(
        run(&of_lse, good.with_lse_gradient(&numbers[1..])).unwrap_err().to_string(),
        "log-sum-exp gradients has length 23, expected 24"
    );
    let none = zeros(DType::F16, [0, 0, 0, 0]);
    assert_eq!(
        refusal(Backward { output: none.view(), ..good }),
        "gradients need the output of the forward pass, which was not saved"
    );
    assert_eq!(
        refusal(Backward { lse: &[], ..good }),
        "gradients need the log-sum-exp of the forward pass, which was not saved"
    );
    assert_eq!(
        refusal(Backward { lse: &saved.lse[1..], ..good }),
        "log-sum-exp has length 23, expected 24"
    );
    // Three keys: the first three queries see none, and cannot have a sum.
    let shorter = problem.with_key_length(3);
    let (few, _) = random(&shorter, 0);
    assert_eq!(
        run(&shorter, Backward { inputs: few.inputs(), ..good }).unwrap_err().to_string(),
        format!(
            "the log-sum-exp belongs to another problem: it is {} at batch 0, head 0, query 0, \
             which sees no key",
            saved.lse[0]
        )
    );
    let preference = Preference::named("cpu/blocked");
    assert_eq!(
        machine.attend_backward(&shorter, good, &preference, None).unwrap_err().to_string(),
        "key has shape [1, 6, 2, 8], expected [1, 3, 2, 8]"
    );
}

fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![0usize..6, 1usize..140, 90usize..400]
}

fn any_case() -> impl Strategy<Value = Case> {
    let sizes = (1usize..3, 1usize..3, 1usize..5, lengths(), lengths());
    let dims = (1usize..72, prop::option::of(1usize..72));
    let dtype = prop::sample::select(DType::WIDE.to_vec());
    let scores = prop::sample::select(vec![
        Scores::default(),
        Scores::EACH_RULE[0],
        Scores::EACH_RULE[1],
        Scores::EACH_RULE[2],
        Scores::EVERY_RULE,
    ]);
    (sizes, dims, any_mask(), dtype, scores, any_contents(), any::<u64>()).prop_map(
        |(sizes, (dim, value_dim), mask, dtype, scores, (contents, order), seed)| {
            let (batch, kv_heads, group, queries, keys) = sizes;
            let problem = Problem::new(batch, kv_heads * group, queries, dim)
                .with_kv_heads(kv_heads)
                .with_key_length(keys)
                .with_value_head_dim(value_dim.unwrap_or(dim))
                .with_dtype(dtype)
                .with_mask(mask)
                .with_scores(scores);
            Case::new(problem).with_contents(contents).with_order(order).with_seed(seed)
        },
    )
}

proptest! {
    // Every run has the same cases; PROPTEST_RNG_SEED selects others.
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(1),
        cases: 200,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_problem_passes(case in any_case()) {
        check(&case);
    }
}
