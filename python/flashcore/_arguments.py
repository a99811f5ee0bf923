"""Arguments as they are given: what FlashCore does not serve is refused by name, never ignored."""

from __future__ import annotations

from typing import Any

# The values at which they change nothing. Where FlashAttention's functions differ, the caller says
# so.
_DEFAULTS: dict[str, object] = {
    "dropout_p": 0.0,
    "num_splits": 1,
    "sm_margin": 0,
}


def refusal(name: str, value: object, default: object) -> NotImplementedError:
    """The error for a value that is not served."""
    return NotImplementedError(f"{name}={value!r} is not supported yet, expected {default!r}")


def refuse(**arguments: object) -> None:
    """Refuses the first argument that is not at its default."""
    for name, value in arguments.items():
        default = _DEFAULTS.get(name)
        if value is None and default is None:
            continue
        if default is None or value != default:
            shown = value if isinstance(value, (bool, int, float)) else "a tensor"
            raise refusal(name, shown, default)


def window(window_size: Any) -> tuple[int, int]:
    """Keys before and after a query's own, or an error that names the argument."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size={window_size!r}, expected two numbers, (left, right)")
    left, right = window_size
    return left, right
