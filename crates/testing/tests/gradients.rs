//! The reference of the backward pass: compared with finite differences, and checked for gradients
//! that must be exactly zero.

use flashcore::serving::{Placement, Sequences};
use flashcore::{
    Backward, DType, InputTensors, Inputs, Mask, Problem, Scores, Shape, Tensor, TensorError,
};
use flashcore_testing::compare_gradients;
use flashcore_testing::reference::{self, Gradients, HeadGradients, Heads, ResultGradients, Rows};
use flashcore_testing::verdict::{GradientsToJudge, GradientsVerdict};

/// A small problem with its tensors, in f32 but with values that 16 bits represent, so that a step
/// to either side of a value is exact.
struct Small {
    problem: Problem,
    tensors: InputTensors,
    gradient: Tensor,
    /// The gradient of the log-sum-exps, if they have one.
    lse_gradient: Option<Vec<f32>>,
}

impl Small {
    fn new(problem: Problem, seed: u64) -> Self {
        let problem = problem.with_dtype(DType::F32);
        let mut tensors = InputTensors::random(&problem, seed).unwrap();
        for tensor in [&mut tensors.query, &mut tensors.key, &mut tensors.value] {
            *tensor = rounded(tensor).unwrap();
        }
        tensors.sinks.iter_mut().flatten().for_each(|sink| *sink = round(*sink));
        let gradient = Tensor::random(DType::F32, problem.output_shape(), !seed).unwrap();
        let lse_gradient = ResultGradients::random_lse(&problem, seed).unwrap();
        Small { gradient: rounded(&gradient).unwrap(), problem, tensors, lse_gradient }
    }

    fn gradients(&self) -> Gradients {
        let heads = Heads::all(&self.problem);
        let inputs = self.tensors.inputs();
        let output = self.gradient.view();
        let results = ResultGradients { output, lse: self.lse_gradient.as_deref() };
        reference::gradients(&self.problem, inputs, results, &heads, None).unwrap()
    }

    /// Returns the loss, the sum of outputs and of log-sum-exps times their gradients, by the
    /// reference of the forward pass.
    fn loss(&self, inputs: Inputs<'_>) -> f64 {
        let rows = Rows::all(&self.problem);
        let problem = self.problem.clone().forward();
        let answer = reference::attention(&problem, inputs, &rows, None).unwrap();
        let outputs = answer.output.chunks_exact(self.problem.value_head_dim);
        let of_row = |(row, output): (&reference::Row, &[f64])| -> f64 {
            let gradient = self.gradient.head(row.batch, row.head).row(row.query);
            output.iter().zip(gradient).map(|(output, by)| output * f64::from(by)).sum()
        };
        let of_outputs: f64 = rows.as_slice().iter().zip(outputs).map(of_row).sum();
        let Some(by) = &self.lse_gradient else { return of_outputs };
        let of_lse = |(row, lse): (&reference::Row, &f64)| {
            let index = (row.batch * problem.query_heads + row.head) * problem.query_length;
            // A row that sees no key has minus infinity, whatever its inputs are.
            if lse.is_finite() { lse * f64::from(by[index + row.query]) } else { 0.0 }
        };
        of_outputs + rows.as_slice().iter().zip(&answer.lse).map(of_lse).sum::<f64>()
    }

    /// Returns the derivative of the loss with respect to the element at an index of a tensor;
    /// `with` puts the changed tensor in place.
    fn difference<'a>(
        &'a self,
        tensor: &Tensor,
        index: usize,
        with: impl Fn(&'a Small, &Tensor) -> f64,
    ) -> f64 {
        let values = tensor.to_f32();
        self.slope(|step| {
            let mut moved = values.clone();
            moved[index] += step;
            with(self, &Tensor::from_f32(DType::F32, tensor.shape(), &moved).unwrap())
        })
    }

    /// Returns the slope by central differences over two step sizes, combined so that the third
    /// derivative cancels (Richardson extrapolation).
    fn slope(&self, loss: impl Fn(f32) -> f64) -> f64 {
        const STEP: f32 = 1.0 / 64.0;
        let central = |step: f32| (loss(step) - loss(-step)) / f64::from(2.0 * step);
        (4.0 * central(STEP / 2.0) - central(STEP)) / 3.0
    }
}

