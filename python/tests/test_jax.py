"""JAX's transformations: `jit`, `grad`, `vmap` and `shard_map`, against attention written in JAX."""

import os
import subprocess
import sys

import pytest

np = pytest.importorskip("numpy")
jax = pytest.importorskip("jax")
import flashcore  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flashcore import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: E402

CPU = jax.devices("cpu")[0]
# Most of the time of these tests would be XLA's, in making small programs fast.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(CPU):
        yield


def reference(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0, sinks=None):
    """Attention over (batch, length, heads, dim) as one would write it: output and log-sum-exps."""
    queries, keys, group = q.shape[-3], k.shape[-3], q.shape[-2] // k.shape[-2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = jnp.repeat(k, group, -2), jnp.repeat(v, group, -2)
    scores = jnp.einsum("...qhd,...khd->...hqk", q, k).astype(jnp.float32) * scale
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    ahead = jnp.arange(keys) - jnp.arange(queries)[:, None] - (keys - queries)
    seen = jnp.ones((queries, keys), bool)
    left, right = window[0], 0 if causal else window[1]
    seen = seen if left < 0 else seen & (ahead >= -left)
    seen = seen if right < 0 else seen & (ahead <= right)
    scores = jnp.where(seen, scores, -jnp.inf)
    whole = scores
    if sinks is not None:
        column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
        whole = jnp.concatenate((scores, column), -1)
    lse = jax.nn.logsumexp(whole, -1)
    # A query that sees no key gets zeros.
    weights = jnp.where(seen, jnp.exp(scores - jnp.where(jnp.isinf(lse), 0.0, lse)[..., None]), 0.0)
    return jnp.einsum("...hqk,...khd->...qhd", weights, v), lse


def random(*shapes, dtype=jnp.float32):
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.standard_normal(shape).astype(dtype)) for shape in shapes]


def close(found, expected, tolerance=2e-6):
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
        largest = np.abs(theirs, where=np.isfinite(theirs), out=np.zeros_like(theirs)).max(initial=1.0)
        assert np.allclose(ours, theirs, atol=tolerance * largest)


# Arguments of ours, and of the reference; heads of queries and keys.
CASES = {
    "plain": ({}, {}, (3, 3)),
    "causal": ({"causal": True}, {"causal": True}, (4, 2)),
    "window": ({"window_size": (2, 1), "softmax_scale": 0.3}, {"window": (2, 1), "scale": 0.3}, (4, 2)),
    "softcap": ({"causal": True, "softcap": 2.0}, {"causal": True, "softcap": 2.0}, (2, 1)),
}


def value_and_gradients(call, arrays, weights=1.0):
    """A sum over what a call answers, and its gradients, by one compiled program: no array is in memory
    where the call is made."""
    loss = lambda *x: (call(*x).astype(jnp.float32) ** 2 * weights).sum()  # noqa: E731
    return jax.block_until_ready(jax.jit(jax.value_and_grad(loss, tuple(range(len(arrays)))))(*arrays))


@pytest.mark.parametrize("case", CASES)
def test_jit_and_grad(case):
    ours, theirs, (heads, shared) = CASES[case]
    q, k, v, weights = arrays = random((2, 5, heads, 16), (2, 7, shared, 16), (2, 7, shared, 24), (2, 5, heads, 24))
    found = value_and_gradients(lambda *x: flash_attn_func(*x, **ours), arrays[:3], weights)
    assert flashcore.info()["last"]["kernel"] == "cpu/backward"
    close(found, value_and_gradients(lambda *x: reference(*x, **theirs)[0], arrays[:3], weights))
    out, lse, _ = jax.jit(lambda *x: flash_attn_func(*x, **ours, return_attn_probs=True))(q, k, v)
    close((out, lse), jax.jit(lambda *x: reference(*x, **theirs))(q, k, v))
    both = lambda found: jnp.concatenate((found[0].swapaxes(1, 2), found[1][..., None]), -1)  # noqa: E731
    found = value_and_gradients(lambda *x: both(flash_attn_func(*x, **ours, return_attn_probs=True)), arrays[:3])
    close(found, value_and_gradients(lambda *x: both(reference(*x, **theirs)), arrays[:3]))
    # As arrays in memory have it.
    assert (out == flash_attn_func(q, k, v, **ours)).all()


