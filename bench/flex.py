"""Masks and scores as functions beside FlexAttention in Triton and on FlashAttention-4, bf16.

    FA4=fa4 python3 bench/flex.py [--rules causal,documents] [--shapes 4x16x4096x128] [--peers triton,fa4]
    FA4=fa4 python3 bench/flex.py --backward

Everybody is given the same function. Calls alternate in one process; the L2 cache is flushed before each,
CUDA events are around it, and the median over rounds counts. Each answer is compared once with attention in
float64, within twice the error of the plain algorithm in bf16. `first` is the time from a new function to its
first result with nothing cached, block mask included. The column `by name` is FlashCore where it has the rule
built in. With --backward the gradients of queries, keys and values are timed and not the forward pass, the
column `plain` is FlashCore's causal backward without functions, and 64 rows of the gradient of queries are judged.
FlashAttention-4 is the wheel flash-attn-4, unpacked into the folder that the variable FA4 names.
"""

import argparse
import math
import os
import statistics
import sys
import time

# Do not reuse what an earlier process compiled.
os.environ["FLASHCORE_CACHE"] = "off"
os.environ["CUDA_CACHE_DISABLE"] = "1"
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import flashcore
import torch
import torch._functorch.config
from torch.nn.attention import flex_attention as theirs

WARM_UP = 3
# Cycles that the GPU waits while the host enqueues a call and the events around it.
HEAD_START = 200_000
SHAPES = ["4x16x4096x128", "1x16x16384x128", "4x32x4096x64", "1x32x16384x64"]
DOCUMENTS = 7
EVERY_RULE = "causal,window 1024,documents,prefix-LM,softcap,ALiBi,bias"


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def rules(batch, heads, length):
    """Each rule by its name: a mask, a score, and the same by FlashCore's name for it, if it has one."""

    def window(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= 1024)

    def prefix(b, h, q_idx, kv_idx):
        return (kv_idx < 512) | (q_idx >= kv_idx)

    def make_documents():
        cuts = torch.randperm(length - 1, generator=torch.Generator().manual_seed(7))[: DOCUMENTS - 1].sort().values + 1
        ids = torch.searchsorted(cuts, torch.arange(length), right=True).int().cuda()

        def documents(b, h, q_idx, kv_idx):
            return (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])

        return documents, None, None

    def softcap(score, b, h, q_idx, kv_idx):
        return 30.0 * torch.tanh(score / 30.0)

    def make_alibi():
        slopes = torch.exp2(-(torch.arange(heads, device="cuda") + 1) * 8.0 / heads).float()

        def alibi(score, b, h, q_idx, kv_idx):
            return score - slopes[h] * (q_idx - kv_idx)

        return causal, alibi, dict(causal=True, alibi_slopes=slopes)

    def make_bias():
        table = torch.randn(heads, length, length, device="cuda", dtype=torch.bfloat16)

        def bias(score, b, h, q_idx, kv_idx):
            return score + table[h, q_idx, kv_idx]

        return causal, bias, None

    return {
        "causal": lambda: (causal, None, dict(causal=True)),
        "window 1024": lambda: (window, None, dict(causal=True, window_size=(1024, 0))),
        "documents": make_documents,
        "prefix-LM": lambda: (prefix, None, None),
        "softcap": lambda: (causal, softcap, dict(causal=True, softcap=30.0)),
        "ALiBi": make_alibi,
        "bias": make_bias,
    }


def ours(q, k, v, mask, score):
    length = q.shape[2]
    block_mask = flashcore.create_block_mask(mask, None, None, length, length, device="cuda")
    return lambda: flashcore.flex_attention(q, k, v, score_mod=score, block_mask=block_mask)


def by_name(q, k, v, options):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return lambda: flashcore.flash_attn_func(q, k, v, **options).transpose(1, 2)


def peer(backend):
    def make(q, k, v, mask, score):
        torch._dynamo.reset()
        # One forward pass, many backward.
        torch._functorch.config.donated_buffer = False
        length = q.shape[2]
        block_mask = theirs.create_block_mask(mask, None, None, length, length, device="cuda")
        compiled = torch.compile(theirs.flex_attention, dynamic=False)
        options = None if backend is None else {"BACKEND": backend}
        return lambda: compiled(q, k, v, score_mod=score, block_mask=block_mask, kernel_options=options)

    return make


PEERS = {"triton": peer(None), "fa4": peer("FLASH")}


