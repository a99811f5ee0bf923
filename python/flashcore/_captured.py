"""Mask and score functions evaluated by PyTorch: the pairs that masks see, and the gradients of the
tensors that a score function loads from.

Kernels give those of queries, keys and values. These are PyTorch's: scores are computed again, some rows at a
time, the function's text is evaluated over them by operations that autograd records, and what it gives is
differentiated by its tensors with the gradient of the scores, ``P * (dP - delta)``.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch

# The maximum number of scores in memory at a time.
MOST_SCORES = 1 << 24


def gradients(
    saved: tuple[Any, ...], scale: float | None, texts: tuple[str, str], captured: Any, wanted: Any
) -> list[Any]:
    """Returns the gradient of each captured tensor that is wanted, None for the others. ``saved``
    holds dO, queries, keys, values, the output, the log-sum-exps and their gradient or None;
    ``texts`` those of the mask and of the score."""
    dout, q, k, v, out, lse, dlse = saved
    batch, heads, queries, dim = q.shape
    key_heads, keys = k.shape[1:3]
    scale = 1 / math.sqrt(dim) if scale is None else scale
    mask, score = [_parsed(text) if text else None for text in texts]
    if score is None:
        # A mask alone: visibility is piecewise constant, so the gradients are zero.
        return [torch.zeros_like(it) if want else None for it, want in zip(captured, wanted)]
    # Gradients are summed in float32, whatever the element types.
    leaves = [it.detach().float().requires_grad_() if want else it.detach() for it, want in zip(captured, wanted)]
    asked = [leaf for leaf, want in zip(leaves, wanted) if want]
    sums = [torch.zeros_like(leaf) for leaf in asked]
    of_mask = len(mask.tensors) if mask is not None else 0
    rows = max(1, min(queries, MOST_SCORES // max(keys, 1)))
    several = max(1, MOST_SCORES // max(rows * keys, 1))
    for first in range(0, batch * heads, several):
        number = torch.arange(first, min(first + several, batch * heads), device=q.device)
        b, h = number // heads, number % heads
        group = h // (heads // key_heads)
        key, value = k[b, group].float(), v[b, group].float()
        for begin in range(0, queries, rows):
            here = slice(begin, min(begin + rows, queries))
            query, gradient, result = (it[b, h, here].float() for it in (q, dout, out))
            at = _At(b, h, here, keys, queries, q.device)
            with torch.enable_grad():
                scores = score.evaluate(at.with_score(query @ key.mT * scale), leaves[of_mask:])
                scores = scores.expand(len(number), query.shape[1], keys)
            log_sum = lse[b, h, here, None].float()
            seen = log_sum > -math.inf
            if mask is not None:
                seen = seen & mask.evaluate(at, leaves[:of_mask])
            weights = torch.where(seen, (scores.detach() - log_sum).exp(), 0.0)
            delta = (gradient * result).sum(-1, keepdim=True)
            if dlse is not None:
                delta = torch.where(log_sum > -math.inf, delta - dlse[b, h, here, None], 0.0)
            change = weights * (gradient @ value.mT - delta)
            if scores.requires_grad:
                found = torch.autograd.grad(scores, asked, change, allow_unused=True)
                for total, part in zip(sums, found):
                    if part is not None:
                        total += part
    each = iter(sums)
    return [next(each).to(it.dtype) if want else None for it, want in zip(captured, wanted)]


def pairs_seen(text: str, tensors: Any, shape: tuple[int, ...], device: Any = None) -> Any:
    """Evaluates a mask for every pair: (batch, heads, queries, keys) in bool."""
    batch, heads, queries, keys = shape
    try:
        seen = torch.cat(list(_each_seen(text, tensors, shape, queries, device)), 1)
    except RuntimeError as error:
        # On the CPU PyTorch has no error of its own for want of memory.
        if "allocate memory" not in str(error):
            raise
        raise MemoryError(f"no memory for a mask of {list(shape)}: {error}") from None
    return seen.view(batch, heads, queries, keys)


def blocks_seen(text: str, tensors: Any, shape: tuple[int, ...], size: tuple[int, int]) -> Any:
    """Returns the blocks with a visible pair: (batch, heads, rows, columns) in int32."""
    batch, heads, queries, keys = shape
    rows, columns = (-(-length // step) for length, step in zip((queries, keys), size))
    found = []
    for seen in _each_seen(text, tensors, shape, size[0], None):
        wide = torch.nn.functional.pad(seen, (0, columns * size[1] - keys))
        found.append(wide.view(batch * heads, -1, columns, size[1]).any(-1).any(1, keepdim=True))
    return torch.cat(found, 1).view(batch, heads, rows, columns).int()


def _each_seen(text: str, tensors: Any, shape: tuple[int, ...], step: int, device: Any) -> Any:
    """Evaluates a mask for ``step`` queries at a time, over the heads of all sequences; yields each
    part."""
    batch, heads, queries, keys = shape
    device = next((tensor.device for tensor in tensors), None) if device is None else device
    number, mask = torch.arange(batch * heads, device=device), _parsed(text)
    for begin in range(0, max(queries, 1), max(step, 1)):
        rows = slice(begin, min(begin + step, queries))
        at = _At(number // heads, number % heads, rows, keys, queries, number.device)
        yield mask.evaluate(at, tensors).expand(batch * heads, rows.stop - rows.start, keys)


class _At:
    """Coordinates of some rows of scores: tensors over (head of a sequence, query, key)."""

    def __init__(self, batch: Any, head: Any, rows: slice, keys: int, queries: int, device: Any) -> None:
        count = functools.partial(torch.arange, dtype=torch.int32, device=device)
        self.device, self.rows, self.keys, self.queries = device, rows, keys, queries
        self.symbols = {
            "batch": batch.int()[:, None, None],
            "head": head.int()[:, None, None],
            "query": count(rows.start, rows.stop)[None, :, None],
            "key": count(keys)[None, None, :],
            "query_length": torch.tensor(queries, dtype=torch.int32, device=device),
            "key_length": torch.tensor(keys, dtype=torch.int32, device=device),
        }

    def with_score(self, score: Any) -> _At:
        self.symbols["score"] = score
        return self


class _Function:
    """A parsed function text."""

    def __init__(self, text: str) -> None:
        words = text.replace("(", " ( ").replace(")", " ) ").split()
        _, _, *parts = _nested(iter(words[1:]))
        self.tensors = [part[1] for part in parts if part[0] == "tensor"]
        self.named = [part[1:] for part in parts if part[0] == "let"]
        self.result = parts[-1]

    def evaluate(self, at: _At, tensors: Any) -> Any:
        values = dict(at.symbols)
        loaded = dict(zip(self.tensors, tensors))
        for name, expression in self.named:
            values[name] = _value(expression, values, loaded, at)
        return _value(self.result, values, loaded, at)


_parsed = functools.lru_cache(256)(_Function)


def _nested(words: Any) -> list[Any]:
    """Parses the words inside an opened bracket."""
    inside: list[Any] = []
    for word in words:
        if word == ")":
            return inside
        inside.append(_nested(words) if word == "(" else word)
    return inside


def _value(expression: Any, values: dict[str, Any], loaded: dict[str, Any], at: _At) -> Any:
    if isinstance(expression, str):
        found = values.get(expression)
        return _constant(expression, at.device) if found is None else found
    name, *operands = expression
    if name == "load":
        tensor, *indices = operands
        return _load(loaded[tensor], indices, [_value(it, values, loaded, at) for it in indices], at)
    given = [_value(it, values, loaded, at) for it in operands]
    if name in ("div", "rem", "shl", "shr") and not given[0].is_floating_point():
        return _integer(name, *given)
    return _OPERATIONS[name](*given)


def _constant(text: str, device: Any) -> Any:
    if text in ("true", "false"):
        return torch.tensor(text == "true", device=device)
    try:
        return torch.tensor(int(text), dtype=torch.int32, device=device)
    except ValueError:
        # The program's default element type may be another one.
        return torch.tensor(float(text), dtype=torch.float32, device=device)


def _load(tensor: Any, names: list[Any], indices: list[Any], at: _At) -> Any:
    """Loads elements of a tensor, zero outside of its bounds."""
    dense = names[-2:] == ["query", "key"] and tensor.shape[-2] >= at.queries and tensor.shape[-1] >= at.keys
    if dense and all(name in ("batch", "head") for name in names[:-2]):
        # Whole rows: slices are differentiated faster than single elements.
        extents, indices = tensor.shape[:-2], indices[:-2]
        tensor = tensor[..., at.rows, : at.keys]
        tensor = tensor if indices else tensor[None]
    else:
        extents = tensor.shape
    inside = [(index >= 0) & (index < extent) for index, extent in zip(indices, extents)]
    near = [torch.where(fits, index, 0).long() for fits, index in zip(inside, indices)]
    if tensor.dim() > len(near):
        near = [index.flatten() for index in near]
    value = tensor[tuple(near)] if near else tensor
    if inside:
        zero = torch.zeros((), dtype=value.dtype, device=at.device)
        value = torch.where(functools.reduce(operator.and_, inside), value, zero)
    if value.is_floating_point():
        return value.float()
    return value if value.dtype == torch.bool else value.int()


def _integer(name: str, a: Any, b: Any) -> Any:
    """Operations that are not defined for every divisor or amount elsewhere."""
    if name in ("shl", "shr"):
        return (torch.bitwise_left_shift if name == "shl" else torch.bitwise_right_shift)(a, b & 31)
    zero = b == 0
    by = torch.where(zero, 1, b)
    if name == "div":
        return torch.where(zero, 0, torch.div(a, by, rounding_mode="floor"))
    return torch.where(zero, a, torch.remainder(a, by))


def _to_integer(a: Any) -> Any:
    return a.double().nan_to_num(0.0).clamp(-(2.0**31), 2.0**31 - 1).to(torch.int32)


_OPERATIONS: dict[str, Any] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "min": torch.minimum, "max": torch.maximum, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "neg": operator.neg, "abs": torch.abs, "not": operator.invert, "tanh": torch.tanh, "exp2": torch.exp2,
    "log2": torch.log2, "f32": torch.Tensor.float, "i32": _to_integer, "select": torch.where,
}  # fmt: skip
