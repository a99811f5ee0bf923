"""FlashCore's functions with what their namesakes in FlashAttention, or forks of these, also accept."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .._arguments import either

_F = TypeVar("_F", bound=Callable[..., Any])


def softcap_above_zero(softcap: Any) -> Any:
    """Returns a softcap, or 0 for a negative one: FlashAttention-2 and -3 cap scores with positive numbers only."""
    return 0.0 if isinstance(softcap, (int, float)) and softcap < 0 else softcap


def chunk_or_none(attention_chunk: Any) -> Any:
    """Returns a chunk, or 0 for None."""
    return 0 if attention_chunk is None else attention_chunk


def adapted(
    function: _F,
    values: Mapping[str, Callable[[Any], Any]],
    names: Mapping[str, str] | None = None,
    needless: Mapping[str, str] | None = None,
) -> _F:
    """Returns a function that changes some arguments, given by place or by name, and passes on all.

    Args:
        function: What is called.
        values: How the value of an argument is changed.
        names: Other names of arguments that are given by name.
        needless: Arguments that are ignored where another one, to which they belong, is not given.
    """
    places = {name: place for place, name in enumerate(inspect.signature(function).parameters)}
    names, needless = names or {}, needless or {}

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        for name, ours in names.items():
            if name in named:
                named[ours] = either(name, named.pop(name), ours, named.get(ours))
        changed = list(given)
        for name, change in values.items():
            if places[name] < len(changed):
                changed[places[name]] = change(changed[places[name]])
            elif name in named:
                named[name] = change(named[name])
        for name, other in needless.items():
            if (changed[places[other]] if places[other] < len(changed) else named.get(other)) is None:
                if places[name] < len(changed):
                    changed[places[name]] = None
                else:
                    named.pop(name, None)
        return function(*changed, **named)

    return call  # type: ignore[return-value]
