"""Decoding over a cache whose keys are spread over ranks, so many positions at a time in turn.

The same on every rank are the queries, the new keys and the lengths; each rank has its own rows of the
cache. ``flashcore::distributed::SpreadCache`` says which; the same here, for lengths on a device.
"""

from __future__ import annotations

from typing import Any

import torch

from .._arguments import window
from .._serving import flash_attn_combine, flash_attn_with_kvcache
from ._transport import transport

BLOCK = 64


def _rows(rank: int, ranks: int, block: int, positions: Any) -> Any:
    """How many of the first positions a rank owns."""
    rest = positions % (ranks * block) - rank * block
    return positions // (ranks * block) * block + rest.clamp(0, block)


def append(
    k_cache: Any, v_cache: Any, k: Any, v: Any, cache_seqlens: Any, group: Any = None, *, block: int = BLOCK
) -> None:
    """Writes new keys and values into the caches of the ranks that own their positions. Nothing is sent.

    Args:
        k_cache, v_cache: (batch, own rows, key heads, head dim) of this rank, written in place.
        k, v: (batch, new, key heads, head dim), the same on all ranks.
        cache_seqlens: (batch,) how many positions whole sequences had before, the same on all ranks.
        block: So many positions at a time belong to one rank. On all ranks and in all calls the same.
    """
    moves = transport(group)
    _check(k_cache, cache_seqlens, block)
    batch, new = k.shape[:2]
    if batch != k_cache.shape[0] or v.shape[:2] != (batch, new) or v_cache.shape[:2] != k_cache.shape[:2]:
        raise ValueError(
            f"k has shape {list(k.shape)} and v {list(v.shape)}, expected as many sequences as k_cache, "
            f"{list(k_cache.shape)}, and v_cache, {list(v_cache.shape)}"
        )
    lengths, room = cache_seqlens.long(), k_cache.shape[1]
    first = _rows(moves.rank, moves.size, block, lengths)
    if k_cache.device.type == "cpu":
        # On a GPU nobody waits to look: what does not fit is not written.
        needed = int(_rows(moves.rank, moves.size, block, lengths + new).max()) if batch else 0
        if needed > room:
            raise ValueError(f"k_cache has room for {room} rows, expected {needed}")
    # As many rows as could be new, whatever the lengths, which are on the device: those that are not get
    # what they have.
    turns, rest = divmod(new, moves.size * block)
    most = min(turns * block + min(rest, block), room)
    if not batch * most:
        return
    rows = first[:, None] + torch.arange(most, device=first.device)
    position = rows // block * moves.size * block + moves.rank * block + rows % block
    index = position - lengths[:, None]
    fresh = ((index < new) & (rows < room))[..., None, None]
    sequence, rows, index = torch.arange(batch, device=first.device)[:, None], rows % room, index.clamp(max=new - 1)
    for cache, given in ((k_cache, k), (v_cache, v)):
        cache[sequence, rows] = torch.where(fresh, given[sequence, index].to(cache.dtype), cache[sequence, rows])


def decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    cache_seqlens: Any,
    group: Any = None,
    *,
    block: int = BLOCK,
    window_size: Any = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Any:
    """Attention of one new position of each sequence over all keys up to its own.

    Each rank attends to its rows, and one all-gather of outputs and log-sum-exps in float32 puts them together:
    ``4 batch heads (head dim + 1)`` bytes from each rank to each other.

    Args:
        q: (batch, 1, heads, head dim), the same on all ranks.
        k_cache, v_cache, block: As in :func:`append`, which was called for the position itself.
        cache_seqlens: (batch,) how many positions whole sequences have, the new one among them.
        window_size: Keys before the position that are seen, and whatever comes second.

    Returns:
        (batch, 1, heads, value head dim) like ``q``, the same on all ranks bit for bit; with
        ``return_lse`` also the log-sum-exps, (batch, heads, 1).
    """
    moves = transport(group)
    _check(k_cache, cache_seqlens, block)
    if q.dim() != 4 or q.shape[1] != 1:
        raise ValueError(f"q has shape {list(q.shape)}, expected (batch, 1, heads, head dim)")
    lengths = cache_seqlens.long()
    rows = _rows(moves.rank, moves.size, block, lengths)
    left, hidden = window(window_size)[0], None
    if left >= 0:
        hidden = _rows(moves.rank, moves.size, block, (lengths - 1 - left).clamp(min=0)).int()
    out, lse, *_ = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=rows.int(),
        cache_leftpad=hidden,
        softmax_scale=softmax_scale,
        softcap=softcap,
        return_softmax_lse=True,
    )
    # Pairs of numbers are read together: each rank's part begins at an even place.
    sizes = (out.numel(), lse.numel() + lse.numel() % 2)
    part = q.new_empty(sum(sizes), dtype=torch.float32)
    part[: sizes[0]] = out.flatten()
    part[sizes[0] : sizes[0] + lse.numel()] = lse.flatten()
    parts = part.new_empty((moves.size, part.numel()))
    for work in moves.all_gather(parts.view(-1), part):
        work.wait()
    outs = parts[:, : sizes[0]].view(moves.size, *out.shape)
    sums = parts[:, sizes[0] : sizes[0] + lse.numel()].view(moves.size, *lse.shape).transpose(2, 3)
    out, lse = flash_attn_combine(outs, sums, out_dtype=q.dtype)
    return (out, lse.transpose(1, 2)) if return_lse else out


def _check(k_cache: Any, cache_seqlens: Any, block: int) -> None:
    if block < 1:
        raise ValueError(f"block={block}, expected one position at least")
    if not isinstance(cache_seqlens, torch.Tensor) or cache_seqlens.shape != k_cache.shape[:1]:
        raise ValueError(f"cache_seqlens is {cache_seqlens}, expected a tensor of {k_cache.shape[0]} lengths")