def backward_of(make):
    """The gradients in the place of the forward pass."""

    def made(q, k, v, *rule):
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        out = make(*given, *rule)()
        gradient = output_gradient(out)
        return lambda: torch.autograd.grad(out, given, gradient, retain_graph=True)[0]

    return made


def output_gradient(out):
    return torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(3), device="cuda", dtype=out.dtype)


class Truth:
    """f64 attention of some rows of the first and the last head, and the plain algorithm in bf16."""

    def __init__(self, q, k, v, mask, score, backward):
        self.rows = torch.randint(0, q.shape[2], (64,), device="cuda")
        keys = torch.arange(k.shape[2], device="cuda")[None]
        self.exact, rounded = [], []
        for b, h in ((0, 0), (q.shape[0] - 1, q.shape[1] - 1)):
            at = (torch.tensor(b, device="cuda"), torch.tensor(h, device="cuda"), self.rows[:, None], keys)
            scale = 1 / math.sqrt(q.shape[3])
            raw = (q[b, h, self.rows].double() @ k[b, h].double().T * scale).requires_grad_(backward)
            scores = raw if score is None else score(raw, *at)
            low = scores + (scores.bfloat16() - scores).detach()
            both = [it.masked_fill(~mask(*at), float("-inf")).softmax(-1) for it in (scores, low)]
            if backward:
                gradient = output_gradient(q)[b, h, self.rows].double() @ v[b, h].double().T
                both = [torch.autograd.grad(it, raw, gradient, retain_graph=True)[0] * scale for it in both]
            other = k if backward else v
            self.exact.append(both[0] @ other[b, h].double())
            rounded.append((both[1].bfloat16().float() @ other[b, h].float()).bfloat16().double())
        difference = max((a - b).abs().max().item() for a, b in zip(self.exact, rounded))
        largest = max(a.abs().max().item() for a in self.exact)
        self.tolerance = 2 * difference + torch.finfo(torch.bfloat16).eps * largest

    def judge(self, out):
        found = (out[0, 0, self.rows], out[-1, -1, self.rows])
        error = max((a.double() - b).abs().max().item() for a, b in zip(found, self.exact))
        return error <= self.tolerance and bool(torch.isfinite(out).all())


def sample(call, flush):
    # What is read last is clean: the call has nothing of others to write back.
    flush[0].zero_()
    flush[1].sum()
    torch.cuda._sleep(HEAD_START)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    out = call()
    end.record()
    return (start, end), out


def seconds_of(make):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call = make()
    call()
    torch.cuda.synchronize()
    return call, time.perf_counter() - begin


def cell(make_rule, tensors, peers, rounds, flush, backward):
    """Median milliseconds, seconds to the first result, and who was wrong or refused."""
    mask, score, options = make_rule()
    timed = backward_of if backward else lambda make: make
    makers = {"flashcore": lambda: timed(ours)(*tensors, mask, score)}
    if options is not None:
        makers["by name"] = lambda: timed(by_name)(*tensors, options)
    if backward:
        makers["plain"] = lambda: timed(by_name)(*tensors, dict(causal=True))
    for it in peers:
        makers[it] = lambda it=it: timed(PEERS[it])(*tensors, mask, score)
    calls, first, notes = {}, {}, {}
    for who, make in makers.items():
        try:
            calls[who], first[who] = seconds_of(make)
        except Exception as error:
            notes[who] = (str(error).strip() or repr(error)).splitlines()[0][:300]
    marks, truth = {who: [] for who in calls}, Truth(*tensors, mask, score, backward)
    for turn in range(WARM_UP + rounds):
        for who in list(calls) if turn % 2 else reversed(list(calls)):
            mark, out = sample(calls[who], flush)
            if turn >= WARM_UP:
                marks[who].append(mark)
            elif turn == 0 and who != "plain" and not truth.judge(out):
                notes[who] = "wrong"
            del out
    torch.cuda.synchronize()
    times = {who: statistics.median(a.elapsed_time(b) for a, b in both) for who, both in marks.items()}
    return times, first, notes


def block_masks(length):
    """Milliseconds that a block mask takes: the first, and the median of others."""
    for who, make in (("flashcore", flashcore.create_block_mask), ("PyTorch", theirs.create_block_mask)):
        times = []
        for turn in range(9):
            # Another function each time: none is known already.
            def mask(b, h, q_idx, kv_idx):
                return (q_idx >= kv_idx) & (q_idx - kv_idx <= 1024 + turn)

            torch.cuda.synchronize()
            begin = time.perf_counter()
            make(mask, None, None, length, length, device="cuda")
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
        print(
            f"create_block_mask at {length}, {who}: first {times[0]:.3f} ms, then {statistics.median(times[1:]):.3f} ms"
        )


