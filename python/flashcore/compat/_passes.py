"""FlashAttention-2's forward and backward pass as functions of their own, which libraries call inside of their own
autograd functions: context parallelism, packed modules, pipelines."""

from __future__ import annotations

from typing import Any

import torch

from .. import _gradients, flash_attn_func, flash_attn_varlen_func
from .._arguments import flag, refuse
from .._serving import is_compiling, widen
from .._torch import refuse_odd
from ._adapted import softcap_above_zero

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
]


def _flash_attn_forward(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Any,
    return_softmax: bool,
) -> Any:
    """Computes attention as :func:`flashcore.flash_attn_func` does.

    Args:
        dropout_p: Must be 0.0, or so small that 1 minus it is 1 in float32: callers that want log-sum-exps of early
            versions pass 1e-30.
        window_size_left, window_size_right: The window; negative for an unbounded side.
        return_softmax: Ignored: there is no mask of what was dropped.
        q, k, v, softmax_scale, causal, softcap, alibi_slopes: As in :func:`flashcore.flash_attn_func`.

    Returns:
        ``(out, softmax_lse, S_dmask, rng_state)``: the output, the log-sum-exps, (batch, heads, queries) in float32, an
        empty tensor, and two zeros in int64.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`flashcore.flash_attn_func`.
    """
    _check(q=q, k=k, v=v)
    out, lse, _ = flash_attn_func(
        q,
        k,
        v,
        _dropping(dropout_p),
        softmax_scale,
        causal,
        (window_size_left, window_size_right),
        softcap_above_zero(softcap),
        alibi_slopes,
        return_attn_probs=True,
    )
    return out, lse, *_without_dropout(q)


def _flash_attn_varlen_forward(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    return_softmax: bool = False,
    block_table: Any = None,
    leftpad_k: Any = None,
    seqused_k: Any = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Any:
    """Computes attention as :func:`flashcore.flash_attn_varlen_func` does.

    Args:
        dropout_p, window_size_left, window_size_right, return_softmax: As in :func:`_flash_attn_forward`.
        zero_tensors: Must be False.
        leftpad_k: Must be None.
        num_splits: A hint; ignored.
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, softcap,
            alibi_slopes, block_table, seqused_k: As in :func:`flashcore.flash_attn_varlen_func`.

    Returns:
        As :func:`_flash_attn_forward`, with log-sum-exps of (heads, queries of all sequences).

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`flashcore.flash_attn_varlen_func`.
    """
    refuse(leftpad_k=leftpad_k, zero_tensors=zero_tensors)
    _check(q=q, k=k, v=v)
    out, lse = flash_attn_varlen_func(
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
        window_size=(window_size_left, window_size_right),
        softcap=softcap_above_zero(softcap),
        num_splits=num_splits,
        return_attn_probs=True,
        dropout_p=_dropping(dropout_p),
        alibi_slopes=alibi_slopes,
        block_table=block_table,
    )
    return out, lse, *_without_dropout(q)


def _flash_attn_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Any,
    deterministic: bool,
    rng_state: Any = None,
) -> Any:
    """Computes the gradients of :func:`_flash_attn_forward`.

    Args:
        dout: The gradient of ``out``.
        out, softmax_lse: What the forward pass returned; that of all parts where keys are computed in parts.
        dq, dk, dv: Tensors with the shapes and element types of ``q``, ``k`` and ``v``, into which the gradients are
            written; if None they are computed and dropped.
        deterministic: Whether gradients have the same bits in every call.
        rng_state: Ignored: there is no dropout.
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes: As in
            the forward pass.

    Returns:
        (batch, heads, queries) in float32: the products of ``dout`` and ``out``, added over the head dim.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`flashcore.flash_attn_func`.
    """
    refuse(dropout_p=_dropping(dropout_p))
    window, softcap = (window_size_left, window_size_right), softcap_above_zero(softcap)
    numbers = (softmax_scale, causal, window, 0, softcap, None, None)
    lists = (*(None,) * 7, alibi_slopes)
    _backward((dout, out, softmax_lse), (q, k, v), (dq, dk, dv), lists, numbers, "flash_attn_func", deterministic)
    return _products(dout, out).transpose(1, 2).contiguous()


