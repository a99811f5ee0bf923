"""What PyTorch has around its operators: counters, transforms, checkpoints, graphs of any lengths."""

import functools
import itertools

import pytest

torch = pytest.importorskip("torch")

from conftest import devices
from flashcore import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_merge,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flex_attention,
    scaled_dot_product_attention,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

every_device = pytest.mark.parametrize("device", devices())


def random(*shape, device="cpu", dtype=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def three(device="cpu", queries=7, keys=9, heads=4, key_heads=2, dim=16, value_dim=24):
    """Queries, keys and values of two sequences, which require grad."""
    shapes = (queries, heads, dim), (keys, key_heads, dim), (keys, key_heads, value_dim)
    return [random(2, *shape, device=device, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def heads_first(*tensors):
    return [tensor.transpose(1, 2) for tensor in tensors]


# ---- operations that are counted -----------------------------------------------------------------------


def counted(call):
    """What a call counts forward, and backward if it has gradients."""
    found = []
    with FlopCounterMode(display=False) as counter:
        out = call()
        found.append(counter.get_total_flops())
        if out.requires_grad:
            out.sum().backward()
            found.append(counter.get_total_flops() - found[0])
    return found


def flops(*shapes):
    """What PyTorch counts for its own attention: (batch, heads, queries, keys, head dim, value head dim) of each."""
    found = []
    for batch, heads, queries, keys, dim, value_dim in shapes:
        q, k, v = (batch, heads, queries, dim), (batch, heads, keys, dim), (batch, heads, keys, value_dim)
        found.append((sdpa_flop_count(q, k, v), sdpa_backward_flop_count((*q[:3], value_dim), q, k, v)))
    return [sum(column) for column in zip(*found)]


@every_device
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 0), "softcap": 5.0}], ids=str)
def test_operations_are_counted_as_those_of_pytorchs_attention(options, device):
    q, k, v = three(device)
    assert counted(lambda: flash_attn_func(q, k, v, **options)) == flops((2, 4, 7, 9, 16, 24))
    packed = torch.stack([k, k], 2)
    assert counted(lambda: flash_attn_kvpacked_func(q, packed, **options)) == flops((2, 4, 7, 9, 16, 16))
    with torch.no_grad():
        assert counted(lambda: flash_attn_func(q, k, v, **options)) == flops((2, 4, 7, 9, 16, 24))[:1]


@every_device
def test_operations_with_heads_first_are_counted(device):
    tensors = heads_first(*three(device))
    expected = flops((2, 4, 7, 9, 16, 24))
    mask = random(7, 9, device=device)
    for call in (
        lambda: scaled_dot_product_attention(*tensors, enable_gqa=True),
        lambda: scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True, deterministic=True),
        lambda: scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True),
        lambda: flex_attention(*tensors, lambda score, b, h, i, j: score + i - j, enable_gqa=True),
    ):
        assert counted(call) == expected


@every_device
def test_operations_of_sequences_are_counted_by_their_lengths(device):
    q, k, v = (x.detach().flatten(0, 1) for x in three(device))
    of_q, of_k, used = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 3, 14], [0, 18, 18], [5, 0]))
    call = lambda **rest: flash_attn_varlen_func(q, k, v, of_q, of_k, 11, 18, **rest)
    assert counted(call) == flops((1, 4, 3, 18, 16, 24), (1, 4, 11, 0, 16, 24))[:1]
    assert counted(lambda: call(seqused_k=used)) == flops((1, 4, 3, 5, 16, 24))[:1]
    pages, table = random(6, 8, 2, 16, device=device), torch.zeros(2, 3, dtype=torch.int32, device=device)
    paged = lambda lengths: flash_attn_with_kvcache(
        random(2, 1, 4, 16, device=device), pages, pages, cache_seqlens=lengths, page_table=table
    )
    assert counted(lambda: paged(used)) == flops((1, 4, 1, 5, 16, 16))[:1]
    # Lengths of no contents are the longest that there may be.
    meta = [x.to("meta") for x in (q, k, v, of_q, of_k)]
    assert counted(lambda: flash_attn_varlen_func(*meta, 11, 18)) == flops((2, 4, 11, 18, 16, 24))[:1]


