"""Attention over a spread sequence, forward and backward, and what autograd records of it.

Tensors are (batch, rows, heads, dim) throughout; sequences of unequal lengths are one batch entry.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import _flashcore, _gradients
from ._heads import to_heads, to_rows
from ._messages import fetch, gather, give_back, put_together, return_gathered
from ._plan import Launch, Plan, Span, Step, count

# Parts of the output, and of the gradient of queries, that are kept until they are put together.
PARTS = 16
# Those of the gradients of keys and of values, of which there are two.
KEY_PARTS = 8


class Call(NamedTuple):
    """The arguments of a call besides its tensors."""

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
    """The output, and if asked its log-sum-exps. Both have gradients."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, call: Call) -> Any:
        out, lse, saved = forward(q, k, v, call)
        ctx.save_for_backward(*saved)
        ctx.call, ctx.shape = call, out.shape
        ctx.set_materialize_grads(False)
        return (out, lse) if call.lse else out

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: Any, dlse: Any = None) -> Any:
        if dout is None:
            # Others have a gradient, and wait for this rank's part.
            dout = ctx.saved_tensors[0].new_zeros(ctx.shape)
        return (*backward(dout, dlse, ctx.saved_tensors, ctx.call), None)


def forward(q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any, tuple[Any, ...]]:
    """Computes output and log-sum-exps of the rank's rows, and returns what the backward pass
    needs."""
    q, k, v = (_in_memory(it) for it in (q, k, v))
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


def _in_memory(tensor: Any) -> Any:
    """Returns a tensor whose values are those of its memory, which is what is sent, and what kernels read: PyTorch
    may keep them negated (``torch._neg_view``), or keep no zeros at all."""
    return tensor.clone() if tensor._is_zerotensor() else tensor.resolve_neg()


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


def backward(dout: Any, dlse: Any, saved: tuple[Any, ...], call: Call) -> tuple[Any, Any, Any]:
    """Computes the gradients of the rank's queries, keys and values from those of its output and, unless it is None,
    of its log-sum-exps."""
    q, k, v, out, lse = saved
    dout, dlse, plan = _in_memory(dout), None if dlse is None else _in_memory(dlse), call.plan
    if plan.nodes > 1:
        if call.lse:
            # Others wait for this rank's part of these too.
            rows = dout.new_zeros(dout.shape[:3], dtype=torch.float32) if dlse is None else dlse.transpose(1, 2)
            (rows,) = to_heads((rows.unsqueeze(-1),), call)
            dlse = rows.squeeze(-1).transpose(1, 2)
        (dout,) = to_heads((dout,), call)
    gradients = _backward_steps((q, k, v, out, lse, dout, dlse), call)
    if plan.nodes > 1:
        gradients = to_rows(gradients, call)
    dq, dk, dv = gradients
    return dq, dk, dv


def _backward_steps(saved: tuple[Any, ...], call: Call) -> list[Any]:
    plan = call.plan
    q, k, v, *_ = saved
    # An all-gather's come all at once.
    parts = plan.gradients if plan.gathers else min(plan.gradients, KEY_PARTS)
    dq, dk, dv = Sum(q, min(plan.launches, PARTS)), Sum(k, parts), Sum(v, parts)
    if plan.gathers:
        keys = put_together(gather(k, v, call).wait(), k, v, plan)
        found = _like(keys)
        _differentiate(plan.steps[0], keys, saved, call, dq, found)
        return_gathered(found, (dk, dv), call)
        return [it.finish() for it in (dq, dk, dv)]
    keys, nothing, returning = (k, v), (k[:, :0], v[:, :0]), None
    for step, following in zip(plan.steps, [*plan.steps[1:], None]):
        pending = fetch(following, k, v, call)
        own = step is plan.steps[0]
        found = (dk.whole(), dv.whole()) if own else _like(keys)
        _differentiate(step, keys, saved, call, dq, found)
        if returning is not None:
            returning.wait()
            returning = None
        if not own and (step.send or step.receive):
            returning = give_back(step, found, (dk, dv), call)
        keys = nothing if pending is None else pending.wait()
    if returning is not None:
        returning.wait()
    return [it.finish() for it in (dq, dk, dv)]


def _like(tensors: tuple[Any, Any]) -> tuple[Any, Any]:
    first, second = tensors
    return torch.empty_like(first), torch.empty_like(second)


