"""PyTorch: the operators that its dispatcher and its compiler know.

A call on ordinary tensors does not come here: it goes straight to the kernel. This is the way of
``torch.compile``, ``torch.export``, tensor subclasses and modes.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _flashcore
from ._arguments import window

_flashcore.adopt_torch(torch)

is_compiling = torch.compiler.is_dynamo_compiling

_library = torch.library.Library("flashcore", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_LISTS = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
    "cache_leftpad",
    "cache_batch_idx",
    "page_table",
    "alibi_slopes",
    "s_aux",
)
_FEW = "(Tensor q, Tensor k, Tensor v, float? softmax_scale=None, bool causal=False)"
_ALL = (
    "(Tensor q, Tensor k, Tensor v, float? softmax_scale, bool causal, int window_left, "
    "int window_right, int attention_chunk, float softcap, SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
    f"{', '.join(f'Tensor? {name}' for name in _LISTS)}, str function)"
)
# The dispatcher looks at each argument that there is, so the plain call has an overload of its own.
for _overload, _arguments in (("", _FEW), (".all", _ALL)):
    _library.define(f"attention{_overload}{_arguments} -> Tensor", tags=_TAGS)
    _library.define(f"attention_with_lse{_overload}{_arguments} -> (Tensor, Tensor)", tags=_TAGS)
# What a plain call has beyond the arguments of its overload.
_PLAIN = ((-1, -1, 0, 0.0, None, None), (None,) * len(_LISTS), "flash_attn_func")
# The queries, rotated, or nothing in an empty tensor: an answer is no input. And the new lengths.
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


def _call(lse: bool, q: Any, k: Any, v: Any, scale: Any, causal: Any, others: tuple[Any, ...]) -> Any:
    numbers, lists, function = (others[:6], others[6:-1], others[-1]) if others else _PLAIN
    left, right, *rest = numbers
    return _flashcore.attend((q, k, v, *lists), (scale, causal, (left, right), *rest), function, lse, "dispatcher")


def _attention(q: Any, k: Any, v: Any, scale: Any = None, causal: Any = False, *others: Any) -> Any:
    return _call(False, q, k, v, scale, causal, others)


def _attention_with_lse(q: Any, k: Any, v: Any, scale: Any = None, causal: Any = False, *others: Any) -> Any:
    return _call(True, q, k, v, scale, causal, others)


def _fake_attention(q: Any, k: Any, v: Any, *others: Any) -> Any:
    """What can be said of tensors that have no memory; the rest is said when there is one."""
    for name, tensor in (("k", k), ("v", v)):
        _check_like(name, tensor, q)
    # Behind the scale and the causal mask: six numbers, and where packed queries begin.
    expected = 4 if len(others) <= 8 or others[8] is None else 3
    if q.dim() != expected:
        raise ValueError(f"q has {q.dim()} dimensions, expected {expected}")
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _fake_attention_with_lse(q: Any, k: Any, v: Any, *others: Any) -> Any:
    output = _fake_attention(q, k, v, *others)
    *batch, queries, heads, _ = q.shape
    return output, q.new_empty((*batch, heads, queries), dtype=torch.float32)


def _no_backward(context: Any, *gradients: Any) -> Any:
    raise NotImplementedError("FlashCore has no backward pass yet")


def _append(*arguments: Any) -> Any:
    interleaved, advancing, most = arguments[13:]
    # A causal mask stands for all that makes queries advance.
    flags = (interleaved, advancing, (-1, -1), 0, False, most)
    rotated, lengths = _flashcore.append(arguments[:13], flags, "dispatcher")
    return arguments[4].new_empty(0) if rotated is None else rotated, lengths


def _fake_append(
    k_cache: Any, v_cache: Any, k: Any, v: Any, q: Any, cache_seqlens: Any, *others: Any
) -> Any:
    for name, tensor in (("v_cache", v_cache), ("k", k), ("v", v), ("q", q)):
        _check_like(name, tensor, k_cache, "k_cache")
    rotary_cos = others[4]
    rotated = q.new_empty(0) if rotary_cos is None else q.new_empty(q.shape)
    return rotated, torch.empty_like(cache_seqlens)


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
    ("attention.all", _attention, _fake_attention),
    ("attention_with_lse", _attention_with_lse, _fake_attention_with_lse),
    ("attention_with_lse.all", _attention_with_lse, _fake_attention_with_lse),
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


def attend(tensors: tuple[Any, ...], numbers: tuple[Any, ...], function: str, lse: bool) -> Any:
    """Attention through the dispatcher."""
    names = {
        "flash_attn_with_kvcache": ("q", "k_cache", "v_cache"),
        "flash_attn_with_kvcache, block_table": ("q", "k_cache", "v_cache"),
        "scaled_dot_product_attention": ("query", "key", "value"),
        "flash_attn_qkvpacked_func": ("qkv", "qkv", "qkv"),
        "flash_attn_kvpacked_func": ("q", "kv", "kv"),
    }.get(function, ("q", "k", "v"))
    _refuse_gradients((*names, *_LISTS), tensors)
    operator = torch.ops.flashcore.attention_with_lse if lse else torch.ops.flashcore.attention
    scale, causal, window_size, *rest = numbers
    numbers = (scale, causal, *window(window_size), *rest)
    others, _, plain = _PLAIN
    if function == plain and numbers[2:] == others and all(list is None for list in tensors[3:]):
        return operator.default(*tensors[:3], *numbers[:2])
    return operator.all(*tensors[:3], *numbers, *tensors[3:], function)


def append(tensors: tuple[Any, ...], flags: tuple[Any, ...]) -> Any:
    """New keys and values through the dispatcher: the queries, rotated or None, and the lengths."""
    names = ("k_cache", "v_cache", "k", "v", "q", "cache_seqlens")
    for name, tensor in zip(names, tensors):
        if tensor is None:
            raise ValueError(f"{name} is None, expected a tensor with k and v")
    _refuse_gradients(names, tensors)
    interleaved, causal, window_size, chunk, _, most = flags
    left, right = window(window_size)
    advancing = causal or left >= 0 or right >= 0 or chunk > 0
    rotated, lengths = torch.ops.flashcore.append(*tensors, interleaved, advancing, most)
    return None if tensors[10] is None else rotated, lengths


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
