"""Keys, values and their gradients on the way: of some rows, all keys and then all values in one message."""

from __future__ import annotations

from typing import Any

import torch

from ._plan import Plan, Span, Step, count
from ._transport import Pending


def _message(rows: int, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Room for so many rows: the message, and the keys and the values in it."""
    sizes = [(k.shape[0], rows, *it.shape[2:]) for it in (k, v)]
    room = k.new_empty(sum(numel(size) for size in sizes))
    return (room, *apart(room, sizes))


def apart(room: Any, sizes: list[tuple[int, ...]]) -> list[Any]:
    """The tensors that lie one after the other in a message."""
    return [it.view(size) for it, size in zip(room.split([numel(size) for size in sizes]), sizes)]


def numel(size: tuple[int, ...]) -> int:
    product = 1
    for it in size:
        product *= it
    return product


def _packed(spans: list[Span], k: Any, v: Any) -> Any:
    """A message of these rows."""
    room, *tensors = _message(count(spans), k, v)
    for source, target in zip((k, v), tensors):
        at = 0
        for begin, end in spans:
            target[:, at : at + end - begin].copy_(source[:, begin:end])
            at += end - begin
    return room


def fetch(step: Step | None, k: Any, v: Any, call: Any) -> Pending | None:
    """Begins to get the keys and values of a step from their owner, and to give away own ones; None where
    nobody sees anything."""
    if step is None or not (step.send or step.receive):
        return None

    def begin() -> Any:
        sends = [(rank, _packed(spans, k, v)) for rank, spans in step.send]
        rooms = [_message(count(spans), k, v) for _, spans in step.receive]
        receives = [(rank, room[0]) for (rank, _), room in zip(step.receive, rooms)]
        works = call.transport.exchange(sends, receives)
        # A ring's step has one owner, or none.
        return works, rooms[0][1:] if rooms else (k[:, :0], v[:, :0])

    return Pending(k.device, begin)


def give_back(step: Step, found: tuple[Any, Any], k: Any, v: Any, call: Any) -> Pending:
    """Begins to send the gradients of a step's keys to their owner, and to get those of own ones."""

    def begin() -> Any:
        sends = [(rank, _packed([(0, count(spans))], *found)) for rank, spans in step.receive]
        return _returned(sends, step, k, v, call)

    return Pending(k.device, begin)


def add_returned(step: Step, rooms: list[Any], k: Any, v: Any, dk: Any, dv: Any) -> None:
    """Adds gradients of own keys that others computed."""
    for (_, spans), room in zip(step.send, rooms):
        rows = count(spans)
        parts = apart(room, [(it.shape[0], rows, *it.shape[2:]) for it in (k, v)])
        for part, gradient in zip(parts, (dk, dv)):
            at = 0
            for begin, end in spans:
                gradient.add(part[:, at : at + end - begin], (begin, end))
                at += end - begin


def gather(k: Any, v: Any, call: Any) -> Pending:
    """Begins to get the keys and values of all ranks: messages by rank, of which the own one is last."""
    plan = call.plan
    step = plan.steps[0]

    def begin() -> Any:
        if plan.distribution.gathers_all:
            # Those of the longest part, so that all are of one size.
            room, *tensors = _message(max(plan.rows), k, v)
            for source, target in zip((k, v), tensors):
                target[:, : source.shape[1]].copy_(source)
            rooms = room.new_empty((plan.size, room.numel()))
            return call.transport.all_gather(rooms.view(-1), room), list(rooms)
        rooms = [k.new_empty(0)] * plan.size
        for rank, spans in step.receive:
            rooms[rank] = _message(count(spans), k, v)[0]
        sends = [(rank, _packed(spans, k, v)) for rank, spans in step.send]
        works = call.transport.exchange(sends, [(rank, rooms[rank]) for rank, _ in step.receive])
        return works, rooms

    return Pending(k.device, begin)


def put_together(rooms: list[Any], k: Any, v: Any, plan: Plan) -> tuple[Any, Any]:
    """The keys and values of an all-gather by positions."""
    rows = [count(spans) for spans in _received(plan)]
    if plan.distribution.gathers_all:
        rows = [max(plan.rows)] * plan.size
    parts = [apart(room, [(it.shape[0], n, *it.shape[2:]) for it in (k, v)]) for room, n in zip(rooms, rows)]
    parts[plan.rank] = [k, v]
    if not plan.gathered:
        return k, v
    some = [(parts[rank], slice(*rows)) for rank, rows in plan.gathered]
    keys, values = (torch.cat([part[it][:, at] for part, at in some], 1) for it in (0, 1))
    return keys, values


def _received(plan: Plan) -> list[list[Span]]:
    """The rows that each rank sends here."""
    received: list[list[Span]] = [[] for _ in range(plan.size)]
    for rank, spans in plan.steps[0].receive:
        received[rank] = spans
    return received


def return_gathered(found: tuple[Any, Any], k: Any, v: Any, call: Any, dk: Any, dv: Any) -> None:
    """Sends the gradients of an all-gather's keys to their owners, and adds those that others found."""
    plan = call.plan
    step = plan.steps[0]
    slices: list[list[tuple[int, slice]]] = [[] for _ in range(plan.size)]
    at = 0
    for rank, (first, last) in plan.gathered:
        slices[rank].append((first, slice(at, at + last - first)))
        at += last - first

    def of(rank: int) -> list[Any]:
        """In the order of the owner's rows."""
        rows = [at for _, at in sorted(slices[rank], key=lambda it: it[0])]
        return [torch.cat([it[:, at] for at in rows], 1) for it in found]

    def begin() -> Any:
        sends = [(rank, _packed([(0, count(spans))], *of(rank))) for rank, spans in step.receive]
        return _returned(sends, step, k, v, call)

    pending = Pending(k.device, begin)
    if slices[plan.rank]:
        for part, gradient in zip(of(plan.rank), (dk, dv)):
            gradient.add(part, (0, plan.held))
    add_returned(step, pending.wait(), k, v, dk, dv)


def _returned(sends: list[Any], step: Step, k: Any, v: Any, call: Any) -> Any:
    """Begins to send gradients of keys to their owners, and to get those of own ones."""
    rooms = [_message(count(spans), k, v)[0] for _, spans in step.send]
    receives = [(rank, room) for (rank, _), room in zip(step.send, rooms)]
    return call.transport.exchange(sends, receives), rooms
