"""JAX's arrays inside of its transformations: ``jit``, ``grad``, ``vmap``, ``shard_map``.

There an array has a shape and no memory. A call is checked from the shapes while JAX traces it, and
becomes one custom call of the compiled program, which XLA makes with the buffers: on the CPU, or on the
stream of a GPU. Arrays that are in the memory of one device go by DLPack and not through here.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _flashcore
from ._arguments import rows_of_sequences
from ._jax_sharding import OUTER, explicit, over_devices, sizes_of

# Named after the package, of which a process may have two: one may be from a hub.
_FORWARD, _BACKWARD = (f"{__package__}_{name}" for name in ("attention", "attention_backward"))
for _name, _target in ((_FORWARD, "attention"), (_BACKWARD, "attention_backward")):
    for _platform in ("cpu", "CUDA"):
        jax.ffi.register_ffi_target(_name, _flashcore.xla_target(_target, _platform), platform=_platform)

# Where lists, pages, slopes, sinks, factors and the output's memory are among the tensors.
_STARTS, _USED, _ENTRIES, _PAGES, _SLOPES, _SINKS, _FACTORS, _OUT = (3, 4), (5, 6), 8, 9, 10, 11, (12, 13, 14), 15
_HEADS_FIRST = "scaled_dot_product_attention"


class _Call(NamedTuple):
    """A call as it is known while JAX traces it."""

    function: str
    deterministic: bool
    lse: bool
    # Of the tensors that are given, the place of each among all.
    places: tuple[int, ...]
    # XLA's attributes, by name.
    numbers: tuple[tuple[str, Any], ...]
    # The element type of the output.
    dtype: str


def attend(tensors: tuple[Any, ...], numbers: tuple[Any, ...], function: str, lse: Any, deterministic: bool) -> Any:
    """Computes attention; returns the output, or output and log-sum-exps."""
    if len(tensors) > _OUT and tensors[_OUT] is not None:
        raise NotImplementedError("out was given inside of a transformation of JAX's, expected None")
    places = tuple(at for at, tensor in enumerate(tensors) if tensor is not None)
    arrays = _alike([jnp.asarray(tensors[at]) for at in places])
    described: list[Any] = [None] * len(tensors)
    for at, array in zip(places, arrays):
        described[at] = (array.dtype.name, tuple(array.shape), None, 0)
    found, dtype = _flashcore.xla_call(tuple(described), numbers, function)
    attributes = tuple(sorted((name, _attribute(value)) for name, value in found.items()))
    call = _Call(function, bool(deterministic), bool(lse), places, attributes, dtype)
    if _PAGES in places:
        # A table may have more rows than there are sequences.
        sequences = arrays[places.index(3)].shape[0] - 1 if 3 in places else arrays[0].shape[0]
        arrays[places.index(_PAGES)] = arrays[places.index(_PAGES)][:sequences]
    names, answers = _dimensions(call, _FORWARD, [array.shape for array in arrays])
    run = functools.partial(_attention, call)
    if (specs := explicit(names[0], arrays[0], answers)) is not None:
        run = jax.sharding.auto_axes(run, out_sharding=tuple(specs))
    result = run(*arrays)
    return tuple(result) if lse else result[0]


def _attribute(value: Any) -> Any:
    """Returns a scalar in the type that the XLA handlers read."""
    if isinstance(value, bool):
        return value
    return np.int64(value) if isinstance(value, int) else np.float32(value)


def _primal(call: _Call, *arrays: Any) -> Any:
    return _run(call, _FORWARD, *arrays)


def _saved(call: _Call, *arrays: Any) -> Any:
    out, sums = _once(call._replace(lse=True), _FORWARD, *arrays)
    return (out, sums) if call.lse else (out,), (arrays, out, sums)


def _gradients(call: _Call, saved: Any, cotangents: Any) -> Any:
    """Returns the gradients of the arrays, None for those that have none."""
    arrays, out, sums = saved
    given = dict(zip(call.places, arrays))
    _refuse(call, given)
    wanted = _differentiated(call)
    if any(given[at].size == 0 for at in (0, 1, 2)):
        found: Any = [jnp.zeros_like(given[at]) for at in wanted]
        if call.lse and _SINKS in call.places:
            # The log-sum-exp of a row without keys is its sink. What that of a row which belongs to no sequence
            # holds is not defined.
            row = jnp.arange(sums.shape[-1])
            exists = rows_of_sequences(jnp.searchsorted, row, given.get(_STARTS[0]), given.get(_USED[0]))
            of_sums = jnp.where(exists & (sums > -jnp.inf), cotangents[1], 0.0)
            found[-1] = of_sums.sum([at for at in range(of_sums.ndim) if at != of_sums.ndim - 2])
    else:
        found = _once(call, _BACKWARD, *arrays, out, sums, *cotangents)
    gradients = dict(zip(wanted, found))
    return tuple(gradients.get(at) for at in call.places)


_attention = jax.custom_vjp(_primal, nondiff_argnums=(0,))
_attention.defvjp(_saved, _gradients)


def _differentiated(call: _Call) -> list[int]:
    """Returns the places of the tensors that have gradients."""
    return [at for at in (0, 1, 2, _SINKS) if at in call.places]


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _run(call: _Call, target: str, *arrays: Any) -> Any:
    """Runs one of our targets on the devices of the arrays and returns its results."""

    def run(*arrays: Any) -> Any:
        # Not partitioned: a device's own arrays inside of `shard_map`, empty arrays, and programs for GSPMD, which
        # would need other rules than Shardy.
        alone = jax.sharding.get_abstract_mesh().manual_axes or not all(array.size for array in arrays)
        alone = alone or not getattr(jax.config, "jax_use_shardy_partitioner", True)
        return (_launch if alone else _over_devices())(call, target, *arrays)

    def many(size: int, is_mapped: list[bool], *arrays: Any) -> Any:
        if call.places == (0, 1, 2):
            # The handlers fold leading dimensions into the batch.
            arrays = tuple(
                array if mapped else jnp.broadcast_to(array, (size, *array.shape))
                for array, mapped in zip(arrays, is_mapped)
            )
            found = _run(call, target, *arrays)
        else:
            # The lists are those of one call: one call after the other.
            def once(given: list[Any]) -> Any:
                of = iter(given)
                return _run(call, target, *(next(of) if it else array for array, it in zip(arrays, is_mapped)))

            found = jax.lax.map(once, [array for array, it in zip(arrays, is_mapped) if it])
        return found, (True,) * len(found)

    mapped = jax.custom_batching.custom_vmap(run)
    mapped.def_vmap(many)
    return mapped(*arrays)


def _refuse_second(call: _Call, target: str, saved: Any, cotangents: Any) -> Any:
    raise NotImplementedError(
        "FlashCore has no second derivatives: the gradients of attention cannot be differentiated"
    )


# The calls that make up a derivative.
_once = jax.custom_vjp(_run, nondiff_argnums=(0, 1))
_once.defvjp(lambda *given: (_run(*given), None), _refuse_second)


def _launch(call: _Call, target: str, *arrays: Any) -> Any:
    """Calls one of our targets with the arrays of one device and returns its results."""
    given = [array.shape for array in arrays]
    names, answers = _dimensions(call, target, given)
    sizes = sizes_of(names, given)
    shapes = [tuple(sizes[name] for name in its) for its in answers]
    inputs, aliases, more = _alike(arrays), None, {}
    if target == _FORWARD:
        dtypes = [call.dtype, "float32"]
    else:
        dtypes = [arrays[call.places.index(at)].dtype for at in _differentiated(call)]
        more = {"deterministic": call.deterministic, "lse_gradient": call.lse}
        if _is_partial(call, *arrays[:2]):
            # What the kernels do not write is zero.
            aliases = {len(inputs) + at: at for at in range(len(shapes))}
            inputs = _alike([*inputs, *map(jnp.zeros, shapes, dtypes)])
    results = [jax.ShapeDtypeStruct(*it) for it in zip(shapes, dtypes)]
    made = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)
    found = made(*inputs, function=call.function, **dict(call.numbers), **more)
    return tuple(_alike(found, _varying(inputs[0])))


def _dimensions(call: _Call, target: str, shapes: list[tuple[int, ...]]) -> tuple[list[Any], list[Any]]:
    """Returns the names of the dimensions of the arrays and of the results. Dimensions of the same name have the
    same size; those that nothing else shares are numbered."""
    packed = [at in call.places for at in _STARTS]
    batch = "entries" if any(packed) else "batch"
    # Pages, and cache entries chosen by index, may belong to any sequence.
    cache = "cache" if any(at in call.places for at in (_ENTRIES, _PAGES)) else batch
    heads_first = call.function == _HEADS_FIRST

    def rows(first: str, length: str, heads: str, dim: str, is_packed: bool) -> tuple[str, ...]:
        if is_packed:
            return length, heads, dim
        return (first, heads, length, dim) if heads_first else (first, length, heads, dim)

    query, out = (rows(batch, "queries", "heads", dim, packed[0]) for dim in ("dim", "value_dim"))
    key, value = (rows(cache, "keys", "key_heads", dim, packed[1]) for dim in ("dim", "value_dim"))
    sums = ("heads", "queries") if packed[0] else (batch, "heads", "queries")
    known = {0: query, 1: key, 2: value}
    names = []
    for at, shape in zip(call.places, shapes):
        if at in _STARTS:
            its: tuple[str, ...] = ("",)
        elif at == _SINKS:
            its = ("heads",)
        elif at == _SLOPES:
            its = (batch, "heads")[-len(shape) :]
        elif at == _PAGES:
            its = (batch, "")
        elif at in _FACTORS:
            its = _factors(shape, shapes[1], key, batch)
        else:
            its = known.get(at, (batch,))
        names.append(its)
    if target == _FORWARD:
        answers = [out, sums] if call.lse else [out]
    else:
        answers = [names[call.places.index(at)] for at in _differentiated(call)]
        names += [out, sums, out, *([sums] if call.lse else [])]
    outer = tuple(f"{OUTER}{at}" for at in range(len(shapes[0]) - len(query)))
    unnamed = (f"list{at}" for at in itertools.count())
    names = [(*outer, *(name or next(unnamed) for name in its)) for its in names]
    return names, [(*outer, *its) for its in answers]


def _factors(shape: tuple[int, ...], keys: tuple[int, ...], key: tuple[str, ...], batch: str) -> tuple[str, ...]:
    """Returns the names of the dimensions of 8-bit tensors' factors: one number, or one per key head, and also per
    sequence or per token."""
    if len(shape) < 2:
        return ("key_heads",) if shape == (keys[key.index("key_heads")],) else ("",) * len(shape)
    return ("", "key_heads") if len(key) == 3 else (batch, "key_heads") if len(shape) == 2 else key[:3]


@functools.cache
def _over_devices() -> Any:
    return over_devices(_launch, _dimensions)


def _refuse(call: _Call, given: dict[int, Any]) -> None:
    """Refuses gradients of what has none."""
    if call.function.startswith("flash_attn_with_kvcache"):
        raise NotImplementedError("flash_attn_with_kvcache has no gradients")
    if _PAGES in given:
        raise NotImplementedError("block_table was given, expected None: keys in pages have no gradients")
    for at, name in enumerate(("q", "k", "v")):
        if given[at].dtype.itemsize == 1:
            raise NotImplementedError(
                f"{name} has element type {given[at].dtype}, expected float16, bfloat16 or float32: there are "
                "no gradients of 8-bit tensors"
            )


def _is_partial(call: _Call, query: Any, key: Any) -> bool:
    """Returns whether there are rows that belong to no sequence, or keys beyond the last query."""
    if any(at in call.places for at in (*_STARTS, *_USED)):
        return True
    causal = dict(call.numbers)["causal"]
    return bool(causal and call.function == _HEADS_FIRST and key.shape[-2] > query.shape[-2])


def _varying(array: Any) -> Any:
    """Returns the mesh axes along which an array varies inside of ``shard_map``."""
    kind = jax.typeof(array)
    # The second is the name from JAX 0.10 on.
    axes = getattr(kind, "vma", None)
    return getattr(getattr(kind, "mat", None), "varying", frozenset()) if axes is None else axes


def _alike(arrays: Any, axes: Any = frozenset()) -> list[Any]:
    """Makes arrays vary along the same mesh axes: those of any of them, and ``axes``."""
    axes = frozenset(axes).union(*map(_varying, arrays))
    missing = [tuple(axes - _varying(array)) for array in arrays]
    return [jax.lax.pcast(it, more, to="varying") if more else it for it, more in zip(arrays, missing)]
