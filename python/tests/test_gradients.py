"""Gradients of every function, against autograd through the plain algorithm in f64; the same bodies on
the CPU and on a GPU."""

import math
import random as random_numbers

import pytest

torch = pytest.importorskip("torch")

import flashcore
from conftest import devices
from flashcore import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_merge,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
)
from test_serving_torch import plain, random, starts

every_device = pytest.mark.parametrize("device", devices())

FUNCTIONS = {
    function.__name__: function
    for function in (
        flash_attn_func,
        flash_attn_qkvpacked_func,
        flash_attn_kvpacked_func,
        flash_attn_varlen_func,
        scaled_dot_product_attention,
    )
}
MASKS = [{}, {"causal": True}, {"window_size": (37, 5)}, {"causal": True, "window_size": (20, -1)}]
SCORES = [{}, {"softcap": 5.0, "softmax_scale": 0.3}, {"alibi_slopes": True}, {"s_aux": True}]
# What functions have no argument for.
MISSING = {
    "flash_attn_qkvpacked_func": {"s_aux", "attention_chunk"},
    "flash_attn_kvpacked_func": {"s_aux", "attention_chunk"},
    "scaled_dot_product_attention": {"s_aux", "attention_chunk", "softcap", "alibi_slopes", "window_size"},
}


def unserved(error):
    """Skips what no kernel of this GPU serves, with the planner's reason; on the CPU all is served."""
    if "no kernel can serve" not in str(error):
        raise error
    pytest.skip(str(error))


class Case:
    """A call: leaves of its own, its output, and the same by the plain algorithm."""

    def __init__(
        self, function, device, dtype, queries, keys, heads=4, key_heads=2, dim=16, value_dim=None, rules=None,
        lie="plain", seed=0,
    ):  # fmt: skip
        self.function, self.device, self.dtype = function, device, dtype
        self.queries, self.keys = queries, keys
        self.rules = {name: value for name, value in (rules or {}).items() if name not in MISSING.get(function, ())}
        if function == "flash_attn_qkvpacked_func":
            self.keys, key_heads, value_dim = queries, heads, dim
        if function == "flash_attn_kvpacked_func":
            value_dim = dim
        if function == "scaled_dot_product_attention" and self.rules.get("causal"):
            # PyTorch's mask is anchored at the first query.
            self.keys = [max(pair) for pair in zip(queries, keys)]
        self.lie = lie
        sizes = (heads, dim), (key_heads, dim), (key_heads, value_dim or dim)
        lengths = (self.queries, self.keys, self.keys)
        self.leaves = [self._leaf(n, h, d, seed + at) for at, (n, (h, d)) in enumerate(zip(lengths, sizes))]
        for name, at in (("alibi_slopes", 5), ("s_aux", 6)):
            if self.rules.get(name):
                self.rules[name] = random(heads, device=device, dtype=torch.float32, seed=seed + at).abs()
        if "s_aux" in self.rules:
            self.leaves.append(self.rules["s_aux"].requires_grad_())
            self.rules["s_aux"] = self.leaves[-1]
        self.deterministic = False

    def _leaf(self, lengths, heads, dim, seed):
        """Rows of all sequences, (rows, heads, dim)."""
        x = random(sum(lengths), heads, dim, device=self.device, dtype=self.dtype, seed=seed)
        return x.requires_grad_()

    def _rows(self, x):
        """Rows of the function's own form, lying in memory in some order."""
        if self.lie == "gaps":
            wide = torch.nn.functional.pad(x, (8, 8, 1, 0))
            x = wide[:, 1:, 8:-8]
        elif self.lie == "heads first":
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        return x

    def _batch(self, x, lengths):
        return self._rows(x).unflatten(0, (len(lengths), lengths[0]))

    def call(self, leaves=None):
        """The output, as rows of all sequences."""
        q, k, v, *_ = leaves or self.leaves
        rules = dict(self.rules, deterministic=self.deterministic)
        return self._apply(q, k, v, rules).flatten(0, -3)

    def call_with_lse(self):
        """The output, and the log-sum-exps, (heads, rows)."""
        output, lse, *_ = self._apply(*self.leaves[:3], dict(self.rules, return_attn_probs=True))
        return output.flatten(0, -3), lse if lse.dim() == 2 else lse.transpose(0, 1).flatten(1)

    def _apply(self, q, k, v, rules):
        """What the function returns."""
        function = FUNCTIONS[self.function]
        if self.function == "flash_attn_varlen_func":
            q, k, v = (self._rows(x) for x in (q, k, v))
            cu = starts(self.queries, self.device), starts(self.keys, self.device)
            return function(q, k, v, *cu, max(self.queries), max(self.keys), **rules)
        q, k, v = (self._batch(x, n) for x, n in zip((q, k, v), (self.queries, self.keys, self.keys)))
        if self.function == "scaled_dot_product_attention":
            scale, causal = rules.get("softmax_scale"), rules.get("causal", False)
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            out = function(
                *heads_first, is_causal=causal, scale=scale, enable_gqa=True, deterministic=self.deterministic
            )
            return out.transpose(1, 2)
        packed = {
            "flash_attn_qkvpacked_func": lambda: (torch.stack([q, k, v], 2),),
            "flash_attn_kvpacked_func": lambda: (q, torch.stack([k, v], 2)),
        }
        return function(*packed.get(self.function, lambda: (q, k, v))(), **rules)

    def plain(self, leaves, dtype):
        """The same by the plain algorithm in a precision, and the log-sum-exps of each sequence."""
        names = {
            "window_size": "window",
            "attention_chunk": "chunk",
            "alibi_slopes": "slopes",
            "softmax_scale": "scale",
        }
        rules = {names.get(name, name): value for name, value in self.rules.items() if name != "s_aux"}
        q, k, v, *sinks = leaves
        outputs, sums, mine, theirs = [], [], 0, 0
        for n, m in zip(self.queries, self.keys):
            seen = n if self.function == "scaled_dot_product_attention" and self.rules.get("causal") else m
            keys = slice(theirs, theirs + seen)
            rest = {"sinks": sinks[0]} if sinks else {}
            output, lse = plain(q[mine : mine + n], k[keys], v[keys], dtype=dtype, **rules, **rest)
            outputs.append(output)
            sums.append(lse)
            mine, theirs = mine + n, theirs + m
        return torch.cat(outputs), torch.cat(sums, 1)

    def gradients(self, dout, precision=None, dlse=None):
        """Of all leaves, by the plain algorithm in a precision."""
        leaves = [x.detach().to(precision or x.dtype).requires_grad_() for x in self.leaves]
        results = self.plain(leaves, precision)
        given = [dout] if dlse is None else [dout, dlse]
        return torch.autograd.grad(results[: len(given)], leaves, [x.to(y.dtype) for x, y in zip(given, results)])

    def ours(self, dout=None):
        """The gradient of the output, random where none is given, and those of all leaves."""
        output = self.call()
        if dout is None:
            dout = random(*output.shape, device=self.device, dtype=self.dtype, seed=9)
        try:
            return dout, torch.autograd.grad(output, self.leaves, dout)
        except NotImplementedError as error:
            unserved(error)

    def check(self, dout=None):
        return self.judge(*self.ours(dout))

    def check_with_lse(self):
        """Of a sum over the output and the log-sum-exps."""
        results = self.call_with_lse()
        given = [random(*x.shape, device=self.device, dtype=x.dtype, seed=9 + at) for at, x in enumerate(results)]
        try:
            found = torch.autograd.grad(results, self.leaves, given)
        except NotImplementedError as error:
            unserved(error)
        return self.judge(given[0], found, given[1])

    def judge(self, dout, found, dlse=None):
        exact = self.gradients(dout, torch.float64, dlse)
        rough = self.gradients(dout, None, dlse)
        for name, leaf, *four in zip(
            ("q", "k", "v", "sinks"), self.leaves, found, exact, rough, self.saved_noise(dout)
        ):
            assert_close(name, leaf, *four)
        return found

    def saved_noise(self, dout):
        """What the rounding of the saved output does to each gradient, at most.

        It changes the row sums of ``dout * output``, and those are what a gradient of the log-sum-exps
        is weighted with.
        """
        leaves = [x.detach().double().requires_grad_() for x in self.leaves]
        output, lse = self.plain(leaves, torch.float64)
        # An error is at most half of the precision; twice that is five standard deviations.
        spread = torch.finfo(self.dtype).eps * (dout.double() * output.detach()).square().sum(-1).sqrt()
        signs = random(*spread.shape, device=self.device, dtype=torch.float64, seed=10).sign()
        weighted = torch.where(lse.isfinite(), lse, 0.0) * (spread * signs).transpose(0, 1)
        found = torch.autograd.grad(weighted.sum(), leaves, allow_unused=True)
        return [0.0 if x is None or not x.numel() else x.nan_to_num(0.0).abs().max().item() for x in found]


