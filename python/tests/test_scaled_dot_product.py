"""``scaled_dot_product_attention`` beside PyTorch's function of that name: leading dimensions, causal biases, and
``torch.vmap`` with masks."""

import flashcore
import numpy as np
import pytest
from flashcore import scaled_dot_product_attention

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 7 * len(shape)))


# Leading dimensions of queries, keys and values, and whether query heads share key heads.
LEADING = [
    ((), (), (), False),
    ((3,), (3,), (3,), False),
    ((6,), (3,), (3,), True),
    ((2, 3), (1, 3), (1, 3), False),
    ((1, 3), (2, 3), (2, 3), False),
    ((2, 3), (2, 1), (2, 1), False),
    ((2, 1), (2, 3), (2, 3), False),
    ((2, 3), (2, 3), (1, 1), False),
    ((2, 3), (2, 1), (2, 3), False),
    ((2, 3), (3,), (), False),
    ((2, 6), (1, 3), (2, 3), True),
    ((2, 2, 3), (2, 2, 3), (2, 2, 3), False),
    ((2, 1, 3), (1, 4, 3), (2, 4, 1), False),
    ((2, 1, 6), (1, 4, 3), (2, 4, 3), True),
    ((0, 3), (1, 3), (1, 3), False),
]


@pytest.mark.parametrize("q, k, v, shared", LEADING, ids=str)
def test_leading_dimensions_are_pytorchs(q, k, v, shared):
    check_leading(scaled_dot_product_attention, q, k, v, shared)


def test_leading_dimensions_can_be_compiled():
    torch._dynamo.reset()
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    for at in (1, 5, 12):
        check_leading(compiled, *LEADING[at])


def check_leading(call, q, k, v, shared):
    shapes = ((*q, 5, 16), (*k, 7, 16), (*v, 7, 8))
    given = [random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    for causal in (False, True):
        expected = F.scaled_dot_product_attention(*given, is_causal=causal, enable_gqa=shared)
        output = call(*given, is_causal=causal, enable_gqa=shared)
        assert output.shape == expected.shape
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
        dout = random(*expected.shape, seed=9)
        found, wanted = (torch.autograd.grad(it, given, dout) for it in (output, expected))
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 4, 3)], ids=str)
@pytest.mark.parametrize("additive", [False, True])
def test_masks_of_any_leading_dimensions(leading, additive):
    q, k, v = (random(*leading, length, 16, seed=length) for length in (5, 7, 7))
    masked = {(*leading[at:], 5, 7) for at in range(len(leading) + 1)} | {
        (*(1,) * len(leading), 5, 7),
        (*leading[:-1], *(1,) * len(leading[-1:]), 1, 7),
    }
    for shape in masked:
        mask = random(*shape, seed=3)
        mask = mask if additive else mask > -0.7
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        torch.testing.assert_close(
            scaled_dot_product_attention(q, k, v, attn_mask=mask), expected, atol=1e-5, rtol=1e-5
        )
    with pytest.raises(ValueError, match="attn_mask has shape"):
        scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(*(1,) * len(leading), 9, 1, 5, 7))


@pytest.mark.parametrize("queries, keys", [(0, 7), (5, 0), (0, 0)])
def test_a_mask_of_no_pairs_has_a_gradient_of_zero(queries, keys):
    q, k = random(2, 3, queries, 16).requires_grad_(), random(2, 3, keys, 16)
    for shape in ((queries, keys), (queries, 1), (1, 1, 1, keys), (2, 3, 1, 1), (1,)):
        mask = random(*shape).requires_grad_()
        output = scaled_dot_product_attention(q, k, k, attn_mask=mask)
        assert not output.any()
        found = torch.autograd.grad(output.sum(), (q, mask))
        assert [it.shape for it in found] == [q.shape, mask.shape]
        assert not any(it.any() for it in found)


def test_leading_dimensions_of_other_libraries():
    q, k, v = (random(*shape, seed=3).numpy() for shape in ((2, 3, 5, 16), (3, 7, 16), (1, 1, 7, 16)))
    expected = F.scaled_dot_product_attention(*map(torch.from_numpy, (q, k, v))).numpy()
    np.testing.assert_allclose(scaled_dot_product_attention(q, k, v), expected, atol=1e-5)
    jax = pytest.importorskip("jax")
    for call in (scaled_dot_product_attention, jax.jit(scaled_dot_product_attention)):
        np.testing.assert_allclose(call(*map(jax.numpy.asarray, (q, k, v))), expected, atol=1e-5)


