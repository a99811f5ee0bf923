"""Python functions become FlashCore's expressions: called once, with values that remember what is done
with them.

A trace is kept by what the function is made of: its code, the numbers and functions that it closes over,
and the element types and shapes of its tensors, but not their contents, nor which tensors they are. A
function that has been seen is not called again; the tensors are taken from where it has them. What cannot
be compared (an object that it reads attributes of, the contents of a tensor, what it imports) makes it be
called each time, which is always right: in doubt, a function is not compared.
"""

from __future__ import annotations

import dis
import functools
import inspect
import linecache
import math
import os
import re
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, NoReturn

from ._flashcore import Rule

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    torch = None

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
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def trace(kind: str, argument: str, function: Any) -> tuple[Rule, tuple[Any, ...]]:
    """Traces a mask or score function; returns the rule and the tensors that it loads from."""
    if not callable(function):
        raise TypeError(f"{argument} is a {type(function)}, expected a function")
    parts = _Parts()
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


def check_contents(argument: str, tensors: Any, parts: _Parts | None = None) -> None:
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
    if _is_torch(tensor):
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


# ---- what a function is made of ----------------------------------------------------------------------


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


def _is_opaque(function: Any) -> bool:
    """Returns whether a function is always the same: one of a library's, that closes over nothing of the caller's.
    ``functools.wraps`` changes what a function says of its module, not its globals."""
    if function.__closure__ or function.__code__.co_filename.startswith(_HERE):
        return False
    return _is_library(function.__globals__.get("__name__"))


def _is_constant(function: Any) -> bool:
    """Returns whether a built-in function is always the same: methods of objects are built-in functions as well."""
    owner = function.__self__
    named = owner is None or (type(owner) is types.ModuleType and _is_library(owner.__name__.lstrip("_")))
    return named and function.__name__ not in _UNSEEN


class _Parts:
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
        return all(self._attributes.isdisjoint(_read_by(code)[0]) for code in self._codes)

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
        elif _is_tensor(value):
            known = self.index.get(id(value))
            if known is not None:
                self.key += ("again", known)
                return
            self.index[id(value)] = len(self.tensors)
            self.tensors.append(value)
            self.names.append(name)
            self.key += ("tensor", kind, value.dtype, value.shape)
            if _is_torch(value):
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
        if _is_opaque(function):
            self.key.append(function)
            return
        if not self._is_new(function):
            return
        code = function.__code__
        self._codes.append(code)
        self._attributes.update(function.__dict__)
        self.key.append(code)
        names, within = _read_by(code)
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


@functools.lru_cache(_MOST_TRACES)
def _read_by(code: Any) -> tuple[tuple[str, ...], bool]:
    """Returns the names of globals and attributes that code may look up, nested functions included, and whether it
    stays within what it is made of."""
    inner = [_read_by(it) for it in code.co_consts if isinstance(it, types.CodeType)]
    names = tuple(dict.fromkeys((*code.co_names, *(name for it, _ in inner for name in it))))
    steps = [(it.opname, it.argval) for it in dis.get_instructions(code)]
    within = (
        all(it for _, it in inner)
        and not any(name in _UNSEEN or name.startswith("__") for name in code.co_names)
        and not any(step in _OUTSIDE or (step in _OF_CELLS and of in code.co_freevars) for step, of in steps)
    )
    return names, within


def _is_torch(value: Any) -> bool:
    return torch is not None and isinstance(value, torch.Tensor)


def _is_tensor(value: Any) -> bool:
    # Their classes have the same attributes.
    if isinstance(value, type):
        return False
    return _is_torch(value) or (hasattr(value, "__dlpack__") and hasattr(value, "shape"))


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
            is_number = _is_tensor(item) and not _is_torch(item) and not len(item.shape)
            # A dictionary may contain many numbers, of which the function loads few, or reads some.
            traced.repeatable = traced.repeatable and not is_number
            values[key] = item if is_number else _with_views(traced, item, known)
        return values
    if kind is functools.partial:
        func, *args = _with_views(traced, (value.func, *value.args), known)
        return functools.partial(func, *args, **_with_views(traced, value.keywords, known))
    if kind is not types.FunctionType:
        if not _is_tensor(value) or _is_torch(value):
            return value
        return View(traced, value) if len(value.shape) else traced.load(value, ())
    if _is_opaque(value):
        return value
    code = value.__code__
    cells = tuple(types.CellType() for _ in value.__closure__ or ())
    around = dict(value.__globals__)
    made = known[id(value)] = types.FunctionType(code, around, value.__name__, None, cells or None)
    made.__dict__.update(value.__dict__)
    made.__defaults__ = _with_views(traced, value.__defaults__, known)
    made.__kwdefaults__ = _with_views(traced, value.__kwdefaults__, known)
    for name in _read_by(code)[0]:
        if name in around:
            around[name] = _with_views(traced, around[name], known)
    for cell, given in zip(cells, value.__closure__ or ()):
        try:
            cell.cell_contents = _with_views(traced, given.cell_contents, known)
        except ValueError:  # it is empty
            pass
    return made


