"""Masks and scores as functions, against the same functions over whole tensors in float64."""

import functools
import math
import operator
import random
import sys
import threading
import time
import types

import pytest

torch = pytest.importorskip("torch")

import flashcore
from conftest import devices
from flashcore import _trace, and_masks, create_block_mask, flex_attention, or_masks, scaled_dot_product_attention

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 4, 37, 45, 16
DEVICES = pytest.mark.parametrize("device", devices())


def tensors(device, batch=BATCH, heads=HEADS, queries=QUERIES, keys=KEYS, dim=DIM, key_heads=None):
    """Queries, keys and values: on a GPU in the type of its fast kernels."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(batch, heads, queries, dim)] + 2 * [(batch, key_heads or heads, keys, dim)]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return [torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes]


def expected(q, k, v, mask=None, score=None, scale=None):
    """Output and log-sum-exps; rows that see nothing are zero."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if score is not None:
        scores = everywhere(lambda *at: score(*at).double(), scores)
    if mask is not None:
        scores = scores.masked_fill(
            ~everywhere(lambda score, *at: torch.as_tensor(mask(*at)).to(q.device), scores), -math.inf
        )
    lse = scores.logsumexp(-1)
    return torch.where(lse[..., None] == -math.inf, 0.0, (scores - lse[..., None]).exp()) @ v, lse


def everywhere(score, scores):
    """A function over all scores, as PyTorch itself maps it."""
    at = [torch.arange(size, device=scores.device) for size in scores.shape]
    for axis in (4, 3, 2, 1):
        score = torch.vmap(score, in_dims=(0, *(0 if axis == it else None for it in (1, 2, 3, 4))))
    return score(scores, *at)


def check(q, k, v, mask=None, score=None, scale=None):
    block_mask = None if mask is None else create_block_mask(mask, None, None, q.shape[2], k.shape[2])
    grouped = q.shape[1] != k.shape[1]
    with torch.no_grad():
        out, lse = flex_attention(q, k, v, score, block_mask, scale, grouped, return_lse=True)
    near((out, lse), expected(q, k, v, mask, score, scale), q.dtype)
    return out


def near(found, exact, dtype):
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for mine, truth in zip(found, exact):
        torch.testing.assert_close(mine.double(), truth, rtol=tolerance, atol=tolerance)


