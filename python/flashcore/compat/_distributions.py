"""What ``importlib.metadata`` says of the modules that :func:`flashcore.compat.install` replaces.

Programs ask there whether FlashAttention is installed, and in which version: transformers and diffusers do before
they import it.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder
from typing import Any

# By the module that is installed: the distribution's name, and the imports that it has.
_NAMES = {
    "flash_attn": ("flash_attn", "flash_attn\nflash_attn_2_cuda"),
    "flash_attn.cute": ("flash-attn-4", "flash_attn"),
    "flash_attn_interface": ("flash_attn_3", "flash_attn_3\nflash_attn_interface"),
    "vllm_flash_attn": ("vllm_flash_attn", "vllm_flash_attn"),
}

# Those that are there now.
installed: dict[str, Distribution] = {}


class _Distribution(Distribution):
    """A distribution without files: a name, a version and the modules that are imported."""

    def __init__(self, name: str, version: str, imported: str) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: FlashCore's\n",
            "top_level.txt": f"{imported}\n",
        }

    def read_text(self, filename: Any) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        return os.path.join(os.path.dirname(__file__), path)


class _Finder(DistributionFinder):
    """Finds no modules, only the distributions."""

    def find_spec(self, *_: Any) -> None:
        return None

    def find_distributions(self, context: Any = DistributionFinder.Context()) -> Iterator[Distribution]:
        # Who names folders asks what is in them.
        if "path" in vars(context):
            return
        for distribution in list(installed.values()):
            if context.name is None or _normal(context.name) == _normal(distribution.metadata["Name"]):
                yield distribution


_finder = _Finder()


def _normal(name: str) -> str:
    """Returns a distribution's name as PEP 503 compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def add(module: str) -> None:
    """Lets ``importlib.metadata`` find the distribution of a module, before one of the same name on disk."""
    name, imported = _NAMES[module]
    version = importlib.import_module(f"{__package__}.{module.replace('.', '_')}").__version__
    installed[module] = _Distribution(name, version, imported)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def clear() -> None:
    """Undoes :func:`add`."""
    installed.clear()
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
