//! The GPU that a test runs on, if there is one, and helpers of tests on a GPU.
#![allow(dead_code)] // no test needs all of it

use cuda::{Cache, Error};
use flashcore::gpu::{Gpu, GpuError};
use flashcore::serving::Sequences;
use flashcore::{Backend, DType, GpuBackend, Inputs, Output, Report, Tensor};
use flashcore_testing::check::{self, Checked, cases};
use flashcore_testing::compare_sequences;
use flashcore_testing::reference::{self, Rows};
use ptx::Target;

/// Returns the GPU, or prints why there is none. A GPU that exists but fails is a failure of the
/// test.
pub(crate) fn gpu() -> Option<Gpu> {
    match Gpu::with_cache(0, Cache::disabled()) {
        Ok(gpu) => Some(gpu),
        Err(GpuError::Driver(
            error @ (Error::NoDriver { .. } | Error::NoDevice | Error::DriverTooOld { .. }),
        )) => {
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("there is a GPU, and it does not work: {error}"),
    }
}

/// Returns the GPU if it has `wgmma`.
pub(crate) fn hopper() -> Option<Gpu> {
    let gpu = gpu()?;
    let fits = gpu.target() == Target::SM_90A;
    if !fits {
        eprintln!("skipped: {} has no wgmma", gpu.info().name);
    }
    fits.then_some(gpu)
}

/// The 16-bit types that the tensor cores multiply.
pub(crate) const HALVES: [DType; 2] = [DType::F16, DType::BF16];

/// Checks that all cases pass, and that there are at least `least` of them.
pub(crate) fn all_pass(checked: impl IntoIterator<Item = Checked>, least: usize) {
    let mut count = 0;
    let mut complaints = Vec::new();
    for Checked { case, outcome, .. } in checked {
        count += 1;
        match outcome {
            Ok(outcome) if outcome.passed => {}
            Ok(outcome) => complaints.push(format!("{case}: {outcome}")),
            Err(error) => complaints.push(format!("{case}: {error}")),
        }
    }
    println!("{count} cases");
    let wrong = complaints.len();
    assert!(wrong == 0, "{wrong} of {count} failed:\n{}", complaints.join("\n"));
    assert!(count >= least, "{count}");
}

/// Checks that a kernel is right about the standard problems.
pub(crate) fn is_right_about_plain_problems(gpu: Gpu, kernel: &str) {
    let backend = GpuBackend::new(gpu.into());
    let backends: [&dyn Backend; 1] = [&backend];
    for dtype in HALVES {
        let cases = cases::standard(dtype);
        let checked = check::run_all(&backends, Some(kernel), &cases, &());
        assert!(checked.len() > 80, "{}", checked.len());
        for it in checked {
            let outcome = it.outcome.unwrap_or_else(|error| panic!("{}: {error}", it.case));
            assert!(outcome.passed, "{}: {outcome}", it.case);
        }
    }
}

/// Checks the results of a launch over sequences that a test made itself.
pub(crate) fn is_right(sequences: &Sequences, inputs: Inputs<'_>, output: Tensor, lse: Vec<f32>) {
    let (problem, inputs) = sequences.over(inputs).unwrap();
    let rows = Rows::of(sequences);
    let reference = reference::attention(&problem, inputs, &rows, None).unwrap();
    let baseline = reference::baseline(&problem, inputs, &rows, None).unwrap();
    let report = Report {
        backend: "gpu",
        kernel: "",
        configuration: None,
        reason: String::new(),
        kernel_time: Default::default(),
        first_result_time: Default::default(),
        total_time: Default::default(),
        notes: Vec::new(),
    };
    let result = Output { output, lse, report };
    let verdict = compare_sequences(sequences, &result, &reference, &baseline).unwrap();
    let lengths = (sequences.queries().ends(), sequences.keys().ends());
    assert!(verdict.passed, "{lengths:?}: {verdict}");
}
