"""Our operators under ``torch.func``: the rule of ``vmap``, and derivatives that its transforms can take.

What PyTorch registers as the derivative of an operator serves autograd alone: ``torch.func.grad`` and its kin refuse
such an operator. Under them, an autograd function is called in its place, which has the same derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

NO_FORWARD_MODE = (
    "FlashCore has no forward-mode derivatives (torch.func.jvp, torch.autograd.forward_ad); use torch.autograd.grad, or "
    "PyTorch's attention with SDPBackend.MATH"
)
_functions: dict[Any, Any] = {}


def are_active() -> bool:
    """Returns whether transforms see what is called. Those that PyTorch's compiler traces do not see it now."""
    return not torch.compiler.is_dynamo_compiling() and bool(torch._C._are_functorch_transforms_active())


def register(
    operator: Any, differentiate: Callable[..., Any], remember: Callable[..., None] | None, batches: int, library: Any
) -> None:
    """Registers the derivative of an operator, for which ``remember`` saves what it needs, and its rule of ``vmap``: of
    the first ``batches`` tensors each has a batch dimension, into which another can be folded."""

    class Transformed(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(*arguments: Any) -> Any:
            result = operator(*arguments)
            return result if isinstance(result, torch.Tensor) else tuple(result)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            if remember is not None:
                remember(ctx, inputs, output)

        @staticmethod
        def vmap(*arguments: Any) -> Any:
            return _vectorized(Transformed.apply, batches, *arguments)

        @staticmethod
        def jvp(*_: Any) -> Any:
            raise NotImplementedError(NO_FORWARD_MODE)

        backward = staticmethod(differentiate)

    _functions[operator] = Transformed
    torch.library.register_autograd(operator, differentiate, setup_context=remember, lib=library)
    torch.library.register_vmap(operator, functools.partial(_vectorized, operator, batches), lib=library)


def call(operator: Any, *arguments: Any) -> Any:
    """Calls an operator, in a form that the active transforms can differentiate."""
    if is_differentiating(arguments):
        return _functions[operator].apply(*arguments)
    return operator(*arguments)


def is_differentiating(tensors: Any) -> bool:
    """Returns whether a transform differentiates one of these tensors."""
    return are_active() and any(map(_is_differentiated, tensors))


def requires_grad(tensor: Any) -> bool:
    """Returns whether a tensor requires grad, of autograd or of a transform."""
    return any(level.requires_grad for level in _levels(tensor))


def _is_differentiated(tensor: Any) -> bool:
    """Returns whether a transform differentiates a tensor."""
    return any(map(torch._C._functorch.is_gradtrackingtensor, _levels(tensor)))


def _levels(tensor: Any) -> Iterator[Any]:
    """Yields a tensor as each of the transforms has wrapped it."""
    while isinstance(tensor, torch.Tensor):
        yield tensor
        if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            break
        tensor = torch._C._functorch.get_unwrapped(tensor)


def _vectorized(call: Callable[..., Any], batches: int, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    """Calls an operator for tensors with a mapped dimension: once if only the first ``batches`` arguments are tensors,
    otherwise for one entry after the other."""
    size = info.batch_size
    tensors, others = arguments[:batches], arguments[batches:]
    if batches and not any(isinstance(other, torch.Tensor) for other in others):
        result = call(*(_fold(it, at, size) for it, at in zip(tensors, in_dims)), *others)
        if isinstance(result, torch.Tensor):
            return _separate(result, size), 0
        return _mapped(_separate(it, size) for it in result)
    results = [call(*(_chosen(it, at, index) for it, at in zip(arguments, in_dims))) for index in range(size)]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results), 0
    return _mapped(torch.stack(same) for same in zip(*results))


def _fold(tensor: Any, at: int | None, size: int) -> Any:
    if tensor is None:
        return None
    tensor = tensor.unsqueeze(0).expand(size, *tensor.shape) if at is None else tensor.movedim(at, 0)
    return tensor.flatten(0, 1)


def _separate(tensor: Any, size: int) -> Any:
    return tensor.unflatten(0, (size, tensor.shape[0] // size))


def _chosen(argument: Any, at: Any, index: int) -> Any:
    """Returns an argument of one entry; tensors in a list each have a mapped dimension or none."""
    if isinstance(argument, (list, tuple)):
        return [_chosen(it, where, index) for it, where in zip(argument, at or [None] * len(argument))]
    return argument if at is None else argument.select(at, index)


def _mapped(results: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Returns results with the mapped dimension first, and where it is."""
    results = tuple(results)
    return results, (0,) * len(results)
