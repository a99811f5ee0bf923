"""Attention on the CPU: FlashCore beside PyTorch, on the same cores, turn by turn.

    cargo build --release && python bench/cpu.py [--threads 2] [--rounds 10]

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
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, "
          f"{arguments.threads} threads, batch 1, {arguments.heads} heads, "
          f"length {arguments.length}, head dim {arguments.dim}; GFLOP/s")
    print("dtype causal  flashcore  torch  torch, heads first  ratio to the better")
    for dtype in TYPES:
        for causal in (False, True):
            ours, theirs = compare(arguments, dtype, causal)
            length = arguments.length
            pairs = length * (length + 1) / 2 if causal else length * length
            flop = 4 * arguments.heads * arguments.dim * pairs / 1e9
            print(f"{dtype:5} {str(causal):6} {flop / ours:10.1f} {flop / theirs[0]:6.1f} "
                  f"{flop / theirs[1]:19.1f} {min(theirs) / ours:20.2f}")


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
    command = [arguments.flashcore, "attend", "--backend", "cpu", "--no-check", "--json",
               "--seq", str(arguments.length), "--heads", str(arguments.heads),
               "--head-dim", str(arguments.dim), "--dtype", dtype]
    environment = {**os.environ, "RAYON_NUM_THREADS": str(arguments.threads)}
    answer = subprocess.run(command + ["--causal"] * causal, env=environment, check=True,
                            capture_output=True)
    return json.loads(answer.stdout)["report"]["kernel_ms"] / 1e3


main()