def assert_close(name, leaf, found, exact, rough, noise=0.0):
    """At most twice the error of the plain algorithm in the element type, and rounding."""
    assert found.shape == leaf.shape and found.dtype == leaf.dtype and found.device == leaf.device
    if not leaf.numel():
        return
    error = (found.double() - exact).abs().max().item()
    rounding = torch.finfo(leaf.dtype).eps * exact.abs().max().item()
    # What is left where two sums of f32 cancel.
    noise += 1e-5 * max(1.0, math.sqrt(leaf.numel() / leaf.shape[-1]))
    allowed = 2 * (rough.double() - exact).abs().max().item() + rounding + noise
    assert error <= allowed, (name, error, allowed)


@every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "function, rules",
    [
        (function, {**mask, **scores})
        for function in FUNCTIONS
        for mask in [*MASKS, {"attention_chunk": 50, "causal": True}]
        for scores in SCORES
        if MISSING.get(function, set()).isdisjoint({*mask, *scores})
    ],
    ids=str,
)
def test_gradients(function, rules, dtype, device):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("float32 has no gradients on a GPU")
    ragged = function == "flash_attn_varlen_func"
    # Zero-length sequences, rows without keys and keys without rows, odd lengths.
    queries, keys = ((3, 0, 70, 1, 40), (9, 4, 70, 0, 97)) if ragged else ((70, 70), (97, 97))
    dim = 64 if device == "cuda" else 16
    Case(function, device, dtype, queries, keys, dim=dim, rules=rules).check()


