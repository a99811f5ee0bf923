//! Scalar arguments of calls; errors name the argument that is wrong.

use flashcore::Scores;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFloat, PyInt, PyList, PyTuple};

use crate::request::{Called, Function};
use crate::stable::Arguments;
use crate::{error, xla};

const FINITE: &str = "a finite number";

/// The scalar arguments of an attention call.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Numbers {
    pub(crate) scale: Option<f32>,
    pub(crate) causal: bool,
    pub(crate) window: Window,
    /// The chunk length in keys; 0 means no chunks.
    pub(crate) chunk: usize,
    softcap: Option<f32>,
    pub(crate) most_queries: Option<i64>,
    pub(crate) most_keys: Option<i64>,
    /// Whether the bits of results must not depend on the batch.
    pub(crate) batch_invariant: bool,
}

/// Visible keys before and after a query's own position; `None` means unbounded.
pub(crate) type Window = (Option<usize>, Option<usize>);

impl Numbers {
    /// Reads the scale, the causal flag, the window, the chunk, the softcap, and the maximum
    /// numbers of queries and keys.
    pub(crate) fn read(called: Called, numbers: &Bound<'_, PyTuple>) -> PyResult<Numbers> {
        let [scale, causal, window_size, attention_chunk, softcap_given, most_queries, most_keys] =
            items(numbers)?;
        let (scale_name, causal_name) = match called.function {
            Function::PyTorch | Function::Flex => ("scale", "is_causal"),
            _ => ("softmax_scale", "causal"),
        };
        let [queries_name, keys_name] = called.function.most_names();
        Ok(Numbers {
            scale: optional(&scale, |scale| finite(scale_name, scale))?,
            causal: flag(causal_name, &causal)?,
            window: window(&window_size)?,
            chunk: chunk(&attention_chunk)?,
            softcap: softcap(&softcap_given)?,
            most_queries: longest(queries_name, &most_queries)?,
            most_keys: longest(keys_name, &most_keys)?,
            batch_invariant: called.batch_invariant,
        })
    }

    /// Reads the arguments of a PyTorch operator: `float? softmax_scale, bool causal, int
    /// window_left, int window_right, int attention_chunk, float softcap, SymInt? max_seqlen_q,
    /// SymInt? max_seqlen_k`.
    ///
    /// All of them are taken before any is refused, so that the caller can take what follows.
    pub(crate) fn of_arguments(given: &mut Arguments<'_>) -> PyResult<Numbers> {
        let (scale, causal) = (given.optional_number(), given.flag());
        let side = |side: i64| usize::try_from(side).ok();
        let window = (side(given.whole()), side(given.whole()));
        let (chunk, softcap) = (given.whole(), given.number());
        let [most_queries, most_keys] = [given.optional_whole(), given.optional_whole()];
        let wrong = |expected| error::value(format!("softcap={softcap:?}, expected {expected}"));
        Ok(Numbers {
            window,
            chunk: usize::try_from(chunk).map_err(|_| {
                error::value(format!("attention_chunk={chunk}, expected no negative number"))
            })?,
            softcap: cap(softcap).map_err(wrong)?,
            most_queries,
            most_keys,
            ..Numbers::plain(scale, causal)?
        })
    }

    /// Returns the numbers of a call that has no others.
    pub(crate) fn plain(scale: Option<f64>, causal: bool) -> PyResult<Numbers> {
        let narrow = scale.map(|scale| scale as f32);
        match (scale, narrow.is_none_or(f32::is_finite)) {
            (Some(scale), false) => {
                Err(error::value(format!("scale={scale:?}, expected {FINITE}")))
            }
            _ => Ok(Numbers { scale: narrow, causal, ..Numbers::default() }),
        }
    }

    /// Writes the numbers as attributes of an XLA custom call; those that are not given are absent.
    pub(crate) fn write(&self, attributes: &Bound<'_, PyDict>) -> PyResult<()> {
        let whole = |number: Option<usize>| number.map(|number| number as i64);
        attributes.set_item("causal", self.causal)?;
        for (name, number) in [("scale", self.scale), ("softcap", self.softcap)] {
            if let Some(number) = number {
                attributes.set_item(name, number)?;
            }
        }
        for (name, number) in [
            ("window_left", whole(self.window.0)),
            ("window_right", whole(self.window.1)),
            ("chunk", whole(Some(self.chunk))),
            ("max_seqlen_q", self.most_queries),
            ("max_seqlen_k", self.most_keys),
        ] {
            if let Some(number) = number {
                attributes.set_item(name, number)?;
            }
        }
        Ok(())
    }