def found_masks(length):
    """Milliseconds that a GPU takes to find the blocks of documents: a call with a new mask less one with the same."""
    q, k, v = (torch.randn(1, 16, length, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    documents, _, _ = rules(1, 16, length)["documents"]()
    both = []
    for _ in range(9):
        block_mask = flashcore.create_block_mask(documents, None, None, length, length, device="cuda")
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda.synchronize()
        torch.cuda._sleep(20 * HEAD_START)
        marks[0].record()
        for mark in marks[1:]:
            flashcore.flex_attention(q, k, v, block_mask=block_mask)
            mark.record()
        torch.cuda.synchronize()
        both.append(marks[0].elapsed_time(marks[1]) - marks[1].elapsed_time(marks[2]))
    print(f"blocks of documents at {length}, found on the GPU: {statistics.median(both[1:]):.3f} ms")


def geometric_mean(values):
    return math.exp(statistics.fmean(math.log(value) for value in values)) if values else math.nan


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rules", help=f"some of {EVERY_RULE}")
    parser.add_argument("--backward", action="store_true", help="gradients instead of the forward pass")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="batch x heads x length x head dim")
    parser.add_argument("--peers", default="triton,fa4" if "FA4" in os.environ else "triton")
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    every_rule = "causal,softcap,ALiBi" if options.backward else EVERY_RULE
    chosen_rules = (options.rules or every_rule).split(",")
    peers = [it for it in options.peers.split(",") if it]
    if "fa4" in peers:
        folder = os.environ.get("FA4", "fa4")
        sys.path[:0] = [folder, os.path.join(folder, "nvidia_cutlass_dsl", "dsl_packages")]
    torch.manual_seed(0)
    torch.zeros(1, device="cuda")
    flush = torch.zeros(2, torch.cuda.get_device_properties(0).L2_cache_size // 2, dtype=torch.float32, device="cuda")
    which = "backward" if options.backward else "forward"
    print(
        f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, bf16, {which}, cold L2, {options.rounds} rounds"
    )
    # The first call opens the device and its libraries, which is not part of a function's cost.
    warm = [torch.randn(1, 1, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    flashcore.flash_attn_func(*(x.transpose(1, 2) for x in warm))
    rows = []
    with torch.set_grad_enabled(options.backward):
        if not options.backward:
            block_masks(16384)
            found_masks(16384)
        for shape in options.shapes.split(","):
            batch, heads, length, dim = map(int, shape.split("x"))
            tensors = [torch.randn(batch, heads, length, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
            known = rules(batch, heads, length)
            for name in chosen_rules:
                times, first, notes = cell(known[name], tensors, peers, options.rounds, flush, options.backward)
                rows.append((shape, name, times, first))
                text = ", ".join(f"{who} {times[who]:.3f} ms (first {first[who]:.2f} s)" for who in times)
                print(
                    f"{shape} {name}: {text}", *(f"; {who}: {note}" for who, note in notes.items()), sep="", flush=True
                )
                torch.cuda.empty_cache()
    plain = ["plain"] if options.backward else []
    columns = ["flashcore", "by name", *plain, *peers]
    print(
        f"\n{'milliseconds':<30}"
        + "".join(f"{who:>11}" for who in columns)
        + "".join(f"{'x ' + who:>9}" for who in peers)
    )
    ratios = {who: [] for who in ("by name", *plain, *peers)}
    for shape, name, times, _ in rows:
        mine = times.get("flashcore", math.nan)
        for who, of in ratios.items():
            if who in times and "flashcore" in times:
                of.append(times[who] / mine)
        shown = "".join(f"{times[who]:11.3f}" if who in times else f"{'-':>11}" for who in columns)
        faster = "".join(f"{times[who] / mine:9.2f}" if who in times else f"{'-':>9}" for who in peers)
        print(f"{shape + ' ' + name:<30}{shown}{faster}")
    for who, of in ratios.items():
        if of:
            print(f"FlashCore beside {who}: geometric mean {geometric_mean(of):.3f}, lowest {min(of):.3f}")
    for who in columns:
        of = [first[who] for _, _, _, first in rows if who in first]
        if of:
            print(f"first result, {who}: median {statistics.median(of):.2f} s, longest {max(of):.2f} s")


if __name__ == "__main__":
    main()
