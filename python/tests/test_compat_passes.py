"""FlashAttention-2's forward and backward pass as functions of their own: the same as through autograd."""

import ast
import inspect
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from conftest import devices
from flashcore import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flashcore.compat import _passes, _passes_third, flash_attn_2_cuda, flash_attn_interface
from flashcore.compat import flash_attn as module

forward, backward = _passes._flash_attn_forward, _passes._flash_attn_backward
varlen_forward, varlen_backward = _passes._flash_attn_varlen_forward, _passes._flash_attn_varlen_backward

# Causal flag, window, softcap and slopes of four heads.
RULES = [
    (False, (-1, -1), 0.0, None),
    (True, (-1, -1), 0.0, None),
    (False, (2, 1), 0.0, None),
    (True, (3, 0), 2.0, None),
    (True, (-1, -1), 0.0, [0.5, 0.25, 0.125, 1.0]),
]


@pytest.fixture(autouse=True)
def forget_what_was_compiled():
    """PyTorch compiles a function for so many kinds of arguments and no more: leave others theirs."""
    yield
    torch._dynamo.reset()


def products(dout, out):
    return (dout * out).sum(-1).transpose(-1, -2)


@pytest.mark.parametrize("causal, window, softcap, slopes", RULES)
@pytest.mark.parametrize("key_heads", [4, 2])
def test_both_passes_are_those_of_autograd(causal, window, softcap, slopes, key_heads):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 7, heads, 16, requires_grad=True) for heads in (4, key_heads, key_heads))
    slopes = None if slopes is None else torch.tensor(slopes)
    rules = {"causal": causal, "window_size": window, "softcap": softcap, "alibi_slopes": slopes}
    out, lse, _ = flash_attn_func(q, k, v, softmax_scale=0.3, return_attn_probs=True, **rules)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    with torch.no_grad():
        by_place = (0.0, 0.3, causal, *window, softcap, slopes)
        found, sums, mask, state = forward(q, k, v, *by_place, False)
        assert torch.equal(found, out) and torch.equal(sums, lse)
        assert mask.shape == (0,) and mask.dtype == q.dtype and state.shape == (2,) and state.dtype == torch.int64
        # Into parts of larger tensors, as rings have them.
        into = [torch.full((2, 9, *it.shape[2:]), 5.0)[:, 1:8] for it in (q, k, v)]
        sums = backward(dout, q, k, v, found, sums, *into, *by_place, False, state)
        assert sums.dtype == torch.float32 and torch.allclose(sums, products(dout, out), atol=1e-5)
        for gradient, wanted in zip(into, expected):
            assert torch.allclose(gradient, wanted, atol=1e-6) and (gradient._base[:, 0] == 5).all()
        only = torch.empty_like(v)
        backward(dout, q, k, v, found, lse, None, None, only, *by_place, True)
        assert torch.allclose(only, expected[2], atol=1e-6)


@pytest.mark.parametrize("causal, window, softcap, slopes", RULES)
def test_both_passes_over_sequences(causal, window, softcap, slopes):
    torch.manual_seed(0)
    q, k, v = (torch.randn(11, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    starts_q, starts_k = (torch.tensor(it, dtype=torch.int32) for it in ([0, 3, 3, 9], [0, 2, 4, 10]))
    slopes = None if slopes is None else torch.tensor(slopes)
    rules = {"causal": causal, "window_size": window, "softcap": softcap, "alibi_slopes": slopes}
    lists = (starts_q, starts_k, 6, 6)
    out, lse = flash_attn_varlen_func(q, k, v, *lists, return_attn_probs=True, **rules)
    used = slice(0, 9)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    with torch.no_grad():
        by_place = (0.0, 0.25, causal, *window, softcap, slopes)
        found, sums, mask, state = varlen_forward(q, k, v, *lists, *by_place)
        assert torch.equal(found[used], out[used]) and torch.equal(sums[:, used], lse[:, used]) and mask.shape == (0,)
        into = [torch.full_like(it, 5.0) for it in (q, k, v)]
        sums = varlen_backward(dout, q, k, v, found, sums, *into, *lists, *by_place, False, state)
        assert sums.shape == (4, 11) and torch.allclose(sums[:, used], products(dout, out)[:, used], atol=1e-5)
        for gradient, wanted in zip(into, expected):
            assert torch.allclose(gradient, wanted, atol=1e-6)


def test_passes_of_parts_of_the_keys_add_up():
    """What a ring does: each step has its own keys, and the output and log-sum-exps of all."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 6, 2, 16, requires_grad=True) for _ in range(3))
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    dout = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    rules = (0.0, 0.25, False, -1, -1, 0.0, None, False)
    total = torch.zeros_like(q)
    with torch.no_grad():
        for at in (slice(0, 2), slice(2, 6)):
            into = [torch.empty_like(it) for it in (q, k[:, at], v[:, at])]
            backward(dout, q, k[:, at], v[:, at], out, lse, *into, *rules)
            total += into[0]
            assert torch.allclose(into[1], dk[:, at], atol=1e-6) and torch.allclose(into[2], dv[:, at], atol=1e-6)
    assert torch.allclose(total, dq, atol=1e-6)


def test_a_negative_softcap_is_none():
    q, k, v = torch.randn(3, 1, 5, 2, 16)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    results = []
    for softcap in (0.0, -1.0):
        rules = (0.0, 0.25, True, -1, -1, softcap, None)
        out, lse, *_ = forward(q, k, v, *rules, False)
        rows, *_ = varlen_forward(q[0], k[0], v[0], starts, starts, 5, 5, *rules)
        into = [torch.empty_like(q) for _ in range(6)]
        backward(q, q, k, v, out, lse, *into[:3], *rules, False)
        packed = [it[0] for it in (q, q, k, v, out, lse, *into[3:])]
        varlen_backward(*packed, starts, starts, 5, 5, *rules, False)
        results.append((out[0], rows, *into))
    assert all(torch.equal(*pair) for pair in zip(*results))


def test_keys_in_pages_and_used_keys():
    torch.manual_seed(0)
    q, pages = torch.randn(4, 2, 16), torch.randn(2, 3, 8, 2, 16)
    starts, table = torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([[2], [0]], dtype=torch.int32)
    lengths = torch.tensor([5, 8], dtype=torch.int32)
    found, *_ = varlen_forward(
        q, *pages, starts, starts, 2, 8, 0.0, 0.25, True, block_table=table, seqused_k=lengths, num_splits=1
    )
    expected = flash_attn_varlen_func(
        q, *pages, starts, None, 2, 8, seqused_k=lengths, block_table=table, causal=True, softmax_scale=0.25
    )
    assert torch.equal(found, expected)


def test_last_dimensions_with_gaps_and_16_bits():
    torch.manual_seed(0)
    q, k, v, dout = (it.transpose(2, 3) for it in torch.randn(4, 1, 5, 16, 2, dtype=torch.bfloat16))
    dense = [it.contiguous().requires_grad_() for it in (q, k, v)]
    out, lse, _ = flash_attn_func(*dense, return_attn_probs=True)
    expected = torch.autograd.grad(out, dense, dout)
    into = [torch.empty_like(it) for it in dense]
    backward(dout, q, k, v, out.detach(), lse, *into, 0.0, None, False, -1, -1, 0.0, None, False)
    for gradient, wanted in zip(into, expected):
        assert torch.equal(gradient, wanted)
    # Those that are made have no gaps either.
    only = torch.empty_like(dense[0])
    backward(dout, q, k, v, out.detach(), lse, only, None, None, 0.0, None, False, -1, -1, 0.0, None, False)
    assert torch.equal(only, expected[0])


@pytest.mark.parametrize("device", devices())
def test_packed_gradients_in_16_bits(device):
    torch.manual_seed(0)
    qkv = torch.randn(2, 9, 3, 2, 64).bfloat16().to(device)
    rules = (0.0, None, True, -1, -1, 0.0, None)
    # The second sequence is empty, and four rows belong to none.
    starts = torch.tensor([0, 9, 9, 14], dtype=torch.int32, device=device)
    lists = (starts, starts, 9, 9)
    for at, lists, whole, run, differentiate, used in (
        (2, (), flash_attn_func, forward, backward, slice(None)),
        (1, lists, flash_attn_varlen_func, varlen_forward, varlen_backward, slice(14)),
    ):
        given = qkv if at == 2 else qkv.flatten(0, 1)
        leaf = given.clone().requires_grad_()
        out = whole(*leaf.unbind(at), *lists, causal=True, deterministic=True)
        dout = torch.randn(out.shape).to(out)
        (expected,) = torch.autograd.grad(out, leaf, dout)
        found, sums, *_ = run(*given.unbind(at), *lists, *rules, False)
        assert torch.equal(found[used], out[used])
        into = torch.full_like(given, 5.0)
        sums = differentiate(dout, *given.unbind(at), found, sums, *into.unbind(at), *lists, *rules, True)
        assert torch.equal(into, expected)
        near = products(dout.float(), found.float())
        assert torch.allclose(sums[..., used], near[..., used], atol=1e-3)


def test_the_compiler_traces_both_passes():
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, 5, 2, 16)
    rules = (0.0, 0.25, True, -1, -1, 0.0, None)

    def both(dout, q, k, v, into):
        out, lse, _, state = forward(q, k, v, *rules, False)
        return out, backward(dout, q, k, v, out, lse, *into, *rules, False, state)

    into, eager = ([torch.empty_like(it) for it in (q, k, v)] for _ in range(2))
    out, sums = torch.compile(both, fullgraph=True, backend="eager")(dout, q, k, v, into)
    expected, wanted = both(dout, q, k, v, eager)
    assert torch.equal(out, expected) and torch.equal(sums, wanted)
    assert all(torch.equal(a, b) for a, b in zip(into, eager))


def test_what_is_not_served_is_refused_by_name():
    q, k, v = torch.randn(3, 1, 5, 2, 16)
    rules = (0.25, False, -1, -1, 0.0, None)
    out, lse, _, _ = forward(q, k, v, 0.0, *rules, False)
    with pytest.raises(NotImplementedError, match="dropout_p=0.5 is not supported"):
        forward(q, k, v, 0.5, *rules, False)
    with pytest.raises(NotImplementedError, match="dropout_p=0.5 is not supported"):
        backward(q, q, k, v, out, lse, None, None, None, 0.5, *rules, False)
    rows, starts = q[0], torch.tensor([0, 5], dtype=torch.int32)
    lists = (starts, starts, 5, 5)
    for name, value in (
        ("zero_tensors", True),
        ("leftpad_k", starts[:1]),
        ("dropout_p", 0.1),
    ):
        with pytest.raises(NotImplementedError, match=f"{name}=.* is not supported"):
            varlen_forward(
                rows, rows, rows, *lists, **{"dropout_p": 0.0, "softmax_scale": None, "causal": True, name: value}
            )
    with pytest.raises(NotImplementedError, match="dropout_p=0.5 is not supported"):
        varlen_backward(rows, rows, rows, rows, rows, lse[0], None, None, None, *lists, 0.5, *rules, False)


def test_a_probability_that_drops_nothing():
    """diffusers passes 1e-30, since early versions returned log-sum-exps with dropout only, and in the place of
    ``return_softmax`` whether it wants them."""
    q, k, v, dout = torch.randn(4, 1, 5, 2, 16)
    rules = (0.25, False, -1, -1, 0.0, None)
    found, expected = ([torch.empty_like(q) for _ in range(3)] for _ in range(2))
    out, lse, mask, state = forward(q, k, v, 1e-30, *rules, True)
    assert mask.shape == (0,)
    backward(dout, q, k, v, out, lse, *found, 1e-30, *rules, False, state)
    plain, sums, _, _ = forward(q, k, v, 0.0, *rules, False)
    backward(dout, q, k, v, plain, sums, *expected, 0.0, *rules, False, state)
    assert torch.equal(out, plain) and torch.equal(lse, sums)
    assert all(torch.equal(*pair) for pair in zip(found, expected))
    # The largest of which nothing is left, and the next that keeps one in so many.
    forward(q, k, v, 2.0**-26, *rules, False)
    with pytest.raises(NotImplementedError, match="dropout_p=.* is not supported"):
        forward(q, k, v, 2.0**-24, *rules, False)
    with pytest.raises(NotImplementedError, match="dropout_p=-1e-30 is not supported"):
        forward(q, k, v, -1e-30, *rules, False)


third_forward, third_backward = _passes_third._flash_attn_forward, _passes_third._flash_attn_backward


@pytest.mark.parametrize("causal, window, softcap, slopes", RULES[:4])
def test_both_passes_of_the_third_version(causal, window, softcap, slopes):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 7, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    rules = {"causal": causal, "window_size": window, "softcap": softcap, "softmax_scale": 0.3}
    sides = {"window_size_left": window[0], "window_size_right": window[1], "softcap": softcap}
    used = torch.tensor([7, 4], dtype=torch.int32)
    starts = torch.tensor([0, 7, 14], dtype=torch.int32)
    # As a batch, as rows of sequences with some that are not used, and padded with the same.
    for flat, lists in ((False, {}), (True, {"seqused_q": used, "seqused_k": used}), (False, {"seqused_k": used})):
        given = [it.flatten(0, 1) if flat else it for it in (q, k, v)]
        lists = {**lists, **({"cu_seqlens_q": starts, "cu_seqlens_k": starts} if flat else {})}
        # Whoever has lists has the longest length too; for a batch it says nothing.
        longest = {"max_seqlen_q": 7, "max_seqlen_k": 7}
        whole = flash_attn_varlen_func if lists else flash_attn_func
        out, lse, *_ = whole(*given, **lists, **(longest if lists else {}), **rules, return_attn_probs=True)
        dout = torch.randn_like(out)
        if flat:
            dout[11:] = 0
        expected = torch.autograd.grad(out, (q, k, v), dout)
        with torch.no_grad():
            found, sums, *parts = third_forward(*given, **lists, **longest, softmax_scale=0.3, causal=causal, **sides)
            rows = slice(0, 11) if flat else slice(None)
            assert torch.equal(found[rows], out[rows]) and torch.equal(sums[..., rows], lse[..., rows])
            assert [it.numel() for it in parts] == [0, 0]
            into = [torch.full_like(it, 5.0) for it in given]
            of = {name.replace("seqused", "sequed"): it for name, it in lists.items()}
            of |= {"softmax_scale": 0.3, "is_causal": causal, **sides, **longest}
            sums = third_backward(dout, *given, found, sums, **of, **dict(zip(("dq", "dk", "dv"), into)))
            near = products(dout, out)
            assert sums.shape == lse.shape and torch.allclose(sums[..., rows], near[..., rows], atol=1e-5)
            for gradient, wanted in zip(into, expected):
                assert torch.allclose(gradient.view_as(wanted), wanted, atol=1e-6)


def test_the_third_version_over_caches():
    """What Megatron and TransformerEngine ask of the forward pass: pages with used keys, and new keys."""
    torch.manual_seed(0)
    pages, table = torch.randn(2, 3, 8, 2, 16), torch.tensor([[2], [0]], dtype=torch.int32)
    lengths, starts = torch.tensor([5, 7], dtype=torch.int32), torch.tensor([0, 1, 4], dtype=torch.int32)
    q = torch.randn(4, 4, 16)
    into = torch.empty_like(q)
    lists = {"cu_seqlens_q": starts, "max_seqlen_q": 3}
    found, sums, *_ = third_forward(
        q, *pages, **lists, out_=into, seqused_k=lengths, max_seqlen_k=8, page_table=table, causal=True, num_splits=0
    )
    expected = flash_attn_with_kvcache(
        q, *pages, **lists, cache_seqlens=lengths, page_table=table, causal=True, return_softmax_lse=True
    )
    assert found is into and torch.equal(found, expected[0]) and torch.equal(sums, expected[1])
    q, k, v = torch.randn(2, 1, 4, 16), *torch.randn(2, 2, 1, 2, 16)
    cos, sin = torch.randn(2, 8, 8)
    caches = [pages.clone() for _ in range(2)]
    rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False}
    lengths[1] = 4
    found, *_ = third_forward(
        q, *caches[0], k, v, seqused_k=lengths, page_table=table, leftpad_k=lengths // 4, causal=True, **rotary
    )
    expected = flash_attn_with_kvcache(
        q, *caches[1], k, v, cache_seqlens=lengths, page_table=table, cache_leftpad=lengths // 4, causal=True, **rotary
    )
    assert torch.equal(found, expected) and torch.equal(*caches) and not torch.equal(caches[0], pages)
    with pytest.raises(NotImplementedError, match="cu_seqlens_k or seqused_q was given with an argument of caches"):
        third_forward(q, *pages, k, v, seqused_q=lengths, seqused_k=lengths, page_table=table)
    with pytest.raises(NotImplementedError, match="qv=.* is not supported"):
        third_forward(q, *pages, qv=q)
    with pytest.raises(TypeError, match="q is a <class 'int'>, expected a tensor of PyTorch"):
        third_forward(3, *pages)
    with pytest.raises(TypeError, match="sequed_k is a <class 'int'>|seqused_k is a <class 'int'>"):
        third_backward(q, q, k, v, q, q[..., 0], sequed_k=3)


def test_functions_of_the_extension_are_those_of_the_passes():
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 2, 5, 2, 16)
    slopes = torch.tensor([0.5, 0.25])
    rules = (0.25, True, 3, 0, 1.5)
    out, lse, *_ = forward(q, k, v, 0.0, *rules, slopes, False)
    into = torch.empty_like(q)
    for given in (None, into):
        found = flash_attn_2_cuda.fwd(q, k, v, given, slopes, 0.0, *rules, False, None)
        assert torch.equal(found[0], out) and torch.equal(found[1], lse) and len(found) == 4
        assert given is None or found[0] is given
    expected = [torch.empty_like(q) for _ in range(3)]
    sums = backward(dout, q, k, v, out, lse, *expected, 0.0, *rules, slopes, True)
    only = torch.empty_like(q)
    found = flash_attn_2_cuda.bwd(dout, q, k, v, out, lse, only, None, None, slopes, 0.0, *rules, True, None, None)
    assert found[0] is only and all(torch.equal(*pair) for pair in zip(found, (*expected, sums)))

    rows, starts = [it.flatten(0, 1) for it in (q, k, v, dout)], torch.tensor([0, 3, 10], dtype=torch.int32)
    lists, longest = (starts, starts), (7, 7)
    out, lse, *_ = varlen_forward(*rows[:3], *lists, *longest, 0.0, *rules, slopes)
    into = torch.empty_like(rows[0])
    none = (None,) * 3
    for count in ((), (4,)):
        found = flash_attn_2_cuda.varlen_fwd(
            *rows[:3], into, *lists, *none, slopes, *longest, 0.0, 0.25, False, *rules[1:], False, None, *count
        )
        assert found[0] is into and torch.equal(into, out) and torch.equal(found[1], lse) and len(found) == 4
    expected = [torch.empty_like(it) for it in rows[:3]]
    sums = varlen_backward(rows[3], *rows[:3], out, lse, *expected, *lists, *longest, 0.0, *rules, slopes, True)
    found = flash_attn_2_cuda.varlen_bwd(
        rows[3], *rows[:3], out, lse, *none, *lists, slopes, *longest, 0.0, 0.25, False, *rules[1:], True, None, None
    )
    assert all(torch.equal(*pair) for pair in zip(found, (*expected, sums)))

    lengths = torch.tensor([2, 4], dtype=torch.int32)
    caches = [torch.stack((k, v)) for _ in range(2)]
    new = torch.randn(2, 2, 1, 2, 16)
    found = flash_attn_2_cuda.fwd_kvcache(
        q[:, :1], *caches[0], *new, lengths, *(None,) * 5, slopes, None, *rules, True, 0
    )
    expected = module.flash_attn_with_kvcache(
        q[:, :1], *caches[1], *new, cache_seqlens=lengths, softmax_scale=0.25, causal=True, window_size=(3, 0),
        softcap=1.5, alibi_slopes=slopes, return_softmax_lse=True,
    )  # fmt: skip
    assert all(torch.equal(*pair) for pair in zip(found, expected)) and torch.equal(*caches)
    # Parameters of a model: what autograd does not see it does not refuse either.
    weights = torch.nn.Parameter(rows[0])
    found = flash_attn_2_cuda.varlen_fwd(
        weights, *rows[1:3], into, *lists, *none, slopes, *longest, 0.0, 0.25, False, *rules[1:], False, None
    )
    assert found[0] is into and torch.equal(into, out) and not found[1].requires_grad
    for name, value in (("leftpad_k", lengths), ("zero_tensors", True)):
        call = inspect.signature(flash_attn_2_cuda.varlen_fwd).bind(
            *rows[:3], None, *lists, *none, slopes, *longest, 0.0, 0.25, False, *rules[1:], False, None
        )
        call.arguments[name] = value
        with pytest.raises(NotImplementedError, match=f"{name}=.* is not supported"):
            flash_attn_2_cuda.varlen_fwd(*call.args)


@pytest.mark.parametrize("name", ["dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv"])
def test_what_is_no_tensor_is_refused_by_name(name):
    q, k, v = torch.randn(3, 1, 5, 2, 16)
    out, lse, _, _ = forward(q, k, v, 0.0, None, False, -1, -1, 0.0, None, False)
    good = {"dout": q, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse, "dq": None, "dk": None, "dv": None}
    rest = (0.0, None, False, -1, -1, 0.0, None, False)
    with pytest.raises(TypeError, match=f"{name} is a <class 'int'>, expected a tensor of PyTorch"):
        backward(*{**good, name: 3}.values(), *rest)
    with pytest.raises(TypeError, match=f"{name} cannot be read"):
        backward(*{**good, name: q.to_sparse()}.values(), *rest)
    if name in ("q", "k", "v"):
        with pytest.raises(TypeError, match=f"{name} is a <class 'int'>, expected a tensor of PyTorch"):
            forward(*{"q": q, "k": k, "v": v, name: 3}.values(), *rest[:-1], False)
    with pytest.raises(ValueError, match=f"{name} has|to go with"):
        backward(*{**good, name: q[:, :3]}.values(), *rest)
    # A tensor that PyTorch's dispatcher has to see.
    seen = {**good, "k": torch.nn.Parameter(k)}
    if name in ("dq", "dk", "dv"):
        into = torch.empty_like(q)
        backward(*{**seen, name: into}.values(), *rest)
        again = torch.empty_like(q)
        backward(*{**good, name: again}.values(), *rest)
        assert torch.equal(into, again) and not into.requires_grad
        with pytest.raises(ValueError, match=rf"{name} is \[1, 3, 2, 16\] of torch.float32, expected \[1, 5, 2, 16\]"):
            backward(*{**seen, name: q[:, :3]}.values(), *rest)


def test_lists_that_are_no_tensors_are_refused_by_name():
    rows, lse, starts = torch.randn(5, 2, 16), torch.randn(2, 5), torch.tensor([0, 5], dtype=torch.int32)
    good = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "alibi_slopes": None}
    for name in good:
        given = {**good, name: [0.5, 0.25]}
        slopes = given.pop("alibi_slopes")
        with pytest.raises(TypeError, match=f"{name} is a <class 'list'>, expected a tensor of PyTorch"):
            varlen_backward(
                rows, rows, rows, rows, rows, lse, None, None, None, *given.values(), 5, 5, 0.0, None, True, -1, -1,
                0.0, slopes, False,
            )  # fmt: skip


def functions_of_a_checkout(path):
    if "FLASH_ATTENTION" not in os.environ:
        pytest.skip("FLASH_ATTENTION names no checkout")
    source = (Path(os.environ["FLASH_ATTENTION"]) / path).read_text()
    return {it.name: it for it in ast.parse(source).body if isinstance(it, ast.FunctionDef)}


def test_arguments_are_those_of_the_library():
    theirs = functions_of_a_checkout("flash_attn/flash_attn_interface.py")
    for name in _passes.__all__:
        function = getattr(module, name)
        plain = name.removeprefix("_wrapped")
        assert function is getattr(module, plain) and function.__name__ == plain
        assert list(inspect.signature(function).parameters) == [it.arg for it in theirs[plain].args.args]


def test_arguments_of_the_third_version_are_those_of_the_library():
    theirs = functions_of_a_checkout("hopper/flash_attn_interface.py")
    for name in _passes_third.__all__:
        function = getattr(flash_attn_interface, name)
        assert list(inspect.signature(function).parameters) == [it.arg for it in theirs[name].args.args]
