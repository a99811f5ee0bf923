//! Gradients on a GPU against the f64 reference, by the rule.

mod device;

use std::collections::HashSet;
use std::sync::Arc;

use cuda::Cache;
use device::{HALVES, Silent, hopper};
use flashcore::gpu::Gpu;
use flashcore::plan::{Arrangement, candidates};
use flashcore::{
    Backend, Backward, DType, GpuBackend, InputTensors, Mask, Problem, RunOptions, Tensor,
};
use flashcore_testing::check::{Case, cases, run_gradients};
use flashcore_testing::reference;

/// Every thorough case that the kernel serves: odd lengths, more queries than keys and fewer, rows
/// that see nothing, groups of 1 to 16 heads, windows, chunks, score rules, strides, outliers.
#[test]
fn thorough_cases() {
    if hopper().is_some() {
        check("backward");
    }
}

/// The same with mma.sync.
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
    compile_ahead(&gpu, &all, kernel);
    let backend = GpuBackend::new(Arc::new(gpu));
    let (mut served, mut complaints) = (0, Vec::new());
    for some in all.chunks(256) {
        for checked in run_gradients(&[&backend], Some(kernel), some, &Silent) {
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

/// Compiles what the cases need on all cores: the best forward kernel, and this one.
fn compile_ahead(gpu: &Gpu, cases: &[Case], backward: &str) {
    let mut kernels = HashSet::new();
    for case in cases {
        let mut forward = case.problem.clone();
        forward.pass = flashcore::Pass::Forward;
        for problem in [forward, case.problem.clone()] {
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
    gpu.warm(&kernels, &Silent).unwrap();
}
