//! Calls from Python: read the tensors, allocate the results, and run.
//!
//! All attention functions share one path. Between Python and the launch lie only: reading three
//! tensors, checking them, letting their library allocate the output, and one lookup of the plan.

use std::sync::Arc;

use flashcore::DType;
use flashcore::gpu::{AttentionPlan, Chip, Gradients, Tensors, target_of};
use flashcore::{Plan, Preference};
use pyo3::exceptions::{PyUserWarning, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyEllipsis, PyNotImplemented, PyTuple};

use crate::boundary::{attached, compute};
use crate::gradient::{Backward, Given};
use crate::info::{self, Last};
use crate::library::{Choice, Entrance, Library, Made, Named};
use crate::numbers::{Flags, Numbers, flag};
use crate::parts::{self, Parts};
use crate::process::process;
use crate::request::{Called, OUT, Request, named, needed};
use crate::rules::Rules;
use crate::update::{self, Update};
use crate::view::{self, Element, Form, Memory, Order, Place, View};
use crate::{cpu, error, gpu, torch};

/// Answers a call: finds the library of its tensors, lets `read` check them, and lets `run` do it.
///
/// A call on tensors without readable memory is left to PyTorch's dispatcher (`NotImplemented`),
/// which either has a kernel for them or reports what is wrong.
fn answer<'py, T>(
    py: Python<'py>,
    entrance: Entrance,
    tensors: &[Named<'py>],
    read: impl FnOnce(&Library<'py>) -> PyResult<T>,
    run: impl FnOnce(&Library<'py>, &T) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let library = match Library::of(py, entrance, tensors)? {
        Choice::Ours(library) => library,
        Choice::Theirs(answer) => return Ok(answer),
    };
    match read(&library) {
        // By reference: what was read is large.
        Ok(ref read) => run(&library, read),
        Err(_) if entrance == Entrance::Function && library.is_unreadable() => {
            torch::check_dispatched(
                tensors.iter().filter_map(|(name, it)| Some((*name, it.as_ref()?))),
            )?;
            Ok(PyNotImplemented::get(py).to_owned().into_any())
        }
        Err(error) => Err(error),
    }
}

/// What answers the calls that [`serve`] leaves to Python.
static OTHERS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Remembers the Python function for the calls that [`serve`] leaves to Python.
pub(crate) fn leave_others_to(function: &Bound<'_, PyAny>) {
    // Only the first import sets it.
    let _ = OTHERS.set(function.py(), function.clone().unbind());
}

/// Computes attention for a public function. Calls for which [`attend`] has no result, or that it
/// refuses with a `ValueError`, are left to Python: told what was returned or raised, it may still
/// have an answer.
pub(crate) fn serve<'py>(
    tensors: &Bound<'py, PyTuple>,
    numbers: &Bound<'py, PyTuple>,
    function: &Bound<'py, PyAny>,
    with_lse: &Bound<'py, PyAny>,
    deterministic: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = tensors.py();
    let (entrance, rules) = (Entrance::Function, Rules::default());
    let called = function.extract()?;
    let outcome = match attend(tensors, numbers, called, with_lse, entrance, &rules, CALLER - 1) {
        Ok(found) => {
            let is_left = found.is_none()
                || found.is(PyEllipsis::get(py))
                || found.is(PyNotImplemented::get(py));
            if !is_left {
                return Ok(found);
            }
            found
        }
        Err(error) if error.is_instance_of::<PyValueError>(py) => {
            error.into_value(py).into_bound(py).into_any()
        }
        Err(error) => return Err(error),
    };
    let others =
        OTHERS.get(py).ok_or_else(|| error::runtime("there is nothing for other calls"))?;
    others.bind(py).call1((outcome, tensors, numbers, function, with_lse, deterministic))
}

