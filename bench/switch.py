"""What PyTorch's switch costs the host: F.scaled_dot_product_attention on FlashCore beside PyTorch's own kernels.

    python3 bench/switch.py

A tiny problem, bursts of calls shorter than the driver's queue with the device idle before each; the median over
bursts, candidates alternating. The cost of the switch is what a call takes longer with it than without it: exits
with 1 where that is more than 3 us. `flashcore.scaled_dot_product_attention`, which answers the same, is there to
compare.
"""

import statistics
import sys

import flashcore
import flashcore.torch
import torch
import torch.nn.functional as F
from calls import cost
from torch.nn.attention import SDPBackend, sdpa_kernel

ROUNDS, MOST = 200, 3.0


def main():
    q, k, v = (torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    recorded = [x.clone().requires_grad_() for x in (q, k, v)]
    theirs = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    trained = lambda: F.scaled_dot_product_attention(*recorded, is_causal=True)  # noqa: E731
    dout = torch.randn_like(q)
    step = lambda: torch.autograd.grad(F.scaled_dot_product_attention(*recorded, is_causal=True), recorded, dout)  # noqa: E731
    candidates = {
        "flashcore.scaled_dot_product_attention": (False, lambda: flashcore.scaled_dot_product_attention(q, k, v, is_causal=True)),
        "the same, recorded by autograd": (False, lambda: flashcore.scaled_dot_product_attention(*recorded, is_causal=True)),
        "F.scaled_dot_product_attention, FlashCore": (True, theirs),
        "the same, recorded by autograd, FlashCore": (True, trained),
        "F.scaled_dot_product_attention, PyTorch's own": (False, theirs),
        "the same, recorded by autograd, PyTorch's own": (False, trained),
        "forward and backward, FlashCore": (True, step),
        "forward and backward, PyTorch's own": (False, step),
    }  # fmt: skip
    times = {name: [] for name in candidates}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for round in range(ROUNDS + 1):
            for switched in (True, False):
                if switched:
                    flashcore.torch.activate()
                for name, (through, call) in candidates.items():
                    if through == switched:
                        times[name].append(cost(call))
                if switched:
                    assert flashcore.info()["last"]["device"] != "cpu"
                    flashcore.torch.restore()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, us per call on the host")
    print(f"{'call':<48} {'median':>7} {'lowest':>7}")
    medians = []
    for name, values in times.items():
        # The first burst compiles.
        medians.append(statistics.median(values[1:]))
        print(f"{name:<48} {medians[-1]:7.2f} {min(values[1:]):7.2f}")
    costs = [medians[on] - medians[off] for on, off in ((2, 4), (3, 5), (6, 7))]
    forward, recorded_forward, both = costs
    print(f"cost of the switch: {forward:.2f}, recorded by autograd {recorded_forward:.2f}, with backward {both:.2f}")
    sys.exit(max(costs) > MOST)


if __name__ == "__main__":
    main()
