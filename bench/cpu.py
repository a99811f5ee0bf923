"""Attention on the CPU: FlashCore beside PyTorch, on the same cores, turn by turn.

    cargo build --release && python bench/cpu.py [--threads 2] [--rounds 10]
    pip install . && python bench/cpu.py --decode [--length 16384]

The best of the rounds counts: whatever else the machine does can only make a run slower.
PyTorch gets its tensors both ways: (batch, length, heads, dim) in memory, as FlashCore does, and
(batch, heads, length, dim).
"""

import argparse
import json
import os
import subprocess
import time
from pathlib import Path

import torch
import torch.nn.functional as F

FLASHCORE = Path(__file__).parent.parent / "target/release/flashcore"
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--flashcore", default=str(FLASHCORE), help="the command to measure")
    parser.add_argument("--decode", action="store_true", help="one query over a cache, through Python")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.decode:
        return decode(arguments)
    print(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, "
        f"{arguments.threads} threads, batch 1, {arguments.heads} heads, "
        f"length {arguments.length}, head dim {arguments.dim}; GFLOP/s"
    )
    print("dtype causal  flashcore  torch  torch, heads first  ratio to the better")
    for dtype in TYPES:
        for causal in (False, True):
            ours, theirs = compare(arguments, dtype, causal)
            length = arguments.length
            pairs = length * (length + 1) / 2 if causal else length * length
            flop = 4 * arguments.heads * arguments.dim * pairs / 1e9
            print(
                f"{dtype:5} {str(causal):6} {flop / ours:10.1f} {flop / theirs[0]:6.1f} "
                f"{flop / theirs[1]:19.1f} {min(theirs) / ours:20.2f}"
            )


def decode(arguments: argparse.Namespace) -> None:
    """One query over a cache that is used to its end, contiguous and in pages of 64."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(arguments.threads))
    from flashcore import flash_attn_with_kvcache

    length, dim = arguments.length, arguments.dim
    print(f"torch {torch.__version__}, {arguments.threads} threads, {length} keys, head dim {dim}; ms")
    print("dtype heads  flashcore  in pages   torch")
    for dtype in ("f32", "bf16"):
        for heads, kv_heads in ((32, 8), (32, 32)):
            query = torch.randn(1, 1, heads, dim).to(TYPES[dtype])
            pages = [torch.randn(length // 64, 64, kv_heads, dim).to(TYPES[dtype]) for _ in range(2)]
            table = torch.randperm(length // 64, dtype=torch.int32)[None]
            caches = [page.view(1, length, kv_heads, dim) for page in pages]
            lengths = torch.tensor([length], dtype=torch.int32)
            views = [tensor.transpose(1, 2) for tensor in (query, *caches)]
            calls = [
                lambda: flash_attn_with_kvcache(query, *caches, cache_seqlens=lengths),
                lambda: flash_attn_with_kvcache(query, *pages, cache_seqlens=lengths, block_table=table),
                lambda: F.scaled_dot_product_attention(*views, enable_gqa=heads != kv_heads),
            ]
            best = [float("inf")] * len(calls)
            for _ in range(arguments.rounds):
                for index, call in enumerate(calls):
                    begin = time.perf_counter()
                    call()
                    best[index] = min(best[index], time.perf_counter() - begin)
            print(f"{dtype:5} {heads}/{kv_heads:<3}", *(f"{1e3 * it:9.2f}" for it in best))


def compare(arguments: argparse.Namespace, dtype: str, causal: bool) -> tuple[float, list[float]]:
    """The best seconds of FlashCore, and of PyTorch with either order in memory."""
    shape = (1, arguments.length, arguments.heads, arguments.dim)
    views = [torch.randn(shape).to(TYPES[dtype]).transpose(1, 2) for _ in range(3)]
    tensors = [views, [view.contiguous() for view in views]]
    ours, theirs = float("inf"), [float("inf")] * 2
    for _ in range(arguments.rounds):
        ours = min(ours, flashcore(arguments, dtype, causal))
        for order, (query, key, value) in enumerate(tensors):
            begin = time.perf_counter()
            F.scaled_dot_product_attention(query, key, value, is_causal=causal)
            theirs[order] = min(theirs[order], time.perf_counter() - begin)
    return ours, theirs


def flashcore(arguments: argparse.Namespace, dtype: str, causal: bool) -> float:
    command = [
        arguments.flashcore,
        "attend",
        "--backend",
        "cpu",
        "--no-check",
        "--json",
        "--seq",
        str(arguments.length),
        "--heads",
        str(arguments.heads),
        "--head-dim",
        str(arguments.dim),
        "--dtype",
        dtype,
    ]
    environment = {**os.environ, "RAYON_NUM_THREADS": str(arguments.threads)}
    answer = subprocess.run(command + ["--causal"] * causal, env=environment, check=True, capture_output=True)
    return json.loads(answer.stdout)["report"]["kernel_ms"] / 1e3


main()
