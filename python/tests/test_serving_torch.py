"""Sequences, caches and parts as PyTorch's tensors, the same bodies on the CPU and on a GPU."""

import math
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import flashcore
from conftest import devices
from flashcore import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_merge,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

every_device = pytest.mark.parametrize("device", devices())


def random(*shape, device, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def ints(numbers, device):
    return torch.tensor(list(numbers), dtype=torch.int32, device=device)


def starts(lengths, device):
    return ints([sum(lengths[:at]) for at in range(len(lengths) + 1)], device)


def plain(
    q, k, v, causal=False, window=(-1, -1), chunk=0, softcap=0.0, slopes=None, sinks=None, scale=None, dtype=None
):
    """One sequence, (queries, heads, dim), in a precision, and its log-sum-exps, (heads, queries)."""
    q, k, v = (x.to(dtype or x.dtype).transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
    scores = (q @ k.transpose(1, 2)) * (scale or 1 / math.sqrt(q.shape[2]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    queries, keys = scores.shape[1:]
    at = torch.arange(queries, device=q.device)[:, None] + keys - queries
    distance = torch.arange(keys, device=q.device)[None] - at
    if slopes is not None:
        scores = scores - slopes.to(scores.dtype)[:, None, None] * distance.abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    if chunk:
        hidden |= at // chunk != (at + distance) // chunk
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        # One more key, without a value.
        column = sinks.to(scores.dtype)[:, None, None].expand(-1, queries, 1)
        scores, v = torch.cat([scores, column], 2), torch.cat([v, torch.zeros_like(v[:, :1])], 1)
        if keys == 0:
            v = v.new_zeros(q.shape[0], 1, v.shape[2])
    # Rows that see nothing have neither weights nor gradients.
    unseen = scores.isneginf().all(-1, keepdim=True)
    scores = scores.masked_fill(unseen, 0.0)
    weights, sums = scores.softmax(-1).masked_fill(unseen, 0.0), scores.logsumexp(-1)
    return (weights @ v).transpose(0, 1), sums.masked_fill(unseen[..., 0], -math.inf)


def check(output, lse, q, k, v, **rules):
    """At most twice the error of the plain algorithm in the element type, against f64."""
    if q.shape[0] == 0:
        return
    exact, sums = plain(q, k, v, **rules, dtype=torch.float64)
    rough, _ = plain(q, k, v, **rules)
    assert output.shape == exact.shape and output.dtype == q.dtype and output.device == q.device
    error = (output.double() - exact).abs().max().item()
    allowed = 2 * (rough.double() - exact).abs().max().item() + 1e-4
    assert error <= allowed, (error, allowed)
    if lse is not None:
        assert lse.shape == sums.shape and lse.dtype == torch.float32
        assert torch.equal(lse.isinf(), sums.isinf())
        finite = ~sums.isinf()
        if finite.any():
            assert (lse.double() - sums)[finite].abs().max().item() < 2e-3


RULES = [
    {},
    {"causal": True},
    {"window_size": (37, 5)},
    {"causal": True, "window_size": (20, -1)},
    {"softcap": 5.0, "softmax_scale": 0.3},
    {"alibi_slopes": True, "causal": True},
    {"s_aux": True, "causal": True, "window_size": (64, 0)},
    {"attention_chunk": 50, "causal": True},
]


def rules(chosen, heads, device):
    """A set of rules as arguments, and as the plain algorithm takes them."""
    given = dict(chosen)
    for name, seed in (("alibi_slopes", 5), ("s_aux", 6)):
        if given.get(name):
            given[name] = random(heads, device=device, dtype=torch.float32, seed=seed).abs()
    names = {
        "window_size": "window", "attention_chunk": "chunk", "alibi_slopes": "slopes", "s_aux": "sinks",
        "softmax_scale": "scale",
    }  # fmt: skip
    return given, {names.get(name, name): value for name, value in given.items()}


@every_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("chosen", RULES, ids=str)
@pytest.mark.parametrize("heads, key_heads, dim, value_dim", [(4, 2, 64, 64), (6, 1, 128, 128), (2, 2, 72, 40)])
def test_ragged_sequences(heads, key_heads, dim, value_dim, chosen, dtype, device):
    given, meant = rules(chosen, heads, device)
    queries, keys = (3, 0, 70, 1, 130), (9, 4, 70, 0, 257)
    q = random(sum(queries), heads, dim, device=device, dtype=dtype)
    k = random(sum(keys), key_heads, dim, device=device, dtype=dtype, seed=1)
    v = random(sum(keys), key_heads, value_dim, device=device, dtype=dtype, seed=2)
    cu_q, cu_k = starts(queries, device), starts(keys, device)
    output, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 130, 257, return_attn_probs=True, **given)
    assert output.shape == (204, heads, value_dim) and lse.shape == (heads, 204)
    mine, theirs = 0, 0
    for n, m in zip(queries, keys):
        a, b = slice(mine, mine + n), slice(theirs, theirs + m)
        check(output[a], lse[:, a], q[a], k[b], v[b], **meant)
        mine, theirs = mine + n, theirs + m
    assert torch.equal(flash_attn_varlen_func(q, k, v, cu_q, cu_k, 130, 257, **given), output)


@every_device
@pytest.mark.parametrize("chosen", RULES[2:], ids=str)
def test_plain_batches(chosen, device):
    given, meant = rules(chosen, 4, device)
    q = random(2, 90, 4, 64, device=device)
    k, v = (random(2, 150, 2, 64, device=device, seed=seed) for seed in (1, 2))
    output, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **given)
    for at in range(2):
        check(output[at], lse[at], q[at], k[at], v[at], **meant)


@every_device
def test_sequences_that_use_less_than_their_place(device):
    q = random(120, 2, 64, device=device)
    k, v = (random(200, 2, 64, device=device, seed=seed) for seed in (1, 2))
    used = ints((35, 80), device), ints((90, 5), device)
    output, lse = flash_attn_varlen_func(
        q,
        k,
        v,
        starts((40, 80), device),
        starts((90, 110), device),
        80,
        110,
        *used,
        causal=True,
        return_softmax_lse=True,
    )
    check(output[:35], lse[:, :35], q[:35], k[:90], v[:90], causal=True)
    check(output[40:], lse[:, 40:], q[40:], k[90:95], v[90:95], causal=True)
    slopes = random(2, 2, device=device, dtype=torch.float32).abs()
    padded = flash_attn_varlen_func(
        q.view(2, 60, 2, 64), k.view(2, 100, 2, 64), v.view(2, 100, 2, 64), None, None, None, None,
        ints((60, 35), device), used[1], alibi_slopes=slopes,
    )  # fmt: skip
    check(padded[0], None, q[:60], k[:90], v[:90], slopes=slopes[0])
    check(padded[1, :35], None, q[60:95], k[100:105], v[100:105], slopes=slopes[1])


def paged(sequences, size, pages, columns, seed=0):
    """Sequences in shuffled pages: the cache and the table. What nobody uses is NaN."""
    device = sequences[0].device
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).tolist()
    cache = torch.full((pages, size, *sequences[0].shape[1:]), math.nan, dtype=sequences[0].dtype, device=device)
    table = torch.full((len(sequences), columns), -1, dtype=torch.int32, device=device)
    for at, sequence in enumerate(sequences):
        for index in range(math.ceil(len(sequence) / size)):
            page = order.pop()
            table[at, index] = page
            part = sequence[index * size : (index + 1) * size]
            cache[page, : len(part)] = part
    return cache, table


@every_device
@pytest.mark.parametrize("size", [1, 5, 16, 64])
@pytest.mark.parametrize("chosen", [RULES[1], RULES[3], RULES[6]], ids=str)
def test_pages(size, chosen, device):
    given, meant = rules(chosen, 8, device)
    lengths, queries = (333, 7, 120), (1, 7, 20)
    keys, values = (
        [random(length, 2, 128, device=device, seed=seed + length) for length in lengths] for seed in (1, 2)
    )
    pages, columns = sum(math.ceil(length / size) for length in lengths) + 3, math.ceil(333 / size) + 2
    k_cache, table = paged(keys, size, pages, columns)
    v_cache, _ = paged(values, size, pages, columns)
    q, cu_q = random(sum(queries), 8, 128, device=device), starts(queries, device)
    output, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=ints(lengths, device), page_table=table, cu_seqlens_q=cu_q, max_seqlen_q=20,
        return_softmax_lse=True, **given,
    )  # fmt: skip
    first = 0
    for at, count in enumerate(queries):
        mine = slice(first, first + count)
        check(output[mine], lse[:, mine], q[mine], keys[at], values[at], **meant)
        first += count
    # FlashAttention-2's names for the same, and a table that is part of a larger one.
    wide = torch.zeros(3, columns + 5, dtype=torch.int32, device=device)
    wide[:, :columns] = table
    old = flash_attn_varlen_func(
        q, k_cache, v_cache, cu_q, starts(lengths, device), 20, 333, block_table=wide[:, :columns], **given
    )
    assert torch.equal(old, output)


