"""Kernels that PyTorch's dispatcher calls without Python. They are for CUDA: here they are put in the CPU's place, where
their answers are those of the Python functions that they stand for."""

import math
import platform
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")
import flashcore.torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from flashcore import _flashcore, _gradients, _torch  # noqa: E402

heads_first = torch.ops.aten._scaled_dot_product_flash_attention.default
heads_first_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
ours = torch.ops.flashcore


def register(namespace):
    kernels = _flashcore.Kernels.register(torch._C.__file__, namespace, "CPU", flashcore.torch._refuse)
    if kernels is None:
        pytest.skip(f"PyTorch {torch.__version__} has no stable interface")
    return kernels


@pytest.fixture
def switched():
    kernels = register("aten")
    yield
    kernels.remove()


def tensors(*lengths, heads=(3, 3, 3), dim=16, seed=0):
    torch.manual_seed(seed)
    shapes = zip(lengths, heads)
    return [torch.randn(2, length, head, dim).transpose(1, 2).requires_grad_() for length, head in shapes]


def test_where_there_are_kernels():
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    machine = (platform.system(), platform.machine())
    assert (_torch._kernels is not None) == (version >= (2, 11) and machine == ("Linux", "x86_64"))


# The first question after the interface decides for the whole process: there is none in this file.
WITHOUT = """
import importlib.util, sys
folder = importlib.util.find_spec("flashcore").submodule_search_locations[0]
spec = importlib.util.spec_from_file_location("flashcore._flashcore", folder + "/_flashcore.abi3.so")
extension = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(extension)
assert extension.Kernels.register("nowhere", "flashcore", "CUDA") is None
import torch, flashcore.torch
from flashcore import _torch
assert _torch._kernels is None and flashcore.torch._Registered()._kernels is None
torch.manual_seed(0)
q, k, v = (torch.randn(2, 5, 3, 16, requires_grad=True) for _ in range(3))
call = lambda *x: flashcore.flash_attn_func(*x, causal=True)
turned = [x.transpose(1, 2) for x in (q, k, v)]
expected = torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=True).transpose(1, 2)
wanted = torch.autograd.grad(expected.sum(), (q, k, v))
for function in (call, lambda *x: torch.ops.flashcore.attention(*x, None, True)):
    with torch.no_grad():
        assert torch.allclose(function(q, k, v), expected, atol=1e-5)
    out = function(q, k, v)
    for found, gradient in zip(torch.autograd.grad(out.sum(), (q, k, v)), wanted):
        assert torch.allclose(found, gradient, atol=1e-5)
try:
    torch.ops.flashcore.attention(q, k[:1], v)
except ValueError as error:
    print("refused", error)
"""


def test_everything_works_where_there_are_none():
    """Other machines and older versions of PyTorch have the Python functions alone."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused k has shape [1, 5, 3, 16]")


@pytest.mark.parametrize(
    "lengths, heads, causal",
    [
        ((5, 5, 5), (3, 3, 3), True),
        ((3, 7, 7), (4, 2, 2), True),
        ((4, 6, 6), (3, 3, 3), False),
        ((4, 0, 0), (3, 3, 3), False),
    ],
)
def test_pytorchs_operators_and_its_own_autograd(switched, lengths, heads, causal):
    q, k, v = tensors(*lengths, heads=heads)
    out, lse, starts_q, starts_k, most_q, most_k, state, offset, mask = heads_first(q, k, v, 0.0, causal, scale=0.3)
    with torch.no_grad():
        expected, sums, *rest = flashcore.torch.heads_first(q, k, v, 0.0, causal, scale=0.3)
    assert torch.equal(out, expected) and torch.equal(lse, sums) and out.stride() == q.stride()
    assert [starts_q, starts_k, most_q, most_k] == rest[:4]
    for mine, theirs in zip((state, offset, mask), rest[4:]):
        assert (mine.shape, mine.dtype, mine.device) == (theirs.shape, theirs.dtype, theirs.device)
    # One that autograd gives for a sum has no strides at all.
    for dout in (torch.randn(out.shape), torch.ones(()).expand(out.shape)):
        found = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        with torch.no_grad():
            wanted = flashcore.torch.heads_first_backward(
                dout, q, k, v, expected, sums, *rest[:4], 0.0, causal, *rest[4:6], scale=0.3
            )
        for gradient, theirs, tensor in zip(found, wanted, (q, k, v)):
            assert torch.equal(gradient, theirs) and gradient.stride() == tensor.stride()


def test_tensors_that_lie_otherwise(switched):
    packed = torch.randn(2, 5, 3, 3, 16)
    q, k, v = (it.transpose(1, 2) for it in packed.unbind(2))
    assert heads_first(q, k, v)[0].stride() == torch.empty_like(q).stride()
    q, k, v = tensors(5, 5, 5)
    expected = heads_first(q, k, v)[0]
    wide = torch.zeros(2, 3, 5, 32)
    wide[..., ::2] = q
    for other in (q.contiguous(), q.detach()[:, :, :, :]):
        assert torch.equal(heads_first(other, k, v)[0], expected)
    with pytest.raises(ValueError, match="^query has stride 2 in its last dimension, expected 1"):
        heads_first(wide[..., ::2], k, v)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: ((q, k[:1], v), {}),
        lambda q, k, v: ((q.double(), k, v), {}),
        lambda q, k, v: ((q, k.half(), v), {}),
        lambda q, k, v: ((q[..., :12], k[..., :12], v[..., :12]), {}),
        lambda q, k, v: ((q[:, :2], k, v), {}),
        lambda q, k, v: ((q, k, v[..., :8]), {}),
        lambda q, k, v: ((q, k, v), {"scale": float("inf")}),
        lambda q, k, v: ((q, k, v, 0.5), {}),
        lambda q, k, v: ((q, k, v, 0.0, False, True), {}),
    ],
)
def test_errors_are_those_of_the_function(switched, change):
    q, k, v = (tensor.detach() for tensor in tensors(5, 5, 5))
    arguments, options = change(q, k, v)
    with pytest.raises(Exception) as wanted:
        flashcore.torch.heads_first(*arguments, **options)
    count = q._use_count()
    with pytest.raises(type(wanted.value)) as found:
        heads_first(*arguments, **options)
    assert str(found.value) == str(wanted.value)
    del found
    assert q._use_count() == count


def test_no_memory(switched):
    """PyTorch's own error for that, which its callers look for."""
    q = torch.empty(16).expand(1 << 20, 4, 1 << 20, 16)
    for call in (heads_first, ours.attention):
        kernels = register("flashcore")
        try:
            with pytest.raises(
                torch.OutOfMemoryError, match=r"^PyTorch made no tensor of \[1048576, 4, 1048576, 16\] on the CPU"
            ):
                call(q, q, q)
        finally:
            kernels.remove()


