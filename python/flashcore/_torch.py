"""PyTorch: the operators that its dispatcher and its compiler know.

A call on ordinary tensors does not come here: it goes straight to the kernel, or to autograd
(:func:`record`). This is the way of ``torch.compile``, ``torch.export``, tensor subclasses and modes.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _flashcore, _flops, _gradients, _transforms
from ._arguments import check_rows, name_of_type, shown, window

_flashcore.adopt_torch(torch)

is_compiling = torch.compiler.is_dynamo_compiling
Tensor = torch.Tensor

_library = torch.library.Library(_gradients.NAMESPACE, "DEF")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
SMALL_FLOATS = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
# Keys and values may be integers, queries may not.
_SMALL = frozenset((*SMALL_FLOATS, torch.int8))
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
    "q_descale",
    "k_descale",
    "v_descale",
)
_FEW = "(Tensor q, Tensor k, Tensor v, float? softmax_scale=None, bool causal=False)"
_CALL = (
    "float? softmax_scale, bool causal, int window_left, int window_right, int attention_chunk, "
    "float softcap, SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
    f"{', '.join(f'Tensor? {name}' for name in _LISTS)}, str function, bool deterministic"
)
_ALL = f"(Tensor q, Tensor? k, Tensor? v, {_CALL})"
# The dispatcher inspects every argument, so the plain call has an overload with few of them.
for _overload, _arguments in (("", _FEW), (".all", _ALL)):
    _library.define(f"attention{_overload}{_arguments} -> Tensor", tags=_TAGS)
    _library.define(f"attention_with_lse{_overload}{_arguments} -> (Tensor, Tensor)", tags=_TAGS)
# The gradients of q, k, v and s_aux that are needed. PyTorch keeps compiled graphs on disk, and finds those of the
# backward pass by the operators of the forward pass: once released, an operator for gradients that takes other
# arguments needs new names for both.
_library.define(
    "attention_backward(Tensor dout, Tensor q, Tensor? k, Tensor? v, Tensor out, Tensor softmax_lse, Tensor? dlse, "
    f"{_CALL}, bool[] needed) -> Tensor[]",
    tags=_TAGS,
)
# Returns the rotated queries (an empty tensor if there is no rotation, since an operator must not
# return its input) and the new lengths.
_library.define(
    "append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor q, "
    "Tensor cache_seqlens, Tensor? cu_seqlens_k_new, Tensor? cu_seqlens_q, Tensor? cache_batch_idx, "
    "Tensor? page_table, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? rotary_seqlens, "
    "Tensor(c!)? k_descale, Tensor(d!)? v_descale, bool interleaved, bool advancing, SymInt? max_seqlen_q) -> (Tensor, Tensor)",
    tags=_TAGS,
)
_library.define("combine(Tensor out_partial, Tensor lse_partial, ScalarType? dtype) -> (Tensor, Tensor)", tags=_TAGS)
_library.define("combine_out(Tensor out_partial, Tensor lse_partial, Tensor(a!) out) -> Tensor", tags=_TAGS)
_library.define("merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)", tags=_TAGS)


def _call(lse: bool, q: Any, k: Any, v: Any, scale: Any, causal: Any, others: tuple[Any, ...]) -> Any:
    numbers, lists, function, _ = (others[:6], others[6:-2], *others[-2:]) if others else _gradients.PLAIN
    numbers = _gradients.nested((scale, causal, *numbers))
    return _gradients.forward((q, k, v), lists, numbers, function, lse)


def _attention(q: Any, k: Any, v: Any, scale: Any = None, causal: Any = False, *others: Any) -> Any:
    return _call(False, q, k, v, scale, causal, others)


def _attention_with_lse(q: Any, k: Any, v: Any, scale: Any = None, causal: Any = False, *others: Any) -> Any:
    return _call(True, q, k, v, scale, causal, others)


def _fake_attention(q: Any, k: Any, v: Any, *others: Any) -> Any:
    """Returns an output of the right shape for tensors without memory, after the checks that shapes
    and types allow; the kernels check the rest."""
    q, k, v = _gradients.parts(q, k, v)
    names = _flashcore.tensor_names(others[-2])[:3] if len(others) > 2 else ("q", "k", "v")
    if q.dtype not in (*_FLOATS, *SMALL_FLOATS):
        raise TypeError(
            f"{names[0]} has element type {q.dtype}, expected float16, bfloat16, float32 or a float of 8 bits"
        )
    for name, tensor in zip(names[1:], (k, v)):
        _check_like(name, tensor, q, names[0])
    # ``others`` begins with the scale and the causal flag, then six numbers, then ``cu_seqlens_q``.
    expected = 4 if len(others) <= 8 or others[8] is None else 3
    if q.dim() != expected:
        raise ValueError(f"{names[0]} has {q.dim()} dimensions, expected {expected}")
    dtype = torch.bfloat16 if q.dtype in SMALL_FLOATS else q.dtype
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)


def _fake_attention_with_lse(q: Any, k: Any, v: Any, *others: Any) -> Any:
    output = _fake_attention(q, k, v, *others)
    *batch, queries, heads, _ = output.shape
    if len(others) > 2 and others[-2] == "scaled_dot_product_attention":
        queries, heads = heads, queries
    return output, q.new_empty((*batch, heads, queries), dtype=torch.float32)


def _no_backward(context: Any, *gradients: Any) -> Any:
    raise NotImplementedError("FlashCore has no gradients of combining and merging")


def _append(*arguments: Any) -> Any:
    interleaved, advancing, most = arguments[15:]
    # The causal flag stands for everything that gives queries successive positions.
    flags = (interleaved, advancing, (-1, -1), 0, False, most, None)
    rotated, lengths = _flashcore.append(arguments[:15], flags, "dispatcher")
    return arguments[4].new_empty(0) if rotated is None else rotated, lengths


def _fake_append(k_cache: Any, v_cache: Any, k: Any, v: Any, q: Any, cache_seqlens: Any, *others: Any) -> Any:
    if k_cache.dtype not in _SMALL and v_cache.dtype not in _SMALL:
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
    if tensor.dtype != other.dtype and tensor.dtype not in _SMALL:
        raise TypeError(f"{name} has element type {tensor.dtype}, expected {other.dtype} like {first}")
    if tensor.device != other.device:
        raise ValueError(f"{name} is on {tensor.device}, expected {other.device} like {first}")


# Operators that write into their arguments; no derivative can be registered for them.
_MUTABLE = ("append", "combine_out")
# Kernels that PyTorch calls without entering Python, registered for CUDA, where the host's time
# counts.
_kernels = _flashcore.Kernels.register(torch._C.__file__, _gradients.NAMESPACE, "CUDA")
_native = () if _kernels is None else _kernels.operators

for _name, _run, _fake in (
    ("attention", _attention, _fake_attention),
    ("attention.all", _attention, _fake_attention),
    ("attention_with_lse", _attention_with_lse, _fake_attention_with_lse),
    ("attention_with_lse.all", _attention_with_lse, _fake_attention_with_lse),
    ("attention_backward", _gradients.run_backward, _gradients.fake_backward),
    ("append", _append, _fake_append),
    ("combine", _combine, _fake_combine),
    ("combine_out", _combine_out, _fake_combine_out),
    ("merge", _merge, _fake_merge),
):
    for _key in ("CPU",) if _name in _native else ("CPU", "CUDA"):
        _library.impl(_name, _run, _key)
    _operator = f"{_gradients.NAMESPACE}::{_name}"
    torch.library.register_fake(_operator, _fake, lib=_library)
    if _name in ("combine", "merge"):
        torch.library.register_autograd(_operator, _no_backward, lib=_library)

# The attention operators, and how many of their leading arguments are tensors with a batch
# dimension.
for _overload, _tensors in (
    (_gradients.operators.attention.default, 3),
    (_gradients.operators.attention.all, 3),
    (_gradients.operators.attention_with_lse.default, 3),
    (_gradients.operators.attention_with_lse.all, 3),
    (_gradients.operators.attention_backward.default, 7),
):
    _derivative = _gradients.differentiate if _tensors == 3 else _gradients.refuse_second
    _remember = _gradients.remember if _tensors == 3 else None
    _transforms.register(_overload, _derivative, _remember, _tensors, _library)
_flops.register(_gradients.operators)


def is_recorded(*tensors: Any) -> bool:
    """Returns whether autograd records operations on these tensors, or a transform differentiates them."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                return True
        return _transforms.are_active() and any(map(_transforms.requires_grad, tensors))
    return False


