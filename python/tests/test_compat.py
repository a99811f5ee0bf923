"""FlashAttention's surface: every argument of every library is in the table, and what it says is so."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import flashcore
from flashcore import (
    _copies,
    compat,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

DOCS = Path(__file__).parents[2] / "docs"
LIBRARIES = {
    "FA2": "flash_attn",
    "FA3": "flash_attn_interface",
    "FA4": "flash_attn_cute",
    "vLLM": "vllm_flash_attn",
}
# Where a checkout of each has its functions.
SOURCES = {
    "FA2": ("FLASH_ATTENTION", "flash_attn/flash_attn_interface.py"),
    "FA3": ("FLASH_ATTENTION", "hopper/flash_attn_interface.py"),
    "FA4": ("FLASH_ATTENTION", "flash_attn/cute/interface.py"),
    "vLLM": ("VLLM_FLASH_ATTENTION", "vllm_flash_attn/flash_attn_interface.py"),
}


@pytest.fixture(autouse=True)
def forget_what_was_compiled():
    """PyTorch compiles a function for so many kinds of arguments and no more: leave others theirs."""
    yield
    torch._dynamo.reset()


def functions(library):
    module = importlib.import_module(f"flashcore.compat.{LIBRARIES[library]}")
    found = {name: getattr(module, name) for name in module.__all__}
    return {name: function for name, function in found.items() if callable(function)}


def arguments(function):
    """The arguments that can be given by their place: those of the library."""
    found = inspect.signature(function).parameters.values()
    return [argument.name for argument in found if argument.kind is not argument.KEYWORD_ONLY]


def of_forks(function):
    """The arguments that forks of the library have, which ours takes by keyword."""
    if not function.__module__.startswith("flashcore.compat."):
        return []
    found = inspect.signature(function).parameters.values()
    return [argument.name for argument in found if argument.kind is argument.KEYWORD_ONLY]


def table():
    """What docs/python.md says of each argument of each library."""
    said = {}
    for line in (DOCS / "python.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and cells[2] in ("served", "hint", "refused"):
            for name in re.findall(r"`(\w+)`", cells[0].replace("(of `flash_attn_combine`)", "")):
                for library in cells[1].split(", "):
                    assert (library, name) not in said, name
                    said[library, name] = cells[2]
    return said


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_argument_is_in_the_table(library):
    there = {name for function in functions(library).values() for name in arguments(function)}
    there |= {name for function in functions(library).values() for name in of_forks(function)}
    assert there == {name for of, name in table() if of == library}


@pytest.mark.parametrize("library", LIBRARIES)
def test_arguments_are_those_of_the_library(library):
    variable, path = SOURCES[library]
    if variable not in os.environ:
        pytest.skip(f"{variable} names no checkout")
    source = (Path(os.environ[variable]) / path).read_text()
    theirs = {it.name: it for it in ast.parse(source).body if isinstance(it, ast.FunctionDef)}
    for name, function in functions(library).items():
        assert [argument.arg for argument in theirs[name].args.args] == arguments(function), name


def refused():
    return [key for key, said in table().items() if said == "refused"]


@pytest.mark.parametrize("library, name", refused())
def test_what_the_table_refuses_is_refused_by_name(library, name):
    x = torch.randn(1, 4, 2, 8)
    rows, starts = x[0], torch.tensor([0, 4], dtype=torch.int32)
    calls = {
        "flash_attn_func": {"q": x, "k": x, "v": x},
        "flash_attn_varlen_func": {
            "q": rows, "k": rows, "v": rows, "cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 4,
            "max_seqlen_k": 4,
        },
        "flash_attn_combine": {"out_partial": x, "lse_partial": x[..., 0]},
    }  # fmt: skip
    tried = 0
    for function, good in calls.items():
        call = functions(library).get(function)
        if (
            call is None
            or name not in (*arguments(call), *of_forks(call))
            or (name == "cu_seqlens" and library == "FA2")
        ):
            continue
        with pytest.raises(NotImplementedError, match=f"^{name}=.* is not supported yet"):
            call(**good, **{name: 2})
        tried += 1
    assert tried


def test_programs_that_import_flash_attention_get_ours():
    before = sys.modules.get("flash_attn")
    compat.install("vllm_flash_attn", "flash_attn.cute", "flash_attn_interface")
    try:
        import flash_attn
        import flash_attn.cute
        import flash_attn_interface
        from flash_attn.bert_padding import pad_input
        from flash_attn.flash_attn_interface import flash_attn_varlen_func as second
        from vllm.vllm_flash_attn.layers.rotary import apply_rotary_emb
        from vllm_flash_attn import flash_attn_varlen_func as forked

        assert flash_attn.flash_attn_func is flashcore.compat.flash_attn.flash_attn_func
        assert second is flashcore.compat.flash_attn.flash_attn_varlen_func
        assert flash_attn_interface.flash_attn_func is flashcore.compat.flash_attn_interface.flash_attn_func
        assert flash_attn.cute.flash_attn_func is flashcore.compat.flash_attn_cute.flash_attn_func
        assert pad_input.__module__ == "flashcore.compat.bert_padding"
        assert forked.__module__ == "flashcore.compat.vllm_flash_attn"
        assert apply_rotary_emb.__module__ == "flashcore.compat.rotary"
        # Programs ask what the interface has: windows since 2.3, softcaps since 2.6, torch.compile since 2.7.
        assert tuple(map(int, flash_attn.__version__.split("."))) >= (2, 7)
        assert flashcore.compat.vllm_flash_attn.__version__.startswith("2.7")
    finally:
        compat.uninstall()
    assert sys.modules.get("flash_attn") is before
    with pytest.raises(ValueError, match="there is no module 'flash' to stand in for"):
        compat.install("flash")


def test_importing_stands_in_for_nothing():
    code = "import sys, flashcore, flashcore.compat; sys.exit('flash_attn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


def test_the_libraries_differ_in_order_and_form_only():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 5, 2, 16)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    third = functions("FA3")["flash_attn_func"](q, k, v, None, True, return_attn_probs=True)
    fourth = functions("FA4")["flash_attn_func"](q, k, v, causal=True, return_lse=True)
    assert len(third) == len(fourth) == 2
    for found in (third, fourth):
        assert torch.equal(found[0], out) and torch.equal(found[1], lse)
    assert functions("FA4")["flash_attn_func"](q, k, v)[1] is None
    packed = functions("FA3")["flash_attn_qkvpacked_func"](torch.stack((q, k, v), 2), None, True)
    assert torch.equal(packed, out)
    heads = torch.cat((q, k[:, :, :1], v[:, :, :1]), 2)
    shared = flash_attn_func(q, k[:, :, :1], v[:, :, :1])
    assert torch.equal(functions("FA3")["flash_attn_qkvpacked_func"](heads, num_heads_q=2), shared)

    rows, starts = [x.flatten(0, 1) for x in (q, k, v)], torch.tensor([0, 5, 10], dtype=torch.int32)
    second = functions("FA2")["flash_attn_varlen_func"](
        *rows, starts, starts, 5, 5, 0.0, None, True, return_attn_probs=True
    )
    assert len(second) == 3 and second[2] is None and torch.equal(second[0].view_as(out), out)
    into = torch.empty_like(rows[0])
    forked = functions("vLLM")["flash_attn_varlen_func"](
        *rows, 5, starts, 5, starts, causal=True, window_size=[-1, -1], out=into, fa_version=2, num_splits=4
    )
    assert forked is into and torch.equal(into.view_as(out), out)
    fourth, none = functions("FA4")["flash_attn_varlen_func"](*rows, None, starts, starts, causal=True)
    assert none is None and torch.equal(fourth.view_as(out), out)
    from flashcore.flash_attn import flash_attn_varlen_func as by_place

    assert by_place is functions("FA2")["flash_attn_varlen_func"]


def test_factors_of_wide_tensors_are_ignored_for_vllm():
    call, ones = functions("vLLM")["flash_attn_varlen_func"], torch.full((1, 2), 2.0)
    rows, starts = torch.randn(4, 2, 16).bfloat16(), torch.tensor([0, 4], dtype=torch.int32)
    factors = {"q_descale": ones, "k_descale": ones, "v_descale": ones}
    expected = call(rows, rows, rows, 4, starts, 4, starts)
    assert torch.equal(call(rows, rows, rows, 4, starts, 4, starts, dynamic_causal=False, **factors), expected)
    with pytest.raises(ValueError, match="q_descale was given with a q of bf16"):
        flash_attn_varlen_func(rows, rows, rows, starts, starts, 4, 4, **factors)
    small = rows.to(torch.float8_e4m3fn)
    found = call(rows, small, small, 4, starts, 4, starts, **factors)
    del factors["q_descale"]
    assert torch.equal(found, flash_attn_varlen_func(rows, small, small, starts, starts, 4, 4, **factors))
    assert not torch.equal(found, call(rows, small, small, 4, starts, 4, starts))


def calls_of_all(library):
    """The functions of a library over the same two sequences, each with the arguments that it needs."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 5, 2, 16)
    rows, starts = [x.flatten(0, 1) for x in (q, k, v)], torch.tensor([0, 5, 10], dtype=torch.int32)
    ragged = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 5, "max_seqlen_k": 5}
    qkv = torch.stack(rows, 1)
    calls = {
        "flash_attn_func": {"q": q, "k": k, "v": v},
        "flash_attn_qkvpacked_func": {"qkv": torch.stack((q, k, v), 2)},
        "flash_attn_kvpacked_func": {"q": q, "kv": torch.stack((k, v), 2)},
        "flash_attn_varlen_func": {**dict(zip("qkv", rows)), **ragged},
        "flash_attn_varlen_qkvpacked_func": {"qkv": qkv, "cu_seqlens": starts, "max_seqlen": 5},
        "flash_attn_varlen_kvpacked_func": {"q": rows[0], "kv": qkv[:, 1:], **ragged},
        "flash_attn_with_kvcache": {"q": q, "k_cache": k, "v_cache": v},
    }
    found = functions(library)
    return [(found[name], given) for name, given in calls.items() if name in found]


