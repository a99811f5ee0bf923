//! Attention inside programs compiled by XLA (JAX's `jit`).
//!
//! While JAX traces a function, [`describe`] checks a call from its shapes alone and returns the
//! attributes of the XLA custom call. When the program runs, XLA calls a handler with the buffers,
//! without Python: on its stream, or for the CPU on a thread of its own.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use flashcore::DType;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};

use crate::call::described;
use crate::gradient::Backward;
use crate::numbers::Numbers;
use crate::request::{Called, OUT, Request, named};
use crate::view::{Element, MOST_DIMENSIONS, Memory, Place, View};
use crate::xla::{Call, CallFrame, Handler, answer};
use crate::{error, launch};

/// The attributes of an XLA custom call, and the element type of the output.
pub(crate) type Described<'py> = (Bound<'py, PyDict>, &'static str);

/// Returns the attributes of the custom call, from the tensors' shapes: each tensor is (element
/// type, sizes, None, 0).
pub(crate) fn describe<'py>(
    tensors: &Bound<'py, PyTuple>,
    numbers: &Bound<'py, PyTuple>,
    called: Called,
) -> PyResult<Described<'py>> {
    let py = tensors.py();
    let given = Numbers::read(called, numbers)?;
    let function = called.function;
    let tensors = named(function.names(), tensors)?;
    let request = Request::read(function, &tensors, given, |tensor, _, _| described(tensor))?;
    request.problem()?;
    let attributes = PyDict::new(py);
    let places = tensors.iter().enumerate().filter(|(_, (_, tensor))| tensor.is_some());
    let places = places.fold(0_i64, |places, (at, _)| places | 1 << at);
    attributes.set_item("tensors", places)?;
    given.write(&attributes)?;
    let dtype = match request.output().element {
        Element::Float(DType::F16) => "float16",
        Element::Float(DType::BF16) => "bfloat16",
        _ => "float32",
    };
    Ok((attributes, dtype))
}

/// Returns the XLA handler of an operation on a platform.
pub(crate) fn target<'py>(
    py: Python<'py>,
    name: &str,
    platform: &str,
) -> PyResult<Bound<'py, PyCapsule>> {
    const NAME: &CStr = c"xla._CUSTOM_CALL_TARGET";
    let handler: Handler = match (name, platform) {
        ("attention", "cpu") => attend_on_host,
        ("attention", "CUDA") => attend_on_device,
        ("attention_backward", "cpu") => differentiate_on_host,
        ("attention_backward", "CUDA") => differentiate_on_device,
        _ => return Err(error::value(format!("there is no target `{name}` for `{platform}`"))),
    };
    let pointer = NonNull::new(handler as *mut c_void);
    let pointer = pointer.ok_or_else(|| error::runtime("a function has no address"))?;
    // SAFETY: a pointer to a function, which lives as long as the module.
    unsafe { PyCapsule::new_with_pointer(py, pointer, NAME) }
}

extern "C" fn attend_on_host(frame: *mut CallFrame) -> *mut c_void {
    // SAFETY: only XLA calls this, with a valid frame, here and below.
    unsafe { answer(frame, |call| attend(call, Place::Host)) }
}

extern "C" fn attend_on_device(frame: *mut CallFrame) -> *mut c_void {
    // SAFETY: as above.
    unsafe { answer(frame, |call| attend(call, Place::Cuda(call.ordinal()?))) }
}

extern "C" fn differentiate_on_host(frame: *mut CallFrame) -> *mut c_void {
    // SAFETY: as above.
    unsafe { answer(frame, |call| differentiate(call, Place::Host)) }
}

extern "C" fn differentiate_on_device(frame: *mut CallFrame) -> *mut c_void {
    // SAFETY: as above.
    unsafe { answer(frame, |call| differentiate(call, Place::Cuda(call.ordinal()?))) }
}

/// Computes the output, and the log-sum-exps if XLA wants two results.
fn attend(call: &Call<'_>, place: Place) -> PyResult<()> {
    let request = request(call, place)?;
    let output = call.result(0, request.given.dimensions, place)?;
    let output = request.output_in(&output)?;
    let sums = (call.results() > 1).then(|| call.result(1, MOST_DIMENSIONS, place));
    let sums = sums.transpose()?.map(|sums| sums.address);
    launch::attend(&request, &request.problem()?, &output, sums, |_| call.stream())
}

/// Computes the gradients of queries, keys, values and sinks. The arguments are those of the
/// forward call, its output and log-sum-exps, and the gradients of the output and, if
/// `lse_gradient`, of the log-sum-exps; then zeros that alias the results.
fn differentiate(call: &Call<'_>, place: Place) -> PyResult<()> {
    let function = called(call)?.function;
    let request = request(call, place)?;
    let first = given(call).count_ones() as usize;
    let packed = (request.query_starts.is_some(), request.key_starts.is_some());
    let rows = |name: &str, memory: PyResult<Memory>, packed: bool| -> PyResult<View> {
        function.order(packed).view(name, &memory?)
    };
    let (queries, keys) = (dimensions(packed.0), dimensions(packed.1));
    let (sizes, hidden) = request.sums();
    let sums = |at: usize| call.argument(first + at, sizes.len() - hidden, place);
    let backward = Backward {
        output: rows("out", call.argument(first, queries, place), packed.0)?,
        lse: sums(1)?,
        output_gradient: rows("dout", call.argument(first + 2, queries, place), packed.0)?,
        lse_gradient: call.flag("lse_gradient").then(|| sums(3)).transpose()?,
        gradients: [
            rows("dq", call.result(0, queries, place), packed.0)?,
            rows("dk", call.result(1, keys, place), packed.1)?,
            rows("dv", call.result(2, keys, place), packed.1)?,
        ],
        sinks: request.sinks.is_some().then(|| call.result(3, 1, place)).transpose()?,
        request,
    };
    backward.check()?;
    launch::differentiate(&backward, call.flag("deterministic"), |_| call.stream())
}

fn called(call: &Call<'_>) -> PyResult<Called> {
    Called::named(call.text("function")?)
}

/// Returns which of a call's tensors are given, one bit for each index.
fn given(call: &Call<'_>) -> u64 {
    call.integer("tensors").unwrap_or_default() as u64
}

/// Reads the forward call.
fn request(call: &Call<'_>, place: Place) -> PyResult<Request> {
    let given = given(call);
    if given.count_ones() as usize > call.arguments() || given >> OUT != 0 {
        return Err(error::value(format!("the call has no tensors {given:b}")));
    }
    let Called { function, batch_invariant } = called(call)?;
    let numbers = Numbers::of_attributes(call, batch_invariant);
    let packed = |at: usize| given & 1 << if at == 0 { 3 } else { 4 } != 0;
    Request::new(
        function,
        |at| given & 1 << at != 0,
        numbers,
        |at, _| {
            let before = (given & ((1 << at) - 1)).count_ones() as usize;
            let most = if at < 3 { dimensions(packed(at)) } else { MOST_DIMENSIONS };
            call.argument(before, most, place)
        },
    )
}

/// Returns the number of dimensions of a tensor of rows before `vmap` adds any.
fn dimensions(packed: bool) -> usize {
    if packed { 3 } else { 4 }
}