@pytest.mark.parametrize("axes", [(0, 0, 0), (1, None, None)], ids=str)
def test_vmap_folds_the_batch(axes):
    shapes = ((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16))
    lay = lambda shape, axis: shape if axis is None else (*shape[:axis], 3, *shape[axis:])  # noqa: E731
    arrays = random(*(lay(shape, axis) for shape, axis in zip(shapes, axes)))
    found = value_and_gradients(jax.vmap(lambda *x: flash_attn_func(*x, causal=True), axes), arrays)
    assert flashcore.info()["last"]["problem"].startswith("batch 6, heads 4/2, length 5x7")
    close(found, value_and_gradients(jax.vmap(lambda *x: reference(*x, causal=True)[0], axes), arrays))


def test_vmap_twice_and_over_sinks():
    q, k, v, sinks = random((2, 3, 1, 4, 2, 8), (2, 3, 1, 4, 2, 8), (2, 3, 1, 4, 2, 8), (2, 2))
    close(jax.jit(jax.vmap(jax.vmap(flash_attn_func)))(q, k, v), jax.jit(reference)(q, k, v)[0])
    # A list is that of one call: these are made one after the other.
    arrays = (q[0, :2], k[0, :2], v[0, :2], sinks)
    ours = jax.vmap(lambda *x: flash_attn_func(*x[:3], s_aux=x[3]))
    theirs = jax.vmap(lambda *x: reference(*x[:3], sinks=x[3])[0])
    close(value_and_gradients(ours, arrays), value_and_gradients(theirs, arrays))


def test_log_sum_exps_have_gradients():
    """Mapped, of rows without keys, which have the sinks, and where there are no keys at all."""
    q, k, v, sinks = random((3, 2, 5, 2, 8), (3, 2, 3, 2, 8), (3, 2, 3, 2, 8), (2,))
    ours = lambda *x: flash_attn_func(*x[:3], causal=True, s_aux=x[3], return_attn_probs=True)[1]  # noqa: E731
    theirs = lambda *x: reference(*x[:3], causal=True, sinks=x[3])[1]  # noqa: E731
    for axes, arrays in (((0, 0, 0, None), (q, k, v, sinks)), ((0,) * 3, (q, k, v))):
        rest = (sinks,)[len(arrays) - 3 :]
        found = value_and_gradients(jax.vmap(lambda *x: ours(*x, *rest), axes), arrays)
        close(found, value_and_gradients(jax.vmap(lambda *x: theirs(*x, *rest), axes), arrays))
    arrays = (q[0], k[0, :, :0], v[0, :, :0], sinks)
    close(value_and_gradients(ours, arrays), value_and_gradients(theirs, arrays))


def test_sinks_of_rows_that_belong_to_no_sequence():
    """Have no gradient where there are no keys."""
    q, sinks = random((5, 2, 8), (2,))
    nothing = jnp.array([0, 0], jnp.int32)
    for starts, used in (([0, 3], None), ([0, 5], [3])):
        starts, used = jnp.array(starts, jnp.int32), None if used is None else jnp.array(used, jnp.int32)
        rest = {"seqused_q": used, "return_attn_probs": True}
        sums = lambda sinks: flash_attn_varlen_func(q, q[:0], q[:0], starts, nothing, 5, 0, s_aux=sinks, **rest)[1]  # noqa: B023, E731
        _, pull = jax.vjp(sums, sinks)
        (found,) = pull(jnp.ones((2, 5)))
        assert found.tolist() == [3.0, 3.0]


def test_packed_sequences():
    arrays = random((9, 2, 8), (9, 2, 8), (9, 2, 8))
    # A row of no sequence has no gradient.
    starts = jnp.array([0, 3, 3, 8], jnp.int32)

    def apart(*rows):
        parts = [reference(*(x[None, b:e] for x in rows), causal=True)[0][0] for b, e in ((0, 3), (3, 8))]
        return jnp.concatenate(parts)

    ours = lambda *x: flash_attn_varlen_func(*x, starts, starts, 5, 5, causal=True)[:8]  # noqa: E731
    close(value_and_gradients(ours, arrays), value_and_gradients(apart, arrays))