    /// Reads the numbers from the attributes that [`Numbers::write`] wrote.
    pub(crate) fn of_attributes(call: &xla::Call<'_>, batch_invariant: bool) -> Numbers {
        let whole = |name| call.integer(name).and_then(|number| usize::try_from(number).ok());
        Numbers {
            scale: call.number("scale"),
            causal: call.flag("causal"),
            window: (whole("window_left"), whole("window_right")),
            chunk: whole("chunk").unwrap_or_default(),
            softcap: call.number("softcap"),
            most_queries: call.integer("max_seqlen_q"),
            most_keys: call.integer("max_seqlen_k"),
            batch_invariant,
        }
    }

    /// Returns the score rules that are numbers.
    pub(crate) fn scores(&self) -> Scores {
        let mut scores = Scores::default();
        (scores.scale, scores.softcap) = (self.scale, self.softcap);
        scores
    }
}

/// The scalar arguments of an append to a KV cache.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flags {
    /// Whether rotary pairs are neighbouring columns.
    pub(crate) interleaved: bool,
    /// Whether the queries of a sequence have successive positions, as they do if the mask hides
    /// keys.
    pub(crate) advancing: bool,
    /// Whether the caller calls the table of pages `block_table`.
    pub(crate) blocks: bool,
    pub(crate) most_queries: Option<i64>,
    pub(crate) most_new: Option<i64>,
}

impl Flags {
    /// Reads the rotary interleaving, the causal flag, window and chunk, whether the page table is
    /// called `block_table`, and the maximum numbers of queries and of new keys of a sequence.
    pub(crate) fn read(flags: &Bound<'_, PyTuple>) -> PyResult<Flags> {
        let [interleaved, causal, window_size, attention_chunk, blocks, most_queries, most_new] =
            items(flags)?;
        Ok(Flags {
            interleaved: flag("rotary_interleaved", &interleaved)?,
            advancing: flag("causal", &causal)?
                | (window(&window_size)? != (None, None))
                | (chunk(&attention_chunk)? > 0),
            blocks: blocks.extract()?,
            most_queries: longest("max_seqlen_q", &most_queries)?,
            most_new: optional(&most_new, |most| integer("max_seqlen_k_new", most))?,
        })
    }
}

/// Returns the items of a tuple, as many as there must be.
fn items<'a, 'py, const COUNT: usize>(
    tuple: &'a Bound<'py, PyTuple>,
) -> PyResult<[Borrowed<'a, 'py, PyAny>; COUNT]> {
    let given = tuple.len();
    if given != COUNT {
        return Err(PyTypeError::new_err(format!("{given} numbers, expected {COUNT}")));
    }
    let mut items = tuple.iter_borrowed();
    Ok(std::array::from_fn(|_| items.next().expect("they were counted")))
}

fn optional<'py, T>(
    value: &Bound<'py, PyAny>,
    read: impl FnOnce(&Bound<'py, PyAny>) -> PyResult<T>,
) -> PyResult<Option<T>> {
    if value.is_none() { Ok(None) } else { read(value).map(Some) }
}

/// Reads a boolean of Python's or NumPy's.
pub(crate) fn flag(name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
    value.extract().map_err(|_| wrong(name, value, "True or False"))
}

