"""Calls that PyTorch's compiler leaves alone.

``torch.compiler.disable`` imports the compiler, which takes longer than everything else of this package. So this is
imported by what is being compiled, and only there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function."""
    return function(*args, **kwargs)
