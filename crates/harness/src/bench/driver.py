"""Measures attention of several kinds in alternation, in one process on one GPU.

    python3 driver.py JOB.json

`flashcore bench` writes the job and reads what is printed here: one JSON object on each line. FlashCore's
own kernels come as cubins with a description of their launch; nothing about them is known here.
"""

import ctypes
import json
import math
import os
import random
import sys
import time

import torch
import torch.nn.functional as F

cu = ctypes.CDLL("libcuda.so.1")
DEVICE = "cuda"
WARM_UP = 2
# Cycles that the GPU waits while the host puts a call and the marks around it on the stream.
HEAD_START = 200_000
# Steps of forward and backward over so many queries or fewer are captured in graphs: their launches take a
# host longer than they take the GPU.
SHORT = 2048
EIGHT_BITS = torch.float8_e4m3fn
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "e4m3": EIGHT_BITS}


class Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute: here that a launch is programmatic."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class Configuration(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
PROGRAMMATIC = Attribute(id=6, value=(ctypes.c_int * 16)(1))


def say(**what):
    print(json.dumps(what), flush=True)


def check(code, what):
    if code:
        raise RuntimeError(f"{what} failed: CUDA error {code}")


class Kernel:
    """A kernel of FlashCore, with those that are launched before it, bound to tensors."""

    functions = {}

    def __init__(self, job, tensors):
        self.memory, self.alive = {}, []
        self.launches = [self.bind(one["cubin"], one["launch"], tensors) for one in job["launches"]]

    def bind(self, cubin, launch, tensors):
        """What cuLaunchKernelEx takes, but for the stream."""
        if launch["cluster"] != 1:
            raise RuntimeError("kernels in clusters are not launched from here")
        key = (cubin, launch["entry"])
        if key not in Kernel.functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            check(cu.cuModuleLoadData(ctypes.byref(module), open(cubin, "rb").read()), "cuModuleLoadData")
            check(
                cu.cuModuleGetFunction(ctypes.byref(function), module, launch["entry"].encode()), "cuModuleGetFunction"
            )
            check(cu.cuFuncSetAttribute(function, 8, launch["shared_bytes"]), "cuFuncSetAttribute")
            Kernel.functions[key] = function
        arguments = [self.argument(argument, tensors) for argument in launch["arguments"]]
        self.alive.append(arguments)
        pointers = (ctypes.c_void_p * len(arguments))(*[address for _, address in arguments])
        configuration = Configuration(
            grid=(ctypes.c_uint * 3)(*launch["grid"]),
            block=(ctypes.c_uint * 3)(launch["threads"], 1, 1),
            shared_bytes=launch["shared_bytes"],
            attributes=ctypes.addressof(PROGRAMMATIC),
            count=int(launch["programmatic"]),
        )
        return Kernel.functions[key], configuration, pointers

    def argument(self, argument, tensors):
        """What must stay alive, and the address of the argument."""
        kind = argument["kind"]
        if kind == "tensor_map":
            return encoded(
                tensors[argument["tensor"]],
                argument["dimensions"],
                argument["strides"],
                argument["extent"],
                argument["swizzle"],
            )
        if kind == "words":
            words = torch.tensor(argument["values"] or [0], dtype=torch.int64, device=DEVICE).to(torch.uint32)
            value = ctypes.c_uint64(words.data_ptr())
            return (words, value), ctypes.addressof(value)
        if kind == "memory":
            if argument["name"] not in self.memory:
                self.memory[argument["name"]] = torch.zeros(max(argument["bytes"], 4), dtype=torch.uint8, device=DEVICE)
            value = ctypes.c_uint64(self.memory[argument["name"]].data_ptr())
        elif kind == "address":
            value = ctypes.c_uint64(tensors[argument["tensor"]].data_ptr())
        else:
            value = {"u32": ctypes.c_uint32, "i32": ctypes.c_int32, "u64": ctypes.c_uint64, "f32": ctypes.c_float}[
                kind
            ](argument["value"])
        return value, ctypes.addressof(value)

    def __call__(self):
        stream = torch.cuda.current_stream().cuda_stream
        for function, configuration, pointers in self.launches:
            configuration.stream = stream
            check(cu.cuLaunchKernelEx(ctypes.byref(configuration), function, pointers, None), "cuLaunchKernelEx")


def encoded(tensor, dimensions, strides, extent, swizzle):
    """A tensor map over dimensions in elements with strides in bytes."""
    raw, rank = (ctypes.c_byte * 256)(), len(dimensions)
    address = (ctypes.addressof(raw) + 127) // 128 * 128
    dimensions, strides = (ctypes.c_uint64 * rank)(*dimensions), (ctypes.c_uint64 * (rank - 1))(*strides)
    box, ones = (ctypes.c_uint32 * rank)(*extent), (ctypes.c_uint32 * rank)(*[1] * rank)
    kind = {EIGHT_BITS: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}[tensor.dtype]
    mode = {0: 0, 32: 1, 64: 2, 128: 3}[swizzle]
    check(
        cu.cuTensorMapEncodeTiled(
            ctypes.c_void_p(address),
            kind,
            rank,
            ctypes.c_void_p(tensor.data_ptr()),
            dimensions,
            strides,
            box,
            ones,
            0,
            mode,
            3,
            0,
        ),
        "cuTensorMapEncodeTiled",
    )
    return (raw, tensor), address


# ---- peers: each makes a call for a problem, or raises with the reason why it cannot -----------------


def mask_of(problem, q, k):
    """Whether a query sees a key, by their numbers: for masks that are functions."""
    offset, window = k.shape[1] - q.shape[1], problem["window"]
    left, right = window if window else (None, 0 if problem["causal"] else None)
    sequence = None
    if problem["starts"]:
        starts = torch.tensor(problem["starts"][1:], device=DEVICE)
        sequence = torch.searchsorted(starts, torch.arange(q.shape[1], device=DEVICE), right=True)

    def seen(b, h, i, j):
        known = j >= 0
        if left is not None:
            known = known & (j >= i + offset - left)
        if right is not None:
            known = known & (j <= i + offset + right)
        if sequence is not None:
            known = known & (sequence[i] == sequence[j])
        return known

    return None if sequence is None and left is None and right is None else seen


def plain(problem):
    """An error if it is packed or has a window."""
    if problem["starts"]:
        raise RuntimeError("packed sequences are not served through this call")
    if problem["window"]:
        raise RuntimeError("windows are not served through this call")


def starts_of(problem):
    """Where packed sequences begin, twice, and the longest, twice."""
    starts = problem["starts"]
    longest = max(b - a for a, b in zip(starts, starts[1:]))
    starts = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    return starts, starts, longest, longest


def fa2(q, k, v, problem):
    if not problem["starts"] and not problem["window"]:
        return sdpa("FLASH_ATTENTION")(q, k, v, problem)
    # What PyTorch's own call has no words for, its operator has.
    starts, longest = (None, None), (q.shape[1], k.shape[1])
    tensors = (q, k, v)
    if problem["starts"]:
        *starts, longest_q, longest_k = starts_of(problem)
        longest, tensors = (longest_q, longest_k), (q[0], k[0], v[0])
    sides = {}
    if problem["window"]:
        names = ("window_size_left", "window_size_right")
        sides = {name: -1 if side is None else side for name, side in zip(names, problem["window"])}

    def call():
        return torch.ops.aten._flash_attention_forward(
            *tensors, *starts, *longest, 0.0, problem["causal"], False, scale=problem["scale"], **sides
        )[0]

    return call, lambda out: (out.view(q.shape[0], q.shape[1], q.shape[2], -1), None)


def sdpa(backend):
    def make(q, k, v, problem):
        plain(problem)
        from torch.nn.attention import SDPBackend, sdpa_kernel

        qt, kt, vt = [x.transpose(1, 2) for x in (q, k, v)]
        which, grouped = getattr(SDPBackend, backend), q.shape[2] != k.shape[2]
        if problem["causal"] and q.shape[1] != k.shape[1]:
            raise RuntimeError("PyTorch's causal mask is aligned to the first key, not to the last")

        def call():
            with sdpa_kernel(which):
                return F.scaled_dot_product_attention(
                    qt, kt, vt, is_causal=problem["causal"], scale=problem["scale"], enable_gqa=grouped
                )

        return call, lambda out: (out.transpose(1, 2), None)

    return make


