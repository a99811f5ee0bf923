"""FlashAttention-4's module ``flash_attn.cute``: its functions, with its order of arguments.

Mask and score functions (``mask_mod``, ``score_mod``), which FlashAttention-4 takes in the CuTe language, raise
a ``NotImplementedError``; see :func:`flashcore.flex_attention`.
"""

from __future__ import annotations

from typing import Any

from .. import flash_attn_combine as _combine
from .. import flash_attn_func as _func
from .. import flash_attn_varlen_func as _varlen
from .._arguments import flag, hints, refuse

__all__ = ["__version__", "flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func"]

# The version of FlashAttention whose interface this is.
__version__ = "4.0.0"


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    qv: Any = None,
    gather_kv_indices: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (None, None),
    learnable_sink: Any = None,
    softcap: float | None = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> Any:
    """Calls :func:`flashcore.flash_attn_func` with FlashAttention-4's order of arguments.

    Args:
        q: (batch, queries, heads, head dim).
        k, v: (batch, keys, key heads, head dim).
        learnable_sink: (heads,), a sink for each head; ``s_aux`` of :func:`flashcore.flash_attn_func`.
        window_size: (left, right), with None for an unbounded side.
        softmax_scale, causal, softcap, num_splits, pack_gqa, deterministic: As in
            :func:`flashcore.flash_attn_func`.
        return_lse: Whether to return the log-sum-exps.
        qv, gather_kv_indices, score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars, block_sparse_tensors,
            block_sparse_tensors_bwd: Must be None.

    Returns:
        ``(out, softmax_lse)``: (batch, queries, heads, head dim) in the element type of ``q``, and (batch, heads,
        queries) in float32, or None without ``return_lse``.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`flashcore.flash_attn_func`.
    """
    refuse(
        qv=qv,
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
    )
    with_lse = flag("return_lse", return_lse)
    result = _func(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=0.0 if softcap is None else softcap,
        deterministic=deterministic,
        return_attn_probs=with_lse,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        learnable_sink=learnable_sink,
    )
    return result[:2] if with_lse else (result, None)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    qv: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    gather_kv_indices: Any = None,
    page_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (None, None),
    learnable_sink: Any = None,
    softcap: float | None = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> Any:
    """Calls :func:`flashcore.flash_attn_varlen_func` with FlashAttention-4's order of arguments.

    Args:
        q: (queries of all sequences, heads, head dim), or (sequences, queries, heads, head dim).
        k, v: (keys of all sequences, key heads, head dim), or (sequences, keys, key heads, head dim), or (pages,
            page size, key heads, head dim) with ``page_table``.
        page_table: (sequences, pages per sequence) in int32.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k: As in
            :func:`flashcore.flash_attn_varlen_func`.
        softmax_scale, causal, window_size, learnable_sink, softcap, deterministic, return_lse: As in
            :func:`flash_attn_func`.
        num_splits, pack_gqa, min_seqlen_k, scheduler_metadata, seqlen_k_per_split, disable_scheduler_metadata: Hints;
            ignored.
        qv, gather_kv_indices, score_mod, score_mod_bwd, mask_mod, block_sparse_tensors, aux_tensors, aux_scalars:
            Must be None.

    Returns:
        ``(out, softmax_lse)``: with the shape and element type of ``q``, and (heads, queries of all sequences) in
        float32, or None without ``return_lse``.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`flashcore.flash_attn_varlen_func`.
    """
    refuse(
        qv=qv,
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
    )
    for hint in (min_seqlen_k, seqlen_k_per_split):
        if hint is not None:
            hints(hint, None, 0)
    with_lse = flag("return_lse", return_lse)
    result = _varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q,
        seqused_k,
        softmax_scale,
        causal,
        window_size=window_size,
        softcap=0.0 if softcap is None else softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        return_attn_probs=with_lse,
        block_table=page_table,
        learnable_sink=learnable_sink,
        scheduler_metadata=scheduler_metadata,
    )
    return result if with_lse else (result, None)


def _validate_head_dims(head_dim: int, head_dim_v: int, compute_capability: int, alignment: int) -> None:
    """Raises an ``AssertionError`` if a head dim is not served, which libraries ask before they choose this version.

    Args:
        head_dim, head_dim_v: The head dims of keys and of values.
        compute_capability, alignment: Ignored: every GPU has the same, and others than multiples of 8 are copied.
    """
    if not (0 < head_dim <= 256 and 0 < head_dim_v):
        raise AssertionError(f"(head_dim, head_dim_v)=({head_dim}, {head_dim_v}), expected head_dim from 1 to 256")


def flash_attn_combine(
    out_partial: Any,
    lse_partial: Any,
    out: Any = None,
    out_dtype: Any = None,
    cu_seqlens: Any = None,
    seqused: Any = None,
    virtual_batch_idx: Any = None,
    return_lse: bool = True,
) -> Any:
    """Calls :func:`flashcore.flash_attn_combine` with FlashAttention-4's arguments.

    Args:
        out_partial, lse_partial, out, out_dtype: As in :func:`flashcore.flash_attn_combine`.
        cu_seqlens, seqused, virtual_batch_idx: Must be None.
        return_lse: Whether to return the log-sum-exps.

    Returns:
        ``(out, softmax_lse)``, with None in the place of ``softmax_lse`` without ``return_lse``.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`flashcore.flash_attn_combine`.
    """
    refuse(cu_seqlens=cu_seqlens, seqused=seqused, virtual_batch_idx=virtual_batch_idx)
    output, lse = _combine(out_partial, lse_partial, out, out_dtype)
    return output, lse if flag("return_lse", return_lse) else None
