//! Calls that come without Python, from programs that XLA compiled and from PyTorch's dispatcher: from
//! what was read to its launch.

use cuda::Stream;
use flashcore::{Cancellation, Problem};
use pyo3::PyResult;

use crate::call::warn_if_slow;
use crate::gradient::Backward;
use crate::info::{Last, remember};
use crate::request::Request;
use crate::view::{Place, View};
use crate::{cpu, gpu};

/// Attention; log-sum-exps go to `sums`, or nowhere. On a device, on the stream that `stream` has.
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
            // SAFETY: the stream that the caller's work goes to, on this device.
            let stream = unsafe { Stream::borrow(gpu.device(), stream(ordinal)?) };
            let plan = gpu::attend(gpu, &stream, request, problem, output, sums)?;
            warn_if_slow(&plan)?;
            remember(|| Last::Gpu { ordinal, plan });
        }
        Place::Host => {
            let never = Cancellation::new();
            // SAFETY: the caller's tensors, which are the call's while it lasts.
            let report = unsafe { cpu::attend(request, problem, output, sums, &never)? };
            let problem = Box::new(problem.clone());
            remember(|| Last::Cpu { problem, report: report.into() });
        }
    }
    Ok(())
}

/// The gradients of attention, likewise.
pub(crate) fn differentiate(
    call: &Backward,
    deterministic: bool,
    stream: impl FnOnce(u32) -> PyResult<u64>,
) -> PyResult<()> {
    let problem = call.problem(deterministic)?;
    match call.request.given.place {
        Place::Cuda(ordinal) => {
            let gpu = gpu::device(ordinal)?;
            // SAFETY: the stream that the caller's work goes to, on this device.
            let stream = unsafe { Stream::borrow(gpu.device(), stream(ordinal)?) };
            let plan = gpu::differentiate(gpu, &stream, call, &problem)?;
            warn_if_slow(&plan)?;
            remember(|| Last::Gpu { ordinal, plan });
        }
        Place::Host => {
            let never = Cancellation::new();
            // SAFETY: the caller's tensors, which are the call's while it lasts.
            let report = unsafe { cpu::differentiate(call, &problem, &never)? };
            remember(|| Last::Cpu { problem: problem.into(), report: report.into() });
        }
    }
    Ok(())
}
