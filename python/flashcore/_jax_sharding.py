"""Partitioning of a call over the devices of a mesh, under ``jax.jit`` without ``shard_map``.

Every dimension of a call's arrays has a name. Batch and heads keep the sharding of the queries: no device needs
data of another. Sequence positions, head dims and the contents of lists are replicated. Key heads are sharded
along with the query heads that read them. Where there are more devices than key heads, several devices use the same
key head, and its gradient is summed over them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Names = tuple[str, ...]
Axes = tuple[str, ...]
# The prefix of the names of leading dimensions that `vmap` adds.
OUTER = "outer"


def over_devices(launch: Callable[..., Any], dimensions: Callable[..., tuple[list[Names], list[Names]]]) -> Any:
    """Returns ``launch(call, target, *arrays)`` with rules for sharded arrays: each device runs it on its shards.

    ``dimensions(call, target, shapes)`` names the dimensions of the arrays and of the results.

    In a JAX whose partitioning has other names than these, which are experimental, it is ``launch`` itself: sharded
    arrays are gathered.
    """
    try:
        from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
    except ImportError:
        if jax.device_count() > 1:
            warnings.warn(f"JAX {jax.__version__} is not known here: sharded arrays are gathered", UserWarning, 2)
        return launch

    def rule(call: Any, target: str, mesh: Any, given: Any, results: Any) -> Any:
        shapes = [tuple(it.shape) for it in given]
        names, answers, whole = _factors(*dimensions(call, target, shapes), shapes)
        mappings = (tuple(ArrayMapping(*its) for its in them) for them in (names, answers))
        return SdyShardingRule(*mappings, need_replication_factors=whole)

    def partition(call: Any, target: str, mesh: Any, given: Any, results: Any) -> Any:
        shapes = [tuple(it.shape) for it in given]
        names, answers = dimensions(call, target, shapes)
        mesh = _unnamed(given[0]) if mesh.empty else mesh
        axes = [_axes_along(it, mesh) for it in (*given, *results)]
        split = Split.of(zip((*names, *answers), axes), sizes_of(names, shapes), dict(mesh.shape))

        def part(*arrays: Any) -> Any:
            found = launch(call, target, *split.own_heads(arrays, names))
            return tuple(split.whole(it, its) for it, its in zip(found, answers))

        place = lambda its: NamedSharding(mesh, split.spec(its))  # noqa: E731
        return mesh, part, tuple(map(place, answers)), tuple(map(place, names))

    divided = custom_partitioning(launch, static_argnums=(0, 1))
    # JAX raises an error for shardings along a part of a mesh axis; `_axes_along` decodes them.
    divided.def_partition(partition, sharding_rule=rule, decode_shardings=False)
    return divided


def explicit(names: Names, query: Any, answers: Iterable[Names]) -> list[PartitionSpec] | None:
    """Returns the shardings of the results, those of the queries, where the mesh has explicit axes; else None."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.explicit_axes or mesh.manual_axes:
        return None
    axes = dict(zip(names, _axes_of(jax.typeof(query).sharding.spec, len(names))))
    return [PartitionSpec(*(axes.get(name) or None for name in its)) for its in answers]


def sizes_of(names: Iterable[Names], shapes: Iterable[tuple[int, ...]]) -> dict[str, int]:
    """Returns the size of each named dimension."""
    return {name: size for its, shape in zip(names, shapes) for name, size in zip(its, shape)}


def _is_split(name: str) -> bool:
    return name in ("batch", "heads", "key_heads") or name.startswith(OUTER)


def _factors(
    names: list[Names], answers: list[Names], shapes: list[tuple[int, ...]]
) -> tuple[list[Names], list[Names], Names]:
    """Returns the factors of the arrays and of the results by which Shardy propagates shardings through a call, and
    those that are replicated."""
    sizes = sizes_of(names, shapes)
    # Grouped query heads are a factor of their own. As a compound of key heads and groups, Shardy would divide a
    # mesh axis between the two where it has more devices than there are key heads.
    same = {"heads": "key_heads"} if sizes["heads"] == sizes["key_heads"] else {}
    names, answers = ([tuple(same.get(name, name) for name in its) for its in them] for them in (names, answers))
    # In order of first appearance, which the verifier asks for.
    whole = tuple(dict.fromkeys(name for its in (*names, *answers) for name in its if not _is_split(name)))
    return names, answers, whole


def _unnamed(array: Any) -> Mesh:
    """Returns a mesh for a program whose own is unknown: no argument is sharded, only values inside of it are. Its
    axes are the prime factors of the number of devices; a sharding that they cannot express is gathered."""
    count = len(array.sharding.device_set)
    sizes = tuple(_primes(count))
    return Mesh(np.array(list(_places(array, count))).reshape(sizes), tuple(f"axis{at}" for at in range(len(sizes))))


def _places(array: Any, count: int) -> Any:
    """Returns the slices of each device, in device order, for an array whose dimensions are all ``count`` long:
    every sharding divides it, whatever the sizes of the real one."""
    return array.sharding.devices_indices_map((count,) * len(array.shape))


