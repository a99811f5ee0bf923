"""Arrays of libraries other than PyTorch, through DLPack."""

from __future__ import annotations

import sys
from typing import Any

from ._flashcore import attend_arrays


def attend(q: Any, k: Any, v: Any, scale: float | None, causal: bool, lse: bool, pytorch: bool) -> Any:
    """Output, or output and log-sum-exps, of the kind that ``q`` is."""
    take = _importer(q)
    element = _bfloat16(q)
    if element is not None:
        # NumPy does not export bf16, and does not mind bits.
        import numpy

        q, k, v = (array.view(numpy.uint16) if array.dtype == element else array for array in (q, k, v))
        output, sums = attend_arrays(q, k, v, scale, causal, pytorch, True)
        output, sums = take(output).view(element), take(sums)
    else:
        output, sums = (take(array) for array in attend_arrays(q, k, v, scale, causal, pytorch, False))
    return (output, sums) if lse else output


def _importer(array: Any) -> Any:
    """The function that takes a DLPack tensor over into the library of an array."""
    if hasattr(array, "__array_namespace__"):
        namespace = array.__array_namespace__()
    else:
        namespace = sys.modules[type(array).__module__.partition(".")[0]]
    # A library that cannot take it over gets what speaks DLPack.
    return getattr(namespace, "from_dlpack", lambda result: result)


def _bfloat16(array: Any) -> Any:
    """NumPy's name for bf16, which the package ml_dtypes gives it, if that is what the elements are."""
    if type(array).__module__.partition(".")[0] != "numpy":
        return None
    return array.dtype if array.dtype.name == "bfloat16" else None
