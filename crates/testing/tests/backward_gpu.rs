//! Gradients on a GPU against the f64 reference, by the rule.

mod device;

use std::collections::HashSet;
use std::sync::Arc;

use cuda::Cache;
use device::{HALVES, Silent, hopper};
use flashcore::GpuBackend;
use flashcore::gpu::Gpu;
use flashcore::plan::{Arrangement, candidates};
use flashcore_testing::check::{Case, cases, run_gradients};

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
