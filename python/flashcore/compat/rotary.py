"""FlashAttention-2's modules ``flash_attn.layers.rotary`` and ``flash_attn.ops.triton.rotary``: rotary embeddings.

They are PyTorch's operations, with PyTorch's gradients, on every device. New keys are rotated on the way into a
cache by :func:`flashcore.flash_attn_with_kvcache`, which takes fewer passes over memory.
"""

from __future__ import annotations

from typing import Any

import torch

from .._arguments import refuse, whole
from .._serving import is_compiling

__all__ = [
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
]


def apply_rotary_emb_torch(x: Any, cos: Any, sin: Any, interleaved: bool = False) -> Any:
    """Rotates the first columns of each head by the angles of its position.

    Args:
        x: (batch, length, heads, head dim).
        cos, sin: (length, rotary dim / 2) or (batch, length, rotary dim / 2).
        interleaved: Whether columns 0 and 1, 2 and 3, and so on are rotated as pairs (GPT-J); otherwise column ``i``
            and column ``i + rotary dim / 2`` (GPT-NeoX).

    Returns:
        A tensor like ``x``, computed in float32.

    Raises:
        ValueError: If ``cos`` and ``sin`` do not have the same shape, or more columns than ``x``.
    """
    rotary_dim = _rotary_dim(x, cos, sin)
    return torch.cat((_rotated(x, cos, sin, interleaved), x[..., rotary_dim:]), -1)


def apply_rotary(
    x: Any,
    cos: Any,
    sin: Any,
    seqlen_offsets: Any = 0,
    cu_seqlens: Any = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Any:
    """Rotates the first columns of each head by the angles of its position.

    Args:
        x: (batch, length, heads, head dim), or (rows of all sequences, heads, head dim) with ``cu_seqlens``.
        cos, sin: (positions, rotary dim / 2).
        seqlen_offsets: The position of each sequence's first row, an ``int`` or (batch,) in int32 or int64. With a
            tensor, rows whose position is beyond the tables are not rotated, as in FlashAttention-2.
        cu_seqlens: (batch + 1,) in int32: the row at which each sequence begins, and the end of the last one. Rows
            beyond it are not rotated.
        max_seqlen: The length of the longest sequence; only checked.
        interleaved: As in :func:`apply_rotary_emb_torch`.
        inplace: Whether to write the result into ``x``. Where autograd refuses that, as for parts of ``split``, ``x`` is
            written all the same, as in FlashAttention-2, and gradients are those of what is returned. PyTorch's compiler
            refuses such a call, with autograd's error.
        conjugate: Whether to rotate in the opposite direction, as gradients are.

    Returns:
        ``x`` if ``inplace``, or a view of it where autograd refuses; otherwise a tensor like it, computed in float32.

    Raises:
        TypeError: If ``seqlen_offsets`` is no whole number and no tensor.
        ValueError: If shapes do not fit together, or an ``int`` leads to positions beyond the tables.
    """
    rotated = _turned(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, conjugate)
    rotary_dim = rotated.shape[-1]
    if inplace:
        return _write(x, [(..., slice(rotary_dim))], [rotated])
    return torch.cat((rotated, x[..., rotary_dim:]), -1)


def apply_rotary_emb(
    x: Any,
    cos: Any,
    sin: Any,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Any = 0,
    cu_seqlens: Any = None,
    max_seqlen: int | None = None,
) -> Any:
    """Calls :func:`apply_rotary` with the order of arguments of ``flash_attn.layers.rotary``.

    Args:
        x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen: As in :func:`apply_rotary`.

    Returns:
        As :func:`apply_rotary`.

    Raises:
        ValueError: As :func:`apply_rotary`.
    """
    return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Any,
    cos: Any,
    sin: Any,
    cos_k: Any = None,
    sin_k: Any = None,
    interleaved: bool = False,
    seqlen_offsets: Any = 0,
    num_heads_q: int | None = None,
) -> Any:
    """Rotates queries and keys in place.

    Args:
        qkv: (batch, length, 3, heads, head dim); with ``num_heads_q`` (batch, length, heads + 2 * key heads, head dim),
            in which the heads of queries come first, then those of keys.
        cos_k, sin_k: Tables for the keys; those of the queries if None.
        num_heads_q: The number of query heads.
        cos, sin, interleaved, seqlen_offsets: As in :func:`apply_rotary`.

    Returns:
        ``qkv``.

    Raises:
        ValueError: As :func:`apply_rotary`, and if ``qkv`` has 4 dimensions and ``num_heads_q`` is None.
    """
    heads: tuple[Any, Any]
    if qkv.dim() == 5:
        heads = (0, 1)
    elif num_heads_q is None:
        raise ValueError(f"num_heads_q is None, expected the number of query heads with {qkv.dim()} dimensions of qkv")
    else:
        shared = (qkv.shape[2] - num_heads_q) // 2
        heads = slice(num_heads_q), slice(num_heads_q, num_heads_q + shared)
    tables = ((cos, sin), (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k))
    return _turn_in_place(qkv, heads, tables, interleaved, seqlen_offsets)


