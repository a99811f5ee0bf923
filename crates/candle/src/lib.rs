//! Attention over [candle](candle_core) tensors, on the CPU and on NVIDIA GPUs.
//!
//! [`attend`] computes attention, with [`Options`] for everything beyond plain attention:
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
//! let options = Options { mask: Mask::CAUSAL, lse: true, ..Options::default() };
//! let attention = attend(&query, &key, &value, &options)?;
//! assert_eq!(attention.output.dims(), [1, 100, 8, 64]);
//! assert_eq!(attention.lse.unwrap().dims(), [1, 8, 100]);
//! # Ok(())
//! # }
//! ```
//!
//! [`attend_sequences`] does the same for sequences of unequal lengths: ragged batches, caches and
//! paged caches, as in an inference engine. [`append()`] writes new keys and values into such a
//! cache, and [`combine()`] merges attention over parts of the keys.
//!
//! The functions of [`candle_flash_attn`] have the names, arguments and meaning of those in the
//! crate of that name, so that a program only changes its import; they also work on the CPU.
//!
//! # Supported tensors
//!
//! Four dimensions (batch, length, heads, dim), or three where rows are packed; f32, f16 or bf16,
//! all three tensors of one type and on one device; any strides, as long as the last dimension is
//! contiguous. Anything else is an error that names the tensor and what was expected of it.
//!
//! # Gradients
//!
//! Candle's `backward` propagates through [`attend`], and through [`attend_sequences`] over padded
//! and packed keys, to the query, the key and the value:
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use flashcore_candle::flash_attn;
//!
//! # fn main() -> candle_core::Result<()> {
//! let query = Var::randn(0f32, 1., (1, 20, 4, 32), &Device::Cpu)?;
//! let key = Tensor::randn(0f32, 1., (1, 20, 4, 32), &Device::Cpu)?;
//! let output = flash_attn(&query, &key, &key, 0.2, true)?;
//! let gradients = output.sqr()?.sum_all()?.backward()?;
//! assert_eq!(gradients.get(&query).unwrap().dims(), query.dims());
//! # Ok(())
//! # }
//! ```
//!
//! For the backward pass, the forward pass keeps the log-sum-exp of each row, four bytes. Slopes
//! and sinks that depend on a variable are refused, and so is a request for the log-sum-exp of such
//! tensors: no gradient is dropped silently. Gradients of a cache, and gradients that no kernel on
//! the tensors' GPU computes, are an error with the reason when `backward` reaches them.
//!
//! # On a GPU
//!
//! Build with the feature `cuda`. The kernel is enqueued on the stream of the tensors' candle
//! device, and candle allocates the output. The plan and the compiled kernel of a call are cached,
//! so a repeated call costs microseconds. [`plan`] and [`plan_sequences`] say which kernel serves a
//! call, and why the others do not.
//!
//! A call may be captured in a CUDA graph, even the first of its kind: its kernel is then compiled
//! and its memory allocated outside of the capture. Each capture has its own workspace, so its
//! graph may run concurrently with other calls, but not with itself. Plans and workspaces live as
//! long as the graph. The tensors that a graph reads and writes belong to candle: the program must
//! keep them alive.

// Borrowing candle's stream and memory needs unsafe code.
#![cfg_attr(feature = "cuda", allow(unsafe_code))]

mod append;
mod arguments;
pub mod candle_flash_attn;
#[cfg(test)]
mod choices;
mod combine;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod operation;
mod placement;
mod rotary;
mod sequences;

use candle_core::op::BackpropOp;
use candle_core::{Result, Shape, Storage, Tensor};
use flashcore::{Alibi, Scores};

pub use append::{append, append_scaled};
pub use candle_flash_attn::flash_attn;
pub use combine::combine;
pub use flashcore::{Mask, Plan};
pub use placement::Placement;
pub use rotary::Rotary;
pub use sequences::Sequences;

use crate::arguments::Call;
use crate::operation::Operation;

/// What to compute. The default is plain attention: every key is visible, scores are scaled by `1 /
/// sqrt(head dim)`, and there is no log-sum-exp.
///
/// Set the fields that differ and take the rest from the default, since fields may be added:
///
/// ```
/// use flashcore_candle::{Mask, Options};
///
/// let options = Options { mask: Mask::CAUSAL, ..Options::default() };
/// // A causal window of 4096 positions, within chunks of 8192.
/// let mask = Mask::window(Some(4096), Some(0)).with_chunk(8192);
/// let options = Options { mask, softcap: Some(30.0), ..Options::default() };
/// ```
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Which keys a query sees: a causal mask, a window ([`Mask::window`]), chunks
    /// ([`Mask::with_chunk`], `attention_chunk`).
    pub mask: Mask,
    /// Factor of the scores before the softmax; `1 / sqrt(head dim)` when `None`.
    pub softmax_scale: Option<f32>,
    /// Cap of the scaled scores: `s` becomes `softcap * tanh(s / softcap)`.
    pub softcap: Option<f32>,
    /// ALiBi slopes, by which scores fall with the distance between query and key: of shape (query
    /// heads) or (sequences, query heads), in f32.
    pub slopes: Option<Tensor>,
    /// Sinks: one more score in each row of a query head, without a value vector; of shape (query
    /// heads), in f32.
    pub sinks: Option<Tensor>,
    /// Descale factors of F8E4M3 queries, in f32: one number, (key heads), or (sequences, key
    /// heads).
    pub q_descale: Option<Tensor>,
    /// Descale factors of F8E4M3 keys: like those of the queries, or one per token and head, in the
    /// shape of the keys without the last dimension.
    pub k_descale: Option<Tensor>,
    /// Descale factors of F8E4M3 values, like those of the keys.
    pub v_descale: Option<Tensor>,
    /// Whether the log-sum-exp of the scores is wanted.
    pub lse: bool,
}