def _flash_attn_varlen_backward(
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
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Any,
    deterministic: bool,
    rng_state: Any = None,
    zero_tensors: bool = False,
) -> Any:
    """Computes the gradients of :func:`_flash_attn_varlen_forward`.

    Args:
        zero_tensors: Ignored: rows that belong to no sequence have gradients of zero.
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
            window_size_right, softcap, alibi_slopes, deterministic, rng_state: As in :func:`_flash_attn_backward`.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: As in the forward pass.

    Returns:
        (heads, queries of all sequences) in float32: the products of ``dout`` and ``out``, added over the head dim.

    Raises:
        TypeError, ValueError, NotImplementedError: As :func:`flashcore.flash_attn_varlen_func`.
    """
    refuse(dropout_p=_dropping(dropout_p))
    window, softcap = (window_size_left, window_size_right), softcap_above_zero(softcap)
    numbers = (softmax_scale, causal, window, 0, softcap, max_seqlen_q, max_seqlen_k)
    lists = (cu_seqlens_q, cu_seqlens_k, *(None,) * 5, alibi_slopes)
    function = "flash_attn_varlen_func"
    _backward((dout, out, softmax_lse), (q, k, v), (dq, dk, dv), lists, numbers, function, deterministic)
    return _products(dout, out).transpose(0, 1).contiguous()


# FlashAttention-2's own are operators of PyTorch, which these functions call where it traces them.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _without_dropout(q: Any) -> Any:
    """Returns what a forward pass without dropout has in the place of its mask and its random state."""
    return q.new_empty(0), torch.zeros(2, dtype=torch.int64, device=q.device)


def _dropping(dropout_p: Any) -> Any:
    """Returns a probability of dropout, or 0 for one that drops nothing, since 1 minus it is 1 in float32."""
    return 0.0 if isinstance(dropout_p, float) and 0 <= dropout_p < 2**-25 else dropout_p


def _check(**tensors: Any) -> None:
    """Refuses anything but dense tensors of PyTorch."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor)}, expected a tensor of PyTorch")
        refuse_odd(name, tensor)


def _dense(tensor: Any) -> Any:
    """Returns a tensor whose last dimension is contiguous."""
    return tensor if tensor.dim() == 0 or tensor.stride(-1) == 1 else tensor.contiguous()


def _backward(
    saved: tuple[Any, Any, Any],
    tensors: tuple[Any, Any, Any],
    gradients: tuple[Any, Any, Any],
    lists: tuple[Any, ...],
    numbers: tuple[Any, ...],
    function: str,
    deterministic: bool,
) -> None:
    """Writes the gradients of attention, into new tensors where there is None. ``saved`` holds the gradient of the
    output, the output and the log-sum-exps."""
    _check(**dict(zip(("dout", "out", "softmax_lse", "q", "k", "v"), (*saved, *tensors))))
    *others, slopes = lists
    optional = zip(
        ("dq", "dk", "dv", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "alibi_slopes"),
        (*gradients, *others[:4], slopes),
    )
    _check(**{name: it for name, it in optional if it is not None})
    lists = (*others, None if slopes is None else widen(slopes))
    lists = (*lists, *_gradients.NONE[len(lists) :])
    dout, out, lse = _dense(saved[0]), _dense(saved[1]), saved[2].contiguous()
    q, k, v = map(_dense, tensors)
    deterministic = flag("deterministic", deterministic) or torch.are_deterministic_algorithms_enabled()
    with torch.no_grad():
        if not is_compiling() and _gradients.are_ordinary((dout, out, lse, q, k, v, *gradients, *lists)):
            # Rows that belong to no sequence are not written.
            ragged = any(it is not None for it in lists[:4])
            into = [torch.empty_like(it) if to is None else to for it, to in zip((q, k, v), gradients)]
            for gradient in into if ragged else ():
                gradient.zero_()
            given = _gradients.with_gradients(out, lse, dout, None)
            _gradients.run((q, k, v, *lists), numbers, function, given, (*into, None), deterministic)
            return
        call = (*_gradients.flat(numbers), *lists, function, deterministic, [True, True, True, False])
        for name, to, made in zip(
            ("dq", "dk", "dv"), gradients, _gradients.operators.attention_backward(dout, q, k, v, out, lse, None, *call)
        ):
            if to is None:
                continue
            if to.shape != made.shape or to.dtype != made.dtype:
                raise ValueError(
                    f"{name} is {list(to.shape)} of {to.dtype}, expected {list(made.shape)} of {made.dtype}"
                )
            to.copy_(made)


def _products(dout: Any, out: Any) -> Any:
    """Returns the products of two tensors, added over the last dimension in float32."""
    with torch.no_grad():
        return dout.to(torch.float32, copy=True).mul_(out).sum(-1)
