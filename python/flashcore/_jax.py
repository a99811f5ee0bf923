"""JAX's arrays inside of its transformations: ``jit``, ``grad``, ``vmap``, ``shard_map``.

There an array has a shape and no memory. A call is checked from the shapes while JAX traces it, and
becomes one custom call of the compiled program, which XLA makes with the buffers: on the CPU, or on the
stream of a GPU. Arrays that are in memory go by DLPack and not through here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _flashcore

# Named after the package, of which a process may have two: one may be from a hub.
_FORWARD, _BACKWARD = (f"{__package__}_{name}" for name in ("attention", "attention_backward"))
for _name, _target in ((_FORWARD, "attention"), (_BACKWARD, "attention_backward")):
    for _platform in ("cpu", "CUDA"):
        jax.ffi.register_ffi_target(_name, _flashcore.xla_target(_target, _platform), platform=_platform)

# Where sinks, pages and the output's memory are among the tensors.
_PAGES, _SINKS, _OUT = 9, 11, 15
_HEADS_FIRST = "scaled_dot_product_attention"


class _Call(NamedTuple):
    """What is known of a call while it is traced."""

    function: str
    deterministic: bool
    lse: bool
    # Of the tensors that are given, the place of each among all.
    places: tuple[int, ...]
    # XLA's attributes, by name.
    numbers: tuple[tuple[str, Any], ...]
    output: tuple[tuple[int, ...], str]
    sums: tuple[int, ...]


def attend(
    tensors: tuple[Any, ...], numbers: tuple[Any, ...], function: str, lse: Any, deterministic: bool
) -> Any:
    """Output, or output and log-sum-exps, which have no gradient."""
    if len(tensors) > _OUT and tensors[_OUT] is not None:
        raise NotImplementedError("out was given inside of a transformation of JAX's, expected None")
    places = tuple(at for at, tensor in enumerate(tensors) if tensor is not None)
    arrays = _alike([jnp.asarray(tensors[at]) for at in places])
    described: list[Any] = [None] * len(tensors)
    for at, array in zip(places, arrays):
        described[at] = (array.dtype.name, tuple(array.shape), None, 0)
    found, (shape, dtype, sums) = _flashcore.xla_call(tuple(described), numbers, function)
    attributes = tuple(sorted((name, _attribute(value)) for name, value in found.items()))
    call = _Call(function, bool(deterministic), bool(lse), places, attributes, (tuple(shape), dtype), tuple(sums))
    result = _attention(call, *arrays)
    return (result[0], jax.lax.stop_gradient(result[1])) if lse else result[0]


def _attribute(value: Any) -> Any:
    """A number in the type that the handlers read."""
    if isinstance(value, bool):
        return value
    return np.int64(value) if isinstance(value, int) else np.float32(value)


def _primal(call: _Call, *arrays: Any) -> Any:
    return _forward(call, call.lse, arrays)


def _saved(call: _Call, *arrays: Any) -> Any:
    out, sums = _forward(call, True, arrays)
    return (out, sums) if call.lse else (out,), (arrays, out, sums)


def _forward(call: _Call, lse: bool, arrays: tuple[Any, ...]) -> Any:
    results = [call.output, (call.sums, "float32")] if lse else [call.output]
    return tuple(_run(call, _FORWARD, results, arrays))


def _gradients(call: _Call, saved: Any, cotangents: Any) -> Any:
    """The gradients of the arrays, None for those that have none."""
    arrays, out, sums = saved
    given = dict(zip(call.places, arrays))
    _refuse(call, given)
    wanted = [at for at in (0, 1, 2, _SINKS) if at in given]
    if any(given[at].size == 0 for at in (0, 1, 2)):
        found: Any = [jnp.zeros_like(given[at]) for at in wanted]
    else:
        of = [given[at] for at in wanted]
        results = [(array.shape, array.dtype) for array in of]
        inputs = (*arrays, out, sums, cotangents[0])
        aliases = None
        if _is_partial(call, given):
            # What the kernels do not write is zero.
            aliases = {len(inputs) + at: at for at in range(len(of))}
            inputs = (*inputs, *(jnp.zeros_like(array) for array in of))
        found = _run(call, _BACKWARD, results, inputs, aliases, deterministic=call.deterministic)
    gradients = dict(zip(wanted, found))
    return tuple(gradients.get(at) for at in call.places)


_attention = jax.custom_vjp(_primal, nondiff_argnums=(0,))
_attention.defvjp(_saved, _gradients)


def _run(
    call: _Call, target: str, results: Any, arrays: Any, aliases: dict[int, int] | None = None, **more: Any
) -> list[Any]:
    """Results of these shapes and element types, by a target of ours."""
    # Where tensors alone make the call, `vmap` adds dimensions in front of the batch's, and the handlers
    # fold them. Lists are those of one call.
    method = "broadcast_all" if call.places == (0, 1, 2) else "sequential"
    results = [jax.ShapeDtypeStruct(*result) for result in results]
    made = jax.ffi.ffi_call(target, results, vmap_method=method, input_output_aliases=aliases)
    arrays = _alike(arrays)
    return _alike(made(*arrays, function=call.function, **dict(call.numbers), **more), _varying(arrays[0]))


def _refuse(call: _Call, given: dict[int, Any]) -> None:
    """Refuses gradients that there are none of."""
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


def _is_partial(call: _Call, given: dict[int, Any]) -> bool:
    """Whether there are rows of no sequence, or keys behind the last query's."""
    if any(at in given for at in (3, 4, 5, 6)):
        return True
    causal = dict(call.numbers)["causal"]
    return bool(causal and call.function == _HEADS_FIRST and given[1].shape[2] > given[0].shape[2])


def _varying(array: Any) -> Any:
    """The axes of a mesh along which an array differs inside of ``shard_map``."""
    kind = jax.typeof(array)
    # The second is the name from JAX 0.10 on.
    axes = getattr(kind, "vma", None)
    return getattr(getattr(kind, "mat", None), "varying", frozenset()) if axes is None else axes


def _alike(arrays: Any, axes: Any = frozenset()) -> list[Any]:
    """Arrays that differ along the same axes of a mesh: all those of one of them, and ``axes``."""
    axes = frozenset(axes).union(*map(_varying, arrays))
    missing = [tuple(axes - _varying(array)) for array in arrays]
    return [jax.lax.pcast(it, more, to="varying") if more else it for it, more in zip(arrays, missing)]
