"""Calls on tensors whose layout no kernel reads, served on copies of them.

Kernels read head dims that are multiples of 8 up to 256, whose elements lie side by side. Other head
dims are filled up with zeros, which add nothing to scores; values that are wider are taken in pieces;
what does not lie side by side is copied. Each is told of once.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

from . import _arrays
from ._arguments import shape_of
from ._installed import is_torch, torch

_MULTIPLE, WIDEST = 8, 256
_told: set[str] = set()


def attend(
    call: Callable[..., Any],
    tensors: tuple[Any, ...],
    numbers: tuple[Any, ...],
    function: str,
    lse: Any,
    deterministic: bool,
) -> Any:
    """Returns the result of ``call`` on copies of q, k and v, or None if kernels can read them as
    they are."""
    parts = _parts(tensors[:3])
    if parts is None or not any(_is_odd(tensor) for tensor in parts):
        return None
    q, k, v = parts
    if q.shape[-1] > WIDEST or q.shape[-1] != k.shape[-1] or not v.shape[-1]:
        # No kernel serves these head dims; padding would only hide that, so the call itself reports
        # it.
        return None
    scale, dim = numbers[0], q.shape[-1]
    if scale is None and dim > 0:
        numbers = (1.0 / math.sqrt(dim), *numbers[1:])
    q, k = (fill(_side_by_side(tensor)) for tensor in (q, k))
    out = tensors[15] if len(tensors) > 15 else None
    if out is not None:
        _check_out(out, q, (*q.shape[:-1], v.shape[-1]))
    lists = tensors[3:15]
    outputs, sums = [], None
    for begin in range(0, v.shape[-1], WIDEST):
        piece = v[..., begin : begin + WIDEST]
        filled = fill(_side_by_side(piece))
        result = call((q, k, filled, *lists), numbers, function, lse, deterministic)
        output, sums = result if lse else (result, None)
        outputs.append(output[..., : piece.shape[-1]])
    if len(outputs) > 1:
        _tell("values have a head dim above 256: they are taken in pieces, each with scores of its own")
    joined = outputs[0] if len(outputs) == 1 else join(outputs)
    if out is not None:
        out[...] = joined
        joined = out
    return (joined, sums) if lse else joined


def append(call: Callable[..., Any], tensors: tuple[Any, ...], flags: tuple[Any, ...]) -> Any:
    """Returns the result of ``call`` on copies of caches, new rows and queries, or None if kernels
    can read them as they are. Copies of caches are written back."""
    caches, rows, others = tensors[:2], tensors[2:5], tensors[5:]
    given = [tensor for tensor in (*caches, *rows) if tensor is not None]
    if not all(_can_be_copied(tensor) for tensor in given) or any(it is None for it in caches):
        return None
    for name, cache in zip(("k_cache", "v_cache"), caches):
        check_writable(name, cache)
    odd = any(tensor.shape[-1] % _MULTIPLE for tensor in given)
    if not odd and not any(_gaps(tensor) for tensor in rows if tensor is not None):
        return None
    k_cache, v_cache, k, v, q = (*caches, *rows)
    for name, tensor, of, cache in (
        ("k", k, "k_cache", k_cache),
        ("v", v, "v_cache", v_cache),
        ("q", q, "k_cache", k_cache),
    ):
        # Padding with zeros would hide that the head dims differ.
        if tensor is not None and tensor.shape[-1] != cache.shape[-1]:
            raise ValueError(f"{name} has head dim {tensor.shape[-1]}, expected the {cache.shape[-1]} of {of}")
    filled = tuple(fill(tensor) for tensor in caches)
    copied = tuple(None if tensor is None else fill(_side_by_side(tensor)) for tensor in rows)
    rotated, lengths = call((*filled, *copied, *others), flags)
    for cache, copy in zip(caches, filled):
        if copy is not cache:
            cache[...] = copy[..., : cache.shape[-1]]
    return None if rotated is None else rotated[..., : rows[2].shape[-1]], lengths


def _parts(tensors: tuple[Any, ...]) -> tuple[Any, Any, Any] | None:
    """Returns queries, keys and values, or None if they are not all tensors."""
    count = next((at for at, tensor in enumerate(tensors) if tensor is None), 3)
    if count == 0 or not all(map(_can_be_copied, tensors[:count])) or any(it is not None for it in tensors[count:]):
        return None
    # The last one has the others packed into it.
    if count < 3 and tensors[count - 1].shape[-3:-2] != (4 - count,):
        return None
    return separate(tensors)


def separate(tensors: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Returns queries, keys and values as separate tensors; None stands for a tensor packed into
    the one before it."""
    q, k, v = tensors
    if k is None:
        return q[..., 0, :, :], q[..., 1, :, :], q[..., 2, :, :]
    if v is None:
        return q, k[..., 0, :, :], k[..., 1, :, :]
    return q, k, v


