//! Checks of a call's tensors, and the problem that they pose.

use candle_core::{DType, Device, Error, Layout, Result, Tensor};
use flashcore::plan::Arrangement;
use flashcore::{Alibi, DTypes, Descale, Descales, Lists, Problem, Shape, Strides};

use crate::placement::check_place;
use crate::{Options, Sequences, wrap};

/// A checked call.
pub(crate) struct Call {
    pub(crate) problem: Problem,
    /// Layouts of query, key and value.
    pub(crate) layouts: [flashcore::Layout; 3],
    /// Offsets of query, key and value in their memory, in bytes.
    pub(crate) offsets: [u64; 3],
    pub(crate) sequences: Sequences,
    pub(crate) slopes: Option<Tensor>,
    pub(crate) sinks: Option<Tensor>,
    /// Descale factors of 8-bit tensors, with their layouts as (batch, length, heads, 1).
    pub(crate) descales: Descales<Option<(Tensor, flashcore::Layout)>>,
}

impl Call {
    pub(crate) fn new(
        tensors: [&Tensor; 3],
        sequences: &Sequences,
        options: &Options,
    ) -> Result<Self> {
        let [query, key, value] = tensors;
        let device = query.device();
        if !(device.is_cpu() || device.is_cuda()) {
            return Err(no_device(device));
        }
        let dtypes = [
            small_element("query", query)?,
            small_element("key", key)?,
            small_element("value", value)?,
        ];
        for ((name, tensor), dtype) in
            [("key", key), ("value", value)].into_iter().zip(&dtypes[1..])
        {
            match dtype.is_8_bit() {
                true => check_device((name, tensor), ("query", query))?,
                false => check_alike((name, tensor), ("query", query))?,
            }
        }
        let [of_query, of_key, of_value] = dtypes;
        let packed_keys = sequences.keys.is_packed();
        let layouts = [
            layout("query", query.layout(), sequences.queries.is_packed())?,
            layout("key", key.layout(), packed_keys)?,
            layout("value", value.layout(), packed_keys)?,
        ];
        let problem = sequences.problem(layouts.map(|layout| layout.shape()), device)?;
        let mut problem = problem.with_mask(options.mask);
        problem.dtypes = DTypes { key: of_key, value: of_value, ..DTypes::inputs(of_query) };
        let factors = Descales {
            query: ("q_descale", &options.q_descale),
            key: ("k_descale", &options.k_descale),
            value: ("v_descale", &options.v_descale),
        };
        let (keys, batch) = (layouts[1].shape(), problem.batch);
        let factors = factors.try_map(|(name, given)| match given {
            Some(given) => factors_of(name, given, batch, keys, packed_keys, device).map(Some),
            None => Ok(None),
        })?;
        problem.descales = factors.each_ref().map(|it| match it {
            Some((descale, ..)) => *descale,
            None => Descale::None,
        });
        let descales = factors.map(|it| it.map(|(_, tensor, layout)| (tensor, layout)));
        problem.scores = options.scores();
        problem.lse = options.lse;
        problem.validate().map_err(wrap)?;
        let of_each = [problem.batch, problem.query_heads];
        if let Some(slopes) = &options.slopes {
            let per_head = usize::from(problem.scores.alibi == Alibi::PerHead);
            check_numbers("list of slopes", slopes, &of_each[per_head..], device)?;
        }
        if let Some(sinks) = &options.sinks {
            check_numbers("list of sinks", sinks, &of_each[1..], device)?;
        }
        Ok(Call {
            problem,
            layouts,
            offsets: std::array::from_fn(|at| {
                (tensors[at].layout().start_offset() * dtypes[at].bytes()) as u64
            }),
            sequences: sequences.clone(),
            slopes: options.slopes.clone(),
            sinks: options.sinks.clone(),
            descales,
        })
    }

