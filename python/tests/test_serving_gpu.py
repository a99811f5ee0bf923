"""What only a GPU can show of serving: graphs, streams, memory."""

import gc
import threading

import pytest

torch = pytest.importorskip("torch")

from flashcore import flash_attn_combine, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from test_gpu import NAP, Foreign
from test_serving_torch import angles, check, decoder, ints, random, rotated, starts

pytestmark = [pytest.mark.gpu, pytest.mark.hardware]


class Step:
    """A decode step over pages, with all its tensors in place."""

    def __init__(self, batch=4, columns=40, size=16, heads=8, key_heads=2, dim=128, seed=0):
        pages = batch * columns
        table = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
        self.table = table.view(batch, columns).to("cuda", torch.int32)
        self.caches = [random(pages, size, key_heads, dim, device="cuda", seed=seed + at) for at in (1, 2)]
        self.q = random(batch, 1, heads, dim, device="cuda", seed=seed)
        self.new = [random(batch, 1, key_heads, dim, device="cuda", seed=seed + at) for at in (3, 4)]
        self.lengths = ints([(37 * at + seed) % 300 for at in range(batch)], "cuda")
        self.angles = angles(columns * size, dim // 2, "cuda")

    def run(self):
        output, lse = flash_attn_with_kvcache(
            self.q, *self.caches, *self.new, rotary_cos=self.angles[0], rotary_sin=self.angles[1],
            cache_seqlens=self.lengths, page_table=self.table, causal=True, rotary_interleaved=False,
            return_softmax_lse=True,
        )  # fmt: skip
        self.lengths += 1
        return output, lse

    def set(self, seed):
        """New tokens, in the same tensors."""
        for tensor, at in zip((self.q, *self.new), range(3)):
            tensor.copy_(random(*tensor.shape, device="cuda", seed=100 * seed + at))

    def check(self, output, lse):
        """Against the plain algorithm, over what is in the cache after the step."""
        for at, length in enumerate(self.lengths.tolist()):
            keys, values = (cache[self.table[at].long()].flatten(0, 1)[:length] for cache in self.caches)
            position = torch.tensor([length - 1], device="cuda")
            query = rotated(self.q[at], position, *self.angles, False)
            check(output[at], lse[at], query, keys, values, causal=True)
            key = rotated(self.new[0][at], position, *self.angles, False)
            assert (keys[-1].float() - key[0].float()).abs().max().item() <= 2**-6
            assert torch.equal(values[-1], self.new[1][at, 0])


@pytest.mark.parametrize("warm", [True, False])
def test_a_graph_is_right_as_the_cache_grows(warm):
    step = Step(seed=7 if warm else 8, columns=40 if warm else 41)
    lengths = step.lengths.clone()
    if warm:
        step.run()
        step.lengths.copy_(lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, lse = step.run()
    assert torch.equal(step.lengths, lengths), "nothing ran"
    for seed in range(1, 9):
        step.set(seed)
        graph.replay()
        assert torch.equal(step.lengths, lengths + seed)
        step.check(output, lse)
        # The same outside of a graph, bit by bit.
        step.lengths -= 1
        again = step.run()
        assert torch.equal(again[0], output) and torch.equal(again[1], lse)


def test_graphs_run_beside_each_other():
    """Each has its own workspace, though both were captured on one stream."""
    steps = [Step(batch=2, columns=400, seed=seed) for seed in (1, 2)]
    for step in steps:
        step.lengths.fill_(6000)
    graphs, outputs = [], []
    for step in steps:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                output = step.run()
        graphs.append(graph)
        outputs.append(output)
    streams = [torch.cuda.Stream() for _ in steps]
    torch.cuda.synchronize()
    for _ in range(5):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for step, output in zip(steps, outputs):
        step.check(*output)


def test_graphs_give_their_memory_back():
    step = Step()

    def capture(count):
        for _ in range(count):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step.run()
            del graph
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    before = capture(100)
    assert before - capture(100) <= 32 << 20


def test_streams_do_not_disturb_each_other():
    """Threads with streams of their own, over one cache that is split among many blocks."""
    q = random(2, 1, 8, 128, device="cuda")
    caches = [random(2, 20000, 1, 128, device="cuda", seed=seed) for seed in (1, 2)]
    lengths = ints((20000, 13), "cuda")
    call = lambda: flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths)
    expected = call()
    for at, length in enumerate((20000, 13)):
        check(expected[at], None, q[at], caches[0][at, :length], caches[1][at, :length])
    failures = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            wrong = torch.zeros((), dtype=torch.int64, device="cuda")
            for _ in range(200):
                wrong += (call() != expected).sum()
            if wrong.item():
                failures.append(wrong.item())

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_nothing_waits_for_the_device():
    step = Step()
    step.run()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            step.run()
            torch.cuda._sleep(NAP)
            output = step.run()
            assert not stream.query(), "the nap should last longer than the call"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    step.check(*output)


def test_a_repeat_call_allocates_the_answers_alone():
    q, cache = random(4, 1, 8, 64, device="cuda"), random(4, 512, 2, 64, device="cuda")
    lengths = ints((512, 3, 100, 77), "cuda")
    call = lambda: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths)
    call()
    torch.cuda.synchronize()
    free, count = torch.cuda.mem_get_info()[0], torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(100):
        call()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - count == 100
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] == free


