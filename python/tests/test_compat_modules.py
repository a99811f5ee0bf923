"""FlashAttention's modules as programs find them: imports, metadata, and what is in them beside attention."""

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import types

import pytest

torch = pytest.importorskip("torch")

from flashcore import compat
from flashcore.compat import bert_padding, distributed, rotary
from ranks import begin, processes


@pytest.fixture
def install():
    """Installs modules for a test."""
    yield compat.install
    compat.uninstall()


def run(code, *paths):
    """Runs a program that nothing else was imported into."""
    path = os.pathsep.join([*map(str, paths), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_only_the_second_version_is_offered_unless_others_are_named(install):
    install()
    assert importlib.util.find_spec("flash_attn") is not None
    for name in ("flash_attn_interface", "vllm_flash_attn", "flash_attn.cute"):
        assert name not in sys.modules
        # Programs that find one of these prefer it.
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
    install("flash_attn_interface")
    assert importlib.import_module("flash_attn_interface").__version__.startswith("3.")
    with pytest.raises(ModuleNotFoundError, match="flash_attn.cute"):
        importlib.import_module("flash_attn.cute")
    install("flash_attn.cute")
    import flash_attn

    assert flash_attn.cute.interface.flash_attn_func is compat.flash_attn_cute.flash_attn_func


def test_modules_say_which_they_are(install):
    install()
    packages = {"flash_attn", "flash_attn.layers", "flash_attn.ops", "flash_attn.ops.triton", "flash_attn.utils"}
    plain = {
        "flash_attn.bert_padding", "flash_attn.flash_attn_interface", "flash_attn.layers.rotary",
        "flash_attn.ops.triton.rotary", "flash_attn.utils.distributed",
    }  # fmt: skip
    assert {name for name in sys.modules if name.partition(".")[0] == "flash_attn"} == packages | plain
    for name in packages | plain | {"flash_attn_2_cuda"}:
        module = importlib.import_module(name)
        assert module.__name__ == name and importlib.util.find_spec(name) is module.__spec__
        assert module.__package__ == (name if name in packages else name.rpartition(".")[0])
        assert hasattr(module, "__path__") == (name in packages)
    with pytest.raises(ModuleNotFoundError, match="flash_attn.losses"):
        importlib.import_module("flash_attn.losses")
    # Our own modules stay what they are.
    assert compat.flash_attn.__name__ == "flashcore.compat.flash_attn" and not hasattr(compat.flash_attn, "__path__")


def test_names_that_libraries_import_beside_functions(install):
    """Each is imported by a library that otherwise does not start, or goes on without FlashAttention."""
    install("flash_attn", "flash_attn_interface", "flash_attn.cute", "vllm_flash_attn")
    # TransformerEngine, text-generation-inference.
    from flash_attn_2_cuda import varlen_bwd, varlen_fwd

    assert varlen_bwd.__module__ == varlen_fwd.__module__ == "flashcore.compat.flash_attn_2_cuda"
    # unsloth, which takes another library where it is missing.
    from flash_attn.flash_attn_interface import flash_attn_gpu

    assert flash_attn_gpu.varlen_fwd is varlen_fwd
    # Megatron, OLMo; diffusers and ms-swift ask for the package.
    assert importlib.util.find_spec("flash_attn_3") is not None
    from flash_attn_3.flash_attn_interface import _flash_attn_backward, _flash_attn_forward, flash_attn_with_kvcache

    assert flash_attn_with_kvcache is compat.flash_attn_interface.flash_attn_with_kvcache
    assert _flash_attn_forward.__module__ == _flash_attn_backward.__module__ == "flashcore.compat._passes_third"
    # TransformerEngine, axolotl: an AssertionError is the answer no.
    from flash_attn.cute.interface import _validate_head_dims

    _validate_head_dims(192, 128, 9, 8)
    _validate_head_dims(64, 512, 10, 8)
    with pytest.raises(AssertionError, match="expected head_dim from 1 to 256"):
        _validate_head_dims(576, 512, 9, 8)
    # vLLM, on every start.
    from vllm.vllm_flash_attn import compile_flash_attn_varlen_func_from_specs

    shapes = {name: (8, 2, 64) for name in ("q_shape", "k_shape", "v_shape")}
    assert compile_flash_attn_varlen_func_from_specs(**shapes, q_dtype=torch.bfloat16, fa_version=4) is None


def test_other_submodules_of_an_installed_library_are_found(tmp_path):
    for name, text in {
        "__init__.py": "raise RuntimeError('the original was imported')",
        "losses/__init__.py": "",
        "losses/cross_entropy.py": "from flash_attn import flash_attn_func",
        "layers/__init__.py": "raise RuntimeError('the original was imported')",
        "layers/patch_embed.py": "from flash_attn.layers.rotary import apply_rotary_emb",
    }.items():
        (tmp_path / "flash_attn" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "flash_attn" / name).write_text(text)
    metadata = tmp_path / "flash_attn-2.5.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: flash_attn\nVersion: 2.5.0\n")
    run(
        "import importlib.metadata as metadata, flashcore.compat as compat\n"
        "assert metadata.version('flash-attn') == '2.5.0'\n"
        "compat.install()\n"
        "from flash_attn.losses.cross_entropy import flash_attn_func\n"
        "from flash_attn.layers.patch_embed import apply_rotary_emb\n"
        "assert flash_attn_func is compat.flash_attn.flash_attn_func\n"
        "assert apply_rotary_emb is compat.rotary.apply_rotary_emb\n"
        "assert metadata.version('flash-attn') == compat.flash_attn.__version__\n"
        "compat.uninstall()\n"
        "assert metadata.version('flash-attn') == '2.5.0'\n"
        "try: import flash_attn\n"
        "except RuntimeError as error: assert 'the original' in str(error)\n"
        "else: raise AssertionError\n",
        tmp_path,
    )


def test_what_was_imported_before_comes_back():
    original, rest = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.bert_padding")
    vllm, inside = types.ModuleType("vllm"), types.ModuleType("vllm.vllm_flash_attn")
    original.__path__, original.bert_padding, vllm.__path__, vllm.vllm_flash_attn = ["nowhere"], rest, [], inside
    before = {it.__name__: it for it in (original, rest, vllm, inside)}
    sys.modules.update(before)
    try:
        compat.install("flash_attn", "vllm_flash_attn")
        assert sys.modules["flash_attn"].__path__ == ["nowhere"]
        assert vllm.vllm_flash_attn is sys.modules["vllm.vllm_flash_attn"] is not inside
        assert original.bert_padding is rest
        compat.uninstall()
        assert all(sys.modules[name] is module for name, module in before.items())
        assert vllm.vllm_flash_attn is inside and "flash_attn.layers" not in sys.modules
    finally:
        for name in before:
            del sys.modules[name]


def test_metadata_names_what_is_installed(install):
    def found():
        return importlib.metadata.packages_distributions().get("flash_attn", [])

    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("a FlashAttention is installed")
    assert not found()
    install()
    for name in ("flash-attn", "flash_attn", "Flash.Attn"):
        assert importlib.metadata.version(name) == compat.flash_attn.__version__
    assert found() == ["flash_attn"]
    assert importlib.metadata.metadata("flash-attn")["Name"] == "flash_attn"
    assert not importlib.metadata.files("flash-attn") and not importlib.metadata.requires("flash-attn")
    # Folders have what they have.
    assert not list(importlib.metadata.distributions(name="flash-attn", path=[os.curdir]))
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn-3")
    install("flash_attn_interface", "flash_attn.cute")
    assert importlib.metadata.version("flash-attn-3").startswith("3.")
    assert importlib.metadata.version("flash-attn-4").startswith("4.") and sorted(found()) == [
        "flash-attn-4",
        "flash_attn",
    ]
    compat.uninstall()
    assert not found()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")


def test_transformers_finds_it():
    pytest.importorskip("transformers")
    run(
        "import flashcore, flashcore.compat, torch\n"
        "flashcore.compat.install()\n"
        "from transformers.utils import import_utils\n"
        # It asks once for a GPU, and finds no FlashAttention without one.
        "there, torch.cuda.is_available = torch.cuda.is_available, lambda: True\n"
        "assert import_utils.is_torch_cuda_available()\n"
        "torch.cuda.is_available = there\n"
        "assert import_utils.is_flash_attn_2_available()\n"
        "assert import_utils.is_flash_attn_greater_or_equal('2.8.0')\n"
        "assert not import_utils.is_flash_attn_3_available() and not import_utils.is_flash_attn_4_available()\n"
        "from transformers import AutoModelForCausalLM, LlamaConfig\n"
        "config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,\n"
        "                     num_attention_heads=4, num_key_value_heads=2)\n"
        "torch.manual_seed(0)\n"
        "model = AutoModelForCausalLM.from_config(config, attn_implementation='flash_attention_2')\n"
        "tokens, mask = torch.randint(3, 64, (2, 12)), torch.ones(2, 12, dtype=torch.long)\n"
        "mask[1, :5] = 0\n"
        "found = model(tokens, attention_mask=mask).logits\n"
        "assert flashcore.info()['last']['problem'].startswith('batch 2, heads 4/2')\n"
        "model.set_attn_implementation('eager')\n"
        "expected = model(tokens, attention_mask=mask).logits\n"
        "assert torch.allclose(found[mask.bool()], expected[mask.bool()], atol=1e-5)\n"
    )


def test_padding_has_functions_of_einops(monkeypatch, install):
    install()
    einops = types.ModuleType("einops")
    einops.rearrange, einops.repeat = object(), object()
    monkeypatch.setitem(sys.modules, "einops", einops)
    from flash_attn.bert_padding import rearrange, repeat

    assert rearrange is einops.rearrange and repeat is einops.repeat
    monkeypatch.setitem(sys.modules, "einops", None)
    with pytest.raises(ImportError, match="rearrange of flash_attn.bert_padding is that of einops, which is not"):
        from flash_attn.bert_padding import rearrange
    assert not hasattr(bert_padding, "reduce")


def test_concatenated_sequences_are_unpadded():
    x = torch.randn(3, 6, 2, requires_grad=True)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    rows, indices, starts, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert starts.tolist() == [0, 2, 5, 11] and starts.dtype == torch.int32 and longest == 6
    assert torch.equal(rows, x.flatten(0, 1)[indices])
    back = bert_padding.pad_input(rows, indices, 3, 6)
    back.square().sum().backward()
    assert torch.equal(x.grad, 2 * back)


def test_rows_and_their_residual_have_one_gradient():
    x, indices = torch.randn(5, 2, requires_grad=True), torch.tensor([3, 1])
    rows, residual = bert_padding.index_first_axis_residual(x, indices)
    assert torch.equal(rows, x[indices]) and torch.equal(residual, x)
    (3 * rows.sum() + residual.sum()).backward()
    assert x.grad[:, 0].tolist() == [1, 4, 1, 4, 1]


def turned(x, cos, sin, interleaved):
    """One row of one head, pair by pair."""
    out, half = x.clone(), cos.shape[-1]
    for pair in range(half):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        out[a] = x[a] * cos[pair] - x[b] * sin[pair]
        out[b] = x[b] * cos[pair] + x[a] * sin[pair]
    return out


def tables(positions, rotary_dim):
    angles = torch.randn(positions, rotary_dim // 2)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("rotary_dim", [4, 8])
@pytest.mark.parametrize("offsets", [0, 2, torch.tensor([3, 1])])
def test_rotary_embeddings_and_gradients(interleaved, inplace, rotary_dim, offsets):
    torch.manual_seed(0)
    x, dout = torch.randn(2, 2, 5, 3, 8)
    cos, sin = tables(9, rotary_dim)
    x.requires_grad_()
    first = offsets.tolist() if isinstance(offsets, torch.Tensor) else [offsets] * 2
    expected = torch.stack(
        [
            torch.stack([torch.stack([turned(h, cos[at + i], sin[at + i], interleaved) for h in row]) for i, row in enumerate(rows)])
            for at, rows in zip(first, x)
        ]
    )  # fmt: skip
    given = x.clone()
    out = rotary.apply_rotary_emb(given, cos, sin, interleaved, inplace, offsets)
    assert torch.allclose(out, expected, atol=1e-6) and (out is given) == inplace
    found, wanted = (torch.autograd.grad(it, x, dout, retain_graph=True)[0] for it in (out, expected))
    assert torch.allclose(found, wanted, atol=1e-6)
    with torch.no_grad():
        back = rotary.apply_rotary(dout, cos, sin, offsets, interleaved=interleaved, conjugate=True)
        assert torch.allclose(back, wanted, atol=1e-6)
        # Packed one after the other, with rows behind that are no sequence's and one sequence of length 0.
        rows = torch.cat((x[0, :2], x[1], torch.ones(1, 3, 8)))
        starts = torch.tensor([0, 2, 7], dtype=torch.int32)
        packed = rotary.apply_rotary_emb(rows, cos, sin, interleaved, False, offsets, starts, 5)
        assert torch.allclose(packed, torch.cat((expected[0, :2], expected[1], rows[-1:])), atol=1e-6)
        if not isinstance(offsets, torch.Tensor):
            starts = torch.tensor([0, 2, 2, 7], dtype=torch.int32)
            assert torch.equal(rotary.apply_rotary(rows, cos, sin, offsets, starts, 5, interleaved), packed)
            plain = rotary.apply_rotary_emb_torch(x, cos[offsets:][:5], sin[offsets:][:5], interleaved)
            assert torch.allclose(plain, expected, atol=1e-6)
        half = rotary.apply_rotary_emb_func(x.bfloat16(), cos.bfloat16(), sin.bfloat16(), interleaved, False, offsets)
        assert half.dtype == torch.bfloat16 and torch.allclose(half.float(), expected, atol=0.05)


def test_rotary_embeddings_in_place_where_autograd_refuses_to_write():
    """Leaves, and what ``split`` and ``unbind`` give: FlashAttention-2 writes into them."""
    torch.manual_seed(0)
    cos, sin = tables(6, 4)
    leaf = torch.randn(2, 5, 8, 8, requires_grad=True)
    before, dout = leaf.detach().clone(), torch.randn(2, 5, 8, 8)
    expected = rotary.apply_rotary(before.requires_grad_(), cos, sin)
    (wanted,) = torch.autograd.grad(expected, before, dout)
    out = rotary.apply_rotary(leaf, cos, sin, inplace=True)
    assert torch.equal(out, expected) and torch.equal(leaf, expected) and out.data_ptr() == leaf.data_ptr()
    assert torch.equal(torch.autograd.grad(out, leaf, dout)[0], wanted)
    x = torch.randn(2, 5, 24, 8, requires_grad=True)
    for call in (
        lambda it: rotary.apply_rotary_emb(it, cos, sin, inplace=True),
        lambda it: rotary.apply_rotary_emb_qkv_(it.unflatten(2, (3, 4)), cos, sin, -cos, sin),
        lambda it: rotary.apply_rotary_emb_qkv_(it, cos, sin, num_heads_q=8),
        lambda it: rotary.apply_rotary_emb_kv_(it.unflatten(2, (2, 6)), cos, sin),
    ):
        for part in (0, 1):
            found, expected = call((x * 1).split(12, 2)[part]), call(x.split(12, 2)[part] * 1)
            assert torch.equal(found, expected)
            dout = torch.randn_like(found)
            assert torch.equal(*(torch.autograd.grad(it, x, dout)[0] for it in (found, expected)))


def test_rotary_embeddings_refuse_what_does_not_fit():
    x, (cos, sin) = torch.randn(2, 5, 3, 8), tables(6, 8)
    for offset in (2, -1):
        with pytest.raises(ValueError, match=f"seqlen_offsets={offset} and length 5 are beyond the 6 positions"):
            rotary.apply_rotary(x, cos, sin, offset)
    rows, starts = x[0], torch.tensor([0, 2, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="seqlen_offsets=4 and length 3 are beyond the 6 positions"):
        rotary.apply_rotary(rows, cos, sin, 4, starts, 3)
    # Nobody has looked into a tensor.
    out = rotary.apply_rotary(x, cos, sin, torch.tensor([3, -2]))
    assert torch.equal(out[0, 3:], x[0, 3:]) and torch.equal(out[1, :2], x[1, :2])
    assert torch.equal(out[1, 2:], rotary.apply_rotary(x[1:, 2:], cos, sin)[0])
    with pytest.raises(ValueError, match=r"seqlen_offsets has shape \[3\], expected \[2\]"):
        rotary.apply_rotary(x, cos, sin, torch.tensor([0, 1, 2]))
    with pytest.raises(TypeError, match="seqlen_offsets=0.5, expected a whole number"):
        rotary.apply_rotary(x, cos, sin, 0.5)
    with pytest.raises(ValueError, match=r"sin has shape \[5, 4\], expected \[6, 4\] like cos"):
        rotary.apply_rotary(x, cos, sin[:5])
    with pytest.raises(ValueError, match="cos has 5 columns, expected no more than half of the 8 of x"):
        rotary.apply_rotary(x, *tables(6, 10))
    with pytest.raises(ValueError, match="x has 4 dimensions, expected 3"):
        rotary.apply_rotary(x, cos, sin, cu_seqlens=torch.tensor([0, 2, 5], dtype=torch.int32))
    with pytest.raises(ValueError, match="num_heads_q is None"):
        rotary.apply_rotary_emb_qkv_(x, cos, sin)
    with pytest.raises(NotImplementedError, match="scale_base=512 is not supported"):
        rotary.RotaryEmbedding(8, scale_base=512)
    with pytest.raises(ValueError, match="max_seqlen is None"):
        rotary.RotaryEmbedding(8)(x[:, :, None], x[:, :, None], seqlen_offset=torch.tensor([0, 1]))


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_module_of_rotary_embeddings(interleaved):
    torch.manual_seed(0)
    module = rotary.RotaryEmbedding(8, base=100.0, interleaved=interleaved)
    qkv = torch.randn(2, 5, 3, 2, 8)
    angles = torch.outer(torch.arange(8.0), 100.0 ** -(torch.arange(4.0) / 4))
    q, k = (rotary.apply_rotary(qkv[:, :, at], angles.cos(), angles.sin(), 3, None, None, interleaved) for at in (0, 1))
    expected = torch.stack((q, k, qkv[:, :, 2]), 2)
    given = qkv.clone()
    out = module(given, seqlen_offset=3)
    assert out is given and torch.allclose(out, expected, atol=1e-6)
    offsets = torch.tensor([3, 3])
    assert torch.allclose(module(qkv.clone(), seqlen_offset=offsets, max_seqlen=8), expected, atol=1e-6)
    separate = module(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone(), seqlen_offset=3)
    assert torch.allclose(torch.cat((separate[0][:, :, None], separate[1]), 2), expected, atol=1e-6)
    # Fewer heads of keys: their heads follow those of queries.
    grouped = torch.cat((qkv[:, :, 0], qkv[:, :, 1, :1], qkv[:, :, 2, :1]), 2)
    found = module(grouped, seqlen_offset=3, num_heads_q=2)
    assert torch.allclose(found, torch.cat((q, k[:, :, :1], qkv[:, :, 2, :1]), 2), atol=1e-6)
    assert not module.state_dict() and module.bfloat16()(qkv.clone(), seqlen_offset=3).isfinite().all()


class Unpadded(rotary.RotaryEmbedding):
    """What ModernBERT and its kin derive: packed rows, by the tables of the module."""

    def forward(self, qkv, cu_seqlens, max_seqlen):
        self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        return Turned.apply(qkv, self._cos_cached, self._sin_cached, cu_seqlens, max_seqlen)


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, *tables):
        ctx.tables = tables
        ctx.mark_dirty(qkv)
        rotary.apply_rotary(qkv[:, :2].view(len(qkv), -1, qkv.shape[-1]), *tables[:2], 0, *tables[2:], inplace=True)
        return qkv

    @staticmethod
    def backward(ctx, gradient):
        qk = gradient[:, :2].view(len(gradient), -1, gradient.shape[-1])
        rotary.apply_rotary(qk, *ctx.tables[:2], 0, *ctx.tables[2:], inplace=True, conjugate=True)
        return gradient, *(None,) * 4


def test_modules_that_are_derived_from_rotary_embeddings():
    torch.manual_seed(0)
    module, starts = Unpadded(dim=8, base=100.0, device="cpu", interleaved=False), torch.tensor([0, 2, 7])
    starts = starts.to(torch.int32)
    qkv = torch.randn(7, 3, 2, 8, requires_grad=True)
    expected = torch.cat([rotary.RotaryEmbedding(8, 100.0)(it[None].clone())[0] for it in qkv.split((2, 5))])
    found = module(qkv.clone(), starts, 5)
    assert torch.equal(found, expected)
    weights = torch.randn(7, 3, 2, 8)
    # Theirs turns the gradient that it is given.
    gradients = [torch.autograd.grad(it, qkv, weights.clone())[0] for it in (found, expected)]
    assert torch.allclose(*gradients, atol=1e-6)

    # Tables stay as long as they are long enough, and of the same kind.
    tables = module._cos_cached
    assert tables.shape == (5, 4) and module._sin_cached.shape == (5, 4) and module.scale is None
    module._update_cos_sin_cache(3, torch.device("cpu"), torch.float32)
    assert module._cos_cached is tables
    with torch.inference_mode():
        module._update_cos_sin_cache(6, torch.device("cpu"), torch.float32)
    assert module._cos_cached.shape == (6, 4)
    module(qkv.clone(), starts, 5).square().sum().backward()
    module._update_cos_sin_cache(2, torch.device("cpu"), torch.bfloat16)
    assert module._cos_cached.dtype == torch.bfloat16

    class Slower(rotary.RotaryEmbedding):
        def _compute_inv_freq(self, device=None):
            return super()._compute_inv_freq(device) / 4

    class Still(rotary.RotaryEmbedding):
        def _update_cos_sin_cache(self, seqlen, device=None, dtype=None):
            super()._update_cos_sin_cache(seqlen, device, dtype)
            self._cos_cached, self._sin_cached = torch.ones_like(self._cos_cached), 0 * self._sin_cached

    x = torch.randn(1, 5, 3, 2, 8)
    assert torch.equal(Still(8)(x.clone()), x) and not torch.equal(Slower(8)(x.clone()), x)
    angles = torch.outer(torch.arange(5.0), Slower(8).inv_freq)
    assert torch.equal(Slower(8)(x.clone())[:, :, 0], rotary.apply_rotary(x[:, :, 0], angles.cos(), angles.sin()))


def gather(store, rank, size):
    from flashcore.compat.distributed import all_gather, all_gather_raw, reduce_scatter

    begin(store, rank, size)
    group = torch.distributed.group.WORLD
    x = torch.full((2, 3), float(rank), requires_grad=True)
    out = all_gather(x, group)
    weights = torch.arange(2.0 * size)[:, None] + rank
    (out * weights).sum().backward()
    y = torch.full((2 * size, 3), rank + 1.0, requires_grad=True)
    added = reduce_scatter(y, group)
    (added * (rank + 1)).sum().backward()
    raw, handle = all_gather_raw(x.detach(), group, async_op=True)
    handle.wait()
    try:
        reduce_scatter(torch.zeros(size + 1, 3), group)
        said = ""
    except ValueError as error:
        said = str(error)
    z = torch.full((2, 3), rank + 1.0, requires_grad=True)
    total = distributed.all_reduce(z, group)
    (total * (rank + 1)).sum().backward()
    model = torch.nn.Linear(3, 2)
    model.weight._shared_params = model.bias._sequence_parallel = model.weight._sequence_parallel = True
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, rank + 5.0)
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    distributed.sync_shared_params(model, group)
    distributed.allreduce_sequence_parallel_grad(model, group)
    of_model = [it.detach().unique().tolist() for it in (model.weight, model.bias, model.weight.grad, model.bias.grad)]
    return [it.detach()[:, 0].tolist() for it in (out, x.grad, added, y.grad, raw, z, total, z.grad)], said, of_model


def test_collectives_have_gradients():
    for rank, answer in processes(gather, 2).items():
        assert isinstance(answer, tuple), answer
        (out, dx, added, dy, raw, z, total, dz), said, of_model = answer
        assert out == raw == [0, 0, 1, 1] and added == [3, 3] and dy == [1, 1, 2, 2]
        # Of both ranks: weights of its own rows, and one more each.
        assert dx == [4 * rank + 1, 4 * rank + 3]
        assert said == "input_ has 3 rows, expected a multiple of the 2 ranks"
        assert z == dz == [rank + 1] * 2 and total == [3, 3]
        assert of_model == [[5], [rank + 5], [3], [3]]


def test_elements_of_a_rank():
    assert [distributed.get_dim_for_local_rank(10, 3, rank) for rank in range(3)] == [4, 3, 3]
    assert [distributed.get_dim_for_local_rank(10, 3, rank, 2) for rank in range(3)] == [4, 4, 2]


def test_collectives_are_those_that_an_installed_library_imports(install):
    install()
    module = importlib.import_module("flash_attn.utils.distributed")
    # Modules for attention, embeddings, fused layers and language models.
    names = {"all_gather_raw", "all_reduce", "all_reduce_raw", "get_dim_for_local_rank", "reduce_scatter"}
    assert names | {"reduce_scatter_raw", "sync_shared_params"} <= vars(module).keys()