def fa3(q, k, v, problem):
    if q.dtype not in (torch.bfloat16, EIGHT_BITS):
        raise RuntimeError("the wheel has bf16 and e4m3 alone")
    sys.path.insert(0, os.environ.get("FA3", "fa3"))
    import fa3_fwd_interface as interface

    window = tuple(-1 if side is None else side for side in problem["window"] or (None, None))
    if problem["starts"]:
        bounds = starts_of(problem)

        def call():
            return interface.flash_attn_varlen_func(
                q[0], k[0], v[0], *bounds, softmax_scale=problem["scale"], causal=problem["causal"], window_size=window
            )

        return call, lambda out: ((out[0] if isinstance(out, tuple) else out)[None], None)

    # Zero leaves the number of parts to its own rule; one is what it takes unless asked.
    splits = 0 if problem["query_length"] * problem["heads"] <= 64 * problem["kv_heads"] else 1

    def call():
        return interface.flash_attn_func(
            q, k, v, softmax_scale=problem["scale"], causal=problem["causal"], window_size=window, num_splits=splits
        )

    return call, lambda out: (out[0] if isinstance(out, tuple) else out, None)


def fa4_path():
    folder = os.environ.get("FA4", "fa4")
    sys.path[:0] = [folder, os.path.join(folder, "nvidia_cutlass_dsl", "dsl_packages")]


def fa4(q, k, v, problem):
    fa4_path()
    from flash_attn.cute import interface

    options = dict(
        softmax_scale=problem["scale"], causal=problem["causal"], window_size=tuple(problem["window"] or (None, None))
    )
    if problem["starts"]:
        starts, _, longest, _ = starts_of(problem)
        bounds = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest)

        def call():
            return interface.flash_attn_varlen_func(q[0], k[0], v[0], **bounds, **options)

        return call, lambda out: ((out[0] if isinstance(out, tuple) else out)[None], None)

    def call():
        return interface.flash_attn_func(q, k, v, **options)

    return call, lambda out: (out[0] if isinstance(out, tuple) else out, None)


def flex(q, k, v, problem):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    qt, kt, vt = [x.transpose(1, 2) for x in (q, k, v)]
    seen, mask = mask_of(problem, q, k), None
    if seen:
        mask = create_block_mask(seen, None, None, q.shape[1], k.shape[1], device=DEVICE)
    compiled = torch.compile(flex_attention, dynamic=False)

    def call():
        return compiled(qt, kt, vt, block_mask=mask, scale=problem["scale"], enable_gqa=q.shape[2] != k.shape[2])

    return call, lambda out: (out.transpose(1, 2), None)


def mosaic(q, k, v, problem):
    plain(problem)
    import jax
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    if not math.isclose(problem["scale"], 1.0 / math.sqrt(q.shape[-1]), rel_tol=1e-6):
        raise RuntimeError("its scale is fixed")
    config = attention_mgpu.TuningConfig(
        block_q=64,
        block_kv=128 if q.shape[-1] <= 128 else 64,
        max_concurrent_steps=2,
        use_schedule_barrier=True,
        causal=problem["causal"],
    )
    arrays = [jax.dlpack.from_dlpack(x) for x in (q, k, v)]

    def call():
        return jax.block_until_ready(attention_mgpu.attention(*arrays, config))

    call.host_clock = True
    return call, lambda out: (torch.from_dlpack(out), None)


PEERS = {
    "cudnn": sdpa("CUDNN_ATTENTION"),
    "fa2": fa2,
    "efficient": sdpa("EFFICIENT_ATTENTION"),
    "fa3": fa3,
    "fa4": fa4,
    "flex": flex,
    "jax": mosaic,
}


# ---- the backward pass: each makes a call that is prepared anew for new contents ---------------------


def packed_flash(q, k, v, problem):
    """FlashAttention-2 over packed sequences, as PyTorch's operator has it: outputs, log-sum-exps and more."""
    return torch.ops.aten._flash_attention_forward(
        q, k, v, *starts_of(problem), 0.0, problem["causal"], False, scale=problem["scale"]
    )


def packed_lse(lse, starts):
    """Log-sum-exps over (head, row), which some releases pad to the longest sequence."""
    if lse.dim() == 2:
        return lse
    return torch.cat([lse[i, :, : b - a] for i, (a, b) in enumerate(zip(starts, starts[1:]))], dim=1)


