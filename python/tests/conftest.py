"""What the tests share. Those that need PyTorch or a GPU skip themselves where there is none."""

import importlib.util

import pytest


def pytest_collection_modifyitems(items):
    torch_there = importlib.util.find_spec("torch") is not None
    cuda_there = False
    if torch_there:
        import torch

        cuda_there = torch.cuda.is_available()
    for item in items:
        if "gpu" in item.keywords and not cuda_there:
            item.add_marker(pytest.mark.skip(reason="no GPU that PyTorch can use"))


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs PyTorch and an NVIDIA GPU")


def devices():
    """The devices that one test body runs on."""
    return [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]
