"""Runs pytest with a virtual GPU: `python virtual_gpu LIBRARY [options of pytest]`."""

import os
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from virtual_gpu import runtime

with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    (folder / "libcuda.so.1").symlink_to(pathlib.Path(sys.argv[1]).resolve())
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder),
        "LD_PRELOAD": str(runtime.build(folder)),
        "FLASHCORE_CACHE": str(folder / "cache"),
        # Each tensor is an allocation of its own, of which every access is checked.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "FLASHCORE_TEST_ON": "virtual GPU",
    }
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *sys.argv[2:]]
    sys.exit(os.spawnve(os.P_WAIT, sys.executable, command, environment))
