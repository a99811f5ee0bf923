"""Every function, every argument, everything wrong that came to mind: an error that names it.

Each error is a TypeError, a ValueError or a NotImplementedError, and speaks of the argument as the
caller wrote it.
"""

import inspect
import math

import flashcore
import numpy as np
import pytest

REFUSALS = (TypeError, ValueError, NotImplementedError)


def floats(*shape, dtype=np.float32):
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


def ints(*numbers):
    return np.array(numbers, np.int32)


# Calls that are served, and what each of their arguments is.
TENSORS = dict.fromkeys(("q", "k", "v"), "tensor")
RULES = {
    "softmax_scale": "optional number",
    "causal": "flag",
    "window_size": "window",
    "softcap": "number",
}
UNSERVED = {"qv": "nothing"}
FACTORS = dict.fromkeys(("q_descale", "k_descale", "v_descale"), "factors")
HINTS = {"num_splits": "hint", "sm_margin": "hint", "pack_gqa": "optional flag"}
INVARIANT = {"batch_invariant": "flag"}
CALLS = {
    "flash_attn_func": (
        {"q": floats(2, 6, 2, 16), "k": floats(2, 6, 2, 16), "v": floats(2, 6, 2, 16)},
        {
            **TENSORS, **RULES, **UNSERVED, **HINTS, **INVARIANT,
            "dropout_p": "default", "attention_chunk": "size", "alibi_slopes": "floats", "s_aux": "floats",
            "deterministic": "flag", "return_attn_probs": "flag",
        },
    ),
    "flash_attn_qkvpacked_func": (
        {"qkv": floats(2, 6, 3, 2, 16)},
        {
            **RULES, "qkv": "tensor", "dropout_p": "default", "alibi_slopes": "floats",
            "deterministic": "flag", "return_attn_probs": "flag",
        },
    ),
    "flash_attn_kvpacked_func": (
        {"q": floats(2, 6, 2, 16), "kv": floats(2, 6, 2, 2, 16)},
        {
            **RULES, "q": "tensor", "kv": "tensor", "dropout_p": "default", "alibi_slopes": "floats",
            "deterministic": "flag", "return_attn_probs": "flag",
        },
    ),
    "scaled_dot_product_attention": (
        {"query": floats(2, 2, 6, 16), "key": floats(2, 2, 6, 16), "value": floats(2, 2, 6, 16)},
        {
            "query": "tensor", "key": "tensor", "value": "tensor", "attn_mask": "nothing",
            "dropout_p": "default", "is_causal": "flag", "scale": "optional number", "enable_gqa": "flag",
        },
    ),
    "flash_attn_varlen_func": (
        {
            "q": floats(6, 2, 16), "k": floats(6, 2, 16), "v": floats(6, 2, 16),
            "cu_seqlens_q": ints(0, 2, 6), "cu_seqlens_k": ints(0, 2, 6), "max_seqlen_q": 4, "max_seqlen_k": 4,
        },
        {
            **TENSORS, **RULES, **UNSERVED, **HINTS, **INVARIANT,
            "cu_seqlens_q": "starts", "cu_seqlens_k": "starts", "max_seqlen_q": "optional size", "max_seqlen_k": "optional size",
            "seqused_q": "list", "seqused_k": "list", "attention_chunk": "size", "dropout_p": "default",
            "alibi_slopes": "floats", "s_aux": "floats", "deterministic": "flag",
            "return_attn_probs": "flag", "return_softmax_lse": "flag", "out": "tensor",
        },
    ),
    "flash_attn_varlen_qkvpacked_func": (
        {"qkv": floats(6, 3, 2, 16), "cu_seqlens": ints(0, 2, 6), "max_seqlen": 4},
        {**RULES, "qkv": "tensor", "dropout_p": "default", "deterministic": "flag"},
    ),
    "flash_attn_varlen_kvpacked_func": (
        {
            "q": floats(6, 2, 16), "kv": floats(6, 2, 2, 16), "cu_seqlens_q": ints(0, 2, 6),
            "cu_seqlens_k": ints(0, 2, 6), "max_seqlen_q": 4, "max_seqlen_k": 4,
        },
        {
            **RULES, "q": "tensor", "kv": "tensor", "cu_seqlens_q": "starts", "cu_seqlens_k": "starts",
            "max_seqlen_q": "optional size", "dropout_p": "default", "return_attn_probs": "flag",
        },
    ),
    "flash_attn_varlen_func, paged": (
        {
            "q": floats(6, 2, 16), "k": floats(4, 8, 2, 16), "v": floats(4, 8, 2, 16),
            "cu_seqlens_q": ints(0, 2, 6), "cu_seqlens_k": ints(0, 2, 6), "max_seqlen_q": 4, "max_seqlen_k": 4,
            "block_table": ints(0, 1, 2, 3).reshape(2, 2),
        },
        {**TENSORS, "cu_seqlens_q": "starts", "cu_seqlens_k": "starts", "block_table": "table"},
    ),
    "flash_attn_with_kvcache": (
        {
            "q": floats(2, 1, 2, 16), "k_cache": floats(2, 8, 2, 16), "v_cache": floats(2, 8, 2, 16),
            "cache_seqlens": ints(3, 5),
        },
        {
            **RULES, **UNSERVED, **HINTS, **INVARIANT,
            "q": "tensor", "k_cache": "tensor", "v_cache": "tensor", "cache_seqlens": "list",
            "cache_batch_idx": "list", "cache_leftpad": "list", "attention_chunk": "size",
            "alibi_slopes": "floats", "s_aux": "floats", "return_softmax_lse": "flag",
            "scheduler_metadata": "list",
        },
    ),
    "flash_attn_with_kvcache, packed": (
        {
            "q": floats(2, 2, 16), "k_cache": floats(2, 8, 2, 16), "v_cache": floats(2, 8, 2, 16),
            "cache_seqlens": 3, "cu_seqlens_q": ints(0, 1, 2), "max_seqlen_q": 1,
        },
        {"q": "tensor", "cu_seqlens_q": "starts", "max_seqlen_q": "optional size"},
    ),
    "flash_attn_with_kvcache, paged": (
        {
            "q": floats(2, 1, 2, 16), "k_cache": floats(4, 8, 2, 16), "v_cache": floats(4, 8, 2, 16),
            "cache_seqlens": ints(3, 5), "page_table": ints(0, 1, 2, 3).reshape(2, 2),
        },
        {"page_table": "table"},
    ),
    "flash_attn_with_kvcache, in blocks": (
        {
            "q": floats(2, 1, 2, 16), "k_cache": floats(4, 8, 2, 16), "v_cache": floats(4, 8, 2, 16),
            "cache_seqlens": ints(3, 5), "block_table": ints(0, 1, 2, 3).reshape(2, 2),
        },
        {"block_table": "table"},
    ),
    "flash_attn_with_kvcache, appending": (
        {
            "q": floats(2, 1, 2, 16), "k_cache": floats(4, 8, 2, 16), "v_cache": floats(4, 8, 2, 16),
            "k": floats(2, 1, 2, 16), "v": floats(2, 1, 2, 16), "cache_seqlens": ints(3, 5),
            "block_table": ints(0, 1, 2, 3).reshape(2, 2),
            "rotary_cos": floats(20, 4), "rotary_sin": floats(20, 4),
        },
        {
            "q": "tensor", "k_cache": "tensor", "v_cache": "tensor", "k": "tensor", "v": "tensor",
            "cache_seqlens": "list", "block_table": "table", "rotary_cos": "floats", "rotary_sin": "floats",
            "rotary_seqlens": "list", "rotary_interleaved": "flag", "causal": "flag", "window_size": "window",
            "attention_chunk": "size",
        },
    ),
    "flash_attn_combine": (
        {"out_partial": floats(3, 2, 6, 2, 16), "lse_partial": floats(3, 2, 6, 2)},
        {"out_partial": "tensor", "lse_partial": "tensor", "out": "tensor", "out_dtype": "dtype"},
    ),
    "flash_attn_merge": (
        {
            "out_a": floats(2, 6, 2, 16), "lse_a": floats(2, 2, 6),
            "out_b": floats(2, 6, 2, 16), "lse_b": floats(2, 2, 6),
        },
        {"out_a": "tensor", "lse_a": "tensor", "out_b": "tensor", "lse_b": "tensor"},
    ),
    "get_scheduler_metadata": (
        {
            "batch_size": 2, "max_seqlen_q": 1, "max_seqlen_k": 8, "num_heads_q": 2, "num_heads_kv": 2,
            "headdim": 16, "cache_seqlens": ints(3, 5),
        },
        {"cache_seqlens": "list", **HINTS},
    ),
}  # fmt: skip


