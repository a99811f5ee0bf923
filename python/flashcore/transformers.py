"""Attention of Hugging Face's transformers on FlashCore.

    import flashcore.transformers

    flashcore.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fused_core")

Batches may be padded on either side or packed, and caches dynamic or static. Sliding windows, chunks, softcaps,
sinks and biases of positions are taken from the model; other patterns are masks of all queries and keys. Dropout of
attention probabilities raises a ``NotImplementedError``: set ``attention_dropout=0.0``. For continuous batching use
``attn_implementation="paged|fused_core"``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel, masking_utils

from . import flash_attn_func, flash_attn_varlen_func
from ._arguments import NO_RULES, refusal
from ._flex import attend, mask_rules, softcap_rule
from .compat.bert_padding import pad_input, unpad_input

# One with "flash" in it would be looked for on the hub.
NAME = "fused_core"
# What comes before the names of those that serve continuous batching.
PAGED = "paged|"
# Keywords of models that change the result and are not served, with what they are otherwise.
UNSERVED = {
    # The keys that sparse attention has chosen.
    "indices": None,
    "block_indices": None,
    "head_mask": None,
    "layer_head_mask": None,
    # Probabilities are never computed as a tensor.
    "output_attentions": False,
}
# The models with causal layers that say of themselves that they are not: only their masks are causal.
SAY_NOT_CAUSAL = {"pegasus_x"}
# The models whose layers do not say that they have a window: only their masks do.
SAY_NO_WINDOW = {"phimoe"}
# The window of a layer about which the call says nothing.
UNSAID: Any = object()
# The layers whose queries see only keys of their own chunk.
CHUNKED = "chunked_attention"


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
    if "flash" in name:
        raise ValueError(f"name={name!r}, expected one without 'flash': transformers looks for those on the hub")
    for of, function in ((name, attention), (PAGED + name, paged)):
        AttentionInterface.register(of, function)
        masking_utils.AttentionMaskInterface.register(of, mask)
    return name


class SequenceNumbers(torch.Tensor):  # type: ignore[misc]
    """Which of the sequences that are packed in a row a token belongs to: (batch, length)."""


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Any = None,
    **others: Any,
) -> Any:
    """Makes the ``attention_mask`` of :func:`attention`, as transformers calls it.

    What the other arguments of that call say (causal masks and windows), and what the layer says (chunks), is left
    out. Patterns that they cannot say, such as images that see all of themselves, become tensors.

    Args:
        batch_size, q_length, kv_length: The sizes of the batch.
        q_offset, kv_offset: The positions of the first query and of the first key.
        mask_function: Whether a query sees a key, as a function of transformers.
        attention_mask: (batch, keys) in bool, true where there is a token; None without padding.
        others: What other functions for masks take.

    Returns:
        None if there is nothing to say; (batch, keys) in bool for padding; :class:`SequenceNumbers` for packed
        sequences; (batch, 1, queries, keys) for other patterns, in bool, or in numbers to add to scores.
    """
    function = masking_utils.causal_mask_function if mask_function is None else mask_function
    config = others.get("config")
    types = getattr(config, "layer_types", None) or ()
    sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
    if CHUNKED not in types and not _supports_rows(config):
        return masking_utils.eager_mask(*sizes, mask_function=function, attention_mask=attention_mask, **others)
    parts = None if others.get("use_vmap") else _parts(function)
    whole = q_length == kv_length and kv_offset == 0
    if parts is not None and PACKED in parts:
        # Each sequence begins at its first token, which is not where indices say that chunks begin.
        if parts.keys() <= {CAUSAL, WINDOW, PACKED} and CAUSAL in parts and whole and attention_mask is None:
            return parts[PACKED].expand(batch_size, -1).as_subclass(SequenceNumbers)
        parts = None
    if parts is not None and CHUNK in parts and kv_length + kv_offset > parts[CHUNK]:
        # Kernels count chunks from the first key, and caches drop keys.
        if not whole or CHUNKED not in types:
            parts = None
    if parts is None:
        others["allow_is_causal_skip"] = False
        return masking_utils.sdpa_mask(*sizes, mask_function=function, attention_mask=attention_mask, **others)
    if attention_mask is None and CAUSAL in parts and not whole:
        seen = int(q_offset) + q_length - kv_offset
        if seen < kv_length:
            # A static cache has room for more than was seen.
            return torch.ones((batch_size, seen), dtype=torch.bool, device=others.get("device"))
    return masking_utils.flash_attention_mask(batch_size, q_length, kv_length, attention_mask=attention_mask)


def _supports_rows(config: Any) -> bool:
    """Whether a model leaves it to others to apply its masks. Those that do not support FlashAttention may change a
    mask, or add it to scores of their own; they get what they get without a library, numbers for all pairs."""
    kind = getattr(config, "model_type", None)
    says_less = kind in SAY_NOT_CAUSAL or (kind in SAY_NO_WINDOW and config.sliding_window is not None)
    return not says_less and _supports_flash_attn(type(config))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _supports_flash_attn(kind: type) -> bool:
    """Whether all models with a kind of configuration do, of those that were imported; the one that runs is."""
    of = [it for it in _subclasses(PreTrainedModel) if issubclass(kind, it.config_class or ())]
    models = [it for it in of if it.config_class is not PreTrainedConfig]
    return bool(models) and all(it._supports_flash_attn for it in models)


def _subclasses(kind: Any) -> Iterator[Any]:
    for it in kind.__subclasses__():
        yield it
        yield from _subclasses(it)


# The functions of transformers that masks are made of. Of those that it makes for each call: what they capture.
CAUSAL, BIDIRECTIONAL, WINDOW, CHUNK, PACKED = "causal", "bidirectional", "window", "chunk", "packed"
_CAPTURES = {
    "sliding_window_overlay": (WINDOW, "sliding_window"),
    "sliding_window_bidirectional_overlay": (WINDOW, "sliding_window"),
    "chunked_overlay": (CHUNK, "chunk_size"),
    "packed_sequence_mask_function": (PACKED, "packed_sequence_mask"),
}


def _parts(function: Any) -> dict[str, Any] | None:
    """Returns the parts of which a mask of transformers is the intersection, with what they capture. None if some
    part is unknown: then the mask is a tensor, which is slower and always right."""
    if function is masking_utils.causal_mask_function:
        return {CAUSAL: None}
    if function is masking_utils.bidirectional_mask_function:
        return {BIDIRECTIONAL: None}
    closure, code = getattr(function, "__closure__", None), getattr(function, "__code__", None)
    if closure is None or code is None or getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    captured = {name: cell.cell_contents for name, cell in zip(code.co_freevars, closure)}
    maker = function.__qualname__.partition(".")[0]
    if maker == "and_masks" and "mask_functions" in captured:
        found: dict[str, Any] = {}
        for part in map(_parts, captured["mask_functions"]):
            # Two windows, of which a layer knows one.
            if part is None or found.keys() & part.keys():
                return None
            found.update(part)
        return found
    kind, name = _CAPTURES.get(maker, (None, None))
    return {kind: captured[name]} if kind is not None and name in captured else None


def attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = UNSAID,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Any = None,
    position_ids: Any = None,
    cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    deterministic: bool | None = None,
    position_bias: Any = None,
    **others: Any,
) -> tuple[Any, None]:
    """Computes attention for a layer of a model, as transformers calls it.

    Args:
        module: The layer; its ``is_causal`` is used if the argument is None, and the chunks of its configuration.
        query: (batch, heads, queries, head dim).
        key, value: (batch, key heads, keys, head dim), in the element type of ``query``.
        attention_mask: (batch, keys), true or 1 where there is a token; None without padding. One that broadcasts to
            (batch, heads, queries, keys), as in :func:`flashcore.scaled_dot_product_attention`, is all that is said of
            which query sees which key.
        scaling, softcap, is_causal, s_aux, deterministic: As ``softmax_scale``, ``softcap``, ``causal``, ``s_aux`` and
            ``deterministic`` of :func:`flashcore.flash_attn_func`.
        dropout: Must be 0.0.
        sliding_window: The number of keys that a query sees, including its own position; that of the layer if it is not
            given, or None for all.
        position_ids: (1, length): positions that restart mark packed sequences.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: Cumulative lengths, (sequences + 1,), and the largest
            lengths of packed sequences, instead of ``position_ids``.
        position_bias: Numbers to add to the scores, which have a gradient: (batch, heads, queries, keys), or what
            broadcasts to that.
        others: Arguments of other implementations. Those that would change the result are refused.

    Returns:
        The output, (batch, queries, heads, head dim), and None in the place of the probabilities.
    """
    _refuse_unserved(others)
    _refuse_dropout(dropout)
    causal, sliding_window = _is_causal(module, is_causal), _window(module, sliding_window)
    packed = attention_mask if isinstance(attention_mask, SequenceNumbers) else None
    attention_mask = None if packed is not None else attention_mask
    rows_of_tokens = attention_mask is None or _is_padding(attention_mask, query)
    if position_bias is not None or not rows_of_tokens:
        if cu_seq_lens_q is not None:
            given = "an attention_mask of pairs" if position_bias is None else "position_bias"
            raise NotImplementedError(f"cu_seq_lens_q was given together with {given}, expected None")
        if rows_of_tokens:
            attention_mask = _visible(query, key, attention_mask, packed, causal, sliding_window)
        masks = {"attention_mask": attention_mask, "position_bias": position_bias}
        return _with_masks(query, key, value, masks, scaling, softcap, s_aux, bool(deterministic)), None
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    rules: dict[str, Any] = {
        "softmax_scale": scaling,
        "causal": causal,
        "softcap": softcap or 0.0,
        "s_aux": s_aux,
        "deterministic": bool(deterministic),
    }
    if sliding_window is not None and k.shape[1] > sliding_window:
        # Theirs counts the query's own position.
        rules["window_size"] = (sliding_window - 1, sliding_window - 1)
    chunk = _chunk(module)
    if chunk is not None and k.shape[1] > chunk:
        rules["attention_chunk"] = chunk
    if attention_mask is not None:
        return _padded(q, k, v, attention_mask, rules), None
    if cu_seq_lens_q is None:
        if packed is not None:
            cu_seq_lens_q, max_length_q = _changes(packed)
        elif _is_packed(position_ids, q):
            cu_seq_lens_q, max_length_q = _starts(position_ids)
        cu_seq_lens_k, max_length_k = cu_seq_lens_q, max_length_q
    if cu_seq_lens_q is not None:
        q_rows, k_rows, v_rows = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        rules["max_seqlen_q"], rules["max_seqlen_k"] = _number(max_length_q), _number(max_length_k)
        out = flash_attn_varlen_func(q_rows, k_rows, v_rows, cu_seq_lens_q.int(), cu_seq_lens_k.int(), **rules)
        return out.view(*q.shape[:3], v.shape[-1]), None
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
    sliding_window: int | None = UNSAID,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Any = None,
    block_table: Any = None,
    position_bias: Any = None,
    **others: Any,
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
        is_causal: Must not be False, nor may that of the layer.
        block_table, position_bias: Must be None.
        others: As in :func:`attention`.

    Returns:
        The output, (rows of all sequences, heads, head dim), and None in the place of the probabilities.
    """
    _refuse_unserved(others)
    _refuse_dropout(dropout)
    for name, given in (("block_table", block_table), ("position_bias", position_bias)):
        if given is not None:
            raise refusal(name, given, None)
    if _chunk(module) is not None:
        raise NotImplementedError(f"layer_types has {CHUNKED!r}, expected layers without chunks in continuous batching")
    if hasattr(module, "config") and not _supports_rows(module.config):
        # Its masks, which are not looked at here, may say more.
        raise NotImplementedError(
            f"model_type={getattr(module.config, 'model_type', None)!r} is not supported in continuous batching, "
            "expected a model that supports FlashAttention"
        )
    if not _is_causal(module, is_causal):
        raise NotImplementedError("is_causal=False is not supported in continuous batching, expected True")
    keys, values = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=read_index,
        write_index=write_index,
    )
    window = _window(module, sliding_window)
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
    )
    return packed, None


