"""Block-sparse patterns: lists of the key blocks that query blocks see, converted to masks.

A mask looks the pair of blocks up in a tensor of bytes, so that a pattern goes with every kernel, and with blocks
of any size. Tensors on a GPU stay there: nothing is copied to the host or waited for.
"""

from __future__ import annotations

from typing import Any

from ._arguments import shape_of, shown
from ._installed import is_torch, torch

# What a byte says of a pair of blocks.
_BY_MASK, _WHOLE = 1, 2


def sizes(name: str, given: Any, least: int = 1) -> tuple[int, int]:
    """Queries and keys, of a block or of all there is."""
    pair = (given, given) if isinstance(given, int) else tuple(given) if isinstance(given, (tuple, list)) else ()
    if len(pair) != 2 or any(not isinstance(it, int) or isinstance(it, bool) or not least <= it < 2**31 for it in pair):
        raise ValueError(
            f"{name} is {shown(given)}, expected a number or one of queries and one of keys, from {least} on"
        )
    return pair[0], pair[1]


def of_lists(
    lists: tuple[Any, ...], whole: tuple[Any, ...] | None, size: tuple[int, int], columns: int, mask_mod: Any
) -> Any:
    """The mask of FlexAttention's lists: counts (batch, heads, rows), and indices with a dimension more. Of the first
    lists ``mask_mod`` says which pairs are seen."""
    counts, indices = lists
    states = _nothing(indices, (*indices.shape[:3], columns))
    states = _with(states, counts, indices, _BY_MASK)
    if whole is not None:
        states = _with(states, whole[0], whole[1], _WHOLE)
    several = (indices.shape[0] > 1, indices.shape[1] > 1)
    rows, keys = size

    def blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        state = states[b if several[0] else 0, h if several[1] else 0, q_idx // rows, kv_idx // keys]
        seen = state >= 1 if mask_mod is None else (state >= 1) & mask_mod(b, h, q_idx, kv_idx)
        return seen if mask_mod is None else (state >= 2) | seen

    return blocks


def of_rows(indptr: Any, indices: Any, size: tuple[int, int], counts: tuple[int, int], mask: Any) -> Any:
    """The mask of compressed rows of blocks (BCSR), so many of queries and of keys; ``mask`` says of the pairs of each
    block of the list which are seen."""
    (rows, keys), entries = size, indices.shape[0]
    if not entries:
        mask = None
    if is_torch(indices):
        number = torch.arange(entries, device=indices.device)
        row = torch.searchsorted(indptr[1:].contiguous().long(), number, right=True)
        place = torch.zeros(counts[0] * counts[1] + 1, dtype=torch.int32, device=indices.device)
        inside = (indices >= 0) & (indices < counts[1]) & (row < counts[0])
        at = torch.where(inside, row * counts[1] + indices.long(), counts[0] * counts[1])
        place.scatter_(0, at, (number + 1).int())
        place = place[:-1].reshape(counts)
    else:
        import numpy

        place = numpy.zeros(counts, dtype=numpy.int32)
        row = numpy.searchsorted(indptr[1:], numpy.arange(entries), side="right")
        place[row, indices] = numpy.arange(entries, dtype=numpy.int32) + 1

    def blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        entry = place[q_idx // rows, kv_idx // keys]
        # The entry of a block that is not in the list is none of the mask's.
        return entry > 0 if mask is None else (entry > 0) & mask[entry - 1, q_idx % rows, kv_idx % keys]

    return blocks


_WHOLE_NUMBERS = ("int8", "int16", "int32", "int64", "uint8")


def check_list(name: str, given: Any, rank: int, like: Any, types: tuple[str, ...] = _WHOLE_NUMBERS) -> None:
    """Refuses what is no tensor of whole numbers of PyTorch's or NumPy's, as another one is."""
    shape = shape_of(given)
    library = torch if is_torch(given) else None
    if shape is None or (library is None and type(given).__module__ != "numpy"):
        raise TypeError(f"{name} is a {type(given)}, expected a tensor of PyTorch's or an array of NumPy's")
    if is_torch(given) != is_torch(like):
        raise TypeError(f"{name} is a {type(given)}, expected a {type(like)} like the others")
    if library is not None and given.device != like.device:
        raise ValueError(f"{name} is on {given.device}, expected {like.device} like the others")
    if len(shape) != rank:
        raise ValueError(f"{name} has {len(shape)} dimensions, expected {rank}")
    if str(given.dtype).rpartition(".")[2] not in types:
        raise TypeError(f"{name} has element type {given.dtype}, expected one of {', '.join(types)}")
    if library is not None and (given.layout is not torch.strided or given.is_quantized):
        raise TypeError(f"{name} is laid out as {given.layout}, expected a dense torch.strided tensor")


def check_starts(name: str, starts: Any, end: int) -> None:
    """Refuses starts of lists that do not rise from 0 to the end, where the host can see them."""
    if getattr(starts, "is_cuda", False) or getattr(starts, "is_meta", False):
        return
    found = [int(start) for start in starts]
    if found[0] != 0 or found[-1] != end or any(a > b for a, b in zip(found, found[1:])):
        raise ValueError(f"{name} goes from {found[0]} to {found[-1]}, expected starts that rise from 0 to {end}")


def check_bounds(name: str, indices: Any, end: int, counts: Any = None) -> None:
    """Refuses blocks that there are none of, where the host can see them; of lists the first ones, so many of each."""
    if getattr(indices, "is_cuda", False) or getattr(indices, "is_meta", False):
        return
    if counts is not None:
        library = torch if is_torch(indices) else __import__("numpy")
        indices = indices[library.arange(indices.shape[3]) < counts[..., None]]
    if 0 in indices.shape:
        return
    least, most = int(indices.min()), int(indices.max())
    if least < 0 or most >= end:
        raise ValueError(f"{name} has block {least if least < 0 else most}, expected 0 to {end - 1}")


def _nothing(like: Any, shape: tuple[int, ...]) -> Any:
    if is_torch(like):
        return torch.zeros(shape, dtype=torch.uint8, device=like.device)
    import numpy

    return numpy.zeros(shape, dtype=numpy.uint8)


def _with(states: Any, counts: Any, indices: Any, state: int) -> Any:
    """Marks the first blocks of each list with a state."""
    columns, room = states.shape[3], indices.shape[3]
    if is_torch(indices):
        counted = torch.arange(room, device=indices.device) < counts[..., None]
        counted = counted & (indices >= 0) & (indices < columns)
        # What does not count goes to a column that is cut off.
        more = torch.nn.functional.pad(states, (0, 1))
        more.scatter_(3, torch.where(counted, indices, columns).long(), state)
        return more[..., :columns].contiguous()
    import numpy

    counted = numpy.arange(room) < numpy.asarray(counts)[..., None]
    more = numpy.pad(states, ((0, 0), (0, 0), (0, 0), (0, 1)))
    numpy.put_along_axis(more, numpy.where(counted, indices, columns).astype(numpy.int64), state, 3)
    return numpy.ascontiguousarray(more[..., :columns])
