"""Caches of 8 bits on a GPU: attention, appending, and what they refuse."""

import pytest

torch = pytest.importorskip("torch")

from flashcore import dequantize, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, quantize_kv
from test_serving_torch import angles, ints, plain, random, starts

pytestmark = pytest.mark.gpu

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
LENGTHS = (1, 0, 75, 300)
PAGE, COLUMNS = 16, 20


def caches(dtype, per, paged, heads=2, dim=128, seed=0):
    """Keys and values with room for 320 positions of four sequences, their factors, and the pages."""
    shape = (4 * COLUMNS, PAGE, heads, dim) if paged else (4, PAGE * COLUMNS, heads, dim)
    wide = [random(*shape, device="cuda", dtype=torch.float32, seed=seed + at) for at in (1, 2)]
    k8, v8, k_descale, v_descale = quantize_kv(*wide, dtype, per="head" if paged and per == "sequence" else per)
    if paged and per == "sequence":
        k_descale, v_descale = (x.expand(4, heads).contiguous() for x in (k_descale, v_descale))
    pages = torch.randperm(4 * COLUMNS, generator=torch.Generator().manual_seed(seed)).view(4, COLUMNS)
    places = {"page_table": pages.to("cuda", torch.int32)} if paged else {}
    return k8, v8, {"k_descale": k_descale, "v_descale": v_descale}, places


def rows(x8, descale, places, sequence, length):
    """The numbers that the rows of a sequence stand for, in f32."""
    if descale.dim() == 2:
        descale = descale[sequence]
    wide = dequantize(x8, descale)
    if places:
        return wide[places["page_table"][sequence].long()].flatten(0, 1)[:length]
    return wide[sequence, :length]


def check_sequences(output, lse, q, k8, v8, scales, places, lengths):
    """Against the plain algorithm over the numbers that bytes and factors stand for."""
    for at, length in enumerate(lengths):
        k, v = (rows(x8, scales[name], places, at, length) for x8, name in ((k8, "k_descale"), (v8, "v_descale")))
        check(output[at], lse[at], q[at], k, v)


def check(output, lse, q, k, v):
    """At most twice the error of the plain algorithm in the queries' type, against f64."""
    truth, sums = plain(q, k, v, causal=True, dtype=torch.float64)
    rough, rough_sums = plain(q, k.to(q.dtype), v.to(q.dtype), causal=True)
    assert output.shape == truth.shape and output.dtype == q.dtype
    error = (output.double() - truth).abs().max().item()
    allowed = 2 * (rough.double() - truth).abs().max().item() + 1e-4
    assert error <= allowed, (error, allowed)
    if lse is None:
        return
    assert torch.equal(lse.isinf(), sums.isinf())
    finite = ~sums.isinf()
    if finite.any():
        # Many queries go over keys that were widened to their type.
        widened = (rough_sums.double() - sums)[finite].abs().max().item()
        assert (lse.double() - sums)[finite].abs().max().item() < 2e-3 + 2 * widened


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("per", ["tensor", "head", "sequence", "token"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries, wide", [(1, torch.bfloat16), (3, torch.float16), (150, torch.bfloat16)])
def test_attention_over_a_cache(queries, wide, dtype, per, paged):
    k8, v8, scales, places = caches(dtype, per, paged)
    q = random(4, queries, 8, 128, device="cuda", dtype=wide)
    given = {"cache_seqlens": ints(LENGTHS, "cuda"), "causal": True, **scales, **places}
    output, lse = flash_attn_with_kvcache(q, k8, v8, return_softmax_lse=True, **given)
    check_sequences(output, lse, q, k8, v8, scales, places, LENGTHS)
    again = flash_attn_with_kvcache(q, k8, v8, **given)
    assert torch.equal(again, output)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("per", ["sequence", "token"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [None, False, True])
def test_a_cache_grows_as_on_the_cpu(interleaved, dtype, per, paged):
    k8, v8, scales, places = caches(dtype, per, paged)
    q = random(4, 2, 8, 128, device="cuda")
    new = [random(4, 2, 2, 128, device="cuda", seed=seed) for seed in (5, 6)]
    lengths = ints(LENGTHS, "cuda")
    rotary = {}
    if interleaved is not None:
        cos, sin = angles(PAGE * COLUMNS, 64, "cuda")
        rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}

    def step(device):
        there = [x.to(device).clone() for x in (k8, v8)]
        factors = {name: x.to(device).clone() for name, x in scales.items()}
        lists = {name: x.to(device) for name, x in {**places, "cache_seqlens": lengths, **_tensors(rotary)}.items()}
        rest = {name: x for name, x in rotary.items() if name not in lists}
        added = [x.to(device) for x in new]
        output = flash_attn_with_kvcache(q.to(device), *there, *added, causal=True, **factors, **lists, **rest)
        return output, *there, *factors.values()

    expected, found = step("cpu"), step("cuda")
    assert (found[0].cpu().float() - expected[0].float()).abs().max().item() < 3e-2
    for mine, theirs in zip(found[1:3], expected[1:3]):
        mine = mine.cpu()
        if interleaved is None:
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
        else:
            # Angles are multiplied in f32 with another order of roundings: a step of the type at most.
            step_of = {torch.float8_e4m3fn: 2.0**-3, torch.float8_e5m2: 2.0**-2, torch.int8: 0}[dtype]
            least = 1 if dtype == torch.int8 else 2.0**-9
            apart = (mine.float() - theirs.float()).abs() > step_of * theirs.float().abs() + least
            assert not apart.any()
    for mine, theirs in zip(found[3:], expected[3:]):
        assert torch.allclose(mine.cpu(), theirs, rtol=0 if interleaved is None else 1e-5, atol=0)
    assert not torch.equal(found[1].view(torch.uint8), k8.view(torch.uint8))


def _tensors(arguments):
    return {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}


def test_packed_keys():
    queries, keys = (5, 1, 60), (40, 1, 211)
    q = random(sum(queries), 4, 64, device="cuda")
    k, v = (random(sum(keys), 2, 64, device="cuda", dtype=torch.float32, seed=seed) for seed in (1, 2))
    for per in ("head", "token"):
        k8, v8, k_descale, v_descale = quantize_kv(k, v, per=per)
        found = flash_attn_varlen_func(
            q, k8, v8, starts(queries, "cuda"), starts(keys, "cuda"), max(queries), max(keys), causal=True,
            k_descale=k_descale, v_descale=v_descale,
        )  # fmt: skip
        wide = [dequantize(k8, k_descale), dequantize(v8, v_descale)]
        mine, theirs = 0, 0
        for n, m in zip(queries, keys):
            a, b = slice(mine, mine + n), slice(theirs, theirs + m)
            check(found[a], None, q[a], *(x[b] for x in wide))
            mine, theirs = mine + n, theirs + m


def test_nan_bytes_propagate_from_rows_that_are_seen():
    k8, v8, scales, places = caches(torch.float8_e4m3fn, "head", True)
    q, lengths = random(4, 1, 8, 128, device="cuda"), ints(LENGTHS, "cuda")
    pages = places["page_table"]
    expected = flash_attn_with_kvcache(q, k8, v8, cache_seqlens=lengths, **scales, **places)
    # Behind the last key of sequence 2: nobody sees it.
    k8.view(torch.uint8)[pages[2, 4], 11:] = 0x7F
    v8.view(torch.uint8)[pages[2, 4], 11:] = 0xFF
    assert torch.equal(flash_attn_with_kvcache(q, k8, v8, cache_seqlens=lengths, **scales, **places), expected)
    # A value of sequence 3 in one column, and a key of sequence 2.
    v8.view(torch.uint8)[pages[3, 7], 3, 1, 17] = 0x7F
    k8.view(torch.uint8)[pages[2, 0], 5, 0, 100] = 0xFF
    found = flash_attn_with_kvcache(q, k8, v8, cache_seqlens=lengths, **scales, **places)
    nans = torch.zeros_like(found, dtype=torch.bool)
    nans[3, 0, 4:, 17] = True
    nans[2, 0, :4] = True
    assert torch.equal(found.isnan(), nans)
    assert torch.equal(found[~nans], expected[~nans])


@pytest.mark.parametrize("odd", [0.0, float("inf"), float("nan")])
def test_odd_factors_on_the_device_are_what_they_are(odd):
    """Nobody reads them on the host: zero makes zeros, the others NaN, and other heads are as they were."""
    k8, v8, scales, places = caches(torch.float8_e4m3fn, "head", True)
    q, lengths = random(4, 1, 8, 128, device="cuda"), ints((320,) * 4, "cuda")
    expected = flash_attn_with_kvcache(q, k8, v8, cache_seqlens=lengths, **scales, **places)
    wrong = scales["v_descale"].clone()
    wrong[1] = odd
    found = flash_attn_with_kvcache(q, k8, v8, cache_seqlens=lengths, **{**scales, "v_descale": wrong}, **places)
    assert torch.equal(found[:, :, :4], expected[:, :, :4])
    rest = found[:, :, 4:]
    assert not rest.any() if odd == 0.0 else not rest.isfinite().any()
    # Factors of tokens that no sequence has may be anything.
    k8, v8, scales, places = caches(torch.float8_e4m3fn, "token", True)
    lengths = ints(LENGTHS, "cuda")
    expected = flash_attn_with_kvcache(q, k8, v8, cache_seqlens=lengths, **scales, **places)
    for factors in scales.values():
        factors[places["page_table"][2, 4].long(), 11:] = odd
        factors[places["page_table"][1].long()] = odd
    assert torch.equal(flash_attn_with_kvcache(q, k8, v8, cache_seqlens=lengths, **scales, **places), expected)


def test_what_is_wrong_is_refused_on_the_host():
    k8, v8, scales, places = caches(torch.float8_e4m3fn, "head", True)
    q, lengths = random(4, 1, 8, 128, device="cuda"), ints(LENGTHS, "cuda")

    def call(k=k8, v=v8, q=q, **changed):
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **{**scales, **places, **changed})

    call()
    with pytest.raises(ValueError, match=r"k_descale has shape \[3\], expected \[\], \[2\] or \[4, 2\]"):
        call(k_descale=torch.ones(3, device="cuda"))
    with pytest.raises(TypeError, match="v_descale has element type f16, expected float32"):
        call(v_descale=torch.ones(2, device="cuda", dtype=torch.float16))
    with pytest.raises(ValueError, match="k_descale is on the CPU, expected cuda:0"):
        call(k_descale=torch.ones(2))
    with pytest.raises(ValueError, match="k_descale was given with a k_cache of bf16, expected one of 8 bits"):
        call(k=k8.bfloat16(), v=v8.bfloat16(), v_descale=None)
    # Pages whose bytes no copy of 16 can begin at.
    room = torch.zeros(k8.numel() + 8, device="cuda", dtype=torch.uint8)
    shifted = room[8:].view(torch.float8_e4m3fn).view(k8.shape)
    with pytest.raises(NotImplementedError, match="address is not a multiple of 16"):
        call(k=shifted)
    apart = torch.zeros(4 * COLUMNS, PAGE, 2, 136, device="cuda", dtype=torch.uint8)
    apart = apart.view(torch.float8_e4m3fn)[..., :128]
    with pytest.raises(NotImplementedError, match="stride of 136 bytes is not a multiple of 16"):
        call(k=apart)
    narrow = [x[..., :72].contiguous() for x in (k8, v8)]
    with pytest.raises(NotImplementedError, match="head dim 72 is not a multiple of 16"):
        call(*narrow, q=q[..., :72].contiguous())
    with pytest.raises(NotImplementedError):
        call(v=v8.view(torch.uint8).view(torch.float8_e5m2))


def test_nonsense_in_lists_stays_inside_the_tensors():
    q, lengths = random(3, 1, 4, 64, device="cuda"), ints((1 << 30, -5, 10), "cuda")
    table = ints((-7, 1 << 30, 3, 9999, 2, 1), "cuda").view(3, 2)
    room = [torch.zeros(12, 16, 2, 64, device="cuda", dtype=torch.uint8) for _ in range(2)]
    k8, v8 = (x[4:8].view(torch.float8_e4m3fn) for x in room)
    factors = [torch.ones(12, 16, 2, device="cuda") for _ in range(2)]
    scales = {"k_descale": factors[0][4:8], "v_descale": factors[1][4:8]}
    new = random(3, 5, 2, 64, device="cuda")
    flash_attn_with_kvcache(q, k8, v8, new, new, cache_seqlens=lengths, page_table=table, causal=True, **scales)
    torch.cuda.synchronize()
    for x in room:
        assert not x[:4].any() and not x[8:].any()
    for x in factors:
        assert (x[:4] == 1).all() and (x[8:] == 1).all()


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 256])
@pytest.mark.parametrize("dim", [16, 48, 256])
def test_pages_and_heads_at_the_edges(dim, size):
    columns = -(-70 // size)
    wide = [random(2 * columns, size, 2, dim, device="cuda", dtype=torch.float32, seed=seed) for seed in (1, 2)]
    k8, v8, k_descale, v_descale = quantize_kv(*wide, per="token")
    table = torch.randperm(2 * columns, generator=torch.Generator().manual_seed(size)).view(2, columns)
    places = {"page_table": table.to("cuda", torch.int32)}
    scales = {"k_descale": k_descale, "v_descale": v_descale}
    q = random(2, 1, 4, dim, device="cuda")
    output, lse = flash_attn_with_kvcache(
        q, k8, v8, cache_seqlens=ints((70, 33), "cuda"), causal=True, return_softmax_lse=True, **scales, **places
    )
    check_sequences(output, lse, q, k8, v8, scales, places, (70, 33))


@pytest.mark.hardware
def test_a_graph_is_right_as_an_8_bit_cache_grows():
    k8, v8, scales, places = caches(torch.float8_e4m3fn, "token", True, seed=3)
    q = random(4, 1, 8, 128, device="cuda")
    new = [random(4, 1, 2, 128, device="cuda", seed=seed) for seed in (5, 6)]
    lengths = ints((1, 0, 75, 200), "cuda")

    def step():
        found = flash_attn_with_kvcache(
            q, k8, v8, *new, cache_seqlens=lengths, causal=True, return_softmax_lse=True, **scales, **places
        )
        lengths.add_(1)
        return found

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, lse = step()
    for seed in range(1, 6):
        for at, tensor in enumerate((q, *new)):
            tensor.copy_(random(*tensor.shape, device="cuda", seed=100 * seed + at))
        graph.replay()
        check_sequences(output, lse, q, k8, v8, scales, places, lengths.tolist())


def test_plain_calls():
    q = random(2, 40, 4, 64, device="cuda")
    k, v = (random(2, 70, 2, 64, device="cuda", dtype=torch.float32, seed=seed) for seed in (1, 2))
    k8, v8, k_descale, v_descale = quantize_kv(k, v, per="sequence")
    found = flash_attn_func(q, k8, v8, causal=True, k_descale=k_descale, v_descale=v_descale)
    for at in range(2):
        check(found[at], None, q[at], dequantize(k8, k_descale)[at], dequantize(v8, v_descale)[at])
