"""Fused attention with FlashAttention's functions.

    from flashcore import flash_attn_func

    out = flash_attn_func(q, k, v, causal=True)     # (batch, length, heads, head dim)

Tensors are those of PyTorch, or arrays of any library that supports DLPack (NumPy, CuPy, JAX). Tensors on an
NVIDIA GPU are processed by FlashCore's kernels on the current stream, tensors in host memory by its CPU back
end. Results are of the library, and on the device, of the inputs.

Arguments of FlashAttention that FlashCore does not support are accepted at their default value. Any other
value raises a ``NotImplementedError`` that names the argument.
"""

from __future__ import annotations

import atexit as _atexit
import os as _os
from typing import TYPE_CHECKING, Any, TypedDict

try:
    from . import _flashcore  # noqa: F401
except ImportError as error:
    if error.name != __name__:
        raise
    raise ImportError(
        "these are the sources of flashcore, without its extension module: build and install it with "
        "`pip install .`, and start Python in another folder than this one's parent"
    ) from None

from ._arguments import NO_RULES as _NO_RULES
from ._arguments import by_keyword as _by_keyword
from ._arguments import either as _either
from ._arguments import flag as _flag
from ._arguments import hints as _hints
from ._arguments import invariant as _invariant
from ._arguments import rarely as _rarely
from ._arguments import refuse as _refuse
from ._arguments import shape_of as _shape_of
from ._broadcast import four_dimensions as _four_dimensions
from ._copies import separate as _separate
from ._flashcore import VERSION as _VERSION
from ._flashcore import finish_compiling as _finish_compiling
from ._flashcore import forked as _forked
from ._flashcore import info as _info
from ._flex import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    or_masks,
)
from ._flex import attend as _attend_with_rules
from ._flex import causal_bias as _causal_bias
from ._flex import has_groups as _has_groups
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
from ._serving import is_compiling as _is_compiling
from ._serving import serve as _serve
from ._serving import serve_compiled as _serve_compiled
from ._serving import widen as _widen

if TYPE_CHECKING:
    from typing_extensions import Unpack as _Unpack

