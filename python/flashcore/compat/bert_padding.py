"""FlashAttention-2's module ``flash_attn.bert_padding``: conversion between padded batches and packed rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def __getattr__(name: str) -> Any:
    """Returns the functions of einops that FlashAttention-2's module has among its own, for programs that import
    them from there."""
    if name not in ("rearrange", "repeat"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import einops
    except ModuleNotFoundError as error:
        if error.name != "einops":
            raise
        raise ImportError(f"{name} of flash_attn.bert_padding is that of einops, which is not installed") from None
    return getattr(einops, name)


def index_first_axis(x: Any, indices: Any) -> Any:
    """Returns the rows of ``x`` at ``indices``.

    Args:
        x: (rows, ...), of any element type.
        indices: (n,) in int64.

    Returns:
        (n, ...).
    """
    return x[indices]


def index_first_axis_residual(x: Any, indices: Any) -> Any:
    """Returns the rows of ``x`` at ``indices``, and ``x``, whose gradient is added to that of the rows.

    Args:
        x: (rows, ...), of any element type.
        indices: (n,) in int64.

    Returns:
        ``(rows, x)``: (n, ...), and a view of ``x``.
    """
    return x[indices], x.view_as(x)


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


def unpad_input_for_concatenated_sequences(hidden_states: Any, attention_mask_in_length: Any) -> Any:
    """Packs the rows of a padded batch in which several sequences follow each other in an entry.

    Args:
        hidden_states: (batch, length, ...), of any element type.
        attention_mask_in_length: (batch, length) in an integer type: the lengths of the sequences of each entry, which
            lie one after the other from its beginning; zeros are not sequences.

    Returns:
        A tuple of

        - the rows, (total, ...);
        - their indices in the flattened batch, (total,) in int64;
        - the cumulative lengths of the sequences, (sequences + 1,) in int32;
        - the largest length, an ``int``.

    Example:
        ::

            # Sequences of 2 and 3 tokens in the first entry, and one of 4 in the second.
            lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0]])
            rows, indices, starts, longest = unpad_input_for_concatenated_sequences(x, lengths)
    """
    used = attention_mask_in_length.sum(-1, keepdim=True)
    mask = torch.arange(attention_mask_in_length.shape[1], device=used.device) < used
    rows, indices, *_ = unpad_input(hidden_states, mask)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    starts = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return rows, indices, starts, int(lengths.max())


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
