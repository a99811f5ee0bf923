"""Masks and scores as functions in PyTorch: the operators behind calls that autograd records, and those of
``torch.compile``, subclasses and modes.

Functions are their texts here, so that PyTorch can keep them in its graphs.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

import torch

from . import _captured, _flashcore, _flops, _torch, _transforms
from ._arguments import NO_RULES, shown
from ._gradients import NAMESPACE, operators, with_gradients

_RULES = "float? scale, str mask, str score, Tensor[] captured, str function, int blocks"
_torch._library.define(
    f"attention_with_rules(Tensor q, Tensor k, Tensor v, {_RULES}, bool deterministic) -> (Tensor, Tensor)",
    tags=_torch._TAGS,
)
_torch._library.define(
    "attention_with_rules_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
    f"{_RULES}, bool deterministic) -> (Tensor, Tensor, Tensor)",
    tags=_torch._TAGS,
)


def device_of(name: str, device: Any) -> Any:
    """A device, or None."""
    if device is None:
        return None
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{name}={shown(device)} is no device of PyTorch's: {error}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{name}={device!r} is not there: PyTorch finds no GPU")
    return device


# What a mask says of pairs and of blocks of them.
pairs_seen, blocks_seen = _captured.pairs_seen, _captured.blocks_seen
refuse_odd = _torch.refuse_odd


def attend(
    tensors: tuple[Any, ...],
    numbers: tuple[Any, ...],
    function: str,
    lse: bool,
    rules: tuple[Any, ...],
    deterministic: bool = False,
) -> Any:
    """Computes attention with functions through the dispatcher."""
    mask, score, captured, blocks = rules
    name = "attn_mask" if function == "scaled_dot_product_attention" else "a captured tensor"
    _torch.refuse_tangents(("query", "key", "value", *(name,) * len(captured)), (*tensors, *captured))
    if _transforms.is_differentiating((*tensors, *captured)) and any(map(_transforms.requires_grad, captured)):
        raise NotImplementedError(
            f"{name} requires grad under a transform of torch.func, expected a tensor that does not: its gradients are "
            "those of torch.autograd"
        )
    tensors = _torch._autocast(tensors)
    texts = ("" if rule is None else rule if isinstance(rule, str) else rule.text for rule in (mask, score))
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    result = _transforms.call(
        operators.attention_with_rules.default,
        *tensors,
        numbers[0],
        *texts,
        list(captured),
        function,
        _number(blocks),
        deterministic,
    )
    return result if lse else result[0]


# What is known of the blocks of masks, by numbers: PyTorch keeps numbers in its graphs.
_known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@functools.cache
def _of_pytorch() -> tuple[Any, Any]:
    """Returns the class of PyTorch's own block masks, and the function of those that have none. What they are in
    takes long to import, and those who have a mask have done so."""
    from torch.nn.attention.flex_attention import BlockMask, noop_mask

    return BlockMask, noop_mask


def block_lists(mask: Any) -> tuple[tuple[Any, ...], Any] | None:
    """What :meth:`BlockMask.from_kv_blocks` is given for PyTorch's own block mask, if it is one, and the version
    counters of its tensors, which those made in inference mode do not have."""
    kind, nothing = _of_pytorch()
    if not isinstance(mask, kind):
        return None
    function = mask.mask_mod
    counts, indices, whole_counts, whole = (
        mask.kv_num_blocks,
        mask.kv_indices,
        mask.full_kv_num_blocks,
        mask.full_kv_indices,
    )
    versions: Any
    try:
        versions = (
            counts._version,
            indices._version,
            None if whole is None else (whole._version, whole_counts._version),
        )
    except (AttributeError, RuntimeError):
        # One was made in inference mode, or is missing, which is refused later.
        tensors = (it for it in (counts, indices, whole_counts, whole) if it is not None)
        versions = tuple(None if it.is_inference() else it._version for it in tensors)
    function = None if function is nothing else function
    return (counts, indices, whole_counts, whole, mask.BLOCK_SIZE, function, mask.seq_lengths), versions


def causal_bias(mask: Any) -> tuple[bool, tuple[int, int]] | None:
    """Returns whether PyTorch's causal bias is that of the lower right corner, and its numbers of queries and keys;
    None for anything else."""
    # Those who have one have imported its module.
    module = sys.modules.get("torch.nn.attention.bias")
    if module is None or not isinstance(mask, module.CausalBias):
        return None
    return mask.variant == module.CausalVariant.LOWER_RIGHT, (mask.seq_len_q, mask.seq_len_kv)


def _number(blocks: Any) -> int:
    if blocks is None:
        return 0
    _known[id(blocks)] = blocks
    return id(blocks)


@functools.lru_cache(256)
def _rule(text: str) -> Any:
    return _flashcore.Rule(text) if text else None


def _forward(
    q: Any,
    k: Any,
    v: Any,
    scale: Any,
    mask: str,
    score: str,
    captured: Any,
    function: str,
    blocks: int,
    deterministic: bool,
) -> Any:
    rules = (_rule(mask), _rule(score), tuple(captured), _known.get(blocks))
    return _flashcore.attend((q, k, v), (scale, *NO_RULES), function, True, "dispatcher", rules)


def _fake_forward(q: Any, k: Any, v: Any, *_: Any) -> Any:
    """Returns results of the right shapes for tensors without memory; the kernels check the
    rest."""
    if q.dtype not in _torch._FLOATS:
        raise TypeError(f"query has element type {q.dtype}, expected float16, bfloat16 or float32")
    for name, tensor in (("key", k), ("value", v)):
        _torch._check_like(name, tensor, q, "query")
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    scale: Any,
    mask: str,
    score: str,
    captured: Any,
    function: str,
    blocks: int,
    deterministic: bool,
) -> Any:
    rules = (_rule(mask), _rule(score), tuple(captured), _known.get(blocks))
    nothing = 0 in (q.numel(), k.numel(), v.numel())
    make = torch.zeros_like if nothing else torch.empty_like
    gradients = tuple(make(it) for it in (q, k, v))
    if not nothing:
        _flashcore.attend_backward(
            (q, k, v), (scale, *NO_RULES), function, (out, lse, dout, dlse), gradients, deterministic, rules
        )
    return gradients


def _fake_backward(dout: Any, q: Any, k: Any, v: Any, *_: Any) -> Any:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, scale, mask, score, captured, function, blocks, deterministic = inputs
    ctx.save_for_backward(q, k, v, *output, *captured)
    ctx.call = (scale, mask, score, function, blocks, deterministic)
    # So that they are known by their number until then.
    ctx.blocks = _known.get(blocks)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Any, dlse: Any) -> Any:
    q, k, v, out, lse, *captured = ctx.saved_tensors
    # As the arguments are: captured tensors are a list.
    gradients: Any = (None, None, None)
    of_captured: list[Any] = [None] * len(captured)
    needed = ctx.needs_input_grad[6]
    # Under transforms the list is one argument, of tensors without gradients.
    is_list = not isinstance(needed, bool)
    wanted = list(needed) if is_list else []
    scale, mask, score, function, blocks, deterministic = ctx.call
    if dout is not None or dlse is not None:
        _, _, dout, _ = with_gradients(out, lse, dout, dlse)
        if any(ctx.needs_input_grad[:3]):
            gradients = _transforms.call(
                operators.attention_with_rules_backward.default,
                dout,
                q,
                k,
                v,
                out,
                lse,
                dlse,
                scale,
                mask,
                score,
                captured,
                function,
                blocks,
                deterministic,
            )
        if any(wanted):
            saved = (dout, q, k, v, out, lse, dlse)
            # In float32, whatever the caller's autocast chooses for products.
            with torch.autocast(q.device.type, enabled=False):
                of_captured = _captured.gradients(saved, scale, (mask, score), captured, wanted)
            if torch.is_grad_enabled():
                # PyTorch's operations recorded nothing of these.
                made = [it for it in of_captured if it is not None]
                once = iter(_Once.apply(len(made), *made, dout, dlse, q, k, v, *captured))
                of_captured = [None if it is None else next(once) for it in of_captured]
    return *gradients, None, None, None, of_captured if is_list else None, None, None, None


def _refuse_second(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError("FlashCore has no gradients of gradients")


class _Once(torch.autograd.Function):  # type: ignore[misc]
    """Gradients that depend on the other tensors, and cannot be differentiated by them."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Any) -> Any:
        return tensors[:count]

    backward = staticmethod(_refuse_second)


for _name, _run, _fake in (
    ("attention_with_rules", _forward, _fake_forward),
    ("attention_with_rules_backward", _backward, _fake_backward),
):
    for _key in ("CPU", "CUDA"):
        _torch._library.impl(_name, _run, _key)
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_torch._library)
_transforms.register(operators.attention_with_rules.default, _differentiate, _remember, 0, _torch._library)
_transforms.register(operators.attention_with_rules_backward.default, _refuse_second, None, 0, _torch._library)
_flops.register_with_rules(operators)