@every_device
@pytest.mark.parametrize("queries", [1, 3])
def test_a_cache_with_entries_and_padding(queries, device):
    k_cache, v_cache = (random(5, 300, 2, 64, device=device, seed=seed) for seed in (1, 2))
    q = random(4, queries, 8, 64, device=device)
    lengths, entries, padding = (300, 9, 120, 77), (4, 0, 2, 4), (0, 3, 120, 1)
    output, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=ints(lengths, device), cache_batch_idx=ints(entries, device),
        cache_leftpad=ints(padding, device), causal=True, return_softmax_lse=True,
    )  # fmt: skip
    assert lse.shape == (4, 8, queries)
    for at in range(4):
        used = slice(padding[at], lengths[at])
        check(output[at], lse[at], q[at], k_cache[entries[at], used], v_cache[entries[at], used], causal=True)
    whole = flash_attn_with_kvcache(q, k_cache[:4], v_cache[:4], cache_seqlens=300)
    assert torch.equal(whole, flash_attn_with_kvcache(q, k_cache[:4], v_cache[:4]))
    # Heads first in memory, and gaps between batch entries.
    other = [x[:4].transpose(1, 2).contiguous().transpose(1, 2) for x in (k_cache, v_cache)]
    assert torch.equal(flash_attn_with_kvcache(q, *other), whole)


def rotated(x, positions, cosines, sines, interleaved):
    """Rows (rows, heads, dim) rotated by the angles of their positions, rounded once."""
    half = cosines.shape[1]
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    first, second = (x[..., part].float() for part in pairs)
    a, b = (table[positions].float()[:, None] for table in (cosines, sines))
    result = x.clone()
    result[..., pairs[0]] = (first * a - second * b).to(x.dtype)
    result[..., pairs[1]] = (first * b + second * a).to(x.dtype)
    return result


def angles(positions, half, device, dtype=torch.bfloat16):
    table = torch.outer(torch.arange(positions).float(), 0.8 ** torch.arange(half).float())
    return table.cos().to(device, dtype), table.sin().to(device, dtype)


@every_device
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_appending_with_rotary_embeddings(pages, packed, causal, interleaved, device):
    cosines, sines = angles(256, 16, device)
    lengths, added = (50, 0, 130), (3, 1, 20) if packed else (4, 4, 4)
    old_keys, old_values = ([random(160, 2, 64, device=device, seed=seed + at) for at in range(3)] for seed in (10, 20))
    total = sum(added)
    new_keys, new_values = (random(total, 2, 64, device=device, seed=seed) for seed in (1, 2))
    q = random(total, 4, 64, device=device, seed=3)
    if pages:
        k_cache, table = paged(old_keys, 32, 20, 6)
        v_cache, _ = paged(old_values, 32, 20, 6)
        place = {"page_table": table}
    else:
        k_cache, v_cache = (torch.stack(x)[[2, 0, 1]] for x in (old_keys, old_values))
        place = {"cache_batch_idx": ints((1, 2, 0), device)}
    padding, offsets = (2, 0, 7), (1, 40, 9)
    cu = starts(added, device)
    shape = lambda x: x if packed else x.view(3, 4, *x.shape[1:])
    more = {"cu_seqlens_q": cu, "cu_seqlens_k_new": cu, "max_seqlen_q": 20} if packed else {}
    for offset in (None, ints(offsets, device)):
        output = flash_attn_with_kvcache(
            shape(q), k_cache, v_cache, shape(new_keys), shape(new_values), rotary_cos=cosines, rotary_sin=sines,
            cache_seqlens=ints(lengths, device), cache_leftpad=ints(padding, device), causal=causal,
            rotary_interleaved=interleaved, rotary_seqlens=offset, **place, **more,
        )  # fmt: skip
        begin = 0
        for at in range(3):
            mine = slice(begin, begin + added[at])
            begin += added[at]
            first = lengths[at] if offset is None else offsets[at]
            along = first + torch.arange(added[at], device=device)
            keys, values = old_keys[at].clone(), old_values[at].clone()
            written = slice(lengths[at], lengths[at] + added[at])
            keys[written] = rotated(new_keys[mine], along, cosines, sines, interleaved)
            values[written] = new_values[mine]
            query = rotated(q[mine], along if causal else along * 0 + first, cosines, sines, interleaved)
            used = slice(padding[at], written.stop)
            check(output[mine] if packed else output[at], None, query, keys[used], values[used], causal=causal)
            for cache, kept in ((k_cache, keys), (v_cache, values)):
                if pages:
                    found = cache[table[at, :5].long()].flatten(0, 1)
                else:
                    found = cache[place["cache_batch_idx"][at]]
                # One rounding apart at most where numbers were rotated.
                assert (found.double() - kept.double()).abs().max().item() <= 2**-6
                assert torch.equal(found[: lengths[at]], kept[: lengths[at]])
                assert torch.equal(found[written.stop :], kept[written.stop :])