fn round(value: f32) -> f32 {
    (value * 256.0).round() / 256.0
}

fn rounded(tensor: &Tensor) -> Result<Tensor, TensorError> {
    let values: Vec<f32> = tensor.to_f32().into_iter().map(round).collect();
    Tensor::from_f32(tensor.dtype(), tensor.shape(), &values)
}

/// Returns the elements of a gradient in the order of its tensor, from the gradients by head.
fn in_order(
    gradients: &Gradients,
    shape: Shape,
    group: usize,
    numbers: fn(&HeadGradients) -> &[f64],
) -> Vec<f64> {
    let Shape { length, heads, dim, .. } = shape;
    let mut all = vec![f64::NAN; shape.elements().unwrap()];
    for head in &gradients.heads {
        for (index, vector) in numbers(head).chunks_exact(dim).enumerate() {
            let query_head = head.kv_head * group + index / length;
            let place = (head.sequence * length + index % length) * heads + query_head;
            all[place * dim..][..dim].copy_from_slice(vector);
        }
    }
    all
}

fn agrees_with_differences(problem: Problem, seed: u64) {
    let small = Small::new(problem, seed);
    let Small { problem, tensors, .. } = &small;
    let gradients = small.gradients();
    let close = |name: &str, index: usize, found: f64, expected: f64| {
        let error = (found - expected).abs();
        assert!(
            error < 2e-6 * expected.abs().max(1.0),
            "{problem}: {name} {index} is {found}, differences give {expected}"
        );
    };
    let inputs = tensors.inputs();
    let group = problem.group_size();

    let found = in_order(&gradients, problem.query_shape(), group, |head| &head.query);
    for (index, found) in found.iter().enumerate() {
        let expected = small.difference(&tensors.query, index, |small, query| {
            small.loss(Inputs { query: query.view(), ..inputs })
        });
        close("query", index, *found, expected);
    }
    let found = in_order(&gradients, problem.key_shape(), 1, |head| &head.key);
    for (index, found) in found.iter().enumerate() {
        let expected = small.difference(&tensors.key, index, |small, key| {
            small.loss(Inputs { key: key.view(), ..inputs })
        });
        close("key", index, *found, expected);
    }
    let found = in_order(&gradients, problem.value_shape(), 1, |head| &head.value);
    for (index, found) in found.iter().enumerate() {
        let expected = small.difference(&tensors.value, index, |small, value| {
            small.loss(Inputs { value: value.view(), ..inputs })
        });
        close("value", index, *found, expected);
    }
    if let Some(sinks) = &tensors.sinks {
        let found = gradients.sinks(problem).unwrap();
        for (head, found) in found.iter().enumerate() {
            let expected = small.slope(|step| {
                let mut moved = sinks.clone();
                moved[head] += step;
                small.loss(Inputs { sinks: Some(&moved), ..inputs })
            });
            close("sink", head, *found, expected);
        }
    }
}

fn problem(queries: usize, keys: usize) -> Problem {
    Problem::new(1, 1, queries, 5).with_key_length(keys).with_value_head_dim(3)
}

#[test]
fn plain_attention_agrees_with_differences() {
    agrees_with_differences(problem(4, 4), 0);
    agrees_with_differences(problem(3, 7), 1);
    agrees_with_differences(problem(1, 1), 2);
    agrees_with_differences(problem(4, 4).with_scale(-0.3), 3);
}

#[test]
fn masks_agree_with_differences() {
    for (queries, keys) in [(4, 4), (3, 6), (6, 3)] {
        for mask in [
            Mask::CAUSAL,
            Mask::window(Some(1), Some(0)),
            Mask::window(Some(1), Some(2)),
            Mask::CAUSAL.with_chunk(2),
            Mask::NONE.with_chunk(3),
        ] {
            agrees_with_differences(problem(queries, keys).with_mask(mask), 4);
        }
    }
}

#[test]
fn score_rules_agree_with_differences() {
    for scores in Scores::EACH_RULE.into_iter().chain([Scores::EVERY_RULE]) {
        agrees_with_differences(problem(3, 4).with_scores(scores), 5);
        let causal = problem(4, 3).with_mask(Mask::CAUSAL);
        agrees_with_differences(causal.with_scores(scores), 6);
    }
    agrees_with_differences(problem(3, 4).with_softcap(0.7), 7);
}

