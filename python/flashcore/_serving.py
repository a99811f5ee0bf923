"""Ragged batches, KV caches and partial results, with FlashAttention-3's functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from . import _arrays, _copies, _flashcore
from ._arguments import (
    by_keyword,
    check_rows,
    either,
    flag,
    hints,
    invariant,
    name_of_type,
    rarely,
    refuse,
    shape_of,
    whole,
)
from ._installed import is_torch, torch

try:
    from . import _torch as _torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    _torch = None  # type: ignore[assignment]


if TYPE_CHECKING:
    from typing_extensions import Unpack


def _never() -> bool:
    return False


is_compiling = _never if _torch is None else _torch.is_compiling
_Tensor = None if _torch is None else _torch.Tensor
# In what `torch.export` records, numbers may be symbols.
_NUMBERS: Any = int if torch is None else (int, torch.SymInt)


# Computes attention for the public functions; returns the output, or output and log-sum-exps. Trailing tensors
# may be left out if they are None. It is called directly, and chosen where it is called: one more Python
# function would cost a plain call 4 % of its instructions.
serve = _flashcore.serve


def serve_compiled(
    tensors: tuple[Any, ...], numbers: tuple[Any, ...], function: str, lse: bool, deterministic: bool
) -> Any:
    """:func:`serve` while PyTorch's compiler traces the call."""
    copied = _copies.attend(_torch.attend, tensors, numbers, function, lse, deterministic)
    return _torch.attend(tensors, numbers, function, lse, deterministic) if copied is None else copied


def _serve_others(
    outcome: Any, tensors: tuple[Any, ...], numbers: tuple[Any, ...], function: str, lse: bool, deterministic: bool
) -> Any:
    """Computes attention where the extension, instead of a result, has this outcome: an answer of
    :func:`_flashcore.attend`, or a ``ValueError``."""
    try:
        if outcome is None:
            return _arrays.attend(tensors, numbers, function, lse, deterministic)
        if outcome is NotImplemented:
            return _torch.attend(tensors, numbers, function, lse, deterministic)
        if outcome is ...:
            return _torch.record(tensors, numbers, function, lse, deterministic)
        raise outcome
    except ValueError:
        copied = _copies.attend(serve, tensors, numbers, function, lse, deterministic)
        if copied is None:
            raise
        return copied
    finally:
        # The error's traceback has this frame: with the error in it, both would keep the tensors.
        del outcome


_flashcore.leave_others_to(_serve_others)


def widen(numbers: Any) -> Any:
    """Converts slopes and sinks, which may have 16 bits, to float32, as the kernels read them."""
    if numbers is None:
        return None
    if is_torch(numbers):
        return _torch.widen(numbers)
    return _arrays.widen(numbers)


class _RareOfRagged(TypedDict, total=False):
    """What ``flash_attn_varlen_func`` takes by keyword."""

    dropout_p: float
    alibi_slopes: Any
    block_table: Any
    s_aux: Any
    learnable_sink: Any
    return_softmax_lse: bool
    out: Any
    fa_version: int | None
    scheduler_metadata: Any
    batch_invariant: bool


_RARE_OF_RAGGED = {
    "dropout_p": 0.0,
    "alibi_slopes": None,
    "block_table": None,
    "s_aux": None,
    "learnable_sink": None,
    "return_softmax_lse": False,
    "out": None,
    "fa_version": None,
    "scheduler_metadata": None,
    "batch_invariant": False,
}


