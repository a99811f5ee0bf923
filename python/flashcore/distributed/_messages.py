"""Keys, values and their gradients on the way between ranks: two messages, of keys and of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._plan import Plan, Span, Step, count
from ._transport import Message, Pending


def _rows(spans: list[Span], tensor: Any) -> Any:
    """Returns rows of a tensor as one that can be sent: a copy only if they are not adjacent."""
    some = [tensor[:, begin:end] for begin, end in spans]
    return some[0].contiguous() if len(some) == 1 else torch.cat(some, 1)


def room(rows: int, like: Any) -> Any:
    """Allocates memory for rows."""
    return like.new_empty((like.shape[0], rows, *like.shape[2:]))


def _pairs(messages: list[Any]) -> list[tuple[Any, Any]]:
    """Keys and values, which come one after the other."""
    return list(zip(messages[::2], messages[1::2]))


def _exchange(sends: list[tuple[int, Any]], receive: list[tuple[int, list[Span]]], k: Any, v: Any, call: Any) -> Any:
    """Starts sending, and receiving rows of keys and values from these ranks; returns the pending
    transfers and the tensors that they fill."""
    rooms = [(rank, room(count(spans), it)) for rank, spans in receive for it in (k, v)]
    return call.transport.exchange(sends, rooms), [it for _, it in rooms]


def fetch(step: Step | None, k: Any, v: Any, call: Any) -> Pending | None:
    """Starts receiving the keys and values of a step from their owner, and sending own ones;
    returns None if no rank sees anything."""
    if step is None or not (step.send or step.receive):
        return None

    def begin() -> Any:
        sends = [(rank, _rows(spans, it)) for rank, spans in step.send for it in (k, v)]
        works, rooms = _exchange(sends, step.receive, k, v, call)
        # A ring's step has one owner, or none.
        return works, rooms or [k[:, :0], v[:, :0]]

    return Pending(k.device, begin)


class Returning:
    """Gradients of keys on their way to their owners, and of own ones to where they are summed."""

    def __init__(self, device: Any, sends: Callable[[], list[Message]], step: Step, sums: Any, call: Any) -> None:
        # Memory must not be given away while it is sent.
        self._sends = sends
        ranks, self._places = [], []
        for rank, spans in step.send:
            messages = call.plan.messages(call.plan.rank, spans)
            for it in sums:
                rows = iter(it.rows([span for message in messages for span in message]))
                self._places += [[next(rows) for _ in message] for message in messages]
                ranks += [rank for _ in messages]

        def begin() -> Any:
            rooms = [_message(place) for place in self._places]
            return call.transport.exchange(sends(), list(zip(ranks, rooms))), rooms

        self._pending = Pending(device, begin)

    def wait(self) -> None:
        for place, message in zip(self._places, self._pending.wait()):
            if message is not place[0]:
                for rows, part in zip(place, message.split([it.shape[1] for it in place], 1)):
                    rows.copy_(part)


def _message(place: list[Any]) -> Any:
    """Returns memory for a message of these rows: the rows themselves if they are adjacent."""
    if len(place) == 1 and place[0].is_contiguous():
        return place[0]
    return room(sum(it.shape[1] for it in place), place[0])


def give_back(step: Step, found: tuple[Any, Any], sums: Any, call: Any) -> Returning:
    """Starts sending the gradients of a step's keys to their owner, and receiving those of own
    keys."""

    def sends() -> list[Message]:
        return [(rank, it.contiguous()) for rank, _ in step.receive for it in found]

    return Returning(found[0].device, sends, step, sums, call)


def gather(k: Any, v: Any, call: Any) -> Pending:
    """Starts gathering the keys and values of all ranks, by rank."""
    plan = call.plan

    def everything() -> Any:
        works, found = [], []
        for it in (k, v):
            part = it.contiguous()
            if it.shape[1] < max(plan.rows):
                # As long as the longest, so that all are of one size.
                part = room(max(plan.rows), it)
                part[:, : it.shape[1]].copy_(it)
            parts = part.new_empty((plan.size, *part.shape))
            works += call.transport.all_gather(parts.view(-1), part.view(-1))
            found.append(parts)
        return works, found

    def mirrored() -> Any:
        # First pieces come to their places. The others, which are in the order of the ranks too, come beside them.
        works, found = [], []
        for it in (k, v):
            piece = it.shape[1] // 2
            whole, seconds = room(2 * plan.size * piece, it), room(plan.size * piece, it)
            for into, part in ((whole[:, : plan.size * piece], it[:, :piece]), (seconds, it[:, piece:])):
                works += call.transport.all_gather(into.view(-1), part.contiguous().view(-1))
            found += [whole, seconds]
        return works, found

    def seen() -> Any:
        step = plan.steps[0]
        sends = [(rank, _rows(spans, it)) for rank, spans in step.send for it in (k, v)]
        return _exchange(sends, step.receive, k, v, call)

    if not plan.gathers_all:
        return Pending(k.device, seen)
    return Pending(k.device, mirrored if _is_mirrored(k, plan) else everything)


def _is_mirrored(k: Any, plan: Plan) -> bool:
    """Returns whether the keys of an all-gather are those of one sequence, of which each rank has
    two pieces of equal length, one from each end."""
    piece, last = k.shape[1] // 2, plan.size - 1
    firsts = [(rank, (0, piece)) for rank in range(last)]
    seconds = [(rank, (piece, 2 * piece)) for rank in reversed(range(last))]
    # The last one's lie together.
    return k.shape[0] == 1 and plan.gathered == [*firsts, (last, (0, 2 * piece)), *seconds]


def put_together(messages: list[Any], k: Any, v: Any, plan: Plan) -> tuple[Any, Any]:
    """Returns the gathered keys and values in the order of positions."""
    if plan.gathers_all and _is_mirrored(k, plan):
        rows, piece = plan.size * k.shape[1] // 2, k.shape[1] // 2
        for whole, seconds in _pairs(messages):
            for rank in range(plan.size):
                at = 2 * rows - (rank + 1) * piece
                whole[:, at : at + piece].copy_(seconds[:, rank * piece : (rank + 1) * piece])
        keys, values = messages[::2]
        return keys, values
    if plan.gathers_all:
        parts = dict(enumerate(zip(*messages)))
    else:
        parts = dict(zip((rank for rank, _ in plan.steps[0].receive), _pairs(messages)))
    parts[plan.rank] = (k, v)
    if not plan.gathered:
        return k, v
    some = [(parts[rank], slice(*rows)) for rank, rows in plan.gathered]
    keys, values = (torch.cat([part[it][:, at] for part, at in some], 1) for it in (0, 1))
    return keys, values


def return_gathered(found: tuple[Any, Any], sums: Any, call: Any) -> None:
    """Sends the gradients of an all-gather's keys to their owners, and gets those that others found."""
    plan = call.plan
    step = plan.steps[0]
    # What came of each owner's rows, and where it is here.
    owned: list[dict[Span, Span]] = [{} for _ in range(plan.size)]
    at = 0
    for rank, (first, last) in plan.gathered:
        owned[rank][first, last] = (at, at + last - first)
        at += last - first

    def sends() -> list[Message]:
        return [
            (rank, _rows([owned[rank][span] for span in message], it))
            for rank, _ in step.receive
            for it in found
            for message in plan.messages(rank, sorted(owned[rank]))
        ]

    returning = Returning(found[0].device, sends, step, sums, call)
    if owned[plan.rank]:
        own = [owned[plan.rank][span] for span in sorted(owned[plan.rank])]
        for part, gradient in zip(found, sums):
            torch.cat([part[:, begin:end] for begin, end in own], 1, out=gradient.whole())
    returning.wait()
