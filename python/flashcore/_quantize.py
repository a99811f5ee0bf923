"""Conversion to 8-bit tensors and back, with the factors that attention takes as ``q_descale`` and the like."""

from __future__ import annotations

from typing import Any

from ._arguments import name_of_type, shape_of, shown, whole
from ._arrays import _namespace
from ._installed import is_torch, torch

# The largest number of each type.
_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
# Magnitudes are taken for this much at least, so that every factor has a reciprocal.
_LEAST = 1e-12
_WIDE = ("float16", "bfloat16", "float32", "float64")
_PER = ("tensor", "head", "sequence", "token")


def quantize(x: Any, dtype: Any = "float8_e4m3fn", *, per: str = "head", kv_heads: int | None = None) -> Any:
    """Converts a tensor to 8 bits: ``x`` is approximately ``x8 * descale``.

    A factor is the largest magnitude of the elements that share it, divided by the largest number of the 8-bit
    type; elements are rounded to nearest and saturate.

    Args:
        x: (batch, length, heads, head dim) or, packed, (rows, heads, head dim), in float16, bfloat16, float32 or
            float64, which is rounded to float32 first.
        dtype: ``float8_e4m3fn``, ``float8_e5m2`` or ``int8``, as a name or as an element type of the library of
            ``x``. ``int8``, for keys and values only, has the range -127 to 127; NaN becomes 0.
        per: Which elements share a factor: ``"tensor"`` all, ``"head"`` those of a head, ``"sequence"`` those of a
            head in a batch entry (not for packed tensors), ``"token"`` those of a head in a row.
        kv_heads: For queries, the number of key heads: query heads that use the same key head then share a factor.
            The heads of ``x`` if None.

    Returns:
        ``(x8, descale)``: a tensor of the shape of ``x``, and factors in float32 of shape () per tensor, (heads,)
        per head, (batch, heads) per sequence, or the shape of ``x`` without its last dimension per token, with
        ``kv_heads`` in the place of heads.

    Raises:
        TypeError: If ``x`` is not a dense tensor of floating-point numbers.
        ValueError: If its shape, ``dtype``, ``per`` or ``kv_heads`` is not one of the above.
    """
    return _quantized("x", x, dtype, per, kv_heads)


