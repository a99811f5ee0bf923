"""Runs pytest with a virtual GPU: `python virtual_gpu LIBRARY [options of pytest]`; or a program, with
`python virtual_gpu LIBRARY --program FILE [arguments]`."""

import os
import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from virtual_gpu import runtime

library, *arguments = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    (folder / "libcuda.so.1").symlink_to(pathlib.Path(library).resolve())
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder),
        "LD_PRELOAD": str(runtime.build(folder)),
        "FLASHCORE_CACHE": str(folder / "cache"),
        # Each tensor is an allocation of its own, of which every access is checked.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "FLASHCORE_TEST_ON": "virtual GPU",
    }
    if arguments[:1] == ["--program"]:
        command = [sys.executable, str(HERE / "program.py"), *arguments[1:]]
    else:
        command = [sys.executable, "-m", "pytest", "-m", "gpu", *arguments]
    sys.exit(os.spawnve(os.P_WAIT, sys.executable, command, environment))
