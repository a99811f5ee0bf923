//! Gradients on a GPU against the f64 reference, by the rule.

mod device;

use std::sync::Arc;

use device::{HALVES, hopper};
use flashcore::{Backend, Error, GpuBackend};
use flashcore_testing::check::{ExpectedGradients, cases};
use rayon::prelude::*;

/// Every thorough case that the kernel serves: odd lengths, more queries than keys and fewer, rows
/// that see nothing, grouped heads, windows, strides, outliers.
#[test]
fn thorough_cases() {
    let Some(gpu) = hopper() else { return };
    let backend = GpuBackend::new(Arc::new(gpu));
    let (mut served, mut complaints) = (0, Vec::new());
    for dtype in HALVES {
        let all = cases::thorough(dtype);
        for some in all.chunks(64) {
            // What should come out takes the CPU longer than the GPU takes for what does.
            let expected: Vec<_> = some.par_iter().map(ExpectedGradients::of).collect();
            for (case, expected) in some.iter().zip(expected) {
                match expected.and_then(|expected| expected.check(&backend, "backward")) {
                    Ok(outcome) if outcome.passed => served += 1,
                    Ok(outcome) => complaints.push(format!("{case}: {outcome}")),
                    Err(Error::Backend(_)) => {}
                    Err(error) => complaints.push(format!("{case}: {error}")),
                }
            }
        }
    }
    println!("{served} cases on {}", backend.describe());
    let shown: Vec<String> = complaints.iter().take(20).cloned().collect();
    assert!(complaints.is_empty(), "{} of {served}:\n{}", complaints.len(), shown.join("\n"));
    assert!(served > 1500, "only {served} cases were served");
}
