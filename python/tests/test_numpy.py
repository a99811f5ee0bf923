"""NumPy arrays, through DLPack: what works on every machine."""

import math

import flashcore
import numpy as np
import pytest
from flashcore import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    scaled_dot_product_attention,
)


def random(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def reference(q, k, v, causal=False, scale=None):
    """Attention over (batch, length, heads, dim) in f64, and the log-sum-exps."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat(group, axis=2) for x in (k, v))
    scores = np.einsum("bihd,bjhd->bhij", q, k) * (scale or 1 / math.sqrt(q.shape[3]))
    if causal:
        queries, keys = q.shape[1], k.shape[1]
        seen = np.arange(keys)[None] <= np.arange(queries)[:, None] + keys - queries
        scores = np.where(seen, scores, -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        top = scores.max(-1, keepdims=True, initial=-1e300)
        sums = np.log(np.exp(scores - top).sum(-1)) + top[..., 0]
        weights = np.where(np.isinf(sums)[..., None], 0, np.exp(scores - sums[..., None]))
    return np.einsum("bhij,bjhd->bihd", weights, v), sums


def close(found, expected, dtype=np.float32):
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[np.dtype(dtype).name]
    found = np.asarray(found).astype(np.float64)
    return found.shape == expected.shape and np.abs(found - expected).max(initial=0) < tolerance


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "batch, queries, keys, heads, key_heads, dim, value_dim",
    [(1, 1, 1, 1, 1, 8, 8), (2, 33, 50, 4, 2, 64, 64), (1, 70, 13, 6, 1, 128, 64), (3, 65, 65, 2, 2, 256, 256)],
)
def test_the_answer_is_right(batch, queries, keys, heads, key_heads, dim, value_dim, causal, dtype):
    q = random(batch, queries, heads, dim, dtype=dtype)
    k = random(batch, keys, key_heads, dim, dtype=dtype, seed=1)
    v = random(batch, keys, key_heads, value_dim, dtype=dtype, seed=2)
    output, lse, probabilities = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    expected, expected_lse = reference(q, k, v, causal)
    assert type(output) is type(lse) is np.ndarray and probabilities is None
    assert output.dtype == dtype and lse.dtype == np.float32
    assert close(output, expected, dtype)
    assert np.array_equal(np.isinf(lse), np.isinf(expected_lse))
    assert close(np.where(np.isinf(lse), 0, lse), np.where(np.isinf(lse), 0, expected_lse))
    assert np.array_equal(flash_attn_func(q, k, v, causal=causal), output)


def test_bf16_by_ml_dtypes():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = (random(2, 20, 3, 32, dtype=bfloat16, seed=seed) for seed in range(3))
    output = flash_attn_func(q, k, v)
    assert output.dtype == bfloat16
    assert close(output, reference(q, k, v)[0], bfloat16)
    with pytest.raises(TypeError, match="k has element type f16, expected bf16 like q"):
        flash_attn_func(q, k.astype(np.float16), v)


def test_strides_are_followed():
    q, k, v = (random(2, 3, 40, 16, seed=seed).transpose(0, 2, 1, 3) for seed in range(3))
    plain = [np.ascontiguousarray(x) for x in (q, k, v)]
    assert np.array_equal(flash_attn_func(q, k, v), flash_attn_func(*plain))
    wide = random(2, 40, 3, 48)
    q, k, v = wide[..., :16], wide[..., 16:32], wide[..., 32:]
    plain = [np.ascontiguousarray(x) for x in (q, k, v)]
    assert np.array_equal(flash_attn_func(q, k, v), flash_attn_func(*plain))
    shared = np.broadcast_to(plain[1][:, :, :1], plain[1].shape)
    assert np.array_equal(flash_attn_func(q, shared, v), flash_attn_func(q, shared.copy(), v))


def test_inputs_may_be_read_only_and_stay_as_they_are():
    tensors = [random(1, 30, 2, 16, seed=seed) for seed in range(3)]
    before = [x.copy() for x in tensors]
    for x in tensors:
        x.flags.writeable = False
    output = flash_attn_func(*tensors)
    assert output.flags.writeable
    assert all(np.array_equal(*pair) for pair in zip(tensors, before))


def test_packed_tensors():
    qkv = random(2, 31, 3, 4, 32)
    plain = [np.ascontiguousarray(qkv[:, :, index]) for index in range(3)]
    expected = flash_attn_func(*plain, causal=True)
    assert np.array_equal(flash_attn_qkvpacked_func(qkv, causal=True), expected)
    assert np.array_equal(flash_attn_kvpacked_func(plain[0], qkv[:, :, 1:], causal=True), expected)
    output, lse, _ = flash_attn_qkvpacked_func(qkv, return_attn_probs=True)
    assert output.shape == (2, 31, 4, 32) and lse.shape == (2, 4, 31)


def test_scale():
    q, k, v = (random(1, 9, 2, 16, seed=seed) for seed in range(3))
    assert close(flash_attn_func(q, k, v, 0.0, 0.5), reference(q, k, v, scale=0.5)[0])
    assert close(flash_attn_func(q, k, v, softmax_scale=2), reference(q, k, v, scale=2)[0])
    with pytest.raises(ValueError, match="softmax_scale=inf, expected a finite number"):
        flash_attn_func(q, k, v, softmax_scale=math.inf)


def test_missing_tensors_beside_another_mistake():
    """Other arguments are looked at first; then tensors that kernels cannot read, which are copied."""
    x = random(1, 9, 1, 12)
    for missing in ((None, x, x), (x, None, x), (x, x, None), (x, None, None), (None, None, None)):
        with pytest.raises((TypeError, ValueError), match="^(softcap|q|k|v)[ =]"):
            flash_attn_func(*missing, softcap=math.inf)


def test_nothing_to_do():
    q, k = random(2, 5, 3, 8), random(2, 0, 3, 8)
    output, lse, _ = flash_attn_func(q, k, k, return_attn_probs=True)
    assert not output.any() and np.isneginf(lse).all()
    assert flash_attn_func(q[:, :0], q, q).shape == (2, 0, 3, 8)
    assert flash_attn_func(q[:0], q[:0], q[:0]).shape == (0, 5, 3, 8)


def test_scaled_dot_product_attention():
    q, k, v = random(2, 6, 10, 16), random(2, 2, 25, 16, seed=1), random(2, 2, 25, 8, seed=2)

    def expected(q, k, v, causal):
        return reference(*(x.transpose(0, 2, 1, 3) for x in (q, k, v)), causal)[0].transpose(0, 2, 1, 3)

    assert close(scaled_dot_product_attention(q, k, v, enable_gqa=True), expected(q, k, v, False))
    # Query i sees the keys up to i, so those behind the last query are of no account.
    causal = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert causal.shape == (2, 6, 10, 8)
    assert close(causal, expected(q, k[:, :, :10], v[:, :, :10], True))
    # Queries behind the last key see all of them.
    more = scaled_dot_product_attention(k, q[:, :2], q[:, :2], is_causal=True)
    assert close(more, scaled_dot_product_attention(k, q[:, :2], q[:, :2], np.tri(25, 10, dtype=bool)))
    with pytest.raises(ValueError, match="key has 2 heads, expected the 6 of query"):
        scaled_dot_product_attention(q, k, v)
    seen = np.tri(10, 25, dtype=bool)
    assert close(scaled_dot_product_attention(q, k, v, seen, enable_gqa=True), causal)
    with pytest.raises(NotImplementedError, match="dropout_p=0.5"):
        scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True)


GOOD = random(1, 16, 2, 32)


@pytest.mark.parametrize(
    "name, value",
    [
        ("dropout_p", 0.1),
        ("qv", GOOD),
    ],
)
def test_what_is_not_served_is_refused_by_name(name, value):
    with pytest.raises(NotImplementedError, match=f"{name}=.* is not supported yet, expected"):
        flash_attn_func(GOOD, GOOD, GOOD, **{name: value})


def test_what_is_at_its_default_is_accepted():
    expected = flash_attn_func(GOOD, GOOD, GOOD)
    found = flash_attn_func(
        GOOD, GOOD, GOOD, 0.0, None, False, [-1, -1], 0.0, None, True, False,
        qv=None, q_descale=None, k_descale=None, v_descale=None, attention_chunk=0, num_splits=1,
        pack_gqa=None, sm_margin=0,
    )  # fmt: skip
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    "change, error, words",
    [
        (lambda q, k, v: (q[0], k, v), ValueError, "q has 3 dimensions, expected 4"),
        (lambda q, k, v: (q, k[0], v), ValueError, "k has 3 dimensions, expected 4"),
        (lambda q, k, v: (q, k, v[..., None]), ValueError, "v has 5 dimensions, expected 4"),
        (lambda q, k, v: (q, k.astype(np.float16), v), TypeError, "k has element type f16, expected f32"),
        (lambda q, k, v: (q.astype(np.float64), k, v), TypeError, "q has element type float64, expected"),
        (lambda q, k, v: (q, k, v.astype(np.int32)), TypeError, "v has element type int32, expected"),
        (lambda q, k, v: (q, k, v[:, ::-1]), ValueError, "v has a negative stride"),
        (lambda q, k, v: (q, k[..., :16], v), ValueError, r"k has shape \[1, 16, 2, 16\], expected \[1, 16, 2, 32\]"),
        (lambda q, k, v: (q, k[:, :9], v), ValueError, r"v has shape \[1, 16, 2, 32\], expected \[1, 9, 2, 32\]"),
        (lambda q, k, v: (q[:, :, :1], k, v), ValueError, "q has 1 heads, expected a multiple of the 2 of k"),
        (lambda q, k, v: (q, k, [1, 2]), TypeError, "v is a <class 'list'>, expected a tensor"),
        (lambda q, k, v: (None, k, v), TypeError, "q is a <class 'NoneType'>, expected a tensor"),
    ],
)
def test_wrong_use_is_named(change, error, words):
    with pytest.raises(error, match=words):
        flash_attn_func(*change(GOOD, GOOD, GOOD))


def test_wrong_packing_is_named():
    with pytest.raises(ValueError, match=r"qkv has shape \[1, 16, 2, 32\], expected \(batch, length, 3"):
        flash_attn_qkvpacked_func(GOOD)
    with pytest.raises(ValueError, match=r"kv has shape .*, expected \(batch, length, 2"):
        flash_attn_kvpacked_func(GOOD, random(1, 16, 3, 2, 32))
    with pytest.raises(TypeError, match="qkv is a <class 'int'>, expected a tensor"):
        flash_attn_qkvpacked_func(3)


def test_info_tells_what_ran():
    flash_attn_func(GOOD, GOOD, GOOD, causal=True)
    info = flashcore.info()
    assert info["version"] == flashcore.__version__
    assert bool(info["gpus"]) == (info["no_gpu"] is None)
    last = info["last"]
    assert last["device"] == "cpu" and last["kernel"] == "cpu/blocked"
    assert last["problem"] == "batch 1, heads 2, length 16, head dim 32, f32, causal"
    assert last["reason"]


def test_threads():
    from concurrent.futures import ThreadPoolExecutor

    inputs = [[random(1, 20 + seed, 2, 16, seed=3 * seed + part) for part in range(3)] for seed in range(4)]
    expected = [reference(*tensors)[0] for tensors in inputs]

    def work(thread):
        return all(close(flash_attn_func(*inputs[at % 4]), expected[at % 4]) for at in range(thread, thread + 50))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


@pytest.mark.filterwarnings("ignore:the slow kernel")  # f32, on a machine whose JAX has a GPU
def test_jax():
    jnp = pytest.importorskip("jax.numpy")
    tensors = [random(1, 20, 4, 32, seed=seed) for seed in range(3)]
    output, lse, _ = flash_attn_func(*map(jnp.asarray, tensors), causal=True, return_attn_probs=True)
    assert isinstance(output, jnp.ndarray) and isinstance(lse, jnp.ndarray)
    assert close(output, reference(*tensors, causal=True)[0])
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in tensors]
    output = flash_attn_func(*narrow)
    assert output.dtype == jnp.bfloat16
    assert np.abs(np.asarray(output, np.float64) - reference(*map(np.asarray, narrow))[0]).max() < 2e-2