class NoMemory:
    """Says that it speaks DLPack, and does not."""

    dtype, shape = np.dtype(np.float32), (2, 6, 2, 16)

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **arguments):
        raise BufferError("not today")


def odd_arrays(good):
    """Arrays in the shape of another that nobody can take."""
    good = np.zeros((2, 6, 2, 16), np.float32) if good is None else good
    yield "big-endian", good.astype(good.dtype.newbyteorder(">"))
    yield "objects", good.astype(object)
    yield "complex", good.astype(np.complex64)
    yield "64 bits", good.astype(np.float64)
    yield "booleans", good.astype(bool)
    yield "words", good.astype("U4")
    yield "masked", np.ma.masked_array(good, good > 0)
    yield "dimensions", np.zeros((1,) * 9 + good.shape, good.dtype)
    yield "no dimension", np.zeros((), good.dtype)
    yield "records", np.zeros(good.shape, [("a", good.dtype)])
    try:
        from ml_dtypes import float8_e4m3fnuz
    except ImportError:
        return
    yield "fp8", good.astype(float8_e4m3fnuz)


NO_TENSORS = [("number", 3), ("text", "x"), ("list", [1, 2]), ("object", object()), ("memory", NoMemory())]
NO_NUMBERS = [("text", "x"), ("complex", 1j), ("array", np.zeros(2)), ("object", object()), ("list", [1])]