def apply_rotary_emb_kv_(kv: Any, cos: Any, sin: Any, interleaved: bool = False, seqlen_offsets: Any = 0) -> Any:
    """Rotates keys in place.

    Args:
        kv: (batch, length, 2, key heads, head dim).
        cos, sin, interleaved, seqlen_offsets: As in :func:`apply_rotary`.

    Returns:
        ``kv``.

    Raises:
        ValueError: As :func:`apply_rotary`.
    """
    return _turn_in_place(kv, (0,), ((cos, sin),), interleaved, seqlen_offsets)


class RotaryEmbedding(torch.nn.Module):  # type: ignore[misc]
    """Rotary embeddings with the angles of RoFormer (https://arxiv.org/abs/2104.09864).

    Args:
        dim: The number of columns of a head that are rotated.
        base: Pair ``i`` turns by ``base ** (-2 * i / dim)`` for each position.
        interleaved: As in :func:`apply_rotary_emb_torch`.
        scale_base: Must be None.
        device: The device of the angles.
    """

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: Any = None, device: Any = None
    ) -> None:
        refuse(scale_base=scale_base)
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, None
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        # Libraries derive classes of their own, and read these and override the methods below.
        self.register_buffer("scale", None, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Any = None
        self._sin_cached: Any = None

    def _compute_inv_freq(self, device: Any = None) -> Any:
        return self.base ** -(torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim)

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Any = None) -> None:
        """Keeps cosines and sines of at least ``seqlen`` positions in ``_cos_cached`` and ``_sin_cached``."""
        # What a compiled program keeps, the next run of its graph overwrites: there, tables are made anew.
        cached = None if is_compiling() else self._cos_cached
        if cached is not None and seqlen <= self._seq_len_cached and (cached.device, cached.dtype) == (device, dtype):
            return
        self._seq_len_cached = seqlen
        # Autograd refuses what was made in inference mode.
        with torch.inference_mode(False):
            positions = torch.arange(seqlen, dtype=torch.float32, device=device)
            # Angles in 16 bits would be those of other positions.
            wide = self.inv_freq.dtype == torch.float32
            angles = torch.outer(positions, self.inv_freq if wide else self._compute_inv_freq(device))
            self._cos_cached, self._sin_cached = angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(
        self,
        qkv: Any,
        kv: Any = None,
        seqlen_offset: Any = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """Rotates queries and keys in place.

        Args:
            qkv: As in :func:`apply_rotary_emb_qkv_`; with ``kv`` the queries, (batch, length, heads, head dim).
            kv: (batch, length, 2, key heads, head dim).
            seqlen_offset: As ``seqlen_offsets`` in :func:`apply_rotary`.
            max_seqlen: The number of positions; required if ``seqlen_offset`` is a tensor.
            num_heads_q: As in :func:`apply_rotary_emb_qkv_`.

        Returns:
            ``qkv``; with ``kv`` the tuple ``(qkv, kv)``.

        Raises:
            ValueError: As :func:`apply_rotary_emb_qkv_`, and if ``max_seqlen`` is missing.
        """
        if max_seqlen is None:
            if isinstance(seqlen_offset, torch.Tensor):
                raise ValueError("max_seqlen is None, expected the number of positions with a tensor seqlen_offset")
            max_seqlen = qkv.shape[1] + seqlen_offset
        self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        tables = self._cos_cached, self._sin_cached
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, *tables, interleaved=self.interleaved, seqlen_offsets=seqlen_offset, num_heads_q=num_heads_q
            )
        q = apply_rotary_emb(qkv, *tables, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, *tables, self.interleaved, seqlen_offset)


