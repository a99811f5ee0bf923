"""Attention over a sequence that is spread over the ranks of a ``torch.distributed`` process group.

    from flashcore.distributed import context_parallel_attention, shard, unshard

    q, k, v = (shard(it, group) for it in (q, k, v))        # or sharded from the start
    out = context_parallel_attention(q, k, v, group, causal=True)
    out.backward(...)

Every rank calls the same function with its own rows. Which rows these are, what each rank computes and
what is sent is decided in the library (``flashcore::distributed``); docs/distributed.md has it in pictures.
"""

from __future__ import annotations

from typing import Any

import torch

from .._torch import _autocast
from .._arguments import flag, window
from . import _attention
from ._cache import append, decode
from ._plan import plan as _plan_of
from ._transport import transport as _transport

__all__ = [
    "all_gather_attention",
    "all_to_all_attention",
    "append",
    "context_parallel_attention",
    "decode",
    "hybrid_attention",
    "positions",
    "ring_attention",
    "shard",
    "unshard",
]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def context_parallel_attention(
    q: Any,
    k: Any,
    v: Any,
    group: Any = None,
    *,
    variant: str = "ring",
    causal: bool = False,
    window_size: Any = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    cu_seqlens: Any = None,
    length: int | None = None,
    order: str = "zigzag",
    nodes: int = 1,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Self-attention of whole sequences, from and to the rows that this rank owns.

    Args:
        q: (batch, own rows, heads, head dim), or (own rows of all sequences, heads, head dim) with
            ``cu_seqlens``; float16, bfloat16 or float32.
        k, v: The same rows, with heads that divide those of ``q``.
        group: A process group, a mesh of one dimension, or None for all processes. All of its ranks must
            call this, in the same order.
        variant: ``"ring"``: keys come from one rank after the other while others are computed with.
            ``"all_gather"``: all keys come at once. ``"all_to_all"``: rows are exchanged for heads, of
            which there must be one for each rank. ``"hybrid"``: rows are exchanged for heads between
            ``nodes``, keys travel within one.
        causal, window_size, softmax_scale, softcap, deterministic: As in :func:`flashcore.flash_attn_func`.
        cu_seqlens: Cumulative lengths of whole sequences, on all ranks the same: numbers, or a tensor, of
            which one on a GPU is waited for.
        length: How long whole sequences are; own rows times ranks unless given. Needed where the ranks
            do not divide it.
        order: ``"zigzag"``: a rank owns a piece from the beginning of a sequence and one from its end, so
            that all have as much to do under a causal mask. ``"contiguous"``: one piece, so that ranks
            that are far apart exchange nothing under a window. See :func:`shard`.
        nodes: Into how many nodes the ranks are divided, in order, where the variant is ``"hybrid"``.
        return_lse: Return ``(out, softmax_lse)``.

    Returns:
        The output of own rows, like ``q`` with the head dim of ``v``; with ``return_lse`` also the
        log-sum-exps, (batch, heads, own rows) or (heads, own rows) in float32.
    """
    return_lse = flag("return_lse", return_lse)
    mask = (causal, window_size)
    layout = (cu_seqlens, length, order, nodes)
    rest = (softmax_scale, softcap, deterministic, return_lse)
    q, k, v, call = _prepared(q, k, v, group, variant, mask, layout, rest)
    if max(call.plan.rows) == 0 or 0 in (q.shape[0], q.shape[2]):
        # Nobody has anything to do.
        out, lse = q[..., : v.shape[-1]] * 1, q.new_zeros(q.shape[:3], dtype=torch.float32).transpose(1, 2)
    elif return_lse:
        out, lse = _attention.Attention.apply(q, k, v, call)
    else:
        out, lse = _attention.Attention.apply(q, k, v, call), None
    if cu_seqlens is not None:
        out, lse = out[0], None if lse is None else lse[0]
    return (out, lse) if return_lse else out


def _prepared(
    q: Any, k: Any, v: Any, group: Any, variant: str, mask: tuple[Any, ...], layout: tuple[Any, ...], rest: Any
) -> tuple[Any, Any, Any, _attention.Call]:
    """Returns the tensors with a batch dimension, and the call with its plan; raises an error if
    they are not this rank's rows."""
    moves = _transport(group)
    cu_seqlens, length, order, nodes = layout
    ragged = cu_seqlens is not None
    q, k, v = _autocast((q, k, v))
    _check(q, k, v, 3 if ragged else 4)
    rows = q.shape[-3]
    lengths, batch = _lengths(cu_seqlens, length, rows, moves.size), None if ragged else q.shape[0]
    causal, window_size = mask
    left, right = (None if side < 0 else side for side in window(window_size))
    if flag("causal", causal):
        right = 0
    sizes = (q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], q.element_size())
    nodes = nodes if variant == "hybrid" else 1
    plan = _plan_of(moves.size, moves.rank, lengths, batch, (left, right), variant, nodes, order, sizes)
    if plan.rows[moves.rank] != rows:
        raise ValueError(
            f"q has {rows} rows, expected {plan.rows[moves.rank]}: those that rank {moves.rank} of {moves.size} "
            f"owns of {'these sequences' if ragged else f'sequences of {lengths[0]}'}"
        )
    softmax_scale, softcap, deterministic, return_lse = rest
    deterministic = flag("deterministic", deterministic) or torch.are_deterministic_algorithms_enabled()
    if ragged:
        q, k, v = (it.unsqueeze(0) for it in (q, k, v))
    return q, k, v, _attention.Call(plan, moves, softmax_scale, softcap, deterministic, return_lse)


