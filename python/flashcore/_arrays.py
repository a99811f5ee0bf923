"""Arrays of libraries other than PyTorch, through DLPack."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from . import _flashcore

# The place of `out`, which few calls have.
_OUT = 15


def attend(
    tensors: tuple[Any, ...],
    numbers: tuple[Any, ...],
    function: str,
    lse: Any,
    deterministic: bool = False,
    rules: tuple[Any, ...] | None = None,
) -> Any:
    """Computes attention; results are arrays of the library of the queries."""
    if len(tensors) > _OUT:
        check_mutable("out", tensors[_OUT])
    if _is_for_xla(tensors):
        if rules is not None:
            raise NotImplementedError(
                "masks and scores as functions are not supported inside of JAX's transformations and over several devices"
            )
        from . import _jax

        return _jax.attend(tensors, numbers, function, lse, deterministic)
    exchange = _Exchange(tensors[0])
    given = exchange.give(tensors, _flashcore.tensor_names(function))
    if rules is not None:
        mask, score, captured, _ = rules
        rules = (mask, score, exchange.give(captured, ("what a function captures",) * len(captured)), None)
    result = _flashcore.attend(given, numbers, function, lse, exchange.entrance(), rules)
    if not lse:
        return exchange.take(result)
    output, sums = result
    return exchange.take(output), exchange.take(sums)


_APPENDED = (
    *("k_cache", "v_cache", "k", "v", "q", "cache_seqlens", "cu_seqlens_k_new", "cu_seqlens_q", "cache_batch_idx"),
    *("page_table", "rotary_cos", "rotary_sin", "rotary_seqlens", "k_descale", "v_descale"),
)


def append(tensors: tuple[Any, ...], flags: tuple[Any, ...]) -> Any:
    """Writes new keys and values into arrays, in place."""
    for name, cache in zip(("k_cache", "v_cache"), tensors):
        check_mutable(name, cache, "k=None")
    exchange = _Exchange(tensors[0])
    rotated, lengths = _flashcore.append(exchange.give(tensors, _APPENDED), flags, exchange.entrance())
    return None if rotated is None else exchange.take(rotated), exchange.take(lengths)


def combine(tensors: tuple[Any, ...], name: str | None, dtype: Any) -> Any:
    """Combines partial results."""
    _refuse_xla("flash_attn_combine", tensors)
    exchange = _Exchange(tensors[0])
    out = tensors[2]
    check_mutable("out", out)
    if exchange.numpy and (name == "bfloat16" or (out is not None and _is_bfloat16(out))):
        exchange.element = dtype if out is None else out.dtype
    given = exchange.give(tensors, ("out_partial", "lse_partial", "out"))
    output, sums = _flashcore.combine(given, name, exchange.entrance())
    return exchange.take(output) if out is None else out, exchange.take(sums)


def merge(tensors: tuple[Any, ...]) -> Any:
    """Merges two attention results."""
    _refuse_xla("flash_attn_merge", tensors)
    exchange = _Exchange(tensors[0])
    given = exchange.give(tensors, ("out_a", "lse_a", "out_b", "lse_b"))
    output, sums = _flashcore.merge(given, exchange.entrance())
    return exchange.take(output), exchange.take(sums)


def check_mutable(name: str, array: Any, expected: str = "None") -> None:
    """Refuses to write to arrays of JAX, which promises to its users that they never change."""
    if _library(array) in ("jax", "jaxlib"):
        raise TypeError(f"{name} is a {type(array)}, which cannot be written, expected {expected}")


def full(name: str, count: int, value: int, like: Any) -> Any:
    """Returns a list of equal numbers."""
    namespace = _namespace(like)
    if not hasattr(namespace, "full"):
        raise TypeError(f"{name} is a number, expected a list: {type(like)} has no function `full`")
    return namespace.full((count,), value, dtype=namespace.int32)


def is_in_host_memory(array: Any) -> bool:
    """Returns whether an array's numbers can be read here; those of JAX's tracers cannot."""
    try:
        return bool(array.__dlpack_device__()[0] == 1) and hasattr(array, "tolist")
    except Exception:
        return False


def can_copy(array: Any) -> bool:
    """Returns whether an array's library can pad and concatenate arrays, and import results."""
    functions = ("pad", "concatenate", "from_dlpack")
    return hasattr(array, "dtype") and all(hasattr(_namespace(array), it) for it in functions)


def pad(array: Any, columns: int) -> Any:
    """Pads the last dimension with ``columns`` zeros."""
    widths = [(0, 0)] * (len(array.shape) - 1) + [(0, columns)]
    return _namespace(array).pad(array, widths)


