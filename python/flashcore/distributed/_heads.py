"""Heads for rows and back: what the ranks of different nodes exchange."""

from __future__ import annotations

from typing import Any

import torch

from ._messages import apart, numel
from ._plan import Plan
from ._transport import Pending


def _chosen(tensor: Any, heads: Any) -> Any:
    """Some heads of a tensor."""
    if isinstance(heads, tuple):
        return tensor[:, :, slice(*heads)]
    if heads == list(range(heads[0], heads[0] + len(heads))):
        return tensor[:, :, heads[0] : heads[0] + len(heads)]
    return tensor[:, :, heads]


def to_heads(tensors: tuple[Any, ...], call: Any) -> list[Any]:
    """Tensors of all rows that this member of a node has after the exchange, with the node's heads. The
    first is one of queries, others are of keys."""
    plan = call.plan

    def of(node: int) -> list[Any]:
        kinds = (plan.heads[node][0], plan.heads[node][1], plan.heads[node][1])
        return [_chosen(tensor, heads) for tensor, heads in zip(tensors, kinds)]

    own = of(plan.node)
    sizes = [[(it.shape[0], plan.rows[rank], *it.shape[2:]) for it in own] for rank in plan.peers]

    def begin() -> Any:
        sends = []
        for node, rank in enumerate(plan.peers):
            if node != plan.node:
                sends.append((rank, torch.cat([it.flatten() for it in of(node)])))
        rooms = [own[0].new_empty(sum(map(numel, some))) for some in sizes]
        receives = [(rank, rooms[node]) for node, rank in enumerate(plan.peers) if node != plan.node]
        return call.transport.exchange(_some(sends), _some(receives)), rooms

    rooms = Pending(own[0].device, begin).wait()
    parts = [apart(room, some) for room, some in zip(rooms, sizes)]
    parts[plan.node] = own
    if not plan.exchanged:
        return [it[:, :0] for it in own]
    rows = [(parts[node], slice(*rows)) for node, rows in plan.exchanged]
    return [torch.cat([some[it][:, at] for some, at in rows], 1) for it in range(len(own))]


def _some(messages: list[Any]) -> list[Any]:
    """Without those that are empty."""
    return [(rank, tensor) for rank, tensor in messages if tensor.numel()]


def to_rows(tensors: list[Any], call: Any) -> list[Any]:
    """The other way: tensors of the rank's rows with all heads. The first is one of queries, others are
    of keys, whose heads are summed where several nodes have the same."""
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

    own = plan.rows[plan.rank]
    sizes = []
    for queries, keys in plan.heads:
        heads = (queries[1] - queries[0], len(keys), len(keys))
        sizes.append([(it.shape[0], own, n, *it.shape[3:]) for it, n in zip(tensors, heads)])

    def begin() -> Any:
        others = [(node, rank) for node, rank in enumerate(plan.peers) if node != plan.node]
        sends = [(rank, torch.cat([it.flatten() for it in of(node)])) for node, rank in others]
        rooms = [tensors[0].new_empty(sum(map(numel, some))) for some in sizes]
        receives = [(rank, rooms[node]) for node, rank in others]
        return call.transport.exchange(_some(sends), _some(receives)), rooms

    rooms = Pending(tensors[0].device, begin).wait()
    parts = [apart(room, some) for room, some in zip(rooms, sizes)]
    parts[plan.node] = of(plan.node)
    queries = torch.cat([some[0] for some in parts], 2)
    if len(tensors) == 1:
        return [queries]
    return [queries, *(_summed([some[it] for some in parts], plan) for it in (1, 2))]


def _summed(parts: list[Any], plan: Plan) -> Any:
    """Gradients of key heads from all nodes."""
    indices = [head for _, keys in plan.heads for head in keys]
    together = torch.cat(parts, 2)
    if len(set(indices)) == len(indices):
        return together
    size = (*together.shape[:2], max(indices) + 1, together.shape[3])
    sums = torch.zeros(size, dtype=torch.float32, device=together.device)
    index = torch.tensor(indices, device=together.device)
    return sums.index_add_(2, index, together.float()).to(together.dtype)
