//! Gradients on a GPU against the f64 reference, judged by the library's accuracy rule. Each test
//! skips itself where there is no GPU.

mod device;

use std::cell::RefCell;
use std::collections::HashSet;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cuda::{Buffer, Cache};
use device::{HALVES, hopper};
use flashcore::gpu::{
    AttentionPlan, DeviceTensor, Gpu, GpuError, Gradients as DeviceGradients, Tensors,
};
use flashcore::plan::{Arrangement, candidates};
use flashcore::serving::{Placement, Sequences};
use flashcore::{
    Backend, Backward, DType, Error, GpuBackend, InputTensors, Inputs, Layout, Mask, Preference,
    Problem, RunOptions, Storage, Tensor,
};
use flashcore_testing::check::{Case, ExpectedGradients, RaggedGradients, cases, run_gradients};
use flashcore_testing::compare_gradients;
use flashcore_testing::reference::{self, Heads};
use flashcore_testing::verdict::GradientsToJudge;
use rayon::prelude::*;

/// Every thorough case that the Hopper kernel serves: odd lengths, more queries than keys and
/// fewer, rows that see no key, groups of 1 to 16 heads, windows, chunks, score rules, strides,
/// outliers.
#[test]
fn thorough_cases() {
    if hopper().is_some() {
        check("backward");
    }
}

/// Every thorough case that the kernel with `mma.sync` serves.
#[test]
fn thorough_cases_with_mma() {
    if hopper().is_some() {
        check("backward-mma");
    }
}

fn check(kernel: &str) {
    let folder = tempfile::tempdir().unwrap();
    let gpu = Gpu::with_cache(0, Cache::at(folder.path())).unwrap();
    let all: Vec<Case> = HALVES.into_iter().flat_map(cases::thorough_gradients).collect();
    compile_ahead(&gpu, all.iter().map(|case| &case.problem), kernel);
    let backend = GpuBackend::new(Arc::new(gpu));
    let (mut served, mut complaints) = (0, Vec::new());
    for some in all.chunks(256) {
        for checked in run_gradients(&[&backend], Some(kernel), some, &()) {
            let case = checked.case;
            match checked.outcome {
                Ok(outcome) if outcome.passed => served += 1,
                Ok(outcome) => complaints.push(format!("{case}: {outcome}")),
                Err(error) => complaints.push(format!("{case}: {error}")),
            }
        }
        println!("{served} of {} so far, {} wrong", all.len(), complaints.len());
    }
    let shown: Vec<String> = complaints.iter().take(20).cloned().collect();
    assert!(complaints.is_empty(), "{} wrong:\n{}", complaints.len(), shown.join("\n"));
    assert!(served >= 2000, "only {served} cases were served");
}

/// Some of the thorough cases in the deterministic mode: results are right, and two runs agree bit
/// for bit.
#[test]
fn deterministic_cases() {
    in_one_order("backward");
}

/// Some of the thorough cases in the deterministic mode of the kernel with `mma.sync`.
#[test]
fn deterministic_cases_with_mma() {
    in_one_order("backward-mma");
}

fn in_one_order(kernel: &str) {
    let Some(gpu) = hopper() else { return };
    let backend = GpuBackend::new(Arc::new(gpu));
    let all: Vec<Case> = HALVES.into_iter().flat_map(cases::thorough_gradients).collect();
    let options = RunOptions { kernel: Some(kernel.to_owned()), ..RunOptions::default() };
    let mut served = 0;
    for case in all.iter().step_by(11) {
        let problem = case.problem.clone().deterministic();
        let tensors = case.tensors().unwrap();
        let expected =
            ExpectedGradients::random(&case.problem, tensors.inputs(), case.seed).unwrap();
        let queries = RefCell::new(Vec::new());
        let outcome = expected.judge(&backend, |backward| {
            let found = backend.run_backward(&problem, backward, &options)?;
            queries.borrow_mut().push(found.query.bytes().to_vec());
            Ok(found)
        });
        match outcome {
            Ok(outcome) => {
                let queries = queries.into_inner();
                assert!(outcome.passed && queries[0] == queries[1], "{case}: {outcome}");
                served += 1;
            }
            Err(Error::Backend(_)) => {}
            Err(error) => panic!("{case}: {error}"),
        }
    }
    println!("{served} cases");
    assert!(served >= 100, "only {served} cases were served");
}