def _primes(number: int) -> Iterator[int]:
    """Yields the prime factors of a number, in ascending order."""
    factor = 2
    while number > 1:
        while number % factor == 0:
            yield factor
            number //= factor
        factor += 1


def _axes_along(array: Any, mesh: Mesh) -> list[Axes]:
    """Returns the mesh axes that each dimension of an array is sharded over. A dimension that has only a part of an
    axis gets none: reshaping columns to (heads, head dim) may divide an axis between the two."""
    places = _places(array, mesh.size)
    starts = np.array([[along.start or 0 for along in places[it]] for it in mesh.devices.flat], int)
    starts = starts.reshape(*mesh.devices.shape, len(array.shape))
    found = []
    for along in np.moveaxis(starts, -1, 0):
        # The distance between neighbours along each axis; major axes have the larger ones.
        steps = {
            name: np.ptp(along, at).max() // max(size - 1, 1) for at, (name, size) in enumerate(mesh.shape.items())
        }
        axes = tuple(sorted((name for name in steps if steps[name]), key=steps.__getitem__, reverse=True))
        found.append(axes if len(np.unique(along)) == _count(axes, mesh.shape) else ())
    return found


def _axes_of(spec: Any, dimensions: int) -> list[Axes]:
    """Returns the mesh axes of each dimension of a partition spec."""
    axes = [() if it is None else (it,) if isinstance(it, str) else tuple(it) for it in spec]
    return axes + [()] * (dimensions - len(axes))


class Split:
    """The mesh axes of each named dimension."""

    def __init__(self, axes: dict[str, Axes], sharing: Axes, shared: int, mesh: dict[str, int]) -> None:
        self.axes = axes
        # The axes along which devices hold the same key heads, and how many heads those are.
        self.sharing, self.shared = sharing, shared
        self._mesh = mesh

    @staticmethod
    def of(arrays: Iterable[tuple[Names, list[Axes]]], sizes: dict[str, int], mesh: dict[str, int]) -> Split:
        """Takes each dimension's axes from the first array that is sharded along it; queries come first."""
        axes: dict[str, Axes] = {}
        for names, its in arrays:
            for name, wanted in zip(names, its):
                name = "heads" if name == "key_heads" else name
                used = {axis for other in axes.values() for axis in other}
                if _is_split(name) and not axes.get(name):
                    axes[name] = tuple(axis for axis in wanted if axis not in used)
        for name in axes:
            axes[name] = _longest(axes[name], lambda its, size=sizes[name]: size % _count(its, mesh) == 0)  # type: ignore
        heads, keys = axes.get("heads", ()), sizes["key_heads"]
        for count in range(len(heads), -1, -1):
            heads = heads[:count]
            alone = _longest(heads, lambda its: keys % _count(its, mesh) == 0)
            sharing, shared = heads[len(alone) :], keys // _count(alone, mesh)
            # Each device's query heads must read the same number of key heads.
            if not sharing or _count(sharing, mesh) % shared == 0:
                break
        axes["heads"], axes["key_heads"] = heads, alone
        return Split(axes, sharing, shared, mesh)

    def spec(self, names: Names) -> PartitionSpec:
        return PartitionSpec(*(self.axes.get(name) or None for name in names))

    def own_heads(self, arrays: Iterable[Any], names: Iterable[Names]) -> Iterator[Any]:
        """Yields a device's arrays with the one key head that its query heads read, where it holds several."""
        for array, its in zip(arrays, names):
            if self._takes_one(its):
                array = jax.lax.dynamic_slice_in_dim(array, self._own_head(), 1, its.index("key_heads"))
            yield array

    def whole(self, result: Any, names: Names) -> Any:
        """Returns a device's result, summed over the axes that the result is not sharded over but the call is."""
        summed = {axis for axes in self.axes.values() for axis in axes}
        summed -= {axis for name in names for axis in self.axes.get(name, ())}
        if not summed:
            return result
        part = result.astype(jnp.float32)
        if self._takes_one(names):
            at = names.index("key_heads")
            zeros = jnp.zeros((*part.shape[:at], self.shared, *part.shape[at + 1 :]), part.dtype)
            part = jax.lax.dynamic_update_slice_in_dim(zeros, part, self._own_head(), at)
        return jax.lax.psum(part, tuple(sorted(summed))).astype(result.dtype)

    def _takes_one(self, names: Names) -> bool:
        return bool(self.sharing) and self.shared > 1 and "key_heads" in names

    def _own_head(self) -> Any:
        return jax.lax.axis_index(self.sharing) // (_count(self.sharing, self._mesh) // self.shared)


def _count(axes: Axes, mesh: dict[str, int]) -> int:
    """Returns the number of devices along some axes."""
    return math.prod(mesh[axis] for axis in axes)


def _longest(axes: Axes, fits: Callable[[Axes], bool]) -> Axes:
    """Returns the longest prefix of the axes that fits."""
    return next(axes[:count] for count in range(len(axes), -1, -1) if fits(axes[:count]))
