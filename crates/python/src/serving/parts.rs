//! Attention over parts of the keys, to be put together: what a call gives, checked.

use flashcore::DType;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::view::{Element, Form, Memory, View};

/// Parts of the same shape.
#[derive(Debug)]
pub(crate) struct Parts {
    /// The outputs, (batch, length, heads, dim); packed ones have one batch entry.
    pub(crate) outputs: Vec<View>,
    /// The log-sum-exps in f32.
    pub(crate) lses: Vec<Lse>,
    /// The element type of the answer.
    pub(crate) dtype: DType,
    /// What the caller calls the first output.
    pub(crate) name: &'static str,
}

/// Where the log-sum-exps of a part are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lse {
    pub(crate) address: u64,
    /// From batch entry to batch entry, from row to row, from head to head.
    pub(crate) strides: [i64; 3],
}

impl Parts {
    /// Parts in one tensor, (parts, batch, length, heads, dim) in f32, and their log-sum-exps,
    /// (parts, batch, length, heads).
    /// What they are put into, where it is given, decides on its element type.
    pub(crate) fn stacked(
        output: &Memory,
        lse: &Memory,
        dtype: Option<DType>,
        out: Option<&View>,
    ) -> PyResult<Parts> {
        let [o, l] = ["out_partial", "lse_partial"];
        for (name, memory) in [(o, output), (l, lse)] {
            if memory.element != Element::Float(DType::F32) {
                return Err(PyTypeError::new_err(format!(
                    "{name} has element type {}, expected float32",
                    memory.element
                )));
            }
        }
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
            dtype: DType::F32,
            place: output.place,
        };
        form.usable(o)?;
        if let Some(View { form: out, .. }) = out {
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
            if out.place != form.place {
                return Err(PyValueError::new_err(format!(
                    "out is on {}, expected {} like {o}",
                    out.place, form.place
                )));
            }
        }
        let dtype = dtype.or(out.map(|out| out.form.dtype)).unwrap_or(DType::F32);
        let [lse_step, by_batch, by_row, by_head, _] = lse.strides;
        let at =
            |address: u64, step: i64, part: i64| address.wrapping_add((4 * step * part) as u64);
        Ok(Parts {
            outputs: (0..parts)
                .map(|part| View { address: at(output.address, step, part), form })
                .collect(),
            lses: (0..parts)
                .map(|part| Lse {
                    address: at(lse.address, lse_step, part),
                    strides: [by_batch, by_row, by_head],
                })
                .collect(),
            dtype,
            name: o,
        })
    }

    /// Parts that are tensors of their own, as attention gives them: (batch, length, heads, dim)
    /// with (batch, heads, length), or packed (rows, heads, dim) with (heads, rows). Without gaps.
    pub(crate) fn separate(parts: [(&Memory, &Memory); 2]) -> PyResult<Parts> {
        let names = [("out_a", "lse_a"), ("out_b", "lse_b")];
        let packed = parts[0].0.dimensions == 3;
        let mut outputs: Vec<View> = Vec::new();
        let mut lses = Vec::new();
        for ((o, l), (output, lse)) in names.into_iter().zip(parts) {
            let view = super::request::rows(o, output, packed)?;
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
            if lse.element != Element::Float(DType::F32) {
                return Err(PyTypeError::new_err(format!(
                    "{l} has element type {}, expected float32",
                    lse.element
                )));
            }
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
            lses.push(Lse { address: lse.address, strides });
        }
        let dtype = outputs[0].form.dtype;
        Ok(Parts { outputs, lses, dtype, name: names[0].0 })
    }
}
