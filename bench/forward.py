"""The forward kernel against cuDNN and FlashAttention-3 in one process, alternating.

    python3 bench/forward.py target/release/flashcore

Each sample is one call between two CUDA events after a flush of the L2; the order of the candidates is
reversed from round to round; the median counts. What is timed is what FlashCore's planner chooses, and
its output is compared with f64 on a sample of rows first. FlashAttention-3 is the PyPI wheel fa3-fwd,
unpacked into the folder that the variable FA3 names.
"""
import argparse, ctypes, json, math, os, statistics, subprocess, sys
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

cu = ctypes.CDLL("libcuda.so.1")


def check(code, what):
    if code:
        raise RuntimeError(f"{what} failed: CUDA error {code}")


def tensor_map(tensor, box_columns, box_rows):
    """A tensor map over (dim, length, heads, batch) of a (b, s, h, d) tensor; 128-byte swizzle."""
    raw = (ctypes.c_byte * 256)()
    address = (ctypes.addressof(raw) + 127) // 128 * 128
    b, s, h, d = tensor.shape
    sb, ss, sh, _ = tensor.stride()
    dims = (ctypes.c_uint64 * 4)(d, s, h, b)
    strides = (ctypes.c_uint64 * 3)(ss * 2, sh * 2, sb * 2)
    box = (ctypes.c_uint32 * 4)(box_columns, box_rows, 1, 1)
    ones = (ctypes.c_uint32 * 4)(1, 1, 1, 1)
    kind = 9 if tensor.dtype == torch.bfloat16 else 6
    check(cu.cuTensorMapEncodeTiled(ctypes.c_void_p(address), kind, 4, ctypes.c_void_p(tensor.data_ptr()),
                                    dims, strides, box, ones, 0, 3, 3, 0), "cuTensorMapEncodeTiled")
    return raw, address


