"""Fused attention with FlashAttention's functions.

    from flashcore import flash_attn_func

Tensors of PyTorch, and arrays of every library that speaks DLPack (NumPy, CuPy, JAX): on an NVIDIA
GPU by FlashCore's kernels, on the CPU by its CPU back end. The answer is of the kind that was given.

What FlashAttention has and FlashCore has not yet is accepted at its default value and refused by
name otherwise.
"""

from __future__ import annotations

import atexit as _atexit
import os as _os
from typing import TYPE_CHECKING, Any, TypedDict

try:
    from . import _flashcore
except ImportError as error:
    if error.name != __name__:
        raise
    raise ImportError(
        "these are the sources of flashcore, without its extension module: build and install it with "
        "`pip install .`, and start Python in another folder than this one's parent"
    ) from None

from ._arguments import by_keyword as _by_keyword
from ._arguments import either as _either
from ._arguments import flag as _flag
from ._arguments import hints as _hints
from ._arguments import invariant as _invariant
from ._arguments import rarely as _rarely
from ._arguments import refuse as _refuse
from ._arguments import shape_of as _shape_of
from ._copies import separate as _separate
from ._flashcore import VERSION as _VERSION
from ._flashcore import finish_compiling as _finish_compiling
from ._flashcore import forked as _forked
from ._flashcore import info as _info
from ._flex import AuxOutput, BlockMask, and_masks, create_block_mask, create_mask, flex_attention, or_masks
from ._flex import attend as _attend_with_rules
from ._flex import mask_rules as _mask_rules
from ._flex import refuse_groups as _refuse_groups
from ._quantize import dequantize, quantize, quantize_kv
from ._serving import (
    _torch,
    flash_attn_combine,
    flash_attn_merge,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from ._serving import attend as _attend
from ._serving import is_compiling as _is_compiling
from ._serving import widen as _widen

if TYPE_CHECKING:
    from typing_extensions import Unpack as _Unpack

__all__ = [
    "AuxOutput",
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "dequantize",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_merge",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "get_scheduler_metadata",
    "info",
    "or_masks",
    "quantize",
    "quantize_kv",
    "scaled_dot_product_attention",
]

__version__: str = _VERSION

# Those of sequences and caches, which a batch has not.
_NO_LISTS = (None,) * 7

_atexit.register(_finish_compiling)
if hasattr(_os, "register_at_fork"):
    _os.register_at_fork(after_in_child=_forked)


class _Rare(TypedDict, total=False):
    """What ``flash_attn_func`` takes by keyword."""

    qv: Any
    q_descale: Any
    k_descale: Any
    v_descale: Any
    attention_chunk: int
    num_splits: int
    pack_gqa: bool | None
    sm_margin: int
    s_aux: Any
    learnable_sink: Any
    batch_invariant: bool


_RARE = {
    "qv": None,
    "q_descale": None,
    "k_descale": None,
    "v_descale": None,
    "attention_chunk": 0,
    "num_splits": 1,
    "pack_gqa": None,
    "sm_margin": 0,
    "s_aux": None,
    "learnable_sink": None,
    "batch_invariant": False,
}


@_by_keyword(_RARE)
def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **rare: _Unpack[_Rare],
) -> Any:
    """``softmax(softmax_scale * q @ k^T + mask) @ v`` for every batch entry and head.

    The names, order and defaults are FlashAttention-2's; what FlashAttention-3 adds is taken by
    keyword.

    Args:
        q: (batch, queries, heads, head dim), float16, bfloat16, float32, or in 8 bits.
        k: (batch, keys, key heads, head dim). Key heads divide heads: query head ``h`` reads key
            head ``h // (heads // key_heads)``.
        v: (batch, keys, key heads, value head dim). Head dims are up to 256; others than multiples of
            8, and wider values, are served by copies. Keys and values are like ``q``, or in 8 bits.
        softmax_scale: ``1 / sqrt(head dim)`` unless given.
        causal: The last query sees every key, the one before all but the last, and so on, whatever
            the lengths. A query that sees no key gets zeros.
        window_size: A query sees so many keys before and after its own, where its own is that of
            the causal mask; all of them where negative or None.
        softcap: Scores ``s`` become ``softcap * tanh(s / softcap)``, unless it is 0.
        alibi_slopes: (heads,) or (batch, heads): scores fall by the slope for each position between
            query and key.
        deterministic: Gradients are bitwise equal from call to call, as the output always is, and so
            they are under ``torch.use_deterministic_algorithms(True)``.
        return_attn_probs: Return ``(out, softmax_lse, None)``; the probabilities themselves are
            never made.
        q_descale, k_descale, v_descale: What tensors of float8_e4m3fn, float8_e5m2 or int8 are multiplied
            with, in float32: (batch, key heads) as FlashAttention-3 has it, (key heads,) or one
            number; for keys and values also one for each token and head, in the shape of ``k``
            without its last dimension. See :func:`quantize_kv`.
        attention_chunk: Positions come in chunks of so many, and a query sees keys of its own chunk
            only, unless it is 0.
        num_splits, pack_gqa, sm_margin: Hints, not needed.
        s_aux: (heads,) a sink for each head, one more score without a value. FlashAttention-4 calls it
            ``learnable_sink``.
        batch_invariant: The output of a query, and its log-sum-exp, have the same bits whatever else is
            in the batch, however many queries of its sequence come in one call, and wherever keys lie:
            in prefill, chunked or not, and in decode. Few queries are about as fast as without, many
            are much slower. Gradients are as without.

    Returns:
        (batch, queries, heads, value head dim) in the element type of ``q``, or bfloat16 where that has
        8 bits; with ``return_attn_probs`` also the log-sum-exp of each row of scaled scores, (batch, heads,
        queries) in float32, and None.
    """
    if type(dropout_p) is not float or dropout_p != 0.0:
        _refuse(dropout_p=dropout_p)
    if deterministic is not False:
        deterministic = _flag("deterministic", deterministic)
    # What is None behind the others is left out, which a plain call does not pay for.
    tensors: tuple[Any, ...] = (q, k, v)
    chunk, function = 0, "flash_attn_func"
    if rare or alibi_slopes is not None:
        tensors, chunk, function = _with_rare(tensors, alibi_slopes, *_rarely(function, _RARE, rare))
    result = _attend(
        tensors,
        (softmax_scale, causal, window_size, chunk, softcap, None, None),
        function,
        return_attn_probs,
        deterministic,
    )
    return (*result, None) if return_attn_probs else result