def test_a_cache_and_pytorchs_function():
    q, cache = random((2, 1, 4, 16), (2, 2, 8, 2, 16))
    lengths = jnp.array([3, 8], jnp.int32)
    ours = jax.jit(lambda q, cache, lengths: flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths, causal=True))
    found = ours(q, cache, lengths)
    for at, length in enumerate((3, 8)):
        close(found[at], jax.jit(reference)(q[at], *cache[:, at, :length])[0])
    with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache has no gradients"):
        jax.grad(lambda q: ours(q, cache, lengths).sum())(q)
    # Keys behind the last query's have gradients of zero.
    arrays = random((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8))
    ours = lambda *x: flashcore.scaled_dot_product_attention(*x, is_causal=True).swapaxes(1, 2)  # noqa: E731
    theirs = lambda *x: reference(*(it.swapaxes(1, 2)[:, :3] for it in x), causal=True)[0]  # noqa: E731
    close(value_and_gradients(ours, arrays), value_and_gradients(theirs, arrays))


def test_second_derivatives_are_refused():
    (q,) = random((1, 3, 2, 8))
    gradient = jax.grad(lambda q: (flash_attn_func(q, q, q) ** 2).sum())
    with pytest.raises(NotImplementedError, match="FlashCore has no second derivatives"):
        jax.jit(jax.grad(lambda q: gradient(q).sum()))(q)


def test_16_bits_and_odd_head_dims():
    arrays = random((1, 5, 2, 12), (1, 5, 2, 12), (1, 5, 2, 12), dtype=jnp.bfloat16)
    flashcore._copies._told.clear()
    with pytest.warns(UserWarning, match="head dim"):
        _, found = value_and_gradients(flash_attn_func, arrays)
    _, wide = value_and_gradients(lambda *x: reference(*x)[0], [x.astype(jnp.float32) for x in arrays])
    close(found, [x.astype(jnp.bfloat16) for x in wide], 4e-2)


def test_nothing_meets():
    q, k = random((2, 3, 2, 8), (2, 0, 2, 8))
    out, lse, _ = jax.jit(lambda *x: flash_attn_func(*x, return_attn_probs=True))(q, k, k)
    assert not out.any() and jnp.isneginf(lse).all()
    _, found = value_and_gradients(flash_attn_func, (q, k, k))
    assert not found[0].any() and [x.shape for x in found[1:]] == [k.shape, k.shape]


@pytest.mark.parametrize(
    "error, words, call",
    [
        (ValueError, "q has 4 heads, expected a multiple of the 3 of k", lambda q: flash_attn_func(q, q[:, :, :3], q[:, :, :3])),
        (ValueError, "k has 3 dimensions, expected 4", lambda q: flash_attn_func(q, q[0], q)),
        (TypeError, "k has element type f16, expected f32 like q", lambda q: flash_attn_func(q, q.astype("float16"), q)),
        (TypeError, "q has element type int16, expected float16", lambda q: flash_attn_func(*(q.astype("int16"),) * 3)),
        (TypeError, "softmax_scale=.*expected a finite number", lambda q: flash_attn_func(q, q, q, softmax_scale=q[0, 0, 0, 0])),
        (NotImplementedError, "functions are not supported inside", lambda q: flashcore.flex_attention(q, q, q, lambda s, *_: s * 2)),
    ],
)  # fmt: skip
def test_mistakes_are_told_while_tracing(error, words, call):
    with pytest.raises(error, match=words):
        jax.eval_shape(call, jax.ShapeDtypeStruct((2, 3, 4, 8), jnp.float32))


def test_what_only_the_contents_show_is_told_when_it_runs():
    rows, starts = jnp.ones((3, 4, 8)), jnp.array([0, 9], jnp.int32)
    with pytest.raises(Exception, match="INVALID_ARGUMENT.*cu_seqlens_q"):
        jax.jit(lambda x, at: flash_attn_varlen_func(x, x, x, at, at, 3, 3))(rows, starts).block_until_ready()


