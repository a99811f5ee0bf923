"""Tiny random models of transformers on FlashCore, in 16 bits: judged by what the same model in float32 says.

A result passes where its error is at most twice that of transformers' own attention in 16 bits.
"""

import copy
import types

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


# ---- Models that say more than FlashAttention takes: in float32 on the CPU, beside transformers' own attention ------


def pair(kind, make="AutoModelForCausalLM", **more):
    """The same tiny random model, with transformers' own attention and with ours."""
    name = flashcore.transformers.register()
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    }  # fmt: skip
    models = []
    for implementation in ("eager", name):
        config = getattr(transformers, kind)(**{**sizes, **more})
        models.append(getattr(transformers, make).from_config(config, attn_implementation=implementation).eval())
    exact, ours = models
    torch.manual_seed(0)
    for parameter in exact.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours.load_state_dict(exact.state_dict())
    return exact, ours


@pytest.fixture
def calls(monkeypatch):
    """What attention is called with while a test runs."""
    made, real = [], flashcore.transformers.attention

    def spy(module, query, key, value, attention_mask, **more):
        made.append({"attention_mask": attention_mask, **more})
        return real(module, query, key, value, attention_mask, **more)

    monkeypatch.setattr(flashcore.transformers, "attention", spy)
    return made


def near(found, expected):
    torch.testing.assert_close(found, expected, atol=2e-4 * expected.abs().max().item(), rtol=0)


T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    "decoder_start_token_id": 0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["T5Config", "UMT5Config", "LongT5Config"])
def test_biases_of_positions(kind, calls):
    exact, ours = pair(kind, "AutoModelForSeq2SeqLM", **T5)
    tokens, _, mask = prompts("cpu")
    labels = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(2))
    found, expected = (it(tokens, attention_mask=mask, labels=labels) for it in (ours, exact))
    assert any(it["position_bias"] is not None for it in calls)
    near(found.logits, expected.logits)
    found.loss.backward()
    expected.loss.backward()
    of = dict(ours.named_parameters())
    biases = [name for name, it in exact.named_parameters() if "bias" in name and it.grad is not None]
    assert biases and all(of[name].grad.abs().max() > 0 for name in biases)
    for name, it in exact.named_parameters():
        if it.grad is not None and it.grad.abs().max() > 1e-6:
            near(of[name].grad, it.grad)


@torch.no_grad()
def test_biases_of_positions_with_a_cache():
    exact, ours = pair("T5Config", "AutoModelForSeq2SeqLM", **T5)
    tokens, _, mask = prompts("cpu")
    for cache in (None, "static"):
        more = {**GREEDY, "cache_implementation": cache, "output_logits": True, "return_dict_in_generate": True}
        found, expected = (it.generate(tokens, attention_mask=mask, **more) for it in (ours, exact))
        for mine, theirs in zip(found.logits, expected.logits):
            near(mine, theirs)


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_a_bias_keeps_what_the_rest_of_the_call_says(causal, window):
    q, k, v = torch.randn(3, 2, 4, 9, 8, generator=torch.Generator().manual_seed(0))
    bias = torch.randn(1, 4, 9, 9, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, :3] = False
    layer = torch.nn.Module()
    say = {"is_causal": causal, "sliding_window": window, "softcap": 2.0, "scaling": 0.5}
    for padding in (None, mask):
        plain = flashcore.transformers.attention(layer, q, k, v, padding, **say)[0]
        zero = flashcore.transformers.attention(layer, q, k, v, padding, position_bias=torch.zeros(1, 1, 1, 9), **say)[
            0
        ]
        seen = torch.ones_like(mask) if padding is None else padding
        near(zero[seen], plain[seen])
        found = flashcore.transformers.attention(layer, q, k, v, padding, position_bias=bias, **say)[0]
        before = torch.arange(9)[:, None] - torch.arange(9)
        allowed = seen[:, None, None] & (before >= 0 if causal else before > -99)
        allowed = allowed & (before.abs() < window) if window else allowed
        scores = 2.0 * (q @ k.mT * 0.5 / 2.0).tanh() + bias
        expected = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num() @ v
        near(found[seen], expected.transpose(1, 2)[seen])