# ---- torch.func ----------------------------------------------------------------------------------------


def masked(q, k, v):
    """Attention with a mask and a bias of tensors."""
    bias = torch.arange(q.shape[1] * k.shape[1], device=q.device).sin().view(q.shape[1], k.shape[1])
    out = scaled_dot_product_attention(*heads_first(q, k, v), attn_mask=bias, enable_gqa=True)
    return out.transpose(1, 2)


def ragged(q, k, v):
    """Each batch entry as sequences of 3 rows, and of the others."""
    lists = [torch.tensor([0, 3, x.shape[1]], dtype=torch.int32, device=q.device) for x in (q, k)]
    longest = [x.shape[1] for x in (q, k)]
    return torch.stack([flash_attn_varlen_func(*entry, *lists, *longest, causal=True) for entry in zip(q, k, v)])


def ruled(q, k, v):
    out = flex_attention(*heads_first(q, k, v), lambda score, b, h, i, j: score - (i - j).abs(), enable_gqa=True)
    return out.transpose(1, 2)


CALLS = {
    "plain": lambda q, k, v: flash_attn_func(q, k, v, causal=True),
    "sinks": lambda q, k, v: flash_attn_func(q, k, v, s_aux=q[0, 0, :, 0].float(), window_size=(4, 0)),
    "sums": lambda q, k, v: flash_attn_func(q, k, v, return_attn_probs=True)[1],
    "packed": lambda q, k, v: flash_attn_kvpacked_func(q, torch.stack([k, k], 2), causal=True),
    "ragged": ragged,
    "masked": masked,
    "ruled": ruled,
}


def gradients(call, tensors, dout):
    """Those of autograd."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    with torch.enable_grad():
        return torch.autograd.grad(call(*leaves), leaves, dout, allow_unused=True, materialize_grads=True)


def same(found, expected):
    """Equal, or as far apart as sums in another order are."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        tolerance = 1e-5 if one.dtype == torch.float32 else 3e-2
        assert (one.float() - other.float()).abs().max() <= tolerance * max(1.0, other.float().abs().max())


@every_device
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_transforms_have_the_gradients_of_autograd(call, device):
    tensors = [x.detach() for x in three(device)]
    out, pull = torch.func.vjp(call, *tensors)
    assert torch.equal(out, call(*tensors))
    dout = torch.stack([random(*out.shape, device=device, dtype=out.dtype, seed=seed) for seed in (5, 6)])
    same(pull(dout[0]), gradients(call, tensors, dout[0]))
    for found, *expected in zip(torch.vmap(pull)(dout), *(gradients(call, tensors, it) for it in dout)):
        same(found, expected)
    # Of each sequence by itself, and through a vmap.
    alone = lambda *one: call(*(x[None] for x in one))[0].float().square().sum()
    wanted = gradients(lambda *all: sum(map(alone, *all)), tensors, torch.ones((), device=device))
    same(torch.vmap(torch.func.grad(alone, (0, 1, 2)))(*tensors), wanted)
    same(torch.func.grad(lambda *all: torch.vmap(alone)(*all).sum(), (0, 1, 2))(*tensors), wanted)