def test_arrays_of_all_kinds_in_one_call():
    """One array is traced, and others are in memory."""
    q, k, v = random((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16))
    for at in range(3):
        call = lambda x: flash_attn_func(*(x if it == at else (q, k, v)[it] for it in range(3)))  # noqa: E731, B023
        close(jax.jit(call)((q, k, v)[at]), flash_attn_func(q, k, v))


def test_parts_are_combined_outside_of_transformations():
    outs, lses = random((2, 1, 5, 2, 16), (2, 1, 5, 2))
    turned = lses.swapaxes(2, 3)
    flashcore.flash_attn_combine(outs, lses), flashcore.flash_attn_merge(outs[0], turned[0], outs[1], turned[1])
    with pytest.raises(
        NotImplementedError, match="flash_attn_combine is not supported inside of JAX's transformations"
    ):
        jax.jit(flashcore.flash_attn_combine)(outs, lses)
    with pytest.raises(NotImplementedError, match="flash_attn_merge is not supported inside of JAX's transformations"):
        jax.jit(flashcore.flash_attn_merge)(outs[0], turned[0], outs[1], turned[1])


@pytest.mark.parametrize("dim", [16, 12, 264])
def test_arrays_are_not_written_to(dim):
    """They never change, whatever the head dim: JAX and its users rely on that."""
    out = jnp.zeros((1, 5, 2, dim))
    with pytest.raises(TypeError, match="out is a .*, which cannot be written, expected None"):
        flashcore.flash_attn_combine(*random((3, 1, 5, 2, dim), (3, 1, 5, 2)), out=out)
    (q,) = random((5, 2, min(dim, 256)))
    starts = jnp.array([0, 5], jnp.int32)
    with pytest.raises(TypeError, match="out is a .*, which cannot be written, expected None"):
        flash_attn_varlen_func(q, q, q, starts, starts, 5, 5, out=out[0, ..., :256])
    assert not out.any()


def test_a_jax_with_other_names_has_no_partitioning(monkeypatch):
    from flashcore import _jax, _jax_sharding
    from jax.experimental import custom_partitioning

    monkeypatch.delattr(custom_partitioning, "SdyShardingRule")
    assert _jax_sharding.over_devices(_jax._launch, _jax._dimensions) is _jax._launch


SHARDED = """
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from flashcore import flash_attn_func
from test_jax import close, random, reference, value_and_gradients

mesh = Mesh(jax.devices()[:4], "x")
q, k, v, sinks = random((8, 5, 4, 16), (8, 7, 4, 16), (8, 7, 4, 16), (4,))
expected = value_and_gradients(lambda *x: reference(*x, causal=True)[0], (q, k, v))
for spec in (P("x"), P(None, None, "x")):
    ours = jax.shard_map(lambda *x: flash_attn_func(*x, causal=True), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k, v)]
    close(value_and_gradients(ours, placed), expected)
# With `vmap` inside.
ours, theirs = (jax.vmap(call, (0, None, None)) for call in (flash_attn_func, lambda *x: reference(*x)[0]))
many = (jax.numpy.stack((q, -q)), k, v)
inside = jax.shard_map(ours, mesh=mesh, in_specs=(P(None, "x"), P("x"), P("x")), out_specs=P(None, "x"))
close(value_and_gradients(inside, many), value_and_gradients(theirs, many))
# Keys, values and sinks are everybody's: their gradients are sums over the devices.
everybody = lambda call: lambda q, k, v, s: call(q, k[:1].repeat(q.shape[0], 0), v[:1].repeat(q.shape[0], 0), s)
ours = jax.shard_map(
    everybody(lambda q, k, v, s: flash_attn_func(q, k, v, s_aux=s)),
    mesh=mesh, in_specs=(P("x"), P(), P(), P()), out_specs=P("x"),
)
theirs = everybody(lambda q, k, v, s: reference(q, k, v, sinks=s)[0])
close(value_and_gradients(ours, (q, k, v, sinks)), value_and_gradients(theirs, (q, k, v, sinks)))
"""

SPLIT = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import flashcore
from flashcore import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from test_jax import close, random, reference

make = lambda kind: jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
mesh = make(AxisType.Auto)
MOVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
place = lambda specs, arrays, on=mesh: [jax.device_put(x, NamedSharding(on, spec)) for x, spec in zip(arrays, specs)]