#[test]
fn gradients_of_log_sum_exps_agree_with_differences() {
    let with = |it: Problem| it.backward().with_lse_gradient();
    agrees_with_differences(with(problem(5, 7)), 20);
    // Two rows see no key: their log-sum-exps are minus infinity, or their sinks.
    let causal = problem(5, 3).with_mask(Mask::CAUSAL);
    for (seed, scores) in (21..).zip(Scores::EACH_RULE) {
        agrees_with_differences(with(causal.clone().with_scores(scores)), seed);
    }
    let scores = Scores::EVERY_RULE;
    agrees_with_differences(with(problem(4, 6).with_kv_heads(1).with_scores(scores)), 24);
}

#[test]
fn grouped_heads_and_batches_agree_with_differences() {
    let grouped = Problem::new(2, 4, 3, 4).with_kv_heads(2).with_value_head_dim(2);
    agrees_with_differences(grouped.clone(), 8);
    let every_rule = grouped.with_mask(Mask::CAUSAL).with_scores(Scores::EVERY_RULE);
    agrees_with_differences(every_rule.with_key_length(5), 9);
}

#[test]
fn delta_is_the_row_sum_of_the_output_and_its_gradient() {
    let problem = Problem::new(2, 4, 7, 8).with_kv_heads(2).with_scores(Scores::EVERY_RULE);
    let small = Small::new(problem.with_mask(Mask::CAUSAL).with_key_length(5), 10);
    let rows = Rows::all(&small.problem);
    let inputs = small.tensors.inputs();
    let answer = reference::attention(&small.problem, inputs, &rows, None).unwrap();
    let deltas = small.gradients().heads.into_iter().flat_map(|head| head.delta);
    for ((row, output), delta) in rows.as_slice().iter().zip(answer.output.chunks(8)).zip(deltas) {
        let gradient = small.gradient.head(row.batch, row.head).row(row.query);
        let sum: f64 = output.iter().zip(gradient).map(|(o, g)| o * f64::from(g)).sum();
        assert!((delta - sum).abs() < 1e-12);
    }
}

fn replaced(tensor: &Tensor, value: impl Fn(usize) -> Option<f32>) -> Tensor {
    let shape = tensor.shape();
    Tensor::from_fn(tensor.dtype(), shape, |[batch, position, head, element]| {
        value(position).unwrap_or_else(|| tensor.head(batch, head).row(position)[element])
    })
    .unwrap()
}

#[test]
fn what_sees_nothing_and_what_nobody_sees_is_exactly_zero() {
    // The first four queries see no key; their output gradients may be anything.
    let small = Small::new(problem(7, 3).with_mask(Mask::CAUSAL).with_sinks(), 11);
    let poisoned = Small {
        gradient: replaced(&small.gradient, |query| (query < 4).then_some(f32::NAN)),
        problem: small.problem.clone(),
        tensors: small.tensors.clone(),
        lse_gradient: None,
    };
    let (clean, head) = (&small.gradients().heads[0], &poisoned.gradients().heads[0]);
    assert!(head.query[..4 * 5].iter().all(|value| *value == 0.0));
    assert!(head.query[4 * 5..].iter().all(|value| *value != 0.0));
    assert_eq!((&head.key, &head.value), (&clean.key, &clean.value));
    assert_eq!((&head.sinks, &head.delta), (&clean.sinks, &clean.delta));

    // Keys before the window of the first query.
    let mut small = Small::new(problem(2, 7).with_mask(Mask::window(Some(2), Some(0))), 12);
    small.tensors.key = replaced(&small.tensors.key, |key| (key < 3).then_some(f32::NAN));
    small.tensors.value = replaced(&small.tensors.value, |key| (key < 3).then_some(f32::NAN));
    let head = &small.gradients().heads[0];
    assert!(head.key[..3 * 5].iter().chain(&head.value[..3 * 3]).all(|value| *value == 0.0));
    let seen = head.key[3 * 5..].iter().chain(&head.value[3 * 3..]).chain(&head.query);
    assert!(seen.into_iter().all(|value| value.is_finite() && *value != 0.0));
}