@by_keyword(_RARE_OF_RAGGED)
def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    **rare: Unpack[_RareOfRagged],
) -> Any:
    """Computes attention over sequences of unequal lengths that are packed one after the other.

    The arguments up to ``return_attn_probs`` have FlashAttention-3's names, order and defaults. Arguments of
    FlashAttention-2 and of vLLM's fork, sinks and ``batch_invariant`` are keyword-only. Masks and windows are
    aligned in each sequence: its last query is at the position of its last key. Lengths, starts and page tables
    are int32 tensors on the device of ``q``; on a GPU they are read when the kernel runs, without a
    synchronisation, and out-of-range entries are clamped. In PyTorch and JAX the function has gradients with
    respect to ``q``, ``k``, ``v`` and ``s_aux``, except with ``block_table``.

    Args:
        q: (queries of all sequences, heads, head dim), or (sequences, queries, heads, head dim) without
            ``cu_seqlens_q``. Element types are those of :func:`flash_attn_func`; on a GPU, float16, bfloat16 or
            8-bit.
        k: (keys of all sequences, key heads, head dim), or (sequences, keys, key heads, head dim) without
            ``cu_seqlens_k``, or (pages, page size, key heads, head dim) with ``block_table``.
        v: As ``k``, with a head dim that may differ.
        cu_seqlens_q: (sequences + 1,) in int32: the row of ``q`` at which each sequence begins, and the end of the
            last one.
        cu_seqlens_k: The same for ``k``. With ``block_table`` only the differences are used, as the numbers of
            keys, unless ``seqused_k`` is given.
        max_seqlen_q: An upper bound of the number of queries in a sequence; the rows of ``q`` if None, which is
            correct but slower.
        max_seqlen_k: The same for keys.
        seqused_q: (sequences,) in int32: how many of the queries of each sequence are used. Output rows of the
            others are undefined.
        seqused_k: (sequences,) in int32: how many of the keys of each sequence are used.
        softmax_scale, causal, window_size, attention_chunk, softcap: As in :func:`flash_attn_func`.
        qv: Must be None.
        q_descale, k_descale, v_descale: Factors of 8-bit tensors, as in :func:`flash_attn_func`, with sequences in
            the place of the batch. Two dimensions mean (sequences, key heads) if there are as many packed keys
            as sequences; otherwise (keys of all sequences, key heads) is accepted for factors per token.
        num_splits, pack_gqa, sm_margin: Hints of FlashAttention; checked and ignored.
        deterministic: As in :func:`flash_attn_func`.
        return_attn_probs: Whether to return ``(out, softmax_lse)``.
        dropout_p: Must be 0.0.
        alibi_slopes: (heads,) or (sequences, heads), in float32, float16 or bfloat16; as in
            :func:`flash_attn_func`.
        block_table: (sequences, pages per sequence) in int32: the pages that hold the keys of each sequence.
        s_aux: (heads,), a sink for each head, as in :func:`flash_attn_func`; also as ``learnable_sink``.
        return_softmax_lse: The same as ``return_attn_probs``.
        out: A tensor with the shape and element type of the result, into which it is written; without gradients.
        fa_version, scheduler_metadata: Hints of vLLM's fork; ignored.
        batch_invariant: As in :func:`flash_attn_func`.

    Returns:
        The output, (queries of all sequences, heads, value head dim), or with the dimensions of a padded ``q``, in
        the element type of ``q``, or bfloat16 if ``q`` has 8 bits. With ``return_attn_probs`` or
        ``return_softmax_lse`` a tuple ``(out, softmax_lse)``; the log-sum-exps are (heads, queries of all
        sequences), or (sequences, heads, queries) for a padded ``q``, in float32.

    Raises:
        TypeError: If an argument is not a tensor, or has an unsupported element type.
        ValueError: If shapes do not fit together, or, on the CPU, an entry of a list is out of range.
        NotImplementedError: If ``dropout_p`` or ``qv`` is given, or if no kernel of the device supports the call.

    Example:
        Sequences of 3 and 5 tokens in one tensor::

            starts = torch.tensor([0, 3, 8], dtype=torch.int32, device="cuda")
            q, k, v = torch.randn(3, 8, 4, 64, dtype=torch.bfloat16, device="cuda")
            out = flash_attn_varlen_func(q, k, v, starts, starts, 5, 5, causal=True)      # (8, 4, 64)
    """
    if qv is not None:
        refuse(qv=qv)
    if type(num_splits) is not int or pack_gqa is not None or type(sm_margin) is not int:
        hints(num_splits, pack_gqa, sm_margin)
    if deterministic is not False:
        deterministic = flag("deterministic", deterministic)
    block_table = slopes = sinks = out = None
    function = "flash_attn_varlen_func"
    if rare:
        dropout_p, slopes, block_table, s_aux, sinks, return_softmax_lse, out, _, _, batch_invariant = rarely(
            function, _RARE_OF_RAGGED, rare
        )
        refuse(dropout_p=dropout_p)
        if block_table is not None:
            if seqused_k is None and cu_seqlens_k is not None:
                seqused_k = _lengths(cu_seqlens_k, _sequences(q, cu_seqlens_q))
            cu_seqlens_k = None
        slopes, sinks = widen(slopes), widen(either("s_aux", s_aux, "learnable_sink", sinks))
        if flag("return_softmax_lse", return_softmax_lse):
            return_attn_probs = flag("return_attn_probs", return_attn_probs) or True
        function = invariant(function, batch_invariant)
    tensors: tuple[Any, ...] = (
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        None,
        None,
        block_table,
        slopes,
        sinks,
        q_descale,
        k_descale,
        v_descale,
    )
    if out is not None:
        tensors = (*tensors, out)
    return (serve_compiled if is_compiling() else serve)(
        tensors,
        (softmax_scale, causal, window_size, attention_chunk, softcap, max_seqlen_q, max_seqlen_k),
        function,
        return_attn_probs,
        deterministic,
    )