def with_gradients(call):
    def run(*arrays):
        out, back = jax.vjp(call, *arrays)
        return out, *back(jnp.cos(out))
    return run


def check(ours, theirs, specs, arrays, moves=(), gradients=True, stays=True):
    # Equal to one device's results, with exactly these collectives; results are sharded like the arrays.
    ours, theirs = map(with_gradients if gradients else lambda call: lambda *x: [call(*x)], (ours, theirs))
    placed = place(specs, arrays)
    program = jax.jit(ours).lower(*placed).compile()
    found = program(*placed)
    close(found, jax.jit(theirs)(*arrays))
    text = program.as_text()
    assert {move for move in MOVES if move in text} == set(moves), (specs, moves)
    for array, spec in zip(found, (specs[0], *specs)):
        same = array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)
        assert same or not stays, (specs, array.sharding)


attend = lambda *x: flash_attn_func(*x, causal=True)
expected = lambda *x: reference(*x, causal=True)[0]
shapes = lambda heads, shared: ((8, 5, heads, 16), (8, 7, shared, 16), (8, 7, shared, 24))
batch, heads, both = P("data"), P(None, None, "model"), P("data", None, "model")
for spec in (heads, both, P(("model", "data")), P(None, None, ("model", "data"))):
    check(attend, expected, (spec,) * 3, random(*shapes(8, 8)))
# Key heads that the devices divide are sharded along with query heads. With fewer, several devices use the same
# one, and its gradient is summed over them.
check(attend, expected, (both,) * 3, random(*shapes(8, 4)))
for shared in (1, 2):
    check(attend, expected, (both, batch, batch), random(*shapes(8, shared)), ("all-reduce",))
over_both, keys = P(None, None, ("data", "model")), P(None, None, "data")
check(attend, expected, (over_both, keys, keys), random(*shapes(8, 4)), ("all-reduce",))
# Query heads of which devices would read unequal numbers of key heads, and positions, are gathered.
check(attend, expected, (heads, P(), P()), random(*shapes(12, 3)), ("all-gather",))
check(attend, expected, (P(None, "model"),) * 3, random(*((8, 8, 4, 16),) * 3), ("all-gather",))
# So are key heads from columns that are sharded over more devices than there are key heads.
project = lambda call: lambda x, *weights: call(*((x @ it / 6).reshape(8, 5, -1, 16) for it in weights))
arrays = random((8, 5, 32), (32, 8 * 16), (32, 2 * 16), (32, 2 * 16))
check(project(attend), project(expected), (batch, *(P(None, "model"),) * 3), arrays, ("all-gather", "all-reduce"), stays=False)
# The gradient of sinks is summed over the batch; PyTorch's function has heads first; dimensions of `vmap`.
q, k, v, sinks = arrays = random((8, 5, 8, 16), (8, 7, 4, 16), (8, 7, 4, 16), (8,))
ours, theirs = lambda *x: flash_attn_func(*x[:3], s_aux=x[3]), lambda *x: reference(*x[:3], sinks=x[3])[0]
check(ours, theirs, (both, both, both, P("model")), arrays, ("all-reduce",))
turned = [x.swapaxes(1, 2) for x in (q, k, v)]
ours = lambda *x: flashcore.scaled_dot_product_attention(*x, enable_gqa=True)
check(ours, lambda *x: reference(*(it.swapaxes(1, 2) for it in x))[0].swapaxes(1, 2), (P("data", "model"),) * 3, turned)
many = [jnp.stack((x, -x)) for x in (q, k, v)]
check(jax.vmap(attend), expected, (P("data", None, None, "model"),) * 3, many)
# Caches are sharded along with lengths; pages and packed rows along heads only.
lengths = jnp.array([3, 7, 5, 6, 5, 6, 7, 7], jnp.int32)
cached = lambda q, k, v, lengths, *table: flash_attn_with_kvcache(
    q, k, v, cache_seqlens=lengths, causal=True, page_table=table[0] if table else None
)
check(cached, cached, (both, both, both, batch), (q, k, v, lengths), gradients=False)
pages, table = random((16, 4, 4, 16))[0], jnp.arange(16, dtype=jnp.int32)[::-1].reshape(8, 2)
check(cached, cached, (both, heads, heads, batch, batch), (q, pages, pages, lengths, table), gradients=False)
starts = jnp.array([0, 3, 3, 8], jnp.int32)
packed = lambda *x: flash_attn_varlen_func(*x, starts, starts, 5, 5, causal=True)
rows = random((8, 8, 16), (8, 4, 16), (8, 4, 16))
check(packed, packed, (P(None, "model"),) * 3, rows)