def test_jacobians_and_functional_calls():
    q, k, v = (x.detach() for x in three())
    rows = lambda q: flash_attn_func(q, k, v, causal=True).sum((0, 2, 3))
    expected = torch.autograd.functional.jacobian(rows, q)
    torch.testing.assert_close(torch.func.jacrev(rows)(q), expected)
    layer = torch.nn.Linear(16, 16)
    parameters = dict(layer.named_parameters())
    loss = lambda given: flash_attn_func(torch.func.functional_call(layer, given, (q,)), k, v).square().sum()
    loss(parameters).backward()
    found = torch.func.grad(loss)(parameters)
    same([found[name] for name in parameters], [it.grad for it in layer.parameters()])
    # What autograd differentiates beside a transform.
    keys = k.clone().requires_grad_()
    out, _ = torch.func.vjp(lambda q: flash_attn_func(q, keys, v), q)
    same(torch.autograd.grad(out.sum(), keys), gradients(lambda k: flash_attn_func(q, k, v), [k], torch.ones_like(out)))


def test_transforms_that_are_refused():
    q, k, v = (x.detach() for x in three())
    loss = lambda q: flash_attn_func(q, k, v).sum()
    with pytest.raises(NotImplementedError, match="^FlashCore has no second derivatives"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(q)
    with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        torch.func.hessian(loss)(q)
    decode = lambda q: flash_attn_with_kvcache(q, k, k, cache_seqlens=9)
    merge = lambda q: flash_attn_merge(q, torch.zeros(2, 4, 7), q, torch.zeros(2, 4, 7))[0]
    for call, name in ((decode, "q"), (merge, "out_a")):
        for transformed in (call, lambda q: torch.vmap(call)(q[None])):
            with pytest.raises(NotImplementedError, match=f"^{name} requires grad, expected"):
                torch.func.grad(lambda q: transformed(q).sum())(q)


# ---- what saves tensors, and what they are saved as ----------------------------------------------------


@every_device
def test_checkpoints_stop_early_and_tensors_are_saved_on_the_host(device):
    q, k, v = three(device)
    call = lambda q: flash_attn_func(q.sin(), k, v, causal=True).cos()
    (expected,) = torch.autograd.grad(call(q).sum(), q)
    for early in (True, False):
        with torch.utils.checkpoint.set_checkpoint_early_stop(early):
            out = torch.utils.checkpoint.checkpoint(call, q, use_reentrant=False)
            assert torch.equal(torch.autograd.grad(out.sum(), q)[0], expected)
    with torch.autograd.graph.save_on_cpu():
        out = call(q)
    assert torch.equal(torch.autograd.grad(out.sum(), q)[0], expected)


@every_device
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_policy_keeps_what_attention_gave(deterministic, device):
    """A checkpoint computes attention again unless its policy names the operator."""
    operators, seen = torch.ops.flashcore.attention_with_lse, []
    kept = [operators.all if deterministic else operators.default]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    def gradient(**policy):
        seen.clear()
        q, k, v = three(device)
        call = lambda q: flash_attn_func(q.sin(), k, v, deterministic=deterministic).cos()
        with Watch():
            out = torch.utils.checkpoint.checkpoint(call, q, use_reentrant=False, **policy)
            out.sum().backward()
        return q.grad, seen.count(kept[0])

    expected, twice = gradient()
    context = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, kept)
    found, once = gradient(context_fn=context)
    assert (twice, once) == (2, 1) and torch.equal(found, expected)