def first(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_softcap_has_many_forms(library):
    for function, given in calls_of_all(library):
        expected = first(function(**given))
        assert not torch.equal(first(function(**given, softcap=0.5)), expected)
        nothing = None if library == "FA4" else -1.0
        assert torch.equal(first(function(**given, softcap=nothing)), expected)
        place = arguments(function).index("softcap")
        by_place = [
            given.get(name, inspect.signature(function).parameters[name].default) for name in arguments(function)
        ]
        assert torch.equal(first(function(*by_place[:place], nothing, *by_place[place + 1 :])), expected)
        with pytest.raises((TypeError, ValueError), match="softcap"):
            function(**given, softcap=-1.0 if library == "FA4" else None)
    function, given = calls_of_all(library)[0]
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert torch.equal(first(compiled(**given, softcap=nothing)), first(function(**given)))
    # FlashCore's own functions have one way to say so.
    with pytest.raises(ValueError, match="softcap=-1.0, expected a positive number, or 0"):
        flash_attn_func(*torch.randn(3, 1, 4, 2, 8), softcap=-1.0)


def test_no_chunk_may_be_none_in_the_third_version():
    for function, given in calls_of_all("FA3"):
        expected = function(**given)
        assert torch.equal(function(**given, attention_chunk=None), expected)
        assert not torch.equal(function(**given, attention_chunk=2), expected)


def test_names_of_forks_of_the_third_version():
    sinks = torch.tensor([0.5, -0.25])
    calls = {function.__name__: (function, given) for function, given in calls_of_all("FA3")}
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
        function, given = calls[name]
        expected = function(**given, s_aux=sinks)
        assert not torch.equal(function(**given), expected)
        for alias in ("sinks", "learnable_sink"):
            assert torch.equal(function(**given, **{alias: sinks}), expected)
        assert torch.equal(function(**given, sinks=None, s_aux=sinks), expected)
        with pytest.raises(ValueError, match="sinks was given with s_aux"):
            function(**given, sinks=sinks, s_aux=sinks)
    function, given = calls["flash_attn_with_kvcache"]
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    assert torch.equal(function(**given, cu_seqlens_k_new=starts), function(**given))
    place = arguments(function).index("cu_seqlens_k_new")
    by_place = [given.get(name) for name in arguments(function)[:place]]
    assert torch.equal(function(*by_place, starts), function(**given))
    new = torch.randn(5, 2, 16)
    caches = [torch.randn(2, 8, 2, 16) for _ in range(2)]
    lengths = torch.tensor([1, 3], dtype=torch.int32)
    function(given["q"], *caches, new, new, cache_seqlens=lengths, cu_seqlens_k_new=starts)
    assert torch.equal(caches[0][1, 3:6], new[2:])
    with pytest.raises(ValueError, match="cu_seqlens_k_new was given without k and v"):
        flash_attn_with_kvcache(**given, cu_seqlens_k_new=starts)

    function, given = calls["flash_attn_varlen_func"]
    pages, table = torch.randn(2, 4, 8, 2, 16), torch.tensor([[2], [0]], dtype=torch.int32)
    paged = {**given, "k": pages[0], "v": pages[1], "cu_seqlens_k": None, "seqused_k": lengths}
    found = function(**paged, page_table=table)
    assert torch.equal(found, function(**paged, block_table=table))
    with pytest.raises(ValueError, match="page_table was given with block_table"):
        function(**paged, page_table=table, block_table=table)


def test_windows_have_many_forms():
    q, k, v = torch.randn(3, 1, 6, 2, 16)
    for given, expected in [
        (None, (-1, -1)), ((None, None), (-1, -1)), ([None, 1], (-1, 1)), (torch.tensor([2, 1]), (2, 1)), ([2, None], (2, -1)),
    ]:  # fmt: skip
        assert torch.equal(flash_attn_func(q, k, v, window_size=given), flash_attn_func(q, k, v, window_size=expected))
    compiled = torch.compile(lambda *x: flash_attn_func(*x, window_size=(None, 1)), fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v), flash_attn_func(q, k, v, window_size=(-1, 1)))


