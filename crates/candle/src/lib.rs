//! Attention over [candle](candle_core) tensors, on the CPU and on NVIDIA GPUs.
//!
//! [`attend`] is the function, with [`Options`] for what is not plain attention:
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
//! [`attend_sequences`] is the same for sequences of unequal lengths: ragged batches, caches and
//! paged caches, as an inference engine has them. [`append`] writes new keys and values into such a
//! cache, and [`merge`] puts attention over parts of the keys together.
//!
//! The functions of [`candle_flash_attn`] have the names, the arguments and the meaning of those in
//! the crate of that name, so that a program changes one import; they also work on the CPU.
//!
//! # What the tensors may be
//!
//! Four dimensions (batch, length, heads, dim), or three where rows are packed, f32, f16 or bf16,
//! all three of one type and on one device. Any strides, as long as the elements of a vector are adjacent. Anything else is an error
//! that names the tensor and what was expected of it.
//!
//! # Gradients
//!
//! There is no backward pass yet. An output that depends on a variable says so when `backward`
//! reaches it; it never lacks a gradient silently. The log-sum-exp of such tensors is refused, and
//! so are slopes and sinks that depend on a variable.
//!
//! # On a GPU
//!
//! Build with the feature `cuda`. The kernel is put on the stream of the tensors' candle device, and
//! the output is allocated by candle. What was chosen and compiled for a problem is kept for the
//! next call, so a repeated call costs microseconds. [`plan`] says which kernel serves a call, and
//! why not the others.
//!
//! What was captured in a graph shares the memory of its plan with the calls on the stream that it
//! was captured on: replay it there, or while nothing else runs.

// Borrowing candle's stream and memory is a promise to the driver.
#![cfg_attr(feature = "cuda", allow(unsafe_code))]

mod append;
mod arguments;
pub mod candle_flash_attn;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod merge;
mod operation;
mod placement;
mod rotary;
mod sequences;

use candle_core::op::BackpropOp;
use candle_core::{Result, Storage, Tensor};

pub use append::append;
pub use candle_flash_attn::flash_attn;
pub use flashcore::{Mask, Plan};
pub use merge::merge;
pub use placement::Placement;
pub use rotary::Rotary;
pub use sequences::Sequences;

use crate::arguments::Call;
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
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Which keys a query sees.
    pub mask: Mask,
    /// Factor of the scores before the softmax; `1 / sqrt(head dim)` when `None`.
    pub softmax_scale: Option<f32>,
    /// Scores are brought below this by a hyperbolic tangent, after they are scaled.
    pub softcap: Option<f32>,
    /// ALiBi slopes, by which scores fall with the distance between query and key: (query heads) or
    /// (sequences, query heads) in f32.
    pub slopes: Option<Tensor>,
    /// Sinks: one more score in each row of a query head, without a value; (query heads) in f32.
    pub sinks: Option<Tensor>,
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
    /// that sees no key. Of packed queries it is (query heads, rows).
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
    run([query, key, value], Call::plain([query, key, value], options)?, options.lse)
}

/// Attention over sequences that each have lengths of their own, placed as `sequences` says. The
/// output has the shape of the query, with the values' head dim; its rows that belong to no sequence
/// are not defined.
///
/// See [`Sequences::ragged`] and [`Sequences::paged`] for examples.
pub fn attend_sequences(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    sequences: &Sequences,
    options: &Options,
) -> Result<Attention> {
    let call = Call::of_sequences([query, key, value], sequences, options)?;
    run([query, key, value], call, options.lse)
}

fn run([query, key, value]: [&Tensor; 3], call: Call, lse: bool) -> Result<Attention> {
    let tracked = [("query", query), ("key", key), ("value", value)]
        .into_iter()
        .find(|(_, tensor)| tensor.track_op());
    let shape = call.lse_shape();
    let operation = Operation::new(call, lse);
    if !lse {
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
    let output = query.apply_op3_no_bwd(key, value, &operation)?;
    let lse: Storage = operation.into_lse()?;
    let lse = Tensor::from_storage(lse, shape, BackpropOp::none(), false);
    Ok(Attention { output, lse: Some(lse) })
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
    let call = Call::plain([query, key, value], options)?;
    match query.device() {
        candle_core::Device::Cpu => cpu::plan(&call),
        #[cfg(feature = "cuda")]
        candle_core::Device::Cuda(_) => cuda::plan(&call, [query, key, value]),
        other => Err(arguments::no_device(other)),
    }
}

/// An error of ours as candle's.
fn wrap(error: impl std::error::Error + Send + Sync + 'static) -> candle_core::Error {
    candle_core::Error::wrap(error)
}
