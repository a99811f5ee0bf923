"""PyTorch, the same bodies on the CPU and on a GPU."""

import concurrent.futures
import gc
import math
import weakref

import pytest

torch = pytest.importorskip("torch")

import flashcore
from conftest import devices
from flashcore import (
    _flashcore,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    scaled_dot_product_attention,
)

every_device = pytest.mark.parametrize("device", devices())


def random(*shape, device, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def three(batch, queries, keys, heads, key_heads, dim, device, dtype=torch.bfloat16, value_dim=None):
    return (
        random(batch, queries, heads, dim, device=device, dtype=dtype),
        random(batch, keys, key_heads, dim, device=device, dtype=dtype, seed=1),
        random(batch, keys, key_heads, value_dim or dim, device=device, dtype=dtype, seed=2),
    )


def plain(q, k, v, causal=False, scale=None, dtype=None):
    """The plain algorithm in a precision, over (batch, length, heads, dim), and the log-sum-exps."""
    given = q.dtype
    q, k, v = (x.to(dtype or given).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)) * (scale or 1 / math.sqrt(q.shape[3]))
    if causal:
        queries, keys = scores.shape[2:]
        seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        scores = scores.masked_fill(~seen, -math.inf)
    sums = scores.logsumexp(-1)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2), sums


def check(output, lse, q, k, v, causal=False, scale=None):
    """At most twice the error of the plain algorithm in the element type, against f64."""
    exact, exact_lse = plain(q, k, v, causal, scale, torch.float64)
    rough, _ = plain(q, k, v, causal, scale)
    assert output.shape == exact.shape and output.dtype == q.dtype and output.device == q.device
    error = (output.double() - exact).abs().max().item()
    allowed = 2 * (rough.double() - exact).abs().max().item() + 1e-6
    assert error <= allowed, (error, allowed)
    if lse is not None:
        assert lse.shape == exact_lse.shape and lse.dtype == torch.float32
        assert torch.equal(lse.isinf(), exact_lse.isinf())
        finite = ~exact_lse.isinf()
        assert (lse.double() - exact_lse)[finite].abs().max().item() < 1e-3


@every_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1, 1, 64),
        (2, 130, 257, 8, 2, 64),
        (1, 200, 77, 6, 6, 128),
        (1, 129, 129, 3, 1, 256),
        (2, 65, 64, 2, 2, 40),
    ],
)
def test_the_answer_is_right(shape, causal, dtype, device):
    q, k, v = three(*shape, device=device, dtype=dtype)
    output, lse, probabilities = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    assert probabilities is None
    check(output, lse, q, k, v, causal)
    assert torch.equal(flash_attn_func(q, k, v, causal=causal), output)
    if device == "cuda" and torch.cuda.get_device_capability() == (9, 0):
        last = flashcore.info()["last"]
        # Few queries go to the kernel that reads keys once for all heads of a group.
        kernel = "forward" if shape[1] >= 32 else "decode"
        assert last["device"] == "cuda:0" and last["kernel"] == f"gpu/{kernel}"
        assert last["configuration"].startswith(f"{kernel}_")


@every_device
def test_strides_are_followed(device):
    # As (batch, heads, length, dim); slices of a packed tensor; gaps; a value head dim of its own.
    swapped = [x.transpose(1, 2) for x in three(2, 6, 6, 100, 100, 64, device)]
    packed = random(2, 100, 3, 4, 64, device=device).unbind(2)
    gaps = [random(2, 100, 4, 96, device=device, seed=seed)[:, ::2, :, 16:80] for seed in range(3)]
    other = three(2, 50, 60, 4, 2, 128, device, value_dim=64)
    for q, k, v in (swapped, packed, gaps, other):
        output, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        check(output, lse, q, k, v, causal=True)
        assert output.is_contiguous()
        assert torch.equal(output, flash_attn_func(*(x.contiguous() for x in (q, k, v)), causal=True))