#[test]
fn nan_spreads_to_what_it_meets_and_no_further() {
    let mut small = Small::new(problem(6, 6).with_mask(Mask::CAUSAL), 13);
    small.tensors.query = replaced(&small.tensors.query, |query| (query == 2).then_some(f32::NAN));
    let head = &small.gradients().heads[0];
    let nan = |values: &[f64], dim: usize| -> Vec<bool> {
        values.chunks(dim).map(|vector| vector.iter().all(|value| value.is_nan())).collect()
    };
    let finite = |values: &[f64]| values.iter().filter(|value| value.is_finite()).count();
    assert_eq!(nan(&head.query, 5), [false, false, true, false, false, false]);
    // Query 2 sees keys 0 to 2.
    assert_eq!(nan(&head.key, 5), [true, true, true, false, false, false]);
    assert_eq!(nan(&head.value, 3), [true, true, true, false, false, false]);
    assert_eq!([finite(&head.query), finite(&head.key), finite(&head.value)], [25, 15, 9]);
}

#[test]
fn packed_sequences_are_what_they_are_alone() {
    let problem = Problem::new(2, 4, 0, 5).with_kv_heads(2).with_dtype(DType::F32);
    let problem = problem.with_mask(Mask::CAUSAL).with_scores(Scores::EVERY_RULE);
    let placement = |starts: [usize; 3]| Placement::packed(starts.to_vec());
    let (queries, keys) = (placement([0, 3, 7]), placement([0, 6, 8]));
    let sequences = Sequences::new(problem, queries, keys).unwrap();
    let random = |length, heads, seed| {
        Tensor::random(DType::F32, Shape::new(1, length, heads, 5), seed).unwrap()
    };
    let (query, key, value) = (random(7, 4, 0), random(8, 2, 1), random(8, 2, 2));
    let (gradient, slopes, sinks) = (random(7, 4, 3), [0.5, 0.25, 0.1, 0.0], [0.1, 0.2, 0.3, 0.4]);
    let inputs = Inputs::new(&query, &key, &value).with_slopes(&slopes).with_sinks(&sinks);
    let (packed, placed) = sequences.over(inputs).unwrap();
    let whole =
        reference::gradients(&packed, placed, &gradient, &Heads::all(&packed), None).unwrap();
    let first_query = [0, 3];
    for sequence in 0..2 {
        let alone = sequences.alone(sequence);
        let tensors = sequences.gather(inputs, sequence).unwrap();
        let own = Tensor::from_fn(DType::F32, alone.output_shape(), |[_, row, head, element]| {
            gradient.head(0, head).row(first_query[sequence] + row)[element]
        })
        .unwrap();
        let heads = Heads::all(&alone);
        let alone = reference::gradients(&alone, tensors.inputs(), &own, &heads, None).unwrap();
        for (one, other) in alone.heads.iter().zip(&whole.heads[2 * sequence..]) {
            assert_eq!(
                (&one.query, &one.key, &one.value),
                (&other.query, &other.key, &other.value)
            );
            assert_eq!((&one.sinks, &one.delta), (&other.sinks, &other.delta));
        }
    }
}

#[test]
fn an_infinite_value_does_not_make_the_rule_lax() {
    let problem = Problem::new(1, 1, 40, 8).with_mask(Mask::CAUSAL);
    let mut tensors = InputTensors::random(&problem, 3).unwrap();
    tensors.value = replaced(&tensors.value, |key| (key == 30).then_some(f32::INFINITY));
    let judged = Judged::of(problem, tensors);
    let Judged { reference, .. } = &judged;
    assert!(judged.passed(reference, |_, value| value)[0]);
    // The first queries do not see it.
    let wrong = |index, value| if index == 3 * 8 { value + 0.1 } else { value };
    assert!(!judged.passed(reference, wrong)[0]);
}

/// A problem with what the accuracy rule needs, and the reference rounded to the element type.
struct Judged {
    problem: Problem,
    tensors: InputTensors,
    gradient: Tensor,
    reference: Gradients,
    baseline: Gradients,
}

/// The gradients of queries, keys and values, and those of the sinks.
type Found = ([Tensor; 3], Vec<f32>);

impl Judged {
    fn new(problem: Problem) -> Self {
        let tensors = InputTensors::random(&problem, 3).unwrap();
        Judged::of(problem, tensors)
    }