def attend(tensors: tuple[Any, ...], numbers: tuple[Any, ...], function: str, lse: bool, deterministic: bool) -> Any:
    """Computes attention through PyTorch's dispatcher. A packed tensor is followed by None for each
    tensor packed into it."""
    if len(tensors) > 15:
        # The operators do not write to their arguments: the result is copied to ``out``.
        tensors, out = tensors[:15], tensors[15]
        refuse_unwritable("out", out)
        result = attend(tensors, numbers, function, lse, deterministic)
        made = result[0] if lse else result
        if out.shape != made.shape or out.dtype != made.dtype:
            raise ValueError(f"out is {list(out.shape)} of {out.dtype}, expected {list(made.shape)} of {made.dtype}")
        out.copy_(made)
        return (out, result[1]) if lse else out
    others, none, plain, _ = _gradients.PLAIN
    if not is_compiling():
        refuse_tangents(_flashcore.tensor_names(function), tensors)
        tensors = tuple(it.clone() if it is not None and it._is_zerotensor() else it for it in tensors)
    tensors = _autocast((*tensors, *none[len(tensors) - 3 :]))
    recorded = is_recorded(*tensors)
    if recorded:
        _refuse_caches(tensors, function)
        _refuse_small(tensors, function)
        if tensors[9] is not None:
            raise NotImplementedError(_PAGES)
    operator = _gradients.operators.attention_with_lse if lse or recorded else _gradients.operators.attention
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    numbers = _gradients.flat(numbers)
    few = function == plain and numbers[2:] == others and all(list is None for list in tensors[3:])
    if few and not (recorded and deterministic):
        result = _transforms.call(operator.default, *tensors[:3], *numbers[:2])
    else:
        result = _transforms.call(operator.all, *tensors[:3], *numbers, *tensors[3:], function, deterministic)
    return result[0] if recorded and not lse else result


