"""What ``torch.utils.flop_counter.FlopCounterMode`` counts for our operators.

As for PyTorch's own attention: products of matrices alone, and every key for every query, whatever the mask. Sequences
count with their own lengths where these can be read, otherwise with the longest that they may have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from . import _gradients
from ._gradients import LISTS, NUMBERS


def register(operators: Any) -> None:
    """Registers the formulas of ``attention``, ``attention_with_lse`` and ``attention_backward``."""
    register_flop_formula([operators.attention, operators.attention_with_lse], get_raw=True)(_forward)
    register_flop_formula(operators.attention_backward, get_raw=True)(_backward)


def register_with_rules(operators: Any) -> None:
    """Registers the formulas of ``attention_with_rules`` and ``attention_with_rules_backward``."""
    register_flop_formula(operators.attention_with_rules, get_raw=True)(_forward_with_rules)
    register_flop_formula(operators.attention_with_rules_backward, get_raw=True)(_backward_with_rules)


def _forward(q: Any, k: Any, v: Any, *others: Any, out_val: Any = None) -> Any:
    q, k, v = _gradients.parts(q, k, v)
    return _of_forward(_scores(q, k, others), q, v)


def _backward(dout: Any, q: Any, k: Any, v: Any, *others: Any, out_val: Any = None) -> Any:
    q, k, v = _gradients.parts(q, k, v)
    return _of_backward(_scores(q, k, others[3:]), q, v)


def _forward_with_rules(q: Any, k: Any, v: Any, *_: Any, out_val: Any = None) -> Any:
    return _of_forward(_scores_of_heads(q, k), q, v)


def _backward_with_rules(dout: Any, q: Any, k: Any, v: Any, *_: Any, out_val: Any = None) -> Any:
    return _of_backward(_scores_of_heads(q, k), q, v)


def _of_forward(scores: Any, q: Any, v: Any) -> Any:
    # Of queries and keys, and of probabilities and values.
    return 2 * scores * (q.shape[-1] + v.shape[-1])


def _of_backward(scores: Any, q: Any, v: Any) -> Any:
    # Scores once more, the gradients of queries and of keys; those of probabilities and of values.
    return 2 * scores * (3 * q.shape[-1] + 2 * v.shape[-1])


def _scores_of_heads(q: Any, k: Any) -> Any:
    """Returns how many scores there are of tensors with heads before rows."""
    batch, heads, queries, _ = q.shape
    return batch * heads * queries * k.shape[2]


def _scores(q: Any, k: Any, others: tuple[Any, ...]) -> Any:
    """Returns how many scores a call has, whose other arguments end with the numbers in a plain call."""
    if len(others) <= NUMBERS:
        batch, queries, heads, _ = q.shape
        return batch * heads * queries * k.shape[1]
    if others[NUMBERS + LISTS] == "scaled_dot_product_attention":
        return _scores_of_heads(q, k)
    longest_q, longest_k = others[NUMBERS - 2 : NUMBERS]
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, _, _, page_table, *_ = others[NUMBERS:]
    sequences = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if page_table is not None:
        longest_k = page_table.shape[1] * k.shape[1]
    queries = _lengths(q, cu_seqlens_q, seqused_q, sequences, longest_q)
    keys = _lengths(k, cu_seqlens_k, seqused_k, sequences, longest_k)
    return q.shape[-2] * sum(a * b for a, b in zip(queries, keys))


def _lengths(tensor: Any, starts: Any, used: Any, sequences: int, longest: Any) -> list[Any]:
    """Returns the length of each sequence."""
    lengths = starts.diff() if used is None and starts is not None else used
    if type(lengths) is torch.Tensor and not lengths.is_meta:
        return lengths.tolist()  # type: ignore[no-any-return]
    rows = tensor.shape[1] if tensor.dim() == 4 else tensor.shape[0]
    return [rows if longest is None else longest] * sequences