def wrong(kind, good):
    """Values that are wrong where a kind of argument is expected, with names."""
    match kind:
        case "tensor" | "floats":
            flat = ("one dimension", np.zeros(16, np.float32))
            return [*NO_TENSORS, *odd_arrays(good), flat, ("integers", np.zeros((2, 6, 2, 16), np.int32))]
        case "factors":
            odd = [case for case in odd_arrays(good) if case[0] != "no dimension"]
            shapes = [("shape", np.ones(7, np.float32)), ("rows", np.ones((2, 3), np.float32))]
            return [*NO_TENSORS, *odd, *shapes, ("half", np.ones(2, np.float16))]
        case "list" | "starts" | "table":
            # A number of positions may stand for a list of them.
            odd = [case for case in NO_TENSORS if case[0] != "number"]
            sized = [("int64", np.zeros(2, np.int64)), ("entries", np.zeros(7, np.int32))]
            flat = [] if kind == "table" else [("rows", np.zeros((2, 1), np.int32))]
            return [*odd, *odd_arrays(good if good is not None else ints(1, 1)), *sized, *flat, ("empty", ints())]
        case "number" | "optional number":
            none = [] if kind == "optional number" else [("None", None), ("negative", -1.0), ("tiny", 1e-60)]
            far = [("nan", math.nan), ("infinite", -math.inf), ("large", 10**400), ("wide", 1e39)]
            return [*NO_NUMBERS, *none, *far]
        case "size" | "optional size":
            none = [] if kind == "optional size" else [("None", None)]
            return [*NO_NUMBERS, *none, ("fraction", 15.0), ("large", 2**70), ("negative", -3)]
        case "flag" | "optional flag":
            none = [] if kind == "optional flag" else [("None", None)]
            return [*none, ("two", 2), ("one", 1), ("text", "x"), ("array", np.zeros(2)), ("number", 1.0)]
        case "hint":
            return [*NO_NUMBERS, ("half", 0.5), ("None", None)]
        case "window":
            pairs = [(2**70, 3), (1.5, 2), ("x", 1), (1, -(2**70)), ([1], 2), (1, 2, 3), (1,), ()]
            others = [5, "ab", np.zeros(2), np.zeros(3, int), {1, 2}, object()]
            return [(f"{at}", value) for at, value in enumerate([*pairs, *others])]
        case "default":
            return [*NO_NUMBERS, ("half", 0.5), ("many", 7)]
        case "nothing":
            return [("array", np.zeros(2)), ("text", "x"), ("object", object()), ("false", False), ("zero", 0)]
        case "dtype":
            return [("text", "x"), ("64 bits", np.float64), ("number", 3), ("object", object())]
    raise AssertionError(kind)


