"""PyTorch's own kernels for CUDA tensors, computed on the host: copied there, computed, and copied back."""

import ctypes
import warnings

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.utils._pytree import tree_map

TO_DEVICE, TO_HOST = 1, 2

# What needs no kernel, or becomes copies.
KEPT = ("empty", "new_empty", "set_", "resize_", "record_stream", "is_pinned", "_pin_memory", "detach", "lift", "clone",
        "_to_copy", "to_", "_resize", "alias")  # fmt: skip


def _attention(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """The operator under PyTorch's FlashAttention-2: output, log-sum-exps, and what dropout is replayed from."""
    k, v = (it.float().repeat_interleave(q.shape[1] // it.shape[1], 1) for it in (k, v))
    scores = (q.float() @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), -torch.inf)
    empty = torch.empty(0)
    output = (scores.softmax(-1) @ v).to(q.dtype)
    return output, scores.logsumexp(-1), empty, empty, q.shape[2], k.shape[2], empty, empty, empty


# Where a GPU has a kernel and the host has none.
SUBSTITUTES = {
    # Of integers.
    "aten::histc": lambda tensor, *args, **kwargs: torch.histc(tensor.double(), *args, **kwargs).to(tensor.dtype),
    "aten::_scaled_dot_product_flash_attention": _attention,
}

_runtime = ctypes.CDLL(None)
_runtime.cudaMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _copy(to, source, count, kind):
    if count and _runtime.cudaMemcpy(to, source, count, kind):
        raise RuntimeError("a copy to or from the GPU failed")


def _over(storage, like):
    """A tensor over a storage, with the sizes and strides of another."""
    empty = torch.empty(0, dtype=like.dtype)
    return empty.set_(storage, like.storage_offset(), like.size(), like.stride())


def _to_host(tensor):
    """The same tensor over a copy of its storage."""
    storage = tensor.untyped_storage()
    host = torch.UntypedStorage(storage.nbytes())
    _copy(host.data_ptr(), storage.data_ptr(), storage.nbytes(), TO_HOST)
    twin = _over(host, tensor)
    return torch._neg_view(twin) if tensor.is_neg() else twin


def _to_device(tensor):
    """The same tensor on the GPU; strides with gaps are not kept."""
    if tensor.is_sparse:
        parts = (_to_device(part) for part in (tensor._indices(), tensor._values()))
        return torch.sparse_coo_tensor(*parts, tensor.size())
    dense = tensor if is_non_overlapping_and_dense_or_false(tensor) else tensor.contiguous()
    result = torch.empty_strided(dense.size(), dense.stride(), dtype=dense.dtype, device="cuda")
    _copy(result.data_ptr(), dense.data_ptr(), dense.numel() * dense.element_size(), TO_DEVICE)
    return result


def _write_back(tensor, computed):
    """Writes what was computed to the GPU, which may have to be another size than it was."""
    if (computed.size(), computed.stride()) != (tensor.size(), tensor.stride()):
        tensor.resize_(computed.size())
        computed = _over(torch.UntypedStorage(tensor.untyped_storage().nbytes()), tensor).copy_(computed)
    storage, source = tensor.untyped_storage(), computed.untyped_storage()
    _copy(storage.data_ptr(), source.data_ptr(), storage.nbytes(), TO_DEVICE)


def _is_on_gpu(value):
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def _on_host(operator):
    """An operator that computes on the host what it is asked for on the GPU."""
    arguments = operator._schema.arguments
    compute = SUBSTITUTES.get(operator._schema.name, operator)
    written = [(at, it.name) for at, it in enumerate(arguments) if it.alias_info and it.alias_info.is_write]

    def run(*args, **kwargs):
        twins = {}

        def host(value):
            if isinstance(value, torch.Tensor):
                if id(value) not in twins:
                    twins[id(value)] = (value, _to_host(value) if _is_on_gpu(value) else value)
                return twins[id(value)][1]
            if isinstance(value, torch.device):
                return torch.device("cpu")
            if isinstance(value, torch.Generator):
                return None
            return value

        result = compute(*tree_map(host, args), **tree_map(host, kwargs))

        def write_back(value):
            if _is_on_gpu(value):
                _write_back(*twins[id(value)])

        tree_map(write_back, [args[at] if at < len(args) else kwargs.get(name) for at, name in written])
        originals = {id(twin): original for original, twin in twins.values()}

        def device(value):
            if not isinstance(value, torch.Tensor):
                return value
            return originals[id(value)] if id(value) in originals else _to_device(value)

        return tree_map(device, result)

    return run


def _computes(operator):
    """Whether an operator computes something of tensors, and is neither a view nor a factory."""
    arguments = operator._schema.arguments
    is_view = any(it.alias_info and not it.alias_info.is_write for it in arguments)
    takes_tensors = any("Tensor" in str(it.type) for it in arguments)
    return takes_tensors and not is_view and not operator._schema.name.removeprefix("aten::").startswith(KEPT)


def activate():
    """Replaces PyTorch's kernels for CUDA tensors, for as long as the result lives."""
    torch.cuda.init()
    # Of PyTorch's attention the plain algorithm is left, which consists of other operators.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    library = torch.library.Library("aten", "IMPL", "CUDA")
    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    names = {*registered("CUDA"), *registered("CompositeExplicitAutograd")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sorted(name.removeprefix("aten::") for name in names if name.startswith("aten::")):
            base, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, base), overload or "default")
            if _computes(operator):
                library.impl(name, _on_host(operator))
    return library