def _quantized(argument: str, x: Any, dtype: Any, per: Any, kv_heads: Any = None) -> Any:
    """Quantizes a tensor; errors call it by the name ``argument``."""
    _check(argument, x)
    name, kind = _type(x, dtype)
    if len(x.shape) not in (3, 4):
        raise ValueError(f"{argument} has {len(x.shape)} dimensions, expected 3 or 4: (batch, length, heads, head dim)")
    heads = x.shape[-2]
    shared = heads if kv_heads is None else whole("kv_heads", kv_heads)
    if not 1 <= shared <= heads or heads % shared != 0:
        raise ValueError(f"{argument} has {heads} heads, expected a multiple of kv_heads={kv_heads}")
    if not isinstance(per, str) or per not in _PER:
        raise ValueError(f"per={shown(per)}, expected one of {', '.join(_PER)}")
    if per == "sequence" and len(x.shape) == 3:
        raise ValueError(
            f"per='sequence' needs {argument} with a dimension of the batch: (batch, length, heads, head dim)"
        )
    grouped = _float32(x).reshape((*x.shape[:-2], shared, heads // shared, x.shape[-1]))
    last = len(grouped.shape) - 1
    axes = {
        "tensor": tuple(range(last + 1)),
        "head": (*range(last - 2), last - 1, last),
        "sequence": (1, last - 1, last),
        "token": (last - 1, last),
    }[per]
    factors = _least(_largest(abs(grouped), axes)) * _number(1.0 / _LARGEST[name], grouped)
    shape = tuple(1 if axis in axes else size for axis, size in enumerate(grouped.shape))
    small = _cast((grouped * (1.0 / factors.reshape(shape))).reshape(x.shape), kind, _LARGEST[name])
    # A number is no array to NumPy.
    return small, factors if is_torch(x) else _namespace(x).asarray(factors)


def quantize_kv(k: Any, v: Any, dtype: Any = "float8_e4m3fn", *, per: str = "head") -> Any:
    """Converts keys and values to 8 bits, each by :func:`quantize`.

    Args:
        k: (batch, keys, key heads, head dim) or (rows, key heads, head dim), in float16, bfloat16, float32 or
            float64.
        v: The same, with a head dim that may differ.
        dtype, per: As in :func:`quantize`.

    Returns:
        ``(k8, v8, k_descale, v_descale)``, as :func:`flash_attn_func` and the functions for serving take them.

    Raises:
        TypeError, ValueError: As in :func:`quantize`.

    Example:
        >>> import numpy as np
        >>> import flashcore
        >>> rng = np.random.default_rng(0)
        >>> q, k, v = (rng.standard_normal((1, 100, 8, 64)).astype(np.float32) for _ in range(3))
        >>> k8, v8, k_descale, v_descale = flashcore.quantize_kv(k, v, per="token")
        >>> out = flashcore.flash_attn_func(q, k8, v8, k_descale=k_descale, v_descale=v_descale)
        >>> bool(abs(out - flashcore.flash_attn_func(q, k, v)).max() < 0.1)
        True
    """
    k8, k_descale = _quantized("k", k, dtype, per)
    v8, v_descale = _quantized("v", v, dtype, per)
    return k8, v8, k_descale, v_descale


def dequantize(x: Any, descale: Any, dtype: Any = None) -> Any:
    """Multiplies an 8-bit tensor by its factors.

    Args:
        x: (batch, length, heads, head dim) or (rows, heads, head dim), in float8_e4m3fn, float8_e5m2 or int8.
        descale: Factors on the device of ``x``, of shape (), (heads,), (batch, heads), or the shape of ``x`` without
            its last dimension, with heads or a number that divides them: query heads may share factors.
        dtype: The element type of the result, of the library of ``x``; float32 if None.

    Returns:
        A tensor of the shape of ``x``.

    Raises:
        TypeError: If an argument is not a tensor of such elements, or ``dtype`` not an element type.
        ValueError: If the shapes do not fit together, or the devices differ.
    """
    _check("x", x, _LARGEST)
    _check("descale", descale)
    if is_torch(x) != is_torch(descale):
        raise TypeError(f"descale is a {type(descale)}, expected a tensor like x")
    if is_torch(x) and x.device != descale.device:
        raise ValueError(f"descale is on {descale.device}, expected {x.device} like x")
    if len(x.shape) not in (3, 4):
        raise ValueError(f"x has {len(x.shape)} dimensions, expected 3 or 4: (batch, length, heads, head dim)")
    if not is_torch(x):
        # NumPy's matrices multiply otherwise.
        x, descale = _namespace(x).asarray(x), _namespace(x).asarray(descale)
    wide, descale, shape = _float32(x), _float32(descale), tuple(descale.shape)
    *rows, heads, _ = x.shape
    if shape in ((), (1,)):
        factors = descale.reshape((1,) * len(x.shape))
    elif shape == tuple(x.shape[:-1]):
        factors = descale.reshape((*shape, 1))
    elif shape[:-1] == tuple(rows) and shape[-1] and heads % shape[-1] == 0:
        factors = _repeated(descale, heads // shape[-1]).reshape((*rows, heads, 1))
    elif len(shape) == 1 and shape[0] and heads % shape[0] == 0:
        factors = _repeated(descale, heads // shape[0]).reshape((*(1 for _ in rows), heads, 1))
    elif len(shape) == 2 and len(rows) == 2 and shape[0] == rows[0] and shape[1] and heads % shape[1] == 0:
        factors = _repeated(descale, heads // shape[1]).reshape((rows[0], 1, heads, 1))
    else:
        raise ValueError(
            f"descale has shape {list(shape)}, expected [], [{heads}], [{rows[0]}, {heads}] or "
            f"{list(x.shape[:-1])} for x of shape {list(x.shape)}"
        )
    result = wide * factors
    if dtype is None:
        return result
    try:
        return result.to(dtype=dtype) if is_torch(x) else result.astype(dtype)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"dtype={shown(dtype)} is no element type of numbers ({error}), expected one of the library of x"
        ) from None


def _check(name: str, x: Any, kinds: Any = ()) -> None:
    """Refuses anything but a tensor of floating-point numbers, or of the other named kinds."""
    shape, dtype = shape_of(x), getattr(x, "dtype", None)
    odd = is_torch(x) and (x.layout is not torch.strided or x.is_quantized)
    known = is_torch(x) or (hasattr(x, "__dlpack__") and hasattr(_namespace(x), "asarray"))
    if shape is None or dtype is None or odd or not known:
        raise TypeError(f"{name} is a {type(x)}, expected a dense tensor")
    if any(kind.__name__ == "MaskedArray" for kind in type(x).__mro__):
        raise TypeError(f"{name} is a masked array, expected one without a mask: what it hides would be seen")
    if str(dtype).rpartition(".")[2] not in (*_WIDE, *kinds):
        expected = ", ".join((*_WIDE, *kinds))
        raise TypeError(f"{name} has element type {dtype}, expected one of {expected}")


def _type(x: Any, dtype: Any) -> tuple[str, Any]:
    """Returns the name of an 8-bit type, and the type in the library of a tensor."""
    # What tensors hold does not matter, and some cannot be printed.
    name = shown(dtype) if hasattr(dtype, "__dlpack__") else name_of_type(dtype)
    if name not in _LARGEST:
        raise ValueError(f"dtype={name}, expected float8_e4m3fn, float8_e5m2 or int8")
    if is_torch(x):
        return name, getattr(torch, name)
    namespace = _namespace(x)
    if hasattr(namespace, name):
        return name, getattr(namespace, name)
    import ml_dtypes

    return name, getattr(ml_dtypes, name)


def _float32(x: Any) -> Any:
    return x.float() if is_torch(x) else x.astype("float32")


def _largest(x: Any, axes: tuple[int, ...]) -> Any:
    """Returns the largest numbers over some dimensions; zero if these are empty."""
    if is_torch(x):
        return x.amax(axes) if x.numel() else x.sum(axes)
    return x.max(axis=axes) if x.size else x.sum(axis=axes)


def _least(x: Any) -> Any:
    return x.clamp(min=_LEAST) if is_torch(x) else _namespace(x).maximum(x, _number(_LEAST, x))


def _number(value: float, like: Any) -> Any:
    """Returns a float32 number, so that products stay in float32."""
    return value if is_torch(like) else like.dtype.type(value)


def rounded(x: Any, kind: Any) -> Any:
    """Converts a tensor of PyTorch's to 8 bits as an append does: to nearest, and to the largest number at most."""
    return _cast(_float32(x), kind, _LARGEST[str(kind).rpartition(".")[2]])


def _cast(x: Any, kind: Any, largest: float) -> Any:
    """Casts with rounding and clamps to the largest number of the type: libraries differ there."""
    if largest == _LARGEST["int8"]:
        # Integers are cut off behind the point, and what NaN becomes is nobody's promise.
        x = x.round().nan_to_num(nan=0.0) if is_torch(x) else _namespace(x).nan_to_num(_namespace(x).rint(x), nan=0.0)
    if is_torch(x):
        return x.clamp(-largest, largest).to(kind)
    return _namespace(x).clip(x, _number(-largest, x), _number(largest, x)).astype(kind)


def _repeated(descale: Any, group: int) -> Any:
    """Repeats the factors of key heads for the query heads that share them."""
    if group == 1:
        return descale
    return descale.repeat_interleave(group, -1) if is_torch(descale) else descale.repeat(group, axis=-1)