@every_device
def test_packed_tensors(device):
    qkv = random(2, 90, 3, 4, 64, device=device)
    expected = flash_attn_func(*(x.contiguous() for x in qkv.unbind(2)), causal=True)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, causal=True), expected)
    q, kv = qkv[:, :, 0].contiguous(), qkv[:, :, 1:].contiguous()
    assert torch.equal(flash_attn_kvpacked_func(q, kv, causal=True), expected)
    output, lse, _ = flash_attn_qkvpacked_func(qkv, softmax_scale=0.3, return_attn_probs=True)
    check(output, lse, *qkv.unbind(2), scale=0.3)


@every_device
@pytest.mark.parametrize("queries, keys", [(128, 128), (70, 200), (33, 64), (200, 70)])
def test_scaled_dot_product_attention(queries, keys, device):
    q = random(2, 8, queries, 64, device=device)
    k, v = (random(2, 2, keys, 64, device=device, seed=seed) for seed in (1, 2))
    for causal in (False, True):
        ours = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        wide = [x.double() for x in (q, k, v)]
        wide[1:] = [x.repeat_interleave(4, dim=1) for x in wide[1:]]
        theirs = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=causal)
        assert ours.shape == theirs.shape and ours.is_contiguous()
        assert (ours.double() - theirs).abs().max().item() < 2e-2
        again = scaled_dot_product_attention(
            *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
        )
        assert torch.equal(ours, again)


@every_device
def test_nothing_to_do(device):
    q = random(2, 5, 3, 64, device=device)
    assert flash_attn_func(q[:, :0], q, q).shape == (2, 0, 3, 64)
    assert flash_attn_func(q[:0], q[:0], q[:0]).shape == (0, 5, 3, 64)


def test_no_keys_on_the_cpu():
    q = random(2, 5, 3, 64, device="cpu")
    output, lse, _ = flash_attn_func(q, q[:, :0], q[:, :0], return_attn_probs=True)
    assert not output.any() and (lse == -math.inf).all()


class Block(torch.nn.Module):
    """A transformer block."""

    def __init__(self, width=256, heads=4, attention=flash_attn_func):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.unbind(2)
        attended = self.attention(q, k, v, causal=True)
        x = x + self.out(attended.reshape(batch, length, width))
        return x + self.down(torch.nn.functional.gelu(self.up(self.between(x))))


def block(device):
    torch.manual_seed(0)
    return Block().to(device, torch.bfloat16).eval()


def near(found, expected, tolerance=2e-2):
    return found.shape == expected.shape and (found.float() - expected.float()).abs().max().item() < tolerance


@every_device
@torch.no_grad()
@pytest.mark.hardware
def test_compile_in_one_graph(device):
    model = block(device)
    # Generated code may round elsewhere than eager; on a CPU it wants a C++ compiler besides.
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for length in (128, 100):
        x = random(2, length, 256, device=device)
        assert near(compiled(x), model(x), 6e-2)
    # By itself it is bitwise the same.
    q, k, v = three(1, 64, 64, 4, 4, 64, device)
    both = torch.compile(
        lambda q, k, v: flash_attn_func(q, k, v, return_attn_probs=True)[:2], fullgraph=True, backend=backend
    )
    eager = flash_attn_func(q, k, v, return_attn_probs=True)
    assert all(torch.equal(*pair) for pair in zip(both(q, k, v), eager))
    sdpa = torch.compile(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), fullgraph=True, backend=backend
    )
    swapped = [x.transpose(1, 2) for x in (q[:, :50], k, v)]
    assert torch.equal(sdpa(*swapped), scaled_dot_product_attention(*swapped, is_causal=True))


@every_device
@torch.no_grad()
def test_export(device):
    model = block(device)
    x = random(2, 96, 256, device=device)
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(model, (x,), dynamic_shapes=({1: length},))
    assert "flashcore.attention" in str(program.graph)
    for length in (96, 70):
        x = random(2, length, 256, device=device)
        assert torch.equal(program.module()(x), model(x))