@every_device
def test_appending_without_turning_copies_bits(device):
    caches = [torch.zeros(2, 40, 2, 64, device=device, dtype=torch.float16) for _ in range(2)]
    k, v = (random(2, 3, 2, 64, device=device, dtype=torch.float16, seed=seed) for seed in (1, 2))
    q, lengths = random(2, 1, 4, 64, device=device, dtype=torch.float16), ints((0, 30), device)
    kept = lengths.clone()
    output = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, causal=True)
    for cache, new in zip(caches, (k, v)):
        assert torch.equal(cache[0, :3], new[0]) and torch.equal(cache[1, 30:33], new[1])
        assert not cache[0, 3:].any() and not cache[1, 33:].any() and not cache[1, :30].any()
    assert torch.equal(lengths, kept)
    check(output[0], None, q[0], k[0], v[0], causal=True)


@every_device
def test_autograd_knows_that_a_cache_was_written(device):
    caches = [torch.zeros(1, 16, 2, 64, device=device, dtype=torch.float16) for _ in range(2)]
    new = random(1, 1, 2, 64, device=device, dtype=torch.float16)
    versions = [cache._version for cache in caches]
    flash_attn_with_kvcache(new, *caches, new, new, cache_seqlens=3)
    assert all(cache._version > version for cache, version in zip(caches, versions))
    with torch.inference_mode():
        caches = [torch.zeros(1, 16, 2, 64, device=device, dtype=torch.float16) for _ in range(2)]
        flash_attn_with_kvcache(new, *caches, new, new, cache_seqlens=3)
        assert torch.equal(caches[0][:, 3:4], new)