    /// Returns the strides and alignments of the tensors, with a contiguous output: what the choice
    /// of a kernel depends on. Allocations themselves are aligned, so only offsets matter.
    pub(crate) fn arrangement(&self) -> Result<Arrangement> {
        let output = flashcore::Layout::contiguous(self.problem.output_shape()).map_err(wrap)?;
        let [query, key, value] = self.layouts.map(|layout| layout.strides());
        let aligned = self.offsets.iter().all(|offset| offset.is_multiple_of(16));
        let output = output.strides();
        let strides = |it: &Option<(Tensor, flashcore::Layout)>| {
            it.as_ref().map_or_else(Strides::default, |(_, layout)| layout.strides())
        };
        let descales = self.descales.each_ref().map(strides);
        Ok(Arrangement { query, key, value, output, gradients: None, descales, aligned })
    }

    /// Refuses gradients of a cache, whose entries and pages sequences may share.
    pub(crate) fn check_gradients(&self) -> Result<()> {
        let paged = matches!(self.problem.keys, flashcore::Storage::Paged { .. });
        match paged || self.problem.lists.batch_index {
            true => {
                let given = "is of a cache, which has no gradients";
                Err(refusal("placement of keys", given, "padded or packed"))
            }
            false => Ok(()),
        }
    }

    /// Returns the shape of the output: the query's with the values' head dim.
    pub(crate) fn output_shape(&self) -> candle_core::Shape {
        let Shape { batch, length, heads, dim } = self.problem.output_shape();
        match self.problem.queries.is_packed() {
            true => (length, heads, dim).into(),
            false => (batch, length, heads, dim).into(),
        }
    }

    /// Returns the shape of the log-sum-exp.
    pub(crate) fn lse_shape(&self) -> candle_core::Shape {
        let Shape { batch, length, heads, .. } = self.problem.output_shape();
        match self.problem.queries.is_packed() {
            true => (heads, length).into(),
            false => (batch, heads, length).into(),
        }
    }
}

impl Sequences {
    /// Returns the problem with the maximum lengths, if the tensors and placements are consistent.
    fn problem(&self, [query, key, value]: [Shape; 3], device: &Device) -> Result<Problem> {
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
        if key.dim != query.dim || (keys.is_plain() && key.batch != count) {
            let batch = if keys.is_plain() { format!("batch {count} and ") } else { String::new() };
            let expected = format!("{batch}head dim {} like the query's {query}", query.dim);
            return Err(refusal("key", format!("has shape {key}"), expected));
        }
        if value != (Shape { dim: value.dim, ..key }) {
            let expected = format!("batch, length and heads of the key's {key}");
            return Err(refusal("value", format!("has shape {value}"), expected));
        }
        let of_keys = keys.sequences(key, device)?;
        if of_keys != count {
            let given = format!("is of {of_keys} sequences");
            return Err(refusal("placement of keys", given, format!("{count} like the queries'")));
        }
        Ok(Problem::new(count, query.heads, queries.longest(query), query.dim)
            .with_kv_heads(key.heads)
            .with_key_length(keys.longest(key))
            .with_value_head_dim(value.dim)
            .with_storage(queries.storage(query, count), keys.storage(key, count))
            .with_lists(Lists {
                query_lengths: queries.lengths.is_some(),
                key_lengths: keys.lengths.is_some(),
                left_padding: keys.left_padding.is_some(),
                batch_index: keys.batch_index().is_some(),
            }))
    }
}

/// Returns the shape and the strides of a tensor; packed rows count as one batch entry.
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

/// Returns the element type of a tensor, if it is one of the wide types.
pub(crate) fn element(name: &str, tensor: &Tensor) -> Result<flashcore::DType> {
    match tensor.dtype() {
        DType::F32 => Ok(flashcore::DType::F32),
        DType::F16 => Ok(flashcore::DType::F16),
        DType::BF16 => Ok(flashcore::DType::BF16),
        other => Err(refusal(name, format!("has dtype {other:?}"), "F32, F16 or BF16")),
    }
}

