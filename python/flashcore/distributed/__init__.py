"""Attention over sequences that are sharded over the ranks of a ``torch.distributed`` process group.

    from flashcore.distributed import context_parallel_attention, shard

    q, k, v = (shard(it, group) for it in (q, k, v))        # or sharded from the start
    out = context_parallel_attention(q, k, v, group, causal=True)
    out.backward(dout)

Every rank calls the same function with the rows that it owns; :func:`shard` and :func:`positions` say which.
docs/distributed.md describes the variants and what each of them sends.
"""

from __future__ import annotations

from typing import Any

import torch

from .._arguments import flag, window
from .._torch import _autocast, is_compiling
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
    """Computes self-attention over whole sequences, of which each rank holds some rows.

    The function has gradients with respect to ``q``, ``k`` and ``v``. It is collective: all ranks of the group
    must call it, with the same arguments except for their rows.

    Args:
        q: (batch, own rows, heads, head dim), or (own rows of all sequences, heads, head dim) with ``cu_seqlens``;
            in float16, bfloat16 or float32. The rows are those of :func:`shard`.
        k, v: The same rows, (batch, own rows, key heads, head dim) or without the batch, in the element type of
            ``q``. The number of query heads must be a multiple of the number of key heads.
        group: A process group, a one-dimensional ``DeviceMesh``, or None for all processes.
        variant: What the ranks exchange:

            - ``"ring"``: keys and values of one rank after the other, while others are computed with;
            - ``"all_gather"``: all keys and values at once;
            - ``"all_to_all"``: rows for heads; there must be at least one query head for each rank;
            - ``"hybrid"``: rows for heads between ``nodes``, keys and values within a node.
        causal, window_size, softmax_scale, softcap: As in :func:`flashcore.flash_attn_func`.
        cu_seqlens: (sequences + 1,) cumulative lengths of the whole sequences, the same on all ranks, as a list of
            numbers or a tensor. A tensor on a GPU causes a synchronisation.
        length: The length of the whole sequences; own rows times ranks if None. Required if the number of ranks
            does not divide it.
        order: Which rows a rank owns: ``"zigzag"``, a piece from the beginning of a sequence and one from its end,
            which balances the work under a causal mask; or ``"contiguous"``, one piece, with which distant ranks
            exchange nothing under a window.
        nodes: For ``"hybrid"``, the number of nodes into which the ranks are divided, in order.
        deterministic: As in :func:`flashcore.flash_attn_func`.
        return_lse: Whether to return ``(out, softmax_lse)``.

    Returns:
        The output of the rank's own rows, with the shape of ``q`` but the head dim of ``v``, in the element type
        of ``q``. With ``return_lse`` a tuple ``(out, softmax_lse)``; the log-sum-exps are (batch, heads, own rows),
        or (heads, own rows) with ``cu_seqlens``, in float32, and have a gradient too.

    Raises:
        TypeError: If a tensor is not a PyTorch tensor, or has an unsupported element type or another device.
        ValueError: If shapes do not fit together, if the rows are not those that this rank owns, if there are fewer
            query heads than ranks (``"all_to_all"``), or if ``nodes`` does not divide the ranks.
        RuntimeError: If there is no process group, or a rank is lost.

    Example:
        ::

            dist.init_process_group("nccl")
            q, k, v = (shard(it) for it in (q, k, v))           # (batch, own rows, heads, head dim)
            out = context_parallel_attention(q, k, v, causal=True)
            whole = unshard(out)                                # where all rows are needed
    """
    mask = (causal, window_size)
    layout = (cu_seqlens, length, order, nodes)
    rest = (softmax_scale, softcap, deterministic, flag("return_lse", return_lse))
    arguments = (q, k, v, group, variant, mask, layout, rest)
    if is_compiling():
        from .._outside import call

        return call(_attend, *arguments)
    return _attend(*arguments)


def _attend(
    q: Any, k: Any, v: Any, group: Any, variant: str, mask: tuple[Any, ...], layout: tuple[Any, ...], rest: Any
) -> Any:
    """Computes attention of the own rows; returns the output, or output and log-sum-exps."""
    cu_seqlens, return_lse = layout[0], rest[3]
    q, k, v, call = _prepared(q, k, v, group, variant, mask, layout, rest)
    if max(call.plan.rows) == 0 or 0 in (q.shape[0], q.shape[2]):
        # Nobody has anything to do.
        out = q.new_zeros((*q.shape[:-1], v.shape[-1])) + (q.sum() + k.sum() + v.sum())  # so that all have gradients
        lse = q.new_zeros(q.shape[:3], dtype=torch.float32).transpose(1, 2)
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
    """Calls :func:`context_parallel_attention` with ``variant="ring"``, with the same other arguments and result."""
    return context_parallel_attention(q, k, v, group, variant="ring", **arguments)


def all_gather_attention(q: Any, k: Any, v: Any, group: Any = None, **arguments: Any) -> Any:
    """Calls :func:`context_parallel_attention` with ``variant="all_gather"``, with the same other arguments and result."""
    return context_parallel_attention(q, k, v, group, variant="all_gather", **arguments)


def all_to_all_attention(q: Any, k: Any, v: Any, group: Any = None, **arguments: Any) -> Any:
    """Calls :func:`context_parallel_attention` with ``variant="all_to_all"``, with the same other arguments and result."""
    return context_parallel_attention(q, k, v, group, variant="all_to_all", **arguments)


def hybrid_attention(q: Any, k: Any, v: Any, group: Any = None, *, nodes: int, **arguments: Any) -> Any:
    """Calls :func:`context_parallel_attention` with ``variant="hybrid"``, with the same other arguments and result.

    Rows must be those of :func:`shard` with the same ``nodes``.
    """
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
    """Returns the rows of a whole tensor that this rank owns. Nothing is sent.

    Args:
        tensor: A tensor of any element type that is the same on all ranks: (batch, length, ...), or (rows of all
            sequences, ...) with ``cu_seqlens``.
        group: As in :func:`context_parallel_attention`.
        dim: The dimension of the rows; 1 if None, or 0 with ``cu_seqlens``.
        cu_seqlens, order: As in :func:`context_parallel_attention`.
        nodes: For ``variant="hybrid"``, the number of nodes; neighbouring pieces then belong to different nodes.

    Returns:
        The rank's own rows, in the order in which :func:`context_parallel_attention` expects them.

    Raises:
        ValueError: If the tensor does not have the rows of ``cu_seqlens``.

    Example:
        ::

            tokens = shard(tokens, group)                       # (batch, own rows)
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
    """Returns the whole tensor of which each rank has the rows that it owns; the inverse of :func:`shard`.

    It is collective, and has no gradient.

    Args:
        tensor: This rank's rows: (batch, own rows, ...), or (own rows of all sequences, ...) with ``cu_seqlens``.
        dim: The dimension of the rows; 1 if None, or 0 with ``cu_seqlens``.
        group, length, cu_seqlens, order, nodes: As in :func:`context_parallel_attention` and :func:`shard`.

    Returns:
        The whole tensor, on every rank.

    Raises:
        ValueError: If the tensor does not have the rows that this rank owns.
    """
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
    """Returns the position of each of this rank's rows in its sequence, for example for rotary embeddings.

    Args:
        length: The length of the whole sequences.
        cu_seqlens: The cumulative lengths of whole sequences, instead of ``length``.
        device: The device of the result; PyTorch's default if None.
        group, order, nodes: As in :func:`context_parallel_attention` and :func:`shard`.

    Returns:
        (own rows,) in int64.

    Raises:
        ValueError: If neither ``length`` nor ``cu_seqlens`` is given.
    """
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