@every_device
@pytest.mark.parametrize("function", ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_varlen_func"])
def test_more_queries_than_keys(function, device):
    """Rows that see no key have gradients of exactly zero."""
    case = Case(function, device, torch.bfloat16, (60, 60), (33, 33), dim=64, rules={"causal": True})
    dq, *_ = case.check()
    assert not dq[:27].any() and not dq[60 : 60 + 27].any() and dq[28].any()


@every_device
@pytest.mark.parametrize("lie", ["gaps", "heads first"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_tensors_lie_as_they_like(function, lie, device):
    case = Case(function, device, torch.float16, (50, 50), (50, 50), dim=64, value_dim=32, lie=lie)
    found = case.check()
    straight = Case(function, device, torch.float16, (50, 50), (50, 50), dim=64, value_dim=32)
    if device == "cpu":
        assert all(torch.equal(*pair) for pair in zip(found, straight.check()))


@every_device
@pytest.mark.filterwarnings("ignore")  # that the forward pass is slow there
@pytest.mark.parametrize("compiled", [False, True])
def test_tensors_without_gaps_at_an_odd_address(compiled, device):
    """Kernels of GPUs read 16 bytes at a time: such tensors are copied, though they are contiguous."""
    given = [random(1, 40, heads, 64, device=device, seed=heads) for heads in (4, 2, 2)]
    dout = random(1, 40, 4, 64, device=device, seed=9)
    odd = lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    call = flash_attn_func
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, expected = (
        torch.autograd.grad(call(*leaves, causal=True), leaves, of(dout))
        for of, leaves in ((lie, [lie(x).requires_grad_() for x in given]) for lie in (odd, torch.clone))
    )
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@every_device
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_gradient_of_the_output_lies_as_it_likes(function, device):
    case = Case(function, device, torch.bfloat16, (50, 50), (50, 50), dim=64)
    output = case.call()
    rows, heads, dim = output.shape
    broadcast = torch.ones((), device=device, dtype=torch.bfloat16).expand(rows, heads, dim)
    swapped = random(dim, heads, rows, device=device).transpose(0, 2)
    padded = random(rows, heads, dim + 3, device=device)[..., 3:]
    for dout in (broadcast, swapped, padded):
        case.check(dout)
    (found,) = torch.autograd.grad(case.call().sum(), case.leaves[2])
    (expected,) = torch.autograd.grad(case.call(), case.leaves[2], broadcast.contiguous())
    assert torch.equal(found, expected) or device == "cuda"


@every_device
def test_keys_that_are_shared_by_expanding(device):
    q = random(1, 40, 4, 64, device=device).requires_grad_()
    k = random(1, 40, 1, 64, device=device, seed=1).requires_grad_()
    dout = random(1, 40, 4, 64, device=device, seed=2)
    shared = k.expand(-1, -1, 4, -1)
    ours = torch.autograd.grad(flash_attn_func(q, shared, shared), (q, k), dout)
    grouped = torch.autograd.grad(flash_attn_func(q, k, k), (q, k), dout)
    for one, other in zip(ours, grouped):
        assert (one.float() - other.float()).abs().max().item() < 6e-2


@every_device
def test_keys_behind_the_last_query_have_no_gradient(device):
    q = random(2, 4, 30, 64, device=device).requires_grad_()
    k, v = (random(2, 4, 50, 64, device=device, seed=seed).requires_grad_() for seed in (1, 2))
    scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    for x in (k, v):
        assert x.grad[:, :, :30].any() and not x.grad[:, :, 30:].any()


@every_device
def test_rows_of_no_sequence_have_no_gradient(device):
    x = random(30, 2, 64, device=device)
    q, k, v = (x.clone().requires_grad_() for _ in range(3))
    used = torch.tensor([4, 9], dtype=torch.int32, device=device)
    cu = starts((10, 12), device)
    output = flash_attn_varlen_func(q, k, v, cu, cu, 12, 12, seqused_q=used, seqused_k=used)
    dout = torch.zeros_like(output)
    inside = [*range(4), *range(10, 19)]
    dout[inside] = 1
    try:
        output.backward(dout)
    except NotImplementedError as error:
        unserved(error)
    outside = [row for row in range(30) if row not in inside]
    for leaf in (q, k, v):
        assert not leaf.grad[outside].any()
    assert v.grad[inside].any()


@every_device
def test_nothing_to_do(device):
    q = random(2, 5, 2, 64, device=device).requires_grad_()
    for queries, keys in ((0, 5), (5, 0), (0, 0)):
        k, v = (q.detach()[:, :keys].clone().requires_grad_() for _ in range(2))
        given = q.detach()[:, :queries].clone().requires_grad_()
        flash_attn_func(given, k, v).sum().backward()
        for x in (given, k, v):
            assert x.grad.shape == x.shape and not x.grad.any()


@pytest.mark.parametrize("seed", range(5))
def test_random_cases(seed):
    for case in random_cases(seed, 20, "cpu"):
        case.check()


def random_cases(seed, count, device):
    """Cases of all functions; on a GPU of few kernels, since each has to be compiled."""
    numbers = random_numbers.Random(seed)
    for index in range(count):
        on_gpu = device == "cuda"
        mask = numbers.choice([*MASKS, {"attention_chunk": 40, "causal": True}])
        rules = {**mask, **numbers.choice(SCORES)}
        dim, value_dim = (
            numbers.choice([(64, None), (128, None)]) if on_gpu else numbers.choice([(16, None), (24, 8), (64, 32)])
        )
        dtype = torch.bfloat16 if on_gpu else numbers.choice([torch.float32, torch.float16, torch.bfloat16])
        if numbers.random() < 0.2:
            rules = {"causal": numbers.random() < 0.5}
            dtype = torch.float16
            if numbers.random() < 0.3:
                dim, value_dim = numbers.choice([(256, None), (96, 64), (40, 72)])
        function = numbers.choice(list(FUNCTIONS))
        longest = (700 if numbers.random() < 0.1 else 260) if on_gpu else 90
        count_of = numbers.choice([1, 2, 3, 7])
        if function == "flash_attn_varlen_func":
            lengths = [[numbers.choice([0, 1, numbers.randrange(longest)]) for _ in range(count_of)] for _ in range(2)]
            queries, keys = (pair if any(pair) else [1] * count_of for pair in lengths)
        else:
            queries, keys = [numbers.randrange(1, longest)] * count_of, [numbers.randrange(1, longest)] * count_of
        key_heads = numbers.choice([1, 2, 3])
        yield Case(
            function, device, dtype, queries, keys, heads=key_heads * numbers.choice([1, 2, 4]), key_heads=key_heads,
            dim=dim, value_dim=value_dim, rules=rules, lie=numbers.choice(["plain", "gaps", "heads first"]),
            seed=1000 * seed + 10 * index,
        )  # fmt: skip


@pytest.mark.parametrize("rules", [{"causal": True}, {"softcap": 2.0}, {"window_size": (3, 1)}], ids=str)
def test_finite_differences(rules):
    q, k, v = (random(1, 7, 2, 8, device="cpu", dtype=torch.float32, seed=seed).requires_grad_() for seed in range(3))
    call = lambda *tensors: flash_attn_func(*tensors, **rules)
    assert torch.autograd.gradcheck(call, (q, k, v), eps=1e-2, atol=1e-2, rtol=1e-2)
    sinks = torch.randn(2, requires_grad=True)
    call = lambda sinks: flash_attn_func(q.detach(), k.detach(), v.detach(), s_aux=sinks, **rules)
    assert torch.autograd.gradcheck(call, (sinks,), eps=1e-2, atol=1e-2, rtol=1e-2)


@every_device
@pytest.mark.parametrize("function", FUNCTIONS)
def test_only_what_is_needed_comes_back(function, device, monkeypatch):
    from flashcore import _gradients

    given = []
    backward = _gradients.Attention.backward

    def spy(ctx, *gradients):
        answer = backward(ctx, *gradients)
        given.append([gradient is not None for gradient in answer])
        return answer

    monkeypatch.setattr(_gradients.Attention, "backward", staticmethod(spy))
    count = {"flash_attn_qkvpacked_func": 1, "flash_attn_kvpacked_func": 2}.get(function, 3)
    for needed in range(count):
        x = random(2, 24, 2, 64, device=device)
        q, k, v = (x.clone() for _ in range(3))
        packed = {1: [torch.stack([q, k, v], 2)], 2: [q, torch.stack([k, v], 2)], 3: [q, k, v]}[count]
        rest = ()
        if function == "flash_attn_varlen_func":
            packed, rest = [x.flatten(0, 1) for x in packed], (*[starts((24, 24), device)] * 2, 24, 24)
        packed[needed].requires_grad_()
        try:
            FUNCTIONS[function](*packed, *rest).sum().backward()
        except NotImplementedError as error:
            unserved(error)
        assert given.pop() == [at == needed for at in range(6)]
        assert [x.grad is not None for x in packed] == [at == needed for at in range(count)]
    slopes = torch.ones(2, device=device, requires_grad=True)
    if "alibi_slopes" not in MISSING.get(function, ()) and not rest:
        # A constant: it has no gradient.
        FUNCTIONS[function](*(x.detach().requires_grad_() for x in packed), alibi_slopes=slopes).sum().backward()
        assert slopes.grad is None and given.pop()[:count] == [True] * count


def test_only_gradients_that_are_needed_are_zeroed(monkeypatch):
    q, k, v = (random(24, 2, 64, device="cpu", seed=seed) for seed in range(3))
    zeros, zeroed = torch.zeros_like, []
    monkeypatch.setattr(torch, "zeros_like", lambda x: zeroed.append(x.data_ptr()) or zeros(x))
    lengths = starts((9, 12), "cpu")
    k.requires_grad_()
    flash_attn_varlen_func(q, k, v, lengths, lengths, 12, 12).sum().backward()
    assert zeroed == [k.data_ptr()] and not k.grad[21:].any() and k.grad[:21].any()


@every_device
def test_packed_gradients_are_written_into_one_tensor(device, monkeypatch):
    from flashcore import _flashcore, _gradients

    written = []

    class Watched:
        def __getattr__(self, name):
            return getattr(_flashcore, name)

        def attend_backward(self, tensors, numbers, function, saved, gradients, deterministic):
            # Addresses alone: who holds a gradient makes autograd copy it.
            written.append([gradient.data_ptr() for gradient in gradients[:3]])
            return _flashcore.attend_backward(tensors, numbers, function, saved, gradients, deterministic)

    monkeypatch.setattr(_gradients, "_flashcore", Watched())
    qkv = random(2, 40, 3, 4, 64, device=device).requires_grad_()
    flash_attn_qkvpacked_func(qkv, causal=True).sum().backward()
    assert written.pop() == [gradient.data_ptr() for gradient in qkv.grad.unbind(2)]
    assert qkv.grad.is_contiguous()
    q, kv = (
        random(2, 40, 4, 64, device=device).requires_grad_(),
        random(2, 50, 2, 2, 64, device=device).requires_grad_(),
    )
    flash_attn_kvpacked_func(q, kv).sum().backward()
    assert written.pop() == [gradient.data_ptr() for gradient in (q.grad, *kv.grad.unbind(2))]


@every_device
@pytest.mark.parametrize("rules", [{}, *MASKS[1:3], *SCORES[1:]], ids=str)
@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name != "scaled_dot_product_attention"])
def test_gradients_of_log_sum_exps(function, rules, device):
    """Also where rows see no key: without sinks theirs are minus infinity, whatever the inputs are."""
    if not MISSING.get(function, set()).isdisjoint(rules):
        pytest.skip("the function has no such argument")
    queries, keys = (
        ((3, 0, 70, 1, 40), (9, 4, 50, 0, 97)) if function == "flash_attn_varlen_func" else ((70, 70), (57, 57))
    )
    Case(function, device, torch.bfloat16, queries, keys, dim=64, rules=rules).check_with_lse()


@every_device
def test_log_sum_exps_alone_have_gradients(device):
    q, k, v = (random(1, 20, 2, 64, device=device, seed=seed).requires_grad_() for seed in range(3))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 8
    exact = scores.logsumexp(-1)
    expected = torch.autograd.grad(exact.square().sum(), (q, k), retain_graph=True)
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    for call in (flash_attn_func, compiled):
        output, lse, nothing = call(q, k, v, return_attn_probs=True)
        assert output.requires_grad and lse.requires_grad and nothing is None
        *found, of_values = torch.autograd.grad(lse.square().sum(), (q, k, v))
        assert not of_values.any()
        for one, other in zip(found, expected):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    # Their gradient may have any strides.
    (found,) = torch.autograd.grad(flash_attn_func(q, k, v, return_attn_probs=True)[1].mT.sum(), q)
    (expected,) = torch.autograd.grad(exact.sum(), q)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@every_device
def test_log_sum_exps_of_rows_without_keys(device):
    """They are the sinks, and have their gradient."""
    sinks = torch.tensor([0.5, -1.0], device=device, requires_grad=True)
    q, k, v = (random(1, 6, 2, 64, device=device, seed=seed) for seed in range(3))
    call = lambda keys: flash_attn_func(q, k[:, :keys], v[:, :keys], causal=True, s_aux=sinks, return_attn_probs=True)
    hidden = call(2)[1][..., :4]
    assert torch.equal(hidden, sinks.detach()[None, :, None].expand_as(hidden))
    (found,) = torch.autograd.grad(hidden.sum(), sinks)
    assert torch.equal(found, torch.full_like(sinks, 4.0))
    (found,) = torch.autograd.grad(call(0)[1].sum(), sinks)
    assert torch.equal(found, torch.full_like(sinks, 6.0))
    call(0)[0].sum().backward()
    assert not sinks.grad.any()
    # Of queries too, whether sinks need theirs or not.
    for needed in (True, False):
        sinks = sinks.detach().requires_grad_(needed)
        rows = q.detach().requires_grad_()
        sums = flash_attn_func(rows, k[:, :0], v[:, :0], s_aux=sinks, return_attn_probs=True)[1]
        assert not torch.autograd.grad(sums.sum(), rows)[0].any()
        compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
        sums = compiled(rows, k[:, :0], v[:, :0], s_aux=sinks, return_attn_probs=True)[1]
        assert not torch.autograd.grad(sums.sum(), rows)[0].any()


@every_device
def test_sinks_of_rows_that_belong_to_no_sequence(device):
    """Have no gradient where there are no keys."""
    q = random(5, 2, 64, device=device)
    sinks = torch.tensor([0.5, -1.0], device=device, requires_grad=True)
    lists = lambda *numbers: torch.tensor(numbers, dtype=torch.int32, device=device)
    for begins, used in ((lists(0, 3), None), (lists(0, 5), lists(3))):
        rest = {"seqused_q": used, "s_aux": sinks, "return_attn_probs": True}
        sums = flash_attn_varlen_func(q, q[:0], q[:0], begins, lists(0, 0), 5, 0, **rest)[1]
        (found,) = torch.autograd.grad(sums, sinks, torch.ones_like(sums))
        assert torch.equal(found, torch.full_like(sinks, 3.0))


@every_device
def test_second_derivatives_are_refused(device):
    q, k, v = (random(1, 20, 2, 64, device=device, seed=seed).requires_grad_() for seed in range(3))
    for call in (flash_attn_func, torch.ops.flashcore.attention):
        (first,) = torch.autograd.grad(call(q, k, v).sum(), q, create_graph=True)
        assert (first.float() - torch.autograd.grad(call(q, k, v).sum(), q)[0].float()).abs().max().item() < 1e-2
        with pytest.raises(NotImplementedError, match="FlashCore has no second derivatives"):
            first.sum().backward()


@every_device
@pytest.mark.parametrize("function", FUNCTIONS)
def test_deterministic(function, device):
    """The same bits every time; the global switch of PyTorch asks for the same."""
    queries = (70, 3, 50) if function == "flash_attn_varlen_func" else (70, 70)
    case = Case(function, device, torch.bfloat16, queries, queries, dim=64, rules={"causal": True})
    case.deterministic = True
    first = case.check()
    assert "deterministic" in flashcore.info()["last"]["problem"]
    for _ in range(5):
        assert all(torch.equal(*pair) for pair in zip(case.ours()[1], first))
    case.deterministic = False
    case.ours()
    assert "deterministic" not in flashcore.info()["last"]["problem"]
    torch.use_deterministic_algorithms(True)
    try:
        assert all(torch.equal(*pair) for pair in zip(case.ours()[1], first))
        assert "deterministic" in flashcore.info()["last"]["problem"]
    finally:
        torch.use_deterministic_algorithms(False)


@every_device
def test_what_ran_is_told(device):
    q, k, v = (random(1, 64, 2, 64, device=device, seed=seed).requires_grad_() for seed in range(3))
    flash_attn_func(q, k, v).sum().backward()
    last = flashcore.info()["last"]
    assert last["problem"].endswith("backward") and last["device"] == ("cpu" if device == "cpu" else "cuda:0")
    if device == "cuda" and torch.cuda.get_device_capability() == (9, 0):
        assert last["kernel"] == "gpu/backward"


class Block(torch.nn.Module):
    """A transformer block whose attention is one of the functions."""

    def __init__(self, attention, width=64, heads=4):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, x):
        qkv = self.qkv(self.before(x)).unflatten(2, (3, self.heads, -1))
        x = x + self.out(self.attention(qkv).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.between(x))))


