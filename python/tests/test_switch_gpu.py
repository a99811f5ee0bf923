"""PyTorch's attention through the switch, on a GPU: a sample of the grid that PyTorch's own tests of its flash back end
walk. Where those are there, the variable PYTORCH_TESTS names their folder and they run too.
"""

import itertools
import os
import random
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
import flashcore.torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

pytestmark = pytest.mark.gpu
GRID = itertools.product(
    (1, 8),  # batch
    (4, 143, 2048),  # queries
    (4, 127, 579, 2048),  # keys
    (8, 64, 72, 128, 203, 256),  # head dim
    (False, True),  # causal
    (torch.float16, torch.bfloat16),
    (None, 0.7),  # scale, over that of the head dim
    (False, True),  # fewer heads of keys
    ("whole", "transposed", "sliced"),  # how tensors lie
)
# A causal mask of PyTorch's flash back end has as many queries as keys.
CASES = [case for case in GRID if not case[4] or case[1] == case[2]]
CASES = random.Random(0).sample(CASES, 96)


@pytest.fixture
def switched():
    """Calls go to FlashCore: what its back end does not take is an error."""
    flashcore.torch.activate()
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        flashcore.torch.restore()


def laid(shape, dtype, how, device="cuda"):
    """A tensor (batch, heads, length, head dim) that requires grad."""
    batch, heads, length, dim = shape
    if how == "transposed":
        made = torch.randn(batch, length, heads, dim, device=device, dtype=dtype).transpose(1, 2)
    elif how == "sliced":
        made = torch.randn(batch, heads, length, 3 * dim + 8, device=device, dtype=dtype)[..., :dim]
    else:
        made = torch.randn(shape, device=device, dtype=dtype)
    return made.detach().requires_grad_()


def plain(q, k, v, causal, scale, dtype):
    """Attention as one would write it, in another type, and what its gradients are of."""
    q, k, v = inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v, inputs


def compare(inputs, causal, scale, call):
    """Errors of the output and of the gradients against float64, at most twice those of the plain algorithm
    in 16 bits."""
    out = call(*inputs)
    dout = torch.randn_like(out)
    found = (out, *torch.autograd.grad(out, inputs, dout))
    answers = []
    for dtype in (inputs[0].dtype, torch.float64):
        other, of = plain(*inputs, causal, scale, dtype)
        answers.append((other, *torch.autograd.grad(other, of, dout.to(dtype))))
    for name, ours, rough, exact in zip(("out", "dq", "dk", "dv"), found, *answers):
        error = lambda it: (it.double() - exact).abs().max().item()  # noqa: B023, E731
        rounding = torch.finfo(ours.dtype).eps * exact.abs().max().item()
        assert error(ours) <= 2 * error(rough) + rounding, f"{name}: {error(ours)} against {error(rough)}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.hardware
def test_a_sample_of_pytorchs_grid(case, switched):
    batch, queries, keys, dim, causal, dtype, factor, groups, how = case
    torch.manual_seed(0)
    shapes = ((batch, 4, queries, dim), *((batch, 2 if groups else 4, keys, dim),) * 2)
    inputs = [laid(shape, dtype, how) for shape in shapes]
    scale = None if factor is None else factor * dim**-0.5
    call = lambda *x: F.scaled_dot_product_attention(*x, is_causal=causal, scale=scale, enable_gqa=groups)  # noqa: E731
    compare(inputs, causal, scale, call)
    last = flashcore.info()["last"]
    assert last["device"].startswith("cuda") and last["problem"].endswith("backward")


def test_what_is_built_on_it(switched):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        128, 4, 256, dropout=0.0, batch_first=True, device="cuda", dtype=torch.bfloat16
    )
    x = torch.randn(2, 50, 128, device="cuda", dtype=torch.bfloat16)
    out = layer(x)
    out.sum().backward()
    assert flashcore.info()["last"]["problem"].endswith("backward")
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.allclose(layer(x).float(), out.float(), atol=5e-2)


@pytest.mark.hardware
def test_graphs_and_the_compiler(switched):
    torch.manual_seed(0)
    inputs = [laid((2, 4, 130, 64), torch.bfloat16, "whole") for _ in range(3)]
    call = lambda *x: F.scaled_dot_product_attention(*x, is_causal=True)  # noqa: E731
    compare(inputs, True, None, torch.compile(call, fullgraph=True))
    with torch.no_grad():
        expected = call(*inputs)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call(*inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(*inputs)
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)


def test_ragged_tensors(switched):
    torch.manual_seed(0)
    parts = [torch.randn(length, 4, 64, device="cuda", dtype=torch.bfloat16) for length in (3, 70, 1)]
    ragged = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    out = F.scaled_dot_product_attention(ragged, ragged, ragged).transpose(1, 2)
    for mine, part in zip(out.unbind(), parts):
        one = part.transpose(0, 1)[None]
        with sdpa_kernel(SDPBackend.MATH):
            expected = F.scaled_dot_product_attention(one, one, one)[0].transpose(0, 1)
        assert torch.allclose(mine.float(), expected.float(), atol=2e-2)


def test_dropout_is_refused_by_name(switched):
    x = torch.randn(1, 2, 16, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="dropout_p=0.5 is not supported"):
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


def test_errors_in_autograds_threads(switched):
    for _ in range(100):
        q, k, v = (laid((1, 2, 16, 64), torch.bfloat16, "whole") for _ in range(3))
        out = F.scaled_dot_product_attention(q, k, v)
        q.data = q.data[..., :32]
        with pytest.raises(ValueError, match="key has shape"):
            out.sum().backward()
    compare(
        [laid((1, 2, 16, 64), torch.bfloat16, "whole") for _ in range(3)], False, None, F.scaled_dot_product_attention
    )


@pytest.mark.skipif(
    "PYTORCH_TESTS" not in os.environ, reason="PYTORCH_TESTS does not name the folder of PyTorch's tests"
)
def test_pytorchs_own_tests():
    """`test_transformers.py`, those of the flash back end without dropout, every 40th of them."""
    program = (
        "import sys, random, pytest, flashcore.torch\n"
        "flashcore.torch.activate()\n"
        "class Some:\n"
        "    def pytest_collection_modifyitems(self, items):\n"
        "        flash = [it for it in items if 'flash_attention_vs_math' in it.name and 'dropout_p_0_0' in it.name]\n"
        "        items[:] = random.Random(0).sample(flash, max(1, len(flash) // 40))\n"
        "sys.exit(pytest.main(['-q', '-x', '-p', 'no:cacheprovider', 'test_transformers.py'], plugins=[Some()]))\n"
    )
    folder = os.environ["PYTORCH_TESTS"]
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