/// Computes attention; returns the output, and the log-sum-exps if asked for. `caller` is the stack
/// level of the user's code, for warnings.
pub(crate) fn attend<'py>(
    tensors: &Bound<'py, PyTuple>,
    numbers: &Bound<'py, PyTuple>,
    called: Called,
    with_lse: &Bound<'py, PyAny>,
    entrance: Entrance,
    rules: &Rules<'py>,
    caller: i32,
) -> PyResult<Bound<'py, PyAny>> {
    let py = tensors.py();
    let numbers = Numbers::read(called, numbers)?;
    let function = called.function;
    let with_lse = flag(function.sums_name(), with_lse)?;
    let count = tensors.len();
    let tensors = named(function.names(), tensors)?;
    if !function.is_packed() {
        tensors[1..3].iter().try_for_each(|tensor| needed(tensor).map(drop))?;
    }
    let read = |library: &Library<'py>| {
        let mut request =
            Request::read(function, &tensors, numbers, |tensor, name, whole| match whole {
                true => library.read_whole(tensor, name),
                false => library.read(tensor, name),
            });
        if let Ok(request) = &mut request
            && !rules.is_empty()
        {
            request.captured = rules.captured(|tensor, name| library.read(tensor, name))?;
        }
        request
    };
    let among;
    let all = match rules.is_empty() {
        true => &tensors[..count],
        false => {
            among = rules.among(&tensors);
            &among[..]
        }
    };
    answer(py, entrance, all, read, |library, request| {
        let wide = request.has_f32() && entrance == Entrance::Function;
        if wide && library.is_autocasting(py)? {
            return Ok(PyNotImplemented::get(py).to_owned().into_any());
        }
        let (query, out) = (needed(&tensors[0])?, tensors[OUT].1.as_ref());
        let answer = run(library, query, request, with_lse, out, caller)?;
        library.written(&[&tensors[OUT].1])?;
        Ok(answer)
    })
}

fn run<'py>(
    library: &Library<'py>,
    query: &Bound<'py, PyAny>,
    request: &Request,
    with_lse: bool,
    out: Option<&Bound<'py, PyAny>>,
    caller: i32,
) -> PyResult<Bound<'py, PyAny>> {
    let py = query.py();
    let problem = request.problem()?;
    let place = request.given.place;
    let (object, output) = match out {
        Some(out) => (out.clone(), request.output_in(&library.read_mutable(out, "out")?)?),
        None => {
            let mut output = request.output();
            let made = library.make_like(query, &request.given, &output)?;
            output.address = made.address;
            (made.object, request.as_output(&output)?)
        }
    };
    let (sizes, hidden) = request.sums();
    let lse = || library.make(py, &sizes[hidden..], Element::F32, place);
    let lse = with_lse.then(lse).transpose()?;
    let sums = lse.as_ref().map(|lse| lse.address);
    match place {
        _ if output.form.sizes.contains(&0) => {}
        Place::Cuda(ordinal) => {
            let gpu = gpu::device(ordinal)?;
            let stream = library.stream(py, gpu)?;
            // Python is released: making a plan compiles, and when the launch queue is full the
            // driver blocks, perhaps on work that needs Python to proceed.
            let launch = || gpu::attend(gpu, &stream, request, &problem, &output, sums);
            let plan = py.detach(launch)?;
            warn_if_slow(&plan, caller)?;
            info::remember(|| Last::Gpu { ordinal, plan });
            if out.is_some() {
                library.finish(py, &stream)?;
            }
        }
        Place::Host => {
            let report = compute(py, |cancellation| {
                // SAFETY: the tensors are the caller's, who holds them; the results were made just
                // now and are known to nobody else.
                unsafe { cpu::attend(request, &problem, &output, sums, cancellation) }
            });
            let report = report?.into();
            info::remember(|| Last::Cpu { problem: problem.into(), report });
        }
    }
    match lse {
        Some(lse) => Ok((object, lse.object).into_pyobject(py)?.into_any()),
        None => Ok(object),
    }
}

/// Computes the gradients of attention over PyTorch's tensors into the given tensors. Returns false
/// and does nothing if the query, key or value tensor is empty.
pub(crate) fn attend_backward(
    given: &Given<'_>,
    numbers: &Bound<'_, PyTuple>,
    called: Called,
    deterministic: bool,
) -> PyResult<bool> {
    let py = numbers.py();
    let numbers = Numbers::read(called, numbers)?;
    let function = called.function;
    let Choice::Ours(library) = Library::of(py, Entrance::Dispatcher, &given.forward)? else {
        return Err(error::runtime("gradients are those of PyTorch's tensors"));
    };
    let call = Backward::read(&library, function, numbers, given)?;
    if call.is_zero()? {
        return Ok(false);
    }
    let problem = call.problem(deterministic)?;
    match call.request.given.place {
        Place::Cuda(ordinal) => {
            let gpu = gpu::device(ordinal)?;
            let stream = library.stream(py, gpu)?;
            let plan = py.detach(|| gpu::differentiate(gpu, &stream, &call, &problem))?;
            warn_if_slow(&plan, CALLER)?;
            info::remember(|| Last::Gpu { ordinal, plan });
        }
        Place::Host => {
            let report = compute(py, |cancellation| {
                // SAFETY: the tensors are the caller's, who holds them, and gave those of the
                // gradients to be written.
                unsafe { cpu::differentiate(&call, &problem, cancellation) }
            });
            let report = report?.into();
            info::remember(|| Last::Cpu { problem: problem.into(), report });
        }
    }
    Ok(true)
}

