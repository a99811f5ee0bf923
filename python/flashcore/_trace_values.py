"""Values that remember what is done with them, and what can be done: Python's operators, functions of PyTorch and NumPy.

They follow PyTorch where types are promoted and numbers are rounded, and become expressions of FlashCore's text form.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from ._installed import torch
from ._trace_refusals import refuse

if TYPE_CHECKING:
    from ._trace import Trace


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
            return functools.partial(call, name, self)
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
        return call(name_of(function), *args, **(kwargs or {}))

    def __array_ufunc__(self, function: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if method != "__call__":
            refuse(f"numpy.{function.__name__}.{method} of a traced value is not supported")
        return call(function.__name__, *args, **kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return call(function.__name__, *args, **kwargs)

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


def arithmetic(operation: str, x: Any, y: Any) -> Traced:
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


def compare(comparison: str, x: Any, y: Any) -> Traced:
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
    return _divide_floats(a, b)[0] if a._type == "f32" else arithmetic("div", to_int(a), to_int(b))


def _divide_floats(a: Traced, b: Traced) -> tuple[Traced, Traced]:
    """Returns the quotient, rounded down, and the remainder, which has the sign of the divisor."""
    quotient = _floor(_divide(a, b))
    # Nothing of an infinite divisor is taken away, which zero times infinity would not say.
    product = select(compare("eq", quotient, 0.0), 0.0, arithmetic("mul", b, quotient))
    rest = arithmetic("sub", a, product)
    # The quotient was rounded up to a whole number, or is a negative one too small for a float.
    signs = _bitwise("xor", compare("lt", rest, 0.0), compare("lt", b, 0.0))
    above = _bitwise("and", signs, compare("ne", rest, 0.0))
    return (
        select(above, arithmetic("sub", quotient, 1.0), quotient),
        select(above, arithmetic("add", rest, b), rest),
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
        return _exp2(arithmetic("mul", to_float(b), _log2(a)))
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
    square = arithmetic("mul", half, half)
    return arithmetic("mul", square, base) if count % 2 else square


def _signed_power(a: Traced, exponent: Traced) -> Traced:
    """Computes a power of a base that may be negative or zero, for which the exponent must be an
    integer."""
    b = to_float(exponent)
    magnitude = _exp2(arithmetic("mul", b, _log2(_absolute(a))))
    is_odd = to_bool(_bitwise("and", to_int(exponent), 1))
    if exponent._type == "f32":
        is_odd = _bitwise("and", is_odd, compare("lt", _absolute(b), _LAST_ODD))
    below = select(is_odd, _negative(magnitude), magnitude)
    if exponent._type == "f32":
        below = select(compare("eq", _truncate(b), b), below, math.nan)
    # Anything to the power of zero is one, zero as well.
    return select(compare("eq", b, 0.0), 1.0, select(compare("lt", a, 0.0), below, magnitude))


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
    return _exp2(arithmetic("mul", to_float(_value(a)), math.log2(math.e)))


def _log(a: Any) -> Traced:
    return arithmetic("mul", _log2(a), math.log(2.0))


def _sqrt(a: Any) -> Traced:
    return _exp2(arithmetic("mul", _log2(a), 0.5))


def _sigmoid(a: Any) -> Traced:
    # Of the exponential that does not overflow: the slope divides it by the denominator.
    value = to_float(_value(a))
    below = compare("lt", value, 0.0)
    small = _exp(select(below, value, _negative(value)))
    return _divide(select(below, small, 1.0), arithmetic("add", small, 1.0))


def _truncate(x: Any) -> Traced:
    a = _value(x)
    if a._type != "f32":
        return a
    # Beyond these a float is whole.
    small = compare("lt", _absolute(a), float(2**23))
    return select(small, to_float(to_int(a)), a)


def _floor(x: Any) -> Traced:
    a = _value(x)
    whole = _truncate(a)
    return whole if a._type != "f32" else arithmetic("sub", whole, select(compare("gt", whole, a), 1.0, 0.0))


def _ceil(x: Any) -> Traced:
    a = _value(x)
    return a if a._type != "f32" else _negative(_floor(_negative(a)))


def _sign(x: Any) -> Traced:
    a = _value(x)
    return arithmetic("sub", to_int(compare("gt", a, 0)), to_int(compare("lt", a, 0)))


def select(holds: Any, x: Any, y: Any) -> Traced:
    trace = _trace_of(holds, x, y)
    condition = to_bool(trace.lift(holds))
    a, b = _both(trace.lift(x), trace.lift(y))
    if a._type == "bool":
        return _bitwise("or", _bitwise("and", condition, a), _bitwise("and", _not(condition), b))
    natural = a._natural and b._natural
    return trace.make(a._type, f"(select {condition._name} {a._name} {b._name})", natural=natural)


def _clamp(a: Any, min: Any = None, max: Any = None) -> Traced:
    result = _trace_of(a, min, max).lift(a)
    result = result if min is None else arithmetic("max", result, min)
    return result if max is None else arithmetic("min", result, max)


def _extreme(operation: str, a: Any, b: Any = None) -> Traced:
    if b is None or isinstance(b, (bool, int)):
        refuse(f"torch.{operation} over a dimension is not supported: a traced value is one number")
    return arithmetic(operation, a, b)


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
    return arithmetic("add", a, b if alpha == 1 else arithmetic("mul", _trace_of(a, b).lift(b), alpha))


def _subtract(a: Any, b: Any, *, alpha: Any = 1) -> Traced:
    return arithmetic("sub", a, b if alpha == 1 else arithmetic("mul", _trace_of(a, b).lift(b), alpha))


_multiply = functools.partial(arithmetic, "mul")
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
_COMPARISONS = {name: functools.partial(compare, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
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
    "minimum": functools.partial(arithmetic, "min"),
    "maximum": functools.partial(arithmetic, "max"),
    "fmin": functools.partial(arithmetic, "min"),
    "fmax": functools.partial(arithmetic, "max"),
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
    "relu": lambda a: arithmetic("max", a, 0),
    "floor": _floor,
    "ceil": _ceil,
    "trunc": _truncate,
    "sign": _sign,
    "where": select,
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


def name_of(function: Any) -> str:
    name = str(getattr(function, "__name__", function))
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def call(name: str, /, *args: Any, **kwargs: Any) -> Any:
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


def has_traced(values: Any) -> bool:
    return any(
        isinstance(value, Traced) or (isinstance(value, (tuple, list)) and has_traced(value)) for value in values
    )
