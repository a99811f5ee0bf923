"""FlashAttention-4's module ``flash_attn.cute``.

Its functions of scores and masks are written in CuTe's language and are refused by name.
"""

from __future__ import annotations

from typing import Any

from .. import flash_attn_combine as _combine
from .. import flash_attn_func as _func
from .. import flash_attn_varlen_func as _varlen
from .._arguments import flag, hints, refuse

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func"]


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
    softcap: float = 0.0,
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
    """:func:`flashcore.flash_attn_func` in FlashAttention-4's order: ``(out, softmax_lse)``, with None
    unless ``return_lse``."""
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
        softcap=softcap,
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
    softcap: float = 0.0,
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
    """:func:`flashcore.flash_attn_varlen_func` in FlashAttention-4's order: ``(out, softmax_lse)``, with
    None unless ``return_lse``."""
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
        softcap=softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        return_attn_probs=with_lse,
        block_table=page_table,
        learnable_sink=learnable_sink,
        scheduler_metadata=scheduler_metadata,
    )
    return result if with_lse else (result, None)


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
    """:func:`flashcore.flash_attn_combine`; the log-sum-exps are None unless ``return_lse``."""
    refuse(cu_seqlens=cu_seqlens, seqused=seqused, virtual_batch_idx=virtual_batch_idx)
    output, lse = _combine(out_partial, lse_partial, out, out_dtype)
    return output, lse if flag("return_lse", return_lse) else None
