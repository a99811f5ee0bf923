"""Errors of attention over 8-bit tensors by the number of keys, to a million, against float64 on the GPU.

    python3 bench/fp8_accuracy.py [--keys 1024,1048576] [--head-dim 128]
    FA3=fa3 python3 bench/fp8_accuracy.py

Root mean squares over that of the output, 64 queries: of the arithmetic alone, against float64 over the numbers
that the tensors stand for, and in brackets against float64 over the numbers before they were rounded. Contents
and columns are those of docs/fp8.md; factors are per head unless a column says otherwise. FlashAttention-3 is
the wheel fa3-fwd, unpacked into the folder that the variable FA3 names; without it its column is empty.
"""

import argparse
import os
import sys

import flashcore
import torch

QUERIES = 64


def contents(name, keys, dim):
    """Queries, keys and values of one head in float32."""
    chance = torch.Generator("cuda").manual_seed(keys)

    def normal(length):
        return torch.randn(1, length, 1, dim, generator=chance, device="cuda")

    q, k, v = normal(QUERIES), normal(keys), normal(keys) + 0.5
    if name == "peaked":
        q *= 4
    if name == "outliers":
        for tensor in (k, v):
            tensor.view(-1)[::97] *= 50
    return q, k, v


def exact(q, k, v):
    """Attention in float64."""
    q, k, v = (tensor[0, :, 0].double() for tensor in (q, k, v))
    return torch.softmax(q @ k.T * q.shape[-1] ** -0.5, -1) @ v


def error(found, truth):
    return ((found[0, :, 0].double() - truth).norm() / truth.norm()).item()


def bf16(q, k, v):
    tensors = [tensor.bfloat16() for tensor in (q, k, v)]
    return flashcore.flash_attn_func(*tensors), tensors


def all_e4m3(attend):
    def answer(q, k, v):
        tensors, factors = zip(*(flashcore.quantize(tensor, per="sequence") for tensor in (q, k, v)))
        names = ("q_descale", "k_descale", "v_descale")
        wide = [flashcore.dequantize(*pair) for pair in zip(tensors, factors)]
        return attend(*tensors, **dict(zip(names, factors))), wide

    return answer


def cache(per):
    def answer(q, k, v):
        k8, v8, k_descale, v_descale = flashcore.quantize_kv(k, v, per=per)
        q = q.bfloat16()
        found = flashcore.flash_attn_func(q, k8, v8, k_descale=k_descale, v_descale=v_descale)
        return found, (q, flashcore.dequantize(k8, k_descale), flashcore.dequantize(v8, v_descale))

    return answer


def flash_attention_3(q, k, v, **descales):
    sys.path.insert(0, os.environ.get("FA3", "fa3"))
    import fa3_fwd_interface

    out = fa3_fwd_interface.flash_attn_func(q, k, v, **descales)
    return out[0] if isinstance(out, tuple) else out


COLUMNS = {
    "bf16": bf16,
    "all e4m3": all_e4m3(flashcore.flash_attn_func),
    "e4m3 cache": cache("sequence"),
    "e4m3 cache, per token": cache("token"),
    "FlashAttention-3 in e4m3": all_e4m3(flash_attention_3),
}


def cell(answer, tensors, truth):
    try:
        found, stood_for = answer(*tensors)
    except ImportError:
        return ""
    return f"{error(found, exact(*stood_for)):.1e} ({error(found, truth):.1e})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", default="1024,16384,131072,1048576")
    parser.add_argument("--head-dim", type=int, default=128)
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, head dim {arguments.head_dim}\n")
    print("| keys | contents | " + " | ".join(COLUMNS) + " |")
    print("| --- " * (2 + len(COLUMNS)) + "|")
    for keys in map(int, arguments.keys.split(",")):
        for name in ("even", "peaked", "outliers"):
            tensors = contents(name, keys, arguments.head_dim)
            truth = exact(*tensors)
            cells = [cell(answer, tensors, truth) for answer in COLUMNS.values()]
            print(f"| {keys} | {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
