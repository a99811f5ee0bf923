"""Gradients for PyTorch's autograd: what the forward pass saves, and the backward pass.

A call on ordinary tensors is recorded by :class:`Attention`, which costs the host least. Calls that
PyTorch's dispatcher must see (``torch.compile``, ``torch.export``, subclasses, modes, ``torch.vmap``)
are those of the operators, whose derivative is :func:`differentiate`. Both run :func:`backward`.

In the operators a call is its first tensors (``q, k, v``; ``q, kv, None``; ``qkv, None, None``), eight
numbers, twelve lists, the function's name and whether gradients must be the same bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _flashcore, _transforms
from ._arguments import rows_of_sequences, window

# The operators are named after the package, since a process may have two of it: one may come from a
# hub.
NAMESPACE = __name__.partition(".")[0]
operators: Any = getattr(torch.ops, NAMESPACE)
NUMBERS, LISTS = 8, 12
# The index of sinks among the lists.
SINKS = 8
NONE = (None,) * LISTS
_HEADS_FIRST = "scaled_dot_product_attention"
# The arguments of a plain call beyond scale and causal flag.
PLAIN: tuple[Any, ...] = ((-1, -1, 0, 0.0, None, None), NONE, "flash_attn_func", False)


def parts(q: Any, k: Any, v: Any) -> Any:
    """Returns queries, keys and values as separate tensors; None stands for a tensor packed into
    the one before it."""
    if k is None:
        return q.unbind(-3)
    if v is None:
        return (q, *k.unbind(-3))
    return q, k, v


def nested(numbers: Any) -> tuple[Any, ...]:
    """Returns the scalars as the extension module takes them, with the window as one tuple."""
    scale, causal, left, right, *rest = numbers
    return (scale, causal, (left, right), *rest)


def flat(numbers: Any) -> tuple[Any, ...]:
    """Returns the scalars as the operators take them, with the window as two numbers."""
    scale, causal, window_size, *rest = numbers
    return (scale, causal, *window(window_size), *rest)


def are_ordinary(tensors: Any) -> bool:
    """Returns whether tensors have memory and nothing but autograd has to see the operations on
    them."""
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) is not torch.Tensor or tensor.is_meta or tensor.is_neg():
            return False
    return True


def forward(tensors: tuple[Any, ...], lists: Any, numbers: tuple[Any, ...], function: str, lse: bool) -> Any:
    """Computes attention of tensors in memory; returns the output, or output and log-sum-exps."""
    return _flashcore.attend((*parts(*tensors), *lists), numbers, function, lse, "dispatcher")


def empty_gradients(
    tensors: tuple[Any, ...], separate: tuple[Any, ...], lists: Any, causal: bool, function: str, needed: Any
) -> list[Any]:
    """Allocates gradients of q, k, v and of sinks, zeroed if the kernels do not write all of them.

    The kernels write those too that nobody needs; what these hold elsewhere does not matter.
    """
    q, k, v = separate
    # Not written: rows that belong to no sequence, and keys beyond the last query.
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = lists[:4]
    some = cu_seqlens_q is not None or cu_seqlens_k is not None or seqused_q is not None or seqused_k is not None
    some = some or _hides_keys(q, k, causal, function)
    make = torch.zeros_like if some else torch.empty_like
    of = zip((*tensors, lists[SINKS]), needed)
    return [None if it is None else make(it) if need else torch.empty_like(it) for it, need in of]


def _hides_keys(q: Any, k: Any, causal: bool, function: str) -> bool:
    """Returns whether a causal mask leaves keys beyond the last query, which the kernels skip."""
    return bool(causal and function == _HEADS_FIRST and k.shape[2] > q.shape[2])


def with_gradients(out: Any, lse: Any, dout: Any, dlse: Any) -> tuple[Any, Any, Any, Any]:
    """Returns what :func:`run` takes as ``saved``: output, log-sum-exps and the gradients of both. That of an output
    which is in no loss is zero; that of log-sum-exps stays None, which costs nothing."""
    return out, lse, torch.zeros_like(out) if dout is None else dout, dlse


def backward(
    saved: tuple[Any, Any, Any, Any],
    tensors: tuple[Any, ...],
    lists: Any,
    numbers: tuple[Any, ...],
    function: str,
    deterministic: bool,
    needed: Any,
) -> list[Any]:
    """Computes the gradients of q, k, v, packed as these were given, and of sinks; None for those
    not needed. ``saved`` is as for :func:`run`."""
    if _has_sinks_alone(tensors, lists):
        return _without_keys(saved, tensors, lists, needed)
    separate = parts(*tensors)
    gradients = empty_gradients(tensors, separate, lists, numbers[1], function, needed)
    into = (*parts(*gradients[:3]), gradients[3])
    run((*separate, *lists), numbers, function, saved, into, deterministic)
    return [it if need else None for it, need in zip(gradients, needed)]


def _has_sinks_alone(tensors: tuple[Any, ...], lists: Any) -> bool:
    """Returns whether there are sinks and no keys, for which no kernel is launched."""
    return lists[SINKS] is not None and parts(*tensors)[1].numel() == 0


def _without_keys(saved: tuple[Any, Any, Any, Any], tensors: tuple[Any, ...], lists: Any, needed: Any) -> list[Any]:
    """Gradients where there are no keys. The log-sum-exp of a row is its sink then, and its output is zero."""
    of = zip((*tensors, lists[SINKS]), needed)
    gradients = [None if it is None or not need else torch.zeros_like(it) for it, need in of]
    _, lse, _, dlse = saved
    if needed[3] and dlse is not None:
        # What the log-sum-exps of rows that belong to no sequence hold is not defined.
        row = torch.arange(lse.shape[-1], device=lse.device)
        exists = rows_of_sequences(torch.searchsorted, row, lists[0], lists[2]) & (lse > -torch.inf)
        rows = torch.where(exists, dlse, 0.0)
        gradients[3] = rows.sum([at for at in range(rows.dim()) if at != rows.dim() - 2])
    return gradients


def run(
    tensors: tuple[Any, ...],
    numbers: tuple[Any, ...],
    function: str,
    saved: tuple[Any, Any, Any, Any],
    gradients: tuple[Any, ...],
    deterministic: bool,
) -> None:
    """Writes the gradients; they are zero if q, k or v is empty. ``saved`` is what :func:`with_gradients` returns."""
    if not _flashcore.attend_backward(tensors, numbers, function, saved, gradients, deterministic):
        for gradient in gradients:
            if gradient is not None:
                gradient.zero_()


class Attention(torch.autograd.Function):  # type: ignore[misc]
    """Attention recorded by autograd: returns the output, and if asked the log-sum-exps.

    Every line here is paid for at each step. A plain call, three tensors and no lists, has lines of its
    own.
    """

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, slopes: Any, sinks: Any, call: tuple[Any, ...]) -> Any:
        lists, numbers, function, _, with_lse = call
        if lists is None:
            tensors = (q, k, v) if v is not None else parts(q, k, v)
            out, lse = _flashcore.attend(tensors, numbers, function, True, "dispatcher")
            ctx.save_for_backward(q, k, v, out, lse)
        else:
            lists = (*lists, slopes, sinks)
            out, lse = forward((q, k, v), lists, numbers, function, True)
            # Saving a tensor costs time, and so does saving None.
            ctx.save_for_backward(q, k, v, out, lse, *lists)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return (out, lse) if with_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any = None) -> Any:
        q_needed, k_needed, v_needed, _, sinks_needed, _ = ctx.needs_input_grad
        if dout is None and dlse is None:
            return NONE[:6]
        _, numbers, function, deterministic, _ = ctx.call
        # If the backward pass is itself recorded, the operator is called, which refuses second
        # derivatives.
        direct = not torch.is_grad_enabled() and are_ordinary((dout, dlse))
        needed = (q_needed, k_needed, v_needed, sinks_needed)
        if not any(needed):
            return NONE[:6]
        q, k, v, out, lse, *lists = ctx.saved_tensors
        saved = with_gradients(out, lse, dout, dlse)
        plain = direct and not lists and q_needed and k_needed and v_needed and v is not None
        if plain and not _hides_keys(q, k, numbers[1], function):
            tensors = (q, k, v)
            into = (*_flashcore.empty_like(tensors), None)
            run(tensors, numbers, function, saved, into, deterministic)
            return (*into, None, None)
        lists = lists or NONE
        if direct:
            dq, dk, dv, ds = backward(saved, (q, k, v), lists, numbers, function, deterministic, needed)
        else:
            call = (*flat(numbers), *lists, *NONE[len(lists) :], function, deterministic)
            dq, dk, dv, ds = _by_operator(saved, (q, k, v), call, needed)
        return dq, dk, dv, None, ds, None


class Undifferentiable(torch.autograd.Function):  # type: ignore[misc]
    """Attention over tensors that require grad but have no gradients (8-bit tensors, keys in
    pages): the output is computed, and the backward pass raises an error."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], q: Any, k: Any, v: Any, reason: str) -> Any:
        lists, numbers, function, lse = call
        ctx.reason = reason
        result = forward((q, k, v), lists, numbers, function, lse)
        if lse:
            ctx.mark_non_differentiable(result[1])
        return result

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(ctx.reason)