def record(tensors: tuple[Any, ...], numbers: tuple[Any, ...], function: str, lse: bool, deterministic: bool) -> Any:
    """Computes attention recorded by autograd, on plain PyTorch tensors and without active modes. A
    packed tensor is followed by None for each tensor packed into it."""
    q, k, v = tensors[:3]
    # Each of the questions that such tensors are not asked takes longer than this one.
    plain = _flashcore.are_plain_halves((q, k, v))
    if not plain:
        meta = q.is_meta or (k is not None and k.is_meta) or (v is not None and v.is_meta)
        if meta or torch._C._are_functorch_transforms_active():
            return attend(tensors, numbers, function, lse, deterministic)
    lists = slopes = sinks = None
    if len(tensors) > 3:
        if len(tensors) > 15:
            raise NotImplementedError(
                "out was given with tensors that require grad, expected None: call it under torch.no_grad()"
            )
        _refuse_caches(tensors, function)
        slopes, sinks = tensors[10:12]
        for tensor in tensors[3:]:
            if tensor is not None:
                lists = tensors[3:10]
                break
    paged = len(tensors) > 9 and tensors[9] is not None
    if paged or (not plain and _has_small(q, k, v)):
        # As in FlashAttention: the output is computed, and there is no backward pass.
        reason = _PAGES if paged else _small_reason((q, k, v), function)
        return _gradients.Undifferentiable.apply((tensors[3:], numbers, function, lse), q, k, v, reason)
    if not plain:
        if torch._C._is_any_autocast_enabled():
            q, k, v = _autocast((q, k, v))
        q, k, v = (None if it is None else _gradients.unwrap(it) for it in (q, k, v))
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    return _gradients.record(q, k, v, slopes, sinks, (lists, numbers, function, deterministic, lse))


