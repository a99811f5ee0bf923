"""What the tests share. Those that need PyTorch or a GPU skip themselves where there is none."""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import pytest

# Nothing here is on a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# PyTorch keeps compiled graphs, and finds them by the operators of the forward pass alone: those of another version
# of the package would be taken for this one's.
COMPILED = tempfile.TemporaryDirectory(prefix="flashcore-compiled-")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", COMPILED.name)

# Tensors are small here: PyTorch's threads would spin for each other three times as long as they compute.
# FlashCore has threads of its own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# `python -m pytest` looks in the current folder first. Where that is the folder of the sources, and
# they have no extension module, the installed package is meant.
SOURCES = Path(__file__).parents[1]
if not list((SOURCES / "flashcore").glob("_flashcore*.so")):
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != SOURCES]


# See virtual_gpu/__init__.py.
VIRTUAL = os.environ.get("FLASHCORE_TEST_ON") == "virtual GPU"
if VIRTUAL:
    from virtual_gpu import host_kernels

    HOST_KERNELS = host_kernels.activate()


def pytest_collection_modifyitems(items):
    torch_there = importlib.util.find_spec("torch") is not None
    cuda_there = False
    if torch_there:
        import torch

        cuda_there = torch.cuda.is_available()
    for item in items:
        if "gpu" in item.keywords and not cuda_there:
            item.add_marker(pytest.mark.skip(reason="no GPU that PyTorch can use"))
        if "hardware" in item.keywords and VIRTUAL:
            item.add_marker(pytest.mark.skip(reason="not for a virtual GPU"))


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs PyTorch and an NVIDIA GPU, or a virtual one")
    config.addinivalue_line(
        "markers", "hardware: with a GPU, needs a real one: time, graphs, Triton, other processes, or large problems"
    )


def devices():
    """The devices that one test body runs on."""
    return [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]
