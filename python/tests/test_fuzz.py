"""Every public function with arguments that nobody means well.

A call that is right is drawn, and some of its arguments become something else: another type, shape or
layout, numbers at the ends of their ranges, or no argument at all. Whatever they are, the call gives what
is computed here in float64, or is refused with an error that names an argument, and leaves its inputs as
they were. Every target runs for a share of ``FLASHCORE_FUZZ_SECONDS`` (less than one each, by default)
with the same draws each time; a longer time tries further ones. What once failed has a test of its own
below, or in the file of its subject.
"""

import faulthandler
import inspect
import math
import os
import random
import re
import sys
import time
import warnings
import zlib
from decimal import Decimal
from fractions import Fraction

import flashcore
import numpy as np
import pytest
from flashcore import BlockMask
from test_serving_numpy import paged, reference, starts

try:
    import torch

    # PyTorch's compiler: an operation on `meta` imports it, which takes seconds that are not a call's of ours.
    import torch._dynamo
except ModuleNotFoundError:
    torch = None
try:
    import ml_dtypes
except ModuleNotFoundError:
    ml_dtypes = None

REFUSALS = (TypeError, ValueError, NotImplementedError, MemoryError)

# Seconds of a target where the environment does not say, and the longest that one call may take.
SECONDS, SLOW = 0.5, 5.0


class Dice:
    """Choices and numbers that are the same for the same name."""

    def __init__(self, name):
        self.choices = random.Random(name)
        self.numbers = np.random.default_rng(zlib.crc32(name.encode()))

    def pick(self, *options):
        return self.choices.choice(options)

    def chance(self, share):
        return self.choices.random() < share

    def floats(self, *shape, dtype=np.float32):
        return self.numbers.standard_normal(shape).astype(dtype)


# ---- calls that are right ------------------------------------------------------------------------------


def sizes(dice):
    """Query heads, key heads, and the head dims of keys and of values."""
    heads = dice.pick(1, 1, 2, 3)
    dims = (8, 16, 16, 24, 64, 1, 7, 30, 256)
    return heads * dice.pick(1, 1, 2, 3), heads, dice.pick(*dims), dice.pick(*dims, 264)


def element(dice):
    narrow = [] if ml_dtypes is None else [ml_dtypes.bfloat16]
    return dice.pick(np.float32, np.float32, np.float32, np.float16, *narrow)


def rules(dice, heads, chunks=True):
    """Some of the arguments that say which scores count, and how much."""
    drawn = {
        "causal": lambda: True,
        "window_size": lambda: dice.pick((3, 0), (-1, 2), [5, 1], (0, 0), (None, 4), None, (2**31 - 1, 0)),
        "softcap": lambda: dice.pick(2.0, 30, 0.5),
        "softmax_scale": lambda: dice.pick(0.3, 1, 2.0, 0.01),
        "alibi_slopes": lambda: np.abs(dice.floats(heads)),
    }
    if chunks:
        drawn |= {"s_aux": lambda: dice.floats(heads), "attention_chunk": lambda: dice.pick(1, 4, 1000)}
    return {name: draw() for name, draw in drawn.items() if dice.chance(0.15)}


def batch(dice):
    heads, key_heads, dim, value_dim = sizes(dice)
    count, queries, keys, dtype = dice.pick(1, 2, 3), dice.pick(0, 1, 5, 17), dice.pick(0, 1, 6, 33), element(dice)
    good = {
        "q": dice.floats(count, queries, heads, dim, dtype=dtype),
        "k": dice.floats(count, keys, key_heads, dim, dtype=dtype),
        "v": dice.floats(count, keys, key_heads, value_dim, dtype=dtype),
        **rules(dice, heads),
    }
    if ml_dtypes is not None and dice.chance(0.15):
        for name in ("k", "v"):
            good[name] = good[name].astype(dice.pick(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
            shape = dice.pick((), (key_heads,), (count, key_heads), (count, keys, key_heads))
            good[f"{name}_descale"] = np.abs(dice.floats(*shape)) + np.float32(0.1)
    return good


def packed_batch(dice, names):
    heads, key_heads, dim, _ = sizes(dice)
    count, queries, keys, dtype = dice.pick(1, 2), dice.pick(0, 1, 9), dice.pick(0, 1, 6), element(dice)
    good = rules(dice, heads, chunks=False)
    if "qkv" in names:
        return {"qkv": dice.floats(count, queries, 3, heads, dim, dtype=dtype), **good}
    q, kv = (
        dice.floats(count, queries, heads, dim, dtype=dtype),
        dice.floats(count, keys, 2, key_heads, dim, dtype=dtype),
    )
    return {"q": q, "kv": kv, **good}


def ragged(dice):
    heads, key_heads, dim, value_dim = sizes(dice)
    count, dtype = dice.pick(0, 1, 2, 3), element(dice)
    queries, keys = ([dice.pick(0, 1, 4, 9) for _ in range(count)] for _ in range(2))
    return {
        "q": dice.floats(sum(queries), heads, dim, dtype=dtype),
        "k": dice.floats(sum(keys), key_heads, dim, dtype=dtype),
        "v": dice.floats(sum(keys), key_heads, value_dim, dtype=dtype),
        "cu_seqlens_q": starts(*queries), "cu_seqlens_k": starts(*keys),
        "max_seqlen_q": dice.pick(None, max(queries, default=0), 100),
        "max_seqlen_k": dice.pick(None, max(keys, default=0), 100),
        **rules(dice, heads),
    }  # fmt: skip


def packed_ragged(dice, names):
    good = ragged(dice)
    good.pop("s_aux", None), good.pop("attention_chunk", None)
    k = good.pop("k")
    good.pop("v")
    good["kv"] = np.stack([k, k[::-1]], axis=1)
    if "qkv" in names:
        qkv = np.stack([good.pop("q")] * 3, axis=1)
        good = {"qkv": qkv, "cu_seqlens": good.pop("cu_seqlens_q"), "max_seqlen": good.pop("max_seqlen_q"), **good}
        for name in ("kv", "cu_seqlens_k", "max_seqlen_k"):
            del good[name]
    return good


def cached(dice):
    heads, key_heads, dim, value_dim = sizes(dice)
    count, room, dtype = dice.pick(1, 2, 3), 16, element(dice)
    new, queries = dice.pick(0, 1, 3), dice.pick(1, 2, 5)
    lengths = [dice.pick(0, 1, 7, room - new) for _ in range(count)]
    keys, values = ([dice.floats(room, key_heads, d, dtype=dtype) for _ in range(count)] for d in (dim, value_dim))
    good = {"q": dice.floats(count, queries, heads, dim, dtype=dtype)}
    if dice.chance(0.3):
        (good["k_cache"], table), (good["v_cache"], _) = paged(keys, 4), paged(values, 4)
        good[dice.pick("page_table", "block_table")] = table
        good["k_cache"], good["v_cache"] = (np.nan_to_num(good[name]) for name in ("k_cache", "v_cache"))
    else:
        good["k_cache"], good["v_cache"] = np.stack(keys), np.stack(values)
        if dice.chance(0.3):
            good["cache_batch_idx"] = dice.numbers.permutation(count).astype(np.int32)
    good["cache_seqlens"] = np.array(lengths, np.int32)
    if dice.chance(0.3):
        good["cache_leftpad"] = np.array([dice.pick(0, length) for length in lengths], np.int32)
    if dice.chance(0.5):
        good["k"] = dice.floats(count, new, key_heads, dim, dtype=dtype)
        good["v"] = dice.floats(count, new, key_heads, value_dim, dtype=dtype)
        if dim >= 2 and dice.chance(0.3):
            good |= {name: dice.floats(40, dim // 2, dtype=dtype) for name in ("rotary_cos", "rotary_sin")}
            good["rotary_interleaved"] = dice.chance(0.5)
    if dice.chance(0.2):
        good["return_softmax_lse"] = True
    return good | rules(dice, heads)


def parts(dice):
    shape = (dice.pick(1, 2, 5), *dice.pick((), (2,)), dice.pick(0, 1, 6), dice.pick(1, 3), dice.pick(1, 8, 16, 264))
    good = {"out_partial": dice.floats(*shape, dtype=element(dice)), "lse_partial": dice.floats(*shape[:-1])}
    if dice.chance(0.2):
        good["out"] = np.zeros(shape[1:], dice.pick(np.float32, np.float16))
    elif dice.chance(0.2):
        good["out_dtype"] = dice.pick(np.float16, np.float32, "float16")
    return good


def halves(dice):
    queries, heads, dim, dtype = dice.pick(0, 1, 6), dice.pick(1, 3), dice.pick(8, 16, 64), element(dice)
    count = dice.pick((), (2,))
    good = {}
    for name in ("a", "b"):
        good[f"out_{name}"] = dice.floats(*count, queries, heads, dim, dtype=dtype)
        good[f"lse_{name}"] = dice.floats(*count, heads, queries)
    return good


def heads_first(dice, grouped=True):
    heads, key_heads, dim, value_dim = sizes(dice)
    key_heads = key_heads if grouped else heads
    count, queries, keys, dtype = dice.pick(1, 2), dice.pick(0, 1, 9), dice.pick(0, 1, 6, 20), element(dice)
    good = {
        "query": dice.floats(count, heads, queries, dim, dtype=dtype),
        "key": dice.floats(count, key_heads, keys, dim, dtype=dtype),
        "value": dice.floats(count, key_heads, keys, value_dim, dtype=dtype),
    }
    if heads != key_heads:
        good["enable_gqa"] = True
    if dice.chance(0.2):
        good["scale"] = dice.pick(0.3, 2.0, 1)
    return good


def dot_product(dice):
    good = heads_first(dice)
    if dice.chance(0.3):
        good["is_causal"] = True
    elif dice.chance(0.4):
        (count, heads, queries, _), keys = good["query"].shape, good["key"].shape[2]
        shape = dice.pick((queries, keys), (count, heads, queries, keys), (1, keys), (), (count, 1, 1, keys))
        mask = dice.numbers.standard_normal(shape)
        good["attn_mask"] = np.asarray(mask > 0) if dice.chance(0.5) else np.asarray(mask, np.float32)
    return good


def near_diagonal(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 4 + h)


def odd_keys(b, h, q_idx, kv_idx):
    return (kv_idx + b) % 2 == 1


def biased(score, b, h, q_idx, kv_idx):
    return score * 0.5 - abs(q_idx - kv_idx) * 0.25 * (h + 1)


def shifted(score, b, h, q_idx, kv_idx):
    return score + 1.5


def flexible(dice):
    good = heads_first(dice)
    if dice.chance(0.4):
        good["score_mod"] = dice.pick(biased, shifted)
    if dice.chance(0.4):
        queries, keys = good["query"].shape[2], good["key"].shape[2]
        good["block_mask"] = flashcore.create_block_mask(dice.pick(near_diagonal, odd_keys), None, None, queries, keys)
    if dice.chance(0.2):
        good["return_lse"] = True
    return good


def mask_of_function(dice):
    return {
        "mask_mod": dice.pick(near_diagonal, odd_keys), "B": dice.pick(None, 1, 2), "H": dice.pick(None, 1, 2),
        "Q_LEN": dice.pick(0, 1, 70), "KV_LEN": dice.pick(0, 1, 70), "BLOCK_SIZE": dice.pick(128, (16, 32), [7, 9], 1),
    }  # fmt: skip


def mask_of_pairs(dice):
    good = mask_of_function(dice)
    return {("mod_fn" if name == "mask_mod" else name): it for name, it in good.items() if name != "BLOCK_SIZE"}


def mask_of_lists(dice):
    rows, columns, room = dice.pick(1, 3), dice.pick(1, 4), 2
    indices = dice.numbers.integers(0, columns, (1, 2, rows, room)).astype(np.int32)
    good = {"kv_num_blocks": dice.numbers.integers(0, room + 1, (1, 2, rows)).astype(np.int32), "kv_indices": indices}
    good |= {"BLOCK_SIZE": dice.pick(16, (16, 8), 1), "mask_mod": dice.pick(None, near_diagonal)}
    high, wide = (good["BLOCK_SIZE"],) * 2 if isinstance(good["BLOCK_SIZE"], int) else good["BLOCK_SIZE"]
    return good | {"seq_lengths": (rows * high, columns * wide)}


def mask_of_rows(dice):
    lengths = [dice.pick(0, 1, 2) for _ in range(dice.pick(1, 3))]
    good = {"indptr": starts(*lengths), "indices": dice.numbers.integers(0, 3, sum(lengths)).astype(np.int32)}
    good |= {"block_size": (4, 8), "seq_lengths": (4 * len(lengths), 24)}
    if dice.chance(0.3):
        good["mask"] = dice.numbers.standard_normal((sum(lengths), 4, 8)) > 0
    return good


def to_eight_bits(dice):
    heads = dice.pick(1, 2, 4)
    good = {"x": dice.floats(*dice.pick((), (2,)), dice.pick(0, 1, 5), heads, dice.pick(1, 8, 16), dtype=element(dice))}
    good |= {"dtype": dice.pick("int8", "float8_e4m3fn", "float8_e5m2"), "per": dice.pick("tensor", "head", "token")}
    if good["per"] != "token" and dice.chance(0.2):
        good["kv_heads"] = dice.pick(1, heads)
    return good


def pair_to_eight_bits(dice):
    good = to_eight_bits(dice)
    good.pop("kv_heads", None)
    good["k"] = good.pop("x")
    return good | {"v": dice.floats(*good["k"].shape)}


def from_eight_bits(dice):
    good = to_eight_bits(dice)
    x, descale = flashcore.quantize(**good)
    return {"x": x, "descale": descale, "dtype": dice.pick(None, np.float32, np.float16)}


def planned(dice):
    count = dice.pick(0, 1, 3)
    return {
        "batch_size": count, "max_seqlen_q": 1, "max_seqlen_k": 64, "num_heads_q": 2, "num_heads_kv": 2, "headdim": 16,
        "cache_seqlens": np.arange(count, dtype=np.int32),
    }  # fmt: skip


# ---- what is given instead -----------------------------------------------------------------------------


class NoMemory:
    """Has the looks of a tensor, and no memory."""

    shape, dtype = (2, 5, 2, 16), np.dtype(np.float32)


class BadCapsule:
    """Says that it speaks DLPack, and gives something else."""

    shape, dtype = (2, 5, 2, 16), np.dtype(np.float32)

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **arguments):
        return 3


JUNK = [
    *(lambda value=value: value for value in (
        None, True, False, 0, 1, -1, 2, 3, 7, 255, 2**31 - 1, 2**31, -(2**31), 2**63, 2**64, 2**70, -(2**70), 10**400,
        0.0, -0.0, 0.5, 15.0, -1.0, 1e-45, 1e39, 1e308, math.nan, math.inf, -math.inf, 1j, "x", "", "2", "float32", b"x",
        (), (1,), (1, 2), (1, 2, 3), (None, None), (2**70, 0), (math.nan, 1), ("x", 1), [1, 2], [[1, 2], [3, 4]], range(2),
        Fraction(1, 2), Decimal("NaN"), int, len, Ellipsis, NotImplemented,
    )),
    *(lambda value=value: value.copy() for value in (
        np.zeros(2), np.zeros((), np.int32), np.ones(3, np.int32), np.zeros((0,), np.int32), np.ones((2, 5, 2, 16), np.float32),
    )),
    dict, set, object, NoMemory, BadCapsule,
    lambda: np.float32(0.5), lambda: np.int64(3), lambda: np.bool_(True), lambda: np.float64("nan"),
    lambda: np.ma.masked_array(np.zeros((2, 5, 2, 16), np.float32), True), lambda: np.matrix([[1.0, 2.0]]),
    lambda: memoryview(b"1234"), lambda: np.dtype(np.float16), lambda: lambda *at: None, lambda: lambda: True,
    lambda: lambda b, h, q_idx, kv_idx: 0.5, lambda: lambda *at: at[-1] < 3, lambda: lambda score, *at: score / 0,
    lambda: lambda score, *at: "x",
]  # fmt: skip
if torch is not None:
    JUNK += [
        lambda: torch.tensor(2), lambda: torch.tensor(0.5), lambda: torch.zeros(0), lambda: torch.float16,
        lambda: torch.device("cpu"), lambda: torch.ones(2, 5, 2, 16), lambda: torch.tensor(True),
    ]  # fmt: skip

DTYPES = "f2 f4 f8 i1 u1 i2 i4 i8 u4 ? c8 O U4 >f4 >i4 m8[s] V4 g".split()


def of_another_type(dice, array):
    small = [] if ml_dtypes is None else "bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz int4".split()
    name = dice.pick(*DTYPES, *small)
    dtype = getattr(ml_dtypes, name) if name in small else np.dtype(name)
    if array.dtype.kind in "OUV":
        return array
    with np.errstate(all="ignore"):
        return np.nan_to_num(array.astype(np.float64)).astype(dtype)


def of_another_shape(dice, array):
    axis = dice.choices.randrange(max(array.ndim, 1))
    if array.ndim == 0:
        return array.reshape(dice.pick((1,), (1, 1)))
    match dice.pick("drop", "add", "empty", "longer", "shorter", "flat", "swap", "one", "none", "many"):
        case "drop":
            return array[(slice(None),) * axis + (0,)] if array.shape[axis] else array.reshape(-1)
        case "add":
            return np.expand_dims(array, axis)
        case "empty":
            return array[(slice(None),) * axis + (slice(0),)]
        case "longer":
            return np.concatenate([array, array[(slice(None),) * axis + (slice(1),)]], axis)
        case "shorter":
            return array[(slice(None),) * axis + (slice(1, None),)]
        case "flat":
            return array.reshape(-1)
        case "swap":
            return array.swapaxes(axis, dice.choices.randrange(array.ndim))
        case "one":
            return array[(slice(None),) * axis + (slice(1),)]
        case "none":
            return array.reshape(-1)[:1].reshape(()) if array.size else array
        case "many":
            return array.reshape((1,) * dice.pick(1, 3, 9, 30) + array.shape)


def of_another_layout(dice, array):
    """The same numbers in other places, but for those that lie in one."""
    if array.ndim == 0:
        return array
    axis = dice.choices.randrange(array.ndim)
    match dice.pick("backwards", "gaps", "repeated", "crooked", "columns", "inside", "read-only"):
        case "backwards":
            return np.flip(np.flip(array, axis).copy(), axis)
        case "gaps":
            return np.repeat(array, 2, axis)[(slice(None),) * axis + (slice(None, None, 2),)]
        case "repeated":
            return np.broadcast_to(array[(slice(None),) * axis + (slice(1),)], array.shape) if array.size else array
        case "crooked" if array.dtype.kind != "O":
            bytes = np.zeros(array.nbytes + 1, np.uint8)
            crooked = bytes[1:].view(array.dtype).reshape(array.shape)
            crooked[...] = array
            return crooked
        case "columns":
            return np.asfortranarray(array)
        case "inside" if array.size < 2**20 and array.ndim < 8:
            room = np.zeros([size + 3 for size in array.shape], array.dtype)
            inside = room[tuple(slice(1, size + 1) for size in array.shape)]
            inside[...] = array
            return inside
        case "read-only":
            array = array.copy()
            array.flags.writeable = False
    return array


def of_other_numbers(dice, array):
    array = array.copy()
    if not array.size or array.dtype.kind in "OUVm":
        return array
    whole = array.dtype.kind in "iu"
    number = dice.pick(
        *((-1, 0, 1, 3, 127, 2**31 - 1, -(2**31)) if whole else (math.nan, math.inf, -math.inf, 0, 1e4, 1e30))
    )
    if whole and not np.iinfo(array.dtype).min <= number <= np.iinfo(array.dtype).max:
        number = 1
    with np.errstate(all="ignore"):
        array.reshape(-1)[dice.choices.randrange(array.size) if dice.chance(0.7) else slice(None)] = number
    return array


def more_than_memory(dice, array):
    """One element again and again. Only what has to be copied, or answered row by row, is so large: a call may be long."""
    if not array.size:
        return array
    # Beyond any address space, whatever the other sizes are: some systems promise memory that they do not have.
    count = 2**55 // math.prod(array.shape[1:])
    return np.broadcast_to(array[(slice(1),) * array.ndim], (count, *array.shape[1:]))


def of_another_library(dice, array):
    options = [array.tolist, lambda: np.ma.masked_array(array, False), lambda: Proxy(array)]
    if array.dtype.kind in "iuf" and array.dtype.isbuiltin == 1:
        options.append(lambda: memoryview(array))
    options += [lambda: array.view(np.recarray), lambda: tuple(array)] if array.ndim else []
    return dice.pick(*options)()


class Proxy:
    """An array of a library that speaks DLPack and nothing else."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **arguments):
        return self.array.__dlpack__(**arguments)


def of_pytorch(dice, tensor):
    """A tensor of PyTorch that is not simply memory, or not as simply."""

    def without_memory():
        tensor.untyped_storage().resize_(0)
        return tensor

    options = [
        tensor.to_sparse, lambda: tensor.to("meta"), lambda: torch._neg_view(tensor.float()),
        lambda: torch.complex(tensor, tensor).conj().imag, lambda: torch._efficientzerotensor(tensor.shape),
        tensor.requires_grad_, lambda: torch.nn.Parameter(tensor), tensor.to_mkldnn, without_memory,
        lambda: torch.quantize_per_tensor(tensor.float(), 0.1, 3, torch.qint8), tensor.clone().share_memory_,
        lambda: torch.nested.nested_tensor(list(tensor)), lambda: tensor[..., None].expand(*tensor.shape, 2)[..., 0],
        lambda: tensor.to(dice.pick(torch.float64, torch.bfloat16, torch.complex32, torch.uint16, torch.bool)),
    ]  # fmt: skip
    return dice.pick(*options)()


def changed(dice, function, good, huge):
    """Some arguments as something else; the names of those."""
    given, names = dict(good), []
    parameters = list(inspect.signature(function).parameters)
    for _ in range(dice.pick(0, 1, 1, 1, 2, 3)):
        # What is larger than memory stays as it is.
        arrays = [name for name, it in given.items() if type(it) is np.ndarray and it.size < 2**30]
        if arrays and dice.chance(0.65):
            name = dice.pick(*arrays)
            ways = [of_another_type, of_another_shape, of_another_layout, of_other_numbers, of_another_library]
            way = dice.pick(*ways, of_another_layout, *([more_than_memory] if name in huge else []))
            given[name] = way(dice, given[name])
        else:
            name = dice.pick(*parameters)
            given[name] = dice.pick(*JUNK)()
        names.append(name)
    return given, names


def as_tensors(dice, given):
    """Arrays as tensors of PyTorch, where it takes them."""

    def tensor(array):
        if type(array) is not np.ndarray:
            return array
        name = array.dtype.name
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of arrays that cannot be written
                if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
                    bits = array.view(np.int16 if name == "bfloat16" else np.uint8)
                    return torch.from_numpy(bits).view(getattr(torch, name))
                return torch.from_numpy(array)
        except (TypeError, ValueError):
            return array

    given = {name: tensor(value) for name, value in given.items()}
    tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
    if tensors and dice.chance(0.3):
        name = dice.pick(*tensors)
        try:
            given[name] = of_pytorch(dice, given[name])
        except (RuntimeError, NotImplementedError, TypeError):
            pass  # nothing that PyTorch makes of these
    return given


# ---- what must come out ----------------------------------------------------------------------------------


def f64(x):
    """A tensor of any kind in float64."""
    if torch is not None and isinstance(x, torch.Tensor):
        x = x.dequantize() if x.is_quantized else x.detach()
        return x.to_dense().resolve_neg().to(torch.float64).numpy()
    if isinstance(x, Written):
        return x.numbers
    if isinstance(x, Proxy):
        x = x.array
    return np.asarray(x).astype(np.float64)


class Written:
    """A tensor as it was before it was written."""

    def __init__(self, x):
        self.numbers, self.dtype, self.shape = f64(x).copy(), x.dtype, x.shape


def is_number(x):
    """Whether it has numbers in memory."""
    if torch is not None and isinstance(x, torch.Tensor):
        return (
            x.layout is torch.strided
            and not (x.is_meta or x.is_nested or x.is_quantized)
            and x.untyped_storage().nbytes() > 0
        )
    return type(x) is np.ndarray and x.dtype.kind in "iuf" and x.dtype.isbuiltin == 1


def is_meta(x):
    """Whether it has no numbers."""
    return torch is not None and isinstance(x, torch.Tensor) and x.is_meta


def heads_apart(a):
    """Queries, keys and values as (batch, length, heads, dim), whichever way a function takes them."""
    if "qkv" in a:
        return np.moveaxis(f64(a["qkv"]), -3, 0)
    if "kv" in a:
        return f64(a["q"]), *np.moveaxis(f64(a["kv"]), -3, 0)
    if "query" in a:
        return tuple(f64(a[name]).swapaxes(1, 2) for name in ("query", "key", "value"))
    return tuple(f64(a[name]) for name in ("q", "k", "v"))


def described(x, factor):
    """Numbers with their factor: one, or one of each key head, of each sequence and head, of each token and head."""
    if factor is None:
        return x
    factor = f64(factor)
    if factor.ndim and factor.shape != x.shape[:-1]:
        factor = np.repeat(factor, x.shape[2] // factor.shape[-1], -1)
        factor = factor[:, None] if factor.ndim == 2 else factor
    return x * (factor[..., None] if factor.ndim else factor)


def of_sequence(a, q, k, v, at):
    """The reference for one sequence of a call."""
    window = a.get("window_size", (-1, -1))
    window = (-1, -1) if window is None else tuple(window)
    slopes, sinks = (None if a.get(name) is None else f64(a[name]) for name in ("alibi_slopes", "s_aux"))
    sinks = sinks if a.get("learnable_sink") is None else f64(a["learnable_sink"])
    scale = a.get("softmax_scale")
    return reference(
        q * (q.shape[-1] ** -0.5 if scale is None else float(scale)), k, v,
        causal=bool(a.get("causal", False)), window=tuple(-1 if it is None else int(it) for it in window),
        chunk=int(a.get("attention_chunk", 0)), softcap=float(a.get("softcap", 0.0)),
        slopes=slopes if slopes is None or slopes.ndim == 1 else slopes[at], sinks=sinks, scale=1.0,
    )  # fmt: skip


def batch_answer(a):
    q, k, v = heads_apart(a)
    q, k, v = (described(x, a.get(f"{name}_descale")) for name, x in zip("qkv", (q, k, v)))
    answers = [of_sequence(a, q[at], k[at], v[at], at) for at in range(len(q))]
    return [
        np.stack(it) if it else np.zeros(shape)
        for it, shape in zip(
            zip(*answers) if answers else ((), ()), ((0, *q.shape[1:3], v.shape[-1]), (0, q.shape[2], q.shape[1]))
        )
    ]


def ragged_answer(a):
    if any(
        a.get(name) is not None
        for name in ("seqused_q", "seqused_k", "block_table", "k_descale", "v_descale", "q_descale")
    ):
        return None
    names = ("cu_seqlens", "cu_seqlens") if "cu_seqlens" in a else ("cu_seqlens_q", "cu_seqlens_k")
    if any(a.get(name) is None for name in names):
        return None
    q, k, v = heads_apart(a)
    cu_q, cu_k = (f64(a[name]).astype(int) for name in names)
    output, lse = np.full((*q.shape[:2], v.shape[-1]), np.nan), np.full(q.shape[1::-1], np.nan)
    for at in range(len(cu_q) - 1):
        mine, theirs = slice(cu_q[at], cu_q[at + 1]), slice(cu_k[at], cu_k[at + 1])
        output[mine], lse[:, mine] = of_sequence(a, q[mine], k[theirs], v[theirs], at)
    return [output, lse]


def cached_answer(a):
    if a.get("k") is not None and any("8" in str(getattr(a[name], "dtype", "")) for name in ("k_cache", "v_cache")):
        return None  # what is new is rounded
    unknown = ("rotary_cos", "k_descale", "v_descale", "q_descale", "cu_seqlens_q", "cu_seqlens_k_new")
    if any(a.get(name) is not None for name in unknown):
        return None
    q, k_cache, v_cache = (f64(a[name]) for name in ("q", "k_cache", "v_cache"))
    table = a.get("block_table") if a.get("page_table") is None else a["page_table"]
    entries = a.get("cache_batch_idx")
    rows = np.arange(len(q)) if entries is None else f64(entries).astype(int)
    if table is not None:
        # What is beyond a sequence may be anything.
        table = np.clip(f64(table).astype(int), 0, len(k_cache) - 1)
        room = table.shape[1] * k_cache.shape[1]
        k_cache, v_cache = (x[table].reshape(len(table), room, *x.shape[2:]) for x in (k_cache, v_cache))
    if a.get("k") is not None and len(np.unique(rows if table is None else table)) < len(
        rows if table is None else np.ravel(table)
    ):
        return None  # several write to one place
    outputs, sums = [], []
    for at in range(len(q)):
        lengths = a.get("cache_seqlens")
        length = k_cache.shape[1] if lengths is None else int(np.broadcast_to(f64(lengths), len(q))[at])
        keys, values = k_cache[rows[at], :length], v_cache[rows[at], :length]
        if a.get("k") is not None:
            # The caches were written: what is new stands there, too.
            keys, values = np.concatenate([keys, f64(a["k"])[at]]), np.concatenate([values, f64(a["v"])[at]])
        first = 0 if a.get("cache_leftpad") is None else int(f64(a["cache_leftpad"])[at])
        output, lse = of_sequence(a, q[at], keys[first:], values[first:], at)
        outputs.append(output), sums.append(lse)
    return [np.stack(outputs), np.stack(sums)] if outputs else None


def combined_answer(a):
    outputs, sums = f64(a["out_partial"]), f64(a["lse_partial"])
    if not outputs.size:
        return [outputs[0], sums[0]] if len(outputs) else None
    lse = np.logaddexp.reduce(sums, axis=0)
    # A part of infinite weight leaves nothing to compare: infinity over infinity.
    lse = np.where(np.isposinf(lse), np.nan, lse)
    return [(outputs * np.exp(sums - lse)[..., None]).sum(axis=0), lse]


def merged_answer(a):
    outputs = np.stack([f64(a["out_a"]), f64(a["out_b"])])
    sums = np.stack([f64(a["lse_a"]), f64(a["lse_b"])])
    output, lse = combined_answer({"out_partial": outputs, "lse_partial": sums.swapaxes(-1, -2)})
    return [output, lse.swapaxes(-1, -2)]


def heads_first_answer(a):
    q, k, v = (f64(a[name]) for name in ("query", "key", "value"))
    dimensions = max(x.ndim for x in (q, k, v))
    # Leading dimensions are broadcast.
    q, k, v = (x[(None,) * (max(dimensions, 4) - x.ndim)] for x in (q, k, v))
    if a.get("enable_gqa", False):
        k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    scale = a.get("scale")
    scores = q @ k.swapaxes(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else float(scale))
    at = np.ogrid[tuple(slice(size) for size in scores.shape)]
    if a.get("score_mod") is not None:
        scores = np.broadcast_to(a["score_mod"](scores, *at), scores.shape).astype(np.float64)
    seen = np.ones(scores.shape, bool)
    if a.get("block_mask") is not None:
        seen &= np.asarray(a["block_mask"].mask_mod(*at), bool)
    if a.get("is_causal", False):
        seen &= at[-2] >= at[-1]
    mask = a.get("attn_mask")
    if mask is not None:
        numbers = f64(mask)
        seen, scores = (seen & (numbers != 0), scores) if "bool" in str(mask.dtype) else (seen, scores + numbers)
    scores = np.where(seen, scores, -np.inf)
    top = np.maximum(scores.max(-1, initial=-np.inf), -1e300)
    weights = np.exp(scores - top[..., None])
    total = weights.sum(-1)
    with np.errstate(divide="ignore"):
        answers = [weights / np.where(total, total, 1)[..., None] @ v, np.log(total) + top]
    return [answer[(0,) * (max(dimensions, 4) - dimensions)] for answer in answers]


def dense_mask(mask):
    """Which pairs a mask sees."""
    at = np.ogrid[tuple(slice(size) for size in mask.shape)]
    return np.broadcast_to(np.asarray(mask.mask_mod(*at), bool), mask.shape)


def masks_alike(found, a):
    """A mask keeps what it was asked for, and sees what its function sees."""
    mask_mod, lengths = a["mask_mod"], (int(a["Q_LEN"]), int(a["KV_LEN"]))
    assert found.shape == (*(1 if a[name] is None else int(a[name]) for name in ("B", "H")), *lengths)
    assert found.seq_lengths == lengths and found.mask_mod is mask_mod


def pairs_alike(found, a):
    at = np.ogrid[tuple(slice(size) for size in found.shape)]
    assert found.shape == tuple(1 if a[name] is None else int(a[name]) for name in ("B", "H", "Q_LEN", "KV_LEN"))
    assert np.array_equal(found.numpy(), np.broadcast_to(a["mod_fn"](*at), found.shape).astype(bool))


def lists_alike(found, a):
    if is_meta(a["kv_indices"]):
        return
    size = a["BLOCK_SIZE"]
    high, wide = (size, size) if isinstance(size, int) else size
    seen = np.zeros(found.shape, bool)
    kinds = [("kv", False)] + ([("full_kv", True)] if a.get("full_kv_num_blocks") is not None else [])
    at = np.ogrid[tuple(slice(length) for length in found.shape)]
    inside = True if a.get("mask_mod") is None else np.broadcast_to(a["mask_mod"](*at), found.shape)
    for name, whole in kinds:
        counts, indices = (f64(a[f"{name}_{it}"]).astype(int) for it in ("num_blocks", "indices"))
        for place in np.ndindex(*counts.shape):
            for column in indices[place][: max(counts[place], 0)]:
                there = (
                    *place[:2],
                    slice(place[2] * high, (place[2] + 1) * high),
                    slice(column * wide, (column + 1) * wide),
                )
                seen[there] |= True if whole or inside is True else inside[there]
    assert np.array_equal(dense_mask(found), seen)


def rows_alike(found, a):
    if is_meta(a["indices"]):
        return
    size = a["block_size"]
    high, wide = (size, size) if isinstance(size, int) else size
    indptr, indices = f64(a["indptr"]).astype(int), f64(a["indices"]).astype(int)
    seen = np.zeros(found.shape, bool)
    for row in range(len(indptr) - 1):
        for entry in range(indptr[row], indptr[row + 1]):
            there = (
                0,
                0,
                slice(row * high, (row + 1) * high),
                slice(indices[entry] * wide, (indices[entry] + 1) * wide),
            )
            # Of two entries for one block the last counts.
            seen[there] = (
                True if a.get("mask") is None else f64(a["mask"])[entry][: seen[there].shape[0], : seen[there].shape[1]]
            )
    assert np.array_equal(dense_mask(found), seen)


def eight_bits_alike(found, a):
    if is_meta(found[0]):
        return
    x, (small, descale) = f64(a["x"]), found
    assert tuple(small.shape) == x.shape and "8" in str(small.dtype)
    shared = a.get("per") == "token" and a.get("kv_heads") is not None
    if np.isfinite(x.astype(np.float32)).all() and not shared:
        largest = np.abs(x).max(initial=0)
        steps = {"int8": 254, "float8_e4m3fn": 16, "float8_e5m2": 8}[
            re.findall(r"int8|float8_e\dm\d\w*", str(small.dtype))[0]
        ]
        assert np.abs(f64(flashcore.dequantize(small, descale)) - x).max(initial=0) <= 1.01 * largest / steps + 1e-11


def pairs_of_eight_bits_alike(found, a):
    for small, descale, name in ((found[0], found[2], "k"), (found[1], found[3], "v")):
        eight_bits_alike((small, descale), {"x": a[name]})


def wide_alike(found, a):
    assert tuple(found.shape) == tuple(a["x"].shape)


def planned_alike(found, a):
    if is_meta(found):
        return
    assert tuple(found.shape) == (int(a["batch_size"]),) and not f64(found).any()


TENSORS = (np.ndarray, Proxy, Written) if torch is None else (np.ndarray, Proxy, Written, torch.Tensor)
# What may be anything, or is only written.
UNUSED = ("scheduler_metadata", "fa_version", "kernel_options", "out")


def checked(answer, lse=(), none=False, skip=""):
    """A check of attention: results of the right shape, and near the answer where there is one to be near."""

    def check(found, a):
        if a.get(skip) is not None:
            return
        wants = any(bool(a.get(name, False)) for name in lse)
        results = found if isinstance(found, tuple) else (found,)
        if wants and none:
            assert results[-1] is None
            results = results[:-1]
        if any(is_meta(it) for it in results):
            return  # of tensors without numbers
        exact = answer(a)
        if exact is None:
            return
        # A library that takes no results over gets what speaks DLPack.
        results = [np.from_dlpack(it) if type(it).__name__ == "Array" else it for it in results]
        assert len(results) == (2 if wants or lse == "always" else 1)
        given = [value for name, value in a.items() if isinstance(value, TENSORS) and name not in UNUSED]
        given = [value for value in given if not is_meta(value)]  # such as rotary_seqlens without rotary_cos
        top = max((np.abs(f64(value)).max(initial=0) for value in given), default=0)
        eps = 4e-3 if "bfloat16" in str(results[0].dtype) else 5e-4 if "float16" in str(results[0].dtype) else 0
        for result, expected in zip(results, exact):
            assert tuple(result.shape) == expected.shape, (result.shape, expected.shape)
            # Scores beyond these have no digits behind the point to compare by.
            numbers = [abs(float(a.get(name) or 0)) for name in ("softmax_scale", "scale")]
            if not np.isfinite(top) or top > 50 or max(numbers) > 10:
                continue
            result = f64(result)
            there = ~np.isnan(expected)
            assert np.array_equal(np.isinf(result[there]), np.isinf(expected[there]))
            there &= np.isfinite(expected)
            near = (2 * eps + 1e-4) * max(top, 1)
            wrong = np.abs(result - np.where(there, expected, 0))[there].max(initial=0)
            assert wrong <= near, f"{wrong} from the answer, expected at most {near}"

    return check


BATCH = checked(batch_answer, ("return_attn_probs",), none=True)
RAGGED = checked(ragged_answer, ("return_attn_probs", "return_softmax_lse"))
# Each with how a call is drawn, how its answer is checked, what may be larger than memory, and what is written.
TARGETS = {
    "flash_attn_func": (batch, BATCH, ("q",), ()),
    "flash_attn_qkvpacked_func": (lambda dice: packed_batch(dice, "qkv"), BATCH, (), ()),
    "flash_attn_kvpacked_func": (lambda dice: packed_batch(dice, "q kv".split()), BATCH, ("q",), ()),
    "flash_attn_varlen_func": (ragged, RAGGED, ("q",), ("out",)),
    "flash_attn_varlen_qkvpacked_func": (
        lambda dice: packed_ragged(dice, "qkv"), checked(ragged_answer, ("return_attn_probs",), none=True), (), ()
    ),
    "flash_attn_varlen_kvpacked_func": (
        lambda dice: packed_ragged(dice, "q kv".split()), checked(ragged_answer, ("return_attn_probs",), none=True), ("q",), ()
    ),
    "flash_attn_with_kvcache": (
        cached, checked(cached_answer, ("return_softmax_lse",)), ("q",), ("k_cache", "v_cache", "k_descale", "v_descale", "out"),
    ),
    "flash_attn_combine": (parts, checked(combined_answer, "always"), ("out_partial",), ("out",)),
    "flash_attn_merge": (halves, checked(merged_answer, "always"), ("out_a",), ()),
    "scaled_dot_product_attention": (dot_product, checked(heads_first_answer), ("query",), ()),
    "flex_attention": (flexible, checked(heads_first_answer, ("return_lse",), skip="return_aux"), ("query",), ()),
    "get_scheduler_metadata": (planned, planned_alike, (), ()),
    "create_block_mask": (mask_of_function, masks_alike, (), ()),
    "create_mask": (mask_of_pairs, pairs_alike, (), ()),
    "BlockMask.from_kv_blocks": (mask_of_lists, lists_alike, (), ()),
    "BlockMask.from_bcsr": (mask_of_rows, rows_alike, (), ()),
    "quantize": (to_eight_bits, eight_bits_alike, (), ()),
    "quantize_kv": (pair_to_eight_bits, pairs_of_eight_bits_alike, (), ()),
    "dequantize": (from_eight_bits, wide_alike, (), ()),
}  # fmt: skip


def root(array):
    """The array whose memory another has."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def shown(given):
    """Arguments in a few words each."""

    def words(value):
        try:
            strides = getattr(value, "strides", None) or value.stride()
            return f"{type(value).__name__} of {getattr(value, 'dtype', '')} {tuple(value.shape)} {strides}"
        except (AttributeError, RuntimeError, TypeError):
            return f"{type(value).__name__} {repr(value)[:80]}"

    return ", ".join(f"{name}={words(value)}" for name, value in given.items())


def attempt(target, number):
    """One draw: whether it was answered. What it finds is an AssertionError that says how to see it again."""
    dice = Dice(f"{target} {number}")
    draw, check, huge, written = TARGETS[target]
    function = flashcore
    for name in target.split("."):
        function = getattr(function, name)
    given, names = changed(dice, function, draw(dice), huge)
    arrays = {name: value for name, value in given.items() if type(value) is np.ndarray and name not in written}
    before = {name: root(value).tobytes() for name, value in arrays.items() if value.dtype.kind != "O"}
    if torch is not None and dice.chance(0.5):
        given = as_tensors(dice, given)
    meant = dict(given)
    for name in set(given) & {"k_cache", "v_cache"}:
        # What is written there is looked at as it was.
        meant[name] = Written(given[name]) if is_number(given[name]) else given[name]
    if target == "create_mask" and any(
        isinstance(it, (int, np.integer, np.ndarray)) and np.size(it) == 1 and it > 1000 for it in given.values()
    ):
        return False  # as large as it was asked for
    here = f"{target}, draw {number}: {shown(given)}; changed: {names}"
    began = time.perf_counter()
    answered = True
    try:
        found = function(**given)
    except REFUSALS as error:
        answered = False
        words = set(re.findall(r"\w+", str(error)))
        named = words & set(inspect.signature(function).parameters) or (isinstance(error, MemoryError) and words)
        assert named, f"{type(error).__name__} that names no argument: {error}\n{here}"
    except BaseException as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{here}") from error
    took = time.perf_counter() - began
    assert took < SLOW, f"took {took:.1f} s\n{here}"
    if answered:
        try:
            check(found, meant)
        except Exception as error:
            raise AssertionError(f"answered, and {type(error).__name__}: {error}\n{here}") from error
    for name, bytes in before.items():
        assert root(arrays[name]).tobytes() == bytes, f"{name} was changed\n{here}"
    return answered


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", TARGETS)
def test_whatever_is_given_is_answered_or_refused(target):
    if torch is None and target == "create_mask":
        pytest.skip("gives a tensor of PyTorch")
    seconds = float(os.environ.get("FLASHCORE_FUZZ_SECONDS", SECONDS))
    began, number, answered = time.monotonic(), 0, 0
    # A call that never ends would not be seen otherwise.
    faulthandler.dump_traceback_later(seconds + 60, exit=True, file=sys.__stderr__)
    try:
        while time.monotonic() - began < seconds or number < 20:
            answered += attempt(target, number)
            number += 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert 0.05 * number < answered < 0.95 * number, f"{answered} of {number} were answered"


# ---- what once failed ------------------------------------------------------------------------------------


def floats(*shape, dtype=np.float32):
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


def test_a_tensor_whose_memory_was_given_back_is_refused():
    torch = pytest.importorskip("torch")
    good = torch.zeros(1, 4, 2, 16)
    for elements, bytes in ((0, 0), (8, 0), (0, 64), (8, 64)):
        tensor = torch.zeros(elements + good.numel())[elements:].view(good.shape)
        tensor.untyped_storage().resize_(bytes)
        for name, given in (("q", (tensor, good, good)), ("v", (good, good, tensor))):
            with pytest.raises((TypeError, ValueError), match=f"^{name} has elements .* expected"):
                flashcore.flash_attn_func(*given)
        with pytest.raises((TypeError, ValueError), match="^softmax_scale=a <class 'torch.Tensor'>"):
            flashcore.flash_attn_func(good, good, good, softmax_scale=tensor)
    # One that stands for zeros and has no memory either is made real.
    zeros = torch._efficientzerotensor(good.shape)
    assert torch.equal(flashcore.flash_attn_func(good, good, zeros), good)


def test_what_is_not_looked_at_is_refused_by_name_all_the_same():
    q, lengths = floats(1, 3, 2, 8), np.zeros(1, np.int32)
    for batch_size in (1.0, "1", None):
        with pytest.raises(TypeError, match="^batch_size=.*, expected a whole number"):
            flashcore.get_scheduler_metadata(batch_size, 1, 64, 2, 2, 16, lengths)
    assert flashcore.get_scheduler_metadata(np.int64(1), 1, 64, 2, 2, 16, lengths).shape == (1,)
    assert flashcore.get_scheduler_metadata(False, 1, 64, 2, 2, 16, lengths[:0]).shape == (0,)
    for heads, kv_heads in ((0, 2**64), (0, 4), (2, 4)):
        with pytest.raises(ValueError, match=f"^x has {heads} heads, expected a multiple of kv_heads={kv_heads}"):
            flashcore.quantize(q[:, :, :heads], kv_heads=kv_heads)
    torch = pytest.importorskip("torch")
    packed, starts = torch.from_numpy(q[0]), torch.tensor([0, 3], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(TypeError, match="^cu_seqlens_k cannot be read .*torch.sparse_coo"):
        flashcore.flash_attn_varlen_func(
            packed, packed[None], packed[None], starts, starts.to_sparse(), 3, 3, block_table=table
        )
    shrunk = torch.zeros(1)
    shrunk.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="^dtype=a <class 'torch.Tensor'>, expected float8_e4m3fn"):
        flashcore.quantize(q, dtype=shrunk)
    heads_first = torch.from_numpy(q).mT
    with pytest.raises(TypeError, match="^value cannot be read .*torch.sparse_coo"):
        flashcore.scaled_dot_product_attention(heads_first[None], heads_first, heads_first.to_sparse())
    with pytest.raises(ValueError, match="^attn_mask is on meta, expected memory like query"):
        flashcore.scaled_dot_product_attention(
            heads_first[:, :, :0], heads_first, heads_first, attn_mask=torch.zeros((), device="meta")
        )


def test_head_dims_that_differ_are_not_filled_up_to_the_same():
    q, k, v = floats(1, 3, 2, 8), floats(1, 4, 2, 7), floats(1, 4, 2, 8)
    with pytest.raises(ValueError, match="k has head dim 7, expected the 8 of q"):
        flashcore.flash_attn_func(q, k, v)
    with pytest.raises(ValueError, match="kv has head dim 7, expected the 8 of q"):
        flashcore.flash_attn_kvpacked_func(q, np.stack([k, k], 2))
    caches = floats(1, 8, 2, 7), floats(1, 8, 2, 7)
    new = floats(1, 1, 2, 7), floats(1, 1, 2, 6)
    before = [cache.copy() for cache in caches]
    with pytest.raises(ValueError, match="v has .* expected"):
        flashcore.flash_attn_with_kvcache(floats(1, 1, 2, 7), *caches, *new, cache_seqlens=2)
    assert all(np.array_equal(*pair) for pair in zip(caches, before))


def test_a_tensor_without_memory_beside_others_is_refused():
    torch = pytest.importorskip("torch")
    x = torch.zeros(1, 4, 2, 16)
    slopes, lengths = torch.zeros(2), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="alibi_slopes is on meta, expected memory like q"):
        flashcore.flash_attn_func(x, x, x, alibi_slopes=slopes.to("meta"))
    with pytest.raises(ValueError, match="cache_seqlens is on meta, expected memory like"):
        flashcore.flash_attn_with_kvcache(x, x, x, cache_seqlens=lengths.to("meta"))
    with pytest.raises(ValueError, match="lse_partial is on meta, expected memory like out_partial"):
        flashcore.flash_attn_combine(x[None], torch.zeros(1, 1, 4, 2, device="meta"))
    with pytest.raises(ValueError, match="key is on memory, expected meta like query"):
        flashcore.scaled_dot_product_attention(x.to("meta"), x, x)
    assert flashcore.flash_attn_func(*[x.to("meta")] * 3).is_meta


@pytest.mark.parametrize("kind", ["sparse", "mkldnn", "quantized", "nested"])
def test_tensors_that_do_not_lie_step_by_step_are_named(kind):
    torch = pytest.importorskip("torch")
    make = {
        "sparse": lambda x: x.to_sparse(),
        "mkldnn": lambda x: x.to_mkldnn(),
        "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 3, torch.qint8),
        "nested": lambda x: torch.nested.nested_tensor(list(x)),
    }[kind]
    x, qkv, parts, sums = (
        torch.ones(2, 4, 2, 16),
        torch.ones(2, 4, 3, 2, 16),
        torch.ones(2, 1, 4, 2, 16),
        torch.ones(2, 1, 4, 2),
    )
    calls = [
        ("k", lambda: flashcore.flash_attn_func(x, make(x), x)),
        # A subclass, whose calls go to PyTorch's dispatcher.
        ("k", lambda: flashcore.flash_attn_func(torch.nn.Parameter(x), make(x), x)),
        ("qkv", lambda: flashcore.flash_attn_qkvpacked_func(make(qkv))),
        ("v_cache", lambda: flashcore.flash_attn_with_kvcache(x, x, make(x), cache_seqlens=3)),
        ("key", lambda: flashcore.scaled_dot_product_attention(x, make(x), x)),
        ("key", lambda: flashcore.flex_attention(x, make(x), x, shifted)),
        ("attn_mask", lambda: flashcore.scaled_dot_product_attention(x, x, x, make(torch.ones(2, 4, 2, 2)))),
        ("out_partial", lambda: flashcore.flash_attn_combine(make(parts), sums)),
        ("out_b", lambda: flashcore.flash_attn_merge(x, torch.ones(2, 2, 4), make(x), torch.ones(2, 2, 4))),
    ]  # fmt: skip
    for name, call in calls:
        with pytest.raises(TypeError, match=f"^{name} (cannot be read|is a )"):
            call()


def test_packed_tensors_and_their_lists_have_the_names_of_the_call():
    qkv, starts = floats(5, 3, 2, 30), np.array([0, 5], np.int32)
    call = flashcore.flash_attn_varlen_qkvpacked_func
    for name, given in {
        "cu_seqlens": (qkv, starts.astype(np.int64), 5),
        "max_seqlen": (qkv, starts, "x"),
        "qkv": (qkv.astype(np.float64), starts, 5),
    }.items():
        with pytest.raises((TypeError, ValueError), match=f"^{name}[ =]"):
            call(*given)
    with pytest.raises(ValueError, match="cu_seqlens gives sequence 0 5 queries, expected at most max_seqlen=3"):
        call(qkv, starts, 3)
    # Beyond the rows that there are, whatever max_seqlen is: it is cut to them.
    with pytest.raises(
        ValueError, match=f"cu_seqlens ends at {len(qkv) + 1}, expected at most the {len(qkv)} rows of qkv"
    ):
        call(qkv, np.array([0, len(qkv) + 1], np.int32), len(qkv) + 1)
    with pytest.raises(TypeError, match="qkv is a .*memoryview.* expected a tensor"):
        flashcore.flash_attn_qkvpacked_func(memoryview(floats(1, 5, 3, 2, 16)))


def test_masks_of_no_keys_and_of_no_queries():
    q, k = floats(1, 2, 3, 16), floats(1, 2, 0, 16)
    for mask in (np.zeros((1, 0), bool), np.zeros((3, 0), np.float32)):
        assert not flashcore.scaled_dot_product_attention(q, k, k, mask).any()
    assert flashcore.scaled_dot_product_attention(q[:, :, :0], q, q, np.ones((0, 3), bool)).shape == (1, 2, 0, 16)
    with pytest.raises(ValueError, match="key is a .*float.* expected a tensor of 4 dimensions"):
        flashcore.scaled_dot_product_attention(q, 0.5, q, np.ones((3, 3), bool), enable_gqa=True)


@pytest.mark.parametrize("dim", [16, 30])
def test_what_is_written_is_a_place_for_each_element(dim):
    q, starts = floats(4, 2, dim), np.array([0, 4], np.int32)
    call = lambda out: flashcore.flash_attn_varlen_func(q, q, q, starts, starts, 4, 4, out=out)
    assert call(np.zeros_like(q)).any()
    read_only = np.zeros_like(q)
    read_only.flags.writeable = False
    for out in (np.zeros((2, *q.shape), np.float32), q.astype(np.float16), read_only, 3):
        with pytest.raises((TypeError, ValueError), match="^out "):
            call(out)
    cache, rows = floats(1, 8, 2, dim), floats(1, 1, 2, dim)
    frozen = cache.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="v_cache is read-only"):
        flashcore.flash_attn_with_kvcache(rows, cache, frozen, rows, rows, cache_seqlens=2)
    torch = pytest.importorskip("torch")
    cache, rows = torch.from_numpy(cache), torch.from_numpy(rows)
    with pytest.raises(ValueError, match="v_cache has elements that share memory"):
        shared = cache[:, :1].expand(1, 8, 2, dim)
        flashcore.flash_attn_with_kvcache(rows, cache, shared, rows, rows, cache_seqlens=2)
    # Vectors of heads that overlap by half; those of slices and of other orders do not.
    overlapping = torch.zeros(4 * cache.numel()).as_strided(cache.shape, (16 * dim, 2 * dim, dim // 2, 1))
    with pytest.raises(ValueError, match="v_cache has elements that share memory"):
        flashcore.flash_attn_with_kvcache(rows, cache, overlapping, rows, rows, cache_seqlens=2)
    for apart in (
        torch.zeros(2, *cache.shape).unbind(0)[1],
        cache.transpose(1, 2).contiguous().transpose(1, 2),
        cache[:, ::2],
    ):
        flashcore.flash_attn_with_kvcache(rows, apart.clone(), apart, rows, rows, cache_seqlens=2)
        assert torch.equal(apart[:, 2], rows[:, 0])
    for odd in (torch._neg_view(cache), torch._efficientzerotensor(cache.shape)):
        with pytest.raises(TypeError, match="v_cache stands for other numbers than its memory has"):
            flashcore.flash_attn_with_kvcache(rows, cache, odd, rows, rows, cache_seqlens=2)


def test_parts_are_put_into_what_the_function_says():
    parts, sums = floats(2, 1, 4, 2, 16), floats(2, 1, 4, 2)
    for out in ((1, 2), 3, np.zeros((4, 2, 16), np.int8), np.zeros((1, 4, 2, 8), np.float32)):
        with pytest.raises((TypeError, ValueError), match="^out "):
            flashcore.flash_attn_combine(parts, sums, out)
    torch = pytest.importorskip("torch")
    parts, sums = torch.from_numpy(parts), torch.from_numpy(sums)
    for dtype in (torch.float8_e4m3fn, torch.int8):
        with pytest.raises(TypeError, match="out has element type .* expected float32, float16 or bfloat16"):
            flashcore.flash_attn_combine(parts, sums, torch.zeros(1, 4, 2, 16).to(dtype))


def test_arrays_of_libraries_that_copy_nothing():
    q = floats(1, 4, 2, 16)
    found = flashcore.flash_attn_func(Proxy(q), Proxy(q), Proxy(q))
    assert np.array_equal(np.from_dlpack(found), flashcore.flash_attn_func(q, q, q))
    odd = floats(1, 4, 2, 30)
    with pytest.raises(ValueError, match="q has head dim 30, expected a multiple of 8"):
        flashcore.flash_attn_func(*[Proxy(odd)] * 3)
    with pytest.raises(TypeError, match="qkv is a .*Proxy.* that can be indexed"):
        flashcore.flash_attn_qkvpacked_func(Proxy(floats(1, 4, 3, 2, 16)))


def test_functions_and_sizes_of_masks_are_named():
    for function in (3, len, int, lambda: True, lambda b, h, q_idx, kv_idx: "x"):
        with pytest.raises((TypeError, NotImplementedError), match="^mask_mod"):
            flashcore.create_block_mask(function, None, None, 8, 8)
        with pytest.raises((TypeError, NotImplementedError), match="^score_mod"):
            q = floats(1, 2, 4, 16)
            flashcore.flex_attention(q, q, q, function)
    for sizes in ({"B": np.zeros(2)}, {"KV_LEN": 8.0}, {"Q_LEN": 2**31}, {"H": -1}, {"BLOCK_SIZE": None}):
        with pytest.raises((TypeError, ValueError), match=f"^{[*sizes][0]}"):
            flashcore.create_block_mask(odd_keys, **{"B": None, "H": None, "Q_LEN": 8, "KV_LEN": 8, **sizes})
    counts, indices = np.ones((1, 1, 2), np.int32), np.zeros((1, 1, 2, 1), np.int32)
    good = {"kv_num_blocks": counts, "kv_indices": indices, "BLOCK_SIZE": 4, "seq_lengths": (8, 4)}
    for name, odd in (("kv_indices", indices * 1j), ("mask_mod", 3), ("seq_lengths", (8, -4)), ("kv_num_blocks", 1)):
        with pytest.raises((TypeError, ValueError), match=f"^{name}"):
            BlockMask.from_kv_blocks(**{**good, name: odd})
    good = {
        "indptr": counts[0, 0].cumsum() * 0,
        "indices": indices[0, 0, :0, 0],
        "block_size": 4,
        "seq_lengths": (4, 4),
    }
    BlockMask.from_bcsr(**good)
    for name, odd in (("indptr", good["indptr"] + 1), ("indices", False), ("mask", False), ("seq_lengths", 1.5)):
        with pytest.raises((TypeError, ValueError), match=f"^{name}"):
            BlockMask.from_bcsr(**{**good, name: odd})


def test_what_is_quantized_is_named():
    x = floats(1, 4, 2, 16)
    for name, odd in (("x", x.astype(int)), ("kv_heads", "x"), ("per", np.zeros(2)), ("dtype", 3)):
        with pytest.raises((TypeError, ValueError), match=f"^{name}[ =]"):
            flashcore.quantize(**{"x": x, "dtype": "int8", name: odd})
    with pytest.raises(TypeError, match="^v is a .*bool"):
        flashcore.quantize_kv(x, True)
    small, descale = flashcore.quantize(x, "int8")
    for name, odd in (("descale", descale[:0]), ("descale", None), ("x", small[0, 0, 0]), ("dtype", "nothing")):
        with pytest.raises((TypeError, ValueError), match=f"^{name}[ =]"):
            flashcore.dequantize(**{"x": small, "descale": descale, name: odd})