# ---- rules -------------------------------------------------------------------------------------------


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def rules(device):
    """The ready-made masks and scores, each as a user would write it."""
    integers = lambda *values: torch.tensor(values, device=device)
    generator = torch.Generator().manual_seed(5)
    floats = lambda *shape: torch.randn(*shape, generator=generator).to(device)
    ids = torch.arange(KEYS, device=device)[None] // integers(11, 17)[:, None]
    tree = integers(0b1, 0b11, 0b101, 0b1011, 0b10011).repeat(8)[:QUERIES]
    keep = floats(BATCH, KEYS) > 0
    slopes = torch.exp2(-2.0 * (torch.arange(HEADS, device=device) + 1))
    bias, shared, buckets = (
        floats(HEADS, QUERIES, KEYS),
        floats(1, 1, KEYS).expand(BATCH, QUERIES, KEYS),
        floats(16, HEADS),
    )
    temperatures, warm, half = (
        floats(HEADS).abs() + 0.5,
        torch.tensor(1.7, device=device),
        floats(BATCH, KEYS).bfloat16(),
    )
    offset, window, prefix = KEYS - QUERIES, 9, 12

    def sliding(b, h, q_idx, kv_idx):
        apart = q_idx + offset - kv_idx
        return (apart >= 0) & (apart < window)

    def prefix_lm(b, h, q_idx, kv_idx):
        return (kv_idx < prefix) | (kv_idx <= q_idx)

    def documents(b, h, q_idx, kv_idx):
        return causal(b, h, q_idx, kv_idx) & (ids[b, q_idx] == ids[b, kv_idx])

    def chunked(b, h, q_idx, kv_idx):
        return (q_idx // 8 == kv_idx // 8) & (q_idx >= kv_idx)

    def dilated(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx) % 3 == 0

    def speculated(b, h, q_idx, kv_idx):
        return (kv_idx < offset) | ((tree[q_idx] >> torch.clamp(kv_idx - offset, 0, 31)) & 1 == 1) & (
            kv_idx < offset + 5
        )

    def padding(b, h, q_idx, kv_idx):
        return keep[b, kv_idx]

    def t5(score, b, h, q_idx, kv_idx):
        apart = torch.abs(q_idx - kv_idx)
        far = 8 + (torch.log(apart.float() / 8.0 + 1e-6) / math.log(16.0) * 8.0).to(torch.int32)
        return score + buckets[torch.where(apart < 8, apart, torch.minimum(far, torch.full_like(far, 15))), h]

    def alibi(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * torch.abs(q_idx - kv_idx)

    def softcap(score, b, h, q_idx, kv_idx):
        return 2.0 * torch.tanh(score / 2.0)

    def biased(score, b, h, q_idx, kv_idx):
        return score + bias[h][q_idx, kv_idx] + shared[b, q_idx, kv_idx]

    def tempered(score, b, h, q_idx, kv_idx):
        return score / temperatures[h] * warm

    def halved(score, b, h, q_idx, kv_idx):
        return torch.where(kv_idx % 2 == 0, score + half[b, kv_idx], score * 0.5)

    masks = (causal, sliding, prefix_lm, documents, chunked, dilated, speculated, padding)
    scores = (t5, alibi, softcap, biased, tempered, halved)
    return {it.__name__: (it, None) for it in masks} | {it.__name__: (causal, it) for it in scores}


@DEVICES
@pytest.mark.parametrize("name", rules("cpu"))
def test_ready_made_rules(name, device):
    check(*tensors(device), *rules(device)[name])


@DEVICES
def test_fewer_key_heads_a_scale_and_no_rules(device):
    q, k, v = tensors(device, key_heads=2)
    check(q, k, v, causal, None, 0.3)
    near([flex_attention(q, k, v, enable_gqa=True)], expected(q, k, v), q.dtype)
    with pytest.raises(ValueError, match="enable_gqa"):
        flex_attention(q, k, v)


@DEVICES
def test_a_row_that_sees_nothing_is_zero(device):
    q, k, v = tensors(device)
    out = check(q, k, v, lambda b, h, q_idx, kv_idx: q_idx + kv_idx < 20)
    assert out[:, :, 20:].abs().max() == 0
    # Minus infinity as a score hides as a mask does.
    hidden = lambda score, b, h, q_idx, kv_idx: torch.where(q_idx + kv_idx < 20, score, -math.inf)
    assert torch.equal(flex_attention(q, k, v, score_mod=hidden), out)


# ---- compositions ------------------------------------------------------------------------------------


def random_integer(chance, depth, at):
    if depth == 0 or chance.random() < 0.2:
        return chance.choice([*at, chance.randint(-5, 40)])
    a, b = random_integer(chance, depth - 1, at), random_integer(chance, depth - 1, at)
    divisor = chance.randint(1, 9)
    return chance.choice(
        [
            lambda: a + b,
            lambda: a - b,
            lambda: 3 * a - b * 2,
            lambda: a // divisor,
            lambda: a % divisor,
            lambda: -a,
            lambda: abs(a),
            lambda: (a & 7) ^ b,
        ]
    )()


def random_truth(chance, depth, at):
    if depth == 0:
        a, b = random_integer(chance, 2, at), random_integer(chance, 2, at)
        if isinstance(a, int) and isinstance(b, int):
            a = at[chance.randrange(4)] - a
        compare = chance.choice(["__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"])
        return getattr(b if isinstance(a, int) else a, compare)(a if isinstance(a, int) else b)
    a, b = random_truth(chance, depth - 1, at), random_truth(chance, depth - 1, at)
    return chance.choice([lambda: a & b, lambda: a | b, lambda: a ^ b, lambda: ~a, lambda: torch.logical_and(a, ~b)])()


def random_score(chance, depth, score, at):
    if depth == 0:
        return chance.choice([lambda: score, lambda: score * 0.5, lambda: score + random_integer(chance, 1, at) / 16])()
    a, b = random_score(chance, depth - 1, score, at), random_score(chance, depth - 1, score, at)
    return chance.choice(
        [
            lambda: torch.tanh(a) + b,
            lambda: torch.maximum(a, b),
            lambda: a - torch.exp(-torch.abs(b)),
            lambda: torch.where(random_truth(chance, 1, at), a, b),
            lambda: torch.clamp(a, -3.0, 3.0) * 0.5,
            lambda: torch.sigmoid(a) * torch.sqrt(torch.abs(b) + 1),
        ]
    )()


@DEVICES
def test_random_compositions(device):
    q, k, v = tensors(device, 2, 2, 9, 11, 8)
    for seed in range(60 if device == "cpu" else 200):
        # The same choices for the trace and for whole tensors.
        mask = lambda *at: random_truth(random.Random(seed), 2, at)
        score = lambda score, *at: random_score(random.Random(seed), 2, score, at)
        try:
            check(q, k, v, mask, score)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {create_block_mask(mask, None, None, 9, 11)}") from error


@DEVICES
def test_masks_go_together(device):
    q, k, v = tensors(device)
    near_by = lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) < 6
    first = lambda b, h, q_idx, kv_idx: kv_idx < 3
    mask = or_masks(and_masks(causal, near_by), first)
    found = check(q, k, v, lambda b, h, i, j: ((i >= j) & (abs(i - j) < 6)) | (j < 3))
    block_mask = create_block_mask(mask, BATCH, HEADS, QUERIES, KEYS)
    assert torch.equal(flex_attention(q, k, v, block_mask=block_mask), found)
    with pytest.raises(TypeError, match="a mask is a"):
        and_masks(causal, 3)


def operations():
    i, j = "q_idx", "kv_idx"
    of = lambda text: eval(f"lambda score, b, h, {i}, {j}: {text}", {"torch": torch, "math": math})
    return [
        of(text)
        for text in (
            "score + (q_idx * 2 - kv_idx) / 7",
            "7 / (1 + q_idx) - score",
            "score * 2 ** (-kv_idx.float() / 8)",
            "score ** 2 - (q_idx ** 2) * 0.001",
            "score + torch.floor(kv_idx / 4.0) - torch.ceil(-score) + torch.trunc(score)",
            "score % 1.5 + (q_idx.float() - 20.0) // 3.0 * 0.1",
            "score + torch.sign(q_idx - kv_idx) * 0.3 + torch.relu(score)",
            "score + (q_idx > kv_idx) * 0.5 + (q_idx == kv_idx).float()",
            "score + ((1 << (kv_idx & 3)) | (q_idx >> 2)) * 0.05",
            "torch.where((q_idx > 3) == (kv_idx > 3), score, score.clamp(min=0.1))",
            "torch.where(torch.logical_not(q_idx > 9), torch.zeros_like(score), torch.log2(torch.abs(score) + 1))",
            "score + torch.exp2(-torch.square(score)) - torch.log(torch.abs(score) + 2)",
            "score + torch.rsqrt(1 + torch.abs(score)) + torch.reciprocal(2 + q_idx) + torch.maximum(score, -score)",
            "torch.add(score, kv_idx, alpha=0.01) - torch.div(kv_idx, 4, rounding_mode='floor') * 0.1",
            "score.to(torch.float32) + q_idx.to(torch.bool).to(torch.int32) * math.pi / 10",
            "+score + ~q_idx * 0.01 + (~(q_idx > 4)) * 0.2 + (h & b)",
            "score**0 + score**9 * 0.1 + (2 + score.abs())**-1 - (score - 4)**-3",
            "score * (-1.0)**q_idx + score**(kv_idx % 4) + torch.pow(-0.5, kv_idx.float())",
            "score + 0.0**kv_idx.float() + (q_idx - kv_idx)**0 + ((q_idx - kv_idx) % 3)**11 * 0.001",
        )
    ]


@DEVICES
@pytest.mark.parametrize("score", operations(), ids=range(len(operations())))
def test_operations(score, device):
    check(*tensors(device, 2, 3, 9, 11, 8), None, score)


@DEVICES
def test_indices_of_tensors(device):
    table = torch.randn(3, 2, 11, device=device)
    near_zero = torch.randn(23, device=device)
    which = torch.tensor([1, 0], device=device)

    def partly(score, b, h, q_idx, kv_idx):
        row = table[h]
        return score + row[b, kv_idx] + table[-1, ..., kv_idx][b] + table[0][1][kv_idx] + table[:, which[b], kv_idx][h]

    def negative(score, b, h, q_idx, kv_idx):
        # As in PyTorch, from the end.
        return score + near_zero[q_idx - kv_idx]

    for score in (partly, negative):
        check(*tensors(device, 2, 3, 9, 11, 8), None, score)


# ---- traces are kept ---------------------------------------------------------------------------------


@pytest.fixture
def traces(monkeypatch):
    """How often functions are called, where no trace of another test is kept."""
    monkeypatch.setattr(_trace, "_traces", {})
    count = types.SimpleNamespace(of=0)
    run = _trace.Trace.run

    def counted(self):
        count.of += 1
        return run(self)

    monkeypatch.setattr(_trace.Trace, "run", counted)
    return count


@DEVICES
def test_what_changes_in_a_tensor_needs_no_new_trace(device, traces):
    q, k, v = tensors(device)
    bias, scale = torch.randn(KEYS, device=device), torch.tensor(1.0, device=device)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * scale + bias[kv_idx]

    check(q, k, v, None, score_mod)
    assert traces.of == 1
    bias.mul_(-2.0), scale.fill_(0.25)
    second = check(q, k, v, None, score_mod)
    # Another tensor in its place, and another function of the same code.
    bias = torch.randn(KEYS, device=device)
    third = check(q, k, v, None, score_mod)
    assert traces.of == 1 and not torch.equal(second, third)
    bias = torch.randn(KEYS, device=device).bfloat16()
    check(q, k, v, None, score_mod)
    assert traces.of == 2


def test_what_changes_otherwise_needs_one(traces):
    q, k, v = tensors("cpu")
    config, listed = types.SimpleNamespace(width=3), [5]

    def made(width):
        return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < width

    first = check(q, k, v, made(3))
    assert traces.of == 1
    assert torch.equal(check(q, k, v, made(3)), first) and traces.of == 1
    assert not torch.equal(check(q, k, v, made(4)), first) and traces.of == 2
    # 3.0 and True are equal to other numbers, and are others.
    check(q, k, v, None, lambda score, b, h, q_idx, kv_idx, add=1: score + (add & q_idx))
    before = traces.of
    for mask in (
        lambda b, h, q_idx, kv_idx: q_idx - kv_idx < config.width,
        lambda b, h, q_idx, kv_idx: q_idx - kv_idx < listed[0],
    ):
        check(q, k, v, mask)
        config.width, listed[0] = config.width + 3, listed[0] + 3
        check(q, k, v, mask)
    assert traces.of >= before + 4


def test_contents_that_a_function_reads_are_read_each_time():
    q, k, v = tensors("cpu")
    width, table = torch.tensor(4), torch.randn(2, KEYS)
    mask = lambda b, h, q_idx, kv_idx: q_idx - kv_idx < width.item()
    derived = lambda score, b, h, q_idx, kv_idx: score + (table * 2)[0, kv_idx]
    check(q, k, v, mask, derived)
    width.fill_(9), table.normal_()
    check(q, k, v, mask, derived)


def test_functions_in_another_order_are_others(traces):
    """What is there twice is known by which one it is."""
    q, k, v = tensors("cpu")
    add, double = lambda s: s + 1.0, lambda s: s * 2.0

    def chained(*steps):
        return lambda score, b, h, i, j: steps[2](steps[1](steps[0](score * (1 + j))))

    for steps in ((add, double, add), (add, double, double), (add, add, double), (double, double, double)):
        check(q, k, v, None, chained(*steps))
    # So are lists.
    first, second = [0.5], [0.5]
    listed = lambda one, other: lambda score, b, h, i, j: score * (2.0 if one is other else 3.0) * (1 + j)
    check(q, k, v, None, listed(first, first))
    check(q, k, v, None, listed(first, second))
    assert traces.of == 6


def test_attributes_that_a_function_reads_are_read_each_time(traces):
    q, k, v = tensors("cpu")
    bias = torch.randn(KEYS)
    helper = lambda score: score

    def scored(score, b, h, i, j):
        return score * scored.alpha + helper.beta * bias[j] * bias.gamma

    for alpha, beta, gamma in ((1.0, 2.0, 1.0), (3.0, 2.0, 1.0), (3.0, 1.0, 1.0), (3.0, 1.0, -1.0)):
        scored.alpha, helper.beta, bias.gamma = alpha, beta, gamma
        check(q, k, v, None, scored)
    assert traces.of == 4
    # What nobody reads does no harm.
    other = torch.nn.Parameter(bias)
    plain = lambda score, b, h, i, j: helper(score) + other[j]
    plain.__wrapped__ = scored
    for other.noted in (True, False):
        with torch.no_grad():
            check(q, k, v, None, plain)
    assert traces.of == 5


def test_masks_that_libraries_put_together_are_looked_into(traces):
    """PyTorch's own functions that make functions close over those of the caller."""
    from torch.nn.attention.flex_attention import and_masks, or_masks

    q, k, v = tensors("cpu")
    for together in (and_masks, or_masks):
        for width in (3, 9):
            near_by = lambda b, h, i, j, width=width: abs(i - j) < width
            seen = lambda *at: causal(*at) & near_by(*at) if together is and_masks else causal(*at) | near_by(*at)
            for _ in range(3):
                near(
                    [
                        flex_attention(
                            q, k, v, block_mask=create_block_mask(together(causal, near_by), 1, 1, QUERIES, KEYS)
                        )
                    ],
                    expected(q, k, v, seen),
                    q.dtype,
                )
    assert traces.of == 4
    # A decorator gives the name of a library's module.
    amount = 1.0
    named = lambda score, b, h, i, j: score * amount * (1 + j)
    named.__module__ = "torch"
    first = flex_attention(q, k, v, named)
    amount = -1.0
    assert not torch.equal(flex_attention(q, k, v, named), first)


def test_methods_of_objects_are_called_each_time():
    q, k, v = tensors("cpu")
    settings, numbers, table = {"a": 1}, [1], torch.zeros(1)
    for get, change in (
        (functools.partial(settings.get, "a"), lambda: settings.update(a=5)),
        (functools.partial(numbers.__getitem__, 0), lambda: numbers.__setitem__(0, 5)),
        (table.numel, lambda: table.resize_(5)),
    ):
        mask = lambda b, h, i, j: i - j < get()
        first = flex_attention(q, k, v, block_mask=create_block_mask(mask, None, None, QUERIES, KEYS))
        change()
        second = flex_attention(q, k, v, block_mask=create_block_mask(mask, None, None, QUERIES, KEYS))
        assert not torch.equal(first, second)


def test_what_a_function_imports_or_looks_up_is_looked_up_each_time(monkeypatch):
    numpy = pytest.importorskip("numpy")
    q, k, v = tensors("cpu")
    module = types.ModuleType("module_of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(globals(), "_amount", 1.0)
    settings = types.SimpleNamespace()

    def imported():
        import module_of_a_test

        return module_of_a_test.amount

    def imported_from():
        from module_of_a_test import amount

        return amount

    lookups = {
        "import": imported,
        "from": imported_from,
        "globals": lambda: globals()["_amount"],
        "eval": lambda: eval("_amount"),
        "getattr": lambda: getattr(imported, "amount"),
        "vars": lambda: vars(imported)["amount"],
        "__dict__": lambda: imported.__dict__["amount"],
        "__globals__": lambda: imported.__globals__["_amount"],
        "random": lambda: float(numpy.random.random()),
        "attrgetter": lambda: operator.attrgetter("amount")(imported),
    }
    for name, amount in lookups.items():
        results = []
        for value in (1.0, 3.0):
            module.amount = imported.amount = settings.amount = value
            monkeypatch.setitem(globals(), "_amount", value)
            results.append(flex_attention(q, k, v, lambda s, b, h, i, j: s * (1 + j) * amount()))
        assert not torch.equal(*results), name


def test_what_a_function_writes_is_written_each_time(monkeypatch):
    q, k, v = tensors("cpu")
    calls, listed = 0, [0]

    def counted(score, b, h, i, j):
        nonlocal calls
        calls = 1
        return score

    def noted(score, b, h, i, j):
        listed[0] = 1
        return score

    for _ in range(3):
        calls, listed[0] = 0, 0
        flex_attention(q, k, v, counted), flex_attention(q, k, v, noted)
        assert calls == listed[0] == 1


def test_values_go_to_any_device():
    def scored(score, b, h, i, j):
        return score + j.to(score.device).to("cpu", torch.float32) * 0.1 - i.to(score).to(torch.device("cpu"))

    check(*tensors("cpu"), None, scored)


def test_strides_and_classes_that_a_function_reads(traces):
    """Those are not among what shapes and element types say."""
    q, k, v = tensors("cpu")
    table = torch.randn(HEADS, KEYS)
    strided = lambda score, b, h, i, j: score * (1 + j) * table.stride(0) / KEYS + table[h, j] * table.is_cuda
    check(q, k, v, None, strided)
    table = torch.randn(KEYS, HEADS).T
    check(q, k, v, None, strided)
    classed = lambda score, b, h, i, j: score * (2.0 if isinstance(table, torch.nn.Parameter) else 1 + j)
    with torch.no_grad():
        check(q, k, v, None, classed)
        table = torch.nn.Parameter(table)
        check(q, k, v, None, classed)
        before = traces.of
        check(q, k, v, None, classed)
        assert traces.of == before


def test_common_functions_are_kept(traces):
    """Those that close over tensors, numbers, and other functions, made anew at each call."""
    from torch import tanh as imported

    q, k, v = tensors("cpu")
    bias, ids, slopes = torch.randn(HEADS, KEYS), torch.arange(KEYS) // 7, [0.1 * head for head in range(HEADS)]
    settings = {"cap": 3.0, "table": torch.randn(KEYS)}

    def made(scale):
        def helper(score, kv_idx, *, factor=scale):
            return imported(score / settings["cap"]) * factor + settings["table"][kv_idx]

        def scored(score, b, h, q_idx, kv_idx):
            total = sum(score * slope for slope in slopes)
            total = total + torch.where(q_idx > kv_idx, bias[h, kv_idx], math.pi)
            return helper(total, kv_idx) + operator.mul(score, int(scale)) * isinstance(bias, torch.Tensor)

        return functools.partial(scored)

    mask = lambda: and_masks(causal, lambda b, h, i, j: ids[i] == ids[j])
    first = flex_attention(q, k, v, made(2.0), create_block_mask(mask(), None, None, QUERIES, KEYS))
    assert traces.of == 2
    again = flex_attention(q, k, v, made(2.0), create_block_mask(mask(), None, None, QUERIES, KEYS))
    assert torch.equal(again, first) and traces.of == 2
    settings["cap"] = 4.0
    check(q, k, v, None, made(2.0))
    assert traces.of == 3
    settings["table"].neg_()
    check(q, k, v, None, made(2.0))
    assert traces.of == 3


def test_threads_that_trace_at_once(monkeypatch):
    """The oldest trace goes once, and no more than so many are kept."""

    class Slow(dict):
        def __iter__(self):
            oldest = list(super().__iter__())
            time.sleep(1e-3)  # Others go on.
            return iter(oldest)

    monkeypatch.setattr(_trace, "_traces", Slow())
    monkeypatch.setattr(_trace, "_MOST_TRACES", 2)
    errors, most = [], []

    def work(first):
        for number in range(first, first + 20):
            try:
                create_block_mask(lambda b, h, i, j: i - j < number, None, None, 8, 8)
            except Exception as error:
                errors.append(error)
            most.append(len(_trace._traces))

    threads = [threading.Thread(target=work, args=(1000 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and max(most) <= 2


def test_a_tensor_that_is_there_twice():
    q, k, v = tensors("cpu", queries=KEYS)
    one = other = torch.randn(KEYS)
    score = lambda score, b, h, q_idx, kv_idx: score + one[q_idx] * other[kv_idx]
    check(q, k, v, None, score)
    one = torch.randn(KEYS)
    check(q, k, v, None, score)


def test_quotients_and_remainders_of_floats():
    """With the sign of the divisor, infinite ones included."""
    x = torch.tensor([-7.5, -3.0, -1.0, -1e-20, 0.0, 1e-20, 1.0, 3.0, 7.5, 100.0])
    y = torch.tensor([2.0, -2.0, 0.75, -0.75, 3.0, math.inf, -math.inf])
    quotient, rest = x[:, None] // y, x[:, None] % y
    same = lambda b, h, i, j: (x[i] // y[j] == quotient[i, j]) & (x[i] % y[j] == rest[i, j])
    assert flashcore.create_mask(same, None, None, len(x), len(y)).all()
    nothing = [torch.zeros(1, 1, length, 8) for length in (len(x), len(y), len(y))]
    block_mask = create_block_mask(same, None, None, len(x), len(y))
    _, lse = flex_attention(*nothing, block_mask=block_mask, return_lse=True)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(len(y))))
    # The remainder's derivatives are PyTorch's.
    by = torch.tensor(1.25, requires_grad=True)
    score = lambda score, b, h, i, j: score % by
    given = [it.requires_grad_() for it in tensors("cpu", dim=64)]
    exact = [it.detach().double().requires_grad_() for it in given]
    direction = torch.randn(given[0].shape)
    found = torch.autograd.grad(flex_attention(*given, score), (*given, by), direction)
    truth = torch.autograd.grad(expected(*exact, None, score)[0], (*exact, by), direction.double())
    for mine, of in zip(found, truth):
        torch.testing.assert_close(mine.double(), of.double(), rtol=2e-4, atol=2e-4)


# ---- refusals ----------------------------------------------------------------------------------------


def test_values_without_gradients_are_refused_where_they_have_some():
    q, k, v = tensors("cpu")
    bias, free = torch.randn(KEYS, requires_grad=True), torch.randn(KEYS)

    def silent(score, b, h, i, j):
        gate = torch.sigmoid(score)
        with torch.no_grad():
            gate = torch.sigmoid(score)
        return score * gate

    gated = lambda score, b, h, i, j: score * torch.sigmoid(score).detach()
    loaded = lambda score, b, h, i, j: score + bias[j].detach()
    part = bias.expand(HEADS, KEYS)
    viewed = lambda score, b, h, i, j: score + part[h].detach()[j]
    for score, what in ((gated, "detach"), (loaded, "detach"), (viewed, "detach"), (silent, "no_grad")):
        # Where nothing is recorded, nothing is lost; the trace is not that of the call after it.
        with torch.no_grad():
            check(q, k, v, None, score)
        with pytest.raises(NotImplementedError, match=what):
            flex_attention(q, k, v, score)
    # Neither here: positions, tensors that have none, and tensors before they are indexed.
    harmless = lambda score, b, h, i, j: score * (1 + (i - j).detach() / KEYS) + free[j].detach() + bias.detach()[j]
    given = [it.requires_grad_() for it in (q, k, v)]
    exact = [it.detach().double().requires_grad_() for it in given]
    direction = torch.randn(q.shape)
    found = torch.autograd.grad(flex_attention(*given, harmless), (*given, bias), direction, allow_unused=True)
    assert found[3] is None
    truth = torch.autograd.grad(expected(*exact, None, harmless)[0], exact, direction.double())
    near(found[:3], truth, q.dtype)
    # The same function of a tensor that has them later.
    flex_attention(q, k, v, lambda score, b, h, i, j: score + free[j].detach())
    free.requires_grad_()
    with pytest.raises(NotImplementedError, match="detach"):
        flex_attention(q, k, v, lambda score, b, h, i, j: score + free[j].detach())


def test_numbers_of_more_than_32_bits_are_refused():
    """Kernels would cut them off, and documents see each other."""
    numpy = pytest.importorskip("numpy")
    for ids in (torch.arange(KEYS) * 2**32, numpy.arange(KEYS) * 2**32 - 2**40):
        with pytest.raises(ValueError, match="mask_mod: ids contains -?[0-9]+, expected numbers of 32 bits"):
            create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, QUERIES, KEYS)
    ids = torch.arange(KEYS)
    score = lambda score, b, h, i, j: torch.where(ids[i] == ids[j], score, 0.0)
    mask = create_block_mask(lambda b, h, i, j: ids[i] <= ids[j], None, None, QUERIES, KEYS).to("cpu")
    check(*tensors("cpu"), None, score)
    # What is in a tensor may change.
    ids[3] = -(2**31) - 1
    with pytest.raises(ValueError, match="score_mod: ids contains -2147483649"):
        flex_attention(*tensors("cpu"), score)
    with pytest.raises(ValueError, match="mask_mod: .* contains -2147483649"):
        flex_attention(*tensors("cpu"), block_mask=mask)
    ids[3] = -(2**31)
    check(*tensors("cpu"), None, score)


def test_classes_are_no_tensors():
    q, k, v = tensors("cpu")
    kind, bias = torch.Tensor, torch.randn(KEYS)
    check(q, k, v, None, lambda score, b, h, i, j: score + bias[j] if isinstance(bias, kind) else score)
    with pytest.raises(NotImplementedError, match="a <class .* stands where a number must"):
        flex_attention(q, k, v, lambda score, b, h, i, j: score + kind)


def branches(score, b, h, q_idx, kv_idx):
    if q_idx > kv_idx:  # here: branch
        return score
    return -score


def chained(score, b, h, q_idx, kv_idx):
    return torch.where(0 < q_idx < kv_idx, score, -score)  # here: branch


def unknown(score, b, h, q_idx, kv_idx):
    return torch.erf(score)  # here: `erf`


def unknown_method(score, b, h, q_idx, kv_idx):
    return score.cumsum(0)  # here: `.cumsum`


def of_python(score, b, h, q_idx, kv_idx):
    return score + math.exp(q_idx)  # here: no number


def double(score, b, h, q_idx, kv_idx):
    return score + torch.ones(KEYS, dtype=torch.float64)[kv_idx]  # here: float64


def not_indexed(score, b, h, q_idx, kv_idx):
    return score + torch.ones(3)  # here: shape (3,)


def not_wholly(score, b, h, q_idx, kv_idx):
    return score + torch.ones(3, 4)[h]  # here: 1 dimensions left


def by_floats(score, b, h, q_idx, kv_idx):
    return score + torch.ones(3)[score]  # here: an index is f32


def sliced(score, b, h, q_idx, kv_idx):
    return score + torch.ones(3, 4)[h, 1:][b]  # here: part of a dimension


def too_deep(score, b, h, q_idx, kv_idx):
    deep = torch.ones(1, 1, 1, 1, 50)
    score = score + deep[0, 0, 0, 0][kv_idx]
    return score + deep[b, b, b, b, kv_idx]  # here: 5 dimensions


def iterates(score, b, h, q_idx, kv_idx):
    return sum(score)  # here: iterated


def truths(score, b, h, q_idx, kv_idx):  # here: truth value
    return q_idx > kv_idx


def nothing(score, b, h, q_idx, kv_idx):  # here: NoneType
    pass


@pytest.mark.parametrize(
    "score",
    [
        branches,
        chained,
        unknown,
        unknown_method,
        of_python,
        double,
        not_indexed,
        not_wholly,
        by_floats,
        sliced,
        too_deep,
        iterates,
        truths,
        nothing,
    ],
)
def test_what_cannot_be_traced_is_refused_with_its_line(score):
    with open(__file__) as file:
        lines = file.readlines()
    first = score.__code__.co_firstlineno
    line, text = next((at, it) for at, it in enumerate(lines[first - 1 :], first) if "# here: " in it)
    with pytest.raises(NotImplementedError) as error:
        flex_attention(*tensors("cpu"), score_mod=score)
    message = str(error.value)
    assert text.partition("# here: ")[2].strip() in message
    assert f'"{__file__}", line {line}, in {score.__name__}' in message


def test_other_arguments_are_refused_by_name():
    q, k, v = tensors("cpu")
    for wrong, error in (
        ({"Q_LEN": -3}, ValueError),
        ({"KV_LEN": 1.5}, TypeError),
        ({"B": -1}, ValueError),
        ({"Q_LEN": None}, TypeError),
    ):
        with pytest.raises(error, match=f"{next(iter(wrong))}="):
            create_block_mask(lambda b, h, i, j: i >= j, **{"B": None, "H": None, "Q_LEN": 16, "KV_LEN": 16, **wrong})
    with pytest.raises(NotImplementedError, match="return_aux.max_scores"):
        flex_attention(q, k, v, return_aux=types.SimpleNamespace(lse=True, max_scores=True))
    with pytest.raises(ValueError, match="return_aux was given with return_lse=True"):
        flex_attention(q, k, v, return_lse=True, return_aux=flashcore.AuxRequest(lse=True))
    block_mask = create_block_mask(causal, 2, None, 16, 16)
    for index in ((slice(None), 0, 0), (slice(None), 0, slice(0, 1)), torch.tensor([0]), [0], None, True):
        with pytest.raises(NotImplementedError, match=r"block_mask\[...\]"):
            block_mask[index]
    for index in (2, -3, (0, 1)):
        with pytest.raises(IndexError, match=r"block_mask\[...\] has index"):
            block_mask[index]
    with pytest.raises(TypeError, match="score_mod is a"):
        flex_attention(q, k, v, score_mod=3)
    with pytest.raises(TypeError, match="block_mask is a .*create_block_mask"):
        flex_attention(q, k, v, block_mask=causal)
    with pytest.raises(ValueError, match=f"for {KEYS} queries and {KEYS} keys, expected the {QUERIES}"):
        flex_attention(q, k, v, block_mask=create_block_mask(causal, None, None, KEYS, KEYS))
    with pytest.raises(ValueError, match="H=3, expected H=4"):
        flex_attention(q, k, v, block_mask=create_block_mask(causal, None, 3, QUERIES, KEYS))
    with pytest.raises(NotImplementedError, match="ninth|more than 8 tensors"):
        many = [torch.ones(KEYS) for _ in range(9)]
        flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + sum(it[j] for it in many))
    with pytest.raises(ZeroDivisionError):
        flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + 1 / 0)


@DEVICES
def test_the_rest_of_the_signature(device):
    q, k, v = tensors(device)
    block_mask = create_block_mask(causal, None, None, QUERIES, KEYS, device, BLOCK_SIZE=(8, 16), _compile=True)
    plain, lse = flex_attention(q, k, v, block_mask=block_mask, return_lse=True)
    # Hints for other kernels.
    assert torch.equal(plain, flex_attention(q, k, v, block_mask=block_mask, kernel_options={"BLOCK_M": 64}))
    out, aux = flex_attention(q, k, v, block_mask=block_mask, return_aux=types.SimpleNamespace(lse=True))
    assert torch.equal(out, plain) and torch.equal(aux.lse, lse) and aux.max_scores is None
    out, aux = flex_attention(q, k, v, block_mask=block_mask, return_aux=types.SimpleNamespace(lse=False))
    assert torch.equal(out, plain) and aux.lse is None


@DEVICES
@pytest.mark.parametrize("moved", [False, True])
def test_parts_of_a_mask(moved, device):
    """Of some sequences and heads: what the whole says of these."""
    generator = torch.Generator().manual_seed(0)
    seen = (torch.rand(3, HEADS, QUERIES, KEYS, generator=generator) < 0.5).to("cpu" if moved else device)
    whole = create_block_mask(lambda b, h, i, j: seen[b, h, i, j], 3, HEADS, QUERIES, KEYS, BLOCK_SIZE=16)
    whole = whole.to(device) if moved else whole
    q, k, v = tensors(device, batch=3)
    for index in (0, 1, -1, slice(1, None), (slice(None, None, 2), 1), (0, slice(1, 3)), (2, -1, slice(None))):
        part, chosen = whole[index], torch.arange(3 * HEADS).view(3, HEADS)
        both = index if isinstance(index, tuple) else (index, slice(None))
        both = [slice(it % size, it % size + 1) if isinstance(it, int) else it for it, size in zip(both, (3, HEADS))]
        number = chosen[tuple(both)]
        assert part.shape == (*number.shape, QUERIES, KEYS) and part.BLOCK_SIZE == whole.BLOCK_SIZE
        given = [it[both[0]][:, both[1]] for it in (q, k, v)]
        found = flex_attention(*given, block_mask=part)
        everything = flex_attention(q, k, v, block_mask=whole)
        assert torch.equal(found, everything[both[0]][:, both[1]])
    # One sequence is what any number of them see.
    (first,), rest = whole[1:2].shape[:1], whole[1:2, 0]
    assert first == 1
    ours = flex_attention(q, k, v, block_mask=rest)
    alone = seen[1:2, :1].to(device).expand(3, HEADS, -1, -1)
    torch.testing.assert_close(ours, scaled_dot_product_attention(q, k, v, attn_mask=alone), atol=1e-5, rtol=1e-5)
    # A function of the caller's takes the place of the whole's, as PyTorch wants it.
    rest.mask_mod = causal
    torch.testing.assert_close(
        flex_attention(q, k, v, block_mask=rest),
        flex_attention(q, k, v, block_mask=create_block_mask(causal, None, None, QUERIES, KEYS)),
    )


def test_parts_are_those_of_pytorch():
    theirs = pytest.importorskip("torch.nn.attention.flex_attention")
    seen = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)).lt(0.01)
    rule = lambda b, h, i, j: seen[b, h, i, j]
    sizes = (2, 3, 64, 64)
    ours = create_block_mask(rule, *sizes, BLOCK_SIZE=16)
    others = theirs.create_block_mask(rule, *sizes, device="cpu", BLOCK_SIZE=16)
    for index in (1, slice(0, 1), (slice(None), 2), (-1, slice(1, None))):
        assert torch.equal(ours[index].to_dense(), others[index].to_dense())


