"""What a spread sequence costs besides attention: merging and accumulating, as a share of the kernels' time.

    python bench/distributed.py [--ranks 8] [--length 131072] [--heads 16] [--key-heads 16] [--dim 128]
                                [--variant ring] [--not-causal]

Ranks in turn on one GPU: each does all that it would do among the others, forward and backward, but that what it
receives is random and is there at once. Times are those of kernels, from PyTorch's profiler: attention,
and all the rest (merging, sums, packing); what stands for the transport is left out.
"""

from __future__ import annotations

import argparse

import torch
from flashcore.distributed import _attention, _prepared
from torch.profiler import ProfilerActivity, profile


class Alone:
    """The transport of a rank that is alone: what comes is random."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def exchange(self, sends: list, receives: list) -> list:
        for _, tensor in receives:
            tensor.normal_()
        return []

    def all_gather(self, into: torch.Tensor, part: torch.Tensor) -> list:
        into.normal_()
        return []


def kind(name: str) -> str:
    """Whose a kernel is."""
    if "distribution" in name or "normal" in name:
        return "transport"
    # Workspaces of the backward pass are cleared by memsets; ours are filled by kernels of PyTorch's.
    if name.startswith("combine_") or "at::native" in name or "Memcpy" in name:
        return "rest"
    return "attention"


def measure(arguments: argparse.Namespace, rank: int) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds of one step of a rank, by kind and by name of the rest."""
    rows = arguments.length // arguments.ranks
    make = lambda heads: torch.randn(1, rows, heads, arguments.dim, device="cuda", dtype=torch.bfloat16)
    q, k, v, dout = make(arguments.heads), make(arguments.key_heads), make(arguments.key_heads), make(arguments.heads)
    layout = (None, rows * arguments.ranks, "zigzag", 1)
    mask, rest = (not arguments.not_causal, (-1, -1)), (None, 0.0, False, False)
    *tensors, call = _prepared(q, k, v, Alone(rank, arguments.ranks), arguments.variant, mask, layout, rest)

    def step() -> None:
        _, _, saved = _attention.forward(*tensors, call)
        _attention.backward(dout, None, saved, call)

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(arguments.repeats):
            step()
        torch.cuda.synchronize()
    kinds: dict[str, float] = {"attention": 0.0, "rest": 0.0, "transport": 0.0}
    names: dict[str, float] = {}
    for event in profiled.key_averages():
        time = event.self_device_time_total / arguments.repeats
        kinds[kind(event.key)] += time
        if kind(event.key) == "rest":
            names[event.key] = time
    return kinds, names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--variant", default="ring", choices=["ring", "all_gather", "all_to_all"])
    parser.add_argument("--not-causal", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, {vars(arguments)}")
    print(f"{'rank':>4}  {'attention':>12}  {'rest':>10}  share")
    worst, names = 0.0, {}
    for rank in range(arguments.ranks):
        kinds, names = measure(arguments, rank)
        share = kinds["rest"] / kinds["attention"]
        worst = max(worst, share)
        print(f"{rank:>4}  {kinds['attention'] / 1e3:>9.2f} ms  {kinds['rest'] / 1e3:>7.2f} ms  {share:.2%}")
    print("the rest of the last rank:")
    for name, time in sorted(names.items(), key=lambda it: -it[1])[:8]:
        print(f"  {time / 1e3:>7.2f} ms  {name[:100]}")
    print(f"worst {worst:.2%}; at most 4 % is asked for")


if __name__ == "__main__":
    main()