/// The stack level of the caller of a public function, where one of the package's own is between
/// that and the extension.
pub(crate) const CALLER: i32 = 3;

/// Warns once for each plan that the slow `scalar` kernel serves it, and why. `caller` is the stack
/// level that the warning is about.
pub(crate) fn warn_if_slow(plan: &Arc<AttentionPlan>, caller: i32) -> PyResult<()> {
    let chosen = &plan.plan().chosen;
    if chosen.kernel != "scalar" || !process().tell(plan) {
        return Ok(());
    }
    let (name, problem, reason) = (chosen.full_name(), &plan.plan().problem, plan.plan().reason());
    let text = format!("the slow kernel {name} serves {problem}: {reason}\0");
    let text = std::ffi::CStr::from_bytes_until_nul(text.as_bytes()).unwrap_or_default();
    let warn = |py: Python<'_>| PyErr::warn(py, &py.get_type::<PyUserWarning>(), text, caller);
    attached(warn).unwrap_or(Ok(()))
}

/// Returns what a call would run on a GPU that need not be present: the problem as text, the
/// kernel, its configuration, and the reason for the choice. Tensors are (element type, sizes,
/// strides or None, address). With `backward`, each gradient has the strides of the tensor that it
/// belongs to.
pub(crate) fn plan_for(
    tensors: &Bound<'_, PyTuple>,
    numbers: &Bound<'_, PyTuple>,
    called: Called,
    chip: &str,
    backward: bool,
) -> PyResult<(String, &'static str, Option<String>, String)> {
    let numbers = Numbers::read(called, numbers)?;
    let function = called.function;
    let tensors = named(function.names(), tensors)?;
    let request = Request::read(function, &tensors, numbers, |tensor, _, _| described(tensor))?;
    let mut problem = request.problem()?;
    let mut tensors = request.tensors(request.descales(&problem)?, &request.output_at(0)?, None);
    if backward {
        problem = problem.backward();
        let Tensors { query, key, value, output, sinks, .. } = tensors;
        tensors.gradients = Some(Gradients { output, query, key, value, sinks, lse: None });
    }
    let (arrangement, chip) = (tensors.arrangement(), self::chip(chip)?);
    let preference = Preference::from_environment(problem.pass);
    let plan = Plan::on_gpu(&chip, &problem, &arrangement, &preference);
    let plan = plan.map_err(error::library)?;
    let reason = plan.reason();
    Ok((problem.text(), plan.chosen.kernel, plan.chosen.configuration, reason))
}

/// Returns the append that a call would launch on a chip: the configuration of its kernel, and the
/// number of its blocks. Tensors are described as in [`plan_for`].
pub(crate) fn append_plan_for(
    tensors: &Bound<'_, PyTuple>,
    flags: &Bound<'_, PyTuple>,
    chip: &str,
) -> PyResult<(String, u32)> {
    let flags = Flags::read(flags)?;
    let tensors = named(&update::names(flags.blocks), tensors)?;
    let update = Update::read(&tensors, flags, |tensor, _, _| described(tensor))?;
    let problem = gpu::append_problem(&update, &gpu::appended(&update)?);
    let choice =
        problem.choose(&self::chip(chip)?).map_err(|error| error::library(error.into()))?;
    let launch = &choice.launches[0];
    Ok((launch.kernel.name(), launch.blocks))
}

fn chip(name: &str) -> PyResult<Chip> {
    match name.strip_prefix("sm_").map(str::parse) {
        None if name.eq_ignore_ascii_case("h200") => Ok(Chip::H200),
        Some(Ok(architecture)) => Ok(Chip::typical(target_of(architecture))),
        _ => Err(error::value(format!("there is no chip `{name}`"))),
    }
}