def _refuse_unserved(others: dict[str, Any]) -> None:
    for name, default in UNSERVED.items():
        given = others.get(name)
        if given is not None and given is not default:
            raise refusal(name, given, default)


def _refuse_dropout(dropout: float) -> None:
    if dropout:
        raise NotImplementedError(
            f"dropout={dropout} is not supported yet, expected 0.0: set attention_dropout=0.0 in the configuration of the "
            "model, or what it calls that (attn_pdrop, attention_probs_dropout_prob), or call model.eval()"
        )


def _is_causal(module: Any, given: bool | None) -> bool:
    """Whether a layer is causal: what the call says, or else the layer."""
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _window(module: Any, given: int | None) -> int | None:
    """The window of a layer: what the call says, or else the layer."""
    # Some models have one number in all layers, and say None in the calls of those without a window.
    return (getattr(module, "sliding_window", None) if given is UNSAID else given) or None


def _chunk(module: Any) -> int | None:
    """The length of the chunks of a layer, or None."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    if types is None or layer is None or layer >= len(types) or types[layer] != CHUNKED:
        return None
    return getattr(config, "attention_chunk_size", None)


def _is_padding(attention_mask: Any, query: Any) -> bool:
    """Whether a mask is about the tokens of each sequence, and not about pairs of them."""
    if not isinstance(attention_mask, torch.Tensor):
        raise TypeError(f"attention_mask is a {type(attention_mask)}, expected a tensor or None")
    if attention_mask.dim() != 2:
        return False
    if attention_mask.is_floating_point() or attention_mask.shape[0] != query.shape[0]:
        raise ValueError(
            f"attention_mask is {list(attention_mask.shape)} of {attention_mask.dtype}, expected "
            f"[{query.shape[0]}, keys] of torch.bool, or four dimensions"
        )
    return True


def _visible(query: Any, key: Any, padding: Any, packed: Any, causal: bool, window: int | None) -> Any:
    """Which keys a query sees, as a tensor that broadcasts to (batch, heads, queries, keys), or None for all."""
    queries, keys, device = query.shape[2], key.shape[2], query.device
    # A static cache has room for more than was seen.
    seen = keys if padding is None else min(padding.shape[1], keys)
    conditions = []
    if padding is not None:
        conditions.append(torch.nn.functional.pad(padding[:, :seen].bool(), (0, keys - seen))[:, None, None])
    if packed is not None:
        numbers = packed.as_subclass(torch.Tensor)
        conditions.append(numbers[:, None, :, None] == numbers[:, None, None, :])
    # How far a key is before a query, of which the last is at the last key.
    before = (torch.arange(seen - queries, seen, device=device)[:, None] - torch.arange(keys, device=device))[
        None, None
    ]
    if causal:
        conditions.append(before >= 0)
    if window is not None and keys > window:
        conditions.append(before.abs() < window)
    return functools.reduce(operator.and_, conditions) if conditions else None


def _with_masks(
    query: Any,
    key: Any,
    value: Any,
    masks: dict[str, Any],
    scaling: float | None,
    softcap: float | None,
    sinks: Any,
    deterministic: bool,
) -> Any:
    """Attention with tensors of pairs: one in bool that says what is seen, numbers that are added to scores."""
    keys, added, mask, score, tensors = key.shape[2], {}, None, None, ()
    for name, given in masks.items():
        if given is None:
            continue
        # There may be room for more keys than there are.
        given = given[..., :keys] if given.dim() and given.shape[-1] > keys else given
        if given.dtype == torch.bool:
            mask, _, tensors, _ = mask_rules(given, query, key, name)
        else:
            added[name] = given
    if added:
        name, numbers = "_and_".join(added), functools.reduce(operator.add, added.values())
        _, score, more, _ = mask_rules(numbers, query, key, name, softcap)
        tensors = (*tensors, *more)
    elif softcap:
        score = softcap_rule(float(softcap))
    of, rules = (query, key, value), (mask, score, tensors, None)
    out = attend(of, (scaling, *NO_RULES), "scaled_dot_product_attention", sinks is not None, rules, deterministic)
    if sinks is not None:
        out, lse = out
        # A sink takes its share of the probabilities of each row, and has no value.
        share = torch.sigmoid(lse - sinks.float()[:, None])
        out = (out * share[..., None]).to(out.dtype)
    return out.transpose(1, 2).contiguous()


def _padded(q: Any, k: Any, v: Any, mask: Any, rules: dict[str, Any]) -> Any:
    """Attention over the keys of a padded batch that there are. Queries that there are not get zeros, or anything."""
    batch, queries = q.shape[:2]
    # A static cache has room for more than was seen.
    seen = mask.shape[1]
    keys, _, key_starts, most_keys, _ = unpad_input(k[:, :seen], mask)
    values = unpad_input(v[:, :seen], mask)[0]
    is_relative = rules["causal"] or "window_size" in rules
    if queries == 1 or not is_relative:
        # The next token of each sequence, padded or not; or queries of another sequence than the keys, which the mask
        # says nothing of.
        starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * queries
        rows = flash_attn_varlen_func(q.flatten(0, 1), keys, values, starts, key_starts, queries, most_keys, **rules)
        return rows.unflatten(0, (batch, queries))
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
    begins = positions == positions.min()
    # Whatever its position is.
    begins[0] = True
    return _lengths(begins)


def _changes(numbers: Any) -> tuple[Any, int]:
    """Where packed sequences begin that are numbered, and the longest length."""
    numbers = numbers.as_subclass(torch.Tensor)
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers.diff() != 0
    return _lengths(begins.flatten())


def _lengths(begins: Any) -> tuple[Any, int]:
    first = begins.nonzero().flatten().int()
    starts = torch.cat((first, first.new_tensor([begins.numel()])))
    return starts, int(starts.diff().max())


def _number(most: Any) -> int | None:
    return None if most is None else int(most)
