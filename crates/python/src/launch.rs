//! Running a checked call that does not come through a Python function but from a program compiled
//! by XLA or from PyTorch's dispatcher.

use cuda::Stream;
use flashcore::{Cancellation, Problem};
use pyo3::PyResult;

use crate::call::{CALLER, warn_if_slow};
use crate::gradient::Backward;
use crate::info::{Last, remember};
use crate::request::Request;
use crate::view::{Place, View};
use crate::{cpu, gpu};

/// Runs attention; log-sum-exps are written to `sums` if it is given. On a device, the work goes to
/// the stream that `stream` returns for the device's ordinal.
pub(crate) fn attend(
    request: &Request,
    problem: &Problem,
    output: &View,
    sums: Option<u64>,
    stream: impl FnOnce(u32) -> PyResult<u64>,
) -> PyResult<()> {
    match request.given.place {
        _ if output.form.sizes.contains(&0) => {}
        Place::Cuda(ordinal) => {
            let gpu = gpu::device(ordinal)?;
            // SAFETY: `stream` returned the caller's current stream on this device.
            let stream = unsafe { Stream::borrow(gpu.device(), stream(ordinal)?) };
            let plan = gpu::attend(gpu, &stream, request, problem, output, sums)?;
            warn_if_slow(&plan, CALLER)?;
            remember(|| Last::Gpu { ordinal, plan });
        }
        Place::Host => {
            let never = Cancellation::new();
            // SAFETY: the caller keeps its tensors alive and unshared for the duration of the call.
            let report = unsafe { cpu::attend(request, problem, output, sums, &never)? };
            let problem = Box::new(problem.clone());
            remember(|| Last::Cpu { problem, report: report.into() });
        }
    }
    Ok(())
}

/// Runs the backward pass of attention, with the same convention for `stream`.
pub(crate) fn differentiate(
    call: &Backward,
    deterministic: bool,
    stream: impl FnOnce(u32) -> PyResult<u64>,
) -> PyResult<()> {
    let problem = call.problem(deterministic)?;
    match call.request.given.place {
        Place::Cuda(ordinal) => {
            let gpu = gpu::device(ordinal)?;
            // SAFETY: `stream` returned the caller's current stream on this device.
            let stream = unsafe { Stream::borrow(gpu.device(), stream(ordinal)?) };
            let plan = gpu::differentiate(gpu, &stream, call, &problem)?;
            warn_if_slow(&plan, CALLER)?;
            remember(|| Last::Gpu { ordinal, plan });
        }
        Place::Host => {
            let never = Cancellation::new();
            // SAFETY: the caller keeps its tensors alive and unshared for the duration of the call.
            let report = unsafe { cpu::differentiate(call, &problem, &never)? };
            remember(|| Last::Cpu { problem: problem.into(), report: report.into() });
        }
    }
    Ok(())
}
