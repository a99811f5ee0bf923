"""Attention with masks and scores that are functions, with FlexAttention's signature."""

from __future__ import annotations

import copy
import functools
import math
import operator
import weakref
from typing import Any, NamedTuple

from . import _arrays, _copies, _flashcore, _patterns
from ._arguments import NO_RULES, flag, refusal, shape_of, shown, whole
from ._serving import is_compiling
from ._trace import check_arguments, check_contents, trace

try:
    from . import _flex_torch as _flex_torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    _flex_torch = None  # type: ignore[assignment]


class AuxRequest(NamedTuple):
    """What :func:`flex_attention` is asked for beside the output, as ``return_aux``. PyTorch's own will do too."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """What :func:`flex_attention` gives beside the output, where ``return_aux`` asks for it."""

    lse: Any = None
    max_scores: Any = None


def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """``softmax(score_mod(scale * query @ key^T) where block_mask) @ value``, with PyTorch's signature.

    Args:
        query: (batch, heads, queries, head dim).
        key: (batch, key heads, keys, head dim). Key heads divide heads with ``enable_gqa``, and are as
            many otherwise.
        value: (batch, key heads, keys, value head dim).
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)`` gives what the softmax takes the exponential
            of. It is called once with values that remember what is done with them, and never again.
        block_mask: Which keys a query sees: what :func:`create_block_mask` gives, or PyTorch's own.
        scale: ``1 / sqrt(head dim)`` unless given.
        return_lse: Return ``(out, lse)``.
        kernel_options: Not needed, and not looked at: hints for PyTorch's own kernels.
        return_aux: An :class:`AuxRequest`: return ``(out, aux)``, with ``aux.lse`` where it asks for it. Not together
            with ``return_lse``.

    Returns:
        (batch, heads, queries, value head dim) in the element type of ``query``; with ``return_lse`` also
        the log-sum-exp of each row of scores, (batch, heads, queries) in float32. A row that sees no key is
        zero with a log-sum-exp of minus infinity.
    """
    if is_compiling():
        # Functions are traced outside of what is compiled.
        from ._outside import call

        arguments = (query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse)
        return call(flex_attention, *arguments, return_aux=return_aux)
    if return_aux is not None:
        if not hasattr(return_aux, "lse"):
            raise TypeError(f"return_aux is a {type(return_aux)}, expected an AuxRequest")
        if return_lse:
            raise ValueError("return_aux was given with return_lse=True, expected one of the two")
        if getattr(return_aux, "max_scores", False):
            raise refusal("return_aux.max_scores", True, False)
        wanted = bool(getattr(return_aux, "lse", False))
        found = flex_attention(query, key, value, score_mod, block_mask, scale, enable_gqa, wanted)
        return (found[0], AuxOutput(found[1], None)) if wanted else (found, AuxOutput(None, None))
    if enable_gqa is False or not flag("enable_gqa", enable_gqa):
        refuse_groups(query, key)
    mask = score = blocks = None
    tensors: tuple[Any, ...] = ()
    if block_mask is not None:
        if not isinstance(block_mask, BlockMask):
            block_mask = _of_pytorch(block_mask)
        block_mask.check(query, key)
        mask, tensors = block_mask.rule()
        blocks = block_mask.blocks
    if score_mod is not None:
        score, captured = trace("score", "score_mod", score_mod)
        tensors = (*tensors, *captured)
    return attend((query, key, value), (scale, *NO_RULES), "flex_attention", return_lse, (mask, score, tensors, blocks))


def attend(
    tensors: tuple[Any, ...],
    numbers: tuple[Any, ...],
    function: str,
    lse: bool,
    rules: tuple[Any, ...],
    deterministic: bool = False,
) -> Any:
    """Computes attention with mask and score functions; returns the output, or output and
    log-sum-exps."""
    if is_compiling():
        copied = _copies.attend(_with(rules), tensors, numbers, function, lse, deterministic)
        return _flex_torch.attend(tensors, numbers, function, lse, rules, deterministic) if copied is None else copied
    try:
        result = _flashcore.attend(tensors, numbers, function, lse, "function", rules)
        if result is None:
            return _arrays.attend(tensors, numbers, function, lse, rules=rules)
        if result is NotImplemented or result is ...:
            return _flex_torch.attend(tensors, numbers, function, lse, rules, deterministic)
        return result
    except ValueError:
        copied = _copies.attend(_with(rules), tensors, numbers, function, lse, deterministic)
        if copied is None:
            raise
        return copied


def _with(rules: tuple[Any, ...]) -> Any:
    """Returns :func:`attend` with functions, as :func:`_copies.attend` calls it."""
    return lambda tensors, numbers, function, lse, deterministic: attend(
        tensors, numbers, function, lse, rules, deterministic
    )


# Those of PyTorch that were seen, as ours, with what they were made of then.
_known: Any = weakref.WeakKeyDictionary()


def _of_pytorch(theirs: Any) -> BlockMask:
    """Converts PyTorch's own block mask: its lists of blocks, and its function within them."""
    found = None if _flex_torch is None else _flex_torch.block_lists(theirs)
    if found is None:
        raise TypeError(f"block_mask is a {type(theirs)}, expected what flashcore.create_block_mask gives")
    lists, versions = found
    ours, made_of, then = _known.get(theirs, (None, (), None))
    # Its lists and its function are attributes, which a program may change.
    if ours is None or versions != then or not all(map(operator.is_, lists, made_of)):
        ours = BlockMask.from_kv_blocks(*lists)
        _known[theirs] = (ours, lists, versions)
    return ours  # type: ignore[no-any-return]


