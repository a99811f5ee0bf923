"""PyTorch where it is installed, and None where it is not: the package does not need it."""

from __future__ import annotations

from typing import Any

try:
    import torch as torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    torch = None


def is_torch(value: Any) -> bool:
    """Returns whether a value is a tensor of PyTorch."""
    return torch is not None and isinstance(value, torch.Tensor)
