"""Sequences, caches and parts as NumPy arrays, on the CPU."""

import math

import flashcore
import numpy as np
import pytest
from flashcore import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_merge,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


def ints(*numbers):
    return np.array(numbers, np.int32)


def starts(*lengths):
    return np.cumsum([0, *lengths], dtype=np.int32)


def reference(q, k, v, causal=False, window=(-1, -1), chunk=0, softcap=0.0, slopes=None, sinks=None, scale=None):
    """One sequence, (queries, heads, dim), in f64, and its log-sum-exps, (heads, queries)."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) * (scale or q.shape[2] ** -0.5)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    here, there = np.arange(len(q))[:, None] + len(k) - len(q), np.arange(len(k))[None, :]
    distance = there - here
    if slopes is not None:
        scores -= np.asarray(slopes, np.float64)[:, None, None] * np.abs(distance)
    left, right = window[0], 0 if causal else window[1]
    hidden = ((left >= 0) & (distance < -left)) | ((right >= 0) & (distance > right))
    if chunk:
        hidden |= here // chunk != there // chunk
    scores[:, hidden] = -np.inf
    if sinks is not None:
        # One more key, without a value.
        column = np.broadcast_to(np.asarray(sinks, np.float64)[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, column], axis=2)
        v = np.concatenate([v, np.zeros((1, *v.shape[1:]))])
    top = scores.max(axis=2, initial=-np.inf)
    top = np.where(np.isinf(top), 0, top)
    weights = np.exp(scores - top[..., None])
    total = weights.sum(axis=2)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top
    output = np.einsum("hij,jhd->ihd", weights / np.where(total, total, 1)[..., None], v)
    return output, lse


def close(found, expected, tolerance=2e-5):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return found.shape == expected.shape and np.allclose(found, expected, rtol=0, atol=tolerance)


RULES = [
    {},
    {"causal": True},
    {"window_size": (5, 2)},
    {"causal": True, "window_size": (3, -1)},
    {"softcap": 2.0, "softmax_scale": 0.4},
    {"alibi_slopes": True, "causal": True},
    {"s_aux": True, "causal": True, "window_size": (4, 0)},
    {"attention_chunk": 7},
    {"attention_chunk": 6, "causal": True, "window_size": (4, -1)},
]


def rules(chosen, heads):
    """A set of rules as arguments, and as the reference takes them."""
    given = dict(chosen)
    for name, seed in (("alibi_slopes", 5), ("s_aux", 6)):
        if given.get(name):
            given[name] = np.abs(random(heads, seed=seed))
    names = {
        "window_size": "window", "attention_chunk": "chunk", "alibi_slopes": "slopes", "s_aux": "sinks",
        "softmax_scale": "scale",
    }  # fmt: skip
    return given, {names.get(name, name): value for name, value in given.items()}


@pytest.mark.parametrize("chosen", RULES, ids=str)
def test_ragged_sequences(chosen):
    given, meant = rules(chosen, 6)
    queries, keys = (3, 0, 17, 1, 40), (9, 4, 17, 0, 25)
    q = random(sum(queries), 6, 16)
    k, v = random(sum(keys), 2, 16, seed=1), random(sum(keys), 2, 24, seed=2)
    cu_q, cu_k = starts(*queries), starts(*keys)
    output, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 40, 25, return_attn_probs=True, **given)
    assert output.shape == (61, 6, 24) and lse.shape == (6, 61) and lse.dtype == np.float32
    for at in range(5):
        mine, theirs = slice(cu_q[at], cu_q[at + 1]), slice(cu_k[at], cu_k[at + 1])
        expected, sums = reference(q[mine], k[theirs], v[theirs], **meant)
        assert close(output[mine], expected) and close(lse[:, mine], sums)
    again = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 40, 25, **given)
    assert np.array_equal(again, output)


@pytest.mark.parametrize("chosen", RULES, ids=str)
def test_plain_batches(chosen):
    given, meant = rules(chosen, 4)
    q, k, v = random(2, 20, 4, 16), random(2, 33, 2, 16, seed=1), random(2, 33, 2, 16, seed=2)
    output, lse, probabilities = flash_attn_func(q, k, v, return_attn_probs=True, **given)
    assert probabilities is None
    for at in range(2):
        expected, sums = reference(q[at], k[at], v[at], **meant)
        assert close(output[at], expected) and close(lse[at], sums)


def test_windows_that_have_a_name():
    q, k, v = random(1, 20, 2, 16), random(1, 30, 2, 16, seed=1), random(1, 30, 2, 16, seed=2)
    assert np.array_equal(flash_attn_func(q, k, v, window_size=(-1, 0)), flash_attn_func(q, k, v, causal=True))
    assert np.array_equal(flash_attn_func(q, k, v, window_size=[-1, -1]), flash_attn_func(q, k, v))
    for wrong in [(1, 2, 3), (4,), 5, {}]:
        with pytest.raises(ValueError, match=r"window_size=.* expected two whole numbers, \(left, right\)"):
            flash_attn_func(q, k, v, window_size=wrong)
    assert np.array_equal(
        flash_attn_func(q, k, v, causal=True, window_size=(7, 9)), flash_attn_func(q, k, v, window_size=(7, 0))
    )


def test_sequences_that_use_less_than_their_place():
    q, k, v = random(20, 2, 16), random(30, 2, 16, seed=1), random(30, 2, 16, seed=2)
    cu_q, cu_k, used_q, used_k = starts(8, 12), starts(10, 20), ints(5, 12), ints(10, 3)
    output = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 12, 20, used_q, used_k, causal=True)
    assert close(output[:5], reference(q[:5], k[:10], v[:10], causal=True)[0])
    assert close(output[8:], reference(q[8:], k[10:13], v[10:13], causal=True)[0])
    # Padded queries and keys.
    output = flash_attn_varlen_func(
        q.reshape(2, 10, 2, 16), k.reshape(2, 15, 2, 16), v.reshape(2, 15, 2, 16), None, None, None, None, ints(10, 4), used_k
    )  # fmt: skip
    assert close(output[1, :4], reference(q[10:14], k[15:18], v[15:18])[0])


def paged(sequences, size, seed=0):
    """Sequences in shuffled pages: the cache, the table, and pages that nobody uses."""
    counts = [math.ceil(len(sequence) / size) for sequence in sequences]
    pages = np.random.default_rng(seed).permutation(sum(counts) + 2)
    cache = np.full((len(pages), size, *sequences[0].shape[1:]), np.nan, sequences[0].dtype)
    table = np.full((len(sequences), max(counts) + 1), -1, np.int32)
    used = 0
    for at, (sequence, count) in enumerate(zip(sequences, counts)):
        table[at, :count] = pages[used : used + count]
        used += count
        for position, row in enumerate(sequence):
            cache[table[at, position // size], position % size] = row
    return cache, table


@pytest.mark.parametrize("size", [1, 3, 16])
def test_pages(size):
    lengths, queries = (40, 7, 19), (1, 7, 4)
    keys = [random(length, 2, 16, seed=length) for length in lengths]
    values = [random(length, 2, 16, seed=-1 + length) for length in lengths]
    (k_cache, table), (v_cache, _) = paged(keys, size), paged(values, size)
    q, cu_q = random(sum(queries), 4, 16), starts(*queries)
    expected = np.concatenate(
        [reference(q[cu_q[at] : cu_q[at + 1]], keys[at], values[at], causal=True)[0] for at in range(3)]
    )
    output, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=ints(*lengths), page_table=table, cu_seqlens_q=cu_q, max_seqlen_q=7,
        causal=True, return_softmax_lse=True,
    )  # fmt: skip
    assert close(output, expected) and lse.shape == (4, 12)
    # FlashAttention-2's names for the same.
    old = flash_attn_varlen_func(q, k_cache, v_cache, cu_q, starts(*lengths), 7, 40, causal=True, block_table=table)
    assert np.array_equal(old, output)


def test_a_cache_with_entries_and_padding():
    k_cache, v_cache = random(5, 32, 2, 16, seed=1), random(5, 32, 2, 16, seed=2)
    q = random(3, 2, 4, 16)
    lengths, entries, padding = ints(32, 9, 20), ints(4, 0, 2), ints(0, 3, 20)
    output, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, cache_batch_idx=entries, cache_leftpad=padding, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    assert lse.shape == (3, 4, 2)
    for at in range(3):
        mine = (entries[at], slice(padding[at], lengths[at]))
        expected, sums = reference(q[at], k_cache[mine], v_cache[mine], causal=True)
        assert close(output[at], expected) and close(lse[at], sums)
        chunked = flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=lengths,
            cache_batch_idx=entries,
            cache_leftpad=padding,
            attention_chunk=5,
        )
        assert close(chunked[at], reference(q[at], k_cache[mine], v_cache[mine], chunk=5)[0])
    whole = flash_attn_with_kvcache(q, k_cache[:3], v_cache[:3])
    assert np.array_equal(whole, flash_attn_func(q, k_cache[:3], v_cache[:3]))
    assert np.array_equal(flash_attn_with_kvcache(q, k_cache[:3], v_cache[:3], cache_seqlens=32), whole)


def rotated(x, positions, cosines, sines, interleaved):
    """Rows (rows, heads, dim) rotated by the angles of their positions."""
    half = cosines.shape[1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    )
    result, (a, b) = x.copy(), (cosines[positions][:, None], sines[positions][:, None])
    result[..., first] = x[..., first] * a - x[..., second] * b
    result[..., second] = x[..., first] * b + x[..., second] * a
    return result


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_appending_with_rotary_embeddings(pages, packed, causal, interleaved):
    angles = np.outer(np.arange(64), 0.7 ** np.arange(6)).astype(np.float32)
    cosines, sines = np.cos(angles), np.sin(angles)
    lengths, padding = (5, 0, 30), ints(2, 0, 7)
    added = (3, 1, 2) if packed else (2, 2, 2)
    old_keys, old_values = ([random(40, 2, 16, seed=at + seed) for at in range(3)] for seed in (10, 20))
    new_keys, new_values, q = (random(sum(added), heads, 16, seed=heads + 1) for heads in (2, 2, 4))
    new_values = new_values + 1
    if pages:
        (k_cache, table), (v_cache, _) = paged(old_keys, 8), paged(old_values, 8)
        place = {"page_table": table}
    else:
        k_cache, v_cache = (np.stack(x)[[2, 0, 1]] for x in (old_keys, old_values))
        place = {"cache_batch_idx": ints(1, 2, 0)}
    before = k_cache.copy()
    cu = starts(*added)
    shape = lambda x: x if packed else x.reshape(3, 2, *x.shape[1:])
    more = {"cu_seqlens_q": cu, "cu_seqlens_k_new": cu, "max_seqlen_q": 3} if packed else {}
    for offset in (None, ints(1, 40, 9)):
        output = flash_attn_with_kvcache(
            shape(q), k_cache, v_cache, shape(new_keys), shape(new_values), rotary_cos=cosines, rotary_sin=sines,
            cache_seqlens=ints(*lengths), cache_leftpad=padding, causal=causal, rotary_interleaved=interleaved,
            rotary_seqlens=offset, **place, **more,
        )  # fmt: skip
        for at in range(3):
            mine, first = slice(cu[at], cu[at + 1]), lengths[at] if offset is None else offset[at]
            along = first + np.arange(added[at])
            keys, values = old_keys[at].copy(), old_values[at].copy()
            written = slice(lengths[at], lengths[at] + added[at])
            keys[written] = rotated(new_keys[mine], along, cosines, sines, interleaved)
            values[written] = new_values[mine]
            query = rotated(q[mine], along if causal else along * 0 + first, cosines, sines, interleaved)
            used = slice(padding[at], written.stop)
            expected = reference(query, keys[used], values[used], causal=causal)[0]
            assert close(output[mine] if packed else output[at], expected, 1e-4)
            for cache, kept in ((k_cache, keys), (v_cache, values)):
                entry = None if pages else cache[place["cache_batch_idx"][at]]
                for position in range(40):
                    row = cache[table[at, position // 8], position % 8] if pages else entry[position]
                    assert close(row, kept[position], 1e-6)
    # Nothing else was written.
    assert np.isnan(k_cache).sum() == np.isnan(before).sum()


def test_appending_without_turning_copies_bits():
    k_cache, v_cache = (np.zeros((2, 8, 1, 16), np.float16) for _ in range(2))
    k, v = (random(2, 3, 1, 16, seed=seed).astype(np.float16) for seed in (1, 2))
    k[0, 0, 0, 0] = np.nan
    q = random(2, 1, 2, 16).astype(np.float16)
    flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=ints(0, 5))
    assert np.array_equal(k_cache[0, :3].view(np.uint16), k[0].view(np.uint16))
    assert np.array_equal(v_cache[1, 5:], v[1]) and not v_cache[1, :5].any() and not v_cache[0, 3:].any()


def test_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    narrow = lambda x: x.astype(ml_dtypes.bfloat16)
    q, k, v = narrow(random(12, 4, 16)), narrow(random(12, 2, 16, seed=1)), narrow(random(12, 2, 16, seed=2))
    cu = starts(5, 7)
    output, lse = flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, causal=True, return_softmax_lse=True)
    assert output.dtype == ml_dtypes.bfloat16 and lse.dtype == np.float32
    assert close(output[:5], reference(q[:5], k[:5], v[:5], causal=True)[0], 2e-2)
    caches = [np.zeros((2, 16, 2, 16), ml_dtypes.bfloat16) for _ in range(2)]
    output = flash_attn_with_kvcache(
        narrow(random(2, 6, 4, 16)), *caches, k.reshape(2, 6, 2, 16), v.reshape(2, 6, 2, 16), cache_seqlens=0
    )
    assert output.dtype == ml_dtypes.bfloat16 and (caches[0][1, :6] == k[6:]).all()
    partial = random(3, 1, 4, 2, 16), random(3, 1, 4, 2)
    output, _ = flash_attn_combine(*partial, out_dtype=ml_dtypes.bfloat16)
    assert output.dtype == ml_dtypes.bfloat16 and close(output, flash_attn_combine(*partial)[0], 2e-2)


def test_parts_put_together():
    q, k, v = random(2, 5, 4, 16), random(2, 30, 2, 16, seed=1), random(2, 30, 2, 16, seed=2)
    parts = [
        flash_attn_func(q, k[:, s], v[:, s], return_attn_probs=True) for s in (slice(0, 7), slice(7, 7), slice(7, 30))
    ]
    whole, sums, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    outputs = np.stack([output for output, _, _ in parts])
    outputs[1] = np.nan  # It saw no key.
    lses = np.stack([lse.swapaxes(1, 2) for _, lse, _ in parts])
    output, lse = flash_attn_combine(outputs, lses)
    assert close(output, whole) and close(lse, sums.swapaxes(1, 2))
    out = np.zeros((2, 5, 4, 32), np.float16)[..., ::1][..., :16]
    again, _ = flash_attn_combine(outputs, lses, out=out)
    assert again is out and close(out, whole, 2e-3)
    output, lse = flash_attn_merge(*parts[0][:2], *parts[2][:2])
    assert close(output, whole) and close(lse, sums) and output.dtype == np.float32
    # Packed.
    flat = lambda part: (part[0].reshape(10, 4, 16), part[1].swapaxes(0, 1).reshape(4, 10))
    output, lse = flash_attn_merge(*flat(parts[2]), *flat(parts[0]))
    assert close(output, whole.reshape(10, 4, 16)) and lse.shape == (4, 10)


def test_scheduler_metadata():
    lengths = ints(3, 9)
    metadata = get_scheduler_metadata(2, 1, 16, 4, 2, 16, lengths, causal=True)
    assert metadata.dtype == np.int32 and metadata.shape == (2,)
    q, cache = random(2, 1, 4, 16), random(2, 16, 2, 16)
    output = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, scheduler_metadata=metadata)
    assert np.array_equal(output, flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths))
    with pytest.raises(ValueError, match=r"scheduler_metadata is not what .* expected \[2\] of int32"):
        flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, scheduler_metadata=lengths[:1])
    with pytest.raises(ValueError, match=r"cache_seqlens has shape \[2\], expected \[3\]"):
        get_scheduler_metadata(3, 1, 16, 4, 2, 16, lengths)


def test_nothing_to_do():
    q, k = random(0, 2, 16), random(7, 2, 16)
    output, lse = flash_attn_varlen_func(q, k, k, starts(0, 0), starts(3, 4), 0, 4, return_attn_probs=True)
    assert output.shape == (0, 2, 16) and lse.shape == (2, 0)
    assert flash_attn_varlen_func(q, k[:0], k[:0], starts(), starts(), 0, 0).shape == (0, 2, 16)
    output, lse = flash_attn_with_kvcache(
        random(2, 1, 2, 16), random(2, 0, 2, 16), random(2, 0, 2, 16), return_softmax_lse=True
    )
    assert not output.any() and (lse == -np.inf).all()
    caches = [random(2, 4, 2, 16, seed=seed) for seed in (1, 2)]
    empty = random(2, 0, 2, 16)
    flash_attn_with_kvcache(random(2, 1, 2, 16), *caches, empty, empty, cache_seqlens=ints(1, 4))


def call(change):
    """A good call of each function with one thing wrong."""
    arguments = {
        "q": random(2, 3, 4, 16), "k_cache": random(2, 10, 2, 16), "v_cache": random(2, 10, 2, 16),
        "k": random(2, 3, 2, 16), "v": random(2, 3, 2, 16), "cache_seqlens": ints(4, 7),
    }  # fmt: skip
    arguments.update(change(arguments))
    return flash_attn_with_kvcache(**arguments)


def test_the_good_call_is_good():
    call(lambda a: {})


@pytest.mark.parametrize(
    "change, error, words",
    [
        (lambda a: {"cache_seqlens": ints(4, 8)}, ValueError, "k has 3 rows for sequence 1 behind the 8 there are, expected no more than the 10"),
        (lambda a: {"cache_seqlens": ints(-1, 7)}, ValueError, "cache_seqlens has -1 for sequence 0, expected from 0 to 10"),
        (lambda a: {"cache_seqlens": None}, ValueError, "cache_seqlens is None, expected a tensor with k and v"),
        (lambda a: {"cache_seqlens": np.array([4, 7])}, TypeError, "cache_seqlens has element type int64, expected int32"),
        (lambda a: {"cache_seqlens": ints(4, 7, 0)}, ValueError, "k has 2 batch entries, expected 3 as cache_seqlens has"),
        (lambda a: {"v": None}, ValueError, "v is None, expected a tensor with k and v"),
        (lambda a: {"k": None, "v": None, "cache_seqlens": ints(11, 7)}, ValueError, "cache_seqlens has 11 for sequence 0, expected from 0 to 10"),
        (lambda a: {"k": None, "v": None, "rotary_cos": random(20, 4)}, ValueError, "rotary_cos was given without k and v"),
        (lambda a: {"rotary_cos": random(20, 4)}, ValueError, "rotary_sin is None, expected a tensor with rotary_cos"),
        (lambda a: {"rotary_cos": random(20, 9), "rotary_sin": random(20, 9)}, ValueError, "rotary_cos has shape .* at most 16 / 2 columns"),
        (lambda a: {"rotary_cos": random(8, 4), "rotary_sin": random(8, 4)}, ValueError, "rotary_cos has 8 positions, expected more than 8"),
        (lambda a: {"rotary_cos": random(20, 4), "rotary_sin": random(20, 3)}, ValueError, "rotary_sin has shape .* like rotary_cos"),
        (lambda a: {"k": a["k"].astype(np.float16)}, TypeError, "k has element type f16, expected f32 like k_cache"),
        (lambda a: {"k": a["k"][:, :, :1]}, ValueError, "k has .* as heads and head dim, expected the .* of k_cache"),
        (lambda a: {"v": a["v"][:, :2]}, ValueError, "v has .* entries and rows, expected the .* of k"),
        (lambda a: {"v_cache": a["v_cache"][:, :9]}, ValueError, "v_cache has .* expected the .* of k_cache"),
        (lambda a: {"cache_batch_idx": ints(0, 2)}, ValueError, "cache_batch_idx has 2 for sequence 1, expected from 0 to below the 2 of k_cache"),
        (lambda a: {"page_table": ints(0, 1)}, ValueError, "page_table has 1 dimensions, expected 2"),
        (lambda a: {"page_table": ints(0, 1).reshape(1, 2)}, ValueError, "page_table has 1 rows, expected 2"),
        (lambda a: {"page_table": ints(0, 5).reshape(2, 1)}, ValueError, "page_table has 5 for sequence 1, expected from 0 to below the 2"),
        (lambda a: {"page_table": ints(0, 1).reshape(2, 1), "cache_batch_idx": ints(0, 1).reshape(2, 1)}, ValueError, "page_table and cache_batch_idx have 2 and 2 dimensions, expected 2 and 1"),
        (lambda a: {"page_table": ints(0, 1).reshape(2, 1), "cache_batch_idx": ints(0, 2)}, ValueError, "cache_batch_idx has 2 for sequence 1, expected from 0 to below the 2 of page_table"),
        (lambda a: {"page_table": ints(0, 1).reshape(2, 1), "cache_batch_idx": ints(-1, 0)}, ValueError, "cache_batch_idx has -1 for sequence 0, expected from 0 to below the 2 of page_table"),
        (lambda a: {"block_table": ints(0, 1).reshape(2, 1), "cache_batch_idx": ints(0, 2)}, ValueError, "cache_batch_idx has 2 for sequence 1, expected from 0 to below the 2 of block_table"),
        (lambda a: {"page_table": ints().reshape(0, 1), "cache_batch_idx": ints(0, 0)}, ValueError, "page_table has no rows, expected those of cache_batch_idx"),
        (lambda a: {"page_table": ints(0, 1).reshape(2, 1), "block_table": ints(0, 1)}, ValueError, "block_table was given with page_table"),
        (lambda a: {"cache_leftpad": ints(0, 11)}, ValueError, "cache_leftpad has 11 for sequence 1, expected from 0 to 10"),
        (lambda a: {"cu_seqlens_q": starts(3, 3)}, ValueError, "q has 4 dimensions, expected 3"),
        (lambda a: {"q": random(2, 3, 5, 16)}, ValueError, "q has 5 heads, expected a multiple of the 2 of k_cache"),
        (lambda a: {"q": random(2, 3, 4, 8)}, ValueError, "k_cache has head dim 16, expected the 8 of q"),
        (lambda a: {"alibi_slopes": random(3)}, ValueError, r"alibi_slopes has shape \[3\], expected \[4\] or \[2, 4\]"),
        (lambda a: {"s_aux": random(4).astype(np.float64)}, TypeError, "s_aux has element type float64, expected float32"),
        (lambda a: {"softcap": -1.0}, ValueError, "softcap=-.*, expected a positive number"),
        (lambda a: {"attention_chunk": -1}, ValueError, "attention_chunk=-1, expected no negative number"),
    ],
)  # fmt: skip
def test_wrong_use_of_a_cache_is_named(change, error, words):
    with pytest.raises(error, match=words):
        call(change)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"cu_seqlens_q": ints(0, 5, 3)}, "cu_seqlens_q goes from 5 to 3 in sequence 1, expected cumulative"),
        ({"cu_seqlens_q": starts(5, 6)}, "cu_seqlens_q ends at 11, expected at most the 10 rows of q"),
        ({"cu_seqlens_k": starts(4, 4, 4)}, "cu_seqlens_k has 4 entries, expected 3 for 2 sequences"),
        ({"max_seqlen_q": 5}, "cu_seqlens_q gives sequence 1 6 queries, expected at most max_seqlen_q=5"),
        ({"max_seqlen_k": 6}, "cu_seqlens_k gives sequence 0 7 keys, expected at most max_seqlen_k=6"),
        ({"max_seqlen_q": -3}, "max_seqlen_q=-3, expected no negative number"),
        ({"seqused_k": ints(8, 1)}, "seqused_k has 8 for sequence 0, expected from 0 to 7"),
        ({"seqused_q": ints(4, 7)}, "seqused_q has 7 for sequence 1, expected from 0 to 6"),
        ({"cu_seqlens_q": None}, "q has 3 dimensions, expected 4"),
        ({"cu_seqlens_q": starts(4, 6)[::2]}, r"cu_seqlens_q has strides \[2\], expected no gaps"),
    ],
)
def test_wrong_use_of_ragged_sequences_is_named(change, words):
    arguments = {
        "q": random(10, 2, 16), "k": random(12, 2, 16), "v": random(12, 2, 16),
        "cu_seqlens_q": starts(4, 6), "cu_seqlens_k": starts(7, 5), "max_seqlen_q": 6, "max_seqlen_k": 7,
    }  # fmt: skip
    flash_attn_varlen_func(**arguments)
    with pytest.raises(ValueError, match=words):
        flash_attn_varlen_func(**{**arguments, **change})


def test_parts_of_16_bits_are_put_together_in_float32():
    outputs, lses = random(3, 2, 5, 4, 16).astype(np.float16), random(3, 2, 5, 4, seed=1)
    wide, sums = flash_attn_combine(outputs.astype(np.float32), lses)
    found, found_sums = flash_attn_combine(outputs, lses)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, wide)
    np.testing.assert_array_equal(found_sums, sums)
    rounded, _ = flash_attn_combine(outputs, lses, out_dtype=np.float16)
    np.testing.assert_allclose(rounded, wide, rtol=1e-3, atol=1e-5)


def test_wrong_use_of_parts_is_named():
    outputs, lses = random(3, 1, 4, 2, 16), random(3, 1, 4, 2)
    with pytest.raises(ValueError, match="out_partial has 4 dimensions, expected 5"):
        flash_attn_combine(outputs[0], lses)
    with pytest.raises(ValueError, match=r"lse_partial has shape \[3, 1, 2, 4\], expected \[3, 1, 4, 2\]"):
        flash_attn_combine(outputs, lses.swapaxes(2, 3))
    with pytest.raises(TypeError, match="out_partial has element type float64, expected float32, float16 or"):
        flash_attn_combine(outputs.astype(np.float64), lses)
    with pytest.raises(TypeError, match="lse_partial has element type f16, expected float32"):
        flash_attn_combine(outputs, lses.astype(np.float16))
    with pytest.raises(ValueError, match="out has shape"):
        flash_attn_combine(outputs, lses, out=outputs[0, :, :3])
    with pytest.raises(ValueError, match="out_dtype=float64, expected float16"):
        flash_attn_combine(outputs, lses, out_dtype=np.float64)
    with pytest.raises(TypeError, match="out has element type f32, expected f16 as out_dtype says"):
        flash_attn_combine(outputs, lses, out=outputs[0], out_dtype=np.float16)
    with pytest.raises(ValueError, match="out_b has shape .* expected that of out_a"):
        flash_attn_merge(outputs[0], lses[0].swapaxes(1, 2), outputs[0, :, :3], lses[0])
    with pytest.raises(ValueError, match="lse_a has shape .* to go with out_a"):
        flash_attn_merge(outputs[0], lses[0], outputs[0], lses[0])


@pytest.mark.parametrize(
    "name, value", [("qv", np.zeros(1))]
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(name, value):
    x, cu = random(4, 2, 16), starts(4)
    with pytest.raises(NotImplementedError, match=f"{name}=.* is not supported yet, expected"):
        flash_attn_varlen_func(x, x, x, cu, cu, 4, 4, **{name: value})
    with pytest.raises(NotImplementedError, match=f"{name}=.* is not supported yet, expected"):
        flash_attn_with_kvcache(x[None], x[None], x[None], **{name: value})


def test_a_cache_must_be_writable():
    q, cache, new = random(1, 1, 2, 16), random(1, 8, 2, 16), random(1, 1, 2, 16)
    cache.flags.writeable = False
    flash_attn_with_kvcache(q, cache, cache, cache_seqlens=4)
    with pytest.raises(ValueError, match="k_cache is read-only"):
        flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=4)


def test_what_ran_is_told():
    q, cache = random(2, 1, 4, 16), random(2, 16, 2, 16)
    flash_attn_with_kvcache(q, cache, cache, cache_seqlens=5, causal=True)
    last = flashcore.info()["last"]
    assert last["device"] == "cpu" and last["problem"].startswith("batch 2, heads 4/2, length 1x16")


def test_jax():
    jax = pytest.importorskip("jax")
    with jax.default_device(jax.devices("cpu")[0]):
        of_jax_arrays(jax.numpy)


def of_jax_arrays(jnp):
    q, k, cu = random(6, 2, 16), random(6, 2, 16, seed=1), starts(2, 4)
    output = flash_attn_varlen_func(*map(jnp.asarray, (q, k, k, cu, cu)), 4, 4, causal=True)
    assert isinstance(output, jnp.ndarray) and close(output[2:], reference(q[2:], k[2:], k[2:], causal=True)[0])
    cache = jnp.asarray(random(1, 8, 2, 16))
    flash_attn_with_kvcache(cache[:, :1], cache, cache, cache_seqlens=4)
    with pytest.raises(TypeError, match="k_cache is a .* which cannot be written"):
        flash_attn_with_kvcache(cache[:, :1], cache, cache, cache[:, :1], cache[:, :1], cache_seqlens=4)