def over_packed(qkv):
    return flash_attn_qkvpacked_func(qkv, causal=True)


def over_three(qkv):
    return flash_attn_func(*qkv.unbind(2), causal=True)


def over_half_packed(qkv):
    return flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], causal=True)


def over_heads_first(qkv):
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def over_sequences(qkv):
    batch, length, *_ = qkv.shape
    cu = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=qkv.device)
    out = flash_attn_varlen_func(*qkv.flatten(0, 1).unbind(1), cu, cu, length, length, causal=True)
    return out.unflatten(0, (batch, length))


def of_pytorch(qkv):
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


WAYS = [over_packed, over_three, over_half_packed, over_heads_first, over_sequences]


def blocks(attention, device, dtype=torch.float32, count=2):
    torch.manual_seed(0)
    width = 256 if device == "cuda" else 64
    return torch.nn.Sequential(*(Block(attention, width) for _ in range(count))).to(device, dtype)


def step(model, x, run=None):
    """The loss of a step, and all gradients."""
    model.zero_grad()
    loss = (run or model)(x).float().square().mean()
    try:
        loss.backward()
    except NotImplementedError as error:
        unserved(error)
    return [loss.detach(), *(parameter.grad.float() for parameter in model.parameters())]


def near(found, expected, tolerance):
    for one, other in zip(found, expected):
        assert (one - other).abs().max().item() <= tolerance * max(1e-2, other.abs().max().item())


