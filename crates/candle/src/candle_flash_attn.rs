//! The functions of the crate `candle-flash-attn`, with the same names and arguments, on the CPU
//! and on GPUs.
//!
//! Tensors are (batch, length, heads, dim), or (rows, heads, dim) in the `varlen` functions, where
//! sequences are packed: `seqlens_q` and `seqlens_k` are their cumulative lengths starting at 0,
//! u32 or i32, and `max_seqlen_q` and `max_seqlen_k` the maximum lengths.
//!
//! With `causal`, the last query of a sequence sees every key, whatever the lengths. A window is
//! the number of keys before and after a query's own position that it sees; without a number it
//! sees all of them. `alibi_slopes` are (query heads) in f32, or (sequences, query heads). A
//! `softcap` of 0 means none.
// The arguments are those of the other crate.
#![allow(clippy::too_many_arguments)]

use candle_core::{Result, Tensor};

use crate::{Mask, Options, Placement, Sequences, attend, attend_sequences};

/// Computes attention, with or without a causal mask.
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
    plain([q, k, v], options(causal_mask(causal), softmax_scale, None, None))
}

/// Like [`flash_attn`], with a window.
pub fn flash_attn_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let mask = Mask::window(window_size_left, window_size_right);
    plain([q, k, v], options(mask, softmax_scale, None, None))
}

/// Like [`flash_attn`], with ALiBi.
pub fn flash_attn_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    plain([q, k, v], options(causal_mask(causal), softmax_scale, Some(alibi_slopes), None))
}

/// Like [`flash_attn`], with ALiBi and a window.
pub fn flash_attn_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let mask = Mask::window(window_size_left, window_size_right);
    plain([q, k, v], options(mask, softmax_scale, Some(alibi_slopes), None))
}

/// Like [`flash_attn`], with a window, a softcap and optional ALiBi.
pub fn flash_attn_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let mask = Mask::window(window_size_left, window_size_right);
    plain([q, k, v], options(mask, softmax_scale, alibi_slopes, Some(softcap)))
}

/// Computes attention over packed sequences.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use flashcore_candle::candle_flash_attn::flash_attn_varlen;
///
/// # fn main() -> candle_core::Result<()> {
/// // Two sequences, of 3 and of 7 tokens.
/// let starts = Tensor::new(&[0u32, 3, 10], &Device::Cpu)?;
/// let query = Tensor::randn(0f32, 1., (10, 4, 32), &Device::Cpu)?;
/// let scale = 1. / 32f32.sqrt();
/// let output = flash_attn_varlen(&query, &query, &query, &starts, &starts, 7, 7, scale, true)?;
/// assert_eq!(output.dims(), [10, 4, 32]);
/// # Ok(())
/// # }
/// ```
pub fn flash_attn_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let sequences = Sequences::ragged((seqlens_q, max_seqlen_q), (seqlens_k, max_seqlen_k));
    ragged([q, k, v], sequences, options(causal_mask(causal), softmax_scale, None, None))
}

/// Like [`flash_attn_varlen`], with a window.
pub fn flash_attn_varlen_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let sequences = Sequences::ragged((seqlens_q, max_seqlen_q), (seqlens_k, max_seqlen_k));
    let mask = Mask::window(window_size_left, window_size_right);
    ragged([q, k, v], sequences, options(mask, softmax_scale, None, None))
}

/// Like [`flash_attn_varlen`], over a paged cache, with a window and an optional softcap.
///
/// `k` and `v` are (pages, page size, heads, dim), `block_table` is (sequences, pages per
/// sequence). `seqlens_k` is cumulative here as well. Pages may have any size. `mm_prefix_ranges`,
/// within which every query sees every key, are refused.
pub fn flash_attn_varlen_paged_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    block_table: &Tensor,
    mm_prefix_ranges: Option<&Tensor>,
    max_seqlen_q: usize,
    // The block table bounds the number of keys.
    _max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    page_block_size: usize,
    softcap: Option<f32>,
) -> Result<Tensor> {
    if mm_prefix_ranges.is_some() {
        candle_core::bail!("attention: there are mm_prefix_ranges, expected none");
    }
    let (_, size, _, _) = k.dims4()?;
    if size != page_block_size {
        candle_core::bail!(
            "attention: the key has pages of {size} positions, expected {page_block_size}"
        );
    }
    let sequences = seqlens_k.dims1()?.saturating_sub(1);
    let (begins, ends) = (seqlens_k.narrow(0, 0, sequences)?, seqlens_k.narrow(0, 1, sequences)?);
    let sequences = Sequences {
        queries: Placement::packed(seqlens_q, max_seqlen_q),
        keys: Placement::paged(&(ends - begins)?, block_table),
    };
    let mask = Mask::window(window_size_left, window_size_right);
    ragged([q, k, v], sequences, options(mask, softmax_scale, None, softcap))
}

/// Like [`flash_attn_varlen`], with ALiBi.
pub fn flash_attn_varlen_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let sequences = Sequences::ragged((seqlens_q, max_seqlen_q), (seqlens_k, max_seqlen_k));
    let options = options(causal_mask(causal), softmax_scale, Some(alibi_slopes), None);
    ragged([q, k, v], sequences, options)
}

/// Like [`flash_attn_varlen`], with ALiBi and a window.
pub fn flash_attn_varlen_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let sequences = Sequences::ragged((seqlens_q, max_seqlen_q), (seqlens_k, max_seqlen_k));
    let mask = Mask::window(window_size_left, window_size_right);
    ragged([q, k, v], sequences, options(mask, softmax_scale, Some(alibi_slopes), None))
}

/// Like [`flash_attn_varlen`], with a window, a softcap and optional ALiBi.
pub fn flash_attn_varlen_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let sequences = Sequences::ragged((seqlens_q, max_seqlen_q), (seqlens_k, max_seqlen_k));
    let mask = Mask::window(window_size_left, window_size_right);
    ragged([q, k, v], sequences, options(mask, softmax_scale, alibi_slopes, Some(softcap)))
}

fn plain([q, k, v]: [&Tensor; 3], options: Options) -> Result<Tensor> {
    Ok(attend(q, k, v, &options)?.output)
}

fn ragged([q, k, v]: [&Tensor; 3], sequences: Sequences, options: Options) -> Result<Tensor> {
    Ok(attend_sequences(q, k, v, &sequences, &options)?.output)
}

fn causal_mask(causal: bool) -> Mask {
    if causal { Mask::CAUSAL } else { Mask::NONE }
}

fn options(
    mask: Mask,
    softmax_scale: f32,
    slopes: Option<&Tensor>,
    softcap: Option<f32>,
) -> Options {
    Options {
        mask,
        softmax_scale: Some(softmax_scale),
        softcap: softcap.filter(|cap| *cap != 0.0),
        slopes: slopes.cloned(),
        ..Options::default()
    }
}
