"""Attention over a spread sequence on a GPU: ranks in turn on one, as threads that hand tensors to each
other, and one rank over NCCL."""

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

import distributed_cases
import ranks
from distributed_cases import VARIANTS, cases
from flashcore import flash_attn_with_kvcache
from flashcore.distributed import append, context_parallel_attention, decode

pytestmark = pytest.mark.gpu


def check(transport, variant, case, dtype, tolerance, dim=64):
    length, heads, rules, order, nodes = case
    given = distributed_cases.tensors(length, heads, dtype, "cuda", dim=dim, value_dim=dim)
    found = distributed_cases.spread_without_autograd(transport, variant, length, given, rules, order, nodes)
    # One process's own rounding, and as much for the parts.
    expected = distributed_cases.whole(length, given, rules)
    distributed_cases.compare(transport, length, found, expected, order, nodes, tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ranks_in_turn_find_what_one_does(size, variant):
    for index, case in enumerate(cases(size, variant)):
        dtype = torch.float16 if index % 2 else torch.bfloat16
        ranks.threads(lambda transport: check(transport, variant, case, dtype, 2e-2), size)


@pytest.mark.parametrize("variant", VARIANTS)
def test_long_sequences(variant):
    nodes = 2 if variant == "hybrid" else 1
    for length in (4099, [1500, 17, 2600]):
        for rules in ({"causal": True}, {"window_size": (300, 0)}):
            case = (length, (8, 4), rules, "zigzag", nodes)
            ranks.threads(lambda transport: check(transport, variant, case, torch.bfloat16, 2e-2, dim=128), 4)


@pytest.mark.parametrize("paged", [False, True])
def test_decoding_over_a_spread_cache(paged):
    block, batch, heads, key_heads, dim, room, size = 16, 3, 8, 2, 64, 512, 4
    random = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    new, page = 300, 8
    whole_k, whole_v, q = (
        random(batch, room, key_heads, dim),
        random(batch, room, key_heads, dim),
        random(batch, new, heads, dim),
    )
    before = torch.tensor([0, 50, 111], device="cuda", dtype=torch.int32)
    # One position, several of them, a chunk of a prompt; and in a window.
    calls = [(1, (-1, -1)), (5, (-1, -1)), (new, (-1, -1)), (5, (40, 0))]

    def work(transport):
        shape, table = (batch, room // size), None
        if paged:
            count = room // size // page
            shape, table = (batch * count, page), torch.randperm(batch * count, device="cuda", dtype=torch.int32)
            table = table.view(batch, count)
        k_cache, v_cache = torch.zeros((2, *shape, key_heads, dim), device="cuda", dtype=torch.bfloat16)
        zero, where = torch.zeros_like(before), {"block": block, "page_table": table}
        append(k_cache, v_cache, whole_k[:, :111], whole_v[:, :111], zero, transport, **where)
        k, v = (torch.stack([it[at, n : n + new] for at, n in enumerate((0, 50, 111))]) for it in (whole_k, whole_v))
        append(k_cache, v_cache, k, v, before, transport, **where)
        attend = lambda last, seen: decode(
            q[:, -last:], k_cache, v_cache, before + new, transport, window_size=seen, **where
        )
        return [attend(*call) for call in calls]

    every = ranks.threads(work, size)
    for at, (last, seen) in enumerate(calls):
        expected = flash_attn_with_kvcache(
            q[:, -last:], whole_k, whole_v, cache_seqlens=before + new, causal=True, window_size=seen
        )
        for found in every:
            torch.testing.assert_close(found[at], expected, atol=2e-2, rtol=2e-2)


@pytest.fixture(scope="module")
def nccl(tmp_path_factory):
    """A process group of one, over NCCL."""
    if not dist.is_nccl_available():
        pytest.skip("PyTorch was built without NCCL")
    store = tmp_path_factory.mktemp("nccl") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_rank_over_nccl(nccl, variant):
    for case in cases(3, variant):
        length, heads, rules, order, _ = case
        given = distributed_cases.tensors(length, heads, torch.bfloat16, "cuda", dim=64, value_dim=64)
        found = distributed_cases.spread(nccl, variant, length, given, rules, order, 1)
        expected = distributed_cases.whole(length, given, rules)
        distributed_cases.compare(nccl, length, found, expected, order, 1, 1e-2)


def test_the_callers_stream_is_honoured(nccl):
    q, k, v, _ = distributed_cases.tensors(256, (4, 2), torch.bfloat16, "cuda", dim=64, value_dim=64)
    expected = context_parallel_attention(q, k, v, nccl, causal=True)
    late = torch.zeros_like(q)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(q)
        found = context_parallel_attention(late, k, v, nccl, variant="all_gather", causal=True)
    torch.cuda.synchronize()
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)


def test_pytorchs_context_parallel_runs_on_flashcore(nccl):
    import flashcore
    import flashcore.torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel

    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        pytest.skip(f"PyTorch {torch.__version__} has no switch for its attention")
    mesh = DeviceMesh.from_group(nccl, "cuda")
    given = [torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    functional, flash = torch.nn.functional, torch.nn.attention.SDPBackend.FLASH_ATTENTION

    def step():
        leaves = [it.clone().requires_grad_() for it in given[:3]]
        with torch.nn.attention.sdpa_kernel(flash):
            out = functional.scaled_dot_product_attention(*leaves, is_causal=True)
        out.backward(given[3])
        return [out.detach(), *(it.grad for it in leaves)]

    expected = step()
    flashcore.torch.activate()
    try:
        with context_parallel(mesh, buffers=given, buffer_seq_dims=[2] * 4):
            found = step()
        assert flashcore.info()["last"]["device"] == "cuda:0"
    finally:
        flashcore.torch.restore()
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
