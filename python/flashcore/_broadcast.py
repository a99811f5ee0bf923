"""Leading dimensions of :func:`scaled_dot_product_attention`, as PyTorch has them: any number, broadcast.

Kernels read (batch, heads, length, head dim), with the same batch everywhere. Other tensors become views of that
form where their strides allow it: the last leading dimension is the heads, those before it are the batch.
"""

from __future__ import annotations

import math
from typing import Any

from . import _arrays
from ._arguments import shape_of
from ._installed import is_torch, torch

if torch is not None:
    from . import _torch


def four_dimensions(
    tensors: tuple[Any, ...], attn_mask: Any, grouped: bool
) -> tuple[tuple[Any, ...], Any, tuple[int, ...]] | None:
    """Returns queries, keys and values of four dimensions, the mask for them, and the leading dimensions of the
    output. None if the tensors have that form already, or if they do not broadcast, which the call itself reports."""
    shapes = [shape_of(tensor) for tensor in tensors]
    if any(shape is None or len(shape) < 2 for shape in shapes) or not _are_of_a_kind(tensors):
        return None
    rank = max(2, *(len(shape) - 2 for shape in shapes))
    leading = [(1,) * (rank + 2 - len(shape)) + tuple(shape[:-2]) for shape in shapes]
    batch, heads = _broadcast([it[:-1] for it in leading]), [it[-1] for it in leading]
    if batch is None:
        return None
    if grouped:
        most = heads
    else:
        shared = _broadcast([(it,) for it in heads])
        if shared is None:
            return None
        # Keys and values that all heads share are read in place.
        most = [shared[0], 1, 1] if heads[1] == heads[2] == 1 else [shared[0]] * 3
    wanted = [(*batch, head) for head in most]
    if all(len(shape) == 4 for shape in shapes) and wanted == leading and (grouped or heads[0] == heads[1]):
        return None
    if torch is not None:
        for name, tensor in zip(("query", "key", "value", "attn_mask"), (*tensors, attn_mask)):
            _torch.refuse_odd(name, tensor)
    given = tuple(_four(it, lead, shape[-2:]) for it, lead, shape in zip(tensors, wanted, shapes))
    own = max(len(shape) for shape in shapes) - 2
    dimensions = (*batch, most[0])[rank - own :]
    if attn_mask is not None:
        attn_mask = _mask(attn_mask, batch)
    return given, attn_mask, dimensions


def _are_of_a_kind(tensors: tuple[Any, ...]) -> bool:
    """Returns whether all tensors are PyTorch's, or all are arrays whose library can broadcast them."""
    of_torch = list(map(is_torch, tensors))
    return all(of_torch) or (not any(of_torch) and all(map(_arrays.can_expand, tensors)))


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Returns the shape that shapes of equal length broadcast to, or None."""
    found = []
    for sizes in zip(*shapes):
        size = next((it for it in sizes if it != 1), 1)
        if any(it != 1 and it != size for it in sizes):
            return None
        found.append(size)
    return tuple(found)


def _four(tensor: Any, leading: tuple[int, ...], matrix: Any) -> Any:
    *batch, heads = leading
    return _expanded(tensor, (*leading, *matrix)).reshape(math.prod(batch), heads, *matrix)


def _mask(attn_mask: Any, batch: tuple[int, ...]) -> Any:
    """Returns a mask for a batch of one dimension. One that is the same for all of the batch is not expanded."""
    shape = shape_of(attn_mask)
    if shape is None or len(shape) < 4 or len(shape) > len(batch) + 3 or len(batch) == 1:
        return attn_mask
    rest = tuple(shape[-3:])
    if all(size == 1 for size in shape[:-3]):
        return attn_mask.reshape(rest)
    if _broadcast([tuple(shape[:-3]), batch[len(batch) + 3 - len(shape) :]]) is None:
        return attn_mask
    return _expanded(attn_mask, (*batch, *rest)).reshape(math.prod(batch), *rest)


def _expanded(tensor: Any, shape: tuple[int, ...]) -> Any:
    if tuple(tensor.shape) == shape:
        return tensor
    if is_torch(tensor):
        return tensor.expand(shape)
    return _arrays.expanded(tensor, shape)