@DEVICES
def test_an_auxiliary_request(device):
    q, k, v = tensors(device)
    plain, lse = flex_attention(q, k, v, return_lse=True)
    out, aux = flex_attention(q, k, v, return_aux=flashcore.AuxRequest(lse=True))
    assert torch.equal(out, plain) and torch.equal(aux.lse, lse) and isinstance(aux, flashcore.AuxOutput)
    assert flex_attention(q, k, v, return_aux=flashcore.AuxRequest())[1] == flashcore.AuxOutput()


def test_what_a_mask_says_of_pairs_and_of_blocks():
    theirs = pytest.importorskip("torch.nn.attention.flex_attention")
    keep = torch.arange(BATCH * KEYS).reshape(BATCH, KEYS) % 7 < 3
    documents = torch.arange(KEYS)[None] // torch.tensor([11, 17])[:, None]

    def of_batch(b, h, q_idx, kv_idx):
        return keep[b, kv_idx] & (documents[b, q_idx] == documents[b, kv_idx]) & (h != 1)

    for mask, sizes in (causal, (None, None)), (of_batch, (BATCH, HEADS)), (lambda b, h, i, j: i < 0, (None, 3)):
        pairs = flashcore.create_mask(mask, *sizes, QUERIES, KEYS)
        assert torch.equal(pairs, theirs.create_mask(mask, *sizes, QUERIES, KEYS, device="cpu"))
        for size in (16, (8, 5), 128):
            ours = create_block_mask(mask, *sizes, QUERIES, KEYS, BLOCK_SIZE=size)
            rows, columns = (size, size) if isinstance(size, int) else size
            wide = torch.nn.functional.pad(pairs, (0, -KEYS % columns, 0, -QUERIES % rows)).int()
            blocks = torch.nn.functional.max_pool2d(wide.double(), (rows, columns)).int()
            assert torch.equal(ours.to_dense(), blocks) and ours.BLOCK_SIZE == (rows, columns)
            assert ours.shape == (*(size or 1 for size in sizes), QUERIES, KEYS) and ours.numel() == pairs.numel()
            assert ours.sparsity() == pytest.approx(100 * (1 - blocks.double().mean().item()))
    with pytest.raises(ValueError, match="BLOCK_SIZE is 0"):
        create_block_mask(causal, None, None, 8, 8, BLOCK_SIZE=0)