def add_calls_of_8_bits():
    """Some of the calls with keys and values of 8 bits, where NumPy has them."""
    try:
        from ml_dtypes import float8_e4m3fn, float8_e5m2
    except ImportError:
        return
    for call in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        good = dict(CALLS[call][0])
        for name in ("k", "k_cache"):
            if name in good:
                good[name] = good[name].astype(float8_e4m3fn)
        for name in ("v", "v_cache"):
            if name in good:
                good[name] = good[name].astype(float8_e5m2)
        factors = {"k_descale": np.ones((2, 2), np.float32), "v_descale": np.ones(2, np.float32)}
        CALLS[f"{call}, 8 bits"] = ({**good, **factors}, FACTORS)


add_calls_of_8_bits()
CASES = [
    pytest.param(call, argument, value, id=f"{call}-{argument}-{name}")
    for call, (good, arguments) in CALLS.items()
    for argument, kind in arguments.items()
    for name, value in wrong(kind, good.get(argument))
    # PyTorch's function takes any number of leading dimensions.
    if (call, name) != ("scaled_dot_product_attention", "dimensions")
]


def function(call):
    return getattr(flashcore, call.partition(",")[0])


def refused(call, argument, value, give=lambda value: value):
    good = {name: give(good) for name, good in CALLS[call][0].items()}
    with pytest.raises(Exception) as caught:
        function(call)(**{**good, argument: give(value)})
    error = caught.value
    assert type(error) in REFUSALS, f"{type(error)}: {error}"
    words = str(error).replace("=", " ").replace(".", " ").split()
    assert argument in words, error


@pytest.mark.parametrize("call", CALLS)
def test_what_is_right_is_served(call):
    function(call)(**CALLS[call][0])


@pytest.mark.parametrize("call, argument, value", CASES)
def test_what_is_wrong_is_named(call, argument, value):
    refused(call, argument, value)


@pytest.mark.parametrize("call, argument, value", CASES)
def test_what_is_wrong_beside_tensors_of_pytorch_is_named(call, argument, value):
    torch = pytest.importorskip("torch")

    def give(value):
        """Arrays as tensors, if PyTorch can have them."""
        if type(value) is not np.ndarray:
            return value
        if value.dtype.name in ("float8_e4m3fn", "float8_e5m2"):
            return torch.from_numpy(value.view(np.uint8)).view(getattr(torch, value.dtype.name))
        try:
            return torch.from_numpy(value)
        except (TypeError, ValueError):
            return value

    refused(call, argument, value, give)