# PyTorch's own `apply` first searches the arguments in Python for what :func:`unwrap` handles.
record: Any = super(torch.autograd.Function, Attention).apply
# Returns the inner tensor of one that has left a `torch.func` transform.
unwrap: Any = torch._C._functorch.unwrap_if_dead


def _by_operator(saved: tuple[Any, Any, Any, Any], tensors: Any, call: tuple[Any, ...], needed: Any) -> list[Any]:
    """Computes gradients by the operator ``attention_backward``; None for those not needed."""
    lists = call[NUMBERS : NUMBERS + LISTS]
    if _has_sinks_alone(tensors, lists):
        return _without_keys(saved, tensors, lists, needed)
    out, lse, dout, dlse = saved
    backward = operators.attention_backward.default
    found = iter(_transforms.call(backward, dout, *tensors, out, lse, dlse, *call, list(needed)))
    return [next(found) if need else None for need in needed]


def run_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, *others: Any) -> list[Any]:
    """Implements the operator ``attention_backward``: returns the needed gradients."""
    numbers, lists = nested(others[:NUMBERS]), others[NUMBERS : NUMBERS + LISTS]
    function, deterministic, needed = others[NUMBERS + LISTS :]
    saved = (out, lse, dout, dlse)
    found = backward(saved, (q, k, v), lists, numbers, function, deterministic, needed)
    return _chosen(found, needed)