@DEVICES
def test_a_mask_can_be_moved(device):
    """Its tensors go along; the function's own stay as they are."""
    ids = torch.arange(KEYS) // 11
    same = lambda b, h, i, j: ids[i] == ids[j]
    moved = create_block_mask(same, None, None, QUERIES, KEYS).to(device)
    q, k, v = tensors(device)
    there = ids.to(device)
    exact = expected(q, k, v, lambda b, h, i, j: there[i] == there[j])
    near(flex_attention(q, k, v, block_mask=moved, return_lse=True), exact, q.dtype)
    assert (moved.blocks is None) == (device == "cpu") and ids.device.type == "cpu"


# ---- attn_mask ---------------------------------------------------------------------------------------

SHAPES = [
    (BATCH, HEADS, QUERIES, KEYS),
    (QUERIES, KEYS),
    (BATCH, 1, 1, KEYS),
    (1, HEADS, 1, 1),
    (HEADS, QUERIES, 1),
    (BATCH, 1, QUERIES, KEYS),
    (KEYS,),
    (1, 1, 1, 1),
    (),
]


@DEVICES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "strided"])
def test_a_mask_that_is_a_tensor(shape, kind, device):
    q, k, v = tensors(device)
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
    if kind == "strided":
        numbers = numbers[..., None].expand(*shape, 2).to(q.dtype)[..., 0].expand(BATCH, HEADS, QUERIES, KEYS)
    mask = numbers > -0.5 if kind == "bool" else numbers
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    whole = mask.expand(BATCH, HEADS, QUERIES, KEYS)
    at = lambda b, h, i, j: whole[b, h, i, j]
    exact = expected(q, k, v, at) if kind == "bool" else expected(q, k, v, None, lambda s, *where: s + at(*where))
    near([out], exact, q.dtype)


