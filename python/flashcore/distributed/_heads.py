"""Heads for rows and back: what the ranks of different nodes exchange."""

from __future__ import annotations

from typing import Any

import torch

from ._messages import room
from ._plan import Plan
from ._transport import Pending


def _chosen(tensor: Any, heads: Any) -> Any:
    """Selects heads of a tensor: a range, or a list."""
    if isinstance(heads, tuple):
        return tensor[:, :, slice(*heads)]
    if heads == list(range(heads[0], heads[0] + len(heads))):
        return tensor[:, :, heads[0] : heads[0] + len(heads)]
    return tensor[:, :, heads]


def to_heads(tensors: tuple[Any, ...], call: Any) -> list[Any]:
    """Returns tensors of all rows that this member of a node has after the exchange, with the
    node's heads. The first tensor holds queries, the others keys or values."""
    plan = call.plan

    def of(node: int) -> list[Any]:
        queries, keys = plan.heads[node]
        return [_chosen(tensor, heads) for tensor, heads in zip(tensors, (queries, keys, keys))]

    own = of(plan.node)
    rooms = [[room(plan.rows[rank], it) for it in own] for rank in plan.peers]
    parts = _exchanged(of, rooms, call)
    if not plan.exchanged:
        return [it[:, :0] for it in own]
    rows = [(parts[node], slice(*rows)) for node, rows in plan.exchanged]
    return [torch.cat([some[it][:, at] for some, at in rows], 1) for it in range(len(own))]


def to_rows(tensors: list[Any], call: Any) -> list[Any]:
    """Undoes the exchange: returns tensors of the rank's rows with all heads. The first tensor
    holds queries, the others keys or values, whose heads are summed if several nodes have the
    same."""
    plan = call.plan
    slices: list[list[slice]] = [[] for _ in plan.peers]
    at = 0
    # A node's rows are in the order of its own tensors here too.
    for node, (first, last) in plan.exchanged:
        slices[node].append(slice(at, at + last - first))
        at += last - first

    def of(node: int) -> list[Any]:
        rows = slices[node]
        return [torch.cat([it[:, at] for at in rows], 1) if rows else it[:, :0] for it in tensors]

    rooms = []
    for queries, keys in plan.heads:
        heads = (queries[1] - queries[0], len(keys), len(keys))
        sizes = [(it.shape[0], plan.rows[plan.rank], n, *it.shape[3:]) for it, n in zip(tensors, heads)]
        rooms.append([it.new_empty(size) for it, size in zip(tensors, sizes)])
    parts = _exchanged(of, rooms, call)
    queries = torch.cat([some[0] for some in parts], 2)
    if len(tensors) == 1:
        return [queries]
    return [queries, *(_summed([some[it] for some in parts], plan) for it in (1, 2))]


def _exchanged(of: Any, rooms: list[list[Any]], call: Any) -> list[list[Any]]:
    """What each node gives this one, into its room, where ``of`` says what this one gives each of them."""
    plan = call.plan
    others = [(node, rank) for node, rank in enumerate(plan.peers) if node != plan.node]

    def begin() -> Any:
        sends = [(rank, it.contiguous()) for node, rank in others for it in of(node) if it.numel()]
        receives = [(rank, it) for node, rank in others for it in rooms[node] if it.numel()]
        return call.transport.exchange(sends, receives), [it for some in rooms for it in some]

    Pending(rooms[0][0].device, begin).wait()
    rooms[plan.node] = of(plan.node)
    return rooms


def _summed(parts: list[Any], plan: Plan) -> Any:
    """Sums the gradients of key heads from all nodes."""
    indices = [head for _, keys in plan.heads for head in keys]
    together = torch.cat(parts, 2)
    if len(set(indices)) == len(indices):
        return together
    size = (*together.shape[:2], max(indices) + 1, together.shape[3])
    sums = torch.zeros(size, dtype=torch.float32, device=together.device)
    index = torch.tensor(indices, device=together.device)
    return sums.index_add_(2, index, together.float()).to(together.dtype)
