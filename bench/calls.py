"""What a call costs the host, from Python to the launch, beside FlashAttention-3 and PyTorch.

    python3 bench/calls.py

A tiny problem, bursts of calls shorter than the driver's queue with the device idle before each; the
median over bursts, candidates alternating. FlashAttention-3 is the PyPI wheel fa3-fwd, unpacked into
the folder that the variable FA3 names.
"""

import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from flashcore import (
    _flashcore,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
)

BURST, ROUNDS = 100, 200


def cost(call):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(BURST):
        call()
    return (time.perf_counter() - begin) / BURST * 1e6


def main():
    q, k, v = (torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    operator = torch.ops.flashcore.attention.default
    tensors, numbers = (q, k, v, *(None,) * 9), (None, True, (-1, -1), 0, 0.0, None, None)
    # Decode: a token for each of two sequences, over a cache in pages.
    ints = lambda *numbers: torch.tensor(numbers, dtype=torch.int32, device="cuda")
    token, new = q[:, :2].transpose(0, 1), k[:, :2].transpose(0, 1)
    k_cache, v_cache = (torch.randn(8, 16, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    decode = {"cache_seqlens": ints(20, 50), "page_table": ints(*range(8)).view(2, 4), "causal": True}
    cosines, sines = torch.randn(2, 64, 32, device="cuda", dtype=torch.bfloat16)
    rotated = {"rotary_cos": cosines, "rotary_sin": sines, **decode}
    rows, starts = (x[0] for x in (q, k, v)), ints(0, 24, 64)
    ragged = (*rows, starts, starts, 40, 40)
    candidates = {
        "flashcore.flash_attn_func": lambda: flash_attn_func(q, k, v, causal=True),
        "flashcore.flash_attn_func, lse": lambda: flash_attn_func(q, k, v, causal=True, return_attn_probs=True),
        "flashcore.scaled_dot_product_attention": lambda: scaled_dot_product_attention(*heads_first, is_causal=True),
        "torch.ops.flashcore.attention": lambda: operator(q, k, v, None, True),
        "F.scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(*heads_first, is_causal=True),
        "flashcore.flash_attn_varlen_func": lambda: flash_attn_varlen_func(*ragged, causal=True),
        "flashcore.flash_attn_with_kvcache": lambda: flash_attn_with_kvcache(token, k_cache, v_cache, **decode),
        "the same, appending": lambda: flash_attn_with_kvcache(token, k_cache, v_cache, new, new, **decode),
        "the same, with rotary embeddings": lambda: flash_attn_with_kvcache(
            token, k_cache, v_cache, new, new, **rotated
        ),
        "torch.empty_like": lambda: torch.empty_like(q),
        "the extension alone": lambda: _flashcore.attend(tensors, numbers, "flash_attn_func", False, "function"),
    }
    if "FA3" in os.environ:
        sys.path.insert(0, os.environ["FA3"])
        try:
            import fa3_fwd_interface as fa3

            # The wheel has no pages: a contiguous cache instead.
            caches = [x.view(2, 64, 2, 64) for x in (k_cache, v_cache)]
            plain = {"cache_seqlens": decode["cache_seqlens"], "causal": True}
            theirs = {
                "flash-attention 3": lambda: fa3.flash_attn_func(q, k, v, causal=True),
                "flash-attention 3, varlen": lambda: fa3.flash_attn_varlen_func(*ragged, causal=True),
                "flash-attention 3, kvcache": lambda: fa3.flash_attn_with_kvcache(token, *caches, **plain),
                "flash-attention 3, appending": lambda: fa3.flash_attn_with_kvcache(token, *caches, new, new, **plain),
            }
            for name, call in theirs.items():
                try:
                    call()
                    candidates[name] = call
                except (RuntimeError, TypeError) as error:
                    print(f"without {name}: {str(error).splitlines()[0]}")
        except ImportError as error:
            print(f"without FlashAttention-3: {error}")
    times = {name: [] for name in candidates}
    with torch.no_grad():
        for call in candidates.values():
            cost(call)
        for round in range(ROUNDS):
            names = list(candidates)
            for name in names if round % 2 else reversed(names):
                times[name].append(cost(candidates[name]))
    torch.cuda.synchronize()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, us per call on the host")
    print(f"{'call':<40} {'median':>7} {'lowest':>7}")
    for name, values in times.items():
        print(f"{name:<40} {statistics.median(values):7.2f} {min(values):7.2f}")


if __name__ == "__main__":
    main()