def test_hints_change_nothing():
    q, k, v = torch.randn(3, 1, 6, 2, 16)
    hints = {"num_splits": 3, "pack_gqa": True, "sm_margin": 8}
    assert torch.equal(flash_attn_func(q, k, v, **hints), flash_attn_func(q, k, v))
    assert torch.equal(flash_attn_with_kvcache(q, k, v, **hints), flash_attn_with_kvcache(q, k, v))


def test_slopes_and_sinks_in_16_bits():
    q, k, v = torch.randn(3, 1, 6, 2, 16)
    sinks = torch.tensor([0.5, -0.25], requires_grad=True)
    for name in ("s_aux", "learnable_sink"):
        narrow = sinks.detach().bfloat16().requires_grad_()
        out = flash_attn_func(q, k, v, alibi_slopes=torch.tensor([0.5, 0.25]).half(), **{name: narrow})
        expected = flash_attn_func(q, k, v, alibi_slopes=torch.tensor([0.5, 0.25]), s_aux=sinks)
        assert torch.equal(out, expected)
        found, wide = torch.autograd.grad(out.sum(), narrow)[0], torch.autograd.grad(expected.sum(), sinks)[0]
        assert found.dtype == torch.bfloat16 and torch.equal(found, wide.bfloat16())
    with pytest.raises(ValueError, match="s_aux was given with learnable_sink"):
        flash_attn_func(q, k, v, s_aux=sinks, learnable_sink=sinks)