@every_device
def test_parts_put_together(device):
    q = random(2, 5, 4, 64, device=device)
    k, v = (random(2, 300, 2, 64, device=device, seed=seed) for seed in (1, 2))
    parts = [
        flash_attn_func(q, k[:, part], v[:, part], return_attn_probs=True)[:2]
        for part in (slice(0, 70), slice(70, 170), slice(170, 300))
    ]
    outputs = torch.stack([output.float() for output, _ in parts])
    lses = torch.stack([lse for _, lse in parts]).transpose(2, 3)
    outputs, lses = torch.cat([outputs, outputs[:1] * math.nan]), torch.cat([lses, lses[:1] - math.inf])
    # By PyTorch's own functions; the last part saw no key.
    weights = lses[:3].softmax(0)[..., None]
    exact, sums = (weights * outputs[:3]).sum(0), lses[:3].logsumexp(0)
    output, lse = flash_attn_combine(outputs, lses)
    assert output.dtype == torch.float32 and (output - exact).abs().max().item() < 1e-5
    assert lse.shape == (2, 5, 4) and (lse - sums).abs().max().item() < 1e-5
    narrow, _ = flash_attn_combine(outputs, lses, out_dtype=torch.bfloat16)
    assert narrow.dtype == torch.bfloat16 and (narrow.float() - exact).abs().max().item() < 1e-2
    out = torch.zeros(2, 5, 8, 64, device=device, dtype=torch.float16)[:, :, ::2]
    again, _ = flash_attn_combine(outputs, lses, out=out)
    assert again is out and (out.float() - exact).abs().max().item() < 2e-3
    # Head dims that no kernel has.
    for dim in (60, 9):
        found, same = flash_attn_combine(outputs[..., :dim], lses)
        assert (found - exact[..., :dim]).abs().max().item() < 1e-5 and torch.equal(same, lse)
        into = torch.zeros(2, 5, 4, dim + 1, device=device, dtype=torch.float16)[..., :dim]
        again, _ = flash_attn_combine(outputs[..., :dim], lses, out=into)
        assert again is into and (into.float() - exact[..., :dim]).abs().max().item() < 2e-3
        with pytest.raises(ValueError, match="out has shape .* expected"):
            flash_attn_combine(outputs[..., :dim], lses, out=out)
        with pytest.raises(TypeError, match="out stands for other numbers than its memory has"):
            flash_attn_combine(outputs[..., :dim], lses, out=torch._efficientzerotensor(into.shape, device=device))
    nobody, lse = flash_attn_combine(outputs[3:], lses[3:])
    assert not nobody.any() and (lse == -math.inf).all()
    for at in range(2):
        merged, lse = flash_attn_merge(*flash_attn_merge(*parts[0], *parts[1]), *parts[2])
        assert merged.dtype == torch.bfloat16 and lse.shape == (2, 4, 5)
        assert (merged[at].double() - plain(q[at], k[at], v[at], dtype=torch.float64)[0]).abs().max().item() < 2e-2
    # Head dims that no kernel has.
    whole, sums = flash_attn_merge(*parts[0], *parts[1])
    for dim in (60, 9, 300):
        wide = lambda part: (part[0].repeat(1, 1, 1, 5)[..., :dim], part[1])
        found, same = flash_attn_merge(*wide(parts[0]), *wide(parts[1]))
        assert torch.equal(found, wide((whole, sums))[0]) and torch.equal(same, sums)
    with pytest.raises(ValueError, match="out_b"):
        flash_attn_merge(parts[0][0][..., :12], parts[0][1], *parts[1])
    flat = lambda part: (part[0].flatten(0, 1), part[1].transpose(0, 1).flatten(1))
    packed, lse = flash_attn_merge(*flat(parts[0]), *flat(parts[1]))
    assert torch.equal(packed, flash_attn_merge(*parts[0], *parts[1])[0].flatten(0, 1)) and lse.shape == (4, 10)


@every_device
def test_scheduler_metadata(device):
    lengths = ints((30, 9), device)
    metadata = get_scheduler_metadata(2, 1, 64, 4, 2, 64, lengths, torch.bfloat16, causal=True)
    assert metadata.dtype == torch.int32 and metadata.device == lengths.device
    q, cache = random(2, 1, 4, 64, device=device), random(2, 64, 2, 64, device=device)
    output = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, scheduler_metadata=metadata)
    assert torch.equal(output, flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths))


class Decoder(torch.nn.Module):
    """One step of one layer: projections, the cache, attention."""

    def __init__(self, width=256, heads=4, key_heads=2, dim=64):
        super().__init__()
        self.heads, self.key_heads, self.dim = heads, key_heads, dim
        self.q = torch.nn.Linear(width, heads * dim)
        self.kv = torch.nn.Linear(width, 2 * key_heads * dim)
        self.out = torch.nn.Linear(heads * dim, width)

    def forward(self, x, k_cache, v_cache, lengths, table, cosines, sines):
        batch, new, _ = x.shape
        q = self.q(x).view(batch, new, self.heads, self.dim)
        k, v = self.kv(x).view(batch, new, 2 * self.key_heads, self.dim).chunk(2, dim=2)
        attended = flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, rotary_cos=cosines, rotary_sin=sines, cache_seqlens=lengths, page_table=table,
            causal=True, rotary_interleaved=False,
        )  # fmt: skip
        return x + self.out(attended.flatten(2))