@DEVICES
@pytest.mark.filterwarnings("ignore:head dim")
@pytest.mark.filterwarnings("ignore:values have")
@pytest.mark.filterwarnings("ignore:the last dimension")
def test_functions_go_with_copies(device):
    """Head dims that no kernel has, and vectors with gaps, are served with functions as they are without."""
    generator = torch.Generator().manual_seed(4)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(
        device, torch.bfloat16 if device != "cpu" else None
    )
    numbers = torch.randn(HEADS, QUERIES, KEYS, generator=generator).to(device)
    for dim, value_dim in ((20, 20), (16, 9), (8, 264)):
        given = make(BATCH, HEADS, QUERIES, dim), make(BATCH, 2, KEYS, dim), make(BATCH, 2, KEYS, value_dim)
        mine, exact = ([x.clone().requires_grad_() for x in (*given, numbers)] for _ in range(2))
        out = scaled_dot_product_attention(*mine[:3], attn_mask=mine[3], enable_gqa=True)
        truth, _ = expected(*exact[:3], None, lambda s, b, h, i, j: s + exact[3][h, i, j])
        near([out], [truth], given[0].dtype)
        gradient = make(*out.shape)
        out.backward(gradient)
        truth.backward(gradient.double())
        near([x.grad for x in mine], [x.grad.double() for x in exact], given[0].dtype)
    ids = (torch.arange(KEYS, device=device) * 3 // KEYS).clamp(max=2)
    masks = causal, lambda b, h, i, j: ids[i] == ids[j]
    for dim in (DIM, 20):
        # Columns that are apart, of head dims that kernels have or not; of gradients as well.
        given = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in tensors(device, dim=dim)]
        for seen in masks:
            mask = create_block_mask(seen, None, None, QUERIES, KEYS, device=device)
            mine, exact = [x.detach().requires_grad_() for x in given], [x.double().requires_grad_() for x in given]
            found, truth = flex_attention(*mine, block_mask=mask, return_lse=True), expected(*exact, seen)
            near([it.detach() for it in found], [it.detach() for it in truth], given[0].dtype)
            gradient = make(*found[0].shape)
            found[0].backward(gradient)
            truth[0].backward(gradient.double())
            near([x.grad for x in mine], [x.grad for x in exact], given[0].dtype)


@DEVICES
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_mask_that_is_a_tensor_is_deterministic_where_asked(deterministic, device):
    q, k, v = (x.requires_grad_() for x in tensors(device))
    mask = torch.randn(QUERIES, KEYS).to(device)
    scaled_dot_product_attention(q, k, v, mask, deterministic=deterministic).sum().backward()
    problem = flashcore.info()["last"]["problem"]
    assert "backward" in problem and ("deterministic" in problem) == deterministic


@pytest.mark.gpu
@pytest.mark.hardware
def test_gradients_through_a_mask_that_is_a_tensor_are_the_same_twice():
    """Many blocks of keys for each block of queries, whose parts of gradients meet in any order unless asked."""
    given = [x.requires_grad_() for x in tensors("cuda", 2, 8, 2048, 2048, 128, key_heads=2)]
    direction = torch.randn_like(given[0])
    for mask in (torch.rand(2048, 2048, device="cuda") > 0.3, torch.randn(2, 1, 2048, 2048, device="cuda").bfloat16()):
        call = lambda: scaled_dot_product_attention(*given, mask, enable_gqa=True, deterministic=True)
        first, second = (torch.autograd.grad(call(), given, direction) for _ in range(2))
        assert all(torch.equal(*pair) for pair in zip(first, second))


@pytest.mark.filterwarnings("ignore")  # of PyTorch's compiler
def test_a_mask_that_is_a_tensor_can_be_compiled():
    q, k, v = tensors("cpu")
    compiled = torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    for mask in (torch.rand(BATCH, 1, 1, KEYS) > 0.3, torch.randn(QUERIES, KEYS)):
        with torch.no_grad():
            assert torch.equal(compiled(q, k, v, mask), scaled_dot_product_attention(q, k, v, mask))
    # After calls of other lengths, sizes of queries and keys are symbols, and those of a mask are numbers.
    torch._dynamo.reset()
    for lengths in ((30, 40), (20, 33)):
        compiled(*tensors("cpu", queries=lengths[0], keys=lengths[1]))
    for mask in (torch.rand(BATCH, 1, 1, KEYS) > 0.3, torch.randn(QUERIES, KEYS)):
        with torch.no_grad():
            assert torch.equal(compiled(q, k, v, mask), scaled_dot_product_attention(q, k, v, mask))
    # A function is traced outside of what is compiled.
    scale = torch.tensor(0.5)
    ruled = torch.compile(lambda q: flex_attention(q * 2, k, v, lambda s, *at: s * scale) + 1, backend="aot_eager")
    torch.testing.assert_close(ruled(q), flex_attention(q * 2, k, v, lambda s, *at: s * 0.5) + 1)


