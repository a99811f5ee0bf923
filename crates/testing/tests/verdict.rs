//! The accuracy rule must reject wrong results: one test for each kind of error that it must
//! detect.

use flashcore::{
    Backend, CpuBackend, DType, Elements, InputTensors, Inputs, Mask, Output, Problem, RunOptions,
    Tensor,
};
use flashcore_testing::check::ExpectedGradients;
use flashcore_testing::reference::{self, Answer, Rows};
use flashcore_testing::{Verdict, compare};

struct Judged {
    problem: Problem,
    tensors: InputTensors,
    reference: Answer,
    baseline: Answer,
    right: Output,
}

impl Judged {
    fn new(problem: Problem) -> Self {
        let tensors = InputTensors::random(&problem, 11).unwrap();
        let rows = Rows::all(&problem);
        let inputs = tensors.inputs();
        let judged = Judged {
            reference: reference::attention(&problem, inputs, &rows, None).unwrap(),
            baseline: reference::baseline(&problem, inputs, &rows, None).unwrap(),
            right: run(&problem, inputs),
            problem,
            tensors,
        };
        let verdict = judged.judge(&judged.right);
        assert!(verdict.passed, "{verdict}");
        judged
    }

    fn judge(&self, result: &Output) -> Verdict {
        compare(&self.problem, result, &self.reference, &self.baseline).unwrap()
    }

    /// Returns the verdict after `change` was applied to every output value.
    fn judge_changed(&self, change: impl Fn(usize, f32) -> f32) -> Verdict {
        let values = self.right.output.to_f32();
        let changed: Vec<f32> =
            values.iter().enumerate().map(|(index, value)| change(index, *value)).collect();
        let mut result = self.right.clone();
        let shape = self.problem.output_shape();
        result.output = Tensor::from_f32(self.problem.dtype(), shape, &changed).unwrap();
        self.judge(&result)
    }
}

fn run(problem: &Problem, inputs: Inputs<'_>) -> Output {
    CpuBackend::new().run(problem, inputs, &RunOptions::default()).unwrap()
}

fn problem(dtype: DType) -> Problem {
    Problem::new(1, 4, 96, 64).with_kv_heads(2).with_dtype(dtype).with_mask(Mask::CAUSAL)
}

fn for_each_dtype(test: impl Fn(Judged)) {
    for dtype in DType::WIDE {
        test(Judged::new(problem(dtype)));
    }
}

#[test]
fn one_wrong_element_fails() {
    for_each_dtype(|judged| {
        let verdict =
            judged.judge_changed(|index, value| if index == 12_345 { value + 0.1 } else { value });
        assert!(!verdict.passed && verdict.lse.passed, "{verdict}");
        let place = verdict.output.worst.unwrap();
        let row = (place.row.query * 4 + place.row.head) * 64;
        assert_eq!(row + place.element, 12_345);
    });
}

#[test]
fn zeros_and_a_wrong_factor_fail() {
    for_each_dtype(|judged| {
        assert!(!judged.judge_changed(|_, _| 0.0).passed);
        assert!(!judged.judge_changed(|_, value| value * 1.05).passed);
        assert!(!judged.judge_changed(|_, value| -value).passed);
    });
}

#[test]
fn a_value_that_is_not_finite_fails() {
    for_each_dtype(|judged| {
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let verdict =
                judged.judge_changed(|index, value| if index == 7 { wrong } else { value });
            assert!(!verdict.passed, "{verdict}");
            assert_eq!(verdict.output.misplaced, 1);
        }
    });
}

#[test]
fn a_wrong_log_sum_exp_fails() {
    for_each_dtype(|judged| {
        for wrong in [f32::NAN, f32::NEG_INFINITY, judged.right.lse[100] + 1e-3] {
            let mut result = judged.right.clone();
            result.lse[100] = wrong;
            let verdict = judged.judge(&result);
            assert!(!verdict.passed && verdict.output.passed, "{verdict}");
        }
        // The log-sum-exp in units of log2, as kernels have it internally.
        let mut result = judged.right.clone();
        result.lse.iter_mut().for_each(|lse| *lse *= std::f32::consts::LOG2_E);
        assert!(!judged.judge(&result).passed);
    });
}

#[test]
fn the_log_sum_exp_of_a_capped_score_may_be_off_by_two_units_of_the_cap() {
    let problem = Problem::new(1, 4, 96, 64).with_mask(Mask::window(Some(0), Some(0)));
    let judged = Judged::new(problem.with_scale(0.02).with_softcap(30.0));
    for (off, passes) in [(4.3e-6, true), (2e-5, false)] {
        let mut result = judged.right.clone();
        result.lse[100] += off;
        let verdict = judged.judge(&result);
        assert_eq!(verdict.passed, passes, "{verdict}");
    }
}

#[test]
fn the_output_of_capped_scores_may_be_off_by_as_many_parts() {
    let problem = problem(DType::F32).with_mask(Mask::window(Some(1), Some(0)));
    let judged = Judged::new(problem.with_softcap(30.0));
    for (off, passes) in [(5e-6, true), (1e-4, false)] {
        let verdict =
            judged.judge_changed(|index, value| if index == 70 { value + off } else { value });
        assert_eq!(verdict.passed, passes, "{verdict}");
    }
}

#[test]
fn silent_lower_precision_fails() {
    // f32 computed in bf16, and f16 rounded to bf16.
    let judged = Judged::new(problem(DType::F32));
    assert!(!judged.judge_changed(|_, value| DType::BF16.round(f64::from(value)) as f32).passed);
    assert!(!judged.judge_changed(|_, value| DType::F16.round(f64::from(value)) as f32).passed);
    let judged = Judged::new(problem(DType::F16));
    assert!(!judged.judge_changed(|_, value| DType::BF16.round(f64::from(value)) as f32).passed);
}

