//! Mask and score functions: the CPU and a GPU against the reference, and the planner's choices.

mod device;

use flashcore::function::HostTensor;
use flashcore::gpu::Chip;
use flashcore::serving::{Placement, Sequences};
use flashcore::{
    Backend, Backward, CpuBackend, DType, GpuBackend, InputTensors, Inputs, Mask, Plan, Preference,
    Problem, RunOptions, Scores, Shape, Tensor,
};
use flashcore_testing::check::ExpectedGradients;
use flashcore_testing::composition::{self, Composition};
use flashcore_testing::reference::{self, Rows};
use flashcore_testing::{compare, compare_sequences};
use ptx::Target;

fn run(problem: &Problem, inputs: Inputs<'_>) -> flashcore::Output {
    CpuBackend::new().run(problem, inputs, &RunOptions::default()).unwrap()
}

/// Checks the CPU against the reference, which evaluates the same functions in f64.
fn check(problem: &Problem, captured: &[HostTensor]) {
    check_on(&CpuBackend::new(), problem, captured);
}

/// Checks a back end against the reference.
fn check_on(backend: &dyn Backend, problem: &Problem, captured: &[HostTensor]) {
    let tensors = InputTensors::random(problem, 7).unwrap();
    let inputs = tensors.inputs().with_captured(captured);
    let result = backend.run(problem, inputs, &RunOptions::default()).unwrap();
    let rows = Rows::all(problem);
    let reference = reference::attention(problem, inputs, &rows, None).unwrap();
    let baseline = reference::baseline(problem, inputs, &rows, None).unwrap();
    let verdict = compare(problem, &result, &reference, &baseline).unwrap();
    assert!(verdict.passed, "{problem}: {verdict}");
}

/// Checks the gradients of a back end against the reference.
fn check_gradients(backend: &dyn Backend, problem: &Problem, captured: &[HostTensor]) {
    let tensors = InputTensors::random(problem, 7).unwrap();
    let inputs = tensors.inputs().with_captured(captured);
    let expected = ExpectedGradients::random(problem, inputs, 7).unwrap();
    let run = |given: Backward<'_>| backend.run_backward(problem, given, &RunOptions::default());
    let outcome = expected.judge(backend, run).unwrap();
    assert!(outcome.passed, "{problem}: {outcome}");
}

fn ids() -> HostTensor {
    let ids: Vec<i32> = (0..2 * 200).map(|it| it % 200 / 53).collect();
    HostTensor::integers("ids", &ids, &[2, 200])
}

fn documents() -> Mask {
    Mask::from_fn("documents", |at| {
        let ids = at.integers("ids");
        ids.load([at.batch(), at.query()]).eq(ids.load([at.batch(), at.key()]))
    })
}

/// Returns a mask by name combined with a mask function.
fn causal_documents() -> Mask {
    Mask::CAUSAL.with_function(documents().function.unwrap())
}

#[test]
fn the_cpu_follows_functions() {
    let problem = Problem::new(2, 4, 67, 16).with_key_length(201).with_kv_heads(2);
    let dilated = Mask::from_fn("dilated", |at| ((at.query() - at.key()) % 3).eq(0));
    let nothing = Mask::from_fn("nothing", |at| at.boolean(false));
    let capped = Scores::from_fn("capped", |score, _| 2.0 * (score / 2.0).tanh());
    let biased = Scores::from_fn("biased", |score, at| {
        score + at.floats("bias").load([at.head(), at.query(), at.key()])
    });
    let bias: Vec<f32> = (0..67 * 201).map(|it| (it % 17) as f32 * 0.1 - 0.8).collect();
    let bias = HostTensor::floats("bias", &bias, &[4, 67, 201]).with_strides(&[0, 201, 1]);
    for dtype in [DType::F32, DType::BF16] {
        let problem = problem.clone().with_dtype(dtype);
        check(&problem.clone().with_mask(documents()), &[ids()]);
        check(&problem.clone().with_mask(dilated).with_scores(capped), &[]);
        check(&problem.clone().with_mask(nothing), &[]);
        check(&problem.clone().with_scores(biased.with_softcap(3.0)), std::slice::from_ref(&bias));
        let both = causal_documents();
        check(&problem.with_mask(both).with_scores(biased.with_sinks()), &[bias.clone(), ids()]);
    }
    // Few queries over many keys, which the CPU splits into chunks.
    let few = Problem::new(2, 4, 3, 16).with_key_length(3500).with_dtype(DType::F32);
    check(&few.with_mask(dilated), &[]);
}

const SIZES: [usize; 4] = [2, 4, 17, 40];

fn sized(dtype: DType) -> Problem {
    let [batch, heads, queries, keys] = SIZES;
    let problem = Problem::new(batch, heads, queries, 16).with_key_length(keys).with_kv_heads(2);
    problem.with_dtype(dtype)
}