def ring_attention(q: Any, k: Any, v: Any, group: Any = None, **arguments: Any) -> Any:
    """:func:`context_parallel_attention` in which keys come from one rank after the other."""
    return context_parallel_attention(q, k, v, group, variant="ring", **arguments)


def all_gather_attention(q: Any, k: Any, v: Any, group: Any = None, **arguments: Any) -> Any:
    """:func:`context_parallel_attention` in which all keys come at once."""
    return context_parallel_attention(q, k, v, group, variant="all_gather", **arguments)


def all_to_all_attention(q: Any, k: Any, v: Any, group: Any = None, **arguments: Any) -> Any:
    """:func:`context_parallel_attention` in which rows are exchanged for heads."""
    return context_parallel_attention(q, k, v, group, variant="all_to_all", **arguments)


def hybrid_attention(q: Any, k: Any, v: Any, group: Any = None, *, nodes: int, **arguments: Any) -> Any:
    """:func:`context_parallel_attention` in which rows are exchanged for heads between nodes, and keys
    travel within one. Its rows are those of :func:`shard` with the same ``nodes``."""
    return context_parallel_attention(q, k, v, group, variant="hybrid", nodes=nodes, **arguments)


def shard(
    tensor: Any,
    group: Any = None,
    *,
    dim: int | None = None,
    cu_seqlens: Any = None,
    order: str = "zigzag",
    nodes: int = 1,
) -> Any:
    """The rows of a whole tensor that this rank owns.

    Args:
        tensor: The same on all ranks: a batch, or sequences of these cumulative lengths one after the other.
        dim: The dimension of rows: 1, or 0 with ``cu_seqlens``, unless given.
        order, nodes: As in :func:`context_parallel_attention`; ``nodes`` is that of ``"hybrid"``, which gives
            neighbouring rows to ranks of different nodes.
    """
    dim = (0 if cu_seqlens is not None else 1) if dim is None else dim
    moves = _transport(group)
    lengths = _lengths(cu_seqlens, tensor.shape[dim], 0, moves.size)
    starts = _cumulated(lengths)
    if starts[-1] != tensor.shape[dim]:
        raise ValueError(f"tensor has {tensor.shape[dim]} rows, expected the {starts[-1]} of cu_seqlens")
    pieces = _layout(moves, lengths, order, nodes).distribution.pieces(moves.rank)
    narrow = [tensor.narrow(dim, starts[at] + begin, end - begin) for at, (begin, end) in pieces]
    return torch.cat(narrow, dim) if narrow else tensor.narrow(dim, 0, 0)