    fn of(problem: Problem, tensors: InputTensors) -> Self {
        let gradient = Tensor::random(problem.dtype(), problem.output_shape(), 4).unwrap();
        let (inputs, heads) = (tensors.inputs(), Heads::all(&problem));
        let reference = reference::gradients(&problem, inputs, &gradient, &heads, None).unwrap();
        let (output, lse) = reference::saved(&problem, inputs).unwrap();
        let (output, output_gradient) = (output.view(), gradient.view());
        let backward = Backward { inputs, output, lse: &lse, output_gradient, lse_gradient: None };
        let baseline = reference::gradients_baseline(&problem, backward, &heads, None).unwrap();
        Judged { problem, tensors, gradient, reference, baseline }
    }

    /// Returns gradients as tensors, with `change` applied to each element.
    fn tensors(&self, gradients: &Gradients, change: impl Fn(usize, f64) -> f64) -> Found {
        let Judged { problem, .. } = self;
        let tensor = |shape: Shape, group, numbers| {
            let values = in_order(gradients, shape, group, numbers);
            let values = values.iter().enumerate().map(|(at, value)| change(at, *value) as f32);
            Tensor::from_f32(problem.dtype(), shape, &values.collect::<Vec<_>>()).unwrap()
        };
        let group = problem.group_size();
        let tensors = [
            tensor(problem.query_shape(), group, |head| &head.query),
            tensor(problem.key_shape(), 1, |head| &head.key),
            tensor(problem.value_shape(), 1, |head| &head.value),
        ];
        let sinks = gradients.sinks(problem).unwrap();
        let sinks = sinks.iter().enumerate().map(|(at, value)| change(at, *value) as f32);
        (tensors, sinks.collect())
    }

    fn judge(&self, (tensors, sinks): &Found) -> GradientsVerdict {
        let [query, key, value] = tensors.each_ref().map(Some);
        let found = GradientsToJudge { query, key, value, sinks: Some(sinks), delta: None };
        let inputs = self.tensors.inputs();
        compare_gradients(&self.problem, inputs, found, &self.reference, &self.baseline).unwrap()
    }

    /// Returns whether the gradients of queries, keys, values and sinks pass.
    fn passed(&self, gradients: &Gradients, change: impl Fn(usize, f64) -> f64) -> [bool; 4] {
        let verdict = self.judge(&self.tensors(gradients, change));
        ["query", "key", "value", "sinks"].map(|name| verdict.of(name).unwrap().passed)
    }
}

#[test]
fn the_rule_passes_what_is_right_and_refuses_what_is_wrong() {
    for dtype in DType::WIDE {
        let problem = Problem::new(1, 4, 70, 32).with_kv_heads(2).with_dtype(dtype);
        let problem = problem.with_mask(Mask::CAUSAL).with_softcap(5.0).with_sinks();
        let judged = Judged::new(problem.clone());
        let Judged { reference, baseline, tensors, gradient, .. } = &judged;
        assert_eq!(judged.passed(reference, |_, value| value), [true; 4], "{dtype}");
        assert_eq!(judged.passed(baseline, |_, value| value), [true; 4], "{dtype}");
        assert_eq!(judged.passed(reference, |_, value| value * 1.05), [false; 4], "{dtype}");
        assert_eq!(judged.passed(reference, |_, _| 0.0), [false; 4], "{dtype}");
        let nan = |index, value| if index == 3 { f64::NAN } else { value };
        assert_eq!(judged.passed(reference, nan), [false; 4], "{dtype}");
        let wrong = |index, value| if index == 3 { value + 0.1 } else { value };
        assert_eq!(judged.passed(reference, wrong), [false; 4], "{dtype}");
        if dtype == DType::F32 {
            let low = |_, value| DType::F16.round(value);
            assert_eq!(judged.passed(reference, low), [false; 4]);
        }
        let others = [
            problem.clone().with_mask(Mask::NONE),
            problem.clone().with_scale(0.19),
            problem.with_softcap(6.0),
        ];
        for other in others {
            let heads = Heads::all(&other);
            let found =
                reference::gradients(&other, tensors.inputs(), gradient, &heads, None).unwrap();
            let verdict = judged.judge(&judged.tensors(&found, |_, value| value));
            assert!(!verdict.passed, "{other}: {verdict}");
        }
    }
}
