//! Host memory, by the library's CPU back end.
//!
//! Of a cache only what a call uses is read, into tensors in which sequences lie one after the other.
//! Unlike a device, the host sees all lists: nonsense in them is refused.

mod append;
mod copies;
mod places;

use flashcore::serving::{self, Placement, Sequences};
use flashcore::{
    Backend, Backward, Cancellation, CpuBackend, Descale, Inputs, Problem, Report, RunOptions,
    Shape, Tensor,
};
use pyo3::prelude::*;

use self::copies::{contents, copy, gather, list, optional, scatter, wide, write};
use self::places::{Rows, in_cache, lengths_within, repeated, starts};
use crate::boundary::{collect, room_for};
use crate::error;
use crate::gradient;
use crate::parts::Parts;
use crate::request::Request;
use crate::view::{Form, Memory, View};

pub(crate) use self::append::append;

/// Attention; waits for the answer.
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
    let result = unsafe { with_inputs(request, problem, cancellation, run)? };
    // SAFETY: the same; the results were made here.
    unsafe {
        write(&result.output, output);
        if let Some(lse) = lse {
            std::ptr::copy_nonoverlapping(result.lse.as_ptr(), lse as *mut f32, result.lse.len());
        }
    }
    Ok(result.report)
}

/// Gradients of attention; waits for them. Rows of keys that no sequence has are not written.
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
    let copy = |view| unsafe { copy(shape, view) };
    let (output, output_gradient) = (copy(&call.output)?, copy(&call.output_gradient)?);
    // SAFETY: the same.
    let lse = unsafe { list::<f32>(&call.lse)? };
    let run = |problem: &Problem, inputs: Inputs<'_>, keys: Option<&Placement>| {
        let options = RunOptions { cancellation: Some(cancellation), ..RunOptions::default() };
        let (output, output_gradient) = (&output, &output_gradient);
        let backward = Backward { inputs, output, lse: &lse, output_gradient };
        let gradients = CpuBackend::new().run_backward(problem, backward, &options);
        let gradients = gradients.map_err(error::library)?;
        let [query, key, value] = &call.gradients;
        // SAFETY: as above; the placement is inside of the keys.
        unsafe {
            write(&gradients.query, query);
            for (gradient, to) in [(&gradients.key, key), (&gradients.value, value)] {
                match keys {
                    Some(placement) => scatter(gradient, to, placement),
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
    unsafe { with_inputs(&call.request, problem, cancellation, run) }
}

/// Hands the tensors of a call to `run`, with the problem that they pose: keys and values of
/// sequences of unequal lengths one after the other, gathered from their placement, which comes
/// with them.
///
/// # Safety
///
/// The request must be of host memory that stays as it is meanwhile.
unsafe fn with_inputs<T>(
    request: &Request,
    problem: &Problem,
    cancellation: &Cancellation,
    run: impl FnOnce(&Problem, Inputs<'_>, Option<&Placement>) -> PyResult<T>,
) -> PyResult<T> {
    // SAFETY: the caller's promise, here and below.
    let floats = |memory: Option<&Memory>| unsafe { optional::<f32>(memory) };
    // SAFETY: the same.
    let copy = |shape, view: &View| unsafe { copy(shape, view) };
    let (slopes, sinks) = (floats(request.slopes.as_deref())?, floats(request.sinks.as_deref())?);
    // SAFETY: the same.
    let captured = unsafe { request.captured.on_host() };
    let given = |inputs| Inputs {
        slopes: slopes.as_deref(),
        sinks: sinks.as_deref(),
        captured: &captured,
        ..inputs
    };
    let factors = problem.descales.zip(request.descales(problem)?).zip(problem.descale_shapes());
    let query = copy(problem.query_shape(), &request.query)?;
    if problem.has_equal_lengths() {
        let key = copy(problem.key_shape(), &request.key)?;
        let value = copy(problem.value_shape(), &request.value)?;
        let factors = factors.try_map(|((_, view), shape)| match (view, shape) {
            (Some(view), Some(shape)) => copy(shape, &view).map(Some),
            _ => Ok(None),
        })?;
        let inputs = Inputs::new(&query, &key, &value);
        let inputs = inputs.with_descales(factors.each_ref().map(Option::as_ref));
        return run(problem, given(inputs), None);
    }
    // SAFETY: as above; the placements are inside of the tensors.
    let (queries, keys) = unsafe { placements(request, problem)? };
    // SAFETY: the same.
    let [key, value] =
        [&request.key, &request.value].map(|view| unsafe { gather(view, &keys, cancellation) });
    let (key, value) = (key?, value?);
    let factors = factors.try_map(|((descale, view), shape)| match (view, shape) {
        (Some(view), _) if descale == Descale::PerToken => {
            // SAFETY: as above.
            unsafe { gather(&view, &keys, cancellation) }.map(Some)
        }
        (Some(view), Some(shape)) => copy(shape, &view).map(Some),
        _ => Ok(None),
    })?;
    let sequences = Sequences::new(problem.clone(), queries, Placement::packed(starts(&keys)?));
    let sequences = sequences.map_err(error::value)?;
    let inputs = Inputs::new(&query, &key, &value);
    let inputs = inputs.with_descales(factors.each_ref().map(Option::as_ref));
    let over = sequences.over(given(inputs));
    let (problem, inputs) = over.map_err(error::library)?;
    run(&problem, inputs, Some(&keys))
}

/// Where the queries and the keys of a call are.
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

/// Puts parts together; log-sum-exps go to (batch, heads, length).
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
    let mut tensors = room_for(parts.outputs.len())?;
    for (part, sums) in parts.outputs.iter().zip(&parts.lses) {
        let [by_batch, by_row, by_head, one] = sums.form.strides;
        let form = Form { strides: [by_batch, by_head, by_row, one], ..sums.form };
        let sums = View { form, ..*sums };
        // SAFETY: the caller's promise.
        let (tensor, sums) =
            unsafe { (copy(shape, part)?, copy(Shape::new(batch, heads, length, 1), &sums)?) };
        // Sums are rounded once, to what is asked for.
        let tensor = if part.form.dtype == parts.dtype { tensor } else { wide(&tensor)? };
        tensors.push((tensor, contents(&sums)?));
    }
    let borrowed = collect(tensors.iter().map(|(tensor, list)| Ok((tensor, &list[..]))))?;
    let combined = serving::combine_until(&borrowed, cancellation);
    let (mut combined, sums) = combined.map_err(error::library)?;
    if combined.dtype() != parts.dtype {
        let rounded = Tensor::from_f32(parts.dtype, shape, &contents(&combined)?);
        combined = rounded.map_err(|error| error::library(error.into()))?;
    }
    // SAFETY: the caller's promise.
    unsafe {
        write(&combined, output);
        std::ptr::copy_nonoverlapping(sums.as_ptr(), lse as *mut f32, sums.len());
    }
    Ok(())
}