def _autocast(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Casts the first three tensors to the element type of autocast, if it is on and one of them is
    float32; sinks and slopes stay as they are."""
    first = tensors[0]
    if not isinstance(first, torch.Tensor) or first.is_meta:
        return tensors
    if not torch.is_autocast_enabled(first.device.type):
        return tensors
    wide = [isinstance(it, torch.Tensor) and it.dtype == torch.float32 for it in tensors[:3]]
    dtype = torch.get_autocast_dtype(first.device.type)
    if not any(wide) or dtype not in _FLOATS:
        return tensors
    cast = (it.to(dtype) if it is not None and it.dtype in _FLOATS else it for it in tensors[:3])
    return (*cast, *tensors[3:])


def _refuse_caches(tensors: tuple[Any, ...], function: str) -> None:
    """Refuses gradients of tensors in a KV cache."""
    if function.startswith("flash_attn_with_kvcache"):
        _refuse_gradients(("q", "k_cache", "v_cache", *_LISTS), tensors)


# Why keys in pages have no gradients.
_PAGES = (
    "block_table was given with tensors that require grad, expected None: keys in pages have no gradients; "
    "call it under torch.no_grad()"
)


def _refuse_small(tensors: tuple[Any, ...], function: str) -> None:
    """Refuses gradients of 8-bit tensors."""
    if _has_small(*tensors[:3]):
        raise NotImplementedError(_small_reason(tensors, function))


def _has_small(q: Any, k: Any, v: Any) -> bool:
    dtype = q.dtype
    if dtype in _FLOATS and (k is None or k.dtype is dtype) and (v is None or v.dtype is dtype):
        return False
    return any(tensor is not None and tensor.dtype in _SMALL for tensor in (q, k, v))


def _small_reason(tensors: tuple[Any, ...], function: str) -> str:
    """Returns the error message for gradients of 8-bit tensors."""
    names = zip(_flashcore.tensor_names(function)[:3], tensors)
    name, dtype = next((name, it.dtype) for name, it in names if it is not None and it.dtype in _SMALL)
    return (
        f"{name} has element type {dtype} with tensors that require grad, expected float16, "
        "bfloat16 or float32: there are no gradients of 8-bit tensors; call it under torch.no_grad()"
    )


def refuse_tangents(names: tuple[str, ...], tensors: tuple[Any, ...]) -> None:
    """Refuses tensors of forward-mode differentiation, since their tangents would be lost."""
    if is_compiling() or torch.autograd.forward_ad._current_level < 0:
        return
    for name, tensor in zip(names, tensors):
        if isinstance(tensor, torch.Tensor) and torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(f"{name} has a tangent, expected a tensor without: {_transforms.NO_FORWARD_MODE}")


def append(tensors: tuple[Any, ...], flags: tuple[Any, ...]) -> Any:
    """Appends keys and values through the dispatcher; returns the rotated queries or None, and the
    lengths."""
    names = ("k_cache", "v_cache", "k", "v", "q", "cache_seqlens")
    for name, tensor in zip(names, tensors):
        if tensor is None:
            raise ValueError(f"{name} is None, expected a tensor with k and v")
    refuse_tangents(names, tensors)
    _refuse_gradients(names, tensors)
    for name, tensor in zip(names[:2], tensors):
        refuse_unwritable(name, tensor)
    interleaved, causal, window_size, chunk, _, most, _ = flags
    left, right = window(window_size)
    advancing = causal or left >= 0 or right >= 0 or chunk > 0
    rotated, lengths = _gradients.operators.append(*tensors, interleaved, advancing, most)
    return None if tensors[10] is None else rotated, lengths


def combine(tensors: tuple[Any, ...], dtype: Any) -> Any:
    """Combines partial results through the dispatcher."""
    names = ("out_partial", "lse_partial", "out")
    refuse_tangents(names, tensors)
    _refuse_gradients(names, tensors)
    out_partial, lse_partial, out = tensors
    if dtype is not None and not isinstance(dtype, torch.dtype):
        # NumPy's, or a name.
        name = name_of_type(dtype)
        if getattr(torch, name, None) not in _FLOATS:
            raise TypeError(f"out_dtype={shown(dtype)}, expected float16, bfloat16 or float32")
        dtype = getattr(torch, name)
    if out is None:
        return _gradients.operators.combine(out_partial, lse_partial, dtype)
    if dtype is not None and dtype != out.dtype:
        raise TypeError(f"out has element type {out.dtype}, expected {dtype} as out_dtype says")
    refuse_unwritable("out", out)
    return out, _gradients.operators.combine_out(out_partial, lse_partial, out)


def merge(tensors: tuple[Any, ...]) -> Any:
    """Merges two attention results through the dispatcher."""
    names = ("out_a", "lse_a", "out_b", "lse_b")
    refuse_tangents(names, tensors)
    _refuse_gradients(names, tensors)
    return _gradients.operators.merge(*tensors)


def _refuse_gradients(names: tuple[str, ...], tensors: tuple[Any, ...]) -> None:
    """Refuses tensors that require grad, since their gradients would be lost."""
    for name, tensor in zip(names, tensors):
        if is_recorded(tensor):
            raise NotImplementedError(
                f"{name} requires grad, expected a tensor that does not: this function has no backward "
                "pass; call it under torch.no_grad() or detach the tensor"
            )


def chosen_rows(name: str, table: Any, rows: Any) -> Any:
    """Selects rows of a page table. Those that it does not have are refused on the CPU, and clamped on a GPU, where
    PyTorch's own indexing would end every later call of the process."""
    if rows.device.type != "cpu":
        return table[rows.clamp(0, max(table.shape[0] - 1, 0))]
    if is_compiling() or not _gradients.are_ordinary((table, rows)):
        # It refuses negative numbers, which indexing counts from the end.
        return table.index_select(0, rows)
    check_rows(name, rows.tolist(), table.shape[0])
    return table[rows]


def is_small_float(tensor: Any) -> bool:
    """Returns whether something is a tensor of 8-bit floats; :func:`_flashcore.is_small_float` is
    faster, and unknown to PyTorch's compiler."""
    return isinstance(tensor, torch.Tensor) and tensor.dtype in SMALL_FLOATS


def is_small(tensor: Any) -> bool:
    """Returns whether something is a tensor of 8-bit elements."""
    return isinstance(tensor, torch.Tensor) and tensor.dtype in _SMALL


def check_factors(shapes: list[tuple[int, ...]], **factors: Any) -> None:
    """Refuses descale factors that are not float32 or have none of the given shapes."""
    for name, it in factors.items():
        if it is None:
            continue
        if not torch.is_tensor(it):
            raise TypeError(f"{name} is a {type(it)}, expected a tensor")
        if it.dtype != torch.float32:
            raise TypeError(f"{name} has element type {it.dtype}, expected float32")
        if tuple(it.shape) not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"{name} has shape {list(it.shape)}, expected {expected}")


