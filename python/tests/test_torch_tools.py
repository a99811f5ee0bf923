"""What PyTorch has around its operators: counters, transforms, checkpoints, graphs of any lengths."""

import pytest

torch = pytest.importorskip("torch")

from conftest import devices
from flashcore import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flex_attention,
    scaled_dot_product_attention,
)
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

every_device = pytest.mark.parametrize("device", devices())


def random(*shape, device="cpu", dtype=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def three(device="cpu", queries=7, keys=9, heads=4, key_heads=2, dim=16, value_dim=24):
    """Queries, keys and values of two sequences, which require grad."""
    shapes = (queries, heads, dim), (keys, key_heads, dim), (keys, key_heads, value_dim)
    return [random(2, *shape, device=device, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def heads_first(*tensors):
    return [tensor.transpose(1, 2) for tensor in tensors]


# ---- operations that are counted -----------------------------------------------------------------------


def counted(call):
    """What a call counts forward, and backward if it has gradients."""
    found = []
    with FlopCounterMode(display=False) as counter:
        out = call()
        found.append(counter.get_total_flops())
        if out.requires_grad:
            out.sum().backward()
            found.append(counter.get_total_flops() - found[0])
    return found


def flops(*shapes):
    """What PyTorch counts for its own attention: (batch, heads, queries, keys, head dim, value head dim) of each."""
    found = []
    for batch, heads, queries, keys, dim, value_dim in shapes:
        q, k, v = (batch, heads, queries, dim), (batch, heads, keys, dim), (batch, heads, keys, value_dim)
        found.append((sdpa_flop_count(q, k, v), sdpa_backward_flop_count((*q[:3], value_dim), q, k, v)))
    return [sum(column) for column in zip(*found)]


@every_device
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 0), "softcap": 5.0}], ids=str)
def test_operations_are_counted_as_those_of_pytorchs_attention(options, device):
    q, k, v = three(device)
    assert counted(lambda: flash_attn_func(q, k, v, **options)) == flops((2, 4, 7, 9, 16, 24))
    packed = torch.stack([k, k], 2)
    assert counted(lambda: flash_attn_kvpacked_func(q, packed, **options)) == flops((2, 4, 7, 9, 16, 16))
    with torch.no_grad():
        assert counted(lambda: flash_attn_func(q, k, v, **options)) == flops((2, 4, 7, 9, 16, 24))[:1]


@every_device
def test_operations_with_heads_first_are_counted(device):
    tensors = heads_first(*three(device))
    expected = flops((2, 4, 7, 9, 16, 24))
    mask = random(7, 9, device=device)
    for call in (
        lambda: scaled_dot_product_attention(*tensors, enable_gqa=True),
        lambda: scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True, deterministic=True),
        lambda: scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True),
        lambda: flex_attention(*tensors, lambda score, b, h, i, j: score + i - j, enable_gqa=True),
    ):
        assert counted(call) == expected


@every_device
def test_operations_of_sequences_are_counted_by_their_lengths(device):
    q, k, v = (x.detach().flatten(0, 1) for x in three(device))
    of_q, of_k, used = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 3, 14], [0, 18, 18], [5, 0]))
    call = lambda **rest: flash_attn_varlen_func(q, k, v, of_q, of_k, 11, 18, **rest)
    assert counted(call) == flops((1, 4, 3, 18, 16, 24), (1, 4, 11, 0, 16, 24))[:1]
    assert counted(lambda: call(seqused_k=used)) == flops((1, 4, 3, 5, 16, 24))[:1]
    pages, table = random(6, 8, 2, 16, device=device), torch.zeros(2, 3, dtype=torch.int32, device=device)
    paged = lambda lengths: flash_attn_with_kvcache(
        random(2, 1, 4, 16, device=device), pages, pages, cache_seqlens=lengths, page_table=table
    )
    assert counted(lambda: paged(used)) == flops((1, 4, 1, 5, 16, 16))[:1]
    # Lengths of no contents are the longest that there may be.
    meta = [x.to("meta") for x in (q, k, v, of_q, of_k)]
    assert counted(lambda: flash_attn_varlen_func(*meta, 11, 18)) == flops((2, 4, 11, 18, 16, 24))[:1]