class _RareOfCaches(TypedDict, total=False):
    """What ``flash_attn_with_kvcache`` takes by keyword."""

    alibi_slopes: Any
    block_table: Any
    s_aux: Any
    learnable_sink: Any
    out: Any
    batch_invariant: bool


_RARE_OF_CACHES = {
    "alibi_slopes": None,
    "block_table": None,
    "s_aux": None,
    "learnable_sink": None,
    "out": None,
    "batch_invariant": False,
}


@by_keyword(_RARE_OF_CACHES)
def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    **rare: Unpack[_RareOfCaches],
) -> Any:
    """Computes attention over a KV cache, after appending new keys and values to it.

    The arguments up to ``return_softmax_lse`` have FlashAttention-3's names, order and defaults. Arguments of
    FlashAttention-2, sinks and ``batch_invariant`` are keyword-only. Lengths, starts and page tables are int32
    tensors on the device of ``q``. On a GPU they are read when the kernel runs, so that they may change between
    replays of a CUDA graph, and out-of-range entries are clamped; on the CPU out-of-range entries are refused.
    The function has no gradients.

    Args:
        q: (sequences, queries, heads, head dim), or (queries of all sequences, heads, head dim) with
            ``cu_seqlens_q``. Element types are those of :func:`flash_attn_func`.
        k_cache: (batch entries, positions, key heads, head dim), or (pages, page size, key heads, head dim) with
            ``page_table``; in the element type of ``q``, float8_e4m3fn, float8_e5m2 or int8. Written in place if
            ``k`` is given.
        v_cache: As ``k_cache``, with a head dim that may differ.
        k: New keys, (sequences, new, key heads, head dim), or (new of all sequences, key heads, head dim) with
            ``cu_seqlens_k_new``, which are written after the first ``cache_seqlens`` positions.
        v: New values, as ``k``, with the head dim of ``v_cache``. Given if and only if ``k`` is.
        qv: Must be None.
        rotary_cos: (positions, rotary dim / 2), in the element type of ``q``. Rotates the first rotary dim columns
            of new keys and of queries by the angle of their position. Queries are rotated like the new keys
            where the call is causal or has a window or chunk, otherwise all by the first new position. Requires
            ``k`` and ``v``.
        rotary_sin: As ``rotary_cos``.
        cache_seqlens: (sequences,) in int32, or an ``int`` for all: the number of positions of each sequence in the
            cache before ``k`` is appended, including left padding. If None, the whole cache is used; required
            with ``k``.
        cache_batch_idx: (sequences,) in int32: the batch entry of the cache, or the row of ``page_table``, that
            each sequence uses; its own index if None.
        cache_leftpad: (sequences,) in int32: the number of positions at the beginning that are not part of the
            sequence.
        page_table: (sequences, pages per sequence) in int32: the pages that hold each sequence. May have more rows
            than there are sequences. ``block_table``, FlashAttention-2's name, is accepted as well.
        cu_seqlens_q: (sequences + 1,) in int32: the row of ``q`` at which each sequence begins, and the end of the
            last one.
        cu_seqlens_k_new: The same for ``k`` and ``v``.
        max_seqlen_q: With ``cu_seqlens_q``, an upper bound of the number of queries in a sequence.
        rotary_seqlens: (sequences,) in int32: the position, for the rotation, of each sequence's first new key;
            ``cache_seqlens`` if None. Ignored without ``rotary_cos``.
        q_descale, k_descale, v_descale: Factors of 8-bit tensors, in float32, as in :func:`flash_attn_func`:
            (sequences, key heads), (key heads,) or (). New rows that are wider than an 8-bit cache are divided
            by these factors and rounded. Factors per token have the shape of the cache without its last
            dimension; those of new rows are computed, and written in place.
        softmax_scale, causal, window_size, attention_chunk, softcap: As in :func:`flash_attn_func`. The last query
            is aligned with the last key, including the new ones.
        rotary_interleaved: Whether columns 0 and 1, 2 and 3, and so on are rotated as pairs (GPT-J); otherwise
            column ``i`` and column ``i + rotary dim / 2`` (GPT-NeoX).
        scheduler_metadata: A result of :func:`get_scheduler_metadata`; checked and ignored.
        num_splits, pack_gqa, sm_margin: Hints of FlashAttention; checked and ignored. Use ``batch_invariant``
            where other libraries need ``num_splits=1`` for results that do not depend on the batch.
        return_softmax_lse: Whether to return ``(out, softmax_lse)``.
        alibi_slopes, s_aux, learnable_sink, out: As in :func:`flash_attn_varlen_func`.
        batch_invariant: As in :func:`flash_attn_func`.

    Returns:
        The output, with the shape of ``q`` but the head dim of ``v_cache``, in the element type of ``q``, or
        bfloat16 if ``q`` has 8 bits. With ``return_softmax_lse`` a tuple ``(out, softmax_lse)``; the log-sum-exps
        are (sequences, heads, queries), or (heads, queries of all sequences) with ``cu_seqlens_q``, in float32.

    Raises:
        TypeError: If an argument is not a tensor, or has an unsupported element type.
        ValueError: If shapes do not fit together, if only one of ``k`` and ``v`` is given, or, on the CPU, if an
            entry of a list is out of range or the new keys do not fit into the cache.
        NotImplementedError: If a tensor requires grad while grad mode is on, if ``qv`` is given, or if no kernel
            of the device supports the call.

    Example:
        One decoding step over a paged cache::

            # q (4, 1, 32, 128); k, v (4, 1, 8, 128); caches (pages, 64, 8, 128); page_table (4, pages per sequence)
            out = flash_attn_with_kvcache(
                q, k_cache, v_cache, k, v, cache_seqlens=lengths, page_table=page_table, causal=True
            )
            lengths += 1
    """
    if qv is not None:
        refuse(qv=qv)
    if type(num_splits) is not int or pack_gqa is not None or type(sm_margin) is not int:
        hints(num_splits, pack_gqa, sm_margin)
    block_table = slopes = sinks = out = None
    function = "flash_attn_with_kvcache"
    if rare:
        slopes, block_table, s_aux, sinks, out, batch_invariant = rarely(function, _RARE_OF_CACHES, rare)
        slopes, sinks = widen(slopes), widen(either("s_aux", s_aux, "learnable_sink", sinks))
        if block_table is not None:
            page_table = either("block_table", block_table, "page_table", page_table)
            function = "flash_attn_with_kvcache, block_table"
        function = invariant(function, batch_invariant)
    if page_table is not None and cache_batch_idx is not None:
        name = "page_table" if block_table is None else "block_table"
        page_table, cache_batch_idx = _chosen_rows(name, page_table, cache_batch_idx), None
    # Whether a tensor is an `int` takes long to find out.
    if type(cache_seqlens) is not _Tensor and isinstance(cache_seqlens, _NUMBERS):
        cache_seqlens = _full("cache_seqlens", _sequences(q, cu_seqlens_q), cache_seqlens, "k_cache", k_cache)
    if scheduler_metadata is not None:
        _check_metadata(scheduler_metadata, _sequences(q, cu_seqlens_q))
    factors = (k_descale, v_descale)
    compiling = is_compiling()
    small = _torch.is_small_float(q) if compiling else _flashcore.is_small_float(q)
    if small and _torch.is_small(k_cache) and _dimensions(k_descale) <= 2:
        pages_are_small = page_table is not None and _dimensions(k_cache) == 4 and k_cache.shape[1] % 8 != 0
        if k is not None or cache_leftpad is not None or pages_are_small or _are_few(q, max_seqlen_q):
            # No kernel multiplies 8 bits here. 16 have the same numbers, and a factor of queries is one of scores.
            q, k, v, rotary_cos, rotary_sin = map(_torch.sixteen_bits, (q, k, v, rotary_cos, rotary_sin))
            factors = (None, None)
            shapes = [(), tuple(k_cache.shape[2:3]), (_sequences(q, cu_seqlens_q), *k_cache.shape[2:3])]
            _torch.check_factors(shapes, q_descale=q_descale, k_descale=k_descale)
            if q_descale is not None:
                q_descale, k_descale = None, q_descale if k_descale is None else k_descale * q_descale
    if k is not None or v is not None:
        rotated, cache_seqlens = _append(
            (
                k_cache,
                v_cache,
                k,
                v,
                q,
                cache_seqlens,
                cu_seqlens_k_new,
                cu_seqlens_q,
                cache_batch_idx,
                page_table,
                rotary_cos,
                rotary_sin,
                None if rotary_cos is None else rotary_seqlens,
                *factors,
            ),
            (rotary_interleaved, causal, window_size, attention_chunk, block_table is not None, max_seqlen_q, None),
        )
        q = q if rotated is None else rotated
    elif rotary_cos is not None or rotary_sin is not None or cu_seqlens_k_new is not None:
        _refuse_without_new(rotary_cos=rotary_cos, rotary_sin=rotary_sin, cu_seqlens_k_new=cu_seqlens_k_new)
    tensors: tuple[Any, ...] = (
        q,
        k_cache,
        v_cache,
        cu_seqlens_q,
        None,
        None,
        cache_seqlens,
        cache_leftpad,
        cache_batch_idx,
        page_table,
        slopes,
        sinks,
        q_descale,
        k_descale,
        v_descale,
    )
    if out is not None:
        tensors = (*tensors, out)
    return (serve_compiled if compiling else serve)(
        tensors,
        (softmax_scale, causal, window_size, attention_chunk, softcap, max_seqlen_q, None),
        function,
        return_softmax_lse,
        False,
    )


