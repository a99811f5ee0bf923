"""FlashAttention-3's forward and backward pass as functions of their own, which libraries call inside of their own
autograd functions."""

from __future__ import annotations

from typing import Any

import torch

from .. import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from .._arguments import hints, refuse
from ._adapted import softcap_above_zero
from ._passes import _backward, _check, _products

__all__ = ["_flash_attn_backward", "_flash_attn_forward"]


def _flash_attn_forward(
    q: Any,
    k: Any,
    v: Any,
    k_new: Any = None,
    v_new: Any = None,
    qv: Any = None,
    out_: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    cu_seqlens_k_new: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Any = None,
    kv_batch_idx: Any = None,
    leftpad_k: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    seqlens_rotary: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """Computes attention of a batch, of sequences or over a cache, whichever the lists say.

    Args:
        k_new, v_new: ``k`` and ``v`` of :func:`flashcore.flash_attn_with_kvcache`.
        out_: ``out`` of :func:`flashcore.flash_attn_varlen_func`.
        kv_batch_idx, leftpad_k, seqlens_rotary: ``cache_batch_idx``, ``cache_leftpad`` and ``rotary_seqlens`` of
            :func:`flashcore.flash_attn_with_kvcache`; ``seqused_k`` is its ``cache_seqlens``.
        window_size_left, window_size_right: The window; negative for an unbounded side.
        qv: Must be None.
        scheduler_metadata, num_splits, pack_gqa, sm_margin: Hints; ignored.
        q, k, v, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k,
            page_table, rotary_cos, rotary_sin, q_descale, k_descale, v_descale, softmax_scale, causal,
            attention_chunk, softcap, rotary_interleaved: As in :func:`flashcore.flash_attn_varlen_func` and
            :func:`flashcore.flash_attn_with_kvcache`.

    Returns:
        ``(out, softmax_lse, out_accum, softmax_lse_accum)``, of which the last two are empty tensors: no parts are
        kept.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`flashcore.flash_attn_varlen_func`.
    """
    refuse(qv=qv)
    hints(num_splits, pack_gqa, sm_margin)
    _check(q=q, k=k, v=v)
    rules = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": (window_size_left, window_size_right),
        "attention_chunk": attention_chunk,
        "softcap": softcap_above_zero(softcap),
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
    }
    lists = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, out_)
    cached = {
        "k": k_new,
        "v": v_new,
        "cu_seqlens_k_new": cu_seqlens_k_new,
        "cache_batch_idx": kv_batch_idx,
        "cache_leftpad": leftpad_k,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "rotary_seqlens": seqlens_rotary,
    }
    if any(it is not None for it in cached.values()):
        if cu_seqlens_k is not None or seqused_q is not None:
            raise NotImplementedError(
                "cu_seqlens_k or seqused_q was given with an argument of caches (k_new, v_new, kv_batch_idx, leftpad_k, "
                "rotary_cos), expected one or the other"
            )
        out, lse = flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=seqused_k,
            page_table=page_table,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            rotary_interleaved=rotary_interleaved,
            return_softmax_lse=True,
            out=out_,
            **cached,
            **rules,
        )
    elif any(it is not None for it in lists):
        out, lse = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            seqused_q,
            seqused_k,
            block_table=page_table,
            return_attn_probs=True,
            out=out_,
            **rules,
        )
    else:
        out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **rules)
    return out, lse, *(torch.empty(0, device=out.device) for _ in range(2))


def _flash_attn_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    sequed_q: Any = None,
    sequed_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Any:
    """Computes the gradients of :func:`_flash_attn_forward`, of batches and sequences.

    Args:
        dout: The gradient of ``out``.
        out, softmax_lse: What the forward pass returned; that of all parts where keys are computed in parts.
        sequed_q, sequed_k: ``seqused_q`` and ``seqused_k`` of the forward pass.
        dq, dk, dv: Tensors with the shapes and element types of ``q``, ``k`` and ``v``, into which the gradients are
            written; if None they are computed and dropped.
        is_causal: ``causal`` of the forward pass.
        deterministic: Whether gradients have the same bits in every call.
        sm_margin: A hint; ignored.
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, window_size_left,
            window_size_right, softcap: As in the forward pass.

    Returns:
        The products of ``dout`` and ``out``, added over the head dim, with the shape of ``softmax_lse``.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`flashcore.flash_attn_varlen_func`.
    """
    hints(1, None, sm_margin)
    given = (cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k)
    ragged = any(it is not None for it in given)
    window = (window_size_left, window_size_right)
    longest = (max_seqlen_q, max_seqlen_k) if ragged else (None, None)
    _backward(
        (dout, out, softmax_lse),
        (q, k, v),
        (dq, dk, dv),
        (*given, *(None,) * 4),
        (softmax_scale, is_causal, window, 0, softcap_above_zero(softcap), *longest),
        "flash_attn_varlen_func" if ragged else "flash_attn_func",
        deterministic,
    )
    return _products(dout, out).transpose(-1, -2).contiguous()
