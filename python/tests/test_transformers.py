"""Tiny random models of transformers on FlashCore, in 16 bits: judged by what the same model in float32 says.

A result passes where its error is at most twice that of transformers' own attention in 16 bits.
"""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import flashcore  # noqa: E402
import flashcore.transformers  # noqa: E402
from conftest import devices  # noqa: E402

# Models, and what they are about.
MODELS = {
    "LlamaConfig": {},
    "MistralConfig": {"sliding_window": 6},
    "Gemma2Config": {"sliding_window": 6, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 64},
    "Gemma3TextConfig": {"sliding_window": 6, "query_pre_attn_scalar": 64},
    "Qwen3Config": {},
    "Phi3Config": {},
    # Every token goes to all experts: which one is chosen may depend on the last bit of what attention gives.
    "GptOssConfig": {"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 2},
}
KINDS = pytest.mark.parametrize("kind", MODELS)
DEVICES = pytest.mark.parametrize("device", devices())
GREEDY = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0, "disable_compile": True}
LENGTH = 12


def network(kind, device):
    """A model in float32, and the same in 16 bits with FlashCore's attention."""
    sizes = {
        "vocab_size": 64, "hidden_size": 128, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": None,
        "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes, **MODELS[kind])
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    # What is rounded to 16 bits is so for both.
    ours = made.to(device).bfloat16()
    exact = copy.deepcopy(ours).float()
    assert flashcore.transformers.register() == "fused_core"
    return exact.eval(), ours.eval()


def prompts(device):
    """Tokens of two sequences, and masks that hide the first of one, or the last."""
    tokens = torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(1)).to(device)
    left = torch.ones_like(tokens)
    left[1, :4] = 0
    return tokens, left, left.flip(1)


def run_on_ours(model, device, call):
    model.set_attn_implementation("fused_core")
    found = call(model)
    assert flashcore.info()["last"]["device"].startswith(device)
    return found


def judge(found, rough, exact, what):
    """Errors at most twice those of the plain algorithm in 16 bits, and the rounding of an answer."""
    ours, theirs = ((it.float() - exact).abs().max().item() for it in (found, rough))
    assert ours <= 2 * theirs + 2**-8 * exact.abs().max().item(), f"{what}: {ours} against {theirs}"


def equal_or_tied(found, expected, exact, prompt, mask=None):
    """Tokens that are the same; where the first other one stands, the exact model knows no better."""
    for at, (mine, theirs) in enumerate(zip(found, expected)):
        if mine != theirs:
            before = torch.cat((prompt, torch.tensor(expected[:at], device=prompt.device, dtype=prompt.dtype)))
            mask = None if mask is None else torch.nn.functional.pad(mask, (0, at), value=1)[None]
            logits = exact(before[None], attention_mask=mask).logits[0, -1]
            assert (logits[mine] - logits[theirs]).abs() <= 2**-6 * logits.abs().max(), (found, expected)
            return
    assert len(found) == len(expected)


@DEVICES
@KINDS
@torch.no_grad()
def test_logits(kind, device):
    exact, model = network(kind, device)
    tokens, left, right = prompts(device)
    # Sequences of 4, 7 and 1 tokens in one row.
    positions = torch.tensor([[*range(4), *range(7), 0]], device=device)
    parts = [(0, 4), (4, 11), (11, 12)]

    def answers(model, packed):
        yield model(tokens).logits
        for mask in (left, right):
            yield model(tokens, attention_mask=mask).logits[mask.bool()]
        row = tokens[:1]
        if packed:
            yield model(row, position_ids=positions).logits
        else:
            yield torch.cat([model(row[:, begin:end]).logits for begin, end in parts], 1)

    model.set_attn_implementation("eager")
    rough, true = list(answers(model, False)), list(answers(exact, False))
    found = run_on_ours(model, device, lambda model: list(answers(model, True)))
    for what, *three in zip(("whole", "padded left", "padded right", "packed"), found, rough, true):
        judge(*three, what)


@DEVICES
@KINDS
@torch.no_grad()
def test_greedy_tokens(kind, device):
    exact, model = network(kind, device)
    tokens, mask, _ = prompts(device)
    expected = model.generate(tokens, attention_mask=mask, **GREEDY)[:, LENGTH:].tolist()
    for cache in ("dynamic", "static"):
        generate = lambda model: model.generate(tokens, attention_mask=mask, cache_implementation=cache, **GREEDY)  # noqa: B023, E731
        found = run_on_ours(model, device, generate)[:, LENGTH:].tolist()
        for row in range(2):
            equal_or_tied(found[row], expected[row], exact, tokens[row], mask[row])


@DEVICES
@pytest.mark.parametrize("kind", ["MistralConfig", "Gemma2Config", "GptOssConfig"])
@torch.no_grad()
def test_continuous_batching(kind, device):
    if device == "cpu":
        pytest.importorskip("psutil", reason="transformers asks it for the memory of the CPU")
    exact, model = network(kind, device)
    tokens = prompts(device)[0][0]
    given = [tokens[:5].tolist(), tokens.tolist(), tokens[-3:].tolist()]
    config = transformers.GenerationConfig(**GREEDY, eos_token_id=-1)
    few = transformers.generation.ContinuousBatchingConfig(num_blocks=16, block_size=8, max_batch_tokens=32)
    expected = [model.generate(torch.tensor([it], device=device), **GREEDY)[0, len(it) :].tolist() for it in given]
    model.set_attn_implementation("paged|fused_core")
    found = model.generate_batch(given, generation_config=config, continuous_batching_config=few, progress_bar=False)
    assert flashcore.info()["last"]["device"].startswith(device)
    assert model.config._attn_implementation == "paged|fused_core"
    for answer in found.values():
        at = given.index(answer.prompt_ids)
        equal_or_tied(answer.generated_tokens, expected[at], exact, torch.tensor(given[at], device=device))


@DEVICES
@KINDS
def test_a_training_step(kind, device):
    exact, model = network(kind, device)
    tokens, mask, _ = prompts(device)
    # What padding predicts is anything, and the first token is predicted by it.
    labels = tokens.clone()
    labels[1, :5] = -100

    def step(model):
        model.zero_grad()
        loss = model.train()(tokens, attention_mask=mask, labels=labels).loss
        loss.backward()
        return loss.detach(), {name: it.grad for name, it in model.named_parameters() if it.grad is not None}

    true_loss, true = step(exact)
    model.set_attn_implementation("eager" if kind == "GptOssConfig" else "sdpa")
    rough_loss, rough = step(model)
    loss, found = run_on_ours(model, device, step)
    assert flashcore.info()["last"]["problem"].endswith("backward")
    judge(loss, rough_loss, true_loss, "loss")
    assert found.keys() == rough.keys() == true.keys()
    for name in found:
        # Where all experts are taken, what a router learns is a small difference of their answers.
        if "router" not in name:
            judge(found[name], rough[name], true[name], name)


def test_names_that_transformers_takes_for_itself_are_refused():
    with pytest.raises(ValueError, match="name='flash', expected one without 'flash'"):
        flashcore.transformers.register("flash")
