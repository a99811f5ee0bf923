//! What serving engines call: sequences of unequal lengths, caches, parts.
//!
//! | file | its subject |
//! | --- | --- |
//! | `library` | whose tensors a call has |
//! | `request`, `update`, `parts` | what calls of attention, of appending and of merging give |
//! | `cpu` | host memory |
//! | `gpu` | devices: plans, and all that is asked of the library there |
//! | this one | from a call to its answer |

mod cpu;
pub(crate) mod gpu;
mod library;
mod parts;
mod request;
mod update;

use flashcore::DType;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyNotImplemented, PyTuple};

pub(crate) use self::library::Entrance;
use self::library::{Choice, Library, Made, Named};
use self::parts::Parts;
pub(crate) use self::request::{Function, Numbers};
use self::request::{Request, named};
use self::update::Update;
use crate::error;
use crate::info::{self, Last};
use crate::view::{Convention, Element, Form, Place, View, contiguous};

/// Answers a call: finds the library of its tensors, reads what they give, and runs it.
///
/// A call whose tensors are not in memory goes to PyTorch's dispatcher, which knows them or says
/// what is wrong.
fn answer<'py, T>(
    py: Python<'py>,
    entrance: Entrance,
    tensors: &[Named<'py>],
    read: impl FnOnce(&Library<'py>) -> PyResult<T>,
    run: impl FnOnce(&Library<'py>, T) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let library = match Library::of(py, entrance, tensors)? {
        Choice::Ours(library) => library,
        Choice::Theirs(answer) => return Ok(answer),
    };
    match read(&library) {
        Ok(read) => run(&library, read),
        Err(_) if entrance == Entrance::Function => {
            Ok(PyNotImplemented::get(py).to_owned().into_any())
        }
        Err(error) => Err(error),
    }
}

/// Attention over sequences: the output, and the log-sum-exps if asked.
pub(crate) fn attend<'py>(
    tensors: &Bound<'py, PyTuple>,
    numbers: Numbers,
    function: Function,
    with_lse: bool,
    entrance: Entrance,
) -> PyResult<Bound<'py, PyAny>> {
    let py = tensors.py();
    let tensors = named(function.names(), tensors)?;
    let read = |library: &Library<'py>| Request::read(library, &tensors, numbers);
    answer(py, entrance, &tensors, read, |library, request| {
        run(library, needed(&tensors[0])?, &request, with_lse)
    })
}

fn run<'py>(
    library: &Library<'py>,
    query: &Bound<'py, PyAny>,
    request: &Request,
    with_lse: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let py = query.py();
    let size = request.size()?;
    let place = request.query.form.place;
    let (sizes, sums) = request.results();
    let hidden = request.hidden();
    let output = library.make_like(query, &request.query.form, &sizes[hidden..])?;
    let lse = || library.make(py, &sums[hidden..], Element::Float(DType::F32), place);
    let mut lse = with_lse.then(lse).transpose()?;
    let nothing = sizes.contains(&0);
    match place {
        Place::Cuda(ordinal) if !nothing => {
            let device = crate::gpu::device(ordinal).map_err(error::library)?;
            let stream = library.stream(py, device)?;
            let sums = lse.as_ref().map(|lse| lse.address);
            // Making a plan compiles, and a full queue makes the driver wait.
            let launch = || gpu::attend(device, request, size, &stream, output.address, sums);
            let entry = py.detach(launch)?;
            info::remember(|| Last::Sequences { ordinal, entry });
        }
        Place::Host if !nothing => {
            if lse.is_none() {
                let room = library.make(py, &sums[hidden..], Element::Float(DType::F32), place)?;
                lse = Some(room);
            }
            let sums = lse.as_ref().map_or(0, |lse| lse.address);
            let compute = || {
                // SAFETY: the tensors are the caller's, who holds them; the results were made just
                // now and are known to nobody else.
                unsafe { cpu::attend(request, &size, output.address, sums) }
            };
            let report = py.detach(compute)?;
            let problem = size.problem.into();
            info::remember(|| Last::Cpu { problem, report: report.into() });
        }
        _ => {}
    }
    match lse {
        Some(lse) if with_lse => Ok((output.object, lse.object).into_pyobject(py)?.into_any()),
        _ => Ok(output.object),
    }
}