def precision(device):
    """The element type that everything serves, and how near results of the same step are."""
    return (torch.float32, 1e-4) if device == "cpu" else (torch.bfloat16, 5e-2)


def width_of(device):
    return 256 if device == "cuda" else 64


@every_device
@pytest.mark.parametrize("attention", WAYS)
def test_a_training_step(attention, device):
    dtype, tolerance = precision(device)
    x = random(2, 33, width_of(device), device=device, dtype=dtype)
    expected = step(blocks(of_pytorch, device, dtype), x)
    near(step(blocks(attention, device, dtype), x), expected, tolerance)


@every_device
@pytest.mark.parametrize("attention", WAYS)
@pytest.mark.hardware
def test_compile_a_training_step(attention, device):
    dtype, tolerance = precision(device)
    model = blocks(attention, device, dtype)
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for length in (32, 45):
        x = random(2, length, width_of(device), device=device, dtype=dtype)
        near(step(model, x, compiled), step(model, x), tolerance)


def test_compile_a_training_step_with_inductor():
    """Generated C++, where there is a compiler."""
    model = blocks(over_packed, "cpu", count=1)
    x = random(2, 32, 64, device="cpu", dtype=torch.float32)
    try:
        found = step(model, x, torch.compile(model, fullgraph=True))
    except Exception as error:
        if "compiler" not in str(error).lower():
            raise
        pytest.skip("no C++ compiler that PyTorch can use")
    near(found, step(model, x), 1e-4)


