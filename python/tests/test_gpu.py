"""What only a GPU can show: streams, graphs, threads, memory."""

import gc
import threading
import time
import warnings

import pytest

torch = pytest.importorskip("torch")

import flashcore
from flashcore import flash_attn_func, scaled_dot_product_attention
from test_torch import block, check, near, plain, random, three

pytestmark = [pytest.mark.gpu, pytest.mark.hardware]

# About 50 ms on any GPU of the last years.
NAP = 100_000_000


def test_the_current_stream_is_honoured():
    q, k, v = three(1, 256, 256, 4, 4, 64, "cuda")
    other = random(1, 256, 4, 64, device="cuda", seed=9)
    expected = flash_attn_func(other, k, v, causal=True)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(NAP)
        # On any other stream the kernel would run before this copy.
        q.copy_(other)
        begin = time.perf_counter()
        output = flash_attn_func(q, k, v, causal=True)
        seconds = time.perf_counter() - begin
        assert not stream.query(), "the nap should last longer than the call"
    assert seconds < 0.02, "the call waited for the device"
    stream.synchronize()
    assert torch.equal(output, expected)


def test_nothing_waits_for_the_device():
    q, k, v = three(1, 128, 128, 4, 4, 64, "cuda")
    flash_attn_func(q, k, v)
    torch.cuda.set_sync_debug_mode("error")
    try:
        flash_attn_func(q, k, v, return_attn_probs=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("warm", [True, False])
def test_a_graph_repeats_what_was_captured(warm):
    # Lengths of this test's own: without a warm-up the plan is made during the capture.
    length = 331 if warm else 333
    q, k, v = three(2, length, length, 4, 2, 128, "cuda")
    call = lambda: flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[:2]
    flash_attn_func(*three(2, 64, 64, 4, 2, 128, "cuda"), causal=True)
    if warm:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, lse = call()
    for seed in (5, 6):
        q.copy_(random(2, length, 4, 128, device="cuda", seed=seed))
        graph.replay()
        expected = call()
        assert torch.equal(output, expected[0]) and torch.equal(lse, expected[1])
        check(output, lse, q, k, v, causal=True)


def test_a_graph_outlives_the_cache():
    """Plans that a graph launches again stay, whatever else is called meanwhile."""
    q, k, v = three(1, 200, 200, 2, 2, 64, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = flash_attn_func(q, k, v, causal=True)
    small = random(1, 3000, 2, 64, device="cuda")
    for length in range(1, 2500):
        flash_attn_func(small[:, :length], small[:, :length], small[:, :length], causal=True)
    output.zero_()
    graph.replay()
    assert torch.equal(output, flash_attn_func(q, k, v, causal=True))


@torch.no_grad()
def test_compiled_with_graphs():
    model = block("cuda")
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        x = random(2, 256, 256, device="cuda", seed=seed)
        assert near(compiled(x).clone(), model(x), 6e-2)


def test_threads_with_streams_of_their_own():
    """8 threads, 10,000 calls in all, right results, and no device memory lost."""
    shapes = [(1, 64, 64, 2, 2, 64), (1, 100, 130, 4, 2, 64), (2, 33, 33, 2, 1, 128), (1, 96, 96, 2, 2, 128)]
    inputs = [three(*shape, device="cuda") for shape in shapes]
    expected = [flash_attn_func(*tensors, causal=True).clone() for tensors in inputs]
    for tensors, output in zip(inputs, expected):
        check(output, None, *tensors, causal=True)
    failures = []

    def work(thread, calls):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            wrong = torch.zeros((), dtype=torch.int64, device="cuda")
            for call in range(calls):
                at = (thread + call) % len(shapes)
                output = flash_attn_func(*inputs[at], causal=True)
                if call % 5 == 0:
                    wrong += (output != expected[at]).sum()
            if wrong.item():
                failures.append((thread, wrong.item()))

    def run(calls):
        torch.cuda.synchronize()
        threads = [threading.Thread(target=work, args=(thread, calls)) for thread in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    run(50)
    before = run(50)
    after = run(1250)
    assert not failures
    assert before - after <= 4 << 20, f"{before - after} bytes of device memory are gone"


def test_a_repeat_call_allocates_the_output_alone():
    q, k, v = three(2, 512, 512, 8, 8, 64, "cuda")
    flash_attn_func(q, k, v, causal=True)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    count = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(100):
        flash_attn_func(q, k, v, causal=True)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - count == 100
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] == free


def test_what_the_fast_kernel_cannot_read_is_served_with_a_warning():
    q, k, v = three(1, 40, 40, 4, 4, 64, "cuda")
    # The copy engine takes no step of zero; kernels that copy by themselves do.
    alike = k[:, :, :1].expand(-1, -1, 4, -1)
    check(flash_attn_func(q, alike, v), None, q, alike, v)
    assert flashcore.info()["last"]["kernel"] == "gpu/mma"
    shifted = random(1, 40, 4, 65, device="cuda").flatten()[1 : 1 + 40 * 4 * 64].view(1, 40, 4, 64)
    with pytest.warns(UserWarning, match="slow kernel gpu/scalar .* is not a multiple of 16"):
        output = flash_attn_func(q, shifted, v)
    check(output, None, q, shifted, v)
    wide = [x.float() for x in (q, k, v)]
    with pytest.warns(UserWarning, match="slow kernel gpu/scalar .* not f32"):
        output, lse, _ = flash_attn_func(*wide, return_attn_probs=True)
    assert (output - plain(*wide, dtype=torch.float64)[0]).abs().max().item() < 1e-5
    assert flashcore.info()["last"]["kernel"] == "gpu/scalar"
    # Nor does it copy nothing.
    assert not flash_attn_func(q, k[:, :0], v[:, :0]).any()
    assert flashcore.info()["last"]["kernel"] in ("gpu/mma", "gpu/prefill")
    # Once for each kind of call.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attn_func(*wide)


class Foreign:
    """An array of nobody's library, on the GPU."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, *, stream=None, **_):
        return self.tensor.__dlpack__(stream=stream)

    def __array_namespace__(self):
        class Namespace:
            @staticmethod
            def from_dlpack(result):
                return Foreign(torch.from_dlpack(result))

        return Namespace


def test_foreign_arrays():
    tensors = three(2, 150, 150, 4, 2, 64, "cuda")
    expected = flash_attn_func(*tensors, causal=True, return_attn_probs=True)
    other = random(2, 150, 4, 64, device="cuda", seed=7)
    for _ in range(3):
        output, lse, _ = flash_attn_func(*map(Foreign, tensors), causal=True, return_attn_probs=True)
        assert torch.equal(output.tensor, expected[0]) and torch.equal(lse.tensor, expected[1])
    # What was put on the producer's stream comes first.
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(NAP)
        tensors[0].copy_(other)
        output = flash_attn_func(*map(Foreign, tensors), causal=True)
        assert torch.equal(output.tensor, flash_attn_func(other, *tensors[1:], causal=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_the_tensors_device_is_honoured():
    q, k, v = three(1, 64, 64, 2, 2, 64, "cuda:1")
    assert torch.cuda.current_device() == 0
    output = flash_attn_func(q, k, v)
    assert output.device == q.device and torch.cuda.current_device() == 0
    check(output, None, q, k, v)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_the_current_device_need_not_be_the_tensors():
    q, k, v = three(1, 64, 64, 2, 2, 64, "cuda:0")
    expected = flash_attn_func(q, k, v)
    with torch.cuda.device(1):
        before = torch.cuda.memory_allocated()
        output, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
        assert torch.cuda.memory_allocated() == before and torch.cuda.current_device() == 1
    assert output.device == lse.device == q.device and torch.equal(output, expected)


def test_answers_have_the_shape_of_their_own_call():
    # More shapes than are remembered, each more than once, also where memory is filled first.
    q, k, v = three(1, 24, 24, 2, 2, 64, "cuda")
    whole = flash_attn_func(q, k, v)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            for rows in [*range(1, 25), *range(24, 0, -1)]:
                output, lse, _ = flash_attn_func(q[:, :rows], k, v, return_attn_probs=True)
                assert output.shape == (1, rows, 2, 64) and output.dtype == q.dtype
                assert lse.shape == (1, 2, rows) and lse.dtype == torch.float32
                assert output.is_contiguous() and lse.is_contiguous()
                assert near(output, whole[:, :rows])
        finally:
            torch.use_deterministic_algorithms(False)


def test_an_answer_is_a_tensor_like_any_other():
    q, k, v = three(1, 64, 64, 2, 2, 64, "cuda")
    output = flash_attn_func(q, k, v)
    # Its memory is the allocator's, which waits for streams that it is told of.
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        other.wait_stream(torch.cuda.default_stream())
        torch.cuda._sleep(NAP)
        copy = output.clone()
    output.record_stream(other)
    expected, address = output.clone(), output.data_ptr()
    del output
    assert flash_attn_func(k, q, v).data_ptr() != address
    other.synchronize()
    assert torch.equal(copy, expected)
    assert flash_attn_func(q, k, v).resize_(2, 64, 4, 64).shape == (2, 64, 4, 64)


def test_no_memory_is_pytorchs_own_error():
    q, k, v = three(1, 1 << 18, 64, 2, 2, 64, "cuda")
    gc.collect()
    torch.cuda.empty_cache()
    # As much as there is now, and nothing for 64 MB more.
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            flash_attn_func(q, k, v)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    check(flash_attn_func(q, k, v)[:, :64], None, q[:, :64], k, v)


def test_large_and_long():
    for shape in [(1, 4096, 4096, 8, 2, 128), (65, 128, 128, 4, 4, 64), (1, 1, 8192, 8, 1, 128)]:
        q, k, v = three(*shape, device="cuda")
        output, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        check(output, lse, q, k, v, causal=True)
    q, k, v = (x.transpose(1, 2) for x in three(2, 1000, 1000, 4, 4, 64, "cuda"))
    ours = scaled_dot_product_attention(q, k, v, is_causal=True)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert near(ours, theirs)