def test_tensors_of_pytorch_that_are_not_in_memory_are_refused():
    torch = pytest.importorskip("torch")
    q = torch.zeros(1, 4, 1, 8)
    for odd in [q.to_sparse(), q.to("meta"), q.to(torch.float8_e4m3fnuz), q.to(torch.complex64), q.bool()]:
        with pytest.raises(REFUSALS):
            flashcore.flash_attn_func(q, odd, q)
    with pytest.raises(
        TypeError, match="q has element type float8, expected float16, bfloat16, float32, float8_e4m3fn"
    ):
        flashcore.flash_attn_func(*[q.to(torch.float8_e4m3fnuz)] * 3)


def test_pages_are_called_what_the_caller_calls_them():
    good, _ = CALLS["flash_attn_with_kvcache, in blocks"]
    for name in ("page_table", "block_table"):
        tables = {"block_table": None, name: ints(0, 1, 2, 9).reshape(2, 2)}
        lengths = {"cache_seqlens": ints(3, 15)}
        with pytest.raises(ValueError, match=f"^{name} has 9 for sequence 1"):
            flashcore.flash_attn_with_kvcache(**{**good, **tables, **lengths})


def test_an_array_that_is_written_must_be_writable():
    parts, sums = floats(3, 2, 6, 2, 16), floats(3, 2, 6, 2)
    out = np.zeros((2, 6, 2, 16), np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only, expected an array that can be written"):
        flashcore.flash_attn_combine(parts, sums, out)


def test_lists_need_not_be_aligned():
    good, _ = CALLS["flash_attn_varlen_func"]
    expected = flashcore.flash_attn_varlen_func(**good)
    crooked = np.frombuffer(b"x" + ints(0, 2, 6).tobytes(), np.uint8)[1:].view(np.int32)
    assert not crooked.flags.aligned
    found = flashcore.flash_attn_varlen_func(**{**good, "cu_seqlens_q": crooked, "cu_seqlens_k": crooked})
    assert np.array_equal(found, expected)


def test_what_lies_backwards_is_named():
    parts, sums = floats(3, 2, 6, 2, 16), floats(3, 2, 6, 2)
    for axis in range(4):
        with pytest.raises(ValueError, match="out_partial has a negative stride"):
            flashcore.flash_attn_combine(np.flip(parts, axis), sums)
        with pytest.raises(ValueError, match="lse_partial has a negative stride"):
            flashcore.flash_attn_combine(parts, np.flip(sums, axis))
    with pytest.raises(ValueError, match="lse_b has a negative stride"):
        flashcore.flash_attn_merge(parts[0], sums[0].swapaxes(1, 2), parts[1], np.flip(sums[1].swapaxes(1, 2), 1))


@pytest.mark.parametrize(
    "name, first, last",
    [
        ("flash_attn_func", "qv", "batch_invariant"),
        ("flash_attn_varlen_func", "dropout_p", "batch_invariant"),
        ("flash_attn_with_kvcache", "alibi_slopes", "batch_invariant"),
    ],
)
def test_what_is_taken_by_keyword_is_shown(name, first, last):
    function = getattr(flashcore, name)
    shown = inspect.signature(function).parameters.values()
    by_keyword = [it for it in shown if it.kind is it.KEYWORD_ONLY]
    assert (by_keyword[0].name, by_keyword[-1].name) == (first, last)
    assert all(it.kind in (it.POSITIONAL_OR_KEYWORD, it.KEYWORD_ONLY) for it in shown)
    good, _ = CALLS[name]
    expected = function(**good)
    found = function(**good, **{it.name: it.default for it in by_keyword if it.name not in good})
    assert np.array_equal(found, expected)
    with pytest.raises(TypeError, match=f"^{name}.. got an unexpected keyword argument .querys."):
        function(**good, querys=1)
    # What is taken by keyword is not taken by its place.
    places = [it.default for it in shown if it.kind is not it.KEYWORD_ONLY]
    with pytest.raises(TypeError, match="positional arguments"):
        function(*places, None)
