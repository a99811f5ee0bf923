"""FlashAttention-2's module ``flash_attn.bert_padding``: conversion between padded batches and packed rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def index_first_axis(x: Any, indices: Any) -> Any:
    """Returns the rows of ``x`` at ``indices``.

    Args:
        x: (rows, ...), of any element type.
        indices: (n,) in int64.

    Returns:
        (n, ...).
    """
    return x[indices]


def index_put_first_axis(values: Any, indices: Any, first_axis_dim: int) -> Any:
    """Returns a tensor of zeros with ``values`` at ``indices``.

    Args:
        values: (n, ...), of any element type.
        indices: (n,) in int64.
        first_axis_dim: The number of rows of the result.

    Returns:
        (first_axis_dim, ...).
    """
    rows = values.new_zeros(first_axis_dim, *values.shape[1:])
    return rows.index_put((indices,), values)


def unpad_input(hidden_states: Any, attention_mask: Any, unused_mask: Any = None) -> Any:
    """Packs the rows of a padded batch that the mask selects.

    Args:
        hidden_states: (batch, length, ...), of any element type.
        attention_mask: (batch, length), in bool or an integer type: True or 1 where there is a token.
        unused_mask: The same for tokens that are to be packed too, but not counted as used.

    Returns:
        A tuple of

        - the rows, (total, ...);
        - their indices in the flattened batch, (total,) in int64;
        - the cumulative lengths of the sequences, (batch + 1,) in int32;
        - the largest length, an ``int``;
        - the number of used rows of each sequence, (batch,) in int32.

    Example:
        ::

            rows, indices, starts, longest, _ = unpad_input(x, mask)
            out = flash_attn_varlen_func(rows, rows, rows, starts, starts, longest, longest)
            out = pad_input(out, indices, *mask.shape)
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    starts = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, starts, int(lengths.max()), used


def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    """Puts packed rows back into a padded batch; the inverse of :func:`unpad_input`.

    Args:
        hidden_states: (total, ...), of any element type.
        indices: (total,) in int64, from :func:`unpad_input`.
        batch, seqlen: The first two dimensions of the result.

    Returns:
        (batch, seqlen, ...), with zeros where there is no row.
    """
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))
