//! What the tensors ask for, and whether they go together.

use candle_core::{DType, Device, Error, Layout, Result, Tensor};
use flashcore::{InputLayouts, Problem, Shape, Strides};

use crate::placement::check_place;
use crate::{Options, Sequences, wrap};

/// All that a call asks for.
pub(crate) struct Call {
    pub(crate) problem: Problem,
    pub(crate) layouts: InputLayouts,
    /// Where sequences of unequal lengths are.
    pub(crate) sequences: Option<Sequences>,
    pub(crate) slopes: Option<Tensor>,
    pub(crate) sinks: Option<Tensor>,
}

impl Call {
    /// Every batch entry is a sequence, and all have the same lengths.
    pub(crate) fn plain(tensors: [&Tensor; 3], options: &Options) -> Result<Self> {
        let dtype = element_type(tensors)?;
        let [query, key, value] = tensors;
        let layouts = InputLayouts {
            query: layout("query", query.layout(), false)?,
            key: layout("key", key.layout(), false)?,
            value: layout("value", value.layout(), false)?,
        };
        let shapes = [layouts.query, layouts.key, layouts.value].map(|layout| layout.shape());
        let problem = plain_problem(shapes)?.with_dtype(dtype);
        Call { problem, layouts, sequences: None, slopes: None, sinks: None }
            .with_options(options, query.device())
    }

    /// Sequences have lengths of their own.
    pub(crate) fn of_sequences(
        tensors: [&Tensor; 3],
        sequences: &Sequences,
        options: &Options,
    ) -> Result<Self> {
        let dtype = element_type(tensors)?;
        let [query, key, value] = tensors;
        let device = query.device();
        let (queries, keys) = (&sequences.queries, &sequences.keys);
        let layouts = InputLayouts {
            query: layout("query", query.layout(), queries.is_packed())?,
            key: layout("key", key.layout(), keys.is_packed())?,
            value: layout("value", value.layout(), keys.is_packed())?,
        };
        let problem = sequences.problem(&layouts, device)?.with_dtype(dtype);
        let sequences = Some(sequences.clone());
        Call { problem, layouts, sequences, slopes: None, sinks: None }
            .with_options(options, device)
    }

    fn with_options(mut self, options: &Options, device: &Device) -> Result<Self> {
        self.problem.mask = options.mask;
        self.problem.softmax_scale = options.softmax_scale;
        self.problem.softcap = options.softcap;
        self.problem.alibi = options.slopes.is_some();
        self.problem.sinks = options.sinks.is_some();
        self.problem.validate().map_err(wrap)?;
        let (batch, heads) = (self.problem.batch, self.problem.query_heads);
        if let Some(slopes) = &options.slopes {
            // Of each head, or of each sequence and head.
            let of_each = [batch, heads];
            let shape = if slopes.rank() == 2 { &of_each[..] } else { &of_each[1..] };
            check_numbers("list of slopes", slopes, shape, device)?;
        }
        if let Some(sinks) = &options.sinks {
            check_numbers("list of sinks", sinks, &[heads], device)?;
        }
        self.slopes = options.slopes.clone();
        self.sinks = options.sinks.clone();
        Ok(self)
    }

    /// Whether a kernel for plain tensors alone will do.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_plain(&self) -> bool {
        self.sequences.is_none() && self.slopes.is_none() && self.sinks.is_none()
    }

    fn has_packed_queries(&self) -> bool {
        self.sequences.as_ref().is_some_and(|sequences| sequences.queries.is_packed())
    }

    /// The shape of the output: the query's with the values' head dim.
    pub(crate) fn output_shape(&self) -> candle_core::Shape {
        let query = self.layouts.query.shape();
        let dim = self.problem.value_head_dim;
        match self.has_packed_queries() {
            true => (query.length, query.heads, dim).into(),
            false => (query.batch, query.length, query.heads, dim).into(),
        }
    }

    /// The shape of the log-sum-exp.
    pub(crate) fn lse_shape(&self) -> candle_core::Shape {
        let query = self.layouts.query.shape();
        match self.has_packed_queries() {
            true => (query.heads, query.length).into(),
            false => (query.batch, query.heads, query.length).into(),
        }
    }
}

impl Sequences {
    /// The problem of the longest sequences that there can be.
    fn problem(&self, layouts: &InputLayouts, device: &Device) -> Result<Problem> {
        let [query, key, value] =
            [layouts.query, layouts.key, layouts.value].map(|layout| layout.shape());
        if key.dim != query.dim {
            let expected = format!("head dim {} like the query's {query}", query.dim);
            return Err(refusal("key", format!("has shape {key}"), expected));
        }
        if value != (Shape { dim: value.dim, ..key }) {
            let expected = format!("the shape of the key's {key} but for the head dim");
            return Err(refusal("value", format!("has shape {value}"), expected));
        }
        let (queries, keys) = (&self.queries, &self.keys);
        if !queries.serves_queries() {
            let expected = "padded or packed, without left padding";
            return Err(refusal("placement of queries", "is of keys", expected));
        }
        let count = queries.sequences(query, device)?;
        if !queries.is_packed() && count != query.batch {
            let given = format!("is of {count} sequences");
            let expected = format!("{} like the query's {query}", query.batch);
            return Err(refusal("placement of queries", given, expected));
        }
        let keys_of = keys.sequences(key, device)?;
        if keys_of != count {
            let given = format!("is of {keys_of} sequences");
            return Err(refusal("placement of keys", given, format!("{count} like the queries'")));
        }
        Ok(Problem::new(count, query.heads, queries.longest(query), query.dim)
            .with_kv_heads(key.heads)
            .with_key_length(keys.longest(key))
            .with_value_head_dim(value.dim))
    }
}