def _are_few(q: Any, max_seqlen_q: Any) -> bool:
    """Returns whether there are as few queries as in a decoding step."""
    most = q.shape[1] if _dimensions(q) == 4 else max_seqlen_q
    return not isinstance(most, int) or most < 32


def _append(tensors: tuple[Any, ...], flags: tuple[Any, ...]) -> Any:
    """Appends new keys and values to the cache; returns the rotated queries or None, and the new
    lengths. The last flags are the maximum numbers of queries and of new keys of a sequence."""
    if is_compiling():
        return _torch.append(tensors, flags)
    try:
        result = _flashcore.append(tensors, flags, "function")
        if result is None:
            return _arrays.append(tensors, flags)
        if result is NotImplemented or result is ...:
            return _torch.append(tensors, flags)
        return result
    except ValueError:
        copied = _copies.append(_append, tensors, flags)
        if copied is None:
            raise
        return copied


def _dimensions(tensor: Any) -> int:
    """Returns the number of dimensions of a tensor; 0 for anything else."""
    return len(shape_of(tensor) or ())


def _chosen_rows(name: str, table: Any, rows: Any) -> Any:
    """Selects the rows of a page table that belong to the call's sequences."""
    _check_integers(name, table)
    _check_integers("cache_batch_idx", rows)
    if len(table.shape) != 2 or len(rows.shape) != 1:
        raise ValueError(
            f"{name} and cache_batch_idx have {len(table.shape)} and {len(rows.shape)} dimensions, expected 2 and 1"
        )
    count = table.shape[0]
    if count == 0 and rows.shape[0] > 0:
        raise ValueError(f"{name} has no rows, expected those of cache_batch_idx")
    if is_torch(table) and is_torch(rows):
        return _torch.chosen_rows(name, table, rows)
    if _arrays.is_in_host_memory(rows):
        check_rows(name, rows.tolist(), count)
    elif hasattr(rows, "clip"):
        # On a GPU and inside of JAX's transformations they are clamped, as the other lists are.
        rows = rows.clip(0, max(count - 1, 0))
    return table[rows]


