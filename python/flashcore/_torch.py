"""PyTorch: the operators that its dispatcher and its compiler know.

A call on ordinary tensors does not come here: it goes straight to the kernel. This is the way of
``torch.compile``, ``torch.export``, tensor subclasses and modes.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _flashcore

_flashcore.adopt_torch(torch)

is_compiling = torch.compiler.is_dynamo_compiling

_library = torch.library.Library("flashcore", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_ARGUMENTS = "(Tensor q, Tensor k, Tensor v, float? softmax_scale, bool causal)"
_library.define(f"attention{_ARGUMENTS} -> Tensor", tags=_TAGS)
_library.define(f"attention_with_lse{_ARGUMENTS} -> (Tensor, Tensor)", tags=_TAGS)


def _attention(q: Any, k: Any, v: Any, scale: float | None, causal: bool) -> Any:
    return _flashcore.attend_dispatched(q, k, v, scale, causal, False)


def _attention_with_lse(q: Any, k: Any, v: Any, scale: float | None, causal: bool) -> Any:
    return _flashcore.attend_dispatched(q, k, v, scale, causal, True)


def _fake_attention(q: Any, k: Any, v: Any, scale: float | None, causal: bool) -> Any:
    _check(q, k, v)
    batch, queries, heads, _ = q.shape
    return q.new_empty((batch, queries, heads, v.shape[3]))


def _fake_attention_with_lse(q: Any, k: Any, v: Any, scale: float | None, causal: bool) -> Any:
    output = _fake_attention(q, k, v, scale, causal)
    batch, queries, heads, _ = q.shape
    return output, q.new_empty((batch, heads, queries), dtype=torch.float32)


def _check(q: Any, k: Any, v: Any) -> None:
    """What can be said of tensors that have no memory; the rest is said when there is one."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} has {tensor.dim()} dimensions, expected 4: (batch, length, heads, head dim)"
            )
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} has element type {tensor.dtype}, expected {q.dtype} like q")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, expected {q.device} like q")


def _no_backward(context: Any, *gradients: Any) -> Any:
    raise NotImplementedError("FlashCore has no backward pass yet")


for _name, _run, _fake in (
    ("attention", _attention, _fake_attention),
    ("attention_with_lse", _attention_with_lse, _fake_attention_with_lse),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _run, _key)
    torch.library.register_fake(f"flashcore::{_name}", _fake, lib=_library)
    torch.library.register_autograd(f"flashcore::{_name}", _no_backward, lib=_library)


def refuse_gradient(name: str, tensor: Any) -> None:
    """Refuses a tensor whose gradient would be lost."""
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name} requires grad, expected a tensor that does not: FlashCore has no backward pass "
            "yet; call it under torch.no_grad() or detach the tensor"
        )


def attend(q: Any, k: Any, v: Any, scale: float | None, causal: bool, lse: bool, pytorch: bool) -> Any:
    """Attention through the dispatcher; with ``pytorch``, by the conventions of PyTorch's function."""
    names = ("query", "key", "value") if pytorch else ("q", "k", "v")
    for name, tensor in zip(names, (q, k, v)):
        refuse_gradient(name, tensor)
    if pytorch:
        if causal:
            queries, keys = q.shape[2], k.shape[2]
            if queries > keys:
                raise NotImplementedError(
                    f"is_causal with {queries} queries and {keys} keys is not supported: expected no "
                    "more queries than keys"
                )
            # Keys behind the last query are seen by nobody, and without them the mask is ours.
            k, v = k[:, :, :queries], v[:, :, :queries]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if lse:
        return torch.ops.flashcore.attention_with_lse(q, k, v, scale, causal)
    output = torch.ops.flashcore.attention(q, k, v, scale, causal)
    return output.transpose(1, 2) if pytorch else output