@every_device
def test_compiled_gradients_of_packed_tensors_are_one_operator(device):
    graphs = []

    def look(graph, inputs):
        graphs.append(graph)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    qkv = random(2, 24, 3, 2, 64, device=device).requires_grad_()
    call = torch.compile(
        lambda x: flash_attn_qkvpacked_func(x, causal=True), fullgraph=True, backend=aot_autograd(fw_compiler=look)
    )
    call(qkv).sum().backward()
    nodes = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    targets = [node.target for node in nodes]
    assert torch.ops.flashcore.attention_backward.default in targets
    # No copy puts the parts together.
    assert not {torch.ops.aten.stack.default, torch.ops.aten.cat.default} & set(targets)


@every_device
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant, device):
    from torch.utils.checkpoint import checkpoint

    dtype, tolerance = precision(device)
    model = blocks(over_packed, device, dtype)
    x = random(2, 40, width_of(device), device=device, dtype=dtype).requires_grad_()

    def run(x):
        for block in model:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    near(step(model, x, run), step(model, x), 1e-6 if device == "cpu" else tolerance)


@every_device
def test_saved_tensors_and_hooks(device):
    """What is saved is what is said; hooks that move it, and hooks on gradients, see it."""
    q, k, v = (random(1, 30, 2, 64, device=device, seed=seed).requires_grad_() for seed in range(3))
    packed, seen = [], []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.cpu().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.to(device)):
        output = flash_attn_func(q, k, v, causal=True)
    assert sorted(packed) == sorted([(1, 30, 2, 64)] * 4 + [(1, 2, 30)])
    q.register_hook(lambda gradient: seen.append(gradient.shape))
    q.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.shape))
    output.sum().backward()
    assert seen == [q.shape, q.shape]
    expected = torch.autograd.grad(flash_attn_func(q, k, v, causal=True).sum(), (q, k, v))
    for leaf, gradient in zip((q, k, v), expected):
        assert (leaf.grad.float() - gradient.float()).abs().max().item() < 1e-2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output = flash_attn_func(q, k * 1, v)
        with torch.no_grad():
            q.add_(1)
        output.sum().backward()


@every_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, device):
    """What is float32 becomes what autocast chooses, as in PyTorch's attention; weights stay float32."""
    torch._dynamo.reset()  # what others compiled counts towards its limit
    q, k, v = (
        random(1, 2, 30, 64, device=device, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(3)
    )
    for ours in (
        scaled_dot_product_attention,
        torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager"),
    ):
        for given in ((q, k, v), (q, k.to(dtype), v)):
            with torch.autocast(device, dtype):
                output = ours(*given, is_causal=True)
                expected = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)
                with torch.no_grad():
                    assert ours(*given, is_causal=True).dtype == dtype
            assert output.dtype == expected.dtype == dtype
            gradients = torch.autograd.grad(output.float().sum(), (q, k, v))
            for gradient, other in zip(gradients, torch.autograd.grad(expected.float().sum(), (q, k, v))):
                assert gradient.dtype == torch.float32 and (gradient - other).abs().max().item() < 5e-2
    with torch.autocast(device, dtype), pytest.raises(TypeError, match="query has element type float64"):
        scaled_dot_product_attention(q.double(), k.double(), v.double())
    model = blocks(over_packed, device)
    x = random(2, 20, width_of(device), device=device, dtype=torch.float32)
    with torch.autocast(device, dtype):
        loss = model(x).float().square().mean()
    loss.backward()
    assert all(parameter.grad.dtype == torch.float32 and parameter.grad.any() for parameter in model.parameters())


@every_device
def test_export(device):
    dtype, tolerance = precision(device)
    model = blocks(over_packed, device, dtype, count=1)
    x = random(2, 24, width_of(device), device=device, dtype=dtype)
    program = torch.export.export(model, (x,), dynamic_shapes=({1: torch.export.Dim("length", min=2, max=512)},))
    assert "flashcore.attention_with_lse" in str(program.graph)
    for length in (24, 37):
        x = random(2, length, width_of(device), device=device, dtype=dtype)
        exported = program.module()
        near(step(exported, x), step(model, x), tolerance)


@every_device
def test_vmap(device):
    q, k, v = (random(3, 2, 20, 2, 64, device=device, seed=seed).requires_grad_() for seed in range(3))
    dout = random(3, 2, 20, 2, 64, device=device, seed=4)
    sinks = torch.ones(2, device=device)

    def both(vectorized, rules, shared):
        keys = k[0] if shared else k
        call = lambda q, k, v: flash_attn_func(q, k, v, causal=True, **rules)
        if vectorized:
            output = torch.vmap(call, in_dims=(0, None if shared else 0, 0))(q, keys, v)
        else:
            output = torch.stack([call(q[at], keys if shared else keys[at], v[at]) for at in range(3)])
        return output, *torch.autograd.grad(output, (q, k, v), dout)

    for rules in ({}, {"s_aux": sinks}):
        for shared in (False, True):
            for one, other in zip(both(True, rules, shared), both(False, rules, shared)):
                assert one.shape == other.shape and (one.float() - other.float()).abs().max().item() < 5e-2