/// Reads the maximum length of a sequence, if there is one. A symbol of PyTorch's, which stands for a
/// number in what `torch.export` records, is none: there is no memory beside it, and to ask for its value
/// would make what is recorded one for this number alone.
fn longest(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Option<i64>> {
    optional(value, |value| {
        let plain = value.is_exact_instance_of::<PyInt>();
        let is_symbol = || value.get_type().name().is_ok_and(|name| name == "SymInt");
        if !plain && is_symbol() { Ok(None) } else { integer(name, value).map(Some) }
    })
    .map(Option::flatten)
}

/// Reads a 64-bit integer.
pub(crate) fn integer(name: &str, value: &Bound<'_, PyAny>) -> PyResult<i64> {
    whole(value).map_err(|error| unfit(error, name, value, "a whole number of 64 bits"))
}

/// Reads a 64-bit integer. The number that Python returns with an error, -1, is what windows are
/// unbounded with, so whether there is an error is asked in the cheapest way.
#[inline]
fn whole(value: &Bound<'_, PyAny>) -> PyResult<i64> {
    // SAFETY: any object; an error is set where it is no number that fits.
    let number = unsafe { ffi::PyLong_AsLongLong(value.as_ptr()) };
    if number == -1 && PyErr::occurred(value.py()) {
        return Err(PyErr::fetch(value.py()));
    }
    Ok(number)
}

/// Reads a number that stays finite in 32 bits.
fn finite(name: &str, value: &Bound<'_, PyAny>) -> PyResult<f32> {
    let number = float(name, value)? as f32;
    if number.is_finite() { Ok(number) } else { Err(beyond(name, value, FINITE)) }
}

fn float(name: &str, value: &Bound<'_, PyAny>) -> PyResult<f64> {
    let plain = value.is_instance_of::<PyFloat>() || value.is_instance_of::<PyInt>();
    if !plain && wants_gradient(value) {
        return Err(beyond(name, value, "a number without a gradient (see torch.Tensor.item)"));
    }
    value.extract().map_err(|error| unfit(error, name, value, FINITE))
}

/// Returns whether it is a tensor of PyTorch that requires a gradient.
fn wants_gradient(value: &Bound<'_, PyAny>) -> bool {
    let requires = value.getattr(intern!(value.py(), "requires_grad"));
    requires.is_ok_and(|it| it.is_truthy().unwrap_or(false))
}

fn softcap(value: &Bound<'_, PyAny>) -> PyResult<Option<f32>> {
    let name = "softcap";
    cap(float(name, value)?).map_err(|expected| beyond(name, value, expected))
}

/// Returns the cap that a softcap argument asks for, or what was expected instead.
fn cap(softcap: f64) -> Result<Option<f32>, &'static str> {
    match softcap as f32 {
        // Before rounding: a cap that only underflows to zero in f32 is an error, not "no cap".
        _ if softcap == 0.0 => Ok(None),
        cap if !cap.is_finite() => Err(FINITE),
        cap if cap > 0.0 => Ok(Some(cap)),
        _ => Err("a positive number, or 0"),
    }
}

fn chunk(value: &Bound<'_, PyAny>) -> PyResult<usize> {
    let name = "attention_chunk";
    let chunk = integer(name, value)?;
    usize::try_from(chunk).map_err(|_| beyond(name, value, "no negative number"))
}

/// Reads a tuple, a list or a tensor of two numbers. A side is unbounded if it is negative or None;
/// both are if the argument is None.
fn window(value: &Bound<'_, PyAny>) -> PyResult<Window> {
    let (name, expected) = ("window_size", "two whole numbers, (left, right)");
    let side = |side: &Bound<'_, PyAny>| -> PyResult<Option<usize>> {
        if side.is_none() {
            return Ok(None);
        }
        let keys = whole(side).map_err(|error| unfit(error, name, value, expected))?;
        Ok(usize::try_from(keys).ok())
    };
    if let Ok(pair) = value.cast::<PyTuple>()
        && pair.len() == 2
    {
        let [left, right] = items(pair)?;
        return Ok((side(&left)?, side(&right)?));
    }
    if value.is_none() {
        return Ok((None, None));
    }
    let list = match value.cast::<PyList>() {
        Ok(list) => list.clone(),
        Err(_) => {
            let list = value.call_method0(intern!(value.py(), "tolist"));
            let list = list.map_err(|_| beyond(name, value, expected))?;
            list.cast_into::<PyList>().map_err(|_| beyond(name, value, expected))?
        }
    };
    match list.len() {
        2 => Ok((side(&list.get_item(0)?)?, side(&list.get_item(1)?)?)),
        _ => Err(beyond(name, value, expected)),
    }
}

/// Makes the error for a number that is too large, or for something that is no number.
#[cold]
fn unfit(error: PyErr, name: &str, value: &Bound<'_, PyAny>, expected: &str) -> PyErr {
    match error.is_instance_of::<PyOverflowError>(value.py()) {
        true => beyond(name, value, expected),
        false => wrong(name, value, expected),
    }
}

#[cold]
fn wrong(name: &str, value: &Bound<'_, PyAny>, expected: &str) -> PyErr {
    PyTypeError::new_err(format!("{name}={}, expected {expected}", shown(value)))
}

#[cold]
fn beyond(name: &str, value: &Bound<'_, PyAny>, expected: &str) -> PyErr {
    PyValueError::new_err(format!("{name}={}, expected {expected}", shown(value)))
}

/// Formats a value as one would type it if that is short, otherwise by its type.
fn shown(value: &Bound<'_, PyAny>) -> String {
    const LONGEST: usize = 60;
    // PyTorch's `repr` of a tensor reads its elements, even if its memory is gone.
    if value.hasattr(intern!(value.py(), "__dlpack__")).unwrap_or(true) {
        return format!("a {}", value.get_type());
    }
    let text = value.repr().map(|text| text.to_string()).unwrap_or_default();
    match text.is_empty() || text.len() > LONGEST || text.contains('\n') {
        true => format!("a {}", value.get_type()),
        false => text,
    }
}
