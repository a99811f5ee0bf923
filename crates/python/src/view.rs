//! What a tensor is, whoever made it: where its elements are and how they lie there.

use std::fmt;

use flashcore::{DType, Mask, Problem, Strides};
use pyo3::exceptions::{PyNotImplementedError, PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::error;

/// Which memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Place {
    Host,
    Cuda(u32),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Host => f.write_str("the CPU"),
            Place::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// What the elements of a tensor are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Element {
    Float(DType),
    I32,
    /// A kind that nothing here takes, with its bits.
    Other(&'static str, u8),
}

impl Element {
    pub(crate) fn bytes(self) -> u64 {
        match self {
            Element::Float(dtype) => dtype.bytes() as u64,
            Element::I32 => 4,
            Element::Other(_, bits) => u64::from(bits).div_ceil(8),
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Element::Float(dtype) => dtype.fmt(f),
            Element::I32 => f.write_str("int32"),
            Element::Other(kind, bits) => write!(f, "{kind}{bits}"),
        }
    }
}

/// The dimensions that a tensor of any function here can have.
pub(crate) const MOST_DIMENSIONS: usize = 5;

/// A tensor in memory, whatever it is for. Strides are in elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    pub(crate) address: u64,
    pub(crate) dimensions: usize,
    pub(crate) sizes: [i64; MOST_DIMENSIONS],
    pub(crate) strides: [i64; MOST_DIMENSIONS],
    pub(crate) element: Element,
    pub(crate) place: Place,
}

impl Memory {
    pub(crate) fn sizes(&self) -> &[i64] {
        &self.sizes[..self.dimensions]
    }

    pub(crate) fn strides(&self) -> &[i64] {
        &self.strides[..self.dimensions]
    }

    /// Whether there are no gaps between elements.
    pub(crate) fn is_contiguous(&self) -> bool {
        is_contiguous(self.sizes(), self.strides())
    }

    /// The entries of a list of integers.
    pub(crate) fn list(&self, name: &str) -> PyResult<i64> {
        self.whole(name, Element::I32, "int32")?;
        match self.sizes() {
            [entries] => Ok(*entries),
            other => Err(PyValueError::new_err(format!(
                "{name} has {} dimensions, expected 1",
                other.len()
            ))),
        }
    }

    /// Rows and columns of a table of integers in the memory of the first tensor.
    pub(crate) fn table(&self, name: &str, place: Place, first: &str) -> PyResult<[i64; 2]> {
        self.whole(name, Element::I32, "int32")?;
        self.on(name, place, first)?;
        <[i64; 2]>::try_from(self.sizes()).map_err(|_| {
            PyValueError::new_err(format!("{name} has {} dimensions, expected 2", self.dimensions))
        })
    }

    /// Refuses what is no tensor of f32 without gaps in the memory of the first one.
    pub(crate) fn floats(&self, name: &str, place: Place, first: &str) -> PyResult<()> {
        self.whole(name, Element::Float(DType::F32), "float32")?;
        self.on(name, place, first)
    }

    /// Refuses other elements, and gaps between them.
    pub(crate) fn whole(&self, name: &str, element: Element, expected: &str) -> PyResult<()> {
        if self.element != element {
            return Err(PyTypeError::new_err(format!(
                "{name} has element type {}, expected {expected}",
                self.element
            )));
        }
        if !self.is_contiguous() {
            return Err(PyValueError::new_err(format!(
                "{name} has strides {:?}, expected no gaps between its elements",
                self.strides()
            )));
        }
        Ok(())
    }

    /// Refuses another memory than the first tensor's.
    pub(crate) fn on(&self, name: &str, place: Place, first: &str) -> PyResult<()> {
        if self.place != place {
            return Err(PyValueError::new_err(format!(
                "{name} is on {}, expected {place} like {first}",
                self.place
            )));
        }
        Ok(())
    }

