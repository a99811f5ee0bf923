//! Descale factors of 8-bit tensors, checked against the tensors that they scale.

use flashcore::{DType, Descale};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::view::{Element, Form, Memory, Place, View};

/// The call that descale factors have to fit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Factors {
    pub(crate) sequences: i64,
    /// Batch entries or pages, positions and heads of the keys.
    pub(crate) keys: [i64; 3],
    /// Whether the keys are packed and so have no batch dimension.
    pub(crate) packed: bool,
    /// Whether per-token factors are allowed; they are not for queries.
    pub(crate) tokens: bool,
    /// The device and the name of the call's first tensor.
    pub(crate) place: Place,
    pub(crate) first: &'static str,
}

impl Factors {
    /// Returns the factors as a (batch, length, heads, 1) view, and their granularity.
    ///
    /// The caller gives one number, one for each key head, one for each sequence and key head, or
    /// one for each token and key head in the shape of the keys without their last dimension. If
    /// there are as many packed keys as sequences, two dimensions are taken for sequences and
    /// heads.
    pub(crate) fn read(&self, name: &str, memory: &Memory) -> PyResult<(Descale, View)> {
        let Factors { sequences, keys: [count, rows, heads], packed, tokens, place, .. } = *self;
        memory.on(name, place, self.first)?;
        memory.of_type(name, Element::F32, "float32")?;
        let per_head = |strides: [i64; 3]| (Descale::PerHead, [sequences, 1, heads], strides);
        let (descale, [a, b, c], [x, y, z]) = match (memory.sizes(), memory.strides()) {
            ([] | [1], _) => per_head([0; 3]),
            (&[all], &[step]) if all == heads => per_head([0, 0, step]),
            (&[each, all], &[by_sequence, step]) if [each, all] == [sequences, heads] => {
                per_head([by_sequence, 0, step])
            }
            (&[each, all], &[by_row, step]) if tokens && packed && [each, all] == [rows, heads] => {
                (Descale::PerToken, [1, rows, heads], [0, by_row, step])
            }
            (&[a, b, c], &[x, y, z]) if tokens && !packed && [a, b, c] == self.keys => {
                (Descale::PerToken, [a, b, c], [x, y, z])
            }
            (given, _) => {
                let each = match (tokens, packed) {
                    (false, _) => String::new(),
                    (true, true) => format!(", or [{rows}, {heads}] for each token"),
                    (true, false) => format!(", or [{count}, {rows}, {heads}] for each token"),
                };
                return Err(PyValueError::new_err(format!(
                    "{name} has shape {given:?}, expected [], [{heads}] or [{sequences}, \
                     {heads}]{each}"
                )));
            }
        };
        let (sizes, strides) = ([a, b, c, 1], [x, y, z, 1]);
        let form = Form { sizes, strides, dtype: DType::F32, place };
        form.usable_strides(name)?;
        Ok((descale, View { address: memory.address, form }))
    }
}
