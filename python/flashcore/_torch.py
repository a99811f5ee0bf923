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


_LISTS = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
    "cache_leftpad",
    "cache_batch_idx",
    "page_table",
)
_library.define(
    "sequences(Tensor q, Tensor k, Tensor v, "
    f"{', '.join(f'Tensor? {name}' for name in _LISTS)}, Tensor? alibi_slopes, Tensor? s_aux, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float? softmax_scale, bool causal, "
    "int window_left, int window_right, float softcap, str function) -> (Tensor, Tensor)",
    tags=_TAGS,
)
# The queries, turned, or nothing in an empty tensor: an answer is no input. And the new lengths.
_library.define(
    "append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor q, "
    "Tensor cache_seqlens, Tensor? cu_seqlens_k_new, Tensor? cu_seqlens_q, Tensor? cache_batch_idx, "
    "Tensor? page_table, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? rotary_seqlens, "
    "bool interleaved, bool advancing, SymInt? max_seqlen_q) -> (Tensor, Tensor)",
    tags=_TAGS,
)
_library.define(
    "combine(Tensor out_partial, Tensor lse_partial, ScalarType? dtype) -> (Tensor, Tensor)", tags=_TAGS
)
_library.define(
    "combine_out(Tensor out_partial, Tensor lse_partial, Tensor(a!) out) -> Tensor", tags=_TAGS
)
_library.define(
    "merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)", tags=_TAGS
)


def _sequences(*arguments: Any) -> Any:
    tensors, numbers, function = arguments[:12], arguments[12:19], arguments[19]
    return _flashcore.attend_sequences(tensors, numbers, function, True, "dispatcher")


def _fake_sequences(q: Any, k: Any, v: Any, *others: Any) -> Any:
    for name, tensor in (("k", k), ("v", v)):
        _check_like(name, tensor, q)
    output = q.new_empty((*q.shape[:-1], v.shape[-1]))
    sums = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    return output, q.new_empty(sums, dtype=torch.float32)


def _append(*arguments: Any) -> Any:
    turned, lengths = _flashcore.append(arguments[:13], arguments[13:15], arguments[15], "dispatcher")
    return arguments[4].new_empty(0) if turned is None else turned, lengths


def _fake_append(
    k_cache: Any, v_cache: Any, k: Any, v: Any, q: Any, cache_seqlens: Any, *others: Any
) -> Any:
    for name, tensor in (("v_cache", v_cache), ("k", k), ("v", v), ("q", q)):
        _check_like(name, tensor, k_cache, "k_cache")
    rotary_cos = others[4]
    turned = q.new_empty(0) if rotary_cos is None else q.new_empty(q.shape)
    return turned, torch.empty_like(cache_seqlens)


def _combine(out_partial: Any, lse_partial: Any, dtype: Any) -> Any:
    name = None if dtype is None else str(dtype).rpartition(".")[2]
    return _flashcore.combine((out_partial, lse_partial, None), name, "dispatcher")


def _fake_combine(out_partial: Any, lse_partial: Any, dtype: Any) -> Any:
    _, batch, queries, heads, dim = out_partial.shape
    output = out_partial.new_empty((batch, queries, heads, dim), dtype=dtype or torch.float32)
    return output, out_partial.new_empty((batch, heads, queries))


def _combine_out(out_partial: Any, lse_partial: Any, out: Any) -> Any:
    return _flashcore.combine((out_partial, lse_partial, out), None, "dispatcher")[1]


def _fake_combine_out(out_partial: Any, lse_partial: Any, out: Any) -> Any:
    _, batch, queries, heads, _ = out_partial.shape
    return out_partial.new_empty((batch, heads, queries))


def _merge(*tensors: Any) -> Any:
    return _flashcore.merge(tensors, "dispatcher")


def _fake_merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    _check_like("out_b", out_b, out_a, "out_a")
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


def _check_like(name: str, tensor: Any, other: Any, first: str = "q") -> None:
    if tensor.dtype != other.dtype:
        raise TypeError(f"{name} has element type {tensor.dtype}, expected {other.dtype} like {first}")
    if tensor.device != other.device:
        raise ValueError(f"{name} is on {tensor.device}, expected {other.device} like {first}")


# Those that write into their arguments have no derivatives that could be registered.
_MUTABLE = ("append", "combine_out")

for _name, _run, _fake in (
    ("attention", _attention, _fake_attention),
    ("attention_with_lse", _attention_with_lse, _fake_attention_with_lse),
    ("sequences", _sequences, _fake_sequences),
    ("append", _append, _fake_append),
    ("combine", _combine, _fake_combine),
    ("combine_out", _combine_out, _fake_combine_out),
    ("merge", _merge, _fake_merge),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _run, _key)
    torch.library.register_fake(f"flashcore::{_name}", _fake, lib=_library)
    if _name not in _MUTABLE:
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


def attend_sequences(tensors: tuple[Any, ...], numbers: tuple[Any, ...], function: str, lse: bool) -> Any:
    """Attention over sequences through the dispatcher."""
    cached = function == "flash_attn_with_kvcache"
    names = ("q", "k_cache", "v_cache") if cached else ("q", "k", "v")
    _refuse_gradients((*names, *_LISTS, "alibi_slopes", "s_aux"), tensors)
    output, sums = torch.ops.flashcore.sequences(*tensors, *numbers, function)
    return (output, sums) if lse else output


def append(tensors: tuple[Any, ...], flags: tuple[bool, bool], most: int | None) -> Any:
    """New keys and values through the dispatcher: the queries, turned or None, and the lengths."""
    names = ("k_cache", "v_cache", "k", "v", "q", "cache_seqlens")
    for name, tensor in zip(names, tensors):
        if tensor is None:
            raise ValueError(f"{name} is None, expected a tensor with k and v")
    _refuse_gradients(names, tensors)
    turned, lengths = torch.ops.flashcore.append(*tensors, *flags, most)
    return None if tensors[10] is None else turned, lengths


def combine(tensors: tuple[Any, ...], dtype: Any) -> Any:
    """Parts put together through the dispatcher."""
    _refuse_gradients(("out_partial", "lse_partial", "out"), tensors)
    out_partial, lse_partial, out = tensors
    if out is None:
        return torch.ops.flashcore.combine(out_partial, lse_partial, dtype)
    if dtype is not None and dtype != out.dtype:
        raise TypeError(f"out has element type {out.dtype}, expected {dtype} as out_dtype says")
    return out, torch.ops.flashcore.combine_out(out_partial, lse_partial, out)


def merge(tensors: tuple[Any, ...]) -> Any:
    """Two answers put together through the dispatcher."""
    _refuse_gradients(("out_a", "lse_a", "out_b", "lse_b"), tensors)
    return torch.ops.flashcore.merge(*tensors)


def _refuse_gradients(names: tuple[str, ...], tensors: tuple[Any, ...]) -> None:
    for name, tensor in zip(names, tensors):
        refuse_gradient(name, tensor)


def is_tensor(thing: Any) -> bool:
    """Whether something is a tensor of PyTorch's."""
    return isinstance(thing, torch.Tensor)


def full(count: int, value: int, like: Any) -> Any:
    """A list of one number on the device of a tensor."""
    return torch.full((count,), value, dtype=torch.int32, device=like.device)
