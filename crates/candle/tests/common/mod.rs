//! Tensors, and the plain algorithm with candle's operations.
#![allow(dead_code)] // Each test uses some of it.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use flashcore_candle::Options;

/// Sequences, queries and keys; query and key heads; head dims of keys and of values.
pub(crate) const SIZES: [([usize; 3], [usize; 2], [usize; 2]); 4] = [
    ([2, 33, 33], [4, 4], [64, 64]),
    ([1, 20, 150], [6, 2], [128, 128]),
    ([3, 1, 70], [4, 1], [32, 32]),
    ([1, 130, 131], [2, 2], [48, 80]),
];

/// Standard normal tensors of one type: query, key and value.
pub(crate) fn tensors(
    dtype: DType,
    [batch, queries, keys]: [usize; 3],
    [heads, kv_heads]: [usize; 2],
    [dim, value_dim]: [usize; 2],
) -> Result<[Tensor; 3]> {
    let random = |shape: [usize; 4]| {
        Tensor::randn(0f32, 1., shape.as_slice(), &Device::Cpu)?.to_dtype(dtype)
    };
    Ok([
        random([batch, queries, heads, dim])?,
        random([batch, keys, kv_heads, dim])?,
        random([batch, keys, kv_heads, value_dim])?,
    ])
}

/// The plain algorithm with candle's operations, in f64: output and log-sum-exp. Its gradients are
/// candle's.
pub(crate) fn plain(
    [query, key, value]: &[Tensor; 3],
    options: &Options,
) -> Result<(Tensor, Tensor)> {
    let (_, queries, heads, dim) = query.dims4()?;
    let (batch, keys, kv_heads, _) = key.dims4()?;
    let wide = |tensor: &Tensor| tensor.to_dtype(DType::F64)?.transpose(1, 2)?.contiguous();
    let repeat = |tensor: Tensor| {
        let (_, _, _, dim) = tensor.dims4()?;
        let group = heads / kv_heads;
        let shape = (batch, kv_heads, group, keys, dim);
        tensor.unsqueeze(2)?.broadcast_as(shape)?.contiguous()?.reshape((batch, heads, keys, dim))
    };
    let (query, key, value) = (wide(query)?, repeat(wide(key)?)?, repeat(wide(value)?)?);
    let scale = options.softmax_scale.map_or(1. / (dim as f64).sqrt(), f64::from);
    let mut scores = (query.matmul(&key.t()?.contiguous()?)? * scale)?;
    if let Some(cap) = options.softcap.map(f64::from) {
        scores = ((scores / cap)?.tanh()? * cap)?;
    }
    let per_head = |list: &Option<Tensor>| match list {
        Some(list) => list.to_dtype(DType::F64)?.to_vec1(),
        None => Ok(vec![0.; heads]),
    };
    let mut bias = Vec::with_capacity(heads * queries * keys);
    for slope in per_head(&options.slopes)? {
        for row in 0..queries {
            let visible = options.mask.visible_keys(row, queries, keys);
            bias.extend((0..keys).map(|column| match visible.contains(&column) {
                true => -slope * (row + keys).abs_diff(column + queries) as f64,
                false => f64::NEG_INFINITY,
            }));
        }
    }
    let bias = Tensor::from_vec(bias, (heads, queries, keys), &Device::Cpu)?;
    let scores = scores.broadcast_add(&bias)?;
    let maximum = scores.max_keepdim(D::Minus1)?.detach();
    let weights = scores.broadcast_sub(&maximum)?.exp()?;
    let mut sum = weights.sum_keepdim(D::Minus1)?;
    if options.sinks.is_some() {
        let sinks = Tensor::new(per_head(&options.sinks)?, &Device::Cpu)?.reshape((heads, 1, 1))?;
        sum = (sum + maximum.neg()?.broadcast_add(&sinks)?.exp()?)?;
    }
    let output = weights.broadcast_div(&sum)?.matmul(&value)?.transpose(1, 2)?;
    let lse = (maximum + sum.log()?)?.squeeze(D::Minus1)?;
    Ok((output.contiguous()?, lse))
}

/// The largest difference between two tensors.
pub(crate) fn distance(one: &Tensor, other: &Tensor) -> Result<f64> {
    let wide = |tensor: &Tensor| tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64);
    (wide(one)? - wide(other)?)?.abs()?.flatten_all()?.max(0)?.to_scalar()
}

/// The first line of the message, without candle's backtrace.
pub(crate) fn refusal<T: std::fmt::Debug>(result: Result<T>) -> String {
    let text = result.expect_err("wrong use is refused").to_string();
    text.lines().next().unwrap_or_default().to_owned()
}

/// Variables with these values.
pub(crate) fn variables(inputs: &[Tensor; 3]) -> Result<[Var; 3]> {
    let [query, key, value] = inputs.each_ref().map(Var::from_tensor);
    Ok([query?, key?, value?])
}

/// The gradients of a weighted sum of what a function makes of query, key and value. The weights
/// depend on the shape of that alone.
pub(crate) fn gradients(
    inputs: &[Tensor; 3],
    function: impl Fn(&[Tensor; 3]) -> Result<Tensor>,
) -> Result<[Tensor; 3]> {
    let variables = variables(inputs)?;
    let output = function(&variables.each_ref().map(|variable| variable.as_tensor().clone()))?;
    let weights: Vec<f64> = (0..output.elem_count())
        .map(|index| ((index * 7919 % 1024) as f64 - 512.) / 512.)
        .collect();
    let weights = Tensor::from_vec(weights, output.shape(), &Device::Cpu)?;
    let weights = weights.to_dtype(output.dtype())?.to_device(output.device())?;
    let store = output.mul(&weights)?.sum_all()?.backward()?;
    Ok(variables.each_ref().map(|variable| store.get(variable).expect("a gradient").clone()))
}

/// The largest difference between two tensors, as a part of the largest number of the second.
pub(crate) fn relative(found: &Tensor, expected: &Tensor) -> Result<f64> {
    let largest =
        expected.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.abs()?.flatten_all()?.max(0)?;
    Ok(distance(found, expected)? / largest.to_scalar::<f64>()?)
}