def plain(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@pytest.mark.parametrize("dim, value_dim", [(7, 7), (20, 16), (16, 300)])
def test_other_head_dims_are_served_by_copies(dim, value_dim):
    torch.manual_seed(0)
    q, k = (torch.randn(2, 5, 2, dim, requires_grad=True) for _ in range(2))
    v = torch.randn(2, 5, 2, value_dim, requires_grad=True)
    _copies._told.clear()
    with pytest.warns(UserWarning, match="in each call|in pieces"):
        out = flash_attn_func(q, k, v)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attn_func(q, k, v)  # told of once
    expected, dout = plain(q, k, v), torch.randn(2, 5, 2, value_dim)
    assert torch.allclose(out, expected, atol=1e-5)
    for found, wanted in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout)):
        assert torch.allclose(found, wanted, atol=1e-4)
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(q, k, v), expected, atol=1e-5)


def test_a_last_dimension_with_gaps_is_copied():
    q, k = torch.randn(2, 1, 6, 2, 16)
    v = torch.randn(1, 6, 16, 2).transpose(2, 3)
    _copies._told.clear()
    with pytest.warns(UserWarning, match="not contiguous: it is copied"):
        out = flash_attn_func(q, k, v)
    assert torch.equal(out, flash_attn_func(q, k, v.contiguous()))
    qkv = torch.randn(1, 6, 3, 16, 2).transpose(3, 4)
    assert torch.equal(flashcore.flash_attn_qkvpacked_func(qkv), flash_attn_func(*qkv.contiguous().unbind(2)))
    # A cache that is written is the caller's own; what is added to it is not.
    cache, lengths = torch.zeros(2, 1, 8, 2, 16), torch.tensor([3], dtype=torch.int32)
    flash_attn_with_kvcache(q[:, :1], *cache, v[:, :1], v[:, :1], cache_seqlens=lengths)
    assert torch.equal(cache[0, :, 3:4], v[:, :1])
    with pytest.raises(ValueError, match="k_cache has stride"):
        flash_attn_with_kvcache(q[:, :1], v, v, q[:, :1], q[:, :1], cache_seqlens=lengths)


