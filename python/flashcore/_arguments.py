"""Arguments that FlashAttention has and FlashCore does not serve: refused by name, never ignored."""

from __future__ import annotations

# The values at which they change nothing. Where FlashAttention's functions differ, the caller says
# so.
_DEFAULTS: dict[str, object] = {
    "dropout_p": 0.0,
    "attention_chunk": 0,
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
