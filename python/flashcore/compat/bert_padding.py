"""FlashAttention-2's module ``flash_attn.bert_padding``: padded batches as rows, and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def index_first_axis(x: Any, indices: Any) -> Any:
    """The rows of ``x`` at some indices."""
    return x[indices]


def index_put_first_axis(values: Any, indices: Any, first_axis_dim: int) -> Any:
    """As many rows, zeros but for those at the indices."""
    rows = values.new_zeros(first_axis_dim, *values.shape[1:])
    return rows.index_put((indices,), values)


def unpad_input(hidden_states: Any, attention_mask: Any, unused_mask: Any = None) -> Any:
    """The rows of a padded batch that there are.

    Args:
        hidden_states: (batch, length, ...).
        attention_mask: (batch, length), true or 1 where there is a row.
        unused_mask: The same for rows that are kept and not used.

    Returns:
        The rows, their indices in the padded batch, where each sequence begins in int32, the longest
        length, and how many rows of each are used.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    starts = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, starts, int(lengths.max()), used


def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    """Rows in a padded batch (batch, seqlen, ...), with zeros where there is none."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))