def test_masks_that_do_not_fit_are_refused():
    q, k, v = tensors("cpu")
    with pytest.raises(ValueError, match="attn_mask has shape .* broadcasts to"):
        scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(KEYS, QUERIES))
    with pytest.raises(TypeError, match="attn_mask has element type torch.int64"):
        scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(QUERIES, KEYS, dtype=torch.int64))
    with pytest.raises(TypeError, match="attn_mask is a <class 'list'>"):
        scaled_dot_product_attention(q, k, v, attn_mask=[1, 2])
    with pytest.raises(ValueError, match="attn_mask was given with is_causal"):
        scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(QUERIES, KEYS), is_causal=True)


# ---- the others --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # that it is not compiled
@pytest.mark.parametrize("name", ["documents", "t5", "biased"])
def test_the_same_as_flex_attention(name):
    from torch.nn.attention import flex_attention as theirs

    q, k, v = tensors("cpu")
    mask, score = rules("cpu")[name]
    block_mask = theirs.create_block_mask(mask, BATCH, HEADS, QUERIES, KEYS, device="cpu")
    expected, lse = theirs.flex_attention(q, k, v, score, block_mask, return_lse=True)
    mine = create_block_mask(mask, BATCH, HEADS, QUERIES, KEYS)
    near(flex_attention(q, k, v, score, mine, return_lse=True), (expected.double(), lse.double()), q.dtype)


def test_the_mask_that_hides_nothing():
    """PyTorch's own makes its answer on the device of the positions."""
    from torch.nn.attention.flex_attention import noop_mask

    q, k, v = tensors("cpu")
    mask = create_block_mask(noop_mask, None, None, QUERIES, KEYS)
    assert torch.equal(flex_attention(q, k, v, block_mask=mask), flex_attention(q, k, v))
    assert mask.sparsity() == 0


def test_arrays_of_numpy():
    numpy = pytest.importorskip("numpy")
    q, k, v = (x.numpy() for x in tensors("cpu"))
    bias, slopes = numpy.random.default_rng(2).standard_normal((2, HEADS, KEYS)).astype(numpy.float32)[:, :, :KEYS]
    factor = numpy.float32(0.5)
    ids = numpy.arange(KEYS) // 7

    def inner(kv_idx, again=True):
        # A function that knows itself.
        return inner(kv_idx, False) if again else ids[kv_idx]

    def mask(b, h, q_idx, kv_idx):
        return numpy.logical_and(q_idx >= kv_idx, inner(q_idx) == ids[kv_idx])

    def score(score, b, h, q_idx, kv_idx):
        return numpy.tanh(score) * factor + bias[h, kv_idx] - numpy.where(q_idx > 3, slopes[h, kv_idx], 0.0)

    block_mask = create_block_mask(mask, None, None, QUERIES, KEYS)
    for _ in range(2):
        out = flex_attention(q, k, v, score, block_mask)
        assert isinstance(out, numpy.ndarray)
        scores = q.astype(float) @ k.astype(float).transpose(0, 1, 3, 2) / math.sqrt(DIM)
        at = numpy.ogrid[:BATCH, :HEADS, :QUERIES, :KEYS]
        scores = numpy.where(mask(*at), score(scores, *at), -numpy.inf)
        weights = numpy.exp(scores - scores.max(-1, keepdims=True))
        exact = weights / weights.sum(-1, keepdims=True) @ v.astype(float)
        numpy.testing.assert_allclose(out, exact, rtol=2e-5, atol=2e-5)
        # What is in an array may change.
        bias *= -1
        ids += numpy.arange(KEYS) % 2
    seen = numpy.tril(numpy.ones((QUERIES, KEYS), dtype=bool))
    out = scaled_dot_product_attention(q, k, v, attn_mask=seen)
    numpy.testing.assert_allclose(
        out, flex_attention(q, k, v, block_mask=create_block_mask(causal, 1, 1, QUERIES, KEYS)), atol=1e-6
    )


def test_masks_of_one_number_in_numpy():
    numpy = pytest.importorskip("numpy")
    q, k, v = (x.numpy() for x in tensors("cpu"))
    plain = scaled_dot_product_attention(q, k, v)
    for shape in ((), (1, 1), (1, 1, 1, 1)):
        assert numpy.array_equal(scaled_dot_product_attention(q, k, v, numpy.ones(shape, bool)), plain)
        assert not scaled_dot_product_attention(q, k, v, numpy.zeros(shape, bool)).any()
        # The same number for all keys changes nothing.
        shifted = scaled_dot_product_attention(q, k, v, numpy.full(shape, 0.5, numpy.float32))
        numpy.testing.assert_allclose(shifted, plain, atol=1e-6)
    one = scaled_dot_product_attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], numpy.ones((1, 1), bool))
    numpy.testing.assert_allclose(one, v[:, :, :1], atol=1e-6)


def test_arrays_of_numpy_that_are_elsewhere():
    """In defaults, dictionaries and lists; in objects, where nobody finds them, they are refused."""
    numpy = pytest.importorskip("numpy")
    q, k, v = (x.numpy() for x in tensors("cpu"))
    bias = numpy.random.default_rng(2).standard_normal(KEYS).astype(numpy.float32)
    named, listed, inside = {"bias": bias}, [[bias]], types.SimpleNamespace(bias=bias)
    named["itself"] = named

    def of_default(score, b, h, i, j, *, bias=bias):
        return score + bias[j]

    def of_part(score, b, h, i, j, *, bias):
        return score + bias[j]

    expected = flex_attention(q, k, v, lambda score, b, h, i, j: score + bias[j])
    for score in (
        of_default,
        functools.partial(of_part, bias=bias),
        lambda score, b, h, i, j: score + named["itself"]["bias"][j],
        lambda score, b, h, i, j: score + listed[0][0][j],
    ):
        numpy.testing.assert_array_equal(flex_attention(q, k, v, score), expected)
    for score in (
        lambda score, b, h, i, j: score + inside.bias[j],
        lambda score, b, h, i, j: score + numpy.ones(KEYS, numpy.float32)[j],
    ):
        with pytest.raises(NotImplementedError, match=r"an array of NumPy(.|\n)*test_flex.py"):
            flex_attention(q, k, v, score)
    # Numbers among them, more than a function may load from, are read each time.
    numbers = {index: numpy.array(index, numpy.float32) for index in range(12)}
    scaled = lambda score, b, h, i, j: score * numbers[3] + bias[j] * float(numbers[1])
    for factor in (3, 5):
        numbers[3][...], numbers[1][...] = factor, factor - 2
        exact = flex_attention(q, k, v, lambda score, b, h, i, j: score * float(factor) + bias[j] * (factor - 2.0))
        numpy.testing.assert_allclose(flex_attention(q, k, v, scaled), exact, atol=1e-6)
    with pytest.raises(IndexError, match="list index"):
        flex_attention(q, k, v, lambda score, b, h, i, j: score + listed[1])


@DEVICES
def test_gradients_go_through_functions(device):
    given = tensors(device)
    bias = torch.linspace(-1.0, 1.0, HEADS * KEYS, device=device).reshape(HEADS, KEYS)

    def capped(score, b, h, q_idx, kv_idx):
        return 3.0 * torch.tanh(score / 3.0) * (1.0 + 0.25 * h) + bias[h, kv_idx]

    mine = [x.clone().requires_grad_() for x in given]
    out = flex_attention(*mine, score_mod=capped, block_mask=create_block_mask(causal, None, None, QUERIES, KEYS))
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(8)).to(out)
    out.backward(gradient)
    exact = [x.double().requires_grad_() for x in given]
    expected(*exact, causal, capped)[0].backward(gradient.double())
    near([x.grad for x in mine], [x.grad for x in exact], given[0].dtype)


@DEVICES
def test_a_sigmoid_has_a_slope_where_its_exponential_overflows(device):
    given = tensors(device)
    given[0][:, :, 3] = 0.0
    gated = lambda score, b, h, q_idx, kv_idx: 4.0 * torch.sigmoid(score)
    steep = lambda score, b, h, q_idx, kv_idx: 4.0 * torch.sigmoid(200.0 * score - 80.0 - kv_idx / 4)
    # Scores of hundreds, of either sign, and of zero; and those whose exponential overflows in a product.
    for score, scale in ((gated, 60.0), (steep, 0.001)):
        mine = [x.clone().requires_grad_() for x in given]
        exact = [x.double().requires_grad_() for x in given]
        out = flex_attention(*mine, score, scale=scale)
        direction = torch.randn(out.shape).to(out)
        found = torch.autograd.grad(out, mine, direction)
        truth = torch.autograd.grad(expected(*exact, None, score, scale)[0], exact, direction.double())
        near([x / 60.0 for x in found], [x / 60.0 for x in truth], given[0].dtype)


