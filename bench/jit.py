"""Attention inside a program of JAX's beside the same launches from PyTorch's stream.

    python3 bench/jit.py

One program of XLA's with a chain of calls, each over the output of the one before, run several times without a
wait in between, as steps of training or inference are; and the same chains launched call by call. Both by the
host's clock to the end of the work, where the queue hides what the host does; many runs less one, so that what
the first takes to begin and the last to end does not count. (With nothing on the device before it, one run takes
about 11 us longer for each of its calls than launches do, none of it between kernels on the device's timeline.)
Both run the same kernels, those of backward with a forward pass before each chain; the share is what of their
speed the program keeps. Candidates alternate, medians over rounds. Exits with 1 where the share is below 0.97.
"""

import os

# Both libraries want memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import statistics
import sys
import time

import flashcore
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flashcore import flash_attn_func

CALLS, ROUNDS, LEAST = 10, 15, 0.97
# Runs of a program in a row.
FEW, MANY = 1, 4
# (batch, length, heads, key heads, head dim, causal)
SHAPES = [
    (2, 4096, 16, 16, 128, False),
    (2, 4096, 16, 16, 128, True),
    (2, 8192, 16, 4, 128, True),
    (4, 4096, 16, 16, 64, True),
]


def forwards(q, k, v, causal, calls):
    for _ in range(calls):
        q = flash_attn_func(q, k, v, causal=causal)
    return q


def backwards_of_jax(q, k, v, causal, calls):
    out, pull = jax.vjp(lambda *x: flash_attn_func(*x, causal=causal), q, k, v)
    for _ in range(calls):
        out = pull(out)[0]
    return out


def backwards_of_torch(q, k, v, causal, calls):
    with torch.enable_grad():
        out = flash_attn_func(q, k, v, causal=causal)
    gradient = out
    for _ in range(calls):
        gradient = torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)[0]
    return gradient


def time_of(run, wait, times):
    """Microseconds of so many runs, one behind the other."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        result = run()
    wait(result)
    return (time.perf_counter() - begin) * 1e6


def main():
    device = jax.devices("gpu")[0]
    print(f"{torch.cuda.get_device_name()}, JAX {jax.__version__}, PyTorch {torch.__version__}, us per call")
    print(f"{'problem':<58} {'jit':>9} {'launches':>9} {'share':>6}")
    worst = 1.0
    for batch, length, heads, shared, dim, causal in SHAPES:
        generator = np.random.default_rng(0)
        numbers = [generator.standard_normal((batch, length, count, dim)) for count in (heads, shared, shared)]
        arrays = [jax.device_put(jnp.asarray(x, jnp.bfloat16), device) for x in numbers]
        tensors = [torch.tensor(x, device="cuda", dtype=torch.bfloat16, requires_grad=True) for x in numbers]
        for name, traced, eager in (
            ("forward", forwards, forwards), ("backward", backwards_of_jax, backwards_of_torch),
        ):  # fmt: skip
            program = jax.jit(lambda *x: traced(*x, causal, CALLS))
            with torch.no_grad():
                mine = np.asarray(program(*arrays).astype(jnp.float32))
                theirs = eager(*tensors, causal, CALLS).float().cpu().numpy()
                # The same kernels over the same numbers; sums of gradients may come in another order.
                assert np.allclose(mine, theirs, atol=1e-2 * np.abs(theirs).max()), "the answers differ"
                runs = {
                    "jit": (lambda: program(*arrays), lambda result: result.block_until_ready()),
                    "launches": (lambda: eager(*tensors, causal, CALLS), lambda _: torch.cuda.synchronize()),
                }
                times = {(which, count): [] for which in runs for count in (FEW, MANY)}
                for round in range(ROUNDS):
                    for which, count in list(times)[:: 1 if round % 2 else -1]:
                        times[which, count].append(time_of(*runs[which], count))
            median = {key: statistics.median(taken) for key, taken in times.items()}
            jit, launches = ((median[which, MANY] - median[which, FEW]) / (MANY - FEW) / CALLS for which in runs)
            worst = min(worst, launches / jit)
            text = f"{name}, {batch}x{length}, heads {heads}/{shared}, dim {dim}{', causal' if causal else ''}"
            print(f"{text:<58} {jit:9.1f} {launches:9.1f} {launches / jit:6.3f}")
    print(f"the kernel that ran last: {flashcore.info()['last']['kernel']}")
    sys.exit(worst < LEAST)


if __name__ == "__main__":
    main()
