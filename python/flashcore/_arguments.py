"""Checking and normalising of scalar arguments: what FlashCore does not serve is refused by name,
never ignored."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

# The values at which they change nothing. Where FlashAttention's functions differ, the caller says
# so.
_DEFAULTS: dict[str, object] = {
    "dropout_p": 0.0,
    "cp_world_size": 1,
    "cp_rank": 0,
    "return_softmax": False,
    "zero_tensors": False,
}


# What a call has beyond the scale where tensors or functions say which keys are seen and what becomes of scores.
NO_RULES = (False, (-1, -1), 0, 0.0, None, None)

# Why some are not served.
_REASONS = {
    "dropout_p": "which probabilities were dropped would have to be drawn again, alike, in the backward "
    "pass, and the kernels draw no random numbers",
}


def refusal(name: str, value: object, default: object) -> NotImplementedError:
    """Returns the error for a value that is not served."""
    reason = f": {_REASONS[name]}" if name in _REASONS else ""
    return NotImplementedError(f"{name}={shown(value)} is not supported yet, expected {default!r}{reason}")


def refuse(**arguments: object) -> None:
    """Refuses the first argument that is not at its default."""
    for name, value in arguments.items():
        default = _DEFAULTS.get(name)
        if not _equal(value, default):
            raise refusal(name, value, default)


def _equal(value: object, default: object) -> bool:
    """Returns whether a value is the default; a tensor never is, and is not compared."""
    if value is None or default is None:
        return value is default
    try:
        return bool(value == default)
    except Exception:
        return False


def shown(value: object) -> str:
    """Formats a value as one would type it if that is short, otherwise by its type."""
    if isinstance(value, (tuple, list)) and len(value) < 4:
        return f"({', '.join(map(shown, value))})"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else f"a {type(value)}"


def by_keyword(rare: Mapping[str, Any]) -> Callable[[_F], _F]:
    """Replaces the ``**kwargs`` of a function's visible signature by keyword-only parameters with
    their defaults. Real keyword-only parameters would cost more than everything else that Python
    does in a call, since each default is looked up in every call, and few calls give any."""

    def show(function: _F) -> _F:
        signature = inspect.signature(function)
        *others, _ = signature.parameters.values()
        kind = inspect.Parameter.KEYWORD_ONLY
        taken = [inspect.Parameter(name, kind, default=it, annotation="Any") for name, it in rare.items()]
        function.__signature__ = signature.replace(parameters=[*others, *taken])  # type: ignore[attr-defined]
        return function

    return show


def rarely(function: str, rare: dict[str, Any], given: Mapping[str, object]) -> Any:
    """Returns the values of all keyword arguments in their order: those given, and defaults for the
    others."""
    for name in given:
        if name not in rare:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return {**rare, **given}.values()


def flag(name: str, value: Any) -> bool:
    """Returns a boolean of Python's or NumPy's, or raises an error that names the argument."""
    if isinstance(value, bool):
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise TypeError(f"{name}={shown(value)}, expected True or False")


def invariant(function: str, batch_invariant: Any) -> str:
    """Returns the name under which a function is called, with a suffix if it must be
    batch-invariant."""
    if batch_invariant is False or not flag("batch_invariant", batch_invariant):
        return function
    return f"{function}, batch_invariant"


def hints(num_splits: Any, pack_gqa: Any, sm_margin: Any) -> None:
    """Checks the types of FlashAttention's hints. FlashCore's planner chooses kernels by itself,
    and the result is the same."""
    for name, value in (("num_splits", num_splits), ("sm_margin", sm_margin)):
        whole(name, value)
    if pack_gqa is not None:
        flag("pack_gqa", pack_gqa)


def shape_of(value: Any) -> Any:
    """Returns the shape of a tensor; None for anything without one, nested tensors included."""
    if isinstance(value, type):
        return None
    try:
        shape: Any = value.shape
        return shape if len(shape) >= 0 else None
    except (AttributeError, RuntimeError, TypeError):
        return None


def name_of_type(dtype: Any) -> str:
    """Returns the name of an element type without that of its library."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).rpartition(".")[2]


def whole(name: str, value: Any) -> int:
    """Returns an integer as a Python ``int``, or raises an error that names the argument."""
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}={shown(value)}, expected a whole number") from None


def either(name: str, value: Any, other_name: str, other: Any) -> Any:
    """Returns the value of an argument that has two names, of which at most one may be given."""
    if value is None:
        return other
    if other is not None:
        raise ValueError(f"{name} was given with {other_name}, expected one of the two names")
    return value


def check_rows(name: str, rows: list[int], count: int) -> None:
    """Refuses rows that a page table does not have; negative ones do not count from the end."""
    for sequence, row in enumerate(rows):
        if not 0 <= row < count:
            raise ValueError(
                f"cache_batch_idx has {row} for sequence {sequence}, expected from 0 to below the {count} of {name}"
            )


def window(window_size: Any) -> tuple[int, int]:
    """Returns the window as (left, right) with -1 for unbounded, as PyTorch's operators take it."""
    if window_size is None:
        return -1, -1
    if hasattr(window_size, "tolist"):
        window_size = window_size.tolist()
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size={shown(window_size)}, expected two whole numbers, (left, right)")
    left, right = window_size
    return -1 if left is None else left, -1 if right is None else right


def rows_of_sequences(searchsorted: Callable[..., Any], row: Any, cu_seqlens: Any, seqused: Any) -> Any:
    """Returns whether rows belong to a sequence, in a form that goes with log-sum-exps: packed rows where
    ``cu_seqlens`` is given, otherwise rows of each sequence and head. ``searchsorted`` is PyTorch's or JAX's."""
    if cu_seqlens is None:
        return row < (row.shape[-1] if seqused is None else seqused[:, None, None])
    begins = cu_seqlens[:-1]
    ends = cu_seqlens[1:] if seqused is None else begins + seqused
    # More sequences have begun there than have ended.
    return searchsorted(begins, row, side="right") > searchsorted(ends, row, side="right")