/// Reads the description of a tensor without memory: (element type, sizes, strides or None,
/// address).
pub(crate) fn described(tensor: &Bound<'_, PyAny>) -> PyResult<Memory> {
    let (dtype, given, strides, address): (String, Vec<i64>, Option<Vec<i64>>, u64) =
        tensor.extract()?;
    let mut sizes = [1; view::MOST_DIMENSIONS];
    let dimensions = given.len().min(sizes.len());
    sizes[..dimensions].copy_from_slice(&given[..dimensions]);
    let mut memory = Memory {
        address,
        dimensions,
        sizes,
        strides: view::contiguous(sizes),
        element: element(&dtype),
        place: Place::Cuda(0),
    };
    for (to, stride) in memory.strides.iter_mut().zip(strides.unwrap_or_default()) {
        *to = stride;
    }
    Ok(memory)
}

/// Parses an element type by the name that Python's libraries give it.
fn element(name: &str) -> Element {
    const KINDS: [&str; 5] = ["uint", "int", "float", "complex", "bool"];
    match float("dtype", name) {
        Ok(dtype) => Element::Float(dtype),
        Err(_) if name == "int32" => Element::I32,
        Err(_) => {
            let kind = KINDS.into_iter().find(|kind| name.starts_with(kind)).unwrap_or("other");
            Element::Other(kind, name.trim_start_matches(kind).parse().unwrap_or(8))
        }
    }
}

/// Appends new keys and values to a KV cache; returns the queries (rotated if there are rotary
/// tables, otherwise None) and the new lengths.
pub(crate) fn append<'py>(
    tensors: &Bound<'py, PyTuple>,
    flags: &Bound<'py, PyTuple>,
    entrance: Entrance,
) -> PyResult<Bound<'py, PyAny>> {
    let py = tensors.py();
    let flags = Flags::read(flags)?;
    let tensors = named(&update::names(flags.blocks), tensors)?;
    let read = |library: &Library<'py>| {
        Update::read(&tensors, flags, |tensor, name, access| access.of(library, tensor, name))
    };
    answer(py, entrance, &tensors, read, |library, update| {
        let answer = write(library, needed(&tensors[4])?, update)?;
        library.written(&[&tensors[0].1, &tensors[1].1])?;
        Ok(answer)
    })
}

fn write<'py>(
    library: &Library<'py>,
    query: &Bound<'py, PyAny>,
    update: &Update,
) -> PyResult<Bound<'py, PyAny>> {
    let py = query.py();
    let (given, dim) = (&update.given, update.query.form.sizes[3]);
    let place = given.place;
    let rotated = || library.make_like(query, given, &given.like(dim));
    let rotated = update.rotary.is_some().then(rotated).transpose()?;
    let lengths = library.make(py, &[update.sequences as i64], Element::I32, place)?;
    let address = rotated.as_ref().map(|rotated| rotated.address);
    let lengths_to = lengths.address;
    match place {
        _ if update.sequences == 0 => {}
        Place::Cuda(ordinal) => {
            let gpu = gpu::device(ordinal)?;
            let stream = library.stream(py, gpu)?;
            py.detach(|| gpu::append(gpu, &stream, update, address, lengths_to))?;
        }
        Place::Host => {
            compute(py, |cancellation| {
                // SAFETY: the tensors are the caller's, who gave the caches to be written; the
                // results were made just now.
                unsafe { cpu::append(update, address, lengths_to, cancellation) }
            })?;
        }
    }
    let rotated = rotated.map(|rotated| rotated.object);
    Ok((rotated, lengths.object).into_pyobject(py)?.into_any())
}

/// Combines partial results stacked in one tensor; returns the output as (batch, length, heads,
/// dim) and the log-sum-exps as (batch, heads, length). The output is written to `out` if that is
/// given.
pub(crate) fn combine<'py>(
    tensors: &Bound<'py, PyTuple>,
    dtype: Option<&str>,
    entrance: Entrance,
) -> PyResult<Bound<'py, PyAny>> {
    let py = tensors.py();
    let tensors = named(&["out_partial", "lse_partial", "out"], tensors)?;
    let read = |library: &Library<'py>| -> PyResult<(Parts, Option<View>)> {
        let out = match &tensors[2] {
            (name, Some(out)) => Some(Order::Padded.view(name, &library.read_mutable(out, name)?)?),
            _ => None,
        };
        let [output, lse] = [&tensors[0], &tensors[1]].map(|it| library.read(needed(it)?, it.0));
        let dtype = dtype.map(|name| wide("out_dtype", name)).transpose()?;
        Ok((Parts::stacked(&output?, &lse?, dtype, out.as_ref())?, out))
    };
    answer(py, entrance, &tensors, read, |library, (parts, out)| {
        let (made, lse) = merge(library, py, parts, false, *out)?;
        library.written(&[&tensors[2].1])?;
        let output = made.map(|made| made.object).or_else(|| tensors[2].1.clone());
        Ok((output, lse.object).into_pyobject(py)?.into_any())
    })
}

