//! Prefill on a GPU: what only a GPU can show. Each test passes over itself where there is none.

mod device;

use flashcore::check::{self, CheckedSequences, cases};
use flashcore::{Backend, DType, GpuBackend, Progress};

use device::gpu;

struct Silent;

impl Progress for Silent {
    fn begin(&self, _: u64) {}
    fn advance(&self, _: u64) {}
}

#[test]
fn prefill_is_right_about_random_sequences() {
    let Some(gpu) = gpu() else { return };
    let backend = GpuBackend::new(gpu.into());
    let backends: [&dyn Backend; 1] = [&backend];
    let mut count = 0;
    let mut complaints = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for checked in check::run_sequences(&backends, Some("prefill"), dtype, 2_500, &Silent) {
            let CheckedSequences { case, outcome, .. } = checked;
            count += 1;
            match outcome {
                Ok(outcome) if outcome.passed => {}
                Ok(outcome) => complaints.push(format!("{case}: {outcome}")),
                Err(error) => complaints.push(format!("{case}: {error}")),
            }
        }
    }
    println!("{count} cases");
    let wrong = complaints.len();
    assert!(wrong == 0, "{wrong} of {count} failed:\n{}", complaints[..wrong.min(40)].join("\n"));
    assert!(count >= 3_000, "{count}");
}

#[test]
fn prefill_is_right_about_plain_problems() {
    let Some(gpu) = gpu() else { return };
    let backend = GpuBackend::new(gpu.into());
    let backends: [&dyn Backend; 1] = [&backend];
    for dtype in [DType::F16, DType::BF16] {
        let cases = cases::standard(dtype);
        let checked = check::run_all(&backends, Some("prefill"), &cases, &Silent);
        assert!(checked.len() > 80, "{}", checked.len());
        for it in checked {
            let outcome = it.outcome.unwrap_or_else(|error| panic!("{}: {error}", it.case));
            assert!(outcome.passed, "{}: {outcome}", it.case);
        }
    }
}
