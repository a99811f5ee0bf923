"""What a recorded call and its backward pass cost the host, and the memory of a training step.

    python3 bench/training.py

A tiny problem, bursts of steps shorter than the driver's queue with the device idle before each; the
median over bursts, candidates alternating. A step is the forward pass under autograd and
`torch.autograd.grad` of its output, which waits for the engine's thread but not for the device. The bar
is 60 us for both. Then the peak of device memory over a step of a large problem, with what FlashCore
holds outside of PyTorch's allocator.

Without a GPU: what the layers above the extension cost, Python's and autograd's, with an extension that
makes the tensors of the answer and does nothing else. The difference to a product is ours.
"""

import statistics
import time

import torch
import torch.nn.functional as F
from flashcore import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    scaled_dot_product_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

BURST, ROUNDS = 50, 100


def cost(call):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(BURST):
        call()
    return (time.perf_counter() - begin) / BURST * 1e6


def leaf(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def step(call, *leaves):
    dout = torch.randn_like(call(*leaves))
    return lambda: torch.autograd.grad(call(*leaves), leaves, dout)


def host():
    three = [leaf(1, 64, 2, 64) for _ in range(3)]
    heads_first = [leaf(1, 2, 64, 64) for _ in range(3)]
    rows = [leaf(64, 2, 64) for _ in range(3)]
    starts = torch.tensor([0, 24, 64], dtype=torch.int32, device="cuda")
    ours = lambda q, k, v: flash_attn_func(q, k, v, causal=True)
    candidates = {
        "flash_attn_func": step(ours, *three),
        "the same, deterministic": step(
            lambda q, k, v: flash_attn_func(q, k, v, causal=True, deterministic=True), *three
        ),
        "flash_attn_qkvpacked_func": step(
            lambda qkv: flash_attn_qkvpacked_func(qkv, causal=True), leaf(1, 64, 3, 2, 64)
        ),
        "flash_attn_kvpacked_func": step(
            lambda q, kv: flash_attn_kvpacked_func(q, kv, causal=True), three[0], leaf(1, 64, 2, 2, 64)
        ),
        "flash_attn_varlen_func": step(
            lambda q, k, v: flash_attn_varlen_func(q, k, v, starts, starts, 40, 40, causal=True), *rows
        ),
        "scaled_dot_product_attention": step(
            lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), *heads_first
        ),
        "F.scaled_dot_product_attention": step(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *heads_first
        ),
        "flash_attn_func, forward alone": lambda: ours(*three),
        "a product, for the engine's share": step(lambda q, k: q * k, *three[:2]),
    }
    served = {}
    for name, call in candidates.items():
        try:
            call()
            served[name] = call
        except NotImplementedError as error:
            print(f"without {name}: {error}")
    times = {name: [] for name in served}
    for call in served.values():
        cost(call)
    for round in range(ROUNDS):
        names = list(served)
        for name in names if round % 2 else reversed(names):
            times[name].append(cost(served[name]))
    torch.cuda.synchronize()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, us per step on the host")
    print(f"{'forward and backward':<40} {'median':>7} {'lowest':>7}")
    for name, values in times.items():
        print(f"{name:<40} {statistics.median(values):7.2f} {min(values):7.2f}")


def peak(call, shape, order):
    """Megabytes over a step, and those of them that are not PyTorch's."""
    leaves = [order(torch.randn(*shape, device="cuda", dtype=torch.bfloat16)).requires_grad_() for _ in range(3)]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free, reserved, before = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    output = call(*leaves)
    output.backward(torch.ones_like(output))
    torch.cuda.synchronize()
    outside = free - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - reserved)
    return (torch.cuda.max_memory_allocated() - before + outside) / 1e6, outside / 1e6


def memory():
    shape = (1, 16384, 16, 128)
    heads_first = lambda x: x.transpose(1, 2)
    print(f"\nMB over a step of {shape}, bf16, causal: all, outside of PyTorch's allocator")
    small = [leaf(1, 256, 16, 128) for _ in range(3)]
    # Kernels and the context are no part of a step.
    step(lambda q, k, v: flash_attn_func(q, k, v, causal=True), *small)()
    candidates = {
        "flash_attn_func": (lambda q, k, v: flash_attn_func(q, k, v, causal=True), lambda x: x, None),
        "PyTorch, FlashAttention-2": (F.scaled_dot_product_attention, heads_first, SDPBackend.FLASH_ATTENTION),
        "PyTorch, cuDNN": (F.scaled_dot_product_attention, heads_first, SDPBackend.CUDNN_ATTENTION),
    }
    for name, (call, order, backend) in candidates.items():
        if backend is None:
            found = peak(call, shape, order)
        else:
            with sdpa_kernel(backend):
                found = peak(lambda q, k, v: call(q, k, v, is_causal=True), shape, order)
        print(f"{name:<40} {found[0]:8.0f} {found[1]:8.0f}")


def layers():
    """A step on the CPU without the work: lowest of many, since the machine has other things to do."""
    from flashcore import _flashcore, _gradients

    class Idle:
        """The extension, which makes the tensors of an answer and leaves them."""

        def __getattr__(self, name):
            return getattr(_flashcore, name)

        def attend(self, tensors, numbers, function, lse, entrance):
            out = torch.empty_like(tensors[0])
            return (out, lses) if lse else out

        def attend_backward(self, *arguments):
            return True

    lses = torch.empty(1, 2, 64)
    three = [torch.randn(1, 64, 2, 64).requires_grad_() for _ in range(3)]
    packed = torch.randn(1, 64, 3, 2, 64).requires_grad_()
    rows, starts = (
        [torch.randn(64, 2, 64).requires_grad_() for _ in range(3)],
        torch.tensor([0, 24, 64], dtype=torch.int32),
    )
    candidates = {
        "flash_attn_func": step(lambda q, k, v: flash_attn_func(q, k, v, causal=True), *three),
        "flash_attn_func, forward alone": lambda: flash_attn_func(*three, causal=True),
        "flash_attn_qkvpacked_func": step(lambda qkv: flash_attn_qkvpacked_func(qkv, causal=True), packed),
        "flash_attn_varlen_func": step(lambda q, k, v: flash_attn_varlen_func(q, k, v, starts, starts, 40, 40), *rows),
        "a product, for the engine's share": step(lambda q, k: q * k, *three[:2]),
    }
    _gradients._flashcore = Idle()
    print(f"CPU, PyTorch {torch.__version__}, us per step above the extension, lowest")
    for name, call in candidates.items():
        best = float("inf")
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            for _ in range(BURST):
                call()
            best = min(best, (time.perf_counter() - begin) / BURST * 1e6)
        print(f"{name:<40} {best:7.2f}")


if __name__ == "__main__":
    if torch.cuda.is_available():
        host()
        memory()
    else:
        layers()