def _refuse_without_new(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} was given without k and v, expected them with it")


def _sequences(q: Any, cu_seqlens_q: Any) -> int:
    """Returns the number of sequences of a call."""
    if cu_seqlens_q is not None:
        return _starts("cu_seqlens_q", cu_seqlens_q)
    shape = getattr(q, "shape", None)
    if shape is None:
        raise TypeError(f"q is a {type(q)}, expected a tensor")
    if len(shape) == 0:
        raise ValueError("q has 0 dimensions, expected 4")
    return int(shape[0])


def _starts(name: str, starts: Any) -> int:
    """Returns the number of sequences of a list of cumulative lengths: one less than its
    entries."""
    _check_integers(name, starts)
    if len(starts.shape) != 1:
        raise ValueError(f"{name} has {len(starts.shape)} dimensions, expected 1")
    if starts.shape[0] == 0:
        raise ValueError(f"{name} is empty, expected a start at least")
    return int(starts.shape[0]) - 1


def _check_integers(name: str, tensor: Any) -> None:
    """Refuses anything but a tensor of int32 without a mask."""
    shape, dtype = shape_of(tensor), getattr(tensor, "dtype", None)
    if shape is None or dtype is None:
        raise TypeError(f"{name} is a {type(tensor)}, expected a tensor of int32")
    if name_of_type(dtype) != "int32" or not getattr(dtype, "isnative", True):
        raise TypeError(f"{name} has element type {dtype}, expected int32")
    if any(kind.__name__ == "MaskedArray" for kind in type(tensor).__mro__):
        raise TypeError(f"{name} is a masked array, expected one without a mask: what it hides would be seen")


