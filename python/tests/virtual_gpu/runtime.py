"""A CUDA runtime for PyTorch that only manages memory, through whatever driver there is.

PyTorch finds one GPU with it, makes tensors there, copies and frees them. Its kernels do nothing.
"""

import pathlib
import subprocess
import sys

# Everything else of the runtime returns 0 and does nothing.
FUNCTIONS = {
    "__cudaRegisterFatBinary": "void **{}(void *binary) {{ static void *handle; return &handle; }}",
    "cudaGetDeviceCount": "int {}(int *count) {{ driver(); *count = 1; return 0; }}",
    "cudaGetDevice": "int {}(int *device) {{ *device = 0; return 0; }}",
    # What PyTorch reads, where CUDA 13 has it.
    "cudaGetDeviceProperties": """int {}(char *properties) {{
        memset(properties, 0, 512);
        strcpy(properties, "virtual GPU");
        *(size_t *)(properties + 288) = 1ull << 37; /* memory */
        *(int *)(properties + 308) = 32; /* lanes of a warp */
        *(int *)(properties + 320) = 1024; /* threads of a block */
        *(int *)(properties + 360) = 9; /* compute capability */
        *(int *)(properties + 384) = 132; /* multiprocessors */
        return 0;
    }}""",
    "cudaDriverGetVersion": "int {}(int *version) {{ *version = 13000; return 0; }}",
    "cudaMalloc": "int {}(void **to, size_t bytes) {{ *to = 0; return bytes ? driver()->allocate(to, bytes) : 0; }}",
    "cudaFree": "int {}(void *from) {{ return from ? driver()->free(from) : 0; }}",
    "cudaMemcpy": "int {}(void *to, void *from, size_t bytes, int kind) {{ return copy(to, from, bytes, kind); }}",
    "cudaMemcpyAsync": "int {}(void *to, void *from, size_t bytes, int kind) {{ return copy(to, from, bytes, kind); }}",
    "cudaMemset": "int {}(void *to, int byte, size_t bytes) {{ return driver()->set(to, byte, bytes, 0); }}",
    "cudaMemsetAsync": "int {}(void *to, int byte, size_t bytes) {{ return driver()->set(to, byte, bytes, 0); }}",
    "cudaMemGetInfo": "int {}(size_t *free, size_t *all) {{ *free = *all = 1ull << 37; return 0; }}",
    # A millisecond, whatever was done.
    "cudaEventElapsedTime": "int {}(float *milliseconds, void *from, void *to) {{ *milliseconds = 1; return 0; }}",
    "cudaStreamIsCapturing": "int {}(void *stream, int *status) {{ *status = 0; return 0; }}",
    "cudaStreamGetCaptureInfo": "int {}(void *stream, int *status) {{ *status = 0; return 0; }}",
    "cudaGetErrorString": 'const char *{}(int code) {{ return "an error of the driver"; }}',
    "cudaGetErrorName": 'const char *{}(int code) {{ return "unknown"; }}',
}

DRIVER = """
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

typedef int (*function)();
struct driver { function allocate, free, to_device, to_host, on_device, set, retain, bind; };

/* The driver's functions, with the context bound to this thread. */
static struct driver *driver(void) {
    static struct driver it;
    static __thread int is_bound;
    if (!it.bind) {
        void *library = dlopen("libcuda.so.1", RTLD_NOW);
        ((function)dlsym(library, "cuInit"))(0);
        it.allocate = (function)dlsym(library, "cuMemAlloc_v2");
        it.free = (function)dlsym(library, "cuMemFree_v2");
        it.to_device = (function)dlsym(library, "cuMemcpyHtoDAsync_v2");
        it.to_host = (function)dlsym(library, "cuMemcpyDtoHAsync_v2");
        it.on_device = (function)dlsym(library, "cuMemcpyDtoDAsync_v2");
        it.set = (function)dlsym(library, "cuMemsetD8Async");
        it.retain = (function)dlsym(library, "cuDevicePrimaryCtxRetain");
        it.bind = (function)dlsym(library, "cuCtxSetCurrent");
    }
    if (!is_bound) {
        void *context;
        is_bound = 1;
        it.retain(&context, 0);
        it.bind(context);
    }
    return &it;
}

static int copy(void *to, void *from, size_t bytes, int kind) {
    if (!bytes) return 0;
    switch (kind) {
        case 1: return driver()->to_device(to, from, bytes, 0);
        case 2: return driver()->to_host(to, from, bytes, 0);
        case 3: return driver()->on_device(to, from, bytes, 0);
        default: memcpy(to, from, bytes); return 0;
    }
}
"""


def build(folder):
    """Builds the runtime of the installed PyTorch in a folder; returns its path, which LD_PRELOAD takes."""
    # Found and not imported, which would load the real runtime.
    packages = next(path for path in map(pathlib.Path, sys.path) if (path / "torch").is_dir())
    (runtime,) = packages.glob("nvidia/cu*/lib/libcudart.so.*")
    found = subprocess.run(["nm", "-D", "--defined-only", runtime], capture_output=True, text=True, check=True)
    names = {line.split()[-1].partition("@")[0] for line in found.stdout.splitlines() if " T " in line}
    quiet = [f"int {name}(void) {{ return 0; }}" for name in sorted(names - set(FUNCTIONS))]
    functions = [text.format(name) for name, text in FUNCTIONS.items()]
    versions, library = folder / "versions", folder / "runtime.so"
    versions.write_text(f"{runtime.name} {{ global: *; }};")
    # With the name and the version of the real one, in whose place it is loaded.
    options = [f"-Wl,-soname,{runtime.name}", f"-Wl,--version-script={versions}", "-ldl"]
    command = ["cc", "-O2", "-w", "-fPIC", "-shared", "-x", "c", "-", "-o", library, *options]
    subprocess.run(command, input="\n".join([DRIVER, *quiet, *functions]), text=True, check=True)
    return library