# Without `jit`; with explicit axes; with sizes that the devices do not divide; with constraints inside of a program
# whose arguments are not sharded; in a `shard_map` over some of the axes; and under GSPMD, which gathers.
want = jax.jit(with_gradients(expected))(q, k, v)
split = place((both,) * 3, (q, k, v))
close(attend(*split), want[0])
assert attend(*split).sharding.spec == both
close(with_gradients(attend)(*split), want)
typed = make(AxisType.Explicit)
with jax.set_mesh(typed):
    found = jax.jit(with_gradients(attend))(*place((both,) * 3, (q, k, v), typed))
    assert jax.typeof(found[0]).sharding.spec == P("data", None, "model", None)
close(found, want)
odd = random(*((6, 5, 3, 16),) * 3)
uneven = lambda *x: flash_attn_func(*(jax.lax.with_sharding_constraint(it, NamedSharding(mesh, both)) for it in x))
close(jax.jit(with_gradients(uneven))(*odd), jax.jit(with_gradients(lambda *x: reference(*x)[0]))(*odd))
with jax.set_mesh(mesh):
    inside = lambda *x: attend(*(jax.lax.with_sharding_constraint(it, both) for it in x))
    found = jax.jit(with_gradients(inside))(q, k, v)
close(found, want)
assert found[0].sharding.is_equivalent_to(split[0].sharding, 4)
partly = jax.shard_map(attend, mesh=mesh, in_specs=(batch,) * 3, out_specs=batch, axis_names={"data"})
close(jax.jit(with_gradients(partly))(*split), want)
# Programs that are exported, or lowered for devices that are elsewhere, have their calls in a `shard_map`.
elsewhere, platforms = jax.sharding.AbstractMesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2), ("cpu", "cuda")
inside = jax.jit(with_gradients(jax.shard_map(attend, mesh=elsewhere, in_specs=(both,) * 3, out_specs=both)))
described = lambda on: [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(on, both)) for x in (q, k, v)]
assert "flashcore_attention" in inside.trace(*described(elsewhere)).lower(lowering_platforms=platforms).as_text()
checks = [jax.export.DisabledSafetyCheck.custom_call(f"flashcore_attention{it}") for it in ("", "_backward")]
exported = jax.export.export(inside, platforms=["cpu"], disabled_checks=checks)(*described(mesh))
close(jax.jit(exported.call)(*split), want)
jax.config.update("jax_use_shardy_partitioner", False)
close(jax.jit(with_gradients(attend))(*split), want)
print(len(jax.devices()), "devices")
"""


def test_several_devices():
    flags = "--xla_force_host_platform_device_count=8"
    path = os.pathsep.join((os.path.dirname(__file__), *filter(None, sys.path)))
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    # In one process: importing takes as long as each of the two programs.
    done = subprocess.run([sys.executable, "-c", SHARDED + SPLIT], env=environment, capture_output=True, text=True)
    assert done.stdout == "8 devices\n", done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case):
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"no GPU that JAX can use: {error}")
    ours, theirs, (heads, shared) = CASES[case]
    shapes = ((2, 129, heads, 64), (2, 200, shared, 64), (2, 200, shared, 64), (2, 129, heads, 64))
    *exact, weights = random(*shapes, dtype=jnp.bfloat16)
    arrays, weights = [jax.device_put(x, device) for x in exact], jax.device_put(weights, device)
    # Forward and backward on the GPU, inside of one program.
    found = value_and_gradients(lambda *x: flash_attn_func(*x, **ours), arrays, weights)[1]
    assert flashcore.info()["last"]["device"] == f"cuda:{device.local_hardware_id}"
    plain = value_and_gradients(lambda *x: reference(*x, **theirs)[0], arrays, weights)[1]
    wide = [x.astype(jnp.float32) for x in exact]
    true = value_and_gradients(lambda *x: reference(*x, **theirs)[0], wide, jax.device_put(weights, CPU))[1]
    for mine, rough, exact in zip(found, plain, true):
        error = lambda it: float(jnp.abs(jax.device_put(it, CPU).astype(jnp.float32) - exact).max())  # noqa: E731
        # Products of the reference are rounded to 16 bits in other places than ours.
        assert error(mine) <= 2 * error(rough) + 8e-3 * float(jnp.abs(exact).max())
    many = jax.jit(jax.vmap(lambda *x: flash_attn_func(*x, **ours)))(*(jnp.stack((x, x)) for x in arrays))
    once = flash_attn_func(*arrays, **ours)
    assert (many[0] == many[1]).all() and (many[0] == once).all()


@pytest.fixture
def gpu():
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"no GPU that JAX can use: {error}")
    with jax.default_device(device):
        yield device


def on_a_gpu(call, expected, arrays):
    """Compares what a compiled program of bfloat16 on the GPU finds with the same in float32."""
    found = jax.jit(call)(*arrays)
    assert flashcore.info()["last"]["device"].startswith("cuda")
    wide = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in arrays]
    exact = jax.jit(expected)(*wide)
    close(found, jax.tree.map(lambda x, like: x.astype(like.dtype), exact, found), 3e-2)


def with_gradients(call):
    def run(*arrays):
        out, back = jax.vjp(call, *arrays)
        return out, *back(jnp.cos(out.astype(jnp.float32)).astype(out.dtype))

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("axes", [(0, 0, 0), (1, None, None)], ids=str)
def test_vmap_on_a_gpu(gpu, axes):
    shapes = ((2, 65, 4, 64), (2, 130, 2, 64), (2, 130, 2, 64))
    lay = lambda shape, axis: shape if axis is None else (*shape[:axis], 3, *shape[axis:])  # noqa: E731
    arrays = random(*(lay(shape, axis) for shape, axis in zip(shapes, axes)), dtype=jnp.bfloat16)
    ours = jax.vmap(lambda *x: flash_attn_func(*x, causal=True), axes)
    theirs = jax.vmap(lambda *x: reference(*x, causal=True)[0], axes)
    on_a_gpu(with_gradients(ours), with_gradients(theirs), arrays)


@pytest.mark.gpu
def test_packed_sequences_on_a_gpu(gpu):
    arrays, ends = random(*((200, heads, 64) for heads in (4, 2, 2)), dtype=jnp.bfloat16), (0, 33, 33, 190, 200)
    starts = jnp.array(ends, jnp.int32)

    def apart(*rows):
        spans = [it for it in zip(ends, ends[1:]) if it[0] < it[1]]
        return jnp.concatenate([reference(*(x[None, b:e] for x in rows), causal=True)[0][0] for b, e in spans])

    ours = lambda *x: flash_attn_varlen_func(*x, starts, starts, 157, 157, causal=True)  # noqa: E731
    on_a_gpu(with_gradients(ours), with_gradients(apart), arrays)


@pytest.mark.gpu
def test_a_cache_in_pages_on_a_gpu(gpu):
    page, table = 16, jnp.array([[5, 2, 7, 0], [1, 6, 3, 4]], jnp.int32)
    q, *pages = random((2, 3, 8, 64), (9, page, 2, 64), (9, page, 2, 64), dtype=jnp.bfloat16)
    sizes = (39, 64)
    lengths = jnp.array(sizes, jnp.int32)
    ours = lambda q, k, v, table, lengths: flash_attn_with_kvcache(  # noqa: E731
        q, k, v, cache_seqlens=lengths, page_table=table, causal=True
    )

    def theirs(q, k, v, table, lengths):
        rows = [[x[table[at]].reshape(1, -1, *x.shape[2:])[:, :size] for x in (k, v)] for at, size in enumerate(sizes)]
        return jnp.concatenate([reference(q[at : at + 1], *it, causal=True)[0] for at, it in enumerate(rows)])

    on_a_gpu(ours, theirs, (q, *pages, table, lengths))