/// Every ready-made rule, forward and backward.
#[test]
fn the_cpu_follows_ready_made_rules() {
    let cpu = CpuBackend::new();
    let masks = composition::masks().into_iter().map(|it| (Some(it), None));
    let scores = composition::scores().into_iter().map(|it| (None, Some(it)));
    for (mask, score) in masks.chain(scores) {
        let tensors = composition::tensors_of(mask.into_iter().chain(score), SIZES);
        let rule = Composition { mask, score, tensors };
        for dtype in [DType::F32, DType::BF16] {
            check(&rule.over(sized(dtype)), &rule.tensors);
            check_gradients(&cpu, &rule.over(sized(dtype)), &rule.tensors);
        }
    }
}

#[test]
fn the_cpu_follows_random_compositions() {
    let cpu = CpuBackend::new();
    for seed in 0..60 {
        let rules = Composition::of(seed, SIZES);
        let dtype = if seed % 2 == 0 { DType::F32 } else { DType::BF16 };
        check(&rules.over(sized(dtype)), &rules.tensors);
        if seed % 3 == 0 {
            check_gradients(&cpu, &rules.over(sized(dtype)), &rules.tensors);
        }
    }
}

/// Returns which part of the long tests this process runs, and of how many, from a variable such as
/// `3/16`: a process compiles kernels one after the other, several processes compile side by side.
fn part() -> (u64, u64) {
    let Ok(text) = std::env::var("FLASHCORE_TEST_PART") else { return (0, 1) };
    let numbers = text.split_once('/').and_then(|(part, of)| {
        Some((part.parse::<u64>().ok()?, of.parse::<u64>().ok()?)).filter(|(part, of)| part < of)
    });
    numbers.unwrap_or_else(|| panic!("FLASHCORE_TEST_PART is {text}, expected such as 3/16"))
}

/// A thousand functions on a GPU. Each is compiled, which takes half a second;
/// `FLASHCORE_TEST_PART` distributes them over processes.
#[test]
#[ignore = "a quarter of an hour on a GPU"]
fn a_gpu_follows_a_thousand_compositions() {
    let Some(gpu) = device::gpu() else { return };
    let gpu = GpuBackend::new(gpu.into());
    let (part, parts) = part();
    for seed in (0..1000).filter(|seed| seed % parts == part) {
        let rules = Composition::of(seed, SIZES);
        let problem = rules.over(sized([DType::BF16, DType::F16][seed as usize % 2]));
        check_on(&gpu, &problem, &rules.tensors);
        if seed % 4 == 0 {
            check_gradients(&gpu, &problem, &rules.tensors);
        }
    }
}

/// Every ready-made rule in every family that serves it on this GPU.
#[test]
fn a_gpu_follows_ready_made_rules() {
    let Some(gpu) = device::gpu() else { return };
    let gpu = GpuBackend::new(gpu.into());
    let masks = composition::masks().into_iter().map(|it| (Some(it), None));
    let scores = composition::scores().into_iter().map(|it| (None, Some(it)));
    for (mask, score) in masks.chain(scores) {
        let tensors = composition::tensors_of(mask.into_iter().chain(score), SIZES);
        let rule = Composition { mask, score, tensors };
        let problem = rule.over(sized(DType::BF16));
        check_on(&gpu, &problem, &rule.tensors);
        check_gradients(&gpu, &problem, &rule.tensors);
    }
}

/// Functions of the distance alone run as windows by name, in every family.
#[test]
fn windows_in_functions_run_by_name() {
    let configuration = |mask: Mask| {
        let problem = Problem::new(4, 16, 4096, 128).with_dtype(DType::BF16).with_mask(mask);
        Plan::on_chip(&Chip::H200, &problem, &Preference::default()).unwrap().chosen.configuration
    };
    let causal = Mask::from_fn("causal", |at| at.query().ge(at.key()));
    assert_eq!(configuration(causal), configuration(Mask::CAUSAL));
    let window = Mask::from_fn("window", |at| {
        let before = at.query() - at.key();
        before.ge(0) & before.lt(1024)
    });
    assert_eq!(configuration(window), configuration(Mask::window(Some(1023), Some(0))));
    // Other mask functions get the tiles of configurations with a mask.
    let prefix = Mask::from_fn("prefix", |at| at.key().lt(512) | at.key().le(at.query()));
    assert!(configuration(prefix).unwrap().ends_with("128x128_s2q2_turns"));
    let packed = Mask::from_fn("packed", |at| {
        let ids = at.integers("ids");
        at.query().ge(at.key()) & ids.load([at.query()]).eq(ids.load([at.key()]))
    });
    assert!(configuration(packed).unwrap().contains("_causal_packed_"));
}

/// A function that is equivalent to a mask by name gives the same bits.
#[test]
fn causal_as_a_function_is_causal() {
    let problem = Problem::new(1, 2, 70, 32).with_key_length(90).with_dtype(DType::F32);
    let tensors = InputTensors::random(&problem, 1).unwrap();
    let by_name = run(&problem.clone().with_mask(Mask::CAUSAL), tensors.inputs());
    let function = Mask::from_fn("causal", |at| at.key().le(at.position()));
    let by_function = run(&problem.with_mask(function), tensors.inputs());
    assert_eq!(by_name.lse, by_function.lse);
    assert_eq!(by_name.output.to_f32(), by_function.output.to_f32());
}