def scores_of(device):
    """Functions with tensors that have gradients, and the mask they go with."""
    generator = torch.Generator().manual_seed(9)
    floats = lambda *shape: torch.randn(*shape, generator=generator).to(device)
    every, shared = floats(BATCH, HEADS, QUERIES, KEYS), floats(QUERIES, KEYS)
    short, halves = floats(HEADS, KEYS - 7), floats(HEADS, QUERIES, KEYS).bfloat16()
    slopes, warm, buckets = floats(HEADS), floats(HEADS).abs() + 0.5, floats(9, HEADS)
    keep = floats(BATCH, KEYS) > -1.0

    def documents(b, h, q_idx, kv_idx):
        return keep[b, kv_idx] & (q_idx + KEYS - QUERIES >= kv_idx)

    return [
        ((every,), None, lambda s, b, h, i, j: s + every[b, h, i, j]),
        ((shared,), documents, lambda s, b, h, i, j: s + shared[i, j]),
        # Outside of its tensor a load is zero.
        ((halves, short), causal, lambda s, b, h, i, j: s + halves[h, i, j] - short[h, j]),
        ((slopes, warm), causal, lambda s, b, h, i, j: s * warm[h] - slopes[h] * (i - j)),
        ((buckets,), documents, lambda s, b, h, i, j: s + buckets[torch.clamp((i - j) // 4, -4, 4) + 4, h]),
        ((warm,), None, lambda s, b, h, i, j: warm[h] * torch.tanh(s / warm[h])),
    ]


@DEVICES
@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("most", [1 << 24, 5 * KEYS])
def test_captured_tensors_have_gradients(device, which, most, monkeypatch):
    """All scores at once, and five rows at a time; of the output and of the log-sum-exps."""
    monkeypatch.setattr(flashcore._captured, "MOST_SCORES", most)
    leaves, mask, score = scores_of(device)[which]
    given = tensors(device, key_heads=2)
    exact = [x.double().requires_grad_() for x in given]
    for leaf in leaves:
        leaf.requires_grad_()
    block_mask = None if mask is None else create_block_mask(mask, None, None, QUERIES, KEYS)
    mine = [x.clone().requires_grad_() for x in given]
    results = flex_attention(*mine, score, block_mask, enable_gqa=True, return_lse=True)
    generator = torch.Generator().manual_seed(8)
    directions = [torch.randn(it.shape, generator=generator).to(it) for it in results]
    found = torch.autograd.grad(results, (*mine, *leaves), directions)
    # Elements that are outside of a tensor are not there for PyTorch.
    if which == 2:
        short = leaves[1]
        padded = torch.nn.functional.pad(short, (0, 7))
        score = lambda s, b, h, i, j: s + leaves[0][h, i, j] - padded[h, j]
    truth = torch.autograd.grad(expected(*exact, mask, score), (*exact, *leaves), [it.double() for it in directions])
    assert [x.dtype for x in found] == [x.dtype for x in (*given, *leaves)]
    scale = max(1.0, *(x.abs().max().item() for x in truth))
    lower = any(leaf.dtype == torch.bfloat16 for leaf in leaves)
    near(
        [x.double() / scale for x in found],
        [x.double() / scale for x in truth],
        torch.bfloat16 if lower else given[0].dtype,
    )


def test_captured_tensors_alone_have_gradients():
    """Queries, keys and values need none; a mask that is added is such a tensor too."""
    q, k, v = tensors("cpu")
    bias = torch.zeros(KEYS, requires_grad=True)
    _, lse = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[j], return_lse=True)
    lse.sum().backward()
    torch.testing.assert_close(bias.grad.sum(), torch.tensor(float(lse.numel())))  # each row's weights
    bias.grad = None
    flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[j]).sum().backward()
    through, bias.grad = bias.grad, None
    scaled_dot_product_attention(q, k, v, bias.expand(QUERIES, KEYS)).sum().backward()
    assert through.abs().max() > 0
    torch.testing.assert_close(bias.grad, through)
    with torch.no_grad():
        assert not flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[j]).requires_grad


def test_gradients_of_captured_tensors_are_not_differentiated():
    """Neither by way of a function's tensors nor of an additive mask, of which PyTorch recorded nothing."""
    q, k, v = tensors("cpu")
    bias = torch.randn(KEYS, requires_grad=True)
    for call in (
        lambda: flex_attention(q, k, v, lambda s, b, h, i, j: s * bias[j]),
        lambda: scaled_dot_product_attention(q, k, v, bias.expand(QUERIES, KEYS)),
    ):
        direction = torch.randn(q.shape, requires_grad=True)
        (once,) = torch.autograd.grad(call(), bias, direction, create_graph=True)
        (plain,) = torch.autograd.grad(call(), bias, direction.detach())
        assert torch.equal(once, plain)
        for wanted in (bias, direction):
            with pytest.raises(NotImplementedError, match="FlashCore has no gradients of gradients"):
                torch.autograd.grad(once.square().sum(), wanted, retain_graph=True)


def test_transforms_of_captured_tensors_are_refused():
    q, k, v = tensors("cpu")
    bias = torch.randn(KEYS)
    learned = torch.nn.Parameter(bias)
    captured = lambda bias: flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[j]).sum()
    for transformed, given, name in (
        (torch.func.grad(captured), bias, "a captured tensor"),
        (torch.func.grad(lambda bias: torch.vmap(captured)(bias[None]).sum()), bias, "a captured tensor"),
        (lambda q: torch.func.vjp(lambda q: scaled_dot_product_attention(q, k, v, learned), q), q, "attn_mask"),
    ):
        with pytest.raises(
            NotImplementedError, match=f"^{name} requires grad under a transform of torch.func, expected"
        ):
            transformed(given)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_of_captured_tensors_are_computed_in_float32(default):
    """Whatever autocast chooses for products, and whatever numbers are by default."""
    q, k, v = tensors("cpu")
    slopes = torch.randn(HEADS, requires_grad=True)
    score = lambda s, b, h, i, j: torch.tanh(s * 0.37) * slopes[h] * 1.37 - 0.113
    direction = torch.randn(q.shape)
    (truth,) = torch.autograd.grad(
        expected(*(it.double() for it in (q, k, v)), None, score)[0], slopes, direction.double()
    )
    out = flex_attention(q, k, v, score)
    torch.set_default_dtype(default)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            (found,) = torch.autograd.grad(out, slopes, direction)
    finally:
        torch.set_default_dtype(torch.float32)
    scale = truth.abs().max().item()
    near([found / scale], [truth.double() / scale], torch.float32)