@every_device
def test_the_operators_keep_pytorchs_rules(device):
    q, k, v = three(1, 24, 40, 4, 2, 64, device)
    for operator in (torch.ops.flashcore.attention.default, torch.ops.flashcore.attention_with_lse.default):
        torch.library.opcheck(operator, (q, k, v, None, True))
        torch.library.opcheck(operator, (q.transpose(0, 1).transpose(0, 1), k, v, 0.5, False))


@every_device
def test_subclasses_and_modes_see_the_operator(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    q, k, v = three(1, 24, 24, 2, 2, 64, device)
    expected = flash_attn_func(q, k, v)
    with Watch():
        assert torch.equal(flash_attn_func(q, k, v), expected)
    assert torch.ops.flashcore.attention.default in seen
    with torch.no_grad():
        assert torch.equal(flash_attn_func(torch.nn.Parameter(q), k, v), expected)
    stacked = [torch.stack([x, x]) for x in (q, k, v)]
    assert torch.equal(torch.vmap(flash_attn_func)(*stacked)[1], expected)


@every_device
def test_a_view_of_negatives_is_what_it_stands_for(device):
    given = three(1, 24, 40, 4, 2, 64, device)
    negative = [torch._neg_view(x) for x in given]
    expected = flash_attn_func(*(-x for x in given), causal=True)
    assert torch.equal(flash_attn_func(*negative, causal=True), expected)
    gradients = []
    for tensors in (negative, [-x for x in given]):
        leaves = [x.detach().requires_grad_() for x in tensors]
        output = flash_attn_func(*leaves, causal=True)
        backwards = torch._neg_view(output.detach()) if tensors is negative else -output.detach()
        gradients.append(torch.autograd.grad(output, leaves, backwards))
    for found, wanted in zip(*gradients):
        assert torch.equal(found, wanted)


def test_tensors_without_memory():
    q, k, v = three(2, 24, 40, 4, 2, 64, "meta")
    assert flash_attn_func(q, k, v).shape == q.shape
    lengths = torch.zeros(3, dtype=torch.int32, device="meta")
    output, lse = flash_attn_varlen_func(q[0], k[0], v[0], lengths, lengths, 24, 40, return_attn_probs=True)
    assert output.is_meta and lse.shape == (4, 24)


@every_device
@pytest.mark.parametrize(
    "change, error, words",
    [
        (lambda q, k, v: (q[0], k, v), ValueError, "q has 3 dimensions, expected 4"),
        (lambda q, k, v: (q, k.half(), v), TypeError, "k has element type f16, expected bf16 like q"),
        (lambda q, k, v: (q.double(), k, v), TypeError, "q has element type float64, expected float16"),
        (lambda q, k, v: (q, k[:, :9], v), ValueError, "v has shape .* expected"),
        (lambda q, k, v: (q, [1], v), TypeError, "k is a <class 'list'>, expected a torch.Tensor"),
        (lambda q, k, v: (q, k, v.to("meta")), Exception, "v is on meta, expected"),
        (lambda q, k, v: [torch.cat([x] * 5, -1) for x in (q, k, v)], ValueError, "q has head dim 320, expected"),
        (lambda q, k, v: (q.to_sparse().requires_grad_(), k, v), TypeError, "q cannot be read .*torch.sparse_coo"),
    ],
)  # fmt: skip
def test_wrong_use_is_named(change, error, words, device):
    q, k, v = (random(1, 64, 64, 64, device=device, seed=seed) for seed in range(3))
    with pytest.raises(error, match=words):
        flash_attn_func(*change(q, k, v))


@pytest.mark.gpu
def test_mixed_devices_are_named():
    q, k, v = three(1, 16, 16, 2, 2, 64, "cuda")
    with pytest.raises(ValueError, match="k is on the CPU, expected cuda:0 like q"):
        flash_attn_func(q, k.cpu(), v)
    with pytest.raises(ValueError, match="k is on cuda:0, expected the CPU like q"):
        flash_attn_func(q.cpu(), k, v)
    with pytest.raises(Exception, match="k is on cpu, expected cuda:0 like q"):
        torch.compile(flash_attn_func, fullgraph=True)(q, k.cpu(), v)


@every_device
def test_the_example_of_flash_attentions_documentation(device):
    """Only the import is another."""
    from flashcore import flash_attn_func, flash_attn_qkvpacked_func

    batch_size, seqlen, nheads, headdim = 2, 128, 8, 64
    qkv = torch.randn(batch_size, seqlen, 3, nheads, headdim, device=device, dtype=torch.float16)
    out = flash_attn_qkvpacked_func(
        qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
        deterministic=False,
    )  # fmt: skip
    assert out.shape == (batch_size, seqlen, nheads, headdim)
    nheads_k = 2
    q = torch.randn(batch_size, seqlen, nheads, headdim, device=device, dtype=torch.float16)
    k = torch.randn(batch_size, seqlen, nheads_k, headdim, device=device, dtype=torch.float16)
    v = torch.randn(batch_size, seqlen, nheads_k, headdim, device=device, dtype=torch.float16)
    out = flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=True, window_size=(-1, -1), alibi_slopes=None,
        deterministic=False,
    )  # fmt: skip
    check(out, None, q, k, v, causal=True)
    out, softmax_lse, S_dmask = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    check(out, softmax_lse, q, k, v, causal=True)


