"""The module ``vllm_flash_attn`` of vLLM's fork: its functions, with its order of arguments, and by keyword what
vLLM's own copy of it takes beyond (``vllm.vllm_flash_attn``)."""

from __future__ import annotations

from typing import Any

from .. import flash_attn_varlen_func as _varlen
from .. import get_scheduler_metadata as _metadata
from .._arguments import refuse
from ._adapted import softcap_above_zero

__all__ = [
    "__version__",
    "fa_version_unsupported_reason",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
    "is_fa_version_supported",
]

# The version that the fork gives itself.
__version__ = "2.7.2.post1"

_VERSIONS = (2, 3, 4)


def is_fa_version_supported(fa_version: int, device: Any = None) -> bool:
    """Returns whether functions of a version of FlashAttention (2, 3 or 4) are supported, on any device."""
    return fa_version in _VERSIONS


def fa_version_unsupported_reason(fa_version: int, device: Any = None) -> str | None:
    """Returns why functions of a version of FlashAttention are not supported; None if they are."""
    return None if is_fa_version_supported(fa_version) else f"there is no FlashAttention-{fa_version}"


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    max_seqlen_q: int,
    cu_seqlens_q: Any,
    max_seqlen_k: int,
    cu_seqlens_k: Any = None,
    seqused_k: Any = None,
    q_v: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    return_softmax_lse: bool = False,
    out: Any = None,
    scheduler_metadata: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    num_splits: int = 0,
    fa_version: int = 3,
    s_aux: Any = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Any = None,
    *,
    output_scale: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_tensor_leading_dims: Any = None,
    dynamic_causal: Any = None,
) -> Any:
    """Calls :func:`flashcore.flash_attn_varlen_func` with the order of arguments of vLLM's fork.

    Args:
        q: (queries of all sequences, heads, head dim).
        k, v: (keys of all sequences, key heads, head dim), or (pages, page size, key heads, head dim) with
            ``block_table``.
        max_seqlen_q, max_seqlen_k: Upper bounds of the lengths.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) in int32, cumulative lengths.
        seqused_k: (sequences,) in int32, the number of keys of each sequence.
        window_size: [left, right]; None for unbounded.
        q_v, cp_tot_seqused_k, output_scale, mask_mod, block_sparse_tensors, aux_tensors, aux_tensor_leading_dims: Must
            be None.
        cp_world_size, cp_rank: Must be 1 and 0.
        dynamic_causal: Must be None or False.
        num_splits, fa_version, scheduler_metadata: Hints; ignored.
        q_descale, k_descale, v_descale: As in :func:`flashcore.flash_attn_varlen_func`, but ignored where their tensor
            is wider than 8 bits, as in FlashAttention-3: vLLM always passes them.
        dropout_p, softmax_scale, causal, softcap, alibi_slopes, deterministic, return_attn_probs, block_table,
            return_softmax_lse, out, s_aux: As in :func:`flashcore.flash_attn_varlen_func`.

    Returns:
        The output, with the shape of ``q``; with ``return_attn_probs`` or ``return_softmax_lse`` also the
        log-sum-exps, (heads, queries of all sequences) in float32.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`flashcore.flash_attn_varlen_func`.
    """
    refuse(
        q_v=q_v,
        cp_world_size=cp_world_size,
        cp_rank=cp_rank,
        cp_tot_seqused_k=cp_tot_seqused_k,
        output_scale=output_scale,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_tensor_leading_dims=aux_tensor_leading_dims,
        dynamic_causal=None if dynamic_causal is False else dynamic_causal,
    )
    return _varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal,
        q_descale=_of_8_bits(q_descale, q),
        k_descale=_of_8_bits(k_descale, k),
        v_descale=_of_8_bits(v_descale, v),
        window_size=window_size,
        softcap=softcap_above_zero(softcap),
        num_splits=num_splits,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
        s_aux=s_aux,
        return_softmax_lse=return_softmax_lse,
        out=out,
        fa_version=fa_version,
        scheduler_metadata=scheduler_metadata,
    )


def compile_flash_attn_varlen_func_from_specs(**specs: Any) -> None:
    """Does nothing: kernels are compiled into a cache on disk by the first call that needs them.

    vLLM calls this for FlashAttention-4 before it serves, and does not start without it.

    Args:
        specs: The shapes, strides, element type and rules of calls to come; ignored.
    """


def _of_8_bits(factor: Any, tensor: Any) -> Any:
    """Returns the descale factor of a tensor; None if the tensor is wider than 8 bits."""
    return None if getattr(getattr(tensor, "dtype", None), "itemsize", 1) > 1 else factor


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Any,
    qkv_dtype: Any = None,
    headdim_v: int | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    cache_leftpad: Any = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Any = (-1, -1),
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """Calls :func:`flashcore.get_scheduler_metadata` with the order of arguments of vLLM's fork.

    Args:
        batch_size, cache_seqlens: As in :func:`flashcore.get_scheduler_metadata`. The other arguments are ignored.

    Returns:
        (batch_size,) zeros in int32.
    """
    return _metadata(
        batch_size,
        max_seqlen_q,
        max_seqlen_k,
        num_heads_q,
        num_heads_kv,
        headdim,
        cache_seqlens,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )
