"""Arguments as they are given: what FlashCore does not serve is refused by name, never ignored."""

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
}


# Why some are not served.
_REASONS = {
    "dropout_p": "which probabilities were dropped would have to be drawn again, alike, in the backward "
    "pass, and the kernels draw no random numbers",
}


def refusal(name: str, value: object, default: object) -> NotImplementedError:
    """The error for a value that is not served."""
    reason = f": {_REASONS[name]}" if name in _REASONS else ""
    return NotImplementedError(f"{name}={shown(value)} is not supported yet, expected {default!r}{reason}")


def refuse(**arguments: object) -> None:
    """Refuses the first argument that is not at its default."""
    for name, value in arguments.items():
        default = _DEFAULTS.get(name)
        if not _equal(value, default):
            raise refusal(name, value, default)


def _equal(value: object, default: object) -> bool:
    """Whether a value is the default: of a tensor, not asked."""
    if value is None or default is None:
        return value is default
    try:
        return bool(value == default)
    except Exception:
        return False


def shown(value: object) -> str:
    """A value as one would type it, if that is short; else what it is."""
    if isinstance(value, (tuple, list)) and len(value) < 4:
        return f"({', '.join(map(shown, value))})"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else f"a {type(value)}"


def by_keyword(rare: Mapping[str, Any]) -> Callable[[_F], _F]:
    """Shows what a function takes by keyword, with defaults, in the place of the dictionary that it takes
    last. Python looks up each default of a keyword-only argument in every call, which takes longer than
    all else that it does for one; few calls give any."""

    def show(function: _F) -> _F:
        signature = inspect.signature(function)
        *others, _ = signature.parameters.values()
        kind = inspect.Parameter.KEYWORD_ONLY
        taken = [inspect.Parameter(name, kind, default=it, annotation="Any") for name, it in rare.items()]
        function.__signature__ = signature.replace(parameters=[*others, *taken])  # type: ignore[attr-defined]
        return function

    return show


def rarely(function: str, rare: dict[str, Any], given: Mapping[str, object]) -> Any:
    """What was given by keyword, and the defaults of what was not, in their order."""
    for name in given:
        if name not in rare:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return {**rare, **given}.values()


def flag(name: str, value: Any) -> bool:
    """True or False, Python's or NumPy's."""
    if isinstance(value, bool):
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise TypeError(f"{name}={shown(value)}, expected True or False")


def invariant(function: str, batch_invariant: Any) -> str:
    """The name of a function under which it is called: with what its results must not depend on."""
    if batch_invariant is False or not flag("batch_invariant", batch_invariant):
        return function
    return f"{function}, batch_invariant"


def hints(num_splits: Any, pack_gqa: Any, sm_margin: Any) -> None:
    """Refuses what is no hint. FlashAttention chooses kernels by them; FlashCore's plan does so by
    itself, and the answer is the same."""
    for name, value in (("num_splits", num_splits), ("sm_margin", sm_margin)):
        whole(name, value)
    if pack_gqa is not None:
        flag("pack_gqa", pack_gqa)


def shape_of(value: Any) -> Any:
    """The shape of a tensor; None of what is no tensor, or has no shape, as nested tensors have none."""
    if isinstance(value, type):
        return None
    try:
        shape: Any = value.shape
        return shape if len(shape) >= 0 else None
    except (AttributeError, RuntimeError, TypeError):
        return None


def whole(name: str, value: Any) -> int:
    """A whole number, as a number of Python's."""
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}={shown(value)}, expected a whole number") from None


def either(name: str, value: Any, other_name: str, other: Any) -> Any:
    """The value of an argument that has two names."""
    if value is None:
        return other
    if other is not None:
        raise ValueError(f"{name} was given with {other_name}, expected one of the two names")
    return value


def window(window_size: Any) -> tuple[int, int]:
    """Keys before and after a query's own, for PyTorch's operators, or an error that names it."""
    if window_size is None:
        return -1, -1
    if hasattr(window_size, "tolist"):
        window_size = window_size.tolist()
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size={shown(window_size)}, expected two whole numbers, (left, right)")
    left, right = window_size
    return -1 if left is None else left, -1 if right is None else right
