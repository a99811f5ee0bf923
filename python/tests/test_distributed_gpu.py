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

pytestmark = [pytest.mark.gpu, pytest.mark.hardware]


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


# Element type of the caches and of new rows, head dims of keys and values.
CACHES = {
    "e4m3": (torch.float8_e4m3fn, torch.bfloat16, 64, 64),
    "e4m3 as it is": (torch.float8_e4m3fn, torch.float8_e4m3fn, 64, 64),
    "e5m2 of float32": (torch.float8_e5m2, torch.float32, 128, 64),
    "int8": (torch.int8, torch.float16, 64, 128),
    "int8 as it is": (torch.int8, torch.int8, 64, 64),
    "wide values": (torch.bfloat16, torch.bfloat16, 64, 320),
    "wide values in 8 bits": (torch.float8_e4m3fn, torch.bfloat16, 64, 320),
    "no multiple of 8": (torch.bfloat16, torch.bfloat16, 60, 60),
    "odd": (torch.float16, torch.float16, 15, 9),
}


@pytest.mark.filterwarnings("ignore:head dim")
@pytest.mark.filterwarnings("ignore:values have")
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("case", CACHES)
def test_caches_are_as_on_the_cpu(case, paged):
    """Bit for bit; and attention over them is that over the same numbers in one cache."""
    dtype, rows, dim, value_dim = CACHES[case]
    size, block, batch, heads, key_heads, new, page = 3, 4, 2, 4, 2, 70, 8
    k, v = (torch.randn(batch, new, key_heads, it, device="cuda").mul(2).to(rows) for it in (dim, value_dim))
    lengths = torch.zeros(batch, device="cuda", dtype=torch.int32)

    def caches(device):
        count = 32 // page
        shape, table = (batch, 32), None
        if paged:
            shape, table = (
                (batch * count, page),
                torch.arange(batch * count, dtype=torch.int32).flip(0).view(batch, count),
            )
        made = [torch.zeros(*shape, key_heads, it).to(device, dtype) for it in (dim, value_dim)]
        return made, {"block": block, "page_table": None if table is None else table.to(device)}

    def work(transport):
        here, where = caches("cuda")
        # In two steps, the second from within a block; and as rows of a model that is trained.
        recorded = [it.requires_grad_() if it.is_floating_point() and it.dtype.itemsize > 1 else it for it in (k, v)]
        for begin, end in ((0, 49), (49, new)):
            append(*here, *(it[:, begin:end] for it in recorded), lengths + begin, transport, **where)
        there, of_cpu = caches("cpu")
        append(*there, k.detach().cpu(), v.detach().cpu(), lengths.cpu(), transport, **of_cpu)
        for found, expected in zip(here, there):
            assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))
        assert not any(it.requires_grad for it in here)
        return decode(q, *here, lengths + new, transport, **where)

    q = torch.randn(batch, 2, heads, dim, device="cuda").to(torch.float16 if dtype == torch.float16 else torch.bfloat16)
    whole = [torch.zeros(batch, new, key_heads, it).to(dtype) for it in (dim, value_dim)]
    single = ranks.Thread(ranks.Mailbox(1), 0)
    append(*whole, k.detach().cpu(), v.detach().cpu(), lengths.cpu(), single)
    wide = [it.float() for it in whole]
    expected = flash_attn_with_kvcache(q.float().cpu(), *wide, cache_seqlens=lengths.cpu() + new, causal=True)
    for found in ranks.threads(work, size):
        largest = float(expected.abs().max())
        torch.testing.assert_close(found.float().cpu(), expected, atol=2e-2 * max(largest, 1), rtol=2e-2)


def test_appending_waits_for_nothing():
    cache = torch.zeros(2, 2, 64, 2, 64, device="cuda", dtype=torch.float8_e4m3fn)
    rows = torch.randn(2, 1, 2, 64, device="cuda", dtype=torch.bfloat16)
    lengths, transport = torch.zeros(2, device="cuda", dtype=torch.int32), ranks.Thread(ranks.Mailbox(1), 0)
    append(*cache, rows, rows, lengths, transport)
    torch.cuda.set_sync_debug_mode("error")
    try:
        append(*cache, rows, rows, lengths, transport)
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
