//! Calls on host memory, run by the library's CPU back end.
//!
//! Tensors are read in place unless their elements are unaligned. Unlike on a device, the contents
//! of all lists are visible here: entries out of range are refused.

mod append;
mod memory;
mod places;

use flashcore::serving::{self, Placement, Sequences};
use flashcore::{
    Backend, Backward, Cancellation, CpuBackend, Inputs, Problem, Report, RunOptions, Shape,
};
use pyo3::prelude::*;

use self::memory::{Lent, contents, lend, list, optional, write, write_placed};
use self::places::{Rows, in_cache, lengths_within, repeated};
use crate::boundary::{collect, room_for};
use crate::error;
use crate::gradient;
use crate::parts::Parts;
use crate::request::Request;
use crate::view::{Form, Memory, View};

pub(crate) use self::append::append;

/// Computes attention and waits for the result.
///
/// # Safety
///
/// The request must be of host memory that stays as it is meanwhile, `output` of memory for its
/// output and `lse`, if any, memory for the problem's rows. Nobody else may use those two.
pub(crate) unsafe fn attend(
    request: &Request,
    problem: &Problem,
    output: &View,
    lse: Option<u64>,
    cancellation: &Cancellation,
) -> PyResult<Report> {
    let run = |problem: &Problem, inputs: Inputs<'_>, _: Option<&Placement>| {
        let options = RunOptions { cancellation: Some(cancellation), ..RunOptions::default() };
        CpuBackend::new().run(problem, inputs, &options).map_err(error::library)
    };
    // SAFETY: the caller's promise, here and below.
    let result = unsafe { with_inputs(request, problem, run)? };
    // SAFETY: the same; the results were made here.
    unsafe {
        write(&result.output, output);
        if let Some(lse) = lse {
            std::ptr::copy_nonoverlapping(result.lse.as_ptr(), lse as *mut f32, result.lse.len());
        }
    }
    Ok(result.report)
}

/// Computes the gradients of attention and waits for them. Key and value rows that belong to no
/// sequence are not written.
///
/// # Safety
///
/// The call must be of host memory that stays as it is meanwhile. Nobody else may use the memory
/// of its gradients.
pub(crate) unsafe fn differentiate(
    call: &gradient::Backward,
    problem: &Problem,
    cancellation: &Cancellation,
) -> PyResult<Report> {
    let shape = problem.output_shape();
    // SAFETY: the caller's promise, here and below.
    let lend = |view| unsafe { lend(shape, view) };
    let (output, output_gradient) = (lend(&call.output)?, lend(&call.output_gradient)?);
    // SAFETY: the same.
    let lse = unsafe { list::<f32>(&call.lse)? };
    // SAFETY: the same.
    let lse_gradient = unsafe { optional::<f32>(call.lse_gradient.as_ref())? };
    let run = |problem: &Problem, inputs: Inputs<'_>, keys: Option<&Placement>| {
        let options = RunOptions { cancellation: Some(cancellation), ..RunOptions::default() };
        let (output, output_gradient) = (output.view(), output_gradient.view());
        let lse_gradient = lse_gradient.as_deref();
        let backward = Backward { inputs, output, lse: &lse, output_gradient, lse_gradient };
        let gradients = CpuBackend::new().run_backward(problem, backward, &options);
        let gradients = gradients.map_err(error::library)?;
        let [query, key, value] = &call.gradients;
        // SAFETY: as above; the placement is inside of the keys.
        unsafe {
            write(&gradients.query, query);
            for (gradient, to) in [(&gradients.key, key), (&gradients.value, value)] {
                match keys {
                    Some(placement) => write_placed(gradient, to, placement),
                    None => write(gradient, to),
                }
            }
            if let (Some(sinks), Some(to)) = (&gradients.sinks, &call.sinks) {
                std::ptr::copy_nonoverlapping(sinks.as_ptr(), to.address as *mut f32, sinks.len());
            }
        }
        Ok(gradients.report)
    };
    // SAFETY: as above.
    unsafe { with_inputs(&call.request, problem, run) }
}