@torch.no_grad()
def test_packed_rows_keep_to_themselves_with_a_bias():
    q, k, v = torch.randn(3, 1, 2, 7, 8, generator=torch.Generator().manual_seed(0))
    numbers = torch.tensor([[0, 0, 0, 1, 1, 1, 1]]).as_subclass(flashcore.transformers.SequenceNumbers)
    bias = torch.randn(1, 2, 7, 7, generator=torch.Generator().manual_seed(1))
    layer = torch.nn.Module()
    found = flashcore.transformers.attention(layer, q, k, v, numbers, is_causal=True, position_bias=bias)[0]
    for part in (slice(0, 3), slice(3, 7)):
        own = (it[:, :, part] for it in (q, k, v))
        say = {"is_causal": True, "position_bias": bias[..., part, part]}
        near(found[:, part], flashcore.transformers.attention(layer, *own, None, **say)[0])


LLAMA4 = {"attention_chunk_size": 5, "num_local_experts": 2, "num_experts_per_tok": 2, "intermediate_size_mlp": 48}
LLAMA4 |= {"num_hidden_layers": 4, "layer_types": ["chunked_attention"] * 3 + ["full_attention"]}


@torch.no_grad()
def test_chunks_of_llama_4(calls):
    exact, ours = pair("Llama4TextConfig", **LLAMA4)
    tokens, left, right = prompts("cpu")
    for mask in (None, left, right):
        seen = torch.ones_like(left).bool() if mask is None else mask.bool()
        near(ours(tokens, attention_mask=mask).logits[seen], exact(tokens, attention_mask=mask).logits[seen])
    # Not as a tensor of all pairs, which a long prompt has no room for.
    assert all(it["attention_mask"] is None or it["attention_mask"].dim() == 2 for it in calls)
    # Further tokens, of which the cache of a chunked layer forgets the first.
    for mask in (torch.ones_like(left), left):
        say = {**GREEDY, "attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
        found, expected = (it.generate(tokens, **say).logits for it in (ours, exact))
        for mine, theirs in zip(found, expected):
            near(mine, theirs)
    positions = torch.tensor([[*range(5), *range(7)]]).repeat(2, 1)
    say = {"position_ids": positions, "use_cache": False}
    near(ours(tokens, **say).logits, exact(tokens, **say).logits)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["LlamaConfig", "Gemma2Config", "GptOssConfig"])
@pytest.mark.parametrize("numbers", [False, True])
def test_masks_of_all_pairs(kind, numbers):
    exact, ours = pair(kind, **{**MODELS[kind], **({"head_dim": 8} if kind != "LlamaConfig" else {})})
    tokens = prompts("cpu")[0]
    # A prefix of each sequence that sees all of itself, and one key that only its own query sees.
    seen = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    seen[0, :, :5, :5] = True
    seen[1, :, 7:, 6] = False
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = exact(tokens, attention_mask=added, use_cache=False).logits
    near(ours(tokens, attention_mask=added if numbers else seen, use_cache=False).logits, expected)


@torch.no_grad()
def test_packed_batches(calls):
    exact, ours = pair("MistralConfig", sliding_window=3)
    tokens = prompts("cpu")[0]
    positions = torch.tensor([[*range(4), *range(8)], [*range(7), *range(5)]])
    for rows in (slice(0, 2), slice(0, 1)):
        say = {"position_ids": positions[rows], "use_cache": False}
        near(ours(tokens[rows], **say).logits, exact(tokens[rows], **say).logits)
    assert all(isinstance(it["attention_mask"], flashcore.transformers.SequenceNumbers) for it in calls)


def test_positions_that_begin_in_the_middle():
    starts, longest = flashcore.transformers._starts(torch.tensor([[3, 4, 5, 0, 1]]))
    assert (starts.tolist(), longest) == ([0, 3, 5], 3)


@torch.no_grad()
def test_a_static_cache_without_a_mask():
    exact, ours = pair("LlamaConfig")
    tokens = prompts("cpu")[0]
    cache = transformers.StaticCache(config=ours.config, max_cache_len=20)
    found = [ours(part, past_key_values=cache).logits for part in tokens.split(5, 1)]
    near(torch.cat(found, 1), exact(tokens).logits)


@torch.no_grad()
def test_keys_of_another_sequence_than_the_queries():
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_layers": 1, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 1}
    exact, ours = pair("BartConfig", "AutoModelForSeq2SeqLM", **sizes, **heads)
    tokens, left, right = prompts("cpu")
    for mask in (left, right):
        # As many as the keys, and fewer.
        for length in (5, LENGTH):
            say = {"attention_mask": mask, "decoder_input_ids": tokens.flip(1)[:, :length]}
            near(ours(tokens, **say).logits, exact(tokens, **say).logits)