#[test]
fn the_answer_to_another_problem_fails() {
    for_each_dtype(|judged| {
        let others =
            [judged.problem.clone().with_mask(Mask::NONE), judged.problem.clone().with_scale(0.12)];
        for other in others {
            let verdict = judged.judge(&run(&other, judged.tensors.inputs()));
            assert!(!verdict.passed, "{other}: {verdict}");
        }
    });
}

#[test]
fn a_row_that_sees_nothing_must_be_zero() {
    let judged = Judged::new(problem(DType::F16).with_key_length(40));
    assert!(!judged.judge_changed(|index, value| if index == 0 { 0.01 } else { value }).passed);
    let mut result = judged.right.clone();
    result.lse[0] = 0.0;
    assert!(!judged.judge(&result).passed);
}

#[test]
fn nan_must_stand_where_the_reference_has_it() {
    let problem = Problem::new(1, 1, 8, 8).with_dtype(DType::F32);
    let mut tensors = InputTensors::random(&problem, 0).unwrap();
    let mut query = tensors.query.to_f32();
    query[3 * 8] = f32::NAN;
    tensors.query = Tensor::from_f32(DType::F32, problem.query_shape(), &query).unwrap();
    let inputs = tensors.inputs();
    let rows = Rows::all(&problem);
    let reference = reference::attention(&problem, inputs, &rows, None).unwrap();
    let baseline = reference::baseline(&problem, inputs, &rows, None).unwrap();
    let right = run(&problem, inputs);
    let judge = |result: &Output| compare(&problem, result, &reference, &baseline).unwrap();
    assert!(judge(&right).passed, "{}", judge(&right));

    let mut wrong = right.clone();
    let values = right.output.to_f32();
    let zeroed = values.iter().map(|value| if value.is_nan() { 0.0 } else { *value });
    let elements = Elements::F32(zeroed.collect());
    wrong.output = Tensor::new(right.output.layout(), elements).unwrap();
    assert_eq!(judge(&wrong).output.misplaced, 8);
    assert!(!judge(&wrong).passed);
}

#[test]
fn results_of_another_shape_or_type_are_errors() {
    let judged = Judged::new(problem(DType::F16));
    let mut result = judged.right.clone();
    result.lse.pop();
    let judge = |result: &Output| {
        compare(&judged.problem, result, &judged.reference, &judged.baseline)
            .unwrap_err()
            .to_string()
    };
    assert_eq!(judge(&result), "log-sum-exp has length 383, expected 384");
    result.output = Tensor::zeros(DType::F16, judged.problem.key_shape()).unwrap();
    assert_eq!(judge(&result), "output has shape [1, 96, 2, 64], expected [1, 96, 4, 64]");
    result.output = Tensor::zeros(DType::F32, judged.problem.output_shape()).unwrap();
    assert_eq!(judge(&result), "output has element type f32, expected f16");
}

#[test]
fn a_sample_sees_its_own_rows_only() {
    let problem = problem(DType::BF16);
    let tensors = InputTensors::random(&problem, 11).unwrap();
    let inputs = tensors.inputs();
    let rows = Rows::sample(&problem, 10, 3);
    let all = Rows::all(&problem);
    let sample = reference::attention(&problem, inputs, &rows, None).unwrap();
    let whole = reference::attention(&problem, inputs, &all, None).unwrap();
    assert_eq!(sample.rows.len(), 10);
    for (index, row) in rows.as_slice().iter().enumerate() {
        let place = all.as_slice().iter().position(|other| other == row).unwrap();
        assert_eq!(sample.lse[index], whole.lse[place]);
        assert_eq!(sample.output[index * 64..][..64], whole.output[place * 64..][..64]);
    }
}

/// A sink with almost all the weight leaves weights so small that f32 has few digits for them:
/// outputs and gradients around 1e-36 are right as long as they have that magnitude.
#[test]
fn weights_below_the_range_are_no_errors() {
    for dtype in [DType::F32, DType::BF16] {
        for sink in [20.0, 60.0, 80.0, 84.0, 86.0, 90.0, 120.0] {
            let problem = problem(dtype).with_sinks();
            let mut tensors = InputTensors::random(&problem, 11).unwrap();
            tensors.sinks = Some(vec![sink; 4]);
            let (inputs, rows, cpu) = (tensors.inputs(), Rows::all(&problem), CpuBackend::new());
            let reference = reference::attention(&problem, inputs, &rows, None).unwrap();
            let baseline = reference::baseline(&problem, inputs, &rows, None).unwrap();
            let mut result = run(&problem, inputs);
            let verdict = compare(&problem, &result, &reference, &baseline).unwrap();
            assert!(verdict.passed, "{dtype}, sink {sink}: {verdict}");
            let gradients = ExpectedGradients::random(&problem, inputs, 1).unwrap();
            let outcome = gradients.check(&cpu, "backward").unwrap();
            assert!(outcome.passed, "{dtype}, sink {sink}: {outcome}");
            // Anything larger is wrong.
            let mut values = result.output.to_f32();
            values[7] += 1e-34;
            let larger = Tensor::from_f32(dtype, problem.output_shape(), &values).unwrap();
            let changed = larger.bytes() != result.output.bytes();
            result.output = larger;
            let verdict = compare(&problem, &result, &reference, &baseline).unwrap();
            assert_eq!(verdict.passed, !changed || sink < 80.0, "{dtype}, sink {sink}: {verdict}");
        }
    }
}
