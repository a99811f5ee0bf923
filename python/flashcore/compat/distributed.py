"""FlashAttention-2's module ``flash_attn.utils.distributed``: collectives that autograd records."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import all_gather_into_tensor, get_world_size, reduce_scatter_tensor

__all__ = ["all_gather", "all_gather_raw", "reduce_scatter", "reduce_scatter_raw"]


def all_gather_raw(input_: Any, process_group: Any, async_op: bool = False) -> Any:
    """Joins the tensors of all ranks along the first dimension, without gradients.

    Args:
        input_: (n, ...), of the same shape on every rank.
        process_group: The ranks.
        async_op: Whether to return before the result is there.

    Returns:
        ``(output, handle)``: (ranks * n, ...), and what to wait for with ``async_op``, otherwise None.
    """
    output = input_.new_empty(get_world_size(process_group) * input_.shape[0], *input_.shape[1:])
    return output, all_gather_into_tensor(output, input_.contiguous(), group=process_group, async_op=async_op)


def reduce_scatter_raw(input_: Any, process_group: Any, async_op: bool = False) -> Any:
    """Adds the tensors of all ranks, of which each rank receives its part, without gradients.

    Args:
        input_: (ranks * n, ...), of the same shape on every rank.
        process_group, async_op: As in :func:`all_gather_raw`.

    Returns:
        ``(output, handle)``: (n, ...), and what to wait for with ``async_op``, otherwise None.

    Raises:
        ValueError: If the first dimension is no multiple of the number of ranks.
    """
    ranks = get_world_size(process_group)
    if input_.shape[0] % ranks != 0:
        raise ValueError(f"input_ has {input_.shape[0]} rows, expected a multiple of the {ranks} ranks")
    output = input_.new_empty(input_.shape[0] // ranks, *input_.shape[1:])
    return output, reduce_scatter_tensor(output, input_.contiguous(), group=process_group, async_op=async_op)


class _AllGather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, input_: Any, process_group: Any) -> Any:
        ctx.process_group = process_group
        return all_gather_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return reduce_scatter(gradient, ctx.process_group), None


class _ReduceScatter(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, input_: Any, process_group: Any) -> Any:
        ctx.process_group = process_group
        return reduce_scatter_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return all_gather(gradient, ctx.process_group), None


def all_gather(input_: Any, process_group: Any) -> Any:
    """Joins the tensors of all ranks along the first dimension; each rank receives the sum of the gradients of its own.

    Args:
        input_, process_group: As in :func:`all_gather_raw`.

    Returns:
        (ranks * n, ...).
    """
    return _AllGather.apply(input_, process_group)


def reduce_scatter(input_: Any, process_group: Any) -> Any:
    """Adds the tensors of all ranks, of which each rank receives its part; gradients of the parts are joined.

    Args:
        input_, process_group: As in :func:`reduce_scatter_raw`.

    Returns:
        (n, ...).

    Raises:
        ValueError: As :func:`reduce_scatter_raw`.
    """
    return _ReduceScatter.apply(input_, process_group)
