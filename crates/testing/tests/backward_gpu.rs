//! Gradients on a GPU against the f64 reference, by the rule.

mod device;

use std::collections::HashSet;
use std::sync::Arc;

use cuda::Cache;
use device::{HALVES, Silent, hopper};
use flashcore::gpu::Gpu;
use flashcore::plan::{Arrangement, candidates};
use flashcore::{Error, GpuBackend, Pass};
use flashcore_testing::check::{Case, Contents, ExpectedGradients, GradientsOutcome, cases};
use rayon::prelude::*;

/// The reference of a case takes the CPU this many operations at most.
const OPERATIONS: f64 = 2e8;

/// Every thorough case that a kernel serves, but for the longest: odd lengths, more queries than keys
/// and fewer, rows that see nothing, grouped heads, windows, strides, outliers.
#[test]
fn thorough_cases() {
    if hopper().is_some() {
        check("backward");
    }
}

/// The same with mma.sync, which serves wider heads as well.
#[test]
fn thorough_cases_with_mma() {
    if hopper().is_some() {
        check("backward-mma");
    }
}

fn check(kernel: &str) {
    let folder = tempfile::tempdir().unwrap();
    let gpu = Gpu::with_cache(0, Cache::at(folder.path())).unwrap();
    let mut all: Vec<Case> = HALVES.into_iter().flat_map(cases::thorough).collect();
    all.retain(|case| case.problem.visible_flops() < OPERATIONS);
    compile_ahead(&gpu, &all, kernel);
    let backend = GpuBackend::new(Arc::new(gpu));
    let (mut served, mut complaints) = (0, Vec::new());
    for some in all.chunks(256) {
        // What should come out takes the CPU longer than the GPU takes for what does.
        let expected: Vec<_> = some.par_iter().map(ExpectedGradients::of).collect();
        for (case, expected) in some.iter().zip(expected) {
            match expected.and_then(|expected| expected.check_alone(&backend, kernel)) {
                Ok(outcome) if outcome.passed || nearly(case, &outcome) => served += 1,
                Ok(outcome) => complaints.push(format!("{case}: {outcome}")),
                Err(Error::Backend(_)) => {}
                Err(error) => complaints.push(format!("{case}: {error}")),
            }
        }
        println!("{served} of {} so far, {} wrong", all.len(), complaints.len());
    }
    let shown: Vec<String> = complaints.iter().take(20).cloned().collect();
    assert!(complaints.is_empty(), "{} wrong:\n{}", complaints.len(), shown.join("\n"));
    assert!(served > 1000, "only {served} cases were served");
}

/// Where one huge key has all the weight of the last row, that row's gradient is the product of the
/// key and one number, which two roundings of the saved output leave of numbers that cancel. What the
/// plain algorithm is wrong by is one such number too, and may be small by chance: four times its
/// error are allowed here.
fn nearly(case: &Case, outcome: &GradientsOutcome) -> bool {
    let comparisons = &outcome.verdict.comparisons;
    case.contents == Contents::LateHugeKey
        && outcome.repeats
        && comparisons.iter().all(|(_, it)| it.misplaced == 0 && it.max_error <= 2.0 * it.tolerance)
}

/// Compiles what the cases need on all cores: the best forward kernel, and this one.
fn compile_ahead(gpu: &Gpu, cases: &[Case], backward: &str) {
    let mut kernels = HashSet::new();
    for case in cases {
        for problem in [case.problem.clone(), case.problem.clone().backward()] {
            let Ok(arrangement) = Arrangement::contiguous(&problem) else { continue };
            let found = candidates(&gpu.chip(), &problem, &arrangement).into_iter();
            let mut found =
                found.filter(|it| it.kernel == backward || problem.pass == Pass::Forward);
            let chosen = found.find_map(|candidate| candidate.choice);
            kernels.extend(chosen.into_iter().flat_map(|it| it.launches).map(|it| it.kernel));
        }
    }
    let kernels: Vec<_> = kernels.into_iter().collect();
    println!("{} kernels", kernels.len());
    gpu.warm(&kernels, &Silent).unwrap();
}