impl Options {
    /// Returns the score rules that these options set.
    fn scores(&self) -> Scores {
        let mut scores = Scores::default();
        scores.scale = self.softmax_scale;
        scores.softcap = self.softcap;
        scores.alibi = match &self.slopes {
            None => Alibi::None,
            Some(slopes) if slopes.rank() == 2 => Alibi::PerSequence,
            Some(_) => Alibi::PerHead,
        };
        scores.sinks = self.sinks.is_some();
        scores
    }
}

/// The result of [`attend`].
#[derive(Debug, Clone)]
pub struct Attention {
    /// The output, (batch, query length, query heads, value head dim), contiguous, of the query's
    /// type, or BF16 where that is F8E4M3.
    pub output: Tensor,
    /// The log-sum-exp of each row, (batch, query heads, query length) in f32, if [`Options::lse`]
    /// asked for it: the natural logarithm of the sum of exponentials of scaled scores; minus
    /// infinity for a row that sees no key. For packed queries it is (query heads, rows).
    pub lse: Option<Tensor>,
}

/// Computes `softmax(scale * query key^T + mask) value`, over every batch entry and query head.
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
    attend_sequences(query, key, value, &Sequences::default(), options)
}

/// Computes attention over sequences that each have their own lengths, located by `sequences`. The
/// output has the shape of the query, with the values' head dim; rows that belong to no sequence
/// are undefined.
///
/// See [`Sequences::ragged`] and [`Sequences::paged`] for examples.
pub fn attend_sequences(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    sequences: &Sequences,
    options: &Options,
) -> Result<Attention> {
    let tracked = [("query", query), ("key", key), ("value", value)]
        .into_iter()
        .find(|(_, tensor)| tensor.track_op());
    let mut call = Call::new([query, key, value], sequences, options)?;
    if let Some((name, _)) = tracked {
        if options.lse {
            candle_core::bail!(
                "the log-sum-exp has no gradient, and the {name} depends on a variable: detach it, \
                 or do without the log-sum-exp"
            );
        }
        // The backward pass reads the log-sum-exp.
        call.problem.lse = true;
        let output = query.apply_op3(key, value, Operation::new(call))?;
        return Ok(Attention { output, lse: None });
    }
    let operation = Operation::new(call);
    let output = query.apply_op3_no_bwd(key, value, &operation)?;
    Ok(Attention { output, lse: options.lse.then(|| operation.lse()).transpose()? })
}

/// Returns which kernel [`attend`] runs for these tensors, and why the others are not used.
/// Computes nothing.
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
    plan_sequences(query, key, value, &Sequences::default(), options)
}

/// Returns which kernel [`attend_sequences`] runs for these tensors, and why the others are not
/// used. Computes nothing, and reads no list.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use flashcore_candle::{Options, Sequences, plan_sequences};
///
/// # fn main() -> candle_core::Result<()> {
/// let starts = Tensor::new(&[0u32, 5, 12], &Device::Cpu)?;
/// let query = Tensor::zeros((12, 8, 64), DType::F16, &Device::Cpu)?;
/// let sequences = Sequences::ragged((&starts, 7), (&starts, 7));
/// let plan = plan_sequences(&query, &query, &query, &sequences, &Options::default())?;
/// println!("{plan}");
/// # Ok(())
/// # }
/// ```
pub fn plan_sequences(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    sequences: &Sequences,
    options: &Options,
) -> Result<Plan> {
    let call = Call::new([query, key, value], sequences, options)?;
    match query.device() {
        candle_core::Device::Cpu => cpu::plan(&call),
        #[cfg(feature = "cuda")]
        candle_core::Device::Cuda(device) => cuda::plan(&call, device),
        other => Err(arguments::no_device(other)),
    }
}

/// Creates a tensor that is not part of candle's graph of operations.
fn tensor(storage: Storage, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(storage, shape, BackpropOp::none(), false)
}

/// Wraps an error as one of candle's.
fn wrap(error: impl std::error::Error + Send + Sync + 'static) -> candle_core::Error {
    candle_core::Error::wrap(error)
}
