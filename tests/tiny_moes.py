"""Tiny random checkpoints of the MoE families that others made, for tests; every parameter is drawn at random."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

EXPERTS = 8
TOP_K = 2
VOCABULARY = 96

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts_per_tok": TOP_K,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_MLA: dict[str, Any] = {
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}

MOE_FAMILIES: dict[str, dict[str, Any]] = {
    "olmoe": {"num_experts": EXPERTS, "num_key_value_heads": 4},
    "flex_olmo": {"num_experts": EXPERTS, "num_key_value_heads": 4},
    "qwen2_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 16, "head_dim": 16},
    "mixtral": {"num_local_experts": EXPERTS},
    "gpt_oss": {"num_local_experts": EXPERTS, "head_dim": 8, "sliding_window": 8},
    "granitemoe": {"num_local_experts": EXPERTS},
    "granitemoeshared": {"num_local_experts": EXPERTS, "shared_intermediate_size": 24},
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA | {"n_group": 4, "topk_group": 2},
    "glm4_moe": {
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "n_group": 4,
        "topk_group": 2,
        "head_dim": 8,
        "first_k_dense_replace": 1,
    },
}


def tiny_moe(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> PreTrainedModel:
    """A random model of `family` with 8 experts, top-2, two layers (of which DeepSeek's and GLM's first is dense)."""
    settings = AutoConfig.for_model(family, **{**_COMMON, **MOE_FAMILIES[family], **config})
    model = AutoModelForCausalLM.from_config(settings).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return model.eval()


def save_tiny_moe(folder: Path, family: str, *, fused: bool = False, **options: Any) -> Path:
    """Save a tiny model in the family's hub layout, or (`fused`) with one stacked tensor per layer and matrix."""
    tiny_moe(family, **options).save_pretrained(folder, save_original_format=not fused)
    return folder
