"""What calls would run on GPUs that need not be there: the same as everybody else's."""

from pathlib import Path

import pytest
from flashcore import _flashcore

# The table that all front ends share: chip | how tensors lie | problem -> kernel, configuration.
TABLE = Path(__file__).parents[2] / "crates" / "testing" / "data" / "choices.txt"

NAMES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


def lie(order, batch, length, heads, dim):
    """The strides of (batch, length, heads, dim) that lie in an order of the table."""
    if order == "heads first":
        return [length * heads * dim, dim, length * dim, 1]
    gap = int(order.removeprefix("gaps of ")) if order.startswith("gaps") else 0
    row = (dim + gap) * heads + gap
    return [length * row, row, dim + gap, 1]


def call(text, order="contiguous"):
    """The call that asks for a problem, or None where Python has none."""
    words = dict(word.partition("=")[::2] for word in text.split(","))
    dtypes = [NAMES[word] for word in words if word in NAMES]
    if len(dtypes) != 1:
        return None
    size = lambda name, other=None: int(words.get(name, other))
    batch, heads, queries, dim = (size(name) for name in "bhsd")
    shared, keys, value_dim = size("hk", heads), size("sk", queries), size("dv", dim)

    def rows(name, length):
        kind, *numbers = words.get(name, "padded").split(":")
        numbers = [int(number) for number in numbers]
        shapes = {
            "padded": lambda: (batch, length),
            "entries": lambda: (numbers[0], length),
            "packed": lambda: (numbers[0],),
            "pages": lambda: (numbers[2], numbers[0]),
        }
        return kind, numbers, shapes[kind]()

    ints = lambda there, *shape: ("int32", list(shape), None, 0) if there else None
    (query_kind, _, query), (key_kind, numbers, key) = rows("queries", queries), rows("keys", keys)
    pages = key_kind == "pages"
    if any(dim % 8 or dim > 256 for dim in (dim, value_dim)):
        return None
    if pages and keys != numbers[0] * numbers[1] or key_kind == "entries" and "batch_index" not in words:
        return None
    address = 8 if order == "address + 8" else 0

    def floats(places, heads, dim):
        strides = lie(order, *((1, *places) if len(places) == 1 else places), heads, dim)
        return dtypes[0], [*places, heads, dim], strides[2 - len(places) :], address

    alibi = {None: None, "": [heads], "sequences": [batch, heads]}[words.get("alibi")]
    tensors = (
        floats(query, heads, dim),
        floats(key, shared, dim),
        floats(key, shared, value_dim),
        ints(query_kind == "packed", batch + 1),
        ints(key_kind == "packed", batch + 1),
        ints("query_lengths" in words, batch),
        ints("key_lengths" in words, batch),
        ints("left_padding" in words, batch),
        ints("batch_index" in words, batch),
        ints(pages, batch, numbers[1] if pages else 0),
        alibi and ("float32", alibi, None, 0),
        ("float32", [heads], None, 0) if "sinks" in words else None,
    )
    sides = words.get("window", ":0" if "causal" in words else ":").split(":")
    left, right = (int(side or -1) for side in sides)
    scale = float(words["scale"]) if "scale" in words else None
    rules = (scale, (left, right) == (-1, 0), (left, right), size("chunk", 0), float(words.get("softcap", 0)))
    plain = not any(word in words for word in ("queries", "keys", "query_lengths", "key_lengths", "left_padding"))
    function = "flash_attn_func" if plain else "flash_attn_varlen_func"
    return tensors, (*rules, queries, keys), function


def test_calls_are_described_and_served_as_everybody_elses():
    asked = 0
    for line in TABLE.read_text().splitlines():
        if line.startswith("#"):
            continue
        wanted, _, expected = line.partition(" -> ")
        chip, order, text = wanted.split(" | ")
        given = call(text, order)
        if given is None:
            continue
        asked += 1
        if expected == "none":
            with pytest.raises(NotImplementedError, match="no kernel can serve this problem"):
                _flashcore.plan_for(*given, chip)
            continue
        described, kernel, configuration, reason = _flashcore.plan_for(*given, chip)
        assert sorted(described.split(",")) == sorted(text.split(",")), line
        assert f"{kernel}, {configuration}" == expected, (line, reason)
    assert asked > 400


def test_strides_and_addresses_count():
    tensors, numbers, function = call("b=2,h=4,s=512,d=64,bf16,causal")
    kernel = lambda key: _flashcore.plan_for((tensors[0], key, *tensors[2:]), numbers, function, "h200")[1]
    dtype, shape, _, _ = tensors[1]
    assert kernel((dtype, shape, [512 * 768, 768, 64, 1], 16)) == "forward"
    assert kernel((dtype, shape, [512 * 256, 256, 0, 1], 0)) == "mma"
    assert kernel((dtype, shape, None, 2)) == "scalar"
    heads_first = tuple(x and (x[0], [2, 4, 512, 64], None, 0) for x in tensors)
    text, *_ = _flashcore.plan_for(heads_first, numbers, "scaled_dot_product_attention", "sm_89")
    assert text == "b=2,h=4,s=512,d=64,bf16,causal"


def test_a_kernel_can_be_insisted_on(monkeypatch):
    given = call("b=2,h=4,s=512,d=64,bf16,causal")
    monkeypatch.setenv("FLASHCORE_KERNEL", "gpu/mma")
    assert _flashcore.plan_for(*given, "h200")[1] == "mma"
    monkeypatch.setenv("FLASHCORE_KERNEL", "nothing")
    with pytest.raises(ValueError, match="there is no kernel `nothing` here"):
        _flashcore.plan_for(*given, "h200")


def test_a_kernel_of_one_pass_has_no_effect_on_the_other(monkeypatch):
    given = call("b=2,h=4,s=512,d=64,bf16,causal")
    planned = lambda: tuple(_flashcore.plan_for(*given, "h200", backward)[1] for backward in (False, True))
    for kernel, expected in {"gpu/mma": ("mma", "backward"), "backward-mma": ("forward", "backward-mma")}.items():
        monkeypatch.setenv("FLASHCORE_KERNEL", kernel)
        assert planned() == expected


def test_gradients_are_planned():
    text = "b=2,h=4,s=512,d=64,bf16,causal"
    tensors, numbers, function = call(text)
    planned = lambda tensors, function: _flashcore.plan_for(tensors, numbers, function, "h200", True)
    described, kernel, *_ = planned(tensors, function)
    assert (described, kernel) == (f"{text},backward", "backward")
    # Parts of a packed tensor are read and written where they lie.
    packed = tuple(x and (x[0], x[1], [512 * 768, 768, 64, 1], 128 * at) for at, x in enumerate(tensors))
    assert planned(packed, "flash_attn_qkvpacked_func")[1] == "backward"
    wide = tuple(x and ("float32", *x[1:]) for x in tensors)
    with pytest.raises(NotImplementedError, match="no kernel can serve this problem: .*f32"):
        planned(wide, function)