class Gradients:
    """What the backward pass is given, and where ours puts what it finds."""

    def __init__(self, q, k, v, problem):
        if problem["window"]:
            raise RuntimeError("windows are not served through this call")
        self.inputs, self.problem = (q, k, v), problem
        self.out = torch.empty([*q.shape[:3], v.shape[3]], device=DEVICE, dtype=q.dtype)
        self.lse = torch.empty([q.shape[0], q.shape[2], q.shape[1]], device=DEVICE, dtype=torch.float32)
        self.gradient = torch.empty_like(self.out)

    def refill(self):
        """New contents."""
        for tensor in (*self.inputs, self.gradient):
            tensor.normal_()

    def renew(self):
        """New contents, and the forward pass over them."""
        self.refill()
        q, k, v = [x.transpose(1, 2) for x in self.inputs]
        group = q.shape[1] // k.shape[1]
        k, v = [x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v)]
        if self.problem["starts"]:
            found = packed_flash(*[x.squeeze(0).transpose(0, 1) for x in (q, k, v)], self.problem)
            self.out.copy_(found[0][None]), self.lse.copy_(packed_lse(found[1], self.problem["starts"])[None])
            return
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, self.problem["causal"], scale=self.problem["scale"]
        )
        self.out.copy_(found[0].transpose(1, 2)), self.lse.copy_(found[1])

    def ours(self, job):
        """A kernel of ours over these tensors, what it finds, and what it writes: in a step, which has the
        forward pass before it, its own output and log-sum-exps too."""
        found, step = [torch.empty_like(x) for x in self.inputs], bool(job["before"])
        out, lse = (torch.empty_like(self.out), torch.empty_like(self.lse)) if step else (self.out, self.lse)
        names = ("query", "key", "value")
        tensors = dict(zip(names, self.inputs), output=out, lse=lse, output_gradient=self.gradient)
        tensors.update({f"{name}_gradient": tensor for name, tensor in zip(names, found)})
        backward = Kernel(job, tensors)
        if not step:
            return backward, found, found
        forward = Kernel(dict(launches=job["before"]), tensors)

        def call():
            forward(), backward()

        return call, found, [*found, out, lse]

    def peer_step(self, forward):
        """A peer's forward pass and its gradients in one call."""
        leaves = [x.detach().requires_grad_() for x in self.inputs]

        def call():
            with torch.enable_grad():
                out = forward(*leaves)
                return torch.autograd.grad(out[0] if isinstance(out, tuple) else out, leaves, self.gradient)

        return call

    def peer(self, forward):
        """A peer's call, and what makes it ready: its own forward pass."""
        leaves = [x.detach().requires_grad_() for x in self.inputs]
        state = {}

        def prepare():
            with torch.enable_grad():
                out = forward(*leaves)
            state["out"] = out[0] if isinstance(out, tuple) else out

        def call():
            return torch.autograd.grad(state["out"], leaves, self.gradient, retain_graph=True)

        return call, prepare


