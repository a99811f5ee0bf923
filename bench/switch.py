"""What PyTorch's switch costs the host: F.scaled_dot_product_attention on FlashCore beside FlashCore's own function.

    python3 bench/switch.py

A tiny problem, bursts of calls shorter than the driver's queue with the device idle before each; the median over
bursts, candidates alternating. The cost of the switch is what the call through PyTorch takes longer than
`flashcore.scaled_dot_product_attention`, which answers the same: exits with 1 where that is more than 3 us.
"""
import statistics, sys
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
import flashcore, flashcore.torch
from calls import cost

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
    costs = medians[2] - medians[0], medians[3] - medians[1]
    print(f"cost of the switch: {costs[0]:.2f}, recorded by autograd {costs[1]:.2f}")
    sys.exit(costs[0] > MOST)


if __name__ == "__main__":
    main()