def decoder(device):
    """A step and what it takes: three sequences in pages."""
    torch.manual_seed(0)
    model = Decoder().to(device, torch.bfloat16).eval()
    table = torch.randperm(12, generator=torch.Generator().manual_seed(1)).view(3, 4).to(device, torch.int32)
    caches = [torch.zeros(12, 16, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(2)]
    return model, (*caches, ints((5, 0, 40), device), table, *angles(64, 32, device))


@every_device
@torch.no_grad()
@pytest.mark.hardware
def test_compile_in_one_graph(device):
    model, (k_cache, v_cache, lengths, *others) = decoder(device)
    # Generated code may round elsewhere than eager; on a CPU it wants a C++ compiler besides.
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    mine, theirs = (k_cache.clone(), v_cache.clone()), (k_cache.clone(), v_cache.clone())
    for step in range(4):
        x = random(3, 1, 256, device=device, seed=step)
        found, expected = compiled(x, *mine, lengths, *others), model(x, *theirs, lengths, *others)
        assert (found.float() - expected.float()).abs().max().item() < 6e-2
        lengths += 1
    for a, b in zip(mine, theirs):
        assert a.any() and (a.float() - b.float()).abs().max().item() < 6e-2
    # By themselves they are bitwise the same.
    q, cu = random(20, 4, 64, device=device), starts((5, 15), device)
    ragged = lambda q, cu, most: flash_attn_varlen_func(
        q, q, q, cu, cu, most, most, causal=True, return_softmax_lse=True
    )
    for found, expected in zip(torch.compile(ragged, fullgraph=True, backend=backend)(q, cu, 15), ragged(q, cu, 15)):
        assert torch.equal(found, expected)
    soft = lambda q: flash_attn_func(q, q, q, window_size=(7, 0), softcap=3.0, attention_chunk=5)
    assert torch.equal(torch.compile(soft, fullgraph=True, backend=backend)(q[None]), soft(q[None]))
    whole = lambda q, cache: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=9)
    cache = random(2, 16, 2, 64, device=device)
    assert torch.equal(
        torch.compile(whole, fullgraph=True, backend=backend)(cache[:, :1], cache), whole(cache[:, :1], cache)
    )
    parts = (
        random(3, 1, 4, 2, 64, device=device, dtype=torch.float32),
        random(3, 1, 4, 2, device=device, dtype=torch.float32),
    )

    def together(outputs, lses, out):
        first = flash_attn_combine(outputs, lses, out_dtype=torch.bfloat16)
        flash_attn_combine(outputs, lses, out=out)
        return *first, *flash_attn_merge(outputs[0], lses[0].transpose(1, 2), outputs[1], lses[1].transpose(1, 2))

    outs = [torch.zeros(1, 4, 2, 64, device=device) for _ in range(2)]
    found = torch.compile(together, fullgraph=True, backend=backend)(*parts, outs[0])
    assert all(torch.equal(*pair) for pair in zip(found, together(*parts, outs[1]))) and torch.equal(*outs)


@every_device
def test_the_operators_keep_pytorchs_rules(device):
    model, (k_cache, v_cache, lengths, table, cosines, sines) = decoder(device)
    q, new = random(3, 2, 4, 64, device=device), random(3, 2, 2, 64, device=device)
    operators = torch.ops.flashcore
    lists = (None, None, None, lengths, None, None, table, *(None,) * 5)
    numbers = (None, True, -1, -1, 0, 0.0, None, None)
    for operator in (operators.attention.all, operators.attention_with_lse.all):
        torch.library.opcheck(operator, (q, k_cache, v_cache, *numbers, *lists, "flash_attn_with_kvcache", False))
    for tables in ((None, None), (cosines, sines)):
        torch.library.opcheck(
            operators.append.default,
            (
                k_cache,
                v_cache,
                new,
                new,
                q,
                lengths,
                None,
                None,
                None,
                table,
                *tables,
                None,
                None,
                None,
                True,
                True,
                None,
            ),
        )
    outputs = random(3, 1, 4, 2, 64, device=device, dtype=torch.float32)
    lses = random(3, 1, 4, 2, device=device, dtype=torch.float32)
    torch.library.opcheck(operators.combine.default, (outputs, lses, torch.float16))
    torch.library.opcheck(operators.combine_out.default, (outputs, lses, torch.zeros_like(outputs[0])))
    sums = lses.transpose(2, 3).contiguous()
    torch.library.opcheck(operators.merge.default, (outputs[0], sums[0], outputs[1], sums[1]))