def differentiable(peer, problem):
    """The forward pass of a peer, over tensors that gradients are wanted of."""
    if peer == "fa4":
        fa4_path()
        from flash_attn.cute import interface

        if problem["starts"]:
            starts, _, longest, _ = starts_of(problem)
            bounds = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest)

            def packed(q, k, v):
                out = interface.flash_attn_varlen_func(
                    *[x.squeeze(0) for x in (q, k, v)],
                    **bounds,
                    softmax_scale=problem["scale"],
                    causal=problem["causal"],
                )
                return (out[0] if isinstance(out, tuple) else out).unsqueeze(0)

            return packed
        return lambda q, k, v: interface.flash_attn_func(
            q, k, v, softmax_scale=problem["scale"], causal=problem["causal"]
        )
    backends = {"cudnn": "CUDNN_ATTENTION", "fa2": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
    if peer not in backends:
        raise RuntimeError("it has no backward pass here")
    if problem["starts"] and peer == "fa2":
        return lambda q, k, v: packed_flash(*[x.squeeze(0) for x in (q, k, v)], problem)[0].unsqueeze(0)
    plain(problem)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    which = getattr(SDPBackend, backends[peer])

    def forward(q, k, v):
        if problem["causal"] and q.shape[1] != k.shape[1]:
            raise RuntimeError("PyTorch's causal mask is aligned to the first key, not to the last")
        with sdpa_kernel(which):
            out = F.scaled_dot_product_attention(
                *[x.transpose(1, 2) for x in (q, k, v)],
                is_causal=problem["causal"],
                scale=problem["scale"],
                enable_gqa=q.shape[2] != k.shape[2],
            )
        return out.transpose(1, 2)

    return forward


class GradientsTruth:
    """f64 gradients of the first and the last key head, and the plain algorithm in low precision."""

    ROWS = 1024

    def __init__(self, given):
        q, k, v = given.inputs
        self.ends = [(0, 0), (q.shape[0] - 1, k.shape[2] - 1)]
        self.exact, self.tolerance = [], 0.0
        for b, h in self.ends:
            exact = self.of_head(given, b, h, torch.float64, None)
            low = self.of_head(given, b, h, torch.float32, q.dtype)
            # Each gradient has an error of its own to be measured by.
            bounds = [
                2 * (x - y.double()).abs().max().item() + torch.finfo(q.dtype).eps * x.abs().max().item()
                for x, y in zip(exact, low)
            ]
            self.exact.append((exact, bounds))
        self.tolerance = max(bound for _, bounds in self.exact for bound in bounds)

    def of_head(self, given, b, h, wide, narrow):
        """The gradients of a group's queries, of its keys and of its values."""
        q, k, v = given.inputs
        group = q.shape[2] // k.shape[2]
        heads = slice(h * group, (h + 1) * group)
        rounded = (lambda x: x) if narrow is None else (lambda x: x.to(narrow).to(wide))
        keys, values, scale = k[b, :, h].to(wide), v[b, :, h].to(wide), given.problem["scale"]
        queries, go = q[b, :, heads].to(wide), given.gradient[b, :, heads].to(wide)
        dq, dk, dv = torch.zeros_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
        positions, seen = torch.arange(k.shape[1], device=DEVICE), mask_of(given.problem, q, k)
        for head in range(group):
            for first in range(0, q.shape[1], self.ROWS):
                rows = slice(first, min(first + self.ROWS, q.shape[1]))
                scores = queries[rows, head] @ keys.T * scale
                if seen:
                    at = torch.arange(rows.start, rows.stop, device=DEVICE)[:, None]
                    scores.masked_fill_(~seen(b, h, at, positions[None]), float("-inf"))
                p = scores.softmax(-1).nan_to_num(0.0)
                out = rounded(rounded(p) @ values)
                ds = p * (go[rows, head] @ values.T - (go[rows, head] * out).sum(-1, keepdim=True))
                dv += rounded(p).T @ go[rows, head]
                dq[rows, head] = rounded(ds) @ keys * scale
                dk += rounded(ds).T @ queries[rows, head] * scale
        return rounded(dq), rounded(dk), rounded(dv)

    def judge(self, found):
        """The largest error, and whether all is right."""
        dq, dk, dv = found
        group, worst, right = dq.shape[2] // dk.shape[2], 0.0, all(bool(torch.isfinite(x).all()) for x in found)
        for (b, h), (exact, bounds) in zip(self.ends, self.exact):
            mine = (dq[b, :, h * group : (h + 1) * group], dk[b, :, h], dv[b, :, h])
            for tensor, truth, bound in zip(mine, exact, bounds):
                error = (tensor.double() - truth).abs().max().item()
                worst, right = max(worst, error), right and error <= bound
        return worst, right


# ---- what is right --------------------------------------------------------------------------------------


class Truth:
    """f64 attention of some rows of the first and the last head, and the plain algorithm in low precision."""

    def __init__(self, q, k, v, problem):
        self.rows = torch.randint(0, q.shape[1], (64,), device=DEVICE)
        self.exact, self.lse, self.baseline, self.eight_bits = [], [], [], q.dtype == EIGHT_BITS
        group = q.shape[2] // k.shape[2]
        for b, h in ((0, 0), (q.shape[0] - 1, q.shape[2] - 1)):
            keys, values = k[b, :, h // group].double(), v[b, :, h // group].double()
            scores = (q[b, self.rows, h].double() @ keys.T) * problem["scale"]
            seen = mask_of(problem, q, k)
            if seen:
                keys_there = torch.arange(k.shape[1], device=DEVICE)[None]
                scores.masked_fill_(~seen(b, h, self.rows[:, None], keys_there), float("-inf"))
            lse = scores.logsumexp(-1)
            self.lse.append(lse)
            self.exact.append(torch.where(lse[:, None] == float("-inf"), 0.0, (scores - lse[:, None]).exp()) @ values)
            wide = DTYPES[problem["output"]]
            if self.eight_bits:
                # Weights of 8 bits, lifted as far as their element allows; sums of the rounded ones.
                low = (scores - scores.amax(-1, keepdim=True)).exp().nan_to_num(0.0).float()
                low = (low * 256.0).to(q.dtype).float()
                low = low / low.sum(-1, keepdim=True).clamp_min(1e-30)
            else:
                low = scores.to(wide).float().softmax(-1).nan_to_num(0.0).to(wide)
            self.baseline.append((low.float() @ values.float()).to(wide).double())
        difference = max((a - b).abs().max().item() for a, b in zip(self.exact, self.baseline))
        largest = max(a.abs().max().item() for a in self.exact)
        self.tolerance = 2 * difference + torch.finfo(wide).eps * largest

    def judge(self, out, lse):
        """The largest error, and whether all is right."""
        ends = [(0, 0), (-1, -1)]
        error = max(
            (out[b, self.rows, h].double() - exact).abs().max().item() for (b, h), exact in zip(ends, self.exact)
        )
        right = error <= self.tolerance and bool(torch.isfinite(out).all())
        if lse is not None:
            for (b, h), exact in zip(ends, self.lse):
                found = lse[b, h, self.rows].double()
                off = torch.where(found == exact, 0.0, (found - exact).abs()).max().item()
                # The tensor cores cut the products of 8-bit numbers that scores are sums of.
                lost = 2.0**-10 if self.eight_bits else 2.0**-16
                right = right and off <= lost * max(1.0, exact[torch.isfinite(exact)].abs().max().item())
        return error, right


# ---- measuring ------------------------------------------------------------------------------------------


class Sampler:
    """Takes samples of one candidate."""

    def __init__(self, call, poison, calls, captured=False):
        """`poison` makes a call ready, so that what it gives is its own."""
        self.call, self.poison, self.calls, self.graph = call, poison, calls, None
        if calls > 1 or captured:
            side = torch.cuda.Stream()
            # The zeros of workspaces are written on the current stream.
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                call(), call()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                for _ in range(calls):
                    self.out = call()

    def run(self):
        if self.graph is None:
            return self.call()
        self.graph.replay()
        return self.out

    def sample(self, flush, cold):
        """Two marks around a call, or milliseconds; and what the call gave."""
        self.poison()
        if cold:
            flush()
        else:
            self.run()
        if getattr(self.call, "host_clock", False):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            out = self.run()
            return (time.perf_counter() - begun) * 1e3, out
        torch.cuda._sleep(HEAD_START)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        out = self.run()
        end.record()
        return (start, end), out

    def milliseconds(self, mark):
        elapsed = mark if isinstance(mark, float) else mark[0].elapsed_time(mark[1])
        return elapsed / self.calls


def forward_samplers(job, index, inputs, problem):
    """Everybody who serves a problem, what each finds, and why the others do not."""
    (q, k, v), samplers, results, refused = inputs, {}, {}, {}
    for ours in job["cells"][index]["ours"]:
        out = torch.empty([*q.shape[:3], problem["value_head_dim"]], device=DEVICE, dtype=DTYPES[problem["output"]])
        lse = torch.empty([q.shape[0], q.shape[2], q.shape[1]], device=DEVICE, dtype=torch.float32)
        kernel = Kernel(ours, dict(query=q, key=k, value=v, output=out, lse=lse))

        def poison(out=out, lse=lse):
            out.fill_(float("nan")), lse.fill_(float("nan"))

        samplers[ours["name"]] = Sampler(kernel, poison, job["calls"])
        results[ours["name"]] = lambda _, out=out, lse=lse: (out, lse)
    for name, peer in job["peers"].items():
        try:
            call, results[name] = PEERS[peer](q, k, v, problem)
            call()
            torch.cuda.synchronize()
            samplers[name] = Sampler(call, lambda: None, job["calls"])
        except Exception as error:
            refused[name] = (str(error).strip() or repr(error)).splitlines()[0]
    return samplers, results, refused


def backward_samplers(job, index, inputs, problem):
    """The same for gradients, and what they are given."""
    given, samplers, results, refused = Gradients(*inputs, problem), {}, {}, {}
    given.renew()
    captured = job["step"] and problem["query_length"] <= SHORT
    for ours in job["cells"][index]["ours"]:
        kernel, found, written = given.ours(ours)

        def poison(written=written):
            for tensor in written:
                tensor.fill_(float("nan"))

        samplers[ours["name"]] = Sampler(kernel, poison, job["calls"], captured)
        results[ours["name"]] = lambda _, found=found: (found,)
    for name, peer in job["peers"].items():
        try:
            forward = differentiable(peer, problem)
            if job["step"]:
                call, prepare = given.peer_step(forward), lambda: None
            else:
                call, prepare = given.peer(forward)
            prepare(), call()
            torch.cuda.synchronize()
            samplers[name] = Sampler(call, prepare if job["calls"] == 1 else lambda: None, job["calls"], captured)
            results[name] = lambda found: (found,)
        except Exception as error:
            refused[name] = (str(error).strip() or repr(error)).splitlines()[0]
    return given, samplers, results, refused


def normal(shape, dtype):
    """Standard normal numbers, rounded where there are none of the type."""
    wide = torch.bfloat16 if dtype == EIGHT_BITS else dtype
    return torch.randn(shape, device=DEVICE, dtype=wide).to(dtype)


def refill(tensor):
    """New contents."""
    if tensor.dtype == EIGHT_BITS:
        tensor.copy_(normal(tensor.shape, tensor.dtype))
    else:
        tensor.normal_()


def cell(job, index, flush, chance):
    problem = job["cells"][index]["problem"]
    dtype = DTYPES[problem["dtype"]]
    shape = [problem["batch"], problem["query_length"], problem["heads"], problem["head_dim"]]
    keys = [problem["batch"], problem["key_length"], problem["kv_heads"], problem["head_dim"]]
    q, k = normal(shape, dtype), normal(keys, dtype)
    v = normal([*keys[:3], problem["value_head_dim"]], dtype)
    if problem["pass"] == "backward":
        given, samplers, results, refused = backward_samplers(job, index, (q, k, v), problem)
        renew, truth_of = given.refill if job["step"] else given.renew, lambda: GradientsTruth(given)
    else:
        samplers, results, refused = forward_samplers(job, index, (q, k, v), problem)
        renew, truth_of = lambda: [refill(tensor) for tensor in (q, k, v)], lambda: Truth(q, k, v, problem)
    names = [name for name in job["order"] if name in samplers]
    for cache in job["caches"]:
        marks = {name: [] for name in names}
        checked, judged = WARM_UP + chance.randrange(job["rounds"]), {}
        for turn in range(WARM_UP + job["rounds"]):
            # A graph of a backward pass alone holds what its forward pass has left.
            if job["calls"] == 1 or job["step"] or problem["pass"] == "forward":
                renew()
            for name in names if turn % 2 else names[::-1]:
                mark, out = samplers[name].sample(flush, cache == "cold")
                if turn >= WARM_UP:
                    marks[name].append(mark)
                if turn == checked:
                    torch.cuda.synchronize()
                    if not judged:
                        truth = truth_of()
                    error, right = truth.judge(*results[name](out))
                    judged[name] = dict(
                        error=error if math.isfinite(error) else None, tolerance=truth.tolerance, right=right
                    )
                del out
        torch.cuda.synchronize()
        times = {name: [samplers[name].milliseconds(mark) for mark in marks[name]] for name in names}
        say(event="cell", index=index, cache=cache, milliseconds=times, judged=judged, refused=refused)


class Flush:
    """Empties the second-level cache and leaves nothing in it that a call would have to write back, as
    `subject/flush.rs` has it."""

    def __init__(self, size):
        self.written = torch.empty(size, dtype=torch.int8, device=DEVICE)
        self.read = torch.zeros(size // 4, dtype=torch.float32, device=DEVICE)

    def __call__(self):
        self.written.zero_()
        self.read.sum()


def versions():
    found = {"python": sys.version.split()[0], "torch": torch.__version__, "CUDA of torch": str(torch.version.cuda)}
    try:
        found["cuDNN"] = str(torch.backends.cudnn.version())
    except Exception:
        pass
    for package in ("fa3-fwd", "flash-attn-4", "jax"):
        try:
            from importlib.metadata import version

            found[package] = version(package)
        except Exception:
            pass
    return found


def main():
    job = json.load(open(sys.argv[1]))
    torch.manual_seed(job["seed"])
    torch.zeros(1, device=DEVICE)  # makes the context that cubins are loaded into
    say(event="begin", versions=versions())
    flush = Flush(job["flush_bytes"])
    chance = random.Random(job["seed"])
    for index in range(len(job["cells"])):
        try:
            cell(job, index, flush, chance)
        except Exception as error:
            say(event="failed", index=index, reason=(str(error).strip() or repr(error)).splitlines()[0])
    say(event="end")


if __name__ == "__main__":
    main()
