"""Packages of AOTInductor's: exported, compiled, loaded back and run, in a process of its own."""

import os
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from conftest import devices  # noqa: E402

MODEL = """
import sys, torch
import flashcore

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(32, 3 * 32)

    def forward(self, x, starts, sinks):
        q, k, v = (it.view(-1, 2, 16) for it in self.linear(x).chunk(3, -1))
        if %(ours)r:
            # Views of one tensor, lists, and parameters that require grad: all an operator can have.
            rows = flashcore.flash_attn_varlen_func(q, k, v, starts, starts, 4, 4, causal=True, s_aux=sinks)
            return flashcore.flash_attn_func(rows[None], k[None], v[None]).view(-1, 32)
        return torch.bmm(q, k.transpose(1, 2)).view(-1, 4)

torch.manual_seed(0)
model = Layer().to(%(device)r, torch.bfloat16)
x = torch.randn(7, 32, device=%(device)r, dtype=torch.bfloat16)
inputs = (x, torch.tensor([0, 3, 7], device=%(device)r, dtype=torch.int32), torch.randn(2, device=%(device)r))
"""
MAKE = """
program = torch.export.export(model, inputs)
assert torch.equal(program.module()(*inputs), model(*inputs))
quick = {"aot_inductor.compile_wrapper_opt_level": "O0"}
torch._inductor.aoti_compile_and_package(program, package_path=%(path)r, inductor_configs=quick)
"""
LOAD = """
package = torch._inductor.aoti_load_package(%(path)r)
print("loaded", flush=True)
out, expected = package(*inputs), model(*inputs)
assert torch.allclose(out.float(), expected.float(), atol=2e-2), (out - expected).abs().max()
print("run", flush=True)
"""


def step(script, **values):
    """What a script says, and how its process ended."""
    path = os.pathsep.join((os.path.dirname(__file__), *filter(None, sys.path)))
    command = [sys.executable, "-X", "faulthandler", "-c", (MODEL + script) % values]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    return done.stdout, f"ended with {done.returncode}\n{done.stderr}"


@pytest.mark.parametrize("device", devices())
def test_packages_are_loaded_and_run(device, tmp_path):
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("AOTInductor needs a C++ compiler")
    if device == "cpu" and "FLASHCORE_PACKAGES" not in os.environ:
        pytest.skip("FLASHCORE_PACKAGES is not set: the C++ compiler takes half a minute")
    values = {"device": device, "path": str(tmp_path / "ours.pt2"), "ours": True}
    said, log = step(MAKE + LOAD, **values)
    if said.split() == ["loaded", "run"]:
        return
    # Whose fault: the same without an operator of ours.
    plain = {**values, "path": str(tmp_path / "plain.pt2"), "ours": False}
    said, why = step(MAKE + LOAD, **plain)
    if said.split() != ["loaded", "run"]:
        pytest.skip(f"AOTInductor does not run a package without our operators either: it {why[-600:]}")
    pytest.fail(f"a package with our operators {log}")
