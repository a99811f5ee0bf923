"""Modules that replace those of FlashAttention, for programs that import them.

    import flashcore.compat

    flashcore.compat.install()

    from flash_attn import flash_attn_func      # FlashCore's, also in programs that do not know FlashCore

| imported as | replaced by | interface of |
| --- | --- | --- |
| ``flash_attn``, ``flash_attn.flash_attn_interface`` | :mod:`flashcore.compat.flash_attn` | FlashAttention-2 |
| ``flash_attn.bert_padding`` | :mod:`flashcore.compat.bert_padding` | FlashAttention-2 |
| ``flash_attn_interface`` | :mod:`flashcore.compat.flash_attn_interface` | FlashAttention-3 |
| ``flash_attn.cute``, ``flash_attn.cute.interface`` | :mod:`flashcore.compat.flash_attn_cute` | FlashAttention-4 |
| ``vllm_flash_attn``, ``vllm_flash_attn.flash_attn_interface`` | :mod:`flashcore.compat.vllm_flash_attn` | vLLM's fork |

Each function takes the arguments of its namesake in the same order. Arguments that are not supported are
accepted at their default; any other value raises a ``NotImplementedError`` that names the argument.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

__all__ = ["install", "uninstall"]

_MODULES = {
    "flash_attn": "flash_attn",
    "flash_attn.flash_attn_interface": "flash_attn",
    "flash_attn.bert_padding": "bert_padding",
    "flash_attn.cute": "flash_attn_cute",
    "flash_attn.cute.interface": "flash_attn_cute",
    "flash_attn_interface": "flash_attn_interface",
    "vllm_flash_attn": "vllm_flash_attn",
    "vllm_flash_attn.flash_attn_interface": "vllm_flash_attn",
}

# What was imported under these names before, if anything.
_before: dict[str, ModuleType | None] = {}


def install(*names: str) -> None:
    """Replaces FlashAttention's modules by FlashCore's for all imports from now on.

    Call it before the program imports FlashAttention. Names that were imported before are not changed.

    Args:
        names: The modules to replace: ``"flash_attn"``, ``"flash_attn_interface"``, ``"vllm_flash_attn"``; all of
            them if none is given. Submodules are replaced with their parent.

    Raises:
        ValueError: If a name is none of these.

    Example:
        ::

            flashcore.compat.install("flash_attn")
            from flash_attn import flash_attn_varlen_func
    """
    tops = {name.partition(".")[0] for name in _MODULES}
    for name in names:
        if name not in tops:
            raise ValueError(f"there is no module {name!r} to stand in for, expected one of {sorted(tops)}")
    for name, ours in _MODULES.items():
        top, _, rest = name.partition(".")
        if names and top not in names:
            continue
        module = importlib.import_module(f"{__name__}.{ours}")
        _before.setdefault(name, sys.modules.get(name))
        sys.modules[name] = module
        if rest and "." not in rest:
            setattr(sys.modules[top], rest, module)


def uninstall() -> None:
    """Undoes :func:`install`: later imports find the original modules, if there are any.

    Functions that were imported in between stay FlashCore's.
    """
    for name, module in _before.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module
    _before.clear()
