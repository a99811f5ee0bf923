//! The backward attention call: its tensors, checked against those of the forward call.

use flashcore::gpu::{Gradients, Tensors};
use flashcore::{Descales, Problem};
use pyo3::exceptions::{PyNotImplementedError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::library::{Library, Named};
use crate::numbers::Numbers;
use crate::request::{Function, Request, TENSORS, address, named, needed};
use crate::rules::Rules;
use crate::view::{Element, Memory, View};

/// Names of the tensors that the forward call saved, and of their gradients; the last is None where
/// the log-sum-exps have none.
const SAVED: [&str; 4] = ["out", "softmax_lse", "dout", "dlse"];
/// Names of the tensors that gradients are written to.
const GRADIENTS: [&str; 4] = ["dq", "dk", "dv", "ds_aux"];

/// The tensors of a backward call: those of the forward call, its saved results with their
/// gradients, and the tensors that gradients are written to.
pub(crate) struct Given<'py> {
    pub(crate) forward: [Named<'py>; TENSORS],
    saved: [Named<'py>; SAVED.len()],
    gradients: [Named<'py>; GRADIENTS.len()],
    rules: Rules<'py>,
}

impl<'py> Given<'py> {
    pub(crate) fn new(
        function: Function,
        forward: &Bound<'py, PyTuple>,
        saved: &Bound<'py, PyTuple>,
        gradients: &Bound<'py, PyTuple>,
        rules: Rules<'py>,
    ) -> PyResult<Self> {
        Ok(Given {
            forward: named(function.names(), forward)?,
            saved: named(&SAVED, saved)?,
            gradients: named(&GRADIENTS, gradients)?,
            rules,
        })
    }
}

/// A backward call whose tensors were read.
#[derive(Debug)]
pub(crate) struct Backward {
    pub(crate) request: Request,
    pub(crate) output: View,
    /// The log-sum-exps, contiguous.
    pub(crate) lse: Memory,
    pub(crate) output_gradient: View,
    /// The gradient of the log-sum-exps, if they have one, contiguous.
    pub(crate) lse_gradient: Option<Memory>,
    /// The tensors that dQ, dK and dV are written to.
    pub(crate) gradients: [View; 3],
    /// The tensor that the gradient of the sinks is written to; present if there are sinks.
    pub(crate) sinks: Option<Memory>,
}

impl Backward {
    /// Reads the tensors of a call. Backward kernels accept fewer layouts than the forward pass,
    /// and autograd may pass a dO of any layout: tensors that they cannot walk are copied.
    pub(crate) fn read<'py>(
        library: &Library<'py>,
        function: Function,
        numbers: Numbers,
        given: &Given<'py>,
    ) -> PyResult<Self> {
        let mut request =
            Request::read(function, &given.forward, numbers, |tensor, name, whole| match whole {
                true => library.read_whole(tensor, name),
                false => library.read_walkable(tensor, name),
            })?;
        request.captured = given.rules.captured(|tensor, name| library.read(tensor, name))?;
        let rows = |it: &Named<'py>, packed: bool, walkable: bool| -> PyResult<View> {
            let memory = match walkable {
                true => library.read_walkable(needed(it)?, it.0)?,
                false => library.read(needed(it)?, it.0)?,
            };
            function.order(packed).view(it.0, &memory)
        };
        let (queries, keys) = (request.query_starts.is_some(), request.key_starts.is_some());
        let [output, lse, output_gradient, lse_gradient] = &given.saved;
        let [query, key, value, sinks] = &given.gradients;
        let whole = |it: &Named<'py>| library.read_whole(needed(it)?, it.0);
        let call = Backward {
            output: rows(output, queries, true)?,
            lse: whole(lse)?,
            output_gradient: rows(output_gradient, queries, true)?,
            lse_gradient: lse_gradient.1.is_some().then(|| whole(lse_gradient)).transpose()?,
            gradients: [
                rows(query, queries, false)?,
                rows(key, keys, false)?,
                rows(value, keys, false)?,
            ],
            sinks: request.sinks.is_some().then(|| whole(sinks)).transpose()?,
            request,
        };
        call.check()?;
        Ok(call)
    }

    /// Refuses tensors that do not fit those of the forward call.
    pub(crate) fn check(&self) -> PyResult<()> {
        let Request { query, key, value, .. } = &self.request;
        let [q, k, v, ..] = *self.request.names();
        let [batch, length, heads, _] = query.form.sizes;
        let output = [batch, length, heads, value.form.sizes[3]];
        let [query_gradient, key_gradient, value_gradient] = &self.gradients;
        for (name, view, expected, of) in [
            (SAVED[0], &self.output, output, q),
            (SAVED[2], &self.output_gradient, output, q),
            (GRADIENTS[0], query_gradient, query.form.sizes, q),
            (GRADIENTS[1], key_gradient, key.form.sizes, k),
            (GRADIENTS[2], value_gradient, value.form.sizes, v),
        ] {
            view.form.like(name, &query.form, q)?;
            view.form.usable(name)?;
            if view.form.sizes != expected {
                return Err(PyValueError::new_err(format!(
                    "{name} has {:?} entries, positions, heads and dims, expected {expected:?} to \
                     go with {of}",
                    view.form.sizes
                )));
            }
        }
        let (sizes, hidden) = self.request.sums();
        for (name, memory, expected) in [
            (SAVED[1], Some(&self.lse), &sizes[hidden..]),
            (SAVED[3], self.lse_gradient.as_ref(), &sizes[hidden..]),
            (GRADIENTS[3], self.sinks.as_ref(), &[heads]),
        ] {
            let Some(memory) = memory else { continue };
            memory.whole(name, Element::F32, "float32")?;
            memory.on(name, query.form.place, q)?;
            if memory.sizes() != expected {
                return Err(PyValueError::new_err(format!(
                    "{name} has shape {:?}, expected {expected:?} to go with {q}",
                    memory.sizes()
                )));
            }
        }
        Ok(())
    }

    /// Returns whether the gradients are zero since the query, key or value tensor is empty.
    pub(crate) fn is_zero(&self) -> PyResult<bool> {
        let Request { query, key, value, .. } = &self.request;
        let [query, key, value] = [query, key, value].map(|it| it.form.sizes.contains(&0));
        // The log-sum-exp of a row without keys is its sink.
        if !query && key && self.sinks.is_some() && self.lse_gradient.is_some() {
            return Err(PyNotImplementedError::new_err(
                "s_aux has no gradient by way of log-sum-exps where there are no keys",
            ));
        }
        Ok(query || key || value)
    }

    /// Returns the problem that the call poses.
    pub(crate) fn problem(&self, deterministic: bool) -> PyResult<Problem> {
        let mut problem = self.request.problem()?.backward();
        (problem.lse_gradient, problem.deterministic) =
            (self.lse_gradient.is_some(), deterministic);
        Ok(problem)
    }

    /// Returns the tensors in the form that the GPU library takes.
    pub(crate) fn tensors(&self) -> Tensors {
        let on_device = |view: &View| view.on_device(self.request.query.address);
        let [query, key, value] = self.gradients.each_ref().map(on_device);
        let output = on_device(&self.output_gradient);
        let mut tensors =
            self.request.tensors(Descales::default(), &self.output, Some(self.lse.address));
        let [sinks, lse] = [&self.sinks, &self.lse_gradient].map(|it| address(it.as_ref()));
        tensors.gradients = Some(Gradients { output, query, key, value, sinks, lse });
        tensors
    }
}
