//! Attention over [candle](candle_core) tensors, on the CPU and on NVIDIA GPUs.
//!
//! [`attend`] is the one function, with [`Options`] for what is not plain attention:
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use flashcore_candle::{Mask, Options, attend};
//!
//! # fn main() -> candle_core::Result<()> {
//! let device = Device::Cpu;
//! // (batch, length, heads, dim); eight query heads share two key/value heads.
//! let query = Tensor::randn(0f32, 1., (1, 100, 8, 64), &device)?;
//! let key = Tensor::randn(0f32, 1., (1, 120, 2, 64), &device)?;
//! let value = Tensor::randn(0f32, 1., (1, 120, 2, 64), &device)?;
//!
//! let options = Options { mask: Mask::Causal, lse: true, ..Options::default() };
//! let attention = attend(&query, &key, &value, &options)?;
//! assert_eq!(attention.output.dims(), [1, 100, 8, 64]);
//! assert_eq!(attention.lse.unwrap().dims(), [1, 8, 100]);
//! # Ok(())
//! # }
//! ```
//!
//! [`flash_attn`] has the name, the arguments and the meaning of the function in
//! `candle-flash-attn`, so that a program changes one import; it also works on the CPU.
//!
//! # What the tensors may be
//!
//! Four dimensions (batch, length, heads, dim), f32, f16 or bf16, all three of one type and on one
//! device. Any strides, as long as the elements of a vector are adjacent. Anything else is an error
//! that names the tensor and what was expected of it.
//!
//! # Gradients
//!
//! There is no backward pass yet. An output that depends on a variable says so when `backward`
//! reaches it; it never lacks a gradient silently. The log-sum-exp of such tensors is refused.
//!
//! # On a GPU
//!
//! Build with the feature `cuda`. The kernel is put on the stream of the tensors' candle device, and
//! the output is allocated by candle. What was chosen and compiled for a problem is kept for the
//! next call, so a repeated call costs microseconds. [`plan`] says which kernel serves a call, and
//! why not the others.

// Borrowing candle's stream and memory is a promise to the driver.
#![cfg_attr(feature = "cuda", allow(unsafe_code))]

mod arguments;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod operation;

use candle_core::op::BackpropOp;
use candle_core::{Result, Storage, Tensor};

pub use flashcore::{Mask, Plan};

use crate::arguments::Arguments;
use crate::operation::Operation;

/// What is to be computed. The default is plain attention: every key visible, scores scaled by
/// `1 / sqrt(head dim)`, no log-sum-exp.
///
/// Name the fields that differ and take the rest from the default, since more will come:
///
/// ```
/// use flashcore_candle::{Mask, Options};
///
/// let options = Options { mask: Mask::Causal, ..Options::default() };
/// ```
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Options {
    /// Which keys a query sees.
    pub mask: Mask,
    /// Factor of the scores before the softmax; `1 / sqrt(head dim)` when `None`.
    pub softmax_scale: Option<f32>,
    /// Scores are brought below this by a hyperbolic tangent, after they are scaled.
    pub softcap: Option<f32>,
    /// Whether the log-sum-exp of the scores is wanted.
    pub lse: bool,
}

/// The result of [`attend`].
#[derive(Debug, Clone)]
pub struct Attention {
    /// (batch, query length, query heads, value head dim), without gaps, of the query's type.
    pub output: Tensor,
    /// The natural logarithm of each row's sum of exponentials of scaled scores, (batch, query
    /// heads, query length) in f32, if [`Options::lse`] asked for it; minus infinity for a row
    /// that sees no key.
    pub lse: Option<Tensor>,
}

/// `softmax(scale * query key^T + mask) value`, over every batch entry and query head.
///
/// `query` is (batch, query length, query heads, head dim), `key` (batch, key length, key/value
/// heads, head dim) and `value` (batch, key length, key/value heads, value head dim). The number of
/// query heads is a multiple of the number of key/value heads.
pub fn attend(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    options: &Options,
) -> Result<Attention> {
    let arguments = Arguments::new(query, key, value, options)?;
    let tracked = [("query", query), ("key", key), ("value", value)]
        .into_iter()
        .find(|(_, tensor)| tensor.track_op());
    if !options.lse {
        let operation = Operation::new(arguments.problem);
        let output = match tracked {
            Some(_) => query.apply_op3(key, value, operation)?,
            None => query.apply_op3_no_bwd(key, value, &operation)?,
        };
        return Ok(Attention { output, lse: None });
    }
    if let Some((name, _)) = tracked {
        candle_core::bail!(
            "the log-sum-exp has no gradient, and the {name} depends on a variable: detach it, or \
             do without the log-sum-exp"
        );
    }
    let shape = (query.dim(0)?, query.dim(2)?, query.dim(1)?);
    let operation = Operation::with_lse(arguments.problem);
    let output = query.apply_op3_no_bwd(key, value, &operation)?;
    let lse: Storage = operation.into_lse()?;
    let lse = Tensor::from_storage(lse, shape, BackpropOp::none(), false);
    Ok(Attention { output, lse: Some(lse) })
}

/// Attention under the name and with the arguments of the function in `candle-flash-attn`.
///
/// Tensors are (batch, length, heads, dim). With `causal`, the last query sees every key, whatever
/// the lengths.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use flashcore_candle::flash_attn;
///
/// # fn main() -> candle_core::Result<()> {
/// let query = Tensor::randn(0f32, 1., (2, 10, 4, 32), &Device::Cpu)?;
/// let key = Tensor::randn(0f32, 1., (2, 10, 4, 32), &Device::Cpu)?;
/// let value = Tensor::randn(0f32, 1., (2, 10, 4, 32), &Device::Cpu)?;
/// let output = flash_attn(&query, &key, &value, 1. / 32f32.sqrt(), true)?;
/// assert_eq!(output.dims(), [2, 10, 4, 32]);
/// # Ok(())
/// # }
/// ```
pub fn flash_attn(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let mask = if causal { Mask::Causal } else { Mask::None };
    let softmax_scale = Some(softmax_scale);
    let options = Options { mask, softmax_scale, ..Options::default() };
    Ok(attend(q, k, v, &options)?.output)
}

/// Which kernel [`attend`] runs for these tensors, and why not the others. Computes nothing.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use flashcore_candle::{Options, plan};
///
/// # fn main() -> candle_core::Result<()> {
/// let query = Tensor::zeros((1, 100, 8, 64), DType::F16, &Device::Cpu)?;
/// let plan = plan(&query, &query, &query, &Options::default())?;
/// assert_eq!(plan.chosen.full_name(), "cpu/blocked");
/// # Ok(())
/// # }
/// ```
pub fn plan(query: &Tensor, key: &Tensor, value: &Tensor, options: &Options) -> Result<Plan> {
    let arguments = Arguments::new(query, key, value, options)?;
    match query.device() {
        candle_core::Device::Cpu => cpu::plan(&arguments),
        #[cfg(feature = "cuda")]
        candle_core::Device::Cuda(_) => cuda::plan(&arguments, [query, key, value]),
        other => Err(arguments::no_device(other)),
    }
}

/// An error of ours as candle's.
fn wrap(error: impl std::error::Error + Send + Sync + 'static) -> candle_core::Error {
    candle_core::Error::wrap(error)
}