def test_nested_tensors_are_refused_and_their_values_are_served():
    parts = [random(length, 4, 16, seed=length) for length in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    for call in (
        lambda: flash_attn_func(nested, nested, nested),
        lambda: flash_attn_func(*[nested.detach().requires_grad_()] * 3),
        lambda: scaled_dot_product_attention(*heads_first(nested, nested, nested)),
    ):
        with pytest.raises(
            TypeError, match="^q[uery]* cannot be read .it is nested; of a jagged one flash_attn_varlen"
        ):
            call()
    rows, starts = nested.values(), nested.offsets().int()
    found = flash_attn_varlen_func(rows, rows, rows, starts, starts, 5, 5, causal=True)
    expected = [flash_attn_func(*[part[None]] * 3, causal=True)[0] for part in parts]
    assert torch.equal(found, torch.cat(expected))


@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="PyTorch has no gloo"
)
def test_tensors_over_several_devices():
    """PyTorch refuses a `DTensor` where nobody has said how an operator is spread; `local_map` says it."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.experimental import local_map

    q, k, v = (x.detach() for x in three())
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        heads, mesh = [Shard(2)], init_device_mesh("cpu", (1,))
        spread = [distribute_tensor(x, mesh, heads).requires_grad_() for x in (q, k, v)]
        with pytest.raises(NotImplementedError, match="flashcore.attention_with_lse.default does not have a sharding"):
            flash_attn_func(*spread)
        attention = local_map(flash_attn_func, out_placements=heads, in_placements=(heads,) * 3)
        out = attention(*spread)
        out.sum().backward()
        assert torch.equal(out.full_tensor(), flash_attn_func(q, k, v))
        same([x.grad.full_tensor() for x in spread], gradients(flash_attn_func, (q, k, v), torch.ones(2, 7, 4, 24)))
    finally:
        torch.distributed.destroy_process_group()


# ---- graphs of any lengths -----------------------------------------------------------------------------


def starts(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


SIZES = ((2, 5, 7, 4), (3, 9, 11, 6), (4, 33, 65, 8))
DYNAMIC = {
    "plain": lambda q, k, v: flash_attn_func(q, k, v, causal=True, window_size=(5, 0)),
    "heads first": lambda q, k, v: scaled_dot_product_attention(*heads_first(q, k, v), is_causal=True),
    "masked": masked,
    "packed": lambda q, k, v: flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=True),
}


@pytest.mark.parametrize("call", DYNAMIC.values(), ids=DYNAMIC)
def test_one_graph_for_all_sizes(call):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, dynamic=True, fullgraph=True, backend=counter)
    for batch, queries, keys, heads in SIZES:
        tensors = [random(batch, length, heads, 16, seed=length) for length in (queries, keys, keys)]
        out = compiled(*(x.clone().requires_grad_() for x in tensors))
        assert torch.equal(out, call(*tensors))
        same(gradients(compiled, tensors, out.detach()), gradients(call, tensors, out.detach()))
    assert counter.frame_count <= 2, "compiled again for each size"


def test_one_graph_for_sequences_of_any_lengths():
    class Layer(torch.nn.Module):
        def forward(self, rows, starts):
            # As many as there are rows, which nobody has to know when the graph is made.
            longest = rows.shape[0]
            return flash_attn_varlen_func(rows, rows, rows, starts, starts, longest, longest, causal=True)

    sizes = ((5, 7), (3, 9, 11, 6), (1,))
    given = [(random(sum(lengths), 4, 16, seed=sum(lengths)), starts(lengths)) for lengths in sizes]
    expected = [Layer()(*it) for it in given]
    any_size = ({0: torch.export.Dim("rows", max=4096)}, {0: torch.export.Dim("starts", min=2, max=64)})
    for strict in (False, True):
        exported = torch.export.export(Layer(), given[0], dynamic_shapes=any_size, strict=strict).module()
        assert all(torch.equal(exported(*it), one) for it, one in zip(given, expected))
    compiled = torch.compile(Layer(), dynamic=True, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(compiled(*it), one) for it, one in zip(given, expected))


def test_one_graph_for_caches_of_any_size():
    class Layer(torch.nn.Module):
        def forward(self, q, cache):
            return flash_attn_with_kvcache(q, cache, cache, cache_seqlens=cache.shape[1] - 1, causal=True)

    given = [(random(2, 3, 4, 16), random(2, size, 2, 16, seed=size)) for size in (9, 17)]
    expected = [Layer()(*it) for it in given]
    any_size = (None, {1: torch.export.Dim("size", min=4, max=4096)})
    for strict in (False, True):
        exported = torch.export.export(Layer(), given[0], dynamic_shapes=any_size, strict=strict).module()
        assert all(torch.equal(exported(*it), one) for it, one in zip(given, expected))
