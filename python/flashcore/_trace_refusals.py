"""Refuses what a traced function does, with the line on which it does it."""

from __future__ import annotations

import linecache
import os
import sys
from typing import Any, NoReturn

from ._trace_parts import HERE


def _is_ours(path: str) -> bool:
    libraries = [HERE]
    for module in ("torch", "numpy", "jax"):
        file = getattr(sys.modules.get(module), "__file__", None)
        if file:
            libraries.append(os.path.dirname(file) + os.sep)
    return path.startswith(tuple(libraries))


def refuse(what: str) -> NoReturn:
    """Refuses what a function does, with the line on which it does it."""
    frame: Any = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        raise NotImplementedError(what)
    raise NotImplementedError(what + _line(frame.f_code, frame.f_lineno))


def _line(code: Any, line: int) -> str:
    file = code.co_filename
    return f'\n  File "{file}", line {line}, in {code.co_name}\n    {linecache.getline(file, line).strip()}'


def refuse_hidden_array(error: IndexError) -> None:
    """Refuses an array whose own library was asked to index it by a traced value: those of a function's variables
    are replaced by views, those of objects are not found."""
    if "arrays used as indices" not in str(error) and "only integers, slices" not in str(error):
        return
    place = None
    found = error.__traceback__
    while found is not None:
        if not _is_ours(found.tb_frame.f_code.co_filename):
            place = found
        found = found.tb_next
    where = "" if place is None else _line(place.tb_frame.f_code, place.tb_lineno)
    raise NotImplementedError(
        "an array of NumPy or JAX that is an attribute of an object or made in the function is indexed, expected one "
        f"in a variable, a list, a tuple or a dictionary{where}"
    ) from None
