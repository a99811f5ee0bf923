"""Decoding over a cache whose keys are spread over ranks, so many positions at a time in turn.

The same on every rank are the queries, the new keys and the lengths; each rank has its own rows of the
cache. ``flashcore::distributed::SpreadCache`` says which; the same here, for lengths on a device.
"""

from __future__ import annotations

from typing import Any

import torch

from .._arguments import whole, window
from .._quantize import rounded
from .._serving import _append, flash_attn_combine, flash_attn_with_kvcache
from ._transport import transport

BLOCK = 64


def _rows(rank: int, ranks: int, block: int, positions: Any) -> Any:
    """Returns how many of the first positions a rank owns."""
    rest = positions % (ranks * block) - rank * block
    return positions // (ranks * block) * block + rest.clamp(0, block)


def append(
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    cache_seqlens: Any,
    group: Any = None,
    *,
    page_table: Any = None,
    block: int = BLOCK,
) -> None:
    """Writes new keys and values into the caches of the ranks that own their positions. Nothing is sent.

    Args:
        k_cache, v_cache: (batch, own rows, key heads, head dim) of this rank, or with ``page_table`` (pages,
            page size, key heads, head dim), written in place.
        k, v: (batch, new, key heads, head dim), the same on all ranks; rounded to the caches' element types.
            Their gradients end here.
        cache_seqlens: (batch,) how many positions whole sequences had before, the same on all ranks.
        page_table: (batch, pages of each) the pages of this rank that hold its own rows of each sequence, in
            int32. Each rank has pages of its own.
        block: So many positions at a time belong to one rank. On all ranks and in all calls the same.
    """
    moves = transport(group)
    room = _check(k_cache, cache_seqlens, page_table, block)
    batch, new = cache_seqlens.shape[0], k.shape[1] if k.dim() == 4 else 0
    rows = k.dim() == v.dim() == 4 and k.shape[:2] == v.shape[:2] == (batch, new)
    if not rows or v_cache.shape[:2] != k_cache.shape[:2]:
        raise ValueError(
            f"k has shape {list(k.shape)} and v {list(v.shape)}, expected rows of {batch} sequences for "
            f"k_cache, {list(k_cache.shape)}, and v_cache, {list(v_cache.shape)}"
        )
    lengths = cache_seqlens.long()
    first, last = (_rows(moves.rank, moves.size, block, it) for it in (lengths, lengths + new))
    if k_cache.device.type == "cpu":
        # On a GPU nobody waits to look: what does not fit is not written.
        needed = int(last.max()) if batch else 0
        if needed > room:
            raise ValueError(f"k_cache has room for {room} rows, expected {needed}")
    # The most rows that this rank can get, whatever the lengths, which are on the device.
    turns, rest = divmod(new, moves.size * block)
    most = turns * block + min(rest, block)
    if not batch * most:
        return
    starts = torch.nn.functional.pad((last - first).cumsum(0), (1, 0))
    slot = torch.arange(batch * most, device=starts.device)
    sequence = torch.searchsorted(starts[1:], slot, right=True).clamp(max=batch - 1)
    row = first[sequence] + slot - starts[sequence]
    index = row // block * moves.size * block + moves.rank * block + row % block - lengths[sequence]
    # Rows behind the last new one are not read.
    index = index.clamp(0, new - 1)
    dtypes = _appended(k_cache.dtype, v_cache.dtype, k.dtype, v.dtype)
    k, v = (_as_type(given.detach()[sequence, index], dtype) for dtype, given in zip(dtypes, (k, v)))
    # Queries are required, and unused without rotary embeddings; they cannot be integers.
    dtype = torch.bfloat16 if k.dtype.itemsize == 1 else k.dtype
    queries = torch.empty(batch, 1, *k_cache.shape[2:], dtype=dtype, device=k.device)
    lists = (first.int(), starts.int(), None, None, page_table)
    _append((k_cache, v_cache, k, v, queries, *lists, *(None,) * 5), (True, False, (-1, -1), 0, False, None, most))


def decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    cache_seqlens: Any,
    group: Any = None,
    *,
    page_table: Any = None,
    block: int = BLOCK,
    window_size: Any = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    attention_chunk: int = 0,
    s_aux: Any = None,
    return_lse: bool = False,
) -> Any:
    """Attention of the last positions of each sequence over all keys up to their own: one, or several as in
    speculative decoding and in prompts that come in chunks.

    Each rank attends to its rows, and one all-gather of outputs and log-sum-exps in float32 puts them together:
    ``4 batch new heads (head dim + 1)`` bytes from each rank to each other.

    Args:
        q: (batch, new, heads, head dim), the same on all ranks.
        k_cache, v_cache, page_table, block: As in :func:`append`, which was called for the positions themselves.
        cache_seqlens: (batch,) how many positions whole sequences have, the new ones among them. A query before
            the first position sees nothing.
        window_size: Keys before a position that are seen, and whatever comes second.
        attention_chunk: Positions come in chunks of so many, and one sees keys of its own chunk only, unless it is 0.
        s_aux: (heads,) a sink for each head, the same on all ranks.

    Returns:
        (batch, new, heads, value head dim) like ``q``, the same on all ranks bit for bit; with
        ``return_lse`` also the log-sum-exps, (batch, heads, new).
    """
    moves = transport(group)
    _check(k_cache, cache_seqlens, page_table, block)
    if q.dim() != 4 or q.shape[0] != cache_seqlens.shape[0] or q.shape[1] < 1:
        raise ValueError(
            f"q has shape {list(q.shape)}, expected (batch, new, heads, head dim) of {cache_seqlens.shape[0]} sequences"
        )
    batch, new, heads = q.shape[:3]
    # Only one rank uses them; all check them, or the others would wait for the one that raises.
    are_sinks = isinstance(s_aux, torch.Tensor) and s_aux.shape == (heads,) and s_aux.is_floating_point()
    if s_aux is not None and not are_sinks:
        raise ValueError(f"s_aux is {_shown(s_aux)}, expected a tensor of {heads} numbers, one for each head")
    left, chunk = window(window_size)[0], whole("attention_chunk", attention_chunk)
    if chunk < 0:
        raise ValueError(f"attention_chunk={chunk}, expected no negative number")
    lengths = cache_seqlens.long()[:, None]

    def own(positions: Any) -> Any:
        return _rows(moves.rank, moves.size, block, positions.clamp(min=0)).int()

    def attend(seen: Any, hidden: Any, sinks: Any) -> tuple[Any, Any]:
        """Attends to the rows from ``hidden`` up to ``seen``, which are per sequence or per query."""
        each = seen.shape[1]
        table, entries = page_table, None
        if each > 1 and table is None:
            entries = torch.arange(batch, dtype=torch.int32, device=q.device).repeat_interleave(each)
        elif each > 1:
            table = table.repeat_interleave(each, 0)
        out, lse, *_ = flash_attn_with_kvcache(
            q.reshape(batch * each, new // each, *q.shape[2:]),
            k_cache,
            v_cache,
            cache_seqlens=seen.flatten(),
            cache_batch_idx=entries,
            cache_leftpad=None if hidden is None else hidden.expand(seen.shape).flatten(),
            page_table=table,
            softmax_scale=softmax_scale,
            softcap=softcap,
            s_aux=sinks,
            return_softmax_lse=True,
        )
        # As `flash_attn_combine` has them: (batch, new, heads).
        return out.view(batch, new, *out.shape[2:]), lse.transpose(1, 2).reshape(batch, new, heads)

    def positions() -> Any:
        return lengths - new + torch.arange(new, device=lengths.device)

    # A rank's rows are not contiguous in the sequence, so what queries see of them is not a causal mask or a window.
    # A sink is one score of the whole row, so only one part may have it.
    sinks = s_aux if moves.rank == 0 else None
    if left >= 0 or chunk > 0:
        position = positions()
        first = position - left if left >= 0 else torch.zeros_like(position)
        first = torch.maximum(first, position // chunk * chunk) if chunk > 0 else first
        out, lse = attend(own(position + 1), own(first), sinks)
    elif new == 1:
        out, lse = attend(own(lengths), None, sinks)
    else:
        # All queries see the rows from before; each sees the new rows, which are few, up to its own.
        before = own(lengths - new)
        outs, sums = map(torch.stack, zip(attend(before, None, sinks), attend(own(positions() + 1), before, None)))
        out, lse = flash_attn_combine(outs, sums, out_dtype=torch.float32)
    # Pairs of numbers are read together: each rank's part begins at an even place.
    sizes = (out.numel(), lse.numel() + lse.numel() % 2)
    part = q.new_empty(sum(sizes), dtype=torch.float32)
    part[: sizes[0]] = out.flatten()
    part[sizes[0] : sizes[0] + lse.numel()] = lse.flatten()
    parts = part.new_empty((moves.size, part.numel()))
    for work in moves.all_gather(parts.view(-1), part):
        work.wait()
    outs = parts[:, : sizes[0]].view(moves.size, *out.shape)
    sums = parts[:, sizes[0] : sizes[0] + lse.numel()].view(moves.size, *lse.shape)
    out, lse = flash_attn_combine(outs, sums, out_dtype=q.dtype)
    return (out, lse.transpose(1, 2)) if return_lse else out


def _appended(k_cache: Any, v_cache: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Returns the element types in which new keys and values are appended to caches of these types: those of the
    caches, or 16 bits that the append itself rounds to 8, as in a cache of one rank, where both have the same 8."""
    if k_cache != v_cache or k_cache.itemsize > 1 or (k, v) == (k_cache, v_cache):
        return k_cache, v_cache
    # Between 8 and 32 bits, f16 has more digits than bf16, and the range of 8 bits.
    wide = k if k == v and k in (torch.float16, torch.bfloat16) else torch.float16
    return wide, wide


def _as_type(rows: Any, dtype: Any) -> Any:
    return rounded(rows, dtype) if dtype.itemsize == 1 and rows.dtype != dtype else rows.to(dtype)


def _check(k_cache: Any, cache_seqlens: Any, page_table: Any, block: int) -> int:
    """Checks the arguments, and returns how many of its rows of a sequence this rank has room for."""
    if block < 1:
        raise ValueError(f"block={block}, expected one position at least")
    if k_cache.dim() != 4:
        raise ValueError(f"k_cache has shape {list(k_cache.shape)}, expected (batch, own rows, key heads, head dim)")
    count, room = k_cache.shape[:2]
    if page_table is not None:
        if not isinstance(page_table, torch.Tensor) or page_table.dim() != 2 or page_table.dtype != torch.int32:
            raise ValueError(f"page_table is {_shown(page_table)}, expected int32 of shape (batch, pages of each)")
        count, room = page_table.shape[0], page_table.shape[1] * room
    if not isinstance(cache_seqlens, torch.Tensor) or cache_seqlens.shape != (count,):
        raise ValueError(f"cache_seqlens is {_shown(cache_seqlens)}, expected a tensor of {count} lengths")
    return int(room)


def _shown(given: Any) -> str:
    """Describes an argument without reading from a device."""
    return f"{given.dtype} of shape {list(given.shape)}" if isinstance(given, torch.Tensor) else repr(given)