def test_many_errors_in_many_threads(switched):
    q, k, v = (tensor.detach() for tensor in tensors(5, 5, 5))
    bad = [
        (TypeError, (q, k.half(), v)),
        (ValueError, (q, k[:1], v)),
        (NotImplementedError, (q, k, v, 0.5)),
    ]
    found = []

    def work():
        for _ in range(400):
            for kind, arguments in bad:
                try:
                    heads_first(*arguments)
                except Exception as error:
                    found.append(type(error) is kind)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    assert len(found) == 5 * 1200 and all(found)
    assert [tensor._use_count() for tensor in (q, v)] == [1, 1]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_errors_where_python_has_no_thread():
    """In the threads that PyTorch made, here those of its interpreter: an error is stored, and told later."""
    kernels = register("flashcore")
    q, k, v = (torch.randn(2, 5, 3, 16) for _ in range(3))
    with torch.no_grad():
        try:
            assert all(torch.equal(one, ours.attention(q, k, v)) for one in forked(q, k, v))
            for _ in range(50):
                with pytest.raises(RuntimeError, match=r"k has shape \[1, 5, 3, 16\], expected \[2, 5, 3, 16\]"):
                    forked(q, k[:1], v)
        finally:
            kernels.remove()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.ops.flashcore.attention(q, k, v)


def forked(q, k, v):
    scripted = torch.jit.script(attention)
    return [torch.jit.wait(future) for future in [torch.jit.fork(scripted, q, k, v) for _ in range(8)]]


def test_errors_below_a_public_function():
    """The extension, which the function calls, calls Python for such tensors, and that PyTorch, which releases Python."""
    kernels = register("flashcore")
    q, k, v = torch.nn.Parameter(torch.randn(2, 5, 3, 16)), torch.randn(2, 5, 3, 16), torch.randn(2, 5, 3, 16)
    count = k._use_count()
    try:
        with torch.no_grad():
            for _ in range(50):
                with pytest.raises(ValueError, match=r"^k has shape \[1, 5, 3, 16\], expected \[2, 5, 3, 16\]"):
                    flashcore.flash_attn_func(q, k[:1], v)
            assert torch.equal(flashcore.flash_attn_func(q, k, v), flashcore.flash_attn_func(q.data, k, v))
    finally:
        kernels.remove()
    assert k._use_count() == count


@pytest.mark.parametrize("before", [0, 8, 1 << 16])
def test_a_tensor_whose_memory_was_given_back_is_refused(switched, before):
    """Its address is that of nothing, and as far behind that as the tensor is in its memory."""
    good = torch.randn(2, 3, 5, 16)
    gone = torch.zeros(before + good.numel())[before:].view(good.shape)
    gone.untyped_storage().resize_(0)
    kernels = register("flashcore")
    try:
        for name, call in (
            ("q", lambda: ours.attention(gone, good, good)),
            ("v", lambda: ours.attention(good, good, gone)),
            ("query", lambda: heads_first(gone, good, good)),
            ("key", lambda: heads_first(good, gone, good)),
        ):
            with pytest.raises(TypeError, match=f"^{name} has elements and no memory that they are in, expected"):
                call()
    finally:
        kernels.remove()