def _turned(
    x: Any,
    cos: Any,
    sin: Any,
    seqlen_offsets: Any,
    cu_seqlens: Any = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
) -> Any:
    """Returns the columns that are rotated, with the arguments of :func:`apply_rotary`."""
    _rotary_dim(x, cos, sin)
    positions, used = _positions(x, seqlen_offsets, cu_seqlens)
    count = cos.shape[0]
    if not isinstance(seqlen_offsets, torch.Tensor):
        length = x.shape[1] if cu_seqlens is None else max_seqlen or 0
        if seqlen_offsets < 0 or seqlen_offsets + length > count:
            raise ValueError(
                f"seqlen_offsets={seqlen_offsets} and length {length} are beyond the {count} positions of cos and sin"
            )
    # A rotation by no angle.
    known, at = ((positions >= 0) & (positions < count) & used)[..., None], positions.clamp(0, max(count - 1, 0))
    cos, sin = torch.where(known, cos[at], 1), torch.where(known, sin[at], 0)
    return _rotated(x, cos, -sin if conjugate else sin, interleaved)


def _turn_in_place(x: Any, heads: Any, tables: Any, interleaved: bool, seqlen_offsets: Any) -> Any:
    """Rotates some of the third dimension of a tensor in place, each by tables of its own."""
    chosen = [(slice(None), slice(None), it) for it in heads]
    rotated = [
        _turned(x[it], cos, sin, seqlen_offsets, interleaved=interleaved) for it, (cos, sin) in zip(chosen, tables)
    ]
    return _write(x, [(*it, ..., slice(part.shape[-1])) for it, part in zip(chosen, rotated)], rotated)


def _write(x: Any, places: list[Any], values: list[Any]) -> Any:
    """Writes values into places of a tensor; returns the tensor with their gradients."""
    try:
        for place, value in zip(places, values):
            x[place] = value
    except RuntimeError:
        # Autograd refuses leaves, and views of which there are several, before anything is written.
        return _Written.apply(x, places, *values)
    return x


class _Written(torch.autograd.Function):  # type: ignore[misc]
    """Where autograd cannot record that a tensor was written, what is returned has the gradients of the values."""

    @staticmethod
    def forward(ctx: Any, x: Any, places: list[Any], *values: Any) -> Any:
        ctx.places = places
        for place, value in zip(places, values):
            x[place] = value
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        rest = gradient.clone()
        for place in ctx.places:
            rest[place] = 0
        return rest, None, *(gradient[place] for place in ctx.places)


def _rotary_dim(x: Any, cos: Any, sin: Any) -> int:
    """Returns the number of columns that are rotated."""
    if cos.shape != sin.shape:
        raise ValueError(f"sin has shape {list(sin.shape)}, expected {list(cos.shape)} like cos")
    rotary_dim = 2 * int(cos.shape[-1])
    if rotary_dim > x.shape[-1]:
        raise ValueError(f"cos has {cos.shape[-1]} columns, expected no more than half of the {x.shape[-1]} of x")
    return rotary_dim


def _positions(x: Any, offsets: Any, cu_seqlens: Any) -> Any:
    """Returns the position of each row in its sequence, and which rows belong to one."""
    several = isinstance(offsets, torch.Tensor)
    if not several:
        whole("seqlen_offsets", offsets)
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if several and tuple(offsets.shape) != (sequences,):
        raise ValueError(f"seqlen_offsets has shape {list(offsets.shape)}, expected [{sequences}]")
    expected = 4 if cu_seqlens is None else 3
    if x.dim() != expected:
        raise ValueError(f"x has {x.dim()} dimensions, expected {expected}")
    rows = torch.arange(x.shape[-3], device=x.device)
    if cu_seqlens is None:
        positions = rows + (offsets[:, None] if several else offsets)
        return positions, torch.ones_like(positions, dtype=torch.bool)
    sequence = torch.searchsorted(cu_seqlens[1:].to(rows.dtype), rows, right=True)
    used, sequence = sequence < sequences, sequence.clamp(max=max(sequences - 1, 0))
    return rows - cu_seqlens[sequence] + (offsets[sequence] if several else offsets), used


def _rotated(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Returns the first columns of ``x``, rotated; cosines and sines have no dimension of heads."""
    cos, sin = cos.float()[..., None, :], sin.float()[..., None, :]
    pairs = x[..., : 2 * cos.shape[-1]].float()
    at = -1 if interleaved else -2
    first, second = pairs.unflatten(-1, (-1, 2) if interleaved else (2, -1)).unbind(at)
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), at)
    return rotated.flatten(-2).to(x.dtype)
