"""FLOPs against what torch itself counts, and the cache against what transformers really holds."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from moesaic.families.costs import attention_layers, flops_per_token, kv_cache_bytes
from tests.tiny_models import SIZES

LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
}
MODELS = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 16}),
    ("phi3", {}),
    ("gemma3_text", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    ("deepseek_v3", LATENT),
    ("deepseek_v2", LATENT),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 3}),
]


def make(model_type, changes):
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    config._attn_implementation = "eager"  # what is counted must not depend on a fused kernel
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def shapes_of(model):
    return {n: tuple(p.shape) for n, p in model.named_parameters()}


@pytest.mark.parametrize(("model_type", "changes"), MODELS, ids=lambda v: v if isinstance(v, str) else "")
def test_flops_equal_those_that_torch_counts(model_type, changes):
    model, tokens = make(model_type, changes), 12
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(tokens)[None], use_cache=False)
    # An eager attention computes all T*T scores, of which a causal model needs those attended.
    shapes, config = shapes_of(model), model.config.to_dict()
    matrices = flops_per_token(shapes, config, 1) - sum(
        2 * (w.query + w.value) for w in attention_layers(shapes, config).values()
    )
    everything = sum(2 * (w.query + w.value) * tokens for w in attention_layers(shapes, config).values())
    assert counter.get_total_flops() == tokens * (matrices + everything)


def test_mean_attended_positions_of_a_causal_and_a_windowed_layer():
    shapes = {f"model.layers.0.self_attn.{n}_proj.weight": (3, 3) for n in "qkvo"}
    base = {"num_hidden_layers": 1, "model_type": "mistral"}
    matrices = 2 * 4 * 9
    full = flops_per_token(shapes, base, 10) - matrices
    assert full == round(2 * (3 + 3) * sum(range(1, 11)) / 10)
    windowed = flops_per_token(shapes, {**base, "sliding_window": 4}, 10) - matrices
    assert windowed == round(2 * (3 + 3) * sum(min(i, 4) for i in range(1, 11)) / 10)


@pytest.mark.parametrize(("model_type", "changes"), MODELS, ids=lambda v: v if isinstance(v, str) else "")
def test_cache_bytes_equal_those_that_transformers_holds(model_type, changes):
    model, tokens = make(model_type, changes), 12
    with torch.no_grad():
        cache = model(torch.arange(tokens)[None], use_cache=True).past_key_values
    held = sum(t.numel() * 4 for layer in cache.layers for t in (layer.keys, layer.values))
    config = model.config.to_dict()
    # transformers keeps window - 1 positions of a windowed layer: the next token is the window's last.
    windows = sum(t == "sliding_attention" for t in config.get("layer_types") or [])
    slack = windows * attention_layers(shapes_of(model), config)[0].cached * 4
    assert kv_cache_bytes(shapes_of(model), config, tokens, 4) == held + slack


def test_windows_follow_the_config():
    shapes = {f"model.layers.{i}.self_attn.{n}_proj.weight": (2, 2) for n in "qkvo" for i in range(6)}
    config = {"num_hidden_layers": 6, "sliding_window": 10}

    def windowed(**changes):
        return (6 * 400 - kv_cache_bytes(shapes, {**config, **changes}, 100, 1)) // (4 * 90)

    assert windowed(model_type="mistral") == 6
    assert windowed(model_type="qwen2") == 0
    assert windowed(model_type="qwen2", use_sliding_window=True) == 6
    assert windowed(model_type="gemma2") == 3
    assert windowed(model_type="gemma3_text") == 5
    assert windowed(model_type="moesaic_gemma3_text") == 5
    assert windowed(model_type="gemma3_text", layer_types=["full_attention"] * 5 + ["sliding_attention"]) == 1
    assert windowed(model_type="llama", sliding_window=None) == 0