def _can_be_copied(tensor: Any) -> bool:
    """Returns whether the tensor's library has the functions that copying needs."""
    if not shape_of(tensor):
        return False
    if is_torch(tensor):
        return bool(tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized)
    return _arrays.can_copy(tensor)


def _check_out(out: Any, like: Any, shape: tuple[int, ...]) -> None:
    """Refuses an ``out`` of another shape or type: results are neither broadcast nor rounded."""
    if is_torch(out) != is_torch(like) or not _can_be_copied(out):
        raise TypeError(f"out is a {type(out)}, expected a tensor like the others")
    if tuple(out.shape) != shape:
        raise ValueError(f"out has shape {list(out.shape)}, expected {list(shape)}")
    small = like.dtype.itemsize == 1
    if str(out.dtype).rpartition(".")[2] != ("bfloat16" if small else str(like.dtype).rpartition(".")[2]):
        raise TypeError(f"out has element type {out.dtype}, expected {'bfloat16' if small else like.dtype}")
    check_writable("out", out)


def check_writable(name: str, tensor: Any) -> None:
    """Refuses tensors that cannot be written, and those whose elements share memory."""
    _arrays.check_mutable(name, tensor)
    if not getattr(getattr(tensor, "flags", None), "writeable", True):
        raise ValueError(f"{name} is read-only, expected an array that can be written")
    steps = tensor.stride() if is_torch(tensor) else getattr(tensor, "strides", ())
    if 0 in tensor.shape:
        return
    # In elements for PyTorch, in bytes for NumPy.
    within = 1 if is_torch(tensor) else tensor.dtype.itemsize
    for step, size in sorted((abs(step), size) for size, step in zip(tensor.shape, steps) if size > 1):
        # A stride shorter than the extent of the smaller strides leads to an element seen before.
        if step < within:
            raise ValueError(f"{name} has elements that share memory, expected one place for each")
        within += (size - 1) * step


def _is_odd(tensor: Any) -> bool:
    dim = tensor.shape[-1]
    return bool(dim > 0 and (not is_kernels(dim) or _gaps(tensor)))


def _gaps(tensor: Any) -> bool:
    """Returns whether the last dimension has a stride other than one element."""
    shape: Any = getattr(tensor, "shape", ())
    if not len(shape) or shape[-1] < 2 or 0 in shape:
        return False
    if is_torch(tensor):
        return bool(tensor.stride(-1) != 1)
    strides = getattr(tensor, "strides", None)
    return bool(strides and strides[-1] != tensor.dtype.itemsize)


def _side_by_side(tensor: Any) -> Any:
    if not _gaps(tensor):
        return tensor
    _tell("the last dimension of a tensor is not contiguous: it is copied in each call")
    return _copied(tensor.contiguous if is_torch(tensor) else functools.partial(tensor.copy, order="C"))


def _copied(copy: Callable[[], Any]) -> Any:
    """Runs a copy. On the CPU PyTorch has no error of its own for lack of memory; ``MemoryError``
    is raised."""
    try:
        return copy()
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise MemoryError(f"no memory for a copy: {error}") from None


def is_kernels(dim: int) -> bool:
    """Returns whether kernels have this head dim."""
    return dim <= WIDEST and dim % _MULTIPLE == 0


def fill(tensor: Any) -> Any:
    """Pads the last dimension with zeros to a head dim that kernels have."""
    dim = tensor.shape[-1]
    missing = -dim % _MULTIPLE
    if missing == 0:
        return tensor
    _tell(f"head dim {dim} is no multiple of 8: tensors are copied into larger ones in each call")
    if not is_torch(tensor):
        return _arrays.pad(tensor, missing)
    if tensor.dtype.itemsize == 1:
        bits = tensor.view(torch.uint8)
        return _copied(lambda: torch.nn.functional.pad(bits, (0, missing))).view(tensor.dtype)
    return _copied(lambda: torch.nn.functional.pad(tensor, (0, missing)))


def join(tensors: list[Any]) -> Any:
    """Concatenates tensors along the last dimension."""
    if is_torch(tensors[0]):
        return torch.cat(tensors, -1)
    return _arrays.join(tensors)


def _tell(text: str) -> None:
    if torch is not None and torch.compiler.is_dynamo_compiling():
        return
    if text not in _told:
        _told.add(text)
        warnings.warn(text, UserWarning, stacklevel=2)
