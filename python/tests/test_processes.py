"""Forks, signals and threads: each in a process of its own, which must end."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

BEGIN = """
import multiprocessing, os, signal, sys, threading, time
import numpy as np
import flashcore
from flashcore import *

def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)

ARRAYS = [random(2, 150, 2, 16, seed=seed) for seed in range(3)]

def attend(_=None):
    return flash_attn_func(*ARRAYS, causal=True)

def pool(work, count=4):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(work, range(count))

class OnGpu:
    '''What says that it is on a GPU.'''
    dtype, shape = np.dtype(np.float32), (1, 16, 2, 32)
    def __dlpack_device__(self):
        return 2, 0
    def __dlpack__(self, **arguments):
        raise AssertionError("asked for a capsule")

def use_gpu(_=None):
    try:
        flash_attn_func(OnGpu(), OnGpu(), OnGpu())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


def environment():
    """That of a process with the packages that are used here."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def python(*arguments, folder=Path(__file__).parent):
    """Runs Python to its end, which must be a good one, with the packages that are used here."""
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=600, cwd=folder, env=environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr


# Half of the seconds of a process are PyTorch's, which is imported where it is installed.
WITHOUT_TORCH = "import sys\nsys.modules['torch'] = None\n"


def run(script):
    """Runs a script."""
    python("-c", BEGIN + textwrap.dedent(script))


def run_without_torch(script):
    """Runs a script that is about arrays and has no use for PyTorch, nor for its threads."""
    python("-c", WITHOUT_TORCH + BEGIN + textwrap.dedent(script))


def test_importing_starts_no_thread_and_looks_for_no_device():
    script = """
    import os, sys
    import numpy
    try:
        import torch
    except ImportError:
        pass
    threads = lambda: set(os.listdir("/proc/self/task"))
    libraries = lambda: {line.split()[-1] for line in open("/proc/self/maps") if "libcuda.so" in line}
    before, there = threads(), libraries()
    import flashcore
    assert flashcore.__version__
    assert threads() <= before, "importing started a thread"
    assert libraries() == there, "importing opened the driver"
    """
    python("-c", textwrap.dedent(script))


def test_importing_leaves_pytorchs_compiler_alone():
    """It takes seconds to import, some 40 times as long as this package."""
    pytest.importorskip("torch")
    modules = "flashcore, flashcore.distributed, flashcore.flash_attn, flashcore.torch"
    python("-c", f"import sys, torch, {modules}\nassert 'torch._dynamo' not in sys.modules")


@pytest.mark.parametrize("used_before", [False, True], ids=["unused", "used"])
def test_forked_processes_compute(used_before):
    run(
        f"""
        if {used_before}:
            attend()
            flashcore.info()
        found = pool(attend)
        expected = attend()
        assert all(np.array_equal(one, expected) for one in found)
        # Children of children, and another generation after the parent went on.
        def nested(_):
            attend()
            child = os.fork()
            if child == 0:
                os._exit(0 if np.array_equal(attend(), expected) else 1)
            return os.waitpid(child, 0)[1]
        assert [nested(0) for _ in range(2)] == [0, 0]
        assert all(np.array_equal(one, expected) for one in pool(attend))
        """
    )


def test_forks_in_the_middle_of_calls_compute():
    run(
        """
        expected = attend()
        stop = threading.Event()
        def work():
            while not stop.is_set():
                attend()
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(30):
            child = os.fork()
            if child == 0:
                flash_attn_func(*ARRAYS)
                os._exit(0 if np.array_equal(attend(), expected) else 1)
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        """
    )


def test_a_forked_process_ends_like_any_other():
    run(
        """
        attend()
        child = os.fork()
        attend()
        if child == 0:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """
    )


def test_a_gpu_that_was_used_before_a_fork_is_refused():
    run_without_torch(
        """
        def info_of(_):
            return flashcore.info()
        # Whoever has not called the driver may do so on both sides of a fork.
        assert "fork" not in pool(use_gpu, 1)[0]
        flashcore.info()
        [error] = pool(use_gpu, 1)
        assert error.startswith("RuntimeError: the GPU cannot be used here: CUDA was used before this"), error
        assert "spawn" in error
        [info] = pool(info_of, 1)
        assert "CUDA was used before this process was forked" in info["no_gpu"] and info["gpus"] == []
        assert len(pool(attend, 1)) == 1
        """
    )


@pytest.mark.gpu
@pytest.mark.hardware
def test_a_gpu_that_was_opened_before_a_fork_is_refused():
    run(
        """
        import torch
        tensors = [torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        flash_attn_func(*tensors)
        torch.cuda.synchronize()
        def child(_):
            try:
                flash_attn_func(*tensors)
            except RuntimeError as error:
                return str(error)
        [error] = pool(child, 1)
        assert "CUDA was used before this process was forked" in error, error
        assert len(pool(attend, 1)) == 1
        flash_attn_func(*tensors)
        """
    )


CALLS = {
    "flash_attn_func": "flash_attn_func(long, long, long)",
    "few queries": "flash_attn_func(long[:, :1], many, many)",
    "scaled_dot_product_attention": "scaled_dot_product_attention(*[long.transpose(0, 2, 1, 3)] * 3)",
    "flash_attn_varlen_func": "flash_attn_varlen_func(long[0], long[0], long[0], cu, cu, 1 << 17, 1 << 17)",
    "flash_attn_with_kvcache": "flash_attn_with_kvcache(long, long, long, cache_seqlens=1 << 17)",
    "flash_attn_combine": "flash_attn_combine(parts, sums)",
}

LONG = """
long = np.broadcast_to(np.ones(64, np.float32), (1, 1 << 17, 1, 64))
many = np.broadcast_to(np.ones(64, np.float32), (1, 1 << 40, 1, 64))
cu = np.array([0, 1 << 17], np.int32)
parts = np.broadcast_to(np.ones(8, np.float32), (1 << 12, 1, 1 << 14, 1, 8))
sums = np.broadcast_to(np.float32(0), (1 << 12, 1, 1 << 14, 1))
"""


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_long_call_can_be_interrupted(call):
    # Not from Python's own handler alone. What counts is the time of all processors, which a machine that is busy
    # with other tests does not lengthen: 0.4 s until the signal and half a second until the exception.
    run_without_torch(
        LONG
        + f"""
attend()
signal.setitimer(signal.ITIMER_REAL, 0.4)
signal.signal(signal.SIGALRM, signal.default_int_handler)
begin = time.process_time()
try:
    {call}
except KeyboardInterrupt:
    used = time.process_time() - begin
else:
    raise SystemExit("the call ended, and should have taken longer")
assert used < 0.9 * os.cpu_count(), used
assert np.array_equal(attend(), attend())
"""
    )


def test_a_signal_that_is_handled_does_not_end_a_call():
    run_without_torch(
        LONG
        + """
seen = []
signal.signal(signal.SIGALRM, lambda *_: seen.append(time.monotonic()))
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
begin = time.monotonic()
output = flash_attn_func(long[:, : 1 << 14], long[:, : 1 << 14], long[:, : 1 << 14])
end = time.monotonic()
signal.setitimer(signal.ITIMER_REAL, 0)
assert np.allclose(output, 1)
# They were seen while it ran, if it ran for long.
assert end - begin < 0.3 or any(moment < end - 0.05 for moment in seen)
"""
    )


def test_threads_wait_without_python():
    """Others run meanwhile."""
    run_without_torch(
        LONG
        + """
def work():
    flash_attn_func(long[:, : 1 << 13], long[:, : 1 << 13], long[:, : 1 << 13])
thread = threading.Thread(target=work)
thread.start()
steps = 0
while thread.is_alive():
    steps += 1
    time.sleep(0.001)
assert steps > 3, steps
"""
    )


def test_the_tests_run_in_any_folder():
    tests = Path(__file__).parent
    # As `python -m pytest` does: the current folder comes first.
    script = WITHOUT_TORCH + "import pytest\nsys.exit(pytest.main(sys.argv[1:]))"
    for folder in (tests, tests.parent, tests.parent.parent):
        python("-c", script, "-q", f"{tests}/test_choices.py", "-k", "strides", folder=folder)