    /// The element type of a tensor of floating-point numbers.
    pub(crate) fn float(&self, name: &str) -> PyResult<DType> {
        match self.element {
            Element::Float(dtype) => Ok(dtype),
            other => Err(PyTypeError::new_err(format!(
                "{name} has element type {other}, expected float16, bfloat16 or float32"
            ))),
        }
    }
}

/// Everything about a tensor but its address. Sizes and strides are those of
/// (batch, length, heads, dim), in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    pub(crate) sizes: [i64; 4],
    pub(crate) strides: [i64; 4],
    pub(crate) dtype: DType,
    pub(crate) place: Place,
}

impl Form {
    /// Refuses what no back end reads.
    pub(crate) fn usable(&self, name: &str) -> PyResult<()> {
        let empty = self.sizes.contains(&0);
        if !empty && self.sizes[3] > 1 && self.strides[3] != 1 {
            return Err(PyValueError::new_err(format!(
                "{name} has stride {} in its last dimension, expected 1: call .contiguous() or \
                 copy it",
                self.strides[3]
            )));
        }
        if self.strides.iter().any(|stride| *stride < 0) {
            return Err(PyValueError::new_err(format!(
                "{name} has a negative stride, expected none: copy it"
            )));
        }
        let dim = self.sizes[3];
        if !(8..=256).contains(&dim) || dim % 8 != 0 {
            return Err(PyValueError::new_err(format!(
                "{name} has head dim {dim}, expected a multiple of 8 up to 256"
            )));
        }
        Ok(())
    }

    /// Refuses another element type or memory than the first tensor has.
    pub(crate) fn like(&self, name: &str, other: &Form, first: &str) -> PyResult<()> {
        if self.place != other.place {
            return Err(PyValueError::new_err(format!(
                "{name} is on {}, expected {} like {first}",
                self.place, other.place
            )));
        }
        if self.dtype != other.dtype {
            return Err(PyTypeError::new_err(format!(
                "{name} has element type {}, expected {} like {first}",
                self.dtype, other.dtype
            )));
        }
        Ok(())
    }
}

/// A tensor in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View {
    pub(crate) address: u64,
    pub(crate) form: Form,
}

impl View {
    /// One of the three tensors of attention.
    pub(crate) fn new(memory: &Memory, convention: Convention, argument: usize) -> PyResult<View> {
        let dtype = memory.float(convention.names()[argument])?;
        let sizes = convention.four(argument, memory.sizes())?;
        let strides = convention.four(argument, memory.strides())?;
        let form = Form { sizes, strides, dtype, place: memory.place };
        Ok(View { address: memory.address, form })
    }
}

/// Whose conventions a call follows: the names of its arguments, the order of their dimensions,
/// and where a causal mask is anchored when the lengths differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Convention {
    /// `q, k, v` as (batch, length, heads, dim); the last query sees every key.
    FlashAttention,
    /// `query, key, value` as (batch, heads, length, dim); the first query sees one key.
    PyTorch,
}

impl Convention {
    pub(crate) fn names(self) -> [&'static str; 3] {
        match self {
            Convention::FlashAttention => ["q", "k", "v"],
            Convention::PyTorch => ["query", "key", "value"],
        }
    }

    fn dimensions(self) -> &'static str {
        match self {
            Convention::FlashAttention => "(batch, length, heads, head dim)",
            Convention::PyTorch => "(batch, heads, length, head dim)",
        }
    }

    /// Sizes or strides in our order from those in the caller's, and back.
    pub(crate) fn reorder(self, [a, b, c, d]: [i64; 4]) -> [i64; 4] {
        match self {
            Convention::FlashAttention => [a, b, c, d],
            Convention::PyTorch => [a, c, b, d],
        }
    }

    /// Four numbers from any, or an error that names the argument.
    pub(crate) fn four(self, argument: usize, numbers: &[i64]) -> PyResult<[i64; 4]> {
        let four = <[i64; 4]>::try_from(numbers).map_err(|_| {
            PyValueError::new_err(format!(
                "{} has {} dimensions, expected 4: {}",
                self.names()[argument],
                numbers.len(),
                self.dimensions()
            ))
        })?;
        Ok(self.reorder(four))
    }
}

