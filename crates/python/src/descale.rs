//! Descale factors of 8-bit tensors, checked against the tensors that they scale.

use flashcore::{DType, Descale, Shape, Strides};
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
        let [sizes, strides] = [memory.sizes, memory.strides].map(|of| of.map(|it| it as usize));
        let given = (&sizes[..memory.dimensions], &strides[..memory.dimensions]);
        let [batch, length, of] = self.keys.map(|size| size as usize);
        let keys = Shape::new(batch, length, of, 1);
        let found = Descale::of_factors(given, sequences as usize, keys, packed);
        let found = found.filter(|(descale, ..)| tokens || *descale == Descale::PerHead);
        let Some((descale, shape, Strides { batch, length, heads: step })) = found else {
            let each = match (tokens, packed) {
                (false, _) => String::new(),
                (true, true) => format!(", or [{rows}, {heads}] for each token"),
                (true, false) => format!(", or [{count}, {rows}, {heads}] for each token"),
            };
            return Err(PyValueError::new_err(format!(
                "{name} has shape {:?}, expected [], [{heads}] or [{sequences}, {heads}]{each}",
                memory.sizes()
            )));
        };
        let sizes = <[usize; 4]>::from(shape).map(|size| size as i64);
        let strides = [batch, length, step, 1].map(|stride| stride as i64);
        let form = Form { sizes, strides, dtype: DType::F32, place };
        form.usable_strides(name)?;
        Ok((descale, View { address: memory.address, form }))
    }
}