def _with_rare(
    tensors: tuple[Any, ...],
    alibi_slopes: Any,
    qv: Any,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
    attention_chunk: Any,
    num_splits: Any,
    pack_gqa: Any,
    sm_margin: Any,
    s_aux: Any,
    learnable_sink: Any,
    batch_invariant: Any,
) -> tuple[tuple[Any, ...], Any, str]:
    """Tensors with those that are given by keyword, the chunk, and the name to call under."""
    _refuse(qv=qv)
    _hints(num_splits, pack_gqa, sm_margin)
    if alibi_slopes is not None or s_aux is not None or learnable_sink is not None:
        sinks = _widen(_either("s_aux", s_aux, "learnable_sink", learnable_sink))
        tensors = (*tensors, *_NO_LISTS, _widen(alibi_slopes), sinks)
    if q_descale is not None or k_descale is not None or v_descale is not None:
        tensors = (*tensors, *(None,) * (12 - len(tensors)), q_descale, k_descale, v_descale)
    return tensors, attention_chunk, _invariant("flash_attn_func", batch_invariant)


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` of a tensor (batch, length, 3, heads, head dim)."""
    _unpackable("qkv", qkv, 3, "(batch, length, 3, heads, head dim)")
    return _packed(
        (qkv, None, None),
        (softmax_scale, causal, window_size, 0, softcap, None, None),
        "flash_attn_qkvpacked_func",
        (*_NO_LISTS, alibi_slopes),
        dropout_p,
        deterministic,
        return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` of ``q`` and a tensor (batch, keys, 2, key heads, head dim)."""
    _unpackable("kv", kv, 2, "(batch, length, 2, heads, head dim)")
    return _packed(
        (q, kv, None),
        (softmax_scale, causal, window_size, 0, softcap, None, None),
        "flash_attn_kvpacked_func",
        (*_NO_LISTS, alibi_slopes),
        dropout_p,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_varlen_func` of a tensor (rows of all sequences, 3, heads, head dim), with
    FlashAttention-2's arguments; ``return_attn_probs`` is as in :func:`flash_attn_func`."""
    _unpackable("qkv", qkv, 3, "(rows of all sequences, 3, heads, head dim)")
    return _packed(
        (qkv, None, None),
        (softmax_scale, causal, window_size, 0, softcap, max_seqlen, max_seqlen),
        "flash_attn_varlen_qkvpacked_func",
        (cu_seqlens, cu_seqlens, None, None, None, None, None, alibi_slopes),
        dropout_p,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_varlen_func` of ``q`` and a tensor (rows of all sequences, 2, key heads, head
    dim), with FlashAttention-2's arguments; ``return_attn_probs`` is as in :func:`flash_attn_func`."""
    _unpackable("kv", kv, 2, "(rows of all sequences, 2, heads, head dim)")
    return _packed(
        (q, kv, None),
        (softmax_scale, causal, window_size, 0, softcap, max_seqlen_q, max_seqlen_k),
        "flash_attn_varlen_kvpacked_func",
        (cu_seqlens_q, cu_seqlens_k, None, None, None, None, None, alibi_slopes),
        dropout_p,
        deterministic,
        return_attn_probs,
    )


def _packed(
    tensors: tuple[Any, Any, Any],
    numbers: tuple[Any, ...],
    function: str,
    lists: tuple[Any, ...],
    dropout_p: Any,
    deterministic: Any,
    lse: Any,
) -> Any:
    """Attention over packed tensors: those that are packed into the one before are None. The lists end
    with slopes."""
    _refuse(dropout_p=dropout_p)
    deterministic = _flag("deterministic", deterministic)
    *lists, slopes = lists  # type: ignore[assignment]
    # What is None behind the others is left out.
    plain = slopes is None and lists[0] is None
    others = () if plain else (*lists, _widen(slopes), None)
    if _torch is None or not (_is_compiling() or _torch.is_recorded(*tensors)):
        # Recorded ones stay whole, so that the gradient of a packed tensor is written into one.
        tensors = _separate(tensors)
    result = _attend((*tensors, *others), numbers, function, lse, deterministic)
    return (*result, None) if lse else result


def _unpackable(name: str, packed: Any, count: int, expected: str) -> None:
    """Refuses what is not ``count`` tensors in one."""
    if _torch is not None:
        _torch.refuse_odd(name, packed)
    shape = _shape_of(packed)
    if shape is None or not hasattr(packed, "__dlpack__") or not hasattr(packed, "__getitem__"):
        raise TypeError(f"{name} is a {type(packed)}, expected a tensor with __dlpack__ that can be indexed")
    if len(shape) != expected.count(",") + 1 or shape[-3] != count:
        raise ValueError(f"{name} has shape {list(shape)}, expected {expected}")


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    deterministic: bool = False,
) -> Any:
    """Attention with PyTorch's signature, over (batch, heads, length, head dim).

    As there, ``is_causal`` lets query ``i`` see the keys up to ``i``, whatever the lengths. ``attn_mask``
    broadcasts to (batch, heads, queries, keys): truth values say which keys are seen, numbers are added
    to the scores. ``deterministic`` is as in :func:`flash_attn_func`.
    """
    try:
        plain = not dropout_p
    except Exception:  # a tensor in the place of a number
        plain = False
    if not plain:
        _refuse(dropout_p=dropout_p)
    if deterministic is not False:
        deterministic = _flag("deterministic", deterministic)
    if enable_gqa is False or not _flag("enable_gqa", enable_gqa):
        _refuse_groups(query, key)
    if attn_mask is not None:
        return _masked(query, key, value, attn_mask, is_causal, scale, deterministic)
    return _attend(
        (query, key, value),
        (scale, is_causal, (-1, -1), 0, 0.0, None, None),
        "scaled_dot_product_attention",
        False,
        deterministic,
    )


def _masked(
    query: Any, key: Any, value: Any, attn_mask: Any, is_causal: Any, scale: Any, deterministic: bool
) -> Any:
    """Attention with a mask that is a tensor."""
    if _flag("is_causal", is_causal):
        raise ValueError("attn_mask was given with is_causal=True, expected one of the two")
    rules = _mask_rules(attn_mask, query, key)
    numbers = (scale, False, (-1, -1), 0, 0.0, None, None)
    tensors = (query, key, value)
    return _attend_with_rules(tensors, numbers, "scaled_dot_product_attention", False, rules, deterministic)


def info() -> dict[str, Any]:
    """What there is and what ran.

    ``version``; ``cpu`` and ``gpus``, what can be used; ``no_gpu``, why there is none; and ``last``,
    the last call: its device, problem, kernel, the kernel's configuration, and the reason for the
    choice, which names what was refused.
    """
    return _info()