def _lengths(cu_seqlens_k: Any, sequences: int) -> Any:
    """Returns the lengths of sequences from cumulative lengths."""
    given = _starts("cu_seqlens_k", cu_seqlens_k)
    if given != sequences:
        raise ValueError(
            f"cu_seqlens_k has {given + 1} entries, expected {sequences + 1} for {sequences} sequences "
            "as cu_seqlens_q has"
        )
    if not hasattr(cu_seqlens_k, "__getitem__"):
        raise TypeError(f"cu_seqlens_k is a {type(cu_seqlens_k)}, expected a tensor that can be indexed")
    if _torch is not None:
        _torch.refuse_odd("cu_seqlens_k", cu_seqlens_k)
    return cu_seqlens_k[1:] - cu_seqlens_k[:-1]


def _full(name: str, count: int, value: int, first: str, like: Any) -> Any:
    """Returns a list of equal numbers for an argument, on the device of another tensor."""
    if not -(2**31) <= value < 2**31:
        raise ValueError(f"{name}={value}, expected a number of 32 bits")
    if is_torch(like):
        return _torch.full(count, value, like)
    if not hasattr(like, "__dlpack__"):
        raise TypeError(f"{first} is a {type(like)}, expected a tensor with __dlpack__")
    return _arrays.full(name, count, value, like)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Any,
    qkv_dtype: Any = None,
    headdim_v: int | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    cache_leftpad: Any = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """Returns a value for the argument ``scheduler_metadata`` of :func:`flash_attn_with_kvcache`.

    This exists for programs written for FlashAttention-3, whose signature it has. FlashCore's kernels derive
    their schedule from the lengths when they run, and do not use the result.

    Args:
        batch_size: The number of sequences.
        cache_seqlens: (batch_size,) in int32.
        max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, qkv_dtype, headdim_v, cu_seqlens_q,
            cu_seqlens_k_new, cache_leftpad, page_size, max_seqlen_k_new, causal, window_size, attention_chunk,
            has_softcap: As in FlashAttention-3; ignored.
        num_splits, pack_gqa, sm_margin: As in FlashAttention-3; checked and ignored.

    Returns:
        (batch_size,) zeros in int32, on the device of ``cache_seqlens``.

    Raises:
        TypeError: If ``batch_size`` is not an integer, or ``cache_seqlens`` not an int32 tensor.
        ValueError: If ``cache_seqlens`` has another shape.
    """
    hints(num_splits, pack_gqa, sm_margin)
    batch_size = whole("batch_size", batch_size)
    _check_integers("cache_seqlens", cache_seqlens)
    if tuple(cache_seqlens.shape) != (batch_size,):
        raise ValueError(f"cache_seqlens has shape {list(cache_seqlens.shape)}, expected [{batch_size}]")
    return _full("batch_size", batch_size, 0, "cache_seqlens", cache_seqlens)