/// Like [`element`], but also accepts the 8-bit type, which only queries, keys and values may have.
pub(crate) fn small_element(name: &str, tensor: &Tensor) -> Result<flashcore::DType> {
    match tensor.dtype() {
        DType::F8E4M3 => Ok(flashcore::DType::E4M3),
        DType::F32 | DType::F16 | DType::BF16 => element(name, tensor),
        other => Err(refusal(name, format!("has dtype {other:?}"), "F32, F16, BF16 or F8E4M3")),
    }
}

/// Returns descale factors with their layout as (batch, length, heads, 1), and their granularity:
/// one number, one per key head, one per sequence and key head, or for keys and values one per
/// token and head, in the shape of the keys without the last dimension.
pub(crate) fn factors_of(
    name: &str,
    factors: &Tensor,
    sequences: usize,
    keys: Shape,
    packed: bool,
    device: &Device,
) -> Result<(Descale, Tensor, flashcore::Layout)> {
    check_single(name, factors)?;
    check_location(name, factors, device, " like the query")?;
    let given = (factors.dims(), factors.stride());
    let found = Descale::of_factors(given, sequences, keys, packed);
    let (descale, shape, strides) = found.ok_or_else(|| {
        let heads = keys.heads;
        let expected = format!(
            "[], [{heads}], [{sequences}, {heads}], or the keys' shape without its last dimension"
        );
        refusal(name, format!("has shape {:?}", factors.dims()), expected)
    })?;
    let layout = flashcore::Layout::strided(shape, strides).map_err(wrap)?;
    Ok((descale, factors.clone(), layout))
}

/// Refuses a tensor of another type or on another device than a reference tensor.
pub(crate) fn check_alike(
    (name, tensor): (&str, &Tensor),
    (like, other): (&str, &Tensor),
) -> Result<()> {
    check_device((name, tensor), (like, other))?;
    let (given, expected) = (tensor.dtype(), other.dtype());
    if given != expected {
        let expected = format!("{expected:?} like the {like}");
        return Err(refusal(name, format!("has dtype {given:?}"), expected));
    }
    Ok(())
}

/// Refuses a tensor on another device than a reference tensor.
pub(crate) fn check_device(
    (name, tensor): (&str, &Tensor),
    (like, other): (&str, &Tensor),
) -> Result<()> {
    check_location(name, tensor, other.device(), &format!(" like the {like}"))
}

/// Refuses a tensor that is not on a device, of which `like` says whose it is.
pub(crate) fn check_location(
    name: &str,
    tensor: &Tensor,
    device: &Device,
    like: &str,
) -> Result<()> {
    // As in candle, two handles of one GPU count as one device.
    let (given, expected) = (tensor.device().location(), device.location());
    match given == expected {
        true => Ok(()),
        false => Err(refusal(name, format!("is on {given:?}"), format!("{expected:?}{like}"))),
    }
}

/// Like [`check_single`], and refuses another shape, gaps, and another device.
pub(crate) fn check_numbers(
    name: &str,
    tensor: &Tensor,
    shape: &[usize],
    device: &Device,
) -> Result<()> {
    check_single(name, tensor)?;
    check_place(name, tensor, shape, device)
}

/// Refuses other numbers than f32, and those whose gradient would be lost.
fn check_single(name: &str, tensor: &Tensor) -> Result<()> {
    match tensor.dtype() {
        DType::F32 => check_detached(name, tensor),
        other => Err(refusal(name, format!("has dtype {other:?}"), "F32")),
    }
}

pub(crate) fn check_detached(name: &str, tensor: &Tensor) -> Result<()> {
    match tensor.track_op() {
        true => Err(refusal(name, "depends on a variable", "none: `detach` it")),
        false => Ok(()),
    }
}

/// Returns the error for a device without attention.
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
