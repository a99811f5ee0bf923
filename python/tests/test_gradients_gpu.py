"""Gradients, what only a GPU can show: many cases, streams, graphs, threads, memory."""

import threading
import warnings

import pytest

torch = pytest.importorskip("torch")

import flashcore
from flashcore import flash_attn_func, flash_attn_qkvpacked_func
from test_gradients import FUNCTIONS, blocks, near, over_packed, random, random_cases, step

pytestmark = [pytest.mark.gpu, pytest.mark.hardware]

NAP = 100_000_000


def three(length, heads=4, key_heads=2, dim=64, batch=2):
    sizes = ((batch, length, heads, dim), (batch, length, key_heads, dim), (batch, length, key_heads, dim))
    return [random(*size, device="cuda", seed=seed).requires_grad_() for seed, size in enumerate(sizes)]


@pytest.mark.parametrize("seed", range(12))
def test_random_cases(seed):
    """100 each; what this GPU's kernels refuse is counted and told."""
    refused, served = [], 0
    for case in random_cases(100 + seed, 100, "cuda"):
        try:
            case.check()
            served += 1
        except pytest.skip.Exception as reason:
            refused.append(f"{case.function}: {reason}")
    if refused:
        warnings.warn(f"{len(refused)} of 100 cases are not served: {sorted(set(refused))[:3]}")
    assert served >= 40, refused


@pytest.mark.parametrize("function", FUNCTIONS)
def test_long_sequences(function):
    from test_gradients import Case

    lengths = (2048, 700, 1) if function == "flash_attn_varlen_func" else (2048,)
    Case(function, "cuda", torch.bfloat16, lengths, lengths, dim=128, rules={"causal": True}).check()


def test_the_forward_passs_stream_is_honoured():
    q, k, v = three(256)
    dout = random(2, 256, 4, 64, device="cuda", seed=5)
    expected = torch.autograd.grad(flash_attn_func(q, k, v, causal=True), (q, k, v), dout)
    late = torch.zeros_like(dout)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        output = flash_attn_func(q, k, v, causal=True)
        torch.cuda._sleep(NAP)
        # On any other stream the kernel would run before this copy.
        late.copy_(dout)
        found = torch.autograd.grad(output, (q, k, v), late)
        assert not stream.query(), "the nap should last longer than the call"
    stream.synchronize()
    for one, other in zip(found, expected):
        assert (one.float() - other.float()).abs().max().item() < 6e-2


def test_nothing_waits_for_the_device_and_memory_is_bounded():
    q, k, v = three(512)
    dout = torch.ones_like(q)
    call = lambda: torch.autograd.grad(flash_attn_func(q, k, v, causal=True), (q, k, v), dout)
    call()
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    count = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Output, log-sum-exps, three gradients.
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - count == 50 * 5
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] == free


def test_a_graph_repeats_a_whole_step():
    """Forward, backward and optimiser, captured once and replayed with other inputs."""
    model, other = (blocks(over_packed, "cuda", torch.bfloat16) for _ in range(2))
    rate = 0.05
    x = random(2, 96, 256, device="cuda")

    def whole(model, x):
        model.zero_grad(set_to_none=True)
        loss = model(x).float().square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(rate * parameter.grad)
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            whole(model, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = whole(model, x)
    other.load_state_dict(model.state_dict())
    losses = []
    for seed in range(5):
        x.copy_(random(2, 96, 256, device="cuda", seed=seed))
        graph.replay()
        expected = whole(other, x.clone())
        losses.append((captured.item(), expected.item()))
    assert all(abs(one - two) <= 2e-2 * two for one, two in losses), losses
    near([p.float() for p in model.parameters()], [p.float() for p in other.parameters()], 5e-2)


def test_compiled_with_graphs():
    model = blocks(over_packed, "cuda", torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        x = random(2, 128, 256, device="cuda", seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        near([it.clone() for it in step(model, x, compiled)], step(model, x), 8e-2)


def test_threads_with_streams_of_their_own():
    shapes = [(64, 2, 2, 64), (100, 4, 2, 64), (96, 2, 1, 128)]
    inputs = [three(*shape) for shape in shapes]
    expected = [torch.autograd.grad(flash_attn_func(*given, causal=True).sum(), given) for given in inputs]
    torch.cuda.synchronize()
    failures = []

    def work(thread):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for call in range(60):
                    at = (thread + call) % len(shapes)
                    given = [x.detach().requires_grad_() for x in inputs[at]]
                    found = torch.autograd.grad(flash_attn_func(*given, causal=True).sum(), given)
                    for one, other in zip(found, expected[at]):
                        if (one.float() - other.float()).abs().max().item() > 0.1:
                            failures.append((thread, call))
        except Exception as error:
            failures.append((thread, error))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def peak(call, leaves):
    """Bytes of device memory over a step, PyTorch's and others."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free, reserved, before = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    output = call(*leaves)
    output.backward(torch.ones_like(output))
    torch.cuda.synchronize()
    outside = free - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - reserved)
    return torch.cuda.max_memory_allocated() - before + outside


def test_a_steps_peak_memory_is_not_above_flash_attentions():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = (1, 8192, 16, 128)
    leaves = lambda: [random(*shape, device="cuda", seed=seed).requires_grad_() for seed in range(3)]
    # Kernels are compiled and loaded; the large plan's workspace is not there yet.
    flash_attn_func(*three(64, 16, 16, 128), causal=True).sum().backward()
    ours = peak(lambda q, k, v: flash_attn_func(q, k, v, causal=True), leaves())
    theirs = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    )
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs(*three(64, 16, 16, 128)).sum().backward()
        expected = peak(theirs, leaves())
    assert ours <= 1.02 * expected + (4 << 20), (ours, expected)


def test_calls_of_many_shapes_share_one_workspace():
    """The sums of dQ are as large as the queries in float32: kept for each shape they would add up."""
    call = lambda length: flash_attn_func(*three(length, 16, 16, 128, 1), causal=True).sum().backward()
    with torch.cuda.stream(torch.cuda.Stream()):
        call(4096)
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        for length in range(2000, 4000, 100):
            call(length)
        torch.cuda.synchronize()
        after = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    assert before - after <= 16 << 20, f"{(before - after) >> 20} MB more"


def test_what_is_refused_is_named():
    """Nothing goes to the CPU behind the caller's back."""
    q, k, v = (x.detach().float().requires_grad_() for x in three(40))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = flash_attn_func(q, k, v)
    with pytest.raises(NotImplementedError, match="no kernel can serve .*f32"):
        output.sum().backward()


@pytest.mark.parametrize("repeats", [1000])
def test_deterministic_under_load(repeats):
    q, k, v = three(700, 8, 2, 128)
    dout = random(2, 700, 8, 128, device="cuda", seed=7)
    call = lambda: torch.autograd.grad(flash_attn_func(q, k, v, causal=True, deterministic=True), (q, k, v), dout)
    try:
        first = call()
    except NotImplementedError as error:
        pytest.skip(str(error))
    load, a = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for index in range(repeats):
        if index % 10 == 0:
            with torch.cuda.stream(load):
                torch.mm(a, a)
        for one, other in zip(call(), first):
            wrong += (one != other).sum()
    assert wrong.item() == 0


def test_packed_gradients_of_a_plan_are_strided_and_fast():
    qkv = random(1, 1024, 3, 8, 128, device="cuda").requires_grad_()
    flash_attn_qkvpacked_func(qkv, causal=True).sum().backward()
    assert flashcore.info()["last"]["kernel"] != "gpu/scalar" and qkv.grad.is_contiguous()
