"""Python functions become FlashCore's expressions: called once, with values that remember what is done
with them.

A trace is kept by what the function is made of: its code, the numbers and functions that it closes over,
and the element types and shapes of its tensors, but not their contents, nor which tensors they are. A
function that has been seen is not called again; the tensors are taken from where it has them. What cannot
be compared (an object that it reads attributes of, the contents of a tensor, what it imports) makes it be
called each time, which is always right: in doubt, a function is not compared.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
import types
from typing import Any

from ._flashcore import Rule
from ._installed import is_torch, torch
from ._trace_parts import Parts, is_opaque, is_tensor, read_by
from ._trace_refusals import refuse, refuse_hidden_array
from ._trace_values import (
    Traced,
    View,
    arithmetic,
    call,
    compare,
    has_traced,
    name_of,
    select,
    to_bool,
    to_float,
)

# What a function is called with, as the text form has it.
SYMBOLS = {
    "mask": ("batch", "head", "query", "key"),
    "score": ("score", "batch", "head", "query", "key"),
}
_STORED = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "bool": "bool",
}
# What a load gives, where it is not what is stored.
_LOADED = {"f16": "f32", "bf16": "f32", "i64": "i32", "u8": "i32"}
_MOST_TENSORS, _MOST_DIMENSIONS = 8, 4
# Traces that are kept at most: the oldest go.
_MOST_TRACES = 1024


def trace(kind: str, argument: str, function: Any) -> tuple[Rule, tuple[Any, ...]]:
    """Traces a mask or score function; returns the rule and the tensors that it loads from."""
    if not callable(function):
        raise TypeError(f"{argument} is a {type(function)}, expected a function")
    parts = Parts()
    parts.add(function, "")
    key = (kind, *parts.key)
    found = _traces.get(key) if parts.comparable else None
    if found is None:
        check_arguments(kind, argument, function)
        traced = Trace(kind, function, parts)
        try:
            rule = traced.run()
        except NotImplementedError as error:
            raise NotImplementedError(f"{argument}: {error}") from None
        if not (parts.comparable and traced.repeatable):
            check_contents(argument, traced.tensors, parts)
            return rule, tuple(traced.tensors)
        found = (rule, [parts.index[id(tensor)] for tensor in traced.tensors])
        with _keeping:
            while len(_traces) >= _MOST_TRACES:
                _traces.pop(next(iter(_traces)))
            _traces[key] = found
    rule, used = found
    tensors = tuple(parts.tensors[index] for index in used)
    check_contents(argument, tensors, parts)
    return rule, tensors


def check_contents(argument: str, tensors: Any, parts: Parts | None = None) -> None:
    """Refuses whole numbers of more than 32 bits, which kernels cut off, in tensors of the host. To look at those of
    a device would be to wait for it."""
    for tensor in tensors:
        if str(tensor.dtype).removeprefix("torch.") != "int64":
            continue
        least, most = _extremes(tensor)
        if least < -(2**31) or most >= 2**31:
            place = None if parts is None else parts.index.get(id(tensor))
            name = "a tensor" if parts is None or place is None else parts.names[place]
            raise ValueError(
                f"{argument}: {name} contains {least if least < -(2**31) else most}, expected numbers of 32 bits"
            )


def _extremes(tensor: Any) -> tuple[int, int]:
    """Returns the least and the largest number of a tensor; zero where they cannot be seen at once."""
    if is_torch(tensor):
        modes = torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
        ordinary = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu" and not modes
        if not ordinary or not tensor.numel():
            return 0, 0
        least, most = torch.aminmax(tensor)
    elif type(tensor).__module__ == "numpy" and tensor.size:
        least, most = tensor.min(), tensor.max()
    else:
        return 0, 0
    return int(least), int(most)


def check_arguments(kind: str, argument: str, function: Any) -> None:
    """Refuses anything but a function of the expected arguments."""
    if not callable(function):
        raise TypeError(f"{argument} is a {type(function)}, expected a function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise TypeError(
            f"{argument} is a {type(function)} that does not say what it takes, expected a function of Python's"
        ) from None
    try:
        signature.bind(*SYMBOLS[kind])
    except TypeError as error:
        names = ", ".join("b h q_idx kv_idx".split() if kind == "mask" else "score b h q_idx kv_idx".split())
        raise TypeError(f"{argument} cannot be called ({error}), expected a function of ({names})") from None


_traces: dict[tuple[Any, ...], tuple[Rule, list[int]]] = {}
# Threads that trace at once would let the same oldest one go.
_keeping = threading.Lock()


def _with_views(traced: Trace, value: Any, known: dict[int, Any]) -> Any:
    """The same with arrays of libraries that let nobody watch how they are indexed replaced by ones that
    do; ``known`` has the functions, lists and dictionaries that were replaced."""
    kind = type(value)
    if id(value) in known:
        return known[id(value)]
    if kind is tuple:
        return tuple(_with_views(traced, item, known) for item in value)
    if kind is list:
        items = known[id(value)] = []
        items.extend(_with_views(traced, item, known) for item in value)
        return items
    if kind is dict:
        values = known[id(value)] = {}
        for key, item in value.items():
            is_number = is_tensor(item) and not is_torch(item) and not len(item.shape)
            # A dictionary may contain many numbers, of which the function loads few, or reads some.
            traced.repeatable = traced.repeatable and not is_number
            values[key] = item if is_number else _with_views(traced, item, known)
        return values
    if kind is functools.partial:
        func, *args = _with_views(traced, (value.func, *value.args), known)
        return functools.partial(func, *args, **_with_views(traced, value.keywords, known))
    if kind is not types.FunctionType:
        if not is_tensor(value) or is_torch(value):
            return value
        return View(traced, value) if len(value.shape) else traced.load(value, ())
    if is_opaque(value):
        return value
    code = value.__code__
    cells = tuple(types.CellType() for _ in value.__closure__ or ())
    around = dict(value.__globals__)
    made = known[id(value)] = types.FunctionType(code, around, value.__name__, None, cells or None)
    made.__dict__.update(value.__dict__)
    made.__defaults__ = _with_views(traced, value.__defaults__, known)
    made.__kwdefaults__ = _with_views(traced, value.__kwdefaults__, known)
    for name in read_by(code)[0]:
        if name in around:
            around[name] = _with_views(traced, around[name], known)
    for cell, given in zip(cells, value.__closure__ or ()):
        try:
            cell.cell_contents = _with_views(traced, given.cell_contents, known)
        except ValueError:  # it is empty
            pass
    return made


def _is_recording() -> bool:
    """Returns whether autograd records operations."""
    return torch is not None and bool(torch.is_grad_enabled())


def _stored(tensor: Any) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _STORED:
        refuse(f"a tensor has element type {dtype}, expected {', '.join(_STORED)}")
    return _STORED[dtype]


# ---- values ------------------------------------------------------------------------------------------


class Trace:
    """The operations that a traced function has done so far."""

    def __init__(self, kind: str, function: Any, parts: Parts) -> None:
        self.kind = kind
        self.function = function
        self.parts = parts
        self.lines: list[str] = []
        self.known: dict[str, str] = {}
        self.tensors: list[Any] = []
        self.names: list[str] = []
        # Whether another call of the function would do the same whatever its tensors contain.
        self.repeatable = True
        # Values that gradients flow through: those of the score and of tensors that require them. Masks have none.
        self._differentiable = {"score"} if kind == "score" else set()
        self._recorded = _is_recording()

    def run(self) -> Rule:
        function = _with_views(self, self.function, {}) if self.parts.arrays else self.function
        arguments = [
            Traced(self, symbol, "f32" if symbol == "score" else "i32", natural=symbol != "score")
            for symbol in SYMBOLS[self.kind]
        ]
        try:
            if torch is None:
                result = function(*arguments)
            else:
                with _watching(self):
                    result = function(*arguments)
        except IndexError as error:
            refuse_hidden_array(error)
            raise
        try:
            result = self.lift(result)
            if self.kind == "mask":
                result = to_bool(result)
            elif result._type == "bool":
                refuse("a score is a truth value, expected a number")
            else:
                result = to_float(result)
        except NotImplementedError as error:
            code = getattr(self.function, "__code__", None)
            where = f'\n  File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}' if code else ""
            raise NotImplementedError(f"what it returns: {str(error).partition(chr(10))[0]}{where}") from None
        name = re.sub(r"[^A-Za-z0-9_.-]+", "", getattr(self.function, "__name__", "") or "")[:64] or self.kind
        declared = [
            f"(tensor {name} {_stored(tensor)} {max(len(tensor.shape), 1)})"
            for name, tensor in zip(self.names, self.tensors)
        ]
        return Rule(f"({' '.join([self.kind, name, *declared, *self.lines, result._name])})")

    def make(self, type: str, expression: str, natural: bool = False, requires_grad: bool = False) -> Traced:
        name = self.known.get(expression)
        if name is None:
            name = self.known[expression] = f"${len(self.lines)}"
            self.lines.append(f"(let {name} {expression})")
        words = expression.replace("(", " ").replace(")", " ").split()
        if requires_grad or (type == "f32" and not self._differentiable.isdisjoint(words)):
            self._differentiable.add(name)
            if self._recorded and not _is_recording():
                refuse("an operation under torch.no_grad() is not supported: gradients would flow through it")
        return Traced(self, name, type, natural)

    def detach(self, value: Traced) -> Traced:
        """Texts have no such operation: only what has no gradients remains as it is."""
        if isinstance(value, View):
            differentiable = self._requires_grad(value._tensor)
        else:
            differentiable = value._name in self._differentiable
        if differentiable and self._recorded:
            refuse(
                "`detach` of what has gradients (a score, or a tensor that requires grad) is not supported: they would "
                "flow through it"
            )
        # The key does not say which tensors require gradients, nor whether they are recorded.
        self.repeatable = self.repeatable and (self.kind == "mask" or value._constant is not None)
        return value

    def lift(self, value: Any) -> Traced:
        """Converts a number, or a tensor of one element, to a value."""
        if isinstance(value, View):
            refuse(f"a tensor with {value.ndim} dimensions left stands where a number must, expected an index for each")
        if isinstance(value, Traced):
            return value
        if is_tensor(value) and not len(value.shape):
            return self.load(value, ())
        if is_tensor(value):
            refuse(
                f"a tensor of shape {tuple(value.shape)} stands where a number must, expected it indexed by b, h, "
                "q_idx or kv_idx"
            )
        if type(value).__module__ == "numpy" and hasattr(value, "item"):
            value = value.item()
        if isinstance(value, bool):
            return Traced(self, str(value).lower(), "bool", constant=value)
        if isinstance(value, int):
            if not -(2**31) <= value < 2**31:
                refuse(f"{value} has more than 32 bits")
            return Traced(self, str(value), "i32", natural=value >= 0, constant=value)
        if isinstance(value, float):
            return Traced(self, repr(value), "f32", constant=value)
        refuse(f"a {type(value)} stands where a number must")

    def load(self, tensor: Any, indices: tuple[Any, ...]) -> Traced:
        """Loads an element of a tensor."""
        stored = _stored(tensor)
        if len(tensor.shape) > _MOST_DIMENSIONS:
            refuse(f"a tensor has {len(tensor.shape)} dimensions, expected {_MOST_DIMENSIONS} at most")
        number = next((index for index, it in enumerate(self.tensors) if it is tensor), None)
        if number is None:
            number = self._declare(tensor)
        expressions = [self._index(index, size)._name for index, size in zip(indices, tensor.shape)] or ["0"]
        expression = f"(load {self.names[number]} {' '.join(expressions)})"
        return self.make(_LOADED.get(stored, stored), expression, requires_grad=self._requires_grad(tensor))

    def _requires_grad(self, tensor: Any) -> bool:
        repeatable = self.repeatable
        found = self.kind == "score" and bool(getattr(tensor, "requires_grad", False))
        # It was not the function that looked.
        self.repeatable = repeatable
        return found

    def _declare(self, tensor: Any) -> int:
        if len(self.tensors) == _MOST_TENSORS:
            refuse(f"a function loads from more than {_MOST_TENSORS} tensors")
        known = self.parts.index.get(id(tensor))
        if known is None:
            # It came to be in the function, or from where it is not found again.
            self.repeatable = False
        plain = re.sub(r"[^A-Za-z0-9_]+", "", "" if known is None else self.parts.names[known])[:40]
        name = f"{self.kind}.{plain or 'tensor'}"
        self.names.append(f"{name}.{len(self.names)}" if name in self.names else name)
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _index(self, given: Any, size: int) -> Traced:
        index = self.lift(given)
        if index._type != "i32":
            refuse(f"an index is {index._type}, expected a whole number")
        if index._constant is not None:
            if not -size <= index._constant < size:
                refuse(f"index {index._constant} is outside of a dimension of {size}")
            return self.lift(index._constant % size)
        if index._natural:
            return index
        # As PyTorch has it, negative numbers count from the end.
        return select(compare("lt", index, 0), arithmetic("add", index, size), index)


# ---- PyTorch -----------------------------------------------------------------------------------------

# What says nothing of a tensor's contents, but what traces are kept by.
_SHAPES = {"shape", "dtype", "ndim", "size", "dim", "numel", "len", "is_floating_point"}


if torch is not None:
    from torch.overrides import TorchFunctionMode

    class _watching(TorchFunctionMode):  # type: ignore[misc]
        """Sees what is done with ordinary tensors while a function is traced: PyTorch asks nobody else when
        a tensor is indexed."""

        def __init__(self, trace: Trace) -> None:
            super().__init__()
            self.trace = trace

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            name = name_of(function)
            if has_traced(args) or has_traced(kwargs.values()):
                return call(name, *args, **kwargs)
            if name == "getitem" and id(args[0]) in self.trace.parts.index:
                index = args[1] if isinstance(args[1], tuple) else (args[1],)
                if all(type(it) is int or it is Ellipsis or (type(it) is slice and it == slice(None)) for it in index):
                    return View(self.trace, args[0])[args[1]]
            of = getattr(getattr(function, "__self__", None), "__name__", None) if name == "get" else name
            if of not in _SHAPES:
                self.trace.repeatable = False
            return function(*args, **kwargs)
