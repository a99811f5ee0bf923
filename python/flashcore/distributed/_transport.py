"""What goes between ranks: several sends and receives at once, started before the work that hides them.

On a GPU all of it, with the copies before and after, is on a stream of its own. The stream that computes
waits for it where the keys are needed, and it for that stream where something is to be sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# What is sent to or received from a rank.
Message = tuple[int, Any]

_streams: dict[Any, Any] = {}


class Group:
    """A process group of ``torch.distributed``."""

    def __init__(self, group: Any = None) -> None:
        if group is None:
            group = dist.group.WORLD
        elif hasattr(group, "get_group"):
            # A mesh of devices, of one dimension.
            group = group.get_group()
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

    def exchange(self, sends: list[Message], receives: list[Message]) -> list[Any]:
        """Starts sends and receives; returns the pending operations."""
        ops = []
        for function, messages in ((dist.isend, sends), (dist.irecv, receives)):
            for rank, tensor in messages:
                peer = dist.get_global_rank(self.group, rank)
                ops.append(dist.P2POp(function, tensor, peer, group=self.group))
        return dist.batch_isend_irecv(ops) if ops else []

    def all_gather(self, into: Any, part: Any) -> list[Any]:
        """Starts gathering parts of equal size, by rank."""
        return [dist.all_gather_into_tensor(into, part, group=self.group, async_op=True)]


def transport(group: Any) -> Any:
    """What moves the tensors of a group: itself where it can, as one within a process does."""
    if group is None and not dist.is_initialized():
        raise RuntimeError("there is no process group: call torch.distributed.init_process_group first")
    moves = group if hasattr(group, "exchange") else Group(group)
    if moves.rank < 0:
        raise ValueError("this process is not in the group")
    return moves


class Pending:
    """A pending transfer."""

    def __init__(self, device: Any, begin: Callable[[], tuple[list[Any], Any]]) -> None:
        """Calls ``begin``, which starts the transfer and returns the pending operations and the
        result."""
        self._side: Any = None
        self._main: Any = None
        if device.type != "cuda":
            self._works, self._result = begin()
            return
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        self._side, self._main = _streams[device], torch.cuda.current_stream(device)
        self._side.wait_stream(self._main)
        with torch.cuda.stream(self._side):
            self._works, self._result = begin()

    def wait(self) -> Any:
        """Waits for the transfer and returns its result; raises an error if a rank is lost or
        late."""
        if self._side is None:
            for work in self._works:
                work.wait()
            return self._result
        with torch.cuda.stream(self._side):
            for work in self._works:
                work.wait()
        self._main.wait_stream(self._side)
        for tensor in self._result:
            # Its memory is that stream's, which must not give it away while this one reads it.
            tensor.record_stream(self._main)
        return self._result
