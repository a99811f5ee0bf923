"""8-bit tensors and their factors, on the CPU: against attention over what they stand for."""

import doctest

import flashcore
import numpy as np
import pytest
from flashcore import (
    dequantize,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    quantize,
    quantize_kv,
)

ml_dtypes = pytest.importorskip("ml_dtypes")
DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
PER = ("tensor", "head", "sequence", "token")


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_the_example_of_the_documentation():
    import flashcore._quantize as module

    results = doctest.testmod(module)
    assert results.attempted > 0 and results.failed == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per", PER)
def test_numbers_come_back_within_half_a_step(dtype, per):
    x = random(2, 5, 6, 16)
    small, descale = quantize(x, dtype, per=per)
    assert small.dtype.name == dtype and small.shape == x.shape and descale.dtype == np.float32
    assert descale.shape == {"tensor": (), "head": (6,), "sequence": (2, 6), "token": (2, 5, 6)}[per]
    step = {"float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3, "int8": 0}[dtype]
    # Small numbers beside a large one fall below the normal range; integers are all as far apart.
    floor = float(descale.max()) * {"float8_e4m3fn": 2.0**-10, "float8_e5m2": 2.0**-17, "int8": 0.5001}[dtype]
    assert (abs(dequantize(small, descale) - x) <= step * abs(x) + floor).all()


def test_query_heads_share_the_factors_of_key_heads():
    q = random(2, 5, 6, 16)
    small, descale = quantize(q, per="sequence", kv_heads=2)
    assert descale.shape == (2, 2)
    largest = abs(q).reshape(2, 5, 2, 3, 16).max(axis=(1, 3, 4))
    assert np.array_equal(descale, largest * np.float32(1 / 448))
    assert abs(dequantize(small, descale) - q).max() < 0.2
    for per in PER:
        for x in (q, q[0]):
            if per == "sequence" and x.ndim == 3:
                continue
            small, descale = quantize(x, per=per, kv_heads=2)
            assert abs(dequantize(small, descale) - x).max() < 0.3
            # Factors in other types give float32 as well.
            found = dequantize(small, descale.astype(np.float64))
            assert found.dtype == np.float32 and np.array_equal(found, dequantize(small, descale))
    with pytest.raises(ValueError, match="descale has shape"):
        dequantize(small, np.ones((2, 5, 4), np.float32))


def test_integers_are_nearest_even_and_saturate():
    x = np.array([127, -127, 0.5, 1.5, -2.5, 126.5, 0, -126.4], np.float32).reshape(1, 1, 1, 8)
    small, descale = quantize(x, "int8")
    assert small.dtype == np.int8 and descale == np.float32(1.0)
    assert small.ravel().tolist() == [127, -127, 0, 2, -2, 126, 0, -126]
    cache = [np.zeros((1, 1, 1, 8), np.int8) for _ in range(2)]
    factors = {"k_descale": np.ones(1, np.float32), "v_descale": np.full(1, 0.25, np.float32)}
    x[..., 6] = np.nan
    q, lengths = np.zeros((1, 1, 1, 8), np.float32), np.zeros(1, np.int32)
    flash_attn_with_kvcache(q, *cache, x, x, cache_seqlens=lengths, **factors)
    assert np.array_equal(cache[0], small)
    assert cache[1].ravel().tolist() == [127, -127, 2, 6, -10, 127, 0, -127]


@pytest.mark.parametrize("wide", ["float16", "bfloat16"])
def test_queries_of_16_bits_over_integers(wide):
    q, k, v = random(1, 5, 4, 32), random(1, 40, 2, 32, seed=1), random(1, 40, 2, 32, seed=2)
    k8, v8, k_descale, v_descale = quantize_kv(k, v, np.int8, per="token")
    # What quantize never makes is a number too.
    k8[0, 7] = -128
    q = q.astype(getattr(ml_dtypes, wide) if wide == "bfloat16" else wide)
    expected = flash_attn_func(q.astype(np.float32), dequantize(k8, k_descale), dequantize(v8, v_descale))
    found = flash_attn_func(q, k8, v8, k_descale=k_descale, v_descale=v_descale)
    assert found.dtype == q.dtype and np.allclose(found.astype(np.float32), expected, atol=1e-2)
    with pytest.raises(TypeError, match="q has element type int8, expected a floating-point one"):
        flash_attn_func(k8, k8, v8)
    if wide == "bfloat16":
        with pytest.raises(TypeError, match="k has element type int8, expected floating-point numbers"):
            flash_attn_func(q, k8, v.astype(ml_dtypes.float8_e5m2))


def test_zeros_have_a_factor():
    small, descale = quantize(np.zeros((1, 2, 1, 8), np.float32), per="token")
    assert (descale > 0).all() and not dequantize(small, descale).any()


def test_what_is_wrong_with_a_tensor_is_said():
    x = random(1, 4, 2, 8)
    for wrong, words in [
        (lambda: quantize(x, "float16"), "dtype=float16, expected float8_e4m3fn, float8_e5m2 or int8"),
        (lambda: quantize(x, per="row"), "per='row', expected one of tensor, head, sequence, token"),
        (lambda: quantize(x[0], per="sequence"), "needs x with a dimension of the batch"),
        (lambda: quantize(x, kv_heads=3), "x has 2 heads, expected a multiple of kv_heads=3"),
        (lambda: quantize(x[0, 0]), "x has 2 dimensions, expected 3 or 4"),
        (lambda: dequantize(x, random(3)), "descale has shape .3., expected"),
    ]:
        with pytest.raises(ValueError, match=words):
            wrong()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per", PER)
def test_attention_over_8_bits_is_attention_over_what_they_stand_for(dtype, per):
    q, k, v = random(2, 9, 4, 32), random(2, 40, 2, 32, seed=1), random(2, 40, 2, 32, seed=2)
    k8, v8, k_descale, v_descale = quantize_kv(k, v, dtype, per=per)
    expected = flash_attn_func(q, dequantize(k8, k_descale), dequantize(v8, v_descale), causal=True)
    found = flash_attn_func(q, k8, v8, causal=True, k_descale=k_descale, v_descale=v_descale)
    assert found.dtype == np.float32 and np.allclose(found, expected, atol=1e-6)
    if dtype == "int8":
        return
    q8, q_descale = quantize(q, dtype, per="sequence", kv_heads=2)
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    found, lse, _ = flash_attn_func(q8, k8, v8, causal=True, return_attn_probs=True, **scales)
    assert found.dtype.name == "bfloat16" and lse.dtype == np.float32
    wide = (dequantize(q8, q_descale), dequantize(k8, k_descale), dequantize(v8, v_descale))
    assert np.allclose(found.astype(np.float32), flash_attn_func(*wide, causal=True), atol=2e-2)


@pytest.mark.parametrize("per", PER[:2] + PER[3:])
def test_packed_sequences(per):
    starts = np.array([0, 7, 7, 20], np.int32)
    q, k, v = random(20, 4, 16), random(20, 2, 16, seed=1), random(20, 2, 16, seed=2)
    k8, v8, k_descale, v_descale = quantize_kv(k, v, per=per)
    lists = (starts, starts, 13, 13)
    wide = (dequantize(k8, k_descale), dequantize(v8, v_descale))
    expected = flash_attn_varlen_func(q, *wide, *lists, causal=True)
    scales = {"k_descale": k_descale, "v_descale": v_descale}
    assert np.allclose(flash_attn_varlen_func(q, k8, v8, *lists, causal=True, **scales), expected, atol=1e-6)
    # Factors of sequences are over sequences, wherever these begin.
    each = np.array([[0.01, 0.02], [7, 7], [0.03, 0.01]], np.float32)
    rows = np.repeat(each, [7, 0, 13], axis=0)[:, :, None]
    expected = flash_attn_varlen_func(q, k8.astype(np.float32) * rows, v8.astype(np.float32) * rows, *lists)
    found = flash_attn_varlen_func(q, k8, v8, *lists, k_descale=each, v_descale=each)
    assert np.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("small", [ml_dtypes.float8_e4m3fn, np.int8])
def test_a_cache_grows_in_8_bits(paged, tokens, rotary, small):
    new = [random(2, 3, 2, 16, seed=seed) for seed in (3, 4)]
    lengths = np.array([5, 2], np.int32)
    q = random(2, 3, 4, 16)
    shape = (6, 4, 2, 16) if paged else (2, 12, 2, 16)
    places = {"page_table": np.array([[4, 1, 5], [0, 3, 2]], np.int32)} if paged else {}
    angles = {}
    if rotary:
        angle = np.arange(12)[:, None] * 0.1 ** np.arange(8)
        angles = {"rotary_cos": np.cos(angle).astype(np.float32), "rotary_sin": np.sin(angle).astype(np.float32)}
    wide = [random(*shape, seed=seed) for seed in (1, 2)]
    if tokens:
        k8, v8, k_descale, v_descale = quantize_kv(*wide, small, per="token")
        scales = {"k_descale": k_descale, "v_descale": v_descale}
    else:
        k8, v8 = (it.astype(small) for it in wide)
        factors = np.array([[0.03, 0.04], [0.06, 0.03]], np.float32)
        scales = {"k_descale": factors, "v_descale": factors}
    before = k8.copy()
    found = flash_attn_with_kvcache(q, k8, v8, *new, cache_seqlens=lengths, causal=True, **scales, **places, **angles)
    assert (before.view(np.uint8) != k8.view(np.uint8)).sum() > 0
    # What is in the cache now, as it is, in f32.
    if tokens:
        stored = [dequantize(k8, scales["k_descale"]), dequantize(v8, scales["v_descale"])]
    elif paged:
        owner = np.array([1, 0, 1, 1, 0, 0])  # the sequence of each page
        stored = [it.astype(np.float32) * factors[owner][:, None, :, None] for it in (k8, v8)]
    else:
        stored = [it.astype(np.float32) * factors[:, None, :, None] for it in (k8, v8)]
    lists = {"cache_seqlens": lengths + 3, "causal": True, **places}
    turned = q
    if rotary:
        turned = np.stack([_turned(q[at], lengths[at], angles) for at in range(2)])
    expected = flash_attn_with_kvcache(turned, *stored, **lists)
    assert np.allclose(found, expected, atol=1e-5)
    # And new rows are what was given, to half a step of their factor.
    row = _row(stored[1], places, 0, 5)
    step = 0.07 if tokens else 0.01 * 16
    assert abs(row - new[1][0, 0]).max() < step * max(1.0, abs(new[1]).max())


def _turned(rows, first, angles):
    """Queries from a position on, rotated in pairs of neighbours."""
    cos, sin = (angles[name][first : first + len(rows), None] for name in ("rotary_cos", "rotary_sin"))
    x, y = rows[..., 0::2], rows[..., 1::2]
    turned = np.empty_like(rows)
    turned[..., 0::2], turned[..., 1::2] = x * cos - y * sin, x * sin + y * cos
    return turned


def _row(cache, places, sequence, position):
    if not places:
        return cache[sequence, position]
    return cache[places["page_table"][sequence, position // 4], position % 4]


def test_factors_of_a_head_are_finite_and_above_zero():
    q = random(1, 4, 2, 16)
    k8, v8, k_descale, v_descale = quantize_kv(q, q)
    for odd in (0.0, -2.0, np.nan, np.inf):
        wrong = k_descale.copy()
        wrong[1] = odd
        with pytest.raises(ValueError, match="k_descale is .* at batch 0, head 1, expected a finite number"):
            flash_attn_func(q, k8, v8, k_descale=wrong, v_descale=v_descale)
        with pytest.raises(ValueError, match="v_descale has .* for sequence 0 and head 1, expected a finite number"):
            flash_attn_with_kvcache(
                q, k8, v8, q, q, cache_seqlens=np.array([0], np.int32), k_descale=k_descale, v_descale=wrong
            )


def test_nan_bytes_propagate():
    q = random(1, 1, 1, 16)
    k8, v8, k_descale, v_descale = quantize_kv(q, q)
    v8.view(np.uint8)[0, 0, 0, 3] = 0x7F
    out = flash_attn_func(q, k8, v8, k_descale=k_descale, v_descale=v_descale)
    assert np.isnan(out[0, 0, 0]).tolist() == [at == 3 for at in range(16)]


def test_factors_of_wide_tensors_are_refused():
    q = random(1, 4, 2, 16)
    with pytest.raises(ValueError, match="k_descale was given with a k of f32, expected one of 8 bits"):
        flash_attn_func(q, q, q, k_descale=np.ones(2, np.float32))
    k8, _ = quantize(q)
    with pytest.raises(TypeError, match="k has element type f32, expected e4m3 like q"):
        flash_attn_func(k8, q, q)


class TestTorch:
    """The same of PyTorch's tensors."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("per", PER)
    def test_the_same_bits_as_numpy(self, dtype, per):
        torch = pytest.importorskip("torch")
        x = random(2, 5, 6, 16)
        small, descale = quantize(x, dtype, per=per)
        of_torch, factors = quantize(torch.from_numpy(x), getattr(torch, dtype), per=per)
        assert np.array_equal(of_torch.view(torch.uint8).numpy(), small.view(np.uint8))
        assert np.array_equal(factors.numpy(), descale)

    def test_attention(self):
        torch = pytest.importorskip("torch")
        q, k, v = (torch.from_numpy(random(2, 33, 4, 64, seed=seed)).bfloat16() for seed in range(3))
        k8, v8, k_descale, v_descale = quantize_kv(k, v, per="sequence")
        # And one factor for all, as engines pass it: without memory of its own for each head.
        one = torch.tensor(0.02).expand(2, 4)
        for of_key, of_value in ((k_descale, v_descale), (one, one)):
            expected = flash_attn_func(q.float(), dequantize(k8, of_key), dequantize(v8, of_value))
            found = flash_attn_func(q, k8, v8, k_descale=of_key, v_descale=of_value)
            assert found.dtype == torch.bfloat16
            assert torch.allclose(found.float(), expected, rtol=5e-3, atol=5e-3)

    def test_all_of_8_bits(self):
        torch = pytest.importorskip("torch")
        x = torch.from_numpy(random(1, 16, 2, 32))
        small, descale = quantize(x, per="sequence")
        scales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), descale)
        out = flash_attn_func(small, small, small, **scales)
        wide = dequantize(small, descale)
        assert out.dtype == torch.bfloat16
        assert torch.allclose(out.float(), flash_attn_func(wide, wide, wide), atol=2e-2)

    def test_queries_and_new_keys_of_8_bits(self):
        """As FlashAttention-3 has them: what is appended has the cache's factors already."""
        torch = pytest.importorskip("torch")
        x, new = (torch.from_numpy(random(2, rows, 2, 16, seed=rows)) for rows in (12, 3))
        cache, descale = quantize(x, per="sequence")
        q, q_descale = quantize(new, per="sequence")
        k, v = q.clone(), q.clone()
        k_cache, v_cache = cache.clone(), cache.clone()
        lengths = torch.tensor([4, 7], dtype=torch.int32)
        scales = {"k_descale": descale, "v_descale": descale}
        cos, sin = torch.ones(12, 8).bfloat16(), torch.zeros(12, 8).bfloat16()
        for rotary in ({}, {"rotary_cos": cos, "rotary_sin": sin}):
            out = flash_attn_with_kvcache(
                q, k_cache, v_cache, k, v, cache_seqlens=lengths, q_descale=q_descale, causal=True, **scales, **rotary
            )
            assert out.dtype == torch.bfloat16
            expected = [cache.clone() for _ in range(2)]
            for sequence, length in enumerate(lengths.tolist()):
                for it in expected:
                    it[sequence, length : length + 3] = k[sequence]
            for found, it in zip((k_cache, v_cache), expected):
                assert torch.equal(found.view(torch.uint8), it.view(torch.uint8))
            wide = [dequantize(it, descale) for it in expected]
            reference = flash_attn_with_kvcache(dequantize(q, q_descale), *wide, cache_seqlens=lengths + 3, causal=True)
            assert torch.allclose(out.float(), reference, atol=1e-2)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_new_keys_of_8_bits_and_wider_queries(self, dtype):
        """They are copied, on a GPU as well; rows that are rounded have one type."""
        torch = pytest.importorskip("torch")
        small = getattr(torch, dtype)
        cache, rows = (torch.from_numpy(random(2, count, 2, 16, seed=count)).mul(9).to(small) for count in (12, 3))
        lengths, q = torch.tensor([4, 7], dtype=torch.int32), torch.zeros(2, 3, 4, 16).bfloat16()
        descale = torch.full((2, 2), 0.5)
        scales = {"k_descale": descale, "v_descale": descale}
        expected = cache.clone()
        for sequence, length in enumerate(lengths.tolist()):
            expected[sequence, length : length + 3] = rows[sequence]
        for factors in ({}, scales):
            caches = cache.clone(), cache.clone()
            flash_attn_with_kvcache(q, *caches, rows, rows, cache_seqlens=lengths, causal=True, **factors)
            assert all(torch.equal(it.view(torch.uint8), expected.view(torch.uint8)) for it in caches)
            given = (cache, cache, rows, rows, q, lengths, *(None,) * 7, *(factors.get(it) for it in scales))
            described = tuple(
                it if it is None else (str(it.dtype).removeprefix("torch."), list(it.shape), None, 256) for it in given
            )
            flags = (True, True, (-1, -1), 0, False, None, None)
            kernel, _ = flashcore._flashcore.append_plan_for(described, flags, "h200")
            # Half as many columns of twice as many bits.
            assert kernel == "append_bf16_d8x8"
        wide = rows.bfloat16()
        for k, v in ((wide, rows), (wide, wide.half())):
            with pytest.raises(TypeError, match="v has element type .*, expected bf16 like k"):
                flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, causal=True)

    def test_wrong_factors_of_8_bit_queries(self):
        torch = pytest.importorskip("torch")
        q, cache = (torch.zeros(2, rows, 2, 16).to(torch.float8_e4m3fn) for rows in (1, 12))
        factors = torch.ones(2)
        for wrong, error, said in [
            (
                {"q_descale": torch.ones(3)},
                ValueError,
                r"q_descale has shape \[3\], expected \[\] or \[2\] or \[2, 2\]",
            ),
            ({"q_descale": factors, "k_descale": torch.ones(3)}, ValueError, r"k_descale has shape \[3\]"),
            ({"q_descale": "x", "k_descale": factors}, TypeError, "q_descale is a .*str"),
            ({"q_descale": factors.half()}, TypeError, "q_descale has element type torch.float16, expected float32"),
        ]:
            with pytest.raises(error, match=said):
                flash_attn_with_kvcache(q, cache, cache, **wrong)

    def test_gradients_are_refused(self):
        torch = pytest.importorskip("torch")
        q = torch.zeros(1, 4, 2, 16, requires_grad=True)
        k8, v8, k_descale, v_descale = quantize_kv(q.detach(), q.detach())
        output = flash_attn_func(q, k8, v8, k_descale=k_descale, v_descale=v_descale)
        with pytest.raises(
            NotImplementedError, match="k has element type torch.float8_e4m3fn with tensors that require"
        ):
            output.sum().backward()
        with pytest.raises(TypeError, match="q has element type int8"):
            flash_attn_func(k8.to(torch.int8), k8, v8)
        with torch.no_grad():
            assert torch.equal(flash_attn_func(q, k8, v8, k_descale=k_descale, v_descale=v_descale), output)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_compiled(self, dtype):
        torch = pytest.importorskip("torch")
        q, k, v = (torch.from_numpy(random(1, 8, 2, 32, seed=seed)) for seed in range(3))
        k8, v8, k_descale, v_descale = quantize_kv(k, v, dtype)
        scales = {"k_descale": k_descale, "v_descale": v_descale}
        expected = flash_attn_func(q, k8, v8, **scales)
        compiled = torch.compile(lambda *x, **y: flash_attn_func(*x, **y), backend="eager", fullgraph=True)
        assert torch.equal(compiled(q, k8, v8, **scales), expected)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_cache_grows_through_the_dispatcher(self, dtype):
        torch = pytest.importorskip("torch")
        wide = [torch.from_numpy(random(1, 12, 2, 16, seed=seed)) for seed in range(2)]
        k8, v8, k_descale, v_descale = quantize_kv(*wide, dtype, per="token")
        twins = [it.clone() for it in (k8, v8, k_descale, v_descale)]
        q, new = torch.from_numpy(random(1, 2, 2, 16, seed=5)), torch.from_numpy(random(1, 2, 2, 16, seed=6))
        lengths = torch.tensor([4], dtype=torch.int32)

        def call(q, k8, v8, new, lengths, k_descale, v_descale):
            return flash_attn_with_kvcache(
                q, k8, v8, new, new, cache_seqlens=lengths, k_descale=k_descale, v_descale=v_descale
            )

        expected = call(q, k8, v8, new, lengths, k_descale, v_descale)
        compiled = torch.compile(call, backend="eager", fullgraph=True)
        assert torch.equal(compiled(q, *twins[:2], new, lengths, *twins[2:]), expected)
        for one, other in zip(twins, (k8, v8, k_descale, v_descale)):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_the_package_has_them():
    for name in ("quantize", "quantize_kv", "dequantize"):
        assert name in flashcore.__all__