/// Merges two attention results; returns output and log-sum-exps in the caller's dimensions.
pub(crate) fn merge_states<'py>(
    tensors: &Bound<'py, PyTuple>,
    entrance: Entrance,
) -> PyResult<Bound<'py, PyAny>> {
    let py = tensors.py();
    let tensors = named(&["out_a", "lse_a", "out_b", "lse_b"], tensors)?;
    let read = |library: &Library<'py>| -> PyResult<(Parts, bool)> {
        let [a, b, c, d] = tensors.each_ref().map(|it| library.read_whole(needed(it)?, it.0));
        let (a, b, c, d) = (a?, b?, c?, d?);
        Ok((Parts::separate([(&a, &b), (&c, &d)])?, a.dimensions == 3))
    };
    answer(py, entrance, &tensors, read, |library, (parts, packed)| {
        let (made, lse) = merge(library, py, parts, *packed, None)?;
        Ok((made.map(|made| made.object), lse.object).into_pyobject(py)?.into_any())
    })
}

/// Combines parts into `out`, or into a newly allocated tensor.
fn merge<'py>(
    library: &Library<'py>,
    py: Python<'py>,
    parts: &Parts,
    packed: bool,
    out: Option<View>,
) -> PyResult<(Option<Made<'py>>, Made<'py>)> {
    let Form { sizes, place, .. } = parts.outputs[0].form;
    let [batch, length, heads, _] = sizes;
    let hidden = usize::from(packed);
    let make = || library.make(py, &sizes[hidden..], Element::Float(parts.dtype), place);
    let made = out.is_none().then(make).transpose()?;
    let sums = [batch, heads, length];
    let lse = library.make(py, &sums[hidden..], Element::F32, place)?;
    let output = out.unwrap_or_else(|| {
        let strides = view::contiguous(sizes);
        let form = Form { sizes, strides, dtype: parts.dtype, place };
        View { address: made.as_ref().map_or(0, |made| made.address), form }
    });
    let form = parts::sums(sizes, [heads * length, 1, length], place);
    let to = View { address: lse.address, form };
    match place {
        _ if sizes.contains(&0) => {}
        Place::Cuda(ordinal) => {
            let gpu = gpu::device(ordinal)?;
            let stream = library.stream(py, gpu)?;
            py.detach(|| gpu::combine(gpu, &stream, parts, &output, &to))?;
        }
        Place::Host => {
            compute(py, |cancellation| {
                // SAFETY: the tensors are the caller's, who gave `out` to be written; the others
                // were made just now.
                unsafe { cpu::combine(parts, &output, to.address, cancellation) }
            })?;
        }
    }
    Ok((made, lse))
}

/// Parses the name of an element type that outputs may have: 16 or 32 bits.
fn wide(argument: &str, name: &str) -> PyResult<DType> {
    match float(argument, name)? {
        dtype if dtype.is_8_bit() => Err(PyValueError::new_err(format!(
            "{argument}={name}, expected float16, bfloat16 or float32"
        ))),
        dtype => Ok(dtype),
    }
}

/// Parses a floating-point (or int8) element type by the name that Python's libraries give it.
fn float(argument: &str, name: &str) -> PyResult<DType> {
    match name {
        "float32" => Ok(DType::F32),
        "float16" => Ok(DType::F16),
        "bfloat16" => Ok(DType::BF16),
        "float8_e4m3fn" => Ok(DType::E4M3),
        "float8_e5m2" => Ok(DType::E5M2),
        "int8" => Ok(DType::Int8),
        other => Err(PyValueError::new_err(format!(
            "{argument}={other}, expected float16, bfloat16 or float32"
        ))),
    }
}
