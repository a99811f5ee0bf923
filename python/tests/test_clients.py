"""Other programs on FlashCore: PyTorch's switch, the hub, and what docs/clients.md shows."""

import importlib.util
import os
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import flashcore.torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
SNIPPETS = re.findall(r"## (.*?)\n.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("title, snippet", SNIPPETS, ids=[title for title, _ in SNIPPETS])
def test_snippets_run(title, snippet):
    if title == "transformers" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    if title == "Hugging Face's hub":
        snippet = snippet.replace("dist/hub", hub())
    exec(compile(snippet, f"{PAGE.name}: {title}", "exec"), {})


def hub():
    """The folder that `cargo xtask hub` makes, which `cargo xtask test` has made for us."""
    if "FLASHCORE_HUB" not in os.environ:
        pytest.skip("FLASHCORE_HUB does not say where the package for the hub is")
    return os.environ["FLASHCORE_HUB"]


def test_a_copy_from_the_hub_stands_beside_the_installed_package():
    kernels = pytest.importorskip("kernels")
    copy = kernels.get_local_kernel(Path(hub()), backend="cpu")
    assert copy.__version__ == flashcore.__version__ and copy.__name__.startswith("_flashcore_cpu_")
    assert {loaded.metadata.version for loaded in kernels.get_loaded_kernels()} == {1}
    torch.manual_seed(0)
    x = torch.randn(2, 5, 4, 16, requires_grad=True)
    answers = []
    for package in (copy, flashcore):
        call = torch.compile(
            lambda x: package.flash_attn_func(x, x, x, causal=True), backend="aot_eager", fullgraph=True
        )
        eager, compiled = package.flash_attn_func(x, x, x, causal=True), call(x)
        answers.append((eager, compiled, *torch.autograd.grad(eager.sum(), x), *torch.autograd.grad(compiled.sum(), x)))
    for ours, theirs in zip(*answers):
        assert torch.equal(ours, theirs)


def test_the_page_has_a_snippet_for_each_client():
    assert [title for title, _ in SNIPPETS] == re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)


def test_the_switch_is_given_back():
    from torch.nn.attention import current_flash_attention_impl

    def ours():
        return "flashcore" in torch._C._dispatch_dump("aten::_flash_attention_forward")

    for _ in range(2):
        assert current_flash_attention_impl() is None and not ours()
        flashcore.torch.activate()
        assert current_flash_attention_impl() == "flashcore" and ours()
        flashcore.torch.restore()
    assert current_flash_attention_impl() is None and not ours()


@pytest.mark.parametrize("queries, keys, causal", [(5, 5, True), (3, 7, True), (4, 6, False)])
def test_operators_behind_the_switch(queries, keys, causal):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, length, 3, 16).transpose(1, 2).requires_grad_() for length in (queries, keys, keys))
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries) if causal else None
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
    dout = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    with torch.no_grad():
        out, lse, *rest = flashcore.torch.heads_first(q, k, v, 0.0, causal, scale=0.3)
        found = flashcore.torch.heads_first_backward(
            dout, q, k, v, out, lse, *rest[:4], 0.0, causal, *rest[4:6], scale=0.3
        )
    # PyTorch's compiler expects the layout of the queries.
    assert out.stride() == q.stride() and rest[2:4] == [queries, keys]
    for ours, theirs in zip((out, *found), (expected, *wanted)):
        assert torch.allclose(ours, theirs, atol=1e-5)
    with pytest.raises(NotImplementedError, match="^dropout_p=0.5 is not supported"):
        flashcore.torch.heads_first(q, k, v, 0.5)


def test_operators_of_packed_rows_behind_the_switch():
    torch.manual_seed(0)
    q, k, v = (torch.randn(7, 2, 16, requires_grad=True) for _ in range(3))
    starts, dout = torch.tensor([0, 2, 7], dtype=torch.int32), torch.randn(7, 2, 16)
    expected = flashcore.flash_attn_varlen_func(q, k, v, starts, starts, 5, 5, window_size=(2, 0))
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    windows = {"window_size_left": 2, "window_size_right": 0}
    with torch.no_grad():
        out, lse, *rest = flashcore.torch.rows(q, k, v, starts, starts, 5, 5, 0.0, False, False, **windows)
        found = flashcore.torch.rows_backward(
            dout, q, k, v, out, lse, starts, starts, 5, 5, 0.0, False, *rest[:2], **windows
        )
    for ours, theirs in zip((out, *found), (expected, *wanted)):
        assert torch.equal(ours, theirs)


def test_arguments_of_newer_versions_of_pytorch():
    q, k, v = torch.randn(3, 5, 2, 16)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    call = (q, k, v, starts, starts, 3, 3, 0.0, True, False)
    expected, *_ = flashcore.torch.rows(*call)
    found, *_ = flashcore.torch.rows(*call, num_splits=4, block_table=None, out=None, k_cache=None)
    assert found.equal(expected)
    for name in ("block_table", "page_table", "k_cache", "out"):
        with pytest.raises(NotImplementedError, match=f"{name}=.* expected None"):
            flashcore.torch.rows(*call, **{name: starts})


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.hardware
def test_pytorchs_attention_runs_on_flashcore(shared):
    torch.manual_seed(0)
    make = lambda heads: torch.randn(2, heads, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)  # noqa: E731
    q, k, v = make(4), make(2 if shared else 4), make(2 if shared else 4)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
    dout = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    flashcore.torch.activate()
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
            assert flashcore.info()["last"]["device"] != "cpu"
            found = torch.autograd.grad(out, (q, k, v), dout)
            compiled = torch.compile(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=shared))
            assert torch.equal(compiled(q, k, v), out)
    finally:
        flashcore.torch.restore()
    for ours, theirs in zip((out, *found), (expected, *wanted)):
        assert torch.allclose(ours.float(), theirs.float(), atol=4e-2)
