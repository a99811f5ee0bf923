"""Our operators under ``torch.func``: rules of ``vmap``, and derivatives that its transforms can take.

PyTorch registers a derivative of an operator for autograd alone: under ``torch.func.grad`` and its kin the operator is
refused. There it is called by an autograd function of its own, which has the same derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Rule = Callable[..., Any]

are_active = torch._C._are_functorch_transforms_active
_functions: dict[Any, Any] = {}


def register(operator: Any, rule: Callable[[Any], Rule], remember: Rule | None, differentiate: Rule, library: Any) -> None:
    """Registers what transforms need of an operator: its derivative, of which ``remember`` saves what it needs, and its
    rule of ``vmap``, which is made for what is to be called in the operator's place."""
    torch.library.register_autograd(operator, differentiate, setup_context=remember, lib=library)
    torch.library.register_vmap(operator, rule(operator), lib=library)

    class Transformed(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(*arguments: Any) -> Any:
            result = operator(*arguments)
            return tuple(result) if isinstance(result, list) else result

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            if remember is not None:
                remember(ctx, inputs, output)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
            result, out_dims = rule(Transformed.apply)(info, in_dims, *arguments)
            return (tuple(result), tuple(out_dims)) if isinstance(result, list) else (result, out_dims)

        backward = staticmethod(differentiate)

    _functions[operator] = Transformed


def call(operator: Any, *arguments: Any) -> Any:
    """Calls an operator, in a form that the transforms that are active can differentiate."""
    return (_functions[operator].apply if are_active() else operator)(*arguments)
