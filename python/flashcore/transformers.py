"""Attention of Hugging Face's transformers on FlashCore.

    import flashcore.transformers

    flashcore.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fused_core")

Batches may be padded on either side or packed, and caches dynamic or static. Sliding windows, softcaps and
sinks are taken from the model. Dropout of attention probabilities raises a ``NotImplementedError``: set
``attention_dropout=0.0``. For continuous batching use ``attn_implementation="paged|fused_core"``.
"""

from __future__ import annotations

from typing import Any

import torch

from . import flash_attn_func, flash_attn_varlen_func
from .compat.bert_padding import pad_input, unpad_input

# One with "flash" in it would be looked for on the hub.
NAME = "fused_core"
# What comes before the names of those that serve continuous batching.
PAGED = "paged|"


def register(name: str = NAME) -> str:
    """Registers FlashCore's attention with transformers, under ``name`` and, for continuous batching, ``"paged|" + name``.

    Args:
        name: The value that ``attn_implementation`` will take. It must not contain ``flash``: transformers looks for
            such names on the hub.

    Returns:
        The name.

    Raises:
        ValueError: If the name contains ``flash``.

    Example:
        ::

            name = flashcore.transformers.register()
            model = AutoModelForCausalLM.from_pretrained("...", attn_implementation=name, dtype=torch.bfloat16)
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    if "flash" in name:
        raise ValueError(f"name={name!r}, expected one without 'flash': transformers looks for those on the hub")
    for of, function in ((name, attention), (PAGED + name, paged)):
        AttentionInterface.register(of, function)
        # No mask but the padding's, which is a row of each sequence.
        AttentionMaskInterface.register(of, flash_attention_mask)
    return name


def attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Any = None,
    position_ids: Any = None,
    cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    deterministic: bool | None = None,
    **_: Any,
) -> tuple[Any, None]:
    """Computes attention for a layer of a model, as transformers calls it.

    Args:
        module: The layer; its ``is_causal`` is used if the argument is None.
        query: (batch, heads, queries, head dim).
        key, value: (batch, key heads, keys, head dim), in the element type of ``query``.
        attention_mask: (batch, keys), true or 1 where there is a token; None without padding.
        scaling, dropout, softcap, is_causal, s_aux, deterministic: As ``softmax_scale``, ``dropout_p``, ``softcap``,
            ``causal``, ``s_aux`` and ``deterministic`` of :func:`flashcore.flash_attn_func`.
        sliding_window: The number of keys that a query sees, including its own position.
        position_ids: (1, length): positions that restart mark packed sequences.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: Cumulative lengths, (sequences + 1,), and the largest
            lengths of packed sequences, instead of ``position_ids``.

    Returns:
        The output, (batch, queries, heads, head dim), and None in the place of the probabilities.
    """
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    rules: dict[str, Any] = {
        "softmax_scale": scaling,
        "causal": bool(module.is_causal if is_causal is None else is_causal),
        "dropout_p": dropout,
        "softcap": softcap or 0.0,
        "s_aux": s_aux,
        "deterministic": bool(deterministic),
    }
    if sliding_window is not None and k.shape[1] > sliding_window:
        # Theirs counts the query's own position.
        rules["window_size"] = (sliding_window - 1, sliding_window - 1)
    if attention_mask is not None:
        return _padded(q, k, v, attention_mask, rules), None
    if cu_seq_lens_q is None and _is_packed(position_ids, q):
        cu_seq_lens_q, max_length_q = _starts(position_ids)
        cu_seq_lens_k, max_length_k = cu_seq_lens_q, max_length_q
    if cu_seq_lens_q is not None:
        q_rows, k_rows, v_rows = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        rules["max_seqlen_q"], rules["max_seqlen_k"] = _number(max_length_q), _number(max_length_k)
        packed = flash_attn_varlen_func(q_rows, k_rows, v_rows, cu_seq_lens_q.int(), cu_seq_lens_k.int(), **rules)
        return packed.view(*q.shape[:3], v.shape[-1]), None
    return flash_attn_func(q, k, v, **rules), None


def paged(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    cache: Any,
    cu_seq_lens_q: Any,
    cu_seq_lens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    read_index: Any,
    write_index: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    **_: Any,
) -> tuple[Any, None]:
    """Computes attention for continuous batching, as transformers calls it.

    New keys and values are written to ``cache``, which returns those of each sequence one after the other.

    Args:
        module: The layer, with its ``layer_idx``.
        query: (1, heads, rows of all sequences, head dim).
        key, value: The new rows, (1, key heads, rows of all sequences, head dim).
        attention_mask: Ignored.
        cache: The paged cache of transformers.
        cu_seq_lens_q, cu_seq_lens_k, max_seqlen_q, max_seqlen_k: Cumulative lengths, (sequences + 1,), and the largest
            lengths; those of keys may be a dictionary by the kind of layer.
        read_index, write_index: Passed to ``cache.update``.
        scaling, dropout, sliding_window, softcap, s_aux: As in :func:`attention`.

    Returns:
        The output, (rows of all sequences, heads, head dim), and None in the place of the probabilities.
    """
    keys, values = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=read_index,
        write_index=write_index,
    )
    # Some models say it in the call, and some in the module.
    window = sliding_window or getattr(module, "sliding_window", None)
    if isinstance(cu_seq_lens_k, dict):
        layers = "sliding_attention" if window else "full_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[layers], max_seqlen_k[layers]
    packed = flash_attn_varlen_func(
        query.transpose(1, 2).squeeze(0),
        keys,
        values,
        cu_seq_lens_q.int(),
        cu_seq_lens_k.int(),
        _number(max_seqlen_q),
        _number(max_seqlen_k),
        softmax_scale=scaling,
        causal=True,
        # Theirs counts the query's own position.
        window_size=(window - 1, 0) if window else (-1, -1),
        softcap=softcap or 0.0,
        s_aux=s_aux,
        dropout_p=dropout,
    )
    return packed, None


def _padded(q: Any, k: Any, v: Any, mask: Any, rules: dict[str, Any]) -> Any:
    """Attention over the rows of a padded batch that there are; the others get zeros."""
    batch, queries = q.shape[:2]
    # A static cache has room for more than was seen.
    seen = mask.shape[1]
    keys, _, key_starts, most_keys, _ = unpad_input(k[:, :seen], mask)
    values = unpad_input(v[:, :seen], mask)[0]
    if queries == 1:
        # The next token of each sequence, padded or not.
        starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        return flash_attn_varlen_func(
            q.flatten(0, 1), keys, values, starts, key_starts, 1, most_keys, **rules
        ).unsqueeze(1)
    rows, indices, starts, most, _ = unpad_input(q, mask[:, -queries:])
    output = flash_attn_varlen_func(rows, keys, values, starts, key_starts, most, most_keys, **rules)
    return pad_input(output, indices, batch, queries)


def _is_packed(position_ids: Any, q: Any) -> bool:
    """Whether several sequences lie one after the other in one: positions begin anew."""
    if position_ids is None or q.shape[0] != 1 or position_ids.dim() != 2 or position_ids.shape[0] != 1:
        return False
    if position_ids.shape[1] != q.shape[1] or q.shape[1] == 1:
        return False
    return bool((position_ids.diff() != 1).any())


def _starts(position_ids: Any) -> tuple[Any, int]:
    """Where sequences begin whose positions are given, and the longest length."""
    positions = position_ids.flatten()
    begins = (positions == positions.min()).nonzero().flatten().int()
    starts = torch.cat((begins, begins.new_tensor([positions.numel()])))
    return starts, int(starts.diff().max())


def _number(most: Any) -> int | None:
    return None if most is None else int(most)