@every_device
def test_several_gradients_of_one_output(device):
    """By ``torch.func.vmap``; with ``is_grads_batched`` PyTorch hands over tensors without memory."""
    q, k, v = (random(1, 20, 2, 64, device=device, seed=seed).requires_grad_() for seed in range(3))
    output, douts = flash_attn_func(q, k, v), random(3, 1, 20, 2, 64, device=device, seed=4)
    of = lambda dout: torch.autograd.grad(output, q, dout, retain_graph=True)[0]
    assert torch.equal(torch.func.vmap(of)(douts), torch.stack([of(dout) for dout in douts]))
    with pytest.raises(
        TypeError, match="^dout cannot be read .*is_grads_batched=True, where torch.func.vmap is served"
    ):
        torch.autograd.grad(output, q, douts, is_grads_batched=True)


@every_device
def test_forward_mode_is_refused(device):
    """A tangent that the result does not have would be a derivative of zero."""
    q, k, v = (random(1, 20, 2, 64, device=device, seed=seed) for seed in range(3))
    recorded, lse = q.clone().requires_grad_(), torch.zeros(1, 2, 20, device=device)
    lengths = torch.tensor([4], dtype=torch.int32, device=device)
    forward = torch.autograd.forward_ad
    calls = {
        "q": lambda x: flash_attn_func(x, k, v),
        "v": lambda x: flash_attn_func(recorded, k, x, causal=True),
        "qkv": lambda x: flash_attn_qkvpacked_func(torch.stack((x, k, v), 2)),
        "query": lambda x: scaled_dot_product_attention(x, k, v),
        "attn_mask": lambda x: scaled_dot_product_attention(q, k, v, x[0, :, :1, :2].float()),
        "k_cache": lambda x: flash_attn_with_kvcache(q[:, :1], x, v),
        "k": lambda x: flash_attn_with_kvcache(
            q[:, :1], k.clone(), v.clone(), x[:, :1], v[:, :1], cache_seqlens=lengths
        ),
        "out_partial": lambda x: flash_attn_combine(x[None], lse.mT[None].contiguous()),
        "out_b": lambda x: flash_attn_merge(q, lse, x, lse),
    }
    for name, call in calls.items():
        with pytest.raises(NotImplementedError, match=f"^{name} has a tangent, expected a tensor without"):
            torch.func.jvp(call, (q,), (q,))
        with forward.dual_level(), pytest.raises(NotImplementedError, match=f"^{name} has a tangent"):
            call(forward.make_dual(q, k))
        with forward.dual_level():
            call(q)  # nothing is lost where no tensor has one


@every_device
def test_the_operators_keep_pytorchs_rules(device):
    q, k, v = (random(1, 24, 2, 64, device=device, seed=seed).requires_grad_() for seed in range(3))
    numbers, nothing, factors = (None, True, -1, -1, 0, 0.0, None, None), (None,) * 8, (None,) * 3
    operators = torch.ops.flashcore
    sinks = torch.ones(2, device=device, requires_grad=True)
    qkv, kv = torch.stack([q, k, v], 2).detach().requires_grad_(), torch.stack([k, v], 2).detach().requires_grad_()
    calls = [
        ((q, k, v), sinks, "flash_attn_func"),
        ((qkv, None, None), None, "flash_attn_qkvpacked_func"),
        ((q, kv, None), None, "flash_attn_kvpacked_func"),
        ((q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)), None, "scaled_dot_product_attention"),
    ]
    for operator in (operators.attention, operators.attention_with_lse):
        torch.library.opcheck(operator.default, (q, k, v, None, True))
        for tensors, rest, function in calls:
            torch.library.opcheck(operator.all, (*tensors, *numbers, *nothing, rest, *factors, function, False))
    for tensors, rest, function in calls:
        call = (*numbers, *nothing, rest if rest is None else rest.detach(), *factors, function, False)
        with torch.no_grad():
            output, lse = operators.attention_with_lse.all(*tensors, *call)
        given = [None if x is None else x.detach() for x in tensors]
        needed = [True, tensors[1] is not None, tensors[2] is not None, rest is not None]
        for dlse in (None, torch.ones_like(lse)):
            arguments = (torch.ones_like(output), *given, output, lse, dlse, *call)
            torch.library.opcheck(operators.attention_backward.default, (*arguments, needed))
            found = operators.attention_backward(*arguments, [False] * 3 + [rest is not None])
            assert len(found) == (rest is not None)


@every_device
def test_the_operator_without_log_sum_exps_has_gradients_too(device):
    q, k, v = (random(1, 24, 2, 64, device=device, seed=seed).requires_grad_() for seed in range(3))
    found = torch.autograd.grad(torch.ops.flashcore.attention(q, k, v, None, True).sum(), (q, k, v))
    expected = torch.autograd.grad(flash_attn_func(q, k, v, causal=True).sum(), (q, k, v))
    for one, other in zip(found, expected):
        assert torch.equal(one, other) if device == "cpu" else (one - other).abs().max().item() < 1e-1


