"""How many instructions a call takes on the host, counted without a GPU.

    python3 bench/count_calls.py            # all calls
    python3 bench/count_calls.py flash_attn_func

Callgrind counts what is run between a call from Python and its launch, and until its result is freed. PyTorch
gets a CUDA runtime and FlashCore a driver that do nothing: their memory is the host's, and a launch returns
at once. So a count has all of Python's, PyTorch's and FlashCore's work and none of the driver's. It does not
depend on how fast the machine is, and differs by less than 1 % between runs; how long a call takes is for
`bench/calls.py` to say. Needs valgrind with its headers, a C compiler, and PyTorch as PyPI has it, for CUDA.
"""

import ctypes
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python/tests"))

from virtual_gpu import runtime

CALLS = 200

# An H200 of which a call needs no more.
DRIVER = """
int cuDriverGetVersion(int *version) { *version = 12030; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int bytes, int device) { strncpy(name, "a stub", bytes); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 1ull << 37; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
        case 75: *value = 9; break; /* compute capability 9.0 */
        case 76: *value = 0; break;
        case 16: *value = 132; break; /* multiprocessors */
        case 97: *value = 232448; break; /* shared memory of a block */
        case 81: *value = 233472; break; /* and of a multiprocessor */
        case 38: *value = 50 << 20; break; /* L2 */
        default: *value = 1;
    }
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &cuDeviceGet; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuCtxGetCurrent(void **context) { *context = &cuDeviceGet; return 0; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = malloc(1); return 0; }
int cuStreamGetCaptureInfo_v2(void *stream, int *status) { *status = 0; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = malloc(1); return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = malloc(1); return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 0 ? 1024 : 0; return 0; }
int cuMemAlloc_v2(void **to, size_t bytes) { return posix_memalign(to, 512, bytes); }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks) { *blocks = 1; return 0; }
int cuOccupancyMaxActiveClusters(int *clusters) { *clusters = 66; return 0; }
"""
# These return 0 and do nothing.
QUIET = """
cuInit cuDeviceGetUuid_v2 cuCtxSetCurrent cuFuncSetAttribute cuLaunchKernel cuLaunchKernelEx cuMemFree_v2
cuMemcpyHtoDAsync_v2 cuMemsetD8Async cuMemsetD32Async cuStreamDestroy_v2 cuStreamSynchronize
cuTensorMapEncodeTiled cuThreadExchangeStreamCaptureMode cuGetErrorName cuGetErrorString cuGetProcAddress_v2
cuCtxSynchronize cuFuncSetCacheConfig cuLaunchCooperativeKernel cuLinkAddData_v2 cuLinkComplete cuLinkCreate_v2
cuModuleLoad cuModuleLoadDataEx cuModuleUnload cuPointerGetAttribute
""".split()

COUNTING = """
#include <valgrind/callgrind.h>
void begin_counting(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end_counting(const char *name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""


def build(folder, name, source):
    """Compiles a library into a folder."""
    command = ["cc", "-O2", "-w", "-fPIC", "-shared", "-x", "c", "-", "-o", folder / name]
    subprocess.run(command, input=source, text=True, check=True)


def stubs(folder):
    """Builds the runtime, the driver and what turns counting on and off."""
    runtime.build(folder)
    quiet = "\n".join(f"int {name}(void) {{ return 0; }}" for name in QUIET)
    build(folder, "libcuda.so.1", "#include <stdlib.h>\n#include <string.h>\n" + DRIVER + quiet)
    build(folder, "counting.so", COUNTING)


def count(names):
    """Counts calls in a process under callgrind; prints the instructions of each."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        stubs(folder)
        out = folder / "counts"
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
        paths = {"LD_LIBRARY_PATH": folder, "LD_PRELOAD": folder / "runtime.so", "FLASHCORE_CACHE": folder / "cache"}
        environment = {**os.environ, **{name: str(path) for name, path in paths.items()}, "PYTHONHASHSEED": "0"}
        child = [sys.executable, __file__, "--inside", str(folder), *names]
        run = subprocess.run([*command, *child], env=environment, capture_output=True, text=True)
        if run.returncode:
            sys.exit(run.stdout + run.stderr)
        counts = {}
        for file in sorted(folder.glob("counts.*"), key=lambda file: int(file.suffix[1:])):
            lines = file.read_text().splitlines()
            name = next(line for line in lines if line.startswith("desc: Trigger: ")).rpartition("Trigger: ")[2]
            name = name.rpartition(": ")[2]
            counts[name] = int(next(line for line in lines if line.startswith("summary: ")).split()[1]) / CALLS
    nothing = counts.pop("nothing")
    print(f"{'call':<40} {'instructions':>12}")
    for name, value in counts.items():
        print(f"{name:<40} {value - nothing:12,.0f}")


def inside(folder, names):
    """Runs calls, counting each."""
    import torch
    from flashcore import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, scaled_dot_product_attention

    counting = ctypes.CDLL(f"{folder}/counting.so")

    def make(*sizes, dtype=torch.bfloat16, **options):
        return torch.empty(*sizes, dtype=dtype, device="cuda", **options)

    # The calls of `bench/calls.py`.
    q, k, v = (make(1, 64, 2, 64) for _ in range(3))
    heads_first = [make(1, 2, 64, 64) for _ in range(3)]
    recorded = [make(1, 64, 2, 64, requires_grad=True) for _ in range(3)]
    token, new = make(2, 1, 2, 64), make(2, 1, 2, 64)
    k_cache, v_cache = make(8, 16, 2, 64), make(8, 16, 2, 64)
    lengths, pages, starts = (make(*sizes, dtype=torch.int32) for sizes in ((2,), (2, 4), (3,)))
    decode = {"cache_seqlens": lengths, "page_table": pages, "causal": True}
    rows = [make(64, 2, 64) for _ in range(3)]
    calls = {
        "flash_attn_func": lambda: flash_attn_func(q, k, v, causal=True),
        "flash_attn_func, lse": lambda: flash_attn_func(q, k, v, causal=True, return_attn_probs=True),
        "flash_attn_func, recorded": lambda: flash_attn_func(*recorded, causal=True),
        "flash_attn_varlen_func": lambda: flash_attn_varlen_func(*rows, starts, starts, 40, 40, causal=True),
        "flash_attn_with_kvcache": lambda: flash_attn_with_kvcache(token, k_cache, v_cache, **decode),
        "the same, appending": lambda: flash_attn_with_kvcache(token, k_cache, v_cache, new, new, **decode),
        "scaled_dot_product_attention": lambda: scaled_dot_product_attention(*heads_first, is_causal=True),
        "torch.empty_like": lambda: torch.empty_like(q),
    }
    for name in ["nothing", *(names or calls)]:
        call = calls.get(name, lambda: None)
        with torch.set_grad_enabled("recorded" in name):
            for _ in range(30):
                call()
            counting.begin_counting()
            for _ in range(CALLS):
                call()
            counting.end_counting(name.encode())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2], sys.argv[3:])
    else:
        count(sys.argv[1:])
