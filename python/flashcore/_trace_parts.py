"""What a function is made of: a key by which its trace is found again, and the tensors that it loads from.

In doubt a function is not compared. What cannot be compared is an object that it reads attributes of, the contents of a
tensor, and what it imports.
"""

from __future__ import annotations

import dis
import functools
import os
import types
from typing import Any

from ._installed import is_torch, torch

HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
# Whose functions and constants are always the same.
_LIBRARIES = {"torch", "numpy", "math", "operator", "functools", "builtins", __name__.partition(".")[0]}
# Names by which code reaches what is not among its parts, or what libraries say differently each time. Modes of
# autograd are here since the function has to be called to see what it does within them.
_UNSEEN = frozenset(
    "globals locals vars dir eval exec getattr hasattr setattr delattr attrgetter methodcaller open input random "
    "is_grad_enabled no_grad enable_grad set_grad_enabled inference_mode is_inference_mode_enabled is_autocast_enabled "
    "get_default_dtype get_default_device backends".split()
)
# What code does to things that others see as well, or that it finds by names of its own.
_OUTSIDE = {
    "IMPORT_NAME",
    "STORE_GLOBAL",
    "DELETE_GLOBAL",
    "STORE_ATTR",
    "DELETE_ATTR",
    "STORE_SUBSCR",
    "DELETE_SUBSCR",
}
_OF_CELLS = {"STORE_DEREF", "DELETE_DEREF"}


def _is_library(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES


def is_opaque(function: Any) -> bool:
    """Returns whether a function is always the same: one of a library's, that closes over nothing of the caller's.
    ``functools.wraps`` changes what a function says of its module, not its globals."""
    if function.__closure__ or function.__code__.co_filename.startswith(HERE):
        return False
    return _is_library(function.__globals__.get("__name__"))


def _is_constant(function: Any) -> bool:
    """Returns whether a built-in function is always the same: methods of objects are built-in functions as well."""
    owner = function.__self__
    named = owner is None or (type(owner) is types.ModuleType and _is_library(owner.__name__.lstrip("_")))
    return named and function.__name__ not in _UNSEEN


class Parts:
    """The parts of a function in a fixed order: a key of those that can be compared, and the
    tensors."""

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.tensors: list[Any] = []
        self.names: list[str] = []
        # Where a tensor is among them, by its identity.
        self.index: dict[int, int] = {}
        self.arrays = False
        self._comparable = True
        # Where functions, lists and dictionaries are among them.
        self._places: dict[int, int] = {}
        self._codes: list[Any] = []
        # Names of what a program has put on functions and tensors.
        self._attributes: set[str] = set()

    @property
    def comparable(self) -> bool:
        """Whether the key says everything that a trace depends on."""
        # Attributes are common, such as those of parameters, and read by few.
        if not self._attributes or not self._comparable:
            return self._comparable
        return all(self._attributes.isdisjoint(read_by(code)[0]) for code in self._codes)

    def add(self, value: Any, name: str) -> None:
        kind = type(value)
        if value is None or kind is bool or kind is int or kind is str:
            self.key += (kind, value)
        elif kind is float:
            # Zero has two signs, which are equal.
            self.key += (kind, value.hex())
        elif kind is types.FunctionType:
            self._add_function(value)
        elif kind is types.ModuleType:
            self.key.append(value)
            self._require(_is_library(value.__name__) and _UNSEEN.isdisjoint(value.__name__.split(".")))
        elif isinstance(value, type):
            self.key.append(value)
            self._require(_is_library(value.__module__))
        elif is_tensor(value):
            known = self.index.get(id(value))
            if known is not None:
                self.key += ("again", known)
                return
            self.index[id(value)] = len(self.tensors)
            self.tensors.append(value)
            self.names.append(name)
            self.key += ("tensor", kind, value.dtype, value.shape)
            if is_torch(value):
                # Others have methods of their own.
                self._require(_is_library(kind.__module__))
                self._attributes.update(value.__dict__)
            else:
                self.arrays = True
        elif kind is tuple:
            self.key += (kind, len(value))
            for item in value:
                self.add(item, name)
        elif kind is list:
            if self._is_new(value):
                self.add(tuple(value), name)
        elif kind is dict:
            if self._is_new(value):
                self.add(tuple(value), name)
                self.add(tuple(value.values()), name)
        elif kind is functools.partial:
            self.key.append(kind)
            self._attributes.update(value.__dict__)
            self.add(value.func, name)
            self.add(value.args, name)
            self.add(tuple(value.keywords), name)
            self.add(tuple(value.keywords.values()), name)
        elif kind is types.BuiltinFunctionType:
            self.key.append(value)
            self._require(_is_constant(value))
        elif torch is not None and kind is torch.dtype:
            self.key.append(value)
        else:
            self._comparable = False

    def _require(self, holds: bool) -> None:
        self._comparable = self._comparable and holds

    def _is_new(self, value: Any) -> bool:
        """Adds which one it is of what may be there twice, or inside itself; returns whether it was not there
        before."""
        count = len(self._places)
        place = self._places.setdefault(id(value), count)
        self.key += (type(value), place)
        return place == count

    def _add_function(self, function: Any) -> None:
        if is_opaque(function):
            self.key.append(function)
            return
        if not self._is_new(function):
            return
        code = function.__code__
        self._codes.append(code)
        self._attributes.update(function.__dict__)
        self.key.append(code)
        names, within = read_by(code)
        self._require(within)
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            try:
                self.add(cell.cell_contents, name)
            except ValueError:  # it is empty
                self._comparable = False
        self.add(function.__defaults__, "default")
        self.add(function.__kwdefaults__, "default")
        around = function.__globals__
        for name in names:
            if name in around:
                self.key.append(name)
                self.add(around[name], name)


@functools.lru_cache(1024)
def read_by(code: Any) -> tuple[tuple[str, ...], bool]:
    """Returns the names of globals and attributes that code may look up, nested functions included, and whether it
    stays within what it is made of."""
    inner = [read_by(it) for it in code.co_consts if isinstance(it, types.CodeType)]
    names = tuple(dict.fromkeys((*code.co_names, *(name for it, _ in inner for name in it))))
    steps = [(it.opname, it.argval) for it in dis.get_instructions(code)]
    within = (
        all(it for _, it in inner)
        and not any(name in _UNSEEN or name.startswith("__") for name in code.co_names)
        and not any(step in _OUTSIDE or (step in _OF_CELLS and of in code.co_freevars) for step, of in steps)
    )
    return names, within


def is_tensor(value: Any) -> bool:
    # Their classes have the same attributes.
    if isinstance(value, type):
        return False
    return is_torch(value) or (hasattr(value, "__dlpack__") and hasattr(value, "shape"))