/// The sizes, if the shapes go together.
fn plain_problem([query, key, value]: [Shape; 3]) -> Result<Problem> {
    let problem = Problem::new(query.batch, query.heads, query.length, query.dim)
        .with_kv_heads(key.heads)
        .with_key_length(key.length)
        .with_value_head_dim(value.dim);
    if key != problem.key_shape() {
        let expected = format!(
            "batch {} and head dim {} like the query's {query}",
            problem.batch, problem.head_dim
        );
        return Err(refusal("key", format!("has shape {key}"), expected));
    }
    if value != problem.value_shape() {
        let expected = format!("batch, length and heads of the key's {key}");
        return Err(refusal("value", format!("has shape {value}"), expected));
    }
    Ok(problem)
}

/// The shape and the strides of a tensor; packed rows are one batch entry.
pub(crate) fn layout(name: &str, layout: &Layout, packed: bool) -> Result<flashcore::Layout> {
    let (shape, strides) = match (layout.dims(), layout.stride()) {
        (&[batch, length, heads, dim], &[of_batch, of_length, of_heads, _]) if !packed => {
            let strides = Strides { batch: of_batch, length: of_length, heads: of_heads };
            (Shape::new(batch, length, heads, dim), strides)
        }
        (&[rows, heads, dim], &[of_rows, of_heads, _]) if packed => {
            let batch = of_rows.saturating_mul(rows);
            let strides = Strides { batch, length: of_rows, heads: of_heads };
            (Shape::new(1, rows, heads, dim), strides)
        }
        (dims, _) => {
            let expected = match packed {
                true => "three dimensions: (rows, heads, dim)",
                false => "four dimensions: (batch, length, heads, dim)",
            };
            return Err(refusal(name, format!("has shape {dims:?}"), expected));
        }
    };
    if shape.dim > 1 && layout.stride().last() != Some(&1) {
        let given = format!("has strides {:?}", layout.stride());
        let expected = "the last dimension without gaps: call `contiguous` on it";
        return Err(refusal(name, given, expected));
    }
    flashcore::Layout::strided(shape, strides).map_err(wrap)
}

/// The type that all three have, if they are on one device that is served.
fn element_type([query, key, value]: [&Tensor; 3]) -> Result<flashcore::DType> {
    if !(query.device().is_cpu() || query.device().is_cuda()) {
        return Err(no_device(query.device()));
    }
    let dtype = match query.dtype() {
        DType::F32 => flashcore::DType::F32,
        DType::F16 => flashcore::DType::F16,
        DType::BF16 => flashcore::DType::BF16,
        other => {
            return Err(refusal("query", format!("has dtype {other:?}"), "F32, F16 or BF16"));
        }
    };
    for (name, tensor) in [("key", key), ("value", value)] {
        // As candle does: two handles of one GPU are one device.
        let (given, expected) = (tensor.device().location(), query.device().location());
        if given != expected {
            let expected = format!("{expected:?} like the query");
            return Err(refusal(name, format!("is on {given:?}"), expected));
        }
        if tensor.dtype() != query.dtype() {
            let expected = format!("{:?} like the query", query.dtype());
            return Err(refusal(name, format!("has dtype {:?}", tensor.dtype()), expected));
        }
    }
    Ok(dtype)
}

/// Refuse slopes or sinks of another type or shape, and those that a gradient would be lost for.
fn check_numbers(name: &str, tensor: &Tensor, shape: &[usize], device: &Device) -> Result<()> {
    if tensor.dtype() != DType::F32 {
        return Err(refusal(name, format!("has dtype {:?}", tensor.dtype()), "F32"));
    }
    if tensor.track_op() {
        return Err(refusal(name, "depends on a variable", "none: `detach` it"));
    }
    check_place(name, tensor, shape, device)
}

/// There is no attention on a device.
pub(crate) fn no_device(device: &Device) -> Error {
    let hint = match device {
        Device::Cuda(_) => "the CPU: FlashCore was built without its feature `cuda`",
        _ => "the CPU or CUDA",
    };
    refusal("query", format!("is on {:?}", device.location()), hint)
}

pub(crate) fn refusal(
    tensor: &str,
    given: impl Into<String>,
    expected: impl Into<String>,
) -> Error {
    let (given, expected) = (given.into(), expected.into());
    Error::Msg(format!("attention: the {tensor} {given}, expected {expected}")).bt()
}