def divisor(n):
    if n <= 1:
        return [1, 0, 0]
    shift = (n - 1).bit_length() - 1
    return [n, -(-(1 << (32 + shift)) // n), shift]


class Kernel:
    """The kernel that FlashCore chooses for a problem, as its command line describes it."""
    modules = {}

    def __init__(self, command, q, k, causal):
        b, s, h, d = q.shape
        kind = "bf16" if q.dtype == torch.bfloat16 else "f16"
        text = f"b={b},h={h},hk={k.shape[2]},s={s},sk={k.shape[1]},d={d},{kind}" + (",causal" if causal else "")
        found = json.loads(subprocess.check_output([command, "inspect", "--problem", text, "--json"]))
        self.launch = found["launch"]
        self.name = self.launch["configuration"]
        if self.name not in Kernel.modules:
            ptx = subprocess.check_output([command, "inspect", "--problem", text, "--ptx"]) + b"\0"
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            check(cu.cuModuleLoadData(ctypes.byref(module), ptx), "cuModuleLoadData")
            check(cu.cuModuleGetFunction(ctypes.byref(function), module, self.name.encode()), "cuModuleGetFunction")
            check(cu.cuFuncSetAttribute(function, 8, self.launch["shared_bytes"]), "cuFuncSetAttribute")
            Kernel.modules[self.name] = function
        self.function = Kernel.modules[self.name]

    def bind(self, q, k, v, o, lse):
        launch = self.launch
        b, s, h, d = q.shape
        rows, block = launch["query_rows"], launch["key_block"]
        lists = launch["lists"]
        if lists is not None:
            lists = torch.tensor(lists, dtype=torch.int64, device="cuda").to(torch.uint32)
        maps = [tensor_map(q, 64, rows), tensor_map(k, 64, block), tensor_map(v, 64, block), tensor_map(o, 64, 64)]
        numbers = [ctypes.c_uint64(lse.data_ptr()), ctypes.c_uint32(s), ctypes.c_uint32(k.shape[1]),
                   ctypes.c_float(math.log2(math.e) / math.sqrt(d)),
                   ctypes.c_uint32(launch["tiles"]) if lists is None else ctypes.c_uint64(lists.data_ptr())]
        for n in (launch["tiles_per_head"], h, h // k.shape[2]):
            numbers += [ctypes.c_uint32(x) for x in divisor(n)]
        pointers = (ctypes.c_void_p * (4 + len(numbers)))(*[a for _, a in maps], *[ctypes.addressof(n) for n in numbers])
        grid, threads, shared = launch["blocks"], launch["threads"], launch["shared_bytes"]

        def call(alive=(maps, numbers, lists, q, k, v, o, lse)):
            cu.cuLaunchKernel(self.function, grid, 1, 1, threads, 1, 1, shared,
                              ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), pointers, None)
        return call


def reference(q, k, v, causal, rows):
    """f64 attention of some rows of the first and last head."""
    out, lse = [], []
    d, group = q.shape[-1], q.shape[2] // k.shape[2]
    for b, h in ((0, 0), (q.shape[0] - 1, q.shape[2] - 1)):
        s = (q[b, rows, h].double() @ k[b, :, h // group].double().T) / math.sqrt(d)
        if causal:
            limit = rows[:, None] + k.shape[1] - q.shape[1]
            s.masked_fill_(torch.arange(k.shape[1], device="cuda")[None] > limit, float("-inf"))
        l = s.logsumexp(-1)
        p = torch.where(l[:, None] == float("-inf"), 0.0, (s - l[:, None]).exp())
        out.append(p @ v[b, :, h // group].double())
        lse.append(l)
    return torch.stack(out), torch.stack(lse)


def errors(o, lse, exact, exact_lse, rows):
    got = torch.stack([o[0, rows, 0].double(), o[-1, rows, -1].double()])
    got_lse = torch.stack([lse[0, 0, rows].double(), lse[-1, -1, rows].double()])
    e = (got - exact).abs().max().item()
    same = got_lse == exact_lse
    el = torch.where(same, 0.0, (got_lse - exact_lse).abs()).max().item()
    return e, el


def peers(fa3, q, k, v, causal):
    qt, kt, vt = [x.transpose(1, 2) for x in (q, k, v)]

    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(qt, kt, vt, is_causal=causal, enable_gqa=qt.shape[1] != kt.shape[1])
    candidates = {"cudnn": cudnn}
    if fa3:
        candidates["fa3"] = lambda: fa3.flash_attn_func(q, k, v, causal=causal)
    return candidates


def cell(command, fa3, flush, rounds, dtype, b, h, hk, s, d, causal):
    """One line of the table: milliseconds by candidate, ours under "flashcore"."""
    torch.manual_seed(s + d)
    q = torch.randn(b, s, h, d, device="cuda", dtype=dtype)
    k, v = [torch.randn(b, s, hk, d, device="cuda", dtype=dtype) for _ in range(2)]
    candidates = peers(fa3, q, k, v, causal)
    kernel = Kernel(command, q, k, causal)
    o, lse = torch.full_like(q, float("nan")), torch.full((b, h, s), float("nan"), device="cuda")
    candidates["flashcore"] = kernel.bind(q, k, v, o, lse)
    rows = torch.randint(0, s, (64,), device="cuda")
    exact, exact_lse = reference(q, k, v, causal, rows)
    peer = candidates["cudnn"]().transpose(1, 2)
    peer_error = max((peer[i, rows, i].double() - exact[i]).abs().max().item() for i in (0, -1))
    candidates["flashcore"]()
    torch.cuda.synchronize()
    e, el = errors(o, lse, exact, exact_lse, rows)
    right = e <= 2 * peer_error + 1e-3 and el < 1e-3 and bool(torch.isfinite(o).all() and torch.isfinite(lse).all())
    names = list(candidates)
    times = {n: [] for n in names}
    for r in range(rounds + 2):
        for n in names if r % 2 else names[::-1]:
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(); candidates[n](); end.record()
            times[n].append((start, end))
    torch.cuda.synchronize()
    median = {n: statistics.median(x.elapsed_time(y) for x, y in t[2:]) for n, t in times.items()}
    return median, right, kernel.name


def small(command, fa3, calls=20):
    """Microseconds per call inside a CUDA graph of several calls."""
    for b, h, s, d in [(1, 8, 512, 64), (1, 8, 1024, 64), (1, 32, 512, 128), (4, 16, 2048, 64)]:
        q, k, v = [torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        candidates = peers(fa3, q, k, v, False)
        o, lse = torch.empty_like(q), torch.empty(b, h, s, device="cuda")
        candidates["flashcore"] = Kernel(command, q, k, False).bind(q, k, v, o, lse)
        graphs, times = {}, {}
        for name, call in candidates.items():
            with torch.cuda.stream(torch.cuda.Stream()):
                call(); call()
            torch.cuda.synchronize()
            graphs[name], times[name] = torch.cuda.CUDAGraph(), []
            with torch.cuda.graph(graphs[name]):
                for _ in range(calls):
                    call()
        for _ in range(25):
            for name, graph in graphs.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record(); graph.replay(); end.record()
                torch.cuda.synchronize()
                times[name].append(start.elapsed_time(end) * 1e3 / calls)
        median = {n: statistics.median(t) for n, t in times.items()}
        best = min(t for n, t in median.items() if n != "flashcore")
        print((b, h, s, d), " ".join(f"{n} {t:.2f} us" for n, t in median.items()), f"ratio of times {median['flashcore'] / best:.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", help="the command flashcore")
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--masks", default="dense,causal")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "f16"], help="FlashAttention-3's wheel has no f16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="small shapes inside a CUDA graph instead")
    parser.add_argument("--grouped", action="store_true", help="batch 1, heads 64/8, dim 128 at 16k and 32k instead")
    parser.add_argument("--json", help="write the times to this file")
    arguments = parser.parse_args()
    try:
        sys.path.insert(0, os.environ.get("FA3", "fa3"))
        import fa3_fwd_interface as fa3
    except Exception as error:
        fa3 = None
        print("no FlashAttention-3:", error)
    torch.zeros(1, device="cuda")  # makes the context that modules are loaded into
    if arguments.small:
        return small(arguments.command, fa3)
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    cells = [(16384 // s, 2048 // d, 2048 // d, s, d, mask == "causal")
             for d in map(int, arguments.dims.split(",")) for mask in arguments.masks.split(",")
             for s in map(int, arguments.lengths.split(","))]
    if arguments.grouped:
        cells = [(1, 64, 8, s, 128, causal) for s in (16384, 32768) for causal in (False, True)]
    dtype = torch.bfloat16 if arguments.dtype == "bf16" else torch.float16
    if arguments.dtype == "f16":
        fa3 = None
    ratios, out = [], []
    for b, h, hk, s, d, causal in cells:
        median, right, name = cell(arguments.command, fa3, flush, arguments.rounds, dtype, b, h, hk, s, d, causal)
        flop = 4 * b * h * s * s * d * (0.5 if causal else 1)
        ratio = min(t for n, t in median.items() if n != "flashcore") / median["flashcore"]
        ratios.append(ratio)
        mask = "causal" if causal else "dense"
        print(f"D{d:3d} {mask:6s} {s:5d} " + " ".join(f"{n} {flop / t / 1e9:4.0f}" for n, t in median.items())
              + f" ratio {ratio:.3f} {name}" + ("" if right else " WRONG"), flush=True)
        out.append(dict(batch=b, heads=h, kv_heads=hk, length=s, head_dim=d, mask=mask, kernel=name, right=right, milliseconds=median))
    print(f"ratio to the faster peer: geometric mean {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}, lowest {min(ratios):.3f}, cells {len(ratios)}")
    if arguments.json:
        json.dump(out, open(arguments.json, "w"))


if __name__ == "__main__":
    main()