@every_device
def test_modes_see_the_operators(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    model, (*caches, lengths, table, cosines, sines) = decoder(device)
    q, new = random(3, 1, 4, 64, device=device), random(3, 1, 2, 64, device=device)
    step = lambda caches: flash_attn_with_kvcache(
        q, *caches, new, new, rotary_cos=cosines, rotary_sin=sines, cache_seqlens=lengths, page_table=table
    )
    copies = [cache.clone() for cache in caches]
    expected = step(copies)
    with Watch():
        assert torch.equal(step(caches), expected)
    assert torch.equal(caches[0], copies[0])
    assert {torch.ops.flashcore.attention.all, torch.ops.flashcore.append.default} <= set(seen)


@every_device
def test_gradients_of_caches_are_refused_and_not_lost(device):
    x = random(8, 2, 64, device=device)
    cache = x[None].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="k_cache requires grad"):
        flash_attn_with_kvcache(x[None], cache, x[None])
    with pytest.raises(Exception, match="k_cache requires grad"):
        torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="eager")(x[None], cache, x[None])
    with torch.no_grad():
        assert torch.equal(flash_attn_with_kvcache(x[None], cache, x[None]), flash_attn_func(x[None], x[None], x[None]))


def test_arguments_in_the_order_of_the_second_version_say_where_that_is():
    q, starts = torch.randn(5, 2, 8), ints((0, 5), "cpu")
    with pytest.raises(TypeError, match="seqused_q is a <class 'float'>.*that of flashcore.flash_attn"):
        flash_attn_varlen_func(q, q, q, starts, starts, 5, 5, 0.0)
    from flashcore.flash_attn import flash_attn_varlen_func as of_the_second_version

    of_the_second_version(q, q, q, starts, starts, 5, 5, 0.0)


@every_device
@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"cache_seqlens": [4, 7]}, TypeError, "cache_seqlens is a <class 'list'>, expected a torch.Tensor"),
        ({"cache_seqlens": torch.tensor([4, 7])}, Exception, "cache_seqlens has element type int64, expected int32|cache_seqlens is on the CPU"),
        ({"k": None}, ValueError, "k is None, expected a tensor with k and v"),
        ({"v_cache": torch.zeros(2, 10, 2, 16, dtype=torch.float64)}, Exception, "v_cache has element type float64|v_cache is on the CPU"),
        ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int32)}, ValueError, "q has 4 dimensions, expected 3"),
    ],
)  # fmt: skip
def test_wrong_use_is_named(change, error, words, device):
    arguments = {
        "q": random(2, 3, 4, 16, device=device), "k_cache": random(2, 10, 2, 16, device=device),
        "v_cache": random(2, 10, 2, 16, device=device), "k": random(2, 3, 2, 16, device=device),
        "v": random(2, 3, 2, 16, device=device), "cache_seqlens": ints((4, 7), device),
    }  # fmt: skip
    flash_attn_with_kvcache(**arguments)
    with pytest.raises(error, match=words):
        flash_attn_with_kvcache(**{**arguments, **change})


@every_device
def test_what_ran_is_told(device):
    q, cache = random(2, 1, 4, 64, device=device), random(2, 64, 2, 64, device=device)
    flash_attn_with_kvcache(q, cache, cache, cache_seqlens=5, causal=True)
    last = flashcore.info()["last"]
    assert last["device"] == ("cuda:0" if device == "cuda" else "cpu")
    assert last["problem"].startswith("batch 2, heads 4/2, length 1x64")
    if device == "cuda":
        assert last["kernel"] == "gpu/decode" and last["configuration"].startswith("decode_")


