"""Gradients for PyTorch's autograd: what is saved, the backward pass, and who calls it.

A call on ordinary tensors is recorded by :class:`Attention`, which costs the host least. Calls that
PyTorch's dispatcher must see (``torch.compile``, ``torch.export``, subclasses, modes, ``torch.vmap``)
are those of the operators, whose derivative is :func:`differentiate`. Both run :func:`backward`.

In the operators a call is its first tensors (``q, k, v``; ``q, kv, None``; ``qkv, None, None``), eight
numbers, twelve lists, the function's name and whether gradients must be the same bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _flashcore
from ._arguments import window

NUMBERS, LISTS = 8, 12
# Where sinks are among the lists.
SINKS = 8
NONE = (None,) * LISTS
# What a plain call has beyond scale and causal mask.
PLAIN: tuple[Any, ...] = ((-1, -1, 0, 0.0, None, None), NONE, "flash_attn_func", False)


def parts(q: Any, k: Any, v: Any) -> Any:
    """Queries, keys and values: the last ones are packed into the one before where they are None."""
    if k is None:
        return q.unbind(2)
    if v is None:
        return (q, *k.unbind(2))
    return q, k, v


def nested(numbers: Any) -> tuple[Any, ...]:
    """Numbers as the extension takes them, with the window as one."""
    scale, causal, left, right, *rest = numbers
    return (scale, causal, (left, right), *rest)


def flat(numbers: Any) -> tuple[Any, ...]:
    """Numbers as the operators take them."""
    scale, causal, window_size, *rest = numbers
    return (scale, causal, *window(window_size), *rest)


def are_ordinary(tensors: Any) -> bool:
    """Whether tensors are in memory, and nobody has to see what is done with them but autograd."""
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    for tensor in tensors:
        if tensor is not None and (type(tensor) is not torch.Tensor or tensor.is_meta):
            return False
    return True


def forward(tensors: tuple[Any, ...], lists: Any, numbers: tuple[Any, ...], function: str, lse: bool) -> Any:
    """The output, or output and log-sum-exps, of tensors that are in memory."""
    return _flashcore.attend((*parts(*tensors), *lists), numbers, function, lse, "dispatcher")


def empty_gradients(
    tensors: tuple[Any, ...], separate: tuple[Any, ...], lists: Any, causal: bool, function: str, needed: Any
) -> list[Any]:
    """Memory for the gradients of the first tensors and of sinks: zeros where not all is written.

    The kernels write those too that nobody needs; what these hold elsewhere does not matter.
    """
    q, k, v = separate
    # Rows of no sequence; keys behind the last query's; rows that meet nothing.
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = lists[:4]
    some = cu_seqlens_q is not None or cu_seqlens_k is not None or seqused_q is not None or seqused_k is not None
    some = some or (function == "scaled_dot_product_attention" and causal and k.shape[2] > q.shape[2])
    make = torch.zeros_like if some or _nothing(q, k, v) else torch.empty_like
    of = zip((*tensors, lists[SINKS]), needed)
    return [None if it is None else make(it) if need else torch.empty_like(it) for it, need in of]


def _nothing(q: Any, k: Any, v: Any) -> bool:
    return bool(q.numel() == 0 or k.numel() == 0 or v.numel() == 0)


def backward(
    dout: Any,
    tensors: tuple[Any, ...],
    out: Any,
    lse: Any,
    lists: Any,
    numbers: tuple[Any, ...],
    function: str,
    deterministic: bool,
    needed: Any,
) -> list[Any]:
    """The gradients of the first tensors, as they were given, and of sinks; None for what nobody needs."""
    separate = parts(*tensors)
    gradients = empty_gradients(tensors, separate, lists, numbers[1], function, needed)
    if not _nothing(*separate):
        _flashcore.attend_backward(
            (*separate, *lists),
            numbers,
            function,
            (out, lse, dout),
            (*parts(*gradients[:3]), gradients[3]),
            deterministic,
        )
    return [it if need else None for it, need in zip(gradients, needed)]


class Attention(torch.autograd.Function):  # type: ignore[misc]
    """Attention that autograd records: the output, with log-sum-exps if asked, which have no gradient."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, slopes: Any, sinks: Any, call: tuple[Any, ...]) -> Any:
        lists, numbers, function, deterministic, with_lse = call
        # Each tensor that is saved costs time, and each that is not there as much.
        lists = NONE if lists is None else (*lists, slopes, sinks)
        out, lse = forward((q, k, v), lists, numbers, function, True)
        ctx.save_for_backward(q, k, v, out, lse, *(() if lists is NONE else lists))
        ctx.call = numbers, function, deterministic
        ctx.set_materialize_grads(False)
        if not with_lse:
            return out
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, *_: Any) -> Any:
        needs = ctx.needs_input_grad
        needed = (needs[0], needs[1], needs[2], needs[4])
        if dout is None or not any(needed):
            return (None,) * 6
        q, k, v, out, lse, *lists = ctx.saved_tensors
        lists = lists or NONE
        numbers, function, deterministic = ctx.call
        # Where somebody may want to differentiate this, the operator says what it thinks of that.
        if torch.is_grad_enabled() or not are_ordinary((dout,)):
            call = (*flat(numbers), *lists, *NONE[len(lists) :], function, deterministic)
            dq, dk, dv, ds = _by_operator(dout, (q, k, v, out, lse), call, needed)
        else:
            found = backward(dout, (q, k, v), out, lse, lists, numbers, function, deterministic, needed)
            dq, dk, dv, ds = found
        return dq, dk, dv, None, ds, None