def has_groups(query: Any, key: Any) -> bool:
    """Returns whether there are other numbers of key heads than of query heads."""
    # Each look at a shape makes a new one.
    given, expected = shape_of(key), shape_of(query)
    if given is None or expected is None:
        return False  # no tensors, which is said later
    return bool(len(given) == len(expected) == 4 and given[1] != expected[1])


def refuse_groups(query: Any, key: Any) -> None:
    """Refuses fewer key heads than query heads."""
    if has_groups(query, key):
        heads, expected = key.shape[1], query.shape[1]
        raise ValueError(f"key has {heads} heads, expected the {expected} of query unless enable_gqa=True")


def _blocks(tensors: tuple[Any, ...]) -> Any:
    """Lists that stay with a mask, where a GPU finds them."""
    return _flashcore.Blocks() if any(getattr(tensor, "is_cuda", False) for tensor in tensors) else None


class BlockMask:
    """Which keys queries see.

    Blocks of keys that nobody sees are not loaded. They are found when a kernel is first launched, from the
    function and, on a GPU, from what its tensors contain then. Nothing is copied to the host for it.
    """

    def __init__(
        self,
        mask_mod: Any,
        B: int | None,
        H: int | None,
        lengths: tuple[int, int],
        size: tuple[int, int] = (128, 128),
        argument: str = "mask_mod",
    ) -> None:
        self.seq_lengths = lengths
        self.shape = (1 if B is None else B, 1 if H is None else H, *lengths)
        # Kernels have blocks of their own: these are what is said of the mask by.
        self.BLOCK_SIZE = size
        self._use(mask_mod, argument)

    @property
    def mask_mod(self) -> Any:
        """The function; another one may take its place."""
        return self._mask_mod

    @mask_mod.setter
    def mask_mod(self, mask_mod: Any) -> None:
        self._use(mask_mod, "mask_mod")

    def _use(self, mask_mod: Any, argument: str) -> None:
        rule, tensors = trace("mask", argument, mask_mod)
        self._mask_mod, self.text = mask_mod, rule.text
        # What is known of the function before belongs to that one.
        self._moved: tuple[Any, tuple[Any, ...]] | None = None
        self.blocks = _blocks(tensors)

    def rule(self) -> tuple[Any, tuple[Any, ...]]:
        """The mask as a rule, and its tensors."""
        if self._moved is None:
            return trace("mask", "mask_mod", self.mask_mod)
        check_contents("mask_mod", self._moved[1])
        return self._moved

    def to(self, device: Any) -> BlockMask:
        """The mask with its tensors on a device. Those that are there already are shared."""
        rule, tensors = self.rule()
        mask = copy.copy(self)
        mask._moved = (rule, tuple(tensor.to(device) for tensor in tensors))
        mask.blocks = _blocks(mask._moved[1])
        return mask

    def __getitem__(self, index: Any) -> BlockMask:
        """The mask of some of its sequences and heads, by numbers and slices of both. Both dimensions stay, as in
        PyTorch; the function stays too, and knows of which sequences and heads it is asked."""
        given = index if isinstance(index, tuple) else (index,)
        if any(not isinstance(it, slice) or it != slice(None) for it in given[2:]):
            raise NotImplementedError("block_mask[...] chooses queries, expected sequences and heads alone")
        whole = (slice(None),) * 2
        batch, heads = (_chosen(it, size) for it, size in zip((*given[:2], *whole[len(given) :]), self.shape))
        of, (sequences, of_heads) = self.mask_mod, self.shape[:2]

        def part(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return of(_at(batch, b, sequences), _at(heads, h, of_heads), q_idx, kv_idx)

        mask = BlockMask(part, len(batch), len(heads), self.seq_lengths, self.BLOCK_SIZE)
        if self._moved is None or not self._moved[1]:
            return mask
        return mask.to(self._moved[1][0].device)

    def numel(self) -> int:
        """Pairs of queries and keys, of all sequences and heads that it was made for."""
        return math.prod(self.shape)

    def to_dense(self) -> Any:
        """Which blocks of ``BLOCK_SIZE`` some pair is seen of: (B, H, rows, columns) in int32, of PyTorch."""
        rule, tensors = self.rule()
        return _flex_torch.blocks_seen(rule.text, tensors, self.shape, self.BLOCK_SIZE)

    def sparsity(self) -> float:
        """Of a hundred blocks of ``BLOCK_SIZE``, how many nobody sees."""
        return 100.0 - 100.0 * float(self.to_dense().float().mean())

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Any,
        kv_indices: Any,
        full_kv_num_blocks: Any = None,
        full_kv_indices: Any = None,
        BLOCK_SIZE: Any = 128,
        mask_mod: Any = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
    ) -> BlockMask:
        """The mask of lists of key blocks, with PyTorch's signature.

        Args:
            kv_num_blocks: How many blocks of keys each block of queries sees, (batch, heads, rows); of one sequence or
                head for all of them.
            kv_indices: Which, (batch, heads, rows, columns): the first ones of each list count.
            full_kv_num_blocks, full_kv_indices: The same of blocks that are seen whole, whatever ``mask_mod`` says.
            BLOCK_SIZE: Queries and keys of a block; any number.
            mask_mod: Which pairs of the first lists are seen: all unless given.
            seq_lengths: Queries and keys; as many as the lists have room for unless given.
            compute_q_blocks: Not needed: gradients find theirs.
        """
        size = _patterns.sizes("BLOCK_SIZE", BLOCK_SIZE)
        if mask_mod is not None:
            check_arguments("mask", "mask_mod", mask_mod)
        lists: list[Any] = [("kv", kv_num_blocks, kv_indices)]
        if full_kv_num_blocks is not None or full_kv_indices is not None:
            lists.append(("full_kv", full_kv_num_blocks, full_kv_indices))
        for name, counts, indices in lists:
            for argument, given, rank in ((f"{name}_num_blocks", counts, 3), (f"{name}_indices", indices, 4)):
                _patterns.check_list(argument, given, rank, kv_indices)
            if tuple(indices.shape[:3]) != tuple(kv_num_blocks.shape) or counts.shape != kv_num_blocks.shape:
                raise ValueError(
                    f"{name}_indices has shape {tuple(indices.shape)}, expected {(*kv_num_blocks.shape, 'any')}"
                )
        if seq_lengths is not None:
            seq_lengths = _patterns.sizes("seq_lengths", seq_lengths, 0)
        else:
            seq_lengths = (kv_indices.shape[2] * size[0], kv_indices.shape[3] * size[1])
        rows, columns = (-(-length // step) for length, step in zip(seq_lengths, size))
        if rows != kv_num_blocks.shape[2]:
            raise ValueError(
                f"kv_num_blocks has {kv_num_blocks.shape[2]} rows, expected {rows} for {seq_lengths[0]} queries"
            )
        for name, counts, indices in lists:
            _patterns.check_bounds(f"{name}_indices", indices, columns, counts)
        whole = (full_kv_num_blocks, full_kv_indices) if len(lists) > 1 else None
        mask = _patterns.of_lists((kv_num_blocks, kv_indices), whole, size, columns, mask_mod)
        batch, heads = (None if count == 1 else count for count in kv_num_blocks.shape[:2])
        return cls(mask, batch, heads, seq_lengths, size)

    @classmethod
    def from_bcsr(
        cls, indptr: Any, indices: Any, block_size: Any, seq_lengths: tuple[int, int], mask: Any = None
    ) -> BlockMask:
        """The mask of compressed rows of blocks, the same for all sequences and heads.

        Args:
            indptr: Where the list of each block of queries begins, and where the last ends: (rows + 1).
            indices: The blocks of keys that they see, one list after the other.
            block_size: Queries and keys of a block; any number.
            seq_lengths: Queries and keys.
            mask: Which pairs of each block of the list are seen, (blocks, queries, keys) in bool: all unless given.
        """
        size = _patterns.sizes("block_size", block_size)
        seq_lengths = _patterns.sizes("seq_lengths", seq_lengths, 0)
        for argument, given in (("indptr", indptr), ("indices", indices)):
            _patterns.check_list(argument, given, 1, indices)
        rows, columns = (-(-length // step) for length, step in zip(seq_lengths, size))
        if len(indptr.shape) != 1 or indptr.shape[0] != rows + 1:
            raise ValueError(f"indptr has shape {tuple(indptr.shape)}, expected ({rows + 1},)")
        _patterns.check_starts("indptr", indptr, indices.shape[0])
        if mask is not None:
            _patterns.check_list("mask", mask, 3, indices, ("bool",))
        if mask is not None and tuple(mask.shape) != (indices.shape[0], *size):
            raise ValueError(f"mask has shape {tuple(mask.shape)}, expected {(indices.shape[0], *size)}")
        _patterns.check_bounds("indices", indices, columns)
        return cls(_patterns.of_rows(indptr, indices, size, (rows, columns), mask), None, None, seq_lengths, size)

    def __repr__(self) -> str:
        return f"BlockMask(shape={self.shape}, {self.text})"

    def check(self, query: Any, key: Any) -> None:
        """Refuses tensors that it was not made for."""
        given: Any = shape_of(query) or ()
        other: Any = shape_of(key) or ()
        if len(given) != 4 or len(other) != 4:
            return  # which is said later
        if (given[2], other[2]) != self.seq_lengths:
            raise ValueError(
                f"block_mask is for {self.seq_lengths[0]} queries and {self.seq_lengths[1]} keys, expected the "
                f"{given[2]} of query and the {other[2]} of key"
            )
        for name, has, size in (("B", self.shape[0], given[0]), ("H", self.shape[1], given[1])):
            if has not in (1, size):
                raise ValueError(f"block_mask is for {name}={has}, expected {name}={size} or None")


def _chosen(index: Any, size: int) -> range:
    """Which of so many sequences or heads an index means."""
    if isinstance(index, slice):
        return range(*index.indices(size))
    if not isinstance(index, int) or isinstance(index, bool):
        raise NotImplementedError(f"block_mask[...] has {shown(index)}, expected numbers and slices")
    if not -size <= index < size:
        raise IndexError(f"block_mask[...] has index {index}, expected one from {-size} to {size - 1}")
    return range(index % size, index % size + 1)


def _at(chosen: range, number: Any, size: int) -> Any:
    """Which sequence or head of the whole mask is one of those that were chosen. One alone is there for all."""
    if chosen == range(size):
        return number
    return number * 0 + chosen[0] if len(chosen) == 1 else number * chosen.step + chosen.start


def create_block_mask(
    mask_mod: Any,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: Any = 128,
    _compile: bool = False,
) -> BlockMask:
    """Which keys queries see, for :func:`flex_attention`, with PyTorch's signature.

    Args:
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)`` says whether a query sees a key. It is called once, as
            ``score_mod`` is.
        B, H: Sequences and query heads, or None.
        Q_LEN, KV_LEN: Queries and keys.
        BLOCK_SIZE: What :meth:`BlockMask.to_dense` and :meth:`BlockMask.sparsity` count in, a number or one of queries
            and one of keys. Kernels have blocks of their own.
        device, _compile: Not needed.
    """
    return _of_function("mask_mod", mask_mod, (B, H, Q_LEN, KV_LEN), _patterns.sizes("BLOCK_SIZE", BLOCK_SIZE))


def _of_function(
    argument: str, mask_mod: Any, sizes: tuple[Any, ...], blocks: tuple[int, int] = (128, 128)
) -> BlockMask:
    """Makes the mask of a function; errors call it by the name ``argument``."""
    B, H, queries, keys = (_size(name, size) for name, size in zip(("B", "H", "Q_LEN", "KV_LEN"), sizes))
    return BlockMask(mask_mod, B, H, (queries, keys), blocks, argument)


def _size(name: str, value: Any) -> Any:
    """A number of sequences or heads, or None for any, or of queries or keys."""
    if value is None and name in ("B", "H"):
        return None
    # One of PyTorch's compiler stays what it is.
    if type(value).__name__ != "SymInt":
        value = whole(name, value)
        if value < 0:
            raise ValueError(f"{name}={value}, expected no negative number")
        if value >= 2**31:
            raise ValueError(f"{name}={value}, expected a number of 31 bits")
    return value


def create_mask(mod_fn: Any, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None) -> Any:
    """Which keys queries see, pair by pair: (B, H, Q_LEN, KV_LEN) in bool, of PyTorch.

    Args:
        mod_fn: A mask as for :func:`create_block_mask`.
        B, H: Sequences and query heads; None for one.
        Q_LEN, KV_LEN: Queries and keys.
        device: That of the mask's tensors unless given.
    """
    if _flex_torch is None:
        raise NotImplementedError("mod_fn is evaluated by PyTorch, which is not installed")
    device = _flex_torch.device_of("device", device)
    mask = _of_function("mod_fn", mod_fn, (B, H, Q_LEN, KV_LEN))
    mask = mask if device is None else mask.to(device)
    rule, tensors = mask.rule()
    return _flex_torch.pairs_seen(rule.text, tensors, mask.shape, device)


def and_masks(*mask_mods: Any) -> Any:
    """A mask that sees what all see."""
    return _combined(mask_mods, all_see)


def or_masks(*mask_mods: Any) -> Any:
    """A mask that sees what any sees."""
    return _combined(mask_mods, any_sees)


def all_see(seen: Any) -> Any:
    return functools.reduce(lambda a, b: a & b, seen, True)


def any_sees(seen: Any) -> Any:
    return functools.reduce(lambda a, b: a | b, seen, False)


def _combined(mask_mods: tuple[Any, ...], combine: Any) -> Any:
    for mask_mod in mask_mods:
        if not callable(mask_mod):
            raise TypeError(f"a mask is a {type(mask_mod)}, expected a function")

    def masks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return combine([mask_mod(b, h, q_idx, kv_idx) for mask_mod in mask_mods])

    return masks


# ---- attn_mask of scaled_dot_product_attention ---------------------------------------------------------

_SYMBOLS = ("batch", "head", "query", "key")
_STORED = {"bool": "bool", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def mask_rules(
    attn_mask: Any, query: Any, key: Any, argument: str = "attn_mask", softcap: float | None = None
) -> tuple[Any, ...]:
    """Converts a mask tensor to rules: booleans say which pairs are visible, numbers are added to
    scores, after a softcap if there is one. Errors call it by the name ``argument``."""
    shape = shape_of(attn_mask)
    if shape is None or not hasattr(attn_mask, "__dlpack__") or not hasattr(attn_mask, "__getitem__"):
        raise TypeError(f"{argument} is a {type(attn_mask)}, expected a tensor")
    if _flex_torch is not None:
        _flex_torch.refuse_odd(argument, attn_mask)
    stored = _STORED.get(str(attn_mask.dtype).removeprefix("torch."))
    if stored is None:
        expected = ", ".join(_STORED)
        raise TypeError(f"{argument} has element type {attn_mask.dtype}, expected one of {expected}")
    for name, tensor in (("query", query), ("key", key)):
        if len(shape_of(tensor) or ()) != 4:
            raise ValueError(
                f"{name} is a {type(tensor)} of shape {shape_of(tensor)}, expected a tensor of 4 dimensions"
            )
    scores = (*query.shape[:3], key.shape[2])
    padded = (1,) * (4 - len(shape)) + tuple(shape)
    # Sizes may be those of PyTorch's compiler, which are not found in a tuple.
    if len(padded) != 4 or any(given != 1 and given != size for given, size in zip(padded, scores)):
        raise ValueError(f"{argument} has shape {list(shape)}, expected one that broadcasts to {list(scores)}")
    if any(size == 0 for size in scores):
        if getattr(attn_mask, "is_meta", False) and not getattr(query, "is_meta", False):
            raise ValueError(f"{argument} is on meta, expected memory like query")
        # There is nothing that it says anything of. The gradient of one that requires it is zero, not missing.
        if not getattr(attn_mask, "requires_grad", False):
            return None, None, (), None
        attn_mask, shape, padded = attn_mask.sum(), (), (1,) * 4
    # Dimensions of one are not indexed.
    several = tuple(size > 1 for size in padded)
    if len(shape) and not all(several):
        # With an ellipsis NumPy gives an array without dimensions where it would give a number.
        attn_mask = attn_mask[(..., *(slice(None) if it else 0 for it in several[4 - len(shape) :]))]
    rule: Any = _text(argument, stored, several, softcap)
    if not is_compiling():
        rule = _rule(rule)
    return (rule, None, (attn_mask,), None) if stored == "bool" else (None, rule, (attn_mask,), None)


_rule = functools.lru_cache(256)(_flashcore.Rule)
# Query i sees the keys up to i, counted from the first of both or from the last.
_UPPER_LEFT = "(mask causal_upper_left (le key query))"
_LOWER_RIGHT = "(mask causal_lower_right (le (sub key key_length) (sub query query_length)))"


def causal_bias(attn_mask: Any, query: Any, key: Any) -> tuple[Any, ...] | None:
    """Converts one of PyTorch's causal biases to rules; None for other masks. Such a bias is a tensor whose memory
    is never written: its class says what it stands for."""
    bias = None if _flex_torch is None else _flex_torch.causal_bias(attn_mask)
    if bias is None:
        return None
    lower_right, lengths = bias
    given, expected = (shape_of(query) or ())[-2:-1], (shape_of(key) or ())[-2:-1]
    if lengths != (*given, *expected):
        raise ValueError(f"attn_mask is a causal bias of {list(lengths)}, expected {[*given, *expected]}")
    rule: Any = _LOWER_RIGHT if lower_right else _UPPER_LEFT
    return (rule if is_compiling() else _rule(rule), None, (), None)


def softcap_rule(softcap: float) -> Any:
    """Converts a softcap to the rule of scores that there are no numbers to add to."""
    rule = f"(score softcap {_capped(softcap)})"
    return rule if is_compiling() else _rule(rule)


def _capped(softcap: float) -> str:
    return f"(mul {softcap!r} (tanh (div score {softcap!r})))"


def _text(name: str, stored: str, several: tuple[bool, ...], softcap: float | None) -> str:
    indices = [symbol for symbol, it in zip(_SYMBOLS, several) if it] or ["0"]
    declared, load = f"(tensor {name} {stored} {len(indices)})", f"(load {name} {' '.join(indices)})"
    if stored == "bool":
        return f"(mask {name} {declared} {load})"
    score = _capped(float(softcap)) if softcap else "score"
    return f"(score {name} {declared} (add {score} {load}))"