def unshard(
    tensor: Any,
    group: Any = None,
    *,
    dim: int | None = None,
    length: int | None = None,
    cu_seqlens: Any = None,
    order: str = "zigzag",
    nodes: int = 1,
) -> Any:
    """The whole tensor of which each rank gives the rows that it owns: the other way of :func:`shard`. It
    has no gradient. ``length`` is as in :func:`context_parallel_attention`."""
    dim = (0 if cu_seqlens is not None else 1) if dim is None else dim
    moves = _transport(group)
    lengths = _lengths(cu_seqlens, length, tensor.shape[dim], moves.size)
    layout = _layout(moves, lengths, order, nodes)
    if tensor.shape[dim] != layout.rows[moves.rank]:
        raise ValueError(f"tensor has {tensor.shape[dim]} rows, expected {layout.rows[moves.rank]}")
    first = tensor.detach().movedim(dim, 0)
    most = max(layout.rows)
    room = first.new_zeros((most, *first.shape[1:]))
    room[: first.shape[0]] = first
    parts = room.new_empty((moves.size, *room.shape))
    if room.numel():
        for work in moves.all_gather(parts.view(-1), room.view(-1)):
            work.wait()
    starts = _cumulated(lengths)
    whole = first.new_empty((starts[-1], *first.shape[1:]))
    for rank in range(moves.size):
        at = 0
        for sequence, (begin, end) in layout.distribution.pieces(rank):
            rows = end - begin
            whole[starts[sequence] + begin : starts[sequence] + end] = parts[rank, at : at + rows]
            at += rows
    return whole.movedim(0, dim)


def positions(
    group: Any = None,
    *,
    length: int | None = None,
    cu_seqlens: Any = None,
    order: str = "zigzag",
    nodes: int = 1,
    device: Any = None,
) -> Any:
    """The position of each of this rank's rows in its sequence, for rotary embeddings: (own rows,)."""
    if length is None and cu_seqlens is None:
        raise ValueError("neither length nor cu_seqlens was given, expected one of them")
    moves = _transport(group)
    layout = _layout(moves, _lengths(cu_seqlens, length, 0, moves.size), order, nodes)
    ranges = [torch.arange(*rows, device=device) for _, rows in layout.distribution.pieces(moves.rank)]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64, device=device)


def _layout(moves: Any, lengths: tuple[int, ...], order: str, nodes: int) -> Any:
    """Returns the plan of row ownership, which depends neither on the mask nor on the heads."""
    heads = (max(nodes, 1), 1, 1, 1, 1)
    return _plan_of(moves.size, moves.rank, lengths, None, (None, None), "hybrid", nodes, order, heads)


def _lengths(cu_seqlens: Any, length: int | None, rows: int, ranks: int) -> tuple[int, ...]:
    """Returns the lengths of whole sequences."""
    if cu_seqlens is None:
        return (rows * ranks if length is None else length,)
    starts = cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else list(cu_seqlens)
    lengths = tuple(after - before for before, after in zip(starts, starts[1:]))
    if not starts or starts[0] != 0 or any(it < 0 for it in lengths):
        raise ValueError(f"cu_seqlens is {starts}, expected cumulative lengths from 0 on")
    return lengths


def _cumulated(lengths: tuple[int, ...]) -> list[int]:
    starts = [0]
    for it in lengths:
        starts.append(starts[-1] + it)
    return starts


def _check(q: Any, k: Any, v: Any, dimensions: int) -> None:
    """Refuses tensors that do not fit together."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor)}, expected a PyTorch tensor")
        if tensor.dim() != dimensions:
            expected = "(own rows, heads, head dim)" if dimensions == 3 else "(batch, own rows, heads, head dim)"
            raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {expected}")
        if tensor.shape[:-2] != q.shape[:-2]:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, expected as many rows as q, {list(q.shape)}")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise TypeError(f"{name} is {tensor.dtype} on {tensor.device}, expected {q.dtype} on {q.device} as q")
    if k.shape[-2] != v.shape[-2] or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"k has shape {list(k.shape)}, expected the heads of v, {list(v.shape)}, and the head dim of q, {list(q.shape)}"
        )
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"q is {q.dtype}, expected float16, bfloat16 or float32")