@every_device
@torch.no_grad()
def test_the_loop_of_the_documentation(device):
    """It runs as it is printed, and gives the tokens that whole sequences would."""
    text = Path(__file__).parents[2] / "docs" / "serving.md"
    if not text.exists():
        pytest.skip("no documentation beside the tests")
    loop = re.search(r"```python\n(.*?)```", text.read_text(), re.DOTALL).group(1)
    names = {}
    exec(loop.partition('\ndevice = "cuda"')[0], names)
    torch.manual_seed(3)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = names["Model"]().to(device, dtype)
    prompts = [torch.randint(1000, (length,), device=device) for length in (5, 40, 1)]
    answers = names["generate"](model, prompts, 20)
    assert answers.shape == (3, 20)
    wide = names["Model"]().to(device, torch.float64)
    wide.load_state_dict(model.state_dict())
    for prompt, answer in zip(prompts, answers):
        x, q, k, v = wide.before(torch.cat([prompt, answer]))
        attended, _ = plain(q, k, v, causal=True)
        scores = wide.words(x + attended.flatten(-2))[len(prompt) - 1 : -1]
        # Within what rounding could turn around, the best.
        chosen = scores.gather(1, answer.long()[:, None])[:, 0]
        assert (scores.max(1).values - chosen).max().item() < (5e-2 if device == "cuda" else 1e-4)


@every_device
@pytest.mark.parametrize("heads, dim, window", [((4, 2), 64, (-1, -1)), ((8, 1), 128, (150, 0))])
def test_bits_do_not_depend_on_the_batch(device, heads, dim, window):
    """A prompt in one piece, in chunks beside others, and token by token over pages."""
    length, page = 700, 16
    rules = {"causal": True, "window_size": window, "batch_invariant": True}
    q, k, v = (random(length, count, dim, device=device, seed=count) for count in (heads[0], heads[1], heads[1]))
    k = k * torch.linspace(0.5, 2, length, device=device)[:, None, None].to(k.dtype)
    ends = starts([length], device)
    whole, sums = flash_attn_varlen_func(q, k, v, ends, ends, length, length, return_attn_probs=True, **rules)

    # Two chunks of the same prompt in one call, with another between them.
    chunks = [(0, 130), (250, 251), (130, 300)]
    queries = torch.cat([q[begin:end] for begin, end in chunks])
    keys, values = (torch.cat([x[:end] for _, end in chunks]) for x in (k, v))
    lengths = [[end - begin for begin, end in chunks], [end for _, end in chunks]]
    call = lambda: flash_attn_varlen_func(
        queries, keys, values, *(starts(it, device) for it in lengths), 170, 300, **rules
    )
    for found in (call(), torch.compile(call, fullgraph=True, backend="eager")()):
        for (begin, end), part in zip(chunks, found.split(lengths[0])):
            assert torch.equal(part, whole[begin:end])

    # One query each, and several: over a cache in shuffled pages.
    last = [700, 512, 513, 1, 96]
    columns = -(-length // page)
    generator = torch.Generator().manual_seed(1)
    table = torch.randperm(len(last) * columns, generator=generator).view(-1, columns).to(device, torch.int32)
    caches = [torch.full((table.numel(), page, heads[1], dim), math.nan, device=device, dtype=q.dtype) for _ in "kv"]
    for cache, x in zip(caches, (k, v)):
        for row, end in zip(table, last):
            positions = torch.arange(end, device=device)
            cache[row[positions // page].long(), positions % page] = x[:end]
    for count in (1, 3):
        drafts = torch.stack([q[max(end, count) - count : max(end, count)] for end in last])
        lens = ints([max(end, count) for end in last], device)
        for rows in (range(5), [0], [3, 1]):
            rows = [row for row in rows if last[row] >= count]
            found, found_sums = flash_attn_with_kvcache(
                drafts[rows],
                *caches,
                cache_seqlens=lens[rows],
                page_table=table[rows],
                return_softmax_lse=True,
                **rules,
            )
            for row, part, part_sums in zip(rows, found, found_sums):
                assert torch.equal(part, whole[last[row] - count : last[row]])
                assert torch.equal(part_sums, sums[:, last[row] - count : last[row]])


def test_batch_invariance_leaves_gradients_as_they_are():
    q, k, v = (random(2, 40, 2, 16, device="cpu", dtype=torch.float32).requires_grad_() for _ in range(3))
    gradients = []
    for batch_invariant in (False, True):
        out = flash_attn_func(q, k, v, causal=True, batch_invariant=batch_invariant)
        gradients.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for plain, other in zip(*gradients):
        torch.testing.assert_close(plain, other)