def test_new_keys_of_other_head_dims_go_into_the_cache():
    torch.manual_seed(0)
    q, new, lengths = torch.randn(2, 1, 2, 11), torch.randn(2, 1, 2, 11), torch.tensor([3, 5], dtype=torch.int32)
    k, v = torch.randn(2, 2, 8, 2, 11)
    before = k.clone()
    cos, sin = torch.randn(2, 8, 4)
    out = flash_attn_with_kvcache(q, k, v, new, new, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths)
    wide = torch.nn.functional.pad(new, (0, 5))
    caches = [torch.nn.functional.pad(x, (0, 5)) for x in (before, v)]
    expected = flash_attn_with_kvcache(
        torch.nn.functional.pad(q, (0, 5)), *caches, wide, wide, rotary_cos=cos, rotary_sin=sin,
        cache_seqlens=lengths, softmax_scale=11**-0.5,
    )  # fmt: skip
    assert torch.equal(out, expected[..., :11]) and torch.equal(k, caches[0][..., :11])
    assert not torch.equal(k, before) and torch.equal(v[0, 3], new[0, 0])


def test_packed_sequences_have_packed_gradients():
    torch.manual_seed(0)
    starts = torch.tensor([0, 2, 7], dtype=torch.int32)
    qkv, kv = torch.randn(7, 3, 2, 16, requires_grad=True), torch.randn(7, 2, 2, 16, requires_grad=True)
    q, dout = torch.randn(7, 2, 16, requires_grad=True), torch.randn(7, 2, 16)
    out, lse, none = flash_attn_varlen_qkvpacked_func(qkv, starts, 5, causal=True, return_attn_probs=True)
    expected, sums = flash_attn_varlen_func(*qkv.unbind(1), starts, starts, 5, 5, causal=True, return_attn_probs=True)
    assert none is None and torch.equal(out, expected) and torch.equal(lse, sums)
    assert torch.equal(torch.autograd.grad(out, qkv, dout)[0], torch.autograd.grad(expected, qkv, dout)[0])
    out = flash_attn_varlen_kvpacked_func(q, kv, starts, starts, 5, 5)
    expected = flash_attn_varlen_func(q, *kv.unbind(1), starts, starts, 5, 5)
    for found, wanted in zip(torch.autograd.grad(out, (q, kv), dout), torch.autograd.grad(expected, (q, kv), dout)):
        assert torch.equal(found, wanted)
    with torch.no_grad():
        expected = flash_attn_varlen_func(*qkv.unbind(1), starts, starts, 5, 5)
        assert torch.equal(flash_attn_varlen_qkvpacked_func(qkv, starts), expected)


def test_out_is_written():
    q, k, v = torch.randn(3, 7, 2, 16)
    starts = torch.tensor([0, 2, 7], dtype=torch.int32)
    expected = flash_attn_varlen_func(q, k, v, starts, starts, 5, 5)
    into = torch.zeros(7, 2, 2, 16)[:, 0]
    version = into._version
    assert flash_attn_varlen_func(q, k, v, starts, starts, 5, 5, out=into) is into
    assert torch.equal(into, expected) and into._version > version
    with pytest.raises(NotImplementedError, match="out was given with tensors that require grad"):
        flash_attn_varlen_func(q.requires_grad_(), k, v, starts, starts, 5, 5, out=into)
    q = q.detach()
    with pytest.raises(ValueError, match=r"out has shape \[7, 2, 8\], expected \[7, 2, 16\]"):
        flash_attn_varlen_func(q, k, v, starts, starts, 5, 5, out=torch.zeros(7, 2, 8))
    with pytest.raises(TypeError, match="out has element type f16, expected f32"):
        flash_attn_varlen_func(q, k, v, starts, starts, 5, 5, out=torch.zeros(7, 2, 16).half())
    compiled = torch.compile(flash_attn_varlen_func, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v, starts, starts, 5, 5, out=torch.zeros(7, 2, 16)), expected)