def can_expand(array: Any) -> bool:
    """Returns whether an array's library can broadcast and reshape it."""
    return can_copy(array) and hasattr(_namespace(array), "broadcast_to") and hasattr(array, "reshape")


def expanded(array: Any, shape: tuple[int, ...]) -> Any:
    """Broadcasts an array to a shape."""
    return _namespace(array).broadcast_to(array, shape)


def join(arrays: list[Any]) -> Any:
    """Concatenates arrays along the last dimension."""
    return _namespace(arrays[0]).concatenate(arrays, -1)


def widen(array: Any) -> Any:
    """Converts 16-bit arrays to float32."""
    name = getattr(getattr(array, "dtype", None), "name", None)
    return array.astype("float32") if name in ("float16", "bfloat16") else array


# What NumPy cannot export, and the integers that its bits are given as.
_BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "int8"}


class _Exchange:
    """Conversion of a call's arrays to DLPack and of its results back, as the first array's library
    does it."""

    def __init__(self, first: Any) -> None:
        self.numpy = _library(first) == "numpy"
        # A library that cannot take results over gets what speaks DLPack.
        self._import: Callable[[Any], Any] = getattr(_namespace(first), "from_dlpack", lambda result: result)
        # NumPy's name for bf16, which the package ml_dtypes gives it, if that is what answers are made
        # of: NumPy does not export it, and does not mind bits.
        self.element = None
        if self.numpy and _is_bfloat16(first):
            self.element = first.dtype
        elif self.numpy and _bits(first) is not None:
            import ml_dtypes

            self.element = ml_dtypes.bfloat16

        self._words = self.element is not None
        # Whether 8-bit integers with a sign are the bits of float8_e5m2.
        self._e5m2 = False

    def entrance(self) -> str:
        if not self._words and self.element is None:
            return "arrays"
        return "words" if self._e5m2 else "words and integers"

    def give(self, arrays: tuple[Any, ...], names: tuple[str, ...]) -> tuple[Any, ...]:
        if not self.numpy:
            return arrays
        bits = [_bits(array) for array in arrays]
        self._words = self._words or any(it is not None for it in bits)
        self._e5m2 = self._e5m2 or _BITS["float8_e5m2"] in bits
        if self._words:
            for array, argument in zip(arrays, names):
                name = getattr(getattr(array, "dtype", None), "name", None)
                if name in _BITS.values() and (name != "int8" or self._e5m2):
                    raise TypeError(
                        f"{argument} has element type {array.dtype}, expected floating-point numbers or int32"
                    )
        return tuple(array if it is None else array.view(it) for array, it in zip(arrays, bits))

    def take(self, result: Any) -> Any:
        array = self._import(result)
        if self.element is not None and array.dtype.name == "uint16":
            return array.view(self.element)
        return array


def _is_for_xla(arrays: tuple[Any, ...]) -> bool:
    """Returns whether some arrays are JAX's tracers, which have no memory, or lie on several devices, which DLPack
    cannot express."""
    jax = sys.modules.get("jax")
    if jax is None:
        return False
    for array in arrays:
        # Most are None; and the classes of a call are few, whereas JAX asks each of its arrays.
        if array is None:
            continue
        kind = _kinds.get(type(array))
        if kind is None:
            kind = _kinds[type(array)] = _kind(jax, array)
        if kind == "tracer" or kind == "array" and array.sharding.num_devices > 1:
            return True
    return False


def _refuse_xla(function: str, arrays: tuple[Any, ...]) -> None:
    if _is_for_xla(arrays):
        raise NotImplementedError(
            f"{function} is not supported inside of JAX's transformations and over several devices: call it outside "
            "of jit, or combine parts there by their log-sum-exps with jax.numpy"
        )


# What the classes of arrays are to JAX.
_kinds: dict[type, str] = {}


def _kind(jax: Any, array: Any) -> str:
    if isinstance(array, jax.core.Tracer):
        return "tracer"
    return "array" if isinstance(array, jax.Array) else "other"


def _library(array: Any) -> str:
    return type(array).__module__.partition(".")[0]


def _namespace(array: Any) -> Any:
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return sys.modules[_library(array)]


def _bits(array: Any) -> str | None:
    """Returns the integer type by which the bits of an array are passed, if NumPy cannot export its
    type."""
    if _library(array) != "numpy":
        return None
    return _BITS.get(getattr(getattr(array, "dtype", None), "name", None) or "")


def _is_bfloat16(array: Any) -> bool:
    return getattr(getattr(array, "dtype", None), "name", None) == "bfloat16"
