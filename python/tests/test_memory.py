"""More than there is memory for, and defects of ours: exceptions, whatever the function."""

import numpy as np
import pytest
from flashcore import (
    _flashcore,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_merge,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
)

HUGE = 2**40


def of_numpy(*shape, dtype="float32"):
    """One vector again and again, or one number."""
    return np.broadcast_to(np.zeros(8 if shape[-1] == 8 else (), dtype), shape)


def of_torch(*shape, dtype="float32"):
    torch = pytest.importorskip("torch")
    return torch.zeros(8 if shape[-1] == 8 else (), dtype=getattr(torch, dtype)).expand(shape)


def ints(make, *numbers):
    array = np.array(numbers, np.int32)
    return array if make is of_numpy else pytest.importorskip("torch").from_numpy(array)


# Each with one tensor whose answer, or a copy of which, no machine holds.
CALLS = {
    "queries": lambda x, i: flash_attn_func(x(1, HUGE, 1, 8), x(1, 4, 1, 8), x(1, 4, 1, 8)),
    "half queries": lambda x, i: flash_attn_func(*(x(1, n, 1, 8, dtype="float16") for n in (HUGE, 4, 4))),
    "batch": lambda x, i: flash_attn_func(*[x(HUGE, 4, 1, 8)] * 3),
    "heads": lambda x, i: flash_attn_func(x(1, 4, HUGE, 8), x(1, 4, 1, 8), x(1, 4, 1, 8)),
    "bytes without a count": lambda x, i: flash_attn_func(x(1, 2**57, 1, 8), x(1, 4, 1, 8), np_or(x, 1, 4, 1, 256)),
    "lse": lambda x, i: flash_attn_func(*[x(1, HUGE, 1, 8)] * 3, return_attn_probs=True),
    "qkvpacked": lambda x, i: flash_attn_qkvpacked_func(x(1, HUGE, 3, 1, 8)),
    "kvpacked": lambda x, i: flash_attn_kvpacked_func(x(1, HUGE, 1, 8), x(1, 4, 2, 1, 8)),
    "sdpa": lambda x, i: scaled_dot_product_attention(x(1, 1, HUGE, 8), x(1, 1, 4, 8), x(1, 1, 4, 8)),
    "varlen queries": lambda x, i: flash_attn_varlen_func(
        x(HUGE, 1, 8), x(4, 1, 8), x(4, 1, 8), i(0, 4), i(0, 4), 4, 4
    ),
    "kvcache queries": lambda x, i: flash_attn_with_kvcache(x(1, HUGE, 1, 8), x(1, 4, 1, 8), x(1, 4, 1, 8)),
    "kvcache rotated": lambda x, i: flash_attn_with_kvcache(
        x(1, HUGE, 1, 8), np_or(x, 1, 8, 1, 8), np_or(x, 1, 8, 1, 8), x(1, 1, 1, 8), x(1, 1, 1, 8),
        rotary_cos=np_or(x, 8, 4), rotary_sin=np_or(x, 8, 4), cache_seqlens=i(1),
    ),
    "combine rows": lambda x, i: flash_attn_combine(x(2, 1, HUGE, 1, 8), x(2, 1, HUGE, 1)),
    "combine parts": lambda x, i: flash_attn_combine(x(HUGE, 1, 2, 1, 8), x(HUGE, 1, 2, 1)),
    "merge": lambda x, i: flash_attn_merge(*[x(1, HUGE, 1, 8), x(1, 1, HUGE)] * 2),
}  # fmt: skip


def np_or(x, *shape):
    """Memory that can be written, and is all there."""
    array = np.zeros(shape, np.float32)
    return array if x is of_numpy else pytest.importorskip("torch").from_numpy(array)


@pytest.mark.parametrize("make", [of_numpy, of_torch])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_no_memory_holds_is_a_memory_error(call, make):
    with pytest.raises(MemoryError) as caught:
        call(make, lambda *numbers: ints(make, *numbers))
    assert str(caught.value)


@pytest.mark.parametrize("make", [of_numpy, of_torch])
def test_caches_are_not_copied(make):
    """A window of the last keys of a cache that no machine has a second time."""
    cache, window = make(1, HUGE, 1, 8), {"causal": True, "window_size": (16, 0)}
    padded = flash_attn_with_kvcache(make(1, 1, 1, 8), cache, cache, cache_leftpad=ints(make, 1), **window)
    plain = flash_attn_func(make(1, 1, 1, 8), cache, cache, **window)
    assert padded.shape == plain.shape == (1, 1, 1, 8)
    assert not np.asarray(padded).any() and not np.asarray(plain).any()


def test_what_has_no_elements_needs_no_memory():
    q, k = of_numpy(HUGE, 0, 1, 8), of_numpy(HUGE, 4, 1, 8)
    assert flash_attn_func(q, k, k).shape == (HUGE, 0, 1, 8)


def test_a_defect_is_an_exception_that_asks_for_a_report():
    with pytest.raises(RuntimeError, match="a defect of FlashCore: row 3 is gone; please report it"):
        _flashcore.panic("row 3 is gone")
    x = np.ones((1, 4, 1, 8), np.float32)
    assert np.allclose(flash_attn_func(x, x, x), 1)