def test_leading_dimensions_that_do_not_fit_are_refused():
    x = random(2, 3, 5, 16)
    for error, given in (
        ("key has 3 heads, expected the 6 of query unless enable_gqa=True", (random(2, 6, 5, 16), x, x)),
        ("key has shape", (x, random(3, 3, 5, 16), random(3, 3, 5, 16))),
        ("query has 1 dimensions", (random(16), x, x)),
    ):
        with pytest.raises(ValueError, match=error):
            scaled_dot_product_attention(*given)


@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
@pytest.mark.parametrize("queries, keys", [(5, 5), (5, 9), (9, 5), (1, 4)])
@pytest.mark.parametrize("dim", [16, 13])
@pytest.mark.filterwarnings("ignore:head dim", "ignore:Lower right causal bias")
def test_causal_biases_stand_for_their_masks(bias, queries, keys, dim):
    """Such a bias is a tensor whose memory says nothing."""
    q, k, v = (
        random(2, heads, length, dim, seed=heads).requires_grad_()
        for heads, length in ((4, queries), (2, keys), (2, keys))
    )
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries if bias is causal_lower_right else 0)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    output = scaled_dot_product_attention(q, k, v, attn_mask=bias(queries, keys), enable_gqa=True)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    found, wanted = (torch.autograd.grad(it.sin().sum(), (q, k, v)) for it in (output, expected))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    flat = scaled_dot_product_attention(q[0, 0], k[0, 0], v[0, 0], attn_mask=bias(queries, keys))
    torch.testing.assert_close(flat, output[0, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_biases_can_be_compiled():
    torch._dynamo.reset()
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    q, k = random(1, 2, 3, 16), random(1, 2, 7, 16)
    for bias in (causal_lower_right, causal_upper_left):
        assert torch.equal(
            compiled(q, k, k, attn_mask=bias(3, 7)), scaled_dot_product_attention(q, k, k, attn_mask=bias(3, 7))
        )


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_biases_that_do_not_fit_are_refused():
    x = random(1, 2, 5, 16)
    with pytest.raises(ValueError, match=r"attn_mask is a causal bias of \[5, 6\], expected \[5, 5\]"):
        scaled_dot_product_attention(x, x, x, attn_mask=causal_lower_right(5, 6))
    with pytest.raises(ValueError, match="attn_mask was given with is_causal=True"):
        scaled_dot_product_attention(x, x, x, attn_mask=causal_upper_left(5, 5), is_causal=True)


def test_a_causal_bias_runs_as_the_built_in_mask():
    x = random(1, 2, 5, 16)
    scaled_dot_product_attention(x, x, x, attn_mask=causal_upper_left(5, 5))
    assert "causal" in flashcore.info()["last"]["problem"]


def test_vmap_over_masks_and_functions():
    q, k, v = (random(3, 2, 2, 5, 16, seed=seed).requires_grad_() for seed in range(3))
    bias = random(5, 5, 3, seed=5).requires_grad_()
    call = lambda q, k, v, mask: scaled_dot_product_attention(q, k, v, attn_mask=mask)  # noqa: E731
    scored = lambda q, k, v, bias: flashcore.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[i, j] - h)  # noqa: E731
    for function in (call, scored):
        output = torch.vmap(function, in_dims=(0, 0, None, 2))(q, k, v[0], bias)
        one_by_one = torch.stack([function(q[at], k[at], v[0], bias[..., at]) for at in range(3)])
        torch.testing.assert_close(output, one_by_one)
        found, wanted = (torch.autograd.grad(it.sin().sum(), (q, k, v, bias)) for it in (output, one_by_one))
        torch.testing.assert_close(found, wanted)
    seen = bias.detach() > -0.5
    output = torch.vmap(call, in_dims=(0, 0, 0, 2))(q, k, v, seen)
    torch.testing.assert_close(output, F.scaled_dot_product_attention(q, k, v, seen.movedim(2, 0)[:, None, None]))
