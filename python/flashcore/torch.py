"""PyTorch's own attention on FlashCore.

    import flashcore.torch

    flashcore.torch.activate()      # from now on F.scaled_dot_product_attention on CUDA uses FlashCore
    flashcore.torch.restore()       # back to PyTorch's own kernels

This uses a switch of PyTorch, from 2.11 on, and applies to the whole process. Calls of
``F.scaled_dot_product_attention``, ``nn.MultiheadAttention`` and everything built on them that PyTorch would
give to FlashAttention-2 (float16 and bfloat16 on CUDA, without a mask or with the causal one) run on
FlashCore, forward and backward. All other calls run as before. Dropout raises a ``NotImplementedError``.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from . import _flashcore, _gradients
from ._arguments import refusal, refuse

NAME = "flashcore"

_HEADS_FIRST = "scaled_dot_product_attention"


def activate() -> None:
    """Makes PyTorch's attention on CUDA use FlashCore's kernels, in the whole process.

    Raises:
        NotImplementedError: If PyTorch is older than 2.11.

    Example:
        ::

            flashcore.torch.activate()
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    """
    attention = torch.nn.attention
    if not hasattr(attention, "register_flash_attention_impl"):
        raise NotImplementedError(f"PyTorch {torch.__version__} has no switch for this, expected 2.11 or later")
    attention.register_flash_attention_impl(NAME, register_fn=_Registered)
    attention.activate_flash_attention_impl(NAME)


def restore() -> None:
    """Makes PyTorch's attention use PyTorch's own kernels again."""
    torch.nn.attention.restore_flash_attention_impl()


class _Registered:
    """Our implementations of PyTorch's operators, for as long as it lives."""

    def __init__(self) -> None:
        self._library: Any = torch.library.Library("aten", "IMPL", "CUDA")
        with warnings.catch_warnings():
            # That there was one before, which is the point.
            warnings.simplefilter("ignore", UserWarning)
            for operator, ours in (
                ("_scaled_dot_product_flash_attention", heads_first),
                ("_scaled_dot_product_flash_attention_backward", heads_first_backward),
                ("_flash_attention_forward", rows),
                ("_flash_attention_backward", rows_backward),
            ):
                self._library.impl(operator, ours, "CUDA", allow_override=True)
        # Over these, where PyTorch can call them, kernels that answer alike without entering Python.
        self._kernels = _flashcore.Kernels.register(torch._C.__file__, "aten", "CUDA", _refuse)

    def remove(self) -> None:
        if self._kernels is not None:
            self._kernels.remove()
        self._library._destroy()


def heads_first(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """Implements ``aten::_scaled_dot_product_flash_attention``.

    Tensors are (batch, heads, length, head dim), in float16 or bfloat16 on CUDA. Returns what the operator returns:
    output, log-sum-exps, no cumulative lengths, the two lengths, unused random state and an empty mask.
    """
    _refuse(dropout_p, return_debug_mask)
    out = torch.empty_like(query)
    tensors, function = _in_order((query, key, value), is_causal)
    into = out if function == _HEADS_FIRST else out.transpose(1, 2)
    _, lse = _flashcore.attend(
        (*tensors, *_gradients.NONE, into), _numbers(scale, is_causal), function, True, "dispatcher"
    )
    return out, lse, None, None, query.shape[2], key.shape[2], *_random(query)


def heads_first_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Any,
    philox_offset: Any,
    *,
    scale: float | None = None,
) -> Any:
    """Implements ``aten::_scaled_dot_product_flash_attention_backward``: returns the gradients of query, key and value."""
    gradients = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
    all_tensors = (query, key, value, out, grad_out, *gradients)
    (q, k, v, o, do, dq, dk, dv), function = _in_order(all_tensors, is_causal)
    _gradients.run(
        (q, k, v),
        _numbers(scale, is_causal),
        function,
        (o, logsumexp, do, None),
        (dq, dk, dv, None),
        torch.are_deterministic_algorithms_enabled(),
    )
    return gradients


def rows(
    query: Any,
    key: Any,
    value: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Any = None,
    alibi_slopes: Any = None,
    num_splits: int | None = None,
    **others: Any,
) -> Any:
    """Implements ``aten::_flash_attention_forward``.

    Tensors are (batch, length, heads, head dim), or (rows, heads, head dim) with cumulative lengths in int32. Returns
    what the operator returns: output, log-sum-exps, unused random state and an empty mask.

    PyTorch's next versions add arguments, such as ``block_table``. ``num_splits`` is a hint, and the others are refused
    unless they are None.
    """
    _refuse(dropout_p, return_debug_mask)
    for name, given in others.items():
        if given is not None:
            raise refusal(name, given, None)
    tensors = (query, key, value, cum_seq_q, cum_seq_k, None, seqused_k, None, None, None, alibi_slopes)
    numbers = _numbers(scale, is_causal, (window_size_left, window_size_right), max_q, max_k)
    out, lse = _flashcore.attend(tensors, numbers, "flash_attn_varlen_func", True, "dispatcher")
    return out, lse, *_random(query)


def rows_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Any,
    unused: Any,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:
    """Implements ``aten::_flash_attention_backward``: returns the gradients of query, key and value."""
    lists = (cum_seq_q, cum_seq_k, *_gradients.NONE[2:])
    numbers = _numbers(scale, is_causal, (window_size_left, window_size_right), max_q, max_k)
    function, deterministic = "flash_attn_varlen_func", torch.are_deterministic_algorithms_enabled()
    needed = (True, True, True, False)
    saved = (out, logsumexp, grad_out, None)
    found = _gradients.backward(saved, (query, key, value), lists, numbers, function, deterministic, needed)
    return tuple(found[:3])


def _refuse(dropout_p: float, return_debug_mask: bool) -> None:
    if dropout_p or return_debug_mask:
        refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask or None)


def _in_order(tensors: tuple[Any, ...], is_causal: bool) -> tuple[tuple[Any, ...], str]:
    """Tensors, and the function that reads them: PyTorch's mask is anchored at the first key, these
    operators' at the last, which is the same where there are as many keys as queries."""
    if not is_causal or tensors[0].shape[2] == tensors[1].shape[2]:
        return tensors, _HEADS_FIRST
    return tuple(tensor.transpose(1, 2) for tensor in tensors), "flash_attn_func"


def _numbers(
    scale: float | None, causal: bool, window: Any = (-1, -1), max_q: Any = None, max_k: Any = None
) -> tuple[Any, ...]:
    return scale, causal, window, 0, 0.0, max_q, max_k


def _random(query: Any) -> tuple[Any, Any, Any]:
    """The state of random numbers, which nobody draws, and no mask of them."""
    state, offset, mask = _templates(query.device, query.dtype)
    # Fresh memory, as PyTorch's compiler may use it for something else; where there is none, none is needed.
    return torch.empty_like(state), torch.empty_like(offset), mask


@functools.cache
def _templates(device: Any, dtype: Any) -> tuple[Any, Any, Any]:
    # To make a tensor like another one takes half the time.
    with torch.inference_mode(False):
        state = torch.empty(2, dtype=torch.uint64, device=device)
        offset = torch.empty((), dtype=torch.uint64, device=device)
        return state, offset, torch.empty(0, dtype=dtype, device=device)