@every_device
def test_modes_see_the_backward_pass(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    q, k, v = (torch.nn.Parameter(random(1, 24, 2, 64, device=device, seed=seed)) for seed in range(3))
    with Watch():
        flash_attn_func(q, k, v).sum().backward()
    assert torch.ops.flashcore.attention_with_lse.default in seen
    assert torch.ops.flashcore.attention_backward.default in seen
    expected = torch.autograd.grad(flash_attn_func(q, k, v).sum(), (q, k, v))
    for leaf, gradient in zip((q, k, v), expected):
        assert (leaf.grad - gradient).abs().max().item() < 1e-1


@every_device
def test_inference_is_not_recorded(device):
    q, k, v = (random(1, 24, 2, 64, device=device, seed=seed) for seed in range(3))
    assert flash_attn_func(q, k, v).grad_fn is None
    with torch.no_grad():
        assert flash_attn_func(q.clone().requires_grad_(), k, v).grad_fn is None
        assert flash_attn_qkvpacked_func(torch.stack([q, k, v], 2).requires_grad_()).grad_fn is None
    assert flash_attn_func(q, k.clone().requires_grad_(), v).grad_fn is not None


@every_device
def test_caches_have_no_gradients(device):
    x = random(1, 16, 2, 64, device=device)
    cache = x.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="k_cache requires grad.* has no backward pass"):
        flash_attn_with_kvcache(x, cache, x)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    used = torch.full((1,), 16, dtype=torch.int32, device=device)
    output = flash_attn_varlen_func(x, cache, x, None, None, 16, 16, block_table=table, seqused_k=used)
    with pytest.raises(NotImplementedError, match="block_table was given with tensors that require grad"):
        output.sum().backward()


@every_device
@pytest.mark.parametrize("function", FUNCTIONS)
def test_dropout_is_refused_with_the_reason(function, device):
    x = random(1, 16, 2, 64, device=device).requires_grad_()
    given = {
        "flash_attn_qkvpacked_func": [torch.stack([x] * 3, 2)],
        "flash_attn_kvpacked_func": [x, torch.stack([x] * 2, 2)],
    }
    rest = ()
    if function == "flash_attn_varlen_func":
        given[function], rest = [x[0]] * 3, (*[starts((16,), device)] * 2, 16, 16)
    with pytest.raises(
        NotImplementedError, match="dropout_p=0.1 is not supported yet, expected 0.0: which probabilities"
    ):
        FUNCTIONS[function](*given.get(function, [x] * 3), *rest, dropout_p=0.1)


@pytest.mark.parametrize(
    "change, error, words",
    [
        (
            lambda q, k, v: (q.double(), k.double(), v.double()),
            TypeError,
            "q has element type float64, expected float16",
        ),
        (lambda q, k, v: (q, k.half(), v), TypeError, "k has element type f16, expected bf16 like q"),
        (lambda q, k, v: (q[0], k, v), ValueError, "q has 3 dimensions, expected 4"),
        (lambda q, k, v: (q, k[:, :9], v), ValueError, "v has shape .* expected"),
        (lambda q, k, v: (q, k, v.to("meta")), Exception, "v is on meta, expected"),
    ],
)
@every_device
def test_wrong_use_is_named(change, error, words, device):
    q, k, v = (random(1, 16, 2, 64, device=device, seed=seed).requires_grad_() for seed in range(3))
    with pytest.raises(error, match=words):
        flash_attn_func(*change(q, k, v)).sum().backward()


@every_device
def test_a_learned_scale_is_refused(device):
    """Its gradient would silently be lost."""
    q, k, v = (random(1, 16, 2, 64, device=device, seed=seed).requires_grad_() for seed in range(3))
    scale = torch.tensor(0.25)
    for name in ("softmax_scale", "softcap"):
        with pytest.raises(ValueError, match=f"^{name}=a .*Tensor.*, expected a number without a gradient"):
            flash_attn_func(q, k, v, **{name: scale.clone().requires_grad_()})
    with pytest.raises(ValueError, match="^scale=a .*, expected a number without a gradient"):
        scaled_dot_product_attention(q, k, v, scale=scale.clone().requires_grad_())
    assert torch.equal(flash_attn_func(q, k, v, softmax_scale=scale), flash_attn_func(q, k, v, softmax_scale=0.25))


@pytest.mark.parametrize(
    "at, change, error, words",
    [
        (0, lambda x: x[:, :5], ValueError, "dout has .* expected .* to go with q"),
        (0, lambda x: x.float(), TypeError, "dout has element type f32, expected bf16 like q"),
        (4, lambda x: x[:, :1], ValueError, "out has .* expected .* to go with q"),
        (5, lambda x: x[..., :3], ValueError, r"softmax_lse has shape \[1, 2, 3\], expected \[1, 2, 16\]"),
        (5, lambda x: x.half(), TypeError, "softmax_lse has element type f16, expected float32"),
        (6, lambda x: x[..., :3], ValueError, r"dlse has shape \[1, 2, 3\], expected \[1, 2, 16\]"),
        (6, lambda x: x.half(), TypeError, "dlse has element type f16, expected float32"),
    ],
)
def test_wrong_use_of_the_backward_operator_is_named(at, change, error, words):
    q, k, v = (random(1, 16, 2, 64, device="cpu", seed=seed) for seed in range(3))
    output, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    arguments = [torch.ones_like(output), q, k, v, output, lse, lse]
    arguments[at] = change(arguments[at])
    call = (None, False, -1, -1, 0, 0.0, None, None, *(None,) * 12, "flash_attn_func", False, [True] * 3 + [False])
    with pytest.raises(error, match=words):
        torch.ops.flashcore.attention_backward(*arguments, *call)


def test_the_extension_refuses_what_is_no_tensor():
    q = torch.randn(1, 4, 2, 8)
    numbers = (None, False, (-1, -1), 0, 0.0, None, None)
    out, lse = flashcore._flashcore.attend((q, q, q), numbers, "flash_attn_func", True, "dispatcher")
    into = tuple(torch.empty_like(q) for _ in range(3))
    for saved, name in [((out, 3, out), "softmax_lse"), ((out, lse, [1]), "dout")]:
        with pytest.raises(TypeError, match=f"{name} is a .*, expected a torch.Tensor"):
            flashcore._flashcore.attend_backward((q, q, q), numbers, "flash_attn_func", saved, into, False)
    with pytest.raises(TypeError, match="k is a <class 'int'>, expected a torch.Tensor"):
        flashcore._flashcore.attend((q, 3, q), numbers, "flash_attn_func", True, "dispatcher")