def test_errors_of_a_backward_pass(switched):
    for _ in range(200):
        q, k, v = tensors(5, 5, 5)
        out = heads_first(q, k, v)[0]
        q.data = q.data[..., :8]
        with pytest.raises(ValueError, match=r"key has shape \[2, 3, 5, 16\], expected \[2, 3, 5, 8\]"):
            out.sum().backward()
    q, k, v = tensors(5, 5, 5)
    heads_first(q, k, v)[0].sum().backward()
    assert q.grad is not None


def test_references_are_given_back(switched):
    q, k, v = (tensor.detach() for tensor in tensors(5, 7, 7))
    counts = [tensor._use_count() for tensor in (q, k, v)]
    answer = heads_first(q, k, v, 0.0, True)
    gradients = heads_first_backward(q, q, k, v, *answer[:6], 0.0, True, *answer[6:8])
    assert [tensor._use_count() for tensor in (q, k, v)] == counts
    assert {tensor._use_count() for tensor in (*answer, *gradients) if isinstance(tensor, torch.Tensor)} == {1}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"softcap": -1.0}, "softcap=-1.0, expected a positive number, or 0"),
        ({"scale": math.inf}, "scale=inf, expected a finite number"),
        ({"chunk": -3}, "attention_chunk=-3, expected no negative number"),
        ({"function": "nobody"}, "there is no function `nobody`"),
    ],
    ids=str,
)
def test_tensors_of_calls_that_are_refused_are_given_back(change, expected):
    """Also those that come after the argument that is refused."""
    numbers = {"scale": None, "chunk": 0, "softcap": 0.0, "function": "flash_attn_func"} | change
    q, slopes = torch.randn(1, 5, 2, 16), torch.ones(2)
    lists = (*(None,) * 7, slopes, *(None,) * 4)
    rest = (
        numbers["scale"],
        False,
        -1,
        -1,
        numbers["chunk"],
        numbers["softcap"],
        5,
        5,
        *lists,
        numbers["function"],
        False,
    )
    kernels = register("flashcore")
    try:
        for operator, given in (
            (ours.attention.all, (q, q, q, *rest)),
            (ours.attention_backward.default, (q, q, q, q, q, torch.zeros(1, 2, 5), None, *rest, [True] * 4)),
        ):
            counts = [tensor._use_count() for tensor in (q, slopes)]
            for _ in range(3):
                with pytest.raises(ValueError, match=f"^{expected}"):
                    operator(*given)
            assert [tensor._use_count() for tensor in (q, slopes)] == counts
    finally:
        kernels.remove()


def test_a_panic_is_an_error():
    library = torch.library.Library("flashcore_panic", "DEF")
    library.define("panic(Tensor x) -> Tensor")
    kernels = register("flashcore_panic")
    with pytest.raises(RuntimeError, match="^this is a defect of FlashCore: a kernel that panics; please"):
        torch.ops.flashcore_panic.panic(torch.zeros(1))
    kernels.remove()
    kernels.remove()
    with pytest.raises(NotImplementedError, match="Could not run"):
        torch.ops.flashcore_panic.panic(torch.zeros(1))
    library._destroy()


def test_threads_and_what_runs_after_the_switch(switched):
    q, k, v = (tensor.detach() for tensor in tensors(5, 5, 5))
    expected = heads_first(q, k, v)[0]
    answers = []

    def work():
        for _ in range(20):
            answers.append(heads_first(q, k, v)[0])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 80 and all(torch.equal(answer, expected) for answer in answers)
    assert torch.allclose(expected, F.scaled_dot_product_attention(q, k, v), atol=1e-5)
    compiled = torch.compile(lambda q, k, v: heads_first(q, k, v)[0], backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), expected)