#[test]
fn a_key_that_a_function_hides_may_be_anything() {
    let odd = Mask::from_fn("even", |at| (at.key() % 2).eq(0));
    let problem = Problem::new(1, 1, 5, 8).with_key_length(6).with_dtype(DType::F32);
    let problem = problem.with_mask(odd);
    let tensors = InputTensors::random(&problem, 1).unwrap();
    let poisoned = |tensor: &Tensor| {
        Tensor::from_fn(DType::F32, tensor.shape(), |[batch, key, head, dim]| match key % 2 {
            0 => tensor.head(batch, head).row(key)[dim],
            1 if key == 3 => f32::INFINITY,
            _ => f32::NAN,
        })
    };
    let [key, value] = [&tensors.key, &tensors.value].map(|tensor| poisoned(tensor).unwrap());
    let good = run(&problem, tensors.inputs());
    let found = run(&problem, Inputs { key: key.view(), value: value.view(), ..tensors.inputs() });
    assert_eq!(good.output.to_f32(), found.output.to_f32());
    assert_eq!(good.lse, found.lse);
}

/// Functions get the index of their sequence in a ragged batch.
#[test]
fn ragged_batches_follow_functions() {
    let problem = Problem::new(3, 2, 1, 16).with_dtype(DType::F32);
    let problem = problem.with_mask(causal_documents());
    let [queries, keys] = [vec![0, 20, 20, 65], vec![0, 60, 63, 108]];
    let ids =
        HostTensor::integers("ids", &(0..180).map(|it| it % 7 / 3).collect::<Vec<_>>(), &[3, 60]);
    let total = |starts: &[usize]| Shape::new(1, starts[3], 2, 16);
    let tensor = |shape, seed| Tensor::random(DType::F32, shape, seed).unwrap();
    let [query, key, value] =
        [tensor(total(&queries), 1), tensor(total(&keys), 2), tensor(total(&keys), 3)];
    let sequences =
        Sequences::new(problem, Placement::packed(queries), Placement::packed(keys)).unwrap();
    let captured = [ids];
    let inputs = Inputs::new(&query, &key, &value).with_captured(&captured);
    let (problem, inputs) = sequences.over(inputs).unwrap();
    let result = run(&problem, inputs);
    let rows = Rows::of(&sequences);
    let reference = reference::attention(&problem, inputs, &rows, None).unwrap();
    let baseline = reference::baseline(&problem, inputs, &rows, None).unwrap();
    let verdict = compare_sequences(&sequences, &result, &reference, &baseline).unwrap();
    assert!(verdict.passed, "{verdict}");
}

#[test]
fn tensors_of_functions_are_looked_at_first() {
    let problem = Problem::new(2, 2, 8, 8).with_dtype(DType::F32).with_mask(documents());
    let tensors = InputTensors::random(&problem, 1).unwrap();
    let refusal = |captured: &[HostTensor]| {
        let inputs = tensors.inputs().with_captured(captured);
        CpuBackend::new().run(&problem, inputs, &RunOptions::default()).unwrap_err().to_string()
    };
    assert_eq!(refusal(&[]), "tensor ids of a function is missing");
    assert_eq!(refusal(&[ids(), ids()]), "there are two tensors ids");
    let wrong = HostTensor::floats("ids", &[0.0; 4], &[2, 2]);
    assert_eq!(refusal(&[wrong]), "tensor ids is made of f32, expected i32");
    let other = HostTensor::floats("other", &[0.0; 4], &[4]);
    assert_eq!(refusal(&[ids(), other]), "no function loads from tensor other");
}

/// The planner says which family takes a function, and why the others do not.
#[test]
fn the_planner_knows_who_takes_functions() {
    let planned =
        |chip: &Chip, problem: &Problem| Plan::on_chip(chip, problem, &Preference::default());
    let problem = Problem::new(1, 8, 512, 64).with_dtype(DType::BF16).with_mask(documents());
    let kernel = |chip: &Chip, problem: &Problem| planned(chip, problem).unwrap().chosen.kernel;
    assert_eq!(kernel(&Chip::H200, &problem), "forward");
    assert_eq!(kernel(&Chip::typical(Target::SM_89), &problem), "mma");
    assert_eq!(kernel(&Chip::typical(Target::SM_75), &problem), "scalar");
    let few = Problem::new(1, 8, 1, 64).with_key_length(512).with_mask(documents());
    let plan = planned(&Chip::H200, &few).unwrap();
    assert_eq!(plan.chosen.kernel, "decode");
    let backward = problem.clone().backward();
    assert_eq!(kernel(&Chip::H200, &backward), "backward");
    assert_eq!(kernel(&Chip::typical(Target::SM_89), &backward), "backward-mma");
    let capped = Scores::from_fn("half", |score, _| score * 0.5).with_softcap(3.0);
    let plan = planned(&Chip::H200, &problem.with_scores(capped).backward()).unwrap();
    assert_eq!(plan.chosen.full_name(), "cpu/backward");
    assert!(plan.reason().contains("the function half has no gradients: cap in it"));
}
