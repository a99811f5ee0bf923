"""Attention over a spread sequence, forward and backward, and what autograd records of it.

Tensors are (batch, rows, heads, dim) throughout; sequences of unequal lengths are one batch entry.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import _flashcore, _gradients
from ._heads import to_heads, to_rows
from ._messages import add_returned, fetch, gather, give_back, put_together, return_gathered
from ._plan import Launch, Plan, Span, Step, count

# Parts of the output that are kept until they are put together.
PARTS = 16


class Call(NamedTuple):
    """What a call is, besides its tensors."""

    plan: Plan
    transport: Any
    scale: float | None
    softcap: float
    deterministic: bool
    lse: bool

    def numbers(self, launch: Launch) -> tuple[Any, ...]:
        most = (None, None) if launch.single else launch.most
        return (self.scale, False, launch.window, 0, self.softcap, *most)


class Attention(torch.autograd.Function):  # type: ignore[misc]
    """The output, and if asked its log-sum-exps, which have no gradient."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, call: Call) -> Any:
        out, lse, saved = forward(q, k, v, call)
        ctx.save_for_backward(*saved)
        ctx.call, ctx.shape = call, out.shape
        ctx.set_materialize_grads(False)
        if not call.lse:
            return out
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: Any, *_: Any) -> Any:
        if dout is None:
            # Others have a gradient, and wait for this rank's part.
            dout = ctx.saved_tensors[0].new_zeros(ctx.shape)
        return (*backward(dout, ctx.saved_tensors, ctx.call), None)


def forward(q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any, tuple[Any, ...]]:
    """Output and log-sum-exps of the rank's rows, and what the backward pass needs."""
    if call.plan.nodes == 1:
        out, lse = _forward_steps(q, k, v, call)
        return out, lse, (q, k, v, out, lse)
    q, k, v = to_heads((q, k, v), call)
    out, lse = _forward_steps(q, k, v, call)
    saved = (q, k, v, out, lse)
    (out,) = to_rows([out], call)
    if call.lse:
        # A head dim of one.
        (lse,) = to_rows([lse.transpose(1, 2).unsqueeze(-1)], call)
        lse = lse.squeeze(-1).transpose(1, 2)
    return out, lse, saved


