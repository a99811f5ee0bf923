//! What the tensors ask for, and whether they go together.

use candle_core::{DType, Device, Error, Layout, Result, Tensor};
use flashcore::{InputLayouts, Problem, Shape, Strides};

use crate::{Options, wrap};

/// A problem, and how its tensors lie in memory.
pub(crate) struct Arguments {
    pub(crate) problem: Problem,
    pub(crate) layouts: InputLayouts,
}

impl Arguments {
    pub(crate) fn new(
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        options: &Options,
    ) -> Result<Self> {
        if !(query.device().is_cpu() || query.device().is_cuda()) {
            return Err(no_device(query.device()));
        }
        let dtype = element_type(query)?;
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
        let [query, key, value] = [
            layout("query", query.layout())?,
            layout("key", key.layout())?,
            layout("value", value.layout())?,
        ];
        let shapes = [query, key, value].map(|layout| layout.shape());
        let mut problem = problem(shapes)?.with_dtype(dtype).with_mask(options.mask);
        problem.softmax_scale = options.softmax_scale;
        problem.softcap = options.softcap;
        problem.validate().map_err(wrap)?;
        Ok(Arguments { problem, layouts: InputLayouts { query, key, value } })
    }
}

/// The sizes, if the shapes go together.
fn problem([query, key, value]: [Shape; 3]) -> Result<Problem> {
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

/// The shape and the strides of a tensor.
pub(crate) fn layout(name: &str, layout: &Layout) -> Result<flashcore::Layout> {
    let &[batch, length, heads, dim] = layout.dims() else {
        let given = format!("has shape {:?}", layout.dims());
        return Err(refusal(
            name,
            given,
            "four dimensions: (batch, length, heads, dim)".to_owned(),
        ));
    };
    let strides = layout.stride();
    if dim > 1 && strides[3] != 1 {
        let given = format!("has strides {strides:?}");
        let expected = "the last dimension without gaps: call `contiguous` on it".to_owned();
        return Err(refusal(name, given, expected));
    }
    let strides = Strides { batch: strides[0], length: strides[1], heads: strides[2] };
    flashcore::Layout::strided(Shape::new(batch, length, heads, dim), strides).map_err(wrap)
}

fn element_type(query: &Tensor) -> Result<flashcore::DType> {
    match query.dtype() {
        DType::F32 => Ok(flashcore::DType::F32),
        DType::F16 => Ok(flashcore::DType::F16),
        DType::BF16 => Ok(flashcore::DType::BF16),
        other => {
            Err(refusal("query", format!("has dtype {other:?}"), "F32, F16 or BF16".to_owned()))
        }
    }
}

/// There is no attention on a device.
pub(crate) fn no_device(device: &Device) -> Error {
    let hint = match device {
        Device::Cuda(_) => "the CPU: FlashCore was built without its feature `cuda`",
        _ => "the CPU or CUDA",
    };
    refusal("query", format!("is on {:?}", device.location()), hint.to_owned())
}

fn refusal(tensor: &str, given: String, expected: String) -> Error {
    Error::Msg(format!("attention: the {tensor} {given}, expected {expected}")).bt()
}