def _check_metadata(metadata: Any, sequences: int) -> None:
    _check_integers("scheduler_metadata", metadata)
    if tuple(metadata.shape) != (sequences,):
        raise ValueError(
            f"scheduler_metadata is not what get_scheduler_metadata gives for {sequences} "
            f"sequences, expected [{sequences}] of int32"
        )


def flash_attn_combine(out_partial: Any, lse_partial: Any, out: Any = None, out_dtype: Any = None) -> Any:
    """Combines results of attention over different parts of the keys, by their log-sum-exps.

    Sums are in float32. The function has no gradients.

    Args:
        out_partial: (parts, batch, queries, heads, head dim) in float32, float16 or bfloat16, or without the batch
            dimension. A row of a part whose log-sum-exp is minus infinity saw no key and is not read.
        lse_partial: (parts, batch, queries, heads) in float32, or without the batch dimension. Note the order:
            the other functions return log-sum-exps as (batch, heads, queries).
        out: A tensor of the result's shape and element type, into which it is written; a new one if None.
        out_dtype: The element type of the result: float16, bfloat16 or float32; that of ``out`` if None, or float32.

    Returns:
        ``(out, softmax_lse)``: (batch, queries, heads, head dim), and (batch, queries, heads) in float32; both
        without the batch dimension if the parts have none.

    Raises:
        TypeError: If an argument is not a tensor, or has an unsupported element type.
        ValueError: If shapes do not fit together.
        NotImplementedError: If a tensor requires grad while grad mode is on.

    Example:
        Attention over two halves of the keys::

            parts = [flash_attn_func(q, k[:, at], v[:, at], return_attn_probs=True)[:2] for at in halves]
            outs, lses = zip(*parts)
            out, lse = flash_attn_combine(
                torch.stack(outs), torch.stack(lses).transpose(2, 3).contiguous(), out_dtype=q.dtype
            )
    """
    for name, tensor in (("out_partial", out_partial), ("lse_partial", lse_partial), ("out", out)):
        if tensor is not None or name != "out":
            _check_sliceable(name, tensor)
    if _dimensions(out_partial) == 4 and _dimensions(lse_partial) == 3:
        if out is not None and _dimensions(out) != 3:
            raise ValueError(f"out has {_dimensions(out)} dimensions, expected 3 like a part")
        into = None if out is None else out[None]
        output, lse = _combine(out_partial[:, None], lse_partial[:, None], into, out_dtype)
        return output[0] if out is None else out, lse[0]
    return _combine(out_partial, lse_partial, out, out_dtype)


def _check_sliceable(name: str, tensor: Any) -> None:
    """Refuses anything but a tensor of a library whose arrays can be indexed and that imports
    results."""
    if is_torch(tensor):
        _torch.refuse_odd(name, tensor)
    elif shape_of(tensor) is None or not hasattr(tensor, "__dlpack__") or not _arrays.can_copy(tensor):
        raise TypeError(f"{name} is a {type(tensor)}, expected a tensor")