@every_device
def test_what_tensors_are_without_asking_them_one_by_one(device):
    class Other(torch.Tensor):
        pass

    small = [random(2, 8, device=device).to(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
    small.append(small[0].as_subclass(Other))
    wide = random(2, 8, device=device)
    assert all(map(_flashcore.is_small_float, small))
    others = (wide, wide.as_subclass(Other), wide.to(torch.int8), wide.to("meta"), None, 3, "q", [small[0]])
    assert not any(map(_flashcore.is_small_float, others))

    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], dtype=torch.bfloat16, device=device)
    sparse = torch.sparse_coo_tensor(size=(2, 8), dtype=torch.bfloat16, device=device)
    others = (wide.float(), *small, wide.as_subclass(Other), torch.nn.Parameter(wide), wide.to("meta"))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        # In a thread that has not used function transforms, as this one may have.
        are_plain = lambda *tensors: pool.submit(_flashcore.are_plain_halves, tensors).result()
        assert not any(are_plain(wide, other) for other in (*others, nested, sparse, 3))
        if not are_plain(wide):
            pytest.skip("this PyTorch is asked one by one")
        assert are_plain() and are_plain(wide, None, wide.half().t())


@every_device
def test_a_thread_with_function_transforms_is_asked_one_by_one(device):
    given, found = random(3, 2, 8, device=device), []

    def ask(tensor):
        found.append(_flashcore.are_plain_halves((tensor, given)))
        return tensor

    def transform():
        ask(given)
        torch.vmap(ask)(given)
        # What has left a transform may still be wrapped.
        ask(given)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(transform).result()
    assert found[1:] == [False, False]


@every_device
@pytest.mark.filterwarnings("ignore:head dim 12 is no multiple of 8")
def test_the_garbage_collector_is_not_needed_to_free_tensors(device):
    """Neither after a call that is refused, nor after one whose tensors are copied since the kernels refuse them."""
    other = random(1, 4, 2, 16, device=device)
    calls = [
        lambda q: flash_attn_func(q, other[:, :, :, :8], other),
        lambda q: flash_attn_func(q[..., :12], other[..., :12], other[..., :12]),
        lambda q: flashcore.flash_attn_with_kvcache(q, other, other[:, :, :1]),
    ]
    gc.collect()
    gc.disable()
    try:
        for call in calls:
            query = random(1, 4, 2, 16, device=device)
            alive = weakref.ref(query)
            try:
                call(query)
            except ValueError:
                pass
            del query
            assert alive() is None
    finally:
        gc.enable()
