"""Training: optimiser steps beside PyTorch's attention, and the example."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from conftest import devices
from test_gradients import WAYS, blocks, of_pytorch, random, unserved, width_of
from test_processes import environment

every_device = pytest.mark.parametrize("device", devices())

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_torch.py"


def losses(attention, device, dtype, steps=10):
    """Of a few steps that teach blocks to give back what they are given."""
    model = blocks(attention, device, dtype, count=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    found = []
    for at in range(steps):
        x = random(2, 61, width_of(device), device=device, dtype=dtype, seed=at)
        loss = torch.nn.functional.mse_loss(model(x).float(), x.float())
        optimizer.zero_grad()
        try:
            loss.backward()
        except NotImplementedError as error:
            unserved(error)
        optimizer.step()
        found.append(loss.item())
    return found


def apart(one, other):
    return max(abs(a - b) for a, b in zip(one, other))


@every_device
@pytest.mark.parametrize("attention", WAYS)
def test_ten_steps_are_those_of_pytorchs_attention(attention, device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    ours, theirs = losses(attention, device, dtype), losses(of_pytorch, device, dtype)
    assert ours[-1] < 0.9 * ours[0]
    # What 16 bits make of the same steps.
    noise = 0.0 if device == "cpu" else apart(theirs, losses(of_pytorch, device, torch.float32))
    assert apart(ours, theirs) <= 2 * noise + 1e-4, (ours, theirs, noise)


def llama(attention, device, dtype):
    """A Llama of transformers with random weights, and grouped heads."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=512, attn_implementation=attention,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(device, dtype)


def llama_losses(attention, device, dtype, steps=10):
    model = llama(attention, device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    text = torch.randint(0, 256, (4, 200), generator=torch.Generator().manual_seed(1)).to(device)
    found = []
    for _ in range(steps):
        loss = model(input_ids=text, labels=text).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@every_device
@pytest.mark.hardware
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_a_llama_of_transformers_trains_as_with_pytorchs_attention(device):
    from flashcore import flash_attn_func
    from transformers import AttentionInterface

    calls = []

    def attention(module, query, key, value, mask, scaling=None, dropout=0.0, **_):
        calls.append(query.requires_grad)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return flash_attn_func(q, k, v, dropout_p=dropout, softmax_scale=scaling, causal=True), None

    # A name with "flash" in it is that of a package to newer versions.
    AttentionInterface.register("fused_core", attention)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    ours, theirs = llama_losses("fused_core", device, dtype), llama_losses("sdpa", device, dtype)
    assert len(calls) == 30 and all(calls) and ours[-1] < ours[0] - 0.5
    noise = 0.0 if device == "cpu" else apart(theirs, llama_losses("sdpa", device, torch.float32))
    assert apart(ours, theirs) <= 2 * noise + 1e-3, (ours, theirs, noise)


@every_device
@pytest.mark.hardware
def test_the_example_trains(device):
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--steps", "12", "--device", device], capture_output=True, text=True, timeout=900,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [tuple(map(float, row)) for row in re.findall(r"^ *(\d+) +([\d.]+) +([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(rows) == 12 and rows[-1][1] < rows[0][1] - 0.2, done.stdout
    assert all(abs(ours - theirs) < (1e-3 if device == "cpu" else 5e-2) for _, ours, theirs in rows), done.stdout