/// Calls `run` with the tensors of a call, the problem that they pose, and the placement of the
/// keys if sequences have lengths of their own.
///
/// # Safety
///
/// The request must be of host memory that stays as it is meanwhile.
unsafe fn with_inputs<T>(
    request: &Request,
    problem: &Problem,
    run: impl FnOnce(&Problem, Inputs<'_>, Option<&Placement>) -> PyResult<T>,
) -> PyResult<T> {
    // SAFETY: the caller's promise, here and below.
    let floats = |memory: Option<&Memory>| unsafe { optional::<f32>(memory) };
    let (slopes, sinks) = (floats(request.slopes.as_deref())?, floats(request.sinks.as_deref())?);
    // SAFETY: the same.
    let captured = unsafe { request.captured.on_host() };
    // SAFETY: the same.
    let lend = |shape, view: &View| unsafe { lend(shape, view) };
    let factors = request.descales(problem)?.zip(problem.descale_shapes());
    let factors = factors.try_map(|(view, shape)| match (view, shape) {
        (Some(view), Some(shape)) => lend(shape, &view).map(Some),
        _ => Ok(None),
    })?;
    let query = lend(problem.query_shape(), &request.query)?;
    let key = lend(problem.key_shape(), &request.key)?;
    let value = lend(problem.value_shape(), &request.value)?;
    let inputs = Inputs {
        slopes: slopes.as_deref(),
        sinks: sinks.as_deref(),
        captured: &captured,
        descales: factors.each_ref().map(|factors| factors.as_ref().map(Lent::view)),
        ..Inputs::new(query.view(), key.view(), value.view())
    };
    if problem.has_equal_lengths() {
        return run(problem, inputs, None);
    }
    // SAFETY: as above; the placements are inside of the tensors.
    let (queries, keys) = unsafe { placements(request, problem)? };
    let sequences = Sequences::new(problem.clone(), queries, keys).map_err(error::value)?;
    let (problem, inputs) = sequences.over(inputs).map_err(error::library)?;
    run(&problem, inputs, Some(sequences.keys()))
}

/// Returns where the queries and the keys of each sequence are stored.
///
/// # Safety
///
/// The request must be of host memory.
unsafe fn placements(request: &Request, problem: &Problem) -> PyResult<(Placement, Placement)> {
    // SAFETY: the caller's promise.
    let integers = |memory: Option<&Memory>| unsafe { optional::<i32>(memory) };
    let [q, k, _, cu_q, cu_k, used_q, used_k, leftpad, index, table, ..] = *request.names();
    let count = problem.batch;
    let [most_queries, most_keys] = request.most_names();
    let queries = Rows { name: q, form: &request.query.form, count }.placement(
        (cu_q, integers(request.query_starts.as_deref())?),
        (used_q, integers(request.query_lengths.as_deref())?),
        ("queries", most_queries, problem.query_length),
    )?;
    let (form, room) = (&request.key.form, problem.key_length);
    let (starts, lengths) =
        (integers(request.key_starts.as_deref())?, integers(request.key_lengths.as_deref())?);
    let keys = if starts.is_some() {
        let most = ("keys", most_keys, room);
        Rows { name: k, form, count }.placement((cu_k, starts), (used_k, lengths), most)?
    } else {
        let ends = match lengths {
            Some(lengths) => lengths_within(used_k, &lengths, |_| room)?,
            None => repeated(room, count)?,
        };
        let lists = (integers(request.entries.as_deref())?, integers(request.pages.as_deref())?);
        in_cache(form, ends, lists, [k, index, table])?
    };
    let keys = match integers(request.left_padding.as_deref())? {
        None => keys,
        Some(skipped) => {
            let skipped = lengths_within(leftpad, &skipped, |at| keys.ends()[at])?;
            keys.with_left_padding(skipped)
        }
    };
    Ok((queries, keys))
}

/// Combines partial results; log-sum-exps are written as (batch, heads, length).
///
/// # Safety
///
/// The parts must be of host memory that stays as it is meanwhile, `output` of memory of their shape
/// and `lse` memory for their rows, which nobody else uses.
pub(crate) unsafe fn combine(
    parts: &Parts,
    output: &View,
    lse: u64,
    cancellation: &Cancellation,
) -> PyResult<()> {
    let [batch, length, heads, dim] = parts.outputs[0].form.sizes.map(|size| size as usize);
    let shape = Shape::new(batch, length, heads, dim);
    let (mut outputs, mut lses) = (room_for(parts.outputs.len())?, room_for(parts.lses.len())?);
    for (part, sums) in parts.outputs.iter().zip(&parts.lses) {
        let [by_batch, by_row, by_head, one] = sums.form.strides;
        let form = Form { strides: [by_batch, by_head, by_row, one], ..sums.form };
        let sums = View { form, ..*sums };
        // SAFETY: the caller's promise.
        let (output, sums) =
            unsafe { (lend(shape, part)?, lend(Shape::new(batch, heads, length, 1), &sums)?) };
        outputs.push(output);
        lses.push(contents(sums.view())?);
    }
    let lent = outputs.iter().map(Lent::view).zip(lses.iter().map(Vec::as_slice));
    let combined = serving::combine_until(&collect(lent.map(Ok))?, parts.dtype, cancellation);
    let (combined, sums) = combined.map_err(error::library)?;
    // SAFETY: the caller's promise.
    unsafe {
        write(&combined, output);
        std::ptr::copy_nonoverlapping(sums.as_ptr(), lse as *mut f32, sums.len());
    }
    Ok(())
}