/// New keys and values into a cache: the queries, turned where there is an embedding and None
/// where there is not, and the new lengths.
pub(crate) fn append<'py>(
    tensors: &Bound<'py, PyTuple>,
    flags: (bool, bool),
    most_queries: Option<i64>,
    entrance: Entrance,
) -> PyResult<Bound<'py, PyAny>> {
    let py = tensors.py();
    let tensors = named(update::NAMES, tensors)?;
    let read = |library: &Library<'py>| Update::read(library, &tensors, flags, most_queries);
    answer(py, entrance, &tensors, read, |library, update| {
        let answer = write(library, needed(&tensors[4])?, &update)?;
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
    let form = &update.query.form;
    let place = form.place;
    let turned = update.rotary.is_some().then(|| {
        let hidden = usize::from(update.query_starts.is_some());
        library.make_like(query, form, &form.sizes[hidden..])
    });
    let turned = turned.transpose()?;
    let lengths = library.make(py, &[update.sequences as i64], Element::I32, place)?;
    let address = turned.as_ref().map(|turned| turned.address);
    match place {
        _ if update.sequences == 0 => {}
        Place::Cuda(ordinal) => {
            let device = crate::gpu::device(ordinal).map_err(error::library)?;
            let stream = library.stream(py, device)?;
            py.detach(|| gpu::append(device, update, &stream, address, lengths.address))?;
        }
        Place::Host => {
            // SAFETY: the tensors are the caller's, who gave the caches to be written; the results
            // were made just now.
            py.detach(|| unsafe { cpu::append(update, address, lengths.address) })?;
        }
    }
    let turned = turned.map(|turned| turned.object);
    Ok((turned, lengths.object).into_pyobject(py)?.into_any())
}

/// Parts in one tensor put together: the output, (batch, length, heads, dim), and the
/// log-sum-exps, (batch, heads, length). The output is written to `out` where that is given.
pub(crate) fn combine<'py>(
    tensors: &Bound<'py, PyTuple>,
    dtype: Option<&str>,
    entrance: Entrance,
) -> PyResult<Bound<'py, PyAny>> {
    let py = tensors.py();
    let tensors = named(["out_partial", "lse_partial", "out"], tensors)?;
    let read = |library: &Library<'py>| -> PyResult<(Parts, Option<View>)> {
        let out = match &tensors[2] {
            (name, Some(out)) => {
                Some(request::rows(name, &library.read_mutable(out, name)?, false)?)
            }
            _ => None,
        };
        let [output, lse] = [&tensors[0], &tensors[1]].map(|it| library.read(needed(it)?, it.0));
        let dtype = dtype.map(float).transpose()?;
        Ok((Parts::stacked(&output?, &lse?, dtype, out.as_ref())?, out))
    };
    answer(py, entrance, &tensors, read, |library, (parts, out)| {
        let (made, lse) = merge(library, py, &parts, false, out)?;
        library.written(&[&tensors[2].1])?;
        let output = made.map(|made| made.object).or_else(|| tensors[2].1.clone());
        Ok((output, lse.object).into_pyobject(py)?.into_any())
    })
}

/// Two answers of attention put together: output and log-sum-exps in the caller's dimensions.
pub(crate) fn merge_states<'py>(
    tensors: &Bound<'py, PyTuple>,
    entrance: Entrance,
) -> PyResult<Bound<'py, PyAny>> {
    let py = tensors.py();
    let tensors = named(["out_a", "lse_a", "out_b", "lse_b"], tensors)?;
    let read = |library: &Library<'py>| -> PyResult<(Parts, bool)> {
        let [a, b, c, d] = tensors.each_ref().map(|it| library.read_whole(needed(it)?, it.0));
        let (a, b, c, d) = (a?, b?, c?, d?);
        Ok((Parts::separate([(&a, &b), (&c, &d)])?, a.dimensions == 3))
    };
    answer(py, entrance, &tensors, read, |library, (parts, packed)| {
        let (made, lse) = merge(library, py, &parts, packed, None)?;
        Ok((made.map(|made| made.object), lse.object).into_pyobject(py)?.into_any())
    })
}

/// A tensor that must be given.
fn needed<'a, 'py>((name, tensor): &'a Named<'py>) -> PyResult<&'a Bound<'py, PyAny>> {
    tensor
        .as_ref()
        .ok_or_else(|| PyTypeError::new_err(format!("{name} is None, expected a tensor")))
}

/// Merges into `out`, or into a tensor that is made for it.
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
    let element = Element::Float(parts.dtype);
    let made = match out {
        None => Some(library.make(py, &sizes[hidden..], element, place)?),
        Some(_) => None,
    };
    let sums = [batch, heads, length];
    let lse = library.make(py, &sums[hidden..], Element::Float(DType::F32), place)?;
    let output = out.unwrap_or_else(|| {
        let strides = contiguous(Convention::FlashAttention, sizes);
        let form = Form { sizes, strides, dtype: parts.dtype, place };
        View { address: made.as_ref().map_or(0, |made| made.address), form }
    });
    if !sizes.contains(&0) {
        match place {
            Place::Cuda(ordinal) => {
                let device = crate::gpu::device(ordinal).map_err(error::library)?;
                let stream = library.stream(py, device)?;
                py.detach(|| gpu::merge(device, parts, &stream, &output, lse.address))?;
            }
            Place::Host => {
                // SAFETY: the tensors are the caller's, who gave `out` to be written; the others
                // were made just now.
                py.detach(|| unsafe { cpu::merge(parts, &output, lse.address) })?;
            }
        }
    }
    Ok((made, lse))
}

/// An element type by the name that Python's libraries give it.
fn float(name: &str) -> PyResult<DType> {
    match name {
        "float32" => Ok(DType::F32),
        "float16" => Ok(DType::F16),
        "bfloat16" => Ok(DType::BF16),
        other => Err(PyValueError::new_err(format!(
            "out_dtype={other}, expected float16, bfloat16 or float32"
        ))),
    }
}
