"""The schedule that the library decides on, in the form in which this package executes it."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

from .. import _flashcore

Span = tuple[int, int]


class Launch:
    """A launch: blocks of queries and keys with one mask."""

    def __init__(self, window: tuple[int, int], blocks: list[tuple[int, Span, Span]], rows: int) -> None:
        self.window = window
        self.queries = [queries for _, queries, _ in blocks]
        self.keys = [keys for _, _, keys in blocks]
        self._rows = rows
        self._lists: dict[Any, tuple[Any, ...]] = {}
        self.most = _most(self.queries), _most(self.keys)

    @property
    def single(self) -> bool:
        """Returns whether it is a single block, which needs no lists."""
        return len(self.queries) == 1

    def lists(self, device: Any) -> tuple[Any, ...]:
        """Where sequences begin and how much of them is used, of queries and of keys, and which rows of
        queries there are."""
        if device not in self._lists:
            starts = [_starts(spans, device) for spans in (self.queries, self.keys)]
            used = [_used(spans, device) for spans in (self.queries, self.keys)]
            covered = torch.zeros(self._rows, dtype=torch.bool)
            for begin, end in self.queries:
                covered[begin:end] = True
            self._lists[device] = (*starts, *used, covered.to(device))
        return self._lists[device]


def _starts(spans: list[Span], device: Any) -> Any:
    return torch.tensor([begin for begin, _ in spans] + [spans[-1][1]], dtype=torch.int32, device=device)


def _used(spans: list[Span], device: Any) -> Any:
    """None where each ends at the next."""
    if all(before[1] == after[0] for before, after in zip(spans, spans[1:])):
        return None
    return torch.tensor([end - begin for begin, end in spans], dtype=torch.int32, device=device)


def _most(spans: list[Span]) -> int:
    """Returns the maximum number of rows between two starts."""
    ends = [begin for begin, _ in spans[1:]] + [spans[-1][1]]
    return max(end - begin for (begin, _), end in zip(spans, ends))


class Step:
    """A step: what is received, sent and computed."""

    def __init__(self, step: Any, rows: int) -> None:
        self.receive: list[tuple[int, list[Span]]] = step[0]
        self.send: list[tuple[int, list[Span]]] = step[1]
        self.launches = [Launch(window, blocks, rows) for window, blocks in step[2]]


def count(spans: list[Span]) -> int:
    """Returns the number of rows."""
    return sum(end - begin for begin, end in spans)


class Plan:
    """The schedule of one rank."""

    def __init__(self, distribution: Any, variant: str, size: int, rank: int) -> None:
        self.distribution, self.rank, self.size = distribution, rank, size
        self.gathers = variant == "all_gather"
        self.nodes, members = distribution.nodes, distribution.members
        self.node, self.member = divmod(rank, members)
        pieces = [[rows for _, rows in distribution.pieces(it)] for it in range(size)]
        self.rows = [count(it) for it in pieces]
        # Where each rank's pieces end in its tensors.
        self._ends = [list(itertools.accumulate(end - begin for begin, end in it)) for it in pieces]
        # The ranks of the same member of each node, and what each of them gets of the heads.
        self.peers = [node * members + self.member for node in range(self.nodes)]
        self.heads = [distribution.heads(node) for node in range(self.nodes)]
        self.exchanged: list[tuple[int, Span]] = distribution.exchanged(self.member)
        self.held = count([rows for _, rows in self.exchanged])
        self.gathers_all = self.gathers and distribution.gathers_all
        self.gathered: list[tuple[int, Span]] = distribution.gathered(rank) if self.gathers else []
        self.steps = [Step(step, self.held) for step in distribution.steps(rank)]
        self.launches = sum(len(step.launches) for step in self.steps)
        # Parts of the gradients of own keys: its own, and those of all who see some of them.
        self.gradients = 1 + sum(len(step.send) for step in self.steps)

    def messages(self, rank: int, spans: list[Span]) -> list[list[Span]]:
        """The messages in which the gradients of some rows of a rank's keys come: one; but where all ranks have
        all keys, one for each of its pieces, which lie apart there, unless many sequences make many of them."""
        ends = self._ends[rank]
        if not self.gathers_all or len(ends) > 2:
            return [spans]
        pieces = list(zip([0, *ends], ends))
        cut = [(max(begin, first), min(end, last)) for begin, end in spans for first, last in pieces]
        return [[(begin, end)] for begin, end in cut if begin < end]


@functools.lru_cache(maxsize=256)
def plan(
    size: int,
    rank: int,
    lengths: tuple[int, ...],
    batch: int | None,
    window: tuple[int | None, int | None],
    variant: str,
    nodes: int,
    order: str,
    heads: tuple[int, int, int, int, int],
) -> Plan:
    """Returns the schedule of a rank, cached by its arguments."""
    distribution = _flashcore.Distribution(size, list(lengths), batch, window, variant, nodes, order, heads)
    return Plan(distribution, variant, size, rank)
