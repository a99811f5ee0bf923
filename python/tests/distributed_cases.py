"""Cases of attention over a spread sequence: whole tensors, and what each rank must find of them."""

import itertools

import torch
from flashcore import flash_attn_func, flash_attn_varlen_func
from flashcore.distributed import _attention, _prepared, context_parallel_attention, shard

VARIANTS = ("ring", "all_gather", "all_to_all", "hybrid")
MASKS = ({}, {"causal": True}, {"window_size": (9, 4)}, {"causal": True, "window_size": (13, -1)})
# Uneven, shorter than the ranks, longer; those in lists are sequences one after the other.
LENGTHS = (45, 64, [17, 0, 40, 3], [1, 29, 30])
# Heads and key heads: grouped, one for all, groups that ranks divide.
HEADS = ((8, 2), (8, 8), (8, 1), (12, 4))


def cases(size, variant):
    """Each mask with each order, of which eight ranks take one; lengths, heads and scores in turn."""
    for index, (mask, order) in enumerate(itertools.product(MASKS, ("zigzag", "contiguous"))):
        if size == 8 and (index + index // 2 + VARIANTS.index(variant)) % 2:
            continue
        index += size + VARIANTS.index(variant)
        scores = {"softcap": 3.0, "softmax_scale": 0.3} if index % 3 == 0 else {}
        nodes = {2: 2, 3: 1, 4: 2, 8: 4 if index % 2 else 2}[size] if variant == "hybrid" else 1
        # Every length meets every mask and both orders over the sizes and variants.
        length = LENGTHS[(index + index // 4) % 4]
        yield length, HEADS[index // 2 % 4], {**mask, **scores}, order, nodes
    # One sequence that all ranks have as much of: keys come to their places.
    yield [4 * size], HEADS[0], {"causal": True}, "zigzag", 1


def tensors(length, heads, dtype=torch.float32, device="cpu", seed=0, dim=16, value_dim=24):
    """Queries, keys, values and a gradient of the output of whole sequences."""
    generator = torch.Generator().manual_seed(seed)
    first = (2, length) if isinstance(length, int) else (sum(length),)
    sizes = (heads[0], dim), (heads[1], dim), (heads[1], value_dim), (heads[0], value_dim)
    made = [torch.randn(*first, *size, generator=generator) for size in sizes]
    return [it.to(device=device, dtype=dtype) for it in made]


def starts(lengths):
    return [0, *itertools.accumulate(lengths)]


def whole(length, given, rules, dlse=None):
    """Output, log-sum-exps and gradients by one process."""
    *leaves, dout = given
    dlse = of_sums(dout) if dlse is None else dlse
    leaves = [it.clone().requires_grad_() for it in leaves]
    if isinstance(length, int):
        out, lse, _ = flash_attn_func(*leaves, **rules, return_attn_probs=True)
    else:
        lists = torch.tensor(starts(length), dtype=torch.int32, device=dout.device)
        most = max(length)
        out, lse = flash_attn_varlen_func(
            *leaves, lists, lists, max_seqlen_q=most, max_seqlen_k=most, **rules, return_attn_probs=True
        )[:2]
    torch.autograd.backward((out, lse), (dout, dlse))
    return [out.detach(), *(it.grad for it in leaves)], lse.detach()


def of_sums(dout):
    """A gradient of log-sum-exps, made of that of the output so that rows that are shared out have theirs."""
    return dout.float().mean(-1).transpose(-1, -2)


def layout(length):
    """How a length is said to functions."""
    return {"length": length} if isinstance(length, int) else {"cu_seqlens": starts(length)}


def spread(group, variant, length, given, rules, order, nodes):
    """The same of this rank's rows, by all of them."""
    *leaves, dout = _own_rows(group, length, given, order, nodes)
    leaves = [it.clone().requires_grad_() for it in leaves]
    where = {"order": order, "nodes": nodes, **layout(length)}
    out, lse = context_parallel_attention(*leaves, group, variant=variant, return_lse=True, **where, **rules)
    torch.autograd.backward((out, lse), (dout, of_sums(dout)))
    return [out.detach(), *(it.grad for it in leaves)], lse.detach()


def spread_without_autograd(group, variant, length, given, rules, order, nodes):
    """The same where PyTorch has one thread for the backward passes of a device, in which ranks that are
    threads would wait for each other forever."""
    *tensors, dout = _own_rows(group, length, given, order, nodes)
    mask = rules.get("causal", False), rules.get("window_size", (-1, -1))
    where = (layout(length).get("cu_seqlens"), layout(length).get("length"), order, nodes)
    rest = (rules.get("softmax_scale"), rules.get("softcap", 0.0), False, True)
    *tensors, call = _prepared(*tensors, group, variant, mask, where, rest)
    packed = not isinstance(length, int)
    out, lse, saved = _attention.forward(*tensors, call)
    dout = dout.unsqueeze(0) if packed else dout
    gradients = _attention.backward(dout, of_sums(dout), saved, call)
    found = [out, *gradients]
    return ([it[0] for it in found], lse[0]) if packed else (found, lse)


def _own_rows(group, length, given, order, nodes):
    lists = {} if isinstance(length, int) else {"cu_seqlens": starts(length)}
    return [shard(it, group, **lists, order=order, nodes=nodes) for it in given]


def compare(group, length, found, expected, order, nodes, tolerance):
    """Raises where this rank's rows are not those of the whole."""
    where = {"order": order, "nodes": nodes}
    if not isinstance(length, int):
        where["cu_seqlens"] = starts(length)
    (found, lse), (expected, sums) = found, expected
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), found, expected):
        near(name, ours, shard(theirs, group, **where), tolerance)
    near("lse", lse.transpose(-1, -2), shard(sums.transpose(-1, -2), group, **where), 1e-5)


def near(name, found, expected, tolerance):
    assert found.shape == expected.shape, f"{name}: {found.shape}, expected {expected.shape}"
    if expected.numel():
        worst = float((found.float() - expected.float()).abs().max())
        largest = float(expected.float().abs().max())
        assert worst <= tolerance * max(largest, 1.0), f"{name} is off by {worst}"


def check(group, variant, case, dtype=torch.float32, device="cpu", tolerance=2e-5):
    length, heads, rules, order, nodes = case
    given = tensors(length, heads, dtype, device)
    found = spread(group, variant, length, given, rules, order, nodes)
    compare(group, length, found, whole(length, given, rules), order, nodes, tolerance)
