//! Gradients on a GPU against the f64 reference, by the rule.

mod device;

use std::cell::RefCell;
use std::collections::HashSet;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cuda::Cache;
use device::{HALVES, Silent, hopper};
use flashcore::gpu::Gpu;
use flashcore::plan::{Arrangement, candidates};
use flashcore::{
    Backend, Backward, DType, Error, GpuBackend, InputTensors, Mask, Problem, RunOptions, Tensor,
};
use flashcore_testing::check::{Case, ExpectedGradients, cases, run_gradients};
use flashcore_testing::reference;

/// Every thorough case that the kernel serves: odd lengths, more queries than keys and fewer, rows
/// that see nothing, groups of 1 to 16 heads, windows, chunks, score rules, strides, outliers.
#[test]
fn thorough_cases() {
    if hopper().is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let gpu = Gpu::with_cache(0, Cache::at(folder.path())).unwrap();
    let all: Vec<Case> = HALVES.into_iter().flat_map(cases::thorough_gradients).collect();
    compile_ahead(&gpu, &all);
    let backend = GpuBackend::new(Arc::new(gpu));
    let (mut served, mut complaints) = (0, Vec::new());
    for some in all.chunks(256) {
        for checked in run_gradients(&[&backend], None, some, &Silent) {
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

/// Some of the thorough cases in the deterministic mode: right, and twice the same.
#[test]
fn deterministic_cases() {
    let Some(gpu) = hopper() else { return };
    let backend = GpuBackend::new(Arc::new(gpu));
    let all: Vec<Case> = HALVES.into_iter().flat_map(cases::thorough_gradients).collect();
    let options = RunOptions { kernel: Some("backward".to_owned()), ..RunOptions::default() };
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

/// A thousand runs give the same bits while another stream keeps the GPU busy.
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
                repeats(&backend, &problem.with_dtype(DType::BF16), 1000);
            }
        }));
        done.store(true, Ordering::Relaxed);
        result.unwrap();
    });
}

fn repeats(backend: &GpuBackend, problem: &Problem, times: usize) {
    let tensors = InputTensors::random(problem, 0).unwrap();
    let gradient = Tensor::random(problem.dtype(), problem.output_shape(), 1).unwrap();
    let forward = backend.run(problem, tensors.inputs(), &RunOptions::default()).unwrap();
    let backward = Backward::new(tensors.inputs(), &forward, &gradient);
    let problem = problem.clone().deterministic();
    let run = || {
        let found = backend.run_backward(&problem, backward, &RunOptions::default()).unwrap();
        [found.query, found.key, found.value]
    };
    let first = run();
    for time in 1..times {
        for (name, (first, again)) in ["query", "key", "value"].iter().zip(first.iter().zip(run()))
        {
            assert!(first.bytes() == again.bytes(), "{problem}: {name}, run {time}");
        }
    }
}

/// The sink of a row that sees no key has no gradient, whatever the tensors hold there.
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
                // These queries stand more than three before the first key.
                let seen = query >= 200 - 3;
                if seen { random.head(batch, head).row(query)[element] } else { hidden }
            })
            .unwrap()
        };
        let sinks = |hidden: f32| {
            let (output, lse) = reference::saved(&problem, inputs).unwrap();
            let (output, lse, output_gradient) = (&output, &lse[..], &gradient(hidden));
            let backward = Backward { inputs, output, lse, output_gradient };
            backend.run_backward(&problem, backward, &RunOptions::default()).unwrap().sinks.unwrap()
        };
        let expected = sinks(0.0);
        assert!(expected.iter().all(|sink| sink.is_finite() && *sink != 0.0), "{expected:?}");
        assert_eq!(sinks(f32::NAN), expected);
    }
}

/// Compiles what the cases need on all cores.
fn compile_ahead(gpu: &Gpu, cases: &[Case]) {
    let mut kernels = HashSet::new();
    for case in cases {
        let mut forward = case.problem.clone();
        forward.pass = flashcore::Pass::Forward;
        for problem in [forward, case.problem.clone()] {
            let Ok(arrangement) = Arrangement::contiguous(&problem) else { continue };
            let found = candidates(&gpu.chip(), &problem, &arrangement);
            let chosen = found.into_iter().find_map(|candidate| candidate.choice);
            kernels.extend(chosen.into_iter().flat_map(|it| it.launches).map(|it| it.kernel));
        }
    }
    let kernels: Vec<_> = kernels.into_iter().collect();
    println!("{} kernels", kernels.len());
    gpu.warm(&kernels, &Silent).unwrap();
}