class Parts:
    """Partial outputs with the log-sum-exps of their rows, combined in float32: all at once if
    there are not too many."""

    def __init__(self, q: Any, v: Any, launches: int) -> None:
        batch, rows, heads, _ = q.shape
        self._slots = min(launches, PARTS)
        self._out = q.new_empty((self._slots, batch, rows, heads, v.shape[-1]))
        self._lse = q.new_full((self._slots, batch, heads, rows), float("-inf"), dtype=torch.float32)
        self._used = 0
        self._sums: tuple[Any, Any] | None = None

    def next(self) -> tuple[Any, Any]:
        """Returns the memory of the next part. Rows that it leaves out have log-sum-exps of minus
        infinity."""
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
        """Returns the combined output and log-sum-exps."""
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


class Sum:
    """A gradient whose parts are kept and summed in float32, all at once if there are not too many.
    PyTorch adds 16 bits to 32 at half of the memory's speed, and would write the sum for every
    part."""

    def __init__(self, of: Any, parts: int) -> None:
        self._parts = of.new_empty((parts, *of.shape))
        self._used = 0
        self._sum: Any = None

    def whole(self) -> Any:
        """Returns the memory of the next part. The parts before it must have been written."""
        if self._used == len(self._parts):
            self._fold()
        self._used += 1
        return self._parts[self._used - 1]

    def rows(self, spans: list[Span]) -> list[Any]:
        """Returns the memory of these rows of the next part; its other rows are zero."""
        part, at = self.whole(), 0
        for begin, end in spans:
            part[:, at:begin].zero_()
            at = end
        part[:, at:].zero_()
        return [part[:, begin:end] for begin, end in spans]

    def _fold(self) -> None:
        part = self._parts[: self._used].sum(0, dtype=torch.float32)
        self._sum = part if self._sum is None else self._sum.add_(part)
        self._used = 0

    def finish(self) -> Any:
        if self._sum is None and self._used == 1:
            return self._parts[0]
        if self._sum is None:
            # In float32, and rounded at the end.
            return self._parts[: self._used].sum(0)
        if self._used:
            self._fold()
        return self._sum.to(self._parts.dtype)


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
    step: Step, keys: tuple[Any, Any], saved: tuple[Any, ...], call: Call, dq: Sum, into: tuple[Any, Any]
) -> None:
    """Computes a step's part of dQ, and its parts of dK and dV. The latter are sent to their owner
    in the element type of the tensors; the owner sums them in float32."""
    # The one with the most of them first: it writes its rows, the others add to them.
    launches = sorted(step.launches, key=lambda it: -count(it.keys))
    covered = slice(*launches[0].keys[0]) if launches and launches[0].single else slice(0, None)
    written = into[0][:, covered], into[1][:, covered]
    for it, part in zip(into, written):
        if not launches:
            it.zero_()
        elif part.shape != it.shape:
            it[:, : covered.start].zero_()
            it[:, covered.stop :].zero_()
    for launch in launches:
        rows = slice(*launch.keys[0]) if launch.single else slice(0, None)
        some = keys[0][:, rows], keys[1][:, rows]
        if launch is launches[0]:
            _differentiate_launch(launch, some, saved, call, dq, written)
            continue
        parts = _like(some)
        _differentiate_launch(launch, some, saved, call, dq, parts)
        for gradient, part in zip(into, parts):
            gradient[:, rows].add_(part)


def _clear(tensors: tuple[Any, ...]) -> None:
    for it in tensors:
        it.zero_()


def _differentiate_launch(
    launch: Launch, keys: tuple[Any, Any], saved: tuple[Any, ...], call: Call, dq: Sum, into: tuple[Any, Any]
) -> None:
    """Computes the gradients of a launch's keys, values and queries into the given memory. With the
    output and the log-sum-exps over all keys, they are parts of the whole gradients."""
    (k, v), (dk, dv), (q, _, _, out, lse, dout, dlse) = keys, into, saved
    numbers = call.numbers(launch)
    if launch.single:
        begin, end = launch.queries[0]
        q, out, dout, lse = q[:, begin:end], out[:, begin:end], dout[:, begin:end], lse[:, :, begin:end]
        dlse = None if dlse is None else dlse[:, :, begin:end]
        (part,) = dq.rows([(begin, end)])
        gradients = (part, dk, dv, None)
        _gradients.run((q, k, v), numbers, "flash_attn_func", (out, lse, dout, dlse), gradients, call.deterministic)
        return
    *lists, _ = launch.lists(q.device)
    # Rows of no sequence are not written.
    part = dq.whole()
    _clear((part, dk, dv))
    gradients = (part[0], dk[0], dv[0], None)
    tensors = (q[0], k[0], v[0], *lists, *_gradients.NONE[len(lists) :])
    saved = (out[0], lse[0], dout[0], None if dlse is None else dlse[0])
    _gradients.run(tensors, numbers, "flash_attn_varlen_func", saved, gradients, call.deterministic)