def calls():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 5, 4, 16) for _ in range(3))
    rows, starts = torch.randn(9, 2, 16), torch.tensor([0, 2, 9], dtype=torch.int32)
    gaps = torch.tensor([0, 7, 2, 7, 9], dtype=torch.int32)[::2]
    numbers, none, name, _ = _gradients.PLAIN
    window = (2, 0, 0, 30.0, None, None)
    sinks = (*none[:8], torch.randn(4), *none[9:])
    lists = (starts, gaps, *none[2:])
    qkv = torch.randn(2, 5, 3, 4, 16)
    return {
        "plain": ("default", (q, k, v)),
        "scaled": ("default", (q, k, v, 0.5, True)),
        "all": ("all", (q, k, v, None, True, *window, *sinks, name, False)),
        "ragged": (
            "all",
            (rows, rows, rows, None, True, -1, -1, 0, 0.0, 7, 7, *lists, "flash_attn_varlen_func", False),
        ),
        "packed": ("all", (qkv, None, None, None, False, *numbers, *none, "flash_attn_qkvpacked_func", False)),
        "half packed": (
            "all",
            (q, qkv[:, :, 1:], None, None, False, *numbers, *none, "flash_attn_kvpacked_func", False),
        ),
        "chunk": ("all", (q, k, v, None, False, -1, -1, -3, 0.0, None, None, *none, name, False)),
        "cap": ("all", (q, k, v, None, False, -1, -1, 0, -1.0, None, None, *none, name, False)),
        "function": ("all", (q, k, v, None, False, *numbers, *none, "flash", False)),
        "shape": ("default", (q, k[:1], v)),
    }


def answer(call):
    """What a call gives, or the error that it raises."""
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def assert_same(found, expected):
    if isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected):
            assert_same(mine, theirs)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected) and found.stride() == expected.stride()
    else:
        assert found == expected


@pytest.mark.parametrize("case", calls())
def test_our_operators(case):
    overload, arguments = calls()[case]
    operators = [getattr(ours.attention, overload), getattr(ours.attention_with_lse, overload)]

    def answers():
        return [answer(lambda: operator(*arguments)) for operator in operators]

    expected = answers()
    kernels = register("flashcore")
    assert kernels.operators == [
        "attention",
        "attention.all",
        "attention_with_lse",
        "attention_with_lse.all",
        "attention_backward",
    ]
    try:
        found = answers()
    finally:
        kernels.remove()
    assert_same(found, expected)


@pytest.mark.parametrize("needed", [(True, True, True, True), (False, True, False, False)])
@pytest.mark.parametrize("case", ["all", "ragged", "packed", "half packed", "cap", "hidden", "empty", "shape"])
def test_gradients_of_our_operators(case, needed):
    cases = calls()
    q, k, v = (torch.randn(2, 3, length, 16) for length in (4, 6, 6))
    numbers, none, name, _ = _gradients.PLAIN
    cases["hidden"] = ("all", (q, k, v, None, True, *numbers, *none, "scaled_dot_product_attention", False))
    cases["empty"] = (
        "all",
        (q, k[:, :, :0], v[:, :, :0], None, False, *numbers, *none, "scaled_dot_product_attention", False),
    )
    _, arguments = cases[case] if case != "shape" else cases["all"]
    given = [it is not None for it in arguments[:3]] + [arguments[19] is not None]
    needed = [need and there for need, there in zip(needed, given)]
    if case == "cap":
        out, lse = ours.attention_with_lse.all(*arguments[:8], 1.0, *arguments[9:])
    else:
        out, lse = ours.attention_with_lse.all(*arguments)
    dout = torch.ones(()).expand(out.shape) if case == "all" else torch.randn_like(out)
    dout = dout[:1] if case == "shape" else dout
    dlse = torch.randn(lse.mT.shape).mT if case in ("all", "ragged", "hidden") else None

    def gradients():
        return ours.attention_backward(dout, *arguments[:3], out, lse, dlse, *arguments[3:], needed)

    expected = answer(gradients)
    assert len(expected) == (2 if case in ("cap", "shape") else sum(needed))
    kernels = register("flashcore")
    try:
        assert_same(answer(gradients), expected)
    finally:
        kernels.remove()


def test_the_compiler_and_transformations():
    q, k, v = (torch.randn(2, 5, 4, 16, requires_grad=True) for _ in range(3))
    call = torch.compile(lambda *x: flashcore.flash_attn_func(*x, causal=True), backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(call(q, k, v).sum(), (q, k, v))
    kernels = register("flashcore")
    try:
        found = torch.autograd.grad(call(q, k, v).sum(), (q, k, v))
        alone = torch.vmap(lambda q: ours.attention(q, k, v))(torch.stack([q, q]))
    finally:
        kernels.remove()
    assert all(torch.equal(one, other) for one, other in zip(found, expected))
    assert torch.equal(alone[0], ours.attention(q, k, v))


@pytest.mark.parametrize(
    "like", [lambda x: x, lambda x: x.transpose(1, 2), lambda x: x[:, ::2], lambda x: x[:, :1], lambda x: x[:0]]
)
def test_memory_for_gradients(like):
    tensor = like(torch.randn(2, 4, 3, 16))
    (made,) = _flashcore.empty_like((tensor,))
    theirs = torch.empty_like(tensor)
    assert type(made) is torch.Tensor and made.stride() == theirs.stride() and made.shape == theirs.shape
    with torch.inference_mode():
        assert _flashcore.empty_like((tensor,))[0].is_inference()
