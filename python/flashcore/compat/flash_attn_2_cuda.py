"""FlashAttention-2's extension module ``flash_attn_2_cuda``, which some programs call without its Python functions:
these take every argument by place, return lists, and are not recorded by autograd."""

from __future__ import annotations

from typing import Any

import torch

from .. import flash_attn_varlen_func, flash_attn_with_kvcache
from .._arguments import refuse
from . import _passes
from ._adapted import softcap_above_zero

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]


def fwd(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    alibi_slopes: Any,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: Any,
) -> list[Any]:
    """Computes attention as :func:`flashcore.flash_attn_func` does.

    Args:
        out: A tensor into which the output is written; a new one if None.
        p_dropout: ``dropout_p``; must drop nothing.
        return_softmax, gen: Ignored: nothing is dropped.
        q, k, v, alibi_slopes, softmax_scale, is_causal, window_size_left, window_size_right, softcap: As in
            ``_flash_attn_forward`` of ``flash_attn``.

    Returns:
        ``[out, softmax_lse, S_dmask, rng_state]``, of which the last two say nothing.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`flashcore.flash_attn_func`.
    """
    window = (window_size_left, window_size_right)
    with torch.no_grad():
        found, *rest = _passes._flash_attn_forward(
            q, k, v, p_dropout, softmax_scale, is_causal, *window, softcap, alibi_slopes, return_softmax
        )
        return [found if out is None else out.copy_(found), *rest]


def varlen_fwd(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    seqused_k: Any,
    leftpad_k: Any,
    block_table: Any,
    alibi_slopes: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: Any,
    num_splits: int = 0,
) -> list[Any]:
    """Computes attention as :func:`flashcore.flash_attn_varlen_func` does.

    Args:
        leftpad_k: Must be None.
        zero_tensors: Must be False.
        num_splits: A hint; ignored.
        out, p_dropout, return_softmax, gen: As in :func:`fwd`.
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, alibi_slopes, max_seqlen_q, max_seqlen_k,
            softmax_scale, is_causal, window_size_left, window_size_right, softcap: As in
            ``_flash_attn_varlen_forward`` of ``flash_attn``.

    Returns:
        As :func:`fwd`, with log-sum-exps of (heads, queries of all sequences).

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`flashcore.flash_attn_varlen_func`.
    """
    refuse(leftpad_k=leftpad_k, zero_tensors=zero_tensors)
    with torch.no_grad():
        found, lse = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            seqused_k=seqused_k,
            softmax_scale=softmax_scale,
            causal=is_causal,
            window_size=(window_size_left, window_size_right),
            softcap=softcap_above_zero(softcap),
            num_splits=num_splits,
            return_attn_probs=True,
            dropout_p=_passes._dropping(p_dropout),
            alibi_slopes=alibi_slopes,
            block_table=block_table,
            out=out,
        )
    return [found, lse, *_passes._without_dropout(q)]


def fwd_kvcache(
    q: Any,
    kcache: Any,
    vcache: Any,
    k: Any,
    v: Any,
    seqlens_k: Any,
    rotary_cos: Any,
    rotary_sin: Any,
    cache_batch_idx: Any,
    leftpad_k: Any,
    block_table: Any,
    alibi_slopes: Any,
    out: Any,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    is_rotary_interleaved: bool,
    num_splits: int,
) -> list[Any]:
    """Computes attention as :func:`flashcore.flash_attn_with_kvcache` does.

    Args:
        seqlens_k, leftpad_k: ``cache_seqlens`` and ``cache_leftpad``.
        num_splits: A hint; ignored.
        q, kcache, vcache, k, v, rotary_cos, rotary_sin, cache_batch_idx, block_table, alibi_slopes, out,
            softmax_scale, is_causal, window_size_left, window_size_right, softcap, is_rotary_interleaved: As in
            :func:`flashcore.flash_attn_with_kvcache`.

    Returns:
        ``[out, softmax_lse]``.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`flashcore.flash_attn_with_kvcache`.
    """
    with torch.no_grad():
        return list(
            flash_attn_with_kvcache(
                q,
                kcache,
                vcache,
                k,
                v,
                rotary_cos=rotary_cos,
                rotary_sin=rotary_sin,
                cache_seqlens=seqlens_k,
                cache_batch_idx=cache_batch_idx,
                cache_leftpad=leftpad_k,
                block_table=block_table,
                softmax_scale=softmax_scale,
                causal=is_causal,
                window_size=(window_size_left, window_size_right),
                softcap=softcap_above_zero(softcap),
                rotary_interleaved=is_rotary_interleaved,
                num_splits=num_splits,
                alibi_slopes=alibi_slopes,
                out=out,
                return_softmax_lse=True,
            )
        )


def bwd(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    alibi_slopes: Any,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen: Any,
    rng_state: Any,
) -> list[Any]:
    """Computes the gradients of :func:`fwd`.

    Args:
        dq, dk, dv: Tensors into which the gradients are written; new ones if None.
        gen, rng_state: Ignored: nothing is dropped.
        dout, q, k, v, out, softmax_lse, alibi_slopes, p_dropout, softmax_scale, is_causal, window_size_left,
            window_size_right, softcap, deterministic: As in ``_flash_attn_backward`` of ``flash_attn``.

    Returns:
        ``[dq, dk, dv, softmax_d]``.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`flashcore.flash_attn_func`.
    """
    dq, dk, dv = _into(q, k, v, dq, dk, dv)
    window = (window_size_left, window_size_right)
    given = (dout, q, k, v, out, softmax_lse, dq, dk, dv)
    sums = _passes._flash_attn_backward(
        *given, p_dropout, softmax_scale, is_causal, *window, softcap, alibi_slopes, deterministic
    )
    return [dq, dk, dv, sums]


def varlen_bwd(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    alibi_slopes: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen: Any,
    rng_state: Any,
) -> list[Any]:
    """Computes the gradients of :func:`varlen_fwd`.

    Args:
        zero_tensors: Ignored: rows that belong to no sequence have gradients of zero.
        dq, dk, dv, gen, rng_state: As in :func:`bwd`.
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q, max_seqlen_k,
            p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap, deterministic: As in
            ``_flash_attn_varlen_backward`` of ``flash_attn``.

    Returns:
        ``[dq, dk, dv, softmax_d]``.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`flashcore.flash_attn_varlen_func`.
    """
    dq, dk, dv = _into(q, k, v, dq, dk, dv)
    window = (window_size_left, window_size_right)
    given = (dout, q, k, v, out, softmax_lse, dq, dk, dv)
    lists = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    sums = _passes._flash_attn_varlen_backward(
        *given, *lists, p_dropout, softmax_scale, is_causal, *window, softcap, alibi_slopes, deterministic
    )
    return [dq, dk, dv, sums]


def _into(*tensors: Any) -> tuple[Any, Any, Any]:
    """Returns the tensors of gradients, of which the last three are given, new ones for those that are None."""
    dq, dk, dv = (torch.empty_like(it) if to is None else to for it, to in zip(tensors, tensors[3:]))
    return dq, dk, dv