def test_rows_of_a_table_may_be_chosen():
    torch.manual_seed(0)
    q, lengths = torch.randn(2, 1, 2, 16), torch.tensor([3, 7], dtype=torch.int32)
    k, v = torch.randn(2, 8, 4, 2, 16)
    table, rows = torch.randperm(8).int().view(4, 2), torch.tensor([3, 1], dtype=torch.int32)
    expected = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table[rows])
    for name in ("page_table", "block_table"):
        chosen = {name: table, "cache_batch_idx": rows, "rotary_seqlens": lengths}
        assert torch.equal(flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **chosen), expected)
    for wrong in (-1, 4):
        odd = torch.tensor([3, wrong], dtype=torch.int32)
        with pytest.raises(
            ValueError,
            match=f"cache_batch_idx has {wrong} for sequence 1, expected from 0 to below the 4 of page_table",
        ):
            flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table, cache_batch_idx=odd)
        compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="eager")
        with pytest.raises(IndexError):
            compiled(q, k, v, cache_seqlens=lengths, page_table=table, cache_batch_idx=odd)
    assert torch.equal(compiled(q, k, v, cache_seqlens=lengths, page_table=table, cache_batch_idx=rows), expected)
    more = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table)
    assert torch.equal(more, flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table[:2]))
    new = torch.randn(2, 1, 2, 16)
    paged = [x.clone() for x in (k, v)]
    flash_attn_with_kvcache(q, *paged, new, new, cache_seqlens=lengths, page_table=table, cache_batch_idx=rows)
    assert torch.equal(paged[0][table[3, 0], 3], new[0, 0]) and torch.equal(paged[1][table[1, 1], 3], new[1, 0])


@pytest.mark.parametrize("batch", [(), (2,)])
def test_wide_parts_are_combined_with_and_without_a_batch(batch):
    parts, sums = torch.randn(3, *batch, 6, 2, 512), torch.randn(3, *batch, 6, 2)
    expected = (sums.softmax(0)[..., None] * parts).sum(0)
    into = torch.zeros(*batch, 6, 2, 512)
    for out in (None, into):
        found, lse = flash_attn_combine(parts, sums, out)
        assert torch.allclose(found, expected, atol=1e-5) and torch.allclose(lse, sums.logsumexp(0), atol=1e-5)
    assert torch.allclose(into, expected, atol=1e-5)


def test_8_bits_that_require_grad_are_refused_when_there_is_a_backward_pass():
    x = torch.randn(1, 4, 2, 16).to(torch.float8_e4m3fn).requires_grad_()
    out, lse, _ = flash_attn_func(x, x, x, return_attn_probs=True)
    with torch.no_grad():
        assert torch.equal(out, flash_attn_func(x, x, x))
    assert out.requires_grad and not lse.requires_grad
    with pytest.raises(NotImplementedError, match="there are no gradients of 8-bit tensors"):
        out.sum().backward()


def test_padding_goes_to_rows_and_back():
    from flashcore.compat.bert_padding import index_first_axis, pad_input, unpad_input

    x = torch.randn(2, 4, 3, requires_grad=True)
    mask, unused = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0]]), torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]])
    rows, indices, starts, longest, used = unpad_input(x, mask, unused)
    assert indices.tolist() == [0, 1, 2, 5, 6] and starts.tolist() == [0, 3, 5] and starts.dtype == torch.int32
    assert longest == 3 and used.tolist() == [2, 2]
    assert torch.equal(rows, index_first_axis(x.flatten(0, 1), indices))
    back = pad_input(rows, indices, 2, 4)
    assert torch.equal(back, x * (mask + unused)[..., None])
    back.sum().backward()
    assert torch.equal(x.grad, (mask + unused)[..., None].expand(2, 4, 3).float())
