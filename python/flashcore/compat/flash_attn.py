"""FlashAttention-2's module ``flash_attn``: its functions, with its order of arguments."""

from __future__ import annotations

from typing import Any

from .. import flash_attn_func as _func
from .. import flash_attn_kvpacked_func as _kvpacked
from .. import flash_attn_qkvpacked_func as _qkvpacked
from .. import flash_attn_varlen_func as _varlen
from .. import flash_attn_varlen_kvpacked_func as _varlen_kvpacked
from .. import flash_attn_varlen_qkvpacked_func as _varlen_qkvpacked
from .. import flash_attn_with_kvcache as _with_kvcache
from ._adapted import adapted, softcap_above_zero

try:
    # Programs look for the extension under this name to know that it loads.
    from . import flash_attn_2_cuda as flash_attn_gpu  # noqa: F401
    from ._passes import *  # noqa: F403
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise

__all__ = [
    "__version__",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

# The version of FlashAttention whose interface this is: programs choose by it what they call, and how.
__version__ = "2.8.3"

_VALUES = {"softcap": softcap_above_zero}
flash_attn_func = adapted(_func, _VALUES)
flash_attn_kvpacked_func = adapted(_kvpacked, _VALUES)
flash_attn_qkvpacked_func = adapted(_qkvpacked, _VALUES)
flash_attn_varlen_kvpacked_func = adapted(_varlen_kvpacked, _VALUES)
flash_attn_varlen_qkvpacked_func = adapted(_varlen_qkvpacked, _VALUES)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """Calls :func:`flashcore.flash_attn_varlen_func` with FlashAttention-2's order of arguments.

    Args:
        q: (queries of all sequences, heads, head dim), in float16, bfloat16 or float32.
        k, v: (keys of all sequences, key heads, head dim), or (pages, page size, key heads, head dim) with
            ``block_table``, in the element type of ``q``.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) in int32, cumulative lengths.
        max_seqlen_q, max_seqlen_k: Upper bounds of the lengths.
        dropout_p: Must be 0.0.
        alibi_slopes: (heads,) or (sequences, heads), in float32, float16 or bfloat16.
        return_attn_probs: Whether to return ``(out, softmax_lse, None)``.
        block_table: (sequences, pages per sequence) in int32.
        softmax_scale, causal, window_size, softcap, deterministic: As in :func:`flashcore.flash_attn_func`.

    Returns:
        The output, with the shape and element type of ``q``; with ``return_attn_probs`` also the log-sum-exps,
        (heads, queries of all sequences) in float32, and None.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`flashcore.flash_attn_varlen_func`.
    """
    result = _varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap_above_zero(softcap),
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
    )
    return (*result, None) if return_attn_probs else result


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Calls :func:`flashcore.flash_attn_with_kvcache` with FlashAttention-2's order of arguments.

    Args:
        q: (sequences, queries, heads, head dim), in float16, bfloat16 or float32.
        k_cache, v_cache: (batch entries, positions, key heads, head dim), or (pages, page size, key heads, head
            dim) with ``block_table``; written in place if ``k`` and ``v`` are given.
        k, v: New keys and values, (sequences, new, key heads, head dim).
        block_table: (sequences, pages per sequence) in int32.
        rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, rotary_interleaved, alibi_slopes,
            num_splits, return_softmax_lse: As in :func:`flashcore.flash_attn_with_kvcache`.
        softmax_scale, causal, window_size, softcap: As in :func:`flashcore.flash_attn_func`.

    Returns:
        The output, with the shape and element type of ``q``; with ``return_softmax_lse``
        ``(out, softmax_lse)``, in which the log-sum-exps are (sequences, heads, queries) in float32.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`flashcore.flash_attn_with_kvcache`.
    """
    return _with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap_above_zero(softcap),
        rotary_interleaved=rotary_interleaved,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
        return_softmax_lse=return_softmax_lse,
    )