def sixteen_bits(tensor: Any) -> Any:
    """Converts 8-bit tensors to bfloat16; others are returned as they are."""
    return tensor.to(torch.bfloat16) if is_small(tensor) else tensor


def widen(tensor: Any) -> Any:
    """Converts 16-bit tensors to float32; others are returned as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def refuse_odd(name: str, thing: Any) -> None:
    """Refuses a PyTorch tensor that is sparse, nested or quantized."""
    if not isinstance(thing, torch.Tensor):
        return
    if thing.layout is not torch.strided or thing.is_nested or thing.is_quantized:
        why = "it is quantized" if thing.is_quantized else f"its layout is {thing.layout}"
        if thing.is_nested:
            why = "it is nested; of a jagged one flash_attn_varlen_func takes values() and offsets().int()"
        raise TypeError(f"{name} cannot be read ({why}), expected a dense torch.strided tensor")


def refuse_unwritable(name: str, tensor: torch.Tensor) -> None:
    """Refuses to write to a tensor whose values are not those of its memory (negative bit, zero
    tensor)."""
    if not is_compiling() and (tensor.is_neg() or tensor._is_zerotensor()):
        raise TypeError(
            f"{name} stands for other numbers than its memory has, expected one that can be written: clone it"
        )


def full(count: int, value: int, like: Any) -> Any:
    """Returns an int32 list of ``count`` equal numbers on the device of a tensor."""
    return torch.full((count,), value, dtype=torch.int32, device=like.device)
