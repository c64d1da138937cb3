"""Tiny random dense checkpoints of every supported base, for tests: a few KB to a few hundred KB, seconds never.

The FFN width 48 divides by 2, 3, 4 and 6; the sliding windows are shorter than the test sequences; every parameter,
norms and biases included, is drawn at random, so that a tensor that is lost, swapped or left as it was is seen.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

BASES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "olmo3",
    "smollm3",
    "granite",
    "phi3",
)
BASES_WITH_MLP_BIAS = ("llama", "granite", "smollm3")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Of a config of any family."""

VOCABULARY = 96
HIDDEN = 32
INTERMEDIATE = 48

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"head_dim": 8, "sliding_window": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "olmo2": {},
    "olmo3": {"sliding_window": 8},
    "smollm3": {"no_rope_layer_interval": 2},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    },
    "phi3": {},
}

_WITH_LAYER_TYPES = ("gemma2", "gemma3_text", "olmo3")


def tiny_config(
    base: str, *, tied: bool = False, mlp_bias: bool = False, num_layers: int = 2, **changes: Any
) -> PreTrainedConfig:
    """A tiny configuration of ``base``; ``changes`` are any further fields of its configuration class."""
    fields = _COMMON | _OWN[base] | {"num_hidden_layers": num_layers, "tie_word_embeddings": tied}
    if mlp_bias:
        assert base in BASES_WITH_MLP_BIAS, f"{base} has no FFN biases"
        fields["mlp_bias"] = True
    if base in _WITH_LAYER_TYPES:
        fields["layer_types"] = [("sliding_attention", "full_attention")[i % 2] for i in range(num_layers)]
    return AutoConfig.for_model(base, **(fields | changes))


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draw every parameter from a generator: matrices N(0, 0.15), vectors their initial value plus N(0, 0.1)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.1 * noise if parameter.ndim == 1 else 0.15 * noise)


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Give the parameters ``dtype``; buffers (rope frequencies) keep theirs, as in ``from_pretrained(dtype=...)``."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def tiny_model(
    base: str,
    *,
    tied: bool = False,
    mlp_bias: bool = False,
    num_layers: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **changes: Any,
) -> PreTrainedModel:
    """A tiny random dense model of ``base`` in evaluation mode, in ``dtype``."""
    config = tiny_config(base, tied=tied, mlp_bias=mlp_bias, num_layers=num_layers, **changes)
    model = AutoModelForCausalLM.from_config(config)
    randomize(model, seed)
    return cast(model, dtype).eval()


def save_tiny(
    folder: Path,
    base: str,
    *,
    tied: bool = False,
    mlp_bias: bool = False,
    num_layers: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "5GB",
    **changes: Any,
) -> Path:
    """Write a tiny random dense checkpoint to ``folder``; ``max_shard_size="20KB"`` gives several shards."""
    model = tiny_model(base, tied=tied, mlp_bias=mlp_bias, num_layers=num_layers, dtype=dtype, seed=seed, **changes)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def tiny_gemma3_wrapper(
    *, num_layers: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0, **text_changes: Any
) -> PreTrainedModel:
    """A tiny ``Gemma3ForConditionalGeneration``: the text model of ``gemma3_text`` inside a multimodal wrapper."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig

    text_config = tiny_config("gemma3_text", tied=True, num_layers=num_layers, **text_changes)
    vision_config = SiglipVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = Gemma3Config(
        text_config=text_config,  # pyright: ignore[reportArgumentType]
        vision_config=vision_config,
        mm_tokens_per_image=4,
        boi_token_index=90,
        eoi_token_index=91,
        image_token_index=92,
        tie_word_embeddings=True,
    )
    model = Gemma3ForConditionalGeneration(config)
    randomize(model, seed)
    return cast(model, dtype).eval()


def save_tiny_gemma3_wrapper(
    folder: Path,
    *,
    num_layers: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "5GB",
    **text_changes: Any,
) -> Path:
    """Write a tiny multimodal Gemma-3 checkpoint to ``folder``."""
    model = tiny_gemma3_wrapper(num_layers=num_layers, dtype=dtype, seed=seed, **text_changes)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def tiny_moe_config(base: str, *, tied: bool = False, num_layers: int = 2, **changes: Any) -> PreTrainedConfig:
    """A tiny configuration of our MoE architecture on ``base``: 6 experts, 2 per token; ``changes`` as above."""
    from moesaic.modeling import class_names

    moe = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    mlp_bias = changes.pop("mlp_bias", False)
    dense = tiny_config(base, tied=tied, mlp_bias=mlp_bias, num_layers=num_layers).to_dict()
    names = class_names(base)
    del dense["model_type"], dense["architectures"]
    return AutoConfig.for_model(names["model_type"], **(dense | moe | {"expert_mlp_bias": mlp_bias} | changes))


def tiny_moe_model(
    base: str,
    *,
    tied: bool = False,
    num_layers: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **changes: Any,
) -> Any:
    """A tiny random MoE model on ``base`` in evaluation mode."""
    model = AutoModelForCausalLM.from_config(tiny_moe_config(base, tied=tied, num_layers=num_layers, **changes))
    randomize(model, seed)
    return cast(model, dtype).eval()
