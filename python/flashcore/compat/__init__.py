"""Modules that replace those of FlashAttention, for programs that import them.

    import flashcore.compat

    flashcore.compat.install()

    from flash_attn import flash_attn_func      # FlashCore's, also in programs that do not know FlashCore

| installed as | imported as | replaced by | interface of |
| --- | --- | --- | --- |
| ``"flash_attn"`` | ``flash_attn``, ``flash_attn.flash_attn_interface`` | :mod:`flashcore.compat.flash_attn` | FlashAttention-2 |
| | ``flash_attn.bert_padding`` | :mod:`flashcore.compat.bert_padding` | |
| | ``flash_attn.layers.rotary``, ``flash_attn.ops.triton.rotary`` | :mod:`flashcore.compat.rotary` | |
| | ``flash_attn.utils.distributed`` | :mod:`flashcore.compat.distributed` | |
| | ``flash_attn_2_cuda`` | :mod:`flashcore.compat.flash_attn_2_cuda` | |
| ``"flash_attn_interface"`` | ``flash_attn_interface``, ``flash_attn_3.flash_attn_interface`` | :mod:`flashcore.compat.flash_attn_interface` | FlashAttention-3 |
| ``"flash_attn.cute"`` | ``flash_attn.cute``, ``flash_attn.cute.interface`` | :mod:`flashcore.compat.flash_attn_cute` | FlashAttention-4 |
| ``"vllm_flash_attn"`` | ``vllm_flash_attn`` and ``vllm.vllm_flash_attn``, with ``.flash_attn_interface`` | :mod:`flashcore.compat.vllm_flash_attn` | vLLM's fork |
| | ``.layers.rotary``, ``.ops.triton.rotary`` of both | :mod:`flashcore.compat.rotary` | |

Each function takes the arguments of its namesake in the same order. Arguments that are not supported are
accepted at their default; any other value raises a ``NotImplementedError`` that names the argument.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from . import _distributions

__all__ = ["install", "uninstall"]

_ROTARY = {"layers": None, "layers.rotary": "rotary", "ops": None, "ops.triton": None, "ops.triton.rotary": "rotary"}
_FORK: dict[str, str | None] = {"": "vllm_flash_attn", "flash_attn_interface": "vllm_flash_attn", **_ROTARY}

# What stands for each module that can be installed, by the name of the import, parents first; None is a package
# without functions of its own.
_MODULES: dict[str, dict[str, str | None]] = {
    "flash_attn": {
        "flash_attn": "flash_attn",
        "flash_attn.flash_attn_interface": "flash_attn",
        "flash_attn.bert_padding": "bert_padding",
        **{f"flash_attn.{name}": ours for name, ours in _ROTARY.items()},
        "flash_attn.utils": None,
        "flash_attn.utils.distributed": "distributed",
        "flash_attn_2_cuda": "flash_attn_2_cuda",
    },
    "flash_attn.cute": {
        "flash_attn.cute": "flash_attn_cute",
        "flash_attn.cute.interface": "flash_attn_cute",
    },
    "flash_attn_interface": {
        "flash_attn_interface": "flash_attn_interface",
        "flash_attn_3": None,
        "flash_attn_3.flash_attn_interface": "flash_attn_interface",
    },
    # vLLM's own package has its fork inside.
    "vllm_flash_attn": {
        f"{top}.{name}".rstrip("."): ours
        for top in ("vllm_flash_attn", "vllm.vllm_flash_attn")
        for name, ours in _FORK.items()
    },
}

# What was imported under these names before, and what their parents had as attributes, if anything.
_before: dict[str, ModuleType | None] = {}
_attributes: dict[tuple[str, str], tuple[ModuleType, object]] = {}
_NOTHING = object()


def install(*names: str) -> None:
    """Replaces FlashAttention's modules by FlashCore's for all imports from now on.

    Call it before the program imports FlashAttention, or a library that asks for FlashAttention when it is imported
    (transformers). Names that were imported before are not changed. Other submodules of an installed FlashAttention
    can still be imported. ``importlib.metadata`` finds the distributions of the replaced modules: ``flash_attn``,
    ``flash_attn_3``, ``flash-attn-4`` and ``vllm_flash_attn``.

    Args:
        names: The modules to replace: ``"flash_attn"``, ``"flash_attn.cute"``, ``"flash_attn_interface"``,
            ``"vllm_flash_attn"``; ``"flash_attn"`` if none is given, since programs that find FlashAttention-3 or
            -4 prefer it. Submodules are replaced with their parent, but ``flash_attn.cute`` only by its own name,
            which includes ``flash_attn``.

    Raises:
        ValueError: If a name is none of these.

    Example:
        ::

            flashcore.compat.install("flash_attn_interface")
            from flash_attn_interface import flash_attn_varlen_func
    """
    for name in names:
        if name not in _MODULES:
            raise ValueError(f"there is no module {name!r} to stand in for, expected one of {sorted(_MODULES)}")
    chosen = dict.fromkeys(names or ("flash_attn",))
    if "flash_attn.cute" in chosen:
        # A submodule needs its parent.
        chosen = {"flash_attn": None, **chosen}
    for name in chosen:
        if name not in _distributions.installed:
            for imported, ours in _MODULES[name].items():
                _replace(imported, ours)
            _distributions.add(name)


def uninstall() -> None:
    """Undoes :func:`install`: later imports find the original modules, if there are any.

    Functions that were imported in between stay FlashCore's.
    """
    for name, module in _before.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module
    for (_, last), (parent, attribute) in _attributes.items():
        if attribute is not _NOTHING:
            setattr(parent, last, attribute)
        elif hasattr(parent, last):
            delattr(parent, last)
    _before.clear()
    _attributes.clear()
    _distributions.clear()


def _replace(name: str, ours: str | None) -> None:
    """Puts a module with the functions of one of ours into the place of another.

    It is a copy: each name needs a specification and a folder of submodules of its own.
    """
    folders = _folders(name)
    module = ModuleType(name)
    if ours is not None:
        original = importlib.import_module(f"{__name__}.{ours}")
        vars(module).update(vars(original))
    package = any(other.startswith(f"{name}.") for modules in _MODULES.values() for other in modules)
    module.__name__ = name
    module.__spec__ = ModuleSpec(name, None, origin=getattr(module, "__file__", None), is_package=package)
    module.__package__ = name if package else name.rpartition(".")[0]
    if package:
        module.__spec__.submodule_search_locations = module.__path__ = folders
    _before[name] = sys.modules.get(name)
    sys.modules[name] = module
    top, _, last = name.rpartition(".")
    parent = sys.modules.get(top)
    if parent is not None:
        _attributes[top, last] = parent, getattr(parent, last, _NOTHING)
        setattr(parent, last, module)


def _folders(name: str) -> list[str]:
    """Returns the folders with the submodules of a package, which is not imported for it; none if there is none."""
    module = sys.modules.get(name)
    if module is not None:
        return list(getattr(module, "__path__", ()))
    top, _, last = name.rpartition(".")
    if top:
        folders = [os.path.join(folder, last) for folder in _folders(top)]
        return [folder for folder in folders if os.path.isdir(folder)]
    spec = importlib.util.find_spec(name)
    return [] if spec is None else list(spec.submodule_search_locations or ())
