"""FlashAttention-3's module ``flash_attn_interface``: its functions, with its order of arguments."""

from __future__ import annotations

from typing import Any

from .. import flash_attn_combine, get_scheduler_metadata
from .. import flash_attn_func as _func
from .. import flash_attn_varlen_func as _varlen
from .. import flash_attn_with_kvcache as _with_kvcache
from ._adapted import adapted, chunk_or_none, softcap_above_zero

try:
    from ._passes_third import *  # noqa: F403
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise

__all__ = [
    "__version__",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

# The version of FlashAttention whose interface this is.
__version__ = "3.0.0"

# SGLang's fork (sgl_kernel) has the names beyond, and None for no chunk.
_VALUES = {"softcap": softcap_above_zero, "attention_chunk": chunk_or_none}
flash_attn_varlen_func = adapted(_varlen, _VALUES, {"sinks": "s_aux", "page_table": "block_table"})
flash_attn_with_kvcache = adapted(_with_kvcache, _VALUES, {"sinks": "s_aux"}, {"cu_seqlens_k_new": "k"})


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: Any = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Calls :func:`flashcore.flash_attn_func` with FlashAttention-3's order of arguments.

    Args:
        q: (batch, queries, heads, head dim).
        k, v: (batch, keys, key heads, head dim).
        qv: Must be None.
        softmax_scale, causal, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap, num_splits,
            pack_gqa, deterministic, sm_margin: As in :func:`flashcore.flash_attn_func`.
        return_attn_probs: Whether to return ``(out, softmax_lse)``.

    Returns:
        The output, (batch, queries, heads, head dim); with ``return_attn_probs`` also the log-sum-exps, (batch,
        heads, queries) in float32.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`flashcore.flash_attn_func`.
    """
    result = _func(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap_above_zero(softcap),
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=chunk_or_none(attention_chunk),
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )
    return result[:2] if return_attn_probs else result


def flash_attn_qkvpacked_func(
    qkv: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: Any = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Computes :func:`flash_attn_func` of queries, keys and values in one tensor.

    Args:
        qkv: (batch, length, 3, heads, head dim); with ``num_heads_q`` (batch, length, heads + 2 * key heads, head
            dim), in which the heads of queries come first, then those of keys, then those of values.
        num_heads_q: The number of query heads.
        softmax_scale, causal, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap, deterministic,
            sm_margin, return_attn_probs: As in :func:`flash_attn_func`.

    Returns:
        The output, (batch, length, heads, head dim); with ``return_attn_probs`` also the log-sum-exps, (batch,
        heads, length) in float32.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`flashcore.flash_attn_func`.
    """
    if num_heads_q is None:
        q, k, v = qkv[..., 0, :, :], qkv[..., 1, :, :], qkv[..., 2, :, :]
    else:
        shared = (qkv.shape[-2] - num_heads_q) // 2
        middle = num_heads_q + shared
        q, k, v = qkv[..., :num_heads_q, :], qkv[..., num_heads_q:middle, :], qkv[..., middle:, :]
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )
