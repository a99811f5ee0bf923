"""Attention over a spread sequence: 2, 3, 4 and 8 processes on the CPU find what one does."""

import functools
import math
import os
import signal
import time
import traceback
import warnings

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

import distributed_cases
import ranks
from distributed_cases import VARIANTS, cases, check, starts, tensors
from flashcore import _copies, _flashcore, flash_attn_func, flash_attn_with_kvcache
from flashcore.distributed import (
    _cache,
    append,
    context_parallel_attention,
    decode,
    positions,
    ring_attention,
    shard,
    unshard,
)
from flashcore.distributed._attention import Sum
from flashcore.distributed._plan import plan as plan_of

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="PyTorch was built without gloo"
)

# Groups of all sizes among eight processes; the ranks of a group are not those of the world.
GROUPS = {2: (6, 7), 3: (1, 3, 5), 4: (0, 2, 4, 6), 8: tuple(range(8))}


def world(store, rank, size):
    """All that is checked, in each of eight processes; errors by what was checked."""
    ranks.begin(store, rank, size)
    errors = {}
    for count, members in GROUPS.items():
        group = dist.new_group(members)
        if rank not in members:
            continue
        for variant in VARIANTS:
            for index, case in enumerate(cases(count, variant)):
                attempt(errors, (count, variant), check, group, variant, case)
                if index == 1:
                    attempt(errors, (count, variant), check, group, variant, case, torch.bfloat16, tolerance=2e-2)
        for body in BODIES:
            attempt(errors, (count, body.__name__), body, group)
    dist.barrier()
    dist.destroy_process_group()
    return errors


def attempt(errors, name, body, *arguments, **options):
    try:
        body(*arguments, **options)
    except Exception:
        errors.setdefault(name, []).append(f"{arguments[1:]}\n{traceback.format_exc()}")


def whole_tensors_come_back(group):
    for lengths in (45, [17, 0, 40, 3], [0], 1):
        ragged = {} if isinstance(lengths, int) else {"cu_seqlens": starts(lengths)}
        first = (2, lengths) if isinstance(lengths, int) else (sum(lengths),)
        given = torch.arange(3 * math.prod(first)).view(*first, 3)
        for order in ("zigzag", "contiguous"):
            for nodes in (1, dist.get_world_size(group)):
                own = shard(given, group, order=order, nodes=nodes, **ragged)
                length = {} if ragged else {"length": lengths}
                back = unshard(own, group, order=order, nodes=nodes, **ragged, **length)
                assert torch.equal(back, given)


def positions_are_those_of_own_rows(group):
    for where in ({"length": 45}, {"cu_seqlens": starts([17, 0, 40, 3])}):
        lengths = [45] if "length" in where else [17, 0, 40, 3]
        every = torch.cat([torch.arange(it) for it in lengths])
        lists = {key: it for key, it in where.items() if key == "cu_seqlens"}
        assert torch.equal(positions(group, **where), shard(every, group, dim=0, **lists))


def nobody_needs_to_have_anything(group):
    empty = torch.empty(2, 0, 8, 16, requires_grad=True)
    out = ring_attention(empty, empty, empty, group)
    out.sum().backward()
    assert out.shape == empty.shape and empty.grad.shape == empty.shape
    # Of a head dim of values that is larger, and of no sequences.
    for batch, rows, dim in ((2, 0, 24), (0, 4, 24), (0, 4, 8)):
        shapes = (batch, rows, 8, 16), (batch, rows, 2, 16), (batch, rows, 2, dim)
        leaves = [torch.empty(shape, requires_grad=True) for shape in shapes]
        out, lse = ring_attention(*leaves, group, return_lse=True)
        out.sum().backward()
        assert out.shape == (batch, rows, 8, dim) and lse.shape == (batch, 8, rows)
        assert all(it.grad.shape == it.shape for it in leaves)


def negated_tensors_are_what_they_stand_for(group):
    """Neither what is sent nor what kernels read is the memory of a view of negatives, or of zeros that have none."""
    given = [shard(it, group) for it in tensors(48, (8, 8))]
    given.append(given[3][..., 0].transpose(1, 2).contiguous())
    negated = [torch._neg_view(-it) for it in given]
    for variant in VARIANTS:
        results = []
        for *leaves, dout, dlse in (given, negated):
            leaves = [it.detach().requires_grad_() for it in leaves]
            out, lse = context_parallel_attention(*leaves, group, variant=variant, causal=True, return_lse=True)
            results.append((out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse))))
        for found, expected in zip(*results):
            assert not found.is_neg() and torch.equal(found, expected), variant
    zeros = torch._efficientzerotensor(given[0].shape)
    assert torch.equal(ring_attention(zeros, *given[1:3], group), ring_attention(zeros.clone(), *given[1:3], group))


def a_rank_whose_output_nobody_uses_gives_its_part(group):
    q, k, v, dout = tensors(45, (8, 2))
    leaves = [shard(it, group).requires_grad_() for it in (q, k, v)]
    out = ring_attention(*leaves, group, causal=True, length=45)
    rank = dist.get_rank(group)
    if rank == 0:
        # As where only the log-sum-exps, or nothing, of it went into the loss.
        zero = torch.zeros_like(out)
        out.backward(zero)
    else:
        out.backward(shard(dout, group))
    dout = dout.masked_fill(rows_of_the_first(group)[..., None, None], 0)
    expected, _ = distributed_cases.whole(45, (q, k, v, dout), {"causal": True}, torch.zeros(2, 8, 45))
    for leaf, gradient in zip(leaves, expected[1:]):
        distributed_cases.near("gradient", leaf.grad, shard(gradient, group), 2e-5)


def a_rank_that_uses_one_of_two_results_gives_its_part(group):
    q, k, v, dout = tensors(45, (8, 2))
    dlse = distributed_cases.of_sums(dout)
    first = rows_of_the_first(group)
    for variant in ("ring", "all_to_all"):
        for used in ("out", "lse"):
            leaves = [shard(it, group).requires_grad_() for it in (q, k, v)]
            out, lse = context_parallel_attention(
                *leaves, group, variant=variant, causal=True, length=45, return_lse=True
            )
            own = shard(dlse.transpose(1, 2), group).transpose(1, 2)
            results, gradients = {"out": out, "lse": lse}, {"out": shard(dout, group), "lse": own}
            some = [used] if dist.get_rank(group) == 0 else ["out", "lse"]
            torch.autograd.backward([results[name] for name in some], [gradients[name] for name in some])
            whole_out = dout.masked_fill(first[..., None, None], 0) if used == "lse" else dout
            whole_lse = dlse.masked_fill(first[:, None], 0) if used == "out" else dlse
            expected, _ = distributed_cases.whole(45, (q, k, v, whole_out), {"causal": True}, whole_lse)
            for leaf, gradient in zip(leaves, expected[1:]):
                distributed_cases.near(f"{variant}, {used}", leaf.grad, shard(gradient, group), 2e-5)


def rows_of_the_first(group):
    """Which rows of two sequences of 45 the first rank owns."""
    first = torch.zeros(2, 45, dtype=torch.bool)
    for sequence, (begin, end) in plan_of(
        dist.get_world_size(group), 0, (45,), 2, (None, 0), "ring", 1, "zigzag", (8, 2, 16, 24, 4)
    ).distribution.pieces(0):
        first[:, begin:end] = True
    return first


def in_pages(cache, size, generator):
    """A cache in pages of so many rows, in any order, with some that nobody has; and its table."""
    batch, rows = cache.shape[:2]
    count = -(-rows // size)
    table = torch.randperm(batch * count + 3, generator=generator, dtype=torch.int32)[: batch * count].view(
        batch, count
    )
    return torch.full((batch * count + 3, size, *cache.shape[2:]), float("nan")), table


def decoding_over_a_spread_cache(group):
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    block, batch, heads, key_heads, dim, room = 3, 3, 4, 2, 16, 90
    generator = torch.Generator().manual_seed(1)
    random = lambda *shape: torch.randn(*shape, generator=generator)
    whole_k, whole_v = random(batch, room, key_heads, dim), random(batch, room, key_heads, dim)
    own = -(-room // (size * block)) * block
    k_cache, v_cache = torch.empty(2, batch, own, key_heads, dim)
    # A prompt, one position after the other, and several at once: fewer than a block, and many.
    counts = (40, 1, 1, 1, 2, 7, 1, 25)
    sinks = {"s_aux": random(heads)}
    rules = (
        {},
        sinks,
        {"window_size": (10, 0)},
        {"attention_chunk": 16, **sinks},
        {"attention_chunk": 7, "window_size": (5, 0)},
    )
    for rules, paged in ((it, paged) for it in rules for paged in (False, True)):
        # Pages that end within a block.
        pages, table = in_pages(k_cache, 4, torch.Generator().manual_seed(rank)) if paged else (None, None)
        keys, values = (pages, pages.clone()) if paged else (k_cache.fill_(float("nan")), v_cache.fill_(float("nan")))
        where = {"block": block, "page_table": table}
        lengths = torch.zeros(batch, dtype=torch.int32)
        for new in counts:
            at = int(lengths[0])
            append(keys, values, whole_k[:, at : at + new], whole_v[:, at : at + new], lengths, group, **where)
            lengths += new
            # Sequences of different lengths: those of others end before, one perhaps before its first query.
            seen = lengths - torch.tensor([0, 1, 38], dtype=torch.int32)
            q = random(batch, new, heads, dim)
            out, lse = decode(q, keys, values, seen, group, return_lse=True, **where, **rules)
            expected, sums, *_ = flash_attn_with_kvcache(
                q, whole_k, whole_v, cache_seqlens=seen, causal=True, return_softmax_lse=True, **rules
            )
            distributed_cases.near("out", out, expected, 1e-5)
            assert torch.equal(lse.isinf(), sums.isinf())
            distributed_cases.near("lse", lse.masked_fill(lse.isinf(), 0), sums.masked_fill(sums.isinf(), 0), 1e-5)
            # The same on all ranks, bit for bit.
            every = [torch.empty_like(out) for _ in range(size)]
            dist.all_gather(every, out, group=group)
            assert all(torch.equal(out, it) for it in every)
    # Lengths that differ: the rows of each are those that it owns, and others stay what they are.
    lengths = torch.tensor([0, 5, 7], dtype=torch.int32)
    pages, table = in_pages(k_cache, 4, torch.Generator().manual_seed(rank))
    for paged, cache in ((False, k_cache), (True, pages)):
        cache.fill_(-1)
        tables = table if paged else None
        append(cache, cache.clone(), whole_k[:, :20], whole_v[:, :20], lengths, group, block=block, page_table=tables)
        expected = torch.full_like(cache, -1)
        for sequence in range(batch):
            rows = 0
            for position in range(int(lengths[sequence]) + 20):
                if position // block % size == rank:
                    place = (sequence, rows) if not paged else (int(table[sequence, rows // 4]), rows % 4)
                    if position >= lengths[sequence]:
                        expected[place] = whole_k[sequence, position - int(lengths[sequence])]
                    rows += 1
        assert torch.equal(cache, expected)


def pytorchs_context_parallel_runs_on_our_operators(group):
    """The operators are those that ``flashcore.torch.activate`` gives to CUDA. PyTorch has no context
    parallelism on the CPU, whose attention is another operator: that of CUDA is called here by name. And its
    ranks must divide half the length."""
    import flashcore.torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    library = torch.library.Library("aten", "IMPL")
    for name, ours in (
        ("_scaled_dot_product_flash_attention", flashcore.torch.heads_first),
        ("_scaled_dot_product_flash_attention_backward", flashcore.torch.heads_first_backward),
    ):
        library.impl(name, ours, "CPU", allow_override=True)

    def scaled_dot_product_attention(q, k, v, is_causal):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    mesh = DeviceMesh.from_group(group, "cpu")
    generator = torch.Generator().manual_seed(2)
    given = [torch.randn(2, 4, 48, 16, generator=generator) for _ in range(4)]
    whole = [it.clone().requires_grad_() for it in given[:3]]
    expected = flash_attn_func(*(it.transpose(1, 2) for it in whole), causal=True).transpose(1, 2)
    expected.backward(given[3])
    functional = torch.nn.functional
    before, functional.scaled_dot_product_attention = (
        functional.scaled_dot_product_attention,
        scaled_dot_product_attention,
    )
    try:
        parts = [it.clone() for it in given]
        with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 4):
            leaves = [it.clone().requires_grad_() for it in parts[:3]]
            out = functional.scaled_dot_product_attention(*leaves, is_causal=True)
            out.backward(parts[3])
            found = [out.detach(), *(it.grad for it in leaves)]
        found = context_parallel_unshard(mesh, found, [2] * 4)
    finally:
        functional.scaled_dot_product_attention = before
        library._destroy()
    for ours, theirs in zip(found, [expected, *(it.grad for it in whole)]):
        distributed_cases.near("gradient", ours, theirs, 2e-5)


BODIES = (
    whole_tensors_come_back,
    positions_are_those_of_own_rows,
    nobody_needs_to_have_anything,
    negated_tensors_are_what_they_stand_for,
    a_rank_whose_output_nobody_uses_gives_its_part,
    a_rank_that_uses_one_of_two_results_gives_its_part,
    decoding_over_a_spread_cache,
    pytorchs_context_parallel_runs_on_our_operators,
)


@functools.cache
def answers():
    return ranks.processes(world, 8)


@pytest.mark.parametrize("name", [*VARIANTS, *(body.__name__ for body in BODIES)])
@pytest.mark.parametrize("size", GROUPS)
def test_processes_find_what_one_does(size, name):
    for rank, errors in answers().items():
        assert isinstance(errors, dict), errors
        assert not errors.get((size, name)), f"process {rank}: {errors[size, name][0]}"


def failing(store, rank, size, how):
    """A rank is lost in the middle of a call; how long others wait, what they are told, and whether they
    can go on in a new group."""
    given = tensors(45, (8, 2))[:3]
    ranks.begin(store, rank, size, timeout=2)
    leaves = [shard(it).requires_grad_() for it in given]
    out = ring_attention(*leaves, causal=True, length=45)
    began = time.monotonic()
    try:
        if rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("a rank of its own accord")
        out.sum().backward()
        error = "nothing"
    except Exception as raised:
        error = type(raised).__name__
    waited = time.monotonic() - began
    dist.destroy_process_group()
    # Those who are left, or all.
    left = [it for it in range(size) if how == "raises" or it != 1]
    ranks.begin(store + "again", left.index(rank), len(left))
    out = ring_attention(*(shard(it) for it in given), causal=True, length=45)
    right = torch.allclose(unshard(out, length=45), flash_attn_func(*given, causal=True), atol=1e-5)
    dist.barrier()
    dist.destroy_process_group()
    return error, waited, right


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_lost_rank_is_an_error_for_the_others_and_a_new_group_works(how):
    left = [0, 2] if how == "killed" else [0, 1, 2]
    for rank, answer in ranks.processes(failing, 3, how, expected=left).items():
        assert isinstance(answer, tuple), answer
        error, waited, right = answer
        assert error == ("ArithmeticError" if rank == 1 else "RuntimeError"), (rank, error)
        assert waited < 2 + 5 and right, (rank, answer)


def test_threads_send_the_bytes_that_the_library_says():
    """And find the same: the transport within one process that a single GPU is tested with."""
    length, heads = 64, (8, 2)
    given = tensors(length, heads)
    for variant in VARIANTS:
        for rules in ({"causal": True}, {"window_size": (9, 4)}):
            nodes = 2 if variant == "hybrid" else 1
            left, right = rules.get("window_size", (None, 0))
            batch, sizes = given[0].shape[0], (*heads, 16, 24, 4)

            def work(transport):
                run = distributed_cases.spread_without_autograd
                found = run(transport, variant, length, given, rules, "contiguous", nodes)
                compared = distributed_cases.whole(length, given, rules)
                distributed_cases.compare(transport, length, found, compared, "contiguous", nodes, 2e-5)
                plan = plan_of(4, transport.rank, (length,), batch, (left, right), variant, nodes, "contiguous", sizes)
                expected = sum(plan.distribution.sent(transport.rank))
                if plan.nodes > 1:
                    # And log-sum-exps, which were asked for: of own heads, to the owners of rows.
                    (first, last), rows = plan.heads[plan.node][0], [plan.rows[it] for it in plan.peers]
                    expected += 4 * batch * (last - first) * (sum(rows) - rows[plan.node])
                    # And their gradients: of own rows, to those who have the other heads.
                    expected += 4 * batch * plan.rows[transport.rank] * (heads[0] - (last - first))
                return transport.sent_bytes, expected

            for sent, expected in ranks.threads(work, 4):
                assert sent == expected, (variant, rules)


@pytest.mark.parametrize("length", [70, [70]])
def test_more_parts_than_are_kept(length):
    """As many ranks as make the parts be put together more than once. Of one sequence, gradients of some keys
    come to where they are summed, and of a batch by way of a copy."""
    case = (length, (2, 1), {"causal": True}, "zigzag", 1)
    ranks.threads(lambda transport: check(transport, "ring", case), 35)


@pytest.mark.parametrize("kept", [3, 21, 30])
def test_gradients_are_summed_in_float32(kept):
    """Parts of some rows, as many as are kept and more. In 16 bits the sum would stay what it is at first."""
    gradient = Sum(torch.empty(1, 4, 1, 1, dtype=torch.bfloat16), kept)
    gradient.whole().fill_(256)
    for _ in range(20):
        for rows in gradient.rows([(0, 1), (2, 3)]):
            rows.fill_(1)
    assert gradient.finish().flatten().tolist() == [276, 256, 276, 256]


def test_wrong_calls_are_refused_by_name():
    transport = ranks.Thread(ranks.Mailbox(2), 0)
    q, k, v, _ = tensors(10, (4, 2), value_dim=16)

    def message(*given, **arguments):
        with pytest.raises((ValueError, TypeError)) as raised:
            context_parallel_attention(*given, transport, **arguments)
        return str(raised.value)

    assert "q has 10 rows, expected 5: those that rank 0 of 2 owns of sequences of 11" in message(q, k, v, length=11)
    assert "expected as many rows as q" in message(q, k[:, :4], v)
    assert 'variant is "star"' in message(q, k, v, variant="star")
    assert 'order is "random"' in message(q, k, v, order="random")
    assert "2 ranks do not divide into 3 nodes" in message(q, k, v, variant="hybrid", nodes=3)
    assert "1 heads cannot be spread over 2 ranks" in message(
        q[:, :, :1], k[:, :, :1], v[:, :, :1], variant="all_to_all"
    )
    assert "expected (own rows, heads, head dim)" in message(q, k, v, cu_seqlens=[0, 20])
    assert "expected cumulative lengths from 0 on" in message(q[0], k[0], v[0], cu_seqlens=[0, 20, 10])
    assert "q is torch.float64" in message(q.double(), k.double(), v.double())
    with pytest.raises(RuntimeError, match="init_process_group"):
        context_parallel_attention(q, k, v)


def test_decoding_sends_outputs_and_log_sum_exps_alone():
    size, batch, new, heads, dim = 3, 2, 5, 4, 16
    q, cache = torch.randn(batch, new, heads, dim), torch.randn(batch, 40, 2, dim)
    lengths = torch.tensor([9, 33], dtype=torch.int32)

    def work(transport):
        keys, values = torch.zeros(2, batch, 16, 2, dim)
        append(keys, values, cache, cache, torch.zeros_like(lengths), transport, block=8)
        assert transport.sent_bytes == 0
        out = decode(q, keys, values, lengths, transport, block=8)
        return transport.sent_bytes, out

    expected = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, causal=True)
    for sent, out in ranks.threads(work, size):
        assert sent == (size - 1) * 4 * batch * new * heads * (dim + 1)
        distributed_cases.near("out", out, expected, 1e-5)


SMALL = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
# Head dims of keys and values: with kernels, wide values, and no multiples of 8.
DIMS = ((16, 16), (16, 320), (60, 36), (15, 9))


def same_bits(found, expected):
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16, torch.float16, *SMALL], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *SMALL], ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_rows_are_stored_as_in_a_cache_of_one_rank(dims, dtype, rows):
    """Whatever the head dims and element types; copies of whole caches are not made, which would be told of."""
    size, batch, heads, new, block = 3, 2, 2, 11, 2
    k, v = (torch.randn(batch, new, heads, dim).mul(3).to(rows) for dim in dims)
    lengths = torch.zeros(batch, dtype=torch.int32)
    # As the append of one rank takes them.
    wide = rows if dtype in SMALL else dtype
    whole = [torch.zeros(batch, new, heads, dim).to(dtype) for dim in dims]
    if dtype in SMALL and rows in (*SMALL, torch.float32) and rows != dtype:
        wide = torch.float16
    q = torch.zeros(batch, 1, heads, dims[0], dtype=torch.bfloat16 if wide in SMALL else wide)
    flash_attn_with_kvcache(q, *whole, k.to(wide), v.to(wide), cache_seqlens=lengths)

    def work(transport):
        caches = [torch.zeros(batch, 4, heads, dim).to(dtype) for dim in dims]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            append(*caches, k, v, lengths, transport, block=block)
        own = [at for at in range(new) if at // block % size == transport.rank]
        return all(same_bits(cache[:, : len(own)], it[:, own]) for cache, it in zip(caches, whole))

    copied, _copies._told = _copies._told, set()
    try:
        assert all(ranks.threads(work, size))
    finally:
        _copies._told = copied


@pytest.mark.parametrize("dtypes", [(torch.int8, torch.bfloat16), (torch.float8_e4m3fn, torch.int8)], ids=str)
def test_caches_of_keys_and_values_may_have_different_types(dtypes):
    """Rows are rounded, not cut, and saturate."""
    k, v = torch.randn(2, 2, 7, 2, 16).mul(300).bfloat16()
    k[0, 0, 0, 0] = v[0, 0, 0, 0] = math.nan
    lengths = torch.zeros(2, dtype=torch.int32)
    whole, caches = ([torch.zeros(2, 7, 2, 16).to(dtype) for dtype in dtypes] for _ in range(2))
    flash_attn_with_kvcache(torch.zeros_like(k[:, :1]), *whole, k, v, cache_seqlens=lengths)
    append(*caches, k, v, lengths, ranks.Thread(ranks.Mailbox(1), 0))
    assert all(map(same_bits, caches, whole))


@pytest.mark.filterwarnings("ignore:head dim")
@pytest.mark.filterwarnings("ignore:values have")
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_decoding_with_any_head_dims(dims, new):
    batch, heads, length, size = 2, 4, 13, 3
    k, v = (torch.randn(batch, length, 2, dim) for dim in dims)
    q, lengths = torch.randn(batch, new, heads, dims[0]), torch.tensor([13, 9], dtype=torch.int32)

    def work(transport):
        caches = [torch.zeros(batch, 6, 2, dim) for dim in dims]
        append(*caches, k, v, torch.zeros_like(lengths), transport, block=2)
        return decode(q, *caches, lengths, transport, block=2)

    expected = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)
    for found in ranks.threads(work, size):
        distributed_cases.near("out", found, expected, 1e-5)


def test_one_position_needs_no_list_of_positions(monkeypatch):
    """On a GPU each would be a launch in every step."""
    q, cache = torch.randn(2, 1, 4, 16), torch.randn(2, 8, 2, 16)
    lengths = torch.tensor([8, 5], dtype=torch.int32)
    expected = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths)
    monkeypatch.delattr(torch, "arange")
    found = decode(q, cache, cache, lengths, ranks.Thread(ranks.Mailbox(1), 0))
    distributed_cases.near("out", found, expected, 1e-5)


def test_rows_may_require_gradients_which_end_in_the_cache():
    k, v = torch.randn(2, 2, 6, 2, 16, requires_grad=True)
    caches = torch.zeros(2, 2, 6, 2, 16)
    append(*caches, k, v, torch.zeros(2, dtype=torch.int32), ranks.Thread(ranks.Mailbox(1), 0))
    assert torch.equal(caches[0], k) and torch.equal(caches[1], v)
    assert not caches.requires_grad


def described(tensor):
    """A tensor as it would be on a GPU."""
    if tensor is None:
        return None
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride()), 256


def planned(monkeypatch, *given, **arguments):
    """The launches on an H200 of an append."""
    launches = []
    here = _cache._append

    def append_there(tensors, flags):
        launches.append(_flashcore.append_plan_for(tuple(map(described, tensors)), flags, "h200"))
        return here(tensors, flags)

    monkeypatch.setattr(_cache, "_append", append_there)
    append(*given, **arguments)
    monkeypatch.setattr(_cache, "_append", here)
    return launches


@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16, torch.float16, *SMALL], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, *SMALL], ids=str)
@pytest.mark.parametrize("dims", DIMS[:3], ids=str)
def test_a_gpu_has_a_kernel_for_every_cache(monkeypatch, dims, dtype, rows):
    caches = [torch.zeros(2, 6, 2, dim).to(dtype) for dim in dims]
    k, v = (torch.zeros(2, 6, 2, dim).to(rows) for dim in dims)
    lengths = torch.zeros(2, dtype=torch.int32)
    ((name, _),) = planned(monkeypatch, *caches, k, v, lengths, ranks.Thread(ranks.Mailbox(1), 0))
    assert name.startswith("append")


def test_the_grid_grows_with_the_new_rows_alone(monkeypatch):
    """As many warps as a rank can get rows, whatever the room: not their square."""
    for batch, new, block, size in ((1, 1, 64, 1), (64, 1, 64, 4), (64, 100, 16, 4), (3, 7, 2, 2)):
        cache = torch.zeros(batch, 256, 2, 16, dtype=torch.bfloat16)
        rows = torch.zeros(batch, new, 2, 16, dtype=torch.bfloat16)
        lengths = torch.zeros(batch, dtype=torch.int32)
        transport = ranks.Thread(ranks.Mailbox(size), 0)
        ((_, blocks),) = planned(monkeypatch, cache, cache.clone(), rows, rows, lengths, transport, block=block)
        most = sum(min(block, new - at) for at in range(0, new, block * size))
        assert blocks == -(-batch * most * 2 // 4)


CACHE, ROWS, TABLE = (2, 5, 2, 16), (2, 6, 2, 16), torch.zeros(2, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    "call, words, arguments",
    [
        (append, "block=0, expected one position at least", {"block": 0}),
        (append, r"k_cache has shape \[5, 2, 16\], expected", {"k_cache": torch.zeros(5, 2, 16)}),
        (append, "cache_seqlens is 3, expected a tensor of 2 lengths", {"cache_seqlens": 3}),
        (
            decode,
            r"cache_seqlens is .* of shape \[2\], expected a tensor of 4 lengths",
            {"page_table": TABLE.repeat(2, 1)},
        ),
        (decode, "page_table is .*, expected int32 of shape", {"page_table": TABLE.float()}),
        (decode, r"q has shape \[2, 0, 4, 16\], expected .* of 2 sequences", {"q": torch.zeros(2, 0, 4, 16)}),
        (decode, r"q has shape \[3, 1, 4, 16\], expected .* of 2 sequences", {"q": torch.zeros(3, 1, 4, 16)}),
        (decode, "s_aux is torch.float32 of shape .*, expected a tensor of 4 numbers", {"s_aux": torch.zeros(3)}),
        (decode, "attention_chunk=-1, expected no negative number", {"attention_chunk": -1}),
        (append, r"k has shape \[6, 2, 16\] and v .* expected rows of 2 sequences", {"k": torch.zeros(ROWS[1:])}),
        (append, r"k has shape \[2, 6, 2, 16\] and v \[2, 5", {"v": torch.zeros(CACHE)}),
        (append, "k_cache has room for 5 rows, expected 6", {}),
        (append, "k_cache has room for 10 rows, expected 11", {"page_table": TABLE, "cache_seqlens": TABLE[0] + 5}),
    ],
)
def test_wrong_caches_are_refused_by_name(call, words, arguments):
    given = {"k_cache": torch.zeros(CACHE), "v_cache": torch.zeros(CACHE), "cache_seqlens": TABLE[0]}
    if call is append:
        given |= {"k": torch.zeros(ROWS), "v": torch.zeros(ROWS)}
    else:
        given |= {"q": torch.zeros(2, 1, 4, 16)}
    with pytest.raises(ValueError, match=words):
        call(**given | arguments, group=ranks.Thread(ranks.Mailbox(1), 0))