__all__ = [
    "AuxOutput",
    "AuxRequest",
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
    """Computes ``softmax(softmax_scale * q @ k^T + mask) @ v`` for every batch entry and head.

    The arguments up to ``return_attn_probs`` have FlashAttention-2's names, order and defaults. Arguments of
    FlashAttention-3, and ``batch_invariant``, are keyword-only. In PyTorch and JAX the function has gradients
    with respect to ``q``, ``k``, ``v`` and ``s_aux``.

    Args:
        q: (batch, queries, heads, head dim), in float16, bfloat16, float32, float8_e4m3fn or float8_e5m2. Head
            dims are up to 256. The last dimension should be contiguous; other dimensions may have any strides.
        k: (batch, keys, key heads, head dim), in the element type of ``q``, float8_e4m3fn, float8_e5m2 or int8.
            The number of query heads must be a multiple of the number of key heads: query head ``h`` uses key
            head ``h // (heads // key_heads)``.
        v: (batch, keys, key heads, value head dim), in the element type of ``q`` or in 8 bits, as ``k``. The
            value head dim may differ from the head dim. Head dims that are not multiples of 8, value head dims
            above 256, and tensors whose last dimension is not contiguous are copied in every call, with a
            warning the first time.
        dropout_p: Must be 0.0.
        softmax_scale: Factor of the scores; ``1 / sqrt(head dim)`` if None.
        causal: Whether a query sees only the keys up to its own position. The last query is aligned with the
            last key: query ``i`` sees keys up to ``i + keys - queries``. A query that sees no key gets an output
            of zeros and a log-sum-exp of minus infinity.
        window_size: (left, right): a query sees ``left`` keys before and ``right`` keys after its own position,
            aligned as for ``causal``. A negative number or None is unbounded. With ``causal``, ``right`` is 0.
        softcap: If not 0, scaled scores ``s`` become ``softcap * tanh(s / softcap)``.
        alibi_slopes: (heads,) or (batch, heads), in float32, float16 or bfloat16. ``slope * distance`` is
            subtracted from a score, where the distance is that of the two positions. Constants for autograd.
        deterministic: Whether gradients have the same bits in every call, as the output always has. Also on
            under ``torch.use_deterministic_algorithms(True)``.
        return_attn_probs: Whether to return ``(out, softmax_lse, None)``. The probabilities themselves are never
            computed as a tensor.
        qv: Must be None.
        q_descale, k_descale, v_descale: Factors by which the elements of 8-bit ``q``, ``k`` and ``v`` are
            multiplied, in float32: (batch, key heads) as in FlashAttention-3, (key heads,) or (). Those of
            ``k`` and ``v`` may also be per token, (batch, keys, key heads). See :func:`quantize_kv`.
        attention_chunk: If not 0, positions are divided into chunks of this size, and a query sees only keys of
            its own chunk.
        num_splits, pack_gqa, sm_margin: Hints of FlashAttention; checked and ignored.
        s_aux: (heads,), in float32, float16 or bfloat16: a sink for each head, which is one more score in the
            softmax, without a value. ``learnable_sink``, FlashAttention-4's name, is accepted as well.
        batch_invariant: Whether the output and log-sum-exp of a query have the same bits whatever else is in the
            batch, however many queries of its sequence are in the call, and wherever its keys are stored. With
            few queries this costs about 1 %; with many it is several times slower. Gradients are unaffected.

    Returns:
        The output, (batch, queries, heads, value head dim), in the element type of ``q``, or bfloat16 if ``q``
        has 8 bits. With ``return_attn_probs`` a tuple ``(out, softmax_lse, None)``, in which ``softmax_lse`` is
        the log-sum-exp of each row of scores, (batch, heads, queries) in float32, which has a gradient too.

    Raises:
        TypeError: If an argument is not a tensor, or has an unsupported element type.
        ValueError: If shapes, strides or devices do not fit together, or a number is out of range.
        NotImplementedError: If ``dropout_p`` or ``qv`` is given, or if no kernel of the device supports the call.

    Example:
        A batch of two sequences, with eight query heads that share two key heads::

            q = torch.randn(2, 1024, 8, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            k = torch.randn(2, 1024, 2, 128, dtype=torch.bfloat16, device="cuda")
            v = torch.randn(2, 1024, 2, 128, dtype=torch.bfloat16, device="cuda")
            out = flash_attn_func(q, k, v, causal=True, window_size=(255, 0))
            out.sum().backward()
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
    result = (_serve_compiled if _is_compiling() else _serve)(
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
    """Computes :func:`flash_attn_func` of queries, keys and values in one tensor.

    The gradient of ``qkv`` is one tensor too, without a copy.

    Args:
        qkv: (batch, length, 3, heads, head dim), in float16, bfloat16 or float32.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs:
            As in :func:`flash_attn_func`.

    Returns:
        The output, (batch, length, heads, head dim), in the element type of ``qkv``; with ``return_attn_probs``
        ``(out, softmax_lse, None)``, as in :func:`flash_attn_func`.

    Raises:
        TypeError, ValueError, NotImplementedError: As in :func:`flash_attn_func`.
    """
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
    """Computes :func:`flash_attn_func` of queries, and of keys and values in one tensor.

    Args:
        q: (batch, queries, heads, head dim), in float16, bfloat16 or float32.
        kv: (batch, keys, 2, key heads, head dim), in the element type of ``q``.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs:
            As in :func:`flash_attn_func`.

    Returns:
        The output, with the shape and element type of ``q``; with ``return_attn_probs``
        ``(out, softmax_lse, None)``, as in :func:`flash_attn_func`.

    Raises:
        TypeError, ValueError, NotImplementedError: As in :func:`flash_attn_func`.
    """
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
    """Computes :func:`flash_attn_varlen_func` of queries, keys and values in one tensor, with FlashAttention-2's
    arguments.

    Args:
        qkv: (rows of all sequences, 3, heads, head dim), in float16, bfloat16 or float32.
        cu_seqlens: (sequences + 1,) in int32: the row at which each sequence begins, and the end of the last one.
        max_seqlen: An upper bound of the lengths; the number of rows if None, which is slower.
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic: As in :func:`flash_attn_func`.
        alibi_slopes: (heads,) or (sequences, heads).
        return_attn_probs: Whether to return ``(out, softmax_lse, None)``.

    Returns:
        The output, (rows of all sequences, heads, head dim), in the element type of ``qkv``; with
        ``return_attn_probs`` also the log-sum-exps, (heads, rows of all sequences) in float32, and None.

    Raises:
        TypeError, ValueError, NotImplementedError: As in :func:`flash_attn_func`.
    """
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
    """Computes :func:`flash_attn_varlen_func` of queries, and of keys and values in one tensor, with
    FlashAttention-2's arguments.

    Args:
        q: (queries of all sequences, heads, head dim), in float16, bfloat16 or float32.
        kv: (keys of all sequences, 2, key heads, head dim), in the element type of ``q``.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) in int32: the row of ``q`` and of ``kv`` at which each
            sequence begins, and the end of the last one.
        max_seqlen_q, max_seqlen_k: Upper bounds of the lengths; the number of rows if None, which is slower.
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic: As in :func:`flash_attn_func`.
        alibi_slopes: (heads,) or (sequences, heads).
        return_attn_probs: Whether to return ``(out, softmax_lse, None)``.

    Returns:
        The output, with the shape and element type of ``q``; with ``return_attn_probs`` also the log-sum-exps,
        (heads, queries of all sequences) in float32, and None.

    Raises:
        TypeError, ValueError, NotImplementedError: As in :func:`flash_attn_func`.
    """
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
    compiling = _is_compiling()
    if _torch is None or not (compiling or _torch.is_recorded(*tensors)):
        # Recorded ones stay whole, so that the gradient of a packed tensor is written into one.
        tensors = _separate(tensors)
    serve = _serve_compiled if compiling else _serve
    result = serve((*tensors, *others), numbers, function, lse, deterministic)
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
    """Computes attention with the signature of ``torch.nn.functional.scaled_dot_product_attention``.

    Heads come before positions here. The function has gradients with respect to ``query``, ``key``, ``value``
    and an additive ``attn_mask``. There may be any number of dimensions before the last two, which are broadcast
    as in PyTorch: the last of them is the heads, those before it are the batch.

    Args:
        query: (batch, heads, queries, head dim), in float16, bfloat16 or float32.
        key: (batch, key heads, keys, head dim), in the element type of ``query``.
        value: (batch, key heads, keys, value head dim), in the element type of ``query``.
        attn_mask: A tensor that broadcasts to (batch, heads, queries, keys), which is not expanded in memory. In
            bool, True means that the query sees the key. In float32, float16 or bfloat16, it is added to the
            scores; a sum below -2^25 hides the key, so that a query whose keys are all hidden gives zeros, where
            PyTorch weighs them alike. ``causal_lower_right`` and ``causal_upper_left`` of
            ``torch.nn.attention.bias`` are accepted too. Not together with ``is_causal``.
        dropout_p: Must be 0.0.
        is_causal: Whether query ``i`` sees only keys 0 to ``i``, whatever the lengths, as in PyTorch. (In
            :func:`flash_attn_func` the last query is aligned with the last key instead.)
        scale: Factor of the scores; ``1 / sqrt(head dim)`` if None.
        enable_gqa: Whether there may be fewer key heads than query heads, which share them as in
            :func:`flash_attn_func`.
        deterministic: As in :func:`flash_attn_func`.

    Returns:
        The output, (batch, heads, queries, value head dim), in the element type of ``query``.

    Raises:
        TypeError: If an argument is not a tensor, or has an unsupported element type.
        ValueError: If shapes do not fit together, or ``attn_mask`` is given with ``is_causal``.
        NotImplementedError: If ``dropout_p`` is not 0, or if no kernel of the device supports the call.

    Example:
        A mask that hides the padding of each sequence, from ``lengths`` of shape (batch,)::

            seen = torch.arange(key.shape[2], device=key.device) < lengths[:, None, None, None]
            out = scaled_dot_product_attention(query, key, value, attn_mask=seen)
    """
    try:
        plain = not dropout_p
    except Exception:  # a tensor in the place of a number
        plain = False
    if not plain:
        _refuse(dropout_p=dropout_p)
    if deterministic is not False:
        deterministic = _flag("deterministic", deterministic)
    grouped = enable_gqa is not False and _flag("enable_gqa", enable_gqa)
    compiling = _is_compiling()
    if compiling or (not grouped and _has_groups(query, key)):
        fitted = _four_dimensions((query, key, value), attn_mask, grouped)
        if fitted is not None:
            return _fitted(*fitted, is_causal, scale, deterministic)
        if not grouped:
            _refuse_groups(query, key)
    try:
        if attn_mask is not None:
            return _masked(query, key, value, attn_mask, is_causal, scale, deterministic)
        return (_serve_compiled if compiling else _serve)(
            (query, key, value),
            (scale, is_causal, (-1, -1), 0, 0.0, None, None),
            "scaled_dot_product_attention",
            False,
            deterministic,
        )
    except ValueError:
        # Few calls come here, and looking at shapes takes long.
        fitted = _four_dimensions((query, key, value), attn_mask, grouped)
        if fitted is None:
            raise
    return _fitted(*fitted, is_causal, scale, deterministic)


def _fitted(
    tensors: tuple[Any, ...], attn_mask: Any, leading: tuple[int, ...], is_causal: Any, scale: Any, deterministic: bool
) -> Any:
    """Attention over tensors that were brought to four dimensions, with the leading dimensions that PyTorch returns."""
    query, key, value = tensors
    result = scaled_dot_product_attention(
        query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa=True, deterministic=deterministic
    )
    return result.reshape(*leading, *result.shape[2:])


def _masked(query: Any, key: Any, value: Any, attn_mask: Any, is_causal: Any, scale: Any, deterministic: bool) -> Any:
    """Attention with a mask that is a tensor, or one of PyTorch's causal biases, which stand for one."""
    if _flag("is_causal", is_causal):
        raise ValueError("attn_mask was given with is_causal=True, expected one of the two")
    rules = _causal_bias(attn_mask, query, key) or _mask_rules(attn_mask, query, key)
    numbers, tensors = (scale, *_NO_RULES), (query, key, value)
    return _attend_with_rules(tensors, numbers, "scaled_dot_product_attention", False, rules, deterministic)


def info() -> dict[str, Any]:
    """Describes the package, the devices it can use, and the last call.

    Returns:
        A dictionary with these entries:

        - ``version``: The version of the package.
        - ``cpu``: The threads and vector instructions of the CPU back end.
        - ``gpus``: A list of usable GPUs.
        - ``no_gpu``: Why there is none, or None.
        - ``last``: The last call, None before the first: its ``device``, ``problem``, ``kernel``, the kernel's
          ``configuration``, and the ``reason`` for the choice, which says why other kernels were not used.

    Example:
        ::

            flash_attn_func(q, k, v)
            print(flashcore.info()["last"]["kernel"])      # such as "gpu/forward" or "cpu/blocked"
    """
    return _info()