/// A thousand runs of the Hopper kernel, and some of the kernel with `mma.sync`, give the same bits
/// while another stream keeps the GPU busy.
#[test]
fn deterministic_gradients_repeat_under_load() {
    let Some(gpu) = hopper() else { return };
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let busy = Gpu::with_cache(0, Cache::disabled()).unwrap();
            let backend = GpuBackend::new(Arc::new(busy));
            let problem = Problem::new(1, 5, 1000, 64).with_dtype(DType::BF16);
            let tensors = InputTensors::random(&problem, 0).unwrap();
            while !done.load(Ordering::Relaxed) {
                backend.run(&problem, tensors.inputs(), &RunOptions::default()).unwrap();
            }
        });
        let result = std::panic::catch_unwind(AssertUnwindSafe(|| {
            let backend = GpuBackend::new(Arc::new(gpu));
            for problem in [
                Problem::new(2, 8, 2048, 128).with_mask(Mask::CAUSAL),
                Problem::new(1, 16, 1500, 64).with_kv_heads(4),
                Problem::new(1, 4, 1500, 256).with_mask(Mask::CAUSAL),
                Problem::new(1, 8, 2000, 96).with_mask(Mask::window(Some(300), Some(0))),
            ] {
                let problem = problem.with_dtype(DType::BF16);
                repeats(&backend, &problem, "backward", 1000);
                repeats(&backend, &problem, "backward-mma", 200);
            }
        }));
        done.store(true, Ordering::Relaxed);
        result.unwrap();
    });
}

fn repeats(backend: &GpuBackend, problem: &Problem, kernel: &str, times: usize) {
    let tensors = InputTensors::random(problem, 0).unwrap();
    let gradient = Tensor::random(problem.dtype(), problem.output_shape(), 1).unwrap();
    let forward = backend.run(problem, tensors.inputs(), &RunOptions::default()).unwrap();
    let backward = Backward::new(tensors.inputs(), &forward, &gradient);
    let problem = problem.clone().deterministic();
    let options = RunOptions { kernel: Some(kernel.to_owned()), ..RunOptions::default() };
    let run = || {
        let found = backend.run_backward(&problem, backward, &options).unwrap();
        [found.query, found.key, found.value]
    };
    let first = run();
    for time in 1..times {
        for (name, (first, again)) in ["query", "key", "value"].iter().zip(first.iter().zip(run()))
        {
            assert!(first.bytes() == again.bytes(), "{problem}, {kernel}: {name}, run {time}");
        }
    }
}

/// A row that sees no key contributes nothing to the gradient of its sink, whatever the tensors
/// hold there.
#[test]
fn sinks_of_rows_without_keys() {
    let Some(gpu) = hopper() else { return };
    let backend = GpuBackend::new(Arc::new(gpu));
    for mask in [Mask::CAUSAL, Mask::window(Some(40), Some(3)).with_chunk(64)] {
        let problem = Problem::new(2, 4, 300, 64).with_kv_heads(2).with_key_length(100);
        let problem = problem.with_dtype(DType::BF16).with_mask(mask).with_sinks();
        let tensors = InputTensors::random(&problem, 0).unwrap();
        let inputs = tensors.inputs();
        let gradient = |hidden: f32| {
            let random = Tensor::random(DType::BF16, problem.output_shape(), 1).unwrap();
            Tensor::from_fn(DType::BF16, random.shape(), |[batch, query, head, element]| {
                // Other queries are more than three positions before the first key.
                let seen = query >= 200 - 3;
                if seen { random.head(batch, head).row(query)[element] } else { hidden }
            })
            .unwrap()
        };
        let sinks = |hidden: f32, kernel: &str| {
            let (output, lse) = reference::saved(&problem, inputs).unwrap();
            let gradient = gradient(hidden);
            let (output, output_gradient) = (output.view(), gradient.view());
            let backward =
                Backward { inputs, output, lse: &lse, output_gradient, lse_gradient: None };
            let options = RunOptions { kernel: Some(kernel.to_owned()), ..RunOptions::default() };
            backend.run_backward(&problem, backward, &options).unwrap().sinks.unwrap()
        };
        for kernel in ["backward", "backward-mma"] {
            let expected = sinks(0.0, kernel);
            assert!(expected.iter().all(|sink| sink.is_finite() && *sink != 0.0), "{expected:?}");
            assert_eq!(sinks(f32::NAN, kernel), expected);
        }
    }
}

