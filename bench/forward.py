"""Forward kernels against cuDNN and FlashAttention-3 in one process, alternating.

    python3 bench/forward.py CUBINS [--cells paper|quick] [--check]

CUBINS is a folder with cubins and their `kernels.json`. Each sample is one call with a flushed L2
between two CUDA events; the order of the candidates is reversed from round to round; the median
counts. Outputs are compared with an f32 reference on a sample of rows before anything is timed.
"""
import argparse, ctypes, heapq, json, math, os, sys, statistics
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


def tile_lists(m, s, sk, h, hk, b, processors, cache=30 << 20, overhead=2):
    """The tiles of each block, as crates/kernels/src/forward/lists.rs shares them out."""
    rows, block = m["query_rows"], m["key_block"]
    row_tiles, heads, group = -(-s // rows), h * b, h // hk
    blocks = min(processors, row_tiles * heads)
    lists, loads = [[] for _ in range(blocks)], [0] * blocks

    def cost(tile):
        seen = max((tile + 1) * rows + sk - s, 0)
        return min(max(-(-seen // block), 1), -(-sk // block)) + overhead

    def give_to(i, head, tile):
        lists[i].append(head * row_tiles + tile)
        loads[i] += cost(tile)

    def give_all(tiles):
        free = [(load, i) for i, load in enumerate(loads)]
        heapq.heapify(free)
        for head, tile in tiles:
            _, i = heapq.heappop(free)
            give_to(i, head, tile)
            heapq.heappush(free, (loads[i], i))

    if row_tiles >= (40 if rows == 192 else 100):
        together = max(min(-(-processors // row_tiles), cache // max(sk * 2 * m["head_dim"] * 2, 1) * group), 1)
        together = -(-together // group) * group
        give_all([(head, tile) for first in range(0, heads, together) for tile in reversed(range(row_tiles))
                  for head in range(first, min(first + together, heads))])
    else:
        half = -(-row_tiles // 2)
        pairs = [[(p // half, t) for t in sorted({row_tiles - 1 - p % half, p % half}, reverse=True)] for p in range(half * heads)]
        whole = len(pairs) // blocks * blocks
        for p, pair in enumerate(pairs[:whole]):
            for head, tile in pair:
                give_to(p % blocks, head, tile)
        give_all(sorted((t for pair in pairs[whole:] for t in pair), key=lambda t: -cost(t[1])))
    words, start = [], blocks
    for l in lists:
        words.append(start)
        start += len(l) + 1
    for l in lists:
        words += l + [0xFFFFFFFF]
    return blocks, torch.tensor(words, dtype=torch.int64, device="cuda").to(torch.uint32)


class Kernel:
    def __init__(self, folder, meta):
        self.meta = meta
        module = ctypes.c_void_p()
        check(cu.cuModuleLoad(ctypes.byref(module), f"{folder}/{meta['name']}.cubin".encode()), "cuModuleLoad")
        self.function = ctypes.c_void_p()
        check(cu.cuModuleGetFunction(ctypes.byref(self.function), module, meta["name"].encode()), "cuModuleGetFunction")
        check(cu.cuFuncSetAttribute(self.function, 8, meta["shared_bytes"]), "cuFuncSetAttribute")

    def bind(self, q, k, v, o, lse):
        m = self.meta
        b, s, h, d = q.shape
        rows = m["query_rows"]
        per_head = -(-s // rows)
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        lists = None
        if m["causal"]:
            grid, lists = tile_lists(m, s, k.shape[1], h, k.shape[2], b, processors)
        else:
            grid = min(processors, per_head * h * b)
        maps = [tensor_map(q, 64, rows), tensor_map(k, 64, m["key_block"]),
                tensor_map(v, 64, m["key_block"]), tensor_map(o, 64, 64)]
        numbers = [ctypes.c_uint64(lse.data_ptr()), ctypes.c_uint32(s), ctypes.c_uint32(k.shape[1]),
                   ctypes.c_float(math.log2(math.e) / math.sqrt(d)),
                   ctypes.c_uint64(lists.data_ptr()) if m["causal"] else ctypes.c_uint32(per_head * h * b)]
        for n in (per_head, h, h // k.shape[2]):
            numbers += [ctypes.c_uint32(x) for x in divisor(n)]
        pointers = (ctypes.c_void_p * (4 + len(numbers)))(*[a for _, a in maps], *[ctypes.addressof(n) for n in numbers])
        keep = (maps, numbers, pointers, lists)
        threads = m["threads"]

        def call(keep=keep):
            cu.cuLaunchKernel(self.function, grid, 1, 1, threads, 1, 1, m["shared_bytes"],
                              ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), keep[2], None)
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--cells", default="paper")
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--masks", default="dense,causal")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", default="")
    parser.add_argument("--odd", action="store_true", help="check odd shapes too")
    parser.add_argument("--small", action="store_true", help="small shapes inside a CUDA graph")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    try:
        sys.path.insert(0, os.environ.get("FA3", "fa3"))
        import fa3_fwd_interface as fa3
    except Exception as error:
        fa3 = None
        print("no FlashAttention-3:", error)
    metas = [m for m in json.load(open(f"{arguments.folder}/kernels.json")) if arguments.only in m["name"]]
    torch.zeros(1, device="cuda")  # makes the context that modules are loaded into
    kernels = [Kernel(arguments.folder, m) for m in metas]
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    if arguments.odd:
        odd(kernels)
    if arguments.small:
        return small(kernels, fa3)
    lengths = {"paper": [512, 1024, 2048, 4096, 8192, 16384], "quick": [512, 2048, 16384], "mid": [1024, 4096], "none": []}[arguments.cells]
    ratios, rows_out = {}, []
    for d in map(int, arguments.dims.split(",")):
        for mask in arguments.masks.split(","):
            causal = mask == "causal"
            mine = [k for k in kernels if k.meta["head_dim"] == d and k.meta["causal"] == causal and k.meta["element"] == "bf16"]
            if not mine:
                continue
            for s in lengths:
                b, h = 16384 // s, 2048 // d
                torch.manual_seed(s + d)
                q, k, v = [torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
                qt, kt, vt = [x.transpose(1, 2) for x in (q, k, v)]

                def cudnn():
                    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                        return F.scaled_dot_product_attention(qt, kt, vt, is_causal=causal)
                candidates = {"cudnn": cudnn}
                if fa3:
                    candidates["fa3"] = lambda: fa3.flash_attn_func(q, k, v, causal=causal)
                rows = torch.randint(0, s, (64,), device="cuda")
                exact, exact_lse = reference(q, k, v, causal, rows)
                peer = (cudnn().transpose(1, 2))
                peer_error = max((peer[0, rows, 0].double() - exact[0]).abs().max().item(),
                                 (peer[-1, rows, -1].double() - exact[1]).abs().max().item())
                del peer
                wrong = []
                for kernel in mine:
                    o = torch.full_like(q, float("nan"))
                    lse = torch.full((b, h, s), float("nan"), device="cuda")
                    call = kernel.bind(q, k, v, o, lse)
                    call()
                    torch.cuda.synchronize()
                    e, el = errors(o, lse, exact, exact_lse, rows)
                    finite = bool(torch.isfinite(o).all()) and bool(torch.isfinite(lse).all())
                    if not (e <= 2 * peer_error + 1e-3 and el < 1e-3 and finite):
                        wrong.append((kernel.meta["name"], e, peer_error, el, finite))
                    candidates[kernel.meta["name"]] = lambda c=call, keep=(o, lse): c()
                if wrong:
                    print("WRONG", d, mask, s, wrong)
                names = list(candidates)
                times = {n: [] for n in names}
                for n in names:
                    candidates[n](); candidates[n]()
                for r in range(arguments.rounds):
                    for n in names if r % 2 else names[::-1]:
                        flush.zero_()
                        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                        start.record(); candidates[n](); end.record()
                        times[n].append((start, end))
                torch.cuda.synchronize()
                median = {n: statistics.median(a.elapsed_time(z) for a, z in t) for n, t in times.items()}
                flop = 4 * b * h * s * s * d * (0.5 if causal else 1)
                best_peer = min(median[n] for n in names if n in ("cudnn", "fa3"))
                line = f"D{d:3d} {mask:6s} {s:5d}  cudnn {flop / median['cudnn'] / 1e9:4.0f}"
                if fa3:
                    line += f" fa3 {flop / median['fa3'] / 1e9:4.0f}"
                for kernel in mine:
                    n = kernel.meta["name"]
                    ratio = best_peer / median[n]
                    ratios.setdefault((d, mask, s), {})[n] = ratio
                    line += f" | {kernel.meta['label']} {flop / median[n] / 1e9:4.0f} {ratio:.3f}"
                rows_out.append(dict(head_dim=d, mask=mask, length=s, milliseconds=median))
                print(line, flush=True)
                del q, k, v, qt, kt, vt, candidates
    best = [max(r.values()) for r in ratios.values()]
    if best:
        print(f"best of ours per cell: geometric mean {math.exp(sum(map(math.log, best)) / len(best)):.3f}, lowest {min(best):.3f}, cells {len(best)}")
    if arguments.json:
        json.dump(rows_out, open(arguments.json, "w"))


def small(kernels, fa3, calls=20):
    """Microseconds per call inside a CUDA graph of several calls."""
    for b, h, s, d in [(1, 8, 512, 64), (1, 8, 1024, 64), (1, 32, 512, 128), (4, 16, 2048, 64)]:
        q, k, v = [torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        qt, kt, vt = [x.transpose(1, 2) for x in (q, k, v)]

        def cudnn():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(qt, kt, vt)
        candidates = {"cudnn": cudnn}
        if fa3:
            candidates["fa3"] = lambda: fa3.flash_attn_func(q, k, v)
        for kernel in kernels:
            if kernel.meta["head_dim"] == d and not kernel.meta["causal"] and kernel.meta["element"] == "bf16":
                o, lse = torch.empty_like(q), torch.empty(b, h, s, device="cuda")
                call = kernel.bind(q, k, v, o, lse)
                candidates[kernel.meta["label"]] = lambda call=call, alive=(o, lse): call()
        graphs, times = {}, {}
        for name, call in candidates.items():
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                call(); call()
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                for _ in range(calls):
                    call()
            times[name] = []
        for _ in range(25):
            for name, graph in graphs.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record(); graph.replay(); end.record()
                torch.cuda.synchronize()
                times[name].append(start.elapsed_time(end) * 1e3 / calls)
        median = {n: statistics.median(t) for n, t in times.items()}
        best = min(median[n] for n in ("cudnn", "fa3") if n in median)
        print((b, h, s, d), " ".join(f"{n} {t:.2f} us ({t / best:.2f})" for n, t in median.items()), flush=True)


def odd(kernels):
    """Lengths that are not kind."""
    bad = total = 0
    for kernel in kernels:
        m = kernel.meta
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[m["element"]]
        d = m["head_dim"]
        for b, h, hk, sq, sk in [(1, 1, 1, 1, 1), (2, 3, 3, 127, 127), (1, 2, 1, 129, 129), (2, 4, 2, 1000, 777), (1, 2, 2, 300, 1),
                                 (3, 2, 1, 65, 1023), (1, 1, 1, 191, 193), (1, 3, 3, 640, 640), (2, 2, 2, 1, 500), (1, 2, 2, 513, 100)]:
            for scale in (1.0, 8.0):
                torch.manual_seed(sq)
                q = torch.randn(b, sq, h, d, device="cuda", dtype=dtype) * scale
                k = torch.randn(b, sk, hk, d, device="cuda", dtype=dtype)
                v = torch.randn(b, sk, hk, d, device="cuda", dtype=dtype)
                k = k * torch.linspace(0.1, 2.0, sk, device="cuda", dtype=dtype)[None, :, None, None]
                if sk > 7:
                    k[:, 3] *= 8
                o = torch.full_like(q, float("nan"))
                lse = torch.full((b, h, sq), float("nan"), device="cuda")
                kernel.bind(q, k, v, o, lse)()
                torch.cuda.synchronize()
                rows = torch.arange(sq, device="cuda")
                exact, exact_lse = reference(q, k, v, m["causal"], rows)
                e, el = errors(o, lse, exact, exact_lse, rows)
                total += 1
                limit = (2e-2 if m["element"] == "bf16" else 4e-3) * max(1.0, v.abs().max().item())
                if not (e < limit and el < 1e-2) or not torch.isfinite(o).all():
                    bad += 1
                    print("ODD", m["name"], (b, h, hk, sq, sk), scale, e, el)
    print(f"odd shapes: {total - bad} passed, {bad} failed")


if __name__ == "__main__":
    main()
