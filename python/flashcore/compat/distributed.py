"""FlashAttention-2's module ``flash_attn.utils.distributed``: collectives that autograd records."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "all_gather",
    "all_gather_raw",
    "all_reduce",
    "all_reduce_raw",
    "allreduce_sequence_parallel_grad",
    "get_dim_for_local_rank",
    "reduce_scatter",
    "reduce_scatter_raw",
    "sync_shared_params",
]


def all_gather_raw(input_: Any, process_group: Any, async_op: bool = False) -> Any:
    """Joins the tensors of all ranks along the first dimension, without gradients.

    Args:
        input_: (n, ...), of the same shape on every rank.
        process_group: The ranks.
        async_op: Whether to return before the result is there.

    Returns:
        ``(output, handle)``: (ranks * n, ...), and what to wait for with ``async_op``, otherwise None.
    """
    output = input_.new_empty(dist.get_world_size(process_group) * input_.shape[0], *input_.shape[1:])
    return output, dist.all_gather_into_tensor(output, input_.contiguous(), group=process_group, async_op=async_op)


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
    ranks = dist.get_world_size(process_group)
    if input_.shape[0] % ranks != 0:
        raise ValueError(f"input_ has {input_.shape[0]} rows, expected a multiple of the {ranks} ranks")
    output = input_.new_empty(input_.shape[0] // ranks, *input_.shape[1:])
    return output, dist.reduce_scatter_tensor(output, input_.contiguous(), group=process_group, async_op=async_op)


def all_reduce_raw(input_: Any, process_group: Any, async_op: bool = False) -> Any:
    """Adds the tensors of all ranks, without gradients.

    Args:
        input_: A tensor of the same shape on every rank; the sum is written into it if it is contiguous.
        process_group, async_op: As in :func:`all_gather_raw`.

    Returns:
        ``(output, handle)``: the sum, and what to wait for with ``async_op``, otherwise None.
    """
    output = input_.contiguous()
    return output, dist.all_reduce(output, group=process_group, async_op=async_op)


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


class _AllReduce(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, input_: Any, process_group: Any) -> Any:
        return all_reduce_raw(input_.clone(), process_group)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, None


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


def all_reduce(input_: Any, process_group: Any) -> Any:
    """Adds the tensors of all ranks; the gradient of the sum is that of each of them.

    Args:
        input_: A tensor of the same shape on every rank.
        process_group: The ranks.

    Returns:
        A tensor with the shape of ``input_``.
    """
    return _AllReduce.apply(input_, process_group)


def sync_shared_params(model: Any, process_group: Any) -> None:
    """Gives the parameters of a model that have a true ``_shared_params`` the values of the group's first rank.

    Args:
        model: A module; the names of these parameters are the same on every rank.
        process_group: The ranks.
    """
    first = dist.get_global_rank(process_group, 0)
    for parameter in _marked(model, "_shared_params"):
        dist.broadcast(parameter.detach(), src=first, group=process_group)


def allreduce_sequence_parallel_grad(model: Any, process_group: Any) -> None:
    """Adds, over all ranks, the gradients of the parameters of a model that have a true ``_sequence_parallel``.

    Args:
        model: A module; the names of these parameters are the same on every rank, and all have gradients.
        process_group: The ranks.
    """
    gradients = [parameter.grad for parameter in _marked(model, "_sequence_parallel")]
    if not gradients:
        return
    # One message for all of them.
    total, _ = all_reduce_raw(torch.cat([it.flatten() for it in gradients]), process_group)
    for gradient, part in zip(gradients, total.split([it.numel() for it in gradients])):
        gradient.copy_(part.view_as(gradient))


def _marked(model: Any, attribute: str) -> list[Any]:
    """Returns the parameters with an attribute that is true, in the order of their names."""
    named = sorted(model.named_parameters(), key=lambda it: it[0])
    return [parameter for _, parameter in named if getattr(parameter, attribute, False)]


def get_dim_for_local_rank(dim: int, world_size: int, local_rank: int, multiple_of: int = 1) -> int:
    """Returns how many of ``dim`` elements a rank has, in whole pieces of ``multiple_of``; the first ranks have those
    that are left over."""
    pieces, more = divmod(dim // multiple_of, world_size)
    return (pieces + (local_rank < more)) * multiple_of