def _by_operator(dout: Any, saved: tuple[Any, ...], call: tuple[Any, ...], needed: Any) -> list[Any]:
    """The gradients that are needed, None for the others, by the operator."""
    found = iter(torch.ops.flashcore.attention_backward(dout, *saved, *call, list(needed)))
    return [next(found) if need else None for need in needed]


def run_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *others: Any) -> list[Any]:
    """The operator ``attention_backward``: the gradients that are needed."""
    numbers, lists = nested(others[:NUMBERS]), others[NUMBERS : NUMBERS + LISTS]
    function, deterministic, needed = others[NUMBERS + LISTS :]
    found = backward(dout, (q, k, v), out, lse, lists, numbers, function, deterministic, needed)
    return _chosen(found, needed)


def fake_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *others: Any) -> list[Any]:
    """The same of tensors that have no memory."""
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
    if lse is not None:
        ctx.mark_non_differentiable(lse)


def differentiate(ctx: Any, dout: Any, *_: Any) -> Any:
    """The derivative of the operators, by the operator ``attention_backward``."""
    needs = ctx.needs_input_grad
    answer = [None] * len(needs)
    sinks = 3 + NUMBERS + SINKS
    needed = [*needs[:3], len(needs) > sinks and needs[sinks]]
    if dout is None or not any(needed):
        return tuple(answer)
    q, k, v, out, lse, *lists = ctx.saved_tensors
    call = (*ctx.numbers, *lists, *ctx.rest)
    if lse is None:
        # The operator without log-sum-exps was called, which saved none.
        _, lse = torch.ops.flashcore.attention_with_lse.all(q, k, v, *call)
    gradients = _by_operator(dout, (q, k, v, out, lse), call, needed)
    answer[:3] = gradients[:3]
    if len(needs) > sinks:
        answer[sinks] = gradients[3]
    return tuple(answer)


def refuse_second(ctx: Any, *_: Any) -> Any:
    """The derivative of ``attention_backward``: there is none."""
    raise NotImplementedError(
        "FlashCore has no second derivatives: the gradients of attention cannot be differentiated; "
        "leave out create_graph=True, or use PyTorch's attention with SDPBackend.MATH there"
    )


def vectorize(operator: Any, batches: int) -> Any:
    """The rule for ``torch.vmap`` of an operator whose first tensors, so many, have batch entries."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        size = info.batch_size
        tensors, others = arguments[:batches], arguments[batches:]
        alone = [isinstance(other, torch.Tensor) for other in others]
        if not any(alone):
            # One more dimension of the batch.
            folded = (_fold(it, at, size) for it, at in zip(tensors, in_dims))
            result = operator(*folded, *others)
            return _each(result, lambda it: it.unflatten(0, (size, it.shape[0] // size)))
        results = []
        for index in range(size):
            one = (it if at is None else it.select(at, index) for it, at in zip(arguments, in_dims))
            results.append(operator(*one))
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        return _each([torch.stack(same) for same in zip(*results)], lambda it: it)

    return rule


def _fold(tensor: Any, at: int | None, size: int) -> Any:
    if tensor is None:
        return None
    tensor = tensor.unsqueeze(0).expand(size, *tensor.shape) if at is None else tensor.movedim(at, 0)
    return tensor.flatten(0, 1)


def _each(result: Any, change: Any) -> Any:
    """A result of a rule, and where its new dimensions are."""
    if isinstance(result, torch.Tensor):
        return change(result), 0
    changed = [change(it) for it in result]
    dimensions = [0] * len(changed)
    return (changed, dimensions) if isinstance(result, list) else (tuple(changed), tuple(dimensions))