/// Packed and padded sequences of random lengths, each batch determined by its seed.
#[test]
fn random_ragged_batches() {
    if hopper().is_some() {
        check_ragged("backward");
    }
}

/// Random ragged batches on the kernel with `mma.sync`.
#[test]
fn random_ragged_batches_with_mma() {
    if hopper().is_some() {
        check_ragged("backward-mma");
    }
}

fn check_ragged(kernel: &str) {
    let folder = tempfile::tempdir().unwrap();
    let gpu = Gpu::with_cache(0, Cache::at(folder.path())).unwrap();
    let seeds = HALVES.into_iter().flat_map(|dtype| (0..400).map(move |seed| (dtype, seed)));
    let all: Vec<RaggedGradients> =
        seeds.map(|(dtype, seed)| RaggedGradients::random(dtype, seed).unwrap()).collect();
    let problems: Vec<Problem> = all.iter().map(|case| case.problem().unwrap()).collect();
    compile_ahead(&gpu, problems.iter(), kernel);
    let backend = GpuBackend::new(Arc::new(gpu));
    let check = |case: &RaggedGradients| match case.check(&backend, kernel) {
        Ok(outcome) if outcome.passed => Some(None),
        Ok(outcome) => Some(Some(format!("{case}: {outcome}"))),
        Err(Error::Backend(_)) => None,
        Err(error) => Some(Some(format!("{case}: {error}"))),
    };
    let found: Vec<Option<String>> = all.par_iter().filter_map(check).collect();
    let complaints: Vec<String> = found.iter().flatten().cloned().collect();
    println!("{} of {} were served", found.len(), all.len());
    let shown = complaints[..complaints.len().min(20)].join("\n");
    assert!(complaints.is_empty(), "{} wrong:\n{shown}", complaints.len());
    assert!(found.len() > 600, "only {} batches were served", found.len());
}