# ---- where something went wrong ----------------------------------------------------------------------


def _is_ours(path: str) -> bool:
    libraries = [_HERE]
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


def _refuse_hidden_array(error: IndexError) -> None:
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


# ---- values ------------------------------------------------------------------------------------------


class Trace:
    """The operations that a traced function has done so far."""

    def __init__(self, kind: str, function: Any, parts: _Parts) -> None:
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
            _refuse_hidden_array(error)
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
        if _is_tensor(value) and not len(value.shape):
            return self.load(value, ())
        if _is_tensor(value):
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
        return _select(_compare("lt", index, 0), _arithmetic("add", index, size), index)


def _is_recording() -> bool:
    """Returns whether autograd records operations."""
    return torch is not None and bool(torch.is_grad_enabled())


def _stored(tensor: Any) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _STORED:
        refuse(f"a tensor has element type {dtype}, expected {', '.join(_STORED)}")
    return _STORED[dtype]


class Traced:
    """A traced number of type ``f32``, ``i32`` or ``bool``."""

    __slots__ = ("_constant", "_name", "_natural", "_trace", "_type")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, trace: Trace, name: str, type: str, natural: bool = False, constant: Any = None) -> None:
        self._trace, self._name, self._type = trace, name, type
        # Whether it is known not to be negative.
        self._natural, self._constant = natural, constant

    def __repr__(self) -> str:
        return f"<traced {self._type} {self._name}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _CONSTANT_MAKERS or (name in _FUNCTIONS and name not in ("where",)):
            return functools.partial(_call, name, self)
        if name == "dtype" and torch is not None:
            return {"f32": torch.float32, "i32": torch.int32, "bool": torch.bool}[self._type]
        if name == "device":
            return None  # what is made there becomes a constant of the function
        refuse(f"`.{name}` of a traced value is not supported")

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    @property
    def ndim(self) -> int:
        return 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(_name_of(function), *args, **(kwargs or {}))

    def __array_ufunc__(self, function: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if method != "__call__":
            refuse(f"numpy.{function.__name__}.{method} of a traced value is not supported")
        return _call(function.__name__, *args, **kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _call(function.__name__, *args, **kwargs)

    def __bool__(self) -> bool:
        refuse(
            "a function cannot branch on a traced value (if, and, or, not, min, max, a < b < c), expected torch.where, "
            "&, |, ~, torch.minimum or torch.maximum"
        )

    def _no_number(self, *_: Any) -> NoReturn:
        refuse("a traced value is no number yet, expected torch's function of it in the place of Python's or math's")

    __int__ = __float__ = __index__ = __complex__ = __round__ = __floor__ = __ceil__ = __trunc__ = _no_number

    def __iter__(self) -> NoReturn:
        refuse("a traced value is one number, and cannot be iterated over")

    __len__ = __iter__

    def __getitem__(self, index: Any) -> Any:
        refuse("a traced value is one number, and has no elements")


class View(Traced):
    """A tensor with some of its dimensions indexed."""

    __slots__ = ("_indices", "_tensor")

    def __init__(self, trace: Trace, tensor: Any, indices: tuple[Any, ...] | None = None) -> None:
        super().__init__(trace, "a tensor", "")
        self._tensor = tensor
        # One for each dimension, None where there is none yet.
        self._indices: tuple[Any, ...] = (None,) * len(tensor.shape) if indices is None else indices

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for size, index in zip(self._tensor.shape, self._indices) if index is None)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self._tensor.dtype

    def __len__(self) -> int:  # type: ignore[override]
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        given = list(index) if isinstance(index, tuple) else [index]
        if any(it is Ellipsis for it in given):
            place = next(at for at, it in enumerate(given) if it is Ellipsis)
            given[place : place + 1] = [slice(None)] * (self.ndim - len(given) + 1)
        if len(given) > self.ndim:
            refuse(f"{len(given)} indices for a tensor of {self.ndim} dimensions")
        indices = list(self._indices)
        free = [at for at, it in enumerate(indices) if it is None]
        for at, it in zip(free, given):
            if isinstance(it, slice):
                if it != slice(None):
                    refuse("a part of a dimension is not supported, expected an index or `:`")
            elif it is None or it is True or it is False:
                refuse(f"{it} as an index is not supported, expected a whole number")
            else:
                indices[at] = self._trace.lift(it)
        if any(it is None for it in indices):
            return View(self._trace, self._tensor, tuple(indices))
        return self._trace.load(self._tensor, tuple(indices))


# ---- operations --------------------------------------------------------------------------------------


def to_float(value: Traced) -> Traced:
    if value._type == "f32":
        return value
    if value._constant is not None:
        return value._trace.lift(float(value._constant))
    if value._type == "bool":
        return value._trace.make("f32", f"(select {value._name} 1.0 0.0)")
    return value._trace.make("f32", f"(f32 {value._name})")


def to_int(value: Traced) -> Traced:
    if value._type == "i32":
        return value
    if value._constant is not None and math.isfinite(value._constant):
        return value._trace.lift(int(value._constant))
    if value._type == "bool":
        return value._trace.make("i32", f"(select {value._name} 1 0)", natural=True)
    return value._trace.make("i32", f"(i32 {value._name})")


def to_bool(value: Traced) -> Traced:
    if value._type == "bool":
        return value
    zero = "0" if value._type == "i32" else "0.0"
    return value._trace.make("bool", f"(ne {value._name} {zero})")


def _both(x: Any, y: Any) -> tuple[Traced, Traced]:
    """Converts two operands to one type, as PyTorch promotes them."""
    trace = _trace_of(x, y)
    a, b = trace.lift(x), trace.lift(y)
    if "f32" in (a._type, b._type):
        return to_float(a), to_float(b)
    if "i32" in (a._type, b._type):
        return to_int(a), to_int(b)
    return a, b


def _floats(a: Any, b: Any) -> tuple[Traced, Traced]:
    trace = _trace_of(a, b)
    return to_float(trace.lift(a)), to_float(trace.lift(b))


def _value(x: Any) -> Traced:
    return _trace_of(x).lift(x)


def _trace_of(*values: Any) -> Trace:
    for value in values:
        if isinstance(value, Traced):
            return value._trace
    raise AssertionError("an operation without a traced value")


def _arithmetic(operation: str, x: Any, y: Any) -> Traced:
    a, b = _both(x, y)
    if a._type == "bool":
        logical = {"add": "or", "mul": "and", "max": "or", "min": "and"}.get(operation)
        if logical is not None:
            return _bitwise(logical, a, b)
        a, b = to_int(a), to_int(b)
    if operation == "max":
        natural = a._natural or b._natural
    else:
        natural = operation != "sub" and a._natural and b._natural
    return a._trace.make(a._type, f"({operation} {a._name} {b._name})", natural=natural and a._type == "i32")


def _compare(comparison: str, x: Any, y: Any) -> Traced:
    a, b = _both(x, y)
    if a._type == "bool" and comparison in ("eq", "ne"):
        differs = a._trace.make("bool", f"(xor {a._name} {b._name})")
        return differs if comparison == "ne" else _not(differs)
    if a._type == "bool":
        a, b = to_int(a), to_int(b)
    return a._trace.make("bool", f"({comparison} {a._name} {b._name})")


def _bitwise(operation: str, x: Any, y: Any) -> Traced:
    a, b = _both(x, y)
    if a._type == "f32":
        refuse(f"`{operation}` of floating-point numbers, expected truth values or whole numbers")
    natural = (a._natural and b._natural) or (operation == "and" and (a._natural or b._natural))
    return a._trace.make(a._type, f"({operation} {a._name} {b._name})", natural=natural)


def _logical(operation: str, a: Any, b: Any) -> Traced:
    trace = _trace_of(a, b)
    return _bitwise(operation, to_bool(trace.lift(a)), to_bool(trace.lift(b)))


def _shift(operation: str, x: Any, y: Any) -> Traced:
    a, b = _both(x, y)
    if a._type != "i32":
        refuse(f"a shift of {a._type}, expected whole numbers")
    return a._trace.make("i32", f"({operation} {a._name} {b._name})", natural=operation == "shr" and a._natural)


def _not(x: Any) -> Traced:
    a = _value(x)
    if a._type == "f32":
        refuse("`~` of a floating-point number, expected a truth value or a whole number")
    return a._trace.make(a._type, f"(not {a._name})")


def _logical_not(a: Any) -> Traced:
    return _not(to_bool(_value(a)))


def _divide(x: Any, y: Any, *, rounding_mode: str | None = None) -> Traced:
    if rounding_mode == "floor":
        return _floor_divide(x, y)
    if rounding_mode is not None:
        refuse(f"rounding_mode={rounding_mode!r}, expected None or 'floor'")
    a, b = _floats(x, y)
    return a._trace.make("f32", f"(div {a._name} {b._name})")


def _floor_divide(x: Any, y: Any) -> Traced:
    a, b = _both(x, y)
    return _divide_floats(a, b)[0] if a._type == "f32" else _arithmetic("div", to_int(a), to_int(b))


def _divide_floats(a: Traced, b: Traced) -> tuple[Traced, Traced]:
    """Returns the quotient, rounded down, and the remainder, which has the sign of the divisor."""
    quotient = _floor(_divide(a, b))
    # Nothing of an infinite divisor is taken away, which zero times infinity would not say.
    product = _select(_compare("eq", quotient, 0.0), 0.0, _arithmetic("mul", b, quotient))
    rest = _arithmetic("sub", a, product)
    # The quotient was rounded up to a whole number, or is a negative one too small for a float.
    signs = _bitwise("xor", _compare("lt", rest, 0.0), _compare("lt", b, 0.0))
    above = _bitwise("and", signs, _compare("ne", rest, 0.0))
    return (
        _select(above, _arithmetic("sub", quotient, 1.0), quotient),
        _select(above, _arithmetic("add", rest, b), rest),
    )


def _remainder(x: Any, y: Any) -> Traced:
    a, b = _both(x, y)
    if a._type == "f32":
        return _divide_floats(a, b)[1]
    a, b = to_int(a), to_int(b)
    # It has the sign of the divisor.
    return a._trace.make("i32", f"(rem {a._name} {b._name})", natural=b._natural)


def _power(x: Any, y: Any) -> Traced:
    trace = _trace_of(x, y)
    a, b = trace.lift(x), trace.lift(y)
    whole = b._constant
    if isinstance(whole, float) and whole.is_integer() and abs(whole) <= _LAST_ODD:
        whole = int(whole)
    if isinstance(whole, int) and not isinstance(whole, bool):
        base = to_float(a) if "f32" in (a._type, b._type) else to_int(a)
        if whole >= 0:
            return _product(base, whole)
        if base._type == "f32":
            return _divide(1.0, _product(base, -whole))
    if "f32" not in (a._type, b._type):
        refuse("a power of whole numbers, expected a constant exponent that is not negative, or floating-point numbers")
    positive = a._constant is not None and a._constant > 0
    if positive or b._constant is not None:
        # Of a negative base there is none, as in PyTorch: the exponent is no whole number.
        return _exp2(_arithmetic("mul", to_float(b), _log2(a)))
    return _signed_power(to_float(a), b)


# Beyond this all floats are even.
_LAST_ODD = float(2**24)


def _product(base: Traced, count: int) -> Traced:
    """Multiplies so many equal factors by repeated squaring."""
    if count == 0:
        one: Traced = base._trace.lift(1.0 if base._type == "f32" else 1)
        return one
    half = base if count < 2 else _product(base, count // 2)
    if count < 2:
        return half
    square = _arithmetic("mul", half, half)
    return _arithmetic("mul", square, base) if count % 2 else square


def _signed_power(a: Traced, exponent: Traced) -> Traced:
    """Computes a power of a base that may be negative or zero, for which the exponent must be an
    integer."""
    b = to_float(exponent)
    magnitude = _exp2(_arithmetic("mul", b, _log2(_absolute(a))))
    is_odd = to_bool(_bitwise("and", to_int(exponent), 1))
    if exponent._type == "f32":
        is_odd = _bitwise("and", is_odd, _compare("lt", _absolute(b), _LAST_ODD))
    below = _select(is_odd, _negative(magnitude), magnitude)
    if exponent._type == "f32":
        below = _select(_compare("eq", _truncate(b), b), below, math.nan)
    # Anything to the power of zero is one, zero as well.
    return _select(_compare("eq", b, 0.0), 1.0, _select(_compare("lt", a, 0.0), below, magnitude))


def _negative(x: Any) -> Traced:
    a = _value(x)
    if a._type == "bool":
        refuse("the negative of a truth value, expected a number")
    return a._trace.make(a._type, f"(neg {a._name})")


def _absolute(x: Any) -> Traced:
    a = _value(x)
    a = to_int(a) if a._type == "bool" else a
    return a._trace.make(a._type, f"(abs {a._name})", natural=a._type == "i32")


def _unary(operation: str, x: Any) -> Traced:
    a = to_float(_value(x))
    return a._trace.make("f32", f"({operation} {a._name})")


def _exp2(a: Any) -> Traced:
    return _unary("exp2", a)


def _log2(a: Any) -> Traced:
    return _unary("log2", a)


def _exp(a: Any) -> Traced:
    return _exp2(_arithmetic("mul", to_float(_value(a)), math.log2(math.e)))


def _log(a: Any) -> Traced:
    return _arithmetic("mul", _log2(a), math.log(2.0))


def _sqrt(a: Any) -> Traced:
    return _exp2(_arithmetic("mul", _log2(a), 0.5))


def _sigmoid(a: Any) -> Traced:
    # Of the exponential that does not overflow: the slope divides it by the denominator.
    value = to_float(_value(a))
    below = _compare("lt", value, 0.0)
    small = _exp(_select(below, value, _negative(value)))
    return _divide(_select(below, small, 1.0), _arithmetic("add", small, 1.0))


def _truncate(x: Any) -> Traced:
    a = _value(x)
    if a._type != "f32":
        return a
    # Beyond these a float is whole.
    small = _compare("lt", _absolute(a), float(2**23))
    return _select(small, to_float(to_int(a)), a)


def _floor(x: Any) -> Traced:
    a = _value(x)
    whole = _truncate(a)
    return whole if a._type != "f32" else _arithmetic("sub", whole, _select(_compare("gt", whole, a), 1.0, 0.0))


def _ceil(x: Any) -> Traced:
    a = _value(x)
    return a if a._type != "f32" else _negative(_floor(_negative(a)))


def _sign(x: Any) -> Traced:
    a = _value(x)
    return _arithmetic("sub", to_int(_compare("gt", a, 0)), to_int(_compare("lt", a, 0)))


def _select(holds: Any, x: Any, y: Any) -> Traced:
    trace = _trace_of(holds, x, y)
    condition = to_bool(trace.lift(holds))
    a, b = _both(trace.lift(x), trace.lift(y))
    if a._type == "bool":
        return _bitwise("or", _bitwise("and", condition, a), _bitwise("and", _not(condition), b))
    natural = a._natural and b._natural
    return trace.make(a._type, f"(select {condition._name} {a._name} {b._name})", natural=natural)


def _clamp(a: Any, min: Any = None, max: Any = None) -> Traced:
    result = _trace_of(a, min, max).lift(a)
    result = result if min is None else _arithmetic("max", result, min)
    return result if max is None else _arithmetic("min", result, max)


def _extreme(operation: str, a: Any, b: Any = None) -> Traced:
    if b is None or isinstance(b, (bool, int)):
        refuse(f"torch.{operation} over a dimension is not supported: a traced value is one number")
    return _arithmetic(operation, a, b)


def _cast(x: Any, dtype: Any = None, **_: Any) -> Traced:
    a = _value(x)
    name = str(getattr(dtype, "dtype", dtype)).removeprefix("torch.").removeprefix("<class 'numpy.").removesuffix("'>")
    # Values have 32 bits: fewer are not rounded to, as in kernels that Triton compiles.
    if name in ("float32", "float16", "bfloat16"):
        return to_float(a)
    if name in ("int64", "int32"):
        return to_int(a)
    if name == "bool":
        return to_bool(a)
    refuse(f"a value as {name}, expected float32, float16, bfloat16, int32, int64 or bool")


def _to(x: Any, *given: Any, dtype: Any = None, **_: Any) -> Traced:
    """Converts a value. It is on no device, and goes to any, as functions do that move one beside another."""
    devices = (torch.device,) if torch is not None else ()
    for it in (*given, dtype):
        if it is not None and not isinstance(it, (bool, str, *devices)):
            return _cast(x, it)
    return _value(x)


def _constant(a: Any, value: Any, size: Any = (), dtype: Any = None, **_: Any) -> Traced:
    if tuple(size):
        refuse(f"a tensor of shape {tuple(size)} is made, expected a number")
    made: Traced = a._trace.lift(value)
    return made if dtype is None else _cast(made, dtype)


def _like(a: Any, value: Any, dtype: Any = None, **_: Any) -> Traced:
    like = a._trace.lift(value)
    if dtype is not None:
        return _cast(like, dtype)
    return {"f32": to_float, "i32": to_int, "bool": to_bool}[a._type](like)


def _reflected(function: Callable[[Any, Any], Traced]) -> Callable[[Any, Any], Traced]:
    return lambda a, b: function(b, a)


def _add(a: Any, b: Any, *, alpha: Any = 1) -> Traced:
    return _arithmetic("add", a, b if alpha == 1 else _arithmetic("mul", _trace_of(a, b).lift(b), alpha))


def _subtract(a: Any, b: Any, *, alpha: Any = 1) -> Traced:
    return _arithmetic("sub", a, b if alpha == 1 else _arithmetic("mul", _trace_of(a, b).lift(b), alpha))


_multiply = functools.partial(_arithmetic, "mul")
_OPERATORS: dict[str, Callable[[Any, Any], Traced]] = {
    "add": _add,
    "sub": _subtract,
    "mul": _multiply,
    "truediv": _divide,
    "floordiv": _floor_divide,
    "mod": _remainder,
    "pow": _power,
    "and": functools.partial(_bitwise, "and"),
    "or": functools.partial(_bitwise, "or"),
    "xor": functools.partial(_bitwise, "xor"),
    "lshift": functools.partial(_shift, "shl"),
    "rshift": functools.partial(_shift, "shr"),
}
_COMPARISONS = {name: functools.partial(_compare, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
# By the names that Python's operators, PyTorch's functions and methods, and NumPy's have for them.
_FUNCTIONS: dict[str, Callable[..., Traced]] = {
    **_OPERATORS,
    **{f"r{name}": _reflected(function) for name, function in _OPERATORS.items()},
    **_COMPARISONS,
    "rdiv": _reflected(_divide),
    "subtract": _subtract,
    "rsub": _reflected(_subtract),
    "multiply": _multiply,
    "div": _divide,
    "divide": _divide,
    "true_divide": _divide,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "power": _power,
    "float_power": lambda a, b: _power(to_float(_trace_of(a, b).lift(a)), b),
    "square": lambda a: _multiply(a, a),
    "equal": _COMPARISONS["eq"],
    "not_equal": _COMPARISONS["ne"],
    "less": _COMPARISONS["lt"],
    "less_equal": _COMPARISONS["le"],
    "greater": _COMPARISONS["gt"],
    "greater_equal": _COMPARISONS["ge"],
    "minimum": functools.partial(_arithmetic, "min"),
    "maximum": functools.partial(_arithmetic, "max"),
    "fmin": functools.partial(_arithmetic, "min"),
    "fmax": functools.partial(_arithmetic, "max"),
    "min": functools.partial(_extreme, "min"),
    "max": functools.partial(_extreme, "max"),
    **{f"bitwise_{name}": _OPERATORS[name] for name in ("and", "or", "xor")},
    "bitwise_not": _not,
    "invert": _not,
    "bitwise_left_shift": _OPERATORS["lshift"],
    "bitwise_right_shift": _OPERATORS["rshift"],
    "left_shift": _OPERATORS["lshift"],
    "right_shift": _OPERATORS["rshift"],
    **{f"logical_{name}": functools.partial(_logical, name) for name in ("and", "or", "xor")},
    "logical_not": _logical_not,
    "neg": _negative,
    "negative": _negative,
    "pos": lambda a: a,
    "positive": lambda a: a,
    "abs": _absolute,
    "absolute": _absolute,
    "fabs": lambda a: to_float(_absolute(a)),
    "tanh": functools.partial(_unary, "tanh"),
    "exp": _exp,
    "exp2": _exp2,
    "log": _log,
    "log2": _log2,
    "sqrt": _sqrt,
    "rsqrt": lambda a: _exp2(_multiply(_log2(a), -0.5)),
    "reciprocal": lambda a: _divide(1.0, a),
    "sigmoid": _sigmoid,
    "relu": lambda a: _arithmetic("max", a, 0),
    "floor": _floor,
    "ceil": _ceil,
    "trunc": _truncate,
    "sign": _sign,
    "where": _select,
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda a, min: _clamp(a, min),
    "clamp_max": lambda a, max: _clamp(a, None, max),
    "to": _to,
    "type": _cast,
    "astype": _cast,
    "type_as": _cast,
    "float": lambda a: to_float(_value(a)),
    "int": lambda a: to_int(_value(a)),
    "long": lambda a: to_int(_value(a)),
    "bool": lambda a: to_bool(_value(a)),
    "half": lambda a: to_float(_value(a)),
    "bfloat16": lambda a: to_float(_value(a)),
    "clone": lambda a: a,
    "detach": lambda a: a._trace.detach(a),
    "contiguous": lambda a: a,
    "full_like": _like,
    "zeros_like": lambda a, **options: _like(a, 0, **options),
    "ones_like": lambda a, **options: _like(a, 1, **options),
}
_CONSTANT_MAKERS: dict[str, Callable[..., Traced]] = {
    "new_full": lambda a, size, value, **options: _constant(a, value, size, **options),
    "new_zeros": lambda a, size=(), **options: _constant(a, 0, size, **options),
    "new_ones": lambda a, size=(), **options: _constant(a, 1, size, **options),
    "new_tensor": lambda a, value, **options: _constant(a, value, **options),
}


def _name_of(function: Any) -> str:
    name = str(getattr(function, "__name__", function))
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def _call(name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Applies an operation by its name."""
    if name == "getitem":
        return _element(*args)
    function = _FUNCTIONS.get(name) or _CONSTANT_MAKERS.get(name)
    if function is None:
        refuse(f"`{name}` of traced values is not supported")
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        refuse(f"`{name}` with these arguments is not supported: {error}")
    return function(*args, **kwargs)


def _element(tensor: Any, index: Any) -> Any:
    indices = index if isinstance(index, tuple) else (index,)
    if isinstance(tensor, Traced):
        return tensor[index]
    return View(_trace_of(*indices), tensor)[index]


def _define_operators() -> None:
    for name, function in _OPERATORS.items():
        setattr(Traced, f"__{name}__", lambda self, other, function=function: function(self, other))
        setattr(Traced, f"__r{name}__", lambda self, other, function=function: function(other, self))
    for name, function in _COMPARISONS.items():
        setattr(Traced, f"__{name}__", lambda self, other, function=function: function(self, other))
    for name in ("neg", "pos", "abs", "invert"):
        setattr(Traced, f"__{name}__", lambda self, function=_FUNCTIONS[name]: function(self))


_define_operators()


# ---- PyTorch -----------------------------------------------------------------------------------------

# What says nothing of a tensor's contents, but what traces are kept by.
_SHAPES = {"shape", "dtype", "ndim", "size", "dim", "numel", "len", "is_floating_point"}


def _has_traced(values: Any) -> bool:
    return any(
        isinstance(value, Traced) or (isinstance(value, (tuple, list)) and _has_traced(value)) for value in values
    )


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
            name = _name_of(function)
            if _has_traced(args) or _has_traced(kwargs.values()):
                return _call(name, *args, **kwargs)
            if name == "getitem" and id(args[0]) in self.trace.parts.index:
                index = args[1] if isinstance(args[1], tuple) else (args[1],)
                if all(type(it) is int or it is Ellipsis or (type(it) is slice and it == slice(None)) for it in index):
                    return View(self.trace, args[0])[args[1]]
            of = getattr(getattr(function, "__self__", None), "__name__", None) if name == "get" else name
            if of not in _SHAPES:
                self.trace.repeatable = False
            return function(*args, **kwargs)