def test_autocast_chooses_the_element_type():
    q, k, v = tensors("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        out = flex_attention(q, k, v, block_mask=create_block_mask(causal, None, None, QUERIES, KEYS))
    assert out.dtype == torch.bfloat16
    near([out], expected(q, k, v, causal), out.dtype)


@pytest.mark.gpu
@pytest.mark.hardware
def test_blocks_between_documents_are_not_loaded():
    """Lists of key blocks from what is in the tensors of a mask: right where documents begin anywhere."""
    generator = torch.Generator().manual_seed(11)
    for length, dim in ((1000, 64), (2048, 128)):
        q, k, v = tensors("cuda", 2, 4, length, length, dim)
        starts = torch.randint(0, length, (2, 5), generator=generator)
        ids = (torch.arange(length)[None, :, None] >= starts[:, None]).sum(-1).cuda()
        causal_ids = lambda b, h, i, j: (i >= j) & (ids[b, i] == ids[b, j])
        both_ways = lambda b, h, i, j: (ids[b, i] == ids[b, j]) | (j == 0)
        for mask in (causal_ids, both_ways):
            check(q, k, v, mask)
        # Nothing is waited for, and what was found stays with the mask, for gradients as well.
        block_mask = create_block_mask(causal_ids, None, None, length, length, device="cuda")
        assert block_mask.blocks is not None
        ours = [it.clone().requires_grad_() for it in (q, k, v)]
        exact = [it.double().requires_grad_() for it in (q, k, v)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            create_block_mask(causal_ids, None, None, length, length, device="cuda")
            first = flex_attention(*ours, block_mask=block_mask)
            second = flex_attention(*ours, block_mask=block_mask)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(first, second)
        direction = torch.randn_like(first)
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
            try:
                found = torch.autograd.grad(flex_attention(*ours, block_mask=block_mask), ours, direction)
            finally:
                torch.use_deterministic_algorithms(False)
            truth = torch.autograd.grad(expected(*exact, causal_ids)[0], exact, direction.double())
            for mine, of in zip(found, truth):
                torch.testing.assert_close(mine.double(), of, rtol=5e-2, atol=5e-2)


@pytest.mark.gpu
@pytest.mark.hardware
def test_blocks_are_found_in_graphs():
    """A graph that was captured before they were known finds them each time; one that was captured later has them."""
    length = 1024
    q, k, v = tensors("cuda", 1, 4, length, length, 128)
    ids = torch.arange(length, device="cuda") // 100
    mask = lambda b, h, i, j: (i >= j) & (ids[i] == ids[j])
    new = lambda: create_block_mask(mask, None, None, length, length)
    call = lambda block_mask: flex_attention(q, k, v, block_mask=block_mask)
    call(new())  # kernels are compiled
    block_mask, graph = new(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(block_mask)
    for step in (100, 300, 7):
        ids.copy_(torch.arange(length, device="cuda") // step)
        graph.replay()
        near([out], expected(q, k, v, mask), q.dtype)
    known, graph = new(), torch.cuda.CUDAGraph()
    first = call(known)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        again = call(known)
    graph.replay()
    assert torch.equal(first, again)
    # On another stream they are waited for.
    other, late = torch.cuda.Stream(), new()
    torch.cuda.synchronize()
    first = call(late)
    with torch.cuda.stream(other):
        second = call(late)
    torch.cuda.synchronize()
    assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.hardware
def test_functions_run_in_graphs():
    q, k, v = tensors("cuda", dim=64)
    bias = torch.randn(KEYS, device="cuda")
    call = lambda: flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[j])
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    bias.normal_()
    graph.replay()
    assert torch.equal(out, call())


# ---- patterns, block by block ------------------------------------------------------------------------


def lists_of(states, columns):
    """Counts and indices of the pairs that are true, each list padded with what nobody may look at."""
    counts = states.sum(-1).int()
    indices = torch.full((*states.shape[:3], columns), -1, dtype=torch.int32)
    for at in torch.cartesian_prod(*(torch.arange(size) for size in states.shape[:3])).tolist():
        found = states[tuple(at)].nonzero()[:, 0]
        indices[tuple(at)][: len(found)] = found
    return counts, indices


@DEVICES
@pytest.mark.parametrize("size", [(16, 16), (8, 5), (64, 64)])
@pytest.mark.parametrize("apart", [(1, 1), (BATCH, HEADS)])
def test_patterns_from_lists_of_key_blocks(size, apart, device):
    q, k, v = tensors(device)
    rows, columns = -(-QUERIES // size[0]), -(-KEYS // size[1])
    kind = torch.randint(0, 3, (*apart, rows, columns), generator=torch.Generator().manual_seed(4))
    some, whole = (tuple(x.to(device) for x in lists_of(kind == state, columns)) for state in (1, 2))
    at = lambda b, h: (b if apart[0] > 1 else 0, h if apart[1] > 1 else 0)
    states = kind.to(device)
    state = lambda b, h, i, j: states[(*at(b, h), i // size[0], j // size[1])]
    odd = lambda b, h, i, j: (i + j) % 3 == 0
    for mask_mod, seen in (
        (None, lambda *it: state(*it) > 0),
        (odd, lambda *it: (state(*it) == 2) | (state(*it) == 1) & odd(*it)),
    ):
        block_mask = flashcore.BlockMask.from_kv_blocks(
            *some, *whole, BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=(QUERIES, KEYS)
        )
        mine, exact = [x.clone().requires_grad_() for x in (q, k, v)], [x.double().requires_grad_() for x in (q, k, v)]
        out = flex_attention(*mine, block_mask=block_mask)
        truth = expected(*exact, seen)[0]
        near([out.detach()], [truth.detach()], q.dtype)
        gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(8)).to(out)
        out.backward(gradient)
        truth.backward(gradient.double())
        near([x.grad for x in mine], [x.grad for x in exact], q.dtype)


@DEVICES
def test_block_masks_of_pytorch(device, monkeypatch):
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    q, k, v = tensors(device)
    ids = (torch.arange(max(QUERIES, KEYS), device=device) * 3 // KEYS).clamp(max=2)
    documents = lambda b, h, i, j: (i >= j) & (ids[i] == ids[j])
    theirs = create_block_mask(documents, None, None, QUERIES, KEYS, device=device, BLOCK_SIZE=16)
    near([flex_attention(q, k, v, block_mask=theirs)], expected(q, k, v, documents), q.dtype)
    with monkeypatch.context() as patch:
        # Known by now: nothing is made of its lists again.
        patch.setattr(flashcore.BlockMask, "from_kv_blocks", None)
        near([flex_attention(q, k, v, block_mask=theirs)], expected(q, k, v, documents), q.dtype)
    # What is changed afterwards counts: its function, its lists, what is in them.
    theirs.mask_mod = lambda b, h, i, j: i >= j
    in_blocks = theirs.to_dense().bool()
    seen = lambda b, h, i, j: (i >= j) & in_blocks[0, 0, i // 16, j // 16]
    near([flex_attention(q, k, v, block_mask=theirs)], expected(q, k, v, seen), q.dtype)
    theirs.kv_num_blocks.zero_()
    none = lambda b, h, i, j: (i >= j) & (j < 0)
    near([flex_attention(q, k, v, block_mask=theirs)], expected(q, k, v, none), q.dtype)
    # Their lists count, and their function in the place of none.
    counts, indices = (
        x.to(device) for x in lists_of(torch.ones(1, 1, -(-QUERIES // 16), -(-KEYS // 16)).tril() > 0, -(-KEYS // 16))
    )
    theirs = BlockMask.from_kv_blocks(counts, indices.clamp(min=0), BLOCK_SIZE=16, seq_lengths=(QUERIES, KEYS))
    seen = lambda b, h, i, j: i // 16 >= j // 16
    near([flex_attention(q, k, v, block_mask=theirs)], expected(q, k, v, seen), q.dtype)
    with pytest.raises(TypeError, match="block_mask is a <class 'int'>"):
        flex_attention(q, k, v, block_mask=3)


@pytest.mark.gpu
@pytest.mark.hardware
def test_nothing_waits_for_a_block_mask_that_changes():
    """The memory of lists that nobody needs any more is used again on the same stream: to free it would be to wait."""
    from torch.nn.attention.flex_attention import create_block_mask

    length = 2048
    q, k, v = tensors("cuda", 1, 2, length, length, 64)
    theirs = create_block_mask(causal, None, None, length, length, device="cuda")
    whole = theirs.full_kv_num_blocks.clone()
    expected_of = {kept: None for kept in (False, True)}
    for kept in (True, False, True, False):
        # Plans are made, and both masks are known.
        theirs.full_kv_num_blocks.copy_(whole * kept)
        expected_of[kept] = flex_attention(q, k, v, block_mask=theirs)
    assert not torch.equal(*expected_of.values())
    stream = torch.cuda.current_stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    found = []
    began = time.perf_counter()
    for kept in (True, False, True):
        theirs.full_kv_num_blocks.copy_(whole * kept)
        found.append(flex_attention(q, k, v, block_mask=theirs))
    seconds = time.perf_counter() - began
    assert not stream.query(), "the nap should last longer than the calls"
    assert seconds < 0.03, "a call waited for the device"
    for kept, out in zip((True, False, True), found):
        assert torch.equal(out, expected_of[kept])


def test_block_masks_of_inference_mode():
    """Their tensors do not tell when they change; other attributes do."""
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = tensors("cpu")
    with torch.inference_mode():
        theirs = create_block_mask(causal, None, None, QUERIES, KEYS, device="cpu", BLOCK_SIZE=16)
        assert theirs.kv_indices.is_inference()
        for _ in range(2):
            near([flex_attention(q, k, v, block_mask=theirs)], expected(q, k, v, causal), q.dtype)
        theirs.kv_num_blocks = torch.zeros_like(theirs.kv_num_blocks)
        theirs.full_kv_num_blocks = torch.zeros_like(theirs.full_kv_num_blocks)
        assert not flex_attention(q, k, v, block_mask=theirs).any()
    # Others beside them do.
    theirs.kv_num_blocks = theirs.kv_num_blocks.clone()
    assert not flex_attention(q, k, v, block_mask=theirs).any()
    theirs.kv_num_blocks += 1
    assert flex_attention(q, k, v, block_mask=theirs).any()
    theirs.full_kv_num_blocks = None
    with pytest.raises((TypeError, ValueError), match="full_kv_num_blocks"):
        flex_attention(q, k, v, block_mask=theirs)


@DEVICES
def test_patterns_from_compressed_rows(device):
    q, k, v = tensors(device)
    indptr, indices = (torch.tensor(it, device=device, dtype=torch.int32) for it in ([0, 2, 2, 5], [2, 0, 0, 1, 3]))
    size = (16, 13)
    seen = torch.zeros(3, 4, dtype=torch.bool, device=device)
    seen[[0, 0, 2, 2, 2], [2, 0, 0, 1, 3]] = True
    blocks = lambda b, h, i, j: seen[i // 16, j // 13]
    block_mask = flashcore.BlockMask.from_bcsr(indptr, indices, size, (QUERIES, KEYS))
    near([flex_attention(q, k, v, block_mask=block_mask)], expected(q, k, v, blocks), q.dtype)
    # A mask of the pairs of each block of the list.
    pairs = torch.rand(5, *size, generator=torch.Generator().manual_seed(6)).to(device) > 0.4
    number = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0], [2, 3, 0, 4]], device=device)
    both = lambda b, h, i, j: blocks(b, h, i, j) & pairs[number[i // 16, j // 13], i % 16, j % 13]
    block_mask = flashcore.BlockMask.from_bcsr(indptr, indices, size, (QUERIES, KEYS), pairs)
    near([flex_attention(q, k, v, block_mask=block_mask)], expected(q, k, v, both), q.dtype)


def test_patterns_of_arrays_and_those_that_do_not_fit():
    numpy = pytest.importorskip("numpy")
    q, k, v = (x.numpy() for x in tensors("cpu"))
    counts, indices = (x.numpy() for x in lists_of(torch.ones(1, 1, 3, 3, dtype=torch.bool).tril(), 3))
    block_mask = flashcore.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16, seq_lengths=(QUERIES, KEYS))
    out = flex_attention(q, k, v, block_mask=block_mask)
    rows = flashcore.BlockMask.from_bcsr(
        numpy.array([0, 1, 3, 6]), numpy.array([0, 0, 1, 0, 1, 2]), 16, (QUERIES, KEYS)
    )
    numpy.testing.assert_array_equal(out, flex_attention(q, k, v, block_mask=rows))
    exact = expected(*tensors("cpu"), lambda b, h, i, j: i // 16 >= j // 16)[0]
    numpy.testing.assert_allclose(out, exact.numpy(), atol=2e-5)
    make = flashcore.BlockMask.from_kv_blocks
    for message, call in (
        (
            "kv_indices has block 3, expected 0 to 2",
            lambda: make(counts, indices + 1, BLOCK_SIZE=16, seq_lengths=(48, 48)),
        ),
        ("kv_num_blocks has 3 rows, expected 2", lambda: make(counts, indices, BLOCK_SIZE=16, seq_lengths=(32, 48))),
        ("full_kv_indices has shape", lambda: make(counts, indices, counts, indices[:, :, :2], BLOCK_SIZE=16)),
        ("BLOCK_SIZE is 0", lambda: make(counts, indices, BLOCK_SIZE=0)),
        ("indptr has shape", lambda: flashcore.BlockMask.from_bcsr(counts[0, 0], indices[0, 0, 0], 16, (48, 48))),
    ):
        with pytest.raises(ValueError, match=message):
            call()