def _forward_steps(q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
    plan = call.plan
    parts = Parts(q, v, plan.launches)
    if plan.gathers:
        keys = put_together(gather(k, v, call).wait(), k, v, plan)
        _attend(plan.steps[0], q, keys, call, parts)
        return parts.finish()
    keys, nothing = (k, v), (k[:, :0], v[:, :0])
    for step, following in zip(plan.steps, [*plan.steps[1:], None]):
        pending = fetch(following, k, v, call)
        _attend(step, q, keys, call, parts)
        keys = nothing if pending is None else pending.wait()
    return parts.finish()


def backward(dout: Any, saved: tuple[Any, ...], call: Call) -> tuple[Any, Any, Any]:
    """The gradients of the rank's queries, keys and values."""
    q, k, v, out, lse = saved
    plan = call.plan
    if plan.nodes > 1:
        (dout,) = to_heads((dout,), call)
    gradients = _backward_steps((q, k, v, out, lse, dout), call)
    if plan.nodes > 1:
        gradients = to_rows(gradients, call)
    dq, dk, dv = gradients
    return dq, dk, dv


def _backward_steps(saved: tuple[Any, ...], call: Call) -> list[Any]:
    plan = call.plan
    q, k, v, *_ = saved
    dq, dk, dv = QuerySum(q, plan.launches), Sum(k), Sum(v)
    if plan.gathers:
        keys = put_together(gather(k, v, call).wait(), k, v, plan)
        found = _differentiate(plan.steps[0], keys, saved, call, dq)
        return_gathered(found, k, v, call, dk, dv)
        return [it.finish() for it in (dq, dk, dv)]
    keys, nothing, returning = (k, v), (k[:, :0], v[:, :0]), None
    for step, following in zip(plan.steps, [*plan.steps[1:], None]):
        pending = fetch(following, k, v, call)
        found = _differentiate(step, keys, saved, call, dq)
        if returning is not None:
            add_returned(returning[0], returning[1].wait(), dk, dv)
            returning = None
        if step is plan.steps[0]:
            dk.add(found[0], (0, plan.held))
            dv.add(found[1], (0, plan.held))
        elif step.send or step.receive:
            returning = step, give_back(step, found, k, v, call)
        keys = nothing if pending is None else pending.wait()
    if returning is not None:
        add_returned(returning[0], returning[1].wait(), dk, dv)
    return [it.finish() for it in (dq, dk, dv)]


class Parts:
    """Parts of the output, each with the log-sum-exps of its rows: put together all at once, in float32,
    where there are not too many."""

    def __init__(self, q: Any, v: Any, launches: int) -> None:
        batch, rows, heads, _ = q.shape
        self._slots = min(launches, PARTS)
        self._out = q.new_empty((self._slots, batch, rows, heads, v.shape[-1]))
        self._lse = q.new_full((self._slots, batch, heads, rows), float("-inf"), dtype=torch.float32)
        self._used = 0
        self._sums: tuple[Any, Any] | None = None

    def next(self) -> tuple[Any, Any]:
        """Where the next part goes. What it leaves out has log-sum-exps of minus infinity."""
        if self._used == self._slots:
            self._fold()
            self._lse.fill_(float("-inf"))
        self._used += 1
        return self._out[self._used - 1], self._lse[self._used - 1]

    def _fold(self) -> None:
        part = self._combined("float32")
        self._sums = part if self._sums is None else _flashcore.merge((*self._sums, *part), "dispatcher")
        self._used = 0

    def _combined(self, dtype: str) -> tuple[Any, Any]:
        out, lse = self._out[: self._used], self._lse[: self._used].transpose(2, 3)
        return _flashcore.combine((out, lse, None), dtype, "dispatcher")  # type: ignore[no-any-return]

    def finish(self) -> tuple[Any, Any]:
        """Output and log-sum-exps."""
        if self._slots == 0:
            # No rows.
            shape = self._out.shape[1:]
            return self._out.new_empty(shape), self._lse.new_empty(self._lse.shape[1:])
        if self._slots == 1 and self._sums is None:
            return self._out[0], self._lse[0]
        dtype = self._out.dtype
        if self._sums is None:
            return self._combined(str(dtype).rpartition(".")[2])
        self._fold()
        out, lse = self._sums
        return out.to(dtype), lse


class QuerySum:
    """The gradient of queries: parts are written where they are kept, and summed in float32 all at once."""

    def __init__(self, q: Any, launches: int) -> None:
        self._parts = q.new_empty((min(launches, PARTS), *q.shape))
        self._used, self._sum = 0, Sum(q)

    def next(self, rows: Span | None) -> Any:
        """Where the next part goes that has these rows, or the whole of one that leaves some out; what is
        left out is zero."""
        if self._used == len(self._parts):
            self._fold()
        part = self._parts[self._used]
        self._used += 1
        if rows is None:
            return part.zero_()
        begin, end = rows
        part[:, :begin].zero_()
        part[:, end:].zero_()
        return part[:, begin:end]

    def _fold(self) -> None:
        rows = (0, self._parts.shape[2])
        self._sum.add(self._parts[: self._used].sum(0, dtype=torch.float32), rows)
        self._used = 0

    def finish(self) -> Any:
        if self._sum.empty and self._used == 1:
            return self._parts[0]
        if self._sum.empty and self._used:
            # In float32, and rounded at the end.
            return self._parts[: self._used].sum(0)
        if self._used:
            self._fold()
        return self._sum.finish()


class Sum:
    """A gradient, summed in float32."""

    def __init__(self, of: Any) -> None:
        self._of = of
        self._sum: Any = None

    @property
    def empty(self) -> bool:
        return self._sum is None

    def add(self, part: Any, rows: Span) -> None:
        """Adds to some rows."""
        begin, end = rows
        if self._sum is None:
            if end - begin == self._of.shape[1]:
                # A copy where it has this type already: it may be somebody's buffer.
                self._sum = part.to(torch.float32, copy=True)
                return
            self._sum = torch.zeros_like(self._of, dtype=torch.float32)
        self._sum[:, begin:end].add_(part)

    def finish(self) -> Any:
        return torch.zeros_like(self._of) if self._sum is None else self._sum.to(self._of.dtype)


def _attend(step: Step, q: Any, keys: tuple[Any, Any], call: Call, parts: Parts) -> None:
    """Computes a step's parts of the output."""
    k, v = keys
    for launch in step.launches:
        out, sums = parts.next()
        numbers = call.numbers(launch)
        if launch.single:
            (begin, end), rows = launch.queries[0], slice(*launch.keys[0])
            tensors = (q[:, begin:end], k[:, rows], v[:, rows], *_gradients.NONE, out[:, begin:end])
            _, lse = _flashcore.attend(tensors, numbers, "flash_attn_func", True, "dispatcher")
            sums[:, :, begin:end] = lse
        else:
            *lists, covered = launch.lists(q.device)
            tensors = (q[0], k[0], v[0], *lists, *_gradients.NONE[len(lists) :], out[0])
            _, lse = _flashcore.attend(tensors, numbers, "flash_attn_varlen_func", True, "dispatcher")
            sums[0].copy_(lse.masked_fill_(~covered, float("-inf")))


def _differentiate(
    step: Step, keys: tuple[Any, Any], saved: tuple[Any, ...], call: Call, dq: QuerySum
) -> tuple[Any, Any]:
    """A step's part of the gradient of queries into its place; those of the keys and values. These leave for
    their owner, who sums them in float32, in the element type of the tensors."""
    k, v = keys
    whole = slice(0, k.shape[1])
    dk: Any = None
    dv: Any = None
    # The one that writes all of them first, where there is one.
    for launch in sorted(step.launches, key=lambda it: -count(it.keys)):
        rows = slice(*launch.keys[0]) if launch.single else whole
        part_k, part_v = _differentiate_launch(launch, keys, saved, call, dq)
        if dk is None and rows == whole:
            dk, dv = part_k, part_v
            continue
        if dk is None:
            dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        dk[:, rows] += part_k
        dv[:, rows] += part_v
    return (torch.zeros_like(k), torch.zeros_like(v)) if dk is None else (dk, dv)


def _differentiate_launch(
    launch: Launch, keys: tuple[Any, Any], saved: tuple[Any, ...], call: Call, dq: QuerySum
) -> tuple[Any, Any]:
    """The gradients of a launch's keys and values, and that of its queries into its place. With the output
    and the log-sum-exps of all keys, they are parts of the gradients of all."""
    (k, v), (q, _, _, out, lse, dout) = keys, saved
    numbers = call.numbers(launch)
    if launch.single:
        (begin, end), rows = launch.queries[0], slice(*launch.keys[0])
        q, out, dout, lse = q[:, begin:end], out[:, begin:end], dout[:, begin:end], lse[:, :, begin:end]
        k, v = k[:, rows], v[:, rows]
        into = (dq.next((begin, end)), torch.empty_like(k), torch.empty_like(v), None)
        _gradients.run((q, k, v), numbers, "flash_attn_func", (out, lse, dout), into, call.deterministic)
        return into[1], into[2]
    *lists, _ = launch.lists(q.device)
    # Rows of no sequence are not written.
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    into = (dq.next(None)[0], dk[0], dv[0], None)
    tensors = (q[0], k[0], v[0], *lists, *_gradients.NONE[len(lists) :])
    _gradients.run(tensors, numbers, "flash_attn_varlen_func", (out[0], lse[0], dout[0]), into, call.deterministic)
    return dk, dv