/// What a call asks for besides its tensors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    pub(crate) convention: Convention,
    pub(crate) scale: Option<f64>,
    pub(crate) causal: bool,
}

impl Request {
    /// The problem that these tensors pose, or what is wrong with them.
    pub(crate) fn problem(&self, forms: &[Form; 3]) -> PyResult<Problem> {
        let names = self.convention.names();
        let [query, key, value] = forms;
        for (name, form) in names.iter().zip(forms) {
            form.like(name, query, names[0])?;
        }
        for (name, form) in names.iter().zip(forms) {
            form.usable(name)?;
        }
        self.expect(1, key.sizes, [query.sizes[0], key.sizes[1], key.sizes[2], query.sizes[3]])?;
        self.expect(2, value.sizes, [query.sizes[0], key.sizes[1], key.sizes[2], value.sizes[3]])?;
        let (heads, shared) = (query.sizes[2], key.sizes[2]);
        if heads == 0 || shared == 0 || heads % shared != 0 {
            return Err(PyValueError::new_err(format!(
                "{} has {heads} heads, expected a multiple of the {shared} of {}",
                names[0], names[1]
            )));
        }

        let mut problem = Problem::new(
            query.sizes[0] as usize,
            heads as usize,
            query.sizes[1] as usize,
            query.sizes[3] as usize,
        )
        .with_kv_heads(shared as usize)
        .with_key_length(key.sizes[1] as usize)
        .with_value_head_dim(value.sizes[3] as usize)
        .with_dtype(query.dtype);
        if self.causal {
            if self.convention == Convention::PyTorch {
                // Anchored at the first query and key. Keys behind the last query are seen by
                // nobody, and without them both anchors are one.
                if problem.query_length > problem.key_length {
                    return Err(PyNotImplementedError::new_err(format!(
                        "is_causal with {} queries and {} keys is not supported: expected no more \
                         queries than keys",
                        problem.query_length, problem.key_length
                    )));
                }
                problem = problem.clone().with_key_length(problem.query_length);
            }
            problem = problem.with_mask(Mask::Causal);
        }
        if let Some(scale) = self.scale {
            problem = problem.with_scale(scale as f32);
        }
        problem.validate().map_err(error::value)?;
        Ok(problem)
    }

    fn expect(&self, argument: usize, given: [i64; 4], expected: [i64; 4]) -> PyResult<()> {
        if given == expected {
            return Ok(());
        }
        let names = self.convention.names();
        let [given, expected] = [given, expected].map(|sizes| self.convention.reorder(sizes));
        Err(PyValueError::new_err(format!(
            "{} has shape {given:?}, expected {expected:?} to go with the other tensors",
            names[argument]
        )))
    }
}

/// Whether there are no gaps between elements. The stride of what there is one of means nothing.
pub(crate) fn is_contiguous(sizes: &[i64], strides: &[i64]) -> bool {
    let mut whole = 1;
    sizes.iter().zip(strides).rev().all(|(size, stride)| {
        let fits = *size <= 1 || *stride == whole;
        whole *= size.max(&1);
        fits
    })
}

/// Strides without gaps in the caller's order, given in ours.
pub(crate) fn contiguous(convention: Convention, sizes: [i64; 4]) -> [i64; 4] {
    let sizes = convention.reorder(sizes);
    let mut strides = [1; 4];
    for index in (0..3).rev() {
        strides[index] = strides[index + 1] * sizes[index + 1].max(1);
    }
    convention.reorder(strides)
}

/// The library's words for strides that were checked.
pub(crate) fn strides([batch, length, heads, _]: [i64; 4]) -> Strides {
    Strides { batch: batch as usize, length: length as usize, heads: heads as usize }
}
