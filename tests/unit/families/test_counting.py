"""Parameter counts against the numbers of elements of real torch models, and the sizes in docs/plan.md."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moesaic.common.errors import MoesaicError
from moesaic.families.counting import count_shapes, is_routed
from moesaic.families.dense_table import FAMILIES
from moesaic.planning import count_parameters

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

DEEPSEEK = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
NATIVE_MOES = {
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 3},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {
        **DEEPSEEK,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        **DEEPSEEK,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
}


def make(model_type, **changes):
    sizes = {**TINY, **changes}
    config = AutoConfig.for_model(model_type, **sizes)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def numel(model):
    """Weights of a model, each tied one once; correction biases of routers are buffers and belong to the weights."""
    buffers = sum(b.numel() for n, b in model.named_buffers() if "correction_bias" in n)
    return buffers + sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_dense_count_from_the_config_alone(family, tied):
    model = make(family, tie_word_embeddings=tied, head_dim=8)
    count = count_parameters(model.config.to_dict())
    assert count.total == count.active == numel(model)
    assert count.embeddings == 64 * 32 * (1 if tied else 2)
    assert count.total_without_embeddings == numel(model) - count.embeddings
    assert (count.routed, count.moe_layers, count.num_experts, count.top_k) == (0, 0, 0, 0)


def expected_routed(model):
    return sum(
        p.numel()
        for n, p in model.named_parameters()
        if ".experts." in n or "block_sparse_moe.input" in n or "block_sparse_moe.output" in n
    )


@pytest.mark.parametrize("original_format", [True, False], ids=["family layout", "fused layout"])
@pytest.mark.parametrize("family", NATIVE_MOES)
def test_native_moe_count_from_stored_tensors(family, original_format, tmp_path):
    from moesaic.checkpoint.source import open_checkpoint
    from moesaic.families.costs import language_config

    model = make(family, **NATIVE_MOES[family])
    model.save_pretrained(tmp_path, save_original_format=original_format)
    checkpoint = open_checkpoint(tmp_path)
    count = count_shapes({n: i.shape for n, i in checkpoint.tensors.items()}, language_config(checkpoint))
    changes = NATIVE_MOES[family]
    experts = next(changes[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if k in changes)
    routed = expected_routed(model)
    assert routed > 0
    assert count.total == numel(model)
    assert count.routed == routed
    assert count.active == numel(model) - routed + routed * changes["num_experts_per_tok"] // experts
    assert count.num_experts == experts
    assert count.moe_layers == (1 if "first_k_dense_replace" in changes else 2)
    shared = sum(p.numel() for n, p in model.named_parameters() if ".shared_expert" in n and "_gate." not in n)
    shared += sum(p.numel() for n, p in model.named_parameters() if ".shared_mlp." in n)
    assert count.shared == shared
    assert count.router == experts * 32 * count.moe_layers + router_biases(model)


def router_biases(model):
    tensors = list(model.named_parameters()) + list(model.named_buffers())
    return sum(t.numel() for n, t in tensors if "correction_bias" in n or n.endswith("router.bias"))


def divmoe_config(model_type, *, hidden, width, layers, heads, kv_heads, head_dim, vocab, tied=True):
    """N=4, M=K=2: the configuration of every size in docs/plan.md."""
    return {
        "model_type": f"moesaic_{model_type}",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": width // 2,
        "num_shared_experts": 0,
        "moe_layers": list(range(layers)),
        "expert_mlp_bias": False,
    }


QWEN3_4B = divmoe_config("qwen3", hidden=2560, width=9728, layers=36, heads=32, kv_heads=8, head_dim=128, vocab=151936)
QWEN3_1_7B = divmoe_config(
    "qwen3", hidden=2048, width=6144, layers=28, heads=16, kv_heads=8, head_dim=128, vocab=151936
)
LLAMA_1B = divmoe_config("llama", hidden=2048, width=8192, layers=16, heads=32, kv_heads=8, head_dim=64, vocab=128256)


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [(QWEN3_4B, 12.1, 4.0), (QWEN3_1_7B, 4.9, 1.7), (LLAMA_1B, 3.7, 1.2)],
    ids=["Qwen3-4B", "Qwen3-1.7B", "Llama-3.2-1B"],
)
def test_size_claims_of_divmoe(config, total, active):
    count = count_parameters(config)
    assert round(count.total / 1e9, 1) == total
    assert round(count.active / 1e9, 1) == active


def test_qwen3_4b_without_embeddings_and_by_hand():
    count = count_parameters(QWEN3_4B)
    assert round(count.active_without_embeddings / 1e9, 1) == 3.6
    ffn = 3 * 9728 * 2560
    attention = 2 * 32 * 128 * 2560 + 2 * 8 * 128 * 2560 + 2 * 128
    layer = attention + 2 * 2560 + 8 * 2560
    assert count.active == 151936 * 2560 + 36 * (layer + ffn) + 2560
    assert count.routed == 36 * 4 * ffn
    dense = {k: v for k, v in QWEN3_4B.items() if "expert" not in k and not k.startswith("moe_")}
    assert count_parameters({**dense, "model_type": "qwen3"}).total == 4_022_468_096  # the released Qwen3-4B


def test_a_family_outside_the_table_is_refused_with_the_reason():
    with pytest.raises(MoesaicError, match="gpt2 cannot be a base: its FFN has no gate"):
        count_parameters({"model_type": "gpt2"})


@pytest.mark.parametrize(
    ("name", "routed"),
    [
        ("model.layers.3.mlp.experts.gate_up_proj", True),
        ("model.layers.3.mlp.experts.17.down_proj.weight", True),
        ("model.layers.3.block_sparse_moe.experts.0.w1.weight", True),
        ("model.layers.3.block_sparse_moe.input_linear.weight", True),
        ("model.layers.3.mlp.shared_experts.gate_proj.weight", False),
        ("model.layers.3.mlp.shared_expert.gate_proj.weight", False),
        ("model.layers.3.shared_mlp.input_linear.weight", False),
        ("model.layers.3.mlp.gate.weight", False),
    ],
)
def test_routed_expert_names(name, routed):
    assert is_routed(name) is routed


def test_prediction_layers_beyond_the_depth_and_other_modalities_are_apart():
    shapes = {
        "model.language_model.embed_tokens.weight": (10, 4),
        "model.language_model.layers.0.mlp.gate_proj.weight": (6, 4),
        "model.language_model.layers.1.mlp.gate_proj.weight": (6, 4),
        "model.vision_tower.layers.0.weight": (100, 4),
        "lm_head.weight": (10, 4),
    }
    count = count_shapes(shapes, {"num_hidden_layers": 1, "tie_word_embeddings": False})
    assert (count.total, count.not_run, count.other_modalities) == (40 + 24 + 40, 24, 400)


def test_missing_number_of_active_experts_is_named():
    with pytest.raises(MoesaicError, match="does not say how many experts a token uses"):
        count_shapes({"model.layers.0.mlp.experts.down_proj": (2, 3, 4)}, {"model_type": "odd"})