@torch.no_grad()
def test_causal_layers_that_say_they_are_not():
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_layers": 1, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 1, "block_size": 4}
    exact, ours = pair("PegasusXConfig", "AutoModelForSeq2SeqLM", **sizes, **heads, num_global_tokens=2)
    tokens = prompts("cpu")[0]
    say = {"decoder_input_ids": tokens.flip(1)[:, :5]}
    near(ours(tokens, **say).logits, exact(tokens, **say).logits)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Qwen2MoeConfig", "PhimoeConfig"])
def test_windows_that_calls_do_not_say(kind):
    experts = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    exact, ours = pair(kind, sliding_window=4, use_sliding_window=True, **experts)
    tokens, left, _ = prompts("cpu")
    near(ours(tokens).logits, exact(tokens).logits)
    found, expected = (it(tokens, attention_mask=left).logits[left.bool()] for it in (ours, exact))
    near(found, expected)


@torch.no_grad()
def test_models_that_apply_masks_themselves():
    tokens, left, _ = prompts("cpu")
    doge = {"keep_window_size": 4}
    trocr = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    for kind, make, more in (
        ("MegatronBertConfig", "AutoModelForMaskedLM", {}),
        ("DogeConfig", "AutoModelForCausalLM", doge),
        # `AutoModel` does not know it.
        ("TrOCRConfig", "AutoModelForCausalLM", trocr),
    ):
        exact, ours = pair(kind, make, **more)
        near(ours(tokens).logits, exact(tokens).logits)
        found, expected = (it(tokens, attention_mask=left).logits[left.bool()] for it in (ours, exact))
        near(found, expected)


def test_whose_masks_may_be_left_out():
    from transformers.models.llama import modeling_llama
    from transformers.models.voxtral_realtime import modeling_voxtral_realtime

    class Derived(modeling_llama.LlamaConfig):
        model_type = "derived"

    # `AutoModel` knows a model of the second by a name that there is not.
    for kind in (modeling_llama.LlamaConfig, modeling_voxtral_realtime.VoxtralRealtimeTextConfig, Derived):
        assert flashcore.transformers._supports_flash_attn(kind)
    # In doubt none.
    assert not flashcore.transformers._supports_flash_attn(transformers.PreTrainedConfig)


@torch.no_grad()
def test_decoders_that_are_made_bidirectional():
    exact, ours = pair("LlamaConfig", is_causal=False)
    tokens, left, _ = prompts("cpu")
    near(ours(tokens, use_cache=False).logits, exact(tokens, use_cache=False).logits)
    found, expected = (it(tokens, attention_mask=left, use_cache=False).logits[left.bool()] for it in (ours, exact))
    near(found, expected)


@torch.no_grad()
def test_patterns_that_a_caller_adds():
    from transformers.masking_utils import create_causal_mask

    _, ours = pair("LlamaConfig")
    embeddings = torch.zeros(2, 6, 32)
    say = {"inputs_embeds": embeddings, "attention_mask": None, "past_key_values": None}
    assert create_causal_mask(ours.config, **say) is None
    images = torch.tensor([[-1, 0, 0, -1, 1, 1]]).repeat(2, 1)
    found = create_causal_mask(ours.config, **say, block_sequence_ids=images)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    same = (images[0][:, None] == images[0]) & (images[0] >= 0)
    assert found.dtype == torch.bool and found.equal((causal | same).expand(2, 1, 6, 6))
    every_other = lambda batch, head, query, key: (query - key) % 2 == 0
    found = create_causal_mask(ours.config, **say, and_mask_function=every_other)
    assert found.equal((causal & (torch.arange(6)[:, None] - torch.arange(6)).remainder(2).eq(0)).expand(2, 1, 6, 6))


@pytest.mark.parametrize("kind", ["LlamaConfig", "MistralConfig"])
@torch.no_grad()
def test_masks_are_compiled(kind):
    _, ours = pair(kind, sliding_window=3)
    tokens = prompts("cpu")[0]
    found = torch.compile(ours, fullgraph=True, backend="eager")(tokens, use_cache=False).logits
    near(found, ours(tokens, use_cache=False).logits)


REFUSED = {
    "indices": ({"indices": torch.zeros(2, 3, 1)}, NotImplementedError, "indices=.* expected None"),
    "block_indices": ({"block_indices": torch.zeros(2, 1)}, NotImplementedError, "block_indices=.* expected None"),
    "head_mask": ({"head_mask": torch.ones(2)}, NotImplementedError, "head_mask=.* expected None"),
    "output_attentions": ({"output_attentions": True}, NotImplementedError, "output_attentions=True.* expected False"),
    "dropout": ({"dropout": 0.5}, NotImplementedError, "dropout=0.5.*set attention_dropout=0.0"),
    "dropout with a bias": (
        {"dropout": 0.5, "position_bias": torch.zeros(1, 2, 3, 3)}, NotImplementedError, "dropout=0.5"
    ),
    "sequences with a bias": (
        {"cu_seq_lens_q": torch.tensor([0, 6]), "position_bias": torch.zeros(1, 2, 3, 3)},
        NotImplementedError, "cu_seq_lens_q was given together with position_bias",
    ),
    "sequences with a mask": (
        {"cu_seq_lens_q": torch.tensor([0, 6]), "attention_mask": torch.ones(1, 1, 3, 3)},
        NotImplementedError, "cu_seq_lens_q was given together with an attention_mask",
    ),
    "numbers for padding": ({"attention_mask": torch.zeros(2, 3)}, ValueError, r"attention_mask is \[2, 3\] of .*float"),
    "another batch": ({"attention_mask": torch.ones(3, 3).bool()}, ValueError, r"attention_mask is \[3, 3\]"),
    "no tensor": ({"attention_mask": [[1, 1]]}, TypeError, "attention_mask is a .*list"),
    "whole numbers for pairs": (
        {"attention_mask": torch.ones(2, 1, 3, 3, dtype=torch.int64)}, TypeError, "attention_mask has element type"
    ),
    "too few keys": ({"attention_mask": torch.ones(2, 1, 3, 2)}, ValueError, "attention_mask has shape"),
    "a bias of other heads": ({"position_bias": torch.zeros(1, 5, 3, 3)}, ValueError, "position_bias has shape"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_served_is_refused_by_name(what):
    say, kind, message = REFUSED[what]
    q = torch.randn(2, 2, 3, 8)
    with pytest.raises(kind, match=message):
        flashcore.transformers.attention(torch.nn.Module(), q, q, q, **{"attention_mask": None, **say})


@pytest.mark.parametrize(
    "name", ["block_table", "position_bias", "indices", "dropout", "layer_types", "is_causal", "model_type"]
)
def test_continuous_batching_refuses_by_name(name):
    layer, rows = torch.nn.Module(), torch.randn(1, 2, 3, 8)
    layer.layer_idx, say = 0, {name: False if name == "is_causal" else torch.ones(1)}
    configs = {
        "layer_types": types.SimpleNamespace(layer_types=["chunked_attention"], attention_chunk_size=4),
        # One that changes its masks.
        "model_type": transformers.DogeConfig(),
    }
    if name in configs:
        layer.config, say = configs[name], {}
    batch = ("cache", "cu_seq_lens_q", "cu_seq_lens_k", "max_seqlen_q", "max_seqlen_k", "read_index", "write_index")
    with pytest.raises(NotImplementedError, match=name):
        flashcore.transformers.paged(layer, rows, rows, rows, None, **dict.fromkeys(batch), **say)


@torch.no_grad()
def test_continuous_batching_takes_the_window_of_the_call():
    """Exaone 4 has one window in all of its layers, and says None in the calls of those without."""
    q, k, v = torch.randn(3, 1, 2, 7, 8, generator=torch.Generator().manual_seed(0))
    layer, lengths = torch.nn.Module(), {"full_attention": 7, "sliding_attention": 3}
    layer.layer_idx, layer.sliding_window = 0, 2
    starts = {name: torch.tensor([0, length]) for name, length in lengths.items()}
    whole = (k[0].transpose(0, 1), v[0].transpose(0, 1))
    for window, kind in ((None, "full_attention"), (2, "sliding_attention")):
        keys, values = (it[-lengths[kind] :] for it in whole)
        cache = types.SimpleNamespace(update=lambda keys=keys, values=values, **_: (keys, values))
        found, _ = flashcore.transformers.paged(
            layer, q[:, :, -1:], k, v, None, cache=cache, cu_seq_lens_q=torch.tensor([0, 1]), cu_seq_lens_k=starts,
            max_seqlen_q=1, max_seqlen_k=lengths, read_index=None, write_index=None, sliding_window=window,
        )  # fmt: skip
        visible = slice(-2, None) if window else slice(None)
        scores = (q[0, :, -1:] @ k[0, :, visible].mT) * 8**-0.5
        near(found, (scores.softmax(-1) @ v[0, :, visible]).transpose(0, 1))


def test_names_that_transformers_takes_for_itself_are_refused():
    with pytest.raises(ValueError, match="name='flash', expected one without 'flash'"):
        flashcore.transformers.register("flash")