@torch.no_grad()
def test_compiled_with_graphs():
    model, (k_cache, v_cache, lengths, *others) = decoder("cuda")
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    mine, theirs = (k_cache.clone(), v_cache.clone()), (k_cache.clone(), v_cache.clone())
    for step in range(6):
        x = random(3, 1, 256, device="cuda", seed=step)
        found = compiled(x, *mine, lengths, *others).clone()
        expected = model(x, *theirs, lengths, *others)
        assert (found.float() - expected.float()).abs().max().item() < 6e-2
        lengths += 1


def test_nonsense_in_lists_stays_inside_the_tensors():
    """What it gives is not said; that it gives something, and writes nothing else, is."""
    q, lengths = random(3, 1, 4, 64, device="cuda"), ints((1 << 30, -5, 10), "cuda")
    table = ints((-7, 1 << 30, 3, 9999, 2, 1), "cuda").view(3, 2)
    room = [torch.zeros(12, 16, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    caches = [x[4:8] for x in room]
    new = random(3, 5, 2, 64, device="cuda")
    flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=lengths, page_table=table, causal=True)
    ragged = ints((0, 70, -3, 1 << 29), "cuda")
    x = random(90, 2, 64, device="cuda")
    assert flash_attn_varlen_func(x, x, x, ragged, ragged, 90, 90).shape == x.shape
    torch.cuda.synchronize()
    for x in room:
        assert not x[:4].any() and not x[8:].any()


def test_what_is_not_served_says_why():
    q, cache = random(1, 1, 2, 64, device="cuda"), random(1, 16, 2, 64, device="cuda")
    lengths = ints((9,), "cuda")
    with pytest.raises(NotImplementedError, match="f16 and bf16, not f32"):
        flash_attn_with_kvcache(q.float(), cache.float(), cache.float(), cache_seqlens=lengths)
    shifted = torch.zeros(16 * 2 * 64 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(1, 16, 2, 64)
    with pytest.raises(NotImplementedError, match="address is not a multiple of 16"):
        flash_attn_with_kvcache(q, shifted, cache, cache_seqlens=lengths)
    with pytest.raises(ValueError, match="cache_seqlens is on the CPU, expected cuda:0 like q"):
        flash_attn_with_kvcache(q, cache, cache, cache_seqlens=ints((3,), "cpu"))


def test_foreign_arrays():
    step = Step()
    lengths = step.lengths.clone()
    expected, lse = step.run()
    written = [cache.clone() for cache in step.caches]
    found = flash_attn_with_kvcache(
        *map(Foreign, (step.q, *step.caches, *step.new)), rotary_cos=Foreign(step.angles[0]),
        rotary_sin=Foreign(step.angles[1]), cache_seqlens=Foreign(lengths), page_table=Foreign(step.table), causal=True,
        rotary_interleaved=False, return_softmax_lse=True,
    )  # fmt: skip
    assert torch.equal(found[0].tensor, expected) and torch.equal(found[1].tensor, lse)
    assert all(torch.equal(*pair) for pair in zip(written, step.caches))


def test_large_batches():
    """Many sequences of every length, against the plain algorithm for some."""
    lengths = [(at * 997) % 5000 + 1 for at in range(100)]
    caches = [random(100, 5000, 2, 128, device="cuda", seed=seed) for seed in (1, 2)]
    q = random(100, 1, 16, 128, device="cuda")
    output, lse = flash_attn_with_kvcache(
        q, *caches, cache_seqlens=ints(lengths, "cuda"), window_size=(1000, 0), softcap=20.0, return_softmax_lse=True
    )
    for at in (0, 1, 50, 99):
        keys, values = (cache[at, : lengths[at]] for cache in caches)
        check(output[at], lse[at], q[at], keys, values, window=(1000, 0), softcap=20.0)
    queries = [(at * 131) % 700 for at in range(40)]
    cu = starts(queries, "cuda")
    q, k, v = (random(sum(queries), heads, 128, device="cuda", seed=heads) for heads in (8, 2, 2))
    output, lse = flash_attn_varlen_func(
        q, k, v, cu, cu, max(queries), max(queries), causal=True, return_softmax_lse=True
    )
    for at in (1, 17, 39):
        mine = slice(sum(queries[:at]), sum(queries[: at + 1]))
        check(output[mine], lse[:, mine], q[mine], k[mine], v[mine], causal=True)
    # A long context in parts.
    q, (k, v) = random(1, 4, 8, 64, device="cuda"), (random(1, 60000, 2, 64, device="cuda", seed=s) for s in (1, 2))
    parts = [flash_attn_func(q, k[:, at::7], v[:, at::7], return_attn_probs=True)[:2] for at in range(7)]
    outputs, lses = (torch.stack(x) for x in zip(*parts))
    output, sums = flash_attn_combine(outputs.float(), lses.transpose(2, 3), out_dtype=torch.bfloat16)
    check(output[0], sums[0].transpose(0, 1), q[0], k[0], v[0])
