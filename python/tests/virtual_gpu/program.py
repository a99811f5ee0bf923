"""Runs a program with PyTorch's own kernels on the host: `python program.py FILE [arguments]`."""

import pathlib
import runpy
import sys

sys.path[0] = str(pathlib.Path(__file__).parents[1])

from virtual_gpu import host_kernels

HOST_KERNELS = host_kernels.activate()
del sys.path[0], sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