/// Lengths are read on the device, so that a captured graph is right for whatever they are when it
/// runs.
#[test]
fn a_graph_is_right_for_other_lengths() {
    const ROWS: usize = 900;
    let Some(gpu) = hopper() else { return };
    let stream = gpu.stream();
    let plain = Problem::new(5, 4, 400, 64).with_kv_heads(2).with_dtype(DType::BF16);
    let plain = plain.with_mask(Mask::CAUSAL);
    let packed = Storage::Packed(ROWS);
    let problem = plain.clone().with_storage(packed, packed).backward();
    let random = |shape, seed| Tensor::random(DType::BF16, shape, seed).unwrap();
    let given = [
        random(problem.query_shape(), 1),
        random(problem.key_shape(), 2),
        random(problem.value_shape(), 3),
        random(problem.output_shape(), 4),
    ];
    let upload = |tensor: &Tensor| Buffer::from_slice(stream, tensor.bytes()).unwrap();
    let [query, key, value, gradient] = given.each_ref().map(upload);
    let room = |like: &Buffer| Buffer::new(gpu.device(), like.bytes()).unwrap();
    let (output, lse) = (room(&query), Buffer::new(gpu.device(), 16 * ROWS as u64).unwrap());
    let found = [&query, &key, &value].map(room);
    let starts = [(); 2].map(|()| Buffer::from_slice(stream, &[0u32; 6]).unwrap());
    let addresses = [&query, &key, &value, &output].map(Buffer::address);
    let mut tensors = Tensors::contiguous(&problem, addresses, Some(lse.address())).unwrap();
    let at = |buffer: &Buffer, like: DeviceTensor| DeviceTensor {
        address: buffer.address(),
        strides: like.strides,
    };
    tensors.gradients = Some(DeviceGradients {
        output: at(&gradient, tensors.output),
        query: at(&found[0], tensors.query),
        key: at(&found[1], tensors.key),
        value: at(&found[2], tensors.value),
        sinks: None,
        lse: None,
    });
    (tensors.query_starts, tensors.key_starts) =
        (Some(starts[0].address()), Some(starts[1].address()));
    let arrangement = tensors.arrangement();
    let plan = AttentionPlan::new(&gpu, &problem, &arrangement, &Preference::default()).unwrap();
    let graph = stream.capture::<GpuError>(|stream| plan.launch(stream, &tensors)).unwrap();
    let mut graph = graph.instantiate().unwrap();
    for step in 0..40usize {
        let queries = [step * 5, 1, 400 - step, step % 3, 70 + step];
        let keys = [step * 5, 100, 400 - step, 0, 100 + step];
        let starts_of = |lengths: [usize; 5]| -> Vec<usize> {
            (0..=5).map(|sequence| lengths[..sequence].iter().sum()).collect()
        };
        let lists = [queries, keys].map(starts_of);
        for (list, buffer) in lists.iter().zip(&starts) {
            let words: Vec<u32> = list.iter().map(|start| *start as u32).collect();
            stream.upload(&words, buffer.all()).unwrap();
        }
        let [queries, keys] = lists.map(Placement::packed);
        let sequences = Sequences::new(plain.clone(), queries, keys).unwrap();
        let inputs = Inputs::new(&given[0], &given[1], &given[2]);
        let (plain, inputs) = sequences.over(inputs).unwrap();
        let saved = reference::saved(&plain, inputs).unwrap();
        stream.upload(saved.0.bytes(), output.all()).unwrap();
        stream.upload(&saved.1, lse.all()).unwrap();
        for buffer in &found {
            stream.fill(buffer.all(), 0).unwrap();
        }
        graph.launch(stream).unwrap();
        let results = [0, 1, 2].map(|index: usize| {
            let bytes: Vec<u8> = stream.download_vec(found[index].all()).unwrap();
            let layout = Layout::contiguous(given[index].shape()).unwrap();
            Tensor::from_bytes(DType::BF16, layout, &bytes).unwrap()
        });
        let [query, key, value] = results.each_ref().map(Some);
        let judged = GradientsToJudge { query, key, value, sinks: None, delta: None };
        let heads = Heads::all(&plain);
        let exact = reference::gradients(&plain, inputs, &given[3], &heads, None).unwrap();
        let (output, lse) = (saved.0.view(), &saved.1[..]);
        let backward =
            Backward { inputs, output, lse, output_gradient: given[3].view(), lse_gradient: None };
        let baseline = reference::gradients_baseline(&plain, backward, &heads, None).unwrap();
        let verdict = compare_gradients(&plain, inputs, judged, &exact, &baseline).unwrap();
        assert!(verdict.passed, "step {step}: {verdict}");
    }
}

/// Compiles the kernels of the problems on all cores: the best forward kernel and the backward
/// kernel `backward`.
fn compile_ahead<'a>(gpu: &Gpu, problems: impl Iterator<Item = &'a Problem>, backward: &str) {
    let mut kernels = HashSet::new();
    for problem in problems {
        for problem in [problem.clone().forward(), problem.clone()] {
            let Ok(arrangement) = Arrangement::contiguous(&problem) else { continue };
            let forward = problem.pass == flashcore::Pass::Forward;
            let found = candidates(&gpu.chip(), &problem, &arrangement).into_iter();
            let mut found = found.filter(|it| forward || it.kernel == backward);
            let chosen = found.find_map(|candidate| candidate.choice);
            kernels.extend(chosen.into_iter().flat_map(|it| it.launches).map(|it| it.kernel));
        }
    }
    let kernels: Vec<_> = kernels.into_iter().collect();
    println!("{} kernels", kernels.len());
    gpu.warm(&kernels, &()).unwrap();
}