def fake_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, *others: Any) -> list[Any]:
    """Implements ``attention_backward`` for tensors without memory."""
    lists = others[NUMBERS : NUMBERS + LISTS]
    function, _, needed = others[NUMBERS + LISTS :]
    tensors = (q, k, v)
    gradients = empty_gradients(tensors, parts(*tensors), lists, others[1], function, needed)
    return _chosen(gradients, needed)


def _chosen(gradients: list[Any], needed: list[bool]) -> list[Any]:
    return [gradient for gradient, need in zip(gradients, needed) if need]


def remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Saves what the derivative of an operator needs."""
    q, k, v, *others = inputs
    if len(others) == 2:
        numbers, lists, *rest = PLAIN
        others = [*others, *numbers, *lists, *rest]
    ctx.numbers, ctx.rest = others[:NUMBERS], others[NUMBERS + LISTS :]
    lists = others[NUMBERS : NUMBERS + LISTS]
    out, lse = output if isinstance(output, tuple) else (output, None)
    ctx.save_for_backward(q, k, v, out, lse, *lists)
    ctx.set_materialize_grads(False)


def differentiate(ctx: Any, dout: Any, dlse: Any = None) -> Any:
    """Differentiates the operators by the operator ``attention_backward``."""
    needs = ctx.needs_input_grad
    answer = [None] * len(needs)
    sinks = 3 + NUMBERS + SINKS
    needed = [*needs[:3], len(needs) > sinks and needs[sinks]]
    if (dout is None and dlse is None) or not any(needed):
        return tuple(answer)
    q, k, v, out, lse, *lists = ctx.saved_tensors
    call = (*ctx.numbers, *lists, *ctx.rest)
    if lse is None:
        # The operator without log-sum-exps was called, so none were saved.
        _, lse = _transforms.call(operators.attention_with_lse.all, q, k, v, *call)
    saved = with_gradients(out, lse, dout, dlse)
    gradients = _by_operator(saved, (q, k, v), call, needed)
    answer[:3] = gradients[:3]
    if len(needs) > sinks:
        answer[sinks] = gradients[3]
    return tuple(answer)


def refuse_second(ctx: Any, *_: Any) -> Any:
    """Refuses second derivatives."""
    raise NotImplementedError(
        "FlashCore has no second derivatives: the gradients of attention cannot be differentiated; "
        "leave out create_graph=True, or use PyTorch's attention with SDPBackend.MATH there"
    )
