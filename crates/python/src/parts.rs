//! Partial attention results over different keys, checked, to be combined into one.

use flashcore::DType;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::boundary::collect;
use crate::view::{Element, Form, Memory, Order, Place, View};

/// Partial results of the same shape.
#[derive(Debug)]
pub(crate) struct Parts {
    /// The outputs, (batch, length, heads, dim); packed ones have one batch entry.
    pub(crate) outputs: Vec<View>,
    /// The log-sum-exps in f32, (batch, length, heads, 1).
    pub(crate) lses: Vec<View>,
    /// The element type of the combined output.
    pub(crate) dtype: DType,
    /// The argument name of the first output.
    pub(crate) name: &'static str,
}

impl Parts {
    /// Reads parts stacked in one tensor, (parts, batch, length, heads, dim), and their f32
    /// log-sum-exps, (parts, batch, length, heads). The element type of the result is that of `out`
    /// if it is given.
    pub(crate) fn stacked(
        output: &Memory,
        lse: &Memory,
        dtype: Option<DType>,
        out: Option<&View>,
    ) -> PyResult<Parts> {
        let [o, l] = ["out_partial", "lse_partial"];
        let Element::Float(partial @ (DType::F32 | DType::F16 | DType::BF16)) = output.element
        else {
            let given = output.element;
            return Err(PyTypeError::new_err(format!(
                "{o} has element type {given}, expected float32, float16 or bfloat16"
            )));
        };
        output.forwards(o)?;
        lse.of_type(l, Element::F32, "float32")?;
        lse.forwards(l)?;
        lse.on(l, output.place, o)?;
        let &[parts, batch, length, heads, dim] = output.sizes() else {
            return Err(PyValueError::new_err(format!(
                "{o} has {} dimensions, expected 5: (parts, batch, length, heads, head dim)",
                output.dimensions
            )));
        };
        if lse.sizes() != [parts, batch, length, heads] {
            return Err(PyValueError::new_err(format!(
                "{l} has shape {:?}, expected {:?} to go with {o}",
                lse.sizes(),
                [parts, batch, length, heads]
            )));
        }
        if parts == 0 {
            return Err(PyValueError::new_err(format!("{o} has no parts, expected one at least")));
        }
        let [step, strides @ ..] = output.strides;
        let form = Form {
            sizes: [batch, length, heads, dim],
            strides,
            dtype: partial,
            place: output.place,
        };
        form.usable(o)?;
        if let Some(View { form: out, .. }) = out {
            if !matches!(out.dtype, DType::F32 | DType::F16 | DType::BF16) {
                return Err(PyTypeError::new_err(format!(
                    "out has element type {}, expected float32, float16 or bfloat16",
                    out.dtype
                )));
            }
            out.usable("out")?;
            if out.sizes != form.sizes {
                return Err(PyValueError::new_err(format!(
                    "out has shape {:?}, expected {:?} to go with {o}",
                    out.sizes, form.sizes
                )));
            }
            if let Some(dtype) = dtype.filter(|dtype| *dtype != out.dtype) {
                return Err(PyTypeError::new_err(format!(
                    "out has element type {}, expected {dtype} as out_dtype says",
                    out.dtype
                )));
            }
            out.place.same("out", form.place, o)?;
        }
        let dtype = dtype.or(out.map(|out| out.form.dtype)).unwrap_or(DType::F32);
        let [lse_step, by_batch, by_row, by_head, _] = lse.strides;
        let lse_form = sums(form.sizes, [by_batch, by_row, by_head], output.place);
        let all = |memory: &Memory, step: i64, form| -> PyResult<Vec<View>> {
            let Form { dtype, .. } = form;
            let bytes = dtype.bytes() as u64;
            let at = |part| memory.address.wrapping_add(bytes * (step as u64).wrapping_mul(part));
            let views = (0..parts as usize).map(|part| Ok(View { address: at(part as u64), form }));
            collect(views)
        };
        let (outputs, lses) = (all(output, step, form)?, all(lse, lse_step, lse_form)?);
        Ok(Parts { outputs, lses, dtype, name: o })
    }

    /// Reads parts in tensors of their own, as attention returns them: (batch, length, heads, dim)
    /// with (batch, heads, length), or packed (rows, heads, dim) with (heads, rows). All must be
    /// contiguous.
    pub(crate) fn separate(parts: [(&Memory, &Memory); 2]) -> PyResult<Parts> {
        let names = [("out_a", "lse_a"), ("out_b", "lse_b")];
        let packed = parts[0].0.dimensions == 3;
        let mut outputs: Vec<View> = Vec::new();
        let mut lses = Vec::new();
        for ((o, l), (output, lse)) in names.into_iter().zip(parts) {
            let view = Order::of(packed).view(o, output)?;
            view.form.usable(o)?;
            let first = outputs.first().map_or(view.form, |first| first.form);
            view.form.like(o, &first, names[0].0)?;
            if view.form.sizes != first.sizes {
                return Err(PyValueError::new_err(format!(
                    "{o} has shape {:?}, expected that of {}",
                    output.sizes(),
                    names[0].0
                )));
            }
            lse.of_type(l, Element::F32, "float32")?;
            lse.forwards(l)?;
            lse.on(l, output.place, o)?;
            let [batch, length, heads, _] = view.form.sizes;
            let expected = [batch, heads, length];
            let expected = &expected[usize::from(packed)..];
            if lse.sizes() != expected {
                return Err(PyValueError::new_err(format!(
                    "{l} has shape {:?}, expected {expected:?} to go with {o}",
                    lse.sizes()
                )));
            }
            let strides = match *lse.strides() {
                [by_head, by_row] => [0, by_row, by_head],
                _ => [lse.strides[0], lse.strides[2], lse.strides[1]],
            };
            outputs.push(view);
            let form = sums(view.form.sizes, strides, output.place);
            lses.push(View { address: lse.address, form });
        }
        let dtype = outputs[0].form.dtype;
        Ok(Parts { outputs, lses, dtype, name: names[0].0 })
    }
}

/// How log-sum-exps lie that go with outputs of these sizes.
pub(crate) fn sums([batch, length, heads, _]: [i64; 4], strides: [i64; 3], place: Place) -> Form {
    let [by_batch, by_row, by_head] = strides;
    let (sizes, strides) = ([batch, length, heads, 1], [by_batch, by_row, by_head, 1]);
    Form { sizes, strides, dtype: DType::F32, place }
}