def _combine(out_partial: Any, lse_partial: Any, out: Any, out_dtype: Any) -> Any:
    """Combines parts with a batch dimension; head dims wider than the kernel's are taken in
    pieces, and those that are no multiples of 8 filled up."""
    dim = int(out_partial.shape[-1]) if _dimensions(out_partial) else 0
    if not _copies.is_kernels(dim) and out is not None and tuple(out.shape) != tuple(out_partial.shape[1:]):
        raise ValueError(f"out has shape {list(out.shape)}, expected {list(out_partial.shape[1:])}")
    if dim > _copies.WIDEST:
        outputs = []
        for begin in range(0, dim, _copies.WIDEST):
            at = (..., slice(begin, begin + _copies.WIDEST))
            into = None if out is None else out[at]
            output, lse = _combine(out_partial[at], lse_partial, into, out_dtype)
            outputs.append(output)
        return _copies.join(outputs) if out is None else out, lse
    if not _copies.is_kernels(dim):
        if out is not None:
            if is_torch(out):
                _torch.refuse_unwritable("out", out)
            _copies.check_writable("out", out)
        into = None if out is None else _copies.fill(out)
        output, lse = _combine(_copies.fill(out_partial), lse_partial, into, out_dtype)
        if out is None:
            return output[..., :dim], lse
        out[...] = output[..., :dim]
        return out, lse
    name = None if out_dtype is None else name_of_type(out_dtype)
    tensors = (out_partial, lse_partial, out)
    if is_compiling():
        result = _torch.combine(tensors, out_dtype)
    else:
        result = _flashcore.combine(tensors, name, "function")
        if result is None:
            result = _arrays.combine(tensors, name, out_dtype)
        elif result is NotImplemented or result is ...:
            result = _torch.combine(tensors, out_dtype)
    output, lse = result
    return output, lse.swapaxes(1, 2)


def flash_attn_merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    """Combines two results of attention over different keys into one over all of them.

    Uses are a shared prefix and its continuations, or levels of a cascade. The function has no gradients; for
    more than two parts see :func:`flash_attn_combine`.

    Args:
        out_a, out_b: (batch, queries, heads, head dim) or (queries of all sequences, heads, head dim), in float16,
            bfloat16 or float32.
        lse_a, lse_b: (batch, heads, queries) or (heads, queries of all sequences) in float32, as attention
            functions return them.

    Returns:
        ``(out, softmax_lse)``, of the same shapes and element types.

    Raises:
        TypeError: If an argument is not a tensor, or has an unsupported element type.
        ValueError: If shapes do not fit together.
        NotImplementedError: If a tensor requires grad while grad mode is on.

    Example:
        ::

            prefix = flash_attn_func(q, k_prefix, v_prefix, return_attn_probs=True)[:2]
            rest = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[:2]
            out, lse = flash_attn_merge(*prefix, *rest)
    """
    dim = int(out_a.shape[-1]) if _dimensions(out_a) else 0
    if not _copies.is_kernels(dim):
        _check_sliceable("out_a", out_a)
        _check_sliceable("out_b", out_b)
        # Padding would hide it.
        if tuple(out_b.shape) != tuple(out_a.shape):
            raise ValueError(f"out_b has shape {list(out_b.shape)}, expected {list(out_a.shape)} like out_a")
        outputs = []
        for begin in range(0, dim, _copies.WIDEST):
            pieces = [out[..., begin : begin + _copies.WIDEST] for out in (out_a, out_b)]
            width = pieces[0].shape[-1]
            piece_a, piece_b = (_copies.fill(piece) for piece in pieces)
            output, lse = _merge(piece_a, lse_a, piece_b, lse_b)
            outputs.append(output[..., :width])
        return _copies.join(outputs), lse
    return _merge(out_a, lse_a, out_b, lse_b)


def _merge(*tensors: Any) -> Any:
    """Merges results of head dims that kernels have."""
    if is_compiling():
        return _torch.merge(tensors)
    result = _flashcore.merge(tensors, "function")
    if result is None:
        return _arrays.merge(tensors)
    if result is NotImplemented or result is ...:
        return _torch.merge(tensors)
    return result
